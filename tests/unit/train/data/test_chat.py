"""Chat data: tokens, masks, cutting and packing, and a training that learns answers only."""

from __future__ import annotations

import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

import clustertrain as ct
from clustertrain.config.chat.tokenizer import load_tokenizer_files
from clustertrain.config.parsing.documents import build
from clustertrain.config.recipe import Recipe
from clustertrain.errors import ConfigError
from clustertrain.plan.layout import Batch
from clustertrain.submit.preflight.chat import check_rows, check_tokenizer
from clustertrain.train.data.chat import build_chat_datasets
from clustertrain.train.data.describe import report_datasets
from clustertrain.train.data.tokenize import encode_chats, write
from clustertrain.train.trainer import build_trainer
from tests.tiny_tokenizer import MARKED, VOCAB_SIZE, chat, metaspace_tokenizer, write_rows, write_tokenizer

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
    again = pickle.loads(pickle.dumps(train))  # noqa: S301
    assert all(torch.equal(a, b) for a, b in zip(again[2], train[2], strict=True))


@pytest.mark.long
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


@pytest.mark.parametrize("micro_batch", [1, 2, 3])
def test_loss_is_the_mean_over_all_answer_tokens(tmp_path: Path, micro_batch: int) -> None:
    """However the batch is split: the rows have different numbers of answer tokens."""
    recipe = make_recipe(tmp_path)
    train, _ = build_chat_datasets(recipe, VOCAB_SIZE)
    inputs, targets = (torch.stack(part) for part in zip(*(train[i] for i in range(3)), strict=True))
    counts = (targets != IGNORED).sum(1).tolist()
    assert len(set(counts)) > 1
    with ct.session(seed=1, device="cpu") as session:
        trainer = build_trainer(session, recipe, Batch(global_batch=3, micro_batch=micro_batch))
        with torch.no_grad():
            logits = trainer.model(inputs)
        expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1).double(), targets.flatten())
        assert trainer.step().loss.item() == pytest.approx(expected.item(), rel=1e-5)


def test_long_conversations_are_cut_and_those_without_answer_left_out(tmp_path: Path, capsys: Any) -> None:
    rows = [chat("what", "it is late " * 30), chat("hello " * 60, "late"), chat("hello", "late"), chat("a", "b")]
    recipe = make_recipe(tmp_path, rows, seq_len=32)
    train, _ = build_chat_datasets(recipe, VOCAB_SIZE)
    assert len(train) == 3 and train.cut is not None and (train.cut.cut, train.cut.left_out) == (1, 1)
    assert train.where(1) == f"{tmp_path}/chats.jsonl, line 3"
    assert int(train[0][1][-1]) != IGNORED and "<|im_end|>" not in decode_targets(recipe, train[0])
    events: list[dict[str, Any]] = []
    report_datasets(train, None, lambda name, **fields: events.append({"event": name, **fields}))
    assert (events[0]["cut"], events[0]["left_out"]) == (1, 1) and 0.2 < events[0]["answer_share"] < 0.8
    assert {e["code"] for e in events[1:]} == {"padding_waste", "conversations_cut"}
    assert "1 conversations cut, 1 left out" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"in no conversation does an answer start within data.seq_len = 4"):
        build_chat_datasets(make_recipe(tmp_path, rows[:2], seq_len=4), VOCAB_SIZE)


def test_packed_conversations_are_whole(tmp_path: Path) -> None:
    rows = [chat("what " * (i % 4), f"answer {i}") for i in range(1, 20)]
    recipe = make_recipe(tmp_path, rows, pack=True, seq_len=96)
    packed, _ = build_chat_datasets(recipe, VOCAB_SIZE)
    single, _ = build_chat_datasets(make_recipe(tmp_path, rows, seq_len=96), VOCAB_SIZE)
    assert len(packed) < len(single) == 19
    learned = "".join(decode_targets(recipe, packed[i]) for i in range(len(packed)))
    assert sorted(learned.split("<|im_end|>\n")[:-1]) == sorted(f"answer {i}" for i in range(1, 20))
    assert packed.version != single.version


def test_validation_conversations_are_held_out(tmp_path: Path) -> None:
    rows = [chat("what", f"answer {i}") for i in range(40)]
    recipe = make_recipe(tmp_path, rows, validation=0.25)
    train, validation = build_chat_datasets(recipe, VOCAB_SIZE)
    assert validation is not None and (len(train), len(validation)) == (30, 10)
    texts = [decode_targets(recipe, part[i]) for part in (train, validation) for i in range(len(part))]
    assert sorted(texts) == sorted(f"answer {i}<|im_end|>\n" for i in range(40))
    write_rows(tmp_path / "more.jsonl", rows[:3])
    _, more = build_chat_datasets(make_recipe(tmp_path, rows, validation_path=f"{tmp_path}/more.jsonl"), VOCAB_SIZE)
    assert more is not None and len(more) == 3
    (tmp_path / "more.jsonl").write_text("\n")
    with pytest.raises(ConfigError, match=r"data.validation_path = .*more.jsonl': no conversation"):
        build_chat_datasets(make_recipe(tmp_path, rows, validation_path=f"{tmp_path}/more.jsonl"), VOCAB_SIZE)


def test_version_follows_rows_tokenizer_and_template(tmp_path: Path) -> None:
    def version(**data: Any) -> str:
        return build_chat_datasets(make_recipe(tmp_path, **data), VOCAB_SIZE)[0].version

    first = version()
    assert version() == first
    assert version(rows=ROWS[:2]) != first
    (tmp_path / "marked.jinja").write_text(MARKED)
    assert version(chat_template=f"{tmp_path}/marked.jinja") != first


def test_vocabulary_beyond_that_of_the_model_raises(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokens up to 319, but model.vocab_size = 300"):
        build_chat_datasets(make_recipe(tmp_path), 300)


def test_prepared_shards_give_the_same_samples(tmp_path: Path) -> None:
    rows = [chat("what " * (i % 4), f"answer {i}") for i in range(1, 20)] + [chat("late", "hello " * 90)]
    recipe = make_recipe(tmp_path, rows, pack=True, seq_len=96, validation=0.2)
    files = load_tokenizer_files(tmp_path / "tokenizer")
    documents = encode_chats(tmp_path / "tokenizer", None, tmp_path / "chats.jsonl")
    write(tmp_path / "shards", documents, dtype="uint16", shard_tokens=150, tokenizer=files.version)
    assert len(list((tmp_path / "shards").glob("*.answers.npy"))) > 2
    prepared = make_recipe(tmp_path, rows, path=str(tmp_path / "shards"), pack=True, seq_len=96, validation=0.2)
    for ours, theirs in zip(build_chat_datasets(recipe, 320), build_chat_datasets(prepared, 320), strict=True):
        assert ours is not None and theirs is not None and len(ours) == len(theirs) and ours.cut == theirs.cut
        for i in range(len(ours)):
            assert all(torch.equal(a, b) for a, b in zip(ours[i], theirs[i], strict=True))
    assert check_tokenizer(prepared, must_exist=True) is None
    check_rows(tmp_path / "shards", "data.path = x", prepared)
    with pytest.raises(ConfigError, match=r"tokens up to 319, but model.vocab_size = 300"):
        build_chat_datasets(prepared, 300)
    write_tokenizer(tmp_path / "tokenizer", tokenizer=metaspace_tokenizer())
    for function in (
        lambda: build_chat_datasets(prepared, 320),
        lambda: check_rows(tmp_path / "shards", "p =", prepared),
    ):
        with pytest.raises(ConfigError, match=r"made with another tokenizer than .*tokenizer.json"):
            function()
    write(tmp_path / "text", [[1, 2, 3]], dtype="uint16")
    with pytest.raises(ConfigError, match=r"shards of text: no tokens are marked as answers"):
        build_chat_datasets(make_recipe(tmp_path, path=str(tmp_path / "text")), 320)
