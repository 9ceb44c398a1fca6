"""Losses of the built-in trainer. Each returns (sum, count): the sum of its terms in fp32 and their number.

Classification losses use torch's fused functions on logits, which do not overflow as formulas on probabilities can.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
import torch.nn.functional as F

from clustertrain.checkpoint.core.state_dict import is_dtensor
from clustertrain.config.recipe import Recipe
from clustertrain.errors import ConfigError
from clustertrain.train.core.step_types import Loss
from clustertrain.train.models.contrastive import ContrastiveLoss

SumAndCount = tuple[torch.Tensor, "torch.Tensor | int"]


def build_loss(recipe: Recipe) -> Loss:
    """Return the loss that ``recipe`` names."""
    spec, kind = recipe.objective, recipe.objective_kind
    if kind == "cross-entropy":
        # Mixup produces class probabilities. Without it, float targets could be values to predict.
        soft = spec.kind == "cross-entropy" or recipe.data.augment.is_enabled
        return functools.partial(
            cross_entropy, smoothing=spec.label_smoothing, ignore_index=spec.ignore_index, soft_targets=soft
        )
    if kind == "dpo":
        return functools.partial(preference, beta=spec.beta, ignore_index=spec.ignore_index)
    if kind == "nt-xent":
        is_two_tower = recipe.model.kind == "two-tower"  # its samples' targets are their ids
        return ContrastiveLoss(spec.temperature, spec.group, ids_in_targets=is_two_tower)
    if kind == "binary-cross-entropy":
        return binary_cross_entropy
    return functools.partial(huber, delta=spec.delta) if kind == "huber" else mse if kind == "mse" else l1


def cross_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    smoothing: float = 0.0,
    ignore_index: int = -100,
    soft_targets: bool = True,
) -> SumAndCount:
    """Return (sum, count) of the cross-entropy of ``logits`` (..., classes), for example of tokens or images.

    Args:
        targets: classes (...), or probabilities (..., classes), as from mixup.
        smoothing: fraction of each target spread over all classes (arXiv 1512.00567, section 7).
        ignore_index: class targets of this value are ignored.
        soft_targets: accept floating-point targets as probabilities; otherwise they raise.

    Raises:
        ConfigError: the shapes differ, there is a single class, or targets are floating-point without ``soft_targets``.
    """
    _check_tensor(logits)
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
        logits = logits.full_tensor()  # torch's loss of sharded logits supports neither
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
    """Return (sum, count) of the binary cross-entropy of logits and targets of one shape, targets between 0 and 1."""
    logits, targets = _to_fp32_pair("logits", logits, targets)
    return F.binary_cross_entropy_with_logits(logits, targets, reduction="sum"), targets.numel()


def mse(outputs: torch.Tensor, targets: torch.Tensor) -> SumAndCount:
    """Return (sum, count) of the squared differences between ``outputs`` and ``targets`` of one shape."""
    outputs, targets = _to_fp32_pair("outputs", outputs, targets)
    return F.mse_loss(outputs, targets, reduction="sum"), targets.numel()


def l1(outputs: torch.Tensor, targets: torch.Tensor) -> SumAndCount:
    """Return (sum, count) of the absolute differences between ``outputs`` and ``targets`` of one shape."""
    outputs, targets = _to_fp32_pair("outputs", outputs, targets)
    return F.l1_loss(outputs, targets, reduction="sum"), targets.numel()


def huber(outputs: torch.Tensor, targets: torch.Tensor, *, delta: float) -> SumAndCount:
    """Return (sum, count) of the Huber loss between ``outputs`` and ``targets`` of one shape.

    It is half the squared difference up to ``delta``, and linear above (Huber, "Robust estimation of a location
    parameter", 1964).
    """
    outputs, targets = _to_fp32_pair("outputs", outputs, targets)
    return F.huber_loss(outputs, targets, reduction="sum", delta=delta), targets.numel()


def preference(
    logits: torch.Tensor, target: tuple[torch.Tensor, torch.Tensor], *, beta: float, ignore_index: int = -100
) -> SumAndCount:
    """Return (sum, count) of the DPO loss (Rafailov et al., arXiv 2305.18290, equation 7) of pairs of answers.

    Args:
        logits: (pairs, 2, length, vocabulary), of the chosen and the rejected answer.
        target: the tokens of both, (pairs, 2, length), and their log-probabilities under the start weights, (pairs, 2).
        beta: strength of the constraint to the start weights.
    """
    gains = log_prob_gains(logits, target, ignore_index)
    return -F.logsigmoid(beta * (gains[:, 0] - gains[:, 1])).sum(), len(gains)


def log_prob_gains(
    logits: torch.Tensor, target: tuple[torch.Tensor, torch.Tensor], ignore_index: int = -100
) -> torch.Tensor:
    """Return by how much the log-probability of each answer exceeds that under the start weights, (pairs, 2) in fp32;
    arguments as for :func:`preference`."""
    tokens, reference = target
    return sum_log_probs(logits, tokens, ignore_index) - reference


def sum_log_probs(logits: torch.Tensor, tokens: torch.Tensor, ignore_index: int = -100) -> torch.Tensor:
    """Return the log-probability of each sequence ``tokens`` (..., length), ignored ones excepted: (...) in fp32."""
    loss = F.cross_entropy(logits.flatten(0, -2).float(), tokens.flatten(), reduction="none", ignore_index=ignore_index)
    if is_dtensor(loss):  # the same on the ranks that share the vocabulary
        loss = loss.full_tensor()
    return -loss.view(tokens.shape).sum(-1)


def _to_fp32_pair(name: str, outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both tensors in fp32; gather ``outputs`` if it is sharded."""
    _check_tensor(outputs)
    outputs = outputs.full_tensor() if is_dtensor(outputs) else outputs
    _check_same_shape(name, outputs.shape, targets.shape)
    return outputs.float(), targets.float()


def _check_tensor(output: object) -> None:
    """Raise ConfigError if the model did not return one tensor."""
    if isinstance(output, torch.Tensor):
        return
    content = f" with {', '.join(map(str, output))}" if isinstance(output, Mapping) else ""
    raise ConfigError(
        f"the model returned {type(output).__name__}{content}, but the loss compares one tensor with the targets",
        fix="return a tensor, or an object with the tensor `logits`; or give the module a loss(output, target)",
    )


def _check_same_shape(name: str, outputs: torch.Size, targets: torch.Size) -> None:
    """Raise ConfigError on different shapes, which torch would broadcast ((batch, 1) with (batch,) to (batch,
    batch))."""
    if outputs != targets:
        raise ConfigError(
            f"the loss compares {name} of shape {tuple(outputs)} with targets of shape {tuple(targets)}",
            fix="make the model's outputs and the dataset's targets the same shape, or choose another objective.kind",
        )
