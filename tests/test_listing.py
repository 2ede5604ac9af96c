"""`escher list`: every entry of every registry is there, nothing is imported to be found, and any width can be read."""

import importlib.util
import json
import re
import subprocess
import sys
from dataclasses import make_dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from escher_book import listing, notebook, runner
from escher_book.listing import Row, Section, as_text, backends, sections, to_json
from escher_kernels import targets, workload
from validation import tools

TREE = Path(__file__).resolve().parent.parent


def by_name(rows) -> dict[str, Row]:
    assert len({r.name for r in rows}) == len(rows)
    return {r.name: r for r in rows}


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """Make packages that raise when they are imported; a version makes a distribution of that name too."""
    folder = tmp_path / "site packages"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))

    def make(module: str, distribution: str = "", version: str = "") -> Path:
        (folder / module).mkdir()
        (folder / module / "__init__.py").write_text("raise SystemError('it was imported')\n", encoding="utf-8")
        if distribution:
            info = folder / f"{distribution}-1.dist-info"
            info.mkdir()
            text = f"Metadata-Version: 2.1\nName: {distribution}\n" + (f"Version: {version}\n" if version else "")
            (info / "METADATA").write_text(text, encoding="utf-8")
        importlib.invalidate_caches()
        return folder / module

    return make


@pytest.fixture
def no_packages(monkeypatch):
    """None of the backends is there, whatever this environment has."""
    real = importlib.util.find_spec
    hidden = {m for b in listing.BACKENDS for m in b.modules}
    monkeypatch.setattr(listing.util, "find_spec", lambda name: None if name in hidden else real(name))


# ---- every entry of the registries ----


def test_families_are_those_of_the_book_with_number_and_title():
    rows = by_name(listing.families())
    assert list(rows) == list(runner.families())
    for name, row in rows.items():
        path = runner.families()[name]
        heading = json.loads(path.read_text(encoding="utf-8"))["cells"][0]["source"]
        title = "".join(heading).splitlines()[0].removeprefix("# ")
        where = "benchmark and all" if int(path.name[:2]) <= 6 else "all only"
        assert (row.value, row.details) == (path.name[:2], f"{title}; in {where}")


def test_a_family_after_the_sixth_is_in_all_only(monkeypatch):
    known = {"compute": TREE / "notebooks/01_compute.ipynb", "sustained": TREE / "notebooks/07_sustained.ipynb"}
    monkeypatch.setattr(runner, "families", lambda: known)
    monkeypatch.setattr(runner, "choose", lambda text: ["compute"])
    first, last = listing.families()
    assert first.details.endswith("in benchmark and all") and first.data == {"benchmark": True}
    assert last.details.endswith("; in all only") and last.data == {"benchmark": False}
    assert last.details.startswith("no title: ") or (TREE / "notebooks/07_sustained.ipynb").is_file()


def test_workloads_are_those_of_configs_with_their_sizes():
    rows = by_name(listing.workloads())
    assert list(rows) == workload.names() and "smoke" in rows
    row = rows["escher_14b_480p"]
    assert (row.value, row.details) == ("40 blocks, 4680 tokens, 14.2 B parameters", "Escher 14 B video model at 480x832")
    assert rows["smoke"].details.endswith("; derived from escher_14b_480p: depth 40 -> 4, tokens / 4")
    assert rows["smoke"].data["derived_from"] == "escher_14b_480p" and rows["smoke"].data["window_tokens"] == 4680


def test_a_workload_that_cannot_be_used_says_why_and_hides_no_other(tmp_path, monkeypatch):
    for path in (TREE / "configs").glob("*.json"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "mine.json").write_text('{"hidden": "wide"}', encoding="utf-8")
    monkeypatch.setattr(workload, "CONFIGS", tmp_path)
    rows = by_name(listing.workloads())
    assert rows["mine"].value == "cannot be used" and "mine.json" in rows["mine"].details
    assert rows["smoke"].value.startswith("4 blocks")


def test_targets_are_those_of_the_configuration_with_rated_dense_figures():
    rows, config = by_name(listing.devices()), targets.load_config()
    keys = [t["key"] for t in config["targets"]]
    assert list(rows) == ["auto", *keys, "cpu", *config["groups"]]
    for key in keys:
        profile = config.profile(key)
        assert rows[key].details.startswith(profile.name) and f"{profile.memory_label_gb:g} GB" in rows[key].details
        assert f"; {profile.bandwidth_bytes_s / 1e9:g} GB/s" in rows[key].value
        for dtype in ("bf16", "fp16"):
            rate = profile.dense_peak_flop_s.get(dtype)
            shown = re.search(rf"{dtype.upper()} ([0-9.]+)", rows[key].value)
            assert (float(shown[1]) * 1e12 if shown else None) == rate == rows[key].data[f"{dtype}_flop_s"]
    assert rows["mi355x"].value == "BF16 2516.6, FP16 2516.6 TFLOP/s; 8000 GB/s"
    assert rows["h100"].details == "the one that is found of h100_sxm, h100_pcie, h100_nvl; else h100_sxm"


def test_models_are_those_of_the_file():
    rows = by_name(listing.models())
    file = json.loads((TREE / "configs" / workload.MODELS).read_text(encoding="utf-8"))["models"]
    assert list(rows) == list(file)
    for key, entry in file.items():
        assert rows[key].details.startswith(entry["title"]) and rows[key].value == (entry["workload"] or "no workload")


def test_a_model_without_a_workload_says_why_and_shows_its_hub_id(monkeypatch):
    Model = make_dataclass("Model", ["title", "workload", "note", "huggingface"])
    model = Model("A Model", "", "its geometry is not published", "someone/a-model")
    monkeypatch.setattr(workload, "reference_models", lambda: {"a": model})
    (row,) = listing.models()
    assert row.value == "no workload"
    assert row.details == "A Model; its geometry is not published; Hugging Face someone/a-model"


@pytest.mark.parametrize("kind", ["cpu", "rocm", "cuda"])
def test_tools_are_those_of_validation_and_say_whether_they_apply(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(listing.running, "ROCM_BIN", str(tmp_path / "rocm"))
    bin_ = tmp_path / "a folder"
    bin_.mkdir()
    for name in ("rvs", "stress-ng", "all_gather_perf"):
        (bin_ / name).write_text("#!/bin/sh\nexit 1\n", encoding="utf-8")
        (bin_ / name).chmod(0o755)
    rows = by_name(listing.outside_tools(kind, str(bin_)))
    assert list(rows) == [tools.module(name).NAME for name in tools.MODULES]
    rvs, stress, rccl, nvbandwidth = (rows[tools.module(n).NAME] for n in ("rvs", "host_stream", "rccl", "nvbandwidth"))
    here = {"cpu": "a CPU host", "rocm": "an AMD GPU", "cuda": "an NVIDIA GPU"}[kind]
    path = str(bin_ / "rvs")
    assert (rvs.value, rvs.details) == (
        ("installed", path) if kind == "rocm" else ("does not apply", f"to {here}; {path}")
    )  # fmt: skip
    assert (stress.value == "installed") == (kind == "cpu") and (rccl.value == "installed") == (kind != "cpu")
    assert nvbandwidth.value == ("not installed" if kind == "cuda" else "does not apply")


def test_tools_of_rocm_are_found_where_its_packages_put_them(tmp_path, monkeypatch):
    (tmp_path / "rvs").write_text("#!/bin/sh\n", encoding="utf-8")
    (tmp_path / "rvs").chmod(0o755)
    monkeypatch.setattr(listing.running, "ROCM_BIN", str(tmp_path))
    assert by_name(listing.outside_tools("rocm", ""))["RVS"].details == str(tmp_path / "rvs")


# ---- backends ----


def test_backends_that_are_not_there_name_what_was_looked_for(no_packages, tmp_path):
    rows = by_name(backends("2.13.0+rocm7.0", str(tmp_path)))
    assert list(rows) == ["AITER", "flash_attn", "Iris", "HipKittens", "triton", "numactl"]
    assert {r.value for r in rows.values()} == {"not installed"}
    assert rows["HipKittens"].details.startswith("no module named hipkittens or tk_kernel; ")
    assert rows["numactl"].details.startswith("not on PATH")


@pytest.mark.parametrize(
    ("torch", "value", "details"),
    [
        ("2.13.0+cpu", "not usable", "version 0.1.9 is installed, but this torch build (2.13.0+cpu) is for the CPU; "),
        ("2.13.0+cu128", "not usable", "version 0.1.9 is installed, but this torch build (2.13.0+cu128) is for CUDA; "),
        ("2.13.0+rocm7.0", "installed", "version 0.1.9; "),
        ("2.13.0", "installed", "version 0.1.9; "),  # it does not say what it is built for
        (None, "not usable", "version 0.1.9 is installed, but torch is not; "),
    ],
)
def test_a_backend_is_found_and_not_imported(packages, monkeypatch, torch, value, details):
    packages("aiter", "amd_aiter", "0.1.9")
    monkeypatch.setattr(notebook, "torch_version", lambda: torch)
    before = set(sys.modules)
    row = by_name(backends())["AITER"]
    assert row.value == value and row.details.startswith(details) and set(sys.modules) == before


def test_a_built_module_without_a_distribution_is_shown_by_its_place(packages):
    place = packages("tk_kernel") / "__init__.py"
    row = by_name(backends("2.13.0+rocm7.0"))["HipKittens"]
    assert row.value == "installed" and row.details.startswith(str(place)) and row.data["version"] is None


def test_a_distribution_without_a_version_is_shown_by_its_place(packages):
    place = packages("iris", "iris") / "__init__.py"
    row = by_name(backends("2.13.0+rocm7.0"))["Iris"]
    assert row.value == "installed" and row.details.startswith(str(place))


def test_a_folder_of_that_name_is_no_package(tmp_path, monkeypatch):
    (tmp_path / "iris").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    row = by_name(backends("2.13.0+rocm7.0"))["Iris"]
    assert row.value == "not installed" and row.details.startswith(f"{tmp_path / 'iris'} is a folder, not a package")


@pytest.mark.parametrize("error", [ValueError("aiter.__spec__ is None"), ImportError("the finder is broken")])
def test_a_look_up_that_fails_is_a_reason(monkeypatch, error):
    def broken(name):
        raise error

    monkeypatch.setattr(listing.util, "find_spec", broken)
    row = by_name(backends("2.13.0+rocm7.0"))["AITER"]
    assert row.value == "not usable" and row.details.startswith(f"aiter cannot be looked up: {error}; ")


def test_a_loaded_module_without_a_spec_is_a_reason(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__spec__=None))
    row = by_name(backends("2.13.0+cu128"))["triton"]
    assert row.value == "not usable" and "cannot be looked up" in row.details


@pytest.mark.parametrize(
    ("version", "build"),
    [("2.13.0+cpu", "cpu"), ("2.9.1+rocm6.4", "rocm"), ("2.9.1+cu130", "cuda"), ("2.9.1", None), ("2.9.1+git12ab", None),
     (None, None)],
)  # fmt: skip
def test_what_torch_is_built_for_is_read_from_its_version(version, build):
    assert listing.build_of(version) == build


def test_listing_imports_neither_torch_nor_a_backend():
    code = "import sys; from escher_book import listing; listing.as_text(listing.sections()); print(sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=TREE)
    heavy = {"torch", *(m for b in listing.BACKENDS for m in b.modules)}
    assert "escher_book.listing" in done.stdout and not heavy & set(re.findall(r"'([^'.]+)'", done.stdout))


# ---- sections, text and JSON ----


def test_sections_are_all_or_the_one_asked_for():
    assert [p.key for p in sections()] == ["families", "workloads", "targets", "models", "tools", "backends"]
    assert [p.key for p in sections("models")] == ["models"]
    with pytest.raises(ValueError, match="unknown 'model'; known: all, families, workloads, "):
        sections("model")


def test_json_holds_every_row_and_figures_in_base_units():
    found = json.loads(json.dumps(to_json(sections()), allow_nan=False))
    assert list(found) == list(listing.SECTIONS)
    mi355x = next(r for r in found["targets"] if r["name"] == "mi355x")
    assert (mi355x["bf16_flop_s"], mi355x["bandwidth_bytes_s"]) == (2516.6e12, 8e12)
    assert all({"name", "value", "details"} <= row.keys() for rows in found.values() for row in rows)


SAMPLE = [
    Section("a", "First", (Row("short", "yes", "one two three four five six seven eight nine ten"), Row("a-longer-name", "no"))),
    Section("b", "Second", (Row("x", "a rather long value of a row", "some-long-word-with-hyphens /a/path/that/is/not/broken"),)),
    Section("c", "Nothing", ()),
]


def test_text_on_a_wide_a_narrow_and_a_tiny_terminal():
    assert as_text(SAMPLE, 200).splitlines() == [
        "First", "  short          yes  one two three four five six seven eight nine ten", "  a-longer-name  no", "",
        "Second", "  x  a rather long value of a row  some-long-word-with-hyphens /a/path/that/is/not/broken", "", "Nothing",
    ]  # fmt: skip
    assert as_text(SAMPLE, 52).splitlines() == [
        "First", "  short          yes  one two three four five six", " " * 22 + "seven eight nine ten", "  a-longer-name  no",
        "", "Second", "  x  a rather long value of a row", "      some-long-word-with-hyphens",
        "      /a/path/that/is/not/broken", "", "Nothing",
    ]  # fmt: skip
    assert as_text(SAMPLE[1:2], 20).splitlines() == [
        "Second", "  x", "    a rather long value of a row", "      some-long-word-with-hyphens",
        "      /a/path/that/is/not/broken",
    ]  # fmt: skip


@pytest.mark.parametrize("width", [1, 40, 60, 80, 132])
def test_no_word_is_lost_and_no_line_is_too_long_at_any_width(width):
    parts = sections()
    text = as_text(parts, width)
    words = [w for p in parts for r in p.rows for w in f"{r.name} {r.value} {r.details}".split()]
    assert sorted(text.split()) == sorted([*words, *(w for p in parts for w in p.title.split())])
    if width >= 80:
        longest = max(map(len, (w for w in words)))
        assert all(len(line) <= max(width, longest + 6) for line in text.splitlines())


def test_without_a_terminal_a_row_is_one_line(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr(sys, "__stdout__", None)
    assert len(as_text(SAMPLE[:1]).splitlines()) == 3
    monkeypatch.setenv("COLUMNS", "52")
    assert len(as_text(SAMPLE[:1]).splitlines()) == 4
