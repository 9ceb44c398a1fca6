"""Checks of chat data at submission."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from clustertrain.config.data import DataSpec
from clustertrain.config.model import ModelSpec
from clustertrain.config.recipe import Recipe
from clustertrain.errors import ConfigError
from clustertrain.submit.preflight import data as data_here
from clustertrain.submit.preflight.chat import check_rows, check_tokenizer
from clustertrain.submit.prepare import prepare
from clustertrain.submit.request import SubmitRequest
from tests.tiny_tokenizer import VOCAB_SIZE, chat, write_rows, write_tokenizer

GOOD = chat("hello", "late")


def make_recipe(folder: Path, *, vocab_size: int = VOCAB_SIZE, **data: Any) -> Recipe:
    keys = {"kind": "chat", "path": str(folder / "chats.jsonl"), "tokenizer": str(folder / "t"), **data}
    return Recipe(data=DataSpec(**keys), model=ModelSpec(vocab_size=vocab_size))


def check(recipe: Recipe) -> None:
    assert check_tokenizer(recipe, must_exist=True) is None
    assert recipe.data_path is not None
    check_rows(recipe.data_path, f"data.path = {recipe.data.path!r}", recipe)


def test_good_data_passes_without_the_tokenizers_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tokenizer(tmp_path / "t")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    write_rows(tmp_path / "chats.jsonl", [GOOD] * 3)
    check(make_recipe(tmp_path))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], r"data.path = '.*chats.jsonl': no conversation"),
        ([GOOD, {"messages": [{"role": "user", "content": "a"}]}], "line 2: no answer"),
        (
            [GOOD, {"messages": [{"role": "robot", "content": "a"}]}],
            "line 2: messages, message 1: unknown role 'robot'",
        ),
        ([GOOD, "text"], "line 2: text instead of an object"),
    ],
)
def test_bad_rows_are_refused_by_number(tmp_path: Path, rows: list[Any], message: str) -> None:
    write_tokenizer(tmp_path / "t")
    write_rows(tmp_path / "chats.jsonl", rows)
    with pytest.raises(ConfigError, match=message):
        check(make_recipe(tmp_path))


def test_template_is_tried_on_the_rows(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "t", "{{ raise_exception('roles must alternate') }}")
    write_rows(tmp_path / "chats.jsonl", [GOOD])
    with pytest.raises(ConfigError, match=r"line 1: chat_template of .*tokenizer_config.json failed: roles must"):
        check(make_recipe(tmp_path))
    write_tokenizer(tmp_path / "t", None)
    with pytest.raises(ConfigError, match="no chat template"):
        check(make_recipe(tmp_path))


def test_vocabulary_and_missing_files_are_refused(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "t")
    write_rows(tmp_path / "chats.jsonl", [GOOD])
    with pytest.raises(ConfigError, match=r"tokens up to 319, but model.vocab_size = 256"):
        check(make_recipe(tmp_path, vocab_size=256))
    missing = make_recipe(tmp_path, chat_template=f"{tmp_path}/none.jinja")
    with pytest.raises(ConfigError, match=r"data.chat_template = '.*none.jinja': no such file"):
        check(missing)
    note = check_tokenizer(missing, must_exist=False)
    assert note is not None and "data.chat_template = " in note and "every node" in note
    check_rows(tmp_path / "chats.jsonl", "data.path = x", missing)  # the rows alone are checked


def test_keys_that_chats_need() -> None:
    with pytest.raises(ValueError, match=r"kind = 'chat' needs path(.|\n)*tokenizer"):
        DataSpec(kind="chat", path="chats.jsonl")
    with pytest.raises(ValueError, match=r"data.kind = 'chat': a convnet trains on images or custom"):
        Recipe(data=DataSpec(kind="chat", path="a", tokenizer="b"), model=ModelSpec(kind="convnet"))


@pytest.mark.long
@pytest.mark.usefixtures("fake_slurm")
def test_paths_are_absolute_and_checked_by_submit(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "t")
    write_rows(tmp_path / "chats.jsonl", [GOOD])
    keys = ("data.kind=chat", "data.path=chats.jsonl", "data.tokenizer=t", f"model.vocab_size={VOCAB_SIZE}")
    prepared = prepare(SubmitRequest(cwd=tmp_path, assignments=keys))
    assert prepared.spec.recipe.data.tokenizer == str(tmp_path / "t")
    assert data_here.check_data(prepared) is None
    (tmp_path / "chats.jsonl").write_text("{\n")
    with pytest.raises(ConfigError, match="line 1: not JSON"):
        data_here.check_data(prepared)
    gone = prepare(SubmitRequest(cwd=tmp_path, assignments=(*keys, "data.tokenizer=none")))
    (tmp_path / "chats.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError, match="line 1: neither messages"):  # without the tokenizer too
        data_here.check_data(gone)
