"""The device found, the profile asked for, and the configuration they are judged by."""

import copy
import json
import re
import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from escher_kernels import targets
from escher_kernels.targets import (
    ConfigError,
    DeviceError,
    Found,
    Profile,
    Selection,
    TargetError,
    detect,
    identify,
    nominal_cpu_flop_per_cycle,
    resolve,
)
from validation.config import load as load_config

CONFIG = load_config()
RAW = json.loads(CONFIG.path.read_text(encoding="utf-8"))
TARGETS = {t["key"]: t for t in RAW["targets"]}
MIB = 2**20


def fitting(key: str, **changed) -> Found:
    """What a whole device of this target reports."""
    t = TARGETS[key]
    full = t["fallback"]
    memory = full["memory_mib"] or t["memory"]["bytes"] // MIB
    found = Found(
        kind={"amd": "rocm", "nvidia": "cuda"}[t["vendor"]],
        raw_name=t["device_names"]["torch"][0],
        arch=full["arch"],
        compute_units=(full["compute_units"] or [160])[0],
        total_memory_bytes=memory * MIB,
        max_clock_hz=full["max_clock_mhz"] * 1e6 if full["max_clock_mhz"] else None,
    )
    return replace(found, **changed)


def key_of(found: Found) -> str | None:
    profile, reason = identify(found, CONFIG)
    assert reason and "\n" not in reason
    return profile.key if profile else None


# ----------------------------------------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("key", "name"), [(k, n) for k, t in TARGETS.items() for n in t["device_names"]["torch"] + t["device_names"]["smi"]]
)
def test_every_real_name_is_exactly_its_target(key, name):
    assert key_of(fitting(key, raw_name=name)) == key
    if name.lower() not in targets.GENERIC_NAMES:
        plain = [k for k, t in TARGETS.items() if re.search(t["match"], name, re.I)]
        assert [k for k in plain if not re.search(TARGETS[k]["exclude"] or r"$^x", name, re.I)] == [key]


def test_the_registry_has_the_known_targets():
    assert len(TARGETS) == 20 and sum(len(t["device_names"]["torch"]) for t in TARGETS.values()) > 25


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("AMD_Instinct_MI300X_OAM", "mi300x"),
        ("amd instinct mi355x", "mi355x"),
        ("NVIDIA_H100_80GB_HBM3", "h100_sxm"),
        ("  NVIDIA H200 ", "h200"),
        ("NVIDIA-H200", "h200"),
    ],
)
def test_spelling_of_a_name_does_not_matter(name, key):
    assert key_of(fitting(key, raw_name=name)) == key


LOOK_ALIKES = """
AMD Instinct MI308X|AMD Instinct MI300X HF|AMD Instinct MI300X-HF|AMD Instinct MI300|AMD Instinct MI250
AMD Instinct MI210|AMD Instinct MI100|AMD Instinct MI325A|AMD Instinct MI3550X|AMD Radeon AI PRO R9600D
AMD Radeon RX 9070 XT|AMD Radeon PRO W7900|NVIDIA A100-SXM4-80GB MIG 1g.10gb|NVIDIA H200 MIG 1g.18gb
NVIDIA H100 80GB HBM3 MIG 3g.40gb|NVIDIA B200 MIG 1g.23gb|GRID A100D-80C|GRID A100-40C|NVIDIA L40S-48Q
NVIDIA H100-80C|NVIDIA B200-180C|NVIDIA vGPU A100-SXM4-80GB|NVIDIA A100-SXM-64GB|NVIDIA A100X
NVIDIA A800-SXM4-80GB|NVIDIA A800 80GB PCIe|NVIDIA A30|NVIDIA A10|NVIDIA A100-PG509-200|NVIDIA H800|NVIDIA H20
NVIDIA H100 64GB HBM2e|NVIDIA H100 SXM5 64GB|NVIDIA H100 SXM5 96GB|NVIDIA GH200 480GB|NVIDIA GH200 144G HBM3e
NVIDIA H100 80GB HBM2e|NVIDIA H100 144GB HBM3e|NVIDIA H100 SXM 144GB|NVIDIA H200 NVL|NVIDIA_H200_NVL
NVIDIA-H200-NVL|NVIDIA H200 PCIe|NVIDIA B100|NVIDIA GB300|NVIDIA RTX PRO 6000 Blackwell Server Edition
NVIDIA GeForce RTX 4090|NVIDIA L40|NVIDIA L4|Tesla V100-SXM2-16GB|Tesla V100-PCIE-32GB|Tesla V100S-PCIE-32GB
Tesla V100-SXM3-32GB|Tesla V100-SXM2-32GB-LS|Tesla T4|NVIDIA Thor
"""


@pytest.mark.parametrize("name", [n for line in LOOK_ALIKES.strip().splitlines() for n in line.split("|")])
def test_look_alikes_have_no_profile(name):
    # whatever whole device's facts the look-alike comes with
    for key in TARGETS:
        assert key_of(fitting(key, raw_name=name)) is None


def test_b200_and_gb200_stay_apart():
    assert key_of(fitting("gb200", raw_name="NVIDIA B200")) is None
    assert key_of(fitting("b200", raw_name="NVIDIA GB200")) is None


# ----------------------------------------------------------------------------------------------- facts


@pytest.mark.parametrize(
    ("found", "key"),
    [
        (fitting("mi355x", raw_name=""), "mi355x"),
        (fitting("mi350x", raw_name="AMD Radeon Graphics"), "mi350x"),
        (fitting("mi355x", raw_name="", max_clock_hz=None), None),  # MI355X or MI350X
        (fitting("mi355x", raw_name="", max_clock_hz=2300e6), None),
        (fitting("mi355x", raw_name="", max_clock_hz=None, pci_id="1002:75a0"), "mi350x"),
        (fitting("mi300x", raw_name=""), "mi300x"),
        (fitting("mi300x", raw_name="", total_memory_bytes=205822885888), "mi300x"),  # VF
        (fitting("mi300x", raw_name="", pci_id="1002:74a9"), None),  # MI300X HF
        (fitting("mi325x", raw_name=""), "mi325x"),
        (fitting("mi300a", raw_name=""), "mi300a"),
        (fitting("mi250x", raw_name=""), "mi250x"),
        (fitting("mi250x", raw_name="", compute_units=104), None),  # MI250
        (fitting("r9700", raw_name="AMD Radeon Graphics", compute_units=32), "r9700"),  # torch counts WGP
        (fitting("mi300x", raw_name="", compute_units=80), None),  # MI308X
        (fitting("mi300x", raw_name="", compute_units=38, total_memory_bytes=24 * 2**30), None),  # CPX
        (fitting("mi300x", raw_name="", arch="gfx940"), None),
        (fitting("mi300x", raw_name="", arch=None), None),
        (fitting("mi300x", raw_name="", compute_units=None), None),
        (fitting("h200", raw_name="NVIDIA Graphics Device"), "h200"),
        (fitting("h100_sxm", raw_name="NVIDIA Graphics Device"), "h100_sxm"),
        (fitting("h100_nvl", raw_name=""), "h100_nvl"),
        (fitting("a100_sxm_80gb", raw_name="NVIDIA Graphics Device"), None),  # SXM or PCIe
        (fitting("h200", raw_name="NVIDIA Graphics Device", total_memory_bytes=141 * 2**30 // 8), None),
        (Found("rocm", "AMD Radeon Graphics", "gfx1103", 12, 16 * 2**30), None),  # a laptop's
    ],
)
def test_a_blank_name_is_decided_by_what_the_device_has(found, key):
    assert key_of(found) == key


def test_an_ambiguous_blank_name_says_between_what():
    assert "mi355x and mi350x" in identify(fitting("mi355x", raw_name="", max_clock_hz=None), CONFIG)[1]


@pytest.mark.parametrize(
    ("key", "changed", "says"),
    [
        ("mi300x", {"compute_units": 38, "total_memory_bytes": 24 * 2**30}, "38 compute units"),
        ("mi300x", {"compute_units": 152, "total_memory_bytes": 96 * 2**30}, "partition"),
        ("mi300x", {"slice": "CPX partition"}, "CPX partition"),
        ("mi350x", {"total_memory_bytes": 270_600_000_000}, "252.0 GiB"),  # a partial VF
        ("mi250x", {"raw_name": "AMD Instinct MI250X / MI250", "compute_units": 104}, "MI250"),
        ("mi300x", {"total_memory_bytes": 256 * 2**30}, "another part"),
        ("mi300x", {"arch": "gfx950"}, "architecture"),
        ("h200", {"compute_units": 16, "total_memory_bytes": 17 * 2**30}, "16 compute units"),
        ("h200", {"raw_name": "NVIDIA H200 MIG 1g.18gb", "slice": "MIG 1g.18gb"}, "MIG 1g.18gb"),
        ("a100_sxm_80gb", {"slice": "MIG (CUDA_VISIBLE_DEVICES names one)"}, "MIG"),
        ("a100_sxm_80gb", {"total_memory_bytes": 40960 * MIB}, "40.0 GiB"),
    ],
)
def test_a_part_is_never_taken_for_the_whole(key, changed, says):
    profile, reason = identify(fitting(key, **changed), CONFIG)
    assert profile is None and says in reason


@pytest.mark.parametrize(
    ("key", "mib"),
    [("h200", 143156), ("h100_sxm", 81090), ("h100_pcie", 81008), ("l40s", 45589), ("b200", 182642),
     ("a100_sxm_40gb", 40536), ("a100_sxm_40gb", 40338), ("v100_sxm2_32gb", 32510), ("l40s", 49140)],
)  # fmt: skip
def test_what_torch_and_older_drivers_report_is_still_the_whole_device(key, mib):
    assert key_of(fitting(key, total_memory_bytes=mib * MIB)) == key


def test_a_full_device_vf_is_the_device():
    assert key_of(fitting("mi300x", raw_name="AMD Instinct MI300X VF", total_memory_bytes=205822885888)) == "mi300x"


REAL = st.sampled_from([n for t in RAW["targets"] for n in t["device_names"]["torch"]])


@settings(deadline=None, max_examples=300)
@given(
    name=st.text(max_size=40) | st.tuples(st.sampled_from(["", "x", "GRID "]), REAL, st.text(max_size=4)).map("".join),
    kind=st.sampled_from(["cuda", "rocm"]),
    arch=st.none() | st.sampled_from(["gfx942", "gfx950", "sm_90", "sm_80", ""]),
    units=st.none() | st.integers(0, 400),
    memory=st.none() | st.integers(0, 2**40),
    clock=st.none() | st.floats(0, 3e9),
)  # fmt: skip
def test_any_name_is_handled_and_only_a_matching_profile_returned(name, kind, arch, units, memory, clock):
    profile, reason = identify(Found(kind, name, arch, units, memory, clock), CONFIG)
    assert reason
    if profile and name.replace("_", " ").strip(" '\"").lower() not in targets.GENERIC_NAMES:
        t = TARGETS[profile.key]
        assert re.search(t["match"], name.replace("_", " "), re.I)
        assert not (t["exclude"] and re.search(t["exclude"], name.replace("_", " "), re.I))
        assert t["vendor"] == {"cuda": "nvidia", "rocm": "amd"}[kind]


# --------------------------------------------------------------------------------------------- TARGET

CPU = Found("cpu", "AMD EPYC", "x86_64", 2)


def test_auto_takes_the_device_found():
    s = resolve("auto", fitting("mi355x"), CONFIG)
    assert s.profile == s.found_profile == CONFIG.profile("mi355x") and s.same_device
    assert resolve(" Auto ", CPU, CONFIG).profile.key == "cpu"


def test_an_unknown_device_has_no_rated_basis():
    s = resolve("auto", Found("cuda", "NVIDIA GeForce RTX 4090", "sm_89", 128, 24 * 2**30), CONFIG)
    assert s.profile is None and s.found_profile is None and not s.same_device
    assert s.reason.startswith("no rated basis: unknown device")


@pytest.mark.parametrize("found", [CPU, fitting("mi300x"), fitting("mi300x", raw_name="AMD Instinct MI308X")])
def test_another_target_than_the_device_is_not_compared(found):
    s = resolve("mi355x", found, CONFIG)
    assert s.profile.key == "mi355x" and not s.same_device and "not compared" in s.reason
    assert s.found_profile == identify(found, CONFIG)[0]


def test_a_named_target_that_is_the_device():
    assert resolve("mi300x", fitting("mi300x"), CONFIG).same_device
    assert resolve("cpu", CPU, CONFIG).same_device
    assert not resolve("cpu", fitting("mi300x"), CONFIG).same_device


@pytest.mark.parametrize(
    ("asked", "found", "key", "same"),
    [
        ("h100", fitting("h100_pcie"), "h100_pcie", True),
        ("H100", CPU, "h100_sxm", False),
        ("a100", fitting("a100_pcie_40gb"), "a100_pcie_40gb", True),
        ("a100", fitting("h200"), "a100_sxm_80gb", False),
        ("v100", CPU, "v100_sxm2_32gb", False),
    ],
)
def test_groups(asked, found, key, same):
    s = resolve(asked, found, CONFIG)
    assert (s.profile.key, s.same_device) == (key, same) and f"is a group: {key}" in s.reason


def test_an_unknown_target_lists_keys_and_groups():
    with pytest.raises(TargetError) as e:
        resolve("mi999", CPU, CONFIG)
    message = str(e.value)
    assert '"mi999"' in message and "\n" not in message
    assert all(name in message for name in [*TARGETS, *RAW["groups"], "auto", "cpu"])


def test_json_round_trips():
    found = fitting("mi300x", note="x", slice="CPX partition", pci_id="1002:74a1")
    for thing in (found, CPU, *(CONFIG.profile(k) for k in [*TARGETS, "cpu"])):
        plain = json.loads(json.dumps(thing.to_json(), allow_nan=False))
        assert plain == thing.to_json() and type(thing).from_json(plain) == thing
    for s in (resolve("h100", CPU, CONFIG), resolve("auto", replace(found, slice=None, raw_name="?"), CONFIG)):
        assert Selection.from_json(json.loads(json.dumps(s.to_json()))) == s
    with pytest.raises(TypeError):
        Profile.from_json({"key": "x"})


# --------------------------------------------------------------------------------------------- detect


def fake_torch(monkeypatch, props=None, *, hip=None, cuda=None, error=None, count=8):
    def properties(_):
        if error:
            raise RuntimeError(error)
        return types.SimpleNamespace(**props)

    gpu = types.SimpleNamespace(
        is_available=lambda: bool(props or error), device_count=lambda: count, get_device_properties=properties
    )
    version = types.SimpleNamespace(hip=hip, cuda=cuda)
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(__version__="2.9.0", version=version, cuda=gpu))


H200 = {"name": "NVIDIA H200", "major": 9, "minor": 0, "multi_processor_count": 132, "total_memory": 143156 * MIB,
        "clock_rate": 1980000, "L2_cache_size": 60 * MIB, "gcnArchName": ""}  # fmt: skip
MI300X = {"name": "", "gcnArchName": "gfx942:sramecc+:xnack-", "major": 9, "minor": 4, "multi_processor_count": 304,
          "total_memory": 206141652992, "L2_cache_size": 4 * MIB}  # fmt: skip


def amd_tree(root: Path, mode: str | None) -> Path:
    for card in ("card1", "card2"):
        device = root / "sys/class/drm" / card / "device"
        device.mkdir(parents=True)
        (device / "vendor").write_text("0x1002\n")
        (device / "device").write_text("0x74a1\n")
        if mode:
            (device / "current_compute_partition").write_text(mode + "\n")
    return root


def test_detect_cuda(monkeypatch, tmp_path):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    fake_torch(monkeypatch, H200, cuda="12.8")
    found = detect(root=tmp_path)
    assert found == Found("cuda", "NVIDIA H200", "sm_90", 132, 143156 * MIB, 1.98e9, 8, None, 60 * MIB)
    assert key_of(found) == "h200" and detect("cuda", tmp_path) == found
    with pytest.raises(DeviceError, match="rocm.*built for cuda"):
        detect("rocm", tmp_path)


def test_detect_a_mig_slice(monkeypatch, tmp_path):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    fake_torch(monkeypatch, H200 | {"name": "NVIDIA H200 MIG 1g.18gb", "multi_processor_count": 16}, cuda="12.8")
    assert detect(root=tmp_path).slice == "MIG 1g.18gb" and key_of(detect(root=tmp_path)) is None
    fake_torch(monkeypatch, H200, cuda="12.8")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-0a1b")
    assert "MIG" in detect(root=tmp_path).slice


@pytest.mark.parametrize(("mode", "part"), [(None, None), ("SPX", None), ("CPX", "CPX partition")])
def test_detect_rocm(monkeypatch, tmp_path, mode, part):
    fake_torch(monkeypatch, MI300X, hip="7.0")
    found = detect(root=amd_tree(tmp_path, mode))
    assert (found.kind, found.arch, found.slice, found.max_clock_hz) == ("rocm", "gfx942", part, None)
    assert found.pci_id == "1002:74a1" and found.llc_bytes is None
    assert key_of(found) == (None if part else "mi300x")


def test_detect_cpu_reads_the_tree(tmp_path, monkeypatch):
    monkeypatch.setattr(targets.os, "sched_getaffinity", lambda _: {0, 1, 2})
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text("processor : 0\nmodel name\t: AMD EPYC\n")
    for n, (shared, core) in enumerate([("0-1", "0-1"), ("0-1", "0-1"), ("2-3", "2-3")]):
        cpu = tmp_path / f"sys/devices/system/cpu/cpu{n}"
        files = {"index3/level": "3", "index3/size": "32768K", "index3/shared_cpu_list": shared, "index2/level": "2"}
        tree = {f"cache/{name}": text for name, text in files.items()} | {"topology/thread_siblings_list": core}
        for sub, text in tree.items():
            (cpu / sub).parent.mkdir(parents=True, exist_ok=True)
            (cpu / sub).write_text(text + "\n")
    found = detect("cpu", tmp_path)
    assert (found.kind, found.raw_name, found.compute_units, found.llc_bytes) == ("cpu", "AMD EPYC", 2, 64 * MIB)
    assert found.total_memory_bytes > 2**28 and found.note == "" and key_of(found) == "cpu"
    assert detect("cpu", tmp_path / "nothing").llc_bytes is None


@pytest.mark.parametrize(
    ("kwargs", "says"),
    [
        ({"hip": "7.0"}, "sees no GPU"),
        ({}, "built for the CPU only"),
        ({"hip": "7.0", "error": "HIP error: no device\nsecond line"}, "HIP error: no device"),
    ],
)
def test_a_gpu_that_cannot_be_used_is_never_silent(monkeypatch, tmp_path, kwargs, says):
    fake_torch(monkeypatch, **kwargs)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/kfd").touch()
    found = detect("auto", tmp_path)
    assert found.kind == "cpu" and says in found.note and "/dev/kfd" in found.note
    assert found.note in resolve("auto", found, CONFIG).reason
    with pytest.raises(DeviceError) as e:
        detect("rocm", tmp_path)
    assert says in str(e.value) and "/dev/kfd" in str(e.value) and "\n" not in str(e.value)


def test_a_device_node_without_rights_is_named(monkeypatch, tmp_path):
    fake_torch(monkeypatch, hip="7.0")
    monkeypatch.setattr(targets.os, "access", lambda *_: False)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/kfd").touch()
    assert re.search(r"/dev/kfd \(group \d+\) cannot be opened by uid \d+", detect("auto", tmp_path).note)


def test_without_torch_the_cpu_is_found_and_a_gpu_refused(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert detect("auto", tmp_path).note == ""
    with pytest.raises(DeviceError, match="cannot be imported"):
        detect("cuda", tmp_path)
    with pytest.raises(DeviceError, match="expected auto, cpu, cuda or rocm"):
        detect("gpu", tmp_path)


# --------------------------------------------------------------------------------------- configuration


def load_mutated(tmp_path, mutate) -> None:
    raw = copy.deepcopy(RAW)
    mutate(raw)
    path = tmp_path / "report_config.json"
    path.write_text(json.dumps(raw), encoding="utf-8")
    load_config(path)


def put(path: str, value):
    """A mutation: set (or, with `...`, delete) a key path; targets by index."""

    def mutate(raw):
        *parents, last = [int(p) if p.isdigit() else p for p in path.split(".")]
        node = raw
        for p in parents:
            node = node[p]
        if value is ...:
            del node[last]
        else:
            node[last] = value

    return mutate


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("thresholds.mfu_pp.value", "5%", 'mfu_pp.value is "5%"; expected a number of percentage points, e.g. 5.0'),
        ("thresholds.mfu_pp.value", ..., "thresholds.mfu_pp.value is missing; expected a number of percentage points"),
        ("thresholds.mfu_pp.value", True, "thresholds.mfu_pp.value is true; expected a number of"),
        ("thresholds.mfu_pp.value", float("nan"), "thresholds.mfu_pp.value is NaN; expected a number of"),
        ("thresholds.mfu_pp", ..., "thresholds.mfu_pp is missing"),
        ("thresholds.mfu_pp", 5, "thresholds.mfu_pp is 5; expected an object"),
        ("thresholds.mfu_pp.unit", "pp", 'thresholds.mfu_pp.unit is "pp"; expected one of percent, fraction'),
        ("thresholds.mfu_pp.unit", [], "thresholds.mfu_pp.unit is []; expected"),
        ("thresholds.attains_frac.value", 40, "thresholds.attains_frac.value is 40; expected a fraction between 0"),
        ("thresholds.cv_runs_count.value", 2.5, "thresholds.cv_runs_count.value is 2.5; expected a whole number"),
        ("thresholds.cv_pct.value.cpu", None, "thresholds.cv_pct.value.cpu is null; expected a number of percent"),
        ("thresholds.cv_pct.value", {"gpu": 3}, 'thresholds.cv_pct.value is {"gpu": 3}; expected a number of percent'),
        ("thresholds.cv_pct.source", ..., "thresholds.cv_pct.source is missing"),
        ("thresholds", [], "thresholds is []; expected an object"),
        ("thresholds", ..., "thresholds is missing"),
        ("targets", {}, "targets is {}; expected a list"),
        ("targets", ..., "targets is missing; expected a list"),
        ("targets.0", "mi355x", 'targets[0] is "mi355x"; expected an object'),
        ("targets.0.match", r"\bMI355X?(", r'targets[mi355x].match is "\\bMI355X?("; expected a valid regular exp'),
        ("targets.0.match", "", 'targets[mi355x].match is ""; expected a valid regular expression'),
        ("targets.0.key", "mi350x", 'the key "mi350x" is used twice'),
        ("targets.0.key", "cpu", 'the key "cpu" is used twice'),
        ("targets.0.key", "MI 355", 'targets[MI 355].key is "MI 355"; expected a word in small letters'),
        ("targets.0.key", ..., "targets[0].key is missing"),
        ("targets.3.bandwidth_gbs", "5300", 'targets[mi300x].bandwidth_gbs is "5300"; expected a positive number'),
        ("targets.3.dense_peaks_tflops.bf16", [1], "targets[mi300x].dense_peaks_tflops.bf16 is [1]; expected a pos"),
        ("targets.3.dense_peaks_tflops", 5, "targets[mi300x].dense_peaks_tflops is 5; expected an object"),
        ("targets.3.memory.bytes", 1.5, "targets[mi300x].memory.bytes is 1.5; expected a whole number"),
        ("targets.3.memory", ..., "targets[mi300x].memory is missing; expected an object"),
        ("targets.3.roof_floor_frac.value", 46, "targets[mi300x].roof_floor_frac.value is 46; expected a fraction"),
        ("targets.3.fallback.compute_units", 304, "targets[mi300x].fallback.compute_units is 304; expected a list of"),
        ("targets.3.compute_dtype", "fp32", 'targets[mi300x].compute_dtype is "fp32"; expected "bf16" or "fp16"'),
        ("groups.h100.default", "h200", 'groups.h100.default is "h200"; expected a member'),
        ("groups.h100.members", ["h999"], 'groups.h100.members is "h999"; expected keys of targets'),
        ("groups.h200", {"members": ["h200"], "default": "h200"}, 'the key "h200" is used twice'),
        ("groups.h100", 3, "groups.h100 is 3; expected an object"),
        ("cpu", ..., "cpu is missing"),
        ("cpu.flop_per_cycle_per_core", ..., "cpu.flop_per_cycle_per_core is missing"),
        ("cpu.flop_per_cycle_per_core.1.detect.cpus", ["Zen4"], '[Zen4].detect.cpus is ["Zen4"]; expected a list'),
        ("cpu.roof_floor_frac.value", "0.7", 'cpu.roof_floor_frac.value is "0.7"; expected a fraction'),
        ("schema", 2, "schema is 2; expected the number 1"),
        ("project.title", 7, "project.title is 7; expected text"),
        ("glossary.roof", 7, "glossary.roof is 7; expected text"),
        ("status_pills.PASS.label", ..., "status_pills.PASS.label is missing"),
        ("sources.rvs", "x", 'sources.rvs is "x"; expected an object'),
    ],
)  # fmt: skip
def test_a_config_error_names_file_key_and_what_is_expected(tmp_path, path, value, message):
    with pytest.raises(ConfigError) as e:
        load_mutated(tmp_path, put(path, value))
    lines = str(e.value).splitlines()
    assert any(message in line for line in lines), lines
    assert all(line.startswith(f"{tmp_path}/report_config.json: ") and "expected" in line for line in lines)
    assert len(lines) <= 6, lines


def test_every_key_path_may_be_missing_or_of_a_wrong_type_without_a_crash(tmp_path):
    """Whatever is wrong is a ConfigError or harmless, never another exception."""
    for key in RAW:
        for value in (..., None, 5, "x", [], {}, [5], {"x": 5}, {"x": {}}, [{}], [[]]):
            try:
                load_mutated(tmp_path, put(key, value))
            except ConfigError:
                pass


def test_all_errors_are_told_at_once(tmp_path):
    with pytest.raises(ConfigError) as e:
        load_mutated(tmp_path, lambda raw: (put("schema", 2)(raw), put("thresholds.mfu_pp.value", "5%")(raw)))
    assert len(str(e.value).splitlines()) == 2


@pytest.mark.parametrize(
    ("text", "says"), [('{\n "schema": 1,\n}', "line 3, column 1"), ("", "line 1, column 1"), ("[]", "the file is []")]
)
def test_bad_json_says_where(tmp_path, text, says):
    path = tmp_path / "c.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=f"c.json: {re.escape(says)}"):
        load_config(path)


def test_the_path_comes_from_argument_environment_or_tree(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="none.json.*expected a readable"):
        load_config(tmp_path / "none.json")
    monkeypatch.setenv(targets.CONFIG_ENV, str(tmp_path / "env.json"))
    with pytest.raises(ConfigError, match="env.json"):
        load_config()
    monkeypatch.delenv(targets.CONFIG_ENV)
    assert load_config() == CONFIG and load_config().path.name == "report_config.json"


def test_thresholds_are_looked_up_by_name_and_kind():
    assert CONFIG.threshold("mfu_pp") == 5.0
    assert (CONFIG.threshold("plateau_spread_pct"), CONFIG.threshold("plateau_spread_pct", "cpu")) == (5.0, 15.0)
    assert CONFIG.threshold("gemm_rel_frobenius") == 2**-8 and CONFIG.threshold("gemm_elementwise_abs") == 2**-25
    with pytest.raises(ConfigError, match="thresholds.nope is missing; expected one of .*mfu_pp"):
        CONFIG.threshold("nope")


# --------------------------------------------------------------------------------- what the file says

FORMULA = re.compile(r"(\d+)(?: CU| SM)? x (\d+)(?: FLOP/clk/[CS][UM])? x ([\d.]+) GHz = ([\d.]+)")


@pytest.mark.parametrize("key", TARGETS)
def test_peaks_follow_from_the_formula_and_sparse_is_apart(key):
    t = TARGETS[key]
    dense, sparse = t["dense_peaks_tflops"], t["sparse_peaks_tflops"]
    m = FORMULA.search(t["peak_formula"])
    assert m or key == "b300"
    if m:
        units, flop, ghz, said = (float(x) for x in m.groups())
        assert units == t["compute_units"] and units * flop * ghz / 1e3 == pytest.approx(said, rel=1e-3)
        if key == "v100_sxm2_32gb":
            assert dense["bf16"] is None and dense["fp16"] == pytest.approx(said, rel=3e-3)  # 125 is NVIDIA's rounding
        else:
            assert dense["bf16"] == pytest.approx(said, rel=1e-3)
    for dtype, value in sparse.items():
        assert value > 1.3 * dense[dtype]
    assert dense[t["compute_dtype"]] is not None


@pytest.mark.parametrize("key", TARGETS)
def test_profiles_are_in_base_units_and_consistent(key):
    t, p = TARGETS[key], CONFIG.profile(key)
    assert p.kind == "gpu" and p.dense_peak_flop_s[p.compute_dtype] == t["dense_peaks_tflops"][p.compute_dtype] * 1e12
    assert p.bandwidth_bytes_s == pytest.approx(t["bandwidth_gbs"] * 1e9)
    assert 0.9 < p.memory_bytes / (p.memory_label_gb * 2**30) < 1.01
    assert (p.l2_bytes is None) == (p.llc_bytes is None) and (p.l2_bytes or 0) <= (p.llc_bytes or 0)
    for m in t["measured"]["gemm"]:
        peak = t["dense_peaks_tflops"].get(m["dtype"])
        assert (peak is None) == (m["percent_of_dense"] is None)
        assert peak is None or 100 * m["tflops"] / peak == pytest.approx(m["percent_of_dense"], abs=0.06)


@pytest.mark.parametrize("key", TARGETS)
def test_roof_floors_follow_the_rule(key):
    """0.85 x the best public figure; an RVS pass target that stands alone as it is; none: null, with the reason."""
    t = TARGETS[key]
    floor, peak = t["roof_floor_frac"], t["dense_peaks_tflops"][t["compute_dtype"]]
    public = [m for m in t["measured"]["gemm"] if m["dtype"] == t["compute_dtype"]]
    best = max((m["tflops"] for m in public if m["source"] != "rvs"), default=None)
    rvs = max((m["tflops"] for m in public if m["source"] == "rvs"), default=None)
    share = RAW["thresholds"]["roof_floor_public_frac"]["value"]
    expected = 0.50 if key == "mi355x" else share * best / peak if best else rvs / peak if rvs else None
    assert floor["note"] and floor["date"]
    assert floor["value"] == (expected if expected is None else pytest.approx(expected, abs=5.1e-4))
    assert bool(floor["source"]) == (expected is not None)
    assert expected is None or rvs is None or floor["value"] * peak >= rvs * 0.99
    assert t["bandwidth_floor_frac"]["value"] == 0.60


def test_mi355x_is_dense_2516_and_the_cpu_has_no_rated_peak():
    assert CONFIG.profile("mi355x").dense_peak_flop_s["bf16"] == 2516.6e12
    assert CONFIG.profile("mi300x").llc_bytes == 256 * MIB
    cpu = CONFIG.profile("cpu")
    assert cpu.kind == "cpu" and cpu.roof_floor_frac == 0.70
    assert cpu.dense_peak_flop_s == {} and cpu.bandwidth_bytes_s is None


def used_sources(node, name=""):
    if isinstance(node, dict):
        for k, v in node.items():
            if k not in ("thresholds", "sources") or not isinstance(v, dict):
                yield from used_sources(v, k)
    elif isinstance(node, list):
        for v in node:
            yield from used_sources(v, name)
    elif name in ("source", "sources", "dram_sources"):
        yield node


def test_every_source_is_listed_with_a_known_grade():
    assert set(used_sources(RAW)) <= set(RAW["sources"])
    assert len(set(used_sources(RAW))) > 50
    assert {s["grade"] for s in RAW["sources"].values()} <= set(RAW["grades"])
    assert all(s["title"] and s["seen"] for s in RAW["sources"].values())


def test_statuses_and_terms_are_there():
    statuses = {k for k, v in RAW["status_pills"].items() if v["kind"] == "status"}
    assert statuses == set("PASS N/A WARN WARN_CPU SKIP INSUFFICIENT INCOMPLETE FAIL INVALID".split())
    assert len(RAW["glossary"]) >= 40 and {"roof", "ridge", "MFU", "busbw", "dense peak"} <= set(RAW["glossary"])
    assert all(t["source"].startswith("methodology, ") and t["note"] for t in RAW["thresholds"].values())


# ----------------------------------------------------------------------------------------- CPU cores

AVX2 = "fpu sse2 fma avx avx2"
AVX512 = AVX2 + " avx512f avx512dq avx512bw"
BF16 = AVX512 + " avx512_bf16"
AMX = BF16 + " amx_bf16 amx_tile amx_int8"


def x86(vendor, family, model, flags):
    one = f"vendor_id\t: {vendor}\ncpu family\t: {family}\nmodel\t\t: {model}\nmodel name\t: AMD\nflags\t: {flags}\n"
    return f"processor\t: 0\n{one}\nprocessor\t: 1\n{one}\n"


def arm(part, features):
    return f"processor\t: 0\nFeatures\t: {features}\nCPU implementer\t: 0x41\nCPU part\t: {part}\n\n"


@pytest.mark.parametrize(
    ("text", "core", "bf16", "fp32"),
    [
        (x86("AuthenticAMD", 23, 49, AVX2), "Zen2", None, 32),
        (x86("AuthenticAMD", 25, 1, AVX2), "Zen2/Zen3", None, 32),
        (x86("AuthenticAMD", 25, 17, BF16), "Zen4", 64, 32),
        (x86("AuthenticAMD", 25, 17, AVX2), None, None, None),  # a guest that hides AVX-512
        (x86("AuthenticAMD", 26, 2, BF16), "Zen5", 128, 64),
        (x86("AuthenticAMD", 26, 68, BF16), "Zen5", 128, 64),
        (x86("AuthenticAMD", 26, 80, BF16), None, None, None),  # Zen6
        (x86("GenuineIntel", 6, 143, AMX), "Sapphire", 1024, 64),
        (x86("GenuineIntel", 6, 207, AMX), "Sapphire", 1024, 64),
        (x86("GenuineIntel", 6, 207, BF16), "AMX not exposed", 64, 64),
        (x86("GenuineIntel", 6, 85, AVX512), "AVX-512", None, 64),
        (x86("GenuineIntel", 6, 79, AVX2), "AVX2", None, 32),
        (x86("GenuineIntel", 6, 79, "fpu sse2"), None, None, None),
        (arm("0xd40", "fp asimd bf16 i8mm sve"), "Neoverse V1", 64, 32),
        (arm("0xd4f", "fp asimd bf16 i8mm sve sve2"), "Neoverse V2", None, 32),
        (arm("0xd0c", "fp asimd"), None, None, None),
        ("", None, None, None),
        ("model : x\ncpu family : 6\nvendor_id : GenuineIntel\nflags : avx2 fma\n", None, None, None),
    ],
)
def test_nominal_flop_per_cycle(text, core, bf16, fp32):
    got = nominal_cpu_flop_per_cycle(text, CONFIG)
    assert got[1:3] == (bf16, fp32)
    assert (core in got[0]) if core else (got[0] is None and "probe the peak" in got[3])


@settings(deadline=None, max_examples=100)
@given(st.text(max_size=200))
def test_any_cpuinfo_is_handled(text):
    assert len(nominal_cpu_flop_per_cycle(text, CONFIG)) == 4
