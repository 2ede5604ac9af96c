"""What a run must have left behind: which files its families and formats declare, and whether each opens.

Whoever exports writes the list (`declare`) before it begins, so that a killed export shows. Without one only the raw part
is required: what a run always has, the records of the families that were chosen, and any others that are there.
"""

from __future__ import annotations

import csv
import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from escher_kernels.records import RecordError, read, read_json, write_json_atomic
from escher_kernels.run import families
from validation.derive import LoadedRun

MANIFEST = "artefacts.json"


@dataclass(frozen=True)
class Artefacts:
    """Relative paths. `broken`: there, but empty or not to be opened, with the reason."""

    required: tuple[str, ...]
    formats: tuple[str, ...]
    missing: tuple[str, ...] = ()
    broken: tuple[str, ...] = ()

    @property
    def declared(self) -> int:
        return len(self.required)

    @property
    def whole(self) -> int:
        return self.declared - len(self.missing) - len(self.broken)


def declare(run_dir: Path, formats: Iterable[str], paths: Iterable[str]) -> None:
    """Write what an export is going to make."""
    write_json_atomic(Path(run_dir) / MANIFEST, {"formats": sorted(set(formats)), "required": sorted(set(paths))})


def required(run: LoadedRun) -> Artefacts:
    """What must be there, not yet looked at. RecordError for a list that cannot be read."""
    raw = ["run.json", "env.json", "status.json"]
    stems = families()
    raw += [f"records/{stems[name]}.jsonl" for name in run.info.get("families", ()) if name in stems]
    raw += [f"records/{path.name}" for path in sorted((run.directory / "records").glob("*.jsonl"))]
    path = run.directory / MANIFEST
    formats, more = [], []
    if path.is_file():
        try:
            data = read_json(path)
            formats, more = data["formats"], data["required"]
            for name, items in (("formats", formats), ("required", more)):
                if not isinstance(items, list) or not all(isinstance(x, str) for x in items):
                    raise TypeError(f"{name} is no list of texts")
        except (KeyError, TypeError) as exc:
            raise RecordError(f"{path}: is no list of artefacts ({exc}); make it again with: escher report") from None
    return Artefacts(tuple(dict.fromkeys([*raw, *more])), tuple(formats))


def check(run: LoadedRun) -> Artefacts:
    """Look at each: it exists, is not empty, and opens as what its name says."""
    wanted = required(run)
    missing, broken = [], []
    for name in wanted.required:
        path = run.directory / name
        if not path.is_file():
            missing.append(name)
        elif name in run.unreadable or path.parent.name == "records" and path.stem.partition("_")[2] in run.unreadable:
            missing.append(f"{name} (cannot be used)")  # its family says why
        elif why := why_broken(path):
            broken.append(f"{name} ({why})")
    return Artefacts(wanted.required, wanted.formats, tuple(missing), tuple(broken))


def why_broken(path: Path) -> str | None:
    """What is wrong with a file by its suffix; None where it opens."""
    try:
        data = path.read_bytes()
        if not data.strip():
            return "empty"
        if path.suffix == ".jsonl":
            read(path)
        elif path.suffix in (".json", ".ipynb"):
            json.loads(data.decode("utf-8"))
        elif path.suffix == ".svg":
            root = ElementTree.fromstring(data.decode("utf-8"))
            return None if root.tag.rpartition("}")[2] == "svg" else "no SVG picture"
        elif path.suffix == ".png":
            return _png(data)
        elif path.suffix == ".pdf":
            return None if data.startswith(b"%PDF-") and b"%%EOF" in data[-1024:] else "no whole PDF"
        elif path.suffix == ".html":
            text = data.decode("utf-8").lower()
            return None if "<html" in text and text.rstrip().endswith("</html>") else "no whole HTML page"
        elif path.suffix == ".csv":
            next(csv.reader(data.decode("utf-8").splitlines()))
        else:
            data.decode("utf-8")
    except (OSError, ValueError, RecordError, ElementTree.ParseError, csv.Error) as exc:
        return str(exc).splitlines()[0] if str(exc) else type(exc).__name__
    return None


def _png(data: bytes) -> str | None:
    if data[:8] != b"\x89PNG\r\n\x1a\n" or data[12:16] != b"IHDR" or data[-8:-4] != b"IEND":
        return "no whole PNG"
    return None if any(data[16:20]) and any(data[20:24]) else "no pixels"  # width, height
