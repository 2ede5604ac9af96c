"""What can this CPU do at most, at which clock, and how fast does plain C copy?

A virtual machine hides the clock, the SKU and the sharing of cores (`/proc/cpuinfo` prints the TSC's frequency), so a
peak computed from names is wrong there. This module builds `native.c` with the compiler at hand and returns RAW slice
times:

- `peak` and `interleaved`: register-resident multiply-adds on all given cpus at once, in slices of about 1 ms. All
  threads meet at a barrier before each slice; its wall time is the latest end minus the earliest start.
- `clock`: two chains of dependent instructions whose cycles are known. If they disagree, neither is the clock.
- `copy`: STREAM copy with ordinary or with streaming stores, to compare torch's copy with.

Read a peak as the BEST of many short slices: a neighbour, or a descheduled vCPU, only ever slows a slice down. Traps:

- On a shared host the AMX rate of one vCPU was seen to jump between 1.0 and 2.3 TFLOP/s, each held for hundreds of
  slices, with the clock unmoved (the likely cause: a core's two hyperthreads share one tile unit, and the other one is
  somebody else's). One call is a sample of that second: call `peak` several times over the run and keep the best.
- All threads get equal work, so a slice ends with the slowest core. The bound over all cores at their best is the sum
  over threads of flop_per_slice / threads / min(thread_s[i]).
- After some ms without AMX its first 0.1 to 0.2 ms run slower. Take peaks from `peak`, where slices of one kernel
  follow each other; `interleaved` is for ratios (FLOP per clock, kernel over kernel), which two calls cannot give.
- AVX-512 and AMX may lower the clock: the peak is what was measured, not FLOP per clock times the clock of `add`.
- Two vCPUs may be hyperthreads of one core: the peak of two threads is then that of one.
- BF16 dot products are slower than FP32 multiply-adds on some CPUs that have both: a BF16 roof is bounded by the
  fastest kernel, FP32 ones included: BF16 can be up-converted.

Outside tools for the same questions: cpufp (peaks; its published FLOP per clock are those found here), STREAM (copy).
"""

import ctypes
import os
import queue
import shlex
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).with_name("native.c")
CFLAGS = ["-O2", "-std=gnu11", "-shared", "-fPIC", "-fvisibility=hidden"]  # no -march: each function names its own
COMPILE_TIMEOUT_S = 60

# name -> (dtype, CPU flags it needs in /proc/cpuinfo). The FLOP of a turn stand in native.c.
_KERNELS = {
    "amx_bf16": ("bfloat16", {"amx_tile", "amx_bf16"}),
    "avx512_bf16": ("bfloat16", {"avx512f", "avx512_bf16"}),
    "avx512_fp32": ("float32", {"avx512f"}),
    "avx2_fp32": ("float32", {"avx2", "fma"}),
    "neon_bf16": ("bfloat16", {"bf16"}),
    "neon_fp32": ("float32", {"asimd"}),
}


_CPU_HAS_NO = "the CPU has no"


class NativeUnavailable(RuntimeError):
    """The C loops cannot be built or loaded here; one line, with the mend."""


@dataclass(frozen=True)
class Kernel:
    """A peak loop. A BF16 GEMM can run on each, by up-conversion if it multiplies in FP32."""

    name: str
    dtype: str
    flop_per_turn: int
    index: int


@dataclass(frozen=True)
class Chain:
    """A clock loop: each turn takes exactly `cycles_per_turn` cycles of the core."""

    name: str
    cycles_per_turn: int
    index: int


@dataclass(frozen=True)
class Slices:
    """Raw slices of a peak loop; `flop_per_slice` is the sum over all threads.

    `wall_s`: latest end - earliest start, one per slice. `thread_s[i]`: the same slices as thread i alone saw them."""

    kernel: str
    flop_per_slice: int
    threads: int
    cpus: list[int]
    pinned: list[bool]
    wall_s: list[float]
    thread_s: list[list[float]]


@dataclass(frozen=True)
class ClockSlices:
    """Raw slices of a clock loop; `cycles_per_slice` is that of one thread (the same for each). Times as in Slices."""

    chain: str
    cycles_per_slice: int
    threads: int
    cpus: list[int]
    pinned: list[bool]
    wall_s: list[float]
    thread_s: list[list[float]]


def compilers() -> list[list[str]]:
    """Commands to try: $CC alone if it is set, else those of cc, gcc, clang that exist."""
    if os.environ.get("CC", "").strip():
        command = shlex.split(os.environ["CC"])
        if shutil.which(command[0]) is None:
            raise NativeUnavailable(f"CC is {os.environ['CC']!r}: not found; set CC to a C compiler or unset it")
        return [command]
    found = [[path] for path in map(shutil.which, ("cc", "gcc", "clang")) if path]
    if not found:
        raise NativeUnavailable("no C compiler found (tried $CC, cc, gcc, clang); install gcc or set CC")
    return found


def build(directory: Path) -> tuple[Path, list[str]]:
    """Compiles native.c into `directory`; the library and the command that built it.

    Raises NativeUnavailable with the first error line of the first compiler, if none of them succeeds.
    """
    library = Path(directory) / "native.so"
    first_error = None
    for compiler in compilers():
        command = [*compiler, *CFLAGS, "-o", str(library), str(SOURCE)]
        try:
            done = subprocess.run(
                command, capture_output=True, timeout=COMPILE_TIMEOUT_S, env={**os.environ, "LC_ALL": "C"}
            )
        except subprocess.TimeoutExpired:
            error = f"took more than {COMPILE_TIMEOUT_S} s"
        except OSError as e:
            error = str(e)
        else:
            if done.returncode == 0 and library.exists():
                return library, command
            lines = (done.stderr or done.stdout).decode(errors="replace").splitlines()
            wrong = [line for line in lines if "error" in line.lower()] or [line for line in lines if line.strip()]
            error = wrong[0].strip() if wrong else f"exit status {done.returncode}, no library, no message"
        first_error = first_error or f"{shlex.join(compiler)} cannot build {SOURCE.name}: {error}"
    raise NativeUnavailable(f"{first_error}; set CC to a C compiler that works (gcc or clang, with the libc headers)")


def load(build_dir: Path | None = None) -> "Native":
    """Builds and loads the loops. Nothing stays on disk: the directory, made fresh inside `build_dir` (default: the
    system's temporary directory), is removed as soon as the library is mapped.

    Raises NativeUnavailable, also where libraries cannot be loaded from there (a noexec file system).
    """
    try:
        with tempfile.TemporaryDirectory(prefix="escher-native-", dir=build_dir) as directory:
            library, command = build(Path(directory))
            try:
                return Native(ctypes.CDLL(str(library)), command)
            except OSError as e:
                raise NativeUnavailable(
                    f"cannot load what {command[0]} built: {e}; set TMPDIR to a file system that allows execution"
                ) from e
    except OSError as e:
        raise NativeUnavailable(f"cannot write a build directory: {e}; set TMPDIR to a writable directory") from e


def cpu_flags(cpuinfo: str | None = None) -> set[str]:
    """The flags that EVERY processor of /proc/cpuinfo has; empty where there is no such file."""
    if cpuinfo is None:
        try:
            cpuinfo = Path("/proc/cpuinfo").read_text(errors="replace")
        except OSError:
            return set()
    lines = [line.partition(":") for line in cpuinfo.splitlines()]
    sets = [set(value.split()) for key, _, value in lines if key.strip() in ("flags", "Features")]
    return set.intersection(*sets) if sets else set()


class _Worker:
    """A thread that lives as long as the Native, so that no creation of threads is timed."""

    def __init__(self, number: int):
        self.jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, name=f"escher-native-{number}", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while (job := self.jobs.get()) is not None:
            job()
            del job  # it holds the caller's buffers


class Native:
    """The built loops and a pool of threads. A context manager; one call at a time (others wait)."""

    def __init__(self, library: ctypes.CDLL, command: list[str]):
        self.command = command
        self._lib = library
        pointer, i64, i32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
        signatures = {
            "escher_gate_bytes": (i32, []),
            "escher_gate_abort": (None, [pointer]),
            "escher_amx_permission": (i32, []),
            "escher_loops": (i32, []),
            "escher_loop_name": (ctypes.c_char_p, [i32]),
            "escher_loop_flop": (i64, [i32]),
            "escher_loop_cycles": (i64, [i32]),
            "escher_prepare": (None, []),
            "escher_sum": (ctypes.c_double, [i32, i64, i32]),
            "escher_slices": (i32, [pointer, pointer, pointer, i32, i64, pointer, pointer, pointer]),
            "escher_copy": (i32, [pointer, pointer, pointer, i64, i32, i32, pointer]),
        }
        for name, (result, arguments) in signatures.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
        library.escher_prepare()
        self._workers: list[_Worker] = []
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._closed = False
        self._kernels: list[Kernel] = []
        self._chains: list[Chain] = []
        self._unsupported: dict[str, str] = {}
        self._survey(cpu_flags())

    def _survey(self, flags: set[str]) -> None:
        for index in range(self._lib.escher_loops()):
            name = self._lib.escher_loop_name(index).decode()
            if cycles := self._lib.escher_loop_cycles(index):
                self._chains.append(Chain(name, cycles, index))
                continue
            dtype, needed = _KERNELS[name]
            if missing := needed - flags:
                self._unsupported[name] = f"{_CPU_HAS_NO} {' '.join(sorted(missing))}"
            elif name.startswith("amx") and (refused := self._lib.escher_amx_permission()):
                self._unsupported[name] = f"the kernel refuses the AMX registers: {os.strerror(refused)}"
            else:
                self._kernels.append(Kernel(name, dtype, self._lib.escher_loop_flop(index), index))
        built = {self._lib.escher_loop_name(i).decode() for i in range(self._lib.escher_loops())}
        for name, (_, needed) in _KERNELS.items():
            if name not in built and needed <= flags:
                self._unsupported[name] = f"the compiler ({self.command[0]}) is too old for it"
        widths = {"avx512f": 64, "avx2": 32}
        self._vector_bytes = next((width for flag, width in widths.items() if flag in flags), 16)

    def kernels(self) -> list[Kernel]:
        """The peak loops this CPU, kernel and compiler can run, the fastest for BF16 usually first. May be empty."""
        return list(self._kernels)

    def chains(self) -> list[Chain]:
        """The clock loops."""
        return list(self._chains)

    def unsupported(self) -> dict[str, str]:
        """Peak loops of this architecture that cannot run here: name -> reason."""
        return dict(self._unsupported)

    def blocked(self) -> dict[str, str]:
        """Those that the CPU has the instruction for, while compiler or kernel stand in the way: name -> reason."""
        return {name: why for name, why in self._unsupported.items() if not why.startswith(_CPU_HAS_NO)}

    def check_sum(self, loop: Kernel, turns: int, ones: bool) -> float:
        """The sum of all accumulators after `turns`: with `ones` the multiply-adds that were really done, else those of
        the timed operands. Raises ValueError above 2**16 turns, where FP32 stops counting in ones."""
        if not 0 <= turns <= 2**16:
            raise ValueError(f"turns is {turns}; expected 0..{2**16}")
        return self._lib.escher_sum(loop.index, turns, int(ones))

    def peak(self, kernel: Kernel, cpus: list[int], slices: int = 64, slice_s: float = 1e-3) -> Slices:
        """`slices` slices of about `slice_s`, one thread per entry of `cpus`, each pinned to its own if it may be.

        Raises ValueError as `interleaved` does."""
        return self.interleaved([kernel], cpus, slices, slice_s)[0]

    def clock(self, cpu: int, slices: int = 64, slice_s: float = 1e-3) -> dict[str, ClockSlices]:
        """Slices of each chain on one cpu, interleaved."""
        return {found.chain: found for found in self.interleaved(self._chains, [cpu], slices, slice_s)}

    def interleaved(
        self, loops: list[Kernel | Chain], cpus: list[int], slices: int = 64, slice_s: float = 1e-3
    ) -> list[Slices | ClockSlices]:
        """Slices of several loops in the order 0 1 2 0 1 2 ..., one result per loop.

        Neighbouring slices see the same clock, so a ratio of slice i of two loops is one of the loops. The number of
        turns that fill a slice is found first. Raises ValueError for no loops, no or negative cpus, and for slices or
        slice_s out of range.
        """
        if not loops:
            raise ValueError("no loops; expected at least one of kernels() and chains()")
        if not cpus or min(cpus) < 0:
            raise ValueError(f"cpus is {cpus}; expected a list of cpu numbers >= 0, one per thread")
        if slices < 1:
            raise ValueError(f"slices is {slices}; expected at least 1")
        if not 0 < slice_s <= 1:
            raise ValueError(f"slice_s is {slice_s}; expected seconds, above 0 and at most 1")
        turns = [16] * len(loops)
        for _ in range(6):
            walls, _, _ = self._slices(loops, turns, cpus, 5)
            best = [max(min(wall), 1e-9) for wall in walls]
            # The best slice is the undisturbed one; from far below the goal the overhead counts, so come closer first.
            turns = [max(1, round(t * min(slice_s / b, 200))) for t, b in zip(turns, best, strict=True)]
            if all(b >= slice_s / 8 for b in best):
                break
        walls, thread_s, pinned = self._slices(loops, turns, cpus, slices)
        results = []
        for loop, t, wall, alone in zip(loops, turns, walls, thread_s, strict=True):
            rest = (len(cpus), list(cpus), list(pinned), wall, alone)
            if isinstance(loop, Kernel):
                results.append(Slices(loop.name, loop.flop_per_turn * t * len(cpus), *rest))
            else:
                results.append(ClockSlices(loop.name, loop.cycles_per_turn * t, *rest))
        return results

    def _slices(
        self, loops: list[Kernel | Chain], turns: list[int], cpus: list[int], slices: int
    ) -> tuple[list[list[float]], list[list[list[float]]], list[bool]]:
        """Per loop the wall of each slice; per loop and thread the time of each slice; what was pinned."""
        n, threads = len(loops), len(cpus)
        which = (ctypes.c_int32 * n)(*(loop.index for loop in loops))
        counts = (ctypes.c_int64 * n)(*turns)
        start = [(ctypes.c_int64 * (n * slices))() for _ in cpus]
        end = [(ctypes.c_int64 * (n * slices))() for _ in cpus]
        sums = [(ctypes.c_double * n)() for _ in cpus]
        pinned = [False] * threads

        def job(i: int, gate: ctypes.Array) -> int:
            before = os.sched_getaffinity(0)  # 0 is the calling thread
            try:
                os.sched_setaffinity(0, {cpus[i]})
                pinned[i] = True
            except (OSError, OverflowError):
                pass  # recorded, and it runs where the scheduler puts it
            try:
                return self._lib.escher_slices(gate, which, counts, n, slices, start[i], end[i], sums[i])
            finally:
                if pinned[i]:
                    os.sched_setaffinity(0, before)

        self._together(threads, job)
        slots = [range(loop, n * slices, n) for loop in range(n)]
        walls = [[(max(e[k] for e in end) - min(s[k] for s in start)) * 1e-9 for k in slot] for slot in slots]
        thread_s = [[[(e[k] - s[k]) * 1e-9 for k in slot] for s, e in zip(start, end, strict=True)] for slot in slots]
        return walls, thread_s, pinned

    def copy(
        self, dst_ptr: int, src_ptr: int, nbytes: int, threads: int, streaming: bool, vector_bytes: int | None = None
    ) -> float:
        """Seconds from the first thread's start to the last one's end; each copies one contiguous share.

        Any alignment; shares are cut at multiples of 4096 of dst, about where torch's static schedule cuts. The threads
        are not pinned (torch's are not). Counted bytes are 2 x nbytes; ordinary stores move 3 x nbytes, unless the CPU
        avoids the read. `vector_bytes`: 16, 32 or 64; default the widest the CPU has. Raises ValueError for nbytes or
        threads below 1, null pointers, and buffers that overlap.
        """
        if nbytes <= 0:
            raise ValueError(f"nbytes is {nbytes}; expected at least 1")
        if threads < 1:
            raise ValueError(f"threads is {threads}; expected at least 1")
        if dst_ptr <= 0 or src_ptr <= 0:
            raise ValueError("dst_ptr or src_ptr is null; expected addresses such as tensor.data_ptr()")
        if abs(dst_ptr - src_ptr) < nbytes:
            raise ValueError(f"dst and src overlap: {abs(dst_ptr - src_ptr)} bytes apart, {nbytes} to copy")
        width = self._vector_bytes if vector_bytes is None else vector_bytes
        if width not in (16, 32, 64) or width > self._vector_bytes:
            raise ValueError(f"vector_bytes is {width}; expected 16, 32 or 64, here at most {self._vector_bytes}")
        cuts = [dst_ptr + nbytes * i // threads for i in range(threads + 1)]
        cuts[1:-1] = [min(max(cut & -4096, dst_ptr), dst_ptr + nbytes) for cut in cuts[1:-1]]
        times = [(ctypes.c_int64 * 2)() for _ in range(threads)]

        def job(i: int, gate: ctypes.Array) -> int:
            offset, share = cuts[i] - dst_ptr, cuts[i + 1] - cuts[i]
            return self._lib.escher_copy(
                gate, dst_ptr + offset, src_ptr + offset, share, int(streaming), width, times[i]
            )

        self._together(threads, job)
        return (max(t[1] for t in times) - min(t[0] for t in times)) * 1e-9

    def _together(self, threads: int, job: Callable[[int, ctypes.Array], int]) -> None:
        """job(i, gate) on `threads` threads of the pool. If one raises, or Ctrl-C comes, the gate is aborted: the
        others leave it at once, the error is raised here, and nobody is left running.

        Raises RuntimeError if closed, or in a child of the process that loaded this (threads do not survive a fork)."""
        if os.getpid() != self._pid:
            raise RuntimeError(f"this Native was loaded in process {self._pid}, this is {os.getpid()}; load() another")
        with self._lock:
            if self._closed:
                raise RuntimeError("this Native is closed; load() another")
            while len(self._workers) < threads:
                self._workers.append(_Worker(len(self._workers)))
            gate = (ctypes.c_int32 * (-(-self._lib.escher_gate_bytes() // 4)))()
            gate[0] = threads
            ended = [threading.Event() for _ in range(threads)]
            errors: list[BaseException] = []

            def run(i: int) -> None:
                try:
                    if (code := job(i, gate)) > 1:
                        raise RuntimeError(f"native.c returned {code}")
                except BaseException as e:  # whatever it is, it is raised in the caller's thread
                    errors.append(e)
                    self._lib.escher_gate_abort(gate)
                finally:
                    ended[i].set()

            started = 0
            try:
                for i in range(threads):
                    self._workers[i].jobs.put(lambda i=i: run(i))
                    started += 1
                for event in ended:
                    while not event.wait(0.1):  # short: a signal that another thread received does not wake this one
                        pass
            except BaseException:
                self._lib.escher_gate_abort(gate)
                for event in ended[:started]:
                    event.wait()
                raise
            if errors:
                raise errors[0]

    def close(self) -> None:
        """Ends the threads. Twice is fine."""
        with self._lock:
            self._closed = True
            workers, self._workers = self._workers, []
        for worker in workers:
            worker.jobs.put(None)
        for worker in workers:
            worker.thread.join()

    def __enter__(self) -> "Native":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
