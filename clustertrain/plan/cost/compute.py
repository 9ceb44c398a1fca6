"""Seconds that one GPU computes: matmuls at a rate that their shape allows, the rest at the memory's bandwidth."""

from __future__ import annotations

from dataclasses import dataclass

from clustertrain.config.hardware import GpuType
from clustertrain.plan.cost.frameworks import Stack
from clustertrain.plan.cost.model_shape import Decoder


@dataclass(frozen=True)
class Constants:
    """Set on one half of the published configurations by ``python -m benchmarks.planner_fit``; no source of the other
    half has a say in them."""

    # Of the achievable matmul rate, in a training step's heat and power: up to Ampere, Hopper, Blackwell.
    sustained: tuple[float, float, float] = (0.85, 0.71, 0.72)
    low_bits: tuple[float, float, float] = (1.1, 0.88, 0.80)  # more of it: 8 bit, 8 bit with block scales, 4 bit
    wave: float = 0.308  # output elements that a GPU works on at a time, of 4e6: less leaves it partly idle
    depth: float = 41.0  # the inner dimension at which a matmul runs at half its rate
    unaligned: float = 1.65  # cost of dimensions that are no multiple of 64 (NVIDIA's matmul performance guide)
    scores: float = 9.2  # bytes moved for one score of plain attention, forward
    cast: float = 1.53  # of what 8 and 4 bit formats cast and scale
    backward_host: float = 2.5  # launches of a backward pass, of a forward pass's


FITTED = Constants()


@dataclass(frozen=True)
class Rates:
    """``matmul``: FLOP/s of the linear layers, ``half``: of 16-bit matmuls, ``memory``: bytes/s; ``width``: bytes of a
    number in the linear layers."""

    matmul: float
    half: float
    memory: float
    width: int = 2


@dataclass(frozen=True)
class Seconds:
    """Of one rank and micro-batch, for one block: matmuls and attention and the rest, and the CPU's."""

    forward: float
    backward: float
    core: float  # of forward: attention alone, what selective recomputation repeats
    pointwise: float  # of forward: what is neither matmul nor attention
    host: float


# Measured matmul rates of the data sheet's (stas00/ml-engineering): A100 271 of 312, H100 795 of 989, B200 1745 of
# 2250; in 8 bit H100 1403 of 1979, B200 3433 of 4500. Others as their generation; 4 bit as 8 bit.
_ACHIEVABLE = ((0.87, 0.0), (0.80, 0.71), (0.775, 0.763))
_LOW = {"fp8": 0, "mxfp8": 1, "fp4": 2}


def generation(gpu: GpuType) -> int:
    """0: without 8 bit (up to Ampere), 1: with it (Hopper, MI300), 2: with 4 bit (Blackwell)."""
    return 2 if gpu.fp4_tflops else 1 if gpu.fp8_tflops else 0


def rates(gpu: GpuType, precision: str, constants: Constants = FITTED) -> Rates:
    of = generation(gpu)
    half_part, eight_part = _ACHIEVABLE[of]
    sustained = constants.sustained[of] * gpu.power
    half = gpu.tflops * half_part * sustained * 1e12
    memory = gpu.memory_gb_s * 1e9
    if precision in _LOW and gpu.fp8_tflops:
        peak = gpu.fp4_tflops if precision == "fp4" and gpu.fp4_tflops else gpu.fp8_tflops
        low = peak * eight_part * sustained * constants.low_bits[_LOW[precision]] * 1e12
        return Rates(low, half, memory, 1)
    if precision in ("fp32", "tf32"):
        full = (gpu.fp32_tflops or gpu.tflops / 16) * 1e12 * sustained  # a profile's type may not say
        if precision == "tf32" and gpu.bf16:
            full = half / 2
        return Rates(full, full, memory, 4)
    return Rates(half, half, memory, 2)


def matmul_s(m: float, n: float, k: float, rate: float, memory: float, width: int, c: Constants) -> float:
    """Of (m, k) x (k, n), with what small and odd shapes cost."""
    flops = 2.0 * m * n * k
    slow = (1.0 + c.wave * 4e6 / (m * n)) * (1.0 + c.depth / k)
    if n % 64 or k % 64 or m % 8:
        slow *= c.unaligned
    return max(flops / rate * slow, (m * k + k * n + m * n) * width / memory)


def linear_s(tokens: float, inputs: float, outputs: float, r: Rates, c: Constants) -> tuple[float, float]:
    """(forward, backward) of a linear layer: the backward pass has two matmuls of the same size."""
    m, rate, memory, width = tokens, r.matmul, r.memory, r.width
    forward = matmul_s(m, outputs, inputs, rate, memory, width, c)
    backward = matmul_s(m, inputs, outputs, rate, memory, width, c)
    return forward, backward + matmul_s(inputs, outputs, m, rate, memory, width, c)


def block_s(
    model: Decoder,
    tokens: float,
    seq_len: int,
    tp: int,
    along: int,
    stack: Stack,
    r: Rates,
    c: Constants = FITTED,
    *,
    masked: bool = False,
) -> Seconds:
    """One block over ``tokens`` of a rank, ``tp`` ranks a layer, norms and residuals split over ``along`` ranks."""
    dim, hidden = model.dim, model.hidden
    wide = dim + 2 * model.kv_heads * (dim // model.heads)
    up = (2 if model.gated else 1) * hidden
    forward = backward = 0.0
    for inputs, outputs in ((dim, wide / tp), (dim / tp, dim), (dim, up / tp), (hidden / tp, dim)):
        one, two = linear_s(tokens, inputs, outputs, r, c)
        forward += one
        backward += two
    core, core_back = _attention_s(model, tokens, seq_len, tp, stack, r, c)
    if masked:
        core, core_back = 2 * core, 2 * core_back
    # Reads and writes: two norms and residuals; rotary embedding; activation and product.
    moved = max(2, r.width) * (14 * dim / along + 4 * wide / tp + (5 if model.gated else 4) * hidden / tp)
    pointwise = tokens * moved * stack.traffic / r.memory
    if r.width == 1:
        pointwise += tokens * c.cast * 3.0 * (2 * dim / along + (dim + hidden) / tp) / r.memory
    return Seconds(
        forward=forward + core + pointwise,
        backward=backward + core_back + 2 * pointwise,
        core=core,
        pointwise=pointwise,
        host=stack.host_s,
    )


def _attention_s(
    model: Decoder, tokens: float, seq_len: int, tp: int, stack: Stack, r: Rates, c: Constants
) -> tuple[float, float]:
    """(forward, backward). Flash attention skips what a causal mask hides and redoes the scores in the backward pass:
    five matmuls for two (arXiv 2307.08691, section 4.1)."""
    flops = 4.0 * tokens * seq_len * model.dim / tp
    if not stack.plain_attention:
        forward = flops / 2 / (r.half * stack.flash)
        return forward, 2.5 * forward
    scores = tokens * seq_len * model.heads / tp
    matmuls = flops / r.half * (1.0 + c.depth / (model.dim / model.heads))
    moved = scores * c.scores / r.memory
    return matmuls + moved, 2 * matmuls + 1.5 * moved


def head_s(model: Decoder, tokens: float, tp: int, r: Rates, c: Constants = FITTED) -> tuple[float, float]:
    """(forward, backward) of the last matmul and the loss, in 16 bit and fp32."""
    width = model.vocab_size / tp
    half = Rates(r.half, r.half, r.memory)
    one, two = linear_s(tokens, model.dim, -(-width // 64) * 64, half, c)
    loss = tokens * width * 16.0 / r.memory
    return one + loss, two + loss
