"""Time of one optimizer step and its parts."""

from __future__ import annotations

from dataclasses import dataclass

from clustertrain.plan import pipeline_schedules
from clustertrain.plan.cost import compute
from clustertrain.plan.cost.activations import PassConfig, block_bytes, split_blocks
from clustertrain.plan.cost.collectives import PCIE_GB_S, Network
from clustertrain.plan.cost.compute import FITTED_CONSTANTS, CostConstants, GpuRates
from clustertrain.plan.cost.frameworks import Framework
from clustertrain.plan.cost.model_shape import DecoderShape
from clustertrain.plan.layout import Layout, recompute_interval

# AdamW reads weight, gradient and two moments, and writes three of them and the 16-bit copy.
UPDATE_BYTES_PER_PARAM = 30.0
# Exposed fractions, set by eye: of a ring's sends during attention, and of replicas' all-reduces during the backward
# pass of fully sharded groups.
RING_EXPOSED, REPLICAS_EXPOSED = 0.3, 0.3
HOST_BYTES_S = 200e9  # memory bandwidth that an optimizer on the CPUs of a two-socket node reaches


@dataclass(frozen=True)
class Machine:
    """Hardware of the ranks."""

    network: Network
    rates: GpuRates
    slowdown: float = 1.0
    """Measured over predicted step time of an earlier run."""


@dataclass(frozen=True, kw_only=True)
class StepEstimate:
    """Seconds of a step on the slowest rank. Communication counts only if exposed."""

    compute_s: float
    recompute_s: float
    bubble_s: float
    tensor_s: float
    context_s: float
    pipeline_s: float
    data_s: float
    optimizer_s: float
    offload_s: float = 0.0  # activations to host memory and back

    @property
    def step_s(self) -> float:
        return (
            self.compute_s + self.recompute_s + self.bubble_s + self.tensor_s
            + self.context_s + self.pipeline_s + self.data_s + self.optimizer_s + self.offload_s
        )  # fmt: skip


@dataclass(frozen=True)
class ComputeTime:
    """Compute time of a rank for one micro-batch: one block, and head with loss."""

    block: compute.BlockTime
    head_s: float


def estimate_compute(
    model: DecoderShape,
    layout: Layout,
    config: PassConfig,
    framework: Framework,
    rates: GpuRates,
    c: CostConstants = FITTED_CONSTANTS,
) -> ComputeTime:
    """Return the compute time, which depends only on tp, cp and micro-batch, so a search can reuse it."""
    tokens = config.micro_batch * config.seq_len / layout.cp
    sp_degree = layout.tp if layout.sequence_parallel else 1
    # With gathered keys and values attention uses an explicit mask and computes its hidden half too.
    is_masked = config.has_document_mask or (layout.cp > 1 and config.parallel.context_parallel_method == "all-gather")
    return ComputeTime(
        compute.block_s(model, tokens, config.seq_len, layout.tp, sp_degree, framework, rates, c, is_masked=is_masked),
        sum(compute.head_s(model, tokens, layout.tp, rates, c, is_frozen=framework.adapter is not None)),
    )


@dataclass(frozen=True)
class StepWithoutDP:
    """Time of a step without data parallelism: the same for every way to shard."""

    compute_s: float
    recompute_s: float
    bubble_s: float
    tensor_s: float
    context_s: float
    pipeline_s: float
    forward_s: float  # of one micro-batch's blocks; hides the transfer of parameters
    backward_s: float  # of one micro-batch's blocks; hides the transfer of parameters and gradients
    offload_s: float = 0.0

    @property
    def total_s(self) -> float:
        return (
            self.compute_s + self.recompute_s + self.bubble_s + self.tensor_s + self.context_s + self.pipeline_s
            + self.offload_s
        )  # fmt: skip


def estimate_step(
    model: DecoderShape,
    layout: Layout,
    config: PassConfig,
    framework: Framework,
    machine: Machine,
    constants: CostConstants = FITTED_CONSTANTS,
) -> StepEstimate:
    """Return the predicted time of a step."""
    compute_time = estimate_compute(model, layout, config, framework, machine.rates, constants)
    without_dp = estimate_without_dp(model, layout, config, framework, machine, compute_time, constants)
    return add_data_parallel(without_dp, model, layout, config, framework, machine)


def estimate_without_dp(
    model: DecoderShape,
    layout: Layout,
    config: PassConfig,
    framework: Framework,
    machine: Machine,
    compute_time: ComputeTime,
    c: CostConstants = FITTED_CONSTANTS,
) -> StepWithoutDP:
    """Return the predicted time of a step without data parallelism."""
    network, m, pp, mode = machine.network, config.grad_accum, layout.pp, layout.activation_checkpointing
    sp_degree = layout.tp if layout.sequence_parallel else 1
    block, head = compute_time.block, compute_time.head_s
    recomputed = _recompute_s(block, mode)
    recomputations = pipeline_schedules.count_recomputations(layout) if framework.is_built_in else 1
    repeats = mode == "selective" or recompute_interval(mode) > 0  # for every Nth layer an upper bound
    # The selective modes of torchtitan and Megatron keep the results of collectives; ours does not.
    tensor = _tensor_parallel_s(model, layout, config, network, repeats or mode == "selective_layer")
    tensor *= 1.0 - framework.tp_hidden
    context = _context_parallel_s(model, layout, config, network, repeats)
    blocks = model.layers / pp
    # CPU time for Python and launches, as if a stage had one more block: a lower bound.
    host = block.host_s * (1.0 + (layout.virtual_stages / blocks if pp > 1 else 0.0))
    forward, backward = max(block.forward_s, host), max(block.backward_s, host * c.backward_host)
    recompute_s = recomputations * max(recomputed, host if recomputed > 0.5 * block.forward_s else 0.0)
    if tensor and block.forward_s < host:  # the GPU waits for the CPU and communicates meanwhile
        tensor = max(0.0, tensor - (host * (1 + c.backward_host) - block.forward_s - block.backward_s))
    compute_s = blocks * (forward + backward)
    send_s = _pipeline_send_s(model, layout, config, network, sp_degree) if pp > 1 else 0.0
    micro_batch_s = compute_s + blocks * (recompute_s + tensor + context) + send_s
    imbalance_s = _imbalance(model, layout, micro_batch_s / blocks, head, framework)
    slowdown = machine.slowdown
    return StepWithoutDP(
        compute_s=slowdown * m * (compute_s + head / pp),
        recompute_s=slowdown * m * blocks * recompute_s,
        bubble_s=slowdown * (pipeline_schedules.bubble_micro_batches(layout, m) * micro_batch_s + m * imbalance_s),
        tensor_s=slowdown * m * blocks * tensor,
        context_s=slowdown * m * blocks * context,
        pipeline_s=slowdown * m * send_s,
        forward_s=slowdown * blocks * forward,
        backward_s=slowdown * blocks * (backward + recompute_s),
        offload_s=slowdown * m * _activation_offload_s(model, layout, config, framework, blocks),
    )


def add_data_parallel(
    without_dp: StepWithoutDP,
    model: DecoderShape,
    layout: Layout,
    config: PassConfig,
    framework: Framework,
    machine: Machine,
) -> StepEstimate:
    """Return the step time with data-parallel communication and the optimizer added."""
    data_s, optimizer_s = _data_parallel_s(without_dp, model, layout, config, framework, machine)
    return StepEstimate(
        compute_s=without_dp.compute_s,
        recompute_s=without_dp.recompute_s,
        bubble_s=without_dp.bubble_s,
        tensor_s=without_dp.tensor_s,
        context_s=without_dp.context_s,
        pipeline_s=without_dp.pipeline_s,
        data_s=data_s * machine.slowdown,
        optimizer_s=optimizer_s * machine.slowdown,
        offload_s=without_dp.offload_s,
    )


def _activation_offload_s(
    model: DecoderShape, layout: Layout, config: PassConfig, framework: Framework, blocks: float
) -> float:
    """Return the seconds per micro-batch in which the activations of ``blocks`` blocks move to the host and back.

    Nothing hides them: the copies are in the stream of the computation.
    """
    if not config.parallel.activation_offload or not framework.is_built_in:
        return 0.0
    tokens = config.micro_batch * config.seq_len / layout.cp
    return 2 * tokens * blocks * block_bytes(model, config, layout, framework) / (PCIE_GB_S * 1e9)


def _imbalance(model: DecoderShape, layout: Layout, block: float, head: float, framework: Framework) -> float:
    """Return the seconds per micro-batch by which the slowest pipeline rank exceeds the average.

    Args:
        block: seconds of one block, including communication.
        head: seconds of the head.
    """
    if layout.pp == 1:
        return 0.0
    average = (model.layers * block + head) / layout.pp
    if framework.even_stages:
        return model.layers / layout.pp * block + head - average
    early_blocks, last_blocks = split_blocks(model, pipeline_schedules.num_stages(layout))
    other_stages = layout.virtual_stages - 1
    slowest = max((other_stages + 1) * early_blocks * block, (other_stages * early_blocks + last_blocks) * block + head)
    return max(0.0, slowest - average)


def _tensor_parallel_s(
    model: DecoderShape, layout: Layout, config: PassConfig, network: Network, is_recomputed: bool
) -> float:
    """Return the seconds of tensor-parallel communication per block and micro-batch.

    Two all-reduces forward, two backward (arXiv 1909.08053, section 3; the same bytes in other collectives with
    sequence parallel), and forward's again if the block is recomputed.
    """
    if layout.tp == 1:
        return 0.0
    size = config.micro_batch * config.seq_len / layout.cp * model.dim * config.compute_bytes
    return (6.0 if is_recomputed else 4.0) * network.group(layout.tp, 1).all_reduce_s(size)


def _context_parallel_s(
    model: DecoderShape, layout: Layout, config: PassConfig, network: Network, is_recomputed: bool
) -> float:
    """Return the seconds of context-parallel communication per block and micro-batch.

    Keys and values are gathered, their gradients scattered back, and gathered again if the block is recomputed. A ring
    sends them in both passes, during attention.
    """
    if layout.cp == 1:
        return 0.0
    kv = config.micro_batch * config.seq_len * 2 * model.kv_dim / layout.tp * config.compute_bytes
    group = network.group(layout.cp, layout.tp)
    if config.parallel.context_parallel_method == "ring":
        return RING_EXPOSED * 3.0 * group.all_gather_s(kv, layout.cp)
    return (3.0 if is_recomputed else 2.0) * group.all_gather_s(kv)


def _recompute_s(block: compute.BlockTime, mode: str) -> float:
    """Return the seconds of a block's forward pass that are recomputed, as the mean over the blocks."""
    if interval := recompute_interval(mode):
        return block.forward_s / interval
    return {
        "none": 0.0,
        "selective": block.pointwise_s,
        "selective_op": block.pointwise_s + 0.25 * (block.forward_s - block.pointwise_s - block.attention_s),
        "selective_layer": block.forward_s / 2,
        "selective_attn": block.attention_s,
    }[mode]


def _pipeline_send_s(
    model: DecoderShape, layout: Layout, config: PassConfig, network: Network, sp_degree: int
) -> float:
    """Return the seconds of sends to and from the neighboring stages per micro-batch."""
    stride = layout.world_size // layout.pp
    neighbours = network.group(2, stride)
    bandwidth = network.link_bytes_s if neighbours.nodes == 1 else network.fabric_bytes_s
    size = config.micro_batch * config.seq_len / layout.cp * model.dim * config.compute_bytes / sp_degree
    return 2.0 * layout.virtual_stages * (size / bandwidth + neighbours.latency_s)


def _data_parallel_s(
    without_dp: StepWithoutDP,
    model: DecoderShape,
    layout: Layout,
    config: PassConfig,
    framework: Framework,
    machine: Machine,
) -> tuple[float, float]:
    """Return the seconds of (exposed data-parallel communication, optimizer)."""
    network, m = machine.network, config.grad_accum
    rank_params = model.parameters() / (layout.tp * layout.pp)
    gathered_bytes = rank_params * config.compute_bytes
    adapter = framework.adapter
    if adapter is not None:
        rank_params = adapter.trained_elements(model, layout.tp) / layout.pp
        gathered_bytes = adapter.gathered_bytes(model, layout.tp, config.compute_bytes) / layout.pp
    shard_group = network.group(layout.dp_shard * layout.cp, layout.tp)
    local_params = rank_params / (shard_group.size if layout.is_sharded else 1)
    optimizer_s = _optimizer_s(local_params, layout, config, framework, machine)
    if layout.gradient_ranks == 1:
        return 0.0, optimizer_s
    calls = max(1.0, model.layers / layout.pp)
    is_deferred = layout.defer_reduction or layout.pp > 1
    if not layout.is_sharded:  # DDP reduces once per step; fully_shard does so for replicas of split models if deferred
        # ZeRO-2 keeps only its share of each micro-batch's gradients.
        is_repeated = framework.fully_shards_replicas and layout.is_fully_sharded and not is_deferred
        reduce_count = m if framework.shards_gradients or is_repeated else 1
        return reduce_count * _replica_reduce_s(rank_params, calls, without_dp, layout, framework, machine), optimizer_s
    reductions = 1 if framework.defer_reduction and is_deferred else m
    gather, scatter = (
        shard_group.all_gather_s(gathered_bytes, calls),
        shard_group.all_gather_s(rank_params * framework.reduce_bytes, calls),
    )
    if layout.reshard_after_forward:
        exposed_s = m * _exposed_s(gather, without_dp.forward_s, framework) + reductions * _exposed_s(
            gather + scatter, without_dp.backward_s, framework
        )
        exposed_s += (m - reductions) * _exposed_s(gather, without_dp.backward_s, framework)
    else:  # once in a pipeline; otherwise fully_shard reshards after each backward pass anyway
        gather_count = 1 if layout.pp > 1 else m
        exposed_s = gather_count * _exposed_s(gather, without_dp.forward_s, framework) + reductions * _exposed_s(
            scatter, without_dp.backward_s, framework
        )
    if layout.dp_replicate > 1:
        replica_group = network.group(layout.dp_replicate, layout.tp * layout.cp * layout.dp_shard)
        exposed_s += (
            reductions * REPLICAS_EXPOSED * replica_group.all_reduce_s(local_params * framework.reduce_bytes, calls)
        )
    return exposed_s + gather / calls, optimizer_s  # nothing hides the gathering of the first block's parameters


def _replica_reduce_s(
    rank_params: float, calls: float, without_dp: StepWithoutDP, layout: Layout, framework: Framework, machine: Machine
) -> float:
    """Return the exposed seconds of one reduction of the gradients of replicas.

    ZeRO-1 here is DDP's all-reduce followed by an exposed all-gather of the updated parameters; a distributed optimizer
    reduce-scatters the gradients and gathers 16-bit parameters.
    """
    group = machine.network.group(layout.gradient_ranks, layout.tp)
    comm_s = group.all_reduce_s(rank_params * framework.reduce_bytes, calls)
    param_gather_s = 0.0
    if layout.zero1 and framework.zero1_whole_params:
        param_gather_s = group.all_gather_s(rank_params * framework.weight_bytes)
    elif layout.zero1:
        comm_s = group.all_gather_s(rank_params * framework.reduce_bytes, calls) + group.all_gather_s(
            rank_params * 2.0, calls
        )
    return max(0.05 * comm_s, comm_s - without_dp.backward_s * framework.overlaps) + param_gather_s


def _optimizer_s(
    local_params: float, layout: Layout, config: PassConfig, framework: Framework, machine: Machine
) -> float:
    """Return the seconds of the optimizer step, which is bound by memory traffic."""
    updated_params = local_params
    if layout.zero1:
        updated_params /= framework.zero_group or layout.gradient_ranks
    if not layout.offload:
        return updated_params * UPDATE_BYTES_PER_PARAM / machine.rates.memory
    host = updated_params * UPDATE_BYTES_PER_PARAM * machine.network.gpus_per_node / HOST_BYTES_S
    # Gradients go down; weights go up once, or for each gathering if they stay in host memory.
    up = 2.0 * config.grad_accum * framework.weight_bytes if framework.offloads_weights else 2.0
    return host + local_params * (framework.reduce_bytes + up) / (PCIE_GB_S * 1e9)


def _exposed_s(comm_s: float, compute_s: float, framework: Framework) -> float:
    """Return the exposed part of ``comm_s`` seconds during ``compute_s`` seconds.

    It is the excess, plus a tenth for the contention for memory and multiprocessors.
    """
    return max(0.0, comm_s - compute_s * framework.overlaps) + 0.1 * min(comm_s, compute_s)
