"""Peak memory of a rank of the built-in trainer: the tensors alive at each moment of a step that can be the peak.

The moments follow from the code of ``train/`` and torch 2.13: DDP's buckets (``reducer.cpp``), the buffers of
``fully_shard`` and when it frees them (``_fsdp_param_group.py``, ``_fsdp_collectives.py``), the receive buffers of
pipeline stages (``pipelining/stage.py``), autocast's cache of cast weights, and the owners of unsharded updates.
``make fake-memory`` compares them with torch's memory tracker.
"""

from __future__ import annotations

from typing import NamedTuple

from clustertrain.config.optimizers import OPTIMIZERS
from clustertrain.plan.cost import activations
from clustertrain.plan.cost.activations import PassConfig, RankStage
from clustertrain.plan.cost.frameworks import Framework
from clustertrain.plan.cost.model_shape import DecoderShape
from clustertrain.plan.cost.optimizer_state import OwnedParams, find_heaviest_owner, temporary_bytes
from clustertrain.plan.layout import Layout
from clustertrain.plan.pipeline_schedules import LAYERS_PER_BLOCK, SPLIT_BACKWARD_SCHEDULES

FP32 = 4


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


class PassBytes(NamedTuple):
    """Bytes of a rank's passes, which do not depend on how data parallelism shards the parameters."""

    saved: float
    """Kept for the backward pass, of all micro-batches in flight."""
    block_backward: float
    """Added by a block's backward pass."""
    logits: float
    """Of the loss, at the start of the first backward pass."""
    later_logits: float
    """The same for the second micro-batch of a pipeline."""
    stage_buffers: float
    """In which pipeline stages receive."""


PassCache = dict[tuple[object, ...], PassBytes]


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
    step = _Step(model, layout, config, stage, framework, _count_passes(model, layout, config, stage, framework, cache))
    passes = step.fully_sharded_passes() if layout.is_fully_sharded else step.plain_passes()
    return max((*passes, step.update()), key=sum)


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
    step = _Step(model, layout, config, stage, framework, PassBytes(*[0.0] * len(PassBytes._fields)))
    gathered = step.count_gathered() if layout.is_fully_sharded else 0.0
    # In a pipeline, some micro-batch's backward pass finds the gradients of another.
    grads = step.trained * FP32 * step.total if layout.pp > 1 and config.grad_accum > 1 else 0.0
    state = step.state.total
    return LowerBounds(state if layout.reshard_after_forward else state + gathered, state + gathered + grads)


def bound_pass(model: DecoderShape, layout: Layout, config: PassConfig, framework: Framework) -> LowerBounds:
    """Return bounds for activations and logits without a pipeline, for any sharding of the parameters."""
    passes = _count_passes(model, layout, config, RankStage(model.layers), framework, None)
    return LowerBounds(passes.saved + passes.logits, passes.saved + passes.block_backward)


def _count_passes(
    model: DecoderShape,
    layout: Layout,
    config: PassConfig,
    stage: RankStage,
    framework: Framework,
    cache: PassCache | None,
) -> PassBytes:
    key = (layout.tp, layout.cp, layout.pp, layout.schedule, layout.virtual_stages, layout.activation_checkpointing,
           config.micro_batch, config.grad_accum, config.autocast, stage)  # fmt: skip
    cached = cache.get(key) if cache is not None else None
    if cached is not None:
        return cached
    tokens = config.micro_batch * config.seq_len / layout.cp
    stream = config.residual_bytes * model.dim / (layout.tp if layout.sequence_parallel else 1)
    kept = activations.saved_bytes(model, config, layout, stage, framework)
    # The feed-forward layer: three gradients of its width without the product, which is freed, and two of the stream.
    block_backward = 2 * config.compute_bytes * model.hidden / layout.tp + stream + config.compute_bytes * model.dim
    is_split, is_recomputed = layout.schedule in SPLIT_BACKWARD_SCHEDULES, layout.activation_checkpointing != "none"
    stage_blocks = -(-stage.blocks // layout.virtual_stages)
    if is_split:
        if is_recomputed:
            block_backward = config.compute_bytes * _recomputed_for_weights(model, layout, stage_blocks)
        block_backward += config.compute_bytes * stage_blocks * (1 + stage.deferred) * _kept_gradients(model, layout)
    elif is_recomputed:
        block_backward += activations.block_bytes(model, config, layout, framework)
    # A stage keeps one buffer per micro-batch for activations, and one for gradients, from step to step.
    buffers = (2 * layout.virtual_stages - stage.embedding - stage.head) * config.grad_accum if layout.pp > 1 else 0
    logits = tokens * model.vocab_size * stage.head
    result = PassBytes(
        saved=tokens * kept * stage.in_flight,
        block_backward=tokens * block_backward,
        logits=logits * _logit_bytes(layout, config, framework, stage, stage.in_flight),
        later_logits=logits * _logit_bytes(layout, config, framework, stage, stage.in_flight - 1),
        stage_buffers=buffers * tokens * stream,
    )
    if cache is not None:
        cache[key] = result
    return result


def _kept_gradients(model: DecoderShape, layout: Layout) -> float:
    """Return the elements per token of a block's linear layers and norms, whose output gradients a split backward pass
    keeps until it computes the gradients of the weights."""
    norms = 2 * model.dim / (layout.tp if layout.sequence_parallel else 1)
    return (model.dim + 2 * _kv_width(model) + 2 * model.hidden) / layout.tp + 2 * model.dim + norms


def _recomputed_for_weights(model: DecoderShape, layout: Layout, blocks: int) -> float:
    """Return the elements per token that the pass for a stage's weights recomputes.

    ``stage_backward_weight`` calls autograd once per layer, and each call recomputes the whole block. The inputs of
    linear layers and norms are freed when the layer's call is over, everything else at the end of the pass. The peak is
    in the call for the up or for the down projection of the last block.
    """
    layers = LAYERS_PER_BLOCK
    product = model.hidden / layout.tp
    rest = (2 * model.dim + 2 * _kv_width(model)) / layout.tp + 3 * product
    in_up = rest * (layers * blocks - 1) + (product + model.dim) * (layers - 1)
    return max(in_up, (rest * blocks + product) * layers)


def _kv_width(model: DecoderShape) -> int:
    return model.kv_heads * (model.dim // model.heads)


def _logit_bytes(layout: Layout, config: PassConfig, framework: Framework, stage: RankStage, in_flight: float) -> float:
    """Return the bytes per logit at the start of the backward pass: fp32 log-softmax, its gradient and the logits'.

    torch's loss of split logits has one more fp32 tensor. A pipeline keeps the outputs of its stages; gpipe also keeps
    the log-softmax of all micro-batches; a split backward pass also keeps the gradients of outputs until the pass for
    weights.
    """
    is_split = layout.tp > 1 and config.parallel.loss_parallel
    is_gathered = is_split and framework.whole_logits
    shards = layout.tp if is_split and not is_gathered else 1
    output = config.compute_bytes / (layout.tp if is_split else 1) if layout.pp > 1 or is_gathered else 0.0
    loss = (4 if shards > 1 else 3) * FP32 / shards
    others = in_flight - 1 if layout.schedule == "gpipe" else 0.0
    return output * (1 + stage.deferred) + loss + others * (output + FP32 / shards)


class _Step:
    """Counts of a rank, and the moments made of them."""

    def __init__(
        self,
        model: DecoderShape,
        layout: Layout,
        config: PassConfig,
        stage: RankStage,
        framework: Framework,
        passes: PassBytes,
    ) -> None:
        self.model, self.layout, self.config, self.stage, self.framework = model, layout, config, stage, framework
        self.passes = passes
        self.is_recomputed = layout.activation_checkpointing != "none"
        norms = 2 * model.dim
        self.matrices = (model.block_parameters() - norms) // layout.tp  # elements of a block
        self.block = self.matrices + norms
        self.table = model.vocab_size * model.dim // layout.tp  # elements of an embedding or a head
        self.is_tied = model.tie_embeddings and stage.embedding and stage.head and layout.pp == 1
        tables = stage.embedding + stage.head - self.is_tied
        self.ends = tables * self.table + (model.dim if stage.head else 0)
        self.total = stage.blocks * self.block + self.ends
        # Ranks that share a sequence share its parameters too.
        self.shard_ranks = layout.dp_shard * layout.cp if layout.is_sharded else 1
        self.local = -(-self.total // self.shard_ranks)
        # The gradient of a split embedding covers the whole vocabulary, unless a tied head adds one that is split.
        is_split_table = layout.tp > 1 and stage.embedding and not self.is_tied
        self.table_excess = model.vocab_size * model.dim - self.table if is_split_table else 0
        # Whether there are gradients of earlier micro-batches when the most activations exist.
        self.trained = framework.grad_bytes / FP32  # fraction of the parameters
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
            zero1=layout.zero1,
        )  # fmt: skip

    def _count_state(self) -> Moment:
        if self.layout.offload:
            return Moment(activations=self.passes.stage_buffers)
        optimizer = self.local * self.framework.optimizer_bytes
        if self.owned is not None:
            optimizer = self.owned.state_bytes * self.trained
            if OPTIMIZERS[self.framework.optim.name].matrices_only and not self.layout.zero1:
                rest = self.local - self.stage.blocks * self.matrices / self.shard_ranks
                optimizer += 8 * rest * self.trained  # AdamW's
        return Moment(params=FP32 * self.local, optimizer=optimizer, activations=self.passes.stage_buffers)

    def _moment(
        self, *, params: float = 0.0, grads: float = 0.0, activations: float = 0.0, logits: float = 0.0
    ) -> Moment:
        """Return the moment with these bytes besides the state."""
        state = self.state
        return Moment(
            state.params + params, self.trained * grads, state.optimizer, state.activations + activations, logits
        )

    def plain_passes(self) -> list[Moment]:
        """Return the moments without ``fully_shard``: a single rank, DDP, tensor or pipeline parallelism."""
        layout, stage, passes, compute = self.layout, self.stage, self.passes, self.config.compute_bytes
        all_grads = FP32 * (self.total + self.table_excess)
        # DDP keeps its buckets; the gradients of micro-batches that it does not reduce are separate tensors.
        buckets = all_grads if layout.strategy in ("ddp", "zero1") else 0.0
        before = buckets + all_grads * self.accumulates
        head_cast = block_casts = 0.0
        if self.config.autocast:
            head_cast, block_casts = compute * self.table * stage.head, compute * stage.blocks * self.matrices
        kept_casts = (head_cast + (0.0 if self.is_recomputed else block_casts)) * stage.in_flight
        # Autocast keeps a stage's cast weights until its forward pass ends. The last stage's includes the loss: logits,
        # their fp32 copy and log-softmax.
        stage_casts = block_casts / layout.virtual_stages if self.is_recomputed else 0.0
        loss_forward = self._moment(
            params=kept_casts + stage_casts, grads=before, activations=passes.saved,
            logits=passes.logits * (compute + 2 * FP32) / (3 * FP32),
        )  # fmt: skip
        loss_backward = self._moment(params=kept_casts, grads=before, activations=passes.saved, logits=passes.logits)
        # A tied head's gradient waits for the embedding's, to which it is added in a new tensor.
        tied_grad = FP32 * self.table * self.is_tied
        # A gradient is cast before it is added.
        cast_bytes = compute * self.config.autocast + FP32
        weight_grad = cast_bytes * self.model.dim * self.model.hidden / layout.tp
        head_grads = tied_grad if before else FP32 * self.table * stage.head
        first_block = self._moment(
            params=kept_casts, grads=before + head_grads + weight_grad, activations=passes.saved + passes.block_backward
        )
        last_block = self._moment(grads=max(before, all_grads) + weight_grad, activations=passes.block_backward)
        table_grad = FP32 * (self.table + self.table_excess) * stage.embedding
        embedding = self._moment(
            grads=max(before, all_grads - table_grad) + table_grad + 2 * tied_grad, activations=self._saved_by_others()
        )
        later = [self._next_micro_batch(moment, all_grads) for moment in (loss_backward, first_block)]
        return [loss_forward, loss_backward, first_block, *later, last_block, embedding]

    def _saved_by_others(self) -> float:
        """Return the bytes that a rank keeps for other micro-batches at the end of the first one's backward pass."""
        return self.passes.saved * (1 - 1 / max(1.0, self.stage.in_flight))

    def fully_sharded_passes(self) -> list[Moment]:
        """Return the moments under ``fully_shard``."""
        layout, stage, passes, compute = self.layout, self.stage, self.passes, self.config.compute_bytes
        blocks = max(1, stage.blocks)
        shards = FP32 * self.local * self.keeps_shards
        defers = layout.pp > 1 or (self.config.grad_accum > 1 and layout.defer_reduction)
        end_grads = self.ends + self.table_excess
        whole: float = FP32 * (stage.blocks * self.block + end_grads)
        is_stage_by_stage = self._reduces_stage_by_stage()
        if is_stage_by_stage:
            # Under ZBV the first rank has the first and the last stage, and the last one has been reduced by now.
            outside = self.table + self.table_excess if stage.embedding else end_grads
            whole = FP32 * (stage.blocks * self.block / layout.virtual_stages + outside)
        before = (whole if defers else shards * (not layout.offload)) * self.accumulates
        unreduced = self._count_unreduced()
        before += unreduced * (stage.in_flight_with_gradients >= stage.in_flight)
        # The buffer of the last reduction stays until the next one, in the next micro-batch.
        last_reduced = FP32 * self.ends * (self.accumulates and not defers)
        gathered = self.count_gathered()
        loss = self._moment(
            params=0.0 if layout.reshard_after_forward else gathered, grads=before + last_reduced,
            activations=passes.saved, logits=passes.logits,
        )  # fmt: skip
        head_grad = compute * self.table * stage.head
        weight_grad = compute * self.model.dim * self.model.hidden / layout.tp
        # While a block runs, the previous one's gradients are reduced; accumulated ones are freed then.
        reduced = 0.0 if defers else FP32 * self.block

        def in_block(done: int) -> Moment:
            """Return the moment in the feed-forward layer of a block after ``done`` others."""
            return self._moment(
                params=gathered,
                grads=(before or shards * done / blocks)
                + head_grad
                + weight_grad
                + (reduced if done else last_reduced),
                activations=passes.saved * (1 - done / blocks) + passes.block_backward,
            )

        def at_end_of_block(done: int) -> Moment:
            """Return the moment when a block after ``done`` others has all its gradients and no activations."""
            return self._moment(
                params=gathered,
                grads=(before or shards * done / blocks) + head_grad + compute * self.block + reduced * (done > 0),
                activations=passes.saved * (1 - (done + 1) / blocks),
            )

        first_block = in_block(0)
        second, late = min(1, blocks - 1), max(0, blocks - 2)  # the last one has no next block to gather
        in_blocks = [first_block, in_block(second), in_block(late), at_end_of_block(second), at_end_of_block(late)]
        block_shards = FP32 * stage.blocks * self.block / self.shard_ranks * self.keeps_shards
        # Tensor parallelism computes the embedding's gradient for the whole vocabulary, and splits it if it is tied. A
        # tied head's gradient is added to it in a new tensor.
        table_grads = compute * self.model.vocab_size * self.model.dim * stage.embedding
        accumulated = self._accumulated_at_embedding(block_shards, whole)
        if not (is_stage_by_stage and stage.embedding):
            table_grads += compute * self.table * (stage.head + self.is_tied * (2 if layout.tp > 1 else 1))
        embedding = self._moment(
            params=gathered if layout.pp > 1 else compute * self.ends,
            grads=table_grads + accumulated,
            activations=self._saved_by_others(),
        )
        later = [self._next_micro_batch(moment, whole) for moment in (loss, first_block)]
        if unreduced:
            later.append(self._after_two_micro_batches(gathered, whole + unreduced))
        # The parameters outside blocks are reduced last. Their gradients are freed when they have been copied.
        root = self._moment(grads=block_shards + (FP32 if defers else compute) * end_grads + FP32 * self.ends)
        return [loss, *in_blocks, *later, embedding, root]

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
        return compute * stage.blocks * self.block * (1 - stage.embedding / layout.virtual_stages)

    def _after_two_micro_batches(self, params: float, grads: float) -> Moment:
        """Return the moment when a rank has all gradients of two micro-batches, and a part of them unreduced."""
        passes, stage = self.passes, self.stage
        kept = stage.in_flight_with_gradients / stage.in_flight * passes.saved
        return self._moment(params=params, grads=grads, activations=kept + passes.block_backward * self.is_recomputed)

    def _accumulated_at_embedding(self, block_shards: float, whole: float) -> float:
        """Return the bytes of the other gradients when the embedding's is computed under ``fully_shard``."""
        block = FP32 * self.block
        if self.layout.pp == 1 and (self.config.grad_accum == 1 or not self.layout.defer_reduction):
            return block_shards + block  # the first block's are being reduced
        if self.layout.pp == 1 and self.config.grad_accum == 2:
            return self.stage.blocks * block  # of the first micro-batch; the second one's are reduced block by block
        return whole

    def count_gathered(self) -> float:
        """Return the bytes of gathered parameters in a block's pass."""
        blocks = self.stage.blocks
        if self.layout.reshard_after_forward:
            # The result of the next all-gather exists besides the parameters copied from the last one.
            blocks = min(blocks, 2 if self.shard_ranks > 1 else 1)
        return self.config.compute_bytes * (self.ends + blocks * self.block)

    def _next_micro_batch(self, moment: Moment, all_grads: float) -> Moment:
        """Return ``moment`` in the backward pass of a pipeline's second micro-batch.

        The first one's activations are gone. All gradients exist, but only the last stage's at its loss.
        """
        if self.layout.pp == 1 or self.accumulates:
            return moment
        if moment.logits and self.layout.virtual_stages > 1:
            all_grads = FP32 * (self.stage.blocks / self.layout.virtual_stages * self.block + self.table)
        return moment._replace(
            grads=moment.grads + self.trained * all_grads,
            activations=moment.activations - self.passes.saved / self.stage.in_flight,
            logits=self.passes.later_logits if moment.logits else 0.0,
        )

    def update(self) -> Moment:
        """Return the moment of the optimizer step."""
        state, grads = self.state, 0.0 if self.layout.offload else FP32 * self.local
        if not self.layout.is_fully_sharded:
            grads += FP32 * self.table_excess
        if self.layout.offload:
            temporary = 0.0  # the CPU updates
        elif self.owned is None:
            temporary = temporary_bytes(self.framework.optim, (self.local,), is_hidden_matrix=False)
        else:
            temporary = self.owned.temporary_bytes
            if self.owners > 1 and not self.layout.zero1:
                # Owners gather values and gradients, each through a buffer; the others' shards leave through one.
                gathered = 2 * FP32 * self.owned.elements
                temporary = gathered + max(temporary, FP32 * (self.owned.elements + self.local))
        return Moment(state.params, self.trained * grads, state.optimizer + temporary, state.activations)
