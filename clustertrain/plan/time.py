"""Seconds of one optimizer step, and where they go."""

from __future__ import annotations

from dataclasses import dataclass

from clustertrain.plan import compute
from clustertrain.plan.activations import Pass
from clustertrain.plan.compute import FITTED, Constants, Rates
from clustertrain.plan.decoder import Decoder
from clustertrain.plan.layout import Layout
from clustertrain.plan.network import PCIE_GB_S, Network
from clustertrain.plan.stack import Stack

UPDATE_BYTES = 30.0  # AdamW reads weight, gradient and two moments and writes three of them, and the 16-bit copy
HOST_BYTES_S = 200e9  # memory bandwidth that an optimizer on the processors of a two-socket node reaches


@dataclass(frozen=True)
class Machine:
    network: Network
    rates: Rates


@dataclass(frozen=True, kw_only=True)
class Step:
    """Seconds of a step on the slowest rank. Communication: only what no computation hides."""

    compute_s: float
    recompute_s: float
    bubble_s: float
    tensor_s: float
    context_s: float
    pipeline_s: float
    data_s: float
    optimizer_s: float

    @property
    def step_s(self) -> float:
        return (
            self.compute_s + self.recompute_s + self.bubble_s + self.tensor_s
            + self.context_s + self.pipeline_s + self.data_s + self.optimizer_s
        )  # fmt: skip


def of_step(
    model: Decoder, layout: Layout, run: Pass, stack: Stack, machine: Machine, constants: Constants = FITTED
) -> Step:
    c, rates, network = constants, machine.rates, machine.network
    tp, cp, pp, v = layout.tp, layout.cp, layout.pp, layout.virtual_stages
    m = run.grad_accum
    tokens = run.micro_batch * run.seq_len / cp
    along = tp if layout.sequence_parallel else 1
    block = compute.block_s(model, tokens, run.seq_len, tp, along, stack, rates, c)
    again = _redone(block, layout.activation_checkpointing)
    # Tensor parallel: two all-reduces forward, two backward, and forward's again where the block is redone.
    group = network.group(tp, 1)
    activations = tokens * model.dim * 2.0
    passes = 4.0 + (2.0 if layout.activation_checkpointing in ("full", "selective_layer") else 0.0)
    tensor = passes * group.reduce(activations) * (1.0 - stack.tp_hidden)
    ring = network.group(cp, tp)
    kv = tokens * 2 * model.kv_heads * (model.dim // model.heads) / tp * 2.0
    context = 3.0 * ring.gather(kv * cp, cp) * 0.3 if cp > 1 else 0.0

    blocks = model.layers / pp
    forward, backward = max(block.forward, block.host), max(block.backward, block.host * c.backward_host)
    redo = max(again, block.host if again > 0.5 * block.forward else 0.0)
    if tensor and not _gpu_bound(block):  # the communication is launched in vain where the CPU is behind
        tensor = max(0.0, tensor - (block.host * (1 + c.backward_host) - block.forward - block.backward))
    head = sum(compute.head_s(model, tokens, tp, rates, c))
    work = blocks * (forward + backward)
    sends = _sends(model, layout, network, tokens, along) if pp > 1 else 0.0
    one = work + blocks * (redo + tensor + context) + sends
    bubble = (one * (pp - 1) / v + head * (m if pp > 1 else 0) * (1 - 1 / pp)) if pp > 1 else 0.0
    data, optimizer = _data(model, layout, run, stack, network, rates, blocks, forward, backward + redo, m)
    return Step(
        compute_s=m * (work + head / pp),
        recompute_s=m * blocks * redo,
        bubble_s=bubble,
        tensor_s=m * blocks * tensor,
        context_s=m * blocks * context,
        pipeline_s=m * sends,
        data_s=data,
        optimizer_s=optimizer,
    )


def _gpu_bound(block: compute.Seconds) -> bool:
    return block.forward >= block.host


def _redone(block: compute.Seconds, mode: str) -> float:
    """Seconds of a block's forward pass that are done twice."""
    return {
        "none": 0.0,
        "full": block.forward,
        "selective": block.pointwise,
        "selective_op": block.pointwise + 0.25 * (block.forward - block.pointwise - block.core),
        "selective_layer": block.forward / 2,
        "selective_attn": block.core,
    }[mode]


def _sends(model: Decoder, layout: Layout, network: Network, tokens: float, along: int) -> float:
    """To and from the neighbouring stages, of one micro-batch."""
    stride = layout.world_size // layout.pp
    neighbours = network.group(2, stride)
    bandwidth = network.link if neighbours.nodes == 1 else network.fabric
    size = tokens * model.dim * 2.0 / along
    return 2.0 * layout.virtual_stages * (size / bandwidth + neighbours.latency)


def _data(
    model: Decoder, layout: Layout, run: Pass, stack: Stack, network: Network, rates: Rates,
    blocks: float, forward: float, backward: float, m: int,
) -> tuple[float, float]:  # fmt: skip
    """(seconds of data-parallel communication that nothing hides, seconds of the optimizer)."""
    inner = layout.tp * layout.cp
    own = (model.layers * model.block_parameters() + 2 * model.vocab_size * model.dim) / (layout.tp * layout.pp)
    shard = network.group(layout.dp_shard * layout.cp, layout.tp)
    replicate = network.group(layout.dp_replicate, inner * layout.dp_shard)
    held = own / (shard.size if layout.sharded else 1)
    updated = held / (layout.dp_replicate if layout.zero1 else 1)
    optimizer = updated * UPDATE_BYTES / (HOST_BYTES_S / network.island if layout.offload else rates.memory)
    if layout.offload:  # gradients down, weights up
        optimizer += held * (stack.reduce_bytes + 2.0) / (PCIE_GB_S * 1e9)
    ranks = layout.gradient_ranks
    if ranks == 1:
        return 0.0, optimizer
    calls = max(1.0, blocks)
    if not layout.sharded:
        group = network.group(ranks, layout.tp)
        sent = group.gather(own * stack.reduce_bytes, calls) + group.gather(
            own * (2.0 if layout.zero1 else stack.reduce_bytes), calls
        )
        hidden = blocks * backward if stack.overlaps else 0.0
        return max(0.05 * sent, sent - hidden), optimizer
    gather = shard.gather(own * 2.0, calls)
    scatter = shard.gather(own * stack.reduce_bytes, calls)
    often = m if not stack.defer_reduction else 1
    if layout.reshard_after_forward:
        fwd = _hidden(gather, blocks * forward, stack) * m
        bwd = _hidden(gather + scatter, blocks * backward, stack) * often
        if often < m:
            bwd += _hidden(gather, blocks * backward, stack) * (m - 1)
    else:
        fwd = _hidden(gather, blocks * forward, stack)
        bwd = _hidden(scatter, blocks * backward, stack) * often
    first = gather / calls
    more = replicate.reduce(held * stack.reduce_bytes, calls) if replicate.size > 1 else 0.0
    return fwd + bwd + first + 0.3 * more, optimizer


def _hidden(sent: float, work: float, stack: Stack) -> float:
    """What shows of ``sent`` seconds beside ``work`` seconds: what is longer, and a tenth for the memory and the
    multiprocessors that both want."""
    return max(0.0, sent - work * stack.overlaps) + 0.1 * min(sent, work)
