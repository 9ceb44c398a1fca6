"""The words of a plan: why this batch, this precision and this memory; what to know of the layout."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from clustertrain.config import hardware, presets
from clustertrain.plan import checks, non_decoder, pipeline_schedules
from clustertrain.plan.cost import optimizer_state
from clustertrain.plan.cost import user_model as counts
from clustertrain.plan.explain import advice, node_crossing
from clustertrain.plan.explain import warnings as notes
from clustertrain.plan.layout import Layout, counted

if TYPE_CHECKING:
    from clustertrain.plan.decision import Choice
    from clustertrain.plan.request import Given

_WHY_FSDP_KEEPS = (
    "reshard_after_forward off: with pp the parameters would be gathered again for each micro-batch, so a stage keeps "
    "its own whole until the step ends"
)


def single(given: Given) -> str:
    if given.world == 1:
        return "single: one rank, nothing to share"
    degrees = " x ".join(f"{n} {d}" for n, d in (("tp", given.tp), ("cp", given.cp), ("pp", given.pp)) if d > 1)
    return f"single: {degrees} takes all {given.world} ranks, one data-parallel rank is left"


def gpu(given: Given) -> list[str]:
    """A warning where the user names a type that is not known."""
    if given.device != "cuda" or given.gpu is not None or not given.spec.job.gpu_type:
        return []
    known = ", ".join(each.name for each in hardware.CATALOGUE)
    return [
        f"GPU type {given.spec.job.gpu_type!r} is not known, so no speed is predicted; known are {known}; another goes "
        "into the cluster profile, as [gpu] with name, memory_gib, tflops, memory_gb_s, link_gb_s and fabric_gb_s"
    ]


def batch(choice: Choice) -> None:
    recipe, split, layout = choice.given.spec.recipe, choice.batch, choice.layout
    if recipe.train.micro_batch:
        micro = "asked for"
    elif choice.found is not None:
        micro = "the fastest that fits"
    elif choice.memory.fits is False:
        micro = "with which it needs least"
    elif layout.pp > 1:
        micro = f"the largest that divides, fits and leaves {pipeline_schedules.enough(layout)} micro-batches, else 1"
    elif choice.given.decoder is None:
        micro = f"the largest that divides, up to {non_decoder.LARGEST_MICRO_BATCH}: its memory is not estimated"
    else:
        micro = "the largest that divides and fits"
    trained = presets.training(recipe.model.preset, recipe.model.kind)
    named = "" if recipe.train.global_batch else "; the recipe names no global batch"
    if named and trained is not None:
        named = f"; train.global_batch is not set: {trained.global_batch} or more, for preset {recipe.model.preset}"
    if trained is not None and recipe.data.seq_len == trained.seq_len:
        choice.reasons.append(f"data.seq_len {trained.seq_len}: the context of preset {recipe.model.preset}")
    piped = ", the pipeline's micro-batches," if layout.pp > 1 else ""
    choice.reasons.append(
        f"batch: {split.global_batch} = micro_batch {split.micro_batch} ({micro}) x grad_accum "
        f"{split.grad_accum}{piped} x {counted(layout.data_parallel, 'data-parallel rank')}"
        f"{advice.tokens(recipe, split)}{named}"
    )
    reasons, warnings = advice.of_learning_rate(recipe, split, layout.data_parallel)
    choice.reasons += reasons
    choice.warnings += warnings


def layout(choice: Choice) -> None:
    given, chosen = choice.given, choice.layout
    job, recipe = given.spec.job, given.spec.recipe
    if recipe.train.precision == "auto" and given.spec.script is None:
        choice.reasons.append(f"precision {given.precision}: {_precision(given)}")
    if chosen.pp > 1 and chosen.sharded:
        choice.reasons.append(_WHY_FSDP_KEEPS)
    work = None
    if given.decoder is not None:
        run = replace(given.pass_of(chosen, choice.batch.micro_batch), grad_accum=choice.batch.grad_accum)
        work = node_crossing.Work(given.decoder, run, given.gpu)
    choice.warnings += notes.of_layout(chosen, recipe.parallel, job.nodes)
    if given.spec.script is not None or recipe.model.entry:
        whose = "the model of a script" if given.spec.script is not None else f"the model of {recipe.model.entry}"
        choice.warnings += notes.of_unseen_model(chosen, whose, counted=given.own is not None)
    choice.warnings += checks.of_device(given.precision, recipe.parallel, chosen, given.device, given.gpu)
    if given.spec.script is None:
        choice.warnings += notes.of_channels_last(recipe)
        if recipe.objective.label_smoothing and chosen.tp > 1 and recipe.parallel.loss_parallel:
            counted_too = "in the estimate" if given.decoder is not None else "not estimated"
            choice.reasons.append(
                f"label smoothing with tp {chosen.tp}: each rank gathers the logits of the whole vocabulary for the "
                f"loss, since torch's loss of split logits knows no smoothing; that memory is {counted_too}"
            )
        reasons, warnings = notes.of_alignment(
            recipe.model, recipe.data, chosen, choice.batch.micro_batch, given.precision, given.device
        )
        choice.reasons += reasons
        choice.warnings += warnings
        choice.warnings += optimizer_state.refuse(recipe.optim, chosen, given.kind, given.device)
    choice.warnings += node_crossing.warnings(chosen, job.nodes, job.gpus, given.device, work)


def _precision(given: Given) -> str:
    if given.precision == "bf16":
        return "the matrix units are made for it; weights and optimizer stay fp32"
    if given.gpu is not None:
        return f"{given.gpu.name} has no bf16 in hardware; train.precision = 'fp16' is possible, with a scaled loss"
    return "bf16 is slower on CPUs"


def count(choice: Choice) -> None:
    given = choice.given
    if given.own is None:
        return
    model = given.spec.recipe.model
    name = model.entry or f"the {model.kind}"
    choice.reasons.append(counts.words(given.own, name, choice.layout, choice.batch.micro_batch))
    warning = counts.warning(given.own, choice.memory, given.limit, choice.layout)
    choice.warnings += [warning] if warning else []
    if not given.own.units:
        choice.warnings += notes.without_layers(choice.layout, given.spec.recipe.parallel, name)


def memory(choice: Choice) -> None:
    given = choice.given
    peak = choice.memory.peak_gib or 0.0
    if given.device == "cuda" and given.gpu is None and peak > given.limit:
        choice.warnings.append(f"may not fit: {peak:.1f} GiB a rank, more than {given.limit_in_words()}")
    if choice.memory.fits is False:
        choice.reasons.append(f"does not fit: {peak:.1f} GiB a rank of {given.capacity:g} GiB")
    elif given.capacity and peak > given.limit:
        choice.warnings.append(
            f"tight: {peak:.1f} GiB a rank, more than {given.limit_in_words()}; the estimate may be off by as much"
        )


def fsdp_sends(replicas: Layout) -> str:
    # In a pipeline the parameters stay gathered for the step: one all-gather and one reduce-scatter, an all-reduce.
    return ", and sharding sends 3/2 of ddp's volume" if replicas.pp == 1 else ""
