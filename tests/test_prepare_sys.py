"""Tuning the machine and putting it back, on a tree of files: normal end, exceptions, killed drivers, two runs at once."""

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from escher_book import prepare_sys
from escher_book.prepare_sys import ALREADY, DONE, NOT_THERE, REFUSED, Step, describe, left_over, prepared, restore

NUMA = "proc/sys/kernel/numa_balancing"
THP = "sys/kernel/mm/transparent_hugepage/enabled"
GOVERNORS = [f"sys/devices/system/cpu/cpufreq/policy{i}/scaling_governor" for i in (0, 1)]
CARD = "sys/class/drm/card1/device/power_dpm_force_performance_level"
DROP, COMPACT = "proc/sys/vm/drop_caches", "proc/sys/vm/compact_memory"
BEFORE = {
    NUMA: "1\n", THP: "always [madvise] never\n", GOVERNORS[0]: "powersave\n", GOVERNORS[1]: "schedutil\n", CARD: "auto\n",
    "sys/class/drm/card1/device/vendor": "0x1002\n",
}  # fmt: skip
TUNED = {NUMA: "0", THP: "always", GOVERNORS[0]: "performance", GOVERNORS[1]: "performance", CARD: "high"}
RESTORED = {NUMA: "1", THP: "madvise", GOVERNORS[0]: "powersave", GOVERNORS[1]: "schedutil", CARD: "auto"}
DRIVER = """
import os, signal, sys
from pathlib import Path
from escher_book.prepare_sys import prepared
with prepared(Path(sys.argv[1]), lambda line: print(line, flush=True), Path(sys.argv[2])):
    print("ready", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(params=["root", "a root with spaces"])
def root(request, tmp_path, monkeypatch):
    """A machine; drop caches and compaction are added where a test is about them."""
    monkeypatch.setattr(os, "sync", lambda: None)
    for name, value in BEFORE.items():
        put(tmp_path / request.param, name, value)
    return tmp_path / request.param


def put(root: Path, name: str, value: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(value, encoding="utf-8")


def values(root: Path) -> dict[str, str]:
    return {name: (root / name).read_text(encoding="utf-8").strip() for name in TUNED}


def state(root: Path) -> Path:
    return root / "run/escher/prepare_sys.json"


def enter(root: Path, said: list[str] | None = None):
    return prepared(root, (said if said is not None else []).append, root / "results")


def by_path(steps: list[Step]) -> dict[str, Step]:
    return {s.path: s for s in steps}


def wait_for(what, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.02)


def start(root: Path) -> subprocess.Popen:
    command = [sys.executable, "-c", DRIVER, str(root), str(root / "results")]
    driver = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert driver.stdout.readline() == "ready\n"
    return driver


def end(driver: subprocess.Popen, number: int) -> None:
    driver.send_signal(number)
    driver.communicate(timeout=60)


def abandoned(root: Path, pid: int, started: int, changes: list[dict] | None = None) -> None:
    """A tuned tree with the state file of some process."""
    for name, value in TUNED.items():
        put(root, name, value)
    listed = [
        {"name": "x", "path": p, "before": RESTORED[p], "wrote": TUNED[p]} for p in TUNED
    ] if changes is None else changes  # fmt: skip
    put(root, "run/escher/prepare_sys.json", json.dumps({"pid": pid, "started": started, "changes": listed}))


def dead_pid() -> int:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


# ---- a run that ends by itself ----


def test_everything_is_tuned_and_put_back(root):
    put(root, DROP, "0"), put(root, COMPACT, "0")
    said = []
    with enter(root, said) as steps:
        assert values(root) == TUNED and state(root).is_file() and not said
        assert ((root / DROP).read_text(), (root / COMPACT).read_text()) == ("3\n", "1\n")
        assert {s.path: (s.status, s.before, s.after) for s in steps} == {
            **{p: (DONE, RESTORED[p], TUNED[p]) for p in TUNED}, DROP: (DONE, None, None), COMPACT: (DONE, None, None),
        }  # fmt: skip
        assert all(json.loads(json.dumps(s.to_json()))["name"] == s.name for s in steps)
    assert values(root) == RESTORED and not state(root).exists()
    assert said == [
        "NUMA balancing: back to 1", "transparent huge pages: back to madvise", "CPU governor: back to powersave",
        "CPU governor: back to schedutil", "GPU performance level: back to auto",
    ]  # fmt: skip


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_an_exception_puts_everything_back_and_passes_through(root, error):
    with pytest.raises(error), enter(root):
        assert values(root) == TUNED
        raise error
    assert values(root) == RESTORED and not state(root).exists()


def test_ctrl_c_while_tuning_puts_back_what_was_tuned(root, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(prepare_sys, "_once", interrupted)
    with pytest.raises(KeyboardInterrupt), enter(root):
        pass
    assert values(root) == RESTORED and not state(root).exists()


def test_the_guardian_finishes_a_restoration_that_a_second_ctrl_c_cut_short(root, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), enter(root):
        monkeypatch.setattr(prepare_sys, "_restore", interrupted)
    assert values(root) == RESTORED and not state(root).exists()


def test_what_is_tuned_already_or_not_there_is_said_and_left_alone(root):
    put(root, THP, "[always] madvise never"), put(root, NUMA, "0\n")
    (root / CARD).unlink()
    said = []
    with enter(root, said) as steps:
        found = by_path(steps)
        assert (found[THP].status, found[THP].before, found[NUMA].status) == (ALREADY, "always", ALREADY)
        assert found[prepare_sys.AMD_LEVEL].status == NOT_THERE and found[DROP].status == NOT_THERE
        assert (root / THP).read_text() == "[always] madvise never"
    assert (root / THP).read_text() == "[always] madvise never" and (root / NUMA).read_text() == "0\n"
    assert not (root / DROP).exists() and [line for line in said if "huge" in line or "NUMA" in line] == []


def test_an_empty_machine_has_nothing_to_tune(tmp_path):
    with enter(tmp_path) as steps:
        assert {s.status for s in steps} == {NOT_THERE} and len(steps) == 6


def test_other_vendors_and_connectors_are_no_cards_to_tune(root):
    level = Path(CARD).name
    put(root, f"sys/class/drm/card2/device/{level}", "auto"), put(root, "sys/class/drm/card2/device/vendor", "0x10de")
    put(root, f"sys/class/drm/card1-DP-1/device/{level}", "auto")
    put(root, "sys/class/drm/card1-DP-1/device/vendor", "0x1002")
    put(root, f"sys/class/drm/card3/device/{level}", "auto")  # it tells no vendor
    with enter(root) as steps:
        assert [s.path for s in steps if s.path.endswith(level)] == [CARD]


# ---- what cannot be done ----


def failing(monkeypatch, name: str, code: int) -> None:
    real = prepare_sys._write

    def write(path, *rest):
        if str(path).endswith(name):
            raise OSError(code, os.strerror(code))
        real(path, *rest)

    monkeypatch.setattr(prepare_sys, "_write", write)


@pytest.mark.parametrize(
    ("code", "words"),
    [(errno.EACCES, "Permission denied; root may"), (errno.EROFS, "Read-only file system; in a container, set it on the host"),
     (errno.EINVAL, "Invalid argument")],
)  # fmt: skip
def test_a_refused_write_is_told_with_its_reason_and_the_rest_goes_on(root, monkeypatch, code, words):
    put(root, DROP, "0")
    failing(monkeypatch, THP, code), failing(monkeypatch, DROP, code)
    said = []
    with enter(root, said) as steps:
        found = by_path(steps)
        assert (found[THP].status, found[THP].detail, found[THP].before) == (REFUSED, words, "madvise")
        assert (found[DROP].status, found[DROP].detail) == (REFUSED, words)
        assert found[NUMA].status == DONE and values(root) == {**TUNED, THP: "always [madvise] never"}
        assert THP not in state(root).read_text()
    assert (root / NUMA).read_text() == "1\n" and not any("huge" in line for line in said)


def test_what_cannot_be_read_is_not_written(root):
    (root / NUMA).unlink(), (root / NUMA).mkdir()
    with enter(root) as steps:
        step = by_path(steps)[NUMA]
    assert (step.status, step.detail) == (REFUSED, "cannot be read: Is a directory") and (root / NUMA).is_dir()


def test_a_value_that_does_not_take_is_refused_and_undone(root, monkeypatch):
    real = prepare_sys._write

    def write(path, value, *rest):  # a driver that makes "high" something else
        real(path, "manual" if value == "high" else value, *rest)

    monkeypatch.setattr(prepare_sys, "_write", write)
    with enter(root) as steps:
        step = by_path(steps)[CARD]
        assert (step.status, step.detail) == (REFUSED, "it reads manual after high was written")
        assert (root / CARD).read_text() == "auto\n"


def test_without_a_place_for_the_state_file_nothing_is_changed(root):
    (root / "run").write_text("no folder"), (root / "results").write_text("no folder")
    with enter(root) as steps:
        assert {s.status for s in steps} == {REFUSED} and "no way back could be kept" in steps[0].detail
        assert values(root)[NUMA] == "1"


def test_a_process_that_cannot_be_told_from_others_changes_nothing(root, monkeypatch):
    monkeypatch.setattr(prepare_sys, "_started", lambda pid: 0)
    with enter(root) as steps:
        assert {(s.status, s.detail) for s in steps} == {(REFUSED, "no way back could be kept: /proc cannot be used")}
        assert values(root)[NUMA] == "1" and not state(root).exists()


def test_the_state_file_goes_to_the_other_folder_where_run_cannot_be_written(root):
    (root / "run").write_text("no folder")
    with enter(root) as steps:
        assert (root / "results/prepare_sys.json").is_file() and by_path(steps)[NUMA].status == DONE
    assert values(root) == RESTORED and not (root / "results/prepare_sys.json").exists()


def test_without_a_guardian_nothing_is_changed(root, monkeypatch):
    def no_process(*_, **__):
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", no_process)
    with enter(root) as steps:
        assert by_path(steps)[NUMA].detail == "no guardian could be started: Resource temporarily unavailable"
        assert values(root)[NUMA] == "1"
    assert not state(root).exists()


# ---- somebody else ----


def test_a_later_change_of_somebody_else_stays(root):
    said = []
    with enter(root, said):
        put(root, NUMA, "2"), put(root, GOVERNORS[0], "powersave"), (root / CARD).unlink()
    assert (root / NUMA).read_text() == "2" and (root / GOVERNORS[0]).read_text() == "powersave"
    assert "NUMA balancing: left at 2, which somebody set after we wrote 0" in said
    assert f"GPU performance level: {CARD} is gone" in said and not any("powersave" in line for line in said)
    assert not state(root).exists()


def test_a_second_run_changes_nothing_and_restores_nothing(root):
    said = []
    with enter(root):
        kept = state(root).read_text()
        with enter(root, said) as steps:
            assert {(s.status, s.detail) for s in steps} == {(REFUSED, f"another run, pid {os.getpid()}, holds them")}
            assert len(steps) == 6 and values(root) == TUNED and state(root).read_text() == kept
        assert values(root) == TUNED and state(root).read_text() == kept and not said
        assert restore(root, said.append) is False and said == [f"another run, pid {os.getpid()}, holds them"]
        assert left_over(root) is None
    assert values(root) == RESTORED


@pytest.mark.parametrize("name", ["_look", "_restore"])
def test_state_files_are_looked_at_and_acted_on_by_one_process_at_a_time(root, monkeypatch, name):
    real, locked = getattr(prepare_sys, name), []

    def watched(*given):
        folder = os.open(state(root).parent, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            locked.append(False)
        except BlockingIOError:
            locked.append(True)
        finally:
            os.close(folder)
        return real(*given)

    monkeypatch.setattr(prepare_sys, name, watched)
    with enter(root):
        pass
    restore(root, lambda _: None)
    assert locked and all(locked)


def test_a_run_in_another_process_is_respected_and_ends_well(root):
    driver = start(root)
    with enter(root) as steps:
        assert {s.detail for s in steps} == {f"another run, pid {driver.pid}, holds them"}
    assert values(root) == TUNED
    told, _ = driver.communicate("", timeout=60)
    assert driver.returncode == 0 and "NUMA balancing: back to 1" in told and values(root) == RESTORED


# ---- a driver that was killed ----


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_the_guardian_restores_after_a_driver_that_was_killed(root, number):
    driver = start(root)
    assert values(root) == TUNED
    end(driver, number)
    wait_for(lambda: not state(root).exists())
    assert values(root) == RESTORED


def guardians(root: Path) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"escher_book.prepare_sys" in command and str(state(root)).encode() in command:
            found.append(int(entry.name))
    return found


def test_signals_do_not_end_the_guardian(root):
    driver = start(root)
    (guardian,) = guardians(root)
    ignored = 1 << signal.SIGTERM - 1 | 1 << signal.SIGINT - 1 | 1 << signal.SIGHUP - 1

    def ignores() -> bool:
        line = next(x for x in Path(f"/proc/{guardian}/status").read_text().splitlines() if x.startswith("SigIgn"))
        return int(line.split()[1], 16) & ignored == ignored

    wait_for(ignores)
    assert os.getsid(guardian) == guardian
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(guardian, number)
    end(driver, signal.SIGKILL)
    wait_for(lambda: not state(root).exists())
    assert values(root) == RESTORED
    wait_for(lambda: not guardians(root))


def test_the_next_run_restores_first_where_the_guardian_was_killed_too(root):
    driver = start(root)
    (guardian,) = guardians(root)
    os.kill(guardian, signal.SIGKILL)
    end(driver, signal.SIGKILL)
    assert left_over(root) == {
        "message": f"settings left by a killed run, pid {driver.pid}", "mend": "escher doctor --restore",
        "state": str(state(root)), "pid": driver.pid, "paths": list(TUNED),
    }  # fmt: skip
    said = []
    with enter(root, said) as steps:
        assert said[:2] == [f"settings left by a killed run, pid {driver.pid}", "NUMA balancing: back to 1"]
        assert by_path(steps)[NUMA].before == "1" and by_path(steps)[CARD].before == "auto" and values(root) == TUNED
    assert values(root) == RESTORED and left_over(root) is None


def test_the_doctor_restores_what_was_left(root):
    pid, said = dead_pid(), []
    abandoned(root, pid, 1)
    assert restore(root, said.append) is True
    assert values(root) == RESTORED and not state(root).exists() and said[0] == f"settings left by a killed run, pid {pid}"
    said.clear()
    assert restore(root, said.append) is True and said == ["no settings are left over"]


def test_a_pid_that_another_process_has_by_now_is_no_live_owner(root):
    abandoned(root, os.getpid(), prepare_sys._started(os.getpid()) - 1)
    assert left_over(root)["pid"] == os.getpid() and restore(root, lambda _: None)


def test_a_zombie_is_no_live_owner():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert prepare_sys._started(child.pid) > 0
    child.stdin.close()
    wait_for(lambda: prepare_sys._started(child.pid) == 0)
    child.wait()


def test_what_cannot_be_put_back_keeps_the_state_file_and_refuses_the_next_run(root, monkeypatch):
    abandoned(root, dead_pid(), 1)
    failing(monkeypatch, NUMA, errno.EACCES)
    said = []
    with enter(root, said) as steps:
        reason = "x: NOT back to 1: Permission denied; root may; mend: escher doctor --restore"
        assert {(s.status, s.detail) for s in steps} == {(REFUSED, reason)}
    assert state(root).exists() and values(root) == {**RESTORED, NUMA: "0"} and "x: back to madvise" in said
    monkeypatch.undo()
    assert restore(root, said.append) and values(root) == RESTORED and not state(root).exists()


def test_the_guardian_of_an_ended_run_leaves_the_next_ones_settings_alone(root):
    abandoned(root, os.getpid(), prepare_sys._started(os.getpid()))
    command = [sys.executable, "-m", "escher_book.prepare_sys", str(state(root)), "--root", str(root), "--owner", "1", "1"]
    assert subprocess.run(command, stdin=subprocess.DEVNULL, check=False).returncode == 0
    assert values(root) == TUNED and state(root).exists()


# ---- a state file that is none ----

CHANGE = {"name": "x", "path": NUMA, "before": "1", "wrote": "0"}
DAMAGED = {
    "no JSON": "{", "empty": "", "no object": "[]", "no owner": '{"changes": []}', "a number": "7",
    **{name: json.dumps({"pid": 1, "started": 1, **more}) for name, more in {
        "no changes": {}, "changes of another kind": {"changes": 3}, "a change that is none": {"changes": ["x"]},
        "a path of somebody else": {"changes": [{**CHANGE, "path": "etc/passwd"}]},
        "a path above the root": {"changes": [{**CHANGE, "path": f"../{NUMA}"}]},
        "an absolute path": {"changes": [{**CHANGE, "path": f"/{NUMA}"}]},
        "a path below another": {"changes": [{**CHANGE, "path": f"home/{NUMA}"}]},
        "a path through a star": {"changes": [{**CHANGE, "path": "sys/class/drm/card1/../power_dpm_force_performance_level"}]},
        "a value that is no text": {"changes": [{**CHANGE, "before": 1}]},
        "a value that is missing": {"changes": [{"name": "x", "path": NUMA, "before": "1"}]},
        "a pid that is text": {"pid": "1", "changes": []}, "no start time": {"started": 0, "changes": []},
    }.items()},
}  # fmt: skip


@pytest.mark.parametrize("text", DAMAGED.values(), ids=DAMAGED.keys())
def test_a_damaged_state_file_is_one_clear_line_and_changes_nothing(tmp_path, text):
    put(tmp_path, NUMA, "1"), put(tmp_path, "run/escher/prepare_sys.json", text)
    said = []
    with enter(tmp_path, said) as steps:
        assert {s.status for s in steps} == {REFUSED} and values_of_numa(tmp_path) == "1"
    (reason,) = {s.detail for s in steps}
    assert str(state(tmp_path)) in reason and "\n" not in reason and not said
    assert left_over(tmp_path)["message"] == reason and restore(tmp_path, said.append) is False and said == [reason]
    assert state(tmp_path).read_text() == text and values_of_numa(tmp_path) == "1"


def values_of_numa(root: Path) -> str:
    return (root / NUMA).read_text().strip()


# ---- what the console shows ----


def test_describe_is_one_line_a_step_and_counts_files_that_fared_alike():
    assert describe([
        Step("NUMA balancing", NUMA, DONE, "1", "0"),
        Step("transparent huge pages", THP, ALREADY, "always", "always"),
        *(Step("CPU governor", f"policy{i}", DONE, "powersave", "performance") for i in range(3)),
        Step("CPU governor", "policy3", DONE, "schedutil", "performance"),
        Step("GPU performance level", CARD, REFUSED, "auto", detail="Permission denied; root may"),
        Step("drop caches", DROP, DONE),
        Step("compaction", COMPACT, NOT_THERE),
    ]) == [
        "NUMA balancing: done (1 -> 0)",
        "transparent huge pages: already (always)",
        "CPU governor: done (powersave -> performance) [3 files]",
        "CPU governor: done (schedutil -> performance)",
        "GPU performance level: refused: Permission denied; root may",
        "drop caches: done",
        "compaction: not there",
    ]  # fmt: skip
