"""RunSpec -> Plan: layout, batch split, memory and environment, each with its reason. No I/O."""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from clustertrain.config.cluster import ClusterProfile
from clustertrain.config.job import RunSpec
from clustertrain.config.time_limits import seconds_of
from clustertrain.errors import ConfigError
from clustertrain.plan import pipeline_schedules
from clustertrain.plan.cost.memory import Memory
from clustertrain.plan.cost.user_model import Counted
from clustertrain.plan.decision import Choice, Rejected
from clustertrain.plan.env import nccl
from clustertrain.plan.env.nccl import Setting
from clustertrain.plan.explain import search_result, training
from clustertrain.plan.explain import warnings as notes
from clustertrain.plan.layout import Batch, Layout, counted
from clustertrain.plan.request import Given


class RunnerUp(msgspec.Struct, frozen=True, kw_only=True):
    layout: str
    step_s: float
    tokens_per_s_per_gpu: float
    peak_gib: float


class Time(msgspec.Struct, frozen=True, kw_only=True):
    """``flops_per_step`` is counted from the shapes, ``bubble_fraction`` follows from schedule and micro-batches; what
    would be a guess stays None until it is predicted."""

    flops_per_step: float | None = None
    step_s: float | None = None
    tokens_per_s_per_gpu: float | None = None
    tflops_per_gpu: float | None = None
    mfu: float | None = None
    bubble_fraction: float | None = None
    comm_s: dict[str, float] | None = None  # what nothing hides, a step
    compute_s: float | None = None
    recompute_s: float | None = None
    bubble_s: float | None = None
    optimizer_s: float | None = None


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """``plan.json`` and ``plan --json``. ``nccl`` and ``env`` are exported by job.sh where not set by the user.
    ``warnings`` are those of the ``reasons`` that a user should see without asking."""

    device: str
    precision: str
    nodes: int
    gpus_per_node: int
    world_size: int
    layout: Layout
    batch: Batch  # all zero for a script of the user's, which splits its batch itself
    memory: Memory
    time: Time
    nccl: dict[str, Setting]
    env: dict[str, Setting]
    training: dict[str, str]  # in words: model, objective, optimizer, schedule, clipping, evaluation; or script
    signal_lead_s: int  # how long before the time limit Slurm warns
    grace_s: float | None  # how long after the warning of a preemption the kill comes; None: not known
    reasons: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    counted: Counted | None = None  # of a model of the user's own, where it was asked for
    rejected: tuple[Rejected, ...] = ()
    runners_up: tuple[RunnerUp, ...] = ()
    way_out: str = ""  # what would make a plan fit that does not


def plan(
    spec: RunSpec, profile: ClusterProfile, device: str, taken: Collection[str] = (), counted: Counted | None = None
) -> Plan:
    """Choose how the ranks share the work.

    Args:
        device: ``cpu`` or ``cuda``, decided already.
        taken: environment names that the submitting user has set besides ``spec.env``.
        counted: the user's own model. It changes the estimate of the memory and no choice, so that `submit`, which
            does not count unless told to, chooses the same.

    Raises:
        ConfigError: the degrees do not make the world size, the batch or the model does not divide as they need, or
            the device lacks what precision or layout ask for.
        UsageError: a time limit that sbatch would not take.
    """
    job = spec.job
    names = {*spec.env, *taken}
    given = Given(spec, device, profile, counted)
    choice = Choice(given)
    if spec.script is None:
        choice.decide()
    else:
        choice.decide_for_script()
    limit_s = seconds_of(job.time)
    lead_s = profile.signal_lead_s
    if limit_s is not None and limit_s < 2 * lead_s:
        lead_s = max(1, int(limit_s) // 2)
        choice.reasons.append(
            f"signal_lead_s {lead_s}: half of the time limit of {limit_s:g} s; the profile's {profile.signal_lead_s} s "
            "would stop the run soon after its start, and Slurm may warn up to 60 s early"
        )
    time = _time(spec, choice)
    if spec.script is None:
        recipe = spec.recipe
        choice.warnings += notes.of_budget(recipe.contract, time.step_s, recipe.train.steps, given.world)
        choice.warnings += [*notes.of_patience(recipe), *notes.of_plateau(recipe)]
        choice.warnings += notes.of_own_loss(recipe) if counted is None else []
    fabric = profile.fabric_interface if job.backend != "local" else ""  # one machine talks over its loopback
    return Plan(
        device=device,
        precision=given.precision,
        nodes=job.nodes,
        gpus_per_node=job.gpus,
        world_size=given.world,
        layout=choice.layout,
        batch=choice.batch,
        memory=choice.memory,
        time=time,
        nccl=nccl.communication(
            device, fabric, names, profile.node if job.backend != "local" and job.nodes > 1 else None
        ),
        env=nccl.process(device, job.cpus_per_gpu, job.gpus, names),
        training=training.words(spec, choice.layout, given.state),
        signal_lead_s=lead_s,
        grace_s=spec.recipe.rehearsal.grace_s if job.backend == "local" else profile.grace_s,
        reasons=(*choice.reasons, *choice.warnings),
        warnings=tuple(choice.warnings),
        counted=counted,
        rejected=tuple(choice.rejected),
        runners_up=runners_up(choice),
        way_out=choice.way_out,
    )


def _time(spec: RunSpec, choice: Choice) -> Time:
    flops = flops_per_step(spec, choice.batch.global_batch) if choice.given.decoder else None
    bubble = pipeline_schedules.bubble_fraction(choice.layout, choice.batch.grad_accum)
    step = choice.step
    if step is None or flops is None or choice.given.gpu is None:
        return Time(flops_per_step=flops, bubble_fraction=bubble)
    a_gpu = flops / step.step_s / choice.given.world / 1e12
    return Time(
        flops_per_step=flops,
        step_s=step.step_s,
        tokens_per_s_per_gpu=choice.batch.tokens_per_step / step.step_s / choice.given.world,
        tflops_per_gpu=a_gpu,
        mfu=a_gpu / choice.given.gpu.tflops if choice.given.gpu.tflops else None,
        bubble_fraction=bubble,
        comm_s={
            "tensor": step.tensor_s,
            "context": step.context_s,
            "pipeline": step.pipeline_s,
            "data": step.data_s,
        },
        compute_s=step.compute_s,
        recompute_s=step.recompute_s,
        bubble_s=step.bubble_s,
        optimizer_s=step.optimizer_s,
    )


def runners_up(choice: Choice) -> tuple[RunnerUp, ...]:
    """The next three layouts by time, each of another kind or degree than those before."""
    if choice.found is None:
        return ()
    tokens = choice.batch.tokens_per_step
    seen, found = {choice.layout.words()}, []
    for candidate in choice.found.fitting[1:]:
        words = candidate.layout.words()
        if words in seen:
            continue
        seen.add(words)
        found.append(
            RunnerUp(
                layout=search_result.brief(candidate),
                step_s=candidate.step_s,
                tokens_per_s_per_gpu=tokens / candidate.step_s / choice.given.world,
                peak_gib=candidate.peak_gib,
            )
        )
        if len(found) == 3:
            break
    return tuple(found)


def flops_per_step(spec: RunSpec, global_batch: int) -> float:
    """Forward and backward of the decoder in one optimizer step over all ranks: 6 a matmul parameter and token,
    12 L s h for attention scores (arXiv 2205.05198, appendix A, without recomputation; causal masking not deducted).
    """
    model, seq_len = spec.recipe.model, spec.recipe.data.seq_len
    matmul = model.parameters() - model.vocab_size * model.dim * (0 if model.tie_embeddings else 1)
    per_token = 6 * matmul + 12 * model.layers * seq_len * model.dim
    return float(per_token * seq_len * global_batch)


def require_fit(chosen: Plan) -> None:
    """Raises ConfigError when the plan is known not to fit: better now than after hours in the queue."""
    if chosen.memory.fits is not False:
        return
    memory = chosen.memory
    model = (memory.params_gib or 0) + (memory.grads_gib or 0) + (memory.optimizer_gib or 0)
    activations = (memory.activations_gib or 0) + (memory.logits_gib or 0)
    raise ConfigError(
        f"{chosen.layout.words()} on {counted(chosen.world_size, 'rank')} needs {memory.peak_gib:.1f} GiB a rank "
        f"(model states {model:.1f}, activations {activations:.1f}, overhead {memory.overhead_gib:.1f}), and has "
        f"{memory.capacity_gib:g}",
        fix=chosen.way_out or _fix(chosen),
    )


def _fix(chosen: Plan) -> str:
    layout, parts = chosen.layout, []
    if layout.strategy != "fsdp" and layout.data_parallel > 1:
        parts.append("--layout fsdp")
    else:
        parts.append("more ranks (--nodes, --gpus)")
    if layout.activation_checkpointing == "none":
        parts.append("--set parallel.activation_checkpointing=full")
    if chosen.batch.micro_batch > 1:
        parts.append("a smaller train.micro_batch")
    return ", ".join([*parts, "a shorter data.seq_len or a smaller model"])
