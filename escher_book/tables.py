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


class Text:
    """Markdown that a notebook shows and the book renders."""

    def __init__(self, *paragraphs: str | None):
        self.markdown = "\n\n".join(p for p in paragraphs if p)

    def _repr_markdown_(self) -> str:
        return self.markdown


@dataclass(frozen=True)
class Column:
    """A heading, what to show of a row, whether it is a number (aligned right), and whether it goes if all are empty."""

    title: str
    show: Callable[[Any], str]
    numeric: bool = False
    optional: bool = False


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
            mark = ' class="num"' if column.numeric else ""
            return f"<{tag}{mark}>{html.escape(text)}</{tag}>"

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
        columns = list(dict.fromkeys(key for row in self.raw for key in row))
        return {
            "text/html": self.to_html(),
            "text/markdown": self.to_markdown(),
            "text/plain": self.caption,
            RAW: {"name": self.name, "columns": columns, "rows": [[row.get(c) for c in columns] for row in self.raw]},
        }


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
    p = row.params
    return f"{p['m']}×{p['n']}×{p['k']}\N{NO-BREAK SPACE}{p['layout']}"


def bases_columns(bases: Sequence[Basis], rate: Callable[[Row], Estimate | None]) -> list[Column]:
    """A % column for each basis of the measured device. None where the target shown is another device."""
    return [
        Column(f"% of {'rated' if b.name == 'rated' else 'probed peak'}", lambda r, b=b: percent(b.frac(rate(r))), True)
        for b in bases
        if b.rate and b.same_device
    ]


def _time_columns() -> list[Column]:
    return [
        Column("time a call", lambda r: seconds(r.time_s and r.time_s.median), True),
        Column("n", lambda r: f"{r.time_s.samples:,}" if r.time_s else NONE, True),
        Column("notes", notes, optional=True),
    ]


def gemms(run: LoadedRun) -> Table:
    """Every named GEMM: rate with interval, share of each basis, time, samples."""
    c = derive.compute(run)
    ordered = ([c.roof] if c.roof else []) + c.rows
    columns = [
        Column("case", lambda r: ", ".join([r.case, *r.params.get("also", [])])),
        Column("M×N×K, layout", layout),
        Column("TFLOP/s", lambda r: value(r.flop_s, TERA), True),
        Column("interval", lambda r: interval(r.flop_s, TERA), True),
        *bases_columns(c.bases, lambda r: r.flop_s),
        *_time_columns(),
    ]
    caption = f"{c.dtype.upper()} GEMMs: median of the block medians, with its interval; n is the number of samples"
    return Table("compute_gemms", caption, columns, ordered, [raw_row(r) for r in ordered])


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
    checked = [r for r in [*([c.roof] if c.roof else []), *c.rows, *c.search] if r.error and r.error["check"] == "full"]

    def ratio(name: str) -> Callable[[Row], str]:
        return lambda r: number(r.error.get(name)) if r.error.get(name) is not None else "not finite"

    columns = [
        Column("case", lambda r: r.case),
        Column("M×N×K, layout", layout),
        Column("rel. Frobenius error", lambda r: f"{r.error['rel_frobenius'] or math.nan:.2e}", True),
        Column("bound", lambda r: f"{r.error['rel_frobenius_limit']:.2e}", True),
        Column("element / bound", ratio("elementwise_ratio"), True),
        Column("Freivalds / bound", ratio("freivalds_ratio"), True),
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


def bandwidth_rows(run: LoadedRun) -> Table:
    """Every cold bandwidth row."""
    b = derive.bandwidth(run)
    columns = [
        Column("case", lambda r: r.case),
        Column("buffer", lambda r: size(r.params["buffer_bytes"]), True),
        Column("GB/s", lambda r: value(r.bytes_s, GIGA), True),
        Column("interval", lambda r: interval(r.bytes_s, GIGA), True),
        Column("operand sets", lambda r: str(r.params.get("operand_sets", NONE)), True),
        *_time_columns(),
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
        Column("torch over this", lambda r: _ratio(b.speedup.get(r.case.partition(".")[2])), True),
        *_time_columns(),
    ]
    return Table("bandwidth_copies", "The same copy, interleaved", columns, b.pairs, [raw_row(r) for r in b.pairs])


def _ratio(estimate: Estimate | None) -> str:
    return NONE if estimate is None else f"{value(estimate)} ({interval(estimate)})"


def cache_curve(run: LoadedRun) -> Table:
    b = derive.bandwidth(run)
    columns = [
        Column("working set", lambda r: size(2 * r.params["buffer_bytes"]), True),
        Column("GB/s, warm", lambda r: value(r.bytes_s, GIGA), True),
        Column("interval", lambda r: interval(r.bytes_s, GIGA), True),
        *_time_columns(),
    ]
    return Table("bandwidth_cache", "Cache curve: copy of the same buffers again and again", columns, b.cache_curve,
                 [raw_row(r) for r in b.cache_curve])  # fmt: skip


def _pairs(name: str, caption: str, items: Sequence[tuple[str, Any]], heads=("what", "found")) -> Table:
    shown = [(k, NONE if v is None or v == "" else str(v)) for k, v in items]
    columns = [Column(heads[0], lambda p: p[0]), Column(heads[1], lambda p: p[1])]
    return Table(name, caption, columns, shown, [dict(zip(heads, p, strict=True)) for p in shown])


VIRTUAL = {True: "yes: clock, SKU and sharing of cores are hidden", False: "no"}


def machine(run: LoadedRun) -> Table:
    """What was measured on."""
    env = run.env or {}
    host, device = env.get("host", {}), run.found
    cpu, cpus, memory = host.get("cpu", {}), host.get("cpus", {}), host.get("memory", {})
    items = [("device", f"{device.count} x {device.raw_name}" if device.kind != "cpu" else "CPU host")]
    if device.kind != "cpu":
        items += [
            ("measured on", f"device 0 of {device.count}"),
            ("architecture", device.arch),
            ("compute units", device.compute_units),
            ("device memory", size(device.total_memory_bytes)),
            ("partition or slice", device.slice or "whole device"),
            ("driver", env.get("software", {}).get("driver")),
        ]
    items += [
        ("host", host.get("name")),
        ("system", ", ".join(filter(None, (host.get("distribution"), host.get("system"))))),
        ("CPU", cpu.get("model_name")),
        ("instruction sets", ", ".join(f for f in cpu.get("flags", []) if f != "hypervisor")),
        ("virtual machine", VIRTUAL.get(cpu.get("virtual"))),
        ("cores used", f"{cpus.get('threads')} ({cpus.get('why')})" if cpus else None),
        ("host's last-level caches in use", size(host.get("llc_bytes"))),
        ("NUMA nodes", host.get("numa_nodes")),
        ("host memory", f"{size(memory.get('total_bytes'))}, usable {size(memory.get('usable_bytes'))} "
         f"(bounded by the {memory.get('bounded_by')})" if memory else None),
    ]  # fmt: skip
    return _pairs("environment_machine", "What was measured on", items)


def software(run: LoadedRun) -> Table:
    env = run.env or {}
    packages = env.get("software", {}).get("packages", {})
    items = [("Python", env.get("software", {}).get("python")), *packages.items()]
    items += [("C compiler", env.get("software", {}).get("compiler"))]
    return _pairs("environment_software", "Software", items, ("package", "version"))


def settings(run: LoadedRun) -> Table:
    """Kernel settings and environment variables that move the numbers."""
    env = run.env or {}
    items = [(k.replace("_", " "), v) for k, v in env.get("knobs", {}).items()]
    items += [(k, v) for k, v in env.get("variables", {}).items()]
    return _pairs("environment_settings", "Settings that move the numbers", items)


def checks(run: LoadedRun) -> Table:
    """Pre-run checks: what does not hold, and the mend."""
    rows = (run.env or {}).get("checks", [])
    word = {True: "ok", False: "NOT OK", None: "unknown"}
    columns = [
        Column("check", lambda r: r["check"]),
        Column("found", lambda r: r["found"] or NONE),
        Column("wanted", lambda r: r["wanted"]),
        Column("result", lambda r: word[r["ok"]]),
        Column("why it matters; mend", lambda r: f"{r['why']}; {r['mend']}" if r["ok"] is not True else r["why"]),
    ]
    return Table("environment_checks", "Checks before the run", columns, rows, rows)


def instrument(run: LoadedRun) -> Table:
    """How fine the instrument reads: clock, fixed work, event pairs."""
    rows = derive.rows(run.records("environment"), run.config)
    columns = [
        Column("what", lambda r: r.params["what"]),
        Column("time", lambda r: seconds(r.time_s and r.time_s.median), True),
        Column("interval", lambda r: f"{seconds(r.time_s.lo)} to {seconds(r.time_s.hi)}" if r.time_s else NONE, True),
        Column("median over p10", lambda r: number(r.median_over_p10), True),
        Column("n", lambda r: f"{r.time_s.samples:,}" if r.time_s else NONE, True),
        Column("notes", notes, optional=True),
    ]
    return Table("environment_instrument", "The instrument itself", columns, rows, [raw_row(r) for r in rows])
