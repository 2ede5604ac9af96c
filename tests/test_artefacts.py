"""What a run must have left: every kind of file whole, empty and damaged; the list of what an export makes."""

from __future__ import annotations

import json
import struct
import zlib
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import SAMPLES
from hypothesis import given, settings
from hypothesis import strategies as st

from escher_kernels import run as registry
from escher_kernels.records import RecordError
from validation import artefacts, derive
from validation.artefacts import MANIFEST, declare, why_broken

RAW = ("run.json", "env.json", "status.json")


def png(width: int = 1, height: int = 1) -> bytes:
    """A grey picture, with every chunk that the format wants."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = b"".join(b"\0" + b"\x80" * width for _ in range(height))
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


SVG = b'<svg xmlns="http://www.w3.org/2000/svg"><text>10\xc2\xb5s</text></svg>'
PDF = b"%PDF-1.7\n1 0 obj\n<<>>\nendobj\ntrailer\n<<>>\n%%EOF\n"
HTML = b"<!doctype html>\n<HTML lang='en'><body>\xc3\xa9</body>\n</HTML>\n"
NOTEBOOK = b'{"cells": [], "nbformat": 4, "nbformat_minor": 5, "metadata": {}}'
RECORDS = (SAMPLES / "cpu" / "records" / "03_capacity.jsonl").read_bytes()
WHOLE = {
    "a.json": b'{"a": 1}', "a.ipynb": NOTEBOOK, "a.jsonl": RECORDS, "a.svg": SVG, "a.png": png(3, 2), "a.pdf": PDF,
    "a.html": HTML, "a.csv": b"op,time_s\ncopy,1.5\n", "a.md": b"# Title\n", "a.txt": b"x", "LICENSE": b"text",
}  # fmt: skip
DAMAGED = [  # name, content, words of the reason
    ("a.json", b'{"a": 1', "Expecting"),
    ("a.json", b"\xff\xfe{}", "decode"),
    ("a.ipynb", NOTEBOOK[:-1], "Expecting"),
    ("a.jsonl", b'{"kind":"run"}\n', "record schema None"),
    ("a.jsonl", b"no records\n", "corrupt record"),
    ("a.jsonl", RECORDS.replace(b'"schema":1', b'"schema":0', 1), "record schema 0"),
    ("a.jsonl", RECORDS.replace(b'"case"', b'"cas"', 1), "unknown field 'cas'"),
    ("a.svg", SVG[:-6], "no element found"),
    ("a.svg", b"plain words", "syntax error"),
    ("a.svg", b"<html><svg/></html>", "no SVG picture"),
    ("a.png", png()[:-4], "no whole PNG"),
    ("a.png", png()[:40], "no whole PNG"),
    ("a.png", b"\x89PNG\r\n\x1a\n\0\0\0\rIHDRIEND\0\0\0\0", "no pixels"),
    ("a.png", png(0, 2), "no pixels"),
    ("a.png", png(2, 0), "no pixels"),
    ("a.png", SVG, "no whole PNG"),
    ("a.pdf", PDF[:-7], "no whole PDF"),
    ("a.pdf", b"words %%EOF", "no whole PDF"),
    ("a.html", HTML.replace(b"</HTML>", b""), "no whole HTML page"),
    ("a.html", b"words </html>", "no whole HTML page"),
    ("a.html", HTML.replace(b"\xc3\xa9", b"\xc3"), "decode"),
    ("a.csv", b"op,\xff\n", "decode"),
    ("a.md", b"\xff\xfe", "decode"),
]


@pytest.mark.parametrize("name", WHOLE)
def test_a_whole_file_opens(tmp_path, name):
    (tmp_path / name).write_bytes(WHOLE[name])
    assert why_broken(tmp_path / name) is None


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("content", [b"", b"\n", b" \r\n\t "])
def test_an_empty_file_is_broken_whatever_its_kind(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    assert why_broken(tmp_path / name) == "empty"


@pytest.mark.parametrize("name, content, words", DAMAGED)
def test_a_damaged_file_is_broken_and_says_how_in_one_line(tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content)
    why = why_broken(tmp_path / name)
    assert words in why and "\n" not in why


def test_every_kind_that_can_be_damaged_is_in_the_table():
    assert {Path(name).suffix for name, _, _ in DAMAGED} >= {Path(name).suffix for name in WHOLE} - {"", ".txt"}


def test_a_record_that_was_cut_off_still_opens_since_its_family_says_so(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(RECORDS[:-20])
    assert why_broken(tmp_path / "a.jsonl") is None


def test_a_file_that_cannot_be_read_is_broken(tmp_path):
    (tmp_path / "a.json").mkdir()  # stands in for a file without permission, which root may read
    assert "Is a directory" in why_broken(tmp_path / "a.json")


@settings(max_examples=40, deadline=None)
@given(name=st.sampled_from(sorted(WHOLE)), content=st.binary(max_size=40), start=st.sampled_from([b"", png()[:16], PDF[:5]]))
def test_no_content_is_an_exception(tmp_path_factory, name, content, start):
    path = tmp_path_factory.getbasetemp() / name
    path.write_bytes(start + content)
    why = why_broken(path)
    assert why is None or (why and "\n" not in why)


# ---- a run ----


@pytest.fixture
def run_in(made_run, tmp_path):
    """`run_in("ops", ...)`: a run whose raw part lies in a folder, with a file of records for each family named."""

    def make(*families: str, name: str = "run", **info) -> derive.LoadedRun:
        home = tmp_path / name
        (home / "records").mkdir(parents=True)
        for raw in RAW:
            (home / raw).write_text("{}", "utf-8")
        for family in families:
            (home / "records" / f"{registry.families()[family]}.jsonl").write_bytes(RECORDS)
        return replace(made_run([], **info), directory=home)

    return make


def test_without_a_list_the_raw_part_is_required(run_in):
    found = artefacts.check(run_in("ops", "compute"))
    assert found.required == (*RAW, "records/01_compute.jsonl", "records/04_ops.jsonl")
    assert (found.formats, found.missing, found.broken) == ((), (), ())
    assert (found.declared, found.whole) == (5, 5)


@pytest.mark.parametrize("name", [*RAW, "records/01_compute.jsonl"])
def test_what_is_gone_is_missing(run_in, name):
    run = run_in("compute", families=["compute"])
    (run.directory / name).unlink()
    found = artefacts.check(run)
    assert (found.missing, found.broken, found.whole) == ((name,), (), 3)


def test_a_family_that_was_chosen_must_have_left_records(run_in):
    run = run_in("compute", families=["environment", "compute", "of_another_version"])
    assert artefacts.check(run).missing == ("records/00_environment.jsonl",)


def test_a_folder_is_no_artefact(run_in):
    run = run_in()
    declare(run.directory, ["html"], ["site/index.html"])
    (run.directory / "site" / "index.html").mkdir(parents=True)
    assert artefacts.check(run).missing == ("site/index.html",)


def test_what_is_declared_is_looked_at(run_in):
    run = run_in()
    home = run.directory
    paths = ["site/index.html", "plots/A2 GEMM sweep.svg", "report of this run.pdf", "tables/a.csv", "tables/a.csv"]
    declare(home, ["pdf", "html", "html"], paths)
    found = artefacts.check(run)
    assert found.formats == ("html", "pdf") and found.missing == tuple(sorted(set(paths)))
    for path, content in (("site/index.html", HTML), ("plots/A2 GEMM sweep.svg", SVG), ("report of this run.pdf", PDF)):
        (home / path).parent.mkdir(exist_ok=True)
        (home / path).write_bytes(content)
    assert artefacts.check(run).missing == ("tables/a.csv",)
    (home / "tables").mkdir()
    (home / "tables" / "a.csv").write_bytes(b" ")
    found = artefacts.check(run)
    assert (found.missing, found.broken) == ((), ("tables/a.csv (empty)",))
    assert (found.declared, found.whole) == (7, 6)
    (home / "tables" / "a.csv").write_bytes(b"a\n")
    assert artefacts.check(run).whole == artefacts.check(run).declared == 7


def test_a_run_may_lie_below_a_path_with_spaces(run_in):
    run = run_in("ops", name="a run with spaces, and ü")
    declare(run.directory, [], ["notebooks/a page.ipynb"])
    assert artefacts.check(run).missing == ("notebooks/a page.ipynb",)


def test_a_new_list_takes_the_place_of_the_old_one(run_in):
    run = run_in()
    declare(run.directory, ["pdf"], ["report.pdf"])
    declare(run.directory, [], [])
    found = artefacts.check(run)
    assert (found.required, found.formats, found.missing) == (RAW, (), ())
    assert [p.name for p in run.directory.iterdir() if p.name.startswith(".")] == []


def test_the_list_is_read_before_anything_is_looked_at(run_in):
    run = run_in()
    declare(run.directory, ["html"], ["index.html"])
    wanted = artefacts.required(run)
    assert wanted.required == (*RAW, "index.html") and wanted.missing == wanted.broken == ()


@pytest.mark.parametrize(
    "content, words",
    [
        ("", "no valid JSON"),
        ("{", "no valid JSON"),
        ("3", "no list of artefacts"),
        ("[]", "no list of artefacts"),
        ("null", "no list of artefacts"),
        ('{"formats": []}', "'required'"),
        ('{"required": []}', "'formats'"),
        ('{"formats": [], "required": [1]}', "required is no list of texts"),
        ('{"formats": [null], "required": []}', "formats is no list of texts"),
        ('{"formats": "html", "required": []}', "formats is no list of texts"),
        ('{"formats": [], "required": {"a": 1}}', "required is no list of texts"),
    ],
)
def test_a_damaged_list_is_one_line_that_names_it(run_in, content, words):
    run = run_in()
    (run.directory / MANIFEST).write_text(content, "utf-8")
    with pytest.raises(RecordError, match=MANIFEST) as raised:
        artefacts.check(run)
    assert words in str(raised.value) and "\n" not in str(raised.value)


def test_a_list_with_a_null_byte_in_a_path_is_missing_and_no_crash(run_in):
    run = run_in()
    (run.directory / MANIFEST).write_text(json.dumps({"formats": [], "required": ["a\0b"]}), "utf-8")
    assert artefacts.check(run).missing == ("a\0b",)


def test_the_samples_are_whole(sample):
    found = artefacts.check(sample)
    assert found.whole == found.declared == len(RAW) + len(sample.files)
