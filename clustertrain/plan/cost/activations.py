"""Activation memory: bytes that autograd keeps on one rank between forward and backward of the built-in decoder.

Counted as in Korthikanti et al. (arXiv 2205.05198, sections 4 and 5). Tests compare the count for CPUs with the tensors
that autograd keeps (tests/ranks/test_plan_memory_counted.py, tests/unit/plan); for CUDA it accounts for the fused norm
and attention according to their code.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

from clustertrain.config.parallel import ParallelSpec
from clustertrain.config.train import Precision
from clustertrain.plan import pipeline_schedules
from clustertrain.plan.cost.frameworks import CLUSTERTRAIN, Framework
from clustertrain.plan.cost.model_shape import DecoderShape, block_matrices
from clustertrain.plan.layout import Layout, recompute_interval, recomputed_share

SINGLE_RANK = Layout()
_HALF_PRECISIONS = ("bf16", "fp16", "fp8")  # everything except fp8 matmuls is bf16


@dataclass(frozen=True)
class PassConfig:
    """One forward and backward pass of a rank, and its repetitions per optimizer step."""

    seq_len: int
    micro_batch: int
    grad_accum: int = 1
    """Repetitions before the optimizer step."""
    precision: Precision = "fp32"
    autocast: bool = False
    """Weights and residual stream stay fp32, and every linear layer casts its input. False with a 2-byte precision: the
    parameters themselves are cast (FSDP's mixed precision)."""
    device: str = "cpu"
    parallel: ParallelSpec = field(default_factory=ParallelSpec)
    has_document_mask: bool = False
    """Attention takes a mask of all pairs of positions, which the layers of a pipeline stage share."""
    is_attention_plain: bool = False
    """Attention is plain matrix products, which keep the scores in fp32."""

    @property
    def compute_bytes(self) -> int:
        return 2 if self.precision in _HALF_PRECISIONS else 4

    @property
    def residual_bytes(self) -> int:
        return 4 if self.autocast else self.compute_bytes


@dataclass(frozen=True)
class RankStage:
    """The part of the model that one rank holds."""

    blocks: int
    embedding: bool = True
    head: bool = True
    in_flight: float = 1.0
    """Micro-batches whose activations it keeps."""
    deferred: int = 0
    """The most passes for gradients of weights that wait at the same time, if the backward pass is split."""
    in_flight_with_gradients: float = 0.0
    """Micro-batches whose activations it keeps when it has all gradients of two, if the backward pass is split."""


def peak_memory_stages(
    model: DecoderShape, layout: Layout, micro_batches: int, framework: Framework = CLUSTERTRAIN
) -> list[RankStage]:
    """Return the parts of the ranks of a pipeline that may need the most memory; without one, the only part.

    These are the first and the last rank, and of the ranks with more blocks than the first the one that keeps the most
    micro-batches. How other frameworks assign spare blocks to early stages is unknown; the first may have one.
    """
    if layout.pp == 1:
        return [RankStage(model.layers)]
    last = layout.pp - 1
    if framework.even_stages:
        blocks = (-(-model.layers // layout.pp),) * layout.pp
    elif framework.is_built_in:
        blocks = blocks_by_rank(model, layout)
    else:
        early_blocks, last_blocks = split_blocks(model, pipeline_schedules.num_stages(layout))
        other_blocks = (layout.virtual_stages - 1) * early_blocks
        blocks = (other_blocks + early_blocks,) * last + (other_blocks + last_blocks,)
    ranks = sorted({0, blocks.index(max(blocks)), last})
    head_rank = 0 if layout.schedule == "zbv" else last  # zbv's stages run down the ranks and up again
    is_split = layout.schedule in pipeline_schedules.SPLIT_BACKWARD_SCHEDULES
    return [
        RankStage(
            blocks[rank], embedding=rank == 0, head=rank == head_rank,
            in_flight=_average_in_flight(model, layout, micro_batches, rank, framework),
            deferred=pipeline_schedules.count_deferred(layout, micro_batches, rank),
            in_flight_with_gradients=(
                pipeline_schedules.count_in_flight_with_gradients(layout, micro_batches, rank) if is_split else 0.0
            ),
        )
        for rank in ranks
    ]  # fmt: skip


def _average_in_flight(
    model: DecoderShape, layout: Layout, micro_batches: int, rank: int, framework: Framework
) -> float:
    """Return the micro-batches whose activations a rank keeps, on average over its blocks."""
    if layout.virtual_stages > 1 and framework.is_built_in:
        blocks = _blocks_of_stages(model, layout)[rank]
        if len(set(blocks)) > 1:
            in_flight = pipeline_schedules.in_flight_by_stage(layout, micro_batches, rank)
            return sum(n * count for n, count in zip(in_flight, blocks, strict=True)) / sum(blocks)
    return pipeline_schedules.in_flight_micro_batches(layout, micro_batches, rank)


def blocks_by_rank(model: DecoderShape, layout: Layout) -> tuple[int, ...]:
    """Return the number of blocks of each pipeline rank, as ``train/distributed/pipeline_stages.py`` assigns them."""
    return tuple(sum(blocks) for blocks in _blocks_of_stages(model, layout))


def _blocks_of_stages(model: DecoderShape, layout: Layout) -> tuple[tuple[int, ...], ...]:
    """Return the number of blocks of each stage of each pipeline rank."""
    early_blocks, last_blocks = split_blocks(model, pipeline_schedules.num_stages(layout))
    return _assign_blocks(
        model.layers, early_blocks, last_blocks, layout.pp, layout.virtual_stages, layout.schedule == "zbv"
    )


@cache
def _assign_blocks(
    layers: int, early_blocks: int, last_blocks: int, pp: int, virtual_stages: int, is_zbv: bool
) -> tuple[tuple[int, ...], ...]:
    stages = pp * virtual_stages
    # Of the early stages, the last ones have one block more.
    fewer = early_blocks * (stages - 1) - (layers - last_blocks)
    blocks = [early_blocks - 1] * fewer + [early_blocks] * (stages - 1 - fewer) + [last_blocks]
    if is_zbv:
        return tuple((blocks[rank], blocks[stages - 1 - rank]) for rank in range(pp))
    return tuple(tuple(blocks[rank::pp]) for rank in range(pp))


def split_blocks(model: DecoderShape, stages: int) -> tuple[int, int]:
    """Return the largest number of blocks in an early stage, and the number in the last one, which also has the head.

    Minimizes the most expensive stage, then balances the others, as ``train/distributed/pipeline_stages.py`` does.
    """
    return _split_blocks(model.layers, model.vocab_size * model.dim / block_matrices(model), stages)


@cache
def _split_blocks(layers: int, head: float, stages: int) -> tuple[int, int]:
    """Return the split for a head that costs as much as ``head`` blocks."""

    def cost(last_blocks: int) -> tuple[float, float]:
        base, extra = divmod(layers - last_blocks, stages - 1)
        squares = extra * (base + 1) ** 2 + (stages - 1 - extra) * base**2 + (head + last_blocks) ** 2
        return max(base + (extra > 0), head + last_blocks), squares

    last_blocks = min(range(layers + 1), key=cost)
    return -(-(layers - last_blocks) // (stages - 1)), last_blocks


def block_bytes(model: DecoderShape, config: PassConfig, layout: Layout, framework: Framework) -> float:
    """Return the bytes per token that one block keeps.

    These are: for each of two norms its input (if unfused, as on the CPU, two fp32 tensors) and its output, once for
    all linear layers that share it (under autocast once for each of the five); queries, keys, values and attention's
    output (on the CPU also a contiguous copy); gate, up, their activation and product, or without a gate the input and
    output of the activation; the softmax statistics, or the scores of plain attention; with dropout the masks of both
    branches. On GPUs our 16-bit attention also keeps a contiguous copy, and in fp32 keys have as many heads as queries.
    Norms of queries and keys keep their inputs.

    Tensor parallelism divides the tensors inside attention and feed-forward, with sequence parallelism also norms and
    masks. The inputs of the linear layers stay whole: torch keeps the gathered tensor, while Megatron gathers it again
    (section 4.2.2 of the paper). Context parallelism by all-gather keeps keys and values of the whole sequence, and
    attention's mask, (length, seq_len) for all samples together.
    """
    cpu = config.device == "cpu"
    dtype_bytes, tp = config.compute_bytes, layout.tp
    sp_degree = tp if layout.sequence_parallel else 1
    norm_input = 2 * 4 if cpu or framework.plain_norms else config.residual_bytes  # bytes per element
    norm = norm_input * model.dim
    head_norms = norm_input * (model.attention_dim + model.kv_dim) * model.qk_norm
    mask = model.dim * (dtype_bytes if cpu else 1) if model.dropout else 0
    linear_inputs = _linear_inputs(config, framework) * model.dim / (sp_degree if framework.regathers else 1)
    is_gathered = layout.cp > 1 and config.parallel.context_parallel_method == "all-gather"
    is_built_in_on_gpu = framework.is_built_in and not cpu
    repeats_kv = framework.repeats_kv or (
        is_built_in_on_gpu and (config.compute_bytes == 4 or config.has_document_mask)
    )
    kv = model.attention_dim if repeats_kv else model.kv_dim
    if framework.keeps_fp8 and config.precision == "fp8":  # also attention's output and the last product
        linear_inputs = linear_inputs / 2 - (model.attention_dim + model.hidden) / (2 * tp)
    copies = cpu or (is_built_in_on_gpu and config.compute_bytes == 2)
    copied = _is_input_kept(framework, "attention.out") if copies else 0.0
    attention = (2 + copied) * model.attention_dim + 2 * kv * (layout.cp if is_gathered else 1)
    own_mask = config.seq_len / config.micro_batch if is_gathered and not config.has_document_mask else 0
    sharded_elements = (attention + _feed_forward_elements(model, framework)) / tp + own_mask
    statistics = 4 * (model.heads / tp + 2 / sp_degree) + _score_bytes(model, config, framework) / tp
    kept = dtype_bytes * (linear_inputs + sharded_elements + _adapter_elements(model, layout, framework)) + statistics
    return 2 * (norm + mask) / sp_degree + head_norms / tp + kept


def _linear_inputs(config: PassConfig, framework: Framework) -> float:
    """Return how many copies of the norms' outputs linear layers keep, for the gradients of trained weights."""
    first, second = ("attention.q", "attention.k", "attention.v"), ("ffn.gate", "ffn.up")
    if config.autocast:  # each layer casts its input
        return sum(_is_input_kept(framework, name) for name in (*first, *second))
    return sum(max(_is_input_kept(framework, name) for name in names) for names in (first, second))


def _is_input_kept(framework: Framework, name: str) -> float:
    """Return the fraction of the blocks in which a linear layer keeps its input: 1 if its weight is trained."""
    return 1.0 if framework.adapter is None else framework.adapter.share_of.get(name, 0.0)


def _adapter_elements(model: DecoderShape, layout: Layout, framework: Framework) -> float:
    """Return the elements per token that the adapters of a block keep besides the inputs of their layers."""
    adapter = framework.adapter
    if adapter is None:
        return 0.0
    total = 0.0
    for name, (rows, columns) in adapter.split_matrices(model, layout.tp).items():
        own = adapter.rank + columns * adapter.has_dropout + 2 * rows * adapter.has_magnitude
        total += adapter.share_of.get(name, 0.0) * own
    return total


def _feed_forward_elements(model: DecoderShape, framework: Framework) -> float:
    product = _is_input_kept(framework, "ffn.down")
    if not model.gated:
        return (1 + product) * model.hidden
    return ((2 if framework.fused_mlp else 3) + product) * model.hidden


def _score_bytes(model: DecoderShape, config: PassConfig, framework: Framework) -> float:
    """Return the bytes of one token's scores against the whole sequence.

    The softmax's output and, with dropout, its mask and output (arXiv 2205.05198, section 4.1).
    """
    if config.is_attention_plain:  # the built-in decoder has no dropout here
        return model.heads * config.seq_len * 4.0
    if not framework.plain_attention:
        return 0.0
    return model.heads * config.seq_len * (5.0 if model.dropout else 2.0)


def saved_block_bytes(model: DecoderShape, config: PassConfig, layout: Layout, framework: Framework) -> float:
    """Return the bytes per token of one block that stay until its backward pass.

    With ``full`` checkpointing its input (``full/N``: the mean over all layers), with ``selective`` also the outputs of
    its matmuls and its attention. Modes in tables only: ``selective_op`` (torchtitan) keeps every second matmul's
    output; ``selective_attn`` (Megatron) keeps all but the scores; ``selective_layer`` is ``full`` for every second
    block.
    """
    mode = layout.activation_checkpointing
    if mode == "none":
        return block_bytes(model, config, layout, framework)
    sp_degree = layout.tp if layout.sequence_parallel else 1
    input_bytes = config.residual_bytes * model.dim / sp_degree
    if recompute_interval(mode):
        share = recomputed_share(mode, model.layers)
        return share * input_bytes + (1 - share) * block_bytes(model, config, layout, framework)
    if mode == "selective_attn":
        return block_bytes(model, config, layout, framework) - _score_bytes(model, config, framework) / layout.tp
    if mode == "selective_layer":
        return (input_bytes + block_bytes(model, config, layout, framework)) / 2
    up = (2 if model.gated else 1) * model.hidden
    op_outputs = 2 * model.attention_dim + 2 * model.kv_dim + up  # q, attention; k, v; gate, up
    outputs = op_outputs / layout.tp + 2 * model.dim
    if mode == "selective_op":
        outputs = model.dim / layout.tp + (outputs - model.dim / layout.tp) / 2
    if framework.adapter is not None:
        outputs += framework.adapter.output_elements(model, layout.tp)
    return input_bytes + config.compute_bytes * outputs + 4 * model.heads / layout.tp


def activation_bytes(
    model: DecoderShape,
    config: PassConfig,
    layout: Layout = SINGLE_RANK,
    stage: RankStage | None = None,
    framework: Framework = CLUSTERTRAIN,
) -> int:
    """Return the bytes of activations of a rank, without the logits.

    Includes the full activations of one recomputed block; with offload one block is on the device.
    """
    rank_stage = stage or RankStage(model.layers)
    recompute_bytes = (
        block_bytes(model, config, layout, framework) if layout.activation_checkpointing != "none" else 0.0
    )
    kept_bytes = saved_bytes(model, config, layout, rank_stage, framework) * rank_stage.in_flight
    return round(_tokens(config, layout) * (kept_bytes + recompute_bytes))


def saved_bytes(
    model: DecoderShape, config: PassConfig, layout: Layout, stage: RankStage, framework: Framework = CLUSTERTRAIN
) -> float:
    """Return the bytes per token that autograd keeps of one micro-batch; with offload those of one block."""
    cpu = config.device == "cpu"
    sp_degree = layout.tp if layout.sequence_parallel else 1
    blocks = min(1, stage.blocks) if config.parallel.activation_offload else stage.blocks
    kept_bytes = blocks * saved_block_bytes(model, config, layout, framework)
    if config.has_document_mask and stage.blocks:
        kept_bytes += layout.virtual_stages * config.compute_bytes * config.seq_len
    if stage.embedding and model.dropout:
        kept_bytes += model.dim * (config.residual_bytes if cpu else 1) / sp_degree
    if stage.head:
        norm_input = (2 * 4 if cpu else config.residual_bytes) * model.dim / sp_degree
        head_input = config.compute_bytes * model.dim if framework.adapter is None or framework.adapter.head else 0
        return kept_bytes + norm_input + head_input
    return kept_bytes + config.residual_bytes * model.dim / sp_degree  # sent to the next stage


def logits_bytes(
    model: DecoderShape, config: PassConfig, layout: Layout = SINGLE_RANK, framework: Framework = CLUSTERTRAIN
) -> int:
    """Return the bytes of the logits and their copies at the start of a micro-batch's backward pass.

    These are the logits in the compute type, and in fp32 their log-softmax and the gradients before and after it; fused
    kernels hold fewer at once. Gathered copies of split logits live as long as the fp32 ones.
    """
    vocab_shards = layout.tp if config.parallel.loss_parallel else 1
    loss_bytes = (framework.logit_bytes - 2) / (1 if framework.whole_logits else vocab_shards)
    return round(_tokens(config, layout) * model.vocab_size * (config.compute_bytes / vocab_shards + loss_bytes))


def _tokens(config: PassConfig, layout: Layout) -> float:
    return config.micro_batch * config.seq_len / layout.cp
