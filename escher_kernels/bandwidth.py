"""Family 2, bandwidth: how fast can this device move memory?

Copy reads one stream and writes one; add and triad read two and write one; sum reads, fill writes. Declared bytes are
those streams, each once, with no credit for caches and none for write-allocate. The bandwidth roof is the plateau of
copy: its three largest sizes, fixed before anything is timed, each far larger than the last-level caches together.
Strided copies and copies between host and device are labelled: they stand beside, in no plateau.
Traps this module avoids: smaller buffers rotate through a set larger than four times the summed last-level caches, so
that every call finds them cold (never a flush inside the timed region); the cache curve is warm on purpose and says so;
first touch is parallel, with the same split over threads as the copy (on a host of several NUMA nodes each size has
memory of its own for that, or its rows are flagged PAGES_NOT_LOCAL).
On a CPU an ordinary store first reads the line it writes (write-allocate), so plain copy moves three streams for two
counted; streaming stores avoid that. The same copy is therefore run in C with plain and with streaming stores,
interleaved with torch's. Outside tools that agree: STREAM, BabelStream, likwid-bench, nvbandwidth, rocm-bandwidth-test.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from escher_kernels import native
from escher_kernels.timing import Case, Machine, Prepared, Session, normal
from escher_kernels.workload import Spec

ELEMENT_BYTES = 4  # fp32, as in STREAM's single-precision variants: bf16 arithmetic would be conversion-bound on a CPU
SCALAR = 0.40625  # exact in fp32
MIB = 2**20
COLD_FACTOR = 4
STRIDED_BYTES = 128 * MIB  # what a strided read spans
ROW_PITCH = 4096  # elements
HOST_SIZES = (64 * MIB, 256 * MIB, 1024 * MIB)
HOST_OPS = {"to_device": "host_to_device", "from_device": "device_to_host"}
TORCH_GRAIN = 32768  # elements below which torch does not split an elementwise call over another thread


@dataclass(frozen=True)
class Op:
    """Streams an operation reads and writes, and what it computes on views (a, b, c)."""

    reads: int
    writes: int
    run: Callable[[Any, Any, Any, Any], Any]  # (torch, a, b, c)
    expect: Callable[[Any, Any], Any] | None  # (a, b) in float64 -> what c must hold; None: judged apart
    exact: bool = False


OPS = {
    "copy": Op(1, 1, lambda t, a, b, c: c.copy_(a), lambda a, b: a, exact=True),
    "mul": Op(1, 1, lambda t, a, b, c: t.mul(a, SCALAR, out=c), lambda a, b: a * SCALAR),
    "add": Op(2, 1, lambda t, a, b, c: t.add(a, b, out=c), lambda a, b: a + b),
    "triad": Op(2, 1, lambda t, a, b, c: t.add(a, b, alpha=SCALAR, out=c), lambda a, b: a + SCALAR * b),
    "sum": Op(1, 0, lambda t, a, b, c: t.sum(a, dim=0, out=c[0]), None),
    "fill": Op(0, 1, lambda t, a, b, c: c.fill_(SCALAR), lambda a, b: a * 0 + SCALAR, exact=True),
}


def plateau_sizes(kind: str, memory_bytes: int, llc_bytes: int) -> list[int]:
    """Bytes of one buffer at the three plateau points.

    GPU: 1/16, 1/12 and 1/8 of the device's memory. CPU: 256, 384 and 512 MiB, scaled up together where the largest
    would be under four times the summed last-level caches.
    """
    if kind == "gpu":
        sizes = [memory_bytes // n for n in (16, 12, 8)]
    else:
        largest = max(512 * MIB, COLD_FACTOR * llc_bytes)
        sizes = [largest // 2, largest * 3 // 4, largest]
    return [s // MIB * MIB for s in sizes]


def size_name(size: int) -> str:
    return f"{size // MIB}MiB" if size >= MIB else f"{size // 1024}KiB"


def case(op: str, size: int, cache: str = "cold", **params: Any) -> Case:
    """Copy, add, ... of buffers of `size` bytes each."""
    return Case(
        f"{'cache' if cache == 'warm' else op}.{size_name(size)}",
        {"op": op, "buffer_bytes": size, "dtype": "fp32", **params},
        bytes_moved=(OPS[op].reads + OPS[op].writes) * size,
        cache=cache,
    )


def strided_cases() -> list[Case]:
    """Copies that read with a stride and write densely. Declared bytes are the useful ones: each element copied is read
    once and written once, whatever else of a fetched line goes unused.

    `strided.2` reads every second element; `strided.pitch` reads a matrix down its columns, one row pitch a step.
    """

    def strided(name: str, stride: int, useful: int) -> Case:
        params = {
            "op": "strided",
            "buffer_bytes": useful,
            "span_bytes": STRIDED_BYTES,
            "stride_bytes": stride * ELEMENT_BYTES,
        }
        return Case(f"strided.{name}", {**params, "dtype": "fp32"}, bytes_moved=2 * useful, cache="cold")

    return [strided("2", 2, STRIDED_BYTES // 2), strided("pitch", ROW_PITCH, STRIDED_BYTES)]


def host_cases(kind: str, largest: int) -> list[Case]:
    """GPU: copies from the host's memory to the device's and back, pinned and pageable. Bytes: those that cross, once."""
    if kind == "cpu":
        why = "a CPU host has no device to copy to"
        return [Case("host.to_device", {"op": "host_to_device"}, skipped=why)]
    return [
        Case(
            f"host.{way}.{memory}.{size_name(size)}",
            {"op": op, "buffer_bytes": size, "memory": memory, "dtype": "fp32"},
            bytes_moved=size,
        )
        for way, op in HOST_OPS.items()
        for memory in ("pinned", "pageable")
        for size in HOST_SIZES
        if size <= largest
    ]


def cases(kind: str, memory_bytes: int, llc_bytes: int, quick: bool = False) -> list[Case]:
    """All rows: every op at the plateau sizes, copy below them (cold), the cache curve (copy, warm), strided copies, and
    copies between host and device."""
    plateau = plateau_sizes(kind, memory_bytes, llc_bytes)
    out = [case(op, size, plateau=True) for size in plateau for op in OPS]
    size = 4 * MIB
    while size < plateau[0]:
        out.append(case("copy", size))
        size *= 8 if quick else 4
    size = 128 * 1024
    while size <= plateau[-1]:
        out.append(case("copy", size, cache="warm"))
        size *= 8 if quick else 2
    return [*out, *strided_cases(), *host_cases(kind, plateau[-1])]


def spare_bytes(kind: str, memory_bytes: int, llc_bytes: int) -> int:
    """Memory beside the three buffers that fill, which has one stream, needs to go through more than four times the
    caches at every plateau size; 0 where a buffer is enough."""
    sizes = plateau_sizes(kind, memory_bytes, llc_bytes)
    return max(size * max(0, COLD_FACTOR * llc_bytes // size + 1 - sizes[-1] // size) for size in sizes)


def error(torch: Any, op: str, a: Any, b: Any, c: Any) -> dict[str, Any]:
    """Judge an output. Copy and fill: every element, exactly. Else against float64 on 2^20 elements of head, middle and
    tail, |got - want| <= 2^-23 (|a| + |b|) (one rounding of each operand and one of the result), and no NaN anywhere.
    """
    if OPS[op].exact:
        parts = zip(a.split(2**24), b.split(2**24), c.split(2**24), strict=True)
        same = all(torch.equal(z, OPS[op].expect(x, y)) for x, y, z in parts)
        return checked(0.0 if same else math.inf, len(c))
    part_length = min(len(c), 2**20 // 3)
    ratio = 0.0
    for start in (0, (len(c) - part_length) // 2, len(c) - part_length):
        x, y, got = (t[start : start + part_length].double() for t in (a, b, c))
        miss = (got - OPS[op].expect(x, y)).abs()
        worst = float((miss / (2.0**-23 * (x.abs() + y.abs()) + 2.0**-126)).max())
        ratio = math.inf if math.isnan(worst) else max(ratio, worst)
    if bool(torch.isnan(c.sum())):
        ratio = math.inf
    return checked(ratio, 3 * part_length)


def sum_error(got: float, want: float, scale: float, elements: int) -> dict[str, Any]:
    """|got - want| <= 64 x 2^-24 sum|a|: a summation in blocks (Higham, Accuracy and Stability, 2nd ed., 4.2)."""
    ratio = abs(got - want) / (64 * 2.0**-24 * scale)
    return checked(math.inf if math.isnan(ratio) else ratio, elements)


def same(torch: Any, source: Any, target: Any) -> bool:
    """Whether every element was copied, compared piece by piece on the source's device."""
    rows = max(1, 2**24 // (source.numel() // len(source)))
    parts = zip(source.split(rows), target.split(rows), strict=True)
    return all(torch.equal(x, y.to(x.device)) for x, y in parts)


def checked(ratio: float, elements: int) -> dict[str, Any]:
    return {
        "check": "float64",
        "elements_checked": elements,
        "elementwise_ratio": ratio if math.isfinite(ratio) else None,
        "ok": ratio <= 1,
    }


class Buffers:
    """Three buffers of the largest size, and for fill spare memory where caches are large; every case works on views,
    rotated where it must find them cold. Host buffers of copies between host and device are made when first asked for.
    """

    def __init__(
        self, torch: Any, device: str, size: int, llc_bytes: int, threads: int = 1, local_bytes: int | None = None,
        spare_bytes: int = 0,
    ):  # fmt: skip
        self.torch, self.llc_bytes, self.threads, self.local_bytes = torch, llc_bytes, threads, local_bytes
        self._local: dict[tuple[int, int], tuple[Any, Any, Any]] = {}
        self.a, self.b, self.c = (normal(torch, size // ELEMENT_BYTES, torch.float32, device) for _ in range(3))
        self.spare = torch.empty(spare_bytes // ELEMENT_BYTES, dtype=torch.float32, device=device).fill_(0)
        self._host: dict[str, tuple[Any, Any]] = {}
        self._sums: dict[tuple[int, int], tuple[float, float]] = {}

    def sum_of(self, a: Any) -> tuple[float, float]:
        """Sum and sum of magnitudes in float64; `a` is a view of an operand that nothing writes to."""
        key = (a.data_ptr(), len(a))
        if key not in self._sums:
            plain = magnitude = 0.0
            for part in a.split(2**24):
                wide = part.double()
                plain, magnitude = plain + float(wide.sum()), magnitude + float(wide.abs_().sum())
            self._sums[key] = (plain, magnitude)
        return self._sums[key]

    def _operands(self, elements: int, index: int) -> tuple[Any, Any, Any]:
        """The index-th set of that size: a view, or on a host of several NUMA nodes memory of its own while it lasts.

        A view's pages lie where the whole buffer's split put them, so threads would read another node's memory.
        """
        need = 3 * ELEMENT_BYTES * elements
        key = (elements, index)
        if key not in self._local and (self.local_bytes or 0) >= need and elements < len(self.a):
            self.local_bytes -= need
            self._local[key] = tuple(normal(self.torch, elements, self.torch.float32, "cpu") for _ in range(3))
        view = tuple(x[index * elements : (index + 1) * elements] for x in (self.a, self.b, self.c))
        return self._local.get(key, view)

    def flags(self, sets: list[tuple[Any, Any, Any]]) -> tuple[str, ...]:
        """PAGES_NOT_LOCAL where a set of a host with several NUMA nodes had to be a view after all."""
        views = any(a._base is self.a and len(a) < len(self.a) for a, _, _ in sets)
        return ("PAGES_NOT_LOCAL",) if self.local_bytes is not None and views else ()

    def views(self, item: Case) -> list[tuple[Any, Any, Any]]:
        """Operand sets a case rotates through: one where it runs warm, else enough to outgrow the caches."""
        elements = item.params["buffer_bytes"] // ELEMENT_BYTES
        available = len(self.a) // elements
        op = OPS[item.params["op"]]
        streams = max(1, op.reads + op.writes)
        wanted = 1 if item.cache == "warm" else math.ceil(COLD_FACTOR * self.llc_bytes / (streams * elements * 4)) + 1
        sets = [self._operands(elements, i) for i in range(min(available, max(1, wanted)))]
        if op.reads == 1 and op.writes == 0 and item.cache != "warm":  # both operand buffers can be read
            sets += [(b, a, c[1:]) for a, b, c in sets]
        if op.reads == 0 and item.cache != "warm":  # nothing is read, so a set more is a stretch of the spare buffer
            stretches = self.spare.split(elements) if len(self.spare) else ()
            sets += [(*sets[0][:2], c) for c in stretches if len(c) == elements][: max(0, wanted - len(sets))]
        return sets

    def strided_sets(self, item: Case) -> list[tuple[Any, Any]]:
        """(source read with a stride, dense target) in as many stretches as outgrow the caches with what is useful."""
        span, useful = (item.params[x] // ELEMENT_BYTES for x in ("span_bytes", "buffer_bytes"))
        stride = item.params["stride_bytes"] // ELEMENT_BYTES
        wanted = math.ceil(COLD_FACTOR * self.llc_bytes / item.bytes_moved) + 1
        sources = [x for buffer in (self.a, self.b) for x in buffer.split(span) if len(x) == span]
        targets = [x for x in self.c.split(useful) if len(x) == useful]
        pairs = list(zip(sources, targets, strict=False))[:wanted]
        if useful < span:
            return [(a[::stride], c) for a, c in pairs]
        return [(a.view(-1, stride).t(), c.view(stride, -1)) for a, c in pairs]

    def host_pair(self, item: Case) -> tuple[Any, Any]:
        """(source, target), one in the host's memory and one in the device's. Raises RuntimeError: no such memory."""
        elements, memory = item.params["buffer_bytes"] // ELEMENT_BYTES, item.params["memory"]
        if memory not in self._host:
            most = min(HOST_SIZES[-1] // ELEMENT_BYTES, len(self.a))
            pinned = {"pin_memory": memory == "pinned"}
            source, target = (self.torch.empty(most, dtype=self.torch.float32, **pinned) for _ in range(2))
            self._host[memory] = source.copy_(normal(self.torch, most, self.torch.float32, "cpu")), target.fill_(0)
        source, target = (x[:elements] for x in self._host[memory])
        to_device = item.params["op"] == HOST_OPS["to_device"]
        return (source, self.c[:elements]) if to_device else (self.a[:elements], target)

    def _copies(self, item: Case, sets: list[tuple[Any, Any]], backend: str, **more: Any) -> Prepared:
        """Copies of source to target, set after set; every element is checked."""
        count = len(sets)

        def call(turn: int) -> None:
            source, target = sets[turn % count]
            target.copy_(source, non_blocking=True)

        def poison() -> None:
            for _, target in sets:
                target.fill_(math.nan)

        def check(turn: int, _: bool) -> dict[str, Any]:
            source, target = sets[turn % count]
            if source.device != target.device:
                self.torch.cuda.synchronize()
            return checked(0.0 if same(self.torch, source, target) else math.inf, target.numel())

        case = replace(item, params={**item.params, "operand_sets": count})
        return Prepared(case, call=call, poison=poison, check=check, backend=backend, **more)

    def prepare(self, item: Case) -> Prepared:
        op = item.params["op"]
        if item.skipped:
            return Prepared(item)
        if op == "strided":
            sets = self.strided_sets(item)
            if not sets:
                return Prepared(replace(item, skipped=f"a buffer is smaller than {size_name(STRIDED_BYTES)}"))
            flags = ("PAGES_NOT_LOCAL",) if self.local_bytes is not None else ()
            threads = self.threads if sets[0][0].dim() == 1 else 1  # torch transposes on one thread
            return self._copies(item, sets, "torch copy_ of a strided view", threads=threads, flags=flags)
        if op in HOST_OPS.values():
            try:
                sets = [self.host_pair(item)]
            except RuntimeError as exc:  # the host may have less memory, or allow less of it to be pinned
                return Prepared(replace(item, skipped=str(exc).splitlines()[0]))
            return self._copies(item, sets, f"torch copy_, {item.params['memory']} memory")
        torch, sets = self.torch, self.views(item)
        run, count = OPS[op].run, len(sets)
        outputs = [c[0:1] if op == "sum" else c for _, _, c in sets]

        def call(turn: int) -> Any:
            return run(torch, *sets[turn % count])

        def poison() -> None:
            for c in outputs:
                c.fill_(math.nan)

        def check(turn: int, _: bool) -> dict[str, Any]:
            a, b, c = sets[turn % count]
            if op == "sum":
                return sum_error(float(c[0]), *self.sum_of(a), len(a))
            return error(torch, op, a, b, c)

        case = replace(item, params={**item.params, "operand_sets": count})
        threads = min(self.threads, math.ceil(len(sets[0][0]) / TORCH_GRAIN))
        return Prepared(
            case, call=call, poison=poison, check=check, backend=f"torch {op}", threads=threads, flags=self.flags(sets)
        )


def pairs(buffers: Buffers, probe: native.Native, threads: int, size: int) -> list[Prepared]:
    """CPU: torch's copy, plain C copy and C copy with streaming stores of the same buffers, to be interleaved.

    The C copies time themselves, first start to last end of their threads; torch's is timed around the call.
    """
    a, b, c = buffers._operands(size // ELEMENT_BYTES, 0)

    def pair(name: str, backend: str, call: Callable[[int], Any], timed_in_c: bool) -> Prepared:
        params = {"op": "copy", "buffer_bytes": size, "dtype": "fp32", "threads": threads}
        case = Case(f"stream.{name}", params, bytes_moved=2 * size, cache="cold", role="pair")
        return Prepared(
            case,
            call=call,
            sampler=(lambda: ([call(0)], case)) if timed_in_c else None,
            poison=lambda: c.fill_(math.nan),
            check=lambda *_: error(buffers.torch, "copy", a, b, c),
            backend=backend,
            flags=buffers.flags([(a, b, c)]),
        )

    def c_copy(streaming: bool) -> Callable[[int], float]:
        return lambda _: probe.copy(c.data_ptr(), a.data_ptr(), size, threads, streaming=streaming)

    return [
        pair("torch", "torch copy_", lambda _: c.copy_(a), False),
        pair("plain", "C, ordinary stores", c_copy(False), True),
        pair("streaming", "C, streaming stores", c_copy(True), True),
    ]


def measure(session: Session, machine: Machine, spec: Spec) -> None:
    """Warm-up, anchors, all rows in blocks, on a CPU the copy beside plain and streaming C copies, anchors."""
    kind, memory_bytes, llc_bytes = machine.kind, machine.memory_bytes, machine.llc_bytes
    rows = cases(kind, memory_bytes, llc_bytes, session.budget.name == "quick")
    largest, spare = plateau_sizes(kind, memory_bytes, llc_bytes)[-1], spare_bytes(kind, memory_bytes, llc_bytes)
    needed = 3 * largest + spare
    buffers_of = f"three buffers of {size_name(largest)}" + (f" and {size_name(spare)} for fill" if spare else "")
    if needed > memory_bytes * 0.6:
        why = f"{buffers_of} do not fit 60 % of {size_name(memory_bytes)}"
        for row in rows:
            session.skip(row, row.skipped or why)
        return
    session.warm_up(machine)
    try:
        local = int(memory_bytes * 0.6) - needed if machine.numa_nodes > 1 else None
        threads = max(1, len(machine.cores))
        buffers = Buffers(machine.torch, machine.device, largest, llc_bytes, threads, local, spare)
    except RuntimeError as exc:  # torch's out-of-memory errors are RuntimeErrors; another process may hold the memory
        for row in rows:
            session.skip(row, row.skipped or f"{buffers_of} were refused: {str(exc).splitlines()[0]}")
        return
    session.anchor()
    session.run_blocks([replace(buffers.prepare(row), share=share(row)) for row in rows])
    session.anchor()
    if kind == "cpu":
        try:
            with native.load() as probe:
                session.progress("copy against plain and streaming stores")
                size = plateau_sizes(kind, memory_bytes, llc_bytes)[0]
                session.run_pairs(pairs(buffers, probe, len(machine.cores), size))
        except native.NativeUnavailable as exc:
            session.skip(Case("stream.plain", {"op": "copy"}, cache="cold", role="pair"), str(exc))
        session.anchor()


def share(row: Case) -> float:
    """Of a row's time in a block: half for what stands beside the plateau."""
    return 1.0 if row.params["op"] in OPS else 0.5
