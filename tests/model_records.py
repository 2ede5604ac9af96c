"""Hand-made records of the roofs, capacity, ops and e2e: the layout is the families', the times are the test's."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

from escher_kernels import e2e as family_e2e
from escher_kernels import ops as family_ops
from escher_kernels import workload
from escher_kernels.records import Record
from escher_kernels.timing import Case
from escher_kernels.workload import Op, Spec

PEAK, RATE = 10**15, 5 * 10**12  # FLOP/s and B/s of a GPU: a ridge of 200 FLOP/B
DEFAULT = "default"
WRONG, ABSENT = "a wrong result", "no record at all"
LIMIT = 2.0**-7
Times = float | str | Iterable[Any]  # seconds, or those of each block; WRONG, ABSENT, or why it was skipped


def per_block(seconds: float | Iterable[Any]) -> list[tuple[float, ...]]:
    """Samples of each block: a number is six equal blocks."""
    every = [seconds] * 6 if isinstance(seconds, (int, float)) else list(seconds)
    return [tuple(s) if isinstance(s, (list, tuple)) else (s,) for s in every]


def spread(seconds: float, seed: str, sigma: float = 0.01) -> list[float]:
    """Six blocks around `seconds`, the same for the same seed."""
    noise = random.Random(seed)
    return [seconds * (1 + sigma * noise.uniform(-1, 1)) for _ in range(6)]


def records_of(item: Case, family: str, seconds: Times, backend: str, error: float = 1e-3) -> list[Record]:
    """The records of a case: first its check, then its blocks."""
    about: dict[str, Any] = {"params": item.params, "flop": item.flop, "bytes_moved": item.bytes_moved,
                             "cache": item.cache, "role": item.role}  # fmt: skip
    if seconds == ABSENT:
        return []
    if isinstance(seconds, str) and seconds != WRONG:
        return [Record(family, item.name, skipped=seconds, **about)]
    right = seconds != WRONG
    said = {"check": "rows", "rel_frobenius": error if right else 0.5, "rel_frobenius_limit": LIMIT, "ok": right}
    out = [Record(family, item.name, error=said, backend=backend, **about)]
    if right:
        out += [Record(family, item.name, block=i, samples_s=s, backend=backend, **about)
                for i, s in enumerate(per_block(seconds))]  # fmt: skip
    return out


def anchors(family: str, turn: int, gemm: float = 100.0, copy: float = 100.0) -> list[Record]:
    """The two anchors, once: rates in FLOP/s and B/s."""
    return [
        Record(family, "anchor.gemm", role="anchor", block=turn, samples_s=(1 / gemm,), flop=1, bytes_moved=1),
        Record(family, "anchor.copy", role="anchor", block=turn, samples_s=(1 / copy,), bytes_moved=1),
    ]


def around(family: str, records: list[Record], gemm=(100.0, 100.0), copy=(100.0, 100.0)) -> list[Record]:
    """The records between two turns of the anchors."""
    return [*anchors(family, 0, gemm[0], copy[0]), *records, *anchors(family, 1, gemm[1], copy[1])]


def roofs(peak: int = PEAK, rate: int = RATE, dtype: str = "bf16", probed: int | None = None) -> list[Record]:
    """A compute roof and a plateau of copy, both steady; with `probed` a CPU's peak by instruction."""
    shape = {"m": 8192, "n": 8192, "k": 8192, "layout": "NN", "dtype": dtype, "searched": 1}
    gemm = records_of(Case("roof", shape, flop=peak), "compute", 1.0, "torch.mm")
    if probed:
        params = {"dtype": "bfloat16", "threads": 2}
        gemm.append(Record("compute", "peak.amx_bf16", role="probe", params=params, flop=probed, samples_s=(1.0,)))
    copies = []
    for size in (1, 2, 3):
        params = {"op": "copy", "buffer_bytes": size * 2**30, "plateau": True}
        item = Case(f"copy.{size}GiB", params, bytes_moved=rate, cache="cold")
        copies += records_of(item, "bandwidth", 1.0, "torch copy", 0.0)
    return [*around("compute", gemm), *around("bandwidth", copies)]


def ops(spec: Spec, times: Callable[[Op, str], Times], kind: str = "gpu", dtype: str = "bf16") -> list[Record]:
    """Family 4: every row that it plans on this kind of machine, with `times(op, path)`."""
    out = []
    for op in workload.ops(spec):
        for path in (DEFAULT, *family_ops.paths(op, kind)):
            item, backend = family_ops.case(op, dtype, path), f"torch, {path} {op.kind}"
            if op.kind == "attention":
                ran = "sdpa_flash" if path == DEFAULT else path
                item.params["attention"], backend = ran, f"aten::_{ran}_attention"
            out += records_of(item, "ops", times(op, path), backend)
    return out


def e2e(
    spec: Spec, eager: Times, compiled: Times, *, attention: str = "sdpa_flash", mode: str = "max-autotune",
    counted: float | None = None, gaps: dict[str, float] | None = None, dtype: str = "bf16",
    tries: Iterable[Record] = (), peak: float | None = 2.0**33,
) -> list[Record]:  # fmt: skip
    """Family 5: the two rows, the counter, the peaks, what was tried. `counted`: default, the FLOP of a pass."""
    declared = workload.pass_flop(spec)
    out = [
        Record("e2e", "flop.counter", role="probe", params={"declared": declared}, unit="FLOP",
               value=float(declared if counted is None else counted)),
        Record("e2e", "attention.aiter", role="probe", skipped="aiter cannot be imported"),
        Record("e2e", f"attention.{attention}", role="probe", backend=f"aten::_{attention}",
               error={"check": "attention", "rel_frobenius": 2e-3, "rel_frobenius_limit": LIMIT, "ok": True}),
        *tries,
    ]  # fmt: skip
    for name, seconds, more in ((family_e2e.EAGER, eager, {}), (family_e2e.COMPILED, compiled, {"mode": mode})):
        timed = not isinstance(seconds, str)
        if timed and more:
            out += [compile_try(mode, part, 3e-3, 42.0) for part in ("block", "pass")]
        if timed and peak:
            sizes = {"weights_bytes": workload.weight_bytes(spec), "cache_bytes": workload.cache_bytes(spec)}
            out.append(Record("e2e", f"memory.{name}", role="probe", value=peak + sum(sizes.values()), unit="B",
                              params={"what": "allocated on the device", **sizes}))  # fmt: skip
        named = {**more, "attention": attention} if timed or seconds == WRONG else {}
        out += records_of(family_e2e.case(spec, dtype, name, **named), "e2e", seconds, f"{name}, attention {attention}")
    out += [Record("e2e", f"gaps.{name}", role="probe", value=t, unit="s") for name, t in (gaps or {}).items()]
    return out


def compile_try(mode: str, part: str, error: float, seconds: float = 1.0, cached: int = 0) -> Record:
    """What compiling in a mode gave: the error of the block, or of the pass."""
    said = {"check": f"compiled {part}", "rel_frobenius": error, "rel_frobenius_limit": 2.0**-6, "ok": error <= 2.0**-6}
    return Record("e2e", "compile", role="probe", params={"mode": mode, "graphs": 1, "from_cache": cached}, error=said,
                  value=seconds, unit="s")  # fmt: skip


def capacity(total: int, given: int, of: str = "device") -> list[Record]:
    """Family 3: all memory, and how much of it was given."""
    params = {"ended": "refused", "detail": "out of memory", "step_bytes": 2**26, "limit_s": 60.0, "cap_bytes": total}
    return [
        Record("capacity", "device.total", value=float(total), unit="B", params={"of": of}),
        Record("capacity", "device.free", value=float(given), unit="B", params={"bounded_by": of}),
        Record("capacity", "contiguous", value=float(given), unit="B", params=params),
        Record("capacity", "blocks", value=float(given), unit="B", params=params),
    ]
