"""Family 1, compute: how fast can this device multiply matrices?

A GEMM (M,K) x (K,N) is 2*M*N*K FLOP. The compute roof is the median of a FRESH measurement of the winner of a
coarse-to-fine search over squares, the workload's GEMMs, other shapes and layouts: a winner's own search time is the
luckiest of many and is not the roof. Traps this module avoids: constant data (a GPU clocks higher on zeros: operands
are N(0,1)); timing a wrong result (outputs are poisoned, then checked against float64 from the same low-precision
inputs); an emulated dtype that makes one call last minutes (a tiny GEMM is tried first).
Every GEMM of the workload has a row of its own, also where shapes repeat: equal shapes must agree. Beside them stand
what shape costs at one FLOP (skew), batches, a bias, the GELU epilogue fused or not (interleaved, a ratio), and on a GPU
the reduced-precision reduction of partial sums: off everywhere but in the rows that are labelled with it.
On a CPU the peak is probed in the same blocks with loops that the C compiler builds (`native`): without a compiler the
row says so. Outside tools that agree: rocblas-bench, hipblaslt-bench, cublasLt matmul samples, RVS gst, cpufp.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from escher_kernels import native
from escher_kernels.checks import CHUNK, batched_error, gelu_error, gemm_error
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
SKEW = {"gpu": 8192, "cpu": 1024}  # the square whose FLOP is kept while M grows as N shrinks
SKEW_BY = {"gpu": (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8, 16), "cpu": (1 / 16, 1 / 4, 1, 4, 16)}
BATCHED_TOKENS = {"gpu": 4096, "cpu": 256}
BATCHED_SQUARES = {"gpu": (64, 2048), "cpu": (8, 256)}  # how many, and their M = N = K
PEERS = {"gpu": ((8192, 8192, 16384), (4096, 4864, 8192))}  # that an outside tool times: RVS gst, its A and B swapped
LONG_K = {"gpu": (1024, 1024, 65536)}  # few outputs with long sums, which a library splits into partial sums
STEP = 64
REFINE_TOP, REFINE_ROUNDS, REFINE_GAIN = 3, 5, 1.005
ELEMENT_BYTES = 2
WITH_BIAS = ("addmm", "fused", "unfused")
ROOF_SHARE, SIDE_SHARE = 5.0, 0.5  # of a row's time in a block: the roof's, and that of rows that nothing is judged by
SMALL_M = 64  # fewer rows cannot be a roof: they are searched last


SHAPE = ("m", "n", "k", "layout")  # what tells one GEMM of a dtype from another


def gemm(
    name: str, m: int, n: int, k: int, layout: str = "NN", dtype: str = "bf16", batch: int = 1, **params: Any
) -> Case:  # fmt: skip
    """The case of `batch` times (M,K) x (K,N). `layout`: N or T for A and B; T is stored transposed, the product is the
    same. `op` (mm where it is not given): what is called; addmm, fused and unfused also read a bias of N elements, and
    unfused writes and reads what GELU takes. Bias and GELU count no FLOP.
    """
    role, op = params.pop("role", "case"), params.get("op", "mm")
    elements = batch * (m * k + k * n + m * n)
    elements += (n if op in WITH_BIAS else 0) + (2 * m * n if op == "unfused" else 0)
    of = {"m": m, "n": n, "k": k, "layout": layout, "dtype": dtype, **({"batch": batch} if batch > 1 else {})}
    return Case(name, of | params, flop=2 * batch * m * n * k, bytes_moved=ELEMENT_BYTES * elements, role=role)


def largest_operand(case: Case) -> int:
    """Elements of the largest of A, B and the output; GELU's input lies beside its output, in every row that has one."""
    m, n, k = (case.params[x] for x in "mnk")
    outputs = 2 if case.params.get("op") in ("fused", "unfused") else 1
    return case.params.get("batch", 1) * max(m * k, k * n, m * n * outputs)


def cases(kind: str, dtype: str, spec: Spec) -> list[Case]:
    """Rows of every run: squares, each GEMM of the workload by name, and what stands beside them (`side_cases`)."""
    out = [gemm(f"square.{n}", n, n, n, dtype=dtype) for n in SQUARES[kind]]
    out += [gemm(g.name, g.m, g.n, g.k, dtype=dtype) for g in gemms(spec)]
    return out + side_cases(kind, dtype, spec)


def side_cases(kind: str, dtype: str, spec: Spec) -> list[Case]:
    """Skew: M times r and N over r at the FLOP of one square. Batches: heads x (Sq, D) x (D, Skv), heads x (Sq, Skv) x
    (Skv, D), and squares. A bias: one projection and one FFN GEMM. On a GPU a GEMM of a long K, and the shapes of an
    outside tool."""
    n, tokens = SKEW[kind], BATCHED_TOKENS[kind]
    shapes = [(round(n * r), round(n / r)) for r in SKEW_BY[kind]]
    out = [gemm(f"skew.{rows}x{columns}", rows, columns, n, dtype=dtype) for rows, columns in shapes]
    batch, edge = BATCHED_SQUARES[kind]
    heads = {"dtype": dtype, "batch": spec.heads, "op": "bmm"}
    out += [
        gemm("batched.qk", tokens, tokens, spec.head_size, "NT", **heads),  # keys are stored (Skv, D)
        gemm("batched.av", tokens, spec.head_size, tokens, **heads),
        gemm("batched.square", edge, edge, edge, dtype=dtype, batch=batch, op="bmm"),
    ]
    named = {g.name: (g.m, g.n, g.k) for g in gemms(spec)}
    out += [gemm(f"addmm.{x}", *named[x], "NT", dtype, op="addmm") for x in ("self_attn.q", "ffn.linear1")]
    if kind in LONG_K:
        out.append(gemm("long_k", *LONG_K[kind], dtype=dtype))
    return out + [gemm("peer.{}x{}x{}".format(*shape), *shape, "NT", dtype) for shape in PEERS.get(kind, ())]


def epilogue_cases(dtype: str, spec: Spec) -> list[Case]:
    """The FFN's first GEMM with bias and GELU in one call, and in two. Its weight is stored (N, K), as a Linear's is."""
    g = next(g for g in gemms(spec) if g.name == "ffn.linear1")
    return [
        gemm(f"epilogue.{op}", g.m, g.n, g.k, "NT", dtype, op=op, role="pair", of=g.name) for op in ("unfused", "fused")
    ]


def reduced_cases(kind: str, dtype: str, roof: tuple[int, int, int, str]) -> list[Case]:
    """The roof's GEMM and the long K once more, with the library free to round partial sums to the dtype."""
    shapes = {"reduced.roof": roof, "reduced.long_k": (*LONG_K.get(kind, LONG_K["gpu"]), "NN")}
    out = [gemm(name, *shape, dtype, reduced_precision=True) for name, shape in shapes.items()]
    why = "the switch is that of a GPU's library; torch has none for a CPU"
    return out if kind == "gpu" else [replace(case, skipped=why) for case in out]


def coarse(kind: str, dtype: str, spec: Spec) -> list[Case]:
    """First round of the roof search: squares, each distinct GEMM of the workload, and other shapes."""
    listed = [(n, n, n) for n in SQUARES[kind]] + [(g.m, g.n, g.k) for g in gemms(spec)]
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
    seen = {tuple(r.params[x] for x in SHAPE) for r in records}
    out: dict[tuple, Case] = {}
    step = max((r.params["round"] for r in records), default=-1) + 1
    for record in sorted(records, key=rate, reverse=True)[:REFINE_TOP]:
        m, n, k, layout, dtype = (record.params[x] for x in (*SHAPE, "dtype"))
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
        self.torch, self.elements, self.device = torch, elements, device
        self.a, self.b = (normal(torch, elements, element, device) for _ in range(2))
        self.c = torch.empty(elements, dtype=element, device=device)

    def prepare(self, case: Case, library: str) -> Prepared:
        """The case on views of the pools. `library`: what multiplies, for the record."""
        if case.skipped:
            return Prepared(case)
        if largest_operand(case) > self.elements:
            why = f"an operand has {largest_operand(case)} elements, memory is planned for {self.elements}"
            return Prepared(replace(case, skipped=why))
        m, n, k, layout, dtype = (case.params[x] for x in (*SHAPE, "dtype"))
        batch, op, torch = case.params.get("batch", 1), case.params.get("op", "mm"), self.torch
        a, b, c = view(self.a, batch, m, k, layout[0]), view(self.b, batch, k, n, layout[1]), view(self.c, batch, m, n)
        bias = torch.randn(n, device=self.device).to(c.dtype) if op in WITH_BIAS else None
        if op in ("fused", "unfused"):
            return self._epilogue(case, library, a, b, bias, c)
        split = case.params.get("reduced_precision", False)

        def call(_: int) -> None:
            if op == "addmm":
                torch.addmm(bias, a, b, out=c)
            else:
                (torch.bmm if op == "bmm" else torch.mm)(a, b, out=c)

        def check(_: int, full: bool) -> dict[str, Any]:
            if op == "bmm":
                return batched_error(torch, a, b, c, dtype, full)
            return gemm_error(torch, a, b, c, dtype, full, bias, split)

        return Prepared(
            case,
            call=reduced_precision(torch, dtype, call) if split else call,
            poison=lambda: c.fill_(math.nan),
            check=check,
            backend=f"torch.{op}, {library}",
        )

    def _epilogue(self, case: Case, library: str, a: Any, b: Any, bias: Any, c: Any) -> Prepared:
        """GELU(A B + bias) in one call or in two. oneDNN's fused call returns an output of its own."""
        torch, op, dtype = self.torch, case.params["op"], case.params["dtype"]
        h = self.c[c.numel() : 2 * c.numel()].view(c.shape)
        latest = [c]

        def unfused(_: int) -> None:
            torch.addmm(bias, a, b, out=h)
            torch.ops.aten.gelu.out(h, approximate="tanh", out=c)

        def fused_gpu(_: int) -> None:
            torch._addmm_activation(bias, a, b, use_gelu=True, out=c)

        def fused_cpu(_: int) -> None:
            latest[0] = torch.ops.mkldnn._linear_pointwise(a, b.t(), bias, "gelu", [], "tanh")

        def check(_: int, full: bool) -> dict[str, Any]:
            torch.addmm(bias, a, b, out=h)
            return gelu_error(torch, a, b, bias, h, latest[0], dtype, full)

        calls = {
            "unfused": (unfused, f"torch.addmm, then gelu, {library}"),
            "fused": (fused_cpu, "oneDNN linear with a GELU post-op")
            if self.device == "cpu"
            else (fused_gpu, f"torch._addmm_activation, {library}"),
        }
        return Prepared(case, calls[op][0], lambda: latest[0].fill_(math.nan), check, calls[op][1])


def view(pool: Any, batch: int, rows: int, columns: int, stored: str = "N") -> Any:
    """A (rows, columns) matrix, or a batch of them, at the pool's beginning; T: stored transposed."""
    flat = pool[: batch * rows * columns]
    out = flat.view(batch, rows, columns) if stored == "N" else flat.view(batch, columns, rows).transpose(1, 2)
    return out if batch > 1 else out[0]


def reduced_precision(torch: Any, dtype: str, call: Callable[[int], None]) -> Callable[[int], None]:
    """The call with the reduced-precision reduction of its dtype allowed, for that call alone."""
    switches, name = torch.backends.cuda.matmul, f"allow_{dtype}_reduced_precision_reduction"

    def switched(turn: int) -> None:
        setattr(switches, name, True)
        try:
            call(turn)
        finally:
            setattr(switches, name, False)

    return switched


def blas_library(torch: Any, kind: str) -> str:
    """The library that torch is set to prefer; torch does not tell which one a call used."""
    if kind == "cpu":
        return f"oneDNN {'enabled' if torch.backends.mkldnn.is_available() else 'not built in'}"
    name = str(torch.backends.cuda.preferred_blas_library()).rpartition(".")[2]
    if torch.version.hip:
        name = {"Cublas": "hipBLAS", "Cublaslt": "hipBLASLt"}.get(name, name)
    return f"preferred BLAS {name}"


def no_fused_call(torch: Any, kind: str) -> str | None:
    """Why this torch cannot run bias and GELU in a GEMM's epilogue; None where it can.

    On a CPU that is oneDNN's post-op, which compiled models use; torch._addmm_activation there is two steps.
    """
    if kind == "gpu":
        return None if hasattr(torch, "_addmm_activation") else "this torch has no GEMM with a GELU epilogue"
    if torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return None
    return (
        "this torch has no GEMM with a GELU epilogue for a CPU: oneDNN, or its linear with a post-op, is not built in"
    )


def search(session: Session, pools: Pools, first: Sequence[Case], library: str) -> tuple[list[Record], str]:
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
            if case.flop <= limit_flop and (record := session.quick_rate(pools.prepare(case, library))):
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
        if name not in last:  # an earlier process of a resumed run was ended between the two
            last[name] = probe.peak(next(k for k in probe.kernels() if k.name == name), cores, slices=slices)
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
        begun = [name for name in speed if session.earlier(Case(f"peak.{name}.thread0", role="probe"))]
        fastest = begun[0] if begun else max(speed, key=speed.__getitem__)
        for i in range(len(cores)):
            case = Case(f"peak.{fastest}.thread{i}", {"thread": i, "of": f"peak.{fastest}"}, role="probe")
            out.append(Prepared(case, sampler=lambda i=i, c=case: of_thread(fastest, i, c), backend="C loop"))
    for chain in probe.chains():
        case = Case(f"clock.{chain.name}", role="probe")
        out.append(Prepared(case, sampler=lambda n=chain, c=case: clock(n, c), backend="C loop"))
    return out


def measure(session: Session, machine: Machine, spec: Spec) -> None:
    """Warm-up, anchors, roof search, then all rows and the fresh roof in blocks, and the epilogue's pairs."""
    torch, kind, dtype = machine.torch, machine.kind, machine.dtype
    if kind == "gpu":
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    library = blas_library(torch, kind)
    first, rows, pair = coarse(kind, dtype, spec), cases(kind, dtype, spec), epilogue_cases(dtype, spec)
    reserve = 2 * ANCHOR_COPY_BYTES[kind] + 4 * 8 * CHUNK  # the anchors, and what a check converts to float64
    affordable = (machine.memory_bytes - reserve) // (5 * ELEMENT_BYTES)  # three pools, and two fifths to spare
    try:
        if affordable <= 0:
            raise RuntimeError(f"{machine.memory_bytes / 2**20:.0f} MiB of memory are too little")
        largest = max(map(largest_operand, [*first, *rows, *pair]))
        pools = Pools(torch, machine.device, dtype, min(affordable, largest))
        session.warm_up(machine)
    except RuntimeError as exc:  # torch's out-of-memory errors are RuntimeErrors
        for case in [*rows, *pair, *([Case("peak", {"dtype": dtype}, role="probe")] if kind == "cpu" else [])]:
            session.skip(case, str(exc).splitlines()[0])
        return
    session.anchor()
    roof = begun_roof(session, dtype) or search_roof(session, pools, first, library, dtype)
    session.anchor()
    side = {case.name for case in side_cases(kind, dtype, spec)}
    items = [replace(pools.prepare(case, library), share=SIDE_SHARE if case.name in side else 1.0) for case in rows]
    if roof:
        items.append(replace(pools.prepare(roof, library), share=ROOF_SHARE))
        reduced = reduced_cases(kind, dtype, tuple(roof.params[x] for x in SHAPE))
        items += [replace(pools.prepare(case, library), share=SIDE_SHARE) for case in reduced]
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
    if why := no_fused_call(torch, kind):
        session.skip(pair[-1], why)
    else:
        session.progress("bias and GELU in one call against two")
        session.run_pairs([pools.prepare(case, library) for case in pair])
        session.anchor()


def begun_roof(session: Session, dtype: str) -> Case | None:
    """The roof that an earlier process of a resumed run chose: one row holds one shape. None where it had none yet."""
    for r in session.earlier(Case("roof")):
        known = {name: r.params[name] for name in ("searched", "search_ended")}
        return gemm("roof", *(r.params[x] for x in SHAPE), dtype, **known)
    return None


def search_roof(session: Session, pools: Pools, first: Sequence[Case], library: str, dtype: str) -> Case | None:
    """The winner of the search among its right finalists, to be measured afresh; None where nothing was right."""
    found, ended = search(session, pools, first, library)
    session.progress(f"roof search {ended}, {len(found)} shapes")
    finalists = sorted(found, key=rate, reverse=True)[:REFINE_TOP]
    right = [r for r in finalists if _is_right(session, pools, r, library)]
    if not right:
        return None
    return gemm("roof", *(right[0].params[x] for x in SHAPE), dtype, searched=len(found), search_ended=ended)


def _is_right(session: Session, pools: Pools, found: Record, library: str) -> bool:
    """The full float64 check of a finalist of the search, recorded."""
    item = pools.prepare(Case(found.case, found.params, found.flop, found.bytes_moved, role="search"), library)
    for r in session.earlier(item.case):
        if r.error and r.error.get("check") != "freivalds":
            return r.error["ok"]
    try:
        item.poison()
        item.call(0)
        error = item.check(0, True)
    except RuntimeError as exc:  # out of memory in the check
        session.skip(item.case, str(exc).splitlines()[0])
        return False
    session.record(item.case, error=error, backend=item.backend)
    return error["ok"]
