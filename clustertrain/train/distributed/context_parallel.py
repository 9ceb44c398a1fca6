"""Context parallelism: each rank holds one contiguous chunk of a sequence and attends to all earlier keys and
values."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_map_only

from clustertrain.config.train import AttentionBackend
from clustertrain.errors import ConfigError, UnsuitableEnvironment, UsageError
from clustertrain.train.core.context import RankContext
from clustertrain.train.distributed import divisibility, document_masks, dropout
from clustertrain.train.distributed.document_masks import AttentionMask, FlexKernel

_CUDNN_9_15_0 = 91_500


class SelfAttention(nn.Module):
    """Scaled-dot-product self-attention over full sequences, even if this rank holds only a chunk.

    It has no parameters. A custom model that supports context parallelism uses it in place of
    ``F.scaled_dot_product_attention``, and :meth:`first_position` for position-dependent values. One that supports
    ``data.attention = "document"`` builds one :meth:`document_mask` per forward pass and passes it to all its layers.
    """

    def __init__(self, *, causal: bool = True) -> None:
        super().__init__()
        self.causal = causal
        self.mesh: DeviceMesh | None = None
        self.rank = 0
        self.ring = False
        self.prefers_cudnn = False
        self.backend: AttentionBackend = "auto"
        self.flex: FlexKernel | None = None
        """The kernel for document masks; None: scaled-dot-product attention with a mask of all positions."""

    def first_position(self, length: int) -> int:
        """Return the position in the sequence of the first of this rank's ``length`` tokens."""
        return self.rank * length

    def document_positions(self, document_starts: torch.Tensor) -> torch.Tensor:
        """Return the position in its document of each of this rank's tokens, (batch, length) int64.

        Args:
            document_starts: position in the sample of the first token of each token's document, (batch, length) int64.
        """
        length = document_starts.shape[1]
        first = self.first_position(length)
        return torch.arange(first, first + length, device=document_starts.device) - document_starts

    def document_mask(self, document_starts: torch.Tensor, dtype: torch.dtype) -> AttentionMask:
        """Return the mask with which each of this rank's tokens sees only its own document, up to itself.

        Args:
            document_starts: as for :meth:`document_positions`.
            dtype: of the queries.

        Raises:
            ConfigError: attention is not causal, or runs as a ring.
        """
        if not self.causal or self.ring:
            raise ConfigError(
                'data.attention = "document" needs causal attention without a ring over the ranks of cp',
                fix='use parallel.context_parallel_method = "all-gather" and SelfAttention(causal=True), or '
                'data.attention = "sample"',
            )
        first = self.first_position(document_starts.shape[1])
        if self.flex is not None:
            return self.flex.build_mask(document_starts, first)
        return document_masks.build_dense_mask(document_starts, first, dtype)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: AttentionMask | None = None
    ) -> torch.Tensor:
        """Attend from ``q`` (batch, heads, length, head_dim) to ``k`` and ``v``; return a tensor shaped like ``q``.

        ``k`` and ``v`` are shaped like ``q``, except that the number of their heads may be a divisor of ``q``'s.

        Args:
            mask: a :meth:`document_mask`; None: each token sees all tokens of the sample, up to itself if ``causal``.
        """
        if mask is not None:
            return self._attend_in_documents(q, k, v, mask)
        if self.mesh is None:
            return self._attend(q, k, v, causal=self.causal)
        if self.ring:
            return _ring_attention(q, k, v, self.mesh, causal=self.causal)
        k, v = _all_gather_kv(torch.stack((k, v)), self.mesh).unbind()
        if not self.causal:
            return self._attend(q, k, v)
        length = q.shape[2]
        kv_length = self.first_position(length) + length
        k, v = k[:, :, :kv_length], v[:, :, :kv_length]
        if self.rank == 0:
            return self._attend(q, k, v, causal=True)
        # is_causal aligns the diagonal of a non-square mask with the upper left corner.
        mask = torch.ones(length, kv_length, dtype=torch.bool, device=q.device).tril(kv_length - length)
        return self._attend(q, k, v, mask=mask)

    def _attend_in_documents(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: AttentionMask
    ) -> torch.Tensor:
        if self.mesh is not None:
            k, v = _all_gather_kv(torch.stack((k, v)), self.mesh).unbind()
            end = self.first_position(q.shape[2]) + q.shape[2]
            k, v = k[:, :, :end], v[:, :, :end]
        if self.flex is not None:
            out: torch.Tensor = self.flex.attend(q, k, v, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1])
            return out
        assert isinstance(mask, torch.Tensor)
        return self._attend(q, k, v, mask=mask)

    def _attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        mask: torch.Tensor | None = None,
        causal: bool = False,
    ) -> torch.Tensor:
        """Attend with a fused kernel: plain products would keep scores of the length squared.

        torch 2.13 has kernels for grouped heads on GPUs for 16 bits only, and with a mask only cuDNN's. Where it does
        not prefer that, it takes plain products. For the memory-efficient kernel, keys and values are repeated for each
        query head.
        """
        has_no_kernel = q.dtype == torch.float32 or (mask is not None and not self.prefers_cudnn)
        if self.backend != "auto":
            has_no_kernel = self.backend == "efficient"
        if q.is_cuda and q.shape[1] != k.shape[1] and has_no_kernel:
            k, v = _repeat_heads(q, k, v)
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1]
        )


def prefers_cudnn(device: torch.device) -> bool:
    """Return whether torch tries cuDNN's attention before the others, as its ``check_prefer_cudnn_attention`` does.

    On Hopper and Blackwell of data centers, with a cuDNN newer than 9.15.0 (pytorch issue 169849), which torch's wheels
    for CUDA 12 do not have, unless an environment variable says otherwise.
    """
    if device.type != "cuda" or os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") == "1":
        return False
    major, minor = torch.cuda.get_device_capability(device)
    cudnn: int = torch.backends.cudnn.version() or 0  # type: ignore[no-untyped-call]
    return major in (9, 10) and minor in (0, 3) and cudnn > _CUDNN_9_15_0


def _repeat_heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values with as many heads as ``q``."""
    groups = q.shape[1] // k.shape[1]
    return (k, v) if groups == 1 else (k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1))


def _all_gather_kv(pair: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Gather (2, batch, heads, length, head_dim) along the length; the backward pass sums gradients and splits them
    again."""
    from torch.distributed._functional_collectives import all_gather_single_autograd

    gathered: torch.Tensor = all_gather_single_autograd(pair.contiguous(), gather_dim=3, group=mesh)
    return gathered


def _ring_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mesh: DeviceMesh, *, causal: bool
) -> torch.Tensor:
    """Attend while keys and values circulate among the ranks.

    This uses torch's context-parallel dispatcher for attention on DTensors, which does not support grouped queries.
    """
    from torch.distributed.tensor import DTensor, Shard

    k, v = _repeat_heads(q, k, v)
    q, k, v = (DTensor.from_local(t, mesh, [Shard(2)], run_check=False) for t in (q, k, v))
    out: Any = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    local: torch.Tensor = out.to_local()
    return local


def check(model: nn.Module, context: RankContext) -> None:
    """Raise if ``model``, the whole model, cannot run with its sequences split.

    Raises:
        ConfigError: it has no :class:`SelfAttention`, or applies dropout to attention weights.
        UnsuitableEnvironment: ring attention is requested without a GPU.
    """
    cp = context.layout.cp
    if context.parallel.context_parallel_method == "ring" and context.device.type == "cpu":
        raise UnsuitableEnvironment(
            'parallel.context_parallel_method = "ring": torch supports ring attention on GPUs only',
            fix='use parallel.context_parallel_method = "all-gather"',
        )
    dropout.check_no_attention_dropout(model, f"cp {cp}")
    if not any(isinstance(m, SelfAttention) for m in model.modules()):
        raise ConfigError(
            f"cp {cp}: {type(model).__name__} would only attend inside each of the {cp} chunks of a sequence",
            fix="use clustertrain.train.distributed.context_parallel.SelfAttention for its attention, or cp = 1",
        )


def apply(model_part: nn.Module, context: RankContext, mesh: DeviceMesh) -> None:
    """Make each :class:`SelfAttention` of ``model_part``, a model or pipeline stage, attend across ``mesh``."""
    ring = context.parallel.context_parallel_method == "ring"
    if ring:
        _enable_ring()
    for module in model_part.modules():
        if isinstance(module, SelfAttention):
            module.mesh, module.ring, module.rank = mesh, ring, mesh.get_local_rank()


def _enable_ring() -> None:
    from torch.distributed.tensor.experimental import _attention

    # Torch's load balancing gives each rank a chunk from both ends; our chunks are contiguous.
    _attention._cp_options.enable_load_balance = False
    # The public context manager also splits its tensors in place and must enclose the backward pass.
    _attention._enable_context_parallel_dispatcher()


def shard_sequence(pair: Any, mesh: DeviceMesh) -> Any:
    """Return this rank's chunk of each tensor (batch, length, ...) in ``pair``, (inputs, target).

    Raises:
        ConfigError: a length does not divide over the ranks.
        UsageError: a tensor has no length dimension.
    """
    ranks, rank = mesh.size(), mesh.get_local_rank()

    def chunk(t: torch.Tensor) -> torch.Tensor:
        if t.dim() < 2:
            raise UsageError(
                f"context parallelism splits tensors (batch, length, ...), but the batch has shape {tuple(t.shape)}",
                fix="provide inputs and targets with a value per position, or use cp = 1",
            )
        divisibility.check("the length of the sequences", t.shape[1], "cp", ranks)
        length = t.shape[1] // ranks
        return t.narrow(1, rank * length, length)

    return tree_map_only(torch.Tensor, chunk, pair)
