"""Reasons and warnings of a plan: batch, precision, memory, layout."""

from __future__ import annotations

from dataclasses import replace

from clustertrain.config import hardware
from clustertrain.config.parsing import presets
from clustertrain.config.parsing.documents import did_you_mean
from clustertrain.plan import attention, checks, non_decoder, optimizer_checks, pipeline_schedules
from clustertrain.plan.cost import user_model
from clustertrain.plan.decision import Explanation, PlanDecision
from clustertrain.plan.explain import advice, node_crossing
from clustertrain.plan.explain.warnings import (
    alignment_notes,
    channels_last_warnings,
    layerless_warnings,
    layout_warnings,
    unbuilt_model_warnings,
)
from clustertrain.plan.layout import Layout, pluralize
from clustertrain.plan.request import PlanRequest

_FSDP_PIPELINE_REASON = (
    "reshard_after_forward off: with pp the parameters would be gathered again for each micro-batch, so a stage keeps "
    "them gathered until the step ends"
)


def explain_single(request: PlanRequest) -> str:
    """Return why there is only one data-parallel rank."""
    if request.world_size == 1:
        return "single: one rank, nothing to share"
    degrees = " x ".join(f"{n} {d}" for n, d in (("tp", request.tp), ("cp", request.cp), ("pp", request.pp)) if d > 1)
    return f"single: {degrees} uses all {request.world_size} ranks, which leaves one data-parallel rank"


def gpu_warnings(request: PlanRequest) -> list[str]:
    """Return a warning if the user names an unknown GPU type."""
    if request.device != "cuda" or request.gpu is not None or not request.spec.job.gpu_type:
        return []
    name = request.spec.job.gpu_type
    known = did_you_mean(name, [gpu_type.name for gpu_type in hardware.CATALOG])
    return [
        f"GPU type {name!r} is unknown, so no speed is predicted; {known}{'' if known.endswith('?') else '.'}"
        " Add another one to the cluster profile as [gpu] with name, memory_gib, tflops, memory_gb_s, link_gb_s and"
        " fabric_gb_s"
    ]


def explain_batch(decision: PlanDecision) -> Explanation:
    reasons: list[str] = []
    recipe, batch, layout = decision.request.spec.recipe, decision.batch, decision.layout
    if recipe.train.micro_batch:
        micro_batch_reason = "requested"
    elif decision.result is not None:
        micro_batch_reason = "the fastest that fits"
    elif decision.memory.fits is False:
        micro_batch_reason = "the one that needs the least memory"
    elif layout.pp > 1:
        micro_batch_reason = (
            f"the largest that divides, fits and leaves {pipeline_schedules.min_micro_batches(layout)} micro-batches,"
            " otherwise 1"
        )
    elif decision.request.decoder is None:
        micro_batch_reason = (
            f"the largest that divides, up to {non_decoder.MAX_UNESTIMATED_MICRO_BATCH}: its memory is not estimated"
        )
    else:
        micro_batch_reason = "the largest that divides and fits"
    defaults = presets.find_training_defaults(recipe.model.preset, recipe.model.kind)
    note = "" if recipe.train.global_batch else "; the recipe sets no global batch"
    if note and defaults is not None:
        note = f"; train.global_batch is not set: {defaults.global_batch} or more, for preset {recipe.model.preset}"
    if defaults is not None and recipe.data.seq_len == defaults.seq_len:
        reasons.append(f"data.seq_len {defaults.seq_len}: the context of preset {recipe.model.preset}")
    pipeline_note = ", the pipeline's micro-batches," if layout.pp > 1 else ""
    reasons.append(
        f"batch: {batch.global_batch:,} = micro_batch {batch.micro_batch} ({micro_batch_reason}) x grad_accum "
        f"{batch.grad_accum}{pipeline_note} x {pluralize(layout.data_parallel, 'data-parallel rank')}"
        f"{advice.format_tokens(recipe, batch)}{note}"
    )
    rate_reasons, warnings = advice.advise_learning_rate(recipe, batch, layout.data_parallel)
    return Explanation((*reasons, *rate_reasons), tuple(warnings))


def explain_layout(decision: PlanDecision) -> Explanation:
    request, layout = decision.request, decision.layout
    reasons: list[str] = []
    warnings: list[str] = []
    job, recipe = request.spec.job, request.spec.recipe
    if recipe.train.precision == "auto" and request.spec.script is None:
        reasons.append(f"precision {request.precision}: {_precision_reason(request)}")
    if layout.pp > 1 and layout.is_sharded:
        reasons.append(_FSDP_PIPELINE_REASON)
    workload = None
    if request.decoder is not None:
        config = replace(
            request.build_pass_config(layout, decision.batch.micro_batch), grad_accum=decision.batch.grad_accum
        )
        workload = node_crossing.RankWorkload(request.decoder, config, request.gpu)
    warnings += layout_warnings(layout, recipe.parallel, job.nodes)
    if request.spec.script is not None or recipe.model.entry:
        subject = "the model of a script" if request.spec.script is not None else f"the model of {recipe.model.entry}"
        warnings += unbuilt_model_warnings(layout, subject, is_counted=request.model_stats is not None)
    warnings += checks.check_device(request.precision, recipe.parallel, layout, request.device, request.gpu)
    attention.check_attention(recipe, request.precision, layout, request.device, request.gpu)
    if request.spec.script is None:
        warnings += channels_last_warnings(recipe)
        if recipe.objective.label_smoothing and layout.tp > 1 and recipe.parallel.loss_parallel:
            estimate_note = "in the estimate" if request.decoder is not None else "not estimated"
            reasons.append(
                f"label smoothing with tp {layout.tp}: each rank gathers the logits of the whole vocabulary for the "
                f"loss, since torch's loss on split logits does not support smoothing; that memory is {estimate_note}"
            )
        alignment_reasons, alignment_warnings = alignment_notes(
            recipe.model, recipe.data, layout, decision.batch.micro_batch, request.precision, request.device
        )
        reasons += alignment_reasons
        warnings += alignment_warnings
        warnings += optimizer_checks.check_optimizer(recipe.optim, layout, request.model_kind, request.device)
    warnings += node_crossing.crossing_warnings(layout, job.nodes, job.gpus, request.device, workload)
    return Explanation(tuple(reasons), tuple(warnings))


def _precision_reason(request: PlanRequest) -> str:
    if request.precision == "bf16":
        return "the matrix units support it; weights and optimizer state stay fp32"
    if request.gpu is not None:
        return f"{request.gpu.name} has no bf16 in hardware; train.precision = 'fp16' is possible, with loss scaling"
    return "bf16 is slower on CPUs"


def explain_model_stats(decision: PlanDecision) -> Explanation:
    request = decision.request
    if request.model_stats is None:
        return Explanation()
    model = request.spec.recipe.model
    name = model.entry or f"the {model.kind}"
    description = user_model.describe_stats(request.model_stats, name, decision.layout, decision.batch.micro_batch)
    warning = user_model.memory_warning(request.model_stats, decision.memory, request.limit_gib, decision.layout)
    warnings = [warning] if warning else []
    ranks_per_node = -(-decision.layout.world_size // request.spec.job.nodes)
    warnings += user_model.construction_warnings(
        request.model_stats, decision.layout, ranks_per_node, request.limit_gib
    )
    if not request.model_stats.units:
        warnings += layerless_warnings(decision.layout, request.spec.recipe.parallel, name)
    return Explanation((description,), tuple(warnings))


def explain_memory(decision: PlanDecision) -> Explanation:
    request = decision.request
    reasons: list[str] = []
    warnings: list[str] = []
    peak = decision.memory.peak_gib or 0.0
    if request.may_not_fit(peak):
        warnings.append(f"may not fit: {peak:.1f} GiB per rank, more than {request.format_limit()}")
    if decision.memory.fits is False:
        reasons.append(f"does not fit: {peak:.1f} GiB per rank, more than the {request.capacity_gib:g} GiB of the GPU")
    elif request.capacity_gib and peak > request.limit_gib:
        warnings.append(
            f"tight: {peak:.1f} GiB per rank, more than {request.format_limit()}; the estimate may be off by as much"
        )
    return Explanation(tuple(reasons), tuple(warnings))


def fsdp_traffic_note(replicated: Layout) -> str:
    """Return a note on the traffic of fsdp compared with ddp."""
    # In a pipeline parameters stay gathered for the step: one all-gather and one reduce-scatter equal an all-reduce.
    return ", and sharding sends 3/2 of ddp's volume" if replicated.pp == 1 else ""
