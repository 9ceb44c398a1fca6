"""Chat data: tokens, masks, cutting and packing, and a training that learns answers only."""

from __future__ import annotations

import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

import clustertrain as ct
from clustertrain.config.parsing.documents import build
from clustertrain.config.recipe import Recipe
from clustertrain.errors import ConfigError
from clustertrain.plan.layout import Batch
from clustertrain.train.data.chat import build_chat_datasets
from clustertrain.train.data.describe import report_datasets
from clustertrain.train.models import losses
from clustertrain.train.models.build import build_task
from clustertrain.train.trainer import build_trainer
from tests.tiny_tokenizer import VOCAB_SIZE, chat, write_rows, write_tokenizer

IGNORED = -100
ROWS = [
    chat("what is the time", "it is late"),
    chat("hello", "hello there", "what", "the answer"),
    chat("question", "answer 😀", system="system text"),
]


def make_recipe(folder: Path, rows: list[Any] = ROWS, **data: Any) -> Recipe:
    write_rows(folder / "chats.jsonl", rows)
    tokenizer = folder / "tokenizer"
    if not tokenizer.exists():
        write_tokenizer(tokenizer)
    table = {"kind": "chat", "path": str(folder / "chats.jsonl"), "tokenizer": str(tokenizer), "seq_len": 64, **data}
    model = {"vocab_size": VOCAB_SIZE, "dim": 16, "layers": 1, "heads": 2, "max_seq_len": 128}
    return build({"data": table, "model": model, "train": {"steps": 2}}, Recipe, "recipe")


def decode_targets(recipe: Recipe, sample: tuple[torch.Tensor, torch.Tensor]) -> str:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(Path(recipe.data.tokenizer) / "tokenizer.json"))
    targets = [t for t in sample[1].tolist() if t != IGNORED]
    text: str = tokenizer.decode(targets, skip_special_tokens=False)
    return text


def test_targets_are_the_answers_and_nothing_else(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path)
    train, validation = build_chat_datasets(recipe, VOCAB_SIZE)
    assert validation is None and len(train) == 3
    assert [decode_targets(recipe, train[i]) for i in range(3)] == [
        "it is late<|im_end|>\n",
        "hello there<|im_end|>\nthe answer<|im_end|>\n",
        "answer 😀<|im_end|>\n",
    ]
    inputs, targets = train[1]
    assert inputs.shape == targets.shape == (64,) and inputs.dtype == targets.dtype == torch.int64
    kept = (targets != IGNORED).nonzero().flatten()[:-1]  # the last token of a conversation is only a target
    assert torch.equal(targets[kept], inputs[kept + 1])
    assert train.where(1) == f"{tmp_path}/chats.jsonl, line 2"
    again = pickle.loads(pickle.dumps(train))
    assert all(torch.equal(a, b) for a, b in zip(again[2], train[2], strict=True))


def test_training_step_on_chats(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path)
    with ct.session(seed=1, device="cpu") as session:
        trainer = build_trainer(session, recipe, Batch(global_batch=2, micro_batch=1, grad_accum=2))
        first = trainer.step().loss.item()
        assert abs(first - math.log(VOCAB_SIZE)) < 0.5
        for _ in range(20):
            trainer.schedule.apply(trainer.optimizer, 1)
            last = trainer.step().loss.item()
    assert last < first
