"""Attention backends on the CPU: what is called, what ran, what it needs, and that a wrong result cannot pass.

Packages are fakes in sys.modules, a GPU is a torch whose devices are the CPU.
"""

import contextlib
import ctypes
import json
import math
import os
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from conftest import compiles
from hypothesis import given, settings
from hypothesis import strategies as st

from escher_kernels import attention
from escher_kernels.attention import (
    AOTRITON,
    AOTRITON_SET_HERE,
    BACKENDS,
    DEFAULT,
    attend,
    attention_error,
    backend_of,
    enable_experimental_aotriton,
    forced,
    scratch_bytes,
    too_big,
    unavailable,
    what_ran,
)

ON_CPU = (DEFAULT, "sdpa_flash", "sdpa_math")
FLASH_CPU = "aten::_scaled_dot_product_flash_attention_for_cpu"


def operands(batch=1, heads=4, sq=48, skv=96, size=32, dtype=torch.bfloat16, seed=0):
    made = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(batch, n, heads, size, generator=made).to(dtype) for n in (sq, skv, skv))


def reference(q, k, v, scale=None):
    """Plain attention in float64, (B, S, H, D), rounded to the dtype of q."""
    qt, kt, vt = (x.transpose(1, 2).double() for x in (q, k, v))
    weights = (qt @ kt.mT * (scale or 1 / math.sqrt(q.shape[-1]))).softmax(-1)
    return (weights @ vt).transpose(1, 2).to(q.dtype)


class FakeTorch:
    """torch as on a machine with `hip` or without; its device cuda is the CPU."""

    def __init__(self, hip=None):
        self.version = SimpleNamespace(hip=hip)

    def __getattr__(self, name):
        return getattr(torch, name)

    def zeros(self, *shape, dtype, device):
        self.device = device
        return torch.zeros(*shape, dtype=dtype)


def install(monkeypatch, name, function):
    module = ModuleType(name)
    module.flash_attn_func = function
    monkeypatch.setitem(sys.modules, name, module)


# ---- the call ----


@pytest.mark.parametrize("name", ON_CPU)
@pytest.mark.parametrize("batch", [1, 2])
def test_the_call_is_attention(name, batch):
    q, k, v = operands(batch)
    with forced(torch, name):
        out = attend(torch, name)(q, k, v)
    assert out.shape == q.shape and attention_error(torch, q, k, v, out)["ok"]


@pytest.mark.parametrize("name", ["aiter", "flash_attn"])
@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: (x,), lambda x: (x, "lse")])
def test_a_package_is_called_in_its_own_layout_without_mask_or_scale(monkeypatch, name, wrap):
    seen = []
    install(monkeypatch, name, lambda *args, **more: wrap(seen.append((args, more)) or reference(*args)))
    q, k, v = operands()
    with forced(torch, name):
        out = attend(torch, name)(q, k, v)
    (args, more), *rest = seen
    assert not rest and not more and all(a is b for a, b in zip(args, (q, k, v), strict=True))
    assert attention_error(torch, q, k, v, out)["ok"]


@pytest.mark.parametrize(
    "call", [attend, forced, lambda t, n: unavailable(t, "cpu", n), lambda t, n: too_big(n, *[1] * 7)]
)
def test_an_unknown_name_lists_the_right_ones(call):
    with (
        pytest.raises(ValueError, match=f"'flash'; known: sdpa, {', '.join(BACKENDS)}"),
        contextlib.ExitStack() as stack,
    ):
        made = call(torch, "flash")
        if hasattr(made, "__enter__"):
            stack.enter_context(made)


def test_forcing_ends_with_the_context_and_never_falls_back():
    q, k, v = operands()
    before = torch.nn.attention._cur_sdpa_kernel_backends()
    for name in BACKENDS:
        with forced(torch, name):
            inside = torch.nn.attention._cur_sdpa_kernel_backends()
            assert inside == (
                [getattr(torch.nn.attention.SDPBackend, attention.FORCED[name])] if "sdpa" in name else before
            )
            if name == "sdpa_efficient":
                with pytest.raises(RuntimeError):
                    attend(torch, name)(q, k, v)
    with pytest.raises(KeyError), forced(torch, "sdpa_math"):
        raise KeyError
    assert torch.nn.attention._cur_sdpa_kernel_backends() == before


# ---- what ran ----


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("name", "text", "backend"),
    [
        (DEFAULT, FLASH_CPU, "sdpa_flash"),
        ("sdpa_flash", FLASH_CPU, "sdpa_flash"),
        ("sdpa_math", "math (bmm, softmax, bmm)", "sdpa_math"),
    ],
)
def test_what_ran_is_named_by_its_operator(name, text, backend, dtype):
    q, k, v = operands(dtype=dtype)
    with forced(torch, name):
        ran = what_ran(torch, lambda: attend(torch, name)(q, k, v))
    assert (ran, backend_of(ran)) == (text, backend)


def test_a_silent_fall_back_shows():
    q, k, v = operands()
    with forced(torch, "sdpa_math"):  # asked for flash, something else forces math
        assert backend_of(what_ran(torch, lambda: attend(torch, "sdpa_flash")(q, k, v))) == "sdpa_math"


def test_what_ran_sees_the_operator_of_a_package_and_says_when_it_sees_none():
    library = torch.library.Library("escher_test_flash_attn", "DEF")
    library.define("_flash_attn_forward(Tensor q, Tensor k, Tensor v) -> Tensor")
    library.impl("_flash_attn_forward", lambda q, k, v: torch.bmm(q, k.mT) @ v, "CPU")
    q, k, v = (x[0].transpose(0, 1) for x in operands())
    text = what_ran(torch, lambda: torch.ops.escher_test_flash_attn._flash_attn_forward(q, k, v))
    assert text == "escher_test_flash_attn::_flash_attn_forward" and backend_of(text) == "flash_attn"
    assert what_ran(torch, lambda: q + q) == attention.NOT_SEEN and backend_of(attention.NOT_SEEN) == "unknown"


@pytest.mark.parametrize(
    ("text", "backend"),
    [
        ("aten::_scaled_dot_product_flash_attention", "sdpa_flash"),
        ("aten::_scaled_dot_product_efficient_attention", "sdpa_efficient"),
        ("aten::_scaled_dot_product_cudnn_attention", "sdpa_cudnn"),
        ("flash_attn::_flash_attn_forward", "flash_attn"),
        ("aiter::fmha_v3_fwd", "aiter"),
        ("aiter::mha_fwd", "aiter"),
        ("aten::_scaled_dot_product_fused_attention_overrideable", "unknown"),
    ],
)
def test_operators_of_a_gpu_have_names(text, backend):
    assert attention.FUSED_OPERATOR.match(text) and backend_of(text) == backend


def test_the_front_door_is_no_backend():
    for text in ("aten::scaled_dot_product_attention", "aten::_scaled_dot_product_attention_math", "aten::bmm"):
        assert not attention.FUSED_OPERATOR.match(text)


def test_a_package_may_run_unseen_but_not_as_another_backend():
    assert attention.is_backend("sdpa_flash", FLASH_CPU) and attention.is_backend("aiter", attention.NOT_SEEN)
    assert not attention.is_backend("sdpa_flash", "math (bmm, softmax, bmm)")
    assert not attention.is_backend("sdpa_flash", attention.NOT_SEEN)
    assert not attention.is_backend("aiter", "flash_attn::_flash_attn_forward")


# ---- compiled ----


@pytest.fixture
def fresh_compiler(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@compiles
@pytest.mark.slow
@pytest.mark.parametrize("name", [DEFAULT, "sdpa_flash"])
def test_compiled_is_eager(fresh_compiler, name):
    q, k, v = operands()
    call = attend(torch, name)
    with forced(torch, name):
        compiled = torch.compile(call, fullgraph=True)
        assert torch.equal(compiled(q, k, v), call(q, k, v))
        assert what_ran(torch, lambda: compiled(q, k, v)) == FLASH_CPU
        assert torch.equal(compiled(q, k, v), call(q, k, v))  # what_ran did not spoil it


class Twice(torch.nn.Module):
    def __init__(self, call):
        super().__init__()
        self.call = call

    def forward(self, q, k, v):
        return self.call(q, k, v) * 2


@compiles
@pytest.mark.slow
@pytest.mark.parametrize("wrap", [lambda call: call, Twice])
def test_a_graph_of_one_backend_never_serves_another(fresh_compiler, wrap):
    """Neither from Dynamo's cache in this process, nor from the one on disk that the second pass could read."""
    q, k, v = operands()
    for _ in range(2):
        for name in ("sdpa_flash", "sdpa_math", DEFAULT):
            with forced(torch, name):
                compiled = torch.compile(wrap(attend(torch, name)), fullgraph=True)
                compiled(q, k, v)
                ran = backend_of(what_ran(torch, lambda call=compiled: call(q, k, v)))
            assert ran == {DEFAULT: "sdpa_flash"}.get(name, name)
        torch._dynamo.reset()


@compiles
@pytest.mark.slow
@pytest.mark.parametrize("name", attention.PACKAGES)
def test_a_package_that_cannot_be_traced_is_part_of_one_graph(fresh_compiler, monkeypatch, name):
    seen = []

    def untraceable(q, k, v):
        torch._dynamo.graph_break()
        seen.append((q, k, v))
        return (reference(q, k, v),)

    install(monkeypatch, name, untraceable)
    q, k, v = operands()
    with forced(torch, name), pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(lambda *a: untraceable(*a)[0] * 2, fullgraph=True, backend="eager")(q, k, v)
    call = attend(torch, name)
    attend(torch, name)  # as an operation and a model ask for it, one after the other
    twice = Twice(call)
    with forced(torch, name), torch.no_grad():
        compiled = torch.compile(twice, fullgraph=True, dynamic=False)
        torch._dynamo.utils.counters.clear()
        for seed in range(2):
            q, k, v = operands(seed=seed)
            seen.clear()
            assert torch.equal(compiled(q, k, v), reference(q, k, v) * 2) and len(seen) == 1
        counters = torch._dynamo.utils.counters
        assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
        seen.clear()
        assert torch.equal(call(q, k, v), reference(q, k, v))  # eager: the package itself, with what it was handed
    assert len(seen) == 1 and all(a is b for a, b in zip(seen[0], (q, k, v), strict=True))


@compiles
@pytest.mark.slow
def test_opening_the_context_again_compiles_nothing_anew(fresh_compiler):
    q, k, v = operands()
    compiled = torch.compile(attend(torch, "sdpa_flash"), fullgraph=True)
    with forced(torch, "sdpa_flash"):
        compiled(q, k, v)
    with forced(torch, "sdpa_flash"), torch.compiler.set_stance("fail_on_recompile"):
        compiled(q, k, v)


# ---- what cannot run ----


def test_on_a_cpu():
    reasons = {name: unavailable(torch, "cpu", name) for name in (DEFAULT, *BACKENDS)}
    assert {name for name, why in reasons.items() if why is None} == set(ON_CPU)
    assert reasons["sdpa_efficient"] == "memory-efficient attention does not exist on a CPU"
    assert "NVIDIA" in reasons["sdpa_cudnn"] and "AMD" in reasons["aiter"] and "GPUs" in reasons["flash_attn"]


@pytest.mark.parametrize(("hip", "name", "word"), [(None, "aiter", "AMD"), ("7.0", "sdpa_cudnn", "NVIDIA")])
def test_a_backend_of_the_other_vendor(hip, name, word):
    assert word in unavailable(FakeTorch(hip), "gpu", name)


@pytest.mark.parametrize("name", ["aiter", "flash_attn"])
@pytest.mark.parametrize(
    ("source", "word"),
    [
        (None, "ModuleNotFoundError"),
        ("raise ImportError('undefined symbol: _ZN3c10\\nline two')", "ImportError: undefined symbol: _ZN3c10"),
        ("raise AttributeError('no attribute libfoo')", "AttributeError: no attribute libfoo"),
        ("raise OSError('libamdhip64.so: cannot open')", "OSError: libamdhip64.so: cannot open"),
        ("raise AssertionError", "AssertionError"),
        ("x = 1", "AttributeError: module"),
        ("def flash_attn_func(q, k, v): ...", None),
    ],
)
def test_whatever_an_import_raises_is_a_reason(monkeypatch, tmp_path, name, source, word):
    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    if source:
        (tmp_path / f"{name}.py").write_text(source + "\n", encoding="utf-8")
    why = unavailable(FakeTorch("7.0"), "gpu", name)
    sys.modules.pop(name, None)
    assert why is None if word is None else f"{name} cannot be imported: {word}" in why and "\n" not in why


def test_an_sdpa_backend_is_tried_on_the_device():
    fake = FakeTorch("7.0")
    assert unavailable(fake, "gpu", "sdpa_math", "fp16") is None and fake.device == "cuda"
    why = unavailable(fake, "gpu", "sdpa_efficient")  # the fake device is a CPU, which refuses
    assert why.startswith("sdpa_efficient does not run: RuntimeError: No viable backend") and "\n" not in why


def test_the_reason_is_what_pytorch_warned_of(monkeypatch):
    def refuse(torch, name):
        import warnings

        def call(*_):
            warnings.warn("Memory efficient kernel not used because: (Triggered internally at x.cpp:1.)", stacklevel=1)
            warnings.warn(
                "Mem Efficient attention has been runtime disabled. (Triggered internally at x)", stacklevel=1
            )
            warnings.warn(
                "Flash attention only supports sm80 to sm121, not sm 70. (Triggered internally)", stacklevel=1
            )
            raise RuntimeError("No available kernel. Aborting execution.")

        return call

    monkeypatch.setattr(attention, "attend", refuse)
    why = unavailable(torch, "cpu", "sdpa_flash")
    assert why == "sdpa_flash does not run: Flash attention only supports sm80 to sm121, not sm 70."


@pytest.fixture
def variables(monkeypatch):
    for name in (AOTRITON, AOTRITON_SET_HERE):
        monkeypatch.setenv(name, "x")  # so that it is restored
        monkeypatch.delenv(name)
    return monkeypatch


def test_the_aotriton_switch_is_set_on_rocm_only(variables):
    assert enable_experimental_aotriton(torch) is None and AOTRITON not in os.environ
    assert [enable_experimental_aotriton(FakeTorch("7.0")) for _ in range(2)] == ["1 (set here)"] * 2
    assert os.environ[AOTRITON] == "1"


@pytest.mark.parametrize("value", ["0", "1"])
def test_the_users_own_aotriton_switch_stays(variables, value):
    variables.setenv(AOTRITON, value)
    assert enable_experimental_aotriton(FakeTorch("7.0")) == f"{value} (user)" and os.environ[AOTRITON] == value


# ---- memory ----


def resident(key):
    with open("/proc/self/status", encoding="utf-8") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def peak_scratch(name, q, k, v):
    """Peak resident bytes of one call beyond its inputs and output; skips where the kernel does not let one reset it."""
    call = attend(torch, name)
    with forced(torch, name), torch.no_grad():
        call(q, k, v)  # what a first call leaves behind is no scratch
        if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
            trim(0)  # what the allocator kept of other tests would serve the call and not show
        try:
            with open("/proc/self/clear_refs", "w", encoding="ascii") as peak:
                peak.write("5")
        except OSError as exc:
            pytest.skip(f"peak memory cannot be reset: {exc}")
        before = resident("VmRSS")
        out = call(q, k, v)
        return resident("VmHWM") - before - out.numel() * out.element_size()


@pytest.mark.parametrize(
    ("batch", "heads", "sq", "skv", "size", "dtype"),
    [
        (1, 8, 1024, 2048, 128, torch.bfloat16),
        (2, 4, 1024, 2048, 128, torch.float32),
        (2, 8, 64, 8192, 128, torch.bfloat16),  # the copies of k and v outweigh the scores
        (2, 8, 8192, 64, 128, torch.float16),
    ],
)
def test_math_needs_what_is_predicted(batch, heads, sq, skv, size, dtype):
    q, k, v = operands(batch, heads, sq, skv, size, dtype)
    predicted = scratch_bytes("sdpa_math", batch, heads, sq, skv, size, q.element_size())
    assert 0.75 * predicted < peak_scratch("sdpa_math", q, k, v) < 1.15 * predicted


def test_flash_needs_next_to_nothing():
    q, k, v = operands(1, 8, 2048, 4096, 64)
    predicted = scratch_bytes("sdpa_flash", 1, 8, 2048, 4096, 64, 2)
    assert peak_scratch("sdpa_flash", q, k, v) < predicted + 2**23  # and a buffer of below 1 MB a thread
    assert predicted < scratch_bytes("sdpa_math", 1, 8, 2048, 4096, 64, 2) / 50


def test_math_at_32k_tokens_is_predicted_too_big():
    shape = (1, 40, 32760, 32760, 128, 2)  # scores: 40 x 32760^2 x (4 + 4 + 1) bytes
    assert scratch_bytes("sdpa_math", *shape) == pytest.approx(9 * 40 * 32760**2, rel=0.02)
    assert too_big("sdpa_math", *shape, free_bytes=288 * 10**9) == "sdpa_math needs 389 GB, 288 GB are free"
    assert too_big("sdpa_flash", *shape, free_bytes=10**10) is None


def test_the_limit_is_90_percent_of_what_is_free():
    shape = (1, 2, 300, 400, 64, 2)
    need = scratch_bytes("sdpa_math", *shape) + 2 * 300 * 64 * 2
    assert too_big("sdpa_math", *shape, free_bytes=math.ceil(need / 0.9) + 1) is None
    assert "sdpa_math needs" in too_big("sdpa_math", *shape, free_bytes=math.floor(need / 0.9) - 1)


# ---- right or wrong ----


def swapped_layout(q, k, v):
    """The package wanted (B, H, S, D) and got (B, S, H, D): it attends over heads."""
    return reference(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)


WRONG = {
    "heads and tokens swapped": swapped_layout,
    "output transposed, shape kept": lambda q, k, v: reference(q, k, v).transpose(1, 2).reshape(q.shape),
    "no scale": lambda q, k, v: reference(q, k, v, scale=1.0),
    "last tenth of KV dropped": lambda q, k, v: reference(q, k[:, : -(k.shape[1] // 10)], v[:, : -(k.shape[1] // 10)]),
    "q and k swapped": lambda q, k, v: reference(k, q, v),
    "one NaN": lambda q, k, v: poke(reference(q, k, v), math.nan),
    "one infinity": lambda q, k, v: poke(reference(q, k, v), math.inf),
    "all NaN": lambda q, k, v: torch.full_like(q, math.nan),
    "last row never written": lambda q, k, v: poke(reference(q, k, v), 0.0, slice(None)),
    "causal": lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True
    ).transpose(1, 2),
    "heads in another order": lambda q, k, v: reference(q, k, v).roll(1, dims=2),
    "zeros": lambda q, k, v: torch.zeros_like(q),
}  # fmt: skip


def poke(out, value, where=0):
    out[-1, -1, -1, where] = value
    return out


shapes = st.fixed_dictionaries(
    {
        "batch": st.integers(1, 2),
        "heads": st.integers(2, 9).filter(lambda h: h != 8),
        "sq": st.integers(20, 150),
        "skv": st.integers(20, 400),
        "size": st.sampled_from([16, 40, 64, 128]),
        "dtype": st.sampled_from([torch.bfloat16, torch.float16]),
        "seed": st.integers(0, 2**31),
    }
)


@settings(max_examples=25, deadline=None)
@given(shapes, st.sampled_from(ON_CPU))
def test_right_results_pass(shape, name):
    q, k, v = operands(**shape)
    with forced(torch, name):
        error = attention_error(torch, q, k, v, attend(torch, name)(q, k, v))
    assert error["ok"] and 0 < error["rel_frobenius"] <= error["rel_frobenius_limit"] == 2**-7 and error["finite"]
    assert error["rows_checked"] == min(64, shape["sq"])
    assert error["heads_checked"] == min(4, shape["batch"] * shape["heads"])


@settings(max_examples=60, deadline=None)
@given(shapes, st.sampled_from(sorted(WRONG)))
def test_wrong_results_fail(shape, how):
    q, k, v = operands(**shape | {"skv": shape["sq"]})
    error = attention_error(torch, q, k, v, WRONG[how](q, k, v))
    assert error["ok"] is False
    json.dumps(error, allow_nan=False)


@pytest.mark.parametrize("how", sorted(WRONG))
def test_each_mistake_fails(how):
    q, k, v = operands(heads=5, sq=64, skv=64, size=128)
    assert attention_error(torch, q, k, v, reference(q, k, v))["ok"]
    assert not attention_error(torch, q, k, v, WRONG[how](q, k, v))["ok"]


def test_a_last_block_of_64_dropped_from_a_window_of_18720_fails():
    q, k, v = operands(heads=1, sq=70, skv=18720, size=128)
    assert attention_error(torch, q, k, v, reference(q, k, v))["ok"]
    assert not attention_error(torch, q, k, v, reference(q, k[:, :-64], v[:, :-64]))["ok"]


def test_nan_where_no_sample_looks_fails():
    q, k, v = operands(heads=5, sq=200)
    out = reference(q, k, v)
    out[0, :, 1:4] = out[0, :, 1:4].masked_fill(torch.arange(200)[:, None, None] == 100, math.nan)
    error = attention_error(torch, q, k, v, out, heads=2, rows=2)
    assert error["finite"] is False and error["ok"] is False and error["rel_frobenius"] < 2**-7


def test_a_figure_that_is_no_number_is_none_and_named():
    q, k, v = operands()
    error = attention_error(torch, q, k, v, torch.full_like(q, math.nan))
    assert error == {
        "check": "attention", "rel_frobenius": None, "rel_frobenius_limit": 2**-7, "rows_checked": 48,
        "heads_checked": 4, "finite": False, "ok": False, "not_finite": ["rel_frobenius"],
    }  # fmt: skip


def test_a_wrong_shape_fails_and_says_so():
    q, k, v = operands()
    error = attention_error(torch, q, k, v, reference(q, k, v).transpose(1, 2))
    assert (error["ok"], error["shape"], error["shape_expected"]) == (False, [1, 4, 48, 32], [1, 48, 4, 32])


def test_the_check_is_the_same_in_chunks(monkeypatch):
    q, k, v = operands(batch=2, heads=2, sq=5, skv=333, size=64)
    whole = attention_error(torch, q, k, v, reference(q, k, v))
    monkeypatch.setattr(attention, "CHUNK", 64 * 50)
    pieces = attention_error(torch, q, k, v, reference(q, k, v))
    assert pieces.pop("rel_frobenius") == pytest.approx(whole.pop("rel_frobenius")) and pieces == whole


@given(st.integers(1, 300), st.integers(1, 80))
def test_a_sample_holds_the_first_and_the_last(n, count):
    picked = attention._sample(torch, n, count)
    assert picked == sorted(set(picked)) and picked[0] == 0 and picked[-1] == n - 1
    assert len(picked) == min(n, max(count, min(2, n)))
