"""The start of a save: the ranks agree on who writes which shard, and copy their shards into memory."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from clustertrain.checkpoint.core import fault_points
from clustertrain.checkpoint.core.failures import Failure, error_from_failures, failure_from_exception
from clustertrain.checkpoint.core.ranks import Ranks
from clustertrain.checkpoint.core.state_dict import LocalShard, StateTree, collect_state
from clustertrain.checkpoint.format import folders
from clustertrain.checkpoint.format.staged_segments import Segment
from clustertrain.checkpoint.save.global_plan import FINGERPRINT_BYTES, GlobalPlanner, LocalPlan, RankPlan
from clustertrain.checkpoint.save.pending_saves import DEADLINE_MESSAGE
from clustertrain.checkpoint.save.staging import StagingBuffer
from clustertrain.errors import CheckpointError

_TOKEN_BYTES = 4


@dataclass(frozen=True)
class StagedSave:
    """A save whose state is in the staging buffer."""

    rank_plan: RankPlan
    folder: Path
    """The checkpoint's staging folder in the shared file system."""
    rank_values: Any
    """The JSON values of this rank."""
    staged: list[Segment] | Failure
    """The segments in the buffer, or the failure, which the ranks exchange when they finish the save."""


@dataclass(frozen=True)
class _PlanExchange:
    """An exchange of plans between the ranks that is in flight."""

    local_plan: LocalPlan | None
    """None if this rank's state cannot be saved."""
    failure: Failure | None
    wait_for_records: Callable[[], list[bytes]]
    """Waits for the records of all ranks and returns them in rank order."""


class SavePlanner:
    """Plans and stages this rank's part of the saves in ``root``. Its methods are collective."""

    def __init__(self, root: Path, ranks: Ranks, attempt: str) -> None:
        self._root = root
        self._ranks = ranks
        self._global_planner = GlobalPlanner(ranks)
        self._attempt = attempt

    def plan_shards(self, state: StateTree, rank_state: StateTree, *, error_prefix: str) -> Sequence[LocalShard]:
        """Return the shards that this rank would write now.

        Raises:
            CheckpointError: see :meth:`stage`.
        """
        return self._finish_plan(self._begin_plan(state, rank_state), state, error_prefix)[1].shards

    def stage(
        self,
        staging: StagingBuffer,
        step: int,
        state: StateTree,
        rank_state: StateTree,
        *,
        error_prefix: str,
        deadline_passed: bool,
    ) -> StagedSave:
        """Copy this rank's shards into ``staging``, unless ``deadline_passed``.

        Raises:
            CheckpointError: on all ranks, if any of them has state that cannot be saved. The message starts with
                ``error_prefix``.
        """
        plan_exchange = self._begin_plan(state, rank_state, step)
        # The copy overlaps with the exchange, because this rank usually writes the same shards as last time.
        cached_shards = (
            None
            if plan_exchange.local_plan is None or deadline_passed
            else self._global_planner.cached_shards(plan_exchange.local_plan)
        )
        staged = self._stage_shards(staging, cached_shards) if cached_shards is not None else None
        local_plan, rank_plan, token, is_cache_valid = self._finish_plan(plan_exchange, state, error_prefix, step)
        if deadline_passed:
            staged = Failure(message=DEADLINE_MESSAGE, kind="deadline")
        elif staged is None or not is_cache_valid:
            staged = self._stage_shards(staging, rank_plan.shards)
        return StagedSave(rank_plan, self._folder(step, token), local_plan.collected.rank_values, staged)

    def _folder(self, step: int, token: bytes) -> Path:
        return folders.staging_folder_for(self._root, step, self._attempt, token)

    def _begin_plan(self, state: StateTree, rank_state: StateTree, step: int | None = None) -> _PlanExchange:
        """Start the exchange of fingerprints; with a ``step``, rank 0 creates the folder first."""
        failure, local_plan, token = None, None, secrets.token_bytes(_TOKEN_BYTES)
        try:
            local_plan = LocalPlan(collect_state(state, rank_state, self._ranks.rank))
            if step is not None and self._ranks.rank == 0:
                folders.create_exclusive(self._folder(step, token))
        except (OSError, CheckpointError) as e:
            failure = failure_from_exception(e)
        fingerprint = local_plan.fingerprint if local_plan is not None and failure is None else bytes(FINGERPRINT_BYTES)
        wait_for_records = self._ranks.all_gather_bytes_async(bytes([failure is not None]) + token + fingerprint)
        return _PlanExchange(local_plan, failure, wait_for_records)

    def _finish_plan(
        self, plan_exchange: _PlanExchange, state: StateTree, error_prefix: str, step: int | None = None
    ) -> tuple[LocalPlan, RankPlan, bytes, bool]:
        """Finish the exchange. If all ranks hold the same shards, no further exchange is needed.

        Returns:
            This rank's local plan and rank plan, the token of the folder, and whether no rank's shards have changed.
        """
        records = plan_exchange.wait_for_records()
        token = records[0][1 : 1 + _TOKEN_BYTES]
        if plan_exchange.local_plan is None or any(r[0] for r in records):
            failures = self._ranks.all_gather_failures(plan_exchange.failure)
            if step is not None and self._ranks.rank == 0:
                shutil.rmtree(self._folder(step, token), ignore_errors=True)
            raise error_from_failures(error_prefix, failures)
        optimizers = [k for k, v in state.items() if isinstance(v, torch.optim.Optimizer)]
        fingerprints = [r[1 + _TOKEN_BYTES :] for r in records]
        is_unchanged = self._global_planner.is_unchanged(fingerprints)
        return (
            plan_exchange.local_plan,
            self._global_planner.create_rank_plan(plan_exchange.local_plan, fingerprints, optimizers),
            token,
            is_unchanged,
        )

    def _stage_shards(self, staging: StagingBuffer, shards: Sequence[LocalShard]) -> list[Segment] | Failure:
        fault_points.fault_point("during_staging", self._ranks.rank)
        try:
            segments = staging.stage(shards)
        except OSError as e:
            return failure_from_exception(e)
        fault_points.fault_point("after_staging", self._ranks.rank)
        return segments
