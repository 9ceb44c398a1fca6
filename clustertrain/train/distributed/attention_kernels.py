"""The kernels of attention that the recipe asks for: torch's scaled-dot-product backends, and masks of documents."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from clustertrain.config.recipe import Recipe
from clustertrain.config.train import AttentionBackend
from clustertrain.plan.attention import AttentionChoice, DocumentKernel, choose_document_kernel
from clustertrain.train.core.context import RankContext
from clustertrain.train.distributed.context_parallel import SelfAttention, prefers_cudnn
from clustertrain.train.distributed.document_masks import FlexKernel

_BACKENDS: dict[AttentionBackend, SDPBackend] = {
    "math": SDPBackend.MATH,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
_NO_KERNEL = ("no available kernel", "no viable backend")  # torch 2.13, sdp_utils.cpp and attention.cpp


def force_backend(context: RankContext) -> AbstractContextManager[Any]:
    """Return a context in which all scaled-dot-product attention of the process uses ``train.attention_backend``."""
    backend = context.attention_backend
    return nullcontext() if backend == "auto" else sdpa_kernel(_BACKENDS[backend])


def explain_missing_kernel(error: BaseException, context: RankContext) -> None:
    """Add a note that names the key to torch's error about a missing kernel; ignore other errors."""
    if context.attention_backend != "auto" and any(text in str(error).lower() for text in _NO_KERNEL):
        error.add_note(
            f'train.attention_backend = "{context.attention_backend}" cannot compute this attention; the '
            'warnings above say why\n  fix: use another backend, or "auto"'
        )


def configure(model_part: nn.Module, context: RankContext) -> None:
    """Set the kernels of each :class:`SelfAttention` of ``model_part``, a model or pipeline stage."""
    kernel = find_document_kernel(context.spec.recipe, context) if context.spec is not None else None
    flex = FlexKernel(compiled=True) if kernel is not None and kernel.is_flex else None
    modules = [m for m in model_part.modules() if isinstance(m, SelfAttention)]
    is_cudnn_preferred = bool(modules) and prefers_cudnn(context.device)
    for module in modules:
        module.backend, module.flex, module.prefers_cudnn = context.attention_backend, flex, is_cudnn_preferred


def find_document_kernel(recipe: Recipe, context: RankContext) -> DocumentKernel | None:
    """Return the kernel for masks of documents on this rank's device; None without ``data.attention = "document"``."""
    if not recipe.attends_in_documents:
        return None
    from torch.utils._triton import has_triton

    can_compile = context.device.type != "cpu" and has_triton()
    return choose_document_kernel(
        AttentionChoice.of(recipe), context.layout, context.device.type, has_triton=can_compile
    )
