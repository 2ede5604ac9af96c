"""The doctor's rows: a healthy machine is ok in each, one damaged file or variable flips its row, garbage raises nothing."""

import json
import re
from dataclasses import replace

import machine_tree
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from machine_tree import GIB, Machine

from escher_book import doctor
from escher_book.doctor import ATTENTION, NA, OK, PROBLEM, UNKNOWN, Check
from escher_kernels import targets

MAKE = {"cpu": machine_tree.cpu_host, "amd": machine_tree.amd_node, "nvidia": machine_tree.nvidia_node}
NOTE = "GPU present (/dev/kfd) but not usable by this torch: torch 2.9.0+cpu is built for the CPU only"
CPU_FOUND = targets.Found("cpu", "A CPU", "x86_64", 8, 512 * GIB)


def no_gpu_seen(m: Machine) -> None:
    m.found, m.torch = replace(CPU_FOUND, note=NOTE), "2.9.0+cpu"


def shut(name: str):
    return lambda m: (m.root / name).chmod(0o060)


def dead_smi(m: Machine) -> None:
    m.smi.says = (9, "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n")


def cell(name: str, text: str, which=slice(1, 2)):
    return lambda m: [gpu.update({name: text}) for gpu in m.smi.gpus[which]]


def card(name: str, text: str | None, which: int | None = 4):
    return lambda m: m.cards(name, text, which)


def file(name: str, text: str | bytes | None):
    return lambda m: m.remove(name) if text is None else m.write(name, text)


def many(*damages):
    return lambda m: [damage(m) for damage in damages]


def attr(**values):
    return lambda m: [setattr(m, name, value) for name, value in values.items()]


def environ(**values):
    return lambda m: m.environ.update(values)


def guest(m: Machine) -> None:
    m.write("proc/cpuinfo", machine_tree.HOST["proc/cpuinfo"].replace("fpu", "fpu hypervisor"))


SHM, CUR = "sys/kernel/mm/transparent_hugepage/enabled", "sys/devices/system/clocksource/clocksource0/current_clocksource"
BALANCING, GOVERNOR = "proc/sys/kernel/numa_balancing", "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"
JOBS = "sys/fs/cgroup/jobs"  # this process is in jobs/one below it
NO_GROUP = file("proc/self/cgroup", None)
ALL = slice(None)

# (machine, row, damage, status, words in the row: found, and for attention and problem the mend)
FLIPS = [
    ("cpu", "usable", attr(require_gpu=True), PROBLEM, "none found|without --require-gpu"),
    ("amd", "usable", no_gpu_seen, PROBLEM, "not usable by this torch|check the driver"),
    ("amd", "usable", attr(found=CPU_FOUND), ATTENTION, "is not used|"),
    ("amd", "usable", attr(found=CPU_FOUND, require_gpu=True), PROBLEM, "is not used|"),
    ("amd", "device nodes", many(no_gpu_seen, shut("dev/kfd")), PROBLEM,
     "/dev/kfd ----rw---- group .* cannot be opened.*uid 1000, groups 1000|usermod -aG render"),
    ("amd", "device nodes", shut("dev/kfd"), PROBLEM, "cannot be opened|usermod"),
    ("amd", "device nodes", shut("dev/dri/renderD129"), ATTENTION, "renderD129 .* cannot be opened|--group-add"),
    ("amd", "device nodes", many(no_gpu_seen, file("dev/kfd", None)), PROBLEM, "/dev/kfd is missing|--device=/dev/kfd"),
    ("nvidia", "device nodes", many(no_gpu_seen, shut("dev/nvidiactl")), PROBLEM,
     "/dev/nvidiactl .* cannot be opened|--gpus all"),
    ("nvidia", "device nodes", file("dev/nvidia-uvm", None), ATTENTION, "/dev/nvidia-uvm is missing|modprobe"),
    ("amd", "torch build", no_gpu_seen, PROBLEM, r"torch 2.9.0\+cpu, which uses the CPU here|make env"),
    ("amd", "torch build", lambda m: setattr(m, "found", replace(m.found, count=7)), ATTENTION, "7 of 8 devices|every device"),
    ("nvidia", "torch build", many(no_gpu_seen, attr(torch=None)), PROBLEM, "torch is not installed|make env"),
    ("nvidia", "torch build", dead_smi, UNKNOWN, "how many"),
    ("amd", "visible devices", environ(ROCR_VISIBLE_DEVICES="4,5", HIP_VISIBLE_DEVICES="4,5"), PROBLEM,
     "ROCR leaves 2|unset ROCR_VISIBLE_DEVICES HIP_VISIBLE_DEVICES"),
    ("amd", "visible devices", environ(ROCR_VISIBLE_DEVICES="4,5", HIP_VISIBLE_DEVICES="0"), ATTENTION, "counts among|unset"),
    ("amd", "visible devices", environ(HIP_VISIBLE_DEVICES="0", CUDA_VISIBLE_DEVICES="1"), PROBLEM, "contradict|unset"),
    ("amd", "visible devices", environ(GPU_DEVICE_ORDINAL="0,1"), ATTENTION, "GPU_DEVICE_ORDINAL='0,1'|unset"),
    ("nvidia", "visible devices", environ(CUDA_VISIBLE_DEVICES=""), PROBLEM, "every device is hidden|unset"),
    ("nvidia", "visible devices", environ(CUDA_VISIBLE_DEVICES="-1"), PROBLEM, "every device is hidden|unset"),
    ("nvidia", "visible devices", environ(CUDA_VISIBLE_DEVICES="GPU-0a1b"), ATTENTION, "GPU-0a1b|unset"),
    ("amd", "other jobs", lambda m: machine_tree.kfd_job(m, 77, "trainer", {0: "9", 1: "9"}), PROBLEM,
     r"77 \(trainer\) on 2 of 8|end it"),
    ("amd", "other jobs", file("sys/class/kfd/kfd/proc", None), UNKNOWN, "cannot be told"),
    ("nvidia", "other jobs", lambda m: m.smi.jobs.append(("00000000:19:00.0", "9", "python")), PROBLEM,
     r"9 \(python\) on 1 of 2|wait"),
    ("nvidia", "other jobs", file("proc/self/ns/pid", None), UNKNOWN, "container"),
    ("amd", "clocks", card("power_dpm_force_performance_level", "low"), ATTENTION,
     r"level low.* on 1 \(0000:45:00.0\)|setperflevel auto"),
    ("amd", "clocks", card("power_dpm_force_performance_level", "high", None), ATTENTION, "level high.* on all 8|setperflevel"),
    ("amd", "clocks", card("power_dpm_force_performance_level", None, None), UNKNOWN, "unreadable"),
    ("nvidia", "clocks", cell("clocks_event_reasons.active", "0x42"), ATTENTION,
     "application clocks, hardware thermal slowdown.*3b:00|-rgc"),
    ("nvidia", "clocks", cell("clocks_event_reasons.active", "[Unknown Error]", ALL), UNKNOWN, ""),
    ("amd", "power cap", card("hwmon/hwmon3/power1_cap", "750000000"), ATTENTION,
     "750 W .default 1400 W.*45:00.0|resetpoweroverdrive"),
    ("amd", "power cap", card("hwmon/hwmon3/power1_cap_default", None, None), UNKNOWN, "default unreadable"),
    ("nvidia", "power cap", cell("power.limit", "500.00", ALL), ATTENTION, "500 W .default 700 W.* on all 2|nvidia-smi -pl"),
    ("amd", "compute partition", card("current_compute_partition", "CPX"), ATTENTION,
     "SPX on 7; CPX on 1|--compute-partition SPX"),
    ("amd", "compute partition", card("current_compute_partition", "DPX", None), ATTENTION, "DPX on all 8|SPX"),
    ("amd", "compute partition", card("current_compute_partition", None, None), UNKNOWN, "unreadable"),
    ("nvidia", "compute partition", cell("mig.mode.current", "Enabled"), ATTENTION, "MIG enabled on 1|-mig 0"),
    ("nvidia", "compute partition", cell("mig.mode.current", "[Unknown Error]", ALL), UNKNOWN, "unreadable"),
    ("amd", "memory partition", card("current_memory_partition", "NPS4", None), ATTENTION, "NPS4|--memory-partition NPS1"),
    ("amd", "memory partition", card("current_memory_partition", "what", None), UNKNOWN, "unreadable"),
    ("amd", "PCIe link", card("current_link_width", "8"), ATTENTION, "x8 at 32 GT/s, at most x16 at 32|the slot"),
    ("amd", "PCIe link", card("current_link_speed", "2.5 GT/s PCIe", None), ATTENTION, "x16 at 2.5 GT/s, at most|idle device"),
    ("amd", "PCIe link", card("max_link_speed", "Unknown", None), UNKNOWN, r"\? GT/s"),
    ("nvidia", "PCIe link", file("sys/bus/pci/devices/0000:3b:00.0/current_link_width", "4"), ATTENTION, "x4.*3b:00.0|slot"),
    ("amd", "retired pages", card("ras/gpu_vram_bad_pages", "0x00000001 : 0x00001000 : R"), ATTENTION,
     "1 on 1 .*45:00.0|replace"),
    ("amd", "retired pages", card("ras/gpu_vram_bad_pages", None), UNKNOWN, "unreadable on 1"),
    ("nvidia", "retired pages", lambda m: m.smi.remapped.update({"00000000:3B:00.0": ("0", "1")}), ATTENTION, "1 on 1|replace"),
    ("nvidia", "retired pages", lambda m: m.smi.remapped.clear(), UNKNOWN, "unreadable"),
    ("amd", "uncorrected errors", card("ras/gfx_err_count", "ue: 1\nce: 0"), PROBLEM, "1 on 1 .*45:00.0|boot again"),
    ("amd", "uncorrected errors", card("ras/gfx_err_count", "Query currently inaccessible"), UNKNOWN, "unreadable"),
    ("nvidia", "uncorrected errors", cell("ecc.errors.uncorrected.volatile.total", "2"), PROBLEM, "2 on 1|boot again"),
    ("nvidia", "uncorrected errors", cell("ecc.errors.uncorrected.volatile.total", "[N/A]"), UNKNOWN, "unreadable"),
    ("amd", "corrected errors", card("ras/umc_err_count", "ue: 0\nce: 9"), ATTENTION, "9 on 1|number grows"),
    ("nvidia", "corrected errors", cell("ecc.errors.corrected.volatile.total", "5"), ATTENTION, "5 on 1|number grows"),
    ("amd", "corrected errors", card("ras", None), UNKNOWN, "unreadable on 1"),
    ("amd", "firmware", card("fw_version/smc_fw_version", "0x00557d00"), ATTENTION, "smc: 0x00557d00, 0x00557e00|one release"),
    ("amd", "firmware", card("vbios_version", None), ATTENTION, "vbios: 113-A00000-000, none|one release"),
    ("nvidia", "firmware", many(cell("vbios_version", "[N/A]"), cell("inforom.img", "[N/A]")), UNKNOWN, "0 versions read on 1"),
    ("amd", "fans", many(card("hwmon/hwmon3/fan1_input", "0"), card("hwmon/hwmon3/temp2_input", "71000")), ATTENTION,
     "0 rpm at 71 C|pwm1_enable"),
    ("amd", "fans", card("hwmon", None), UNKNOWN, "unreadable"),
    ("nvidia", "fans", many(cell("fan.speed", "0"), cell("temperature.gpu", "80")), ATTENTION, "fan at 0% at 80 C|pwm1"),
    ("amd", "iommu", file("proc/cmdline", "root=/dev/sda2 amd_iommu=on"), ATTENTION, "amd_iommu=on|GRUB_CMDLINE_LINUX"),
    ("nvidia", "iommu", file("proc/cmdline", "quiet"), ATTENTION, "no iommu option|iommu=pt"),
    ("amd", "iommu", file("proc/cmdline", None), UNKNOWN, "cannot be read"),
    ("amd", "locked memory", file("proc/self/limits", "Max locked memory         8388608   8388608   bytes"), ATTENTION,
     "8 MiB|memlock=-1"),
    ("amd", "locked memory", file("proc/self/limits", None), UNKNOWN, "cannot be read"),
    ("cpu", "load average", file("proc/loadavg", "7.50 1 1 1/2 3"), ATTENTION, "7.5|stop other jobs"),
    ("cpu", "load average", file("proc/loadavg", "busy"), UNKNOWN, "cannot be read"),
    ("cpu", "CPU quota", file(f"{JOBS}/one/cpu.max", "350000 100000"), ATTENTION,
     "3.5 cores, set by /sys/fs/cgroup/jobs/one|raise"),
    ("cpu", "CPU quota", file(f"{JOBS}/cpu.max", "150000 100000"), ATTENTION,
     "1.5 cores, set by /sys/fs/cgroup/jobs$|whole cores"),
    ("cpu", "CPU quota", file(f"{JOBS}/cpu.max", "garbage"), UNKNOWN, "cgroup/jobs/cpu.max holds 'garbage'"),
    ("cpu", "CPU quota", NO_GROUP, UNKNOWN, "no control group"),
    ("cpu", "memory limit", file(f"{JOBS}/memory.max", str(2200 * 2**20)), ATTENTION,
     "2.1 GiB of the host's 512.0 GiB, set by /sys/fs/cgroup/jobs: .* tokens a call instead|--memory"),
    ("cpu", "memory limit", file(f"{JOBS}/one/memory.max", str(GIB)), PROBLEM, "1.0 GiB .*jobs/one: .*may be used|--memory"),
    ("cpu", "memory limit", file(f"{JOBS}/one/memory.max", "garbage"), UNKNOWN, "one/memory.max holds"),
    ("cpu", "memory limit", NO_GROUP, UNKNOWN, "no control group"),
    ("cpu", "usable memory", file(f"{JOBS}/memory.max", str(2 * GIB)), ATTENTION,
     "2.0 GiB, bounded by control group /sys/fs/cgroup/jobs$|raise the limit"),
    ("cpu", "usable memory", file("proc/meminfo", "MemTotal: 9000000 kB\nMemAvailable: 900000 kB"), ATTENTION,
     "0.9 GiB|free memory"),
    ("cpu", "usable memory", file("proc/meminfo", None), UNKNOWN, "cannot be read"),
    ("cpu", "shared memory", lambda m: m.free.update(shm=64 * 2**20), ATTENTION, "0.1 GiB|--shm-size"),
    ("cpu", "shared memory", file("dev/shm", None), UNKNOWN, "cannot be read"),
    ("cpu", "transparent huge pages", file(SHM, "always madvise [never]"), ATTENTION, "never|echo madvise"),
    ("cpu", "transparent huge pages", file(SHM, None), UNKNOWN, "cannot be read"),
    ("cpu", "NUMA balancing", file(BALANCING, "1"), ATTENTION, "1|sysctl kernel.numa_balancing=0"),
    ("cpu", "NUMA balancing", file(BALANCING, None), UNKNOWN, "cannot be read"),
    ("cpu", "NUMA balancing", many(file(BALANCING, "1"), file("sys/devices/system/node", None)), UNKNOWN, "1"),
    ("cpu", "frequency governor", file(GOVERNOR, "powersave"), ATTENTION, "powersave|cpupower"),
    ("cpu", "frequency governor", file(GOVERNOR, None), UNKNOWN, "cannot be read"),
    ("cpu", "clock source", file(CUR, "hpet"), ATTENTION, "hpet|tsc=reliable"),
    ("cpu", "clock source", file(CUR, "kvm-clock"), ATTENTION, "kvm-clock|tsc"),
    ("cpu", "clock source", file(CUR, None), UNKNOWN, "cannot be read"),
    ("cpu", "C compiler", attr(tools=("g++",)), ATTENTION, "tried cc, gcc, clang|install gcc"),
    ("cpu", "C compiler", environ(CC="my-cc -m64"), ATTENTION, "tried CC=my-cc -m64|set CC"),
    ("cpu", "C compiler", environ(CC="'"), UNKNOWN, "No closing quotation"),
    ("cpu", "C++ compiler", attr(tools=("cc",)), ATTENTION, r"tried g\+\+|install g\+\+"),
    ("amd", "C++ compiler", environ(CXX="nowhere"), ATTENTION, "CXX=nowhere|set CXX"),
    ("cpu", "free space", lambda m: m.free.update(results=GIB), ATTENTION, "1.0 GiB|RESULTS_DIR"),
    ("cpu", "free space", lambda m: m.results.chmod(0o500), PROBLEM, "cannot be written by uid 1000|RESULTS_DIR"),
    ("cpu", "file system", lambda m: mount(m, m.results, "tmpfs"), ATTENTION, "tmpfs at|RESULTS_DIR"),
    ("cpu", "file system", lambda m: mount(m, m.results, "nfs4"), ATTENTION, "nfs4 at|local RESULTS_DIR"),
    ("cpu", "file system", lambda m: mount(m, m.root, "fuse.sshfs"), ATTENTION, "fuse.sshfs at|local"),
    ("cpu", "file system", file("proc/self/mountinfo", None), UNKNOWN, "no mount point"),
    ("cpu", "calibration", attr(limits=doctor.Limits(drift_pct=0.001)), PROBLEM, "FLOP -0.0055|configs/escher_14b_480p.json"),
    ("cpu", "calibration", lambda m: setattr(m, "spec", replace(m.spec, ffn=16384)), PROBLEM, r"FLOP \+|correct configs/"),
]  # fmt: skip


def mount(m: Machine, at, kind: str) -> None:
    m.write("proc/self/mountinfo", machine_tree.HOST["proc/self/mountinfo"] + f"\n30 22 0:40 / {at} rw shared:9 - {kind} some rw")


@pytest.mark.parametrize("kind", MAKE)
def test_a_healthy_machine_is_ok_in_every_row(tmp_path, kind):
    rows = MAKE[kind](tmp_path).rows()
    assert {c.name: c.status for c in rows if c.status not in (OK, NA)} == {}
    assert {c.name for c in rows if c.status == NA} == {
        "cpu": {"usable"}, "amd": {"fans"}, "nvidia": {"fans", "memory partition"},
    }[kind]  # fmt: skip
    assert doctor.worst(rows) == OK and doctor.exit_status(rows) == 0


@pytest.mark.parametrize(
    ("kind", "name", "damage", "status", "words"), FLIPS, ids=[f"{n}-{k}-{s}-{i}" for i, (k, n, _, s, _) in enumerate(FLIPS)]
)
def test_a_damage_flips_its_row(tmp_path, kind, name, damage, status, words):
    machine = MAKE[kind](tmp_path)
    before = {c.name: c for c in machine.rows()}
    damage(machine)
    rows = machine.rows()
    (row,) = [c for c in rows if c.name == name]
    assert before[name].status in (OK, NA) and row.status == status, row
    found, _, mend = words.partition("|")
    assert re.search(found, row.found), row
    if status in (ATTENTION, PROBLEM):
        assert row.mend and re.search(mend, row.mend) and row.why and row.wanted, row
    if status == UNKNOWN:
        assert re.search("on the host|see that", row.mend), row
    assert doctor.exit_status(rows) == (2 if PROBLEM in {c.status for c in rows} else 0)


def test_every_row_has_a_damage_that_flips_it():
    names = [name for _, name, _ in doctor.ROWS]
    assert len(set(names)) == len(names)
    assert {name for _, name, _, status, _ in FLIPS if status in (ATTENTION, PROBLEM)} == set(names)
    unreadable = {name for _, name, _, status, _ in FLIPS if status == UNKNOWN}
    no_file = {"usable", "device nodes", "visible devices", "C++ compiler", "free space", "calibration"}
    assert unreadable == set(names) - no_file


# (machine, row, change, words): as it is, there is nothing to mend
FINE = [
    ("amd", "visible devices", environ(HIP_VISIBLE_DEVICES="0, 1,2,3,4,5,6,7"), OK, "HIP"),
    ("nvidia", "visible devices", environ(HIP_VISIBLE_DEVICES="3"), OK, "none set"),  # of no meaning there
    ("amd", "other jobs", lambda m: machine_tree.kfd_job(m, 4242, "escher", {0: "9"}), OK, "none"),  # this process
    ("amd", "torch build",
     many(card("current_compute_partition", "CPX", None), attr(found=replace(CPU_FOUND, kind="rocm", count=64))), OK, "64 of 8"),
    ("amd", "power cap", card("hwmon/hwmon3/power1_cap", "1399500000", None), OK, "1399.5 W"),
    ("amd", "fans", many(card("hwmon/hwmon3/fan1_input", "0", None)), OK, "0 rpm at 41 C"),
    ("amd", "fans", many(card("hwmon/hwmon3/fan1_input", "900", None), card("hwmon/hwmon3/temp2_input", "90000", None)), OK,
     "900 rpm"),
    ("nvidia", "compute partition", cell("mig.mode.current", "[N/A]", ALL), OK, "no MIG mode"),
    ("nvidia", "clocks", cell("clocks_event_reasons.active", "0x4", ALL), OK, "P0"),  # the power cap, at work
    ("amd", "iommu", file("proc/cmdline", "intel_iommu=off"), OK, "off"),
    ("amd", "iommu", guest, NA, "guest"),
    ("cpu", "CPU quota", file(f"{JOBS}/cpu.max", "400000 100000"), OK, "4 cores, set by /sys/fs/cgroup/jobs$"),
    ("amd", "memory limit", file(f"{JOBS}/memory.max", str(64 * GIB)), OK, "64.0 GiB of"),
    ("cpu", "memory limit", file(f"{JOBS}/memory.max", str(2**63 - 4096)), OK, "none"),
    ("cpu", "NUMA balancing", many(file(BALANCING, "1"), file("sys/devices/system/node/node1", None)), NA, "one NUMA node"),
    ("cpu", "frequency governor", many(guest, file("sys/devices/system/cpu/cpu0/cpufreq", None)), NA, "guest"),
    ("cpu", "clock source", many(guest, file(CUR, "kvm-clock")), OK, "kvm-clock"),
    ("cpu", "clock source", many(attr(machine="aarch64"), file(CUR, "arch_sys_counter")), NA, "x86"),
    ("cpu", "C compiler", many(attr(tools=("clang", "g++"))), OK, "clang"),
    ("cpu", "free space", lambda m: m.results.rmdir(), OK, "900.0 GiB at"),
    ("cpu", "file system", lambda m: [mount(m, m.root, "nfs"), mount(m, m.root.parent / m.root.name[:-1], "tmpfs")], OK,
     "ext4 at /$"),
    ("cpu", "calibration", lambda m: setattr(m, "spec", replace(m.spec, pilot=None)), NA, "declares no pilot totals"),
    ("cpu", "calibration", lambda m: setattr(m, "spec", doctor.workload.fit(m.spec, "cpu", 8 * GIB)), OK, "FLOP -0.0055"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "name", "change", "status", "words"), FINE, ids=[f"{n}-{k}-{i}" for i, (k, n, *_) in enumerate(FINE)]
)
def test_what_is_no_fault(tmp_path, kind, name, change, status, words):
    machine = MAKE[kind](tmp_path)
    change(machine)
    (row,) = [c for c in machine.rows() if c.name == name]
    assert row.status == status and re.search(words, row.found), row


def test_a_host_without_gpu_has_one_row_of_it(tmp_path):
    assert [c.name for c in machine_tree.cpu_host(tmp_path).rows() if c.group == "GPU"] == ["usable"]


def test_a_gpu_whose_driver_files_are_gone_is_unknown_and_not_ok(tmp_path):
    machine = machine_tree.amd_node(tmp_path)
    machine.remove("sys/class/drm")
    rows = {c.name: c.status for c in machine.rows() if c.group == "GPU"}
    told = {"usable", "device nodes", "visible devices", "iommu", "locked memory"}
    blind = {name for group, name, _ in doctor.ROWS if group == "GPU"} - told
    assert {name for name, status in rows.items() if status == UNKNOWN} == blind


def test_an_integrated_gpu_beside_is_left_out(tmp_path):
    machine = machine_tree.amd_node(tmp_path)
    machine.cards("device", "0x150e", 7)
    machine.cards("current_compute_partition", None, 7)
    machine.found = replace(machine.found, count=7)
    rows = {c.name: c for c in machine.rows()}
    assert rows["compute partition"].found == "SPX on all 7" and rows["torch build"].status == OK


# ---- nothing that a file holds ends it ----


CARD3 = "sys/class/drm/card3/device"


def _files(machine: Machine) -> list[str]:
    return sorted(
        str(p.relative_to(machine.root))
        for p in machine.root.rglob("*")
        if p.is_file() and (machine.root / "dev") not in p.parents and "pci0000:00" not in p.parts
    ) + [f"{CARD3}/{name}" for name in machine_tree.CARD if (machine.root / CARD3 / name).exists() and name != "vendor"]


@pytest.mark.parametrize("kind", MAKE)
def test_a_missing_or_garbled_file_never_raises_and_mends_nothing(tmp_path, kind):
    """Whatever one file holds, no row but those that may read it changes, and a row that is broken already never turns ok."""
    machine = MAKE[kind](tmp_path)
    machine.write("proc/loadavg", "7.50 1 1 1/2 3")
    broken = {c.name for c in machine.rows() if c.status not in (OK, NA)}
    for name in _files(machine):
        path = machine.root / name
        held = path.read_bytes()
        for garbage in (None, b"", b"\0\xff\n\xc2\xb2 -1 1e999"):
            machine.remove(name) if garbage is None else machine.write(name, garbage)
            rows = machine.rows()
            assert broken <= {c.name for c in rows if c.status not in (OK, NA)}, name
            assert all(c.found for c in rows), name
        machine.write(name, held)


@pytest.mark.parametrize("kind", MAKE)
def test_random_bytes_in_a_file_never_raise(tmp_path, kind):
    machine = MAKE[kind](tmp_path)
    files = _files(machine)

    @settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
    @given(name=st.sampled_from(files), garbage=st.binary(max_size=120) | st.text(max_size=60).map(str.encode))
    def garbled(name, garbage):
        held = (machine.root / name).read_bytes()
        machine.write(name, garbage)
        try:
            rows = machine.rows()
            json.dumps(doctor.to_json(rows), allow_nan=False)
            doctor.as_text(rows)
        finally:
            machine.write(name, held)

    garbled()


@given(st.dictionaries(st.sampled_from(sum(doctor.VISIBLE.values(), ())), st.text(max_size=12)))
def test_any_visible_devices_are_answered(tmp_path_factory, values):
    (tmp_path_factory.getbasetemp() / "visible/dev").mkdir(parents=True, exist_ok=True)
    machine = Machine(tmp_path_factory.getbasetemp() / "visible", targets.Found("rocm", "AMD", count=8), environ=values)
    row = machine.row("GPU", "visible devices")
    assert row.status in ((ATTENTION, PROBLEM) if values else (OK,)) and all(name in row.found for name in values)


# ---- what is read ----

ROWS = [
    Check("GPU", "usable", OK, "8 x A GPU"),
    Check("GPU", "power cap", ATTENTION, "750 W", "the default", "the clock follows the cap", "reset it"),
    Check("host", "load average", PROBLEM, "9", "below 4", "other work takes cores " * 6, "stop it"),
    Check("host", "governor", NA, "a guest", "performance", "not said", "not said"),
    Check("host", "clock source", UNKNOWN, "cannot be read", "tsc"),
]
TEXT = """GPU
  ok         usable        8 x A GPU
  attention  power cap     750 W
               wanted  the default
               why     the clock follows the cap
               mend    reset it

host
  PROBLEM    load average  9
               wanted  below 4
               why     other work takes cores other work takes cores
                       other work takes cores other work takes cores
                       other work takes cores other work takes cores
               mend    stop it
  n/a        governor      a guest
  unknown    clock source  cannot be read
               wanted  tsc

1 problem, 1 attention, 1 unknown, 1 ok, 1 n/a
"""


def test_the_text():
    assert doctor.as_text(ROWS, 72) == TEXT
    assert doctor.as_text([]) == ""


@pytest.mark.parametrize("width", [0, 60, 100])
def test_the_text_keeps_to_its_width(tmp_path, width):
    machine = machine_tree.amd_node(tmp_path)
    no_gpu_seen(machine)
    shut("dev/kfd")(machine)
    lines = doctor.as_text(machine.rows(), width).splitlines()
    words = max(len(w) for line in lines for w in line.split())
    assert max(map(len, lines)) <= max(width, 60) + words


def test_the_worst_row_counts():
    order = [NA, OK, UNKNOWN, ATTENTION, PROBLEM]
    for milder, harder in zip(order, order[1:], strict=False):
        both = [Check("g", "a", harder, ""), Check("g", "b", milder, "")]
        assert doctor.worst(both) == doctor.worst(both[::-1]) == harder
    assert doctor.worst([]) == NA
    assert [doctor.exit_status([Check("g", "a", status, "")]) for status in order] == [0, 0, 0, 0, 2]


def test_json_holds_every_field():
    told = doctor.to_json(ROWS)
    assert (told["worst"], told["exit_status"], told["schema"]) == (PROBLEM, 2, 1)
    assert [Check(**row) for row in told["rows"]] == ROWS
    assert json.loads(json.dumps(told, allow_nan=False)) == told


def test_this_machine_is_answered(tmp_path):
    rows = doctor.rows(targets.detect("cpu"), tmp_path)
    assert {c.status for c in rows} <= set(doctor.ORDER) and {c.group for c in rows} >= {"GPU", "host", "storage", "workload"}
