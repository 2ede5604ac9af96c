"""GEMM: a right product passes and each wrong one fails, operands are never constant, the search finds the best."""

import itertools
import math
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from conftest import RecordingSession
from hypothesis import given, settings
from hypothesis import strategies as st

from escher_kernels import checks, compute, native, workload
from escher_kernels.checks import batched_error, gelu_error
from escher_kernels.compute import Pools, coarse, gemm, gemm_error, largest_operand, rate, refine, search, search_case
from escher_kernels.records import Record
from escher_kernels.timing import BUDGETS, Machine, Prepared

pytestmark = pytest.mark.usefixtures("one_thread")

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
ESCHER = workload.load()
SMALL = workload.fit(ESCHER, "cpu", 2**35)
SHAPES = [(64, 64, 64), (128, 96, 512), (257, 129, 65), (3, 640, 512), (300, 40, 2), (33, 1, 130), (2, 70, 192)]


def operands(m, n, k, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(*shape, generator=generator).to(DTYPES[dtype]) for shape in ((m, k), (k, n)))


def right(a, b):
    """The product in float64, rounded once: what an ideal unit returns."""
    return (a.double() @ b.double()).to(a.dtype)


def accumulated_low(a, b):
    c = torch.zeros(a.shape[0], b.shape[1], dtype=a.dtype)
    for i in range(a.shape[1]):
        c = (c.float() + torch.outer(a[:, i].float(), b[i].float())).to(a.dtype)
    return c


def swapped_rows(a, b):
    c = right(a, b)
    c[[0, -1]] = c[[-1, 0]]
    return c


def unwritten(a, b):
    c = right(a, b)
    c[c.shape[0] // 2, -1] = math.nan
    return c


def neighbour_chunk(a, b):
    c, half = right(a, b), b.shape[1] // 2
    c[:, :half] = c[:, half : 2 * half].clone()
    return c


def neighbour_rows(a, b):
    c = right(a, b)
    c[0] = c[1]
    return c


# name -> (the wrong product, where it differs from the right one, where the sum over a row with random signs shows it)
always, never = (lambda m, n, k, dtype: True), (lambda m, n, k, dtype: False)
MUTANTS = {
    "zeros": (lambda a, b: torch.zeros(a.shape[0], b.shape[1], dtype=a.dtype), always, always),
    "A transposed": (lambda a, b: right(a.t().contiguous(), b), lambda m, n, k, d: m == k > 1, always),
    "B transposed": (lambda a, b: right(a, b.t().contiguous()), lambda m, n, k, d: n == k > 1, always),
    "half of K dropped": (lambda a, b: right(a[:, : (k := a.shape[1]) // 2], b[: k // 2]),
                          lambda m, n, k, d: k >= 2, always),
    # 6 u |C_i| is 2.3 % of a row's norm in bf16: a few rows may all stay below it, many do not
    "scaled by 1.02": (lambda a, b: (right(a, b).double() * 1.02).to(a.dtype), always,
                       lambda m, n, k, d: k >= 64 and (d == "fp16" or m >= 64)),
    "one element unwritten": (unwritten, always, always),
    "two rows swapped": (swapped_rows, lambda m, n, k, d: m >= 2, always),
    "one row is its neighbour": (neighbour_rows, lambda m, n, k, d: m >= 2, always),
    "columns of the neighbour": (neighbour_chunk, lambda m, n, k, d: n >= 2, always),
    "accumulated in the low precision": (accumulated_low, lambda m, n, k, d: k >= 128,
                                         lambda m, n, k, d: k >= 512 and m >= 64),
}  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [*SHAPES, (3, 5, 1), (64, 64, 1), (1, 1, 1), (1, 7, 3)])
@pytest.mark.parametrize("full", [True, False])
def test_a_right_product_passes(dtype, shape, full):
    for seed in range(5):
        torch.manual_seed(seed)
        a, b = operands(*shape, dtype, seed)
        found = gemm_error(torch, a, b, right(a, b), dtype, full)
        assert found["ok"], found
        assert found["freivalds_ratio"] <= 1
        if full:
            assert found["rel_frobenius"] <= found["rel_frobenius_limit"] and found["elementwise_ratio"] <= 1
            assert found["rows_checked"] == min(shape[0], 256)


WRONG = [(name, s, d) for name, (_, differs, _) in MUTANTS.items() for s in SHAPES for d in DTYPES if differs(*s, d)]


@pytest.mark.parametrize(("mutant", "shape", "dtype"), WRONG)
def test_a_wrong_product_fails(mutant, shape, dtype):
    wrong, _, visible = MUTANTS[mutant]
    for seed in range(2):
        torch.manual_seed(seed)
        a, b = operands(*shape, dtype, seed)
        c = wrong(a, b)
        assert not gemm_error(torch, a, b, c, dtype, True)["ok"]
        if visible(*shape, dtype):
            assert not gemm_error(torch, a, b, c, dtype, False)["ok"]


def test_every_mutant_is_seen_somewhere_by_both_checks():
    for name, (_, _, visible) in MUTANTS.items():
        assert any(visible(*shape, dtype) for mutant, shape, dtype in WRONG if mutant == name), name


def test_pieces_of_the_check_cover_the_whole_output(monkeypatch):
    monkeypatch.setattr(checks, "CHUNK", 700)  # several pieces in each direction, and ragged ones
    a, b = operands(61, 53, 47, "bf16")
    c = right(a, b)
    assert gemm_error(torch, a, b, c, "bf16", True)["ok"]
    for i, j in itertools.product((0, 30, 60), (0, 14, 52)):
        bad = c.clone()
        bad[i, j] = math.nan
        for full in (True, False):
            assert not gemm_error(torch, a, b, bad, "bf16", full)["ok"]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_figures_of_a_result_that_is_not_finite_are_null(bad):
    a, b = operands(8, 8, 8, "bf16")
    c = right(a, b)
    c[3, 4] = bad
    found = gemm_error(torch, a, b, c, "bf16", True)
    assert not found["ok"] and found["freivalds_ratio"] is None and "freivalds_ratio" in found["not_finite"]
    assert all(math.isfinite(v) for v in found.values() if isinstance(v, float))


# ---- batches, biases, GELU, and partial sums that are rounded ----


def batches(count, m, n, k, dtype):
    pairs = [operands(m, n, k, dtype, seed) for seed in range(count)]
    return torch.stack([a for a, _ in pairs]), torch.stack([b for _, b in pairs])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 3, 300])
@pytest.mark.parametrize("full", [True, False])
def test_a_batch_is_right_only_if_each_of_its_products_is(dtype, count, full):
    torch.manual_seed(0)
    a, b = batches(count, 40, 24, 32, dtype)
    c = right(a, b)
    found = batched_error(torch, a, b, c, dtype, full)
    assert found["ok"] and found["freivalds_ratio"] <= 1
    if full:
        assert found["rows_checked"] == count * min(40, max(1, 256 // count))
    for name in ("zeros", "half of K dropped", "one element unwritten", "one row is its neighbour"):
        bad = c.clone()
        bad[-1] = MUTANTS[name][0](a[-1], b[-1])
        assert not batched_error(torch, a, b, bad, dtype, full)["ok"], name
    swapped = c[torch.arange(count - 1, -1, -1)]
    assert batched_error(torch, a, b, swapped, dtype, full)["ok"] == (count == 1)


def test_figures_of_a_batch_with_a_poisoned_product_are_null():
    a, b = batches(3, 8, 8, 8, "bf16")
    c = right(a, b)
    c[1] = math.nan
    found = batched_error(torch, a, b, c, "bf16", True)
    assert not found["ok"] and found["freivalds_ratio"] is None and "elementwise_ratio" in found["not_finite"]
    assert all(math.isfinite(v) for v in found.values() if isinstance(v, float))


def bias_of(n, dtype, seed=7):
    return torch.randn(n, generator=torch.Generator().manual_seed(seed)).to(DTYPES[dtype])


def with_bias(a, b, bias):
    return (a.double() @ b.double() + bias.double()).to(a.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(64, 96, 512), (257, 129, 65), (3, 640, 512)])
def test_a_bias_is_checked(dtype, shape):
    for seed in range(3):
        torch.manual_seed(seed)
        a, b = operands(*shape, dtype, seed)
        bias = bias_of(shape[1], dtype, seed)
        for full in (True, False):
            assert gemm_error(torch, a, b, with_bias(a, b, bias), dtype, full, bias)["ok"]
        for wrong in (right(a, b), with_bias(a, b, 2 * bias), with_bias(a, b, bias.roll(1)), with_bias(a, b, -bias)):
            assert not gemm_error(torch, a, b, wrong, dtype, True, bias)["ok"]


def gelu(x):
    return torch.nn.functional.gelu(x, approximate="tanh")


# h is what GELU takes, rounded or not
GELU_RIGHT = {
    "one rounding": lambda x, h: gelu(x),
    "what GELU takes is rounded as well": lambda x, h: gelu(h),
    "the exact GELU": lambda x, h: torch.nn.functional.gelu(x),
}
GELU_WRONG = {
    "ReLU": lambda x, h: torch.relu(x),
    "no GELU": lambda x, h: x,
    "GELU twice": lambda x, h: gelu(gelu(x)),
    "one element unwritten": lambda x, h: gelu(x).index_fill(1, torch.tensor([x.shape[1] - 1]), math.nan),
    "sigmoid instead of the factor": lambda x, h: x * torch.sigmoid(x),
    "one row is its neighbour": lambda x, h: torch.cat([gelu(x[1:2]), gelu(x[1:])]),
    "GELU without the bias": lambda x, h: gelu(x - 1.5),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(64, 96, 512), (300, 129, 65), (5, 640, 128)])
@pytest.mark.parametrize("full", [True, False])
def test_bias_and_gelu_are_checked(dtype, shape, full):
    torch.manual_seed(0)
    a, b = operands(*shape, dtype)
    bias = bias_of(shape[1], dtype)
    x = a.double() @ b.double() + bias.double()
    h = x.to(a.dtype)
    for name, make in GELU_RIGHT.items():
        found = gelu_error(torch, a, b, bias, h, make(x, h.double()).to(a.dtype), dtype, full)
        assert found["ok"], (name, found)
        assert found["check"] == ("full" if full else "freivalds") and found["elementwise_ratio"] <= 1
    for name, make in GELU_WRONG.items():
        found = gelu_error(torch, a, b, bias, h, make(x, h.double()).to(a.dtype), dtype, full)
        assert not found["ok"], name
        assert all(math.isfinite(v) for v in found.values() if isinstance(v, float))
    for wrong in (right(a, b), right(a[:, : shape[2] // 2], b[: shape[2] // 2])):  # what GELU takes is wrong itself
        found = gelu_error(torch, a, b, bias, wrong, gelu(wrong.double()).to(a.dtype), dtype, True)
        assert not found["ok"]


def split_sums(a, b, parts):
    """A sum over K in parts, each rounded to the dtype, and so is what they add up to, step by step."""
    out = torch.zeros(a.shape[0], b.shape[1], dtype=a.dtype)
    for i in range(parts):
        k = slice(i * a.shape[1] // parts, (i + 1) * a.shape[1] // parts)
        out = (out.double() + right(a[:, k], b[k]).double()).to(a.dtype)
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("parts", [4, 16, 64])
def test_rounded_partial_sums_pass_only_where_they_are_allowed(dtype, parts):
    torch.manual_seed(0)
    a, b = operands(300, 200, 2048, dtype)
    c = split_sums(a, b, parts)
    assert not gemm_error(torch, a, b, c, dtype, True)["ok"]
    for full in (True, False):
        assert gemm_error(torch, a, b, c, dtype, full, split=True)["ok"]
    assert gemm_error(torch, a, b, right(a, b), dtype, True, split=True)["ok"]
    for name in ("zeros", "half of K dropped", "one element unwritten", "two rows swapped", "columns of the neighbour"):
        assert not gemm_error(torch, a, b, MUTANTS[name][0](a, b), dtype, True, split=True)["ok"], name
    dropped = right(a[:, : 2048 * 63 // 64], b[: 2048 * 63 // 64])
    assert not gemm_error(torch, a, b, dropped, dtype, True, split=True)["ok"]


# ---- cases ----


def test_a_case_declares_its_work():
    c = gemm("x", 3, 5, 7)
    assert (c.flop, c.bytes_moved, c.role) == (210, 2 * (21 + 35 + 15), "case")
    assert gemm("x", 2**17, 2**17, 2**17).flop == 2**52
    assert largest_operand(gemm("x", 3, 50, 7)) == 350
    batch = gemm("x", 3, 5, 7, batch=4, op="bmm")
    assert (batch.flop, batch.bytes_moved, largest_operand(batch)) == (840, 4 * c.bytes_moved, 4 * 35)
    moved = {op: gemm("x", 3, 5, 7, op=op).bytes_moved - c.bytes_moved for op in ("addmm", "fused", "unfused")}
    assert moved == {"addmm": 10, "fused": 10, "unfused": 10 + 2 * 2 * 15}  # a bias; GELU's input written and read
    assert {gemm("x", 3, 5, 7, op=op).flop for op in moved} == {210}
    assert largest_operand(gemm("x", 30, 50, 7, op="fused")) == 2 * 1500  # its check keeps what GELU takes


@pytest.mark.parametrize(("kind", "spec"), [("gpu", ESCHER), ("cpu", SMALL)])
def test_squares_and_every_gemm_of_the_workload(kind, spec):
    shapes = {tuple(c.params[x] for x in "mnk") for c in coarse(kind, "bf16", spec)}
    assert {(n, n, n) for n in compute.SQUARES[kind]} <= shapes
    assert {(g.m, g.n, g.k) for g in workload.gemms(spec)} <= shapes
    assert any(s not in {(n, n, n) for n in compute.SQUARES[kind]} and math.log2(s[0]) % 1 for s in shapes)
    assert all(c.role == "search" and c.params["round"] == 0 for c in coarse(kind, "bf16", spec))
    searched = [tuple(c.params[x] for x in "mnk") for c in coarse(kind, "bf16", spec)]
    assert len(set(searched)) == len(searched)  # a shape is searched once, however many names it has
    rows = compute.cases(kind, "bf16", spec)
    side = {c.name for c in compute.side_cases(kind, "bf16", spec)}
    named = [(c.name, *(c.params[x] for x in "mnk")) for c in rows if c.name not in side and "square" not in c.name]
    assert named == [(g.name, g.m, g.n, g.k) for g in workload.gemms(spec)]  # each name has a row of its own
    assert all(c.params["dtype"] == "bf16" for c in rows) and len({c.name for c in rows}) == len(rows)


@pytest.mark.parametrize(("kind", "spec"), [("gpu", ESCHER), ("cpu", SMALL)])
def test_what_stands_beside_the_squares(kind, spec):
    side = {c.name: c for c in compute.side_cases(kind, "fp16", spec)}
    skewed = [c for name, c in side.items() if name.startswith("skew.")]
    n = compute.SKEW[kind]
    assert {c.flop for c in skewed} == {2 * n**3} and {c.params["k"] for c in skewed} == {n}
    ratios = [c.params["m"] / n for c in skewed]
    assert ratios == sorted(ratios) and (ratios[0], ratios[-1]) == (1 / 16, 16) and 1 in ratios
    assert [n / c.params["n"] for c in skewed] == ratios
    tokens = compute.BATCHED_TOKENS[kind]
    qk, av = (side[f"batched.{x}"] for x in ("qk", "av"))
    assert qk.flop == av.flop == 2 * spec.heads * tokens**2 * spec.head_size and qk.params["batch"] == spec.heads
    square = side["batched.square"].params
    assert square["m"] == square["n"] == square["k"] and square["batch"] > 1
    of = {g.name: g for g in workload.gemms(spec)}
    for name in ("self_attn.q", "ffn.linear1"):
        assert [side[f"addmm.{name}"].params[x] for x in "mnk"] == [getattr(of[name], x) for x in "mnk"]
    assert ("long_k" in side) == (kind == "gpu")
    assert all(c.params["dtype"] == "fp16" and c.role == "case" for c in side.values())
    pair = compute.epilogue_cases("fp16", spec)
    assert [c.name for c in pair] == ["epilogue.unfused", "epilogue.fused"] and {c.role for c in pair} == {"pair"}
    assert {c.flop for c in pair} == {of["ffn.linear1"].flop}
    limit = max(largest_operand(gemm("x", s, s, s)) for s in compute.SQUARES["gpu"])
    assert kind == "cpu" or all(largest_operand(c) <= limit for c in [*side.values(), *pair])  # no more memory


def test_reduced_precision_is_a_labelled_row_of_a_gpu():
    roof = (64, 128, 256, "TN")
    rows = compute.reduced_cases("gpu", "bf16", roof)
    assert [c.name for c in rows] == ["reduced.roof", "reduced.long_k"]
    assert all(c.params["reduced_precision"] and not c.skipped for c in rows)
    assert tuple(rows[0].params[x] for x in ("m", "n", "k", "layout")) == roof
    off = next(c for c in compute.side_cases("gpu", "bf16", ESCHER) if c.name == "long_k")
    assert [rows[1].params[x] for x in ("m", "n", "k", "layout")] == [off.params[x] for x in ("m", "n", "k", "layout")]
    assert all("torch has none for a CPU" in c.skipped for c in compute.reduced_cases("cpu", "bf16", roof))
    everywhere = [
        *compute.cases("gpu", "bf16", ESCHER),
        *compute.epilogue_cases("bf16", ESCHER),
        *coarse("gpu", "bf16", ESCHER),
    ]
    assert not any("reduced_precision" in c.params for c in everywhere)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_switch_is_on_during_that_call_alone(dtype):
    switches = SimpleNamespace(
        allow_bf16_reduced_precision_reduction=False, allow_fp16_reduced_precision_reduction=False
    )
    fake = SimpleNamespace(backends=SimpleNamespace(cuda=SimpleNamespace(matmul=switches)))
    seen = []
    call = compute.reduced_precision(fake, dtype, lambda turn: seen.append((turn, dict(vars(switches)))))
    call(3)
    name = f"allow_{dtype}_reduced_precision_reduction"
    assert seen == [(3, {**dict.fromkeys(vars(switches), False), name: True})] and not any(vars(switches).values())
    with pytest.raises(ZeroDivisionError):
        compute.reduced_precision(fake, dtype, lambda turn: turn / 0)(1)
    assert not any(vars(switches).values())


def test_only_a_labelled_row_touches_the_switch(monkeypatch):
    used = []
    monkeypatch.setattr(compute, "reduced_precision", lambda torch, dtype, call: used.append(dtype) or call)
    pools = Pools(torch, "cpu", "bf16", 32 * 32)
    for more in ({}, {"op": "addmm"}, {"op": "unfused"}, {"batch": 2, "op": "bmm"}):
        pools.prepare(gemm("x", 16, 16, 16, **more), "library")
    assert used == []
    pools.prepare(gemm("x", 16, 16, 16, reduced_precision=True), "library")
    assert used == ["bf16"]


def test_a_fused_call_is_there_or_a_reason():
    def fake(**has):
        mkldnn = SimpleNamespace(**({"_linear_pointwise": 1} if has.get("linear") else {}))
        return SimpleNamespace(
            backends=SimpleNamespace(mkldnn=SimpleNamespace(is_available=lambda: has.get("built", True))),
            ops=SimpleNamespace(mkldnn=mkldnn), **({"_addmm_activation": 1} if has.get("gpu") else {}),
        )  # fmt: skip

    assert compute.no_fused_call(fake(gpu=True), "gpu") is None and "GELU epilogue" in compute.no_fused_call(
        fake(), "gpu"
    )
    assert compute.no_fused_call(fake(linear=True), "cpu") is None
    for without in (fake(), fake(linear=True, built=False), fake(gpu=True)):  # torch's own is two steps on a CPU
        assert "for a CPU" in compute.no_fused_call(without, "cpu")


# ---- operands ----


@pytest.mark.parametrize("dtype", DTYPES)
def test_operands_are_never_constant(dtype):
    torch.manual_seed(0)
    pools = Pools(torch, "cpu", dtype, 256 * 256)
    for x in (pools.a, pools.b):
        assert abs(float(x.float().std()) - 1) < 0.05 and len(x.unique()) > 100
    assert not torch.equal(pools.a, pools.b)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["NN", "NT", "TN"])
@pytest.mark.parametrize("shape", [(64, 96, 128), (3, 100, 256), (65, 33, 17), (3, 5, 1)])
def test_every_layout_is_the_same_product(dtype, layout, shape):
    torch.manual_seed(1)
    m, n, k = shape
    pools = Pools(torch, "cpu", dtype, 128 * 256)
    item = pools.prepare(gemm("x", m, n, k, layout, dtype), "torch.mm")
    item.poison()
    for full in (True, False):
        assert not item.check(0, full)["ok"]  # nothing written
    item.call(0)
    for full in (True, False):
        assert item.check(0, full)["ok"]
    # the layout is real: what is stored transposed is read with the long stride down a column
    a = pools.a[: m * k].view(m, k) if layout[0] == "N" else pools.a[: m * k].view(k, m).t()
    b = pools.b[: k * n].view(k, n) if layout[1] == "N" else pools.b[: k * n].view(n, k).t()
    assert gemm_error(torch, a, b, pools.c[: m * n].view(m, n), dtype, True)["ok"]
    pools.c[: m * n].zero_()
    assert not item.check(0, False)["ok"]


OPS_OF_POOLS = {
    "bmm": {"batch": 3, "op": "bmm"}, "addmm": {"op": "addmm"}, "unfused": {"op": "unfused"}, "fused": {"op": "fused"},
    "mm with reduced sums": {"reduced_precision": True},
}  # fmt: skip


@pytest.mark.parametrize("layout", ["NN", "NT", "TN"])
@pytest.mark.parametrize("op", OPS_OF_POOLS)
def test_every_op_is_poisoned_called_and_checked(op, layout):
    if op == "fused" and compute.no_fused_call(torch, "cpu"):
        pytest.skip(compute.no_fused_call(torch, "cpu"))
    torch.manual_seed(3)
    pools = Pools(torch, "cpu", "bf16", 64 * 1024)
    kept = pools.a.clone(), pools.b.clone()
    item = pools.prepare(gemm("x", 48, 80, 64, layout, "bf16", **OPS_OF_POOLS[op]), "a library")
    assert OPS_OF_POOLS[op].get("op", "mm") in item.backend or op in ("fused", "unfused")
    for _ in range(2):
        item.poison()
        for full in (True, False):
            assert not item.check(0, full)["ok"]
        item.call(0)
        for full in (True, False):
            assert item.check(0, full)["ok"]
    assert torch.equal(kept[0], pools.a) and torch.equal(kept[1], pools.b)


@pytest.mark.parametrize("layout", ["NN", "NT"])
def test_a_batch_is_what_its_layout_says(layout):
    pools = Pools(torch, "cpu", "bf16", 3 * 32 * 40)
    item = pools.prepare(gemm("x", 16, 40, 32, layout, batch=3, op="bmm"), "")
    item.call(0)
    a, b = pools.a[: 3 * 16 * 32].view(3, 16, 32), pools.b[: 3 * 32 * 40]
    b = b.view(3, 32, 40) if layout == "NN" else b.view(3, 40, 32).transpose(1, 2)
    assert batched_error(torch, a, b, pools.c[: 3 * 16 * 40].view(3, 16, 40), "bf16", True)["ok"]


def test_a_case_larger_than_the_pool_says_so_and_is_not_called():
    pools = Pools(torch, "cpu", "bf16", 1000)
    item = pools.prepare(gemm("x", 64, 64, 64), "torch.mm")
    assert item.case.skipped == "an operand has 4096 elements, memory is planned for 1000" and item.call is None
    known = pools.prepare(replace(gemm("x", 2, 2, 2), skipped="no memory"), "torch.mm")
    assert known.case.skipped == "no memory"


# ---- the search ----


class Searching:
    """A session whose shapes run at rates a function gives, on a clock that only they move."""

    def __init__(self, landscape, budget=BUDGETS["standard"], overhead_s=0.01, broken=()):
        self.landscape, self.budget, self.overhead_s, self.broken = landscape, budget, overhead_s, broken
        self.now, self.seen, self.said = 0.0, [], []

    def clock(self):
        return self.now

    def progress(self, what, always=True):
        self.said.append(what)

    def quick_rate(self, item):
        key = tuple(item.case.params[x] for x in ("m", "n", "k", "layout"))
        seconds = item.case.flop / self.landscape(*key)
        self.seen.append(key)
        self.now += self.overhead_s + 4 * seconds
        if key in self.broken:
            return None
        return Record("compute", item.case.name, "search", item.case.params, samples_s=(seconds,), flop=item.case.flop)


def run_search(session, kind="gpu"):
    first = coarse(kind, "bf16", ESCHER if kind == "gpu" else SMALL)
    limit = max(map(largest_operand, first))
    pools = SimpleNamespace(elements=limit, prepare=lambda case, _: Prepared(case))
    found, session.ended = search(session, pools, first, "torch.mm")
    return found, first, limit


def landscape(kind, seed):
    """One summit at a shape and a layout that no list holds; each octave away costs more."""
    rng = random.Random(seed)
    low, high = (2048, 16384) if kind == "gpu" else (256, 3072)
    summit = [math.exp(rng.uniform(math.log(low), math.log(high))) for _ in range(3)]
    layout, top = rng.choice(["NN", "NT", "TN"]), 1e15 if kind == "gpu" else 1e12

    def of(m, n, k, at):
        octaves = sum(math.log2(x / s) ** 2 for x, s in zip((m, n, k), summit, strict=True))
        return top / (1 + 0.03 * octaves) * (1 if at == layout else 0.95)

    return of, of(*summit, layout)


@pytest.mark.parametrize("kind", ["gpu", "cpu"])
@pytest.mark.parametrize("seed", range(8))
def test_the_search_comes_within_a_percent_of_the_best_there_is(kind, seed):
    of, top = landscape(kind, seed)
    found, first, limit = run_search(Searching(of), kind)
    best = max(map(rate, found))
    by_hand = max(of(*(c.params[x] for x in ("m", "n", "k", "layout"))) for c in first)
    assert best >= 0.99 * top, best / top
    assert best > by_hand  # refining, not the list, found it
    assert len(found) <= 220


def test_nothing_is_measured_twice_and_limits_hold():
    session = Searching(landscape("gpu", 1)[0])
    found, first, limit = run_search(session)
    assert len(set(session.seen)) == len(session.seen)
    assert all(max(m * k, k * n, m * n) <= limit for m, n, k, _ in session.seen)
    slowest = max(2 * m * n * k / session.landscape(m, n, k, at) for m, n, k, at in session.seen[5:])
    assert slowest <= session.budget.search_s / 40 * 1.1


def test_a_flat_landscape_ends_the_search_after_one_round():
    session = Searching(lambda *_: 1e15)
    found, first, _ = run_search(session)
    assert {r.params["round"] for r in found} == {0, 1}
    assert session.ended == "ended in round 1, which gained less than 0.5 %"


@pytest.mark.parametrize("overhead_s", [1.0, 7.0, 100.0])
def test_the_search_stops_when_its_time_is_up(overhead_s):
    session = Searching(landscape("gpu", 2)[0], overhead_s=overhead_s)
    found, _, _ = run_search(session)
    assert session.now <= session.budget.search_s + 2 * overhead_s
    assert len(found) == len(session.seen) >= 1 and "after 20 s, its share of the budget" in session.ended


def test_a_shape_that_is_wrong_or_too_slow_is_no_candidate():
    of, _ = landscape("gpu", 3)
    clean, _, _ = run_search(Searching(of))
    winner = max(clean, key=rate)
    key = tuple(winner.params[x] for x in ("m", "n", "k", "layout"))
    found, _, _ = run_search(Searching(of, broken={key}))
    assert found and winner.case not in {r.case for r in found}
    nothing, _, _ = run_search(Searching(of, broken={tuple(c.params[x] for x in ("m", "n", "k", "layout"))
                                                     for c in coarse("gpu", "bf16", ESCHER)}))  # fmt: skip
    assert nothing == []


dimension = st.integers(1, 40000)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(dimension, dimension, dimension, st.sampled_from(["NN", "NT", "TN"])), min_size=1, max_size=6),
    st.integers(10**4, 10**9),
    st.floats(1e9, 1e15),
)
def test_refine_proposes_new_shapes_within_limits(keys, limit_elements, limit_flop):
    done = [
        Record("compute", "x", "search", {"m": m, "n": n, "k": k, "layout": at, "dtype": "bf16", "round": i},
               samples_s=(1.0, 2.0), flop=2 * m * n * k)
        for i, (m, n, k, at) in enumerate(keys)
    ]  # fmt: skip
    proposed = refine(done, limit_elements, limit_flop)
    new = [tuple(c.params[x] for x in ("m", "n", "k", "layout")) for c in proposed]
    assert len(set(new)) == len(new) and not set(new) & set(keys)
    for c, (m, n, k, _) in zip(proposed, new, strict=True):
        assert min(m, n, k) >= 1 and c.flop == 2 * m * n * k <= limit_flop and largest_operand(c) <= limit_elements
        assert c.params["round"] == len(keys) and c.role == "search"
    assert all(any(d == x for key in keys for x in key[:3]) or d % 64 == 0 or d < 64 for n in new for d in n[:3])


def test_refine_of_nothing():
    assert refine([], 10**9, 1e15) == []
    skipped = Record("compute", "x", "search", {}, skipped="too slow")
    assert refine([skipped], 10**9, 1e15) == []


def test_a_rate_is_that_of_the_best_sample_and_never_negative_or_infinite():
    case = search_case(64, 64, 64, "NN", "bf16", 0)
    make = lambda *s: Record("compute", "x", samples_s=s, calls_per_sample=10, flop=case.flop)  # noqa: E731
    assert rate(make(2.0, 1.0, 3.0)) == case.flop * 10
    assert rate(make(-1.78e-3, 0.0, 1.0)) == case.flop * 10
    assert rate(make(0.0, -1.0)) == 0


# ---- the family ----


class Measuring(RecordingSession, Searching):
    """A session whose search runs on made-up rates, and that keeps what it was asked to do."""

    def __init__(self, landscape):
        Searching.__init__(self, landscape)
        RecordingSession.__init__(self, "standard")

    def quick_rate(self, item):
        self.steps.append("search")
        return Searching.quick_rate(self, item)


@pytest.fixture
def measured(monkeypatch):
    """Run `measure` on tiny shapes of a fake session; `wrong` names the search winner's shapes that fail the check."""
    monkeypatch.setitem(compute.SQUARES, "cpu", (16, 32))
    monkeypatch.setitem(compute.OTHER_SHAPES, "cpu", ((48, 16, 32),))
    monkeypatch.setitem(compute.SKEW, "cpu", 32)
    monkeypatch.setitem(compute.BATCHED_TOKENS, "cpu", 16)
    monkeypatch.setitem(compute.BATCHED_SQUARES, "cpu", (2, 16))
    spec = replace(SMALL, hidden=32, heads=1, head_size=32, ffn=64, query_tokens=8, text_tokens=4, time_frequency=16)

    def no_compiler():
        raise native.NativeUnavailable("no C compiler")

    monkeypatch.setattr(native, "load", no_compiler)

    def run(wrong=(), fused=True):
        if not fused:
            monkeypatch.setattr(compute, "no_fused_call", lambda *_: "no fused call")
        real = gemm_error

        def judged(t, a, b, c, dtype, full, *more):
            out = real(t, a, b, c, dtype, full, *more)
            return out | {"ok": False} if full and (a.shape[0], b.shape[1], a.shape[1]) in wrong else out

        monkeypatch.setattr(compute, "gemm_error", judged)
        speed = {(48, 16, 32): 3.0, (32, 32, 32): 2.0}
        session = Measuring(lambda m, n, k, at: 1e9 * speed.get((m, n, k), 1) * (1 if at == "NN" else 0.5))
        monkeypatch.setattr(compute, "REFINE_ROUNDS", 0)
        machine = Machine(torch, "cpu", "cpu", "bf16", 2**31, 2**20, (0,))
        compute.measure(session, machine, spec)
        return session

    return run


def test_the_roof_is_a_fresh_measurement_of_the_winner(measured):
    session = measured()
    steps = [step for step in session.steps if step != "search"]
    assert steps == ["warm-up", "anchor", "anchor", "blocks", "anchor", "pairs", "anchor"]
    (roof,) = [i for i in session.blocks if i.case.name == "roof"]
    assert [roof.case.params[x] for x in ("m", "n", "k", "layout")] == [48, 16, 32, "NN"]
    assert roof.share == compute.ROOF_SHARE and roof.case.role == "case"
    assert {i.case.name for i in session.blocks} >= {"square.16", "square.32", "ffn.linear1", "time_proj"}
    assert session.skipped == [("peak", "no C compiler")]
    finalists = [f["error"] for c, f in session.written if c.role == "search"]
    assert len(finalists) == 3 and all(e["ok"] and e["check"] == "full" for e in finalists)


def test_rows_beside_take_less_time_and_the_epilogue_is_a_pair(measured):
    session = measured()
    spent = {i.case.name: i.share for i in session.blocks}
    assert {spent["square.16"], spent["self_attn.q"], spent["self_attn.v"]} == {1.0}
    assert {spent["batched.qk"], spent["skew.32x32"], spent["addmm.ffn.linear1"]} == {compute.SIDE_SHARE}
    reduced = {i.case.name: i.case.skipped for i in session.blocks if i.case.name.startswith("reduced.")}
    assert len(reduced) == 2 and all("none for a CPU" in why for why in reduced.values())
    assert [i.case.name for i in session.paired] == ["epilogue.unfused", "epilogue.fused"]
    without = measured(fused=False)
    assert without.paired == [] and without.skipped[-1] == ("epilogue.fused", "no fused call")
    assert without.steps[-2:] == ["blocks", "anchor"]


def test_a_winner_that_computes_wrongly_is_not_the_roof(measured):
    session = measured(wrong={(48, 16, 32)})
    (roof,) = [i for i in session.blocks if i.case.name == "roof"]
    assert [roof.case.params[x] for x in "mnk"] == [32, 32, 32]
    assert [f["error"]["ok"] for c, f in session.written if c.name == "search.48x16x32.NN"] == [False]


class FakeProbe:
    """Stands in for `native.Native`: `peak.slow` takes twice as long as `peak.fast`; `miscounts` cannot be trusted."""

    command = ["cc"]

    def __init__(self, blocked=None):
        self.blocked_by = blocked or {}

    def kernels(self):
        return [native.Kernel(n, "bfloat16", 32, i) for i, n in enumerate(["slow", "fast", "miscounts"])]

    def blocked(self):
        return self.blocked_by

    def check_sum(self, kernel, turns, ones):
        assert ones
        return turns * kernel.flop_per_turn / 2 * (0.5 if kernel.name == "miscounts" else 1)

    def chains(self):
        return [native.Chain("add", 1, 0)]

    def peak(self, kernel, cores, slices):
        assert kernel.name != "miscounts"
        wall = [1.0 if kernel.name == "fast" else 2.0] * slices
        own = [[0.9] * slices, [0.8] * slices]
        return SimpleNamespace(wall_s=wall, thread_s=own, flop_per_slice=100, threads=2, pinned=[True])

    def interleaved(self, loops, cores, slices):
        return [SimpleNamespace(wall_s=[1.0] * slices, cycles_per_slice=7, pinned=[True]) for _ in loops]


def probe_session():
    skipped = {}
    return SimpleNamespace(
        budget=BUDGETS["quick"], skip=lambda case, why: skipped.update({case.name: why}), skipped=skipped,
        earlier=lambda case: [],
    )


def test_the_probe_has_a_row_for_each_thread_of_the_fastest_kernel():
    items = {i.case.name: i for i in compute.probes(probe_session(), FakeProbe(), [0, 1])}
    assert list(items) == ["peak.slow", "peak.fast", "peak.fast.thread0", "peak.fast.thread1", "clock.add"]
    samples, case = items["peak.fast"].sampler()
    assert set(samples) == {1.0} and case.flop == 100 and case.params["threads"] == 2
    samples, case = items["peak.fast.thread1"].sampler()
    assert set(samples) == {0.8} and case.flop == 50
    assert items["clock.add"].sampler()[1].params["cycles"] == 7
    assert all(i.case.role == "probe" for i in items.values())


def test_an_instruction_that_cannot_be_probed_or_trusted_is_a_row_with_the_reason():
    session = probe_session()
    items = compute.probes(session, FakeProbe({"amx_bf16": "the compiler is too old for it"}), [0])
    assert session.skipped["peak.amx_bf16"] == "the compiler is too old for it"
    assert "does not count right" in session.skipped["peak.miscounts"]
    assert "peak.miscounts" not in {i.case.name for i in items}
