"""What the machine is, read from fixture trees: limits where they bind, and null where nothing can be read."""

import copy
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from escher_kernels import environment, records, timing, workload
from escher_kernels.environment import (
    caches,
    checks,
    cpu_allowance,
    cpu_info,
    fingerprint,
    knobs,
    llc_bytes,
    memory,
    parse_cpu_list,
    quota_cores,
    relevant_variables,
)

GIB, MIB = 2**30, 2**20
CPU_FOUND = {"kind": "cpu", "raw_name": "AMD EPYC", "note": None}


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n", encoding="utf-8")
    return root


def cpus(n: int, smt: int = 1, names=("core_cpus_list",)) -> dict[str, str]:
    """Topology files of n logical CPUs; as on most servers the siblings of a core are c and c + n/smt."""
    half = n // smt
    return {
        f"sys/devices/system/cpu/cpu{c}/topology/{name}": ",".join(str(c % half + i * half) for i in range(smt))
        for c in range(n)
        for name in names
    }


# ---- cores ----

# The table of ollama#17916, onyx#12351, lilbee#660, batpred#4771: cpu.max -> threads of 12 CPUs
QUOTAS = {
    "max 100000": 12, "400000 100000": 4, "765000 100000": 7, "1150000 100000": 11, "50000 100000": 1, "1200000 100000": 12,
    "9900000 100000": 12, "100000 100000": 1, "199999 100000": 1, "200000 50000": 4, "0 100000": 12, "-1 100000": 12,
    "garbage": 12, "": 12, "400000": 12, "a b": 12, "400000 0": 12,
}  # fmt: skip


@pytest.mark.parametrize("text", QUOTAS)
def test_quota_v2(tmp_path, text):
    root = tree(tmp_path, {"proc/self/cgroup": "0::/job", "sys/fs/cgroup/job/cpu.max": text, **cpus(12)})
    found = cpu_allowance(root, list(range(12)))
    assert found.threads == QUOTAS[text] and len(set(found.cores)) == found.threads
    assert ("quota" in found.why) == (QUOTAS[text] < 12)


@pytest.mark.parametrize(
    ("quota", "period", "threads"),
    [("-1", "100000", 12), ("400000", "100000", 4), ("765000", "100000", 7), ("50000", "100000", 1), ("x", "y", 12)],
)
def test_quota_v1(tmp_path, quota, period, threads):
    files = {"cpu.cfs_quota_us": quota, "cpu.cfs_period_us": period}
    root = tree(tmp_path, {
        "proc/self/cgroup": "4:memory:/job\n3:cpu,cpuacct:/job\n0::/",
        **{f"sys/fs/cgroup/cpu,cpuacct/job/{n}": t for n, t in files.items()}, **cpus(12),
    })  # fmt: skip
    assert cpu_allowance(root, list(range(12))).threads == threads


def test_quota_cores():
    assert quota_cores("150000 100000") == 1.5 and quota_cores(None, "250000", "100000") == 2.5
    assert quota_cores(None) is None and quota_cores("max 100000") is None and quota_cores(None, "-1", "100000") is None


@pytest.mark.parametrize("binding", ["a/b/c", "a/b", "a", ""])
def test_the_quota_of_an_ancestor_binds(tmp_path, binding):
    files = {f"sys/fs/cgroup/{p}/cpu.max": "max 100000" for p in ("a/b/c", "a/b", "a", "")}
    files[f"sys/fs/cgroup/{binding}/cpu.max"] = "300000 100000"
    root = tree(tmp_path, {"proc/self/cgroup": "0::/a/b/c", **files, **cpus(8)})
    assert cpu_allowance(root, list(range(8))).threads == 3


def test_the_tightest_of_several_quotas_binds(tmp_path):
    quotas = {"a/b": "600000 100000", "a": "250000 100000"}
    root = tree(tmp_path, {
        "proc/self/cgroup": "0::/a/b", **{f"sys/fs/cgroup/{p}/cpu.max": t for p, t in quotas.items()}, **cpus(8),
    })  # fmt: skip
    assert (cpu_allowance(root, list(range(8))).quota, cpu_allowance(root, list(range(8))).threads) == (2.5, 2)


@pytest.mark.parametrize("name", ["core_cpus_list", "thread_siblings_list"])
def test_siblings_count_as_one_core(tmp_path, name):
    root = tree(tmp_path, cpus(8, smt=2, names=(name,)))
    found = cpu_allowance(root, list(range(8)))
    assert found.cores == [0, 1, 2, 3] and found.affinity == list(range(8))
    assert "8 CPUs allowed, 4 physical cores" in found.why
    assert cpu_allowance(root, [2, 6, 7]).cores == [2, 7]  # 2 and 6 are one core; 7 stands for core 3
    quota = {"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "500000 100000"}
    assert cpu_allowance(tree(tmp_path, quota), list(range(8))).threads == 4  # the quota is above the cores


def test_missing_topology_counts_every_cpu(tmp_path):
    found = cpu_allowance(tmp_path, [3, 1])
    assert (found.cores, found.quota) == ([1, 3], None)


@given(st.sets(st.integers(0, 300), min_size=1))
def test_cpu_lists_are_read_as_the_kernel_writes_them(chosen):
    runs, text = sorted(chosen), []
    while runs:
        low = high = runs.pop(0)
        while runs and runs[0] == high + 1:
            high = runs.pop(0)
        text.append(str(low) if low == high else f"{low}-{high}")
    assert parse_cpu_list(",".join(text)) == sorted(chosen)


@pytest.mark.parametrize("text", [None, "", "x", "-1", "0,x", "0-x", "0x0f"])
def test_a_cpu_list_that_is_none(text):
    assert parse_cpu_list(text) == []


# ---- memory ----


def host(total=64 * GIB, available=48 * GIB, group="0::/job"):
    return {
        "proc/meminfo": f"MemTotal: {total // 1024} kB\nMemFree: 1 kB\nMemAvailable: {available // 1024} kB",
        "proc/self/cgroup": group,
    }


def test_without_a_limit_the_host_bounds(tmp_path):
    root = tree(tmp_path, {**host(), "sys/fs/cgroup/job/memory.max": "max"})
    assert memory(root) == {
        "total_bytes": 64 * GIB, "available_bytes": 48 * GIB, "limit_bytes": None, "bounded_by": "host",
        "usable_bytes": 48 * GIB,
    }  # fmt: skip


@pytest.mark.parametrize("group", ["job", ""])  # its own limit, or an ancestor's
def test_a_limit_bounds(tmp_path, group):
    files = {"memory.max": str(8 * GIB), "memory.current": str(3 * GIB)}
    root = tree(tmp_path, {**host(), **{f"sys/fs/cgroup/{group}/{n}": t for n, t in files.items()}})
    found = memory(root)
    assert (found["limit_bytes"], found["usable_bytes"]) == (8 * GIB, 5 * GIB)
    assert found["bounded_by"] == f"control group {root / 'sys/fs/cgroup' / group}"


def test_file_cache_does_not_count_as_used(tmp_path):
    # reading the torch wheel alone fills gigabytes of a container's limit; the kernel drops them when asked for memory
    files = {"memory.max": 8 * GIB, "memory.current": 7 * GIB, "memory.stat": f"anon 1\ninactive_file {6 * GIB}"}
    v2 = tree(tmp_path / "2", {**host(), **{f"sys/fs/cgroup/job/{n}": str(t) for n, t in files.items()}})
    assert memory(v2)["usable_bytes"] == 7 * GIB
    files = {
        "memory.limit_in_bytes": 8 * GIB, "memory.usage_in_bytes": 7 * GIB,
        "memory.stat": f"inactive_file 0\ntotal_inactive_file {6 * GIB}\nx_inactive_file {99 * GIB}",
    }  # fmt: skip
    files = {f"sys/fs/cgroup/memory/job/{n}": str(t) for n, t in files.items()}
    assert memory(tree(tmp_path / "1", {**host(group="4:memory:/job"), **files}))["usable_bytes"] == 7 * GIB


def test_v1_without_a_limit_writes_a_huge_number(tmp_path):
    files = {"memory.limit_in_bytes": "9223372036854771712", "memory.usage_in_bytes": "1"}
    files = {f"sys/fs/cgroup/memory/job/{n}": t for n, t in files.items()}
    found = memory(tree(tmp_path, {**host(group="4:memory:/job"), **files}))
    assert (found["limit_bytes"], found["usable_bytes"]) == (None, 48 * GIB)


def test_a_limit_above_what_the_host_has_left_does_not_bound(tmp_path):
    files = {"sys/fs/cgroup/job/memory.max": str(60 * GIB), "sys/fs/cgroup/job/memory.current": "0"}
    found = memory(tree(tmp_path, {**host(available=2 * GIB), **files}))
    assert (found["usable_bytes"], found["bounded_by"], found["limit_bytes"]) == (2 * GIB, "host", 60 * GIB)


@pytest.mark.parametrize("total", [int(0.4 * GIB), int(1.5 * 2**40)])
def test_small_and_large_hosts(tmp_path, total):
    found = memory(tree(tmp_path, host(total=total // 1024 * 1024, available=total // 1024 * 1024)))
    assert found["usable_bytes"] == total // 1024 * 1024


def test_nothing_to_read(tmp_path):
    assert memory(tmp_path)["usable_bytes"] is None
    found = memory(tree(tmp_path, {"proc/meminfo": "nonsense", "proc/self/cgroup": "nonsense"}))
    assert found["usable_bytes"] is None and found["bounded_by"] == "host"


def test_over_the_limit_leaves_nothing_and_not_less(tmp_path):
    files = {"sys/fs/cgroup/job/memory.max": str(GIB), "sys/fs/cgroup/job/memory.current": str(2 * GIB)}
    assert memory(tree(tmp_path, {**host(), **files}))["usable_bytes"] == 0


# ---- caches ----


def cache_files(n: int, per_l3: int, l3: str) -> dict[str, str]:
    out = {}
    for c in range(n):
        first = c // per_l3 * per_l3
        for i, (kind, level, size, shared) in enumerate([
            ("Data", "1", "32K", str(c)), ("Instruction", "1", "64K", str(c)), ("Unified", "2", "1M", str(c)),
            ("Unified", "3", l3, f"{first}-{first + per_l3 - 1}"),
        ]):  # fmt: skip
            where = f"sys/devices/system/cpu/cpu{c}/cache/index{i}"
            out |= {f"{where}/type": kind, f"{where}/level": level, f"{where}/size": size}
            out[f"{where}/shared_cpu_list"] = shared
    return out


def test_every_l3_that_is_touched_counts_once(tmp_path):
    root = tree(tmp_path, cache_files(64, 8, "32768K"))
    found = caches(list(range(64)), root)
    assert llc_bytes(found) == 8 * 32 * MIB
    assert llc_bytes(caches([0, 1, 9], root)) == 2 * 32 * MIB  # only those in use
    assert {(c["level"], c["size_bytes"]) for c in found} == {(1, 32 * 1024), (2, MIB), (3, 32 * MIB)}
    assert len([c for c in found if c["level"] == 1]) == 64  # the instruction caches are left out


def test_without_an_l3_the_l2_is_the_last(tmp_path):
    files = {k: v for k, v in cache_files(4, 4, "32768K").items() if "index3" not in k}
    assert llc_bytes(caches([0, 1, 2, 3], tree(tmp_path, files))) == 4 * MIB


def test_missing_or_strange_sysfs(tmp_path):
    assert caches([0, 1], tmp_path) == [] and llc_bytes([]) is None
    where = "sys/devices/system/cpu/cpu0/cache/index"
    strange = {
        f"{where}0/type": "Data", f"{where}0/level": "1", f"{where}0/size": "lots",
        f"{where}1/type": "Unified", f"{where}1/level": "", f"{where}1/size": "32K",
        f"{where}2/type": "Unified", f"{where}2/level": "2", f"{where}2/size": "1G",
    }  # fmt: skip
    assert caches([0], tree(tmp_path, strange)) == [{"level": 2, "size_bytes": GIB, "shared_cpu_list": "0"}]


# ---- the CPU, knobs, variables ----


def test_cpu_info(tmp_path):
    x86 = "processor : 0\nvendor_id\t: GenuineIntel\ncpu family\t: 6\nmodel\t\t: 143\nmodel name\t: Intel(R) Xeon(R)\n"
    x86 += (
        "cpu MHz\t\t: 2000.5\nflags\t\t: fpu avx2 fma avx512f amx_bf16 hypervisor\n\nprocessor : 1\nmodel name : other"
    )
    found = cpu_info(tree(tmp_path / "x86", {"proc/cpuinfo": x86}))
    assert found["model_name"] == "Intel(R) Xeon(R)" and (found["family"], found["model"]) == ("6", "143")
    assert found["virtual"] and found["printed_hz"] == 2000.5e6
    assert found["flags"] == ["avx2", "fma", "avx512f", "amx_bf16", "hypervisor"]
    arm = "processor\t: 0\nFeatures\t: fp asimd bf16 i8mm sve2\nCPU implementer\t: 0x41\nCPU part\t: 0xd4f"
    found = cpu_info(tree(tmp_path / "arm", {"proc/cpuinfo": arm}))
    assert (found["vendor"], found["model"], found["flags"]) == ("0x41", "0xd4f", ["bf16", "i8mm", "sve2"])
    assert found["printed_hz"] is None and not found["virtual"]
    assert cpu_info(tmp_path / "nowhere")["vendor"] is None


def test_knobs(tmp_path):
    files = {
        "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never", "proc/sys/kernel/numa_balancing": "1",
        "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "powersave", "proc/loadavg": "0.50 1.00 2.00 3/400 7",
        "proc/cmdline": "root=/dev/sda1 password=x iommu=pt mitigations=off quiet",
    }  # fmt: skip
    found = knobs(tree(tmp_path, files))
    assert found["transparent_hugepage"] == "madvise" and found["governor"] == "powersave"
    assert found["load_average"] == "0.50 1.00 2.00" and found["boot_options"] == "iommu=pt mitigations=off"
    assert set(knobs(tmp_path / "nowhere").values()) == {None}


def test_secrets_are_masked_and_other_variables_left_out():
    found = relevant_variables({
        "OMP_NUM_THREADS": "4", "NCCL_API_KEY": "k", "TORCH_AUTH_TOKEN": "t", "ROCM_PASSWORD": "p", "HOME": "/root",
        "AWS_SECRET_ACCESS_KEY": "s", "hip_x": "y",
    })  # fmt: skip
    assert found == {
        "NCCL_API_KEY": "(masked)", "OMP_NUM_THREADS": "4", "ROCM_PASSWORD": "(masked)", "TORCH_AUTH_TOKEN": "(masked)",
    }  # fmt: skip


def test_git_state(tmp_path):
    assert environment.git_state(tmp_path) == {"commit": None, "dirty": None}
    found = environment.git_state(Path(__file__).resolve().parent)
    assert found["commit"] is None or len(found["commit"]) == 40


# ---- the fingerprint and its checks ----


@pytest.fixture(scope="module")
def healthy(tmp_path_factory):
    """A fingerprint of which every check holds, drawn from a fixture tree."""
    root = tree(tmp_path_factory.mktemp("host"), {
        **host(), **cpus(8, smt=2), **cache_files(8, 8, "32768K"),
        "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never", "proc/sys/kernel/numa_balancing": "0",
        "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "performance", "proc/loadavg": "0.10 0 0 1/2 3",
        "sys/devices/system/node/node0/cpulist": "0-7", "etc/os-release": 'ID=x\nPRETTY_NAME="Some Linux 1"',
    })  # fmt: skip
    env = fingerprint(CPU_FOUND, root)
    # what is asked of this host and not of the tree
    env["software"]["compiler"], env["host"]["shm_free_bytes"] = "/usr/bin/cc: cc 1", 8 * GIB
    env["host"]["cpus"] |= {"threads": 4, "quota": None}
    return env


def test_a_healthy_host_passes_every_check(healthy):
    assert {row["check"]: row["ok"] for row in checks(healthy)} == dict.fromkeys(
        [
            "device", "load average", "CPU quota", "usable memory", "transparent huge pages", "NUMA balancing",
            "frequency governor", "C compiler", "shared memory",
        ],
        True,
    )  # fmt: skip
    assert healthy["host"]["distribution"] == "Some Linux 1" and healthy["host"]["numa_nodes"] == 1


@pytest.mark.parametrize(
    ("check", "change", "ok"),
    [
        ("device", {"device.note": "no permission on /dev/kfd"}, False),
        ("load average", {"knobs.load_average": "2.10 0 0"}, False),
        ("load average", {"knobs.load_average": None}, None),
        ("CPU quota", {"host.cpus.quota": 7.65}, False),
        ("CPU quota", {"host.cpus.quota": 8.0}, True),
        ("usable memory", {"host.memory.usable_bytes": int(0.4 * GIB)}, False),
        ("usable memory", {"host.memory.usable_bytes": int(1.5 * 2**40)}, True),
        ("usable memory", {"host.memory.usable_bytes": None}, None),
        ("transparent huge pages", {"knobs.transparent_hugepage": "never"}, False),
        ("transparent huge pages", {"knobs.transparent_hugepage": None}, None),
        ("NUMA balancing", {"knobs.numa_balancing": "1", "host.numa_nodes": 2}, False),
        ("NUMA balancing", {"knobs.numa_balancing": "1", "host.numa_nodes": 1}, True),
        ("NUMA balancing", {"knobs.numa_balancing": None}, None),
        ("frequency governor", {"knobs.governor": "powersave"}, False),
        ("frequency governor", {"knobs.governor": None}, None),
        ("C compiler", {"software.compiler": None}, False),
        ("C compiler", {"software.compiler": None, "device.kind": "cuda"}, True),
        ("shared memory", {"host.shm_free_bytes": 64 * MIB}, False),
        ("shared memory", {"host.shm_free_bytes": None}, None),
    ],
)
def test_a_check_flips(healthy, check, change, ok):
    env = copy.deepcopy(healthy)
    for path, value in change.items():
        *way, last = path.split(".")
        at = env
        for key in way:
            at = at[key]
        at[last] = value
    rows = {row["check"]: row for row in checks(env)}
    assert rows[check]["ok"] is ok
    assert all(row["ok"] for name, row in rows.items() if name != check)
    assert rows[check]["why"] and rows[check]["mend"] and rows[check]["wanted"]


def test_the_fingerprint_of_this_host():
    env = fingerprint(CPU_FOUND)
    env["checks"] = checks(env)
    assert json.loads(json.dumps(env, allow_nan=False)) == env
    assert set(env["host"]["cpus"]["cores"]) <= set(env["host"]["cpus"]["affinity"]) == os.sched_getaffinity(0)
    assert env["host"]["cpus"]["threads"] >= 1 and env["software"]["python"]


def test_the_fingerprint_of_a_host_that_shows_nothing(tmp_path):
    env = fingerprint(CPU_FOUND, tmp_path)
    env["checks"] = checks(env)
    assert json.loads(json.dumps(env, allow_nan=False)) == env
    assert env["host"]["llc_bytes"] is None and env["host"]["numa_nodes"] is None


# ---- the instrument's rows ----


def test_measure_writes_its_rows(monkeypatch):
    monkeypatch.setattr(environment, "_fixed_work", lambda rounds: rounds * 1e-8)
    written = []
    session = timing.Session(
        "environment", timing.CpuTimer(), written.append, timing.BUDGETS["quick"], 1, lambda *a, **k: None
    )
    machine = timing.Machine(None, "cpu", "cpu", "bf16", GIB, MIB, (0,))
    environment.measure(session, machine, workload.load())
    assert {r.case for r in written} == {"clock.read", "clock.fixed_work"} == {c.name for c in environment.cases("cpu")}
    assert {r.block for r in written} == set(range(6))
    assert all(r.flop is None and r.bytes_moved is None and min(r.samples_s) >= 0 for r in written)
    work = [r for r in written if r.case == "clock.fixed_work"]
    assert all(math.isclose(s, 1.5e-3, rel_tol=0.1) for r in work for s in r.samples_s)  # sized to about 1.5 ms


def test_only_a_gpu_has_event_rows():
    assert {c.name for c in environment.cases("gpu")} - {c.name for c in environment.cases("cpu")} == {
        "event.empty_pair"
    }


def test_named_cases_alone_are_measured_and_one_that_never_came_is_told(tmp_path):
    command = [sys.executable, "-m", "escher_kernels", "environment", "--run", str(tmp_path), "--device", "cpu",
               "--budget", "quick", "--only", "clock.read", "clock.raed"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1], timeout=120, check=False)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "error: family environment measured no case 'clock.raed'" in done.stderr
    [path] = (tmp_path / "records").iterdir()
    assert {r.case for r in records.read(path).records} == {"clock.read"}
