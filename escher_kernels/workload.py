"""The workload: the geometry of the model, the GEMMs it runs, and the smaller spec a small host runs instead.

A spec is a JSON file in configs/. Every count of tokens, FLOP and bytes derives from it. No torch.
"""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
CPU_QUERY_DIVISOR = 12  # 4680 query and 18720 cached tokens become 390 and 1560


class WorkloadError(ValueError):
    """A spec that cannot be used. One line: the file, the key, what was found and what is expected."""


@dataclass(frozen=True)
class Spec:
    """Geometry of a video transformer. Tokens are counted per chunk; `window_tokens` is what a query attends to."""

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
    note: str = ""
    derived_from: str | None = None
    derived_why: str | None = None
    pilot: dict[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


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

    def bytes_moved(self, element_bytes: int = 2) -> int:
        return element_bytes * (self.m * self.k + self.k * self.n + self.m * self.n)


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
        if f.type == "int" and (isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 10**7):
            raise WorkloadError(f"{where}: {name} is {value!r}; expected a whole number from 1 to 10000000")
        if f.type == "str" and not isinstance(value, str):
            raise WorkloadError(f"{where}: {name} is {value!r}; expected text")
        if name == "name" and not re.fullmatch(r"[\w.-]+", value):  # it becomes part of a directory's name
            raise WorkloadError(f"{where}: name is {value!r}; expected letters, digits, - _ . only")
    spec = Spec(**data)
    if spec.heads * spec.head_size != spec.hidden:
        raise WorkloadError(
            f"{where}: heads x head_size is {spec.heads} x {spec.head_size} = {spec.heads * spec.head_size}, "
            f"but hidden is {spec.hidden}; the two must be equal"
        )
    return spec


def names() -> list[str]:
    """The workloads in configs/: the files that hold a geometry."""
    out = []
    for path in sorted(CONFIGS.glob("*.json")):
        try:
            if "hidden" in json.loads(path.read_text(encoding="utf-8")):
                out.append(path.stem)
        except (OSError, ValueError, TypeError):
            continue
    return out


def load(name_or_path: str = "escher_14b_480p") -> Spec:
    """A workload of configs/ by name, or a file by path. Raises `WorkloadError` that lists the names."""
    path = Path(name_or_path) if name_or_path.endswith(".json") else CONFIGS / f"{name_or_path}.json"
    if not path.is_file():
        raise WorkloadError(f"unknown workload {name_or_path!r}; known: {', '.join(names())}, or a .json file")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as exc:
        raise WorkloadError(f"{path}: cannot be read: {exc}") from None
    except json.JSONDecodeError as exc:
        raise WorkloadError(f"{path}:{exc.lineno}:{exc.colno}: no valid JSON ({exc.msg})") from None
    return from_json(data, str(path))


def derive_for_cpu(spec: Spec) -> Spec:
    """What a CPU host can run in minutes: depth 1 first (intensity stays), then tokens with Sq : Skv fixed.

    Hidden, FFN and head size never change.
    """
    return dataclasses.replace(
        spec,
        name=f"{spec.name}-cpu",
        depth=1,
        query_tokens=max(1, spec.query_tokens // CPU_QUERY_DIVISOR),
        window_tokens=max(1, spec.window_tokens // CPU_QUERY_DIVISOR),
        derived_from=spec.name,
        derived_why=f"CPU host: depth {spec.depth} -> 1, tokens / {CPU_QUERY_DIVISOR}; intensity hardly changes",
        pilot=None,
    )


def gemms(spec: Spec) -> list[Gemm]:
    """Every GEMM of the workload by name: those of one block, then those that run once a pass or once a prompt."""
    m, d, f, text = spec.batch * spec.query_tokens, spec.hidden, spec.ffn, spec.batch * spec.text_tokens
    return [
        *(Gemm(f"self_attn.{p}", m, d, d) for p in "qkvo"),
        *(Gemm(f"cross_attn.{p}", m, d, d) for p in "qo"),
        Gemm("ffn.linear1", m, f, d),
        Gemm("ffn.linear2", m, d, f),
        *(Gemm(f"cross_attn.{p}", text, d, d, per_pass=True) for p in "kv"),
        Gemm("time_embed.linear1", spec.time_tokens, d, spec.time_frequency, per_pass=True),
        Gemm("time_embed.linear2", spec.time_tokens, d, d, per_pass=True),
        Gemm("time_proj", spec.time_tokens, 6 * d, d, per_pass=True),
    ]
