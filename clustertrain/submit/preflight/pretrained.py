"""Check of the weights that a run starts from, before submission: names, shapes and dtypes, but no values."""

from __future__ import annotations

from pathlib import Path

from clustertrain.checkpoint.format import model_tensors, safetensors_files
from clustertrain.config.huggingface import tensor_names
from clustertrain.submit.prepared_run import PreparedRun

BYTE_VOCABULARY = 256  # what text is read as without a tokenizer


def check_pretrained(prepared: PreparedRun) -> str | None:
    """Return a note on the weights that the run starts from; None if they are random.

    The tensors are compared with the model of the recipe if that is the decoder. Building other models needs torch, so
    the ranks compare theirs.

    Raises:
        NotFound: a file is missing.
        CheckpointError: the checkpoint is not committed, or damaged.
        ConfigError: a file is damaged, or its tensors are not those of the model.
    """
    recipe = prepared.spec.recipe
    spec = recipe.model
    if not spec.weight_files or prepared.spec.script is not None:
        return None
    if not spec.is_decoder:
        notes = []
        for name, path in spec.weight_files.items():
            count = len(model_tensors.read_weights(Path(path)).tensors)
            notes.append(f"{count} tensors from {path}{f' for {name}' if name else ''}")
        return f"weights: {'; '.join(notes)}; the ranks compare them with the model's"
    files = model_tensors.read_weights(Path(spec.init))
    is_checkpoint = model_tensors.is_checkpoint(Path(spec.init))
    mapping = tensor_names.list_tensors(spec)
    expected = {name if is_checkpoint else hf_name: shape for name, (hf_name, shape) in mapping.items()}
    safetensors_files.check_tensors(files, expected, "the recipe's decoder")
    stored = ", ".join(sorted({files.tensors[name].dtype for name in expected}))
    # Token ids of bytes mean other tokens in any other vocabulary.
    is_bytes = recipe.data_kind == "text" and spec.vocab_size != BYTE_VOCABULARY
    warning = (
        f"; but data.kind = 'text' trains on bytes, which are other tokens in a vocabulary of {spec.vocab_size}: set "
        "data.kind = 'chat' with data.tokenizer, or 'tokens' with shards of its tokenizer"
    )
    return f"weights: {len(expected)} tensors from {spec.init}, {stored}{warning if is_bytes else ''}"
