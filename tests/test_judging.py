"""The commands that judge, and their pages: score, validate, compare, baseline, variability, selftest."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
from pathlib import Path

import pytest
from conftest import SAMPLES

from escher_book import cli, conduct, judging, report, runner, stage, verdict
from escher_kernels import records
from validation import compare, crosscheck, derive, scorecard

MI355X = SAMPLES / "mi355x"


@pytest.fixture
def escher(capsys):
    """`escher("score", run)`: (exit status, what was printed, what was said on stderr), in this process."""

    def call(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main([str(a) for a in arguments])
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return ended.value.code, out, err

    return call


def edit_json(path: Path, change) -> None:
    data = json.loads(path.read_text("utf-8"))
    change(data)
    path.write_text(json.dumps(data), "utf-8")


def scaled(run_dir: Path, family: str, factor: float) -> None:
    """Multiply every time of a family."""
    [path] = (run_dir / "records").glob(f"*_{family}.jsonl")
    head, *rest = path.read_text("utf-8").splitlines()
    items = [json.loads(line) for line in rest]
    for item in items:
        item["samples_s"] = [s * factor for s in item.get("samples_s", ())]
    path.write_text("\n".join([head, *(json.dumps(i) for i in items)]) + "\n", "utf-8")


def as_run(source: Path, target: Path, factor: float = 1.0) -> Path:
    """A copy under another run's name, every time of compute multiplied."""
    shutil.copytree(source, target)
    edit_json(target / "run.json", lambda d: d.update(run_id=target.name))
    for path in (target / "records").glob("*.jsonl"):
        head, rest = path.read_text("utf-8").split("\n", 1)
        path.write_text(json.dumps({**json.loads(head), "run_id": target.name}) + "\n" + rest, "utf-8")
    scaled(target, "compute", factor)
    return target


@pytest.fixture
def three(tmp_path) -> Path:
    """A folder of three runs of the MI355X, a few tenths of a percent apart."""
    for i, factor in enumerate((1.0, 1.002, 0.998)):
        as_run(MI355X, tmp_path / "three" / f"base-{i}", factor)
    return tmp_path / "three"


# ---- score ----


def test_score_writes_the_card_and_tells_the_verdict(sample_copy, escher):
    run_dir = sample_copy("mi355x")
    status, out, err = escher("score", run_dir)
    assert (status, out, err) == (0, "verdict: GO\n", "")
    card = records.read_json(run_dir / "scorecard.json")
    assert card["verdict"] == "GO" and len(card["criteria"]) == 13
    text = (run_dir / "scorecard.md").read_text("utf-8")
    assert "**GO**" in text and "<" not in text.replace("\\<", "") and "| SC-1 | Compute roof | PASS |" in text
    assert (run_dir / "validation.md").is_file() and records.read_json(run_dir / "validation.json")
    assert (run_dir / "tables" / "scorecard.csv").read_text("utf-8").startswith("sc,title,gating,status,reason\n")


def test_score_of_a_bad_machine_exits_1_and_says_why(sample_copy, escher):
    run_dir = sample_copy("mi355x")
    scaled(run_dir, "compute", 2.0)
    status, out, _ = escher("score", run_dir)
    assert status == 1 and out.splitlines()[0] == "verdict: NO-GO"
    assert "SC-1 Compute roof: FAIL" in out and "at least 50.0 % is wanted" in out
    assert "anchor.gemm" in (run_dir / "scorecard.md").read_text("utf-8")


def test_strict_turns_an_open_criterion_into_3(sample_copy, escher):
    run_dir = sample_copy("cpu")
    status, out, _ = escher("score", run_dir)
    assert status == 0 and "verdict: CONDITIONAL GO" in out
    assert escher("score", run_dir, "--strict")[0] == 3


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda d: (d / "run.json").unlink(), ["no run (run.json is missing)"]),
        (lambda d: (d / "run.json").write_bytes(b"\xff\xfe{"), ["run.json", "no valid JSON"]),
        (lambda d: edit_json(d / "run.json", lambda x: x.pop("workload")), ["run.json", "workload is missing"]),
        (lambda d: (d / "scorecard.json").mkdir(), ["scorecard.json"]),
    ],
)
def test_damage_is_one_line_and_exit_status_2(sample_copy, escher, damage, words):
    run_dir = sample_copy("mi355x")
    damage(run_dir)
    status, out, err = escher("score", run_dir)
    assert status == 2 and err.startswith("error: ") and err.count("\n") == 1, err
    assert all(word in err for word in words), err


def test_a_missing_family_is_told_and_the_rest_judged(sample_copy, escher):
    run_dir = sample_copy("mi355x")
    (run_dir / "records" / "04_ops.jsonl").unlink()
    edit_json(run_dir / "status.json", lambda d: d["ops"].update(status="died", message="the kernel was killed"))
    status, out, _ = escher("score", run_dir)
    assert status == 1 and "verdict: CONDITIONAL GO" in out
    assert "SC-3 Operations against the roofline: INCOMPLETE, family ops died (the kernel was killed)" in out


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"kind":"run","schema":0}\n', "record schema 0, this version reads 1"),
        ("\xff\n", "corrupt record"),
        ("", "empty"),
    ],
)
def test_a_family_that_cannot_be_read_is_told_and_the_rest_judged(sample_copy, escher, text, words):
    run_dir = sample_copy("mi355x")
    (run_dir / "records" / "05_e2e.jsonl").write_text(text, "utf-8")
    status, out, err = escher("score", run_dir)
    assert (status, err) == (1, "") and "verdict: CONDITIONAL GO" in out
    [line] = [x for x in out.splitlines() if "SC-4" in x]
    assert "INCOMPLETE, the records of family e2e cannot be used" in line and words in line, line
    run = derive.load(run_dir, lenient=True)
    card = scorecard.judge(run)
    assert card.criterion("SC-1").status == card.criterion("SC-3").status == "PASS"
    assert "cannot be used" in card.criterion("SC-5").reason
    assert words in report.pages(run, {})["05_e2e"].reason
    with pytest.raises(records.RecordError):
        derive.load(run_dir)  # a comparison takes nothing by halves


@pytest.mark.parametrize(
    ("name", "text", "sc", "words"),
    [
        ("variability.json", "[]", "SC-8", "the top level"),
        ("raw/tools/01_rvs-gst.json", "{}", "SC-9", "01_rvs-gst.json"),
        ("artefacts.json", "3", "SC-5", "artefacts.json"),
        ("env.json", "[", "SC-5", "env.json (cannot be used)"),
        ("status.json", '{"compute": "ok"}', "SC-5", "status.json (cannot be used)"),
    ],
)
def test_a_damaged_file_beside_costs_its_criterion_alone(sample_copy, escher, name, text, sc, words):
    run_dir = sample_copy("mi355x")
    (run_dir / name).write_text(text, "utf-8")
    status, out, err = escher("score", run_dir)
    card = records.read_json(run_dir / "scorecard.json")
    [told] = [c for c in card["criteria"] if c["sc"] == sc]
    assert told["status"] == "INCOMPLETE" and words in told["reason"], (told, out, err)
    if sc in ("SC-8", "SC-9"):  # and no page says that there is nothing
        page = verdict.comparison_page if sc == "SC-8" else verdict.validation_page
        run = derive.load(run_dir)
        told_there = page(run, "", report.spread(run)) if sc == "SC-8" else (run_dir / "validation.md").read_text("utf-8")
        assert words in told_there.replace("\\", "") and "One run alone" not in told_there
        assert "No outside tool was run" not in told_there
    assert {c["status"] for c in card["criteria"] if c["sc"] in ("SC-1", "SC-2", "SC-3", "SC-4", "SC-6")} == {"PASS"}
    assert status == (1 if sc == "SC-5" else 0)


def test_a_run_that_cannot_be_written_to_is_judged_all_the_same(sample_copy, escher, monkeypatch):
    def refuse(path, *_):
        raise records.RecordError(f"{path}: cannot be written: Read-only file system")

    for name in ("write_json_atomic", "write_text_atomic"):
        monkeypatch.setattr(report, name, refuse)
    status, out, err = escher("score", sample_copy("mi355x"))
    assert status == 2 and out == "verdict: GO\n" and "Read-only file system" in err and err.count("\n") == 1


def test_score_twice_says_the_same(sample_copy, escher):
    run_dir = sample_copy("mi355x")
    edit_json_file = run_dir / "artefacts.json"
    edit_json_file.write_text(json.dumps({"formats": [], "required": ["scorecard.json", "validation.md"]}), "utf-8")
    (run_dir / "scorecard.json").write_text("", "utf-8")
    assert [escher("score", run_dir)[:2] for _ in range(2)] == [(0, "verdict: GO\n")] * 2


# ---- validate ----

GST = """[RESULT] [  4106.100002] [gst-bf16] [GPU:: 11843] Start of GPU ramp up
[RESULT] [  4109.100003] [gst-bf16] [GPU:: 11843] End of GPU ramp up
[RESULT] [  4112.100004] [gst-bf16] [GPU:: 11843] GFLOPS 611000
[RESULT] [  4127.100009] [gst-bf16] [GPU:: 11843] GFLOPS 611000 Target GFLOPS: 0 met: TRUE
"""


def test_validate_imports_logs_of_known_and_unknown_tools(sample_copy, escher, tmp_path):
    run_dir, logs = sample_copy("mi355x"), tmp_path / "lögs of mine"
    logs.mkdir()
    (logs / "gst log.txt").write_text("\x1b[32m" + GST + "HF_TOKEN=hf_abcdefghijklmnop\n", "utf-8")
    (logs / "other.txt").write_bytes(b"\xff\x00 nothing that is known")
    (logs / "empty.log").write_bytes(b"")
    imports = ("--import", logs / "gst log.txt", logs / "other.txt", "--import", logs / "empty.log")
    status, out, err = escher("validate", run_dir, *imports)
    assert status == 0, (out, err)
    told = re.findall(r"^(\w+) +(\S+): (.*)$", out, re.M)
    assert ("UNPARSED", "unknown") in {t[:2] for t in told} and "empty" in out
    assert [t for t in told if t[1] == "rvs" and "does not tell M, N and K" in t[2]]
    kept = sorted(p.name for p in (run_dir / "raw" / "tools").glob("*.log"))
    assert kept == ["01_rvs-gst.log", "02_transferbench_local.log", "03_gst-log.log", "04_empty.log", "05_other.log"]
    assert "hf_" not in (run_dir / "raw" / "tools" / "03_gst-log.log").read_text("utf-8")
    assert "03_gst-log.log" in {c["log"] for c in records.read_json(run_dir / "validation.json")}
    assert [c.status for c in crosscheck.checks(derive.load(run_dir)) if c.matched] == ["PASS", "PASS"]


def test_validate_exits_1_where_a_tool_found_the_machine_wanting(sample_copy, escher, tmp_path):
    log = tmp_path / "gst.log"
    log.write_text(GST.replace("Target GFLOPS: 0 met: TRUE", "Target GFLOPS: 956000 met: FALSE"), "utf-8")
    run_dir = sample_copy("mi355x")
    status, out, _ = escher("validate", run_dir, "--import", log)
    assert status == 1 and re.search(r"^FAIL +rvs: .*956000", out, re.M)
    assert escher("score", run_dir)[0] == 1


def test_tools_run_only_where_the_run_was_measured(sample_copy, escher):
    status, _, err = escher("validate", sample_copy("mi355x"))
    assert status == 2 and "measured on another device" in err and "--import" in err


def test_a_log_that_is_not_there(sample_copy, escher, tmp_path):
    status, _, err = escher("validate", sample_copy("mi355x"), "--import", tmp_path / "nope.log")
    assert status == 2 and "nope.log" in err and err.count("\n") == 1


# ---- run against run ----


def test_a_baseline_is_kept_and_compared_with(three, escher, tmp_path):
    status, _, err = escher("baseline", "set", three, "--results-dir", tmp_path)
    [home] = (tmp_path / "baselines").iterdir()
    assert home.name.startswith("escher_14b_480p-mi355x-") and status == 0 and "baseline of 3 runs" in err
    assert sorted(p.name for p in home.iterdir()) == ["base-0", "base-1", "base-2"]
    assert not list(home.glob("*/scorecard.json")) and not list(home.parent.glob(".new-*"))
    for i, factor in enumerate((1.07, 1.068, 1.072)):
        as_run(MI355X, tmp_path / "now" / f"now-{i}", factor)
    status, out, _ = escher("compare", tmp_path / "now", "--results-dir", tmp_path)
    assert status == 1 and "Compute roof fell by 6." in out and "is a regression" in out and "indicative" not in out
    status, out, _ = escher("compare", three / "base-0", three / "base-1")
    assert status == 0 and "No regression" in out and "INDICATIVE" in out
    assert escher("compare", three / "base-0", "--base", three / "base-1")[0] == 0
    status, _, err = escher("baseline", "set", three / "base-1", "--results-dir", tmp_path)
    assert status == 0 and "in place of: base-0, base-1, base-2" in err
    assert [p.name for p in home.iterdir()] == ["base-1"] and list(home.parent.iterdir()) == [home]
    status, _, err = escher("compare", three / "base-1", "--results-dir", tmp_path)
    assert status == 2 and "base-1 stands on both sides" in err


def test_a_baseline_that_cannot_be_replaced_stays(three, tmp_path, monkeypatch):
    judging.set_baseline([three], tmp_path, runner.Console(None))
    [home] = (tmp_path / "baselines").iterdir()
    rename = os.rename

    def refuse(source, target):
        if Path(target) == home and not Path(source).name.endswith(".before"):
            raise OSError(28, "No space left on device")
        rename(source, target)

    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(runner.RunError, match="the disk is full"):
        judging.set_baseline([three / "base-1"], tmp_path, runner.Console(None))
    assert list((tmp_path / "baselines").iterdir()) == [home]
    assert sorted(p.name for p in home.iterdir()) == ["base-0", "base-1", "base-2"]


def test_unlike_runs_are_refused_by_name_and_shown_across(escher, sample_copy):
    status, _, err = escher("compare", SAMPLES / "cpu", MI355X)
    assert status == 2 and err.count("\n") == 1 and "device" in err and "--across" in err
    status, out, _ = escher("compare", SAMPLES / "cpu", MI355X, "--across")
    assert status == 0 and "Side by side, without a verdict" in out and "compute roof" in out
    for word in (" faster", " slower", "INDICATIVE"):
        assert word not in out


def test_what_is_not_decided_is_no_good_news(three, escher, tmp_path):
    """A roof that this run lost, and one that fell by far in a single noisy run."""
    lost = as_run(MI355X, tmp_path / "lost")
    edit = lambda r: {**r, "error": {"ok": False}, "samples_s": []} if r["case"] == "roof" else r  # noqa: E731
    path = lost / "records" / "01_compute.jsonl"
    head, *rest = path.read_text("utf-8").splitlines()
    path.write_text("\n".join([head, *(json.dumps(edit(json.loads(x))) for x in rest)]) + "\n", "utf-8")
    status, out, _ = escher("compare", three, lost)
    assert status == 1 and "Not decided: compute roof" in out and "No regression" not in out


def test_another_machine_takes_no_baselines_place(three, escher, tmp_path):
    other = shutil.copytree(MI355X, tmp_path / "other")
    for path in (other / "run.json", *(other / "records").glob("*.jsonl")):
        path.write_text(path.read_text("utf-8").replace('"raw_name": "AMD Instinct MI355X"', '"raw_name": "MI355X VF"')
                        .replace('"raw_name":"AMD Instinct MI355X"', '"raw_name":"MI355X VF"'), "utf-8")  # fmt: skip
    assert escher("baseline", "set", three, "--results-dir", tmp_path)[0] == 0
    assert escher("baseline", "set", other, "--results-dir", tmp_path)[0] == 0
    assert len(list((tmp_path / "baselines").iterdir())) == 2


def test_without_a_baseline_it_says_how_to_set_one(three, escher, tmp_path):
    status, _, err = escher("compare", three / "base-0", "--results-dir", tmp_path)
    assert status == 2 and "escher baseline set RUN" in err
    assert escher("compare", tmp_path / "nothing", three)[0] == 2
    assert escher("compare", "a", "b", "c")[0] == 2


def test_unlike_runs_are_no_baseline(three, escher, tmp_path):
    shutil.copytree(SAMPLES / "cpu", three / "a-cpu")
    status, _, err = escher("baseline", "set", three, "--results-dir", tmp_path)
    assert status == 2 and err.count("\n") == 1 and not (tmp_path / "baselines").exists()


def test_variability_is_read_from_runs_and_kept_in_each(three, escher):
    runs = sorted(three.iterdir())
    for run_dir in runs:
        (run_dir / "variability.json").unlink()
    status, out, err = escher("variability", *runs)
    assert status == 0 and "compute roof" in out and "SC-8 PASS" in err
    assert not list(three.glob("*/variability.json"))  # it reads
    assert escher("variability", "--keep", *runs)[0] == 0
    for run_dir in runs:
        card = scorecard.judge(derive.load(run_dir))
        assert card.criterion("SC-8").status == "PASS" and "3 runs" in card.criterion("SC-8").reason
    status, _, err = escher("variability", *runs, "--runs", "3")
    assert status == 2 and "or --runs N" in err
    assert escher("variability")[0] == 2


def test_variability_of_scattered_runs_fails(three, escher):
    scaled(three / "base-1", "compute", 1.15)
    status, _, err = escher("variability", *sorted(three.iterdir()))
    assert status == 1 and "SC-8 FAIL" in err


def test_selftest_tells_every_case(escher):
    status, out, _ = escher("selftest")
    assert status == 0 and "MISSED" not in out and len(out.splitlines()) == len(judging.selftest.CASES)


def test_selftest_notices_a_judge_that_lets_everything_pass(escher, monkeypatch):
    passing = lambda run, base: dataclasses.replace(base, status="PASS", reason="")  # noqa: E731
    monkeypatch.setitem(scorecard.JUDGES, 6, passing)
    monkeypatch.setattr(judging.selftest, "CASES", [c for c in judging.selftest.CASES if c.sc == "SC-6"])
    monkeypatch.setattr(judging.selftest, "without_case", lambda: [])
    status, out, _ = escher("selftest")
    assert status == 1 and re.search(r"^MISSED +SC-6", out, re.M)


# ---- pages ----


def test_pages_say_what_was_judged(three):
    run = derive.load(three / "base-0")
    card = scorecard.judge(run)
    page = verdict.scorecard_page(run, card)
    assert '<span class="pill go">GO</span>' in page and '<span class="pill pass">PASS</span>' in page
    for criterion in card.criteria:
        for figure in criterion.limits:
            assert figure.name in page and figure.date in page
    scaled(three / "base-0", "compute", 2.0)
    run = derive.load(three / "base-0")
    page = verdict.scorecard_page(run, scorecard.judge(run))
    assert '<span class="pill no-go">NO-GO</span>' in page and '<span class="pill fail">FAIL</span>' in page
    assert "**SC-1 Compute roof**" in page


def test_the_first_page_leads_with_the_verdict(sample_copy):
    run = derive.load(sample_copy("mi355x"))
    text = report.landing(run, scorecard.judge(run))
    assert text.index('<span class="pill go">GO</span>') < text.index("headline-card")
    cpu = derive.load(SAMPLES / "cpu")
    card = scorecard.judge(cpu)
    text = report.landing(cpu, card)
    assert stage.escape(card.reasons[0].partition("; ")[0]) in text and "[scorecard](scorecard.md)" in text


def reports_folder(run: derive.LoadedRun) -> Path:
    return next(f for f in report.baseline_folders(run) if f.is_dir())


def test_the_comparison_page(three, tmp_path):
    folder = as_run(MI355X, tmp_path / "now", 1.2)
    edit_json(folder / "variability.json", lambda d: d["processes"][0].update(run_id="now"))
    run = derive.load(folder)
    assert "No baseline is set" in report.against_baseline(run)
    judging.set_baseline([three], tmp_path, runner.Console(None))
    assert list((tmp_path / "baselines").iterdir()) == [reports_folder(run)]
    found = report.against_baseline(run)
    page = verdict.comparison_page(run, found, report.spread(run))
    assert "Compute roof fell by" in page and "This run against itself" in page and "3 fresh" in page
    part = derive.load(Path(shutil.copytree(three / "base-2", tmp_path / "base-2")))
    assert report.against_baseline(part) == "This run is part of the baseline."
    assert isinstance(compare.compare([run], [run]), compare.Comparison)


def test_the_page_of_outside_tools(sample_copy):
    run = derive.load(sample_copy("mi355x"))
    found = crosscheck.checks(run)
    page = verdict.validation_page(run, found)
    assert "**2 of 2 matched rows agree** with rvs, transferbench." in page
    assert "No outside tool was run" in verdict.validation_page(run, [])
    skipped = [dataclasses.replace(found[0], status="SKIP", ratio=None, ours=None)]
    assert "No reading of a tool could be matched" in verdict.validation_page(run, skipped)


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [(1.5e15, "FLOP/s", "1,500 TFLOP/s"), (0.5, "fraction", "50 %"), (2.0, "percent", "2 %"), (12, "count", "12"),
     (1.074, "ratio", "1.074 ×"), (None, "s", "–"), (0.25, "s", "250 ms"), (3 * 2**30, "bytes", "3 GiB")],
)  # fmt: skip
def test_figures_in_a_readers_units(value, unit, text):
    shown = verdict.figure(value, unit).replace("\N{NO-BREAK SPACE}", " ")
    assert re.sub(r"\.0+(?= |$)", "", shown) == text or shown == text


def test_variability_makes_its_runs_and_keeps_what_it_found(tmp_path, escher, monkeypatch):
    """Three runs are made, one after the other; one that does not finish ends it."""
    made = []

    def measure(**options):
        made.append(as_run(MI355X, tmp_path / f"run-{len(made)}", 1 + 0.001 * len(made)))
        (made[-1] / "variability.json").unlink()
        fate = {"status": "died" if options["families"] == "bad" else "ok"}
        yield conduct.Made(made[-1], {"compute": fate}, runner.Console(None))

    monkeypatch.setattr(cli, "_measure", measure)
    status, out, err = escher("variability", "--runs", 3)
    assert status == 0 and len(made) == 3 and "SC-8 PASS" in err and "| 3 |" in out
    kept = [compare.read_summary(records.read_json(d / "variability.json")) for d in made]
    assert [p.run_id for p in kept[0].processes] == ["run-0", "run-1", "run-2"] and kept[0] == kept[1] == kept[2]
    status, _, err = escher("variability", "--runs", 3, "--families", "bad")
    assert status == 1 and len(made) == 4 and "run 1: compute did not finish" in err
