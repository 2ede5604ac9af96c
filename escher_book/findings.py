"""Sentences that several pages share. Every one is computed from records: change a record and it changes or goes."""

from __future__ import annotations

import html
from collections.abc import Mapping

from escher_book.stage import escape
from escher_book.tables import GIGA, TERA, interval, number, percent, value
from escher_kernels.workload import Spec
from validation import derive, roofline
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


def banners(run: LoadedRun, family: str | None = None) -> list[tuple[str, str]]:
    """What every page must say about itself; a page of one `family` also that it was resumed, and of the iterations that
    it does not show only how that family ended in them."""
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
    out += _other_iterations(run, family)
    resumed = [m.after for m in run.marks if m.record.family == family and m.record.params.get("kind") == "resumed" and m.after]
    if resumed:
        counts = " and after ".join(f"{n:,}" for n in resumed)
        out.append(("note", f"This run was resumed after {counts} records of this page: another process measured the rest."))
    return out


def _other_iterations(run: LoadedRun, family: str | None) -> list[tuple[str, str]]:
    if not run.repeats:
        return []
    out = []
    for repeat in run.repeats:
        ends = ((f, how) for f, how in repeat.status.items() if how.get("status") != "ok" and family in (None, f))
        bad = [f"{f} {': '.join(filter(None, (str(how.get('status')), how.get('message'))))}" for f, how in ends]
        if bad:
            out.append(("warning", f"Iteration {repeat.iteration} is not whole: {'; '.join(bad)}."))
    words = f"The pages show iteration {run.iteration} of {len(run.iterations)}; the page The run has all."
    return [*out, ("note", words)]


def part_of(spec: Spec) -> str:
    """What of the workload ran, where it was not the whole: depth and tokens, or the sizes that were asked for."""
    whole = spec.whole()
    if spec == whole:
        _, asked, sizes = (spec.derived_why or "").partition("asked for: ")
        return f" ({sizes})" if asked else ""
    blocks = f"{spec.depth} of {whole.depth} blocks"
    return f" ({blocks}, {spec.query_tokens:,} of {whole.query_tokens:,} tokens)"


def provenance(run: LoadedRun) -> str:
    """One line below every title: the run, its workload and its rules."""
    spec, settings = run.info["workload"], run.info["settings"]
    derived = f" (derived from {spec['derived_from']}: {spec['derived_why']})" if spec.get("derived_from") else ""
    model = f" Reference model {settings['reference_model']}." if settings.get("reference_model") else ""
    created = run.info["created_utc"].replace("T", " ").replace("+00:00", " UTC")
    device = f" Measured on device 0 of {run.found.count}." if run.found.count > 1 else ""
    return (
        f"Run {run.info['run_id']}, {created}.{device} Workload {spec['name']}{derived}: depth {spec['depth']}, "
        f"{spec['query_tokens']:,} query tokens that attend to {spec['window_tokens']:,}.{model} Budget {settings['budget']}, "
        f"method {run.info['method']}."
    )


def basis_sentence(bases: list[derive.Basis], estimate: derive.Estimate, scale: float, unit: str) -> str:
    """The share of each basis, or why there is none."""
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
            out.append(f"No share of the {basis.label}: {escape(basis.reason)}.")
    return " ".join(out)


def meanwhile(run: LoadedRun, family: str, disturbed: bool = True, shift: Mapping[str, float] | None = None) -> str:
    """Whether the anchors around a family held. `disturbed`: one moved while its roof, where it has one, was measured.
    `shift`: how far they lie from the anchors around the roofs."""
    anchors, limit = derive.anchors(run.records(family), run.config), run.config.threshold("anchor_moved_frac")
    moved = [f"{a.case} by {number(a.largest_move_frac * 100, 2)} %" for a in anchors if a.moved]
    if moved and disturbed:
        text = f"**Noisy:** an anchor moved meanwhile ({', '.join(moved)}), so other work disturbed what was measured."
    elif moved:
        text = f"An anchor moved ({', '.join(moved)}), but not while the roof was measured."
    elif not anchors or any(len(a.rates) < 2 for a in anchors):
        text = "Whether the machine was steady meanwhile is **unknown**: an anchor ran less than twice."
    else:
        text = "The anchors were steady meanwhile."
    away = [f"{case} by {number(s * 100, 2)} %" for case, s in (shift or {}).items() if abs(s) > limit]
    if away:
        text += f" **Not the machine of the roofs:** {', '.join(away)} since they were measured; ratios carry that."
    return text


def steadiness(run: LoadedRun, family: str, estimate: derive.Estimate, converged: bool, disturbed: bool) -> str:
    """Whether the roof has converged, and whether the anchors around it held."""
    items = run.records(family)
    limit = run.config.threshold("converged_roof_frac")
    half = f"half-width {number(estimate.half_width * 100, 2)} %"
    words = (
        [f"The roof has converged ({half})."]
        if converged
        else [f"The roof has **not converged** ({half}; {limit * 100:g} % is wanted)."]
    )
    words.append(meanwhile(run, family, disturbed))
    if any("NOT_LEVEL" in r.flags for r in items if r.role == "warmup"):
        words.append("The warm-up ended by its time limit, before the time per call was level.")
    return " ".join(words)


def correctness(rows: list[derive.Row]) -> str:
    """What the checks said of every row that has a time, or would have one."""
    wrong = [r.case for r in rows if r.wrong]
    unchecked = [r.case for r in rows if r.time_s and not r.error]
    if wrong:
        return f"**Wrong results, shown without a time: {', '.join(wrong)}.**"
    if unchecked:
        return f"**Not checked for a right result: {', '.join(unchecked)}.** Every other one was right."
    timed = sum(1 for r in rows if r.time_s)
    return f"All {timed} timed rows gave right results, within their bounds." if timed else "**No row was timed.**"


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
    if whole := roofline.e2e(run):
        shares = {m.scope: m.shares.get("measured") for m in roofline.mfu(run)}
        for name in (roofline.EAGER, roofline.COMPILED):
            row, label = whole.rows.get(name), f"Model{part_of(whole.spec)}, {name}"
            if row is None:
                out.append(card(label, "–", "", "", f"unavailable: {whole.unavailable[name]}"))
                continue
            share, doubts = shares[name], "" if c and c.converged else " (roof not converged)"
            basis = f"MFU {percent(share)} of the measured compute roof{doubts}" if share else "no compute roof in this run"
            around = f"a {whole.spec.unit}, interval {interval(row.time_s, 1e-3)}"
            around += ", noisy: an anchor moved" if derive.ANCHOR_MOVED in row.flags else ""
            out.append(card(label, value(row.time_s, 1e-3), "ms", around, basis))
    return f'<div class="headline">{"".join(out)}</div>'
