"""What the kernel and nvidia-smi say of every GPU: partition, power cap, clocks, link, health, who uses it. No torch.

Read before a run (its header keeps what all devices have in common) and by the doctor. Nothing is set, nothing is
guessed: what is missing, garbled, "N/A" or a filler such as 65535 is None, never 0. Values are in base units.

AMD is read from sysfs, with the names and formats that the amdgpu and amdkfd drivers document in the kernel tree
(Documentation/gpu/amdgpu; amdgpu_ras.c for `ras/*`, kfd_topology.c and kfd_process.c for `kfd`). A partition of a device
(DPX, CPX) has a DRM card of its own without a `vendor` file, so that each package is listed once. NVIDIA has no such
files; there nvidia-smi answers. The PCIe link and the NUMA node come from the PCI function for both.
Outside tools that agree: amd-smi static/metric/process, nvidia-smi -q, lspci -vv.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from escher_kernels.host import text as _text

Command = Callable[[list[str]], tuple[int, str]]  # argv -> exit status (127: not found) and standard output

ADDRESS = re.compile(r"(?:[0-9a-f]{4})?([0-9a-f]{4}):([0-9a-f]{2}):([0-9a-f]{2})\.([0-9a-f])", re.I)
FILLERS = (65535, 4294967295, 18446744073709551615)  # all bits set: "not supported" that leaked as a number
HOST_PIDS = "pid:[4026531836]"  # the first PID namespace: only there does a number that amdkfd gives name a process here
PCIE_T_S = {1: 2.5e9, 2: 5e9, 3: 8e9, 4: 16e9, 5: 32e9, 6: 64e9}  # generation -> transfers a second and lane
CLOCK_REASONS = {  # bits of clocks_event_reasons.active that hold the clock down; 0x1 is idle, 0x4 the power cap at work
    0x2: "application clocks", 0x8: "hardware slowdown", 0x10: "sync boost", 0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown", 0x80: "power brake", 0x100: "display clocks",
}  # fmt: skip
NVIDIA_FIELDS = (
    "pci.bus_id", "name", "pci.device_id", "mig.mode.current", "power.limit", "power.default_limit", "power.max_limit", "pstate",
    "clocks_event_reasons.active", "clocks_throttle_reasons.active", "clocks.current.sm", "clocks.max.sm",
    "pcie.link.width.current", "pcie.link.width.max", "pcie.link.gen.current", "pcie.link.gen.max",
    "retired_pages.single_bit_ecc.count", "retired_pages.double_bit.count", "ecc.errors.uncorrected.volatile.total",
    "ecc.errors.corrected.volatile.total", "vbios_version", "inforom.img", "fan.speed", "temperature.gpu",
)  # fmt: skip
REFUSED = re.compile(r'Field "([^"]+)" is not a valid field')


@dataclass(frozen=True)
class Process:
    """A process that holds memory of a device. `name` is None where the number means nothing here (a container)."""

    pid: int
    name: str | None


@dataclass(frozen=True)
class Device:
    """One GPU package. `bad_pages`: retired pages, or remapped rows; `uncorrected`, `corrected`: memory and other RAS errors
    since the driver was loaded. `mig` is "none" where the device has no such mode. `held_by`: what holds the clock down
    now, beside idleness. `processes`: who holds memory of it, this process too. None: cannot be told."""

    vendor: str  # "amd" or "nvidia"
    address: str | None = None  # 0000:c1:00.0
    name: str | None = None
    device_id: str | None = None  # 1002:75a3
    partition: str | None = None
    nps: str | None = None
    mig: str | None = None
    power_cap_w: float | None = None
    power_cap_default_w: float | None = None
    power_cap_max_w: float | None = None
    performance_level: str | None = None  # of amdgpu; the P state of an NVIDIA device
    held_by: tuple[str, ...] | None = None
    clock_hz: float | None = None
    clock_max_hz: float | None = None
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    pcie_t_s: float | None = None  # transfers a second and lane: 32e9 is "32 GT/s", generation 5
    pcie_t_s_max: float | None = None
    bad_pages: int | None = None
    uncorrected: int | None = None
    corrected: int | None = None
    firmware: dict[str, str] = field(default_factory=dict)
    has_fan: bool | None = None
    fan_rpm: float | None = None
    fan_frac: float | None = None
    temperature_c: float | None = None
    numa_node: int | None = None
    processes: tuple[Process, ...] | None = None

    def to_json(self) -> dict[str, Any]:
        return json.loads(json.dumps(asdict(self), allow_nan=False))


def run(argv: list[str]) -> tuple[int, str]:
    """Exit status and standard output; 127 where the command is missing, 124 where it takes over 30 s."""
    try:
        done = subprocess.run(argv, capture_output=True, text=True, errors="replace", timeout=30, check=False)
    except subprocess.TimeoutExpired:
        return 124, ""
    except OSError:
        return 127, ""
    return done.returncode, done.stdout


def devices(root: Path = Path("/"), command: Command = run) -> list[Device]:
    """Every GPU of this machine, AMD then NVIDIA, by PCI address. `root` stands for / in tests."""
    return [*_amd(root), *_nvidia(root, command)]


# ---- what the devices of a machine have in common ----


def alike(found: Iterable[Device]) -> list[Device]:
    """The devices of the most frequent kind: a node may have another one beside (an integrated GPU)."""
    found = list(found)
    kinds = Counter((d.vendor, d.device_id) for d in found).most_common(1)
    return [d for d in found if (d.vendor, d.device_id) == kinds[0][0]]


def common(found: Iterable[Device], name: str) -> Any:
    """The value that all devices share, "mixed: SPX x7, CPX x1" where they differ, None where there is none."""
    values = Counter(getattr(d, name) for d in found)
    if len(values) <= 1:
        return next(iter(values), None)
    return "mixed: " + ", ".join(f"{_shown(value)} x{n}" for value, n in values.most_common())


def _shown(value: Any) -> str:
    return "unknown" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def header(found: Iterable[Device]) -> dict[str, Any]:
    """The part of a run's header that is about the devices: every one, and what those of the main kind share."""
    found = list(found)
    shared = {name: common(alike(found), name) for name in ("partition", "nps", "power_cap_w")}
    return {**shared, "devices": [d.to_json() for d in found]}


# ---- reading ----


def _number(told: str | None) -> float | None:
    """The number that a text begins with ("32.0 GT/s PCIe"); None for other texts, fillers and negative numbers."""
    match = re.match(r"\s*(\d{1,20}(?:\.\d{1,20})?)(?![\d.])", told or "", re.A)
    value = float(match[1]) if match else math.nan
    return None if math.isnan(value) or value in map(float, FILLERS) else value


def _count(told: str | None) -> int | None:
    value = _number(told)
    return None if value is None else int(value)


def _scaled(told: str | None, factor: float) -> float | None:
    """A quantity that is never 0: where a driver prints 0, it could not read it."""
    value = _number(told)
    return value * factor if value else None


def _address(told: str | None) -> str | None:
    """ "00000000:C1:00.0" and "0000:c1:00.0" -> "0000:c1:00.0"."""
    match = ADDRESS.fullmatch(told or "")
    return "{}:{}:{}.{}".format(*match.groups()).lower() if match else None


def _link(pci: Path) -> dict[str, Any]:
    """PCIe link and NUMA node of a PCI function. On consumer cards it is the link to the card's own bridge."""
    widths = {n: _count(_text(pci / f"{n}_link_width")) for n in ("current", "max")}
    widths = {n: w if w and w <= 32 else None for n, w in widths.items()}  # 0 and 255 mean unknown
    return {
        "pcie_width": widths["current"],
        "pcie_width_max": widths["max"],
        "pcie_t_s": _scaled(_text(pci / "current_link_speed"), 1e9),
        "pcie_t_s_max": _scaled(_text(pci / "max_link_speed"), 1e9),
        "numa_node": _count(_text(pci / "numa_node")),  # -1: the firmware did not say
    }


# ---- AMD ----


def _amd(root: Path) -> list[Device]:
    cards = [c / "device" for c in (root / "sys/class/drm").glob("card*") if re.fullmatch(r"card\d+", c.name)]
    cards = [c for c in cards if _text(c / "vendor") == "0x1002" and any((c / "drm").glob("renderD*"))]
    users = _kfd_users(root)
    return sorted((_amd_device(card, users) for card in cards), key=lambda d: d.address or "")


def _amd_device(card: Path, users: dict[str, tuple[Process, ...] | None] | None) -> Device:
    address = _address(os.path.basename(os.path.realpath(card)))
    identity = re.fullmatch(r"0x([0-9a-f]{4})", _text(card / "device") or "", re.I)
    hwmon = next(iter(sorted((card / "hwmon").glob("hwmon*"))), None)

    def sensor(name: str) -> str | None:
        return _text(hwmon / name) if hwmon else None

    clocks = re.findall(r"^\w+:\s*(\d{1,6})mhz[ \t]*(\*?)", _text(card / "pp_dpm_sclk") or "", re.M | re.I | re.A)
    return Device(
        vendor="amd",
        address=address,
        name=_text(card / "product_name") or None,
        device_id=f"1002:{identity[1].lower()}" if identity else None,
        partition=_mode(_text(card / "current_compute_partition"), r"[SDTQC]PX"),
        nps=_mode(_text(card / "current_memory_partition"), r"NPS\d+"),
        power_cap_w=_scaled(sensor("power1_cap"), 1e-6),
        power_cap_default_w=_scaled(sensor("power1_cap_default"), 1e-6),
        power_cap_max_w=_scaled(sensor("power1_cap_max"), 1e-6),
        performance_level=_mode(_text(card / "power_dpm_force_performance_level"), r"[a-z_]+"),
        clock_hz=next((int(mhz) * 1e6 for mhz, now in clocks if now), None),
        clock_max_hz=max((int(mhz) * 1e6 for mhz, _ in clocks), default=None),
        bad_pages=_bad_pages(card / "ras/gpu_vram_bad_pages"),
        uncorrected=_ras(card, "ue"),
        corrected=_ras(card, "ce"),
        firmware=dict(_firmware(card)),
        has_fan=None if hwmon is None else (hwmon / "fan1_input").exists(),  # the driver hides it where there is none
        fan_rpm=_number(sensor("fan1_input")),
        temperature_c=_amd_temperature(hwmon),
        processes=users.get(address.rpartition(".")[0], ()) if users is not None and address else None,
        **_link(card),
    )


def _mode(told: str | None, pattern: str) -> str | None:
    return told if told and re.fullmatch(pattern, told, re.A) else None


def _amd_temperature(hwmon: Path | None) -> float | None:
    """The junction (hot spot), else the edge sensor; OAM modules have no edge sensor."""
    labels = {_text(p): p for p in sorted(hwmon.glob("temp*_label"))} if hwmon else {}
    label = labels.get("junction") or labels.get("edge")
    return _scaled(_text(label.with_name(label.name.replace("_label", "_input"))), 1e-3) if label else None


def _ras(card: Path, kind: str) -> int | None:
    """Sum of "ue: N" or "ce: N" over the blocks' counters; None where one says "Query currently inaccessible" instead."""
    counts = [
        re.search(rf"^{kind}:\s*(\d{{1,19}})\s*$", _text(path) or "", re.M | re.A)
        for path in (card / "ras").glob("*_err_count")
    ]
    return sum(int(c[1]) for c in counts) if counts and all(counts) else None


def _bad_pages(path: Path) -> int | None:
    """Lines "pfn : size : flag": R retired, P waiting for it, F not possible. An empty file: none."""
    told = _text(path)
    if told is None:
        return None
    lines = told.splitlines()
    return len(lines) if all(re.fullmatch(r"0x[0-9a-f]+ : 0x[0-9a-f]+ : [RPF]", x.strip(), re.I) for x in lines) else None


def _firmware(card: Path) -> Iterator[tuple[str, str]]:
    if vbios := _text(card / "vbios_version"):
        yield "vbios", vbios
    for path in sorted((card / "fw_version").glob("*_fw_version")):
        version = _mode(_text(path), r"0x[0-9a-fA-F]+")
        if version and int(version, 16):  # 0: the device has no such block, or it is not loaded
            yield path.name.removesuffix("_fw_version"), version


def _kfd_users(root: Path) -> dict[str, tuple[Process, ...] | None] | None:
    """Who holds memory of which device: "0000:c1:00" -> processes, None for one that cannot be told. None: no amdkfd.

    A topology node gives its PCI function as bus << 8 | device << 3; the bits above and below may hold the partition.
    """
    kfd = root / "sys/class/kfd/kfd"
    if not (kfd / "proc").is_dir():
        return None
    slots = {}
    for node in (kfd / "topology/nodes").glob("*"):
        told = dict(re.findall(r"^(\w+) (\d{1,19})$", _text(node / "properties") or "", re.M | re.A))
        if (gpu := _count(_text(node / "gpu_id"))) and "location_id" in told and "domain" in told:
            place = int(told["location_id"])
            slots[gpu] = f"{int(told['domain']):04x}:{place >> 8 & 0xFF:02x}:{place >> 3 & 0x1F:02x}"
    held: dict[str, list[Process] | None] = {slot: [] for slot in slots.values()}
    named_here = _readlink(root / "proc/self/ns/pid") == HOST_PIDS
    for process in sorted((kfd / "proc").glob("*")):
        if not re.fullmatch(r"\d{1,10}", process.name, re.A):
            continue
        who = Process(int(process.name), _text(root / "proc" / process.name / "comm") or None if named_here else None)
        for path in process.glob("vram_*"):
            slot, used = slots.get(_count(path.name.removeprefix("vram_"))), _count(_text(path))
            if slot is None or held[slot] is None:
                continue
            if used is None and process.exists():
                held[slot] = None
            elif used and who not in held[slot]:
                held[slot].append(who)
    return {slot: None if who is None else tuple(who) for slot, who in held.items()}


def _readlink(path: Path) -> str | None:
    try:
        return os.readlink(path)
    except OSError:
        return None


# ---- NVIDIA ----


def _ask(command: Command, query: str, fields: Iterable[str]) -> list[dict[str, str]] | None:
    """Rows of `nvidia-smi --query-...`; a field that this driver does not know is left out and asked for no more.

    None where nvidia-smi cannot answer. It prints errors on standard output, so a row must begin with a PCI address.
    """
    fields = list(fields)
    while fields:
        status, out = command(["nvidia-smi", f"--query-{query}={','.join(fields)}", "--format=csv,noheader,nounits"])
        refused = REFUSED.search(out)
        if refused and refused[1] in fields[1:]:
            fields.remove(refused[1])
            continue
        if status != 0:
            return None
        rows = [[cell.strip() for cell in line.split(",", len(fields) - 1)] for line in out.splitlines()]
        return [dict(zip(fields, row, strict=False)) for row in rows if _address(row[0])]
    return None


def _nvidia(root: Path, command: Command) -> list[Device]:
    rows = _ask(command, "gpu", NVIDIA_FIELDS)
    if not rows:
        return []
    jobs = _ask(command, "compute-apps", ("gpu_bus_id", "pid", "process_name"))
    if not jobs and _readlink(root / "proc/self/ns/pid") != HOST_PIDS:
        jobs = None  # in a container nvidia-smi does not show the processes outside
    remapped = ()
    if any(_count(row.get("retired_pages.double_bit.count")) is None for row in rows):  # since Ampere rows are remapped instead
        names = ("gpu_bus_id", "remapped_rows.correctable", "remapped_rows.uncorrectable")
        remapped = _ask(command, "remapped-rows", names) or ()
    rows.sort(key=lambda row: _address(row["pci.bus_id"]))
    return [_nvidia_device(root, row, jobs, remapped) for row in rows]


def _nvidia_device(root: Path, row: dict[str, str], jobs: list[dict] | None, remapped: Iterable[dict]) -> Device:
    address = _address(row["pci.bus_id"])

    def here(table: Iterable[dict]) -> list[dict]:
        return [r for r in table if _address(r["gpu_bus_id"]) == address]

    identity = re.fullmatch(r"0x([0-9a-f]{4})10de", row.get("pci.device_id", ""), re.I)
    mask = row.get("clocks_event_reasons.active") or row.get("clocks_throttle_reasons.active") or ""
    reasons = int(mask, 16) if re.fullmatch(r"0x[0-9a-fA-F]{1,16}", mask) else None
    pages = _sum(row.get(f"retired_pages.{n}.count") for n in ("single_bit_ecc", "double_bit"))
    if pages is None and (rows := here(remapped)):
        pages = _sum(rows[0].get(f"remapped_rows.{n}") for n in ("correctable", "uncorrectable"))
    fan = row.get("fan.speed")
    named = {"vbios": row.get("vbios_version"), "inforom": row.get("inforom.img")}
    link = {
        "pcie_width": _count(row.get("pcie.link.width.current")),
        "pcie_width_max": _count(row.get("pcie.link.width.max")),
        "pcie_t_s": PCIE_T_S.get(_count(row.get("pcie.link.gen.current"))),
        "pcie_t_s_max": PCIE_T_S.get(_count(row.get("pcie.link.gen.max"))),
    }
    link |= {k: v for k, v in _link(root / f"sys/bus/pci/devices/{address}").items() if v is not None}
    return Device(
        vendor="nvidia",
        address=address,
        name=_told(row.get("name")),
        device_id=f"10de:{identity[1].lower()}" if identity else None,
        mig="none" if _absent(row.get("mig.mode.current")) else _mode(row.get("mig.mode.current"), "Enabled|Disabled"),
        power_cap_w=_scaled(row.get("power.limit"), 1),
        power_cap_default_w=_scaled(row.get("power.default_limit"), 1),
        power_cap_max_w=_scaled(row.get("power.max_limit"), 1),
        performance_level=_mode(row.get("pstate"), r"P\d+"),
        held_by=None if reasons is None else tuple(word for bit, word in CLOCK_REASONS.items() if reasons & bit),
        clock_hz=_scaled(row.get("clocks.current.sm"), 1e6),
        clock_max_hz=_scaled(row.get("clocks.max.sm"), 1e6),
        bad_pages=pages,
        uncorrected=_count(row.get("ecc.errors.uncorrected.volatile.total")),
        corrected=_count(row.get("ecc.errors.corrected.volatile.total")),
        firmware={name: version for name, version in named.items() if _told(version)},
        has_fan=False if _absent(fan) else None if _number(fan) is None else True,
        fan_frac=None if _number(fan) is None else _number(fan) / 100,
        temperature_c=_scaled(row.get("temperature.gpu"), 1),
        processes=None if jobs is None else tuple(
            Process(pid, _told(job.get("process_name"))) for job in here(jobs) if (pid := _count(job.get("pid"))) is not None
        ),
        **link,
    )  # fmt: skip


def _absent(cell: str | None) -> bool:
    """ "[N/A]" and "[Not Supported]": the device has no such thing. Other bracketed words: it could not be read."""
    return (cell or "").strip("[]") in ("N/A", "Not Supported")


def _told(cell: str | None) -> str | None:
    return None if not cell or cell.startswith("[") or cell == "N/A" else cell


def _sum(cells: Iterable[str | None]) -> int | None:
    counts = [_count(cell) for cell in cells]
    return None if None in counts else sum(counts)
