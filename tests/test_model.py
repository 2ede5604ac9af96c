"""The model: it does the work that the op table declares, each branch is right, and one that skips a step fails.

Sizes are tiny; what the counts hold for the real geometry is held on the device "meta", which has no memory.
"""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from conftest import ESCHER, TINY, TINY_SPECS, compiles
from hypothesis import given, settings
from hypothesis import strategies as st

from escher_kernels import attention, model, workload
from escher_kernels.model import Model, branch_errors, counted_flop, functions, relative_error
from escher_kernels.workload import block_flop, cache_bytes, pass_flop, weight_bytes

pytestmark = pytest.mark.usefixtures("one_thread")

SPECS = {**TINY_SPECS, "one slot, one frame": replace(TINY, window_tokens=12, time_tokens=1)}
F = torch.nn.functional


def build(spec=TINY, seed=0, dtype=torch.bfloat16, backend=attention.DEFAULT):
    torch.manual_seed(seed)
    return Model(torch, spec, dtype, "cpu", backend)


def judged(net, chunk=0, block=0):
    return branch_errors(torch, net.blocks[block], net.x, net.arguments(chunk))


def state(net):
    """Copies of keys and values of every block."""
    return [(b.keys.clone(), b.values.clone()) for b in net.blocks]


# ---- work ----

COUNTED = [ESCHER, workload.load("wan2_2_t2v_a14b"), TINY, SPECS["no cache"], SPECS["batch 2"]]


@pytest.mark.parametrize("spec", COUNTED, ids=lambda s: f"{s.name}-{s.batch}-{s.cache}")
def test_the_counter_sees_exactly_the_flop_of_the_op_table(spec):
    per_pass = sum(op.flop for op in workload.ops(spec) if op.per_pass)
    wanted = {"block": block_flop(spec), "time": per_pass, "pass": pass_flop(spec)}
    assert counted_flop(torch, spec) == wanted


def test_a_pass_of_the_workload_has_185_621_gflop():
    assert counted_flop(torch, ESCHER)["pass"] / 1e9 == pytest.approx(185_621, rel=0.01)
    assert ESCHER.depth == 40


LINEARS = ["q", "k", "v", "o", "cross_q", "cross_o", "linear1", "linear2"]  # in the order in which a block calls them


@pytest.mark.parametrize("number", range(8), ids=LINEARS)
def test_a_linear_that_is_left_out_shows_in_the_counter(monkeypatch, number):
    f, calls = functions(torch), []

    def skipping(x, weight):
        if x.shape[1] == ESCHER.query_tokens:
            calls.append(weight)
            if len(calls) - 1 == number:
                return x if weight.shape[0] == weight.shape[1] else x.new_empty(*x.shape[:-1], weight.shape[0])
        return F.linear(x, weight)

    monkeypatch.setattr(f, "linear", skipping)
    found = counted_flop(torch, ESCHER)
    assert len(calls) == 8 and abs(found["pass"] / pass_flop(ESCHER) - 1) > 0.01


@pytest.mark.parametrize(
    "part", ["feed_forward", "cross_attention", "self_attention"], ids=lambda part: part.replace("_", " ")
)
def test_a_branch_that_is_left_out_shows_in_the_counter(monkeypatch, part):
    monkeypatch.setattr(model.block_class(torch), part, lambda self, x, *_: x)
    assert abs(counted_flop(torch, ESCHER)["pass"] / pass_flop(ESCHER) - 1) > 0.01


def test_attention_to_the_call_alone_shows_in_the_counter(monkeypatch):
    real = attention.attend

    def short(t, name):
        return lambda q, k, v: real(t, name)(q, k[:, : q.shape[1]], v[:, : q.shape[1]])

    monkeypatch.setattr(attention, "attend", short)
    assert abs(counted_flop(torch, ESCHER)["pass"] / pass_flop(ESCHER) - 1) > 0.01


def test_a_pass_runs_every_block_once_in_order_and_the_time_embedding_once(monkeypatch):
    net, f = build(replace(TINY, depth=3)), functions(torch)
    seen, embedded, real = [], [], f.time_embed
    hooks = [b.register_forward_pre_hook(lambda b, _: seen.append(b)) for b in net.blocks]
    monkeypatch.setattr(f, "time_embed", lambda *a: embedded.append(1) or real(*a))
    out = net.run(1)
    assert seen == net.blocks and embedded == [1]
    for hook in hooks:
        hook.remove()
    x, around = net.x, net.arguments(1)
    for block in net.blocks:
        x = block(x, *around)
    assert torch.equal(x, out) and out.shape == (1, 12, 64) and not torch.equal(out, net.x)


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_what_is_timed_is_bit_for_bit_what_is_judged(name, dtype):
    """`forward` adds each branch at once, `branches` hands them out: one sum, and one cache."""
    net = build(SPECS[name], dtype=dtype)
    with model.inference(torch, net.backend):
        block, rings = net.blocks[0], ("keys", "values") if SPECS[name].cache else ()
        for chunk in (0, 1):
            around, sums, written = net.arguments(chunk), [], []
            for run in (block, lambda *a: block.branches(*a)[-1]):
                net.poison(chunk)
                sums.append(run(net.x, *around))
                written.append([getattr(block, ring).clone() for ring in rings])
            assert torch.equal(*sums) and not torch.equal(sums[0], net.x)
            assert all(torch.equal(a, b) and bool(a.isfinite().all()) for a, b in zip(*written, strict=True))


# ---- why compiling failed ----

GCC = """CppCompileError: C++ compile error

Command:
g++ /tmp/x.cpp -o /tmp/x.so

Output:
In file included from /tmp/x.cpp:2:
/tmp/x.h:14:10: fatal error: omp.h: No such file or directory
compilation terminated.
"""


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (RuntimeError(GCC), "RuntimeError: /tmp/x.h:14:10: fatal error: omp.h: No such file or directory"),
        (RuntimeError("c++: error: b/x.cpp: No such file"), "RuntimeError: c++: error: b/x.cpp: No such file"),
        (RuntimeError("\n\n  backend failed\nlong"), "RuntimeError: backend failed"),
        (ValueError("SyntaxError: no"), "ValueError: SyntaxError: no"),
        (ValueError(), "ValueError: no message"),
        (ValueError("x" * 1000), "ValueError: " + "x" * 288),
        (ValueError("error: " + "x" * 1000), "ValueError: error: " + "x" * 281),
    ],
)
def test_a_compilers_error_in_one_line(monkeypatch, error, line):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/tmp/cache")
    fake = SimpleNamespace(__file__="/venv/torch/__init__.py")
    assert model.compile_failure(fake, error) == line
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    assert model.compile_failure(SimpleNamespace(__file__=None), error) == line


def test_the_first_line_that_says_something():
    assert model.first_line(RuntimeError("\n\n  backend failed\nlong")) == "RuntimeError: backend failed"
    assert model.first_line(ValueError()) == "ValueError: no message"
    assert len(model.first_line(ValueError("x" * 1000))) == 300


@pytest.mark.parametrize(("cache", "folder", "named"), [
    ("/a b/ü", "/venv/torch", "/a b/ü"), ("", "/my venv/torch", "/my venv/torch"), ("/a\tb", "/my venv/torch", "/a\tb"),
])  # fmt: skip
def test_a_path_with_a_space_is_named(monkeypatch, cache, folder, named):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", cache)
    why = model.compile_failure(SimpleNamespace(__file__=f"{folder}/__init__.py"), RuntimeError(GCC))
    assert why.startswith("RuntimeError: /tmp/x.h:14:10: fatal error: omp.h") and "\n" not in why
    assert why.endswith(f"; torch's compiler does not quote paths, and {named!r} holds a space: use one without")


# ---- a right model ----


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("backend", ["sdpa", "sdpa_math"])
def test_a_right_model_passes(name, dtype, backend):
    net = build(SPECS[name], dtype=dtype, backend=backend)
    with model.inference(torch, backend):
        for chunk in (0, 1, 5):
            for block in (0, 1):
                found = judged(net, chunk, block)
                assert found["ok"], found
                assert found["rows_checked"] == 12 and found["rel_frobenius_limit"] == 2**-6
                assert ("cache_rel" in found) == SPECS[name].cache
            assert bool(net.run(chunk).isfinite().all())


@settings(max_examples=30, deadline=None)
@given(
    heads=st.integers(1, 3), size=st.sampled_from([16, 32, 40]), frames=st.integers(1, 4), each=st.integers(1, 12),
    slots=st.integers(1, 4), cache=st.booleans(), batch=st.integers(1, 3), text=st.integers(1, 20),
    frequency=st.integers(1, 8), ffn=st.sampled_from([48, 100]), chunk=st.integers(0, 30), seed=st.integers(0, 2**31),
)  # fmt: skip
def test_a_right_model_passes_at_every_size(
    heads, size, frames, each, slots, cache, batch, text, frequency, ffn, chunk, seed
):
    tokens = frames * each
    spec = replace(
        TINY, hidden=heads * size, heads=heads, head_size=size, ffn=ffn, depth=1, time_frequency=2 * frequency,
        time_tokens=frames, query_tokens=tokens, window_tokens=tokens * (slots if cache else 1), text_tokens=text,
        batch=batch, cache=cache,
    )  # fmt: skip
    net = build(spec, seed)
    found = judged(net, chunk)
    assert found["ok"], found
    assert net.cache_bytes() == cache_bytes(spec)


def test_more_tokens_than_are_checked():
    found = judged(build(replace(TINY, query_tokens=120, window_tokens=240)), 3)
    assert found["ok"] and found["rows_checked"] in range(model.CHECK_ROWS - 2, model.CHECK_ROWS + 1)


# ---- a wrong model ----


def patched(**wrong):
    """Replaces functions of the model; each gets the right one first."""

    def apply(monkeypatch, net):
        f = functions(torch)
        for name, made in wrong.items():
            real = getattr(f, name)
            monkeypatch.setattr(f, name, lambda *a, made=made, real=real: made(real, *a))

    return apply


def weights(**wrong):
    """Replaces what a linear of the first block does with that weight: (block, x, weight) -> output."""

    def apply(monkeypatch, net):
        block = net.blocks[0]
        of = {id(getattr(block, name)): made for name, made in wrong.items()}

        def linear(x, weight):
            made = of.get(id(weight))
            return made(block, x, weight) if made else F.linear(x, weight)

        monkeypatch.setattr(functions(torch), "linear", linear)

    return apply


def attending(wrong):
    """Replaces the attention of the first block: (right one, q, k, v) -> output."""

    def apply(monkeypatch, net):
        real = net.blocks[0].attend
        net.blocks[0].attend = lambda q, k, v: wrong(real, q, k, v)

    return apply


def sdpa(q, k, v, scale=None):
    return F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), scale=scale).transpose(1, 2)


def to_the_cache(monkeypatch, net):
    """Cross-attention that reads the keys and values of self-attention."""
    f = functions(torch)

    def cross_attention(self, x):
        h = f.norm_affine(x, self.norm_weight, self.norm_bias)
        q = f.qk_norm(f.linear(h, self.cross_q), self.norm_cross_q).unflatten(-1, self.heads)
        return f.linear(self.attend(q, self.keys, self.values).flatten(-2), self.cross_o)

    monkeypatch.setattr(model.block_class(torch), "cross_attention", cross_attention)


def without(part):
    def apply(monkeypatch, net):
        monkeypatch.setattr(model.block_class(torch), part, lambda self, x, *_: x)

    return apply


def modulations(order):
    def apply(monkeypatch, net):
        real = model.block_class(torch).modulations
        monkeypatch.setattr(
            model.block_class(torch), "modulations", lambda self, e: tuple(real(self, e)[i] for i in order)
        )

    return apply


def last_branch_lost(monkeypatch, net):
    real = model.block_class(torch).branches

    def branches(self, *a):
        one, two, three, _ = real(self, *a)
        return one, two, three, a[0] + one + two

    monkeypatch.setattr(model.block_class(torch), "branches", branches)


def rope_of_q_alone(monkeypatch, net):
    real, calls = functions(torch).rope, []
    monkeypatch.setattr(
        functions(torch), "rope", lambda x, c, s: calls.append(1) or (real(x, c, s) if len(calls) % 2 else x)
    )


def halves(x, cosine, sine):
    a, b = x.unflatten(-1, (2, -1)).unbind(-2)
    return torch.cat((a * cosine - b * sine, a * sine + b * cosine), -1).to(x.dtype)


WRONG = {
    "modulate left out": patched(modulate=lambda real, x, shift, scale: x),
    "shift and scale swapped": patched(modulate=lambda real, x, shift, scale: real(x, scale, shift)),
    "scale without the one": patched(modulate=lambda real, x, shift, scale: real(x, shift, scale - 1)),
    "the first frame's modulation for all": patched(
        modulate=lambda real, x, shift, scale: real(x, shift[:, :1], scale[:, :1])
    ),
    "norm left out": patched(norm=lambda real, x: x),
    "norm of the channels' halves": patched(norm=lambda real, x: real(x.unflatten(-1, (2, -1))).flatten(-2)),
    "norm of cross-attention left out": patched(norm_affine=lambda real, x, w, b: x),
    "norm's weight left out": patched(norm_affine=lambda real, x, w, b: F.layer_norm(x, x.shape[-1:]) + b),
    "norm's bias left out": patched(norm_affine=lambda real, x, w, b: real(x, w, torch.zeros_like(b))),
    "norm of q and k left out": patched(qk_norm=lambda real, x, w: x),
    "norm of q and k without its weight": patched(qk_norm=lambda real, x, w: real(x, torch.ones_like(w))),
    "norm of q and k a head, not a token": patched(
        qk_norm=lambda real, x, w: (F.rms_norm(x.unflatten(-1, (2, 32)), (32,)).flatten(-2) * w)
    ),
    "rope left out": patched(rope=lambda real, x, c, s: x),
    "rope of keys left out": rope_of_q_alone,
    "rope the other way": patched(rope=lambda real, x, c, s: real(x, c, -s)),
    "rope of halves, not of neighbours": patched(rope=lambda real, x, c, s: halves(x, c, s)),
    "rope one token late": patched(rope=lambda real, x, c, s: real(x, c.roll(1, 0), s.roll(1, 0))),
    "GELU left out": patched(gelu=lambda real, x: x),
    "ReLU for GELU": patched(gelu=lambda real, x: torch.relu(x)),
    "gate left out": patched(residual_gate=lambda real, x, y, g: x + y),
    "gate of the first frame for all": patched(residual_gate=lambda real, x, y, g: real(x, y, g[:, :1])),
    "gated without the residual": patched(residual_gate=lambda real, x, y, g: real(torch.zeros_like(x), y, g)),
    "cross-attention not added": patched(residual=lambda real, x, y: x),
    "residual of cross-attention lost": patched(residual=lambda real, x, y: y),
    "gates of attention and feed-forward swapped": modulations((0, 1, 5, 3, 4, 2)),
    "modulations in another order": modulations((1, 0, 2, 4, 3, 5)),
    "feed-forward left out": without("feed_forward"),
    "cross-attention left out": without("cross_attention"),
    "self-attention left out": without("self_attention"),
    "feed-forward not added": last_branch_lost,
    "q of k's weights": weights(q=lambda block, x, w: F.linear(x, block.k)),
    "v of k's weights": weights(v=lambda block, x, w: F.linear(x, block.k)),
    "o transposed": weights(o=lambda block, x, w: F.linear(x, w.t())),
    "o left out": weights(o=lambda block, x, w: x),
    "cross_q left out": weights(cross_q=lambda block, x, w: x),
    "cross_o of another block": weights(cross_o=lambda block, x, w: F.linear(x, block.o)),
    "linear1 scaled by 1.03": weights(linear1=lambda block, x, w: F.linear(x, w) * 1.03),
    "linear2 never written": weights(linear2=lambda block, x, w: torch.zeros_like(x[..., :64])),
    "one NaN": weights(linear2=lambda block, x, w: F.linear(x, w).index_fill(1, torch.tensor([3]), math.nan)),
    "heads and tokens swapped": attending(
        lambda real, q, k, v: real(*(t[:, : q.shape[1]].transpose(1, 2) for t in (q, k, v))).transpose(1, 2)
    ),
    "output of attention in heads, tokens": attending(
        lambda real, q, k, v: real(q, k, v).transpose(1, 2).reshape(q.shape)
    ),
    "no scale": attending(lambda real, q, k, v: sdpa(q, k, v, 1.0)),
    "scale twice": attending(lambda real, q, k, v: sdpa(q, k, v, 1 / q.shape[-1])),
    "a token of the window dropped": attending(lambda real, q, k, v: real(q, k[:, 1:], v[:, 1:])),
    "heads in another order": attending(lambda real, q, k, v: real(q, k, v).roll(1, 2)),
    "keys and values swapped": attending(lambda real, q, k, v: real(q, v, k)),
    "mean for attention": attending(lambda real, q, k, v: v.mean(1, keepdim=True).expand_as(q)),
}  # fmt: skip
WRONG_CACHE = {
    "cache write skipped": patched(cache_write=lambda real, *a: None),
    "keys alone written": patched(
        cache_write=lambda real, keys, values, k, v, at: real(keys, values.clone(), k, v, at)
    ),
    "keys and values written swapped": patched(
        cache_write=lambda real, keys, values, k, v, at: real(values, keys, k, v, at)
    ),
    "the next slot written": patched(
        cache_write=lambda real, keys, values, k, v, at: real(keys, values, k, v, (at + len(at)) % keys.shape[1])
    ),
    "one token late": patched(
        cache_write=lambda real, keys, values, k, v, at: real(keys, values, k, v, (at + 1) % keys.shape[1])
    ),
    "tokens in reverse": patched(
        cache_write=lambda real, keys, values, k, v, at: real(keys, values, k, v, at.flip(0))
    ),
    "cross-attention reads the cache": to_the_cache,
    "keys written with channels in another order": patched(
        cache_write=lambda real, keys, values, k, v, at: real(keys, values, k.roll(1, -1), v, at)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ["cache", "batch 2", "no cache"])
@pytest.mark.parametrize("how", WRONG)
def test_a_wrong_model_fails(monkeypatch, how, name):
    spec = SPECS[name]
    net = build(replace(spec, text_tokens=12) if how == "heads and tokens swapped" else spec)
    assert judged(net)["ok"]
    WRONG[how](monkeypatch, net)
    assert_fails(judged(net, 1))


@pytest.mark.parametrize("name", ["cache", "batch 2"])
@pytest.mark.parametrize("how", WRONG_CACHE)
def test_a_wrong_cache_fails(monkeypatch, how, name):
    net = build(SPECS[name])
    assert judged(net)["ok"]
    WRONG_CACHE[how](monkeypatch, net)
    assert_fails(judged(net, 1))


def assert_fails(found):
    assert found["ok"] is False, found
    assert all(math.isfinite(v) for v in found.values() if isinstance(v, float))


@pytest.mark.parametrize("how", ["norm", "norm_affine", "qk_norm"])
def test_a_norm_that_is_left_out_shows_at_the_width_of_the_workload(how):
    """N(0,1) of 5120 channels is almost normed already: what shows are the weights of the norm."""
    block = build(replace(TINY, hidden=1024, heads=8, head_size=128, ffn=16, depth=1)).blocks[0]
    weights = {"norm": (), "norm_affine": (block.norm_weight, block.norm_bias), "qk_norm": (block.norm_q,)}[how]
    x = torch.randn(1, 32, 5120).bfloat16()
    normed = getattr(functions(torch), how)(x, *(w.repeat(5) for w in weights))
    assert float((x - normed).norm() / x.norm()) > model.BLOCK_LIMIT * (10 if weights else 1)


# ---- comparing a whole output ----


def test_relative_error_of_a_whole_output():
    torch.manual_seed(0)
    want = torch.randn(2, 2100, 16).bfloat16()
    assert relative_error(want, want, 2**-6, "x") == {
        "check": "x", "rel_frobenius": 0.0, "rel_frobenius_limit": 2**-6, "ok": True,
    }  # fmt: skip
    near, far = (want.float() * s for s in (1.01, 1.02))
    assert relative_error(near, want, 2**-6, "x")["rel_frobenius"] == pytest.approx(0.01, rel=1e-3)
    assert relative_error(near, want, 2**-6, "x")["ok"] and not relative_error(far, want, 2**-6, "x")["ok"]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", [0, 1500, 2099])
def test_one_value_that_is_not_finite_makes_an_output_wrong(bad, where):
    want = torch.randn(1, 2100, 4)
    got = want.clone()
    got[0, where, 2] = bad
    for a, b in ((got, want), (want, got)):
        found = relative_error(a, b, 2**-6, "x")
        assert found["ok"] is False and found["rel_frobenius"] is None
    assert relative_error(torch.zeros_like(want), torch.zeros_like(want), 2**-6, "x")["ok"] is False


# ---- the ring buffer ----


@pytest.mark.parametrize(
    "spec", [TINY, SPECS["batch 2"], replace(TINY, window_tokens=36), SPECS["one slot, one frame"]]
)
def test_the_window_is_full_before_the_first_chunk(spec):
    net = build(spec)
    for block in net.blocks:
        for ring in (block.keys, block.values):
            assert ring.shape == (spec.batch, spec.window_tokens, spec.heads, spec.head_size)
            assert bool(ring.isfinite().all()) and float(ring.float().std()) == pytest.approx(1, abs=0.1)
            assert not bool((ring == 0).all(-1).any()) and len(ring.unique()) > 100


@pytest.mark.parametrize("spec", [TINY, SPECS["batch 2"], replace(TINY, window_tokens=36)])
def test_a_chunk_writes_its_slot_and_leaves_the_others_alone(spec):
    net, tokens = build(spec), spec.query_tokens
    slots = spec.window_tokens // tokens
    assert len(net.positions) == slots
    for chunk in range(2 * slots + 1):
        before = state(net)
        net.run(chunk)
        own = torch.arange(tokens) + chunk % slots * tokens
        others = torch.tensor([i for i in range(spec.window_tokens) if i not in set(own.tolist())], dtype=torch.int64)
        for was, now in zip(before, state(net), strict=True):
            for old, new in zip(was, now, strict=True):
                assert torch.equal(old[:, others], new[:, others])
                if chunk < slots:  # what was there were other values
                    assert bool((old[:, own] != new[:, own]).any(-1).all())


@pytest.mark.parametrize("slots", [1, 2, 4])
def test_after_as_many_chunks_as_slots_all_is_rewritten(slots):
    net = build(replace(TINY, window_tokens=12 * slots))
    first = state(net)
    for chunk in range(slots):
        net.run(chunk)
    for was, now in zip(first, state(net), strict=True):
        for old, new in zip(was, now, strict=True):
            assert bool((old != new).any(-1).all()) and bool(new.isfinite().all())


def test_a_poisoned_slot_is_that_of_the_chunk_and_a_pass_that_writes_it_is_right():
    net, want = build(), build().run(5)
    net.poison(5)
    for block in net.blocks:
        for ring in (block.keys, block.values):
            assert bool(ring[:, 12:24].isnan().all()) and int(ring.isnan().sum()) == ring[:, 12:24].numel()
    assert torch.equal(net.run(5), want)
    net.poison(6)
    assert bool(net.run(5).isnan().all())  # what is in the window is read
    build(SPECS["no cache"]).poison(0)


def test_a_chunk_attends_to_what_it_wrote_and_to_the_rest_of_the_window():
    for place in (5, 17, 47):  # in the chunk's own slot it is overwritten, elsewhere it is read
        net = build()
        want = net.run(0).clone()
        net = build()
        net.blocks[0].values[:, place] += 100
        assert torch.equal(net.run(0), want) == (place < 12)


def test_without_a_cache_there_is_none_and_calls_do_not_remember():
    net = build(SPECS["no cache"])
    assert {n for n, _ in net.blocks[0].named_buffers()} == {"text_keys", "text_values"}
    assert len(net.positions) == 1 and torch.equal(net.run(0), net.run(7))


def test_the_text_is_computed_once_a_prompt(monkeypatch):
    net = build()
    seen, real = [], functions(torch).linear
    monkeypatch.setattr(functions(torch), "linear", lambda x, w: seen.append(x.shape[1]) or real(x, w))
    net.run(0)
    assert TINY.text_tokens not in seen and seen.count(TINY.query_tokens) == 8 * TINY.depth


# ---- memory and data ----


@pytest.mark.parametrize("spec", [ESCHER, workload.load("wan2_2_ti2v_5b")], ids=lambda s: s.name)
def test_bytes_of_the_workload(spec):
    net = Model(torch, spec, torch.bfloat16, "meta")
    assert 0 <= net.weight_bytes() / weight_bytes(spec) - 1 < 0.001  # norms and modulation
    assert net.cache_bytes() == cache_bytes(spec)


@pytest.mark.parametrize("name", SPECS)
def test_bytes_of_a_small_model(name):
    spec = SPECS[name]
    net = build(spec)
    vectors = spec.depth * (4 + 2 + 6) * spec.hidden * 2
    assert net.weight_bytes() == weight_bytes(spec) + vectors and net.cache_bytes() == cache_bytes(spec)


def test_weights_keep_the_size_of_what_passes_through_them():
    net = build(replace(TINY, hidden=256, heads=4, head_size=64, ffn=512, time_frequency=64))
    block = net.blocks[0]
    fan_in = {"linear2": 512}
    for name in ("q", "k", "v", "o", "cross_q", "cross_k", "cross_v", "cross_o", "linear1", "linear2"):
        w = getattr(block, name)
        wanted = fan_in.get(name, 256)
        assert w.shape[1] == wanted and float(w.float().std()) == pytest.approx(wanted**-0.5, rel=0.05)
    for w, wanted in ((net.embed1, 64), (net.embed2, 256), (net.projection, 256)):
        assert w.shape[1] == wanted and float(w.float().std()) == pytest.approx(wanted**-0.5, rel=0.05)
    assert float(net.x.float().std()) == pytest.approx(1, rel=0.05)


def test_no_data_is_constant_and_no_two_blocks_are_alike():
    net = build()
    one, other = (dict([*b.named_parameters(), *b.named_buffers()]) for b in net.blocks)
    assert one.keys() == other.keys()
    for name, t in one.items():
        assert len(t.unique()) > min(50, t.numel() // 2), name
        assert not torch.equal(t, other[name]), name
    everything = [*one.values(), net.embed1, net.embed2, net.projection, net.x]
    assert len({t.data_ptr() for t in everything}) == len(everything)
    assert all(not t.requires_grad for t in net.blocks[0].parameters())


def test_attention_is_not_one_hot():
    net, got = build(replace(TINY, window_tokens=240)), []
    net.blocks[0].attend = lambda q, k, v: got.append((q, k)) or sdpa(q, k, v)
    net.run(0)
    q, k = (t.transpose(1, 2).float() for t in got[0])
    weights = (q @ k.mT / math.sqrt(32)).softmax(-1)
    assert float(weights.max(-1).values.mean()) < 0.2


def test_frames_have_time_steps_of_their_own():
    net = build(replace(TINY, batch=2))
    assert net.steps.shape == (2, 3, 16) and torch.equal(net.steps[0], net.steps[1])
    e = net.time()
    assert e.shape == (2, 3, 6 * 64) and all(not torch.equal(e[0, i], e[0, j]) for i, j in ((0, 1), (1, 2)))
    alone = net.f.time_embed(net.steps.float(), net.embed1.float(), net.embed2.float()) @ net.projection.float().T
    assert float((e.float() - alone).norm() / alone.norm()) < 0.02


def test_rotations_are_of_length_one_and_the_first_token_stays():
    cosine, sine = model.rotary(torch, TINY, "cpu")
    assert cosine.shape == sine.shape == (12, 1, 16)
    assert torch.allclose(cosine**2 + sine**2, torch.ones(()), atol=1e-6)
    x = torch.randn(1, 12, 2, 32)
    turned = functions(torch).rope(x, cosine, sine)
    assert torch.equal(turned[:, 0], x[:, 0]) and not torch.allclose(turned[:, 1], x[:, 1])
    assert torch.allclose(turned.norm(dim=-1), x.norm(dim=-1), rtol=1e-5)


# ---- compiled ----


@pytest.fixture
def fresh_compiler(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


@compiles
@pytest.mark.slow
@pytest.mark.parametrize("name", ["cache", "no cache"])
def test_blocks_of_different_weights_share_one_graph(fresh_compiler, name):
    net = build(SPECS[name])
    with model.inference(torch, net.backend):
        blocks = model.compiled_blocks(torch, net, "default")
        for chunk in range(3):  # another slot of the ring buffer is no reason to compile anew
            got = net.run(chunk, blocks).clone()
            after = state(net) if SPECS[name].cache else []
            want = net.run(chunk)
            assert relative_error(got, want, model.BLOCK_LIMIT, "compiled")["ok"]
            for was, now in zip(after, state(net) if after else [], strict=True):
                for a, b in zip(was, now, strict=True):
                    assert relative_error(a, b, model.BLOCK_LIMIT, "cache")["ok"]
        counters = torch._dynamo.utils.counters
        assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
        one, two = (b(net.x, *net.arguments(0)) for b in blocks)
        assert not torch.equal(one, two)  # each with weights of its own


@compiles
@pytest.mark.slow
def test_compiled_code_that_cannot_be_one_graph_raises(fresh_compiler, monkeypatch):
    net = build()

    def feed_forward(self, x, *_):
        torch._dynamo.graph_break()
        return x

    monkeypatch.setattr(model.block_class(torch), "feed_forward", feed_forward)
    with model.inference(torch, net.backend), pytest.raises(Exception, match="(?i)graph.?break|break"):
        net.run(0, model.compiled_blocks(torch, net, "default"))
