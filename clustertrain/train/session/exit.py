"""Whether a failure comes of how the job is being ended, and the code with which a stopped rank leaves."""

from __future__ import annotations

from clustertrain import clock
from clustertrain.checkpoint.core.failures import DeadlineExceeded
from clustertrain.checkpoint.format.fence import AttemptSuperseded
from clustertrain.errors import EXIT_FAILED, EXIT_STOPPED, EXIT_SUCCESS
from clustertrain.train.core import result
from clustertrain.train.core.context import RankContext
from clustertrain.train.core.stop import StopAgreement, StopFlag

STOP_PROPAGATION_S = 3.0  # how long after the first process of a job the last one hears that it is being ended


class ExitPolicy:
    def __init__(self, context: RankContext, flag: StopFlag, agreement: StopAgreement) -> None:
        self._is_in_run = context.run is not None
        self._flag = flag
        self._agreement = agreement

    def is_stopping(self) -> bool:
        return bool(self._flag) or self._agreement.agreed

    def is_shutdown_error(self, error: BaseException) -> bool:
        """Whether ``error`` comes of how the job is being ended, so that the newest checkpoint stands."""
        if isinstance(error, (DeadlineExceeded, AttemptSuperseded)):
            return True
        if result.is_killed_dataloader_worker(error):
            # What ends the job may have reached a DataLoader of the script's own before it reached this process.
            return clock.wait_until(self.is_stopping, STOP_PROPAGATION_S)
        # A peer has left before the step at which all would have stopped.
        return self.is_stopping() and result.classify_failure(error) in ("communication", "hang")

    def exit_code(self, *, resumable: bool) -> int:
        if self._is_in_run:
            return EXIT_SUCCESS  # torchrun takes any other code for a failure; the result record tells more
        return EXIT_STOPPED if resumable else EXIT_FAILED
