"""nvbandwidth's logs, as text of several versions and as JSON, and the same logs after an accident."""

import json
import re

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

LOGS = logs("nvbandwidth")
TEXT, JSON = LOGS["text_v0.8.log"], LOGS["json.json"]
READ, WRITE = "device_to_device_memcpy_read_ce", "device_to_device_memcpy_write_ce"
BOTH = "device_to_device_bidirectional_memcpy_read_ce"

# name -> status, readings, some of them
EXPECTED = {
    "text_v0.8.log": (None, 10, [
        ("host_to_device_memcpy_ce", "host_to_device", "CPU 0", "GPU 1", "54.28", "median"),
        ("device_to_host_memcpy_ce", "device_to_host", "GPU 0", "CPU 0", "55.02", "median"),
        (READ, "device_to_device", "GPU 1", "GPU 0", "380.44", "median"),  # row 0 reads from column 1
        (WRITE, "device_to_device", "GPU 0", "GPU 1", "392.61", "median"),  # row 0 writes to column 1
        ("device_local_copy", "copy", "GPU 1", "GPU 1", "1411.20", "median"),
    ]),
    "text_v0.6_both_ways.log": (None, 2, [(BOTH, "device_to_device", "GPU 1", "GPU 0", "741.08", "median")]),
    "text_v0.4_zeros.log": (None, 2, [(WRITE, "device_to_device", "GPU 1", "GPU 0", "275.88", "median")]),
    "text_waived.log": (None, 1, [("host_to_device_memcpy_ce", "host_to_device", "CPU 0", "GPU 0", "54.31", "median")]),
    "text_error.log": (FAIL, 2, []),
    "text_wrong_data.log": (FAIL, 2, []),
    "stderr_no_device.log": (UNSUPPORTED, 0, []),
    "json.json": (None, 8, [
        ("host_to_device_memcpy_ce", "host_to_device", "CPU 0", "GPU 1", "54.2817", "median"),
        (READ, "device_to_device", "GPU 0", "GPU 1", "379.118", "median"),
        (BOTH, "device_to_device", "GPU 0", "GPU 1", "741.96", "median"),
        ("device_local_copy", "copy", "GPU 1", "GPU 1", "1411.2", "median"),
    ]),
    "json_error.json": (FAIL, 2, []),
    "json_fatal.json": (FAIL, 0, []),
}  # fmt: skip


def test_every_fixture_is_expected():
    assert set(EXPECTED) == set(LOGS)


@pytest.mark.parametrize("name", EXPECTED)
def test_readings(name):
    check_fixture(nvbandwidth, (rocm_bw, transferbench), LOGS[name], EXPECTED[name])


@pytest.mark.parametrize("name, version, words", [
    ("text_v0.4_zeros.log", "0.4", "waived"), ("text_waived.log", "0.8", "waived"), ("json.json", "0.8", "not found"),
])  # fmt: skip
def test_version_and_warnings(name, version, words):
    parsed = nvbandwidth.parse(LOGS[name])
    assert parsed.version == version and any(words in w for w in parsed.warnings)


@pytest.mark.parametrize("name, words", [
    ("text_error.log", "[CUDA_ERROR_ILLEGAL_ADDRESS]"), ("json_fatal.json", "[CUDA_ERROR_ILLEGAL_ADDRESS]"),
    ("text_wrong_data.log", "Invalid value when checking the pattern"), ("stderr_no_device.log", "[CUDA_ERROR_NO_DEVICE]"),
    ("json_error.json", "device_to_host_memcpy_ce"),
])  # fmt: skip
def test_the_reason_begins_with_what_the_tool_said(name, words):
    assert nvbandwidth.parse(LOGS[name]).reason.startswith(words)


def test_what_is_known_of_a_reading():
    records = nvbandwidth.parse(TEXT).records
    local = next(r for r in records if r.case == "device_local_copy")
    assert local.params == {
        "op": "copy", "src": "GPU 0", "dst": "GPU 0", "device": 0, "counted": "payload", "direction": "one",
        "statistic": "median",
    }  # fmt: skip
    assert (local.backend, local.reported["unit"]) == ("nvbandwidth.ce", "GB/s")
    read = next(r for r in records if r.case == READ)
    assert (read.params["access"], read.params["device"]) == ("read", 0)


def test_both_ways():
    """The Total of two GPUs is a sum; one way while the other is busy is no reading."""
    text = LOGS["text_v0.6_both_ways.log"]
    parsed = nvbandwidth.parse(text)
    assert {r.params["direction"] for r in parsed.records} == {"both"}
    assert all(figure in text for figure in ("371.20", "40.11", "61.02", "701.22"))
    assert not {"371.20", "40.11", "61.02", "701.22"} & {r.reported["text"] for r in parsed.records}


@pytest.mark.parametrize("old, new", [("379.12", "397.12"), ("SUM device_local_copy 2819.97", "SUM device_local_copy nan")])
def test_cells_that_do_not_add_up(old, new):
    parsed = nvbandwidth.parse(TEXT.replace(old, new))
    assert parsed.status == INVALID and [r.flags[0].partition(":")[0] for r in parsed.records if r.flags] == [INVALID] * 2


def test_json_cells_that_do_not_add_up():
    parsed = nvbandwidth.parse(JSON.replace('"379.118"', '"397.118"'))
    assert parsed.status == INVALID and {r.case for r in parsed.records if r.flags} == {READ}


def test_a_json_row_without_one_cell_is_not_shifted():
    data = json.loads(JSON)
    data["nvbandwidth"]["testcases"][1]["bandwidth_matrix"][0].remove("N/A")
    parsed = check(nvbandwidth, json.dumps(data))
    assert parsed.status == INCOMPLETE and READ not in {r.case for r in parsed.records}


def test_a_json_after_other_output_and_cut():
    whole = nvbandwidth.parse("a warning of the driver\n" + JSON)
    assert whole.status is None and len(whole.records) == 8
    cut = check(nvbandwidth, JSON[: JSON.index('"device_local_copy"')])
    assert cut.status == INCOMPLETE and 0 < len(cut.records) < 8


LACKS_START = "\n".join(x for x in TEXT.split("\n") if x != f"Running {WRITE}.")


@pytest.mark.parametrize("text, status", [
    ("", UNPARSED), ("hello\n", UNPARSED), ("\n" * 100_000, UNPARSED), ("{" + "[" * 50_000, UNPARSED),
    ('{"nvbandwidth": ' + "[" * 50_000, INCOMPLETE), ('{"nvbandwidth": {"testcases": 5}}', UNSUPPORTED),
    (re.sub(r"(\d)\.(\d)", r"\1,\2", TEXT), UNPARSED), (re.sub(r"(\d)\.(\d)", r"\1,\2", JSON), INCOMPLETE),
    (TEXT.partition("NOTE")[0], INCOMPLETE),
    (TEXT.partition("SUM device_to_host")[0], INCOMPLETE),
    (LOGS["text_v0.4_zeros.log"].rpartition("SUM")[0], INCOMPLETE),
    (LACKS_START, INCOMPLETE),
    (TEXT.replace("1408.77", "   -nan"), INVALID),
    (LOGS["text_waived.log"].partition("Running")[0] + "Waived: \n" + TEXT[TEXT.index("NOTE") :], UNSUPPORTED),
    ("nvbandwidth Version: v0.8\nERROR: Invalid Arguments \nnvbandwidth -x\n", UNSUPPORTED),
    ("NVML_ERROR: [Driver Not Loaded] in expression nvmlInit() in int main() : nvbandwidth.cpp:9\n", UNSUPPORTED),
    ('{"nvbandwidth": {"error": "ERROR: No CUDA devices found", "version": "v0.8"}}', UNSUPPORTED),
    (JSON.replace('"status" : "Waived"', '"status" : "Running"'), INCOMPLETE),
])  # fmt: skip
def test_status(text, status):
    assert check(nvbandwidth, text).status == status


def test_a_lost_start_gives_the_matrix_to_no_other_test():
    assert "392.61" in LACKS_START
    assert "392.61" not in {r.reported["text"] for r in nvbandwidth.parse(LACKS_START).records}


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=300))
def test_any_bytes(data):
    check(nvbandwidth, tools.clean(data))


@settings(max_examples=200, deadline=None)
@given(damaged(list(LOGS.values())))
def test_any_damage(text):
    check(nvbandwidth, text)


@settings(max_examples=100, deadline=None)
@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
                    lambda x: st.lists(x, max_size=3) | st.dictionaries(st.sampled_from(
                        ["testcases", "name", "status", "bandwidth_matrix", "sum", "bandwidth_description", "error",
                         "warning", "version", "GPU Device list"]), x, max_size=6), max_leaves=20))  # fmt: skip
def test_any_json(value):
    check(nvbandwidth, json.dumps({"nvbandwidth": value}))


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(["text_v0.8.log", "text_v0.6_both_ways.log", "json.json"]), st.data())
def test_a_cut_log_is_neither_whole_nor_wrong(name, data):
    text = LOGS[name]
    end = text.index("NOTE: The") if "NOTE: The" in text else len(text.rstrip()) - 1
    cut = text[: data.draw(st.integers(0, end))]
    parsed = check(nvbandwidth, cut)
    assert parsed.status in (INCOMPLETE, UNPARSED)
    assert set(figures(parsed)) <= set(figures(nvbandwidth.parse(text)))


PATH = {"nvbandwidth": "/usr/bin/nvbandwidth"}


def test_commands():
    local, links = nvbandwidth.commands(Place("cuda", "h200", 8, PATH, plateau_bytes=18 * 2**30))
    assert local.argv == ("/usr/bin/nvbandwidth", "-j", "-b", "18432", "-t", "device_local_copy")
    assert links.argv[:3] == ("/usr/bin/nvbandwidth", "-j", "-t") and set(links.argv[3:]) > {READ, WRITE}
    assert {local.tool, links.tool} == {"nvbandwidth"}


def test_one_device_has_no_peers():
    _, links = nvbandwidth.commands(Place("cuda", "h200", 1, PATH))
    assert links.argv[3:] == ("host_to_device_memcpy_ce", "device_to_host_memcpy_ce")


@pytest.mark.parametrize("kind, found", [("rocm", PATH), ("cpu", PATH), ("cuda", {})])
def test_where_it_does_not_apply(kind, found):
    assert nvbandwidth.commands(Place(kind, None, 8, found)) == []
