"""Tensors of the built-in decoder by their names in Hugging Face transformers.

Only the names differ. The decoder rotates the pairs (i, i + head_dim/2) of a head, as transformers does, so that the
rows of q and k keep their order. Its vocabulary has no padding rows.
"""

from __future__ import annotations

from collections.abc import Callable

from clustertrain.config.model import ModelSpec

# Names within a layer: the decoder's and Hugging Face's.
_LAYER_NAMES = {
    "attention_norm": "input_layernorm",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "attention.out": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn.gate": "mlp.gate_proj",
    "ffn.up": "mlp.up_proj",
    "ffn.down": "mlp.down_proj",
}
HEAD = "head.weight"


def list_tensors(spec: ModelSpec) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return (Hugging Face name, shape) by the decoder's name of each tensor, in the order of execution.

    A tied head is omitted, because neither model stores it.
    """
    dim, hidden = spec.dim, spec.hidden
    matrices: dict[str, tuple[int, ...]] = {
        "attention.q": (spec.attention_dim, dim),
        "attention.k": (spec.kv_dim, dim),
        "attention.v": (spec.kv_dim, dim),
        "attention.out": (dim, spec.attention_dim),
        "ffn.gate": (hidden, dim),
        "ffn.up": (hidden, dim),
        "ffn.down": (dim, hidden),
    }
    vectors = spec.block_vectors()
    mapping: dict[str, tuple[str, tuple[int, ...]]] = {
        "embed.weight": ("model.embed_tokens.weight", (spec.vocab_size, dim))
    }
    for n in range(spec.layers):
        for name, hf_name in _LAYER_NAMES.items():
            own, hf = f"layers.{n}.{name}", f"model.layers.{n}.{hf_name}"
            if name in matrices:
                mapping[f"{own}.weight"] = f"{hf}.weight", matrices[name]
            if name in vectors:
                suffix = "bias" if name in matrices else "weight"
                mapping[f"{own}.{suffix}"] = f"{hf}.{suffix}", (vectors[name],)
    mapping["norm.weight"] = "model.norm.weight", (dim,)
    if not spec.tie_embeddings:
        mapping[HEAD] = "lm_head.weight", (spec.vocab_size, dim)
    return mapping


def rename_layer(spec: ModelSpec) -> Callable[[str], str]:
    """Return a function from the decoder's name of a layer to Hugging Face's."""
    names = {
        name.removesuffix(".weight"): hf_name.removesuffix(".weight")
        for name, (hf_name, _) in list_tensors(spec).items()
    }
    return names.__getitem__
