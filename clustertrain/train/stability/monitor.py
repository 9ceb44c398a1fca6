"""Stability monitoring of a session's steps, and the state that it keeps in checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from clustertrain.checkpoint.load.rollback import RollbackTarget
from clustertrain.train.core.context import RankContext
from clustertrain.train.core.step_types import StepResult
from clustertrain.train.data.loader import Loader
from clustertrain.train.stability.divergence import CHECK_LAG_STEPS, DivergencePolicy, PositionHistory, Rollback
from clustertrain.train.stability.layer_stats import LayerStats
from clustertrain.train.stability.noise_scale import NoiseScale
from clustertrain.train.stability.step_guard import StepGuard

STATE_KEY = "stability"  # key in the run's state


class StabilityMonitor:
    """Monitor of the steps that :meth:`Session.train_step` runs; custom training steps are not monitored."""

    def __init__(self, model: nn.Module, guard: StepGuard, context: RankContext) -> None:
        self._noise_scale = NoiseScale(context)
        self._spec = spec = context.stability
        self._guard = guard
        self._model = model
        self._context = context
        self._layer_stats: LayerStats | None = None
        self.divergence_policy = DivergencePolicy(spec, CHECK_LAG_STEPS if context.device.type == "cuda" else 0)
        self._history = PositionHistory(spec.max_skipped + spec.roll_back_margin + CHECK_LAG_STEPS + 1)
        self._loaders: dict[str, Loader] = {}
        self._positions_before: dict[str, int] = {}
        self._last_result: StepResult | None = None

    def track_loaders(self, state: Mapping[str, Any]) -> None:
        """Remember the loaders in the run's ``state``, whose samples can be excluded."""
        self._loaders = {name: value for name, value in state.items() if isinstance(value, Loader)}

    def layer_stats_for(self, step: int) -> LayerStats | None:
        """Return the collector of layer statistics if they are due in step ``step``, counted from 1; else None."""
        if not self._spec.layer_stats_every or step % self._spec.layer_stats_every:
            return None
        if self._layer_stats is None:
            self._layer_stats = LayerStats(self._model, self._context)
        return self._layer_stats

    def noise_scale_for(self, step: int) -> NoiseScale | None:
        """Return the noise scale if it is due in step ``step``, counted from 1; else None."""
        every = self._spec.noise_scale_every
        return self._noise_scale if every and step % every == 0 else None

    def begin_step(self) -> None:
        """Record the loaders' positions before a step."""
        self._positions_before = {name: loader.position for name, loader in self._loaders.items()}
        self._last_result = None

    def record_step(self, result: StepResult) -> None:
        """Record the result of the current step."""
        self._last_result = result

    def end_step(self, step: int) -> None:
        """Record the positions and the result of ``step``, counted from 1."""
        self._history.record(
            step, {n: (before, self._loaders[n].position) for n, before in self._positions_before.items()}
        )
        if self._last_result is not None:
            self.divergence_policy.enqueue(step, self._last_result)

    def check(self, step: int, *, check_all: bool) -> tuple[Rollback, RollbackTarget] | None:
        """Return the rollback that the run needs and its requirements for the checkpoint, or None.

        Raises:
            Diverged: see :meth:`DivergencePolicy.check`.
        """
        rollback = self.divergence_policy.check(step, check_all=check_all)
        if rollback is None:
            return None
        first = max(1, rollback.first_step - self._spec.roll_back_margin)
        target = RollbackTarget(
            last_step=rollback.last_step,
            max_step=first - 1,
            reason=rollback.reason,
            excluded=self._history.ranges_between(first, rollback.last_step),
            max_rollbacks=self._spec.max_roll_backs,
        )
        return rollback, target

    def describe_samples(self, step: int, micro_batch: int) -> str:
        """Return text that names the samples of ``step``; empty if they are unknown.

        ``micro_batch`` is the index of the only micro-batch with a NaN or Inf loss, whose samples alone are then named;
        -1 if there is no such micro-batch.
        """
        ranges_by_loader = self._history.ranges_between(step, step)
        # With several loaders, the index does not identify a loader's micro-batch.
        micro_batch_index = micro_batch if len(ranges_by_loader) == 1 else -1
        return "; ".join(
            self._loaders[name].describe_batch(ranges[-1][0], micro_batch_index)
            for name, ranges in ranges_by_loader.items()
        )

    def init_fresh_state(self) -> None:
        self._guard.init_fresh_state()
        self._noise_scale.init_fresh_state()
        self.divergence_policy.init_fresh_state()
        self._history.init_fresh_state()

    def state_dict(self) -> dict[str, Any]:
        return {
            "guard": self._guard.state_dict(),
            "supervisor": self.divergence_policy.state_dict(),
            "trail": self._history.state_dict(),
            "noise": self._noise_scale.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._guard.load_state_dict(state["guard"])
        self.divergence_policy.load_state_dict(state["supervisor"])
        self._history.load_state_dict(state["trail"])
        if "noise" in state:  # not in checkpoints of earlier versions
            self._noise_scale.load_state_dict(state["noise"])
