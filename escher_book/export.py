"""A run's report as one file: what the book shows, from the records and what the report left beside them.

Markdown is plain CommonMark with pipe tables and YAML front matter, as Obsidian and code hosts read it: no HTML, no path of
the machine, and plots as relative links, so that the run directory can be moved or copied as a whole.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import unescape
from pathlib import Path
from typing import Any

import yaml

from escher_book import findings, report, run_page, runner, stage, tables, vega
from escher_book.runner import RunError
from escher_book.stage import BookError
from escher_book.tables import Column, Table, number
from escher_kernels.records import read_json, write_text_atomic
from escher_kernels.run import ROOT
from validation import derive
from validation.derive import LoadedRun

UNITS = {"flop_s": "FLOP/s", "bytes_s": "B/s", "s": "s", "bytes": "B", "flop": "FLOP", "hz": "Hz", "w": "W", "c": "°C"}
NAME = re.compile(rf"(.*?)_({'|'.join(UNITS)})(_lo|_hi)?")
TAKEN = ("scorecard", "validation")  # the judgement's own files
PUBLIC = ("dev", "etc", "proc", "sys")  # alike on every machine
# backslashes that change nothing: before what means nothing here, or does at a line's start only, or not within a word
NEEDLESS = re.compile(r"""(?<!\\)\\([,;:%?'"/(]|(?<=\S\\)[-+=>]|(?<=\w\\)_(?=\w))""")
NUMBERED = re.compile(r"[\s>*+-]*\d+\\[.)](?:\s|$)")
ABSOLUTE = re.compile(r"(?<![\w/.:<~\\)])\\?/(?!/)[\w\\.~+@%-]+(?:/[\w\\.~+@%-]+)+/?")


def export(run_dir: Path, formats: Sequence[str], output_name: str = "report") -> list[Path]:
    """Write <output_name>.<format> into the run directory for each of the formats. Returns the files.

    Raises RunError for a format or a name that cannot be, and where the book of the run is not made yet.
    """
    for name in formats:
        if name not in FORMATS:
            raise RunError(f"unknown format {name!r}; known: {', '.join(FORMATS)}")
    if Path(output_name).name != output_name or output_name[:1] in ("", ".") or Path(output_name).stem in TAKEN:
        raise RunError(f"output name {output_name!r}: give a free name of a file in the run's folder, e.g. report")
    run = derive.load(run_dir, lenient=True)
    card = judged(run)
    out = []
    for name in dict.fromkeys(formats):
        path = run.directory / f"{output_name.removesuffix(f'.{name}')}.{name}"
        write_text_atomic(path, FORMATS[name](run, card))
        out.append(path)
    return out


def judged(run: LoadedRun) -> dict[str, Any]:
    """scorecard.json as the report left it, so that the file says what the book says. RunError where there is no book."""
    directory = run.directory
    needed = [directory / name for name in ("scorecard.json", "scorecard.md", "validation.md", "site/index.html")]
    needed += [directory / "notebooks" / runner.families()[f].name for f in run.files if f in runner.families()]
    for path in needed:
        if not path.is_file():
            what = path.relative_to(directory)
            raise RunError(f"{directory}: {what} is missing; make the book first: {remake(run)}")
    card = read_json(directory / "scorecard.json")
    if not isinstance(card, dict) or not isinstance(card.get("verdict"), str) or not isinstance(card.get("reasons"), list):
        raise RunError(f"{directory / 'scorecard.json'}: no scorecard; make it again: {remake(run)}")
    return card


def remake(run: LoadedRun) -> str:
    return f"make report RUN={shlex.quote(str(run.directory))}"


# ------------------------------------------------------------------------------------------------------------ Markdown


def markdown(run: LoadedRun, card: Mapping[str, Any]) -> str:
    """The whole report. `card`: scorecard.json."""
    parts = [
        *front_matter(run),
        f"# {plain(findings.machine_name(run))}",
        *(["> **SYNTHETIC:** generated numbers, nothing was measured."] if run.synthetic else []),
        *banners(findings.banners(run)),
        plain(findings.provenance(run)),
        "## Summary",
        f"**{card['verdict']}**",
        *([f"{i}. {plain(str(text))}." for i, text in enumerate(card["reasons"], start=1)] or ["Nothing was missed."]),
        "### Headline figures",
        *headlines(run),
        *judgement(run, "scorecard.md", "Scorecard"),
        *judgement(run, "validation.md", "Outside tools"),
        "## The run",
        deeper("".join(run_page.page(run, markdown=True).partition("## ")[1:])),
    ]
    for page in report.pages(run, {}).values():
        parts += family(run, page)
    return anonymous("\n\n".join(part.strip("\n") for part in parts if part.strip()), run.directory) + "\n"


def front_matter(run: LoadedRun) -> Iterator[str]:
    """YAML of what a collection of notes sorts by. Tags hold no blanks."""
    info, profile, project = run.info, run.selection.found_profile, run.config["project"]
    words = ["escher", profile.key if profile else run.found.kind, info["workload"].get("name", ""), info["settings"]["budget"]]
    words += ["synthetic"] if run.synthetic else []
    about = {
        "title": f"{project['title']}: {findings.machine_name(run)}",
        "run_id": info["run_id"],
        "date": info["created_utc"][:10],
        "author": project["author"],
        "tags": [tag for word in words if (tag := re.sub(r"[^\w/-]+", "-", str(word)).strip("-"))],
    }
    yield f"---\n{yaml.safe_dump(about, allow_unicode=True, sort_keys=False, width=1000)}---"


def plain(text: str) -> str:
    """Text of one line that reads as it is, with few backslashes."""
    return deeper(stage.escape(text))


def banners(items: Sequence[tuple[str, str]]) -> Iterator[str]:
    for kind, text in items:
        yield f"> **{kind.capitalize()}:** {plain(text)}"


def headlines(run: LoadedRun) -> Iterator[str]:
    """The landing page's cards as a list: what, value, its interval, what it is a share of."""
    lines = []
    for card in findings.cards(run).split('<div class="headline-card">')[1:]:
        shown = {name: unescape(re.sub("<[^>]*>", "", text)) for name, text in re.findall(r'<p class="(\w+)">(.*?)</p>', card)}
        more = [shown[name] for name in ("interval", "basis") if name in shown]
        around = f" ({plain('; '.join(more))})" if more else ""
        lines.append(f"- {plain(shown['label'])}: **{plain(shown['value'])}**{around}")
    yield "\n".join(lines)


def judgement(run: LoadedRun, name: str, title: str) -> Iterator[str]:
    """scorecard.md or validation.md under another heading. What stands above the scorecard's first table, and its caption,
    is in the summary."""
    yield f"## {title}"
    blocks = (run.directory / name).read_text(encoding="utf-8").partition("\n")[2].split("\n\n")
    first = next((i for i, block in enumerate(blocks) if block.startswith("|")), 1) if name == "scorecard.md" else 0
    yield deeper("\n\n".join(blocks[max(0, first - 1) :]))


def family(run: LoadedRun, page: stage.PageInfo) -> Iterator[str]:
    """A family's page: title, what it says of itself, and its cells in order. A page that is missing says why."""
    import nbformat  # takes 2 s, which no other command must wait for

    yield f"## {plain(page.title)}"
    shared = findings.banners(run)  # the summary has them
    yield from banners([b for b in page.banner if b not in shared])
    if page.notebook is None:
        yield f"Not run: {plain(page.reason)}."
        return
    try:
        executed = with_tables(nbformat.read(page.notebook, as_version=4))
        cells = json.loads(stage.transform(executed, stage.PageInfo(page.notebook, page.title)))["cells"]
    except (OSError, ValueError, LookupError, AttributeError, TypeError, nbformat.ValidationError) as exc:
        said = " ".join(str(exc).split())[:200]
        raise BookError(f"{page.notebook} is no executed notebook ({said}); make it again: {remake(run)}") from None
    for cell in cells:
        tags = set(cell["metadata"].get("tags", []))
        if cell["cell_type"] == "markdown":
            yield deeper(re.sub(r"\A# .*", "", cell["source"]))
        elif not tags & {"remove-cell", "remove-output"}:
            for output in cell.get("outputs", []):
                yield shown(run, output)


def with_tables(notebook: dict[str, Any]) -> dict[str, Any]:
    """The notebook with Markdown for each table that has rows in base units alone."""
    for cell in notebook["cells"]:
        for data in (output.get("data", {}) for output in cell.get("outputs", [])):
            if tables.RAW in data and "text/markdown" not in data:
                data["text/markdown"] = pipe_table(data[tables.RAW])
    return notebook


def pipe_table(raw: Mapping[str, Any]) -> str:
    """Rows in base units as a pipe table: the unit in the heading, numbers of four digits."""
    def heading(name: str) -> str:
        found = NAME.fullmatch(f"_{name}")
        if not found:
            return name.replace("_", " ")
        words = (found[1] or found[2].removesuffix("_s")) + (found[3] or "")
        return f"{words.strip('_').replace('_', ' ')}, {UNITS[found[2]]}"

    def cell(value: Any) -> str:
        if isinstance(value, float):
            return number(value, 4)
        return tables.NONE if value is None else f"{value:,}" if type(value) is int else str(value)

    columns = [
        Column(heading(name), lambda row, i=i: cell(row[i]), any(type(row[i]) in (int, float) for row in raw["rows"]))
        for i, name in enumerate(raw["columns"])
    ]
    return Table(raw["name"], raw["name"].replace("_", " "), columns, raw["rows"]).to_markdown()


def shown(run: LoadedRun, output: Mapping[str, Any]) -> str:
    """One output: a chart as its image, else Markdown, else what was printed, as text."""
    if output["output_type"] == "error":
        return f"> **Error:** {plain(''.join(output['traceback']))}"
    if output["output_type"] == "stream":
        return fenced(output["text"])
    data = output["data"]
    if spec := data.get(vega.MIME):
        title = vega.title(spec)
        image = "plots/" + re.sub(r"\W+", "_", title) + ".png"  # as the report named it
        if (run.directory / image).is_file():
            return f"![{plain(title)}]({image})"
        return f"Chart without an image: {plain(title)}."
    return deeper(text) if (text := data.get("text/markdown")) else fenced(data.get("text/plain", ""))


def fenced(text: str) -> str:
    ticks = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return f"{ticks}text\n{text.rstrip()}\n{ticks}" if text.strip() else ""


def deeper(text: str) -> str:
    """Headings one level down, outside code; links between the book's pages as their text; few backslashes."""
    lines, fence = [], ""
    for line in text.splitlines():
        mark = re.match(r"\s{0,3}(`{3,}|~{3,})", line)
        if mark:
            fence = "" if fence and mark[1].startswith(fence) else fence or mark[1]
        elif not fence:
            line = re.sub(r"^(#{1,5}) ", r"#\1 ", line)
            if "`" not in line:
                line = NEEDLESS.sub(r"\1", line)
                line = line if NUMBERED.match(line) else re.sub(r"(?<!\\)\\([.)])", r"\1", line)
            line = re.sub(r"(?<!!)\[([^\]\[]+)\]\((?!https?:)[^)\s]+\)", r"\1", line)
        lines.append(line)
    return "\n".join(lines)


def anonymous(text: str, run_dir: Path) -> str:
    """Without a path of this machine, or of that which measured: the run, this tree and the home by what they are, any
    other path that is not the same everywhere by its last part."""
    for folder, name in ((run_dir, run_dir.name), (ROOT, "."), (Path.home(), "~")):
        path = str(folder.absolute())
        if len(folder.absolute().parts) > 1:  # escaped or not
            written = "".join(rf"\\?{re.escape(c)}" if not c.isalnum() else c for c in path)
            text = re.sub(rf"(?<![\w/]){written}(?![\w-])", lambda _, to=name: to, text)

    def last(match: re.Match[str]) -> str:
        parts = [part for part in re.split(r"\\?/", match[0]) if part]
        return match[0] if parts[0] in PUBLIC else parts[-1]

    return ABSOLUTE.sub(last, text)


FORMATS: dict[str, Callable[[LoadedRun, Mapping[str, Any]], str]] = {"md": markdown}
