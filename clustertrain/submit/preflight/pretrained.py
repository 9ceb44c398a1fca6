"""Check of the weights that a run starts from, before submission: names, shapes and dtypes, but no values."""

from __future__ import annotations

from pathlib import Path

from clustertrain.checkpoint.format import model_tensors, safetensors_files
from clustertrain.config.huggingface import tensor_names
from clustertrain.submit.prepared_run import PreparedRun


def check_pretrained(prepared: PreparedRun) -> str | None:
    """Return a note on the weights of ``model.init``; None if the run starts from random ones.

    Raises:
        NotFound: a file is missing.
        CheckpointError: the checkpoint is not committed, or damaged.
        ConfigError: a file is damaged, or its tensors are not those of the model.
    """
    spec = prepared.spec.recipe.model
    if not spec.init or prepared.spec.script is not None:
        return None
    path = Path(spec.init)
    files = model_tensors.read_weights(path)
    is_checkpoint = model_tensors.is_checkpoint(path)
    if not spec.is_decoder:
        return f"weights: {len(files.tensors)} tensors from {spec.init}; the ranks compare them with the model's"
    mapping = tensor_names.list_tensors(spec)
    expected = {name if is_checkpoint else hf_name: shape for name, (hf_name, shape) in mapping.items()}
    safetensors_files.check_tensors(files, expected, "the recipe's decoder")
    stored = ", ".join(sorted({files.tensors[name].dtype for name in expected}))
    return f"weights: {len(expected)} tensors from {spec.init}, {stored}"
