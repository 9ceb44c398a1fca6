"""Which tokens of conversations are learned, as the data check reports it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from clustertrain.config.data import DataSpec
from clustertrain.config.model import ModelSpec
from clustertrain.config.recipe import Recipe
from clustertrain.diagnose.checks.answers import check_answers
from clustertrain.train.data.tokenize import encode_chats, write
from tests.tiny_tokenizer import CHATML, MARKED, VOCAB_SIZE, chat, write_rows, write_tokenizer

ROWS = [chat("hello", "it is late"), chat("what", "the  time ", "a", "b")]


def findings(folder: Path, template: str, **data: Any) -> Any:
    write_tokenizer(folder / "t", template)
    write_rows(folder / "chats.jsonl", ROWS)
    keys = {"kind": "chat", "path": str(folder / "chats.jsonl"), "tokenizer": str(folder / "t"), **data}
    return check_answers(Recipe(data=DataSpec(**keys), model=ModelSpec(vocab_size=VOCAB_SIZE)))


@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["prefixes", "generation"])
def test_whole_answers_with_their_end_pass(tmp_path: Path, template: str) -> None:
    found = findings(tmp_path, template)
    assert found.notes == [] and found.evidence["answers_checked"] == 2
    [(name, shown)] = found.rows
    assert name == "learned" and "it is late" in shown and "hello" not in shown and "line 1" in shown


def test_answers_without_their_end_are_warned_of(tmp_path: Path) -> None:
    found = findings(
        tmp_path, MARKED.replace("{{ eos_token }}{% endgeneration %}", "{% endgeneration %}{{ eos_token }}")
    )
    [(verdict, text, fix)] = found.notes
    assert verdict == "warn" and "2 of 2 answers" in text and "never learns to stop" in fix


def test_altered_answers_are_warned_of(tmp_path: Path) -> None:
    found = findings(tmp_path, CHATML.replace("message.content", "message.content[:5]"))
    [(verdict, text, _)] = found.notes
    assert verdict == "warn" and "2 of 2" in text and "line 1" in text


def test_prepared_shards_are_left_out(tmp_path: Path) -> None:
    findings(tmp_path, CHATML)
    write(tmp_path / "s", encode_chats(tmp_path / "t", None, tmp_path / "chats.jsonl"), dtype="uint16")
    assert findings(tmp_path, CHATML, path=str(tmp_path / "s")).rows == []
