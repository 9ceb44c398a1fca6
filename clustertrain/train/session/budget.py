"""The run's budget: rank 0 tracks the usage, and all ranks stop together when the budget is spent."""

from __future__ import annotations

import logging
from collections.abc import Callable

from clustertrain import clock
from clustertrain.config.contract import ContractSpec
from clustertrain.run import attempts
from clustertrain.run.usage import budget
from clustertrain.run.usage.budget import BudgetUsage
from clustertrain.train.core.context import RankContext

log = logging.getLogger(__name__)


class BudgetTracker:
    """Tracker of the run's usage: earlier attempts from their files, read once, and this attempt from the clock."""

    def __init__(self, context: RankContext, emit_event: Callable[..., None]) -> None:
        contract = context.spec.recipe.contract if context.spec is not None else ContractSpec()
        self._contract = contract
        self._is_enabled = context.rank == 0 and contract.has_budget and context.attempt is not None
        self._emit_event = emit_event
        self._world_size = context.world_size
        self._is_reported = False
        self._earlier_usage = BudgetUsage()
        self._start_time = 0.0  # start of this attempt, monotonic clock
        if self._is_enabled and context.run is not None and context.attempt is not None:
            history = attempts.load_attempts(context.run)
            n = context.attempt.n
            earlier = [a for a in history if a.n < n]
            self._earlier_usage = budget.compute_usage(context.run, earlier, None, contract.gpu_hour_cost)
            start = next((a.start for a in history if a.n == n), None)
            elapsed_s = max(0.0, clock.now() - start) if start is not None else 0.0
            self._start_time = clock.monotonic() - elapsed_s

    def current_usage(self) -> BudgetUsage:
        """Return the usage of all attempts so far."""
        seconds = clock.monotonic() - self._start_time
        return self._earlier_usage.add(seconds, self._world_size, self._contract.gpu_hour_cost)

    def should_stop(self) -> bool:
        """Return whether the run must end because the budget is spent; true only once, since ranks act a step later.

        With ``on_budget_spent = "warn"``, report a warning instead.
        """
        if not self._is_enabled or self._is_reported:
            return False
        reason = self.spent_reason()
        if not reason:
            return False
        self._is_reported = True
        if self._contract.on_budget_spent == "stop":
            return True
        fix = "cancel the run or let it continue: contract.on_budget_spent is 'warn'"
        self._emit_event(
            "training_warning", code="budget_spent", text=reason, fix=fix, step=None, value=None, limit=None
        )
        log.warning("%s; %s", reason, fix)
        return False

    def spent_reason(self) -> str:
        """Return text that names the limits reached; empty if there are none, and on ranks other than 0."""
        return budget.format_spent(self._contract, self.current_usage()) if self._is_enabled else ""
