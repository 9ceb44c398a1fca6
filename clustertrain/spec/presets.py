"""Decoders by name: the keys of ``[model]`` that stand for a published or a handy size.

Llama 3.1: table 3 and section 3.2 of Grattafiori et al., arXiv 2407.21783, and the released configurations for the
vocabulary with its reserved tokens (128,256) and ``norm_eps``. These are the hyper-parameters of pre-training, at a
``data.seq_len`` of up to 8192. What the released models have on top, the rescaled rotary frequencies that stretch them
to 128k tokens, changes no shape and is left out, as are the masks between documents of one sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_LLAMA_3 = {"vocab_size": 128_256, "kv_heads": 8, "rope_theta": 500_000.0, "norm_eps": 1e-5}

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "tiny": {},  # what ModelSpec says of itself: seconds a run on a CPU
    # Width and depth of GPT-3 Small (Brown et al., arXiv 2005.14165, table 2.1) in Llama's form, with its vocabulary.
    "125m": {"vocab_size": 50_257, "dim": 768, "layers": 12, "heads": 12, "kv_heads": 12, "tie_embeddings": True},
    # The released configuration of Llama 3.2 1B.
    "llama3.2-1b": {**_LLAMA_3, "dim": 2048, "layers": 16, "heads": 32, "ffn_dim": 8192, "tie_embeddings": True},
    "llama3.1-8b": {**_LLAMA_3, "dim": 4096, "layers": 32, "heads": 32, "ffn_dim": 14_336},
    "llama3.1-70b": {**_LLAMA_3, "dim": 8192, "layers": 80, "heads": 64, "ffn_dim": 28_672},
    "llama3.1-405b": {**_LLAMA_3, "dim": 16_384, "layers": 126, "heads": 128, "ffn_dim": 53_248},
}


def filled(document: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe's document with the keys of ``model.preset`` in its ``[model]``; those that are given there win. A name
    that is no preset's is left for ModelSpec to refuse."""
    model = document.get("model")
    if not isinstance(model, dict) or not isinstance(model.get("preset"), str):
        return dict(document)
    return {**document, "model": {**PRESETS.get(model["preset"], {}), **model}}
