"""The ``[checkpoint]`` table: when checkpoints are saved, which are kept and where."""

from __future__ import annotations

from typing import Literal

import msgspec

from clustertrain.config.checks.ranges import check_positive
from clustertrain.config.checks.storage_paths import check_node_folder, is_url
from clustertrain.config.contract import MetricMode
from clustertrain.config.parsing.durations import parse_duration_s

CheckpointEngine = Literal["raw", "dcp", "torchsnapshot"]


AUTO = "auto"


KEEP_BEST_AUTO = -1  # of checkpoint.keep_best


class CheckpointSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The ``[checkpoint]`` table. What was saved because the run was told to stop counts apart: it pushes out nothing,
    and goes when the next one is there."""

    every: int | str = (
        100  # steps; or a time, "10min"; or "auto": from the cost of a save and the time between failures
    )
    keep: int = 3  # newest ones
    keep_every: int = 0  # those of its multiples, in steps, are made and stay for ever; 0: none
    # The best ones by the scalar ``best``, besides the newest; -1: one where there are evaluations, else none.
    keep_best: int = KEEP_BEST_AUTO
    best: str = ""  # a logged scalar, of which the last value before the save counts; "": what the contract names
    best_mode: MetricMode = "auto"  # auto: as the contract says, or max for accuracy, top5 and recall_at_1, else min
    engine: CheckpointEngine = "raw"  # what writes the bytes; reading is the same for all
    background: bool = True  # training goes on while the bytes are written
    local: str = ""  # a folder on each node's own disk, where each rank's part goes first; $NAME and {job} in it
    remote: str = ""  # a URL that committed ones are copied to, as s3://bucket/prefix
    remote_keep: int = 0  # newest ones there; 0: as many as here

    def __post_init__(self) -> None:
        check_interval("every", self.every)
        self._check_locations()
        check_positive("keep", self.keep)
        if self.keep_every < 0:
            raise ValueError(f"keep_every = {self.keep_every}: must be 0 (none) or more")
        if self.keep_best < KEEP_BEST_AUTO:
            raise ValueError(f"keep_best = {self.keep_best}: must be 0 (none) or more, or -1 (chosen)")
        if self.keep_best < 1 and (self.best or self.best_mode != "auto"):
            setting = f"best = {self.best!r}" if self.best else f"best_mode = {self.best_mode!r}"
            raise ValueError(f"{setting} has no effect without keep_best: set keep_best = 1 or more, or leave it out")

    def _check_locations(self) -> None:
        if self.local:
            check_node_folder("local", self.local)
        if self.remote and not is_url(self.remote):
            raise ValueError(f"remote = {self.remote!r}: must be a URL, as s3://bucket/prefix or file:///folder")
        if self.remote_keep < 0:
            raise ValueError(f"remote_keep = {self.remote_keep}: must be 0 (as keep) or more")
        if self.remote_keep and not self.remote:
            raise ValueError(f"remote_keep = {self.remote_keep} has no effect without remote")
        for name in ("local", "remote"):
            if getattr(self, name) and not self.background:
                raise ValueError(f"{name} needs background = true: the processes that write then make the copies")


def check_interval(name: str, every: int | str) -> None:
    """Raises ValueError where ``every`` is no number of steps, no time and not ``"auto"``."""
    if isinstance(every, int):
        check_positive(name, every)
    elif every != AUTO and parse_interval_s(name, every) <= 0:
        raise ValueError(f"{name} = {every!r}: must be greater than 0")


def parse_interval_s(name: str, text: str) -> float:
    """A length of time in seconds.

    Raises:
        ValueError: it is none; names ``name``.
    """
    seconds = parse_duration_s(text)
    if seconds is None:
        raise ValueError(f'{name} = {text!r}: must be a number of steps, a time ("30s", "10min", "2h") or "auto"')
    return seconds
