"""The exceptions, each with the exit code of the command line.

ClusterTrainError                 1   the command or the run failed
├── UsageError                    2   an option or argument is invalid
├── ConfigError                  78   a recipe, profile or environment is wrong: a retry would fail the same way
│   ├── UnsuitableEnvironment    78   this machine or allocation lacks something
│   └── Diverged                 78   training diverged, and would again with the same seeds and data
├── NotFound                      1   a run, checkpoint or file does not exist
│   └── AmbiguousName             2   a name matches several runs
├── PermissionDenied              1   a file or folder belongs to another user's run
├── SchedulerError                1   the scheduler refused; the message is the scheduler's
├── CommandFailed                 1   a child process failed
├── CheckpointError               1   there is no checkpoint to restore, or it is damaged
└── NotOwner                     93   another attempt owns the run
"""

from __future__ import annotations

EXIT_SUCCESS = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_STOPPED = 75  # stopped on request (agent and batch process)
EXIT_CONFIG = 78  # a requeue would fail the same way
EXIT_NO_REQUEUE = 93  # no progress, budget spent, or another attempt owns the run


class ClusterTrainError(Exception):
    """A failure with a message for the user: what failed and why, and in ``fix`` what to do next."""

    exit_code = EXIT_FAILED

    def __init__(self, message: str, *, fix: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.fix = fix

    def __str__(self) -> str:
        return f"{self.message}\n  fix: {self.fix}" if self.fix else self.message


class UsageError(ClusterTrainError):
    exit_code = EXIT_USAGE


class ConfigError(ClusterTrainError):
    exit_code = EXIT_CONFIG


class UnsuitableEnvironment(ConfigError):
    pass


class Diverged(ConfigError):
    pass


class NotFound(ClusterTrainError):
    pass


class AmbiguousName(NotFound):
    exit_code = EXIT_USAGE


class PermissionDenied(ClusterTrainError):
    pass


class SchedulerError(ClusterTrainError):
    pass


class CommandFailed(ClusterTrainError):
    pass


class CheckpointError(ClusterTrainError):
    pass


class NotOwner(ClusterTrainError):
    exit_code = EXIT_NO_REQUEUE
