"""The timing protocol on a fake clock and a fake device: no absolute time of this host enters."""

import math
import random
from dataclasses import replace

import pytest
import torch

from escher_kernels import timing
from escher_kernels.records import Record, to_line
from escher_kernels.statistics import MIN_BLOCKS, estimate
from escher_kernels.timing import (
    BUDGETS,
    Budget,
    Case,
    CpuTimer,
    GpuTimer,
    Machine,
    Prepared,
    Progress,
    Session,
    disturbance_between,
    normal,
)

US, MS = 1e-6, 1e-3
BUDGET = Budget("standard", block_s=0.1, case_s=20, search_s=20)
MACHINE = Machine(None, "cpu", "cpu", "bf16", 2**33, 2**25, (0, 1))


class Clock:
    """Time that only work moves on."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def ns(self):
        return round(self.now * 1e9)

    def spend(self, seconds):
        self.now += seconds


class FakeCuda:
    """A queue beside a host clock: a launch or an event costs host time, the device works the queue off in order.

    `depth`: entries the queue holds; past that the host waits for the device, as a driver does.
    """

    def __init__(self, clock, launch_s=10 * US, event_host_s=1 * US, event_device_s=2 * US, depth=1024):
        self.clock, self.launch_s, self.depth = clock, launch_s, depth
        self.event_host_s, self.event_device_s = event_host_s, event_device_s
        self.free_at, self.ends, self.syncs = 0.0, [], 0

    def _enqueue(self, host_s, device_s):
        self.clock.spend(host_s)
        self.ends = [end for end in self.ends if end > self.clock.now]
        if len(self.ends) >= self.depth:
            self.clock.now = max(self.clock.now, self.ends[-self.depth])
        self.free_at = max(self.free_at, self.clock.now) + device_s
        self.ends.append(self.free_at)
        return self.free_at

    def op(self, seconds):
        return lambda _: self._enqueue(self.launch_s, seconds)

    def synchronize(self):
        self.syncs += 1
        self.clock.now = max(self.clock.now, self.free_at)

    def Event(self, enable_timing):  # noqa: N802 - torch's name
        assert enable_timing
        return FakeEvent(self)


class FakeEvent:
    def __init__(self, cuda):
        self.cuda, self.at = cuda, None

    def record(self):
        self.at = self.cuda._enqueue(self.cuda.event_host_s, self.cuda.event_device_s)

    def elapsed_time(self, end):
        assert self.cuda.clock.now >= end.at, "read before the device got there: no synchronize"
        return (end.at - self.at) * 1e3  # ms, as torch


class Harness:
    """A session on a fake CPU clock that keeps what was recorded and which case ran when."""

    def __init__(self, budget=BUDGET, timer=None):
        self.clock, self.records, self.ran, self.said = Clock(), [], [], []
        self.timer = timer or CpuTimer(self.clock.ns)
        self.session = Session(
            "family", self.timer, self.records.append, budget, 2, lambda what, always=True: self.said.append(what),
            self.clock,
        )  # fmt: skip

    def item(self, name, seconds, check=None, poison=lambda: None, **fields):
        """A case whose call takes `seconds` (a number, or a function of the clock)."""

        def call(turn):
            self.ran.append((name, turn))
            self.clock.spend(seconds(self.clock.now) if callable(seconds) else seconds)

        return Prepared(Case(name, flop=10), call=call, check=check, poison=poison, **fields)

    def of(self, name):
        return [r for r in self.records if r.case == name]

    def timed(self, name):
        return [r for r in self.of(name) if r.samples_s]


def blocks_of(records):
    return [[s / r.calls_per_sample for s in r.samples_s] for r in records]


# ---- one sample ----


@pytest.mark.parametrize("calls", [1, 10, 100])
def test_ten_milliseconds_are_ten_milliseconds(calls):
    clock = Clock()
    samples, flags = CpuTimer(clock.ns).samples(lambda _: clock.spend(10 * MS), 0, 5, calls)
    assert [s / calls for s in samples] == pytest.approx([10 * MS] * 5) and flags == []


@pytest.mark.parametrize("calls", [1, 10, 100])
def test_ten_milliseconds_on_a_device(calls):
    clock = Clock()
    cuda = FakeCuda(clock)
    samples, flags = GpuTimer(cuda, clock.ns).samples(cuda.op(10 * MS), 0, 5, calls)
    assert [s / calls for s in samples] == pytest.approx([10 * MS] * 5, rel=1e-3) and flags == []


@pytest.mark.parametrize("make", [lambda c: CpuTimer(c.ns), lambda c: GpuTimer(FakeCuda(c), c.ns)])
def test_every_call_gets_the_next_operand_set(make):
    seen = []
    make(Clock()).samples(seen.append, 7, 3, 4)
    assert seen[-12:] == list(range(7, 19)) and set(seen[:-12]) <= {7}  # a GPU's is led by one untimed call


@pytest.mark.parametrize("call_s", [2e-7, 1e-5, 0.7 * MS, 1 * MS, 5 * MS])
def test_a_cpu_sample_lasts_a_millisecond(call_s):
    h = Harness(replace(BUDGET, block_s=5 * MS))
    h.session.run_blocks([h.item("x", call_s)])
    rows = h.timed("x")
    assert len(rows) == 6 and all(s >= 0.99 * MS for r in rows for s in r.samples_s)
    assert estimate(blocks_of(rows)).median == pytest.approx(call_s, rel=0.05)


# ---- device events ----


@pytest.mark.parametrize("op_s", [2 * US, 40 * US, 1 * MS])
def test_an_empty_event_pair_costs_under_a_percent(op_s):
    clock = Clock()
    cuda = FakeCuda(clock, launch_s=1 * US, event_device_s=8 * US)
    timer = GpuTimer(cuda, clock.ns)
    assert timer.empty_pair_s == pytest.approx(8 * US)
    calls = timer.calls_for(op_s)
    assert timer.empty_pair_s <= 0.01 * calls * op_s * (1 + 1e-9)
    samples, _ = timer.samples(cuda.op(op_s), 0, 5, calls)
    assert all(s / calls == pytest.approx(op_s, rel=0.011) for s in samples)
    assert timer.calls_for(10.0) == 1


def test_nothing_is_waited_for_between_samples():
    clock = Clock()
    cuda = FakeCuda(clock)
    timer = GpuTimer(cuda, clock.ns)
    before, order = cuda.syncs, []
    op = cuda.op(100 * US)
    timer.samples(lambda i: order.append(cuda.syncs - before) or op(i), 0, 20, 3)
    assert set(order) == {1} and cuda.syncs - before == 2  # once before, once after


def test_host_bound():
    clock = Clock()
    cuda = FakeCuda(clock, launch_s=10 * US)
    timer = GpuTimer(cuda, clock.ns)
    for op_s, bound in ((2 * US, True), (8 * US, True), (100 * US, False), (20 * US, False)):
        samples, flags = timer.samples(cuda.op(op_s), 0, 10, timer.calls_for(op_s))
        assert (flags == ["HOST_BOUND"]) == bound, op_s
    # what the flag says: the sample of the short op is the launch, not the op
    assert timer.samples(cuda.op(2 * US), 0, 5, 100)[0][0] / 100 == pytest.approx(10 * US, rel=0.05)


def test_host_bound_reaches_the_record_and_a_full_queue_does_not_look_like_it():
    clock = Clock()
    cuda = FakeCuda(clock, launch_s=2 * US, event_device_s=20 * US, depth=1024)
    h = Harness(replace(BUDGET, block_s=1.0), GpuTimer(cuda, clock.ns))
    h.session.clock = clock
    short, long = (Prepared(Case(n), call=cuda.op(s)) for n, s in (("short", 1 * US), ("long", 30 * US)))
    h.session.run_blocks([short, long])
    assert {r.flags for r in h.timed("short")} == {("HOST_BOUND",)}
    assert {r.flags for r in h.timed("long")} == {()}
    assert all(40 < len(r.samples_s) * r.calls_per_sample <= 1024 for r in h.timed("long"))
    assert all(r.noise is None for r in h.records)  # CPU time lost says nothing about a device


def test_device_times_that_are_not_positive_are_kept_and_do_not_size_a_sample():
    # ROCm has returned -1.78 ms for quick kernels (ROCm/rocm-systems#9375)
    clock = Clock()
    cuda = FakeCuda(clock)
    h = Harness(timer=GpuTimer(cuda, clock.ns))
    h.session.clock = clock
    answers = iter([-1.78 * MS, 0.0] + [None] * 10**6)
    real = FakeEvent.elapsed_time

    class Odd(FakeEvent):
        def elapsed_time(self, end):
            answer = next(answers)
            return real(self, end) if answer is None else answer * 1e3

    cuda.Event = lambda enable_timing: Odd(cuda)
    assert h.session.estimate(cuda.op(1 * MS)) == pytest.approx(1 * MS, rel=0.01)
    answers = iter([0.0, -1 * MS] + [None] * 100)
    assert h.timer.samples(cuda.op(1 * MS), 0, 4, 1)[0][:2] == [0.0, -1 * MS]


# ---- blocks ----


def test_cases_are_visited_round_robin_over_all_blocks():
    h = Harness()
    h.session.run_blocks([h.item(n, 20 * MS) for n in "abc"])
    assert [(r.case, r.block) for r in h.records] == [(n, b) for b in range(6) for n in "abc"]
    starts = [r.started_s for r in h.records]
    assert starts == sorted(starts)
    # each case is spread over the whole time of the family
    for name in "abc":
        mine = [r.started_s for r in h.of(name)]
        assert (mine[-1] - mine[0]) > 0.7 * (starts[-1] - starts[0])


def test_a_slow_spell_widens_every_interval_and_moves_no_headline():
    h = Harness(replace(BUDGET, block_s=0.05))
    begin, end = 1.0, 1.35  # a neighbour halves the speed for about one block
    slow = lambda base: lambda now: base * (2 if begin < now < end else 1)  # noqa: E731
    h.session.run_blocks([h.item(n, slow(10 * MS)) for n in "abcd"])
    for name in "abcd":
        found = estimate(blocks_of(h.timed(name)))
        assert found.median == pytest.approx(10 * MS) and found.blocks == 6
    assert any(estimate(blocks_of(h.timed(n))).hi > 15 * MS for n in "abcd")


def test_a_block_takes_the_time_the_budget_gives():
    h = Harness()
    plain, roof = h.item("plain", 10 * MS), replace(h.item("roof", 10 * MS), share=3.0)
    h.session.run_blocks([plain, roof, h.item("short", 0.5 * MS), h.item("long", 0.5)])
    assert {len(r.samples_s) for r in h.timed("plain")} == {10}
    assert {len(r.samples_s) for r in h.timed("roof")} == {30}
    assert {len(r.samples_s) for r in h.timed("short")} == {timing.MAX_SAMPLES_PER_BLOCK}
    assert {len(r.samples_s) for r in h.timed("long")} == {1}  # at least one, and in every block


@pytest.mark.parametrize(("call_s", "blocks"), [(3.3, 6), (3.4, 5), (4.9, 4), (6.0, 3), (6.66, 3)])
def test_a_case_too_slow_for_six_blocks_takes_what_fits(call_s, blocks):
    h = Harness()
    h.session.run_blocks([h.item("x", call_s)])
    rows = h.timed("x")
    assert len(rows) == blocks and len({r.block for r in rows}) == blocks
    assert rows[0].block == 0 and rows[-1].block == 5  # spread over the family's time
    assert all(r.flags == (() if blocks == 6 else ("INSUFFICIENT",)) for r in rows)


def test_a_case_too_slow_for_three_samples_is_skipped_with_its_reason():
    h = Harness()
    h.session.run_blocks([h.item("slow", 6.7), h.item("x", 0.01)])
    (skip,) = h.of("slow")
    assert "20.1 s, a case may take 20 s" in skip.skipped
    assert skip.samples_s == () and len(h.timed("x")) == 6
    assert len([n for n, _ in h.ran if n == "slow"]) <= 3  # not measured three times to learn that it is too slow


def test_a_case_that_would_run_away_is_never_called(monkeypatch):
    # an emulated dtype makes one call of a large shape last minutes: the fixed GEMM's rate foresees it
    h, _ = warm(monkeypatch, 5 * MS)  # 10 FLOP in 5 ms
    slow, fine = h.item("slow", 60.0), h.item("x", 0.01)
    slow.case = replace(slow.case, flop=60_000)
    h.session.run_blocks([slow, fine])
    assert "three samples would take" in h.of("slow")[0].skipped and not [n for n, _ in h.ran if n == "slow"]
    assert len(h.timed("x")) == 6


def test_a_case_that_is_known_not_to_fit_is_recorded_and_never_called():
    h = Harness()
    called = []
    h.session.run_blocks([Prepared(Case("big", skipped="needs 36 GB, 22 GB are free"), call=called.append)])
    assert [r.skipped for r in h.records] == ["needs 36 GB, 22 GB are free"] and not called


@pytest.mark.parametrize(
    "error", [RuntimeError("CUDA out of memory.\nTried to allocate 2 GiB"), NotImplementedError('"mm" for Half')]
)
def test_a_case_that_raises_is_recorded_and_the_others_go_on(error):
    h = Harness()

    def call(_):
        raise error

    h.session.run_blocks([Prepared(Case("bad"), call=call), h.item("x", 0.01)])
    assert [r.skipped for r in h.of("bad")] == [f"{type(error).__name__}: {str(error).splitlines()[0]}"]
    assert len(h.timed("x")) == 6


def test_a_sampler_replaces_the_timer():
    h = Harness()
    ran = Case("peak", {"threads": 2}, flop=7, role="probe")
    h.session.run_blocks([Prepared(Case("peak", role="probe"), sampler=lambda: ([1.0, 2.0], ran), backend="C loop")])
    assert len(h.records) == 6
    assert all((r.samples_s, r.params, r.flop, r.backend) == ((1.0, 2.0), {"threads": 2}, 7, "C loop")
               for r in h.records)  # fmt: skip


# ---- right first ----


def verdicts(*oks):
    """A check that gives these answers in turn, then stays at the last one, and remembers what it was asked."""
    left, asked = list(oks), []

    def check(turn, full):
        asked.append((turn, full))
        return {"check": "full" if full else "freivalds", "ok": left.pop(0) if len(left) > 1 else left[0]}

    check.asked = asked
    return check


def test_a_wrong_result_has_no_time():
    h = Harness()
    h.session.run_blocks([h.item("wrong", 0.01, check=verdicts(False)), h.item("right", 0.01, check=verdicts(True))])
    assert [(r.error["ok"], r.samples_s) for r in h.of("wrong")] == [(False, ())]
    assert len([n for n, _ in h.ran if n == "wrong"]) == 1  # the one call that was judged
    assert len(h.timed("right")) == 6 and all(r.error["ok"] for r in h.of("right") if r.error)


def test_the_first_call_gets_the_full_check_and_first_and_last_block_one_of_their_last_output():
    h = Harness()
    check = verdicts(True)
    h.session.run_blocks([h.item("x", 0.01, check=check)])
    turns = [turn for name, turn in h.ran]
    assert [full for _, full in check.asked] == [True, False, False]
    assert check.asked[0][0] == 0 and check.asked[-1][0] == turns[-1]


def test_a_last_output_that_is_wrong_is_an_error_record():
    h = Harness()
    h.session.run_blocks([h.item("x", 0.01, check=verdicts(True, True, False))])
    wrong = [r for r in h.of("x") if r.error and not r.error["ok"]]
    assert len(wrong) == 1 and wrong[0].block == 5 and not wrong[0].samples_s


@pytest.mark.parametrize("stops_after", [0, 1])
def test_an_output_that_is_never_written_is_caught(stops_after):
    """The kernel writes its first `stops_after` outputs, then nothing: what it left must not pass as fresh."""
    h = Harness()
    output, calls = [1.0], [0]

    def call(_):
        calls[0] += 1
        h.clock.spend(0.01)
        if calls[0] <= stops_after:
            output[0] = 1.0

    h.session.run_blocks([
        Prepared(Case("x"), call=call, poison=lambda: output.__setitem__(0, math.nan),
                 check=lambda *_: {"ok": output[0] == 1.0})
    ])  # fmt: skip
    assert any(not r.error["ok"] for r in h.records if r.error)
    assert stops_after or not any(r.samples_s for r in h.records)


def test_a_search_candidate_is_checked_cheaply_before_it_is_timed():
    h = Harness()
    check = verdicts(True)
    record = h.session.quick_rate(h.item("x", 0.01, check=check))
    assert check.asked == [(0, False)] and len(record.samples_s) == 3
    assert [r.error["ok"] for r in h.records] == [True]  # a right candidate leaves one record: times and check
    assert h.session.quick_rate(h.item("bad", 0.01, check=verdicts(False))) is None
    assert h.records[-1].case == "bad" and not h.records[-1].error["ok"]
    assert h.session.quick_rate(h.item("slow", 5.0)) is None and "three samples" in h.records[-1].skipped


# ---- pairs ----


def test_pairs_are_interleaved_and_named():
    h = Harness()
    h.session.run_pairs([h.item("a", 0.002), h.item("b", 0.004)], repeats=2)
    rows = h.records
    assert [r.case for r in rows] == ["a", "b"] * 12
    assert [r.pair_id for r in rows] == [f"{b}.{i}" for b in range(6) for i in range(2) for _ in "ab"]
    assert [r.order for r in rows] == [0, 1] * 12 and {len(r.samples_s) for r in rows} == {1}


def test_pairs_are_checked_first_and_last():
    h = Harness()
    good, bad = verdicts(True), verdicts(True, True, True, False)
    h.session.run_pairs([h.item("a", 0.002, check=good), h.item("b", 0.002, check=bad)])
    assert good.asked[0] == (0, True)
    assert good.asked[-1][0] == [turn for name, turn in h.ran if name == "a"][-1]
    assert any(not r.error["ok"] for r in h.of("b") if r.error)


# ---- warm-up and anchors ----


def warm(monkeypatch, call_s, budget=BUDGET, after=lambda now: 0.0):
    """Warm up on a GEMM whose call takes call_s(now). Returns the harness and the moment the warm-up ended."""
    h = Harness(budget)
    gemm = h.item("anchor.gemm", call_s)
    monkeypatch.setattr(timing, "anchors", lambda machine: [replace(gemm, case=replace(gemm.case, role="anchor"))])
    h.session.warm_up(MACHINE)
    return h, h.clock.now


def test_a_constant_time_is_level_after_one_window(monkeypatch):
    h, end = warm(monkeypatch, 5 * MS)
    (record,) = h.records
    assert record.role == "warmup" and record.flags == () and len(record.samples_s) > 3
    assert CpuTimer.warm_window_s <= end < 2 * CpuTimer.warm_window_s


def test_noise_within_bounds_is_level(monkeypatch):
    rng = random.Random(3)
    h, end = warm(monkeypatch, lambda _: 5 * MS * rng.uniform(1, 1.05))
    assert h.records[0].flags == () and end < 2


def test_a_clock_that_still_rises_is_not_level(monkeypatch):
    h, end = warm(monkeypatch, lambda now: 5 * MS * max(1.0, 1.5 - now / 2))  # ready after 1 s
    assert h.records[0].flags == () and end > 1.0


def test_twenty_slow_samples_are_over_before_it_ends(monkeypatch):
    calls = iter(range(10**9))
    ramp = lambda _: 10 * MS * (2 if next(calls) < 20 else 1)  # noqa: E731
    h, _ = warm(monkeypatch, ramp)
    assert h.records[0].flags == () and h.records[0].samples_s[-1] == pytest.approx(10 * MS)
    h.session.run_blocks([h.item("x", ramp)])
    found = estimate(blocks_of(h.timed("x")))
    assert (found.lo, found.hi) == pytest.approx((10 * MS, 10 * MS))


@pytest.mark.parametrize("boost_s", [0.1, 0.25, 0.35, 0.42])
@pytest.mark.parametrize("droop_s", [0.01, 0.2])
def test_a_boost_that_still_droops_is_not_level(monkeypatch, boost_s, droop_s):
    # fast at first, then power-limited: what is measured after the warm-up must be the second
    h, _ = warm(monkeypatch, lambda now: 5 * MS * (1 + 0.3 * min(1.0, max(0.0, (now - boost_s) / droop_s))))
    assert h.records[0].flags == () and h.records[0].samples_s[-1] == pytest.approx(1.3 * 5 * MS, rel=0.021)


@pytest.mark.parametrize("percent_a_second", [7, -7])  # 3.5 % over the window
def test_a_slow_drift_either_way_is_not_level(monkeypatch, percent_a_second):
    h, _ = warm(monkeypatch, lambda now: 5 * MS * (1 + percent_a_second / 100 * now))
    assert h.records[0].flags == ("NOT_LEVEL",)


def test_never_level_ends_with_the_budget_and_says_so(monkeypatch):
    h, end = warm(monkeypatch, lambda now: 5 * MS * (1 + now / 4))
    assert h.records[0].flags == ("NOT_LEVEL",)
    assert CpuTimer.warm_budget_s <= end < CpuTimer.warm_budget_s + 0.2
    assert len(h.records[0].samples_s) <= 400


def test_a_call_longer_than_the_budget_ends_too(monkeypatch):
    h, end = warm(monkeypatch, 10.0)
    assert h.records[0].flags == ("NOT_LEVEL",) and end < 80


def test_quick_warms_up_for_less(monkeypatch):
    _, end = warm(monkeypatch, 5 * MS, BUDGETS["quick"])
    assert end < CpuTimer.warm_window_s / 2


@pytest.mark.parametrize("call_s", [0.8 * MS, 11 * MS, 0.4])
@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_an_anchor_lasts_its_second(kind, call_s):
    clock = Clock()
    cuda = FakeCuda(clock)
    h = Harness(timer=GpuTimer(cuda, clock.ns) if kind == "gpu" else None)
    item = h.item("anchor.copy", call_s)
    if kind == "gpu":
        h.session.clock, item.call = clock, cuda.op(call_s)
    h.session._anchors = [item]
    h.session.anchor()
    h.session.anchor()
    wanted = h.timer.anchor_s
    assert [r.block for r in h.records] == [0, 1]
    for r in h.records:
        assert 3 <= len(r.samples_s) <= 201
        assert wanted * 0.95 <= sum(r.samples_s) <= max(wanted * 1.3, 3.2 * call_s) and "HOST_BOUND" not in r.flags


def test_real_anchors_are_fixed_and_not_constant(monkeypatch):
    monkeypatch.setitem(timing.ANCHOR_N, "cpu", 256)
    monkeypatch.setitem(timing.ANCHOR_COPY_BYTES, "cpu", 2**20)
    gemm, copy = timing.anchors(replace(MACHINE, torch=torch))
    assert (gemm.case.name, copy.case.name) == ("anchor.gemm", "anchor.copy")
    assert gemm.case.role == copy.case.role == "anchor"
    n = gemm.case.params["n"]
    assert 128 <= n <= 256 and gemm.case.flop == 2 * n**3 and gemm.case.bytes_moved == 3 * 2 * n * n
    assert copy.case.bytes_moved == 2 * 2**20 and copy.case.params["buffer_bytes"] == 2**20
    out = gemm.call(0)
    assert out.float().std() > 1 and len(out.unique()) > 100
    assert copy.call(0).std() > 0.9


@pytest.mark.parametrize("elements", [1, 1000, 2**24 + 5])
def test_operands_are_normal_and_never_constant(elements):
    torch.manual_seed(0)
    x = normal(torch, elements, torch.bfloat16, "cpu")
    assert x.shape == (elements,) and bool(torch.isfinite(x).all())
    if elements > 1:
        assert abs(float(x.float().mean())) < 0.2 and abs(float(x.float().std()) - 1) < 0.1
        assert len(x[:20000].unique()) > 100


# ---- noise ----


def test_noise_stands_beside_the_samples_of_a_cpu():
    h = Harness()
    item = h.item("x", 0.01)
    item.threads = 1
    h.session.run_blocks([item, h.item("y", 0.01)])
    assert {r.noise["threads"] for r in h.of("x")} == {1} and {r.noise["threads"] for r in h.of("y")} == {2}
    assert all({"wall_s", "threads"} <= set(r.noise) for r in h.records)


def test_lost_cpu():
    before = {"cpu_s": 10.0, "wall_s": 100.0, "steal_s": 1.0, "pressure_s": 2.0}
    after = {"cpu_s": 13.0, "wall_s": 102.0, "steal_s": 1.5, "pressure_s": 2.25}
    found = disturbance_between(before, after, threads=2)
    assert found == {"wall_s": 2, "threads": 2, "lost_cpu_frac": 0.25, "steal_s": 0.5, "pressure_s": 0.25}
    assert disturbance_between(before, {**after, "cpu_s": 20.0}, 2)["lost_cpu_frac"] == 0  # other threads helped
    without = {k: v for k, v in after.items() if k != "pressure_s"}
    assert "pressure_s" not in disturbance_between(before, without, 2)
    assert "lost_cpu_frac" not in disturbance_between(before, before, 2)


def test_this_host_can_be_asked():
    found = timing.cpu_disturbance()
    assert {"cpu_s", "wall_s"} <= set(found) and all(v >= 0 for v in found.values())


def test_a_session_may_be_limited_to_named_cases():
    h = Harness()
    h.session.only = ("b", "gone")
    called = []
    h.session.run_blocks([h.item("b", 0.01), Prepared(Case("a"), call=called.append)])
    h.session.skip(Case("a"), "no memory")
    h.session.skip(Case("gone"), "no memory")
    assert not called and {r.case for r in h.records} == {"b", "gone"}
    assert h.session.quick_rate(h.item("a", 0.01)) is None and len(h.of("b")) >= h.session.budget.blocks


def test_records_are_written_as_they_come():
    h = Harness()
    seen = []
    h.session._write = lambda r: seen.append((r.case, h.clock.now))
    h.session.run_blocks([h.item("a", 0.02), h.item("b", 0.02)])
    moments = [t for _, t in seen]
    assert moments == sorted(moments) and len(set(moments)) == 12
    assert all(isinstance(to_line(r), str) and isinstance(r, Record) for r in h.records)


# ---- budgets, progress ----


def test_budgets_grow():
    quick, standard, full = (BUDGETS[n] for n in ("quick", "standard", "full"))
    for name in ("block_s", "case_s", "search_s"):
        assert getattr(quick, name) < getattr(standard, name) < getattr(full, name)
    assert all(b.blocks >= MIN_BLOCKS and b.name == n for n, b in BUDGETS.items())


def test_progress_is_throttled():
    clock, said = Clock(), []
    progress = Progress("compute", said.append, clock)
    for _ in range(100):
        progress("checking", always=False)
        clock.spend(0.3)
    assert len(said) == 6 and said[0] == "compute: checking"  # at 0, 5.1, 10.2, ... of 30 s
    progress("done")
    progress("done")
    assert said[-2:] == ["compute: done"] * 2


def test_progress_goes_to_stderr(capsys):
    Progress("compute")("hello")
    assert capsys.readouterr() == ("", "compute: hello\n")
