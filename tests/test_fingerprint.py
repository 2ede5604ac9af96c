"""The head of a run's log: complete, masked, bounded, and never the end of a run."""

from __future__ import annotations

import os
import stat
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from escher_book import fingerprint
from escher_book.fingerprint import OUTPUT_BYTES, TOOLS, Said, head, run_command

ENV = {"host": {"name": "node-17"}, "knobs": {"numa_balancing": "1", "governor": None}}
INFO = {
    "run_id": "smoke-cpu-1", "argv": ["escher", "run", "--workload", "smoke big"], "git": {"commit": "c0ffee", "dirty": True},
    "settings": {"budget": "quick", "tokens": 4680}, "tuning": {"numactl": "--localalloc"}, "method": 3, "source": "measured",
    "target": {"profile": {"key": "mi355x"}}, "workload": {"name": "smoke"},
}  # fmt: skip
UUID = "10f35015-e921-bfab-2eb8-4e9b6664d5f1"


def missing(argv, limit_s):
    raise FileNotFoundError(argv[0])


def saying(text: str | bytes, status: int | None = 0, tool: str = "nvidia-smi", **more):
    """A command where one tool says this and no other is there."""

    def command(argv, limit_s):
        if " ".join(argv) != tool:
            raise FileNotFoundError(argv[0])
        return Said(text.encode() if isinstance(text, str) else text, status, **more)

    return command


def made(command=missing, env=ENV, info=INFO, environ=None, **kwargs) -> str:
    kwargs.setdefault("packages", lambda: [])
    return head(env, info, command, environ or {}, **kwargs)


def section(text: str, title: str) -> list[str]:
    """The lines below a heading."""
    lines = [line.removeprefix("|").removeprefix(" ") for line in text.split("\n")]
    start = next(i for i, line in enumerate(lines) if line.startswith(f"=== {title}"))
    return lines[start + 1 : lines.index("", start)]


def test_it_tells_command_git_settings_knobs_variables_and_packages(tmp_path):
    for cpu in range(3):
        path = tmp_path / f"sys/devices/system/cpu/cpufreq/policy{cpu}/scaling_governor"
        path.parent.mkdir(parents=True)
        path.write_text("powersave\n" if cpu else "performance\n")
    (tmp_path / "proc/sys/vm").mkdir(parents=True)
    (tmp_path / "proc/sys/vm/drop_caches").write_text("0\n")
    (tmp_path / "proc/sys/vm/swappiness").write_text("60\n")
    known = (("torch", "2.13"), ("Altair", "6"), ("TORCH", "1"))
    installed = [SimpleNamespace(metadata={"Name": name}, version=version) for name, version in known]
    text = made(root=tmp_path, environ={"OMP_NUM_THREADS": "4", "HOME": "/root"}, packages=lambda: installed)
    run = section(text, "run")
    assert run[:4] == [
        "command: escher run --workload 'smoke big'", "git: c0ffee, tracked files differ", "target: mi355x", "workload: smoke",
    ]  # fmt: skip
    assert 'settings: {"budget": "quick", "tokens": 4680}' in run and 'tuning: {"numactl": "--localalloc"}' in run
    assert section(text, "kernel knobs") == [
        "numa_balancing: 1", "governor: cannot be read",
        "/sys/devices/system/cpu/cpufreq/policy*/scaling_governor: performance",
        "/sys/devices/system/cpu/cpufreq/policy*/scaling_governor: powersave [2 files]",
        "/proc/sys/vm/swappiness: 60",
    ]  # fmt: skip
    assert section(text, "environment variables") == ["OMP_NUM_THREADS=4"]
    assert section(text, "Python packages") == ["Altair 6, torch 2.13"]


def test_every_tool_has_a_heading_and_a_missing_one_is_one_line():
    text = made(saying("Driver 580\n\nGPU 0\n", 0))
    for argv in TOOLS:
        expected = ": exit status 0" if argv == ("nvidia-smi",) else ": not found"
        assert f"| === {' '.join(argv)}{expected}\n" in text
    assert "| === nvidia-smi: exit status 0\n| Driver 580\n|\n| GPU 0\n|\n" in text
    assert {"uname", "lscpu", "rocminfo", "rocm-smi", "amd-smi", "nvidia-smi"} <= {argv[0] for argv in TOOLS}


@pytest.mark.parametrize(
    "text",
    [
        "RESULT: fake\nRESULT: 1\rRESULT: 2", "\x1b[31mRESULT: red", "a\x0bRESULT: b\x0cRESULT: c\x85RESULT: d\u2028RESULT: e",
        b"\xff\xfeRESULT: \x00\x01", b"\r\nRESULT: x\r\n",
    ],
)  # fmt: skip
def test_no_line_can_be_taken_for_a_line_of_the_run(text):
    out = made(saying(text), info={**INFO, "argv": ["x\nRESULT: y"]}, environ={"OMP_X": "1\nRESULT: z"})
    assert "RESULT:" not in out
    assert all(line.startswith("|") for line in out.split("\n")) and not set(out) & set("\x00\x1b\r")


SECRETS = {  # what a tool prints -> what of it must be gone
    "    GPU UUID                              : GPU-" + UUID: UUID[:8],
    "  Uuid:                    GPU-b39adaf836600b31               ": "b39adaf836600b31",
    "UUID: afff74a1-0000-1000-8054-e92b0a5d57c8": "afff74a1",
    f"  MIG 1g.10gb     Device  0: (UUID: MIG-GPU-{UUID}/7/0)": UUID[:8],
    f"GPU 0: NVIDIA H200 (UUID: GPU-{UUID})": UUID[:8],
    "    Serial Number                         : 1654123038646": "1654123038646",
    "            Chassis Serial Number         : 1820324012345": "1820324012345",
    "        GPU Fabric GUID                   : 0x6d1a8f0e2c": "6d1a8f0e2c",
    "        ASIC_SERIAL: 0xF33397508B72EAAF": "F33397508B72EAAF",
    '        "asic_serial": "0xF33397508B72EAAF",': "F33397508B72EAAF",
    "        PRODUCT_SERIAL: PCB068560-0020": "068560",
    "GPU[0]          : Unique ID: 0xe54792172da5eeb": "e54792172da5eeb",
    "GPU[0]          : Serial Number: 692231000131": "692231000131",
    "GPU[0]  \t\t: GUID:\t\t33678": "33678",
    "CUDA_VISIBLE_DEVICES=GPU-10f35015,MIG-10f35015": "10f35015",
    "root at node-17.example.org on node-17": "node-17",
    "python /home/alice/bench.py": "alice",
    "API_TOKEN=tok-0123456789abcdef": "tok-0123456789abcdef",
    "https://bob:hunter2@proxy.example.org/": "hunter2",
}
KEPT = ("692-2G520-0200-000", "AMD Instinct MI325X", "304", "0000:05:00.0", "6.16.13", "gfx942", "N/A")


@pytest.mark.parametrize("line,secret", SECRETS.items())
def test_what_names_one_machine_or_opens_a_door_is_masked(line, secret):
    text = made(saying(f"Board Part Number: 692-2G520-0200-000\n{line}\nVersion: 6.16.13\n"))
    assert secret not in text and "692-2G520-0200-000" in text and "| Version: 6.16.13\n" in text


def test_figures_and_names_of_products_stay():
    lines = "\n".join(f"Some Property        : {value}" for value in KEPT) + "\nUnique ID: N/A\nGUID: N/A\n"
    assert section(made(saying(lines)), "nvidia-smi") == lines.rstrip().split("\n")


def test_uname_does_not_tell_the_host_even_if_its_name_is_a_word():
    text = made(saying("Linux gpu 6.8.0-60-generic #1 SMP x86_64 GNU/Linux", tool="uname -a"), env={"host": {"name": "gpu"}})
    assert section(text, "uname -a") == ["Linux host 6.8.0-60-generic #1 SMP x86_64 GNU/Linux"]
    assert "a gpu is" in made(saying("a gpu is"), env={"host": {"name": "gpu"}})


def test_secrets_in_arguments_variables_and_settings_are_masked():
    secret = "s3cr3t-value-0123456789"
    info = {**INFO, "argv": ["escher", "--token", secret, f"--api-key={secret}", "--family", "ops"],
            "settings": {"report_config": f"https://u:{secret}@h.example/x"}}  # fmt: skip
    environ = {"NCCL_AUTH": secret, "TORCH_HUB_TOKEN": secret, "OMP_X": f"PASSWORD={secret}", "OMP_NUM_THREADS": "2",
               "AWS_KEY": secret}  # fmt: skip
    text = made(info=info, environ=environ)
    assert secret not in text
    assert "--family ops" in text and "OMP_NUM_THREADS=2" in text and "AWS_KEY" not in text


def test_a_cut_line_does_not_leave_half_a_secret():
    text = made(saying(f"one\nUUID: GPU-{UUID[:11]}", None, cut=True))
    assert section(text, "nvidia-smi: the first 4 bytes, more is left out") == ["one"] and UUID[:6] not in text


@pytest.mark.parametrize(
    "bad", [ValueError("a\nb"), PermissionError(13, "denied"), UnicodeError("x"), MemoryError(), RecursionError("deep")]
)
def test_whatever_a_tool_does_is_one_line(bad):
    def command(argv, limit_s):
        raise bad

    text = made(command)
    for argv in TOOLS:
        assert text.count(f"| === {' '.join(argv)}: {type(bad).__name__}") == 1
    assert section(text, "run")[0].startswith("command: ")


@pytest.mark.parametrize("env", [{}, None, {"host": None, "knobs": {}}, {"host": {}, "knobs": 3}, []])
@pytest.mark.parametrize("info", [{}, None, {"argv": None, "git": None, "target": 3}, {"argv": [1], "settings": object()}])
def test_damaged_input_ends_nothing(env, info):
    def broken():
        raise OSError("no metadata")

    text = head(env, info, missing, {}, packages=broken)
    assert section(text, "Python packages") == ["cannot be told: OSError: no metadata"]
    assert [line for line in text.split("\n") if line.startswith("| ===")][-1] == "| === Python packages"


def test_one_package_that_cannot_be_read_leaves_the_others():
    class Half:
        @property
        def metadata(self):
            raise KeyError("METADATA")

    text = made(packages=lambda: [Half(), SimpleNamespace(metadata={"Name": "torch"}, version="2")])
    assert section(text, "Python packages") == ["one that cannot be read KeyError, torch 2"]


def test_the_installed_packages_are_all_there():
    text = head(ENV, INFO, missing, {})
    assert "pytest " in " ".join(section(text, "Python packages"))


def test_the_time_for_all_tools_is_limited():
    now, limits = [0.0], []

    def hang(argv, limit_s):
        limits.append(limit_s)
        now[0] += limit_s
        return Said(b"begun\n", None)

    text = made(hang, clock=lambda: now[0])
    assert limits == [20, 20, 20] and now[0] == fingerprint.ALL_TOOLS_S
    assert section(text, "uname -a: no end within 20 s") == ["begun"]
    assert text.count(": not run, the 60 s for all tools were used up") == len(TOOLS) - 3


@settings(max_examples=40, deadline=None)
@given(st.binary(max_size=300), st.text(max_size=40), st.integers(-20, 300))
def test_no_output_whatsoever_raises_or_leaves_the_frame(data, name, status):
    out = made(saying(data, status), env={"host": {"name": name}}, info={"argv": [name]}, environ={"OMP_X": name})
    assert all(line.startswith("|") for line in out.split("\n")) and "RESULT:" not in out


# ---- running real commands ----


@pytest.fixture
def tool(tmp_path, monkeypatch):
    """Makes a command `tool` of this Python code."""

    def make(code: str, mode: int = 0o755) -> None:
        path = tmp_path / "tool"
        path.write_text(f"#!{sys.executable} -S\nimport os, sys, time\n{code}\n")
        path.chmod(mode)
        monkeypatch.setenv("PATH", str(tmp_path))

    return make


def test_output_of_both_streams_and_the_exit_status(tool):
    tool("print(os.environ['LC_ALL'], sys.argv[1:], flush=True); os.write(2, b'err'); sys.exit(3)")
    assert run_command(["tool", "-q"], 30) == Said(b"C ['-q']\nerr", 3)


def test_a_missing_or_unusable_tool_is_an_oserror(tool):
    with pytest.raises(FileNotFoundError):
        run_command(["no-such-tool-at-all"], 1)
    tool("")
    Path(os.environ["PATH"], "tool").write_bytes(b"#!/nonexistent/interpreter\n")
    with pytest.raises(OSError):
        run_command(["tool"], 1)


def test_a_tool_that_hangs_is_killed_with_its_children(tool):
    tool("pid = os.fork(); print(os.getpid(), flush=True); time.sleep(60)")
    said = run_command(["tool"], 0.5)
    assert said.status is None and not said.cut
    pids = [int(p) for p in said.output.split()]
    deadline = time.monotonic() + 10
    while alive := [p for p in pids if Path(f"/proc/{p}").exists() and "Z" not in _state(p)]:
        assert time.monotonic() < deadline, alive
        time.sleep(0.01)
    assert len(pids) == 2


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def test_a_child_that_keeps_the_pipe_does_not_keep_us(tool):
    tool("print('done', flush=True)\nif os.fork() == 0: time.sleep(5); print('late')")
    assert run_command(["tool"], 60) == Said(b"done\n", 0)


def test_endless_output_is_cut(tool):
    tool("while True: os.write(1, b'x' * 99 + b'\\n')")
    said = run_command(["tool"], 60)
    assert len(said.output) == OUTPUT_BYTES and said.cut
    text = made(lambda argv, limit_s: run_command(["tool"], limit_s) if argv[0] == "lscpu" else missing(argv, limit_s))
    assert len(text) < 1.1 * OUTPUT_BYTES and "more is left out" in text


def test_a_tool_that_reads_its_input_gets_none(tool):
    tool("print(repr(sys.stdin.read()))")
    assert run_command(["tool"], 30) == Said(b"''\n", 0)


def test_a_tool_without_the_right_to_run_is_not_found(tool):
    tool("", stat.S_IRUSR)
    with pytest.raises(FileNotFoundError):
        run_command(["tool"], 1)
