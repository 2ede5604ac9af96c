"""Who may import whom, what a notebook may hold, and that a family is complete: the rules of the layout, held."""

import ast
import importlib
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from escher_kernels import run

TEST_ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("escher_kernels", "validation", "escher_book")
# what a package may import from the others: measuring <- judging <- showing
ALLOWED = {"escher_kernels": set(), "validation": {"escher_kernels"}, "escher_book": {"escher_kernels", "validation"}}
MODULES = sorted(p for name in PACKAGES for p in (TEST_ROOT / name).rglob("*.py"))
NOTEBOOKS = sorted((TEST_ROOT / "notebooks").glob("*.ipynb"))
FAMILIES = {p.stem.partition("_")[2]: p for p in NOTEBOOKS}
HEAVY = {
    "torch",
    "triton",
    "torchvision",
    "numpy",
    "amdsmi",
    "pynvml",
}  # that a host for reading may lack or load slowly


def relative(path: Path) -> str:
    return path.relative_to(TEST_ROOT).as_posix()


def names_of(node: ast.AST, package: str) -> list[str]:
    if isinstance(node, ast.Import):
        return [a.name for a in node.names]
    if isinstance(node, ast.ImportFrom):
        base = f"{package}.{node.module or ''}".rstrip(".") if node.level else node.module
        return [base, *(f"{base}.{a.name}" for a in node.names)]
    if isinstance(node, ast.Call) and ast.unparse(node.func) in (
        "importlib.import_module",
        "import_module",
        "__import__",
    ):
        first = node.args[0] if node.args else None
        if isinstance(first, ast.Constant) and isinstance(first.value, str):
            return [first.value]
        if isinstance(first, ast.JoinedStr) and isinstance(first.values[0], ast.Constant):
            return [first.values[0].value.rstrip(".")]
    return []


def imports(path: Path) -> set[str]:
    """Full dotted names that a module imports, anywhere in it, `importlib.import_module` included."""
    package = path.parent.relative_to(TEST_ROOT).as_posix().replace("/", ".")
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    return {name for node in ast.walk(tree) for name in names_of(node, package)}


def imported_on_load(path: Path) -> set[str]:
    """Those that importing the module runs: outside functions and outside `if TYPE_CHECKING`."""
    package = path.parent.relative_to(TEST_ROOT).as_posix().replace("/", ".")
    found, todo = set(), list(ast.parse(path.read_text(encoding="utf-8")).body)
    while todo:
        node = todo.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        found.update(names_of(node, package))
        todo.extend(ast.iter_child_nodes(node))
    return found


def names_of_code(code: str) -> set[str]:
    return {name for node in ast.walk(ast.parse(code)) for name in names_of(node, "")}


def roots(names: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in names}


# ---- arrows ----


def test_the_three_packages_are_there():
    assert {p.parent.name for p in MODULES} >= set(PACKAGES) and len(MODULES) > 20


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_a_package_imports_only_what_lies_below_it(path):
    package = path.relative_to(TEST_ROOT).parts[0]
    assert roots(imports(path)) & set(PACKAGES) <= ALLOWED[package] | {package}
    assert not roots(imports(path)) & {"tests", "notebooks"}


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_torch_is_imported_only_where_it_is_needed(path):
    if relative(path).startswith("validation/"):
        assert "torch" not in roots(imports(path))
    assert not roots(imported_on_load(path)) & HEAVY


@pytest.mark.parametrize("family", FAMILIES)
def test_families_do_not_import_each_other(family):
    others = {f"escher_kernels.{other}" for other in FAMILIES if other != family}
    found = {name for name in imports(TEST_ROOT / "escher_kernels" / f"{family}.py")}
    assert not {name for name in found if any(name == o or name.startswith(f"{o}.") for o in others)}


def test_measuring_below_the_families_knows_no_family():
    # environment is also what run.py asks for the machine
    shared = [p for p in (TEST_ROOT / "escher_kernels").glob("*.py") if p.stem not in {*FAMILIES, "run", "__main__"}]
    families = {f"escher_kernels.{f}" for f in FAMILIES}
    assert {p.stem: imports(p) & families for p in shared} == {p.stem: set() for p in shared}


def test_the_reader_of_imports_sees_what_it_should(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "TEST_ROOT", tmp_path)
    path = tmp_path / "validation" / "x.py"
    path.parent.mkdir()
    path.write_text(
        "import os.path\nfrom . import derive\nfrom escher_book import report\ntry:\n  import numpy\nexcept E: ...\n"
        "import importlib\ndef f():\n  import torch\n  importlib.import_module('escher_kernels.run')\n"
        "  importlib.import_module(f'escher_book.{x}')\n",
        encoding="utf-8",
    )
    assert imports(path) == {
        "os.path", "validation", "validation.derive", "escher_book", "escher_book.report", "numpy", "importlib",
        "torch", "escher_kernels.run",
    }  # fmt: skip
    assert "torch" not in imported_on_load(path) and "numpy" in imported_on_load(path)


@pytest.fixture(scope="module")
def without_torch(tmp_path_factory):
    """A folder that, first on PYTHONPATH, makes importing torch fail, and with it what only measuring needs."""
    stubs = tmp_path_factory.mktemp("stubs")
    for name in ("torch", "triton"):
        (stubs / name).mkdir()
        (stubs / name / "__init__.py").write_text("raise ImportError('torch must not be imported')\n", encoding="utf-8")
    return {**os.environ, "PYTHONPATH": f"{stubs}{os.pathsep}{TEST_ROOT}", "PYTHONDONTWRITEBYTECODE": "1"}


def test_reading_needs_no_torch(without_torch):
    modules = [
        "escher_kernels.run", "escher_kernels.targets", "escher_kernels.workload", "escher_kernels.__main__",
        *(f"escher_kernels.{f}" for f in FAMILIES), "validation.derive", "escher_book.report", "escher_book.notebook",
        "escher_book.cli", "escher_book.charts", "escher_book.findings", *(f"escher_book.pages.{f}" for f in FAMILIES),
    ]  # fmt: skip
    code = (
        "import importlib, sys\n"
        "try:\n import torch\nexcept ImportError: pass\nelse: sys.exit('the stub is not in the way')\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        "assert 'torch' not in sys.modules\n"
        "from escher_kernels import workload\n"
        "print(len(workload.gemms(workload.load())))"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], env=without_torch, cwd="/", capture_output=True, text=True, timeout=60
    )
    assert out.returncode == 0, out.stderr
    assert out.stdout.strip() == "13"


def test_measuring_without_torch_says_so(without_torch, tmp_path):
    out = subprocess.run(
        [sys.executable, "-m", "escher_kernels", "compute", "--run", str(tmp_path / "run"), "--device", "cpu"],
        env=without_torch, cwd=TEST_ROOT, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert out.returncode == 2 and "Traceback" not in out.stderr and "torch" in out.stderr, out.stderr
    assert not list(tmp_path.rglob("*.jsonl"))


# ---- notebooks ----


def cells(path: Path) -> list[dict]:
    return json.loads(path.read_text(encoding="utf-8"))["cells"]


def source(cell: dict) -> str:
    return cell["source"] if isinstance(cell["source"], str) else "".join(cell["source"])


@pytest.mark.parametrize("path", NOTEBOOKS, ids=relative)
def test_a_notebook_is_committed_without_results(path):
    text = path.read_text(encoding="utf-8")
    notebook = json.loads(text)
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [] and cell["execution_count"] is None
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    assert set(notebook["metadata"]) <= {"kernelspec", "language_info"}
    assert text.endswith("}\n") and "data:image" not in text and len(text) < 20_000


@pytest.mark.parametrize("path", NOTEBOOKS, ids=relative)
def test_a_notebook_has_parameters_a_title_and_few_cells(path):
    tagged = [c for c in cells(path) if "parameters" in c["metadata"].get("tags", [])]
    assert len(tagged) == 1 and tagged[0]["cell_type"] == "code"
    names = {t.id for n in ast.parse(source(tagged[0])).body for t in n.targets}
    assert names == {"run_dir", "replay", "settings", "profile", "iteration", "resume"}  # what the runner passes
    assert len(cells(path)) <= 14
    first = cells(path)[0]
    headings = [line for c in cells(path) if c["cell_type"] == "markdown" for line in source(c).splitlines()
                if re.match(r"# ", line)]  # fmt: skip
    assert first["cell_type"] == "markdown" and len(headings) == 1 and source(first).startswith(headings[0])
    ids = [c["id"] for c in cells(path) if "id" in c]
    assert len(set(ids)) == len(ids) == len(cells(path))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=relative)
def test_a_notebook_holds_no_logic(path):
    banned = (
        ast.For, ast.While, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda, ast.If, ast.IfExp, ast.Try,
        ast.With, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.BinOp, ast.Compare,
    )  # fmt: skip
    for cell in cells(path):
        if cell["cell_type"] == "code":
            tree = ast.parse(source(cell))
            assert not [ast.unparse(n) for n in ast.walk(tree) if isinstance(n, banned)], source(cell)
            assert len(tree.body) <= (6 if "parameters" in cell["metadata"].get("tags", []) else 4)
            assert roots({name for n in ast.walk(tree) for name in names_of(n, "")}) <= {"escher_book"}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=relative)
def test_prose_quotes_no_measured_number(path):
    # a figure with a rate or time unit in the prose of a notebook comes from one machine and is wrong on the next
    unit = re.compile(r"\d+(?:\.\d+)?\s*(?:[TGM]?FLOP/s|TFLOPS?|[TGM]B/s|GHz)\b")
    for cell in cells(path):
        if cell["cell_type"] == "markdown":
            assert not unit.findall(source(cell))


# ---- a family is complete ----


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_has_its_module(family):
    module = importlib.import_module(f"escher_kernels.{family}")
    assert callable(module.cases) and list(inspect.signature(module.measure).parameters) == [
        "session",
        "machine",
        "spec",
    ]
    assert re.match(rf"Family {int(FAMILIES[family].name[:2])}, {family}[:,]", module.__doc__)
    assert "Outside tools" in module.__doc__
    code = (TEST_ROOT / "escher_kernels" / f"{family}.py").read_text(encoding="utf-8")
    classes = [n for n in ast.parse(code).body if isinstance(n, ast.ClassDef)]
    assert not [c.name for c in classes if c.bases]  # flat: no base class
    assert f'collect("{family}", ' in "".join(map(source, cells(FAMILIES[family])))
    assert (TEST_ROOT / "tests" / f"test_{family}.py").is_file()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_has_its_page(family):
    """Its module says what the page finds; the notebook shows that and takes no other family's page."""
    page = importlib.import_module(f"escher_book.pages.{family}")
    assert list(inspect.signature(page.finding).parameters) == ["run"]
    code = "\n".join(source(c) for c in cells(FAMILIES[family]) if c["cell_type"] == "code")
    taken = {name for name in names_of_code(code) if name.startswith("escher_book.pages")}
    assert taken == {"escher_book.pages", f"escher_book.pages.{family}"}
    called = set(re.findall(r"\bpage\.(\w+)\(run\)", code))
    assert "finding" in called and all(callable(getattr(page, name)) for name in called)
    shown = {
        n for n, f in vars(page).items() if inspect.isfunction(f) and f.__module__ == page.__name__ and n[0] != "_"
    }
    assert all(inspect.getdoc(getattr(page, name)) for name in shown)
    others = {f"escher_book.pages.{other}" for other in FAMILIES if other != family}
    assert not imports(TEST_ROOT / "escher_book" / "pages" / f"{family}.py") & others


def test_the_pages_are_the_families():
    pages = {p.stem for p in (TEST_ROOT / "escher_book" / "pages").glob("*.py")}
    assert pages - {"__init__"} == set(FAMILIES)


def test_the_registry_is_the_notebooks():
    assert run.families() == {family: path.stem for family, path in FAMILIES.items()}
    assert [int(stem[:2]) for stem in run.families().values()] == sorted(int(p.name[:2]) for p in NOTEBOOKS)
    assert len({p.name[:2] for p in NOTEBOOKS}) == len(NOTEBOOKS)
    for family, path in FAMILIES.items():
        assert run.records_path(Path("r"), family) == Path("r/records") / f"{path.stem}.jsonl"


def test_the_table_of_contents_lists_every_page():
    toc = yaml.safe_load((TEST_ROOT / "_toc.yml").read_text(encoding="utf-8"))
    pages = [chapter["file"] for part in toc["parts"] for chapter in part["chapters"]]
    assert [p for p in pages if re.search(r"/\d\d_", p)] == [f"notebooks/{p.stem}" for p in NOTEBOOKS]
    prose = {f"notebooks/{p.stem}" for p in (TEST_ROOT / "notebooks").glob("*.md")}
    assert prose <= set(pages) and len(pages) == len(set(pages))
