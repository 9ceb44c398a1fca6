"""A session's checkpoints: restored before the first step, saved on the way, given up where the kill comes first."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from clustertrain import clock
from clustertrain.checkpoint.agree import Ranks
from clustertrain.checkpoint.manager import CheckpointManager, Saved
from clustertrain.checkpoint.manifest import Reason
from clustertrain.train import seeds
from clustertrain.train.context import RankContext
from clustertrain.train.mesh import Groups
from clustertrain.train.result import RankResult

SAVE_MARGIN = 1.5  # a save beside dying neighbours takes longer than one in peace
LAST_WORD_S = 20.0  # for a save under way when the rank fails; torchrun kills it 30 s after


class Keeping:
    """``kept`` says whether there is a folder for checkpoints at all: outside a run only where the script names one."""

    def __init__(
        self,
        context: RankContext,
        groups: Groups,
        folder: Path | None,
        threads: int,
        result: RankResult,
        event: Callable[..., None],
    ) -> None:
        self._context = context
        self._groups = groups
        self._folder = folder or (context.run.checkpoints if context.run else None)
        self._threads = threads
        self._result = result
        self._event = event
        self._slowest_save_s = 0.0
        self._manager: CheckpointManager | None = None

    @property
    def kept(self) -> bool:
        return self._manager is not None

    def open(self, keep: int) -> None:
        """Keep the ``keep`` newest from now on."""
        if self._folder is None:
            return
        context = self._context
        self._manager = CheckpointManager(
            self._folder,
            Ranks(self._groups.checkpoint),
            attempt=str(context.attempt.n) if context.attempt else "local",
            layout={f: getattr(context.layout, f) for f in context.layout.__struct_fields__},
            keep=keep,
            device=context.device,
            on_commit=self._committed,
        )
        self._manager.start()

    def restore(self, state: dict[str, Any], seed: int) -> int:
        """Fill ``state`` from the newest checkpoint that verifies; returns its step, 0 where there is none."""
        restored = self._manager.restore(state) if self._manager is not None else None
        step = restored.step if restored else 0
        if restored is not None:
            self._result.step = self._result.committed_step = step
            self._event(
                "restored",
                step=step,
                path=str(restored.path),
                restore_s=restored.restore_s,
                skipped=restored.skipped,
            )
        if restored is not None and restored.rank_state is not None:
            self._threads = restored.rank_state["threads"]
            torch.set_num_threads(self._threads)
            seeds.restore(restored.rank_state["random"], self._context.device)
        else:
            seeds.seed_all(seeds.derive(seed, "rank", step, self._context.rank))
        return step

    def save(self, step: int, state: dict[str, Any], reason: Reason) -> None:
        """On the way in the background; at a stop and at the end until it is committed."""
        if self._manager is None:
            return
        rank_state = {"random": seeds.capture(self._context.device), "threads": self._threads}
        self._manager.save(step, state, rank_state, reason=reason, wait=reason != "interval")

    def _committed(self, saved: Saved) -> None:
        self._slowest_save_s = max(self._slowest_save_s, saved.save_s)
        self._result.committed_step = saved.step
        self._event(
            "checkpoint",
            step=saved.step,
            save_s=saved.save_s,
            stall_s=saved.stall_s,
            bytes=saved.bytes,
            reason=saved.reason,
        )

    def in_trouble(self) -> bool:
        """Whether a save of this rank's has failed since. Looks at what the writing process has said, and does not
        wait."""
        return self._manager is not None and self._manager.poll()

    def settle(self) -> None:
        """Collective: wait for the saves under way. Raises on all ranks what went wrong on any."""
        if self._manager is not None:
            self._manager.settle()

    def too_late(self, deadline: float | None) -> bool:
        """Whether a save would not end before the kill, by the slowest one so far. The newest committed checkpoint then
        stands; a save that is killed half way would not change that, only cost the orderly end."""
        return deadline is not None and clock.now() + SAVE_MARGIN * self._slowest_save_s > deadline

    def close(self) -> None:
        """Not collective: other ranks may be gone, so a save under way is waited for as long as one takes."""
        if self._manager is not None:
            self._manager.close(min(LAST_WORD_S, 2.0 + 3 * self._slowest_save_s))
            self._manager = None
