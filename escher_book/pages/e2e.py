"""The end-to-end page: the whole model eager and compiled, its MFU on each basis, and where the rest of the time goes."""

from __future__ import annotations

import altair as alt
import pandas as pd

from escher_book import charts
from escher_book.charts import NOTHING
from escher_book.findings import correctness, meanwhile, part_of
from escher_book.stage import escape
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
    seconds,
    size,
    value,
)
from validation import derive, roofline
from validation.derive import LoadedRun
from validation.roofline import COMPILED, EAGER, E2e, Ledger, Mfu

MILLI = 1e-3
COLOUR_OF = {EAGER: "#D55E00", COMPILED: "#0072B2"}
BASIS_COLOURS = {"measured": "#009E73", "rated": "#444444", "probed": "#444444", "pilot": "#CC79A7"}

PLOTS: dict[str, tuple[str, ...]] = {"A8": ("compute",), "A8b": (), "A10": ("compute", "bandwidth", "ops")}


def finding(run: LoadedRun) -> Text:
    """How fast the model runs, what that is a share of, and where the rest goes."""
    found = roofline.e2e(run)
    if found is None:
        return Text("This family was not measured.")
    rows = [r for r in derive.rows(run.records("e2e"), run.config, run.kind) if r.role == "case"]
    return Text(
        _times(run, found), _speedup(run, found), _rest(run), _counter(run, found), _right(found), correctness(rows),
        meanwhile(run, "e2e", shift=found.shift), _pilot(run),
    )  # fmt: skip


def _times(run: LoadedRun, found: E2e) -> str:
    spec, scopes = found.spec, {m.scope: m for m in roofline.mfu(run)}
    out = []
    for name in (EAGER, COMPILED):
        row = found.rows.get(name)
        if row is None:
            out.append(f"**{name.capitalize()}: unavailable**, {escape(found.unavailable[name])}.")
            continue
        mode = f", mode {found.mode}" if name == COMPILED else ""
        text = (
            f"**{name.capitalize()}{mode}: {value(row.time_s, MILLI)} ms a {spec.unit}{part_of(spec)}** "
            f"({interval(row.time_s, MILLI)}), {value(scopes[name].flop_s, TERA)} TFLOP/s"
        )
        shares = [f"{percent(share)} of the {b.label}" for b in roofline.bases(run)
                  if (share := scopes[name].shares.get(b.name)) is not None]  # fmt: skip
        out.append(text + (f", {', '.join(shares)}." if shares else "; no basis to give a share of."))
        if (over := scopes[name].shares.get("measured")) is not None and over.lo > 1:
            out.append(
                "**More than the measured roof:** the machine was slower while the roof was measured, so shares of it "
                "say nothing here; measure again on a quieter machine."
            )
    return " ".join(out)


def _speedup(run: LoadedRun, found: E2e) -> str | None:
    ratio = found.speedup
    if ratio is None:
        return None
    if not ratio.sufficient:
        verdict = f"too few blocks ({ratio.blocks}) for a verdict"
    elif ratio.lo > 1:
        verdict = "compiling makes it faster"
    elif ratio.hi < 1:
        verdict = "compiling makes it **slower**"
    elif max(ratio.hi - 1, 1 - ratio.lo) <= run.config.threshold("converged_frac", run.kind):
        verdict = "the two tie"
    else:
        verdict = "which is faster cannot be told"
    text = f"Eager over compiled time is {value(ratio)} ({interval(ratio)}), from interleaved blocks: {verdict}."
    if found.compile_s is not None:
        cached = ", part of it from the compiler's cache" if found.from_cache else ""
        text += f" The first compiled pass took {seconds(found.compile_s)}{cached}; that is in no time above."
    return text


def _rest(run: LoadedRun) -> str | None:
    """Where the time beyond FLOP / roof goes, largest part first."""
    out = []
    for mode in (EAGER, COMPILED):
        made = roofline.ledger(run, mode)
        if isinstance(made, str):
            out.append(f"No gap ledger of {mode}: {escape(made)}.")
            continue
        parts = sorted(made.parts.items(), key=lambda p: -abs(p[1]))[:2]
        named = ", ".join(f"{name} {_share(t, made.total_s)}" for name, t in parts)
        text = f"Of the {mode} pass, FLOP at the roof take {_share(made.floor_s, made.total_s)}; then {named}."
        text += _residual(made, run.config.threshold("gap_residual_frac") * 100)
        out.append(text)
    return " ".join(out)


def _residual(made: Ledger, limit: float) -> str:
    """What is left over: a finding where its whole interval lies beyond the limit (percent)."""
    frac = made.residual_frac
    around = f"{percent(frac)} ({interval(frac, 0.01)})"
    if made.finding is None:
        return f" The residual, {around}, is not settled: its interval straddles {limit:g} % of the pass."
    if not made.finding:
        return f" The residual is {around}, within {limit:g} % of the pass."
    why = "the operations alone take longer than the pass" if frac.hi < 0 else "the operations alone do not explain the pass"
    return f" **The residual is {around}, beyond {limit:g} %:** {why}."


def _share(part: float | None, whole: float) -> str:
    return NONE if part is None else f"{number(part / whole * 100, 2)} %"


def _counter(run: LoadedRun, found: E2e) -> str | None:
    if found.counter is None:
        return None
    limit, drift = run.config.threshold("flop_counter_pct"), found.counter.drift_frac * 100
    ok = abs(drift) <= limit
    text = f"Torch's counter finds {number(found.counter.counted / GIGA, 6)} GFLOP in the eager pass, "
    text += f"the operation table {number(found.counter.declared / GIGA, 6)}" + (f" ({drift:+.2g} %)" if drift else ", the same")
    return text + ("." if ok else f": **more than {limit:g} % apart.**")


def _right(found: E2e) -> str | None:
    errors = [f"{e['check']} {e['rel_frobenius']:.1e} ({'' if e['ok'] else '**beyond** '}bound {e['rel_frobenius_limit']:.1e})"
              for e in found.compile_errors if e.get("rel_frobenius") is not None]  # fmt: skip
    return f"Compiled against eager, relative Frobenius: {', '.join(errors)}." if errors else None


def _pilot(run: LoadedRun) -> str | None:
    """The pilot's figures do not agree among themselves; whoever compares must know."""
    spec = roofline.spec_of(run)
    bound = roofline.pilot_bound(spec)
    quoted = ((spec.pilot or {}).get("mfu_pct") or {}).get("compiled")
    if bound is None or quoted is None:
        return None
    text = (
        f"The pilot quotes {quoted} % compiled. At its own peak of {number(bound.peak_flop_s / TERA, 4)} TFLOP/s and ridge "
        f"the sum of its theory times allows {number(bound.mfu_frac * 100)} %"
    )
    contradicts = quoted > bound.mfu_frac * 100
    return text + (": its figures do not agree among themselves." if contradicts else ".")


def mfu(run: LoadedRun) -> Table:
    """Every scope from theory to compiled: time a pass, rate, share of each basis."""
    scopes, basis = roofline.mfu(run), roofline.bases(run)
    columns = [
        Column("scope", lambda m: m.label),
        Column("time", lambda m: f"{value(m.time_s, MILLI)} ms" if m.time_s else NONE, True),
        Column("interval, ms", lambda m: interval(m.time_s, MILLI), True),
        Column("TFLOP/s", lambda m: value(m.flop_s, TERA), True),
        *[
            Column(f"MFU, {b.name}", lambda m, b=b: percent(m.shares.get(b.name)), True)
            for b in basis if b.rate and b.same_device
        ],
        Column("notes", lambda m: "" if m.time_s else m.reason, optional=True),
    ]  # fmt: skip
    named = "; ".join(f"{b.name}: {b.label}, {number(b.rate / TERA, 4)} TFLOP/s" for b in basis if b.rate and b.same_device)
    caption = f"One {roofline.spec_of(run).unit}: time and MFU ({named or 'no basis in this run'})"
    shown = [b.name for b in basis if b.rate and b.same_device]
    raw = [
        {"scope": m.scope, "time_s": m.time_s and m.time_s.median, "flop_s": m.flop_s and m.flop_s.median,
         **{f"mfu_{name}_frac": (s := m.shares[name]) and s.median for name in shown}, "reason": m.reason} for m in scopes
    ]  # fmt: skip
    return Table("e2e_mfu", caption, columns, scopes, raw)


def mfu_chart(run: LoadedRun) -> alt.LayerChart | Text:
    """A8: MFU of every scope on every basis of this device, with its interval."""
    rows = [_mfu_row(m, name, share) for m in roofline.mfu(run) for name, share in m.shares.items() if share]
    if not rows:
        return NOTHING
    frame = pd.DataFrame(rows)
    names = [label for label in roofline.SCOPES.values() if label in set(frame["scope"])]
    there = [b for b in BASIS_COLOURS if b in set(frame["basis"])]
    pick = alt.selection_point(fields=["basis"], bind="legend")
    marks = alt.Chart(frame).encode(
        y=alt.Y("scope:N", sort=names, title=None, axis=alt.Axis(labelLimit=180)),
        yOffset=alt.YOffset("basis:N", sort=there),
        color=alt.Color("basis:N", title="share of", scale=alt.Scale(domain=there, range=[BASIS_COLOURS[b] for b in there])),
        opacity=alt.condition(pick, alt.value(1), alt.value(0.15)),
    )
    tips = [
        alt.Tooltip("scope:N", title="scope"), alt.Tooltip("label:N", title="share of"),
        alt.Tooltip("share:Q", title="MFU %", format=",.4~r"), alt.Tooltip("low:Q", title="interval from", format=",.4~r"),
        alt.Tooltip("high:Q", title="to", format=",.4~r"), alt.Tooltip("ms:Q", title="ms", format=",.4~r"),
    ]  # fmt: skip
    layers = [
        marks.mark_bar(size=12)
        .encode(x=alt.X("share:Q", title="MFU, %", scale=alt.Scale(zero=True)), tooltip=tips)
        .add_params(pick),
        marks.mark_rule(size=2, color="#111111").encode(x=alt.X("low:Q"), x2="high:Q", color=alt.value("#111111")),
    ]
    return charts.base(alt.layer(*layers), "A8  MFU", "black lines are the interval; each colour is one basis")


def _mfu_row(m: Mfu, name: str, share: derive.Estimate) -> dict:
    label = {"measured": "the measured compute roof", "rated": "the rated dense peak", "probed": "the probed peak",
             "pilot": "the pilot's peak"}[name]  # fmt: skip
    return {"scope": m.label, "basis": name, "label": label, "share": share.median * 100, "low": share.lo * 100,
            "high": share.hi * 100, "ms": m.time_s.median / MILLI}  # fmt: skip


def chunk_chart(run: LoadedRun) -> alt.LayerChart | Text:
    """A8b: the time of every kept chunk, eager and compiled, in the order they ran."""
    found = roofline.e2e(run)
    rows = []
    for name, row in found.rows.items():
        number_of = 1
        for block, samples in zip(row.block_numbers, row.blocks, strict=True):
            for t in samples:
                number_of += 1
                rows.append({"mode": name, "chunk": number_of, "block": block + 1, "ms": t / MILLI})
    if not rows:
        return NOTHING
    frame = pd.DataFrame(rows)
    there = [m for m in COLOUR_OF if m in set(frame["mode"])]
    colour = alt.Color("mode:N", title="model", scale=alt.Scale(domain=there, range=[COLOUR_OF[m] for m in there]))
    pick = alt.selection_point(fields=["mode"], bind="legend")
    shown = alt.condition(pick, alt.value(1), alt.value(0.15))
    marks = alt.Chart(frame).encode(color=colour, opacity=shown)
    tips = [alt.Tooltip("mode:N", title="model"), alt.Tooltip("chunk:Q", title=found.spec.unit),
            alt.Tooltip("block:Q", title="block"), alt.Tooltip("ms:Q", title="ms", format=",.4~r")]  # fmt: skip
    medians = pd.DataFrame([{"mode": n, "ms": r.time_s.median / MILLI} for n, r in found.rows.items()])
    layers = [
        alt.Chart(medians).mark_rule(strokeDash=[6, 4]).encode(y=alt.Y("ms:Q"), color=colour, opacity=shown),
        marks.mark_point(size=50, filled=True)
        .encode(
            x=alt.X("chunk:Q", title=f"{found.spec.unit} (the first is discarded)", axis=alt.Axis(format="d")),
            y=alt.Y("ms:Q", title=f"ms a {found.spec.unit}", scale=alt.Scale(zero=False)), tooltip=tips,
        )
        .add_params(pick),
    ]  # fmt: skip
    title = f"A8b  Time of each {found.spec.unit}"
    return charts.base(alt.layer(*layers), title, "eager and compiled blocks alternate; dashed: median")


def ledger(run: LoadedRun) -> Table | Text:
    """Where the time of a pass goes, part by part."""
    made = {mode: roofline.ledger(run, mode) for mode in (EAGER, COMPILED)}
    good = {mode: found for mode, found in made.items() if isinstance(found, Ledger)}
    if not good:
        return Text(*(f"*No gap ledger of {mode}: {escape(reason)}.*" for mode, reason in made.items()))
    there = {name for found in good.values() for name in found.parts}
    names = ["FLOP at the roof", *(name for name in roofline.PARTS if name in there), "the pass"]
    columns = [Column("part", lambda n: n)]
    for mode, found in good.items():
        part = {names[0]: found.floor_s, **found.parts, names[-1]: found.total_s}
        columns += [
            Column(mode, lambda n, part=part: seconds(part.get(n)), True),
            Column(f"share of {mode}", lambda n, part=part, found=found: _share(part.get(n), found.total_s), True),
        ]
    raw = [{"mode": mode, "part": name, "time_s": t} for mode, found in good.items()
           for name, t in (("floor", found.floor_s), *found.parts.items(), ("total", found.total_s))]  # fmt: skip
    noted = "; ".join(dict.fromkeys(n for found in good.values() for n in found.noted))
    return Table("e2e_ledger", f"Gap ledger{': ' if noted else ''}{noted}", columns, names, raw)


def ledger_chart(run: LoadedRun) -> alt.LayerChart | Text:
    """A10: the gap ledger as steps from FLOP at the roof to the measured pass."""
    rows = []
    for mode in (EAGER, COMPILED):
        made = roofline.ledger(run, mode)
        if isinstance(made, str):
            continue
        at = made.floor_s
        rows.append(_step_row(mode, "FLOP at the roof", 0.0, at, made))
        for name, t in made.parts.items():
            rows.append(_step_row(mode, name, at, at + t, made))
            at += t
        rows.append(_step_row(mode, "the pass", 0.0, made.total_s, made))
    if not rows:
        return NOTHING
    frame = pd.DataFrame(rows)
    order = [p for p in ("FLOP at the roof", *roofline.PARTS, "the pass") if p in set(frame["part"])]
    there = [m for m in COLOUR_OF if m in set(frame["mode"])]
    pick = alt.selection_point(fields=["mode"], bind="legend")
    bars = (
        alt.Chart(frame)
        .mark_bar(size=13)
        .encode(
            y=alt.Y("part:N", sort=order, title=None, axis=alt.Axis(labelLimit=180)),
            yOffset=alt.YOffset("mode:N", sort=there),
            x=alt.X("start:Q", title="ms"), x2="end:Q",
            color=alt.Color("mode:N", title="model", scale=alt.Scale(domain=there, range=[COLOUR_OF[m] for m in there])),
            opacity=alt.condition(pick, alt.value(1), alt.value(0.15)),
            tooltip=[
                alt.Tooltip("mode:N", title="model"), alt.Tooltip("part:N", title="part"),
                alt.Tooltip("ms:Q", title="ms", format=",.4~r"), alt.Tooltip("share:Q", title="% of the pass", format=",.3~r"),
            ],
        )
        .add_params(pick)
    )  # fmt: skip
    return charts.base(alt.layer(bars), "A10  Gap ledger", "from FLOP at the roof, step by step, to the measured pass")


def _step_row(mode: str, part: str, start: float, end: float, made: Ledger) -> dict:
    return {"mode": mode, "part": part, "start": start / MILLI, "end": end / MILLI, "ms": (end - start) / MILLI,
            "share": (end - start) / made.total_s * 100}  # fmt: skip


def reference(run: LoadedRun) -> Table | Text:
    """The pilot's figures beside this run's, and whether the two may be compared."""
    items = roofline.reference(run)
    if not items:
        return Text("*This workload has no pilot to compare with.*")

    scale = {"FLOP/s": (TERA, "TFLOP/s"), "FLOP/B": (1, "FLOP/B"), "fraction": (0.01, "%")}
    columns = [
        Column("figure", lambda r: r.what),
        Column("basis of this run's", lambda r: r.basis, optional=True),
        Column("unit", lambda r: scale[r.unit][1]),
        Column("pilot", lambda r: f"{r.pilot / scale[r.unit][0]:,.9g}", True),
        Column("this run", lambda r: value(r.observed, scale[r.unit][0]), True),
        Column("interval", lambda r: interval(r.observed, scale[r.unit][0]), True),
        Column("comparable", lambda r: "yes" if r.comparable else f"no: {r.reason}"),
    ]
    raw = [{"what": r.what, "unit": r.unit, "pilot": r.pilot, "observed": r.observed and r.observed.median,
            "basis": r.basis, "comparable": r.comparable, "reason": r.reason} for r in items]  # fmt: skip
    return Table("e2e_reference", "The pilot's figures (MFU of its own peak), quoted and never judged by", columns, items, raw)


def setup(run: LoadedRun) -> Table:
    """How the model came to run: attention backends and compile modes that were tried, compile time, peak memory."""
    found = roofline.e2e(run)
    items = [("attention backend of the model", found.attention or NONE)]
    items += [(f"attention {name}", fate) for name, fate in found.attention_tries]
    items += [(f"compile mode {mode}", fate) for mode, fate in found.compile_tries]
    if found.compile_s is not None:
        items.append(("first compiled pass", seconds(found.compile_s) + (" (compiler cache hit)" if found.from_cache else "")))
    for m in found.memory:
        known = f"; weights {size(m.weights_bytes)}, caches {size(m.cache_bytes)}" if m.weights_bytes else ""
        items.append((f"peak memory, {m.mode}", f"{size(m.peak_bytes)} {m.what}{known}" if m.peak_bytes else m.what))
    for name, row in found.rows.items():
        if words := notes(row):
            items.append((f"notes on {name}", words))
    columns = [Column("what", lambda i: i[0]), Column("found", lambda i: i[1])]
    return Table("e2e_setup", "How the model ran", columns, items, [{"what": a, "found": b} for a, b in items])
