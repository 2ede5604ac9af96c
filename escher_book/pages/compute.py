"""The compute page: the roof, every GEMM, the search, the errors, and on a CPU the probed peak."""

from __future__ import annotations

import math
from collections.abc import Callable

import altair as alt
import pandas as pd

from escher_book import charts
from escher_book.charts import COLOURS
from escher_book.findings import basis_sentence, correctness, steadiness
from escher_book.stage import escape
from escher_book.tables import (
    NONE,
    TERA,
    Column,
    Table,
    Text,
    bases_columns,
    clock,
    interval,
    layout,
    notes,
    number,
    ratio,
    raw_row,
    time_columns,
    value,
)
from validation import derive
from validation.derive import LoadedRun, Row

PLOTS: dict[str, tuple[str, ...]] = {"A2": (), "A2b": ()}
SHAPES = {"square": "square", "workload": "triangle-up", "roof": "diamond"}


def finding(run: LoadedRun) -> Text:
    """The compute roof, where it comes from, and how far to trust it."""
    c = derive.compute(run)
    if c is None:
        return Text("This family was not measured.")
    if not (c.roof and c.roof.flop_s):
        reasons = (r.skipped for r in [c.roof, *c.of("square", "workload")] if r and r.skipped)
        why = next(reasons, "no candidate of the search gave a right and timed result")
        return Text(f"**No compute roof:** {escape(why)}.")
    roof, p = c.roof, c.roof.params
    head = (
        f"**Compute roof: {value(roof.flop_s, TERA)} TFLOP/s** ({interval(roof.flop_s, TERA)}) {c.dtype.upper()}, from the "
        f"GEMM {layout(roof)}, measured afresh after a search over {p['searched']} shapes "
        f"(it {p['search_ended']}). " + basis_sentence(c.bases, roof.flop_s, TERA, "TFLOP/s")
    )
    square = None
    if c.best_square:
        share = c.best_square.flop_s.median / roof.flop_s.median
        square = (
            f"The best square, {c.best_square.params['m']}, reaches {value(c.best_square.flop_s, TERA)} TFLOP/s, "
            f"{number(share * 100)} % of the roof."
        )
        if share > 1:
            square += " A square above the roof means that the search missed it, or that the roof was disturbed."
    hot = [r for r in c.rows if r.flop_s and r.flop_s.lo > roof.flop_s.hi]
    above = None
    if hot:
        best = max(hot, key=lambda r: r.flop_s.median)
        above = (
            f"{'1 row lies' if len(hot) == 1 else f'{len(hot)} rows lie'} above the roof, the highest {best.case} at "
            f"{value(best.flop_s, TERA)} TFLOP/s: rows and roof are interleaved, so the search missed a faster shape."
        )
    checked = correctness([roof, *c.rows, *c.reduced, *c.pairs, *c.search])
    return Text(head, steadiness(run, "compute", roof.flop_s, c.converged, c.disturbed), square, above, checked)


def probe(run: LoadedRun) -> Text:
    """CPU: what the probed peak is, and what it says against what the names promise."""
    c = derive.compute(run)
    if run.kind != "cpu" or c is None:
        return Text("A GPU's peak is its vendor's dense figure; nothing is probed.")
    about = (
        "The **probed peak** comes from loops of one instruction that a C compiler builds, with all cores at once. It is "
        "what this machine can do in registers: each thread's best slice, added up. A GEMM must also move data and comes "
        "out below it."
    )
    if not c.probes:
        return Text(f"**The peak was not probed:** {c.probe_skipped or 'no instruction of this CPU is known'}.")
    best = c.probes[0]
    nominal = (run.env or {}).get("nominal") or {}
    text = f"The fastest instruction that was probed, {best.name}, reaches {number(best.best_flop_s / TERA)} TFLOP/s"
    if best.best_flop_s > best.together_flop_s * 1.01:
        text += (
            f" with each of {best.threads} threads at its own best, which no correct GEMM exceeds; in one slice they "
            f"reached {number(best.together_flop_s / TERA)} TFLOP/s at most"
        )
    else:
        text += f" on {best.threads} threads"
    text += "."
    if c.probe_skipped:
        text += f" **It is no basis:** {escape(c.probe_skipped)}."
    elif c.clock_hz:
        per_clock = best.best_flop_s / best.threads / c.clock_hz
        text += f" That is {number(per_clock)} FLOP a clock a thread at the probed clock of {clock(c.clock_hz)}."
        if expected := nominal.get("bf16"):
            promised = expected * best.threads * c.clock_hz
            text += (
                f" The nominal peak of {nominal['uarch']} is {expected} FLOP a clock a core, "
                f"{number(promised / TERA)} TFLOP/s at that clock; the probe reaches "
                f"{number(best.best_flop_s / promised * 100)} % of it."
            )
    if not c.clock_hz:
        text += f" The clock is unknown: {c.clock_note}."
    printed = ((run.env or {}).get("host", {}).get("cpu", {}) or {}).get("printed_hz")
    if printed and c.clock_hz:
        text += f" /proc/cpuinfo prints {clock(printed)}, which on a virtual machine is not the running clock."
    return Text(text, about)


def same_shapes(run: LoadedRun) -> Text:
    """Whether GEMMs of the workload that have one shape, and are measured apart, agree."""
    c = derive.compute(run)
    groups = c.same_shapes()
    if not groups:
        return Text("No two GEMMs of the workload that were timed have the same shape.")
    apart = [g for g in groups if max(r.flop_s.lo for r in g) > min(r.flop_s.hi for r in g)]
    count = sum(map(len, groups))
    text = (
        f"{count} GEMMs of the workload share {'one shape' if len(groups) == 1 else f'{len(groups)} shapes'} and are "
    )
    text += "measured apart, to show how far the same work repeats. "
    if not apart:
        return Text(text + "Wherever shapes are equal, the intervals overlap.")
    named = "; ".join(f"{layout(g[0])} ({', '.join(r.case for r in g)})" for g in apart)
    return Text(
        text + f"**The intervals of equal shapes do not all overlap:** {named}. The machine was not steady then."
    )


def _gemm_columns(c: derive.Compute) -> list[Column]:
    return [
        Column("case", lambda r: r.case),
        Column("M×N×K, layout", layout),
        Column("TFLOP/s", lambda r: value(r.flop_s, TERA), True),
        Column("interval", lambda r: interval(r.flop_s, TERA), True),
        *bases_columns(c.bases, lambda r: r.flop_s),
        *time_columns(),
    ]


def _with_call(columns: list[Column]) -> list[Column]:
    return [columns[0], Column("call", lambda r: r.backend or NONE), *columns[1:]]


def gemms(run: LoadedRun) -> Table:
    """The roof and the squares: rate with interval, share of each basis, time, samples. The CSV holds every row."""
    c = derive.compute(run)
    roof = [c.roof] if c.roof else []
    caption = f"{c.dtype.upper()} GEMMs: median of the block medians, with its interval; n is the number of samples"
    raw = [raw_row(r) for r in [*roof, *c.rows, *c.reduced, *c.pairs]]
    return Table("compute_gemms", caption, _gemm_columns(c), [*roof, *c.of("square")], raw)


def workload(run: LoadedRun) -> Table:
    """Every GEMM of the workload by name, also where shapes repeat."""
    c = derive.compute(run)
    items = c.of("workload")
    return Table(
        "compute_workload", "GEMMs of the workload, each by name", _gemm_columns(c), items, map(raw_row, items)
    )


def beside(run: LoadedRun) -> Table:
    """Batches, a bias, a long K, shapes that outside tools time, and GEMMs with reduced-precision sums."""
    c = derive.compute(run)
    items = [*c.of("batched", "addmm", "long_k", "peer"), *c.reduced]
    caption = "Batches, a bias vector, long sums; peer: an outside tool's shape; reduced: partial sums may be rounded"
    return Table("compute_beside", caption, _with_call(_gemm_columns(c)), items, map(raw_row, items))


def reduced(run: LoadedRun) -> Text:
    """What the reduced-precision reduction changes: rates and errors with it off, then on."""
    c = derive.compute(run)
    off = {"reduced.roof": c.roof, "reduced.long_k": next(iter(c.of("long_k")), None)}
    lines = []
    for row in c.reduced:
        plain = off.get(row.case)
        if row.flop_s and row.error and plain and plain.flop_s and plain.error:
            lines.append(
                f"- {layout(row)}: {value(plain.flop_s, TERA)} TFLOP/s with it off "
                f"(relative error {plain.error['rel_frobenius']:.2e}), {value(row.flop_s, TERA)} with it on "
                f"({row.error['rel_frobenius']:.2e})."
            )
    if not lines:
        why = next((r.skipped for r in c.reduced if r.skipped), "it was not measured")
        return Text(f"**Reduced-precision sums** are off in every row. No row has them on: {escape(why)}.")
    head = "**Reduced-precision sums** are off in every row but those named `reduced`. Rounding partial sums to "
    return Text(head + f"{c.dtype.upper()} may be faster where a library splits K:", "\n".join(lines))


def fused(run: LoadedRun) -> Text:
    """Bias and GELU in the GEMM's epilogue against a call of their own."""
    c = derive.compute(run)
    if ratio_found := c.fused_speedup:
        row = next(r for r in c.pairs if r.case == "epilogue.fused")
        return Text(
            f"Bias and GELU in one call with the GEMM {layout(row)} ({row.backend}) run at {ratio(ratio_found)} times the "
            f"speed of two calls, interleaved. A ratio near 1 may mean that the library did not fuse them."
        )
    why = next((notes(r) for r in c.pairs if notes(r)), "it was not measured")
    return Text(f"No comparison of bias and GELU fused and not: {escape(why)}.")


def epilogue(run: LoadedRun) -> Table:
    """GEMM with bias and GELU, in two calls and in one, interleaved."""
    c = derive.compute(run)
    columns = _with_call(_gemm_columns(c))
    speed = Column("over two calls", lambda r: ratio(c.fused_speedup if r.case == "epilogue.fused" else None), True)
    caption = "Bias and GELU, in two calls and in one; they count no FLOP"
    return Table("compute_epilogue", caption, [*columns[:-3], speed, *columns[-3:]], c.pairs, map(raw_row, c.pairs))


def shape_cost(run: LoadedRun) -> Text:
    """How much rate the shape alone costs: the best and the worst of the skewed GEMMs."""
    c = derive.compute(run)
    timed = [r for r in c.of("skew") if r.flop_s]
    if not timed:
        return Text("No skewed GEMM was timed.")
    best, worst = (pick(timed, key=lambda r: r.flop_s.median) for pick in (max, min))
    head = f"{len(timed)} GEMMs have the FLOP and the K of one square; only M and N differ. "
    ends = (
        f"{layout(best)} is the fastest, {value(best.flop_s, TERA)} TFLOP/s, and {layout(worst)} the slowest, "
        f"{value(worst.flop_s, TERA)} TFLOP/s"
    )
    if best.flop_s.lo <= worst.flop_s.hi:
        return Text(f"{head}{ends}, but their intervals overlap: no cost of a shape can be told.")
    share = worst.flop_s.median / best.flop_s.median
    return Text(f"{head}{ends}, {number(share * 100)} % of it.")


def skew(run: LoadedRun) -> Table:
    """GEMMs of one FLOP whose M grows as N shrinks."""
    c = derive.compute(run)
    items = c.of("skew")
    return Table("compute_skew", "Skew: M over N varies, the FLOP do not", _gemm_columns(c), items, map(raw_row, items))


def skew_chart(run: LoadedRun) -> alt.LayerChart | Text:
    """A2b: rate over M/N of GEMMs with one FLOP."""
    c = derive.compute(run)
    rows = [
        charts.rate_row(r, r.flop_s, TERA, skew=r.params["m"] / r.params["n"], shape=layout(r))
        for r in c.of("skew")
        if r.flop_s
    ]
    if not rows:
        return charts.NOTHING
    x = alt.X("skew:Q", scale=alt.Scale(type="log", base=2), title="M / N")
    points = alt.Chart(pd.DataFrame(rows)).encode(x=x)
    y = alt.Y("rate:Q", title=f"TFLOP/s ({c.dtype.upper()})", scale=alt.Scale(zero=True))
    tips = charts.tooltips("TFLOP/s", alt.Tooltip("shape:N", title="M×N×K"))
    colour = COLOURS["skew"]
    roof = [("compute roof", c.roof.flop_s.median / TERA)] if c.roof and c.roof.flop_s else []
    layers = [
        points.mark_line(size=1.5, color=colour).encode(y=y),
        points.mark_rule(size=2, color=colour).encode(y=alt.Y("low:Q"), y2="high:Q", tooltip=tips),
        points.mark_point(size=60, filled=True, color=colour).encode(y=y, tooltip=tips),
        *charts.rules(charts.references([], TERA, roof), "TFLOP/s"),
    ]
    subtitle = "the FLOP of one square, M larger and N smaller by the same factor; bars are the interval"
    return charts.base(alt.layer(*layers), "A2b  GEMM skew", subtitle)


def roof_search(run: LoadedRun, best: int = 12) -> Table:
    """The best candidates of the roof search by their best sample, which chose the next round and is not the roof."""
    c = derive.compute(run)

    def best_sample(row: Row) -> float:
        return row.flop / min(row.blocks[0])

    timed = sorted((r for r in c.search if r.flop_s), key=best_sample, reverse=True)
    columns = [
        Column("M×N×K, layout", layout),
        Column("round", lambda r: str(r.params["round"]), True),
        Column("best sample, TFLOP/s", lambda r: number(best_sample(r) / TERA), True),
        Column("checked", lambda r: (r.error or {}).get("check", "freivalds")),
    ]
    caption = f"Roof search: the best {min(best, len(timed))} of {len(timed)} shapes tried (three samples each)"
    return Table("compute_search", caption, columns, timed[:best], [raw_row(r) for r in c.search])


def gemm_errors(run: LoadedRun) -> Table:
    """Correctness of every GEMM against float64: error over its bound, up to 1 is right."""
    c = derive.compute(run)
    every = [*([c.roof] if c.roof else []), *c.rows, *c.reduced, *c.pairs, *c.search]
    checked = [r for r in every if r.error and r.error["check"] == "full"]

    def over_bound(name: str) -> Callable[[Row], str]:
        return lambda r: number(r.error.get(name)) if r.error.get(name) is not None else "not finite"

    columns = [
        Column("case", lambda r: r.case),
        Column("M×N×K, layout", layout),
        Column("rel. Frobenius error", lambda r: f"{r.error['rel_frobenius'] or math.nan:.2e}", True),
        Column("bound", lambda r: f"{r.error['rel_frobenius_limit']:.2e}", True),
        Column("element / bound", over_bound("elementwise_ratio"), True),
        Column("Freivalds / bound", over_bound("freivalds_ratio"), True),
        Column("rows", lambda r: str(r.error["rows_checked"]), True),
        Column("result", lambda r: "right" if r.error["ok"] else "WRONG"),
    ]
    raw = [{"case": r.case, **r.params, **r.error} for r in checked]
    return Table("compute_errors", "GEMM results against float64 from the same inputs", columns, checked, raw)


def probes(run: LoadedRun) -> Table | None:
    """CPU: the peak of each instruction that a GEMM could be made of, and what it means a clock."""
    if run.kind != "cpu":
        return None
    c = derive.compute(run)
    nominal = ((run.env or {}).get("nominal") or {}) if run.kind == "cpu" else {}

    def per_clock(p: derive.Probe) -> str:
        return number(p.best_flop_s / p.threads / c.clock_hz) if c.clock_hz else NONE

    def nominal_text(p: derive.Probe) -> str:
        """The public figure is that of the fastest instruction of a dtype."""
        key = "bf16" if p.dtype == "bfloat16" else "fp32"
        fastest = next(q for q in c.probes if q.dtype == p.dtype)
        return str(nominal.get(key) or NONE) if p is fastest else NONE

    columns = [
        Column("instruction", lambda p: p.name),
        Column("peak, TFLOP/s", lambda p: number(p.best_flop_s / TERA), True),
        Column("all threads in one slice", lambda p: interval(p.block_bests, TERA), True),
        Column("threads", lambda p: str(p.threads), True),
        Column("FLOP a clock a thread", per_clock, True),
        Column("nominal, a core", nominal_text, True),
    ]
    raw = [
        {"instruction": p.name, "dtype": p.dtype, "threads": p.threads, "best_flop_s": p.best_flop_s,
         "clock_hz": c.clock_hz} for p in c.probes
    ]  # fmt: skip
    caption = "Probed peak of this host: best slice; for the fastest instruction the sum of each thread's best"
    return Table("compute_probes", caption, columns, c.probes, raw)


def gemm_sweep(run: LoadedRun) -> alt.LayerChart | Text:
    """A2: rate of squares, GEMMs of the workload and roof over 2MNK, as the edge of the cube with as many FLOP."""
    c = derive.compute(run)
    rows = []
    for row in [*([c.roof] if c.roof else []), *c.of("square", "workload")]:
        if row.flop_s:
            kind = derive.gemm_group(row)
            edge = (row.flop / 2) ** (1 / 3)
            rows.append(charts.rate_row(row, row.flop_s, TERA, kind=kind, shape=layout(row), edge=edge))
    if not rows:
        return charts.NOTHING
    frame = pd.DataFrame(rows)
    kinds = [k for k in ("square", "workload", "roof") if k in set(frame["kind"])]
    pick = alt.selection_point(fields=["kind"], bind="legend")
    x = alt.X("edge:Q", scale=alt.Scale(type="log", base=2), title="cube root of M×N×K")
    colour = alt.Color("kind:N", title="GEMM", scale=alt.Scale(domain=kinds, range=[COLOURS[k] for k in kinds]))
    shape = alt.Shape("kind:N", title="GEMM", scale=alt.Scale(domain=kinds, range=[SHAPES[kind] for kind in kinds]))
    base = alt.Chart(frame).encode(x=x, color=colour, opacity=alt.condition(pick, alt.value(1), alt.value(0.15)))
    y = alt.Y("rate:Q", title=f"TFLOP/s ({c.dtype.upper()})", scale=alt.Scale(zero=True))
    tips = charts.tooltips("TFLOP/s", alt.Tooltip("shape:N", title="M×N×K"))
    marks = base.mark_point(size=70, filled=True).encode(y=y, shape=shape, tooltip=tips)
    bars = base.mark_rule(size=2).encode(y=alt.Y("low:Q"), y2="high:Q", tooltip=tips)
    layers = [bars, marks.add_params(pick), *charts.rules(charts.references(c.bases, TERA, []), "TFLOP/s")]
    subtitle = "median of block medians; bars are the interval; click the legend to pick"
    return charts.base(alt.layer(*layers), "A2  GEMM sweep", subtitle)
