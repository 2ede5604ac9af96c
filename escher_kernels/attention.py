"""Scaled dot-product attention by backend: call it, force it, name what ran, predict its memory, judge its result.

No mask, scale 1/sqrt(D). q is (B, Sq, H, D), k and v are (B, Skv, H, D), the output is (B, Sq, H, D).

Traps: PyTorch falls back to another backend without a word (on ROCm to `math`, which materialises the scores), so a
backend is forced, and the record names what ran. `torch.compile` has two caches that do not know which backend was
forced: Dynamo's in this process, and AOTAutograd's on disk (pytorch/pytorch#185449, seen with 2.13). Without care a
graph traced for one backend then serves another: see `attend` and `forced`.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from escher_kernels.checks import CHUNK

DEFAULT = "sdpa"  # what torch chooses by itself
# In order of preference. cuDNN is one of them because PyTorch itself puts it first on Hopper and Blackwell (priority_order
# in aten/src/ATen/native/transformers/cuda/sdp_utils.cpp): a default that ran it must have a name to be recorded under.
BACKENDS = ("aiter", "flash_attn", "sdpa_flash", "sdpa_cudnn", "sdpa_efficient", "sdpa_math")
PACKAGES = ("aiter", "flash_attn")
FORCED = {
    "sdpa_flash": "FLASH_ATTENTION",
    "sdpa_cudnn": "CUDNN_ATTENTION",
    "sdpa_efficient": "EFFICIENT_ATTENTION",
    "sdpa_math": "MATH",
}
NOT_ON_CPU = {
    "aiter": "AITER runs on AMD GPUs only",
    "flash_attn": "flash_attn runs on GPUs only",
    "sdpa_cudnn": "cuDNN attention runs on NVIDIA GPUs only",
    "sdpa_efficient": "memory-efficient attention does not exist on a CPU",
}
OPERATORS = {  # part of an operator's name -> backend; the first that fits
    "aiter::": "aiter",
    "flash_attn::": "flash_attn",
    "_cudnn_attention": "sdpa_cudnn",
    "_flash_attention": "sdpa_flash",
    "_efficient_attention": "sdpa_efficient",
}
FUSED_OPERATOR = re.compile(r"aten::_scaled_dot_product_\w+_attention|\w+::\w*(flash_attn|mha)")
NOT_SEEN = "no attention operator seen"
AOTRITON = "TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL"
AOTRITON_SET_HERE = "ESCHER_SET_AOTRITON"  # child processes inherit both, and must not take ours for the user's
FREE_FRAC = 0.9


def _check_name(name: str) -> None:
    """Raises ValueError that lists the names."""
    if name != DEFAULT and name not in BACKENDS:
        raise ValueError(f"unknown attention backend {name!r}; known: {', '.join((DEFAULT, *BACKENDS))}")


def attend(torch: Any, name: str) -> Callable[[Any, Any, Any], Any]:
    """The call: q, k, v -> output, in the layout above. Compile it, and run it, inside `forced(torch, name)`.

    `aiter` and `flash_attn`: the package's `flash_attn_func`, which takes this layout, scales by 1/sqrt(D) and masks
    nothing by default. aiter's first call may compile a kernel for minutes. Importing them raises what it raises.
    """
    _check_name(name)
    if name in PACKAGES:
        function = importlib.import_module(name).flash_attn_func

        def package_call(q: Any, k: Any, v: Any) -> Any:
            out = function(q, k, v)
            return out[0] if isinstance(out, (tuple, list)) else out  # aiter of early 2025 returns a tuple of one

        opaque = _opaque(torch, name, package_call)

        def call_package(q: Any, k: Any, v: Any) -> Any:
            return opaque(q, k, v) if torch.compiler.is_compiling() else package_call(q, k, v)

        return call_package

    sdpa = torch.nn.functional.scaled_dot_product_attention

    def call(q: Any, k: Any, v: Any) -> Any:
        if not name:  # never so: reading it makes Dynamo guard on it, for backends share this code and not its graph
            raise ValueError("no backend")
        return sdpa(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2)

    return call


def _opaque(torch: Any, name: str, function: Callable[[Any, Any, Any], Any]) -> Callable[[Any, Any, Any], Any]:
    """The package's call as one operator that torch.compile does not look into: packages do things that cannot be
    traced, and a model is compiled as one graph or not at all. Contiguous: a package may hand out any strides, and the
    graph must know them (an output that is contiguous is not copied)."""

    def contiguous(q: Any, k: Any, v: Any) -> Any:
        return function(q, k, v).contiguous()

    operator = torch.library.custom_op(
        f"escher::attend_{name}", contiguous, mutates_args=(), schema="(Tensor q, Tensor k, Tensor v) -> Tensor"
    )
    operator.register_fake(lambda q, k, v: q.new_empty(q.shape))
    return operator


@contextlib.contextmanager
def forced(torch: Any, name: str) -> Iterator[None]:
    """While open, SDPA runs exactly this backend, or raises RuntimeError; packages and the default are left alone.

    Also keeps AOTAutograd's cache on disk out, for every name: its key holds neither the forced backend nor
    what the default chose from (the AOTriton switch, the driver), so a hit may be a graph of another backend.
    """
    _check_name(name)
    config = importlib.import_module("torch._functorch.config")
    attention, backend = torch.nn.attention, FORCED.get(name)
    only = attention.sdpa_kernel(getattr(attention.SDPBackend, backend)) if backend else contextlib.nullcontext()
    with config.patch(enable_autograd_cache=False), only:
        yield


def unavailable(torch: Any, kind: str, name: str, dtype: str = "bf16", head_size: int = 128) -> str | None:
    """Why this backend cannot run here, in one line, or None. `kind` is cpu or gpu, `dtype` bf16, fp16 or fp32.

    A package is imported, any error of which is a reason; an SDPA backend is tried on 16 tokens. On ROCm call
    `enable_experimental_aotriton` first.
    """
    _check_name(name)
    if kind == "cpu" and name in NOT_ON_CPU:
        return NOT_ON_CPU[name]
    rocm = bool(torch.version.hip)
    if (name == "sdpa_cudnn" and rocm) or (name == "aiter" and not rocm):
        return NOT_ON_CPU[name]
    if name in PACKAGES:
        try:
            attend(torch, name)
        except Exception as exc:  # a package built for another torch or driver fails in ways of its own
            return f"{name} cannot be imported: {_one_line(exc)}"
        return None
    element = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]
    with warnings.catch_warnings(record=True) as said, forced(torch, name):
        warnings.simplefilter("always")  # PyTorch warns why it refuses, then raises without the why
        try:
            x = torch.zeros(1, 16, 1, head_size, dtype=element, device="cuda" if kind == "gpu" else "cpu")
            attend(torch, name)(x, x, x).sum().item()  # a kernel's own error shows when its result is read
            return None
        except RuntimeError as exc:
            why = [str(w.message).split(" (Triggered")[0].strip() for w in said]
            why = [w for w in why if not re.search(r"because:$|runtime disabled", w)]
            return f"{name} does not run: {why[0] if why else _one_line(exc)}"


def _one_line(exc: BaseException) -> str:
    return f"{type(exc).__name__}: {(str(exc).splitlines() or [''])[0]}".rstrip(": ")


def scratch_bytes(name: str, batch: int, heads: int, sq: int, skv: int, head_size: int, element_bytes: int) -> int:
    """Peak bytes an eager call needs beyond inputs and output, as torch 2.13 allocates them.

    Math, from `_scaled_dot_product_attention_math` in aten/src/ATen/native/transformers/attention.cpp: 16-bit inputs are
    copied to fp32, q and k are scaled into copies, a batch over 1 copies once more before each bmm; the softmax
    holds scores, result and a mask of one byte. The others: at most the packed K and V of CPU flash in 16 bits, and
    a log-sum-exp. For the default ask `backend_of(what_ran(...))` of a small call first; it counts as fused here.
    """
    _check_name(name)
    pairs = batch * heads
    scores, q, kv = pairs * sq * skv, pairs * sq * head_size, pairs * skv * head_size
    if name != "sdpa_math":
        return 2 * kv * element_bytes + 4 * pairs * sq
    wide, upcast, again = max(4, element_bytes), element_bytes < 4, batch > 1
    held = wide * (upcast * (q + 2 * kv) + q)
    first_bmm = wide * ((1 + again) * kv + again * q + scores)
    softmax = (2 * wide + 1) * scores
    second_bmm = wide * (scores + again * kv) + upcast * (element_bytes * scores + wide * q)
    return held + max(first_bmm, softmax, second_bmm)


def too_big(
    name: str, batch: int, heads: int, sq: int, skv: int, head_size: int, element_bytes: int, free_bytes: int
) -> str | None:
    """Why a call does not fit, or None: scratch and output over 90 % of what is free with q, k and v in place."""
    need = scratch_bytes(name, batch, heads, sq, skv, head_size, element_bytes)
    need += batch * heads * sq * head_size * element_bytes
    if need <= FREE_FRAC * free_bytes:
        return None
    return f"{name} needs {need / 1e9:.3g} GB, {free_bytes / 1e9:.3g} GB are free"


def what_ran(torch: Any, call: Callable[[], Any]) -> str:
    """The operator that one call ran, e.g. "aten::_scaled_dot_product_flash_attention_for_cpu".

    "math (bmm, softmax, bmm)" where there is no fused one; compiled code may hold the softmax in a kernel of its
    own. From PyTorch's profiler, which sees compiled code too: a TorchDispatchMode makes a compiled function fail,
    and be given up for good. Call a compiled function once before; a replayed CUDA graph shows nothing. A Triton kernel
    that a package launches by itself is no operator either. The profiler may write a line or two to stderr.
    """
    with torch.autograd.profiler.profile() as profile:
        call()
    names = [event.name for event in profile.function_events]
    fused = next((name for name in names if FUSED_OPERATOR.match(name)), None)
    if fused:
        return fused
    parts = {"aten::bmm": "bmm", "aten::_softmax": "softmax"}
    math_parts = [parts[name] for name in names if name in parts]
    return f"math ({', '.join(math_parts)})" if math_parts else NOT_SEEN


def backend_of(op_text: str) -> str:
    """Our name for what `what_ran` saw, or "unknown"."""
    if op_text.startswith("math ("):
        return "sdpa_math"
    return next((backend for part, backend in OPERATORS.items() if part in op_text), "unknown")


def is_backend(name: str, op_text: str) -> bool:
    """Whether what ran is the backend asked for; a package's own kernel need not be an operator that can be seen."""
    return backend_of(op_text) == name or (name in PACKAGES and op_text == NOT_SEEN)


def enable_experimental_aotriton(torch: Any) -> str | None:
    """Let SDPA on ROCm use AOTriton's kernels on GPUs where they count as experimental; else it falls back to math.

    Returns "1 (set here)" or the user's own value, e.g. "0 (user)"; None off ROCm. To be called before the first SDPA
    call of the process: `check_flash_attention_hardware_support` (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp)
    reads the variable once, when it first meets such a GPU, and keeps it in a static.
    """
    if not torch.version.hip:
        return None
    if AOTRITON not in os.environ:
        os.environ |= {AOTRITON: "1", AOTRITON_SET_HERE: "1"}
    return f"{os.environ[AOTRITON]} ({'set here' if AOTRITON_SET_HERE in os.environ else 'user'})"


def attention_error(
    torch: Any, q: Any, k: Any, v: Any, out: Any, heads: int = 4, rows: int = 64, bound: float = 2**-7
) -> dict[str, Any]:
    """Judge an output against float64 attention of the same low-precision inputs, over the whole Skv.

    On up to `heads` (batch, head) pairs and `rows` query rows of each, the first and the last always among them:
    relative Frobenius error <= `bound`. Every element of the output must be finite, and its shape that of q.
    """
    batch, sq, n_heads, size = q.shape
    pairs, picked = _sample(torch, batch * n_heads, heads), _sample(torch, sq, rows)
    result = {
        "check": "attention", "rel_frobenius": None, "rel_frobenius_limit": bound, "rows_checked": len(picked),
        "heads_checked": len(pairs), "finite": None, "ok": False,
    }  # fmt: skip
    if out.shape != q.shape:
        return result | {"shape": list(out.shape), "shape_expected": list(q.shape)}
    tokens = max(1, CHUNK // (batch * n_heads * size))
    result["finite"] = all(bool(torch.isfinite(part).all()) for part in out.split(tokens, dim=1))
    step, difference2, norm2 = max(1, CHUNK // size), 0.0, 0.0
    for b, h in (divmod(pair, n_heads) for pair in pairs):
        left = q[b, picked, h].double() / math.sqrt(size)
        scores = [left @ k[b, i : i + step, h].double().T for i in range(0, k.shape[1], step)]
        weights = torch.cat(scores, dim=1).softmax(dim=1).split(step, dim=1)
        want = sum(w @ v[b, i * step : (i + 1) * step, h].double() for i, w in enumerate(weights))
        difference2 += float(((out[b, picked, h].double() - want) ** 2).sum())
        norm2 += float((want**2).sum())
    frobenius = math.sqrt(difference2 / norm2) if norm2 else math.inf
    if not math.isfinite(frobenius):
        return result | {"not_finite": ["rel_frobenius"]}
    return result | {"rel_frobenius": frobenius, "ok": result["finite"] and frobenius <= bound}


def _sample(torch: Any, n: int, count: int) -> list[int]:
    """Up to `count` of 0..n-1 in order, drawn at random; the first and the last always."""
    middle = torch.randperm(max(0, n - 2))[: max(0, count - 2)] + 1
    return sorted({0, n - 1, *middle.tolist()})
