"""The pages of operations, end to end and capacity: tables and charts of every kind of run, computed sentences."""

from __future__ import annotations

import copy
import inspect
import json
import re
from dataclasses import replace
from html import unescape

import model_records as made
import pytest
from conftest import CPU, MI355X, UNKNOWN_GPU
from markdown_it import MarkdownIt
from model_records import ABSENT, DEFAULT, WRONG, spread

from escher_book import findings, vega
from escher_book.pages import capacity, e2e, ops
from escher_book.tables import Table, Text, interval, number, percent, small_percent, value
from escher_kernels import targets, workload
from escher_kernels.records import Record
from validation import derive, roofline
from validation.derive import LoadedRun

GIB = 2**30
V100 = targets.Found("cuda", "Tesla V100-SXM2-32GB", "sm_70", 80, 34079899648)
ESCHER = workload.load("escher_14b_480p")
ON_CPU = workload.fit(ESCHER, "cpu", 24 * GIB)
WAN = workload.load("wan2_2_t2v_a14b")  # no pilot, no cache
NASTY = 'a|b <script>alert(1)</script> *x* _y_ `z` [l](u) \\ & "q" $1$'
PAGES = {"ops": ops, "e2e": e2e, "capacity": capacity}
TITLES = {
    "roofline_chart": "A6  Roofline", "bytes_strip": "A6  Roofline, bytes only",
    "theory_chart": "A7  Theory against measured", "mfu_chart": "A8  MFU",
    "chunk_chart": "A8b  Time of each chunk", "ledger_chart": "A10  Gap ledger",
    "footprint": "A8c  Memory footprint",
}  # fmt: skip


def theory(op, peak=made.PEAK, rate=made.RATE):
    return max(op.flop / peak, op.bytes / rate)


def near_theory(peak=made.PEAK, rate=made.RATE, factor=1.3, **own):
    """Default paths at `factor` times theory, others at 1.15, with some noise; `own`: op__path (_ for .) -> time."""

    def of(op, path):
        name = f"{op.name.replace('.', '_')}__{path}"
        if name in own:
            return own[name]
        if op.kind == "attention" and path not in (DEFAULT, "sdpa_flash", "sdpa_math"):
            return f"{path} is not installed"
        return spread(theory(op, peak, rate) * (factor if path == DEFAULT else 1.15), name)

    return of


def family_ops(spec=ESCHER, kind="gpu", dtype="bf16", peak=made.PEAK, rate=made.RATE, **own):
    return made.around("ops", made.ops(spec, near_theory(peak, rate, **own), kind, dtype))


def family_e2e(spec=ESCHER, eager=0.25, compiled=0.22, **more):
    eager, compiled = (t if isinstance(t, str) else spread(t, name) for t, name in ((eager, "e"), (compiled, "c")))
    return made.around("e2e", made.e2e(spec, eager, compiled, **more))


def family_capacity(found):
    total = found.total_memory_bytes
    return made.capacity(total, int(total * 0.97), "host" if found.kind == "cpu" else "device")


HOST = {"kind": "cpu", "peak": 10**12, "rate": 2 * 10**10}  # a host with a ridge of 50 FLOP/B
HOST_ROOFS = made.roofs(10**12, 2 * 10**10, probed=2 * 10**12)


def gpu(*parts, found=MI355X, spec=ESCHER, **more):
    return {"records": [r for p in parts for r in p], "found": found, "workload": spec.to_json(), **more}


def scenarios() -> dict[str, dict]:
    """Name -> what a run is made of."""
    roofs, whole = made.roofs(), (family_ops(), family_e2e(gaps={"eager": 0.004, "compiled": 0.001}))
    nothing = made.ops(ESCHER, lambda *_: NASTY)
    wan = (family_ops(WAN), family_e2e(WAN, 12.0, 11.0))
    cpu = (family_ops(ON_CPU, **HOST), family_e2e(ON_CPU, 0.6, 0.5), family_capacity(CPU), HOST_ROOFS)
    tries = [Record("e2e", "compile", role="probe", params={"mode": "max-autotune"}, skipped=f"unavailable: {NASTY}")]
    fp16 = (family_ops(dtype="fp16", peak=10**14, rate=8 * 10**11), family_e2e(eager=2.6, compiled=2.5, dtype="fp16"))
    return {
        "full": gpu(*whole, family_capacity(MI355X), roofs),
        "cpu": gpu(*cpu, found=CPU, spec=ON_CPU),
        "only ops": gpu(family_ops()),
        "only e2e": gpu(family_e2e()),
        "no roofs": gpu(*whole),
        "all skipped": gpu(nothing, made.e2e(ESCHER, NASTY, NASTY), roofs),
        "one wrong": gpu(family_ops(rope__default=WRONG, rope__compiled=WRONG), family_e2e(), roofs),
        "no compiler": gpu(family_ops(), family_e2e(compiled=f"unavailable: {NASTY}", tries=tries), roofs),
        "fp16": gpu(*fp16, made.roofs(10**14, 8 * 10**11, "fp16"), family_capacity(V100), found=V100, dtype="fp16"),
        "another target": gpu(*cpu, found=CPU, spec=ON_CPU, asked="mi355x"),
        "another GPU": gpu(*whole, family_capacity(MI355X), roofs, asked="v100"),
        "unknown GPU": gpu(*whole, family_capacity(UNKNOWN_GPU), roofs, found=UNKNOWN_GPU),
        "no pilot, no cache": gpu(*wan, family_capacity(MI355X), roofs, spec=WAN),
        "few blocks": gpu(made.ops(ESCHER, lambda *_: [1e-3]), made.e2e(ESCHER, [0.3], [0.2]), roofs),
    }  # fmt: skip


SCENARIOS = scenarios()


@pytest.fixture
def run_of(made_run):
    return lambda name_or_parts: made_run(
        **(SCENARIOS[name_or_parts] if isinstance(name_or_parts, str) else name_or_parts)
    )


def functions(page):
    """What a notebook can show of a page."""
    own = [f for f in vars(page).values() if inspect.isfunction(f) and f.__module__ == page.__name__]
    return [f for f in own if not f.__name__.startswith("_") and list(inspect.signature(f).parameters) == ["run"]]


def shown(run: LoadedRun) -> dict[str, Table | Text | dict | None]:
    """Everything that the pages of the measured families show; a chart as its specification."""
    made_of = {f"{n}.{f.__name__}": f(run) for n, page in PAGES.items() if n in run.files for f in functions(page)}
    return {name: x.to_dict() if hasattr(x, "to_dict") else x for name, x in made_of.items()}


def text_of(item: Table | Text | dict) -> str:
    if isinstance(item, Table):
        return f"{item.to_markdown()}\n{json.dumps(item.raw, allow_nan=False)}"
    return item.markdown if isinstance(item, Text) else json.dumps(item, allow_nan=False)


def everything(run: LoadedRun) -> str:
    return "\n".join(text_of(item) for item in shown(run).values() if item is not None)


# --------------------------------------------------------------------------------------------- everything, on every run


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_table_and_chart_can_be_shown(run_of, name):
    run = run_of(name)
    items = shown(run)
    assert len(items) >= 8
    for where, item in items.items():
        if item is None:
            assert where == "capacity.peaks"
        elif isinstance(item, Table):
            assert item.cells, where
            for cells in item.cells:
                for column, cell in zip(item.columns, cells, strict=True):
                    assert isinstance(cell, str) and (cell or column.optional), (where, column.title, cells)
                    assert not re.search(r"\b(nan|inf|None)\b|\de[+]\d", cell), (where, cells)
            json.dumps(item._repr_mimebundle_(), allow_nan=False)
        elif isinstance(item, Text):
            assert item.markdown and not re.search(r"\b(nan|inf|None)\b", item.markdown), where
        else:
            vega.lint(item)
            assert item["title"]["text"] == TITLES[where.partition(".")[2]].replace("chunk", run_unit(run))
    for family, page in PAGES.items():
        if family not in run.files:
            assert page.finding(run).markdown == "This family was not measured."


def run_unit(run: LoadedRun) -> str:
    return roofline.spec_of(run).unit


@pytest.mark.parametrize("name", ["full", "cpu"])
def test_charts_are_drawn_with_their_titles(run_of, name):
    drawn = {}
    for where, item in shown(run_of(name)).items():
        if isinstance(item, dict):
            svg = vega.svg(item)
            marks = re.findall(r'<g class="mark-(symbol|rect|rule) role-mark[^>]*>(.*?)</g>', svg, re.S)
            drawn[where.partition(".")[2]] = sum(len(re.findall(r"<(?:path|line) ", inside)) for _, inside in marks)
            assert TITLES[where.partition(".")[2]].replace("  ", " ") in re.sub(r"\s+", " ", unescape(svg)), where
    assert set(drawn) == set(TITLES)
    with_flop, without = 12, 13
    assert drawn["roofline_chart"] >= 2 * with_flop and drawn["bytes_strip"] >= 2 * without + 1
    assert drawn["theory_chart"] >= 4 * 25 and drawn["chunk_chart"] >= 12 + 2
    assert drawn["mfu_chart"] >= 2 * 5 * 2 and drawn["ledger_chart"] >= 2 * 6 and drawn["footprint"] >= 3 * 2


def test_charts_hold_what_was_measured_and_no_more(run_of):
    def rows(item, key):
        return [r for d in item.to_dict()["datasets"].values() for r in d if key in r]

    run = run_of("full")
    assert len(rows(ops.roofline_chart(run), "gflop")) == 12 and len(rows(ops.bytes_strip(run), "samples")) == 13
    assert len(rows(e2e.chunk_chart(run), "chunk")) == 12
    steps = [r for r in rows(e2e.ledger_chart(run), "part") if r["mode"] == "eager"]
    for before, after in zip(steps[:-1], steps[1:-1], strict=False):
        assert after["start"] == pytest.approx(before["end"])
    assert steps[-1]["end"] == pytest.approx(steps[-2]["end"]) and steps[-1]["share"] == pytest.approx(100)
    wrong = run_of("one wrong")
    assert {r["op"] for r in rows(ops.bytes_strip(wrong), "op")} >= {"norm.self"} and "rope" not in {
        r["op"] for r in rows(ops.bytes_strip(wrong), "op")
    }
    unknown = [r["ratio"] for r in rows(ops.roofline_chart(run_of("only ops")), "gflop")]
    assert set(unknown) == {"–"}  # without roofs no ratio is known
    skipped = run_of("all skipped")
    for item in (ops.roofline_chart, ops.bytes_strip, e2e.chunk_chart, e2e.ledger_chart):
        assert "Nothing to draw" in item(skipped).markdown
    assert {r["what"] for r in rows(ops.theory_chart(skipped), "what")} == {"theory"}
    assert {r["scope"] for r in rows(e2e.mfu_chart(skipped), "share")} == {roofline.SCOPES["theory"]}


def test_both_paths_of_every_operation_are_in_the_tables(run_of):
    run = run_of("full")
    table = ops.times(run)
    assert [c[0] for c in table.cells] == [op.name for op in workload.ops(ESCHER)] and len(table.cells) == 25
    raw = {r["op"]: r for r in table.raw}
    linear = raw["ffn.linear1"]
    assert linear["theory_s"] == pytest.approx(2 * 4680 * 5120 * 13824 / 1e15)
    assert linear["ratio_optimized"] == pytest.approx(1.15, rel=0.01) and linear["band"] == "tunable"
    assert raw["norm.self"]["launch_bound"] and "launch-bound" in table.cells[2]
    totals = {r["category"]: r for r in ops.totals(run).raw}
    assert totals["ffn"]["theory_s"] == pytest.approx(40 * (2 * 662.4903168e9 / 1e15 + 4 * 4680 * 13824 / 5e12))
    assert list(totals) == ["self_attn", "cross_attn", "ffn", "norm", "cache", "time"]
    assert [c.title for c in table.columns][:3] == ["operation", "judged", "bound by"]
    for cells in table.cells:
        assert cells[1] == ("launch-bound" if raw[cells[0]]["launch_bound"] else raw[cells[0]]["band"])
    assert table.cells[2][1] == "launch-bound" and raw["norm.self"]["band"] is None
    shares = {c[0]: c[2] for c in ops.totals(run).cells}
    assert shares.pop("time") == "< 0.1 %"  # 0.98 GFLOP of 185,621
    assert sum(float(s.rstrip(" %")) for s in shares.values()) == pytest.approx(100, abs=0.5)
    assert len(ops.attention(run).cells) == 2 * 7
    side = [c.title for c in ops.work(run).columns].index("side by the rated ridge")
    assert ops.work(run).cells[4][side] == "compute"
    [flop, moved] = ops.calibration(run).cells
    assert flop[1:] == ["4,641.44", "4,641.7", "-0.006 %", "within 5 %"] and moved[3:] == ["-0.008 %", "within 5 %"]


@pytest.mark.parametrize(
    ("spec", "drifts", "judged"),
    [
        (ON_CPU, ["-0.006 %", "-0.008 %"], "n/a: what ran is a derived workload"),
        (WAN, ["–", "–"], "n/a: workload wan2_2_t2v_a14b declares no pilot totals"),
        (replace(ESCHER, ffn=20480), ["+13.738 %", "+12.549 %"], "DRIFT over 5 %"),
    ],
)
def test_calibration_is_judged_only_where_it_applies(made_run, spec, drifts, judged):
    """FFN 20480: 4 x 4680 x 5120 x 6656 FLOP more; bytes of two larger weights, of four larger inner activations."""
    table = ops.calibration(made_run([], workload=spec.to_json()))
    assert [c[3] for c in table.cells] == drifts and {c[4] for c in table.cells} == {judged}


@pytest.mark.parametrize(
    ("frac", "shown"), [(0.0, "0 %"), (1e-9, "< 0.1 %"), (0.00099, "< 0.1 %"), (0.001, "0.100 %"), (0.0123, "1.23 %"),
                        (1.0, "100 %")],
)  # fmt: skip
def test_a_small_share_says_no_more_than_that(frac, shown):
    assert small_percent(frac) == shown


def test_the_roofs_label_stands_at_the_right_end(run_of):
    def rows(key):
        return [r for d in ops.roofline_chart(run_of("full")).to_dict()["datasets"].values() for r in d if key in r]

    [label] = [r for r in rows("label") if "ridge" in r["label"]]
    assert label["label"] == "1,000 TFLOP/s, ridge 200" and label["rate"] == 1000
    assert label["intensity"] == max(r["intensity"] for r in rows("intensity")) > 200
    faster = run_of({**SCENARIOS["full"], "records": [*family_ops(), *made.roofs(2 * 10**15, 5 * 10**12)]})
    assert "2,000 TFLOP/s, ridge 400" in json.dumps(ops.roofline_chart(faster).to_dict())


# --------------------------------------------------------------------------------------------- another device's peak


def rates(run: LoadedRun) -> list[derive.Estimate]:
    """Every FLOP/s of families 1, 4 and 5."""
    peak = derive.compute(run).roof.flop_s
    found = [r.flop_s for r in roofline.ops(run).every if r.flop_s] if "ops" in run.files else []
    return [peak, *found, *(m.flop_s for m in roofline.mfu(run) if m.flop_s)]


@pytest.mark.parametrize(("name", "key"), [("another target", "mi355x"), ("another GPU", "v100_sxm2_32gb")])
def test_no_share_of_the_targets_peak_is_anywhere(run_of, config, name, key):
    run = run_of(name)
    profile = config.profile(key)
    assert run.selection.profile.key == key and not run.selection.same_device
    text, raw = everything(run), {}
    for item in shown(run).values():
        if isinstance(item, Table):
            assert "% of rated" not in [c.title for c in item.columns] and "MFU, rated" not in [
                c.title for c in item.columns
            ]
            assert "side by the rated ridge" not in [c.title for c in item.columns]
            for r in item.raw:
                raw |= {k: v for k, v in r.items() if "rated_frac" in k}
    assert set(raw.values()) <= {None}
    assert "rated dense" not in text and "% of the rated" not in text and '"rated"' not in text
    for peak in filter(None, profile.dense_peak_flop_s.values()):
        for estimate in rates(run):
            share = estimate.times(1 / peak)
            if share.median < 0.01:  # below that no other figure of these pages has as many digits
                assert percent(share) not in text and f"{number(share.median * 100)} %" not in text
        assert number(peak / 1e12, 4) not in text and f"{peak:.6g}" not in text


@pytest.mark.parametrize("name", ["another target", "another GPU"])
def test_operations_and_end_to_end_do_not_depend_on_a_target_that_is_elsewhere(run_of, name):
    """Two targets with other peaks, and every word and number stays: no share of either can be in it."""
    texts = []
    for asked in ("h100", SCENARIOS[name]["asked"]):
        run = run_of({**SCENARIOS[name], "asked": asked})
        texts.append("".join(text_of(v) for k, v in shown(run).items() if not k.startswith("capacity")))
    assert texts[0] == texts[1]


def test_a_targets_memory_stands_beside_and_is_no_share(run_of):
    run = run_of("another target")
    rated = capacity.amounts(run).cells[-1]
    assert rated[0] == "rated: AMD Instinct MI355X" and rated[2] == "–" and "another device" in rated[-1]
    assert "rated, AMD" not in json.dumps(capacity.footprint(run).to_dict())
    assert "rated, AMD" in json.dumps(capacity.footprint(run_of("full")).to_dict())
    unknown = run_of("unknown GPU")
    assert "rated" not in capacity.finding(unknown).markdown and "rated" not in json.dumps(
        capacity.footprint(unknown).to_dict()
    )


def test_each_run_names_its_own_bases(run_of):
    def heads(name):
        return [c.title for c in e2e.mfu(run_of(name)).columns if c.title.startswith("MFU")]

    assert heads("full") == ["MFU, measured", "MFU, rated", "MFU, pilot"]
    assert heads("cpu") == heads("another target") == ["MFU, measured", "MFU, probed"]
    assert heads("fp16") == heads("no pilot, no cache") == ["MFU, measured", "MFU, rated"]
    assert heads("another GPU") == ["MFU, measured", "MFU, pilot"] and heads("unknown GPU") == ["MFU, measured"]
    assert heads("no roofs") == ["MFU, rated", "MFU, pilot"] and "no basis" not in e2e.mfu(run_of("no roofs")).caption
    assert "no basis in this run" in e2e.mfu(run_of(gpu(family_e2e(WAN, 12.0, 11.0), spec=WAN, found=UNKNOWN_GPU))).caption
    fp16 = ops.finding(run_of("fp16")).markdown
    assert "no BF16 units: the model runs in FP16" in fp16 and "FP16" not in ops.finding(run_of("full")).markdown


# --------------------------------------------------------------------------------------------- special characters


@pytest.mark.parametrize("name", ["all skipped", "no compiler"])
def test_reasons_with_special_characters_break_no_table(run_of, name):
    seen = 0
    for where, item in shown(run_of(name)).items():
        if not isinstance(item, Table):
            continue
        html = MarkdownIt("commonmark").enable("table").render(item.to_markdown())
        for text in (html, item.to_html()):
            cells = [unescape(c) for c in re.findall(r"<t[dh](?: [^>]*)?>(.*?)</t[dh]>", text, re.S)]
            assert cells == [c.title for c in item.columns] + [c for row in item.cells for c in row], where
            assert not re.search(r"<(?:script|em|code|a)\b", text), where
        seen += any(NASTY in cell for row in item.cells for cell in row)
    assert seen >= 1


# --------------------------------------------------------------------------------------------- sentences: operations


def changed(run: LoadedRun, family: str, change) -> LoadedRun:
    """The run with `change(record)` in place of each record of a family; None drops it."""
    content = run.files[family]
    kept = [new for r in content.records if (new := change(r)) is not None]
    return replace(run, files={**run.files, family: replace(content, records=kept)})


def slower(*cases: str, factor: float):
    def change(r: Record) -> Record:
        return replace(r, samples_s=tuple(s * factor for s in r.samples_s)) if r.case in cases else r

    return change


def dropped(*cases: str):
    return lambda r: None if r.case in cases else r


def wrong(*cases: str):
    """A wrong result: no samples, and an error that says so."""

    def change(r: Record) -> Record | None:
        if r.case not in cases:
            return r
        return replace(r, error={**r.error, "ok": False, "rel_frobenius": 0.5}) if r.error else None

    return change


def test_the_sum_of_operations_is_computed(run_of):
    run = run_of("full")
    found = roofline.ops(run)
    text = ops.finding(run).markdown
    totals = [roofline.sum_of_ops(found, p).time_s for p in (DEFAULT, "optimized")]
    assert f"**One chunk is {value(totals[0], 1e-3)} ms (" in text and f"and {value(totals[1], 1e-3)} ms (" in text
    assert "40 blocks, 4,680 query tokens" in text and f"allow {value(roofline.theory_total_s(found), 1e-3)} ms" in text
    share = totals[1].over(workload.pass_flop(ESCHER)).times(1e-15)
    assert f"the sum reaches {percent(share)} of the measured compute roof" in text
    slow = ops.finding(changed(run, "ops", slower("ffn.linear1", "ffn.linear1.compiled", factor=3))).markdown
    assert text.split("\n")[0] != slow.split("\n")[0]
    assert "Most time beyond theory is lost in ffn.linear1 " in slow and "lost in self_attn.flash" in text
    one = run_of("cpu")
    assert "1 block, " in ops.finding(one).markdown
    assert ops.finding(run_of("no pilot, no cache")).markdown.startswith("**One denoising step is ")


@pytest.mark.parametrize(
    ("spec", "said", "judged"),
    [
        (ESCHER, "", ""),
        (ON_CPU, "", ""),
        (replace(ESCHER, ffn=20480), "(FLOP +13.7 %, bytes +12.5 %)", "measures another model. "),
        # 3069.95 MB against 2900, 4641.44 GFLOP against 5000
        (replace(ESCHER, pilot={**ESCHER.pilot, "block_mb": 2900}), "(bytes +5.9 %)", "measures another model. "),
        (replace(ESCHER, pilot={**ESCHER.pilot, "block_gflop": 5000}), "(FLOP -7.2 %)", "measures another model. "),
        (replace(ON_CPU, pilot={**ESCHER.pilot, "block_mb": 2900}), "(bytes +5.9 %)",
         "measures another model. It is not judged: what ran is a derived workload. "),
        (replace(ESCHER, pilot=None), "", ""),
    ],
)  # fmt: skip
def test_a_geometry_that_drifts_is_told_first(run_of, spec, said, judged):
    text = ops.finding(run_of(gpu(family_ops(spec), made.roofs(), spec=spec))).markdown.replace("\n\n", " ").replace("\n", " ")
    start = f"**The geometry drifts from the totals that its workload declares by more than 5 % {said}:** this book {judged}"
    assert text.startswith(start + "**One chunk is") if said else "drifts" not in text
    assert ("not judged: what ran" in text) == ("derived" in judged)


def test_the_drifts_limit_is_the_configurations(run_of):
    spec = replace(ESCHER, pilot={**ESCHER.pilot, "block_mb": 2900})
    run = run_of(gpu(family_ops(spec), made.roofs(), spec=spec))
    other = copy.deepcopy(run.config)
    other["thresholds"]["calibration_drift_pct"]["value"] = 6
    assert "drifts" in ops.finding(run).markdown and "drifts" not in ops.finding(replace(run, config=other)).markdown


def test_a_slow_operation_is_a_kernel_issue(run_of):
    def counts(run):
        return [
            int(n)
            for n in re.findall(r"(\d+) (?:operations|are at|tunable|a kernel|are bound)", ops.finding(run).markdown)
        ]

    run = run_of("full")
    slow = changed(run, "ops", slower("ffn.linear1", "ffn.linear1.compiled", factor=3))
    judged, at_limit, tunable, issue, memory = counts(run)
    assert at_limit + tunable + issue == judged == 25 - sum(r.launch_bound for r in roofline.ops(run).rows)
    assert counts(slow) == [judged, at_limit, tunable - 1, issue + 1, memory]
    assert next(c for c in ops.times(slow).cells if c[0] == "ffn.linear1")[1] == "kernel issue"


def test_an_operation_that_waited_for_the_host_is_not_judged(run_of):
    run = run_of("full")
    waits = changed(run, "ops", lambda r: replace(r, flags=("HOST_BOUND",)) if r.case == "ffn.linear1.compiled" else r)
    for one, judged, named in ((run, "tunable", False), (waits, "launch-bound", True)):
        assert next(c for c in ops.times(one).cells if c[0] == "ffn.linear1")[1] == judged
        sentence = re.search(r"Launch-bound, shown and not judged: ([^:]*?)\.(?:\s|$)", ops.finding(one).markdown)[1]
        assert ("ffn.linear1" in sentence.split(", ")) == named and "norm.self" in sentence.split(", ")


def test_a_wrong_operation_leaves_no_sum_and_is_named(run_of):
    run = run_of("full")
    assert "timed rows gave right results" in ops.finding(run).markdown
    one = changed(run, "ops", wrong("rope", "rope.compiled"))
    text = ops.finding(one).markdown
    assert text.startswith("**No sum of operations:** no time for rope.")
    assert "**Wrong results, shown without a time: rope, rope.compiled.**" in text and "gave right" not in text
    cells = next(c for c in ops.times(one).cells if c[0] == "rope")
    titles = [c.title for c in ops.times(one).columns]
    shown_as = dict(zip(titles, cells, strict=True))
    assert "wrong result: no time is shown" in shown_as["notes"] and shown_as["judged"] == "–"
    assert shown_as["default path"] == shown_as["optimized path"] == shown_as["optimized / theory"] == "–"
    assert "No gap ledger of eager: no time for rope." in e2e.finding(one).markdown
    assert next(r for r in ops.totals(one).raw if r["category"] == "norm")["default_s"] is None
    skipped = changed(run, "ops", dropped("rope", "rope.compiled"))
    assert "no time for rope" in ops.finding(skipped).markdown and "gave right results" in ops.finding(skipped).markdown


def test_operations_of_one_shape_that_disagree_are_named(run_of):
    run = run_of("full")
    assert "Operations of one shape agree within their intervals." in ops.finding(run).markdown
    apart = ops.finding(changed(run, "ops", slower("self_attn.k", factor=1.5))).markdown
    assert "**Operations of one shape disagree beyond their intervals:** self_attn.k is slower than " in apart
    assert "agree within" not in apart
    none = ops.finding(run_of("all skipped")).markdown
    assert "of one shape" not in none  # nothing was timed, so nothing agrees


def test_without_a_roof_nothing_is_judged(run_of):
    run = run_of("no roofs")
    text = ops.finding(run).markdown
    assert "What the roofs allow is not known: no compute and no bandwidth roof in this run." in text
    for word in ("at the limit", "Most time beyond theory", "Launch-bound", "of the measured compute roof"):
        assert word in ops.finding(run_of("full")).markdown and word not in text
    judged, bound = ([c.title for c in ops.times(run).columns].index(t) for t in ("judged", "bound by"))
    assert {c[judged] for c in ops.times(run).cells} == {c[bound] for c in ops.times(run).cells} == {"–"}
    one = changed(run_of("full"), "bandwidth", wrong("copy.2GiB"))
    assert "not known: no bandwidth roof in this run" in ops.finding(one).markdown
    assert "No gap ledger of eager: no bandwidth roof in this run." in e2e.finding(one).markdown
    assert "of the measured compute roof" in e2e.finding(one).markdown  # MFU needs the compute roof alone


@pytest.mark.parametrize(("family", "page"), [("ops", ops), ("e2e", e2e)])
def test_the_anchors_are_told(run_of, family, page):
    run = run_of("full")
    assert "The anchors were steady meanwhile." in page.finding(run).markdown
    last = changed(run, family, lambda r: replace(r, samples_s=(0.02,)) if r.role == "anchor" and r.block else r)
    text = page.finding(last).markdown
    assert "**Noisy:** an anchor moved meanwhile (anchor.gemm by " in text and "anchor.copy by " in text and "steady" not in text
    assert "**Not the machine of the roofs:** anchor.gemm by -25 %" in text  # the median of 100 and 50, against 100
    both = changed(run, family, lambda r: replace(r, samples_s=(0.008,)) if r.case == "anchor.copy" else r)
    text = page.finding(both).markdown
    assert "steady meanwhile" in text and "**Not the machine of the roofs:** anchor.copy by 25 %" in text
    for gone in (lambda r: None if r.role == "anchor" else r, lambda r: None if r.role == "anchor" and r.block else r):
        text = page.finding(changed(run, family, gone)).markdown
        assert "steady meanwhile is **unknown**" in text and "were steady" not in text


# --------------------------------------------------------------------------------------------- sentences: end to end


def test_times_and_shares_are_computed(run_of):
    run = run_of("full")
    eager = roofline.e2e(run).rows["eager"]
    text = e2e.finding(run).markdown
    assert text.startswith(f"**Eager: {value(eager.time_s, 1e-3)} ms a chunk**")
    for peak, words in (
        (1e15, "measured compute roof"),
        (2516.6e12, "rated dense BF16 peak"),
        (1360e12, "pilot's peak"),
    ):
        assert f"{percent(eager.flop_s.times(1 / peak))} of the {words}" in text
    slow = e2e.finding(changed(run, "e2e", slower("eager", factor=2))).markdown
    assert slow.startswith(f"**Eager: {value(eager.time_s.times(2), 1e-3)} ms a chunk**")
    fast = changed(run, "e2e", slower("compiled", factor=0.5))
    assert "**More than the measured roof:**" in e2e.finding(fast).markdown and "More than the measured" not in text
    nothing = gpu(family_e2e(WAN, 12.0, 11.0), spec=WAN, found=UNKNOWN_GPU)
    assert "no basis to give a share of" in e2e.finding(run_of(nothing)).markdown


def test_compiled_slower_equal_and_faster(run_of):
    run = run_of("full")
    ratio = roofline.e2e(run).speedup
    assert f"Eager over compiled time is {value(ratio)} (" in e2e.finding(run).markdown
    assert "compiling makes it faster" in e2e.finding(run).markdown and "took 42.0 s" in e2e.finding(run).markdown
    slow = e2e.finding(changed(run, "e2e", slower("compiled", factor=1.5))).markdown
    assert f"is {value(ratio.times(1 / 1.5))} (" in slow and "compiling makes it **slower**" in slow
    words = ("compiling makes it faster", "compiling makes it **slower**", "the two tie", "which is faster cannot be told")

    def verdict(*compiled, **more):
        run = run_of(gpu(made.e2e(more.get("spec", ESCHER), [1.0] * 6, list(compiled)), **more))
        ratio = roofline.e2e(run).speedup
        [word] = [w for w in words if f"from interleaved blocks: {w}." in e2e.finding(run).markdown]
        assert (ratio.lo, ratio.hi) == pytest.approx((1 / max(compiled), 1 / min(compiled)))
        return word

    steady = [1.0] * 4
    assert verdict(*[0.9] * 6) == words[0] and verdict(*[1.1] * 6) == words[1]
    assert verdict(*[0.999] * 6) == words[0]  # however little: the whole interval lies beyond 1
    assert verdict(1.0, *steady, 1.0) == verdict(1 / 1.029, *steady, 1 / 0.971) == "the two tie"
    assert verdict(1 / 1.031, *steady, 1.0) == verdict(1.0, *steady, 1 / 0.969) == "which is faster cannot be told"
    on_cpu = {"found": CPU, "spec": ON_CPU}  # 5 % there
    assert verdict(1 / 1.049, *steady, 1 / 0.951, **on_cpu) == "the two tie"
    assert verdict(1 / 1.051, *steady, 1.0, **on_cpu) == "which is faster cannot be told"


def test_a_part_of_the_workload_says_so(run_of):
    whole, part = run_of("full"), run_of("cpu")
    assert findings.part_of(ESCHER) == findings.part_of(WAN) == findings.part_of(workload.load("smoke")) == ""
    assert findings.part_of(ON_CPU) == " (1 of 40 blocks, 390 of 4,680 tokens)"
    assert findings.part_of(workload.overridden(ESCHER, depth=7)) == " (depth 40 -> 7)"
    shallow = workload.fit(ESCHER, "gpu", 24 * GIB)
    assert findings.part_of(shallow) == " (20 of 40 blocks, 4,680 of 4,680 tokens)"
    assert "ms a chunk (1 of 40 blocks, 390 of 4,680 tokens)** (" in e2e.finding(part).markdown
    assert "of 40 blocks" not in e2e.finding(whole).markdown and "ms a chunk** (" in e2e.finding(whole).markdown
    for mode in ("eager", "compiled"):
        assert f'<p class="label">Model (1 of 40 blocks, 390 of 4,680 tokens), {mode}</p>' in findings.cards(part)
        assert f'<p class="label">Model, {mode}</p>' in findings.cards(whole)
    deep = run_of(gpu(family_e2e(shallow), made.roofs(), spec=shallow))
    assert "(20 of 40 blocks, 4,680 of 4,680 tokens)" in e2e.finding(deep).markdown
    assert "Model (20 of 40 blocks, 4,680 of 4,680 tokens), eager" in findings.cards(deep)


def test_a_card_says_where_the_roof_has_not_converged(run_of):
    run = run_of("full")
    assert "of the measured compute roof</p>" in findings.cards(run) and "roof not converged" not in findings.cards(run)
    few = changed(run, "compute", lambda r: None if r.case == "roof" and r.block in (4, 5) else r)
    assert not derive.compute(few).converged
    assert findings.cards(few).count("of the measured compute roof (roof not converged)</p>") == 2


def test_compiled_that_is_not_there_is_no_ratio(run_of):
    run = run_of("full")
    for change, reason in ((dropped("compiled"), "was not run"), (wrong("compiled"), "wrong result")):
        other = changed(run, "e2e", change)
        text = e2e.finding(other).markdown
        assert (
            f"**Compiled: unavailable**, {reason}." in text and "over compiled time" not in text and "1.00" not in text
        )
        compiled = e2e.mfu(other).raw[-1]
        assert compiled["time_s"] is None and compiled["reason"] == reason
        assert {r["mode"] for r in e2e.ledger(other).raw} == {
            "eager"
        } and f"No gap ledger of compiled: {reason}." in text
    assert (
        "**Wrong results, shown without a time: compiled.**"
        in e2e.finding(changed(run, "e2e", wrong("compiled"))).markdown
    )
    none = run_of("all skipped")
    assert "**Eager: unavailable**" in e2e.finding(none).markdown and isinstance(e2e.ledger(none), Text)


def test_the_ledgers_words_follow_the_records(run_of):
    def residual(run):
        return roofline.ledger(run, "eager").residual_frac

    run = run_of("full")
    def eager_of(run):
        return e2e.finding(run).markdown.partition("Of the compiled")[0]

    def around(run):
        frac = residual(run)
        return f"{percent(frac)} ({interval(frac, 0.01)})"

    def others(run, factor):
        """Eager `factor` times as long, steady."""
        steady = roofline.e2e(run).rows["eager"].time_s.median * factor
        return changed(run, "e2e", lambda r: replace(r, samples_s=(steady,)) if r.case == "eager" and r.samples_s else r)

    fits = others(run, 1 - residual(run).median)  # the whole is what its parts come to
    assert abs(residual(fits).median) < 0.03 and roofline.ledger(fits, "eager").finding is False
    assert f"The residual is {around(fits)}, within 3 % of the pass." in eager_of(fits)
    assert "beyond 3 %" not in eager_of(fits) and "Of the eager pass, FLOP at the roof take" in eager_of(fits)
    large, small = others(fits, 1.3), others(fits, 0.8)
    assert residual(large).lo > 0.03 and residual(small).hi < -0.03
    why = "the operations alone do not explain the pass"
    assert f"**The residual is {around(large)}, beyond 3 %:** {why}." in eager_of(large)
    why = "the operations alone take longer than the pass"
    assert f"**The residual is {around(small)}, beyond 3 %:** {why}." in eager_of(small)
    between = others(fits, 1 / (1 - 0.03))
    assert residual(between).lo < 0.03 < residual(between).hi and roofline.ledger(between, "eager").finding is None
    words = f" The residual, {around(between)}, is not settled: its interval straddles 3 % of the pass."
    assert words in eager_of(between) and "**The residual" not in eager_of(between)
    assert roofline.LAUNCH in {c[0] for c in e2e.ledger(run).cells} and "not told apart" not in e2e.ledger(run).caption
    without = changed(run, "e2e", dropped("gaps.eager", "gaps.compiled"))
    assert (
        roofline.LAUNCH not in {c[0] for c in e2e.ledger(without).cells}
        and "not told apart" in e2e.ledger(without).caption
    )
    table = e2e.ledger(run)
    parts = [r["time_s"] for r in table.raw if r["mode"] == "eager"]
    assert sum(parts[:-1]) == pytest.approx(parts[-1])
    assert table.cells[-1][1] == e2e.seconds(parts[-1]) and table.cells[-1][2] == "100 %"


def test_the_counter_is_told(run_of):
    run = run_of("full")
    assert re.search(r"the operation table 185,621, the same\.", e2e.finding(run).markdown)
    near = changed(run, "e2e", lambda r: replace(r, value=r.value * (1 - 1e-5)) if r.case == "flop.counter" else r)
    assert " (-0.001 %)." in e2e.finding(near).markdown and "the same" not in e2e.finding(near).markdown
    off = changed(run, "e2e", lambda r: replace(r, value=r.value * 1.02) if r.case == "flop.counter" else r)
    assert "(+2 %): **more than 1 % apart.**" in e2e.finding(off).markdown
    assert "counter" not in e2e.finding(changed(run, "e2e", dropped("flop.counter"))).markdown


def test_the_pilots_contradiction_is_computed(run_of):
    run = run_of("full")
    assert "The pilot quotes 99 % compiled." in (text := e2e.finding(run).markdown)
    assert "allows 95.9 %: its figures do not agree among themselves." in text
    modest = replace(ESCHER, pilot={**ESCHER.pilot, "mfu_pct": {"compiled": 90}})
    agrees = e2e.finding(run_of({**SCENARIOS["full"], "workload": modest.to_json()})).markdown
    assert "allows 95.9 %." in agrees and "do not agree" not in agrees
    assert "pilot" not in e2e.finding(run_of("no pilot, no cache")).markdown
    assert "no pilot to compare with" in e2e.reference(run_of("no pilot, no cache")).markdown
    basis, pilots = ([c.title for c in e2e.reference(run).columns].index(t) for t in ("basis of this run's", "pilot"))
    for name, own in (("full", "pilot"), ("cpu", "measured")):
        table = e2e.reference(run_of(name))
        assert [c[basis] for c in table.cells] == [r["basis"] for r in table.raw] == ["", "", own, own, own]
        assert [c[pilots] for c in table.cells] == ["1,360", "210", "77", "93", "99"]
        assert not any("basis" in c[0] for c in table.cells) and "MFU of its own peak" in table.caption
    roofs_alone = replace(ESCHER, pilot={"peak_tflops": 1360})
    table = e2e.reference(run_of({**SCENARIOS["full"], "workload": roofs_alone.to_json()}))
    assert len(table.cells) == 1 and "basis of this run's" not in [c.title for c in table.columns]
    here, there = ([c[-1] for c in e2e.reference(run_of(n)).cells] for n in ("full", "cpu"))
    assert here == ["yes"] * 5 and all(c.startswith("no: the pilot ran on mi355x") for c in there)


def test_how_the_model_ran_is_told(run_of):
    rows = dict(e2e.setup(run_of("full")).cells)
    assert (
        rows["attention backend of the model"] == "sdpa_flash" and rows["attention aiter"] == "aiter cannot be imported"
    )
    assert rows["compile mode max-autotune"] == "worked" and rows["first compiled pass"] == "42.0 s"
    weights = 2 * (40 * (8 * 5120**2 + 2 * 5120 * 13824) + 256 * 5120 + 7 * 5120**2)
    assert (
        f"weights {weights / GIB:.4g} GiB" in rows["peak memory, eager"]
        and "allocated on the device" in rows["peak memory, eager"]
    )
    tried = family_e2e(
        mode="default",
        tries=[made.compile_try("max-autotune", "block", 3e-3), made.compile_try("max-autotune", "pass", 0.3)],
    )
    rows = dict(e2e.setup(run_of(gpu(tried))).cells)
    assert rows["compile mode max-autotune"] == "wrong result" and rows["compile mode default"] == "worked"
    assert NASTY in dict(e2e.setup(run_of("no compiler")).cells)["compile mode max-autotune"]


def test_capacity_beside_what_the_model_took(run_of):
    run = run_of("full")
    assert capacity.peaks(run).cells[0][2] == number(2**33 / GIB) and len(capacity.peaks(run).cells) == 2
    assert (
        "**It fits**" in capacity.finding(run).markdown
        and "**It does not fit**" in capacity.finding(run_of("cpu")).markdown
    )
    less = changed(run, "capacity", lambda r: replace(r, value=20.0 * GIB) if r.case in ("blocks", "contiguous") else r)
    assert "**It does not fit**" in capacity.finding(less).markdown
    assert capacity.peaks(run_of({**SCENARIOS["full"], "records": family_capacity(MI355X)})) is None


def test_an_operation_without_any_record_is_said(run_of):
    run = changed(run_of("full"), "ops", dropped("kv_cache_write"))
    cells = next(c for c in ops.times(run).cells if c[0] == "kv_cache_write")
    assert "not run" in cells[-1] and "no time for kv_cache_write" in ops.finding(run).markdown
    assert ABSENT not in everything(run)


def test_the_line_below_a_title_names_the_workload_as_it_ran(run_of):
    line = findings.provenance(run_of(gpu(family_ops(WAN), spec=WAN, settings={"budget": "quick"})))
    assert "32,760 query tokens that attend to 32,760." in line and "cached" not in line and "Reference" not in line
    asked = {"budget": "quick", "reference_model": "wan2_2_t2v_a14b"}
    assert "Reference model wan2_2_t2v_a14b." in findings.provenance(run_of(gpu(family_ops(WAN), spec=WAN, settings=asked)))
