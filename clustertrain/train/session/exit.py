"""Whether a failure comes of how the job is being ended, and the code with which a stopped rank leaves."""

from __future__ import annotations

from clustertrain import clock
from clustertrain.checkpoint.core.failures import TooLate
from clustertrain.checkpoint.format.fence import TakenOver
from clustertrain.errors import EXIT_DONE, EXIT_FAILED, EXIT_STOPPED
from clustertrain.train.core import result
from clustertrain.train.core.context import RankContext
from clustertrain.train.core.stop import StopAgreement, StopFlag

WORD_OF_STOP_S = 3.0  # how long after the first process of a job the last one hears that it is being ended


class Leaving:
    def __init__(self, context: RankContext, flag: StopFlag, agreement: StopAgreement) -> None:
        self._in_run = context.run is not None
        self._flag = flag
        self._agreement = agreement

    def told(self) -> bool:
        return bool(self._flag) or self._agreement.agreed

    def explains(self, error: BaseException) -> bool:
        """Whether ``error`` comes of how the job is being ended, so that the newest checkpoint stands."""
        if isinstance(error, (TooLate, TakenOver)):
            return True
        if result.is_lost_worker(error):
            # What ends the job may have reached a DataLoader of the script's own before it reached this process.
            return clock.wait_until(self.told, WORD_OF_STOP_S)
        # A peer has left before the step at which all would have stopped.
        return self.told() and result.kind_of(error) in ("communication", "hang")

    def code(self, *, resumable: bool) -> int:
        if self._in_run:
            return EXIT_DONE  # torchrun takes any other code for a failure; the result record tells more
        return EXIT_STOPPED if resumable else EXIT_FAILED
