"""What the charts of all pages share: colours, the frame of a chart, reference lines, tooltips.

Charts are interactive (hover, legend selection, zoom) and offline. One colour for one thing everywhere; the palette is Okabe and
Ito's, which colour-blind readers can tell apart. A reference line appears only if it belongs to the measured device.
"""

from __future__ import annotations

from typing import Any

import altair as alt
import pandas as pd

from escher_book.tables import Text, number
from validation.derive import Basis, Row

alt.theme.enable("none")
COLOURS = {
    "square": "#0072B2", "workload": "#D55E00", "roof": "#009E73", "skew": "#CC79A7", "reference": "#444444",
    "copy": "#0072B2", "mul": "#56B4E9", "add": "#E69F00", "triad": "#D55E00", "sum": "#009E73", "fill": "#CC79A7",
}  # fmt: skip
HEIGHT = 340
NOTHING = Text("*Nothing to draw: no row was timed.*")


def base(chart: alt.LayerChart, title: str, subtitle: str) -> alt.LayerChart:
    """The chart with the book's width, height, fonts and heading. `title` begins with the chart's id, e.g. "A2  ..."."""
    head = alt.TitleParams(title, subtitle=subtitle, anchor="start")
    return chart.properties(width="container", height=HEIGHT, title=head).configure(
        font="system-ui, sans-serif",
        axis=alt.AxisConfig(labelFontSize=12, titleFontSize=12),
        axisQuantitative=alt.AxisConfig(labelOverlap="greedy", labelSeparation=4),
        legend=alt.LegendConfig(labelFontSize=12, titleFontSize=12),
        view=alt.ViewConfig(stroke=None),
    )


def references(bases: list[Basis], scale: float, extra: list[tuple[str, float]]) -> pd.DataFrame:
    """Lines to compare with: bases of the measured device, and roofs."""
    lines = [(b.label, b.rate / scale) for b in bases if b.rate and b.same_device]
    rows = [{"line": name, "rate": rate, "label": f"{name}: {number(rate, 4)}"} for name, rate in [*lines, *extra]]
    return pd.DataFrame(rows, columns=["line", "rate", "label"])


def rules(frame: pd.DataFrame, unit: str) -> list[alt.Chart]:
    """Layers that draw `references`: a dashed line each, with its label at the left."""
    if frame.empty:
        return []
    lines = alt.Chart(frame).encode(
        y=alt.Y("rate:Q"),
        tooltip=[alt.Tooltip("line:N", title="line"), alt.Tooltip("rate:Q", title=unit, format=",.4~r")],
    )
    rule = lines.mark_rule(strokeDash=[6, 4], size=1.5, color=COLOURS["reference"])
    text = lines.mark_text(align="left", baseline="top", dx=4, dy=3, fontSize=11, color=COLOURS["reference"])
    return [rule, text.encode(x=alt.value(0), text="label:N")]


def rate_row(row: Row, estimate: Any, scale: float, **more: Any) -> dict[str, Any]:
    """A row of a chart's data: the estimate with its interval, divided by `scale`."""
    return {
        "name": row.case, "rate": estimate.median / scale, "low": estimate.lo / scale, "high": estimate.hi / scale,
        "blocks": estimate.blocks, "samples": estimate.samples, **more,
    }  # fmt: skip


def tooltips(unit: str, *more: alt.Tooltip) -> list[alt.Tooltip]:
    """What hovering over a `rate_row` shows."""
    return [
        alt.Tooltip("name:N", title="case"),
        *more,
        alt.Tooltip("rate:Q", title=unit, format=",.4~r"),
        alt.Tooltip("low:Q", title="interval from", format=",.4~r"),
        alt.Tooltip("high:Q", title="to", format=",.4~r"),
        alt.Tooltip("samples:Q", title="samples"),
    ]
