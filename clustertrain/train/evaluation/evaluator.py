"""One evaluation under any layout: forward passes, sums on the device, one reduction over all ranks at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

from clustertrain.checkpoint.core.state_dict import is_dtensor
from clustertrain.config.evaluation import PREFIX, SLICE
from clustertrain.config.parsing import nearest
from clustertrain.errors import ConfigError, UsageError
from clustertrain.train.core.context import RankContext
from clustertrain.train.core.step_types import Loss, as_sum_and_count, call_model
from clustertrain.train.data.sample_checks import where
from clustertrain.train.distributed import precision
from clustertrain.train.distributed.mesh import Groups
from clustertrain.train.evaluation.dataset_pass import Portion
from clustertrain.train.evaluation.eval_mode import still
from clustertrain.train.evaluation.metrics import Metric, terms_of, whole

MOST_SLICES = 100  # a row of the run's metrics has a number for each of them and each metric


@dataclass(frozen=True)
class Slices:
    """Named parts of a data set. Samples of others, and of none, count in the whole alone."""

    names: tuple[str, ...]
    of: Callable[[int], int] = field(default=lambda i: -1)  # sample -> index into names; another number: of none


NO_SLICES = Slices(())


def slices_of(dataset: Any, wanted: Sequence[str] = (), group: int = 1) -> Slices:
    """Those of ``dataset``, which has them as ``slice_names`` and ``slice_of``: the ``wanted`` ones, else all of them
    unless they are very many. None where samples only count in groups of several.

    Raises:
        ConfigError: one that is wanted is not there, or cannot be told apart.
    """
    if group > 1:
        if wanted:
            raise ConfigError(
                f"contract.slices = {list(wanted)}: the loss compares {group} samples with each other, so none of them "
                "has a figure of its own slice",
                fix="leave contract.slices out",
            )
        return NO_SLICES
    there: tuple[str, ...] = tuple(getattr(dataset, "slice_names", ()))
    for name in wanted:
        if name not in there:
            raise ConfigError(
                f"contract.slices: the validation data has no slice {name!r}",
                fix=nearest(name, list(there))
                if there
                else "its data set names none: give it slice_names and slice_of",
            )
    names = tuple(wanted) or (there if len(there) <= MOST_SLICES else ())
    if not names:
        return NO_SLICES
    numbers = {there.index(name): i for i, name in enumerate(names)}

    def place(i: int) -> int:
        number = int(dataset.slice_of(i))
        if not 0 <= number < len(there):
            raise ConfigError(
                f"{where(dataset, i)}: slice_of says {number}, and slice_names has {len(there)}",
                fix="slice_of(i) is the place of the sample's slice in slice_names, from 0 on",
            )
        return numbers.get(number, -1)

    return Slices(names, place)


class Evaluator:
    """``poll`` says whether all ranks have agreed to stop; it is asked equally often on all of them."""

    def __init__(self, model: nn.Module, context: RankContext, groups: Groups, poll: Callable[[], bool]) -> None:
        # Not DDP itself: its forward pass is collective where a model has buffers, and it adds nothing here.
        self._model = model.module if isinstance(model, DistributedDataParallel) else model
        self._context = context
        self._groups = groups
        self._poll = poll
        at = context.layout.coordinates(context.rank)
        self._counts = at.tp == 0  # ranks that compute the same thing twice must not count it twice
        self._pipeline = groups.pipeline() is not None
        # So many micro-batches between two looks at whether to stop: a pipeline must fill and drain in between.
        self._chunk = 2 * context.layout.pp if self._pipeline else 1

    def __call__(
        self,
        portions: Iterable[Portion],
        loss_fn: Loss,
        metrics: Sequence[Metric] = (),
        slices: Slices = NO_SLICES,
        ignored: int = -100,
    ) -> dict[str, float] | None:
        """The means over all that counts, by their names in the rows, equal on all ranks; None where the ranks have
        agreed to stop before the end. Waits for the device once, at the end.

        Raises:
            ConfigError: a metric cannot be told of the outputs, or nothing was counted.
        """
        sums = torch.zeros(1 + len(slices.names), 1 + len(metrics), 2, dtype=torch.float64, device=self._context.device)
        with still(self._model, self._groups, self._context.device), self._loss_context():
            for chunk in _chunks(portions, self._chunk):
                if self._poll():
                    return None
                for portion, output, target in self._outputs(chunk):
                    self._add(sums, portion, output, target, loss_fn, metrics, slices, ignored)
        if not self._counts:
            sums.zero_()
        if dist.is_initialized():
            dist.all_reduce(sums)
        return _means(sums, metrics, slices)

    def _outputs(self, chunk: Sequence[Portion]) -> Iterator[tuple[Portion, Any, Any]]:
        pairs = [_checked(p.batch) for p in chunk]
        if self._groups.context is not None:
            from clustertrain.train.distributed import context_parallel

            pairs = [context_parallel.slice_pair(pair, self._groups.context) for pair in pairs]
        if not self._pipeline:
            for portion, (inputs, target) in zip(chunk, pairs, strict=True):
                with precision.autocast(self._context):
                    output = call_model(self._model, inputs, None)
                yield portion, output, target
            return
        _check_alike(pairs)
        with self._model.without_learning():  # type: ignore[operator]
            for i, output in self._model.forward_only([inputs for inputs, _ in pairs]):  # type: ignore[operator]
                counted = range(len(chunk[i].samples))
                yield chunk[i], _rows(output, counted), _rows(pairs[i][1], counted)

    def _add(
        self,
        sums: torch.Tensor,
        portion: Portion,
        output: Any,
        target: Any,
        loss_fn: Loss,
        metrics: Sequence[Metric],
        slices: Slices,
        ignored: int,
    ) -> None:
        parts: dict[int, list[int]] = {}
        for i, sample in enumerate(portion.samples):
            parts.setdefault(slices.of(sample) if slices.names else -1, []).append(i)
        for part, rows in parts.items():  # none: the micro-batch only fills a gap
            some = (output, target) if len(parts) == 1 else (_rows(output, rows), _rows(target, rows))
            with precision.autocast(self._context):
                found = [as_sum_and_count(loss_fn(*some), some[1], nobodys=False)]
            found += [terms_of(metric, *some, ignored) for metric in metrics]
            for column, (total, count) in enumerate(found):
                of = torch.as_tensor(count, device=sums.device).double()
                sums[part + 1, column] += torch.stack([whole(total).detach().double().to(sums.device), of])

    def _loss_context(self) -> Any:
        from clustertrain.train.distributed import tensor_parallel

        return tensor_parallel.loss_context(self._context)


def _chunks(portions: Iterable[Portion], size: int) -> Iterator[list[Portion]]:
    left = iter(portions)
    while chunk := list(islice(left, size)):
        yield chunk


def _checked(batch: Any) -> Any:
    if not (isinstance(batch, (tuple, list)) and len(batch) == 2):
        raise UsageError("evaluate: a batch is (inputs, target)")
    return batch


def _check_alike(pairs: Sequence[Any]) -> None:
    shapes = {
        str(pytree.tree_map(lambda t: tuple(t.shape) if isinstance(t, torch.Tensor) else None, tuple(p))) for p in pairs
    }
    if len(shapes) > 1:
        raise ConfigError(
            f"the micro-batches that a pipeline is evaluated on must have one shape: {' and '.join(sorted(shapes))}",
            fix="pad sequences to one length, and hand session.evaluate a data set, which it cuts by itself",
        )


def _rows(value: Any, rows: Sequence[int]) -> Any:
    """Those samples of each tensor."""

    def some(t: torch.Tensor) -> torch.Tensor:
        if is_dtensor(t):  # split by features, never by samples
            from torch.distributed.tensor import DTensor

            mesh, placements = t.device_mesh, t.placements  # type: ignore[attr-defined]
            return DTensor.from_local(some(t.to_local()), mesh, placements, run_check=False)  # type: ignore[attr-defined]
        return t[torch.tensor(list(rows), dtype=torch.long, device=t.device)]

    return pytree.tree_map_only(torch.Tensor, some, value)


def _means(sums: torch.Tensor, metrics: Sequence[Metric], slices: Slices) -> dict[str, float]:
    """The one wait for the device."""
    rows = [sums.sum(0).tolist(), *sums[1:].tolist()]
    if not rows[0][0][1]:
        raise ConfigError(
            "the evaluation counts nothing: all targets of the validation data are masked",
            fix="look at objective.ignore_index and the data",
        )
    found: dict[str, float] = {}
    finish: Mapping[str, Callable[[float], float]] = {"loss": float, **{m.name: m.last for m in metrics}}
    for name, row in zip(("", *slices.names), rows, strict=True):
        for (metric, last), (total, count) in zip(finish.items(), row, strict=True):
            if count:
                found[f"{PREFIX}{metric}{SLICE if name else ''}{name}"] = last(total / count)
    return found
