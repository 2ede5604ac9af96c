"""The command line: what is wrong is said in one line with exit status 2, and odd surroundings are no obstacle."""

from __future__ import annotations

import ctypes
import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from conftest import SAMPLES
from nbformat.v4 import new_code_cell, new_notebook

from escher_book import notebook, runner
from escher_kernels import records
from escher_kernels.run import Settings
from validation import derive

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "configs" / "report_config.json"
PR_CAPBSET_DROP, CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH = 24, 1, 2
MEASURE = ("run", "--device", "cpu", "--budget", "quick")


def escher(*arguments: object, timeout: float = 120, **options) -> subprocess.CompletedProcess:
    """`escher ARGUMENTS` in a process of its own, with text streams. `environ`: variables on top of this process's."""
    environ = {**os.environ, **options.pop("environ", {})}
    return subprocess.run(
        [sys.executable, "-m", "escher_book.cli", *map(str, arguments)], capture_output=True, text=True, encoding="utf-8",
        errors="replace", env=environ, cwd=options.pop("cwd", ROOT), timeout=timeout, check=False, **options,
    )  # fmt: skip


def assert_one_line_error(done: subprocess.CompletedProcess, *words: str) -> None:
    assert done.returncode == 2, (done.returncode, done.stderr)
    assert done.stdout == ""
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr, done.stderr


# --------------------------------------------------------------------------------------------- wrong usage


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nope"], ["nope", "escher --help"]),
        (["run", "--nope"], ["--nope", "escher run --help"]),
        (["run", "--budget", "huge"], ["huge", "quick", "standard", "full"]),
        (["run", "--timeout-s", "0"], ["--timeout-s"]),
        (["run", "--timeout-s", "nan"], ["--timeout-s"]),
        (["run", "--timeout-s", "inf"], ["--timeout-s"]),
        (["run", "--device", "tpu"], ["tpu", "rocm", "cuda", "cpu"]),
        (["run", "--families", "compute,nope"], ["unknown family 'nope'", "environment, compute, bandwidth"]),
        (["report", "a", "b"], ["escher report --help"]),
        ([*MEASURE, "--target", "mi999x"], ["mi999x", "mi355x", "mi300x", "v100_sxm2_32gb", "h100", "auto", "cpu"]),
        ([*MEASURE, "--workload", "nope"], ["unknown workload 'nope'", "escher_14b_480p"]),
        ([*MEASURE, "--workload", "no/such.json"], ["no/such.json"]),
        ([*MEASURE, "--report-config", "/no/such/config.json"], ["/no/such/config.json"]),
    ],
    ids=lambda v: " ".join(v)[:40],
)
def test_wrong_usage(tmp_path, arguments, words):
    done = escher(*arguments, environ={"RESULTS_DIR": str(tmp_path / "results")})
    assert_one_line_error(done, *words)
    assert not (tmp_path / "results").exists()


def test_without_a_command_it_prints_the_help():
    done = escher()
    assert done.returncode == 0 and done.stderr == ""
    assert all(command in done.stdout for command in ("book", "report", "run"))


def changed_config(folder: Path, change) -> Path:
    config = json.loads(CONFIG.read_text("utf-8"))
    change(config)
    path = folder / "my config.json"
    path.write_text(json.dumps(config), "utf-8")
    return path


def test_a_malformed_configuration_names_the_key(tmp_path):
    path = changed_config(tmp_path, lambda c: c["thresholds"]["noisy_ratio"].update(value="5%"))
    for where in ({"arguments": ["--report-config", path]}, {"environ": {"ESCHER_REPORT_CONFIG": str(path)}}):
        done = escher(*MEASURE, *where.get("arguments", []), environ=where.get("environ", {}))
        assert_one_line_error(done, "my config.json", "thresholds.noisy_ratio", '"5%"')


def test_several_errors_of_a_configuration_are_one_line(tmp_path):
    def change(config):
        del config["thresholds"]["noisy_ratio"], config["targets"][0]["bandwidth_gbs"]
        config["schema"] = 7

    path = changed_config(tmp_path, change)
    assert_one_line_error(escher(*MEASURE, "--report-config", path), "(and 2 more)")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", ["no valid JSON", ":1:"]),
        ("[]", ["expected an object"]),
        ('{"hidden": 5}', ["name is missing"]),
        ('{"hiden": 5}', ["unknown key 'hiden'", "hidden"]),
        ("hidden", ["heads"]),
    ],
)
def test_a_malformed_workload_names_the_key(tmp_path, text, words):
    if text == "hidden":
        text = json.dumps({**json.loads((ROOT / "configs/escher_14b_480p.json").read_text("utf-8")), "hidden": 5})
    path = tmp_path / "mein Modell ü.json"
    path.write_text(text, "utf-8")
    assert_one_line_error(escher(*MEASURE, "--workload", path), "mein Modell ü.json", *words)


# --------------------------------------------------------------------------------------------- reports of nothing


def test_report_without_a_run(tmp_path):
    for root in (tmp_path, tmp_path / "missing"):
        assert_one_line_error(escher("report", "--results-dir", root), "no run below", "make book")


def test_report_of_what_is_no_run(tmp_path, sample_copy):
    for directory in (tmp_path, tmp_path / "missing"):
        assert_one_line_error(escher("report", directory), "no run", "run.json")
    directory = sample_copy("cpu")
    info = records.read_json(directory / "run.json")
    info["settings"]["budgett"] = 3
    for text, words in (
        (json.dumps(info), ["run.json", "budgett"]),
        ("[]", ["run.json"]),
        ("{}", ["run_id"]),
        ('{"settings": {}', ["run.json:1:", "no valid JSON"]),
    ):
        (directory / "run.json").write_text(text, "utf-8")
        assert_one_line_error(escher("report", directory), *words)


def test_report_of_a_run_of_another_device_than_its_target_says(sample_copy):
    """A run.json that lost its target cannot say what may be compared."""
    directory = sample_copy("cpu")
    info = records.read_json(directory / "run.json")
    del info["target"]["profile"]
    records.write_json_atomic(directory / "run.json", info)
    assert_one_line_error(escher("report", directory), "target is incomplete")


@pytest.mark.slow
def test_report_of_damaged_files_shows_the_rest(sample_copy):
    """A family's records, env.json and status.json that cannot be used: each is told, everything else is shown."""
    directory = sample_copy("mi355x")
    path = directory / "records" / "01_compute.jsonl"
    lines = path.read_text("utf-8").splitlines(keepends=True)
    path.write_text("".join([*lines[:2], '{"family": "compute", "case"\n', *lines[3:]]), "utf-8")
    for name in ("status.json", "env.json"):
        (directory / name).write_text('{"environment": ', "utf-8")
    done = escher("report", directory)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert done.stdout.strip() == str(directory / "site" / "index.html")
    for name in ("status.json", "env.json"):
        assert f"{name}:1:17: no valid JSON" in done.stderr, done.stderr
    [said] = [x for x in done.stderr.splitlines() if "SC-1 " in x]
    assert "INCOMPLETE, the records of family compute cannot be used" in said and "01_compute.jsonl:3: corrupt" in said
    assert "CONDITIONAL GO" in (directory / "site" / "scorecard.html").read_text("utf-8")
    assert "corrupt record" in (directory / "site" / "notebooks" / "01_compute.html").read_text("utf-8")
    made = {path.stem for path in (directory / "notebooks").iterdir()}
    assert "02_bandwidth" in made and "01_compute" not in made


# --------------------------------------------------------------------------------------------- odd surroundings


def obey_modes() -> None:
    """In a child before it starts: root, too, may write only where the mode lets it."""
    libc = ctypes.CDLL(None)
    for capability in (CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH):
        libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)


READ_ONLY = {"preexec_fn": obey_modes, "environ": {"HOME": "/nonexistent"}}


@pytest.fixture
def read_only(tmp_path) -> Iterator[Path]:
    """A folder of mode 0555, which is opened again for pytest to clear."""
    folder = tmp_path / "read only ü"
    folder.mkdir(mode=0o555)
    folder.chmod(0o555)
    yield folder
    folder.chmod(0o755)


def test_a_results_directory_that_cannot_be_written(read_only):
    for root in (read_only, read_only / "new"):
        done = escher(*MEASURE, "--results-dir", root, **READ_ONLY)
        assert_one_line_error(done, str(root), "no permission", "RESULTS_DIR")
    assert list(read_only.iterdir()) == []


def test_a_report_into_a_run_that_cannot_be_written(tmp_path):
    directory = Path(shutil.copytree(SAMPLES / "mi355x", tmp_path / "run"))
    directory.chmod(0o555)
    try:
        assert_one_line_error(escher("report", directory, **READ_ONLY), "run", "no permission")
    finally:
        directory.chmod(0o755)


def test_a_results_directory_that_is_a_file(tmp_path):
    (tmp_path / "file").write_text("", "utf-8")
    assert_one_line_error(escher(*MEASURE, "--results-dir", tmp_path / "file"), "file", "cannot be written")
    assert_one_line_error(escher(*MEASURE, "--results-dir", tmp_path / "file" / "below"), "cannot be written")


LOCALE_C = {"LC_ALL": "C", "LANG": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def test_errors_in_locale_c_with_any_name(tmp_path):
    done = escher("report", tmp_path / "gibt es nicht, ü ± 🙂", environ=LOCALE_C)
    assert_one_line_error(done, "no run", "gibt es nicht, ")
    assert_one_line_error(escher("ünknown", environ=LOCALE_C), "No such command")


@pytest.mark.slow
def test_a_run_in_locale_c_without_a_home_into_a_path_with_spaces_and_umlauts(tmp_path):
    """Also where a foreign kernelspec and somebody's IPython settings lie in the way."""
    root = tmp_path / "Ergebnisse ü ± 🙂"
    environ = {
        **LOCALE_C,
        "HOME": "/nonexistent",
        "XDG_RUNTIME_DIR": "/nonexistent",
        "JUPYTER_CONFIG_DIR": "/nonexistent",
    }
    done = escher(*MEASURE, "--families", "environment", "--results-dir", root, environ=environ)
    assert done.returncode == 0, done.stderr
    [run_dir] = [path for path in root.iterdir() if not path.is_symlink()]
    run = derive.load(run_dir)
    assert run.status["environment"]["status"] == "ok" and len(run.records("environment")) == 12
    assert run.info["settings"]["budget"] == "quick" and run.info["families"] == ["environment"]
    assert not [p for p in run_dir.rglob(".*")], "something temporary was left"
    log = (run_dir / "raw" / "run.log").read_text("utf-8")
    assert f"run {run_dir}" in log and "environment: done, 12 records" in log


# --------------------------------------------------------------------------------------------- notebooks


def write_notebook(path: Path, *sources: str, tagged: int = 1) -> Path:
    cells = [new_code_cell(source) for source in sources]
    for cell in cells[:tagged]:
        cell["metadata"]["tags"] = ["parameters"]
    made = new_notebook(
        cells=cells, metadata={"kernelspec": {"name": "python3", "display_name": "x", "language": "python"}}
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(made, path)
    return path


PARAMETERS = 'run_dir = ""\nreplay = False\nsettings = {}\nprofile: dict | None = None\niteration = 1\nresume = False\n'
PASSED = ("run_dir", "replay", "settings", "profile", "iteration", "resume")  # by the runner


def test_unknown_parameters_are_refused(tmp_path):
    source = write_notebook(tmp_path / "00_environment.ipynb", PARAMETERS)
    runner.check_parameters(source, dict.fromkeys(PASSED))
    with pytest.raises(runner.RunError, match="unknown parameter 'sample'; it declares iteration, profile, replay, resume"):
        runner.check_parameters(source, {"sample": 1})


@pytest.mark.parametrize("tagged", [0, 2])
def test_a_notebook_without_one_parameters_cell_is_refused(tmp_path, tagged):
    source = write_notebook(tmp_path / "00_environment.ipynb", PARAMETERS, PARAMETERS, tagged=tagged)
    with pytest.raises(runner.RunError, match=f"{tagged} cells are tagged parameters"):
        runner.check_parameters(source, {})


def test_the_notebooks_declare_what_the_runner_passes():
    for source in runner.families().values():
        runner.check_parameters(source, dict.fromkeys(PASSED))
        metadata = json.loads(source.read_text("utf-8"))["metadata"]
        assert metadata["kernelspec"]["name"] == "python3"


def test_a_foreign_kernel_is_noticed(monkeypatch):
    def expect(**what):
        monkeypatch.setenv(notebook.EXPECT, json.dumps(what))

    expect(interpreter=sys.executable, torch=notebook.torch_version())
    notebook.check_kernel()
    expect(interpreter="/other/python")
    with pytest.raises(notebook.WrongKernel, match="interpreter .*/other/python.*kernelspec"):
        notebook.check_kernel()
    expect(torch="0.4.1")
    with pytest.raises(notebook.WrongKernel, match=r"torch .*0\.4\.1"):
        notebook.check_kernel()
    monkeypatch.delenv(notebook.EXPECT)
    notebook.check_kernel()  # a person in JupyterLab


@pytest.mark.slow
def test_a_hostile_kernelspec_does_not_win(tmp_path, monkeypatch):
    """A kernelspec `python3` of another environment lies on JUPYTER_PATH and in HOME; ours is taken."""
    home, path = tmp_path / "home", tmp_path / "jupyter path"
    for spec in (home / ".local/share/jupyter/kernels/python3", path / "kernels/python3"):
        spec.mkdir(parents=True)
        argv = ["/bin/false", "{connection_file}"]
        text = json.dumps({"argv": argv, "display_name": "other", "language": "python"})
        (spec / "kernel.json").write_text(text, "utf-8")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("JUPYTER_PATH", str(path))
    monkeypatch.delenv("JUPYTER_DATA_DIR", raising=False)
    monkeypatch.setattr(runner, "NOTEBOOKS", tmp_path / "notebooks")
    check = "import sys\nfrom escher_book import notebook\nnotebook.check_kernel()\nprint(sys.executable)"
    write_notebook(tmp_path / "notebooks" / "00_environment.ipynb", PARAMETERS, check)
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    console = runner.Console(None, io.StringIO())
    before = dict(os.environ)
    with runner.private_kernel(run_dir):
        outcome = runner.execute(run_dir, "environment", False, Settings(), None, console, 60)
    assert outcome.ok, outcome
    assert dict(os.environ) == before and list(run_dir.iterdir()) == [run_dir / "notebooks"]
    made = nbformat.read(run_dir / "notebooks" / "00_environment.ipynb", as_version=4)
    assert made.cells[-1].outputs[0].text.strip() == sys.executable


@pytest.mark.slow
def test_the_limit_is_of_the_whole_notebook_not_of_a_cell(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "NOTEBOOKS", tmp_path / "notebooks")
    cells = ["import time\ntime.sleep(4)"] * 4
    write_notebook(tmp_path / "notebooks" / "00_environment.ipynb", PARAMETERS, *cells)
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    with runner.private_kernel(run_dir):
        outcome = runner.execute(run_dir, "environment", False, Settings(), None, runner.Console(None, io.StringIO()), 9)
    assert (outcome.status, outcome.message) == ("timeout", "not done after 9 s")
    done = nbformat.read(run_dir / "notebooks" / "00_environment.ipynb", as_version=4)
    assert [bool(c.execution_count) for c in done.cells if c.cell_type == "code"][-1] is False, "the last was never begun"


# --------------------------------------------------------------------------------------------- workloads


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--depth", "0"], ["--depth", "0", "escher run --help"]),
        (["--depth", "-1"], ["--depth"]),
        (["--depth", "two"], ["--depth", "two"]),
        (["--tokens", "1.5"], ["--tokens", "1.5"]),
        (["--window", "0"], ["--window"]),
        (["--tokens", "391"], ["escher_14b_480p", "query_tokens is 391", "a multiple of 3"]),
        (["--window", "1000"], ["escher_14b_480p", "window_tokens is 1000", "a multiple of query_tokens (4680)"]),
        (["--workload", "wan2_2_ti2v_5b", "--window", "1000"], ["window_tokens is 1000", "without a cache", "equal"]),
        (["--reference-model", "nope"], ["unknown reference model 'nope'", "escher_14b", "wan2_2_ti2v_5b"]),
        (["--workload", "smoke", "--reference-model", "escher_14b"], ["escher_14b", "leave workload 'smoke' out"]),
        (["--depth", "1000000"], ["depth 1000000", "GiB", "choose a smaller DEPTH, TOKENS or workload"]),
        (["--depth", "99999999"], ["depth is 99999999", "from 1 to 10000000"]),
        (["--workload", "reference_video_models"], ["reference_video_models.json", "unknown key 'schema'"]),
    ],
    ids=lambda v: " ".join(v)[:40],
)
def test_a_workload_that_cannot_be(tmp_path, arguments, words):
    done = escher(*MEASURE, *arguments, environ={"RESULTS_DIR": str(tmp_path / "results")})
    assert_one_line_error(done, *words)
    assert not (tmp_path / "results").exists()


def test_a_file_that_derives_wrongly_leaves_no_run(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text('{"name": "mine", "derived_from": "smoke", "depth": 1}', "utf-8")
    done = escher(*MEASURE, "--workload", path, "--results-dir", tmp_path / "results")
    assert_one_line_error(done, "mine.json", "derived_from is 'smoke'", "escher_14b_480p")
    assert not (tmp_path / "results").exists()


def plan(*arguments: object) -> dict:
    command = [sys.executable, "-m", "escher_kernels", "plan", "--device", "cpu", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["workload"]


def test_the_workload_that_is_planned(tmp_path):
    spec = plan("--reference-model", "wan2_2_ti2v_5b", "--depth", 1, "--tokens", 78)
    assert (spec["name"], spec["depth"], spec["query_tokens"], spec["window_tokens"]) == ("wan2_2_ti2v_5b", 1, 78, 78)
    path = tmp_path / "mine ü.json"
    path.write_text('{"name": "mine", "title": "Mine", "derived_from": "wan2_2_t2v_a14b", "depth": 7}', "utf-8")
    spec = plan("--workload", path)
    assert (spec["name"], spec["title"], spec["depth"], spec["full"]["depth"]) == ("mine", "Mine", 1, 7)
