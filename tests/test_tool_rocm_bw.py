"""Logs of both programs called rocm_bandwidth_test: every shape they print, and the same logs after an accident."""

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

LOGS = logs("rocm_bw")
DEFAULT = LOGS["default.log"]

# name -> status, readings, some of them
EXPECTED = {
    "default.log": (None, 14, [
        ("-a", "host_to_device", "CPU 00", "GPU 01", "54.812", "best"),
        ("-a", "device_to_host", "GPU 02", "CPU 00", "56.004", "best"),
        ("-a", "copy", "GPU 01", "GPU 01", "2104.337", "best"),
        ("-a", "device_to_device", "GPU 02", "GPU 01", "49.096", "best"),
        ("-A", "device_to_device", "GPU 01", "GPU 02", "96.215", "best"),
    ]),
    "flag_a_no_peer_access.log": (None, 6, [("-a", "copy", "GPU 02", "GPU 02", "801.778", "best")]),
    "flag_A.log": (None, 6, [("-A", "host_to_device", "CPU 00", "GPU 02", "101.380", "best")]),
    "flag_s_d.log": (None, 16, [
        ("-s -d", "host_to_device", "CPU 00", "GPU 01", "54.776", "mean"),
        ("-s -d", "host_to_device", "CPU 00", "GPU 01", "54.807", "best"),
        ("-s -d", "copy", "GPU 01", "GPU 01", "985.969", "mean"),
    ]),
    "flag_b.log": (None, 6, [("-b", "device_to_device", "GPU 01", "GPU 02", "109.613", "best")]),
    "flag_v_wrong_copy.log": (FAIL, 0, []),
    "invalid_request.log": (UNSUPPORTED, 0, []),
    "help.log": (UNSUPPORTED, 0, []),
    "no_access.log": (UNSUPPORTED, 0, []),
    "hsa_error.log": (FAIL, 0, []),
    "hip_sample.log": (UNPARSED, 0, []),
    "rocm7_wrapper.log": (None, 6, [("p2p.unidirectional", "copy", "GPU 00", "GPU 00", "1702.31", "mean")]),
    "rocm7_old_flag.log": (UNSUPPORTED, 0, []),
    "rocm7_no_plugin.log": (UNSUPPORTED, 0, []),
}  # fmt: skip


def test_every_fixture_is_expected():
    assert set(EXPECTED) == set(LOGS)


@pytest.mark.parametrize("name", EXPECTED)
def test_readings(name):
    check_fixture(rocm_bw, (nvbandwidth, transferbench), LOGS[name], EXPECTED[name])


@pytest.mark.parametrize("name, words", [
    ("flag_v_wrong_copy.log", "device 1 copied to device 2"),
    ("hsa_error.log", "HSA_STATUS_ERROR_OUT_OF_RESOURCES"),
    ("no_access.log", "cannot ACCESS"),
    ("hip_sample.log", "hipBusBandwidth"),
    ("rocm7_old_flag.log", "not expected: -a"),
    ("rocm7_no_plugin.log", "Plugin not found"),
])  # fmt: skip
def test_the_reason_is_what_the_tool_said(name, words):
    assert words in rocm_bw.parse(LOGS[name]).reason


def test_what_is_counted():
    """A copy within one GPU counts what it reads and what it writes; every other one its bytes once."""
    by_op = {r.params["op"]: r.params["counted"] for r in rocm_bw.parse(DEFAULT).records}
    assert by_op.pop("copy") == "read+write" and set(by_op.values()) == {"payload"}


def test_devices_count_the_gpus_alone():
    local = [r for r in rocm_bw.parse(DEFAULT).records if r.params["op"] == "copy"]
    assert [(r.params["device"], r.params["src"]) for r in local] == [(0, "GPU 01"), (1, "GPU 02")]


def test_directions_and_sizes():
    params = [r.params for r in rocm_bw.parse(DEFAULT).records]
    assert {(p["direction"], p["buffer_bytes"]) for p in params} == {("one", 2**26), ("both", 2**26)}
    tables = [r.params for r in rocm_bw.parse(LOGS["flag_b.log"]).records]
    assert [p["buffer_bytes"] for p in tables[::2]] == [2**16, 2**24, 2**29] and {p["direction"] for p in tables} == {"both"}


def test_the_wrapper_reads_as_transferbench():
    inner = transferbench.parse(LOGS["rocm7_wrapper.log"])
    parsed = rocm_bw.parse(LOGS["rocm7_wrapper.log"])
    assert figures(parsed) == figures(inner) and parsed.version == inner.version == "1.62.00"
    assert parsed.tool == "rocm_bw" and {r.backend for r in parsed.records} == {"rocm_bw.transferbench.p2p"}


def test_the_hip_sample_gives_no_reading():
    assert "25.1140" in LOGS["hip_sample.log"] and rocm_bw.parse(LOGS["hip_sample.log"]).records == ()


def test_checks_that_pass_are_whole_and_time_nothing():
    parsed = rocm_bw.parse(LOGS["flag_v_wrong_copy.log"].replace("FAIL", "PASS"))
    assert parsed.status is None and parsed.records == () and parsed.warnings


@pytest.mark.parametrize("text, status", [
    ("", UNPARSED), ("hello\n", UNPARSED), ("\n" * 100_000, UNPARSED), (".........\n", INCOMPLETE),
    (DEFAULT.replace(".", ","), UNPARSED),
    (DEFAULT.partition("Bidirectional copy")[0], INCOMPLETE),
    (DEFAULT.partition("Unidirectional copy")[0], INCOMPLETE),
    (DEFAULT.replace("          Device: 2,", "          Gadget: 2,"), INCOMPLETE),
    (DEFAULT.replace("54.790", "-nan  "), INVALID),
    (DEFAULT.replace("2099.870", "N/A     "), INVALID),  # a GPU copies within itself
    (DEFAULT.replace("96.215", "96.251", 1), INVALID),  # one measurement, printed twice
    (DEFAULT.replace("AMD Instinct MI300X,  GPU-00000000000000a2,  26:0.0", "AMD Instinct MI300X"), INVALID),
    (LOGS["flag_s_d.log"].replace("985.969", "895.969"), INVALID),
    (LOGS["flag_s_d.log"].rstrip(), INCOMPLETE),
    (LOGS["flag_s_d.log"].rpartition("\n512 MB")[0], INCOMPLETE),
    (LOGS["flag_s_d.log"].replace("Src Device Id: 1", "Src Device Id"), INCOMPLETE),
    (LOGS["flag_s_d.log"].rpartition("================    Uni")[0], INCOMPLETE),  # of the two sources asked for
    ("[CmdLine] -> Error: Main thread exception: -> bad_alloc\n", FAIL),
])  # fmt: skip
def test_status(text, status):
    assert check(rocm_bw, text).status == status


def test_a_lost_title_gives_its_rows_to_no_other_matrix():
    lines = DEFAULT.split("\n")
    parsed = check(rocm_bw, "\n".join(x for x in lines if "Bidirectional copy" not in x))
    assert parsed.status == INCOMPLETE and "101.442" not in {r.reported["text"] for r in parsed.records}


def test_a_lost_device_shifts_no_other():
    """Without the line of a GPU nothing tells which is the first."""
    assert rocm_bw.parse(DEFAULT.replace("          Device: 1,", "          Gadget: 1,")).records == ()


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=300))
def test_any_bytes(data):
    check(rocm_bw, tools.clean(data))


@settings(max_examples=200, deadline=None)
@given(damaged(list(LOGS.values())))
def test_any_damage(text):
    check(rocm_bw, text)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(["default.log", "flag_a_no_peer_access.log", "flag_A.log", "flag_s_d.log"]), st.data())
def test_a_cut_log_is_neither_whole_nor_wrong(name, data):
    text = LOGS[name]
    cut = text[: data.draw(st.integers(0, len(text.rstrip()) - 1))]
    parsed = check(rocm_bw, cut)
    assert parsed.status in (INCOMPLETE, UNPARSED)
    assert {f[:5] for f in figures(parsed)} <= {f[:5] for f in figures(rocm_bw.parse(text))}


OLD, NEW, TB = "rocm-bandwidth-test", "rocm_bandwidth_test", "TransferBench"


@pytest.mark.parametrize("kind, found, arguments", [
    ("rocm", [], []),
    ("rocm", [OLD], [("-a",)]),
    ("rocm", [NEW], [("run", "tb", "p2p", "268435456")]),
    ("rocm", [OLD, NEW], [("run", "tb", "p2p", "268435456"), ("-a",)]),
    ("rocm", [OLD, NEW, TB], [("-a",)]),
    ("cuda", [OLD, NEW], []),
    ("cpu", [OLD, NEW], []),
])  # fmt: skip
def test_commands(kind, found, arguments):
    commands = rocm_bw.commands(Place(kind, None, 2, {name: f"/opt/rocm/bin/{name}" for name in found}))
    assert [c.argv[1:] for c in commands] == arguments
    assert all(c.tool == "rocm_bw" for c in commands)
