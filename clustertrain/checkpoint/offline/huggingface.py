"""The built-in decoder as a LlamaForCausalLM of Hugging Face transformers.

Only the names of the tensors differ. The decoder rotates the pairs (i, i + head_dim/2) of a head, as that class does,
so that the rows of q and k keep their order. Its vocabulary has no padding rows.
"""

from __future__ import annotations

from typing import Any

from clustertrain.config.model import ModelSpec

# Names within a layer: the decoder's and Hugging Face's.
_LAYER_NAMES = {
    "attention_norm": "input_layernorm",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.out": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn.gate": "mlp.gate_proj",
    "ffn.up": "mlp.up_proj",
    "ffn.down": "mlp.down_proj",
}


def llama_tensors(spec: ModelSpec) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return (Hugging Face name, shape) by the decoder's name of each tensor, in the order of execution.

    A tied head is omitted, because neither model stores it.
    """
    dim, hidden = spec.dim, spec.hidden
    kv_dim = dim // spec.heads * spec.kv_heads
    shapes = {
        **dict.fromkeys(("attention_norm", "ffn_norm"), (dim,)),
        **dict.fromkeys(("attention.q", "attention.out"), (dim, dim)),
        **dict.fromkeys(("attention.k", "attention.v"), (kv_dim, dim)),
        **dict.fromkeys(("ffn.gate", "ffn.up"), (hidden, dim)),
        "ffn.down": (dim, hidden),
    }
    mapping: dict[str, tuple[str, tuple[int, ...]]] = {
        "embed.weight": ("model.embed_tokens.weight", (spec.vocab_size, dim))
    }
    for n in range(spec.layers):
        for name, hf_name in _LAYER_NAMES.items():
            mapping[f"layers.{n}.{name}.weight"] = f"model.layers.{n}.{hf_name}.weight", shapes[name]
    mapping["norm.weight"] = "model.norm.weight", (dim,)
    if not spec.tie_embeddings:
        mapping["head.weight"] = "lm_head.weight", (spec.vocab_size, dim)
    return mapping


def llama_config(spec: ModelSpec, seq_len: int, dtype: str) -> dict[str, Any]:
    """Return the content of ``config.json``, with the keys of transformers 4, which version 5 also accepts.

    Args:
        spec: the decoder.
        seq_len: tokens per training sample; the model is not trained for longer contexts.
        dtype: torch's name of the dtype of the tensors.
    """
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.dim,
        "intermediate_size": spec.hidden,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.dim // spec.heads,
        "hidden_act": "silu",
        "max_position_embeddings": seq_len,
        "rms_norm_eps": spec.norm_eps,
        "rope_theta": spec.rope_theta,
        "rope_scaling": None,
        "tie_word_embeddings": spec.tie_embeddings,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        # A byte vocabulary has no special tokens; without these lines transformers would assume 1 and 2.
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "torch_dtype": dtype,
    }
