"""Evaluation metrics, each a sum, a count and a final function of their ratio.

Sums and counts make the mean over all ranks and micro-batches exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from clustertrain.checkpoint.core.state_dict import is_dtensor
from clustertrain.config.parsing.documents import did_you_mean
from clustertrain.errors import ConfigError
from clustertrain.train.models.losses import log_prob_gains

# A sum on the device and its number of terms.
MetricTerms = tuple[torch.Tensor, "torch.Tensor | int"]
MetricFn = Callable[[Any, Any], MetricTerms]


@dataclass(frozen=True)
class EvalMetric:
    """A metric computed as ``finalize(sum / count)``."""

    name: str
    terms: Callable[[Any, Any, int], MetricTerms]
    needs: str
    """Description of the required outputs and targets, for messages."""
    finalize: Callable[[float], float] = float


def build_metrics(metrics: Sequence[str] | Mapping[str, MetricFn]) -> list[EvalMetric]:
    """Return the built-in metrics of these names, or metrics made of functions (output, target) -> (sum, count).

    Raises:
        ConfigError: a name is unknown.
    """
    if isinstance(metrics, Mapping):
        if "loss" in metrics:
            raise ConfigError(
                "metrics: the name 'loss' is reserved for the loss function", fix="give the metric another name"
            )
        return [
            EvalMetric(name, _ignore_index_argument(metric_fn), "the outputs and targets of its function")
            for name, metric_fn in metrics.items()
        ]
    for name in metrics:
        if name not in BUILT_IN_METRICS:
            raise ConfigError(
                f"metrics: unknown metric {name!r}",
                fix=f"{did_you_mean(name, list(BUILT_IN_METRICS))}; or pass a function: metrics={{{name!r}: function}}",
            )
    return [BUILT_IN_METRICS[name] for name in metrics]


def _ignore_index_argument(metric_fn: MetricFn) -> Callable[[Any, Any, int], MetricTerms]:
    return lambda output, target, ignore_index: metric_fn(output, target)


def to_full_tensor(t: torch.Tensor) -> torch.Tensor:
    """Gather ``t`` if it is a DTensor."""
    return t.full_tensor() if is_dtensor(t) else t


def classes_last(output: object, target: object) -> torch.Tensor | None:
    """Return logits (..., classes) for targets (...), converting torch's order (batch, classes, ...); None if they do
    not match."""
    if not isinstance(output, torch.Tensor) or not isinstance(target, torch.Tensor) or target.is_floating_point():
        return None
    if output.shape[:-1] == target.shape:
        return output
    if output.dim() > 2 and output.shape[:1] + output.shape[2:] == target.shape:
        return output.movedim(1, -1)
    return None


class IncompatibleOutputs(Exception):
    """Outputs and targets that a metric does not support."""


def compute_target_rank(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the number of classes ranked before the target, (...) int64; -1 if its logit is NaN.

    Among equal logits the lower index ranks first, as in argmax, so constant logits do not count as correct. Logits
    sharded by tensor parallelism are not gathered: each rank counts in its shard.
    """
    group, first_class = None, 0
    if is_dtensor(logits):
        mesh, placements = logits.device_mesh, logits.placements
        if any(p.is_shard(logits.dim() - 1) for p in placements):
            group = mesh.get_group()
            first_class = mesh.get_local_rank() * logits.to_local().shape[-1]
        logits = logits.to_local()
    local_target = target - first_class
    is_local = (local_target >= 0) & (local_target < logits.shape[-1])
    target_logit = logits.float().gather(-1, local_target.clamp(0, logits.shape[-1] - 1).unsqueeze(-1)).squeeze(-1)
    target_logit = torch.where(is_local, target_logit, torch.zeros_like(target_logit))
    if group is not None:
        dist.all_reduce(target_logit, group=group)
    index = torch.arange(first_class, first_class + logits.shape[-1], device=logits.device)
    threshold = target_logit.to(logits.dtype).unsqueeze(-1)
    rank = (logits > threshold).sum(-1)
    rank += ((logits == threshold) & (index < target.unsqueeze(-1))).sum(-1)
    if group is not None:
        dist.all_reduce(rank, group=group)
    return torch.where(target_logit.isnan(), -1, rank)


def _build_top_k(k: int) -> Callable[[Any, Any, int], MetricTerms]:
    def terms(output: Any, target: Any, ignore_index: int) -> MetricTerms:
        logits = classes_last(output, target)
        if logits is None:
            if k == 1 and isinstance(target, torch.Tensor) and target.is_floating_point():
                return _binary_accuracy(output, target)
            raise IncompatibleOutputs
        counts = target != ignore_index
        rank = compute_target_rank(logits, torch.where(counts, target, 0))
        return ((rank >= 0) & (rank < k) & counts).sum(), counts.sum()

    return terms


def _binary_accuracy(output: torch.Tensor, target: torch.Tensor) -> MetricTerms:
    """Return the number of correct predictions for one logit per target of 0 or 1, and the number of targets."""
    logits = to_full_tensor(output)
    if logits.numel() != target.numel():
        raise IncompatibleOutputs
    return ((logits.reshape(target.shape) > 0) == (target > 0.5)).sum(), target.numel()


def _cross_entropy(output: Any, target: Any, ignore_index: int) -> MetricTerms:
    """Return the cross-entropy without label smoothing, whatever the training loss."""
    logits = classes_last(output, target)
    if logits is None:
        raise IncompatibleOutputs
    total = F.cross_entropy(logits.flatten(0, -2).float(), target.flatten(), reduction="sum", ignore_index=ignore_index)
    return to_full_tensor(total), (target != ignore_index).sum()


def _recall_at_1(output: Any, target: object, ignore_index: int) -> MetricTerms:
    """Return how often the most similar view is the right one, in both directions, and the number of comparisons.

    The output is similarities (groups, group, group) or two embeddings (batch, features).
    """
    if isinstance(output, (tuple, list)) and len(output) == 2 and all(t.dim() == 2 for t in output):
        first, second = (F.normalize(to_full_tensor(t).float(), dim=-1) for t in output)
        output = (first @ second.T).unsqueeze(0)
    if not isinstance(output, torch.Tensor) or output.dim() != 3 or output.shape[1] != output.shape[2]:
        raise IncompatibleOutputs
    similarities = to_full_tensor(output)
    groups, size, _ = similarities.shape
    targets = torch.arange(size, device=similarities.device).expand(groups, size)
    hits = [(compute_target_rank(s, targets) == 0).sum() for s in (similarities, similarities.transpose(1, 2))]
    return hits[0] + hits[1], 2 * groups * size


def _reward_accuracy(output: Any, target: Any, ignore_index: int) -> MetricTerms:
    """Return for how many pairs the chosen answer gained more probability than the rejected one, and the number of
    pairs."""
    is_pair = isinstance(target, (tuple, list)) and len(target) == 2
    if not (is_pair and isinstance(output, torch.Tensor) and output.dim() == 4):
        raise IncompatibleOutputs
    gains = log_prob_gains(output, (target[0], target[1]), ignore_index)
    return (gains[:, 0] > gains[:, 1]).sum(), len(gains)


def _prediction_errors(output: object, target: object) -> torch.Tensor:
    if not isinstance(output, torch.Tensor) or not isinstance(target, torch.Tensor):
        raise IncompatibleOutputs
    output = to_full_tensor(output)
    if output.numel() != target.numel():
        raise IncompatibleOutputs
    return output.reshape(target.shape).double() - target.double()


def _absolute_error(output: object, target: object, ignore_index: int) -> MetricTerms:
    errors = _prediction_errors(output, target)
    return errors.abs().sum(), errors.numel()


def _squared_error(output: object, target: object, ignore_index: int) -> MetricTerms:
    errors = _prediction_errors(output, target)
    return errors.square().sum(), errors.numel()


def _bounded_exp(nats: float) -> float:
    return math.exp(nats) if nats < 700 else math.inf


_CLASSES_TEXT = "logits (..., classes) and integer targets (...)"
_NUMBERS_TEXT = "as many outputs as targets"
BUILT_IN_METRICS: Mapping[str, EvalMetric] = {
    m.name: m
    for m in (
        EvalMetric("accuracy", _build_top_k(1), f"{_CLASSES_TEXT}, or as many logits as targets of 0.0 and 1.0"),
        EvalMetric("top5", _build_top_k(5), _CLASSES_TEXT),
        EvalMetric("perplexity", _cross_entropy, _CLASSES_TEXT, _bounded_exp),
        EvalMetric("bits_per_token", _cross_entropy, _CLASSES_TEXT, lambda nats: nats / math.log(2)),
        EvalMetric(
            "recall_at_1", _recall_at_1, "similarities (groups, group, group) or two embeddings (batch, features)"
        ),
        EvalMetric(
            "reward_accuracy", _reward_accuracy, "logits (pairs, 2, length, classes) and targets with a reference"
        ),
        EvalMetric("mae", _absolute_error, _NUMBERS_TEXT),
        EvalMetric("rmse", _squared_error, _NUMBERS_TEXT, math.sqrt),
    )
}


def compute_terms(metric: EvalMetric, output: Any, target: Any, ignore_index: int) -> MetricTerms:
    """Return the sum and count of ``metric``; raise ConfigError if it does not support the outputs."""
    try:
        return metric.terms(output, target, ignore_index)
    except IncompatibleOutputs as e:
        raise ConfigError(
            f"metrics: {metric.name} needs {metric.needs}; the model's output is {_format_shape(output)} and the target"
            f" {_format_shape(target)}",
            fix="remove it, or pass a custom function: (output, target) -> (sum, count)",
        ) from e


def _format_shape(t: object) -> str:
    if isinstance(t, torch.Tensor):
        return f"{str(t.dtype).removeprefix('torch.')} {tuple(t.shape)}"
    return f"({', '.join(map(_format_shape, t))})" if isinstance(t, (tuple, list)) else f"a {type(t).__name__}"
