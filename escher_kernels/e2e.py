"""Family 5, e2e: how fast does the whole model run, eagerly and compiled?

One call is one pass of all blocks over one chunk (or denoising step): batch 1, time embedding once a pass, a window of
keys and values that is full before the first call. The first chunk is discarded; 24 kept ones make 6 blocks of 4, eager
and compiled blocks alternating. FLOP of a pass are declared by the op table and compared with torch's own counter on the
eager model. One block is compiled and reused by all; modes are tried in order and the one that ran is named.
Traps this module avoids: a compiled model that fell back to eager (one graph or none: `fullgraph`); "1.00x" where
nothing was compiled (unavailable, with the reason); compile time inside the timed region; a compiled or eager result
that is wrong (branches against float64, compiled against eager); attention that silently ran another kernel.
Outside tools that agree: torch.profiler on one pass, the model's own per-step log.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from escher_kernels import attention, model
from escher_kernels.model import BLOCK_LIMIT, Model
from escher_kernels.timing import Case, Machine, Prepared, Session
from escher_kernels.workload import ELEMENT_BYTES, Spec, cache_bytes, pass_flop, weight_bytes

MODES = {"gpu": ("max-autotune", "reduce-overhead", "default"), "cpu": ("max-autotune", "default")}  # CPU: no graphs
UNTIL_REPLAY = 4  # passes: of a graph the first call warms up, the second records, later ones replay
PASS_DEPTH = 10  # blocks up to which the bound of a whole pass does not grow
LIMIT_S = {"quick": 30.0, "standard": 90.0, "full": 600.0}  # for one of the two, all its chunks
EAGER, COMPILED = "eager", "compiled"


def modes(kind: str, budget: str) -> tuple[str, ...]:
    """The compile modes to try, in order; at budget quick only the one that compiles fastest."""
    return MODES[kind][-1:] if budget == "quick" else MODES[kind]


def compulsory_bytes(spec: Spec) -> int:
    """What a pass cannot avoid to move: every weight and the window once, its input and its output."""
    return weight_bytes(spec) + cache_bytes(spec) + 2 * ELEMENT_BYTES * spec.batch * spec.query_tokens * spec.hidden


def case(spec: Spec, dtype: str, name: str, **params: Any) -> Case:
    sizes = {"depth": spec.depth, "query_tokens": spec.query_tokens, "window_tokens": spec.window_tokens}
    return Case(name, {"dtype": dtype, **sizes, **params}, flop=pass_flop(spec), bytes_moved=compulsory_bytes(spec))


def cases(spec: Spec, dtype: str) -> list[Case]:
    """The two timed rows."""
    return [case(spec, dtype, name) for name in (EAGER, COMPILED)]


def value_case(name: str, **params: Any) -> Case:
    """A measurement that is no time of the pass."""
    return Case(name, params, role="probe")


def pass_limit(depth: int) -> float:
    """Relative Frobenius that compiled may differ from eager over a whole pass."""
    return BLOCK_LIMIT * max(1.0, math.sqrt(depth / PASS_DEPTH))


# ---- memory ----


def reset_peak(machine: Machine) -> None:
    """Start a new peak of the memory in use."""
    if machine.kind == "gpu":
        machine.torch.cuda.reset_peak_memory_stats()
        return
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # 5: reset the peak resident set size
    except OSError:
        pass  # the peak then is that of the process, and `peak_bytes` says so


def used_bytes(machine: Machine, root: Path = Path("/proc/self")) -> int:
    """What the process holds now, before the model is built: the peak is told beyond it."""
    if machine.kind == "gpu":
        return int(machine.torch.cuda.memory_allocated())
    return _status(root, "VmRSS")[0] or 0


def peak_bytes(machine: Machine, root: Path = Path("/proc/self")) -> tuple[int | None, str]:
    """(bytes, what they are): peak of torch's allocator on a GPU, of the resident set on a CPU host."""
    if machine.kind == "gpu":
        peak = int(machine.torch.cuda.max_memory_allocated())
        return (peak, "allocated on the device") if peak else (None, "the allocator reports a peak of 0")
    return _status(root, "VmHWM")


def _status(root: Path, name: str) -> tuple[int | None, str]:
    try:
        status = (root / "status").read_text(encoding="ascii", errors="replace")
    except OSError as exc:
        return None, f"{root / 'status'}: {exc.strerror}"
    found = re.search(rf"^{name}:\s+(\d+) kB", status, re.M)
    return (int(found.group(1)) * 1024, "resident set of the process") if found else (None, f"no {name}")


# ---- attention and compiling ----


def choose_attention(session: Session, machine: Machine, spec: Spec, dtype: Any) -> str:
    """The first backend in order that is there, fits, is right and really runs; torch's own choice where none is."""
    torch, b, heads = machine.torch, spec.batch, (spec.heads, spec.head_size)
    q, k, v = (model.tensor(torch, (b, n, *heads), dtype, machine.device)
               for n in (spec.query_tokens, spec.window_tokens, spec.window_tokens))  # fmt: skip
    sizes = (b, spec.heads, spec.query_tokens, spec.window_tokens, spec.head_size, ELEMENT_BYTES)
    for name in attention.BACKENDS:
        item = value_case(f"attention.{name}")
        reason = attention.unavailable(torch, machine.kind, name, machine.dtype, spec.head_size)
        reason = reason or attention.too_big(name, *sizes, machine.free_bytes())
        if reason:
            session.skip(item, reason)
            continue
        run, kept = attention.attend(torch, name), []
        try:
            with model.inference(torch, name):
                ran = attention.what_ran(torch, lambda run=run, kept=kept: kept.append(run(q, k, v)))
            error = attention.attention_error(torch, q, k, v, kept[-1])
        except Exception as exc:  # no kernel for this shape, out of memory; a package fails in ways of its own
            session.skip(item, model.first_line(exc))
            continue
        session.record(item, error=error, backend=ran)
        if error["ok"] and attention.is_backend(name, ran):
            return name
    return attention.DEFAULT


@dataclass
class Compiled:
    """The compiled blocks, the mode that ran, and how long the first pass took, compiling included."""

    blocks: list[Any]
    mode: str
    seconds: float
    graphs: int
    from_cache: int = field(default=0)


def compile_model(session: Session, machine: Machine, net: Model, modes: tuple[str, ...]) -> Compiled | None:
    """Compile in the first mode that works and is right; each failure is a record with its reason. None: unavailable."""
    torch = machine.torch
    for mode in modes:
        item = value_case("compile", mode=mode)
        session.progress(f"compiling, mode {mode}")
        try:
            torch._dynamo.reset()
            torch._dynamo.utils.counters.clear()
            blocks = model.compiled_blocks(torch, net, mode)
            net.poison(0)
            began = time.perf_counter()
            step(torch)
            got = net.run(0, blocks)
            if machine.kind == "gpu":
                torch.cuda.synchronize()
            seconds = time.perf_counter() - began
            errors = compiled_errors(torch, net, blocks, got)
        except Exception as exc:  # dynamo, inductor, the C++ compiler or Triton can raise anything
            session.skip(item, f"unavailable: {model.compile_failure(torch, exc)}")
            continue
        graphs = model.graphs_compiled(torch)
        if not graphs:
            session.skip(item, "unavailable: nothing was compiled, what ran was eager (is TORCHDYNAMO_DISABLE set?)")
            continue
        out = Compiled(blocks, mode, seconds, graphs, torch._dynamo.utils.counters["inductor"]["fxgraph_cache_hit"])
        item = replace(item, params={**item.params, "graphs": out.graphs, "from_cache": out.from_cache})
        for error in errors:
            session.record(item, error=error, value=round(seconds, 3), unit="s")
        if all(e["ok"] for e in errors):
            return out
    return None


def step(torch: Any) -> None:
    """Tell graph replay that the outputs of the last pass are no longer needed."""
    torch.compiler.cudagraph_mark_step_begin()


def compiled_errors(torch: Any, net: Model, blocks: list[Any], got: Any) -> list[dict[str, Any]]:
    """Compiled against eager: one block, and the worst of the whole pass whose output is `got` and those of the chunks after
    it, until graphs are replayed. Each must write its own slot of the ring buffers, which holds NaN before.
    """
    got, limit = got.clone(), pass_limit(net.spec.depth)
    around = net.arguments(0)
    step(torch)
    one = blocks[0](net.x, *around).clone()
    block = model.relative_error(one, net.blocks[0](net.x, *around), BLOCK_LIMIT, "compiled block")
    passes = [model.relative_error(got, net.run(0), limit, "compiled pass")]
    for chunk in range(1, UNTIL_REPLAY):
        net.poison(chunk)
        step(torch)
        try:
            got = net.run(chunk, blocks).clone()
        finally:
            want = net.run(chunk)  # leaves no NaN behind, whatever happened
        passes.append(model.relative_error(got, want, limit, "compiled pass"))
    return [block, max(passes, key=lambda e: math.inf if e["rel_frobenius"] is None else e["rel_frobenius"])]


# ---- timing ----


def prepare(session: Session, machine: Machine, net: Model, item: Case, blocks: list[Any] | None, backend: str) -> Prepared:
    """A timed row. Its check: the eager model's branches against float64, compiled against eager."""
    torch, last = machine.torch, {}

    def call(turn: int) -> None:
        if blocks is not None:
            step(torch)
        last["out"] = net.run(turn, blocks)

    def poison() -> None:
        if (out := last.pop("out", None)) is not None:
            out.fill_(math.nan)

    def check(turn: int, full: bool) -> dict[str, Any]:
        if full:
            branches = model.branch_errors(torch, net.blocks[0], net.x, net.arguments(turn))
            if blocks is None or not branches["ok"]:  # what compiled is compared with must be right
                return branches
        return model.relative_error(last["out"].clone(), net.run(turn), pass_limit(net.spec.depth), "against eager")

    kept = net.spec.chunks - 1
    per_block = 1 if session.budget.name == "quick" else max(1, round(kept / session.budget.blocks))
    return Prepared(
        item, call, poison, check, backend, per_block=per_block, limit_s=LIMIT_S[session.budget.name] / per_block
    )


def idle_s(torch: Any, call: Callable[[], Any], passes: int = 3) -> float:
    """Seconds a pass in which the GPU runs no kernel although the pass is under way, by torch's profiler."""
    profiler = torch.profiler
    with profiler.profile(activities=[profiler.ProfilerActivity.CUDA]) as trace:
        for _ in range(passes):
            call()
        torch.cuda.synchronize()
    spans = sorted((e.time_range.start, e.time_range.end) for e in trace.events() if _on_device(e))
    return gaps(spans) / 1e6 / passes


def _on_device(event: Any) -> bool:
    return str(event.device_type).endswith("CUDA") and event.time_range.end > event.time_range.start


def gaps(spans: list[tuple[float, float]]) -> float:
    """Time between the first start and the last end that no span covers; ValueError without spans."""
    if not spans:
        raise ValueError("the profiler saw no kernel")
    idle, reached = 0.0, spans[0][0]
    for start, end in spans:
        idle += max(0.0, start - reached)
        reached = max(reached, end)
    return idle


def measure(session: Session, machine: Machine, spec: Spec) -> None:
    """Attention, model, counter, memory, compiling; then eager and compiled chunks in alternating blocks."""
    torch, kind, dtype = machine.torch, machine.kind, machine.dtype
    element = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    if kind == "gpu":
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        attention.enable_experimental_aotriton(torch)
    counted = model.counted_flop(torch, spec)
    session.record(value_case("flop.counter", declared=pass_flop(spec), **counted), value=float(counted["pass"]), unit="FLOP",
                   backend="torch.utils.flop_counter, math attention, device meta")  # fmt: skip
    eager, compiled = cases(spec, dtype)
    begun = {name: session.earlier(item)[0].params for name, item in ((EAGER, eager), (COMPILED, compiled))
             if any(r.samples_s for r in session.earlier(item))}  # fmt: skip
    try:
        session.warm_up(machine)
        # a row holds one backend and one mode, also where a resumed run goes on with it
        known = begun.get(EAGER, {}).get("attention")
        backend = known or choose_attention(session, machine, spec, element)
        session.progress(f"building the model, depth {spec.depth}, attention {backend}")
        before = used_bytes(machine)
        net = Model(torch, spec, element, machine.device, backend)
        with model.inference(torch, backend):
            net.run(0)  # the first pass needs memory of its own
    except RuntimeError as exc:  # torch's out-of-memory errors are RuntimeErrors
        for item in (eager, compiled):
            session.skip(item, str(exc).splitlines()[0])
        return
    sizes = {"weights_bytes": net.weight_bytes(), "cache_bytes": net.cache_bytes(), "before_bytes": before}
    session.anchor()
    with model.inference(torch, backend):
        _record_peak(session, machine, "memory.eager", sizes, lambda: net.run(0))
        mode = begun.get(COMPILED, {}).get("mode")
        made = compile_model(session, machine, net, (mode,) if mode else modes(kind, session.budget.name))
        items = [prepare(session, machine, net, replace(eager, params={**eager.params, "attention": backend}), None,
                         f"eager, attention {backend}")]  # fmt: skip
        if made:
            graphs = kind == "gpu" and made.mode != "default"
            note = ", without what replayed graphs keep in pools of their own" if graphs else ""
            _record_peak(session, machine, "memory.compiled", sizes, lambda: net.run(0, made.blocks), note)
            item = replace(compiled, params={**compiled.params, "attention": backend, "mode": made.mode})
            named = f"torch.compile, mode {made.mode}, attention {backend}"
            items.append(prepare(session, machine, net, item, made.blocks, named))
        else:
            session.skip(compiled, "torch.compile is unavailable: no mode compiled to a right result (see compile)")
        session.anchor()
        session.run_blocks(items)
        session.anchor()
        if kind == "gpu":
            _record_gaps(session, torch, net, made)


def _record_peak(
    session: Session, machine: Machine, name: str, sizes: dict[str, int], call: Callable[[], Any], note: str = ""
) -> None:
    """The peak of one pass beyond what the process held before the model was built."""
    try:
        call()
        reset_peak(machine)
        call()
        if machine.kind == "gpu":
            machine.torch.cuda.synchronize()
    except RuntimeError as exc:  # its own reason here; the row that is timed meets it again
        session.skip(value_case(name, **sizes), model.first_line(exc))
        return
    peak, what = peak_bytes(machine)
    item = value_case(name, what=what + note, **sizes)
    if peak is None:
        session.skip(item, what)
    else:
        session.record(item, value=float(max(0, peak - sizes["before_bytes"])), unit="B")


def _record_gaps(session: Session, torch: Any, net: Model, made: Compiled | None) -> None:
    for name, blocks in ((EAGER, None), *([(COMPILED, made.blocks)] if made else [])):
        item = value_case(f"gaps.{name}")
        try:
            idle = idle_s(torch, lambda blocks=blocks: (step(torch), net.run(0, blocks)))
        except (RuntimeError, ValueError) as exc:
            session.skip(item, str(exc).splitlines()[0])
        else:
            session.record(item, value=idle, unit="s")
