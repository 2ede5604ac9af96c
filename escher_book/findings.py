"""Sentences with numbers. Every one is computed from records: change a record and the sentence changes or goes."""

from __future__ import annotations

import html

from escher_book.tables import GIGA, TERA, Text, clock, interval, layout, number, percent, size, value
from validation import derive
from validation.derive import LoadedRun


def device_name(run: LoadedRun) -> str:
    """The one device that was measured, as a person calls it."""
    if run.found.kind == "cpu":
        return "CPU host"
    profile = run.selection.found_profile
    return profile.name if profile else (run.found.raw_name or "unknown device")


def machine_name(run: LoadedRun) -> str:
    """The machine: how many of its devices."""
    return f"{run.found.count} x {device_name(run)}" if run.found.count > 1 else device_name(run)


def memory_name(run: LoadedRun) -> str:
    """HBM where the device found is known to have it, else plain memory."""
    profile = run.selection.found_profile
    return "HBM" if profile and (profile.memory_type or "").upper().startswith("HBM") else "Memory"


def title(heading: str, run: LoadedRun) -> str:
    """A notebook's heading for the device that was measured: its memory, its GEMM dtype, its name."""
    dtype = derive.compute(run).dtype.upper() if "compute" in run.files else "BF16"
    words = heading.replace("Memory", memory_name(run)).replace("BF16", dtype)
    return f"{words}: {device_name(run)}"


def banners(run: LoadedRun) -> list[tuple[str, str]]:
    """What every page must say about itself."""
    out = []
    if run.selection.profile and not run.selection.same_device:
        out.append((
            "warning",
            f"The target is {run.selection.profile.name}, but this run measured {device_name(run)} "
            f"({run.found.raw_name}). Rated and theory values are the target's, measured values are this device's; "
            f"the two are never divided by one another.",
        ))  # fmt: skip
    if run.selection.profile is None:
        out.append(("warning", f"No rated basis: {run.selection.reason}"))
    if run.found.note:
        out.append(("danger", run.found.note))
    return out


def provenance(run: LoadedRun) -> str:
    """One line below every title: the run, its workload and its rules."""
    spec, settings = run.info["workload"], run.info["settings"]
    derived = f" derived from {spec['derived_from']}" if spec.get("derived_from") else ""
    created = run.info["created_utc"].replace("T", " ").replace("+00:00", " UTC")
    device = f" Measured on device 0 of {run.found.count}." if run.found.count > 1 else ""
    return (
        f"Run {run.info['run_id']}, {created}.{device} Workload {spec['name']}{derived}: depth {spec['depth']}, "
        f"{spec['query_tokens']:,} query and {spec['window_tokens']:,} cached tokens. Budget {settings['budget']}, "
        f"method {run.info['method']}."
    )


def _basis_sentence(bases: list[derive.Basis], estimate: derive.Estimate, scale: float, unit: str) -> str:
    out = []
    for basis in bases:
        if (share := basis.frac(estimate)) is not None:
            out.append(f"That is {percent(share)} of the {basis.label} ({number(basis.rate / scale, 4)} {unit}).")
        elif basis.rate:
            out.append(
                f"The {basis.label} is {number(basis.rate / scale, 4)} {unit}; no share is given, because "
                f"another device was measured."
            )
        else:
            out.append(f"No share of the {basis.label}: {basis.reason}.")
    return " ".join(out)


def _steadiness(run: LoadedRun, family: str, estimate: derive.Estimate, converged: bool, disturbed: bool) -> str:
    """Whether the roof has converged, and whether the anchors around it held."""
    items = run.records(family)
    limit = run.config.threshold("converged_roof_frac")
    half = f"half-width {number(estimate.half_width * 100, 2)} %"
    words = (
        [f"The roof has converged ({half})."]
        if converged
        else [f"The roof has **not converged** ({half}; {limit * 100:g} % is wanted)."]
    )
    anchors = derive.anchors(items, run.config)
    moved = [f"{a.case} by {number(a.largest_move_frac * 100, 2)} %" for a in anchors if a.moved]
    if moved and disturbed:
        words.append(f"**Noisy:** an anchor moved meanwhile ({', '.join(moved)}), so other work disturbed it.")
    elif moved:
        words.append(f"An anchor moved ({', '.join(moved)}), but not while the roof was measured.")
    elif not anchors or any(len(a.rates) < 2 for a in anchors):
        words.append("Whether the machine was steady meanwhile is **unknown**: an anchor ran less than twice.")
    else:
        words.append("The anchors were steady meanwhile.")
    if any("NOT_LEVEL" in r.flags for r in items if r.role == "warmup"):
        words.append("The warm-up ended by its time limit, before the time per call was level.")
    return " ".join(words)


def _correctness(rows: list[derive.Row]) -> str:
    """What the checks said of every row that has a time, or would have one."""
    wrong = [r.case for r in rows if r.wrong]
    unchecked = [r.case for r in rows if r.time_s and not r.error]
    if wrong:
        return f"**Wrong results, shown without a time: {', '.join(wrong)}.**"
    if unchecked:
        return f"**Not checked for a right result: {', '.join(unchecked)}.** Every other one was right."
    return f"All {sum(1 for r in rows if r.time_s)} timed rows gave right results, within their bounds."


def compute(run: LoadedRun) -> Text:
    """The compute roof, where it comes from, and how far to trust it."""
    c = derive.compute(run)
    if c is None:
        return Text("This family was not measured.")
    if not (c.roof and c.roof.flop_s):
        reasons = (r.skipped for r in [c.roof, *c.rows] if r and r.skipped)
        why = next(reasons, "no candidate of the search gave a right and timed result")
        return Text(f"**No compute roof:** {why}.")
    roof, p = c.roof, c.roof.params
    head = (
        f"**Compute roof: {value(roof.flop_s, TERA)} TFLOP/s** ({interval(roof.flop_s, TERA)}) {c.dtype.upper()}, from the "
        f"GEMM {layout(roof)}, measured afresh after a search over {p['searched']} shapes "
        f"(it {p['search_ended']}). " + _basis_sentence(c.bases, roof.flop_s, TERA, "TFLOP/s")
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
    checked = _correctness([roof, *c.rows, *c.search])
    return Text(head, _steadiness(run, "compute", roof.flop_s, c.converged, c.disturbed), square, above, checked)


def bandwidth(run: LoadedRun) -> Text:
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
        + _basis_sentence(b.bases, roof.bytes_s, GIGA, "GB/s")
    )
    assumed = None
    if b.run.parameters.get("llc_assumed"):
        size_text = size(b.run.parameters["llc_bytes"])
        assumed = f"The last-level cache is **not known** here; cold rows rotate as if it had {size_text}."
    steady = _steadiness(run, "bandwidth", roof.bytes_s, b.converged, b.disturbed)
    return Text(head, steady, assumed, copies_sentence(b), _correctness([*b.rows, *b.cache_curve, *b.pairs]))


def copies_sentence(b: derive.Bandwidth) -> str | None:
    """CPU: torch's copy against C, and what write-allocate does to the count."""
    skipped = next((r.skipped for r in b.pairs if r.skipped), None)
    if skipped:
        return f"No comparison with a C copy: {skipped}."
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


def probe(run: LoadedRun) -> Text:
    """CPU: what the probe says of the peak, against what the names promise."""
    c = derive.compute(run)
    if run.kind != "cpu" or c is None:
        return Text("A GPU's peak is its vendor's dense figure; nothing is probed.")
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
        text += f" **It is no basis:** {c.probe_skipped}."
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
    return Text(text)


def environment(run: LoadedRun) -> Text:
    """What could spoil the numbers, first."""
    rows = (run.env or {}).get("checks", [])
    if not rows:
        return Text("**The checks before the run were not recorded.**")
    bad = [r for r in rows if r["ok"] is False]
    unknown = [r["check"] for r in rows if r["ok"] is None]
    lines = [
        f"- **{r['check']}**: found {r['found']}, wanted {r['wanted']}; {r['why']}. Mend: {r['mend']}." for r in bad
    ]
    head = (
        f"**{len(bad)} of {len(rows)} checks do not hold:**" if bad else f"All {len(rows) - len(unknown)} checks hold."
    )
    return Text(head, "\n".join(lines), f"Cannot be told here: {', '.join(unknown)}." if unknown else None)


def cards(run: LoadedRun) -> str:
    """The headline numbers as HTML cards for the landing page; a family without one says why."""

    def card(label: str, big: str, unit: str, interval_text: str, basis: str) -> str:
        parts = {"label": label, "value": big, "interval": interval_text, "basis": basis}
        inner = "".join(
            f'<p class="{k}">{html.escape(v)}{f"<span class=unit> {unit}</span>" if k == "value" and unit else ""}</p>'
            for k, v in parts.items()
            if v
        )
        return f'<div class="headline-card">{inner}</div>'

    def basis_line(bases: list[derive.Basis], estimate: derive.Estimate, scale: float, unit: str) -> str:
        for basis in bases:
            if (share := basis.frac(estimate)) is not None:
                return f"{percent(share)} of the {basis.label} ({number(basis.rate / scale, 4)} {unit})"
        return f"no share of the {bases[-1].label}" if bases else "no basis"

    def doubt(found: derive.Compute | derive.Bandwidth) -> str:
        words = [] if found.converged else ["not converged"]
        words += ["noisy: an anchor moved"] if found.disturbed else []
        words += ["steadiness unknown"] if any(len(a.rates) < 2 for a in found.anchors) or not found.anchors else []
        return f", {', '.join(words)}" if words else ""

    def roof_card(label: str, found: derive.Compute | derive.Bandwidth | None, roof: derive.Estimate | None,
                  scale: float, unit: str) -> str:  # fmt: skip
        if found is None or roof is None:
            return card(
                label, "–", "", "", "not measured in this run" if found is None else "no roof: its page says why"
            )
        around = f"interval {interval(roof, scale)}{doubt(found)}"
        return card(label, value(roof, scale), unit, around, basis_line(found.bases, roof, scale, unit))

    c, b = derive.compute(run), derive.bandwidth(run)
    compute_roof = c.roof.flop_s if c and c.roof else None
    bandwidth_roof = b.roof.bytes_s if b and b.roof else None
    out = [
        roof_card(f"Compute roof, {c.dtype.upper() if c else 'BF16'} GEMM", c, compute_roof, TERA, "TFLOP/s"),
        roof_card(f"{memory_name(run)} bandwidth roof, copy", b, bandwidth_roof, GIGA, "GB/s"),
    ]
    if compute_roof and bandwidth_roof:
        ridge = derive.ridge(compute_roof, bandwidth_roof)
        around = f"interval {interval(ridge)}"
        out.append(card("Ridge", value(ridge), "FLOP/B", around, "compute roof over bandwidth roof, both measured"))
    return f'<div class="headline">{"".join(out)}</div>'
