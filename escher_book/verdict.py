"""The pages that judge: scorecard, outside tools, run against run. Every sentence is computed from judgements."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

from escher_book import findings, tables
from escher_book.stage import admonition, escape
from escher_book.tables import GIB, GIGA, NONE, TERA, Column, Table, number, seconds
from escher_kernels.statistics import Estimate
from validation import compare, crosscheck, scorecard
from validation.compare import Compared, Comparison, ProcessId, Variability
from validation.crosscheck import Check
from validation.derive import LoadedRun
from validation.scorecard import Figure, Scorecard

SCALES = {"FLOP/s": (TERA, "TFLOP/s"), "B/s": (GIGA, "GB/s"), "fraction": (0.01, "%"), "percent": (1, "%"),
          "bytes": (GIB, "GiB"), "B": (GIB, "GiB"), "ratio": (1, "×"), "count": (1, "")}  # fmt: skip


def figure(value: float | None, unit: str, lo: float | None = None, hi: float | None = None) -> str:
    """A figure in base units as a person reads it; with its interval its digits follow from that."""
    if value is None:
        return NONE
    if unit == "s":
        return seconds(value)
    scale, name = SCALES.get(unit, (1, unit))
    text = f"{value:,.0f}" if unit == "count" else number(value / scale, 4)
    if lo is not None and hi is not None:
        text = tables.value(Estimate(value, lo, hi, 1.0, 6, 6), scale)
    return f"{text}\N{NO-BREAK SPACE}{name}".rstrip("\N{NO-BREAK SPACE}")


def spread(f: Figure) -> str:
    if f.lo is None or f.hi is None or f.value is None:
        return NONE
    return tables.interval(Estimate(f.value, f.lo, f.hi, 1.0, 6, 6), SCALES.get(f.unit, (1, ""))[0])


def threshold(value: float, unit: str) -> str:
    """A threshold with its unit, with all the digits that it has."""
    scale, name = {"fraction": (0.01, "%"), "percent": (1, "%"), "ratio": (1, "×"), "count": (1, "")}.get(unit, (1, unit))
    return f"{value / scale:,.6g} {name}".strip()


# ---- scorecard ----


def headline(card: Scorecard) -> str:
    """The verdict with what it rests on, as HTML and Markdown."""
    counts = {s: sum(c.status == s for c in card.criteria) for s in scorecard.STATUSES}
    words = ", ".join(f"{n} {s}" for s, n in counts.items() if n)
    return f'<p class="verdict">{tables.pill(card.verdict)} {words}.</p>'


def reasons(card: Scorecard) -> str:
    if not card.reasons:
        return "Every gating criterion that applies has passed, and nothing failed."
    return "\n".join(f"{i}. {escape(text)}." for i, text in enumerate(card.reasons, start=1))


def first_reasons(card: Scorecard, most: int = 3) -> str:
    """The gravest reasons, for the first page."""
    lines = [f"- {escape(text.partition('; ')[0])}{', and more' if '; ' in text else ''}." for text in card.reasons[:most]]
    rest = len(card.reasons) - most
    more = f"{rest} more {'reason' if rest == 1 else 'reasons'}, figures" if rest > 0 else "Figures"
    lines.append(f"- {more} and thresholds: [scorecard](scorecard.md)")
    return "\n".join(lines)


def criteria(card: Scorecard) -> Table:
    """One row a criterion."""
    columns = [
        Column("criterion", lambda c: c.sc),
        Column("judges", lambda c: c.title),
        Column("status", lambda c: c.status, pill=True),
        Column("gating", lambda c: "yes" if c.gating else "no"),
        Column("why", lambda c: c.reason),
    ]
    raw = [{"sc": c.sc, "title": c.title, "gating": c.gating, "status": c.status, "reason": c.reason} for c in card.criteria]
    return Table("scorecard", "Criteria of acceptance", columns, card.criteria, raw)


def figures(card: Scorecard) -> Table:
    items = [(c, f) for c in card.criteria for f in c.figures]
    columns = [
        Column("criterion", lambda i: i[0].sc),
        Column("figure", lambda i: i[1].what),
        Column("value", lambda i: figure(i[1].value, i[1].unit, i[1].lo, i[1].hi), True),
        Column("interval", lambda i: spread(i[1]), True),
    ]
    raw = [{"sc": c.sc, "what": f.what, "value": f.value, "lo": f.lo, "hi": f.hi, "unit": f.unit} for c, f in items]
    return Table("scorecard_figures", "What the criteria were judged by", columns, items, raw)


def thresholds(card: Scorecard) -> Table:
    items = [(c, limit) for c in card.criteria for limit in c.limits]
    columns = [
        Column("criterion", lambda i: i[0].sc),
        Column("threshold", lambda i: i[1].name),
        Column("value", lambda i: threshold(i[1].value, i[1].unit), True),
        Column("why", lambda i: i[1].source),
        Column("set on", lambda i: i[1].date),
    ]
    raw = [{"sc": c.sc, "threshold": x.name, "value": x.value, "unit": x.unit, "source": x.source, "date": x.date}
           for c, x in items]  # fmt: skip
    return Table("scorecard_thresholds", "Thresholds, all from the configuration", columns, items, raw)


def evidence(card: Scorecard) -> str:
    """For each criterion that was not met, what its window looked like."""
    out = []
    for c in card.criteria:
        if c.evidence:
            lines = "\n".join(f"- {escape(line)}" for line in c.evidence)
            out.append(f"**{c.sc} {escape(c.title)}**, {escape(c.reason)}\n\n{lines}")
    return "\n\n".join(out) or "Nothing was missed."


def implausible(card: Scorecard) -> Table | None:
    """Rows that the guard marked; None where there are none."""
    if not card.implausible:
        return None
    columns = [
        Column("family", lambda i: i.family),
        Column("row", lambda i: i.case),
        Column("marked", lambda i: i.level, pill=True),
        Column("why", lambda i: i.reason),
    ]
    raw = [{"family": i.family, "case": i.case, "level": i.level, "excess_frac": i.excess_frac, "cause": i.cause,
            "reason": i.reason} for i in card.implausible]  # fmt: skip
    return Table("implausible", "Rows that are faster than they can be", columns, card.implausible, raw)


def scorecard_page(run: LoadedRun, card: Scorecard, markdown: bool = False) -> str:
    """The page that leads the book; with `markdown`, scorecard.md without HTML."""
    def shown(table: Table | None) -> str:
        return "" if table is None else table.to_markdown() if markdown else table.to_html()

    guard = implausible(card)
    parts = [
        f"# {escape('Scorecard: ' + findings.machine_name(run))}",
        *([] if markdown else [f'<p class="subtitle">{html.escape(findings.provenance(run))}</p>']),
        *([escape(findings.provenance(run))] if markdown else []),
        *(f"> {escape(text)}" if markdown else admonition(kind, text) for kind, text in findings.banners(run)),
        f"**{card.verdict}**" if markdown else headline(card),
        reasons(card),
        shown(criteria(card)),
        "## What was missed, and its evidence",
        evidence(card),
        *(["## Implausible rows", shown(guard)] if guard else []),
        "## Figures",
        shown(figures(card)),
        "## Thresholds",
        shown(thresholds(card)),
        "" if markdown else HOW_TO_READ,
    ]
    return "\n\n".join(p for p in parts if p) + "\n"


HOW_TO_READ = """\
## How to read it

GO: nothing failed and every gating criterion that applies has passed. CONDITIONAL GO: nothing failed, but a gating
criterion is open or warned, or a chosen family did not finish. NO-GO: at least one criterion is FAIL or INVALID, gating
or not. A speed passes or fails by its whole interval; where that straddles the threshold it is INSUFFICIENT. SKIP: it
applies and was not run. N/A: it does not apply. The rules are in the [methodology](notebooks/methodology.md).
"""


# ---- outside tools ----


def checks_table(found: Sequence[Check]) -> Table:
    """Matched rows first, then what gave nothing to compare."""
    def rate(e: Estimate | None, c: Check) -> str:
        scale, name = SCALES.get(c.unit or "", (1, ""))
        return f"{tables.value(e, scale)} {name}" if e else NONE

    items = sorted(found, key=lambda c: (not c.matched, c.tool))
    columns = [
        Column("tool", lambda c: f"{c.tool} {c.version or ''}".strip()),
        Column("what it measured", lambda c: c.name),
        Column("status", lambda c: c.status, pill=True),
        Column("ours", lambda c: rate(c.ours, c), True),
        Column("theirs", lambda c: rate(c.theirs, c), True),
        Column("ours over theirs", lambda c: tables.ratio(c.ratio), True),
        Column("why", lambda c: c.reason + (f"; our row is {c.ours_case}" if c.ours_case else "")),
    ]
    return Table("validation", "Outside tools, each reading beside the row of ours that did the same", columns, items,
                 crosscheck_rows(items))  # fmt: skip


def crosscheck_rows(found: Sequence[Check]) -> list[dict[str, Any]]:
    out = []
    for c in crosscheck.to_json(found):
        flat = {k: v for k, v in c.items() if not isinstance(v, dict)}
        for name in ("ours", "theirs", "ratio"):
            flat |= {f"{name}_{k}": v for k, v in (c[name] or {}).items()}
        out.append(flat)
    return out


def checks_sentence(found: Sequence[Check]) -> str:
    """How far the tools agree, after what failed or cannot be."""
    matched = [c for c in found if c.matched]
    bad = [c for c in found if c.status in (crosscheck.FAIL, crosscheck.INVALID)]
    first = "".join(f"**{c.status}** {escape(c.tool)}, {escape(c.name)}: {escape(c.reason)}. " for c in bad[:4])
    first += f"{len(bad) - 4} more are FAIL or INVALID. " if len(bad) > 4 else ""
    if not found:
        return (
            "No outside tool was run on this machine for this run, and no log was imported. `escher validate RUN` runs what is "
            "installed; `escher validate RUN --import FILE...` takes logs that were made elsewhere."
        )
    if not matched:
        return first + "**No reading of a tool could be matched with a row of this run.** The table says what each one lacks."
    agreed = sum(c.status == crosscheck.PASS for c in matched)
    rest = [c for c in matched if c.status != crosscheck.PASS and c not in bad]
    text = first + f"**{agreed} of {len(matched)} matched rows agree** with {', '.join(sorted({c.tool for c in matched}))}."
    if rest:
        text += " " + " ".join(f"{escape(c.tool)}, {escape(c.name)}: {escape(c.reason)}." for c in rest[:4])
    return text


def validation_page(run: LoadedRun, found: Sequence[Check], markdown: bool = False) -> str:
    table = checks_table(found)
    parts = [
        f"# {escape('Outside tools: ' + findings.machine_name(run))}",
        *([] if markdown else [f'<p class="subtitle">{html.escape(findings.provenance(run))}</p>']),
        checks_sentence(found),
        *([table.to_markdown() if markdown else table.to_html()] if found else []),
        "" if markdown else LIKE_WITH_LIKE,
    ]
    return "\n\n".join(p for p in parts if p) + "\n"


LIKE_WITH_LIKE = """\
## What may be compared

Like with like: the same operation, dtype, shape or size and kind of data, bytes counted the same way, one direction, and
the same statistic, which is computed from our raw samples. RVS prints the maximum of its intervals, so the median of its
interval lines is taken; TransferBench prints a mean although it says peak; the old rocm-bandwidth-test prints the best of
its iterations; nvbandwidth a median. A device-local copy counts its bytes once in TransferBench and nvbandwidth and is
doubled here. An exit status or the word PASS is no evidence. On this machine a tool runs between two measurements of
ours; an imported log is held against the run's own rows. SKIP says what a reading lacks. The logs are below `raw/tools/`.
"""




# ---- run against run ----


def _side(row: Compared, estimate: Estimate | None) -> str:
    scale, name = SCALES.get(row.unit, (1, row.unit))
    if estimate is None:
        return NONE
    return seconds(estimate.median) if row.unit == "s" else f"{tables.value(estimate, scale)} {name}"


def _change(row: Compared) -> str:
    """How much better (+) or worse (-) the run is, with its interval."""
    e = row.difference or row.ratio
    if e is None:
        return NONE
    shift, unit = (0, "pp") if row.difference else (1, "%")
    low, high = (number((x - shift) * 100, 2) for x in (e.lo, e.hi))
    return f"{number((e.median - shift) * 100, 2)} {unit} ({low} to {high})"


def compared_table(name: str, caption: str, items: Sequence[Compared]) -> Table:
    columns = [
        Column("what", lambda r: r.label),
        Column("baseline", lambda r: _side(r, r.base), True),
        Column("this run", lambda r: _side(r, r.run), True),
        Column("better by", _change, True),
        Column("A/A noise", lambda r: NONE if r.noise_floor is None else f"{number(r.noise_floor * 100, 2)} %", True),
        Column("verdict", lambda r: " ".join(filter(None, (r.verdict, "INDICATIVE" if r.verdict and r.indicative else "")))),
        Column("notes", lambda r: "; ".join(filter(None, (r.reason, r.note))), optional=True),
    ]
    raw = [
        {"key": r.key, "family": r.family, "unit": r.unit, "base": r.base and r.base.median, "run": r.run and r.run.median,
         "ratio": r.ratio and r.ratio.median, "ratio_lo": r.ratio and r.ratio.lo, "ratio_hi": r.ratio and r.ratio.hi,
         "noise_floor": r.noise_floor, "verdict": r.verdict, "indicative": r.indicative}
        for r in items
    ]  # fmt: skip
    return Table(name, caption, columns, items, raw)


def regression_sentences(found: Comparison) -> list[str]:
    out = []
    for r in compare.regressions(found):
        words = [r.note, "indicative: fewer runs than a verdict needs" if r.indicative else ""]
        sure = f" ({'; '.join(w for w in words if w)})" if any(words) else ""
        if r.change is None:
            out.append(f"{r.what} went from {r.base} to {r.run}{sure}")
        else:
            unit = "points" if r.limit_unit == "percentage points" else "%"
            out.append(
                f"{r.what} fell by {number(-r.change.median * 100, 2)} {unit} ({number(-r.change.hi * 100, 2)} to "
                f"{number(-r.change.lo * 100, 2)}), more than {r.limit * 100:g} {unit} is a regression{sure}"
            )
    return out


def undecided(found: Comparison) -> list[tuple[str, bool]]:
    """The headlines that a regression is judged by and that have no verdict or an ambiguous one, each with whether this
    run lost it."""
    out = []
    for key in compare.JUDGED:
        row = found.headline(key)
        if row is None or row.verdict in (compare.FASTER, compare.SAME, compare.SLOWER):
            continue
        lost = bool(row.base_count and not row.run_count)
        out.append((f"{row.label}: {row.verdict or row.reason or 'no verdict'}", lost))
    return out


def comparison_sentence(found: Comparison) -> str:
    names = f"{_names(found.base)} against {_names(found.run)}"
    if found.across:
        unlike = "; ".join(found.unlike)
        return f"Side by side, without a verdict: {names}." + (f" Unlike: {unlike}." if unlike else "")
    worse = regression_sentences(found)
    counts = ", ".join(f"{len(found.called(v))} {v}" for v in (compare.FASTER, compare.SAME, compare.SLOWER, compare.AMBIGUOUS))
    open_ = [text for text, _ in undecided(found)]
    head = "; ".join([*worse, *([f"not decided: {', '.join(open_)}"] if open_ else [])])
    head = head[:1].upper() + head[1:] if head else "No regression"
    return f"{head}. Baseline {names}: {counts}."


def _names(side: Sequence[ProcessId]) -> str:
    count = f"{len(side)} runs, " if len(side) > 1 else ""
    return f"{count}{side[0].run_id}" + (f" to {side[-1].run_id}" if len(side) > 1 else "")


def differences_table(found: Comparison) -> Table:
    columns = [
        Column("what", lambda d: d.what),
        Column("baseline", lambda d: d.base or NONE),
        Column("this run", lambda d: d.run or NONE),
    ]
    raw = [{"what": d.what, "base": d.base, "run": d.run} for d in found.environment]
    return Table("comparison_environment", "What differs in the environment", columns, found.environment, raw)


def comparison_tables(found: Comparison) -> list[Table]:
    return [
        compared_table("comparison_headlines", "Headlines, this run over the baseline", found.headlines),
        differences_table(found),
        compared_table("comparison_rows", "Every row that was timed", found.rows),
    ]


def comparison_text(found: Comparison) -> str:
    """For the console."""
    gone = [f"- {line}" for line in found.missing]
    parts = [comparison_sentence(found), "\n".join(gone), *(t.to_markdown() for t in comparison_tables(found))]
    return "\n\n".join(p for p in parts if p)


def noise_table(run: LoadedRun) -> Table:
    """A/A: how far each family differs from itself."""
    floor = compare.noise_floor(run)
    items = list(floor.families.items())
    columns = [
        Column("family", lambda i: i[0]),
        Column("odd against even blocks, 90th percentile", lambda i: f"{number(i[1] * 100, 2)} %", True),
    ]
    raw = [{"family": k, "noise_floor": v} for k, v in items]
    return Table("noise_floor", "A/A: this run against itself; a smaller difference is never called", columns, items, raw)


def variability_table(found: Variability) -> Table:
    def share(value: float | None) -> str:
        return NONE if value is None else f"{number(value * 100, 2)} %"

    def cv_interval(s: Any) -> str:
        if s.cv_interval is None:
            return NONE
        low, high = s.cv_interval
        return f"{number(low * 100, 2)} to {number(high * 100, 2) if high < float('inf') else 'any'} %"

    columns = [
        Column("headline", lambda s: s.label),
        Column("runs", lambda s: str(s.count), True),
        Column("mean", lambda s: figure(s.mean, s.unit), True),
        Column("median", lambda s: figure(s.median, s.unit), True),
        Column("CV", lambda s: share(s.cv), True),
        Column("interval of the CV", cv_interval, True),
        Column("within runs", lambda s: share(s.within_frac), True),
        Column("between runs", lambda s: share(s.between_frac), True),
        Column("values", lambda s: ", ".join(NONE if v is None else figure(v, s.unit) for v in s.values)),
    ]
    raw = [{"key": s.key, "unit": s.unit, "cv": s.cv, "mean": s.mean, "median": s.median, "within_frac": s.within_frac,
            "between_frac": s.between_frac, "runs": s.count} for s in found.spreads]  # fmt: skip
    return Table("variability", f"{len(found.processes)} fresh-process runs", columns, found.spreads, raw)


def comparison_page(run: LoadedRun, found: Comparison | str, spread: Variability | str) -> str:
    """Against the baseline, or why there is none; how far runs differ; the run against itself."""
    parts = [
        f"# {escape('Against the baseline: ' + findings.machine_name(run))}",
        f'<p class="subtitle">{html.escape(findings.provenance(run))}</p>',
        escape(found) if isinstance(found, str) else escape(comparison_sentence(found)),
    ]
    if not isinstance(found, str):
        parts += [admonition("warning", line) for line in found.missing]
        parts += [t.to_html() for t in comparison_tables(found)]
    parts += ["## How far runs differ"]
    parts += [escape(spread) if isinstance(spread, str) else variability_table(spread).to_html()]
    parts += ["## This run against itself", noise_table(run).to_html(), HOW_TO_COMPARE]
    return "\n\n".join(parts) + "\n"


HOW_TO_COMPARE = """\
## How to read it

A row is faster or slower where the whole interval of its ratio lies beyond the limit and beyond the noise of both sides
against themselves. With three or more fresh-process runs a side that is a 95 % Welch interval of the mean log ratio;
with fewer it is the quotient of two runs' intervals and says INDICATIVE, because blocks of one process know nothing of
the next. Runs of another device, target, workload, partition or method, or of another power cap where both know it, are
refused by name. *Not decided* is said of a roof or of compiled MFU that has no verdict: it is no good news.
"""
