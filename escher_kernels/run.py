"""One family into one file: decide what to measure on, write the header, measure, one record at a time.

Notebooks, `python -m escher_kernels` and checks on a GPU machine all come through `measure_family`.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from escher_kernels import METHOD, devices, environment, targets, workload
from escher_kernels.fallbacks import Watch
from escher_kernels.records import Record, RecordError, RecordFile, Run, Writer, read_json, write_json_atomic
from escher_kernels.timing import BUDGETS, CpuTimer, GpuTimer, Machine, Progress, Session

ROOT = Path(__file__).resolve().parent.parent
PROCESS, END = "process", "end"  # marks: another process took over; an iteration of a family is whole
ASSUMED_LLC_BYTES = 2**28  # where nothing tells: as large as the largest Infinity Cache


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a run was asked for; every family of a run gets the same. JSON in, JSON out."""

    target: str = "auto"
    device: str = "auto"
    budget: str = "standard"
    workload: str = workload.DEFAULT
    depth: int | None = None  # None: as the workload has it, and as the host can run it
    tokens: int | None = None
    window: int | None = None
    reference_model: str | None = None  # an id of configs/reference_video_models.json: its workload is run
    report_config: str | None = None  # path of another report_config.json

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Settings:
        """Raises ValueError that names an unknown key and lists the known ones."""
        known = [f.name for f in dataclasses.fields(cls)]
        for key in data:
            if key not in known:
                raise ValueError(f"unknown setting {key!r}; known: {', '.join(known)}")
        out = cls(**data)
        if out.budget not in BUDGETS:
            raise ValueError(f"unknown budget {out.budget!r}; known: {', '.join(BUDGETS)}")
        for name in ("depth", "tokens", "window"):
            value = getattr(out, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
                raise ValueError(f"{name} is {value!r}; expected a whole number")
        if out.reference_model is not None and out.workload != workload.DEFAULT:
            raise ValueError(
                f"reference_model {out.reference_model!r} brings its own workload; leave workload {out.workload!r} out"
            )
        return out


def families() -> dict[str, str]:
    """The registry of families: notebooks/NN_<family>.ipynb. Family -> NN_family, in the order of the book."""
    stems = sorted(path.stem for path in (ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))
    return {stem.partition("_")[2]: stem for stem in stems}


def records_path(run_dir: Path, family: str) -> Path:
    return Path(run_dir) / "records" / f"{families()[family]}.jsonl"


@dataclasses.dataclass(frozen=True)
class Plan:
    """What the settings mean on this machine."""

    settings: Settings
    found: targets.Found
    selection: targets.Selection
    spec: workload.Spec
    config: targets.Config

    def to_json(self) -> dict[str, Any]:
        """The plan, what the driver says of the devices, and the fingerprint of the machine before anything runs on it."""
        return {
            "target": {"found": self.found.to_json(), **self.selection.to_json()},
            "workload": self.spec.to_json(),
            **devices.header(devices.devices()),
            "env": environment_of(self.found, self.config),
        }


def plan(settings: Settings) -> Plan:
    """Find the device, take its profile, derive the workload.

    Raises ConfigError, TargetError, DeviceError (of `targets`) and WorkloadError.
    """
    config = targets.load_config(Path(settings.report_config) if settings.report_config else None)
    found = targets.detect(settings.device)
    selection = targets.resolve(settings.target, found, config)
    return Plan(settings, found, selection, spec_for(settings, found), config)


def spec_for(settings: Settings, found: targets.Found) -> workload.Spec:
    """The one spec of a run: the workload or reference model asked for, the user's sizes, what the host can run."""
    model = settings.reference_model
    spec = workload.load(settings.workload if model is None else workload.of_reference_model(model))
    asked = {"depth": settings.depth, "query_tokens": settings.tokens, "window_tokens": settings.window}
    spec = workload.overridden(spec, settings.depth, settings.tokens, settings.window)
    fixed = [name for name, value in asked.items() if value is not None]
    if found.kind == "cpu":  # a control group may allow less than the host has; what is free changes, the limit does not
        limit = environment.memory()["limit_bytes"]
        return workload.fit(spec, "cpu", min(filter(None, (found.total_memory_bytes, limit))), fixed)
    return workload.fit(spec, "gpu", found.total_memory_bytes, fixed)


def environment_of(found: targets.Found, config: targets.Config) -> dict[str, Any]:
    """env.json: the fingerprint, the pre-run checks, and on a CPU the nominal FLOP a clock of its kind."""
    env = environment.fingerprint(found.to_json())
    env["checks"] = environment.checks(env)
    if found.kind == "cpu":
        names = ("uarch", "bf16", "fp32", "note")
        try:
            cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        except OSError:
            cpuinfo = ""
        env["nominal"] = dict(zip(names, targets.nominal_cpu_flop_per_cycle(cpuinfo, config), strict=True))
    return env


def software() -> dict[str, Any]:
    return {
        "python": sys.version.split()[0],
        "interpreter": sys.executable,
        "packages": environment.packages(),
        "threads_variable": os.environ.get("OMP_NUM_THREADS"),
    }


def machine_for(plan: Plan, torch: Any) -> Machine:
    """Bind to one logical CPU a physical core, set torch's threads, and say what the families measure on."""
    found_profile = plan.selection.found_profile
    if plan.found.kind == "cpu":
        allowance = environment.cpu_allowance()
        try:
            os.sched_setaffinity(0, allowance.cores)
        except OSError:
            pass  # the affinity in force is read back below
        torch.set_num_threads(allowance.threads)
        llc = environment.llc_bytes(environment.caches(allowance.cores))
        usable = environment.memory()["usable_bytes"] or 0
        nodes = environment.numa_nodes() or 1
        return Machine(
            torch, "cpu", "cpu", "bf16", usable, llc or ASSUMED_LLC_BYTES, tuple(allowance.cores), nodes, llc is None
        )
    properties = torch.cuda.get_device_properties(0)
    known = (found_profile.llc_bytes or found_profile.l2_bytes) if found_profile else None
    llc = max(getattr(properties, "L2_cache_size", 0) or 0, known or ASSUMED_LLC_BYTES)
    if found_profile:
        dtype = found_profile.compute_dtype
    else:
        dtype = "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    return Machine(torch, "gpu", "cuda", dtype, properties.total_memory, llc, (), llc_assumed=not known)


def _same(path: Path, what: str, planned: dict[str, Any], here: dict[str, Any]) -> None:
    """Raise ValueError where a run that exists was planned for another device or workload."""
    differs = next((k for k in here if planned.get(k) != here[k]), None)
    if differs is not None:
        raise ValueError(
            f"{path} was made for another {what}: its {differs} is {planned.get(differs)!r}, here it is "
            f"{here[differs]!r}; measure into a new run"
        )


def _modes(run_json: Path) -> dict[str, Any]:
    """Partition, NPS mode and power cap, as the run was planned with; without a run as the driver says now."""
    if run_json.exists():
        said = read_json(run_json)
    else:
        said = devices.header(devices.devices())
    return {name: said.get(name) for name in ("partition", "nps", "power_cap_w")}


def _alike(run: Run, what: str, there: Any, here: Any) -> None:
    if there != here:
        raise ValueError(
            f"{run.family} was begun with {what} {there!r}, here it is {here!r}; a run is of one kind: measure into a new one"
        )


def _earlier(there: RecordFile | None, run: Run, iteration: int, resume: bool) -> list[Record]:
    """What earlier processes of this iteration wrote. ValueError where this process may not go on from it."""
    if there is None:
        return []
    for what in ("method", "family", "run_id"):
        _alike(run, what, getattr(there.run, what), getattr(run, what))
    for what in ("python", "torch", "numpy"):
        found = ((r.software if what == "python" else r.software["packages"]).get(what) for r in (there.run, run))
        _alike(run, what, *found)
    for what in (*Settings().to_json(), "dtype", "threads"):
        _alike(run, what, there.run.parameters.get(what), run.parameters.get(what))
    mine = [r for r in there.records if r.iteration == iteration]
    if mine and not resume:
        raise RecordError(
            f"iteration {iteration} of {run.family} is there already; go on with --resume, or measure into a new run"
        )
    return mine


def measure_family(
    family: str,
    run_dir: Path,
    settings: Settings,
    profile: dict[str, Any] | None = None,
    progress: Callable[..., None] | None = None,
    iteration: int = 1,
    only: Sequence[str] | None = None,
    resume: bool = False,
) -> Path:
    """Measure one family and write its records. Returns the path of the file.

    `profile`: the device profile the caller expects (its JSON); ValueError if this process finds another one. `only`:
    names of the cases to measure; ValueError, after the others were measured, where one never came. `iteration`: which
    fresh process of the run this is; all of them write one file. `resume`: go on where an earlier process of this iteration
    was ended; what is finished is not measured again.

    Raises RecordError where the file exists or cannot be written, and what `plan` raises. A case that cannot run is a
    record with its reason, never an exception.
    """
    if family not in families():
        raise ValueError(f"unknown family {family!r}; known: {', '.join(families())}")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # its profiler, which tells what ran, writes lines of its own
    import torch

    progress = progress or Progress(family)
    chosen = plan(settings)
    selected = chosen.selection.profile
    if profile and (selected is None or targets.Profile.from_json(profile) != selected):
        raise ValueError(
            f"the run's profile is {profile.get('key')}, this process finds {selected.key if selected else 'no profile'}"
        )
    known_as = Path(run_dir) / "run.json"
    if known_as.exists():
        info = read_json(known_as)
        try:
            planned_for, planned_work = info["target"]["found"], info["workload"]
        except (KeyError, TypeError):
            raise ValueError(f"{known_as}: target or workload is missing; measure into a new run") from None
        _same(known_as, "device", planned_for, chosen.found.to_json())
        _same(known_as, "workload", planned_work, chosen.spec.to_json())
    env_path = Path(run_dir) / "env.json"
    if not env_path.exists():  # before this process binds itself to fewer CPUs
        write_json_atomic(env_path, environment_of(chosen.found, chosen.config))
    machine = machine_for(chosen, torch)
    affinity = sorted(os.sched_getaffinity(0))
    run = Run(
        run_id=Path(run_dir).name,
        family=family,
        method=METHOD,
        workload=chosen.spec.to_json(),
        target={"found": chosen.found.to_json(), **chosen.selection.to_json()},
        parameters={
            **settings.to_json(), "dtype": machine.dtype, "threads": len(machine.cores) or None, "affinity": affinity,
            "bound": machine.kind != "cpu" or affinity == sorted(machine.cores),
            "memory_bytes": machine.memory_bytes, "llc_bytes": machine.llc_bytes,
            "llc_assumed": machine.llc_assumed, "numa_nodes": machine.numa_nodes, "world": 1, **_modes(known_as),
        },
        software=software(),
        git=environment.git_state(ROOT),
        argv=["notebook"] if "ipykernel" in sys.modules else [Path(sys.argv[0]).name, *sys.argv[1:]],
        created_utc=datetime.now(UTC).isoformat(timespec="seconds"),
    )  # fmt: skip
    path, seen = records_path(run_dir, family), Counter()
    with Writer(path, run, go_on=resume or iteration > 1) as out:
        before = _earlier(out.before, run, iteration, resume)
        if any(r.role == "mark" and r.case == END for r in before):
            progress("is finished already")
            return path
        timer = CpuTimer() if machine.kind == "cpu" else GpuTimer(torch.cuda)
        budget, threads = BUDGETS[settings.budget], max(1, len(machine.cores))

        def write(record: Record) -> None:
            out.write(record)
            seen[record.case] += 1

        def mark(case: str, **params: Any) -> None:
            out.write(Record(family, case, role="mark", iteration=iteration, params=params))

        if out.before:
            kind = "iteration" if iteration > 1 and not before else "resumed"
            mark(PROCESS, kind=kind, created_utc=run.created_utc, argv=run.argv, git=run.git)
        with Watch() as watch:
            session = Session(
                family, timer, write, budget, threads, progress, iteration=iteration, only=only, before=before,
                notices=watch.flags,
            )  # fmt: skip
            importlib.import_module(f"escher_kernels.{family}").measure(session, machine, chosen.spec)
        if only is None:
            mark(END)
        progress(f"done, {seen.total()} records")
    if missing := [name for name in only or () if name not in seen]:
        raise ValueError(f"family {family} measured no case {missing[0]!r}; the names stand in its records and tables")
    return path
