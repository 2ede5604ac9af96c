"""The CPU host: load, clocks, memory, stalls, temperature and power, from psutil and sysfs.

Clocks come from sysfs alone. psutil prefers the "cpu MHz" of /proc/cpuinfo, which a virtual machine prints as a constant.
Temperatures are those of the CPU's own sensors: psutil would ask every sensor there is, a GPU's and an SSD's too, and so
disturb what is measured. Package power is the growth of the RAPL energy counters, which only root may read.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from escher_kernels.host import text
from escher_kernels.telemetry import Reading

CPU_SENSORS = ("coretemp", "k10temp", "zenpower", "cpu_thermal")
STALLS = ("cpu", "memory", "io")
MOST_W = 1000  # no package takes more: after a gap in which it might have filled its counter, the growth is not known
STALLED = re.compile(r"^some .*\btotal=(\d+)", re.M)


@dataclass(frozen=True)
class Counters:
    """What only grows. None where it could not be read."""

    time_s: float
    cpus: Sequence[Mapping[str, float]] | None  # seconds by state, of each logical CPU
    stalled_us: Mapping[str, int | None]
    energy_uj: Sequence[int | None]  # of each package


class Host:
    name = "host"

    def __init__(self, root: Path = Path("/"), ps: ModuleType | Any = None, clock: Callable[[], float] = time.monotonic):
        self.root, self.ps, self.clock, self.unusable = root, ps, clock, ""
        if ps is None:
            try:
                import psutil
            except ImportError:
                self.unusable = "psutil is not installed"
            else:
                self.ps = psutil
        self.clocks = sorted(root.glob("sys/devices/system/cpu/cpu[0-9]*/cpufreq/scaling_cur_freq"))
        chips = [p for p in sorted(root.glob("sys/class/hwmon/hwmon*")) if text(p / "name") in CPU_SENSORS]
        self.sensors = [sensor for chip in chips for sensor in sorted(chip.glob("temp*_input"))]
        zones = sorted(root.glob("sys/class/powercap/intel-rapl:*"))
        self.packages = [z for z in zones if (text(z / "name") or "").startswith("package")]
        self.ranges_uj = [whole(z / "max_energy_range_uj") for z in self.packages]
        self.before: Counters | None = None

    def read(self) -> Reading:
        now, before = self.counters(), self.before
        self.before = now
        elapsed_s = now.time_s - before.time_s if before else 0.0
        known = before is not None and elapsed_s > 0
        clocks = [1000.0 * khz for path in self.clocks if (khz := whole(path))]
        degrees = [m / 1000 for path in self.sensors if (m := whole(path)) is not None]
        return {
            **(cpu_fractions(before.cpus, now.cpus) if known else cpu_fractions(None, None)),
            "cpu_clock_mean_hz": sum(clocks) / len(clocks) if clocks else None,
            "cpu_clock_min_hz": min(clocks, default=None),
            "cpu_clock_max_hz": max(clocks, default=None),
            "load_average": self.ask(lambda ps: ps.getloadavg()[0]),
            "memory_available_bytes": self.ask(lambda ps: ps.virtual_memory().available),
            "swap_used_bytes": self.ask(lambda ps: ps.swap_memory().used),
            **{
                f"pressure_{what}_frac": stalled_frac(before.stalled_us[what], now.stalled_us[what], elapsed_s) if known else None
                for what in STALLS
            },
            "cpu_temperature_max_c": max(degrees, default=None),
            "cpu_package_power_w": power_w(before.energy_uj, now.energy_uj, self.ranges_uj, elapsed_s) if known else None,
        }

    def counters(self) -> Counters:
        stalled = {what: STALLED.search(text(self.root / "proc/pressure" / what) or "") for what in STALLS}
        return Counters(
            time_s=self.clock(),
            cpus=self.ask(lambda ps: [times._asdict() for times in ps.cpu_times(percpu=True)]),
            stalled_us={what: int(match[1]) if match else None for what, match in stalled.items()},
            energy_uj=[whole(zone / "energy_uj") for zone in self.packages],
        )

    def ask(self, question: Callable[[Any], Any]) -> Any:
        """None where the host does not show it, or shows what psutil cannot read."""
        try:
            return question(self.ps)
        except (OSError, ValueError, LookupError, AttributeError, RuntimeError):
            return None


def whole(path: Path) -> int | None:
    found = text(path)
    return int(found) if found and re.fullmatch(r"-?\d+", found, re.A) else None


def cpu_fractions(before: Sequence[Mapping[str, float]] | None, now: Sequence[Mapping[str, float]] | None) -> Reading:
    """Shares of the time of all logical CPUs together, and of the busiest. Busy is what is not idle, not waiting for input
    or output, and not stolen by the hypervisor. None where CPUs came or went."""
    nothing: Reading = dict.fromkeys(("cpu_busy_frac", "cpu_busiest_frac", "cpu_steal_frac"))
    if not before or not now or len(before) != len(now):
        return nothing
    grown = [{k: max(0.0, b[k] - a.get(k, b[k])) for k in b} for a, b in zip(before, now, strict=True)]
    # a guest's time is counted as its owner's user time as well
    wholes = [sum(g.values()) - g.get("guest", 0.0) - g.get("guest_nice", 0.0) for g in grown]
    stolen = [g.get("steal", 0.0) for g in grown]
    busy = [w - g.get("idle", 0.0) - g.get("iowait", 0.0) - s for w, g, s in zip(wholes, grown, stolen, strict=True)]
    if (total := sum(wholes)) <= 0:
        return nothing
    return {
        "cpu_busy_frac": within(sum(busy) / total),
        "cpu_busiest_frac": within(max(b / w for b, w in zip(busy, wholes, strict=True) if w > 0)),
        "cpu_steal_frac": within(sum(stolen) / total),
    }


def stalled_frac(before: int | None, now: int | None, elapsed_s: float) -> float | None:
    """Share of the time in which at least one task waited for the resource."""
    if before is None or now is None or now < before:
        return None
    return within((now - before) / 1e6 / elapsed_s)


def power_w(
    before: Sequence[int | None], now: Sequence[int | None], ranges_uj: Sequence[int | None], elapsed_s: float
) -> float | None:
    """Mean power of all packages together. A counter that is smaller than before has begun again after its range. None
    where one of them is not known: a sum without it would be wrong."""
    grown = []
    for a, b, range_uj in zip(before, now, ranges_uj, strict=True):
        if a is None or b is None or (range_uj is None and b < a):
            return None
        if range_uj is not None and elapsed_s > range_uj / 1e6 / MOST_W:
            return None
        grown.append(b - a if b >= a else b - a + range_uj)
    return sum(grown) / 1e6 / elapsed_s if grown and min(grown) >= 0 else None


def within(frac: float) -> float:
    return min(1.0, max(0.0, frac))


def free_cpus(allowed: Iterable[int], measuring: Iterable[int], root: Path = Path("/")) -> set[int]:
    """Of the `allowed` logical CPUs those on cores that do not measure, else those that do not measure, else all."""
    allowed, measuring = set(allowed), set(measuring)

    def core(cpu: int) -> tuple[str | int | None, ...]:
        topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        found = text(topology / "physical_package_id"), text(topology / "core_id")
        return found if all(found) else (cpu,)

    taken = {core(cpu) for cpu in measuring}
    return {cpu for cpu in allowed if core(cpu) not in taken} or allowed - measuring or allowed
