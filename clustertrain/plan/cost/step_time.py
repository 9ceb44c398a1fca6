"""Seconds of one optimizer step, and where they go."""

from __future__ import annotations

from dataclasses import dataclass

from clustertrain.plan import pipeline_schedules
from clustertrain.plan.cost import compute
from clustertrain.plan.cost.activations import Pass, dealt
from clustertrain.plan.cost.collectives import PCIE_GB_S, Network
from clustertrain.plan.cost.compute import FITTED, Constants, Rates
from clustertrain.plan.cost.frameworks import Stack
from clustertrain.plan.cost.model_shape import Decoder
from clustertrain.plan.layout import Layout

UPDATE_BYTES = 30.0  # AdamW reads weight, gradient and two moments and writes three of them, and the 16-bit copy
# Shares that show beside what runs meanwhile, by eye: a ring's sends beside attention, replicas' all-reduces beside the
# backward pass of fully sharded groups.
RING_SHOWN, REPLICAS_SHOWN = 0.3, 0.3
HOST_BYTES_S = 200e9  # memory bandwidth that an optimizer on the processors of a two-socket node reaches


@dataclass(frozen=True)
class Machine:
    """``slower``: what a measured run took of what was predicted."""

    network: Network
    rates: Rates
    slower: float = 1.0


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
    along = layout.tp if layout.sequence_parallel else 1
    block, head = of.block, of.head
    again = _redone(block, recompute)
    # torchtitan's and Megatron's selective modes keep what the collectives have brought; ours does not.
    tensor = _tensor(model, layout, run, network, recompute in ("full", "selective", "selective_layer"))
    tensor *= 1.0 - stack.tp_hidden
    context = _context(model, layout, run, network, recompute in ("full", "selective"))
    blocks = model.layers / pp
    # What Python and the launches of a stage take, as if it had a block more: a floor below which no GPU gets it done.
    host = block.host * (1.0 + (layout.virtual_stages / blocks if pp > 1 else 0.0))
    forward, backward = max(block.forward, host), max(block.backward, host * c.backward_host)
    redo = max(again, host if again > 0.5 * block.forward else 0.0)
    if tensor and block.forward < host:  # the GPU waits for the CPU anyway, and communicates meanwhile
        tensor = max(0.0, tensor - (host * (1 + c.backward_host) - block.forward - block.backward))
    done = blocks * (forward + backward)
    sends = _sends(model, layout, run, network, along) if pp > 1 else 0.0
    one = done + blocks * (redo + tensor + context) + sends
    late = _imbalance(model, layout, one / blocks, head, stack)
    slower = machine.slower
    return Core(
        compute_s=slower * m * (done + head / pp),
        recompute_s=slower * m * blocks * redo,
        bubble_s=slower * (pipeline_schedules.waiting(layout, m) * one + m * late),
        tensor_s=slower * m * blocks * tensor,
        context_s=slower * m * blocks * context,
        pipeline_s=slower * m * sends,
        forward=slower * blocks * forward,
        backward=slower * blocks * (backward + redo),
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
        data_s=data * machine.slower,
        optimizer_s=optimizer * machine.slower,
    )


def _imbalance(model: Decoder, layout: Layout, block: float, head: float, stack: Stack) -> float:
    """Seconds of one micro-batch by which the slowest rank of a pipeline is behind the average, on which the others
    wait. ``block``: one of its blocks, with all that goes with it."""
    if layout.pp == 1:
        return 0.0
    average = (model.layers * block + head) / layout.pp
    if stack.even_stages:
        return model.layers / layout.pp * block + head - average
    early, final = dealt(model, pipeline_schedules.stages(layout))
    others = layout.virtual_stages - 1
    slowest = max((others + 1) * early * block, (others * early + final) * block + head)
    return max(0.0, slowest - average)


def _tensor(model: Decoder, layout: Layout, run: Pass, network: Network, again: bool) -> float:
    """Of one block and micro-batch: two all-reduces forward, two backward (arXiv 1909.08053, section 3; with sequence
    parallel as many bytes in other collectives), and forward's again where the block is redone."""
    if layout.tp == 1:
        return 0.0
    size = run.micro_batch * run.seq_len / layout.cp * model.dim * run.compute_bytes
    return (6.0 if again else 4.0) * network.group(layout.tp, 1).reduce(size)


def _context(model: Decoder, layout: Layout, run: Pass, network: Network, again: bool) -> float:
    """Of one block and micro-batch: keys and values of the others gathered, their gradients scattered back, and
    gathered again where the block is redone. A ring sends them in both passes, beside attention."""
    if layout.cp == 1:
        return 0.0
    kv = run.micro_batch * run.seq_len * 2 * model.kv_heads * (model.dim // model.heads) / layout.tp * run.compute_bytes
    group = network.group(layout.cp, layout.tp)
    if run.parallel.context == "ring":
        return RING_SHOWN * 3.0 * group.gather(kv, layout.cp)
    return (3.0 if again else 2.0) * group.gather(kv)


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


def _sends(model: Decoder, layout: Layout, run: Pass, network: Network, along: int) -> float:
    """To and from the neighbouring stages, of one micro-batch."""
    stride = layout.world_size // layout.pp
    neighbours = network.group(2, stride)
    bandwidth = network.link if neighbours.nodes == 1 else network.fabric
    size = run.micro_batch * run.seq_len / layout.cp * model.dim * run.compute_bytes / along
    return 2.0 * layout.virtual_stages * (size / bandwidth + neighbours.latency)


def _data(core: Core, model: Decoder, layout: Layout, run: Pass, stack: Stack, machine: Machine) -> tuple[float, float]:
    """(seconds of data-parallel communication that nothing hides, seconds of the optimizer)."""
    network, m = machine.network, run.grad_accum
    own = model.parameters() / (layout.tp * layout.pp)
    shard = network.group(layout.dp_shard * layout.cp, layout.tp)
    held = own / (shard.size if layout.sharded else 1)
    optimizer = _optimizer(held, layout, run, stack, machine)
    if layout.gradient_ranks == 1:
        return 0.0, optimizer
    calls = max(1.0, model.layers / layout.pp)
    deferred = layout.defer_reduction or layout.pp > 1
    if not layout.sharded:  # DDP and its like reduce once a step; fully_shard does so for replicas of split models too
        often = m if stack.wraps_parts and layout.fully_sharded and not deferred else 1
        return often * _replicated(own, calls, core, layout, stack, machine), optimizer
    reductions = 1 if stack.defer_reduction and deferred else m
    gather, scatter = shard.gather(own * run.compute_bytes, calls), shard.gather(own * stack.reduce_bytes, calls)
    if layout.reshard_after_forward:
        shown = m * _shown(gather, core.forward, stack) + reductions * _shown(gather + scatter, core.backward, stack)
        shown += (m - reductions) * _shown(gather, core.backward, stack)
    else:  # in a pipeline once; else fully_shard reshards after each backward pass all the same
        gathers = 1 if layout.pp > 1 else m
        shown = gathers * _shown(gather, core.forward, stack) + reductions * _shown(scatter, core.backward, stack)
    if layout.dp_replicate > 1:
        replicate = network.group(layout.dp_replicate, layout.tp * layout.cp * layout.dp_shard)
        shown += reductions * REPLICAS_SHOWN * replicate.reduce(held * stack.reduce_bytes, calls)
    return shown + gather / calls, optimizer  # nothing runs yet while the first block's parameters come


def _replicated(own: float, calls: float, core: Core, layout: Layout, stack: Stack, machine: Machine) -> float:
    """One reduction of the gradients of replicas. ZeRO-1 here is DDP's all-reduce, and then each rank's share of the
    parameters to all, with nothing to hide it; a distributed optimizer scatters the gradients and gathers 16 bit."""
    group = machine.network.group(layout.gradient_ranks, layout.tp)
    sent = group.reduce(own * stack.reduce_bytes, calls)
    after = 0.0
    if layout.zero1 and stack.deals_whole:
        after = group.gather(own * stack.weight_bytes)
    elif layout.zero1:
        sent = group.gather(own * stack.reduce_bytes, calls) + group.gather(own * 2.0, calls)
    return max(0.05 * sent, sent - core.backward * stack.overlaps) + after


def _optimizer(held: float, layout: Layout, run: Pass, stack: Stack, machine: Machine) -> float:
    """Seconds of its step, which moves more than it computes."""
    updated = held
    if layout.zero1:
        updated /= stack.zero_group or layout.gradient_ranks
    if not layout.offload:
        return updated * UPDATE_BYTES / machine.rates.memory
    host = updated * UPDATE_BYTES * machine.network.per_node / HOST_BYTES_S
    # Gradients down; weights up once, or the whole shard for each gathering where it lives in the host's memory.
    up = 2.0 * run.grad_accum * stack.weight_bytes if stack.offloads_weights else 2.0
    return host + held * (stack.reduce_bytes + up) / (PCIE_GB_S * 1e9)


def _shown(sent: float, work: float, stack: Stack) -> float:
    """What shows of ``sent`` seconds beside ``work`` seconds: what is longer, and a tenth for the memory and the
    multiprocessors that both want."""
    return max(0.0, sent - work * stack.overlaps) + 0.1 * min(sent, work)
