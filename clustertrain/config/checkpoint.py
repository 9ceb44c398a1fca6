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
KEEP_BEST_AUTO = -1  # checkpoint.keep_best: one if the run evaluates


class CheckpointSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The ``[checkpoint]`` table.

    A checkpoint saved because the run was asked to stop is kept in addition to those counted below, until the next one.
    """

    every: int | str = 100
    """Interval between checkpoints: a number of steps; a duration such as ``"30s"``, ``"10min"`` or ``"1h30min"``; or
    ``"auto"``: derived from the cost of a save and the time between failures."""
    keep: int = 3
    """Number of newest checkpoints to keep."""
    keep_every: int = 0
    """Also save every this many steps, and never delete those. 0: off."""
    keep_best: int = KEEP_BEST_AUTO
    """Number of best checkpoints to keep in addition to the newest, ranked by ``best``. 0: none. -1: one if the run
    evaluates, otherwise none."""
    best: str = ""
    """Logged scalar that ranks checkpoints, by its last value before the save. Empty: the contract's metric."""
    best_mode: MetricMode = "auto"
    """Direction of ``best``. ``"auto"``: as ``contract.mode`` for the contract's metric; for another scalar ``"max"``
    if it is accuracy, top5, recall_at_1 or reward_accuracy, otherwise ``"min"``."""
    engine: CheckpointEngine = "raw"
    """Library that writes the bytes. All formats are read the same way."""
    async_save: bool = True
    """Continue training while the bytes are written. ``false``: wait for the commit."""
    local: str = ""
    """Folder on each node's local disk that receives each rank's part first, for example ``"/tmp/{job}"``. May contain
    ``$NAME`` of the node's environment and ``{job}``. Empty: none."""
    remote: str = ""
    """URL to which committed checkpoints are copied, for example ``"s3://bucket/prefix"``. Empty: none."""
    remote_keep: int = 0
    """Number of newest checkpoints to keep at ``remote``. 0: as ``keep``. Unused without ``remote``."""

    def __post_init__(self) -> None:
        check_interval("every", self.every)
        self._check_locations()
        check_positive("keep", self.keep)
        if self.keep_every < 0:
            raise ValueError(f"keep_every = {self.keep_every}: must be 0 (none) or more")
        if self.keep_best < KEEP_BEST_AUTO:
            raise ValueError(f"keep_best = {self.keep_best}: must be 0 (none) or more, or -1 (automatic)")
        if self.keep_best < 1 and (self.best or self.best_mode != "auto"):
            setting = f"best = {self.best!r}" if self.best else f"best_mode = {self.best_mode!r}"
            raise ValueError(f"{setting} has no effect without keep_best: set keep_best = 1 or more, or remove it")

    def _check_locations(self) -> None:
        if self.local:
            check_node_folder("local", self.local)
        if self.remote and not is_url(self.remote):
            raise ValueError(
                f"remote = {self.remote!r}: must be a URL, for example s3://bucket/prefix or file:///folder"
            )
        if self.remote_keep < 0:
            raise ValueError(f"remote_keep = {self.remote_keep}: must be 0 (as keep) or more")
        if self.remote_keep and not self.remote:
            raise ValueError(f"remote_keep = {self.remote_keep} has no effect without remote")
        for name in ("local", "remote"):
            if getattr(self, name) and not self.async_save:
                raise ValueError(f"{name} needs async_save = true, because the background writers make the copies")


def check_interval(name: str, every: int | str) -> None:
    """Raise ValueError unless ``every`` is a number of steps, a duration or ``"auto"``."""
    if isinstance(every, int):
        check_positive(name, every)
    elif every != AUTO and parse_interval_s(name, every) <= 0:
        raise ValueError(f"{name} = {every!r}: must be greater than 0")


def parse_interval_s(name: str, text: str) -> float:
    """Return the duration ``text`` in seconds.

    Raises:
        ValueError: ``text`` is not a duration; the message names the key ``name``.
    """
    seconds = parse_duration_s(text)
    if seconds is None:
        raise ValueError(f'{name} = {text!r}: must be a number of steps, a duration ("30s", "10min", "2h") or "auto"')
    return seconds
