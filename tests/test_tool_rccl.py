"""rccl-tests and nccl-tests: every generation of tables, JSON, failures, and damage of every kind."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from validation import tools
from validation.tools import FAIL, INCOMPLETE, INVALID, UNPARSED, UNSUPPORTED, Place, rccl

FIXTURES = Path(__file__).parent / "fixtures" / "tools" / "rccl"
NAMES = sorted(p.name for p in FIXTURES.iterdir())
STATUSES = {None, FAIL, INVALID, UNSUPPORTED, INCOMPLETE, UNPARSED}


def log(name):
    return (FIXTURES / name).read_text(encoding="utf-8")


def rates(parsed, counted="bus"):
    return [(r.params["bytes"], r.params.get("placement"), r.reported["value"])
            for r in parsed.records if r.params.get("counted") == counted]  # fmt: skip


def check_readings(text, parsed):
    assert parsed.status in STATUSES
    assert "\n" not in parsed.reason and (parsed.reason != "") == (parsed.status is not None)
    for r in parsed.records:
        assert r.reported["text"] in text and float(r.reported["text"]) == r.reported["value"]
        assert r.family == "comm" and r.params["statistic"] == "mean"
        assert r.reported["unit"] == ("GB/s" if "counted" in r.params else "us")
    json.dumps([r.params for r in parsed.records], allow_nan=False)


# name -> status, number of readings, op, dtype, world, busbw of the last row out of place and in place
TABLE = {
    "rccl_all_reduce.log": (None, 24, "all_reduce", "fp32", 4, (294.00, 293.83)),
    "rccl_all_gather.log": (None, 12, "all_gather", "bf16", 4, (223.13, 223.75)),
    "rccl_reduce_scatter.log": (None, 12, "reduce_scatter", "bf16", 4, (220.85, 220.22)),
    "rccl_alltoall.log": (None, 12, "all_to_all", "bf16", 4, (167.28, 169.45)),
    "rccl_broadcast.log": (None, 12, "broadcast", "fp16", 4, (249.15, 248.55)),
    "rccl_two_nodes.log": (None, 12, "all_reduce", "bf16", 8, (335.27, 335.93)),
    "rccl_in_place_only.log": (None, 6, "all_reduce", "fp32", 4, (257.98,)),
    "rccl_stress.log": (None, 18, "all_reduce", "fp32", 4, (100.02, 99.39)),
    "rccl_hip_events.log": (None, 12, "all_reduce", "bf16", 4, (322.95, 322.12)),
    "rccl_single_rank.log": (INVALID, 12, None, "fp32", 1, (0.0, 0.0)),
    "rccl_internal_error.log": (FAIL, 0, None, None, None, ()),
    "rccl_too_many.stderr": (UNSUPPORTED, 0, None, None, None, ()),
    "nccl_all_reduce.log": (None, 26, "all_reduce", "fp32", 4, (445.62, 445.86)),
    "nccl_per_iteration.log": (None, 6, "all_reduce", "fp32", 4, (404.03, 404.35)),
    "nccl_timestamps.log": (None, 12, "all_reduce", "fp32", 4, (404.03, 404.35)),
    "nccl_cut_row.log": (None, 20, "all_reduce", "fp32", 4, (445.62, 445.86)),
    "nccl_without_mpi.log": (INVALID, 24, "all_reduce", "fp32", 1, (0.0, 0.0)),
    "nccl_timeout.log": (FAIL, 0, None, None, None, ()),
    "nccl_cuda_failure.log": (FAIL, 0, None, None, None, ()),
    "nccl_too_many.stderr": (UNSUPPORTED, 0, None, None, None, ()),
    "nccl_old_all_reduce.log": (None, 12, "all_reduce", "fp32", 4, (227.98, 228.86)),
    "nccl_old_all_gather.log": (None, 12, "all_gather", "fp32", 4, (113.99, 114.43)),
    "nccl_old_alltoall.log": (None, 12, "all_to_all", "fp32", 4, (113.99, 114.43)),
    "nccl_old_broadcast.log": (None, 12, "broadcast", "fp32", 4, (151.98, 152.57)),
    "nccl_ok.json": (None, 12, "all_reduce", "fp32", 4, (404.026875, 404.351460)),
    "nccl_bad.json": (FAIL, 13, "all_reduce", "fp32", 4, (404.026875, 404.351460)),
}


def test_every_fixture_is_in_the_table():
    assert sorted(TABLE) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_fixture(name):
    text = log(name)
    status, count, op, dtype, world, last = TABLE[name]
    parsed = rccl.parse(text)
    check_readings(tools.clean(text), parsed)
    assert rccl.recognises(tools.clean(text)) and tools.recognise(tools.clean(text)) == "rccl"
    assert (parsed.status, len(parsed.records)) == (status, count), parsed.reason
    for key, value in {"op": op, "dtype": dtype, "world": world}.items():
        assert {r.params.get(key) for r in parsed.records} == ({value} if count else set())
    assert tuple(v for _, _, v in rates(parsed)[-len(last):] if last) == last
    assert all(r.backend == name.partition("_")[0] + "-tests" for r in parsed.records)


def test_one_row_in_full():
    parsed = rccl.parse(log("rccl_all_gather.log"))
    time, algbw, busbw = parsed.records[:3]
    like = {"op": "all_gather", "dtype": "bf16", "bytes": 4194304, "world": 4, "placement": "out", "statistic": "mean"}
    assert time.case == "all_gather_perf" and time.flags == () and time.source == "tool"
    assert (time.params, time.reported) == (like, {"value": 48.11, "unit": "us", "text": "48.11"})
    assert (algbw.params, algbw.reported["text"]) == ({**like, "counted": "alg"}, "87.18")
    assert (busbw.params, busbw.reported["text"]) == ({**like, "counted": "bus"}, "65.39")
    assert [r.params["placement"] for r in parsed.records] == (["out"] * 3 + ["in"] * 3) * 2
    assert parsed.version == "develop:1a2b3c4" and rccl.parse(log("nccl_all_reduce.log")).version == "2.19.6"


@pytest.mark.parametrize(
    "name, words",
    [
        ("rccl_internal_error.log", "Test NCCL failure common.cu:1279 'internal error"),
        ("nccl_timeout.log", "Test timeout (90s)"),
        ("nccl_cuda_failure.log", "'out of memory'"),
        ("rccl_too_many.stderr", "(16) is greater than the number of GPUs available (2)"),
        ("nccl_too_many.stderr", "16 requested but only 2 were found"),
        ("rccl_single_rank.log", "single rank"),
        ("nccl_without_mpi.log", "2 headers"),
        ("nccl_bad.json", "4096.000000 wrong values"),
    ],
)
def test_reason_is_the_tools_own_message(name, words):
    reason = rccl.parse(log(name)).reason
    assert words in reason and "node-a" not in reason and "4100" not in reason


def test_rates_printed_as_zero_are_left_out_where_they_only_round_to_it():
    parsed = rccl.parse(log("nccl_all_reduce.log"))
    kinds = {size: [r.params.get("counted", "time") for r in parsed.records if r.params["bytes"] == size]
             for size in (8, 1024)}  # fmt: skip
    assert kinds == {8: ["time"] * 2, 1024: ["time", "alg", "bus"] * 2}
    zeroed = log("nccl_all_reduce.log").replace("404.03", "  0.00").replace("269.35", "  0.00")
    flagged = [r for r in rccl.parse(zeroed).records if r.flags]
    assert {r.params["bytes"] for r in flagged} == {134217728} and len(flagged) == 3
    assert rccl.parse(zeroed).status == INVALID and "algbw 0.00 GB/s is not size / time" in rccl.parse(zeroed).reason


def test_time_per_hip_event_is_not_the_time():
    times = [r.reported["text"] for r in rccl.parse(log("rccl_hip_events.log")).records if "counted" not in r.params]
    assert times == ["57.42", "58.06", "311.70", "312.50"]


def test_stress_cycles_keep_every_repeat():
    assert rates(rccl.parse(log("rccl_stress.log"))) == [
        (4194304, "out", 101.64), (4194304, "in", 100.99), (4194304, "out", 100.82), (4194304, "in", 100.18),
        (4194304, "out", 100.02), (4194304, "in", 99.39),
    ]  # fmt: skip


@pytest.mark.parametrize("columns", ["#wrong", "#wrong twice"])
def test_wrong_values_fail(columns):
    text = log("nccl_all_reduce.log")
    rows = [line for line in text.splitlines() if line.lstrip().startswith("134217728")]
    wrong = re.sub(r"      0(?=  +497)", "1.67772e+07", rows[0])
    if columns == "#wrong twice":
        wrong = re.sub(r"0$", "248", wrong)
    bad = text.replace(rows[0], wrong).replace("values : 0 OK", "values : 2 FAILED")
    parsed = rccl.parse(bad)
    flagged = [r for r in parsed.records if r.flags]
    assert parsed.status == FAIL and "1.67772e+07 wrong values" in parsed.reason and "out of bounds" in parsed.reason
    assert len(flagged) == (3 if columns == "#wrong" else 6)
    assert all(f.startswith("FAIL: ") for r in flagged for f in r.flags)


def test_footer_alone_fails_too():
    bad = log("nccl_all_reduce.log").replace("values : 0 OK", "values : 2 FAILED")
    assert (rccl.parse(bad).status, rccl.parse(bad).reason) == (FAIL, "out of bounds values: 2")


def test_missed_target_names_its_value():
    bad = re.sub(r"(bandwidth    : \S+) ", r"\1 FAILED", log("nccl_all_reduce.log"))
    parsed = rccl.parse(bad)
    average = re.search(r"bandwidth    : (\S+) FAILED", bad)[1]
    assert parsed.status == FAIL and average in parsed.reason and "NCCL_TESTS_MIN_BW" in parsed.reason
    assert not any(r.flags for r in parsed.records)


def test_deviation_of_old_tables_is_no_count():
    text = log("nccl_old_all_reduce.log").replace("N/A", "4e-7")
    assert rccl.parse(text).status is None and not any("validated" in r.params for r in rccl.parse(text).records)
    assert rccl.parse(text.replace("4e-7", "1e0*")).status == FAIL


def test_without_validation():
    text = re.sub(r"      0(?=  |$)", "    N/A", log("nccl_all_reduce.log"), flags=re.M)
    parsed = rccl.parse(text)
    assert parsed.status is None and {r.params["validated"] for r in parsed.records} == {False}
    assert any("not checked" in w for w in parsed.warnings)
    in_place = rccl.parse(log("rccl_alltoall.log"))
    assert {r.params["placement"] for r in in_place.records if r.params.get("validated") is False} == {"in"}


def test_all_gather_and_alltoall_without_checks_look_alike():
    text = re.sub(r"      0(?=  |$)", "    N/A", log("rccl_all_gather.log"), flags=re.M)
    parsed = rccl.parse(text)
    assert parsed.status is None and {r.case for r in parsed.records} == {"collective"}
    assert any("all_gather or all_to_all" in w for w in parsed.warnings)
    named = rccl.parse("$ mpirun -np 4 ./build/all_gather_perf -b 4M -e 256M -f 64 -c 0\n" + text)
    assert {r.params["op"] for r in named.records} == {"all_gather"}


def test_all_reduce_is_told_from_sendrecv_by_its_rates():
    text = re.sub(r"      0(?=  |$)", "    N/A", log("rccl_all_reduce.log"), flags=re.M)
    assert {r.params["op"] for r in rccl.parse(text).records} == {"all_reduce"}


@pytest.mark.parametrize(
    "old, new, words",
    [
        ("  404.03", "  410.03", "busbw 410.03 GB/s is not algbw x 1.5 of 4 ranks"),
        ("  269.35", "  275.35", "algbw 275.35 GB/s is not size / time"),
        ("   33554432", "   33554433", "size 134217728 is not what 33554433 elements of fp32 make"),
        (" 498.30", "   0.00", "time is zero"),
        ("  404.03", "     nan", "busbw is nan"),
    ],
)
def test_figures_of_a_row_that_do_not_agree(old, new, words):
    text = log("nccl_all_reduce.log")
    assert old in text
    parsed = rccl.parse(text.replace(old, new, 1))
    assert parsed.status == INVALID and words in parsed.reason
    assert {r.params["bytes"] for r in parsed.records if r.flags} == {134217728}


@pytest.mark.parametrize("figure", ["0e999", "9e999", "1e-999", "0e99999", "9" * 400, "-1.00", "inf", "1,00", "1.0.0"])
@pytest.mark.parametrize("old", ["  404.03", "  269.35", " 498.30"])
def test_odd_figures(old, figure):
    text = log("nccl_all_reduce.log").replace(old, f" {figure}", 1)
    parsed = rccl.parse(text)
    check_readings(text, parsed)
    assert parsed.status in (None, INVALID) and not any(r.reported["text"] == figure and not r.flags for r in parsed.records)


def test_small_deviation_is_allowed():
    text = log("nccl_all_reduce.log").replace("  404.03", "  407.03")
    assert rccl.parse(text).status is None


def test_wrong_factor_without_a_name_is_invalid():
    text = log("rccl_all_gather.log").replace("  223.13", "  297.51")
    parsed = rccl.parse(text)
    assert parsed.status == INVALID and {r.params["op"] for r in parsed.records} == {"all_gather"}


def test_warnings_in_the_table_and_in_a_row():
    whole, cut = rccl.parse(log("nccl_all_reduce.log")), rccl.parse(log("nccl_cut_row.log"))
    lost = [r for r in whole.records if r.params["bytes"] == 134217728]
    assert [r for r in whole.records if r not in lost] == list(cut.records)
    assert cut.rejected_lines == 1 and "NET/IB : Unable to open device mlx5_3" in cut.warnings


@pytest.mark.parametrize("name", ["rccl_all_reduce.log", "nccl_all_reduce.log", "nccl_old_all_reduce.log", "nccl_ok.json"])
def test_cut_anywhere_before_the_closing_part_is_incomplete(name):
    text = log(name)
    end = text.index("Avg bus") if "Avg bus" in text else text.index('"end_time"')
    every = {(r.reported["text"], str(r.params)) for r in rccl.parse(text).records}
    for at in range(text.index("Rank" if "Rank" in text else '"config"'), end, 7):
        parsed = rccl.parse(text[:at])
        assert parsed.status == INCOMPLETE, at
        assert {(r.reported["text"], str(r.params)) for r in parsed.records} <= every


def test_verdict_that_was_cut_off_is_not_taken_for_a_pass():
    text = log("nccl_all_reduce.log")
    at = text.index("# Avg") + len("# Avg bus bandwidth    : 12")
    assert rccl.parse(text[:at]).status == INCOMPLETE


def test_runs_one_after_another_keep_their_own_ranks_and_names():
    both = log("rccl_all_gather.log") + log("rccl_two_nodes.log") + log("nccl_all_reduce.log")
    parsed = rccl.parse(both)
    assert parsed.status is None and len(parsed.records) == 12 + 12 + 26
    assert [(r.params["op"], r.params["world"]) for r in parsed.records][::12][:3] == [
        ("all_gather", 4), ("all_reduce", 8), ("all_reduce", 4)
    ]  # fmt: skip


def test_damaged_list_of_ranks():
    lines = [line for line in log("rccl_all_reduce.log").splitlines(True) if "Rank  2" not in line]
    parsed = rccl.parse("".join(lines))
    assert parsed.status == INCOMPLETE and "ranks" in parsed.reason
    assert parsed.records and not any("world" in r.params for r in parsed.records)


def test_list_of_ranks_that_the_tool_cuts_off():
    lines = log("rccl_all_reduce.log").splitlines(True)
    at = next(i for i, line in enumerate(lines) if "Rank  2" in line)
    lines[at : at + 2] = [lines[at][:40] + "...\n"]
    parsed = rccl.parse("".join(lines))
    assert parsed.status is None and {r.params["world"] for r in parsed.records} == {4}


def test_ranks_of_one_group_of_a_split():
    text = log("nccl_all_reduce.log").replace("Group  0", "Group  1")
    text = re.sub(r"(Rank  [02] Group  )1", r"\g<1>0", text)
    parsed = rccl.parse(text)
    assert {r.params["world"] for r in parsed.records} == {2} and parsed.status == INVALID  # busbw is that of 4


def test_output_tagged_by_mpirun_and_coloured():
    text = log("rccl_all_reduce.log")
    tagged = "".join(f"[1,0]<stdout>:{line}" for line in text.splitlines(True))
    coloured = "".join(f"\x1b[32m{line}\x1b[0m" for line in text.splitlines(True))
    for changed in (tagged, coloured, text.replace("\n", "\r\n"), "\ufeff" + text):
        assert rccl.parse(changed).records == rccl.parse(text).records and rccl.parse(changed).status is None


def test_decimal_commas_are_never_read():
    text = re.sub(r"(\d)\.(\d\d\b)", r"\1,\2", log("nccl_all_reduce.log"))
    parsed = rccl.parse(text)
    assert (parsed.status, parsed.records) == (UNPARSED, ()) and "decimal commas" in parsed.reason
    assert parsed.rejected_lines == 5


def test_json_never_shows_the_environment():
    parsed = rccl.parse(log("nccl_ok.json"))
    assert "do-not-keep-me" in log("nccl_ok.json") and "do-not-keep-me" not in repr(parsed)
    kept = rccl.parse(tools.redact(log("nccl_ok.json")))
    assert kept.records == parsed.records and kept.status is None


def test_json_null_nan_and_unchecked():
    found = [(r.params["bytes"], r.params["placement"], r.params.get("counted"), r.flags, r.params.get("validated"))
             for r in rccl.parse(log("nccl_bad.json")).records]  # fmt: skip
    assert not any(size == 1048576 and placement == "out" for size, placement, *_ in found)
    assert {v for size, placement, _, _, v in found if (size, placement) == (67108864, "out")} == {False}
    nan = ("INVALID: algbw is nan", "INVALID: busbw is nan")
    assert [f for size, placement, _, f, _ in found if (size, placement) == (67108864, "in")] == [nan]


def test_logs_of_other_tools_are_left_to_them():
    for path in FIXTURES.parent.glob("*/*"):
        if path.parent != FIXTURES:
            assert not rccl.recognises(tools.clean(path.read_bytes())), path


@pytest.mark.parametrize("text", ["", "\n\n", "hello\n", "{}", '{"results":[', "# size count type\n 1 2 float 3 4\n"])
def test_foreign_and_empty(text):
    parsed = rccl.parse(text)
    assert (parsed.status, parsed.records) == (UNPARSED, ()) and not rccl.recognises(text)


@pytest.mark.parametrize(
    "line, status",
    [
        ("./all_reduce_perf: error while loading shared libraries: librccl.so.1: cannot open shared object file", FAIL),
        ("node-a: Test CUDA failure common.cu:1011 'no ROCm-capable device is detected'", UNSUPPORTED),
        ("node-a: Test CUDA failure common.cu:1011 'invalid device ordinal'", UNSUPPORTED),
        ("invalid option 'J'\nUSAGE: all_reduce_perf \n\t[-t,--nthreads <num threads>]", UNSUPPORTED),
    ],
)
def test_messages_without_a_table(line, status):
    parsed = rccl.parse(line)
    assert rccl.recognises(line) and parsed.status == status and parsed.reason in line


def test_commands():
    found = {name: f"/opt/{name}" for name in rccl.EXECUTABLES}
    for kind in ("rocm", "cuda"):
        commands = rccl.commands(Place(kind, None, 8, found))
        assert [c.name for c in commands] == list(rccl.EXECUTABLES)
        assert " ".join(commands[0].argv) == (
            "/opt/all_reduce_perf -b 1M -e 512M -f 2 -g 8 -d bfloat16 -n 20 -w 5 -c 1"
        )  # fmt: skip
        assert all(c.env["LC_ALL"] == "C" for c in commands)
        assert rccl.commands(Place(kind, None, 1, found)) == []
    assert rccl.commands(Place("cpu", None, 8, found)) == []
    assert [c.name for c in rccl.commands(Place("cuda", None, 2, {"alltoall_perf": "/x"}))] == ["alltoall_perf"]


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=400))
def test_any_bytes(data):
    text = tools.clean(data)
    check_readings(text, rccl.parse(text))
    rccl.recognises(text)


PIECES = st.sampled_from([
    "# nThread 1 nGpus 4 \n", "# size count type redop root time algbw busbw #wrong\n", " 8 2 float sum -1 1.0", "nan", "\n",
    "# Rank 0 Pid 1 on a device 0 [0] X\n", "1e400 ", "99999999999999999999 ", '{"results":[', "[[[[", '"config":', "N/A",
    '{"size":1e9', "# Avg bus bandwidth : 1 \n", "# Out of bounds values : 0 OK\n",
])  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(st.lists(PIECES, max_size=30))
def test_any_order_of_its_own_words(pieces):
    text = "".join(pieces)
    check_readings(text, rccl.parse(text))


GOOD = [n for n in NAMES if TABLE[n][1]]


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(GOOD), st.data())
def test_any_damage(name, data):
    text = log(name)
    lines = text.splitlines(True)
    draw = lambda n: data.draw(st.integers(0, max(n, 0)))  # noqa: E731
    kind = data.draw(st.sampled_from(["cut", "delete", "double", "splice", "insert"]))
    if kind == "cut":
        damaged = text[: draw(len(text))]
    elif kind == "insert":
        at = draw(len(text))
        damaged = text[:at] + data.draw(st.sampled_from(["node-a:1:1 [0] NCCL WARN x\n", "\n", "7", " ", "\x1b[0m"])) + text[at:]
    else:
        i, j = draw(len(lines) - 1), draw(len(lines) - 1)
        spliced = lines[i][: draw(len(lines[i]))] + lines[j][draw(len(lines[j])) :]
        change = {"delete": [], "double": [lines[i]] * 2, "splice": [spliced]}[kind]
        damaged = "".join([*lines[:i], *change, *lines[i + 1 :]])
    parsed = rccl.parse(damaged)
    check_readings(tools.clean(damaged), parsed)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_rows_joined_from_two_are_caught(data):
    """Two rows of different sizes cut at any column: nothing unflagged that neither of the two said."""
    text = log("nccl_all_reduce.log")
    lines = text.splitlines(True)
    rows = [i for i, line in enumerate(lines) if re.match(r"\s+\d{4,}\s+\d+\s+float", line)]
    i, j = data.draw(st.permutations(rows))[:2]
    at = data.draw(st.integers(0, len(lines[i]) - 1))
    joined = "".join([*lines[:i], lines[i][:at] + lines[j][at:], *lines[i + 1 :]])
    said = {(r.reported["text"], str(r.params)) for r in rccl.parse(text).records}
    for r in rccl.parse(joined).records:
        if not r.flags and float(r.reported["text"]) > 1:
            near = [t for t, p in said if p == str(r.params) and abs(float(t) / r.reported["value"] - 1) < 0.03]
            assert near, r
