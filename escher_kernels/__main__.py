"""`python -m escher_kernels FAMILY --run DIR` measures one family; `... plan` prints what it would use.

The same code as the notebooks call, without papermill or a book: for torchrun, and for machines with torch alone.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path

from escher_kernels import run, targets, workload
from escher_kernels.records import RecordError


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m escher_kernels", description=__doc__.splitlines()[0])
    parser.add_argument("family", choices=[*run.families(), "plan"])
    parser.add_argument("--run", type=Path, help="directory the records go to")
    parser.add_argument("--only", nargs="+", metavar="CASE", help="measure these cases alone")
    for f in dataclasses.fields(run.Settings):
        kind = int if f.type.startswith("int") else str
        parser.add_argument(f"--{f.name.replace('_', '-')}", default=f.default, type=kind)
    arguments = vars(parser.parse_args(argv))
    family, run_dir, only = (arguments.pop(name) for name in ("family", "run", "only"))
    try:
        settings = run.Settings.from_json(arguments)
        if family == "plan":
            chosen = run.plan(settings)
            print(json.dumps(chosen.to_json()))
            return 0
        if run_dir is None:
            raise ValueError("--run DIR is missing: where shall the records go?")
        print(run.measure_family(family, run_dir, settings, only=only))
    except (RecordError, targets.ConfigError, targets.TargetError, targets.DeviceError, workload.WorkloadError,
            ValueError) as exc:  # fmt: skip
        print(f"error: {exc}", file=sys.stderr)
        return 2
    except ImportError as exc:
        print(f"error: {exc}; measuring needs torch, `make env` installs it", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; what was measured is kept", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
