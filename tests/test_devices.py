"""Devices read from made-up trees: what the files say in base units, and None for everything else."""

import json

import machine_tree
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from machine_tree import SMI, Smi

from escher_kernels import devices
from escher_kernels.devices import Device, Process


@pytest.fixture
def amd(tmp_path):
    return machine_tree.amd_node(tmp_path)


@pytest.fixture
def nvidia(tmp_path):
    return machine_tree.nvidia_node(tmp_path)


def test_an_amd_node(amd):
    found = amd.devices()
    assert [d.address for d in found] == [machine_tree.bus(n) for n in range(8)]
    assert found[0] == Device(
        vendor="amd", address="0000:05:00.0", name="AMD Instinct MI355X", device_id="1002:75a3", partition="SPX", nps="NPS1",
        power_cap_w=1400.0, power_cap_default_w=1400.0, power_cap_max_w=1400.0, performance_level="auto", clock_hz=95e6,
        clock_max_hz=2400e6, pcie_width=16, pcie_width_max=16, pcie_t_s=32e9, pcie_t_s_max=32e9, bad_pages=0, uncorrected=0,
        corrected=0, firmware={"vbios": "113-A00000-000", "mec": "0x00000022", "smc": "0x00557e00"}, has_fan=False,
        temperature_c=41.0, numa_node=1, processes=(),
    )  # fmt: skip


def test_an_nvidia_node(nvidia):
    first, second = nvidia.devices()
    assert first == Device(
        vendor="nvidia", address="0000:19:00.0", name="NVIDIA H200", device_id="10de:2335", mig="Disabled", power_cap_w=700.0,
        power_cap_default_w=700.0, power_cap_max_w=700.0, performance_level="P0", held_by=(), clock_hz=345e6,
        clock_max_hz=1980e6, pcie_width=16, pcie_width_max=16, pcie_t_s=32e9, pcie_t_s_max=32e9, bad_pages=0, uncorrected=0,
        corrected=0, firmware={"vbios": "96.00.00.00.00", "inforom": "G520.0200.00.05"}, has_fan=False, temperature_c=33.0,
        numa_node=0, processes=(),
    )  # fmt: skip
    assert second.address == "0000:3b:00.0"
    assert nvidia.smi.asked == ["--query-gpu", "--query-compute-apps", "--query-remapped-rows"]


def test_a_host_without_gpu_has_none(tmp_path):
    assert machine_tree.cpu_host(tmp_path).devices() == []
    assert devices.devices(tmp_path / "nothing", lambda argv: (127, "")) == []


def test_connectors_partitions_and_other_cards_are_no_devices(amd):
    amd.link("sys/class/drm/card1-DP-1", "card1")
    amd.write("sys/devices/platform/amdgpu_xcp_0/drm/renderD140/dev", "226:140")  # a partition's own card: no vendor file
    amd.link("sys/class/drm/card20", "../../../devices/platform/amdgpu_xcp_0")
    amd.write("sys/class/drm/card30/device/vendor", "0x1a03")  # the board's own display
    amd.write("sys/class/drm/card31/device/vendor", "0x1002")  # no render node
    assert len(amd.devices()) == 8


# ---- AMD, file by file: text -> value. None as text: the file is missing ----

FILES = [
    ("current_compute_partition", "partition",
     {"CPX": "CPX", "TPX": "TPX", "UNKNOWN": None, "": None, None: None, "spx\0": None}),
    ("current_memory_partition", "nps", {"NPS4": "NPS4", "UNKNOWN": None, None: None}),
    ("power_dpm_force_performance_level", "performance_level",
     {"perf_determinism": "perf_determinism", "manual": "manual", "": None, "\x01": None, None: None}),
    ("hwmon/hwmon3/power1_cap", "power_cap_w",
     {"750000000": 750.0, "0": None, "-1": None, "N/A": None, "4294967295": None, None: None}),
    ("hwmon/hwmon3/power1_cap_default", "power_cap_default_w", {"1000000000": 1000.0, None: None}),
    ("hwmon/hwmon3/power1_cap_max", "power_cap_max_w", {"1000000000": 1000.0, None: None}),
    ("pp_dpm_sclk", "clock_hz",
     {"0: 500Mhz\n1: 1700Mhz *\n2: 2100Mhz": 1700e6, "0: 500Mhz\n1: 2100Mhz": None, "": None, None: None}),
    ("pp_dpm_sclk", "clock_max_hz", {"0: 500Mhz\n1: 1700Mhz *": 1700e6, "nonsense": None, None: None}),
    ("current_link_width", "pcie_width", {"8": 8, "0": None, "255": None, "x16": None, None: None}),
    ("max_link_width", "pcie_width_max", {"16": 16, "255": None}),
    ("current_link_speed", "pcie_t_s",
     {"16.0 GT/s PCIe": 16e9, "2.5 GT/s": 2.5e9, "Unknown": None, "Unknown speed": None, None: None}),
    ("max_link_speed", "pcie_t_s_max", {"64.0 GT/s PCIe": 64e9, "": None}),
    ("numa_node", "numa_node", {"0": 0, "3": 3, "-1": None, None: None}),
    ("ras/gpu_vram_bad_pages", "bad_pages",
     {"0x00000001 : 0x00001000 : R\n0x00000002 : 0x00001000 : P": 2, "": 0, "no list": None, None: None}),
    ("ras/umc_err_count", "uncorrected", {"ue: 3\nce: 0": 3, "Query currently inaccessible": None, "": None, None: 0}),
    ("ras/umc_err_count", "corrected", {"ue: 0\nce: 12\nde: 1": 12, "ue: 1": None, "ce: -1\nue: 0": None}),
    ("hwmon/hwmon3/fan1_input", "fan_rpm", {"1250": 1250.0, "0": 0.0, "65535": None, "": None, None: None}),
    ("hwmon/hwmon3/fan1_input", "has_fan", {"1250": True, "": True, None: False}),
    ("hwmon/hwmon3/temp2_input", "temperature_c", {"55000": 55.0, "0": None, "x": None, None: None}),
    ("hwmon/hwmon3/temp2_label", "temperature_c", {"edge": 41.0, "other": None, None: None}),
    ("product_name", "name", {"": None, None: None, "AMD Instinct MI300X OAM": "AMD Instinct MI300X OAM"}),
    ("device", "device_id", {"0x74A1": "1002:74a1", "74a1": None, None: None}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "attribute", "text", "value"),
    [pytest.param(n, a, t, v, id=f"{a}-{t!r}") for n, a, told in FILES for t, v in told.items()],
)
def test_a_file_of_amdgpu(amd, name, attribute, text, value):
    if text is not None or (amd.root / "sys/class/drm/card4/device" / name).exists():
        amd.cards(name, text, 3)
    found = amd.devices()
    assert getattr(found[3], attribute) == value
    assert found[2] == amd.devices()[2] and found[2].power_cap_w == 1400  # the others are as they were


def test_without_hwmon_and_ras_nothing_is_said_of_them(amd):
    for name in ("hwmon", "ras", "fw_version", "vbios_version"):
        amd.cards(name, None, 0)
    d = amd.devices()[0]
    nothing = (d.power_cap_w, d.temperature_c, d.has_fan, d.bad_pages, d.uncorrected, d.corrected)
    assert nothing == (None,) * 6 and d.firmware == {}


def test_the_counters_of_all_blocks_are_added(amd):
    amd.cards("ras/sdma_err_count", "ue: 1\nce: 4", 0)
    amd.cards("ras/umc_err_count", "ue: 2\nce: 8", 0)
    assert (amd.devices()[0].uncorrected, amd.devices()[0].corrected) == (3, 12)


# ---- who uses a device ----


def test_processes_are_told_by_the_memory_they_hold(amd):
    machine_tree.kfd_job(amd, 77, "trainer", {0: "1610571776", 1: "0", 7: "4096"})
    machine_tree.kfd_job(amd, 78, None, {7: "1"})
    held = [d.processes for d in amd.devices()]
    assert held == [(Process(77, "trainer"),), *[()] * 6, (Process(77, "trainer"), Process(78, None))]


def test_a_process_number_of_another_namespace_gets_no_name(amd):
    machine_tree.kfd_job(amd, 77, "someone else here", {0: "1"})
    amd.remove("proc/self/ns/pid")
    amd.link("proc/self/ns/pid", "pid:[4026532222]")
    assert amd.devices()[0].processes == (Process(77, None),)


def test_partition_bits_of_a_place_are_left_out(amd):
    machine_tree.kfd_job(amd, 77, "trainer", {0: "1"})
    for place in (1 << 28 | 0x05 << 8, 0x05 << 8 | 3):  # newer and older kernels
        amd.write("sys/class/kfd/kfd/topology/nodes/2/properties", f"location_id {place}\ndomain 0")
        assert amd.devices()[0].processes == (Process(77, "trainer"),)


def test_users_that_cannot_be_told_are_none_and_not_nobody(amd):
    machine_tree.kfd_job(amd, 77, "trainer", {0: "garbage", 1: "5"})
    assert [d.processes for d in amd.devices()][:2] == [None, (Process(77, "trainer"),)]
    amd.write("sys/class/kfd/kfd/topology/nodes/3/properties", "nothing")
    amd.remove("sys/class/kfd/kfd/topology/nodes/4")
    assert [d.processes for d in amd.devices()][:4] == [None, (), (), ()]
    amd.remove("sys/class/kfd/kfd/proc")
    assert [d.processes for d in amd.devices()] == [None] * 8


def test_nvidia_jobs(nvidia):
    nvidia.smi.jobs = [("00000000:3B:00.0", "912", "/usr/bin/python3, really"), ("00000000:3B:00.0", "913", "[Not Found]")]
    assert [d.processes for d in nvidia.devices()] == [(), (Process(912, "/usr/bin/python3, really"), Process(913, None))]


def test_no_nvidia_jobs_in_a_container_is_not_nobody(nvidia):
    nvidia.remove("proc/self/ns/pid")
    assert [d.processes for d in nvidia.devices()] == [None, None]


# ---- nvidia-smi ----

CELLS = [
    ("mig.mode.current", "mig",
     {"Enabled": "Enabled", "[N/A]": "none", "[Not Supported]": "none", "[Unknown Error]": None, "": None}),
    ("power.limit", "power_cap_w", {"350.50": 350.5, "[N/A]": None, "[GPU requires reset]": None, "0.00": None}),
    ("clocks_event_reasons.active", "held_by",
     {"0x0": (), "0x0000000000000004": (), "0x0000000000000002": ("application clocks",),
      "0x60": ("software thermal slowdown", "hardware thermal slowdown"), "[N/A]": None, "-1": None}),
    ("ecc.errors.uncorrected.volatile.total", "uncorrected", {"2": 2, "[N/A]": None}),
    ("ecc.errors.corrected.volatile.total", "corrected", {"7": 7, "[N/A]": None}),
    ("fan.speed", "fan_frac", {"30": 0.3, "0": 0.0, "[N/A]": None}),
    ("fan.speed", "has_fan", {"30": True, "[N/A]": False, "[Unknown Error]": None}),
    ("pci.device_id", "device_id", {"0x20B210DE": "10de:20b2", "[N/A]": None}),
    ("name", "name", {"[Unknown Error]": None}),
    ("pstate", "performance_level", {"P8": "P8", "[Unknown Error]": None}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("cell", "attribute", "text", "value"),
    [pytest.param(c, a, t, v, id=f"{a}-{t!r}") for c, a, told in CELLS for t, v in told.items()],
)
def test_a_cell_of_nvidia_smi(nvidia, cell, attribute, text, value):
    nvidia.smi.gpus[1][cell] = text
    assert getattr(nvidia.devices()[1], attribute) == value


def test_a_field_that_the_driver_does_not_know_is_left_out(nvidia):
    nvidia.smi.unknown = ("clocks_event_reasons.active", "inforom.img", "remapped_rows.correctable")
    nvidia.smi.gpus[0]["clocks_throttle_reasons.active"] = "0x80"
    first = nvidia.devices()[0]
    assert first.held_by == ("power brake",) and first.firmware == {"vbios": SMI["vbios_version"]}
    assert first.bad_pages is None and first.power_cap_w == 700


@pytest.mark.parametrize("retired", [True, False])
def test_bad_pages_are_retired_pages_or_remapped_rows(nvidia, retired):
    nvidia.smi.remapped["00000000:19:00.0"] = ("1", "2")
    if retired:
        for gpu in nvidia.smi.gpus:
            gpu |= {"retired_pages.single_bit_ecc.count": "4", "retired_pages.double_bit.count": "1"}
    assert nvidia.devices()[0].bad_pages == (5 if retired else 3)
    assert ("--query-remapped-rows" in nvidia.smi.asked) == (not retired)


def test_the_link_is_nvidia_smis_where_sysfs_has_none(nvidia):
    nvidia.remove("sys/bus/pci/devices/0000:19:00.0")
    nvidia.smi.gpus[0] |= {"pcie.link.gen.current": "3", "pcie.link.width.current": "8"}
    d = nvidia.devices()[0]
    assert (d.pcie_t_s, d.pcie_width, d.pcie_t_s_max, d.numa_node) == (8e9, 8, 32e9, None)


@pytest.mark.parametrize(
    "answer",
    [(127, ""), (6, "No devices were found\n"), (0, "No devices were found\n"), (124, ""), (0, ""), (0, "\n"),
     (18, "Failed to initialize NVML: Driver/library version mismatch\n"),
     (2, 'Field "pci.bus_id" is not a valid field to query.\n'), (2, 'Field "never asked" is not a valid field to query.\n')],
)  # fmt: skip
def test_an_nvidia_smi_that_fails_lists_nothing(nvidia, answer):
    nvidia.smi.says = answer
    assert nvidia.devices() == []


def test_a_row_that_was_cut_off_keeps_what_it_has(nvidia):
    nvidia.smi.says = (0, "00000000:19:00.0, NVIDIA H200, 0x233510DE, Disab")
    (d,) = nvidia.devices()
    assert (d.name, d.mig, d.power_cap_w, d.held_by) == ("NVIDIA H200", None, None, None)


# ---- what a run keeps ----


def test_a_header_of_like_devices(amd):
    kept = devices.header(amd.devices())
    assert (kept["partition"], kept["nps"], kept["power_cap_w"], len(kept["devices"])) == ("SPX", "NPS1", 1400.0, 8)
    assert json.loads(json.dumps(kept, allow_nan=False)) == kept


def test_a_header_of_mixed_devices_says_so(amd):
    amd.cards("current_compute_partition", "CPX", 6)
    amd.cards("current_memory_partition", None, 2)
    amd.cards("hwmon/hwmon3/power1_cap", "750000000", 0)
    kept = devices.header(amd.devices())
    assert kept["partition"] == "mixed: SPX x7, CPX x1"
    assert kept["nps"] == "mixed: NPS1 x7, unknown x1"
    assert kept["power_cap_w"] == "mixed: 1400 x7, 750 x1"


def test_a_header_without_devices_or_answers_is_empty(nvidia):
    empty = {"partition": None, "nps": None, "power_cap_w": None, "devices": []}
    assert devices.header([]) == empty
    assert devices.header(nvidia.devices())["partition"] is None


def test_another_kind_of_gpu_beside_does_not_make_a_node_mixed(amd):
    amd.cards("device", "0x150e", 7)
    amd.cards("current_compute_partition", None, 7)
    kept = devices.header(amd.devices())
    assert kept["partition"] == "SPX" and len(kept["devices"]) == 8
    assert len(devices.alike(amd.devices())) == 7


# ---- garbage ----

QUIET = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@QUIET
@given(data=st.data())
def test_garbage_in_a_file_raises_nothing_and_keeps_the_others(amd, data):
    name = data.draw(st.sampled_from(sorted(set(machine_tree.CARD) - {"vendor"})))
    garbage = data.draw(st.binary(max_size=200) | st.sampled_from(["²".encode(), b"-1", b"1e999", b"NaN", b"9" * 400]))
    amd.cards(name, garbage, 2)
    kept = devices.header(amd.devices())["devices"]
    assert len(kept) == 8 and kept[1]["power_cap_w"] == 1400.0
    amd.cards(name, machine_tree.CARD[name], 2)


@QUIET
@given(data=st.data())
def test_garbage_in_kfd_files_raises_nothing(amd, data):
    kfd = "sys/class/kfd/kfd"
    name = data.draw(
        st.sampled_from([f"{kfd}/proc/9/vram_1000", f"{kfd}/topology/nodes/2/properties", f"{kfd}/topology/nodes/2/gpu_id"])
    )
    machine_tree.kfd_job(amd, 9, "job", {0: "1"})
    amd.write(name, data.draw(st.binary(max_size=80) | st.just(b"location_id " + b"9" * 19 + b"\ndomain " + b"9" * 19)))
    assert len(amd.devices()) == 8


STARTS = ["", "00000000:19:00.0, ", 'Field "name" is not a valid field']


@given(status=st.sampled_from([0, 2]), out=st.text(max_size=200), start=st.sampled_from(STARTS))
def test_garbage_from_nvidia_smi_raises_nothing(tmp_path_factory, status, out, start):
    found = devices.devices(tmp_path_factory.getbasetemp() / "nothing", Smi(says=(status, start + out)))
    assert all(json.dumps(d.to_json(), allow_nan=False) for d in found)


def test_the_real_machine_is_read_without_complaint():
    assert isinstance(devices.header(devices.devices()), dict)
    assert devices.run(["false"])[0] == 1 and devices.run(["no-such-command-here"]) == (127, "")
