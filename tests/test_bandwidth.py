"""Bandwidth: declared bytes, sizes that no cache holds, operands that are cold, and results that are checked."""

import ctypes
import math
from dataclasses import replace

import pytest
import torch
from conftest import RecordingSession
from hypothesis import given
from hypothesis import strategies as st

from escher_kernels import bandwidth, native
from escher_kernels.bandwidth import (
    OPS,
    SCALAR,
    Buffers,
    case,
    cases,
    error,
    host_cases,
    pairs,
    plateau_sizes,
    size_name,
    strided_cases,
    sum_error,
)
from escher_kernels.timing import Machine

pytestmark = pytest.mark.usefixtures("one_thread")

MIB, GIB = 2**20, 2**30
STREAMS = {"copy": 2, "mul": 2, "add": 3, "triad": 3, "sum": 1, "fill": 1}  # STREAM's and BabelStream's counting
FORMULA = {
    "copy": lambda a, b: a, "mul": lambda a, b: SCALAR * a, "add": lambda a, b: a + b,
    "triad": lambda a, b: a + SCALAR * b, "fill": lambda a, b: torch.full_like(a, SCALAR),
}  # fmt: skip
cache_bytes = st.integers(0, 8192).map(lambda n: n * 256 * 1024)  # every L3 there is: a multiple of 256 KiB
hosts = st.tuples(st.just("cpu"), st.integers(4, 4096).map(lambda n: n * GIB), cache_bytes) | st.tuples(
    st.just("gpu"), st.integers(8, 512).map(lambda n: n * GIB), st.integers(0, 512).map(lambda n: n * MIB)
)
HOSTS = [("cpu", 64 * GIB, 0), ("cpu", 64 * GIB, 300 * MIB), ("cpu", 512 * GIB, 8 * 32 * MIB),
         ("cpu", 64 * GIB, 36 * MIB), ("gpu", 288 * 10**9, 256 * MIB), ("gpu", 80 * GIB, 50 * MIB)]  # fmt: skip


# ---- what is declared ----


def test_streams_of_each_op():
    assert {name: op.reads + op.writes for name, op in OPS.items()} == STREAMS
    assert SCALAR == float(torch.tensor(SCALAR, dtype=torch.float32))  # exact, so that fill is


@given(st.sampled_from(sorted(OPS)), st.integers(1, 2**44))
def test_bytes_moved(op, size):
    assert case(op, size).bytes_moved == STREAMS[op] * size


@pytest.mark.parametrize("size", [2**31 - 1, 2**31, 2**31 + 4096])
def test_sizes_beyond_32_bits(size):
    c = case("triad", size)
    assert (c.params["buffer_bytes"], c.bytes_moved) == (size, 3 * size)


# ---- sizes ----


def test_plateau_of_a_gpu():
    memory = 288 * 10**9  # MI355X
    assert plateau_sizes("gpu", memory, 256 * MIB) == [memory // n // MIB * MIB for n in (16, 12, 8)]


@pytest.mark.parametrize(
    ("llc", "mib"),
    [
        (0, [256, 384, 512]),
        (32 * MIB, [256, 384, 512]),
        (128 * MIB, [256, 384, 512]),
        (8 * 32 * MIB, [512, 768, 1024]),
        (300 * MIB, [600, 900, 1200]),
    ],
)
def test_plateau_of_a_cpu(llc, mib):
    assert plateau_sizes("cpu", 64 * GIB, llc) == [n * MIB for n in mib]


@given(hosts)
def test_plateau_sizes_grow_and_outgrow_the_caches(host):
    sizes = plateau_sizes(*host)
    assert len(sizes) == 3 and sizes == sorted(set(sizes)) and all(s % MIB == 0 for s in sizes)
    if host[0] == "cpu":
        assert sizes[-1] >= max(512 * MIB, 4 * host[2])


@given(hosts, st.booleans())
def test_rows(host, quick):
    rows = cases(*host, quick)
    plateau = plateau_sizes(*host)
    assert len({c.name for c in rows}) == len(rows)
    assert [c.name for c in rows if c.params.get("plateau")] == [f"{o}.{size_name(s)}" for s in plateau for o in OPS]
    beside = [c for c in rows if c.params["op"] not in OPS]
    assert beside == [*strided_cases(), *host_cases(host[0], plateau[-1])]
    assert not any("plateau" in c.params for c in beside)
    rows = [c for c in rows if c not in beside]
    curve = [c.params["buffer_bytes"] for c in rows if c.cache == "warm"]
    assert curve == sorted(curve) and curve[0] == 128 * 1024 and plateau[-1] / 8 < curve[-1] <= plateau[-1]
    assert {c.cache for c in rows} == {"cold", "warm"}
    assert all(c.params["buffer_bytes"] < plateau[0] for c in rows if c.cache == "cold" and "plateau" not in c.params)
    assert all(c.bytes_moved == STREAMS[c.params["op"]] * c.params["buffer_bytes"] for c in rows)


def test_a_strided_copy_declares_what_is_useful():
    two, pitch = strided_cases()
    assert (two.name, pitch.name) == ("strided.2", "strided.pitch")
    assert two.params["span_bytes"] == 2 * two.params["buffer_bytes"] and two.bytes_moved == 128 * MIB
    assert pitch.params["span_bytes"] == pitch.params["buffer_bytes"] and pitch.bytes_moved == 256 * MIB
    assert {c.cache for c in (two, pitch)} == {"cold"} and two.params["stride_bytes"] == 8


def test_host_copies_of_a_cpu_are_one_row_with_the_reason():
    [row] = host_cases("cpu", 8 * GIB)
    assert row.skipped == "a CPU host has no device to copy to"


@given(st.integers(64, 65536))
def test_host_copies_of_a_gpu(largest_mib):
    rows = host_cases("gpu", largest_mib * MIB)
    sizes = [s for s in (64, 256, 1024) if s <= largest_mib]
    assert [c.name for c in rows] == [
        f"host.{way}.{memory}.{size}MiB"
        for way in ("to_device", "from_device") for memory in ("pinned", "pageable") for size in sizes
    ]  # fmt: skip
    assert all(c.bytes_moved == c.params["buffer_bytes"] and c.cache is None for c in rows)  # what crosses, once


@pytest.mark.parametrize(("size", "name"), [(128 * 1024, "128KiB"), (MIB, "1MiB"), (18 * GIB, "18432MiB")])
def test_size_name(size, name):
    assert size_name(size) == name


# ---- cold and warm ----


def without_memory(size, llc, spare=0):
    """Buffers whose tensors have shapes and no storage."""
    out = Buffers.__new__(Buffers)
    out.torch, out.llc_bytes, out.threads, out.local_bytes, out._local = torch, llc, 2, None, {}
    out.a, out.b, out.c = (torch.empty(size // 4, device="meta") for _ in range(3))
    out.spare = torch.empty(spare // 4, device="meta")
    return out


def touched_bytes(buffers, row):
    """Bytes a case goes through before it comes back to its first operand: each distinct stretch once.

    Of a strided copy, what it uses.
    """
    stretches = set()
    if row.params["op"] == "strided":
        sets = [[("a", a), ("c", c)] for a, c in buffers.strided_sets(row)]
    else:
        op = OPS[row.params["op"]]
        sets = [[("a", a), ("b", b)][: op.reads] + [("c", c)][: op.writes] for a, b, c in buffers.views(row)]
    for name, x in (operand for operands in sets for operand in operands):
        stretches.add((name, id(x._base), x.storage_offset(), x.numel()))
    return sum(length * 4 for *_, length in stretches)


def planned(host):
    return without_memory(plateau_sizes(*host)[-1], host[2], bandwidth.spare_bytes(*host))


def streams(row):
    return STREAMS.get(row.params["op"], 2)


@pytest.mark.parametrize("host", HOSTS)
def test_a_cold_row_goes_through_more_than_four_times_the_caches(host):
    buffers = planned(host)
    for row in cases(*host):
        if row.cache != "cold":
            continue
        touched = touched_bytes(buffers, row)
        assert touched > 4 * host[2], row.name
        assert touched >= streams(row) * row.params["buffer_bytes"]
        if row.params["op"] == "sum":  # it goes through both operand buffers
            read = {(x._base is buffers.a, x.storage_offset()) for x, _, _ in buffers.views(row)}
            assert len(read) == len(buffers.views(row)) > 1


@given(hosts)
def test_fill_goes_through_more_than_four_times_the_caches_of_any_host(host):
    buffers = planned(host)
    for size in plateau_sizes(*host):
        views = [c for _, _, c in buffers.views(case("fill", size, plateau=True))]
        assert sum(len(c) * 4 for c in views) > 4 * host[2]
        assert len({(id(c._base), c.storage_offset()) for c in views}) == len(views)
    if host[0] == "gpu" and host[1] >= 64 * GIB or host[2] < 96 * MIB:
        assert len(buffers.spare) == 0  # no memory is taken where one set is more than enough


def test_strided_sets_do_not_overlap():
    buffers = planned(("cpu", 64 * GIB, 300 * MIB))
    for row in strided_cases():
        for which in (0, 1):
            at = [(id(x[which]._base), x[which].storage_offset()) for x in buffers.strided_sets(row)]
            assert len(set(at)) == len(at) > 1
        source, target = buffers.strided_sets(row)[-1]
        assert source.shape == target.shape and target.is_contiguous()
        assert source.stride()[-1] * 4 == row.params["stride_bytes"]


@pytest.mark.parametrize("host", HOSTS)
def test_a_warm_row_uses_one_set(host):
    buffers = without_memory(plateau_sizes(*host)[-1], host[2])
    for row in cases(*host):
        if row.cache == "warm":
            assert touched_bytes(buffers, row) == 2 * row.params["buffer_bytes"]


def test_operand_sets_do_not_overlap_and_no_more_than_needed_are_used():
    buffers = without_memory(1200 * MIB, 300 * MIB)
    views = buffers.views(case("copy", 4 * MIB))
    offsets = [a.storage_offset() for a, _, _ in views]
    assert offsets == [i * MIB for i in range(len(views))]  # elements
    assert 1200 < len(views) * 8 <= 1200 + 2 * 8


# ---- results ----


@pytest.fixture(scope="module")
def abc():
    torch.manual_seed(0)
    return tuple(torch.randn(1_300_077) for _ in range(3))


def right(op, a, b):
    return FORMULA[op](a.double(), b.double()).float()


@pytest.mark.parametrize("op", FORMULA)
@pytest.mark.parametrize("n", [1, 2, 5, 1000, None])
def test_a_right_result_passes(abc, op, n):
    a, b, _ = (x[:n] for x in abc)
    found = error(torch, op, a, b, right(op, a, b))
    assert found["ok"] and found["elementwise_ratio"] <= 1
    if OPS[op].exact:
        assert found["elementwise_ratio"] == 0
    out = torch.empty_like(a)
    OPS[op].run(torch, a, b, out)  # and so does torch's own
    assert error(torch, op, a, b, out)["ok"]


def ulps(x, n):
    return x + n * 2.0**-23 * 2.0 ** torch.floor(torch.log2(x.abs()))


WRONG = {
    "eight units in the last place off": lambda c, old: ulps(c, 8),
    "tail unwritten": lambda c, old: torch.cat([c[:-5], torch.full_like(c[-5:], math.nan)]),
    "middle unwritten": lambda c, old: torch.cat([c[:400_000], c[:1] * math.nan, c[400_001:]]),
    "nothing written": lambda c, old: torch.full_like(c, math.nan),
    "an older result": lambda c, old: old,
    "zeros": lambda c, old: torch.zeros_like(c),
    "shifted by one": lambda c, old: torch.roll(c, 1),
    "tail of an older result": lambda c, old: torch.cat([c[:-1000], old[-1000:]]),
    "infinite": lambda c, old: torch.cat([c[:-1], c[-1:] * math.inf]),
}


@pytest.mark.parametrize("op", FORMULA)
@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_result_fails(abc, op, wrong):
    if op == "fill" and wrong == "shifted by one":
        wrong = "zeros"  # a constant shifted is itself
    a, b, old = abc
    found = error(torch, op, a, b, WRONG[wrong](right(op, a, b), old))
    assert not found["ok"]
    assert found["elementwise_ratio"] is None or math.isfinite(found["elementwise_ratio"])  # JSON knows no infinity


def test_copy_and_fill_are_exact(abc):
    a, b, _ = abc
    for op in ("copy", "fill"):
        c = right(op, a, b)
        c[-1] = torch.nextafter(c[-1], torch.tensor(10.0))
        assert not error(torch, op, a, b, c)["ok"]


def test_another_op_is_told_apart(abc):
    a, b, _ = abc
    for op in FORMULA:
        for other in FORMULA:
            assert error(torch, op, a, b, right(other, a, b))["ok"] == (op == other)


def test_sum_within_its_bound(abc):
    a = abc[0]
    want, scale = float(a.double().sum()), float(a.double().abs().sum())
    assert sum_error(float(a.sum()), want, scale, len(a))["ok"]
    assert sum_error(want, want, scale, len(a))["elementwise_ratio"] == 0
    bound = 64 * 2**-24 * scale
    assert (
        sum_error(want + 0.99 * bound, want, scale, 1)["ok"]
        and not sum_error(want + 1.01 * bound, want, scale, 1)["ok"]
    )
    for wrong in (float(a[: len(a) // 2].sum()), float(a.abs().sum()), 0.0, math.nan, math.inf, -want):
        assert not sum_error(wrong, want, scale, len(a))["ok"], wrong


# ---- on real buffers ----

SIZE, LLC = MIB // 2, 64 * 1024


@pytest.fixture(scope="module")
def buffers():
    torch.manual_seed(0)
    return Buffers(torch, "cpu", SIZE, LLC, threads=4)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("cache", ["cold", "warm"])
@pytest.mark.parametrize("size", [16 * 1024, SIZE // 2, SIZE])
def test_every_set_is_poisoned_run_and_checked(buffers, op, cache, size):
    kept = buffers.a.clone(), buffers.b.clone()
    item = buffers.prepare(case(op, size, cache))
    sets = item.case.params["operand_sets"]
    assert sets == len(buffers.views(item.case)) and (sets > 1) == (cache == "cold" and (size < SIZE or op == "sum"))
    assert item.threads == min(4, math.ceil(size / 4 / 32768))
    for _ in range(2):
        item.poison()
        assert not any(item.check(turn, False)["ok"] for turn in range(sets))
        for turn in range(sets):
            item.call(turn)
            assert item.check(turn, False)["ok"]
        assert item.check(sets, False)["ok"]  # turns wrap around
    assert torch.equal(kept[0], buffers.a) and torch.equal(kept[1], buffers.b)  # operands are never written


def test_operands_are_normal(buffers):
    for x in (buffers.a, buffers.b):
        assert abs(float(x.std()) - 1) < 0.02 and len(x.unique()) > 1000
    assert not torch.equal(buffers.a, buffers.b)


def test_a_case_known_not_to_fit_is_left_alone(buffers):
    item = buffers.prepare(replace(case("copy", 2**40), skipped="too big"))
    assert item.call is None and item.case.skipped == "too big"


@pytest.fixture
def small_strides(monkeypatch):
    monkeypatch.setattr(bandwidth, "STRIDED_BYTES", SIZE // 4)
    monkeypatch.setattr(bandwidth, "ROW_PITCH", 128)


@pytest.mark.parametrize("number", [0, 1])
def test_every_strided_set_is_poisoned_run_and_checked(buffers, small_strides, number):
    item = buffers.prepare(strided_cases()[number])
    sets = item.case.params["operand_sets"]
    assert sets > 1 and item.threads == (4 if number == 0 else 1)
    item.poison()
    assert not any(item.check(turn, False)["ok"] for turn in range(sets))
    for turn in range(sets + 1):
        item.call(turn)
        found = item.check(turn, True)
        assert found["ok"] and found["elements_checked"] * 4 == item.case.params["buffer_bytes"]
    source, target = buffers.strided_sets(item.case)[0]
    flat, step = buffers.a[: source.numel() * (2 if number == 0 else 1)], 2 if number == 0 else 128
    expected = flat[::step] if number == 0 else torch.cat([flat[i::step] for i in range(step)])
    assert torch.equal(target.reshape(-1), expected)
    target.view(-1)[-1] = 0
    assert not item.check(0, False)["ok"]


def test_a_strided_copy_without_room_says_so(buffers):
    assert "smaller than 128MiB" in buffers.prepare(strided_cases()[0]).case.skipped


@pytest.mark.parametrize("op", ["host_to_device", "device_to_host"])
def test_copies_between_host_and_device_are_checked_whole(op, monkeypatch):
    """With the CPU as the device: what is copied where, and that every element counts."""
    monkeypatch.setattr(bandwidth, "HOST_SIZES", (SIZE // 2, SIZE))
    own = Buffers(torch, "cpu", SIZE, LLC)
    kept = own.a.clone()
    for row in (c for c in host_cases("gpu", SIZE) if c.params["op"] == op and c.params["memory"] == "pageable"):
        item = own.prepare(row)
        source, target = own.host_pair(row)
        assert target.numel() * 4 == row.bytes_moved and abs(float(source.std()) - 1) < 0.05
        item.poison()
        assert not item.check(0, True)["ok"]
        item.call(0)
        assert item.check(0, True)["ok"] and torch.equal(source, target)
        target[-1] = target[-1] + 1
        assert not item.check(0, False)["ok"]
    assert torch.equal(own.a, kept)


def test_memory_that_cannot_be_pinned_is_a_reason(buffers, monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError("cannot pin\nmore")

    monkeypatch.setattr(buffers, "host_pair", refuse)
    item = buffers.prepare(host_cases("gpu", GIB)[0])
    assert item.case.skipped == "cannot pin" and item.call is None


class Memmove:
    """Stands in for the C copies; `broken` copies all but the last byte."""

    def __init__(self, broken=False):
        self.broken, self.calls = broken, []

    def copy(self, target, source, size, threads, streaming):
        self.calls.append(streaming)
        ctypes.memmove(target, source, size - 4 * self.broken)


def test_the_three_copies_share_buffers_and_are_checked(buffers):
    probe = Memmove()
    items = pairs(buffers, probe, 2, SIZE)
    assert [i.case.name for i in items] == ["stream.torch", "stream.plain", "stream.streaming"]
    for item in items:
        assert item.case.bytes_moved == 2 * SIZE and item.case.role == "pair"
        item.poison()
        assert not item.check(0, True)["ok"]
        item.call(0)
        assert item.check(0, True)["ok"]
    assert probe.calls == [False, True]
    for item in pairs(buffers, Memmove(broken=True), 2, SIZE)[1:]:
        item.poison()
        item.call(0)
        assert not item.check(0, True)["ok"]


# ---- the family ----


@pytest.mark.parametrize(("kind", "memory"), [("cpu", 2 * GIB), ("cpu", 0)])
def test_too_little_memory_is_a_reason_for_each_row(kind, memory):
    session = RecordingSession()
    bandwidth.measure(session, Machine(None, kind, kind, "bf16", memory, 36 * MIB, (0,)), None)
    assert session.steps == []
    assert {n for n, _ in session.skipped} == {c.name for c in cases(kind, memory, 36 * MIB, quick=True)}
    others = {n: why for n, why in session.skipped if "three buffers of 512MiB do not fit 60 % of" not in why}
    assert others == {"host.to_device": "a CPU host has no device to copy to"}


def test_a_spare_buffer_counts(monkeypatch):
    session = RecordingSession()
    bandwidth.measure(session, Machine(None, "cpu", "cpu", "bf16", 4 * GIB, 256 * MIB, (0,)), None)
    why = "three buffers of 1024MiB and 1024MiB for fill do not fit"
    assert session.steps == [] and any(why in reason for _, reason in session.skipped)


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
@pytest.mark.parametrize("compiler", [True, False])
def test_what_is_run_in_which_order(monkeypatch, kind, compiler):
    class Loaded(Memmove):
        def __enter__(self):
            return self

        def __exit__(self, *_): ...

    def load():
        if not compiler:
            raise native.NativeUnavailable("no C compiler")
        return Loaded()

    monkeypatch.setattr(native, "load", load)
    monkeypatch.setattr(bandwidth, "plateau_sizes", lambda *_: [MIB, 2 * MIB, 3 * MIB])
    session = RecordingSession()
    bandwidth.measure(session, Machine(torch, kind, "cpu", "bf16", GIB, LLC, (0, 1)), None)
    expected = ["warm-up", "anchor", "blocks", "anchor"]
    if kind == "cpu":
        expected += ["pairs", "anchor"] if compiler else ["anchor"]
        assert len(session.paired) == (3 if compiler else 0)
    assert session.steps == expected
    assert session.skipped == ([("stream.plain", "no C compiler")] if kind == "cpu" and not compiler else [])
    plain = [i for i in session.blocks if i.case.params["op"] in OPS]
    assert {i.case.params["op"] for i in plain} == set(OPS) and {i.share for i in plain} == {1.0}
    others = {i.case.name: i for i in session.blocks if i not in plain}
    assert set(others) == {c.name for c in cases(kind, GIB, LLC) if c.params["op"] not in OPS}
    assert all(i.share == 0.5 for i in others.values())
