"""Recipes: TOML files that describe what to train, one table per file of this package.

Every key has a default. Unknown keys and keys that nothing reads (:mod:`clustertrain.config.checks.unused_keys`) are
refused. The file may also contain ``[job]`` (:mod:`clustertrain.config.job`) and ``[env]``; command-line options win.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from clustertrain import settings
from clustertrain.config.adapter import AdapterSpec
from clustertrain.config.checkpoint import AUTO, CheckpointSpec
from clustertrain.config.checks import cross_checks
from clustertrain.config.contract import ContractSpec
from clustertrain.config.data import BUILT_IN_DATASETS, DataKind, DataSpec
from clustertrain.config.evaluation import (
    HIGHER_IS_BETTER,
    SLICE_SEPARATOR,
    VALIDATION_PREFIX,
    EvaluationSpec,
    MetricName,
)
from clustertrain.config.model import DATA_KINDS_BY_MODEL, ModelSpec
from clustertrain.config.objective import ObjectiveKind, ObjectiveSpec
from clustertrain.config.optim import OptimSpec
from clustertrain.config.optimizers import OPTIMIZERS
from clustertrain.config.parallel import ParallelSpec
from clustertrain.config.preemption_test import PreemptionTestSpec
from clustertrain.config.schedule import ScheduleSpec
from clustertrain.config.stability import StabilitySpec
from clustertrain.config.telemetry import TelemetrySpec
from clustertrain.config.tracking import TrackingSpec
from clustertrain.config.train import TrainSpec


def _is_higher_better(metric: str) -> bool:
    """Return whether higher values of ``metric`` are better, by its name."""
    return metric.removeprefix(VALIDATION_PREFIX).partition(SLICE_SEPARATOR)[0] in HIGHER_IS_BETTER


class Recipe(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A recipe: all tables except ``[job]`` and ``[env]``, checked against each other."""

    contract: ContractSpec = ContractSpec()
    """Purpose, deciding metric and budget of the run."""
    model: ModelSpec = ModelSpec()
    """Architecture and sizes."""
    data: DataSpec = DataSpec()
    """Training and validation data."""
    objective: ObjectiveSpec = ObjectiveSpec()
    """Loss function."""
    adapter: AdapterSpec = AdapterSpec()
    """Adapters beside a frozen model."""
    optim: OptimSpec = OptimSpec()
    """Optimizer, trained parameters, gradient clipping."""
    schedule: ScheduleSpec = ScheduleSpec()
    """Learning-rate schedule."""
    parallel: ParallelSpec = ParallelSpec()
    """Options of the parallel layout."""
    train: TrainSpec = TrainSpec()
    """Steps, batch sizes, precision."""
    stability: StabilitySpec = StabilitySpec()
    """Checks of each step and the reaction to divergence."""
    evaluation: EvaluationSpec = EvaluationSpec()
    """Evaluation on the validation data."""
    checkpoint: CheckpointSpec = CheckpointSpec()
    """Saving and retention of checkpoints."""
    telemetry: TelemetrySpec = TelemetrySpec()
    """Recording, alerts and export of GPU and run metrics."""
    tracking: TrackingSpec = TrackingSpec()
    """External experiment trackers."""
    preemption_test: PreemptionTestSpec = PreemptionTestSpec()
    """Deliberate preemptions, for tests."""

    def __post_init__(self) -> None:
        cross_checks.check_recipe(self)

    @property
    def data_kind(self) -> DataKind:
        """The kind of data, with ``"auto"`` resolved."""
        return DATA_KINDS_BY_MODEL[self.model.kind][0] if self.data.kind == "auto" else self.data.kind

    @property
    def data_path(self) -> Path | None:
        """The file or folder of the training data; None for built-in data and entries."""
        return self._resolve_path("path")

    @property
    def validation_path(self) -> Path | None:
        """The file or folder of the validation data; None for built-in data, entries and without validation data."""
        return self._resolve_path("validation_path")

    @property
    def data_files(self) -> dict[str, Path]:
        """The files and folders that the data is read from, by their keys in ``[data]``."""
        paths = {"path": self.data_path, "validation_path": self.validation_path}
        for key in ("tokenizer", "chat_template"):
            text: str = getattr(self.data, key)
            paths[key] = settings.expand_user_path(text, f"data.{key}") if text else None
        return {key: path for key, path in paths.items() if path is not None}

    def _resolve_path(self, key: str) -> Path | None:
        path: str = getattr(self.data, key)
        is_built_in = self.data.entry or not path or path in BUILT_IN_DATASETS.get(self.data_kind, ())
        return None if is_built_in else settings.expand_user_path(path, f"data.{key}")

    @property
    def tokens_per_sample(self) -> int:
        """Tokens per sample; 0 for images and for data entries."""
        return self.sequences_per_sample * self.data.seq_len if self.is_text else 0

    @property
    def sequences_per_sample(self) -> int:
        """Sequences of ``data.seq_len`` tokens that the model reads per sample."""
        return 2 if self.data_kind == "pairs" or self.objective_kind == "dpo" else 1

    @property
    def is_text(self) -> bool:
        """The model reads tokens, so defaults for language models apply."""
        return self.data_kind in ("text", "tokens", "chat", "pairs")

    @property
    def attends_in_documents(self) -> bool:
        """Attention stays inside the documents of packed samples."""
        is_packed = self.data.pack and self.data_kind in ("tokens", "chat")
        return self.data.attention == "document" and (is_packed or self.data_kind == "custom")

    @property
    def objective_kind(self) -> ObjectiveKind:
        """The loss function, with ``"auto"`` resolved. Unused if a model entry computes its loss itself."""
        if self.objective.kind != "auto":
            return self.objective.kind
        return "nt-xent" if self.model.kind == "two-tower" else "cross-entropy"

    @property
    def compares_batch(self) -> bool:
        """The loss compares all samples of the global batch, over ranks and micro-batches."""
        return self.objective_kind == "nt-xent" and not self.objective.group

    @property
    def evaluated_metrics(self) -> tuple[MetricName, ...]:
        """Metrics of an evaluation in addition to the loss."""
        return self.evaluation.metrics or cross_checks.default_metrics(self.objective_kind, is_text=self.is_text)

    @property
    def evaluation_interval(self) -> int:
        """Steps between evaluations, at least 1. Without validation data there are no evaluations."""
        return self.evaluation.every or max(1, self.train.steps // 10)

    @property
    def cycles_momentum(self) -> bool:
        """The schedule moves the momentum against the learning rate."""
        is_cycle = self.schedule.kind == "one-cycle" and self.schedule.cycle_momentum
        return is_cycle and OPTIMIZERS[self.optim.name].can_change_momentum and self.optim.momentum != 0

    @property
    def deciding_metric(self) -> str:
        """Name of the scalar that judges the run."""
        return self.contract.metric or (f"{VALIDATION_PREFIX}loss" if self.data.has_validation else "loss")

    @property
    def higher_is_better(self) -> bool:
        """Higher values of the deciding metric are better."""
        if self.contract.mode != "auto":
            return self.contract.mode == "max"
        return _is_higher_better(self.deciding_metric)

    @property
    def best_mode(self) -> Literal["min", "max"]:
        """Direction of the scalar that ranks checkpoints."""
        checkpoint = self.checkpoint
        if checkpoint.best_mode != AUTO:
            return "max" if checkpoint.best_mode == "max" else "min"
        if checkpoint.best in ("", self.deciding_metric):
            return "max" if self.higher_is_better else "min"
        return "max" if _is_higher_better(checkpoint.best) else "min"

    @property
    def profiled_steps(self) -> range:
        """Steps that ``train.profile`` selects; empty if it is unset."""
        first, _, end = self.train.profile.partition(":")
        return range(int(first), int(end)) if self.train.profile else range(0)
