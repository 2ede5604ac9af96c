"""From the raw part of a run to its book: replay the notebooks, write tables and plots, judge, stage, build.

Nothing here measures, and nothing needs torch: a run can be copied to another machine and its book built there.
"""

from __future__ import annotations

import csv
import hashlib
import html
import importlib
import io
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from escher_book import findings, run_page, runner, stage, tables, vega, verdict
from escher_book.pages import environment
from escher_book.runner import Console, Outcome, RunError
from escher_kernels.records import RecordError, read_json, write_bytes_atomic, write_json_atomic, write_text_atomic
from escher_kernels.run import ROOT, Settings
from validation import artefacts, compare, crosscheck, derive, iterations, scorecard
from validation import config as configuration
from validation.derive import LoadedRun
from validation.scorecard import Scorecard

REPLAY_TIMEOUT_S = 300
BASELINES = "baselines"  # beside the runs: <workload>-<target>-<kind>/<run>/
ENDED = {
    "failed": "This notebook failed",
    "timeout": "This notebook ran out of time",
    "died": "This notebook's kernel died",
    "interrupted": "This notebook was interrupted",
    "running": "The run was killed while it measured this family",
    "unknown": "How this family ended was not recorded, so it may be incomplete",
}


@dataclass(frozen=True)
class Book:
    """How the build went, the pages that could not be made from their records ("family: why"), and the judgement."""

    built: stage.BuildResult
    broken: list[str]
    card: Scorecard


def make(run_dir: Path, console: Console, executed: dict[str, Any] | None = None) -> Book:
    """Build the pages of a run into run_dir/site/. `executed`: families whose notebook was just executed and is whole.

    The artefacts are judged last: the pages are written as they will be if all that is declared comes out whole, and
    once more where it does not. Raises RunError, RecordError, ConfigError or BookError, each one line.
    """
    run = derive.load(run_dir, lenient=True)
    try:
        settings = Settings.from_json(run.info["settings"])
    except (KeyError, TypeError, ValueError) as exc:
        raise RunError(f"{run_dir / 'run.json'}: settings cannot be used: {exc}") from None
    replayed: dict[str, Outcome] = {}
    with runner.private_kernel(run_dir):
        console("building the book")
        for family in runner.families():
            if family in run.files and not (executed or {}).get(family):
                replayed[family] = runner.execute(run_dir, family, True, settings, None, console, REPLAY_TIMEOUT_S)
    write_tables_and_plots(run)
    artefacts.declare(run_dir, ("html",), declared(run))
    promised = replace(artefacts.required(run), missing=(), broken=())
    card = scorecard.judge(run, promised)
    built = _build(run, card, replayed)
    if built.ok and (found := scorecard.judge(run)) != card:  # something is missing after all
        card, built = found, _build(run, found, replayed)
    elif not built.ok:
        card = scorecard.judge(run)
        write_judgement(run, card)
    broken = [f"{family}: {outcome.message}" for family, outcome in replayed.items() if not outcome.ok]
    return Book(built, broken, card)


def _build(run: LoadedRun, card: Scorecard, replayed: dict[str, Outcome]) -> stage.BuildResult:
    """Judgement, staging and build for one state of the scorecard."""
    run_dir = run.directory
    checks = write_judgement(run, card)
    meta = stage.BookMeta(
        title=run.config["project"]["title"],
        run_id=run.info["run_id"],
        author=run.config["project"]["author"],
        watermark="SYNTHETIC" if run.synthetic else "",
        watermark_note="Synthetic run: generated numbers, nothing was measured." if run.synthetic else "",
    )
    generated = {
        "index.md": landing(run, card),
        "scorecard.md": verdict.scorecard_page(run, card),
        "validation.md": verdict.validation_page(run, checks),
        "run.md": run_page.page(run),
        "comparison.md": verdict.comparison_page(run, against_baseline(run), spread(run)),
        "glossary.md": glossary(run.config),
    }
    stage.stage(run_dir, ROOT, run_dir / "book", pages(run, replayed), meta, generated)
    return stage.build(run_dir / "book", run_dir / "site")


def write_judgement(run: LoadedRun, card: Scorecard) -> list[crosscheck.Check]:
    """scorecard.{json,md} and validation.{json,md}. Returns the checks against outside tools."""
    try:
        checks = crosscheck.checks(run)
    except RecordError as exc:
        checks = [crosscheck.Check("raw/tools", "the kept logs", crosscheck.INCOMPLETE, str(exc))]
    write_json_atomic(run.directory / "scorecard.json", scorecard.to_json(card))
    write_text_atomic(run.directory / "scorecard.md", verdict.scorecard_page(run, card, markdown=True))
    write_json_atomic(run.directory / "validation.json", crosscheck.to_json(checks))
    write_text_atomic(run.directory / "validation.md", verdict.validation_page(run, checks, markdown=True))
    for table in (*judged_tables(card, checks), *run_page.csv_tables(run)):
        write_text_atomic(run.directory / "tables" / f"{table.name}.csv", as_csv(tables.rows(table)))
    if run.repeats:
        write_json_atomic(run.directory / iterations.FILE, iterations.summary(run))
    return checks


def against_baseline(run: LoadedRun) -> compare.Comparison | str:
    """This run against the baseline of its kind; why not, as a sentence."""
    try:
        folder = next((f for f in baseline_folders(run) if f.is_dir()), None)
        runs = [derive.load(path.parent) for path in sorted(folder.glob("*/run.json"))] if folder else []
        if not runs:
            return "No baseline is set for this device and workload; escher baseline set RUN... keeps runs as one."
        if run.info["run_id"] in [r.info["run_id"] for r in runs]:
            return "This run is part of the baseline."
        return compare.compare(runs, [run])
    except (RecordError, compare.CompareError) as exc:
        return f"Not compared: {exc}."


def baseline_folders(run: LoadedRun, root: Path | None = None) -> list[Path]:
    """Where the baseline of a run's kind may lie: below `root`, else beside the run or in the results directory. A kind
    is all that two runs must have in common, so no machine takes the place of another."""
    profile = run.selection.found_profile
    kind = hashlib.sha256(json.dumps(compare.identity(run), sort_keys=True).encode()).hexdigest()[:8]
    name = f"{run.info['workload'].get('name', 'unknown')}-{profile.key if profile else 'unknown'}-{kind}"
    roots = [root] if root else [run.directory.parent, runner.results_root(None)]
    return [r / BASELINES / name for r in dict.fromkeys(roots)]


def spread(run: LoadedRun) -> compare.Variability | str:
    """The variability that was kept in the run; why there is none to show, as a sentence."""
    try:
        return scorecard.variability(run)
    except (RecordError, compare.CompareError) as exc:
        return f"Not shown: {exc}."


def judge_and_write(run: LoadedRun) -> tuple[Scorecard, list[crosscheck.Check]]:
    """Judge, write the judgement, and judge the artefacts of which it is a part once more."""
    card = scorecard.judge(run)
    checks = write_judgement(run, card)
    if (again := scorecard.judge(run)) != card:
        card, checks = again, write_judgement(run, again)
    return card, checks


def judged_tables(card: Scorecard, checks: list[crosscheck.Check]) -> list[tables.Table]:
    """The tables of the judging pages that have rows."""
    every = (verdict.criteria(card), verdict.figures(card), verdict.implausible(card), verdict.checks_table(checks))
    return [table for table in every if table and table.raw]


def declared(run: LoadedRun) -> Iterable[str]:
    """What the run's families and the HTML book must leave: pages, executed notebooks, tables, plots, judgements."""
    whole = {family for family in run.files if ended(run, family)["status"] == "ok"}
    yield from ("scorecard.json", "scorecard.md", "validation.json", "validation.md")
    yield from (f"site/{page}.html" for page in ("index", "run", "scorecard", "validation", "comparison", "glossary"))
    for family, source in runner.families().items():
        yield f"site/notebooks/{source.stem}.html"
        if family not in whole:
            continue
        yield f"notebooks/{source.name}"
        for plot, needs in importlib.import_module(f"escher_book.pages.{family}").PLOTS.items():
            if whole.issuperset(needs):
                found = sorted(run.directory.glob(f"plots/{plot}_*.svg"))
                for stem in [p.stem for p in found] or [plot]:
                    yield from (f"plots/{stem}.svg", f"plots/{stem}.png")
    yield from (f"tables/{name}.csv" for name in ("scorecard", "scorecard_figures"))
    yield from (f"tables/{path.name}" for path in run.directory.glob("tables/*.csv"))
    yield from (f"site/notebooks/{path.stem}.html" for path in (ROOT / "notebooks").glob("*.md"))


def ended(run: LoadedRun, family: str) -> dict[str, Any]:
    """How a family ended: what status.json says, "unknown" where it says nothing of records that are there."""
    return run.status.get(family) or {"status": "unknown" if family in run.files else "not run"}


def pages(run: LoadedRun, replayed: dict[str, Outcome]) -> dict[str, stage.PageInfo]:
    """What each family's page shows, says of itself, or why it is missing."""
    out = {}
    for family, source in runner.families().items():
        end = ended(run, family)
        replay = replayed.get(family)
        banner = findings.banners(run, family)
        if end["status"] not in ("ok", "not run"):
            what = ": ".join(filter(None, (ENDED.get(end["status"], end["status"]), end.get("message"))))
            kept = len(run.records(family))
            banner.append(("danger", f"{what}. {kept} records were kept; the page shows what they hold."))
        if replay and not replay.ok:
            banner.append(("danger", f"This page could not be made from its records: {replay.message}"))
        if family in run.files and run.files[family].truncated:
            banner.append(("warning", "The last record was cut off in the middle of writing and is left out."))
        executed = run.directory / "notebooks" / source.name
        shown = executed if family in run.files and executed.is_file() else None
        reason = ""
        if shown is None:
            reason = run.unreadable.get(family) or end.get("message") or "this family was not chosen for this run"
        out[source.stem] = stage.PageInfo(
            notebook=shown,
            title=findings.title(heading(source), run),
            subtitle=findings.provenance(run),
            banner=banner,
            reason=reason,
            command="" if shown else f"make book FAMILIES={family}",
        )
    return out


def write_tables_and_plots(run: LoadedRun) -> None:
    """tables/<name>.csv (base units) and plots/<title>.svg and .png of every table and chart that the pages show."""
    written = set()
    for source in runner.families().values():
        path = run.directory / "notebooks" / source.name
        if not path.is_file():
            continue
        for cell in read_json(path)["cells"]:
            for data in (output.get("data", {}) for output in cell.get("outputs", [])):
                if table := data.get(tables.RAW):
                    out = run.directory / "tables" / f"{table['name']}.csv"
                    write_text_atomic(out, as_csv([table["columns"], *table["rows"]]))
                    written.add(out)
                if spec := data.get(vega.MIME):
                    stem = run.directory / "plots" / re.sub(r"\W+", "_", vega.title(spec))
                    write_text_atomic(stem.with_suffix(".svg"), vega.svg(spec))
                    write_bytes_atomic(stem.with_suffix(".png"), vega.png(spec))
                    written |= {stem.with_suffix(".svg"), stem.with_suffix(".png")}
    for stale in {*run.directory.glob("tables/*"), *run.directory.glob("plots/*")} - written:
        stale.unlink()


def as_csv(rows: list[list[Any]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def landing(run: LoadedRun, card: Scorecard) -> str:
    """The book's first page: what machine, the verdict, the headline numbers, how each family ended."""
    parts = [
        f"# {stage.escape(findings.machine_name(run))}",
        stage.escape(run.config["project"]["subtitle"]) + ".",
        *(stage.admonition(kind, text) for kind, text in findings.banners(run)),
        verdict.headline(card) + "\n\n" + verdict.first_reasons(card),
        findings.cards(run),
        f'<p class="subtitle">{html.escape(findings.provenance(run))}</p>',
        "## How each family ended",
        family_table(run),
        "## The machine",
        environment.machine(run).to_html(),
        "## How to read this book",
        READ_ME_FIRST,
    ]
    return "\n\n".join(parts)


def heading(source: Path) -> str:
    """The notebook's own heading, which `findings.title` makes the device's."""
    first = "".join(read_json(source)["cells"][0]["source"])
    return first.partition("\n")[0].removeprefix("# ").strip()


READ_ME_FIRST = """\
The rate of a row is the median of its block medians; the interval behind it holds the true median with at least 95 %
probability if it has six blocks (that of the ridge, made of two, with 94 %). A probed peak is made of best slices. A
rate is work over time, and the work is stated: see the [methodology](notebooks/methodology.md). A percentage always
names what it is a share of. NOISY marks what other work disturbed; nothing is dropped. Terms are in the
[glossary](glossary.md).
"""


def family_table(run: LoadedRun) -> str:
    pills = {"ok": "pass", "not run": "skip"}
    rows = []
    for family, source in runner.families().items():
        end = ended(run, family)
        status = {"running": "killed"}.get(end["status"], end["status"])
        records = len(run.records(family))
        rows.append(
            f'<tr><td><a href="notebooks/{source.stem}.html">{html.escape(findings.title(heading(source), run))}</a></td>'
            f'<td><span class="pill {pills.get(status, "fail")}">{html.escape(status)}</span></td>'
            f'<td class="num">{records:,}</td><td class="num">{tables.seconds(end.get("seconds"))}</td>'
            f"<td>{html.escape(end.get('message', ''))}</td></tr>"
        )
    head = '<tr><th>page</th><th>ended</th><th class="num">records</th><th class="num">time</th><th>why</th></tr>'
    return f'<div class="escher-scroll"><table class="escher"><thead>{head}</thead><tbody>{"".join(rows)}</tbody></table></div>'


def glossary(config: configuration.Config) -> str:
    """The glossary page from the configuration."""
    lines = ["# Glossary", ""]
    for term in sorted(config["glossary"], key=str.casefold):
        lines += [stage.escape(term), f": {stage.escape(config['glossary'][term])}", ""]
    return "\n".join(lines)
