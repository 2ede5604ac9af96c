"""Numbers from records: hand-computed values, what one record may change, and what is never computed."""

from __future__ import annotations

import dataclasses
import json

import pytest
from conftest import CPU, MI355X, UNKNOWN_GPU

from escher_book import tables
from escher_book.pages import bandwidth as page_bandwidth
from escher_book.pages import compute as page_compute
from escher_kernels import records
from escher_kernels.records import Record, RecordError
from escher_kernels.run import families
from validation import derive


def blocks(values, family="compute", case="roof", **more) -> list[Record]:
    """One record a block; a value is the samples of a block, or its only sample."""
    return [
        Record(family, case, block=i, samples_s=tuple(v) if isinstance(v, (list, tuple)) else (v,), **more)
        for i, v in enumerate(values)
    ]


def anchor(block: int, rate: float, family="compute") -> Record:
    return Record(family, "anchor.gemm", role="anchor", block=block, samples_s=(1.0,), flop=rate)


SHAPE = {"m": 10, "n": 10, "k": 5, "layout": "NN", "searched": 3}


# --------------------------------------------------------------------------------------------- by hand


def test_roof_is_the_median_of_block_medians_with_their_range(made_run):
    samples = [(2.0, 2.2, 9.0), (2.1,), (1.9, 1.9), (2.3,), (1.8,), (2.4,)]  # block medians 2.2 2.1 1.9 2.3 1.8 2.4
    run = made_run(blocks(samples, params=SHAPE, flop=1000, calls_per_sample=2))
    roof = derive.compute(run).roof
    assert roof.time_s.median == pytest.approx((2.1 + 2.2) / 2 / 2)
    assert (roof.time_s.lo, roof.time_s.hi) == pytest.approx((0.9, 1.2))
    assert (roof.time_s.blocks, roof.time_s.samples) == (6, 9)
    assert roof.time_s.coverage == pytest.approx(1 - 2 / 2**6)
    assert roof.flop_s.median == pytest.approx(1000 / 1.075)  # of the time, not the median 930.74 of the blocks' rates
    assert roof.flop_s == roof.time_s.over(1000)
    assert (roof.flop_s.lo, roof.flop_s.hi) == pytest.approx((1000 / 1.2, 1000 / 0.9))
    assert roof.bytes_s is None  # no bytes were declared
    assert not derive.compute(run).converged


def test_a_rate_is_work_over_the_times_estimate_where_the_work_is_one(made_run):
    run = made_run([])
    times = [1.0, 2.0, 3.0, 6.0]
    [row] = derive.rows(blocks(times, flop=60, bytes_moved=120), run.config)
    assert (row.flop_s.lo, row.flop_s.median, row.flop_s.hi) == pytest.approx(
        (10, 60 / 2.5, 60)
    )  # not 25 of 60 30 20 10
    assert row.bytes_s == row.time_s.over(120) and row.flop_s.times(2) == row.bytes_s
    items = [
        dataclasses.replace(r, flop=f) for r, f in zip(blocks(times, bytes_moved=120), (60, 60, 60, 600), strict=True)
    ]
    [row] = derive.rows(items, run.config)
    assert (row.flop_s.lo, row.flop_s.median, row.flop_s.hi) == pytest.approx(
        (20, 45, 100)
    )  # 60 30 20 100, of each block
    assert row.bytes_s == row.time_s.over(120)  # the bytes are one
    [row] = derive.rows([dataclasses.replace(items[0], flop=None), *items[1:]], run.config)
    assert row.flop_s is None and row.bytes_s


def test_a_quotient_spans_the_ratios_of_the_ends():
    a, b = derive.Estimate(6.0, 4.0, 9.0, 0.9, 6, 12), derive.Estimate(2.0, 1.0, 4.0, 0.5, 5, 7)
    assert derive.quotient(a, b) == derive.ridge(a, b) == derive.Estimate(3.0, 1.0, 9.0, 0.45, 5, 19)


def test_a_share_of_a_measured_basis_spans_its_interval():
    rate, roof = derive.Estimate(6.0, 5.0, 8.0, 1.0, 6, 6), derive.Estimate(10.0, 8.0, 20.0, 0.5, 6, 6)
    measured = derive.Basis("measured", "roof", 10.0, "", True, interval=roof)
    assert measured.frac(rate) == derive.Estimate(0.6, 0.25, 1.0, 0.5, 6, 12)
    rated = dataclasses.replace(measured, interval=None).frac(rate)
    assert (rated.lo, rated.median, rated.hi) == pytest.approx((0.5, 0.6, 0.8))
    assert measured.frac(None) is dataclasses.replace(measured, same_device=False).frac(rate) is None


def test_a_roof_with_five_steady_blocks_has_not_converged(made_run):
    def steady(count):
        return made_run(blocks([1.0] * count, params=SHAPE, flop=1000))

    assert derive.compute(steady(6)).converged
    assert not derive.compute(steady(5)).converged


def test_best_square_is_the_fastest_timed_one(made_run):
    items = blocks([1.0] * 6, case="square.8", flop=100) + blocks([1.0] * 6, case="square.16", flop=300)
    items += blocks([1.0] * 6, case="ffn.linear1", flop=900)
    compute = derive.compute(made_run(items))
    assert compute.best_square.case == "square.16"
    assert compute.roof is None and not compute.converged


def copies(size: int, seconds, plateau=True, numbers=None) -> list[Record]:
    params = {"op": "copy", "buffer_bytes": size, "plateau": plateau}
    made = blocks(seconds, "bandwidth", f"copy.{size}", params=params, bytes_moved=2 * size, cache="cold")
    return [dataclasses.replace(r, block=n) for r, n in zip(made, numbers or range(len(made)), strict=True)]


def test_plateau_takes_the_median_size_in_each_block(made_run):
    run = made_run([
        *copies(50, [1.0, 1.0, 1.0, 1.0, 1.0, 2.0]),  # 100 B/s
        *copies(100, [1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),  # 200 B/s
        *copies(200, [1.0, 1.0, 1.0, 1.0, 1.0, 4.0]),  # 400 B/s
        *copies(5, [1.0] * 6, plateau=False),
    ])  # fmt: skip
    roof = derive.bandwidth(run).roof
    assert roof.sizes == (50, 100, 200)
    assert roof.bytes_s.median == 200
    assert (roof.bytes_s.lo, roof.bytes_s.hi) == (100, 200)  # last block: 50, 200 and 100 B/s
    assert roof.spread_frac == 400 / 100 - 1


def test_plateau_compares_sizes_only_in_blocks_that_all_of_them_have(made_run):
    """A size that is slow takes blocks 0, 2 and 5; its 2nd block must not be paired with another's block 1."""
    fast = [1.0, 100.0, 1.0, 100.0, 100.0, 1.0]
    slow = copies(200, [1.0, 1.0, 1.0], numbers=[0, 2, 5])
    roof = derive.bandwidth(made_run([*copies(50, fast), *copies(100, fast), *slow])).roof
    assert roof.bytes_s.blocks == 3
    assert (roof.bytes_s.lo, roof.bytes_s.median, roof.bytes_s.hi) == (200, 200, 200)


def test_plateau_without_a_common_block_is_none(made_run):
    items = copies(50, [1.0], numbers=[0]) + copies(100, [1.0], numbers=[1])
    assert derive.bandwidth(made_run(items)).roof is None


def test_anchors_and_the_rows_between_two_that_differ(made_run):
    items = [
        anchor(0, 100),
        *blocks([1.0] * 6, case="early", flop=1),
        anchor(1, 104),
        *blocks([1.0] * 6, case="late", flop=1),
        anchor(2, 98),
        *blocks([1.0] * 6, case="after", flop=1),
    ]
    run = made_run(items)
    [found] = derive.anchors(run.records("compute"), run.config)
    assert found.rates == (100, 104, 98)
    assert found.largest_move_frac == pytest.approx(104 / 98 - 1)
    assert found.moved == (1,)
    flags = {r.case: r.flags for r in derive.rows(items, run.config) if r.role == "case"}
    assert flags == {"early": (), "late": ("NOISY: anchor moved",), "after": ()}


def probe(case: str, flop: int, samples, block=0, **params) -> Record:
    params = {"dtype": "bfloat16", **params}
    return Record("compute", case, role="probe", params=params, flop=flop, samples_s=tuple(samples), block=block)


def test_probed_peak_is_the_sum_of_each_threads_best(made_run):
    items = [
        probe("peak.amx", 100, [1.0, 0.5], threads=2),  # together 200 at best
        probe("peak.amx.thread0", 50, [0.20, 0.5], thread=0, of="peak.amx"),  # 250
        probe("peak.amx.thread1", 50, [0.5, 0.25], thread=1, of="peak.amx"),  # 200
        probe("peak.avx", 10, [1.0], threads=2),
    ]
    compute = derive.compute(made_run(items))
    assert [(p.name, p.best_flop_s) for p in compute.probes] == [("amx", 450), ("avx", 10)]
    [basis] = compute.bases
    assert (basis.name, basis.rate, basis.same_device) == ("probed", 450, True)
    one_thread_missing = derive.compute(made_run([items[0], items[1]]))
    assert one_thread_missing.probes[0].best_flop_s == 200


def test_clock_is_unknown_where_two_chains_disagree(made_run):
    def clock(case, cycles):
        return Record("compute", f"clock.{case}", role="probe", params={"cycles": cycles}, samples_s=(1.0, 0.5))

    assert derive.compute(made_run([clock("add", 100), clock("mul", 102)])).clock_hz == 204
    hz, note = (derive.compute(made_run([clock("add", 100), clock("mul", 110)])).__dict__[k] for k in
                ("clock_hz", "clock_note"))  # fmt: skip
    assert hz is None and "disagree" in note


def test_pairs_of_one_block_are_one_observation(made_run):
    """run_pairs writes two records a block; samples inside a block are not independent."""
    items = []
    for block in range(6):
        for repeat in range(2):
            for name, seconds in (("torch", 1.0), ("plain", 2.0 + block)):
                items.append(
                    Record("bandwidth", f"stream.{name}", role="pair", block=block, samples_s=(seconds,),
                           pair_id=f"{block}.{repeat}", bytes_moved=8, params={"op": "copy"}, cache="cold")
                )  # fmt: skip
    bandwidth = derive.bandwidth(made_run(items))
    ratio = bandwidth.speedup["plain"]
    assert (ratio.blocks, ratio.samples) == (6, 12)
    assert (ratio.lo, ratio.median, ratio.hi) == (2, 4.5, 7)
    assert {r.time_s.blocks for r in bandwidth.pairs} == {6}


def test_gemms_are_grouped_by_name(made_run):
    names = ["roof", "square.64", "self_attn.q", "time_proj", "skew.1x4", "batched.qk", "addmm.self_attn.q", "long_k",
             "reduced.roof"]  # fmt: skip
    compute = derive.compute(made_run([r for n in names for r in blocks([1.0] * 6, case=n, params=SHAPE, flop=10)]))
    groups = ["square", "workload", "workload", "skew", "batched", "addmm", "long_k"]
    assert [derive.gemm_group(r) for r in compute.rows] == groups
    assert [r.case for r in compute.of("workload", "skew")] == ["self_attn.q", "time_proj", "skew.1x4"]
    assert [r.case for r in compute.reduced] == ["reduced.roof"] and compute.roof.case == "roof"


def test_a_reduced_precision_row_is_neither_roof_nor_square_nor_compared(made_run):
    items = blocks([2.0] * 6, params=SHAPE, flop=10) + blocks([1.0] * 6, case="reduced.roof", params=SHAPE, flop=10)
    compute = derive.compute(made_run(items))
    assert compute.roof.flop_s.median == 5 and compute.rows == []


def test_equal_shapes_of_the_workload_stand_together(made_run):
    other = {**SHAPE, "m": 11}
    items = [
        *blocks([1.0] * 6, case="a.q", params=SHAPE, flop=10),
        *blocks([1.0] * 6, case="a.k", params=SHAPE, flop=10),
    ]
    items += [
        *blocks([1.0] * 6, case="a.o", params=other, flop=10),
        *blocks([1.0] * 6, case="skew.x", params=SHAPE, flop=10),
    ]
    items += [Record("compute", "a.v", params=SHAPE, skipped="no memory")]
    assert [[r.case for r in group] for group in derive.compute(made_run(items)).same_shapes()] == [["a.q", "a.k"]]


def fused_pairs(unfused, fused) -> list[Record]:
    return [
        Record("compute", f"epilogue.{name}", role="pair", block=i, samples_s=(s,), flop=10, params=SHAPE, order=order,
               pair_id=f"{i}.0")
        for order, (name, seconds) in enumerate({"unfused": unfused, "fused": fused}.items())
        for i, s in enumerate(seconds)
    ]  # fmt: skip


def test_the_gain_of_a_fused_epilogue_is_a_ratio_of_pairs(made_run):
    """A machine that slows down slows both of a pair: the ratio stays."""
    unfused, fused = [3.0, 30.0, 6.0, 3.0, 3.0, 3.0], [2.0, 20.0, 4.0, 2.0, 2.0, 2.0]
    gain = derive.compute(made_run(fused_pairs(unfused, fused))).fused_speedup
    assert (gain.lo, gain.median, gain.hi, gain.blocks) == (1.5, 1.5, 1.5, 6)
    assert derive.compute(made_run(fused_pairs(unfused, []))).fused_speedup is None
    assert derive.compute(made_run(fused_pairs(unfused, fused[:5]))).fused_speedup.blocks == 5


def turn(pair_id: str, block: int, family="bandwidth", **seconds) -> list[Record]:
    """One turn of an interleaved group: a sample of each of its cases."""
    return [
        Record(family, f"stream.{name}", role="pair", block=block, samples_s=(s,), pair_id=pair_id, order=order,
               bytes_moved=8, params={"op": "copy"}, cache="cold")
        for order, (name, s) in enumerate(seconds.items())
    ]  # fmt: skip


def test_a_pair_that_a_kill_cut_short_does_not_count(made_run):
    """The process died after the first member of 1.0, which was measured again as 1.0+."""
    whole = turn("0.0", 0, torch=1.0, plain=2.0) + turn("1.0+", 1, torch=1.0, plain=3.0) + turn("2.0", 2, torch=1.0, plain=4.0)
    cut = [*whole[:2], *turn("1.0", 1, torch=99.0), *whole[2:]]
    found, clean = (derive.bandwidth(made_run(items)) for items in (cut, whole))
    assert found.pairs == clean.pairs and found.speedup["plain"] == clean.speedup["plain"]
    assert (found.speedup["plain"].median, found.speedup["plain"].samples) == (3.0, 3)
    late = derive.bandwidth(made_run([*whole, *turn("3.0", 3, torch=99.0)]))  # killed, and not resumed
    assert late.speedup["plain"] == clean.speedup["plain"]


def test_nobody_waits_for_a_member_that_was_wrong(made_run):
    """After it was found wrong the others went on without it."""
    wrong = Record("bandwidth", "stream.plain", role="pair", error={"check": "copy", "ok": False})
    items = [*turn("0.0", 0, torch=1.0, plain=2.0, streaming=2.0), wrong, *turn("1.0", 1, torch=1.0, streaming=4.0)]
    found = derive.bandwidth(made_run(items)).speedup
    assert list(found) == ["streaming"] and found["streaming"].median == 3.0


def test_a_case_that_is_paired_with_nothing_counts(made_run):
    [row] = derive.rows(turn("0.0", 0, torch=1.0), made_run([]).config)
    assert row.time_s.median == 1.0


def labelled(case, op, seconds, cache, **more) -> list[Record]:
    params = {"op": op, "buffer_bytes": 200, **more}
    return blocks(seconds, "bandwidth", case, params=params, bytes_moved=400, cache=cache)


def test_strided_and_host_copies_enter_no_plateau_and_no_roof(made_run):
    """Even a row that carried the plateau's mark, and one that is faster than every copy."""
    plain = [*copies(50, [1.0] * 6), *copies(100, [1.0] * 6), *copies(200, [1.0] * 6)]
    beside = labelled("strided.2", "strided", [1e-3] * 6, "cold", stride_bytes=8, plateau=True)
    beside += labelled("host.to_device.pinned.1MiB", "host_to_device", [1e-3] * 6, None, memory="pinned", plateau=True)
    beside += labelled("host.from_device.pinned.1MiB", "device_to_host", [1e-3] * 6, "cold", memory="pinned")
    alone, both = (derive.bandwidth(made_run(items)) for items in (plain, [*plain, *beside]))
    assert both.roof == alone.roof and both.plateaus == alone.plateaus and both.rows == alone.rows
    assert [r.case for r in both.strided] == ["strided.2"] and len(both.host) == 2
    assert both.strided[0].bytes_s.median == 400e3
    assert derive.bandwidth(made_run(beside)).roof is None


def test_a_skipped_host_copy_is_no_reason_for_a_missing_roof(made_run):
    skipped = Record("bandwidth", "host.to_device", params={"op": "host_to_device"}, skipped="no device")
    bandwidth = derive.bandwidth(made_run([skipped]))
    assert bandwidth.skipped is None and [r.skipped for r in bandwidth.host] == ["no device"]


# --------------------------------------------------------------------------------------------- one record, one row


def without_anchor_flag(row: derive.Row) -> derive.Row:
    return dataclasses.replace(row, flags=tuple(f for f in row.flags if f != "NOISY: anchor moved"))


def test_deleting_a_record_changes_its_row_and_no_other(sample):
    for family in sample.files:
        items = sample.records(family)
        before = {(r.role, r.case): r for r in derive.rows(items, sample.config)}
        last_line_of = {(r.role, r.case): i for i, r in enumerate(items)}
        assert set(before) == set(last_line_of)
        for key, line in last_line_of.items():
            if items[line].value is not None:  # no time: it makes no row that a page shows
                continue
            after = {(r.role, r.case): r for r in derive.rows(items[:line] + items[line + 1 :], sample.config)}
            assert after.get(key) != before[key], (family, key)
            assert set(before) - {key} <= set(after)
            for other in set(before) - {key}:
                old, new = before[other], after[other]
                if key[0] == "anchor":  # an anchor also tells how steady the machine was for the others
                    old, new = without_anchor_flag(old), without_anchor_flag(new)
                if key[0] != "pair" or other[0] != "pair":  # of a pair that is not whole nothing counts
                    assert new == old, (family, key, other)


def test_a_wrong_result_has_no_time_and_says_so(sample):
    items = sample.records("compute")
    wrong = Record("compute", "square.1024", error={"check": "freivalds", "freivalds_ratio": 7.0, "ok": False}, block=5)
    row = next(r for r in derive.rows([*items, wrong], sample.config) if r.case == "square.1024")
    assert row.wrong and row.error["freivalds_ratio"] == 7.0
    assert row.time_s is row.flop_s is row.bytes_s is None
    assert tables.notes(row) == "wrong result: no time is shown"
    raw = tables.raw_row(row)
    assert raw["wrong"] is True and raw["flop_s"] is None and raw["time_s"] is None


def test_a_skipped_case_keeps_its_reason(made_run):
    [row] = derive.rows([Record("compute", "square.9", skipped="needs 36 GB, 22 GB are free")], made_run([]).config)
    assert row.time_s is None and tables.notes(row) == "skipped: needs 36 GB, 22 GB are free"


def test_samples_that_are_not_positive_are_kept_counted_and_flagged(made_run):
    strange = [(1.0, 0.0, 1.0), (-1e-6, 1.0), (1.0, 6.0, 1.0), (1.0,), (1.0,), (1.0,)]
    items = blocks(strange, params=SHAPE, flop=10)
    row = derive.compute(made_run(items)).roof
    assert [r.samples_s for r in items] == strange
    assert row.outlier_count == 3 and "OUTLIERS: 3" in row.flags
    assert row.time_s.median == 1.0 and row.time_s.samples == 9
    assert "OUTLIERS: 3" in tables.notes(row)


def test_a_row_of_nothing_but_impossible_samples_has_no_time_but_a_flag(made_run):
    items = [anchor(0, 1), dataclasses.replace(anchor(1, 1), samples_s=(0.0, 0.0)), *blocks([0.0] * 6, flop=10)]
    items += [probe("peak.amx", 100, [0.0], threads=1), probe("peak.amx", 100, [0.0, 1.0], threads=1)]
    compute = derive.compute(made_run(items))
    assert compute.roof.time_s is None and compute.roof.flags == ("OUTLIERS: 6",)
    assert tables.notes(compute.roof) == "OUTLIERS: 6"
    assert compute.probes[0].best_flop_s == 100


# --------------------------------------------------------------------------------------------- files


def test_a_cut_off_last_line_is_left_out_and_told(sample_copy):
    directory = sample_copy("mi355x")
    path = directory / "records" / "02_bandwidth.jsonl"
    whole = derive.load(directory)
    path.write_bytes(path.read_bytes()[:-40])
    run = derive.load(directory)
    assert run.files["bandwidth"].truncated and not run.files["compute"].truncated
    assert run.records("bandwidth") == whole.records("bandwidth")[:-1]


@pytest.mark.parametrize(
    ("line", "text"), [(5, "{not json"), (7, '{"family":"compute","case":"x","samples_s":[NaN]}'), (9, '{"case":3}')]
)
def test_a_corrupt_line_in_the_middle_is_named(sample_copy, line, text):
    path = sample_copy("mi355x") / "records" / "01_compute.jsonl"
    lines = path.read_text("utf-8").splitlines()
    lines[line - 1] = text
    path.write_text("\n".join(lines) + "\n", "utf-8")
    with pytest.raises(RecordError, match=rf"01_compute\.jsonl:{line}: corrupt record"):
        derive.load(path.parents[1])


def test_what_is_no_run_is_named(tmp_path, sample_copy):
    with pytest.raises(RecordError, match="no run"):
        derive.load(tmp_path)
    directory = sample_copy("cpu")
    info = records.read_json(directory / "run.json")
    info["target"]["found"]["wheels"] = 4
    records.write_json_atomic(directory / "run.json", info)
    with pytest.raises(RecordError, match=r"run\.json: target is incomplete"):
        derive.load(directory)


def test_a_run_without_env_and_status_loads(sample_copy):
    directory = sample_copy("cpu")
    (directory / "env.json").unlink()
    (directory / "status.json").unlink()
    run = derive.load(directory)
    assert run.env is None and run.status == {} and set(run.files) == set(families())


def test_only_the_generated_run_is_synthetic(sample):
    assert sample.synthetic == (sample.kind == "gpu")


# --------------------------------------------------------------------------------------------- what to divide by

MEASURED = [*blocks([1.0] * 6, params=SHAPE, flop=10**12), *copies(10**9, [1.0] * 6)]


def test_a_known_device_is_compared_with_its_own_rated_peak(made_run):
    run = made_run(MEASURED, found=MI355X)
    [rated] = derive.compute(run).bases
    assert rated.rate == 2516.6e12 and rated.same_device
    assert rated.frac(derive.compute(run).roof.flop_s).median == pytest.approx(1 / 2516.6)
    [rated] = derive.bandwidth(run).bases
    assert rated.frac(derive.bandwidth(run).roof.bytes_s).median == pytest.approx(2e9 / 8e12)


@pytest.mark.parametrize("found", [CPU, UNKNOWN_GPU])
def test_another_devices_peak_is_shown_and_never_divided_by(made_run, found):
    run = made_run(MEASURED, found=found, asked="mi355x")
    assert not run.selection.same_device
    for family in (derive.compute(run), derive.bandwidth(run)):
        rated = next(b for b in family.bases if b.name == "rated")
        assert rated.rate in (2516.6e12, 8e12)
        for row in family.rows:
            assert rated.frac(row.flop_s) is None and rated.frac(row.bytes_s) is None
    heads = [c.title for t in (page_compute.gemms(run), page_bandwidth.plateaus(run)) for c in t.columns]
    assert "% of rated" not in heads


def test_an_unknown_device_has_no_rated_basis_and_no_default(made_run):
    run = made_run(MEASURED, found=UNKNOWN_GPU)
    for family in (derive.compute(run), derive.bandwidth(run)):
        [basis] = family.bases
        assert basis.rate is None and "no rated basis" in basis.reason
        assert basis.frac(family.rows[0].flop_s if family.rows else None) is None


def test_a_cpu_without_a_probe_has_a_basis_without_a_rate(made_run):
    skipped = Record("compute", "peak", role="probe", skipped="no C compiler")
    [basis] = derive.compute(made_run([*MEASURED, skipped])).bases
    assert basis.name == "probed" and basis.rate is None and "no C compiler" in basis.reason


# --------------------------------------------------------------------------------------------- iterations


def mark(family: str, kind: str, iteration: int = 1, case: str = "process") -> Record:
    return Record(family, case, role="mark", iteration=iteration, params={"kind": kind})


def samples(run: derive.LoadedRun) -> dict[str, list[float]]:
    return {family: [r.samples_s[0] for r in run.records(family)] for family in run.files}


def two_iterations(made_run) -> derive.LoadedRun:
    """Compute in two iterations, the first of them resumed after the second; bandwidth in the second alone."""
    items = blocks([1.0, 2.0]) + [mark("compute", "iteration", 2)] + blocks([3.0], iteration=2)
    items += [mark("compute", "resumed"), *blocks([4.0]), mark("compute", "", case="end")]
    items += [mark("bandwidth", "iteration", 2), *blocks([5.0], "bandwidth", "copy", iteration=2)]
    return derive.separated(made_run(items))


def test_a_run_is_its_first_iteration_and_the_others_stand_beside_it(made_run):
    run = two_iterations(made_run)
    assert (run.iteration, samples(run)) == (1, {"compute": [1.0, 2.0, 4.0]})
    [second] = run.repeats
    assert (second.iteration, samples(second), second.repeats) == (2, {"compute": [3.0], "bandwidth": [5.0]}, ())
    assert run.iterations == (run, second)


def test_marks_are_kept_beside_the_records(made_run):
    run = two_iterations(made_run)
    assert [(m.record.case, m.record.params["kind"], m.after) for m in run.marks] == [("process", "resumed", 2), ("end", "", 3)]
    assert [(m.record.family, m.after) for m in run.repeats[0].marks] == [("compute", 0), ("bandwidth", 0)]
    every = [r.role for part in run.iterations for family in part.files for r in part.records(family)]
    assert "mark" not in every and [row.role for row in derive.rows(run.records("compute"), run.config)] == ["case"]


def test_the_first_iteration_is_the_first_that_left_records(made_run):
    run = derive.separated(made_run([mark("compute", "iteration", 2), *blocks([3.0], iteration=3)], iterations=4))
    assert (run.iteration, [r.iteration for r in run.repeats]) == (3, [1, 2, 4])
    assert [list(r.files) for r in run.iterations] == [[], ["compute"], ["compute"], []]
    assert run.repeats[1].records("compute") == []


def test_a_run_of_one_iteration_is_itself(sample):
    assert sample.repeats == () and sample.iterations == (sample,) and sample.marks == ()
    again = derive.separated(sample)
    assert again == sample


def test_each_iteration_has_its_own_end(made_run):
    ends = {"compute": {"status": "died", "iterations": {"1": {"status": "ok"}, "3": {"status": "died"}}},
            "ops": {"status": "ok"}}  # fmt: skip
    run = derive.separated(dataclasses.replace(made_run(blocks([1.0])), status=ends))
    assert run.status == {"compute": {"status": "ok"}, "ops": {"status": "ok"}}
    assert {r.iteration: r.status for r in run.repeats} == {3: {"compute": {"status": "died"}}}


def test_a_cut_off_line_belongs_to_the_iteration_that_wrote_last(made_run):
    run = made_run(blocks([1.0]) + blocks([2.0], iteration=2))
    cut = dataclasses.replace(run.files["compute"], truncated=True)
    run = derive.separated(dataclasses.replace(run, files={"compute": cut}))
    assert (run.files["compute"].truncated, run.repeats[0].files["compute"].truncated) == (False, True)


def write_iterations(run_dir, count: int) -> None:
    """Copy the records of a run's first iteration to later ones, and say so in its run.json."""
    for path in (run_dir / "records").glob("*.jsonl"):
        head, *lines = path.read_text(encoding="utf-8").splitlines()
        more = [json.dumps({**json.loads(x), "iteration": i}) for i in range(2, count + 1) for x in lines]
        path.write_text("\n".join([head, *lines, *more]) + "\n", encoding="utf-8")
    info = json.loads((run_dir / "run.json").read_text(encoding="utf-8"))
    (run_dir / "run.json").write_text(json.dumps(info | {"iterations": count}), encoding="utf-8")


def test_iterations_are_read_from_disk(sample_copy):
    folder = sample_copy("cpu")
    alone = derive.load(folder)
    write_iterations(folder, 3)
    run = derive.load(folder)
    assert [r.iteration for r in run.iterations] == [1, 2, 3] and run.files == alone.files
    for part in run.repeats:
        assert derive.compute(part).roof == derive.compute(alone).roof and list(part.files) == list(alone.files)


@pytest.mark.parametrize("count", [0, -1, 1.5, "3", True, None, 10**9])
def test_a_count_of_iterations_that_cannot_be(sample_copy, count):
    folder = sample_copy("cpu")
    info = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    (folder / "run.json").write_text(json.dumps(info | {"iterations": count}), encoding="utf-8")
    with pytest.raises(RecordError, match="iterations is .*; expected a whole number"):
        derive.load(folder)


@pytest.mark.parametrize("each", [[], {"1": "ok"}, {"one": {}}, {"0": {}}, {"-1": {}}, {"99999": {}}, {"\u0661": {}}])
def test_a_status_whose_iterations_cannot_be(sample_copy, each):
    folder = sample_copy("cpu")
    (folder / "status.json").write_text(json.dumps({"compute": {"status": "ok", "iterations": each}}), encoding="utf-8")
    with pytest.raises(RecordError, match="status.json: no JSON object of objects"):
        derive.load(folder)
    assert "status.json" in derive.load(folder, lenient=True).unreadable
