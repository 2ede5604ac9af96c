"""The environment page: what was measured on, and what could spoil the numbers."""

from __future__ import annotations

from escher_book.tables import NONE, Column, Table, Text, facts, notes, number, raw_row, seconds, size
from validation import derive
from validation.derive import LoadedRun

PLOTS: dict[str, tuple[str, ...]] = {}


def finding(run: LoadedRun) -> Text:
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


VIRTUAL = {True: "yes: clock, SKU and sharing of cores are hidden", False: "no"}


def machine(run: LoadedRun) -> Table:
    """What was measured on."""
    env = run.env or {}
    host, device = env.get("host", {}), run.found
    cap = run.info.get("power_cap_w")
    cpu, cpus, memory = host.get("cpu", {}), host.get("cpus", {}), host.get("memory", {})
    items = [("device", f"{device.count} x {device.raw_name}" if device.kind != "cpu" else "CPU host")]
    if device.kind != "cpu":
        items += [
            ("measured on", f"device 0 of {device.count}"),
            ("architecture", device.arch),
            ("compute units", device.compute_units),
            ("device memory", size(device.total_memory_bytes)),
            ("partition or slice", run.info.get("partition") or device.slice or "whole device"),
            ("memory partition (NPS)", run.info.get("nps")),
            ("power cap", cap if isinstance(cap, str) else f"{cap:g} W" if cap else None),
            ("processes (world)", run.info.get("world")),
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
    return facts("environment_machine", "What was measured on", items)


def software(run: LoadedRun) -> Table:
    """Python, the packages that matter, and the C compiler."""
    env = run.env or {}
    packages = env.get("software", {}).get("packages", {})
    items = [("Python", env.get("software", {}).get("python")), *packages.items()]
    items += [("C compiler", env.get("software", {}).get("compiler"))]
    return facts("environment_software", "Software", items, ("package", "version"))


def settings(run: LoadedRun) -> Table:
    """Kernel settings and environment variables that move the numbers."""
    env = run.env or {}
    items = [(k.replace("_", " "), v) for k, v in env.get("knobs", {}).items()]
    items += [(k, v) for k, v in env.get("variables", {}).items()]
    return facts("environment_settings", "Settings that move the numbers", items)


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
