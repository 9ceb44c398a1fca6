"""Optimizers made of others: what they have in common, and the pair of one for matrices and one for the rest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from clustertrain.checkpoint.core.state_dict import WrappedOptimizer, inner_optimizers
from clustertrain.errors import UsageError

ParamGroups = list[dict[str, Any]]
OptimizerFactory = Callable[[ParamGroups], torch.optim.Optimizer]


class CompositeOptimizer(torch.optim.Optimizer):
    """Its groups are what callers see and change; each has a twin in one of the optimizers inside, which gets the
    options before a step and gives back what it counts after it. The state is inside: it goes into checkpoints through
    ``inner_optimizers``, since a ``state_dict`` of this rank alone would hold some of the parameters only."""

    def __init__(self, groups: ParamGroups) -> None:
        self._inner: list[tuple[torch.optim.Optimizer, list[int]]] = []
        super().__init__(groups, {})

    def _add_inner(self, optimizer: torch.optim.Optimizer, group_indices: Sequence[int]) -> None:
        """``optimizer`` has the twins of the groups number ``group_indices``."""
        self._inner.append((optimizer, list(group_indices)))
        self._pull_options()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self._inner:
            raise UsageError("this optimizer takes no further groups", fix="give it all of them when it is made")
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
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if closure is not None:
            raise UsageError("this optimizer takes no closure", fix="call backward() before step()")
        self._push_options()
        self._update()
        self._pull_options()

    def _update(self) -> None:
        for optimizer, _ in self._inner:
            optimizer.step()

    def inner_optimizers(self) -> list[WrappedOptimizer]:
        """What has the state, for checkpoints."""
        return [inner for optimizer, _ in self._inner for inner in inner_optimizers(optimizer)]

    def state_dict(self) -> NoReturn:
        raise UsageError(
            f"{type(self).__name__} has no state_dict: its state is spread over the ranks",
            fix="put the optimizer itself into the state of session.steps",
        )

    def load_state_dict(self, state_dict: Any) -> NoReturn:
        self.state_dict()


class OptimizerPair(CompositeOptimizer):
    """One optimizer for the groups that say ``marked``, another one for those that do not."""

    def __init__(
        self, groups: ParamGroups, *, marked: str, first: OptimizerFactory, rest: OptimizerFactory, **defaults: Any
    ) -> None:
        """``defaults``: options that a group has where it says nothing."""
        super().__init__([{**defaults, **group} for group in groups])
        for factory, is_marked in ((first, True), (rest, False)):
            group_indices = [i for i, group in enumerate(self.param_groups) if bool(group.get(marked)) == is_marked]
            if group_indices:
                self._add_inner(factory([dict(self.param_groups[i]) for i in group_indices]), group_indices)
