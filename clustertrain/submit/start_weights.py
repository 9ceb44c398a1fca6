"""The weights that a recipe starts from: what ``model.init`` names, and the keys of ``[model]`` that it defines."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clustertrain.config.huggingface import families
from clustertrain.errors import AmbiguousName, NotFound


def apply_init(document: Mapping[str, Any], cwd: Path) -> dict[str, Any]:
    """Return a recipe's document with absolute paths of its weights, and the sizes of ``model.init`` in ``[model]``.

    The sizes come from the recipe of the checkpoint, or from ``config.json`` beside the weights of a decoder.

    Raises:
        NotFound: the weights or their ``config.json`` are not on this machine.
        AmbiguousName: several runs have this name.
        CheckpointError: the checkpoint is damaged.
        ConfigError: the model is not supported, or the preset or a key of the document contradicts it.
    """
    model = document.get("model")
    if not isinstance(model, dict):
        return dict(document)
    parts = model.get("init_parts")
    if isinstance(parts, dict) and all(isinstance(part, str) and part for part in parts.values()):
        absolute = {name: str(_resolve(part, f"model.init_parts.{name}", cwd)) for name, part in parts.items()}
        model = {**model, "init_parts": absolute}
        document = {**document, "model": model}
    if not isinstance(model.get("init"), str) or not model["init"]:
        return dict(document)
    # Not at the top: most runs start from random weights, and these import NumPy.
    from clustertrain.checkpoint.format import model_tensors
    from clustertrain.checkpoint.offline import start_weights

    path = _resolve(model["init"], "model.init", cwd)
    resolved = {**document, "model": {**model, "init": str(path)}}
    if model_tensors.is_checkpoint(path):
        return families.apply_model_table(resolved, start_weights.read_model_table(path), path)
    return families.apply_init(resolved, cwd)


def _resolve(text: str, key: str, cwd: Path) -> Path:
    from clustertrain.checkpoint.offline import start_weights

    try:
        return start_weights.resolve_weights(text, cwd)
    except (NotFound, AmbiguousName) as e:
        raise type(e)(f"{key} = {e.message}", fix=e.fix) from e
