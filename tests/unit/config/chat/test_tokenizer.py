"""Tokenizer files, and which tokens of a text are answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from clustertrain.config.chat.encode import ChatEncoder, build_template, mark_tokens
from clustertrain.config.chat.rows import parse_row
from clustertrain.config.chat.tokenizer import build_tokenizer, check_vocabulary, load_tokenizer_files
from clustertrain.errors import ConfigError
from tests.tiny_tokenizer import CHATML, MARKED, VOCAB_SIZE, chat, metaspace_tokenizer, write_tokenizer


def change_json(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_facts_of_a_folder(tmp_path: Path) -> None:
    files = load_tokenizer_files(write_tokenizer(tmp_path))
    assert files.largest_id == VOCAB_SIZE - 1 and files.template == CHATML
    assert files.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    check_vocabulary(files, VOCAB_SIZE)
    with pytest.raises(ConfigError, match=r"tokens up to 319, but model.vocab_size = 319(.|\n)*= 320 or more"):
        check_vocabulary(files, VOCAB_SIZE - 1)
    (tmp_path / "chat_template.jinja").write_text(MARKED)  # comes before that of the configuration
    assert load_tokenizer_files(tmp_path).template == MARKED
    unigram = load_tokenizer_files(write_tokenizer(tmp_path / "unigram", tokenizer=metaspace_tokenizer()))
    assert unigram.largest_id == build_tokenizer(unigram, "test").get_vocab_size() - 1


def test_text_is_neither_cut_nor_extended(tmp_path: Path) -> None:
    """Saved tokenizers cut to the length of their training and add a first token, and drop spaces from offsets."""
    tokenizer = build_tokenizer(load_tokenizer_files(write_tokenizer(tmp_path)), "test")
    encoding = tokenizer.encode("the time   is é 😀 late")
    assert len(encoding.ids) > 4 and 2 not in encoding.ids
    assert encoding.offsets[0][0] == 0
    assert all(b[0] <= a[1] for a, b in zip(encoding.offsets, encoding.offsets[1:], strict=False))


def test_several_templates_need_a_default(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": MARKED}, {"name": "default", "template": CHATML}]
    assert load_tokenizer_files(write_tokenizer(tmp_path, named)).template == CHATML
    with pytest.raises(ConfigError, match=r"no default among its templates: tool_use(.|\n)*data.chat_template"):
        load_tokenizer_files(write_tokenizer(tmp_path, named[:1]))


def test_tokens_that_only_the_configuration_lists_raise(tmp_path: Path) -> None:
    config = write_tokenizer(tmp_path) / "tokenizer_config.json"
    change_json(config, added_tokens_decoder={"1": {"content": "<|im_end|>", "special": True}})
    load_tokenizer_files(tmp_path)
    change_json(config, added_tokens_decoder={"320": {"content": "<|call|>"}})
    with pytest.raises(ConfigError, match=r"lists the token '<\|call\|>' as 320, and in tokenizer.json it is missing"):
        load_tokenizer_files(tmp_path)
    change_json(config, added_tokens_decoder={"7": {"content": "<|im_end|>"}})
    with pytest.raises(ConfigError, match=r"as 7, and in tokenizer\.json it is 1"):
        load_tokenizer_files(tmp_path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: (d / "tokenizer.json").unlink(), r"no tokenizer.json in it(.|\n)*save_pretrained"),
        (lambda d: (d / "tokenizer.json").write_text("{"), "tokenizer.json is not JSON"),
        (lambda d: (d / "tokenizer.json").write_text("[]"), "is not a JSON object"),
        (lambda d: (d / "tokenizer.json").write_text("{}"), "no vocabulary"),
        (lambda d: change_json(d / "tokenizer.json", model={"vocab": {"a": "b"}}), "one without a number"),
        (lambda d: change_json(d / "tokenizer.json", model={"vocab": {"a": 1}}), "cannot read"),
        (lambda d: (d / "tokenizer_config.json").write_bytes(b"\xff"), "is not UTF-8"),
        (lambda d: change_json(d / "tokenizer_config.json", chat_template=None), "no chat template(.|\n)*Jinja file"),
        (lambda d: change_json(d / "tokenizer_config.json", chat_template=""), "the chat template is empty"),
    ],
)
def test_unusable_files_raise(tmp_path: Path, damage: Any, message: str) -> None:
    damage(write_tokenizer(tmp_path))
    with pytest.raises(ConfigError, match=message):
        ChatEncoder(tmp_path)


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data.tokenizer = '.*/none': no such file or folder"):
        load_tokenizer_files(tmp_path / "none")
    write_tokenizer(tmp_path)
    with pytest.raises(ConfigError, match=r"data.chat_template = '.*/none': no such file"):
        ChatEncoder(tmp_path, tmp_path / "none")


def test_lone_file_needs_a_template_without_special_tokens(tmp_path: Path) -> None:
    file = write_tokenizer(tmp_path) / "tokenizer.json"
    (tmp_path / "mine.jinja").write_text(MARKED)
    with pytest.raises(ConfigError, match="no chat template"):
        ChatEncoder(file)
    with pytest.raises(ConfigError, match=r"mine.jinja uses bos_token and eos_token, and .*tokenizer.json does not"):
        ChatEncoder(file, tmp_path / "mine.jinja")
    assert build_template(load_tokenizer_files(tmp_path), tmp_path / "mine.jinja").marks_answers
    (tmp_path / "mine.jinja").write_text(CHATML)
    [encoded] = ChatEncoder(file, tmp_path / "mine.jinja").encode([parse_row(chat("hello", "it is late"), "w")])
    assert encoded.answers.sum() > 2


def test_text_without_tokens_is_named(tmp_path: Path) -> None:
    words = Tokenizer(models.WordLevel({"<|im_start|>": 0, "<|im_end|>": 1, "hello": 2, "late": 3}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    write_tokenizer(tmp_path, "{% for m in messages %}{{ m.content }} {% endfor %}", words)
    rows = [parse_row(chat("hello", answer), f"line {i}") for i, answer in enumerate(("late", "unheard-of"), 1)]
    with pytest.raises(ConfigError, match="line 2: the tokenizer cannot represent its text"):
        list(ChatEncoder(tmp_path).encode(rows))


def test_marks_of_tokens_at_the_edges() -> None:
    offsets = [(0, 3), (3, 3), (3, 5), (4, 5), (5, 7), (7, 7), (7, 9)]
    # A token without characters belongs to the answer that starts at it, not to the one that ends at it.
    assert mark_tokens(offsets, [(3, 7)]).tolist() == [False, True, True, True, True, False, False]
    assert mark_tokens(offsets, [(2, 3), (8, 9)]).tolist() == [True, False, False, False, False, False, True]
    assert mark_tokens([], [(0, 1)]).tolist() == []
