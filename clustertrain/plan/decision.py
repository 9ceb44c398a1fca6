"""The decision for one request: its layout, its batch split and the reasons. Data only; ``plan/decide.py`` makes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from clustertrain.plan.cost.memory import MemoryEstimate
from clustertrain.plan.cost.step_time import StepEstimate
from clustertrain.plan.layout import Batch, Layout
from clustertrain.plan.request import PlanRequest
from clustertrain.plan.search.layouts import SearchResult


class RejectedLayout(msgspec.Struct, frozen=True):
    """A layout family that was not chosen, and why."""

    strategy: str
    """The family, such as ``ddp``, ``fsdp`` or ``tensor parallel``."""
    reason: str
    """Why it was not chosen."""


@dataclass(frozen=True)
class Explanation:
    """Sentences about a plan: ``reasons`` are shown when the user asks, ``warnings`` always."""

    reasons: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class PlanDecision:
    request: PlanRequest
    layout: Layout
    batch: Batch
    memory: MemoryEstimate
    result: SearchResult | None = None
    """The search that found the layout; None where nothing was searched."""
    step: StepEstimate | None = None
    """Predicted time of a step; None where the rates of the GPU are not known."""
    suggestion: str = ""
    """What would make a plan fit that does not."""
    rejected: tuple[RejectedLayout, ...] = ()
    reasons: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    def explained(self, *explanations: Explanation) -> PlanDecision:
        """Return the decision with ``explanations`` appended."""
        return replace(
            self,
            reasons=(*self.reasons, *_flatten([e.reasons for e in explanations])),
            warnings=(*self.warnings, *_flatten([e.warnings for e in explanations])),
        )


def _flatten(groups: Sequence[Sequence[str]]) -> list[str]:
    return [text for group in groups for text in group]
