"""A config.json of Hugging Face becomes the keys of [model], or is refused with the reason."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest

from clustertrain.config.huggingface import families, tensor_names
from clustertrain.config.model import ModelSpec
from clustertrain.config.parsing.documents import build
from clustertrain.errors import ConfigError, NotFound

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}


def write(folder: Path, **changes: Any) -> Path:
    document = {k: v for k, v in {**LLAMA, **changes}.items() if v is not ...}
    (folder / "config.json").write_text(json.dumps(document))
    return folder


def read(folder: Path, **changes: Any) -> ModelSpec:
    return build(families.read_model_table(write(folder, **changes)), ModelSpec, "test")


def test_llama_sizes(tmp_path: Path) -> None:
    assert read(tmp_path) == ModelSpec(
        vocab_size=300, dim=64, layers=2, heads=4, kv_heads=2, ffn_dim=96, max_seq_len=512, rope_theta=500_000.0,
        norm_eps=1e-5,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"num_key_value_heads": ...}, {"kv_heads": 4}),
        ({"head_dim": 32}, {"head_dim": 32}),
        ({"head_dim": 16}, {"head_dim": 0}),
        ({"rope_scaling": LLAMA3_ROPE}, {"rope_theta": 500_000.0}),
        ({"rope_theta": ..., "rope_parameters": {"rope_theta": 7.0, "rope_type": "default"}}, {"rope_theta": 7.0}),
        ({"model_type": "mistral", "sliding_window": 128}, {"max_seq_len": 128}),
        ({"model_type": "mistral", "sliding_window": None}, {"max_seq_len": 512}),
        ({"model_type": "qwen2", "sliding_window": 128}, {"max_seq_len": 512, "qkv_bias": True}),
        ({"model_type": "qwen2", "sliding_window": 128, "use_sliding_window": True}, {"max_seq_len": 128}),
        ({"model_type": "qwen3"}, {"qk_norm": True, "head_dim": 128, "qkv_bias": False}),
        (
            {"model_type": "gemma", "hidden_act": "gelu", "tie_word_embeddings": ...},
            {"norm_offset": True, "activation": "gelu-tanh", "head_dim": 256, "tie_embeddings": True},
        ),
    ],
)
def test_keys_of_each_family(tmp_path: Path, changes: dict[str, Any], expected: dict[str, Any]) -> None:
    spec = read(tmp_path, **changes)
    assert {name: getattr(spec, name) for name in expected} == expected


def test_rope_scaling_is_read_and_written_back(tmp_path: Path) -> None:
    spec = read(tmp_path, rope_scaling=LLAMA3_ROPE)
    assert spec.rope_scaling.kind == "llama3" and spec.rope_scaling.original_max_seq_len == 256
    assert families.build_config(spec, 128, "float32")["rope_scaling"] == LLAMA3_ROPE


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "lama"}, "did you mean llama"),
        ({"model_type": "gemma2"}, "soft-capped scores"),
        ({"model_type": "mixtral"}, "mixtures of experts"),
        ({"model_type": ...}, "model_type = None"),
        ({"hidden_size": "64"}, "hidden_size = '64': must be a positive number"),
        ({"num_hidden_layers": ...}, "num_hidden_layers = None: must be a positive number"),
        ({"vocab_size": 1.5}, "vocab_size = 1.5: must be an integer"),
        ({"attention_bias": True}, "biases other than Qwen2's"),
        ({"hidden_act": "relu"}, "a llama model has silu"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "scaling of type 'yarn' is not implemented"),
        ({"rope_scaling": {"rope_type": "linear"}}, "has no number factor"),
        ({"rope_scaling": [1]}, "must be an object"),
        ({"quantization_config": {"bits": 4}}, "the weights are quantized"),
    ],
)
def test_unsupported_configuration_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=r"config\.json") as error:
        read(tmp_path, **changes)
    assert message in error.value.message


@pytest.mark.parametrize(("text", "message"), [("{", "cannot be read"), ("[1]", "must contain an object")])
def test_damaged_configuration_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        families.read_model_table(tmp_path)


def test_init_sets_the_sizes_and_an_absolute_path(tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    write(tmp_path / "weights")
    document = families.apply_init({"model": {"init": "weights", "max_seq_len": 64}, "data": {}}, tmp_path)
    spec = build(document["model"], ModelSpec, "test")
    assert (spec.dim, spec.max_seq_len, spec.init) == (64, 64, str(tmp_path / "weights"))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"dim": 128}, "dim = 128 in the recipe, but 64 in config.json"),
        ({"qk_norm": True}, "qk_norm = True in the recipe, but False"),
        ({"preset": "llama3.2-1b"}, "layers = 16 in model.preset = 'llama3.2-1b', but 2 in config.json"),
    ],
)
def test_keys_that_contradict_the_weights_are_listed(tmp_path: Path, keys: dict[str, Any], message: str) -> None:
    write(tmp_path)
    with pytest.raises(ConfigError) as error:
        families.apply_init({"model": {"init": str(tmp_path), **keys}}, tmp_path)
    assert message in error.value.message


def test_weights_of_other_models_set_no_sizes(tmp_path: Path) -> None:
    """Their paths become absolute. A config.json beside them, which may describe anything, is not read."""
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "config.json").write_text("not JSON")
    for model in ({"kind": "convnet"}, {"entry": "nets:Net"}):
        document = families.apply_init({"model": {**model, "init": "weights"}}, tmp_path)
        assert document["model"] == {**model, "init": str(tmp_path / "weights")}


def test_missing_weights_are_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"model\.init = 'nowhere'"):
        families.apply_init({"model": {"init": "nowhere"}}, tmp_path)
    with pytest.raises(NotFound, match=r"config\.json: no such file"):
        families.apply_init({"model": {"init": "."}}, tmp_path)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma"])
def test_family_is_found_again(tmp_path: Path, family: str) -> None:
    activation = {"hidden_act": "gelu_pytorch_tanh"} if family == "gemma" else {}
    spec = read(tmp_path, model_type=family, **activation)
    assert families.find_family(spec) == family
    assert sum(math.prod(shape) for _, shape in tensor_names.list_tensors(spec).values()) == spec.parameters()


def test_decoder_of_no_family_is_refused() -> None:
    spec = msgspec.structs.replace(ModelSpec(), qk_norm=True, qkv_bias=True)
    with pytest.raises(ConfigError, match=r"model\.qkv_bias = True, model\.qk_norm = True"):
        families.find_family(spec)


def test_elements_of_vectors_are_those_of_the_shapes() -> None:
    spec = msgspec.structs.replace(ModelSpec(), qkv_bias=True, qk_norm=True, head_dim=48)
    assert spec.block_vector_elements() == sum(spec.block_vectors().values())


def test_checkpoint_sets_the_open_keys_of_the_model(tmp_path: Path) -> None:
    convnet = {"classes": 10, "channels": 1, "width": 16, "blocks": [1, 1], "groups": 4}
    table = {"kind": "convnet", "convnet": convnet, "dim": 128, "init": "old", "dropout": 0.1, "entry": ""}

    def apply(**model: Any) -> Any:
        return families.apply_model_table({"model": {"init": "new", **model}}, table, tmp_path)["model"]

    assert apply() == {"init": "new", "kind": "convnet", "convnet": convnet}
    assert apply(convnet={"channels": 1})["convnet"] == convnet
    with pytest.raises(ConfigError, match=r"model.convnet.width = 32 in the recipe, but 16 in the checkpoint"):
        apply(convnet={"width": 32})
    for other in ({"entry": "mine:net"}, {"kind": "decoder"}):
        assert apply(**other) == {"init": "new", **other}, "the tensors decide"
    entry = {"entry": "mine:net", "args": {"width": 3}}
    assert families.apply_model_table({"model": {"init": "new"}}, entry, tmp_path)["model"] == {"init": "new", **entry}
