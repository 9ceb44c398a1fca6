"""What runs, but not as one may expect: allowed, and said."""

from __future__ import annotations

from clustertrain.config import cross_checks
from clustertrain.config.contract import ContractSpec
from clustertrain.config.data import DataSpec
from clustertrain.config.parallel import ParallelSpec
from clustertrain.config.recipe import ModelSpec, Precision, Recipe
from clustertrain.plan import pipeline_schedules
from clustertrain.plan.layout import Batch, Layout, counted


def of_layout(layout: Layout, parallel: ParallelSpec, nodes: int) -> list[str]:
    found = without_effect(layout, parallel)
    if layout.strategy == "hybrid-shard" and nodes == 1:
        found.append(
            f"hybrid-shard {layout.dp_replicate} x {layout.dp_shard} inside one node: it saves traffic between nodes, "
            "and here it only costs memory; fsdp shards over all ranks"
        )
    return found


def without_effect(layout: Layout, parallel: ParallelSpec) -> list[str]:
    """Options that were set and belong to other layouts."""
    sharded, default = layout.fully_sharded, ParallelSpec()
    for_sharded = ["offload", "prefetch", "defer_reduction"]
    for_replicas = ["bucket_mib", "find_unused_parameters", "static_graph", "compress_gradients"]
    unused = for_replicas if sharded else for_sharded
    if layout.gradient_ranks == 1:
        unused = for_sharded + for_replicas
    why = dict.fromkeys(unused, _why(layout))
    for degree, what, names in (
        (layout.tp, "splits no layers (tp)", ("sequence_parallel", "loss_parallel", "async_tp")),
        (layout.cp, "splits no sequences (cp)", ("context",)),
        (layout.pp, "has no stages (pp)", ("schedule", "virtual_stages", "split")),
    ):
        why |= dict.fromkeys(names, what) if degree == 1 else {}
    if layout.tp > 1 and not layout.sequence_parallel:
        why["async_tp"] = "has parallel.sequence_parallel = false, and so no all-gather that would overlap"
    return [
        f"parallel.{name} has no effect: {layout.words()} {what}"
        for name, what in why.items()
        if getattr(parallel, name) != getattr(default, name)
    ]


def without_layers(layout: Layout, parallel: ParallelSpec, whose: str) -> list[str]:
    """Of ``whose`` model, which has no list of layers: what is done layer by layer."""
    asked = {
        "activation_checkpointing": layout.activation_checkpointing != "none",
        "activation_offload": parallel.activation_offload,
        "compile": parallel.compile,
        "prefetch": parallel.prefetch > 0 and layout.fully_sharded,
    }
    return [
        f"parallel.{name} has no effect: {whose} has no list of layers (nn.ModuleList)"
        for name, used in asked.items()
        if used
    ]


def of_channels_last(recipe: Recipe) -> list[str]:
    """Of a recipe for the trainer."""
    if not recipe.parallel.channels_last or recipe.model.entry:
        return []
    kind = recipe.model.kind
    why = "which always computes so" if kind == "convnet" else "which has no images"
    return [f"parallel.channels_last has no effect on a {kind}, {why}: it is for model.entry"]


def _why(layout: Layout) -> str:
    if layout.gradient_ranks == 1:
        return "has no data-parallel ranks that would share anything"
    return "averages gradients with fully_shard, not with DDP" if layout.fully_sharded else "shards no parameters"


def of_unseen_model(layout: Layout, whose: str, *, counted: bool = False) -> list[str]:
    """``whose`` model: one that is only made when the run starts, so that nothing here can say how it may be split.
    ``counted``: it was made to be counted, and can be split over tp and pp."""
    needs = [
        need
        for degree, need in (
            (1 if counted else layout.tp, f"a tp_plan (tp {layout.tp})"),
            (1 if counted else layout.pp, f"pipeline_units (pp {layout.pp})"),
            (layout.cp, f"SelfAttention (cp {layout.cp})"),
        )
        if degree > 1
    ]
    if not needs:
        return []
    return [f"{whose} is not seen before the run starts, and is refused then if it lacks {' or '.join(needs)}"]


def of_bubble(layout: Layout, batch: Batch, *, fastest: bool = False) -> list[str]:
    """Where a pipeline has too few micro-batches to be well filled.
    ``fastest``: smaller ones are slower, as a search has found."""
    micro_batches, enough = batch.grad_accum, pipeline_schedules.enough(layout)
    if layout.pp == 1 or micro_batches >= enough:
        return []
    idle, then = (
        pipeline_schedules.bubble_fraction(layout, micro_batches),
        pipeline_schedules.bubble_fraction(layout, enough),
    )
    cost = "leave a bubble" if idle is None else f"leave a bubble of {idle:.0%} of the step"
    smaller = " or a smaller train.micro_batch" if batch.micro_batch > 1 and not fastest else ""
    return [
        f"{counted(micro_batches, 'micro-batch')} on a pipeline of {layout.pp} ranks {cost}; {enough} or more would "
        f"leave {then or 0:.0%}: a larger train.global_batch{smaller}"
    ]


# Elements in 16 bytes, which a dimension must be a multiple of for the matrix units to be used well; and in 128 bytes,
# for the best tiles (NVIDIA, "Matrix Multiplication Background User's Guide", table "Tensor Core requirements").
_ALIGNED: dict[Precision, tuple[int, int]] = {"fp16": (8, 64), "bf16": (8, 64), "tf32": (4, 32), "fp8": (16, 128)}


def of_alignment(
    model: ModelSpec, data: DataSpec, layout: Layout, micro_batch: int, precision: Precision, device: str
) -> tuple[list[str], list[str]]:
    """Reasons and warnings of the dimensions of the built-in transformers' matmuls that are no multiples of what matrix
    units work in, each as one rank has it. Nothing for models whose matmuls are not known here."""
    if device != "cuda" or precision not in _ALIGNED or model.entry or model.kind == "convnet":
        return [], []
    head = model.dim // model.heads
    sizes = {
        "model.dim": model.dim,
        "model.kv_heads x head": model.kv_heads * head // layout.tp,
        "model.ffn_dim": model.hidden // layout.tp,
        "model.vocab_size": model.vocab_size // layout.tp,
        "micro_batch x data.seq_len": micro_batch * data.seq_len // layout.cp,
    }
    if precision != "fp8":  # which is for Linear layers, and attention is none
        sizes["model.dim / model.heads"] = head
    needed, best = _ALIGNED[precision]
    a_rank = f", a rank's part of tp {layout.tp}" if layout.tp > 1 else ""
    bad = [f"{name} {size} (next: {-(-size // best) * best})" for name, size in sizes.items() if size % needed]
    fair = [f"{name} {size}" for name, size in sizes.items() if size % best and not size % needed]
    warnings = [
        f"no multiple of {needed}, so the matrix units for {precision} work at a fraction of their rate: "
        f"{', '.join(bad)}{a_rank}"
    ]
    reasons = [f"multiples of {needed} and not of {best}, which {precision} likes better: {', '.join(fair)}{a_rank}"]
    return reasons if fair else [], warnings if bad else []


def of_own_loss(recipe: Recipe) -> list[str]:
    """Of a model of the user's own that nobody has looked at: what decides may be nothing that is measured."""
    decides = recipe.deciding_metric
    name = cross_checks.missing_with_own_loss(recipe, decides)
    if not name:
        return []
    return [
        f"contract.metric = {decides!r} is measured only if {recipe.model.entry} has no loss of its own, else the run "
        f"ends as it starts: name {name!r} in evaluation.metrics"
    ]


def of_patience(recipe: Recipe) -> list[str]:
    """Where the run is over before so many evaluations could end it."""
    asked, every, steps = recipe.evaluation.patience, recipe.evaluate_every, recipe.train.steps
    if not asked or not recipe.data.validates or asked * every < steps:
        return []
    there = counted(-(-steps // every), "evaluation")
    return [f"evaluation.patience = {asked} never ends the run, which has {there}, the last one at its end"]


def of_plateau(recipe: Recipe) -> list[str]:
    """Where the run is over before so many evaluations could lower its rate."""
    schedule, every, steps = recipe.schedule, recipe.evaluate_every, recipe.train.steps
    first = schedule.patience + 2  # one to compare with, those that are borne, and the next one
    if schedule.kind != "plateau" or not recipe.data.validates or first * every < steps:
        return []
    there = counted(-(-steps // every), "evaluation")
    return [
        f"schedule.patience = {schedule.patience} never lowers the rate: evaluation {first} is the first that can, and "
        f"the run has {there}, the last one at its end"
    ]


def of_budget(contract: ContractSpec, step_s: float | None, steps: int, ranks: int) -> list[str]:
    """Where the predicted time is more than the contract allows. Nothing where no time is predicted."""
    if step_s is None or not contract.has_budget:
        return []
    hours = steps * step_s / 3600
    predicted = {"gpu_hours": hours * ranks, "wall_hours": hours, "cost": hours * ranks * contract.gpu_hour_cost}
    over = {name: n for name, n in predicted.items() if 0 < getattr(contract, name) < n}
    if not over:
        return []
    words = " and ".join(
        f"contract.{name} = {getattr(contract, name):g} ({n:.4g} predicted)" for name, n in over.items()
    )
    done = min(getattr(contract, name) / n for name, n in over.items())
    then = "it stops" if contract.when_spent == "stop" else "there is a warning"
    return [
        f"{steps} steps of {step_s:.3g} s on {counted(ranks, 'rank')} need more than {words}: {then} at about step "
        f"{int(done * steps)}, sooner with start-up, evaluations and checkpoints"
    ]
