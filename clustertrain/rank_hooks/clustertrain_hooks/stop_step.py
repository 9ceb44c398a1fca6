"""The step after which all ranks save and stop: agreed through files, without a collective in the program.

After a stop request the agents publish a step in ``stop-step.json``: ``{"id", "step", "is_agreed"}``. At the end of
each step a rank answers a new proposal in ``stop-answer-<rank>.json``: ``{"id", "step", "accepts"}``, with the steps it
has done; it accepts unless it is past the proposed step. Once all ranks have accepted, the proposal is agreed. A rank
that reaches the step earlier waits there, and an accepting rank never passes it. So no rank stops at a step that
another one has passed.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

from .rank import Rank

EXIT_STOPPED = 75  # as in clustertrain.errors: run me again
_POLL_S = 0.01
_has_waited = False  # whether SIGTERM came, and an offer kept it from ending this process


class StopStep:
    """This rank's part in the agreement."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._path = os.path.join(rank.rank_dir, "stop-step.json")
        self._answered: int | None = None
        self._accepts = False
        self._is_offered = False

    def offer(self, framework: str, *, handler: Any = None) -> None:
        """Tell the agent that this rank saves and stops at a step that it is given.

        SIGTERM, which Slurm sends to every process of a step, no longer ends the process: the step does. A handler of
        the program stays.

        Args:
            handler: the program's handler, if the framework has put one of its own in its place.
        """
        self._is_offered = True
        self._rank.write(self._offer_name, {"framework": framework, "pid": os.getpid()})
        if threading.current_thread() is not threading.main_thread():
            return
        own = signal.getsignal(signal.SIGTERM) if handler is None else handler
        if own is not None:  # None: not installed from Python
            # Not SIG_IGN, which the processes that the program starts would inherit.
            signal.signal(signal.SIGTERM, _wait_for_step if own == signal.SIG_DFL else own)

    def withdraw(self) -> None:
        """Take the offer back: the training is over, and SIGTERM ends the process as before."""
        if not self._is_offered:
            return
        self._is_offered = False
        self._rank.remove(self._offer_name)
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGTERM) is _wait_for_step:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def give_up(self) -> None:
        """Take the offer back in the middle of a training: the signal has to end the process.

        One that has come in the meantime, which the agent does not repeat, is sent again.
        """
        is_ignored = _has_waited and signal.getsignal(signal.SIGTERM) is _wait_for_step
        self.withdraw()
        if is_ignored:
            os.kill(os.getpid(), signal.SIGTERM)

    @property
    def _offer_name(self) -> str:
        return f"stops-{self._rank.rank}.json"

    def is_reached(self, step: int) -> bool:
        """Return whether the ranks have agreed to stop after ``step``, which this rank has done.

        A step count may rise by more than 1: the first step at or after the agreed one counts.
        """
        if not self._is_offered or not os.path.exists(self._path):
            return False
        while True:
            proposal = self._rank.read("stop-step.json")
            if not proposal:
                return False
            if proposal["step"] is None:  # the agent has sent SIGTERM instead
                is_ignored = signal.getsignal(signal.SIGTERM) is _wait_for_step
                self.withdraw()
                if is_ignored:
                    os.kill(os.getpid(), signal.SIGTERM)
                return False
            self._answer(proposal, step)
            if not self._accepts or step < proposal["step"]:
                return False
            if proposal["is_agreed"]:
                return True
            if self._is_past_deadline():
                return False
            time.sleep(_POLL_S)

    def _answer(self, proposal: dict[str, Any], step: int) -> None:
        if proposal["id"] != self._answered:
            self._answered, self._accepts = proposal["id"], step <= proposal["step"]
            answer = {"id": proposal["id"], "step": step, "accepts": self._accepts}
            self._rank.write(f"stop-answer-{self._rank.rank}.json", answer)

    def _is_past_deadline(self) -> bool:
        """Return whether the agent is about to kill the ranks, so that nothing is left to agree on."""
        deadline = (self._rank.read("stop") or {}).get("deadline")
        return deadline is not None and time.time() > deadline


def _wait_for_step(number: int, frame: object) -> None:
    """End nothing: the agreed step ends the training."""
    global _has_waited  # noqa: PLW0603
    _has_waited = True
