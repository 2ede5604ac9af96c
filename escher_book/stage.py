"""From executed notebooks to a site: `stage` writes a folder that Jupyter Book can build, `build` builds it.

The book is never built from the repository: a run's pages are copied and transformed into a staging folder first.
A transformed notebook shows results first: code is folded, parameters and error markers are gone, a failed cell
stands open with the last line of its traceback. What a page has to say about itself (its notebook failed, the
device is not the target, the data is synthetic) comes from the caller as `PageInfo`; nothing is inferred from the
notebook, because papermill does not record every way to fail.

Files are written only where their content changed. `build` puts the new site in the old one's place when it is whole.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from escher_kernels.records import write_text_atomic

ADMONITIONS = ("attention", "caution", "danger", "error", "hint", "important", "note", "seealso", "tip", "warning")
OUTPUT_LIMIT_BYTES = 5_000_000
MANIFEST = ".staged.json"

_FOLDED = {"hide-input", "hide-cell", "remove-input", "remove-cell"}
_HIDING = _FOLDED | {"hide-output", "remove-output"}
_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_PUNCTUATION = re.compile(r"([!-/:-@\[-`{-~])")


class BookError(Exception):
    """The book cannot be staged or built; the message is one line for the user."""


@dataclass(frozen=True)
class PageInfo:
    """What one notebook page shows. `title` replaces the notebook's first heading; below it come `subtitle`, a line in
    small print, and `banner`, a list of (admonition kind, plain text). Without a `notebook` the page says why
    (`reason`) and how to get it (`command`)."""

    notebook: Path | None
    title: str
    banner: Sequence[tuple[str, str]] = ()
    subtitle: str = ""
    reason: str = ""
    command: str = ""


@dataclass(frozen=True)
class BookMeta:
    """What is filled into `_config.yml`. `watermark` (a word such as SYNTHETIC) is drawn behind every page and
    `watermark_note` (a sentence) heads it; both are for runs whose numbers were not measured."""

    title: str
    run_id: str
    author: str = ""
    watermark: str = ""
    watermark_note: str = ""


@dataclass(frozen=True)
class BuildResult:
    """`ok` or not; on failure `warnings` are the lines that say why and the old site is untouched."""

    ok: bool
    site: Path
    warnings: tuple[str, ...]
    log: Path
    seconds: float


# ------------------------------------------------------------------------------------------------------ staging


def stage(
    run_dir: Path,
    source_root: Path,
    staging_dir: Path,
    pages: Mapping[str, PageInfo],
    meta: BookMeta,
    generated: Mapping[str, str] | None = None,
) -> list[str]:
    """Writes everything that `_toc.yml` names into `staging_dir`.

    `pages` maps a notebook's name (`01_compute`) to its page, `generated` a relative path (`index.md`) to Markdown;
    `notebooks/*.md` of `source_root` are the prose pages. Each page of the book comes from exactly one of the three.
    Returns the relative paths written or removed, empty when nothing changed. Raises BookError for a toc entry that
    nothing provides, and for a page that is in no toc entry.
    """
    generated = dict(generated or {})
    hide = _Paths({run_dir: run_dir.name, source_root: ".", Path.home(): "~"})
    files: dict[str, str] = {}
    for name, page in pages.items():
        path, text = _notebook_page(name, page, hide)
        files[f"notebooks/{path}"] = text
    prose = sorted((source_root / "notebooks").glob("*.md"))
    for path, text in [(f"notebooks/{p.name}", p.read_text(encoding="utf-8")) for p in prose] + list(generated.items()):
        _relative(path)
        twin = next((other for other in files if _docname(other) == _docname(path)), None)
        if twin:
            raise BookError(f"two sources for the page {_docname(path)}: {twin} and {path}; rename one")
        files[path] = text
    toc_text = (source_root / "_toc.yml").read_text(encoding="utf-8")
    _check_toc(toc_text, {_docname(path) for path in files}, source_root)
    files["_toc.yml"] = toc_text
    files["_config.yml"] = _config((source_root / "_config.yml").read_text(encoding="utf-8"), meta)
    return _write_tree(staging_dir, files)


def transform(notebook: Mapping[str, Any], page: PageInfo, hide: Mapping[Path, str] | None = None) -> str:
    """The executed `notebook` as the JSON text of a book page; see the module's docstring. Deterministic.
    `hide` maps folders to what is shown instead of their paths in printed text and errors."""
    import nbformat  # takes 2 s, which no other command must wait for

    paths = hide if isinstance(hide, _Paths) else _Paths(hide or {})
    source = nbformat.from_dict(json.loads(json.dumps(notebook)))
    cells = [cell for cell in (_cell(cell, paths) for cell in source.cells) if cell is not None]
    head = _head(page)
    if cells and cells[0].cell_type == "markdown":
        cells[0]["source"] = _replace_title(cells[0]["source"], head)
    else:
        cells.insert(0, nbformat.from_dict({"cell_type": "markdown", "id": "title", "metadata": {}, "source": head}))
    keep = {key: source.metadata[key] for key in ("kernelspec", "language_info") if key in source.metadata}
    page_notebook = {
        "cells": cells,
        "metadata": keep,
        "nbformat": source.nbformat,
        "nbformat_minor": source.nbformat_minor,
    }
    return json.dumps(page_notebook, ensure_ascii=False, indent=1, sort_keys=True) + "\n"


def escape(text: str) -> str:
    """Plain text as one line of Markdown that reads exactly like it, whatever characters a device name has."""
    return _PUNCTUATION.sub(r"\\\1", _plain(text))


def admonition(kind: str, text: str) -> str:
    """Plain text as a MyST admonition. Raises ValueError for a kind that does not exist."""
    if kind not in ADMONITIONS:
        raise ValueError(f"banner kind {kind!r}; expected one of {', '.join(ADMONITIONS)}")
    paragraphs = [escape(part) for part in re.split(r"\n\s*\n", text) if part.strip()]
    return f":::{{{kind}}}\n" + "\n\n".join(paragraphs) + "\n:::"


def _plain(text: str) -> str:
    return " ".join(_CONTROL.sub("", _ANSI.sub("", text)).split())


def _notebook_page(name: str, page: PageInfo, hide: _Paths) -> tuple[str, str]:
    if page.notebook is None:
        return f"{name}.md", _stub(page)
    import nbformat

    try:
        notebook = nbformat.read(page.notebook, as_version=4)
    except (OSError, nbformat.reader.NotJSONError, nbformat.ValidationError) as error:
        raise BookError(f"page {name}: {page.notebook} is not a readable notebook ({error}); run it again") from error
    return f"{name}.ipynb", transform(notebook, page, hide)


def _stub(page: PageInfo) -> str:
    parts = [_head(page), admonition("note", f"Not run: {page.reason or 'no reason was recorded'}")]
    if page.command:
        fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", page.command)), default=0))
        parts.append(f"To get this page:\n\n{fence}bash\n{_ANSI.sub('', page.command).strip()}\n{fence}")
    return "\n\n".join(parts) + "\n"


def _head(page: PageInfo) -> str:
    subtitle = [f":::{{div}} subtitle\n{escape(page.subtitle)}\n:::"] if page.subtitle else []
    parts = [f"# {escape(page.title)}", *subtitle, *(admonition(kind, text) for kind, text in page.banner)]
    return "\n\n".join(parts) + "\n"


def _replace_title(source: str, head: str) -> str:
    fence = ""
    lines = source.splitlines()
    for number, line in enumerate(lines):
        mark = re.match(r"\s{0,3}(`{3,}|~{3,}|:{3,})", line)
        if mark and not fence:
            fence = mark[1]
        elif mark and mark[1].startswith(fence) and not line.strip().strip(fence[0]):
            fence = ""
        elif not fence and re.match(r"\s{0,3}#\s+\S", line):
            return "\n".join([*lines[:number], head, *lines[number + 1 :]])
    return f"{head}\n{source}"


def _cell(cell: Any, hide: _Paths) -> Any | None:
    tags = set(cell.metadata.get("tags", []))
    if tags & {"papermill-error-cell-tag", "injected-parameters"}:  # the latter holds paths of this machine
        return None
    metadata: dict[str, Any] = {"mystnb": cell.metadata["mystnb"]} if "mystnb" in cell.metadata else {}
    if cell.cell_type == "code":
        cell["outputs"] = [out for out in (_output(out, hide) for out in cell.outputs) if out is not None]
        cell["execution_count"] = None
        if any(out.output_type == "error" for out in cell.outputs):
            tags -= _HIDING
        elif tags & {"parameters", "lab-only"}:
            tags.add("remove-cell")
        elif not cell.outputs and "remove-output" not in tags:
            tags.add("remove-cell")  # it shows nothing for this device
        elif not tags & _FOLDED:
            tags.add("hide-input")
    if tags:
        metadata["tags"] = sorted(tags)
    cell["metadata"] = metadata
    return cell


def _output(output: Any, hide: _Paths) -> Any | None:
    if output.output_type == "stream":
        if output.name == "stderr":
            return None
        output["text"] = _shorten(hide(_ANSI.sub("", output.text)))
        return output
    if output.output_type == "error":
        output["evalue"] = _shorten(hide(_ANSI.sub("", output.evalue)))
        output["traceback"] = [f"{output.ename}: {output.evalue}".rstrip(": ")]
        return output
    output["metadata"] = {}
    if "execution_count" in output:
        output["execution_count"] = None
    shown = {mime: value for mime, value in output.data.items() if not mime.startswith("application/vnd.escher.")}
    data = {mime: _shorten(value) if mime == "text/plain" else value for mime, value in shown.items()}
    if "text/plain" in data:
        data["text/plain"] = hide(_ANSI.sub("", data["text/plain"]))
    size = len(json.dumps(data, ensure_ascii=False).encode("utf-8", "surrogatepass"))
    if size > OUTPUT_LIMIT_BYTES:
        kinds = ", ".join(sorted(data))
        data = {"text/plain": f"[output of {size / 1e6:.1f} MB left out; the limit is {_LIMIT_TEXT}: {kinds}]"}
    output["data"] = type(output.data)(data)
    return output


_LIMIT_TEXT = f"{OUTPUT_LIMIT_BYTES / 1e6:g} MB"


def _shorten(text: str) -> str:
    raw = text.encode("utf-8", "replace")
    if len(raw) <= OUTPUT_LIMIT_BYTES:
        return text
    kept = raw[:OUTPUT_LIMIT_BYTES].decode("utf-8", "ignore")
    return f"{kept}\n[cut here: {len(raw) / 1e6:.1f} MB printed, the limit is {_LIMIT_TEXT}]\n"


class _Paths(dict):
    """Folders and what is shown instead of them; called with a text it replaces them, the longest path first."""

    def __call__(self, text: str) -> str:
        for folder in sorted(self, key=lambda path: -len(str(path))):
            shown = str(folder)
            if folder.is_absolute() and len(folder.parts) > 1:
                text = re.sub(rf"(?<![\w/]){re.escape(shown)}(?![\w-])", lambda _, to=self[folder]: to, text)
        return text


def _config(text: str, meta: BookMeta) -> str:
    config = yaml.safe_load(text)
    config["title"] = _plain(meta.title)
    config["author"] = _plain(meta.author)
    values = config.setdefault("sphinx", {}).setdefault("config", {})
    values["escher_run"] = _plain(meta.run_id)
    values["escher_watermark"] = _plain(meta.watermark)
    values["escher_watermark_note"] = _plain(meta.watermark_note)
    return yaml.safe_dump(config, allow_unicode=True, sort_keys=False, width=1000)


def _toc_files(entry: Any) -> Iterator[str]:
    if isinstance(entry, dict):
        for key, value in entry.items():
            if key in ("file", "root"):
                yield str(value)
            elif key in ("parts", "chapters", "sections", "subtrees", "entries"):
                yield from _toc_files(value)
    elif isinstance(entry, list):
        for value in entry:
            yield from _toc_files(value)


def _check_toc(toc_text: str, provided: set[str], source_root: Path) -> None:
    listed = [_docname(name) for name in _toc_files(yaml.safe_load(toc_text))]
    missing = [name for name in listed if name not in provided]
    orphans = sorted(provided - set(listed))
    if missing:
        raise BookError(
            f"_toc.yml of {source_root} names {', '.join(missing)}, which no executed notebook, no notebooks/*.md and "
            f"no generated page provides; there are: {', '.join(sorted(provided))}"
        )
    if orphans:
        raise BookError(
            f"no entry of _toc.yml of {source_root} names {', '.join(orphans)}; add a line `- file: {orphans[0]}`"
        )


def _docname(path: str) -> str:
    return re.sub(r"\.(md|ipynb)$", "", path)


def _relative(path: str) -> None:
    if Path(path).is_absolute() or ".." in Path(path).parts or not path.endswith(".md"):
        raise BookError(f"generated page {path!r}; expected a relative path that ends in .md, e.g. index.md")


def _write_tree(folder: Path, files: Mapping[str, str]) -> list[str]:
    """Writes what changed and removes what an earlier call wrote and this one does not."""
    manifest = folder / MANIFEST
    try:
        before = set(json.loads(manifest.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        before = set()
    changed = []
    for path in sorted(before - set(files)):
        (folder / path).unlink(missing_ok=True)
        changed.append(path)
    for path, text in files.items():
        target = folder / path
        if target.is_file() and target.read_bytes() == text.encode("utf-8"):
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomic(target, text)
        changed.append(path)
    if changed:
        write_text_atomic(manifest, json.dumps(sorted(files)))
    return changed


# ----------------------------------------------------------------------------------------------------- building


def build(staging_dir: Path, site_dir: Path, timeout_s: float = 900) -> BuildResult:
    """Builds the staged book and puts it at `site_dir`, with warnings as errors.

    Each build starts from nothing: an incremental one would not repeat the warnings of pages that did not change. The
    log stays beside the site (`<site>.log`). Raises BookError where no fitting Jupyter Book is installed.
    """
    check_jupyter_book()
    staging_dir, site_dir = staging_dir.resolve(), site_dir.resolve()
    work = site_dir.with_name(f".{site_dir.name}.build")
    retired = site_dir.with_name(f".{site_dir.name}.old")
    log = site_dir.with_name(f"{site_dir.name}.log")
    if retired.is_dir() and not site_dir.exists():  # killed between the two renames below
        os.rename(retired, site_dir)
    for left_over in (work, retired):
        shutil.rmtree(left_over, ignore_errors=True)
    work.mkdir(parents=True)
    started = time.monotonic()
    try:
        status, text = _jupyter_book(staging_dir, work, timeout_s)
        write_text_atomic(log, text)
        seconds = time.monotonic() - started
        html = work / "_build" / "html"
        warnings = _warnings(text)
        if status != 0 or not (html / "index.html").is_file():
            return BuildResult(False, site_dir, tuple(warnings or text.strip().splitlines()[-15:]), log, seconds)
        if site_dir.exists():
            os.rename(site_dir, retired)
        os.rename(html, site_dir)
        return BuildResult(True, site_dir, tuple(warnings), log, seconds)
    finally:
        for left_over in (work, retired):
            shutil.rmtree(left_over, ignore_errors=True)


def check_jupyter_book() -> None:
    """Raises BookError unless the installed Jupyter Book is a 1.x: 2.x is another program and fetches its theme."""
    try:
        version = importlib.metadata.version("jupyter-book")
    except importlib.metadata.PackageNotFoundError:
        version = ""
    if version.split(".")[0] != "1":
        found = f"jupyter-book {version} found" if version else "jupyter-book is not installed"
        raise BookError(f"{found}; this book needs >=1.0.4,<2: pip install 'jupyter-book<2'")


def _jupyter_book(staging_dir: Path, work: Path, timeout_s: float) -> tuple[int, str]:
    call = "from jupyter_book.cli.main import main; main()"  # `python -m jupyter_book` does not exist
    arguments = ["build", str(staging_dir), "--path-output", str(work), "-W", "--keep-going"]
    try:
        done = subprocess.run(
            [sys.executable, "-c", call, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=work,
            env={**os.environ, "PYTHONUTF8": "1", "PYTHONIOENCODING": "utf-8", "NO_COLOR": "1"},
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as expired:
        printed = (expired.stdout or b"").decode("utf-8", "replace")
        return 124, f"{_ANSI.sub('', printed)}\nERROR: jupyter-book took longer than {timeout_s:g} s"
    return done.returncode, _ANSI.sub("", done.stdout.decode("utf-8", "replace")).replace("\r", "\n")


def _warnings(log: str) -> list[str]:
    return [line.strip() for line in log.splitlines() if re.search(r"\b(WARNING|ERROR|CRITICAL|SEVERE):", line)]
