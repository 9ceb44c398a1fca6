"""A Llama-style decoder: RMSNorm, rotary embeddings, SwiGLU, grouped-query attention, scaled-dot-product attention."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from clustertrain.config.model import Activation, ModelSpec, RopeScalingSpec
from clustertrain.train.distributed.context_parallel import SelfAttention
from clustertrain.train.distributed.document_masks import DocumentAttention
from clustertrain.train.distributed.dropout import Dropout


class RotaryTable:
    """Cosines and sines of the rotary embedding, computed on first use.

    They are not buffers: a model built on the meta device would have to refill them, and checkpoints would store them.
    """

    def __init__(self, head_dim: int, theta: float, scaling: RopeScalingSpec | None = None) -> None:
        self._head_dim = head_dim
        self._theta = theta
        self._scaling = scaling or RopeScalingSpec()
        self._cached: tuple[torch.Tensor, torch.Tensor] | None = None

    def get(self, length: int, device: torch.device, first: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Return two fp32 tables (length, head_dim / 2), cosines and sines, for positions from ``first`` on."""
        end = first + length
        if self._cached is None or self._cached[0].shape[0] < end or self._cached[0].device != device:
            exponent = torch.arange(0, self._head_dim, 2, device=device, dtype=torch.float32) / self._head_dim
            frequencies = scale_frequencies(self._theta**-exponent, self._scaling)
            angles = torch.outer(torch.arange(end, device=device, dtype=torch.float32), frequencies)
            self._cached = angles.cos(), angles.sin()
        cos, sin = self._cached
        return cos[first:end], sin[first:end]


def scale_frequencies(frequencies: torch.Tensor, scaling: RopeScalingSpec) -> torch.Tensor:
    """Return rotary ``frequencies`` (head_dim / 2), in radians per position, for an extended context."""
    if scaling.kind == "none":
        return frequencies
    scaled = frequencies / scaling.factor
    if scaling.kind == "linear":
        return scaled
    # Periods of each frequency in the original context: the fewer, the more its frequency is scaled.
    periods = scaling.original_max_seq_len * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept_share = ((periods - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - kept_share) * scaled + kept_share * frequencies


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate pairs (i, i + head_dim/2) of ``x`` (batch, heads, length, head_dim) by the angle of their position, in
    fp32; ``cos`` and ``sin`` are (length, head_dim / 2), or (batch, 1, length, head_dim / 2)."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)


class OffsetRMSNorm(nn.RMSNorm):
    """RMS norm that multiplies by 1 + weight, in fp32 as in Gemma."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.float(), self.normalized_shape, 1.0 + self.weight.float(), self.eps).type_as(x)


def build_norm(spec: ModelSpec, size: int) -> nn.RMSNorm:
    return (OffsetRMSNorm if spec.norm_offset else nn.RMSNorm)(size, eps=spec.norm_eps)


class Attention(nn.Module):
    def __init__(self, spec: ModelSpec, table: RotaryTable, *, causal: bool = True) -> None:
        super().__init__()
        self.head_dim = spec.head_size
        self.table = table
        self.q = nn.Linear(spec.dim, spec.attention_dim, bias=spec.qkv_bias)
        self.k = nn.Linear(spec.dim, spec.kv_dim, bias=spec.qkv_bias)
        self.v = nn.Linear(spec.dim, spec.kv_dim, bias=spec.qkv_bias)
        self.q_norm = build_norm(spec, self.head_dim) if spec.qk_norm else nn.Identity()
        self.k_norm = build_norm(spec, self.head_dim) if spec.qk_norm else nn.Identity()
        self.core = SelfAttention(causal=causal)
        self.out = nn.Linear(spec.attention_dim, spec.dim, bias=False)

    def prepare_documents(self, document_starts: torch.Tensor, dtype: torch.dtype) -> DocumentAttention:
        """Return the tables and the mask that all layers share; see :meth:`SelfAttention.document_mask`."""
        positions = self.core.document_positions(document_starts)
        length = positions.shape[1]
        cos, sin = self.table.get(self.core.first_position(length) + length, positions.device)
        mask = self.core.document_mask(document_starts, dtype)
        return DocumentAttention(cos[positions][:, None], sin[positions][:, None], mask)

    def forward(self, x: torch.Tensor, documents: DocumentAttention | None = None) -> torch.Tensor:
        batch, length, _ = x.shape
        if documents is None:
            cos, sin = self.table.get(length, x.device, self.core.first_position(length))
        else:
            cos, sin = documents.cos, documents.sin
        # -1: tensor parallelism splits the heads, so this rank's projections may have fewer.
        q = self.q(x).view(batch, length, -1, self.head_dim)
        k = self.k(x).view(batch, length, -1, self.head_dim)
        # Autocast computes norms in fp32, which attention does not need.
        q = rotate(self.q_norm(q).type_as(q).transpose(1, 2), cos, sin)
        k = rotate(self.k_norm(k).type_as(k).transpose(1, 2), cos, sin)
        v = self.v(x).view(batch, length, -1, self.head_dim).transpose(1, 2)
        y: torch.Tensor = self.core(q, k, v, documents.mask if documents is not None else None)
        out: torch.Tensor = self.out(y.transpose(1, 2).reshape(batch, length, -1))
        return out


ACTIVATIONS: Mapping[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu-tanh": partial(F.gelu, approximate="tanh"),
}


class FeedForward(nn.Module):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[spec.activation]
        self.gate = nn.Linear(spec.dim, spec.hidden, bias=False)
        self.up = nn.Linear(spec.dim, spec.hidden, bias=False)
        self.down = nn.Linear(spec.hidden, spec.dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(self.activation(self.gate(x)) * self.up(x))
        return out


class TransformerBlock(nn.Module):
    def __init__(self, spec: ModelSpec, table: RotaryTable, *, causal: bool = True) -> None:
        super().__init__()
        self.attention_norm = build_norm(spec, spec.dim)
        self.attention = Attention(spec, table, causal=causal)
        self.ffn_norm = build_norm(spec, spec.dim)
        self.ffn = FeedForward(spec)
        # Two modules, because the mask is derived from the module's name.
        self.dropout1, self.dropout2 = Dropout(spec.dropout), Dropout(spec.dropout)

    def forward(
        self, x: torch.Tensor, samples: torch.Tensor | None = None, documents: DocumentAttention | None = None
    ) -> torch.Tensor:
        x = x + self.dropout1(self.attention(self.attention_norm(x), documents), samples)
        out: torch.Tensor = x + self.dropout2(self.ffn(self.ffn_norm(x)), samples)
        return out


def init_transformer_parameter(spec: ModelSpec, name: str, tensor: torch.Tensor, generator: torch.Generator) -> None:
    """Initialize the full parameter ``name`` of a transformer of :class:`TransformerBlock`.

    Norms multiply by 1 at the start and biases add 0. Other weights are drawn from a normal distribution with standard
    deviation 0.02. Projections into the residual stream are scaled down with depth, so that its variance does not grow
    with the number of layers.
    """
    if name.endswith(("norm.weight", ".bias")):
        tensor.fill_(0.0 if spec.norm_offset or name.endswith(".bias") else 1.0)
        return
    residual = name.endswith(("attention.out.weight", "ffn.down.weight"))
    deviation = 0.02 / math.sqrt(2 * spec.layers) if residual else 0.02
    tensor.normal_(0.0, deviation, generator=generator)


class TiedHead(nn.Module):
    """Logits from the embedding's weight; a module, so that a tensor-parallel plan can name it."""

    def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.linear(x, weight.to(x.dtype))  # that of a frozen base may have fewer bits


class Decoder(nn.Module):
    """Language model from token ids (batch, length) to logits (batch, length, vocab_size).

    A pipeline stage is this module without the units of other stages: without ``norm`` it returns hidden states (batch,
    length, dim), and without ``embed`` it takes them as input.
    """

    TP_PLAN: ClassVar[dict[str, str]] = {
        "embed": "embedding",
        "layers.*.attention_norm": "sequence",
        "layers.*.attention": "gather",
        "layers.*.attention.[qkv]": "colwise",
        "layers.*.attention.out": "rowwise",
        "layers.*.ffn_norm": "sequence",
        "layers.*.ffn": "gather",
        "layers.*.ffn.gate": "colwise",
        "layers.*.ffn.up": "colwise",
        "layers.*.ffn.down": "rowwise",
        "norm": "sequence",
        "head": "head",
    }

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = spec
        self.tp_plan = {**self.TP_PLAN, **({"layers.*.attention.[qk]_norm": "heads"} if spec.qk_norm else {})}
        table = RotaryTable(spec.head_size, spec.rope_theta, spec.rope_scaling)
        self.embed: nn.Embedding | None = nn.Embedding(spec.vocab_size, spec.dim)
        self.dropout = Dropout(spec.dropout)
        # A dict, so that layers keep their names in a pipeline stage that holds only some.
        self.layers = nn.ModuleDict({str(i): TransformerBlock(spec, table) for i in range(spec.layers)})
        self.norm: nn.RMSNorm | None = build_norm(spec, spec.dim)
        head = TiedHead() if spec.tie_embeddings else nn.Linear(spec.dim, spec.vocab_size, bias=False)
        self.head: nn.Module | None = head

    @property
    def pipeline_units(self) -> list[tuple[str, ...]]:
        """The units of pipeline stages, in execution order; a tied embedding belongs to two."""
        tied = ("embed",) if self.spec.tie_embeddings else ()
        return [("embed",), *((f"layers.{n}",) for n in self.layers), ("norm", "head", *tied)]

    @property
    def tp_divides(self) -> dict[str, int]:
        """Sizes that tensor parallelism must divide, by recipe key."""
        spec = self.spec
        sizes = {"heads": spec.heads, "kv_heads": spec.kv_heads, "ffn_dim": spec.hidden, "vocab_size": spec.vocab_size}
        return {f"model.{name}": size for name, size in sizes.items()}

    def forward(
        self,
        tokens: torch.Tensor,
        samples: torch.Tensor | None = None,
        document_starts: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute logits, or hidden states in a stage without the head.

        Args:
            tokens: token ids (batch, length) or hidden states (batch, length, dim); or pairs of sequences, (batch, 2,
                …), which keep that shape.
            samples: (batch,) int64, position of each sample in the run, which seeds dropout.
            document_starts: (batch, length) int64, position in the sample of the first token of each token's document.
                Tokens then attend only to their own document, with rotary positions that start at 0 in each. None: to
                the whole sample.
        """
        if samples is not None:
            samples = samples.to(tokens.device, non_blocking=True)
        if tokens.dim() == (4 if tokens.is_floating_point() else 3):
            # Both sequences of a pair drop the same, so that they differ by their text only.
            pair_samples = samples.repeat_interleave(2) if samples is not None else None
            output = self._compute(tokens.flatten(0, 1), pair_samples, None)
            return output.view(*tokens.shape[:2], *output.shape[1:])
        return self._compute(tokens, samples, document_starts)

    def _compute(
        self, tokens: torch.Tensor, samples: torch.Tensor | None, document_starts: torch.Tensor | None
    ) -> torch.Tensor:
        """Compute the output of :meth:`forward` for single sequences."""
        x = tokens
        if not tokens.is_floating_point():
            assert self.embed is not None
            x = self.embed(tokens)
            if self.spec.scale_embeddings:
                x = x * torch.tensor(self.spec.dim**0.5, dtype=x.dtype, device=x.device)
            x = self.dropout(x, samples)
        documents = self._prepare_documents(document_starts, x) if document_starts is not None else None
        for layer in self.layers.values():
            x = layer(x, samples, documents)
        if self.norm is None:
            return x
        assert self.head is not None
        # Tied here rather than by sharing one parameter: materializing the model from the meta device would untie it.
        tied = (self.embed.weight,) if self.spec.tie_embeddings and self.embed is not None else ()
        logits: torch.Tensor = self.head(self.norm(x), *tied)
        return logits

    def _prepare_documents(self, document_starts: torch.Tensor, x: torch.Tensor) -> DocumentAttention | None:
        """Return the mask and tables for hidden states ``x``; None in a stage without layers."""
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        layer = next(iter(self.layers.values()), None)
        if layer is None:
            return None
        assert isinstance(layer, TransformerBlock)
        return layer.attention.prepare_documents(document_starts, dtype)

    def init_parameter(self, name: str, tensor: torch.Tensor, generator: torch.Generator) -> None:
        """Initialize the full parameter ``name``."""
        init_transformer_parameter(self.spec, name, tensor, generator)
