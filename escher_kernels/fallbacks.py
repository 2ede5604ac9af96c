"""What the libraries say about themselves while a family measures, and the flags that its records get from it.

A library that falls back to a slower path says so once, on descriptor 2 (C++, child processes) or as a Python warning,
and goes on. `Watch` reads both, `RULES` know the messages. While it is open, descriptor 2 is a temporary file: no thread
that takes time from what is measured, no pipe that can fill up and block. What came there goes on to the person with the
next record, or the next thing that Python writes to stderr, in the order it came. Should the process be killed (a GPU's
memory fault, out of memory), a second process that waits for just that says its last words.
"""

from __future__ import annotations

import codecs
import contextlib
import fcntl
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from escher_kernels.timing import Case

FLAG = "FALLBACK: "
MATH = FLAG + "MATH attention"
PIECE_BYTES = 2**20
SHOWN_BYTES = 2**18  # of what came since the last time; what is beyond is counted
LINE_CHARS = 2**16  # a longer line is cut before the rules see it
LAST_WORDS_BYTES = 2**16
FUSED = ("aiter", "flash_attn", "sdpa_flash", "sdpa_cudnn", "sdpa_efficient")
GRAPH_MODES = ("max-autotune", "reduce-overhead")  # compile modes that replay graphs on a GPU
GEMM = ("m", "n", "k")
Touches = Callable[[Case, str | None, str | None], bool]


# ---- which rows a message is about: (case, backend, skipped) ----


def _attention(case: Case, backend: str | None = None, skipped: str | None = None) -> bool:
    """One attention by itself. A whole pass of the model names its attention too, but is more than that."""
    return case.params.get("kind") == "attention" or case.name.startswith("attention.")


def _math(case: Case, backend: str | None, skipped: str | None) -> bool:
    """MATH where another was free to run: it is no row of its own, as the forced ones are (their path is its name)."""
    free = case.params.get("path", "default") == "default"
    return free and case.params.get("attention") == "sdpa_math" and not skipped


def _unfused(case: Case, backend: str | None, skipped: str | None) -> bool:
    """Attention that was free to choose, and did not choose a fused kernel."""
    p, free = case.params, case.params.get("path", "default") == "default" and not case.name.startswith("attention.")
    return free and (_attention(case) or "attention" in p) and p.get("attention") not in FUSED and not skipped


def _gemm(case: Case, backend: str | None, skipped: str | None) -> bool:
    """A GEMM, or a pass of the model, which holds some. A probe counts FLOP that no library computes."""
    return bool(case.flop) and case.role != "probe" and not _attention(case) and not skipped


def _compiled(case: Case, backend: str | None, skipped: str | None) -> bool:
    named = case.name in ("compile", "compiled") or case.params.get("path") == "compiled"
    return named or (backend or "").startswith("torch.compile")


def _uncompiled(case: Case, backend: str | None, skipped: str | None) -> bool:
    return bool(skipped) and _compiled(case, backend, skipped)


def _tuned(case: Case, backend: str | None, skipped: str | None) -> bool:
    tuned = str(case.params.get("mode", "")).startswith("max-autotune") or case.params.get("kind") == "linear"
    return tuned and _compiled(case, backend, skipped)


def _graphs(case: Case, backend: str | None, skipped: str | None) -> bool:
    return case.params.get("mode") in GRAPH_MODES and _compiled(case, backend, skipped)


def _gloo(case: Case, backend: str | None, skipped: str | None) -> bool:
    return "gloo" in (backend or "").lower()


def _row(case: Case, backend: str | None) -> tuple[Any, ...]:
    """What one message that is not sticky holds for. GEMMs of the same sizes on one backend are one row, and so is all that
    ran in one compile mode: Python shows a warning once, however many rows meet it again."""
    p = case.params
    if "mode" in p:
        return "mode", p["mode"]
    if all(x in p for x in GEMM):
        return backend, *(p.get(x) for x in (*GEMM, "batch", "layout", "dtype"))
    return (case.name,)


@dataclass(frozen=True)
class Rule:
    """A message (one line of it), the flag it means, and the records that get it.

    `sticky`: it is said once a process and holds from then on. Else it holds for the next record that it touches, and
    for all of the same row. `source`: where the message comes from. Patterns begin with plain text, so that they are fast.
    """

    pattern: re.Pattern[str]
    flag: str
    touches: Touches
    sticky: bool
    source: str


def _rule(pattern: str, flag: str, touches: Touches, sticky: bool, source: str) -> Rule:
    return Rule(re.compile(pattern), FLAG + flag, touches, sticky, source)


RULES = (
    _rule(
        r"Attempting to use hipBLASLt on an unsupported architecture! Overriding blas backend to hipblas",
        "hipBLAS instead of hipBLASLt", _gemm, True, "PyTorch, aten/src/ATen/Context.cpp, blasPreferredBackend",
    ),
    _rule(
        r"Will attempt to recover by calling (?:cublas instead|unfused cublas path)",
        "cuBLAS (hipBLAS) after cuBLASLt (hipBLASLt) failed", _gemm, False,
        "PyTorch, aten/src/ATen/cuda/CUDABlas.cpp, bgemm_internal_cublaslt and gemm_and_bias; the same text on ROCm",
    ),
    _rule(
        r"hipBlasLT failed, falling back to tensile", "rocBLAS used Tensile after hipBLASLt failed", _gemm, False,
        "rocBLAS; said once a process, so that other rows may have done the same",
    ),
    _rule(
        r"failed, switching to (?:BLAS gemm|baddbmm)", "BLAS instead of oneDNN, which failed", _gemm, True,
        "PyTorch, aten/src/ATen/native/LinearAlgebra.cpp; it switches oneDNN off for the rest of the process",
    ),
    _rule(
        r" attention on Current AMD GPU is still experimental", "AOTriton's attention is off on this GPU", _unfused, True,
        "PyTorch, aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, check_*_hardware_support",
    ),
    _rule(
        r"Torch was not compiled with (?:flash|memory efficient) attention",
        "torch was built without a fused attention", _unfused, True,
        "PyTorch, aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, can_use_*_attention",
    ),
    _rule(
        r" kernel not used because:", "a fused attention kernel was refused", _attention, False,
        "PyTorch, aten/src/ATen/native/transformers/cuda/sdp_utils.cpp and sdp_utils_cpp.cpp, select_sdp_backend",
    ),
    _rule(
        r"No working C\+\+ compiler found", "no C++ compiler", _uncompiled, True,
        "PyTorch, torch/_inductor/exc.py, InvalidCxxCompiler",
    ),
    _rule(
        r"Failed to find C compiler", "no C compiler", _uncompiled, True,
        "Triton, python/triton/runtime/build.py; it builds its launchers with one",
    ),
    _rule(
        r"WON'T CONVERT ", "torch.compile gave up, eager code ran", _compiled, False,
        "PyTorch, torch/_dynamo/exc.py, format_error_msg; where suppress_errors is set",
    ),
    _rule(
        r"torch\._dynamo hit config\.(?:accumulated_)?(?:recompile|cache_size)_limit",
        "torch.compile reached its limit of recompiles, eager code ran", _compiled, False,
        "PyTorch, torch/_dynamo/convert_frame.py; cache_size_limit in older versions",
    ),
    _rule(
        r"Not enough SMs to use max_autotune_gemm mode", "no max-autotune GEMMs on this GPU", _tuned, True,
        "PyTorch, torch/_inductor/utils.py, is_big_gpu",
    ),
    _rule(
        r"GPU arch does not support max_autotune_gemm mode usage", "no max-autotune GEMMs on this GPU", _tuned, True,
        "PyTorch, torch/_inductor/utils.py, is_big_gpu on ROCm",
    ),
    _rule(
        r"skipping cudagraphs due to ", "graphs were skipped", _graphs, False,
        "PyTorch, torch/_inductor/cudagraph_utils.py and output_code.py",
    ),
    _rule(
        r"Unable to resolve hostname to a \(local\) address\. Using the loopback address as fallback",
        "gloo on the loopback address", _gloo, True,
        "PyTorch, torch/csrc/distributed/c10d/ProcessGroupGloo.cpp, createDefaultDevice",
    ),
)  # fmt: skip

SAID: set[Rule] = set()  # sticky rules that spoke in this process; libraries do not repeat them for a second family

_GUARD = f"""
import os, select, sys
process, reader = map(int, sys.argv[1:])
select.select([process], [], [])
at = os.lseek(reader, 0, os.SEEK_CUR)
os.lseek(reader, max(at, os.fstat(reader).st_size - {LAST_WORDS_BYTES}), os.SEEK_SET)
while piece := os.read(reader, 65536):
    os.write(2, piece)
"""


class Watch:
    """Reads what lands on descriptor 2 and in `sys.stderr` while it is open. Where descriptor 2 is closed, or there is no
    place for a temporary file, it does nothing. `said`: the sticky rules that spoke already (default: in this process)."""

    def __init__(self, said: set[Rule] | None = None):
        self._said = SAID if said is None else said
        self._pending: set[Rule] = set()  # spoken, and no record touched yet
        self._rows: set[tuple[Rule, tuple[Any, ...]]] = set()
        self._rest = {"descriptor": "", "stream": "", "skipped": ""}  # lines that have not ended
        self._lock = threading.RLock()
        self._saved: int | None = None

    def __enter__(self) -> Watch:
        self._stream, self._process, self._guard = sys.stderr, os.getpid(), None
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._flush()
        try:
            saved = fcntl.fcntl(2, fcntl.F_DUPFD_CLOEXEC, 3)
        except OSError:  # closed
            return self
        try:
            writer, path = tempfile.mkstemp(prefix="escher-stderr-")
            try:
                self._reader = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                fcntl.fcntl(writer, fcntl.F_SETFL, os.O_APPEND)
                os.dup2(writer, 2)
            finally:
                os.unlink(path)
                os.close(writer)
        except OSError:  # no place, or a full disk
            os.close(saved)
            return self
        self._saved = saved
        self._take_stream()
        self._start_guard()
        return self

    def _take_stream(self) -> None:
        """Put ourselves before the stream's `write`. Not a new `sys.stderr`: log handlers hold the old one."""
        stream = self._stream
        self._before = getattr(stream, "write", None)
        self._notebook = type(stream).__module__.startswith("ipykernel.")  # it shows what is written to it, and where
        within = isinstance(getattr(self._before, "__self__", None), Watch)
        self._direct = not within and _descriptor(stream) == 2
        with contextlib.suppress(AttributeError, TypeError):  # no stream, or one that cannot be changed
            self._replaced = vars(stream).get("write")
            stream.write = self._write

    def _start_guard(self) -> None:
        at = _descriptor(self._stream) if self._notebook else None  # the kernel's own stderr: its pipe dies with it
        with contextlib.suppress(OSError):  # Linux before 5.3 has no such descriptor, and some containers refuse it
            ended = os.pidfd_open(self._process)
            try:
                self._guard = subprocess.Popen(
                    [sys.executable, "-I", "-S", "-c", _GUARD, str(ended), str(self._reader)],
                    stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=self._saved if at is None else at,
                    pass_fds=(ended, self._reader), start_new_session=True,
                )  # fmt: skip
            finally:
                os.close(ended)

    def __exit__(self, *_: Any) -> None:
        if self._saved is None:
            return
        mine = os.getpid() == self._process
        try:
            self._flush()  # what was written past `write`, to the stream's buffer
            if mine:
                self._pass_on()
        finally:
            os.dup2(self._saved, 2)
            if getattr(self._stream, "write", None) == self._write:
                del self._stream.write
                if self._replaced is not None:
                    self._stream.write = self._replaced
            if mine:
                self._pass_on()  # what other threads wrote meanwhile
            if self._guard and mine:
                self._guard.kill()
                self._guard.wait()
            os.close(self._reader)
            os.close(self._saved)
            self._saved = None

    def flags(self, case: Case, backend: str | None, skipped: str | None) -> tuple[str, ...]:
        """The flags of a record that is about to be written, from all that was said up to now."""
        if self._saved is not None and os.getpid() == self._process:
            self._pass_on()
        if skipped:  # an error that was caught stands there
            self._heed("skipped", f"{skipped}\n")
        row, out = _row(case, backend), []
        for rule in RULES:
            if not rule.touches(case, backend, skipped):
                continue
            if rule in self._pending:
                self._pending.discard(rule)
                self._rows.add((rule, row))
            if rule in self._said or (rule, row) in self._rows:
                out.append(rule.flag)
        if _math(case, backend, skipped):
            out.append(MATH)
        return tuple(dict.fromkeys(out))

    def _write(self, text: str) -> int:
        """What Python writes to stderr: to the person at once, after what came on descriptor 2 before it."""
        if self._saved is None:  # closed, and somebody kept this method
            return self._before(text)
        encoding, errors = (getattr(self._stream, x, None) for x in ("encoding", "errors"))
        data = text.encode(encoding or "utf-8", errors or "backslashreplace")
        if os.getpid() != self._process:  # a child made by fork: we hear it on descriptor 2
            _put(2, data)
            return len(text)
        with self._lock:
            self._pass_on()
            self._heed("stream", text)
            if not self._direct:
                return self._before(text)
            _put(self._saved, data)
            return len(text)

    def _pass_on(self) -> None:
        """Heed what came on descriptor 2 since the last time, and hand the first `SHOWN_BYTES` of it to the person."""
        with self._lock:
            shown, more = SHOWN_BYTES, 0
            at, end = os.lseek(self._reader, 0, os.SEEK_CUR), os.fstat(self._reader).st_size
            if end < at:  # a program opened /dev/stderr anew, which empties it
                at = os.lseek(self._reader, 0, os.SEEK_SET)
            while at < end and (piece := os.read(self._reader, min(PIECE_BYTES, end - at))):
                at, text = at + len(piece), self._decoder.decode(piece)
                self._heed("descriptor", text)
                self._show(piece[:shown], text[:shown])
                more += len(piece[shown:])
                shown -= len(piece[:shown])
            if more:
                note = f"\n[{more} more bytes on stderr are left out here]\n"
                self._show(note.encode(), note)

    def _show(self, data: bytes, text: str) -> None:
        if self._notebook:
            with contextlib.suppress(OSError, ValueError):
                self._before(text)
        else:
            _put(self._saved, data)

    def _heed(self, source: str, text: str) -> None:
        """Let the rules see the lines that are whole."""
        whole, end, rest = (self._rest[source] + text).rpartition("\n")
        if len(rest) > LINE_CHARS:
            whole, rest = whole + end + rest, ""
        self._rest[source] = rest
        for rule in RULES if whole else ():
            if rule.pattern.search(whole):
                (self._said if rule.sticky else self._pending).add(rule)

    def _flush(self) -> None:
        with contextlib.suppress(AttributeError, OSError, ValueError):
            self._stream.flush()


def _descriptor(stream: Any) -> int | None:
    try:
        return stream.fileno()
    except (AttributeError, OSError, ValueError):
        return None


def _put(descriptor: int, data: bytes) -> None:
    """Write all of it. A console that is gone must not end what is measured."""
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(descriptor, data) :]
