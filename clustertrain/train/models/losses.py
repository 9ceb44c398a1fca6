"""What the built-in trainer minimises: each returns a sum in fp32 and how many terms it has.

All are the forms that do not overflow: of logits and not of probabilities. ``torch.nn.functional`` has them fused.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F

from clustertrain.checkpoint.core.state_dict import is_dtensor
from clustertrain.config.recipe import Recipe
from clustertrain.errors import ConfigError
from clustertrain.train.core.step_types import Loss

SumAndCount = tuple[torch.Tensor, "torch.Tensor | int"]


def build_loss(recipe: Recipe) -> Loss:
    """The loss that ``recipe`` names. Of a two-tower model the similarities come divided by its own temperature."""
    spec, kind = recipe.objective, recipe.objective_kind
    if kind == "cross-entropy":
        # Mixed images have probabilities for targets. Elsewhere, float targets may as well be values to predict.
        soft = spec.kind == "cross-entropy" or recipe.data.augment.is_enabled
        return functools.partial(
            cross_entropy, smoothing=spec.label_smoothing, ignore_index=spec.ignore_index, soft_targets=soft
        )
    if kind == "nt-xent":
        is_two_tower = recipe.model.kind == "two-tower"
        return contrastive if is_two_tower else functools.partial(nt_xent, temperature=spec.temperature)
    if kind == "binary-cross-entropy":
        return binary_cross_entropy
    return functools.partial(huber, delta=spec.delta) if kind == "huber" else mse if kind == "mse" else l1


def cross_entropy(
    logits: Any,
    targets: torch.Tensor,
    *,
    smoothing: float = 0.0,
    ignore_index: int = -100,
    soft_targets: bool = True,
) -> SumAndCount:
    """Of ``logits`` (..., classes) and the right classes ``targets`` (...): tokens of a text, or images. Or of
    probabilities ``targets`` (..., classes), as of mixed images.

    Args:
        smoothing: this share of each target is spread over all classes (arXiv 1512.00567, section 7).
        ignore_index: targets of this value count nothing.
        soft_targets: whether floating-point targets are probabilities; otherwise they are an error.

    Raises:
        ConfigError: the shapes differ, there is a single class, or targets are floating-point without
            ``soft_targets``.
    """
    soft = targets.is_floating_point()
    if soft and not soft_targets:
        raise ConfigError(
            f"the targets are {str(targets.dtype).removeprefix('torch.')}, and the recipe does not say which loss they "
            "are for: objective.kind is auto, which means cross-entropy over class numbers",
            fix='set objective.kind: "mse", "l1" or "huber" for values, "binary-cross-entropy" for labels between 0 '
            'and 1, "cross-entropy" for class probabilities; or return class numbers as integers',
        )
    if logits.dim() and logits.shape[-1] == 1:
        raise ConfigError(
            f"cross-entropy over logits of shape {tuple(logits.shape)}: the last dimension is the number of classes, "
            "and the loss of a single class is always 0",
            fix='set objective.kind = "binary-cross-entropy" for yes or no, "mse" for a value to predict; or give the '
            "model an output per class",
        )
    if is_dtensor(logits) and (smoothing or soft):
        logits = logits.full_tensor()  # torch's loss of split logits knows neither
    _check_same_shape("logits", logits.shape if soft else logits.shape[:-1], targets.shape)
    flat = logits.flatten(0, -2).float()
    if soft:
        loss = F.cross_entropy(flat, targets.flatten(0, -2).float(), reduction="sum", label_smoothing=smoothing)
        return loss, targets[..., 0].numel()
    loss = F.cross_entropy(
        flat, targets.flatten(), reduction="sum", label_smoothing=smoothing, ignore_index=ignore_index
    )
    return loss, (targets != ignore_index).sum()


def binary_cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> SumAndCount:
    """Of ``logits`` and ``targets`` of one shape; targets are 0 or 1, or probabilities between."""
    logits, targets = _to_fp32_pair("logits", logits, targets)
    return F.binary_cross_entropy_with_logits(logits, targets, reduction="sum"), targets.numel()


def mse(outputs: torch.Tensor, targets: torch.Tensor) -> SumAndCount:
    """Squared differences of ``outputs`` and ``targets`` of one shape."""
    outputs, targets = _to_fp32_pair("outputs", outputs, targets)
    return F.mse_loss(outputs, targets, reduction="sum"), targets.numel()


def l1(outputs: torch.Tensor, targets: torch.Tensor) -> SumAndCount:
    """Absolute differences of ``outputs`` and ``targets`` of one shape."""
    outputs, targets = _to_fp32_pair("outputs", outputs, targets)
    return F.l1_loss(outputs, targets, reduction="sum"), targets.numel()


def huber(outputs: torch.Tensor, targets: torch.Tensor, *, delta: float) -> SumAndCount:
    """Half the squared differences, from ``delta`` on linear (Huber, "Robust estimation of a location parameter",
    1964), of ``outputs`` and ``targets`` of one shape."""
    outputs, targets = _to_fp32_pair("outputs", outputs, targets)
    return F.huber_loss(outputs, targets, reduction="sum", delta=delta), targets.numel()


def nt_xent(views: Any, targets: Any, *, temperature: float) -> SumAndCount:
    """Of two views of the same samples, a pair of embeddings (batch, dim): each view is told from all other views of
    its micro-batch by their cosines (Chen et al., arXiv 2002.05709, equation 1). So the loss depends on the size of the
    micro-batch; a two-tower model's does not.

    Raises:
        ConfigError: ``views`` is no such pair.
    """
    if not (isinstance(views, (tuple, list)) and len(views) == 2 and views[0].shape == views[1].shape):
        raise ConfigError(
            "objective.kind = 'nt-xent': the model returned no pair of embeddings of one shape (batch, dim)",
            fix="return (first, second), the embeddings of the two views of each sample",
        )
    embeddings = F.normalize(torch.cat(list(views)).float(), dim=-1)
    size = len(views[0])
    with torch.autocast(embeddings.device.type, enabled=False):
        logits = (embeddings @ embeddings.T / temperature).fill_diagonal_(-torch.inf)
    positives = torch.arange(2 * size, device=embeddings.device).roll(size)
    return F.cross_entropy(logits, positives, reduction="sum") / 2, size


def contrastive(similarities: torch.Tensor, texts: torch.Tensor) -> SumAndCount:
    """The symmetric NT-Xent: cross-entropy of telling which second view belongs to a first one, and the reverse,
    averaged (Chen et al., arXiv 2002.05709, equation 1; between two encoders as Radford et al., arXiv 2103.00020,
    figure 3).

    Args:
        similarities: (groups, group, group), of each first view to each second view of its group, already divided by
            the temperature. The log-sum-exp subtracts the largest, so that a low temperature does not overflow.
        texts: (groups * group,): which text a pair was taken from. Where the order of the samples begins anew, a group
            may hold one text twice; it is no negative of itself.
    """
    groups, size, _ = similarities.shape
    text_ids = texts.view(groups, size)
    diagonal = torch.eye(size, dtype=torch.bool, device=texts.device)
    duplicates = (text_ids[:, :, None] == text_ids[:, None, :]) & ~diagonal
    logits = similarities.float().masked_fill(duplicates, -torch.inf)
    labels = torch.arange(size, device=texts.device).repeat(groups)
    row_loss = F.cross_entropy(logits.flatten(0, 1), labels, reduction="sum")
    column_loss = F.cross_entropy(logits.transpose(1, 2).flatten(0, 1), labels, reduction="sum")
    return (row_loss + column_loss) / 2, texts.numel()


def _to_fp32_pair(name: str, outputs: Any, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both in fp32, on one rank whole."""
    outputs = outputs.full_tensor() if is_dtensor(outputs) else outputs
    _check_same_shape(name, outputs.shape, targets.shape)
    return outputs.float(), targets.float()


def _check_same_shape(name: str, outputs: torch.Size, targets: torch.Size) -> None:
    """torch would stretch (batch, 1) against (batch,) to (batch, batch), with a warning at most."""
    if outputs != targets:
        raise ConfigError(
            f"the loss compares {name} of shape {tuple(outputs)} with targets of shape {tuple(targets)}",
            fix="let the model and the data set give the same shape, or choose another objective.kind",
        )
