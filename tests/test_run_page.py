"""The page "The run": what it tells of a run's making, of resuming, fallbacks and iterations, and what older runs lack."""

from __future__ import annotations

import re
from dataclasses import replace

import model_records as made
import pytest
from conftest import CPU, MI355X
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from escher_book import findings, run_page
from escher_kernels.records import Record
from validation import derive, iterations

quick = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
STEPS = [
    {"name": "CPU governor", "path": f"policy{i}", "status": "done", "before": "powersave", "after": "performance", "detail": ""}
    for i in range(64)
] + [{"name": "drop caches", "path": "drop_caches", "status": "refused", "before": None, "after": None,
      "detail": "Permission denied; root may"}]  # fmt: skip
TUNED = {"numactl": "--cpunodebind=0", "stat_interval_s": 0.5, "prepare_sys": STEPS}
RECORDED = {
    "iterations": 1, "partition": "CPX", "nps": "NPS4", "power_cap_w": 1000.0, "world": 1, "families": ["compute", "bandwidth"],
    "argv": ["escher", "book", "--results-dir", "/home/someone/my results", "--numactl", "--cpunodebind=0"],
    "git": {"commit": "abc123", "dirty": True}, "tuning": TUNED, "resumed_utc": [],
    "settings": {"budget": "standard", "target": "auto"},
}  # fmt: skip


def cells(table) -> dict[str, str]:
    return {row[0]: row[1] for row in table.cells}


def at(iteration: int, records) -> list[Record]:
    return [replace(r, iteration=iteration) for r in records]


def mark(kind: str, utc: str = "2026-01-02T03:04:05+00:00", iteration: int = 1, family: str = "compute") -> Record:
    return Record(family, "process", role="mark", iteration=iteration, params={"kind": kind, "created_utc": utc})


@pytest.fixture
def gpu(made_run):
    """`gpu(records, **info)`: a run on an MI355X, with all that a new run.json holds."""
    return lambda records=(), **info: derive.separated(made_run(records, found=MI355X, **{**RECORDED, **info}))


@pytest.fixture
def three(gpu):
    items = [r for i, peak in enumerate((1000, 1010, 1030), 1) for r in at(i, made.roofs(peak * 10**12, 10**12))]
    return gpu(items, iterations=3)


# --------------------------------------------------------------------------------------------- how it was made


def test_what_a_new_run_recorded(gpu):
    found = cells(run_page.made(gpu()))
    assert found["command"] == "escher book --results-dir '.../my results' --numactl --cpunodebind=0"
    assert (found["partition"], found["memory partition (NPS)"], found["power cap"]) == ("CPX", "NPS4", "1000.0 W")
    assert (found["GPUs"], found["processes (world)"], found["iterations"]) == ("8, measured on device 0", "1", "1")
    assert found["begun"] == "2026-01-01 00:00:00 UTC" and found["resumed"] == "no"
    assert found["source"] == "commit abc123, with changes that were not committed"
    assert found["target"] == "AMD Instinct MI355X (asked for: auto)" and found["families"] == "compute, bandwidth"


@pytest.mark.parametrize(
    "argv, text",
    [
        (["escher", "--results-dir=/a/b/c"], "escher --results-dir=.../c"),
        (["x", "/abs/file.json", "rel/path"], "x .../file.json rel/path"),
        (["x", "a b", "$(rm)"], "x 'a b' '$(rm)'"),
        (["x", "two\n\nlines"], "x 'two lines'"),
        ([], "not recorded"),
        (None, "not recorded"),
        ("escher", "not recorded"),
    ],
)
def test_the_command_line(argv, text):
    assert run_page.command(argv) == text


def test_a_null_was_asked_for_and_a_missing_key_was_not_recorded(gpu, made_run):
    nulls = gpu(partition=None, nps=None, power_cap_w=None)
    found = cells(run_page.made(nulls))
    assert found["partition"] == found["memory partition (NPS)"] == found["power cap"] == "not known"
    bare = made_run([], found=MI355X)
    found = cells(run_page.made(bare))
    names = ("command", "partition", "memory partition (NPS)", "power cap", "processes (world)", "iterations", "families")
    assert {found[n] for n in (*names, "source")} == {"not recorded"}
    assert set(cells(run_page.tuning(bare)).values()) == {"not recorded"}
    assert cells(run_page.made(made_run([], found=CPU, partition=None)))["partition"] == "–"


def test_tuning(gpu):
    found = cells(run_page.tuning(gpu()))
    assert found == {"numactl": "--cpunodebind=0", "telemetry of the host": "0.5 s between two readings",
                     "settings of the machine": "tuned, see below"}  # fmt: skip
    nothing = cells(run_page.tuning(gpu(tuning={"numactl": None, "stat_interval_s": None, "prepare_sys": []})))
    assert list(nothing.values()) == ["not used", "none was kept", "left as they were"]


def test_files_that_fared_alike_are_one_step(gpu):
    table = run_page.prepared(gpu())
    assert table.cells == [
        ["CPU governor", "done", "powersave", "performance", "64", "–"],
        ["drop caches", "refused", "–", "–", "1", "Permission denied; root may"],
    ]
    assert run_page.prepared(gpu(tuning={})) is None


@pytest.mark.parametrize("tuning", [None, [], "x", {"prepare_sys": "all"}, {"prepare_sys": [1, None, {}]}, {"numactl": 3}])
def test_a_tuning_of_another_form_does_not_end_the_page(gpu, tuning):
    assert "## Tuning" in run_page.page(gpu(tuning=tuning))


# --------------------------------------------------------------------------------------------- how it went


def test_how_each_family_ended_in_each_iteration(three):
    began = "2026-01-01T00:00:02+00:00"
    ends = {"compute": {"status": "failed", "message": "no\n\nmemory", "seconds": 12.0, "started_utc": began}}
    run = replace(three, status={"compute": {"status": "ok"}, "bandwidth": {"status": "ok"}},
                  repeats=(replace(three.repeats[0], status=ends), three.repeats[1]))  # fmt: skip
    rows = {(r[0], r[1]): r[2:] for r in run_page.ended(run).cells}
    assert rows["compute", "1"] == ["ok", "–", "–", "11", ""]
    assert rows["compute", "2"] == ["failed", "2026-01-01 00:00:02 UTC", "12.0 s", "11", "no memory"]
    assert rows["bandwidth", "3"][0] == "unknown"
    one = run_page.ended(replace(run, repeats=()))
    assert [c.title for c in one.columns] == ["family", "ended", "begun", "time", "records"]


def test_a_resumed_run_says_which_process_measured_what(gpu):
    items = [Record("compute", f"a{i}", value=1.0) for i in range(5)]
    again = mark("resumed", "2026-01-03T00:00:00+00:00")
    run = gpu([*items[:2], mark("resumed"), *items[2:3], again, *items[3:]], resumed_utc=["2026-01-02T03:04:00+00:00"])
    text = run_page.resumed(run).replace("\\", "")
    assert text == (
        "The run was resumed on 2026-01-02 03:04:00 UTC. What each process measured: compute: 2 records by the first process, "
        "1 record by the one of 2026-01-02 03:04:05 UTC, 2 records by the one of 2026-01-03 00:00:00 UTC."
    )
    later = gpu([*items, *at(2, items[:1]), mark("resumed", iteration=2), *at(2, items[1:])])
    assert "compute, iteration 2: 1 record by the first process, 4 records by" in run_page.resumed(later).replace("\\", "")


def test_a_run_that_was_resumed_between_families(gpu):
    text = run_page.resumed(gpu(resumed_utc=["2026-01-02T00:00:00+00:00", "2026-01-03T00:00:00+00:00"])).replace("\\", "")
    assert text.startswith("The run was resumed on 2026-01-02 00:00:00 UTC and on 2026-01-03 00:00:00 UTC.")
    assert "measured by new processes from its beginning" in text
    new_process = gpu([mark("iteration", iteration=2), *at(2, made.roofs())])
    assert run_page.resumed(gpu()) == run_page.resumed(new_process) == ""


def test_fallbacks_are_grouped_by_what_they_say(gpu):
    def said(family, case, *flags, **more):
        return Record(family, case, value=1.0, flags=flags, **more)

    run = gpu([
        said("ops", "a", "FALLBACK: no flash attention", "NOISY: spread"), said("ops", "a", "FALLBACK: no flash attention"),
        said("ops", "b", "FALLBACK: no flash attention"), said("e2e", "eager", "FALLBACK: no flash attention", "FALLBACK: x|y"),
        said("ops", "a", "FALLBACK: later", iteration=2),
    ])  # fmt: skip
    assert run_page.fallbacks(run).cells == [
        ["later", "1", "ops"], ["no flash attention", "3", "e2e, ops"], ["x|y", "1", "e2e"]
    ]  # fmt: skip
    assert "None was reported." not in run_page.page(run)
    none = gpu([said("ops", "a", "HOST_BOUND", "no FALLBACK: here")])
    assert run_page.fallbacks(none) is None and "None was reported." in run_page.page(none)


# --------------------------------------------------------------------------------------------- iterations


def test_iterations_have_a_table_a_family(three):
    compute, bandwidth = run_page.iteration_tables(iterations.summary(three))
    assert (compute.name, compute.caption) == ("iterations_compute", "compute: 3 iterations")
    shown = dict(zip((c.title for c in compute.columns), compute.cells[0], strict=True))
    nb = "\N{NO-BREAK SPACE}"
    assert shown == {
        "headline": "compute roof", "mean": f"1,013{nb}TFLOP/s", "median": f"1,010{nb}TFLOP/s",
        "95 % interval of the mean": "975 to 1,051", "CV": "1.5 %",
        "of each iteration": f"1,000{nb}TFLOP/s, 1,010{nb}TFLOP/s, 1,030{nb}TFLOP/s",
    }  # fmt: skip
    assert compute.raw[0]["value_3"] == 1.03e15 and bandwidth.name == "iterations_bandwidth"


def test_an_iteration_without_a_value_says_why_in_its_table(gpu):
    run = gpu([*made.roofs(1000, 1000), *at(2, [r for r in made.roofs(1000, 1000) if r.family == "bandwidth"])])
    compute, _ = run_page.iteration_tables(iterations.summary(run))
    assert compute.cells[0][-1] == "iteration 2: family compute was not measured" and compute.cells[0][-2].endswith(", –")


def test_the_chart_shows_each_iteration_over_the_mean(three):
    spec = run_page.strip(iterations.summary(three))
    rows = [r for data in spec["datasets"].values() for r in data if r.get("headline") == "compute roof"]
    mean = 3040 / 3
    assert {r["iteration"]: r["off"] for r in rows} == pytest.approx(
        {"1": (1000 / mean - 1) * 100, "2": (1010 / mean - 1) * 100, "3": (1030 / mean - 1) * 100}
    )
    equal = [r for data in spec["datasets"].values() for r in data if r.get("headline") == "bandwidth roof"]
    assert [(r["iteration"], r["off"]) for r in equal] == [("1, 2, 3", 0.0)]
    text = run_page.page(three)
    assert text.count("<svg") == 1 and "one point" not in text and "<script" not in text
    assert not any("\n\n" in block for block in re.findall(r"<svg.*?</svg>", text, re.S))


def test_one_iteration_is_a_sentence(sample):
    text = run_page.page(sample)
    assert "One iteration was measured" in text and "ITERATIONS=3" in text and "<svg" not in text
    assert run_page.repeated(sample) == [run_page.ONE]


def test_nothing_to_draw_where_no_headline_has_two_values(gpu):
    found = iterations.summary(gpu(made.roofs(1000, 1000), iterations=3))
    assert run_page.strip(found) is None


def test_iterations_that_cannot_be_read_are_said(gpu):
    run = gpu([Record("bandwidth", "copy", samples_s=(1.0,), bytes_moved=1, cache="cold")], iterations=2)
    assert "Not shown" in run_page.page(run) and "KeyError" in run_page.page(run)


# --------------------------------------------------------------------------------------------- the page


def test_the_page_of_a_sample(sample):
    text = run_page.page(sample)
    assert text.startswith("# The run\n") and text == run_page.page(sample)
    assert "`raw/run.log`" in text and "not recorded" in text and "](" not in text
    plain = run_page.page(sample, markdown=True)
    assert "<" not in re.sub(r"\\<", "", plain)


def test_the_page_of_three_iterations_is_deterministic_and_says_what_others_show(three):
    assert run_page.page(three) == run_page.page(three)
    plain = run_page.page(three, markdown=True)
    assert "The pages show iteration 1 of 3" in plain.replace("\\", "") and "<" not in plain.replace("\\<", "")


HOSTILE = "<b onclick='x'>&\n\n# head\n\n[a](http://b) | `c` \x1b[31m"


def test_whatever_a_file_says_is_text(gpu):
    steps = [{**STEPS[0], "detail": HOSTILE, "before": HOSTILE}]
    items = [Record("compute", "a", value=1.0, flags=(f"FALLBACK: {HOSTILE}",)), mark("resumed", HOSTILE),
             Record("compute", "b", value=1.0)]  # fmt: skip
    run = gpu(items, argv=["escher", HOSTILE], partition=HOSTILE, tuning={"numactl": HOSTILE, "prepare_sys": steps},
              resumed_utc=[HOSTILE], families=[HOSTILE], git={"commit": HOSTILE}, iterations=2)  # fmt: skip
    run = replace(run, status={"compute": {"status": "failed", "message": HOSTILE}})
    text, plain = run_page.page(run), run_page.page(run, markdown=True)
    outside = re.sub(r"<(div|p) .*?</\1>", "", text)
    for shown in (outside, plain):
        assert "[a](" not in shown and "<" not in shown.replace("\\<", "") and "`c`" not in shown
    assert "<b" not in text.replace("\\<", "") and text.count("&lt;b onclick=&#x27;x&#x27;&gt;&amp;") > 5
    headings = re.findall(r"^#+ .*$", run_page.page(run), re.M)
    assert headings == ["# The run", "## How it was made", "## Tuning", "## How it went", "## Library fallbacks", "## Iterations"]


@quick
@given(st.text(max_size=40))
def test_no_text_ends_a_table(gpu, text):
    """A blank line ends an HTML block of Markdown, and what follows would be read as Markdown."""
    run = gpu(argv=["escher", text], partition=text, tuning={"numactl": text})
    for block in re.findall(r"<div.*?</div>", run_page.page(run), re.S):
        assert "\n" not in block


def test_tables_for_csv(three, sample):
    assert [t.name for t in run_page.csv_tables(three)] == [
        "run_made", "run_tuning", "run_prepare_sys", "run_ended", "iterations_compute", "iterations_bandwidth"
    ]  # fmt: skip
    assert [t.name for t in run_page.csv_tables(sample)] == ["run_made", "run_tuning", "run_ended"]


# --------------------------------------------------------------------------------------------- banners


def test_banners_of_iterations(three):
    note = ("note", "The pages show iteration 1 of 3; the page The run has all.")
    assert findings.banners(three) == findings.banners(three, "compute") == [note]
    second = replace(three.repeats[0], status={"compute": {"status": "died", "message": "killed"}, "ops": {"status": "failed"}})
    run = replace(three, repeats=(second, three.repeats[1]))
    assert findings.banners(run) == [("warning", "Iteration 2 is not whole: compute died: killed; ops failed."), note]
    assert findings.banners(run, "compute") == [("warning", "Iteration 2 is not whole: compute died: killed."), note]
    assert findings.banners(run, "bandwidth") == [note]


def test_banner_of_a_family_that_was_resumed(gpu):
    items = [Record("compute", f"a{i}", value=1.0) for i in range(3)]
    run = gpu([*items[:2], mark("resumed"), *items[2:], mark("resumed"), Record("ops", "b", value=1.0)])
    words = "This run was resumed after 2 and after 3 records of this page: another process measured the rest."
    assert findings.banners(run, "compute") == [("note", words)]
    assert findings.banners(run) == findings.banners(run, "ops") == []
    assert findings.banners(gpu([mark("resumed"), *items]), "compute") == []  # the first process had recorded nothing
