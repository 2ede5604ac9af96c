"""A real run from the command line to pages in a browser, and runs that end badly."""

from __future__ import annotations

import csv
import json
import math
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from html import unescape
from pathlib import Path
from typing import Any

import browser_helpers
import nbformat
import psutil
import pytest
from conftest import SAMPLES, compiles
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook
from test_cli import ROOT, assert_one_line_error, escher
from test_report import contents, page_texts

from escher_book import cli, runner, tables
from escher_book.pages import compute as page_compute
from escher_book.report import heading
from escher_kernels import records, targets
from escher_kernels.run import families
from validation import derive, memory, roofline

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # the first one measures six families
MEASURE = ("--device", "cpu", "--budget", "quick")
PROSE = ("glossary.html", "notebooks/methodology.html", "notebooks/wan2_2.html")
PAGES = families()
FAMILIES = list(PAGES)
SCRIPTED = ("environment", "compute", "bandwidth")  # of notebooks that end badly


def visible_text(page: str) -> str:
    """What a reader of an HTML page sees, on one line."""
    page = re.sub(
        r"<(script|style)\b.*?</\1>",
        " ",
        page[page.index("bd-article") :] if "bd-article" in page else page,
        flags=re.S,
    )
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", page)).split())


def runs_in(root: Path) -> list[Path]:
    """The runs below a results directory, without the link to the newest."""
    return sorted(path for path in root.iterdir() if not path.is_symlink())


def timed_rows(run: derive.LoadedRun) -> list[derive.Row]:
    return [r for family in run.files for r in derive.rows(run.records(family), run.config) if r.time_s]


# --------------------------------------------------------------------------------------------- one real book


@pytest.fixture(scope="session")
def book(tmp_path_factory) -> Path:
    """The run directory of a real `escher book` at budget quick, in a path with a space and an umlaut."""
    root = tmp_path_factory.mktemp("tmp") / "esch er ü"
    done = escher("book", *MEASURE, "--results-dir", root, timeout=900)
    assert done.returncode == 0, done.stderr
    [run_dir] = runs_in(root)
    assert done.stdout.strip() == str(run_dir / "site" / "index.html")
    assert "Traceback" not in done.stderr
    return run_dir


def test_every_family_was_measured(book):
    run = derive.load(book)
    assert list(run.status) == FAMILIES and {s["status"] for s in run.status.values()} == {"ok"}
    for family in FAMILIES:
        assert not run.files[family].truncated
        rows = [r for r in derive.rows(run.records(family), run.config) if r.role == "case"]
        assert len(rows) >= 2
        if family == "capacity":  # amounts, no times
            continue
        for row in rows:
            assert row.skipped or (row.time_s and row.time_s.samples >= 3 and not row.wrong), row
        assert sum(bool(r.skipped) for r in rows) <= len(rows) / 2
    compute, bandwidth = derive.compute(run), derive.bandwidth(run)
    assert compute.roof.flop_s.median > 1e9 and bandwidth.roof.bytes_s.median > 1e8
    assert {r.error["ok"] for r in [compute.roof, *compute.rows, *bandwidth.rows]} == {True}


def test_the_run_is_judged(book):
    """Every artefact is there, every number plausible or flagged, and the pages say what the file says."""
    card = records.read_json(book / "scorecard.json")
    status = {c["sc"]: c["status"] for c in card["criteria"]}
    assert list(status) == ["HOST CPU", *(f"SC-{n}" for n in range(13))]
    assert status["SC-5"] == status["SC-6"] == "PASS" and card["verdict"] in ("GO", "CONDITIONAL GO")
    assert card["exit_status"] == 0 and not [i for i in card["implausible"] if i["level"] == "INVALID"]
    for page, shown in (("index", lambda r: r.partition("; ")[0]), ("scorecard", str)):
        text = visible_text((book / "site" / f"{page}.html").read_text("utf-8"))
        assert card["verdict"] in text and all(" ".join(shown(r).split()) in text for r in card["reasons"][:3]), page
    assert card["verdict"] in (book / "scorecard.md").read_text("utf-8")


def test_the_workload_is_explained(book):
    """Capacity, every operation, eager and compiled, and a ledger that adds up."""
    run = derive.load(book)
    assert memory.capacity(run).total.bytes >= 2**28
    ops, e2e = roofline.ops(run), roofline.e2e(run)
    assert all(r.default.time_s and r.optimized and r.theory_s for r in ops.rows)
    assert {r.error["ok"] for r in ops.every if r.error} == {True}
    assert "eager" in e2e.rows and e2e.counter.drift_frac == 0
    if compiles.args[0]:  # no compiler here, or one that does not quote this path
        assert "unavailable" in e2e.unavailable["compiled"] and e2e.speedup is None
    else:
        assert "compiled" in e2e.rows and len(e2e.compile_errors) == 2 and all(e["ok"] for e in e2e.compile_errors)
    for mode in e2e.rows:
        ledger = roofline.ledger(run, mode)
        assert math.isclose(ledger.floor_s + sum(ledger.parts.values()), ledger.total_s)
    assert {path.stem.partition("_")[0] for path in book.glob("plots/*.svg")} >= {
        "A2", "A3", "A3b", "A6", "A7", "A8", "A8b", "A8c", "A10",
    }  # fmt: skip


def test_no_file_holds_a_number_that_is_none(book):
    for path in [*book.glob("*.json"), *book.glob("records/*.jsonl"), *book.glob("tables/*.csv")]:
        assert not re.search(r"\b(NaN|-?Infinity|nan|inf)\b", path.read_text("utf-8")), path
    for name, page in page_texts(book / "site").items():
        cells = re.findall(r"<td[^>]*>([^<]*)</td>", page)
        assert not [c for c in cells if re.search(r"\b(NaN|nan|None)\b", c)] or name in PROSE, name


def test_the_run_directory_holds_what_it_should_and_nothing_temporary(book):
    assert {p.name for p in book.iterdir()} == {
        "run.json", "env.json", "status.json", "records", "raw", "telemetry", "notebooks", "tables", "plots", "book", "site",
        "site.log", "artefacts.json", "scorecard.json", "scorecard.md", "validation.json", "validation.md",
    }  # fmt: skip
    for stem in PAGES.values():
        made = nbformat.read(book / "notebooks" / f"{stem}.ipynb", as_version=4)
        assert not [o for c in made.cells for o in c.get("outputs", []) if o.output_type == "error"]
    log = (book / "raw" / "run.log").read_text("utf-8")
    assert all(f"{family}: done" in log for family in FAMILIES)


@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["file", "http"])
def test_every_page_in_a_browser_without_a_network(book, scheme):
    report = browser_helpers.check_site(book / "site", scheme)
    assert not report.problems, "\n".join(report.problems)
    assert set(report.marks) == {f"notebooks/{PAGES[f]}.html" for f in FAMILIES if f != "environment"}
    assert all(text for text in report.tooltips.values())


def hover_text(value: float) -> str:
    """A value as the charts' tooltips show it: four significant digits, without trailing zeros."""
    rounded = float(f"{value:.4g}")
    text = f"{rounded:,.{max(0, 3 - math.floor(math.log10(abs(rounded))))}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def hover(page: Any, chart: Any, most: int = 8) -> dict[str, dict[str, str]]:
    """Case -> its tooltip, of up to `most` symbols of a chart."""
    chart.scroll_into_view_if_needed()
    symbols = chart.locator("svg g.mark-symbol.role-mark > path")
    found, count = {}, symbols.count()
    for number in sorted({round(i * (count - 1) / max(1, most - 1)) for i in range(most)}):
        box = symbols.nth(number).bounding_box()
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        page.wait_for_timeout(60)
        cells = page.locator("#vg-tooltip-element.visible td").all_inner_texts()
        tip = dict(zip(cells[::2], cells[1::2], strict=True))
        if "case" in tip:  # a line to compare with may lie over a symbol
            found[tip["case"]] = tip
    return found


@pytest.mark.browser
def test_charts_draw_every_row_and_show_its_numbers(book):
    run = derive.load(book)
    compute, bandwidth = derive.compute(run), derive.bandwidth(run)
    drawn = {
        "01_compute": [
            ([compute.roof, *compute.of("square", "workload")], "flop_s", 1e12, "TFLOP/s"),
            (compute.of("skew"), "flop_s", 1e12, "TFLOP/s"),
        ],
        "02_bandwidth": [
            (bandwidth.rows, "bytes_s", 1e9, "GB/s"),
            (bandwidth.cache_curve, "bytes_s", 1e9, "GB/s"),
        ],
    }
    problems: list[str] = []
    with browser_helpers.browser() as instance, browser_helpers.address(book / "site", "file") as base:
        page = browser_helpers.watched_page(instance, problems, viewport={"width": 1300, "height": 900})
        for name, charts in drawn.items():
            page.goto(f"{base}/notebooks/{name}.html")
            browser_helpers.chart_marks(page, problems)
            assert page.locator(".escher-vega").count() == len(charts)
            for number, (rows, rate, scale, unit) in enumerate(charts):
                timed = {r.case: getattr(r, rate) for r in rows if getattr(r, rate)}
                chart = page.locator(".escher-vega").nth(number)
                assert chart.locator("svg g.mark-symbol.role-mark > path").count() == len(timed)
                tips = hover(page, chart)
                assert len(tips) >= 3 and set(tips) <= set(timed), tips
                for case, tip in tips.items():
                    estimate = timed[case]
                    shown = {tip[unit]: estimate.median, tip["interval from"]: estimate.lo, tip["to"]: estimate.hi}
                    assert list(shown) == [hover_text(v / scale) for v in shown.values()], (case, tip)
                    assert tip["samples"] == str(estimate.samples)
    assert not problems, "\n".join(problems)


def test_tables_show_the_records_numbers(book):
    run = derive.load(book)
    text = visible_text((book / "site" / "notebooks" / "01_compute.html").read_text("utf-8"))
    compute, bandwidth = derive.compute(run), derive.bandwidth(run)
    for row in (r for r in [compute.roof, *compute.rows, *compute.pairs] if r.flop_s):
        assert tables.value(row.flop_s, 1e12) in text and tables.interval(row.flop_s, 1e12) in text
    text = visible_text((book / "site" / "notebooks" / "02_bandwidth.html").read_text("utf-8"))
    for row in [*bandwidth.rows, *bandwidth.strided, *bandwidth.cache_curve]:
        assert tables.value(row.bytes_s, 1e9) in text and tables.interval(row.bytes_s, 1e9) in text


# --------------------------------------------------------------------------------------------- a target that is not here


@pytest.fixture(scope="session")
def other_target(tmp_path_factory) -> Path:
    """The CPU's records in a run that asked for the MI355X, and its book."""
    directory = Path(shutil.copytree(SAMPLES / "cpu", tmp_path_factory.mktemp("target") / "run"))
    info = records.read_json(directory / "run.json")
    found = targets.Found.from_json(info["target"]["found"])
    selection = targets.resolve("mi355x", found, targets.load_config())
    info["settings"]["target"] = "mi355x"
    info["target"] = {"found": found.to_json(), **selection.to_json()}
    records.write_json_atomic(directory / "run.json", info)
    done = escher("report", directory, timeout=200)
    assert done.returncode == 0, done.stderr
    return directory


def test_another_target_is_said_on_every_page(other_target):
    for stem in ("index", *(f"notebooks/{stem}" for stem in PAGES.values())):
        text = visible_text((other_target / "site" / f"{stem}.html").read_text("utf-8"))
        assert "The target is AMD Instinct MI355X, but this run measured CPU host" in text, stem
    compute = visible_text((other_target / "site" / "notebooks" / "01_compute.html").read_text("utf-8"))
    bandwidth = visible_text((other_target / "site" / "notebooks" / "02_bandwidth.html").read_text("utf-8"))
    assert re.search(r"2,516\.6|2,517", compute) and "8,000" in bandwidth
    assert "HBM bandwidth" not in bandwidth and "Memory bandwidth: CPU host" in bandwidth


def test_no_page_and_no_table_divides_what_was_measured_by_another_devices_peak(other_target):
    run = derive.load(other_target)
    profile = run.selection.profile
    ratios = set()
    for row in timed_rows(run):
        for estimate, peak in (
            (row.flop_s, profile.dense_peak_flop_s["bf16"]),
            (row.bytes_s, profile.bandwidth_bytes_s),
        ):
            if estimate:
                ratios |= {x / peak for x in (estimate.median, estimate.lo, estimate.hi)}
    ratios |= {p.bytes_s.median / profile.bandwidth_bytes_s for p in derive.bandwidth(run).plateaus}
    ratios |= {p.best_flop_s / profile.dense_peak_flop_s["bf16"] for p in derive.compute(run).probes}
    assert len(ratios) > 100
    compute = derive.compute(run)
    every = [compute.roof, *compute.rows, *compute.pairs]
    own = {tables.percent(b.frac(r.flop_s)) for b in compute.bases for r in every}
    for sentence in (page_compute.finding(run), page_compute.shape_cost(run)):  # a row's share of another row
        own |= set(re.findall(r"[\d.,]+ %", sentence.markdown))
    for reason in records.read_json(other_target / "scorecard.json")["reasons"]:  # spreads, shares of measured roofs
        own |= set(re.findall(r"[\d.,]+ %", reason))
    own |= {"1 %", "5 %"}  # and limits, in sentences
    shown = {tables.number(100 * ratio, digits) for ratio in ratios for digits in (1, 2, 3, 4)}
    pages = page_texts(other_target / "site")
    assert len(pages) >= 8
    for name, page in pages.items():
        text = visible_text(page)
        assert "% of rated" not in text, name
        assert "MFU, rated" not in text and "side by the rated ridge" not in text, name
        if Path(name).stem in ("index", "01_compute", "02_bandwidth"):  # those with shares of a peak of few rows
            found = set(re.findall(r"(?<![\d.,])([\d,]*\.?\d+ ?%)", text)) - own
            assert not found & {f"{n} %" for n in shown}, name
    for path in (other_target / "tables").glob("*.csv"):
        for row in csv.DictReader(path.open(encoding="utf-8")):
            for column, cell in row.items():
                assert "rated" not in column or "frac" not in column, (path, column)
                try:
                    value = float(cell)
                except ValueError:
                    continue
                assert not any(math.isclose(value, f * r, rel_tol=1e-9) for r in ratios for f in (1, 100)), (path, row)


def test_a_measured_run_for_another_target(tmp_path):
    done = escher(
        "run", *MEASURE, "--target", "mi355x", "--families", "bandwidth", "--results-dir", tmp_path, timeout=290
    )
    assert done.returncode == 0, done.stderr
    [run_dir] = runs_in(tmp_path)
    assert run_dir.name.startswith("escher_14b_480p-mi355x-") and done.stdout.strip() == str(run_dir)
    run = derive.load(run_dir)
    assert run.selection.profile.key == "mi355x" and not run.selection.same_device
    assert run.found.kind == "cpu" and run.selection.found_profile.key == "cpu"
    bandwidth = derive.bandwidth(run)
    assert bandwidth.roof.bytes_s.median > 1e8 and bandwidth.bases[0].rate == 8e12
    assert bandwidth.bases[0].frac(bandwidth.roof.bytes_s) is None


# --------------------------------------------------------------------------------------------- notebooks that end badly

PARAMETERS = 'run_dir = ""\nreplay = False\nsettings = {}\nprofile = None\niteration = 1\nresume = False'
IMPORTS = """import json, os, shutil, signal, subprocess, sys, time
from pathlib import Path
from escher_book import findings, notebook, tables
from escher_book.pages import {family} as page
FAMILY, SAMPLE = {family!r}, Path({sample!r})
def header():
    "The sample's header, as one of this run."
    about = json.loads((Path(run_dir) / "run.json").read_text("utf-8"))
    first = (SAMPLE / "records" / {records!r}).read_text("utf-8").partition("\\n")[0]
    return json.loads(first) | dict(run_id=about["run_id"], target=about["target"])
def keep(lines):
    "What a killed measurement leaves: the header and some records."
    text = (SAMPLE / "records" / {records!r}).read_text("utf-8").splitlines(keepends=True)
    body = "".join([json.dumps(header()) + "\\n", *text[1:lines]])
    (Path(run_dir) / "records" / {records!r}).write_text(body, "utf-8")
"""
SHOW = "run = notebook.collect(FAMILY, run_dir, True, settings, profile)\npage.{table}(run)"
TABLES = {"environment": "machine", "compute": "gemms", "bandwidth": "cold_rows", "capacity": "amounts", "ops": "times",
          "e2e": "mfu"}  # fmt: skip


@pytest.fixture
def scripted(tmp_path, monkeypatch) -> Callable[..., None]:
    """`scripted(compute="...")`: notebooks whose measuring cell is the given code; the others keep whole records."""

    def write(**measuring: str) -> None:
        for family, stem in PAGES.items():
            head = IMPORTS.format(family=family, sample=str(SAMPLES / "cpu"), records=f"{stem}.jsonl")
            body = measuring.get(family, "keep(None)")
            cells = [
                new_markdown_cell("# " + heading(ROOT / "notebooks" / f"{stem}.ipynb")),
                new_code_cell(PARAMETERS, metadata={"tags": ["parameters"]}),
                new_code_cell(head),
                new_code_cell("if not replay:\n" + "\n".join("    " + line for line in body.splitlines())),
                new_code_cell(SHOW.format(table=TABLES[family])),
            ]
            made = new_notebook(cells=cells, metadata={"kernelspec": {"name": "python3", "display_name": "Python 3"}})
            (tmp_path / "notebooks").mkdir(exist_ok=True)
            nbformat.write(made, tmp_path / "notebooks" / f"{stem}.ipynb")
        monkeypatch.setattr(runner, "NOTEBOOKS", tmp_path / "notebooks")

    return write


def exit_status(*arguments: object) -> int:
    """The command line in this process, where the notebooks are the scripted ones."""
    with pytest.raises(SystemExit) as ended:
        cli.main([str(a) for a in arguments])
    return ended.value.code


def alive(mark: str) -> list[psutil.Process]:
    """Processes whose command line holds `mark`."""
    out = []
    for process in psutil.process_iter():
        try:
            if mark in " ".join(process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE:
                out.append(process)
        except psutil.Error:
            continue
    return out


def assert_none_alive(mark: str) -> None:
    for _ in range(100):
        if not alive(mark):
            return
        time.sleep(0.1)
    pytest.fail(f"still alive: {[p.cmdline() for p in alive(mark)]}")


def test_a_killed_and_a_failed_notebook_keep_their_records_and_the_others_run(scripted, tmp_path, capsys):
    scripted(
        compute="keep(100)\nos.kill(os.getpid(), signal.SIGKILL)",
        bandwidth="keep(40)\nraise ValueError('no <buffer> | *x*')",
    )
    chosen = ("--families", " ".join(SCRIPTED))
    assert exit_status("book", *MEASURE, *chosen, "--results-dir", tmp_path / "results") == 1
    [run_dir] = runs_in(tmp_path / "results")
    assert "Traceback" not in capsys.readouterr().err
    status = records.read_json(run_dir / "status.json")
    assert {family: s["status"] for family, s in status.items()} == {
        "environment": "ok", "compute": "died", "bandwidth": "failed",
    }  # fmt: skip
    assert status["bandwidth"]["message"] == "ValueError: no <buffer> | *x*"
    run = derive.load(run_dir)
    assert len(run.records("compute")) == 99 and len(run.records("bandwidth")) == 39
    text = {p: visible_text((run_dir / "site" / f"{p}.html").read_text("utf-8"))
            for p in ("index", *(f"notebooks/{s}" for s in PAGES.values()))}  # fmt: skip
    assert "This notebook" not in text["notebooks/00_environment"]
    assert (
        "This notebook's kernel died: the kernel was killed (out of memory?). 99 records were kept"
        in text["notebooks/01_compute"]
    )
    assert "This notebook failed: ValueError: no <buffer> | *x*. 39 records were kept" in text["notebooks/02_bandwidth"]
    assert "died" in text["index"] and "failed" in text["index"]
    shown = [r for r in derive.compute(run).of("square") if r.flop_s]
    assert shown and all(tables.value(r.flop_s, 1e12) in text["notebooks/01_compute"] for r in shown)
    assert_none_alive(str(run_dir))


def test_a_timeout_ends_the_notebook_and_what_it_started(scripted, tmp_path, capsys):
    mark = f"escher-child-{os.getpid()}"
    sleeper = f"subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)', {mark!r}])\ntime.sleep(600)"
    scripted(environment="keep(5)\n" + sleeper)
    chosen = ("--families", "environment compute", "--timeout-s", 6)
    assert exit_status("run", *MEASURE, *chosen, "--results-dir", tmp_path / "results") == 1
    [run_dir] = runs_in(tmp_path / "results")
    status = records.read_json(run_dir / "status.json")
    assert {family: s["status"] for family, s in status.items()} == {"environment": "timeout", "compute": "ok"}
    assert status["environment"]["message"] == "not done after 6 s"
    assert "environment: TIMEOUT: not done after 6 s" in capsys.readouterr().err
    assert len(derive.load(run_dir).records("environment")) == 4
    assert_none_alive(mark)
    assert_none_alive(str(run_dir))


def test_ctrl_c_ends_a_run_in_one_line_and_keeps_its_records(tmp_path):
    command = [
        sys.executable,
        "-m",
        "escher_book.cli",
        "run",
        *MEASURE,
        "--families",
        "bandwidth",
        "--results-dir",
        tmp_path,
    ]
    started = subprocess.Popen(
        list(map(str, command)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        cwd=ROOT,
    )
    try:
        for _ in range(600):
            if any(p.read_text("utf-8").count("\n") > 12 for p in tmp_path.glob("*/records/*.jsonl")):
                break
            time.sleep(0.1)
        os.killpg(started.pid, signal.SIGINT)
        out, err = started.communicate(timeout=60)
    finally:
        started.kill()
    [run_dir] = runs_in(tmp_path)
    assert started.returncode == 130, err
    assert out == "" and "Traceback" not in err
    assert err.splitlines()[-1] == f"interrupted; what was measured is kept. Go on: escher book --resume {run_dir}"
    run = derive.load(run_dir)
    assert run.status["bandwidth"]["status"] == "interrupted"
    assert len(run.records("bandwidth")) >= 10 and not run.files["bandwidth"].truncated
    assert_none_alive(str(run_dir))
    assert not list(run_dir.glob(".*"))


def test_two_runs_at_once_one_killed_and_gone_on_with(tmp_path):
    """Two in one second have directories of their own; SIGKILL loses no record, and what is finished stays as it is."""
    wanted = ("run", *MEASURE, "--families", "environment", "--iterations", "2", "--results-dir", tmp_path / "my results")
    command = [sys.executable, "-m", "escher_book.cli", *map(str, wanted)]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT) for _ in "ab"]
    try:
        for _ in range(1200):
            there = sorted((tmp_path / "my results").glob("*/records/*.jsonl"))
            if len(there) == 2 and all(p.read_text("utf-8").count("\n") > 5 for p in there):
                break
            time.sleep(0.1)
        started[0].kill()
        _, (out, err) = (process.communicate(timeout=240) for process in started)
    finally:
        for process in started:
            process.kill()
    assert started[1].returncode == 0 and err.count("RESULT: iteration=") == 2, err
    finished = Path(out.strip())
    [killed] = [path for path in runs_in(tmp_path / "my results") if path != finished]
    assert_none_alive(str(killed))
    [path] = (killed / "records").iterdir()
    before = records.read(path).records
    done = escher("run", "--resume", killed, "--results-dir", tmp_path / "my results", timeout=240)
    assert done.returncode == 0 and done.stdout.strip() == str(killed), done.stderr
    found = records.read(path).records
    assert found[: len(before)] == before
    blocks = [(r.iteration, r.case, r.block) for r in found if r.samples_s]
    other = records.read(finished / "records" / path.name).records
    assert len(blocks) == len(set(blocks)) == len([r for r in other if r.samples_s])
    info = records.read_json(killed / "run.json")
    assert len(info["resumed_utc"]) == 1 and (tmp_path / "my results" / "latest").resolve() == killed.resolve()
    run = derive.load(killed)
    assert [r.iteration for r in run.iterations] == [1, 2] and run.status["environment"]["status"] == "ok"


@pytest.mark.skipif(not shutil.which("taskset"), reason="no taskset to stand in for numactl")
def test_a_run_under_numactl_is_planned_for_the_cpus_it_is_bound_to(tmp_path):
    tool, cpu = tmp_path / "bin" / "numactl", min(os.sched_getaffinity(0))
    tool.parent.mkdir()
    tool.write_text(f'#!/bin/sh\n[ "$1" = --physcpubind={cpu} ] || exit 1\nshift\nexec taskset -c {cpu} "$@"\n', "utf-8")
    tool.chmod(0o755)
    environ = {"PATH": f"{tool.parent}{os.pathsep}{os.environ['PATH']}"}
    wanted = ("--families", "environment", "--numactl", f"--physcpubind={cpu}", "--results-dir", tmp_path / "results")
    done = escher("run", *MEASURE, *wanted, environ=environ, timeout=240)
    assert done.returncode == 0, done.stderr
    [run_dir] = runs_in(tmp_path / "results")
    run = derive.load(run_dir)
    assert run.env["host"]["cpus"]["affinity"] == [cpu] and run.found.compute_units == 1
    assert run.files["environment"].run.parameters["affinity"] == [cpu]
    assert run.info["tuning"]["numactl"] == f"--physcpubind={cpu}"


# --------------------------------------------------------------------------------------------- no room


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """A file system of 600 KiB; skipped where it cannot be mounted."""
    folder = tmp_path / "small"
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip("no file system can be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=False)


def test_a_full_disk_ends_a_run_in_one_line_with_whole_records(scripted, small_disk, tmp_path, capsys):
    scripted(environment="""from escher_kernels import records
content = records.read(SAMPLE / "records" / "00_environment.jsonl")
run = records.Run(**{k: v for k, v in header().items() if k != "kind"})
with records.Writer(Path(run_dir) / "records" / "00_environment.jsonl", run) as out:
    while True:
        for r in content.records:
            out.write(r)""")  # fmt: skip
    status = exit_status("run", *MEASURE, "--families", "environment", "--results-dir", small_disk / "results")
    assert status in (1, 2)
    err = capsys.readouterr().err
    assert "the disk is full; free some space" in err and "Traceback" not in err
    [run_dir] = runs_in(small_disk / "results")
    run = derive.load(run_dir)
    assert len(run.records("environment")) > 12
    for path in run_dir.glob("notebooks/*.ipynb"):
        json.loads(path.read_text("utf-8"))


def limit_file_size() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))


def test_a_report_that_may_not_write_large_files_leaves_the_old_ones_whole(other_target, tmp_path):
    directory = Path(shutil.copytree(other_target, tmp_path / "run"))
    before = {part: contents(directory / part) for part in ("notebooks", "tables", "plots", "book", "site", "records")}
    done = escher("report", directory, preexec_fn=limit_file_size)
    done.stderr = done.stderr.removeprefix("building the book\n")
    assert_one_line_error(done, "cannot be written", "file-size limit", "ulimit -f")
    assert {part: contents(directory / part) for part in before} == before
    assert not list(directory.rglob(".*partial*")) and not list(directory.glob(".jupyter-*"))
