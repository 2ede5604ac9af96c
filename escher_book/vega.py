"""Charts as data: an Altair renderer for notebooks, and SVG or PNG files from the same specification.

A notebook stores a chart as ONE mime type, `MIME`, which JupyterLab draws offline and which the book's Sphinx
extension turns into a `<div>`. Altair's own renderers store HTML that loads its code from a CDN, or a label that
nbformat refuses. The label says v5 because that is the newest that JupyterLab 4 knows; the specification is v6.

A chart that would come out blank without a word (a column name that Vega-Lite reads as a path, values that are
not finite, rows that are not in the chart) is refused here with the name of the column.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

MIME = "application/vnd.vegalite.v5+json"
VEGA_LITE = "6.4"
MAX_ROWS = 5000
STATIC_WIDTH = 720  # pixels; stands in for `width: "container"`, which has no meaning without a page

_PATH_CHARACTERS = "[]."
_POSITION = ("x", "y", "x2", "y2", "theta", "radius")
_INNER = ("layer", "hconcat", "vconcat", "concat")


def enable() -> None:
    """Makes every Altair chart of this kernel display as `bundle` says. Call it once, before the first chart."""
    import altair

    altair.renderers.register("escher", bundle)
    altair.renderers.enable("escher")


def bundle(spec: dict[str, Any], **_: Any) -> dict[str, Any]:
    """The mime bundle of a chart: its specification and one line of text. Raises ValueError as `lint` does."""
    lint(spec)
    return {MIME: spec, "text/plain": f"[chart: {title(spec)}]"}


def title(spec: dict[str, Any]) -> str:
    """The chart's title on one line, else its description, else "untitled"."""
    text: Any = spec.get("title")
    if isinstance(text, dict):
        text = text.get("text")
    if isinstance(text, list):
        text = " ".join(str(part) for part in text)
    return " ".join(str(text or spec.get("description") or "untitled").split())


def svg(spec: dict[str, Any]) -> str:
    """The chart as an SVG document. Raises ValueError as `lint` does."""
    import vl_convert

    lint(spec)
    return vl_convert.vegalite_to_svg(_static(spec), vl_version=VEGA_LITE)


def png(spec: dict[str, Any], ppi: float = 144) -> bytes:
    """The chart as a PNG image of `ppi` pixels an inch (72 is one pixel a unit). Raises ValueError as `lint` does."""
    import vl_convert

    lint(spec)
    return vl_convert.vegalite_to_png(_static(spec), vl_version=VEGA_LITE, ppi=ppi)


def lint(spec: dict[str, Any]) -> None:
    """Raises ValueError, naming chart and column, for what Vega-Lite would draw wrong or not at all.

    That is: `[`, `]` or `.` in a column or field name; a field that is no column; a missing or non-finite number in
    a quantitative position (Altair stores NaN and infinity as null); data that is loaded from an address or is not
    there; more than `MAX_ROWS` rows. Views with a transform are not checked for missing columns and numbers.
    """
    name = title(spec)
    datasets = spec.get("datasets", {})
    seen: set[int] = set()
    for view, data, filtered in _views(spec, None, False):
        rows = _rows(data, datasets, name)
        if id(rows) not in seen:
            seen.add(id(rows))
            _lint_rows(rows, name)
        for channel, field, kind in _fields(view.get("encoding", {})):
            _lint_name(field, name)
            columns = {key for row in rows for key in row}
            if columns and field not in columns and not filtered:
                raise ValueError(
                    f"chart {name!r}: no column {field!r} ({channel}); there are: {', '.join(sorted(columns))}"
                )
            if channel in _POSITION and kind == "quantitative" and not filtered:
                missing = sum(1 for row in rows if field in row and not _is_finite(row[field]))
                if missing:
                    raise ValueError(
                        f"chart {name!r}: column {field!r} ({channel}) has {missing} of {len(rows)} values that are "
                        f"missing, NaN or infinite; they would vanish from the chart. Drop those rows first and say so."
                    )


def _views(spec: dict[str, Any], data: Any, filtered: bool) -> Iterator[tuple[dict[str, Any], Any, bool]]:
    data = spec.get("data", data)
    filtered = filtered or bool(spec.get("transform"))
    yield spec, data, filtered
    for key in _INNER:
        for inner in spec.get(key, []):
            yield from _views(inner, data, filtered)
    if isinstance(spec.get("spec"), dict):
        yield from _views(spec["spec"], data, filtered)


def _rows(data: Any, datasets: dict[str, Any], name: str) -> list[dict[str, Any]]:
    if not isinstance(data, dict):
        return []
    if "url" in data:
        raise ValueError(f"chart {name!r}: its data is loaded from {data['url']!r}; put the rows into the chart")
    if "values" not in data and data.get("name") not in datasets:
        raise ValueError(f"chart {name!r}: its data {data.get('name')!r} is not in it; there are: {sorted(datasets)}")
    rows = data["values"] if "values" in data else datasets[data["name"]]
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []


def _lint_rows(rows: list[dict[str, Any]], name: str) -> None:
    if len(rows) > MAX_ROWS:
        raise ValueError(
            f"chart {name!r}: {len(rows)} rows; at most {MAX_ROWS}. Aggregate or down-sample (keep min and max) first."
        )
    for column in {key for row in rows for key in row}:
        _lint_name(column, name)
    for row in rows:
        for column, value in row.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"chart {name!r}: column {column!r} holds {value}; drop the row or give a number")


def _lint_name(column: str, name: str) -> None:
    found = [character for character in _PATH_CHARACTERS if character in column]
    if found:
        raise ValueError(
            f"chart {name!r}: column {column!r} contains {' '.join(found)}, which Vega-Lite reads as a path and draws "
            f"nothing; rename the column and put the unit into the axis title"
        )


def _fields(encoding: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    for channel, definitions in encoding.items():
        for definition in definitions if isinstance(definitions, list) else [definitions]:
            if isinstance(definition, dict) and isinstance(definition.get("field"), str):
                yield channel, definition["field"], definition.get("type", "")


def _is_finite(value: Any) -> bool:
    return value is not None and not (isinstance(value, float) and not math.isfinite(value))


def _static(spec: dict[str, Any]) -> dict[str, Any]:
    if spec.get("width") != "container":
        return spec
    fixed = copy.copy(spec)
    fixed["width"] = STATIC_WIDTH
    return fixed
