"""Planning: turns a RunSpec into a Plan of layout, batch split, memory and environment, with reasons. No I/O."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from clustertrain.config.cluster import ClusterProfile
from clustertrain.config.job import RunSpec
from clustertrain.config.parsing.time_limits import parse_time_limit_s
from clustertrain.errors import ConfigError
from clustertrain.plan import checks, pipeline_schedules
from clustertrain.plan.cost.adapter_shape import find_adapter
from clustertrain.plan.cost.memory import MemoryEstimate
from clustertrain.plan.cost.user_model import ModelStats
from clustertrain.plan.decide import decide, decide_for_script
from clustertrain.plan.decision import Explanation, PlanDecision, RejectedLayout
from clustertrain.plan.env import nccl
from clustertrain.plan.env.nccl import EnvSetting
from clustertrain.plan.explain import practice, search_result, training
from clustertrain.plan.explain.warnings import budget_warnings, model_loss_warnings, patience_warnings, plateau_warnings
from clustertrain.plan.layout import Batch, Layout, pluralize
from clustertrain.plan.request import PlanRequest


class RunnerUp(msgspec.Struct, frozen=True, kw_only=True):
    """An alternative layout that fits and its prediction."""

    layout: str
    """The layout in words, with its micro-batch."""
    step_s: float
    """Predicted time per step, seconds."""
    tokens_per_s_per_gpu: float
    """Predicted tokens per second and GPU."""
    peak_gib: float
    """Predicted memory of the fullest rank, GiB."""


class TimeEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """Predicted time of a step. Unless a key says something else, it is null if the time cannot be predicted: on CPUs,
    for a GPU whose rates are unknown, or for a model that is not the built-in decoder."""

    flops_per_step: float | None = None
    """Floating-point operations of the model in one step of all ranks, forward and backward, counted from the shapes
    without recomputation; also on CPUs. Null for a model that is not the built-in decoder."""
    step_s: float | None = None
    """Time per optimizer step, seconds."""
    tokens_per_s_per_gpu: float | None = None
    """Tokens per second and GPU."""
    tflops_per_gpu: float | None = None
    """Model TFLOP/s per GPU: `flops_per_step` over time and ranks."""
    mfu: float | None = None
    """Model FLOPs utilization: `tflops_per_gpu` over the data sheet's dense 16-bit rate, 0 to 1; null also if that rate
    is unknown."""
    bubble_fraction: float | None = None
    """Fraction of a step in which a rank of the pipeline is idle, 0 to 1; null without a pipeline."""
    comm_s: dict[str, float] | None = None
    """Exposed communication per step, seconds, which no computation hides: `tensor`, `context`, `pipeline`, `data` and
    `activation_offload`."""
    compute_s: float | None = None
    """Computation per step on the slowest rank, without recomputation, seconds."""
    recompute_s: float | None = None
    """Recomputation of activations per step, seconds."""
    bubble_s: float | None = None
    """Idle time per step in the pipeline's bubble, seconds."""
    optimizer_s: float | None = None
    """Update of the parameters per step, seconds."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of ``plan.json`` and of ``plan --json``."""

    device: str
    """``cpu`` or ``cuda``."""
    precision: str
    """Precision of the training: ``fp32``, ``tf32``, ``bf16``, ``fp16`` or ``fp8``."""
    nodes: int
    """Number of nodes."""
    gpus_per_node: int
    """GPUs per node; on the CPU, ranks."""
    world_size: int
    """Number of ranks: one per GPU."""
    layout: Layout
    """How the ranks share the work."""
    batch: Batch
    """How the ranks split the global batch; all zero for a user's script, which splits its batch itself."""
    memory: MemoryEstimate
    """Predicted memory of the fullest rank."""
    time: TimeEstimate
    """Predicted time of a step."""
    nccl: dict[str, EnvSetting]
    """Communication variables that job.sh exports unless the user set them."""
    env: dict[str, EnvSetting]
    """Other variables that job.sh exports unless the user set them."""
    training: dict[str, str]
    """Descriptions of model, objective, optimizer, schedule, clipping and evaluation; or of the script."""
    signal_lead_s: int
    """Seconds before the time limit at which Slurm warns."""
    grace_s: float | None
    """Seconds between the warning of a preemption and the kill; null: unknown."""
    reasons: tuple[str, ...] = ()
    """All reasons, including the warnings."""
    warnings: tuple[str, ...] = ()
    """Reasons that a user should see without asking."""
    model_stats: ModelStats | None = None
    """Statistics of a model entry; null unless they were requested."""
    rejected: tuple[RejectedLayout, ...] = ()
    """Layout families that were not chosen."""
    runners_up: tuple[RunnerUp, ...] = ()
    """The next layouts that fit, the fastest first."""
    suggested_changes: str = ""
    """Changes that would make a plan fit that does not; empty if it fits, or if none is known."""


def plan(
    spec: RunSpec,
    profile: ClusterProfile,
    device: str,
    inherited_env: Collection[str] = (),
    model_stats: ModelStats | None = None,
    notes: Sequence[str] = (),
) -> Plan:
    """Choose how the ranks share the work.

    Args:
        device: ``cpu`` or ``cuda``.
        inherited_env: environment names that the submitting user has set besides ``spec.env``.
        model_stats: the counted model. It changes the memory estimate and no choice, so that a `submit` that does not
            count chooses the same.
        notes: warnings of earlier phases, which become the plan's last ones.

    Raises:
        ConfigError: the product of the degrees is not the world size, the batch or the model does not divide, or the
            device does not support the precision or layout.
        UsageError: the time limit is not one that sbatch accepts.
    """
    job = spec.job
    env_names = {*spec.env, *inherited_env}
    request = PlanRequest(spec, device, profile, model_stats)
    decision = decide(request) if spec.script is None else decide_for_script(request)
    if spec.script is None:
        checks.check_noise_scale(
            spec.recipe.stability,
            decision.layout,
            spec.recipe.parallel,
            decision.batch.grad_accum,
            compares_batch=spec.recipe.compares_batch,
        )
    lead_s, lead_reasons = _choose_signal_lead(job.time, profile.signal_lead_s)
    time = _estimate_time(spec, decision)
    warmup_reasons = practice.explain_warmup(spec.recipe)[0] if spec.script is None else ()
    decision = decision.explained(Explanation((*lead_reasons, *warmup_reasons), _recipe_warnings(request, time.step_s)))
    warnings = (*decision.warnings, *notes)
    fabric = profile.fabric_interface if job.backend != "local" else ""  # one machine talks over its loopback
    return Plan(
        device=device,
        precision=request.precision,
        nodes=job.nodes,
        gpus_per_node=job.gpus,
        world_size=request.world_size,
        layout=decision.layout,
        batch=decision.batch,
        memory=decision.memory,
        time=time,
        nccl=nccl.communication_env(
            device, fabric, env_names, profile.node if job.backend != "local" and job.nodes > 1 else None
        ),
        env=nccl.process_env(device, job.cpus_per_gpu, job.gpus, env_names),
        training=training.describe_training(
            spec, decision.layout, decision.batch, request.optimizer_state, request.device
        ),
        signal_lead_s=lead_s,
        grace_s=spec.recipe.preemption_test.grace_s if job.backend == "local" else profile.grace_s,
        reasons=(*decision.reasons, *warnings),
        warnings=warnings,
        model_stats=model_stats,
        rejected=decision.rejected,
        runners_up=list_runners_up(decision),
        suggested_changes=decision.suggestion,
    )


def _choose_signal_lead(time_limit: str, profile_lead_s: int) -> tuple[int, tuple[str, ...]]:
    """Return the seconds between the signal and the time limit, and the reason where the profile's do not fit."""
    limit_s = parse_time_limit_s(time_limit)
    if limit_s is None or limit_s >= 2 * profile_lead_s:
        return profile_lead_s, ()
    lead_s = max(1, int(limit_s) // 2)
    reason = (
        f"signal_lead_s {lead_s}: half of the time limit of {limit_s:g} s; the profile's {profile_lead_s} s "
        "would stop the run soon after its start, and Slurm may warn up to 60 s early"
    )
    return lead_s, (reason,)


def _recipe_warnings(request: PlanRequest, step_s: float | None) -> tuple[str, ...]:
    """Return warnings about a recipe that no layout changes; none for a script."""
    recipe = request.spec.recipe
    if request.spec.script is not None:
        return ()
    return (
        *budget_warnings(recipe.contract, step_s, recipe.train.steps, request.world_size),
        *practice.lost_time_warnings(recipe.checkpoint, step_s, recipe.train.steps),
        *practice.lr_warnings(recipe),
        *practice.explain_warmup(recipe)[1],
        *practice.precision_warnings(recipe.train.precision, request.gpu),
        *patience_warnings(recipe),
        *plateau_warnings(recipe),
        *(model_loss_warnings(recipe) if request.model_stats is None else ()),
    )


def _estimate_time(spec: RunSpec, decision: PlanDecision) -> TimeEstimate:
    flops = flops_per_step(spec, decision.batch.global_batch) if decision.request.decoder else None
    bubble = pipeline_schedules.bubble_fraction(decision.layout, decision.batch.grad_accum)
    step = decision.step
    if step is None or flops is None or decision.request.gpu is None:
        return TimeEstimate(flops_per_step=flops, bubble_fraction=bubble)
    tflops_per_gpu = flops / step.step_s / decision.request.world_size / 1e12
    return TimeEstimate(
        flops_per_step=flops,
        step_s=step.step_s,
        tokens_per_s_per_gpu=decision.batch.tokens_per_step / step.step_s / decision.request.world_size,
        tflops_per_gpu=tflops_per_gpu,
        mfu=tflops_per_gpu / decision.request.gpu.tflops if decision.request.gpu.tflops else None,
        bubble_fraction=bubble,
        comm_s={
            "tensor": step.tensor_s,
            "context": step.context_s,
            "pipeline": step.pipeline_s,
            "data": step.data_s,
            "activation_offload": step.offload_s,
        },
        compute_s=step.compute_s,
        recompute_s=step.recompute_s,
        bubble_s=step.bubble_s,
        optimizer_s=step.optimizer_s,
    )


def list_runners_up(decision: PlanDecision) -> tuple[RunnerUp, ...]:
    """Return the next three layouts by time that differ in kind or degree."""
    if decision.result is None:
        return ()
    tokens = decision.batch.tokens_per_step
    seen_layouts, runners_up = {decision.layout.describe()}, []
    for candidate in decision.result.fitting[1:]:
        description = candidate.layout.describe()
        if description in seen_layouts:
            continue
        seen_layouts.add(description)
        runners_up.append(
            RunnerUp(
                layout=search_result.describe_candidate(candidate),
                step_s=candidate.step_s,
                tokens_per_s_per_gpu=tokens / candidate.step_s / decision.request.world_size,
                peak_gib=candidate.peak_gib,
            )
        )
        if len(runners_up) == 3:
            break
    return tuple(runners_up)


def flops_per_step(spec: RunSpec, global_batch: int) -> float:
    """Return the FLOPs of the decoder in one optimizer step over all ranks, forward and backward.

    6 per matmul parameter and token, 12 L s h for attention scores (arXiv 2205.05198, appendix A, without
    recomputation; causal masking is not deducted). A frozen parameter under adapters has no gradient: 4.
    """
    model, seq_len = spec.recipe.model, spec.recipe.data.seq_len
    matmul = model.parameters() - model.vocab_size * model.dim * (0 if model.tie_embeddings else 1)
    adapter = find_adapter(spec.recipe.adapter, model)
    per_token = 6 * matmul if adapter is None else 4 * matmul + 6 * adapter.trained_elements(model)
    flops_per_token = per_token + 12 * model.layers * seq_len * model.attention_dim
    return float(flops_per_token * seq_len * spec.recipe.sequences_per_sample * global_batch)


def check_fits(chosen: Plan) -> None:
    """Raise ConfigError if the plan is known not to fit, before hours in the queue."""
    if chosen.memory.fits is not False:
        return
    memory = chosen.memory
    states_gib = (memory.params_gib or 0) + (memory.grads_gib or 0) + (memory.optimizer_gib or 0)
    activations_gib = (memory.activations_gib or 0) + (memory.logits_gib or 0)
    raise ConfigError(
        f"{chosen.layout.describe()} on {pluralize(chosen.world_size, 'rank')} needs {memory.peak_gib:.1f} GiB per rank"
        f" (model states {states_gib:.1f}, activations {activations_gib:.1f}, overhead {memory.overhead_gib:.1f}), but"
        f" has {memory.capacity_gib:g}",
        fix=chosen.suggested_changes or _suggest_fix(chosen),
    )


def _suggest_fix(chosen: Plan) -> str:
    layout, suggestions = chosen.layout, []
    if layout.strategy != "fsdp" and layout.data_parallel > 1:
        suggestions.append("--layout fsdp")
    else:
        suggestions.append("more ranks (--nodes, --gpus)")
    if layout.activation_checkpointing == "none":
        suggestions.append("--set parallel.activation_checkpointing=full")
    if chosen.batch.micro_batch > 1:
        suggestions.append("a smaller train.micro_batch")
    return ", ".join([*suggestions, "a shorter data.seq_len or a smaller model"])
