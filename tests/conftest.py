"""Fixtures that several tests share: the sample runs, and runs made of a few records by hand."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from escher_kernels import METHOD, targets, workload
from escher_kernels.records import Record, RecordFile, Run
from escher_kernels.timing import BUDGETS, Case, Machine, Prepared
from validation import config as configuration
from validation import derive

SAMPLES = Path(__file__).with_name("sample_runs")
SMALL_TOC = """format: jb-book
root: index
parts:
  - caption: Results
    chapters:
      - file: notebooks/00_environment
      - file: notebooks/01_compute
      - file: notebooks/02_bandwidth
  - caption: Reference
    chapters:
      - file: notebooks/methodology
      - file: glossary
"""
CPU = targets.Found("cpu", "Some CPU", "x86_64", 2, 2**34)
MI355X = targets.Found("rocm", "AMD Instinct MI355X", "gfx950", 256, 309220868096, 2.4e9, count=8)
UNKNOWN_GPU = targets.Found("rocm", "AMD Instinct MI999X", "gfx999", 512, 2**39)


class RecordingSession:
    """Stands in for `timing.Session`: keeps what a family asks for, in `steps` in order, and times nothing."""

    def __init__(self, budget: str = "quick"):
        self.budget = BUDGETS[budget]
        self.steps: list[str] = []
        self.blocks: list[Prepared] = []
        self.paired: list[Prepared] = []
        self.skipped: list[tuple[str, str]] = []
        self.written: list[tuple[Case, dict[str, Any]]] = []

    def progress(self, *_: Any, **__: Any) -> None: ...

    def warm_up(self, machine: Machine) -> None:
        self.steps.append("warm-up")

    def anchor(self) -> None:
        self.steps.append("anchor")

    def run_blocks(self, items: list[Prepared]) -> None:
        self.steps.append("blocks")
        self.blocks += items

    def run_pairs(self, items: list[Prepared]) -> None:
        self.steps.append("pairs")
        self.paired += items

    def wanted(self, case: Case) -> bool:
        return True

    def earlier(self, case: Case) -> list[Record]:
        return []

    def record(self, case: Case, **fields: Any) -> None:
        self.written.append((case, fields))

    def skip(self, case: Case, reason: str) -> None:
        self.skipped.append((case.name, reason))


ESCHER = workload.load()
TINY = replace(
    ESCHER, name="tiny", hidden=64, heads=2, head_size=32, ffn=96, depth=2, time_frequency=16, time_tokens=3,
    query_tokens=12, window_tokens=48, text_tokens=5, pilot=None,
)  # fmt: skip
TINY_SPECS = {"cache": TINY, "batch 2": replace(TINY, batch=2), "no cache": replace(TINY, cache=False, window_tokens=12)}


def _no_compiling() -> str:
    """Why torch.compile cannot work here, or ""."""
    if not (shutil.which("c++") or shutil.which("g++")):
        return "no C++ compiler"
    found = importlib.util.find_spec("torch")
    paths = (found.origin if found else "", os.environ.get("TORCHINDUCTOR_CACHE_DIR", ""), tempfile.gettempdir())
    return "torch's compiler does not quote paths" if any(re.search(r"\s", path or "") for path in paths) else ""


compiles = pytest.mark.skipif(bool(_no_compiling()), reason=_no_compiling() or "compiles")


@pytest.fixture(scope="module")
def one_thread():
    """Small operations: waking a second thread costs more than it saves."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def config() -> configuration.Config:
    return configuration.load(Path(__file__).parents[1] / "configs" / "report_config.json")


@pytest.fixture(scope="session", params=["cpu", "mi355x"])
def sample(request) -> derive.LoadedRun:
    return derive.load(SAMPLES / request.param)


@pytest.fixture
def sample_copy(tmp_path) -> Callable[[str], Path]:
    """`sample_copy("cpu")`: a run directory of its own, which a test may change."""

    def copy(name: str) -> Path:
        return Path(shutil.copytree(SAMPLES / name, tmp_path / "results" / name))

    return copy


@pytest.fixture
def made_run(config) -> Callable[..., derive.LoadedRun]:
    """A loaded run of hand-made records, without a file: `made_run(records, found=CPU, asked="auto")`."""

    def make(
        records: Iterable[Record], found: targets.Found = CPU, asked: str = "auto", dtype: str = "bf16", **info: Any
    ) -> derive.LoadedRun:
        selection = targets.resolve(asked, found, config)
        files: dict[str, RecordFile] = {}
        for record in records:
            header = Run(
                run_id="made", family=record.family, method=METHOD, workload={}, target={}, parameters={"dtype": dtype},
                software={}, git={}, argv=[], created_utc="2026-01-01T00:00:00+00:00",
            )  # fmt: skip
            files.setdefault(record.family, RecordFile(header, [], False)).records.append(record)
        about = {
            "run_id": "made", "created_utc": "2026-01-01T00:00:00+00:00", "method": METHOD, "source": "measured",
            "settings": {"budget": "quick"}, "workload": {"name": "w", "depth": 1, "query_tokens": 2, "window_tokens": 3},
        }  # fmt: skip
        return derive.LoadedRun(Path("made"), about | info, None, {}, files, selection, found, config)

    return make
