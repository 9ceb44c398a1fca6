"""All that watches over the steps of one session, and what of it is in the checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from clustertrain.checkpoint.load.rollback import Wanted
from clustertrain.train.core.context import RankContext
from clustertrain.train.core.step_types import StepResult
from clustertrain.train.data.loader import Loader
from clustertrain.train.stability.divergence import LAG, Back, Supervisor, Trail
from clustertrain.train.stability.layer_stats import Layers
from clustertrain.train.stability.step_guard import Guard

STATE = "stability"  # its name in the state of the run


class Watch:
    """Of the steps that :meth:`Session.train_step` does; of a script that has steps of its own nothing is known."""

    def __init__(self, model: nn.Module, guard: Guard, context: RankContext) -> None:
        self._spec = spec = context.stability
        self._guard = guard
        self._model = model
        self._context = context
        self._layers: Layers | None = None
        self.supervisor = Supervisor(spec, LAG if context.device.type == "cuda" else 0)
        self._trail = Trail(spec.max_skipped + spec.roll_back_margin + LAG + 1)
        self._loaders: dict[str, Loader] = {}
        self._before: dict[str, int] = {}
        self._last: StepResult | None = None

    def begin(self, state: Mapping[str, Any]) -> None:
        """``state``: of the run; its loaders are those whose samples can be left out."""
        self._loaders = {name: value for name, value in state.items() if isinstance(value, Loader)}

    def looks_at_layers(self, step: int) -> Layers | None:
        """What looks at them in step number ``step``, counted from 1, if it is that step's turn."""
        if not self._spec.layers_every or step % self._spec.layers_every:
            return None
        if self._layers is None:
            self._layers = Layers(self._model, self._context)
        return self._layers

    def step_begins(self) -> None:
        self._before = {name: loader.position for name, loader in self._loaders.items()}
        self._last = None

    def stepped(self, done: StepResult) -> None:
        self._last = done

    def step_ends(self, step: int) -> None:
        """``step``: its number, counted from 1."""
        self._trail.note(step, {n: (before, self._loaders[n].position) for n, before in self._before.items()})
        if self._last is not None:
            self.supervisor.put(step, self._last)

    def look(self, step: int, *, everything: bool) -> tuple[Back, Wanted] | None:
        """Whether the run must go back, and what a checkpoint must be like for that. As :meth:`Supervisor.look`."""
        back = self.supervisor.look(step, everything=everything)
        if back is None:
            return None
        first = max(1, back.first - self._spec.roll_back_margin)
        wanted = Wanted(
            last=back.last,
            most=first - 1,
            why=back.why,
            left_out=self._trail.samples_of(first, back.last),
            most_often=self._spec.max_roll_backs,
        )
        return back, wanted

    def named(self, step: int, micro_batch: int) -> str:
        """The samples that step number ``step`` took, in words; where the loss of one micro-batch alone was not finite
        (its number, else -1) those of it. Empty where nobody knows."""
        taken = self._trail.samples_of(step, step)
        # A micro-batch is one of the loader's only where there is one loader.
        alone = micro_batch if len(taken) == 1 else -1
        return "; ".join(self._loaders[name].named(ranges[-1][0], alone) for name, ranges in taken.items())

    def begin_anew(self) -> None:
        self._guard.begin_anew()
        self.supervisor.begin_anew()
        self._trail.begin_anew()

    def state_dict(self) -> dict[str, Any]:
        return {
            "guard": self._guard.state_dict(),
            "supervisor": self.supervisor.state_dict(),
            "trail": self._trail.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._guard.load_state_dict(state["guard"])
        self.supervisor.load_state_dict(state["supervisor"])
        self._trail.load_state_dict(state["trail"])
