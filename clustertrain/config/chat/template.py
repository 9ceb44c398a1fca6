"""Chat templates: Jinja text that turns messages into the text that a model was trained on.

The conventions are those of the `transformers` library: the variables ``messages``, ``tools``,
``add_generation_prompt`` and the special tokens, ``raise_exception(message)``, and ``{% generation %}`` around what
the assistant writes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from clustertrain.config.chat.rows import Conversation
from clustertrain.errors import ConfigError

Span = tuple[int, int]
"""First character and end of an answer in the rendered text."""

# Around each answer of a template with {% generation %}. These code points are reserved for a program's own use and
# are never text. A position would be lost where a template captures or trims its output.
_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
_MARKS = re.compile(f"([{_OPEN}{_CLOSE}])")
# What a template may raise on messages that it does not support.
_TEMPLATE_ERRORS = (
    jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError,
)  # fmt: skip
_SHOWN_CHARS = 40
_GENERATION_FIX = (
    "put {% generation %} and {% endgeneration %} around the assistant's text in the template, in a file that "
    "data.chat_template names"
)


class _Generation(Extension):
    """The block ``{% generation %}``, which marks what the assistant writes."""

    tags = {"generation"}  # noqa: RUF012 - as in the base class

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Callable[[], str]) -> str:
        return f"{_OPEN}{caller()}{_CLOSE}"


class _Namespace(Namespace):
    """A template's namespace without names that start with an underscore: with such, a value of the template could
    pass for one of Python's own, and the sandbox would let it through."""

    def __setitem__(self, name: str, value: Any) -> None:
        _check_public(name)
        super().__setitem__(name, value)


def _make_namespace(*args: Any, **values: Any) -> _Namespace:
    names = dict(*args, **values)
    for name in names:
        _check_public(name)
    return _Namespace(names)


def _make_dict(*args: Any, **values: Any) -> dict[Any, Any]:
    return dict(*args, **values)


def _check_public(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"namespace with the name {name!r}")


class ChatTemplate:
    """A compiled chat template."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], name: str) -> None:
        """Compile ``source``.

        Args:
            special_tokens: for example ``{"bos_token": "<s>"}``; the template reads them by name.
            name: where the template is from, for messages.

        Raises:
            ConfigError: ``source`` is empty or not a Jinja template.
        """
        self.name = name
        self._special_tokens = special_tokens
        if not source.strip():
            raise ConfigError(f"{name}: the chat template is empty", fix="set data.chat_template to a template's file")
        # strftime_now, which transformers offers, is missing on purpose: the data would change with the day, and a
        # resume would be refused.
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _raise, "namespace": _make_namespace, "dict": _make_dict}
        try:
            tree = environment.parse(source)
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as e:
            raise ConfigError(f"{name}, line {e.lineno}: not a chat template: {e.message}", fix="correct it") from e
        self.variables = frozenset(meta.find_undeclared_variables(tree))
        """Names that the template reads and does not set."""
        calls = tree.find_all(nodes.ExtensionAttribute)
        self.marks_answers = any(node.name == "_mark" for node in calls)
        """Whether the template has ``{% generation %}``."""

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None, *, add_prompt: bool = False
    ) -> str:
        """Return the text of ``messages``; with ``add_prompt``, also the start of the assistant's next message."""
        return self._render(messages, tools, add_prompt).replace(_OPEN, "").replace(_CLOSE, "")

    def _render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None, add_prompt: bool) -> str:
        return self._template.render(
            messages=messages,
            tools=tools,
            documents=None,
            add_generation_prompt=add_prompt,
            **self._special_tokens,
        )

    def find_answers(self, conversation: Conversation) -> tuple[str, list[Span]]:
        """Return the text of ``conversation`` and where in it the trained answers are, in order.

        An answer ends with what the template writes after it, such as the end of the turn, because the model must
        write that too. With ``{% generation %}``, the template decides.

        Raises:
            ConfigError: the template fails, renders nothing, or does not determine where the answers are.
        """
        where = conversation.where
        try:
            text = self._render(conversation.messages, conversation.tools, False)
            if not text.strip():
                raise ConfigError(f"{where}: {self.name} renders nothing", fix="correct the chat template")
            if self.marks_answers:
                _check_no_marks(conversation)
                return self._read_marks(conversation, text)
            return text, [self._find_turn(conversation, text, i) for i in conversation.trained]
        except _TEMPLATE_ERRORS as e:
            reason = str(e) or type(e).__name__
            fix = "correct the row, or the template"
            if "strftime_now" in reason:
                fix = "write a fixed date into the template: with today's, the data would differ each day"
            raise ConfigError(f"{where}: {self.name} failed: {reason}", fix=fix) from e

    def _find_turn(self, conversation: Conversation, text: str, i: int) -> Span:
        """Return the span of message ``i``: what its turn adds to the rendering of the messages before it."""
        messages, tools = conversation.messages, conversation.tools
        before = self._render(messages[:i], tools, True)
        after = text if i + 1 == len(messages) else self._render(messages[: i + 1], tools, False)
        for prefix, what in (
            (before, f"the start of message {i + 1} (its generation prompt)"),
            (after, f"messages 1 to {i + 1}"),
        ):
            if not text.startswith(prefix):
                raise ConfigError(
                    f"{conversation.where}: {self.name} renders {what} differently alone than in the whole "
                    f"conversation, so where the answer is remains unknown: {_show_difference(prefix, text)}",
                    fix=_GENERATION_FIX,
                )
        if len(after) <= len(before):
            raise ConfigError(
                f"{conversation.where}: {self.name} renders no text for message {i + 1}, an answer",
                fix="correct the template, or remove the row",
            )
        return len(before), len(after)

    def _read_marks(self, conversation: Conversation, marked: str) -> tuple[str, list[Span]]:
        """Return the text without marks, and the marked spans of the trained messages."""
        where, spans, plain = conversation.where, [], []
        length, start = 0, -1
        for piece in _MARKS.split(marked):
            if piece == _OPEN and start < 0:
                start = length
            elif piece == _CLOSE and start >= 0:
                spans.append((start, length))
                start = -1
            elif piece in (_OPEN, _CLOSE):
                raise ConfigError(f"{where}: {self.name} nests {{% generation %}} blocks", fix="correct the template")
            else:
                plain.append(piece)
                length += len(piece)
        answers = [i for i, m in enumerate(conversation.messages) if m["role"] == "assistant"]
        if list(conversation.trained) != answers:
            if len(spans) != len(answers):
                raise ConfigError(
                    f"{where}: only some answers are trained on, but {self.name} marks {len(spans)} spans for "
                    f"{len(answers)} answers",
                    fix="put one {% generation %} block around each of the assistant's messages",
                )
            spans = [span for i, span in zip(answers, spans, strict=True) if i in conversation.trained]
        spans = [(first, end) for first, end in spans if end > first]
        if not spans:
            raise ConfigError(
                f"{where}: {self.name} marks no answer with {{% generation %}}", fix="correct the template"
            )
        return "".join(plain), spans


def _check_no_marks(conversation: Conversation) -> None:
    if _MARKS.search(json.dumps(conversation.messages, ensure_ascii=False, default=str)):
        raise ConfigError(
            f"{conversation.where}: contains U+FDD0 or U+FDD1, which are not characters", fix="remove them"
        )


def _show_difference(prefix: str, text: str) -> str:
    same = next((i for i, (a, b) in enumerate(zip(prefix, text, strict=False)) if a != b), min(len(prefix), len(text)))
    first = max(0, same - _SHOWN_CHARS // 2)
    return f"{prefix[first : same + _SHOWN_CHARS]!r} and {text[first : same + _SHOWN_CHARS]!r}"


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    """Return JSON without the escapes for HTML that Jinja's own filter adds."""
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)
