"""The step after which all ranks save and stop: agreed through files, without a collective in the program.

After a stop request the agents publish a step in ``stop-step.json``: ``{"id", "step", "is_agreed"}``. At the end of
each step a rank answers a new proposal in ``stop-answer-<rank>.json``: ``{"id", "step", "accepts"}``, with the steps it
has done; it accepts unless it is past the proposed step. Once all ranks have accepted, the proposal is agreed. A rank
that reaches the step earlier waits there. So no rank stops at a step that another one has passed.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

from .rank import Rank

# The agents move or agree on a proposal within seconds. If they are gone, training goes on.
_PATIENCE_S = 60.0
_POLL_S = 0.01


class StopStep:
    """This rank's part in the agreement."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._path = os.path.join(rank.rank_dir, "stop-step.json")
        self._answered: int | None = None
        self._waited_for: int | None = None

    def offer(self, framework: str, *, replaces_handler: bool = False) -> None:
        """Tell the agent that this rank saves and stops at a step that it is given.

        SIGTERM, which Slurm sends to every process of a step, no longer ends the process: the step does. A handler of
        the program stays, unless ``replaces_handler``.
        """
        self._rank.write(f"stops-{self._rank.rank}.json", {"framework": framework, "pid": os.getpid()})
        if threading.current_thread() is not threading.main_thread():
            return
        if replaces_handler or signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            # Not SIG_IGN, which the processes that the program starts would inherit.
            signal.signal(signal.SIGTERM, _wait_for_step)

    def is_reached(self, step: int) -> bool:
        """Return whether the ranks have agreed to stop after ``step``, which this rank has done."""
        if not os.path.exists(self._path):
            return False
        give_up_at = time.monotonic() + _PATIENCE_S
        while True:
            proposal = self._rank.read("stop-step.json")
            if not proposal or proposal["step"] is None:
                return False
            self._answer(proposal, step)
            if step != proposal["step"] or self._waited_for == proposal["id"]:
                return False
            if proposal["is_agreed"]:
                return True
            if time.monotonic() > give_up_at:
                self._waited_for = proposal["id"]
                return False
            time.sleep(_POLL_S)

    def _answer(self, proposal: dict[str, Any], step: int) -> None:
        if proposal["id"] != self._answered:
            answer = {"id": proposal["id"], "step": step, "accepts": step <= proposal["step"]}
            self._rank.write(f"stop-answer-{self._rank.rank}.json", answer)
            self._answered = proposal["id"]


def _wait_for_step(number: int, frame: object) -> None:
    """Do nothing: the agreed step ends the training."""
