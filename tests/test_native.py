"""The C loops: they build, they count what they claim, they cannot hang. No absolute time is asserted anywhere."""

import ctypes
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from escher_kernels import native

pytestmark = pytest.mark.timeout(120)  # a hang fails

CPUS = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]
HAS_COMPILER = bool(os.environ.get("CC", "").strip()) or any(map(shutil.which, ("cc", "gcc", "clang")))
needs_compiler = pytest.mark.skipif(not HAS_COMPILER, reason="no C compiler on this host")


@pytest.fixture(scope="module")
def lib():
    if not HAS_COMPILER:
        pytest.skip("no C compiler on this host")
    with native.load() as loaded:
        yield loaded


def per_cycle(lib, kernel, cpu):
    """FLOP per clock, best slice against best slice of an interleaved run."""
    chain = next(c for c in lib.chains() if c.name == "add")
    work, clock = lib.interleaved([kernel, chain], [cpu], slices=40, slice_s=5e-4)
    return (work.flop_per_slice / min(work.wall_s)) / (clock.cycles_per_slice / min(clock.wall_s))


def eventually(check, tries=4):
    """True if the check holds in one of a few measurements: a neighbour may spoil one, not make a wrong one right."""
    return any(check() for _ in range(tries))


# ---- building ----


def test_no_compiler(monkeypatch, tmp_path):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(native.NativeUnavailable, match=r"tried \$CC, cc, gcc, clang.*install gcc or set CC"):
        native.load()


def test_cc_is_taken_alone_and_its_failure_is_told(monkeypatch):
    monkeypatch.setenv("CC", shutil.which("false"))
    with pytest.raises(native.NativeUnavailable, match="false cannot build native.c: exit status 1.*set CC"):
        native.load()
    monkeypatch.setenv("CC", "/no/such/cc -O3")
    with pytest.raises(native.NativeUnavailable, match="/no/such/cc -O3.*not found"):
        native.load()


def script(path: Path, body: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def test_the_first_error_line_is_shown_in_one_line(monkeypatch, tmp_path):
    fake = script(tmp_path / "a b" / "cc", "echo 'In file included' >&2; echo 'x.c:3: error: boom' >&2; exit 1")
    monkeypatch.setenv("CC", f"'{fake}' -pipe")
    with pytest.raises(native.NativeUnavailable, match="x.c:3: error: boom") as e:
        native.load()
    assert "\n" not in str(e.value) and "In file included" not in str(e.value)


def test_a_compiler_that_writes_nothing_or_rubbish_or_hangs(monkeypatch, tmp_path):
    monkeypatch.setenv("CC", str(script(tmp_path / "nothing", "exit 0")))
    with pytest.raises(native.NativeUnavailable, match="no library"):
        native.load()
    rubbish = 'while [ "$1" != -o ]; do shift; done; echo rubbish > "$2"'
    monkeypatch.setenv("CC", str(script(tmp_path / "rubbish", rubbish)))
    with pytest.raises(native.NativeUnavailable, match="cannot load"):
        native.load()
    monkeypatch.setattr(native, "COMPILE_TIMEOUT_S", 0.2)
    monkeypatch.setenv("CC", str(script(tmp_path / "hangs", "exec sleep 60")))
    with pytest.raises(native.NativeUnavailable, match="took more than 0.2 s"):
        native.load()


def test_the_next_compiler_is_tried(monkeypatch, tmp_path):
    monkeypatch.delenv("CC", raising=False)
    script(tmp_path / "cc", "exit 1")
    good = script(tmp_path / "gcc", ':; while [ "$1" != -o ]; do shift; done; : > "$2"')
    monkeypatch.setenv("PATH", str(tmp_path))
    assert native.build(tmp_path)[1][0] == str(good)


@needs_compiler
def test_build_dir_with_space_and_umlaut_is_left_empty(tmp_path):
    where = tmp_path / "mit Leer zeichen und Größe"
    where.mkdir()
    with native.load(where) as lib:
        assert list(where.iterdir()) == []
        assert lib.clock(CPUS[0], slices=2)["add"].cycles_per_slice > 0
    lib.close()
    with pytest.raises(RuntimeError, match="closed"):
        lib.clock(CPUS[0])


def test_build_dir_that_is_not_there(tmp_path):
    with pytest.raises(native.NativeUnavailable, match="cannot write a build directory"):
        native.load(tmp_path / "none")


def test_flags_are_those_every_processor_has():
    two = "processor: 0\nflags\t\t: fpu avx2 fma\n\nprocessor: 1\nflags : fpu avx2\n"
    assert native.cpu_flags(two) == {"fpu", "avx2"}
    assert native.cpu_flags("Features\t: fp asimd bf16\n") == {"fp", "asimd", "bf16"}
    assert native.cpu_flags("") == set()


def test_every_kernel_offered_or_refused_with_a_reason(lib):
    flags = native.cpu_flags()
    offered = {k.name for k in lib.kernels()}
    assert offered.isdisjoint(lib.unsupported())
    for name, (_, needed) in native._KERNELS.items():
        if needed <= flags:
            assert name in offered or lib.unsupported()[name]
        else:
            assert name not in offered
    assert all(k.dtype in ("bfloat16", "float32") for k in lib.kernels())
    if "avx2" in flags and "fma" in flags:
        assert "avx2_fp32" in offered


# ---- counting ----


def test_the_declared_flop_were_done(lib):
    # With operands of one, each multiply-add adds one to a lane, in the very code that is timed.
    for kernel in lib.kernels():
        for turns in (0, 1, 7, 1000):
            assert 2 * lib.check_sum(kernel, turns, ones=True) == kernel.flop_per_turn * turns, kernel.name


def test_timed_operands_stay_finite_and_normal(lib):
    for kernel in lib.kernels():
        start, late = (lib.check_sum(kernel, turns, ones=False) for turns in (0, 2**16))
        assert 1e-3 < abs(start) < 1e3 and abs(late - start) < 1, kernel.name  # it comes back: no drift
    with pytest.raises(ValueError, match="expected 0..65536"):
        lib.check_sum(lib.kernels()[0], 2**16 + 1, ones=False)


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, list[str]]:
    """The machine code: function -> instructions."""
    if not HAS_COMPILER or not shutil.which("objdump"):
        pytest.skip("no C compiler, or no objdump")
    library, _ = native.build(tmp_path_factory.mktemp("machine_code"))
    text = subprocess.run(
        ["objdump", "-d", "--no-show-raw-insn", library], capture_output=True, text=True, check=True
    ).stdout
    parts = re.split(r"^[0-9a-f]+ <([^>]+)>:\n", text, flags=re.M)[1:]
    return {
        name: [line.partition(":")[2].strip() for line in body.splitlines() if ":" in line]
        for name, body in zip(parts[::2], parts[1::2], strict=True)
    }


def test_machine_code_of_the_copies(found):
    plain = [name for name in found if name.startswith("copy_plain")]
    streaming = [name for name in found if name.startswith("copy_streaming")]
    assert plain and len(plain) == len(streaming)
    non_temporal = re.compile(r"\bv?movnt|\bstnp\b")
    for name in plain:
        assert not any(non_temporal.search(line) for line in found[name]), name
    for name in streaming:
        assert any(non_temporal.search(line) for line in found[name]), name
    for name in plain + streaming:
        assert not any(re.match(r"call|bl\b|rep\b|.*(memcpy|memmove)", line) for line in found[name]), name


def test_machine_code_of_the_peak_loops_holds_no_spills(found):
    steps = {
        "amx_bf16": ("tdpbf16ps", 16),
        "avx512_bf16": ("vdpbf16ps", 64),
        "avx512_fp32": ("vfmadd...ps", 64),
        "avx2_fp32": ("vfmadd...ps", 40),
        "neon_bf16": ("bfmmla", 80),
        "neon_fp32": ("fmla", 80),
    }
    present = [name for name in steps if name in found]
    assert present
    for name in present:
        instruction, count = steps[name]
        at = [i for i, line in enumerate(found[name]) if re.match(instruction, line)]
        assert at and len(at) % count == 0, name
        between = found[name][at[0] : at[count - 1] + 1]
        assert len(between) <= count + 2, f"{name}: more between than the loop counter: {between}"
        assert not any("(" in line or "[" in line for line in between), name


# ---- peaks and clock: ratios only ----


def test_kernels_per_clock(lib):
    # the slowest and the fastest known core that has it; 0.4 of that is left where a sibling thread takes its half
    known = {
        "amx_bf16": (512, 1024),
        "avx512_bf16": (32, 128),
        "avx512_fp32": (32, 64),
        "avx2_fp32": (16, 32),
        "neon_bf16": (32, 256),
        "neon_fp32": (8, 48),
    }
    for kernel in lib.kernels():
        least, most = known[kernel.name]
        seen = []

        def fits(kernel=kernel, least=least, most=most, seen=seen):
            seen.append(per_cycle(lib, kernel, CPUS[0]))
            return 0.4 * least < seen[-1] <= 1.05 * most

        assert eventually(fits), (kernel.name, seen)


def test_amx_is_not_slower_than_avx512(lib):
    kernels = {k.name: k for k in lib.kernels()}
    if not {"amx_bf16", "avx512_bf16"} <= kernels.keys():
        pytest.skip("not a CPU with both")
    amx, avx = lib.interleaved([kernels["amx_bf16"], kernels["avx512_bf16"]], CPUS[:1], slices=30)
    assert amx.flop_per_slice / min(amx.wall_s) >= avx.flop_per_slice / min(avx.wall_s)


def test_the_two_chains_agree(lib):
    seen = []

    def agree():
        hz = [c.cycles_per_slice / min(c.wall_s) for c in lib.clock(CPUS[0], slices=64, slice_s=5e-4).values()]
        seen.append(hz)
        return len(hz) >= 2 and max(hz) <= 1.03 * min(hz) and all(0.5e9 < f < 7e9 for f in hz)

    assert eventually(agree, tries=6), seen


@pytest.mark.parametrize("cpus", [CPUS[:1], CPUS[:2], [CPUS[0]] * 4])
def test_slices_have_the_right_shape(lib, cpus):
    # four threads on one cpu: oversubscribed, slower, and no hang
    kernel, chain = lib.kernels()[-1], lib.chains()[0]
    one, clock = lib.interleaved([kernel, chain], cpus, slices=9, slice_s=2e-4)
    assert len(one.wall_s) == len(clock.wall_s) == 9 and min(one.wall_s) > 0 and min(clock.wall_s) > 0
    assert [len(alone) for alone in one.thread_s] == [9] * len(cpus)
    assert all(0 < t <= wall for alone in one.thread_s for t, wall in zip(alone, one.wall_s, strict=True))
    assert one.threads == len(cpus) and one.cpus == cpus and one.pinned == [True] * len(cpus)
    assert one.flop_per_slice % (kernel.flop_per_turn * len(cpus)) == 0
    assert clock.cycles_per_slice % chain.cycles_per_turn == 0
    assert (one.kernel, clock.chain) == (kernel.name, chain.name)
    assert len(lib.peak(kernel, cpus, slices=3, slice_s=2e-4).wall_s) == 3


def test_a_refused_pin_is_recorded_and_the_affinity_comes_back(lib):
    nowhere = 4095 if 4095 not in CPUS else 4094
    got = lib.peak(lib.kernels()[-1], [CPUS[0], nowhere], slices=2, slice_s=2e-4)
    assert got.pinned == [True, False] and len(got.wall_s) == 2
    for worker in lib._workers:
        assert sorted(os.sched_getaffinity(worker.thread.native_id)) == CPUS


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"cpus": []}, "cpus is"),
        ({"cpus": [-1]}, "cpus is"),
        ({"slices": 0}, "slices is 0"),
        ({"slice_s": 0}, "slice_s is 0"),
        ({"slice_s": 2.0}, "slice_s is 2.0"),
    ],
)
def test_wrong_arguments_of_peak(lib, wrong, message):
    with pytest.raises(ValueError, match=message):
        lib.peak(lib.kernels()[-1], **{"cpus": CPUS[:1], **wrong})
    with pytest.raises(ValueError, match="no loops"):
        lib.interleaved([], CPUS[:1])


# ---- copies ----


def widths(lib):
    return [w for w in (16, 32, 64) if w <= lib._vector_bytes]


@pytest.mark.parametrize("streaming", [False, True])
def test_copies_copy(lib, streaming):
    room = 1 << 17
    source = random.Random(1).randbytes(room)
    src = ctypes.create_string_buffer(source, room)
    dst = ctypes.create_string_buffer(room)
    cases = [(n, n % 61, n % 67) for n in (1, 2, 15, 63, 64, 65, 127, 255, 257, 1023, 4095, 4097, 65537, 100003)]
    for width in widths(lib):
        for n, to, start in cases:
            for threads in (1, 2, 3, 7):
                ctypes.memset(dst, 0xEE, room)
                seconds = lib.copy(
                    ctypes.addressof(dst) + 64 + to, ctypes.addressof(src) + start, n, threads, streaming, width
                )
                got = dst.raw
                assert got[64 + to : 64 + to + n] == source[start : start + n], (width, n, threads)
                assert got[: 64 + to].strip(b"\xee") == b"" and got[64 + to + n :].strip(b"\xee") == b""
                assert seconds > 0


def test_wrong_arguments_of_copy(lib):
    buffer = ctypes.create_string_buffer(256)
    at = ctypes.addressof(buffer)
    for args, message in [
        ((at, at + 128, 0, 1), "nbytes is 0"),
        ((at, at + 128, -5, 1), "nbytes is -5"),
        ((at, at + 128, 8, 0), "threads is 0"),
        ((0, at, 8, 1), "null"),
        ((at, at + 4, 8, 1), "overlap"),
    ]:
        with pytest.raises(ValueError, match=message):
            lib.copy(*args, streaming=False)
    with pytest.raises(ValueError, match="vector_bytes is 48"):
        lib.copy(at, at + 128, 8, 1, False, vector_bytes=48)


def test_the_threads_are_kept(lib):
    src, dst = ctypes.create_string_buffer(4096), ctypes.create_string_buffer(4096)
    lib.copy(ctypes.addressof(dst), ctypes.addressof(src), 4096, 3, False)
    before = [w.thread.native_id for w in lib._workers]
    lib.copy(ctypes.addressof(dst), ctypes.addressof(src), 4096, 2, True)
    assert [w.thread.native_id for w in lib._workers] == before


# ---- no deadlocks ----


def test_an_exception_in_one_thread_frees_the_others(lib):
    kernel = lib.kernels()[-1]
    which, turns = (ctypes.c_int32 * 1)(kernel.index), (ctypes.c_int64 * 1)(10)
    codes = {}

    def job(i, gate):
        if i == 1:
            time.sleep(0.05)  # the others already wait
            raise ZeroDivisionError("thread 1")
        times, sums = (ctypes.c_int64 * 8)(), (ctypes.c_double * 1)()
        codes[i] = lib._lib.escher_slices(gate, which, turns, 1, 4, times, times, sums)
        return codes[i]

    with pytest.raises(ZeroDivisionError, match="thread 1"):
        lib._together(3, job)
    assert codes == {0: 1, 2: 1}
    assert len(lib.peak(kernel, CPUS[:1] * 3, slices=2, slice_s=2e-4).wall_s) == 2  # and the pool still works


def test_a_thread_that_cannot_read_its_affinity(lib, monkeypatch):
    def refuse(pid):
        raise PermissionError(f"no affinity for {threading.current_thread().name}")

    monkeypatch.setattr(os, "sched_getaffinity", refuse)
    with pytest.raises(PermissionError, match="escher-native"):
        lib.peak(lib.kernels()[-1], CPUS[:1] * 2, slices=2)


def test_calls_of_several_threads_take_turns(lib):
    results = []
    callers = [
        threading.Thread(target=lambda: results.append(lib.clock(CPUS[0], slices=3, slice_s=1e-4))) for _ in range(4)
    ]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert len(results) == 4


def test_a_fork_is_refused(lib):
    lib.clock(CPUS[0], slices=1)
    lib._pid += 1
    try:
        with pytest.raises(RuntimeError, match="loaded in process"):
            lib.clock(CPUS[0])
    finally:
        lib._pid -= 1


@needs_compiler
def test_ctrl_c_ends_it():
    code = (
        "from escher_kernels import native\n"
        "n = native.load(); k = n.kernels()[-1]\n"
        f"print('go', flush=True); n.peak(k, {CPUS[:1] * 2}, slices=10**6)\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=Path(native.__file__).parents[1],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stdout.readline() == "go\n"
        time.sleep(0.3)
        child.send_signal(signal.SIGINT)
        _, stderr = child.communicate(timeout=30)
    finally:
        child.kill()
        child.wait()
    assert child.returncode != 0 and "KeyboardInterrupt" in stderr
