"""Builds a small book from executed notebooks made here, and opens it in a browser."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import browser_helpers
import nbformat
import pytest
from conftest import SMALL_TOC
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from escher_book import sphinx_ext, vega
from escher_book.stage import BookMeta, BuildResult, PageInfo, build, stage

ROOT = Path(__file__).parents[1]
DEVICE = "AMD <Instinct> MI355X | 288*GB* [OAM] $x$ {y} `z` -- _q_"


def chart(title: str, **more) -> dict:
    rows = [
        {"n": 256 * 2**i, "dtype": d, "tflops": 40.0 * i + k} for i in range(5) for k, d in enumerate(["bf16", "fp32"])
    ]
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v6.1.0.json",
        "title": title,
        "data": {"name": "rows"},
        "datasets": {"rows": rows},
        "mark": {"type": "line", "point": True, "tooltip": True},
        "encoding": {
            "x": {"field": "n", "type": "quantitative", "scale": {"type": "log", "base": 2}, "title": "n"},
            "y": {"field": "tflops", "type": "quantitative", "title": "TFLOP/s"},
            "color": {"field": "dtype", "type": "nominal"},
        },
        "width": 600,
        **more,
    }


def side_by_side(title: str) -> dict:
    view = chart("", width=420)
    datasets = view.pop("datasets")
    return {"title": title, "datasets": datasets, "hconcat": [view, view]}


TABLE = """<table class="escher"><caption>Plateau of each operation</caption>
<thead><tr><th>operation</th><th class="num">size, MiB</th><th class="num">GB/s</th><th class="num">interval</th>
<th>status</th><th>backend that really ran</th><th>note</th></tr></thead><tbody>
<tr><td>copy</td><td class="num">256</td><td class="num">41.20</td><td class="num">40.9 to 41.6</td>
<td><span class="pill pass">PASS</span></td><td>torch.Tensor.copy_</td><td>read 1 : write 1</td></tr>
<tr><td>add</td><td class="num">512</td><td class="num">9.87</td><td class="num">9.1 to 10.4</td>
<td><span class="pill warn">WARN</span></td><td>torch.add(out=)</td><td>two reads</td></tr>
<tr><td>triad</td><td class="num">512</td><td class="num">39.02</td><td class="num">38 to 40</td>
<td><span class="pill fail">FAIL</span> <span class="pill skip">SKIP</span> <span class="pill na">N/A</span>
<span class="pill invalid">INVALID</span> <span class="pill insufficient">INSUFFICIENT</span></td>
<td>torch.addcmul</td><td>two reads</td></tr></tbody></table>"""

INTRO = f"""# Accelerator report

<div class="headline">
<div class="headline-card"><div class="label">Compute roof</div>
<div class="value">1&#8239;182.4<span class="unit">TFLOP/s</span></div>
<div class="interval">1 179.0 to 1 185.9</div><div class="basis">51 % of the rated 2 300 dense BF16</div></div>
<div class="headline-card"><div class="label">Bandwidth roof</div>
<div class="value">5.31<span class="unit">TB/s</span></div>
<div class="interval">5.29 to 5.33</div><div class="basis">66 % of the rated 8.0</div></div>
<div class="headline-card"><div class="label">MFU, compiled</div>
<div class="value">77.2<span class="unit">%</span></div>
<div class="interval">76.8 to 77.5</div><div class="basis">basis: measured roof</div></div>
</div>

<p><span class="pill conditional-go">CONDITIONAL GO</span> two criteria were not run.</p>

{TABLE}
"""


def notebook(*cells) -> nbformat.NotebookNode:
    made = new_notebook(cells=list(cells))
    for number, cell in enumerate(made.cells):
        cell["id"] = f"cell-{number}"
    made.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    made.metadata["language_info"] = {"name": "python"}
    return made


def shown(spec: dict) -> nbformat.NotebookNode:
    return new_output("display_data", data={vega.MIME: spec, "text/plain": f"[chart: {vega.title(spec)}]"})


def table() -> nbformat.NotebookNode:
    return new_output(
        "display_data", data={"text/html": TABLE, "text/plain": "table", "text/markdown": "|a|\n|-|\n|1|"}
    )


def book(folder: Path, watermark: bool = False, extra_html: str = "") -> tuple[Path, dict, dict, BookMeta]:
    """Sources of a book of four pages and one that did not run; returns what `stage` wants."""
    source = folder / "source"
    (source / "notebooks").mkdir(parents=True)
    shutil.copy(ROOT / "_config.yml", source)
    (source / "_toc.yml").write_text(SMALL_TOC, encoding="utf-8")
    (source / "notebooks/methodology.md").write_text(
        "# Method\n\nBandwidth is $b = \\frac{n}{t}$ for $n$ bytes.\n\n"
        "$$\nt = \\max\\left(\\frac{F}{P}, \\frac{B}{W}\\right)\n$$ (eq:theory)\n\n"
        "As {eq}`eq:theory` says. [A link](https://example.org/) is no resource.\n\n"
        "```{note}\nUnits are base units.\n```\n",
        encoding="utf-8",
    )
    compute = notebook(
        new_markdown_cell("# Compute\n\nHow fast is a GEMM? Good is above half the rated peak: $2MNK/t$."),
        new_code_cell("n = 1", metadata={"tags": ["parameters"]}),
        new_code_cell("out = '/home/secret-user/x'", metadata={"tags": ["injected-parameters"]}),
        new_code_cell(
            "show(sweep)\nshow(sizes)\n" + "# a long line of code " * 12,
            outputs=[
                shown(chart('GEMM sweep </script><!-- "x"')),
                shown(chart("Sizes", mark={"type": "bar", "tooltip": True})),
            ],
        ),
        new_code_cell("show(table)", outputs=[table(), new_output("stream", name="stdout", text="plain text\n")]),
    )
    bandwidth = notebook(
        new_markdown_cell("# Memory\n\nHow many bytes a second?\n\n## Plateau"),
        new_code_cell(
            "show(concat)",
            outputs=[
                shown(side_by_side("Two views")),
                *([new_output("display_data", data={"text/html": extra_html})] if extra_html else []),
            ],
        ),
        new_code_cell(
            "raise ValueError('x')",
            outputs=[new_output("error", ename="ValueError", evalue="no <buffer>", traceback=["\x1b[31mlong\x1b[0m"])],
        ),
    )
    paths = {}
    for name, made in (("01_compute", compute), ("02_bandwidth", bandwidth)):
        paths[name] = folder / f"run/notebooks/{name}.ipynb"
        paths[name].parent.mkdir(parents=True, exist_ok=True)
        nbformat.write(made, paths[name])
    pages = {
        "00_environment": PageInfo(
            None, "Environment", reason=f"no device {DEVICE}", command="make report FAMILIES='0'"
        ),
        "01_compute": PageInfo(
            paths["01_compute"], f"Compute on {DEVICE}", banner=[("warning", f"TARGET is {DEVICE}")]
        ),
        "02_bandwidth": PageInfo(
            paths["02_bandwidth"], "HBM bandwidth", banner=[("danger", "This notebook failed: ValueError: no <buffer>")]
        ),
    }
    note = "Synthetic data: generated, not measured." if watermark else ""
    meta = BookMeta(
        "Accelerator report", "escher-mi355x-20250101-000000", "A & B", "SYNTHETIC" if watermark else "", note
    )
    generated = {"index.md": INTRO, "glossary.md": "# Glossary\n\nMFU\n: achieved over peak; bandwidth too.\n"}
    return source, pages, generated, meta


def make(folder: Path, **options) -> tuple[BuildResult, Path]:
    source, pages, generated, meta = book(folder, **options)
    stage(folder / "run", source, folder / "run/book", pages, meta, generated)
    return build(folder / "run/book", folder / "run/site"), folder / "run/site"


def html_pages(site: Path) -> dict[str, str]:
    return {
        path.relative_to(site).as_posix(): path.read_text(encoding="utf-8")
        for path in sorted(site.rglob("*.html"))
        if "_static" not in path.parts
    }


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    result, folder = make(tmp_path_factory.mktemp("büch mit space"))
    assert result.ok, "\n".join(result.warnings)
    assert not result.warnings
    return folder


@pytest.mark.slow
def test_every_chart_output_has_a_container_and_no_page_loads_from_elsewhere(site):
    pages = html_pages(site)
    counts = {name: len(re.findall(r'<div class="escher-vega"', text)) for name, text in pages.items()}
    assert {name: count for name, count in counts.items() if count} == {
        "notebooks/01_compute.html": 2,
        "notebooks/02_bandwidth.html": 1,
    }
    for name, text in pages.items():
        assert ("vega-bundle.js" in text) == (counts[name] > 0), name
        assert not sphinx_ext.external_resources(text), name
        for foreign in ("unpkg", "jsdelivr", "MathJax", "thebe", "mybinder", "Jupyter Book community"):
            assert foreign not in text, (name, foreign)
    assert (site / "_static/escher/vega-bundle.js").stat().st_size > 500_000


@pytest.mark.slow
def test_pages_say_what_they_are(site):
    pages = html_pages(site)
    from html import unescape

    text = unescape(re.sub(r"<[^>]+>", "", pages["notebooks/01_compute.html"]))
    assert f"Compute on {DEVICE}" in text
    assert f"TARGET is {DEVICE}" in text
    assert all("<Instinct>" not in text for text in pages.values())
    failed = pages["notebooks/02_bandwidth.html"]
    assert "HBM bandwidth" in failed and "no &lt;buffer&gt;" in failed and "\x1b" not in failed
    assert "make report FAMILIES=" in re.sub(r"<[^>]+>", "", pages["notebooks/00_environment.html"])
    method = pages["notebooks/methodology.html"]
    assert method.count("<math") == 3 and "(1)" in method
    for name, page in pages.items():
        assert "escher-watermark" not in page, name
        assert "secret-user" not in page, name
    for source in (site / "_sources").rglob("*"):
        assert source.is_dir() or "secret-user" not in source.read_text(encoding="utf-8")


@pytest.mark.slow
def test_a_page_that_loads_from_a_cdn_fails_the_build_and_the_old_site_stays(site, tmp_path):
    old = tmp_path / "run/site"
    old.mkdir(parents=True)
    (old / "index.html").write_text("the old site", encoding="utf-8")
    result, folder = make(tmp_path, extra_html='<script src="https://cdn.jsdelivr.net/npm/vega@6"></script>')
    assert not result.ok
    assert any("02_bandwidth.html loads from the network" in line for line in result.warnings), result.warnings
    assert [path.name for path in old.iterdir()] == ["index.html"]
    assert (old / "index.html").read_text(encoding="utf-8") == "the old site"
    assert sorted(path.name for path in folder.parent.iterdir()) == ["book", "notebooks", "site", "site.log"]
    assert "jsdelivr" in result.log.read_text(encoding="utf-8")


@pytest.mark.slow
def test_watermark_is_on_every_page_and_locale_c_is_no_obstacle(tmp_path, monkeypatch):
    for name, value in {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0", "PATH": "/nonexistent"}.items():
        monkeypatch.setitem(os.environ, name, value)
    folder = tmp_path / "bücher und mehr"
    result, site = make(folder, watermark=True)
    assert result.ok, "\n".join(result.warnings)
    pages = html_pages(site)
    assert "notebooks/methodology.html" in pages and "search.html" in pages
    for name, text in pages.items():
        assert "Synthetic data: generated, not measured." in text, name
        assert "escher/watermark.css" in text, name
    assert "SYNTHETIC" in (site / "_static/escher/watermark.css").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["file", "http"])
def test_in_a_browser_without_a_network(site, scheme):
    report = browser_helpers.check_site(site, scheme)
    assert not report.problems, "\n".join(report.problems)
    assert report.marks == {"notebooks/01_compute.html": [12, 10], "notebooks/02_bandwidth.html": [24]}
    assert re.fullmatch(r"n \d+ TFLOP/s \d+ dtype (bf16|fp32)", report.tooltips["notebooks/01_compute.html"])


@pytest.mark.slow
@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["file", "http"])
def test_search_box_leads_to_the_page(site, scheme):
    problems: list[str] = []
    with browser_helpers.browser() as instance, browser_helpers.address(site, scheme) as base:
        page = browser_helpers.watched_page(instance, problems, viewport={"width": 1300, "height": 900})
        page.goto(f"{base}/notebooks/01_compute.html")
        page.keyboard.press("Control+k")
        page.keyboard.type("plateau")
        page.keyboard.press("Enter")
        page.wait_for_selector("#search-results ul.search li a")
        page.wait_for_timeout(500)
        page.locator("#search-results ul.search li a").first.click()
        page.wait_for_selector(".bd-article h1")
        assert "bandwidth" in page.url
    assert not problems, "\n".join(problems)


@pytest.mark.slow
@pytest.mark.browser
def test_a_chart_that_draws_nothing_is_noticed(tmp_path, site):
    broken = tmp_path / "site"
    shutil.copytree(site, broken)
    page = broken / "notebooks/01_compute.html"
    text = page.read_text(encoding="utf-8")
    page.write_text(
        text.replace('"tflops"', '"busbw [GB/s]"', 1).replace('"field":"tflops"', '"field":"absent"'), "utf-8"
    )
    (broken / "_static/escher/vega-bundle.js").write_text("// lost", "utf-8")
    report = browser_helpers.check_site(broken)
    assert sum("is failed" in problem for problem in report.problems) >= 3
