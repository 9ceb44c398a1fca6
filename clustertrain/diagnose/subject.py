"""The subject of the checks: the recipe's model, data and loss, built for each check as the trainer builds them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import torch
from torch import nn
from torch.utils.data import default_collate

from clustertrain.config.data import AugmentSpec
from clustertrain.config.recipe import Recipe
from clustertrain.plan.layout import Batch
from clustertrain.run.run_dir import RunDir
from clustertrain.train.core import step_types
from clustertrain.train.data import permutation
from clustertrain.train.data.streams.source import as_map_style
from clustertrain.train.distributed.dropout import Dropout
from clustertrain.train.models.build import TrainingTask, build_task
from clustertrain.train.session.session import session
from clustertrain.train.trainer import Trainer, build_trainer

# Attribute names under which attention modules keep their dropout probability.
_DROPOUT_ATTRIBUTES = ("dropout", "attention_dropout", "attn_dropout", "attn_pdrop", "dropout_p")


@dataclasses.dataclass(frozen=True)
class Subject:
    """A recipe with the batch, run folder and device to check it with."""

    recipe: Recipe
    batch: Batch
    """One micro-batch per step."""
    run: RunDir
    """A scratch run folder that exists as long as the checks run."""
    device: torch.device
    has_model_loss: bool = False
    """Whether the model's module defines the loss; its expected value is then unknown."""

    def build_task(self) -> TrainingTask:
        return build_task(self.recipe)

    def with_overrides(self, **tables: Any) -> Subject:
        """Return a copy with keys of the recipe's tables replaced, such as ``optim={"lr": 1.0}``."""
        replaced = {name: msgspec.structs.replace(getattr(self.recipe, name), **keys) for name, keys in tables.items()}
        return dataclasses.replace(self, recipe=msgspec.structs.replace(self.recipe, **replaced))

    def without_regularization(self) -> Subject:
        """Return a copy without dropout, augmentation, label smoothing, weight decay and data workers."""
        return self.with_overrides(
            model={"dropout": 0.0},
            data={"augment": AugmentSpec(), "workers": 0},
            objective={"label_smoothing": 0.0},
            optim={"weight_decay": 0.0},
        )

    @contextmanager
    def trainer(self) -> Iterator[Trainer]:
        """Yield a new trainer in its own session."""
        with session(seed=self.recipe.train.seed, device=self.device.type) as s:
            yield build_trainer(s, self.recipe, self.batch)

    @property
    def sample_multiple(self) -> int:
        """Return the number that a batch size must be a multiple of."""
        return (self.recipe.objective.group or 2) if self.recipe.objective_kind == "nt-xent" else 1

    @property
    def small_sample_count(self) -> int:
        """Return eight, rounded up to a multiple of ``sample_multiple``."""
        return -(-8 // self.sample_multiple) * self.sample_multiple


def load_batch(trainer: Trainer, recipe: Recipe, count: int, start: int = 0) -> Any:
    """Return (inputs, target) of ``count`` samples from position ``start`` of the run on, on the device."""
    dataset = as_map_style(trainer.task.dataset)
    indices = permutation.samples_at(recipe.train.seed, len(dataset), start, count)
    return to_device(trainer.session.device, tuple(default_collate([dataset[i] for i in indices])))


def to_device(device: torch.device, batch: Any) -> Any:
    """Return ``batch`` with every tensor moved to ``device``; lists become tuples."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device)
    if isinstance(batch, dict):
        return {k: to_device(device, v) for k, v in batch.items()}
    if isinstance(batch, (list, tuple)):
        return tuple(to_device(device, v) for v in batch)
    return batch


def repeat_batch(trainer: Trainer, batch: Any) -> Trainer:
    """Return a trainer whose every step uses ``batch``."""
    return dataclasses.replace(trainer, data=itertools.repeat(batch))  # type: ignore[arg-type]  # a step only calls next()


def disable_dropout(model: nn.Module) -> None:
    """Set the dropout probability of every module with a known dropout attribute to 0, in place."""
    for module in model.modules():
        if isinstance(module, (nn.modules.dropout._DropoutNd, Dropout)):
            module.p = 0.0
        for name in _DROPOUT_ATTRIBUTES:
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


def model_output(trainer: Trainer, batch: Any) -> Any:
    """Return the model's output on ``batch``, in the precision of training."""
    inputs, _ = batch
    with trainer.session.autocast():
        return step_types.call_model(trainer.model, inputs, None)


def mean_loss(trainer: Trainer, batch: Any) -> torch.Tensor:
    """Return the mean loss of one micro-batch as a scalar tensor on the device."""
    with trainer.session.autocast():
        value, count = step_types.as_sum_and_count(
            trainer.loss(step_types.call_model(trainer.model, batch[0], None), batch[1]), batch[1], False
        )
    mean: torch.Tensor = value.float() / count
    return mean


def collect_tensors(batch: Any) -> list[torch.Tensor]:
    """Return every tensor in a nested batch."""
    if isinstance(batch, torch.Tensor):
        return [batch]
    inner: Sequence[Any] = list(batch.values()) if isinstance(batch, dict) else batch
    return [t for item in inner for t in collect_tensors(item)] if isinstance(inner, (list, tuple)) else []


def infer_num_classes(output: Any, target: Any) -> int | None:
    """Return the number of classes if ``output`` holds logits and ``target`` class indices, otherwise None."""
    if not (isinstance(output, torch.Tensor) and isinstance(target, torch.Tensor)):
        return None
    if target.is_floating_point() or target.dtype == torch.bool or output.shape[:-1] != target.shape:
        return None
    return output.shape[-1]
