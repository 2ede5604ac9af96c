"""The page "The run": how it was made and how it went, from run.json, status.json and records alone.

What an older run.json does not have is "not recorded"; what it holds as null was asked for and could not be told.
"""

from __future__ import annotations

import html
import re
import shlex
from collections.abc import Sequence
from typing import Any

from escher_book import findings, vega, verdict
from escher_book.stage import admonition, escape
from escher_book.tables import GIB, NONE, Column, Table, facts, number, seconds
from escher_kernels.records import RecordError
from escher_kernels.telemetry import poller
from escher_kernels.workload import WorkloadError
from validation import iterations
from validation.derive import LoadedRun
from validation.scorecard import Figure

FALLBACK = "FALLBACK: "
NOT_RECORDED, UNKNOWN = "not recorded", "not known"
FOLDERS = re.compile(r"^((?:--?[\w-]+=)?)/(?:[^/]+/)*")  # of an absolute path: they are of one machine, and nobody else's


def page(run: LoadedRun, markdown: bool = False) -> str:
    """The page; with `markdown` without HTML, and so without the chart."""
    def shown(table: Table) -> str:
        return _shown(table, markdown)

    provenance = findings.provenance(run)
    steps, found = prepared(run), fallbacks(run)
    parts = [
        "# The run",
        escape(provenance) if markdown else f'<p class="subtitle">{html.escape(provenance)}</p>',
        *(f"> {escape(text)}" if markdown else admonition(kind, text) for kind, text in findings.banners(run)),
        "## How it was made",
        shown(made(run)),
        "## Tuning",
        shown(tuning(run)),
        *([shown(steps)] if steps else []),
        "## How it went",
        shown(ended(run)),
        resumed(run),
        *map(shown, telemetry(run)),
        "The file `raw/run.log` of the run holds the fingerprint of the machine and all that the console said.",
        "## Library fallbacks",
        shown(found) if found else "None was reported.",
        "## Iterations",
        *repeated(run, markdown),
    ]
    return "\n\n".join(p for p in parts if p) + "\n"


def _shown(table: Table, markdown: bool) -> str:
    """A table whose cells are lines: a blank line would end the block of HTML, and what follows would be Markdown."""
    table.cells = [[re.sub(r"[\r\n]+", " ", cell) for cell in row] for row in table.cells]
    return table.to_markdown() if markdown else table.to_html()


# ---- how it was made ----


def _text(value: Any) -> str:
    """On one line."""
    return " ".join(str(value).split())


def _of(data: dict[str, Any], key: str, null: str = UNKNOWN, unit: str = "") -> str:
    if key not in data:
        return NOT_RECORDED
    value = data[key]
    return null if value in (None, "", []) else f"{_text(value)} {unit}".rstrip()


def _when(utc: Any) -> str:
    return _text(utc).replace("T", " ").replace("+00:00", " UTC")


def command(argv: Any) -> str:
    """The command line as a shell takes it, absolute paths without their folders."""
    if not isinstance(argv, list) or not argv:
        return NOT_RECORDED
    return _text(shlex.join(FOLDERS.sub(r"\1.../", str(word)) for word in argv))


def made(run: LoadedRun) -> Table:
    info, selection, found = run.info, run.selection, run.found
    settings = info["settings"] if isinstance(info["settings"], dict) else {}
    git = info.get("git") if isinstance(info.get("git"), dict) else {}
    changed = {True: ", with changes that were not committed", None: ", unknown whether it was changed"}
    chosen = info.get("families")
    asked = settings.get("target")
    profile = selection.profile.name if selection.profile else f"none: {selection.reason}"
    gpu = found.kind != "cpu"
    items = [
        ("command", command(info.get("argv"))),
        ("begun", _when(info["created_utc"])),
        ("resumed", ", ".join(map(_when, info.get("resumed_utc") or [])) or "no"),
        ("budget", _of(settings, "budget")),
        ("workload", _of(info["workload"], "name")),
        ("families", ", ".join(map(_text, chosen)) if isinstance(chosen, list) else NOT_RECORDED),
        ("iterations", str(len(run.iterations)) if "iterations" in info or run.repeats else NOT_RECORDED),
        ("target", f"{profile} (asked for: {_text(asked)})" if asked else profile),
        ("device", f"{findings.device_name(run)}, {found.raw_name} {found.arch}"),
        ("GPUs", f"{found.count}, measured on device 0" if found.count > 1 else str(found.count) if gpu else "none"),
        ("partition", _of(info, "partition", UNKNOWN if gpu else NONE)),
        ("memory partition (NPS)", _of(info, "nps", UNKNOWN if gpu else NONE)),
        ("power cap", _of(info, "power_cap_w", UNKNOWN if gpu else NONE, "W")),
        ("processes (world)", _of(info, "world")),
        ("method", _text(info["method"])),
        ("source", f"commit {git['commit']}{changed.get(git.get('dirty'), '')}" if git.get("commit") else NOT_RECORDED),
    ]
    return facts("run_made", "What was asked for, and on what it ran", items)


def _tuning(run: LoadedRun) -> dict[str, Any]:
    found = run.info.get("tuning")
    return found if isinstance(found, dict) else {}


def tuning(run: LoadedRun) -> Table:
    asked = _tuning(run)
    steps = asked.get("prepare_sys", NOT_RECORDED)
    items = [
        ("numactl", _of(asked, "numactl", "not used")),
        ("telemetry of the host", _of(asked, "stat_interval_s", "none was kept", "s between two readings")),
        ("settings of the machine", steps if isinstance(steps, str) else "tuned, see below" if steps else "left as they were"),
    ]
    return facts("run_tuning", "What was tuned for the run", items)


def prepared(run: LoadedRun) -> Table | None:
    """What --prepare-sys did, files that fared alike in one row; None where it was not asked for."""
    steps, names = _tuning(run).get("prepare_sys"), ("name", "status", "before", "after", "detail")
    grouped: dict[tuple[str, ...], int] = {}
    for step in steps if isinstance(steps, list) else ():
        if isinstance(step, dict):
            key = tuple(_text(NONE if step.get(n) in (None, "") else step[n]) for n in names)
            grouped[key] = grouped.get(key, 0) + 1
    if not grouped:
        return None
    columns = [
        Column("setting", lambda i: i[0][0]),
        Column("status", lambda i: i[0][1]),
        Column("before", lambda i: i[0][2]),
        Column("during the run", lambda i: i[0][3]),
        Column("files", lambda i: str(i[1]), True),
        Column("why", lambda i: i[0][4]),
    ]
    raw = [{**dict(zip(names, key, strict=True)), "files": count} for key, count in grouped.items()]
    return Table("run_prepare_sys", "Settings of the machine, for the time of the run", columns, list(grouped.items()), raw)


# ---- how it went ----


READINGS = {"frac": ("%", 100), "hz": ("GHz", 1e-9), "bytes": ("GiB", 1 / GIB), "w": ("W", 1), "c": ("\N{DEGREE SIGN}C", 1)}


def telemetry(run: LoadedRun) -> list[Table]:
    """What the host did meanwhile, one table a process that measured; what could not be read is left out."""
    out = []
    for path in poller.files(run.directory / "telemetry"):
        try:
            found = poller.summary(path)
        except (OSError, ValueError):
            continue
        items = [(name, q) for name, q in found["quantities"].items() if q["count"]]
        if not items:
            why = found["note"] or "nothing could be read"
            out.append(Table(f"run_telemetry_{path.stem}", f"The host meanwhile: {why}", [], []))
            continue
        gap = f", the longest gap {seconds(found['longest_gap_s'])}" if found["longest_gap_s"] else ""
        caption = f"The host meanwhile: {found['count']} samples over {seconds(found['duration_s'])}{gap}"
        columns = [Column("reading", lambda i: _words(i[0]))]
        for key, title in (("min", "least"), ("median", "median"), ("max", "largest")):
            columns.append(Column(title, lambda i, key=key: _reading(i[0], i[1][key]), True))
        columns.append(Column("samples", lambda i: str(i[1]["count"]), True))
        raw = [{"reading": name, **q} for name, q in items]
        out.append(Table(f"run_telemetry_{path.stem}", caption, columns, items, raw))
    return out


def _words(name: str) -> str:
    return (name.rpartition("_")[0] if _unit(name) else name).replace("_", " ").replace("cpu", "CPU")


def _unit(name: str) -> tuple[str, float] | None:
    return READINGS.get(name.rpartition("_")[2])


def _reading(name: str, value: float) -> str:
    unit, scale = _unit(name) or ("", 1)
    return f"{number(value * scale)}\N{NO-BREAK SPACE}{unit}".rstrip("\N{NO-BREAK SPACE}")


def ended(run: LoadedRun) -> Table:
    """How each family ended in each iteration."""
    items = [
        {
            "family": family, "iteration": part.iteration, "status": status, "records": len(part.records(family)),
            "started_utc": part.status.get(family, {}).get("started_utc"), "seconds": part.status.get(family, {}).get("seconds"),
            "message": _text(part.status.get(family, {}).get("message") or ""),
        }
        for part in run.iterations
        for family, status in iterations.statuses(part).items()
    ]  # fmt: skip
    columns = [
        Column("family", lambda i: i["family"]),
        Column("iteration", lambda i: str(i["iteration"]) if run.repeats else "", True, optional=True),
        Column("ended", lambda i: i["status"]),
        Column("begun", lambda i: _when(i["started_utc"] or NONE)),
        Column("time", lambda i: seconds(i["seconds"]), True),
        Column("records", lambda i: f"{i['records']:,}", True),
        Column("why", lambda i: i["message"], optional=True),
    ]
    return Table("run_ended", "How each family ended", columns, items, items)


def resumed(run: LoadedRun) -> str:
    """Which processes measured what, where more than one measured a family of one iteration."""
    said = []
    for part in run.iterations:
        of: dict[str, list[tuple[int, Any]]] = {}
        for m in part.marks:
            if m.record.params.get("kind") == "resumed":
                of.setdefault(m.record.family, []).append((m.after, m.record.params.get("created_utc", "an unknown time")))
        for family, marks in of.items():
            where = f"{family}, iteration {part.iteration}" if run.repeats else family
            bounds = [*(after for after, _ in marks), len(part.records(family))]
            counts = [b - a for a, b in zip([0, *bounds], bounds, strict=False)]
            first, *rest = (f"{n:,} {'record' if n == 1 else 'records'}" for n in counts)
            more = (f"{n} by the one of {_when(utc)}" for n, (_, utc) in zip(rest, marks, strict=True))
            said.append(f"{where}: {first} by the first process, {', '.join(more)}")
    times = run.info.get("resumed_utc") or []
    if not (said or times):
        return ""
    when = f" on {' and on '.join(map(_when, times))}" if times else ""
    what = f"{'; '.join(said)}" if said else "what was missing was measured by new processes from its beginning"
    return escape(f"The run was resumed{when}. What each process measured: {what}.")


def fallbacks(run: LoadedRun) -> Table | None:
    """What libraries said they did instead of what was asked of them; None where no record tells of any."""
    found: dict[str, set[tuple[str, str, str]]] = {}
    for part in run.iterations:
        for family in part.files:
            for r in part.records(family):
                for flag in r.flags:
                    if flag.startswith(FALLBACK):
                        found.setdefault(_text(flag.removeprefix(FALLBACK)), set()).add((family, r.role, r.case))
    if not found:
        return None
    items = [(text, len(rows), ", ".join(sorted({family for family, *_ in rows}))) for text, rows in sorted(found.items())]
    columns = [
        Column("what it says", lambda i: i[0]),
        Column("rows", lambda i: str(i[1]), True),
        Column("families", lambda i: i[2]),
    ]
    raw = [dict(zip(("fallback", "rows", "families"), i, strict=True)) for i in items]
    return Table("run_fallbacks", "What the libraries did instead of what was asked", columns, items, raw)


# ---- iterations ----

ONE = (
    "One iteration was measured, so nothing here tells how far a fresh process would differ. `make book ITERATIONS=3` measures "
    "each family in three."
)
HOW_TO_READ = (
    "Each iteration is a fresh process a family. The interval is Student's 95 % interval of the mean over the iterations, cut "
    "at 0: it tells where the mean of many more would lie. CV is the sample standard deviation over the mean. The pages of the "
    "families and the criteria of speed go by iteration {}; how far the iterations differ is SC-8's."
)


def repeated(run: LoadedRun, markdown: bool = False) -> list[str]:
    """The part of the page that tells of the iterations."""
    if not run.repeats:
        return [ONE]
    try:
        found = iterations.summary(run)
    except (RecordError, WorkloadError) as exc:
        return [escape(f"Not shown: {exc}.")]
    out = [HOW_TO_READ.format(run.iteration)]
    for table in iteration_tables(found):
        out.append(_shown(table, markdown))
    without = [h for h in found["headlines"] if not h["count"] and h["family"] in iterations.families(run)]
    out += [escape(f"No iteration has {h['label']}: {'; '.join(dict.fromkeys(h['reasons']))}.") for h in without]
    if not markdown and (chart := strip(found)):
        out.append(_figure(chart))
    return out


def iteration_tables(found: dict[str, Any]) -> list[Table]:
    """A table a family of what `iterations.summary` gives; headlines that no iteration has are left out."""
    families: dict[str, list[dict[str, Any]]] = {}
    for h in found["headlines"]:
        if h["count"]:
            families.setdefault(h["family"], []).append(h)
    return [_iteration_table(family, items, found["iterations"]) for family, items in families.items()]


def _iteration_table(family: str, items: Sequence[dict[str, Any]], parts: Sequence[dict[str, Any]]) -> Table:
    def each(h: dict[str, Any]) -> str:
        return ", ".join(NONE if v is None else verdict.figure(v, h["unit"]) for v in h["values"])

    def why(h: dict[str, Any]) -> str:
        told = zip(parts, h["reasons"], strict=True)
        return "; ".join([f"iteration {p['iteration']}: {_text(r)}" for p, r in told if r] + ["at least"] * h["at_least"])

    columns = [
        Column("headline", lambda h: h["label"]),
        Column("mean", lambda h: verdict.figure(h["mean"], h["unit"], h["low"], h["high"]), True),
        Column("median", lambda h: verdict.figure(h["median"], h["unit"]), True),
        Column("95 % interval of the mean", _between, True),
        Column("CV", lambda h: NONE if h["cv"] is None else f"{number(h['cv'] * 100, 2)} %", True),
        Column("of each iteration", each),
        Column("notes", why, optional=True),
    ]
    keys = ("key", "unit", "mean", "median", "low", "high", "cv", "count")
    numbers = [p["iteration"] for p in parts]
    raw = [{k: h[k] for k in keys} | {f"value_{n}": v for n, v in zip(numbers, h["values"], strict=True)} for h in items]
    return Table(f"iterations_{family}", f"{family}: {len(parts)} iterations", columns, items, raw)


def _between(h: dict[str, Any]) -> str:
    if h["low"] is None:
        return NONE
    if h["unit"] == "s":
        return f"{seconds(h['low'])} to {seconds(h['high'])}"
    return verdict.spread(Figure("", h["mean"], h["unit"], h["low"], h["high"]))


def strip(found: dict[str, Any]) -> dict[str, Any] | None:
    """A chart of every iteration's value over the mean of its headline; None where no headline has two."""
    points: dict[tuple[str, float], list[str]] = {}  # equal values are one point with all their numbers
    for h in (h for h in found["headlines"] if h["count"] > 1 and h["mean"]):
        for part, value in zip(found["iterations"], h["values"], strict=True):
            if value is not None:
                points.setdefault((h["label"], (value / h["mean"] - 1) * 100), []).append(str(part["iteration"]))
    rows = [{"headline": label, "off": off, "iteration": ", ".join(which)} for (label, off), which in points.items()]
    if not rows:
        return None
    import altair as alt  # loading it takes a second, which no other command must wait for
    import pandas as pd

    from escher_book import charts

    chart = alt.Chart(pd.DataFrame(rows)).encode(  # room for labels: a browser has wider fonts than the layout was made with
        x=alt.X("off:Q", title="off the mean of the iterations, %"),
        y=alt.Y("headline:N", title=None, sort=None, axis=alt.Axis(labelLimit=280, minExtent=280)),
    )
    dots = chart.mark_circle(size=90, opacity=0.75, color=charts.COLOURS["square"])
    names = chart.mark_text(dy=-11, fontSize=10, color=charts.COLOURS["reference"]).encode(text="iteration:N")
    middle = alt.Chart(pd.DataFrame([{"off": 0.0}])).mark_rule(strokeDash=[6, 4], color=charts.COLOURS["reference"])
    layers = alt.layer(middle.encode(x="off:Q"), dots, names)
    title = "Iterations: how far each lies from the mean of its headline"
    head = "a point is an iteration, with its number; the dashed line is the mean"
    return charts.base(layers, title, head).properties(height=alt.Step(44)).to_dict()


def _figure(spec: dict[str, Any]) -> str:
    """The chart as a picture in the page: a generated page loads no script."""
    picture = re.sub(r"\s*\n\s*", " ", vega.svg(spec))
    label = html.escape(vega.title(spec))
    return f'<div class="escher-scroll" role="img" aria-label="{label}" style="background: #fff">{picture}</div>'


def csv_tables(run: LoadedRun) -> list[Table]:
    """The tables of the page that have rows, for tables/*.csv."""
    found = [made(run), tuning(run), prepared(run), ended(run), *telemetry(run), fallbacks(run)]
    if run.repeats:
        found += iteration_tables(iterations.summary(run))
    return [t for t in found if t and t.raw]
