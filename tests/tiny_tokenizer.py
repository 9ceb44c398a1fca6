"""Tiny tokenizers for tests, as folders that `transformers` can load too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'assistant' %}ASSISTANT: "
    "{% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}"
    "{% else %}{{ message.role | upper }}: {{ message.content }}\n{% endif %}{% endfor %}"
)
SPECIAL = ["<|im_start|>", "<|im_end|>", "<s>", "</s>"]
TEXT = ["user assistant system question answer hello there what is the time   it is late", "Fragen über Töne 😀"]
VOCAB_SIZE = 320


def byte_level_tokenizer() -> Tokenizer:
    """Return a byte-level BPE tokenizer with the settings that published ones have, traps included."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        TEXT,
        trainers.BpeTrainer(
            vocab_size=VOCAB_SIZE,
            min_frequency=1,
            special_tokens=SPECIAL,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    bos = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 2)])
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=True), bos])
    tokenizer.enable_truncation(4)
    return tokenizer


def metaspace_tokenizer() -> Tokenizer:
    """Return a tokenizer that marks the start of words, as those from SentencePiece do."""
    words = [f"▁{word}" for line in TEXT for word in line.split()]
    characters = sorted({character for line in TEXT for character in line} - {" "})
    vocabulary = [(token, 0.0) for token in SPECIAL] + [("<unk>", -20.0), ("▁", -3.0)]
    vocabulary += [(word, -2.0) for word in dict.fromkeys(words)] + [(c, -5.0) for c in [*characters, "\n", ":", "U"]]
    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=4))
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def write_tokenizer(folder: Path, template: Any = CHATML, tokenizer: Tokenizer | None = None) -> Path:
    """Write a tokenizer with its configuration into ``folder`` and return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (tokenizer or byte_level_tokenizer()).save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": {"content": "</s>", "__type": "AddedToken"},
        **({} if template is None else {"chat_template": template}),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def chat(*texts: str, system: str = "") -> dict[str, Any]:
    """Return a row whose messages alternate between the user and the assistant."""
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    return {"messages": [{"role": "system", "content": system}, *messages] if system else messages}


def write_rows(path: Path, rows: list[Any]) -> Path:
    """Write JSON lines."""
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return path
