"""Family 0, environment: what machine this is, what it runs on, and what could spoil the numbers.

Answers "on what was this measured, and may the other pages be believed?". It never guesses: what cannot be read is
null. Limits are read where they bind: the CPU quota and the memory limit of this control group AND of its ancestors,
the affinity mask, one logical CPU a physical core. The few timed rows measure the instrument itself: how long reading
the clock takes, how much a fixed piece of work varies, and on a GPU what an empty event pair costs.
Outside tools that agree: lscpu, nproc, numactl -H, `systemd-run --scope`, rocminfo, nvidia-smi.
"""

from __future__ import annotations

import math
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from escher_kernels import native
from escher_kernels.host import cgroup_dirs, memory
from escher_kernels.host import text as _text
from escher_kernels.timing import Case, Machine, Prepared, Session
from escher_kernels.workload import Spec

PACKAGES = (
    "torch", "triton", "numpy", "pandas", "papermill", "jupyter-book", "altair", "nbconvert", "aiter", "flash_attn",
)  # fmt: skip
KNOB_PREFIXES = (
    "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "ONEDNN_", "DNNL_", "TORCH", "PYTORCH_", "TRITON_", "CUDA_",
    "NVIDIA_", "CUBLAS", "HIP_", "HSA_", "ROCR_", "ROCM_", "HIPBLAS", "ROCBLAS_", "AITER_", "FLASH_ATTENTION_", "NCCL_", "RCCL_",
    "GLOO_", "MALLOC_", "LD_PRELOAD",
)  # fmt: skip
PRETTY_NAME = re.compile(r'^PRETTY_NAME="?([^"\n]*)', re.M)
READS = 20000  # clock reads a sample: about 1.5 ms
BOOT_OPTIONS = re.compile(
    r"\b(?:iommu|amd_iommu|intel_iommu|mitigations|isolcpus|nohz_full|hugepages|hugepagesz|pci"
    r"|numa_balancing|transparent_hugepage|processor\.max_cstate|intel_idle\.max_cstate)=\S+"
)
CREDENTIALS = re.compile(r"://[^/@\s]+@")  # of a URL
SECRET = re.compile(r"TOKEN|SECRET|PASS|KEY|CREDENTIAL|AUTH", re.I)


def _command(*argv: str) -> str | None:
    """Standard output of a short command, or None where it is missing, fails or takes over 10 s."""
    try:
        done = subprocess.run(argv, capture_output=True, text=True, errors="replace", timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def parse_cpu_list(text: str | None) -> list[int]:
    """ "0-3,8" -> [0, 1, 2, 3, 8]. Anything else -> []."""
    out: list[int] = []
    for part in (text or "").split(","):
        low, dash, high = part.strip().partition("-")
        if not low.isdigit() or (dash and not high.isdigit()):
            return []
        out.extend(range(int(low), int(high or low) + 1))
    return out


def quota_cores(cpu_max: str | None, cfs_quota: str | None = None, cfs_period: str | None = None) -> float | None:
    """Cores a control group may use at once: cgroup v2 `cpu.max` ("400000 100000") or the v1 pair. None: no limit."""
    fields = cpu_max.split() if cpu_max else [cfs_quota or "", cfs_period or ""]
    try:
        quota, period = int(fields[0]), int(fields[1])
    except (IndexError, ValueError):
        return None
    return quota / period if quota > 0 and period > 0 else None


@dataclass(frozen=True)
class CpuAllowance:
    """Which logical CPUs this process computes on, and why. `cores`: one a physical core, at most the quota."""

    affinity: list[int]
    cores: list[int]
    quota: float | None
    why: str

    @property
    def threads(self) -> int:
        return len(self.cores)


def cpu_allowance(root: Path = Path("/"), affinity: list[int] | None = None) -> CpuAllowance:
    """Affinity, reduced to one logical CPU a physical core, then to the floor of the tightest quota (at least one)."""
    affinity = sorted(affinity if affinity is not None else os.sched_getaffinity(0))
    cores, taken = [], set()
    for cpu in affinity:
        topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        siblings = _text(topology / "core_cpus_list") or _text(topology / "thread_siblings_list")
        key = tuple(parse_cpu_list(siblings)) or (cpu,)
        if key not in taken:
            taken.add(key)
            cores.append(cpu)
    quotas = [
        q
        for group in cgroup_dirs(root, "cpu")
        if (
            q := quota_cores(
                _text(group / "cpu.max"), _text(group / "cpu.cfs_quota_us"), _text(group / "cpu.cfs_period_us")
            )
        )
    ]
    quota = min(quotas, default=None)
    why = f"{len(affinity)} CPUs allowed, {len(cores)} physical cores"
    if quota is not None and math.floor(quota) < len(cores):
        cores = cores[: max(1, math.floor(quota))]
        why += f", control-group quota {quota:g} cores: {len(cores)} used"
    return CpuAllowance(affinity, cores, quota, why)


def caches(cpus: list[int], root: Path = Path("/")) -> list[dict[str, Any]]:
    """Distinct data and unified caches that `cpus` touch: level, size_bytes, the CPUs that share it."""
    found = {}
    for cpu in cpus:
        for index in sorted((root / f"sys/devices/system/cpu/cpu{cpu}/cache").glob("index*")):
            kind, level, size = (_text(index / n) for n in ("type", "level", "size"))
            match = re.fullmatch(r"(\d+)([KMG]?)", size or "")
            if kind == "Instruction" or not match or not (level or "").isdigit():
                continue
            shared = _text(index / "shared_cpu_list") or str(cpu)
            size_bytes = int(match[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[match[2]]
            found[level, shared] = {"level": int(level), "size_bytes": size_bytes, "shared_cpu_list": shared}
    return sorted(found.values(), key=lambda c: (c["level"], c["shared_cpu_list"]))


def llc_bytes(found: list[dict[str, Any]]) -> int | None:
    """Sum of the last-level caches in `caches(...)`; None where sysfs shows none."""
    last = max((c["level"] for c in found), default=None)
    return sum(c["size_bytes"] for c in found if c["level"] == last) if last else None


def numa_nodes(root: Path = Path("/")) -> int | None:
    return len(list((root / "sys/devices/system/node").glob("node[0-9]*"))) or None


def cpu_info(root: Path = Path("/")) -> dict[str, Any]:
    text = _text(root / "proc/cpuinfo") or ""
    first = dict(re.findall(r"^([\w ]+?)\s*:\s*(.*)$", text.split("\n\n", 1)[0], re.M))
    flags = set((first.get("flags") or first.get("Features") or "").split())
    wanted = ("avx2", "fma", "avx512f", "avx512_bf16", "amx_bf16", "amx_int8", "bf16", "i8mm", "sve2", "hypervisor")
    return {
        "model_name": first.get("model name") or platform.processor() or None,
        "vendor": first.get("vendor_id") or first.get("CPU implementer"),
        "family": first.get("cpu family"),
        "model": first.get("model") or first.get("CPU part"),
        "flags": [f for f in wanted if f in flags],
        "virtual": "hypervisor" in flags,
        "printed_hz": float(first["cpu MHz"]) * 1e6 if "cpu MHz" in first else None,
    }


def knobs(root: Path = Path("/")) -> dict[str, str | None]:
    """Kernel settings that move the numbers; None where they cannot be read."""
    bracketed = re.compile(r"\[(\S+)\]")

    def chosen(path: str) -> str | None:
        text = _text(root / path)
        match = bracketed.search(text or "")
        return match[1] if match else text

    return {
        "transparent_hugepage": chosen("sys/kernel/mm/transparent_hugepage/enabled"),
        "numa_balancing": _text(root / "proc/sys/kernel/numa_balancing"),
        "governor": _text(root / "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
        "smt": _text(root / "sys/devices/system/cpu/smt/control"),
        "boot_options": " ".join(BOOT_OPTIONS.findall(_text(root / "proc/cmdline") or "")) or None,
        "load_average": " ".join((_text(root / "proc/loadavg") or "").split()[:3]) or None,
    }


def relevant_variables(environ: dict[str, str]) -> dict[str, str]:
    """Environment variables that steer libraries; the values of secrets are masked."""
    return {
        name: "(masked)" if SECRET.search(name) else CREDENTIALS.sub("://(masked)@", value)
        for name, value in sorted(environ.items())
        if name.startswith(KNOB_PREFIXES)
    }


def packages() -> dict[str, str]:
    out = {}
    for name in PACKAGES:
        try:
            out[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return out


def git_state(directory: Path) -> dict[str, Any]:
    """Commit and whether tracked files differ; nulls outside a checkout."""
    commit = _command("git", "-C", str(directory), "rev-parse", "HEAD")
    status = _command("git", "-C", str(directory), "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "dirty": None if status is None else bool(status)}


def compiler() -> str | None:
    """The C compiler the CPU probe would use, with its version line; None where it would find none."""
    try:
        command = native.compilers()[0]
    except native.NativeUnavailable:
        return None
    return f"{' '.join(command)}: {(_command(*command, '--version') or 'no version').splitlines()[0]}"


def fingerprint(found: dict[str, Any], root: Path = Path("/")) -> dict[str, Any]:
    """Everything env.json holds. `found` is the device as `targets.Found.to_json` gives it."""
    allowance = cpu_allowance(root)
    shm = shutil.disk_usage("/dev/shm") if Path("/dev/shm").is_dir() else None
    return {
        "host": {
            "name": socket.gethostname(),
            "system": f"{platform.system()} {platform.release()} {platform.machine()}",
            "distribution": next(iter(PRETTY_NAME.findall(_text(root / "etc/os-release") or "")), None),
            "cpu": cpu_info(root),
            "cpus": {**asdict(allowance), "threads": allowance.threads, "online": os.cpu_count()},
            "caches": caches(allowance.affinity, root),
            "llc_bytes": llc_bytes(caches(allowance.cores, root)),
            "numa_nodes": numa_nodes(root),
            "memory": memory(root),
            "shm_free_bytes": shm.free if shm else None,
            "disk_free_bytes": shutil.disk_usage(".").free,
        },
        "device": found,
        "software": {
            "python": platform.python_version(),
            "packages": packages(),
            "compiler": compiler(),
            "driver": _text(root / "sys/module/amdgpu/version") or _text(root / "sys/module/nvidia/version"),
        },
        "knobs": knobs(root),
        "variables": relevant_variables(dict(os.environ)),
    }


def checks(env: dict[str, Any]) -> list[dict[str, Any]]:
    """Pre-run checks: what was found, what is wanted, whether it holds (None: cannot be told), why, and the mend."""
    host, knob, device = env["host"], env["knobs"], env["device"]
    threads, mem = host["cpus"]["threads"], host["memory"]
    load = float(knob["load_average"].split()[0]) if knob["load_average"] else None
    gib = 2**30
    rows = [
        ("device", device.get("note") or device["raw_name"], "usable", not device.get("note"),
         "an unusable GPU would be measured as a CPU", "see the message; check the driver, groups and the torch build"),
        ("load average", load, f"below {0.5 * threads:g}", None if load is None else load < 0.5 * threads,
         "other work takes cores and memory bandwidth from the measurement", "stop other jobs and measure again"),
        ("CPU quota", host["cpus"]["quota"] or "none", "none, or whole cores",
         host["cpus"]["quota"] is None or host["cpus"]["quota"] == int(host["cpus"]["quota"]),
         "a quota stops all threads once it is used up", "raise the quota, or set it to whole cores"),
        ("usable memory", f"{(mem['usable_bytes'] or 0) / gib:.1f} GiB", "at least 4 GiB",
         None if mem["usable_bytes"] is None else mem["usable_bytes"] >= 4 * gib,
         "the bandwidth plateau needs buffers far larger than the caches", "free memory or raise the limit"),
        ("transparent huge pages", knob["transparent_hugepage"], "always or madvise",
         None if knob["transparent_hugepage"] is None else knob["transparent_hugepage"] in ("always", "madvise"),
         "small pages cost bandwidth through TLB misses", "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"),
        ("NUMA balancing", knob["numa_balancing"], "0",
         None if knob["numa_balancing"] is None else knob["numa_balancing"] == "0" or host["numa_nodes"] in (None, 1),
         "the kernel moves pages while they are measured", "sysctl kernel.numa_balancing=0"),
        ("frequency governor", knob["governor"], "performance",
         None if knob["governor"] is None else knob["governor"] == "performance",
         "the clock ramps up inside a measurement", "cpupower frequency-set -g performance"),
        ("C compiler", env["software"]["compiler"], "any",
         env["software"]["compiler"] is not None or device["kind"] != "cpu",
         "without one a CPU's peak cannot be probed", "install gcc, or set CC"),
        ("shared memory", None if host["shm_free_bytes"] is None else f"{host['shm_free_bytes'] / gib:.1f} GiB",
         "at least 1 GiB", None if host["shm_free_bytes"] is None else host["shm_free_bytes"] >= gib,
         "collectives exchange data there", "start the container with --shm-size=8g"),
    ]  # fmt: skip
    names = ("check", "found", "wanted", "ok", "why", "mend")
    return [dict(zip(names, (r[0], None if r[1] is None else str(r[1]), *r[2:]), strict=True)) for r in rows]


def cases(kind: str) -> list[Case]:
    """The instrument's own rows: no work is declared, only time."""
    out = [
        Case("clock.read", {"what": "one perf_counter_ns call"}),
        Case("clock.fixed_work", {"what": "a fixed loop of about 1.5 ms on one core"}),
    ]
    if kind != "cpu":
        out.append(Case("event.empty_pair", {"what": "two device events with nothing between"}))
    return out


def _fixed_work(rounds: int) -> float:
    start = time.perf_counter_ns()
    total = 0
    for i in range(rounds):
        total += i * i
    return (time.perf_counter_ns() - start) / 1e9


def measure(session: Session, machine: Machine, spec: Spec) -> None:
    """Time the instrument: clock reads, a fixed piece of work, and on a GPU empty event pairs."""
    read = time.perf_counter_ns

    def clock_read() -> list[float]:
        out = []
        for _ in range(20):
            start = read()
            for _ in range(READS):
                read()
            out.append((read() - start) / 1e9)
        return out

    rounds = max(1000, int(20000 * 1.5e-3 / max(_fixed_work(20000), 1e-6)))
    samplers = {
        "clock.read": (clock_read, READS),
        "clock.fixed_work": (lambda: [_fixed_work(rounds) for _ in range(100)], 1),
        "event.empty_pair": (lambda: session.timer.samples(lambda _: None, 0, 50, 1)[0], 1),
    }
    backend = f"CPython {sys.version.split()[0]}"
    session.run_blocks([
        Prepared(
            c, sampler=lambda c=c: (samplers[c.name][0](), c), calls=samplers[c.name][1], backend=backend, threads=1
        )
        for c in cases(machine.kind)
    ])  # fmt: skip
