"""escher_book/setup_env.py and the Makefile, with a stub in place of venv and pip: nothing is installed here."""

import fcntl
import http.server
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from escher_book import setup_env
from escher_book.setup_env import Stop

REPO = Path(__file__).resolve().parents[1]


def stub_tool(folder: Path, name: str, body: str = "exit 0") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{body}\n")
    (folder / name).chmod(0o755)
    return folder / name


@pytest.fixture
def root(tmp_path):
    """A repository's worth of what set-up reads, under a path with a space and an umlaut."""
    root = tmp_path / "esch er ü"
    (root / "configs").mkdir(parents=True)
    for name in (setup_env.INDEX, *setup_env.PROJECT):
        (root / name).write_bytes((REPO / name).read_bytes())
    return root


@pytest.fixture
def steps(monkeypatch):
    """Records each command set-up would run; `python -m venv` makes a bin/python that really runs."""
    ran = []

    def step(what, argv, root, log, lock):
        ran.append(argv)
        if "venv" in argv:
            venv = Path(argv[-1])
            stub_tool(venv / "bin", "python", f'exec "{sys.executable}" "$@"')
            (venv / "lib/python3.11/site-packages").mkdir(parents=True)

    monkeypatch.setattr(setup_env, "step", step)
    monkeypatch.setattr(setup_env, "no_answer", lambda url: "")
    monkeypatch.setattr(setup_env, "verify_torch", lambda venv, kind, minimum: "2.13.0+test")
    monkeypatch.delenv("TORCH_INDEX_URL", raising=False)
    return ran


def set_up(root, *argv):
    return setup_env.main(["--device", "cpu", *argv], root=root)


def torch_step(steps):
    return next(argv for argv in steps if argv[-1].startswith("torch"))


# ---- device, Python, configuration ----


def test_a_device_node_outranks_a_tool(tmp_path):
    tools = stub_tool(tmp_path / "bin", "amd-smi").parent
    assert setup_env.detect_device(tmp_path, str(tools)) == ("rocm", "amd-smi is on PATH")
    (tmp_path / "nvidiactl").touch()
    assert setup_env.detect_device(tmp_path, str(tools))[0] == "cuda"
    (tmp_path / "kfd").touch()
    assert setup_env.detect_device(tmp_path, "") == ("rocm", f"{tmp_path / 'kfd'} exists")


@pytest.mark.parametrize("body, kind", [("exit 0", "cuda"), ("exit 9", "cpu")])
def test_nvidia_smi_counts_only_when_it_works(tmp_path, body, kind):
    tools = stub_tool(tmp_path / "bin", "nvidia-smi", body).parent
    assert setup_env.detect_device(tmp_path, str(tools))[0] == kind


def test_nothing_found_is_cpu(tmp_path):
    kind, why = setup_env.detect_device(tmp_path, "")
    assert kind == "cpu" and "no AMD or NVIDIA" in why


def test_python_running_one_first_then_the_newest_that_runs(tmp_path):
    old = stub_tool(tmp_path / "old", "python3", "echo 3.8.18")
    stub_tool(tmp_path / "shims", "python3.13", "echo 'pyenv: python3.13: command not found' >&2; exit 127")
    good = stub_tool(tmp_path / "bin", "python3.12", "echo 3.12.4")
    stub_tool(tmp_path / "bin", "python3.11", "echo 3.11.2")
    path = os.pathsep.join([str(tmp_path / "shims"), str(tmp_path / "bin")])
    assert setup_env.find_python(str(old), path) == (str(good), "3.12.4")
    assert setup_env.find_python(str(tmp_path / "bin/python3.11"), path)[1] == "3.11.2"


def test_no_python_names_what_was_found_and_how_to_get_one(tmp_path):
    old = stub_tool(tmp_path / "old", "python3", "echo 3.8.18")
    shim = stub_tool(tmp_path / "shims", "python3.13", "exit 127")
    with pytest.raises(Stop) as error:
        setup_env.find_python(str(old), str(shim.parent))
    text = str(error.value)
    assert f"{old} (3.8.18)" in text and f"{shim} (does not run" in text and "apt install" in text
    assert "\n" not in text


def test_the_running_python_is_recognised():
    assert setup_env.find_python(path="")[1] == ".".join(map(str, sys.version_info[:3]))


def test_the_committed_index_is_valid():
    table = setup_env.read_index(REPO / setup_env.INDEX)
    assert setup_env.version_key(table["pinned"]) >= setup_env.version_key(table["minimum"])


@pytest.mark.parametrize(
    "change, named",
    [
        ({"pinned": 2.13}, "pinned is 2.13"),
        ({"minimum": "new"}, 'minimum is "new"'),
        ({"index": []}, "index.rocm.url is null"),
        ({"index": {"rocm": {"url": "https://x/r"}, "cuda": {"url": "x"}}}, 'index.cuda.url is "x"'),
    ],
)
def test_a_malformed_index_names_the_key(root, steps, capsys, change, named):
    table = json.loads((root / setup_env.INDEX).read_text())
    (root / setup_env.INDEX).write_text(json.dumps({**table, **change}))
    assert set_up(root) == 2
    assert f"configs/torch_index.json: {named}; expected" in capsys.readouterr().err
    assert not steps


@pytest.mark.parametrize("text", ["{", "[]", ""])
def test_an_index_that_is_no_json_object(root, steps, capsys, text):
    (root / setup_env.INDEX).write_text(text)
    assert set_up(root) == 2
    assert capsys.readouterr().err.count("\n") == 1


# ---- where torch comes from ----


TABLE = {"pinned": "2.13.0", "minimum": "2.9", "index": {k: {"url": f"https://index/{k}"} for k in setup_env.KINDS}}


@pytest.mark.parametrize("kind", setup_env.KINDS)
def test_the_kinds_index_is_used_when_it_answers(monkeypatch, kind):
    monkeypatch.setattr(setup_env, "no_answer", lambda url: "")
    assert setup_env.torch_source(kind, TABLE, "") == ("torch==2.13.0", f"https://index/{kind}")
    assert setup_env.torch_source(kind, TABLE, "https://mirror") == ("torch>=2.9", "https://mirror")


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_fall_back_to_the_default_index_is_said(monkeypatch, capsys, kind):
    monkeypatch.setattr(setup_env, "no_answer", lambda url: "no route")
    assert setup_env.torch_source(kind, TABLE, "") == ("torch==2.13.0", "")
    said = capsys.readouterr().err
    assert f"https://index/{kind} does not answer (no route)" in said and said.count("\n") == 1


def test_no_fall_back_for_rocm_nor_from_a_url_the_user_gave(monkeypatch):
    monkeypatch.setattr(setup_env, "no_answer", lambda url: "no route")
    with pytest.raises(Stop, match="TORCH_INDEX_URL.*DEVICE=cpu"):
        setup_env.torch_source("rocm", TABLE, "")
    with pytest.raises(Stop, match="https://mirror/x does not answer.*TORCH_INDEX_URL") as error:
        setup_env.torch_source("cpu", TABLE, "https://user:secret@mirror/x")
    assert "secret" not in str(error.value)


@pytest.mark.parametrize("status, answers", [(200, True), (404, True), (407, False), (502, False)])
def test_any_answer_but_a_proxys_counts(monkeypatch, status, answers):
    asked = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_response(status)
            self.end_headers()

        def log_message(self, *args):
            pass

    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        url = f"http://user:secret@127.0.0.1:{server.server_port}/simple"
        assert setup_env.no_answer(url) == ("" if answers else f"HTTP {status}")
        server.shutdown()
        silent = url
    assert asked == ["/simple/torch/"]
    assert "refused" in setup_env.no_answer(silent)
    assert setup_env.no_answer("file:///srv/wheels") == ""


def test_a_host_that_says_nothing_is_given_up_on(monkeypatch):
    monkeypatch.setattr(setup_env.urllib.request, "urlopen", lambda *a, **k: time.sleep(5))
    start = time.monotonic()
    assert setup_env.no_answer("https://index", timeout_s=-0.9).startswith("no answer")
    assert time.monotonic() - start < 2


# ---- the environment: made once, mended, made anew ----


def test_torch_first_then_the_project_under_constraints(root, steps, capsys):
    assert set_up(root) == 0
    venv, torch, project = steps
    assert venv[1:] == ["-I", "-m", "venv", str(root / ".venv-cpu")]
    assert torch[-3:] == ["--index-url", "https://download.pytorch.org/whl/cpu", "torch==2.13.0"]
    assert project[-4:] == ["-c", "configs/constraints.txt", "-e", ".[test]"]
    assert ".venv-cpu is ready: torch 2.13.0+test for cpu" in capsys.readouterr().err


def test_unchanged_means_no_work(root, steps, capsys):
    set_up(root)
    steps.clear()
    capsys.readouterr()
    assert set_up(root) == 0 and not steps
    assert capsys.readouterr().err == "set-up: .venv-cpu is up to date (cpu: asked for)\n"


@pytest.mark.parametrize("name", setup_env.PROJECT)
def test_changed_requirements_leave_torch_alone(root, steps, name):
    set_up(root)
    steps.clear()
    with open(root / name, "a") as file:
        file.write("# changed\n")
    assert set_up(root) == 0
    assert [argv[-1] for argv in steps] == [".[test]"]


def test_what_makes_it_anew(root, steps, monkeypatch):
    def anew():
        steps.clear()
        assert set_up(root) == 0
        return len(steps) == 3

    set_up(root)
    (root / setup_env.INDEX).write_text((root / setup_env.INDEX).read_text().replace("whl/cpu", "whl/cpu2"))
    assert anew()
    monkeypatch.setenv("TORCH_INDEX_URL", "https://mirror/simple")
    assert anew() and torch_step(steps)[-3:] == ["--index-url", "https://mirror/simple", "torch>=2.9"]
    monkeypatch.delenv("TORCH_INDEX_URL")
    assert not anew(), "without an override, what an earlier one installed stays"
    (root / ".venv-cpu/bin/python").unlink()
    assert anew()
    stub_tool(root / ".venv-cpu/bin", "python", "exit 1")
    assert anew()
    moved = root.with_name("elsewhere")
    root.rename(moved)
    steps.clear()
    assert set_up(moved) == 0 and len(steps) == 3


def test_an_environment_emptied_before_it_is_made_anew_keeps_its_lock(root, steps):
    left = root / ".venv-cpu/lib/python3.11/site-packages/left"
    left.mkdir(parents=True)
    assert set_up(root) == 0
    assert not left.exists() and (root / ".venv-cpu" / setup_env.LOCK).exists()


def test_a_kill_between_the_parts_resumes_and_mends(root, steps, monkeypatch):
    recorded = setup_env.step

    def killed(what, argv, *rest):
        recorded(what, argv, *rest)
        if ".[test]" in argv:
            raise KeyboardInterrupt

    monkeypatch.setattr(setup_env, "step", killed)
    assert set_up(root) == 130
    site = root / ".venv-cpu/lib/python3.11/site-packages"
    (site / "half-1.0.dist-info").mkdir()
    (site / "~orch").mkdir()
    (site / "whole-1.0.dist-info").mkdir()
    (site / "whole-1.0.dist-info/RECORD").touch()
    monkeypatch.setattr(setup_env, "step", recorded)
    steps.clear()
    assert set_up(root) == 0
    assert [argv[-1] for argv in steps] == [".[test]"]
    assert [entry.name for entry in site.iterdir()] == ["whole-1.0.dist-info"]


def test_an_unreachable_rocm_index_leaves_what_is_there(root, steps, monkeypatch):
    assert setup_env.main(["--device", "rocm"], root=root) == 0
    monkeypatch.setattr(setup_env, "no_answer", lambda url: "no route")
    (root / setup_env.INDEX).write_text((root / setup_env.INDEX).read_text() + "\n")
    assert setup_env.main(["--device", "rocm"], root=root) == 2
    assert (root / ".venv-rocm/bin/python").exists()


def test_a_replaced_torch_is_not_built_upon(root, steps, monkeypatch, capsys):
    verdicts = iter(["2.13.0+rocm7.2", Stop("torch 2.13.0 is built for the CPU only")])

    def verify(*args):
        verdict = next(verdicts)
        if isinstance(verdict, Stop):
            raise verdict
        return verdict

    monkeypatch.setattr(setup_env, "verify_torch", verify)
    assert set_up(root) == 2
    assert not (root / ".venv-cpu" / setup_env.MARKER).exists()


@pytest.mark.parametrize(
    "kind, torch, reason",
    [
        ("cpu", ["2.13.0+cpu", None, None], ""),
        ("cuda", ["2.13.0+cu130", None, "13.0"], ""),
        ("cuda", ["2.13.0+cpu", None, None], "built for the CPU only"),
        ("rocm", ["2.13.0+cu130", None, "13.0"], "built for CUDA 13.0; rocm needs"),
        ("rocm", ["2.8.0+rocm6.4", "6.4", None], "expected 2.9 or newer"),
        ("cpu", None, "No module named 'torch'"),
    ],
)
def test_verify_torch(tmp_path, kind, torch, reason):
    said = f"echo '{json.dumps(torch)}'" if torch else "echo \"ImportError: No module named 'torch'\" >&2; exit 1"
    stub_tool(tmp_path / "bin", "python", said)
    if reason:
        with pytest.raises(Stop, match=reason):
            setup_env.verify_torch(tmp_path, kind, "2.9")
    else:
        assert setup_env.verify_torch(tmp_path, kind, "2.9") == torch[0]


# ---- steps, errors, lock ----


def test_a_failed_step_shows_pips_error_and_the_log(tmp_path, capsys):
    tool = stub_tool(
        tmp_path,
        "pip",
        "echo 'WARNING: Retrying'; echo 'ERROR: No matching distribution found for torch==9'; echo notice; exit 1",
    )
    log = tmp_path / "setup.log"
    log.write_text("ERROR: of an earlier step\n")
    with open(tmp_path / "lock", "w") as lock, pytest.raises(Stop) as error:
        setup_env.step("torch", [str(tool), "https://u:secret@index/"], tmp_path, log, lock.fileno())
    assert str(error.value) == f"torch failed: ERROR: No matching distribution found for torch==9 (log: {log})"
    assert "Retrying" in log.read_text() and "secret" not in log.read_text()
    assert capsys.readouterr().err == "set-up: torch ... 0 s\n"


def test_a_running_pip_keeps_the_lock_when_set_up_is_killed(tmp_path):
    file = setup_env.locked(tmp_path)
    child = subprocess.Popen(["sleep", "60"], pass_fds=(file.fileno(),))
    file.close()
    with open(tmp_path / setup_env.LOCK) as other:
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        child.kill()
        child.wait()
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_second_call_waits_and_says_so(root, steps, capsys):
    venv = root / ".venv-cpu"
    first = setup_env.locked(venv)
    second = threading.Thread(target=set_up, args=(root,))
    second.start()
    time.sleep(0.3)
    assert not steps
    first.close()
    second.join(20)
    assert len(steps) == 3
    assert "another set-up works on .venv-cpu; waiting" in capsys.readouterr().err


def test_a_place_that_cannot_be_written_is_one_line(root, steps, monkeypatch, capsys):
    (root / ".venv-cpu").write_text("a file in the way")
    assert set_up(root) == 2
    assert capsys.readouterr().err == f"set-up: {root / '.venv-cpu'}: File exists\n"

    def read_only(self, *args, **kwargs):
        raise OSError(30, "Read-only file system", str(self))

    monkeypatch.setattr(setup_env.Path, "mkdir", read_only)
    assert set_up(root) == 2
    assert capsys.readouterr().err == f"set-up: {root / '.venv-cpu'}: Read-only file system\n"


def test_a_full_disk_in_the_middle_is_one_line(root, steps, monkeypatch, capsys):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(setup_env, "write_marker", full)
    assert set_up(root) == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"set-up: {root}: No space left on device"


def test_a_home_that_cannot_be_written_means_no_cache(monkeypatch, tmp_path):
    for name in ("PIP_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "nonexistent"))
    assert "--no-cache-dir" in setup_env.pip(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert "--no-cache-dir" not in setup_env.pip(tmp_path)


# ---- as a script ----


def script(root: Path, *argv: str, **more: str) -> subprocess.CompletedProcess:
    """Runs the copied script in a new process, in a bare environment; `steps` does not reach there."""
    copy = root / "escher_book/setup_env.py"
    copy.parent.mkdir(exist_ok=True)
    copy.write_bytes((REPO / "escher_book/setup_env.py").read_bytes())
    env = {"PATH": os.environ["PATH"], "LC_ALL": "C", "HOME": "/nonexistent", **more}
    return subprocess.run([sys.executable, str(copy), "--device", "cpu", *argv], capture_output=True, env=env)


def test_the_command_gets_its_words_and_the_environment(root, steps):
    set_up(root)
    stub_tool(root / ".venv-cpu/bin", "show", 'printf "%s|" "$@"; echo; echo "$PYTHONUTF8 $VIRTUAL_ENV"; exit 7')
    done = script(root, "--", "show", "a b", "it's", "--", "$x", "ü")
    assert done.stdout.decode() == f"a b|it's|--|$x|ü|\n1 {root / '.venv-cpu'}\n"
    assert done.returncode == 7 and done.stderr == b""


def test_a_missing_command_is_one_line(root, steps):
    set_up(root)
    done = script(root, "--", "no-such-command")
    assert done.returncode == 2 and done.stderr.startswith(b"set-up: no command no-such-command in ")
    assert done.stderr.count(b"\n") == 1


def test_a_dead_mirror_is_exit_2_without_a_traceback(root):
    done = script(root, TORCH_INDEX_URL="http://127.0.0.1:9/simple", no_proxy="127.0.0.1")
    assert done.returncode == 2 and b"check TORCH_INDEX_URL" in done.stderr and b"Traceback" not in done.stderr


def test_an_unknown_device_lists_the_right_ones(root):
    done = script(root, "--device", "tpu")
    assert done.returncode == 2 and b"rocm" in done.stderr and b"Traceback" not in done.stderr


# ---- Makefile ----


def make_line(target: str, *variables: str) -> str:
    env = {"PATH": os.environ["PATH"]}
    argv = ["make", "-n", "--no-print-directory", target, *variables]
    return subprocess.run(argv, cwd=REPO, env=env, capture_output=True, text=True, check=True).stdout


def words_after(recipe: str, marker: str) -> list[str]:
    """How the shell splits the recipe's words after `marker`."""
    out = subprocess.run(["sh", "-c", f'set -- {recipe.strip()}; printf "%s\\n" "$@"'], capture_output=True, text=True)
    words = out.stdout.splitlines()
    return words[words.index(marker) + 1 :]


@pytest.mark.parametrize("target", ["book", "run"])
def test_unset_variables_pass_no_flag(target):
    assert words_after(make_line(target), "--") == ["escher", target]


@pytest.mark.parametrize("target", ["book", "run"])
def test_each_variable_is_the_flag_of_its_name(target):
    names = ["target", "device", "families", "budget", "results-dir", "workload"]
    given = [f"{name.upper().replace('-', '_')}={name}'s a, b" for name in names]
    words = words_after(make_line(target, *given), "--")
    assert words == ["escher", target] + [word for name in names for word in (f"--{name}", f"{name}'s a, b")]


def test_device_and_index_go_to_set_up_too():
    recipe = make_line("book", "DEVICE=cpu", "TORCH_INDEX_URL=https://x/y z", "PYTHON=/opt/my python/bin/python3")
    words = words_after(recipe, "escher_book/setup_env.py")
    assert words[:5] == ["--device", "cpu", "--torch-index-url", "https://x/y z", "--"]
    assert recipe.startswith("'/opt/my python/bin/python3' escher_book/setup_env.py")


def test_the_other_targets():
    assert words_after(make_line("report", "RUN=a b", "RESULTS_DIR=r", "TARGET=x"), "--") == [
        *("escher", "report", "a b", "--results-dir", "r")
    ]
    assert words_after(make_line("test"), "--") == ["python", "-m", "pytest"]
    assert make_line("test-all").rstrip().endswith('-- python -m pytest -m ""')
    assert "ruff check" in make_line("test-all")
    assert words_after(make_line("sample"), "--") == ["python", "tests/make_sample.py"]
    assert words_after(make_line("lab"), "--")[:2] == ["jupyter", "lab"]
    assert make_line("env").split() == ["'python3'", "escher_book/setup_env.py"]


def test_help_is_the_default_and_names_every_target():
    out = subprocess.run(["make"], cwd=REPO, capture_output=True, text=True, check=True).stdout
    phony = next(line for line in (REPO / "Makefile").read_text().splitlines() if line.startswith(".PHONY:"))
    assert all(f"make {target} " in out for target in phony.split()[1:])
    assert all(f"{name}=" in out for name in ("TARGET", "DEVICE", "FAMILIES", "BUDGET", "RUN", "TORCH_INDEX_URL"))


def test_clean_removes_caches_and_keeps_results_and_environments(tmp_path):
    (tmp_path / "Makefile").write_bytes((REPO / "Makefile").read_bytes())
    gone = ["build/x", ".pytest_cache/x", "escher_book/__pycache__/x", "notebooks/.ipynb_checkpoints/x"]
    kept = ["results/run 1/__pycache__/x", ".venv-cpu/lib/__pycache__/x", "notebooks/01_a.ipynb"]
    for name in gone + kept:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    subprocess.run(["make", "-s", "clean"], cwd=tmp_path, check=True)
    assert not any((tmp_path / name).parent.exists() for name in gone[:3]) and not (tmp_path / gone[3]).exists()
    assert all((tmp_path / name).exists() for name in kept)
    subprocess.run(["make", "-s", "distclean"], cwd=tmp_path, check=True)
    assert [(tmp_path / name).exists() for name in kept] == [True, False, True]


@pytest.mark.parametrize("target", ["book", "run"])
def test_the_workloads_sizes_are_passed(target):
    names = ["depth", "tokens", "window", "reference-model"]
    given = ["DEPTH=2", "TOKENS=390", "WINDOW=1560", "REFERENCE_MODEL=x"]
    words = words_after(make_line(target, *given), "--")
    assert words[:2] == ["escher", target]
    passed = dict(zip(words[2::2], words[3::2], strict=True))
    assert passed == {f"--{name}": text.partition("=")[2] for name, text in zip(names, given, strict=True)}


def test_the_help_names_the_workloads_sizes():
    out = subprocess.run(["make"], cwd=REPO, capture_output=True, text=True, check=True).stdout
    assert all(f"{name}=" in out for name in ("WORKLOAD", "REFERENCE_MODEL", "DEPTH", "TOKENS", "WINDOW"))
