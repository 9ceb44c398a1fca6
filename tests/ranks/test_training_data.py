"""Training data: each sample is used once, with the same augmentation and packing on any number of ranks."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from clustertrain import fsio
from clustertrain.run.run_dir import RunDir
from clustertrain.train.data.tokenize import tokenize_bytes, write
from tests.layouts import PP
from tests.ranks.rank_pool import Ranks, make_run, touch_stop_at, write_plan
from tests.tiny_tokenizer import VOCAB_SIZE, chat, write_rows, write_tokenizer

# torch warns on machines with fewer cores than workers.
pytestmark = [pytest.mark.ranks, pytest.mark.filterwarnings("ignore:This DataLoader will create")]

# Limits of the parity table for fp32 (tests/harness/parity/cells.py).
LOSS, NORM = 2e-6, 5e-6
CONVNET = {"kind": "convnet", "convnet": {"channels": 1, "width": 8, "blocks": [1], "groups": 4}}
AUGMENTED = {
    "path": "digits",
    "validation": 0.2,
    "augment": {"crop": 1, "flip": True, "color": 0.2, "mixup": 0.4},
}

DATASET = """
import os
from pathlib import Path

import torch

class Recorded:
    '''Dataset that records which samples each rank reads.'''

    def __init__(self, count, folder):
        self.count, self.folder = count, Path(folder)

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        with (self.folder / f"samples-{os.environ['CLUSTERTRAIN_ATTEMPT']}-{os.environ['RANK']}").open("a") as out:
            print(i, file=out)
        return torch.full((4, 4, 1), i % 251, dtype=torch.uint8), i % 10
"""


def train(run: RunDir, ranks: int, attempt: int = 1) -> list[tuple[float, float]]:
    """Return (loss, gradient norm) of each step."""
    return list(Ranks(run, ranks, attempt).expect(0).losses().values())


def assert_close(rows: list[tuple[float, float]], expected: list[tuple[float, float]]) -> None:
    assert len(rows) == len(expected) > 0
    assert [loss for loss, _ in rows] == pytest.approx([loss for loss, _ in expected], rel=LOSS)
    assert [norm for _, norm in rows] == pytest.approx([norm for _, norm in expected], rel=NORM)


def test_image_augmentation_is_independent_of_ranks_and_workers(tmp_path: Path) -> None:
    def losses(ranks: int, workers: int, micro_batch: int) -> list[tuple[float, float]]:
        data: dict[str, Any] = {**AUGMENTED, "workers": workers}
        folder = tmp_path / f"{ranks}-{workers}"
        strategy = "ddp" if ranks < 4 else "fsdp"
        run = make_run(
            folder, strategy, ranks, steps=3, every=3, model=CONVNET, data=data, micro_batch=micro_batch
        )  # fmt: skip
        return train(run, ranks)

    single = losses(1, 0, 16)
    plain = make_run(tmp_path / "plain", "ddp", 1, steps=3, every=3, model=CONVNET, data={"path": "digits"})
    assert [loss for loss, _ in train(plain, 1)] != pytest.approx([loss for loss, _ in single], rel=1e-3)
    for ranks, workers, micro_batch in ((1, 2, 16), (2, 0, 4), (4, 2, 2)):
        assert_close(losses(ranks, workers, micro_batch), single)


def test_resume_on_other_ranks_sees_each_sample_once(tmp_path: Path) -> None:
    (tmp_path / "recorded_data.py").write_text(DATASET)
    count, steps = 96, 6  # of 16 samples each: one epoch
    data = {"kind": "custom", "entry": "recorded_data:Recorded", "args": {"count": count, "folder": str(tmp_path)}}
    run = make_run(tmp_path / "run", "ddp", 2, steps=steps, every=4, model=CONVNET, data=data)
    stopped = Ranks(run, 2, 1, setup=import_and_stop, args=(str(tmp_path), 2)).expect(0)
    committed = stopped.results()[0]["committed_step"]
    write_plan(run, "fsdp", 4, micro_batch=2)
    Ranks(run, 4, 2, setup=import_and_stop, args=(str(tmp_path), -1)).expect(0)

    def samples_of(attempt: int) -> list[int]:
        return [int(i) for f in tmp_path.glob(f"samples-{attempt}-*") for i in f.read_text().split()]

    assert 0 < committed < steps
    assert (len(samples_of(1)), len(samples_of(2))) == (16 * committed, 16 * (steps - committed))
    assert sorted(samples_of(1) + samples_of(2)) == list(range(count))


def import_and_stop(folder: str, step: int) -> None:
    """Setup: extend the import path as job.sh does, and request a stop."""
    sys.path.insert(0, folder)
    if step >= 0:
        touch_stop_at(step)


def shards(folder: Path) -> Path:
    """Write token shards of the standard library's json package, one document per file."""
    files = sorted(Path(os.__file__).parent.joinpath("json").glob("*.py"))
    write(folder, [tokenize_bytes(f.read_bytes()[:900]) for f in files], dtype="uint8", shard_tokens=1500)
    return folder


def test_packed_documents_match_one_process_and_resume(tmp_path: Path) -> None:
    data = {"kind": "tokens", "path": str(shards(tmp_path / "shards")), "pack": True, "seq_len": 48, "validation": 0.3}
    options: dict[str, Any] = {"steps": 6, "every": 3, "data": data}
    reference = make_run(tmp_path / "whole", "ddp", 1, **options, micro_batch=16)
    single = Ranks(reference, 1).expect(0)
    event = single.events("data_described")[0]
    assert event["lengths"]["documents"] >= 5 and 0 < event["padding"] < 0.5
    assert event["samples"] > event["validation_samples"] > 0
    expected = list(single.losses().values())
    assert expected[-1][0] < expected[0][0]
    run = make_run(tmp_path / "parts", "fsdp", 2, **options, micro_batch=2)
    first = Ranks(run, 2, 1, setup=touch_stop_at, args=(2,)).expect(0)
    write_plan(run, "ddp", 4, micro_batch=1)
    second = Ranks(run, 4, 2).expect(0)
    assert_close(list({**first.losses(), **second.losses()}.values()), expected)


def test_documents_of_pipeline_stages_match_one_process_and_resume_exactly(tmp_path: Path) -> None:
    """The last stage gets the starts of the documents too, in training and evaluation."""
    data = {"kind": "tokens", "path": str(shards(tmp_path / "shards")), "pack": True, "attention": "document"}
    options: dict[str, Any] = {"steps": 6, "every": 3, "data": {**data, "seq_len": 48, "validation": 0.3}}
    options["tables"] = {"evaluation": {"every": 3}}
    single = Ranks(make_run(tmp_path / "whole", "ddp", 1, **options, micro_batch=16), 1).expect(0)
    assert "a mask of all positions" in single.events("data_described")[0]["attention"]
    whole = Ranks(make_run(tmp_path / "stages", PP, 2, **options, micro_batch=4), 2).expect(0)
    assert_close(list(whole.losses().values()), list(single.losses().values()))

    def evaluated(ranks: Ranks) -> dict[int, float]:
        return {r["step"]: r["validation_loss"] for r in ranks.rows() if "validation_loss" in r}

    assert evaluated(whole) == pytest.approx(evaluated(single), rel=LOSS) and len(evaluated(whole)) == 2
    run = make_run(tmp_path / "parts", PP, 2, **options, micro_batch=4)
    first = Ranks(run, 2, 1, setup=touch_stop_at, args=(2,)).expect(0)
    second = Ranks(run, 2, 2).expect(0)
    assert 2 <= max(first.losses()) < 6
    assert {**first.losses(), **second.losses()} == whole.losses()


def test_answers_of_conversations_match_one_process_and_resume(tmp_path: Path) -> None:
    """Ranks and micro-batches have different numbers of answer tokens."""
    rows = [chat("what " * (i % 7), "it is late " * (1 + i % 4)) for i in range(40)]
    path, tokenizer = write_rows(tmp_path / "chats.jsonl", rows), write_tokenizer(tmp_path / "tokenizer")
    data = {"kind": "chat", "path": str(path), "tokenizer": str(tokenizer), "seq_len": 48, "validation": 0.2}
    options: dict[str, Any] = {"steps": 6, "every": 3, "data": data, "model": {"vocab_size": VOCAB_SIZE}}
    single = Ranks(make_run(tmp_path / "whole", "ddp", 1, **options, micro_batch=16), 1).expect(0)
    event = single.events("data_described")[0]
    assert 0.1 < event["answer_share"] < 0.9 and (event["cut"], event["left_out"]) == (0, 0)
    expected = list(single.losses().values())
    run = make_run(tmp_path / "parts", "fsdp", 2, **options, micro_batch=2)
    first = Ranks(run, 2, 1, setup=touch_stop_at, args=(2,)).expect(0)
    write_plan(run, "ddp", 4, micro_batch=1)
    second = Ranks(run, 4, 2).expect(0)
    assert_close(list({**first.losses(), **second.losses()}.values()), expected)


def test_token_beyond_vocabulary_ends_run_and_names_sample(tmp_path: Path) -> None:
    folder = shards(tmp_path / "shards")
    index = fsio.read_json(folder / "index.json")
    assert isinstance(index, dict)
    fsio.write_json(folder / "index.json", {**index, "max_token_id": None})
    data = {"kind": "tokens", "path": str(folder), "seq_len": 48}
    run = make_run(tmp_path / "run", "ddp", 2, steps=4, model={"vocab_size": 60}, data=data)
    failed = Ranks(run, 2).expect(78)
    error = failed.results()[0]["error"]
    assert error["type"] == "ConfigError"
    assert "must be between 0 and 59 (model.vocab_size = 60)" in error["message"]
    assert "sample " in error["message"] and ".bin, from token " in error["message"]
