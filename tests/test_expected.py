"""How long a run will take: which earlier runs count, what is said where there are none, and the table that is printed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from escher_book import expected, runner
from escher_book.expected import Expected
from escher_kernels.records import RecordError

CPU = {"kind": "cpu", "raw_name": "Some CPU"}
GPU = {"kind": "rocm", "raw_name": "Some GPU"}


def ok(seconds: Any, status: str = "ok") -> dict[str, Any]:
    return {"status": status, "message": "", "seconds": seconds, "started_utc": ""}


def earlier_run(
    root: Path, name: str, status: Any, *, workload: str = "w", budget: str = "quick", found: Any = CPU, **info: Any
) -> Path:
    directory = root / name
    directory.mkdir(parents=True)
    about = {
        "created_utc": f"2026-12-01T00:00:00+00:00 {name}", "source": "measured", "settings": {"budget": budget},
        "workload": {"name": workload}, "target": {"found": found},
    }  # fmt: skip
    (directory / "run.json").write_text(json.dumps(about | info), encoding="utf-8")
    text = status if isinstance(status, str) else json.dumps(status)
    (directory / "status.json").write_text(text, encoding="utf-8")
    return directory


def of(root: Path, *families: str, **more: Any) -> dict[str, Expected]:
    asked = {"budget": "quick", "found": CPU, "workload": "w", "table": root / "none.json"} | more
    return expected.expected(root, families or ("compute",), **asked)


def test_the_median_of_earlier_runs_of_the_same_kind(tmp_path):
    for name, seconds in (("a", 10.0), ("b", 90.0), ("c", 20.0)):
        earlier_run(tmp_path, name, {"compute": ok(seconds), "ops": ok(1.0)})
    assert of(tmp_path, "compute", "ops") == {
        "compute": Expected(20.0, "median of 3 earlier runs", 300),
        "ops": Expected(1.0, "median of 3 earlier runs", 300),
    }


@pytest.mark.parametrize(
    "status, more",
    [
        ({"compute": ok(9.0, "failed")}, {}),
        ({"compute": ok(9.0, "running")}, {}),
        ({"ops": ok(9.0)}, {}),
        ({"compute": ok(9.0)}, {"found": GPU}),
        ({"compute": ok(9.0)}, {"budget": "standard"}),
        ({"compute": ok(9.0)}, {"source": "synthetic"}),  # nothing was measured
        ({"compute": ok(9.0)}, {"settings": None}),
        ({"compute": ok(9.0)}, {"target": {}}),
        ({"compute": ok(9.0)}, {"found": None}),
        ({"compute": ok("9")}, {}),
        ({"compute": ok(None)}, {}),
        ({"compute": ok(True)}, {}),
        ({"compute": ok(-1)}, {}),
        ({"compute": {}}, {}),
        ({"compute": 9.0}, {}),
        ([9.0], {}),
        ("{", {}),
        ("", {}),
    ],
)
def test_a_run_that_tells_nothing_is_passed_over(tmp_path, status, more):
    earlier_run(tmp_path, "odd", status, **more)
    nothing = "no earlier run to go by; the limit is 300 s"
    assert of(tmp_path) == {"compute": Expected(None, nothing, 300)}
    earlier_run(tmp_path, "good", {"compute": ok(5.0)})
    assert of(tmp_path) == {"compute": Expected(5.0, "the one earlier run", 300)}


def test_files_that_are_missing_and_links_are_passed_over(tmp_path):
    assert of(tmp_path / "none")["compute"].seconds is None
    (earlier_run(tmp_path, "a", {"compute": ok(5.0)}) / "status.json").unlink()
    (tmp_path / "latest").symlink_to(earlier_run(tmp_path, "b", {"compute": ok(7.0)}).name)
    assert of(tmp_path)["compute"].basis == "the one earlier run"


def test_a_run_of_this_workload_goes_before_others(tmp_path):
    earlier_run(tmp_path, "a", {"compute": ok(50.0), "ops": ok(3.0)}, workload="other")
    assert of(tmp_path)["compute"] == Expected(50.0, "the one earlier run with another workload", 300)
    earlier_run(tmp_path, "b", {"compute": ok(5.0)})
    found = of(tmp_path, "compute", "ops")
    assert (found["compute"].seconds, found["compute"].basis) == (5.0, "the one earlier run")
    assert (found["ops"].seconds, found["ops"].basis) == (3.0, "the one earlier run with another workload")


def test_only_the_newest_count(tmp_path):
    for i in range(25):
        earlier_run(tmp_path, f"run{i:02}", {"compute": ok(1.0 if i < 15 else 100.0)})
    assert of(tmp_path)["compute"] == Expected(100.0, "median of 10 earlier runs", 300)


def test_a_run_of_several_iterations_counts_once_and_by_one_of_them(tmp_path):
    each = {"1": ok(10.0), "2": ok(30.0), "3": ok(20.0), "4": ok(0.1, "interrupted")}
    earlier_run(tmp_path, "a", {"compute": {**ok(60.1, "interrupted"), "iterations": each}})
    assert of(tmp_path)["compute"] == Expected(20.0, "the one earlier run", 300)


def test_a_limit_that_was_given(tmp_path):
    found = of(tmp_path, "compute", "ops", limits_s={"ops": 77})
    assert (found["compute"].limit_s, found["ops"].limit_s) == (runner.TIMEOUT_S["quick"], 77)
    assert found["ops"].basis.endswith("the limit is 77 s")


# ---------------------------------------------------------------------------------------------------------- the table


def kept(tmp_path: Path, data: Any) -> Path:
    path = tmp_path / "expected_seconds.json"
    path.write_text(json.dumps(data), encoding="utf-8")
    return path


ELSEWHERE = {"cpu": {"standard": {"compute": 64}}, "source": "a small host", "date": "2026-12"}


def test_figures_of_elsewhere_where_no_run_is_here(tmp_path):
    table = kept(tmp_path, ELSEWHERE)
    basis = "no earlier run here; measured on a small host, 2026-12"
    assert of(tmp_path, budget="standard", table=table)["compute"] == Expected(64, basis, 1200)
    for more in ({"budget": "quick"}, {"budget": "standard", "found": GPU}):
        assert of(tmp_path, table=table, **more)["compute"].seconds is None
    assert of(tmp_path, "ops", budget="standard", table=table)["ops"].seconds is None
    earlier_run(tmp_path, "a", {"compute": ok(5.0)}, budget="standard", workload="other")
    assert of(tmp_path, budget="standard", table=table)["compute"].seconds == 5.0


@pytest.mark.parametrize(
    "data",
    [[], {"cpu": {"quick": {"compute": "64"}}, "source": "s", "date": "d"}, {"cpu": {"quick": {"compute": 1}}}, {"cpu": 3}],
)
def test_a_table_that_cannot_be_used_is_one_line(tmp_path, data):
    with pytest.raises(RecordError, match="expected_seconds.json") as told:
        of(tmp_path, table=kept(tmp_path, data))
    assert "\n" not in str(told.value)


def test_the_table_of_this_tree_can_be_used():
    if not expected.TABLE.is_file():
        pytest.skip("this tree has none")
    data = json.loads(expected.TABLE.read_text(encoding="utf-8"))
    for kind in set(data) - {"source", "date"}:
        for budget, figures in data[kind].items():
            assert set(figures) <= set(runner.families()) and budget in runner.TIMEOUT_S
            found = of(Path("none"), *figures, budget=budget, found={"kind": kind, "raw_name": "x"}, table=expected.TABLE)
            assert {f: e.seconds for f, e in found.items()} == figures


# ----------------------------------------------------------------------------------------------------------- the text

PLAN = {
    "environment": Expected(2.0, "the one earlier run", 300),
    "compute": Expected(64.0, "median of 3 earlier runs", 300),
    "ops": Expected(None, "no earlier run to go by; the limit is 450 s", 450),
}


def test_the_plan_as_a_table():
    known = {k: v for k, v in PLAN.items() if v.seconds}
    assert expected.as_text(PLAN, iterations=3, workloads=2).splitlines() == [
        "family       limit, min  expected, min  basis",
        "environment           5          < 0.1  the one earlier run",
        "compute               5            1.1  median of 3 earlier runs",
        "ops                 7.5              ?  no earlier run to go by; the limit is 450 s",
        "in all: 6.6 min (1.1 min x 3 iterations x 2 workloads); not known: ops, at most 45.0 min",
    ]
    assert expected.as_text(known).splitlines()[-1] == "in all: 1.1 min"
    assert expected.as_text({"ops": PLAN["ops"]}).splitlines()[-1] == "in all: not known: ops, at most 7.5 min"
    assert expected.as_text({}).splitlines()[-1] == "in all: nothing to measure"
