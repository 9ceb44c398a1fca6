"""Faults for ranks of the built-in trainer: NaN gradients on one rank, samples with a far too large loss, and samples
excluded from the start."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from clustertrain import settings


def poison_gradients(rank: int, steps: Sequence[int]) -> None:
    """Setup: make one gradient element of ``rank`` NaN after the reduction in each of ``steps`` but the last, in which
    the loss of micro-batch 1 on data-parallel rank 1 is NaN instead. Each rank appends 1 per skipped step and 0 per
    other step to ``skips-<rank>`` in its rank folder."""
    from clustertrain.train.distributed import grad_norm
    from clustertrain.train.step import train_step

    original, call = train_step.reduce_partial_gradients, train_step.TrainStep.__call__
    calls = [0]

    def reduce_and_poison(params: Any) -> None:
        params = list(params)
        original(params)
        calls[0] += 1
        if calls[0] in steps[:-1] and int(os.environ["RANK"]) == rank:
            next(g for g in grad_norm.local_gradients(params) if g.numel()).view(-1)[0] = float("nan")

    def poisoned_step(self: Any, batch: Any, positions: Any, loss_fn: Any, *args: Any) -> Any:
        bad = calls[0] + 1 == steps[-1] and self._context.data_rank == 1
        result = call(self, batch, positions, _poisoned(loss_fn, 1) if bad else loss_fn, *args)
        path = Path(os.environ[settings.RANK_DIR], f"skips-{os.environ['RANK']}")
        with path.open("a") as f:
            f.write(f"{int(result.skipped)}")
        return result

    train_step.reduce_partial_gradients = reduce_and_poison
    train_step.TrainStep.__call__ = poisoned_step  # type: ignore[method-assign]


def _poisoned(loss_fn: Callable[..., Any], micro_batch: int) -> Callable[..., Any]:
    calls = itertools.count()

    def loss(output: Any, target: Any) -> Any:
        value = loss_fn(output, target)
        factor = float("nan") if next(calls) == micro_batch else 1.0
        return (value[0] * factor, *value[1:]) if isinstance(value, tuple) else value * factor

    return loss


def poison_gradients_with_device_skip(rank: int, steps: Sequence[int]) -> None:
    """Setup: like :func:`poison_gradients`, with a fused optimizer that reads the skip flag itself, as on a GPU."""
    from clustertrain.checkpoint.core.state_dict import inner_optimizers
    from clustertrain.train.optim import registry
    from clustertrain.train.stability import conditional_step

    original = registry.build_options
    registry.build_options = lambda *args, **kw: {**original(*args, **kw), "fused": True, "foreach": None}
    conditional_step.supports_device_skip = lambda optimizer: bool(inner_optimizers(optimizer)[0].optimizer.state)
    poison_gradients(rank, steps)


def bad_samples(positions: Sequence[int], factor: float) -> None:
    """Setup: multiply the loss by ``factor`` in each step whose global batch starts at one of ``positions``."""
    from clustertrain.train import trainer

    def step(self: trainer.Trainer) -> Any:
        first_position = self.data.next_position(self.data.position) - self.data.global_batch
        bad = first_position in positions
        loss: Callable[..., Any] = self.loss

        def scaled_loss(output: Any, target: Any) -> Any:
            value = loss(output, target)
            return (value[0] * factor, *value[1:]) if isinstance(value, tuple) else value * factor

        return self.session.train_step(next(self.data), scaled_loss if bad else loss, clip=self.clip)

    trainer.Trainer.step = step  # type: ignore[method-assign]


def exclude_samples(first: int, end: int) -> None:
    """Setup: exclude the positions from ``first`` up to ``end`` from the start of training."""
    from clustertrain.train.data import loader

    original = loader.Loader.__init__

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.exclude([(first, end)])

    loader.Loader.__init__ = __init__  # type: ignore[method-assign]


def bad_samples_and_kill(positions: Sequence[int], factor: float, point: str) -> None:
    """Setup: like :func:`bad_samples`, and kill rank 0 at ``point``."""
    os.environ[settings.FAULT_AT] = f"{point}:0:1:KILL"
    bad_samples(positions, factor)
