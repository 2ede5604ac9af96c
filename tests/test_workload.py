"""The geometry: FLOP and bytes by hand, the pilot's calibration, what a host makes of a spec, and wrong specs.

Expected figures stand here as literals or as arithmetic of their own; none is made with a formula of the module.
"""

import dataclasses
import json
import math
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from escher_kernels import run, workload
from escher_kernels.model import Model
from escher_kernels.run import Settings, spec_for
from escher_kernels.targets import Found
from escher_kernels.workload import (
    CPU_BLOCK_FLOP,
    MEMORY_FRAC,
    Gemm,
    WorkloadError,
    activation_bytes,
    block_flop,
    cache_bytes,
    fit,
    from_json,
    gemms,
    load,
    names,
    needed_bytes,
    of_reference_model,
    ops,
    overridden,
    parameters,
    pass_flop,
    pilot_totals,
    reference_models,
    weight_bytes,
)

ESCHER = load("escher_14b_480p")
GOOD = json.loads((workload.CONFIGS / "escher_14b_480p.json").read_text(encoding="utf-8"))
GIB = 2**30
WHOLE = ["escher_14b_480p", "escher_surrogate_4096", "wan2_2_i2v_a14b", "wan2_2_t2v_a14b", "wan2_2_ti2v_5b"]
ALL = sorted(["big", "smoke", *WHOLE])


def changed(**values):
    return {k: v for k, v in {**GOOD, **values}.items() if v is not ...}


def spec(**values):
    return from_json(changed(**values), "x")


# ---- GEMMs, by hand ----

# name -> M, N, K and FLOP, by hand from the table of the method
BLOCK = {
    "self_attn.q": (4680, 5120, 5120, 245_366_784_000),
    "self_attn.k": (4680, 5120, 5120, 245_366_784_000),
    "self_attn.v": (4680, 5120, 5120, 245_366_784_000),
    "self_attn.o": (4680, 5120, 5120, 245_366_784_000),
    "cross_attn.q": (4680, 5120, 5120, 245_366_784_000),
    "cross_attn.o": (4680, 5120, 5120, 245_366_784_000),
    "ffn.linear1": (4680, 13824, 5120, 662_490_316_800),
    "ffn.linear2": (4680, 5120, 13824, 662_490_316_800),
}
PER_PASS = {
    "cross_attn.k": (512, 5120, 5120, 26_843_545_600),
    "cross_attn.v": (512, 5120, 5120, 26_843_545_600),
    "time_embed.linear1": (3, 5120, 256, 7_864_320),
    "time_embed.linear2": (3, 5120, 5120, 157_286_400),
    "time_proj": (3, 30720, 5120, 943_718_400),
}
ONCE_A_PROMPT = {"cross_attn.k", "cross_attn.v"}


def test_every_gemm_by_hand():
    found = {g.name: (g.m, g.n, g.k, g.flop) for g in gemms(ESCHER)}
    assert found == BLOCK | PER_PASS
    assert {g.name for g in gemms(ESCHER) if g.per_pass} == set(PER_PASS)
    assert len(gemms(ESCHER)) == len(found)  # each name once


def test_bytes_read_each_operand_once_and_write_once():
    assert Gemm("x", 3, 5, 7).bytes_moved() == 2 * (3 * 7 + 7 * 5 + 3 * 5)
    assert Gemm("x", 3, 5, 7).bytes_moved(element_bytes=1) == 71
    assert Gemm("big", 2**17, 2**17, 2**17).flop == 2**52  # no 32-bit or float on the way


def test_batch_multiplies_the_rows_of_a_block():
    for one, both in zip(gemms(ESCHER), gemms(spec(batch=2)), strict=True):
        assert (both.n, both.k) == (one.n, one.k)
        assert one.name.startswith("time_") or both.m == 2 * one.m


def test_geometry_is_that_of_480x832():
    a_frame = (480 // 8 // 2) * (832 // 8 // 2)
    assert a_frame == 1560
    assert (ESCHER.query_tokens, ESCHER.window_tokens) == (3 * a_frame, 12 * a_frame)
    assert ESCHER.chunks == 25 and ESCHER.cache and ESCHER.unit == "chunk" and ESCHER.batch == 1


# ---- operations, by hand ----

ACT = 47_923_200  # bytes of 4680 x 5120 in BF16
MOD = 30_720  # bytes of 3 x 5120 in BF16: one shift, scale or gate
SQUARE = 2 * (2 * 23_961_600 + 26_214_400)  # 148 275 200: (4680, 5120) in, 5120 x 5120 weights, (4680, 5120) out
WIDE = 2 * (23_961_600 + 70_778_880 + 64_696_320)  # 318 873 600: 4680 x 5120, 5120 x 13824, 4680 x 13824
NONE = None
Q = 245_366_784_000  # 2 x 4680 x 5120 x 5120
FFN = 662_490_316_800  # 2 x 4680 x 5120 x 13824

# name, category, FLOP, bytes as run, bytes in the pilot's table (None: no such row there)
TABLE = [
    # 2 x 3 x (256 x 5120 + 5120 x 5120); in 3 x 256, out 3 x 5120, weights 256 x 5120 + 5120 x 5120, 2 B each
    ("time_embed", "time", 165_150_720, 32_256 + 55_050_240, 32_256),
    ("time_proj", "time", 943_718_400, 2 * (15_360 + 157_286_400 + 92_160), 314_787_840),
    ("norm.self", "norm", 0, 2 * ACT, 95_846_400),
    ("modulate.self", "norm", 0, 2 * ACT + 2 * MOD, NONE),
    ("self_attn.q", "self_attn", Q, SQUARE, 148_275_200),
    ("self_attn.k", "self_attn", Q, SQUARE, 148_275_200),
    ("self_attn.v", "self_attn", Q, SQUARE, 148_275_200),
    ("qk_norm.self", "norm", 0, 4 * ACT + 2 * 10_240, NONE),  # q and k in and out, two weight vectors
    ("rope", "norm", 0, 4 * ACT + 4 * 4680 * 128, NONE),  # FP32 cosines and sines, 64 pairs a head
    ("kv_cache_write", "cache", 0, 4 * ACT, 2 * ACT),  # two reads and two writes; the pilot counts the writes
    # 4 x 40 x 4680 x 18720 x 128; Q and O, K and V of 18720 x 5120
    ("self_attn.flash", "self_attn", 1_794_244_608_000, 2 * ACT + 2 * 191_692_800, 479_232_000),
    ("self_attn.o", "self_attn", Q, SQUARE, 148_275_200),
    ("residual_gate.self", "norm", 0, 3 * ACT + MOD, NONE),
    ("norm.cross", "norm", 0, 2 * ACT + 2 * 10_240, 95_846_400),  # the one norm with weight and bias
    ("cross_attn.q", "cross_attn", Q, SQUARE, 148_275_200),
    ("qk_norm.cross", "norm", 0, 2 * ACT + 10_240, NONE),
    # 4 x 40 x 4680 x 512 x 128; Q and O, K and V of 512 x 5120
    ("cross_attn.flash", "cross_attn", 49_073_356_800, 2 * ACT + 2 * 5_242_880, 106_332_160),
    ("cross_attn.o", "cross_attn", Q, SQUARE, 148_275_200),
    ("residual.cross", "norm", 0, 3 * ACT, NONE),
    ("norm.ffn", "norm", 0, 2 * ACT, 95_846_400),
    ("modulate.ffn", "norm", 0, 2 * ACT + 2 * MOD, NONE),
    ("ffn.linear1", "ffn", FFN, WIDE, 318_873_600),
    ("ffn.gelu", "ffn", 0, 258_785_280, 258_785_280),  # 4680 x 13824 in and out
    ("ffn.linear2", "ffn", FFN, WIDE, 318_873_600),
    ("residual_gate.ffn", "norm", 0, 3 * ACT + MOD, NONE),
]  # fmt: skip
NO_ROW_IN_THE_PILOT = {row[0] for row in TABLE if row[4] is None}


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row[0])
def test_an_operation_by_hand(row):
    name, category, flop, moved, pilot = row
    [op] = [op for op in ops(ESCHER) if op.name == name]
    assert (op.category, op.flop, op.bytes, op.bytes_pilot) == (category, flop, moved, pilot)
    assert op.flop_pilot == (None if pilot is None else 0 if name == "time_embed" else flop)
    assert op.per_pass == name.startswith("time_")


def test_the_table_is_whole_and_in_order():
    assert [op.name for op in ops(ESCHER)] == [row[0] for row in TABLE]
    without = {"modulate", "qk_norm", "rope", "residual_gate", "residual"}
    assert {n.split(".")[0] for n in NO_ROW_IN_THE_PILOT} == without
    assert all(op.flop == 0 for op in ops(ESCHER) if op.category in ("norm", "cache"))


SHAPES = {
    "time_embed": {"batch": 1, "tokens": 3, "frequency": 256, "hidden": 5120},
    "time_proj": {"m": 3, "n": 30720, "k": 5120},
    "norm.self": {"batch": 1, "tokens": 4680, "hidden": 5120},
    "modulate.ffn": {"batch": 1, "tokens": 4680, "hidden": 5120, "frames": 3},
    "qk_norm.self": {"batch": 1, "tokens": 4680, "hidden": 5120, "streams": 2},
    "qk_norm.cross": {"batch": 1, "tokens": 4680, "hidden": 5120, "streams": 1},
    "rope": {"batch": 1, "tokens": 4680, "hidden": 5120, "streams": 2, "head_size": 128},
    "kv_cache_write": {"batch": 1, "tokens": 4680, "hidden": 5120, "window": 18720},
    "self_attn.flash": {"batch": 1, "heads": 40, "sq": 4680, "skv": 18720, "head_size": 128},
    "cross_attn.flash": {"batch": 1, "heads": 40, "sq": 4680, "skv": 512, "head_size": 128},
    "residual_gate.self": {"batch": 1, "tokens": 4680, "hidden": 5120, "frames": 3},
    "residual.cross": {"batch": 1, "tokens": 4680, "hidden": 5120},
    "ffn.gelu": {"batch": 1, "tokens": 4680, "hidden": 13824},
}


def test_shapes_by_hand():
    found = {op.name: op.shape for op in ops(ESCHER)}
    assert {name: found[name] for name in SHAPES} == SHAPES
    linear = {op.name: tuple(op.shape.values()) for op in ops(ESCHER) if op.kind == "linear"}
    assert linear == {n: row[:3] for n, row in (BLOCK | PER_PASS).items() if n in linear}


def assert_gemm_rows_agree(any_spec):
    """The GEMM rows of `ops` are those of `gemms`, but K and V of the text, which run once a prompt; the time
    embedding's two linears are one row."""
    by_name = {g.name: g for g in gemms(any_spec)}
    linear = {op.name: op for op in ops(any_spec) if op.kind == "linear"}
    assert linear.keys() == by_name.keys() - ONCE_A_PROMPT - {"time_embed.linear1", "time_embed.linear2"}
    for name, op in linear.items():
        g = by_name[name]
        assert (op.shape["m"], op.shape["n"], op.shape["k"], op.per_pass) == (g.m, g.n, g.k, g.per_pass), name
        assert (op.flop, op.bytes) == (g.flop, g.bytes_moved()), name
    [embed] = [op for op in ops(any_spec) if op.name == "time_embed"]
    assert embed.flop == by_name["time_embed.linear1"].flop + by_name["time_embed.linear2"].flop


@pytest.mark.parametrize("name", ALL)
def test_gemms_and_operations_tell_the_same(name):
    assert_gemm_rows_agree(load(name))


def test_gemms_and_operations_tell_the_same_of_a_batch():
    assert_gemm_rows_agree(spec(batch=2))


@pytest.mark.parametrize("name", ALL)
def test_only_a_workload_with_a_cache_writes_one(name):
    any_spec = load(name)
    assert any_spec.cache != name.startswith("wan2_2")
    assert [op.name for op in ops(any_spec)] == [r[0] for r in TABLE if any_spec.cache or r[0] != "kv_cache_write"]


# ---- sums: a block, a pass, the pilot's table, weights, memory ----


def test_one_block_and_one_pass():
    block = 6 * 245_366_784_000 + 2 * 662_490_316_800 + 1_794_244_608_000 + 49_073_356_800
    assert block == 4_640_499_302_400 == block_flop(ESCHER)
    assert block / 1e9 == pytest.approx(4640.50, abs=0.005)
    once = 7_864_320 + 157_286_400 + 943_718_400
    assert once / 1e9 == pytest.approx(1.11, abs=0.005)
    assert pass_flop(ESCHER) == 40 * block + once == 185_621_080_965_120
    assert pass_flop(ESCHER) / 1e9 == pytest.approx(40 * 4640.50 + 1.11, abs=0.5)


@pytest.mark.parametrize("name", ALL)
def test_a_block_is_the_sum_of_its_rows(name):
    any_spec = load(name)
    rows = [op for op in ops(any_spec) if not op.per_pass]
    m, d, f = any_spec.query_tokens, any_spec.hidden, any_spec.ffn
    by_hand = 12 * m * d * d + 4 * m * d * f + 4 * m * d * (any_spec.window_tokens + any_spec.text_tokens)
    assert sum(op.flop for op in rows) == block_flop(any_spec) == by_hand
    once = 2 * any_spec.time_tokens * d * (256 + d + 6 * d)
    assert pass_flop(any_spec) == any_spec.depth * by_hand + once
    assert sum(op.bytes for op in rows) > sum(op.bytes_pilot or 0 for op in rows)


def test_the_calibration_by_the_pilots_table():
    flop, moved = pilot_totals(ESCHER)
    assert flop == 4_640_499_302_400 + 943_718_400 and flop / 1e9 == pytest.approx(4641.44, abs=0.005)
    assert moved == sum(row[4] for row in TABLE if row[4] is not None) == 3_069_953_536
    assert moved / 1e6 == pytest.approx(3069.95, abs=0.005)
    assert flop / 1e9 / 4641.7 - 1 == pytest.approx(-0.00006, abs=0.0001)  # -0.006 %, within 0.01 %
    assert moved / 1e6 / 3070.2 - 1 == pytest.approx(-0.00008, abs=0.0001)  # -0.008 %
    assert (ESCHER.pilot["block_gflop"], ESCHER.pilot["block_mb"]) == (4641.7, 3070.2)


def test_the_surrogate_would_drift_from_the_pilot():
    flop, moved = pilot_totals(load("escher_surrogate_4096"))
    a, w = 8192 * 4096, 4096 * 4096  # elements of one activation, of one square weight
    linear = 6 * 2 * a * 4096 + 2 * 2 * a * 16384
    attention = 4 * a * 8192 + 4 * a * 512
    assert flop == linear + attention + 2 * 4096 * 6 * 4096
    streams = (
        6 * (2 * a + w)  # q, k, v, o; q, o
        + 2 * (a + 4 * w + 4 * a)  # FFN
        + (2 * a + 2 * 8192 * 4096) + (2 * a + 2 * 512 * 4096)  # both attentions
        + 3 * 2 * a + 2 * a + 2 * 4 * a  # norms, cache writes, GELU
        + (256 + 4096) + (4096 + 6 * w + 6 * 4096)  # time
    )  # fmt: skip
    assert moved == 2 * streams
    assert flop / 1e9 / 4641.7 - 1 == pytest.approx(0.081, abs=0.0005)
    assert moved / 1e6 / 3070.2 - 1 == pytest.approx(0.183, abs=0.0005)
    assert load("escher_surrogate_4096").pilot is None


def test_the_weights():
    a_block = 8 * 5120 * 5120 + 2 * 5120 * 13824
    rest = 256 * 5120 + 7 * 5120 * 5120
    assert a_block / 1e6 == pytest.approx(351.27, abs=0.005) and rest / 1e6 == pytest.approx(184.8, abs=0.05)
    assert parameters(ESCHER) == 40 * a_block + rest == 14_235_729_920
    assert parameters(ESCHER) / 1e9 == pytest.approx(14.24, abs=0.005)
    assert weight_bytes(ESCHER) == 2 * 14_235_729_920


def test_the_memory():
    assert cache_bytes(ESCHER) == 40 * 2 * (18720 + 512) * 5120 * 2  # K and V of window and text, two bytes
    assert cache_bytes(load("wan2_2_t2v_a14b")) == 40 * 2 * 512 * 5120 * 2  # text only
    assert activation_bytes(ESCHER) == 2 * 4680 * 10 * 5120 == 479_232_000  # the rotary embedding is the widest place
    assert activation_bytes(spec(ffn=5120)) == activation_bytes(spec(ffn=7 * 5120 // 2)) == 479_232_000
    assert activation_bytes(spec(ffn=30720)) == 2 * 4680 * (3 * 5120 + 2 * 30720)  # here the FFN is
    assert needed_bytes(ESCHER) == 28_471_459_840 + 15_754_854_400 + 479_232_000
    assert cache_bytes(spec(batch=3)) == 3 * cache_bytes(ESCHER)
    assert activation_bytes(spec(batch=3)) == 3 * 479_232_000


class Live(TorchDispatchMode):
    """Bytes of the storages that came to life under it and are still alive, and their peak."""

    def __init__(self, before):
        super().__init__()
        self.known, self.now, self.peak = weakref.WeakSet(t.untyped_storage() for t in before), 0, 0
        self.before = before  # a storage lives as long as its tensor

    def freed(self, size):
        self.now -= size

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for storage in (t.untyped_storage() for t in tree_iter(out) if isinstance(t, torch.Tensor)):
            if storage not in self.known:  # a view has the storage of what it is a view of
                self.known.add(storage)
                self.now += storage.nbytes()
                weakref.finalize(storage, self.freed, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return out


def live_peak_bytes(any_spec):
    """Peak of the live activations of one eager block on the device "meta", with the residual stream that it is given."""
    net = Model(torch, dataclasses.replace(any_spec, depth=1), torch.bfloat16, "meta", "sdpa_math")
    [block] = net.blocks
    block.attend = lambda q, k, v: torch.empty_like(q)
    stream = net.x.numel() * net.x.element_size()
    with torch.no_grad():
        around = net.arguments(0)
        with Live([net.x, *around, *block.parameters(), *block.buffers()]) as live:
            out = block(net.x, *around)
    assert (
        live.now == out.numel() * out.element_size() == stream
    )  # all but the result is gone: nothing was lost sight of
    return live.peak + stream


def test_the_live_peak_of_one_eager_block():
    """While k is rotated: x, norm's result, v, q before and after, k, the two FP32 halves (one stream each) and their
    stack (two): ten streams. Modulation and FP32 statistics are the rest."""
    assert live_peak_bytes(ESCHER) == pytest.approx(10 * 2 * 4680 * 5120, rel=0.002)
    ffn = live_peak_bytes(
        load("wan2_2_ti2v_5b")
    )  # x before and after attention, the norm's result, twice the inner one
    tokens = load("wan2_2_ti2v_5b").query_tokens
    assert ffn == pytest.approx(2 * tokens * (3 * 3072 + 2 * 14336), rel=0.002)


def test_the_activations_are_the_live_peak():
    assert activation_bytes(ESCHER) == pytest.approx(live_peak_bytes(ESCHER), rel=0.03)


# ---- the workloads of configs/ ----


def test_the_names():
    assert names() == ALL
    for name in ALL:
        any_spec = load(name)
        assert any_spec.name == name and any_spec.title and any_spec.full is None
        assert from_json(json.loads(json.dumps(any_spec.to_json())), "x") == any_spec


def test_the_published_wan_geometries():
    t2v, i2v, ti2v = (load(f"wan2_2_{n}") for n in ("t2v_a14b", "i2v_a14b", "ti2v_5b"))
    frames = 1 + (81 - 1) // 4
    assert frames == 21
    assert t2v.query_tokens == frames * (480 // 8 // 2) * (832 // 8 // 2) == 21 * 1560 == 32760
    assert i2v.query_tokens == frames * (720 // 8 // 2) * (1280 // 8 // 2) == 21 * 3600 == 75600
    assert ti2v.query_tokens == (1 + 120 // 4) * (704 // 16 // 2) * (1280 // 16 // 2) == 31 * 880 == 27280
    for a14b in (t2v, i2v):
        assert (a14b.hidden, a14b.ffn, a14b.heads, a14b.head_size, a14b.depth) == (5120, 13824, 40, 128, 40)
    assert (ti2v.hidden, ti2v.ffn, ti2v.heads, ti2v.head_size, ti2v.depth) == (3072, 14336, 24, 128, 30)
    for wan in (t2v, i2v, ti2v):
        assert (wan.window_tokens, wan.text_tokens, wan.time_tokens) == (wan.query_tokens, 512, 1)
        assert not wan.cache and wan.unit == "denoising step" and wan.pilot is None
    assert "TOKENS=75600" in t2v.note and overridden(t2v, tokens=75600).window_tokens == 75600


def test_smoke_and_big_derive():
    smoke, big = load("smoke"), load("big")
    assert (smoke.depth, smoke.query_tokens, smoke.window_tokens) == (40 // 10, 4680 // 4, 18720 // 4)
    assert (big.depth, big.query_tokens, big.window_tokens) == (60, 2 * 4680, 2 * 18720)
    for derived in (smoke, big):
        assert derived.derived_from == "escher_14b_480p" and derived.derived_why and derived.pilot is None
        assert (derived.hidden, derived.ffn, derived.heads) == (5120, 13824, 40)


def test_a_file_by_path(tmp_path):
    path = tmp_path / "mine ü.json"
    path.write_text(json.dumps(changed(name="mine", depth=2)), encoding="utf-8")
    assert (load(str(path)).name, load(str(path)).depth) == ("mine", 2)


def test_a_file_that_derives(tmp_path):
    path = tmp_path / "mine.json"
    own = {"name": "mine", "title": "Mine", "derived_from": "wan2_2_ti2v_5b", "derived_why": "two blocks", "depth": 2}
    path.write_text(json.dumps(own), encoding="utf-8")
    assert load(str(path)) == dataclasses.replace(load("wan2_2_ti2v_5b"), **own)


def test_a_file_that_derives_has_a_name_of_its_own(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text('{"derived_from": "escher_14b_480p", "depth": 2}', encoding="utf-8")
    try:
        assert load(str(path)).name != "escher_14b_480p"
    except WorkloadError as exc:
        assert "name is missing" in str(exc)


def test_a_file_that_derives_keeps_the_ratio_of_query_to_window(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text('{"name": "mine", "derived_from": "escher_14b_480p", "query_tokens": 390}', encoding="utf-8")
    assert load(str(path)).window_tokens == 1560


# ---- what a person asks for ----


def test_overridden():
    assert overridden(ESCHER) is ESCHER
    assert overridden(ESCHER, depth=40, tokens=4680, window=18720) is ESCHER  # nothing changed, nothing derived
    two = overridden(ESCHER, depth=2)
    assert two == dataclasses.replace(
        ESCHER, depth=2, derived_from="escher_14b_480p", derived_why="asked for: depth 40 -> 2"
    )
    some = overridden(ESCHER, tokens=390)
    assert (some.depth, some.query_tokens, some.window_tokens) == (40, 390, 1560)  # the window follows
    both = overridden(ESCHER, tokens=390, window=780)
    assert (both.query_tokens, both.window_tokens) == (390, 780) and both.name == ESCHER.name
    assert overridden(ESCHER, window=9360).window_tokens == 9360
    assert overridden(load("wan2_2_t2v_a14b"), tokens=7).window_tokens == 7
    assert overridden(load("smoke"), depth=1).derived_from == "escher_14b_480p"
    assert overridden(load("smoke"), depth=1).derived_why.startswith("smoke: depth 40 -> 4, tokens / 4; asked for: ")
    assert both.whole() == both  # what a person asked for is the workload, not something the host took away


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"depth": 0}, "depth is 0; expected a whole number from 1"),
        ({"depth": -1}, "depth is -1; expected a whole number from 1"),
        ({"depth": True}, "depth is True; expected a whole number"),
        ({"depth": 1.0}, "depth is 1.0; expected a whole number"),
        ({"depth": "2"}, "depth is '2'; expected a whole number"),
        ({"depth": 10**30}, "depth is 1000000"),
        ({"tokens": 0}, "query_tokens is 0"),
        ({"tokens": 391}, "query_tokens is 391, which 3 time tokens do not divide; give a multiple of 3"),
        ({"window": 0}, "window_tokens is 0"),
        ({"window": 1000}, "window_tokens is 1000; expected a multiple of query_tokens (4680)"),
        ({"tokens": 390, "window": 400}, "window_tokens is 400; expected a multiple of query_tokens (390)"),
        ({"window": 2340}, "window_tokens is 2340; expected a multiple of query_tokens (4680)"),
    ],
)
def test_what_cannot_be_asked_for(asked, message):
    with pytest.raises(WorkloadError) as caught:
        overridden(ESCHER, **asked)
    assert str(caught.value).startswith(f"workload escher_14b_480p: {message}") and "\n" not in str(caught.value)


def test_a_window_without_a_cache_cannot_be_asked_for():
    with pytest.raises(
        WorkloadError, match="window_tokens is 1000 and query_tokens 32760; without a cache .* be equal"
    ):
        overridden(load("wan2_2_t2v_a14b"), window=1000)


def test_a_window_that_follows_is_checked_too():
    try:
        far = overridden(ESCHER, tokens=3_000_000)
    except WorkloadError:
        return
    assert from_json(far.to_json(), "x") == far


# ---- what a host can run ----


def test_what_a_cpu_runs_by_hand():
    small = fit(ESCHER, "cpu", 32 * GIB)
    assert (small.depth, small.query_tokens, small.window_tokens) == (1, 390, 1560)  # tokens / 12
    at = 12 * 390 * 5120**2 + 4 * 390 * 5120 * 13824 + 4 * 390 * 5120 * (1560 + 512)
    assert at == 249_647_923_200 <= 2.5e11  # and with tokens / 11, 4680 // 11 // 3 * 3 = 423, more than that:
    assert 12 * 423 * 5120**2 + 4 * 423 * 5120 * 13824 + 4 * 423 * 5120 * (1692 + 512) > 2.5e11
    kept = ("name", "title", "hidden", "heads", "head_size", "ffn", "text_tokens", "time_tokens", "time_frequency")
    assert all(getattr(small, n) == getattr(ESCHER, n) for n in (*kept, "batch", "chunks", "pilot", "cache", "unit"))
    assert small.derived_from == "escher_14b_480p"
    assert small.derived_why == "a CPU host: depth 40 -> 1, query tokens 4680 -> 390, window tokens 18720 -> 1560"
    assert small.whole() == ESCHER and small.whole().derived_from is None


@pytest.mark.parametrize(
    ("gib", "depth"),
    [(8, 6), (16, 13), (24, 20), (32, 27), (45, 38), (46, 39), (48, 40), (288, 40)],
)
def test_what_a_gpu_runs_by_hand(gib, depth):
    """A block has 2 x 351 272 960 B of weights and 2 x 2 x 19232 x 5120 B of keys and values, 1 096 417 280 B; the rest
    is 369 623 040 B of weights and 479 232 000 B of activations. 90 % of the memory may be used."""
    assert depth == min(40, math.floor((0.9 * gib * GIB - 848_855_040) / 1_096_417_280))
    found = fit(ESCHER, "gpu", gib * GIB)
    assert (found.depth, found.query_tokens, found.window_tokens) == (depth, 4680, 18720)
    if depth == 40:
        assert found is ESCHER
    else:
        assert found.derived_why == f"the memory of this GPU: depth 40 -> {depth}" and found.whole() == ESCHER


def test_tokens_go_only_after_depth():
    found = fit(ESCHER, "gpu", 17 * GIB // 10)
    assert found.depth == 1 and found.query_tokens < 4680
    assert found.window_tokens == 4 * found.query_tokens and found.query_tokens % 3 == 0
    assert needed_bytes(found) <= 0.9 * 17 * GIB // 10


def test_a_derived_workload_that_a_host_derives_again():
    small = fit(load("smoke"), "cpu", 32 * GIB)
    assert small.name == "smoke" and small.derived_from == "escher_14b_480p"
    assert small.derived_why.startswith("smoke: depth 40 -> 4, tokens / 4; a CPU host: depth 4 -> 1, ")
    assert small.whole() == load("smoke")


def test_what_does_not_fit_even_at_depth_1_names_the_need_and_the_mend():
    with pytest.raises(WorkloadError) as caught:
        fit(ESCHER, "gpu", GIB)
    need = 2 * (351_272_960 + 184_811_520) + 2 * 2 * (12 + 512) * 5120 + 2 * 3 * 10 * 5120
    assert str(caught.value) == (
        f"workload escher_14b_480p: depth 1 with 3 tokens needs {need / GIB:.3g} GiB, and 0.9 of this GPU's 1 GiB may "
        "be used; choose a smaller DEPTH, TOKENS or workload"
    )


def test_what_a_person_fixed_is_kept_or_refused():
    with pytest.raises(WorkloadError, match="depth 40 with 3 tokens needs .* GiB.*choose a smaller DEPTH"):
        fit(ESCHER, "gpu", 16 * GIB, ["depth"])
    with pytest.raises(WorkloadError, match="depth 1 with 468000 tokens needs .* GiB.*choose a smaller DEPTH, TOKENS"):
        fit(overridden(ESCHER, tokens=468000), "gpu", 16 * GIB, ["query_tokens"])
    kept = fit(overridden(ESCHER, depth=3, tokens=4680), "cpu", 64 * GIB, ["depth", "query_tokens"])
    assert (kept.depth, kept.query_tokens) == (3, 4680)  # slow, but asked for
    assert block_flop(kept) > CPU_BLOCK_FLOP
    deep = fit(overridden(ESCHER, depth=3), "cpu", 64 * GIB, ["depth"])
    assert (deep.depth, deep.query_tokens) == (3, 390)


def test_a_block_too_slow_for_a_cpu_is_not_called_too_large():
    slow = spec(query_tokens=3, window_tokens=9_999_999)  # 0.6 TFLOP a block, and 192 of the 8192 GiB for use
    try:
        assert fit(slow, "cpu", 2**44).query_tokens == 3
    except WorkloadError as exc:
        assert "needs 192 GiB" not in str(exc)


def test_a_spec_made_smaller_twice_gives_the_whole_back():
    assert fit(fit(ESCHER, "gpu", 40 * GIB), "gpu", 10 * GIB).whole() == ESCHER


@pytest.mark.parametrize("kind", ["cpu", "cuda", "rocm"])
def test_the_one_spec_of_a_run(kind, monkeypatch):
    monkeypatch.setattr(run.environment, "memory", lambda: {"limit_bytes": None})
    found = Found(kind=kind, raw_name="x", total_memory_bytes=64 * GIB)
    chosen = spec_for(Settings(workload="wan2_2_t2v_a14b", depth=2, tokens=780), found)
    assert (chosen.depth, chosen.query_tokens, chosen.window_tokens) == (2, 780, 780)  # on any host
    model = spec_for(Settings(reference_model="wan2_2_ti2v_5b"), found)
    assert model.name == "wan2_2_ti2v_5b" and model.whole() == load("wan2_2_ti2v_5b")
    assert (model.depth == 30) == (kind != "cpu")


def test_an_empty_reference_model_is_no_model():
    with pytest.raises(WorkloadError, match="unknown reference model ''"):
        spec_for(Settings(reference_model=""), Found(kind="cuda", raw_name="x", total_memory_bytes=64 * GIB))


def test_a_control_group_may_allow_less_than_the_host_has(monkeypatch):
    monkeypatch.setattr(run.environment, "memory", lambda: {"limit_bytes": 8 * GIB})
    found = Found(kind="cpu", raw_name="x", total_memory_bytes=512 * GIB)
    assert spec_for(Settings(), found).whole() == ESCHER
    with pytest.raises(WorkloadError, match="depth 40 .* 4 of this CPU's 8 GiB may be used"):
        spec_for(Settings(depth=40), found)
    gpu = Found(kind="cuda", raw_name="x", total_memory_bytes=512 * GIB)
    assert spec_for(Settings(depth=40), gpu) == ESCHER


# ---- properties ----


@st.composite
def specs(draw):
    """Any workload: small heads and large, with a cache and without, short and long."""
    heads, head_size = draw(st.integers(1, 48)), 2 * draw(st.integers(1, 80))
    time_tokens, cache = draw(st.integers(1, 5)), draw(st.booleans())
    query = time_tokens * draw(st.integers(1, 30_000))
    return from_json({
        "name": "any", "title": "any", "hidden": heads * head_size, "heads": heads, "head_size": head_size,
        "ffn": draw(st.integers(1, 20_000)), "depth": draw(st.integers(1, 80)), "time_frequency": 256,
        "time_tokens": time_tokens, "query_tokens": query, "text_tokens": draw(st.integers(1, 2000)), "chunks": 3,
        "window_tokens": query * (draw(st.integers(1, 6)) if cache else 1), "batch": draw(st.integers(1, 3)),
        "cache": cache, "pilot": draw(st.sampled_from([None, {"block_gflop": 1}])),
    }, "x")  # fmt: skip


KINDS = st.sampled_from(["cpu", "gpu"])
MEMORY = st.floats(24, 42).map(lambda power: int(2**power))  # 16 MiB to 4 TiB
FIXED = st.sets(st.sampled_from(["depth", "query_tokens", "window_tokens"]))
ALIKE = [f.name for f in dataclasses.fields(workload.Spec)]
ALIKE = [n for n in ALIKE if n not in {"depth", "query_tokens", "window_tokens", "derived_from", "derived_why", "full"}]


def size(any_spec):
    return any_spec.depth, any_spec.query_tokens, any_spec.window_tokens


def smallest(any_spec, fixed):
    """What `fit` may go down to, made without it."""
    depth = any_spec.depth if "depth" in fixed else 1
    if {"query_tokens", "window_tokens"} & fixed:
        return dataclasses.replace(any_spec, depth=depth)
    query = any_spec.time_tokens
    window = query * any_spec.window_tokens // any_spec.query_tokens
    return dataclasses.replace(any_spec, depth=depth, query_tokens=query, window_tokens=window)


@settings(max_examples=150, deadline=None)
@given(specs(), KINDS, MEMORY, FIXED)
def test_whatever_fits_is_a_workload(any_spec, kind, memory, fixed):
    budget, tokens_fixed = MEMORY_FRAC[kind] * memory, bool({"query_tokens", "window_tokens"} & fixed)
    least = smallest(any_spec, fixed)
    try:
        found = fit(any_spec, kind, memory, fixed)
    except WorkloadError as exc:
        too_slow = kind == "cpu" and not tokens_fixed and block_flop(least) > CPU_BLOCK_FLOP
        assert needed_bytes(least) > budget or too_slow
        assert "\n" not in str(exc) and " GiB, and " in str(exc) and "DEPTH, TOKENS or workload" in str(exc)
        return
    assert from_json(json.loads(json.dumps(found.to_json())), "x") == found
    assert all(getattr(found, n) == getattr(any_spec, n) for n in ALIKE)  # hidden, FFN, heads, pilot and the rest
    assert found.query_tokens * any_spec.window_tokens == any_spec.query_tokens * found.window_tokens
    assert all(a <= b for a, b in zip(size(found), size(any_spec), strict=True))
    assert needed_bytes(found) <= budget
    assert all(getattr(found, name) == getattr(any_spec, name) for name in fixed)
    if found.query_tokens < any_spec.query_tokens:  # only when depth has nothing left to give
        assert found.depth == (any_spec.depth if "depth" in fixed else 1)
    if kind == "cpu":
        assert found.depth == (any_spec.depth if "depth" in fixed else 1)
        assert tokens_fixed or found.query_tokens == any_spec.time_tokens or block_flop(found) <= CPU_BLOCK_FLOP
    elif found.depth < any_spec.depth and found.query_tokens == any_spec.query_tokens:
        assert needed_bytes(dataclasses.replace(found, depth=found.depth + 1)) > budget  # no block too few
    assert found.whole() == any_spec
    assert (found is any_spec) == (size(found) == size(any_spec))
    assert (found.derived_from, bool(found.derived_why)) == ((None, False) if found is any_spec else ("any", True))
    assert fit(found, kind, memory, fixed) == found


@settings(max_examples=80, deadline=None)
@given(specs(), KINDS, MEMORY, MEMORY, FIXED)
def test_more_memory_never_gives_less(any_spec, kind, one, other, fixed):
    less, more = sorted((one, other))
    try:
        small = fit(any_spec, kind, less, fixed)
    except WorkloadError:
        return
    large = fit(any_spec, kind, more, fixed)
    assert all(a <= b for a, b in zip(size(small), size(large), strict=True))


@settings(max_examples=80, deadline=None)
@given(specs(), KINDS, MEMORY, st.none() | st.integers(1, 100), st.none() | st.integers(1, 500), st.integers(1, 4))
def test_what_a_person_asked_for_is_what_runs_or_an_error(any_spec, kind, memory, depth, frames, times):
    tokens = frames and frames * any_spec.time_tokens
    window = tokens and (tokens * times if any_spec.cache else None)
    asked = overridden(any_spec, depth, tokens, window)
    wanted = {"depth": depth, "query_tokens": tokens, "window_tokens": window}
    fixed = {name for name, value in wanted.items() if value is not None}
    assert all(getattr(asked, name) == wanted[name] for name in fixed)
    try:
        found = fit(asked, kind, memory, fixed)
    except WorkloadError as exc:
        assert "choose a smaller" in str(exc)
        return
    assert all(getattr(found, name) == wanted[name] for name in fixed)
    assert found.whole() == asked and from_json(found.to_json(), "x") == found


@settings(max_examples=60, deadline=None)
@given(specs())
def test_the_table_of_any_workload_adds_up(any_spec):
    b, m, d, f = any_spec.batch, any_spec.query_tokens, any_spec.hidden, any_spec.ffn
    by_hand = b * m * d * (12 * d + 4 * f + 4 * (any_spec.window_tokens + any_spec.text_tokens))
    assert block_flop(any_spec) == by_hand
    rows = ops(any_spec)
    assert len({op.name for op in rows}) == len(rows) == (25 if any_spec.cache else 24)
    assert all(op.flop >= 0 and op.bytes > 0 for op in rows)
    assert all(op.bytes_pilot is None or 0 < op.bytes_pilot <= op.bytes for op in rows)
    assert all(isinstance(n, int) for op in rows for n in (op.flop, op.bytes, *op.shape.values()))


# ---- specs that are wrong ----


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (changed(heads=39), "heads x head_size is 39 x 128 = 4992, but hidden is 5120; the two must be equal"),
        (changed(heads=1024, head_size=5), "head_size is 5; rotary embedding needs an even number"),
        (changed(query_tokens=4681), "query_tokens is 4681, which 3 time tokens do not divide; give a multiple of 3"),
        (changed(window_tokens=18721), "window_tokens is 18721; expected a multiple of query_tokens (4680)"),
        (changed(window_tokens=1), "window_tokens is 1; expected a multiple of query_tokens (4680)"),
        (changed(cache=False), "window_tokens is 18720 and query_tokens 4680; without a cache"),
        (changed(cache=1), "cache is 1; expected true or false"),
        (changed(cache=None), "cache is None; expected true or false"),
        (changed(depth=0), "depth is 0; expected a whole number from 1 to 10000000"),
        (changed(depth=-4), "depth is -4"),
        (changed(depth=True), "depth is True"),
        (changed(depth=1.5), "depth is 1.5"),
        (changed(depth="40"), "depth is '40'"),
        (changed(depth=None), "depth is None"),
        (changed(depth=[40]), "depth is [40]"),
        (changed(depth=10**7 + 1), "depth is 10000001"),
        (changed(depth=math.inf), "depth is inf"),
        (changed(batch=0), "batch is 0"),
        (changed(chunks=-1), "chunks is -1"),
        (changed(text_tokens=0), "text_tokens is 0"),
        (changed(time_tokens=False), "time_tokens is False"),
        (changed(query_tokens=10**30), "query_tokens is 1"),
        (changed(name=3), "name is 3; expected text"),
        (changed(name=""), "name is ''; expected letters, digits"),
        (changed(name="../x"), "name is '../x'; expected letters, digits"),
        (changed(name="a b"), "name is 'a b'; expected letters, digits"),
        (changed(title=None), "title is None; expected text"),
        (changed(unit=4), "unit is 4; expected text"),
        (changed(pilot=[1]), "pilot is [1]; expected an object"),
        (changed(pilot={"peak_tflops": "1360"}), "pilot.peak_tflops is '1360'; expected a number above 0"),
        (changed(pilot={"block_gflop": 0, "block_mb": 1}), "pilot.block_gflop is 0; expected"),
        (changed(pilot={"block_mb": -3.5}), "pilot.block_mb is -3.5; expected"),
        (changed(pilot={"ridge_flop_per_byte": True}), "pilot.ridge_flop_per_byte is True; expected"),
        (changed(pilot={"ridge_flop_per_byte": None}), "pilot.ridge_flop_per_byte is None; expected"),
        (changed(pilot={"peak_tflops": math.inf}), "pilot.peak_tflops is inf; expected"),
        (changed(pilot={"peak_tflops": math.nan}), "pilot.peak_tflops is nan; expected"),
        (changed(pilot={"mfu_pct": {"eager": "93"}}), "pilot.mfu_pct.eager is '93'; expected"),
        (changed(pilot={"mfu_pct": {"eager": 93, "source": "x"}}), "pilot.mfu_pct.source is 'x'; expected"),
        (changed(pilot={"mfu_pct": 93}), "pilot.mfu_pct or pilot.source is of the wrong kind; expected"),
        (changed(pilot={"mfu_pct": None}), "pilot.mfu_pct or pilot.source is of the wrong kind; expected"),
        (changed(pilot={"source": 3}), "pilot.mfu_pct or pilot.source is of the wrong kind; expected"),
        (changed(full="x"), "full is 'x'; expected an object"),
        (changed(dpeth=40), "unknown key 'dpeth'; known: name, title, hidden"),
        (changed(ffn=...), "ffn is missing"),
        ([], "expected an object"),
        ("escher", "expected an object"),
        (None, "expected an object"),
    ],
)
def test_bad_spec(data, message):
    with pytest.raises(WorkloadError) as caught:
        from_json(data, "my.json")
    assert str(caught.value).startswith(f"my.json: {message}") and "\n" not in str(caught.value)


def test_good_pilots():
    for pilot in (
        None,
        {},
        {"block_gflop": 1, "mfu_pct": {"eager": 93.5}, "source": "a paper"},
        {"mfu_pct": {}, "source": ""},
    ):
        assert spec(pilot=pilot).pilot == pilot


@pytest.mark.parametrize(
    "values", [{"derived_from": 3}, {"derived_why": [1]}, {"full": {"nope": 1}}, {"full": {"depth": "x"}}]
)
def test_bad_provenance(values):
    with pytest.raises(WorkloadError):
        spec(**values).whole()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{\n "name": "x",,\n}', ":2:14: no valid JSON"),
        ("", ":1:1: no valid JSON"),
        ("{", ":1:2: no valid JSON"),
        ("\ufeff{}", ":1:1: no valid JSON"),
        ('{"depth": NaN}', "is missing"),
        ("[]", "expected an object"),
        ("3", "expected an object"),
        ("null", "expected an object"),
        ("{}", "name is missing"),
        (b'{"name": "\xff"}', "cannot be read"),
        ('{"derived_from": "nope"}', f"derived_from is 'nope'; expected one of {', '.join(WHOLE)}"),
        ('{"derived_from": null}', "name is missing"),
        ('{"derived_from": ["smoke"]}', "derived_from is ['smoke']; expected one of"),
        (
            '{"derived_from": "../configs/escher_14b_480p"}',
            "derived_from is '../configs/escher_14b_480p'; expected one of",
        ),
        ('{"derived_from": "smoke"}', f"derived_from is 'smoke'; expected one of {', '.join(WHOLE)}"),  # no chains
        ('{"derived_from": "report_config"}', "derived_from is 'report_config'; expected one of"),
        ('{"derived_from": "escher_14b_480p", "heads": 8}', "'heads' cannot differ from escher_14b_480p; a derived"),
        ('{"derived_from": "escher_14b_480p", "ffn": 8}', "'ffn' cannot differ from escher_14b_480p; a derived"),
        ('{"derived_from": "escher_14b_480p", "pilot": {}}', "'pilot' cannot differ"),
        ('{"derived_from": "escher_14b_480p", "full": {}}', "'full' cannot differ"),
        ('{"derived_from": "escher_14b_480p", "dpeth": 1}', "'dpeth' cannot differ"),
        ('{"derived_from": "escher_14b_480p", "depth": 0}', "depth is 0; expected a whole number"),
        ('{"derived_from": "escher_14b_480p", "query_tokens": 391}', "query_tokens is 391, which 3 time tokens"),
        ('{"derived_from": "escher_14b_480p", "window_tokens": 4681}', "window_tokens is 4681; expected a multiple"),
        (
            '{"derived_from": "wan2_2_t2v_a14b", "query_tokens": 390, "window_tokens": 32760}',
            "window_tokens is 32760 and query_tokens 390",
        ),
        ('{"derived_from": "escher_14b_480p", "hidden": 64}', "'hidden' cannot differ"),
    ],
)
def test_bad_file(tmp_path, text, message):
    path = tmp_path / "my spec ü.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(WorkloadError) as caught:
        load(str(path))
    assert str(path) in str(caught.value) and message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("rest", [{}, changed(heads=20, name="mine")])
def test_a_file_that_derives_may_not_differ_in_hidden(tmp_path, rest):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({**rest, "hidden": 2560, "derived_from": "escher_14b_480p"}), encoding="utf-8")
    with pytest.raises(WorkloadError, match="'hidden' cannot differ from escher_14b_480p"):
        load(str(path))


@pytest.mark.parametrize("text", ["[" * 100_000, '{"depth": ' + "9" * 5000 + "}"], ids=["deep", "long"])
def test_a_file_that_json_gives_up_on(tmp_path, text):
    path = tmp_path / "mine.json"
    path.write_text(text, encoding="utf-8")
    try:
        with pytest.raises(WorkloadError, match="mine.json"):
            load(str(path))
    except RecursionError:
        pytest.fail("RecursionError", pytrace=False)


def test_an_unreadable_file(tmp_path, monkeypatch):
    path = tmp_path / "mine.json"
    path.write_text("{}", encoding="utf-8")

    def no_permission(*_args, **_kwargs):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(type(path), "read_text", no_permission)
    with pytest.raises(WorkloadError, match="mine.json: cannot be read: .*Permission denied"):
        load(str(path))


@pytest.mark.parametrize("name", ["escher_14b_48op", "", "no/such.json", "report_config.json", "a\0b", "."])
def test_an_unknown_name_lists_the_names(name):
    with pytest.raises(WorkloadError) as caught:
        load(name)
    assert str(caught.value) == f"unknown workload {name!r}; known: {', '.join(ALL)}, or a .json file"


def test_a_folder_is_no_workload(tmp_path):
    with pytest.raises(WorkloadError, match="unknown workload"):
        load(str(tmp_path / "x.json"))
    (tmp_path / "x.json").mkdir()
    with pytest.raises(WorkloadError, match="unknown workload"):
        load(str(tmp_path / "x.json"))


def test_names_are_the_files_that_hold_a_geometry_or_derive_one(tmp_path, monkeypatch):
    assert "report_config" not in names() and "reference_video_models" not in names()
    texts = {"good": json.dumps(GOOD), "less": '{"derived_from": "good"}', "list": "[]", "number": "3", "null": "null"}
    for file, text in {**texts, "bad": "{", "text": '"hidden"'}.items():
        (tmp_path / f"{file}.json").write_text(text, encoding="utf-8")
    (tmp_path / "latin.json").write_bytes(b"\xff")
    (tmp_path / "folder.json").mkdir()
    monkeypatch.setattr(workload, "CONFIGS", tmp_path)
    assert names() == ["good", "less"]
    assert load("less").depth == 40


def test_a_configuration_that_is_no_workload_says_so():
    with pytest.raises(WorkloadError, match="report_config.json: unknown key"):
        load("report_config")


# ---- reference models ----

ENTRY = {"title": "M", "workload": "smoke", "publisher": "P", "source": "S", "note": ""}


def test_the_reference_models():
    models = reference_models()
    assert list(models) == ["escher_14b", "wan2_2_t2v_a14b", "wan2_2_i2v_a14b", "wan2_2_ti2v_5b"]
    assert [of_reference_model(key) for key in models] == ["escher_14b_480p", *list(models)[1:]]
    assert all(m.key == key and m.workload in WHOLE and m.title and m.publisher for key, m in models.items())


def test_an_unknown_reference_model_lists_the_ids():
    with pytest.raises(WorkloadError) as caught:
        of_reference_model("nope")
    ids = "escher_14b, wan2_2_t2v_a14b, wan2_2_i2v_a14b, wan2_2_ti2v_5b"
    assert str(caught.value) == f"unknown reference model 'nope'; known: {ids}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", ":1:2: no valid JSON"),
        ("[]", "models is missing; expected {"),
        ("{}", "models is missing"),
        ('{"models": []}', "models is missing"),
        ('{"models": {"m": 3}}', "models.m: expected an object with title, workload, publisher, source, note"),
        ('{"models": {"m": {}}}', "models.m: expected an object with title"),
        (json.dumps({"models": {"m": {**ENTRY, "extra": ""}}}), "models.m: expected an object with title"),
        (json.dumps({"models": {"m": {**ENTRY, "title": None}}}), "models.m.title is None; expected text"),
        (
            json.dumps({"models": {"m": {**ENTRY, "workload": ["smoke"]}}}),
            "models.m.workload is ['smoke']; expected text",
        ),
        (
            json.dumps({"models": {"m": ENTRY, "n": {**ENTRY, "workload": "nope"}}}),
            f"models.n.workload is 'nope'; expected one of {', '.join(ALL)}",
        ),
    ],
)
def test_a_malformed_registry(tmp_path, text, message):
    path = tmp_path / "models ü.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(WorkloadError) as caught:
        reference_models(path)
    assert str(path) in str(caught.value) and message in str(caught.value) and "\n" not in str(caught.value)


def test_a_registry_by_path(tmp_path):
    path = tmp_path / "models.json"
    path.write_text(json.dumps({"models": {"m": ENTRY}}), encoding="utf-8")
    assert reference_models(path) == {"m": workload.ReferenceModel(key="m", **ENTRY)}
    with pytest.raises(WorkloadError, match="no.json: cannot be read"):
        reference_models(tmp_path / "no.json")


# ---- the settings of a run ----


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"depth": True}, "depth is True; expected a whole number"),
        ({"tokens": "390"}, "tokens is '390'; expected a whole number"),
        ({"window": 1.5}, "window is 1.5; expected a whole number"),
        ({"reference_model": "x", "workload": "smoke"}, "reference_model 'x' brings its own workload; leave workload"),
        ({"dpeth": 1}, "unknown setting 'dpeth'; known: target, "),
    ],
)
def test_settings_that_are_wrong(values, message):
    with pytest.raises(ValueError) as caught:
        Settings.from_json(values)
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)


# ---- the page on the real Wan2.2 ----


def test_the_page_on_wan_quotes_the_work_of_a_pass():
    page = (workload.CONFIGS.parent / "notebooks" / "wan2_2.md").read_text(encoding="utf-8")
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("| wan2_2_")
    ]
    quoted = {(row[0].removeprefix("wan2_2_"), row[1]) for row in rows}
    assert quoted == {("t2v_a14b", "32760"), ("t2v_a14b", "75600"), ("i2v_a14b", "75600"), ("ti2v_5b", "27280")}
    for name, tokens, a_pass, steps, video in rows:
        flop = pass_flop(overridden(load(name), tokens=int(tokens)))
        assert f"{flop / 1e15:.3f}" == a_pass and f"{2 * int(steps) * flop / 1e15:.1f}" == video
        assert name in {m.workload for m in reference_models().values()} and f"REFERENCE_MODEL={name}" in page
    m = 75600
    by_hand = 40 * m * 5120 * (12 * 5120 + 4 * 13824 + 4 * (m + 512)) + 2 * 5120 * (256 + 7 * 5120)
    assert by_hand == 6_521_141_699_543_040 and str(by_hand) in page
    assert 40 * 4 * m * m * 5120 / by_hand == pytest.approx(0.72, abs=0.005)
