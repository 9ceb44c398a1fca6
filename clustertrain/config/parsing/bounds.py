"""Largest allowed value of each number in a recipe, ``[job]`` and a cluster profile, with the reason.

Many of these numbers are the length of a loop or table in the planner or the trainer. Without a bound, a typo could
exhaust the memory or run forever. Each bound is far above any published value.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from clustertrain.errors import ConfigError

MAX_DIGITS = 20  # longest number shown in full
_INT64 = 2**63


class Bound(NamedTuple):
    """Largest allowed value and the reason, which ends the error message."""

    maximum: float
    reason: str


_STEPS = Bound(10**9, "a billion steps of a millisecond take 11 days, and no published run has more than 10 million")
_EPOCHS = Bound(10**6, "no published run passes over its data that often")
_BATCH = Bound(2**20, "the largest published batches have some 65,536 samples")
_TOKENS = Bound(2**24, "the longest published contexts have 10 million tokens")
_CHECKPOINTS = Bound(10**6, "no filesystem holds that many checkpoints of a run")
_COUNT = Bound(10**6, "no run evaluates, skips or rolls back that often")
_RANKS = Bound(10**6, "the largest clusters have some 200,000 GPUs")
_MINUTES = Bound(525_600, "that is a year")
_LIMIT = Bound(1e12, "0 turns it off")
_RATE = Bound(1e8, "no hardware is that fast: check the unit")
_CPUS = Bound(8192, "Linux supports at most 8192 processors")

BOUNDS: Mapping[str, Bound] = {
    # What is trained
    "model.vocab_size": Bound(2**24, "the largest published vocabularies have some 262,144 entries"),
    "model.dim": Bound(2**18, "the widest published decoders have 20,480"),
    "model.layers": Bound(10_000, "the deepest published decoders have some 130"),
    "model.heads": Bound(2**16, "the published decoders have up to 128"),
    "model.kv_heads": Bound(2**16, "the published decoders have up to 128"),
    "model.head_dim": Bound(2**16, "the published decoders have up to 256"),
    "model.rope_scaling.factor": Bound(1e6, "the published ones are up to 64"),
    "model.rope_scaling.low_freq_factor": Bound(1e6, "the published ones are 1"),
    "model.rope_scaling.high_freq_factor": Bound(1e6, "the published ones are 4"),
    "model.rope_scaling.original_max_seq_len": _TOKENS,
    "model.ffn_dim": Bound(2**20, "the widest published decoders have 53,248 to 81,920"),
    "model.max_seq_len": _TOKENS,
    "model.rope_theta": Bound(1e12, "the published ones lie between 10,000 and 1e8"),
    "model.norm_eps": Bound(1.0, "it only keeps a division from zero: 1e-5 is usual"),
    "model.convnet.classes": Bound(2**20, "the largest published data sets of images have some 22,000 classes"),
    "model.convnet.channels": Bound(4096, "hyperspectral cameras have some 1,000 at most"),
    "model.convnet.width": Bound(2**16, "the widest published residual networks start with some 640"),
    "model.convnet.blocks": Bound(1000, "the deepest published stages have 36"),
    "model.convnet.groups": Bound(2**16, "they divide the width"),
    "model.two_tower.embedding": Bound(2**16, "the published encoders share up to 4,096 dimensions"),
    "objective.group": Bound(2**20, "a group is part of a batch, and the largest have some 65,536 samples"),
    "data.seq_len": _TOKENS,
    "data.max_bytes": Bound(2**40, "the text is read into memory: a tokenized folder has no such limit"),
    "data.image_size": Bound(2**14, "an image of 16,384 x 16,384 pixels takes 3 GiB"),
    "data.samples": Bound(10**15, "the largest published data sets have some 10^13 tokens"),
    "data.workers": Bound(1024, "each worker is a process on the node"),
    "data.prefetch": Bound(10_000, "each worker keeps that many micro-batches in memory"),
    "data.augment.crop": Bound(2**14, "images have at most 16,384 x 16,384 pixels"),
    "adapter.rank": Bound(2**16, "the published ones lie between 1 and 1,024"),
    "adapter.alpha": Bound(1e6, "the published ones lie between 1 and 4,096"),
    "optim.lr": Bound(1000.0, "every optimizer diverges there: published rates lie between 1e-6 and 40"),
    "optim.lr_reference_batch": _BATCH,
    "optim.lr_scale": Bound(1e6, "it multiplies optim.lr"),
    "optim.weight_decay_scale": Bound(1e6, "it multiplies optim.weight_decay"),
    "optim.eps": Bound(10.0, "it would outweigh every gradient: published values lie between 1e-16 and 1"),
    "optim.weight_decay": Bound(1000.0, "the weights would vanish in one step: 0.1 is usual"),
    "optim.clip_norm": _LIMIT,
    "optim.clip_value": Bound(1e12, "nothing is clipped there: remove clip"),
    "optim.unfreeze.step": _STEPS,
    "objective.delta": Bound(1e12, "the loss equals mse there"),
    "schedule.warmup_steps": _STEPS,
    "schedule.warmup_epochs": _EPOCHS,
    "schedule.milestones": _STEPS,
    "schedule.milestone_epochs": _EPOCHS,
    "schedule.cooldown_steps": _STEPS,
    "schedule.patience": _COUNT,
    "parallel.bucket_mib": Bound(2**20, "that is a TiB, more than any GPU has"),
    "parallel.activation_checkpointing": Bound(10_000, "a model has at most 10,000 layers"),
    "parallel.prefetch": Bound(10_000, "a model has at most 10,000 layers"),
    "parallel.virtual_stages": Bound(10_000, "a model has at most 10,000 layers"),
    "train.steps": _STEPS,
    "train.epochs": _EPOCHS,
    "train.log_every": _STEPS,
    "train.global_batch": _BATCH,
    "train.micro_batch": _BATCH,
    # What is watched and kept
    "stability.max_skipped": _COUNT,
    "stability.spike_deviations": _LIMIT,
    "stability.spike_window": Bound(10**6, "each rank keeps that many losses in memory"),
    "stability.max_roll_backs": _COUNT,
    "stability.roll_back_margin": _STEPS,
    "stability.layer_stats_every": _STEPS,
    "stability.noise_scale_every": _STEPS,
    "stability.grad_norm_max": _LIMIT,
    "stability.grad_norm_usual": _LIMIT,
    "stability.grad_norm_min": _LIMIT,
    "evaluation.every": _STEPS,
    "evaluation.every_epochs": _EPOCHS,
    "evaluation.samples": Bound(10**12, "0 is all of them"),
    "evaluation.micro_batch": _BATCH,
    "evaluation.save_predictions": Bound(100_000, "each is a line of text"),
    "evaluation.patience": _COUNT,
    "evaluation.patience_epochs": _EPOCHS,
    "evaluation.warn_when_rising": _COUNT,
    "checkpoint.every": _STEPS,
    "checkpoint.keep": _CHECKPOINTS,
    "checkpoint.keep_every": _STEPS,
    "checkpoint.keep_best": _CHECKPOINTS,
    "checkpoint.remote_keep": _CHECKPOINTS,
    "contract.gpu_hours": Bound(1e10, "that is a million GPUs for a year; 0 is no limit"),
    "contract.wall_hours": Bound(87_600, "that is ten years; 0 is no limit"),
    "contract.cost": Bound(1e15, "0 is no limit"),
    "contract.gpu_hour_cost": Bound(1e9, "no GPU-hour costs that much"),
    "telemetry.alerts.idle_min": _MINUTES,
    "telemetry.alerts.hang_min": _MINUTES,
    "telemetry.alerts.throttle_min": _MINUTES,
    "preemption_test.preempt_at_steps": _STEPS,
    "preemption_test.grace_s": Bound(86_400, "that is a day"),
    # Where it runs
    "job.nodes": Bound(100_000, "the largest clusters have some 10,000 nodes"),
    "job.gpus": Bound(1024, "it is the number per node"),
    "job.tp": _RANKS,
    "job.cp": _RANKS,
    "job.pp": _RANKS,
    "job.dp_replicate": _RANKS,
    "job.dp_shard": _RANKS,
    "job.cpus_per_gpu": _CPUS,
    "job.max_requeues": Bound(10**6, "one requeue per minute reaches that after two years"),
    # Cluster profiles
    "grace_s": Bound(86_400, "that is a day"),
    "signal_lead_s": Bound(65_535, "sbatch accepts no more for --signal"),
    "gpus_per_node": Bound(1024, "it is the number per node"),
    "cpus_per_gpu": _CPUS,
    "calibration": Bound(1000.0, "it is the measured over the predicted step time, close to 1"),
    "measured.gemm_tflops": _RATE,
    "measured.node_bus_gb_s": _RATE,
    "measured.fabric_bus_gb_s": _RATE,
    "measured.ranks": _RANKS,
    "measured.nodes": Bound(100_000, "the largest clusters have some 10,000 nodes"),
    "measured.measured_at": Bound(2**36, "it is seconds since 1970"),
    "gpu.memory_gib": Bound(10**6, "that is a PiB: the unit is GiB"),
    "gpu.usable_gib": Bound(10**6, "that is a PiB: the unit is GiB"),
    "gpu.fp32_tflops": _RATE,
    "gpu.tflops": _RATE,
    "gpu.fp8_tflops": _RATE,
    "gpu.fp4_tflops": _RATE,
    "gpu.memory_gb_s": _RATE,
    "gpu.link_gb_s": _RATE,
    "gpu.fabric_gb_s": _RATE,
    "gpu.domain": _RANKS,
    "gpu.power_limit_factor": Bound(10.0, "it is a fraction of the type's rates"),
    "node.interfaces.speed_gbit": _RATE,
    "node.interfaces.numa_node": _CPUS,
    "node.hcas.port": Bound(255, "an RDMA device has at most 255 ports"),
    "node.hcas.rate_gbit": _RATE,
    "node.hcas.roce_v2_ipv4_gid_index": Bound(65_535, "it is a 16-bit index"),
    "node.hcas.numa_node": _CPUS,
    "node.efa.rate_gbit": _RATE,
    "node.efa.numa_node": _CPUS,
    "node.gpus.index": Bound(1024, "it is an index within the node"),
    "node.gpus.numa_node": _CPUS,
    "node.gpus.nvlinks_active": Bound(1024, "a GPU has up to 18"),
    "node.gpus.nvlinks_total": Bound(1024, "a GPU has up to 18"),
    "node.cpus.sockets": _CPUS,
    "node.cpus.cores": _CPUS,
    "node.cpus.threads": _CPUS,
    "node.cpus.numa_nodes.index": _CPUS,
}


def check_bounds(document: Mapping[str, Any], source: str, prefix: str = "") -> None:
    """Raise ConfigError for the first number of ``document`` above its bound or outside 64 bits.

    Args:
        prefix: prefix of the document's keys in ``BOUNDS``, for example ``job.``.
    """
    for key, value in _iter_numbers(document, ""):
        bound = BOUNDS.get(prefix + key)
        if bound is not None and value > bound.maximum:
            requirement = f"at most {_format_number(bound.maximum)}; {bound.reason}"
            raise ConfigError(f"{source}: {key} = {_format_number(value)}: {requirement}", fix=f"change {key}")
        if isinstance(value, int) and not -_INT64 <= value < _INT64:
            raise ConfigError(
                f"{source}: {key} = {_format_number(value)}: must lie between -2^63 and 2^63 - 1, the range of 64 bits",
                fix=f"change {key}",
            )


def _iter_numbers(value: Any, key: str) -> Iterator[tuple[str, int | float]]:
    """Yield (dotted key, number). Elements of a list, or of a table whose keys the user chooses, have its key."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _iter_numbers(inner, key if key in BOUNDS else f"{key}.{name}" if key else str(name))
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _iter_numbers(inner, key)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield key, value


def _format_number(value: float) -> str:
    if isinstance(value, int) and value.bit_length() > 3 * MAX_DIGITS:
        # str() of more than 4300 digits raises ValueError.
        return f"a number of about {int(value.bit_length() * 0.30103) + 1} digits"
    return str(value) if isinstance(value, int) or value < 1e6 else f"{value:g}"
