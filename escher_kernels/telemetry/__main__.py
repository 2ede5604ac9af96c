"""`python -m escher_kernels.telemetry --out FILE --interval-s 1`: sample this machine until standard input ends."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

from escher_kernels.telemetry import Collector, host, poller

COLLECTORS: dict[str, Callable[[], Collector]] = {"host": host.Host}


def seconds(text: str) -> float:
    if not 0 < (value := float(text)) < float("inf"):
        raise ValueError(text)
    return value


def cpus(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="escher_kernels.telemetry", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="FILE.jsonl; FILE-2.jsonl where that is there, and so on")
    parser.add_argument("--interval-s", type=seconds, default=1.0)
    parser.add_argument("--collector", choices=list(COLLECTORS), default="host")
    parser.add_argument("--measuring", type=cpus, default=[], help="logical CPUs to keep away from, e.g. 0,1")
    chosen = parser.parse_args(argv)
    for number in (signal.SIGTERM, signal.SIGINT):  # at once; a line that is cut off is forgiven
        signal.signal(number, signal.SIG_DFL)
    warnings.simplefilter("ignore")  # psutil warns of what a host does not show; standard error is for what ends this
    with contextlib.suppress(OSError):
        os.nice(19)
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, host.free_cpus(os.sched_getaffinity(0), chosen.measuring))
    why = poller.sample(COLLECTORS[chosen.collector](), chosen.out, chosen.interval_s, poller.stdin_ended)
    if why:
        with contextlib.suppress(OSError):  # where the disk is full, so is the file that this goes to
            sys.stderr.write(why + "\n")
            sys.stderr.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
