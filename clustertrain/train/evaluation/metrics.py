"""What an evaluation computes from outputs and targets: each metric is a sum and a count, so that the mean over all
ranks and micro-batches is exact, and a last operation on that mean."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from clustertrain.checkpoint.core.state_dict import is_dtensor
from clustertrain.config.parsing import nearest
from clustertrain.errors import ConfigError

# A sum on the device and how many terms it has.
Sum = tuple[torch.Tensor, "torch.Tensor | int"]
Own = Callable[[Any, Any], Sum]


@dataclass(frozen=True)
class Metric:
    """``needs`` says in words what it is computed from."""

    name: str
    terms: Callable[[Any, Any, int], Sum]
    needs: str
    last: Callable[[float], float] = float


def named(metrics: Sequence[str] | Mapping[str, Own]) -> list[Metric]:
    """The metrics of these names, or those of functions (output, target) -> (sum, count) of one's own.

    Raises:
        ConfigError: there is none of that name.
    """
    if isinstance(metrics, Mapping):
        if "loss" in metrics:
            raise ConfigError("metrics: 'loss' is that of the loss function", fix="give the metric another name")
        return [Metric(name, _without_index(own), "what its function takes") for name, own in metrics.items()]
    for name in metrics:
        if name not in KNOWN:
            raise ConfigError(
                f"metrics: there is none called {name!r}",
                fix=f"{nearest(name, list(KNOWN))}; or give a function: metrics={{{name!r}: function}}",
            )
    return [KNOWN[name] for name in metrics]


def _without_index(own: Own) -> Callable[[Any, Any, int], Sum]:
    return lambda output, target, ignored: own(output, target)


def whole(t: Any) -> torch.Tensor:
    found: torch.Tensor = t.full_tensor() if is_dtensor(t) else t
    return found


def _classes_last(output: Any, target: Any) -> Any:
    """Logits (..., classes) for targets (...); torch's own order (batch, classes, ...) is turned round."""
    if not isinstance(output, torch.Tensor) or not isinstance(target, torch.Tensor) or target.is_floating_point():
        return None
    if output.shape[:-1] == target.shape:
        return output
    if output.dim() > 2 and output.shape[:1] + output.shape[2:] == target.shape:
        return output.movedim(1, -1)
    return None


class Unfit(Exception):
    """The outputs and targets are not of the kind that a metric needs."""


def rank_of_target(logits: Any, target: torch.Tensor) -> torch.Tensor:
    """How many classes come before the right one, (...) int64, -1 where its logit is nan. Of equal logits the lower
    index comes first, as in argmax: constant logits do not count as right, whatever the classes.

    Logits that tensor parallel has split by classes are not gathered: each rank counts in its own part.
    """
    group, first = None, 0
    if is_dtensor(logits):
        mesh, placements = logits.device_mesh, logits.placements
        if any(p.is_shard(logits.dim() - 1) for p in placements):
            group = mesh.get_group()
            first = mesh.get_local_rank() * logits.to_local().shape[-1]
        logits = logits.to_local()
    here = target - first
    mine = (here >= 0) & (here < logits.shape[-1])
    right = logits.float().gather(-1, here.clamp(0, logits.shape[-1] - 1).unsqueeze(-1)).squeeze(-1)
    right = torch.where(mine, right, torch.zeros_like(right))
    if group is not None:
        dist.all_reduce(right, group=group)
    index = torch.arange(first, first + logits.shape[-1], device=logits.device)
    threshold = right.to(logits.dtype).unsqueeze(-1)
    before = (logits > threshold).sum(-1)
    before += ((logits == threshold) & (index < target.unsqueeze(-1))).sum(-1)
    if group is not None:
        dist.all_reduce(before, group=group)
    return torch.where(right.isnan(), -1, before)


def _hits(k: int) -> Callable[[Any, Any, int], Sum]:
    def terms(output: Any, target: Any, ignored: int) -> Sum:
        logits = _classes_last(output, target)
        if logits is None:
            if k == 1 and isinstance(target, torch.Tensor) and target.is_floating_point():
                return _binary(output, target)
            raise Unfit
        counts = target != ignored
        rank = rank_of_target(logits, torch.where(counts, target, 0))
        return ((rank >= 0) & (rank < k) & counts).sum(), counts.sum()

    return terms


def _binary(output: Any, target: torch.Tensor) -> Sum:
    """Logits and 0 or 1, one for each."""
    logits = whole(output)
    if logits.numel() != target.numel():
        raise Unfit
    return ((logits.reshape(target.shape) > 0) == (target > 0.5)).sum(), target.numel()


def _nats(output: Any, target: Any, ignored: int) -> Sum:
    """Cross-entropy without label smoothing, whatever is minimised."""
    logits = _classes_last(output, target)
    if logits is None:
        raise Unfit
    total = F.cross_entropy(logits.flatten(0, -2).float(), target.flatten(), reduction="sum", ignore_index=ignored)
    return whole(total), (target != ignored).sum()


def _recall(output: Any, target: Any, ignored: int) -> Sum:
    """Of similarities (groups, group, group), or of two embeddings (batch, features): how often the other view that
    comes first is the right one, in both directions."""
    if isinstance(output, (tuple, list)) and len(output) == 2 and all(t.dim() == 2 for t in output):
        first, second = (F.normalize(whole(t).float(), dim=-1) for t in output)
        output = (first @ second.T).unsqueeze(0)
    if not isinstance(output, torch.Tensor) or output.dim() != 3 or output.shape[1] != output.shape[2]:
        raise Unfit
    similar = whole(output)
    groups, size, _ = similar.shape
    right = torch.arange(size, device=similar.device).expand(groups, size)
    hits = [(rank_of_target(s, right) == 0).sum() for s in (similar, similar.transpose(1, 2))]
    return hits[0] + hits[1], 2 * groups * size


def _apart(output: Any, target: Any) -> torch.Tensor:
    if not isinstance(output, torch.Tensor) or not isinstance(target, torch.Tensor):
        raise Unfit
    output = whole(output)
    if output.numel() != target.numel():
        raise Unfit
    apart: torch.Tensor = output.reshape(target.shape).double() - target.double()
    return apart


def _absolute(output: Any, target: Any, ignored: int) -> Sum:
    apart = _apart(output, target)
    return apart.abs().sum(), apart.numel()


def _square(output: Any, target: Any, ignored: int) -> Sum:
    apart = _apart(output, target)
    return apart.square().sum(), apart.numel()


def _exp(nats: float) -> float:
    return math.exp(nats) if nats < 700 else math.inf


_CLASSES = "logits (..., classes) and integer targets (...)"
_NUMBERS = "as many outputs as targets"
KNOWN: Mapping[str, Metric] = {
    m.name: m
    for m in (
        Metric("accuracy", _hits(1), f"{_CLASSES}, or as many logits as targets of 0.0 and 1.0"),
        Metric("top5", _hits(5), _CLASSES),
        Metric("perplexity", _nats, _CLASSES, _exp),
        Metric("bits_per_token", _nats, _CLASSES, lambda nats: nats / math.log(2)),
        Metric("recall_at_1", _recall, "similarities (groups, group, group) or two embeddings (batch, features)"),
        Metric("mae", _absolute, _NUMBERS),
        Metric("rmse", _square, _NUMBERS, math.sqrt),
    )
}


def terms_of(metric: Metric, output: Any, target: Any, ignored: int) -> Sum:
    """Raises ConfigError where ``metric`` cannot be told of them."""
    try:
        return metric.terms(output, target, ignored)
    except Unfit as e:
        raise ConfigError(
            f"metrics: {metric.name} needs {metric.needs}; the model's output is {_shape(output)} and the target "
            f"{_shape(target)}",
            fix="leave it out, or give a function of your own: (output, target) -> (sum, count)",
        ) from e


def _shape(t: Any) -> str:
    if isinstance(t, torch.Tensor):
        return f"{str(t.dtype).removeprefix('torch.')} {tuple(t.shape)}"
    return f"({', '.join(map(_shape, t))})" if isinstance(t, (tuple, list)) else f"a {type(t).__name__}"
