"""Chat templates: rendering as in transformers, and where the answers are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from clustertrain.config.chat.encode import ChatEncoder
from clustertrain.config.chat.rows import Conversation, parse_row
from clustertrain.config.chat.template import ChatTemplate
from clustertrain.errors import ConfigError
from tests.tiny_tokenizer import CHATML, MARKED, chat, metaspace_tokenizer, write_tokenizer

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
TRICKY = (
    "{% set n = namespace(seen=0) %}{{ bos_token }}{% for message in messages %}{% set n.seen = n.seen + 1 %}\n"
    "    {% if loop.index0 > 20 %}{% break %}{% endif %}\n"
    "    {% if tools and loop.first %}\n{{ tools | tojson }}{{ tools | tojson(indent=2) }}\n    {% endif %}\n"
    "    {% if message.role not in ['user', 'assistant', 'system', 'tool'] %}"
    "{{ raise_exception('no ' + message.role) }}{% endif %}\n"
    "[{{ message['role'] }}] {{ n.seen }} {{ message.content | trim }}\n"
    "    {% if message.tool_calls is defined %}{{ message.tool_calls | tojson }}{% endif %}\n"
    "{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
)
THINKING = (  # drops the thoughts of earlier answers, as some published templates do
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' and loop.last %}<think></think>{% endif %}{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CALL = {"type": "function", "function": {"name": "clock", "arguments": {"zone": "<UTC> & é"}}}
WITH_TOOLS = {
    "messages": [
        {"role": "user", "content": " what time? "},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "12:00"},
        {"role": "assistant", "content": "noon"},
    ],
    "tools": [{"type": "function", "function": {"name": "clock", "description": "<time>"}}],
}
ROWS = [chat("hello", "it is late"), chat("question 😀", "Töne", "a", "b", system="be  brief")]


def conversation(row: Any) -> Conversation:
    return parse_row(row, "chats.jsonl, line 3")


def answers(source: str, row: Any) -> list[str]:
    text, spans = ChatTemplate(source, TOKENS, "the template").find_answers(conversation(row))
    return [text[first:end] for first, end in spans]


@pytest.mark.long
@pytest.mark.parametrize("metaspace", [False, True], ids=["byte-level", "metaspace"])
@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["prefixes", "generation"])
def test_tokens_and_marks_are_those_of_transformers(tmp_path: Path, template: str, metaspace: bool) -> None:
    transformers = pytest.importorskip("transformers")
    folder = write_tokenizer(tmp_path / "t", template, metaspace_tokenizer() if metaspace else None)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    ours = ChatEncoder(folder)
    for row, encoded in zip(ROWS, ours.encode(map(conversation, ROWS)), strict=True):
        options = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": template == MARKED}
        expected = theirs.apply_chat_template(row["messages"], **options)
        assert encoded.ids.tolist() == expected["input_ids"]
        if template == MARKED:
            assert encoded.answers.tolist() == [bool(m) for m in expected["assistant_masks"]]
        assert ours.template.render(row["messages"]) == theirs.apply_chat_template(row["messages"], tokenize=False)
        assert ours.template.render(row["messages"], add_prompt=True) == theirs.apply_chat_template(
            row["messages"], tokenize=False, add_generation_prompt=True
        )


@pytest.mark.long
def test_filters_whitespace_and_tools_are_those_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(write_tokenizer(tmp_path / "t", TRICKY))
    row = conversation(WITH_TOOLS)
    expected = theirs.apply_chat_template(row.messages, tools=row.tools, tokenize=False)
    assert ChatTemplate(TRICKY, TOKENS, "it").render(row.messages, row.tools) == expected
    assert "<UTC> & é" in expected and expected.startswith("<s>")


def test_answers_by_prefixes_include_the_end_of_the_turn() -> None:
    assert answers(CHATML, ROWS[1]) == ["Töne<|im_end|>\n", "b<|im_end|>\n"]
    assert answers(TRICKY.replace("{{ n.seen }} ", ""), WITH_TOOLS)[1] == "noon\n"
    partly = {"prompt": ROWS[1]["messages"][:-1], "completion": ROWS[1]["messages"][-1:]}
    assert answers(CHATML, partly) == ["b<|im_end|>\n"]


def test_marked_answers_are_the_template_s(tmp_path: Path) -> None:
    assert answers(MARKED, ROWS[1]) == ["Töne</s>", "b</s>"]
    partly = {"prompt": ROWS[1]["messages"][:-1], "completion": ROWS[1]["messages"][-1:]}
    assert answers(MARKED, partly) == ["b</s>"]
    captured = "{% set x %}" + MARKED + "{% endset %}{{ x }}"  # a position in the output would be lost
    assert answers(captured, ROWS[1]) == ["Töne</s>", "b</s>"]


@pytest.mark.parametrize(
    ("source", "row", "message"),
    [
        ("", ROWS[0], "the chat template is empty"),
        (" \n", ROWS[0], "the chat template is empty"),
        ("{% for %}", ROWS[0], "the template, line 1: not a chat template"),
        ("{{ '' }}", ROWS[0], "line 3: the template renders nothing"),
        (THINKING, chat("a", "b", "c", "d"), "renders messages 1 to 2 differently alone(.|\n)*generation %}"),
        (CHATML.replace("assistant\n{% endif", "assistant:{% endif"), ROWS[0], r"start of message 2 \(its generation"),
        ("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", ROWS[0], "no text for message 2"),
        ("{{ raise_exception('roles must alternate') }}", ROWS[0], "line 3: the template failed: roles must alternate"),
        ("{{ messages[7].content }}", ROWS[0], "line 3: the template failed: "),
        ("{{ messages[0].content + 3 }}", ROWS[0], "line 3: the template failed: "),
        ("{{ strftime_now('%d') }}", ROWS[0], "strftime_now(.|\n)*fixed date"),
        ("{{ messages.append(3) }}", ROWS[0], "line 3: the template failed: "),
        ("{{ ''.__class__.__mro__ }}{{ ''.__class__.mro() }}", ROWS[0], "line 3: the template failed: "),
        ("{{ namespace(__self__=3) }}", ROWS[0], "line 3: the template failed: namespace with the name"),
        ("{% set n = namespace() %}{% set n._x = 3 %}", ROWS[0], "line 3: the template failed: namespace with"),
        ("a{% generation %}{% endgeneration %}", ROWS[0], "marks no answer"),
        ("{% generation %}a{% generation %}b{% endgeneration %}{% endgeneration %}", ROWS[0], "nests"),
        (MARKED, chat("a", "b \ufdd0"), "contains U\\+FDD0"),
    ],
)
def test_unusable_template_raises(source: str, row: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        answers(source, row)


def test_one_answer_that_a_template_treats_as_the_last_is_exact() -> None:
    with pytest.raises(ConfigError, match="generation prompt"):  # what follows the prompt would start with <think>
        answers(THINKING.replace("assistant\n{% endif", "assistant\n<think>\n{% endif"), chat("a", "b"))
    assert answers(THINKING, chat("a", "b")) == ["<think></think>b<|im_end|>\n"]
