"""The commands ``compare``, ``track`` and ``list --recipe``."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clustertrain import fsio
from clustertrain.cli.main import main
from clustertrain.run import metric_curves, metrics, recipe_hash
from clustertrain.run.run_dir import RunDir
from tests.unit.tracking import reading_back
from tests.unit.tracking.tracked_runs import T0, loss, make, write

pytestmark = pytest.mark.long

RunCli = Callable[..., int]
LOSS_CONTRACT = {"contract": {"metric": "loss"}}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CLUSTERTRAIN_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "home" / "runs"


@pytest.fixture
def run_cli(home: Path, monkeypatch: pytest.MonkeyPatch) -> RunCli:
    def run_cli(*args: str) -> int:
        monkeypatch.setattr(sys, "argv", ["clustertrain", *args])
        return main()

    return run_cli


def write_ending(run: RunDir, attempt: int, ending: str, start: float, end: float) -> None:
    log = fsio.JsonlAppender(run.attempt(attempt).events_path("batch"))
    log.append(
        {"t": T0 + start, "event": "started", "job_id": "1"}, {"t": T0 + end, "event": "ended", "ending": ending}
    )
    log.close()
    fsio.write_json(run.plan, {"world_size": 4, "device": "cuda"})


@pytest.fixture
def pair(home: Path) -> tuple[RunDir, RunDir]:
    """Run A has 10 steps in one attempt. Run B has 12, of which its second attempt repeated two, and is worse."""
    a = make(home, "a-aaaaaa", optim={"lr": 1e-3}, **LOSS_CONTRACT)
    write(a, 1, 1, 10, step_s=0.5)
    write_ending(a, 1, "completed", 0, 3600)
    b = make(home, "b-bbbbbb", optim={"lr": 3e-4}, train={"steps": 12}, **LOSS_CONTRACT)
    write(b, 1, 1, 8, step_s=0.25)
    write_ending(b, 1, "preempted", 0, 1800)
    write(b, 2, 7, 12, step_s=0.25)
    write_ending(b, 2, "completed", 7200, 9000)
    return a, b


def compare_json(run_cli: RunCli, capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, Any]:
    assert run_cli("compare", *args, "--json") == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def test_contract_metric_decides(run_cli: RunCli, pair: Any, capsys: pytest.CaptureFixture[str]) -> None:
    result = compare_json(run_cli, capsys, "a-a", "b-b")
    assert (result["metric"], result["higher_is_better"], result["winner"]) == ("loss", False, "a-aaaaaa")
    a, b = result["runs"]
    assert a["best"] == a["final"] == {"step": 10, "value": loss(10)}
    assert b["best"] == {"step": 6, "value": loss(6, 1)} and b["final"] == {"step": 12, "value": loss(12, 2)}
    assert (result["common_step"], a["at_common"], b["at_common"]) == (10, loss(10), loss(10, 2))
    assert (a["steps_per_s"], b["steps_per_s"]) == (2.0, 4.0)
    assert (a["gpu_hours"], b["gpu_hours"]) == pytest.approx((4.0, 4.0))
    assert {s["key"]: s["values"] for s in result["settings"]} == {
        "recipe.optim.lr": [1e-3, 3e-4], "recipe.train.steps": [200, 12]
    }  # fmt: skip
    assert result["notes"] == [
        "the runs have different lengths (A 10 steps, B 12 steps): compare the values at the last common step"
    ]


def test_settings_are_shown_in_recipe_syntax(run_cli: RunCli, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for letter, tables in (("a", {"optim": {"betas": [0.9, 0.99]}}), ("b", {"model": {"tie_embeddings": True}})):
        write(make(home, f"{letter}-{letter * 6}", **{**LOSS_CONTRACT, **tables}), 1, 1, 3)
    assert run_cli("compare", "a-a", "b-b") == 0
    rows = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    shown = {row[0]: row[1].split("  ")[0] for row in rows if len(row) == 2}
    assert (shown["recipe.optim.betas"], shown["recipe.model.tie_embeddings"]) == ("[0.9, 0.99]", "false")


def test_repeated_step_counts_once_like_in_the_rows(pair: Any) -> None:
    _, b = pair
    result = metric_curves.load_step_table(b, ["loss"])
    rows = metrics.load_rows(b)
    assert result.step == [r["step"] for r in rows] == list(range(1, 13))
    assert result.columns["loss"] == [r["loss"] for r in rows]
    assert result.curve("loss", "hours").x == pytest.approx([s / 3600 for s in range(1, 7)] + [0.5] * 6, abs=0.01)


def test_token_counts_continue_across_attempts(home: Path) -> None:
    run = make(home, "t-tttttt")
    write(run, 1, 1, 4)
    write(run, 2, 3, 5)
    lines = [json.loads(line) for line in run.metrics_path(2).read_text().splitlines()]
    run.metrics_path(2).write_text("".join(json.dumps({**r, "sum_tokens": 64 * (r["step"] - 2)}) + "\n" for r in lines))
    assert metric_curves.load_step_table(run, ["loss"]).curve("loss", "tokens").x == [64.0 * s for s in range(1, 6)]


def test_no_curve_by_tokens_without_token_counts(
    run_cli: RunCli, home: Path, pair: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make(home, "c-cccccc", **LOSS_CONTRACT)
    write(run, 1, 1, 10)
    run.metrics_path(1).write_text(run.metrics_path(1).read_text().replace("sum_tokens", "sum_samples"))
    result = compare_json(run_cli, capsys, "a-a", "c-c", "--by", "tokens")
    assert result["notes"] == ["B: logged no tokens, so there is no curve"]
    assert result["runs"][1]["tokens"] is None and result["runs"][1]["final"] == {"step": 10, "value": loss(10)}


def test_killed_attempt_counts_until_its_last_row(
    run_cli: RunCli, home: Path, pair: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make(home, "c-cccccc", **LOSS_CONTRACT)
    write(run, 1, 1, 1800)
    write_ending(run, 1, "completed", 0, 3600)
    path = run.attempt(1).events_path("batch")
    path.write_text(path.read_text().splitlines(keepends=True)[0])
    assert compare_json(run_cli, capsys, "a-a", "c-c")["runs"][1]["gpu_hours"] == pytest.approx(4 * 0.5)


def test_chosen_metric_decides_with_its_direction(
    run_cli: RunCli, home: Path, pair: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make(home, "c-cccccc", **LOSS_CONTRACT)
    write(run, 1, 1, 3, validation_accuracy=0.5)
    other = make(home, "d-dddddd", **LOSS_CONTRACT)
    write(other, 1, 1, 3, validation_accuracy=0.75)
    result = compare_json(run_cli, capsys, "c-c", "d-d", "--metric", "validation_accuracy", "--metric", "loss")
    assert result["higher_is_better"] and result["winner"] == "d-dddddd"
    assert result["shown"] == ["validation_accuracy", "loss"]
    assert run_cli("compare", "c-c", "d-d", "--metric", "validation_acuracy") == 2
    stderr = capsys.readouterr().err
    assert "no run logged it" in stderr and "did you mean validation_accuracy" in stderr


def test_recipes_with_different_deciding_metrics_are_noted(
    run_cli: RunCli, home: Path, pair: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    data = {"validation": 0.1}
    run = make(home, "c-cccccc", contract={"metric": "validation_accuracy"}, data=data)
    write(run, 1, 1, 3, validation_accuracy=0.5)
    result = compare_json(run_cli, capsys, "a-a", "c-c")
    assert result["metric"] == "loss" and (
        "the recipes have different deciding metrics: A by loss (lower is better), C by validation_accuracy"
    ).replace("C by", "B by") in " ".join(result["notes"])


def test_runs_without_values_have_no_winner(
    run_cli: RunCli, home: Path, pair: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    make(home, "new-nnnnnn", **LOSS_CONTRACT)
    silent = make(home, "silent-ssssss", **LOSS_CONTRACT)
    write(silent, 1, 1, 0)
    other = make(home, "other-oooooo", **LOSS_CONTRACT)
    write(other, 1, 1, 2)
    text = other.metrics_path(1).read_text().replace('"loss"', '"nll"')
    other.metrics_path(1).write_text(text)
    result = compare_json(run_cli, capsys, "a-a", "new", "silent", "other")
    assert result["winner"] is None
    assert result["notes"] == [
        "B has not started yet",
        "C has no metrics: no step has completed",
        "D did not log loss; it logged nll, lr",
    ]
    assert run_cli("compare", "a-a", "new", "silent", "other") == 0
    assert "no best run, fewer than two runs have a value" in capsys.readouterr().out
    assert run_cli("compare", "a-a", "a-aaaa") == 2 and "given twice" in capsys.readouterr().err
    assert run_cli("compare", "a-a") == 2


@pytest.mark.parametrize("columns", [80, 160])
def test_piped_output_is_plain_and_fits_the_columns(
    run_cli: RunCli, pair: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert run_cli("compare", "a-a", "b-b", "--by", "tokens") == 0
    text = capsys.readouterr().out
    assert "\x1b" not in text and max(map(len, text.splitlines())) <= columns
    assert "By loss, lower is better: A (a-aaaaaa) is best, 8.84375 at step 10" in text
    drawn = [line.partition("│")[2] for line in text.splitlines() if "│" in line]
    assert len(drawn) >= 14 and "A" in "".join(drawn) and "B" in "".join(drawn)
    assert re.search(r"recipe\.optim\.lr +0\.001 +0\.0003", text)


LONG = "pretraining-of-a-model-with-a-name-that-says-everything-abcdef"


@pytest.mark.parametrize("columns", ["60", "80", "120", None])
def test_ids_and_hashes_are_never_truncated(
    run_cli: RunCli,
    home: Path,
    pair: Any,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    columns: str | None,
) -> None:
    run = make(home, LONG, **LOSS_CONTRACT)
    write(run, 1, 1, 10)
    hashes = [recipe_hash.load_recipe_hash(r) for r in (run, *pair)]
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    assert run_cli("list") == 0
    head, *rows = capsys.readouterr().out.splitlines()
    rows, below = rows[:3], rows[3:]
    assert f"{LONG}:" in "".join(below).replace(" ", "") and f"  clustertrain requeue {LONG}" in below
    assert head.split()[0] == "run" and ("recipe" in head) == ("attempts" in head) == (columns is None)
    assert {row.split()[0] for row in rows} == {r.id for r in (run, *pair)}
    if columns is None:
        assert {row.split()[-1] for row in rows} == {h[:7] for h in hashes}
    assert run_cli("compare", "a-a", "b-b", "pretraining") == 0
    text = capsys.readouterr().out
    assert "\u2026" not in text and LONG in text and all(f"recipe {h}" in text for h in hashes)
    assert ("starts" in text) == (columns != "60")
    if columns is None:  # one line per run
        assert f"C  {LONG}  " in text and max(len(line) for line in text.splitlines() if "\u2502" in line) <= 80


def test_status_never_truncates_nodes_and_jobs(
    run_cli: RunCli, pair: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    node = "gpu-node-01.cluster.of-some-site.org"
    for attempt in pair[1].attempts():
        fsio.write_json(attempt.record, {"job_id": "12345678_12", "nodes": [node] * 16})
    monkeypatch.setenv("COLUMNS", "80")
    assert run_cli("status", "b-b") == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["attempt", "job", "started", "steps", "state"] in lines
    assert [line[1] for line in lines if line[:1] in (["1"], ["2"])] == ["12345678_12"] * 2
    monkeypatch.delenv("COLUMNS")
    assert run_cli("status", "b-b") == 0
    assert f"12345678_12  {node} +15  " in capsys.readouterr().out


def test_terminal_gets_braille_curves_in_its_own_colors(pair: Any) -> None:
    import io

    from rich.console import Console

    from clustertrain.report.runs import compare, compare_text

    out = io.StringIO()
    console = Console(file=out, width=100, force_terminal=True, color_system="standard", highlight=False)
    compare_text.show(compare.compare_runs(pair), console)
    shown = out.getvalue()
    assert re.search("\x1b\\[34m[\u2801-\u28ff]", shown) and re.search("\x1b\\[31m[\u2801-\u28ff]", shown)
    assert re.search("\x1b\\[34mA", shown) and re.search("\x1b\\[31mB", shown)  # each curve ends with its letter


def test_html_page_works_offline_and_escapes_text(
    run_cli: RunCli, home: Path, pair: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hostile = make(home, "x-xxxxxx", model={"entry": "m:f", "args": {"x": "</script><b>&"}}, **LOSS_CONTRACT)
    write(hostile, 1, 1, 3)
    assert run_cli("compare", "a-a", "b-b", "x-x", "--html", "page.html") == 0
    page = (tmp_path / "page.html").read_text()
    assert "default-src &#39;none&#39;" in page and "&lt;/script&gt;&lt;b&gt;&amp;" in page
    outside = re.sub(r"<(pre|script|style)\b.*?</\1>", "", page, flags=re.S)
    assert "<b>&" not in outside and "</script>" not in outside and "http" not in outside.replace("http-equiv", "")
    result = re.search(r'id="data">(.*?)</script>', page)
    assert result is not None
    data = json.loads(result[1])
    assert [r["letter"] for r in data["runs"]] == ["A", "B", "C"]
    assert data["runs"][1]["curves"]["loss"] == {
        "x": [float(s) for s in range(1, 13)],
        "y": [loss(s, 1 if s < 7 else 2) for s in range(1, 13)],
    }
    assert run_cli("compare", "a-a", "b-b", "--html", "nowhere/page.html") == 78


def test_unreadable_run_of_another_user_is_an_error(
    run_cli: RunCli, pair: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(run: RunDir) -> list[Any]:
        raise PermissionError(13, "Permission denied", str(run.metrics))

    monkeypatch.setattr(metric_curves, "list_scalars", refused)
    monkeypatch.setattr(RunDir, "attempts", refused)
    assert run_cli("compare", "a-aaaaaa", "b-bbbbbb") == 1
    assert "you may not read it; it belongs to" in capsys.readouterr().err


def test_list_by_recipe_hash_or_same_recipe(
    run_cli: RunCli, home: Path, pair: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    again = make(
        home,
        "again-aaaaaa",
        optim={"lr": 1e-3},
        tracking={"trackers": ["tensorboard"]},
        telemetry={"interval_s": 2.0},
        **LOSS_CONTRACT,
    )
    assert run_cli("list", "--same-as", "again", "--json") == 0
    rows = json.loads(capsys.readouterr().out)["runs"]
    assert {r["run"] for r in rows} == {"a-aaaaaa", again.id} and len({r["recipe_hash"] for r in rows}) == 1
    (result,) = {r["recipe_hash"] for r in rows}
    assert re.fullmatch("[0-9a-f]{16}", result)
    assert run_cli("list", "--recipe", result[:7]) == 0
    shown = capsys.readouterr().out
    assert "a-aaaaaa" in shown and "b-bbbbbb" not in shown and result[:7] in shown
    assert run_cli("list", "--recipe", "xyz") == 2 and "is not a hash" in capsys.readouterr().err
    assert run_cli("list", "--recipe", result, "--same-as", "again") == 2


def test_track_sends_a_finished_run_to_a_tracker(
    run_cli: RunCli, pair: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    _, b = pair
    assert run_cli("track", "b-b", "--to", "tensorboard") == 0
    assert capsys.readouterr().out == "tensorboard: up to step 12\n"
    assert reading_back.tensorboard(b) == [(r["step"], r["loss"]) for r in metrics.load_rows(b)]
    assert run_cli("track", "b-b", "--to", "tensorboard", "--json") == 0
    assert json.loads(capsys.readouterr().out)["trackers"] == {"tensorboard": {"step": 12, "error": None}}
    assert len(reading_back.tensorboard(b)) == 12
    assert run_cli("track", "b-b") == 2 and "names no tracker" in capsys.readouterr().err
    assert run_cli("track", "b-b", "--to", "neptune") == 2
