"""Parameters that several modules of a model share: weight tying."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn

from clustertrain.checkpoint.core.state_dict import is_dtensor
from clustertrain.errors import ConfigError


@dataclass(frozen=True)
class ParamLocation:
    """Where a parameter lies: ``name`` is that in the whole model."""

    name: str
    module: nn.Module
    attribute: str

    @property
    def parameter(self) -> nn.Parameter:
        param = self.module._parameters[self.attribute]
        assert param is not None
        return param


def iter_param_locations(model: nn.Module) -> Iterator[ParamLocation]:
    """Of all parameters. A module that has several names is one place: it cannot come apart."""
    for path, module in model.named_modules():
        for attribute, p in module._parameters.items():
            if p is not None:
                yield ParamLocation(f"{path}.{attribute}" if path else attribute, module, attribute)


def find_tied(model: nn.Module) -> list[list[ParamLocation]]:
    """The places of each parameter that has several."""
    by_param: dict[int, list[ParamLocation]] = {}
    for location in iter_param_locations(model):
        by_param.setdefault(id(location.parameter), []).append(location)
    return [tied for tied in by_param.values() if len(tied) > 1]


@contextmanager
def preserve_ties(model: nn.Module) -> Iterator[None]:
    """Around what gives each module parameters of its own: those that were one are one again after it.

    Raises:
        ConfigError: they have been split in different ways.
    """
    tied_groups = find_tied(model)
    yield
    for tied in tied_groups:
        _retie(tied)


def _retie(tied: Sequence[ParamLocation]) -> None:
    first = tied[0]
    for other in tied[1:]:
        if _format_placements(other.parameter) != _format_placements(first.parameter):
            raise ConfigError(
                f"{first.name} and {other.name} are one parameter, and tp_plan splits them in different ways: "
                f"{_format_placements(first.parameter)} and {_format_placements(other.parameter)}",
                fix="use words that split both by the same dimension, as embedding and head do, or both replicated",
            )
        other.module._parameters[other.attribute] = first.parameter


def _format_placements(p: nn.Parameter) -> str:
    return ", ".join(map(repr, p.placements)) if is_dtensor(p) else "whole"  # type: ignore[attr-defined]
