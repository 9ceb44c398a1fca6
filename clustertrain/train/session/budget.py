"""Rank 0 looks at what the run has cost, and the ranks end it together when that is enough."""

from __future__ import annotations

import logging
from collections.abc import Callable

from clustertrain import clock
from clustertrain.config.contract import ContractSpec
from clustertrain.run import attempts, budget
from clustertrain.run.budget import Used
from clustertrain.train.core.context import RankContext

log = logging.getLogger(__name__)


class Spending:
    """The files of earlier attempts are read once; what this one costs follows from the clock."""

    def __init__(self, context: RankContext, event: Callable[..., None]) -> None:
        contract = context.spec.recipe.contract if context.spec is not None else ContractSpec()
        self._contract = contract
        self._watches = context.rank == 0 and contract.has_budget and context.attempt is not None
        self._event = event
        self._ranks = context.world_size
        self._said = False
        self._before = Used()
        self._began = 0.0  # by the monotonic clock
        if self._watches and context.run is not None and context.attempt is not None:
            history = attempts.read_all(context.run)
            n = context.attempt.n
            earlier = [a for a in history if a.n < n]
            self._before = budget.used(context.run, earlier, None, contract.gpu_hour_cost)
            start = next((a.start for a in history if a.n == n), None)
            so_far_s = max(0.0, clock.now() - start) if start is not None else 0.0
            self._began = clock.monotonic() - so_far_s

    def used(self) -> Used:
        seconds = clock.monotonic() - self._began
        return self._before.plus(seconds, self._ranks, self._contract.gpu_hour_cost)

    def over(self) -> bool:
        """Whether the run is to end because of it; said once, since it takes a step to be heard."""
        if not self._watches or self._said:
            return False
        why = self.why()
        if not why:
            return False
        self._said = True
        if self._contract.when_spent == "stop":
            return True
        fix = "cancel the run, or go on: contract.when_spent is 'warn'"
        self._event("training_warning", code="budget_spent", text=why, fix=fix, step=None, value=None, limit=None)
        log.warning("%s; %s", why, fix)
        return False

    def why(self) -> str:
        """Which limits are reached; empty where none is, and on ranks that do not look."""
        return budget.spent(self._contract, self.used()) if self._watches else ""
