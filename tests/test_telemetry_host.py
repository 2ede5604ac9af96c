"""Telemetry of the host: what is read of a made-up one, the file that is kept, and the process that writes it."""

from __future__ import annotations

import errno
import inspect
import json
import os
import signal
import subprocess
import sys
import time
from collections import namedtuple
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from escher_kernels.records import RecordError
from escher_kernels.telemetry import __main__ as command
from escher_kernels.telemetry import host, poller

Times = namedtuple("Times", "user system idle iowait steal guest")
NOTHING = {
    "cpu_busy_frac", "cpu_busiest_frac", "cpu_steal_frac", "cpu_clock_mean_hz", "cpu_clock_min_hz", "cpu_clock_max_hz",
    "load_average", "memory_available_bytes", "swap_used_bytes", "pressure_cpu_frac", "pressure_memory_frac",
    "pressure_io_frac", "cpu_temperature_max_c", "cpu_package_power_w",
}  # fmt: skip


class Clock:
    def __init__(self, *times: float):
        self.times = list(times)

    def __call__(self) -> float:
        return self.times.pop(0) if len(self.times) > 1 else self.times[0]


def psutil_of(*cpu_times: list[Times]) -> SimpleNamespace:
    left = list(cpu_times)
    return SimpleNamespace(
        cpu_times=lambda percpu: left.pop(0),
        getloadavg=lambda: (1.5, 0.0, 0.0),
        virtual_memory=lambda: SimpleNamespace(available=2**30),
        swap_memory=lambda: SimpleNamespace(used=0),
    )


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")


def stalls(cpu: int, memory: int, io: int) -> dict[str, str]:
    line = "some avg10=0.00 avg60=0.00 avg300=0.00 total={}\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=1\n"
    return {f"proc/pressure/{n}": line.format(v) for n, v in (("cpu", cpu), ("memory", memory), ("io", io))}


MACHINE = {
    "sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq": "2000000\n",
    "sys/devices/system/cpu/cpu1/cpufreq/scaling_cur_freq": "3000000\n",
    "sys/class/hwmon/hwmon0/name": "nvme\n",
    "sys/class/hwmon/hwmon0/temp1_input": "99000\n",
    "sys/class/hwmon/hwmon1/name": "k10temp\n",
    "sys/class/hwmon/hwmon1/temp1_input": "61250\n",
    "sys/class/hwmon/hwmon1/temp3_input": "55000\n",
    "sys/class/powercap/intel-rapl:0/name": "package-0\n",
    "sys/class/powercap/intel-rapl:0/max_energy_range_uj": "262143328850\n",
    "sys/class/powercap/intel-rapl:0/energy_uj": "1000000\n",
    "sys/class/powercap/intel-rapl:0:0/name": "core\n",
    "sys/class/powercap/intel-rapl:0:0/energy_uj": "5\n",
    "sys/class/powercap/intel-rapl:1/name": "psys\n",
    "sys/class/powercap/intel-rapl:1/energy_uj": "5\n",
}


def test_two_readings_of_a_host(tmp_path):
    write(tmp_path, MACHINE | stalls(0, 10, 20))
    before = [Times(10, 0, 100, 0, 0, 0), Times(10, 0, 100, 0, 0, 0)]
    after = [Times(13, 1, 100, 0, 0, 2), Times(10, 0, 102, 1, 1, 0)]  # the second CPU did nothing and lost a second
    collector = host.Host(tmp_path, psutil_of(before, after), Clock(50.0, 54.0))
    first = collector.read()
    write(tmp_path, {"sys/class/powercap/intel-rapl:0/energy_uj": "401000000"} | stalls(2_000_000, 10, 19))
    second = collector.read()
    rates = {n for n in NOTHING if "busy" in n or "busiest" in n or "steal" in n or "pressure" in n or "power" in n}
    assert {n for n, v in first.items() if v is None} == rates
    assert second == {
        "cpu_busy_frac": 0.5, "cpu_busiest_frac": 1.0, "cpu_steal_frac": 0.125,
        "cpu_clock_mean_hz": 2.5e9, "cpu_clock_min_hz": 2e9, "cpu_clock_max_hz": 3e9, "load_average": 1.5,
        "memory_available_bytes": 2**30, "swap_used_bytes": 0, "pressure_cpu_frac": 0.5, "pressure_memory_frac": 0.0,
        "pressure_io_frac": None, "cpu_temperature_max_c": 61.25, "cpu_package_power_w": 100.0,
    }  # fmt: skip


def test_what_a_host_does_not_show_is_none_and_never_zero(tmp_path):
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOENT, "no such file")

    ps = SimpleNamespace(cpu_times=refuse, getloadavg=refuse, virtual_memory=refuse)  # and it has no swap_memory at all
    write(tmp_path, {"proc/cpuinfo": "cpu MHz\t: 2100.000\n"})  # a constant in a virtual machine: no clock
    collector = host.Host(tmp_path, ps, Clock(0.0, 1.0))
    for _ in range(2):
        assert collector.read() == dict.fromkeys(NOTHING)


@pytest.mark.parametrize("rubbish", ["", "\n", "abc", "1.5", "0x10", "١٢", "-", "1 2", "\x00"])
def test_rubbish_in_a_file_is_none(tmp_path, rubbish):
    broken = {name: rubbish for name in MACHINE if not name.endswith("/name")}
    write(tmp_path, MACHINE | broken | {f"proc/pressure/{n}": rubbish for n in host.STALLS})
    cpu = [Times(1, 1, 1, 1, 1, 0)]
    collector = host.Host(tmp_path, psutil_of(cpu, cpu), Clock(0.0, 1.0))
    collector.read()
    shown = {n for n, v in collector.read().items() if v is not None}
    assert shown == {"load_average", "memory_available_bytes", "swap_used_bytes"}  # no CPU time passed, either


@pytest.mark.parametrize("times", [(5.0, 5.0), (5.0, 4.0)])
def test_a_clock_that_stands_or_goes_back_gives_no_rate(tmp_path, times):
    write(tmp_path, MACHINE | stalls(0, 0, 0))
    cpus = [Times(1, 0, 0, 0, 0, 0)], [Times(2, 0, 0, 0, 0, 0)]
    collector = host.Host(tmp_path, psutil_of(*cpus), Clock(*times))
    collector.read()
    found = collector.read()
    assert found["cpu_busy_frac"] is found["cpu_package_power_w"] is found["pressure_cpu_frac"] is None
    assert found["load_average"] == 1.5


RANGE = 262_143_328_850


@pytest.mark.parametrize(
    "before, now, ranges, elapsed_s, expected",
    [
        ([0], [50_000_000], [RANGE], 1.0, 50.0),
        ([RANGE - 30_000_000], [20_000_000], [RANGE], 1.0, 50.0),  # began again
        ([30_000_000], [20_000_000], [None], 1.0, None),  # began again, nobody knows after what
        ([20_000_000], [30_000_000], [None], 1.0, 10.0),
        ([0, RANGE - 1], [1_000_000, 999_999], [RANGE, RANGE], 2.0, 1.0),
        ([0, None], [1_000_000, 5], [RANGE, RANGE], 1.0, None),  # half of a sum is no sum
        ([0, 5], [1_000_000, None], [RANGE, RANGE], 1.0, None),
        ([0], [1_000_000], [RANGE], 300.0, None),  # it may have filled meanwhile
        ([2 * RANGE], [0], [RANGE], 1.0, None),  # not within its own range
        ([], [], [], 1.0, None),
    ],
)
def test_power_is_the_growth_of_energy(before, now, ranges, elapsed_s, expected):
    assert host.power_w(before, now, ranges, elapsed_s) == (expected if expected is None else pytest.approx(expected))


@given(st.integers(0, RANGE), st.floats(0, 900), st.floats(0.01, 200))
def test_power_does_not_depend_on_where_the_counter_stands(start_uj, watts, elapsed_s):
    grown = round(watts * elapsed_s * 1e6)
    found = host.power_w([start_uj], [(start_uj + grown) % (RANGE + 1)], [RANGE + 1], elapsed_s)
    assert found == pytest.approx(grown / 1e6 / elapsed_s)


counters = st.lists(st.builds(Times, *[st.floats(0, 1e9)] * 6), max_size=4)


@given(counters, counters)
def test_fractions_are_fractions_whatever_the_counters_do(before, after):
    found = host.cpu_fractions([t._asdict() for t in before], [t._asdict() for t in after])
    assert len(found) == 3 and all(v is None or 0 <= v <= 1 for v in found.values())
    if len(before) != len(after):
        assert set(found.values()) == {None}


def test_the_poller_keeps_away_from_cores_that_measure(tmp_path):
    for cpu, core in enumerate((0, 1, 0, 1)):  # 0 and 2 are one core
        folder = f"sys/devices/system/cpu/cpu{cpu}/topology"
        write(tmp_path, {f"{folder}/physical_package_id": "0\n", f"{folder}/core_id": f"{core}\n"})
    assert host.free_cpus({0, 1, 2, 3}, [0], tmp_path) == {1, 3}
    assert host.free_cpus({0, 1, 2, 3}, [0, 1], tmp_path) == {2, 3}  # the other threads of those cores
    assert host.free_cpus({0, 1}, [0, 1], tmp_path) == {0, 1}
    assert host.free_cpus({0, 1}, [], tmp_path) == {0, 1}
    assert host.free_cpus({4, 5}, [4], tmp_path) == {5}  # no topology is shown


# ------------------------------------------------------------------------------------------------------------ sampling


class Made:
    """A collector that gives what it was made of; a number to add to the clock is time that a reading takes."""

    name, unusable = "made", ""

    def __init__(self, readings: Iterable[dict], clock: list[float] | None = None, takes: Iterable[float] = ()):
        self.readings, self.clock, self.takes = iter(readings), clock, iter(takes)

    def read(self) -> dict:
        if self.clock:
            self.clock[0] += next(self.takes, 0.0)
        return next(self.readings)


def sampled(tmp_path: Path, takes: list[float], count: int, jump: dict[int, float] | None = None) -> tuple[Path, list[float]]:
    """Sample `count` times every second by a made clock. Returns the file, and how long each wait was."""
    clock, waits = [1000.0], []

    def told_to_end(seconds: float) -> bool:
        waits.append(seconds)
        clock[0] += seconds + (jump or {}).get(len(waits), 0.0)
        return len(waits) >= count

    out = tmp_path / "host.jsonl"
    collector = Made(({"x_w": float(i)} for i in range(count)), clock, takes)
    assert poller.sample(collector, out, 1.0, told_to_end, lambda: clock[0]) == ""
    return out, waits


def times_of(out: Path) -> list[float]:
    return [s["time_s"] for s in poller.read(out)[1]]


def test_samples_carry_the_time_at_which_they_were_taken(tmp_path):
    out, waits = sampled(tmp_path, [0.25, 0.5, 0.0], 3)
    assert times_of(out) == [0.0, 1.0, 2.0] and waits == [0.75, 0.5, 1.0]
    header, samples, _ = poller.read(out)
    assert header["collector"] == "made" and header["interval_s"] == 1.0 and header["started_utc"].endswith("+00:00")
    assert [s["x_w"] for s in samples] == [0.0, 1.0, 2.0]


def test_a_late_sample_is_not_made_up_for(tmp_path):
    out, _ = sampled(tmp_path, [0.0, 3.25, 0.0], 4)
    assert times_of(out) == [0.0, 1.0, 5.0, 6.0]
    assert poller.summary(out)["longest_gap_s"] == 4.0


def test_a_clock_that_jumps_neither_bursts_nor_hangs(tmp_path):
    out, waits = sampled(tmp_path, [], 5, jump={2: 1000.0, 3: -500.0})
    assert max(waits) <= 1.0 and min(waits) >= 0.0
    assert times_of(out) == [0.0, 1.0, 1002.0, 503.0, 504.0]
    assert poller.summary(out)["longest_gap_s"] == 1001.0


def test_nothing_is_timed_by_the_wall_clock():
    defaults = [inspect.signature(f).parameters["clock"].default for f in (poller.sample, host.Host)]
    assert defaults == [time.monotonic, time.monotonic]


def test_a_number_that_json_has_no_word_for_is_null(tmp_path):
    readings = [{"a_w": float("nan"), "b_w": float("inf"), "c_w": None, "d_w": 1.0}]
    poller.sample(Made(readings), tmp_path / "host.jsonl", 1.0, lambda _: True)
    line = (tmp_path / "host.jsonl").read_text().splitlines()[1]
    assert {k: v for k, v in json.loads(line).items() if k != "time_s"} == {"a_w": None, "b_w": None, "c_w": None, "d_w": 1.0}


def test_a_collector_that_is_not_usable_says_why_in_its_file(tmp_path):
    collector = Made([])
    collector.unusable = "no such sensor"
    assert poller.sample(collector, tmp_path / "host.jsonl", 1.0, lambda _: False) == "no such sensor"
    found = poller.summary(tmp_path / "host.jsonl")
    assert found["note"] == "no such sensor" and found["count"] == 0 and found["quantities"] == {}


def test_a_resumed_run_begins_a_new_file(tmp_path):
    out = tmp_path / "host.jsonl"
    for _ in range(3):
        poller.sample(Made([{}]), out, 1.0, lambda _: True)
    assert [p.name for p in poller.files(tmp_path)] == ["host.jsonl", "host-2.jsonl", "host-3.jsonl"]
    assert poller.free(out).name == "host-4.jsonl" and poller.files(tmp_path, "gpu") == []


@pytest.mark.parametrize("fails_at", [1, 3])
@pytest.mark.parametrize("short", [True, False])
def test_a_full_disk_ends_it_quietly(tmp_path, monkeypatch, fails_at, short):
    calls = []
    really = os.write

    def limited(descriptor: int, data: bytes) -> int:
        calls.append(data)
        if len(calls) < fails_at:
            return really(descriptor, data)
        if short:
            return really(descriptor, data[:7])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", limited)
    why = poller.sample(Made({"x_w": 1.0} for _ in range(9)), tmp_path / "host.jsonl", 1.0, lambda _: False)
    assert why == "host.jsonl: No space left on device" and len(calls) == fails_at
    if fails_at == 3:
        assert poller.summary(tmp_path / "host.jsonl")["count"] == 1 and poller.read(tmp_path / "host.jsonl")[2] == 0


# ------------------------------------------------------------------------------------------------------ reading a file

STARTED = "2026-12-01T00:00:00+00:00"
HEADER = json.dumps({"schema": 1, "collector": "host", "started_utc": STARTED, "interval_s": 1, "unusable": ""})


def kept(tmp_path: Path, *lines: str, end: str = "\n") -> Path:
    path = tmp_path / "host.jsonl"
    path.write_text("\n".join((HEADER, *lines)) + end, encoding="utf-8")
    return path


def line(time_s: float, **values: float | None) -> str:
    return json.dumps({"time_s": time_s, **values})


def test_a_summary(tmp_path):
    path = kept(tmp_path, line(0, a_w=None, b_c=None), line(1, a_w=3.0, b_c=None), line(4, a_w=1.0, b_c=None), line(5, a_w=2.0))
    found = poller.summary(path)
    assert (found["count"], found["duration_s"], found["longest_gap_s"], found["note"]) == (4, 5, 3, "")
    assert found["quantities"] == {
        "a_w": {"count": 3, "min": 1.0, "median": 2.0, "max": 3.0},
        "b_c": {"count": 0, "min": None, "median": None, "max": None},
    }


@pytest.mark.parametrize("count", [0, 1, 2])
def test_too_few_samples_are_said_and_not_summed_up(tmp_path, count):
    found = poller.summary(kept(tmp_path, *(line(i, a_w=1.0) for i in range(count))))
    assert found["note"].startswith(f"{count} samples are too few") and found["quantities"] == {} and found["count"] == count


@pytest.mark.parametrize("torn", ['{"time_s": 3, "a_', "{", "nonsense"])
def test_a_torn_last_line_is_forgiven(tmp_path, torn):
    found = poller.summary(kept(tmp_path, *(line(i, a_w=1.0) for i in range(3)), torn, end=""))
    assert (found["count"], found["left_out"], found["note"]) == (3, 0, "")


@pytest.mark.parametrize(
    "bad",
    ["{", "[1]", '"x"', "{}", '{"time_s": null}', '{"time_s": "1"}', '{"time_s": true}', '{"time_s": NaN}', "[" * 99_999, "\x00"],
)
def test_a_line_that_is_no_sample_is_counted_and_left_out(tmp_path, bad):
    found = poller.summary(kept(tmp_path, line(0, a_w=1.0), bad, line(1, a_w=2.0), line(2, a_w="3")))
    assert (found["count"], found["left_out"]) == (3, 1)
    assert found["quantities"]["a_w"] == {"count": 2, "min": 1.0, "median": 1.5, "max": 2.0}


@pytest.mark.parametrize("content", [b"", b"\n", b"{", b"[]\n", b'{"schema": 2}\n', b"\xff\xfe\n"])
def test_a_file_without_a_header_is_refused(tmp_path, content):
    path = tmp_path / "host.jsonl"
    path.write_bytes(content)
    with pytest.raises(RecordError, match="host.jsonl:1: no header"):
        poller.summary(path)


def test_a_file_that_is_not_there_is_one_line(tmp_path):
    with pytest.raises(RecordError, match="cannot be read: No such file"):
        poller.summary(tmp_path / "host.jsonl")


# ------------------------------------------------------------------------------------------------------- the process


def until(condition, process: subprocess.Popen | None = None) -> bool:
    """Wait for what must come, however slow the machine is; gives up when `process` is gone."""
    for _ in range(3000):
        if condition():
            return True
        if process and process.poll() is not None:
            return condition()
        time.sleep(0.01)
    return False


def lines_of(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def test_a_real_poller_samples_until_it_is_stopped(tmp_path):
    running = poller.start(tmp_path / "telemetry", 0.05)
    assert running.reason == "" and until(lambda: lines_of(running.path) >= 5, running.process)
    pid = running.process.pid
    assert os.getsid(pid) == pid and os.getpriority(os.PRIO_PROCESS, pid) == 19
    assert running.stop() == "" and running.stop() == ""
    assert not Path(f"/proc/{pid}").exists()
    found = poller.summary(running.path)
    assert found["count"] >= 4 and found["left_out"] == 0
    assert found["quantities"]["memory_available_bytes"]["min"] > 0 and set(found["quantities"]) == NOTHING
    assert [p.name for p in (tmp_path / "telemetry").iterdir()] == ["host.jsonl"]  # it said nothing
    again = poller.start(tmp_path / "telemetry", 0.05)
    assert again.path.name == "host-2.jsonl" and until(lambda: lines_of(again.path) >= 2, again.process)
    assert again.stop() == "" and len(poller.files(tmp_path / "telemetry")) == 2


def test_a_poller_ends_with_the_process_that_started_it(tmp_path):
    code = (
        "import os, sys, time\nfrom pathlib import Path\nfrom escher_kernels.telemetry import poller\n"
        "running = poller.start(Path(sys.argv[1]), 0.05)\nprint(running.process.pid, flush=True)\ntime.sleep(600)"
    )
    driver = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    pid = int(driver.stdout.readline())
    stat = Path(f"/proc/{pid}/stat")
    assert until(lambda: lines_of(tmp_path / "host.jsonl") >= 2)
    driver.kill()
    driver.communicate()
    gone = until(lambda: not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z")
    if not gone:
        os.kill(pid, signal.SIGKILL)
    assert gone


def test_a_poller_that_was_ended_from_outside_is_told_of(tmp_path):
    running = poller.start(tmp_path, 0.05)
    assert until(lambda: lines_of(running.path) >= 2, running.process)
    running.process.terminate()
    running.process.wait()
    assert running.stop() == f"it ended early, with exit status {-signal.SIGTERM}"
    assert poller.summary(running.path)["left_out"] == 0


@pytest.mark.parametrize("interval_s", [0, -1, float("nan"), float("inf")])
def test_an_interval_that_cannot_be_is_a_reason(tmp_path, interval_s):
    running = poller.start(tmp_path, interval_s)
    assert "cannot be" in running.reason and running.stop() == running.reason and not list(tmp_path.iterdir())
    with pytest.raises(SystemExit) as refused:
        command.main(["--out", str(tmp_path / "x"), "--interval-s", str(interval_s)])
    assert refused.value.code == 2


def test_what_keeps_a_poller_from_starting_is_a_reason(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("", encoding="utf-8")
    running = poller.start(tmp_path / "file" / "telemetry", 1.0)
    assert "Not a directory" in running.reason and running.stop() == running.reason
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no-python"))
    running = poller.start(tmp_path, 1.0)
    assert "no-python" in running.reason and running.stop() == running.reason


def test_a_poller_that_fails_says_its_last_words(tmp_path):
    running = poller.start(tmp_path, 1.0, collector="unknown")
    running.process.wait()
    assert "invalid choice: 'unknown'" in running.stop() and list(tmp_path.glob("unknown.err"))


def test_without_a_standard_input_it_ends_at_once(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "escher_kernels.telemetry", "--out", str(tmp_path / "host.jsonl")],
        stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0 and done.stderr == b"" and len(times_of(tmp_path / "host.jsonl")) == 1
