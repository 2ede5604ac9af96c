"""The judge on trial: a sample run that passes is altered in one place, and exactly the criteria named must change.

Every criterion that has a judge has a case here, and a test holds that. A case edits the files of a copy of the sample,
so reading, deriving and judging are all on the path.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from validation import derive, scorecard
from validation.scorecard import CONDITIONAL, FAIL, GO, INCOMPLETE, INVALID, NO_GO

Line = dict[str, Any]
Alter = Callable[[Path], None]
VERDICT = {INVALID: NO_GO, FAIL: NO_GO, INCOMPLETE: CONDITIONAL}  # what a status makes of a sample that is GO


@dataclass(frozen=True)
class Case:
    """`sc` must become `status`; `also`: criteria that depend on the altered records and may change with it."""

    sc: str
    what: str
    status: str
    alter: Alter
    also: tuple[str, ...] = ()


@dataclass(frozen=True)
class Result:
    case: Case
    found: str
    reason: str
    strangers: tuple[str, ...]  # criteria that changed and should not have
    verdict: str

    @property
    def ok(self) -> bool:
        return self.found == self.case.status and not self.strangers and self.verdict == VERDICT[self.case.status]


# ---- alterations ----


def lines(run_dir: Path, family: str, change: Callable[[Line], None]) -> None:
    """Apply `change` to every record of a family's file, the header left alone."""
    (path,) = (run_dir / "records").glob(f"*_{family}.jsonl")
    head, *rest = path.read_text(encoding="utf-8").splitlines()
    out = [head]
    for text in rest:
        record = json.loads(text)
        change(record)
        out.append(json.dumps(record, separators=(",", ":"), ensure_ascii=False))
    path.write_text("\n".join(out) + "\n", encoding="utf-8")


def slower(family: str, factor: float, wanted: Callable[[Line], bool] = lambda r: True, **state: Any) -> Alter:
    """Multiply the times of the records that are wanted; `state` is what telemetry saw of their windows."""

    def change(record: Line) -> None:
        if record.get("samples_s") and wanted(record):
            record["samples_s"] = [s * factor for s in record["samples_s"]]
            if state:
                record["device_state"] = state

    return lambda run_dir: lines(run_dir, family, change)


def json_file(name: str, change: Callable[[Any], None]) -> Alter:
    def alter(run_dir: Path) -> None:
        path = run_dir / name
        data = json.loads(path.read_text(encoding="utf-8"))
        change(data)
        path.write_text(json.dumps(data), encoding="utf-8")

    return alter


def named(*cases: str, role: str = "case") -> Callable[[Line], bool]:
    return lambda r: r["case"] in cases and r.get("role", "case") == role


def _wrong_gemm(run_dir: Path) -> None:
    """One checked GEMM whose error is three times its bound."""
    def change(r: Line) -> None:
        if r["case"] == "square.8192" and (r.get("error") or {}).get("check") == "full":
            r["error"] |= {"rel_frobenius": 3 * r["error"]["rel_frobenius_limit"], "ok": False}

    lines(run_dir, "compute", change)


def _less_memory(r: Line) -> None:
    if r["case"] in ("blocks", "contiguous"):
        r["value"] = 20 * 2**30
        r.get("params", {}).pop("at_least", None)
        r["flags"] = [f for f in r.get("flags", ()) if f != "AT_LEAST"]


def _faster_tool(run_dir: Path) -> None:
    """A tool that copies 40 % faster than ours."""
    (path,) = (run_dir / "raw" / "tools").glob("*transferbench*.log")
    text = re.sub(r"(GPU 00  -> +)(\d+\.\d+)", lambda m: f"{m[1]}{float(m[2]) * 1.4:.2f}", path.read_text(encoding="utf-8"))
    path.write_text(text, encoding="utf-8")


def _one_noisy_run(data: dict[str, Any]) -> None:
    data["headlines"]["compute_roof"]["values"][0] *= 1.2


THROTTLED = {"clock_hz": 1.1e9, "power_w": 1400.0, "temperature_c": 103.0, "throttle": ["socket_thermal"]}


def _drifted(info: dict[str, Any]) -> None:
    info["workload"]["pilot"]["block_gflop"] *= 1.2


CASES = (
    Case("SC-0", "the pilot's FLOP of a block is another", FAIL, json_file("run.json", _drifted)),
    Case("SC-1", "the compute family at half its speed", FAIL,
         slower("compute", 2.0), also=("SC-3", "SC-4", "SC-9")),
    Case("SC-2", "one plateau size of copy at 80 %", FAIL,
         slower("bandwidth", 1.25, named("copy.36862MiB")), also=("SC-9",)),
    Case("SC-3", "one operation at a fifth of its speed, throttled", FAIL,
         slower("ops", 5.0, lambda r: r.get("params", {}).get("op") == "self_attn.q", **THROTTLED)),
    Case("SC-4", "compiled a third slower than eager", FAIL, slower("e2e", 1.6, named("compiled"))),
    Case("SC-5", "a file of the raw part is gone", INCOMPLETE, lambda run_dir: (run_dir / "env.json").unlink()),
    Case("SC-6", "one GEMM with three times the error allowed", INVALID, _wrong_gemm),
    Case("SC-8", "one of the runs 20 % off", FAIL, json_file("variability.json", _one_noisy_run)),
    Case("SC-9", "a tool that copies 40 % faster", FAIL, _faster_tool),
    Case("SC-11", "a device that gives 20 GiB", FAIL, lambda run_dir: lines(run_dir, "capacity", _less_memory)),
    Case("SC-1", "a GEMM above the rated peak", INVALID, slower("compute", 0.2, named("square.8192"))),
    Case("SC-2", "copy twice as fast as memory can be", INVALID,
         slower("bandwidth", 0.3, named("copy.36862MiB")), also=("SC-9",)),
    Case("SC-3", "an operation above the roof", INVALID,
         slower("ops", 0.3, lambda r: r.get("params", {}).get("op") == "ffn.linear1")),
    Case("SC-4", "a pass faster than its FLOP at the roof", INVALID,
         slower("e2e", 0.4, named("eager", "compiled"))),
)  # fmt: skip


def run(sample: Path) -> list[Result]:
    """Every case on a copy of `sample`. ValueError where the unaltered sample does not pass: nothing is proven then."""
    before = scorecard.judge(derive.load(sample))
    if before.verdict != GO:
        raise ValueError(f"the sample {sample} is {before.verdict}: {'; '.join(before.reasons[:2])}")
    return [try_case(sample, case, before) for case in CASES]


def try_case(sample: Path, case: Case, before: scorecard.Scorecard) -> Result:
    with tempfile.TemporaryDirectory(prefix="escher-selftest-") as folder:
        copy = Path(shutil.copytree(sample, Path(folder) / sample.name))
        case.alter(copy)
        after = scorecard.judge(derive.load(copy))
    was = {c.sc: c.status for c in before.criteria}
    changed = {c.sc for c in after.criteria if c.status != was[c.sc]}
    found = after.criterion(case.sc)
    return Result(case, found.status, found.reason, tuple(sorted(changed - {case.sc, *case.also})), after.verdict)


def without_case() -> list[str]:
    """Criteria with a judge and without a case that makes them miss."""
    judged = {f"SC-{n}" for n in scorecard.JUDGES} | {"SC-5"}
    return sorted(judged - {c.sc for c in CASES})
