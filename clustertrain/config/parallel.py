"""How the ranks share the work, as far as the recipe says; the degrees themselves are options of the job."""

from __future__ import annotations

from typing import Literal

import msgspec

from clustertrain.config.checks.ranges import check_positive

PipelineSchedule = Literal["auto", "gpipe", "1f1b", "interleaved", "zero-bubble", "zbv"]
ActivationCheckpointing = Literal["auto", "none", "selective", "full"]

SINGLE_STAGE_SCHEDULES = ("gpipe", "1f1b")


class ParallelSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The ``[parallel]`` table. What does not belong to the layout in use has no effect, and a note says so."""

    # Memory
    activation_checkpointing: ActivationCheckpointing = "auto"  # selective: keep matmuls and attention, redo the rest
    offload: bool = False  # parameters, gradients and optimizer state of a sharded layout live in host memory
    activation_offload: bool = False  # what layers keep for the backward pass waits in host memory
    compile: bool = False  # torch.compile, block by block
    channels_last: bool = False  # images reach a model of one's own in the order that convolutions compute in
    # Data parallel
    bucket_mib: int = 25  # ddp, zero1: gradients travel in buckets of this size
    find_unused_parameters: bool = False  # ddp, zero1: some parameters may get no gradient in a step
    static_graph: bool = False  # ddp, zero1: every step uses the same parameters in the same order
    compress_gradients: bool = False  # ddp, zero1: all-reduce in bf16
    # Sharded: reduce after the last micro-batch only; costs one unsharded gradient.
    defer_reduction: bool | Literal["auto"] = "auto"
    prefetch: int = 0  # sharded: units gathered ahead of the running one; 0: torch's own choice
    # Tensor parallel
    sequence_parallel: bool = True  # norms and residuals split along the sequence
    loss_parallel: bool = True  # cross-entropy on the split vocabulary
    async_tp: bool = False  # overlaps the collectives with matmuls; GPUs with NVLink, needs compile
    # Context parallel
    context: Literal["all-gather", "ring"] = "all-gather"  # ring: torch's ring attention, GPUs only
    # Pipeline
    schedule: PipelineSchedule = "auto"
    virtual_stages: int = 0  # stages a rank; 0: chosen
    split: tuple[str, ...] = ()  # names of the modules that begin the stages after the first; (): balanced

    def __post_init__(self) -> None:
        check_positive("bucket_mib", self.bucket_mib)
        if self.prefetch < 0 or self.virtual_stages < 0:
            raise ValueError("prefetch and virtual_stages must be 0 (chosen) or more")
        if self.virtual_stages > 1 and self.schedule == "auto":
            raise ValueError("virtual_stages needs a schedule with several stages a rank, as 'interleaved'")
        if self.virtual_stages > 1 and self.schedule in SINGLE_STAGE_SCHEDULES:
            raise ValueError(f"schedule {self.schedule} takes one stage a rank, virtual_stages = {self.virtual_stages}")
        if self.schedule == "zbv" and self.virtual_stages not in (0, 2):
            raise ValueError(f"schedule zbv takes two stages a rank, virtual_stages = {self.virtual_stages}")
        if self.async_tp and not self.compile:
            raise ValueError("async_tp needs compile = true")

    @property
    def stages_per_rank(self) -> int:
        """Where nobody searches: two where the schedule wants several."""
        if self.schedule in (*SINGLE_STAGE_SCHEDULES, "auto"):
            return self.virtual_stages or 1
        return self.virtual_stages or 2
