"""Driving a run: what is executed when, how it ended, what a limit or a kill leaves. No notebook is executed here."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from escher_book import runner
from escher_book.runner import Conduct, Console, Outcome, RunError
from escher_kernels import records
from escher_kernels.run import Settings

PLAN = {
    "target": {"profile": {"key": "cpu"}, "found": {"kind": "cpu", "note": ""}}, "workload": {"name": "w"}, "env": {},
    "partition": "SPX", "nps": "NPS1",
}  # fmt: skip
FAMILIES = ["environment", "compute"]


class Lines(list):
    """Stands in for the console."""

    def __call__(self, line: str) -> None:
        self.append(line)


@pytest.fixture
def run_dir(tmp_path) -> Path:
    return runner.new_run(tmp_path / "my results", Settings(), FAMILIES, PLAN)


@pytest.fixture
def notebooks(monkeypatch):
    """Stands in for papermill: `notebooks.ends` says how each (family, iteration) ends; `ran` what was executed."""

    class Notebooks:
        def __init__(self):
            self.ran, self.limits, self.ends = [], [], {}

        def __call__(self, run_dir, family, replay, settings, profile, console, timeout_s, iteration=1, resume=False):
            self.ran.append((family, iteration, resume))
            self.limits.append(timeout_s)
            end = self.ends.get((family, iteration), Outcome("ok", "", 2.0))
            if isinstance(end, BaseException):
                raise end
            return end

    made = Notebooks()
    monkeypatch.setattr(runner, "execute", made)
    monkeypatch.setattr(runner, "recorded", lambda *_: True)
    return made


def status(run_dir: Path) -> dict:
    return records.read_json(run_dir / "status.json")


# ---- choosing ----


def test_benchmark_is_what_is_numbered_up_to_six_and_all_is_every_family(monkeypatch):
    known = {f: f"{i:02d}_{f}" for i, f in enumerate("abcdefghi")}
    monkeypatch.setattr(runner, "registry", lambda: known)
    monkeypatch.setattr(runner, "families", lambda: dict.fromkeys(known))
    assert runner.choose(None) == runner.choose("benchmark") == list("abcdefg")
    assert runner.choose("all") == list("abcdefghi") and runner.choose("i, b") == ["b", "i"]
    for text, why in (("nope", "unknown family"), ("all a", "stands alone"), ("benchmark a", "stands alone")):
        with pytest.raises(RunError, match=why):
            runner.choose(text)


# ---- measuring ----


def test_each_iteration_is_a_notebook_of_its_own(run_dir, notebooks):
    after = []
    found = runner.measure(run_dir, FAMILIES, Settings(), Lines(), Conduct(iterations=3), after=after.append)
    assert [(f, i) for f, i, _ in notebooks.ran] == [(f, i) for i in (1, 2, 3) for f in FAMILIES]
    assert after == [1, 2, 3] and found == status(run_dir)
    assert {f: (s["status"], s["seconds"], list(s["iterations"])) for f, s in found.items()} == {
        f: ("ok", 6.0, ["1", "2", "3"]) for f in FAMILIES
    }


def test_one_iteration_has_no_iterations(run_dir, notebooks):
    found = runner.measure(run_dir, FAMILIES, Settings(), Lines())
    assert set(found["compute"]) == {"status", "message", "seconds", "started_utc"}


def test_a_family_ended_as_the_first_iteration_that_is_not_ok_did(run_dir, notebooks):
    notebooks.ends["compute", 2] = Outcome("died", "killed", 1.0)
    notebooks.ends["compute", 3] = Outcome("failed", "x", 1.0)
    found = runner.measure(run_dir, FAMILIES, Settings(), Lines(), Conduct(iterations=3))["compute"]
    assert (found["status"], found["message"]) == ("died", "iteration 2: killed")
    assert [e["status"] for e in found["iterations"].values()] == ["ok", "died", "failed"]


def test_ctrl_c_is_kept_and_what_was_not_begun_is_told(run_dir, notebooks):
    notebooks.ends["environment", 2] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        runner.measure(run_dir, FAMILIES, Settings(), Lines(), Conduct(iterations=2))
    found = status(run_dir)
    assert found["environment"]["status"] == "interrupted" and found["environment"]["message"] == "iteration 2: Ctrl-C"
    assert found["compute"]["status"] == "interrupted" and found["compute"]["message"] == "iteration 2: not begun"


def test_resuming_executes_what_is_not_whole(run_dir, notebooks):
    notebooks.ends["compute", 1] = Outcome("died", "killed", 1.0)
    runner.measure(run_dir, FAMILIES, Settings(), Lines(), Conduct(iterations=2))
    notebooks.ends.clear()
    notebooks.ran.clear()
    found = runner.measure(run_dir, FAMILIES, Settings(), (said := Lines()), Conduct(iterations=2), resume=True)
    assert notebooks.ran == [("compute", 1, True)] and found["compute"]["status"] == "ok"
    assert sum("is there already" in line for line in said) == 3


def test_a_run_that_was_killed_while_it_measured_goes_on_there(run_dir, notebooks):
    """SIGKILL leaves "running" behind."""
    records.write_json_atomic(run_dir / "status.json", {
        "environment": {"status": "ok", "message": "", "seconds": 1.0, "started_utc": ""},
        "compute": {"status": "running", "message": "", "seconds": 0.0, "started_utc": ""},
    })  # fmt: skip
    runner.measure(run_dir, FAMILIES, Settings(), Lines(), resume=True)
    assert notebooks.ran == [("compute", 1, True)]


def test_a_family_whose_file_was_deleted_is_measured_again(run_dir, notebooks, monkeypatch):
    """As the message about a damaged file advises."""
    runner.measure(run_dir, FAMILIES, Settings(), Lines())
    notebooks.ran.clear()
    monkeypatch.setattr(runner, "recorded", lambda _, family: family != "compute")
    runner.measure(run_dir, FAMILIES, Settings(), Lines(), resume=True)
    assert notebooks.ran == [("compute", 1, True)]


def test_time_of_a_resumed_family_counts_what_was_spent_before(run_dir, notebooks):
    notebooks.ends["compute", 1] = Outcome("timeout", "", 30.0)
    runner.measure(run_dir, FAMILIES, Settings(), Lines())
    notebooks.ends.clear()
    told = []
    found = runner.measure(run_dir, FAMILIES, Settings(), Lines(), resume=True, after=told.append)
    assert found["compute"]["seconds"] == 32.0 and told == [1]
    runner.measure(run_dir, FAMILIES, Settings(), Lines(), resume=True, after=told.append)
    assert told == [1], "an iteration that is whole is not told again"


def test_nothing_of_a_family_lives_while_the_next_is_measured(run_dir, monkeypatch):
    alive = []

    def leaves_a_child(run_dir, family, *_, **__):
        alive.append([p.pid for p in psutil.Process().children(recursive=True)])
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        return Outcome("died", "killed", 1.0)

    monkeypatch.setattr(runner, "execute", leaves_a_child)
    runner.measure(run_dir, FAMILIES, Settings(), Lines())
    assert alive[0] == alive[1]


def test_a_console_that_is_gone_does_not_end_a_run(run_dir):
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w", encoding="utf-8") as stream:
        console = Console(run_dir / "raw" / "run.log", stream)
        console("a line")
        console("another")
        console.close()
        assert "a line\nanother" in (run_dir / "raw" / "run.log").read_text("utf-8")
        stream.close = lambda: None  # its buffer cannot be written any more


def test_more_iterations_can_be_added(run_dir, notebooks):
    runner.measure(run_dir, FAMILIES, Settings(), Lines())
    notebooks.ran.clear()
    found = runner.measure(run_dir, FAMILIES, Settings(), Lines(), Conduct(iterations=2), resume=True)
    assert notebooks.ran == [(f, 2, True) for f in FAMILIES]
    assert found["compute"]["iterations"]["1"]["status"] == "ok"


@pytest.mark.parametrize("text", ["[]", '{"compute": 3}', "{"])
def test_a_damaged_status_is_one_clear_line(run_dir, notebooks, text):
    (run_dir / "status.json").write_text(text, "utf-8")
    with pytest.raises((RunError, records.RecordError), match=r"status\.json"):
        runner.measure(run_dir, FAMILIES, Settings(), Lines(), resume=True)
    assert not notebooks.ran


def test_the_limit_of_the_whole_run_bounds_each_family(run_dir, notebooks, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(runner.time, "monotonic", lambda: now[0])
    real = notebooks.__call__

    def slow(*arguments, **more):
        now[0] += 60
        return real(*arguments, **more)

    monkeypatch.setattr(runner, "execute", slow)
    found = runner.measure(
        run_dir, ["environment", "compute", "bandwidth"], Settings(), Lines(), Conduct(timeout_s=100, run_timeout_s=110)
    )
    assert notebooks.limits == [100, 50]
    assert [s["status"] for s in found.values()] == ["ok", "ok", "timeout"]
    assert "110 s of the whole run" in found["bandwidth"]["message"]


def test_a_clock_that_jumps_changes_nothing_that_is_measured(run_dir, notebooks, monkeypatch):
    """Wall time goes back a day between two families: limits and durations are of another clock."""
    times = iter([10**9, 10**9 - 86400, 10**9 + 7 * 86400, 0, 1, 2, 3])

    class Jumping(runner.datetime):
        @classmethod
        def now(cls, tz=None):
            return cls.fromtimestamp(next(times), tz)

    monkeypatch.setattr(runner, "datetime", Jumping)
    found = runner.measure(run_dir, FAMILIES, Settings(), Lines(), Conduct(run_timeout_s=3600))
    assert [s["status"] for s in found.values()] == ["ok", "ok"] and all(s["seconds"] >= 0 for s in found.values())


def test_a_full_disk_ends_the_run_with_one_line_and_keeps_what_is_there(run_dir, notebooks, monkeypatch):
    left, real = [3], runner.write_json_atomic

    def full(path, data):
        left[0] -= 1
        if left[0] < 0:
            raise records.RecordError(records.write_failed(path, OSError(28, "No space left on device")))
        real(path, data)

    monkeypatch.setattr(runner, "write_json_atomic", full)
    with pytest.raises(records.RecordError, match="the disk is full"):
        runner.measure(run_dir, FAMILIES, Settings(), Lines())
    assert status(run_dir)["environment"]["status"] == "ok" and status(run_dir)["compute"]["status"] == "running"
    monkeypatch.undo()


# ---- processes ----


def test_a_killed_kernels_children_are_ended_too():
    """A child that left its parent's session and outlived it is found all the same."""
    code = (
        "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'],"
        " start_new_session=True, stdout=-3, stderr=-3); print(p.pid, flush=True)"
    )
    stays = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        with runner.no_process_left():
            done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
            orphan = int(done.stdout)
            assert psutil.pid_exists(orphan)
        assert not psutil.pid_exists(orphan)
        assert stays.poll() is None, "what was there before stays"
    finally:
        stays.kill()
        stays.wait()


def test_sigterm_is_as_orderly_as_ctrl_c(tmp_path):
    """A batch system's end: exit status 130, and what has to be put back is."""
    code = (
        "import sys, time; from escher_book import cli\n"
        "@cli.cli.command()\n"
        "def wait():\n"
        "    try:\n"
        "        print('ready', flush=True); time.sleep(600)\n"
        "    finally:\n"
        "        print('put back', flush=True)\n"
        "sys.argv = ['escher', 'wait']; cli.main()"
    )
    for number in (signal.SIGTERM, signal.SIGHUP):
        process = subprocess.Popen([sys.executable, "-X", "utf8", "-c", code], stdout=subprocess.PIPE, text=True)
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        out, _ = process.communicate(timeout=60)
        assert (out, process.returncode) == ("put back\n", 130)


# ---- numactl ----


def fake_numactl(tmp_path: Path, monkeypatch, body: str) -> None:
    tool = tmp_path / "bin" / "numactl"
    tool.parent.mkdir()
    tool.write_text(f"#!/bin/sh\n{body}\n", "utf-8")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}{os.pathsep}{os.environ['PATH']}")


def test_numactl_is_tried_before_anything_is_measured(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert runner.numactl_argv(None) == runner.numactl_argv("") == []
    with pytest.raises(RunError, match=r"numactl cannot be run .*apt install numactl"):
        runner.numactl_argv("--localalloc")
    with pytest.raises(RunError, match="No closing quotation"):
        runner.numactl_argv("'--localalloc")


def test_numactl_that_refuses_says_why(tmp_path, monkeypatch):
    fake_numactl(tmp_path, monkeypatch, "echo 'libnuma: Warning: cpu argument 99 is out of range' >&2; exit 1")
    with pytest.raises(RunError, match="'--physcpubind=99': libnuma: Warning: cpu argument 99"):
        runner.numactl_argv("--physcpubind=99")


def test_the_kernel_is_started_through_numactl_except_where_ranks_pin_themselves(run_dir, tmp_path, monkeypatch):
    fake_numactl(tmp_path, monkeypatch, "exit 0")
    specs = {}

    def look(run_dir, family, *_, **__):
        path = Path(os.environ["JUPYTER_PATH"]) / "kernels" / "python3" / "kernel.json"
        specs[family] = json.loads(path.read_text("utf-8"))["argv"]
        return Outcome("ok", "", 0.0)

    monkeypatch.setattr(runner, "execute", look)
    runner.measure(run_dir, ["compute", "comm"], Settings(), Lines(), Conduct(numactl="--physcpubind=0-15 --localalloc"))
    assert specs["compute"][:4] == ["numactl", "--physcpubind=0-15", "--localalloc", sys.executable]
    assert specs["comm"][0] == sys.executable


# ---- results/latest, the log, run.json ----


def test_latest_is_the_run_that_finished_last(tmp_path, run_dir):
    root = run_dir.parent
    other = runner.new_run(root, Settings(), FAMILIES, PLAN)
    assert other != run_dir
    for made in (other, run_dir):
        runner.point_latest(made, Lines())
        assert (root / "latest").resolve() == made.resolve() and os.readlink(root / "latest") == made.name
    assert runner.newest(root) in (run_dir, other), "the link is no run of its own"
    assert sorted(p.name for p in root.iterdir() if p.name.startswith(".")) == []


def test_a_folder_named_latest_is_left_alone(run_dir):
    (run_dir.parent / "latest").mkdir()
    runner.point_latest(run_dir, said := Lines())
    assert (run_dir.parent / "latest").is_dir() and not (run_dir.parent / "latest").is_symlink()
    assert len(said) == 1 and "is no link" in said[0]


def test_two_escher_do_not_measure_into_one_run(run_dir):
    log = run_dir / "raw" / "run.log"
    first = Console(log)
    with pytest.raises(RunError, match="another escher measures into this run"):
        Console(log)
    first.log.close()
    Console(log).log.close()


def test_the_header_of_a_run_says_how_it_was_made(tmp_path):
    made = runner.new_run(tmp_path, Settings(), FAMILIES, PLAN, Conduct(3, numactl="--localalloc", stat_interval_s=None))
    info = records.read_json(made / "run.json")
    assert (info["iterations"], info["partition"], info["nps"], info["world"]) == (3, "SPX", "NPS1", 1)
    assert info["tuning"] == {"numactl": "--localalloc", "stat_interval_s": None, "prepare_sys": []}


def test_runs_made_in_one_second_have_directories_of_their_own(tmp_path):
    made = [runner.new_run(tmp_path, Settings(), FAMILIES, PLAN) for _ in range(5)]
    assert len(set(made)) == 5
