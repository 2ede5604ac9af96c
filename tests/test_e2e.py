"""The whole model: what is timed is right, eager and compiled alternate, and what cannot run says why.

Compiled blocks are stood in for by functions, except in the slow tests.
"""

import ctypes
import itertools
import json
import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import TINY, TINY_SPECS, RecordingSession, compiles
from hypothesis import given
from hypothesis import strategies as st
from test_ops import MACHINE, Run
from test_timing import Harness

from escher_kernels import attention, e2e, model, ops, timing, workload
from escher_kernels.e2e import gaps, pass_limit, peak_bytes
from escher_kernels.records import to_line
from escher_kernels.timing import Budget, Machine, Prepared

pytestmark = pytest.mark.usefixtures("one_thread")

ROOT = Path(__file__).resolve().parent.parent
SPECS = TINY_SPECS
BUDGETS = {
    "quick": Budget("quick", block_s=0.002, case_s=4, search_s=6),
    "standard": Budget("standard", block_s=0.002, case_s=4, search_s=6),
    "full": Budget("full", block_s=0.002, case_s=4, search_s=6, blocks=12),
}
NOTHING_COMPILED = "unavailable: nothing was compiled, what ran was eager (is TORCHDYNAMO_DISABLE set?)"
COMPILE_MODES = e2e.MODES["cpu"]
MODES_OF = e2e.modes


@pytest.fixture(autouse=True)
def small_anchors(monkeypatch):
    monkeypatch.setitem(timing.ANCHOR_N, "cpu", 128)
    monkeypatch.setitem(timing.ANCHOR_COPY_BYTES, "cpu", 2**20)
    monkeypatch.setattr(timing.CpuTimer, "warm_window_s", 0.05)


@pytest.fixture
def compiled_as(monkeypatch):
    """`compiled_as(make)`: compiled blocks are what `make(net, mode)` returns; the modes asked for."""
    asked = []

    def set_(make):
        monkeypatch.setattr(model, "graphs_compiled", lambda t: 1)
        monkeypatch.setattr(model, "compiled_blocks", lambda t, net, mode: asked.append(mode) or make(net, mode))
        return asked

    return set_


def right(net, mode):
    """What a compiler that does nothing makes of the blocks."""
    return [lambda *a, block=block: block(*a) for block in net.blocks]


@pytest.fixture(autouse=True)
def every_mode(monkeypatch):
    """All modes at every budget, so that one short budget serves the tests."""
    monkeypatch.setattr(e2e, "modes", lambda kind, budget: e2e.MODES[kind])


def measure(spec=TINY, budget="quick", machine=MACHINE, real=False):
    torch.manual_seed(0)
    run = Run(BUDGETS[budget], real)
    e2e.measure(run.session, machine, spec)
    for r in run.records:
        assert "NaN" not in to_line(r)
    run.values = {r.case: r for r in run.records if r.role == "probe"}
    return run


def compile_rows(run):
    return [r for r in run.records if r.case == "compile"]


# ---- rows ----


@pytest.mark.parametrize("spec", [workload.load(), *SPECS.values()], ids=lambda s: f"{s.name}-{s.batch}-{s.cache}")
def test_a_row_declares_the_work_of_a_pass(spec):
    rows = e2e.cases(spec, "bf16")
    assert [c.name for c in rows] == ["eager", "compiled"]
    stream = 2 * spec.batch * spec.query_tokens * spec.hidden
    moved = workload.weight_bytes(spec) + workload.cache_bytes(spec) + 2 * stream
    for c in rows:
        assert (c.flop, c.bytes_moved, c.role) == (workload.pass_flop(spec), moved, "case")
        assert c.params == {"dtype": "bf16", "depth": spec.depth, "query_tokens": spec.query_tokens,
                            "window_tokens": spec.window_tokens}  # fmt: skip


@pytest.mark.parametrize("name", SPECS)
def test_eager_and_compiled_are_right_and_timed(compiled_as, name):
    asked = compiled_as(right)
    run = measure(SPECS[name])
    assert asked == ["max-autotune"]
    for row in ("eager", "compiled"):
        assert run.verdicts(row) == [True] and [r.block for r in run.timed(row)] == list(range(6))
        rows = run.timed(row)
        assert {(r.flop, r.bytes_moved) for r in rows} == {
            (workload.pass_flop(SPECS[name]), e2e.compulsory_bytes(SPECS[name]))
        }
    assert run.of("eager")[0].error["check"] == "branches"
    assert run.of("compiled")[0].error["check"] == "against eager"
    assert {r.backend for r in run.timed("eager")} == {"eager, attention sdpa_flash"}
    assert {r.backend for r in run.timed("compiled")} == {"torch.compile, mode max-autotune, attention sdpa_flash"}
    assert run.timed("compiled")[0].params["mode"] == "max-autotune"
    assert {r.params["attention"] for n in ("eager", "compiled") for r in run.timed(n)} == {"sdpa_flash"}


@pytest.mark.parametrize(("budget", "blocks", "each"), [("quick", 6, 1), ("standard", 6, 4), ("full", 12, 2)])
def test_blocks_alternate_and_24_chunks_are_kept(compiled_as, budget, blocks, each):
    compiled_as(right)
    run = measure(budget=budget)
    rows = [r for r in run.records if r.samples_s and r.role == "case"]
    assert [r.case for r in rows] == ["eager", "compiled"] * blocks
    starts = [r.started_s for r in rows]
    assert starts == sorted(starts) and len(set(starts)) == len(starts)
    assert [(r.case, r.block) for r in rows] == [(n, b) for b in range(blocks) for n in ("eager", "compiled")]
    for name in ("eager", "compiled"):
        assert {len(r.samples_s) for r in run.timed(name)} == {each}
        assert {r.calls_per_sample for r in run.timed(name)} == {1}
        assert budget == "quick" or sum(len(r.samples_s) for r in run.timed(name)) == TINY.chunks - 1
        assert all(r.flags == () for r in run.timed(name))


@pytest.mark.parametrize(("budget", "each"), [("quick", 1), ("standard", 4), ("full", 2)])
def test_all_chunks_of_a_row_fit_its_time(budget, each):
    net = model.Model(torch, TINY, torch.bfloat16, "cpu")
    item = e2e.prepare(SimpleNamespace(budget=BUDGETS[budget]), MACHINE, net, e2e.cases(TINY, "bf16")[0], None, "eager")
    assert item.per_block == each and item.limit_s * each == e2e.LIMIT_S[budget]


def test_each_call_is_the_next_chunk_and_compiled_blocks_are_used(monkeypatch):
    net = model.Model(torch, TINY, torch.bfloat16, "cpu")
    ran, marks = [], []
    real = net.run
    net.run = lambda chunk, blocks=None: ran.append((chunk, blocks)) or real(chunk, blocks)
    blocks = right(net, "")
    session = SimpleNamespace(budget=BUDGETS["quick"])
    monkeypatch.setattr(e2e, "step", lambda t: marks.append(1))
    with torch.no_grad():
        for made in (None, blocks):
            item = e2e.prepare(session, MACHINE, net, e2e.cases(TINY, "bf16")[0], made, "x")
            ran.clear(), marks.clear()
            for turn in range(7):
                item.call(turn)
            assert ran == [(turn, made) for turn in range(7)]
            assert len(marks) == (7 if made else 0)  # of graphs each pass must be told apart


def test_measured_on_the_clock_of_this_host_in_fp16(compiled_as):
    compiled_as(right)
    run = measure(replace(TINY, depth=1), machine=replace(MACHINE, dtype="fp16"), real=True)
    for row in ("eager", "compiled"):
        assert run.verdicts(row) == [True] and len(run.timed(row)) == 6
        assert all(s > 0 for r in run.timed(row) for s in r.samples_s)


def test_anchors_surround_what_is_timed(compiled_as):
    compiled_as(right)
    roles = [k for k, _ in itertools.groupby(r.role for r in measure().records)]
    assert roles == ["probe", "warmup", "probe", "anchor", "probe", "anchor", "case", "anchor"]


def test_the_flop_counter_stands_beside_what_is_declared(compiled_as):
    compiled_as(right)
    for spec in SPECS.values():
        row = measure(spec).values["flop.counter"]
        assert (row.value, row.unit) == (workload.pass_flop(spec), "FLOP")
        assert row.params["declared"] == row.params["pass"] == workload.pass_flop(spec)
        assert row.params["block"] == workload.block_flop(spec) and "meta" in row.backend


# ---- right first ----


def blocks_with(change):
    """Compiled blocks whose output is changed: change(block, right output, index, arguments)."""

    def make(net, mode):
        def one(index, block):
            return lambda *a: change(block, block(*a), index, a)

        return [one(i, b) for i, b in enumerate(net.blocks)]

    return make


def only_first(out, index, change):
    return change(out) if index == 0 else out


def without_a_write(net, mode, slot=None):
    """Blocks that leave the ring buffer alone, or write another slot of it."""
    f = model.functions(torch)

    def one(block):
        def run(x, e, cosine, sine, positions):
            real = f.cache_write
            moved = (positions + 12 * (slot or 0)) % TINY.window_tokens
            f.cache_write = lambda keys, values, k, v, at: real(keys, values, k, v, moved) if slot else None
            try:
                return block(x, e, cosine, sine, positions)
            finally:
                f.cache_write = real

        return run

    return [one(b) for b in net.blocks]


def baked_in(net, mode):
    """A graph that holds the positions of the call it was made of, and writes there for ever."""
    first = []

    def one(block):
        def run(x, e, cosine, sine, positions):
            first.append(positions)
            return block(x, e, cosine, sine, first[0])

        return run

    return [one(b) for b in net.blocks]


def forgets(after):
    """Right for `after` passes, then nothing is computed: the last output is handed out again."""

    def make(net, mode):
        calls, last = [], []

        def final(*a):
            calls.append(1)
            if len(calls) <= after:
                last[:] = [net.blocks[-1](*a)]
            return last[0]

        return [*right(net, mode)[:-1], final]

    return make


WRONG = {
    "zeros": blocks_with(lambda block, out, i, a: only_first(out, i, torch.zeros_like)),
    "NaN": blocks_with(lambda block, out, i, a: only_first(out, i, lambda t: t * math.nan)),
    "NaN in the last token": blocks_with(
        lambda block, out, i, a: out.index_fill(1, torch.tensor([11]), math.nan) if i else out
    ),
    "input unchanged": blocks_with(lambda block, out, i, a: a[0]),
    "the last block left out": blocks_with(lambda block, out, i, a: a[0] if i else out),
    "scaled by 1.03": blocks_with(lambda block, out, i, a: out * 1.03),
    "tokens of the neighbour": blocks_with(lambda block, out, i, a: out.roll(1, 1)),
    "one block's weights for all": lambda net, mode: [right(net, mode)[0]] * len(net.blocks),
    "no time embedding": blocks_with(lambda block, out, i, a: block(a[0], a[1] * 0, *a[2:])),
    "never written": blocks_with(lambda block, out, i, a: torch.full_like(out, 1e-3)),
    "ring buffer not written": without_a_write,
    "another slot written": lambda net, mode: without_a_write(net, mode, slot=1),
    "the first chunk's slot written for ever": baked_in,
}  # fmt: skip


@pytest.mark.parametrize("how", WRONG)
def test_a_wrong_compiled_model_has_no_time_and_the_next_mode_is_tried(compiled_as, how):
    asked = compiled_as(lambda net, mode: WRONG[how](net, mode) if mode == "max-autotune" else right(net, mode))
    run = measure()
    assert asked == ["max-autotune", "default"]
    oks = {}
    for r in compile_rows(run):
        oks.setdefault(r.params["mode"], []).append(r.error["ok"])
    assert False in oks["max-autotune"] and all(oks["default"]), oks
    assert {r.params["mode"] for r in run.timed("compiled")} == {"default"} and len(run.timed("compiled")) == 6
    assert run.verdicts("compiled") == run.verdicts("eager") == [True]


@pytest.mark.parametrize("how", WRONG)
def test_wrong_in_every_mode_is_unavailable_and_eager_is_still_right(compiled_as, how):
    asked = compiled_as(WRONG[how])
    run = measure()
    assert tuple(asked) == COMPILE_MODES
    assert "torch.compile is unavailable" in run.skipped("compiled")
    assert run.verdicts("eager") == [True] and len(run.timed("eager")) == 6
    assert "memory.compiled" not in run.values


@pytest.mark.parametrize("passes", [2, 3, 5])
def test_a_compiled_model_that_stops_working_is_caught(compiled_as, passes):
    compiled_as(forgets(passes + 1))  # one call more is the block that is compared alone
    run = measure()
    wrong = [r for r in run.records if r.error and not r.error["ok"]]
    assert wrong and {r.case for r in wrong} <= {"compile", "compiled"}
    assert run.verdicts("eager") == [True]


@pytest.mark.parametrize("kind", ["gelu", "rope", "residual_gate", "cache_write"])
def test_a_wrong_eager_model_leaves_neither_row_a_time(monkeypatch, compiled_as, kind):
    f = model.functions(torch)
    wrong = {
        "gelu": lambda x: x, "rope": lambda x, c, s: x, "residual_gate": lambda x, y, g: x + y,
        "cache_write": lambda keys, values, k, v, at: None,
    }[kind]  # fmt: skip
    monkeypatch.setattr(f, kind, wrong)
    compiled_as(right)
    run = measure()
    assert run.verdicts("eager") == [False] and run.timed("eager") == run.timed("compiled") == []


def test_outputs_are_poisoned_before_they_are_checked():
    net = model.Model(torch, TINY, torch.bfloat16, "cpu")
    item = e2e.prepare(
        SimpleNamespace(budget=BUDGETS["quick"]), MACHINE, net, e2e.cases(TINY, "bf16")[1], right(net, ""), "x"
    )
    kept = []
    with torch.no_grad():
        item.call(0)
        real = net.run
        for chunk in range(4):  # from then on every chunk writes what is there, and has the same output
            kept[:] = [real(chunk)]
        net.run = lambda turn, blocks=None: kept[0] if blocks else real(turn)
        item.call(4)
        assert item.check(4, False)["ok"]
        item.poison()
        item.call(5)
        assert not item.check(5, False)["ok"] and bool(kept[0].isnan().all())


# ---- compiling that fails ----

HINT = model.compile_failure(torch, ValueError("x")).removeprefix("ValueError: x")  # where a path here holds a space


def test_what_ran_eagerly_is_not_compiled(monkeypatch, compiled_as):
    asked = compiled_as(right)
    monkeypatch.setattr(model, "graphs_compiled", lambda t: 0)
    run = measure()
    assert tuple(asked) == COMPILE_MODES
    assert {r.skipped for r in compile_rows(run)} == {NOTHING_COMPILED} and len(compile_rows(run)) == len(COMPILE_MODES)
    assert "torch.compile is unavailable" in run.skipped("compiled") and "memory.compiled" not in run.values
    assert run.verdicts("eager") == [True] and len(run.timed("eager")) == 6


def test_graphs_are_those_since_the_counters_were_cleared(monkeypatch, compiled_as):
    def make(net, mode):
        assert not model.graphs_compiled(torch)  # those of others are gone
        torch._dynamo.utils.counters["stats"]["unique_graphs"] += 3
        return right(net, mode)

    real = model.graphs_compiled
    compiled_as(make)
    monkeypatch.setattr(model, "graphs_compiled", real)
    torch._dynamo.utils.counters["stats"]["unique_graphs"] = 7
    assert {r.params["graphs"] for r in compile_rows(measure())} == {3}
    torch._dynamo.utils.counters.clear()


@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("\n  InvalidCxxCompiler: No working C++ compiler found\nmore"),
        FileNotFoundError("g++"),
        AssertionError(),
        ImportError("no triton"),
    ],
)
def test_compiling_that_fails_in_every_mode_is_a_reason_and_eager_is_timed(compiled_as, error, late):
    def fail(*_):
        raise error

    asked = compiled_as((lambda net, mode: [fail] * 2) if late else (lambda net, mode: fail()))
    run = measure()
    assert tuple(asked) == COMPILE_MODES
    rows = compile_rows(run)
    assert [r.params["mode"] for r in rows] == list(COMPILE_MODES)
    first = (str(error).strip().splitlines() or ["no message"])[0]
    assert {r.skipped for r in rows} == {f"unavailable: {type(error).__name__}: {first}{HINT}"}
    assert "torch.compile is unavailable" in run.skipped("compiled")
    assert run.verdicts("eager") == [True] and len(run.timed("eager")) == 6


@pytest.mark.parametrize("passes", range(6))
def test_a_compiled_model_that_fails_later_leaves_eager_right(compiled_as, passes):
    def make(net, mode):
        left = iter(range(passes))

        def last(*a):
            if next(left, None) is None:
                raise RuntimeError("overwritten by a subsequent run")
            return net.blocks[-1](*a)

        return [*right(net, mode)[:-1], last]

    compiled_as(make)
    run = measure()
    failed = [r.skipped for r in run.records if r.skipped and "subsequent" in r.skipped]
    assert failed and run.timed("compiled") == []
    assert run.verdicts("eager") == [True] and len(run.timed("eager")) == 6


def test_the_mode_after_one_that_fails_is_named(compiled_as):
    def make(net, mode):
        if mode == "max-autotune":
            raise RuntimeError("no autotuning")
        return right(net, mode)

    compiled_as(make)
    run = measure()
    first, *others = compile_rows(run)
    assert (first.params["mode"], first.skipped) == ("max-autotune", f"unavailable: RuntimeError: no autotuning{HINT}")
    assert {r.params["graphs"] for r in others} == {1}
    assert {r.params["mode"] for r in others} == {"default"} and all(r.unit == "s" and r.value >= 0 for r in others)
    assert {r.params["mode"] for r in run.timed("compiled")} == {"default"}


def test_modes_are_in_order():
    assert MODES_OF("gpu", "standard") == e2e.MODES["gpu"] and MODES_OF("cpu", "full") == e2e.MODES["cpu"]
    assert MODES_OF("gpu", "quick") == MODES_OF("cpu", "quick") == ("default",)
    assert e2e.MODES["gpu"] == ("max-autotune", "reduce-overhead", "default")
    assert e2e.MODES["cpu"] == ("max-autotune", "default")  # graphs are a GPU's


@pytest.mark.parametrize("depth", [1, 2, 10, 11, 40, 90])
def test_the_bound_of_a_pass_grows_with_its_depth(depth):
    assert pass_limit(depth) == pytest.approx(2**-6 * (1 if depth <= 10 else math.sqrt(depth / 10)))


# ---- attention ----


def choose(spec=TINY, machine=MACHINE):
    run = Run()
    torch.manual_seed(0)
    with torch.no_grad():
        name = e2e.choose_attention(run.session, machine, spec, torch.bfloat16)
    return name, {r.case.removeprefix("attention."): r for r in run.records}


def test_backends_are_tried_in_order_and_the_first_that_is_right_is_taken():
    name, rows = choose()
    assert name == "sdpa_flash" and list(rows) == ["aiter", "flash_attn", "sdpa_flash"]
    assert {n: r.skipped for n, r in rows.items() if r.skipped} == {
        n: attention.NOT_ON_CPU[n] for n in ("aiter", "flash_attn")
    }
    assert rows["sdpa_flash"].error["ok"] and "flash_attention" in rows["sdpa_flash"].backend
    assert all(r.role == "probe" for r in rows.values())


def test_a_backend_that_is_wrong_is_passed_over(monkeypatch):
    real = attention.attend
    monkeypatch.setattr(
        attention, "attend",
        lambda t, n: (lambda q, k, v: real(t, n)(q, k, v) * 1.1) if n == "sdpa_flash" else real(t, n),
    )  # fmt: skip
    name, rows = choose()
    assert name == "sdpa_math" and list(rows) == list(attention.BACKENDS)
    assert not rows["sdpa_flash"].error["ok"] and rows["sdpa_math"].error["ok"]


def test_a_backend_that_is_not_what_ran_is_passed_over(monkeypatch):
    monkeypatch.setattr(attention, "what_ran", lambda t, call: call() or "math (bmm, softmax, bmm)")
    name, rows = choose()
    assert name == "sdpa_math" and rows["sdpa_flash"].backend == "math (bmm, softmax, bmm)"


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), AssertionError("a package's own check")])
def test_a_backend_that_raises_is_passed_over(monkeypatch, error):
    real = attention.attend

    def attend(t, name):
        def fail(*_):
            raise error

        return fail if name == "sdpa_flash" else real(t, name)

    monkeypatch.setattr(attention, "unavailable", lambda t, k, n, *_: None if n.startswith("sdpa_") else "not here")
    monkeypatch.setattr(attention, "attend", attend)
    name, rows = choose()
    assert name == "sdpa_math" and rows["sdpa_flash"].skipped == f"{type(error).__name__}: {error}"


class Full(Machine):
    def free_bytes(self):
        return 30_000


def test_a_backend_that_does_not_fit_is_passed_over_with_both_figures(monkeypatch):
    monkeypatch.setattr(attention, "unavailable", lambda t, k, n, *_: None if n == "sdpa_math" else "not here")
    name, rows = choose(machine=Full(torch, "cpu", "cpu", "bf16", 2**30, 2**14, (0,)))
    assert name == attention.DEFAULT and list(rows) == list(attention.BACKENDS)
    assert "sdpa_math needs" in rows["sdpa_math"].skipped and "3e-05 GB are free" in rows["sdpa_math"].skipped


def test_where_no_backend_is_there_torch_chooses(monkeypatch, compiled_as):
    monkeypatch.setattr(attention, "unavailable", lambda *_: "not here")
    compiled_as(right)
    run = measure()
    assert {r.backend for r in run.timed("eager")} == {"eager, attention sdpa"}
    assert [r.skipped for r in run.records if r.case.startswith("attention.")] == ["not here"] * len(attention.BACKENDS)
    assert run.verdicts("eager") == [True]


def test_attention_is_forced_in_every_pass(monkeypatch, compiled_as):
    real, seen = attention.attend, set()
    cuda = torch.backends.cuda

    def attend(t, name):
        run = real(t, name)

        def call(*a):
            seen.add((name, cuda.flash_sdp_enabled(), cuda.math_sdp_enabled()))
            return run(*a)

        return call

    monkeypatch.setattr(attention, "attend", attend)
    monkeypatch.setattr(attention, "unavailable", lambda t, k, n, *_: None if n == "sdpa_math" else "not here")
    compiled_as(right)
    assert len(measure().timed("eager")) == 6
    assert seen == {("sdpa_math", False, True)}


# ---- memory ----


def fake_gpu(peak, calls=None):
    calls = [] if calls is None else calls
    cuda = SimpleNamespace(
        max_memory_allocated=lambda: calls.append("read") or peak, synchronize=lambda: calls.append("wait"),
        reset_peak_memory_stats=lambda: calls.append("reset"),
    )  # fmt: skip
    return replace(MACHINE, torch=SimpleNamespace(cuda=cuda), kind="gpu", device="cuda")


@pytest.mark.parametrize(
    ("status", "bytes_", "what"),
    [
        (
            "Name:\tx\nVmPeak:\t 999 kB\nVmHWM:\t    1234 kB\nVmRSS:\t 77 kB\n",
            1234 * 1024,
            "resident set of the process",
        ),
        ("Name:\tx\nVmRSS:\t 77 kB\n", None, "no VmHWM"),
        ("", None, "no VmHWM"),
        (None, None, "No such file or directory"),
    ],
)
def test_the_peak_of_a_host(tmp_path, status, bytes_, what):
    if status is not None:
        (tmp_path / "status").write_text(status, encoding="ascii")
    found = peak_bytes(MACHINE, tmp_path)
    assert found[0] == bytes_ and what in found[1]


def test_the_peak_of_this_host_is_that_of_the_process():
    e2e.reset_peak(MACHINE)
    peak, what = peak_bytes(MACHINE)
    assert peak > 2**25 and what == "resident set of the process"


@pytest.mark.parametrize(
    ("status", "used"), [("VmHWM:\t 99 kB\nVmRSS:\t  77 kB\n", 77 * 1024), ("VmHWM:\t 9 kB\n", 0), (None, 0)]
)
def test_what_a_host_uses_before(tmp_path, status, used):
    if status is not None:
        (tmp_path / "status").write_text(status, encoding="ascii")
    assert e2e.used_bytes(MACHINE, tmp_path) == used
    assert 2**25 < e2e.used_bytes(MACHINE) <= peak_bytes(MACHINE)[0] + 2**20


def test_what_a_gpu_uses_before_is_what_is_allocated():
    machine = fake_gpu(99)
    machine.torch.cuda.memory_allocated = lambda: 345
    assert e2e.used_bytes(machine) == 345


def test_the_peak_of_a_gpu_and_that_0_is_none():
    # ROCm/pytorch#703: all statistics are 0 where another process allocated
    assert peak_bytes(fake_gpu(12345)) == (12345, "allocated on the device")
    assert peak_bytes(fake_gpu(0)) == (None, "the allocator reports a peak of 0")


@pytest.mark.parametrize(
    ("peak", "before", "value"), [(12345, 0, 12345.0), (12345, 345, 12000.0), (12345, 20000, 0.0), (0, 5, None)]
)
def test_a_peak_is_that_of_a_pass_that_is_not_the_first_beyond_what_there_was(peak, before, value):
    calls, session = [], RecordingSession()
    machine = fake_gpu(peak, calls)
    sizes = {"weights_bytes": 7, "before_bytes": before}
    e2e._record_peak(session, machine, "memory.eager", sizes, lambda: calls.append("pass"), ", and more")
    assert calls == ["pass", "reset", "pass", "wait", "read"]
    if peak:
        ((case, fields),) = session.written
        assert fields == {"value": value, "unit": "B"} and case.role == "probe"
        assert case.params == {"what": "allocated on the device, and more", **sizes}
    else:
        assert session.written == [] and session.skipped == [("memory.eager", "the allocator reports a peak of 0")]


def test_a_pass_that_fails_is_the_reason_of_its_peak():
    session = RecordingSession()

    def fail():
        raise RuntimeError("\nout of memory\nmore")

    e2e._record_peak(session, fake_gpu(1), "memory.eager", {"before_bytes": 0}, fail)
    assert session.written == [] and session.skipped == [("memory.eager", "RuntimeError: out of memory")]


LARGER = replace(TINY, hidden=1024, head_size=512, ffn=4096, window_tokens=2400, query_tokens=12)


@pytest.mark.parametrize("spec", [*SPECS.values(), LARGER], ids=lambda s: f"{s.hidden}-{s.batch}-{s.cache}")
def test_memory_stands_beside_weights_and_cache(compiled_as, spec):
    compiled_as(right)
    ctypes.CDLL(None).malloc_trim(0)  # what earlier tests freed would serve the model, and nothing would grow
    run = measure(spec)
    for row in ("memory.eager", "memory.compiled"):
        found = run.values[row]
        needed = found.params["weights_bytes"] + found.params["cache_bytes"]
        assert found.unit == "B" and 0 <= found.value < needed + 2**26  # the interpreter and torch are not the model
        assert found.params["before_bytes"] > 2**25
        if spec is LARGER:  # what an allocator had kept of others may serve a small model
            assert needed > 2**26 and found.value > 0.8 * needed
        assert found.params["cache_bytes"] == workload.cache_bytes(spec)
        assert found.params["weights_bytes"] >= workload.weight_bytes(spec)
        assert found.params["what"] == "resident set of the process"


class FakeGpu:
    """torch as on a machine whose GPU is the CPU."""

    def __init__(self):
        self.cuda = SimpleNamespace(
            memory_allocated=lambda: 1000, max_memory_allocated=lambda: 5000, reset_peak_memory_stats=lambda: None,
            synchronize=lambda: None, mem_get_info=lambda: (2**30, 2**30),
        )  # fmt: skip

    def __getattr__(self, name):
        return getattr(torch, name)


@pytest.mark.parametrize("mode", e2e.MODES["gpu"])
def test_memory_of_replayed_graphs_is_said_to_be_left_out(monkeypatch, compiled_as, mode):
    def make(net, asked):
        if asked != mode:
            raise RuntimeError("not this one")
        return right(net, asked)

    compiled_as(make)
    monkeypatch.setattr(attention, "unavailable", lambda t, k, n, *_: None if n == "sdpa_math" else "not here")
    monkeypatch.setattr(e2e, "idle_s", lambda *_: 0.0)
    session = RecordingSession()
    e2e.measure(session, replace(MACHINE, torch=FakeGpu(), kind="gpu"), TINY)
    rows = {case.name: (case.params, fields) for case, fields in session.written if case.name.startswith("memory.")}
    assert {fields["value"] for _, fields in rows.values()} == {4000.0}
    assert {params["before_bytes"] for params, _ in rows.values()} == {1000}
    note = "" if mode == "default" else ", without what replayed graphs keep in pools of their own"
    assert rows["memory.eager"][0]["what"] == "allocated on the device"
    assert rows["memory.compiled"][0]["what"] == f"allocated on the device{note}"
    assert [item.case.name for item in session.blocks] == ["eager", "compiled"]


# ---- gaps ----

spans = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 15)).map(lambda s: (s[0], s[0] + s[1])), min_size=1)


@given(spans)
def test_gaps_are_what_no_span_covers(made):
    covered = {t for start, end in made for t in range(start, end)}
    first, last = min(s for s, _ in made), max(e for _, e in made)
    assert gaps(sorted((float(s), float(e)) for s, e in made)) == last - first - len(covered)


def test_gaps_of_nothing():
    with pytest.raises(ValueError, match="no kernel"):
        gaps([])


class FakeProfiler:
    """A profiler that saw these (device, start, end) in microseconds."""

    ProfilerActivity = SimpleNamespace(CUDA="CUDA", CPU="CPU")

    def __init__(self, seen):
        self.seen, self.activities = seen, None

    def profile(self, activities):
        self.activities = activities
        return self

    def __enter__(self):
        return self

    def __exit__(self, *_): ...

    def events(self):
        return [
            SimpleNamespace(device_type=f"DeviceType.{kind}", time_range=SimpleNamespace(start=start, end=end))
            for kind, start, end in self.seen
        ]


def idle(seen, passes=3):
    profiler, calls = FakeProfiler(seen), []
    fake = SimpleNamespace(profiler=profiler, cuda=SimpleNamespace(synchronize=lambda: calls.append("wait")))
    found = e2e.idle_s(fake, lambda: calls.append("pass"), passes)
    assert calls == ["pass"] * passes + ["wait"] and profiler.activities == ["CUDA"]
    return found


def test_idle_time_is_that_of_the_device_a_pass():
    kernels = [("CUDA", 30, 50), ("CUDA", 0, 10), ("CUDA", 5, 20), ("CUDA", 110, 120)]  # idle 20..30 and 50..110
    assert idle(kernels) == pytest.approx(70e-6 / 3)
    host = [("CPU", 20, 110), ("CUDA", 60, 60)]  # the host's own work, and a marker without length
    assert idle(kernels + host) == pytest.approx(70e-6 / 3)
    assert idle(kernels, passes=1) == pytest.approx(70e-6)
    with pytest.raises(ValueError, match="no kernel"):
        idle(host)


@pytest.mark.parametrize("error", [None, ValueError("the profiler saw no kernel"), RuntimeError("no profiler\nmore")])
@pytest.mark.parametrize("made", [True, False])
def test_gaps_are_recorded_or_a_reason(monkeypatch, error, made):
    net = model.Model(torch, TINY, torch.bfloat16, "cpu")
    ran, session = [], RecordingSession()
    net.run = lambda chunk, blocks=None: ran.append(blocks)

    def idle_s(t, call):
        call()
        if error:
            raise error
        return 0.25

    monkeypatch.setattr(e2e, "idle_s", idle_s)
    blocks = right(net, "")
    e2e._record_gaps(session, torch, net, e2e.Compiled(blocks, "default", 1.0, 1) if made else None)
    names = ["gaps.eager", *(["gaps.compiled"] if made else [])]
    assert ran == [None, blocks][: len(names)]
    if error:
        assert session.skipped == [(n, str(error).splitlines()[0]) for n in names]
    else:
        assert [(c.name, f) for c, f in session.written] == [(n, {"value": 0.25, "unit": "s"}) for n in names]


# ---- what does not fit ----


@pytest.mark.parametrize("where", ["anchors", "attention", "model", "first pass"])
def test_no_memory_is_the_reason_of_both_rows(monkeypatch, compiled_as, where):
    def fail(*_, **__):
        raise RuntimeError("CUDA out of memory. Tried to allocate 20 GiB.\nmore")

    compiled_as(right)
    owner, name = {
        "anchors": (timing, "anchors"), "attention": (model, "tensor"), "model": (e2e, "Model"),
        "first pass": (model.Model, "run"),
    }[where]  # fmt: skip
    monkeypatch.setattr(model, "counted_flop", lambda *_: {"block": 1, "time": 1, "pass": 1})
    monkeypatch.setattr(owner, name, fail)
    run = measure()
    for row in ("eager", "compiled"):
        assert run.skipped(row) == "CUDA out of memory. Tried to allocate 20 GiB."


# ---- what the session gives this family ----


def test_samples_of_a_block_can_be_fixed():
    h = Harness()
    h.session.run_blocks([h.item("fixed", 0.001, per_block=4), h.item("free", 0.001), h.item("slow", 0.5, per_block=2)])
    assert {len(r.samples_s) for r in h.timed("fixed")} == {4} and {len(r.samples_s) for r in h.timed("slow")} == {2}
    assert {len(r.samples_s) for r in h.timed("free")} != {4}
    assert [len(h.timed(n)) for n in ("fixed", "free", "slow")] == [6, 6, 6]


@pytest.mark.parametrize(("limit_s", "blocks"), [(None, 0), (60.0, 6), (29.0, 4), (21.1, 3), (20.9, 0)])
def test_a_case_can_have_a_limit_of_its_own(limit_s, blocks):
    h = Harness()  # the budget gives a case 20 s
    h.session.run_blocks([h.item("x", 7.0, limit_s=limit_s), h.item("y", 0.01, limit_s=0.02)])
    assert len(h.timed("x")) == blocks
    if blocks == 0:
        assert f"a case may take {limit_s or 20:.3g} s" in h.of("x")[0].skipped
    assert "a case may take 0.02 s" in h.of("y")[0].skipped


def test_a_context_is_open_in_every_call_and_opened_once_a_block():
    h = Harness()
    log, is_open = [], [0]

    class Inside:
        def __enter__(self):
            is_open[0] += 1
            log.append("open")

        def __exit__(self, *_):
            is_open[0] -= 1

    item = h.item("x", 0.01, per_block=4, check=lambda turn, full: log.append(("check", is_open[0])) or {"ok": True})
    real = item.call
    item.call = lambda turn: log.append(("call", is_open[0])) or real(turn)
    item.inside = Inside
    before_blocks = []
    h.session.progress = lambda what, always=True: (
        before_blocks or "6 blocks" in what and before_blocks.append(len(log))
    )
    h.session.run_blocks([item])
    assert {entry for entry in log if entry != "open" and entry[0] == "call"} == {("call", 1)}
    assert {entry for entry in log if entry != "open" and entry[0] == "check"} == {("check", 0)}
    assert log[before_blocks[0] :].count("open") == 6 and is_open == [0]


def test_a_context_is_closed_when_its_call_raises():
    h = Harness()
    closed = []

    class Inside:
        def __enter__(self): ...

        def __exit__(self, *_):
            closed.append(1)

    def call(_):
        raise RuntimeError("no kernel")

    h.session.run_blocks([Prepared(timing.Case("x"), call=call, inside=Inside)])
    assert closed == [1] and h.of("x")[0].skipped == "RuntimeError: no kernel"


# ---- really compiled ----


@pytest.fixture
def fresh_compiler(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@compiles
@pytest.mark.slow
def test_compiled_is_measured(fresh_compiler):
    run = measure(budget="standard")
    rows = compile_rows(run)
    assert rows and all(r.error["ok"] and r.params["graphs"] == 1 and r.value > 0 for r in rows), rows
    assert {r.error["check"] for r in rows} >= {"compiled block", "compiled pass"}
    assert run.verdicts("compiled") == run.verdicts("eager") == [True]
    assert [len(r.samples_s) for r in run.timed("compiled")] == [4] * 6
    assert all(r.params["mode"] in COMPILE_MODES for r in run.timed("compiled"))


def compiling():
    """What compiling one small model says, as a line: right, wrong, or the reason. Run in a process of its own."""
    torch.set_num_threads(1)
    run = Run()
    net = model.Model(torch, TINY, torch.bfloat16, "cpu", "sdpa_flash")
    with model.inference(torch, "sdpa_flash"):
        made = e2e.compile_model(run.session, MACHINE, net, ("default",))
    rows = compile_rows(run)
    if made is None:
        return {"result": "reason" if all(r.skipped for r in rows) else "wrong", "said": [r.skipped for r in rows]}
    return {"result": "right", "said": [r.error["ok"] for r in rows], "graphs": made.graphs}


def compiling_an_operation():
    """The same of one operation, which is one file to compile."""
    torch.set_num_threads(1)
    run = Run()
    norm = next(op for op in workload.ops(TINY) if op.name == "norm.self")
    with torch.no_grad():
        operands = ops.Operands(torch, MACHINE, TINY, torch.bfloat16)
        run.session.run_blocks([ops.ready(torch, operands, norm, "bf16", ops.COMPILED)])
    right = run.verdicts("norm.self.compiled")
    said = [r.skipped for r in run.of("norm.self.compiled") if r.skipped]
    result = "reason" if said else "right" if right == [True] else "wrong"
    return {"result": result, "said": said or right, "graphs": model.graphs_compiled(torch)}


def both_families():
    """`compiling()`, and family 4: the reasons of its compiled rows, and blocks of its default rows."""
    found = compiling()
    timing.ANCHOR_N["cpu"], timing.ANCHOR_COPY_BYTES["cpu"] = 128, 2**20
    run = Run()
    ops.measure(run.session, MACHINE, TINY)
    rows = {path: [c.name for c in ops.cases("cpu", "bf16", TINY) if c.params["path"] == path]
            for path in (ops.DEFAULT, ops.COMPILED)}  # fmt: skip
    found["reasons"] = [run.skipped(name) for name in rows[ops.COMPILED]]
    return found | {"timed": [len(run.timed(name)) for name in rows[ops.DEFAULT]]}


def in_a_process(what=compiling, **environment):
    """`what()` in a fresh interpreter with that environment, None to unset."""
    merged = {**os.environ, "PYTHONIOENCODING": "utf-8", **environment}
    code = f'import sys, json; sys.path.insert(0, "tests")\nimport test_e2e\nprint(json.dumps(test_e2e.{what.__name__}()))'
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env={k: v for k, v in merged.items() if v is not None},
        capture_output=True, text=True, encoding="utf-8", timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


@compiles
@pytest.mark.slow
@pytest.mark.parametrize("place", ["a b/ü", "domain"])
def test_odd_paths_give_a_right_result_or_a_reason_and_never_a_wrong_one(tmp_path, place):
    # pytorch/pytorch#135954, #110933: paths that a command line did not quote, user names with a backslash
    if place == "domain":
        environment = {"TORCHINDUCTOR_CACHE_DIR": None, "LOGNAME": "DOMAIN\\user", "TMPDIR": str(tmp_path)}
        environment["TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS"] = "0"  # they take longer than the one file
    else:
        (tmp_path / place).mkdir(parents=True)
        environment = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / place)}
    found = in_a_process(compiling_an_operation if place == "domain" else compiling, **environment)
    assert found["result"] == "right" or place != "domain", found
    if found["result"] == "right":
        assert found["graphs"] == 1 and all(found["said"])
    else:
        assert found["result"] == "reason", found
        cause = f"torch's compiler does not quote paths, and {str(tmp_path / place)!r} holds a space: use one without"
        assert all(said.startswith("unavailable: ") and said.endswith(f"; {cause}") for said in found["said"]), found
        assert all(re.search(r"\berror: ", said) for said in found["said"]), found  # the compiler's own line


@pytest.mark.slow
def test_where_dynamo_is_switched_off_eager_does_not_pass_for_compiled():
    found = in_a_process(both_families, TORCHDYNAMO_DISABLE="1")
    assert (found["result"], found["said"]) == ("reason", [NOTHING_COMPILED])
    why = NOTHING_COMPILED.removeprefix("unavailable: ")
    assert found["reasons"] and all("torch.compile failed: " in r and why in r for r in found["reasons"]), found
    assert found["timed"] and set(found["timed"]) == {6}


@pytest.mark.slow
def test_without_a_cpp_compiler_what_is_compiled_is_unavailable(tmp_path):
    (tmp_path / "bin").mkdir()
    environment = {"PATH": str(tmp_path / "bin"), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    found = in_a_process(both_families, **environment, CXX=None, CC=None)
    assert found["result"] == "reason" and all("ompiler" in said for said in found["said"]), found
    assert found["reasons"] and all("torch.compile failed: " in r and "ompiler" in r for r in found["reasons"]), found
    assert found["timed"] and set(found["timed"]) == {6}
