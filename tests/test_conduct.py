"""One run from beginning to end, driven through the command line in this process; no notebook is executed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from escher_book import cli, conduct, runner
from escher_book.runner import Conduct, Outcome, RunError
from escher_kernels import METHOD, records, targets, workload
from escher_kernels.run import Settings

CPU = targets.Found("cpu", "Some CPU", "x86_64", 2, 2**34)


@pytest.fixture
def machine(monkeypatch, config):
    """Plans for a CPU in no time, telemetry that does nothing, notebooks that end at once. What was executed is in `ran`."""

    class Machine:
        found, ran, ends, polled = CPU, [], {}, []

        def plan(self, settings: Settings, prefix=()) -> dict:
            selection = targets.resolve(settings.target, self.found, config)
            spec = workload.load(settings.workload)
            return {"target": {"found": self.found.to_json(), **selection.to_json()}, "workload": spec.to_json(),
                    "env": {"host": {}, "knobs": {}, "variables": {}, "software": {"packages": {}}}}  # fmt: skip

        def execute(self, run_dir, family, replay, settings, profile, console, timeout_s, iteration=1, resume=False):
            self.ran.append((run_dir.name, family, iteration, resume))
            end = self.ends.get((family, iteration), Outcome("ok", "", 1.0))
            if isinstance(end, BaseException):
                raise end
            return end

        def start(self, folder, interval_s):
            self.polled.append((Path(folder).name, interval_s))
            return type("Handle", (), {"stop": lambda _: self.polled.append("stop"), "reason": ""})()

    made = Machine()
    made.ran, made.ends, made.polled = [], {}, []
    monkeypatch.setattr(runner, "plan", made.plan)
    monkeypatch.setattr(runner, "recorded", lambda *_: True)
    monkeypatch.setattr(runner, "execute", made.execute)
    monkeypatch.setattr(conduct.poller, "start", made.start)
    monkeypatch.setattr(conduct.fingerprint, "head", lambda env, info: "fingerprint")
    return made


def escher(capsys, *arguments: object) -> tuple[int, str, str]:
    """(exit status, standard output, standard error)."""
    with pytest.raises(SystemExit) as ended:
        cli.main([str(a) for a in arguments])
    out, err = capsys.readouterr()
    return ended.value.code, out, err


@pytest.fixture
def root(tmp_path) -> Path:
    return tmp_path / "my results"


def runs(root: Path) -> list[Path]:
    return sorted(p.parent for p in root.glob("*/run.json") if not p.parent.is_symlink())


def test_a_run_leaves_its_log_its_line_and_the_link(capsys, machine, root):
    code, out, _ = escher(capsys, "run", "--results-dir", root, "--families", "environment compute")
    (made,) = runs(root)
    assert (code, out.splitlines()[-1]) == (0, str(made))
    log = (made / "raw" / "run.log").read_text("utf-8")
    assert log.startswith("fingerprint") and log.count("RESULT: iteration=1 ") == 1
    assert (root / "latest").resolve() == made and machine.polled == [("telemetry", 1.0), "stop"]
    assert not (made / "iterations.json").exists()


def test_iterations_are_told_and_kept(capsys, machine, root):
    code, _, err = escher(capsys, "run", "--results-dir", root, "--families", "environment", "--iterations", 3, "--no-stat")
    (made,) = runs(root)
    assert code == 0 and [line.split()[1] for line in err.splitlines() if line.startswith("RESULT: ")] == [
        f"iteration={i}" for i in (1, 2, 3)
    ]
    assert len(records.read_json(made / "iterations.json")["iterations"]) == 3
    assert records.read_json(made / "run.json")["iterations"] == 3 and machine.polled == []


def test_several_workloads_are_a_run_each(capsys, machine, root):
    code, out, _ = escher(capsys, "run", "--results-dir", root, "--families", "ops", "--workload", "smoke, big")
    assert code == 0 and [Path(line).name.partition("-")[0] for line in out.splitlines()] == ["smoke", "big"]
    assert len(runs(root)) == 2 and {family for _, family, *_ in machine.ran} == {"ops"}


def test_all_is_every_family_for_every_workload(capsys, machine, root):
    code, _, _ = escher(capsys, "run", "--results-dir", root, "--all")
    wanted = {(name, family) for name in workload.names() for family in runner.families()}
    assert code == 0 and len(machine.ran) == len(wanted)
    assert {(run.partition("-cpu-")[0], family) for run, family, *_ in machine.ran} == wanted


def test_a_path_with_blanks_is_one_workload(tmp_path):
    path = tmp_path / "my own, model.json"
    path.write_text("{}", "utf-8")
    assert conduct.workloads(str(path)) == [str(path)]
    assert conduct.workloads("a,b  c") == ["a", "b", "c"] and conduct.workloads("") == [""]


def test_an_unknown_workload_is_told_before_any_run_is_made(capsys, root):
    """The real plan: nothing is measured of the first either."""
    code, _, err = escher(capsys, "run", "--results-dir", root, "--device", "cpu", "--workload", "smoke nope")
    assert code == 2 and "unknown workload 'nope'" in err and not root.exists()


def test_a_dry_run_makes_nothing(capsys, machine, root):
    code, out, _ = escher(capsys, "run", "--results-dir", root, "--dry-run", "--workload", "smoke big", "--iterations", 2)
    assert code == 0 and not root.exists() and machine.ran == []
    assert "smoke" in out and "big" in out and "Some CPU" in out and all(f in out for f in runner.families())


@pytest.mark.parametrize("note", ["", "GPU present (/dev/kfd) but not usable by this torch: group 44"])
def test_a_required_gpu(capsys, machine, root, note):
    machine.found = targets.Found("cpu", "Some CPU", "x86_64", 2, 2**34, note=note)
    code, _, err = escher(capsys, "run", "--results-dir", root, "--require-gpu")
    assert code == 2 and err.startswith("error: --require-gpu: no usable GPU") and not root.exists()
    assert note in err and "escher doctor" in err


def test_a_gpu_that_cannot_be_used_is_loud(capsys, machine, root):
    machine.found = targets.Found("cpu", "Some CPU", "x86_64", 2, 2**34, note="GPU present (/dev/kfd) but not usable")
    code, _, err = escher(capsys, "run", "--results-dir", root, "--families", "environment")
    assert code == 0 and "WARNING: GPU present (/dev/kfd) but not usable; what is measured is the CPU" in err


@pytest.mark.parametrize(("arguments", "words"), [
    (["--iterations", "0"], ["--iterations"]),
    (["--iterations", "x"], ["--iterations"]),
    (["--stat-interval", "0"], ["--stat-interval"]),
    (["--stat-interval", "nan"], ["--stat-interval"]),
    (["--iterations", "10000"], ["--iterations"]),
    (["--families", "all compute"], ["'all' names families itself"]),
    (["--run-timeout-s", "-1"], ["--run-timeout-s"]),
    (["--all", "--families", "compute"], ["--all is every family"]),
    (["--all", "--workload", "smoke"], ["--all is every family"]),
    (["--resume", "--dry-run"], ["leave --resume out"]),
    (["--resume", "--all"], ["leave --resume out"]),
    (["--numactl", "'"], ["No closing quotation"]),
    (["--nope"], ["--nope"]),
])  # fmt: skip
def test_wrong_usage(capsys, machine, root, arguments, words):
    code, out, err = escher(capsys, "run", "--results-dir", root, *arguments)
    assert (code, out) == (2, "") and err.startswith("error: ") and err.count("\n") == 1
    assert all(word in err for word in words) and not root.exists()


# ---- resuming ----


@pytest.fixture
def ended(capsys, machine, root) -> Path:
    """A run whose second family was interrupted."""
    machine.ends["compute", 1] = KeyboardInterrupt()
    code, _, err = escher(capsys, "run", "--results-dir", root, "--families", "environment compute ops", "--budget", "quick")
    (made,) = runs(root)
    assert code == 130 and f"Go on: escher book --resume '{made}'" in err
    assert not (root / "latest").exists(), "an interrupted run is no finished one"
    machine.ends.clear()
    machine.ran.clear()
    machine.polled.clear()
    return made


@pytest.mark.parametrize("how", ["newest", "named", "link"])
def test_a_run_is_gone_on_with_as_it_was_begun(capsys, machine, root, ended, how):
    (root / "link").symlink_to(ended.name)
    run = {"newest": [], "named": [ended], "link": [root / "link"]}[how]
    code, out, _ = escher(capsys, "run", "--results-dir", root, "--resume", *run)
    assert (code, out.splitlines()[-1]) == (0, str(ended)) and runs(root) == [ended]
    assert machine.ran == [(ended.name, "compute", 1, True), (ended.name, "ops", 1, True)]
    info = records.read_json(ended / "run.json")
    assert len(info["resumed_utc"]) == 1 and info["settings"]["budget"] == "quick"
    assert (root / "latest").resolve() == ended
    log = (ended / "raw" / "run.log").read_text("utf-8")
    assert log.count("fingerprint") == 2 and "resumed" in log, "another process may have found another machine"


@pytest.mark.parametrize(("arguments", "words"), [
    (["--budget", "full"], ["--budget is 'full'", "begun with 'quick'"]),
    (["--families", "e2e"], ["--families is 'e2e'", "environment compute ops"]),
    (["--workload", "smoke"], ["--workload is 'smoke'"]),
    (["--depth", "1"], ["--depth is 1"]),
    (["--target", "mi300x"], ["--target is 'mi300x'"]),
    (["--require-gpu"], ["measures a CPU"]),
    (["--numactl", "--localalloc"], ["--numactl is '--localalloc'", "begun with None"]),
    (["--reference-model", "wan2_2_ti2v_5b", "--workload", "smoke"], ["brings its own workload"]),
])  # fmt: skip
def test_other_settings_are_refused(capsys, machine, root, ended, arguments, words):
    before = (ended / "run.json").read_bytes()
    code, _, err = escher(capsys, "run", "--results-dir", root, "--resume", ended, *arguments)
    assert code == 2 and all(word in err for word in words), err
    assert (ended / "run.json").read_bytes() == before and machine.ran == []


def test_the_same_settings_and_more_iterations_are_taken(capsys, machine, root, ended):
    same = ["--budget", "quick", "--families", "environment, ops compute"]
    code, _, _ = escher(capsys, "run", "--results-dir", root, "--resume", ended, *same, "--iterations", 2, "--no-stat")
    assert code == 0 and len(machine.ran) == 5 and machine.polled == []
    assert records.read_json(ended / "run.json")["tuning"]["stat_interval_s"] is None, "what was asked for now is recorded"
    code, _, err = escher(capsys, "run", "--results-dir", root, "--resume", ended, "--iterations", 1)
    assert code == 2 and "begun with 2: give at least as many" in err


@pytest.mark.parametrize(("change", "words"), [
    ({"schema": 0}, "schema 0"), ({"schema": None}, "schema None"), ({"method": METHOD + 1}, f"method {METHOD + 1}"),
    ({"source": "synthetic"}, "nothing of it was measured"), ({"settings": {"budgett": 1}}, "budgett"),
    ({"families": ["nope"]}, "unknown family 'nope'"), ({"families": None}, "cannot be gone on with"),
    ({"tuning": 7}, "cannot be gone on with"), ({"tuning": {"numactl": 3}}, "tuning.numactl is 3"),
    ({"iterations": "x"}, "iterations"), ({"iterations": -1}, "iterations"),
    ({"nps": "NPS4"}, "begun with nps 'NPS4', now it is None"),
])  # fmt: skip
def test_a_run_of_another_kind_is_not_gone_on_with(capsys, machine, root, ended, change, words):
    path = ended / "run.json"
    path.write_text(json.dumps({**json.loads(path.read_text("utf-8")), **change}), "utf-8")
    code, _, err = escher(capsys, "run", "--results-dir", root, "--resume", ended)
    assert code == 2 and words in err and "Traceback" not in err and machine.ran == []


@pytest.mark.parametrize("text", ['{"environment": {"status": "ok", "iterations": [1]}}', "[]", '{"compute": 3}'])
def test_a_damaged_status_is_one_line(capsys, machine, root, ended, text):
    (ended / "status.json").write_text(text, "utf-8")
    code, _, err = escher(capsys, "run", "--results-dir", root, "--resume", ended)
    assert code == 2 and "status.json" in err and "Traceback" not in err and machine.ran == []


def test_an_older_run_without_the_newer_keys_can_be_gone_on_with(ended):
    info = records.read_json(ended / "run.json")
    for key in ("iterations", "tuning"):
        info.pop(key)
    records.write_json_atomic(ended / "run.json", info)
    _, chosen, how = conduct.resumable(ended)
    assert chosen == ["environment", "compute", "ops"] and how == Conduct(stat_interval_s=None)


def test_what_is_no_run_is_not_gone_on_with(tmp_path):
    with pytest.raises(RunError, match=r"run\.json is missing"):
        conduct.resumable(tmp_path)


# ---- tuning ----


def test_what_was_tuned_is_kept_and_put_back_though_the_run_fails(capsys, machine, root, tmp_path, monkeypatch):
    knob = tmp_path / "machine" / "proc/sys/kernel/numa_balancing"
    knob.parent.mkdir(parents=True)
    knob.write_text("1\n", "ascii")
    monkeypatch.setattr(conduct, "FILESYSTEM", tmp_path / "machine")
    seen = []

    def execute(*_, **__):
        seen.append(knob.read_text("ascii").strip())
        raise records.RecordError("the disk is full")

    monkeypatch.setattr(runner, "execute", execute)
    code, _, err = escher(capsys, "run", "--results-dir", root, "--families", "environment", "--prepare-sys")
    assert code == 2 and "the disk is full" in err and seen == ["0"] and knob.read_text("ascii").strip() == "1"
    steps = records.read_json(runs(root)[0] / "run.json")["tuning"]["prepare_sys"]
    assert "done" in {s["status"] for s in steps} and len(steps) > 3
