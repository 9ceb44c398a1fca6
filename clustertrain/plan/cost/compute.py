"""Compute time of one GPU: matmuls at a rate that depends on their shape, the rest at memory bandwidth."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from clustertrain.config.hardware import GpuType
from clustertrain.config.low_bit import BasePrecision
from clustertrain.plan.cost.adapter_shape import AdapterShape
from clustertrain.plan.cost.frameworks import Framework
from clustertrain.plan.cost.model_shape import DecoderShape


@dataclass(frozen=True)
class CostConstants:
    """Constants fitted on one half of the published configurations by ``python -m benchmarks.planner_fit``.

    The other half, with disjoint sources, is held out.
    """

    # Fraction of the achievable matmul rate sustained in training: up to Ampere, Hopper, Blackwell.
    sustained: tuple[float, float, float] = (0.85, 0.71, 0.72)
    low_bits: tuple[float, float, float] = (1.1, 0.88, 0.80)  # further factor: 8 bit, 8 bit with block scales, 4 bit
    wave: float = 0.308  # output elements per wave, in 4e6: fewer leave the GPU partly idle
    depth: float = 41.0  # inner dimension at which a matmul runs at half its rate
    unaligned: float = 1.65  # factor if dimensions are not multiples of 64 (NVIDIA's matmul performance guide)
    scores: float = 9.2  # bytes moved per score of plain attention, forward
    cast: float = 1.53  # factor for casts and scales of 8- and 4-bit formats
    backward_host: float = 2.5  # launches of a backward pass relative to a forward pass


FITTED_CONSTANTS = CostConstants()
# Bytes that unpacking a weight for a product moves: codes, their 32-bit indices, values in fp32 and in 16 bits.
UNPACK_BYTES: Mapping[BasePrecision, float] = {"unchanged": 0.0, "bf16": 0.0, "int8": 19.0, "nf4": 23.0}


@dataclass(frozen=True)
class GpuRates:
    """Sustained rates of a GPU."""

    matmul: float
    """FLOP/s of the linear layers."""
    half: float
    """FLOP/s of 16-bit matmuls."""
    memory: float
    """Bytes/s of the memory."""
    dtype_bytes: int = 2
    """Bytes per number in the linear layers."""


@dataclass(frozen=True)
class BlockTime:
    """Time of one block for one rank and micro-batch."""

    forward_s: float
    backward_s: float
    attention_s: float  # attention's part of forward
    pointwise_s: float  # part of forward that is neither matmul nor attention
    host_s: float  # time of the CPU per forward pass


# Measured fractions of the data sheet's matmul rates (stas00/ml-engineering): A100 271 of 312, H100 795 of 989, B200
# 1745 of 2250; in 8 bit H100 1403 of 1979, B200 3433 of 4500. Other types as their generation; 4 bit as 8 bit.
_ACHIEVABLE = ((0.87, 0.0), (0.80, 0.71), (0.775, 0.763))
_LOW_PRECISION = {"fp8": 0, "mxfp8": 1, "fp4": 2}


def gpu_generation(gpu: GpuType) -> int:
    """Return 0 without 8 bit (up to Ampere), 1 with 8 bit (Hopper, MI300), 2 with 4 bit (Blackwell)."""
    return 2 if gpu.fp4_tflops else 1 if gpu.fp8_tflops else 0


def build_rates(gpu: GpuType, precision: str, constants: CostConstants = FITTED_CONSTANTS) -> GpuRates:
    """Return the sustained rates of ``gpu`` in ``precision``."""
    index = gpu_generation(gpu)
    half_efficiency, fp8_efficiency = _ACHIEVABLE[index]
    sustained = constants.sustained[index] * gpu.power_limit_factor
    half = gpu.tflops * half_efficiency * sustained * 1e12
    memory = gpu.memory_gb_s * 1e9
    if precision in _LOW_PRECISION and gpu.fp8_tflops:
        peak = gpu.fp4_tflops if precision == "fp4" and gpu.fp4_tflops else gpu.fp8_tflops
        low_rate = peak * fp8_efficiency * sustained * constants.low_bits[_LOW_PRECISION[precision]] * 1e12
        return GpuRates(low_rate, half, memory, 1)
    if precision in ("fp32", "tf32"):
        full_rate = (gpu.fp32_tflops or gpu.tflops / 16) * 1e12 * sustained  # a profile's type may omit it
        if precision == "tf32" and gpu.bf16:
            full_rate = half / 2
        return GpuRates(full_rate, full_rate, memory, 4)
    return GpuRates(half, half, memory, 2)


def matmul_s(m: float, n: float, k: float, rate: float, memory: float, dtype_bytes: int, c: CostConstants) -> float:
    """Return the seconds of (m, k) x (k, n), including the cost of small and unaligned shapes."""
    flops = 2.0 * m * n * k
    slowdown = (1.0 + c.wave * 4e6 / (m * n)) * (1.0 + c.depth / k)
    if n % 64 or k % 64 or m % 8:
        slowdown *= c.unaligned
    return max(flops / rate * slowdown, (m * k + k * n + m * n) * dtype_bytes / memory)


def linear_s(
    tokens: float, inputs: float, outputs: float, r: GpuRates, c: CostConstants, *, is_frozen: bool = False
) -> tuple[float, float]:
    """Return the (forward, backward) seconds of a linear layer.

    Backward has two matmuls of the same size; without the gradient of a frozen weight, one.
    """
    m, rate, memory, dtype_bytes = tokens, r.matmul, r.memory, r.dtype_bytes
    forward = matmul_s(m, outputs, inputs, rate, memory, dtype_bytes, c)
    backward = matmul_s(m, inputs, outputs, rate, memory, dtype_bytes, c)
    if is_frozen:
        return forward, backward
    return forward, backward + matmul_s(inputs, outputs, m, rate, memory, dtype_bytes, c)


def adapter_s(
    model: DecoderShape, tokens: float, tp: int, adapter: AdapterShape, r: GpuRates, c: CostConstants
) -> tuple[float, float]:
    """Return the (forward, backward) seconds that adapters add to a block: their matmuls, and unpacking the base."""
    forward = backward = 0.0
    matrices = adapter.split_matrices(model, tp)
    for name, (outputs, inputs) in matrices.items():
        for n, k in ((adapter.rank, inputs), (outputs, adapter.rank)):
            times = linear_s(tokens, k, n, r, c)
            forward += adapter.share_of.get(name, 0.0) * times[0]
            backward += adapter.share_of.get(name, 0.0) * times[1]
    unpack_s = sum(n * k for n, k in matrices.values()) * UNPACK_BYTES[adapter.base_precision] / r.memory
    return forward + unpack_s, backward + unpack_s


def block_s(
    model: DecoderShape,
    tokens: float,
    seq_len: int,
    tp: int,
    sp_degree: int,
    framework: Framework,
    r: GpuRates,
    c: CostConstants = FITTED_CONSTANTS,
    *,
    is_masked: bool = False,
) -> BlockTime:
    """Return the time of one block for the ``tokens`` of a rank.

    Args:
        tp: ranks that share each layer.
        sp_degree: ranks over which norms and residuals are split.
        is_masked: attention uses an explicit mask and computes its hidden half too.
    """
    dim, hidden, attention_dim = model.dim, model.hidden, model.attention_dim
    qkv_width = attention_dim + 2 * model.kv_dim
    up = (2 if model.gated else 1) * hidden
    forward = backward = 0.0
    for inputs, outputs in ((dim, qkv_width / tp), (attention_dim / tp, dim), (dim, up / tp), (hidden / tp, dim)):
        linear_forward, linear_backward = linear_s(
            tokens, inputs, outputs, r, c, is_frozen=framework.adapter is not None
        )
        forward += linear_forward
        backward += linear_backward
    if framework.adapter is not None:
        added_forward, added_backward = adapter_s(model, tokens, tp, framework.adapter, r, c)
        forward += added_forward
        backward += added_backward
    attention, attention_backward = _attention_s(model, tokens, seq_len, tp, framework, r, c)
    if is_masked:
        attention, attention_backward = 2 * attention, 2 * attention_backward
    # Reads and writes: two norms and residuals; rotary embedding; activation and product.
    moved_bytes = max(2, r.dtype_bytes) * (
        14 * dim / sp_degree + 4 * qkv_width / tp + (5 if model.gated else 4) * hidden / tp
    )
    pointwise = tokens * moved_bytes * framework.traffic / r.memory
    if r.dtype_bytes == 1:
        pointwise += tokens * c.cast * 3.0 * (2 * dim / sp_degree + (attention_dim + hidden) / tp) / r.memory
    return BlockTime(
        forward_s=forward + attention + pointwise,
        backward_s=backward + attention_backward + 2 * pointwise,
        attention_s=attention,
        pointwise_s=pointwise,
        host_s=framework.host_s,
    )


def _attention_s(
    model: DecoderShape, tokens: float, seq_len: int, tp: int, framework: Framework, r: GpuRates, c: CostConstants
) -> tuple[float, float]:
    """Return the (forward, backward) seconds of attention.

    Flash attention skips the masked half and recomputes the scores in the backward pass: five matmuls instead of two
    (arXiv 2307.08691, section 4.1).
    """
    flops = 4.0 * tokens * seq_len * model.attention_dim / tp
    if not framework.plain_attention:
        forward = flops / 2 / (r.half * framework.flash)
        return forward, 2.5 * forward
    scores = tokens * seq_len * model.heads / tp
    matmul_time = flops / r.half * (1.0 + c.depth / (model.attention_dim / model.heads))
    traffic_time = scores * c.scores / r.memory
    return matmul_time + traffic_time, 2 * matmul_time + 1.5 * traffic_time


def head_s(
    model: DecoderShape,
    tokens: float,
    tp: int,
    r: GpuRates,
    c: CostConstants = FITTED_CONSTANTS,
    *,
    is_frozen: bool = False,
) -> tuple[float, float]:
    """Return the (forward, backward) seconds of the last matmul, in 16 bit, and the loss, in fp32."""
    width = model.vocab_size / tp
    half = GpuRates(r.half, r.half, r.memory)
    forward, backward = linear_s(tokens, model.dim, -(-width // 64) * 64, half, c, is_frozen=is_frozen)
    loss = tokens * width * 16.0 / r.memory
    return forward + loss, backward + loss
