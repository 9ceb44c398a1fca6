"""Parameters shared by several modules of a model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn

from clustertrain.checkpoint.core.state_dict import is_dtensor
from clustertrain.errors import ConfigError


@dataclass(frozen=True)
class ParamLocation:
    """Location of a parameter."""

    name: str
    """Name in the whole model."""
    module: nn.Module
    attribute: str

    @property
    def parameter(self) -> nn.Parameter:
        param = self.module._parameters[self.attribute]
        assert param is not None
        return param


def iter_param_locations(model: nn.Module) -> Iterator[ParamLocation]:
    """Yield the locations of all parameters; a module with several names counts once, because it stays one module."""
    for path, module in model.named_modules():
        for attribute, p in module._parameters.items():
            if p is not None:
                yield ParamLocation(f"{path}.{attribute}" if path else attribute, module, attribute)


def find_tied(model: nn.Module) -> list[list[ParamLocation]]:
    """Return the locations of each parameter that has more than one."""
    by_param: dict[int, list[ParamLocation]] = {}
    for location in iter_param_locations(model):
        by_param.setdefault(id(location.parameter), []).append(location)
    return [tied for tied in by_param.values() if len(tied) > 1]


@contextmanager
def preserve_ties(model: nn.Module) -> Iterator[None]:
    """Tie parameters again after a block in which each module gets a separate copy.

    Raises:
        ConfigError: the block split them differently.
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
                f"{first.name} and {other.name} are one parameter, but tp_plan splits them differently: "
                f"{_format_placements(first.parameter)} and {_format_placements(other.parameter)}",
                fix="use styles that split both by the same dimension (such as embedding and head), or replicate both",
            )
        other.module._parameters[other.attribute] = first.parameter


def _format_placements(p: nn.Parameter) -> str:
    return ", ".join(map(repr, p.placements)) if is_dtensor(p) else "whole"
