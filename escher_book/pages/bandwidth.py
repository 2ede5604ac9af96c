"""The bandwidth page: the plateau of copy, every operation, the cache curve, and on a CPU the C copies."""

from __future__ import annotations

import math

import altair as alt
import pandas as pd

from escher_book import charts
from escher_book.charts import COLOURS
from escher_book.findings import basis_sentence, correctness, steadiness
from escher_book.stage import escape
from escher_book.tables import (
    GIGA,
    MIB,
    NONE,
    Column,
    Table,
    Text,
    interval,
    number,
    percent,
    ratio,
    raw_row,
    size,
    time_columns,
    value,
)
from validation import derive
from validation.derive import LoadedRun

PLOTS: dict[str, tuple[str, ...]] = {"A3": (), "A3b": ()}


def finding(run: LoadedRun) -> Text:
    """The bandwidth roof, and how far to trust it."""
    b = derive.bandwidth(run)
    if b is None:
        return Text("This family was not measured.")
    if b.roof is None:
        return Text(f"**No bandwidth roof:** {b.skipped or 'no plateau size gave a right and timed copy'}.")
    roof = b.roof
    head = (
        f"**Bandwidth roof: {value(roof.bytes_s, GIGA)} GB/s** ({interval(roof.bytes_s, GIGA)}), the plateau of copy "
        f"(one stream read, one written) over buffers of {', '.join(size(s) for s in roof.sizes)}. "
        + basis_sentence(b.bases, roof.bytes_s, GIGA, "GB/s")
    )
    assumed = None
    if b.run.parameters.get("llc_assumed"):
        size_text = size(b.run.parameters["llc_bytes"])
        assumed = f"The last-level cache is **not known** here; cold rows rotate as if it had {size_text}."
    steady = steadiness(run, "bandwidth", roof.bytes_s, b.converged, b.disturbed)
    return Text(
        head, steady, assumed, copies_sentence(b), correctness([*b.rows, *b.strided, *b.host, *b.cache_curve, *b.pairs])
    )


def copies_sentence(b: derive.Bandwidth) -> str | None:
    """CPU: torch's copy against C, and what write-allocate does to the count."""
    skipped = next((r.skipped for r in b.pairs if r.skipped), None)
    if skipped:
        return f"No comparison with a C copy: {escape(skipped)}."
    plain, streaming = b.speedup.get("plain"), b.speedup.get("streaming")
    if not (plain and streaming):
        return None
    rate = next(r for r in b.pairs if r.case == "stream.streaming").bytes_s
    return (
        f"Interleaved with a plain C STREAM copy of the same buffers, torch's copy runs at {value(plain)} times its rate "
        f"({interval(plain)}). A C copy with streaming stores counts {value(rate, GIGA)} GB/s: torch runs at "
        f"{value(streaming)} times that ({interval(streaming)}). An ordinary store first reads the line it is about to "
        f"write, so plain copy moves three streams where two are counted; streaming stores skip that read."
    )


def about_copies(run: LoadedRun) -> Text | None:
    """CPU: what an ordinary store costs, and why the copy in C stands beside."""
    if run.kind != "cpu":
        return None
    return Text(
        "An ordinary store on a CPU first reads the line it is about to write (write-allocate). Plain copy therefore moves "
        "three streams where two are counted, and sum, which only reads, may count more. Copy with **streaming stores** "
        "skips that read. The roof stays the copy that a tensor library really runs. Good looks like this: torch's copy is "
        "as fast as a plain C copy of the same buffers."
    )


def _rate_columns(size_title: str) -> list[Column]:
    return [
        Column(size_title, lambda r: size(r.params.get("buffer_bytes")), True),
        Column("GB/s", lambda r: value(r.bytes_s, GIGA), True),
        Column("interval", lambda r: interval(r.bytes_s, GIGA), True),
    ]


def strided(run: LoadedRun) -> Table:
    """Copies that read with a stride: useful bytes alone are counted."""
    b = derive.bandwidth(run)
    columns = [
        Column("case", lambda r: r.case),
        *_rate_columns("useful bytes a stream"),
        Column("stride", lambda r: size(r.params["stride_bytes"]), True),
        Column("operand sets", lambda r: str(r.params.get("operand_sets", NONE)), True),
        *time_columns(),
    ]
    caption = (
        "Strided copy, cold: an element read and written counts once each way, unused parts of lines count nothing"
    )
    return Table("bandwidth_strided", caption, columns, b.strided, map(raw_row, b.strided))


def host_copies(run: LoadedRun) -> Table:
    """Copies between the host's memory and the device's, each direction, pinned and pageable."""
    b = derive.bandwidth(run)
    way = {"host_to_device": "host to device", "device_to_host": "device to host"}
    columns = [
        Column("direction", lambda r: way[r.params["op"]]),
        Column("host memory", lambda r: r.params.get("memory", NONE)),
        *_rate_columns("bytes"),
        *time_columns(),
    ]
    caption = "Copies between host and device: bytes that cross, counted once"
    return Table("bandwidth_host", caption, columns, b.host, map(raw_row, b.host))


def host_link(run: LoadedRun) -> Text:
    """The fastest copy each way, and what pageable memory costs."""
    b = derive.bandwidth(run)
    timed = [r for r in b.host if r.bytes_s]
    if not timed:
        why = next((r.skipped for r in b.host if r.skipped), "they were not measured")
        return Text(f"No copies between host and device: {escape(why)}.")
    words = []
    for op, way in (("host_to_device", "host to device"), ("device_to_host", "device to host")):
        best = {
            memory: max(found, key=lambda r: r.bytes_s.median).bytes_s
            for memory in ("pinned", "pageable")
            if (found := [r for r in timed if r.params["op"] == op and r.params["memory"] == memory])
        }
        if best:
            words.append(f"{way} {', '.join(f'{value(e, GIGA)} GB/s {memory}' for memory, e in best.items())}")
    return Text(
        f"Fastest copies: {'; '.join(words)}. The driver stages pageable memory through pinned buffers of its own."
    )


def plateaus(run: LoadedRun) -> Table:
    """Bandwidth of each operation over the three largest sizes."""
    b = derive.bandwidth(run)
    columns = [
        Column("operation", lambda p: p.op + (" (the roof)" if p.op == "copy" else "")),
        Column("GB/s", lambda p: value(p.bytes_s, GIGA), True),
        Column("interval", lambda p: interval(p.bytes_s, GIGA), True),
        *[
            Column("% of rated", lambda p, s=s: percent(s.frac(p.bytes_s)), True)
            for s in b.bases
            if s.rate and s.same_device
        ],
        Column("spread over sizes", lambda p: f"{number(p.spread_frac * 100, 2)} %", True),
        Column("buffer sizes", lambda p: ", ".join(size(s) for s in p.sizes)),
    ]
    raw = [
        {"op": p.op, "bytes_s": p.bytes_s.median, "bytes_s_lo": p.bytes_s.lo, "bytes_s_hi": p.bytes_s.hi,
         "spread_frac": p.spread_frac, "sizes": " ".join(map(str, p.sizes))} for p in b.plateaus
    ]  # fmt: skip
    caption = "Plateau of each operation: every stream counted once"
    return Table("bandwidth_plateaus", caption, columns, b.plateaus, raw)


def cold_rows(run: LoadedRun) -> Table:
    """Every cold bandwidth row."""
    b = derive.bandwidth(run)
    columns = [
        Column("case", lambda r: r.case),
        Column("buffer", lambda r: size(r.params["buffer_bytes"]), True),
        Column("GB/s", lambda r: value(r.bytes_s, GIGA), True),
        Column("interval", lambda r: interval(r.bytes_s, GIGA), True),
        Column("operand sets", lambda r: str(r.params.get("operand_sets", NONE)), True),
        *time_columns(),
    ]
    ordered = sorted(b.rows, key=lambda r: (r.params["op"], r.params["buffer_bytes"]))
    raw = [raw_row(r) for r in b.rows]
    return Table("bandwidth_rows", "Cold bandwidth by operation and size", columns, ordered, raw)


def copies(run: LoadedRun) -> Table | None:
    """CPU: torch's copy beside plain and streaming C copies of the same buffers, interleaved."""
    if run.kind != "cpu":
        return None
    b = derive.bandwidth(run)
    columns = [
        Column("copy", lambda r: r.backend or r.case),
        Column("GB/s counted", lambda r: value(r.bytes_s, GIGA), True),
        Column("interval", lambda r: interval(r.bytes_s, GIGA), True),
        Column("torch over this", lambda r: ratio(b.speedup.get(r.case.partition(".")[2])), True),
        *time_columns(),
    ]
    return Table("bandwidth_copies", "The same copy, interleaved", columns, b.pairs, [raw_row(r) for r in b.pairs])


def cache_rows(run: LoadedRun) -> Table:
    """The warm rows of the cache curve."""
    b = derive.bandwidth(run)
    columns = [
        Column("working set", lambda r: size(2 * r.params["buffer_bytes"]), True),
        Column("GB/s, warm", lambda r: value(r.bytes_s, GIGA), True),
        Column("interval", lambda r: interval(r.bytes_s, GIGA), True),
        *time_columns(),
    ]
    return Table("bandwidth_cache", "Cache curve: copy of the same buffers again and again", columns, b.cache_curve,
                 [raw_row(r) for r in b.cache_curve])  # fmt: skip


def cold_sweep(run: LoadedRun) -> alt.LayerChart | Text:
    """A3: cold bandwidth of each operation over the buffer size."""
    b = derive.bandwidth(run)
    frame = pd.DataFrame(
        [
            charts.rate_row(r, r.bytes_s, GIGA, op=r.params["op"], mib=r.params["buffer_bytes"] / MIB,
                      buffer=size(r.params["buffer_bytes"]))
            for r in b.rows if r.bytes_s
        ]
    )  # fmt: skip
    if frame.empty:
        return charts.NOTHING
    ops = [o for o in ("copy", "mul", "add", "triad", "sum", "fill") if o in set(frame["op"])]
    pick = alt.selection_point(fields=["op"], bind="legend")
    colour = alt.Color("op:N", title="operation", scale=alt.Scale(domain=ops, range=[COLOURS[o] for o in ops]))
    base = alt.Chart(frame).encode(
        x=alt.X("mib:Q", scale=alt.Scale(type="log", base=2), title="size of one buffer, MiB"),
        color=colour,
        opacity=alt.condition(pick, alt.value(1), alt.value(0.15)),
    )
    tips = charts.tooltips("GB/s", alt.Tooltip("buffer:N", title="buffer"))
    y = alt.Y("rate:Q", title="GB/s, cold", scale=alt.Scale(zero=True))
    roof = [("bandwidth roof: plateau of copy", b.roof.bytes_s.median / GIGA)] if b.roof else []
    layers = [
        base.mark_line(size=1.5).encode(y=y),
        base.mark_rule(size=2).encode(y=alt.Y("low:Q"), y2="high:Q", tooltip=tips),
        base.mark_point(size=60, filled=True).encode(y=y, tooltip=tips).add_params(pick),
        *charts.rules(charts.references(b.bases, GIGA, roof), "GB/s"),
    ]
    return charts.base(alt.layer(*layers), "A3  Bandwidth", "every call finds its operands cold; bars are the interval")


def cache_curve(run: LoadedRun) -> alt.LayerChart | Text:
    """A3b: warm copy over the working set, with the caches of the host where they are known."""
    b = derive.bandwidth(run)
    frame = pd.DataFrame(
        [
            charts.rate_row(r, r.bytes_s, GIGA, mib=2 * r.params["buffer_bytes"] / MIB,
                      set=size(2 * r.params["buffer_bytes"]))
            for r in b.cache_curve if r.bytes_s
        ]
    )  # fmt: skip
    if frame.empty:
        return charts.NOTHING
    base = alt.Chart(frame).encode(
        x=alt.X("mib:Q", scale=alt.Scale(type="log", base=2), title="working set (both buffers), MiB")
    )
    tips = charts.tooltips("GB/s", alt.Tooltip("set:N", title="working set"))
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
    layers += charts.rules(charts.references([], GIGA, roof), "GB/s")
    return charts.base(alt.layer(*layers), "A3b  Cache curve", "warm on purpose: the same buffers again and again")


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
