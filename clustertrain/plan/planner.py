"""RunSpec -> Plan: layout, batch split, memory and environment, each with its reason. No I/O."""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from clustertrain.errors import ConfigError
from clustertrain.plan import nccl, pipeline
from clustertrain.plan.choice import Choice, Rejected
from clustertrain.plan.counted import Counted
from clustertrain.plan.layout import Batch, Layout, counted
from clustertrain.plan.memory import SAFE_FRACTION, Memory
from clustertrain.plan.nccl import Setting
from clustertrain.spec.cluster import ClusterProfile
from clustertrain.spec.job import RunSpec
from clustertrain.spec.limits import seconds_of


class Time(msgspec.Struct, frozen=True, kw_only=True):
    """``flops_per_step`` is counted from the shapes, ``bubble_fraction`` follows from schedule and micro-batches; what
    would be a guess stays None until it is predicted."""

    flops_per_step: float | None = None
    step_s: float | None = None
    tokens_per_s_per_gpu: float | None = None
    tflops_per_gpu: float | None = None
    mfu: float | None = None
    bubble_fraction: float | None = None
    comm_s: dict[str, float] | None = None


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
    signal_lead_s: int  # how long before the time limit Slurm warns
    grace_s: float | None  # how long after the warning of a preemption the kill comes; None: not known
    reasons: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    counted: Counted | None = None  # of a model of the user's own, where it was asked for
    rejected: tuple[Rejected, ...] = ()


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
    choice = Choice(spec, device, counted)
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
    fabric = profile.fabric_interface if job.backend != "local" else ""  # one machine talks over its loopback
    return Plan(
        device=device,
        precision=choice.precision,
        nodes=job.nodes,
        gpus_per_node=job.gpus,
        world_size=choice.world,
        layout=choice.layout,
        batch=choice.batch,
        memory=choice.memory,
        time=Time(
            flops_per_step=flops_per_step(spec, choice.batch.global_batch) if choice.decoder else None,
            bubble_fraction=pipeline.bubble_fraction(choice.layout, choice.batch.grad_accum),
        ),
        nccl=nccl.communication(device, fabric, names),
        env=nccl.process(device, job.cpus_per_gpu, job.gpus, names),
        signal_lead_s=lead_s,
        grace_s=spec.recipe.rehearsal.grace_s if job.backend == "local" else profile.grace_s,
        reasons=(*choice.reasons, *choice.warnings),
        warnings=tuple(choice.warnings),
        counted=counted,
        rejected=tuple(choice.rejected),
    )


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
        f"(model states {model:.1f}, activations {activations:.1f}, overhead {memory.overhead_gib:.1f}), more than "
        f"{SAFE_FRACTION:.0%} of {memory.capacity_gib:g} GiB",
        fix=_fix(chosen),
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
