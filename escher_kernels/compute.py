"""Family 1, compute: how fast can this device multiply matrices?

A GEMM (M,K) x (K,N) is 2*M*N*K FLOP. The compute roof is the median of a FRESH measurement of the winner of a
coarse-to-fine search over squares, the workload's GEMMs, other shapes and layouts: a winner's own search time is the
luckiest of many and is not the roof. Traps this module avoids: constant data (a GPU clocks higher on zeros: operands
are N(0,1)); timing a wrong result (outputs are poisoned, then checked against float64 from the same low-precision
inputs); an emulated dtype that makes one call last minutes (a tiny GEMM is tried first).
On a CPU the peak is probed in the same blocks with loops that the C compiler builds (`native`): without a compiler the
row says so. Outside tools that agree: rocblas-bench, hipblaslt-bench, cublasLt matmul samples, RVS gst, cpufp.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from escher_kernels import native
from escher_kernels.checks import CHUNK, gemm_error
from escher_kernels.records import Record
from escher_kernels.timing import ANCHOR_COPY_BYTES, Case, Machine, Prepared, Session, normal
from escher_kernels.workload import Spec, gemms

SQUARES = {"gpu": (1024, 2048, 4096, 8192, 12288, 16384, 20480, 24576, 32768), "cpu": (256, 512, 1024, 2048, 4096)}
OTHER_SHAPES = {  # M, N, K: large and skewed, multiples of 256 that are no powers of two among them
    "gpu": ((4096, 8192, 8192), (8192, 8192, 16384), (12288, 8192, 8192), (16384, 8192, 4096), (8192, 28672, 8192),
            (6144, 6144, 12288), (10240, 10240, 10240)),
    "cpu": ((512, 512, 4096), (768, 768, 768), (1536, 1536, 1536), (1024, 4096, 1024), (4096, 1024, 1024),
            (3072, 3072, 3072), (2048, 2048, 8192)),
}  # fmt: skip
STEP = 64
REFINE_TOP, REFINE_ROUNDS, REFINE_GAIN = 3, 5, 1.005
ELEMENT_BYTES = 2
ROOF_SHARE = 5.0
SMALL_M = 64  # fewer rows cannot be a roof: they are searched last


def gemm(name: str, m: int, n: int, k: int, layout: str = "NN", dtype: str = "bf16", **params: Any) -> Case:
    """The case of (M,K) x (K,N). `layout`: N or T for A and B; T is stored transposed, the product is the same."""
    role = params.pop("role", "case")
    return Case(
        name, {"m": m, "n": n, "k": k, "layout": layout, "dtype": dtype, **params}, flop=2 * m * n * k,
        bytes_moved=ELEMENT_BYTES * (m * k + k * n + m * n), role=role,
    )  # fmt: skip


def largest_operand(case: Case) -> int:
    m, n, k = (case.params[x] for x in "mnk")
    return max(m * k, k * n, m * n)


def cases(kind: str, dtype: str, spec: Spec) -> list[Case]:
    """Rows that are always measured: the squares, and each distinct GEMM of the workload under its first name."""
    out = [gemm(f"square.{n}", n, n, n, dtype=dtype) for n in SQUARES[kind]]
    shapes: dict[tuple[int, int, int], list[str]] = {}
    for g in gemms(spec):
        shapes.setdefault((g.m, g.n, g.k), []).append(g.name)
    out += [gemm(names[0], *shape, dtype=dtype, also=names[1:]) for shape, names in shapes.items()]
    return out


def coarse(kind: str, dtype: str, spec: Spec) -> list[Case]:
    """First round of the roof search: everything of `cases`, and other shapes."""
    listed = [(c.params["m"], c.params["n"], c.params["k"]) for c in cases(kind, dtype, spec)]
    shapes = sorted(dict.fromkeys([*listed, *OTHER_SHAPES[kind]]), key=lambda shape: shape[0] < SMALL_M)
    return [search_case(*shape, "NN", dtype, 0) for shape in shapes]


def search_case(m: int, n: int, k: int, layout: str, dtype: str, step: int) -> Case:
    return gemm(f"search.{m}x{n}x{k}.{layout}", m, n, k, layout, dtype, role="search", round=step)


def rate(record: Record) -> float:
    """FLOP/s of a search record's best sample, for choosing candidates: other work only slows. Not stored."""
    return record.flop * record.calls_per_sample / min((s for s in record.samples_s if s > 0), default=math.inf)


def refine(records: Iterable[Record], limit_elements: int, limit_flop: float) -> list[Case]:
    """Next round of the search: each dimension of the best three scaled, and their other layouts, unseen ones only."""
    records = [r for r in records if r.samples_s]
    seen = {(r.params["m"], r.params["n"], r.params["k"], r.params["layout"]) for r in records}
    out: dict[tuple, Case] = {}
    step = max((r.params["round"] for r in records), default=-1) + 1
    for record in sorted(records, key=rate, reverse=True)[:REFINE_TOP]:
        m, n, k, layout, dtype = (record.params[x] for x in ("m", "n", "k", "layout", "dtype"))
        near = [(m, n, k, other) for other in ("NN", "NT", "TN")]
        for factor in (0.5, 0.75, 1.5, 2.0):
            near += [(m * factor, n, k, layout), (m, n * factor, k, layout), (m, n, k * factor, layout)]
        for mm, nn, kk, other in near:
            shape = tuple(max(STEP, round(x / STEP) * STEP) if x > STEP else max(1, round(x)) for x in (mm, nn, kk))
            key = (*shape, other)
            fits = largest_operand(search_case(*key, dtype, step)) <= limit_elements
            if key not in seen and key not in out and fits and 2 * math.prod(shape) <= limit_flop:
                out[key] = search_case(*key, dtype, step)
    return list(out.values())


class Pools:
    """Flat N(0,1) operands and an output, cut into views for every shape, so that all cases fit at once."""

    def __init__(self, torch: Any, device: str, dtype: str, elements: int):
        element = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
        self.torch, self.elements = torch, elements
        self.a, self.b = (normal(torch, elements, element, device) for _ in range(2))
        self.c = torch.empty(elements, dtype=element, device=device)

    def prepare(self, case: Case, backend: str) -> Prepared:
        if case.skipped:
            return Prepared(case)
        m, n, k, layout, dtype = (case.params[x] for x in ("m", "n", "k", "layout", "dtype"))
        if largest_operand(case) > self.elements:
            why = f"an operand has {largest_operand(case)} elements, memory is planned for {self.elements}"
            return Prepared(replace(case, skipped=why))
        a = self.a[: m * k].view(m, k) if layout[0] == "N" else self.a[: m * k].view(k, m).t()
        b = self.b[: k * n].view(k, n) if layout[1] == "N" else self.b[: k * n].view(n, k).t()
        c = self.c[: m * n].view(m, n)
        return Prepared(
            case,
            call=lambda _: self.torch.mm(a, b, out=c),
            poison=lambda: c.fill_(math.nan),
            check=lambda _, full: gemm_error(self.torch, a, b, c, dtype, full),
            backend=backend,
        )


def blas_backend(torch: Any, kind: str) -> str:
    """torch.mm and the library it is set to prefer; torch does not tell which one a call used."""
    if kind == "cpu":
        return f"torch.mm, oneDNN {'enabled' if torch.backends.mkldnn.is_available() else 'not built in'}"
    name = str(torch.backends.cuda.preferred_blas_library()).rpartition(".")[2]
    if torch.version.hip:
        name = {"Cublas": "hipBLAS", "Cublaslt": "hipBLASLt"}.get(name, name)
    return f"torch.mm, preferred BLAS {name}"


def search(session: Session, pools: Pools, first: Sequence[Case], backend: str) -> tuple[list[Record], str]:
    """Coarse to fine: measure `first`, then neighbours of the best three, until a round gains < 0.5 % or time is up.

    Returns what was measured and why it ended.
    """
    began, done, best, todo, step = session.clock(), [], 0.0, list(first), 0
    limit_flop = math.inf
    while todo:
        for number, case in enumerate(todo):
            if done and session.clock() - began > session.budget.search_s:
                return done, f"stopped in round {step} after {session.budget.search_s:g} s, its share of the budget"
            session.progress(f"roof search, round {step}, shape {number + 1} of {len(todo)}", always=number == 0)
            if case.flop <= limit_flop and (record := session.quick_rate(pools.prepare(case, backend))):
                done.append(record)
                limit_flop = max(map(rate, done)) * session.budget.search_s / 40
        top = max(map(rate, done), default=0.0)
        if top < best * REFINE_GAIN:
            return done, f"ended in round {step}, which gained less than {(REFINE_GAIN - 1) * 100:g} %"
        if step >= REFINE_ROUNDS:
            break
        best, step = top, step + 1
        todo = refine(done, pools.elements, limit_flop)
    return done, f"ended after round {step}"


def probes(session: Session, probe: native.Native, cores: Sequence[int]) -> list[Prepared]:
    """CPU: the peak of each instruction a GEMM of the dtype can be made of, and the real clock, in every block.

    A slice of `peak.<kernel>` holds the FLOP of all threads and lasts from the first start to the last end. The fastest
    kernel also gets a row a thread: threads need not be at full speed at the same time (a neighbour on the sibling
    hyperthread can halve a tile unit for seconds), so the sum of their own bests is what no correct GEMM exceeds.
    An instruction that the CPU has and that cannot be probed, or a loop that does not count right, is a skipped row.
    """
    slices = 16 if session.budget.name == "quick" else 48
    cores, last = list(cores), {}

    def peak(kernel: native.Kernel, case: Case) -> tuple[Sequence[float], Case]:
        run = last[kernel.name] = probe.peak(kernel, cores, slices=slices)
        params = {**case.params, "threads": run.threads, "pinned": all(run.pinned)}
        return run.wall_s, replace(case, params=params, flop=run.flop_per_slice)

    def of_thread(name: str, thread: int, case: Case) -> tuple[Sequence[float], Case]:
        return last[name].thread_s[thread], replace(case, flop=last[name].flop_per_slice // last[name].threads)

    def clock(chain: native.Chain, case: Case) -> tuple[Sequence[float], Case]:
        (run,) = probe.interleaved([chain], cores[:1], slices)
        return run.wall_s, replace(case, params={"cycles": run.cycles_per_slice, "pinned": all(run.pinned)})

    for name, reason in probe.blocked().items():
        session.skip(Case(f"peak.{name}", role="probe"), reason)
    out, speed = [], {}
    for k in probe.kernels():
        case = Case(f"peak.{k.name}", {"dtype": k.dtype}, role="probe")
        if probe.check_sum(k, 64, ones=True) != 64 * k.flop_per_turn / 2:
            session.skip(
                case, f"the loop that {probe.command[0]} built does not count right; set CC to another compiler"
            )
            continue
        run = probe.peak(k, cores, slices=4)
        speed[k.name] = run.flop_per_slice / min(run.wall_s)
        out.append(Prepared(case, sampler=lambda k=k, c=case: peak(k, c), backend="C loop"))
    if speed:
        fastest = max(speed, key=speed.__getitem__)
        for i in range(len(cores)):
            case = Case(f"peak.{fastest}.thread{i}", {"thread": i, "of": f"peak.{fastest}"}, role="probe")
            out.append(Prepared(case, sampler=lambda i=i, c=case: of_thread(fastest, i, c), backend="C loop"))
    for chain in probe.chains():
        case = Case(f"clock.{chain.name}", role="probe")
        out.append(Prepared(case, sampler=lambda n=chain, c=case: clock(n, c), backend="C loop"))
    return out


def measure(session: Session, machine: Machine, spec: Spec) -> None:
    """Warm-up, anchors, roof search, then all rows and the fresh roof in blocks. Records go through `session`."""
    torch, kind, dtype = machine.torch, machine.kind, machine.dtype
    if kind == "gpu":
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    backend = blas_backend(torch, kind)
    first, rows = coarse(kind, dtype, spec), cases(kind, dtype, spec)
    reserve = 2 * ANCHOR_COPY_BYTES[kind] + 4 * 8 * CHUNK  # the anchors, and what a check converts to float64
    affordable = (machine.memory_bytes - reserve) // (5 * ELEMENT_BYTES)  # three pools, and two fifths to spare
    try:
        if affordable <= 0:
            raise RuntimeError(f"{machine.memory_bytes / 2**20:.0f} MiB of memory are too little")
        pools = Pools(torch, machine.device, dtype, min(affordable, max(map(largest_operand, [*first, *rows]))))
        session.warm_up(machine)
    except RuntimeError as exc:  # torch's out-of-memory errors are RuntimeErrors
        for case in [*rows, *([Case("peak", {"dtype": dtype}, role="probe")] if kind == "cpu" else [])]:
            session.skip(case, str(exc).splitlines()[0])
        return
    session.anchor()
    found, ended = search(session, pools, first, backend)
    session.progress(f"roof search {ended}, {len(found)} shapes")
    session.anchor()
    items = [pools.prepare(case, backend) for case in rows]
    finalists = sorted(found, key=rate, reverse=True)[:REFINE_TOP]
    right = [r for r in finalists if _is_right(session, pools, r, backend)]
    if right:
        m, n, k, layout = (right[0].params[x] for x in ("m", "n", "k", "layout"))
        roof = pools.prepare(gemm("roof", m, n, k, layout, dtype, searched=len(found), search_ended=ended), backend)
        items.append(replace(roof, share=ROOF_SHARE))
    if kind == "cpu":
        try:
            with native.load() as probe:
                session.run_blocks([*items, *probes(session, probe, machine.cores)])
        except native.NativeUnavailable as exc:
            session.skip(Case("peak", {"dtype": dtype}, role="probe"), str(exc))
            session.run_blocks(items)
    else:
        session.run_blocks(items)
    session.anchor()


def _is_right(session: Session, pools: Pools, found: Record, backend: str) -> bool:
    """The full float64 check of a finalist of the search, recorded."""
    item = pools.prepare(Case(found.case, found.params, found.flop, found.bytes_moved, role="search"), backend)
    try:
        item.poison()
        item.call(0)
        error = item.check(0, True)
    except RuntimeError as exc:  # out of memory in the check
        session.skip(item.case, str(exc).splitlines()[0])
        return False
    session.record(item.case, error=error, backend=backend)
    return error["ok"]
