"""Check which tokens of conversations are learned: whole answers, up to the end of their turn."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

from clustertrain.config.chat.encode import ChatEncoder
from clustertrain.config.chat.rows import Conversation, list_chat_files, read_answers, read_conversations
from clustertrain.config.chat.shards import has_shards
from clustertrain.config.recipe import Recipe
from clustertrain.diagnose.registry import Verdict

MAX_CONVERSATIONS = 256
MAX_SHOWN_CHARS = 300


@dataclass
class AnswerFindings:
    """What the check found: notes (verdict, text, fix), rows for the terminal, and numbers."""

    notes: list[tuple[Verdict, str, str]] = field(default_factory=list)
    rows: list[tuple[str, str]] = field(default_factory=list)
    evidence: dict[str, Any] = field(default_factory=dict)


def check_answers(recipe: Recipe) -> AnswerFindings:
    """Check the first conversations of ``data.path``; prepared shards have been checked when they were made."""
    path = recipe.data_files["path"]
    if has_shards(path):
        return AnswerFindings()
    encoder = ChatEncoder(recipe.data_files["tokenizer"], recipe.data_files.get("chat_template"))
    read = read_answers if recipe.objective_kind == "dpo" else read_conversations
    rows = itertools.chain.from_iterable(map(read, list_chat_files(path)))
    conversations = list(itertools.islice(rows, MAX_CONVERSATIONS))
    return assess_answers(encoder, conversations)


def assess_answers(encoder: ChatEncoder, conversations: list[Conversation]) -> AnswerFindings:
    """Compare what is learned of ``conversations`` with their answers."""
    altered, endless, found = [], [], AnswerFindings()
    ends_exist = bool(encoder.added_ids)
    for conversation, encoded in zip(conversations, encoder.encode(conversations), strict=True):
        text, spans = encoder.template.find_answers(conversation)
        learned = "".join(text[first:end] for first, end in spans)
        contents = [conversation.messages[i].get("content") or "" for i in conversation.trained]
        if any(content.strip() not in learned for content in contents):
            altered.append(conversation.where)
        # The end of the turn may be followed by a line break.
        if ends_exist and not encoder.added_ids.intersection(encoded.ids[encoded.answers][-2:].tolist()):
            endless.append(conversation.where)
        if not found.rows:
            shown = encoder.decode(encoded.ids[encoded.answers].tolist())
            more = " …" if len(shown) > MAX_SHOWN_CHARS else ""
            found.rows = [("learned", f"{shown[:MAX_SHOWN_CHARS]!r}{more} ({conversation.where})")]
    count = len(conversations)
    if altered:
        text = f"the template changes or leaves out answers: {len(altered)} of {count}, such as {altered[0]}"
        found.notes.append(("warn", text, "compare the row 'learned' with the file"))
    if endless:
        text = f"{len(endless)} of {count} answers, such as {endless[0]}, end without a special token"
        fix = "let the template write the end of the turn inside the answer, or the model never learns to stop"
        found.notes.append(("warn", text, fix))
    found.evidence = {"answers_checked": count, "answers_altered": len(altered), "answers_without_end": len(endless)}
    return found
