"""Seconds of one optimizer step, and where they go."""

from __future__ import annotations

from dataclasses import dataclass

from clustertrain.plan import compute, pipeline
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


@dataclass(frozen=True)
class Work:
    """What a rank computes for one micro-batch: a block, and head with loss."""

    block: compute.Seconds
    head: float


def work_of(model: Decoder, layout: Layout, run: Pass, stack: Stack, rates: Rates, c: Constants = FITTED) -> Work:
    """Depends on tp, cp and micro-batch alone: a search asks once for many layouts."""
    tokens = run.micro_batch * run.seq_len / layout.cp
    along = layout.tp if layout.sequence_parallel else 1
    # Gathered keys and values go with an explicit mask, whose hidden half is computed too.
    masked = layout.cp > 1 and run.parallel.context == "all-gather"
    return Work(
        compute.block_s(model, tokens, run.seq_len, layout.tp, along, stack, rates, c, masked=masked),
        sum(compute.head_s(model, tokens, layout.tp, rates, c)),
    )


@dataclass(frozen=True)
class Core:
    """A step without what its data-parallel ranks do: the same for every way to shard. ``forward`` and ``backward``:
    seconds of one micro-batch's blocks on a rank, under which parameters and gradients may travel."""

    compute_s: float
    recompute_s: float
    bubble_s: float
    tensor_s: float
    context_s: float
    pipeline_s: float
    forward: float
    backward: float

    @property
    def seconds(self) -> float:
        return (
            self.compute_s + self.recompute_s + self.bubble_s + self.tensor_s + self.context_s + self.pipeline_s
        )  # fmt: skip


def of_step(
    model: Decoder, layout: Layout, run: Pass, stack: Stack, machine: Machine, constants: Constants = FITTED
) -> Step:
    work = work_of(model, layout, run, stack, machine.rates, constants)
    core = core_of(model, layout, run, stack, machine, work, constants)
    return with_data(core, model, layout, run, stack, machine)


def core_of(
    model: Decoder, layout: Layout, run: Pass, stack: Stack, machine: Machine, of: Work, c: Constants = FITTED
) -> Core:
    network, m, pp, recompute = machine.network, run.grad_accum, layout.pp, layout.activation_checkpointing
    tokens = run.micro_batch * run.seq_len / layout.cp
    along = layout.tp if layout.sequence_parallel else 1
    block, head = of.block, of.head
    again = _redone(block, recompute)
    tensor = _tensor(model, layout, network, tokens, again > 0 and recompute in ("full", "selective_layer"))
    tensor *= 1.0 - stack.tp_hidden
    context = _context(model, layout, run, network, tokens)
    blocks = model.layers / pp
    # What Python and the launches of a stage take, as if it had a block more: a floor below which no GPU gets it done.
    host = block.host * (1.0 + (layout.virtual_stages / blocks if pp > 1 else 0.0))
    forward, backward = max(block.forward, host), max(block.backward, host * c.backward_host)
    redo = max(again, host if again > 0.5 * block.forward else 0.0)
    if tensor and block.forward < host:  # the GPU waits for the CPU anyway, and communicates meanwhile
        tensor = max(0.0, tensor - (host * (1 + c.backward_host) - block.forward - block.backward))
    done = blocks * (forward + backward)
    sends = _sends(model, layout, network, tokens, along) if pp > 1 else 0.0
    one = done + blocks * (redo + tensor + context) + sends
    return Core(
        compute_s=m * (done + head / pp),
        recompute_s=m * blocks * redo,
        bubble_s=_bubble(layout, m, one, head),
        tensor_s=m * blocks * tensor,
        context_s=m * blocks * context,
        pipeline_s=m * sends,
        forward=blocks * forward,
        backward=blocks * (backward + redo),
    )


def with_data(core: Core, model: Decoder, layout: Layout, run: Pass, stack: Stack, machine: Machine) -> Step:
    data, optimizer = _data(core, model, layout, run, stack, machine)
    return Step(
        compute_s=core.compute_s,
        recompute_s=core.recompute_s,
        bubble_s=core.bubble_s,
        tensor_s=core.tensor_s,
        context_s=core.context_s,
        pipeline_s=core.pipeline_s,
        data_s=data,
        optimizer_s=optimizer,
    )


def _bubble(layout: Layout, m: int, one: float, head: float) -> float:
    """Seconds that a rank waits: while the pipeline fills and drains, and for the stage that has the head as well.
    ``one`` micro-batch of a rank's blocks."""
    if layout.pp == 1:
        return 0.0
    return pipeline.waiting(layout, m) * one + head * m * (1 - 1 / layout.pp)


def _tensor(model: Decoder, layout: Layout, network: Network, tokens: float, again: bool) -> float:
    """Of one block and micro-batch: two all-reduces forward, two backward (arXiv 1909.08053, section 3; with sequence
    parallel as many bytes in other collectives), and forward's again where the block is redone."""
    if layout.tp == 1:
        return 0.0
    return (6.0 if again else 4.0) * network.group(layout.tp, 1).reduce(tokens * model.dim * 2.0)


def _context(model: Decoder, layout: Layout, run: Pass, network: Network, tokens: float) -> float:
    """Of one block and micro-batch: keys and values of the others, forward, backward, and their gradients back. A ring
    sends them beside attention, which hides most of it."""
    if layout.cp == 1:
        return 0.0
    kv = tokens * 2 * model.kv_heads * (model.dim // model.heads) / layout.tp * 2.0
    ring = run.parallel.context == "ring"
    whole = network.group(layout.cp, layout.tp).gather(kv * layout.cp, layout.cp if ring else 1)
    return (0.3 if ring else 1.0) * 3.0 * whole


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


def _data(core: Core, model: Decoder, layout: Layout, run: Pass, stack: Stack, machine: Machine) -> tuple[float, float]:
    """(seconds of data-parallel communication that nothing hides, seconds of the optimizer)."""
    network, m = machine.network, run.grad_accum
    own = (model.layers * model.block_parameters() + 2 * model.vocab_size * model.dim) / (layout.tp * layout.pp)
    shard = network.group(layout.dp_shard * layout.cp, layout.tp)
    held = own / (shard.size if layout.sharded else 1)
    updated = held / (layout.dp_replicate if layout.zero1 else 1)
    optimizer = updated * UPDATE_BYTES / (HOST_BYTES_S / network.island if layout.offload else machine.rates.memory)
    if layout.offload:  # gradients down, weights up
        optimizer += held * (stack.reduce_bytes + 2.0) / (PCIE_GB_S * 1e9)
    if layout.gradient_ranks == 1:
        return 0.0, optimizer
    calls = max(1.0, model.layers / layout.pp)
    if not layout.sharded:
        group = network.group(layout.gradient_ranks, layout.tp)
        sent = group.gather(own * stack.reduce_bytes, calls) + group.gather(
            own * (2.0 if layout.zero1 else stack.reduce_bytes), calls
        )
        return max(0.05 * sent, sent - core.backward * stack.overlaps), optimizer
    gather, scatter = shard.gather(own * 2.0, calls), shard.gather(own * stack.reduce_bytes, calls)
    reductions = 1 if stack.defer_reduction and layout.defer_reduction else m
    if layout.reshard_after_forward:
        shown = m * _shown(gather, core.forward, stack) + reductions * _shown(gather + scatter, core.backward, stack)
        shown += (m - reductions) * _shown(gather, core.backward, stack)
    else:
        shown = _shown(gather, core.forward, stack) + reductions * _shown(scatter, core.backward, stack)
    if layout.dp_replicate > 1:
        replicate = network.group(layout.dp_replicate, layout.tp * layout.cp * layout.dp_shard)
        shown += 0.3 * replicate.reduce(held * stack.reduce_bytes, calls)
    return shown + gather / calls, optimizer  # nothing runs yet while the first block's parameters come


def _shown(sent: float, work: float, stack: Stack) -> float:
    """What shows of ``sent`` seconds beside ``work`` seconds: what is longer, and a tenth for the memory and the
    multiprocessors that both want."""
    return max(0.0, sent - work * stack.overlaps) + 0.1 * min(sent, work)
