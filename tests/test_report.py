"""From records to pages: what tables and sentences say, and the book of both sample runs."""

from __future__ import annotations

import csv
import dataclasses
import importlib
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from html import unescape
from pathlib import Path

import make_sample
import pytest
from conftest import CPU, MI355X, SAMPLES, UNKNOWN_GPU

from escher_book import cli, findings, notebook, report, runner, stage, tables, vega
from escher_book.pages import bandwidth as page_bandwidth
from escher_book.pages import compute as page_compute
from escher_book.pages import environment as page_environment
from escher_kernels import records
from escher_kernels.records import Record
from escher_kernels.statistics import Estimate
from validation import artefacts, derive

ROOT = Path(__file__).parents[1]


def estimate(median: float, half: float = 0.01) -> Estimate:
    return Estimate(median, median * (1 - half), median * (1 + half), 0.96875, 6, 12)


# --------------------------------------------------------------------------------------------- the samples


def test_the_generated_sample_is_what_its_generator_writes(tmp_path):
    """If this fails after a change of what is measured: `make sample`, and commit what it wrote."""
    make_sample.generate(tmp_path / "mi355x")
    made = {p.relative_to(tmp_path / "mi355x"): p.read_bytes() for p in (tmp_path / "mi355x").rglob("*") if p.is_file()}
    kept = {p.relative_to(SAMPLES / "mi355x"): p for p in (SAMPLES / "mi355x").rglob("*") if p.is_file()}
    assert set(made) == set(kept)
    for name, content in made.items():
        assert kept[name].read_bytes() == content, f"{name} is stale: make sample"


def test_every_generated_record_says_that_it_is_synthetic():
    run = derive.load(SAMPLES / "mi355x")
    assert run.info["source"] == "synthetic"
    for content in run.files.values():
        assert content.run.source == "synthetic"
        assert {r.source for r in content.records} == {"synthetic"}
    measured = derive.load(SAMPLES / "cpu")
    assert measured.info["source"] == "measured"
    assert {r.source for content in measured.files.values() for r in content.records} == {"measured"}


def test_generated_numbers_never_go_below_a_results_directory(tmp_path, monkeypatch):
    for directory in (ROOT / "results" / "x", tmp_path / "elsewhere" / "x"):
        monkeypatch.setenv("RESULTS_DIR", str(tmp_path / "elsewhere"))
        with pytest.raises(ValueError, match="never written below"):
            make_sample.generate(directory)
        assert not directory.exists()


def test_both_samples_have_the_same_layout_and_no_path_of_a_machine():
    loaded = {name: derive.load(SAMPLES / name) for name in ("cpu", "mi355x")}
    cpu, gpu = loaded["cpu"], loaded["mi355x"]
    assert set(gpu.info) - set(cpu.info) <= {"iterations", "power_cap_w"}  # the measured one is the older
    assert set(cpu.info) <= set(gpu.info)
    assert set(cpu.env) - {"nominal"} == set(gpu.env)
    for part in ("host", "device", "software", "knobs"):
        assert set(cpu.env[part]) == set(gpu.env[part]), part
    for part in ("cpu", "cpus", "memory"):
        assert set(cpu.env["host"][part]) == set(gpu.env["host"][part]), part
    for family in cpu.files:
        a, b = cpu.files[family].run, gpu.files[family].run
        assert set(a.parameters) == set(b.parameters) and set(a.software) == set(b.software)
    errors = [
        {tuple(sorted(r.error)) for r in run.records(family) if r.error and r.error["check"] == check}
        for run in (cpu, gpu)
        for family, check in (("compute", "full"), ("bandwidth", "float64"))
    ]
    assert errors[0] == errors[2] and errors[1] == errors[3] and all(errors)
    for name in loaded:
        files = [p for p in (SAMPLES / name).rglob("*") if p.is_file()]
        assert sum(p.stat().st_size for p in files) < {"cpu": 600_000, "mi355x": 700_000}[name]
        for path in files:
            text = path.read_text("utf-8")
            assert not re.search(r"/(?:tmp|home|root|work|venv|opt)/|\.venv", text), path
    assert cpu.env["host"]["name"] == gpu.env["host"]["name"] == "sample-host"


def test_the_generated_device_is_a_plausible_one():
    run = derive.load(SAMPLES / "mi355x")
    compute, bandwidth = derive.compute(run), derive.bandwidth(run)
    assert 1450e12 < compute.roof.flop_s.median < 1650e12 and compute.converged
    assert 5.7e12 < bandwidth.roof.bytes_s.median < 6.1e12 and bandwidth.converged
    assert max(r.params["round"] for r in compute.search) >= 1
    by_set = {2 * r.params["buffer_bytes"]: r.bytes_s.median for r in bandwidth.cache_curve}
    assert max(by_set, key=by_set.get) == 256 * 2**20  # the Infinity Cache
    rates = [r.flop_s.median for r in compute.rows if r.case.startswith("time_")]
    assert max(rates) < 0.02 * compute.roof.flop_s.median
    every = [*compute.rows, *compute.reduced, *compute.pairs, *compute.search, *bandwidth.rows, *bandwidth.strided]
    assert not any(r.wrong or r.skipped for r in [*every, *bandwidth.host])
    assert {derive.gemm_group(r) for r in compute.rows} == set(derive.GEMM_GROUPS) - {"reduced", "epilogue"} | {
        "workload"
    }
    assert len(compute.of("workload")) == 13 and len(compute.reduced) == 2 and compute.fused_speedup.lo > 1
    assert max(r.bytes_s.median for r in bandwidth.strided) < bandwidth.roof.bytes_s.median
    rate = {r.case: r.bytes_s.median for r in bandwidth.host}
    assert len(rate) == 12 and rate["host.to_device.pinned.1024MiB"] > 2 * rate["host.to_device.pageable.1024MiB"]


# --------------------------------------------------------------------------------------------- numbers as text


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [(0, 3, "0"), (None, 3, "–"), (float("nan"), 3, "–"), (float("inf"), 3, "–"), (1234.56, 3, "1,230"), (0.0123456, 3, "0.0123"),
     (-2.5, 2, "-2.5"), (999.96, 4, "1,000.0"), (1e-9, 2, "0.0000000010"), (123456789, 2, "120,000,000")],
)  # fmt: skip
def test_number(value, digits, text):
    assert tables.number(value, digits) == text


@pytest.mark.parametrize(
    ("middle", "low", "high", "shown"),
    [(1.0, 1.0, 1.0, "1.000 (1.000 to 1.000)"), (1588.4, 1582.1, 1594.2, "1,588 (1,582 to 1,594)"),
     (1.0533, 0.8967, 1.1394, "1.05 (0.90 to 1.14)"), (5356, 4000, 6200, "5,400 (4,000 to 6,200)"),
     (0.81, 0.52, 1.8, "0.81 (0.52 to 1.80)"), (13.86, 11.19, 20.6, "13.9 (11.2 to 20.6)"), (2.0, 1.0, 9.0, "2.0 (1.0 to 9.0)")],
)  # fmt: skip
def test_value_and_interval_share_the_decimals_that_the_interval_supports(middle, low, high, shown):
    wide = Estimate(middle, low, high, 0.97, 6, 6)
    assert f"{tables.value(wide)} ({tables.interval(wide)})" == shown


def test_values_with_units():
    assert tables.value(estimate(1575.4e12, 0.004), 1e12) == "1,575"
    assert tables.value(None) == tables.interval(None) == tables.percent(None) == tables.seconds(None) == "–"
    assert tables.interval(estimate(100.0, 0.01)) == "99.0 to 101.0"
    assert tables.percent(estimate(0.6259, 0.004)) == "62.6 %"
    seconds = [tables.seconds(s) for s in (2.5, 1e-3, 12.3e-6, 5e-9, 0.9996)]
    assert seconds == ["2.50 s", "1.00 ms", "12.3 µs", "5.00 ns", "1,000 ms"]
    sizes = [tables.size(n) for n in (None, 100, 1024, 1536, 4 * 2**20, 600 * 2**20, 3 * 2**30, 36862 * 2**20)]
    assert sizes == ["–", "100 B", "1 KiB", "1536 B", "4 MiB", "600 MiB", "3 GiB", "36 GiB"]
    assert tables.clock(2.4e9) == "2.40 GHz" and tables.clock(None) == "–"


NASTY = 'a|b <script>alert(1)</script> *x* _y_ `z` [l](u) \\ & "q"\nnext'


def nasty_table() -> tables.Table:
    columns = [tables.Column("head | <b>", lambda r: r), tables.Column("n", lambda r: "1", True)]
    return tables.Table("name", "caption <i> & more", columns, [NASTY], [{"v": NASTY}, {"w": 1}])


def test_a_table_shows_any_text_as_it_is_in_html():
    text = nasty_table().to_html()
    assert "<script" not in text and "<i>" not in text and "<b>" not in text
    cells = re.findall(r"<t[dh](?: [^>]*)?>(.*?)</t[dh]>", text, re.S)
    assert [unescape(c) for c in cells] == ["head | <b>", "n", NASTY, "1"]
    assert text.count('class="num"') == 2


def test_a_table_shows_any_text_as_it_is_in_markdown():
    from markdown_it import MarkdownIt

    text = nasty_table().to_markdown()
    html = MarkdownIt("commonmark").enable("table").render(text)
    cells = re.findall(r"<t[dh](?: [^>]*)?>(.*?)</t[dh]>", html, re.S)
    assert [unescape(c) for c in cells] == ["head | <b>", "n", NASTY.replace("\n", " "), "1"]
    for tag in ("<script", "<em>", "<code>", "<a "):
        assert tag not in html


def test_a_table_without_rows_says_so():
    empty = tables.Table("name", "Copies <i>", [tables.Column("a", str)], [])
    assert empty.to_html() == '<p class="subtitle">Copies &lt;i&gt;: nothing to show.</p>'


def test_a_table_keeps_its_rows_in_base_units():
    raw = nasty_table()._repr_mimebundle_()[tables.RAW]
    assert raw == {"name": "name", "columns": ["v", "w"], "rows": [[NASTY, None], [None, 1]]}
    assert list(csv.reader(report.as_csv([raw["columns"], *raw["rows"]]).splitlines(True))) == [
        ["v", "w"], [NASTY, ""], ["", "1"],
    ]  # fmt: skip


def test_notes_say_why_a_row_is_not_to_be_trusted():
    row = derive.Row("f", "c", "case", {}, time_s=dataclasses.replace(estimate(1.0), blocks=3))
    row = dataclasses.replace(row, flags=("INSUFFICIENT", "NOISY: spread", "NOISY: anchor moved", "HOST_BOUND"))
    assert tables.notes(row) == "INSUFFICIENT: 3 blocks; NOISY: spread, anchor moved; HOST_BOUND"


def every_table(run: derive.LoadedRun) -> list[tables.Table]:
    """Every table of every page of a family that the run holds."""
    made = [getattr(tables, name)(run, family) for name in ("bases", "anchors") for family in ("compute", "bandwidth")]
    for family in run.files:
        page = importlib.import_module(f"escher_book.pages.{family}")
        own = [f for f in vars(page).values() if inspect.isfunction(f) and f.__module__ == page.__name__]
        made += [f(run) for f in own if inspect.get_annotations(f).get("return", "").startswith("Table")]
    return [table for table in made if table is not None]


def test_no_table_shows_nan_none_or_an_exponent_in_place_of_a_number(sample):
    for table in every_table(sample):
        for row in table.cells:
            assert all(isinstance(cell, str) and cell for column, cell in zip(table.columns, row, strict=True)
                       if not column.optional), (table.name, row)  # fmt: skip
            for cell in row:
                assert not re.search(r"\b(nan|inf|None)\b|\de[+]\d", cell), (table.name, row)
        json.dumps(table._repr_mimebundle_(), allow_nan=False)


def test_the_gpu_pages_have_percentages_of_rated_and_no_probe(sample):
    shown = (page_compute.gemms(sample), page_bandwidth.plateaus(sample))
    heads = [c.title for table in shown for c in table.columns if "%" in c.title]
    if sample.kind == "gpu":
        assert heads == ["% of rated", "% of rated"]
        assert page_compute.probes(sample) is None and page_bandwidth.copies(sample) is None
    else:
        assert heads == ["% of probed peak"]
        assert page_compute.probes(sample).cells and page_bandwidth.copies(sample).cells


# --------------------------------------------------------------------------------------------- sentences


def with_records(run: derive.LoadedRun, family: str, change) -> derive.LoadedRun:
    """The run with `change(record)` in place of each record of a family; None drops it."""
    content = run.files[family]
    kept = [new for r in content.records if (new := change(r)) is not None]
    return dataclasses.replace(run, files={**run.files, family: dataclasses.replace(content, records=kept)})


def slower(case: str, factor: float):
    def change(r: Record) -> Record:
        if r.case != case or not r.samples_s:
            return r
        return dataclasses.replace(r, samples_s=tuple(s * factor for s in r.samples_s))

    return change


def test_the_roof_sentence_follows_the_records():
    run = derive.load(SAMPLES / "mi355x")
    roof = derive.compute(run).roof.flop_s
    text = page_compute.finding(run).markdown
    assert f"**Compute roof: {roof.median / 1e12:,.0f} TFLOP/s**" in text
    assert f"{tables.number(roof.median / 2516.6e12 * 100)} % of the rated dense BF16" in text
    halved = page_compute.finding(with_records(run, "compute", slower("roof", 2))).markdown
    assert f"**Compute roof: {tables.value(roof.times(0.5), 1e12)} TFLOP/s**" in halved
    gone = page_compute.finding(with_records(run, "compute", lambda r: None if r.case == "roof" else r)).markdown
    assert gone.startswith("**No compute roof:**") and not re.search(r"\d TFLOP/s|\d %", gone)


def test_the_bandwidth_sentence_follows_the_records(sample):
    roof = derive.bandwidth(sample).roof.bytes_s
    assert f"**Bandwidth roof: {tables.value(roof, 1e9)} GB/s**" in page_bandwidth.finding(sample).markdown
    cases = {r.case for r in derive.bandwidth(sample).rows if r.params.get("plateau") and r.params["op"] == "copy"}
    gone = page_bandwidth.finding(with_records(sample, "bandwidth", lambda r: None if r.case in cases else r)).markdown
    assert gone.startswith("**No bandwidth roof:**") and "GB/s**" not in gone


def test_the_comparison_with_c_goes_with_its_records():
    run = derive.load(SAMPLES / "cpu")
    ratio = derive.bandwidth(run).speedup["plain"]
    assert ratio.blocks == 6
    assert f"torch's copy runs at {tables.value(ratio)} times its rate" in page_bandwidth.finding(run).markdown
    without = with_records(run, "bandwidth", lambda r: None if r.case == "stream.plain" else r)
    assert "C STREAM" not in page_bandwidth.finding(without).markdown
    slow = page_bandwidth.finding(with_records(run, "bandwidth", slower("stream.plain", 2))).markdown
    assert f"runs at {tables.value(ratio.times(2))} times its rate" in slow


def test_the_sentences_of_what_stands_beside_the_roof_follow_the_records(sample):
    c = derive.compute(sample)
    assert f"run at {tables.ratio(c.fused_speedup)} times the speed" in page_compute.fused(sample).markdown
    slow = page_compute.fused(with_records(sample, "compute", slower("epilogue.unfused", 2))).markdown
    assert f"run at {tables.ratio(c.fused_speedup.times(2))} times the speed" in slow
    gone = with_records(sample, "compute", lambda r: None if r.role == "pair" else r)
    assert page_compute.fused(gone).markdown == "No comparison of bias and GELU fused and not: it was not measured."
    one = c.of("skew")[0]
    slowest = page_compute.shape_cost(with_records(sample, "compute", slower(one.case, 100))).markdown
    assert f"{tables.layout(one)} the slowest" in slowest and "% of it" in slowest
    none = with_records(sample, "compute", lambda r: None if r.case.startswith("skew.") else r)
    assert page_compute.shape_cost(none).markdown == "No skewed GEMM was timed."
    assert page_compute.skew_chart(none).markdown.startswith("*Nothing to draw")


def test_equal_shapes_that_disagree_are_named(sample):
    apart = page_compute.same_shapes(with_records(sample, "compute", slower("self_attn.v", 5))).markdown
    assert "do not all overlap:**" in apart and "self_attn.v" in apart
    assert page_compute.same_shapes(sample).markdown.startswith("8 GEMMs of the workload share 2 shapes")
    steady = page_compute.same_shapes(derive.load(SAMPLES / "mi355x")).markdown
    assert "Wherever shapes are equal, the intervals overlap." in steady
    alone = {"self_attn.q", "cross_attn.k"}
    keep = with_records(sample, "compute", lambda r: None if "_attn." in r.case and r.case not in alone else r)
    assert page_compute.same_shapes(keep).markdown.startswith("No two GEMMs")


@pytest.mark.parametrize(("seconds", "said"), [((0.9, 1.1), "intervals overlap"), ((1.9, 2.1), "% of it.")])
def test_skew_within_the_noise_is_not_called_a_cost(made_run, seconds, said):
    params = {"m": 1, "n": 4, "k": 2, "layout": "NN"}
    items = [
        Record("compute", case, block=block, samples_s=(taken[block % 2],), flop=8, params=params)
        for case, taken in {"skew.1x4": (1.0, 1.0), "skew.4x1": seconds}.items()
        for block in range(6)
    ]
    assert said in page_compute.shape_cost(made_run(items)).markdown


def test_reduced_precision_is_shown_beside_what_it_replaces():
    gpu = derive.load(SAMPLES / "mi355x")
    text, c = page_compute.reduced(gpu).markdown, derive.compute(gpu)
    for row, plain in zip(c.reduced, (c.roof, c.of("long_k")[0]), strict=True):
        assert f"{tables.value(plain.flop_s, 1e12)} TFLOP/s with it off" in text
        assert f"{tables.value(row.flop_s, 1e12)} with it on ({row.error['rel_frobenius']:.2e})" in text
    assert "torch has none for a CPU" in page_compute.reduced(derive.load(SAMPLES / "cpu")).markdown


def test_copies_between_host_and_device_are_told(sample):
    text, rows = page_bandwidth.host_link(sample).markdown, page_bandwidth.host_copies(sample)
    if sample.kind == "cpu":
        assert text == "No copies between host and device: a CPU host has no device to copy to."
        assert [row[-1] for row in rows.cells] == ["skipped: a CPU host has no device to copy to"]
    else:
        best = max(r.bytes_s.median for r in derive.bandwidth(sample).host if ".to_device.pinned" in r.case)
        assert f"host to device {best / 1e9:,.2f} GB/s pinned" in text and "device to host" in text
        assert len(rows.cells) == 12


def test_what_holds_for_a_cpu_alone_stays_off_a_gpus_page(sample):
    about, probe = page_bandwidth.about_copies(sample), page_compute.probe(sample).markdown
    if sample.kind == "gpu":
        assert about is None and "C compiler" not in probe
    else:
        assert "write-allocate" in about.markdown and "C compiler" in probe
    for path in (ROOT / "notebooks").glob("[0-9]*.ipynb"):
        for cell in json.loads(path.read_text("utf-8"))["cells"]:
            if cell["cell_type"] == "markdown":
                assert "On a CPU" not in "".join(cell["source"]), path.name


def test_a_notebook_shows_what_there_is(monkeypatch):
    shown = []
    monkeypatch.setattr("IPython.display.display", shown.append)
    notebook.show("a", None, "b")
    assert shown == ["a", "b"]


def test_a_wrong_result_is_named_in_the_sentence():
    run = derive.load(SAMPLES / "mi355x")

    def break_one(r: Record) -> Record:
        return dataclasses.replace(r, error={**r.error, "ok": False}) if r.case == "ffn.linear1" and r.error else r

    text = page_compute.finding(with_records(run, "compute", break_one)).markdown
    assert "Wrong results, shown without a time: ffn.linear1" in text and "gave right results" not in text
    assert "gave right results" in page_compute.finding(run).markdown


def test_a_moved_anchor_is_named_in_the_sentence():
    run = derive.load(SAMPLES / "mi355x")
    assert "The anchors were steady" in page_compute.finding(run).markdown

    def move(r: Record) -> Record:
        return dataclasses.replace(slower("anchor.gemm", 1.5)(r)) if r.block == 1 else r

    text = page_compute.finding(with_records(run, "compute", move)).markdown
    assert "**Noisy:** an anchor moved meanwhile (anchor.gemm by" in text and "were steady" not in text


def test_checks_that_do_not_hold_come_first():
    run = derive.load(SAMPLES / "mi355x")
    assert page_environment.finding(run).markdown == "All 9 checks hold."
    checks = [
        dict(c, ok=False, found="4", mend="do this") if c["check"] == "NUMA balancing" else c for c in run.env["checks"]
    ]
    text = page_environment.finding(dataclasses.replace(run, env={**run.env, "checks": checks})).markdown
    assert (
        text.startswith("**1 of 9 checks do not hold:**") and "found 4, wanted 0" in text and "Mend: do this." in text
    )


def test_nothing_measured_makes_sentences_without_numbers(made_run):
    run = made_run([])
    for text in (page_compute.finding(run), page_bandwidth.finding(run)):
        assert text.markdown == "This family was not measured."
    cards = findings.cards(run)
    assert cards.count("not measured in this run") == 2 and "Ridge" not in cards


# --------------------------------------------------------------------------------------------- what a page says of itself


def test_banners(made_run):
    assert findings.banners(made_run([])) == findings.banners(made_run([], found=MI355X)) == []
    [(kind, text)] = findings.banners(made_run([], asked="mi355x"))
    assert kind == "warning" and "The target is AMD Instinct MI355X" in text and "CPU host" in text
    [(kind, text)] = findings.banners(made_run([], found=UNKNOWN_GPU))
    assert kind == "warning" and "No rated basis" in text and "MI999X" in text
    noted = dataclasses.replace(CPU, note="GPU present (/dev/kfd) but not usable")
    assert findings.banners(made_run([], found=noted)) == [("danger", noted.note)]


def test_titles_name_the_memory_that_was_measured(made_run):
    assert findings.title("Memory bandwidth", made_run([])) == "Memory bandwidth: CPU host"
    assert findings.title("Memory bandwidth", made_run([], found=MI355X)) == "HBM bandwidth: AMD Instinct MI355X"
    assert findings.title("Memory bandwidth", made_run([], asked="mi355x")) == "Memory bandwidth: CPU host"
    assert findings.title("Memory bandwidth", made_run([], found=UNKNOWN_GPU)).startswith(
        "Memory bandwidth: AMD Instinct"
    )
    assert findings.title("BF16 GEMM", made_run([Record("compute", "x")], dtype="fp16")) == "FP16 GEMM: CPU host"


def test_a_family_that_ended_badly_is_marked(sample_copy):
    run = derive.load(sample_copy("mi355x"))
    (run.directory / "notebooks").mkdir()
    (run.directory / "notebooks" / "02_bandwidth.ipynb").write_text("{}", "utf-8")
    run = dataclasses.replace(run, status={"bandwidth": {"status": "died", "message": "the kernel was killed"}})
    page = report.pages(run, {})["02_bandwidth"]
    [(kind, text)] = page.banner
    assert kind == "danger" and "kernel died" in text and f"{len(run.records('bandwidth'))} records were kept" in text
    assert "DIED" in report.family_table(run).upper()


def test_charts_lint_and_hold_the_rows_they_were_given(sample):
    rows = {}
    charts = (page_compute.gemm_sweep, page_compute.skew_chart, page_bandwidth.cold_sweep, page_bandwidth.cache_curve)
    for chart in charts:
        spec = chart(sample).to_dict()
        vega.lint(spec)
        rows[chart.__name__] = max(len(d) for d in spec["datasets"].values())
    compute, bandwidth = derive.compute(sample), derive.bandwidth(sample)
    swept = [compute.roof, *compute.of("square", "workload")]
    assert rows["gemm_sweep"] == len([r for r in swept if r.flop_s])
    assert rows["skew_chart"] == len([r for r in compute.of("skew") if r.flop_s])
    assert rows["cold_sweep"] == len([r for r in bandwidth.rows if r.bytes_s])
    assert rows["cache_curve"] == len([r for r in bandwidth.cache_curve if r.bytes_s])


# --------------------------------------------------------------------------------------------- the book


def escher_report(directory: Path, **environ: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "escher_book.cli", "report", str(directory)], capture_output=True, text=True,
        encoding="utf-8", env={**os.environ, **environ}, cwd=ROOT, timeout=250, check=False,
    )  # fmt: skip


def contents(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def page_texts(site: Path) -> dict[str, str]:
    """The pages that people read: name -> HTML."""
    pages = {p.relative_to(site).as_posix(): p.read_text("utf-8") for p in site.rglob("*.html")}
    return {name: text for name, text in pages.items() if not name.startswith("_static")}


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> dict[str, Path]:
    """Both samples' books, the CPU's made where torch cannot be imported."""
    folder = tmp_path_factory.mktemp("reports")
    stub = folder / "stub" / "torch"
    stub.mkdir(parents=True)
    (stub / "__init__.py").write_text("raise ImportError('no torch here')\n", "utf-8")
    out = {}
    others = os.environ.get("PYTHONPATH")
    for name, path in (("cpu", os.pathsep.join(filter(None, (str(stub.parent), others)))), ("mi355x", others)):
        out[name] = Path(shutil.copytree(SAMPLES / name, folder / name))
        done = escher_report(out[name], **({"PYTHONPATH": path} if path else {}))
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip() == str(out[name] / "site" / "index.html")
    return out


@pytest.mark.slow
def test_a_report_needs_no_torch(built, tmp_path):
    stub = built["cpu"].parent / "stub"
    done = subprocess.run(
        [sys.executable, "-c", "import torch"],
        env={**os.environ, "PYTHONPATH": str(stub)},
        capture_output=True,
        check=False,
    )
    assert done.returncode == 1 and b"no torch here" in done.stderr
    notebook = (built["cpu"] / "notebooks" / "01_compute.ipynb").read_text("utf-8")
    assert '"output_type": "error"' not in notebook


@pytest.mark.slow
def test_a_second_report_writes_the_same_tables_and_keeps_the_raw_part(built):
    for name in ("mi355x",):
        before = {part: contents(built[name] / part) for part in ("tables", "plots", "records")}
        assert escher_report(built[name]).returncode == 0
        after = {part: contents(built[name] / part) for part in before}
        assert after == before
    for name, directory in built.items():
        for path in SAMPLES.joinpath(name).rglob("*"):
            if path.is_file():
                assert (directory / path.relative_to(SAMPLES / name)).read_bytes() == path.read_bytes()


@pytest.mark.slow
def test_tables_and_plots_are_there_and_not_empty(built):
    for name, directory in built.items():
        plots = contents(directory / "plots")
        assert {(Path(p).stem.partition("_")[0], Path(p).suffix) for p in plots} == {
            (chart, suffix) for suffix in (".svg", ".png")
            for chart in ("A2", "A2b", "A3", "A3b", "A6", "A7", "A8", "A8b", "A8c", "A10")
        }, name  # fmt: skip
        assert all(body.startswith((b"<svg", b"\x89PNG")) and len(body) > 5000 for body in plots.values())
        found = {
            path.stem: list(csv.DictReader(path.open(encoding="utf-8")))
            for path in (directory / "tables").glob("*.csv")
        }
        assert {"compute_gemms", "compute_search", "compute_errors", "compute_workload", "compute_skew",
                "compute_beside", "compute_epilogue", "bandwidth_rows", "bandwidth_plateaus", "bandwidth_cache",
                "bandwidth_strided", "bandwidth_host", "environment_machine", "environment_checks",
                "compute_anchors", "capacity_amounts", "capacity_needs", "ops_times", "ops_work", "ops_totals",
                "ops_calibration", "ops_attention", "e2e_mfu", "e2e_ledger", "e2e_setup"} <= set(found)  # fmt: skip
        run = derive.load(directory)
        by_case = {row["case"]: row for row in found["compute_gemms"]}
        for row in [derive.compute(run).roof, *derive.compute(run).rows]:
            if row.flop_s:
                assert float(by_case[row.case]["flop_s"]) == row.flop_s.median
                assert int(by_case[row.case]["samples"]) == row.flop_s.samples
        for text in (p.read_text("utf-8") for p in (directory / "tables").glob("*.csv")):
            assert not re.search(r"\b(nan|inf)\b", text, re.I)


@pytest.mark.slow
def test_the_build_takes_warnings_for_errors(built):
    log = (built["mi355x"] / "site.log").read_text("utf-8")
    assert "build succeeded" in log and "WARNING" not in log
    done = Path(built["mi355x"].parent / "broken")
    shutil.copytree(SAMPLES / "mi355x", done)
    info = records.read_json(done / "run.json")
    info["workload"]["name"] = "fine"
    records.write_json_atomic(done / "run.json", info)
    from escher_book import stage

    staged = done / "book"
    shutil.copytree(built["mi355x"] / "book", staged)
    (staged / "glossary.md").write_text("# Glossary\n\nSee [a page](no-such-page.md).\n", "utf-8")
    result = stage.build(staged, done / "site")
    assert not result.ok and any("no-such-page" in line for line in result.warnings)


@pytest.mark.slow
def test_the_watermark_is_on_every_page_of_the_synthetic_book_and_on_none_of_the_measured(built):
    for name, text in page_texts(built["mi355x"] / "site").items():
        assert "Synthetic run: generated numbers, nothing was measured." in text, name
        assert "escher/watermark.css" in text, name
    for name, text in page_texts(built["cpu"] / "site").items():
        assert "ynthetic" not in text and "watermark" not in text, name


@pytest.mark.slow
def test_titles_and_landing_page_of_both_books(built):
    def heading(name: str, page: str) -> str:
        text = (built[name] / "site" / f"{page}.html").read_text("utf-8")
        article = text[text.index("bd-article") :]
        return unescape(re.sub(r"<[^>]+>", "", re.search(r"<h1>(.*?)</h1>", article, re.S)[1])).rstrip("#").strip()

    assert heading("mi355x", "notebooks/02_bandwidth") == "HBM bandwidth: AMD Instinct MI355X"
    assert heading("mi355x", "notebooks/01_compute") == "BF16 GEMM: AMD Instinct MI355X"
    assert heading("mi355x", "index") == "8 x AMD Instinct MI355X"
    assert heading("cpu", "notebooks/02_bandwidth") == "Memory bandwidth: CPU host"
    assert heading("cpu", "index") == "CPU host"
    for name, text in page_texts(built["cpu"] / "site").items():
        assert "HBM" not in text or name in ("glossary.html", "genindex.html"), name
    run = derive.load(built["mi355x"])
    landing = unescape((built["mi355x"] / "site" / "index.html").read_text("utf-8"))
    assert tables.value(derive.compute(run).roof.flop_s, 1e12) in landing
    assert tables.value(derive.bandwidth(run).roof.bytes_s, 1e9) in landing


@pytest.mark.slow
def test_no_page_holds_a_path_of_this_machine(built):
    for name, directory in built.items():
        for path in (directory / "site").rglob("*"):
            if path.suffix in (".html", ".md", ".ipynb", ".txt"):
                text = path.read_text("utf-8", "replace")
                assert str(directory.parent) not in text and str(ROOT) not in text, (name, path)


def test_a_page_that_cannot_be_made_fails_the_report(sample_copy, monkeypatch, capsys):
    directory = sample_copy("cpu")
    result = stage.BuildResult(True, directory / "site", (), directory / "site.log", 1.0)
    monkeypatch.setattr(runner, "execute", lambda *a: runner.Outcome("failed", "ValueError: broken", 1.0))
    monkeypatch.setattr(stage, "stage", lambda *a: [])
    monkeypatch.setattr(stage, "build", lambda *a: result)
    assert cli._build(directory, runner.Console(None)) == 1
    assert "a page could not be made from its records: compute: ValueError: broken" in capsys.readouterr().err
    monkeypatch.setattr(runner, "execute", lambda *a: runner.Outcome("ok", "", 1.0))
    assert cli._build(directory, runner.Console(None)) == 1  # what the pages declare was not made
    assert "SC-5 Artefacts: INCOMPLETE, missing: notebooks/00_environment.ipynb" in capsys.readouterr().err
    monkeypatch.setattr(artefacts, "check", artefacts.required)
    assert cli._build(directory, runner.Console(None)) == 0
    assert cli._build(directory, runner.Console(None), strict=True) == 3


def test_the_pages_are_built_again_where_an_artefact_is_missing_after_all(sample_copy, monkeypatch):
    directory = sample_copy("mi355x")
    site, built = directory / "site", []

    def build(folder, target):
        for name in artefacts.required(derive.load(directory)).required:
            path = directory / name
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text("<html></html>" if path.suffix == ".html" else "x", "utf-8")
        (site / "notebooks" / "02_bandwidth.html").unlink()
        return stage.BuildResult(True, site, (), directory / "site.log", 1.0)

    monkeypatch.setattr(runner, "execute", lambda *a: runner.Outcome("ok", "", 1.0))
    monkeypatch.setattr(stage, "stage", lambda *a: built.append(a[-1]["scorecard.md"]))
    monkeypatch.setattr(stage, "build", build)
    monkeypatch.setattr(artefacts, "why_broken", lambda path: None)
    made = report.make(directory, runner.Console(None))
    assert len(built) == 2
    assert ">GO<" in built[0] and ">CONDITIONAL GO<" in built[1]
    assert "missing: site/notebooks/02_bandwidth.html" in unescape(built[1]).replace("\\", "")
    assert made.card.criterion("SC-5").status == "INCOMPLETE" and made.card.exit_status == 1
    assert json.loads((directory / "scorecard.json").read_text("utf-8"))["verdict"] == "CONDITIONAL GO"


def test_what_was_not_recorded_is_not_called_fine():
    run = derive.load(SAMPLES / "cpu")
    for env in (None, {**run.env, "checks": []}):
        assert "not recorded" in page_environment.finding(dataclasses.replace(run, env=env)).markdown
    gone = with_records(run, "compute", lambda r: None if r.case == "roof" else r)
    assert "no roof: its page says why" in findings.cards(gone) and "not measured" not in findings.cards(gone)
