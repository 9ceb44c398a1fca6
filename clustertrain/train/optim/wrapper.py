"""Optimizers made of others: what they have in common, and the pair of one for matrices and one for the rest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from clustertrain.checkpoint.core.state_dict import Kept, keepers
from clustertrain.errors import UsageError

Groups = list[dict[str, Any]]
Make = Callable[[Groups], torch.optim.Optimizer]


class Wrapped(torch.optim.Optimizer):
    """Its groups are what callers see and change; each has a twin in one of the optimizers inside, which gets the
    options before a step and gives back what it counts after it. The state is inside: it goes into checkpoints through
    ``keepers``, since a ``state_dict`` of this rank alone would hold some of the parameters only."""

    def __init__(self, groups: Groups) -> None:
        self._inside: list[tuple[torch.optim.Optimizer, list[int]]] = []
        super().__init__(groups, {})

    def _take(self, made: torch.optim.Optimizer, of: Sequence[int]) -> None:
        """``made`` has the twins of the groups number ``of``."""
        self._inside.append((made, list(of)))
        self._pull()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self._inside:
            raise UsageError("this optimizer takes no further groups", fix="give it all of them when it is made")
        super().add_param_group(param_group)

    def _push(self) -> None:
        for made, of in self._inside:
            for i, twin in zip(of, made.param_groups, strict=True):
                twin.update({k: v for k, v in self.param_groups[i].items() if k != "params"})

    def _pull(self) -> None:
        for made, of in self._inside:
            for i, twin in zip(of, made.param_groups, strict=True):
                self.param_groups[i].update({k: v for k, v in twin.items() if k != "params"})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if closure is not None:
            raise UsageError("this optimizer takes no closure", fix="call backward() before step()")
        self._push()
        self._update()
        self._pull()

    def _update(self) -> None:
        for made, _ in self._inside:
            made.step()

    def keepers(self) -> list[Kept]:
        """What has the state, for checkpoints."""
        return [kept for made, _ in self._inside for kept in keepers(made)]

    def state_dict(self) -> NoReturn:
        raise UsageError(
            f"{type(self).__name__} has no state_dict: its state is spread over the ranks",
            fix="put the optimizer itself into the state of session.steps",
        )

    def load_state_dict(self, state_dict: Any) -> NoReturn:
        self.state_dict()


class Pair(Wrapped):
    """One optimizer for the groups that say ``marked``, another one for those that do not."""

    def __init__(self, groups: Groups, *, marked: str, first: Make, rest: Make, **defaults: Any) -> None:
        """``defaults``: options that a group has where it says nothing."""
        super().__init__([{**defaults, **group} for group in groups])
        for make, wanted in ((first, True), (rest, False)):
            of = [i for i, group in enumerate(self.param_groups) if bool(group.get(marked)) == wanted]
            if of:
                self._take(make([dict(self.param_groups[i]) for i in of]), of)
