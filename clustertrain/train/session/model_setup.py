"""A session's model and optimizer, prepared for the layout, and the events that report on them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import ParamsT

from clustertrain.checkpoint.core.state_dict import model_parts
from clustertrain.errors import ConfigError
from clustertrain.train.distributed import low_bit
from clustertrain.train.distributed.parallelize import parallelize
from clustertrain.train.models import meta_buffers, train_mode
from clustertrain.train.optim import build, param_groups, param_info
from clustertrain.train.session import adapter_setup, pretrained
from clustertrain.train.session.adapter_setup import AdapterSetup
from clustertrain.train.session.pretrained import PretrainedWeights, SelectedWeights
from clustertrain.train.session.runtime import SessionRuntime
from clustertrain.train.stability import warnings
from clustertrain.train.stability.monitor import StabilityMonitor
from clustertrain.train.step.train_step import TrainStep

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PreparedModel:
    """A model on its device, parallelized."""

    model: nn.Module
    param_table: param_info.ParamTable
    """The parameters of the whole model, recorded before it was split."""
    unfreeze_steps: Mapping[str, int]
    """By parameter name, the first optimizer step (counted from 1) that trains a parameter frozen at the start."""

    def frozen_parameters(self) -> list[tuple[int, nn.Parameter]]:
        """Return this rank's parameters that are unfrozen later, each with its step in :attr:`unfreeze_steps`."""
        return [
            (self.unfreeze_steps[name], p)
            for name, p in param_groups.trainable_parameters(self.model)
            if name in self.unfreeze_steps
        ]


def prepare_model(
    runtime: SessionRuntime,
    model: nn.Module,
    freeze: Sequence[str],
    unfreeze: Sequence[tuple[int, Sequence[str]]],
    weights: Sequence[PretrainedWeights] = (),
    adapter: AdapterSetup | None = None,
) -> PreparedModel:
    """Freeze and parallelize ``model``, and load the ``weights`` of it or of its modules and those of its ``adapter``,
    unless a checkpoint will replace them; see ``Session.parallelize``. Collective.

    Raises:
        ConfigError: a pattern matches nothing, nothing is left to train, or the layout does not fit the model.
    """
    if adapter is not None and (freeze or unfreeze):
        raise ConfigError(
            "the model has adapters, which freeze the whole model, but freeze or unfreeze is given",
            fix="leave out freeze and unfreeze, and choose the layers with target_modules",
        )
    param_table = param_info.build_param_table(model)
    unfreeze_steps = param_info.find_unfreeze_steps(param_table, unfreeze)
    param_info.freeze(model, param_table, freeze, unfreeze_steps)
    packed = low_bit.packed_shapes(model)
    selected = pretrained.select(weights, model, runtime.context.layout)
    will_load = frozenset(name for s in selected for name in s.parameter_names())
    meta_buffers.fill(model)
    parallelized = parallelize(model, runtime.context, runtime.groups, runtime.seed, will_load=will_load)
    if adapter is not None:
        runtime.checkpointer.adapter = adapter.describe(pretrained.find_whole(selected))
    if selected or adapter is not None:
        _load_unless_resuming(runtime, parallelized, selected, packed, adapter)
    train_mode.on_first_eval_forward(model_parts(parallelized), lambda names: report_eval_mode(runtime, names))
    return PreparedModel(parallelized, param_table, unfreeze_steps)


def _load_unless_resuming(
    runtime: SessionRuntime,
    model: nn.Module,
    selected: Sequence[SelectedWeights],
    packed: Mapping[str, tuple[int, int]],
    adapter: AdapterSetup | None,
) -> None:
    """Load the weights and the adapter, now or if no checkpoint replaces them."""

    def load() -> None:
        # Again, since a resume that finds no valid checkpoint has not resolved the names.
        current = [replace(s, weights=pretrained.resolve(runtime, s.weights)) for s in selected]
        pretrained.load(runtime, model, current, packed)
        if adapter is not None:
            adapter_setup.load(runtime, model, adapter, pretrained.find_whole(current))

    if runtime.checkpointer.has_committed():
        runtime.state.load_initial_weights = load
    else:
        load()


def report_eval_mode(runtime: SessionRuntime, names: Sequence[str], *, switched: bool = False) -> None:
    """Warn on rank 0 that the modules ``names`` are trained in evaluation mode, or were ``switched`` out of it."""
    if runtime.is_main:
        warning = warnings.build_eval_mode_warning(names, switched=switched)
        runtime.warning_reporter.report(warning, runtime.state.step + 1)


def build_train_step(
    runtime: SessionRuntime,
    prepared: PreparedModel,
    cls: type[torch.optim.Optimizer] | str,
    params: ParamsT | None,
    options: dict[str, Any],
) -> TrainStep:
    """Build the optimizer and the training step that drives it, and report the parameter groups.

    Raises:
        ConfigError: the name is unknown, or the optimizer is for matrices and the model has none.
        UnsuitableEnvironment: a package is missing.
    """
    optimizer = build.build_optimizer(
        cls,
        params,
        options,
        model=prepared.model,
        param_table=prepared.param_table,
        context=runtime.context,
        groups=runtime.groups,
    )
    frozen = prepared.frozen_parameters()
    train_step = TrainStep(
        prepared.model,
        optimizer,
        runtime.context,
        runtime.groups,
        runtime.loss_scale,
        emit_event=runtime.events.emit,
        get_frozen=lambda: [p for step, p in frozen if runtime.state.step + 1 < step],
    )
    runtime.metrics_processor.monitor = StabilityMonitor(prepared.model, train_step.guard, runtime.context)
    _report_param_groups(runtime, prepared.model, cls if isinstance(cls, str) else cls.__name__, optimizer)
    return train_step


def _report_param_groups(
    runtime: SessionRuntime, model: nn.Module, name: str, optimizer: torch.optim.Optimizer
) -> None:
    """Report how rank 0's parameters are trained."""
    group_rows = param_groups.groups_for_event(optimizer)
    frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    runtime.events.emit("optimizer", optimizer=name, groups=group_rows, frozen=frozen)
    if runtime.is_main:
        summary = "; ".join(f"{g['group']}: {g['parameters']:,} in {g['tensors']} tensors" for g in group_rows)
        log.info("optimizer %s: %s; frozen: %s", name, summary, f"{frozen:,}")
