"""Check of adapters before submission: the layout, and the adapter that a run starts from."""

from __future__ import annotations

from pathlib import Path

from clustertrain.checkpoint.format import adapter_files, safetensors_files
from clustertrain.config.checks import adapter_checks
from clustertrain.config.huggingface import tensor_names
from clustertrain.config.recipe import Recipe
from clustertrain.errors import ConfigError
from clustertrain.submit.prepared_run import PreparedRun

MAX_HASHED_BYTES = 4 << 30  # of a base whose hash is compared before submission; some seconds


def check_adapter(prepared: PreparedRun) -> str | None:
    """Return a note on the adapter that the run starts from; None if it starts from a new one.

    Raises:
        NotFound: a file of it is missing.
        ConfigError: dropout cannot be the same on all ranks; the adapter is damaged, another one, or of another base.
    """
    recipe, layout = prepared.spec.recipe, prepared.plan.layout
    spec = recipe.adapter
    if prepared.spec.script is not None or not spec.is_enabled:
        return None
    if spec.dropout and layout.tp > 1:
        raise ConfigError(
            f"adapter.dropout = {spec.dropout:g} with tp {layout.tp}: the ranks that share a layer would drop "
            "different inputs of its adapter",
            fix="set adapter.dropout = 0, or use tp = 1",
        )
    if not spec.init:
        return None
    base_sha256 = None
    if recipe.model.init and recipe.model.is_decoder:
        base_sha256 = _hash_base(recipe)
    adapter_files.check_adapter(Path(spec.init), spec, list_shapes(recipe), base_sha256)
    later = "" if base_sha256 else "; whether its base is that of model.init is checked when the job starts"
    return f"adapter: {spec.kind} of rank {spec.rank} from {spec.init}{later}"


def list_shapes(recipe: Recipe) -> dict[str, tuple[int, ...]] | None:
    """Return the shapes of the adapter's tensors by PEFT's names; None for a model of the user's own."""
    if recipe.model.entry:
        return None
    spec, shapes = recipe.adapter, dict[str, tuple[int, ...]]()
    rename = tensor_names.rename_layer(recipe.model) if recipe.model.is_decoder else str
    for layer, (rows, columns) in adapter_checks.find_targets(recipe).items():
        own: dict[str, tuple[int, ...]] = {"lora_A": (spec.rank, columns), "lora_B": (rows, spec.rank)}
        if spec.kind == "dora":
            own["lora_magnitude_vector"] = (rows,)
        shapes |= {adapter_files.peft_name(rename(layer), name): shape for name, shape in own.items()}
    return shapes


def _hash_base(recipe: Recipe) -> str | None:
    """Return the hash of the tensors of ``model.init``; None if they are too large to be read here."""
    files = safetensors_files.read_weight_files(Path(recipe.model.init))
    names = [hf_name for hf_name, _ in tensor_names.list_tensors(recipe.model).values()]
    if sum(files.sizes.values()) > MAX_HASHED_BYTES:
        return None
    return adapter_files.combine_hashes(adapter_files.hash_tensors(files, names))
