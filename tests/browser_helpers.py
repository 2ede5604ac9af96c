"""Opens every page of a built site in Chromium without a network and says what is wrong with it.

report = check_site(site_dir)            # over file://
report = check_site(site_dir, "http")    # from a loopback server, under a sub-path
assert not report.problems, "\n".join(report.problems)
report.marks["notebooks/01_compute.html"]   # marks drawn, one number a chart, in page order
"""

from __future__ import annotations

import contextlib
import functools
import http.server
import os
import shutil
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

SUB_PATH = "/reports/run 1"  # a space, so that no page can rely on its own address
NOT_OUR_PAGES = {"genindex.html", "search.html"}  # made by Sphinx: no heading of ours; opened all the same


@dataclass
class SiteReport:
    pages: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    marks: dict[str, list[int]] = field(default_factory=dict)
    tooltips: dict[str, str] = field(default_factory=dict)  # the first chart of each page with charts


def chromium() -> str:
    """The path of a Chromium. Without one: skips the test, or fails it where `CI` is set."""
    for candidate in (os.environ.get("CHROMIUM", ""), "/usr/bin/chromium", shutil.which("chromium") or ""):
        if candidate and Path(candidate).is_file():
            return candidate
    reason = "no Chromium: set CHROMIUM to its path, or apt-get install chromium"
    if os.environ.get("CI"):
        pytest.fail(f"{reason} (CI is set, so this is no skip)")
    pytest.skip(reason)


@contextlib.contextmanager
def browser() -> Iterator[Any]:
    """A headless Chromium that can resolve no host name."""
    path = chromium()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        instance = playwright.chromium.launch(
            executable_path=path, args=["--no-sandbox", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]
        )
        try:
            yield instance
        finally:
            instance.close()


@contextlib.contextmanager
def serve(folder: Path) -> Iterator[str]:
    """`folder` under `SUB_PATH` of a loopback server; yields its address without a trailing slash."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        def translate_path(self, path: str) -> str:
            prefix = SUB_PATH.replace(" ", "%20") + "/"
            return super().translate_path("/" + path.removeprefix(prefix) if path.startswith(prefix) else "/no-such")

        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}{SUB_PATH.replace(' ', '%20')}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextlib.contextmanager
def address(site: Path, scheme: str) -> Iterator[str]:
    """The base address of the site for `scheme` "file" or "http"."""
    if scheme == "http":
        with serve(site) as base:
            yield base
    else:
        yield site.resolve().as_uri()


def watched_page(instance: Any, problems: list[str], **options: Any) -> Any:
    """A new page whose console errors, script errors, failed and outside requests go to `problems`."""
    page = instance.new_page(**options)

    def where() -> str:
        return page.url.rsplit("/", 1)[-1]

    def on_request(request: Any) -> None:
        if not request.url.startswith(("file:", "data:", "blob:", "http://127.0.0.1:")):
            problems.append(f"{where()}: request to {request.url}")

    def on_failed(request: Any) -> None:
        if request.failure != "net::ERR_ABORTED":  # that one is a load cut short by leaving the page
            problems.append(f"{where()}: {request.url} failed: {request.failure}")

    page.on("request", on_request)
    page.on("requestfailed", on_failed)
    page.on("response", lambda r: r.status >= 400 and problems.append(f"{where()}: {r.url} answered {r.status}"))
    page.on("pageerror", lambda error: problems.append(f"{where()}: script error: {error}"))
    page.on(
        "console",
        lambda m: (
            m.type in ("error", "warning")
            and problems.append(f"{where()}: console {m.type}: {m.text} ({m.location.get('url')})")
        ),
    )
    return page


def chart_marks(page: Any, problems: list[str]) -> list[int]:
    """Waits until each chart of the open page is drawn; returns their marks, adds what failed to `problems`."""
    charts = page.locator(".escher-vega")
    marks = []
    for number in range(charts.count()):
        chart = charts.nth(number)
        chart.scroll_into_view_if_needed()
        element = chart.element_handle()
        try:
            page.wait_for_function("e => e.dataset.state && e.dataset.state !== 'drawing'", arg=element, timeout=20_000)
        except Exception as error:  # playwright's TimeoutError; its module is imported only where there is a browser
            problems.append(f"{page.url}: chart {number} was never drawn ({type(error).__name__})")
        if chart.get_attribute("data-state") != "drawn":
            problems.append(f"{page.url}: chart {number} is {chart.get_attribute('data-state')}")
        marks.append(int(chart.get_attribute("data-marks") or 0))
    return marks


def first_tooltip(page: Any) -> str:
    """The tooltip text over the first mark of the first chart; empty where it has none."""
    chart = page.locator(".escher-vega").first
    chart.scroll_into_view_if_needed()
    shapes = chart.locator("svg g:is(.mark-symbol, .mark-rect, .mark-arc, .mark-rule).role-mark > *")
    for number in range(min(shapes.count(), 12)):
        box = shapes.nth(number).bounding_box()
        if not box:
            continue
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        page.wait_for_timeout(120)
        tip = page.locator("#vg-tooltip-element.visible")
        if tip.count():
            return " ".join(tip.inner_text().split())
    return ""


def check_site(site: Path, scheme: str = "file") -> SiteReport:
    """Opens every HTML page of `site`: no outside request, no error, every chart with marks, no sideways scrolling
    at 400 pixels, a heading; then searches for a word. Problems are collected, not raised."""
    report = SiteReport()
    site = site.resolve()
    report.pages = sorted(
        path.relative_to(site).as_posix() for path in site.rglob("*.html") if "_static" not in path.parts
    )
    if not report.pages:
        report.problems.append(f"{site} has no pages")
        return report
    with browser() as instance, address(site, scheme) as base:
        page = watched_page(instance, report.problems, viewport={"width": 1300, "height": 900})
        narrow = watched_page(instance, report.problems, viewport={"width": 400, "height": 800})
        for name in report.pages:
            page.goto(f"{base}/{name}")
            if name not in NOT_OUR_PAGES and page.locator(".bd-article h1").count() < 1:
                report.problems.append(f"{name}: no heading")
            marks = chart_marks(page, report.problems)
            if marks:
                report.marks[name] = marks
                report.tooltips[name] = first_tooltip(page)
            narrow.goto(f"{base}/{name}")
            chart_marks(narrow, report.problems)
            width = narrow.evaluate("document.documentElement.scrollWidth")
            if width > 400:
                report.problems.append(f"{name}: {width} pixels wide on a screen of 400")
        hits = search(page, base, "bandwidth")
        if not hits:
            report.problems.append('search for "bandwidth" finds nothing')
    return report


def search(page: Any, base: str, word: str) -> list[str]:
    """The titles that the site's own search finds for `word`."""
    page.goto(f"{base}/search.html?q={word}")
    page.wait_for_function("/found|did not match/.test(document.querySelector('.search-summary')?.innerText || '')")
    return page.locator("#search-results ul.search li a").all_inner_texts()
