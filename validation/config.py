"""The configuration as judging and the pages need it: thresholds, status pills, glossary, project.

`escher_kernels.targets` checks the part that measuring needs; the rest is checked here, against the same file.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from escher_kernels import targets
from escher_kernels.targets import ConfigError, check, is_number, is_whole, wrong

_TOP = (
    ("project.title project.subtitle project.author project.sensitivity", "text", '"escher microbenchmark book"'),
    ("thresholds.*.unit thresholds.*.source thresholds.*.date", "text", '"percent"'),
    ("status_pills.*.label status_pills.*.colour_class status_pills.*.meaning glossary.*", "text", '"PASS"'),
)
_UNITS = {  # unit of a threshold -> what its value must be, an example, the largest value
    "percent": ("a number of percent", 5.0, math.inf),
    "fraction": ("a fraction between 0 and 1", 0.4, 1),
    "percentage points": ("a number of percentage points", 5.0, math.inf),
    "seconds": ("a number of seconds", 2e-05, math.inf),
    "ratio": ("a ratio", 1.1, math.inf),
    "count": ("a whole number", 6, math.inf),
    "relative error": ("a number between 0 and 1", 0.00390625, 1),
}
_THRESHOLDS = """calibration_drift_pct roof_floor_public_frac best_square_frac plateau_spread_pct ridge_near_frac
attains_frac launch_bound_s mfu_pp gemm_rel_frobenius gemm_elementwise_rel gemm_elementwise_abs freivalds_sigma_ratio
gemm_sampled_rows_count attention_rel_frobenius compiled_block_rel_frobenius compiled_pass_rel_frobenius
compiled_pass_depth_count sustained_throughput_frac sustained_sigma_growth_ratio sustained_clock_frac cv_pct
cv_runs_count cross_check_compute_pct cross_check_bandwidth_pct cross_check_collective_pct fused_speedup_ratio
fused_world_count guard_note_frac at_limit_ratio tunable_ratio gap_residual_frac flop_counter_pct converged_roof_frac
converged_frac min_blocks_count noisy_ratio anchor_moved_frac lost_cpu_frac outlier_ratio regression_roof_pct
regression_mfu_pp regression_runs_count""".split()


OWN = "report_config.json"  # below raw/, where a run was made with another configuration than this tree's


class Config(targets.Config):
    """The validated configuration, a dict of its JSON, with `path`, `profile(key)` and `threshold(name)`."""

    def threshold(self, name: str, kind: str = "gpu") -> float:
        """The value of a threshold, for "gpu" or "cpu" where it differs. Raises ConfigError listing the names."""
        if name not in self["thresholds"]:
            known = ", ".join(self["thresholds"])
            raise ConfigError(f"{self.path}: thresholds.{name} is missing; expected one of {known}")
        value = self["thresholds"][name]["value"]
        return value[kind] if isinstance(value, dict) else value

    def floor(self, key: str, name: str) -> dict[str, Any] | None:
        """A target's `roof_floor_frac` or `bandwidth_floor_frac`: value, source, date, note. None for an unknown key."""
        every = [*self["targets"], self["cpu"]]
        return next((t[name] for t in every if t["key"] == key), None)


def of_run(run_dir: Path) -> Config:
    """The configuration a run was made with: its own copy, else this tree's."""
    own = Path(run_dir) / "raw" / OWN
    return load(own if own.is_file() else None)


def load(path: Path | str | None = None) -> Config:
    """The whole configuration. Raises ConfigError, one line per error; see `targets.load_config` for `path`."""
    loaded = targets.load_config(path, _errors)
    out = Config(loaded)
    out.path = loaded.path
    return out


def _errors(raw: dict) -> Iterator[str]:
    yield from check(raw, _TOP)
    if isinstance(raw.get("thresholds"), dict):
        yield from _check_thresholds(raw["thresholds"])


def _check_thresholds(thresholds: dict) -> Iterator[str]:
    for name in dict.fromkeys([*_THRESHOLDS, *thresholds]):
        entry, path = thresholds.get(name, ...), f"thresholds.{name}"
        if not isinstance(entry, dict):
            yield wrong(path, entry, "an object", '{"value": 5.0, "unit": "percent"}')
        elif entry.get("unit", ...) not in tuple(_UNITS):
            yield wrong(f"{path}.unit", entry.get("unit", ...), f"one of {', '.join(_UNITS)}", '"percent"')
        else:
            words, example, most = _UNITS[entry["unit"]]
            good = is_whole if entry["unit"] == "count" else is_number
            value = entry.get("value", ...)
            split = isinstance(value, dict) and value.keys() == {"gpu", "cpu"}
            for key, v in ((f".{k}", v) for k, v in value.items()) if split else [("", value)]:
                if not (good(v) and 0 <= v <= most):
                    yield wrong(f"{path}.value{key}", v, words, example)
