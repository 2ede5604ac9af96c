"""Made-up machines for tests: a tree of the files that the kernel shows, and a command that answers like nvidia-smi.

All three are healthy: `cpu_host`, `amd_node` (8 devices of MI355X shape) and `nvidia_node` (2 of H200 shape). A test damages one
file, cell or variable and asks again. The numbers are of no real machine.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

from escher_book import doctor
from escher_kernels import devices, targets, workload

GIB = 2**30
FLAGS = "fpu avx2 fma avx512f avx512_bf16"
HOST = {
    "proc/cpuinfo": "".join(
        f"processor\t: {n}\nvendor_id\t: AuthenticAMD\nmodel name\t: A CPU\nflags\t\t: {FLAGS}\n\n" for n in range(8)
    ),
    "proc/meminfo": f"MemTotal: {512 * 2**20} kB\nMemAvailable: {500 * 2**20} kB",
    "proc/loadavg": "0.10 0.20 0.30 1/400 4242",
    "proc/cmdline": "BOOT_IMAGE=/vmlinuz root=/dev/sda2 amd_iommu=on iommu=pt",
    "proc/sys/kernel/numa_balancing": "0",
    "proc/self/cgroup": "0::/jobs/one",
    "proc/self/limits": "Limit                     Soft Limit           Hard Limit           Units\n"
    "Max locked memory         unlimited            unlimited            bytes",
    "proc/self/mountinfo": "22 1 8:2 / / rw,relatime shared:1 - ext4 /dev/sda2 rw\n"
    "23 22 0:21 / /proc rw shared:2 - proc proc rw\n24 22 0:22 / /a\\040b rw - tmpfs tmpfs rw",
    "sys/fs/cgroup/jobs/one/cpu.max": "max 100000",
    "sys/fs/cgroup/jobs/cpu.max": "max 100000",
    "sys/fs/cgroup/jobs/one/memory.max": "max",
    "sys/fs/cgroup/jobs/memory.max": "max",
    "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never",
    "sys/devices/system/node/node0/cpulist": "0-3",
    "sys/devices/system/node/node1/cpulist": "4-7",
    "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "performance",
    "sys/devices/system/clocksource/clocksource0/current_clocksource": "tsc",
    "dev/shm/.keep": "",
    "etc/group": "root:x:0:\nrender:x:109:someone\nvideo:x:44:",
}
CARD = {
    "vendor": "0x1002", "device": "0x75a3", "product_name": "AMD Instinct MI355X", "numa_node": "1",
    "current_compute_partition": "SPX", "current_memory_partition": "NPS1", "power_dpm_force_performance_level": "auto",
    "pp_dpm_sclk": "S: 95Mhz *\n0: 500Mhz\n1: 2400Mhz",
    "current_link_width": "16", "max_link_width": "16",
    "current_link_speed": "32.0 GT/s PCIe", "max_link_speed": "32.0 GT/s PCIe",
    "hwmon/hwmon3/name": "amdgpu", "hwmon/hwmon3/power1_cap": "1400000000", "hwmon/hwmon3/power1_cap_default": "1400000000",
    "hwmon/hwmon3/power1_cap_max": "1400000000", "hwmon/hwmon3/temp2_label": "junction", "hwmon/hwmon3/temp2_input": "41000",
    "hwmon/hwmon3/temp3_label": "mem", "hwmon/hwmon3/temp3_input": "36000",
    "ras/gfx_err_count": "ue: 0\nce: 0", "ras/umc_err_count": "ue: 0\nce: 0\nde: 0", "ras/gpu_vram_bad_pages": "",
    "vbios_version": "113-A00000-000", "fw_version/smc_fw_version": "0x00557e00", "fw_version/mec_fw_version": "0x00000022",
    "fw_version/uvd_fw_version": "0x00000000",
}  # fmt: skip
SMI = {
    "pci.bus_id": "00000000:19:00.0", "name": "NVIDIA H200", "pci.device_id": "0x233510DE", "mig.mode.current": "Disabled",
    "power.limit": "700.00", "power.default_limit": "700.00", "power.max_limit": "700.00", "pstate": "P0",
    "clocks_event_reasons.active": "0x0000000000000001", "clocks_throttle_reasons.active": "0x0000000000000001",
    "clocks.current.sm": "345", "clocks.max.sm": "1980",
    "pcie.link.width.current": "16", "pcie.link.width.max": "16", "pcie.link.gen.current": "5", "pcie.link.gen.max": "5",
    "retired_pages.single_bit_ecc.count": "[N/A]", "retired_pages.double_bit.count": "[N/A]",
    "ecc.errors.uncorrected.volatile.total": "0", "ecc.errors.corrected.volatile.total": "0",
    "vbios_version": "96.00.00.00.00", "inforom.img": "G520.0200.00.05", "fan.speed": "[N/A]", "temperature.gpu": "33",
}  # fmt: skip


@dataclass
class Smi:
    """Answers as nvidia-smi does: rows of cells by field, and what the tests make it say in their place."""

    gpus: list[dict[str, str]] = field(default_factory=list)
    jobs: list[tuple[str, str, str]] = field(default_factory=list)  # gpu_bus_id, pid, process_name
    remapped: dict[str, tuple[str, str]] = field(default_factory=dict)  # bus id -> correctable, uncorrectable
    says: tuple[int, str] | None = None
    unknown: tuple[str, ...] = ()
    asked: list[str] = field(default_factory=list)

    def __call__(self, argv: list[str]) -> tuple[int, str]:
        if self.says is not None:
            return self.says
        if not self.gpus:
            return 127, ""
        query, _, names = argv[1].partition("=")
        names = names.split(",")
        self.asked.append(query)
        assert argv[2] == "--format=csv,noheader,nounits"
        for name in names:
            if name in self.unknown:
                return 2, f'Field "{name}" is not a valid field to query.\n\n'
        if query == "--query-gpu":
            table = [[gpu[name] for name in names] for gpu in self.gpus]
        elif query == "--query-compute-apps":
            table = self.jobs
        else:
            table = [[bus, *counts] for bus, counts in self.remapped.items()]
        return 0, "".join(", ".join(row) + "\n" for row in table)


@dataclass
class Machine:
    """A machine that can be damaged: `write`, `remove`, `cards`, and the fields of what is not a file."""

    root: Path
    found: targets.Found
    smi: Smi = field(default_factory=Smi)
    environ: dict[str, str] = field(default_factory=dict)
    tools: tuple[str, ...] = ("cc", "g++")
    free: dict[str, int] = field(default_factory=lambda: {"shm": 256 * GIB, "results": 900 * GIB})
    machine: str = "x86_64"
    torch: str | None = "2.9.0+cpu"
    spec: workload.Spec = field(default_factory=workload.load)
    limits: doctor.Limits = field(default_factory=doctor.Limits)
    require_gpu: bool = False

    @property
    def results(self) -> Path:
        return self.root / "results"

    def write(self, name: str, text: str | bytes) -> None:
        """A file of the tree, its link followed; a line end is added to a text, as the kernel does."""
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else f"{text}\n".encode())

    def remove(self, name: str) -> None:
        path = self.root / name
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()

    def link(self, name: str, to: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(to)

    def cards(self, name: str, text: str | bytes | None, which: int | None = None) -> None:
        """Write (None: remove) a file of every AMD device, or of one by its place."""
        for number in range(8) if which is None else [which]:
            path = f"sys/class/drm/card{number + 1}/device/{name}"
            self.remove(path) if text is None else self.write(path, text)

    def command(self, argv: list[str]) -> tuple[int, str]:
        if argv[0] == "nvidia-smi":
            return self.smi(argv)
        return (0, f"{argv[0]} 12.2.0\n") if argv[0] in self.tools else (127, "")

    def usage(self, path: Path) -> SimpleNamespace:
        free = self.free["shm" if path.name == "shm" else "results"]
        return SimpleNamespace(total=1000 * GIB, free=free)

    def access(self, path: Path, mode: int) -> bool:
        """By the owner's bits alone: the tests' user may be root, to whom every file is open."""
        return path.stat().st_mode >> 6 & mode == mode

    def host(self) -> doctor.Host:
        return doctor.Host(
            root=self.root, environ=self.environ, command=self.command, usage=self.usage, access=self.access,
            affinity=tuple(range(8)), uid=1000, groups=(1000,), pid=4242, machine=self.machine, torch=self.torch,
        )  # fmt: skip

    def devices(self) -> list[devices.Device]:
        return devices.devices(self.root, self.command)

    def rows(self) -> list[doctor.Check]:
        return doctor.rows(self.found, self.results, self.host(), self.limits, self.require_gpu, self.spec)

    def row(self, group: str, name: str) -> doctor.Check:
        (found,) = [c for c in self.rows() if (c.group, c.name) == (group, name)]
        return found


def _machine(root: Path, found: targets.Found, **more) -> Machine:
    out = Machine(root, found, **more)
    for name, text in HOST.items():
        out.write(name, text)
    out.link("proc/self/ns/pid", devices.HOST_PIDS)
    out.results.mkdir()
    return out


def _node(machine: Machine, name: str) -> None:
    machine.write(name, "")
    (machine.root / name).chmod(0o660)


def cpu_host(root: Path) -> Machine:
    return _machine(root, targets.Found("cpu", "A CPU", "x86_64", 8, 512 * GIB))


def bus(number: int) -> str:
    return f"0000:{0x05 + 0x10 * number:02x}:00.0"


def amd_node(root: Path, count: int = 8) -> Machine:
    found = targets.Found("rocm", "AMD Instinct MI355X", "gfx950", 256, 288 * GIB, 2.4e9, count)
    out = _machine(root, found, torch="2.9.0+rocm7.0")
    _node(out, "dev/kfd")
    for number in range(count):
        pci = f"sys/devices/pci0000:00/{bus(number)}"
        for name, text in CARD.items():
            out.write(f"{pci}/{name}", text)
        out.write(f"{pci}/drm/renderD{128 + number}/dev", "226:128")
        out.link(f"sys/class/drm/card{number + 1}/device", f"../../../devices/pci0000:00/{bus(number)}")
        node = f"sys/class/kfd/kfd/topology/nodes/{number + 2}"
        out.write(f"{node}/gpu_id", str(1000 + number))
        out.write(f"{node}/properties", f"simd_count 1024\nlocation_id {0x05 + 0x10 * number << 8}\ndomain 0\nunique_id 1")
        _node(out, f"dev/dri/renderD{128 + number}")
    for cpu in (0, 1):
        out.write(f"sys/class/kfd/kfd/topology/nodes/{cpu}/gpu_id", "0")
    (out.root / "sys/class/kfd/kfd/proc").mkdir()
    return out


def kfd_job(machine: Machine, pid: int, name: str | None, held: dict[int, str]) -> None:
    """A process that amdkfd shows: place of the device -> bytes of its memory, as text."""
    for number, text in held.items():
        machine.write(f"sys/class/kfd/kfd/proc/{pid}/vram_{1000 + number}", text)
    if name:
        machine.write(f"proc/{pid}/comm", name)


def nvidia_node(root: Path) -> Machine:
    buses = ("00000000:19:00.0", "00000000:3B:00.0")
    smi = Smi([{**SMI, "pci.bus_id": b} for b in buses], remapped={b: ("0", "0") for b in buses})
    found = targets.Found("cuda", "NVIDIA H200", "sm_90", 132, 141 * GIB, 1.98e9, 2)
    out = _machine(root, found, smi=smi, torch="2.9.0+cu128")
    for name in ("nvidiactl", "nvidia-uvm", "nvidia0", "nvidia1"):
        _node(out, f"dev/{name}")
    for address in ("0000:19:00.0", "0000:3b:00.0"):
        for name, text in (("current_link_width", "16"), ("max_link_width", "16"), ("numa_node", "0"),
                           ("current_link_speed", "32.0 GT/s PCIe"), ("max_link_speed", "32.0 GT/s PCIe")):  # fmt: skip
            out.write(f"sys/bus/pci/devices/{address}/{name}", text)
    return out
