"""TransferBench's logs: every shape it prints, and the same logs after an accident."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tool_damage import check, check_fixture, damaged, figures, logs

from validation import tools
from validation.tools import (
    FAIL,
    INCOMPLETE,
    INVALID,
    UNPARSED,
    UNSUPPORTED,
    Place,
    nvbandwidth,
    rocm_bw,
    transferbench,
)

LOGS = logs("transferbench")
WHOLE = [n for n in LOGS if n not in ("no_gpu.log", "warn_and_error.log")]

# name -> status, readings, some of them
EXPECTED = {
    "p2p_both.log": (None, 8, [
        ("p2p.unidirectional", "device_to_host", "GPU 00", "CPU 00", "51.44", "mean"),
        ("p2p.unidirectional", "copy", "GPU 00", "GPU 00", "1702.31", "mean"),
        ("p2p.unidirectional", "device_to_device", "GPU 00", "GPU 01", "46.20", "mean"),
        ("p2p.unidirectional", "copy", "GPU 01", "GPU 01", "1698.47", "mean"),
        ("p2p.bidirectional", "device_to_device", "GPU 00", "GPU 01", "87.33", "mean"),
    ]),
    "p2p_uni.csv": (None, 6, [
        ("p2p.unidirectional", "device_to_host", "GPU 00", "CPU 00", "52.90", "mean"),
        ("p2p.unidirectional", "copy", "GPU 01", "GPU 01", "1291.75", "mean"),
    ]),
    "p2p_local_iterations.log": (None, 2, [
        ("p2p.unidirectional", "copy", "GPU 00", "GPU 00", "1702.31", "mean"),
        ("p2p.unidirectional", "copy", "GPU 00", "GPU 00", "1733.90", "best"),
    ]),
    "config.log": (None, 3, [
        ("config", "device_to_device", "GPU 00", "GPU 01", "45.902", "mean"),
        ("config", "device_to_host", "GPU 01", "CPU 00", "51.228", "mean"),
        ("config", "read", "GPU 00", None, "1597.830", "mean"),
    ]),
    "config_iterations.log": (None, 4, [
        ("config", "device_to_device", "GPU 00", "GPU 01", "45.902", "mean"),
        ("config", "device_to_device", "GPU 00", "GPU 01", "46.474", "interval"),
        ("config", "device_to_device", "GPU 00", "GPU 01", "45.283", "interval"),
    ]),
    "config_boxes.log": (None, 1, [("config", "device_to_device", "GPU 00", "GPU 01", "45.902", "mean")]),
    "a2a.log": (None, 6, [
        ("a2a", "device_to_device", "GPU 00", "GPU 01", "41.312", "mean"),
        ("a2a", "device_to_device", "GPU 02", "GPU 01", "41.301", "mean"),
    ]),
    "a2a_boxes.log": (None, 2, [("a2a", "device_to_device", "GPU 01", "GPU 00", "58.02", "mean")]),
    "warn_and_error.log": (FAIL, 1, [("config", "device_to_device", "GPU 00", "GPU 01", "45.902", "mean")]),
    "no_gpu.log": (UNSUPPORTED, 0, []),
}  # fmt: skip


def test_every_fixture_is_expected():
    assert set(EXPECTED) == set(LOGS)


@pytest.mark.parametrize("name", EXPECTED)
def test_readings(name):
    check_fixture(transferbench, (nvbandwidth, rocm_bw), LOGS[name], EXPECTED[name])


def test_what_is_known_of_a_reading():
    parsed = transferbench.parse(LOGS["p2p_both.log"])
    local = next(r for r in parsed.records if r.params["op"] == "copy")
    assert local.params == {
        "op": "copy", "src": "GPU 00", "dst": "GPU 00", "device": 0, "counted": "payload", "direction": "one",
        "buffer_bytes": 134217728, "executor": "GFX", "statistic": "mean",
    }  # fmt: skip
    assert (local.family, local.backend, local.source) == ("bandwidth", "transferbench.p2p", "tool")
    assert parsed.version == "1.61.00"
    assert {r.params["direction"] for r in parsed.records if r.case == "p2p.bidirectional"} == {"both"}
    assert {r.params["direction"] for r in transferbench.parse(LOGS["a2a.log"]).records} == {"contended"}


def test_the_sum_of_both_ways_is_no_reading_of_one():
    one_way = [r for r in transferbench.parse(LOGS["p2p_both.log"]).records if r.params["direction"] == "one"]
    assert all(r.params["op"] == "copy" or r.reported["value"] < 60 for r in one_way)


def test_copies_by_cpu_threads_are_left_out():
    assert "40.12" in LOGS["p2p_both.log"]  # CPU 00 to GPU 00, by the CPU
    assert "host_to_device" not in {r.params["op"] for r in transferbench.parse(LOGS["p2p_both.log"]).records}
    remote = LOGS["p2p_uni.csv"].replace("[Local read / Remote write]", "[Remote read / Local write]")
    remote = remote.replace("SRC+EXE\\DST", "SRC\\EXE+DST")
    ops = {r.params["op"] for r in transferbench.parse(remote).records}
    assert "host_to_device" in ops and "device_to_host" not in ops


def test_transfers_that_ran_at_once_are_left_out():
    parsed = transferbench.parse(LOGS["config.log"])
    assert "45.100" in LOGS["config.log"] and "48.771" in LOGS["config.log"]
    assert not {"45.100", "48.771"} & {r.reported["text"] for r in parsed.records}
    assert "at once" in parsed.warnings[0]


def test_other_memory_is_left_out():
    text = LOGS["p2p_both.log"].replace("P2P_MODE  ", "USE_FINE_GRAIN       =            1 : fine\nP2P_MODE  ")
    assert transferbench.parse(text).records == ()


def test_a_missing_transfer_does_not_make_the_other_one_alone():
    lines = LOGS["config.log"].split("\n")
    text = "\n".join(line for line in lines if "48.771" not in line)
    parsed = transferbench.parse(text)
    assert parsed.status == INCOMPLETE and "45.100" not in {r.reported["text"] for r in parsed.records}


@pytest.mark.parametrize("old, new, why", [
    (" 46.76 ", " 64.76 ", "average"),
    ("     46.20", "       inf", "inf"),
    ("     46.20", "      -nan", "nan"),
])  # fmt: skip
def test_figures_that_cannot_be(old, new, why):
    parsed = check(transferbench, LOGS["p2p_both.log"].replace(old, new))
    assert parsed.status == INVALID and why in parsed.reason


def test_a_wrong_average_flags_its_readings():
    parsed = transferbench.parse(LOGS["p2p_both.log"].replace(" 46.76 ", " 64.76 "))
    bad = [r for r in parsed.records if r.flags]
    assert len(bad) == 2 and all(r.params["op"] == "device_to_device" and r.flags[0].startswith(INVALID) for r in bad)


def test_a_rate_that_is_not_bytes_over_time():
    lines = LOGS["config.log"].split("\n")
    text = "\n".join(x.replace("51.228", "61.228") if "G1 -> DMA01" in x else x for x in lines)
    parsed = transferbench.parse(text)
    assert parsed.status == INVALID and [r.params["op"] for r in parsed.records if r.flags] == ["device_to_host"]


def test_a_row_of_cells_that_do_not_sum():
    parsed = transferbench.parse(LOGS["a2a.log"].replace("41.118", "14.118"))
    assert parsed.status == INVALID and {r.params["src"] for r in parsed.records if r.flags} == {"GPU 01"}


def test_a_row_with_two_different_contents():
    row = next(line for line in LOGS["p2p_uni.csv"].split("\n") if line.strip().startswith("GPU 01"))
    parsed = transferbench.parse(LOGS["p2p_uni.csv"] + row.replace("45.28", "45.82"))
    assert parsed.status == INVALID and "twice" in parsed.reason


@pytest.mark.parametrize("cell", ["0.00", "N/A"])
def test_no_figure_is_no_reading(cell):
    parsed = transferbench.parse(LOGS["p2p_uni.csv"].replace("     45.13", f"{cell:>10}"))
    whole = transferbench.parse(LOGS["p2p_uni.csv"])
    assert figures(parsed) == [f for f in figures(whole) if f[4] != "45.13"]
    assert parsed.status is None and len(parsed.records) == len(whole.records) - 1


def test_a_row_of_the_other_table_is_not_taken():
    lines = LOGS["p2p_both.log"].split("\n")
    at = next(i for i, line in enumerate(lines) if "1702.31" in line)
    other = next(line for line in lines if "48.25" in line)
    parsed = transferbench.parse("\n".join([*lines[:at], other, *lines[at + 1 :]]))
    assert parsed.status == INCOMPLETE and "48.25" not in {r.reported["text"] for r in parsed.records}


@pytest.mark.parametrize("text, status", [
    ("", UNPARSED), ("\n\n", UNPARSED), ("hello\n", UNPARSED), ("\n" * 100_000, UNPARSED),
    ("Transfer 1" + " " * 100_000 + "\n", UNPARSED),
    (LOGS["p2p_both.log"].replace(".", ","), UNPARSED),
    (LOGS["p2p_uni.csv"].replace(".", ","), UNPARSED),
    (LOGS["p2p_both.log"].split("Unidirectional")[0], INCOMPLETE),
    (LOGS["p2p_both.log"].split("Bidirectional")[0], INCOMPLETE),  # P2P_MODE 0 asked for both
    (LOGS["p2p_both.log"].split("Averages (During  BiDir")[0], INCOMPLETE),
    (LOGS["p2p_uni.csv"].rpartition("GPU 01")[0], INCOMPLETE),
    (LOGS["config.log"].rpartition(" Aggregate")[0], INCOMPLETE),
    (LOGS["a2a.log"].rpartition("Aggregate")[0], INCOMPLETE),
    (LOGS["a2a.log"].partition("Summary")[0], INCOMPLETE),
    (LOGS["a2a.log"].replace("SRC\\DST  GPU 00 ", "SRC\\DST  GPU 0x "), INCOMPLETE),
    ("[ERROR] Peer copy preset requires at least 2 GPUs\n", UNSUPPORTED),
    ("Encountered HIP error (out of memory) at line 9 in file src/TransferBench.cpp\n", FAIL),
    (LOGS["p2p_both.log"].split("  GPU 01  ->")[0] + "Transfer 0: Unexpected mismatch at index 7\n", FAIL),
    (LOGS["p2p_both.log"].split("  GPU 01  ->")[0] + "HIP error: out of memory\n", FAIL),
])  # fmt: skip
def test_status(text, status):
    assert check(transferbench, text).status == status


def test_an_error_comes_before_its_consequences():
    parsed = transferbench.parse(LOGS["p2p_both.log"].split("  GPU 01  ->")[0] + "Transfer 0: Unexpected mismatch at index 7\n")
    assert parsed.reason.startswith("Transfer 0: Unexpected mismatch") and len(parsed.records) > 0


def test_twice_the_same_log_is_the_same_readings():
    for name in WHOLE:
        once, twice = (figures(transferbench.parse(LOGS[name] * n)) for n in (1, 2))
        assert sorted(map(repr, once)) == sorted(map(repr, twice))


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=300))
def test_any_bytes(data):
    check(transferbench, tools.clean(data))


@settings(max_examples=200, deadline=None)
@given(damaged(list(LOGS.values())))
def test_any_damage(text):
    check(transferbench, text)


CLOSINGS = {
    "p2p_both.log": "Averages (During  BiDir)", "p2p_uni.csv": "1291.75", "p2p_local_iterations.log": "Averages (During",
    "config_boxes.log": "Aggregate (CPU)", "config_iterations.log": "Aggregate (CPU)",
    "a2a.log": "Aggregate bandwidth (CPU", "a2a_boxes.log": "Aggregate bandwidth (CPU",
}  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(CLOSINGS)), st.data())
def test_a_log_cut_before_its_closing_part_is_neither_whole_nor_wrong(name, data):
    text = LOGS[name]
    cut = text[: data.draw(st.integers(0, text.rindex(CLOSINGS[name])))]
    parsed = check(transferbench, cut)
    assert parsed.status in (INCOMPLETE, UNPARSED)
    assert set(figures(parsed)) <= set(figures(transferbench.parse(text)))


ROCM = Place("rocm", "mi300x", 8, {"TransferBench": "/opt/rocm/bin/TransferBench"}, plateau_bytes=25769803777)


def test_commands():
    local, host, pairs = transferbench.commands(ROCM)
    assert local.argv == ("/opt/rocm/bin/TransferBench", "p2p", "25769803776")  # a multiple of 4
    assert (local.env["NUM_GPU_DEVICES"], local.env["NUM_CPU_DEVICES"], local.env["P2P_MODE"]) == ("1", "0", "1")
    assert host.argv[1].startswith("{dir}/") and host.argv[1].removeprefix("{dir}/") in host.files
    assert pairs.argv[2] == str(transferbench.DEFAULT_BYTES)
    assert {c.tool for c in (local, host, pairs)} == {"transferbench"}


@pytest.mark.parametrize("kind, found, devices, count", [
    ("rocm", {}, 8, 0), ("cuda", dict(ROCM.executables), 8, 0), ("cpu", dict(ROCM.executables), 0, 0),
    ("rocm", dict(ROCM.executables), 1, 2),
])  # fmt: skip
def test_where_it_does_not_apply(kind, found, devices, count):
    assert len(transferbench.commands(Place(kind, None, devices, found))) == count
