"""The exit of a rank: errors caused by the end of its job, advice for out-of-memory errors, the exit code."""

from __future__ import annotations

import torch

from clustertrain import clock
from clustertrain.checkpoint.core.failures import DeadlineExceeded
from clustertrain.checkpoint.format.fence import AttemptSuperseded
from clustertrain.errors import EXIT_FAILED, EXIT_STOPPED, EXIT_SUCCESS
from clustertrain.plan.explain import advice
from clustertrain.plan.layout import Batch
from clustertrain.train.core import memory, result
from clustertrain.train.core.context import RankContext
from clustertrain.train.core.stop import StopAgreement, StopFlag

STOP_PROPAGATION_S = 3.0  # between the first and the last process of a job to learn of its end


class ExitPolicy:
    """Distinction between failures and errors caused by the end of the job, and the exit code of a stopped rank."""

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


def add_memory_note(error: BaseException, context: RankContext) -> None:
    """Add the measured peak and ways to use less memory to an out-of-memory ``error``; ignore other errors."""
    if result.classify_failure(error) != "out_of_memory":
        return
    peak = memory.peak_allocated_gib(context.device)
    if peak is None:
        measured = f"measured peak: {memory.peak_resident_gib():.2f} GiB of host memory in this process"
    else:
        total = torch.cuda.get_device_properties(context.device).total_memory / (1 << 30)
        measured = f"measured peak: {peak:.2f} GiB allocated of the {total:.2f} GiB of {context.device}"
    fixes = advice.advise_memory(context.layout, context.batch or Batch(), context.parallel)
    lines = [f"{measured}, with {context.layout.describe()}", "ways to use less memory, the least invasive first:"]
    error.add_note("\n".join([*lines, *(f"  {n}. {fix}" for n, fix in enumerate(fixes, 1))]))
