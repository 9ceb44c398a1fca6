"""What to train. A recipe is a TOML file with these tables; every key has a default, unknown keys and those that
nothing reads (:mod:`clustertrain.config.checks.unused_keys`) fail.

The same file may carry ``[job]`` (see :mod:`clustertrain.config.job`) and ``[env]``; options of the command line win.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

from clustertrain import settings
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
from clustertrain.config.model import ModelKind, ModelSpec
from clustertrain.config.objective import ObjectiveKind, ObjectiveSpec
from clustertrain.config.optim import OptimSpec
from clustertrain.config.parallel import ParallelSpec
from clustertrain.config.rehearsal import RehearsalSpec
from clustertrain.config.schedule import ScheduleSpec
from clustertrain.config.stability import StabilitySpec
from clustertrain.config.telemetry import TelemetrySpec
from clustertrain.config.tracking import TrackingSpec
from clustertrain.config.train import TrainSpec

# The first is what "auto" stands for.
DATA_KINDS_BY_MODEL: Mapping[ModelKind, tuple[DataKind, ...]] = {
    "decoder": ("text", "tokens", "own"),
    "convnet": ("images", "own"),
    "two-tower": ("pairs", "own"),
}


def _is_higher_better(metric: str) -> bool:
    """Whether more of it is better, by its name."""
    return metric.removeprefix(VALIDATION_PREFIX).partition(SLICE_SEPARATOR)[0] in HIGHER_IS_BETTER


class Recipe(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    contract: ContractSpec = ContractSpec()
    model: ModelSpec = ModelSpec()
    data: DataSpec = DataSpec()
    objective: ObjectiveSpec = ObjectiveSpec()
    optim: OptimSpec = OptimSpec()
    schedule: ScheduleSpec = ScheduleSpec()
    parallel: ParallelSpec = ParallelSpec()
    train: TrainSpec = TrainSpec()
    stability: StabilitySpec = StabilitySpec()
    evaluation: EvaluationSpec = EvaluationSpec()
    checkpoint: CheckpointSpec = CheckpointSpec()
    telemetry: TelemetrySpec = TelemetrySpec()
    tracking: TrackingSpec = TrackingSpec()
    rehearsal: RehearsalSpec = RehearsalSpec()

    def __post_init__(self) -> None:
        cross_checks.check_recipe(self)

    @property
    def data_kind(self) -> DataKind:
        """Never auto."""
        return DATA_KINDS_BY_MODEL[self.model.kind][0] if self.data.kind == "auto" else self.data.kind

    @property
    def data_path(self) -> Path | None:
        """The file or folder that the data is read from; None: it needs none."""
        return self._resolve_path("path")

    @property
    def validation_path(self) -> Path | None:
        """That of the validation data; None: it needs none, or there is none."""
        return self._resolve_path("validation_path")

    def _resolve_path(self, key: str) -> Path | None:
        path: str = getattr(self.data, key)
        is_built_in = self.data.entry or not path or path in BUILT_IN_DATASETS.get(self.data_kind, ())
        return None if is_built_in else settings.expand_user_path(path, f"data.{key}")

    @property
    def tokens_per_sample(self) -> int:
        """0 for images and for data of one's own."""
        sequences = {"text": 1, "tokens": 1, "pairs": 2}
        return sequences.get(self.data_kind, 0) * self.data.seq_len

    @property
    def is_text(self) -> bool:
        """Whether the model reads tokens, so that what holds for language models holds for it."""
        return self.data_kind in ("text", "tokens", "pairs")

    @property
    def objective_kind(self) -> ObjectiveKind:
        """Never auto; of an entry with a loss of its own it does not count."""
        if self.objective.kind != "auto":
            return self.objective.kind
        return "nt-xent" if self.model.kind == "two-tower" else "cross-entropy"

    @property
    def evaluated_metrics(self) -> tuple[MetricName, ...]:
        """What an evaluation gives besides the loss."""
        return self.evaluation.metrics or cross_checks.default_metrics(self.objective_kind, is_text=self.is_text)

    @property
    def evaluation_interval(self) -> int:
        """Steps between evaluations, at least 1; there are none unless ``data.validates``."""
        return self.evaluation.every or max(1, self.train.steps // 10)

    @property
    def deciding_metric(self) -> str:
        """The name in the rows of the scalar by which the run is judged."""
        return self.contract.metric or (f"{VALIDATION_PREFIX}loss" if self.data.has_validation else "loss")

    @property
    def higher_is_better(self) -> bool:
        """Of the deciding metric."""
        if self.contract.mode != "auto":
            return self.contract.mode == "max"
        return _is_higher_better(self.deciding_metric)

    @property
    def best_mode(self) -> Literal["min", "max"]:
        """Of what decides which checkpoints are the best."""
        checkpoint = self.checkpoint
        if checkpoint.best_mode != AUTO:
            return "max" if checkpoint.best_mode == "max" else "min"
        if checkpoint.best in ("", self.deciding_metric):
            return "max" if self.higher_is_better else "min"
        return "max" if _is_higher_better(checkpoint.best) else "min"

    @property
    def profiled_steps(self) -> range:
        """Of ``train.profile``; empty where nothing is."""
        first, _, end = self.train.profile.partition(":")
        return range(int(first), int(end)) if self.train.profile else range(0)
