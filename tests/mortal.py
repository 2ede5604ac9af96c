"""A measuring process on a fake clock that kills itself with SIGKILL at the N-th of its moments. Usage: mortal.py FILE LOG N

A moment is: before a sample, after one, before a record is written, in the middle of writing it, before and after it is on
the disk. LOG gets a line for every block that was really measured. N = 0: it lives.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from escher_kernels import records
from escher_kernels.records import Run, Writer
from escher_kernels.timing import Budget, Case, CpuTimer, Prepared, Session

FAMILY = "mortal"
SEARCH = [f"search.{i}" for i in range(3)]
CASES = ["plain", "checked", "slow", "wrong", "skipped"]
PAIRS = ["pair.a", "pair.b"]


class Mortal:
    """Counts moments and ends the process at the `last` one."""

    def __init__(self, last: int):
        self.left = last

    def __call__(self) -> None:
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def main(path: Path, log: Path, last: int) -> None:
    moment, now = Mortal(last), [0.0]
    fsync = os.fsync

    class File:
        """The record file's descriptor, written in two halves."""

        def __init__(self, inner):
            self.inner = inner

        def write(self, data: bytes) -> int:
            moment()
            done = self.inner.write(data[: len(data) // 2])
            moment()
            return done + self.inner.write(data[done:])

        def __getattr__(self, name):
            return getattr(self.inner, name)

    def synced(descriptor: int) -> None:
        moment()
        fsync(descriptor)
        moment()

    records.os.fsync = synced
    measured = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def item(name: str, seconds: float, role: str = "case", check=None) -> Prepared:
        def call(_: int) -> None:
            now[0] += seconds

        return Prepared(Case(name, flop=10, role=role), call=call, check=check)

    run = Run("run", FAMILY, 1, {}, {}, {}, {}, {}, [], "2026-01-01T00:00:00+00:00")
    with Writer(path, run, go_on=True) as out:
        out._file = File(out._file)
        before = out.before.records if out.before else []
        budget = Budget("standard", block_s=0.01, case_s=2.0, search_s=20)
        session = Session(FAMILY, CpuTimer(lambda: round(now[0] * 1e9)), out.write, budget, 1, lambda *_, **__: None,
                          lambda: now[0], before=before)  # fmt: skip
        block = session._block

        def watched(case: Prepared, number: int, *arguments, **fields):
            moment()
            done = block(case, number, *arguments, **fields)  # written by now
            os.write(measured, f"{case.case.name} {fields.get('pair_id') or number}\n".encode())
            moment()
            return done

        session._block = watched
        for name in SEARCH:
            session.quick_rate(item(name, 0.002, "search"))
        right, wrong = (lambda turn, full: {"check": "x", "ok": True}), (lambda turn, full: {"check": "x", "ok": False})
        session.record(Case("value"), value=1.0, unit="B")
        session.run_blocks([
            item("plain", 0.002), item("checked", 0.002, check=right), item("slow", 0.4), item("wrong", 0.002, check=wrong),
            Prepared(Case("skipped", skipped="too big")),
        ])  # fmt: skip
        session.run_pairs([item(name, 0.002, "pair") for name in PAIRS])


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
