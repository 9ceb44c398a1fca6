"""Kernels of attention: which one computes the masks of documents, and which requests cannot run."""

from __future__ import annotations

import msgspec

from clustertrain.config.hardware import GpuType
from clustertrain.config.recipe import Recipe
from clustertrain.config.train import AttentionBackend, Precision
from clustertrain.errors import ConfigError
from clustertrain.plan.layout import Layout
from clustertrain.plan.pipeline_schedules import SPLIT_BACKWARD_SCHEDULES

MIN_FLEX_HEAD_DIM = 16  # torch 2.13, flex_attention


class DocumentKernel(msgspec.Struct, frozen=True, kw_only=True):
    """The kernel of ``data.attention = "document"``."""

    is_flex: bool
    """``flex_attention``, which skips what is masked; otherwise scaled-dot-product attention with a mask of all
    positions."""
    reason: str

    def describe(self) -> str:
        if self.is_flex:
            return f"compiled flex_attention, since {self.reason}"
        return f"scaled-dot-product attention with a mask of all positions, since {self.reason}"


class AttentionChoice(msgspec.Struct, frozen=True, kw_only=True):
    """What a recipe says about attention."""

    backend: AttentionBackend = "auto"
    in_documents: bool = False
    """Tokens attend only to their own document."""
    head_dim: int = 0
    """Width of an attention head; 0: unknown."""

    @classmethod
    def of(cls, recipe: Recipe) -> AttentionChoice:
        return cls(
            backend=recipe.train.attention_backend,
            in_documents=recipe.attends_in_documents,
            head_dim=recipe.model.head_size if recipe.model.is_decoder else 0,
        )

    def has_dense_mask(self, layout: Layout, device: str) -> bool:
        """Return whether attention takes a mask of all pairs of positions, because of documents."""
        return self.in_documents and not choose_document_kernel(self, layout, device).is_flex


def choose_document_kernel(
    choice: AttentionChoice, layout: Layout, device: str, *, has_triton: bool = True
) -> DocumentKernel:
    """Return the kernel for masks of documents.

    Args:
        has_triton: Triton can compile for the GPU. The plan assumes so.
    """
    backend, head_dim = choice.backend, choice.head_dim
    refusals = (
        (device == "cpu", "flex_attention has no backward pass on CPUs"),
        (backend != "auto", f'train.attention_backend is "{backend}"'),
        (not has_triton, "flex_attention needs Triton, which cannot be used here"),
        (
            0 < head_dim < MIN_FLEX_HEAD_DIM,
            f"flex_attention needs heads of at least {MIN_FLEX_HEAD_DIM} elements, not {head_dim}",
        ),
        (
            layout.schedule in SPLIT_BACKWARD_SCHEDULES,
            f"schedule {layout.schedule} cannot split a compiled backward pass",
        ),
    )
    reason = next((text for applies, text in refusals if applies), "")
    return DocumentKernel(is_flex=not reason, reason=reason or "it skips what lies outside the documents")


def check_attention(recipe: Recipe, precision: Precision, layout: Layout, device: str, gpu: GpuType | None) -> None:
    """Raise ConfigError if attention cannot run on the device with the requested backend, masks and layout."""
    backend, in_documents = recipe.train.attention_backend, recipe.attends_in_documents
    is_ring = layout.cp > 1 and recipe.parallel.context_parallel_method == "ring"
    is_gathered = layout.cp > 1 and not is_ring
    if in_documents and is_ring:
        raise ConfigError(
            'data.attention = "document" with parallel.context_parallel_method = "ring": torch\'s ring attention takes '
            "no mask",
            fix='use parallel.context_parallel_method = "all-gather", or cp = 1',
        )
    if backend == "auto":
        return
    is_gpu = device != "cpu"
    for applies, problem, fix in (
        (not is_gpu and backend in ("efficient", "cudnn"), "it exists on GPUs only", 'use "flash" or "math"'),
        (
            is_gpu and backend in ("flash", "cudnn") and precision in ("fp32", "tf32"),
            f"it computes in 16 bits only, and the precision is {precision}",
            'use "efficient" or "math", or train.precision = "bf16"',
        ),
        (
            is_gpu and backend == "flash" and gpu is not None and not gpu.bf16,
            f"it needs Ampere or a later GPU, not {gpu.name if gpu else ''}",
            'use "efficient" or "math"',
        ),
        (
            is_gpu and backend == "flash" and in_documents,
            'it takes no mask, which data.attention = "document" needs with a forced backend',
            'use "efficient", "cudnn" or "math"; or "auto", for flex_attention',
        ),
        (
            is_gpu and backend == "flash" and is_gathered,
            f"it takes no mask, which cp {layout.cp} with gathered keys needs",
            'use "efficient", "cudnn" or "math", or parallel.context_parallel_method = "ring"',
        ),
        (
            is_ring and backend == "math",
            "ring attention needs a fused kernel",
            'use another one, or parallel.context_parallel_method = "all-gather"',
        ),
    ):
        if applies:
            raise ConfigError(f'train.attention_backend = "{backend}": {problem}', fix=fix)
