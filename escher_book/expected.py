"""How long a run will take, for --dry-run: by earlier runs of the same device, else by figures that were measured elsewhere.

Nothing is computed from a model of the machine. Where nothing was measured, that is said.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from escher_book import runner
from escher_kernels.records import RecordError, read_json

TABLE = runner.ROOT / "configs" / "expected_seconds.json"  # kind of device -> budget -> family -> seconds; source, date
NEWEST = 10


@dataclass(frozen=True)
class Expected:
    """`seconds` of one family, once; None: not known. `basis`: by what. `limit_s`: what it may take."""

    seconds: float | None
    basis: str
    limit_s: float


@dataclass(frozen=True)
class _Earlier:
    created_utc: str
    workload: str
    seconds: Mapping[str, Sequence[float]]  # family -> of each iteration that ended well


def expected(
    results_root: Path,
    families: Sequence[str],
    budget: str,
    found: Mapping[str, Any],
    workload: str,
    limits_s: Mapping[str, float] | None = None,
    table: Path = TABLE,
) -> dict[str, Expected]:
    """What each family will take on the device `found` (a `targets.Found` as JSON): the median over the newest earlier runs
    of it below `results_root` with this budget and this workload, else any workload, else `table`.

    `limits_s`: what a family may take; what is not in it has the limit of its budget. RecordError for a table that cannot be
    used; runs that cannot be are passed over.
    """
    runs = earlier(results_root, found.get("raw_name"), budget)
    figures, source = _figures(table, found.get("kind"), budget)
    out = {}
    for family in families:
        limit_s = (limits_s or {}).get(family) or runner.TIMEOUT_S[budget]
        same = _newest([r for r in runs if r.workload == workload], family)
        others = _newest(runs, family)
        if same:
            out[family] = Expected(statistics.median(same), _counted(len(same)), limit_s)
        elif others:
            out[family] = Expected(statistics.median(others), f"{_counted(len(others))} with another workload", limit_s)
        elif family in figures:
            out[family] = Expected(figures[family], f"no earlier run here; measured on {source}", limit_s)
        else:
            out[family] = Expected(None, f"no earlier run to go by; the limit is {limit_s:g} s", limit_s)
    return out


def earlier(root: Path, raw_name: str | None, budget: str) -> list[_Earlier]:
    """Measured runs of the device with the budget, the newest first."""
    out = []
    for path in Path(root).glob("*/run.json"):
        if path.parent.is_symlink():  # results/latest
            continue
        try:
            info, status = read_json(path), read_json(path.with_name("status.json"))
            if info["source"] != "measured" or info["settings"]["budget"] != budget:
                continue
            if raw_name is None or info["target"]["found"]["raw_name"] != raw_name:
                continue
            seconds = {family: _seconds(ended) for family, ended in status.items()}
            out.append(_Earlier(str(info["created_utc"]), info["workload"]["name"], seconds))
        except (RecordError, KeyError, TypeError, AttributeError):
            continue
    return sorted(out, key=lambda run: run.created_utc, reverse=True)


def _seconds(ended: Mapping[str, Any]) -> list[float]:
    each = ended["iterations"].values() if "iterations" in ended else [ended]
    return [e["seconds"] for e in each if e["status"] == "ok" and _is_seconds(e["seconds"])]


def _is_seconds(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf


def _newest(runs: Sequence[_Earlier], family: str) -> list[float]:
    """One figure a run: that of its median iteration."""
    return [statistics.median(run.seconds[family]) for run in runs if run.seconds.get(family)][:NEWEST]


def _counted(count: int) -> str:
    return "the one earlier run" if count == 1 else f"median of {count} earlier runs"


def _figures(table: Path, kind: str | None, budget: str) -> tuple[dict[str, float], str]:
    if not table.is_file():
        return {}, ""
    try:
        data = read_json(table)
        figures = dict(data.get(kind, {}).get(budget, {}))
        source = f"{data['source']}, {data['date']}"
    except (KeyError, TypeError, ValueError, AttributeError) as exc:
        if isinstance(exc, RecordError):
            raise
        raise RecordError(f"{table}: expected kind, budget, family and seconds, with source and date; {exc}") from None
    for family, value in figures.items():
        if not _is_seconds(value):
            raise RecordError(f"{table}: {kind}.{budget}.{family} is {value!r}; expected seconds, e.g. 64")
    return figures, source


def as_text(plan: Mapping[str, Expected], iterations: int = 1, workloads: int = 1) -> str:
    """The plan as a table, and what all of it will take."""
    rows = [("family", "limit, min", "expected, min", "basis")]
    rows += [(family, f"{e.limit_s / 60:.3g}", _minutes(e.seconds), e.basis) for family, e in plan.items()]
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    lines = [f"{a:<{widths[0]}}  {b:>{widths[1]}}  {c:>{widths[2]}}  {d}".rstrip() for a, b, c, d in rows]
    return "\n".join([*lines, _total(plan, iterations, workloads)])


def _total(plan: Mapping[str, Expected], iterations: int, workloads: int) -> str:
    times = iterations * workloads
    known_s = [e.seconds for e in plan.values() if e.seconds is not None]
    open_ = [family for family, e in plan.items() if e.seconds is None]
    parts = []
    if known_s:
        counted = [f"{n} {word}" for n, word in ((iterations, "iterations"), (workloads, "workloads")) if n > 1]
        each = f" ({_minutes(sum(known_s))} min x {' x '.join(counted)})" if counted else ""
        parts.append(f"{_minutes(sum(known_s) * times)} min{each}")
    if open_:
        most_s = sum(plan[family].limit_s for family in open_) * times
        parts.append(f"not known: {', '.join(open_)}, at most {_minutes(most_s)} min")
    return f"in all: {'; '.join(parts) or 'nothing to measure'}"


def _minutes(seconds: float | None) -> str:
    if seconds is None:
        return "?"
    return f"{seconds / 60:.1f}" if seconds >= 3 else "< 0.1"
