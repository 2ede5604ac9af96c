"""The workload: the geometry of the model, the operations of one pass with their work, and what a host can run of it.

A spec is a JSON file in configs/: a whole geometry, or `derived_from` another one with its own depth and tokens. Every
count of FLOP and bytes derives from it. ONE spec serves all families of a run and is written into it. No torch.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
MODELS = "reference_video_models.json"
DEFAULT = "escher_14b_480p"
ELEMENT_BYTES = 2  # BF16 and FP16
ROTARY_STREAMS = 10  # activations of S x hidden, of 16 bits, that are alive at once in the model's rotary embedding
TABLE_BYTES = 4  # cosines and sines of the rotary embedding are FP32
CPU_BLOCK_FLOP = 2.5e11  # what one block may cost on a CPU host: about 0.7 s at 0.35 TFLOP/s
MEMORY_FRAC = {"gpu": 0.9, "cpu": 0.5}  # of the memory that weights, caches and activations may fill
DERIVABLE = ("depth", "query_tokens", "window_tokens")
FULL = (*DERIVABLE, "derived_from", "derived_why")  # what a host's derivation changes, and `whole` gives back


class WorkloadError(ValueError):
    """A spec that cannot be used. One line: the file, the key, what was found and what is expected."""


@dataclass(frozen=True)
class Spec:
    """Geometry of a video transformer. Tokens are counted per call; `window_tokens` is what a query attends to.

    `cache`: keys and values of the window live in a ring buffer that each call extends; else attention is over the
    call's own tokens. `full`: the fields that the host made smaller, as the workload has them.
    """

    name: str
    title: str
    hidden: int
    heads: int
    head_size: int
    ffn: int
    depth: int
    time_frequency: int
    time_tokens: int
    query_tokens: int
    window_tokens: int
    text_tokens: int
    batch: int
    chunks: int
    cache: bool = True
    unit: str = "chunk"  # what one call is: a chunk, a denoising step
    note: str = ""
    derived_from: str | None = None
    derived_why: str | None = None
    full: dict[str, Any] | None = None
    pilot: dict[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def whole(self) -> Spec:
        """The workload before the host's memory or speed made it smaller."""
        return dataclasses.replace(self, full=None, **(self.full or {}))


@dataclass(frozen=True)
class Gemm:
    """(M,K) x (K,N): 2*M*N*K FLOP; each operand is read once and the result written once, two bytes an element."""

    name: str
    m: int
    n: int
    k: int
    per_pass: bool = False  # runs once a pass or once a prompt, not once a block

    @property
    def flop(self) -> int:
        return 2 * self.m * self.n * self.k

    def bytes_moved(self, element_bytes: int = ELEMENT_BYTES) -> int:
        return element_bytes * (self.m * self.k + self.k * self.n + self.m * self.n)


@dataclass(frozen=True)
class Op:
    """One operation of a pass, and the work of one execution.

    `flop`: 2MNK of a GEMM, 4*B*H*Sq*Skv*D of attention, else 0. `bytes`: each input and weight read once, each output
    written once. `flop_pilot`, `bytes_pilot`: what the pilot's table counts for it; None where it has no such row.
    `kind` names the function of `model` that runs it; `shape` is what that function needs.
    """

    name: str
    category: str  # time, norm, self_attn, cross_attn, cache, ffn
    kind: str
    shape: dict[str, int]
    flop: int
    bytes: int
    flop_pilot: int | None = None
    bytes_pilot: int | None = None
    per_pass: bool = False


def from_json(data: Any, where: str) -> Spec:
    """Check and build a spec. Raises `WorkloadError` that names `where` and the key."""
    if not isinstance(data, dict):
        raise WorkloadError(f"{where}: expected an object with hidden, heads, head_size, ...")
    fields = {f.name: f for f in dataclasses.fields(Spec)}
    for key in data:
        if key not in fields:
            raise WorkloadError(f"{where}: unknown key {key!r}; known: {', '.join(fields)}")
    for name, f in fields.items():
        if f.default is not dataclasses.MISSING and name not in data:
            continue
        if name not in data:
            raise WorkloadError(f"{where}: {name} is missing")
        value = data[name]
        if f.type == "int":
            _whole_number(where, name, value)
        if f.type == "str" and not isinstance(value, str):
            raise WorkloadError(f"{where}: {name} is {value!r}; expected text")
        if f.type == "bool" and not isinstance(value, bool):
            raise WorkloadError(f"{where}: {name} is {value!r}; expected true or false")
        if f.type.startswith("dict") and value is not None and not isinstance(value, dict):
            raise WorkloadError(f"{where}: {name} is {value!r}; expected an object")
        if f.type == "str | None" and value is not None and not isinstance(value, str):
            raise WorkloadError(f"{where}: {name} is {value!r}; expected text or null")
        if name == "name" and not re.fullmatch(r"[\w.-]+", value):  # it becomes part of a directory's name
            raise WorkloadError(f"{where}: name is {value!r}; expected letters, digits, - _ . only")
    spec = _checked(Spec(**data), where)
    _check_pilot(spec.pilot or {}, where)
    for name, value in (spec.full or {}).items():
        if name not in FULL:
            raise WorkloadError(f"{where}: full has the unknown key {name!r}; known: {', '.join(FULL)}")
        if name in DERIVABLE:
            _whole_number(where, f"full.{name}", value)
    _checked(spec.whole(), f"{where}: full")
    return spec


def _check_pilot(pilot: dict[str, Any], where: str) -> None:
    """A pilot's figures are positive numbers, its source is text."""
    shares = pilot.get("mfu_pct", {})
    if not isinstance(shares, dict) or not isinstance(pilot.get("source", ""), str):
        raise WorkloadError(f'{where}: pilot.mfu_pct or pilot.source is of the wrong kind; expected {{"eager": 93}} and text')
    for name, value in {**pilot, **{f"mfu_pct.{k}": v for k, v in shares.items()}}.items():
        if name in ("mfu_pct", "source"):
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e9:
            raise WorkloadError(f"{where}: pilot.{name} is {value!r}; expected a number above 0 and below 1e9, e.g. 1360")


def _whole_number(where: str, name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 10**7:
        raise WorkloadError(f"{where}: {name} is {value!r}; expected a whole number from 1 to 10000000")


def _checked(spec: Spec, where: str) -> Spec:
    """The rules between fields."""
    if spec.heads * spec.head_size != spec.hidden:
        raise WorkloadError(
            f"{where}: heads x head_size is {spec.heads} x {spec.head_size} = {spec.heads * spec.head_size}, "
            f"but hidden is {spec.hidden}; the two must be equal"
        )
    if spec.head_size % 2:
        raise WorkloadError(f"{where}: head_size is {spec.head_size}; rotary embedding needs an even number")
    if spec.query_tokens % spec.time_tokens:
        raise WorkloadError(
            f"{where}: query_tokens is {spec.query_tokens}, which {spec.time_tokens} time tokens do not divide; "
            f"give a multiple of {spec.time_tokens}"
        )
    if spec.cache and spec.window_tokens % spec.query_tokens:
        raise WorkloadError(
            f"{where}: window_tokens is {spec.window_tokens}; expected a multiple of query_tokens "
            f"({spec.query_tokens}), so that a {spec.unit} fills whole slots of the ring buffer"
        )
    if not spec.cache and spec.window_tokens != spec.query_tokens:
        raise WorkloadError(
            f"{where}: window_tokens is {spec.window_tokens} and query_tokens {spec.query_tokens}; without a cache "
            f"attention is over the call's own tokens, so the two must be equal"
        )
    return spec


def names() -> list[str]:
    """The workloads in configs/: the files that hold a geometry, or derive one."""
    out = []
    for path in sorted(CONFIGS.glob("*.json")):
        try:
            if {"hidden", "derived_from"} & json.loads(path.read_text(encoding="utf-8")).keys():
                out.append(path.stem)
        except (OSError, ValueError, TypeError, AttributeError):
            continue
    return out


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as exc:
        raise WorkloadError(f"{path}: cannot be read: {exc}") from None
    except json.JSONDecodeError as exc:
        raise WorkloadError(f"{path}:{exc.lineno}:{exc.colno}: no valid JSON ({exc.msg})") from None
    except (ValueError, RecursionError) as exc:  # a number of thousands of digits, thousands of brackets
        raise WorkloadError(f"{path}: no valid JSON ({exc})") from None


def load(name_or_path: str = DEFAULT) -> Spec:
    """A workload of configs/ by name, or a file by path. Raises `WorkloadError` that lists the names.

    A file without `hidden` derives from the workload that its `derived_from` names, and may hold depth, tokens, name,
    title and note of its own; the window follows the tokens unless it is given.
    """
    path = Path(name_or_path) if name_or_path.endswith(".json") else CONFIGS / f"{name_or_path}.json"
    try:
        there = path.is_file()
    except OSError:  # a name that is too long
        there = False
    if not there:
        raise WorkloadError(f"unknown workload {name_or_path!r}; known: {', '.join(names())}, or a .json file")
    data = _read(path)
    if not isinstance(data, dict) or data.get("derived_from") is None:
        return from_json(data, str(path))
    whole = [n for n in names() if _read(CONFIGS / f"{n}.json").get("derived_from") is None]
    if data["derived_from"] not in whole:
        raise WorkloadError(f"{path}: derived_from is {data['derived_from']!r}; expected one of {', '.join(whole)}")
    base, texts = load(data["derived_from"]), ("name", "title", "note", "derived_from", "derived_why")
    for key in data:
        if key not in (*texts, *DERIVABLE):
            raise WorkloadError(
                f"{path}: {key!r} cannot differ from {base.name}; a derived workload may hold "
                f"{', '.join((*texts, *DERIVABLE))}"
            )
    spec = overridden(base, *(data.get(name) for name in DERIVABLE), where=str(path))
    said = {"name": path.stem, "title": f"{path.stem}, derived from {base.name}", "derived_from": base.name,
            "derived_why": (spec.derived_why or "nothing changed").replace("asked for", path.stem), "pilot": None}  # fmt: skip
    return from_json({**spec.to_json(), **said, **{k: v for k, v in data.items() if k in texts}}, str(path))


def overridden(
    spec: Spec, depth: int | None = None, tokens: int | None = None, window: int | None = None, where: str = ""
) -> Spec:
    """The spec with another depth, query tokens and window. The window follows the tokens unless it is given.

    Raises `WorkloadError`, headed by `where`, for what the geometry does not allow.
    """
    where = where or f"workload {spec.name}"
    asked = {"depth": depth, "query_tokens": tokens, "window_tokens": window}
    asked = {name: value for name, value in asked.items() if value is not None}
    for name, value in asked.items():
        _whole_number(where, name, value)
    if "query_tokens" in asked and window is None:
        asked["window_tokens"] = asked["query_tokens"] * spec.window_tokens // spec.query_tokens
        _whole_number(where, "window_tokens", asked["window_tokens"])
    changed = {name: value for name, value in asked.items() if value != getattr(spec, name)}
    if not changed:
        return spec
    why = ", ".join(f"{name.replace('_', ' ')} {getattr(spec, name)} -> {value}" for name, value in changed.items())
    return _checked(_derived(spec, f"asked for: {why}", **changed), where)


def _derived(spec: Spec, why: str, **changed: Any) -> Spec:
    why = f"{spec.derived_why}; {why}" if spec.derived_why else why
    return dataclasses.replace(spec, derived_from=spec.derived_from or spec.name, derived_why=why, **changed)


def fit(spec: Spec, kind: str, memory_bytes: int, fixed: Collection[str] = ()) -> Spec:
    """What this host can run: depth is reduced first (intensity stays), then tokens with Sq : Skv fixed.

    `kind`: "cpu" runs one block, of at most `CPU_BLOCK_FLOP` where fewer tokens can make it so; on both kinds weights,
    caches and activations must fit `MEMORY_FRAC` of the memory. Hidden, FFN and head size never change, nor do fields
    named in `fixed`, which a person asked for. Raises `WorkloadError` where not even the smallest fits.
    """
    budget = MEMORY_FRAC[kind] * memory_bytes
    depth = spec.depth
    if "depth" not in fixed:
        depth = 1 if kind == "cpu" else _deepest(spec, budget)
    frames = spec.query_tokens // spec.time_tokens

    def divided(divisor: int) -> Spec:
        tokens = frames // divisor * spec.time_tokens
        window = tokens * spec.window_tokens // spec.query_tokens
        return dataclasses.replace(spec, depth=depth, query_tokens=tokens, window_tokens=window)

    low, high = 1, 1 if {"query_tokens", "window_tokens"} & set(fixed) else frames
    slow = kind == "cpu" and high > 1
    while low < high:  # the smallest divisor that fits: what a block needs only falls with it
        middle = (low + high) // 2
        small = needed_bytes(divided(middle)) <= budget and not (slow and block_flop(divided(middle)) > CPU_BLOCK_FLOP)
        low, high = (low, middle) if small else (middle + 1, high)
    out = divided(low)
    if needed_bytes(out) > budget:
        raise WorkloadError(
            f"workload {spec.name}: depth {out.depth} with {out.query_tokens} tokens needs "
            f"{needed_bytes(out) / 2**30:.3g} GiB, and {budget / 2**30:.3g} of this {kind.upper()}'s "
            f"{memory_bytes / 2**30:.3g} GiB may be used; choose a smaller DEPTH, TOKENS or workload"
        )
    changed = {name: getattr(out, name) for name in DERIVABLE if getattr(out, name) != getattr(spec, name)}
    if not changed:
        return spec
    steps = ", ".join(f"{name.replace('_', ' ')} {getattr(spec, name)} -> {value}" for name, value in changed.items())
    why = f"{'a CPU host' if kind == 'cpu' else 'the memory of this GPU'}: {steps}"
    full = spec.full or {name: getattr(spec, name) for name in FULL}
    return dataclasses.replace(_derived(spec, why, **changed), full=full)


def _deepest(spec: Spec, budget: float) -> int:
    """The largest depth, at least 1, that fits the budget: the need grows by the same bytes with every block."""
    one, two = (needed_bytes(dataclasses.replace(spec, depth=n)) for n in (1, 2))
    return max(1, min(spec.depth, 1 + int((budget - one) // (two - one))))


def gemms(spec: Spec) -> list[Gemm]:
    """Every GEMM of the workload by name: those of one block, then those that run once a pass or once a prompt."""
    m, d, f, text = spec.batch * spec.query_tokens, spec.hidden, spec.ffn, spec.batch * spec.text_tokens
    return [
        *(Gemm(f"self_attn.{p}", m, d, d) for p in "qkvo"),
        *(Gemm(f"cross_attn.{p}", m, d, d) for p in "qo"),
        Gemm("ffn.linear1", m, f, d),
        Gemm("ffn.linear2", m, d, f),
        *(Gemm(f"cross_attn.{p}", text, d, d, per_pass=True) for p in "kv"),
        Gemm("time_embed.linear1", spec.batch * spec.time_tokens, d, spec.time_frequency, per_pass=True),
        Gemm("time_embed.linear2", spec.batch * spec.time_tokens, d, d, per_pass=True),
        Gemm("time_proj", spec.batch * spec.time_tokens, 6 * d, d, per_pass=True),
    ]


def ops(spec: Spec) -> list[Op]:
    """The operations of a pass in the order they run: once a pass, then those of one block."""
    b, s, w, text, t = spec.batch, spec.query_tokens, spec.window_tokens, spec.text_tokens, spec.time_tokens
    d, f, e = spec.hidden, spec.ffn, ELEMENT_BYTES
    stream, modulation = e * b * s * d, e * b * t * d  # one activation; one shift, scale or gate
    tokens = {"batch": b, "tokens": s, "hidden": d}

    def linear(name: str, category: str, m: int, n: int, k: int, **more: Any) -> Op:
        g = Gemm(name, m, n, k)
        moved = g.bytes_moved()
        return Op(name, category, "linear", {"m": m, "n": n, "k": k}, g.flop, moved, g.flop, moved, **more)

    def streams(name: str, category: str, kind: str, moved: int, pilot: int | None = None, **shape: int) -> Op:
        return Op(name, category, kind, {**tokens, **shape}, 0, moved, 0 if pilot is not None else None, pilot)

    def attention(name: str, category: str, keys: int) -> Op:
        shape = {"batch": b, "heads": spec.heads, "sq": s, "skv": keys, "head_size": spec.head_size}
        flop, moved = 4 * b * spec.heads * s * keys * spec.head_size, 2 * stream + 2 * e * b * keys * d
        return Op(name, category, "attention", shape, flop, moved, flop, moved)

    embed_weights = e * (spec.time_frequency * d + d * d)
    embed_ends = e * b * t * (spec.time_frequency + d)
    embed_flop = 2 * b * t * d * (spec.time_frequency + d)
    rotary = TABLE_BYTES * s * spec.head_size  # cosines and sines
    return [
        Op("time_embed", "time", "time_embed", {"batch": b, "tokens": t, "frequency": spec.time_frequency, "hidden": d},
           embed_flop, embed_ends + embed_weights, 0, embed_ends, per_pass=True),
        linear("time_proj", "time", b * t, 6 * d, d, per_pass=True),
        streams("norm.self", "norm", "norm", 2 * stream, 2 * stream),
        streams("modulate.self", "norm", "modulate", 2 * stream + 2 * modulation, frames=t),
        *(linear(f"self_attn.{p}", "self_attn", b * s, d, d) for p in "qkv"),
        streams("qk_norm.self", "norm", "qk_norm", 4 * stream + 2 * e * d, streams=2),
        streams("rope", "norm", "rope", 4 * stream + rotary, streams=2, head_size=spec.head_size),
        *([streams("kv_cache_write", "cache", "cache_write", 4 * stream, 2 * stream, window=w)] if spec.cache else []),
        attention("self_attn.flash", "self_attn", w),
        linear("self_attn.o", "self_attn", b * s, d, d),
        streams("residual_gate.self", "norm", "residual_gate", 3 * stream + modulation, frames=t),
        streams("norm.cross", "norm", "norm_affine", 2 * stream + 2 * e * d, 2 * stream),
        linear("cross_attn.q", "cross_attn", b * s, d, d),
        streams("qk_norm.cross", "norm", "qk_norm", 2 * stream + e * d, streams=1),
        attention("cross_attn.flash", "cross_attn", text),
        linear("cross_attn.o", "cross_attn", b * s, d, d),
        streams("residual.cross", "norm", "residual", 3 * stream),
        streams("norm.ffn", "norm", "norm", 2 * stream, 2 * stream),
        streams("modulate.ffn", "norm", "modulate", 2 * stream + 2 * modulation, frames=t),
        linear("ffn.linear1", "ffn", b * s, f, d),
        Op("ffn.gelu", "ffn", "gelu", {"batch": b, "tokens": s, "hidden": f}, 0, 2 * e * b * s * f, 0, 2 * e * b * s * f),
        linear("ffn.linear2", "ffn", b * s, d, f),
        streams("residual_gate.ffn", "norm", "residual_gate", 3 * stream + modulation, frames=t),
    ]  # fmt: skip


def block_flop(spec: Spec) -> int:
    """FLOP of one block, without what runs once a pass."""
    return sum(op.flop for op in ops(spec) if not op.per_pass)


def pass_flop(spec: Spec) -> int:
    """FLOP of one pass (one call of the whole model)."""
    return spec.depth * block_flop(spec) + sum(op.flop for op in ops(spec) if op.per_pass)


def pilot_totals(spec: Spec) -> tuple[int, int]:
    """(FLOP, bytes) of a block as the pilot's table counts them: what runs once a pass is charged to every block."""
    rows = [op for op in ops(spec) if op.bytes_pilot is not None]
    return sum(op.flop_pilot for op in rows), sum(op.bytes_pilot for op in rows)


def parameters(spec: Spec) -> int:
    """Elements of all weight matrices; norms and modulation are under 0.1 % of them and left out."""
    d = spec.hidden
    return spec.depth * (8 * d * d + 2 * d * spec.ffn) + spec.time_frequency * d + 7 * d * d


def cache_bytes(spec: Spec) -> int:
    """Keys and values of the window (where the workload has a cache) and of the text, of all blocks."""
    tokens = spec.text_tokens + (spec.window_tokens if spec.cache else 0)
    return ELEMENT_BYTES * spec.depth * 2 * spec.batch * tokens * spec.hidden


def activation_bytes(spec: Spec) -> int:
    """Peak of the live activations of one eager block: `ROTARY_STREAMS` while k is rotated (the residual stream, the
    norm's result, q, k, v, and in FP32 the rotated halves and their stack), or in the FFN the residual stream before and
    after attention, the norm's result, and the inner activation before and after GELU."""
    width = max(ROTARY_STREAMS * spec.hidden, 3 * spec.hidden + 2 * spec.ffn)
    return ELEMENT_BYTES * spec.batch * spec.query_tokens * width


def weight_bytes(spec: Spec) -> int:
    return ELEMENT_BYTES * parameters(spec)


def needed_bytes(spec: Spec) -> int:
    """Weights, caches and peak live activations."""
    return weight_bytes(spec) + cache_bytes(spec) + activation_bytes(spec)


@dataclass(frozen=True)
class ReferenceModel:
    """A published video model and the workload that stands for it."""

    key: str
    title: str
    workload: str
    publisher: str
    source: str
    note: str


def reference_models(path: Path | None = None) -> dict[str, ReferenceModel]:
    """configs/reference_video_models.json by id. Raises `WorkloadError` naming file, model and key."""
    path = path or CONFIGS / MODELS
    data = _read(path)
    models = data.get("models") if isinstance(data, dict) else None
    if not isinstance(models, dict):
        raise WorkloadError(f'{path}: models is missing; expected {{"models": {{"<id>": {{"title": ...}}}}}}')
    wanted = [f.name for f in dataclasses.fields(ReferenceModel) if f.name != "key"]
    for key, entry in models.items():
        if not isinstance(entry, dict) or entry.keys() != set(wanted):
            raise WorkloadError(f"{path}: models.{key}: expected an object with {', '.join(wanted)}")
        for name, value in entry.items():
            if not isinstance(value, str):
                raise WorkloadError(f"{path}: models.{key}.{name} is {value!r}; expected text")
        if entry["workload"] not in names():
            known = ", ".join(names())
            raise WorkloadError(f"{path}: models.{key}.workload is {entry['workload']!r}; expected one of {known}")
    return {key: ReferenceModel(key=key, **entry) for key, entry in models.items()}


def of_reference_model(key: str) -> str:
    """The workload of a reference model. Raises `WorkloadError` that lists the models."""
    models = reference_models()
    if key not in models:
        raise WorkloadError(f"unknown reference model {key!r}; known: {', '.join(models)}")
    return models[key].workload
