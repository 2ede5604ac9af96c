"""The report as one Markdown file: what is in it, what must not be, and what is refused."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
import yaml
from conftest import SAMPLES
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from escher_book import export, report, runner, stage, tables, vega
from escher_book.runner import Console, RunError
from escher_book.stage import BookError
from escher_book.tables import Column, Table
from escher_kernels.records import RecordError
from validation import derive, scorecard

COMMONMARK = MarkdownIt("commonmark").enable("table")
CHART = {"title": "A3 Bandwidth: copy, GB/s", "mark": "line"}


def data(bundle: dict[str, Any]) -> nbformat.NotebookNode:
    return new_output("display_data", data=bundle)


def executed(*cells: nbformat.NotebookNode) -> nbformat.NotebookNode:
    first = [
        new_markdown_cell("# Memory bandwidth\n\n**How fast?** Good looks like this."),
        new_code_cell("run_dir = ''", metadata={"tags": ["parameters"]}),
        new_code_cell("run_dir = '/home/someone/secret'", metadata={"tags": ["injected-parameters"]}),
    ]
    return new_notebook(cells=[*first, *cells])


def write(run_dir: Path, stem: str, notebook: nbformat.NotebookNode) -> None:
    (run_dir / "notebooks").mkdir(exist_ok=True)
    nbformat.write(notebook, run_dir / "notebooks" / f"{stem}.ipynb")


@pytest.fixture(scope="module")
def judged(tmp_path_factory) -> dict[str, Path]:
    """The sample runs as a report leaves them, with pages that hold nothing but their head."""
    out = {}
    for name in ("cpu", "mi355x"):
        directory = out[name] = Path(shutil.copytree(SAMPLES / name, tmp_path_factory.mktemp("judged") / name))
        run = derive.load(directory)
        report.write_judgement(run, scorecard.judge(run))
        (directory / "site").mkdir()
        (directory / "site" / "index.html").write_text("<html></html>", encoding="utf-8")
        for source in runner.families().values():
            write(directory, source.stem, executed())
    return out


@pytest.fixture
def reported(judged, tmp_path) -> Callable[..., Path]:
    """`reported(*cells)`: a run of one's own, with these cells on the bandwidth page."""

    def make(*cells: nbformat.NotebookNode, name: str = "cpu") -> Path:
        directory = Path(shutil.copytree(judged[name], tmp_path / "results" / name))
        write(directory, "02_bandwidth", executed(*cells))
        return directory

    return make


def exported(directory: Path) -> str:
    assert export.export(directory, ["md"]) == [directory / "report.md"]
    return (directory / "report.md").read_text(encoding="utf-8")


def tokens(text: str) -> Iterator[Any]:
    """Every token of the report below its front matter."""

    def walk(items: list[Any]) -> Iterator[Any]:
        for token in items:
            yield token
            yield from walk(token.children or [])

    return walk(COMMONMARK.parse(text.partition("\n---\n")[2]))


def headings(text: str, level: int) -> list[str]:
    return [line.removeprefix("#" * level + " ") for line in text.splitlines() if re.match(rf"#{{{level}}} ", line)]


def section(text: str, title: str) -> str:
    return text.partition(f"\n## {title}")[2].partition("\n## ")[0]


# -------------------------------------------------------------------------------------------------------- what is in it


def test_front_matter_summary_judgement_and_every_family_in_order(reported):
    directory = reported()
    text = exported(directory)
    about = yaml.safe_load(text.partition("---\n")[2].partition("---\n")[0])
    info = derive.load(directory).info
    assert about == {
        "title": "escher microbenchmark book: CPU host", "run_id": info["run_id"], "date": info["created_utc"][:10],
        "author": "Escher performance engineering", "tags": ["escher", "cpu", "escher_14b_480p", "quick"],
    }  # fmt: skip
    assert headings(text, 1) == ["CPU host"]
    families = ["Environment", "BF16 GEMM", "Memory bandwidth", "Memory capacity", "Operations", "End-to-end MFU"]
    titles = [h.partition(":")[0] for h in headings(text, 2)]
    assert titles == ["Summary", "Scorecard", "Outside tools", "The run", *families]
    card = scorecard.judge(derive.load(directory))
    summary = section(text, "Summary")
    assert f"**{card.verdict}**" in summary and len(re.findall(r"^\d\. ", summary, re.M)) == len(card.reasons)
    for words in ("Compute roof, BF16 GEMM: **", "Ridge: **", " FLOP/B** (interval ", " of the measured compute roof"):
        assert words in summary
    assert section(text, "Scorecard").startswith("\n\n**Criteria of acceptance**\n\n| criterion |")
    assert section(text, "Scorecard").count(card.reasons[0].partition(" ")[0]) >= 1
    assert "No outside tool was run" in section(text, "Outside tools")


def test_a_page_shows_sentences_tables_plots_and_prose_and_no_code(reported):
    columns = [Column("case", str), Column("GB/s", str, True)]
    bundle = Table("bandwidth", "Copy, add", columns, ["a|b", "c_d*"], [{"bytes_s": 1.0}])._repr_mimebundle_()
    sentence = {"text/markdown": "**Roof: 23 GB/s.**\n\n## So", "text/plain": "<Text>"}
    directory = reported(
        new_code_cell("page.finding(run)", outputs=[data(sentence)]),
        new_code_cell("page.table(run)", outputs=[data(bundle)]),
        new_code_cell("page.chart(run)", outputs=[data({vega.MIME: CHART, "text/plain": "[chart]"})]),
        new_code_cell("print(1)", outputs=[new_output("stream", name="stdout", text="a ``` b\n")]),
        new_code_cell("warn()", outputs=[new_output("stream", name="stderr", text="a warning\n")]),
        new_code_cell("hidden()", metadata={"tags": ["remove-output"]}, outputs=[data({"text/plain": "hidden"})]),
        new_markdown_cell("## How to read this\n\nSee the [methodology](methodology.md) and [this](https://example.org/a/b).\n\n"
                          "```\n# not a heading\n```"),
    )  # fmt: skip
    (directory / "plots").mkdir()
    (directory / "plots" / "A3_Bandwidth_copy_GB_s.png").write_bytes(b"png")
    text = exported(directory)
    page = section(text, "Memory bandwidth")
    assert page.startswith(": CPU host\n\n**How fast?** Good looks like this.\n\n**Roof: 23 GB/s.**\n\n### So\n")
    assert "| case | GB/s |\n|---|---:|\n| a\\|b | a\\|b |\n| c_d\\* | c_d\\* |" in page
    assert "![A3 Bandwidth: copy, GB/s](plots/A3_Bandwidth_copy_GB_s.png)" in page
    assert "````text\na ``` b\n````" in page
    assert "\n### How to read this\n\nSee the methodology and [this](https://example.org/a/b).\n" in page
    assert "\n```\n# not a heading\n```" in page
    for absent in ("page.finding", "a warning", "hidden", "<Text>", "run_dir"):
        assert absent not in text
    found = list(tokens(text))
    assert not [t.content for t in found if t.type.startswith("html")]
    assert [t.attrs["src"] for t in found if t.type == "image"] == ["plots/A3_Bandwidth_copy_GB_s.png"]
    assert [t.attrs["href"] for t in found if t.type == "link_open"] == ["https://example.org/a/b"]


def test_a_table_without_markdown_is_made_of_its_rows_in_base_units(reported):
    columns = ["case", "time_s", "bytes_s_lo", "flop_s", "blocks", "bytes", "wrong"]
    rows = [["a|b", 1.23456e-3, 2.5e9, 1234567.8, 6, 4096, False], ["c", None, 2.0, 0.0, 12, None, True]]
    raw = {"name": "bandwidth_rows", "columns": columns, "rows": rows}
    text = exported(reported(new_code_cell("", outputs=[data({tables.RAW: raw, "text/html": "<table>"})])))
    page = section(text, "Memory bandwidth")
    assert page.partition("**bandwidth rows**\n\n")[2].rstrip().splitlines() == [
        "| case | time, s | bytes lo, B/s | flop, FLOP/s | blocks | bytes, B | wrong |",
        "|---|---:|---:|---:|---:|---:|---|",
        "| a\\|b | 0.001235 | 2,500,000,000 | 1,235,000 | 6 | 4,096 | False |",
        "| c | – | 2.000 | 0 | 12 | – | True |",
    ]


def test_a_chart_whose_image_is_missing_is_said_and_not_linked(reported):
    text = exported(reported(new_code_cell("", outputs=[data({vega.MIME: CHART})])))
    assert "Chart without an image: A3 Bandwidth: copy, GB/s." in text and "plots/" not in text


def test_a_family_that_failed_shows_its_error_and_one_that_is_not_there_says_why(reported):
    error = new_output("error", ename="ValueError", evalue="no_such <case>", traceback=["long", "ValueError"])
    directory = reported(new_code_cell("", outputs=[error]))
    (directory / "records" / "05_e2e.jsonl").unlink()
    text = exported(directory)
    assert r"> **Error:** ValueError: no_such \<case>" in section(text, "Memory bandwidth")
    assert "Not run: " in section(text, "End-to-end MFU") and "How fast?" not in section(text, "End-to-end MFU")


def test_a_synthetic_run_says_so(reported):
    text = exported(reported(name="mi355x"))
    assert "> **SYNTHETIC:** generated numbers, nothing was measured." in text and "- synthetic\n" in text
    assert "rvs" in section(text, "Outside tools")


# --------------------------------------------------------------------------------------------------- what must not be


def test_no_path_of_a_machine_is_in_it(reported):
    directory = reported()
    shown = f"{directory}/raw/x_y.log, {Path.home()}/notes/a.txt, {export.ROOT}/configs/b.json"
    prose = "Nothing in /srv/fast disk/run.json, but /sys/kernel/mm/transparent_hugepage/enabled; 5 GB/s/device, 1/2/3, https://a.b/c/d."
    cell = new_code_cell("", outputs=[data({"text/markdown": f"{shown}. {stage.escape(shown)}. {prose}"}),
                                      new_output("error", ename="OSError", evalue=f"{directory}/x", traceback=[])])  # fmt: skip
    write(directory, "02_bandwidth", executed(cell))
    text = exported(directory)
    short = f"{directory.name}/raw/x_y.log, ~/notes/a.txt, ./configs/b.json"
    kept = "Nothing in fast disk/run.json, but /sys/kernel/mm/transparent_hugepage/enabled; 5 GB/s/device, 1/2/3, https://a.b/c/d."
    assert f"{short}. {short}. {kept}" in text and f"OSError: {directory.name}/x" in text
    assert str(directory) not in text and str(directory.parent) not in text


@pytest.mark.parametrize(
    "given_, kept",
    [
        ("/a/b", "b"), ("(/a/b-c.d)", "(b-c.d)"), ("a /x/y/z/ b", "a z b"), (r"\/a\/b\_c", r"b\_c"),
        ("/proc/self/x", "/proc/self/x"), ("/", "/"), ("/a", "/a"), ("and/or/not", "and/or/not"), ("a / b / c", "a / b / c"),
        ("~/a/b", "~/a/b"), ("./a/b", "./a/b"),
    ],
)  # fmt: skip
def test_a_path_keeps_its_last_part(given_, kept):
    assert export.anonymous(given_, Path("/results/run")) == kept


awkward = st.text(alphabet="a1_ .,-+=>()[]<\\/:#*`~!&;|\"'%?é", max_size=16)


@settings(max_examples=500)
@given(awkward)
def test_text_with_few_backslashes_reads_like_text_with_all(text):
    assert COMMONMARK.render(export.plain(text)) == COMMONMARK.render(stage.escape(text))


@given(awkward)
def test_what_was_printed_stays_as_it_is(text):
    found = COMMONMARK.parse(export.fenced(text))
    assert [t.content for t in found if t.type == "fence"] == ([text.rstrip() + "\n"] if text.strip() else [])


# ------------------------------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    "missing", ["site/index.html", "scorecard.json", "scorecard.md", "validation.md", "notebooks/01_compute.ipynb"]
)
def test_a_run_without_a_book_is_one_line_that_says_what_to_do(reported, missing):
    directory = reported()
    (directory / missing).unlink()
    with pytest.raises(RunError, match=f"{missing} is missing; make the book first: make report RUN=") as told:
        export.export(directory, ["md"])
    assert "\n" not in str(told.value) and not (directory / "report.md").exists()


def test_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(RecordError, match="no run"):
        export.export(tmp_path, ["md"])


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"cells": 3}', '{"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": [3]}']
)
def test_a_damaged_notebook_is_one_line(reported, content):
    directory = reported()
    (directory / "notebooks" / "01_compute.ipynb").write_text(content, encoding="utf-8")
    with pytest.raises((BookError, RecordError), match="01_compute.ipynb") as told:
        export.export(directory, ["md"])
    assert "\n" not in str(told.value) and "make report RUN=" in str(told.value)


@pytest.mark.parametrize("content", ["[]", "{}", '{"verdict": 1, "reasons": []}', '{"verdict": "GO"}'])
def test_a_damaged_scorecard_is_one_line(reported, content):
    directory = reported()
    (directory / "scorecard.json").write_text(content, encoding="utf-8")
    with pytest.raises(RunError, match="no scorecard"):
        export.export(directory, ["md"])


def test_unknown_formats_and_names_that_cannot_be(reported):
    directory = reported()
    with pytest.raises(RunError, match="unknown format 'docx'; known: md"):
        export.export(directory, ["md", "docx"])
    for name in ("", ".", "..", "a/b", "/abs", ".hidden", "scorecard", "validation.md"):
        with pytest.raises(RunError, match="output name"):
            export.export(directory, ["md"], name)
    assert not [p for p in directory.glob("*.md") if p.stem not in export.TAKEN]
    assert [p.name for p in export.export(directory, ["md", "md"], "mine.md")] == ["mine.md"]
    assert export.export(directory, []) == []


# ---------------------------------------------------------------------------------------------------------- a real one


@pytest.mark.slow
def test_the_report_of_a_whole_book(sample_copy):
    directory = sample_copy("mi355x")
    made = report.make(directory, Console(None))
    assert made.built.ok and not made.broken
    text = exported(directory)
    found = list(tokens(text))
    assert not [t.content for t in found if t.type.startswith("html")]
    images = [t.attrs["src"] for t in found if t.type == "image"]
    assert sorted(images) == sorted(f"plots/{p.name}" for p in (directory / "plots").glob("*.png"))
    assert not [t for t in found if t.type == "link_open"] and str(directory) not in text
    outputs = [
        out.get("data", {})
        for path in (directory / "notebooks").glob("*.ipynb")
        for cell in nbformat.read(path, as_version=4).cells
        for out in cell.get("outputs", [])
    ]
    judged = report.judged_tables(made.card, [])
    assert sum(t.type == "table_open" for t in found) >= sum(tables.RAW in d for d in outputs) + len(judged)
    assert text.count("### How to read this") == len(runner.families())
    assert f"**{made.card.verdict}**" in text
