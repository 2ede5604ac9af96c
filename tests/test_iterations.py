"""The iterations of a run: mean, median and interval by hand, the lines of the console, and the RESULT line."""

from __future__ import annotations

import json
import math
import random
import statistics
from dataclasses import replace
from urllib.parse import unquote

import model_records as made
import pytest
from conftest import MI355X
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from escher_kernels.records import Record, RecordError
from validation import compare, derive, iterations

quick = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
T975 = {2: 12.7062047, 3: 4.3026527, 4: 3.1824463}  # Student's, by the number of values


def at(iteration: int, records) -> list[Record]:
    return [replace(r, iteration=iteration) for r in records]


@pytest.fixture
def run_of(made_run):
    """`run_of(roof, roof, ...)`: a run whose iterations have that compute roof (FLOP/s); None: no records at all."""

    def make(*roofs: float | None, given=(), **info) -> derive.LoadedRun:
        items = [r for i, peak in enumerate(roofs, 1) if peak for r in at(i, made.roofs(peak, peak))]
        items += [r for i, held in enumerate(given, 1) for r in at(i, made.capacity(2**40, held))]
        about = {"iterations": max(1, len(roofs)), "families": ["compute", "bandwidth"]} | info
        return derive.separated(made_run(items, found=MI355X, **about))

    return make


def headline(found, key="compute_roof"):
    return next(h for h in found["headlines"] if h["key"] == key)


@pytest.mark.parametrize("values, median", [((1000, 1010), 1005), ((1000, 1010, 1030), 1010), ((5, 4, 3, 9), 4.5)])
def test_mean_median_and_interval_by_hand(run_of, values, median):
    h = headline(iterations.summary(run_of(*values)))
    mean = sum(values) / len(values)
    spread = math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1))
    half = T975[len(values)] * spread / math.sqrt(len(values))
    assert (h["mean"], h["median"]) == pytest.approx((mean, median))
    assert (h["low"], h["high"]) == pytest.approx((max(0, mean - half), mean + half), rel=1e-6)
    assert h["cv"] == pytest.approx(spread / mean)
    assert (h["values"], h["count"], h["unit"], h["family"]) == (list(values), len(values), "FLOP/s", "compute")
    assert h["reasons"] == [None] * len(values)


def test_one_value_has_no_interval(run_of):
    h = headline(iterations.summary(run_of(1000)))
    assert (h["mean"], h["median"], h["low"], h["high"], h["cv"], h["count"]) == (1000, 1000, None, None, None, 1)
    assert iterations.mean_interval([7.0]) is None


@quick
@given(st.lists(st.floats(1e-9, 1e18), min_size=2, max_size=8), st.floats(1e-6, 1e6))
def test_the_interval_holds_the_mean_and_scales_with_it(values, factor):
    low, high = iterations.mean_interval(values)
    mean = statistics.fmean(values)
    assert 0 <= low <= mean * (1 + 1e-12) and high >= mean * (1 - 1e-12)
    again = iterations.mean_interval([v * factor for v in values])
    assert again == pytest.approx((low * factor, high * factor), rel=1e-6, abs=mean * factor * 1e-9)


def test_the_interval_covers_the_mean_as_often_as_it_says():
    rng, inside = random.Random(4), 0
    for _ in range(1000):
        low, high = iterations.mean_interval([rng.gauss(100, 3) for _ in range(3)])
        inside += low <= 100 <= high
    assert 0.93 <= inside / 1000 <= 0.97


def test_an_iteration_without_a_value_says_why(run_of):
    run = run_of(1000, None, 1020)
    ends = {"compute": {"status": "died", "iterations": {
        "1": {"status": "ok"}, "2": {"status": "died", "message": "killed"}, "3": {"status": "ok"}}}}  # fmt: skip
    everything = replace(run.files["compute"], records=[r for p in run.iterations for r in p.records("compute")])
    run = derive.separated(replace(run, files={"compute": everything}, status=ends))
    found = iterations.summary(run)
    h = headline(found)
    assert (h["values"], h["count"]) == ([1000, None, 1020], 2)
    assert h["reasons"] == [None, "family compute was not measured (died: killed)", None]
    assert [p["iteration"] for p in found["iterations"]] == [1, 2, 3]
    assert [p["status"] for p in found["iterations"]] == [
        {"compute": "ok", "bandwidth": "not run"}, {"compute": "died", "bandwidth": "not run"},
        {"compute": "ok", "bandwidth": "not run"},
    ]  # fmt: skip
    none = headline(found, "bandwidth_roof")
    assert (none["mean"], none["median"], none["low"], none["count"]) == (None, None, None, 0)
    assert none["values"] == [None] * 3


def test_a_summary_is_plain_json_with_every_headline(sample):
    found = iterations.summary(sample)
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert [h["key"] for h in found["headlines"]] == list(compare.HEADLINES)
    assert found["run_id"] == sample.info["run_id"] and len(found["iterations"]) == 1
    assert set(found["iterations"][0]["status"].values()) == {"ok"}


def test_lines_are_grouped_by_family_in_a_persons_units(run_of):
    found = list(iterations.lines(iterations.summary(run_of(10**15, 11 * 10**14, None, given=(2**36, 2**36)))))
    assert found[0] == "compute, 3 iterations"
    assert found[1] == "  compute roof: mean 1050 TFLOP/s, median 1050, 95 % interval 414.7 to 1685; 1000, 1100, -"
    assert found[2] == "bandwidth, 3 iterations" and found[3].startswith("  bandwidth roof: mean 1.05e+06 GB/s")
    assert found[4:] == ["capacity, 3 iterations",
                         "  memory in blocks of 1 GiB: mean 64 GiB, median 64, 95 % interval 64 to 64; 64, 64, -"]  # fmt: skip


def test_what_was_not_measured_has_no_line(run_of):
    assert list(iterations.lines(iterations.summary(run_of(None, None)))) == ["no iteration has a headline"]
    [_, line, *_] = iterations.lines(iterations.summary(run_of(1000)))
    assert "no interval" in line


# --------------------------------------------------------------------------------------------- the RESULT line


def parsed(line: str) -> dict[str, str]:
    head, *fields = line.split(" ")
    assert head == "RESULT:"
    return dict(field.split("=", 1) for field in fields)


def test_the_result_line_of_a_sample(sample):
    line = iterations.result_line(sample, 1)
    found = parsed(line)
    assert line.startswith("RESULT: iteration=1 compute_roof_flop_s=")
    roof = derive.compute(sample).roof.flop_s.median
    assert float(found["compute_roof_flop_s"]) == pytest.approx(roof, rel=1e-8)
    for key in ("bandwidth_roof_bytes_s", "mfu_compiled_frac", "pass_compiled_s", "capacity_bytes"):
        assert float(found[key]) > 0
    assert found["families"] == "ok:environment,compute,bandwidth,capacity,ops,e2e"
    assert (found["run"], found["workload"]) == (sample.info["run_id"], "escher_14b_480p")
    assert found["target"] in ("cpu", "mi355x")


def test_each_iteration_has_its_own_line(run_of):
    run = run_of(1000, 2000, None)
    assert [parsed(iterations.result_line(run, i))["compute_roof_flop_s"] for i in (1, 2, 3)] == ["1000", "2000", "n/a"]
    assert parsed(iterations.result_line(run, 3))["families"] == "not%20run:compute,bandwidth"
    with pytest.raises(RecordError, match="no iteration 4; it has 1, 2, 3"):
        iterations.result_line(run, 4)


def test_families_are_grouped_by_how_they_ended(run_of):
    run = replace(run_of(1000, families=["compute", "bandwidth", "e2e"]),
                  status={"compute": {"status": "ok"}, "bandwidth": {"status": "ok"}, "e2e": {"status": "failed"}})  # fmt: skip
    assert parsed(iterations.result_line(run, 1))["families"] == "ok:compute,bandwidth;failed:e2e"


@quick
@given(
    st.dictionaries(st.text(min_size=1, max_size=8), st.text(min_size=1, max_size=8), max_size=4),
    st.text(max_size=12), st.text(max_size=12),
    st.lists(st.integers(1, 10**18) | st.none(), min_size=1, max_size=3),
)  # fmt: skip
def test_a_result_line_can_be_read_back(run_of, ends, run_id, workload, roofs):
    """One line, split at blanks and the first "=", whatever the names hold."""
    run = run_of(*roofs, run_id=run_id, families=list(ends), workload={"name": workload})
    run = replace(run, status={f: {"status": how} for f, how in ends.items()})
    line = iterations.result_line(run, run.iteration)
    assert len(line.splitlines()) == 1 and line.isascii()
    found = parsed(line)
    assert found["iteration"] == str(run.iteration)
    assert unquote(found["run"]) == (run_id or "n/a") and unquote(found["workload"]) == (workload or "n/a")
    if "compute" in run.files:
        assert float(found["compute_roof_flop_s"]) == pytest.approx(roofs[run.iteration - 1], rel=1e-8)
    told = {}
    for group in found["families"].split(";") if found["families"] != "n/a" else ():
        status, names = group.split(":")
        told |= {unquote(name): unquote(status) for name in names.split(",")}
    assert {f: s for f, s in told.items() if f in ends} == ends


def test_a_record_that_lacks_what_its_family_writes_is_one_line(made_run):
    run = made_run([Record("bandwidth", "copy", samples_s=(1.0,), bytes_moved=1, cache="cold")])
    for tell in (lambda: iterations.result_line(run, 1), lambda: iterations.summary(run)):
        with pytest.raises(RecordError, match="a record lacks what its family writes .KeyError: 'op'.; measure again"):
            tell()
