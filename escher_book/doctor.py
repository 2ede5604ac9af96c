"""`escher doctor`: is this machine fit to be measured? One row a question: found, wanted, why it matters, the mend.

Statuses: "ok"; "attention": the figures hold, but of a machine that is not as it should be; "problem": do not measure;
"unknown": it could not be read, which is never ok; "n/a": no question here, with the reason.

The rows are pure over what `Host` and the arguments hold. `environment.checks`, which every run keeps in env.json, is
the part that any measurement should carry: its rows are taken over as they stand (device, load average, CPU quota, usable
memory, huge pages, NUMA balancing, governor, shared memory), except where more is known here, such as a guest without a
governor. The compilers are asked for again, because here a GPU host needs them as well. The rest is the doctor's alone.
Outside tools that agree: amd-smi static and metric, nvidia-smi -q, lspci -vv, numactl -H, findmnt, ulimit -l.
"""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
import stat
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from escher_kernels import devices as gpus
from escher_kernels import environment, targets, workload
from escher_kernels.devices import Device
from escher_kernels.host import cgroup_dirs, memory
from escher_kernels.host import text as _text
from validation import roofline

OK, ATTENTION, PROBLEM, UNKNOWN, NA = "ok", "attention", "problem", "unknown", "n/a"
ORDER = (NA, OK, UNKNOWN, ATTENTION, PROBLEM)  # mildest first
GIB = 2**30

VISIBLE = {"amd": ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL"),
           "nvidia": ("CUDA_VISIBLE_DEVICES",)}  # fmt: skip
NODES = {"amd": ("dev/kfd", "dev/dri/renderD*"), "nvidia": ("dev/nvidiactl", "dev/nvidia-uvm", "dev/nvidia[0-9]*")}
DRIVER = {"amd": "see that amdgpu is loaded and /sys/class/drm is visible", "nvidia": "see that nvidia-smi is there and answers"}
RUNTIME = {"amd": "rocm", "nvidia": "cuda"}
NETWORK = re.compile(r"nfs\d?|cifs|smb\d?|smbfs|lustre|gpfs|beegfs|ceph|glusterfs|afs|9p|virtiofs|wekafs|fuse\..+")
IN_MEMORY = ("tmpfs", "ramfs")
GOOD_CLOCKS = ("tsc", "arch_sys_counter")
GUEST_CLOCKS = ("kvm-clock", "hyperv_clocksource_tsc_page")  # read without a system call, as tsc is


@dataclass(frozen=True)
class Check:
    """One row. `found` and `wanted` are texts to read; `why` and `mend` are empty where there is nothing to say."""

    group: str
    name: str
    status: str
    found: str
    wanted: str = ""
    why: str = ""
    mend: str = ""


@dataclass(frozen=True)
class Host:
    """Where the rows look. The defaults are this machine and this process; tests put others in their place."""

    root: Path = Path("/")
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    command: gpus.Command = gpus.run
    usage: Callable[[Path], Any] = shutil.disk_usage
    access: Callable[[Path, int], bool] = os.access
    affinity: tuple[int, ...] = field(default_factory=lambda: tuple(sorted(os.sched_getaffinity(0))))
    uid: int = field(default_factory=os.getuid)
    groups: tuple[int, ...] = field(default_factory=lambda: tuple(sorted({os.getgid(), *os.getgroups()})))
    pid: int = field(default_factory=os.getpid)
    machine: str = field(default_factory=platform.machine)
    torch: str | None = field(default_factory=lambda: environment.packages().get("torch"))


@dataclass(frozen=True)
class Limits:
    """Where a row turns. `drift_pct` is the configuration's `calibration_drift_pct`."""

    drift_pct: float = 5.0
    free_bytes: int = 2 * GIB  # a full run with its pages, and a book in every format, with room to spare
    power_w: float = 1.0  # a cap within it is its default: drivers round
    fan_off_c: float = 60.0  # cards without load stop their fans below about 50 C


Answer = tuple[str, str, str, str, str]  # status, found, wanted, why, mend


class Seen:
    """What the rows look at, read once and only if a row asks. A reading may raise ValueError or OSError: garbage in a file."""

    def __init__(self, found: targets.Found, results: Path, host: Host, limits: Limits, spec: workload.Spec, require_gpu: bool):
        self.found, self.results, self.host, self.limits, self.spec = found, results, host, limits, spec
        self.root, self.require_gpu = host.root, require_gpu

    @cached_property
    def devices(self) -> list[Device]:
        """The GPUs that are measured: of the most frequent kind, and of the kind that torch uses, if it uses one."""
        every = gpus.devices(self.root, self.host.command)
        return gpus.alike([d for d in every if RUNTIME[d.vendor] == self.found.kind] or every)

    @cached_property
    def vendor(self) -> str | None:
        """Whose GPUs are here: by the devices listed, else by torch, else by a device node. None: there is no GPU."""
        if self.devices:
            return self.devices[0].vendor
        by_torch = {kind: vendor for vendor, kind in RUNTIME.items()}.get(self.found.kind)
        return by_torch or next((v for v, nodes in NODES.items() if (self.root / nodes[0]).exists()), None)

    @cached_property
    def virtual(self) -> bool:
        return bool(re.search(r"^flags\s*:.*\bhypervisor\b", _text(self.root / "proc/cpuinfo") or "", re.M))

    @cached_property
    def memory(self) -> dict[str, Any]:
        return memory(self.root)

    @cached_property
    def checks(self) -> dict[str, dict[str, Any]]:
        """`environment.checks` of this host, by name. A reading that is garbage counts as one that is missing."""
        knobs = environment.knobs(self.root)
        load = (knobs["load_average"] or "").split()
        if not load or not re.fullmatch(r"\d{1,9}\.\d{1,9}", load[0], re.A):
            knobs["load_average"] = None
        allowance = environment.cpu_allowance(self.root, list(self.host.affinity))
        try:
            usable = self.memory["usable_bytes"]
            free = self.host.usage(self.root / "dev/shm").free if (self.root / "dev/shm").is_dir() else None
        except (OSError, ValueError):
            usable = free = None
        rows = environment.checks({
            "host": {
                "cpus": {**asdict(allowance), "threads": allowance.threads}, "memory": {"usable_bytes": usable},
                "numa_nodes": environment.numa_nodes(self.root), "shm_free_bytes": free,
            },
            "knobs": knobs,
            "device": self.found.to_json(),
            "software": {"compiler": None},
        })  # fmt: skip
        return {row["check"]: row for row in rows}


def taken(name: str, seen: Seen, bad: str = ATTENTION, found: str | None = None) -> Answer:
    """A row of `environment.checks` as an answer. Nothing read is unknown, whatever the check makes of it."""
    row = seen.checks[name]
    status = UNKNOWN if row["ok"] is None or row["found"] is None else OK if row["ok"] else bad
    return status, found or row["found"] or "cannot be read", row["wanted"], row["why"], row["mend"]


# ---- GPU ----


def _usable(s: Seen) -> Answer:
    if s.vendor is None:
        if not s.require_gpu:
            return NA, "none found", "", "", ""
        mend = "run it on a GPU host; in a container, hand the devices in; or ask without --require-gpu"
        return PROBLEM, "none found", "a GPU", "a GPU is asked for, and the CPU would be measured", mend
    status, found, *rest = taken("device", s, PROBLEM)
    if s.found.kind == "cpu" and status == OK:  # the CPU was asked for, or torch was not asked
        return PROBLEM if s.require_gpu else ATTENTION, f"{s.found.raw_name}; a GPU is here and is not used", *rest
    return (status, f"{s.found.count} x {found}" if s.found.kind != "cpu" else found, *rest)


def _nodes(s: Seen) -> Answer:
    """The nodes a runtime opens: each with mode and group, and whether this process may open it."""
    key, *others = NODES[s.vendor]
    mend = (
        "add the user to that group (usermod -aG render,video USER) and log in again; container: "
        "--device=/dev/kfd --device=/dev/dri --group-add with the numbers of this host"
        if s.vendor == "amd"
        else "modprobe nvidia and nvidia-uvm; container: --gpus all; else see the mode and group"
    )
    why = "the runtime cannot open the device and sees none, so the CPU would be measured in its place"
    told, shut, missing = [], [], []
    for pattern in (key, *others):
        paths = sorted(s.root.glob(pattern))
        missing += [] if paths else [f"/{pattern}"]
        for path in paths:
            told.append(_node(s, path))
            if not s.host.access(path, os.R_OK | os.W_OK):
                shut.append(path)
    sees = s.found.kind == RUNTIME[s.vendor]
    mine = f"this process: uid {s.host.uid}, groups {', '.join(_group(s, g) for g in s.host.groups)}"
    usable = f"/{key} and every node beside it can be opened"
    if shut or missing:
        what = [f"{_node(s, p)} cannot be opened" for p in shut[:4]] + [f"{m} is missing" for m in missing]
        more = f" and {len(shut) - 4} more" if len(shut) > 4 else ""
        status = ATTENTION if sees and s.root / key not in shut else PROBLEM
        return status, f"{'; '.join(what)}{more}; {mine}", usable, why, mend
    return OK, f"{told[0]}, {len(told) - 1} more; {mine}", usable, why, mend


def _node(s: Seen, path: Path) -> str:
    info = path.stat()
    return f"/{path.relative_to(s.root)} {stat.filemode(info.st_mode)} group {_group(s, info.st_gid)}"


def _group(s: Seen, gid: int) -> str:
    name = re.search(rf"^([^:\n]+):[^:\n]*:{gid}:", _text(s.root / "etc/group") or "", re.M)
    return f"{gid} ({name[1]})" if name else str(gid)


def _torch(s: Seen) -> Answer:
    wanted = f"a torch built for {RUNTIME[s.vendor]} that sees {_number_of(s.devices)}"
    why, mend = "a torch of another build measures the CPU, or a part of the node", "install the torch for this device: make env"
    build = f"torch {s.host.torch or 'is not installed'}"
    if s.found.kind != RUNTIME[s.vendor]:
        return PROBLEM, f"{build}, which uses the {s.found.kind.upper()} here", wanted, why, mend
    listed = len(s.devices)
    text = f"{build}, {s.found.kind}, {s.found.count} of {_number_of(s.devices)} seen"
    if not listed:
        return UNKNOWN, f"{build}, {s.found.kind}; no driver file tells how many devices there are", wanted, why, mend
    whole = all(d.partition in (None, "SPX") and d.mig != "Enabled" for d in s.devices)  # else one device is several
    if whole and s.found.count != listed:
        return ATTENTION, text, wanted, why, "unset the visible-devices variables, or give the container every device"
    return OK, text, wanted, why, mend


def _number_of(found: list[Device]) -> str:
    return f"{len(found)} device{'s' * (len(found) != 1)}" if found else "the devices"


def _visible(s: Seen) -> Answer:
    """Variables that hide devices. They stack on AMD: HIP counts among what ROCR leaves, and CUDA_ is another name of HIP_."""
    values = {name: s.host.environ[name].strip() for name in VISIBLE[s.vendor] if name in s.host.environ}
    wanted, why = "none set, or one that names every device", "hidden devices are not measured, and two variables can hide all"
    mend = f"unset {' '.join(values)}"
    found = ", ".join(f"{name}={value!r}" for name, value in values.items()) or "none set"
    if not values:
        return OK, found, wanted, why, ""
    if any(value.split(",")[0].strip() in ("", "-1") for value in values.values()):
        return PROBLEM, f"{found}: every device is hidden", wanted, why, mend
    later = {name: value for name, value in values.items() if name != "ROCR_VISIBLE_DEVICES"}
    if len(set(later.values())) > 1:
        return PROBLEM, f"{found}: they contradict each other", wanted, why, mend
    if later and len(later) < len(values):
        left = len(values["ROCR_VISIBLE_DEVICES"].split(","))
        if any(int(i) >= left for i in next(iter(later.values())).split(",") if re.fullmatch(r"\s*\d{1,9}\s*", i, re.A)):
            return PROBLEM, f"{found}: ROCR leaves {left}, numbered from 0, and the other counts among those", wanted, why, mend
        return ATTENTION, f"{found}: the second counts among what the first leaves", wanted, why, mend
    every = ",".join(map(str, range(len(s.devices))))
    whole = bool(s.devices) and all(value.replace(" ", "") == every for value in values.values())
    return OK if whole else ATTENTION, found, wanted, why, mend


def _jobs(s: Seen) -> Answer:
    wanted, why = "none", "another job takes time, memory and power of the device: the figures are of both"
    mend = "wait for it, or end it; rocm-smi --showpids or nvidia-smi shows more"
    jobs: dict[tuple[int, str | None], int] = Counter(
        (p.pid, p.name) for d in s.devices for p in d.processes or () if p.pid != s.host.pid
    )
    told = [f"{pid} ({name or 'name not known here'}) on {n} of {len(s.devices)}" for (pid, name), n in jobs.items()]
    if told:
        return PROBLEM, ", ".join(told[:8]) + (f" and {len(told) - 8} more" if len(told) > 8 else ""), wanted, why, mend
    if not s.devices or any(d.processes is None for d in s.devices):
        return UNKNOWN, "cannot be told here: a container may not see the jobs outside", wanted, why, ""
    return OK, "none", wanted, why, ""


def _over(s: Seen, judge: Callable[[Device], str], show: Callable[[Device], str], same: bool = False) -> tuple[str, str]:
    """Worst status over the devices, and what they show: one text for all, or who differs. `same`: differing is attention."""
    if not s.devices:
        return UNKNOWN, "no driver file or tool lists the devices"
    status = max(map(judge, s.devices), key=ORDER.index)
    groups: dict[str, list[Device]] = {}
    for device in s.devices:
        groups.setdefault(show(device), []).append(device)
    if len(groups) == 1:
        return status, next(iter(groups)) + (f" on all {len(s.devices)}" if len(s.devices) > 1 else "")
    if same:
        status = max(status, ATTENTION, key=ORDER.index)
    parts = []
    for text, members in sorted(groups.items(), key=lambda item: -len(item[1])):
        where = ", ".join(d.address or "address unknown" for d in members)
        parts.append(f"{text} on {len(members)}" + (f" ({where})" if len(members) <= 3 else ""))
    return status, "; ".join(parts)


def _clocks(s: Seen) -> Answer:
    def judge(d: Device) -> str:
        if d.vendor == "amd":
            return UNKNOWN if d.performance_level is None else OK if d.performance_level == "auto" else ATTENTION
        return UNKNOWN if d.held_by is None else ATTENTION if d.held_by else OK

    def show(d: Device) -> str:
        level = f"level {d.performance_level or 'unreadable'}" + (f", held by {', '.join(d.held_by)}" if d.held_by else "")
        return level + (f", up to {d.clock_max_hz / 1e6:g} MHz" if d.clock_max_hz else "")

    mend = {
        "amd": "rocm-smi --setperflevel auto (or echo auto > .../power_dpm_force_performance_level)",
        "nvidia": "nvidia-smi -rgc and -rac free the clocks; a thermal or power-brake reason is for whoever cools the machine",
    }[s.vendor]
    return *_over(s, judge, show, same=True), "the driver sets the clock", "held clocks are those of no other machine", mend


def _power(s: Seen) -> Answer:
    def judge(d: Device) -> str:
        if d.power_cap_w is None or d.power_cap_default_w is None:
            return UNKNOWN
        return OK if abs(d.power_cap_w - d.power_cap_default_w) <= s.limits.power_w else ATTENTION

    def show(d: Device) -> str:
        watts = (d.power_cap_w, d.power_cap_default_w, d.power_cap_max_w)
        return "{} (default {}, at most {})".format(*(f"{w:g} W" if w else "unreadable" for w in watts))

    why = "under load the clock follows the cap: figures of two caps are not comparable"
    mend = "rocm-smi --resetpoweroverdrive" if s.vendor == "amd" else "nvidia-smi -pl WATTS, with the default"
    return *_over(s, judge, show, same=True), "the default, on every device", why, mend


def _mode(s: Seen, name: str, good: tuple[str, ...], words: Mapping[str, str] | None = None) -> tuple[str, str]:
    """A mode that should be one of `good`, and the same on every device."""

    def judge(d: Device) -> str:
        mode = getattr(d, name)
        return UNKNOWN if mode is None else OK if mode in good else ATTENTION

    def show(d: Device) -> str:
        return (words or {}).get(getattr(d, name)) or getattr(d, name) or "unreadable"

    return _over(s, judge, show, same=True)


def _partition(s: Seen) -> Answer:
    why = "a part of a device has no rated figures of its own: shares of a peak are withheld"
    if s.vendor == "nvidia":
        words = {"none": "no MIG mode", "Disabled": "MIG disabled", "Enabled": "MIG enabled"}
        found = _mode(s, "mig", ("none", "Disabled"), words)
        return *found, "MIG disabled", why, "nvidia-smi -mig 0, with the device idle"
    mend = "amd-smi set --compute-partition SPX, with the devices idle"
    return *_mode(s, "partition", ("SPX",)), "SPX on every device", why, mend


def _nps(s: Seen) -> Answer:
    if s.vendor == "nvidia":
        return NA, "a mode of AMD devices", "", "", ""
    why = "each NUMA part has a share of the memory's bandwidth: the figures are of another machine"
    mend = "amd-smi set --memory-partition NPS1, with the devices idle"
    return *_mode(s, "nps", ("NPS1",)), "NPS1 on every device", why, mend


def _pcie(s: Seen) -> Answer:
    def judge(d: Device) -> str:
        pairs = ((d.pcie_width, d.pcie_width_max), (d.pcie_t_s, d.pcie_t_s_max))
        if any(now and most and now < most for now, most in pairs):
            return ATTENTION
        return OK if all(now and most for now, most in pairs) else UNKNOWN

    def show(d: Device) -> str:
        def link(width: int | None, speed: float | None) -> str:
            return f"x{width or '?'} at {f'{speed / 1e9:g}' if speed else '?'} GT/s"

        now, most = link(d.pcie_width, d.pcie_t_s), link(d.pcie_width_max, d.pcie_t_s_max)
        return now if now == most and "?" not in now else f"{now}, at most {most}"

    why = "copies between host and device are bound by the link"
    mend = "look again while a copy runs (an idle device may lower the speed); then look at the slot and the firmware setup"
    return *_over(s, judge, show, same=True), "the width and speed that the device allows", why, mend


def _counted(name: str, bad: str, why: str, mend: str) -> Callable[[Seen], Answer]:
    """A row over a counter that should be 0."""

    def judge(d: Device) -> str:
        return {None: UNKNOWN, 0: OK}.get(getattr(d, name), bad)

    def show(d: Device) -> str:
        return "unreadable" if getattr(d, name) is None else str(getattr(d, name))

    return lambda s: (*_over(s, judge, show), "0", why, mend)


def _firmware(s: Seen) -> Answer:
    wanted, why = "the same on every device", "devices with unlike firmware differ in clocks and faults"
    mend = "bring them to one release"
    if not s.devices or not all(d.firmware for d in s.devices):
        return UNKNOWN, _over(s, lambda d: OK, lambda d: f"{len(d.firmware)} versions read")[1], wanted, why, mend
    first = s.devices[0].firmware
    unlike = sorted({k for d in s.devices for k in {*first, *d.firmware} if d.firmware.get(k) != first.get(k)})
    if unlike:
        shown = [f"{k}: " + ", ".join(sorted({d.firmware.get(k, "none") for d in s.devices})) for k in unlike[:4]]
        more = f" and {len(unlike) - 4} more" if len(unlike) > 4 else ""
        return ATTENTION, f"differs in {'; '.join(shown)}{more}", wanted, why, mend
    shown = [k for k in ("vbios", "inforom", "smc", "mec", "sdma", "sos") if k in first]
    more = f" and {len(first) - len(shown)} more" if len(first) > len(shown) else ""
    many = f"; alike on all {len(s.devices)}" if len(s.devices) > 1 else ""
    return OK, ", ".join(f"{k} {first[k]}" for k in shown) + more + many, wanted, why, ""


def _fans(s: Seen) -> Answer:
    def judge(d: Device) -> str:
        if d.has_fan is False:
            return NA
        turning = d.fan_rpm if d.fan_rpm is not None else d.fan_frac
        if turning is None or d.temperature_c is None:
            return UNKNOWN
        return ATTENTION if turning == 0 and d.temperature_c >= s.limits.fan_off_c else OK

    def show(d: Device) -> str:
        if d.has_fan is False:
            return "no fan of its own (the chassis cools it)"
        percent = "fan unreadable" if d.fan_frac is None else f"fan at {d.fan_frac:.0%}"
        turns = percent if d.fan_rpm is None else f"{d.fan_rpm:g} rpm"
        warm = "temperature unreadable" if d.temperature_c is None else f"{d.temperature_c:.0f} C"
        return f"{turns} at {warm}"

    why = "a hot device lowers its clock"
    return *_over(s, judge, show), f"turning above {s.limits.fan_off_c:g} C", why, "look at the fan and its control (pwm1_enable)"


def _iommu(s: Seen) -> Answer:
    wanted, why = "iommu=pt", "each copy between devices is translated, and collectives slow down"
    mend = "add iommu=pt to the kernel's command line (GRUB_CMDLINE_LINUX), and boot again"
    told = _text(s.root / "proc/cmdline")
    if told is None:
        return UNKNOWN, "cannot be read", wanted, why, ""
    words = [w for w in told.split() if re.fullmatch(r"(?:amd_|intel_)?iommu=\S+", w)]
    if s.virtual:
        return NA, "a guest: the host decides", "", "", ""
    good = "iommu=pt" in words or any(w.endswith("=off") for w in words)
    return OK if good else ATTENTION, " ".join(words) or "no iommu option", wanted, why, mend


def _locked(s: Seen) -> Answer:
    wanted, why = "unlimited", "network adapters pin the buffers of collectives"
    limit = re.search(r"^Max locked memory\s+(unlimited|\d{1,20})\s", _text(s.root / "proc/self/limits") or "", re.M | re.A)
    if not limit:
        return UNKNOWN, "cannot be read", wanted, why, ""
    if limit[1] == "unlimited":
        return OK, "unlimited", wanted, why, ""
    return ATTENTION, _size(int(limit[1])), wanted, why, "ulimit -l unlimited; container: --ulimit memlock=-1"


# ---- host ----


def _size(size: float) -> str:
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size / 2**20:.4g} MiB"


def _limits(s: Seen, controller: str, files: Iterable[tuple[str, str]]) -> Iterator[tuple[Path, str, str]]:
    """(group, file, text) for each limit of this process's control group and its ancestors. ValueError for garbage."""
    if not _text(s.root / "proc/self/cgroup"):
        raise ValueError("/proc/self/cgroup names no control group")
    for group in cgroup_dirs(s.root, controller):
        for name, pattern in files:
            told = _text(group / name)
            if told is not None and not re.fullmatch(pattern, told, re.A):
                raise ValueError(f"/{(group / name).relative_to(s.root)} holds {told[:40]!r}")
            if told is not None:
                yield group, name, told


def _quota(s: Seen) -> Answer:
    files = (("cpu.max", r"(?:max|\d{1,12}) \d{1,12}"), ("cpu.cfs_quota_us", r"-?\d{1,12}"))
    quotas = {}
    for group, name, told in _limits(s, "cpu", files):
        period = _text(group / "cpu.cfs_period_us")
        if cores := environment.quota_cores(told if name == "cpu.max" else None, told, period):
            quotas.setdefault(cores, group)
    status, found, *rest = taken("CPU quota", s)
    if quotas:
        found = f"{min(quotas):g} cores, set by {_shown(s, quotas[min(quotas)])}"
    return status, found, *rest


def _shown(s: Seen, path: Path) -> str:
    return f"/{path.relative_to(s.root)}"


def _memory_limit(s: Seen) -> Answer:
    """A limit is no fault in itself; one that makes the workload smaller than the host would run it is."""
    wanted, why = "none that the workload feels", "the workload is made smaller until it fits"
    mend = "raise the limit of that group (container: --memory)"
    total, limits = s.memory["total_bytes"], {}
    for group, _, told in _limits(s, "memory", [(n, r"max|\d{1,20}") for n in ("memory.max", "memory.limit_in_bytes")]):
        if told != "max" and not (total and int(told) >= total):
            limits.setdefault(int(told), group)
    if not total:
        return UNKNOWN, "/proc/meminfo does not tell the host's memory", wanted, why, ""
    if not limits:
        return OK, f"none ({_size(total)} on the host)", wanted, why, ""
    limit = min(limits)
    found = f"{_size(limit)} of the host's {_size(total)}, set by {_shown(s, limits[limit])}"
    if s.found.kind == "cpu":
        try:
            here, whole = (workload.fit(s.spec, "cpu", size).query_tokens for size in (limit, total))
        except workload.WorkloadError as exc:
            return PROBLEM, f"{found}: {exc}", wanted, "not even the smallest form of the workload can run", mend
        if here != whole:
            return ATTENTION, f"{found}: {here} tokens a call instead of {whole}", wanted, why, mend
    return OK, found, wanted, why, mend


def _usable_memory(s: Seen) -> Answer:
    by = s.memory["bounded_by"]
    found = s.checks["usable memory"]["found"]
    if by != "host":
        found += f", bounded by {by.replace(str(s.root).rstrip('/') + '/', '/')}"
    return taken("usable memory", s, found=found if s.memory["usable_bytes"] is not None else "cannot be read")


def _balancing(s: Seen) -> Answer:
    nodes = environment.numa_nodes(s.root)
    if nodes == 1:
        return NA, "one NUMA node", "", "", ""
    status, *rest = taken("NUMA balancing", s)
    return UNKNOWN if nodes is None and status == OK and rest[0] != "0" else status, *rest


def _governor(s: Seen) -> Answer:
    if s.virtual and not (s.root / "sys/devices/system/cpu/cpu0/cpufreq").exists():
        return NA, "a guest: the host sets the clock", "", "", ""
    return taken("frequency governor", s)


def _clock_source(s: Seen) -> Answer:
    wanted, why = "tsc", "reading another clock takes a system call, which short measurements feel"
    mend = "clocksource=tsc tsc=reliable on the kernel's command line; the kernel's log says why tsc was given up"
    now = _text(s.root / "sys/devices/system/clocksource/clocksource0/current_clocksource")
    if s.host.machine not in ("x86_64", "AMD64", "i686"):
        return NA, f"{now or 'unreadable'}: a question of x86", "", "", ""
    if not now:
        return UNKNOWN, "cannot be read", wanted, why, mend
    good = now in GOOD_CLOCKS or s.virtual and now in GUEST_CLOCKS
    return OK if good else ATTENTION, now, wanted, why, mend


# ---- software, storage, workload ----


def _compiler(variable: str, candidates: tuple[str, ...], why: str, package: str) -> Callable[[Seen], Answer]:
    def answer(s: Seen) -> Answer:
        given = s.host.environ.get(variable, "").strip()
        mend = f"install {package}, or set {variable}"
        for command in [shlex.split(given)] if given else [[c] for c in candidates]:
            status, out = s.host.command([*command, "--version"])
            if status == 0 and out.strip():
                return OK, f"{shlex.join(command)}: {out.strip().splitlines()[0]}", "any", why, ""
        tried = f"{variable}={given}" if given else ", ".join(candidates)
        return ATTENTION, f"none that works (tried {tried})", "any", why, mend

    return answer


def _there(path: Path) -> Path:
    """The directory itself, or the nearest one above it that exists."""
    return next(p for p in (path, *path.parents) if p.exists())


def _free(s: Seen) -> Answer:
    wanted, why = f"at least {_size(s.limits.free_bytes)}, writable", "a full disk ends a run; what was measured before is kept"
    there = _there(s.results)
    if not s.host.access(there, os.W_OK | os.X_OK):
        return PROBLEM, f"{there} cannot be written by uid {s.host.uid}", wanted, why, "choose another with RESULTS_DIR"
    free = s.host.usage(there).free
    status = OK if free >= s.limits.free_bytes else ATTENTION
    return status, f"{_size(free)} at {there}", wanted, why, "free some space, or choose another RESULTS_DIR"


def _file_system(s: Seen) -> Answer:
    wanted = "on a local disk"
    mounts = []
    for line in (_text(s.root / "proc/self/mountinfo") or "").splitlines():
        left, _, right = line.partition(" - ")
        if len(left.split()) > 4 and right.split():
            point = re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), left.split()[4])  # a blank is written \040
            mounts.append((point, right.split()[0]))
    inside = [(p, kind) for p, kind in mounts if s.results.is_relative_to(p)]
    if not inside:
        return UNKNOWN, "no mount point is told", wanted, "", ""
    point, kind = max(reversed(inside), key=lambda m: len(m[0].rstrip("/")))  # of two at one point the later one is seen
    if kind in IN_MEMORY:
        why = "it takes memory from the measurement, and its files are gone after a reboot"
        return ATTENTION, f"{kind} at {point}", wanted, why, "choose another RESULTS_DIR"
    if NETWORK.fullmatch(kind):
        why = "each record is brought to the disk before the next is measured, and a network makes that slow"
        return ATTENTION, f"{kind} at {point}", wanted, why, "choose a local RESULTS_DIR, and copy the run afterwards"
    return OK, f"{kind} at {point}", wanted, "", ""


def _calibration(s: Seen) -> Answer:
    """SC-0's figures, which depend on the workload alone."""
    c = roofline.calibration(SimpleNamespace(info={"workload": s.spec.to_json()}, directory=s.results))
    if c.flop_drift is None or c.bytes_drift is None:
        return NA, c.reason, "", "", ""
    found = f"{s.spec.name}: FLOP {c.flop_drift * 100:+.3g} %, bytes {c.bytes_drift * 100:+.3g} %"
    status = OK if max(abs(c.flop_drift), abs(c.bytes_drift)) * 100 <= s.limits.drift_pct else PROBLEM
    why = "the op table is not the workload's: shares of theory times would be of another model"
    return status, found, f"within {s.limits.drift_pct:g} % of the totals it declares", why, f"correct configs/{s.spec.name}.json"


def _plain(name: str) -> Callable[[Seen], Answer]:
    return lambda s: taken(name, s)


GPU = (
    ("device nodes", _nodes),
    ("torch build", _torch),
    ("visible devices", _visible),
    ("other jobs", _jobs),
    ("clocks", _clocks),
    ("power cap", _power),
    ("compute partition", _partition),
    ("memory partition", _nps),
    ("PCIe link", _pcie),
    ("retired pages", _counted("bad_pages", ATTENTION, "memory that has failed once", "replace the device if the number grows")),
    ("uncorrected errors", _counted("uncorrected", PROBLEM, "data was lost: results may be wrong",
                                    "stop the jobs, boot again, and look again; replace the device if they come back")),
    ("corrected errors", _counted("corrected", ATTENTION, "corrections take bandwidth, and often come before failures",
                                  "look again after the run; replace the device if the number grows")),
    ("firmware", _firmware),
    ("fans", _fans),
    ("iommu", _iommu),
    ("locked memory", _locked),
)  # fmt: skip
REST = (
    ("host", "load average", _plain("load average")),
    ("host", "CPU quota", _quota),
    ("host", "memory limit", _memory_limit),
    ("host", "usable memory", _usable_memory),
    ("host", "shared memory", _plain("shared memory")),
    ("host", "transparent huge pages", _plain("transparent huge pages")),
    ("host", "NUMA balancing", _balancing),
    ("host", "frequency governor", _governor),
    ("host", "clock source", _clock_source),
    ("software", "C compiler", _compiler("CC", ("cc", "gcc", "clang"), "the CPU probe and Triton compile with it", "gcc")),
    ("software", "C++ compiler", _compiler("CXX", ("g++",), "without one the compiled model cannot be made on a CPU", "g++")),
    ("storage", "free space", _free),
    ("storage", "file system", _file_system),
    ("workload", "calibration", _calibration),
)
USABLE = ("GPU", "usable", _usable)
ROWS = (USABLE, *(("GPU", name, answer) for name, answer in GPU), *REST)


def rows(
    found: targets.Found,
    results: Path,
    host: Host | None = None,
    limits: Limits | None = None,
    require_gpu: bool = False,
    spec: workload.Spec | None = None,
) -> list[Check]:
    """Every row that has a question on this machine. `found` is torch's view (`targets.detect`), best taken in another
    process, as one that looked holds the device; `results`: where runs go; `spec`: the default workload unless given.

    WorkloadError where the default workload cannot be read. Unreadable or garbled files are rows with status "unknown".
    """
    seen = Seen(found, Path(os.path.realpath(results)), host or Host(), limits or Limits(), spec or workload.load(), require_gpu)
    asked = ROWS if seen.vendor else (USABLE, *REST)
    return [_check(seen, *row) for row in asked]


def _check(seen: Seen, group: str, name: str, answer: Callable[[Seen], Answer]) -> Check:
    """The row of one answer. What is unknown is mended by making it readable, whatever the row would mend otherwise."""
    try:
        check = Check(group, name, *answer(seen))
    except (OSError, ValueError, OverflowError) as exc:  # a file that holds garbage must not take the other rows with it
        told = " ".join(str(exc).split()) or type(exc).__name__
        check = Check(group, name, UNKNOWN, f"cannot be read: {told}")
    if check.status != UNKNOWN:
        return check
    blind = group == "GPU" and not seen.devices
    return replace(check, mend=DRIVER[seen.vendor] if blind else "look on the host: a container or a missing right may hide it")


def worst(checks: Iterable[Check]) -> str:
    """The most serious status; n/a where there is no row."""
    return max((c.status for c in checks), key=ORDER.index, default=NA)


def exit_status(checks: Iterable[Check]) -> int:
    """2 where a row is a problem, else 0."""
    return 2 if worst(checks) == PROBLEM else 0


def to_json(checks: Iterable[Check]) -> dict[str, Any]:
    checks = list(checks)
    return {"schema": 1, "worst": worst(checks), "exit_status": exit_status(checks), "rows": [asdict(c) for c in checks]}


def as_text(checks: Iterable[Check], width: int = 100) -> str:
    """For a console: a block a group, a line a row; what is not ok has what is wanted, why, and the mend below it."""
    checks = list(checks)
    if not checks:
        return ""
    first = max(map(len, ORDER)) + 2
    second = max(len(c.name) for c in checks) + 2
    out: list[str] = []
    for group in dict.fromkeys(c.group for c in checks):
        out += ["", group] if out else [group]
        for check in (c for c in checks if c.group == group):
            lead = f"  {check.status.upper() if check.status == PROBLEM else check.status:<{first}}{check.name:<{second}}"
            out += _wrapped(lead, check.found, width)
            if check.status not in (OK, NA):
                for word in ("wanted", "why", "mend"):
                    if told := getattr(check, word):
                        out += _wrapped(" " * (first + 4) + f"{word:<8}", told, width)
    counts = Counter(c.status for c in checks)
    out += ["", ", ".join(f"{counts[status]} {status}" for status in reversed(ORDER) if counts[status])]
    return "\n".join(out) + "\n"


def _wrapped(lead: str, told: str, width: int) -> list[str]:
    return textwrap.wrap(
        told, max(width, len(lead) + 20), initial_indent=lead, subsequent_indent=" " * len(lead), break_long_words=False,
        break_on_hyphens=False,
    ) or [lead.rstrip()]  # fmt: skip
