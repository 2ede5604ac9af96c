"""The iterations of a run beside one another: every headline of every fresh process, their mean and how sure it is.

The interval is Student's 95 % interval of the MEAN over fresh processes, from two values on, cut at 0 since no headline is
negative. It says where the mean of many more such processes would lie; a single one of them may lie outside. Blocks do not
enter it: see `compare` for why a process counts once.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import quote

from escher_kernels.records import RecordError
from escher_kernels.statistics import COVERAGE
from validation import compare
from validation.compare import Headline
from validation.derive import LoadedRun

SCHEMA = 1
RULE = "Student's t, mean over fresh processes, cut at 0"
SUFFIX = {"FLOP/s": "flop_s", "B/s": "bytes_s", "fraction": "frac", "s": "s", "B": "bytes"}
PERSONS = {"FLOP/s": (1e12, "TFLOP/s"), "B/s": (1e9, "GB/s"), "fraction": (0.01, "%"), "s": (1.0, "s"), "B": (2.0**30, "GiB")}
NOTHING = "n/a"

FILE = "iterations.json"  # of a run


def summary(run: LoadedRun) -> dict[str, Any]:
    """iterations.json, in base units. A headline's `values` and `reasons` have one entry an iteration: its value, or null
    and why there is none. RecordError or WorkloadError where a part of the run is damaged."""
    numbers = [_headlines(r) for r in run.iterations]
    return {
        "schema": SCHEMA,
        "run_id": run.info["run_id"],
        "interval": {"rule": RULE, "coverage": COVERAGE},
        "iterations": [{"iteration": r.iteration, "status": statuses(r)} for r in run.iterations],
        "headlines": [_over([n[key] for n in numbers]) for key in compare.HEADLINES],
    }


def _headlines(run: LoadedRun) -> dict[str, Headline]:
    try:
        return compare.headlines(run)
    except (KeyError, TypeError, AttributeError) as exc:
        what = f"{type(exc).__name__}: {exc}"
        raise RecordError(f"{run.directory}: a record lacks what its family writes ({what}); measure again") from None


def _over(numbers: Sequence[Headline]) -> dict[str, Any]:
    about, values = numbers[0], [n.value.median if n.value else None for n in numbers]
    known = [v for v in values if v is not None]
    low, high = mean_interval(known) or (None, None)
    mean = statistics.fmean(known) if known else None
    return {
        "key": about.key, "label": about.label, "family": about.family, "unit": about.unit,
        "mean": mean, "median": statistics.median(known) if known else None, "low": low, "high": high,
        "cv": statistics.stdev(known) / mean if len(known) > 1 and mean else None, "count": len(known), "values": values,
        "reasons": [None if n.value else n.reason for n in numbers], "at_least": any(n.at_least for n in numbers),
    }  # fmt: skip


def mean_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """See the module's docstring; None for fewer than two values."""
    if len(values) < 2:
        return None
    from scipy import stats  # loading it takes most of a second

    mean = statistics.fmean(values)
    half = float(stats.t.ppf((1 + COVERAGE) / 2, len(values) - 1)) * statistics.stdev(values) / math.sqrt(len(values))
    return max(0.0, mean - half), mean + half


def families(run: LoadedRun) -> list[str]:
    """Those that were chosen, then any other that an iteration measured or has a status of."""
    parts = run.iterations
    return list(dict.fromkeys([*run.info.get("families", ()), *(f for r in parts for f in (*r.status, *r.files))]))


def statuses(run: LoadedRun) -> dict[str, str]:
    """How each family ended in one iteration: as status.json says it, "unknown" or "not run" where that says nothing."""
    return {
        family: run.status.get(family, {}).get("status") or ("unknown" if family in run.files else "not run")
        for family in families(run)
    }


def lines(found: dict[str, Any]) -> Iterator[str]:
    """A `summary` for the console: a line a headline, below its family. What no iteration has is left out."""
    count, said = len(found["iterations"]), False
    for family in dict.fromkeys(h["family"] for h in found["headlines"]):
        for h in (h for h in found["headlines"] if h["family"] == family and h["count"]):
            if said != family:
                said = family
                yield f"{family}, {count} {'iteration' if count == 1 else 'iterations'}"
            yield "  " + _line(h)
    if not said:
        yield "no iteration has a headline"


def _line(h: dict[str, Any]) -> str:
    scale, unit = PERSONS[h["unit"]]

    def figure(value: float | None) -> str:
        return "-" if value is None else f"{value / scale:.4g}"

    between = f"{COVERAGE * 100:g} % interval {figure(h['low'])} to {figure(h['high'])}" if h["count"] > 1 else "no interval"
    least = "at least " if h["at_least"] else ""
    values = ", ".join(map(figure, h["values"]))
    return f"{h['label']}: mean {least}{figure(h['mean'])} {unit}, median {figure(h['median'])}, {between}; {values}"


def result_line(run: LoadedRun, iteration: int) -> str:
    """One line for a log: "RESULT: " and key=value fields, each without a blank, in base units, n/a for what there is not.

    To read it: split at blanks, then at the first "=". Names are percent-encoded. RecordError for an iteration that the run
    does not have, and as for `summary`.
    """
    part = next((r for r in run.iterations if r.iteration == iteration), None)
    if part is None:
        there = ", ".join(str(r.iteration) for r in run.iterations)
        raise RecordError(f"{run.directory}: no iteration {iteration}; it has {there}")
    fields = {"iteration": str(iteration)}
    for key, h in _headlines(part).items():
        fields[f"{key}_{SUFFIX[h.unit]}"] = f"{h.value.median:.9g}" if h.value else NOTHING
    ended: dict[str, list[str]] = {}
    for family, status in statuses(part).items():
        ended.setdefault(status, []).append(_word(family))
    workload, profile = run.info["workload"], run.selection.profile
    fields |= {
        "families": ";".join(f"{_word(status)}:{','.join(names)}" for status, names in ended.items()) or NOTHING,
        "run": _word(run.info["run_id"]),
        "workload": _word(workload.get("name") if isinstance(workload, dict) else None),
        "target": _word(profile and profile.key),
    }
    return "RESULT: " + " ".join(f"{key}={value}" for key, value in fields.items())


def _word(text: Any) -> str:
    return quote(str(text), safe="", errors="replace") if text else NOTHING
