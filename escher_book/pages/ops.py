"""The operations page: what the model's operations cost, alone, against what the roofs allow."""

from __future__ import annotations

import math
from collections.abc import Iterable

import altair as alt
import pandas as pd

from escher_book import charts
from escher_book.charts import COLOURS, NOTHING
from escher_book.findings import correctness, meanwhile
from escher_book.tables import (
    GIGA,
    NONE,
    TERA,
    Column,
    Table,
    Text,
    interval,
    notes,
    number,
    percent,
    ratio,
    raw_row,
    seconds,
    small_percent,
    value,
)
from escher_kernels import workload
from escher_kernels.statistics import Estimate
from validation import derive, roofline
from validation.derive import LoadedRun
from validation.roofline import DEFAULT, OPTIMIZED, OpRow, Ops

MEGA, MILLI = 1e6, 1e-3
CATEGORIES = ("self_attn", "cross_attn", "ffn", "norm", "cache", "time")
COLOUR_OF = dict(zip(CATEGORIES, ("#0072B2", "#56B4E9", "#D55E00", "#009E73", "#CC79A7", "#E69F00"), strict=True))

PLOTS: dict[str, tuple[str, ...]] = {"A6": ("compute", "bandwidth"), "A7": ("compute", "bandwidth")}


def finding(run: LoadedRun) -> Text:
    """What a pass costs as the sum of its operations, and which of them lose the most."""
    found = roofline.ops(run)
    if found is None:
        return Text("This family was not measured.")
    return Text(
        _drift(run), _sums(run, found), _bands(found), _losses(found), _identical(found), _launch_bound(found), _dtype(run),
        correctness([r for r in found.every if r.role == "case"]), meanwhile(run, "ops", shift=found.shift),
    )  # fmt: skip


def _sums(run: LoadedRun, found: Ops) -> str:
    spec = found.spec
    unit = f"{spec.depth} block{'s' if spec.depth > 1 else ''}, {spec.query_tokens:,} query tokens"
    totals = {path: roofline.sum_of_ops(found, path) for path in (DEFAULT, OPTIMIZED)}
    missing = totals[DEFAULT].missing
    if missing:
        return f"**No sum of operations:** no time for {', '.join(missing)}."
    words = [f"**One {spec.unit} is {_ms(totals[DEFAULT].time_s)} as a sum of its operations** on the default path"]
    words[0] += f" and {_ms(totals[OPTIMIZED].time_s)} with the fastest path of each ({unit})."
    if found.roofs_missing:
        return f"{words[0]} What the roofs allow is not known: {found.roofs_missing}."
    theory = roofline.theory_total_s(found)
    words.append(f"The roofs of this run allow {_ms(theory)}.")
    if share := next((m.shares.get("measured") for m in roofline.mfu(run) if m.scope == "sum_optimized"), None):
        words.append(f"With the fastest paths the sum reaches {percent(share)} of the measured compute roof.")
    return " ".join(words)


def _drift(run: LoadedRun) -> str | None:
    """A geometry that is not the one the pilot's totals belong to."""
    made, limit = roofline.calibration(run), run.config.threshold("calibration_drift_pct")
    drifts = [f"{name} {d * 100:+.1f} %" for name, d in (("FLOP", made.flop_drift), ("bytes", made.bytes_drift))
              if d is not None and abs(d) * 100 > limit]  # fmt: skip
    if not drifts:
        return None
    judged = "" if made.applies else f" It is not judged: {made.reason}."
    return (
        f"**The geometry drifts from the totals that its workload declares by more than {limit:g} % ({', '.join(drifts)}):** "
        f"this book measures another model.{judged}"
    )


def _ms(estimate: Estimate | None) -> str:
    return NONE if estimate is None else f"{value(estimate, MILLI)} ms ({interval(estimate, MILLI)})"


def _bands(found: Ops) -> str | None:
    judged = [r for r in found.rows if r.band and not r.launch_bound]
    if not judged:
        return None
    bands = (roofline.AT_LIMIT, roofline.TUNABLE, roofline.ISSUE, roofline.UNSETTLED)
    count = {band: sum(r.band == band for r in judged) for band in bands}
    memory = sum(r.bound == "memory" for r in judged)
    return (
        f"Of {len(judged)} operations {count[roofline.AT_LIMIT]} are at the limit of the hardware, {count[roofline.TUNABLE]} "
        f"tunable and {count[roofline.ISSUE]} a kernel issue (measured over theory time); {memory} are bound by memory."
        + (f" {count[roofline.UNSETTLED]} are unsettled: their interval spans two of these." if count[roofline.UNSETTLED] else "")
    )


def lost_s(found: Ops, row: OpRow) -> float | None:
    """Seconds a pass that an operation takes beyond its theory time, on its optimized path."""
    if not (row.optimized and row.optimized.time_s and row.theory_s):
        return None
    times = 1 if row.op.per_pass else found.spec.depth
    return times * (row.optimized.time_s.median - row.theory_s.median)


def _losses(found: Ops) -> str | None:
    lost = sorted(((loss, r) for r in found.rows if (loss := lost_s(found, r)) and loss > 0), key=lambda x: -x[0])[:3]
    if not lost:
        return None
    named = ", ".join(f"{r.op.name} {seconds(loss)} ({number(r.ratio[OPTIMIZED].median, 3)} times theory)" for loss, r in lost)
    return f"Most time beyond theory is lost in {named}."


def _identical(found: Ops) -> str | None:
    """Operations of one shape must agree within their intervals: they are the same call."""
    groups: dict[tuple, list[OpRow]] = {}
    for r in found.rows:
        if r.default and r.default.time_s:
            groups.setdefault((r.op.kind, tuple(sorted(r.op.shape.items()))), []).append(r)
    apart, shared = [], [g for g in groups.values() if len(g) > 1]
    if not shared:
        return None
    for group in shared:
        slow = max(group, key=lambda r: r.default.time_s.lo)
        fast = min(group, key=lambda r: r.default.time_s.hi)
        if slow.default.time_s.lo > fast.default.time_s.hi:
            apart.append(f"{slow.op.name} is slower than {fast.op.name}")
    if apart:
        return f"**Operations of one shape disagree beyond their intervals:** {'; '.join(apart)}. Something else moved."
    return "Operations of one shape agree within their intervals."


def _launch_bound(found: Ops) -> str | None:
    names = [r.op.name for r in found.rows if r.launch_bound]
    return f"Launch-bound, shown and not judged: {', '.join(names)}." if names else None


def _dtype(run: LoadedRun) -> str | None:
    dtype = run.files["ops"].run.parameters["dtype"]
    return None if dtype == "bf16" else f"This device has no BF16 units: the model runs in {dtype.upper()}."


def work(run: LoadedRun) -> Table:
    """What each operation does: FLOP and bytes of one execution, as it runs and as the pilot's table counts it."""
    found = roofline.ops(run)
    columns = [
        Column("operation", lambda r: r.op.name),
        Column("category", lambda r: r.op.category),
        Column("shape", _shape),
        Column("times a pass", lambda r: str(1 if r.op.per_pass else found.spec.depth), True),
        Column("GFLOP", lambda r: number(r.op.flop / GIGA, 4) if r.op.flop else "0", True),
        Column("MB", lambda r: number(r.op.bytes / MEGA, 4), True),
        Column("MB, pilot's table", lambda r: NONE if r.op.bytes_pilot is None else number(r.op.bytes_pilot / MEGA, 4), True),
        Column("FLOP/B", lambda r: number(r.intensity, 3) if r.op.flop else "bytes only", True),
        Column("side by the rated ridge", lambda r: r.predicted or "", optional=True),
    ]
    raw = [
        {"op": r.op.name, "category": r.op.category, "kind": r.op.kind, **r.op.shape, "per_pass": r.op.per_pass,
         "flop": r.op.flop, "bytes": r.op.bytes, "bytes_pilot": r.op.bytes_pilot} for r in found.rows
    ]  # fmt: skip
    caption = "The operations of a pass: work of one execution (dash: not in the pilot's table)"
    return Table("ops_work", caption, columns, found.rows, raw)


def _shape(r: OpRow) -> str:
    s = r.op.shape
    if r.op.kind == "linear":
        return f"({s['m']},{s['k']})x({s['k']},{s['n']})"
    if r.op.kind == "attention":
        return f"Sq {s['sq']}, Skv {s['skv']}, {s['heads']} x {s['head_size']}"
    if r.op.kind == "time_embed":
        return f"{s['tokens']} x {s['frequency']} to {s['tokens']} x {s['hidden']}"
    streams = f"{s['streams']} x " if s.get("streams", 1) > 1 else ""
    return f"{streams}{s['tokens']} x {s['hidden']}"


def calibration(run: LoadedRun) -> Table:
    """The derived geometry against the pilot's totals of a block."""
    found = roofline.calibration(run)
    limit = run.config.threshold("calibration_drift_pct")

    def judged(drift: float | None) -> str:
        if drift is None or not found.applies:
            return f"n/a: {found.reason}"
        return f"within {limit:g} %" if abs(drift) * 100 <= limit else f"DRIFT over {limit:g} %"

    items = [
        ("FLOP of a block, GFLOP", found.flop / GIGA, found.pilot_flop and found.pilot_flop / GIGA, found.flop_drift),
        ("bytes of a block, MB", found.bytes / MEGA, found.pilot_bytes and found.pilot_bytes / MEGA, found.bytes_drift),
    ]
    columns = [
        Column("what", lambda i: i[0]),
        Column("derived geometry", lambda i: f"{i[1]:,.2f}", True),
        Column("pilot's table", lambda i: NONE if i[2] is None else f"{i[2]:,.1f}", True),
        Column("drift", lambda i: NONE if i[3] is None else f"{i[3] * 100:+.3f} %", True),
        Column("judged", lambda i: judged(i[3])),
    ]
    raw = [{"what": w, "derived": d, "pilot": p, "drift_frac": x} for w, d, p, x in items]
    caption = f"Calibration of {roofline.spec_of(run).whole().name}: one block, once-a-pass operations charged to it"
    return Table("ops_calibration", caption, columns, items, raw)


def times(run: LoadedRun) -> Table:
    """Each operation: theory, default path, optimized path, and what their ratio says."""
    found = roofline.ops(run)

    def path(r: OpRow) -> str:
        if r.optimized is None:
            return NONE
        return r.optimized.params.get("attention") or r.optimized.params["path"]

    def said(r: OpRow) -> str:
        if r.default is None or not r.default.time_s:
            return notes(r.default) if r.default else "not run"
        parts = [part for x in (r.default, r.optimized) for part in notes(x).split("; ") if part]
        heads = [part.partition(":")[0] for part in parts]
        wrong = [f"{x.params['path']}: wrong result" for x in r.others if x.wrong]
        return "; ".join(dict.fromkeys([*heads, *wrong]))

    columns = [
        Column("operation", lambda r: r.op.name),
        Column("judged", lambda r: "launch-bound" if r.launch_bound else r.band or NONE),
        Column("bound by", lambda r: r.bound or NONE),
        Column("theory", lambda r: seconds(r.theory_s and r.theory_s.median), True),
        Column("default path", lambda r: _time(r.default), True),
        Column("optimized path", lambda r: _time(r.optimized), True),
        Column("which", path),
        Column("optimized / theory", lambda r: ratio(r.ratio.get(OPTIMIZED)), True),
        Column("notes", said, optional=True),
    ]
    raw = [
        {
            "op": r.op.name, "bound": r.bound, "predicted": r.predicted, "theory_s": r.theory_s and r.theory_s.median,
            "default_s": r.default and r.default.time_s and r.default.time_s.median,
            "default_s_lo": r.default and r.default.time_s and r.default.time_s.lo,
            "default_s_hi": r.default and r.default.time_s and r.default.time_s.hi,
            "optimized_s": r.optimized and r.optimized.time_s.median, "optimized_path": path(r),
            "ratio_default": r.ratio[DEFAULT].median if DEFAULT in r.ratio else None,
            "ratio_optimized": r.ratio[OPTIMIZED].median if OPTIMIZED in r.ratio else None, "band": r.band,
            "launch_bound": r.launch_bound, "attains_frac": r.attains and r.attains.median,
            "notes": r.default and notes(r.default), "optimized_notes": r.optimized and notes(r.optimized),
        }
        for r in found.rows
    ]  # fmt: skip
    caption = "Each operation alone: one execution, operands cold"
    return Table("ops_times", caption, columns, found.rows, raw)


def _time(row: derive.Row | None) -> str:
    return seconds(row.time_s.median) if row and row.time_s else NONE


def attention(run: LoadedRun) -> Table:
    """Every attention backend: forced for the call, named by what ran, or why it did not."""
    found = roofline.ops(run)
    rows = [r for o in found.rows if o.op.kind == "attention" for r in (o.default, *o.others) if r]
    columns = [
        Column("operation", lambda r: r.params["op"]),
        Column("asked for", lambda r: r.params["path"]),
        Column("what ran", lambda r: r.backend or NONE),
        Column("time", _time, True),
        Column("TFLOP/s", lambda r: value(r.flop_s, TERA), True),
        Column("interval", lambda r: interval(r.flop_s, TERA), True),
        Column("rel. error", lambda r: _error(r), True),
        Column("notes", notes, optional=True),
    ]
    caption = "Attention backends: error is relative Frobenius against float64, 2^-7 is the bound"
    return Table("ops_attention", caption, columns, rows, [raw_row(r) for r in rows])


def _error(row: derive.Row) -> str:
    error = (row.error or {}).get("rel_frobenius")
    return f"{error:.1e}" if error is not None else NONE


def roofline_chart(run: LoadedRun) -> alt.LayerChart | Text:
    """A6: every operation with FLOP, at its intensity, under the two measured roofs."""
    found = roofline.ops(run)
    rows = [r for r in found.rows if r.op.flop and r.optimized and r.optimized.flop_s]
    if not rows:
        return NOTHING
    frame = pd.DataFrame([
        charts.rate_row(r.optimized, r.optimized.flop_s, TERA, op=r.op.name, category=r.op.category, intensity=r.intensity,
                        path=r.optimized.params["path"], bound=r.bound or "unknown", gflop=r.op.flop / GIGA,
                        mb=r.op.bytes / MEGA, ms=r.optimized.time_s.median / MILLI,
                        ratio=number(r.ratio[OPTIMIZED].median if OPTIMIZED in r.ratio else None))
        for r in rows
    ])  # fmt: skip
    x = alt.X("intensity:Q", scale=alt.Scale(type="log"), title="intensity, FLOP/B")
    y = alt.Y("rate:Q", scale=alt.Scale(type="log"), title="TFLOP/s")
    marks = alt.Chart(frame).encode(x=x, color=_category(frame["category"]))
    tips = [
        alt.Tooltip("op:N", title="operation"), alt.Tooltip("path:N", title="path"), alt.Tooltip("bound:N", title="bound by"),
        alt.Tooltip("rate:Q", title="TFLOP/s", format=",.4~r"), alt.Tooltip("low:Q", title="interval from", format=",.4~r"),
        alt.Tooltip("high:Q", title="to", format=",.4~r"), alt.Tooltip("intensity:Q", title="FLOP/B", format=",.4~r"),
        alt.Tooltip("gflop:Q", title="GFLOP", format=",.4~r"), alt.Tooltip("mb:Q", title="MB", format=",.4~r"),
        alt.Tooltip("ms:Q", title="ms", format=",.4~r"), alt.Tooltip("ratio:N", title="times theory"),
    ]  # fmt: skip
    layers = [
        marks.mark_rule(size=2).encode(y=alt.Y("low:Q"), y2="high:Q"),
        marks.mark_point(size=80, filled=True).encode(y=y, tooltip=tips),
    ]
    if not found.roofs_missing:
        layers = [*_roof_layers(found, frame), *layers]
    return charts.base(alt.layer(*layers), "A6  Roofline", "each operation on its fastest path; bars are the interval")


def _category(values: Iterable[str]) -> alt.Color:
    there = [c for c in CATEGORIES if c in set(values)]
    return alt.Color("category:N", title="category", scale=alt.Scale(domain=there, range=[COLOUR_OF[c] for c in there]))


def _roof_layers(found: Ops, frame: pd.DataFrame) -> list[alt.Chart]:
    peak, rate = found.compute_roof.median, found.bandwidth_roof.median
    left, right = min(frame["intensity"].min(), 1) / 2, max(frame["intensity"].max(), found.ridge.median) * 2
    points = [(x, min(peak, rate * x)) for x in (left, found.ridge.median, right)]
    line = pd.DataFrame([{"intensity": x, "rate": y / TERA} for x, y in points])
    labels = pd.DataFrame([
        {"intensity": right, "rate": peak / TERA,
         "label": f"{number(peak / TERA, 4)} TFLOP/s, ridge {number(found.ridge.median)}"},
        {"intensity": left, "rate": left * rate / TERA, "label": f"{number(rate / GIGA, 4)} GB/s"},
    ])  # fmt: skip
    grey = COLOURS["reference"]
    # rows in order of intensity: no `order` channel, so that the line is drawn as the rows come
    return [
        alt.Chart(line).mark_line(size=2, color=grey).encode(x="intensity:Q", y="rate:Q"),
        alt.Chart(labels.head(1)).mark_text(align="right", dy=-8, fontSize=11, color=grey).encode(
            x="intensity:Q", y="rate:Q", text="label:N"
        ),
        alt.Chart(labels.tail(1)).mark_text(align="left", dy=14, dx=10, fontSize=11, color=grey).encode(
            x="intensity:Q", y="rate:Q", text="label:N"
        ),
    ]  # fmt: skip


def bytes_strip(run: LoadedRun) -> alt.LayerChart | Text:
    """A6 bytes only: the operations without FLOP against the bandwidth roof."""
    found = roofline.ops(run)
    rows = [r for r in found.rows if not r.op.flop and r.optimized and r.optimized.bytes_s]
    if not rows:
        return NOTHING
    frame = pd.DataFrame([
        charts.rate_row(r.optimized, r.optimized.bytes_s, GIGA, op=r.op.name, category=r.op.category,
                        path=r.optimized.params["path"])
        for r in rows
    ])  # fmt: skip
    names = [r.op.name for r in rows]
    y = alt.Y("op:N", sort=names, title=None)
    marks = alt.Chart(frame).encode(y=y, color=_category(frame["category"]))
    tips = charts.tooltips("GB/s", alt.Tooltip("op:N", title="operation"), alt.Tooltip("path:N", title="path"))
    layers = [
        marks.mark_rule(size=2).encode(x=alt.X("low:Q", title="GB/s"), x2="high:Q"),
        marks.mark_point(size=70, filled=True).encode(
            x=alt.X("rate:Q", title="GB/s", scale=alt.Scale(zero=True)), tooltip=tips
        ),
    ]
    if found.bandwidth_roof:
        roof = pd.DataFrame([{"rate": found.bandwidth_roof.median / GIGA, "line": "bandwidth roof"}])
        layers.insert(0, alt.Chart(roof).mark_rule(strokeDash=[6, 4], color=COLOURS["reference"]).encode(
            x="rate:Q", tooltip=[alt.Tooltip("line:N", title="line"), alt.Tooltip("rate:Q", title="GB/s", format=",.4~r")]
        ))  # fmt: skip
    return charts.base(alt.layer(*layers), "A6  Roofline, bytes only", "dashed: the bandwidth roof; operations without FLOP")


def theory_chart(run: LoadedRun) -> alt.LayerChart | Text:
    """A7: theory, default and optimized time of every operation."""
    found = roofline.ops(run)
    rows = []
    for r in found.rows:
        shown = {
            "theory": r.theory_s and r.theory_s.median,
            "default path": r.default and r.default.time_s and r.default.time_s.median,
            "optimized path": r.optimized and r.optimized.time_s.median,
        }
        ratio = r.ratio[OPTIMIZED].median if OPTIMIZED in r.ratio else math.nan
        rows += [
            {"op": r.op.name, "what": what, "ms": t / MILLI, "ratio": number(ratio)} for what, t in shown.items() if t
        ]
    frame = pd.DataFrame(rows)
    if frame.empty:
        return NOTHING
    kinds = [k for k in ("theory", "default path", "optimized path") if k in set(frame["what"])]
    colours = {"theory": COLOURS["reference"], "default path": "#D55E00", "optimized path": "#0072B2"}
    shapes = {"theory": "diamond", "default path": "circle", "optimized path": "triangle-up"}
    names = [r.op.name for r in found.rows]
    pick = alt.selection_point(fields=["what"], bind="legend")
    y = alt.Y("op:N", sort=names, title=None)
    marks = alt.Chart(frame).encode(
        y=y,
        x=alt.X("ms:Q", scale=alt.Scale(type="log"), title="ms, one execution"),
        color=alt.Color("what:N", title="time", scale=alt.Scale(domain=kinds, range=[colours[k] for k in kinds])),
        shape=alt.Shape("what:N", title="time", scale=alt.Scale(domain=kinds, range=[shapes[k] for k in kinds])),
        opacity=alt.condition(pick, alt.value(1), alt.value(0.15)),
        tooltip=[
            alt.Tooltip("op:N", title="operation"), alt.Tooltip("what:N", title="time"),
            alt.Tooltip("ms:Q", title="ms", format=",.4~r"), alt.Tooltip("ratio:N", title="optimized over theory"),
        ],
    )  # fmt: skip
    spans = frame.groupby("op", sort=False)["ms"].agg(["min", "max"]).reset_index()
    span = alt.Chart(spans).mark_rule(color="#999999").encode(y=y, x="min:Q", x2="max:Q")
    layers = [span, marks.mark_point(size=60, filled=True).add_params(pick)]
    chart = charts.base(alt.layer(*layers), "A7  Theory against measured", "log scale; click the legend to pick")
    return chart.properties(height=20 * len(names) + 20)


def totals(run: LoadedRun) -> Table:
    """The pass by category: measured on both paths, theory, and what is lost."""
    found = roofline.ops(run)
    items = []
    for category in CATEGORIES:
        rows = [r for r in found.rows if r.op.category == category]
        if rows:
            items.append((category, rows))

    def total(rows: list[OpRow], path: str) -> Estimate | None:
        if not all(r.row(path) and r.row(path).time_s for r in rows):
            return None
        return roofline.total_s((r.row(path), 1 if r.op.per_pass else found.spec.depth) for r in rows)

    def theory(rows: list[OpRow]) -> float | None:
        if not all(r.theory_s for r in rows):
            return None
        return sum(r.theory_s.median * (1 if r.op.per_pass else found.spec.depth) for r in rows)

    whole = roofline.sum_of_ops(found, DEFAULT).time_s

    def share(rows: list[OpRow]) -> str:
        mine = total(rows, DEFAULT)
        return small_percent(mine.median / whole.median) if mine and whole else NONE

    columns = [
        Column("category", lambda i: i[0]),
        Column("default path", lambda i: _sum(total(i[1], DEFAULT)), True),
        Column("share of the sum", lambda i: share(i[1]), True),
        Column("optimized path", lambda i: _sum(total(i[1], OPTIMIZED)), True),
        Column("theory", lambda i: seconds(theory(i[1])), True),
        Column("FLOP share", lambda i: _flop_share(found, i[1]), True),
    ]
    raw = [{"category": c, "default_s": (t := total(r, DEFAULT)) and t.median,
            "optimized_s": (o := total(r, OPTIMIZED)) and o.median, "theory_s": theory(r)} for c, r in items]  # fmt: skip
    return Table("ops_totals", f"One {found.spec.unit} by category", columns, items, raw)


def _sum(estimate: Estimate | None) -> str:
    return NONE if estimate is None else seconds(estimate.median)


def _flop_share(found: Ops, rows: list[OpRow]) -> str:
    flop = sum(r.op.flop * (1 if r.op.per_pass else found.spec.depth) for r in rows)
    return small_percent(flop / workload.pass_flop(found.spec)) if flop else "0"
