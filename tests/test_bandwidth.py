"""Bandwidth: declared bytes, sizes that no cache holds, operands that are cold, and results that are checked."""

import ctypes
import math
from dataclasses import replace

import pytest
import torch
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
    pairs,
    plateau_sizes,
    size_name,
    sum_error,
)
from escher_kernels.timing import BUDGETS, Case, Machine

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


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Small buffers: waking a second thread costs more than it saves."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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
    curve = [c.params["buffer_bytes"] for c in rows if c.cache == "warm"]
    assert curve == sorted(curve) and curve[0] == 128 * 1024 and plateau[-1] / 8 < curve[-1] <= plateau[-1]
    assert {c.cache for c in rows} == {"cold", "warm"}
    assert all(c.params["buffer_bytes"] < plateau[0] for c in rows if c.cache == "cold" and "plateau" not in c.params)
    assert all(c.bytes_moved == STREAMS[c.params["op"]] * c.params["buffer_bytes"] for c in rows)


@pytest.mark.parametrize(("size", "name"), [(128 * 1024, "128KiB"), (MIB, "1MiB"), (18 * GIB, "18432MiB")])
def test_size_name(size, name):
    assert size_name(size) == name


# ---- cold and warm ----


def without_memory(size, llc):
    """Buffers whose tensors have shapes and no storage."""
    out = Buffers.__new__(Buffers)
    out.torch, out.llc_bytes, out.threads, out.local_bytes, out._local = torch, llc, 2, None, {}
    out.a, out.b, out.c = (torch.empty(size // 4, device="meta") for _ in range(3))
    return out


def touched_bytes(buffers, row):
    """Bytes a case goes through before it comes back to its first operand: each distinct stretch once."""
    op, stretches = OPS[row.params["op"]], set()
    for a, b, c in buffers.views(row):
        for name, x in [("a", a), ("b", b)][: op.reads] + [("c", c)][: op.writes]:
            stretches.add((name, x.storage_offset(), len(x)))
    return sum(length * 4 for _, _, length in stretches)


@pytest.mark.parametrize("host", HOSTS)
def test_a_cold_row_goes_through_more_than_four_times_the_caches(host):
    buffers = without_memory(plateau_sizes(*host)[-1], host[2])
    for row in cases(*host):
        if row.cache == "warm":
            continue
        touched = touched_bytes(buffers, row)
        if STREAMS[row.params["op"]] > 1:
            assert touched > 4 * host[2], row.name
        else:
            # one stream: three quarters of the largest buffer hold it once; sum goes through both operand buffers
            assert touched >= 3 * host[2], row.name
            if row.params["op"] == "sum":
                read = {(x._base is buffers.a, x.storage_offset()) for x, _, _ in buffers.views(row)}
                assert len(read) == len(buffers.views(row)) > 1
        assert touched >= STREAMS[row.params["op"]] * row.params["buffer_bytes"]


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


class Recorder:
    budget = BUDGETS["quick"]

    def __init__(self):
        self.steps, self.blocks, self.paired, self.skipped = [], [], [], []

    def progress(self, *_, **__): ...

    def warm_up(self, machine):
        self.steps.append("warm-up")

    def anchor(self):
        self.steps.append("anchor")

    def run_blocks(self, items):
        self.steps.append("blocks")
        self.blocks = items

    def run_pairs(self, items):
        self.steps.append("pairs")
        self.paired = items

    def skip(self, case: Case, reason: str):
        self.skipped.append((case.name, reason))


@pytest.mark.parametrize(("kind", "memory"), [("cpu", 2 * GIB), ("cpu", 0)])
def test_too_little_memory_is_a_reason_for_each_row(kind, memory):
    session = Recorder()
    bandwidth.measure(session, Machine(None, kind, kind, "bf16", memory, 36 * MIB, (0,)), None)
    assert session.steps == []
    assert {n for n, _ in session.skipped} == {c.name for c in cases(kind, memory, 36 * MIB, quick=True)}
    assert all("three buffers of 512MiB do not fit 60 % of" in why for _, why in session.skipped)


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
    session = Recorder()
    bandwidth.measure(session, Machine(torch, kind, "cpu", "bf16", GIB, LLC, (0, 1)), None)
    expected = ["warm-up", "anchor", "blocks", "anchor"]
    if kind == "cpu":
        expected += ["pairs", "anchor"] if compiler else ["anchor"]
        assert len(session.paired) == (3 if compiler else 0)
    assert session.steps == expected
    assert session.skipped == ([("stream.plain", "no C compiler")] if kind == "cpu" and not compiler else [])
    assert {i.case.params["op"] for i in session.blocks} == set(OPS)
