"""What libraries say on descriptor 2 or through Python reaches the person, and the records that it is about."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
import textwrap
import time
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from escher_kernels import attention, e2e, fallbacks, ops, records, timing, workload
from escher_kernels.fallbacks import FLAG, RULES, Rule, Watch
from escher_kernels.timing import Case

SPEC = workload.load("smoke")
OPS = {op.name: op for op in workload.ops(SPEC)}
LINEAR = next(op for op in OPS.values() if op.kind == "linear")
ATTENTION = next(op for op in OPS.values() if op.kind == "attention")
MATH_RAN = "math (bmm, softmax, bmm)"


def attended(path: str, ran: str) -> Case:
    """A row of attention as `ops` names it once it knows what ran."""
    item = ops.case(ATTENTION, "bf16", path)
    return replace(item, params={**item.params, "attention": ran})


def whole(name: str, **params) -> Case:
    return e2e.case(SPEC, "bf16", name, **params)


SQUARE = Case("square.8192", {"m": 8192, "n": 8192, "k": 8192, "layout": "NN", "dtype": "bf16"}, flop=2 * 8192**3)
ANCHOR = replace(SQUARE, name="anchor.gemm", role="anchor")
COPY = Case("copy.1", {"buffer_bytes": 2**30}, bytes_moved=2**31)
PEAK = Case("peak.fma", {"dtype": "bf16"}, flop=10**9, role="probe")  # our own loop: no library
GEMM = ops.case(LINEAR, "bf16")
GEMM_COMPILED = ops.case(LINEAR, "bf16", ops.COMPILED)
NORM = ops.case(OPS["norm.self"], "bf16")
NORM_COMPILED = ops.case(OPS["norm.self"], "bf16", ops.COMPILED)
FREE_MATH = attended(ops.DEFAULT, "sdpa_math")
FREE_FLASH = attended(ops.DEFAULT, "sdpa_flash")
FORCED_MATH = attended("sdpa_math", "sdpa_math")
FORCED_FLASH = ops.case(ATTENTION, "bf16", "sdpa_flash")
TRIED = e2e.value_case("attention.sdpa_math")
EAGER = whole("eager", attention="sdpa_flash")
COMPILED = whole("compiled", attention="sdpa_flash", mode="reduce-overhead")
COMPILING = e2e.value_case("compile", mode="reduce-overhead")
COMPILING_DEFAULT = e2e.value_case("compile", mode="default")
COMPILING_MAX = e2e.value_case("compile", mode="max-autotune")
NEVER_COMPILED = whole("compiled")
GLOO, NCCL = Case("all_reduce.1", {"world": 2}), Case("all_reduce.2", {"world": 2})

BACKENDS = {  # as the families name them
    EAGER.name: "eager, attention sdpa_flash", COMPILED.name: "torch.compile, mode reduce-overhead, attention sdpa_flash",
    GEMM.name: "torch, eager linear", GEMM_COMPILED.name: "torch.compile, linear", NORM.name: "torch, eager norm",
    NORM_COMPILED.name: "torch.compile, norm", FREE_MATH.name: MATH_RAN, SQUARE.name: "torch.mm", ANCHOR.name: "torch.mm",
    COPY.name: "torch.copy_", GLOO.name: "gloo", NCCL.name: "nccl",
}  # fmt: skip
REASON = "unavailable: no kernel image is available"
SKIPPED = {NEVER_COMPILED.name: REASON}

ROCM = "/pytorch/aten/src/ATen"
# Every message as its library prints it -> the rows it is about, rows it is not about.
EXAMPLES = (
    (
        f"bench.py:6: UserWarning: Attempting to use hipBLASLt on an unsupported architecture! Overriding blas backend to hipblas"
        f" (Triggered internally at {ROCM}/Context.cpp:296.)",
        (SQUARE, ANCHOR, GEMM, EAGER), (COPY, PEAK, FREE_MATH, NORM, GLOO),
    ),
    (
        "[W1016 17:27:46.690175963 Context.cpp:301] Warning: Attempting to use hipBLASLt on an unsupported architecture! "
        "Overriding blas backend to hipblas (function operator())",
        (SQUARE, GEMM_COMPILED), (COPY, FORCED_FLASH),
    ),
    (
        "x.py:9: UserWarning: bgemm_internal_cublaslt error: HIPBLAS_STATUS_INTERNAL_ERROR when calling cublasLtMatmul with "
        "transpose_mat1 1 transpose_mat2 0 m 8192 n 8192 k 8192 lda 8192 ldb 8192 ldc 8192 abType 14 cType 14 computeType 68 "
        f"scaleType 0. Will attempt to recover by calling cublas instead. (Triggered internally at {ROCM}/CUDABlas.cpp:594.)",
        (SQUARE,), (COPY, FREE_MATH),
    ),
    (
        "x.py:9: UserWarning: gemm_and_bias error: CUBLAS_STATUS_NOT_SUPPORTED when calling cublasLtMatmul with transpose_mat1 1 "
        "transpose_mat2 0 m 8192 n 8192 k 8192 mat1_ld 8192 mat2_ld 8192 result_ld 8192 abType 14 cType 14 computeType 68 "
        "scaleType 0. Will attempt to recover by calling unfused cublas path.",
        (GEMM,), (COPY, NORM),
    ),
    ("rocBLAS warning: hipBlasLT failed, falling back to tensile.", (SQUARE,), (COPY,)),
    (
        "linear.py:116: UserWarning: mkldnn_matmul failed, switching to BLAS gemm:internal error (Triggered internally at "
        f"{ROCM}/native/LinearAlgebra.cpp:1509.)",
        (SQUARE, GEMM), (COPY, PEAK),
    ),
    ("x.py:1: UserWarning: mkldnn_matmul failed, switching to baddbmm:could not create a primitive", (SQUARE,), (COPY,)),
    (
        "x.py:902: UserWarning: Mem Efficient attention on Current AMD GPU is still experimental. Enable it with "
        f"TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL=1. (Triggered internally at {ROCM}/native/transformers/hip/sdp_utils.cpp:360.)",
        (FREE_MATH, whole("eager", attention="sdpa")), (FREE_FLASH, FORCED_MATH, EAGER, SQUARE, TRIED),
    ),
    (
        "x.py:902: UserWarning: Flash Efficient attention on Current AMD GPU is still experimental. Enable it with "
        "TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL=1.",
        (FREE_MATH,), (FREE_FLASH, FORCED_MATH),
    ),
    (
        "model.py:187: UserWarning: 1Torch was not compiled with flash attention. (Triggered internally at "
        "../aten/src/ATen/native/transformers/hip/sdp_utils.cpp:253.)",
        (FREE_MATH,), (FREE_FLASH, FORCED_MATH, SQUARE),
    ),
    ("model.py:187: UserWarning: 1Torch was not compiled with memory efficient attention.", (FREE_MATH,), (FREE_FLASH,)),
    ("x.py:3: UserWarning: Flash attention kernel not used because: (Triggered internally at x.cpp)", (FORCED_FLASH,), (SQUARE,)),
    ("x.py:3: UserWarning: Memory efficient kernel not used because: (Triggered internally at x.cpp)", (FREE_MATH,), (EAGER,)),
    ("x.py:3: UserWarning: cuDNN attention kernel not used because: (Triggered internally at x.cpp)", (TRIED,), (EAGER,)),
    (
        "InductorError: InvalidCxxCompiler: No working C++ compiler found in torch._inductor.config.cpp.cxx: (None, 'g++')",
        (NEVER_COMPILED,), (COMPILED, EAGER, NORM_COMPILED),
    ),
    ("RuntimeError: Failed to find C compiler. Please specify via CC environment variable.", (NEVER_COMPILED,), (COMPILED,)),
    (
        "W1201 02:44:03.837000 11736 torch/_dynamo/convert_frame.py:2415] WON'T CONVERT forward model.py line 4 ",
        (COMPILED,), (EAGER, NORM),
    ),
    (
        "W1201 02:44:03.837000 11736 torch/_dynamo/convert_frame.py:1990] [0/8] torch._dynamo hit config.recompile_limit (8)",
        (NORM_COMPILED,), (NORM, EAGER),
    ),
    ("W0101 _dynamo/convert_frame.py:1] torch._dynamo hit config.accumulated_cache_size_limit (256)", (COMPILED,), (EAGER,)),
    (
        "W0718 torch/_inductor/utils.py:1954] [0/0] Not enough SMs to use max_autotune_gemm mode",
        (GEMM_COMPILED, COMPILING_MAX), (COMPILED, NORM_COMPILED, GEMM),
    ),
    (
        "W0718 torch/_inductor/utils.py:1946] GPU arch does not support max_autotune_gemm mode usage",
        (GEMM_COMPILED, COMPILING_MAX), (COMPILED, GEMM),
    ),
    (
        "W1201 02:46:41.322000 11762 torch/_inductor/cudagraph_utils.py:380] [__cudagraphs] skipping cudagraphs due to mutated "
        "inputs (2 instances). Found from : ",
        (COMPILING, COMPILED), (COMPILING_DEFAULT, NORM_COMPILED, EAGER),
    ),
    (
        "[rank0]:[W427 03:10:15.652192062 ProcessGroupGloo.cpp:715] Warning: Unable to resolve hostname to a (local) address. "
        "Using the loopback address as fallback. Manually set the network interface to bind to with GLOO_SOCKET_IFNAME. "
        "(function operator())",
        (GLOO,), (NCCL, SQUARE),
    ),
)  # fmt: skip


def rule_of(message: str) -> Rule:
    (found,) = [r for r in RULES if r.pattern.search(message)]
    return found


def ask(watch: Watch, case: Case) -> tuple[str, ...]:
    return watch.flags(case, BACKENDS.get(case.name), SKIPPED.get(case.name) if case is NEVER_COMPILED else None)


def about(watch: Watch, case: Case) -> tuple[str, ...]:
    """The flags that messages gave; MATH is told without one."""
    return tuple(f for f in ask(watch, case) if f != fallbacks.MATH)


# ---- the rules ----


@pytest.mark.parametrize("message,touched,untouched", EXAMPLES, ids=[m[:40] for m, *_ in EXAMPLES])
def test_a_message_flags_the_rows_it_is_about_and_no_others(message, touched, untouched):
    rule = rule_of(message)
    for case in touched:
        with Watch(set()) as watch:
            assert about(watch, case) == ()
            os.write(2, f"before\n{message}\nafter\n".encode())
            for other in untouched:
                assert about(watch, other) == (), other.name
            assert about(watch, case) == (rule.flag,), case.name


@pytest.mark.parametrize("rule", RULES, ids=[r.pattern.pattern for r in RULES])
def test_every_rule_has_an_example(rule):
    assert any(rule_of(m) is rule for m, *_ in EXAMPLES)
    assert rule.flag.startswith(FLAG) and rule.source and "\n" not in rule.source
    assert re.match(r"[\w '.\\]{4}", rule.pattern.pattern), "begins with plain text"


def test_sticky_holds_for_all_later_rows_and_speaks_for_another_watch_of_the_process():
    said: set[Rule] = set()
    with Watch(said) as watch:
        os.write(2, (EXAMPLES[0][0] + "\n").encode())
        assert about(watch, COPY) == ()
        assert [about(watch, c) for c in (SQUARE, COPY, GEMM)] == [(RULES[0].flag,), (), (RULES[0].flag,)]
    with Watch(said) as later:
        assert about(later, ANCHOR) == (RULES[0].flag,)
    with Watch(set()) as other:
        assert about(other, ANCHOR) == ()


def test_what_is_not_sticky_holds_for_one_row_and_for_gemms_of_the_same_sizes():
    message, (flag,) = EXAMPLES[2][0], {RULES[1].flag}
    twin = replace(SQUARE, name="roof")
    larger = replace(SQUARE, name="square.4096", params={**SQUARE.params, "m": 4096})
    with Watch(set()) as watch:
        os.write(2, f"{message}\n".encode())
        assert watch.flags(COPY, "torch.copy_", None) == ()
        assert watch.flags(SQUARE, "torch.mm", None) == (flag,)
        assert watch.flags(larger, "torch.mm", None) == ()
        assert watch.flags(SQUARE, "torch.mm", None) == (flag,)
        assert watch.flags(twin, "torch.mm", None) == (flag,), "Python shows a warning once; the same GEMM fell back again"
        assert watch.flags(twin, "hipBLASLt", None) == ()
        os.write(2, f"{message}\n{message}\n".encode())
        assert watch.flags(larger, "torch.mm", None) == (flag,)


def test_graphs_skipped_while_compiling_flag_the_timed_row_of_that_mode():
    message = next(m for m, *_ in EXAMPLES if "cudagraphs" in m)
    with Watch(set()) as watch:
        os.write(2, f"{message}\n".encode())
        assert about(watch, COMPILING) == about(watch, COMPILED) == (FLAG + "graphs were skipped",)
        assert about(watch, COMPILING_MAX) == ()


def test_a_reason_for_skipping_is_heeded_like_a_message():
    reason = "unavailable: InductorError: InvalidCxxCompiler: No working C++ compiler found in x.cpp.cxx: (None, 'g++')"
    with Watch(set()) as watch:
        assert watch.flags(COMPILING, None, reason) == (FLAG + "no C++ compiler",)
        assert watch.flags(NEVER_COMPILED, None, "torch.compile is unavailable (see compile)") == (FLAG + "no C++ compiler",)
        assert watch.flags(COMPILED, BACKENDS["compiled"], None) == ()
        said = "sdpa_flash does not run: Flash Efficient attention on Current AMD GPU is still experimental. Enable it"
        assert watch.flags(FORCED_FLASH, None, said) == ()
        assert len(about(watch, FREE_MATH)) == 1


@pytest.mark.parametrize(
    "case,backend,skipped,flagged",
    [
        (FREE_MATH, MATH_RAN, None, True),
        (FREE_MATH, None, "out of memory", False),
        (FORCED_MATH, MATH_RAN, None, False),
        (FREE_FLASH, "aten::_scaled_dot_product_flash_attention", None, False),
        (whole("eager", attention="sdpa_math"), "eager, attention sdpa_math", None, True),
        (whole("compiled", attention="sdpa_math", mode="default"), "torch.compile, mode default", None, True),
        (EAGER, "eager, attention sdpa_flash", None, False),
        (TRIED, MATH_RAN, None, False),
        (SQUARE, "torch.mm", None, False),
    ],
)
def test_math_attention_is_a_fallback_unless_it_was_forced(case, backend, skipped, flagged):
    with Watch(set()) as watch:
        assert (fallbacks.MATH in watch.flags(case, backend, skipped)) is flagged


def test_names_agree_with_those_of_attention():
    assert set(fallbacks.FUSED) == set(attention.BACKENDS) - {"sdpa_math"}
    assert set(fallbacks.GRAPH_MODES) == set(e2e.MODES["gpu"]) - {"default"}
    assert attention.backend_of(MATH_RAN) == "sdpa_math" and ops.DEFAULT == "default" and ops.COMPILED == "compiled"


def test_a_session_writes_the_flags_of_its_watch():
    written: list[records.Record] = []
    with Watch(set()) as watch:
        budget = timing.BUDGETS["quick"]
        session = timing.Session("compute", timing.CpuTimer(), written.append, budget, progress=print, notices=watch.flags)
        session.record(SQUARE, value=1.0, unit="s", backend="torch.mm")
        os.write(2, (EXAMPLES[0][0] + "\n").encode())
        session.record(SQUARE, value=1.0, unit="s", backend="torch.mm", flags=("NOISY: spread",))
    assert [r.flags for r in written] == [(), ("NOISY: spread", RULES[0].flag)]


# ---- what is read, and what the person sees ----


def python(code: str, **kwargs) -> subprocess.CompletedProcess:
    """Run in an interpreter of its own, with `watch`, `say` (a message) and `ask` (the flags of a GEMM)."""
    head = f"""
        import os, subprocess, sys, time, warnings
        from escher_kernels.fallbacks import Watch
        from escher_kernels.timing import Case
        MESSAGE = {EXAMPLES[0][0]!r}
        watch = Watch(set())
        def ask(): return len(watch.flags(Case("x", flop=1), None, None))
    """
    code = textwrap.dedent(head) + textwrap.dedent(code)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, check=False, **kwargs)


SAY = {
    "descriptor": "os.write(2, MESSAGE.encode() + b'\\n')",
    "child": "subprocess.run([sys.executable, '-S', '-c', 'import sys; print(sys.argv[1], file=sys.stderr)', MESSAGE])",
    "shell": "subprocess.run(['sh', '-c', 'echo \"$0\" >&2', MESSAGE])",
    "warning": "warnings.warn(MESSAGE)",
    "print": "print(MESSAGE, file=sys.stderr)",
    "kept stream": "old.write(MESSAGE + '\\n')",
    "original stream": "print(MESSAGE, file=sys.__stderr__)",
    "fork": "pid = os.fork() or (print(MESSAGE, file=sys.stderr), os._exit(0)); os.waitpid(pid, 0)",
    "buffer": "sys.stderr.buffer.write(MESSAGE.encode() + b'\\n'); sys.stderr.buffer.flush()",
}


@pytest.mark.parametrize("how", SAY)
def test_in_a_plain_process_every_way_to_say_it_is_heard_and_seen(how):
    done = python(f"""
        old = sys.stderr
        with watch:
            assert ask() == 0
            {SAY[how]}
            assert ask() == 1
        print("end", file=sys.stderr)
    """)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stderr.count(b"Overriding blas backend") == 1 and done.stderr.endswith(b"end\n")


def test_a_python_line_reaches_the_person_at_once_and_everything_in_order():
    done = python("""
        with watch:
            for i in range(3):
                os.write(2, b"descriptor %d\\n" % i)
                print("python", i, file=sys.stderr)
                print("stdout", i, flush=True)
            os.write(2, b"with the record\\n")
            ask()
            os.write(2, b"at the end")
    """, stdin=subprocess.DEVNULL)  # fmt: skip
    lines = [f"{who} {i}" for i in range(3) for who in ("descriptor", "python")]
    assert done.stderr.decode() == "\n".join([*lines, "with the record", "at the end"])


def test_a_python_line_is_on_the_console_before_the_next_record(tmp_path):
    log = tmp_path / "log"
    with open(log, "wb") as err:
        done = subprocess.run(
            [sys.executable, "-c", "import sys; from escher_kernels.fallbacks import Watch\n"
             "with Watch(set()): print('now', file=sys.stderr); assert 'now' in open(sys.argv[1]).read()", str(log)],
            stderr=err, timeout=60, check=False,
        )  # fmt: skip
    assert done.returncode == 0, log.read_text()


def test_what_raises_loses_nothing_and_everything_is_put_back():
    done = python("""
        def same():
            return os.fstat(2).st_ino, sys.stderr, sys.stderr.write.__self__, len(os.listdir("/proc/self/fd"))
        before = same()
        try:
            with watch:
                os.write(2, b"last words\\n")
                assert same() != before
                raise KeyError("family")
        except KeyError:
            assert same() == before
        with watch:
            print("again", file=sys.stderr)
            kept = sys.stderr.write
        kept("late\\n")
        assert "write" not in vars(sys.stderr)
        assert not [c for c in open(f"/proc/self/task/{os.getpid()}/children").read().split()]
    """)
    assert (done.returncode, done.stderr) == (0, b"last words\nagain\nlate\n")


def test_watches_nest():
    done = python("""
        inner = Watch(set())
        with watch:
            with inner:
                os.write(2, b"1\\n"); print(2, file=sys.stderr); os.write(2, MESSAGE.encode() + b"\\n")
                assert len(inner.flags(Case("x", flop=1), None, None)) == 1
                print(3, file=sys.stderr)
            os.write(2, b"4\\n"); print(5, file=sys.stderr)
            assert ask() == 1
        print(6, file=sys.stderr)
    """)
    assert done.returncode == 0, done.stderr.decode()
    assert re.sub(rb".*hipBLASLt.*", b"m", done.stderr).split() == [b"1", b"2", b"m", b"3", b"4", b"5", b"6"]


@pytest.mark.parametrize("closed", ["2", "0, 1, 2"])
def test_a_closed_descriptor_is_left_closed(closed):
    done = python(f"""
        [os.close(fd) for fd in ({closed},)]
        with watch:
            code = ask()
        try:
            os.fstat(2)
        except OSError:
            os._exit(code)
        os._exit(9)
    """)
    assert done.returncode == 0


def test_without_a_place_for_a_file_nothing_is_taken():
    done = python("""
        import tempfile
        tempfile.tempdir = "/nonexistent"
        with watch:
            os.write(2, b"through\\n"); print("too", file=sys.stderr)
            assert ask() == 0
    """)
    assert (done.returncode, done.stderr) == (0, b"through\ntoo\n")


def test_a_stream_that_is_none_does_not_matter():
    done = python("""
        sys.stderr = None
        with watch:
            os.write(2, MESSAGE.encode() + b"\\n")
            assert ask() == 1
    """)
    assert (done.returncode, done.stderr.count(b"Overriding")) == (0, 1)


def test_a_stream_of_somebody_else_gets_python_text_alone(capfd):
    mine = io.StringIO()
    with contextlib.redirect_stderr(mine), Watch(set()) as watch:
        print(EXAMPLES[0][0], file=sys.stderr)
        os.write(2, b"descriptor\n")
        assert about(watch, SQUARE) == (RULES[0].flag,)
    assert (mine.getvalue(), capfd.readouterr().err) == (EXAMPLES[0][0] + "\n", "descriptor\n")


def test_under_capture_of_the_test_runner(capfd):
    with Watch(set()) as watch:
        os.write(2, b"one\n")
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            print("two", file=sys.stderr)
            subprocess.run(["sh", "-c", "echo three >&2"], check=True)
        ask(watch, COPY)
    assert capfd.readouterr().err == "one\ntwo\nthree\n"


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 400), max_size=6))
def test_a_line_is_heard_however_it_is_cut(cuts):
    text = f"ä{EXAMPLES[0][0]}\n".encode()
    at = sorted({0, len(text), *(c for c in cuts if c < len(text))})
    with Watch(set()) as watch:
        for start, end in zip(at, at[1:], strict=False):
            assert about(watch, SQUARE) == ()
            os.write(2, text[start:end])
        assert about(watch, SQUARE) == (RULES[0].flag,)


def test_bytes_that_are_no_text_pass_through():
    done = python("""
        with watch:
            os.write(2, b"\\xff\\xfe\\x00 \\xc3"); ask(); os.write(2, b"\\xa4\\n" + MESSAGE.encode() + b"\\xff\\n")
            assert ask() == 1
    """)
    assert done.returncode == 0 and done.stderr.startswith(b"\xff\xfe\x00 \xc3\xa4\n")


@pytest.mark.parametrize("line", [b"x" * 99 + b"\n", b"x" * 100])
def test_fifty_megabytes_are_bounded_and_what_they_hold_is_heard(line):
    done = python(f"""
        import resource
        block = {line!r} * 10_000
        with watch:
            for i in range(50):
                os.write(2, block)
            os.write(2, b"\\n" + MESSAGE.encode() + b"\\n")
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            assert ask() == 1
            assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 24_000, "KiB"
            os.write(2, b"next\\n")
    """)
    assert done.returncode == 0, done.stderr[-300:]
    assert len(done.stderr) < fallbacks.SHOWN_BYTES + 200
    total = 50 * 10_000 * 100 + 2 + len(EXAMPLES[0][0])
    assert done.stderr.endswith(b"\n[%d more bytes on stderr are left out here]\nnext\n" % (total - fallbacks.SHOWN_BYTES))


def test_a_program_that_empties_the_file_is_still_heard():
    done = python("""
        with watch:
            os.write(2, b"a long line that was read already\\n"); ask()
            subprocess.run([sys.executable, "-S", "-c", "open('/dev/stderr', 'w').write('anew\\\\n')"]); ask()
            os.write(2, b"and on\\n")
    """)
    assert done.stderr == b"a long line that was read already\nanew\nand on\n"


@pytest.mark.parametrize("end", ["os.abort()", "os.kill(os.getpid(), 9)", "os._exit(3)"])
def test_the_last_words_of_a_process_that_is_killed_are_seen(end, tmp_path):
    log = tmp_path / "log"
    with open(log, "wb") as err:
        code = "import os\nfrom escher_kernels.fallbacks import Watch\nwith Watch(set()) as w:\n"
        code += f"    os.write(2, b'seen '); w._pass_on()\n    os.write(2, b'Memory access fault by GPU node-1')\n    {end}\n"
        done = subprocess.run([sys.executable, "-c", code], stderr=err, timeout=60, check=False)
    assert done.returncode != 0
    deadline = time.monotonic() + 20
    while "fault" not in log.read_text() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert log.read_text() == "seen Memory access fault by GPU node-1"


def test_inside_a_notebook(tmp_path, monkeypatch):
    """A real kernel, whose sys.stderr goes to the notebook and which watches descriptor 2 itself."""
    import nbclient
    import nbformat

    from escher_book import runner

    monkeypatch.delenv("PYTEST_CURRENT_TEST")  # under it a kernel does not watch
    ways = [w for name, w in SAY.items() if name not in ("fork", "buffer", "child")]
    code = textwrap.dedent(f"""
        import os, subprocess, sys, warnings
        from escher_kernels.fallbacks import Watch
        from escher_kernels.timing import Case
        assert sys.stderr._should_watch
        old, before = sys.stderr, vars(sys.stderr).get("write")
        for MESSAGE, way in [({EXAMPLES[0][0]!r} + f" {{i}}", way) for i, way in enumerate({ways!r})]:
            with Watch(set()) as watch:
                asked = lambda: len(watch.flags(Case("x", flop=1), None, None))
                assert asked() == 0
                exec(way)
                assert asked() == 1, way
        with Watch(set()) as watch:
            for i in range(3):
                os.write(2, b"d%d\\n" % i)
                print("p", i, file=sys.stderr)
        assert vars(sys.stderr).get("write") is before, "IPython has one of its own there"
    """)
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    with runner.private_kernel(tmp_path):
        nbclient.NotebookClient(notebook, timeout=60, kernel_name="python3").execute()
    text = "".join(o.text for o in notebook.cells[0].outputs if o.output_type == "stream" and o.name == "stderr")
    assert text.count("blas backend to hipblas") >= len(ways), json.dumps(text)
    assert text.endswith("d0\np 0\nd1\np 1\nd2\np 2\n"), json.dumps(text)


def test_no_file_is_left(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with Watch(set()):
        assert not list(Path(tmp_path).iterdir())
