"""The model: a Wan-like video diffusion transformer whose operations are those of the op table, by the same names.

One block is self-attention over a ring buffer of keys and values, cross-attention to cached keys and values of the text,
and a GELU feed-forward, each behind a norm; self-attention and feed-forward are modulated and gated by the time
embedding, which is computed once a pass. `functions` holds one function an operation: family 4 times them alone, the
block is made of them, so the two cannot differ. The published model has biases and patch embedding and head as well;
those are under 0.1 % of its FLOP and left out. `Block.branches` is checked against float64 on sampled tokens
(`branch_errors`), because an error in a small branch does not show in the sum with the residual stream.

Wan2.2: github.com/Wan-Video/Wan2.2, wan/modules/model.py. Modulation: Peebles and Xie, "Scalable diffusion models with
transformers", 2023. Rotary embedding: Su et al., "RoFormer", 2021; positions run along the tokens here.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from escher_kernels import attention
from escher_kernels.timing import normal
from escher_kernels.workload import Spec

EPS = 1e-6
CHECK_ROWS = 32
BLOCK_LIMIT = 2.0**-6  # of a branch or a block, relative Frobenius
ROTARY_BASE = 10000.0


@functools.cache
def functions(torch: Any) -> SimpleNamespace:
    """One function an operation. x, y: (B, S, D) tokens; shift, scale, gate: (B, T, D), one a frame of S/T tokens."""
    F = torch.nn.functional

    def linear(x: Any, weight: Any) -> Any:
        return F.linear(x, weight)

    def time_embed(sinusoid: Any, first: Any, second: Any) -> Any:
        return F.silu(F.linear(F.silu(F.linear(sinusoid, first)), second))

    def norm(x: Any) -> Any:
        return F.layer_norm(x, x.shape[-1:], eps=EPS)

    def norm_affine(x: Any, weight: Any, bias: Any) -> Any:
        return F.layer_norm(x, x.shape[-1:], weight, bias, EPS)

    def modulate(x: Any, shift: Any, scale: Any) -> Any:
        frames = x.unflatten(1, (shift.shape[1], -1))
        return (frames * (1 + scale.unsqueeze(2)) + shift.unsqueeze(2)).flatten(1, 2)

    def qk_norm(x: Any, weight: Any) -> Any:
        return F.rms_norm(x, x.shape[-1:], weight, EPS)

    def rope(x: Any, cosine: Any, sine: Any) -> Any:
        """x: (B, S, H, D), pairs of neighbours rotated; cosine, sine: (S, 1, D/2) in FP32."""
        a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack((a * cosine - b * sine, a * sine + b * cosine), -1).flatten(-2).to(x.dtype)

    def cache_write(keys: Any, values: Any, k: Any, v: Any, positions: Any) -> None:
        """keys, values: (B, W, H, D) ring buffers; k, v: (B, S, H, D), written at the S positions."""
        keys.index_copy_(1, positions, k)
        values.index_copy_(1, positions, v)

    def residual_gate(x: Any, y: Any, gate: Any) -> Any:
        frames = (gate.shape[1], -1)
        return (x.unflatten(1, frames) + y.unflatten(1, frames) * gate.unsqueeze(2)).flatten(1, 2)

    def residual(x: Any, y: Any) -> Any:
        return x + y

    def gelu(x: Any) -> Any:
        return F.gelu(x, approximate="tanh")

    made = [linear, time_embed, norm, norm_affine, modulate, qk_norm, rope, cache_write, residual_gate, residual, gelu]
    return SimpleNamespace(**{f.__name__: f for f in made})


def rotary(torch: Any, spec: Spec, device: Any) -> tuple[Any, Any]:
    """Cosines and sines of the tokens of a call, (S, 1, head_size/2) in FP32."""
    half = spec.head_size // 2
    rates = ROTARY_BASE ** -(torch.arange(half, device=device, dtype=torch.float32) / half)
    angle = torch.outer(torch.arange(spec.query_tokens, device=device, dtype=torch.float32), rates).unsqueeze(1)
    return torch.cos(angle), torch.sin(angle)


def sinusoid(torch: Any, spec: Spec, dtype: Any, device: Any) -> Any:
    """The time step of each frame as sines and cosines, (B, T, frequency)."""
    half = spec.time_frequency // 2
    rates = ROTARY_BASE ** -(torch.arange(half, device=device, dtype=torch.float32) / half)
    angle = torch.outer(torch.linspace(999, 1, spec.time_tokens, device=device), rates)
    return torch.cat((angle.cos(), angle.sin()), -1).to(dtype).expand(spec.batch, -1, -1).contiguous()


def tensor(torch: Any, shape: tuple[int, ...], dtype: Any, device: Any, fan_in: int = 1) -> Any:
    """N(0, 1/fan_in); on the device "meta" only the shape."""
    if str(device) == "meta":
        return torch.empty(shape, dtype=dtype, device=device)
    return normal(torch, math.prod(shape), dtype, device).mul_(fan_in**-0.5).view(shape)


@functools.cache
def block_class(torch: Any) -> type:
    """The block as a torch module: weights are parameters and caches buffers, so that compiled code finds them in place."""
    f = functions(torch)

    class Block(torch.nn.Module):
        def __init__(self, spec: Spec, dtype: Any, device: Any, attend: Callable[[Any, Any, Any], Any]):
            super().__init__()
            d, heads, b = spec.hidden, (spec.heads, spec.head_size), spec.batch
            self.heads, self.attend, self.cached = heads, attend, spec.cache

            def weight(rows: int, columns: int) -> Any:
                made = tensor(torch, (rows, columns), dtype, device, columns)
                return torch.nn.Parameter(made, requires_grad=False)

            def vector(centre: float, *shape: int) -> Any:
                """Not constant: a norm that is left out must show."""
                made = tensor(torch, shape, dtype, device).mul_(0.25).add_(centre)
                return torch.nn.Parameter(made, requires_grad=False)

            self.q, self.k, self.v, self.o = (weight(d, d) for _ in range(4))
            self.cross_q, self.cross_k, self.cross_v, self.cross_o = (weight(d, d) for _ in range(4))
            self.linear1, self.linear2 = weight(spec.ffn, d), weight(d, spec.ffn)
            self.norm_q, self.norm_k, self.norm_cross_q, self.norm_cross_k = (vector(1.0, d) for _ in range(4))
            self.norm_weight, self.norm_bias = vector(1.0, d), vector(0.0, d)
            modulation = tensor(torch, (1, 1, 6, d), dtype, device, d)
            self.modulation = torch.nn.Parameter(modulation, requires_grad=False)
            if spec.cache:  # full before the first call
                for name in ("keys", "values"):
                    filled = tensor(torch, (b, spec.window_tokens, *heads), dtype, device)
                    self.register_buffer(name, filled, persistent=False)
            text = tensor(torch, (b, spec.text_tokens, d), dtype, device)
            cross_keys = f.qk_norm(f.linear(text, self.cross_k), self.norm_cross_k).unflatten(-1, heads)
            self.register_buffer("text_keys", cross_keys, persistent=False)  # once a prompt
            self.register_buffer("text_values", f.linear(text, self.cross_v).unflatten(-1, heads), persistent=False)

        def modulations(self, e: Any) -> tuple[Any, ...]:
            """e: (B, T, 6 D), the time projection -> shift, scale, gate of attention, then of the feed-forward."""
            return (e.unflatten(-1, (6, -1)) + self.modulation).unbind(2)

        def self_attention(self, x: Any, shift: Any, scale: Any, cosine: Any, sine: Any, positions: Any) -> Any:
            h = f.modulate(f.norm(x), shift, scale)
            q = f.qk_norm(f.linear(h, self.q), self.norm_q).unflatten(-1, self.heads)
            k = f.qk_norm(f.linear(h, self.k), self.norm_k).unflatten(-1, self.heads)
            v = f.linear(h, self.v).unflatten(-1, self.heads)
            q, k = f.rope(q, cosine, sine), f.rope(k, cosine, sine)
            if self.cached:
                f.cache_write(self.keys, self.values, k, v, positions)
                k, v = self.keys, self.values
            return f.linear(self.attend(q, k, v).flatten(-2), self.o)

        def cross_attention(self, x: Any) -> Any:
            h = f.norm_affine(x, self.norm_weight, self.norm_bias)
            q = f.qk_norm(f.linear(h, self.cross_q), self.norm_cross_q).unflatten(-1, self.heads)
            return f.linear(self.attend(q, self.text_keys, self.text_values).flatten(-2), self.cross_o)

        def feed_forward(self, x: Any, shift: Any, scale: Any) -> Any:
            h = f.modulate(f.norm(x), shift, scale)
            return f.linear(f.gelu(f.linear(h, self.linear1)), self.linear2)

        def branches(self, x: Any, e: Any, cosine: Any, sine: Any, positions: Any) -> tuple[Any, ...]:
            """What is added to x and in which order: attention, cross-attention, feed-forward, then the sum."""
            shift, scale, gate, shift2, scale2, gate2 = self.modulations(e)
            one = self.self_attention(x, shift, scale, cosine, sine, positions)
            x = f.residual_gate(x, one, gate)
            two = self.cross_attention(x)
            x = f.residual(x, two)
            three = self.feed_forward(x, shift2, scale2)
            return one, two, three, f.residual_gate(x, three, gate2)

        def forward(self, x: Any, e: Any, cosine: Any, sine: Any, positions: Any) -> Any:
            """The sum alone: no branch outlives its addition."""
            shift, scale, gate, shift2, scale2, gate2 = self.modulations(e)
            x = f.residual_gate(x, self.self_attention(x, shift, scale, cosine, sine, positions), gate)
            x = f.residual(x, self.cross_attention(x))
            return f.residual_gate(x, self.feed_forward(x, shift2, scale2), gate2)

    return Block


class Model:
    """`depth` blocks with weights of their own, and what one pass needs around them. Nothing is trained."""

    def __init__(self, torch: Any, spec: Spec, dtype: Any, device: Any, backend: str = attention.DEFAULT):
        self.torch, self.spec, self.backend = torch, spec, backend
        self.f = functions(torch)
        d, t = spec.hidden, (torch, spec)
        self.embed1 = tensor(torch, (d, spec.time_frequency), dtype, device, spec.time_frequency)
        self.embed2 = tensor(torch, (d, d), dtype, device, d)
        self.projection = tensor(torch, (6 * d, d), dtype, device, d)
        self.steps = sinusoid(*t, dtype, device)
        self.cosine, self.sine = rotary(*t, device)
        self.x = tensor(torch, (spec.batch, spec.query_tokens, d), dtype, device)
        slots = max(1, spec.window_tokens // spec.query_tokens)
        self.positions = list(torch.arange(slots * spec.query_tokens, device=device).split(spec.query_tokens))
        attend = attention.attend(torch, backend)
        self.blocks = [block_class(torch)(spec, dtype, device, attend) for _ in range(spec.depth)]

    def time(self) -> Any:
        """The time projection of a pass, (B, T, 6 D)."""
        return self.f.linear(self.f.time_embed(self.steps, self.embed1, self.embed2), self.projection)

    def arguments(self, chunk: int) -> tuple[Any, ...]:
        """What a block takes besides x: its slot of the ring buffer is the chunk's."""
        return self.time(), self.cosine, self.sine, self.positions[chunk % len(self.positions)]

    def run(self, chunk: int, blocks: list[Any] | None = None) -> Any:
        """One pass over `blocks` (default: the eager ones): (B, S, D)."""
        x, around = self.x, self.arguments(chunk)
        for block in blocks or self.blocks:
            x = block(x, *around)
        return x

    def poison(self, chunk: int) -> None:
        """Fill the chunk's slot of the ring buffers with NaN, so that a pass which does not write it cannot pass."""
        for ring in (ring for b in self.blocks if b.cached for ring in (b.keys, b.values)):
            ring.index_fill_(1, self.positions[chunk % len(self.positions)], math.nan)

    def weight_bytes(self) -> int:
        own = [self.embed1, self.embed2, self.projection, *(p for b in self.blocks for p in b.parameters())]
        return sum(t.numel() * t.element_size() for t in own)

    def cache_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for b in self.blocks for t in b.buffers())


def counted_flop(torch: Any, spec: Spec) -> dict[str, int]:
    """FLOP by torch's own counter of the eager model under the math attention backend: {"block", "time", "pass"}.

    On the device "meta": the real code, no memory, no time. The counter sees GEMMs only, so attention must be made of
    them (it counts 0 for the flash kernel of a CPU).
    """
    from dataclasses import replace

    from torch.utils.flop_counter import FlopCounterMode

    model = Model(torch, replace(spec, depth=1), torch.bfloat16, "meta", "sdpa_math")
    with attention.forced(torch, "sdpa_math"), torch.no_grad():
        with FlopCounterMode(display=False) as counter:
            model.time()
        around = model.arguments(0)
        with FlopCounterMode(display=False) as in_block:
            model.blocks[0](model.x, *around)
    block, time = in_block.get_total_flops(), counter.get_total_flops()
    return {"block": block, "time": time, "pass": spec.depth * block + time}


def branch_errors(torch: Any, block: Any, x: Any, around: tuple[Any, ...]) -> dict[str, Any]:
    """Each branch of one block, and the block's sum, against float64 from the same inputs, on up to 32 tokens.

    Written apart from `functions`, from the formulas. Attention reads what is in the cache, so the keys and values that
    this call wrote are compared as well. Relative Frobenius; ``ok``: all within 2^-6.
    """
    e, cosine, sine, positions = around
    with torch.no_grad():
        got = block.branches(x, *around)
        tokens = x.shape[1]
        pick = torch.randperm(tokens)[: CHECK_ROWS - 2].tolist()
        rows = torch.tensor(sorted({0, tokens - 1, *pick}), device=x.device)
        want, written = _reference(torch, block, x, e, cosine, sine, positions, rows)
        names = ("self_attn", "cross_attn", "ffn", "block")
        errors = {n: _relative(g[:, rows].double(), w) for n, g, w in zip(names, got, want, strict=True)}
        if block.cached:
            stored = (block.keys[:, positions[rows]], block.values[:, positions[rows]])
            errors["cache"] = max(_relative(s.double(), w) for s, w in zip(stored, written, strict=True))
    worst = max(errors.values(), key=lambda v: math.inf if math.isnan(v) else v)
    finite = {f"{n}_rel": v if math.isfinite(v) else None for n, v in errors.items()}
    return {
        "check": "branches", **finite, "rel_frobenius_limit": BLOCK_LIMIT, "rows_checked": len(rows),
        "rel_frobenius": worst if math.isfinite(worst) else None, "ok": bool(worst <= BLOCK_LIMIT),
    }  # fmt: skip


def _relative(got: Any, want: Any) -> float:
    return float((got - want).norm() / want.norm())


def relative_error(got: Any, want: Any, limit: float, what: str) -> dict[str, Any]:
    """Compiled against eager: relative Frobenius of the whole output, in chunks of tokens. JSON-safe."""
    difference, norm = 0.0, 0.0
    for a, b in zip(got.split(1024, 1), want.split(1024, 1), strict=True):
        difference += float((a.double() - b.double()).square().sum())
        norm += float(b.double().square().sum())
    error = math.sqrt(difference / norm) if norm > 0 and math.isfinite(difference) else math.inf
    return {"check": what, "rel_frobenius": error if math.isfinite(error) else None, "rel_frobenius_limit": limit,
            "ok": error <= limit}  # fmt: skip


def _reference(torch, block, x, e, cosine, sine, positions, rows) -> tuple[list[Any], tuple[Any, Any]]:
    """([self-attention, cross-attention, feed-forward, sum], (keys, values) to be written), float64, of those tokens."""
    heads, frame = block.heads, rows // (x.shape[1] // e.shape[1])
    six = (e.double().unflatten(-1, (6, -1)) + block.modulation.double())[:, frame]  # (B, rows, 6, D)
    shift, scale, gate, shift2, scale2, gate2 = (six[:, :, i] for i in range(6))

    def centred(v: Any) -> Any:
        v = v - v.mean(-1, keepdim=True)
        return v / (v.square().mean(-1, keepdim=True) + EPS).sqrt()

    def scaled(v: Any, weight: Any) -> Any:
        return v / (v.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()

    def rotated(v: Any, at: Any) -> Any:
        v = v.unflatten(-1, heads).unflatten(-1, (-1, 2))
        turn = torch.complex(cosine[at].double(), sine[at].double())
        return torch.view_as_real(torch.view_as_complex(v.contiguous()) * turn).flatten(-2)

    def attended(q: Any, k: Any, v: Any) -> Any:
        out = []
        for h in range(heads[0]):  # a head at a time, so that float64 copies of the window stay small
            scores = torch.einsum("bqd,bkd->bqk", q[:, :, h], k[:, :, h].double()) / math.sqrt(heads[1])
            out.append(torch.einsum("bqk,bkd->bqd", scores.softmax(-1), v[:, :, h].double()))
        return torch.cat(out, -1)

    def keys_values(tokens: Any, at: Any, shift: Any, scale: Any) -> tuple[Any, Any]:
        h = centred(tokens.double()) * (1 + scale) + shift
        k = rotated(scaled(h @ block.k.double().T, block.norm_k), at)
        return k, (h @ block.v.double().T).unflatten(-1, heads)

    here = x[:, rows].double()
    written = keys_values(here, rows, shift, scale)
    if block.cached:
        keys, values = block.keys, block.values
    else:
        every = torch.arange(x.shape[1], device=x.device)
        each = (e.double().unflatten(-1, (6, -1)) + block.modulation.double())[:, every // (x.shape[1] // e.shape[1])]
        keys, values = keys_values(x, every, each[:, :, 0], each[:, :, 1])
    q = rotated(scaled((centred(here) * (1 + scale) + shift) @ block.q.double().T, block.norm_q), rows)
    one = attended(q, keys, values) @ block.o.double().T
    here = here + one * gate
    h = centred(here) * block.norm_weight.double() + block.norm_bias.double()
    q = scaled(h @ block.cross_q.double().T, block.norm_cross_q).unflatten(-1, heads)
    two = attended(q, block.text_keys, block.text_values) @ block.cross_o.double().T
    here = here + two
    h = (centred(here) * (1 + scale2) + shift2) @ block.linear1.double().T
    h = 0.5 * h * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))
    three = h @ block.linear2.double().T
    return [one, two, three, here + three * gate2], written


def compiled_blocks(torch: Any, model: Model, mode: str) -> list[Any]:
    """The model's blocks through torch.compile. Nothing runs yet: the first call compiles one block, which all reuse."""
    options = {} if mode == "default" else {"mode": mode}
    return [torch.compile(block, fullgraph=True, dynamic=False, **options) for block in model.blocks]


def first_line(exc: BaseException) -> str:
    """An exception in one line: its type, and the first line that says something."""
    lines = [line.strip() for line in str(exc).splitlines() if line.strip()]
    return f"{type(exc).__name__}: {lines[0] if lines else 'no message'}"[:300]


def compile_failure(torch: Any, exc: BaseException) -> str:
    """One line of a compiler's error: the line that names an error, else the first; and the known cause of many."""
    named = next((line.strip() for line in str(exc).splitlines() if re.search(r"\berror:", line)), None)
    text = f"{type(exc).__name__}: {named}"[:300] if named else first_line(exc)
    paths = (os.environ.get("TORCHINDUCTOR_CACHE_DIR", ""), os.path.dirname(getattr(torch, "__file__", "") or ""))
    if spaced := [path for path in paths if re.search(r"\s", path)]:
        text += f"; torch's compiler does not quote paths, and {spaced[0]!r} holds a space: use one without"
    return text


def graphs_compiled(torch: Any) -> int:
    """Graphs that torch.compile has made in this process since its counters were cleared; 0: what ran was eager."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@contextlib.contextmanager
def inference(torch: Any, backend: str) -> Any:
    """No gradients, and that attention backend."""
    with torch.no_grad(), attention.forced(torch, backend):
        yield
