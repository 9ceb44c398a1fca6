"""Layer by layer, in a step now and then: norms of gradients and weights, how far an update moves the weights, how
large activations are and how many units are dead. Nothing is left in the model for the steps between.

A unit is a module of the model, by its name: ``layers.0`` for what is in an outermost list, ``embed`` for what is not.
All ranks add up what they hold in one collective, under every layout.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from clustertrain import clock, reading
from clustertrain.checkpoint.core.state_dict import clean, is_dtensor, names_of_whole, parts
from clustertrain.train.core.async_copy import Arriving
from clustertrain.train.core.context import RankContext
from clustertrain.train.distributed import grad_norm

log = logging.getLogger(__name__)

SAMPLED = 1 << 16  # elements of a parameter that are kept over an update; a copy of all weights might not fit
_RELU = (nn.ReLU, nn.ReLU6)
_GRADIENT, _WEIGHT, _MOVED, _BEFORE, _ACTIVATION, _COUNT = range(6)


def unit_of(name: str) -> str:
    """The unit that a parameter or module belongs to: its name up to the first number, or its first part."""
    found = re.match(r"(?:.*?\.)?\d+(?=\.|$)", name)
    return found[0] if found else name.partition(".")[0]


class Layers:
    """Under ``parallel.compile`` there are no figures of activations: a hook would have the layers compiled again."""

    def __init__(self, model: nn.Module, context: RankContext) -> None:
        self._model = model
        self._context = context
        named = [(clean(n), m) for part in parts(model) for n, m in part.named_modules()]
        self._params = [(clean(n), p) for part in parts(model) for n, p in part.named_parameters()]
        names = names_of_whole(model) or {n for n, _ in self._params}
        self.units = sorted({unit_of(n) for n in names}, key=_in_order)
        self._elsewhere = getattr(model, "counted_elsewhere", ())
        self._hooked = [] if context.parallel.compile else [(n, m) for n, m in named if n in self.units]
        self._relus = [] if context.parallel.compile else [(n, m) for n, m in named if isinstance(m, _RELU)]
        self._sums = torch.zeros(0)
        self._alive: dict[str, torch.Tensor] = {}
        self._samples: list[torch.Tensor] = []
        self._spent_s = 0.0
        if context.parallel.compile and context.rank == 0:
            log.info("parallel.compile: the figures of layers are without activations")

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Around forward and backward of the step that is looked at."""
        self._spent_s = 0.0
        self._sums = torch.zeros(len(self.units), 6, dtype=torch.float64, device=self._context.device)
        self._alive = {}
        placed = [m.register_forward_hook(self._saw(self.units.index(n))) for n, m in self._hooked]
        placed += [m.register_forward_hook(self._saw_relu(n)) for n, m in self._relus]
        try:
            yield
        finally:
            for hook in placed:
                hook.remove()

    def _saw(self, unit: int) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            first = _first_tensor(output)
            if first is not None:
                size = torch.linalg.vector_norm(first, 1, dtype=torch.float32).double()
                self._sums[unit, _ACTIVATION] += size.to(self._sums.device)
                self._sums[unit, _COUNT] += first.numel()

        return hook

    def _saw_relu(self, name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            first = _first_tensor(output)
            if first is not None and first.dim() > 1:
                features = 1 if first.dim() > 3 else first.dim() - 1  # (batch, features, …) of images, else the last
                alive = (first > 0).any(dim=[d for d in range(first.dim()) if d != features])
                self._alive[name] = self._alive[name] | alive if name in self._alive else alive

        return hook

    def before_update(self, factor: torch.Tensor) -> None:
        """After backward: the gradients are to be multiplied by ``factor``, clipping apart."""
        started = clock.monotonic()
        self._samples = []
        for unit, p, ranks in self._mine():
            if p.grad is not None:
                square = _square(_local(p.grad)).to(factor.device) * factor.double().square()
                self._sums[unit, _GRADIENT] += square / ranks
            self._sums[unit, _WEIGHT] += _square(_local(p)).to(factor.device) / ranks
            self._samples.append(_sample(_local(p)).clone())
        self._spent_s += clock.monotonic() - started

    def after_update(self) -> Arriving:
        """The columns of the row. Collective."""
        started = clock.monotonic()
        device = self._sums.device
        for (unit, p, ranks), before in zip(self._mine(), self._samples, strict=True):
            self._sums[unit, _MOVED] += _square(_sample(_local(p)) - before).to(device) / ranks
            self._sums[unit, _BEFORE] += _square(before).to(device) / ranks
        self._samples = []
        relus = self._relu_names
        dead = torch.zeros(len(relus), 2, dtype=torch.float64, device=device)
        for name, alive in self._alive.items():
            dead[relus.index(name), 0] += (~alive).sum().to(device)
            dead[relus.index(name), 1] += alive.numel()
        figures = torch.cat([self._sums.flatten(), dead.flatten()])
        if dist.is_initialized():
            dist.all_reduce(figures)
        arriving = self._columns(figures, relus)
        self._spent_s += clock.monotonic() - started
        return arriving

    def _columns(self, figures: torch.Tensor, relus: list[str]) -> Arriving:
        of_units = figures[: 6 * len(self.units)].view(-1, 6)
        of_relus = figures[6 * len(self.units) :].view(-1, 2)
        table = {
            "grad_norm": of_units[:, _GRADIENT].sqrt(),
            "weight_norm": of_units[:, _WEIGHT].sqrt(),
            "update_ratio": (of_units[:, _MOVED] / of_units[:, _BEFORE]).sqrt(),
        }
        names = [f"{kind}/{unit}" for kind in table for unit in self.units]
        values = torch.cat([*table.values()])
        at = {n: self.units.index(n) for n in self._activation_names}
        names += [f"activation/{n}" for n in at] + [f"dead/{n}" for n in relus]
        rows = of_units[list(at.values())]
        values = torch.cat([values, rows[:, _ACTIVATION] / rows[:, _COUNT], of_relus[:, 0] / of_relus[:, 1]])
        return Arriving(names, values)

    def _mine(self) -> Iterator[tuple[int, nn.Parameter, int]]:
        """This rank's parameters: the unit, the parameter, and how many ranks hold the same."""
        for name, p in self._params:
            if id(p) not in self._elsewhere:
                yield self.units.index(unit_of(name)), p, grad_norm.holders(p, self._context.layout.pp)

    @functools.cached_property
    def _activation_names(self) -> list[str]:
        return self._of_all_stages([n for n, _ in self._hooked])

    @functools.cached_property
    def _relu_names(self) -> list[str]:
        return self._of_all_stages([n for n, _ in self._relus])

    def _of_all_stages(self, mine: Iterable[str]) -> list[str]:
        """Collective."""
        if self._context.layout.pp == 1:
            return sorted(mine, key=_in_order)
        found: list[list[str]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(found, list(mine))
        return sorted({n for names in found for n in names}, key=_in_order)


def _in_order(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if reading.is_count(part) else (-1, part) for part in name.split(".")]


def _local(t: Any) -> torch.Tensor:
    t = t.detach()
    local: torch.Tensor = t.to_local() if is_dtensor(t) else t
    return local


def _square(t: torch.Tensor) -> torch.Tensor:
    norm: torch.Tensor = torch.linalg.vector_norm(t, dtype=torch.float32)
    return norm.double().square()


def _sample(t: torch.Tensor) -> torch.Tensor:
    """Evenly spread elements of a tensor, at most :data:`SAMPLED`."""
    flat = t.reshape(-1)
    return flat[:: max(1, -(-flat.numel() // SAMPLED))]


def _first_tensor(output: Any) -> torch.Tensor | None:
    if isinstance(output, (tuple, list)):
        output = output[0] if output else None
    if not isinstance(output, torch.Tensor) or not output.is_floating_point():
        return None
    return _local(output)
