"""Which device is this, which profile was asked for, and may rated figures stand beside measured ones?

A wrong answer here falsifies every percentage of the book, so nothing is guessed: a name that no profile matches, a
MIG slice, a compute partition or a cut-down part has no profile (`None` and a reason), never a default. A name
decides only if the compute units and the memory fit it too; a blank or generic name is decided by architecture,
compute units, memory, PCI id and maximum clock. Rated peaks are the vendor's dense ones.

`configs/report_config.json` holds every figure with its source. torch is imported inside `detect` only.
"""

import json
import math
import os
import platform
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

CONFIG_ENV = "ESCHER_REPORT_CONFIG"  # another report_config.json, where no path is given
GENERIC_NAMES = ("", "amd radeon graphics", "nvidia graphics device")  # amdgpu.ids missing or older than the device
_VENDOR_OF = {"cuda": "nvidia", "rocm": "amd"}
_MEMORY_FLOOR = 0.95  # torch shows up to 1.5 % less than the driver, a full-device VF 0.2 % less; half a device 50 %
_MEMORY_CEILING = 1.10  # GDDR6 with ECC off shows 6.7 % more


class ConfigError(ValueError):
    """The configuration cannot be used; one line per error: file, key path, what was got, what is expected."""


class TargetError(ValueError):
    """A TARGET that is no key and no group; the message lists them."""


class DeviceError(RuntimeError):
    """The device asked for cannot be used here; the message says why, in one line."""


class _Json:
    """Frozen dataclasses that travel as plain dicts (run header, notebook parameters)."""

    def to_json(self) -> dict:
        return json.loads(json.dumps(asdict(self), allow_nan=False))

    @classmethod
    def from_json(cls, data: dict):
        """The object that `to_json` wrote. Raises TypeError for an unknown or a missing field."""
        return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in data.items()})


@dataclass(frozen=True)
class Profile(_Json):
    """One target of the configuration in base units. None: the unit does not exist or no source was found.

    dense_peak_flop_s by dtype (int8: OP/s). llc_bytes is the largest last-level cache, Infinity Cache included.
    roof_floor_frac is a share of the dense peak of compute_dtype (on a CPU: of the probed peak), or None with the
    reason in roof_floor_note. link and pcie as in the configuration (GB/s per direction).
    """

    key: str
    name: str
    vendor: str
    kind: str  # "gpu" or "cpu"
    arch: str | None
    compute_dtype: str
    dense_peak_flop_s: dict[str, float | None]
    peak_formula: str
    bandwidth_bytes_s: float | None
    memory_type: str | None
    memory_bytes: int | None
    memory_label_gb: float | None
    l2_bytes: int | None
    llc_bytes: int | None
    compute_units: int | None
    boost_hz: float | None
    tdp_w: float | None
    roof_floor_frac: float | None
    roof_floor_note: str
    roof_floor_sources: tuple[str, ...]
    bandwidth_floor_frac: float | None
    bandwidth_floor_note: str
    link: dict | None
    pcie: str | None
    sources: tuple[str, ...]


@dataclass(frozen=True)
class Found(_Json):
    """What the machine has. `kind` is "cuda", "rocm" or "cpu"; arch is the gfx name without features, "sm_90", or the
    machine name; compute_units are CU, SM or physical cores; llc_bytes is the sum of the L3 instances of the allowed
    CPUs, or the L2 that CUDA reports (None on ROCm, where the runtime hides the Infinity Cache); slice is a text such
    as "MIG 1g.18gb" or "CPX partition"; note says what a reader must know, e.g. a GPU that could not be used."""

    kind: str
    raw_name: str
    arch: str | None = None
    compute_units: int | None = None
    total_memory_bytes: int | None = None
    max_clock_hz: float | None = None
    count: int = 1
    slice: str | None = None
    llc_bytes: int | None = None
    pci_id: str | None = None
    note: str = ""


@dataclass(frozen=True)
class Selection(_Json):
    """The answer of `resolve`: `profile` gives the rated columns, `found_profile` is the device's own; only where
    `same_device` is true may the two be compared, and `reason` says why (not)."""

    asked: str
    profile: Profile | None
    found_profile: Profile | None
    same_device: bool
    reason: str

    @classmethod
    def from_json(cls, data: dict) -> "Selection":
        made = {k: Profile.from_json(data[k]) if data[k] else None for k in ("profile", "found_profile")}
        return cls(**{**data, **made})


class Config(dict):
    """The validated configuration, a dict of its JSON, with `path` and the look-ups below."""

    path: Path

    def profile(self, key: str) -> Profile:
        """The profile of a target key or "cpu", in base units. Raises TargetError."""
        for t in self["targets"]:
            if t["key"] == key:
                return _profile(t)
        if key == "cpu":
            return _profile(self["cpu"])
        raise TargetError(_unknown_target(key, self))


def _profile(t: dict) -> Profile:
    memory, roof, band = t.get("memory", {}), t["roof_floor_frac"], t["bandwidth_floor_frac"]

    def scaled(value, power: str) -> float | None:  # through decimal text, so that no rounding tail appears
        return None if value is None else float(f"{value}{power}")

    return Profile(
        key=t["key"], name=t["name"], vendor=t["vendor"], kind=t["kind"], arch=t.get("arch"),
        compute_dtype=t["compute_dtype"], peak_formula=t["peak_formula"],
        dense_peak_flop_s={k: scaled(v, "e12") for k, v in t.get("dense_peaks_tflops", {}).items()},
        bandwidth_bytes_s=scaled(t.get("bandwidth_gbs"), "e9"), boost_hz=scaled(t.get("boost_mhz"), "e6"),
        memory_type=memory.get("type"), memory_bytes=memory.get("bytes"), memory_label_gb=memory.get("label_gb"),
        roof_floor_frac=roof["value"], roof_floor_note=roof["note"], roof_floor_sources=tuple(roof["source"]),
        bandwidth_floor_frac=band["value"], bandwidth_floor_note=band["note"], sources=tuple(t["sources"]),
        **{k: t.get(k) for k in ("l2_bytes", "llc_bytes", "compute_units", "tdp_w", "link", "pcie")},
    )  # fmt: skip


# ------------------------------------------------------------------------------------------- the configuration


def is_number(v) -> bool:
    return isinstance(v, int | float) and not isinstance(v, bool) and math.isfinite(v)


def is_whole(v) -> bool:
    return isinstance(v, int) and not isinstance(v, bool) and v >= 0


def _text(v) -> bool:
    return isinstance(v, str)


def _list(of):
    return lambda v: isinstance(v, list) and all(map(of, v))


def _regex(v) -> bool:
    try:
        return _text(v) and bool(re.compile(v).pattern)
    except re.error:
        return False


_CPU = re.compile(r"(\d+):(\d+)-(\d+)|0x[0-9a-f]+")  # x86 family and models in decimal, or an Arm part
_KINDS = {  # what a value must be, in words -> its test
    "text": _text,
    "a word in small letters": lambda v: _text(v) and bool(re.fullmatch(r"[a-z0-9_]+", v)),
    "a positive number": lambda v: is_number(v) and v > 0,
    "a fraction between 0 and 1": lambda v: is_number(v) and 0 <= v <= 1,
    "a whole number": is_whole,
    "a list of texts": _list(_text),
    "a list of whole numbers": _list(is_whole),
    "a list of family:first-last model or part": _list(lambda x: _text(x) and bool(_CPU.fullmatch(x))),
    "a valid regular expression": _regex,
    '"gpu" or "cpu"': lambda v: v in ("gpu", "cpu"),
    '"bf16" or "fp16"': lambda v: v in ("bf16", "fp16"),
    "the number 1": lambda v: v == 1 and not isinstance(v, bool),
}
_DEVICE = (  # of every target and of the CPU profile: keys ("?": may be null), what they must be, an example
    ("key vendor", "a word in small letters", '"mi355x"'),
    ("name peak_formula roof_floor_frac.note bandwidth_floor_frac.note", "text", '"AMD Instinct MI355X"'),
    ("kind", '"gpu" or "cpu"', '"gpu"'),
    ("compute_dtype", '"bf16" or "fp16"', '"bf16"'),
    ("roof_floor_frac.value? bandwidth_floor_frac.value?", "a fraction between 0 and 1", "0.6"),
    ("sources roof_floor_frac.source bandwidth_floor_frac.source", "a list of texts", '["rvs"]'),
)
_TARGET = (
    ("arch fallback.arch", "text", '"gfx950"'),
    ("match exclude?", "a valid regular expression", r'"\\bMI355X?\\b"'),
    ("memory.type link.type pcie?", "text", '"HBM3E"'),
    ("device_names.torch device_names.smi device_names.pci", "a list of texts", '["AMD Instinct MI355X"]'),
    ("fallback.compute_units", "a list of whole numbers", "[256]"),
    ("fallback.memory_mib? fallback.max_clock_mhz?", "a positive number", "2400"),
    ("dense_peaks_tflops.*? sparse_peaks_tflops.*?", "a positive number", "2516.6"),
    ("bandwidth_gbs memory.label_gb boost_mhz? tdp_w?", "a positive number", "1000"),
    ("memory.bytes l2_bytes? llc_bytes? compute_units?", "a whole number", "256"),
)
_TOP = (
    ("schema", "the number 1", "1"),
    ("groups.*.members", "a list of texts", '["h100_sxm", "h100_pcie"]'),
    ("groups.*.default", "a word in small letters", '"h100_sxm"'),
    ("grades.* sources.*.title sources.*.address? sources.*.grade", "text", '"..."'),
)
_CORE = (
    ("uarch detect.vendor", "text", '"AuthenticAMD"'),
    ("detect.cpus", "a list of family:first-last model or part", '["25:16-31"]'),
    ("detect.flags_all detect.flags_none", "a list of texts", '["avx512_bf16"]'),
    ("fp32 bf16?", "a whole number", "64"),
)


def wrong(path: str, got, expected: str, example) -> str:
    """One error: where, what was found (...: nothing), what is expected."""
    is_ = "is missing" if got is ... else f"is {json.dumps(got, ensure_ascii=False)[:60]}"
    return f"{path.strip('.')} {is_}; expected {expected}, e.g. {example}"


def check(node, rules: tuple, at: str = "") -> Iterator[str]:
    """The errors of `node` against rules (keys, what they must be, an example); a key that ends in ? may be null."""
    for keys, kind, example in rules:
        for key in keys.split():
            yield from _check_one(node, key.rstrip("?").split("."), at, kind, key.endswith("?"), example)


def _check_one(node, steps: list[str], path: str, kind: str, nullable: bool, example: str) -> Iterator[str]:
    if not steps:
        if node is ... or not (_KINDS[kind](node) or nullable and node is None):
            yield wrong(path, node, kind + " or null" * nullable, example)
    elif not isinstance(node, dict):
        yield wrong(path, node, "an object", f'{{"{steps[0]}": {example}}}')
    else:
        for key in list(node) if steps[0] == "*" else steps[:1]:
            yield from _check_one(node.get(key, ...), steps[1:], f"{path}.{key}", kind, nullable, example)


def _errors(raw) -> Iterator[str]:
    if not isinstance(raw, dict):
        yield wrong("the file", raw, "an object", '{"schema": 1}')
        return
    yield from check(raw, _TOP)
    cpu = raw.get("cpu", ...)
    yield from check(cpu, _DEVICE, "cpu")
    rows = {"targets": raw.get("targets", ...)}
    if isinstance(cpu, dict):
        rows["cpu.flop_per_cycle_per_core"] = cpu.get("flop_per_cycle_per_core", ...)
    for path, items in rows.items():
        if not isinstance(items, list):
            yield wrong(path, items, "a list of objects", "[{...}]")
            continue
        for i, item in enumerate(items):
            label = (item.get("key") or item.get("uarch") if isinstance(item, dict) else None) or i
            yield from check(item, _DEVICE + _TARGET if path == "targets" else _CORE, f"{path}[{label}]")
    targets = raw.get("targets") if isinstance(raw.get("targets"), list) else []
    keys = [t["key"] for t in targets if isinstance(t, dict) and _text(t.get("key"))]
    groups = raw.get("groups") if isinstance(raw.get("groups"), dict) else {}
    names = ["auto", "cpu", *keys, *groups]
    for key in (k for i, k in enumerate(names) if k in names[:i]):
        yield f'targets, groups: the key "{key}" is used twice; expected every key once, e.g. "{key}_2"'
    for name, group in groups.items():
        members = group.get("members") if isinstance(group, dict) else None
        for member in members if isinstance(members, list) else ():
            if member not in keys and targets:
                yield wrong(f"groups.{name}.members", member, "keys of targets", ", ".join(keys[:3]))
        if isinstance(members, list) and group.get("default") not in members:
            yield wrong(f"groups.{name}.default", group.get("default", ...), "a member", ", ".join(map(str, members)))


def load_config(path: Path | str | None = None, more: Callable[[dict], Iterator[str]] = lambda _: iter(())) -> Config:
    """The validated configuration: `path`, else $ESCHER_REPORT_CONFIG, else configs/report_config.json of this tree.

    Checks what measuring needs; `more` gives the errors of the rest. Raises ConfigError, one line per error."""
    default = Path(__file__).resolve().parent.parent / "configs" / "report_config.json"
    path = Path(path or os.environ.get(CONFIG_ENV) or default)
    shown = f"configs/{default.name}" if path == default else str(path)
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as e:
        raise ConfigError(f"{shown}: line {e.lineno}, column {e.colno}: {e.msg}; expected valid JSON") from e
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"{shown}: {e}; expected a readable UTF-8 JSON file, or set {CONFIG_ENV}") from e
    errors: dict[str, str] = {}
    for error in (*_errors(raw), *(more(raw) if isinstance(raw, dict) else ())):
        errors.setdefault(error.partition("; expected")[0], error)  # one a place, however many keys are below it
    if errors:
        raise ConfigError("\n".join(f"{shown}: {error}" for error in errors.values()))
    config = Config(raw)
    config.path = path
    return config


# --------------------------------------------------------------------------------------------------- the machine


def detect(device: str = "auto", root: Path = Path("/")) -> Found:
    """The first GPU that torch sees, or the CPU. `device`: "auto", "cpu", "cuda" or "rocm"; `root` stands for / in
    tests. Raises DeviceError where a GPU is asked for and cannot be used; "auto" then returns the CPU, and its `note`
    says so if the machine has a GPU."""
    if device not in ("auto", "cpu", "cuda", "rocm"):
        raise DeviceError(f'device "{device}" is unknown; expected auto, cpu, cuda or rocm')
    if device == "cpu":
        return _cpu(root)
    try:
        import torch

        problem = f"torch {torch.__version__} sees no GPU"
        if not (torch.version.hip or torch.version.cuda):
            problem = f"torch {torch.__version__} is built for the CPU only"
        elif torch.cuda.is_available():
            found = _gpu(torch, root)
            if device in ("auto", found.kind):
                return found
            problem = f"torch {torch.__version__} is built for {found.kind}"
    except (ImportError, OSError) as e:
        problem = f"torch cannot be imported ({str(e).splitlines()[0]})"
    except RuntimeError as e:
        problem = f"torch cannot use the GPU ({str(e).splitlines()[0]})"
    nodes = [n for n in ("dev/kfd", "dev/nvidiactl") if (root / n).exists()]
    for node in nodes:
        if not os.access(root / node, os.R_OK | os.W_OK):
            group = (root / node).stat().st_gid
            problem += f"; /{node} (group {group}) cannot be opened by uid {os.getuid()}, groups {os.getgroups()}"
    there = f"GPU present (/{', /'.join(nodes)}) but not usable by this torch: {problem}"
    if device == "auto":
        return _cpu(root, there if nodes else "")
    raise DeviceError(
        f'device "{device}": {there if nodes else problem + "; no /dev/kfd and no /dev/nvidiactl here"}; '
        f'expected a torch built for {device} and access to the device, or "cpu"'
    )


def _gpu(torch, root: Path) -> Found:
    p, rocm = torch.cuda.get_device_properties(0), bool(torch.version.hip)
    clock_khz = getattr(p, "clock_rate", None)  # ROCm builds of torch before 2.10 do not have it
    mig = re.search(r"\bMIG\b.*", p.name)
    part = mig.group(0) if mig else None
    if not rocm and not part and os.environ.get("CUDA_VISIBLE_DEVICES", "").startswith("MIG-"):
        part = "MIG (CUDA_VISIBLE_DEVICES names one)"
    amd = [d for d in root.glob("sys/class/drm/card*/device") if _read(d / "vendor") == "0x1002"] if rocm else []
    ids, modes = ({_read(d / name) for d in amd} for name in ("device", "current_compute_partition"))
    if len(modes) == 1 and (mode := modes.pop()) not in ("", "SPX"):
        part = f"{mode} partition"
    return Found(
        kind="rocm" if rocm else "cuda",
        raw_name=p.name,
        arch=p.gcnArchName.split(":")[0] if rocm else f"sm_{p.major}{p.minor}",
        compute_units=p.multi_processor_count,
        total_memory_bytes=p.total_memory,
        max_clock_hz=clock_khz * 1e3 if clock_khz else None,
        count=sum(_alike(torch.cuda.get_device_properties(i), p) for i in range(torch.cuda.device_count())),
        slice=part,
        llc_bytes=None if rocm else getattr(p, "L2_cache_size", None),
        pci_id=f"1002:{ids.pop().removeprefix('0x')}" if len(ids) == 1 else None,  # of one kind: it is device 0's
    )


def _alike(one, other) -> bool:
    """Devices of one kind: a node may hold another one beside (an integrated GPU)."""
    return all(getattr(one, n) == getattr(other, n) for n in ("name", "multi_processor_count", "total_memory"))


def _cpu(root: Path, note: str = "") -> Found:
    cpus = root / "sys/devices/system/cpu"
    cores, l3 = set(), {}
    for n in os.sched_getaffinity(0):
        cores.add(_read(cpus / f"cpu{n}/topology/thread_siblings_list") or str(n))
        for cache in (cpus / f"cpu{n}/cache").glob("index*"):
            if _read(cache / "level") == "3" and (size := re.fullmatch(r"(\d+)K", _read(cache / "size"))):
                l3[_read(cache / "shared_cpu_list")] = int(size.group(1)) * 1024
    model = re.search(r"^model name\s*:\s*(.+)$", _read(root / "proc/cpuinfo"), re.M)
    return Found(
        kind="cpu",
        raw_name=model.group(1).strip() if model else f"{platform.machine()} CPU",
        arch=platform.machine(),
        compute_units=len(cores),
        total_memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        llc_bytes=sum(l3.values()) or None,
        note=note,
    )


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


# ------------------------------------------------------------------------------------------------ which profile


def identify(found: Found, config: Config) -> tuple[Profile | None, str]:
    """The profile of the device found, or None; and the reason. Never a default, never a whole device for a part."""
    if found.kind == "cpu":
        return config.profile("cpu"), f"CPU host ({found.raw_name})"
    name = found.raw_name.replace("_", " ").strip(" '\"")
    shown = f'device "{name}" ({found.arch}, {found.compute_units} units, {_gib(found.total_memory_bytes)})'
    if found.slice:
        return None, f"{shown} is a part of a device ({found.slice}), which has no rated figures of its own"
    ours = [t for t in config["targets"] if t["vendor"] == _VENDOR_OF.get(found.kind)]
    if name.lower() in GENERIC_NAMES:
        return _by_facts(found, ours, shown, config)
    named = [t for t in ours if re.search(t["match"], name, re.I)]
    hits = [t for t in named if not (t["exclude"] and re.search(t["exclude"], name, re.I))]
    if not hits and named:
        return None, f"unknown {shown}: its name marks it as a slice or another part than {named[0]['name']}"
    if len(hits) != 1:
        return None, f"unknown {shown}: {len(hits)} profiles match its name, expected 1"
    if why := _misfit(found, hits[0]):
        return None, f"{shown} has the name of {hits[0]['name']}, but {why}"
    return config.profile(hits[0]["key"]), f"{shown} matches {hits[0]['key']} by name"


def _gib(size: int | None) -> str:
    return "memory unknown" if size is None else f"{size / 2**30:.1f} GiB"


def _misfit(found: Found, target: dict) -> str:
    """Why a device whose name matches is not the target: "", or one sentence."""
    full, units, memory = target["fallback"], found.compute_units, found.total_memory_bytes
    note = f" ({full['note']})" if full.get("note") else ""
    if found.arch and found.arch != full["arch"]:
        return f"its architecture is {found.arch}, not {full['arch']}"
    if units and full["compute_units"] and units not in full["compute_units"]:
        what = "a slice, a partition or a smaller part" if units < full["compute_units"][0] else "another part"
        return f"it has {units} compute units, not {full['compute_units'][0]}: {what}{note}"
    size = full["memory_mib"] and full["memory_mib"] * 2**20
    if memory and size and memory < _MEMORY_FLOOR * size:
        return f"it has {_gib(memory)}, not {_gib(size)}: a slice, a partition or a smaller part"
    if memory and size and memory > _MEMORY_CEILING * size:
        return f"it has {_gib(memory)}, not {_gib(size)}: another part"
    return ""


def _by_facts(found: Found, targets: list[dict], shown: str, config: Config) -> tuple[Profile | None, str]:
    """A blank or generic name: what the device has must fit one profile only. Memory is held closer than for a name."""
    if not (found.arch and found.compute_units and found.total_memory_bytes):
        return None, f"unknown {shown}: a generic name, and too few facts to tell the device by"
    fits = [t for t in targets if not _misfit(found, t)]
    fits = [t for t in fits if found.total_memory_bytes < 1.02 * 2**20 * (t["fallback"]["memory_mib"] or math.inf)]
    if found.pci_id:
        fits = [t for t in fits if found.pci_id in (t["device_names"]["pci"] or [found.pci_id])]
    if len(fits) > 1 and found.max_clock_hz:
        mhz = found.max_clock_hz / 1e6
        fits = [t for t in fits if abs(mhz / (t["fallback"]["max_clock_mhz"] or mhz) - 1) < 0.01]
    if len(fits) == 1:
        return config.profile(fits[0]["key"]), f"{shown} has a generic name; what it has fits {fits[0]['key']} only"
    many = f"{' and '.join(t['key'] for t in fits)} fit it" if fits else "no profile fits it"
    return None, f"unknown {shown}: a generic name, and {many}"


def resolve(asked: str, found: Found, config: Config) -> Selection:
    """What TARGET asks for against what is there. `asked`: "auto", "cpu", a key or a group. Raises TargetError."""
    own, why = identify(found, config)
    why += f"; {found.note}" if found.note else ""
    asked = asked.strip().lower()
    if asked == "auto":
        return Selection(asked, own, own, own is not None, why if own else f"no rated basis: {why}")
    key, said = asked, f"TARGET={asked}"
    if group := config["groups"].get(asked):
        here = own is not None and own.key in group["members"]
        key = own.key if here else group["default"]
        said += f" is a group: {key}, " + ("the member detected" if here else "its default, as no member is detected")
    profile = config.profile(key)
    if own is not None and own.key == profile.key:
        return Selection(asked, profile, own, True, f"{said}: {why}")
    reason = (
        f"{said}: rated and theory figures are of {profile.name}, measured ones of another device, so they are "
        f"not compared; found {own.name if own else 'no known device'}: {why}"
    )
    return Selection(asked, profile, own, False, reason)


def _unknown_target(asked: str, config: Config) -> str:
    keys = ", ".join(t["key"] for t in config["targets"])
    return f'TARGET "{asked}" is unknown; expected auto, cpu, a key ({keys}) or a group ({", ".join(config["groups"])})'


def nominal_cpu_flop_per_cycle(cpuinfo: str, config: Config) -> tuple[str | None, int | None, int | None, str]:
    """(core, BF16, FP32, note): FLOP per clock per core from the text of /proc/cpuinfo, first processor. None where
    the table has no row or the core no such unit; the note says what to know. Nominal, so shown and never judged."""
    first = cpuinfo.strip().split("\n\n")[0]
    facts = {k.strip(): v.strip() for k, _, v in (line.partition(":") for line in first.splitlines())}
    vendor = facts.get("vendor_id") or facts.get("CPU implementer", "")
    family, model, part = (facts.get(k, "") for k in ("cpu family", "model", "CPU part"))
    number = int(model) if model.isdecimal() else -1
    flags = set((facts.get("flags") or facts.get("Features", "")).split())

    def same_core(spec: str) -> bool:
        of, low, high = _CPU.fullmatch(spec).groups()
        return spec == part if of is None else of == family and int(low) <= number <= int(high)

    for row in config["cpu"]["flop_per_cycle_per_core"]:
        d = row["detect"]
        if d["vendor"] == vendor and flags >= set(d["flags_all"]) and not flags & set(d["flags_none"]):
            if any(map(same_core, d["cpus"])):
                return row["uarch"], row["bf16"], row["fp32"], row.get("note") or ""
    what = f"vendor {vendor or 'unknown'}, " + (f"part {part}" if part else f"family {family}, model {model}")
    return None, None, None, f"no row for {what} with the flags shown (a guest may hide some): probe the peak"
