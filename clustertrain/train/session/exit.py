"""The exit of a rank while its job ends: which errors are part of that, and the exit code."""

from __future__ import annotations

from clustertrain import clock
from clustertrain.checkpoint.core.failures import DeadlineExceeded
from clustertrain.checkpoint.format.fence import AttemptSuperseded
from clustertrain.errors import EXIT_FAILED, EXIT_STOPPED, EXIT_SUCCESS
from clustertrain.train.core import result
from clustertrain.train.core.context import RankContext
from clustertrain.train.core.stop import StopAgreement, StopFlag

STOP_PROPAGATION_S = 3.0  # between the first and the last process of a job that learns of its end


class ExitPolicy:
    """Tells errors that come from the end of the job from failures."""

    def __init__(self, context: RankContext, flag: StopFlag, agreement: StopAgreement) -> None:
        self._is_in_run = context.run is not None
        self._flag = flag
        self._agreement = agreement

    def is_stopping(self) -> bool:
        """Return whether this rank was asked to stop, or all ranks have agreed to."""
        return bool(self._flag) or self._agreement.agreed

    def is_shutdown_error(self, error: BaseException) -> bool:
        """Return whether ``error`` is a consequence of the job being ended: the rank has stopped, not failed."""
        if isinstance(error, (DeadlineExceeded, AttemptSuperseded)):
            return True
        if result.is_killed_dataloader_worker(error):
            # The signal that ends the job may have reached a worker of the script's DataLoader first.
            return clock.wait_until(self.is_stopping, STOP_PROPAGATION_S)
        # A peer left before the step at which all ranks would have stopped.
        return self.is_stopping() and result.classify_failure(error) in ("communication", "hang")

    def exit_code(self, *, resumable: bool) -> int:
        """Return the exit code of a stopped rank; ``resumable``: there is a checkpoint to continue from."""
        if self._is_in_run:
            return EXIT_SUCCESS  # torchrun treats any other code as a failure; the result record has the ending
        return EXIT_STOPPED if resumable else EXIT_FAILED
