"""Tables and numbers as a person reads them: the only place where values are scaled and rounded.

A `Table` shows itself as HTML in the book and in JupyterLab, and as Markdown elsewhere. Its `raw` rows keep base units
for tables/*.csv. How many digits a number gets follows from its interval: digits beyond it say nothing.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from escher_kernels.statistics import Estimate
from validation import derive
from validation.derive import Basis, LoadedRun, Row

NOISY = "NOISY: "
RAW = "application/vnd.escher.rows+json"  # what an executed notebook keeps for tables/*.csv
TERA, GIGA, MIB, GIB = 1e12, 1e9, 2**20, 2**30
NONE = "–"
WIDE = ("notes", "why", "reason", "what it says")  # headings of columns of sentences
MARKDOWN = re.compile(r"([\\`*_\[\]<|])")


def number(value: float | None, digits: int = 3) -> str:
    """`digits` significant digits, thousands separated, never in exponent form for what tables hold."""
    if value is None or not math.isfinite(value):
        return NONE
    if value == 0:
        return "0"
    return rounded(value, digits - 1 - math.floor(math.log10(abs(value))))


def decimals_of(estimate: Estimate, scale: float = 1, most_digits: int = 4) -> int:
    """Decimals (negative: places before the point) that value and interval share: the last one is about a tenth of the
    half-width, and the value has at most `most_digits` significant digits."""
    middle = abs(estimate.median / scale)
    if middle == 0:
        return most_digits
    most = most_digits - 1 - math.floor(math.log10(middle))
    half = estimate.half_width * middle
    return most if half <= 0 else min(most, 1 + math.ceil(-math.log10(half)))


def rounded(value: float, decimals: int) -> str:
    return f"{round(value, decimals):,.{max(0, min(decimals, 12))}f}"


def value(estimate: Estimate | None, scale: float = 1) -> str:
    return NONE if estimate is None else rounded(estimate.median / scale, decimals_of(estimate, scale))


def interval(estimate: Estimate | None, scale: float = 1) -> str:
    if estimate is None:
        return NONE
    decimals = decimals_of(estimate, scale)
    return f"{rounded(estimate.lo / scale, decimals)} to {rounded(estimate.hi / scale, decimals)}"


def percent(estimate: Estimate | None) -> str:
    return NONE if estimate is None else f"{rounded(estimate.median * 100, decimals_of(estimate, 0.01, 3))} %"


def small_percent(frac: float) -> str:
    """A share without an interval; what is under a tenth of a percent says no more than that."""
    return "< 0.1 %" if 0 < frac < 0.001 else f"{number(frac * 100)} %"


def seconds(value_s: float | None) -> str:
    if value_s is None:
        return NONE
    for scale, unit in ((1, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if abs(value_s) >= scale:
            return f"{number(value_s / scale)} {unit}"
    return f"{number(value_s / 1e-9)} ns"


def size(count_bytes: float | None) -> str:
    if count_bytes is None:
        return NONE
    for scale, unit in ((GIB, "GiB"), (MIB, "MiB"), (1024, "KiB")):
        if count_bytes >= 10 * scale or (count_bytes >= scale and count_bytes % scale == 0):
            return f"{count_bytes / scale:,.4g} {unit}"
    return f"{count_bytes:.0f} B"


def clock(value_hz: float | None) -> str:
    return NONE if value_hz is None else f"{number(value_hz / GIGA)} GHz"


def pill(status: str) -> str:
    """A status as HTML: a sign and a word. The signs and colours are the style sheet's."""
    name = re.sub(r"[^a-z]+", "-", status.lower().replace("n/a", "na")).strip("-")
    return f'<span class="pill {name}">{html.escape(status)}</span>'


class Text:
    """Markdown that a notebook shows and the book renders."""

    def __init__(self, *paragraphs: str | None):
        self.markdown = "\n\n".join(p for p in paragraphs if p)

    def _repr_markdown_(self) -> str:
        return self.markdown


@dataclass(frozen=True)
class Column:
    """A heading, what to show of a row, whether it is a number (aligned right), whether it goes if all are empty, and
    whether it is a status, shown as a pill."""

    title: str
    show: Callable[[Any], str]
    numeric: bool = False
    optional: bool = False
    pill: bool = False


class Table:
    """Rows shown through columns. `raw`: the same rows in base units, for CSV."""

    def __init__(self, name: str, caption: str, columns: Sequence[Column], items: Sequence[Any], raw=()):
        self.name, self.caption, self.raw = name, caption, list(raw)
        shown = [(c, cells) for c in columns if any(cells := [c.show(i) for i in items]) or not c.optional]
        self.columns = [column for column, _ in shown]
        self.cells = [list(row) for row in zip(*(cells for _, cells in shown), strict=True)]

    def to_html(self) -> str:
        if not self.cells:
            return f'<p class="subtitle">{html.escape(self.caption)}: nothing to show.</p>'

        def cell(tag: str, column: Column, text: str) -> str:
            mark = ' class="num"' if column.numeric else ' class="notes"' if column.title in WIDE else ""
            inner = pill(text) if column.pill and tag == "td" and text else html.escape(text)
            return f"<{tag}{mark}>{inner}</{tag}>"

        head = "".join(cell("th", c, c.title) for c in self.columns)
        body = "".join(
            "<tr>" + "".join(cell("td", c, text) for c, text in zip(self.columns, row, strict=True)) + "</tr>"
            for row in self.cells
        )
        return (
            f'<div class="escher-scroll"><table class="escher"><caption>{html.escape(self.caption)}</caption>'
            f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
        )

    def to_markdown(self) -> str:
        def line(cells: Sequence[str]) -> str:
            return "| " + " | ".join(MARKDOWN.sub(r"\\\1", text.replace("\n", " ")) for text in cells) + " |"

        rule = "|" + "|".join("---:" if c.numeric else "---" for c in self.columns) + "|"
        head = line([c.title for c in self.columns])
        return "\n".join([f"**{self.caption}**", "", head, rule, *map(line, self.cells)])

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        columns, *body = rows(self)
        return {
            "text/html": self.to_html(),
            "text/markdown": self.to_markdown(),
            "text/plain": self.caption,
            RAW: {"name": self.name, "columns": columns, "rows": body},
        }


def rows(table: Table) -> list[list[Any]]:
    """A table's raw rows, headed by their names."""
    columns = list(dict.fromkeys(key for row in table.raw for key in row))
    return [columns, *([row.get(c) for c in columns] for row in table.raw)]


def notes(row: Row) -> str:
    """Why a row has no number, or what a reader must know of it."""
    if row.skipped:
        return f"skipped: {row.skipped}"
    if row.wrong:
        return "wrong result: no time is shown"
    words = []
    if row.time_s and not row.time_s.sufficient:
        words.append(f"INSUFFICIENT: {row.time_s.blocks} blocks")
    noisy = [f.removeprefix(NOISY) for f in row.flags if f.startswith(NOISY)]
    words += [NOISY + ", ".join(noisy)] if noisy else []
    words += [f for f in row.flags if not f.startswith(NOISY) and f != "INSUFFICIENT"]
    return "; ".join(words)


def raw_row(row: Row) -> dict[str, Any]:
    """A row in base units, one flat dict."""
    out: dict[str, Any] = {"case": row.case, "role": row.role, **row.params, "backend": row.backend, "cache": row.cache}
    out |= {"flop": row.flop, "bytes_moved": row.bytes_moved}
    for name in ("time_s", "flop_s", "bytes_s"):
        estimate = getattr(row, name)
        out |= {name: estimate and estimate.median, f"{name}_lo": estimate and estimate.lo,
                f"{name}_hi": estimate and estimate.hi}  # fmt: skip
    estimate = row.time_s
    return out | {
        "blocks": estimate and estimate.blocks, "samples": estimate and estimate.samples, "wrong": row.wrong,
        "skipped": row.skipped, "notes": notes(row),
    }  # fmt: skip


def layout(row: Row) -> str:
    """M×N×K of a GEMM and how A and B are stored; before it, how many of them a batch holds."""
    p = row.params
    batch = f"{p['batch']}\N{NO-BREAK SPACE}of\N{NO-BREAK SPACE}" if "batch" in p else ""
    return f"{batch}{p['m']}×{p['n']}×{p['k']}\N{NO-BREAK SPACE}{p['layout']}"


def bases_columns(bases: Sequence[Basis], rate: Callable[[Row], Estimate | None]) -> list[Column]:
    """A % column for each basis of the measured device. None where the target shown is another device."""
    return [
        Column(f"% of {'rated' if b.name == 'rated' else 'probed peak'}", lambda r, b=b: percent(b.frac(rate(r))), True)
        for b in bases
        if b.rate and b.same_device
    ]


def time_columns() -> list[Column]:
    """Time a call, number of samples, notes: the last columns of every table of rows."""
    return [
        Column("time a call", lambda r: seconds(r.time_s and r.time_s.median), True),
        Column("n", lambda r: f"{r.time_s.samples:,}" if r.time_s else NONE, True),
        Column("notes", notes, optional=True),
    ]


def bases(run: LoadedRun, family: str) -> Table:
    """The roof beside every figure it may, or may not, be compared with."""
    if family == "compute":
        found, scale, unit, rate = derive.compute(run), TERA, "TFLOP/s", "flop_s"
        roof = found.roof.flop_s if found.roof else None
    else:
        found, scale, unit, rate = derive.bandwidth(run), GIGA, "GB/s", "bytes_s"
        roof = found.roof.bytes_s if found.roof else None

    def share(basis: Basis) -> str:
        if basis.rate is None:
            return NONE
        return percent(basis.frac(roof)) if basis.same_device else "not given: another device"

    items = [("measured roof", value(roof, scale), interval(roof, scale), NONE, "this run")]
    for b in found.bases:
        figure = number(b.rate / scale, 4) if b.rate else NONE
        items.append((b.label, figure, NONE, share(b), b.origin if b.rate else b.reason))
    columns = [
        Column("what", lambda i: i[0]),
        Column(unit, lambda i: i[1], True),
        Column("interval", lambda i: i[2], True),
        Column("roof over it", lambda i: i[3], True),
        Column("where it comes from", lambda i: i[4]),
    ]
    raw = [{"what": "measured roof", rate: roof and roof.median, "same_device": True}]
    raw += [{"what": b.label, rate: b.rate, "same_device": b.same_device} for b in found.bases]
    return Table(f"{family}_bases", "The roof and what it may be compared with", columns, items, raw)


def _steady(anchor: derive.Anchor, limit: float) -> str:
    if len(anchor.rates) < 2:
        return "unknown: ran once"
    return f"moved more than {limit:.0%}: NOISY" if anchor.moved else f"steady within {limit:.0%}"


def anchors(run: LoadedRun, family: str) -> Table:
    """The fixed GEMM and the fixed copy each time they ran around this family."""
    items = derive.anchors(run.records(family), run.config)
    scale = {"FLOP/s": (TERA, "TFLOP/s"), "B/s": (GIGA, "GB/s")}
    limit = run.config.threshold("anchor_moved_frac")
    columns = [
        Column("anchor", lambda a: a.case),
        Column(
            "rate each time",
            lambda a: " / ".join(number(r / scale[a.unit][0]) for r in a.rates) + f" {scale[a.unit][1]}",
        ),
        Column("largest step", lambda a: f"{number(a.largest_move_frac * 100, 2)} %", True),
        Column("judged", lambda a: _steady(a, limit)),
    ]
    raw = [{"anchor": a.case, "unit": a.unit, "rate": r, "turn": i} for a in items for i, r in enumerate(a.rates)]
    return Table(f"{family}_anchors", "Anchors: how steady the machine was meanwhile", columns, items, raw)


def ratio(estimate: Estimate | None) -> str:
    """A ratio of two rates or times with its interval."""
    return NONE if estimate is None else f"{value(estimate)} ({interval(estimate)})"


def facts(name: str, caption: str, items: Sequence[tuple[str, Any]], heads=("what", "found")) -> Table:
    """A table of two columns: what, and what was found; an empty or missing value shows as a dash."""
    shown = [(k, NONE if v is None or v == "" else str(v)) for k, v in items]
    columns = [Column(heads[0], lambda p: p[0]), Column(heads[1], lambda p: p[1])]
    return Table(name, caption, columns, shown, [dict(zip(heads, p, strict=True)) for p in shown])
