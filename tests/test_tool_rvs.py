"""RVS: every shape of its logs gives its readings, and no damage gives a wrong one."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from escher_kernels import records
from validation import tools
from validation.tools import FAIL, INCOMPLETE, INVALID, UNPARSED, UNSUPPORTED, Parsed, Place, rvs

FIXTURES = Path(__file__).with_name("fixtures") / "tools" / "rvs"
FILES = sorted(p.name for p in FIXTURES.iterdir())
STATUSES = (None, FAIL, INVALID, UNSUPPORTED, INCOMPLETE, UNPARSED)
ACTION = "gst-500Tflops-4K4K8K-rand-bf16"


def text(name: str) -> str:
    return tools.clean((FIXTURES / name).read_bytes())


def figures(parsed: Parsed) -> list[tuple[str, str, str, str]]:
    return [
        (r.params.get("op"), r.params.get("device"), r.params["statistic"], r.reported["text"]) for r in parsed.records
    ]  # fmt: skip


# ---- every shape


@pytest.mark.parametrize(
    "name, status, count, first, last",
    [
        ("gst.log", None, 8, ("gemm", "30101", "interval", "511201"), ("gemm", "30202", "best", "510222")),
        ("gst_missed.log", FAIL, 7, ("gemm", "30101", "interval", "511201"), ("gemm", "30202", "best", "402111")),
        ("gst_blas_error.log", FAIL, 3, ("gemm", "30101", "interval", "511201"), ("gemm", "30101", "best", "513408")),
        ("gst_nonsense.log", INVALID, 4, ("gemm", "30101", "interval", "511201"),
         ("gemm", "30101", "best", "18446744073709551615")),
        ("gst_gen1.log", None, 3, ("gemm", "30101", "interval", "7301.250000"), ("gemm", "30101", "best", "7301.250000")),
        ("gst_gen2.log", None, 2, ("gemm", "30101", "interval", "7301"), ("gemm", "30101", "best", "7301")),
        ("gst_pesm.log", None, 4, ("gemm", "30101", "interval", "7301.250000"), ("gemm", "30101", "best", "7301.250000")),
        ("gst.json", None, 2, ("gemm", "30101", "best", "513408"), ("gemm", "30202", "best", "510222")),
        ("gst_errors.json", FAIL, 2, ("gemm", "30101", "best", "513408"), ("gemm", "30202", "best", "402111")),
        ("gst_twice.json", None, 2, ("gemm", "30101", "best", "513408"), ("gemm", "30101", "best", "513009")),
        ("gst_iet.json", None, 2, ("gemm", "30101", "best", "513408"), ("power", "30101", "best", "901.000000")),
        ("flat.json", None, 2, ("gemm", "30101", "interval", "513408"), ("gemm", "30101", "best", "513408")),
        ("empty.json", INCOMPLETE, 0, None, None),
        ("babel.log", None, 16, ("read", "30101", "best", "4010100.125"), ("dot", "30202", "mean", "3128000.500")),
        ("babel_zero.log", INVALID, 5, ("copy", "30101", "best", "3511100.125"), ("copy", "30202", "mean", "0.000")),
        ("babel_seconds.log", None, 2, ("copy", "30101", "best", "3351100.125"), ("read", "30101", "best", "6651100.125")),
        ("babel.csv", None, 4, ("copy", "30101", "best", "3.3511e+06"), ("triad", "30101", "mean", "3.1271e+06")),
        ("babel.json", None, 8, ("copy", "30101", "best", "3511100.125"), ("triad", "30202", "mean", "3227000.500")),
        ("babel_old.json", None, 1, ("copy", "30101", "best", "3351100.125000"),
         ("copy", "30101", "best", "3351100.125000")),
        ("mem.log", None, 2, ("read_write", None, "mean", "4401.250000"), ("read_write", None, "mean", "4398.750000")),
        ("mem_level3.log", None, 1, ("read_write", None, "mean", "4401.250000"),
         ("read_write", None, "mean", "4401.250000")),
        ("mem_errors.log", FAIL, 1, ("read_write", None, "mean", "4401.250000"),
         ("read_write", None, "mean", "4401.250000")),
        ("mem.json", None, 0, None, None),
        ("mem_errors.json", FAIL, 0, None, None),
        ("pebb.log", None, 4, ("host_to_device", "30101", "mean", "51.250"), ("device_to_host", "2202", "mean", "48.625")),
        ("pebb_old.log", FAIL, 1, ("host_to_device", "30101", "mean", "22.750"),
         ("host_to_device", "30101", "mean", "22.750")),
        ("pebb.json", INCOMPLETE, 1, (None, "30101", "mean", "51.250"), (None, "30101", "mean", "51.250")),
        ("pbqt.log", None, 2, ("device_to_device", None, "mean", "88.125"), ("device_to_device", None, "mean", "88.250")),
        ("pbqt_nan.log", INVALID, 1, ("device_to_device", None, "mean", "41.500"),
         ("device_to_device", None, "mean", "41.500")),
        ("pbqt.json", None, 1, ("device_to_device", None, "mean", "88.125"), ("device_to_device", None, "mean", "88.125")),
        ("iet.log", None, 4, ("power", "30101", "interval", "181.000000"), ("power", "2202", "interval", "899.000000")),
        ("iet_missed.log", FAIL, 2, ("power", "30101", "interval", "181.000000"),
         ("power", "30101", "interval", "702.000000")),
        ("gm.log", UNSUPPORTED, 0, None, None),
        ("quiet.log", UNPARSED, 0, None, None),
        ("quiet_rows.log", FAIL, 0, None, None),
        ("no_gpu.log", UNSUPPORTED, 0, None, None),
    ],
)  # fmt: skip
def test_shape(name, status, count, first, last):
    parsed = rvs.parse(text(name))
    assert (parsed.tool, parsed.status, len(parsed.records), parsed.rejected_lines) == ("rvs", status, count, 0)
    assert (figures(parsed) or [None])[0] == first and (figures(parsed) or [None])[-1] == last
    assert bool(parsed.reason) == (status is not None) and "\n" not in parsed.reason


def test_every_fixture_has_its_row():
    marks = next(m for m in test_shape.pytestmark if m.name == "parametrize")
    assert sorted(row[0] for row in marks.args[1]) == FILES


@pytest.mark.parametrize(
    "source, status, words",
    [
        ("gst_missed.log", FAIL, "device 30202: 402111 GFLOP/s: its target of 500000 GFLOPS"),
        ("gst_errors.json", FAIL, "its target of 500000 is not met; gst-400Tflops-4K4K8K-trig-bf16 device 30202: blas error"),
        ("gst_blas_error.log", FAIL, "Error in hipblasLtMatmul() !!!; gst 30202 blas error !!!"),
        ("mem_errors.log", FAIL, "4 errors, whatever PASS says"),
        ("mem_errors.json", FAIL, "device 30202: 5 errors in Walking 1 bit"),
        ("iet_missed.log", FAIL, "iet iet-900W device 30101: its target is not met, the highest is 702.000000 W"),
        ("quiet_rows.log", FAIL, "iet-900W: FAIL in the summary"),
        ("quiet.log", UNPARSED, "quiet mode"),
        ("pbqt_nan.log", INVALID, "-nan"),
        ("babel_zero.log", INVALID, "device 30202: 0.000 MB/s: zero"),
        ("gm.log", UNSUPPORTED, "microwatts"),
        ("no_gpu.log", UNSUPPORTED, "No GPUs detected !"),
        ("RVS-ERROR [CLI] Invalid configuration file !\n", FAIL, "Invalid configuration file !"),
        ("RVS-ERROR [CLI] No platform support for the detected GPU or no GPU detected !\n", UNSUPPORTED, "No platform"),
        ("RVS-ERROR [gst] [a] Action failed to run successfully.\n", FAIL, "a Action failed to run successfully."),
        ("RVS-ERROR [GST] [a] key 'target_stress' was not found\n"
         "RVS-ERROR [gst] [a] Action failed to run successfully.\n", FAIL, "a key 'target_stress' was not found"),
        ("RVS-ERROR [gst] [a] The version of rocBLAS currently in use no longer supports FP8.\n"
         "RVS-ERROR [gst] [a] Action failed to run successfully.\n", UNSUPPORTED, "no longer supports FP8."),
        ("RVS-ERROR [GST] [a] No devices match criteria from the test configuration.\n", UNSUPPORTED, "No devices match"),
        ("[ERROR ] [  8123.45120 ] [a] gst No AMD compatible GPU found!\n", UNSUPPORTED, "gst No AMD compatible GPU found!"),
        ("[RESULT] [     1.5     ] Action name :a\n[RESULT] [     1.6     ] Module name :gst\n\n Invalid data-type !!!\n",
         UNSUPPORTED, "Invalid data-type !!!"),
        ("[RESULT] [     1.5     ] Action name :a\n[RESULT] [     1.6     ] Module name :gst\n", INCOMPLETE,
         "gst a: nothing follows its name"),
        ("[RESULT] [     1.5     ] [a] mem Test 1 : PASS\n", INCOMPLETE, "neither a bandwidth nor an error count"),
        ("[a] [GPU:: 7] self-check error 0.0012\n", FAIL, "one GEMM, two results"),
        ("error: 'out of memory'(2) from hipMalloc at x.cpp:7\nRVS-ERROR [babel] [a] Action failed to run successfully.\n",
         FAIL, "error: 'out of memory'(2) from hipMalloc at x.cpp:7"),
        ("", UNPARSED, "empty"),
        ("an ordinary text\n", UNPARSED, "no reading"),
    ],
)  # fmt: skip
def test_the_reason_is_the_tools_own(source, status, words):
    parsed = rvs.parse(text(source) if source in FILES else source)
    assert parsed.status == status and words in parsed.reason


def test_a_missed_target_is_on_its_own_reading_alone():
    flagged = [(r.params["device"], r.params["statistic"]) for r in rvs.parse(text("gst_missed.log")).records if r.flags]
    assert flagged == [("30202", "best")]


@pytest.mark.parametrize("name, flagged", [("gst_nonsense.log", 2), ("babel_zero.log", 1), ("gst.log", 0)])
def test_what_cannot_be_is_flagged(name, flagged):
    assert sum(f.startswith("INVALID: ") for r in rvs.parse(text(name)).records for f in r.flags) == flagged


def test_what_is_not_told_is_a_warning():
    assert any("PASS is printed whatever" in w for w in rvs.parse(text("mem.log")).warnings)
    assert not any("PASS" in w for w in rvs.parse(text("mem_level3.log")).warnings)
    assert any("highest so far" in w for w in rvs.parse(text("gst_gen1.log")).warnings)
    assert any("ramp-up" in w for w in rvs.parse(text("gst_gen2.log")).warnings)
    assert any("no summary" in w for w in rvs.parse(text("gst_gen2.log")).warnings)
    assert any("left out" in w for w in rvs.parse(text("gst_pesm.log")).warnings)
    assert rvs.parse(text("gst.log")).warnings == ()


def test_params_of_each_module():
    def params(name, index=0):
        r = rvs.parse(text(name)).records[index]
        return {"family": r.family, "backend": r.backend, "case": r.case, "unit": r.reported["unit"], **r.params}

    assert params("gst.log") == {
        "family": "compute", "backend": "rvs gst", "case": ACTION, "unit": "GFLOP/s", "op": "gemm", "device": "30101",
        "dtype": "bf16", "data": "integers", "statistic": "interval",
    }  # fmt: skip
    assert params("babel.log", 2) == {
        "family": "bandwidth", "backend": "rvs babel", "case": "babel-float", "unit": "MB/s", "op": "copy",
        "device": "30101", "dtype": "fp32", "counted": "read+write", "statistic": "best", "buffer_bytes": 6920600000,
    }  # fmt: skip
    assert params("babel.log", 0)["counted"] == "read+write" and params("babel.log", 0)["op"] == "read"
    assert params("babel_seconds.log", 0)["counted"] == "read+write"
    assert "counted" not in params("babel_seconds.log", 1)  # read: where seconds are printed it is counted twice
    assert params("babel.csv")["buffer_bytes"] == 4 * 1073741824
    assert params("babel.json")["buffer_bytes"] == 4294967296
    assert params("babel_seconds.log")["unit"] == "MiB/s"
    assert params("pebb.log", 2) == {
        "family": "bandwidth", "backend": "rvs pebb", "case": "pebb-d2h", "unit": "GB/s", "op": "device_to_host",
        "direction": "one", "src": "GPU 30101", "dst": "CPU 0", "device": "30101", "counted": "payload",
        "statistic": "mean",
    }  # fmt: skip
    assert params("pebb_old.log")["direction"] == "both"
    assert params("pbqt.log") == {
        "family": "bandwidth", "backend": "rvs pbqt", "case": "xgmi-both", "unit": "GB/s", "op": "device_to_device",
        "direction": "both", "src": "GPU 30101", "dst": "GPU 2202", "counted": "payload", "statistic": "mean",
    }  # fmt: skip
    assert params("iet.log")["family"] == "sustained" and params("iet.log")["unit"] == "W"
    assert "counted" not in params("mem.log")


def test_version_is_that_of_the_summary():
    assert rvs.parse(text("gst.log")).version == "1.6.99"
    assert rvs.parse(text("gst_gen1.log")).version is None


# ---- column-major and row-major


@pytest.mark.parametrize("transa", [False, True])
@pytest.mark.parametrize("transb", [False, True])
def test_row_major_names_the_gemm_that_has_the_same_bytes(transa, transb):
    m, n, k = 3, 5, 4
    random = np.random.default_rng(7)
    a_bytes, b_bytes = random.normal(size=m * k), random.normal(size=k * n)
    # as BLAS reads the bytes
    a = a_bytes.reshape((k, m) if transa else (m, k), order="F")
    b = b_bytes.reshape((n, k) if transb else (k, n), order="F")
    c = (a.T if transa else a) @ (b.T if transb else b)
    # as we read them: our A is BLAS's B
    ours = rvs.row_major(m, n, k, transa, transb)
    shape_a, shape_b = (ours["m"], ours["k"]), (ours["k"], ours["n"])
    first = b_bytes.reshape(shape_a[::-1]).T if ours["layout"][0] == "T" else b_bytes.reshape(shape_a)
    second = a_bytes.reshape(shape_b[::-1]).T if ours["layout"][1] == "T" else a_bytes.reshape(shape_b)
    assert np.allclose((first @ second).ravel(), c.ravel(order="F"))
    assert (first @ second).shape == (ours["m"], ours["n"])


# ---- the configuration


def conf(*more: dict, **keys) -> str:
    shipped = {"name": ACTION, "module": "gst", "data_type": "bf16_r", "target_stress": 500000, "matrix_init": "rand",
               "matrix_size_a": 4864, "matrix_size_b": 4096, "matrix_size_c": 8192, "transa": 1, "transb": 0}  # fmt: skip
    kept = {k: v for k, v in (shipped | keys).items() if v is not None}
    return yaml.safe_dump({"actions": [kept, *more]})


def gemm_of(config: str | None, name: str = "gst.log") -> dict:
    params = rvs.parse(text(name), config=config).records[-1].params
    return {k: params.get(k) for k in ("m", "n", "k", "layout", "dtype", "data", "batch")}


SHIPPED = {"m": 4096, "n": 4864, "k": 8192, "layout": "NT", "dtype": "bf16", "data": "integers", "batch": None}
UNTOLD = {"m": None, "n": None, "k": None, "layout": None, "dtype": "bf16", "data": "integers", "batch": None}


@pytest.mark.parametrize(
    "config, expected",
    [
        (conf(), SHIPPED),
        (conf(transa=0), SHIPPED | {"layout": "NN"}),
        (conf(transa=None, transb=None), SHIPPED | {"layout": "TN"}),  # RVS's defaults
        (conf(transa=1, transb=1), SHIPPED | {"layout": "TT"}),
        (conf(matrix_size_a=None), SHIPPED | {"n": 5760}),
        (conf(matrix_init="trig"), SHIPPED | {"data": "trig"}),
        (conf(matrix_init=None), SHIPPED | {"data": None}),
        (conf(data_type=None, ops_type="dgemm"), SHIPPED | {"dtype": "fp64"}),
        (conf(data_type=None), SHIPPED | {"dtype": "fp32"}),
        (conf(data_type="fp32_r", compute_type="xf32_r"), SHIPPED | {"dtype": "tf32"}),
        (conf(data_type="fp8_e4m3_r"), SHIPPED | {"dtype": "fp8_e4m3"}),
        (conf(gemm_mode="strided_batched", batch_size=4), UNTOLD | {"batch": 4}),
        (conf(matrix_size_a="many"), UNTOLD),
        (conf(name="another"), UNTOLD),
        (conf() + conf().partition("\n")[2], UNTOLD),  # two actions of that name
        ("actions: [", UNTOLD),
        ("- just: a list\n", UNTOLD),
        ("actions:\n- name: [1]\n- 7\n", UNTOLD),
        (None, UNTOLD),
    ],
)
def test_config_gives_the_exact_gemm(config, expected):
    assert gemm_of(config) == expected


def test_config_of_another_run_is_not_used():
    parsed = rvs.parse(text("gst.log"), config=conf(target_stress=400000))
    assert "m" not in parsed.records[-1].params and any("another target" in w for w in parsed.warnings)
    assert gemm_of(conf(data_type="fp16_r"), "gst.json") == UNTOLD  # the JSON says bf16
    assert gemm_of(conf(), "gst.json") == SHIPPED


def test_every_action_of_the_config_must_be_in_the_log():
    other = {"name": "other", "module": "gst", "matrix_size_a": 1}
    parsed = rvs.parse(text("gst.log"), config=conf(other))
    assert (parsed.status, parsed.reason) == (INCOMPLETE, "other: asked for, and not in the log")
    assert rvs.parse(text("gst.log"), config=conf({**other, "module": "gpup"})).status is None
    parsed = rvs.parse(text("gst.log"), config=conf(name="another"))
    assert parsed.status is None and "no action of the configuration is in the log" in parsed.warnings
    assert rvs.parse(text("gst.log"), config=conf()).warnings == ()


def test_broken_config_is_said():
    assert any("no YAML" in w for w in rvs.parse(text("gst.log"), config="actions: [").warnings)
    assert any("no actions" in w for w in rvs.parse(text("gst.log"), config="x: 1\n").warnings)


def test_config_may_stand_in_the_log():
    assert gemm_of(None) == UNTOLD
    assert rvs.parse(conf() + "\n" + text("gst.log")).records[-1].params["layout"] == "NT"


def test_an_interval_over_ten_times_the_target_cannot_be():
    log = text("gst.log").replace("GFLOPS 512007", "GFLOPS 5120070")
    parsed = rvs.parse(log)
    assert parsed.status == INVALID and "over ten times its target" in parsed.reason
    assert [r.reported["text"] for r in parsed.records if r.flags] == ["5120070"]


@pytest.mark.parametrize(
    "h2d, d2h, op, direction",
    [
        (True, False, "host_to_device", "one"),
        (False, True, "device_to_host", "one"),
        (True, True, "host_to_device", "both"),
    ],
)
def test_pebb_json_takes_its_direction_from_the_configuration(h2d, d2h, op, direction):
    action = {"name": "pebb-h2d", "host_to_device": h2d, "device_to_host": d2h, "block_size": 1048576}
    [r] = rvs.parse(text("pebb.json"), config=yaml.safe_dump({"actions": [action]})).records
    assert (r.params["op"], r.params["direction"], r.params["buffer_bytes"]) == (op, direction, 1048576)


# ---- how it is run

PLACE = Place("rocm", "mi355x", 8, {"rvs": "/opt/rocm/bin/rvs"}, plateau_bytes=36 * 2**30)


@pytest.mark.parametrize(
    "target, expected",
    [
        ("mi355x", {"m": 8192, "n": 8192, "k": 16384, "layout": "NT"}),
        ("mi350x", {"m": 8192, "n": 8192, "k": 16384, "layout": "NT"}),
        ("mi300x", {"m": 4096, "n": 4864, "k": 8192, "layout": "NT"}),
        ("mi325x", {"m": 4096, "n": 4864, "k": 8192, "layout": "NT"}),
        ("mi250x", {"m": 8192, "n": 8192, "k": 8192, "layout": "NN"}),
        (None, {"m": 8192, "n": 8192, "k": 8192, "layout": "NN"}),
    ],
)
def test_the_log_of_our_own_command_tells_the_gemm(target, expected):
    gst = rvs.commands(Place("rocm", target, 1, {"rvs": "rvs"}))[0]
    [config] = gst.files.values()
    log = text("gst.log").replace(ACTION, yaml.safe_load(config)["actions"][0]["name"]).replace("500000", "0")
    parsed = rvs.parse(log, config=config)
    assert parsed.status is None and len(parsed.records) == 8
    for r in parsed.records:
        assert {k: r.params[k] for k in expected} == expected
        assert (r.params["dtype"], r.params["data"]) == ("bf16", "trig")


def test_one_command_a_module():
    made = {c.name: c for c in rvs.commands(PLACE)}
    assert list(made) == ["rvs-gst", "rvs-babel", "rvs-pebb", "rvs-mem"]
    for command in made.values():
        [(name, config)] = command.files.items()
        assert command.argv == ("/opt/rocm/bin/rvs", "-c", f"{{dir}}/{name}", "-d", "3")
        assert command.tool == "rvs" and command.timeout_s > 60
        for action in yaml.safe_load(config)["actions"]:
            assert action["module"] == command.name.removeprefix("rvs-") and action["device"] == "all"
    [gst] = yaml.safe_load(made["rvs-gst"].files["gst.yaml"])["actions"]
    assert gst["target_stress"] == 0 and gst["duration"] >= gst["ramp_interval"] and gst["rotating"] == 512
    pebb = yaml.safe_load(made["rvs-pebb"].files["pebb.yaml"])["actions"]
    assert [(a["host_to_device"], a["device_to_host"]) for a in pebb] == [(True, False), (False, True)]


@pytest.mark.parametrize(
    "plateau, elements",
    [(None, 2**28), (36 * 2**30, 2**30), (2**30, 2**28), (3 * 2**20 + 5, 2**20), (9 * 2**20, 2 * 2**20)],
)
def test_babel_arrays_are_of_the_plateau_and_fit_rvs(plateau, elements):
    place = Place("rocm", "mi355x", 1, {"rvs": "rvs"}, plateau_bytes=plateau)
    [babel] = yaml.safe_load(rvs.commands(place)[1].files["babel.yaml"])["actions"]
    assert babel["array_size"] == elements and babel["test_type"] == 1 and babel["mibibytes"] is False


def test_babel_of_our_own_command_tells_dtype_and_size():
    [config] = rvs.commands(PLACE)[1].files.values()
    params = rvs.parse(text("babel.log"), config=config).records[2].params
    assert (params["dtype"], params["buffer_bytes"]) == ("fp32", 4 * 2**30)


SIZE = "Array size: 6920.6 MB (=6.9 GB), Total size: 20761.8 MB (=20.8 GB)"


@pytest.mark.parametrize(
    "line, size",
    [
        (SIZE, 6_920_600_000),
        ("Array size: 1024.0 MiB (=1.0 GiB), Total size: 3072.0 MiB (=3.0 GiB)", 2**30),
        ("Array size: 0.0 MB (=0.0 GB), Total size: 0.0 MB (=0.0 GB)", None),
        ("Array size: nan MB (=6.9 GB), Total size: 20761.8 MB (=20.8 GB)", None),
        ("Array size: 6920.6 furlongs", None),
        ("", None),
    ],
)
def test_babel_prints_the_size_of_its_arrays(line, size):
    found = rvs.parse(text("babel.log").replace(SIZE, line)).records
    assert {r.params.get("buffer_bytes") for r in found} == {size} and len(found) == 16


def test_a_size_of_another_babel_action_is_not_taken():
    first, second = text("babel.log"), text("babel.log").replace("babel-float", "babel-more").replace(SIZE, "")
    found = rvs.parse(first + second).records
    assert {(r.case, r.params.get("buffer_bytes")) for r in found} == {("babel-float", 6920600000), ("babel-more", None)}


@pytest.mark.parametrize(
    "place", [Place("cuda", "h200", 8, {"rvs": "rvs"}), Place("cpu", None, 0, {"rvs": "rvs"}), Place("rocm", None, 8, {})]
)
def test_nothing_to_run_elsewhere(place):
    assert rvs.commands(place) == []


# ---- which logs are its own


@pytest.mark.parametrize("name", FILES)
def test_recognises_its_own(name):
    assert rvs.recognises(text(name))
    assert tools.read((FIXTURES / name).read_bytes()) == rvs.parse(text(name))


FOREIGN = [
    "",
    "# nccl-tests version 2.19.6 nccl-headers=22809 nccl-library=22809\n# Using devices\n",
    "#   Rank  0 Pid  1 on     node-a device  0 [0000:19:00] NVIDIA H200\n",
    "Unidirectional copy peak bandwidth GB/s [Local read / Remote write] (GPU-Executor: GFX)\n",
    "Test 1:\n Executor: GPU 00 |  33.496 GB/s |    2.003 ms |\n[ERROR] Number of GPUs to use (8)\n[WARN] something\n",
    "          RocmBandwidthTest Version: 2.6.0\n\n          D/D       0           1\n",
    '{"nvbandwidth" : {"version" : "v0.8", "testcases" : []}}\n',
    '{"version": 3, "results": []}\n',
    "Running host_to_device_memcpy_ce.\n           0\n 0     55.69\nSUM host_to_device_memcpy_ce 55.69\n",
    "Function    MBytes/sec  Min (sec)   Max         Average\nCopy        10000.0     0.1  0.1 0.1\n",
    "actions:\n- name: a\n  module: gst\n",
]


@pytest.mark.parametrize("foreign", FOREIGN)
def test_claims_no_other(foreign):
    assert not rvs.recognises(foreign)
    parsed = rvs.parse(foreign)
    assert parsed.status == UNPARSED and not parsed.records


def test_claims_no_fixture_of_another_tool():
    claimed = [
        p for p in FIXTURES.parent.rglob("*")
        if p.is_file() and p.parent != FIXTURES and rvs.recognises(tools.clean(p.read_bytes()))
    ]  # fmt: skip
    assert claimed == []


# ---- damage


def interleaved(log: str) -> str:
    """The lines of the second device, each after one of the first's: as two threads write."""
    lines = log.splitlines(keepends=True)
    first, second = ([x for x in lines if f"GPU:: {gpu}" in x] for gpu in ("30101", "30202"))
    start, end = lines.index(first[0]), max(lines.index(second[-1]), lines.index(first[-1]))
    mixed = [x for pair in zip(first, second, strict=True) for x in pair]
    return "".join([*lines[:start], *mixed, *lines[end + 1 :]])


def test_threads_may_interleave():
    whole, mixed = rvs.parse(text("gst.log")), rvs.parse(interleaved(text("gst.log")))
    assert mixed.status is None and sorted(figures(mixed)) == sorted(figures(whole))
    assert figures(mixed) != figures(whole)


@pytest.mark.parametrize("name", [n for n in FILES if n.endswith(".log")])
def test_line_ends_colours_encodings_and_repeats_change_nothing(name):
    log = text(name)
    whole = rvs.parse(log)
    assert rvs.parse(log.replace("\n", "\r\n")) == whole
    assert rvs.parse("".join(f"\x1b[1m{line}\x1b[0m\n" for line in log.split("\n")[:-1])) == whole
    assert tools.read(log.encode("utf-16")) == whole
    timed = "".join(2 * line if re.match(r"\[[A-Z]+ *\] \[", line) else line for line in log.splitlines(keepends=True))
    assert figures(rvs.parse(timed)) == figures(whole)


@pytest.mark.parametrize("name", ["gst_gen1.log", "babel.log", "pebb.log", "pbqt.log", "iet.log", "mem.log"])
def test_decimal_commas_are_no_readings(name):
    parsed = rvs.parse(re.sub(r"(\d)\.(\d{3,})(?!\d|[^\[\n]*\])", r"\1,\2", text(name)))
    assert parsed.records == () and parsed.rejected_lines > 0 and parsed.status


def without(log: str, *words: str) -> str:
    return "".join(x for x in log.splitlines(keepends=True) if not any(w in x for w in words))


def test_intervals_need_the_end_of_the_ramp_up():
    parsed = rvs.parse(without(text("gst.log"), "End of GPU ramp up"))
    assert [f[2:] for f in figures(parsed)] == [("best", "513408"), ("best", "510222")]
    assert any("intervals are left out" in w for w in parsed.warnings)
    parsed = rvs.parse(without(text("gst.log"), "Start of GPU ramp up"))
    assert figures(parsed) == figures(rvs.parse(text("gst.log")))


@pytest.mark.parametrize(
    "name, gone, words",
    [
        ("gst.log", ("GFLOPS 510222 Target",), "device 30202 has no closing line"),
        ("gst.log", ("| gst-500",), "its summary ends before gst-500"),
        ("iet.log", ("[GPU::  2202] pass",), "device 2202 has no closing line"),
        ("pebb.log", ("[ 2/2] [CPU:: 0] [GPU:: 3 -  2202 - 0000:15:00.0] h2d::true",), "pebb-h2d: 1 of 2 rows"),
        ("pebb.log", ("GBps duration",), "pebb-h2d: 0 of 2 rows"),
        ("pbqt.log", ("p2p-bandwidth[ 1/2]",), "xgmi-both: 1 of 2 rows"),
        ("mem.log", ("4398.750000GB/s", "| mem "), "mem"),
    ],
)
def test_a_missing_part_is_incomplete(name, gone, words):
    parsed = rvs.parse(without(text(name), *gone))
    assert parsed.status == INCOMPLETE and words in parsed.reason


def test_running_figures_are_no_readings():
    log = text("pebb.log").replace("51.125 GBps", "51.125 GBps (*)")
    assert "51.125" not in [f[3] for f in figures(rvs.parse(log))]


def test_a_number_cut_off_at_the_end_is_no_reading():
    for name, tail in (("gst_gen2.log", "GFLOPS 73"), ("iet.log", "Power(W) 90"), ("babel.csv", "3.1271e+0")):
        log = text(name)
        cut = log[: log.index(tail) + len(tail)]
        parsed = rvs.parse(cut)
        assert parsed.status == INCOMPLETE and parsed.rejected_lines == 1, name
        assert set(figures(parsed)) <= set(figures(rvs.parse(log)))


def test_babel_rows_need_their_header():
    parsed = rvs.parse(without(text("babel.log"), "GPU Id"))
    assert parsed.records == () and parsed.rejected_lines == 8 and parsed.status == INCOMPLETE
    parsed = rvs.parse(re.sub("Max MB/s +Min MB/s +Avg MB/s", "Some           Other          Columns", text("babel.log")))
    assert parsed.records == () and parsed.rejected_lines == 8


def test_babel_csv_of_seconds_has_no_mean():
    log = re.sub(",mbps_at_min_t.*", ",min_runtime,max_runtime,avg_runtime", text("babel.csv"))
    assert [f[2:] for f in figures(rvs.parse(log))] == [("best", "3.3511e+06"), ("best", "3.2321e+06")]
    parsed = rvs.parse(re.sub("mbps_at_avg_t", "something", text("babel.csv")))
    assert parsed.records == () and parsed.rejected_lines == 2


def test_babel_in_sustained_mode_has_means_alone():
    row = "30101       Copy        3511100.125    3511100.125    3511100.125    3511100.125    "
    log = re.sub(r"30101 +Copy .*", row, text("babel.log"))
    found = [f for f in figures(rvs.parse(log)) if f[:2] == ("copy", "30101")]
    assert found == [("copy", "30101", "mean", "3511100.125")]


def test_cut_json_keeps_its_whole_records():
    log = text("gst.json")
    parsed = rvs.parse(log[: log.index("510222")])
    assert parsed.status == INCOMPLETE and figures(parsed) == figures(rvs.parse(log))[:1]
    log = text("babel.json")
    parsed = rvs.parse(log[: log.index("3322100.125")])
    assert parsed.status == INCOMPLETE and figures(parsed) == figures(rvs.parse(log))[:6]
    assert rvs.parse(log + log).records == 2 * rvs.parse(log).records  # RVS appends


def test_json_that_is_none_is_read_as_text():
    parsed = rvs.parse('{"version" oh\n' + text("gst_gen2.log"))
    assert figures(parsed) == figures(rvs.parse(text("gst_gen2.log")))


def test_a_record_with_a_key_twice_is_damaged():
    parsed = rvs.parse(re.sub(r'"pass" : "true"\n  \},\n\{', '"pass" : "true",', text("gst.json"), count=1))
    assert parsed.records == () and parsed.rejected_lines == 1


@pytest.mark.parametrize("opener", ['{"a":', "[", '{"a":[', "[{"])
def test_deep_json_ends(opener):
    assert rvs.parse(opener * 5000).status == UNPARSED
    assert rvs.parse('{"a":' * 500 + "{}" + "}" * 500).status == UNPARSED


def test_a_long_line_ends_soon():
    assert rvs.parse("| x" + " " * 200_000 + "GFLOPS\n").rejected_lines == 1
    assert not rvs.recognises("\n" * 200_000 + " " * 200_000)


# ---- any damage


def holds(parsed: Parsed, source: str) -> None:
    assert isinstance(parsed, Parsed) and parsed.status in STATUSES
    assert bool(parsed.reason) == (parsed.status is not None) and "\n" not in parsed.reason
    assert parsed.records or parsed.status or "mem" in source
    for r in parsed.records:
        assert r.reported["text"] in source and float(r.reported["text"]) == r.reported["value"]
        assert tools.base_value(r) > 0 or r.flags
        records.to_line(r)


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=400))
def test_any_bytes(data):
    source = tools.clean(data)
    holds(rvs.parse(source), source)


PIECES = st.sampled_from(
    ["[RESULT] [ 1.5 ] ", "[a] ", "[GPU:: 7] ", "GFLOPS ", "GFLOPS 5 Target GFLOPS: 6 met: FALSE", "12", "-nan", "inf", "1e400",
     "9" * 400, "\n", "|", "{", "}", "[", "]", '"gflops"', ":", ",", '"', "GPU Id      Function    MBytes/sec     Max MB/s",
     "7 Copy 1 2 3 4", text("babel.csv").partition("30101")[0], "7,Copy,1,2,4,5,6,7,8\n",
     "[a] mem Number of errors :", "[a] pcie-bandwidth [1/2] 0 7 h2d: true d2h: true ", " GBps", "actions:\n", "- name: a\n",
     "  matrix_size_a: ", "RVS-ERROR ", "[a] [GPU:: 7] Power(W) ", "²", "١"]
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(st.lists(PIECES, max_size=25).map("".join), st.lists(PIECES, max_size=6).map("".join))
def test_any_pieces(source, config):
    source = tools.clean(source)
    holds(rvs.parse(source, config=config), source)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_damage(data):
    name = data.draw(st.sampled_from(FILES))
    source = text(name)
    whole = set(figures(rvs.parse(source)))
    how = data.draw(st.sampled_from(["cut", "delete", "duplicate", "splice"]))
    lines = source.splitlines(keepends=True)
    i, j = (data.draw(st.integers(0, len(lines) - 1)) for _ in range(2))
    if how == "cut":
        damaged = tools.clean((FIXTURES / name).read_bytes()[: data.draw(st.integers(0, len(source)))])
    elif how == "delete":
        damaged = "".join(lines[:i] + lines[i + 1 :])
    elif how == "duplicate":
        damaged = "".join(lines[: i + 1] + lines[i:])
    else:
        column = data.draw(st.integers(0, 100))
        damaged = "".join([*lines[:i], lines[i][:column], lines[j][column:], *lines[i + 1 :]])
    parsed = rvs.parse(damaged)
    holds(parsed, damaged)
    if how != "splice":  # two halves may make a line that nobody wrote; a part of a log makes none
        strip = [f[2:] if how == "delete" else f for f in figures(parsed)]
        assert set(strip) <= ({f[2:] for f in whole} if how == "delete" else whole)
