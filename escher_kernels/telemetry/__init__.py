"""What the machine did while it was measured: sampled by a process of its own, one file a collector.

A collector reads one part of the machine. It is asked again and again from the poller's process, so that what it costs, and
a driver that hangs under it, is not paid by what is measured. What it cannot read is None, never 0.
"""

from __future__ import annotations

from typing import Protocol

Reading = dict[str, float | None]  # a quantity's name ends with its unit: _frac, _hz, _bytes, _w, _c


class Collector(Protocol):
    """`unusable`: why it can read nothing here, "" where it can. Rates are means since the reading before, so the first
    reading has none of them."""

    name: str
    unusable: str

    def read(self) -> Reading: ...
