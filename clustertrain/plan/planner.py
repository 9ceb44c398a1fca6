"""RunSpec -> Plan: layout, batch split, memory and environment, each with its reason. No I/O."""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from clustertrain.errors import ConfigError
from clustertrain.plan import batch as batches
from clustertrain.plan import memory as memories
from clustertrain.plan import nccl
from clustertrain.plan.layout import Batch, Layout, Strategy
from clustertrain.plan.memory import SAFE_FRACTION, Memory
from clustertrain.plan.nccl import Setting
from clustertrain.spec import hardware
from clustertrain.spec.cluster import ClusterProfile
from clustertrain.spec.job import RunSpec
from clustertrain.spec.limits import seconds_of

ASSUMED_GIB = 16.0  # where the GPU is not known: the smallest memory of the data-centre GPUs in use
ASSUMED_CPU_GIB = 4.0  # a rank's share of a host's memory


class Time(msgspec.Struct, frozen=True, kw_only=True):
    """``flops_per_step`` is counted from the shapes; what would be a guess stays None until it is predicted."""

    flops_per_step: float | None = None
    step_s: float | None = None
    tokens_per_s_per_gpu: float | None = None
    tflops_per_gpu: float | None = None
    mfu: float | None = None
    bubble_fraction: float | None = None
    comm_s: dict[str, float] | None = None


class Rejected(msgspec.Struct, frozen=True):
    strategy: str
    why: str


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """``plan.json`` and ``plan --json``. ``nccl`` and ``env`` are exported by job.sh where not set by the user."""

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
    rejected: tuple[Rejected, ...] = ()


def plan(spec: RunSpec, profile: ClusterProfile, device: str, taken: Collection[str] = ()) -> Plan:
    """Choose how the ranks share the work.

    Args:
        device: ``cpu`` or ``cuda``, decided already.
        taken: environment names that the submitting user has set besides ``spec.env``.

    Raises:
        ConfigError: the global batch does not divide over the ranks.
        UsageError: a time limit that sbatch would not take.
    """
    job = spec.job
    names = {*spec.env, *taken}
    choice = _Choice(spec, device)
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
        time=Time(flops_per_step=flops_per_step(spec, choice.batch.global_batch)) if spec.script is None else Time(),
        nccl=nccl.communication(device, fabric, names),
        env=nccl.process(device, job.cpus_per_gpu, job.gpus, names),
        signal_lead_s=lead_s,
        grace_s=spec.recipe.rehearsal.grace_s if job.backend == "local" else profile.grace_s,
        reasons=tuple(choice.reasons),
        rejected=tuple(choice.rejected),
    )


def flops_per_step(spec: RunSpec, global_batch: int) -> float:
    """Forward and backward of one optimizer step over all ranks: 6 a matmul parameter and token, 12 L s h for attention
    scores (arXiv 2205.05198, appendix A, without recomputation; causal masking not deducted)."""
    model, seq_len = spec.recipe.model, spec.recipe.data.seq_len
    matmul = model.parameters() - model.vocab_size * model.dim * (0 if model.tie_embeddings else 1)
    per_token = 6 * matmul + 12 * model.layers * seq_len * model.dim
    return float(per_token * seq_len * global_batch)


class _Choice:
    """One decision in the making: the layout, with what spoke for it and against the others."""

    def __init__(self, spec: RunSpec, device: str) -> None:
        self.spec = spec
        self.device = device
        self.world = spec.job.nodes * spec.job.gpus
        self.precision = spec.recipe.train.precision
        if self.precision == "auto":
            self.precision = "bf16" if device == "cuda" else "fp32"
        self.gpu = hardware.find(spec.job.gpu_type) if device == "cuda" else None
        self.capacity = self.gpu.capacity_gib if self.gpu else None
        self.assumed = ASSUMED_CPU_GIB if device == "cpu" else ASSUMED_GIB
        self.limit = SAFE_FRACTION * (self.capacity or self.assumed)
        self.layout = Layout()
        self.batch = Batch(micro_batch=0, grad_accum=0, global_batch=0, tokens_per_step=0)
        self.memory = Memory(capacity_gib=self.capacity)
        self.reasons: list[str] = []
        self.rejected: list[Rejected] = []

    def decide(self) -> None:
        """For the built-in trainer, whose model is known."""
        wanted = self.spec.job.layout
        if self.world == 1:
            self._take("single", "single: one rank: nothing to share")
        elif wanted != "auto":
            self._take(wanted, f"{wanted}: asked for with --layout")
        else:
            self._choose()
        if self.memory.fits is False:
            self.reasons.append(
                f"does not fit: {self.memory.peak_gib:.1f} GiB a rank, the limit is {self.limit:.1f} GiB "
                f"({SAFE_FRACTION:.0%} of {self.capacity:g} GiB)"
            )

    def decide_for_script(self) -> None:
        wanted = self.spec.job.layout
        if self.world == 1:
            self.layout = self._layout("single")
            self.reasons.append("single: one rank, nothing to share")
        elif wanted == "auto":
            self.layout = self._layout("ddp")
            self.reasons.append("ddp: the model of a script is not known before it runs; --layout fsdp shards it")
        else:
            self.layout = self._layout(wanted)
            self.reasons.append(f"{wanted}: asked for with --layout")

    def _choose(self) -> None:
        split, need = self._split_and_need(self._layout("ddp"))
        limit = self._limit_in_words()
        if need <= self.limit:
            self._take("ddp", f"ddp: {need:.2f} GiB a rank is within {limit}, and it communicates least")
            self.rejected.append(
                Rejected("fsdp", f"not needed: a replica needs {need:.2f} GiB, and sharding sends 3/2 of ddp's volume")
            )
            return
        why = f"a replica needs {need:.2f} GiB a rank at micro_batch {split.micro_batch}, more than {limit}"
        self.rejected.append(Rejected("ddp", why))
        self._take("fsdp", f"fsdp: {why}; shards parameters, gradients and optimizer over {self.world} ranks")

    def _take(self, strategy: Strategy, reason: str) -> None:
        self.layout = self._layout(strategy)
        self.batch, _ = self._split_and_need(self.layout)
        self.memory = self._estimate(self.layout, self.batch.micro_batch)
        self.reasons.append(reason)
        train = self.spec.recipe.train
        micro = "asked for" if train.micro_batch else "the largest that divides and fits"
        named = "" if train.global_batch else "; the recipe names no global batch"
        self.reasons.append(
            f"batch: {self.batch.global_batch} = micro_batch {self.batch.micro_batch} ({micro}) x grad_accum "
            f"{self.batch.grad_accum} x {self.layout.data_parallel} data-parallel ranks{named}"
        )
        if train.precision == "auto":
            why = (
                "the matrix units are made for it; weights and optimizer stay fp32"
                if self.precision == "bf16"
                else "bf16 is slower on CPUs"
            )
            self.reasons.append(f"precision {self.precision}: {why}")

    def _layout(self, strategy: Strategy) -> Layout:
        return Layout(
            strategy=strategy,
            dp_replicate=self.world if strategy == "ddp" else 1,
            dp_shard=self.world if strategy == "fsdp" else 1,
        )

    def _estimate(self, layout: Layout, micro_batch: int) -> Memory:
        bf16 = self.precision == "bf16"
        run = memories.Pass(
            seq_len=self.spec.recipe.data.seq_len,
            micro_batch=micro_batch,
            grad_accum=max(1, self._global_batch(layout) // (layout.data_parallel * micro_batch)),
            compute="bf16" if bf16 else "fp32",
            autocast=bf16 and layout.strategy != "fsdp",
            device=self.device,
        )
        return memories.of_rank(self.spec.recipe.model, layout, run, self.capacity)

    def _global_batch(self, layout: Layout) -> int:
        train = self.spec.recipe.train
        return train.global_batch or batches.default_global_batch(layout.data_parallel * max(1, train.micro_batch))

    def _split_and_need(self, layout: Layout) -> tuple[Batch, float]:
        """The batch split under ``layout`` and the peak in GiB that goes with it."""
        train, data = self.spec.recipe.train, self.spec.recipe.data

        def need(micro_batch: int) -> float:
            return self._estimate(layout, micro_batch).peak_gib or 0.0

        split = batches.split(
            self._global_batch(layout),
            layout.data_parallel,
            data.seq_len,
            micro_batch=train.micro_batch,
            fits=lambda micro_batch: need(micro_batch) <= self.limit,
        )
        return split, need(split.micro_batch)

    def _limit_in_words(self) -> str:
        share = f"{self.limit:.1f} GiB ({SAFE_FRACTION:.0%} of"
        if self.gpu:
            return f"{share} the {self.capacity:g} GiB of {self.gpu.name})"
        if self.device == "cpu":
            return f"{share} {self.assumed:g} GiB, assumed for a rank on the CPU)"
        named = f"GPU type {self.spec.job.gpu_type!r}" if self.spec.job.gpu_type else "the GPU type"
        return f"{share} {self.assumed:g} GiB, assumed because {named} is not known; say --gpu-type)"


def require_fit(chosen: Plan) -> None:
    """Raises ConfigError when the plan is known not to fit: better now than after hours in the queue."""
    if chosen.memory.fits is not False:
        return
    memory = chosen.memory
    model = (memory.params_gib or 0) + (memory.grads_gib or 0) + (memory.optimizer_gib or 0)
    activations = (memory.activations_gib or 0) + (memory.logits_gib or 0)
    raise ConfigError(
        f"{chosen.layout.strategy} on {chosen.world_size} ranks needs {memory.peak_gib:.1f} GiB a rank (model states "
        f"{model:.1f}, activations {activations:.1f}, overhead {memory.overhead_gib:.1f}), more than "
        f"{SAFE_FRACTION:.0%} of {memory.capacity_gib:g} GiB",
        fix=_fix(chosen),
    )


def _fix(chosen: Plan) -> str:
    parts = []
    if chosen.layout.strategy != "fsdp" and chosen.world_size > 1:
        parts.append("--layout fsdp")
    else:
        parts.append("more ranks (--nodes, --gpus)")
    if chosen.batch.micro_batch > 1:
        parts.append("a smaller train.micro_batch")
    return ", ".join([*parts, "a shorter data.seq_len or a smaller model"])
