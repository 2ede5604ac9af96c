"""Capacity: the search finds any limit to a step, the child process dies alone, and the headroom is plain arithmetic."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import MI355X, UNKNOWN_GPU
from hypothesis import given
from hypothesis import strategies as st

from escher_book import vega
from escher_book.pages import capacity as page
from escher_kernels import capacity, host, workload
from escher_kernels.capacity import Limit, Plan, cases, explore, fill, in_child, largest, measure, plan
from escher_kernels.records import Record, to_line
from escher_kernels.timing import BUDGETS, CpuTimer, Machine, Session
from validation import memory

ROOT = Path(__file__).parents[1]
MIB, GIB = 2**20, 2**30
HOST = Plan("cpu", "cpu", 256 * MIB, 64 * MIB, 64 * MIB, 64 * MIB, 60, False, 1)


class Fake:
    """Memory that gives up to `limit` bytes in all. `clock` moves by a second with every take."""

    def __init__(self, limit, spare=None, answers=None):
        self.limit, self.spare, self.answers = limit, spare, answers
        self.blocks, self.tries, self.now = [], 0, 0.0

    def take(self, size, stride=0):
        self.tries, self.now = self.tries + 1, self.now + 1
        self.blocks = [b for b in self.blocks if sys.getrefcount(b) > 3]  # what the caller dropped is free again
        refused = not self.answers(self.tries) if self.answers else sum(len(b) for b in self.blocks) + size > self.limit
        if refused:
            raise MemoryError("out of memory")
        self.blocks.append(Block(size))
        return self.blocks[-1]

    def release(self): ...

    def spare_bytes(self):
        return self.spare(self) if callable(self.spare) else self.spare

    def free_bytes(self):
        return self.limit

    def allocator(self, held_bytes):
        return {"allocated": held_bytes, "reserved": self.limit, "inactive_split": 0}

    def clock(self):
        return self.now


class Block:
    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size


def nothing(total, size): ...


def told(chosen, memory, clock=time.monotonic):
    """What `explore` tells: the last word on every case."""
    out = {}
    explore(chosen, memory, lambda case, **what: out.__setitem__(case, what), clock)
    return out


def session(out, budget="standard"):
    return Session("capacity", CpuTimer(), out.append, BUDGETS[budget], progress=lambda *_, **__: None)


def host_machine(usable):
    return Machine(torch, "cpu", "cpu", "bf16", usable, 0, (0,))


def measured(usable=HOST.cap_bytes + HOST.reserve_bytes, budget="standard"):
    """Records of `measure` on this host, by case."""
    out = []
    measure(session(out, budget), host_machine(usable), None)
    return {r.case: r for r in out}


@pytest.fixture
def small(monkeypatch):
    """Every plan is the small `HOST`."""
    monkeypatch.setattr(capacity, "plan", lambda *_: HOST)


# ---- the search ----


@pytest.mark.parametrize(("limit", "total"), [(286 * GIB, 288 * GIB), (int(138.5 * GIB), int(139.8 * GIB))])
def test_a_limit_is_found_within_a_step(limit, total):
    step = plan("gpu", total).step_bytes
    fake = Fake(limit)
    one = largest(fake.take, total, step, nothing)
    assert limit - step < one.bytes <= limit and one.ended == "refused" and one.detail == "out of memory"
    assert fake.tries <= 12  # bisection, not a walk
    held, many = fill(Fake(limit).take, total, GIB, step, nothing)
    assert limit - step < many.bytes <= limit and many.ended == "refused"
    assert sum(size for _, size in held) == many.bytes and {s for _, s in held if s >= GIB} == {GIB}


@given(st.integers(0, 2**42), st.integers(1, 2**42), st.integers(1, 2**34))
def test_any_limit_is_found_within_a_step(limit, cap, step):
    def take(size):
        if size > limit:
            raise MemoryError("no")

    found = largest(take, cap, step, nothing)
    assert found == Limit(cap, "cap") if cap <= limit else limit - step < found.bytes <= limit


@given(st.integers(0, 3000), st.integers(1, 3000), st.integers(1, 300), st.integers(1, 300))
def test_blocks_find_any_limit_within_a_step(limit, cap, step, block):
    taken = []

    def take(size):
        if sum(taken) + size > limit:
            raise MemoryError("no")
        taken.append(size)

    _, found = fill(take, cap, block, step, nothing)
    assert found.bytes == sum(taken)
    assert found == Limit(cap, "cap") if cap <= limit else limit - min(step, cap) < found.bytes <= limit


@given(st.lists(st.booleans(), min_size=1, max_size=40), st.integers(1, 10**6), st.integers(1, 10**4))
def test_an_allocator_that_answers_anyhow_ends(answers, cap, step):
    def fake():
        return Fake(0, answers=lambda n: answers[n % len(answers)])

    one = fake()
    assert 0 <= largest(one.take, cap, step, nothing).bytes <= cap and one.tries <= 2 + cap.bit_length()
    many = fake()
    _, found = fill(many.take, cap, max(step, cap // 50), step, nothing)
    assert 0 <= found.bytes <= cap and many.tries <= 50 * 40 + 60


def test_a_search_that_may_not_go_on_keeps_what_it_has():
    def stop(total, size):
        return "time" if total >= 3 else None

    assert fill(lambda size: size, 10, 1, 1, stop)[1] == Limit(3, "time")
    fake = Fake(9)
    assert largest(fake.take, 16, 1, lambda best, size: stop(best, size)) == Limit(8, "time")


# ---- the plan ----


def test_plan_of_a_gpu():
    p = plan("gpu", 288 * GIB)
    assert (p.cap_bytes, p.reserve_bytes, p.step_bytes, p.block_bytes) == (288 * GIB, 0, 288 * MIB, GIB)
    assert plan("gpu", 16 * GIB).step_bytes == 64 * MIB and not plan("gpu", 288 * GIB, quick=True).shortened


@pytest.mark.parametrize(
    ("usable", "reserve"), [(int(0.4 * GIB), 0.2), (3 * GIB, 1), (24 * GIB, 2.4), (1536 * GIB, 153.6), (0, 0)]
)
def test_plan_of_a_host(usable, reserve):
    p = plan("cpu", usable)
    assert p.reserve_bytes == pytest.approx(reserve * GIB, abs=1) and p.cap_bytes == usable - p.reserve_bytes
    quick = plan("cpu", usable, quick=True)
    assert quick.cap_bytes == min(p.cap_bytes, 4 * GIB) and quick.shortened == (p.cap_bytes > 4 * GIB)


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_cases_are_what_is_told(kind):
    fake = Fake(2 * GIB)
    chosen = plan(kind, 3 * GIB)
    names = [c.name for c in cases(kind, 3 * GIB)]
    first = ["device.total"] if kind == "gpu" else ["device.total", "device.free"]
    assert names == first + list(told(chosen, fake))
    searched = [c for c in cases(kind, 3 * GIB) if c.params]
    assert [c.name for c in searched] == [n for n in names if n in capacity.SEARCHED]
    assert all(c.params["step_bytes"] == chosen.step_bytes and c.params["limit_s"] == 60 for c in searched)


# ---- what is told ----


def test_a_gpu_is_told_whole():
    fake = Fake(int(138.5 * GIB))
    out = told(plan("gpu", int(139.8 * GIB)), fake)
    step = plan("gpu", int(139.8 * GIB)).step_bytes
    for case in ("contiguous", "blocks"):
        assert fake.limit - step < out[case]["value"] <= fake.limit and not out[case]["at_least"]
    assert out["blocks"]["whole_blocks"] == 138
    pieces = out["fragmentation"]
    assert pieces["value"] == pieces["freed_bytes"] == pieces["cap_bytes"] and pieces["ended"] == "cap"
    assert out["allocator.allocated"]["value"] == out["blocks"]["value"] - pieces["freed_bytes"]
    assert out["device.free"] == out["device.free_after"] == {"value": fake.limit}


def test_fragments_that_do_not_join_are_found():
    class Pieces(Fake):  # no tensor over 3 GiB, however much is free
        def take(self, size, stride=0):
            if size > 3 * GIB:
                raise MemoryError("fragmented")
            return super().take(size)

    out = told(plan("gpu", 16 * GIB), Pieces(15 * GIB))
    assert out["contiguous"]["value"] == out["fragmentation"]["value"] == 3 * GIB
    assert out["blocks"]["value"] == 15 * GIB and out["fragmentation"]["freed_bytes"] == 8 * GIB


def test_a_device_that_gives_nothing():
    out = told(plan("gpu", 16 * GIB), Fake(0))
    assert (
        out["blocks"]["value"] == out["contiguous"]["value"] == 0
        and "none could be freed" in out["fragmentation"]["skipped"]
    )


def test_the_time_limit_says_at_least():
    fake = Fake(GIB * 100)
    chosen = replace(plan("cpu", 100 * GIB), limit_s=10)
    out = told(chosen, fake, fake.clock)
    assert out["blocks"]["ended"] == "time" and out["blocks"]["at_least"]
    assert (
        out["blocks"]["value"] == 11 * GIB == out["contiguous"]["value"]
    )  # the large tensor is quick: it is still tried
    assert out["contiguous"]["at_least"]


def test_the_quick_budget_says_at_least():
    out = told(plan("cpu", 24 * GIB, quick=True), Fake(24 * GIB))
    for case in ("blocks", "contiguous"):
        assert (out[case]["value"], out[case]["ended"], out[case]["at_least"]) == (4 * GIB, "cap", True)
    assert not told(plan("cpu", 24 * GIB), Fake(24 * GIB))["blocks"]["at_least"]


def test_what_others_took_is_left_to_them():
    out = told(plan("cpu", 24 * GIB), Fake(24 * GIB, lambda f: (5 - f.tries) * GIB if f.tries <= 5 else 3 * GIB))
    assert (out["blocks"]["value"], out["blocks"]["ended"], out["blocks"]["at_least"]) == (5 * GIB, "others", True)
    out = told(plan("cpu", 8 * GIB), Fake(8 * GIB, lambda f: 3 * GIB))  # a host that grows tight after the blocks
    assert (out["contiguous"]["value"], out["contiguous"]["cap_bytes"], out["contiguous"]["at_least"]) == (
        3 * GIB,
        3 * GIB,
        True,
    )


@pytest.mark.parametrize("usable", [int(0.4 * GIB), 1536 * GIB])
def test_small_and_large_hosts(usable):
    out = told(plan("cpu", usable), Fake(usable))
    assert out["blocks"]["value"] == out["contiguous"]["value"] == plan("cpu", usable).cap_bytes


def test_a_host_says_that_fragments_do_not_matter():
    assert "page by page" in told(HOST, Fake(GIB))["fragmentation"]["skipped"]


# ---- torch's answers ----


class Cuda:
    def __init__(self, info=(3, 4), stats=None):
        self.info, self.stats = info, stats

    def mem_get_info(self):
        if isinstance(self.info, Exception):
            raise self.info
        return self.info

    def memory_stats(self):
        if isinstance(self.stats, Exception):
            raise self.stats
        return self.stats

    def synchronize(self): ...

    def empty_cache(self): ...


def device(**answers):
    fake = SimpleNamespace(
        cuda=Cuda(**answers), uint8=torch.uint8, empty=lambda n, **_: torch.empty(n, dtype=torch.uint8)
    )
    return capacity.Tensors(fake, "gpu", "cuda")


@pytest.mark.parametrize(
    ("info", "reason"),
    [
        (RuntimeError("HIP error: invalid argument\nmore"), "mem_get_info: HIP error: invalid argument"),
        ((5 * GIB, 4 * GIB), f"mem_get_info says {5 * GIB} bytes free of {4 * GIB}: no figure"),
    ],
)
def test_a_free_figure_that_is_none_is_skipped_and_the_others_go_on(info, reason):
    tensors = device(info=info, stats=RuntimeError("no stats"))
    tensors.take = Fake(300 * MIB).take
    out = told(replace(plan("gpu", 512 * MIB), block_bytes=128 * MIB), tensors)
    assert out["device.free"] == out["device.free_after"] == {"skipped": reason}
    assert 236 * MIB < out["blocks"]["value"] <= 300 * MIB and 236 * MIB < out["contiguous"]["value"] <= 300 * MIB
    assert out["allocator.allocated"] == {"skipped": "memory_stats: no stats"} and out["fragmentation"]["value"]


def test_an_allocator_that_says_zero_is_no_figure():
    empty = dict.fromkeys([f"{n}_bytes.all.current" for n in ("allocated", "reserved", "inactive_split")], 0)
    for stats in (empty, {}):
        with pytest.raises(ValueError, match="5 held"):
            device(stats=stats).allocator(5)
    full = {**empty, "allocated_bytes.all.current": 6, "reserved_bytes.all.current": 8}
    assert device(stats=full).allocator(5) == {"allocated": 6, "reserved": 8, "inactive_split": 0}


def test_a_host_tensor_is_written_a_byte_a_page():
    block = capacity.Tensors(torch, "cpu", "cpu").take(64 * MIB)
    assert block[::4096].eq(1).all() and block.numel() == 64 * MIB
    assert device().take(MIB).eq(1).all()  # a GPU's is written whole


def test_a_refusal_keeps_the_sentence_that_matters():
    with pytest.raises(MemoryError, match=r"can't allocate memory: you tried to allocate \d+ bytes$"):
        capacity.Tensors(torch, "cpu", "cpu").take(2**50)
    words = RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has")
    assert capacity._words(words) == "CUDA out of memory"
    assert capacity._words(RuntimeError()) == "RuntimeError"


def test_the_limit_of_an_ancestor_binds(tmp_path, monkeypatch):
    files = {
        "proc/meminfo": "MemTotal: 33554432 kB\nMemAvailable: 16777216 kB",
        "proc/self/cgroup": "0::/a/b/c",
        "sys/fs/cgroup/a/memory.max": str(6 * GIB),
        "sys/fs/cgroup/a/memory.current": str(GIB),
        "sys/fs/cgroup/a/b/memory.max": "max",
        "sys/fs/cgroup/a/b/c/memory.max": str(8 * GIB),
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n", encoding="utf-8")
    here = host.memory(tmp_path)
    assert here["usable_bytes"] == 5 * GIB and here["bounded_by"].endswith("cgroup/a")
    monkeypatch.setattr(host, "memory", lambda: here)
    asked = []
    monkeypatch.setattr(capacity, "in_child", lambda chosen: asked.append(chosen) or paper(chosen, Fake(100 * GIB)))
    out = []
    measure(session(out), host_machine(here["usable_bytes"]), None)
    records = {r.case: r for r in out}
    assert asked[0].cap_bytes == 4 * GIB == records["blocks"].value
    assert records["device.total"].value == 6 * GIB and "control group" in records["device.total"].params["of"]
    assert all(r.params["bounded_by"].endswith("cgroup/a") for r in out)
    assert capacity.Tensors(torch, "cpu", "cpu", GIB).spare_bytes() == 4.5 * GIB


# ---- the child ----


def paper(chosen, fake):
    """What `in_child` yields, without a child."""
    events = []
    explore(chosen, fake, lambda case, **what: events.append({"case": case, **what}))
    yield from events
    yield {"exit": 0, "error": "", "overdue": False}


def instead(monkeypatch, code):
    """The child runs `code`, which sees `capacity` and PLAN, and then `capacity.main(PLAN)`."""
    start = "import os, resource, signal, sys, time\nfrom escher_kernels import capacity\nPLAN = sys.argv[1]\n"
    script = f"{start}{code}\ncapacity.main(PLAN)\n"
    monkeypatch.setattr(
        capacity, "command", lambda chosen: [sys.executable, "-c", script, json.dumps(asdict(chosen))]
    )  # fmt: skip


BEFORE_TAKE = """
take, count = capacity.Tensors.take, []
def counted(self, *arguments):
    count.append(1)
    {}
    return take(self, *arguments)
capacity.Tensors.take = counted
"""


def alive(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def test_a_child_touches_a_small_host(small):
    records = measured()
    assert records["blocks"].value == records["contiguous"].value == 256 * MIB
    assert records["blocks"].unit == "B" and records["blocks"].params["ended"] == "cap" and not records["blocks"].flags
    assert records["blocks"].params["tensors"] == 4 and records["blocks"].params["bounded_by"]
    assert records["device.total"].value >= records["device.free"].value > 0 and records["device.free_after"].value > 0
    assert records["fragmentation"].skipped and records["fragmentation"].value is None
    assert all(to_line(r) and r.family == "capacity" and not r.samples_s for r in records.values())


def test_a_killed_child_is_a_record_and_the_parent_lives(small, monkeypatch):
    instead(monkeypatch, BEFORE_TAKE.format("if len(count) == 3: os.kill(os.getpid(), signal.SIGKILL)"))
    records = measured()
    blocks = records["blocks"]
    assert blocks.value == 128 * MIB and blocks.flags == ("KILLED",) and blocks.params["ended"] == "killed"
    assert blocks.params["detail"].startswith(f"limit found at {128 * MIB} bytes")
    assert "signal 9" in records["contiguous"].skipped and "signal 9" in records["device.free_after"].skipped
    assert list(records) == [c.name for c in cases("cpu", GIB)]


def test_a_child_killed_before_it_wrote_anything_found_no_limit(small, monkeypatch):
    instead(monkeypatch, BEFORE_TAKE.format("os.kill(os.getpid(), signal.SIGKILL)"))
    assert "signal 9" in measured()["blocks"].skipped


def test_a_child_that_fails_says_why(small, monkeypatch):
    instead(monkeypatch, "raise RuntimeError('no driver')")
    records = measured()
    assert records["blocks"].skipped == "the child process ended early with status 1: RuntimeError: no driver"
    assert records["device.total"].value > 0


def test_a_child_that_hangs_is_ended(small, monkeypatch):
    monkeypatch.setattr(capacity, "START_S", -59.0)
    instead(monkeypatch, "time.sleep(600)")
    assert measured()["blocks"].skipped == "the child process hung and was ended"


def test_a_child_with_less_address_space_finds_its_limit(monkeypatch):
    chosen = replace(HOST, cap_bytes=2 * GIB, block_bytes=128 * MIB, step_bytes=16 * MIB)
    monkeypatch.setattr(capacity, "plan", lambda *_: chosen)
    used = "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()"
    limit = f"if len(count) == 1: {used}; resource.setrlimit(resource.RLIMIT_AS, (used + {300 * MIB},) * 2)"
    instead(monkeypatch, BEFORE_TAKE.format(limit))
    records = measured()
    blocks = records["blocks"]
    assert 200 * MIB <= blocks.value <= 300 * MIB and blocks.params["ended"] == "refused" and not blocks.flags
    assert "allocate memory" in blocks.params["detail"]
    assert 0 < records["contiguous"].value <= blocks.value


def test_lines_of_others_on_its_output_are_passed_over(small, monkeypatch):
    instead(monkeypatch, "print('[W] a library speaks'); print('{\"a\": 1}'); print('7', flush=True)")
    assert measured()["blocks"].value == 256 * MIB


def test_a_closed_generator_leaves_no_child(monkeypatch):
    instead(monkeypatch, "capacity._tell('blocks', bytes=os.getpid(), trying=0)\ntime.sleep(600)")
    events = in_child(HOST)
    pid = next(events)["bytes"]
    assert alive(pid)
    events.close()
    assert not alive(pid)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_no_child_outlives_an_interrupted_parent(how):
    child = (
        "import os, time; from escher_kernels import capacity; capacity._tell('blocks', bytes=os.getpid(), trying=0)"
    )
    child += "; capacity.threading.Thread(target=capacity._end_with_parent).start(); time.sleep(600)"
    parent = f"""
import sys
from escher_kernels import capacity
capacity.command = lambda chosen: [sys.executable, "-c", {child!r}]
for event in capacity.in_child(capacity.Plan(**{asdict(HOST)!r})):
    print(event["bytes"], flush=True)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", parent], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=ROOT, text=True
    )
    with process:
        pid = int(process.stdout.readline())
        assert alive(pid)
        process.send_signal(how)
        process.wait(30)
    until = time.monotonic() + 30
    while alive(pid) and time.monotonic() < until:
        time.sleep(0.05)
    assert not alive(pid)


def test_the_child_offers_itself_to_the_oom_killer(small, monkeypatch):
    see = "sys.stderr.write(open('/proc/self/oom_score_adj').read()); sys.stderr.flush(); os._exit(3)"
    instead(monkeypatch, BEFORE_TAKE.format(see))
    assert "status 3: 1000" in measured()["blocks"].skipped


def test_a_host_whose_memory_cannot_be_read(monkeypatch):
    nothing_known = {"total_bytes": None, "limit_bytes": None, "usable_bytes": None, "bounded_by": "host"}
    monkeypatch.setattr(host, "memory", lambda: nothing_known)
    records = measured(usable=0)
    assert set(records) == {c.name for c in cases("cpu", 0)} and all(
        r.skipped for n, r in records.items() if n != "device.free"
    )


# ---- headroom ----

WORKLOAD = workload.load("escher_14b_480p")
DERIVED = workload.fit(WORKLOAD, "cpu", 24 * GIB)
WEIGHTS = 40 * (8 * 5120**2 + 2 * 5120 * 13824) * 2 + (256 * 5120 + 7 * 5120**2) * 2
CACHES = 40 * 2 * (18720 + 512) * 5120 * 2
ACTIVATIONS = 4680 * 10 * 5120 * 2  # while k is rotated
NEED = WEIGHTS + CACHES + ACTIVATIONS


def amount(case, value, *flags, **params):
    return Record("capacity", case, value=value, unit="B", params={"ended": "cap", **params}, flags=flags)


def records_of(blocks, *flags, contiguous=None, total=None, **params):
    common = {"step_bytes": 64 * MIB, "limit_s": 60.0, "bounded_by": "host", "cap_bytes": blocks, **params}
    return [
        Record("capacity", "device.total", value=total or blocks + 2 * GIB, unit="B", params={"of": params.get("of", "host")}),
        Record("capacity", "device.free", value=blocks + GIB, unit="B", params={"bounded_by": "host"}),
        amount("contiguous", blocks if contiguous is None else contiguous, *flags, **common),
        amount("blocks", blocks, *flags, **common),
    ]  # fmt: skip


def run_of(made_run, records, spec=WORKLOAD, **more):
    return made_run(records, workload=spec.to_json(), **more)


def test_the_need_by_hand():
    need = memory.Need(WORKLOAD)
    assert (need.weights_bytes, need.caches_bytes, need.activations_bytes) == (WEIGHTS, CACHES, ACTIVATIONS)
    assert round(WEIGHTS / 1e9, 2) == 28.47 and round(CACHES / 1e9, 2) == 15.75 and need.bytes == NEED
    assert (ACTIVATIONS, NEED) == (479_232_000, 44_705_546_240)
    assert need.largest_tensor_bytes == 2 * 6 * 5120**2  # the time projection
    assert memory.Need(workload.load("wan2_2_i2v_a14b")).largest_tensor_bytes == 75600 * 13824 * 2


def test_needs_of_a_run(made_run):
    whole = memory.needs_of_run(run_of(made_run, []))
    assert [(n.spec.depth, n.whole, n.ran) for n in whole] == [(1, False, False), (40, True, True)]
    derived = memory.needs_of_run(run_of(made_run, [], DERIVED))
    assert [(n.spec.depth, n.spec.query_tokens, n.whole, n.ran) for n in derived] == [
        (1, 4680, False, False), (40, 4680, True, False), (1, DERIVED.query_tokens, False, True)
    ]  # fmt: skip
    shallow = replace(WORKLOAD, depth=7, full={"depth": 40})
    shown = memory.needs_of_run(run_of(made_run, [], shallow))
    assert [(n.spec.depth, n.whole, n.ran) for n in shown] == [(1, False, False), (7, False, True), (40, True, False)]


def test_every_other_workload_is_there_once(made_run):
    others = [n.spec.name for n in memory.needs_of_others(run_of(made_run, [], DERIVED))]
    assert sorted([*others, "escher_14b_480p"]) == workload.names() and all(
        n.whole for n in memory.needs_of_others(run_of(made_run, []))
    )
    asked = workload.overridden(WORKLOAD, depth=7)
    assert "escher_14b_480p" in [n.spec.name for n in memory.needs_of_others(run_of(made_run, [], asked))]


@pytest.mark.parametrize(
    ("blocks", "flags", "fits", "deepest"),
    [
        (NEED, (), True, 40), (NEED - 1, (), False, 39), (NEED - 1, ("AT_LEAST",), None, 39), (GIB, (), False, 0),
        (NEED - 1, ("KILLED",), False, 39), (288 * GIB, (), True, 281),
    ],
)  # fmt: skip
def test_headroom_by_hand(made_run, blocks, flags, fits, deepest):
    found = memory.capacity(run_of(made_run, records_of(blocks, *flags, total=300 * GIB)))
    h = memory.headroom(memory.Need(WORKLOAD), found)
    per_block = (WEIGHTS - (256 * 5120 + 7 * 5120**2) * 2 + CACHES) // 40
    assert (h.fits, h.margin_bytes, h.measured_bytes) == (fits, blocks - NEED, blocks)
    assert h.deepest == deepest == max(0, (blocks - (256 * 5120 + 7 * 5120**2) * 2 - ACTIVATIONS) // per_block)
    assert h.at_least == (flags == ("AT_LEAST",)) and h.rated_fits is None


@given(st.sampled_from(workload.names()), st.integers(0, 2**41))
def test_the_deepest_that_fits_is_the_deepest(name, available):
    spec = workload.load(name)
    deepest = memory.deepest_that_fits(spec, available)
    needs = [workload.needed_bytes(replace(spec, depth=d)) for d in (max(1, deepest), deepest + 1)]
    assert needs[1] > available and (deepest == 0 or needs[0] <= available)


def test_what_exceeds_all_memory_does_not_fit_however_little_was_tried(made_run):
    found = memory.capacity(run_of(made_run, records_of(4 * GIB, "AT_LEAST", total=24 * GIB)))
    assert memory.headroom(memory.Need(WORKLOAD), found).fits is False
    assert memory.headroom(memory.Need(replace(WORKLOAD, depth=10)), found).fits is None


def test_one_tensor_must_be_contiguous(made_run):
    need = memory.Need(WORKLOAD)
    small = records_of(100 * GIB, contiguous=need.largest_tensor_bytes - 1)
    assert memory.headroom(need, memory.capacity(run_of(made_run, small))).fits is False
    blocks = [
        replace(r, params={**r.params, "whole_blocks": 99, "block_bytes": GIB}) for r in small if r.case != "contiguous"
    ]
    assert memory.headroom(need, memory.capacity(run_of(made_run, blocks))).fits  # a block of 1 GiB is one tensor
    assert (
        memory.headroom(memory.Need(workload.load("wan2_2_i2v_a14b")), memory.capacity(run_of(made_run, blocks))).fits
        is None
    )


def test_rated_memory_is_the_targets(made_run):
    here = memory.capacity(run_of(made_run, records_of(280 * GIB), found=MI355X))
    assert here.rated_bytes == MI355X.total_memory_bytes and here.rated_label_gb == 288 and here.same_device
    need = memory.Need(WORKLOAD)
    assert (
        memory.headroom(need, here).rated_fits
        and memory.headroom(need, here).rated_margin_bytes == here.rated_bytes - NEED
    )
    elsewhere = memory.capacity(run_of(made_run, records_of(20 * GIB), asked="mi355x"))
    assert elsewhere.rated_bytes and not elsewhere.same_device
    h = memory.headroom(need, elsewhere)
    assert h.rated_fits and h.fits is False
    assert not memory.headroom(memory.Need(replace(WORKLOAD, depth=300)), here).rated_fits
    unknown = memory.capacity(run_of(made_run, records_of(20 * GIB), found=UNKNOWN_GPU))
    assert unknown.rated_bytes is None and unknown.rated_reason


def test_measured_peaks(made_run):
    peak = Record("e2e", "memory.eager", value=12.0 * GIB, unit="B",
                  params={"what": "allocated on the device", "weights_bytes": 9 * GIB, "cache_bytes": 2 * GIB})  # fmt: skip
    skipped = Record("e2e", "memory.compiled", skipped="no VmHWM")
    run = run_of(made_run, [*records_of(20 * GIB), peak, skipped])
    assert memory.peaks(run) == [memory.Peak("eager", "allocated on the device", 12 * GIB, GIB, ACTIVATIONS)]
    table = page.peaks(run)
    assert table.cells[0][:3] == ["eager", "12.0", "1.00"]
    assert page.peaks(run_of(made_run, records_of(20 * GIB))) is None


# ---- the page ----


def test_a_host_that_is_too_small(made_run):
    run = run_of(made_run, records_of(20 * GIB, reserve_bytes=2 * GIB), DERIVED)
    text = page.finding(run).markdown
    assert text.startswith("**20.00 GiB of this host's memory can be given to a model**")
    assert "90.9 % of all host memory, 22.00 GiB" in text and "a reserve of 2.00 GiB stays free" in text
    assert "needs 41.6 GiB" in text and "**It does not fit**, 21.6 GiB are missing; 18 blocks would." in text
    assert "as it ran in this run (depth 1" in text and "**It fits**, with " in text
    assert "device" not in text and "rated" not in text


def test_a_gpu_that_holds_it(made_run):
    pieces = amount("fragmentation", 139 * GIB, freed_bytes=143 * GIB, cap_bytes=143 * GIB)
    run = run_of(made_run, [*records_of(286 * GIB, of="device", total=MI355X.total_memory_bytes), pieces], found=MI355X)
    text = page.finding(run).markdown
    assert "286.00 GiB of the device's memory" in text and "of all device memory, 287.98 GiB" in text
    assert "143 GiB in all, one tensor could have 97.2 % of it again" in text
    assert (
        "**It fits**, with 244 GiB to spare" in text
        and "The rated memory of AMD Instinct MI355X, 288.0 GiB, would hold it" in text
    )
    assert "host" not in text
    table = page.amounts(run)
    vendor = [c.title for c in table.columns].index("vendor's label, GB")
    assert [row[vendor] for row in table.cells] == ["", "", "", "", "", "288"]
    assert table.cells[3][:3] == ["sum of blocks of 1 GiB", "286.00", "99.3 %"]
    chart = page.footprint(run).to_dict()
    assert (
        chart["title"]["text"] == "A8c  Memory footprint" and json.dumps(chart).count("rated, AMD Instinct MI355X") >= 1
    )
    assert len(vega.svg(chart)) > 1000


def test_a_target_that_is_elsewhere_has_no_line_and_no_share(made_run):
    run = run_of(made_run, records_of(20 * GIB), DERIVED, asked="mi355x")
    assert "rated, AMD" not in json.dumps(page.footprint(run).to_dict())
    last = page.amounts(run).cells[-1]
    assert last[0] == "rated: AMD Instinct MI355X" and last[2] == "–" and "another device" in last[-1]


@pytest.mark.parametrize(
    ("flag", "params", "words"),
    [
        ("AT_LEAST", {"ended": "time", "limit_s": 60.0}, "the time limit of 60 s"),
        ("AT_LEAST", {"ended": "others"}, "other processes took the rest"),
        ("AT_LEAST", {"ended": "cap", "cap_bytes": 4 * GIB, "reserve_bytes": GIB}, "no more than 4 GiB"),
        ("KILLED", {"ended": "killed", "detail": "limit found at 1 bytes"}, "the system killed the process"),
        (None, {"ended": "refused", "detail": "CUDA out of memory"}, "more was refused (CUDA out of memory)"),
        (None, {"ended": "cap"}, "all that was asked for was given"),
    ],
)
def test_why_it_ended_is_said(made_run, flag, params, words):
    run = run_of(made_run, records_of(4 * GIB, *filter(None, [flag]), total=90 * GIB, **params))
    text = page.finding(run).markdown
    assert words in text and text.startswith("**At least 4.00 GiB" if flag == "AT_LEAST" else "**4.00 GiB")
    assert ("**cannot be told**" in text) == (flag == "AT_LEAST")
    assert any(words in row[-1] for row in page.amounts(run).cells)


def test_every_workload_is_in_the_table(made_run):
    table = page.needs(run_of(made_run, records_of(20 * GIB), DERIVED))
    assert [row[0] for row in table.cells[:3]] == [
        "escher_14b_480p", "escher_14b_480p (whole)", "escher_14b_480p (as it ran)"
    ]  # fmt: skip
    shown = {row[0].partition(" ")[0] for row in table.cells}
    assert shown == set(workload.names()) and len(table.raw) == len(table.cells)
    whole = next(r for r in table.raw if r["whole"] and r["workload"] == "escher_14b_480p")
    assert whole["needed_bytes"] == NEED and whole["fits"] is False and whole["margin_bytes"] == 20 * GIB - NEED
    titles = [c.title for c in table.columns]
    assert titles == ["workload", "fits", "depth", "tokens, window", "needs, GiB", "weights + caches + activations",
                      "left, GiB", "blocks that fit"]  # fmt: skip
    assert [row[1] for row in table.cells[:3]] == ["yes", "no", "yes"]
    # 28.47, 15.75 and 0.575 GB of 44.80 GB, in GiB, and 20 less that
    assert table.cells[1][4:7] == ["41.6", "26.5 + 14.7 + 0.446", "-21.6"]
    rated = page.needs(run_of(made_run, records_of(286 * GIB), found=MI355X))
    assert rated.columns[-1].title == "rated holds it" and {"yes"} <= {row[-1] for row in rated.cells} <= {"yes", "no"}


@pytest.mark.parametrize(("blocks", "shown"), [(int(0.2 * GIB), "0.20"), (1382 * GIB, "1,382.00"), (0, "0")])
def test_small_and_large_hosts_are_shown(made_run, blocks, shown):
    run = run_of(made_run, records_of(blocks, total=blocks + GIB), DERIVED)
    assert page.amounts(run).cells[3][1] == shown and f"**{shown} GiB" in page.finding(run).markdown
    assert len(page.needs(run).cells) > 5 and vega.title(page.footprint(run).to_dict())


def test_skipped_amounts_keep_their_reason(made_run):
    rows = [
        *records_of(20 * GIB)[:3],
        Record("capacity", "blocks", skipped="the child process ended early with status 1"),
    ]
    run = run_of(made_run, rows)
    assert page.finding(run).markdown == "**No capacity:** the child process ended early with status 1."
    assert page.amounts(run).cells[-1][-1] == "skipped: the child process ended early with status 1"
    assert "Nothing to draw" in page.footprint(run).markdown
    needs = page.needs(run)
    for title in ("fits", "left, GiB"):
        column = [c.title for c in needs.columns].index(title)
        assert {row[column] for row in needs.cells} == {"–"}, title


def test_a_run_without_the_family(made_run):
    run = run_of(made_run, [])
    assert page.finding(run).markdown == "This family was not measured."
    assert "Nothing to draw" in page.footprint(run).markdown and not page.amounts(run).cells
    assert page.needs(run).cells and page.peaks(run) is None
    killed = run_of(made_run, records_of(20 * GIB)[:2])
    assert page.finding(killed).markdown == "**No capacity:** the search was not finished."


def test_the_child_is_found_from_any_directory(tmp_path):
    code = f"from escher_kernels import capacity as c; print([e for e in c.in_child(c.Plan(**{asdict(HOST)!r}))][-1]['exit'])"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True,
        text=True, timeout=120,
    )  # fmt: skip
    assert done.stdout.strip() == "0", done.stderr
