"""Preference pairs: rows, samples, the DPO loss, and a training against the start weights."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import clustertrain as ct
from clustertrain.config.chat.rows import parse_preference
from clustertrain.config.parsing.documents import build
from clustertrain.config.recipe import Recipe
from clustertrain.errors import CheckpointError, ConfigError
from clustertrain.plan.layout import Batch
from clustertrain.submit.preflight.chat import check_rows
from clustertrain.train.data.chat import build_chat_datasets
from clustertrain.train.data.describe import report_datasets
from clustertrain.train.data.preferences import PreferencePairs, ReferenceLogProbs
from clustertrain.train.data.tokenize import encode_chats, write
from clustertrain.train.models.losses import preference
from clustertrain.train.session.session import get_runtime
from clustertrain.train.trainer import build_evaluations, build_trainer, compute_reference
from tests.tiny_tokenizer import VOCAB_SIZE, chat, write_rows, write_tokenizer

IGNORED = -100
PAIRS = [
    {"prompt": "what is the time", "chosen": "it is late", "rejected": "hello"},
    {"chosen": chat("hello", "hello there")["messages"], "rejected": chat("hello", "what")["messages"]},
    {"prompt": chat("question")["messages"], "chosen": chat("", "answer")["messages"][1:], "rejected": "the the the"},
]
USER, ANSWER = ({"role": role, "content": text} for role, text in (("user", "q"), ("assistant", "a")))


def make_recipe(folder: Path, rows: list[Any] = PAIRS, *, objective: Any = None, **data: Any) -> Recipe:
    write_rows(folder / "pairs.jsonl", rows)
    if not (folder / "tokenizer").exists():
        write_tokenizer(folder / "tokenizer")
    paths = {"path": str(folder / "pairs.jsonl"), "tokenizer": str(folder / "tokenizer")}
    model = {"vocab_size": VOCAB_SIZE, "dim": 16, "layers": 1, "heads": 2, "max_seq_len": 128}
    document = {
        "data": {"kind": "chat", "seq_len": 48, **paths, **data},
        "model": model,
        "train": {"steps": 4},
        "objective": {"kind": "dpo", **(objective or {})},
    }
    return build(document, Recipe, "recipe")


def decode(folder: Path, tokens: torch.Tensor) -> str:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer" / "tokenizer.json"))
    text: str = tokenizer.decode([t for t in tokens.tolist() if t != IGNORED], skip_special_tokens=False)
    return text


def test_samples_hold_both_answers_with_their_prompt(tmp_path: Path) -> None:
    pairs, validation = build_chat_datasets(make_recipe(tmp_path), VOCAB_SIZE)
    assert validation is None and len(pairs) == 3
    learned = [[decode(tmp_path, row) for row in pairs[i][1][0]] for i in range(3)]
    assert learned == [
        ["it is late<|im_end|>\n", "hello<|im_end|>\n"],
        ["hello there<|im_end|>\n", "what<|im_end|>\n"],
        ["answer<|im_end|>\n", "the the the<|im_end|>\n"],
    ]
    inputs, (targets, reference) = pairs[0]
    assert inputs.shape == targets.shape == (2, 48) and reference.tolist() == [0.0, 0.0]
    assert all(decode(tmp_path, row).startswith("<|im_start|>user\nwhat is the time<|im_end|>") for row in inputs)
    assert pairs.where(1) == f"{tmp_path}/pairs.jsonl, line 2"


def test_long_pairs_are_cut_or_left_out_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [*PAIRS, {"prompt": "what " * 40, "chosen": "a", "rejected": "b"}]
    rows.append({"prompt": "what", "chosen": "hello", "rejected": "the answer " * 20})
    pairs, held_out = build_chat_datasets(make_recipe(tmp_path, rows, validation=0.2), VOCAB_SIZE)
    assert isinstance(pairs, PreferencePairs) and len(pairs) + len(held_out) == 4
    report_datasets(pairs, held_out, lambda name, **fields: None)
    assert pairs.cut.cut + held_out.cut.cut == 1 and pairs.cut.left_out + held_out.cut.left_out == 1
    assert "conversations cut" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"no pair has both answers start within data.seq_len = 4 tokens"):
        build_chat_datasets(make_recipe(tmp_path, PAIRS, seq_len=4), VOCAB_SIZE)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([], "w: an empty list instead of an object"),
        ({"prompt": "q", "completion": "a"}, "w: no pair of chosen and rejected; its keys: 'prompt', 'completion'"),
        ({"prompt": "q", "chosen": "a", "rejected": "a"}, "w: chosen and rejected are the same"),
        ({"prompt": "q", "chosen": "", "rejected": "a"}, "w: chosen: message 2 is an empty answer"),
        ({"prompt": [], "chosen": "b", "rejected": "a"}, "w: prompt: an empty list instead of a list of messages"),
        ({"chosen": "b", "rejected": "a"}, "w: chosen: text instead of a list of messages"),
        ({"chosen": [ANSWER], "rejected": [{**ANSWER, "content": "b"}]}, "share no prompt"),
        ({"chosen": [USER, ANSWER], "rejected": [USER]}, "w: rejected: no answer"),
        ({"prompt": "q", "chosen": 1, "rejected": "a"}, "w: chosen: a number instead of a list of messages"),
    ],
)
def test_unsuitable_rows_are_refused(row: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_preference(row, "w")


def test_other_tables_and_data_are_refused(tmp_path: Path) -> None:
    for changes, message in (
        ({"pack": True}, "objective.kind = 'dpo' and data.pack"),
        ({"kind": "tokens"}, "objective.kind = 'dpo' needs data.kind = 'chat'"),
        ({"objective": {"beta": 0.0}}, "beta = 0"),
    ):
        with pytest.raises(ConfigError, match=message):
            make_recipe(tmp_path, PAIRS, **changes)
    recipe = make_recipe(tmp_path, [chat("what", "the answer")])
    with pytest.raises(ConfigError, match="line 1: no pair of chosen and rejected"):
        check_rows(recipe.data_files["path"], "data.path = 'x'", recipe)
    write(tmp_path / "shards", encode_chats(tmp_path / "tokenizer", None, recipe.data_files["path"]))
    recipe = make_recipe(tmp_path, PAIRS, path=str(tmp_path / "shards"))
    for refuse in (
        lambda: check_rows(recipe.data_files["path"], "data.path = 'x'", recipe),
        lambda: build_chat_datasets(recipe, VOCAB_SIZE),
    ):
        with pytest.raises(ConfigError, match="hold no pairs of a chosen and a rejected answer"):
            refuse()


def test_loss_is_that_of_the_paper() -> None:
    torch.manual_seed(0)
    logits, tokens = torch.randn(3, 2, 5, 7), torch.randint(0, 7, (3, 2, 5))
    tokens[0, 1, 3:] = tokens[2, 0, :2] = IGNORED
    reference, beta = torch.randn(3, 2), 0.3
    expected = 0.0
    for pair in range(3):
        gains = []
        for answer in range(2):
            log_prob = sum(
                math.log(torch.softmax(logits[pair, answer, i].double(), -1)[int(t)].item())
                for i, t in enumerate(tokens[pair, answer])
                if t != IGNORED
            )
            gains.append(log_prob - reference[pair, answer].item())
        expected -= math.log(1 / (1 + math.exp(-beta * (gains[0] - gains[1]))))
    total, count = preference(logits, (tokens, reference), beta=beta)
    assert count == 3 and total.item() == pytest.approx(expected, rel=1e-5)


def train(recipe: Recipe, folder: Path, ends: tuple[int, ...]) -> tuple[list[float], dict[str, float], torch.Tensor]:
    """Train in one session per end; return the losses, the last evaluation and the reference."""
    losses: list[float] = []
    for end in ends:
        with ct.session(checkpoint_dir=folder, seed=1, device="cpu") as session:
            trainer = build_trainer(session, recipe, Batch(global_batch=2, micro_batch=1, grad_accum=2))
            reference = trainer.task.reference
            assert reference is not None
            state = {"model": trainer.model, "optimizer": trainer.optimizer, "data": trainer.data}
            state["reference"] = reference
            get_runtime(session).state.prepare_start = lambda t=trainer: compute_reference(t, recipe)
            evaluations = build_evaluations(session, trainer.task, recipe)
            for step in session.steps(end, state, evaluations=evaluations):
                trainer.schedule.apply(trainer.optimizer, step + 1)
                losses.append(trainer.step().loss.item())
            results = get_runtime(session).state.eval_results
    return losses, results, reference.datasets[0].reference


@pytest.mark.long
def test_training_starts_at_the_reference_and_resumes_exactly(tmp_path: Path) -> None:
    write_rows(tmp_path / "held.jsonl", PAIRS[:2])
    recipe = make_recipe(tmp_path, validation_path=str(tmp_path / "held.jsonl"), objective={"beta": 1.0})
    whole, results, reference = train(recipe, tmp_path / "whole", (4,))
    assert whole[0] == pytest.approx(math.log(2), abs=1e-5) and whole[-1] < whole[0]
    assert (reference < 0).all() and results["validation_reward_accuracy"] == 1.0
    resumed, resumed_results, restored = train(recipe, tmp_path / "resumed", (2, 4))
    assert resumed == whole and resumed_results == results and torch.equal(restored, reference)


def test_reference_is_the_sum_of_the_answers_log_probabilities(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path)
    with ct.session(seed=1, device="cpu") as session:
        trainer = build_trainer(session, recipe, Batch(global_batch=2, micro_batch=2, grad_accum=1))
        compute_reference(trainer, recipe)
        assert trainer.task.reference is not None
        pairs = trainer.task.reference.datasets[0]
        for i in range(len(pairs)):
            inputs, (targets, reference) = pairs[i]
            with torch.no_grad():
                log_probs = F.log_softmax(trainer.model(inputs), -1)
            kept = targets != IGNORED
            picked = log_probs.gather(-1, targets.where(kept, 0)[..., None]).squeeze(-1) * kept
            assert torch.allclose(picked.sum(-1), reference, atol=1e-4)
        other = ReferenceLogProbs([pairs, pairs])
        with pytest.raises(CheckpointError, match="reference log-probabilities of 3 pairs, and the data has 3 and 3"):
            other.load_state_dict(trainer.task.reference.state_dict())


@pytest.mark.long
def test_stop_during_the_reference_saves_nothing(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path)
    with pytest.raises(SystemExit), ct.session(checkpoint_dir=tmp_path / "run", seed=1, device="cpu") as session:
        trainer = build_trainer(session, recipe, Batch(global_batch=2, micro_batch=2, grad_accum=1))
        runtime = get_runtime(session)
        runtime.agreement.poll = lambda: True  # type: ignore[method-assign]
        runtime.state.prepare_start = lambda: compute_reference(trainer, recipe)
        for _ in session.steps(4, {"model": trainer.model, "optimizer": trainer.optimizer}):
            pytest.fail("a step without the reference")
    assert trainer.task.reference is not None and not trainer.task.reference.datasets[0].reference.any()
    assert not list((tmp_path / "run").glob("step-*"))
