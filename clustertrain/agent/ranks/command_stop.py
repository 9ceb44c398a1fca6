"""How the ranks of a command are asked to stop: at a step that they agree on, otherwise with a signal."""

from __future__ import annotations

import signal
from collections.abc import Callable

from clustertrain.agent.deadline import OWN_WARNINGS
from clustertrain.agent.ranks.command_ranks import DEFAULT_STOP_SIGNAL, CommandRanks
from clustertrain.agent.ranks.signal_witness import SignalWitness
from clustertrain.agent.ranks.stop_step import StopStepAgreement


class CommandStop:
    """The stop of a command's ranks on a node. Create it before the ranks: its witness must miss no signal."""

    def __init__(self) -> None:
        self._witness = SignalWitness()
        self._agreement: StopStepAgreement | None = None
        self._cause = ""

    def begin(self, cause: str, build_agreement: Callable[[], StopStepAgreement]) -> None:
        """Ask the ranks to stop. ``cause``: ``signal:SIGUSR1``, for example."""
        self._cause, self._agreement = cause, build_agreement()

    def note_signals(self, ranks: CommandRanks) -> None:
        """Forget signals that the ranks have ignored because they are still starting: they count as not sent."""
        number = ranks.stop_signal.number
        if number not in (None, signal.SIGTERM) and not ranks.handle(number):
            self._witness.close()
            self._witness = SignalWitness()

    def poll(self, ranks: CommandRanks, *, is_own_script: bool) -> None:
        """Advance the agreement. If the ranks cannot agree, send the stop signal, unless the scheduler already has.

        Args:
            is_own_script: the batch script is the user's own.
        """
        state = "pending" if self._agreement is None else self._agreement.poll()
        if state == "pending":
            return
        self._agreement = None
        if state == "impossible":
            if is_own_script:
                self._adopt_own_signal(ranks)
            number = ranks.stop_signal.number
            if number is not None and not self._witness.has_received(number):
                ranks.send_stop_signal()

    def _adopt_own_signal(self, ranks: CommandRanks) -> None:
        """Make the warning of the user's own ``--signal`` the stop signal, if that is what the program handles."""
        if self._cause in OWN_WARNINGS and ranks.stop_signal == DEFAULT_STOP_SIGNAL:
            number = signal.Signals[self._cause.partition(":")[2]]
            if ranks.handle(number):
                ranks.use_signal(number)

    def close(self) -> None:
        self._witness.close()
