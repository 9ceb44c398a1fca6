"""Optimizers composed of others: their common base, and a pair for matrices and the rest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from clustertrain.checkpoint.core.state_dict import WrappedOptimizer, inner_optimizers
from clustertrain.errors import UsageError
from clustertrain.train.optim.param_groups import ParamGroups

OptimizerFactory = Callable[[ParamGroups], torch.optim.Optimizer]


class CompositeOptimizer(torch.optim.Optimizer):
    """Base of optimizers that delegate to inner ones.

    Callers see and change its groups. Each group has a counterpart in an inner optimizer, which receives the options
    before a step and returns its counters afterwards. The inner optimizers hold the state, and ``inner_optimizers``
    exposes it to checkpoints; a ``state_dict`` of this rank would cover only some of the parameters.
    """

    def __init__(self, groups: ParamGroups) -> None:
        self._inner: list[tuple[torch.optim.Optimizer, list[int]]] = []
        super().__init__(groups, {})

    def _add_inner(self, optimizer: torch.optim.Optimizer, group_indices: Sequence[int]) -> None:
        """Add ``optimizer``, whose groups correspond to the groups ``group_indices``."""
        self._inner.append((optimizer, list(group_indices)))
        self._pull_options()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self._inner:
            raise UsageError("this optimizer accepts no further groups", fix="pass all groups when building it")
        super().add_param_group(param_group)

    def _push_options(self) -> None:
        for optimizer, group_indices in self._inner:
            for i, inner_group in zip(group_indices, optimizer.param_groups, strict=True):
                inner_group.update({k: v for k, v in self.param_groups[i].items() if k != "params"})

    def _pull_options(self) -> None:
        for optimizer, group_indices in self._inner:
            for i, inner_group in zip(group_indices, optimizer.param_groups, strict=True):
                self.param_groups[i].update({k: v for k, v in inner_group.items() if k != "params"})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        if closure is not None:
            raise UsageError("this optimizer accepts no closure", fix="call backward() before step()")
        self._push_options()
        self._update()
        self._pull_options()

    def _update(self) -> None:
        for optimizer, _ in self._inner:
            optimizer.step()

    def inner_optimizers(self) -> list[WrappedOptimizer]:
        """Return the optimizers that hold the state, for checkpoints."""
        return [inner for optimizer, _ in self._inner for inner in inner_optimizers(optimizer)]

    def state_dict(self) -> NoReturn:
        raise UsageError(
            f"{type(self).__name__} has no state_dict: its state is spread over the ranks",
            fix="pass the optimizer itself in the state of session.steps",
        )

    def load_state_dict(self, state_dict: object) -> NoReturn:
        self.state_dict()


class OptimizerPair(CompositeOptimizer):
    """One optimizer for the groups whose key ``marked`` is true, another for the rest."""

    def __init__(
        self, groups: ParamGroups, *, marked: str, first: OptimizerFactory, rest: OptimizerFactory, **defaults: object
    ) -> None:
        """Build both optimizers; ``defaults`` are options of groups that lack them."""
        super().__init__([{**defaults, **group} for group in groups])
        for factory, is_marked in ((first, True), (rest, False)):
            group_indices = [i for i, group in enumerate(self.param_groups) if bool(group.get(marked)) == is_marked]
            if group_indices:
                self._add_inner(factory([dict(self.param_groups[i]) for i in group_indices]), group_indices)
