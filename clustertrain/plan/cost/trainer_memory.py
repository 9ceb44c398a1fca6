"""Peak memory of a rank of the built-in trainer: the tensors alive at each moment of a step that can be the peak.

The moments follow from the code of ``train/`` and torch 2.13: DDP's buckets (``reducer.cpp``), the buffers of
``fully_shard`` and when it frees them (``_fsdp_param_group.py``, ``_fsdp_collectives.py``), the receive buffers of
pipeline stages (``pipelining/stage.py``), autocast's cache of cast weights, and the owners of unsharded updates.
``make fake-memory`` compares them with torch's memory tracker.
"""

from __future__ import annotations

from typing import NamedTuple

from clustertrain.config.optimizers import OPTIMIZERS
from clustertrain.plan.cost.activations import PassConfig, RankStage
from clustertrain.plan.cost.frameworks import Framework
from clustertrain.plan.cost.model_shape import DecoderShape
from clustertrain.plan.cost.optimizer_state import OwnedParams, find_heaviest_owner, temporary_bytes
from clustertrain.plan.cost.pass_memory import FP32, PassBytes, PassCache, count_passes
from clustertrain.plan.cost.rank_params import count_params
from clustertrain.plan.layout import Layout, recomputed_share
from clustertrain.plan.pipeline_schedules import SPLIT_BACKWARD_SCHEDULES


class Moment(NamedTuple):
    """Bytes in use at one moment."""

    params: float = 0.0
    """Parameters, with their casts and what ``fully_shard`` gathers."""
    grads: float = 0.0
    """Gradients, with the buffers in which they are reduced."""
    optimizer: float = 0.0
    """State, with the temporary tensors of the update."""
    activations: float = 0.0
    """Activations, with temporary tensors of the passes and the buffers of pipeline stages."""
    logits: float = 0.0

    @property
    def total(self) -> float:
        return sum(self)


def find_peak(
    model: DecoderShape,
    layout: Layout,
    config: PassConfig,
    stage: RankStage,
    framework: Framework,
    cache: PassCache | None = None,
) -> Moment:
    """Return the moment of a step in which the rank needs the most memory.

    Args:
        cache: saves a search from counting the same passes for every way to shard the parameters.
    """
    passes = count_passes(model, layout, config, stage, framework, cache)
    rank = _Rank(model, layout, config, stage, framework, passes)
    step = _FullyShardedStep(rank) if layout.is_fully_sharded else _PlainStep(rank)
    return max((*step.list_passes(), step.update()), key=sum)


class LowerBounds(NamedTuple):
    """Bytes that a rank needs at least at two moments: those of state and passes can be added."""

    loss: float
    """When the loss is computed."""
    block: float
    """In the backward pass of a block."""


def bound_state(
    model: DecoderShape, layout: Layout, config: PassConfig, stage: RankStage, framework: Framework
) -> LowerBounds:
    """Return bounds for parameters, gradients and optimizer state, for any micro-batch and recomputation."""
    step = _Step(_Rank(model, layout, config, stage, framework, PassBytes(*[0.0] * len(PassBytes._fields))))
    gathered = step.count_gathered() if layout.is_fully_sharded else 0.0
    # In a pipeline, some micro-batch's backward pass finds the gradients of another. With several stages per rank,
    # fully_shard may have reduced all but those of one stage.
    keeps_all = layout.pp > 1 and not (layout.is_fully_sharded and layout.virtual_stages > 1)
    grads = step.trained * FP32 * step.total if keeps_all and config.grad_accum > 1 else 0.0
    state = step.state.total
    return LowerBounds(state if layout.reshard_after_forward else state + gathered, state + gathered + grads)


def bound_pass(model: DecoderShape, layout: Layout, config: PassConfig, framework: Framework) -> LowerBounds:
    """Return bounds for activations and logits without a pipeline, for any sharding of the parameters."""
    passes = count_passes(model, layout, config, RankStage(model.layers), framework, None)
    return LowerBounds(passes.saved + passes.logits, passes.saved + passes.block_backward)


class _Rank(NamedTuple):
    """What the counts of a rank depend on."""

    model: DecoderShape
    layout: Layout
    config: PassConfig
    stage: RankStage
    framework: Framework
    passes: PassBytes


class _Step:
    """Counts of a rank, and the moment of its update."""

    def __init__(self, rank: _Rank) -> None:
        model, layout, config, stage, framework, _ = rank
        self.model, self.layout, self.config, self.stage, self.framework, self.passes = rank
        self.is_recomputed = layout.activation_checkpointing != "none"
        self.recomputed_share = recomputed_share(layout.activation_checkpointing, model.layers)
        self.params = count_params(model, layout, config, stage, framework.adapter)
        self.is_tied = model.tie_embeddings and stage.embedding and stage.head and layout.pp == 1
        self.total = stage.blocks * self.params.block + self.params.ends  # elements with gradients
        self.shard_ranks = layout.dp_shard * layout.cp if layout.is_sharded else 1
        self.trained = framework.grad_bytes / FP32  # fraction of the parameters without adapters
        # Whether there are gradients of earlier micro-batches when the most activations exist.
        self.accumulates = config.grad_accum > (stage.in_flight if layout.pp > 1 else 1)
        # Offloaded gradients stay on the GPU until the end of the backward pass if they are also reduced over replicas:
        # FSDPParamGroup._all_reduce_state.
        self.keeps_shards = not layout.offload or not layout.is_sharded or layout.dp_replicate > 1
        self.owners = layout.gradient_ranks if layout.zero1 else self.shard_ranks * layout.tp
        self.owned = self._find_owned()
        self.state = self._count_state()

    def _find_owned(self) -> OwnedParams | None:
        """Return the whole parameters that this rank updates; None if it updates its shards."""
        optim, layout, stage = self.framework.optim, self.layout, self.stage
        if not (layout.zero1 or OPTIMIZERS[optim.name].needs_unsharded):
            return None
        return find_heaviest_owner(
            optim, self.model, stage.blocks, embedding=stage.embedding, head=stage.head, ranks=self.owners,
            zero1=layout.zero1, adapter=self.framework.adapter,
        )  # fmt: skip

    def _count_state(self) -> Moment:
        if self.layout.offload:
            return Moment(activations=self.passes.stage_buffers)
        optimizer = self.params.share * self.framework.optimizer_bytes
        if self.owned is not None:
            optimizer = self.owned.state_bytes * self.trained
            if OPTIMIZERS[self.framework.optim.name].matrices_only and not self.layout.zero1:
                rest = self.params.share - self.stage.blocks * self.params.hidden / self.shard_ranks
                optimizer += 8 * rest * self.trained  # AdamW's
        return Moment(params=self.params.stored, optimizer=optimizer, activations=self.passes.stage_buffers)

    def moment(
        self, *, params: float = 0.0, grads: float = 0.0, activations: float = 0.0, logits: float = 0.0
    ) -> Moment:
        """Return the moment with these bytes besides the state."""
        state = self.state
        return Moment(
            state.params + params, self.trained * grads, state.optimizer, state.activations + activations, logits
        )

    def saved_by_others(self) -> float:
        """Return the bytes that a rank keeps for other micro-batches at the end of the first one's backward pass."""
        return self.passes.saved * (1 - 1 / max(1.0, self.stage.in_flight))

    def count_gathered(self) -> float:
        """Return the bytes of gathered parameters in a block's pass."""
        blocks = self.stage.blocks
        if self.layout.reshard_after_forward:
            # The result of the next all-gather exists besides the parameters copied from the last one.
            blocks = min(blocks, 2 if self.shard_ranks > 1 else 1)
        return self.params.gathered_ends + blocks * self.params.gathered_block

    def next_micro_batch(self, moment: Moment, all_grads: float) -> Moment:
        """Return ``moment`` in the backward pass of a pipeline's second micro-batch.

        The first one's activations are gone. All gradients exist, but only the last stage's at its loss.
        """
        if self.layout.pp == 1 or self.accumulates:
            return moment
        if moment.logits and self.layout.virtual_stages > 1:
            all_grads = FP32 * (self.stage.blocks / self.layout.virtual_stages * self.params.block + self.params.table)
        return moment._replace(
            grads=moment.grads + self.trained * all_grads,
            activations=moment.activations - self.passes.saved / self.stage.in_flight,
            logits=self.passes.later_logits if moment.logits else 0.0,
        )

    def update(self) -> Moment:
        """Return the moment of the optimizer step."""
        state, grads = self.state, 0.0 if self.layout.offload else FP32 * self.params.share
        if not self.layout.is_fully_sharded:
            grads += FP32 * self.params.table_excess
        if self.layout.offload:
            temporary = 0.0  # the CPU updates
        elif self.owned is None:
            temporary = temporary_bytes(self.framework.optim, (self.params.share,), is_hidden_matrix=False)
        else:
            temporary = self.owned.temporary_bytes
            if self.owners > 1 and not self.layout.zero1:
                # Owners gather values and gradients, each through a buffer; the others' shards leave through one.
                gathered = 2 * FP32 * self.owned.elements
                temporary = gathered + max(temporary, FP32 * (self.owned.elements + self.params.share))
        return Moment(state.params, self.trained * grads, state.optimizer + temporary, state.activations)


class _PlainStep(_Step):
    """Without ``fully_shard``: a single rank, DDP, tensor or pipeline parallelism."""

    def __init__(self, rank: _Rank) -> None:
        super().__init__(rank)
        config, stage, compute = self.config, self.stage, self.config.compute_bytes
        self._all_grads = FP32 * (self.total + self.params.table_excess)
        # DDP keeps its buckets; the gradients of micro-batches that it does not reduce are separate tensors.
        buckets = self._all_grads if self.layout.strategy in ("ddp", "zero1") else 0.0
        self._before = buckets + self._all_grads * self.accumulates
        block_casts = (1 - self.recomputed_share) * stage.blocks * self.params.cast_block
        self._kept_casts = (self.params.cast_head * stage.head + block_casts) * stage.in_flight
        # Autocast keeps a stage's cast weights until its forward pass ends. The last stage's includes the loss.
        cached = stage.blocks * self.params.cached_block / self.layout.virtual_stages
        self._stage_casts = cached * self.recomputed_share
        # A gradient is cast before it is added.
        self._weight_grad = (compute * config.autocast + FP32) * self.params.weight_grad
        # A tied head's gradient waits for the embedding's, to which it is added in a new tensor.
        self._tied_grad = FP32 * self.params.table * self.is_tied

    def list_passes(self) -> list[Moment]:
        loss, block = self._loss_backward(), self._first_block()
        later = [self.next_micro_batch(moment, self._all_grads) for moment in (loss, block)]
        return [self._loss_forward(), loss, block, *later, self._last_block(), self._embedding()]

    def _loss_forward(self) -> Moment:
        """Return the moment with logits, their fp32 copy under autocast, and log-softmax."""
        at_backward = 3 * FP32
        logits = self.config.compute_bytes + FP32 * self.config.autocast + FP32
        return self.moment(
            params=self._kept_casts + self._stage_casts, grads=self._before, activations=self.passes.saved,
            logits=self.passes.logits * logits / at_backward,
        )  # fmt: skip

    def _loss_backward(self) -> Moment:
        return self.moment(
            params=self._kept_casts, grads=self._before, activations=self.passes.saved, logits=self.passes.logits
        )

    def _first_block(self) -> Moment:
        head_grad = self._tied_grad if self._before else FP32 * self.params.table * self.stage.head
        return self.moment(
            params=self._kept_casts,
            grads=self._before + head_grad + self._weight_grad,
            activations=self.passes.saved + self.passes.block_backward + self.params.unpacked,
        )

    def _last_block(self) -> Moment:
        return self.moment(
            grads=max(self._before, self._all_grads) + self._weight_grad,
            activations=self.passes.block_backward + self.params.unpacked,
        )

    def _embedding(self) -> Moment:
        table_grad = FP32 * (self.params.table + self.params.table_excess) * self.stage.embedding
        grads = max(self._before, self._all_grads - table_grad) + table_grad + 2 * self._tied_grad
        return self.moment(grads=grads, activations=self.saved_by_others())


class _FullyShardedStep(_Step):
    """Under ``fully_shard``."""

    def __init__(self, rank: _Rank) -> None:
        super().__init__(rank)
        layout, stage, config = self.layout, self.stage, self.config
        self._blocks = max(1, stage.blocks)
        self._defers = layout.pp > 1 or (config.grad_accum > 1 and layout.defer_reduction)
        """Whether gradients are reduced at the end of the step."""
        self._gathered = self.count_gathered()
        self._shards = FP32 * self.params.share * self.keeps_shards
        self._block_shards = FP32 * stage.blocks * self.params.block_share * self.keeps_shards
        self._end_grads = self.params.ends + self.params.table_excess
        self._is_stage_by_stage = self._reduces_stage_by_stage()
        self._whole = self._count_whole()
        self._unreduced = self._count_unreduced()
        before = self._whole if self._defers else self._shards * (not layout.offload)
        self._before = before * self.accumulates + self._unreduced * (stage.in_flight_with_gradients >= stage.in_flight)
        # The buffer of the last reduction stays until the next one, in the next micro-batch.
        self._last_reduced = FP32 * self.params.ends * (self.accumulates and not self._defers)
        # While a block runs, the previous one's gradients are reduced; accumulated ones are freed then.
        self._reduced = 0.0 if self._defers else FP32 * self.params.block
        self._head_grad = config.compute_bytes * self.params.table * stage.head

    def list_passes(self) -> list[Moment]:
        loss, first = self._loss(), self._in_block(0)
        second, late = min(1, self._blocks - 1), max(0, self._blocks - 2)  # the last one has no next block to gather
        in_blocks = [first, self._in_block(second), self._in_block(late)]
        ends_of_blocks = [self._at_end_of_block(second), self._at_end_of_block(late)]
        later = [self.next_micro_batch(moment, self._whole) for moment in (loss, first)]
        if self._unreduced:
            later.append(self._after_two_micro_batches())
        return [
            loss,
            self._gather_ends(),
            self._first_block_forward(),
            *in_blocks,
            *ends_of_blocks,
            *later,
            self._embedding(),
            self._root_reduction(),
        ]

    def _loss(self) -> Moment:
        return self.moment(
            params=0.0 if self.layout.reshard_after_forward else self._gathered,
            grads=self._before + self._last_reduced,
            activations=self.passes.saved,
            logits=self.passes.logits,
        )

    def _first_block_forward(self) -> Moment:
        """Return the moment when the first block is gathered: the result of the first all-gather is freed after it."""
        copies = 2 if self.shard_ranks > 1 else 1
        return self.moment(params=copies * (self.params.gathered_ends + self.params.gathered_block))

    def _gather_ends(self) -> Moment:
        """Return the moment when the parameters outside blocks have been gathered again, and are copied from the
        result of the all-gather. Of the logits, the gradient in the compute type is left.

        Without gradients of an embedding and a head, this can be the peak.
        """
        copies = 2 if self.layout.reshard_after_forward and self.shard_ranks > 1 else 1
        return self.moment(
            params=copies * self.params.gathered_ends,
            grads=self._before + self._last_reduced,
            activations=self.passes.saved,
            logits=self.passes.logits * self.config.compute_bytes / (3 * FP32),
        )

    def _in_block(self, done: int) -> Moment:
        """Return the moment in the feed-forward layer of a block after ``done`` others."""
        weight_grad = self.config.compute_bytes * self.params.weight_grad
        reduced = self._reduced if done else self._last_reduced
        return self.moment(
            params=self._gathered,
            grads=self._accumulated(done) + self._head_grad + weight_grad + reduced,
            activations=self.passes.saved * (1 - done / self._blocks)
            + self.passes.block_backward
            + self.params.unpacked,
        )

    def _at_end_of_block(self, done: int) -> Moment:
        """Return the moment when a block after ``done`` others has all its gradients and no activations."""
        block_grads = self.config.compute_bytes * self.params.block
        return self.moment(
            params=self._gathered,
            grads=self._accumulated(done) + self._head_grad + block_grads + self._reduced * (done > 0),
            activations=self.passes.saved * (1 - (done + 1) / self._blocks),
        )

    def _embedding(self) -> Moment:
        """Return the moment when the embedding's gradient is computed."""
        compute, stage = self.config.compute_bytes, self.stage
        # Tensor parallelism computes it for the whole vocabulary, and splits it if it is tied. A tied head's gradient
        # is added to it in a new tensor.
        table_grads = compute * (self.params.table * self.layout.tp) * stage.embedding
        if not (self._is_stage_by_stage and stage.embedding):
            table_grads += compute * self.params.table * (stage.head + self.is_tied * (2 if self.layout.tp > 1 else 1))
        return self.moment(
            params=self._gathered if self.layout.pp > 1 else self.params.gathered_ends,
            grads=table_grads + self._accumulated_at_embedding(),
            activations=self.saved_by_others(),
        )

    def _root_reduction(self) -> Moment:
        """Return the moment when the parameters outside blocks are reduced, last of all.

        Their gradients are freed when they have been copied.
        """
        grad_bytes = FP32 if self._defers else self.config.compute_bytes
        return self.moment(grads=self._block_shards + grad_bytes * self._end_grads + FP32 * self.params.ends)

    def _after_two_micro_batches(self) -> Moment:
        """Return the moment when a rank has all gradients of two micro-batches, and a part of them unreduced."""
        passes, stage = self.passes, self.stage
        kept = stage.in_flight_with_gradients / stage.in_flight * passes.saved
        return self.moment(
            params=self._gathered,
            grads=self._whole + self._unreduced,
            activations=kept + passes.block_backward * self.is_recomputed,
        )

    def _accumulated(self, done: int) -> float:
        """Return the bytes of gradients of earlier micro-batches, or of the blocks that are ``done``."""
        return self._before or self._shards * done / self._blocks

    def _accumulated_at_embedding(self) -> float:
        """Return the bytes of the other gradients when the embedding's is computed."""
        block = FP32 * self.params.block
        if self.layout.pp == 1 and (self.config.grad_accum == 1 or not self.layout.defer_reduction):
            return self._block_shards + block  # the first block's are being reduced
        if self.layout.pp == 1 and self.config.grad_accum == 2:
            return self.stage.blocks * block  # of the first micro-batch; the second one's are reduced block by block
        return self._whole

    def _count_whole(self) -> float:
        """Return the bytes of unsharded gradients that exist at the same time."""
        stage = self.stage
        if not self._is_stage_by_stage:
            return FP32 * (stage.blocks * self.params.block + self._end_grads)
        # Under ZBV the first rank has the first and the last stage, and the last one has been reduced by now.
        outside = self.params.table + self.params.table_excess if stage.embedding else self._end_grads
        return FP32 * (stage.blocks * self.params.block / self.layout.virtual_stages + outside)

    def _reduces_stage_by_stage(self) -> bool:
        """Return whether each of the rank's stages has reduced its gradients before the one before it has any."""
        if self.layout.schedule == "zbv":
            return self.stage.in_flight_with_gradients == 0
        return self.layout.schedule in ("interleaved", "zero-bubble") and self.config.grad_accum <= self.layout.pp

    def _count_unreduced(self) -> float:
        """Return the bytes of gradients that ``fully_shard`` has not yet cast to add them to the others.

        It casts them at the end of the pass for inputs. A split backward pass computes the gradients of weights after
        that, so these wait for the stage's next micro-batch. The first stage does not split its backward pass.
        """
        layout, stage, compute = self.layout, self.stage, self.config.compute_bytes
        if layout.schedule not in SPLIT_BACKWARD_SCHEDULES or self.config.grad_accum == 1 or compute == FP32:
            return 0.0
        return compute * stage.blocks * self.params.block * (1 - stage.embedding / layout.virtual_stages)
