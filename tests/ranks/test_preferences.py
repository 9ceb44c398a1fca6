"""Preference optimization is the same under every layout, and a run continues with the reference of its start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from clustertrain.plan.layout import Layout
from clustertrain.run.run_dir import RunDir
from tests.ranks.rank_pool import Ranks, make_run, one_thread
from tests.tiny_tokenizer import VOCAB_SIZE, write_rows, write_tokenizer

pytestmark = pytest.mark.ranks

STEPS = 5
METRICS = {"loss", "grad_norm", "validation_loss", "validation_reward_accuracy"}
SHARDED, SPLIT = Layout(strategy="fsdp", dp_shard=2), Layout(tp=2, sequence_parallel=True, pp=2, schedule="1f1b")


def make_preference_run(folder: Path, layout: Layout) -> RunDir:
    folder.mkdir(parents=True)
    answers = ("it is late", "hello there", "the answer", "what")
    rows = [
        {"prompt": f"question {i}", "chosen": answers[i % 4], "rejected": answers[(i + 1 + i // 4) % 4]}
        for i in range(11)
    ]
    data = {"kind": "chat", "path": str(write_rows(folder / "pairs.jsonl", rows)), "seq_len": 32}
    data |= {"tokenizer": str(write_tokenizer(folder / "tokenizer")), "validation_path": data["path"] + ".held"}
    write_rows(Path(data["validation_path"]), rows[:5])
    tables = {
        "objective": {"kind": "dpo", "beta": 1.0},
        "train": {"deterministic": True},
        "evaluation": {"every": 2, "micro_batch": 2},
    }
    return make_run(
        folder / "run",
        layout,
        layout.world_size,
        steps=STEPS,
        every=100,
        global_batch=4,
        micro_batch=2 if layout.pp == 1 else 1,
        model={"vocab_size": VOCAB_SIZE, "dropout": 0.1},
        data=data,
        tables=tables,
    )


def test_preferences_are_independent_of_layout_and_resume_exactly(tmp_path: Path) -> None:
    run = make_preference_run(tmp_path / "single", Layout())
    single = Ranks(run, 1, setup=one_thread).expect(0)
    assert single.events("reference_computed")[0]["answers"] == 2 * (11 + 5)
    expected = single.rows()
    assert expected[0]["loss"] == pytest.approx(0.693, abs=0.2)  # dropout moves it away from ln 2
    run = make_preference_run(tmp_path / "sharded", SHARDED)
    first = Ranks(run, 2, setup=one_thread, args=(1,)).expect(0)
    second = Ranks(run, 2, 2, setup=one_thread).expect(0)
    assert first.rows()[-1]["step"] < STEPS and not second.events("reference_computed")
    assert_same([*first.rows(), *second.rows()], expected)
    run = make_preference_run(tmp_path / "split", SPLIT)
    assert_same(Ranks(run, 4, setup=one_thread).expect(0).rows(), expected)


def assert_same(rows: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    by_step = {row["step"]: row for row in rows}
    assert list(by_step) == [row["step"] for row in expected] == list(range(1, STEPS + 1))
    for row in expected:
        actual = by_step[row["step"]]
        assert METRICS & actual.keys() == METRICS & row.keys()
        for name in METRICS & row.keys():
            assert actual[name] == pytest.approx(row[name], rel=1e-4), f"{name} of step {row['step']}"
