"""Evaluation under any layout: forward passes, sums on the device, and one final reduction over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

from clustertrain.checkpoint.core.state_dict import is_dtensor
from clustertrain.config.evaluation import SLICE_SEPARATOR, VALIDATION_PREFIX
from clustertrain.config.parsing.documents import did_you_mean
from clustertrain.errors import ConfigError, UsageError
from clustertrain.train.core.context import RankContext
from clustertrain.train.core.step_types import Loss, as_sum_and_count, call_model
from clustertrain.train.data.sample_checks import describe_sample
from clustertrain.train.distributed import precision
from clustertrain.train.distributed.mesh import ProcessGroups
from clustertrain.train.evaluation.collected import CollectedEmbeddings
from clustertrain.train.evaluation.dataset_pass import DatasetPass, EvalBatch
from clustertrain.train.evaluation.eval_mode import evaluation_mode
from clustertrain.train.evaluation.metrics import EvalMetric, compute_terms, to_full_tensor
from clustertrain.train.evaluation.predictions import PredictionRecorder
from clustertrain.train.models.contrastive import ContrastiveLoss, compares_batch, embed_groups, similarities
from clustertrain.train.step.whole_batch import check_layout

MAX_SLICES = 100  # a metrics row has one value per slice and metric


@dataclass(frozen=True)
class DatasetSlices:
    """Named slices of a dataset. Samples outside all slices count only in the overall mean."""

    names: tuple[str, ...]
    index_of: Callable[[int], int] = field(default=lambda i: -1)
    """Map a sample to an index into ``names``, or -1."""


T = TypeVar("T")

NO_SLICES = DatasetSlices(())


def find_slices(dataset: Any, requested: Sequence[str] = (), group: int = 1) -> DatasetSlices:
    """Return the ``requested`` slices of ``dataset`` (attributes ``slice_names`` and ``slice_of``).

    Without a request, return all slices, or none if there are more than :data:`MAX_SLICES`. Samples that form groups
    have no slices.

    Raises:
        ConfigError: a requested slice does not exist, or cannot be evaluated separately.
    """
    if group > 1:
        if requested:
            raise ConfigError(
                f"contract.slices = {list(requested)}: the loss compares {group} samples with each other and has no"
                " value per slice",
                fix="remove contract.slices",
            )
        return NO_SLICES
    available: tuple[str, ...] = tuple(getattr(dataset, "slice_names", ()))
    for name in requested:
        if name not in available:
            raise ConfigError(
                f"contract.slices: the validation data has no slice {name!r}",
                fix=(
                    did_you_mean(name, list(available))
                    if available
                    else "define slice_names and slice_of in the dataset"
                ),
            )
    names = tuple(requested) or (available if len(available) <= MAX_SLICES else ())
    if not names:
        return NO_SLICES
    index_by_number = {available.index(name): i for i, name in enumerate(names)}

    def index_of(i: int) -> int:
        number = int(dataset.slice_of(i))
        if not 0 <= number < len(available):
            raise ConfigError(
                f"{describe_sample(dataset, i)}: slice_of returned {number}, but slice_names has {len(available)}",
                fix="return the index of the sample's slice in slice_names, from 0 on",
            )
        return index_by_number.get(number, -1)

    return DatasetSlices(names, index_of)


class Evaluator:
    """Evaluations of a model.

    ``should_stop`` returns whether all ranks have agreed to stop; every rank calls it the same number of times.
    """

    def __init__(
        self, model: nn.Module, context: RankContext, groups: ProcessGroups, should_stop: Callable[[], bool]
    ) -> None:
        # Bypass DDP, which is not needed here and whose forward pass is collective if the model has buffers.
        self._model = model.module if isinstance(model, DistributedDataParallel) else model
        self._context = context
        self._groups = groups
        self._should_stop = should_stop
        coordinates = context.layout.coordinates(context.rank)
        self.counts_results = coordinates.tp == 0  # tp ranks compute the same results, which must count once
        self.is_pipelined = groups.pp_mesh() is not None
        # Micro-batches between two checks for a stop. A pipeline fills and drains once per chunk.
        self._chunk_size = 2 * context.layout.pp if self.is_pipelined else 1

    def __call__(
        self,
        batches: Iterable[EvalBatch],
        loss_fn: Loss,
        metrics: Sequence[EvalMetric] = (),
        slices: DatasetSlices = NO_SLICES,
        ignore_index: int = -100,
        recorder: PredictionRecorder | None = None,
        group: int = 0,
    ) -> dict[str, float] | None:
        """Return the means by metric name, equal on all ranks; None if the ranks agreed to stop early.

        Waits for the device once, at the end, and for each batch that ``recorder`` records.

        Args:
            group: adjacent samples that a loss of the whole batch compares; 0: all samples of the dataset.

        Raises:
            ConfigError: a metric does not support the outputs, or all targets are masked.
        """
        sums = torch.zeros(1 + len(slices.names), 1 + len(metrics), 2, dtype=torch.float64, device=self._context.device)
        collected = None
        if compares_batch(loss_fn):
            check_layout(self._context)
            collected = CollectedEmbeddings(loss_fn)
        with evaluation_mode(self._model, self._groups, self._context.device), self._loss_context():
            for chunk in _iter_chunks(batches, self._chunk_size):
                if self._should_stop():
                    return None
                for batch, output, target in self._forward(chunk):
                    if collected is not None:
                        collected.add(output, target, batch.sample_indices)
                    else:
                        self._accumulate(sums, batch, output, target, loss_fn, metrics, slices, ignore_index)
                    if recorder is not None:
                        recorder.add(batch, output, target)
            if collected is not None:
                sums[0] += collected.compute_sums(metrics, group, self._context.device)
        if recorder is not None:
            recorder.reduce()
        if not self.counts_results:
            sums.zero_()
        if dist.is_initialized():
            dist.all_reduce(sums)
        return _compute_means(sums, metrics, slices)

    def compute_per_sample(
        self, batches: DatasetPass, compute: Callable[[Any, Any], torch.Tensor], width: int
    ) -> torch.Tensor | None:
        """Return ``compute(output, target)``, (batch, width), of all samples: (samples, width) in fp32 on the CPU.

        It is equal on all ranks, and None if the ranks agreed to stop early. Not for context parallelism: ``compute``
        gets whole sequences.
        """
        values = torch.zeros(batches.num_samples, width, device=self._context.device)
        with evaluation_mode(self._model, self._groups, self._context.device), self._loss_context():
            for chunk in _iter_chunks(batches, self._chunk_size):
                if self._should_stop():
                    return None
                for batch, output, target in self._forward(chunk):
                    counted = len(batch.sample_indices)
                    with precision.autocast(self._context):
                        rows = compute(output, target)[:counted]
                    values[torch.tensor(batch.sample_indices, dtype=torch.long)] = rows.detach().to(values.dtype)
        if not self.counts_results:
            values.zero_()
        if dist.is_initialized():
            dist.all_reduce(values)
        return values.cpu()

    def _forward(self, chunk: Sequence[EvalBatch]) -> Iterator[tuple[EvalBatch, Any, Any]]:
        pairs = [_check_pair(p.batch) for p in chunk]
        if self._groups.cp_mesh is not None:
            from clustertrain.train.distributed import context_parallel

            pairs = [context_parallel.shard_sequence(pair, self._groups.cp_mesh) for pair in pairs]
        if not self.is_pipelined:
            for batch, (inputs, target) in zip(chunk, pairs, strict=True):
                with precision.autocast(self._context):
                    output = call_model(self._model, inputs, None)
                yield batch, output, target
            return
        _check_same_shapes(pairs)
        with self._model.outside_schedule():  # type: ignore[operator]
            for i, output in self._model.forward_only([inputs for inputs, _ in pairs]):  # type: ignore[operator]
                counted = range(len(chunk[i].sample_indices))
                yield chunk[i], _select_rows(output, counted), _select_rows(pairs[i][1], counted)

    def _accumulate(
        self,
        sums: torch.Tensor,
        batch: EvalBatch,
        output: Any,
        target: Any,
        loss_fn: Loss,
        metrics: Sequence[EvalMetric],
        slices: DatasetSlices,
        ignore_index: int,
    ) -> None:
        rows_by_slice: dict[int, list[int]] = {}
        for i, sample in enumerate(batch.sample_indices):
            rows_by_slice.setdefault(slices.index_of(sample) if slices.names else -1, []).append(i)
        for slice_index, rows in rows_by_slice.items():  # empty if the micro-batch is padding
            selected = (
                (output, target)
                if len(rows_by_slice) == 1
                else (_select_rows(output, rows), _select_rows(target, rows))
            )
            with precision.autocast(self._context):
                terms = [as_sum_and_count(loss_fn(*selected), selected[1], is_padding=False)]
            if isinstance(loss_fn, ContrastiveLoss):
                selected = (similarities(embed_groups(loss_fn, *selected)), selected[1])
            terms += [compute_terms(metric, *selected, ignore_index) for metric in metrics]
            for column, (total, count) in enumerate(terms):
                count_tensor = torch.as_tensor(count, device=sums.device).double()
                sums[slice_index + 1, column] += torch.stack(
                    [to_full_tensor(total).detach().double().to(sums.device), count_tensor]
                )

    def _loss_context(self) -> AbstractContextManager[object]:
        from clustertrain.train.distributed import tensor_parallel

        return tensor_parallel.loss_context(self._context)


def _iter_chunks(batches: Iterable[EvalBatch], size: int) -> Iterator[list[EvalBatch]]:
    iterator = iter(batches)
    while chunk := list(islice(iterator, size)):
        yield chunk


def _check_pair(batch: object) -> tuple[Any, Any]:
    if not (isinstance(batch, (tuple, list)) and len(batch) == 2):
        raise UsageError("evaluate: a batch must be (inputs, target)")
    return batch[0], batch[1]


def _check_same_shapes(pairs: Sequence[Any]) -> None:
    shapes = {
        str(pytree.tree_map(lambda t: tuple(t.shape) if isinstance(t, torch.Tensor) else None, tuple(p))) for p in pairs
    }
    if len(shapes) > 1:
        raise ConfigError(
            f"micro-batches evaluated by a pipeline must have one shape: {' and '.join(sorted(shapes))}",
            fix="pad sequences to one length, and pass session.evaluate a dataset, which it splits evenly",
        )


def _select_rows(value: T, rows: Sequence[int]) -> T:
    """Select samples from each tensor."""

    def select(t: torch.Tensor) -> torch.Tensor:
        if is_dtensor(t):  # sharded by features, never by samples
            from torch.distributed.tensor import DTensor

            mesh, placements = t.device_mesh, t.placements
            return DTensor.from_local(select(t.to_local()), mesh, placements, run_check=False)
        return t[torch.tensor(list(rows), dtype=torch.long, device=t.device)]

    selected: T = pytree.tree_map_only(torch.Tensor, select, value)
    return selected


def _compute_means(sums: torch.Tensor, metrics: Sequence[EvalMetric], slices: DatasetSlices) -> dict[str, float]:
    """Return the means; the only wait for the device."""
    rows = [sums.sum(0).tolist(), *sums[1:].tolist()]
    if not rows[0][0][1]:
        raise ConfigError(
            "the evaluation has no targets: all targets of the validation data are masked",
            fix="check objective.ignore_index and the data",
        )
    means: dict[str, float] = {}
    finalizers: Mapping[str, Callable[[float], float]] = {"loss": float, **{m.name: m.finalize for m in metrics}}
    for name, row in zip(("", *slices.names), rows, strict=True):
        for (metric, finalize), (total, count) in zip(finalizers.items(), row, strict=True):
            if count:
                means[f"{VALIDATION_PREFIX}{metric}{SLICE_SEPARATOR if name else ''}{name}"] = finalize(total / count)
    return means
