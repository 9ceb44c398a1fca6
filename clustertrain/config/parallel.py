"""The ``[parallel]`` table: options of the parallel layout. The degrees are options of the job."""

from __future__ import annotations

from typing import Literal

import msgspec

from clustertrain.config.checks.ranges import check_positive

PipelineSchedule = Literal["auto", "gpipe", "1f1b", "interleaved", "zero-bubble", "zbv"]
ActivationCheckpointing = Literal["auto", "none", "selective", "full"] | int

SINGLE_STAGE_SCHEDULES = ("gpipe", "1f1b")


class ParallelSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The ``[parallel]`` table. A key that the layout in use ignores has no effect, and a note reports it."""

    activation_checkpointing: ActivationCheckpointing = "auto"
    """Recompute activations in the backward pass. ``"selective"``: keep matrix products, convolutions and attention,
    recompute the rest. ``"full"``: recompute each layer. 2 or more: recompute every Nth layer, the first one included,
    and keep the others whole. ``"auto"``: the least that lets the fastest layout fit if the plan predicts times,
    otherwise none."""
    offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory. Sharded layouts on GPUs only."""
    activation_offload: bool = False
    """Keep activations in host memory until the backward pass. GPUs only; not with tp, pp, ``compile`` or activation
    checkpointing."""
    compile: bool = False
    """Compile each block with ``torch.compile``. On CPUs it needs a C++ compiler."""
    channels_last: bool = False
    """Pass floating-point images to a model entry in the channels-last memory format."""
    bucket_mib: int = 25
    """Size of the gradient buckets, in MiB. ddp and zero1 only."""
    find_unused_parameters: bool = False
    """Allow parameters without a gradient; DDP then searches the graph in each step. ddp and zero1 only."""
    static_graph: bool = False
    """Promise that every step uses the same parameters in the same order. ddp and zero1 only."""
    compress_gradients: bool = False
    """Reduce gradients in bf16 instead of fp32: half the bytes, 8 bits of precision."""
    defer_reduction: bool | Literal["auto"] = "auto"
    """Reduce gradients only after the last micro-batch, which costs one unsharded gradient of memory. ``"auto"``: true,
    unless the plan predicts times and only false fits. Sharded layouts without pp only."""
    prefetch: int = 0
    """Layers gathered ahead of the running one. 0: torch's choice. Sharded layouts only."""
    sequence_parallel: bool = True
    """Split norms and the residual stream along the sequence. tp only."""
    loss_parallel: bool = True
    """Compute cross-entropy on logits split over the vocabulary. tp only; set false for another loss."""
    async_tp: bool = False
    """Overlap the collectives of tp with matrix products. Needs ``compile`` and GPUs with NVLink."""
    context_parallel_method: Literal["all-gather", "ring"] = "all-gather"
    """Exchange of keys and values between the ranks of cp. ``"ring"``: torch's ring attention, GPUs only."""
    schedule: PipelineSchedule = "auto"
    """Pipeline schedule. ``"auto"``: the faster of 1f1b and interleaved where the plan predicts times, otherwise 1f1b.
    pp only."""
    virtual_stages: int = 0
    """Pipeline stages per rank. 0: chosen with the schedule if that is ``"auto"``; otherwise 1 for gpipe and 1f1b, 2
    for the others. pp only."""
    split: tuple[str, ...] = ()
    """Names of the modules that start the stages after the first. Empty: balanced by the sizes of the matrices. pp
    only."""

    def __post_init__(self) -> None:
        check_positive("bucket_mib", self.bucket_mib)
        if isinstance(self.activation_checkpointing, int) and self.activation_checkpointing < 2:
            raise ValueError(
                f"activation_checkpointing = {self.activation_checkpointing}: recompute every Nth layer, with N = 2 or "
                'more; "full" recomputes each layer, "none" no layer'
            )
        if self.prefetch < 0 or self.virtual_stages < 0:
            raise ValueError("prefetch and virtual_stages must be 0 (automatic) or more")
        if self.virtual_stages > 1 and self.schedule == "auto":
            raise ValueError("virtual_stages needs a schedule with several stages per rank, for example 'interleaved'")
        if self.virtual_stages > 1 and self.schedule in SINGLE_STAGE_SCHEDULES:
            raise ValueError(
                f"schedule {self.schedule} supports one stage per rank, virtual_stages = {self.virtual_stages}"
            )
        if self.schedule == "zbv" and self.virtual_stages not in (0, 2):
            raise ValueError(f"schedule zbv supports two stages per rank, virtual_stages = {self.virtual_stages}")
        if self.async_tp and not self.compile:
            raise ValueError("async_tp needs compile = true")

    @property
    def stages_per_rank(self) -> int:
        """Stages per rank when the plan does not search: 2 if the schedule needs several."""
        if self.schedule in (*SINGLE_STAGE_SCHEDULES, "auto"):
            return self.virtual_stages or 1
        return self.virtual_stages or 2
