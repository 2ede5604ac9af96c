"""Memory: what a device really gave, what each workload needs, and what is left. Pages and verdicts read these alone.

A workload needs its weights, its caches and the peak of its live activations, all from the spec; the caches and weights
grow with the depth, the activations do not. It fits where the sum is at most what many blocks of 1 GiB came to, and its
largest single tensor at most the largest contiguous one. All values are bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from escher_kernels import workload
from escher_kernels.records import Record
from escher_kernels.workload import ELEMENT_BYTES, Spec
from validation.derive import LoadedRun

PEAKS = ("memory.eager", "memory.compiled")  # of family 5


@dataclass(frozen=True)
class Amount:
    """One amount that was looked for. `bytes` is None where it was not found, with the reason in `skipped`.

    `ended`: why no more was tried: cap, refused, time, others, killed; None for what was read rather than searched.
    `at_least`: more may be there.
    """

    case: str
    bytes: int | None
    ended: str | None
    detail: str
    at_least: bool
    skipped: str | None
    params: dict[str, Any]


@dataclass(frozen=True)
class Capacity:
    """Family 3: every amount by case, and the rated memory of the target, which only `same_device` may be compared."""

    amounts: dict[str, Amount]
    rated_bytes: int | None
    rated_label_gb: float | None  # as the vendor prints it
    rated_name: str
    rated_reason: str
    same_device: bool

    def amount(self, case: str) -> Amount | None:
        """The amount, where it was found."""
        found = self.amounts.get(case)
        return found if found and found.bytes is not None else None

    @property
    def total(self) -> Amount | None:
        """The sum of many blocks: what a model of many tensors may fill."""
        return self.amount("blocks")

    @property
    def largest_tensor(self) -> tuple[int, bool] | None:
        """(bytes, more may be there) of one tensor: the contiguous one, or a whole block where that is larger."""
        blocks, one = self.total, self.amount("contiguous")
        known = []
        if one:
            known.append((one.bytes, one.at_least))
        if blocks and blocks.params.get("whole_blocks"):
            known.append((blocks.params["block_bytes"], True))
        return max(known, default=None)

    @property
    def most_bytes(self) -> int | None:
        """What no search can exceed: all memory of the device, of the host, or of its control group."""
        everything = self.amount("device.total")
        return everything.bytes if everything else None

    @property
    def fragmentation_frac(self) -> float | None:
        """Of the memory freed by dropping every second block, the share that one tensor could have again."""
        found = self.amount("fragmentation")
        return found.bytes / found.params["freed_bytes"] if found and found.params.get("freed_bytes") else None


def capacity(run: LoadedRun) -> Capacity:
    """What family 3 found; without any amount where it was not measured."""
    profile = run.selection.profile
    rated = profile.memory_bytes if profile else None
    reason = run.selection.reason if profile is None else f"{profile.name} has no rated memory"
    return Capacity(
        amounts={r.case: _amount(r) for r in run.records("capacity")},
        rated_bytes=rated,
        rated_label_gb=profile.memory_label_gb if profile else None,
        rated_name=profile.name if profile else "",
        rated_reason="" if rated else reason,
        same_device=run.selection.same_device,
    )


def _amount(record: Record) -> Amount:
    return Amount(
        case=record.case,
        bytes=None if record.skipped or record.value is None else int(record.value),
        ended=record.params.get("ended"),
        detail=record.params.get("detail", ""),
        at_least="AT_LEAST" in record.flags,
        skipped=record.skipped,
        params=record.params,
    )


@dataclass(frozen=True)
class Need:
    """What a workload of a depth needs. `whole`: as the workload has it; `ran`: as this run's families 1, 4 and 5 ran it."""

    spec: Spec
    whole: bool = True
    ran: bool = False

    @property
    def weights_bytes(self) -> int:
        return workload.weight_bytes(self.spec)

    @property
    def caches_bytes(self) -> int:
        return workload.cache_bytes(self.spec)

    @property
    def activations_bytes(self) -> int:
        return workload.activation_bytes(self.spec)

    @property
    def bytes(self) -> int:
        return workload.needed_bytes(self.spec)

    @property
    def largest_tensor_bytes(self) -> int:
        """The largest of: a weight, the keys of a block's window, the FFN's inner activation."""
        s = self.spec
        weight = s.hidden * max(s.ffn, 6 * s.hidden)
        keys = s.batch * s.window_tokens * s.hidden
        return ELEMENT_BYTES * max(weight, keys, s.batch * s.query_tokens * s.ffn)


def needs_of_run(run: LoadedRun) -> list[Need]:
    """The run's workload at depth 1, at the depth that ran and at its whole depth; then as it ran, where its tokens
    were reduced too. WorkloadError where the run's workload cannot be read."""
    spec = workload.from_json(run.info["workload"], f"{run.directory / 'run.json'}: workload")
    whole = spec.whole()
    out = []
    for depth in sorted({1, spec.depth, whole.depth}):
        at = replace(whole, depth=depth)
        out.append(Need(at, whole=depth == whole.depth, ran=_size(at) == _size(spec)))
    return out if any(n.ran for n in out) else [*out, Need(spec, whole=False, ran=True)]


def needs_of_others(run: LoadedRun) -> list[Need]:
    """Every workload of configs/ but the run's own, whole."""
    own = {_size(n.spec) for n in needs_of_run(run) if n.whole}
    return [Need(spec) for spec in map(workload.load, workload.names()) if _size(spec) not in own]


def _size(spec: Spec) -> tuple:
    return (
        spec.hidden,
        spec.ffn,
        spec.heads,
        spec.depth,
        spec.query_tokens,
        spec.window_tokens,
        spec.batch,
        spec.cache,
    )


@dataclass(frozen=True)
class Headroom:
    """A need against what was measured, and against the target's rated memory.

    `fits`, `rated_fits`: None where it cannot be told (nothing measured or rated; or too little was tried to say no).
    `margin_bytes`: measured less needed, a lower bound where `at_least`. `deepest`: the most blocks that fit, of the
    same tokens; 0: none.
    """

    need: Need
    measured_bytes: int | None
    at_least: bool
    margin_bytes: int | None
    fits: bool | None
    deepest: int | None
    rated_fits: bool | None
    rated_margin_bytes: int | None


def headroom(need: Need, found: Capacity) -> Headroom:
    """Judge one need; see `Headroom`."""
    total, rated = found.total, found.rated_bytes
    fits = deepest = None
    if total:
        largest, more = found.largest_tensor or (0, True)
        tensor_fits = _enough(need.largest_tensor_bytes, largest, more)
        unknown = total.at_least and need.bytes <= (found.most_bytes or need.bytes)
        fits = _all((_enough(need.bytes, total.bytes, unknown), tensor_fits))
        deepest = deepest_that_fits(need.spec, total.bytes) if tensor_fits is not False else 0
    return Headroom(
        need=need,
        measured_bytes=total.bytes if total else None,
        at_least=bool(total and total.at_least),
        margin_bytes=total.bytes - need.bytes if total else None,
        fits=fits,
        deepest=deepest,
        rated_fits=None if rated is None else need.bytes <= rated,
        rated_margin_bytes=None if rated is None else rated - need.bytes,
    )


def of_run(run: LoadedRun) -> list[Headroom]:
    """The run's workload at its depths, then every other workload of configs/."""
    found = capacity(run)
    return [headroom(need, found) for need in (*needs_of_run(run), *needs_of_others(run))]


def deepest_that_fits(spec: Spec, available_bytes: int) -> int:
    """The largest depth of this geometry that `available_bytes` hold; 0 where not even one block fits."""
    one, two = (workload.needed_bytes(replace(spec, depth=n)) for n in (1, 2))
    return max(0, 1 + (available_bytes - one) // (two - one))


def _enough(need: int, have: int, more_may_be_there: bool) -> bool | None:
    return True if need <= have else None if more_may_be_there else False


def _all(answers: Sequence[bool | None]) -> bool | None:
    return False if False in answers else None if None in answers else True


@dataclass(frozen=True)
class Peak:
    """The measured peak of one pass of the model beside the prediction.

    `beyond_bytes`: peak less weights and caches as they were allocated: the live activations, and on a host, where the
    peak is the process's resident set (`what`), the libraries too.
    """

    case: str
    what: str
    peak_bytes: int
    beyond_bytes: int
    predicted_bytes: int  # live activations by the spec


def peaks(run: LoadedRun) -> list[Peak]:
    """Measured peaks that family 5 recorded; none where it was not measured."""
    found = [r for r in run.records("e2e") if r.case in PEAKS and r.value is not None and not r.skipped]
    if not found:
        return []
    spec = workload.from_json(run.info["workload"], f"{run.directory / 'run.json'}: workload")
    return [
        Peak(
            r.case.partition(".")[2], r.params.get("what", ""), int(r.value),
            int(r.value) - r.params["weights_bytes"] - r.params["cache_bytes"], workload.activation_bytes(spec),
        )
        for r in found
    ]  # fmt: skip
