"""The capacity page: what the memory really gave, and what is left of it after weights, caches and activations."""

from __future__ import annotations

import altair as alt
import pandas as pd

from escher_book import charts
from escher_book.charts import COLOURS
from escher_book.tables import GIB, NONE, Column, Table, Text, number, rounded, size
from validation import memory
from validation.derive import LoadedRun
from validation.memory import Amount, Capacity, Headroom

PARTS = {"weights": COLOURS["square"], "caches": COLOURS["add"], "activations": COLOURS["roof"]}
NAMES = {
    "device.free": "free before",
    "contiguous": "largest contiguous tensor",
    "blocks": "sum of blocks of 1 GiB",
    "allocator.allocated": "allocator, every second block freed: allocated",
    "allocator.reserved": "allocator, every second block freed: reserved",
    "allocator.inactive_split": "allocator, every second block freed: inactive splits",
    "fragmentation": "one tensor of what was freed then",
    "device.free_after": "free after",
}
CANNOT = "cannot be told"
ANSWER = {True: "yes", False: "no", None: CANNOT}

PLOTS: dict[str, tuple[str, ...]] = {"A8c": ()}


def finding(run: LoadedRun) -> Text:
    """How much memory a model can have, and whether the run's workload fits it, at its whole depth and as it ran."""
    if "capacity" not in run.files:
        return Text("This family was not measured.")
    found = memory.capacity(run)
    if found.total is None:
        reasons = (a.skipped for a in found.amounts.values() if a.case == "blocks" and a.skipped)
        return Text(f"**No capacity:** {next(reasons, 'the search was not finished')}.")
    own = [memory.headroom(need, found) for need in memory.needs_of_run(run)]
    told = [_fits(h, found) for h in own if h.need.whole or h.need.ran]
    return Text(_given(run, found), _one_piece(found), *told)


def _given(run: LoadedRun, found: Capacity) -> str:
    total, everything = found.total, found.amount("device.total")
    where = "this host's memory" if run.kind == "cpu" else "the device's memory"
    amount = _gib(total)
    text = f"**{amount[0].upper()}{amount[1:]} GiB of {where} can be given to a model**, written in blocks of 1 GiB."
    if everything and everything.bytes:
        text += f" That is {_share(total, everything)} of {_total_name(everything)}, {_gib(everything)} GiB."
    return f"{text} It ended there because {_why(total)}."


def _one_piece(found: Capacity) -> str | None:
    one, fragments = found.amount("contiguous"), found.fragmentation_frac
    text = f"The largest contiguous tensor has {_gib(one)} GiB: {_why(one)}." if one else ""
    if fragments is not None:
        freed = found.amounts["fragmentation"].params["freed_bytes"]
        text += (
            f" After every second block was freed, {size(freed)} in all, one tensor could have {number(fragments * 100)} % "
            f"of it again."
        )
    return text.strip() or None


def _fits(h: Headroom, found: Capacity) -> str:
    need, s = h.need, h.need.spec
    how = "at its whole depth" if need.whole else "as it ran in this run"
    parts = ", ".join(f"{name} {number(value / GIB)}" for name, value in _parts(h))
    text = (
        f"{s.name} {how} (depth {s.depth}, {s.query_tokens:,} tokens) needs {number(need.bytes / GIB)} GiB ({parts}). "
    )
    if h.fits:
        text += f"**It fits**, with {'at least ' if h.at_least else ''}{number(h.margin_bytes / GIB)} GiB to spare."
    elif h.fits is None:
        text += "Whether it fits **cannot be told**: the search ended before that much was tried."
    else:
        text += f"**It does not fit**{_missing(h, found)}."
    if h.rated_fits is not None:
        verb = "would hold" if h.rated_fits else "would not hold"
        text += f" The rated memory of {found.rated_name}, {number(found.rated_bytes / GIB, 4)} GiB, {verb} it."
    return text


def _missing(h: Headroom, found: Capacity) -> str:
    """By how much a workload does not fit, and how much of it would."""
    if h.at_least:
        return f": that is more than {_total_name(found.amounts['device.total'])}"
    if h.margin_bytes >= 0:
        return f": its largest tensor, {size(h.need.largest_tensor_bytes)}, is larger than any that was given"
    return f", {number(-h.margin_bytes / GIB)} GiB are missing; {_blocks(h.deepest)} would"


def _blocks(deepest: int) -> str:
    return "not even one block" if deepest == 0 else "1 block" if deepest == 1 else f"{deepest:,} blocks"


def _gib(amount: Amount) -> str:
    value = amount.bytes / GIB
    return ("at least " if amount.at_least else "") + (rounded(value, 2) if value >= 0.1 else number(value))


def _share(amount: Amount, total: Amount) -> str:
    return f"{number(amount.bytes / total.bytes * 100)} %"


def _total_name(everything: Amount) -> str:
    of = everything.params.get("of", "device")
    return {"host": "all host memory", "device": "all device memory"}.get(of, f"the {of}")


def _why(amount: Amount) -> str:
    """Why a search ended, as words that follow "because" or a colon."""
    p = amount.params
    if amount.ended == "cap":
        if amount.case == "contiguous" and p.get("reserve_bytes"):
            return "as large as all blocks together"
        if amount.at_least:
            return f"this budget touches no more than {size(p['cap_bytes'])}"
        if p.get("reserve_bytes"):
            return f"a reserve of {number(p['reserve_bytes'] / GIB)} GiB stays free, so that the host never swaps"
        return "all that was asked for was given"
    return {
        "refused": f"more was refused ({amount.detail})",
        "time": f"the time limit of {number(p.get('limit_s'), 2)} s was reached",
        "others": "other processes took the rest meanwhile",
        "killed": "the system killed the process that wrote it, which is how a limit shows that nothing announces",
        None: "",
    }.get(amount.ended, amount.ended)


def amounts(run: LoadedRun) -> Table:
    """What was measured, as a share of the total, with the vendor's decimal label in a column of its own."""
    found = memory.capacity(run)
    everything = found.amount("device.total")

    def note(a: Amount) -> str:
        if a.skipped:
            return f"skipped: {a.skipped}"
        return f"bounded by the {a.params['bounded_by']}" if a.case == "device.free" else _why(a)

    def row(a: Amount) -> tuple[str, str, str, str, str]:
        name = NAMES.get(a.case, a.case)
        if a.case == "device.total":
            name = _total_name(a)
        if a.bytes is None:
            return (name, NONE, NONE, "", note(a))
        share = _share(a, everything) if everything and everything.bytes else NONE
        return (name, _gib(a), share, "", note(a))

    items = [row(a) for a in found.amounts.values()]
    if found.amounts and found.rated_bytes:
        label = f"{found.rated_label_gb:g}" if found.rated_label_gb else NONE
        note_text = "" if found.same_device else "another device was measured, so no share is given"
        items.append((f"rated: {found.rated_name}", number(found.rated_bytes / GIB, 4), NONE, label, note_text))
    total = _total_name(everything) if everything else "the total, which is not known"
    columns = [
        Column("what", lambda i: i[0]),
        Column("GiB", lambda i: i[1], True),
        Column("share of the total", lambda i: i[2], True),
        Column("vendor's label, GB", lambda i: i[3], True, optional=True),
        Column("why it ended there", lambda i: i[4], optional=True),
    ]
    raw = [
        {"case": a.case, "bytes": a.bytes, "at_least": a.at_least, "ended": a.ended, "skipped": a.skipped, **a.params}
        for a in found.amounts.values()
    ]
    return Table("capacity_amounts", f"Memory that was really given; shares are of {total}", columns, items, raw)


def needs(run: LoadedRun) -> Table:
    """What the run's workload needs at its depths, and every other workload of configs/, against what was measured."""
    found = memory.capacity(run)
    items = memory.of_run(run)

    def name(h: Headroom) -> str:
        words = ["whole"] if h.need.whole else []
        words += ["as it ran"] if h.need.ran else []
        return h.need.spec.name + (f" ({', '.join(words)})" if words else "")

    columns = [
        Column("workload", name),
        Column("fits", lambda h: ANSWER[h.fits] if found.total else NONE),
        Column("depth", lambda h: f"{h.need.spec.depth:,}", True),
        Column("tokens, window", lambda h: f"{h.need.spec.query_tokens:,}, {h.need.spec.window_tokens:,}", True),
        Column("needs, GiB", lambda h: number(h.need.bytes / GIB), True),
        Column("weights + caches + activations", lambda h: " + ".join(number(x / GIB) for _, x in _parts(h)), True),
        Column("left, GiB", lambda h: _margin(h, found), True),
        Column("blocks that fit", _deepest, True),
        Column("rated holds it", lambda h: ANSWER[h.rated_fits] if found.rated_bytes else "", optional=True),
    ]
    raw = [
        {
            "workload": h.need.spec.name, "depth": h.need.spec.depth, "query_tokens": h.need.spec.query_tokens,
            "window_tokens": h.need.spec.window_tokens, "whole": h.need.whole, "ran": h.need.ran,
            **{f"{part}_bytes": value for part, value in _parts(h)}, "needed_bytes": h.need.bytes,
            "largest_tensor_bytes": h.need.largest_tensor_bytes, "measured_bytes": h.measured_bytes,
            "at_least": h.at_least, "margin_bytes": h.margin_bytes, "fits": h.fits, "deepest": h.deepest,
            "rated_bytes": found.rated_bytes, "rated_fits": h.rated_fits,
        }
        for h in items
    ]  # fmt: skip
    return Table(
        "capacity_needs", "What each workload needs, and what is left of the measured memory", columns, items, raw
    )


def _parts(h: Headroom) -> list[tuple[str, int]]:
    need = h.need
    return [("weights", need.weights_bytes), ("caches", need.caches_bytes), ("activations", need.activations_bytes)]


def _margin(h: Headroom, found: Capacity) -> str:
    if h.margin_bytes is None:
        return NONE
    if h.margin_bytes < 0 and h.at_least:
        return CANNOT if h.fits is None else f"at most {number((found.most_bytes - h.need.bytes) / GIB)}"
    return ("at least " if h.at_least else "") + number(h.margin_bytes / GIB)


def _deepest(h: Headroom) -> str:
    if h.deepest is None:
        return NONE
    return ("at least " if h.at_least else "") + f"{h.deepest:,}"


def peaks(run: LoadedRun) -> Table | None:
    """The predicted live activations beside the peak that the end-to-end family measured, where it did."""
    items = memory.peaks(run)
    if not items:
        return None
    columns = [
        Column("model", lambda p: p.case),
        Column("measured peak, GiB", lambda p: number(p.peak_bytes / GIB), True),
        Column("of it beyond weights and caches, GiB", lambda p: number(p.beyond_bytes / GIB), True),
        Column("activations predicted, GiB", lambda p: number(p.predicted_bytes / GIB), True),
        Column("what the peak counts", lambda p: p.what, optional=True),
    ]
    raw = [
        {
            "case": p.case,
            "peak_bytes": p.peak_bytes,
            "beyond_bytes": p.beyond_bytes,
            "predicted_bytes": p.predicted_bytes,
        }
        for p in items
    ]
    return Table("capacity_peaks", "The workload as it ran: measured peak beside the prediction", columns, items, raw)


def footprint(run: LoadedRun) -> alt.LayerChart | Text:
    """A8c: weights, caches and activations of the run's workload at its depths, against measured and rated memory."""
    found = memory.capacity(run)
    if found.total is None:
        return Text("*Nothing to draw: no capacity was measured.*")
    own = [memory.headroom(need, found) for need in memory.needs_of_run(run)]
    frame = pd.DataFrame([
        {"bar": _bar(h), "part": part, "order": order, "gib": value / GIB, "total": h.need.bytes / GIB,
         "fits": ANSWER[h.fits]}
        for h in own for order, (part, value) in enumerate(_parts(h))
    ])  # fmt: skip
    bars = (
        alt.Chart(frame)
        .mark_bar(size=70)
        .encode(
            x=alt.X("bar:N", sort=[_bar(h) for h in own], title=None, axis=alt.Axis(labelAngle=0)),
            y=alt.Y("gib:Q", title="GiB", stack="zero"),
            color=alt.Color("part:N", title=None, scale=alt.Scale(domain=list(PARTS), range=list(PARTS.values()))),
            order=alt.Order("order:Q"),
            tooltip=[
                alt.Tooltip("bar:N", title="workload"),
                alt.Tooltip("part:N", title="part"),
                alt.Tooltip("gib:Q", title="GiB", format=",.4~r"),
                alt.Tooltip("total:Q", title="needs in all, GiB", format=",.4~r"),
                alt.Tooltip("fits:N", title="fits the measured memory"),
            ],
        )
    )
    measured = "measured, at least" if found.total.at_least else "measured"
    lines = charts.references([], GIB, [(f"{measured}, GiB", found.total.bytes / GIB)])
    layers = [bars, *charts.rules(lines, "GiB")]
    if found.rated_bytes and found.same_device:
        layers += _rated(found)
    subtitle = "what each depth needs, beside the memory there is"
    return charts.base(alt.layer(*layers), "A8c  Memory footprint", subtitle)


def _rated(found: Capacity) -> list[alt.Chart]:
    """The rated memory as a line, with its label at the right: the measured one is often close, its label at the left."""
    frame = charts.references([], GIB, [(f"rated, {found.rated_name}, GiB", found.rated_bytes / GIB)])
    rule, _ = charts.rules(frame, "GiB")
    words = alt.Chart(frame).mark_text(
        align="right", baseline="bottom", dx=-4, dy=-3, fontSize=11, color=COLOURS["reference"]
    )
    return [rule, words.encode(x=alt.value("width"), y="rate:Q", text="label:N")]


def _bar(h: Headroom) -> str:
    s = h.need.spec
    if h.need.ran and not h.need.whole:
        return f"as it ran: depth {s.depth}, {s.query_tokens:,} tokens"
    return f"depth {s.depth}, whole" if h.need.whole else f"depth {s.depth}"
