"""Fixtures that several tests share: the sample runs, and runs made of a few records by hand."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from escher_kernels import METHOD, targets
from escher_kernels.records import Record, RecordFile, Run
from validation import config as configuration
from validation import derive

SAMPLES = Path(__file__).with_name("sample_runs")
CPU = targets.Found("cpu", "Some CPU", "x86_64", 2, 2**34)
MI355X = targets.Found("rocm", "AMD Instinct MI355X", "gfx950", 256, 309220868096, 2.4e9, count=8)
UNKNOWN_GPU = targets.Found("rocm", "AMD Instinct MI999X", "gfx999", 512, 2**39)


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
