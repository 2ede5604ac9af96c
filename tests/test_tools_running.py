"""Running outside tools, keeping what they said, and what must not stay in it. The tools are small scripts."""

import _thread
import json
import os
import re
import stat
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from conftest import CPU, MI355X, SAMPLES
from hypothesis import example, given, settings
from hypothesis import strategies as st

from escher_kernels.records import Record, RecordError, RecordFile, Writer
from validation import derive, tools
from validation.tools import Command, Parsed, running
from validation.tools.running import Log

FIXTURES = sorted((Path(__file__).parent / "fixtures" / "tools").rglob("*.*"))
ROW = "row 12.5 GB/s\n"


def silent(_: str) -> None: ...


# ---- what a log is made of: clean, redact, reading


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"a \x1b[1;32mPASS\x1b[0m\n", "a PASS\n"),
        (b"\x1b[2K\x1b[1Grow 1.5\n", "row 1.5\n"),
        (b"\x1b(B\x1b[mrow 1.5\x1b7\x1b8\x1b=\x1bc\n", "row 1.5\n"),
        (b"\x1b]0;title 9.9\x07row 1.5\n", "row 1.5\n"),
        (b"\x1b]8;;http://x/\x1b\\link\x1b]8;;\x1b\\ 1.5\n", "link 1.5\n"),
        (b"\x1b]never closed\nrow 1.5\n", "never closed\nrow 1.5\n"),
        ("\x9b31mrow\x9b0m 1.5\n", "row 1.5\n"),
        (b"row 1.5\n\x1b[3", "row 1.5\n"),
        (b"10 %\r50 %\r100 %\nnext\r\n", "100 %\nnext\n"),
        (b"10 %\rrow 1.5\r\r\n", "row 1.5\n"),
        ("\ufeffrow 1.5\r\n", "row 1.5\n"),
        ("row 1.5\r\n".encode("utf-8-sig"), "row 1.5\n"),
        ("r\u00f6w 1.5\r\n".encode("utf-16"), "r\u00f6w 1.5\n"),
        (b"\xfe\xff" + "row 1.5\n".encode("utf-16-be"), "row 1.5\n"),
        ("row 1.5\n".encode("utf-16-le"), "row 1.5\n"),
        (b"row\x00 1.5\x08\x7f\n", "row 1.5\n"),
        (b"tab\t1.5 \xff\n", "tab\t1.5 \ufffd\n"),
        (b"", ""),
    ],
)
def test_clean(data, text):
    assert tools.clean(data) == text
    assert tools.clean(text) == text


SECRETS = [  # a line, what must not be left of it, what must
    ("HF_TOKEN=hush-hush 7.5", "hush", "HF_TOKEN=[redacted] 7.5"),
    ("export MY_API_KEY='hush hush'; x", "hush", "; x"),
    ('aws_secret_access_key = "hush hush", 5', "hush", ", 5"),
    ('{"api_key": "hu\\"sh", "n": 5}', "sh", '{"api_key": "[redacted]", "n": 5}'),
    ('{"DB_PASSWORD":"hush","n":5}', "hush", '"n":5}'),
    ("Password: hush", "hush", "Password: [redacted]"),
    ("tool --token hush --size 5", "hush", "--size 5"),
    ("tool --api-key=hush --size 5", "hush", "--size 5"),
    ("Authorization: Bearer hush.hush-hush", "hush", "Authorization"),
    ("curl -H 'X: Basic aHVzaDpodXNoaHVzaA=='", "aHVz", "curl"),
    ("login hf_hushhushhush done", "hush", "done"),
    ("ghp_hush0123456789abcdef", "hush", "[redacted]"),
    ("AKIAHUSH0123456789AB", "HUSH", "[redacted]"),
    ("eyJhbGciOiJI.eyJodXNoIjoxfQ.hush", "hush", "[redacted]"),
    ("https://me:hush@node.example/x", "hush", "@node.example/x"),
    ("git clone https://hush@node.example/x", "hush", "@node.example/x"),
    ("[me@node-7 ~]$ rvs -c x", "node-7", "rvs -c x"),
    ("ssh me@node-7.lab.example uptime", "node-7", "uptime"),
    ("Device 0: (UUID: GPU-8f3b0e1c-1111-2222-3333-0123456789ab)", "8f3b0e1c", "Device 0:"),
    ("Device: 2,  AMD,  GPU-0123456789abcdef,  c1:0.0", "0123456789abcdef", ",  c1:0.0"),
    ('"asic_serial": "0xHUSH", "n": 5', "HUSH", '"asic_serial": "[redacted]", "n": 5'),
    ("Serial Number: HUSH-1 rev 2", "HUSH", "rev 2"),
    ("#  Rank  0 Group  0 Pid  41123 on  node-7 device  0 [0000:19:00] GPU", "node-7", "device  0 [0000:19:00] GPU"),
    ("#  Rank  0 Group  0 Pid  41123 on  node-7 device  0 [0000:19:00] GPU", "41123", "Rank  0"),
    ("node-7: Test NCCL failure common.cu:12 'x'", "node-7", "Test NCCL failure common.cu:12 'x'"),
    (" .. node-7 pid 41123: Test failure common.cu:11", "node-7", "Test failure common.cu:11"),
    ("node-7:41123:41200 [3] NCCL WARN it", "node-7", "[3] NCCL WARN it"),
    ("[node-7:41123] mpi says", "node-7", "mpi says"),
    ("Hostname     : node-7", "node-7", "Hostname     : host"),
    ('{"pid":41123,"hostname":"node-7","device":0}', "node-7", ',"device":0}'),
    ('{"pid":41123,"hostname":"node-7","device":0}', "41123", ',"device":0}'),
    ("node-7\nDevice 0: NVIDIA H200 (00000000:19:00)", "node-7", "\nDevice 0: NVIDIA H200 (00000000:19:00)"),
    ('"0: NVIDIA H200 (00000000:19:00): (node-7)"', "node-7", '"0: NVIDIA H200 (00000000:19:00): (host)"'),
    ("stress-ng: info:  [41123] stream: memory rate: 5.0", "41123", "stream: memory rate: 5.0"),
    ("USER=hush HOST=node-7 N=5", "hush", "N=5"),
    ("/home/hush/rocm/bin/rvs", "hush", "/rocm/bin/rvs"),
]


@pytest.mark.parametrize(("line", "hidden", "left"), SECRETS)
def test_redact(line, hidden, left):
    out = tools.redact(line)
    assert hidden not in out and left in out
    assert tools.redact(out) == out
    if line.startswith("{"):
        json.loads(out)


@pytest.mark.parametrize(
    "line",
    [
        "password:\n  1048576  12.5  GB/s",
        "serial:\n12.5",
        "hostname:\n12.5",
        "[RESULT] [  4112.100004] [gst-bf16] [GPU:: 11843] GFLOPS 1504582",
        "[a] pcie-bandwidth [ 1/16] [CPU:: 0] [GPU:: 2 - 42583 - 0000:05:00.0] h2d::true d2h::false 57.6 GBps",
        "     8388608       2097152     float     sum      -1    91.10   92.08  161.14      0",
        "Intel(R) Xeon(R) CPU @ 2.20GHz, 5 basic arithmetic operations, sk-1",
        "Transfer 00 | 33.520 GB/s | 2.002 ms | 67108864 bytes | G0 -> GPU00:004 -> G1",
    ],
)
def test_redact_leaves_figures_alone(line):
    assert tools.redact(line) == line


@pytest.mark.parametrize("path", FIXTURES, ids=lambda p: f"{p.parent.name}/{p.name}")
def test_a_redacted_log_says_what_it_said(path):
    text = tools.clean(path.read_bytes())
    before, kept = tools.read(text), tools.redact(text)
    after = tools.read(kept)
    assert after.records == before.records
    assert (after.tool, after.status, after.rejected_lines) == (before.tool, before.status, before.rejected_lines)
    assert tools.redact(kept) == kept


ENVIRONMENT = ["PATH=/usr/bin", "A=hush", 'B="hush] x\\hush"', "C=1,2", "HF_TOKEN=hush"]


def test_no_cut_of_a_json_log_keeps_its_environment():
    whole = json.dumps({"version": 3, "env": ENVIRONMENT, "nccl_version": 22809, "results": [12.5]})
    for text in (whole, json.dumps(json.loads(whole), indent=1)):
        for end in range(text.index("hush"), len(text) + 1):
            assert "hush" not in tools.redact(text[:end]), text[:end]
        assert json.loads(tools.redact(text)) == {"version": 3, "env": [], "nccl_version": 22809, "results": [12.5]}


PIECES = st.sampled_from(
    ["TOKEN", "api_key", "=", ":", " ", "\n", '"', "'", "env", "[", "]", "{", ",", "12.5", "me@node", "://", "/home/", "serial",
     "pid 5 on x", "\\", "hostname", "--auth", "Bearer ", "0123456789abcdef", "GPU-", "Device 0: ", "a:1:1 [0] ", "\x1b[", "\r"]
)  # fmt: skip


@given(st.lists(PIECES, max_size=12).map("".join))
@example("/home/[://me@node")
@example("Bearer /home/=")
@settings(max_examples=300, deadline=None)
def test_a_second_time_changes_nothing(text):
    once = tools.redact(tools.clean(text))
    assert tools.redact(tools.clean(once)) == once
    assert once.count("\n") == tools.clean(text).count("\n") or '"env' in text


NO_FIGURES = ("nan", "inf", "-1", "1e400", "1.7e300", "0x10", "1,5", "", " 5", "5 ", "N/A", "1_000", "\u0665")


@pytest.mark.parametrize("text", NO_FIGURES)
def test_no_figure_is_no_reading(text):
    assert tools.reading("bandwidth", "case", "tool", text, "GB/s", "mean") is None


def test_a_reading_keeps_the_text_and_scales_nothing():
    r = tools.reading("bandwidth", "case", "tool", "12.50", "MiB/s", "best", ["FAIL: why"], op="copy", src=None)
    assert r.reported == {"value": 12.5, "unit": "MiB/s", "text": "12.50"} and r.flags == ("FAIL: why",)
    assert r.params == {"op": "copy", "statistic": "best"} and tools.base_value(r) == 12.5 * 2**20
    with pytest.raises(ValueError, match="furlongs"):
        tools.reading("bandwidth", "case", "tool", "1", "furlongs", "best")


# ---- executing


@pytest.fixture
def script(tmp_path):
    """`script(body)`: path of an executable shell script, in a folder with a space in its name."""
    home = tmp_path / "my tools"

    def make(body: str, name: str = "tool") -> str:
        home.mkdir(exist_ok=True)
        path = home / name
        path.write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return str(path)

    return make


def execute(*argv: str, **fields) -> tuple[str, Log]:
    return running._execute(Command("fake", "name", argv, **fields), 2)


def alive(pid: int) -> bool:
    """Whether a process still runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def all_gone(path: Path, seconds: float = 5.0) -> bool:
    pids = [int(line) for line in path.read_text().split()]
    end = time.monotonic() + seconds
    while any(map(alive, pids)) and time.monotonic() < end:
        time.sleep(0.01)
    return len(pids) == 2 and not any(map(alive, pids))


def test_what_a_tool_prints_is_kept_with_how_it_ended(script):
    path = script(r'printf "\033[31mout\033[0m\n"; echo err >&2; printf "1 %%\r2 %%\n"; exit 3')
    text, log = execute(path, "-x")
    assert text == "out\nerr\n2 %\n"
    assert log == replace(log, tool="fake", name="name", log=None, argv=(path, "-x"), exit_status=3, timed_out=False, round=2,
                          skipped=None, imported=False, config=None)  # fmt: skip
    assert log.seconds >= 0 and re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", log.started_utc)


def test_a_tool_finds_its_files_its_folder_and_a_plain_locale(script, monkeypatch):
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    monkeypatch.setenv("KEPT", "kept")
    path = script('echo "$LC_ALL $KEPT"; echo "$1 $CONF"; pwd; cat "$1"; ls')
    text, log = execute(path, "{dir}/a.yaml", env={"CONF": "{dir}/a.yaml"}, files={"a.yaml": "actions: 1\n"})
    assert text.splitlines() == ["C kept", "{dir}/a.yaml {dir}/a.yaml", "{dir}", "actions: 1", "a.yaml"]
    assert log.argv == (path, "{dir}/a.yaml") and log.config == "actions: 1\n"
    text, _ = execute(script('echo "$LC_ALL"'), env={"LC_ALL": "POSIX"})
    assert text == "POSIX\n"


def test_a_tool_is_not_asked_to_wait_for_the_keyboard(script):
    read_end, write_end = os.pipe()
    os.write(write_end, b"typed\n")
    os.close(write_end)
    keyboard = os.dup(0)
    os.dup2(read_end, 0)
    try:
        text, _ = execute(script('if read -r line; then echo "$line"; else echo nothing; fi'))
    finally:
        os.dup2(keyboard, 0)
        os.close(keyboard)
        os.close(read_end)
    assert text == "nothing\n"


@pytest.mark.parametrize(
    ("body", "text"),
    [("echo noise; echo row > out.json", "row\n"), ("echo noise; : > out.json", "noise\n"), ("echo noise", "noise\n")],
)
def test_the_result_may_lie_in_a_file(script, body, text):
    assert execute(script(body), output="out.json")[0] == text


def test_a_crash_is_no_exception(script):
    text, log = execute(script("echo row; kill -SEGV $$"))
    assert text == "row\n" and log.exit_status == -11


@pytest.mark.parametrize("how", ["missing", "not executable", "no program"])
def test_what_cannot_be_started_says_why(script, how):
    path = script("echo row")
    if how == "missing":
        path += "-2"
    elif how == "not executable":
        os.chmod(path, 0o644)
    else:
        Path(path).write_bytes(b"\x7fELF nothing")
    text, log = execute(path)
    assert text == "" and log.exit_status is None and path in log.skipped and "cannot be run" in log.skipped


def test_a_long_output_is_cut(script, monkeypatch):
    monkeypatch.setattr(running, "LARGEST_LOG_BYTES", 1000)
    text, _ = execute(script('i=0; while [ $i -lt 100 ]; do echo "0123456789012345678"; i=$((i+1)); done'))
    assert len(text) == 1000


LEAVES_A_CHILD = 'sleep 60 & echo $! > "{pids}"; echo $$ >> "{pids}"; echo row; '


def test_time_up_ends_the_whole_group(script, tmp_path):
    pids = tmp_path / "pids"
    text, log = execute(script(LEAVES_A_CHILD.format(pids=pids) + "sleep 60"), timeout_s=0.5)
    assert text == "row\n" and log.timed_out and log.exit_status is None
    assert all_gone(pids)


def test_a_child_that_would_outlive_its_tool_is_ended(script, tmp_path):
    pids = tmp_path / "pids"
    text, log = execute(script(LEAVES_A_CHILD.format(pids=pids) + "exit 0"), timeout_s=30)
    assert text == "row\n" and log.exit_status == 0 and not log.timed_out
    assert all_gone(pids)


def test_ctrl_c_leaves_nothing_running(script, tmp_path):
    pids = tmp_path / "pids"

    def interrupt() -> None:
        end = time.monotonic() + 20
        while not (pids.is_file() and pids.read_text().count("\n") == 2) and time.monotonic() < end:
            time.sleep(0.01)
        _thread.interrupt_main()

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            execute(script(LEAVES_A_CHILD.format(pids=pids) + "sleep 60"), timeout_s=30)
    finally:
        thread.join()
    assert all_gone(pids)


# ---- which tools, in which order


@pytest.fixture
def in_dir(made_run, tmp_path):
    """`in_dir(records, found)`: a made run that may be written to, in a folder with a space in its name."""

    def make(records=(), found=CPU) -> derive.LoadedRun:
        home = tmp_path / "a run"
        home.mkdir(exist_ok=True)
        return replace(made_run(records, found=found), directory=home)

    return make


def fake_module(commands, name: str = "fake-tool") -> SimpleNamespace:
    """A tool whose only row is ROW."""
    def parse(text: str) -> Parsed:
        rows = re.findall(r"^row (\S+) GB/s$", text, re.M)
        found = [tools.reading("bandwidth", "row", "fake", r, "GB/s", "mean", op="copy") for r in rows]
        return Parsed("fake", tuple(found), None if rows else tools.UNPARSED, "" if rows else "no row")

    return SimpleNamespace(
        NAME="Fake", EXECUTABLES=(name, "other-name"), commands=commands, parse=parse, recognises=lambda text: "row " in text
    )


@pytest.fixture
def only(monkeypatch):
    """`only(fake=module, ...)`: there are no other tools, and those of other names than the real ones fit every machine."""
    fits = running.fits

    def use(**modules: SimpleNamespace) -> None:
        real = tools.MODULES
        monkeypatch.setattr(tools, "MODULES", tuple(modules))
        monkeypatch.setattr(tools, "module", modules.__getitem__)
        monkeypatch.setattr(running, "fits", lambda name, kind: name not in real or fits(name, kind))

    return use


def test_place_finds_executables_by_path_and_in_rocms_folder(script, in_dir, only, monkeypatch, tmp_path):
    rocm = tmp_path / "rocm bin"
    rocm.mkdir()
    os.rename(script("", "far"), rocm / "far")
    near = script("", "near")
    script("", "here")
    only(fake=SimpleNamespace(EXECUTABLES=("near", "far", "here", "nowhere")))
    monkeypatch.setattr(running, "ROCM_BIN", str(rocm))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "my tools")  # a relative entry: the tools run in another folder
    found = running.place(in_dir(found=MI355X), 2**30)
    assert found.executables == {"near": near, "far": str(rocm / "far"), "here": str(Path(near).with_name("here"))}
    assert (found.kind, found.target, found.devices, found.plateau_bytes) == ("rocm", "mi355x", 8, 2**30)
    monkeypatch.chdir(tmp_path / "my tools")
    monkeypatch.setenv("PATH", "")  # an empty entry is not the folder one happens to be in
    assert running.place(in_dir(found=MI355X), None).executables == {"far": str(rocm / "far")}


def test_place_of_a_cpu_tells_its_threads():
    run = derive.load(SAMPLES / "cpu")
    told = run.files["bandwidth"].run.parameters
    found = running.place(run, None)
    assert (found.kind, found.threads, list(found.cpus)) == ("cpu", told["threads"], told["affinity"])


@pytest.mark.parametrize(("found", "rounds"), [(CPU, 3), (MI355X, 1)])
def test_ours_is_measured_before_and_after_every_execution(script, in_dir, only, monkeypatch, found, rounds):
    path = script(f'printf "{ROW}"', "fake-tool")
    monkeypatch.setenv("PATH", f"{Path(path).parent}:{os.environ['PATH']}")
    missing = Path(path).with_name("gone")
    names = [("one", path), ("gone", str(missing)), ("two", path)]
    only(
        fake=fake_module(lambda place: [Command("fake", n, (p,)) for n, p in names]),
        absent=fake_module(lambda place: pytest.fail("it is not installed"), "absent-tool"),
        idle=fake_module(lambda place: []),
    )
    order, run = [], in_dir(found=found)

    def measure(*_):
        order.append(f"ours-{sum(x.startswith('ours') for x in order) + 1}")
        return order[-1]

    execute_ = running._execute
    monkeypatch.setattr(running, "_measure_ours", measure)
    monkeypatch.setattr(running, "_execute", lambda c, r: (order.append(c.name), execute_(c, r))[1])
    told = []
    running.run_tools(run, None, told.append)
    if rounds == 1:  # a GPU's tools take minutes: around each
        assert order == ["ours-1", "one", "ours-2", "gone", "two", "ours-3"]
    else:
        assert order == ["ours-1", *(x for r in range(rounds) for x in ("one", "gone", "two", f"ours-{r + 2}"))]
    logs = running.logs(run.directory)
    skipped = {log.name: log.skipped for log in logs if log.skipped}
    assert skipped == {
        "absent": "absent-tool or other-name is not installed", "idle": "nothing to run on this machine",
        "gone": f"{missing} cannot be run: No such file or directory",
    }  # fmt: skip
    ran = [log for log in logs if not log.skipped]
    step = 1 if rounds == 1 else 2
    around = [(f"ours-{i // step + 1}", f"ours-{i // step + 2}") for i in range(2 * rounds)]
    assert [log.ours for log in ran] == around
    assert [(log.name, log.round) for log in ran] == [(name, r) for r in range(rounds) for name in ("one", "two")]
    assert all((running.folder(run.directory) / log.log).read_text() == ROW for log in ran)
    assert [r.reported["value"] for log in ran for r in running.parsed(run.directory, log).records] == [12.5] * len(ran)
    assert "Fake: not installed" in told


def test_where_nothing_runs_ours_is_not_measured(in_dir, only, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(running, "ROCM_BIN", "/nowhere")
    monkeypatch.setattr(running, "_measure_ours", lambda *_: pytest.fail("nothing to compare it with"))
    only(fake=fake_module(None), rvs=fake_module(None), host_stream=fake_module(None, "stream"))
    run = in_dir()
    running.run_tools(run, None, silent)
    assert {log.tool: log.skipped for log in running.logs(run.directory)} == {
        "fake": "fake-tool or other-name is not installed", "host_stream": "stream or other-name is not installed",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "kinds"),
    [("rvs", ["rocm"]), ("transferbench", ["rocm"]), ("rocm_bw", ["rocm"]), ("nvbandwidth", ["cuda"]),
     ("rccl", ["rocm", "cuda"]), ("host_stream", ["cpu"])],
)  # fmt: skip
def test_which_tool_fits_which_device(name, kinds):
    assert [kind for kind in ("rocm", "cuda", "cpu") if running.fits(name, kind)] == kinds


# ---- our own side


@pytest.mark.parametrize("name", ["cpu", "mi355x"])
def test_what_of_ours_is_measured_again(name):
    run = derive.load(SAMPLES / name)
    found = {f: running._own_cases(run, f, patterns) for f, patterns in running.OWN_CASES[run.kind].items()}
    copies = [r.case for r in derive.bandwidth(run).rows if r.params["op"] == "copy" and r.params.get("plateau")]
    assert len(copies) == 3
    if name == "cpu":
        assert found == {"bandwidth": ["stream.torch", "stream.plain", "stream.streaming"]}
        return
    peers = ["square.8192", "peer.8192x8192x16384", "peer.4096x4864x8192"]
    assert sorted(found["compute"]) == sorted(peers)
    memory = [f"{m}.{size}MiB" for m in ("pinned", "pageable") for size in (64, 256, 1024)]
    hosts = [f"host.{way}.{m}" for way in ("to_device", "from_device") for m in memory]
    assert found["bandwidth"] == [*copies, *hosts]


@pytest.fixture
def no_measuring(monkeypatch):
    """Stands in for the process that measures: `(argv, ...)` in a list, and what each shall do, "ok" where nothing is said."""
    calls, ends = [], {}

    def run_(argv, timeout_s, out, err, **where):
        calls.append(argv)
        family, target = argv[3], Path(argv[argv.index("--run") + 1])
        end = ends.get(family, "ok")
        if end == "ok":
            (target / "records").mkdir(exist_ok=True)
            (target / "records" / f"01_{family}.jsonl").write_text("{}")
        elif end == "failed":
            err.write(b"a line\nerror: no device\n")
        return {"ok": 0, "failed": 2, "slow": None}[end]

    monkeypatch.setattr(running, "_run", run_)
    return calls, ends


def sample_in(tmp_path: Path) -> derive.LoadedRun:
    return replace(derive.load(SAMPLES / "mi355x"), directory=tmp_path)


def test_ours_is_measured_as_the_run_was_but_quickly(no_measuring, tmp_path):
    calls, _ = no_measuring
    run = sample_in(tmp_path)
    told = []
    assert [running._measure_ours(run, told.append) for _ in range(2)] == ["ours-1", "ours-2"]
    compute, bandwidth, *_ = calls
    assert compute[1:6] == ["-m", "escher_kernels", "compute", "--run", str(tmp_path / "raw/tools/ours-1")]
    assert compute[6] == "--only" and "peer.8192x8192x16384" in compute and bandwidth[3] == "bandwidth"
    for argv in calls:
        assert argv[argv.index("--budget") + 1] == "quick" and argv[argv.index("--workload") + 1] == "escher_14b_480p"
        assert not {"--depth", "--tokens", "None"} & set(argv)
    assert told == ["ours: compute", "ours: bandwidth"] * 2


def test_a_failure_of_ours_is_told_and_leaves_the_tool(no_measuring, tmp_path):
    calls, ends = no_measuring
    ends |= {"compute": "failed", "bandwidth": "slow"}
    told = []
    assert running._measure_ours(sample_in(tmp_path), told.append) is None
    assert told[1] == "ours: compute failed: error: no device" and "bandwidth was stopped after" in told[3]
    ends["bandwidth"] = "ok"
    (tmp_path / "raw" / "tools" / "ours-7").mkdir()
    assert running._measure_ours(sample_in(tmp_path), silent) == "ours-8"


# ---- keeping


def test_a_kept_log_reads_as_it_was_written(tmp_path):
    when = "2026-01-01T00:00:00+00:00"
    log = Log("fake", "gst", None, ("t", "{dir}/x"), "conf: 1\n", 3, False, when, 1.5, round=2, ours=("ours-1",))
    kept = running.keep(tmp_path, "row 1.5 HF_TOKEN=hush\n", log)
    assert kept == replace(log, log="01_gst.log") and running.logs(tmp_path) == [kept]
    assert (tmp_path / "raw/tools/01_gst.log").read_text() == "row 1.5 HF_TOKEN=[redacted]\n"
    assert sorted(p.name for p in running.folder(tmp_path).iterdir()) == ["01_gst.json", "01_gst.log"]


@pytest.mark.parametrize(
    ("argv", "kept"),
    [
        (("t", "--token", "hush", "--size", "5"), ("t", "--token", "[redacted]", "--size", "5")),
        (("t", "--api-key=hush", "x"), ("t", "--api-key=[redacted]", "x")),
        (("t", "-H", "Authorization: Bearer hush.hush-hush"), ("t", "-H", "Authorization: [redacted]")),
        (("/home/hush/bin/t", "-c", "{dir}/a.yaml", ""), ("/home/user/bin/t", "-c", "{dir}/a.yaml", "")),
        (("t", "-b", "512", "-t", "a", "b"), ("t", "-b", "512", "-t", "a", "b")),
        ((), ()),
    ],
)
def test_a_kept_command_line_holds_no_secret(tmp_path, argv, kept):
    log = running.keep(tmp_path, "row", Log("fake", "a", None, argv))
    assert running.logs(tmp_path) == [log] and log.argv == kept


def test_why_a_tool_did_not_run_holds_no_secret(tmp_path):
    running.keep(tmp_path, None, Log("fake", "a", None, skipped="/home/hush/t cannot be run: HF_TOKEN=hush"))
    assert running.logs(tmp_path)[0].skipped == "/home/user/t cannot be run: HF_TOKEN=[redacted]"


CONFIG = '''\
# by hush@node-7
actions:
- name: gst-bf16
  module: gst
  device: all
  matrix_size_a: 8192
  api_key: hush,hush
  password: "hush: hush"
  path: {conf: /home/hush/x.conf, token: hush}
  listed: [hf_hushhushhush.x, 5]
  url: https://me:hush@node.example/x
'''


def test_a_configuration_that_is_written_anew_keeps_what_it_refers_to():
    text = "actions: &a\n- {name: x, token: hush}\n- {sizes: [1, 2.5, null], other: *a}\n"
    found = yaml.safe_load(tools.redact_config(text))
    assert found["actions"][0] == {"name": "x", "token": "redacted"} and found["actions"][1]["sizes"] == [1, 2.5, None]
    assert found["actions"][1]["other"] is found["actions"]
    for same in ("no: [yaml", "a: 1  # kept as it is\n"):
        assert tools.redact_config(same) == same


def test_a_kept_configuration_holds_no_secret_and_is_still_yaml(tmp_path):
    running.keep(tmp_path, "row", Log("fake", "a", None, config=CONFIG))
    (log,) = running.logs(tmp_path)
    (action,) = yaml.safe_load(log.config)["actions"]
    assert [action[x] for x in ("name", "module", "matrix_size_a", "path")] == [
        "gst-bf16", "gst", 8192, {"conf": "/home/user/x.conf", "token": "redacted"},
    ]  # fmt: skip
    assert action["password"] == "redacted" and action["listed"] == ["redacted.x", 5]
    assert re.findall("hush|node-7", log.config) == []
    assert running.keep(tmp_path, "row", Log("fake", "a", None, config=log.config)).config == log.config


def test_numbers_go_on_and_nothing_is_replaced(tmp_path):
    home = running.folder(tmp_path)
    home.mkdir(parents=True)
    for name in ("07_orphan.log", "junk.txt", "x_y.log", ".hidden_1"):
        (home / name).write_text("kept")
    (home / "ours-30").mkdir()
    names = [running.keep(tmp_path, "row", Log("fake", "a", None)).log for _ in range(2)]
    assert names == ["08_a.log", "09_a.log"] and (home / "07_orphan.log").read_text() == "kept"
    (home / "98_b.log").touch()
    order = [running.keep(tmp_path, "row", Log("fake", n, None)).log for n in ("z", "c", "a")]
    assert order == ["99_z.log", "100_c.log", "101_a.log"]
    assert [log.log for log in running.logs(tmp_path)] == [*names, *order]


GOOD = {"tool": "fake", "name": "a", "log": "01_a.log"}
ODD = (
    {"tool": 5}, {"name": None}, {"log": 3}, {"log": "../../run.json"}, {"log": "/etc/hostname"}, {"log": ""}, {"log": "a\0b"},
    {"log": "\ud800"}, {"ours": "ours-1"}, {"ours": [5]}, {"ours": [[]]}, {"ours": ["../.."]}, {"argv": {}}, {"timed_out": "no"},
    {"seconds": "5"}, {"exit_status": 1.5}, {"config": []}, {"skipped": False}, {"more": 1},
)  # fmt: skip


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"\xff\xfe", b"[]", b"3", b"null", b'"x"', b"{}", b'{"tool": NaN}']
    + [json.dumps({k: v for k, v in GOOD.items() if k != gone}).encode() for gone in GOOD]
    + [json.dumps(GOOD | odd).encode() for odd in ODD],
)
def test_a_damaged_description_is_one_line(tmp_path, content):
    home = running.folder(tmp_path)
    home.mkdir(parents=True)
    (home / "01_a.json").write_bytes(content)
    with pytest.raises(RecordError) as caught:
        running.logs(tmp_path)
    assert "01_a.json" in str(caught.value) and "\n" not in str(caught.value)


def test_a_description_needs_no_more_than_its_name_tool_and_log(tmp_path):
    home = running.folder(tmp_path)
    home.mkdir(parents=True)
    (home / "01_a.json").write_text(json.dumps(GOOD))
    assert running.logs(tmp_path) == [Log("fake", "a", "01_a.log")]


def test_a_run_that_cannot_be_written_to_is_one_line(tmp_path, no_measuring):
    (tmp_path / "raw").write_text("no folder")
    source = tmp_path / "log.txt"
    source.write_text("row 1.5")
    for write in (
        lambda: running.keep(tmp_path, "row", Log("fake", "a", None)),
        lambda: running.import_files(tmp_path, [source], silent),
        lambda: running._measure_ours(sample_in(tmp_path), silent),
    ):
        with pytest.raises(RecordError) as caught:
            write()
        assert "cannot be written" in str(caught.value) and "\n" not in str(caught.value)
    assert running.logs(tmp_path) == []


# ---- importing


def fixture(name: str) -> Path:
    return next(p for p in FIXTURES if f"{p.parent.name}/{p.name}" == name)


def test_imports_are_recognised_redacted_and_named_after_their_files(tmp_path):
    source, told = tmp_path / "f\u00fcr mich, 1.log", []
    text = fixture("transferbench/p2p_uni.csv").read_text(encoding="utf-8")
    source.write_bytes(("HF_TOKEN=hush\r\n" + text.replace("\n", "\r\n")).encode("utf-16"))
    (tmp_path / "other.txt").write_bytes(b"\x80 nothing")
    os.utime(source, (1767225600, 1767225600))
    running.import_files(tmp_path, [source, tmp_path / "other.txt"], told.append)
    first, second = running.logs(tmp_path)
    assert (first.tool, first.name, first.log) == ("transferbench", "f\u00fcr-mich--1", "01_f\u00fcr-mich--1.log")
    assert first.imported and first.started_utc == "2026-01-01T00:00:00+00:00" and not first.ours
    kept = (running.folder(tmp_path) / first.log).read_text(encoding="utf-8")
    assert kept == "HF_TOKEN=[redacted]\n" + tools.clean(text)
    assert running.parsed(tmp_path, first).records == tools.read(text).records
    assert second.tool == "unknown" and running.parsed(tmp_path, second).status == tools.UNPARSED
    assert told == ["f\u00fcr mich, 1.log: transferbench", "other.txt: unknown"]


def test_the_same_log_is_kept_once(tmp_path):
    source, told = tmp_path / "p2p.log", []
    source.write_text("HF_TOKEN=hush\n" + fixture("transferbench/p2p_uni.csv").read_text())
    running.import_files(tmp_path, [source, source], told.append)
    assert told == ["p2p.log: transferbench", "p2p.log: the same log is there already (01_p2p.log)"]
    running.import_files(tmp_path, [source], told.append)
    assert told[2] == told[1] and len(running.logs(tmp_path)) == 1
    source.write_text(source.read_text() + "\n")
    running.import_files(tmp_path, [source], silent)
    assert [log.log for log in running.logs(tmp_path)] == ["01_p2p.log", "02_p2p.log"]


def test_a_configuration_goes_with_the_logs_that_were_made_with_it(tmp_path):
    log, other, config, told = tmp_path / "gst.log", tmp_path / "p2p.csv", tmp_path / "gst.yaml", []
    log.write_bytes(fixture("rvs/gst.log").read_bytes())
    other.write_bytes(fixture("transferbench/p2p_uni.csv").read_bytes())
    config.write_text("# ROCm Validation Suite (RVS)\n" + CONFIG)
    running.import_files(tmp_path, [log, config, other], told.append)
    assert told == ["gst.yaml: the configuration of the RVS logs", "gst.log: rvs", "p2p.csv: transferbench"]
    gst, p2p = running.logs(tmp_path)
    assert (gst.tool, gst.log, p2p.tool, p2p.config) == ("rvs", "01_gst.log", "transferbench", None)
    assert yaml.safe_load(gst.config)["actions"][0]["matrix_size_a"] == 8192 and "hush:" not in gst.config
    assert sorted(p.suffix for p in running.folder(tmp_path).iterdir()) == [".json", ".json", ".log", ".log"]


def test_a_configuration_may_follow_its_log(tmp_path):
    log, config, told = tmp_path / "gst.log", tmp_path / "gst.yaml", []
    log.write_bytes(fixture("rvs/gst.log").read_bytes())
    config.write_text(CONFIG)
    running.import_files(tmp_path, [log], told.append)
    running.import_files(tmp_path, [config, log], told.append)
    assert told[-1] == "gst.log: the same log is there already (01_gst.log), now with its configuration"
    (kept,) = running.logs(tmp_path)
    assert "gst-bf16" in kept.config
    running.import_files(tmp_path, [log], told.append)  # and stays
    assert running.logs(tmp_path) == [kept] and told[-1].endswith("(01_gst.log)")


@pytest.mark.parametrize("others", [[], ["transferbench/p2p_uni.csv"], ["again"]])
def test_a_configuration_without_its_log_or_beside_another_is_one_line(tmp_path, others):
    (tmp_path / "gst.yaml").write_text(CONFIG)
    (tmp_path / "again.yaml").write_text("{actions: []}\n")
    files = [tmp_path / "again.yaml" if x == "again" else fixture(x) for x in others]
    files += [fixture("rvs/gst.log")] if "again" in others else []
    with pytest.raises(RecordError) as caught:
        running.import_files(tmp_path, [tmp_path / "gst.yaml", *files], silent)
    assert str(caught.value) == (
        "gst.yaml and again.yaml are two configurations; import each with its own logs" if "again" in others
        else "gst.yaml is a configuration; give the log that was made with it too"
    )  # fmt: skip
    assert not running.folder(tmp_path).exists()


@pytest.mark.parametrize(
    ("text", "is_one"),
    [
        (CONFIG, True), ("{actions: [], x: 1}", True), ("x: 1\n'actions' : [{a: b}]\n", True), ('{"actions": []}', True),
        ("actions:\n- a\n[RESULT] [  1.2] Action name :a\n", False), ("actions: 5\n", False), ("x:\n  actions: []\n", False),
        ("- actions: []\n", False), ("actions: [\n", False), ("", False),
    ],
)  # fmt: skip
def test_what_is_a_configuration(text, is_one):
    assert tools.is_configuration(text) == is_one


@pytest.mark.parametrize("path", FIXTURES, ids=lambda p: f"{p.parent.name}/{p.name}")
def test_no_log_is_a_configuration(path):
    text = tools.clean(path.read_bytes())
    assert not tools.is_configuration(text) or tools.recognise(text) is None


@pytest.mark.parametrize("bad", ["missing", "folder", "large"])
def test_a_file_that_cannot_be_imported_is_one_line_and_nothing_is_kept(tmp_path, monkeypatch, bad):
    monkeypatch.setattr(running, "LARGEST_LOG_BYTES", 2**20)
    path = tmp_path / "a file"
    if bad == "folder":
        path.mkdir()
    elif bad == "large":
        path.write_bytes(b"0" * (2**20 + 1))
    with pytest.raises(RecordError) as caught:
        running.import_files(tmp_path, [fixture("transferbench/p2p_uni.csv"), path], silent)
    words = {"missing": "No such file", "folder": "Is a directory", "large": "larger than 1 MiB"}[bad]
    assert str(caught.value).startswith(f"{path}: ") and words in str(caught.value) and "\n" not in str(caught.value)
    assert not running.folder(tmp_path).exists()


# ---- reading back


@pytest.mark.parametrize(
    ("text", "fields", "status", "words"),
    [
        (ROW, {}, None, ()),
        (ROW, {"timed_out": True}, tools.INCOMPLETE, ("its time was up",)),
        ("row x\n", {"timed_out": True}, tools.INCOMPLETE, ("its time was up", "no row")),
        (ROW, {"exit_status": 139}, None, ()),
        ("row x\n", {"exit_status": 139}, tools.UNPARSED, ("no row", "exit status 139")),
        ("", {"exit_status": 127}, tools.UNPARSED, ("it printed nothing", "exit status 127")),
        ("a\nlibx.so: cannot open\n", {"exit_status": 127}, tools.UNPARSED, ("last line is 'libx.so: cannot open'", "127")),
        ("a\n", {"imported": True}, tools.UNPARSED, ("not the output of a tool that is known",)),
        (None, {"skipped": "not installed"}, "SKIP", ("not installed",)),
    ],
)
def test_what_a_kept_log_says(tmp_path, only, text, fields, status, words):
    only(fake=fake_module(None))
    kept = running.keep(tmp_path, text, Log("fake", "a", None, **fields))
    found = running.parsed(tmp_path, kept)
    assert found.status == status and all(word in found.reason for word in words) and "\n" not in found.reason
    assert (status is None) == (found.reason == "")
    assert found.tool == ("unknown" if fields.get("imported") else "fake")
    assert len(found.records) == (text == ROW)


def test_a_log_that_is_gone_says_so(tmp_path):
    kept = running.keep(tmp_path, ROW, Log("fake", "a", None))
    (running.folder(tmp_path) / kept.log).unlink()
    found = running.parsed(tmp_path, kept)
    assert found.status == tools.UNPARSED and "01_a.log cannot be read" in found.reason


def test_the_configuration_of_a_run_reaches_its_parser(tmp_path):
    log = next(p for p in FIXTURES if p.name == "gst.log")
    config = "actions:\n- {name: x, module: gst}\n"
    seen = []
    module = tools.module("rvs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "parse", lambda text, config=None: (seen.append(config), Parsed("rvs"))[1])
        for given_ in (config, None):
            running.parsed(tmp_path, running.keep(tmp_path, log.read_text(), Log("rvs", "gst", None, config=given_)))
    assert seen == [config, None]


@pytest.mark.parametrize(
    ("argv", "imported", "size"),
    [
        (("nvbandwidth", "-j", "-b", "18432", "-t", "device_local_copy"), False, 18432 * 2**20),
        (("nvbandwidth", "-j", "-b", "18432"), True, None),  # it would be the command line of another log
        (("nvbandwidth", "-j"), False, None),
        (("nvbandwidth", "-b"), False, None),
        (("nvbandwidth", "-b", "many"), False, None),
    ],
)
def test_the_size_that_our_own_command_asked_for_is_told(tmp_path, argv, imported, size):
    log = Log("nvbandwidth", "local", None, argv, imported=imported)
    kept = running.keep(tmp_path, fixture("nvbandwidth/json.json").read_text(), log)
    found = running.parsed(tmp_path, kept).records
    assert found and {r.params.get("buffer_bytes") for r in found} == {size}


def test_our_own_records_are_read_by_folder(tmp_path, made_run):
    run = made_run([Record("bandwidth", "copy.1", samples_s=(1.0,), bytes_moved=8)])
    for name in ("ours-1", "ours-2"):
        with Writer(running.folder(tmp_path) / name / "records" / "02_bandwidth.jsonl", run.files["bandwidth"].run) as out:
            out.write(run.records("bandwidth")[0])
    found = running.ours(tmp_path, ["ours-1", "ours-9", "ours-2"])
    assert [type(f) for f in found] == [RecordFile] * 2 and found[0].records == run.records("bandwidth")
    (running.folder(tmp_path) / "ours-2" / "records" / "02_bandwidth.jsonl").write_text("x\n")
    with pytest.raises(RecordError, match="ours-2"):
        running.ours(tmp_path, ["ours-2"])
