"""The transformations between an executed notebook and a page of the book; no Sphinx, no browser."""

from __future__ import annotations

import json
import re
from pathlib import Path

import nbformat
import pytest
from conftest import SMALL_TOC
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from escher_book import sphinx_ext, stage, vega
from escher_book.stage import BookError, BookMeta, PageInfo

ROOT = Path(__file__).parents[1]
META = BookMeta("Report: <A> & B", "run-1")


def executed(*cells) -> nbformat.NotebookNode:
    made = new_notebook(cells=list(cells))
    made.metadata.update(
        {
            "kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"},
            "papermill": {"start_time": "now", "exception": True},
            "widgets": {"state": {}},
        }
    )
    return made


def page(made, info: PageInfo | None = None, **hide):
    return json.loads(stage.transform(made, info or PageInfo(Path("x"), "Title"), **hide))


def tags(cell) -> list[str]:
    return cell["metadata"].get("tags", [])


def test_a_failed_notebook_reads_from_its_title_to_its_error():
    made = executed(
        new_markdown_cell("<span>An Exception</span>", metadata={"tags": ["papermill-error-cell-tag"]}),
        new_markdown_cell("intro\n\n```\n# not the title\n```\n# Old title\n\nbody"),
        new_code_cell("1", outputs=[new_output("stream", name="stderr", text="warning: /home/me")]),
        new_code_cell(
            "boom()",
            metadata={"tags": ["hide-cell", "keep"]},
            outputs=[new_output("error", ename="OSError", evalue="\x1b[31mno\x1b[0m", traceback=["a", "b"] * 50)],
        ),
    )
    first, quiet, failing = page(made, PageInfo(Path("x"), "HBM", [("danger", "failed"), ("warning", "other")]))[
        "cells"
    ]
    source = first["source"] if isinstance(first["source"], str) else "".join(first["source"])
    assert (
        source.index("# HBM")
        < source.index(":::{danger}\nfailed\n:::")
        < source.index(":::{warning}")
        < source.index("body")
    )
    assert "Old title" not in source and "# not the title" in source
    assert quiet["outputs"] == [] and tags(quiet) == ["remove-cell"]  # nothing to show
    assert tags(failing) == ["keep"]
    assert failing["outputs"][0]["traceback"] == ["OSError: no"]


def test_tags_decide_what_is_folded():
    made = executed(
        new_markdown_cell("# T"),
        new_code_cell("p = 1", metadata={"tags": ["parameters"]}),
        new_code_cell("p = '/home/me'", metadata={"tags": ["injected-parameters"]}),
        new_code_cell("a", metadata={"tags": ["remove-output"], "execution": {"t": "1"}, "papermill": {"d": 2}}),
        new_code_cell("b", metadata={"tags": ["remove-cell"]}),
        new_code_cell("c", outputs=[new_output("stream", text="shown")]),
        new_code_cell("d", metadata={"tags": ["lab-only"]}),
    )
    text = stage.transform(made, PageInfo(Path("x"), "T"))
    assert "/home/me" not in text and "papermill" not in text and "widgets" not in text and '"execution"' not in text
    assert [tags(cell) for cell in json.loads(text)["cells"][1:]] == [
        ["parameters", "remove-cell"],
        ["hide-input", "remove-output"],
        ["remove-cell"],
        ["hide-input"],
        ["lab-only", "remove-cell"],
    ]


def test_transform_is_deterministic_and_valid_without_a_title():
    made = executed(
        new_code_cell("x", outputs=[new_output("execute_result", data={"text/plain": "1"}, execution_count=7)])
    )
    first, again = (stage.transform(made, PageInfo(Path("x"), "T")) for _ in range(2))
    assert first == again
    nbformat.validate(nbformat.reads(first, as_version=4))
    assert json.loads(first)["cells"][0]["source"].startswith("# T")


def test_output_text_loses_escapes_and_folders_of_this_machine():
    made = executed(
        new_markdown_cell("# T"),
        new_code_cell(
            "x", outputs=[new_output("stream", name="stdout", text="\x1b[1m/data/run-1/a\x1b[0m /data/run-10 ok\n")]
        ),
    )
    shown = page(made, hide={Path("/data/run-1"): "run-1"})["cells"][1]["outputs"][0]["text"]
    assert "".join(shown) == "run-1/a /data/run-10 ok\n"


@pytest.mark.parametrize("kind", ["stream", "html", "plain"])
def test_huge_outputs_are_cut_with_a_mark(kind, monkeypatch):
    monkeypatch.setattr(stage, "OUTPUT_LIMIT_BYTES", 2000)
    big = "ü" * 3000
    output = {
        "stream": lambda: new_output("stream", name="stdout", text=big),
        "html": lambda: new_output("display_data", data={"text/html": big, "text/plain": "x"}),
        "plain": lambda: new_output("display_data", data={"text/plain": big}),
    }[kind]()
    text = stage.transform(
        executed(new_markdown_cell("# T"), new_code_cell("x", outputs=[output])), PageInfo(Path("x"), "T")
    )
    assert len(text.encode()) < 4000
    assert "limit is" in text


NASTY = [
    "AMD <Instinct> | *MI355X* [OAM] $x$ {y} `z`",
    ":option: x",
    "# h",
    "1. x",
    "- a",
    "\\",
    "a\nb",
    "&amp; <b>",
    "###",
]


@pytest.mark.parametrize("name", NASTY)
def test_names_read_literally_in_banner_and_title(name):
    html = MarkdownIt("commonmark").render(f"# {stage.escape(name)}\n\nx {stage.escape(name)}")
    from html import unescape

    plain = " ".join(name.split())
    assert [unescape(part) for part in re.findall(r"<(?:h1|p)>(.*?)</(?:h1|p)>", html)] == [plain, f"x {plain}"]


@given(st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"])))
def test_no_text_can_be_markup(name):
    html = MarkdownIt("commonmark").render("x " + stage.escape(name))
    from html import unescape

    assert unescape(re.sub(r"^<p>|</p>\n$", "", html)) == ("x " + stage.escape("") + " ".join(name.split())).rstrip()


def test_banner_kind_is_checked():
    with pytest.raises(ValueError, match="'shout'; expected one of attention, caution"):
        stage.admonition("shout", "x")


# ------------------------------------------------------------------------------------------------------ staging


@pytest.fixture
def sources(tmp_path):
    source = tmp_path / "quelle ü"
    (source / "notebooks").mkdir(parents=True)
    (source / "_config.yml").write_bytes((ROOT / "_config.yml").read_bytes())
    (source / "_toc.yml").write_text(SMALL_TOC, encoding="utf-8")
    (source / "notebooks/methodology.md").write_text("# Method ü\n", encoding="utf-8")
    made = executed(new_markdown_cell("# Compute"), new_code_cell("1"))
    notebook = tmp_path / "run/notebooks/01_compute.ipynb"
    notebook.parent.mkdir(parents=True)
    nbformat.write(made, notebook)
    pages = {
        "00_environment": PageInfo(None, "Environment", reason="no <device>", command="make report"),
        "01_compute": PageInfo(notebook, "Compute"),
        "02_bandwidth": PageInfo(None, "Bandwidth", [("note", "a | b")], reason="time-out", command="x ``` y"),
    }
    generated = {"index.md": "# Intro\n", "glossary.md": "# Glossary\n"}

    def run(**changes):
        arguments = {"pages": pages, "generated": generated, "meta": META} | changes
        return stage.stage(tmp_path / "run", source, tmp_path / "run/büch", **arguments)

    run.source, run.folder, run.pages, run.generated = source, tmp_path / "run/büch", pages, generated
    return run


def test_staging_twice_changes_no_file(sources):
    assert len(sources()) == 8
    before = {path: path.stat().st_mtime_ns for path in sources.folder.rglob("*")}
    assert sources() == []
    assert {path: path.stat().st_mtime_ns for path in sources.folder.rglob("*")} == before
    assert sources(generated={**sources.generated, "index.md": "# New\n"}) == ["index.md"]


def test_a_page_that_runs_later_replaces_its_stub_and_nothing_else_is_removed(sources):
    sources()
    mine = sources.folder / "notes.txt"
    mine.write_text("mine", encoding="utf-8")
    assert (sources.folder / "notebooks/02_bandwidth.md").is_file()
    ran = PageInfo(sources.pages["01_compute"].notebook, "HBM bandwidth")
    assert sources(pages={**sources.pages, "02_bandwidth": ran}) == [
        "notebooks/02_bandwidth.md",
        "notebooks/02_bandwidth.ipynb",
    ]
    assert not (sources.folder / "notebooks/02_bandwidth.md").exists() and mine.exists()


def test_stub_says_why_and_how(sources):
    sources()
    text = (sources.folder / "notebooks/02_bandwidth.md").read_text(encoding="utf-8")
    assert text.startswith("# Bandwidth\n") and "Not run\\: time\\-out" in text
    assert "a \\| b" in text and "````bash\nx ``` y\n````" in text


def test_config_is_filled(sources):
    import yaml

    sources(meta=BookMeta("T <x>: y", "run-1", "Ann & Bob", "SYNTHETIC", "not measured"))
    config = yaml.safe_load((sources.folder / "_config.yml").read_text(encoding="utf-8"))
    assert (config["title"], config["author"]) == ("T <x>: y", "Ann & Bob")
    assert config["execute"]["execute_notebooks"] == "off"
    values = config["sphinx"]["config"]
    assert (values["escher_run"], values["escher_watermark"], values["escher_watermark_note"]) == (
        "run-1",
        "SYNTHETIC",
        "not measured",
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"generated": {"index.md": "# I"}}, r"names glossary, which no .*there are: .*index"),
        (
            {"generated": {"index.md": "x", "glossary.md": "x", "more.md": "x"}},
            r"no entry .* names more; add a line `- file: more`",
        ),
        ({"generated": {"../up.md": "x"}}, r"generated page '../up.md'; expected a relative path"),
        ({"generated": {"notebooks/01_compute.md": "x"}}, r"two sources for the page notebooks/01_compute"),
        (
            {"pages": {"01_compute": PageInfo(Path("/no/such.ipynb"), "T")}},
            r"page 01_compute: /no/such.ipynb is not a readable",
        ),
    ],
)
def test_what_does_not_fit_is_named_and_nothing_is_written(sources, change, message):
    with pytest.raises(BookError, match=message):
        sources(**change)
    assert not sources.folder.exists()


def test_jupyter_book_2_is_refused(monkeypatch):
    monkeypatch.setattr(stage.importlib.metadata, "version", lambda name: "2.1.7")
    with pytest.raises(
        BookError, match=r"^jupyter-book 2.1.7 found; this book needs >=1.0.4,<2: pip install 'jupyter-book<2'$"
    ):
        stage.check_jupyter_book()


def test_a_build_that_fails_or_was_killed_leaves_a_whole_site(tmp_path, monkeypatch):
    site, retired = tmp_path / "site", tmp_path / ".site.old"
    retired.mkdir()  # as a kill between the two renames leaves it
    (retired / "index.html").write_text("old", encoding="utf-8")
    answer = (1, "reading\n/book/x.md:3: WARNING: bad \n")
    monkeypatch.setattr(stage, "_jupyter_book", lambda *_: answer)
    result = stage.build(tmp_path / "book", site)
    assert (result.ok, result.warnings) == (False, ("/book/x.md:3: WARNING: bad",))
    answer = (0, "fine, but no page\n")
    assert stage.build(tmp_path / "book", site).warnings == ("fine, but no page",)
    assert (site / "index.html").read_text(encoding="utf-8") == "old"

    def succeed(staging_dir, work, timeout_s):
        (work / "_build/html").mkdir(parents=True)
        (work / "_build/html/index.html").write_text("new", encoding="utf-8")
        return 0, ""

    monkeypatch.setattr(stage, "_jupyter_book", succeed)
    assert stage.build(tmp_path / "book", site).ok
    assert (site / "index.html").read_text(encoding="utf-8") == "new"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["site", "site.log"]


# ------------------------------------------------------------------------------------------------------- charts


def spec(rows, **encoding):
    fields = {"x": {"field": "n", "type": "quantitative"}, "y": {"field": "v", "type": "quantitative"}} | encoding
    return {"title": "Sweep", "data": {"values": rows}, "mark": "point", "encoding": fields}


def test_bundle_has_one_mime_and_one_line():
    made = spec([{"n": 1, "v": 2}])
    assert vega.bundle(made) == {"application/vnd.vegalite.v5+json": made, "text/plain": "[chart: Sweep]"}


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (spec([{"n": 1, "v": 2, "busbw [GB/s]": 3}]), r"'busbw \[GB/s\]' contains \[ \]"),
        (spec([{"n": 1, "v": 2}], y={"field": "gpu.name", "type": "nominal"}), r"'gpu.name' contains \."),
        (spec([{"n": 1, "v": 2}], y={"field": "w", "type": "nominal"}), r"no column 'w' \(y\); there are: n, v"),
        (spec([{"n": 1, "v": None}, {"n": 2, "v": 3}]), r"'v' \(y\) has 1 of 2 values"),
        (spec([{"n": 1, "v": 2, "extra": float("inf")}]), r"'extra' holds inf"),
        (spec([{"n": i, "v": i} for i in range(5001)]), r"5001 rows; at most 5000"),
        ({**spec([]), "data": {"url": "https://example.org/x.json"}}, r"loaded from 'https"),
        ({**spec([]), "data": {"name": "gone"}}, r"'gone' is not in it"),
    ],
)
def test_charts_that_would_be_blank_are_refused(made, message):
    with pytest.raises(ValueError, match=message):
        vega.bundle(made)
    with pytest.raises(ValueError, match=message):
        vega.bundle({"title": "Sweep", "layer": [made]})


def test_altair_charts_pass_and_nan_does_not():
    altair = pytest.importorskip("altair")
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"n": [1.0, 2.0], "v": [3.0, float("nan")]})
    chart = altair.Chart(frame, title="T").mark_line().encode(x="n:Q", y="v:Q")
    with pytest.raises(ValueError, match="'v'"):
        vega.bundle(chart.to_dict())
    previous = altair.renderers.active
    try:
        vega.enable()
        shown = altair.Chart(frame.dropna(), title="T").mark_line().encode(x="n:Q", y="v:Q")._repr_mimebundle_()
    finally:
        altair.renderers.enable(previous)
    assert list(shown) == ["application/vnd.vegalite.v5+json", "text/plain"] and shown["text/plain"] == "[chart: T]"


def test_svg_and_png_draw_the_marks():
    made = spec([{"n": i, "v": i} for i in range(7)]) | {"width": "container"}
    assert len(re.findall(r'aria-roledescription="point"', vega.svg(made))) == 7
    assert vega.png(made).startswith(b"\x89PNG")
    assert made["width"] == "container"


def test_no_text_of_a_chart_ends_its_container():
    html = sphinx_ext.chart_html(spec([{"n": 1, "v": 2}]) | {"title": '</script><b> "quoted"'})
    assert html.count("</script>") == 1 and 'aria-label="&lt;/script&gt;&lt;b&gt; &quot;quoted&quot;"' in html


# -------------------------------------------------------------------------------------------- guard and look


@pytest.mark.parametrize(
    ("html", "count"),
    [
        ('<a href="https://example.org">x</a><link rel="canonical" href="https://example.org">', 0),
        ('<img src="data:image/png;base64,AA//BB"><img src="_images/a.png">', 0),
        ('<script type="application/json">{"u":"https://x"}</script><svg xmlns="http://www.w3.org/2000/svg"></svg>', 0),
        ('<script src="https://cdn.example.org/x.js"></script>', 1),
        ('<script src="//cdn.example.org/x.js"></script><link rel="stylesheet" href="HTTP://x.org/a.css">', 2),
        ('<img srcset="a.png 1x, https://x.org/b.png 2x"><iframe src="https://x.org"></iframe>', 2),
        ("<style>@import 'https://x.org/a.css';</style><p style=\"background:url(//x.org/i.png)\">", 2),
        ("<script>var s = 'https://cdn.jsdelivr.net/npm/vega@5';</script>", 1),
    ],
)
def test_guard_tells_resources_from_links(html, count):
    assert len(sphinx_ext.external_resources(html)) == count


def test_formulas_become_mathml_and_unknown_commands_are_errors():
    assert "<mfrac>" in sphinx_ext.mathml(r"t = \max\left(\frac{F}{P}, \frac{B}{W}\right)", True)
    with pytest.raises(ValueError, match=r"\\nosuchmacro"):
        sphinx_ext.mathml(r"\nosuchmacro{x}", False)


def _luminance(color: str) -> float:
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_pills_keep_their_contrast_in_both_themes():
    css = (sphinx_ext.STATIC / "escher.css").read_text(encoding="utf-8")
    light, dark = css.split('html[data-theme="dark"] {')[:2]
    for theme in (light, dark.split("}")[0]):
        colors = dict(re.findall(r"--pill-([a-z]+-[fb]g): (#[0-9a-f]{6})", theme))
        names = {name[:-3] for name in colors}
        assert names == {"pass", "warn", "fail", "invalid", "insufficient", "skip", "na"}
        for name in names:
            low, high = sorted(_luminance(colors[f"{name}-{part}"]) for part in ("fg", "bg"))
            assert (high + 0.05) / (low + 0.05) >= 4.5, name
