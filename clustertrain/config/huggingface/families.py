"""The model families that the built-in decoder can be: from ``config.json`` to ``[model]``, and back.

The keys are those of transformers 4, and for rotary embeddings also those of version 5. Where ``config.json`` omits a
key, the default of the family's configuration class counts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from clustertrain import reading, settings
from clustertrain.config.model import ModelSpec
from clustertrain.config.parsing.documents import did_you_mean
from clustertrain.config.parsing.presets import PRESETS
from clustertrain.errors import ConfigError, NotFound

CONFIG_FILE = "config.json"
GEMMA: Mapping[str, Any] = {"norm_offset": True, "scale_embeddings": True, "activation": "gelu-tanh"}

_SIZES = {
    "vocab_size": "vocab_size",
    "dim": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "ffn_dim": "intermediate_size",
}
_FEATURES: Mapping[str, Mapping[str, Any]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True},
    "gemma": GEMMA,
}
_CLASSES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma": "GemmaForCausalLM",
}
# Keys of [model] that a configuration defines, with their values if it does not mention them.
_DEFAULTS: Mapping[str, Any] = {
    field.name: field.default
    for field in msgspec.structs.fields(ModelSpec)
    if field.name
    in {
        *_SIZES, "kv_heads", "head_dim", "norm_eps", "tie_embeddings", "max_seq_len", "rope_theta", "rope_scaling",
        "norm_offset", "qkv_bias", "qk_norm", "activation", "scale_embeddings",
    }
}  # fmt: skip
_HEAD_DIMS = {"qwen3": 128, "gemma": 256}  # defaults, where dim / heads is not the default
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu-tanh"}
_UNSUPPORTED_FAMILIES = {
    "gemma2": "its soft-capped scores and alternating local attention are not implemented",
    "gemma3_text": "its alternating local attention is not implemented",
    "gemma3": "its alternating local attention and image encoder are not implemented",
    "mixtral": "mixtures of experts are not implemented",
    "qwen2_moe": "mixtures of experts are not implemented",
    "qwen3_moe": "mixtures of experts are not implemented",
    "phi3": "its fused projections are not implemented",
}


def apply_init(document: Mapping[str, Any], cwd: Path) -> dict[str, Any]:
    """Return a recipe's document with the sizes of ``model.init`` in ``[model]``, and its path made absolute.

    ``model.init`` is a file or folder of transformers. A file that has no ``config.json`` beside it leaves the sizes to
    the document, as does a model other than the decoder.

    Raises:
        NotFound: the weights or their ``config.json`` are not on this machine.
        ConfigError: the configuration is not supported, or the preset or a key of the document contradicts it.
    """
    model = document.get("model")
    if not isinstance(model, dict) or not isinstance(model.get("init"), str) or not model["init"]:
        return dict(document)
    path = cwd / settings.expand_user_path(model["init"], "model.init")
    if not path.exists():
        raise NotFound(
            f"model.init = {model['init']!r}: no such file or folder",
            fix="check the path; this machine and every node must see it",
        )
    is_decoder = not model.get("entry") and model.get("kind", "decoder") == "decoder"
    if not is_decoder or (path.is_file() and not (path.parent / CONFIG_FILE).exists()):
        return {**document, "model": {**model, "init": str(path)}}
    folder = path if path.is_dir() else path.parent
    table = read_model_table(folder)
    preset = str(model.get("preset", ""))
    _check_agreement(folder, table, PRESETS.get(preset, {}), f"model.preset = {preset!r}")
    _check_agreement(folder, table, model, "the recipe")
    return {**document, "model": {**table, **model, "init": str(path)}}


def apply_model_table(document: Mapping[str, Any], table: Mapping[str, Any], source: Path) -> dict[str, Any]:
    """Return a recipe's document with the model of the checkpoint ``source`` in ``[model]``, as far as it is open.

    Keys that the document sets must agree where they define the tensors. A document that names its own ``entry``, or
    another kind of model, keeps its table: the tensors decide.

    Args:
        table: the ``[model]`` table of the run that saved the checkpoint.

    Raises:
        ConfigError: the preset or a key of the document contradicts the checkpoint.
    """
    model = document.get("model")
    model = dict(model) if isinstance(model, dict) else {}
    defaults = {field.name: field.default for field in msgspec.structs.fields(ModelSpec)}
    set_keys = {key: value for key, value in table.items() if key in defaults and not _is_default(key, value)}
    stored = {key: value for key, value in set_keys.items() if key not in ("preset", "init", "init_parts", "dropout")}
    own_kind = {key: model[key] for key in ("entry", "kind") if key in model}
    if any(value != stored.get(key, defaults[key]) for key, value in own_kind.items()):
        return dict(document)
    if stored.get("kind", defaults["kind"]) == "decoder" and not stored.get("entry"):
        preset = str(model.get("preset", ""))
        _check_agreement(source, stored, PRESETS.get(preset, {}), f"model.preset = {preset!r}", "the checkpoint")
        _check_agreement(source, stored, model, "the recipe", "the checkpoint")
    for name, keys in _SUBTABLE_SIZES.items():
        own, of_checkpoint = model.get(name), table.get(name)
        if isinstance(own, dict) and isinstance(of_checkpoint, dict):
            _check_subtable(source, name, {key: own[key] for key in own if key in keys}, of_checkpoint)
            model[name] = {**of_checkpoint, **own}
    return {**document, "model": {**stored, **model}}


# Keys of sub-tables of [model] that define the tensors.
_SUBTABLE_SIZES = {"convnet": ("classes", "channels", "width", "blocks", "groups"), "two_tower": ("embedding",)}


def _check_subtable(source: Path, name: str, own: Mapping[str, Any], of_checkpoint: Mapping[str, Any]) -> None:
    differences = [
        f"model.{name}.{key} = {value!r} in the recipe, but {of_checkpoint.get(key)!r} in the checkpoint"
        for key, value in own.items()
        if value != of_checkpoint.get(key)
    ]
    if differences:
        raise ConfigError(
            f"{source}: the weights are those of another model: {'; '.join(differences)}",
            fix="remove these keys: model.init sets them",
        )


def _is_default(key: str, value: Any) -> bool:
    default: Any = getattr(ModelSpec(), key)
    return bool(value == msgspec.to_builtins(default))


def _check_agreement(
    folder: Path, table: Mapping[str, Any], values: Mapping[str, Any], source: str, origin: str = CONFIG_FILE
) -> None:
    """Raise ConfigError if ``values`` of ``source`` are not those in ``table``, which ``origin`` in ``folder`` has."""
    free = ("max_seq_len",)  # training on shorter sequences changes no weight
    differences = [
        f"{key} = {values[key]!r} in {source}, but {table.get(key, default)!r} in {origin}"
        for key, default in _DEFAULTS.items()
        if key in values and key not in free and values[key] != table.get(key, default)
    ]
    if differences:
        raise ConfigError(
            f"{folder}: the weights are those of another model: {'; '.join(differences)}",
            fix="remove these keys: model.init sets them",
        )


def read_model_table(folder: Path) -> dict[str, Any]:
    """Return the keys of ``[model]`` that the ``config.json`` in ``folder`` defines.

    Raises:
        NotFound: there is no such file.
        ConfigError: it is not a configuration, or describes a model that the decoder cannot be.
    """
    path = folder / CONFIG_FILE
    try:
        document = reading.read_json(path)
    except FileNotFoundError as e:
        raise NotFound(
            f"{path}: no such file", fix=f"download {CONFIG_FILE} with the weights, or set the sizes in [model]"
        ) from e
    except (OSError, ValueError) as e:
        raise ConfigError(f"{path}: cannot be read: {e}", fix="download the file again") from e
    if not isinstance(document, dict):
        raise ConfigError(f"{path}: must contain an object", fix="download the file again")
    return _Config(path, document).build_table()


class _Config:
    """A ``config.json``."""

    def __init__(self, path: Path, document: Mapping[str, Any]) -> None:
        self._path, self._document = path, document
        self._family = self._find_family()

    def build_table(self) -> dict[str, Any]:
        self._check_features()
        table: dict[str, Any] = {key: self._number(name) for key, name in _SIZES.items()}
        heads = table["heads"]
        table["kv_heads"] = self._number("num_key_value_heads", heads)
        table |= _FEATURES[self._family]
        head_dim = self._number("head_dim", _HEAD_DIMS.get(self._family, 0) or table["dim"] // max(1, heads))
        if head_dim * heads != table["dim"]:
            table["head_dim"] = head_dim
        table["norm_eps"] = self._number("rms_norm_eps", 1e-6, kind=float)
        table["tie_embeddings"] = bool(self._document.get("tie_word_embeddings", self._family == "gemma"))
        table["max_seq_len"] = self._find_context_length()
        return {**table, **self._build_rope()}

    def _refuse(self, name: str, reason: str, fix: str = "choose another model") -> ConfigError:
        return ConfigError(f"{self._path}: {name} = {self._document.get(name)!r}: {reason}", fix=fix)

    def _find_family(self) -> str:
        family = self._document.get("model_type")
        if isinstance(family, str) and family in _FEATURES:
            return family
        reason = _UNSUPPORTED_FAMILIES.get(str(family), did_you_mean(str(family), list(_FEATURES)))
        raise self._refuse(
            "model_type",
            reason,
            "choose a model of another family, or load it in a script with session.load_pretrained",
        )

    def _number(self, name: str, default: float | None = None, *, kind: type[int] | type[float] = int) -> Any:
        value = self._document.get(name)
        if value is None and default is not None:
            return kind(default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
            raise self._refuse(name, "must be a positive number", "download the file again")
        if kind is int and not isinstance(value, int):
            raise self._refuse(name, "must be an integer", "download the file again")
        return kind(value)

    def _check_features(self) -> None:
        """Raise ConfigError for what the decoder lacks."""
        if self._document.get("quantization_config"):
            raise self._refuse("quantization_config", "the weights are quantized", "choose the unquantized weights")
        for name in ("attention_bias", "mlp_bias"):
            if self._document.get(name):
                raise self._refuse(name, "biases other than Qwen2's are not implemented")
        expected = _FEATURES[self._family].get("activation", "silu")
        name = "hidden_activation" if self._document.get("hidden_activation") else "hidden_act"
        activation = self._document.get(name)
        # The first Gemma configurations say "gelu", and transformers takes the tanh approximation for it.
        is_early_gemma = self._family == "gemma" and activation == "gelu"
        if activation is not None and not is_early_gemma and _ACTIVATIONS.get(activation) != expected:
            raise self._refuse(name, f"a {self._family} model has {expected}")

    def _find_context_length(self) -> int:
        """Return the longest sequence, at most the window of local attention: within it, all attention is global."""
        length: int = self._number("max_position_embeddings", 2048)
        window = self._document.get("sliding_window")
        is_used = self._document.get("use_sliding_window", self._family == "mistral")
        if is_used and isinstance(window, int) and not isinstance(window, bool):
            length = min(length, self._number("sliding_window"))
        return length

    def _build_rope(self) -> dict[str, Any]:
        parameters = self._document.get("rope_parameters") or {}
        scaling = self._document.get("rope_scaling") or parameters
        if not isinstance(parameters, dict) or not isinstance(scaling, dict):
            raise self._refuse("rope_scaling", "must be an object", "download the file again")
        theta = parameters.get("rope_theta", self._document.get("rope_theta", 10_000.0))
        if isinstance(theta, bool) or not isinstance(theta, (int, float)) or not theta > 0:
            raise self._refuse("rope_theta", "must be a positive number", "download the file again")
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        if kind == "default":
            return {"rope_theta": float(theta)}
        names = {
            "linear": {"factor": "factor"},
            "llama3": {
                "factor": "factor",
                "low_freq_factor": "low_freq_factor",
                "high_freq_factor": "high_freq_factor",
                "original_max_seq_len": "original_max_position_embeddings",
            },
        }.get(str(kind))
        if names is None:
            raise self._refuse("rope_scaling", f"scaling of type {kind!r} is not implemented, only linear and llama3")
        table: dict[str, Any] = {"kind": kind}
        for key, name in names.items():
            value = scaling.get(name)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise self._refuse("rope_scaling", f"has no number {name}", "download the file again")
            table[key] = int(value) if key == "original_max_seq_len" else float(value)
        return {"rope_theta": float(theta), "rope_scaling": table}


def find_family(spec: ModelSpec) -> str:
    """Return the ``model_type`` of transformers that computes what the decoder of ``spec`` does.

    Raises:
        ConfigError: none does.
    """
    actual = {
        name: getattr(spec, name)
        for name in ("qkv_bias", "qk_norm", "norm_offset", "scale_embeddings", "activation")
        if getattr(spec, name) not in (False, "silu")
    }
    for family in _CLASSES:
        if actual == dict(_FEATURES[family]):
            return family
    features = ", ".join(f"model.{name} = {value!r}" for name, value in actual.items())
    raise ConfigError(
        f"no model family of transformers has {features}, and nothing else",
        fix="export with --names own",
    )


def build_config(spec: ModelSpec, seq_len: int, dtype: str) -> dict[str, Any]:
    """Return the content of ``config.json``, with the keys of transformers 4, which version 5 also accepts.

    Args:
        spec: the decoder.
        seq_len: tokens per training sample; the model is not trained for longer contexts.
        dtype: torch's name of the dtype of the tensors.

    Raises:
        ConfigError: transformers has no such model.
    """
    family = find_family(spec)
    config: dict[str, Any] = {
        "architectures": [_CLASSES[family]],
        "model_type": family,
        **{name: getattr(spec, key) for key, name in _SIZES.items()},
        "intermediate_size": spec.hidden,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_size,
        "hidden_act": "gelu_pytorch_tanh" if spec.activation == "gelu-tanh" else "silu",
        "max_position_embeddings": max(seq_len, spec.max_seq_len),
        "rms_norm_eps": spec.norm_eps,
        "rope_theta": spec.rope_theta,
        "rope_scaling": _build_rope_scaling(spec),
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
    if family == "gemma":
        config["hidden_activation"] = "gelu_pytorch_tanh"
    return config


def _build_rope_scaling(spec: ModelSpec) -> dict[str, Any] | None:
    scaling = spec.rope_scaling
    if scaling.kind == "none":
        return None
    if scaling.kind == "linear":
        return {"rope_type": "linear", "factor": scaling.factor}
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_max_seq_len,
    }
