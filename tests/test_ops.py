"""Single operations: each is measured or says why not, a wrong one has no time, and operands never stay in a cache.

Most tests run on a clock of which every reading is 2 ms later, so that a sample is one call.
"""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from conftest import ESCHER, TINY, TINY_SPECS, RecordingSession, compiles

from escher_kernels import attention, model, ops, timing, workload
from escher_kernels.ops import COMPILED, DEFAULT, Operands, cases, prepare
from escher_kernels.records import to_line
from escher_kernels.timing import Budget, CpuTimer, Machine, Session

pytestmark = pytest.mark.usefixtures("one_thread")

SPECS = TINY_SPECS
WIDER = replace(TINY, hidden=256, heads=2, head_size=128, ffn=512, query_tokens=48, window_tokens=96, text_tokens=32)
OPS = {op.name: op for op in workload.ops(TINY)}
ELEMENT_WISE = {"time_embed", "norm", "norm_affine", "modulate", "qk_norm", "rope", "residual_gate", "residual", "gelu"}
QUICK = Budget("quick", block_s=0.002, case_s=4, search_s=6)
MACHINE = Machine(torch, "cpu", "cpu", "bf16", 2**30, 2**14, (0,))
F = torch.nn.functional


@pytest.fixture(autouse=True)
def small_anchors(monkeypatch):
    monkeypatch.setitem(timing.ANCHOR_N, "cpu", 128)
    monkeypatch.setitem(timing.ANCHOR_COPY_BYTES, "cpu", 2**20)


class Ticks:
    """A clock of which every reading is 2 ms later."""

    def __init__(self):
        self.now = 0

    def ns(self):
        self.now += 2_000_000
        return self.now

    def __call__(self):
        return self.ns() / 1e9


class Run:
    """A real session on such a clock, or on the host's, and what it wrote."""

    def __init__(self, budget=QUICK, real=False):
        clock, self.records = Ticks(), []
        timer = CpuTimer() if real else CpuTimer(clock.ns)
        more = {} if real else {"clock": clock}
        self.session = Session("ops", timer, self.records.append, budget, 1, lambda *_, **__: None, **more)

    def of(self, name):
        return [r for r in self.records if r.case == name and r.role == "case"]

    def timed(self, name):
        return [r for r in self.of(name) if r.samples_s]

    def verdicts(self, name):
        return [r.error["ok"] for r in self.of(name) if r.error]

    def skipped(self, name):
        """The reason, where that is all there is."""
        rows = self.of(name)
        assert len(rows) == 1 and not rows[0].samples_s and not rows[0].error, rows
        return rows[0].skipped


@pytest.fixture
def no_compiling(monkeypatch):
    """torch.compile hands back what it is given."""
    asked = []

    def compile_(function, **options):
        asked.append(options)
        return function

    monkeypatch.setattr(torch, "compile", compile_)
    monkeypatch.setattr(model, "graphs_compiled", lambda t: 1)
    return asked


def run_one(name, path=DEFAULT, spec=TINY, machine=MACHINE, budget=QUICK, seed=0):
    """One operation alone through a session."""
    torch.manual_seed(seed)
    run = Run(budget)
    op = next(o for o in workload.ops(spec) if o.name == name)
    element = {"bf16": torch.bfloat16, "fp16": torch.float16}[machine.dtype]
    with torch.no_grad():
        run.item = prepare(torch, Operands(torch, machine, spec, element), op, machine.dtype, path)
        run.session.run_blocks([run.item])
    return run


# ---- cases ----


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_every_operation_has_a_row_on_its_default_path_and_on_the_others(kind, name):
    spec = SPECS[name]
    rows = cases(kind, "bf16", spec)
    assert [c.name for c in rows if c.params["path"] == DEFAULT] == [op.name for op in workload.ops(spec)]
    assert len({c.name for c in rows}) == len(rows)
    for op in workload.ops(spec):
        more = [c.params["path"] for c in rows if c.params["op"] == op.name][1:]
        if op.kind == "attention":
            assert more == list(attention.BACKENDS)
        elif op.kind in ELEMENT_WISE or (op.kind == "linear" and kind == "gpu"):
            assert more == [COMPILED]
        else:
            assert more == [] and op.kind in ("linear", "cache_write")
    assert ("kv_cache_write" in {c.name for c in rows}) == spec.cache


@pytest.mark.parametrize(
    ("kind", "budget", "gemms"), [("gpu", "quick", False), ("gpu", "standard", True), ("cpu", "full", False)]
)
def test_gemms_are_compiled_on_a_gpu_and_not_at_quick(kind, budget, gemms):
    session = RecordingSession(budget)
    session.warm_up = fail  # what is planned then has a reason each
    ops.measure(session, replace(MACHINE, kind=kind), TINY)
    wanted = [
        c.name
        for c in cases(kind, "bf16", TINY)
        if gemms or c.params["kind"] != "linear" or c.params["path"] == DEFAULT
    ]
    assert [name for name, _ in session.skipped] == wanted
    assert [name for name in wanted if name.endswith("linear1.compiled")] == ["ffn.linear1.compiled"] * gemms


@pytest.mark.parametrize("spec", [ESCHER, *SPECS.values()], ids=lambda s: f"{s.name}-{s.batch}-{s.cache}")
def test_a_row_declares_the_work_of_the_op_table(spec):
    table = {op.name: op for op in workload.ops(spec)}
    for c in cases("gpu", "fp16", spec):
        op = table[c.params["op"]]
        assert (c.flop or 0, c.bytes_moved, c.cache, c.role) == (op.flop, op.bytes, "cold", "case")
        assert c.flop != 0 and c.params["dtype"] == "fp16" and c.params["category"] == op.category
        assert op.shape.items() <= c.params.items()


def test_each_kind_of_operation_is_run_and_checked():
    kinds = {op.kind for spec in SPECS.values() for op in workload.ops(spec)}
    assert kinds == {*ops.EXPECTED, "linear", "attention", "cache_write"}
    assert all(hasattr(model.functions(torch), kind) for kind in kinds - {"attention"})


# ---- measured ----


@pytest.fixture(params=SPECS)
def measured(request, no_compiling):
    run = Run()
    torch.manual_seed(0)
    ops.measure(run.session, MACHINE, SPECS[request.param])
    return run, SPECS[request.param]


def test_every_row_is_right_and_has_times_or_a_reason(measured):
    run, spec = measured
    for c in cases("cpu", "bf16", spec):
        rows = run.of(c.name)
        if rows[0].skipped:
            assert len(rows) == 1 and rows[0].skipped in attention.NOT_ON_CPU.values(), c.name
            continue
        assert run.verdicts(c.name) == [True] and rows[0].error, c.name
        assert [r.block for r in run.timed(c.name)] == list(range(6))
        assert all(s > 0 for r in run.timed(c.name) for s in r.samples_s)
        assert {(r.flop, r.bytes_moved, r.cache) for r in rows} == {(c.flop, c.bytes_moved, "cold")}
        assert len({r.backend for r in rows}) == 1 and rows[0].backend
    assert {r.case for r in run.records if r.role == "case"} == {c.name for c in cases("cpu", "bf16", spec)}
    for r in run.records:
        assert "NaN" not in to_line(r) and "Infinity" not in to_line(r)


def test_anchors_stand_around_what_is_timed(measured):
    run, _ = measured
    roles = [role for role, _ in itertools.groupby(r.role for r in run.records)]
    assert roles == ["warmup", "anchor", "case", "anchor"]


def test_rows_name_what_ran(measured):
    run, _ = measured
    flash, by_hand = "aten::_scaled_dot_product_flash_attention_for_cpu", "math (bmm, softmax, bmm)"
    for op in ("self_attn.flash", "cross_attn.flash"):
        assert {r.backend for r in run.of(op)} == {r.backend for r in run.of(f"{op}.sdpa_flash")} == {flash}
        assert {r.backend for r in run.of(f"{op}.sdpa_math")} == {by_hand}
        assert [run.of(name)[0].params["attention"] for name in (op, f"{op}.sdpa_flash", f"{op}.sdpa_math")] == [
            "sdpa_flash", "sdpa_flash", "sdpa_math",
        ]  # fmt: skip
    assert run.of("norm.self")[0].backend == "torch, eager norm"
    assert run.of("norm.self.compiled")[0].backend == "torch.compile, norm"


def test_measured_on_the_clock_of_this_host_in_fp16(no_compiling):
    run = Run(real=True)
    spec = replace(TINY, depth=1)
    ops.measure(run.session, replace(MACHINE, dtype="fp16"), spec)
    for c in cases("cpu", "fp16", spec):
        rows = run.of(c.name)
        assert rows[0].skipped or (run.verdicts(c.name) == [True] and len(run.timed(c.name)) == 6), c.name
    assert no_compiling and all(o == {"fullgraph": True, "dynamic": False} for o in no_compiling)


# ---- right first ----


def first_of(args):
    return args[0] if torch.is_tensor(args[0]) else args[0][0]


def outputs(change):
    """Changes each output of the right function."""

    def wrong(real, *a):
        out = real(*a)
        return tuple(change(t) for t in out) if isinstance(out, tuple) else change(out)

    return wrong


class Stale:
    """Right at first; then nothing is computed and the first output is handed out again."""

    def __init__(self, copy):
        self.copy, self.first = copy, None

    def __call__(self, real, *a):
        if self.first is None:
            self.first = real(*a)
        return self.first.clone() if self.copy else self.first


def one_wrong_row(t):
    t = t.clone()
    t[..., -1, :] = 0
    return t


WRONG = {
    "zeros": lambda: outputs(torch.zeros_like),
    "NaN": lambda: outputs(lambda t: torch.full_like(t, math.nan)),
    "one NaN": lambda: outputs(lambda t: t.flatten().index_fill(0, torch.tensor([7]), math.nan).view(t.shape)),
    "one infinity": lambda: outputs(lambda t: t.flatten().index_fill(0, torch.tensor([-1]), math.inf).view(t.shape)),
    "never written": lambda: outputs(torch.empty_like),
    "last row never written": lambda: outputs(one_wrong_row),
    "rows of the neighbour": lambda: outputs(lambda t: t.roll(1, t.dim() - 2 if t.dim() == 2 else 1)),
    "scaled by 1.03": lambda: outputs(lambda t: t * 1.03),
}  # fmt: skip
KINDS = sorted({op.kind: op.name for op in workload.ops(TINY) if op.kind not in ("attention", "cache_write")}.items())
UNCHANGED = [name for _, name in KINDS if name not in ("time_embed", "ffn.linear2")] + ["self_attn.q"]


def assert_no_time(run, name):
    assert run.verdicts(name) == [False], run.of(name)
    assert run.timed(name) == [] and all(to_line(r) for r in run.records)


@pytest.mark.parametrize("path", [DEFAULT, COMPILED])
@pytest.mark.parametrize("how", WRONG)
@pytest.mark.parametrize(("kind", "name"), KINDS)
def test_a_wrong_operation_has_no_time(monkeypatch, no_compiling, kind, name, how, path):
    f, wrong = model.functions(torch), WRONG[how]()
    real = getattr(f, kind)
    monkeypatch.setattr(f, kind, lambda *a: wrong(real, *a))
    row = name if path == DEFAULT else f"{name}.{path}"
    assert_no_time(run_one(name, path), row)


@pytest.mark.parametrize("name", UNCHANGED)
def test_an_operation_that_hands_back_its_input_has_no_time(monkeypatch, name):
    kind = OPS[name].kind
    monkeypatch.setattr(model.functions(torch), kind, lambda *a: a[0])
    assert_no_time(run_one(name), name)
    monkeypatch.setattr(model.functions(torch), kind, lambda *a: a[0].clone())
    assert_no_time(run_one(name), name)


@pytest.mark.parametrize("copy", [True, False])
@pytest.mark.parametrize("name", ["norm.self", "self_attn.q", "ffn.gelu", "residual.cross", "time_embed"])
def test_an_output_that_is_handed_out_again_is_caught(monkeypatch, name, copy):
    f, kind, stale = model.functions(torch), OPS[name].kind, Stale(copy)
    real = getattr(f, kind)
    monkeypatch.setattr(f, kind, lambda *a: stale(real, *a))
    run = run_one(name)
    assert run.verdicts(name)[:2] == [True, False] and [r.block for r in run.of(name) if r.error][1] == 0


WRONG_WRITES = {
    "nothing": lambda real, keys, values, k, v, at: None,
    "keys alone": lambda real, keys, values, k, v, at: real(keys, values.clone(), k, v, at),
    "swapped": lambda real, keys, values, k, v, at: real(keys, values, v, k, at),
    "the next slot": lambda real, keys, values, k, v, at: real(keys, values, k, v, (at + len(at)) % keys.shape[1]),
    "one token late": lambda real, keys, values, k, v, at: real(keys, values, k, v, (at + 1) % keys.shape[1]),
    "zeros": lambda real, keys, values, k, v, at: real(keys, values, k * 0, v * 0, at),
}


@pytest.mark.parametrize("how", WRONG_WRITES)
@pytest.mark.parametrize("batch", [1, 2])
def test_a_wrong_cache_write_has_no_time(monkeypatch, how, batch):
    f = model.functions(torch)
    real = f.cache_write
    monkeypatch.setattr(f, "cache_write", lambda *a: WRONG_WRITES[how](real, *a))
    assert_no_time(run_one("kv_cache_write", spec=replace(TINY, batch=batch)), "kv_cache_write")


@pytest.mark.parametrize("after", [1, 3])
def test_a_cache_write_that_stops_is_caught(monkeypatch, after):
    f, calls = model.functions(torch), []
    real = f.cache_write
    monkeypatch.setattr(f, "cache_write", lambda *a: calls.append(1) or (real(*a) if len(calls) <= after else None))
    run = run_one("kv_cache_write")
    assert False in run.verdicts("kv_cache_write")


WRONG_ATTENTION = {
    "heads and tokens swapped": lambda real, q, k, v: real(*(t.transpose(1, 2) for t in (q, k, v))).transpose(1, 2),
    "output in heads, tokens": lambda real, q, k, v: real(q, k, v).transpose(1, 2).reshape(q.shape),
    "output of another shape": lambda real, q, k, v: real(q, k, v).transpose(1, 2),
    "zeros": lambda real, q, k, v: real(q, k, v) * 0,
    "NaN": lambda real, q, k, v: real(q, k, v) * math.nan,
    "input unchanged": lambda real, q, k, v: real(q, k, v) * 0 + q,
    "no scale": lambda real, q, k, v: real(q * math.sqrt(q.shape[-1]), k, v),
    "keys of a token dropped": lambda real, q, k, v: real(q, k[:, 1:], v[:, 1:]),
}


@pytest.mark.parametrize("path", [DEFAULT, "sdpa_flash", "sdpa_math"])
@pytest.mark.parametrize("how", WRONG_ATTENTION)
@pytest.mark.parametrize("name", ["self_attn.flash", "cross_attn.flash"])
def test_wrong_attention_has_no_time(monkeypatch, name, how, path):
    real = attention.attend
    monkeypatch.setattr(attention, "attend", lambda t, n: lambda q, k, v: WRONG_ATTENTION[how](real(t, n), q, k, v))
    spec = replace(TINY, heads=4, head_size=16, window_tokens=12, text_tokens=12)  # so that swapped heads still fit
    row = name if path == DEFAULT else f"{name}.{path}"
    assert_no_time(run_one(name, path, spec), row)


def test_stale_attention_is_caught(monkeypatch):
    real, stale = attention.attend, Stale(copy=True)
    monkeypatch.setattr(attention, "attend", lambda t, n: lambda *a: stale(real(t, n), *a))
    assert run_one("self_attn.flash").verdicts("self_attn.flash") == [False]  # the probe's output, of other operands


def test_a_wrong_operation_does_not_spoil_the_others(monkeypatch, no_compiling):
    """One that hands back its input: poisoning that output must leave the operands of all others alone."""
    monkeypatch.setattr(model.functions(torch), "gelu", lambda x: x)
    run = Run()
    ops.measure(run.session, MACHINE, TINY)
    wrong = {r.case for r in run.records if r.error and not r.error["ok"]}
    assert wrong == {"ffn.gelu", "ffn.gelu.compiled"}


# ---- operands ----


def taken(tensors):
    """(first byte, end) of each tensor."""
    return [(t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()) for t in tensors]


def seen_calls(monkeypatch, name, spec, machine, turns, path=DEFAULT):
    """Prepare an operation whose function keeps what it is called with; (item, calls, outputs)."""
    op = next(o for o in workload.ops(spec) if o.name == name)
    calls, outs = [], []

    def keeping(run):
        def kept(*a):
            calls.append(a)
            outs.append(run(*a))
            return outs[-1]

        return kept

    if op.kind == "attention":
        real = attention.attend
        monkeypatch.setattr(attention, "attend", lambda t, n: keeping(real(t, n)))
    else:
        real = ops.function
        monkeypatch.setattr(ops, "function", lambda t, o: keeping(real(t, o)))
    item = prepare(torch, Operands(torch, machine, spec, torch.bfloat16), op, "bf16", path)
    calls.clear(), outs.clear()
    with item.inside():
        for turn in range(turns):
            item.call(turn)
    return item, calls, outs


@pytest.mark.parametrize("name", [op.name for op in workload.ops(WIDER)])
def test_operands_rotate_through_more_than_four_caches(monkeypatch, name):
    machine = replace(MACHINE, llc_bytes=2**18)
    op = next(o for o in workload.ops(WIDER) if o.name == name)
    item, calls, _ = seen_calls(monkeypatch, name, WIDER, machine, 200)
    sets = item.case.params["operand_sets"]
    assert "NOT_COLD" not in item.flags and sets * op.bytes > 4 * 2**18
    first = [tuple(t.data_ptr() for t in a) for a in calls[:sets]]
    assert [tuple(t.data_ptr() for t in a) for a in calls[sets : 2 * sets]] == first[: 200 - sets]  # then round again
    spans = []
    for a in calls[:sets]:
        if name == "kv_cache_write":
            slot = slice(int(a[4][0]), int(a[4][-1]) + 1)
            own = [a[0][:, slot], a[1][:, slot], a[2], a[3]]
        else:
            own = {"rope": a[:2], "time_embed": a[1:]}.get(name, a)  # tables and time steps are read by every set
        spans += taken(own)
    spans.sort()
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans)), "two sets share memory"


def test_ring_buffers_are_written_slot_by_slot(monkeypatch):
    _, calls, _ = seen_calls(monkeypatch, "kv_cache_write", TINY, replace(MACHINE, llc_bytes=2**14), 10)
    assert [int(a[4][0]) for a in calls] == [0, 12, 24, 36] * 2 + [0, 12]
    rings = [a[0].data_ptr() for a in calls]
    assert rings[:4] == rings[:1] * 4 and rings[4:8] == rings[4:5] * 4 and rings[0] != rings[4]


@pytest.mark.parametrize("memory", [2**22, 2**21, 0])
def test_too_little_memory_for_cold_operands_is_a_flag(memory):
    run = run_one("norm.self", machine=replace(MACHINE, llc_bytes=2**30, memory_bytes=memory))
    assert {r.flags for r in run.timed("norm.self")} == {("NOT_COLD",)} and run.verdicts("norm.self") == [True]
    op = OPS["norm.self"]
    assert run.item.case.params["operand_sets"] * op.bytes <= 4 * 2**30


@pytest.mark.parametrize(("llc", "memory"), [(2**30, 2**27), (2**18, 2**27), (2**30, 2**23)])
def test_operands_and_outputs_take_at_most_half_of_the_memory(llc, memory):
    operands = Operands(torch, replace(MACHINE, llc_bytes=llc, memory_bytes=memory), TINY, torch.bfloat16)
    pools = 2 * (len(operands.x.flat) + len(operands.w.flat))
    one_set = 2 * sum(max(n(op) for op in workload.ops(TINY)) for n in (ops._elements_in, ops._elements_weight))
    assert 1.5 * (pools - one_set) <= memory / 2  # a third of what rotates is for outputs
    if llc == 2**18:
        assert pools - one_set == 2 * 4 * llc  # inputs and weights, each as large as four caches


def test_an_unknown_cache_size_is_no_reason_for_a_flag():
    run = run_one("norm.self", machine=replace(MACHINE, llc_bytes=0))
    assert {r.flags for r in run.timed("norm.self")} == {()} and run.item.case.params["operand_sets"] == 1


@pytest.mark.parametrize("name", ["norm.self", "self_attn.q", "rope", "self_attn.flash", "time_embed"])
def test_outputs_are_kept_so_that_they_rotate_too(monkeypatch, name):
    item, _, outs = seen_calls(monkeypatch, name, TINY, MACHINE, 0)
    sets, pointers = item.case.params["operand_sets"], []
    assert sets > 4
    with item.inside():  # of a block
        for turn in range(3 * sets):  # nothing but the row itself keeps an output alive
            item.call(turn)
            out = outs.pop()
            pointers += [t.data_ptr() for t in (out if isinstance(out, tuple) else (out,))]
            del out
    each = len(pointers) // (3 * sets)
    for i in range(0, len(pointers) - each * sets, each):
        assert len(set(pointers[i : i + each * sets])) == each * sets


def kept_bytes(outputs):
    outs = [t for out in outputs.kept for t in (out if isinstance(out, tuple) else (out,))]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in outs}.values())


@pytest.mark.parametrize("name", SPECS)
def test_between_blocks_all_rows_together_keep_less_than_what_one_rotates_through(monkeypatch, no_compiling, name):
    made, largest = [], 0

    class Counted(ops.Outputs):
        def __init__(self, *a):
            super().__init__(*a)
            made.append(self)

    monkeypatch.setattr(ops, "Outputs", Counted)
    operands = Operands(torch, replace(MACHINE, llc_bytes=2**18), SPECS[name], torch.bfloat16)
    items = [i for i in all_items(operands, SPECS[name]) if not i.case.skipped]
    assert len(items) == len(made) > 20
    for turn in (0, 300):  # once ready, and in a later block
        for item, outputs in zip(items, made, strict=True):
            with torch.no_grad(), item.inside():
                for i in range(2 * item.case.params["operand_sets"]):
                    item.call(turn + i)
                largest = max(largest, kept_bytes(outputs))
                assert len(outputs.kept) in (item.case.params["operand_sets"], 0)  # a cache write keeps none
            last = 2 * item.case.params["operand_sets"] - 1
            assert item.check(turn + last, False)["ok"], item.case.name  # the last output is there to be checked
        assert 0 < sum(map(kept_bytes, made)) < largest
    assert all(len(outputs.kept) <= 1 for outputs in made)


def test_a_block_that_fails_closes_its_context():
    operands = Operands(torch, MACHINE, TINY, torch.bfloat16)
    item = prepare(torch, operands, OPS["self_attn.flash"], "bf16", "sdpa_math")
    before = torch.backends.cuda.flash_sdp_enabled()
    with pytest.raises(RuntimeError, match="out of memory"), item.inside():
        raise RuntimeError("out of memory")
    assert torch.backends.cuda.flash_sdp_enabled() == before


def test_poison_reaches_the_memory_of_the_next_output():
    operand = torch.ones(8)
    kept = ops.Outputs(torch, [(operand,)] * 4)
    for value in (1.0, 2.0):
        kept.put(torch.full((1 << 16,), value))
    kept.put((torch.ones(4), None))
    kept.put(operand[2:4])
    held = [*kept.kept]
    kept.poison()
    assert len(kept.kept) == 0
    assert all(bool(t.isnan().all()) for t in (held[0], held[1], held[2][0]))
    assert torch.equal(operand, torch.ones(8))  # handed back, and read by others


def all_items(operands, spec=TINY):
    with torch.no_grad():
        rows = [(op, path) for op in workload.ops(spec) for path in (DEFAULT, *ops.paths(op, "cpu"))]
        return [prepare(torch, operands, op, "bf16", path) for op, path in rows]


@pytest.mark.parametrize("name", SPECS)
def test_poisoning_one_row_spoils_the_operands_of_none(name, no_compiling):
    spec = SPECS[name]
    operands = Operands(torch, MACHINE, spec, torch.bfloat16)
    with torch.no_grad():
        items = [i for i in all_items(operands, spec) if not i.case.skipped]
        for item in items:
            with item.inside():
                item.call(0)
                item.call(1)
        for item in items:
            item.poison()
        for pool in (operands.x.flat, operands.w.flat, operands.cosine, operands.sine, operands.steps):
            assert bool(pool.isfinite().all())
        for item in items:
            with item.inside():
                item.call(0)
            assert item.check(0, True)["ok"], item.case.name


def test_ring_buffers_are_memory_of_their_own():
    operands = Operands(torch, MACHINE, TINY, torch.bfloat16)
    pools = taken([operands.x.flat, operands.w.flat])
    op = OPS["kv_cache_write"]
    for number in range(9):
        keys, values, k, v, _ = operands.of(op, number)
        for ring in taken([keys, values]):
            assert all(ring[1] <= start or end <= ring[0] for start, end in pools)
        for read in taken([k, v]):
            assert pools[0][0] <= read[0] and read[1] <= pools[0][1]


def rows_alike(spec):
    """Pairs of tokens of q, k and v of self-attention that hold the same values."""
    torch.manual_seed(0)
    operands = Operands(torch, replace(MACHINE, llc_bytes=0), spec, torch.bfloat16)
    tokens = [tuple(row.tolist()) for t in operands.of(OPS["self_attn.flash"]) for row in t.flatten(-2)[0]]
    return len(tokens) - len(set(tokens))


def test_tokens_of_q_and_k_never_hold_the_same_stretch_of_what_repeats(monkeypatch):
    monkeypatch.setattr(timing, "PATTERN", 1024)  # 16 tokens of 64: what a power of two did
    assert rows_alike(TINY) > 50
    monkeypatch.setattr(timing, "PATTERN", 1021)
    assert rows_alike(TINY) == 0


@pytest.mark.parametrize("name", ["escher_14b_480p", "wan2_2_t2v_a14b", "wan2_2_ti2v_5b"])
def test_the_pattern_meets_rows_again_after_more_than_any_operation_reads(name):
    spec = workload.load(name)
    assert timing.PATTERN % 2 and all(timing.PATTERN % n for n in range(3, math.isqrt(timing.PATTERN) + 1, 2))
    for op in workload.ops(spec):
        step = math.gcd(64, spec.hidden, spec.ffn)  # operands start at multiples of 64, and so do their rows
        again = math.lcm(timing.PATTERN, step)
        assert step == 64 and again > max(ops._elements_in(op), ops._elements_weight(op)), op.name
    attention_op = next(op for op in workload.ops(spec) if op.name == "self_attn.flash")
    tokens_again = math.lcm(timing.PATTERN, spec.hidden) // spec.hidden
    assert tokens_again == timing.PATTERN > attention_op.shape["sq"] + 2 * attention_op.shape["skv"]


def test_operands_are_normal_and_weights_are_scaled():
    torch.manual_seed(0)
    operands = Operands(torch, MACHINE, TINY, torch.bfloat16)
    for pool, std in ((operands.x, 1.0), (operands.w, 64**-0.5)):
        assert float(pool.flat.float().std()) == pytest.approx(std, rel=0.05) and len(pool.flat.unique()) > 100


def test_the_model_and_the_single_operations_are_the_same_code(monkeypatch):
    """Each function that the block calls is one that is timed, and the other way round."""
    f, called = model.functions(torch), set()
    for kind in vars(f):
        real = getattr(f, kind)
        monkeypatch.setattr(f, kind, lambda *a, real=real, kind=kind: called.add(kind) or real(*a))
    net = model.Model(torch, TINY, torch.bfloat16, "cpu")
    net.run(0)
    in_the_model, _ = set(called), called.clear()
    with torch.no_grad():
        for op in workload.ops(TINY):
            run_one(op.name)
    assert in_the_model == called == set(vars(f))


# ---- attention ----


def test_attention_is_forced_during_every_call(monkeypatch):
    real, seen = attention.attend, {}
    cuda = torch.backends.cuda

    def attend(t, name):
        run = real(t, name)

        def call(q, k, v):
            seen.setdefault(name, []).append((cuda.flash_sdp_enabled(), cuda.math_sdp_enabled()))
            return run(q, k, v)

        return call

    monkeypatch.setattr(attention, "attend", attend)
    before = cuda.flash_sdp_enabled(), cuda.math_sdp_enabled()
    for path in (DEFAULT, "sdpa_flash", "sdpa_math"):
        run_one("self_attn.flash", path)
    assert set(seen["sdpa_flash"]) == {(True, False)} and set(seen["sdpa_math"]) == {(False, True)}
    assert set(seen["sdpa"]) == {before} and all(len(calls) > 10 for calls in seen.values())
    assert (cuda.flash_sdp_enabled(), cuda.math_sdp_enabled()) == before


def by_hand(q, k, v):
    """What a silent fall-back runs."""
    heads = q.shape[2]
    q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in (q, k, v))
    out = torch.bmm((torch.bmm(q, k.mT) / math.sqrt(q.shape[-1])).softmax(-1), v)
    return out.unflatten(0, (-1, heads)).transpose(1, 2)


def test_a_backend_that_did_not_run_is_skipped_with_what_ran(monkeypatch):
    monkeypatch.setattr(attention, "unavailable", lambda *_: None)
    monkeypatch.setattr(attention, "attend", lambda t, name: by_hand)
    why = run_one("self_attn.flash", "sdpa_flash").skipped("self_attn.flash.sdpa_flash")
    assert why == "sdpa_flash was asked for, math (bmm, softmax, bmm) ran"
    default = run_one("self_attn.flash")  # the default is named by what ran, whatever it is
    assert {r.backend for r in default.of("self_attn.flash")} == {"math (bmm, softmax, bmm)"}
    assert default.item.case.params["attention"] == "sdpa_math"
    assert len(default.timed("self_attn.flash")) == 6


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("No available kernel. Aborting execution.\nmore"),
        torch.OutOfMemoryError("out of memory"),
        AssertionError("a package's own check"),
    ],
)
def test_a_kernel_that_fails_is_a_reason(monkeypatch, error):
    def attend(t, name):
        def call(q, k, v):
            raise error

        return call

    monkeypatch.setattr(attention, "unavailable", lambda *_: None)
    monkeypatch.setattr(attention, "attend", attend)
    why = run_one("self_attn.flash", "sdpa_math").skipped("self_attn.flash.sdpa_math")
    assert why == f"{type(error).__name__}: {str(error).splitlines()[0]}"


class Full(Machine):
    def free_bytes(self):
        return 30_000


def test_math_attention_that_does_not_fit_is_skipped_with_both_figures(monkeypatch):
    machine = Full(torch, "cpu", "cpu", "bf16", 2**30, 2**14, (0,))
    called, real = [], attention.attend
    monkeypatch.setattr(attention, "attend", lambda t, n: lambda *a: called.append(a[0].shape) or real(t, n)(*a))
    why = run_one("self_attn.flash", "sdpa_math", machine=machine).skipped("self_attn.flash.sdpa_math")
    need = attention.scratch_bytes("sdpa_math", 1, 2, 12, 48, 32, 2) + 12 * 64 * 2
    assert why == f"sdpa_math needs {need / 1e9:.3g} GB, 3e-05 GB are free"
    assert (1, 12, 2, 32) not in called  # never tried
    assert len(run_one("self_attn.flash", "sdpa_flash", machine=machine).timed("self_attn.flash.sdpa_flash")) == 6


# ---- what fails ----


FAILURES = {
    "when asked": (True, RuntimeError("torch.compile is not supported on Python 3.99\nmore")),
    "at the first call": (False, RuntimeError("InvalidCxxCompiler: No working C++ compiler found\nmore")),
    "with no RuntimeError": (False, FileNotFoundError("g++")),
    "with no RuntimeError, when asked": (True, ImportError("no triton")),
}


@pytest.mark.parametrize("how", FAILURES)
def test_without_a_compiler_compiled_rows_have_the_reason_and_all_others_are_timed(monkeypatch, how):
    at_once, error = FAILURES[how]

    def broken(*_, **__):
        raise error

    monkeypatch.setattr(torch, "compile", broken if at_once else lambda run, **_: broken)
    run = Run()
    ops.measure(run.session, MACHINE, TINY)
    for c in cases("cpu", "bf16", TINY):
        if c.params["path"] == COMPILED:
            said = run.skipped(c.name)
            assert said == f"torch.compile failed: {model.compile_failure(torch, error)}"
            assert said.startswith(f"torch.compile failed: {type(error).__name__}: {str(error).splitlines()[0]}")
        elif c.params["path"] == DEFAULT:
            assert len(run.timed(c.name)) == 6


def test_rows_of_which_nothing_was_compiled_have_no_time(monkeypatch, no_compiling):
    monkeypatch.setattr(model, "graphs_compiled", lambda t: 0)
    run = Run()
    ops.measure(run.session, MACHINE, TINY)
    for c in cases("cpu", "bf16", TINY):
        if c.params["path"] == COMPILED:
            why = run.skipped(c.name)
            assert why.startswith("torch.compile failed: ") and "nothing was compiled, what ran was eager" in why
        elif c.params["path"] == DEFAULT:
            assert run.verdicts(c.name) == [True] and len(run.timed(c.name)) == 6


def fail(*_, **__):
    raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.\nmore")


@pytest.mark.parametrize("where", ["pools", "anchors"])
def test_no_memory_for_operands_is_a_reason_on_every_row(monkeypatch, where):
    monkeypatch.setattr(*{"pools": (ops, "normal", fail), "anchors": (timing, "anchors", fail)}[where])
    run = Run()
    ops.measure(run.session, MACHINE, TINY)
    for c in cases("cpu", "bf16", TINY):
        assert run.skipped(c.name) == "DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."


def test_no_memory_for_one_operation_is_the_reason_of_that_row(monkeypatch, no_compiling):
    monkeypatch.setattr(Operands, "ring", fail)
    run = Run()
    ops.measure(run.session, MACHINE, TINY)
    assert "can't allocate memory" in run.skipped("kv_cache_write")
    assert len(run.timed("norm.self")) == 6


def test_an_operation_that_raises_leaves_the_others(monkeypatch, no_compiling):
    monkeypatch.setattr(model.functions(torch), "rope", fail)
    run = Run()
    ops.measure(run.session, MACHINE, TINY)
    assert "can't allocate memory" in run.skipped("rope") and "can't allocate memory" in run.skipped("rope.compiled")
    assert len(run.timed("norm.self")) == 6 and len(run.timed("ffn.gelu")) == 6


# ---- compiled ----


@compiles
@pytest.mark.slow
def test_compiled_rows_are_measured(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    run = Run()
    ops.measure(run.session, MACHINE, TINY)
    torch._dynamo.reset()
    for c in cases("cpu", "bf16", TINY):
        if c.params["path"] == COMPILED:
            assert run.verdicts(c.name) == [True] and len(run.timed(c.name)) == 6, run.of(c.name)
            assert {r.backend for r in run.of(c.name)} == {f"torch.compile, {c.params['kind']}"}


def test_contexts_of_rows_are_there_to_be_opened_again():
    operands = Operands(torch, MACHINE, TINY, torch.bfloat16)
    item = prepare(torch, operands, OPS["self_attn.flash"], "bf16", "sdpa_math")
    plain = prepare(torch, operands, OPS["norm.self"], "bf16")
    before = torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()
    for _ in range(2):
        with item.inside():
            assert not torch.backends.cuda.flash_sdp_enabled()
        with plain.inside():  # changes nothing
            assert (torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()) == before
