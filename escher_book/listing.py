"""`escher list`: what there is to choose from, and what is missing and why. It measures nothing and imports nothing heavy.

Backends are looked up, never imported: importing one may compile for minutes, or end the process.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import metadata, util
from pathlib import Path
from typing import Any

from escher_book import notebook, runner, setup_env
from escher_kernels import targets, workload
from escher_kernels.records import RecordError, read_json
from validation import tools
from validation.tools import running

BUILDS = {"cpu": "the CPU", "rocm": "ROCm", "cuda": "CUDA"}
KINDS = {"cpu": "a CPU host", "rocm": "an AMD GPU", "cuda": "an NVIDIA GPU"}
NARROWEST = 30  # columns; what leaves less for the details puts them on lines of their own


@dataclass(frozen=True)
class Row:
    """One thing: its name, its state or value, the details or the reason. `data`: figures in base units, for JSON alone."""

    name: str
    value: str
    details: str = ""
    data: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Section:
    key: str
    title: str
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Backend:
    """An optional package: the modules it may be found as, its distributions, torch builds that it works with."""

    name: str
    modules: tuple[str, ...]
    distributions: tuple[str, ...]
    builds: tuple[str, ...]
    purpose: str


BACKENDS = (
    Backend("AITER", ("aiter",), ("amd-aiter", "aiter"), ("rocm",), "attention on AMD GPUs"),
    Backend("flash_attn", ("flash_attn",), ("flash_attn",), ("rocm", "cuda"), "attention on GPUs"),
    Backend("Iris", ("iris",), ("iris",), ("rocm", "cuda"), "memory shared by GPUs, for fused kernels"),
    # what upstream builds is an extension module without a distribution
    Backend("HipKittens", ("hipkittens", "tk_kernel"), (), ("rocm",), "GEMM on gfx950, built from upstream's sources"),
    Backend("triton", ("triton",), ("triton", "pytorch-triton-rocm", "pytorch-triton", "triton-rocm", "amd-triton"),
            ("rocm", "cuda"), "compiled kernels"),
)  # fmt: skip


def families() -> list[Row]:
    """The notebooks, in the order of the book."""
    benchmark = runner.choose("benchmark")
    return [
        Row(family, path.name[:2], f"{_title(path)}; in {'benchmark and all' if family in benchmark else 'all only'}",
            {"benchmark": family in benchmark})
        for family, path in runner.families().items()
    ]  # fmt: skip


def _title(path: Path) -> str:
    """The first heading of a notebook; why there is none, where it cannot be read."""
    try:
        lines = "".join(read_json(path)["cells"][0]["source"]).splitlines()
    except (RecordError, KeyError, IndexError, TypeError) as exc:
        return f"no title: {exc}"
    return next((line.lstrip("# ").strip() for line in lines if line.startswith("# ")), "no title")


def workloads() -> list[Row]:
    """The workloads of configs/; one that cannot be used says why."""
    out = []
    for name in workload.names():
        try:
            spec = workload.load(name)
        except workload.WorkloadError as exc:
            out.append(Row(name, "cannot be used", str(exc)))
            continue
        count = workload.parameters(spec)
        value = f"{spec.depth} blocks, {spec.query_tokens} tokens, {count / 1e9:.3g} B parameters"
        derived = f"; derived from {spec.derived_from}: {(spec.derived_why or '').removeprefix(f'{name}: ')}"
        details = spec.title + (derived if spec.derived_from else "")
        data = {"depth": spec.depth, "query_tokens": spec.query_tokens, "window_tokens": spec.window_tokens,
                "parameters": count, "derived_from": spec.derived_from}  # fmt: skip
        out.append(Row(name, value, details, data))
    return out


def devices() -> list[Row]:
    """Targets with their rated dense peaks, `cpu`, and the groups. Raises ConfigError."""
    config = targets.load_config()
    out = [Row("auto", "the default", "the device that is found")]
    for key in [t["key"] for t in config["targets"]]:
        p = config.profile(key)
        peaks = {d: p.dense_peak_flop_s.get(d) for d in ("bf16", "fp16")}
        shown = ", ".join(f"{d.upper()} {v / 1e12:g}" for d, v in peaks.items() if v)
        memory = f"{p.memory_label_gb:g} GB {p.memory_type}"
        value = f"{shown} TFLOP/s; {p.bandwidth_bytes_s / 1e9:g} GB/s"
        data = {"bf16_flop_s": peaks["bf16"], "fp16_flop_s": peaks["fp16"], "bandwidth_bytes_s": p.bandwidth_bytes_s,
                "memory_bytes": p.memory_bytes}  # fmt: skip
        out.append(Row(key, value, f"{p.name}; {memory}", data))
    out.append(Row("cpu", "no rated figures", f"{config.profile('cpu').name}: its peak is probed"))
    for key, group in config["groups"].items():
        members = f"the one that is found of {', '.join(group['members'])}; else {group['default']}"
        out.append(Row(key, "group", members, {"members": group["members"], "default": group["default"]}))
    return out


def models() -> list[Row]:
    """The reference models. Raises WorkloadError."""
    out = []
    for key, model in workload.reference_models().items():
        given = dataclasses.asdict(model)
        hub = next((v for k, v in given.items() if k.startswith("huggingface") and v), None)
        details = "; ".join(filter(None, (model.title, model.note, hub and f"Hugging Face {hub}")))
        out.append(Row(key, model.workload or "no workload", details, {"workload": model.workload, "huggingface": hub}))
    return out


def outside_tools(kind: str | None = None, path: str | None = None) -> list[Row]:
    """The outside tools: where they are, whether they are installed, whether they apply to this `kind` of device.

    `path`: where to look, as $PATH has it.
    """
    kind = kind or setup_env.detect_device()[0]
    path = os.pathsep.join([os.environ.get("PATH", os.defpath) if path is None else path, running.ROCM_BIN])
    out = []
    for name in tools.MODULES:
        module = tools.module(name)
        found = {e: where for e in module.EXECUTABLES if (where := shutil.which(e, path=path))}
        applies = running.fits(name, kind)
        details = ", ".join(found.values()) or f"looked for {', '.join(module.EXECUTABLES)}"
        value = "installed" if found else "not installed"
        if not applies:
            value, details = "does not apply", f"to {KINDS[kind]}" + (f"; {details}" if found else "")
        out.append(Row(module.NAME, value, details, {"applies": applies, "paths": found}))
    return out


def build_of(version: str | None) -> str | None:
    """ "rocm", "cuda" or "cpu", from the local part of torch's version ("2.9.0+rocm6.4"); None where it does not say."""
    local = (version or "").partition("+")[2]
    starts = {"rocm": "rocm", "cu": "cuda", "cpu": "cpu"}
    return next((kind for start, kind in starts.items() if local.startswith(start)), None)


def backends(torch_version: str | None = None, path: str | None = None) -> list[Row]:
    """The optional backends, and numactl, which runs may be bound with. `torch_version` None: that of this environment."""
    version = torch_version or notebook.torch_version()
    out = [_backend(b, version) for b in BACKENDS]
    found = shutil.which("numactl", path=path)
    out.append(Row("numactl", "installed" if found else "not installed", f"{found or 'not on PATH'}; binds a run to NUMA nodes"))
    return out


def _backend(backend: Backend, torch_version: str | None) -> Row:
    found, build = None, build_of(torch_version)
    for module in backend.modules:
        try:
            found = util.find_spec(module)
        except (ImportError, ValueError) as exc:  # a module without a spec, a finder that fails
            return Row(backend.name, "not usable", f"{module} cannot be looked up: {exc}; {backend.purpose}")
        if found:
            break
    wanted = " or ".join(backend.modules)
    if found is None:
        return Row(backend.name, "not installed", f"no module named {wanted}; {backend.purpose}")
    if found.origin is None:
        where = next(iter(found.submodule_search_locations or ()), "?")
        return Row(backend.name, "not installed", f"{where} is a folder, not a package; {backend.purpose}")
    version = _version(backend.distributions)
    have, data = f"version {version}" if version else found.origin, {"version": version, "origin": found.origin}
    if torch_version is None:
        return Row(backend.name, "not usable", f"{have} is installed, but torch is not; {backend.purpose}", data)
    if build and build not in backend.builds:
        why = f"{have} is installed, but this torch build ({torch_version}) is for {BUILDS[build]}"
        return Row(backend.name, "not usable", f"{why}; {backend.purpose}", data)
    return Row(backend.name, "installed", f"{have}; {backend.purpose}", data)


def _version(distributions: Sequence[str]) -> str | None:
    for name in distributions:
        try:
            return metadata.version(name)
        except (metadata.PackageNotFoundError, KeyError):  # none, or one whose metadata lacks its version
            continue
    return None


SECTIONS: dict[str, tuple[str, Callable[[], list[Row]]]] = {
    "families": ("Families", families),
    "workloads": ("Workloads", workloads),
    "targets": ("Targets, rated dense", devices),
    "models": ("Reference models", models),
    "tools": ("Outside tools", outside_tools),
    "backends": ("Optional backends", backends),
}


def sections(what: str = "all") -> list[Section]:
    """The section `what`, or all. Raises ValueError that lists them, ConfigError and WorkloadError."""
    if what not in ("all", *SECTIONS):
        raise ValueError(f"unknown {what!r}; known: all, {', '.join(SECTIONS)}")
    return [Section(k, title, tuple(rows())) for k, (title, rows) in SECTIONS.items() if what in ("all", k)]


def as_text(parts: Sequence[Section], width: int | None = None) -> str:
    """Three columns a section. `width` None: the terminal's; without a terminal each row is one line, as grep likes it."""
    width = width or shutil.get_terminal_size((10**6, 24)).columns
    return "\n\n".join("\n".join([part.title, *_lines(part, width)]) for part in parts)


def _lines(part: Section, width: int) -> list[str]:
    """The rows of a section in as many columns as the width has room for: three, two and details below, or one."""
    name, value = (max((len(getattr(r, f)) for r in part.rows), default=0) for f in ("name", "value"))
    two = 2 + name + 2 + value
    indent = two + 2 if two + 2 + NARROWEST <= width else 6
    out = []
    for r in part.rows:
        text = textwrap.wrap(r.details, max(NARROWEST, width - indent), break_long_words=False, break_on_hyphens=False)
        head = [f"  {r.name:{name}}  {r.value:{value}}  "] if two <= width else [f"  {r.name}", f"    {r.value}"]
        if indent > 6 and text:
            head[0] += text.pop(0)
        out += [*head, *(" " * indent + line for line in text)]
    return [line.rstrip() for line in out]


def to_json(parts: Sequence[Section]) -> dict[str, list[dict[str, Any]]]:
    """Section -> its rows: name, value, details, and figures in base units."""
    return {p.key: [{"name": r.name, "value": r.value, "details": r.details, **r.data} for r in p.rows] for p in parts}
