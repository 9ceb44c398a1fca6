"""Named sizes of decoders: values for the keys of ``[model]``, published or convenient.

Llama 3.1: table 3 and section 3.2 of Grattafiori et al., arXiv 2407.21783, and the released configurations for the
vocabulary with its reserved tokens (128,256) and ``norm_eps``. These are the hyper-parameters of pre-training, at a
``data.seq_len`` of up to 8192. The rescaled rotary frequencies that extend the released models to 128k tokens change no
shape and are omitted, as are the masks between documents of one sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

_LLAMA_3 = {"vocab_size": 128_256, "kv_heads": 8, "rope_theta": 500_000.0, "norm_eps": 1e-5}

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "tiny": {},  # ModelSpec's defaults: a run takes seconds on a CPU
    # Width, depth and vocabulary of GPT-3 Small (Brown et al., arXiv 2005.14165, table 2.1) in Llama's architecture.
    "125m": {"vocab_size": 50_257, "dim": 768, "layers": 12, "heads": 12, "kv_heads": 12, "tie_embeddings": True},
    # The released configuration of Llama 3.2 1B.
    "llama3.2-1b": {**_LLAMA_3, "dim": 2048, "layers": 16, "heads": 32, "ffn_dim": 8192, "tie_embeddings": True},
    "llama3.1-8b": {**_LLAMA_3, "dim": 4096, "layers": 32, "heads": 32, "ffn_dim": 14_336},
    "llama3.1-70b": {**_LLAMA_3, "dim": 8192, "layers": 80, "heads": 64, "ffn_dim": 28_672},
    "llama3.1-405b": {**_LLAMA_3, "dim": 16_384, "layers": 126, "heads": 128, "ffn_dim": 53_248},
}


class TrainingDefaults(NamedTuple):
    """Training settings of a preset, used if the recipe does not set them."""

    seq_len: int
    """Context length of pre-training, in tokens."""
    global_batch: int
    """Sequences per step."""


# ``tiny`` uses the recipe's defaults.
TRAINING_DEFAULTS: Mapping[str, TrainingDefaults] = {
    "125m": TrainingDefaults(2048, 256),  # GPT-3 Small, table 2.1: half a million tokens
    "llama3.2-1b": TrainingDefaults(8192, 128),  # a million tokens, feasible on a usual number of GPUs for both
    "llama3.1-8b": TrainingDefaults(8192, 128),
    "llama3.1-70b": TrainingDefaults(8192, 512),
    "llama3.1-405b": TrainingDefaults(8192, 2048),  # section 3.4.1: up to 16 million tokens
}


def find_training_defaults(preset: str, kind: object = "decoder") -> TrainingDefaults | None:
    """Return the training settings of ``preset`` for a decoder; None for other kinds, whose data differs."""
    return TRAINING_DEFAULTS.get(preset) if kind == "decoder" else None


def apply_preset(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recipe's document with the preset's values in ``[model]`` and its context length as ``data.seq_len``.

    Keys that the document sets win. An unknown preset is left for ModelSpec to refuse.
    """
    model, data = document.get("model"), document.get("data", {})
    if not isinstance(model, dict) or not isinstance(model.get("preset"), str):
        return dict(document)
    expanded = {**document, "model": {**PRESETS.get(model["preset"], {}), **model}}
    defaults = find_training_defaults(model["preset"], model.get("kind", "decoder"))
    if defaults is None or not isinstance(data, dict) or "seq_len" in data:
        return expanded
    longest = model.get("max_seq_len")
    is_limited = isinstance(longest, int) and 0 < longest < defaults.seq_len
    return {**expanded, "data": {**data, "seq_len": longest if is_limited else defaults.seq_len}}
