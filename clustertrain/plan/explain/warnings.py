"""Warnings about settings that are allowed but may not do what the user expects."""

from __future__ import annotations

from clustertrain.config.checks import cross_checks
from clustertrain.config.contract import ContractSpec
from clustertrain.config.data import DataSpec
from clustertrain.config.model import ModelSpec
from clustertrain.config.parallel import ParallelSpec
from clustertrain.config.recipe import Recipe
from clustertrain.config.train import Precision
from clustertrain.plan import pipeline_schedules
from clustertrain.plan.layout import Batch, Layout, format_number, pluralize


def layout_warnings(layout: Layout, parallel: ParallelSpec, nodes: int) -> list[str]:
    """Return warnings about unused options and about hybrid-shard inside one node."""
    messages = unused_option_warnings(layout, parallel)
    if layout.strategy == "hybrid-shard" and nodes == 1:
        messages.append(
            f"hybrid-shard {layout.dp_replicate} x {layout.dp_shard} inside one node only costs memory, since it saves "
            "traffic between nodes; fsdp shards over all ranks"
        )
    return messages


def unused_option_warnings(layout: Layout, parallel: ParallelSpec) -> list[str]:
    """Return warnings about options that are set but belong to other layouts."""
    sharded, default = layout.is_fully_sharded, ParallelSpec()
    for_sharded = ["offload", "prefetch", "defer_reduction"]
    for_replicas = ["bucket_mib", "find_unused_parameters", "static_graph"]
    unused = for_replicas if sharded else for_sharded
    if layout.gradient_ranks == 1:
        unused = [*for_sharded, *for_replicas, "compress_gradients"]
    reasons = dict.fromkeys(unused, _unused_reason(layout))
    for degree, reason, names in (
        (layout.tp, "splits no layers (tp)", ("sequence_parallel", "loss_parallel", "async_tp")),
        (layout.cp, "splits no sequences (cp)", ("context_parallel_method",)),
        (layout.pp, "has no stages (pp)", ("schedule", "virtual_stages", "split")),
    ):
        reasons |= dict.fromkeys(names, reason) if degree == 1 else {}
    if layout.tp > 1 and not layout.sequence_parallel:
        reasons["async_tp"] = "has parallel.sequence_parallel = false, and thus no all-gather to overlap"
    return [
        f"parallel.{name} has no effect: {layout.describe()} {reason}"
        for name, reason in reasons.items()
        if getattr(parallel, name) != getattr(default, name)
    ]


def layerless_warnings(layout: Layout, parallel: ParallelSpec, subject: str) -> list[str]:
    """Return warnings about options that work layer by layer for a model without a list of layers."""
    requested = {
        "activation_checkpointing": layout.activation_checkpointing != "none",
        "activation_offload": parallel.activation_offload,
        "compile": parallel.compile,
        "prefetch": parallel.prefetch > 0 and layout.is_fully_sharded,
    }
    return [
        f"parallel.{name} has no effect: {subject} has no list of layers (nn.ModuleList)"
        for name, is_requested in requested.items()
        if is_requested
    ]


def channels_last_warnings(recipe: Recipe) -> list[str]:
    """Return a warning if ``channels_last`` has no effect on the built-in model of ``recipe``."""
    if not recipe.parallel.channels_last or recipe.model.entry:
        return []
    kind = recipe.model.kind
    reason = "which always uses it" if kind == "convnet" else "which has no images"
    return [f"parallel.channels_last has no effect on a {kind}, {reason}: it is for model.entry"]


def _unused_reason(layout: Layout) -> str:
    if layout.gradient_ranks == 1:
        return "has only one data-parallel rank"
    return "averages gradients with fully_shard, not with DDP" if layout.is_fully_sharded else "shards no parameters"


def unbuilt_model_warnings(layout: Layout, subject: str, *, is_counted: bool = False) -> list[str]:
    """Return warnings about a model that is built only when the run starts, so its support for ``layout`` is unknown.

    Args:
        subject: description of the model.
        is_counted: the model was built to be counted and supports tp and pp.
    """
    requirements = [
        requirement
        for degree, requirement in (
            (1 if is_counted else layout.tp, f"a tp_plan (tp {layout.tp})"),
            (1 if is_counted else layout.pp, f"pipeline_units (pp {layout.pp})"),
            (layout.cp, f"SelfAttention (cp {layout.cp})"),
        )
        if degree > 1
    ]
    if not requirements:
        return []
    return [f"{subject} is unknown before the run starts and is then refused if it lacks {' or '.join(requirements)}"]


def bubble_warnings(layout: Layout, batch: Batch, *, is_fastest: bool = False) -> list[str]:
    """Return a warning if the pipeline has too few micro-batches.

    Args:
        is_fastest: a search found that smaller micro-batches are slower.
    """
    micro_batches, minimum = batch.grad_accum, pipeline_schedules.min_micro_batches(layout)
    if layout.pp == 1 or micro_batches >= minimum:
        return []
    bubble, improved_bubble = (
        pipeline_schedules.bubble_fraction(layout, micro_batches),
        pipeline_schedules.bubble_fraction(layout, minimum),
    )
    cost = "leave a bubble" if bubble is None else f"leave a bubble of {bubble:.0%} of the step"
    smaller = " or a smaller train.micro_batch" if batch.micro_batch > 1 and not is_fastest else ""
    return [
        f"{pluralize(micro_batches, 'micro-batch')} on a pipeline of {layout.pp} ranks {cost}; {minimum} or more would "
        f"leave {improved_bubble or 0:.0%}: a larger train.global_batch{smaller}"
    ]


# Elements in 16 bytes, of which a dimension must be a multiple to use the matrix units well, and in 128 bytes, for the
# best tiles (NVIDIA, "Matrix Multiplication Background User's Guide", table "Tensor Core requirements").
_ALIGNMENT: dict[Precision, tuple[int, int]] = {"fp16": (8, 64), "bf16": (8, 64), "tf32": (4, 32), "fp8": (16, 128)}


def alignment_notes(
    model: ModelSpec, data: DataSpec, layout: Layout, micro_batch: int, precision: Precision, device: str
) -> tuple[list[str], list[str]]:
    """Return reasons and warnings about matmul dimensions per rank that are not multiples of the matrix units' tiles.

    Only for the built-in transformers.
    """
    if device != "cuda" or precision not in _ALIGNMENT or model.entry or model.kind == "convnet":
        return [], []
    sizes = {
        "model.dim": model.dim,
        "model.kv_heads x head": model.kv_dim // layout.tp,
        "model.ffn_dim": model.hidden // layout.tp,
        "model.vocab_size": model.vocab_size // layout.tp,
        "micro_batch x data.seq_len": micro_batch * data.seq_len // layout.cp,
    }
    if precision != "fp8":  # fp8 applies to Linear layers, not to attention
        sizes["model.head_dim" if model.head_dim else "model.dim / model.heads"] = model.head_size
    required, preferred = _ALIGNMENT[precision]
    per_rank = f", per rank with tp {layout.tp}" if layout.tp > 1 else ""
    misaligned = [
        f"{name} {size} (next: {-(-size // preferred) * preferred})" for name, size in sizes.items() if size % required
    ]
    suboptimal = [f"{name} {size}" for name, size in sizes.items() if size % preferred and not size % required]
    warnings = [
        f"not a multiple of {required}, so the matrix units for {precision} run at a fraction of their rate: "
        f"{', '.join(misaligned)}{per_rank}"
    ]
    reasons = [
        f"multiples of {required} but not of {preferred}, which is faster in {precision}:"
        f" {', '.join(suboptimal)}{per_rank}"
    ]
    return reasons if suboptimal else [], warnings if misaligned else []


def model_loss_warnings(recipe: Recipe) -> list[str]:
    """Return a warning if a model entry that was not built may leave the deciding metric unmeasured."""
    metric = recipe.deciding_metric
    name = cross_checks.find_unmeasured_metric(recipe, metric)
    if not name:
        return []
    return [
        f"contract.metric = {metric!r} is measured only if {recipe.model.entry} does not compute its "
        f"loss itself; otherwise the run ends at its start: add {name!r} to evaluation.metrics"
    ]


def patience_warnings(recipe: Recipe) -> list[str]:
    """Return a warning if the run ends before ``evaluation.patience`` can take effect."""
    patience, interval, steps = recipe.evaluation.patience, recipe.evaluation_interval, recipe.train.steps
    if not patience or not recipe.data.has_validation or patience * interval < steps:
        return []
    evaluations = pluralize(-(-steps // interval), "evaluation")
    return [f"evaluation.patience = {patience} never ends the run, which has {evaluations}, the last at its end"]


def plateau_warnings(recipe: Recipe) -> list[str]:
    """Return a warning if the run ends before ``schedule.patience`` can take effect."""
    schedule, interval, steps = recipe.schedule, recipe.evaluation_interval, recipe.train.steps
    first = schedule.patience + 2  # the reference, the tolerated ones, and the next one
    if schedule.kind != "plateau" or not recipe.data.has_validation or first * interval < steps:
        return []
    evaluations = pluralize(-(-steps // interval), "evaluation")
    return [
        f"schedule.patience = {schedule.patience} never lowers the rate: evaluation {first} is the first that can, but "
        f"the run has {evaluations}, the last at its end"
    ]


def budget_warnings(contract: ContractSpec, step_s: float | None, steps: int, ranks: int) -> list[str]:
    """Return a warning if the predicted time exceeds the contract's budget."""
    if step_s is None or not contract.has_budget:
        return []
    hours = steps * step_s / 3600
    predicted = {"gpu_hours": hours * ranks, "wall_hours": hours, "cost": hours * ranks * contract.gpu_hour_cost}
    exceeded = {name: n for name, n in predicted.items() if 0 < getattr(contract, name) < n}
    if not exceeded:
        return []
    limits = " and ".join(
        f"contract.{name} = {getattr(contract, name):g} ({n:.4g} predicted)" for name, n in exceeded.items()
    )
    fraction = min(getattr(contract, name) / n for name, n in exceeded.items())
    action = "the run stops" if contract.on_budget_spent == "stop" else "there is a warning"
    return [
        f"{steps} steps of {format_number(step_s)} s on {pluralize(ranks, 'rank')} need more than {limits}: {action} at"
        f" about step {int(fraction * steps)}, sooner with start-up, evaluations and checkpoints"
    ]
