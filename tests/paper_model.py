"""Stand-ins of families 3 to 5 for a device that exists on paper: `patches()` for `make_sample`.

Plan, protocol and record layout are the families' own; amounts of memory, times and errors come from a model of the
device. `gemm_s`, `stream_rates` and `noise` are make_sample's.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

from escher_kernels import attention, capacity, e2e, model, ops, workload
from escher_kernels.timing import Case, Machine, Prepared, Session
from escher_kernels.workload import Op, Spec

GIB = 2**30
RESERVED_BYTES = 2 * GIB  # what driver and context hold: 286 of 288 GiB are given
ATTENTION_FLOP_S = {"aiter": 1.18e15, "sdpa_flash": 0.86e15, "sdpa_efficient": 0.61e15, "sdpa_math": 0.11e15}
OPERATORS = {
    "aiter": "aiter::mha_fwd", "sdpa_flash": "aten::_scaled_dot_product_flash_attention",
    "sdpa_efficient": "aten::_scaled_dot_product_efficient_attention", "sdpa_math": "math (bmm, softmax, bmm)",
}  # fmt: skip
SKIPPED = {
    "flash_attn": "flash_attn cannot be imported: ModuleNotFoundError: No module named 'flash_attn'",
    "sdpa_cudnn": "cuDNN attention runs on NVIDIA GPUs only",
}
EAGER_STREAMS = {  # kernels of an eager operation, and how often its stream crosses memory against its declared bytes
    "norm": (1, 1.0), "norm_affine": (1, 1.0), "modulate": (3, 2.1), "qk_norm": (1, 1.05), "rope": (7, 4.2),
    "cache_write": (2, 1.05), "residual_gate": (2, 1.7), "residual": (1, 1.0), "gelu": (1, 1.0), "time_embed": (4, 1.0),
}  # fmt: skip


class Memory:
    """A device's memory for `capacity.explore`: pieces that give back what they hold when nobody names them."""

    def __init__(self, total_bytes: int):
        self.total, self.used = total_bytes, 0

    def take(self, size: int, stride: int = 1) -> Piece:
        if self.used + size > self.total - RESERVED_BYTES:
            raise MemoryError(f"HIP out of memory. Tried to allocate {size / GIB:.2f} GiB")
        return Piece(self, size)

    def release(self) -> None: ...

    def spare_bytes(self) -> None: ...

    def free_bytes(self) -> int:
        return self.total - self.used - RESERVED_BYTES // 2

    def allocator(self, held_bytes: int) -> dict[str, int]:
        return {"allocated": held_bytes, "reserved": held_bytes, "inactive_split": 0}


class Piece:
    def __init__(self, memory: Memory, size: int):
        self.memory, self.size = memory, size
        memory.used += size

    def __del__(self) -> None:
        self.memory.used -= self.size


def in_child(total_bytes: int) -> Callable[[capacity.Plan], Iterator[dict[str, Any]]]:
    """Stands in for `capacity.in_child`."""

    def explored(plan: capacity.Plan) -> Iterator[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        capacity.explore(plan, Memory(total_bytes), lambda case, **what: events.append({"case": case, **what}))
        yield from events
        yield {"exit": 0, "error": "", "overdue": False}

    return explored


class Paper:
    """The device's times and errors. `gemm_s(params)`: seconds of a GEMM. `bytes_s`: cold HBM rate of copy."""

    def __init__(self, gemm_s: Callable[[dict[str, Any]], float], bytes_s: float, launch_s: float, seed: int):
        self.gemm_s, self.bytes_s, self.launch_s, self.noise = gemm_s, bytes_s, launch_s, random.Random(seed)

    def short(self, value: float) -> float:
        return float(f"{value:.5g}")

    def op_s(self, op: Op, path: str) -> float:
        """Seconds of one operation on one path."""
        s = op.shape
        if op.kind == "linear":
            tuned = 0.985 if path == ops.COMPILED else 1.0
            return self.gemm_s({"m": s["m"], "n": s["n"], "k": s["k"], "layout": "NT"}) * tuned
        if op.kind == "attention":
            backend = "sdpa_flash" if path == ops.DEFAULT else path
            rate = ATTENTION_FLOP_S[backend] * (1.0 if s["skv"] > 4096 else 0.62)  # a short loop over K and V
            return self.launch_s + max(op.flop / rate, op.bytes / self.bytes_s)
        kernels, crossings = EAGER_STREAMS[op.kind]
        if path == ops.COMPILED:
            kernels, crossings = 1, 1.03
        return kernels * self.launch_s + crossings * op.bytes / (0.93 * self.bytes_s)

    def error(self, op: Op, path: str, dtype: str, full: bool) -> dict[str, Any]:
        """What the checks say of a right result whose only errors are its roundings."""
        if op.kind == "linear":
            out = {"check": "freivalds", "freivalds_ratio": self.short(0.28 + 0.1 * self.noise.random()), "ok": True}
            u = 2.0**-8
            return out | ({} if not full else {
                "check": "full", "rows_checked": min(256, op.shape["m"]),
                "elementwise_ratio": self.short(0.97 + 0.02 * self.noise.random()),
                "rel_frobenius": self.short(u * (0.423 + 0.004 * self.noise.random())), "rel_frobenius_limit": u,
            })  # fmt: skip
        if op.kind == "cache_write":
            return {"check": "exact", "ok": True}
        sizes = {"check": "attention", "heads_checked": 4} if op.kind == "attention" else {"check": "rows"}
        level = {"sdpa_math": 1.7e-3}.get(path, 2.3e-3 if op.kind == "attention" else 1.7e-3)
        return {**sizes, "rel_frobenius": self.short(level * (1 + 0.04 * self.noise.random())),
                "rel_frobenius_limit": 2.0**-7, "rows_checked": 64, "ok": True}  # fmt: skip

    def prepare_op(self, torch: Any, operands: Any, op: Op, dtype: str, path: str = ops.DEFAULT) -> Prepared:
        """Stands in for `ops.prepare`."""
        item = ops.case(op, dtype, path)
        if op.kind == "attention":
            name = "sdpa_flash" if path == ops.DEFAULT else path
            if name in SKIPPED:
                return Prepared(replace(item, skipped=SKIPPED[name]))
            s = op.shape
            sizes = (s["batch"], s["heads"], s["sq"], s["skv"], s["head_size"], 2)
            if reason := attention.too_big(name, *sizes, 250 * GIB):
                return Prepared(replace(item, skipped=reason))
            item, backend = replace(item, params={**item.params, "attention": name}), OPERATORS[name]
        else:
            backend = f"torch.compile, {op.kind}" if path == ops.COMPILED else f"torch, eager {op.kind}"
        sets = math.ceil(4 * operands.machine.llc_bytes / op.bytes) + 1
        item = replace(item, params={**item.params, "operand_sets": sets})
        return Prepared(
            item, call=lambda _: self.op_s(op, path), check=lambda _, full: self.error(op, path, dtype, full), backend=backend
        )

    def pass_s(self, spec: Spec, compiled: bool) -> float:
        """Seconds of a whole pass: its operations, compiled ones fused, and on the eager side the gaps between kernels."""
        total = 0.0
        for op in workload.ops(spec):
            path = ops.DEFAULT
            if op.kind == "attention":
                path = "aiter"
            elif compiled and op.kind != "cache_write":
                path = ops.COMPILED
            fused = 0.55 if compiled and op.kind in ("modulate", "residual_gate", "residual", "qk_norm", "rope") else 1.0
            total += (1 if op.per_pass else spec.depth) * fused * self.op_s(op, path)
        return total + self.idle(compiled)

    def idle(self, compiled: bool) -> float:
        """Seconds of a pass in which nothing runs."""
        return 0.31e-3 if compiled else 0.94e-3


class Net:
    """Stands in for `model.Model`."""

    def __init__(self, torch: Any, spec: Spec, dtype: Any, device: Any, backend: str = "sdpa"):
        self.spec, self.backend, self.blocks = spec, backend, ["block"] * spec.depth

    def run(self, chunk: int, blocks: Any = None) -> None: ...

    def weight_bytes(self) -> int:
        return workload.weight_bytes(self.spec) + 2 * self.spec.depth * 12 * self.spec.hidden

    def cache_bytes(self) -> int:
        return workload.cache_bytes(self.spec)


def patches(paper: Paper, total_bytes: int) -> contextlib.ExitStack:
    """Open it around the families' `measure`."""
    counted = {"block": 0, "time": 0, "pass": 0}

    def counter(torch: Any, spec: Spec) -> dict[str, int]:
        table = workload.ops(spec)
        counted["block"] = sum(op.flop for op in table if not op.per_pass)
        counted["time"] = sum(op.flop for op in table if op.per_pass)
        return {**counted, "pass": spec.depth * counted["block"] + counted["time"]}

    def chosen(session: Session, machine: Machine, spec: Spec, dtype: Any) -> str:
        error = paper.error(workload.ops(spec)[9], "aiter", "bf16", True)
        error = {**error, "check": "attention", "heads_checked": 4, "rows_checked": 64, "rel_frobenius": 0.0023194,
                 "rel_frobenius_limit": 2.0**-7}  # fmt: skip
        session.record(e2e.value_case("attention.aiter"), error=error, backend=OPERATORS["aiter"])
        return "aiter"

    def compiled(session: Session, machine: Machine, net: Net, modes: tuple[str, ...]) -> e2e.Compiled:
        item = e2e.value_case("compile", mode=modes[0], graphs=1, from_cache=0)
        found = (("compiled block", 3.1e-3, 2.0**-6), ("compiled pass", 9.6e-3, e2e.pass_limit(net.spec.depth)))
        for what, level, limit in found:
            error = {"check": what, "rel_frobenius": level, "rel_frobenius_limit": limit, "ok": True}
            session.record(item, error=error, value=147.2, unit="s")
        return e2e.Compiled(net.blocks, modes[0], 147.2, 1, 0)

    def prepared(session: Session, machine: Machine, net: Net, item: Case, blocks: Any, backend: str) -> Prepared:
        errors = {"self_attn_rel": 3.3e-3, "cross_attn_rel": 4.4e-3, "ffn_rel": 5.2e-3, "block_rel": 3.0e-3,
                  "cache_rel": 4.4e-3}  # fmt: skip
        branches = {"check": "branches", **errors, "rel_frobenius_limit": 2.0**-6, "rows_checked": 32,
                    "rel_frobenius": 5.2e-3, "ok": True}  # fmt: skip
        against = {"check": "against eager", "rel_frobenius": 9.6e-3, "rel_frobenius_limit": e2e.pass_limit(net.spec.depth),
                   "ok": True}  # fmt: skip
        return Prepared(
            item, call=lambda _: paper.pass_s(net.spec, blocks is not None),
            check=lambda _, full: branches if full and blocks is None else against, backend=backend,
            per_block=max(1, round((net.spec.chunks - 1) / session.budget.blocks)),
        )  # fmt: skip

    peak = iter((0.94, 1.02))

    def peak_bytes(machine: Machine) -> tuple[int, str]:
        spec = workload.load()
        live = next(peak) * workload.activation_bytes(spec)
        return int(Net(None, spec, None, None).weight_bytes() + workload.cache_bytes(spec) + live), "allocated on the device"

    idles = iter((paper.idle(False), paper.idle(True)))
    stack = contextlib.ExitStack()
    for target, name, stand_in in (
        (capacity, "in_child", in_child(total_bytes)),
        (ops, "Operands", lambda torch, machine, spec, dtype: SimpleNamespace(machine=machine)),
        (ops, "prepare", paper.prepare_op),
        (model, "graphs_compiled", lambda torch: 1),
        (attention, "enable_experimental_aotriton", lambda torch: "1 (set here)"),
        (model, "counted_flop", counter),
        (model, "inference", lambda torch, backend: contextlib.nullcontext()),
        (e2e, "Model", Net),
        (e2e, "choose_attention", chosen),
        (e2e, "compile_model", compiled),
        (e2e, "prepare", prepared),
        (e2e, "reset_peak", lambda machine: None),
        (e2e, "peak_bytes", peak_bytes),
        (e2e, "used_bytes", lambda machine: 0),
        (e2e, "idle_s", lambda torch, call, passes=3: next(idles)),
    ):
        stack.enter_context(mock.patch.object(target, name, stand_in))
    return stack
