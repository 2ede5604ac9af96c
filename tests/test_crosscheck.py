"""Like with like: which row of ours a reading of a tool may be held against, in which statistic, and what is then said."""

import json
import re
import shutil
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import CPU, MI355X, SAMPLES
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from escher_book import verdict
from escher_kernels import bandwidth, targets
from escher_kernels.records import Record, RecordFile
from escher_kernels.statistics import Estimate, estimate
from validation import crosscheck, derive, scorecard, tools
from validation.crosscheck import Check
from validation.tools import running
from validation.tools.running import Log

STATUSES = {"PASS", "WARN", "WARN_CPU", "FAIL", "SKIP", "UNSUPPORTED", "UNPARSED", "INCOMPLETE", "INVALID", "INSUFFICIENT"}
FIXTURES = sorted((Path(__file__).parent / "fixtures" / "tools").rglob("*.*"))
MIB, GIB = 2**20, 2**30
CUDA = targets.Found("cuda", "NVIDIA H200", "sm_90", 132, 141 * GIB, count=8)


# ---- ours: each record one block

SHAPE = dict(m=8, n=16, k=32)
FLOP = 2 * 8 * 16 * 32


def gemm(*blocks: list[float], case: str = "peer", role: str = "case", calls: int = 1, error=None, **params) -> list[Record]:
    """Blocks of seconds a sample of a bf16 GEMM, A stored as it is and B transposed."""
    params = {**SHAPE, "dtype": "bf16", "layout": "NT", **params}
    return [
        Record("compute", case, role, params, "torch.mm", b, tuple(s), calls, FLOP, 99, error=error) for b, s in enumerate(blocks)
    ]


STREAMS = {"copy": 2, "mul": 2, "add": 3, "triad": 3, "sum": 1, "fill": 1, "host_to_device": 1, "device_to_host": 1}


def moved(
    op: str, size: int, *rates: float, case: str | None = None, role: str = "case", cache: str | None = "cold", **params
) -> list[Record]:
    """One block a rate in B/s of what it declares to move, 1 s a sample."""
    across = op not in ("copy", "mul", "add", "triad", "sum", "fill")
    params = {"op": op, "buffer_bytes": size, "dtype": "fp32", **params}
    return [
        Record("bandwidth", case or f"{op}.{size}", role, params, block=b, samples_s=(STREAMS[op] * size / rate,),
               bytes_moved=STREAMS[op] * size, cache=None if across else cache)
        for b, rate in enumerate(rates)
    ]  # fmt: skip


# ---- theirs


def flops(text: str = "1000", statistic: str = "median", flags=(), case: str = "its-gemm", **params):
    known = {"op": "gemm", **SHAPE, "layout": "NT", "dtype": "bf16", "data": "random", **params}
    return tools.reading("compute", case, "its module", text, "FLOP/s", statistic, flags, **known)


def rate(op: str, text: str = "1000", statistic: str = "mean", unit: str = "B/s", flags=(), case: str = "its-copy", **params):
    size = {"buffer_bytes": GIB} if op in ("copy", "mul", "add", "triad", "read", "write") else {}
    return tools.reading("bandwidth", case, "its module", text, unit, statistic, flags, op=op, **{**size, **params})


@pytest.fixture
def check(made_run, monkeypatch):
    """`check(records, *logs)`: the checks of a made run with those logs. A log is one reading, or a list of them, or (Log
    fields, list, Parsed fields). `ours`: folder -> records from around; `told`: parameters of the run's header; `text`: what
    stands in every log."""

    def run_(records, *logs, found=MI355X, tool="rvs", ours=None, told=None, text=None):
        run = made_run(records, found=found)
        header = lambda f: replace(f.run, parameters=told or {})  # noqa: E731
        run = replace(run, files={name: RecordFile(header(f), f.records, False) for name, f in run.files.items()})
        every, says = [], {}
        for i, log in enumerate(logs):
            fields, readings, more = log if isinstance(log, tuple) else ({}, log if isinstance(log, list) else [log], {})
            every.append(Log(**{"tool": tool, "name": f"cmd{i}", "log": f"{i}.log", "imported": True, **fields}))
            says[every[-1].log] = tools.Parsed(**{"tool": tool, "records": tuple(readings), "version": "7", **more})
        folders = {name: list(made_run(items).files.values()) for name, items in (ours or {}).items()}
        monkeypatch.setattr(running, "logs", lambda run_dir: every)
        monkeypatch.setattr(running, "kept_text", lambda run_dir, log: text)
        monkeypatch.setattr(running, "ours", lambda run_dir, names: [f for name in names for f in folders[name]])
        monkeypatch.setattr(
            running, "parsed",
            lambda run_dir, log: says[log.log] if log.log else tools.Parsed(log.tool, status="SKIP", reason=log.skipped),
        )  # fmt: skip
        out = crosscheck.checks(run)
        assert {c.status for c in out} <= STATUSES and all(c.reason and "\n" not in c.reason for c in out)
        return out

    return run_


def one(found):
    assert len(found) == 1, found
    return found[0]


def ends(e: Estimate) -> tuple[float, float, float]:
    return e.lo, e.median, e.hi


# ---- GEMMs


def test_a_gemm_is_held_against_the_row_that_did_the_same(check):
    # 2 calls a sample: FLOP x 2 / 8 s a block, then 16 s, then 4 s
    records = gemm([8.0], [16.0], [4.0], calls=2)
    others = gemm([1.0], case="roof", m=9) + gemm([1.0], case="square.8", layout="NN") + gemm([1.0], case="fp16", dtype="fp16")
    c = one(check([*others, *records], flops("2000")))
    assert c.ours_case == "peer" and ends(c.ours) == (FLOP / 8, FLOP / 4, FLOP / 2)
    assert ends(c.theirs) == (2000, 2000, 2000) and c.theirs.blocks == 1
    assert ends(c.ratio) == (FLOP / 8 / 2000, FLOP / 4 / 2000, FLOP / 2 / 2000)
    assert (c.tool, c.log, c.version, c.unit, c.statistic, c.imported) == ("rvs", "0.log", "7", "FLOP/s", "median", True)
    assert c.limit_pct == 10 and "device" not in c.name and c.name == "its-gemm, gemm, median"


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"m": 9}, "no GEMM of 9×16×32"),
        ({"m": 16, "n": 8}, "no GEMM of 16×8×32"),
        ({"k": None}, "does not tell M, N and K"),
        ({"batch": 4}, "a batch"),
        ({"dtype": "fp16"}, "the dtype of that GEMM is fp16, ours is bf16"),
        ({"dtype": None}, "the dtype of that GEMM is not told"),
        ({"layout": "TN"}, "the layout of that GEMM is TN, ours is NT"),
        ({"layout": None}, "the layout of that GEMM is not told"),
        ({"data": "integers"}, "its data are integers, ours are N(0,1)"),
        ({"data": None}, "its data are not told, ours are N(0,1)"),
    ],
)
def test_another_gemm_is_skipped_and_the_difference_named(check, params, words):
    c = one(check(gemm([8.0]), flops(**params)))
    assert (c.status, c.ratio, c.ours) == ("SKIP", None, None) and words in c.reason and c.theirs.median == 1000


@pytest.mark.parametrize("data", ["random", "trig"])
def test_data_that_use_every_bit_are_like_ours(check, data):
    assert one(check(gemm([8.0]), flops("1024", data=data))).status == "PASS"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(op="bmm", batch=3), "no GEMM of"),
        (dict(op="addmm"), "no GEMM of"),
        (dict(reduced_precision=True), "no GEMM of"),
        (dict(role="search"), "no GEMM of"),
        (dict(role="pair", op="fused"), "no GEMM of"),
        (dict(error={"ok": False}), "the result of peer was wrong"),
    ],
)
def test_a_row_of_ours_that_is_another_thing_is_not_taken(check, change, words):
    c = one(check(gemm([8.0], [8.0], **change), flops()))
    assert c.status == "SKIP" and words in c.reason


def test_a_wrong_result_has_no_time_wherever_it_was_seen(check):
    """The check of a case is a record of its own, beside those with its samples."""
    right, wrong = gemm([8.0], [8.0]), Record("compute", "peer", error={"ok": False})
    assert one(check(right, flops("1024"))).status == "PASS"
    assert "the result of peer was wrong" in one(check([*right, wrong], flops("1024"))).reason
    around = {"ours-1": [*right, wrong]}
    assert "was wrong" in one(check(right, ({"imported": False, "ours": ("ours-1",)}, [flops()], {}), ours=around)).reason
    second = gemm([16.0], case="square.8")
    assert one(check([*right, wrong, *second], flops())).ours_case == "square.8"


@pytest.mark.parametrize("samples", [[], [0.0], [-1.0, 0.0]])
def test_rows_without_a_positive_time_are_none(check, samples):
    assert "family compute was not measured" in one(check(gemm(samples), flops())).reason
    assert one(check(gemm(samples, [8.0]), flops("1024"))).status == "PASS"


# ---- copies


@pytest.mark.parametrize(
    ("ours", "theirs", "factor", "case"),
    [
        # within a device a payload is read and written: our counting is twice theirs
        (moved("copy", GIB, 1000), rate("copy", counted="payload", buffer_bytes=GIB), 2, "copy.1073741824"),
        (moved("copy", GIB, 1000), rate("copy", counted="read+write", buffer_bytes=GIB), 1, "copy.1073741824"),
        (moved("copy", GIB, 1000), rate("copy", counted="read+write", dtype="fp64", buffer_bytes=GIB), 1, "copy.1073741824"),
        (moved("mul", GIB, 1000), rate("mul", counted="read+write", dtype="fp32"), 1, "mul.1073741824"),
        (moved("add", GIB, 1000), rate("add", counted="read+write", dtype="fp32"), 1, "add.1073741824"),
        (moved("triad", GIB, 1000), rate("triad", counted="payload", dtype="fp32"), 3, "triad.1073741824"),
        (moved("sum", GIB, 1000), rate("read", counted="read+write", dtype="fp32"), 1, "sum.1073741824"),
        (moved("fill", GIB, 1000), rate("write", counted="payload"), 1, "fill.1073741824"),
        # across the link they are read here and written there: both count them once
        (
            moved("host_to_device", GIB, 9, case="slow", memory="pageable") + moved("host_to_device", GIB, 1000, memory="pinned"),
            rate("host_to_device", counted="payload"), 1, "host_to_device.1073741824",
        ),
        (
            moved("host_to_device", GIB, 9, memory="pinned") + moved("device_to_host", GIB, 1000, memory="pinned"),
            rate("device_to_host", direction="one"), 1, "device_to_host.1073741824",
        ),
        (
            moved("host_to_device", GIB, 9, memory="pinned") + moved("host_to_device", GIB, 1000, case="slow", memory="pageable"),
            rate("host_to_device", counted="payload", memory="pageable"), 1, "slow",
        ),
        # warm, strided and interleaved rows stand aside
        (
            moved("copy", GIB, 9, case="cache", cache="warm") + moved("copy", GIB, 9, case="stream.plain", role="pair")
            + moved("copy", GIB, 1000),
            rate("copy", counted="read+write", buffer_bytes=GIB), 1, "copy.1073741824",
        ),
    ],
)  # fmt: skip
def test_bytes_are_counted_as_ours(check, ours, theirs, factor, case):
    c = one(check(ours, theirs))
    assert (c.ours_case, c.ours.median, c.theirs.median) == (case, 1000, factor * 1000)
    assert c.ratio.median == pytest.approx(1 / factor) and c.unit == "B/s" and c.limit_pct == 15
    assert c.status == ("PASS" if factor == 1 else "FAIL")


def test_streams_and_caches_are_counted_as_bandwidth_counts_them():
    assert crosscheck.STREAMS == {"copy": 2, "mul": 2, "add": 3, "triad": 3, "read": 1, "write": 1}
    assert crosscheck.COLD_FACTOR is bandwidth.COLD_FACTOR
    for name, ours in crosscheck.OUR_OP.items():
        assert bandwidth.case(ours, GIB).bytes_moved == crosscheck.STREAMS[name] * GIB


@pytest.mark.parametrize(
    ("unit", "text", "base"), [("GB/s", "1.5", 1.5e9), ("MB/s", "2", 2e6), ("MiB/s", "2", 2 * MIB), ("TB/s", "0.5", 5e11)]
)
def test_units_become_base_units(check, unit, text, base):
    c = one(check(moved("copy", GIB, base), rate("copy", text, unit=unit, counted="read+write")))
    assert c.theirs.median == base and c.ratio.median == pytest.approx(1)


ROWS = [r for op in ("copy", "add", "sum") for r in moved(op, GIB, 1000)] + moved("host_to_device", GIB, 1000, memory="pinned")


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        (rate("copy", counted="read+write", direction="both"), "share the links"),
        (rate("host_to_device", counted="payload", direction="both"), "share the links"),
        (rate("host_to_device", counted="payload", direction="contended"), "share the links"),
        (rate("host_to_device", counted="read+write"), "counts read+write"),
        (rate("copy"), "which bytes it counts"),
        (rate("copy", counted="bus"), "which bytes it counts"),
        (rate("device_to_device", counted="payload"), "no row of device_to_device"),
        (rate("dot", counted="read+write", dtype="fp32"), "no row of dot"),
        (rate("stream_mix"), "no row of stream_mix"),
        (tools.reading("bandwidth", "its", "m", "1", "B/s", "mean"), "no row of None"),
        (rate("triad", counted="read+write", dtype="fp32"), "no triad"),
        (rate("device_to_host", counted="payload"), "no device_to_host with pinned memory"),
        (rate("host_to_device", counted="payload", memory="pageable"), "no host_to_device with pageable memory"),
        (rate("copy", counted="read+write", stores="ordinary"), "no copy with ordinary stores"),
        (rate("write", counted="read+write", stores="streaming"), "no fill with streaming stores"),
        (rate("add", counted="read+write", dtype="fp64"), "the dtype of its add is fp64, ours is fp32"),
        (rate("add", counted="read+write"), "the dtype of its add is not told"),
        (rate("read", counted="read+write", dtype="fp64"), "the dtype of its read is fp64"),
        (rate("copy", counted="read+write", buffer_bytes=GIB // 2 - 1), "no copy of a like size"),
        (rate("copy", counted="read+write", buffer_bytes=2 * GIB + 1), "no copy of a like size"),
        (rate("copy", counted="read+write", buffer_bytes=0), "no copy of a like size"),
        (rate("copy", counted="read+write", device=1), "another device"),
        (rate("copy", counted="read+write", device=12), "another device"),
        (tools.reading("comm", "all_reduce_perf", "m", "5", "GB/s", "mean", op="all_reduce", bytes=8), "no row of all_reduce"),
        (tools.reading("sustained", "iet", "m", "700", "W", "interval", op="power"), "no row of power"),
        (flops(), "family compute was not measured"),
    ],
)
def test_what_cannot_be_compared_says_why(check, theirs, words):
    c = one(check(ROWS, theirs))
    assert c.status == "SKIP" and not c.matched and words in c.reason


def test_every_figure_keeps_its_unit(check):
    readings = [
        tools.reading("sustained", "iet", "m", "700", "W", "interval", op="power"),
        tools.reading("comm", "perf", "m", "5", "us", "mean", op="all_reduce"),
        tools.reading("comm", "perf", "m", "5", "GB/s", "mean", op="all_gather"), flops("3"), rate("dot", "2", unit="kB/s"),
    ]  # fmt: skip
    found = {c.unit: c.theirs.median for r in readings for c in check([], r)}
    assert found == {"W": 700, "s": pytest.approx(5e-6), "FLOP/s": 3, "B/s": 2000}
    assert {c.unit: c.theirs.median for c in check([], readings[2])} == {"B/s": 5e9}


@pytest.mark.parametrize(
    ("found", "tool", "fits"),
    [
        (MI355X, "rvs", True), (MI355X, "transferbench", True), (MI355X, "nvbandwidth", False), (MI355X, "host_stream", False),
        (CUDA, "nvbandwidth", True), (CUDA, "rocm_bw", False), (CPU, "host_stream", True), (CPU, "transferbench", False),
        (CPU, "nvbandwidth", False),
    ],
)  # fmt: skip
def test_a_log_of_another_kind_of_device_is_not_compared(check, found, tool, fits):
    c = one(check(ROWS, rate("copy", counted="read+write"), found=found, tool=tool))
    assert c.matched == fits and (fits or c.reason == "a tool for another kind of device than the one that was measured")


@pytest.mark.parametrize(
    ("text", "found", "words"),
    [
        ("device 0 [0000:05:00] AMD Instinct MI300X\nrow 1", MI355X, "AMD Instinct MI300X, AMD Instinct MI355X was"),
        ("1 mi300x\n2 NVIDIA B200", MI355X, "AMD Instinct MI300X, NVIDIA B200 (HGX/DGX SXM), AMD Instinct MI355X was"),
        ('{"list": ["0: NVIDIA H100 80GB HBM3 (x)", "PCIe"]}', CUDA, "NVIDIA H100 SXM5 80GB, NVIDIA H200 SXM was"),
        ("Device 0: NVIDIA H200", CPU, "NVIDIA H200 SXM, CPU host was"),
        ("Device 0: NVIDIA H200", replace(CUDA, raw_name="NVIDIA X1"), "NVIDIA H200 SXM, NVIDIA X1 was"),  # ours is in no profile
        ("AMD Instinct MI300X\nAMD Instinct MI355X", MI355X, None),
        ("Device 0: NVIDIA H200\npcie-bandwidth", CUDA, None),  # what a name must not hold, on another line
        ("Device 0: NVIDIA H200 NVL", MI355X, None),  # no profile has that name
        ("XMI300X, MI300XY", MI355X, None),
        ("", MI355X, None),
        (None, MI355X, None),
    ],
)
def test_an_imported_log_of_another_device_is_one_line(check, text, found, words):
    tool = {"rocm": "rvs", "cuda": "nvbandwidth", "cpu": "host_stream"}[found.kind]
    readings = [rate("copy", counted="read+write"), rate("dot"), rate("copy", "9", counted="read+write", flags=["FAIL: slow"])]
    for says in ({}, {"status": "FAIL", "reason": "its target is not met"}, {"status": "INCOMPLETE", "reason": "cut"}):
        log = ({"name": "theirs"}, readings, {**says, "warnings": ("careful",)})
        out = check(ROWS, log, found=found, tool=tool, text=text)
        if words:
            c = one(out)
            assert (c.status, c.name, c.matched) == ("SKIP", "theirs", False)
            assert c.reason == f"its log names {words} measured"
        else:
            assert all("its log names" not in c.reason for c in out) and {"FAIL"} <= {c.status for c in out}
        # one that we ran here is of this device
        here = check(ROWS, ({"imported": False}, *log[1:]), found=found, tool=tool, text=text)
        assert len(here) > 1 and all("its log names" not in c.reason for c in here)


# ---- sizes and caches


@pytest.mark.parametrize(
    ("size", "llc", "case"),
    [
        (GIB, 0, "copy.1073741824"),
        (GIB // 2, 0, "copy.1073741824"),
        (2 * GIB, 0, "copy.1073741824"),
        (3 * GIB, 0, "copy.4294967296"),
        (100 * GIB, 64 * MIB, "copy.4294967296"),
        (300 * MIB, 64 * MIB, "copy.1073741824"),
        (None, 64 * MIB, "its size is not told, so it may stay in the caches"),
        (None, 0, "its size is not told, so it may stay in the caches"),
        (300 * MIB, 80 * MIB, "no copy of a like size"),  # its 300 MiB are less than 4 x 80
        (100 * GIB, 0, "no copy of a like size"),
        (8 * GIB, 3 * GIB, "copy.4294967296"),  # within 2x; its two streams are more than 4 x 3 GiB
        (150 * MIB, 80 * MIB, "its buffers of 150 MiB may stay in the caches (80 MiB)"),
        (64 * MIB, 256 * MIB, "its buffers of 64 MiB may stay in the caches (256 MiB)"),
        (600 * MIB - 4096, 300 * MIB, "copy.1073741824"),  # rounded down from twice the caches
        (590 * MIB, 300 * MIB, "its buffers of 590 MiB may stay in the caches (300 MiB)"),
    ],
)
def test_sizes_are_alike_within_2x_or_where_both_outgrow_the_caches(check, size, llc, case):
    records = moved("copy", GIB, 1000) + moved("copy", 4 * GIB, 1000) + moved("copy", 64 * MIB, 9)
    c = one(check(records, rate("copy", counted="read+write", buffer_bytes=size), told={"llc_bytes": llc}))
    assert c.ours_case == case if c.matched else case in c.reason


def test_a_link_is_no_cache(check):
    records = moved("host_to_device", 64 * MIB, 1000, memory="pinned")
    for size in (64 * MIB, None):  # not told: held against the largest of ours
        c = one(check(records, rate("host_to_device", buffer_bytes=size), told={"llc_bytes": 256 * MIB}))
        assert c.matched and c.ratio.median == pytest.approx(1)


# ---- a CPU host

STORES = [
    *moved("copy", 256 * MIB, 1), *moved("copy", 256 * MIB, 1000, case="stream.plain", role="pair", threads=2),
    *moved("copy", 256 * MIB, 3000, case="stream.streaming", role="pair", threads=2),
    *moved("copy", 256 * MIB, 7000, case="stream.torch", role="pair", threads=2),
]  # fmt: skip


@pytest.mark.parametrize(("stores", "name", "ours"), [("ordinary", "plain", 1000), ("streaming", "streaming", 3000)])
def test_stores_are_held_against_the_same_stores(check, stores, name, ours):
    theirs = rate("copy", str(ours), counted="read+write", dtype="fp64", stores=stores, buffer_bytes=256 * MIB, threads=2)
    c = one(check(STORES, theirs, found=CPU, tool="host_stream"))
    assert (c.status, c.ours_case, c.ours.median) == ("PASS", f"stream.{name}", ours) and stores in c.name


def test_threads_must_be_as_many(check):
    theirs = rate("copy", counted="read+write", stores="ordinary", threads=4)
    assert "on 4 threads, ours on 2" in one(check(STORES, theirs, found=CPU, tool="host_stream")).reason
    plain, theirs = moved("sum", GIB, 1000), rate("read", counted="read+write", dtype="fp32", threads=4)
    for told in (4, None):
        assert one(check(plain, theirs, found=CPU, tool="host_stream", told={"threads": told})).matched
    assert "ours on 8" in one(check(plain, theirs, found=CPU, tool="host_stream", told={"threads": 8})).reason


# ---- statistics

BLOCKS = ([1.0, 1.0, 4.0], [2.0, 2.0, 2.0], [1.0, 3.0, 5.0], [2.5, 2.5, 10.0], [1.0, 1.0, 1.0], [8.0, 8.0, 8.0])


@pytest.mark.parametrize(
    ("statistic", "expected"),
    [
        # of block medians: FLOP over 1, 2, 3, 2.5, 1 and 8 s
        ("median", (FLOP / 8, statistics.median([FLOP / 2, FLOP / 2.5]), FLOP / 1)),
        # of block means, work over time: FLOP over 2, 2, 3, 5, 1 and 8 s
        ("mean", (FLOP / 8, statistics.median([FLOP / 2, FLOP / 3]), FLOP / 1)),
        ("interval", (FLOP / 8, statistics.median([FLOP / 2, FLOP / 3]), FLOP / 1)),
        # of the fastest sample of each block: FLOP over 1, 2, 1, 2.5, 1 and 8 s
        ("best", (FLOP / 8, statistics.median([FLOP / 1, FLOP / 2]), FLOP / 1)),
    ],
)
def test_our_samples_in_the_tools_statistic(check, statistic, expected):
    c = one(check(gemm(*BLOCKS), flops(statistic=statistic)))
    assert ends(c.ours) == pytest.approx(expected) and c.statistic == statistic
    assert ends(c.ratio) == pytest.approx([x / 1000 for x in expected])
    assert (c.ours.blocks, c.ours.samples) == {"median": (6, 18)}.get(statistic, (6, 6))


@given(
    st.lists(st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=5), min_size=1, max_size=8),
    st.sampled_from(tools.STATISTICS), st.integers(1, 9),
)  # fmt: skip
@settings(max_examples=150, deadline=None)
def test_a_statistic_lies_between_the_slowest_and_the_fastest_sample(blocks, statistic, calls):
    found = crosscheck._in_statistic(gemm(*blocks, calls=calls), statistic)
    rates = [FLOP * calls / s for b in blocks for s in b]
    slack = 1 + 1e-12
    assert min(rates) <= found.lo * slack and found.lo <= found.median <= found.hi <= max(rates) * slack
    if statistic == "best":
        assert found == estimate([max(FLOP * calls / s for s in b)] for b in blocks) and found.blocks == len(blocks)
    elif statistic == "median":
        assert found == replace(estimate([FLOP * calls / s for s in b] for b in blocks))
    else:
        assert found.median == pytest.approx(statistics.median(len(b) * FLOP * calls / sum(b) for b in blocks))


def test_several_records_of_a_block_are_one_block(check):
    twice = [replace(r, block=r.block // 2) for r in gemm([1.0], [3.0], [2.0], [2.0])]
    c = one(check(twice, flops(statistic="mean")))
    assert c.ours.blocks == 2 and ends(c.ours) == (FLOP / 2, FLOP / 2, FLOP / 2)
    c = one(check(twice, flops()))
    assert c.ours.blocks == 2 and c.ours.hi == (FLOP / 1 + FLOP / 3) / 2


def test_intervals_are_pooled_and_their_best_is_left_out(check):
    readings = [flops(x, "interval") for x in ("900", "1000", "1100", "1200", "5000")] + [flops("5000", "best")]
    c = one(check(gemm([8.0]), readings))
    assert c.statistic == "interval" and c.theirs.median == 1100 and c.theirs.blocks == 5
    assert one(check(gemm([8.0]), flops("5000", "best"))).statistic == "best"
    # of another case, or another device, it stays
    assert len(check(gemm([8.0]), [*readings, flops("5000", "best", case="another")])) == 2
    # the number of an iteration does not make it another measurement
    known = dict(counted="read+write", buffer_bytes=GIB)
    rows = [rate("copy", t, "interval", iteration=i, **known) for i, t in enumerate(("900", "1000", "3000"))]
    c, mean = check(moved("copy", GIB, 1000), [*rows, rate("copy", "1600", **known)], tool="transferbench")
    assert (c.statistic, c.theirs.median, c.theirs.blocks) == ("interval", 1000, 3)
    assert (mean.statistic, mean.theirs.median) == ("mean", 1600)


# ---- judge


def steady(middle: float, lo: float | None = None, hi: float | None = None) -> Estimate:
    return Estimate(middle, lo or middle, hi or middle, 0.97, 6, 6)


@pytest.mark.parametrize(
    ("ours", "theirs", "gpu", "cpu"),
    [
        (steady(100), steady(100), "PASS", "PASS"),
        (steady(91), steady(100), "PASS", "PASS"),
        (steady(109), steady(100), "PASS", "PASS"),
        (steady(89), steady(100), "FAIL", "FAIL"),
        (steady(111), steady(100), "WARN", "WARN"),
        (steady(50, 49, 51), steady(100, 99, 101), "FAIL", "FAIL"),
        (steady(200, 199, 201), steady(100, 99, 101), "WARN", "WARN"),
        # the middle is near, the interval is not: neighbours on a CPU host, no proof on a GPU
        (steady(95, 85, 105), steady(100), "INSUFFICIENT", "PASS"),
        (steady(105, 95, 115), steady(100), "INSUFFICIENT", "PASS"),
        # far apart in the middle, and the intervals overlap
        (steady(80, 60, 102), steady(100), "INSUFFICIENT", "PASS"),
        (steady(80, 60, 95), steady(100, 95, 140), "INSUFFICIENT", "PASS"),
        (steady(130, 98, 150), steady(100), "INSUFFICIENT", "PASS"),
        # far apart, no overlap, and the limit lies inside
        (steady(85, 80, 92), steady(100), "INSUFFICIENT", "INSUFFICIENT"),
        (steady(115, 108, 120), steady(100), "INSUFFICIENT", "INSUFFICIENT"),
    ],
)
def test_judge(ours, theirs, gpu, cpu):
    ratio = derive.quotient(ours, theirs)
    for kind, wanted in (("gpu", gpu), ("cpu", cpu)):
        status, why = crosscheck.judge(ours, theirs, ratio, 10.0, kind)
        assert status == wanted
        side = "slower" if ours.median < theirs.median else "faster"
        assert f"{abs(ours.median / theirs.median - 1) * 100:.1f} % {side}" in why
        words = {"FAIL": "at most 10 %", "WARN": "check what is counted", "INSUFFICIENT": "straddles 10 %"}
        assert words.get(status, "within 10 %" if 90 <= ours.median <= 110 else "the intervals overlap") in why


def flagged(records: list[Record]) -> list[Record]:
    return [replace(r, flags=("NOISY: other work",)) for r in records]


ANCHOR = [Record("compute", "anchor", "anchor", {}, block=b, samples_s=(s,), flop=1000) for b, s in enumerate((1.0, 1.0, 1.2))]


@pytest.mark.parametrize(
    ("records", "theirs", "noisy", "gpu", "cpu"),
    [
        (gemm([8.0]), "1024", False, "PASS", "PASS"),
        (gemm([8.0]), "2000", False, "FAIL", "WARN_CPU"),
        (gemm([8.0]), "500", False, "WARN", "WARN_CPU"),
        (gemm([7.8], [8.6], [9.5]), "1024", False, "INSUFFICIENT", "PASS"),
        (gemm([8.0], [8.4], [9.9], [9.9], [9.9]), "2000", True, "INSUFFICIENT", "WARN_CPU"),  # by its spread
        (gemm([8.9], [9.0], [9.7]), "1000", False, "INSUFFICIENT", "PASS"),
        (gemm([9.2], [9.3], [9.3], [9.3], [9.3], [9.3]), "1000", False, "FAIL", "WARN_CPU"),
        (flagged(gemm([8.0])), "1024", True, "PASS", "PASS"),
        (flagged(gemm([8.0])), "2000", True, "INSUFFICIENT", "WARN_CPU"),
        (flagged(gemm([8.0])), "500", True, "WARN", "WARN_CPU"),
        (gemm([8.0]) + flagged(gemm([8.0], case="another", m=9)), "2000", False, "FAIL", "WARN_CPU"),
        (gemm([8.0]) + flagged(gemm([8.0], role="search")), "2000", False, "FAIL", "WARN_CPU"),
        # an anchor that moved marks what stands between its two runs
        ([*ANCHOR[:2], *gemm([8.0]), ANCHOR[2]], "2000", True, "INSUFFICIENT", "WARN_CPU"),
        ([ANCHOR[0], *gemm([8.0]), *ANCHOR[1:]], "2000", False, "FAIL", "WARN_CPU"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("between", [False, True])
def test_a_noisy_row_and_one_of_a_cpu_host(check, monkeypatch, records, theirs, noisy, gpu, cpu, between):
    monkeypatch.setattr(running, "fits", lambda name, kind: True)
    log = ({**around("ours-1"), "name": "gemm"}, [flops(theirs)], {}) if between else flops(theirs)
    # where it is interleaved, the noise of the run's own row, of the other kind, says nothing
    own = (gemm([8.0]) if noisy else flagged(gemm([8.0]))) if between else records
    for found, wanted in ((MI355X, gpu), (CPU, cpu)):
        c = one(check(own, log, found=found, ours={"ours-1": records}))
        assert (c.status, c.noisy, c.interleaved, c.matched) == (wanted, noisy, between, True), c.reason
        excused = "; other work or a moving clock disturbed ours" in c.reason
        assert excused == (noisy and theirs == "2000" and wanted == "INSUFFICIENT")
        assert crosscheck.to_json([c])[0]["noisy"] is noisy


def test_noise_in_one_of_several_files_around_is_noise(check):
    ours = {"ours-1": gemm([8.0]), "ours-2": flagged(gemm([8.0]))}
    for names, noisy in ((("ours-1", "ours-2"), True), (("ours-1",), False)):
        assert one(check([], ({**around(*names)}, [flops("2000")], {}), ours=ours)).noisy == noisy


numbers = st.floats(1e3, 1e15)
estimates = st.tuples(numbers, numbers, numbers).map(sorted).map(lambda x: steady(x[1], x[0], x[2]))


@given(estimates, estimates, st.floats(1, 50))
@settings(deadline=None)
def test_a_judgement_never_gains_from_a_slower_row(ours, theirs, limit):
    """Half as fast is never better, and what fails on a CPU host fails on a GPU."""
    order = ["FAIL", "INSUFFICIENT", "PASS", "INSUFFICIENT", "WARN"]
    for kind in ("gpu", "cpu"):
        status, _ = crosscheck.judge(ours, theirs, derive.quotient(ours, theirs), limit, kind)
        slower = ours.times(0.5)
        after, _ = crosscheck.judge(slower, theirs, derive.quotient(slower, theirs), limit, kind)
        assert order.index(after) <= len(order) - 1 - order[::-1].index(status)
    if crosscheck.judge(ours, theirs, derive.quotient(ours, theirs), limit, "cpu")[0] == "FAIL":
        assert crosscheck.judge(ours, theirs, derive.quotient(ours, theirs), limit, "gpu")[0] == "FAIL"


def test_the_limit_is_the_families(check, config):
    compute = one(check(gemm([8.0]), flops()))
    bandwidth = one(check(ROWS, rate("copy", counted="read+write")))
    assert compute.limit_pct == config.threshold("cross_check_compute_pct")
    assert bandwidth.limit_pct == config.threshold("cross_check_bandwidth_pct")


@pytest.mark.parametrize("text", ["0", "0.000", "0.5"])
def test_a_figure_that_is_no_rate_is_invalid(check, text):
    c = one(check(ROWS, rate("copy", text, counted="read+write")))
    assert c.status == "INVALID" and "is no rate" in c.reason and not c.matched


def test_a_figure_that_overflows_our_counting_is_invalid(check):
    c = one(check(ROWS, rate("copy", "1.5e308", counted="payload")))
    assert c.status == "INVALID" and c.theirs is None
    json.dumps(crosscheck.to_json([c]), allow_nan=False)


# ---- devices


def test_only_the_device_that_ours_is_is_compared_and_the_rest_is_one_line(check):
    readings = [rate("copy", str(1000 + n), counted="read+write", device=n) for n in range(8)]
    mine, others = check(ROWS, readings[::-1])
    assert mine.status == "PASS" and mine.theirs.median == 1000 and "device 0" in mine.name
    assert (others.status, others.theirs) == ("SKIP", None) and others.name.startswith("7 readings, as its-copy, copy, device 7")
    # device 0 was not measured by it: nothing is ours
    assert [c.matched for c in check(ROWS, readings[1:])] == [False]


def test_of_the_drivers_long_ids_the_first_of_a_log_is_ours(check):
    def log(order):
        return [flops(t, "interval", device=d) for d in order for t in ("1000", "1010")]

    first, rest = check(gemm([8.0]), log(["22907", "11843"]))
    assert "device 22907" in first.name and first.matched and first.theirs.blocks == 2
    assert "device 11843" in rest.name and "another device" in rest.reason
    # each imported log has its own first
    found = check(gemm([8.0]), log(["22907", "11843"]), log(["11843", "22907"]))
    assert sorted(re.search(r"device \d+", c.name)[0] for c in found if c.matched) == ["device 11843", "device 22907"]


def test_skips_are_gathered_by_reason_and_log(check):
    pairs = [rate("device_to_device", src=f"GPU {a}", dst=f"GPU {b}") for a in range(4) for b in range(4) if a != b]
    dots = [rate("dot", case=f"dot{i}") for i in range(2)]
    alone = rate("copy", counted="payload", direction="both")
    found = check(ROWS, [*pairs, *dots, alone], [*dots])
    assert [(c.log, c.name.split(",")[0], c.theirs is None) for c in found] == [
        ("0.log", "12 readings", True),
        ("0.log", "2 readings", True),
        ("0.log", "its-copy", False),
        ("1.log", "2 readings", True),
    ]
    assert len({c.reason for c in found}) == 3


# ---- logs


def test_rounds_of_a_command_are_pooled_and_imports_are_not(check):
    def rounds(imported):
        return [
            ({"name": "copy", "round": i, "imported": imported}, [rate("copy", text, counted="read+write", hwthreads=[i])], {})
            for i, text in enumerate(("900", "1000", "1300"))
        ]

    c = one(check(ROWS, *rounds(False)))
    assert ends(c.theirs) == (900, 1000, 1300) and c.theirs.blocks == 3 and c.log == "0.log" and not c.imported
    assert "ours was not measured again around it" in c.reason
    found = check(ROWS, *rounds(True))
    assert [c.theirs.median for c in found] == [900, 1000, 1300] and all("around" not in c.reason for c in found)
    # another command of the same tool is another measurement
    assert len(check(ROWS, *rounds(False), ({"name": "b", "imported": False}, [rate("copy", counted="read+write")], {}))) == 2


def around(*names):
    return {"name": "copy", "imported": False, "ours": names}


def test_what_stood_around_is_taken_before_the_runs_own_rows_and_each_once(check):
    ours = {f"ours-{i}": moved("copy", GIB, 500 - 100 * i, 510 - 100 * i) for i in (1, 2, 3, 4)}
    copy = [rate("copy", "250", counted="read+write")]
    logs = [({**around(f"ours-{i}", f"ours-{i + 1}"), "round": i - 1}, copy, {}) for i in (1, 2, 3)]
    c = one(check(ROWS, *logs, ours=ours))
    every = sorted([100, 110, 200, 210, 300, 310, 400, 410])
    assert c.ours.blocks == 8 and c.ours.median == statistics.median(every)
    assert c.ours == estimate([x] for x in every) and "around" not in c.reason
    # the best: one of each block, so that it has an interval
    logs = [(f, [replace(r, params={**r.params, "statistic": "best"}) for r in items], p) for f, items, p in logs]
    c = one(check(ROWS, *logs, ours=ours))
    assert c.ours == estimate([x] for x in every)
    # readings of one log have the same folders: they count once too
    intervals = [rate("copy", t, "interval", counted="read+write") for t in ("240", "250", "260")]
    c = one(check(ROWS, (around("ours-1", "ours-2"), intervals, {}), ours=ours))
    assert c.ours.blocks == 4 and c.theirs.blocks == 3


def test_interleaved_rounds_are_judged_by_the_ratio_of_each(check):
    """The machine slows down by half from round to round: ours and theirs alike, so each pair agrees."""
    ours = {f"ours-{i}": moved("copy", GIB, speed) for i, speed in enumerate((400, 200, 100, 50), start=1)}
    logs = [
        ({**around(f"ours-{i}", f"ours-{i + 1}"), "round": i - 1}, [rate("copy", theirs, counted="read+write")], {})
        for i, theirs in ((1, "300"), (2, "150"), (3, "75"))
    ]
    c = one(check(ROWS, *logs, ours=ours))
    assert ends(c.ratio) == (1, 1, 1) and c.ratio.blocks == 3 and c.status == "PASS"
    assert ends(c.theirs) == (75, 150, 300)
    assert one(check(ROWS, logs[1], ours=ours)).ratio.blocks == 1  # one round is no interleaving


def test_a_later_validation_takes_the_place_of_an_earlier_one(check):
    old = ({"name": "copy", "imported": False}, [rate("copy", "4000", counted="read+write")], {})
    new = ({"name": "copy", "imported": False}, [rate("copy", "1000", counted="read+write")], {})
    assert one(check(ROWS, old)).status == "FAIL"
    assert one(check(ROWS, old, new)).status == "PASS"


def test_where_the_row_was_not_measured_around_the_runs_own_is_taken_and_said(check):
    ours = {"ours-1": moved("copy", GIB, 500)}
    copy, add = rate("copy", counted="read+write"), rate("add", counted="read+write", dtype="fp32", case="its-add")
    first, second = check(ROWS, (around("ours-1"), [copy, add], {}), ours=ours)
    assert (first.ours_case, first.ours.median) == ("copy.1073741824", 500) and "around" not in first.reason
    assert (second.ours_case, second.ours.median) == ("add.1073741824", 1000)
    assert "ours was not measured again around it" in second.reason


@pytest.mark.parametrize("status", ["FAIL", "INVALID"])
def test_a_log_that_failed_gives_nothing_to_compare_with(check, status):
    flagged = rate("copy", counted="read+write", flags=["NOTE: x", f"{status}: too slow", "FAIL: later"])
    good = rate("copy", counted="read+write")
    log, reading = check(ROWS, ({}, [flagged, good], {"status": status, "reason": "its target is not met"}))
    assert (log.name, log.status, log.reason) == ("cmd0", status, "its target is not met")
    assert (reading.status, reading.reason, reading.matched) == (status, "too slow", False)
    assert reading.name == "its-copy, copy, mean"


def test_a_flagged_reading_is_never_compared_and_other_flags_are_no_verdict(check):
    bad = [rate("copy", counted="read+write", flags=["INVALID: zero"], case=f"c{i}") for i in range(3)]
    fine = rate("copy", counted="read+write", flags=["FAILURES ARE RARE", "NOISY"])
    matched, gathered = check(ROWS, [*bad, fine])
    assert matched.status == "PASS" and (gathered.status, gathered.reason) == ("INVALID", "zero")
    assert gathered.name == "3 readings, as c0, copy, mean"
    assert one(check(ROWS, [rate("copy", counted="read+write", flags=["FAIL"])])).reason == "flagged"
    rounds = [({"name": "a", "imported": False, "round": i}, [bad[0]], {}) for i in range(3)]
    assert one(check(ROWS, *rounds)).name.startswith("3 readings")


@pytest.mark.parametrize("status", ["INCOMPLETE", "UNSUPPORTED", "UNPARSED"])
def test_whole_rows_of_a_log_that_is_not_whole_are_compared(check, status):
    log, reading = check(ROWS, ({}, [rate("copy", counted="read+write")], {"status": status, "reason": "why"}))
    assert (log.status, log.reason, log.version, log.log) == (status, "why", "7", "0.log") and reading.status == "PASS"


def test_a_whole_log_without_a_figure_leaves_a_line(check):
    c = one(check(ROWS, ({}, [], {})))
    assert c.status == "SKIP" and c.reason == "it is whole, and holds no figure that is compared"


@pytest.mark.parametrize("readings", [[], [rate("copy", counted="read+write")], [rate("dot")]])
@pytest.mark.parametrize("status", [None, "INCOMPLETE"])
def test_what_a_log_warns_of_stands_in_its_first_line(check, readings, status):
    says = {"warnings": ("mem: no\nbandwidth", "more", "a third"), "status": status, "reason": "why" if status else ""}
    first, *others = check(ROWS, ({}, readings, says), rate("copy", counted="read+write"))
    assert first.log == "0.log" and first.reason.endswith("; the log: mem: no bandwidth; the log: more")
    assert all("the log:" not in c.reason for c in others) and others[-1].log == "1.log"


def test_rounds_of_a_command_warn_once(check):
    says = {"warnings": ("mem: no bandwidth",)}
    logs = [({"name": "a", "imported": False, "round": i}, [rate("copy", counted="read+write")], says) for i in range(3)]
    assert one(check(ROWS, *logs)).reason.count("the log:") == 1


def test_an_exit_status_beside_a_whole_log_is_a_warning(check):
    told, reading = check(ROWS, ({"exit_status": -11}, [rate("copy", counted="read+write")], {}))
    assert (told.status, reading.status) == ("WARN", "PASS") and "exit status -11" in told.reason
    quiet = check(ROWS, ({"exit_status": 1}, [], {"status": "FAIL", "reason": "why"}))
    assert [c.reason for c in quiet] == ["why"]


def test_what_was_not_run_is_said_once_and_not_where_it_ran_after_all(check):
    def skipped(**fields):
        return ({"log": None, "imported": False, "skipped": "not installed", **fields}, [], {})

    missing = skipped(tool="transferbench", name="transferbench")
    c = one(check(ROWS, missing, missing))
    assert (c.tool, c.status, c.reason, c.log) == ("transferbench", "SKIP", "not installed", None)
    ran = ({"name": "rvs-gst", "imported": False}, [rate("copy", counted="read+write")], {})
    assert [c.status for c in check(ROWS, skipped(name="rvs"), ran)] == ["PASS"]
    assert [c.status for c in check(ROWS, skipped(name="rvs-mem"), ran)] == ["SKIP", "PASS"]
    imported = ({"name": "x"}, [rate("copy", counted="read+write")], {})
    assert [c.status for c in check(ROWS, skipped(name="rvs"), imported)] == ["SKIP", "PASS"]


def test_collectives_are_listed_at_their_largest_payload(check):
    def perf(size, placement, counted, text="5"):
        return tools.reading("comm", "perf", "m", text, "GB/s", "mean", op="all_reduce", bytes=size, placement=placement,
                             counted=counted)  # fmt: skip

    readings = [perf(s, p, c) for s in (1, 8, 64) for p in ("in", "out") for c in ("alg", "bus")]
    c = one(check(ROWS, readings, tool="rccl"))
    assert c.status == "SKIP" and c.name.startswith("4 readings") and "no row of all_reduce" in c.reason


# ---- SC-9, and the page's sentence


def row(status: str, **more) -> Check:
    ratio = estimate([[1.0]] * 6)
    return Check("rvs", f"row {status}", status, f"why {status}", ratio=ratio, unit="B/s", ours_case="copy.1GiB", **more)


def a_log(status: str) -> Check:
    return Check("rvs", f"log {status}", status, f"why {status}")


def sc9(monkeypatch, run, found) -> scorecard.Criterion:
    monkeypatch.setattr(crosscheck, "checks", lambda run: found)
    return scorecard._finished(run, 9, [])


@pytest.mark.parametrize("kind", ["gpu", "cpu"])
@pytest.mark.parametrize(
    ("found", "gpu", "cpu", "words"),
    [
        ([row("PASS")], "PASS", "PASS", "1 matched rows agree with rvs"),
        ([row("PASS"), row("FAIL")], "FAIL", "FAIL", "rvs, row FAIL: why FAIL"),
        ([row("PASS"), a_log("FAIL"), row("WARN_CPU")], "FAIL", "FAIL", "rvs, log FAIL: why FAIL, rvs, row WARN_CPU: why"),
        ([row("WARN"), row("INSUFFICIENT"), row("PASS")], "INSUFFICIENT", "INSUFFICIENT", "rvs, row INSUFFICIENT: why"),
        ([row("WARN_CPU"), row("PASS")], "WARN_CPU", "WARN_CPU", "rvs, row WARN_CPU: why WARN_CPU"),
        ([row("INSUFFICIENT"), a_log("INVALID")], "INSUFFICIENT", "INSUFFICIENT", "rvs, log INVALID: why INVALID (INVALID)"),
        ([row("PASS"), a_log("SKIP"), a_log("UNSUPPORTED")], "PASS", "PASS", "1 matched rows agree"),
        *(
            ([row("PASS"), a_log("SKIP"), a_log(status)], "WARN", "WARN_CPU", f"rvs, log {status}: why {status} ({status})")
            for status in ("INVALID", "INCOMPLETE", "UNPARSED", "WARN")
        ),
        ([a_log("INVALID")], "INCOMPLETE", "INCOMPLETE", "no matched row (rvs: INVALID, why INVALID)"),
        ([a_log("WARN"), a_log("SKIP")], "WARN", "WARN", "rvs, log WARN: why WARN"),
        ([a_log("FAIL")], "FAIL", "FAIL", "rvs, log FAIL: why FAIL"),
        ([a_log("SKIP"), a_log("UNSUPPORTED")], "SKIP", "SKIP", "no matched row"),
        ([], "SKIP", "SKIP", "no outside tool was run"),
    ],
)
def test_sc9_is_what_the_rows_are(made_run, monkeypatch, found, gpu, cpu, words, kind):
    c = sc9(monkeypatch, made_run([], found=MI355X if kind == "gpu" else CPU), found)
    assert c.status == (gpu if kind == "gpu" else cpu) and words in c.reason
    assert len(c.evidence) == (0 if c.status == "SKIP" else sum(x.matched and x.status != "PASS" for x in found))


def test_the_evidence_of_sc9_names_both_figures_and_how_they_were_taken(made_run, monkeypatch):
    figures = dict(ours=steady(2.5e12, 2.4e12, 2.6e12), theirs=steady(4e12), statistic="median", log="01_gst.log")
    how = [{"imported": True}, {"interleaved": True, "noisy": True}, {}]
    c = sc9(monkeypatch, made_run([], found=MI355X), [row("INSUFFICIENT", **figures, **more) for more in how] + [row("PASS")])
    assert len(c.evidence) == 3
    for line, words in zip(c.evidence, ("imported, ours is not", "interleaved, ours is NOISY", "not interleaved"), strict=True):
        assert words in line and "rvs" in line and "copy.1GiB" in line and "01_gst.log" in line and "median" in line
        assert "2.5e+12 B/s (2.4e+12 to 2.6e+12)" in line and "theirs 4e+12 B/s" in line


@pytest.mark.parametrize("status", ["FAIL", "INVALID"])
@pytest.mark.parametrize("bad", [row, a_log])
@pytest.mark.parametrize("more", [[], [row("PASS"), a_log("SKIP")], [a_log("INCOMPLETE")]])
def test_the_page_names_what_failed_first_and_once(bad, status, more):
    text = verdict.checks_sentence([*more, bad(status)])
    assert text.startswith(f"**{status}** rvs, {bad(status).name}: why {status}. ")
    assert text.count(f"why {status}") == 1 and ("matched rows agree" in text or "could be matched" in text)


def test_the_page_counts_what_it_does_not_name():
    text = verdict.checks_sentence([a_log("FAIL")] * 3 + [a_log("INVALID")] * 4)
    assert text.count("**FAIL**") == 3 and text.count("**INVALID**") == 1 and "3 more are FAIL or INVALID" in text


# ---- validation.json


def test_to_json_is_json_in_base_units(check):
    found = check(ROWS, [rate("copy", "1", unit="kB/s", counted="read+write"), rate("dot", "3", unit="kB/s")])
    out = crosscheck.to_json(found)
    assert json.loads(json.dumps(out, allow_nan=False)) == out
    assert out[0] | {"reason": ""} == {
        "tool": "rvs", "name": "its-copy, copy, mean", "status": "PASS", "reason": "", "unit": "B/s", "statistic": "mean",
        "theirs": {"median": 1000, "lo": 1000, "hi": 1000}, "ours": {"median": 1000, "lo": 1000, "hi": 1000},
        "ours_case": "copy.1073741824", "ratio": {"median": 1, "lo": 1, "hi": 1}, "limit_pct": 15, "log": "0.log",
        "imported": True, "version": "7", "interleaved": False, "noisy": False,
    }  # fmt: skip
    assert out[1]["ours"] is None and out[1]["ratio"] is None and out[1]["theirs"]["median"] == 3000


# ---- any bytes

WHOLE = {p.name: p.read_bytes() for p in FIXTURES}
RUNS = {name: derive.load(SAMPLES / name) for name in ("cpu", "mi355x")}


@st.composite
def damaged(draw) -> bytes:
    """A fixture after one accident, or two of them in one another."""
    a, b = (draw(st.sampled_from(sorted(WHOLE))) for _ in range(2))
    at, to = (draw(st.integers(0, len(WHOLE[x]))) for x in (a, b))
    noise = draw(st.binary(max_size=8) | st.sampled_from([b"0", b"99999999999999999999", b"1e308", b"-nan", b"\n", b"\r", b" "]))
    return WHOLE[a][:at] + noise + draw(st.sampled_from([WHOLE[a][at:], WHOLE[b][to:], b"", WHOLE[a]]))


@given(st.binary(max_size=300) | damaged(), st.sampled_from(["cpu", "mi355x"]))
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_bytes_as_a_log_are_judged(data, name):
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "a log"
        source.write_bytes(data)
        run = replace(RUNS[name], directory=Path(folder) / "run")
        running.import_files(run.directory, [source], lambda text: None)
        found = crosscheck.checks(run)
    assert found and {c.status for c in found} <= STATUSES
    assert all(c.reason and "\n" not in c.reason + c.name for c in found)
    out = crosscheck.to_json(found)
    assert json.loads(json.dumps(out, allow_nan=False)) == out


@pytest.mark.parametrize("path", FIXTURES, ids=lambda p: f"{p.parent.name}/{p.name}")
def test_every_fixture_is_judged(path, tmp_path):
    """In a run of the kind it fits: each log leaves at least one line, and a log that is whole no problem but its own."""
    run = replace(RUNS["cpu" if path.parent.name == "host_stream" else "mi355x"], directory=tmp_path)
    running.import_files(tmp_path, [path], lambda text: None)
    found, parsed = crosscheck.checks(run), tools.read(path.read_bytes())
    assert {c.tool for c in found} == {parsed.tool}
    if found[0].reason.startswith("its log names "):  # another device: one line, whatever it says
        assert [c.status for c in found] == ["SKIP"] and path.parent.name in ("nvbandwidth", "rccl", "rocm_bw")
        return
    warned = "".join(f"; the log: {text}" for text in parsed.warnings[:2])
    assert (found[0].status, found[0].reason) == (parsed.status, parsed.reason + warned) or parsed.status is None
    assert found[0].reason.endswith(warned)
    flagged = any(r.flags for r in parsed.records)
    if parsed.status is None and not flagged:
        assert {c.status for c in found} <= {"PASS", "WARN", "FAIL", "SKIP", "INSUFFICIENT"}
        assert all(c.matched for c in found if c.status != "SKIP")


# ---- the sample's logs, by hand


def test_the_samples_logs_agree_with_ratios_by_hand(tmp_path):
    run_dir = Path(shutil.copytree(SAMPLES / "mi355x", tmp_path / "run"))
    about = run_dir / "raw/tools/01_rvs-gst.json"
    about.write_text(re.sub(r"matrix_init: \w+", "matrix_init: hiprand", about.read_text()))  # data that are like ours
    run = derive.load(run_dir)
    gst, copy = running.logs(run_dir)
    lines = (run_dir / "raw/tools" / gst.log).read_text().splitlines()
    device = re.search(r"GPU:: *(\d+)", "".join(lines))[1]
    intervals = [1e9 * float(m[1]) for x in lines if device in x and (m := re.search(r"GFLOPS (\d+)$", x))]
    assert len(intervals) == 5
    parsed = running.parsed(run_dir, gst)
    readings = [r for r in parsed.records if r.params["statistic"] == "interval" and r.params["device"] == device]
    assert [tools.base_value(r) for r in readings] == intervals
    once = 1e9 * float(re.search(r"GPU 00  -> +(\d+\.\d+)", (run_dir / "raw/tools" / copy.log).read_text())[1])
    assert [tools.base_value(r) for r in running.parsed(run_dir, copy).records] == [once]

    def of(family: str, case: str) -> list[float]:
        """Work over time of each block."""
        (path,) = (run_dir / "records").glob(f"*_{family}.jsonl")
        rows = [json.loads(x) for x in path.read_text().splitlines()[1:]]
        work = {"compute": "flop", "bandwidth": "bytes_moved"}[family]
        return [len(r["samples_s"]) * r[work] * r.get("calls_per_sample", 1) / sum(r["samples_s"])
                for r in rows if r["case"] == case and r.get("samples_s")]  # fmt: skip

    matched = {c.tool: c for c in crosscheck.checks(run) if c.matched}
    assert sorted(matched) == ["rvs", "transferbench"]
    peer, plateau = of("compute", "peer.8192x8192x16384"), of("bandwidth", "copy.36862MiB")
    assert len(peer) == len(plateau) == 6
    for tool, ours, theirs, case in (
        ("rvs", peer, intervals, "peer.8192x8192x16384"), ("transferbench", plateau, [2 * once], "copy.36862MiB"),
    ):  # fmt: skip
        c = matched[tool]
        assert (c.status, c.ours_case, c.imported) == ("PASS", case, True)
        assert c.theirs.median == pytest.approx(statistics.median(theirs)) and c.theirs.blocks == len(theirs)
        assert ends(c.ratio) == pytest.approx([
            min(ours) / max(theirs), statistics.median(ours) / statistics.median(theirs), max(ours) / min(theirs),
        ])  # fmt: skip
    others = [c for c in crosscheck.checks(run) if not c.matched]
    assert [(c.tool, c.status) for c in others] == [("rvs", "SKIP")] and "another device" in others[0].reason
