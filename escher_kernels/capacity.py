"""Family 3, capacity: how much of its memory can this device really give a model?

Memory is yours once it is written, not once it is granted: a host's pages arrive at the first write, and what is then
missing is taken from whichever process the kernel picks. So everything here happens in a child process, which tells
each step before it takes it: if the system kills it, the limit is known and the notebook lives. Searched for: the
largest contiguous tensor, the sum of many blocks of 1 GiB, and on a GPU how much of every second block, freed, can be
had again in one piece. No kernel is timed, so there are no warm-up and no anchors.
Traps this module avoids: every page is written (reading an untouched page maps the one page of zeros that all share);
tensors do that with all threads and where a model's would lie, which a plain mapping in Python does not; the largest
size is tried first and then bisected, so one refusal says nothing of the rest; a free figure that exceeds the total is
no figure. On a host a reserve stays free, so that it never swaps; the blocks touch each page once, and the one large
tensor that follows, of the blocks' size, touches one page a MiB: that the pages are there the blocks have shown.
Outside tools that agree: nvidia-smi and amd-smi (used memory at the limit), `free -b`, stress-ng --vm, memtester.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from escher_kernels import host
from escher_kernels.timing import Case, Machine, Session
from escher_kernels.workload import Spec

PAGE, MIB, GIB = 4096, 2**20, 2**30
RESERVE_FRAC = 0.1  # of a host's usable memory, and at least 1 GiB, but never over half
QUICK_BYTES = 4 * GIB
LIMIT_S = 60.0  # for all touching, or what the budget gives a search
START_S = 120.0  # the child may take this long beyond it: to import torch, to make a context, to end
KILL = -int(signal.SIGKILL)
ORDER = {
    "cpu": ("blocks", "contiguous", "fragmentation", "device.free_after"),
    "gpu": (
        "device.free", "contiguous", "blocks", "allocator.allocated", "allocator.reserved", "allocator.inactive_split",
        "fragmentation", "device.free_after",
    ),
}  # fmt: skip
SEARCHED = ("contiguous", "blocks", "fragmentation")


@dataclass(frozen=True)
class Plan:
    """What the child process may take, in bytes. `shortened`: the budget, not the machine, set the cap."""

    kind: str
    device: str
    cap_bytes: int
    reserve_bytes: int
    step_bytes: int
    block_bytes: int
    limit_s: float
    shortened: bool
    threads: int = 1


@dataclass(frozen=True)
class Limit:
    """Where a search ended: the bytes that were given and touched, and why no more.

    `ended`: "cap" (all that it might try), "refused" (to within a step), "time" (the limit was reached) or "others"
    (the rest of the host took memory meanwhile).
    """

    bytes: int
    ended: str
    detail: str = ""


def plan(
    kind: str, memory_bytes: int, quick: bool = False, limit_s: float = LIMIT_S, device: str = "cpu", threads: int = 1
) -> Plan:
    """The plan for a GPU of `memory_bytes` in all, or a host of which `memory_bytes` are usable."""
    reserve = 0 if kind == "gpu" else min(max(GIB, int(RESERVE_FRAC * memory_bytes)), memory_bytes // 2)
    cap = memory_bytes - reserve
    shortened = kind == "cpu" and quick and cap > QUICK_BYTES
    step = max(64 * MIB, memory_bytes // 1024 // MIB * MIB)
    return Plan(kind, device, QUICK_BYTES if shortened else cap, reserve, step, GIB, limit_s, shortened, threads)


def cases(kind: str, memory_bytes: int, quick: bool = False, limit_s: float = LIMIT_S) -> list[Case]:
    """Every amount that is looked for, in order; `memory_bytes` as in `plan`."""
    chosen = plan(kind, memory_bytes, quick, limit_s)
    params = {
        "cap_bytes": chosen.cap_bytes, "reserve_bytes": chosen.reserve_bytes, "step_bytes": chosen.step_bytes,
        "block_bytes": chosen.block_bytes, "limit_s": chosen.limit_s,
    }  # fmt: skip
    first = ["device.total"] if kind == "gpu" else ["device.total", "device.free"]
    return [Case(name, dict(params) if name in SEARCHED else {}) for name in (*first, *ORDER[kind])]


# --------------------------------------------------------------------------------------------------- the search


def largest(take: Callable[[int], Any], cap: int, step: int, check: Callable[[int, int], str | None]) -> Limit:
    """The largest size that `take` gives, to a step, by bisection: `cap` itself, or n steps of which n + 1 are refused.

    `take(size)` raises MemoryError; what it returns is dropped. `check(best, size)`, before each try, says why no more may
    be tried, or None. Ends after log2(cap / step) tries whatever `take` answers.
    """
    best, detail, low, high, size = 0, "", 0, math.ceil(cap / step), cap
    while size:
        if why := check(best, size):
            return Limit(best, why)
        try:
            take(size)
        except MemoryError as exc:
            high, detail = min(high, math.ceil(size / step)), str(exc)
        else:
            if size == cap:
                break
            best, low = size, size // step
        size = (low + high) // 2 * step if high - low > 1 else 0
    return Limit(cap, "cap") if size == cap else Limit(best, "refused", detail)


def fill(
    take: Callable[[int], Any], cap: int, block: int, step: int, check: Callable[[int, int], str | None]
) -> tuple[list[tuple[Any, int]], Limit]:
    """Take blocks until `cap`, or until not even one of a step is given: a refused size is halved down to the step.

    Returns what `take` gave with the sizes, and the limit of their sum. `check(total, size)` as in `largest`.
    """
    held, total, size, detail = [], 0, block, ""
    while total < cap:
        want = min(size, cap - total)
        if why := check(total, want):
            return held, Limit(total, why)
        try:
            held.append((take(want), want))
        except MemoryError as exc:
            detail = str(exc)
            if want <= step:
                return held, Limit(total, "refused", detail)
            size = max(step, want // 2)
        else:
            total += want
    return held, Limit(total, "cap")


class Tensors:
    """The memory of a device, taken as byte tensors: the part that knows torch."""

    def __init__(self, torch: Any, kind: str, device: str, reserve_bytes: int = 0):
        self.torch, self.kind, self.device, self.reserve_bytes = torch, kind, device, reserve_bytes

    def take(self, size: int, stride: int = PAGE) -> Any:
        """A tensor of `size` bytes: on a GPU all of it is written, on a host one byte every `stride`.

        Raises MemoryError with the runtime's words.
        """
        try:
            block = self.torch.empty(size, dtype=self.torch.uint8, device=self.device)
            block[:: stride if self.kind == "cpu" else 1].fill_(1)
            self._synchronize()
        except (RuntimeError, MemoryError) as exc:
            raise MemoryError(_words(exc)) from None
        return block

    def release(self) -> None:
        """Give back to the driver what the caller has dropped."""
        if self.kind == "gpu":
            self.torch.cuda.empty_cache()

    def spare_bytes(self) -> int | None:
        """What a host can still give, now that others may have taken some; None where only trying tells.

        Half the reserve is slack, for this process itself.
        """
        usable = host.memory()["usable_bytes"] if self.kind == "cpu" else None
        return None if usable is None else max(0, usable - self.reserve_bytes // 2)

    def free_bytes(self) -> int:
        """What the system says is free. Raises ValueError where it says nothing, or nothing that can be."""
        if self.kind == "cpu":
            usable = host.memory()["usable_bytes"]
            if usable is None:
                raise ValueError("/proc/meminfo cannot be read")
            return usable
        try:
            free, total = self.torch.cuda.mem_get_info()
        except (RuntimeError, OSError) as exc:
            raise ValueError(f"mem_get_info: {_words(exc)}") from None
        if not 0 <= free <= total:
            raise ValueError(f"mem_get_info says {free} bytes free of {total}: no figure")
        return free

    def allocator(self, held_bytes: int) -> dict[str, int]:
        """What the caching allocator says while `held_bytes` are held: allocated, reserved, inactive_split.

        Raises ValueError as `free_bytes` does.
        """
        try:
            stats = self.torch.cuda.memory_stats()
        except (RuntimeError, OSError) as exc:
            raise ValueError(f"memory_stats: {_words(exc)}") from None
        out = {n: stats.get(f"{n}_bytes.all.current") for n in ("allocated", "reserved", "inactive_split")}
        if None in out.values() or out["allocated"] < held_bytes:
            raise ValueError(f"memory_stats says {out['allocated']} bytes are allocated of {held_bytes} held")
        return out

    def _synchronize(self) -> None:
        if self.kind == "gpu":
            self.torch.cuda.synchronize()


def _words(exc: BaseException) -> str:
    """The sentence of an error that says what was refused; the rest of torch's is advice."""
    text = (str(exc) or type(exc).__name__).splitlines()[0]
    return (text.partition("DefaultCPUAllocator: ")[2] or text).split(". ")[0].rstrip(".")[:200]


def explore(chosen: Plan, memory: Any, tell: Callable[..., None], clock: Callable[[], float] = time.monotonic) -> None:
    """Look for every amount of `ORDER`, telling each step: `tell(case, bytes=, trying=)` before a try, then
    `tell(case, value=, ...)` or `tell(case, skipped=)`. `memory` has the methods of `Tensors`."""
    began, gpu = clock(), chosen.kind == "gpu"

    def check(case: str) -> Callable[[int, int], str | None]:
        def look(total: int, size: int) -> str | None:
            tell(case, bytes=total, trying=size)
            if total and clock() - began > chosen.limit_s:  # with nothing found yet it goes on
                return "time"
            spare = memory.spare_bytes()
            return "others" if spare is not None and size > spare else None

        return look

    def once(size: int, stride: int = PAGE) -> None:
        memory.take(size, stride)
        memory.release()

    def found(case: str, limit: Limit, cap: int, shortened: bool = False, **more: int) -> None:
        at_least = limit.ended in ("time", "others") or (limit.ended == "cap" and shortened)
        tell(case, value=limit.bytes, ended=limit.ended, detail=limit.detail, at_least=at_least, cap_bytes=cap, **more)

    def free(case: str) -> None:
        try:
            tell(case, value=memory.free_bytes())
        except ValueError as exc:
            tell(case, skipped=str(exc))

    if gpu:
        free("device.free")
        limit = largest(once, chosen.cap_bytes, chosen.step_bytes, check("contiguous"))
        found("contiguous", limit, chosen.cap_bytes)
    held, limit = fill(memory.take, chosen.cap_bytes, chosen.block_bytes, chosen.step_bytes, check("blocks"))
    whole = sum(size == chosen.block_bytes for _, size in held)
    found("blocks", limit, chosen.cap_bytes, chosen.shortened, tensors=len(held), whole_blocks=whole)
    if gpu:
        _fragment(chosen, memory, tell, held, once, check, found)
    else:
        held.clear()
        spare = memory.spare_bytes()
        cap = limit.bytes if spare is None else min(limit.bytes, spare)
        one = largest(lambda size: once(size, MIB), cap, chosen.step_bytes, check("contiguous"))
        found("contiguous", one, cap, cap < limit.bytes or limit.ended in ("time", "others") or chosen.shortened)
        tell("fragmentation", skipped="host memory is mapped page by page: any free pages make a contiguous tensor")
    free("device.free_after")


def _fragment(
    chosen: Plan, memory: Any, tell: Callable, held: list, once: Callable, check: Callable, found: Callable
) -> None:
    """Drop every second block, say what the allocator holds then, and ask for all that was freed in one piece."""
    freed = sum(size for _, size in held[::2])
    del held[::2]
    kept = sum(size for _, size in held)
    try:
        state = memory.allocator(kept)
    except ValueError as exc:
        state = dict.fromkeys(("allocated", "reserved", "inactive_split"), exc)
    for name, value in state.items():
        said = {"skipped": str(value)} if isinstance(value, ValueError) else {"value": value, "held_bytes": kept}
        tell(f"allocator.{name}", **said)
    if freed:
        found(
            "fragmentation", largest(once, freed, chosen.step_bytes, check("fragmentation")), freed, freed_bytes=freed
        )
    else:
        tell("fragmentation", skipped="no block was given, so none could be freed")
    held.clear()
    memory.release()


# ------------------------------------------------------------------------------------------------ the two processes


def command(chosen: Plan) -> list[str]:
    """The child process."""
    return [sys.executable, "-m", "escher_kernels.capacity", json.dumps(dataclasses.asdict(chosen))]


def main(plan_json: str) -> None:
    """The child: explore, and say each step as a line of JSON. It ends when its parent does."""
    chosen = Plan(**json.loads(plan_json))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    with contextlib.suppress(OSError):  # the OOM killer shall take this process, not the notebook
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    threading.Thread(target=_end_with_parent, daemon=True).start()
    import torch

    if chosen.kind == "cpu":
        torch.set_num_threads(chosen.threads)
    explore(chosen, Tensors(torch, chosen.kind, chosen.device, chosen.reserve_bytes), _tell)


def _end_with_parent() -> None:
    """Standard input is a pipe that nobody writes to: it ends when the parent does, however that died."""
    os.read(0, 1)  # not sys.stdin: its lock, held here, would abort an orderly exit
    os._exit(1)


def _tell(case: str, **what: Any) -> None:
    print(json.dumps({"case": case, **what}), flush=True)


def in_child(chosen: Plan) -> Iterator[dict[str, Any]]:
    """What the child tells, step by step, then how it ended: exit, error (its last words), overdue (it hung).

    The child is gone when the generator is closed, whether it had ended or not.
    """
    overdue = threading.Event()
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            command(chosen), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
            cwd=Path(__file__).resolve().parent.parent,
        )  # fmt: skip

        def give_up() -> None:
            overdue.set()
            process.kill()

        watchdog = threading.Timer(chosen.limit_s + START_S, give_up)
        watchdog.daemon = True
        with process:
            try:
                watchdog.start()
                for line in process.stdout:
                    with contextlib.suppress(ValueError):  # a runtime may print lines of its own
                        event = json.loads(line)
                        if isinstance(event, dict) and "case" in event:
                            yield event
                process.wait()
            finally:
                watchdog.cancel()
                process.kill()
        errors.seek(0)
        words = errors.read().decode("utf-8", "replace").strip().splitlines()
        yield {"exit": process.returncode, "error": words[-1][:200] if words else "", "overdue": overdue.is_set()}


def measure(session: Session, machine: Machine, spec: Spec) -> None:
    """Explore the memory in a child process; every amount is a record as soon as it is known."""
    quick, gpu = session.budget.name == "quick", machine.kind == "gpu"
    limit_s = min(LIMIT_S, float(session.budget.search_s))
    bounds = {} if gpu else host.memory()
    bounded_by = "device" if gpu else bounds["bounded_by"]
    chosen = plan(machine.kind, machine.memory_bytes, quick, limit_s, machine.device, max(1, len(machine.cores)))
    waiting = {
        c.name: replace(c, params={**c.params, "bounded_by": bounded_by})
        for c in cases(machine.kind, machine.memory_bytes, quick, limit_s)
    }

    if not any(map(session.wanted, waiting.values())):
        return

    def record(name: str, value: int | None, skipped: str | None = None, flags: tuple = (), **params: Any) -> None:
        case = waiting.pop(name)
        if skipped or value is None:
            session.skip(case, skipped or "cannot be read")
        else:
            said = {k: v for k, v in params.items() if v not in (None, "")}
            session.record(replace(case, params={**case.params, **said}), value=value, unit="B", flags=flags)

    if gpu:
        record("device.total", machine.memory_bytes, of="device")
    else:
        limit, total = bounds["limit_bytes"], bounds["total_bytes"]
        record("device.total", limit or total, of="limit of the control group" if limit else "host")
        record("device.free", machine.memory_bytes)
    if not chosen.cap_bytes:
        for name in list(waiting):
            record(name, None, "how much memory is usable cannot be read")
        return
    last: dict[str, Any] = {}
    with contextlib.closing(in_child(chosen)) as events:
        for event in events:
            if (name := event.pop("case", None)) is None:
                _close(waiting, last, event, record)
            elif "value" in event or "skipped" in event:
                flags = ("AT_LEAST",) if event.pop("at_least", False) else ()
                record(name, event.pop("value", None), event.pop("skipped", None), flags, **event)
            else:
                last = {"case": name, **event}
                session.progress(f"{name}: {event['bytes'] / GIB:.1f} GiB", always=False)


def _close(waiting: dict[str, Case], last: dict[str, Any], end: dict[str, Any], record: Callable) -> None:
    """Record what the child left open when it ended."""
    name, touched = last.get("case"), last.get("bytes", 0)
    killed = end["exit"] == KILL and not end["overdue"]
    how = f"status {end['exit']}" if end["exit"] >= 0 else f"signal {-end['exit']}"
    reason = f"the child process ended early with {how}" + (f": {end['error']}" if end["error"] else "")
    if end["overdue"]:
        reason = "the child process hung and was ended"
    if killed and name in waiting and touched:
        detail = (
            f"limit found at {touched} bytes: the system killed the child process while it took {last['trying']} more"
        )
        record(name, touched, None, ("KILLED",), ended="killed", detail=detail)
    for other in list(waiting):
        record(other, None, reason)


if __name__ == "__main__":
    main(sys.argv[1])
