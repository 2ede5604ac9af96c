"""The timing protocol: one implementation, used by every family.

Cases are visited round-robin in blocks spread over the family's time (a slow spell of the host then touches every
case, and shows in the interval). Warm-up ends when the time per call is level, not after a fixed count. On a GPU
device events time a queue that is kept fed; on a CPU the wall clock times samples of at least 1 ms. Nothing is
dropped: what disturbed a block (CPU time lost to others, steal, pressure) is stored beside its samples.

Torch appears only as the object a caller hands in, so every rule here is tested with a fake clock or a fake device.
"""

from __future__ import annotations

import contextlib
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from escher_kernels.records import Record
from escher_kernels.statistics import MIN_BLOCKS, slope

CPU_MIN_SAMPLE_S = 1e-3
CPU_SAMPLE_S = 1.5e-3  # aimed at, so that a sample that runs faster than its estimate still lasts 1 ms
MAX_SAMPLES_PER_BLOCK = 40
LEVEL_FRAC = 0.02
EMPTY_PAIR_FRAC = 0.01


@dataclass(frozen=True)
class Budget:
    """How long a family may take. `block_s`: time one case gets in one block; `case_s`: time one case gets in all."""

    name: str
    block_s: float
    case_s: float
    search_s: float
    blocks: int = MIN_BLOCKS


BUDGETS = {
    "quick": Budget("quick", block_s=0.02, case_s=4, search_s=6),
    "standard": Budget("standard", block_s=0.1, case_s=20, search_s=20),
    "full": Budget("full", block_s=1.0, case_s=120, search_s=120, blocks=12),
}


@dataclass(frozen=True)
class Machine:
    """What a family measures on. `kind` is cpu or gpu, `device` torch's name for it, `dtype` that of its GEMMs.

    `memory_bytes`: of the device, or usable on the host. `llc_bytes`: the summed last-level caches in use. `cores`:
    the logical CPUs that compute, one a physical core.
    """

    torch: Any
    kind: str
    device: str
    dtype: str
    memory_bytes: int
    llc_bytes: int
    cores: tuple[int, ...]
    numa_nodes: int = 1
    llc_assumed: bool = False  # nothing told the size of the last-level caches

    def free_bytes(self) -> int:
        """Memory that is free now on a GPU; on a host, or where the driver does not tell, what there was at the start."""
        if self.kind == "cpu":
            return self.memory_bytes
        try:
            free, total = self.torch.cuda.mem_get_info()
        except RuntimeError:  # some containers refuse it
            return self.memory_bytes
        return free if 0 <= free <= total else self.memory_bytes


@dataclass(frozen=True)
class Case:
    """The plan of one row: its name, what it works on, and the work it declares. `flop` and `bytes_moved`: one call."""

    name: str
    params: dict[str, Any] = field(default_factory=dict)
    flop: int | None = None
    bytes_moved: int | None = None
    cache: str | None = None
    role: str = "case"
    skipped: str | None = None  # known before anything runs, e.g. "needs 36 GB, 22 GB are free"


@dataclass
class Prepared:
    """A case made ready. `call(i)` runs it on the i-th operand set, `check(i)` judges that call's output.

    `poison` overwrites every output with NaN, so that a call which writes nothing cannot pass. `check` returns the
    figures and ``ok``. `sampler`, where given, replaces the timer: one block's samples (s), and the case as it ran.
    """

    case: Case
    call: Callable[[int], Any] | None = None
    poison: Callable[[], None] = lambda: None
    check: Callable[[int, bool], dict[str, Any]] | None = None
    backend: str | None = None
    sampler: Callable[[], tuple[Sequence[float], Case]] | None = None
    error: dict[str, Any] | None = None  # of the check before timing
    calls: int = 1
    next_calls: int = 0  # after a block whose samples came out too short
    samples: int = 0
    share: float = 1.0  # of a case's time in a block; more for a row that others are judged by
    threads: int | None = None  # that the call can use, where fewer than the session's
    per_block: int | None = None  # samples of a block, where the family fixes them
    limit_s: float | None = None  # time the case may take, where the budget's is not meant for it
    inside: Callable[[], Any] = contextlib.nullcontext  # a context that its calls run in, opened once a block
    blocks: frozenset[int] = frozenset()  # that are still to be measured
    of_blocks: int = 0  # how many the case gets in all
    flags: tuple[str, ...] = ()
    turn: int = 0


class CpuTimer:
    """Wall clock. A sample lasts at least 1 ms: below that one clock reading and one interrupt weigh too much."""

    kind = "cpu"
    warm_window_s, warm_budget_s, anchor_s = 0.5, 4.0, 0.3
    max_enqueued = 10**9

    def __init__(self, clock_ns: Callable[[], int] = time.perf_counter_ns):
        self.clock_ns = clock_ns

    def calls_for(self, call_s: float) -> int:
        return max(1, math.ceil(CPU_SAMPLE_S / call_s)) if call_s > 0 else 1000

    def estimate(self, call: Callable[[int], Any], first: int) -> float:
        return self.samples(call, first, 1, 1)[0][0]

    def samples(self, call: Callable[[int], Any], first: int, count: int, calls: int) -> tuple[list[float], list[str]]:
        """`count` samples of `calls` calls each, seconds a sample; flags (none on a CPU)."""
        out, turn = [], first
        for _ in range(count):
            start = self.clock_ns()
            for _ in range(calls):
                call(turn)
                turn += 1
            out.append((self.clock_ns() - start) / 1e9)
        return out, []

    def synchronize(self) -> None: ...


class GpuTimer:
    """Device events on the current stream of `torch.cuda` (ROCm answers to the same name).

    All samples of a block are enqueued before the first is read, behind one untimed call, so the device never waits
    for the host between events. HOST_BOUND flags a block whose enqueuing took about as long as the device worked:
    its samples show launch latency, not the kernel.
    """

    kind = "gpu"
    warm_window_s, warm_budget_s, anchor_s = 2.0, 30.0, 1.0
    max_enqueued = 1000  # a driver's launch queue holds about 1024; past that the host waits and looks slow

    def __init__(self, cuda: Any, clock_ns: Callable[[], int] = time.perf_counter_ns):
        self.cuda, self.clock_ns = cuda, clock_ns
        self.empty_pair_s = statistics.median(self.samples(lambda _: None, 0, 50, 1)[0])

    def calls_for(self, call_s: float) -> int:
        """Calls a sample needs so that an empty event pair costs less than 1 % of it."""
        return max(1, math.ceil(self.empty_pair_s / EMPTY_PAIR_FRAC / call_s)) if call_s > 0 else 1000

    def estimate(self, call: Callable[[int], Any], first: int) -> float:
        once = self.samples(call, first, 1, 1)[0][0]
        return once if once > 1e-3 else self.samples(call, first, 1, 5)[0][0] / 5

    def samples(self, call: Callable[[int], Any], first: int, count: int, calls: int) -> tuple[list[float], list[str]]:
        """`count` samples of `calls` calls each, seconds a sample; flags."""
        self.cuda.synchronize()
        call(first)
        began, pairs, turn = self.clock_ns(), [], first
        for _ in range(count):
            start, end = (self.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(calls):
                call(turn)
                turn += 1
            end.record()
            pairs.append((start, end))
        enqueued_s = (self.clock_ns() - began) / 1e9
        self.cuda.synchronize()
        out = [start.elapsed_time(end) / 1e3 for start, end in pairs]  # elapsed_time is in ms
        return out, ["HOST_BOUND"] if enqueued_s > 0.9 * sum(out) else []

    def synchronize(self) -> None:
        self.cuda.synchronize()


ANCHOR_N = {"gpu": 8192, "cpu": 1024}
ANCHOR_COPY_BYTES = {"gpu": 2**30, "cpu": 2**28}
ANCHOR_CALL_S = 0.05
PATTERN = 2**24 - 3  # a prime: no two rows of a matrix, or tokens of q and k, hold the same stretch of it


def normal(torch: Any, elements: int, dtype: Any, device: str) -> Any:
    """A flat tensor of N(0,1) values, first touched in parallel with the split that elementwise kernels use.

    Values repeat after `PATTERN` elements: drawing them is serial on a CPU and would take longer than measuring.
    """
    out = torch.empty(elements, dtype=dtype, device=device).fill_(0)
    pattern = torch.randn(min(elements, PATTERN), device=device).to(dtype)
    for start in range(0, elements, len(pattern)):
        part = out[start : start + len(pattern)]
        part.copy_(pattern[: len(part)])
    return out


def anchors(machine: Machine) -> list[Prepared]:
    """The fixed GEMM and the fixed copy of every timed family. Where one GEMM would take over 50 ms, a smaller one.

    The same shapes in every run of a host, so that a drift shows inside a family, between families and between runs.
    """
    torch, kind, device, dtype = machine.torch, machine.kind, machine.device, machine.dtype

    def gemm(n: int) -> Prepared:
        a, b = (torch.randn(n, n, device=device).to(element) for _ in range(2))
        c = torch.empty_like(a)
        case = Case(
            "anchor.gemm", {"m": n, "n": n, "k": n, "dtype": dtype}, flop=2 * n**3, bytes_moved=6 * n * n, role="anchor"
        )
        return Prepared(case, call=lambda _: torch.mm(a, b, out=c), backend="torch.mm")

    element = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    n = 128
    while n < ANCHOR_N[kind]:  # each step is 8 times the work: stop before one that would take too long
        item = gemm(n)
        item.call(0)
        start = time.perf_counter()
        item.call(0)
        if kind == "gpu":
            torch.cuda.synchronize()
        if (time.perf_counter() - start) * 8 > ANCHOR_CALL_S and kind == "cpu":
            break
        n *= 2
    size = ANCHOR_COPY_BYTES[kind]
    source = normal(torch, size // 4, torch.float32, device)
    target = torch.zeros_like(source)
    copy = Case("anchor.copy", {"buffer_bytes": size, "dtype": "fp32"}, bytes_moved=2 * size, role="anchor")
    return [gemm(n), Prepared(copy, call=lambda _: target.copy_(source), backend="torch.copy_")]


def cpu_disturbance() -> dict[str, float]:
    """Counters that tell what else ran: own CPU seconds, steal, pressure-stall seconds. A missing one is left out."""
    out = {"cpu_s": time.process_time(), "wall_s": time.monotonic()}  # os.times() counts in ticks of 10 ms
    try:
        fields = Path("/proc/stat").read_text(encoding="utf-8").split("\n", 1)[0].split()
        out["steal_s"] = int(fields[8]) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError, ValueError):
        pass
    try:
        for line in Path("/proc/pressure/cpu").read_text(encoding="utf-8").splitlines():
            if line.startswith("some"):
                out["pressure_s"] = int(line.rsplit("total=", 1)[1]) / 1e6
    except (OSError, IndexError, ValueError):
        pass
    return out


def disturbance_between(before: dict[str, float], after: dict[str, float], threads: int) -> dict[str, float]:
    """What a stretch lost: `lost_cpu_frac` = 1 - (user + system) / (threads x wall), and the deltas of the counters."""
    wall = after["wall_s"] - before["wall_s"]
    out = {"wall_s": wall, "threads": threads}
    if wall > 0:
        out["lost_cpu_frac"] = max(0.0, 1 - (after["cpu_s"] - before["cpu_s"]) / (threads * wall))
    for name in ("steal_s", "pressure_s"):
        if name in before and name in after:
            out[name] = after[name] - before[name]
    return {k: round(v, 6) if isinstance(v, float) else v for k, v in out.items()}


class Progress:
    """One line at a time on stderr, headed by the family. Pages leave stderr out."""

    def __init__(self, family: str, write: Callable[[str], Any] | None = None, clock=time.monotonic):
        self.family, self.clock, self.write = family, clock, write or self._stderr
        self.last = -math.inf

    @staticmethod
    def _stderr(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def __call__(self, what: str, always: bool = True) -> None:
        """`always=False`: only if nothing was said for 5 s."""
        now = self.clock()
        if always or now - self.last >= 5:
            self.last = now
            self.write(f"{self.family}: {what}")


class Session:
    """One family being measured: its timer, where records go, and how long it may take.

    `write` gets each `Record` as soon as it exists. `threads` is how many cores the CPU cases use. `only`: the names of
    the cases that are measured; anchors and warm-up are, in any case. `before`: what an earlier process of this iteration
    recorded: a case that is finished there is not measured again, of another only the blocks that are missing. `notices`:
    flags for a record, from what the libraries said meanwhile (see fallbacks).
    """

    def __init__(
        self,
        family: str,
        timer: CpuTimer | GpuTimer,
        write: Callable[[Record], None],
        budget: Budget,
        threads: int = 1,
        progress: Callable[..., None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        iteration: int = 1,
        only: Collection[str] | None = None,
        before: Sequence[Record] = (),
        notices: Callable[[Case, str | None, str | None], tuple[str, ...]] = lambda *_: (),
    ):
        self.family, self.timer, self._write, self.budget, self.only = family, timer, write, budget, only
        self.threads, self.clock, self.iteration, self.notices = threads, clock, iteration, notices
        self.progress = progress or Progress(family)
        self.started = clock() - max((r.started_s or 0.0 for r in before), default=0.0)
        self._before: dict[tuple[str, str], list[Record]] = {}
        for r in before:
            self._before.setdefault((r.role, r.case), []).append(r)
        self._anchors: list[Prepared] = []
        self._anchor_turn = 1 + max((r.block for r in before if r.role == "anchor"), default=-1)
        self._gemm_flop_s: float | None = None  # of the fixed GEMM, to foresee a case that would run away

    def record(self, case: Case, **fields: Any) -> Record:
        """Write one record of `case`. What is no time and was recorded by an earlier process is not written again."""
        if known := self._known(case, fields):
            return known
        notices = self.notices(case, fields.get("backend"), fields.get("skipped"))
        fields["flags"] = tuple(dict.fromkeys((*fields.get("flags", ()), *notices)))
        out = Record(
            family=self.family, case=case.name, role=case.role, params=case.params, flop=case.flop,
            bytes_moved=case.bytes_moved, cache=case.cache, iteration=self.iteration,
            **{"started_s": round(self.clock() - self.started, 6), **fields},
        )  # fmt: skip
        self._write(out)
        return out

    def skip(self, case: Case, reason: str) -> None:
        """Record why a case is not measured. One of which an earlier process measured blocks keeps those instead."""
        if any(r.samples_s for r in self.earlier(case)):
            self.progress(f"{case.name} is left as it is: {reason}")
        elif self.wanted(case):
            self.record(case, skipped=reason)

    def wanted(self, case: Case) -> bool:
        """Whether the case was chosen and is not finished, so that preparing it is worth while."""
        return (self.only is None or case.name in self.only) and not self.finished(case)

    def earlier(self, case: Case) -> list[Record]:
        """What an earlier process of this iteration recorded of a case."""
        return self._before.get((case.role, case.name), [])

    def finished(self, case: Case) -> bool:
        """Whether an earlier process left nothing of a case to do: it was skipped or wrong, its value is known, or all its
        blocks are there. Members of pairs are finished together, see `run_pairs`."""
        there = self.earlier(case)
        if any(r.skipped or r.value is not None or (r.error and not r.error["ok"]) for r in there):
            return True
        timed = [r for r in there if r.samples_s]
        if not timed or case.role in ("anchor", "warmup", "pair"):
            return False
        return len({r.block for r in timed}) >= max(r.of_blocks or 1 for r in timed)

    def _known(self, case: Case, fields: dict[str, Any]) -> Record | None:
        """The earlier record that says the same: the same value or reason, the same check passed."""
        error = fields.get("error")
        if fields.get("samples_s") or (error and not error["ok"]):
            return None
        for r in self.earlier(case):
            same_check = error and r.error and r.error.get("check") == error.get("check")
            same = any(fields.get(k) is not None and getattr(r, k) is not None for k in ("value", "skipped"))
            if same_check or (same and not error):
                return r
        return None

    def estimate(self, call: Callable[[int], Any], turn: int = 0) -> float:
        """Seconds one call takes undisturbed, after one untimed: the least of three where calls are short.

        Sizes samples; never a result.
        """
        call(turn)
        seconds = [self.timer.estimate(call, turn)]
        seconds += [self.timer.estimate(call, turn) for _ in range(2 if seconds[0] < 0.05 else 0)]
        return min((s for s in seconds if s > 0), default=1e-9)  # event times can come out negative

    def warm_up(self, machine: Machine) -> None:
        """Prepare the anchors, then call the fixed GEMM until its time is level, or the budget is spent.

        Level: it changes by at most 2 % either way over the window, and the window's last quarter differs by no more from
        the whole, so that neither a clock still rising nor the boost before a power limit bites passes for steady.
        """
        self.progress("warm-up")
        self._anchors = anchors(machine)
        item = self._anchors[0]
        window, limit = self.timer.warm_window_s, self.timer.warm_budget_s
        if self.budget.name == "quick":
            window, limit = window / 5, limit / 8
        call_s = self.estimate(item.call)
        self._gemm_flop_s = item.case.flop / call_s
        calls = max(self.timer.calls_for(call_s), math.ceil(window / 200 / call_s))
        began, stamps, values, level = self.clock(), [], [], False
        while not level and (self.clock() - began < limit or len(values) < 2):
            values += self.timer.samples(item.call, 0, 1, calls)[0]
            stamps.append(self.clock() - began)
            recent = [i for i, t in enumerate(stamps) if t >= stamps[-1] - window]
            if stamps[-1] >= window and len(recent) >= 3:
                span = [values[i] for i in recent]
                late = statistics.median(span[-(len(span) // 4 or 1) :]) / statistics.median(span) - 1
                level = max(abs(slope([stamps[i] for i in recent], span)), abs(late)) <= LEVEL_FRAC
        self.record(
            replace(item.case, role="warmup"), samples_s=tuple(values[:: max(1, len(values) // 200)]),
            calls_per_sample=calls, backend=item.backend, flags=() if level else ("NOT_LEVEL",),
        )  # fmt: skip

    def anchor(self) -> None:
        """Run the fixed GEMM and the fixed copy once more; `block` counts how often they ran."""
        for item in self._anchors:
            call_s = self.estimate(item.call)
            seconds = self.timer.anchor_s / (4 if self.budget.name == "quick" else 1)
            item.calls = max(self.timer.calls_for(call_s), math.ceil(seconds / 200 / call_s))
            item.samples = max(3, math.ceil(seconds / (call_s * item.calls)))
            self._block(item, self._anchor_turn)
        self._anchor_turn += 1

    def _block(self, item: Prepared, block: int, check: bool = False, **fields: Any) -> Record:
        """One block of one case, with what disturbed it. `check`: its last output is judged, and a wrong one recorded
        before the block is: a process killed between the two must not leave a block that passes for right."""
        before = cpu_disturbance() if self.timer.kind == "cpu" else None
        case, flags, started_s = item.case, [], round(self.clock() - self.started, 6)
        item.calls = max(item.calls, item.next_calls)
        if item.sampler:
            samples, case = item.sampler()
        else:
            with item.inside():
                samples, flags = self.timer.samples(item.call, item.turn, item.samples, item.calls)
            item.turn += item.samples * item.calls
            if self.timer.kind == "cpu" and min(samples) < CPU_MIN_SAMPLE_S:  # it ran faster than its estimate
                item.next_calls = self.timer.calls_for(min(samples) / item.calls)
        threads = item.threads or self.threads
        noise = disturbance_between(before, cpu_disturbance(), threads) if before else None
        if check and not (error := item.check(item.turn - 1, False))["ok"]:
            self.record(item.case, error=error, backend=item.backend, block=block)
        return self.record(
            case, samples_s=tuple(samples), calls_per_sample=item.calls, block=block, backend=item.backend,
            of_blocks=item.of_blocks or None, started_s=started_s, noise=noise, flags=(*item.flags, *flags), **fields,
        )  # fmt: skip

    def quick_rate(self, item: Prepared, samples: int = 3) -> Record | None:
        """A few samples of a search candidate, checked first. None where it is wrong or too slow (recorded as such)."""
        if self.finished(item.case):
            return next((r for r in self.earlier(item.case) if r.samples_s), None)
        if not self._ready(item, full_check=False, limit_s=self.budget.search_s / 8):
            return None
        item.samples, item.of_blocks = samples, 1
        return self._block(item, 0, error=item.error)

    def _ready(self, item: Prepared, full_check: bool, limit_s: float) -> bool:
        """One untimed call on poisoned outputs, checked, and sized. False (with a record) where it cannot be timed."""
        if not self.wanted(item.case):
            return False
        limit_s = item.limit_s or limit_s
        if item.case.skipped:
            self.skip(item.case, item.case.skipped)
            return False
        if item.call is None:  # a sampler of its own, with nothing to check
            self._plan_blocks(item, self.budget.blocks)
            return True
        if item.case.flop and self._gemm_flop_s and self._too_long(item, item.case.flop / self._gemm_flop_s, limit_s):
            return False  # before the first call: an emulated dtype can make one last minutes
        try:
            item.poison()
            with item.inside():
                item.call(0)
            self.timer.synchronize()
            item.error = item.check(0, full_check) if item.check else None
        except RuntimeError as exc:  # out of memory, no kernel for the dtype, ...
            self.skip(item.case, f"{type(exc).__name__}: {exc}".splitlines()[0])
            return False
        if item.error:
            if full_check or not item.error["ok"]:
                self.record(item.case, error=item.error, backend=item.backend)
            if not item.error["ok"]:
                return False
        with item.inside():
            call_s = self.estimate(item.call, 1)
        item.turn = 2
        item.calls = 1 if item.sampler else self.timer.calls_for(call_s)
        sample_s = call_s * item.calls
        if self._too_long(item, sample_s, limit_s):
            return False
        self._plan_blocks(item, min(self.budget.blocks, max(3, int(limit_s / sample_s))))
        most = min(MAX_SAMPLES_PER_BLOCK, max(1, self.timer.max_enqueued // item.calls))
        item.samples = item.per_block or min(most, max(1, int(self.budget.block_s * item.share / sample_s)))
        return True

    def _plan_blocks(self, item: Prepared, fitting: int) -> None:
        """Spread `fitting` blocks over the family's time. A case that an earlier process began keeps that one's plan."""
        timed, total = [r for r in self.earlier(item.case) if r.samples_s], self.budget.blocks
        fitting = max((r.of_blocks or fitting for r in timed), default=fitting)
        planned = frozenset(round(i * (total - 1) / (fitting - 1)) for i in range(fitting))
        item.of_blocks = len(planned)
        item.blocks = planned if item.case.role == "pair" else planned - {r.block for r in timed}
        if fitting < total:
            item.flags = (*item.flags, "INSUFFICIENT")

    def _too_long(self, item: Prepared, sample_s: float, limit_s: float) -> bool:
        """Skip a case (with a record) of which not even three samples fit its budget."""
        if sample_s * 3 <= limit_s:
            return False
        self.skip(item.case, f"three samples would take about {sample_s * 3:.3g} s, a case may take {limit_s:.3g} s")
        return True

    def run_blocks(self, prepared: Sequence[Prepared]) -> None:
        """Measure all cases round-robin, `budget.blocks` times; each is checked before and in its first and last block."""
        ready = []
        for item in prepared:
            self.progress(f"checking {item.case.name}", always=False)
            if self._ready(item, full_check=True, limit_s=self.budget.case_s):
                ready.append(item)
        self.progress(f"{len(ready)} cases in {self.budget.blocks} blocks")
        began = self.clock()
        for block in range(self.budget.blocks):
            for item in ready:
                if block in item.blocks:
                    self._checked_block(item, block)
            done = (block + 1) / self.budget.blocks
            left = (self.clock() - began) * (1 - done) / done
            self.progress(f"block {block + 1} of {self.budget.blocks}, about {left:.0f} s left")

    def _checked_block(self, item: Prepared, block: int, **fields: Any) -> None:
        """A block. In a case's first and last one outputs are poisoned before and the block's last one is checked."""
        checked = bool(item.check) and block in (min(item.blocks), max(item.blocks))
        if checked:
            item.poison()
        self._block(item, block, checked, **fields)

    def run_pairs(self, items: Sequence[Prepared], repeats: int = 2) -> None:
        """Interleave A B A B in every block; records of one turn share `pair_id`, and `order` tells who came first.

        A turn that an earlier process finished is not measured again; one that it was killed in gets another `pair_id`.
        """
        there = [{r.pair_id for r in self.earlier(i.case) if r.samples_s} for i in items if not self.finished(i.case)]
        whole, begun = (set.intersection(*there), set().union(*there)) if there else (set(), set())
        planned = max((r.of_blocks or 0 for i in items for r in self.earlier(i.case)), default=0) * repeats
        if whole and len(whole) >= planned:
            return
        items = [i for i in items if self._ready(i, full_check=True, limit_s=self.budget.case_s)]
        for block in sorted(frozenset.intersection(*(i.blocks for i in items))) if items else ():
            for repeat in range(repeats):
                pair_id = f"{block}.{repeat}"
                while pair_id in begun - whole:
                    pair_id += "+"
                for order, item in enumerate(items if pair_id not in whole else ()):
                    item.samples = 1
                    self._checked_block(item, block, pair_id=pair_id, order=order)
