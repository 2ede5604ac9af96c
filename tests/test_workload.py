"""The geometry: every FLOP by hand, the pilot's calibration, the spec of a small host, and specs that are wrong."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from escher_kernels import workload
from escher_kernels.workload import Gemm, WorkloadError, derive_for_cpu, from_json, gemms, load, names

ESCHER = load("escher_14b_480p")
GOOD = json.loads((workload.CONFIGS / "escher_14b_480p.json").read_text(encoding="utf-8"))

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


def attention_flop(spec, key_tokens):
    return 4 * spec.batch * spec.heads * spec.query_tokens * key_tokens * spec.head_size


def block_flop(spec):
    linear = sum(g.flop for g in gemms(spec) if not g.per_pass)
    return linear + attention_flop(spec, spec.window_tokens) + attention_flop(spec, spec.text_tokens)


def test_every_gemm_by_hand():
    found = {g.name: (g.m, g.n, g.k, g.flop) for g in gemms(ESCHER)}
    assert found == BLOCK | PER_PASS
    assert {g.name for g in gemms(ESCHER) if g.per_pass} == set(PER_PASS)
    assert len(gemms(ESCHER)) == len(found)  # each name once


def test_geometry_is_that_of_480x832():
    a_frame = (480 // 8 // 2) * (832 // 8 // 2)
    assert a_frame == 1560
    assert (ESCHER.query_tokens, ESCHER.window_tokens) == (3 * a_frame, 12 * a_frame)


def test_one_block_and_one_pass_match_the_pilot():
    assert block_flop(ESCHER) / 1e9 == pytest.approx(4640.50, rel=1e-4)
    time_proj = PER_PASS["time_proj"][3]  # the pilot charges it to every block
    assert (block_flop(ESCHER) + time_proj) / 1e9 == pytest.approx(4641.44, rel=1e-5)
    drift = (block_flop(ESCHER) + time_proj) / 1e9 / ESCHER.pilot["block_gflop"] - 1
    assert drift == pytest.approx(-0.00006, abs=0.00001)
    once = sum(PER_PASS[n][3] for n in PER_PASS if n.startswith("time"))
    assert once / 1e9 == pytest.approx(1.11, abs=0.005)


def test_bytes_read_each_operand_once_and_write_once():
    assert Gemm("x", 3, 5, 7).bytes_moved() == 2 * (3 * 7 + 7 * 5 + 3 * 5)
    assert Gemm("x", 3, 5, 7).bytes_moved(element_bytes=1) == 71
    assert Gemm("big", 2**17, 2**17, 2**17).flop == 2**52  # no 32-bit or float on the way


def test_batch_multiplies_tokens():
    two = from_json({**GOOD, "batch": 2}, "x")
    for one, both in zip(gemms(ESCHER), gemms(two), strict=True):
        timed = one.name.startswith("time_")
        assert both.m == one.m * (1 if timed else 2) and (both.n, both.k) == (one.n, one.k)


# ---- what a CPU host runs ----


def test_derived_spec():
    small = derive_for_cpu(ESCHER)
    assert (small.depth, small.query_tokens, small.window_tokens) == (1, 390, 1560)
    kept = ("hidden", "heads", "head_size", "ffn", "text_tokens", "time_tokens", "time_frequency", "batch", "chunks")
    assert all(getattr(small, n) == getattr(ESCHER, n) for n in kept)
    assert small.query_tokens * ESCHER.window_tokens == ESCHER.query_tokens * small.window_tokens  # Sq : Skv
    assert small.name != ESCHER.name and small.derived_from == ESCHER.name
    assert "40 -> 1" in small.derived_why and small.pilot is None  # no totals to calibrate against
    assert from_json(small.to_json(), "x") == small


@given(st.integers(1, 10**6), st.integers(1, 10**6), st.integers(1, 100))
def test_derived_spec_of_any_workload_is_a_workload(query, window, depth):
    spec = from_json({**GOOD, "query_tokens": query, "window_tokens": window, "depth": depth}, "x")
    small = derive_for_cpu(spec)
    assert from_json(small.to_json(), "x") == small
    assert small.depth == 1 and 1 <= small.query_tokens <= query and 1 <= small.window_tokens <= window
    assert all(g.flop > 0 for g in gemms(small))


# ---- specs that are wrong ----


def changed(**values):
    return {k: v for k, v in {**GOOD, **values}.items() if v is not ...}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (changed(heads=39), "heads x head_size is 39 x 128 = 4992, but hidden is 5120; the two must be equal"),
        (changed(depth=0), "depth is 0; expected a whole number from 1 to 10000000"),
        (changed(depth=-4), "depth is -4"),
        (changed(depth=True), "depth is True"),
        (changed(depth=1.5), "depth is 1.5"),
        (changed(depth="40"), "depth is '40'"),
        (changed(depth=None), "depth is None"),
        (changed(depth=10**7 + 1), "depth is 10000001"),
        (changed(query_tokens=10**30), "query_tokens is 1"),
        (changed(name=3), "name is 3; expected text"),
        (changed(title=None), "title is None; expected text"),
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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{\n "name": "x",,\n}', ":2:14: no valid JSON"),
        ("", ":1:1: no valid JSON"),
        ('{"depth": NaN}', "is missing"),
        (b'{"name": "\xff"}', "cannot be read"),
    ],
)
def test_bad_file(tmp_path, text, message):
    path = tmp_path / "my spec ü.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(WorkloadError) as caught:
        load(str(path))
    assert str(path) in str(caught.value) and message in str(caught.value) and "\n" not in str(caught.value)


def test_a_file_by_path(tmp_path):
    path = tmp_path / "mine ü.json"
    path.write_text(json.dumps(changed(name="mine", depth=2)), encoding="utf-8")
    assert (load(str(path)).name, load(str(path)).depth) == ("mine", 2)


@pytest.mark.parametrize("name", ["escher_14b_48op", "", "no/such.json", "report_config.json"])
def test_an_unknown_name_lists_the_names(name):
    with pytest.raises(WorkloadError, match="unknown workload .*; known: .*escher_14b_480p.*, or a .json file"):
        load(name)


def test_names_are_the_files_that_hold_a_geometry(tmp_path, monkeypatch):
    assert "escher_14b_480p" in names() and "report_config" not in names()
    assert all(load(n).name == n for n in names())
    for file, text in {"good": json.dumps(GOOD), "list": "[]", "number": "3", "null": "null", "bad": "{"}.items():
        (tmp_path / f"{file}.json").write_text(text, encoding="utf-8")
    monkeypatch.setattr(workload, "CONFIGS", tmp_path)
    assert names() == ["good"]


def test_a_configuration_that_is_no_workload_says_so():
    with pytest.raises(WorkloadError, match="report_config.json: unknown key"):
        load("report_config")
