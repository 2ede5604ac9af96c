"""Makes the committed sample runs again: `python tests/make_sample.py [cpu] [mi355x]` (nothing: both).

`sample_runs/cpu` is a small REAL run of this host, of which only the raw part is kept, without names and paths of the
machine. `sample_runs/mi355x` is GENERATED: the families' own `measure` runs against a device that exists on paper, so
plan, protocol and record layout are the real ones while every time comes from a launch-and-roofline model with seeded
noise. It is marked synthetic in run.json, in every header and in every record, and it is the same bytes every time.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from paper_model import Paper, patches  # noqa: E402

from escher_kernels import (  # noqa: E402
    METHOD,
    bandwidth,
    capacity,
    checks,
    compute,
    e2e,
    environment,
    ops,
    targets,
    timing,
    workload,
)
from escher_kernels.records import SCHEMA, Record, Run, Writer, write_json_atomic  # noqa: E402
from escher_kernels.run import Settings, records_path  # noqa: E402
from escher_kernels.timing import BUDGETS, Case, GpuTimer, Machine, Prepared, Session  # noqa: E402
from validation import compare, derive  # noqa: E402
from validation.tools import Place, running, rvs, transferbench  # noqa: E402
from validation.tools.running import Log  # noqa: E402

HOME = Path(__file__).with_name("sample_runs")
SEED = 355
RUN_ID = "escher_14b_480p-mi355x-20260101-000000"
STARTED = {
    "environment": "2026-01-01T00:00:02+00:00",
    "compute": "2026-01-01T00:00:20+00:00",
    "bandwidth": "2026-01-01T00:02:41+00:00",
    "capacity": "2026-01-01T00:04:18+00:00",
    "ops": "2026-01-01T00:04:51+00:00",
    "e2e": "2026-01-01T00:07:40+00:00",
}
SECONDS = {"environment": 17.2, "compute": 140.6, "bandwidth": 96.3, "capacity": 32.8, "ops": 168.4, "e2e": 214.9}
PYTHON = "3.12.11"
SAMPLES_PER_BLOCK = 8  # kept of what the protocol takes: the file is committed
LAUNCH_S, EMPTY_PAIR_S = 4.5e-6, 3.1e-6
FOUND = targets.Found(
    kind="rocm", raw_name="AMD Instinct MI355X", arch="gfx950", compute_units=256, total_memory_bytes=309220868096,
    max_clock_hz=2.4e9, count=8, pci_id="1002:75a3",
)  # fmt: skip


# --------------------------------------------------------------------------------------------- a device on paper


COLD_BYTES_S = {"copy": 5.92e12, "mul": 5.88e12, "add": 5.71e12, "triad": 5.69e12, "sum": 6.38e12, "fill": 5.47e12}
HOST_BYTES_S = {"pinned": {"host_to_device": 56.8e9, "device_to_host": 57.4e9},
                "pageable": {"host_to_device": 18.3e9, "device_to_host": 15.1e9}}  # fmt: skip
HOST_LAUNCH_S = 11e-6


def gemm_s(params: dict[str, Any]) -> float:
    """Seconds of a GEMM: launch + max(arithmetic on whole waves of tiles, bytes). About 1550 TFLOP/s at best.

    A batch fills waves with all its tiles. A bias costs a little of each tile, GELU in the same call a little more, and
    in a call of its own a launch and two streams. Where few tiles sum a long K, K is split over idle units.
    """
    m, n, k = (params[x] for x in "mnk")
    batch, op = params.get("batch", 1), params.get("op", "mm")
    steps = min(k, 12288)  # a longer sum gains no more
    layout = {"NN": 1.0, "NT": 0.985, "TN": 1.012}[params.get("layout", "NN")]
    arithmetic = math.inf
    for edge, speed in ((256, 1.0), (128, 0.84), (64, 0.52), (32, 0.25)):
        tiles = batch * math.ceil(m / edge) * math.ceil(n / edge)
        if tiles * 4 <= FOUND.compute_units and k >= 32768:
            tiles *= FOUND.compute_units // tiles
            k_of_tile = k * batch * math.ceil(m / edge) * math.ceil(n / edge) / tiles
        else:
            k_of_tile = k
        on_each = math.ceil(tiles / FOUND.compute_units)
        done = on_each * FOUND.compute_units * edge * edge * k_of_tile * 2  # FLOP of whole waves, idle units included
        arithmetic = min(arithmetic, done / (1.61e15 * speed * layout * steps / (steps + 300)))
    droop = 1 + 0.045 * min(1.0, m * n * k / 16384**3)  # a long GEMM reaches the power limit
    epilogue = {"mm": 1.0, "bmm": 1.0, "addmm": 1.006, "unfused": 1.006, "fused": 1.021}[op]
    split = 0.985 if params.get("reduced_precision") and k >= 32768 else 1.0
    bytes_s = 2 * batch * (m * k + k * n + m * n) / 5.6e12
    gelu_s = LAUNCH_S + 4 * m * n / COLD_BYTES_S["mul"] if op == "unfused" else 0.0
    return LAUNCH_S + max(arithmetic * droop * epilogue * split, bytes_s) + gelu_s


def stream_s(case: Case) -> float:
    """Seconds of a bandwidth case: launch + bytes over HBM, or warm over the L2, the Infinity Cache, then HBM."""
    op = case.params["op"]
    if op == "strided":  # every second element: half of each line is unused; down columns: lines are shared by a tile
        return LAUNCH_S + case.bytes_moved / (3.1e12 if case.params["stride_bytes"] == 8 else 2.2e12)
    if op in bandwidth.HOST_OPS.values():
        return HOST_LAUNCH_S + case.bytes_moved / HOST_BYTES_S[case.params["memory"]][op]
    rate = COLD_BYTES_S[op]
    if case.cache == "warm":
        working_set = 2 * case.params["buffer_bytes"]
        l2, infinity = 32 * 2**20, 256 * 2**20
        hit = min(1.0, infinity / working_set) if working_set < 4 * infinity else 0.0
        per_byte = (1 - hit) / rate + hit / 11.2e12
        rate = 15.5e12 if working_set <= l2 else 1 / per_byte
    elif case.params["buffer_bytes"] < 2**30:
        rate *= 0.97
    return LAUNCH_S + case.bytes_moved / rate


class Clock:
    """Time that passes only where something is timed."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class PaperTimer(GpuTimer):
    """A GpuTimer whose calls return the seconds they would take. Noise: each block's level, and each sample's."""

    def __init__(self, clock: Clock, noise: random.Random):
        self.clock, self.noise, self.empty_pair_s = clock, noise, EMPTY_PAIR_S

    def around(self, sigma: float) -> float:
        """About 1 + N(0, sigma), from sums and products alone, so that every libm gives the same bits."""
        return 1 + sigma * (sum(self.noise.random() for _ in range(4)) - 2) * 1.7320508

    def samples(
        self, call: Callable[[int], float], first: int, count: int, calls: int
    ) -> tuple[list[float], list[str]]:
        level = self.around(0.0022)
        out = [short(call(first) * calls * level * self.around(0.003) + EMPTY_PAIR_S) for _ in range(count)]
        self.clock.now += sum(out) + 2e-4
        return out, []

    def synchronize(self) -> None: ...


def short(value: float) -> float:
    """Four digits more than an event resolves, and a short line in the file."""
    return float(f"{value:.5g}")


class PaperPools:
    """Stands in for `compute.Pools`: the same plan, no tensors."""

    def __init__(self, torch: Any, device: str, dtype: str, elements: int):
        self.elements, self.noise = elements, random.Random(SEED + 1)

    def prepare(self, case: Case, library: str) -> Prepared:
        if case.skipped:
            return Prepared(case)
        if compute.largest_operand(case) > self.elements:
            return Prepared(replace(case, skipped=f"an operand is larger than the planned {self.elements} elements"))
        op = case.params.get("op", "mm")
        call = {"fused": "_addmm_activation", "unfused": "addmm, then gelu"}.get(op, op)
        return Prepared(
            case, call=lambda _: gemm_s(case.params), check=lambda _, full: self.error(case, full),
            backend=f"torch.{call}, {library}",
        )  # fmt: skip

    def error(self, case: Case, full: bool) -> dict[str, Any]:
        """What `checks` says of a BF16 GEMM whose only error is the rounding of its output, and of partial sums where the
        library may round those."""
        u, op = checks.UNIT_ROUNDOFF[case.params["dtype"]], case.params.get("op", "mm")
        split = case.params.get("reduced_precision", False)
        limit = u * (checks.SPLIT if split else 2 if op in ("fused", "unfused") else 1)
        larger = 1.9 if split and case.params["k"] >= 32768 else 1.0
        out = {"check": "freivalds", "freivalds_ratio": short(0.28 + 0.1 * self.noise.random()), "ok": True}
        if full:
            batch = case.params.get("batch", 1)
            out |= {
                "check": "full", "rows_checked": batch * min(max(1, checks.CHECK_ROWS // batch), case.params["m"]),
                "elementwise_ratio": short((0.97 + 0.02 * self.noise.random()) * u / limit * larger),
                "rel_frobenius": short(u * (0.423 + 0.004 * self.noise.random()) * larger), "rel_frobenius_limit": limit,
            }  # fmt: skip
        return out


class PaperBuffers:
    """Stands in for `bandwidth.Buffers`."""

    def __init__(self, torch: Any, device: str, size: int, llc_bytes: int, *_: Any):
        self.size, self.llc_bytes, self.noise = size, llc_bytes, random.Random(SEED + 2)

    def prepare(self, item: Case) -> Prepared:
        if item.skipped:
            return Prepared(item)
        size = item.params["buffer_bytes"]
        if item.params["op"] not in bandwidth.OPS:
            return self.beside(item, size)
        op = bandwidth.OPS[item.params["op"]]
        needed = math.ceil(bandwidth.COLD_FACTOR * self.llc_bytes / (max(1, op.reads + op.writes) * size)) + 1
        sets = 1 if item.cache == "warm" else min(self.size // size, max(1, needed))
        checked = 3 * min(size // bandwidth.ELEMENT_BYTES, 2**20 // 3)
        ratio = 0.0 if op.exact else short(0.4 + 0.1 * self.noise.random())
        return Prepared(
            replace(item, params={**item.params, "operand_sets": sets}),
            call=lambda _: stream_s(item),
            check=lambda *_: bandwidth.checked(ratio, checked),
            backend=f"torch {item.params['op']}",
            threads=1,
        )

    def beside(self, item: Case, size: int) -> Prepared:
        """A strided copy, rotated until what is useful outgrows the caches, or one between host and device."""
        strided = item.params["op"] == "strided"
        sets = math.ceil(bandwidth.COLD_FACTOR * self.llc_bytes / item.bytes_moved) + 1 if strided else 1
        return Prepared(
            replace(item, params={**item.params, "operand_sets": sets}),
            call=lambda _: stream_s(item),
            check=lambda *_: bandwidth.checked(0.0, size // bandwidth.ELEMENT_BYTES),
            backend="torch copy_ of a strided view" if strided else f"torch copy_, {item.params['memory']} memory",
            threads=1,
        )


def paper_anchors(machine: Machine) -> list[Prepared]:
    """Stands in for `timing.anchors`: the same two cases."""
    n, size = timing.ANCHOR_N["gpu"], timing.ANCHOR_COPY_BYTES["gpu"]
    gemm = Case(
        "anchor.gemm", {"m": n, "n": n, "k": n, "dtype": machine.dtype}, flop=2 * n**3, bytes_moved=6 * n * n,
        role="anchor",
    )  # fmt: skip
    copy = Case("anchor.copy", {"buffer_bytes": size, "dtype": "fp32"}, bytes_moved=2 * size, role="anchor")
    copy_s = LAUNCH_S + 2 * size / COLD_BYTES_S["copy"]
    return [
        Prepared(gemm, call=lambda _: gemm_s(gemm.params), backend="torch.mm"),
        Prepared(copy, call=lambda _: copy_s, backend="torch.copy_"),
    ]


def measure_environment(session: Session, machine: Machine, spec: workload.Spec) -> None:
    """The rows of `environment.cases`; its own `measure` times this host."""
    around = session.timer.around
    samplers = {
        "clock.read": (lambda: [short(21.4e-6 * around(0.004)) for _ in range(20)], 1000),
        "clock.fixed_work": (lambda: [short(1.003e-3 * around(0.004)) for _ in range(100)], 1),
        "event.empty_pair": (lambda: [short(EMPTY_PAIR_S * around(0.05)) for _ in range(50)], 1),
    }
    session.run_blocks([
        Prepared(c, sampler=lambda c=c: (samplers[c.name][0](), c), calls=samplers[c.name][1],
                 backend=f"CPython {PYTHON}", threads=1)
        for c in environment.cases(machine.kind)
    ])  # fmt: skip


MEASURE = {
    "environment": measure_environment, "compute": compute.measure, "bandwidth": bandwidth.measure,
    "capacity": capacity.measure, "ops": ops.measure, "e2e": e2e.measure,
}  # fmt: skip


@contextlib.contextmanager
def on_paper() -> Iterator[None]:
    with (
        mock.patch.object(timing, "anchors", paper_anchors),
        mock.patch.object(compute, "Pools", PaperPools),
        mock.patch.object(compute, "blas_library", lambda torch, kind: "preferred BLAS hipBLASLt"),
        mock.patch.object(compute, "no_fused_call", lambda torch, kind: None),
        mock.patch.object(bandwidth, "Buffers", PaperBuffers),
        patches(Paper(gemm_s, COLD_BYTES_S["copy"], LAUNCH_S, SEED + 3), FOUND.total_memory_bytes),
    ):
        yield


# --------------------------------------------------------------------------------------------- the synthetic run


def paper_env() -> dict[str, Any]:
    """env.json of a host with two EPYC 9575F, with the keys of `environment.fingerprint`."""
    cpus = list(range(128))
    per_core = [
        {"level": level, "size_bytes": size, "shared_cpu_list": f"{c},{c + 128}"}
        for level, size in ((1, 48 * 2**10), (2, 2**20))
        for c in cpus
    ]
    l3 = [
        {"level": 3, "size_bytes": 32 * 2**20, "shared_cpu_list": f"{c}-{c + 7},{c + 128}-{c + 135}"}
        for c in range(0, 128, 8)
    ]
    total = 3 * 2**40 - 2**34
    env = {
        "host": {
            "name": "sample-host",
            "system": "Linux 6.8.0-79-generic x86_64",
            "distribution": "Ubuntu 24.04.3 LTS",
            "cpu": {
                "model_name": "AMD EPYC 9575F 64-Core Processor", "vendor": "AuthenticAMD", "family": "26", "model": "2",
                "flags": ["avx2", "fma", "avx512f", "avx512_bf16"], "virtual": False, "printed_hz": 3.3e9,
            },
            "cpus": {
                "affinity": list(range(256)), "cores": cpus, "quota": None,
                "why": "256 CPUs allowed, 128 physical cores", "threads": 128, "online": 256,
            },
            "caches": [*per_core, *l3],
            "llc_bytes": 512 * 2**20,
            "numa_nodes": 2,
            "memory": {
                "total_bytes": total, "available_bytes": total - 2**36, "limit_bytes": None, "bounded_by": "host",
                "usable_bytes": total - 2**36,
            },
            "shm_free_bytes": total // 2,
            "disk_free_bytes": 3 * 10**12,
        },
        "device": FOUND.to_json(),
        "software": {
            "python": PYTHON,
            "packages": {
                "torch": "2.9.1+rocm7.0", "triton": "3.5.1", "numpy": "2.3.5", "pandas": "2.3.3", "papermill": "2.6.0",
                "jupyter-book": "1.0.4.post1", "altair": "6.0.0", "nbconvert": "7.16.6",
            },
            "compiler": "/usr/bin/cc: cc (Ubuntu 13.3.0-6ubuntu2~24.04) 13.3.0",
            "driver": "6.14.14",
        },
        "knobs": {
            "transparent_hugepage": "madvise", "numa_balancing": "0", "governor": "performance", "smt": "on",
            "boot_options": "iommu=pt", "load_average": "1.20 1.05 0.98",
        },
        "variables": {"HSA_NO_SCRATCH_RECLAIM": "1"},
    }  # fmt: skip
    return env | {"checks": environment.checks(env)}


def tool_logs(directory: Path, profile_key: str) -> None:
    """What RVS and TransferBench would print on that device: their shapes, our model's times, noise of their own."""
    noise = random.Random(SEED + 4)
    place = Place("rocm", profile_key, FOUND.count, {"rvs": "rvs", "TransferBench": "TransferBench"}, 36862 * 2**20)
    gst = next(c for c in rvs.commands(place) if c.name.endswith("gst"))
    m, n, k = 8192, 8192, 16384
    seconds = gemm_s({"m": m, "n": n, "k": k, "layout": "NT", "op": "mm"})
    action = re.search(r"name: (\S+)", next(iter(gst.files.values())))[1]
    lines = [f"Action name :{action}", "Module name :gst"]
    for device in (11843, 22907):
        head = f"[{action}] [GPU:: {device:5d}]"
        rates = [round(2 * m * n * k / seconds * (0.985 + 0.01 * noise.random()) / 1e9) for _ in range(5)]
        lines += [f"{head} Start of GPU ramp up", f"{head} End of GPU ramp up", *(f"{head} GFLOPS {r}" for r in rates)]
        lines.append(f"{head} GFLOPS {max(rates)} Target GFLOPS: 0 met: TRUE")
    text = "".join(f"[RESULT] [{4100 + 3 * i:6d}.{100000 + i:<6d}] {line}\n" for i, line in enumerate(lines))
    at = dict(started_utc="2026-01-01T00:12:00+00:00", imported=True)
    running.keep(directory, text, Log("rvs", gst.name, None, gst.argv, next(iter(gst.files.values())), **at))
    local = next(c for c in transferbench.commands(place) if c.name.endswith("local"))
    once = COLD_BYTES_S["copy"] / 2 * (0.99 + 0.01 * noise.random()) / 1e9
    text = (
        f"TransferBench v1.52\nBytes Per Direction {local.argv[-1]}\n"
        "Unidirectional copy peak bandwidth GB/s [Local read / Remote write] (GPU-Executor: GFX)\n"
        f" SRC+EXE\\DST       GPU 00\n  GPU 00  ->  {once:10.2f}\n"
        "                          CPU->CPU  CPU->GPU  GPU->CPU  GPU->GPU\n"
        "Averages (During UniDir):      N/A       N/A       N/A       N/A\n"
    )
    running.keep(directory, text, Log("transferbench", local.name, None, local.argv, **at))


def repeated_runs(directory: Path) -> None:
    """variability.json of three runs, of which this is the first."""
    found = compare.variability([derive.load(directory)])
    data, noise = compare.summary(found), random.Random(SEED + 5)
    data["processes"] += [{**data["processes"][0], "run_id": f"{RUN_ID[:-1]}{i}"} for i in (1, 2)]
    for headline in data["headlines"].values():
        headline["values"] += [short(headline["values"][0] * (0.994 + 0.012 * noise.random())) for _ in range(2)]
        headline["within"] *= 3
    write_json_atomic(directory / "variability.json", data)


def generate(directory: Path) -> None:
    """Write the synthetic run. ValueError below results/, where only measured runs live."""
    directory = Path(directory).resolve()
    roots = [ROOT / "results", *([Path(os.environ["RESULTS_DIR"])] if os.environ.get("RESULTS_DIR") else [])]
    if any(directory.is_relative_to(root.resolve()) for root in roots):
        raise ValueError(f"{directory}: generated numbers are never written below a results directory")
    config = targets.load_config(ROOT / "configs" / "report_config.json")
    settings, spec = Settings(), workload.load(config["project"]["default_workload"])
    selection = targets.resolve(settings.target, FOUND, config)
    profile = selection.found_profile
    machine = Machine(
        SimpleNamespace(
            backends=mock.MagicMock(), bfloat16="bf16", float16="fp16", no_grad=contextlib.nullcontext,
            cuda=SimpleNamespace(synchronize=lambda: None),
        ), "gpu", "cuda", profile.compute_dtype, FOUND.total_memory_bytes,
        profile.llc_bytes, (),
    )  # fmt: skip
    target = {"found": FOUND.to_json(), **selection.to_json()}
    git = {"commit": None, "dirty": None}
    env = paper_env()
    shutil.rmtree(directory, ignore_errors=True)
    write_json_atomic(directory / "env.json", env)
    write_json_atomic(directory / "run.json", {
        "schema": SCHEMA, "method": METHOD, "run_id": RUN_ID, "created_utc": "2026-01-01T00:00:00+00:00",
        "source": "synthetic", "settings": settings.to_json(), "families": list(MEASURE), "target": target,
        "workload": spec.to_json(), "world": 1, "partition": "SPX", "nps": "NPS1", "power_cap_w": 1400.0, "iterations": 1,
        "argv": ["make_sample.py", "mi355x"], "git": git,
    })  # fmt: skip
    for number, (family, measure) in enumerate(MEASURE.items()):
        header = Run(
            run_id=RUN_ID, family=family, method=METHOD, workload=spec.to_json(), target=target,
            parameters={
                **settings.to_json(), "dtype": machine.dtype, "threads": None, "affinity": list(range(256)),
                "bound": True, "memory_bytes": machine.memory_bytes, "llc_bytes": machine.llc_bytes,
                "llc_assumed": False, "numa_nodes": machine.numa_nodes,
            },
            software={
                "python": PYTHON, "interpreter": "python3", "packages": env["software"]["packages"],
                "threads_variable": None,
            },
            git=git, argv=["notebook"], created_utc=STARTED[family], source="synthetic",
        )  # fmt: skip
        clock = Clock()
        timer = PaperTimer(clock, random.Random(SEED * 10 + number))
        with Writer(records_path(directory, family), header) as out, on_paper():

            def write(record: Record, out: Writer = out) -> None:
                kept = record.samples_s if record.role == "warmup" else record.samples_s[:SAMPLES_PER_BLOCK]
                out.write(replace(record, samples_s=kept, source="synthetic"))

            session = Session(
                family, timer, write, BUDGETS[settings.budget], progress=lambda *_, **__: None, clock=clock
            )
            measure(session, machine, spec)
    write_json_atomic(directory / "status.json", {
        family: {"status": "ok", "message": "", "seconds": SECONDS[family], "started_utc": STARTED[family]}
        for family in MEASURE
    })  # fmt: skip
    tool_logs(directory, profile.key)
    repeated_runs(directory)


# ------------------------------------------------------------------------------------------------- the CPU's run


def measure_cpu(directory: Path) -> None:
    """Run `escher run --budget quick` on this host and keep its raw part without names and paths of the machine."""
    arguments = ["run", "--device", "cpu", "--budget", "quick", "--families", " ".join(MEASURE)]
    with tempfile.TemporaryDirectory() as results:
        command = [sys.executable, "-m", "escher_book.cli", *arguments, "--results-dir", results]
        made = Path(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT).stdout.strip())
        shutil.rmtree(directory, ignore_errors=True)
        (directory / "records").mkdir(parents=True)
        info, env = (json.loads((made / name).read_text("utf-8")) for name in ("run.json", "env.json"))
        info["argv"] = ["escher", *arguments]
        env["host"]["name"] = "sample-host"
        env["variables"] = {}
        write_json_atomic(directory / "run.json", info)
        write_json_atomic(directory / "env.json", env)
        shutil.copyfile(made / "status.json", directory / "status.json")
        for path in sorted((made / "records").glob("*.jsonl")):
            head, _, body = path.read_text("utf-8").partition("\n")
            header = json.loads(head)
            header["software"] |= {"interpreter": "python3"}
            header["argv"] = ["notebook"]
            line = json.dumps(header, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
            (directory / "records" / path.name).write_text(f"{line}\n{body}", "utf-8")


def main(names: list[str]) -> None:
    makers = {"cpu": measure_cpu, "mi355x": generate}
    unknown = [name for name in names if name not in makers]
    if unknown:
        sys.exit(f"error: unknown sample {unknown[0]!r}; known: {', '.join(makers)}")
    for name in names or makers:
        makers[name](HOME / name)
        print(HOME / name)


if __name__ == "__main__":
    main(sys.argv[1:])
