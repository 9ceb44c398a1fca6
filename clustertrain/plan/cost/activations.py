"""What autograd keeps on one rank between forward and backward, for the built-in decoder.

Counted the way of Korthikanti et al. (arXiv 2205.05198, sections 4 and 5). On the CPU the count is compared with the
tensors that autograd really keeps, in tests/ranks/test_plan_memory_counted.py and tests/unit/plan; on CUDA it differs
by the fused norm and attention, from their code.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

from clustertrain.config.parallel import ParallelSpec
from clustertrain.config.recipe import Precision
from clustertrain.plan import pipeline_schedules
from clustertrain.plan.cost.frameworks import CLUSTERTRAIN, Stack
from clustertrain.plan.cost.model_shape import Decoder
from clustertrain.plan.layout import Layout

SINGLE = Layout()
_HALF = ("bf16", "fp16", "fp8")  # around fp8 matmuls everything is bf16


@dataclass(frozen=True)
class Pass:
    """One forward and backward pass of a rank, and how often it is repeated before the optimizer's step.

    ``autocast``: weights and residual stream stay fp32 and every linear layer casts its input; without it a ``compute``
    of two bytes casts the parameters themselves (FSDP's mixed precision).
    """

    seq_len: int
    micro_batch: int
    grad_accum: int = 1
    compute: Precision = "fp32"
    autocast: bool = False
    device: str = "cpu"
    parallel: ParallelSpec = field(default_factory=ParallelSpec)

    @property
    def compute_bytes(self) -> int:
        return 2 if self.compute in _HALF else 4

    @property
    def residual_bytes(self) -> int:
        return 4 if self.autocast else self.compute_bytes


@dataclass(frozen=True)
class Part:
    """What of the model one rank holds, and of how many micro-batches it keeps the activations."""

    blocks: int
    embedding: bool = True
    head: bool = True
    in_flight: float = 1.0


def parts(model: Decoder, layout: Layout, micro_batches: int, *, even: bool = False) -> list[Part]:
    """The ranks that may need most: all the same without a pipeline, else its first and its last one.

    ``even``: every stage has as many blocks, whatever else it has, which is how Megatron deals them out.
    """
    if layout.pp == 1:
        return [Part(model.layers)]
    first, last = pipeline_schedules.in_flight(layout, micro_batches)
    early, final = dealt(model, pipeline_schedules.stages(layout))
    if even:
        share = -(-model.layers // layout.pp)
        return [Part(share, head=False, in_flight=first), Part(share, embedding=False, in_flight=last)]
    others = (layout.virtual_stages - 1) * early
    if layout.schedule == "zbv":  # the stages run down the ranks and up again
        return [Part(early + final, in_flight=first)]
    return [
        Part(others + early, head=False, in_flight=first),
        Part(others + final, embedding=False, in_flight=last),
    ]


def dealt(model: Decoder, stages: int) -> tuple[int, int]:
    """Blocks of the early stages, at most, and of the last one, which has the head's matrix to multiply with too: so
    that the dearest stage is as cheap as can be, and then as evenly as can be, as
    ``train/distributed/pipeline_stages.py`` cuts the model.
    """
    return _dealt(model.layers, model.vocab_size * model.dim / (model.block_parameters() - 2 * model.dim), stages)


@cache
def _dealt(layers: int, head: float, stages: int) -> tuple[int, int]:
    """``head``: what the head costs, in blocks."""

    def cost(final: int) -> tuple[float, float]:
        few, over = divmod(layers - final, stages - 1)
        squares = over * (few + 1) ** 2 + (stages - 1 - over) * few**2 + (head + final) ** 2
        return max(few + (over > 0), head + final), squares

    final = min(range(layers + 1), key=cost)
    return -(-(layers - final) // (stages - 1)), final


def _block(model: Decoder, run: Pass, layout: Layout, stack: Stack) -> float:
    """Bytes per token of one block.

    Each of two norms keeps its input (where it is not fused, as on the CPU, two fp32 tensors) and its output once for
    all linear layers that share it (under autocast once for each of the five); queries, keys, values and attention's
    output (on the CPU also as a contiguous copy); gate, up, their activation and product, or without a gate the
    input and output of the activation; the softmax statistics or, of plain attention, the scores; with dropout the
    masks of both branches.

    Tensor parallel divides what lies inside attention and feed-forward, with sequence parallel also norms and masks.
    The inputs of the linear layers stay whole: torch keeps the gathered tensor, where Megatron gathers it again
    (section 4.2.2 of the paper). Context parallel by all-gather keeps keys and values of the whole sequence, and
    attention's mask, (length, seq_len) for all samples together.
    """
    cpu = run.device == "cpu"
    size, tp = run.compute_bytes, layout.tp
    along = tp if layout.sequence_parallel else 1
    norm = 2 * 4 * model.dim if cpu or stack.plain_norms else run.residual_bytes * model.dim
    mask = model.dim * (size if cpu else 1) if model.dropout else 0
    linear_inputs = (5 if run.autocast else 2) * model.dim / (along if stack.regathers else 1)
    gathers = layout.cp > 1 and run.parallel.context == "all-gather"
    kv = model.dim if stack.repeats_kv else _kv_width(model)
    if stack.keeps_fp8 and run.compute == "fp8":  # also attention's output and the last product
        linear_inputs = linear_inputs / 2 - (model.dim + model.hidden) / (2 * tp)
    attention = (3 if cpu else 2) * model.dim + 2 * kv * (layout.cp if gathers else 1)
    inside = (attention + _feed_forward(model, stack)) / tp + (run.seq_len / run.micro_batch if gathers else 0)
    statistics = 4 * (model.heads / tp + 2 / along) + _score_bytes(model, run, stack) / tp
    return 2 * (norm + mask) / along + size * (linear_inputs + inside) + statistics


def _feed_forward(model: Decoder, stack: Stack) -> float:
    if not model.gated:
        return 2 * model.hidden
    return (3 if stack.fused_mlp else 4) * model.hidden


def _score_bytes(model: Decoder, run: Pass, stack: Stack) -> float:
    """Of one token's scores against the whole sequence: the softmax's output and, with dropout, its mask and output
    (arXiv 2205.05198, section 4.1)."""
    if not stack.plain_attention:
        return 0.0
    return model.heads * run.seq_len * (5.0 if model.dropout else 2.0)


def _kept_by_block(model: Decoder, run: Pass, layout: Layout, stack: Stack) -> float:
    """Bytes per token of one block that stay until its backward pass, under the layout's activation checkpointing:
    with ``full`` its input alone, with ``selective`` also what its matmuls and its attention have put out. Tables know
    more: ``selective_op``, torchtitan's, keeps every second matmul's; ``selective_attn``, Megatron's, all but the
    scores; ``selective_layer`` is ``full`` for every second block."""
    mode = layout.activation_checkpointing
    if mode == "none":
        return _block(model, run, layout, stack)
    along = layout.tp if layout.sequence_parallel else 1
    first = run.residual_bytes * model.dim / along
    if mode == "full":
        return first
    if mode == "selective_attn":
        return _block(model, run, layout, stack) - _score_bytes(model, run, stack) / layout.tp
    if mode == "selective_layer":
        return (first + _block(model, run, layout, stack)) / 2
    up = (2 if model.gated else 1) * model.hidden
    inside = 2 * model.dim + 2 * _kv_width(model) + up  # q, attention; k, v; gate, up
    outputs = inside / layout.tp + 2 * model.dim
    if mode == "selective_op":
        outputs = model.dim / layout.tp + (outputs - model.dim / layout.tp) / 2
    return first + run.compute_bytes * outputs + 4 * model.heads / layout.tp


def activation_bytes(
    model: Decoder, run: Pass, layout: Layout = SINGLE, part: Part | None = None, stack: Stack = CLUSTERTRAIN
) -> int:
    """Without the logits. A block that is redone needs room for all of its own once; of those that wait in host memory
    one is on the device."""
    held = part or Part(model.layers)
    cpu = run.device == "cpu"
    size = run.compute_bytes
    along = layout.tp if layout.sequence_parallel else 1
    blocks = min(1, held.blocks) if run.parallel.activation_offload else held.blocks
    kept = blocks * _kept_by_block(model, run, layout, stack)
    if held.embedding and model.dropout:
        kept += model.dim * (run.residual_bytes if cpu else 1) / along
    if held.head:
        kept += (2 * 4 if cpu else run.residual_bytes) * model.dim / along + size * model.dim
    else:
        kept += run.residual_bytes * model.dim / along  # what went to the next stage
    working = _block(model, run, layout, stack) if layout.activation_checkpointing != "none" else 0.0
    return round(_tokens(run, layout) * (kept * held.in_flight + working))


def logits_bytes(model: Decoder, run: Pass, layout: Layout = SINGLE, stack: Stack = CLUSTERTRAIN) -> int:
    """At the start of a micro-batch's backward pass: the logits in the compute type, and in fp32 their log-softmax and
    the gradients of the loss before and behind it; fused kernels hold fewer of these at once. What the loss gathers of
    split logits lives as long as the fp32 ones need it."""
    split = layout.tp if run.parallel.loss_parallel else 1
    in_loss = (stack.logit_bytes - 2) / (1 if stack.whole_logits else split)
    return round(_tokens(run, layout) * model.vocab_size * (run.compute_bytes / split + in_loss))


def _tokens(run: Pass, layout: Layout) -> float:
    return run.micro_batch * run.seq_len / layout.cp


def _kv_width(model: Decoder) -> int:
    return model.kv_heads * (model.dim // model.heads)
