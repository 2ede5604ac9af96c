"""Family 4, ops: how long does each operation of the model take, by itself, on the default and on faster paths?

Every operation of the workload's table runs as the model runs it (`model.functions`), eagerly: that is its default
path. Beside it run the paths that could be faster: attention through each backend that is there (AITER, flash_attn,
torch's flash, memory-efficient and math kernels), forced for that call and named by the operator that really ran;
element-wise operations and, on a GPU, GEMMs through torch.compile. FLOP and bytes are those of `workload.ops`: 2MNK,
4*B*H*Sq*Skv*D, each tensor moved once. The optimized path is the fastest right one; that is derived, not stored.
Traps this module avoids: operands that stay in a cache between calls (operands and outputs rotate through a set larger
than four times the last-level caches); a silent fall-back to another kernel (`attention.what_ran`); an output that an
earlier call left in the memory a new one is given (what is kept is filled with NaN before a checked call); scores of
math attention that do not fit (predicted, and skipped with both figures).
Outside tools that agree: torch.utils.benchmark on a single operation, flash-attention's benchmark scripts, rocprof.
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from escher_kernels import attention, model
from escher_kernels.checks import gemm_error, rows_error
from escher_kernels.timing import ANCHOR_COPY_BYTES, Case, Machine, Prepared, Session, normal
from escher_kernels.workload import ELEMENT_BYTES, Op, Spec, ops

COLD_FACTOR = 4
DEFAULT = "default"
COMPILED = "compiled"
CHECK_ROWS = 64
LIMIT = 2.0**-7  # relative Frobenius of anything but a GEMM, as for attention: up to three roundings to BF16
EPS = model.EPS


def case(op: Op, dtype: str, path: str = DEFAULT) -> Case:
    """The row of an operation on one path; the default path has the operation's own name."""
    name = op.name if path == DEFAULT else f"{op.name}.{path}"
    params = {"op": op.name, "category": op.category, "kind": op.kind, "path": path, "dtype": dtype, **op.shape}
    return Case(name, params, flop=op.flop or None, bytes_moved=op.bytes, cache="cold")


def paths(op: Op, kind: str, quick: bool = False) -> list[str]:
    """The paths of an operation that can be faster than the default, best guess first. `quick` leaves out what is tuned
    for minutes: GEMMs through the compiler."""
    if op.kind == "attention":
        return list(attention.BACKENDS)
    if op.kind == "cache_write" or (op.kind == "linear" and (quick or kind == "cpu")):
        return []  # a copy is a copy; a CPU has one GEMM library
    return [COMPILED]


def planned(kind: str, spec: Spec, quick: bool = False) -> list[tuple[Op, str]]:
    """Every operation on its default path, and on the others."""
    return [(op, path) for op in ops(spec) for path in (DEFAULT, *paths(op, kind, quick))]


def cases(kind: str, dtype: str, spec: Spec, quick: bool = False) -> list[Case]:
    """The rows of what is planned."""
    return [case(op, dtype, path) for op, path in planned(kind, spec, quick)]


class Pool:
    """Flat N(0,1) values of which operands are views: the i-th set starts where the (i-1)-th ended, and wraps."""

    def __init__(self, torch: Any, elements: int, dtype: Any, device: str, scale: float = 1.0):
        self.flat = normal(torch, elements, dtype, device)
        if scale != 1:
            self.flat.mul_(scale)
        self.at = 0

    def take(self, *shape: int) -> Any:
        """The next view of that shape."""
        elements = math.prod(shape)
        if self.at + elements > len(self.flat):
            self.at = 0
        view = self.flat[self.at : self.at + elements].view(shape)
        self.at += -(-elements // 64) * 64  # keep views aligned
        return view


class Operands:
    """Pools from which every operation gets its operand sets: activations, weights (N(0, 1/hidden)), ring buffers."""

    def __init__(self, torch: Any, machine: Machine, spec: Spec, dtype: Any):
        self.torch, self.machine, self.spec = torch, machine, spec
        self.cold_bytes = COLD_FACTOR * machine.llc_bytes
        table, e = ops(spec), ELEMENT_BYTES
        largest_in = max(_elements_in(op) for op in table)
        largest_weight = max(_elements_weight(op) for op in table)
        spare = machine.memory_bytes // 2 - 2 * ANCHOR_COPY_BYTES[machine.kind]
        rotate = min(self.cold_bytes // e, max(0, spare) // (3 * e))  # inputs, weights, and outputs that are kept
        self.x = Pool(torch, largest_in + rotate, dtype, machine.device)
        self.w = Pool(torch, largest_weight + rotate, dtype, machine.device, spec.hidden**-0.5)
        self.cosine, self.sine = model.rotary(torch, spec, machine.device)
        self.steps = model.sinusoid(torch, spec, dtype, machine.device)
        self.rings: dict[int, Any] = {}  # ring buffers are written, so they are no views of what others read

    def ring(self, number: int, shape: tuple[int, ...]) -> tuple[Any, Any]:
        """The number-th pair of ring buffers for keys and values."""
        if number not in self.rings:
            like = self.x.flat
            self.rings[number] = tuple(self.torch.zeros(shape, dtype=like.dtype, device=like.device) for _ in range(2))
        return self.rings[number]

    def count(self, op: Op) -> int:
        """Operand sets so that together they outgrow the caches more than four times, within the pools."""
        fits = [len(p.flat) // n for p, n in ((self.x, _elements_in(op)), (self.w, _elements_weight(op))) if n]
        return max(1, min([math.ceil(self.cold_bytes / op.bytes) + 1, *fits]))

    def of(self, op: Op, number: int = 0) -> tuple[Any, ...]:
        """The number-th operand set, in the order of the function of `model.functions` (or of attention)."""
        s, d, heads = op.shape, self.spec.hidden, (self.spec.heads, self.spec.head_size)
        tokens = (s.get("batch", 1), s.get("tokens", 1))
        if op.kind == "linear":
            return self.x.take(s["m"], s["k"]), self.w.take(s["n"], s["k"])
        if op.kind == "attention":
            b = s["batch"]
            return tuple(self.x.take(b, n, *heads) for n in (s["sq"], s["skv"], s["skv"]))
        if op.kind == "time_embed":
            return self.steps, self.w.take(d, s["frequency"]), self.w.take(d, d)
        x = self.x.take(*tokens, s["hidden"])
        if op.kind == "norm_affine":
            return x, self.x.take(d), self.x.take(d)
        if op.kind == "modulate":
            return x, *(self.x.take(tokens[0], s["frames"], d) for _ in range(2))
        if op.kind == "residual_gate":
            return x, self.x.take(*tokens, d), self.x.take(tokens[0], s["frames"], d)
        if op.kind == "residual":
            return x, self.x.take(*tokens, d)
        if op.kind == "qk_norm":
            return *(x if i == 0 else self.x.take(*tokens, d) for i in range(s["streams"])), self.x.take(d)
        if op.kind == "rope":
            return x.unflatten(-1, heads), self.x.take(*tokens, *heads), self.cosine, self.sine
        if op.kind == "cache_write":
            slots = s["window"] // tokens[1]  # set after set writes the next slot, as chunk after chunk does
            ring = self.ring(number // slots, (tokens[0], s["window"], *heads))
            index = self.torch.arange(tokens[1], device=self.machine.device) + number % slots * tokens[1]
            return *ring, *(self.x.take(*tokens, *heads) for _ in range(2)), index
        return (x,)  # norm, gelu


def _elements_in(op: Op) -> int:
    """Elements of the activations that one set reads: at most what its bytes hold, each view aligned."""
    s = op.shape
    if op.kind == "linear":
        return s["m"] * s["k"] + 64
    return 0 if op.kind == "time_embed" else op.bytes // ELEMENT_BYTES + 64 * 8


def _elements_weight(op: Op) -> int:
    s = op.shape
    if op.kind == "linear":
        return s["n"] * s["k"] + 64
    return s["hidden"] * (s["frequency"] + s["hidden"]) + 128 if op.kind == "time_embed" else 0


def function(torch: Any, op: Op) -> Callable[..., Any]:
    """What the model calls for this operation; several streams (q and k) are one operation."""
    f = getattr(model.functions(torch), op.kind)
    if op.kind == "qk_norm":
        return lambda *a: tuple(f(x, a[-1]) for x in a[:-1])
    if op.kind == "rope":
        return lambda q, k, cosine, sine: (f(q, cosine, sine), f(k, cosine, sine))
    return f


class Outputs:
    """Keeps the last outputs alive, as many as there are operand sets, so that outputs rotate through memory too."""

    def __init__(self, torch: Any, sets: Sequence[tuple[Any, ...]]):
        self.torch, self.kept = torch, deque(maxlen=max(1, len(sets)))
        self.read = {t.untyped_storage().data_ptr() for operands in sets for t in operands}

    def put(self, out: Any) -> Any:
        self.kept.append(out)
        return out

    def trim(self) -> None:
        """Let go of all but the last: many operations take turns, and only one needs its outputs to rotate."""
        while len(self.kept) > 1:
            self.kept.popleft()

    def poison(self) -> None:
        """Fill what is kept with NaN, and let go of it: the next call is given memory that holds NaN.

        An output that is an operand handed back is wrong, but others read that operand too: it stays as it is.
        """
        for out in self.kept:
            for t in out if isinstance(out, tuple) else (out,):
                if t is not None and t.untyped_storage().data_ptr() not in self.read:
                    t.fill_(math.nan)
        self.kept.clear()


def prepare(torch: Any, operands: Operands, op: Op, dtype: str, path: str = DEFAULT) -> Prepared:
    """An operation on one path, ready to be checked and timed; skipped with the reason where the path is not there."""
    item = case(op, dtype, path)
    if op.kind == "attention":
        return _attention(torch, operands, op, item, path)
    run, backend = function(torch, op), f"torch, eager {op.kind}"
    if path == COMPILED:
        mode = {"mode": "max-autotune-no-cudagraphs"} if op.kind == "linear" else {}
        run, backend = torch.compile(run, fullgraph=True, dynamic=False, **mode), f"torch.compile, {op.kind}"
    return _prepared(torch, operands, op, item, run, backend, contextlib.nullcontext)


def _prepared(torch: Any, operands: Operands, op: Op, item: Case, run: Callable, backend: str, inside: Callable) -> Prepared:
    sets = [operands.of(op, number) for number in range(operands.count(op))]
    outputs = Outputs(torch, sets)
    writes = op.kind == "cache_write"

    def call(turn: int) -> Any:
        out = run(*sets[turn % len(sets)])
        return out if writes else outputs.put(out)

    def poison() -> None:
        outputs.poison()
        for ring in (s[:2] for s in sets if writes):
            for t in ring:
                t.fill_(math.nan)

    def check(turn: int, full: bool) -> dict[str, Any]:
        return error(torch, op, sets[turn % len(sets)], None if writes else outputs.kept[-1], item.params["dtype"], full)

    cold = len(sets) * op.bytes > operands.cold_bytes or operands.machine.llc_bytes == 0
    item = replace(item, params={**item.params, "operand_sets": len(sets)})
    flags = () if cold else ("NOT_COLD",)

    @contextlib.contextmanager
    def block() -> Iterator[None]:
        with inside():
            yield
        outputs.trim()

    return Prepared(item, call, poison, check, backend, flags=flags, inside=block)


def _attention(torch: Any, operands: Operands, op: Op, item: Case, path: str) -> Prepared:
    """Attention through one backend (`DEFAULT`: the one torch picks), named by the operator that ran."""
    machine, s = operands.machine, op.shape
    name = attention.DEFAULT if path == DEFAULT else path
    if reason := attention.unavailable(torch, machine.kind, name, machine.dtype, s["head_size"]):
        return Prepared(replace(item, skipped=reason))
    sizes = (s["batch"], s["heads"], s["sq"], s["skv"], s["head_size"], ELEMENT_BYTES)
    if reason := attention.too_big(name, *sizes, machine.free_bytes()):
        return Prepared(replace(item, skipped=reason))
    run, one = attention.attend(torch, name), operands.of(op)

    def inside() -> Any:
        return attention.forced(torch, name)

    def once() -> Any:
        with inside():
            return run(*one)

    try:
        ran = attention.what_ran(torch, once)
    except Exception as exc:  # no kernel for this shape or dtype, out of memory; a package fails in ways of its own
        return Prepared(replace(item, skipped=model.first_line(exc)))
    if path != DEFAULT and not attention.is_backend(name, ran):
        return Prepared(replace(item, skipped=f"{name} was asked for, {ran} ran"))
    known = attention.backend_of(ran)
    item = replace(item, params={**item.params, "attention": name if known == "unknown" else known})
    return _prepared(torch, operands, op, item, run, ran, inside)


def error(torch: Any, op: Op, args: Sequence[Any], out: Any, dtype: str, full: bool) -> dict[str, Any]:
    """Judge an operation's output against float64 from the same inputs, on sampled tokens; a cache write exactly."""
    if op.kind == "linear":
        return gemm_error(torch, args[0], args[1].t(), out, dtype, full)
    if op.kind == "attention":
        return attention.attention_error(torch, *args, out)
    if op.kind == "cache_write":
        rings, written, index = args[:2], args[2:4], args[4]
        right = all(torch.equal(r[:, index], w) for r, w in zip(rings, written, strict=True))
        return {"check": "exact", "ok": right}
    got = out if isinstance(out, tuple) else (out,)
    tokens = got[0].shape[1]
    rows = torch.tensor(sorted({0, tokens - 1, *torch.randperm(tokens)[:CHECK_ROWS].tolist()}), device=got[0].device)
    want = EXPECTED[op.kind](torch, rows, *args)
    errors = [rows_error(g[:, rows], w, LIMIT) for g, w in zip(got, want, strict=True)]
    worst = max(errors, key=lambda e: math.inf if e["rel_frobenius"] is None else e["rel_frobenius"])
    finite = all(bool(g.isfinite().all()) for g in got)
    return {**worst, "check": "rows", "rows_checked": len(rows), "ok": finite and all(e["ok"] for e in errors)}


def _scaled(x: Any, centre: bool) -> Any:
    x = x.double()
    x = x - x.mean(-1, keepdim=True) if centre else x
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()


def _framed(torch: Any, rows: Any, x: Any, per_frame: Any) -> Any:
    """The frame's vector of each row, (B, rows, D)."""
    return per_frame[:, rows // (x.shape[1] // per_frame.shape[1])].double()


def _expected_rope(torch: Any, rows: Any, *args: Any) -> list[Any]:
    *streams, cosine, sine = args
    turn = torch.complex(cosine[rows].double(), sine[rows].double())
    pairs = [torch.view_as_complex(x[:, rows].double().unflatten(-1, (-1, 2)).contiguous()) for x in streams]
    return [torch.view_as_real(p * turn).flatten(-2) for p in pairs]


def _expected_gelu(torch: Any, rows: Any, x: Any) -> list[Any]:
    x = x[:, rows].double()
    return [0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))]


def _expected_embed(torch: Any, rows: Any, steps: Any, first: Any, second: Any) -> list[Any]:
    def silu(v: Any) -> Any:
        return v / (1 + torch.exp(-v))

    return [silu(silu(steps[:, rows].double() @ first.double().T) @ second.double().T)]


EXPECTED: dict[str, Callable[..., list[Any]]] = {  # (torch, rows, *operands) -> what those rows of each output must hold
    "time_embed": _expected_embed,
    "norm": lambda t, rows, x: [_scaled(x[:, rows], True)],
    "norm_affine": lambda t, rows, x, w, b: [_scaled(x[:, rows], True) * w.double() + b.double()],
    "modulate": lambda t, rows, x, shift, scale: [
        x[:, rows].double() * (1 + _framed(t, rows, x, scale)) + _framed(t, rows, x, shift)
    ],
    "qk_norm": lambda t, rows, *a: [_scaled(x[:, rows], False) * a[-1].double() for x in a[:-1]],
    "rope": _expected_rope,
    "residual_gate": lambda t, rows, x, y, g: [x[:, rows].double() + y[:, rows].double() * _framed(t, rows, x, g)],
    "residual": lambda t, rows, x, y: [x[:, rows].double() + y[:, rows].double()],
    "gelu": _expected_gelu,
}


def measure(session: Session, machine: Machine, spec: Spec) -> None:
    """Warm-up, anchors, every operation on its default path and on the others in blocks, anchors."""
    torch, kind, dtype = machine.torch, machine.kind, machine.dtype
    element = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    work = planned(kind, spec, session.budget.name == "quick")
    if kind == "gpu":
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        attention.enable_experimental_aotriton(torch)
    try:
        session.warm_up(machine)
        operands = Operands(torch, machine, spec, element)
    except RuntimeError as exc:  # torch's out-of-memory errors are RuntimeErrors
        for op, path in work:
            session.skip(case(op, dtype, path), str(exc).splitlines()[0])
        return
    session.anchor()
    with torch.no_grad():
        items = []
        for op, path in work:
            if session.wanted(case(op, dtype, path)):
                session.progress(f"preparing {op.name}, {path}", always=False)
                items.append(ready(torch, operands, op, dtype, path))
        session.run_blocks(items)
    session.anchor()


def ready(torch: Any, operands: Operands, op: Op, dtype: str, path: str) -> Prepared:
    """`prepare`, and compile now, apart from anything timed; what fails is the reason of that row, not of the others."""
    compiled = path == COMPILED
    try:
        item = prepare(torch, operands, op, dtype, path)
        if compiled:
            item.call(0)
            if not model.graphs_compiled(torch):
                raise RuntimeError("nothing was compiled, what ran was eager (is TORCHDYNAMO_DISABLE set?)")
        return item
    except Exception as exc:  # a compiler chain (dynamo, inductor, C++ or Triton) can raise anything
        if not compiled and not isinstance(exc, RuntimeError):  # torch's out-of-memory errors are RuntimeErrors
            raise
        why = f"torch.compile failed: {model.compile_failure(torch, exc)}" if compiled else model.first_line(exc)
        return Prepared(replace(case(op, dtype, path), skipped=why))
