"""Setup, attempts, checkpoints and log on the page of a run."""

from __future__ import annotations

import html.parser
from pathlib import Path

import pytest

from clustertrain import fsio
from clustertrain.report.html import context, page
from clustertrain.run.run_dir import RunDir
from clustertrain.telemetry.analysis.curves import build_curves
from clustertrain.telemetry.analysis.summarize import summarize
from tests.unit.report import live_runs

NOW = 1_790_000_000.0
EVIL = "</pre><script>alert(1)</script>\x1b]0;x\x07"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setenv("CLUSTERTRAIN_HOME", str(tmp_path))
    spec = '[job]\nbackend = "local"\n[env]\nHF_TOKEN = "hf_secret"\n[recipe.optim]\nlr = 0.25\n'
    run = live_runs.new_run(tmp_path, NOW, spec=spec)
    live_runs.begin(run, NOW, ["n1", "n2"])
    git = {"commit": "0123456789abcdef", "branch": "main", "dirty": True, "diff": f"+{EVIL}"}
    fsio.write_json(
        run.record, {"argv": ["clustertrain", "submit", "a b.toml"], "git": git, "host": "login1", "cwd": "/scratch/me"}
    )
    fsio.write_json(run.plan, {"layout": {"strategy": "fsdp"}, "reasons": ["fits"], "warnings": ["slow link"]})
    return run


def visible(text: str) -> str:
    found: list[str] = []
    tags: list[str] = []

    class Parser(html.parser.HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            tags.append(tag)

        def handle_data(self, data: str) -> None:
            if tags and tags[-1] not in ("script", "style"):
                found.append(data)

    Parser().feed(text)
    return " ".join(found)


def render(run: RunDir) -> str:
    summary = summarize(run)
    return page.render(summary, build_curves(run, summary), context.load_context(run))


def test_page_says_how_the_run_was_started(run: RunDir) -> None:
    text = visible(render(run))
    for expected in ("clustertrain submit 'a b.toml'", "0123456789ab", "uncommitted changes", "lr = 0.25", "HF_TOKEN",
                     "slow link", "fits", "login1:/scratch/me"):  # fmt: skip
        assert expected in text, expected
    assert "hf_secret" not in text, "values of variables may be secrets"


def test_text_of_others_is_escaped(run: RunDir) -> None:
    run.attempt(1).logs.mkdir()
    run.attempt(1).rank_log(0).write_text(f"step 1\n{EVIL}\n")
    text = render(run)
    assert "<script>alert(1)" not in text and "\x1b" not in text
    assert "step 1" in visible(text) and "alert(1)" in visible(text)


def test_log_of_a_failure_comes_before_that_of_rank_0(run: RunDir) -> None:
    attempt = run.attempt(1)
    attempt.logs.mkdir()
    attempt.rank_log(0).write_text("all is well\n")
    assert context.load_context(run).log == context.LogTail(
        "Last lines of rank 0", str(attempt.rank_log(0)), ["all is well"]
    )
    attempt.results.mkdir()
    error = {"type": "ValueError", "message": "bad batch", "traceback": "Traceback\n  line 3\n"}
    rank = {"rank": 3, "ending": "failed", "kind": "user_error", "error": error}
    fsio.write_json(
        attempt.result_path("n1"), {"node": "n1", "ending": "failed", "kind": "user_error", "ranks": [rank]}
    )
    log = fsio.JsonlAppender(attempt.events_path("batch"))
    log.append({"t": NOW, "event": "ended", "ending": "failed", "reason": "bad batch"})
    log.close()
    tail = context.load_context(run).log
    assert tail is not None and tail.title == "rank 3 on n1 failed: ValueError: bad batch"
    assert tail.lines == ["Traceback", "  line 3"]


def test_everything_is_bounded(run: RunDir) -> None:
    run.attempt(1).logs.mkdir()
    run.attempt(1).rank_log(0).write_text("\n".join("x" * 9000 for _ in range(200)))
    git = {"commit": "0123", "branch": "main", "dirty": True, "diff": "+" * 100_000}
    fsio.write_json(run.record, {"git": git})
    for step in range(100):
        (run.checkpoints / f"step-{step:08d}").mkdir(parents=True)
    found = context.load_context(run)
    assert found.log is not None and len(found.log.lines) <= context.MAX_LOG_LINES
    assert max(map(len, found.log.lines)) == context.MAX_LINE_CHARACTERS
    assert len(found.setup["code"]["diff"]) == context.MAX_DIFF_CHARACTERS and found.setup["code"]["diff_truncated"]
    assert len(found.checkpoints) == context.MAX_CHECKPOINTS and found.checkpoints_left_out == 50


@pytest.mark.parametrize("name", ["record.json", "plan.json", "spec.toml"])
def test_damaged_file_costs_only_its_part(run: RunDir, name: str) -> None:
    (run.path / name).write_bytes(b"\xff\x00")
    text = visible(render(run))
    assert run.id in text and "How it was started" in text
