"""Parameters that several modules of a model share: weight tying."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn

from clustertrain.checkpoint.core.state_dict import is_dtensor
from clustertrain.errors import ConfigError


@dataclass(frozen=True)
class Place:
    """Where a parameter lies: ``name`` is that in the whole model."""

    name: str
    module: nn.Module
    attribute: str

    @property
    def parameter(self) -> nn.Parameter:
        found = self.module._parameters[self.attribute]
        assert found is not None
        return found


def places(model: nn.Module) -> Iterator[Place]:
    """Of all parameters. A module that has several names is one place: it cannot come apart."""
    for path, module in model.named_modules():
        for attribute, p in module._parameters.items():
            if p is not None:
                yield Place(f"{path}.{attribute}" if path else attribute, module, attribute)


def shared(model: nn.Module) -> list[list[Place]]:
    """The places of each parameter that has several."""
    found: dict[int, list[Place]] = {}
    for place in places(model):
        found.setdefault(id(place.parameter), []).append(place)
    return [same for same in found.values() if len(same) > 1]


@contextmanager
def kept(model: nn.Module) -> Iterator[None]:
    """Around what gives each module parameters of its own: those that were one are one again after it.

    Raises:
        ConfigError: they have been split in different ways.
    """
    before = shared(model)
    yield
    for same in before:
        _tie(same)


def _tie(same: Sequence[Place]) -> None:
    first = same[0]
    for other in same[1:]:
        if _lies(other.parameter) != _lies(first.parameter):
            raise ConfigError(
                f"{first.name} and {other.name} are one parameter, and tp_plan splits them in different ways: "
                f"{_lies(first.parameter)} and {_lies(other.parameter)}",
                fix="use words that split both by the same dimension, as embedding and head do, or both replicated",
            )
        other.module._parameters[other.attribute] = first.parameter


def _lies(p: nn.Parameter) -> str:
    return ", ".join(map(repr, p.placements)) if is_dtensor(p) else "whole"  # type: ignore[attr-defined]
