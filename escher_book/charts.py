"""The charts of the book, by the ids that its files carry: A2 GEMM sweep, A3 bandwidth, A3b cache curve.

Interactive (hover, legend selection, zoom) and offline. One colour for one thing everywhere; the palette is Okabe and
Ito's, which colour-blind readers can tell apart. A reference line appears only if it belongs to the measured device.
"""

from __future__ import annotations

import math
from typing import Any

import altair as alt
import pandas as pd

from escher_book.findings import Text
from escher_book.tables import GIGA, MIB, TERA, layout, number, size
from validation import derive
from validation.derive import Basis, LoadedRun, Row

alt.theme.enable("none")
COLOURS = {
    "square": "#0072B2", "workload": "#D55E00", "roof": "#009E73", "reference": "#444444",
    "copy": "#0072B2", "mul": "#56B4E9", "add": "#E69F00", "triad": "#D55E00", "sum": "#009E73", "fill": "#CC79A7",
}  # fmt: skip
SHAPES = {"square": "square", "workload": "triangle-up", "roof": "diamond"}
HEIGHT = 340
NOTHING = Text("*Nothing to draw: no row was timed.*")


def _base(chart: alt.LayerChart, title: str, subtitle: str) -> alt.LayerChart:
    head = alt.TitleParams(title, subtitle=subtitle, anchor="start")
    return chart.properties(width="container", height=HEIGHT, title=head).configure(
        font="system-ui, sans-serif",
        axis=alt.AxisConfig(labelFontSize=12, titleFontSize=12),
        legend=alt.LegendConfig(labelFontSize=12, titleFontSize=12),
        view=alt.ViewConfig(stroke=None),
    )


def _references(bases: list[Basis], scale: float, extra: list[tuple[str, float]]) -> pd.DataFrame:
    """Lines to compare with: bases of the measured device, and roofs."""
    lines = [(b.label, b.rate / scale) for b in bases if b.rate and b.same_device]
    rows = [{"line": name, "rate": rate, "label": f"{name}: {number(rate, 4)}"} for name, rate in [*lines, *extra]]
    return pd.DataFrame(rows, columns=["line", "rate", "label"])


def _rules(frame: pd.DataFrame, unit: str) -> list[alt.Chart]:
    if frame.empty:
        return []
    base = alt.Chart(frame).encode(
        y=alt.Y("rate:Q"),
        tooltip=[alt.Tooltip("line:N", title="line"), alt.Tooltip("rate:Q", title=unit, format=",.4~r")],
    )
    rule = base.mark_rule(strokeDash=[6, 4], size=1.5, color=COLOURS["reference"])
    text = base.mark_text(align="left", baseline="top", dx=4, dy=3, fontSize=11, color=COLOURS["reference"])
    return [rule, text.encode(x=alt.value(0), text="label:N")]


def _rate_row(row: Row, estimate: Any, scale: float, **more: Any) -> dict[str, Any]:
    return {
        "name": row.case, "rate": estimate.median / scale, "low": estimate.lo / scale, "high": estimate.hi / scale,
        "blocks": estimate.blocks, "samples": estimate.samples, **more,
    }  # fmt: skip


def _tooltips(unit: str, *more: alt.Tooltip) -> list[alt.Tooltip]:
    return [
        alt.Tooltip("name:N", title="case"),
        *more,
        alt.Tooltip("rate:Q", title=unit, format=",.4~r"),
        alt.Tooltip("low:Q", title="interval from", format=",.4~r"),
        alt.Tooltip("high:Q", title="to", format=",.4~r"),
        alt.Tooltip("samples:Q", title="samples"),
    ]


def gemm_sweep(run: LoadedRun) -> alt.LayerChart | Text:
    """A2: rate of every GEMM over its size, 2MNK as the edge of the cube with as many FLOP."""
    c = derive.compute(run)
    rows = []
    for row in [*([c.roof] if c.roof else []), *c.rows]:
        if row.flop_s:
            kind = "roof" if row.case == "roof" else "square" if row.case.startswith("square.") else "workload"
            edge = (row.flop / 2) ** (1 / 3)
            rows.append(_rate_row(row, row.flop_s, TERA, kind=kind, shape=layout(row), edge=edge))
    if not rows:
        return NOTHING
    frame = pd.DataFrame(rows)
    kinds = [k for k in ("square", "workload", "roof") if k in set(frame["kind"])]
    pick = alt.selection_point(fields=["kind"], bind="legend")
    x = alt.X("edge:Q", scale=alt.Scale(type="log", base=2), title="cube root of M×N×K")
    colour = alt.Color("kind:N", title="GEMM", scale=alt.Scale(domain=kinds, range=[COLOURS[k] for k in kinds]))
    shape = alt.Shape("kind:N", title="GEMM", scale=alt.Scale(domain=kinds, range=[SHAPES[kind] for kind in kinds]))
    base = alt.Chart(frame).encode(x=x, color=colour, opacity=alt.condition(pick, alt.value(1), alt.value(0.15)))
    y = alt.Y("rate:Q", title=f"TFLOP/s ({c.dtype.upper()})", scale=alt.Scale(zero=True))
    tips = _tooltips("TFLOP/s", alt.Tooltip("shape:N", title="M×N×K"))
    marks = base.mark_point(size=70, filled=True).encode(y=y, shape=shape, tooltip=tips)
    bars = base.mark_rule(size=2).encode(y=alt.Y("low:Q"), y2="high:Q", tooltip=tips)
    layers = [bars, marks.add_params(pick), *_rules(_references(c.bases, TERA, []), "TFLOP/s")]
    subtitle = "median of block medians; bars are the interval; click the legend to pick"
    return _base(alt.layer(*layers), "A2  GEMM sweep", subtitle)


def bandwidth(run: LoadedRun) -> alt.LayerChart | Text:
    """A3: cold bandwidth of each operation over the buffer size."""
    b = derive.bandwidth(run)
    frame = pd.DataFrame(
        [
            _rate_row(r, r.bytes_s, GIGA, op=r.params["op"], mib=r.params["buffer_bytes"] / MIB,
                      buffer=size(r.params["buffer_bytes"]))
            for r in b.rows if r.bytes_s
        ]
    )  # fmt: skip
    if frame.empty:
        return NOTHING
    ops = [o for o in ("copy", "mul", "add", "triad", "sum", "fill") if o in set(frame["op"])]
    pick = alt.selection_point(fields=["op"], bind="legend")
    colour = alt.Color("op:N", title="operation", scale=alt.Scale(domain=ops, range=[COLOURS[o] for o in ops]))
    base = alt.Chart(frame).encode(
        x=alt.X("mib:Q", scale=alt.Scale(type="log", base=2), title="size of one buffer, MiB"),
        color=colour,
        opacity=alt.condition(pick, alt.value(1), alt.value(0.15)),
    )
    tips = _tooltips("GB/s", alt.Tooltip("buffer:N", title="buffer"))
    y = alt.Y("rate:Q", title="GB/s, cold", scale=alt.Scale(zero=True))
    roof = [("bandwidth roof: plateau of copy", b.roof.bytes_s.median / GIGA)] if b.roof else []
    layers = [
        base.mark_line(size=1.5).encode(y=y),
        base.mark_rule(size=2).encode(y=alt.Y("low:Q"), y2="high:Q", tooltip=tips),
        base.mark_point(size=60, filled=True).encode(y=y, tooltip=tips).add_params(pick),
        *_rules(_references(b.bases, GIGA, roof), "GB/s"),
    ]
    return _base(alt.layer(*layers), "A3  Bandwidth", "every call finds its operands cold; bars are the interval")


def cache_curve(run: LoadedRun) -> alt.LayerChart | Text:
    """A3b: warm copy over the working set, with the caches of the host where they are known."""
    b = derive.bandwidth(run)
    frame = pd.DataFrame(
        [
            _rate_row(r, r.bytes_s, GIGA, mib=2 * r.params["buffer_bytes"] / MIB,
                      set=size(2 * r.params["buffer_bytes"]))
            for r in b.cache_curve if r.bytes_s
        ]
    )  # fmt: skip
    if frame.empty:
        return NOTHING
    base = alt.Chart(frame).encode(
        x=alt.X("mib:Q", scale=alt.Scale(type="log", base=2), title="working set (both buffers), MiB")
    )
    tips = _tooltips("GB/s", alt.Tooltip("set:N", title="working set"))
    y = alt.Y("rate:Q", title="GB/s, warm", scale=alt.Scale(zero=True))
    layers = [
        base.mark_line(size=1.5, color=COLOURS["copy"]).encode(y=y),
        base.mark_rule(size=2, color=COLOURS["copy"]).encode(y=alt.Y("low:Q"), y2="high:Q", tooltip=tips),
        base.mark_point(size=60, filled=True, color=COLOURS["copy"]).encode(y=y, tooltip=tips),
    ]
    caches = pd.DataFrame(_cache_marks(run), columns=["cache", "mib"])
    if not caches.empty:
        caches = caches[(caches["mib"] >= frame["mib"].min()) & (caches["mib"] <= frame["mib"].max())]
    if not caches.empty:
        marks = alt.Chart(caches).encode(x="mib:Q", tooltip=[alt.Tooltip("cache:N", title="cache")])
        layers += [
            marks.mark_rule(strokeDash=[2, 3], color=COLOURS["reference"]),
            marks.mark_text(align="left", dx=4, fontSize=11, color=COLOURS["reference"]).encode(
                y=alt.value(8), text="cache:N"
            ),
        ]
    roof = [("bandwidth roof (cold)", b.roof.bytes_s.median / GIGA)] if b.roof else []
    layers += _rules(_references([], GIGA, roof), "GB/s")
    return _base(alt.layer(*layers), "A3b  Cache curve", "warm on purpose: the same buffers again and again")


def _cache_marks(run: LoadedRun) -> list[tuple[str, float]]:
    """(label, MiB) of each cache level of the device that was measured."""
    if run.kind == "cpu":
        totals: dict[int, int] = {}
        for cache in ((run.env or {}).get("host") or {}).get("caches", []):
            totals[cache["level"]] = totals.get(cache["level"], 0) + cache["size_bytes"]
        return [(f"L{level}, {size(total)}", total / MIB) for level, total in sorted(totals.items())]
    profile = run.selection.found_profile
    if profile is None:
        return []
    named = [("L2", profile.l2_bytes), ("last-level cache", profile.llc_bytes)]
    return [(f"{name}, {size(n)}", n / MIB) for name, n in named if n and math.isfinite(n)]
