"""The book's Sphinx extension: charts, formulas and search that work without a network, and a guard that proves it.

- `VegaLiteMimeRenderer` (a myst_nb plug-in, see pyproject.toml) turns a chart output into a `<div>` with the
  specification inside. Pages with a chart load two local scripts; `vega-init.js` sets `data-state` of each div to
  `drawn`, `empty` or `failed`, and `data-marks` to the number of marks drawn.
- Formulas become MathML while building.
- Watermark: `escher_watermark` is drawn behind every page, `escher_watermark_note` heads it.
- After the build every page and style sheet is searched for resources that a browser would load from elsewhere; each
  is a warning, so `-W` fails the build. Ordinary links are no resources.

The Vega scripts (vega-embed and all below it) come out of vl-convert. They are wrapped in a function because their
top-level names clash with Sphinx's own scripts, and kept in `escher_vega_cache` because making them takes seconds.
"""

from __future__ import annotations

import html
import json
import os
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError
from sphinx.util import logging
from sphinx.util.math import get_node_equation_number

from escher_kernels.records import RecordError, write_text_atomic

from . import vega

STATIC = Path(__file__).with_name("static")
MIMES = (vega.MIME, "application/vnd.vegalite.v6+json")

logger = logging.getLogger(__name__)


class VegaLiteMimeRenderer:
    """The myst_nb plug-in; registered by the entry point `escher-vega`."""

    mime_priority_overrides = [(builder, mime, 5) for builder in ("html", "dirhtml", "singlehtml") for mime in MIMES]

    @staticmethod
    def handle_mime(renderer: Any, data: Any, inline: bool) -> list[nodes.Element] | None:
        if inline or data.mime_type not in MIMES:
            return None
        title = vega.title(data.content)
        try:
            vega.lint(data.content)
        except ValueError as error:
            renderer.logger.warning(str(error), line=data.line)
        env = renderer.renderer.sphinx_env
        if env is not None and env.app.builder.name == "singlehtml":  # the one-file report carries no script
            svg = vega.svg(data.content)
            figure = f'<div class="escher-vega" role="img" aria-label="{html.escape(title)}">{svg}</div>'
            return [nodes.raw(text=figure, format="html", classes=["output"])]
        renderer.add_js_file("escher-vega-0", "escher/vega-bundle.js", {"defer": "defer"})
        renderer.add_js_file("escher-vega-1", "vega-init.js", {"defer": "defer"})
        return [nodes.raw(text=chart_html(data.content), format="html", classes=["output"])]


def chart_html(spec: dict[str, Any]) -> str:
    """The container that `vega-init.js` draws into. No text of the specification can end its script element."""
    title = vega.title(spec)
    body = json.dumps(spec, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return (
        f'<div class="escher-vega" role="img" aria-label="{html.escape(title)}">'
        f'<script type="application/json">{body}</script>'
        f"<noscript><p>Chart: {html.escape(title)}. Drawing it needs JavaScript; the numbers are in the tables "
        f"of this page.</p></noscript></div>"
    )


# ---------------------------------------------------------------------------------------------------- formulas


def mathml(latex: str, display: bool) -> str:
    """MathML of a formula. Raises ValueError where a part of it is unknown to latex2mathml."""
    import latex2mathml.converter

    try:
        text = latex2mathml.converter.convert(latex, display="block" if display else "inline")
    except Exception as error:  # the library's errors have no common base
        raise ValueError(f"formula {latex!r}: {type(error).__name__} {error}") from error
    unknown = re.findall(r">\s*(\\[A-Za-z]+)", text)
    if unknown:
        raise ValueError(f"formula {latex!r}: latex2mathml does not know {', '.join(sorted(set(unknown)))}")
    return text


def _formula(latex: str, display: bool, node: nodes.Node) -> str:
    try:
        return mathml(latex, display)
    except ValueError as error:
        logger.warning(str(error), location=node)
        return f"<code>{html.escape(latex)}</code>"


def _visit_math(self: Any, node: nodes.math) -> None:
    self.body.append(self.starttag(node, "span", "", CLASS="math notranslate nohighlight"))
    self.body.append(_formula(node.astext(), False, node) + "</span>")
    raise nodes.SkipNode


def _visit_math_block(self: Any, node: nodes.math_block) -> None:
    self.body.append(self.starttag(node, "div", CLASS="math notranslate nohighlight"))
    if node.get("number"):
        self.body.append(f'<span class="eqno">({get_node_equation_number(self, node)})')
        self.add_permalink_ref(node, "Link to this equation")
        self.body.append("</span>")
    self.body.append(_formula(node.astext().strip(), True, node) + "</div>\n")
    raise nodes.SkipNode


# ------------------------------------------------------------------------------------------------- static files


def vega_bundle(vega_lite: str, cache: Path | None) -> str:
    """The Vega scripts as one self-contained script; read from `cache` or, where that can be written, kept there."""
    import vl_convert

    stored = cache / f"vega-bundle-{vl_convert.__version__}-{vega_lite}.js" if cache else None
    if stored and stored.is_file():
        return stored.read_text(encoding="utf-8")
    script = "(function(){" + vl_convert.javascript_bundle(vl_version=vega_lite) + "\n})();\n"
    if stored:
        try:
            write_text_atomic(stored, script)
        except RecordError as error:
            logger.info("the Vega scripts are not kept for the next build: %s", error)
    return script


def _cache_folder(app: Sphinx) -> Path | None:
    if app.config.escher_vega_cache:
        return Path(app.config.escher_vega_cache)
    base = os.environ.get("XDG_CACHE_HOME")
    if base:
        return Path(base) / "escher"
    home = Path(os.path.expanduser("~"))
    return home / ".cache" / "escher" if home.is_dir() else None


def _config_inited(app: Sphinx, config: Any) -> None:
    config.html_static_path.append(str(STATIC))
    if not config.html_favicon:
        config.html_favicon = str(STATIC / "favicon.svg")


def _builder_inited(app: Sphinx) -> None:
    if app.builder.format != "html":
        return
    from myst_nb.core.render import load_mime_renders

    if VegaLiteMimeRenderer not in load_mime_renders():
        raise ExtensionError(
            "the package is importable but not installed, so no chart would be drawn; run `pip install -e .`"
        )
    app.add_css_file("escher.css", priority=900)
    app.add_js_file("escher.js")
    folder = Path(app.outdir) / "_static" / "escher"
    folder.mkdir(parents=True, exist_ok=True)
    if app.builder.name != "singlehtml":
        script = vega_bundle(app.config.escher_vega_lite, _cache_folder(app))
        (folder / "vega-bundle.js").write_text(script, encoding="utf-8")
    if app.config.escher_watermark:
        (folder / "watermark.css").write_text(watermark_css(app.config.escher_watermark), encoding="utf-8")
        app.add_css_file("escher/watermark.css", priority=901)


def watermark_css(text: str) -> str:
    """Draws `text` across the page, behind nothing and in nobody's way, on screen and on every printed sheet."""
    drawing = (
        '<svg xmlns="http://www.w3.org/2000/svg" width="420" height="300">'
        '<text x="210" y="150" text-anchor="middle" transform="rotate(-30 210 150)" font-family="sans-serif" '
        f'font-size="38" font-weight="700" letter-spacing="6" fill="#d97706" fill-opacity="0.14">{html.escape(text)}'
        "</text></svg>"
    )
    encoded = "".join(c if c.isalnum() and c.isascii() else "".join(f"%{b:02X}" for b in c.encode()) for c in drawing)
    return (
        "body::after{content:'';position:fixed;inset:0;z-index:2000;pointer-events:none;"
        f'background:url("data:image/svg+xml,{encoded}")}}\n'
    )


def _page_context(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    note = app.config.escher_watermark_note or app.config.escher_watermark
    if app.config.escher_watermark:
        context["theme_announcement"] = f'<div class="escher-watermark">{html.escape(note)}</div>'
    if "pagetitle" in context:  # the theme prints it unescaped above the printed page
        context["pagetitle"] = context.get("title", "")
    context["theme_footer_content_items"] = ["author.html", "extra-footer.html"]
    if app.config.escher_run:
        context["theme_extra_footer"] = f"Run <code>{html.escape(app.config.escher_run)}</code>"


# -------------------------------------------------------------------------------------------------------- guard

_LOADING = {
    "script": ("src",),
    "img": ("src", "srcset"),
    "iframe": ("src", "srcdoc"),
    "source": ("src", "srcset"),
    "video": ("src", "poster"),
    "audio": ("src",),
    "track": ("src",),
    "embed": ("src",),
    "object": ("data",),
    "input": ("src",),
    "use": ("href", "xlink:href"),
    "image": ("href", "xlink:href"),
}
_LOADING_LINKS = {"stylesheet", "icon", "shortcut", "apple-touch-icon", "preload", "modulepreload", "prefetch",
                  "preconnect", "dns-prefetch", "manifest", "import"}  # fmt: skip
_EXTERNAL = re.compile(r"(?:^|[\s,])(?:https?:)?//[^\s/]", re.IGNORECASE)
_CSS_EXTERNAL = re.compile(r"(?:url\(\s*['\"]?|@import\s+['\"])((?:https?:)?//[^'\")\s]+)", re.IGNORECASE)
_SCRIPT_EXTERNAL = re.compile(r"https?://[^\s'\"`)\\]+", re.IGNORECASE)


class _Loads(HTMLParser):
    """Collects what a browser would fetch from another host when it opens the page."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.found: list[str] = []
        self._inside = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {key: value or "" for key, value in attrs}
        names = _LOADING.get(tag, ())
        if tag == "link" and _LOADING_LINKS & set(values.get("rel", "").lower().split()):
            names = ("href",)
        for name in names:
            if name in values and _EXTERNAL.search(values[name]):
                self.found.append(f"<{tag} {name}={values[name]!r}>")
        self._css(values.get("style", ""), f"<{tag} style>")
        if tag == "style":
            self._inside = "style"
        elif tag == "script" and "json" not in values.get("type", ""):
            self._inside = "script"

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self._inside = ""

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "style":
            self._css(data, "<style>")
        elif self._inside == "script":
            self.found.extend(f"<script> with {address}" for address in _SCRIPT_EXTERNAL.findall(data))

    def _css(self, text: str, where: str) -> None:
        self.found.extend(f"{where} {address}" for address in _CSS_EXTERNAL.findall(text))


def external_resources(text: str, kind: str = "html") -> list[str]:
    """What a page (`kind` "html") or a style sheet ("css") loads from another host; empty for an offline page."""
    if kind == "css":
        return [f"url({address})" for address in _CSS_EXTERNAL.findall(text)]
    parser = _Loads()
    parser.feed(text)
    parser.close()
    return parser.found


def _build_finished(app: Sphinx, error: Exception | None) -> None:
    if error is not None or app.builder.format != "html":
        return
    root = Path(app.outdir)
    for path in sorted(root.rglob("*")):
        kind = {".html": "html", ".css": "css"}.get(path.suffix)
        if kind is None or "_sources" in path.relative_to(root).parts:
            continue
        for found in external_resources(path.read_text(encoding="utf-8", errors="replace"), kind):
            logger.warning("%s loads from the network: %s", path.relative_to(root).as_posix(), found)


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_config_value("escher_vega_lite", vega.VEGA_LITE, "html", str)
    app.add_config_value("escher_vega_cache", "", "", str)
    for name in ("escher_run", "escher_watermark", "escher_watermark_note"):
        app.add_config_value(name, "", "html", str)
    app.add_html_math_renderer("mathml", (_visit_math, None), (_visit_math_block, None))
    app.connect("config-inited", _config_inited)
    app.connect("builder-inited", _builder_inited)
    app.connect("html-page-context", _page_context, priority=900)
    app.connect("build-finished", _build_finished)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
