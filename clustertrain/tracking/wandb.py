"""Weights & Biases: the W&B run has the run's id, and each attempt continues it. Offline, or where there is no key, all
stays in the run's ``tracking/wandb`` for `wandb sync`."""

from __future__ import annotations

import contextlib
import json
import netrc
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from clustertrain import fsio
from clustertrain.errors import ConfigError
from clustertrain.run.run_dir import RunDir
from clustertrain.tracking.row_follower import Row, scalars
from clustertrain.tracking.run_facts import Facts

INIT_S = 60  # for the server's first answer
STOPPED_CODE = 75  # as an agent's, which is to be continued


class Wandb:
    """What is there already is asked where it is kept: online the server, which numbers the steps of a run that it
    resumes; offline the files, since the service that writes them buffers, and may have been killed."""

    name = "wandb"

    def __init__(self, run: RunDir, facts: Facts) -> None:
        try:
            import wandb
        except ImportError as e:
            raise ConfigError(f"wandb cannot be imported: {e}", fix="pip install 'clustertrain[wandb]'") from e
        self._wandb: Any = wandb
        self._facts = facts
        self._folder = run.tracking
        self._run: Any = None

    def open(self) -> int:
        facts, offline = self._facts, is_offline(self._facts.spec.offline, os.environ)
        held = held_offline(self._folder, facts.run) if offline else -1
        fsio.make_folder(self._folder)
        self._run = self._wandb.init(
            dir=str(self._folder),
            id=facts.run,
            name=facts.run,
            resume="allow",
            project=facts.project or os.environ.get("WANDB_PROJECT") or facts.name,
            group=facts.tags.get("sweep"),
            tags=[tag for key in ("recipe_hash", "target", "task") if (tag := facts.tags.get(key, "")[:64])],
            config={**facts.config, **{f"run.{k}": v for k, v in {**facts.tags, **facts.attempt}.items()}},
            allow_val_change=True,
            mode="offline" if offline else None,
            settings=self._settings(),
        )
        self._run.define_metric(facts.metric, summary="max" if facts.higher_is_better else "min")
        return held if offline else int(self._run.step) - 1

    def _settings(self) -> Any:
        """The sampler records the machine and submit the code; what the ranks print is in their logs."""
        return self._wandb.Settings(
            silent=True,
            console="off",
            disable_git=True,
            disable_code=True,
            init_timeout=INIT_S,
            x_disable_stats=True,
            x_disable_meta=True,
            x_save_requirements=False,
        )

    def hand(self, rows: Sequence[Row]) -> None:
        for row in rows:
            at = {"_timestamp": float(row["t"])} if "t" in row else {}
            # Committed, since the row of a step would otherwise wait for the next one.
            self._run.log({**scalars(row), **at}, step=row["step"], commit=True)

    def close(self, ending: str | None) -> None:
        if ending is None:
            self._run.mark_preempting()
        self._run.finish(exit_code={"completed": 0, None: STOPPED_CODE}.get(ending, 1))
        self._run = None
        self._wandb.teardown()

    def abandon(self) -> None:
        self._run = None
        with contextlib.suppress(Exception):  # its service may be what failed; without this a second init is refused
            self._wandb.teardown(exit_code=1)


def is_offline(asked: bool, environ: Mapping[str, str]) -> bool:
    """Whether nothing is to be sent: so wanted, or without a key, where W&B would ask for one at the terminal."""
    mode = environ.get("WANDB_MODE", "")
    return asked or mode in ("offline", "dryrun") or (not mode and not has_key(environ))


def has_key(environ: Mapping[str, str]) -> bool:
    """In the environment, or in the file in which `wandb login` keeps it."""
    if environ.get("WANDB_API_KEY"):
        return True
    host = urlsplit(environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname or ""
    path = Path(environ.get("NETRC") or "~/.netrc").expanduser()
    try:
        return netrc.netrc(path).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def held_offline(folder: Path, run_id: str) -> int:
    """The last step that the offline files of a run hold, -1 for none."""
    # Of two that begin in one second the later one's folder has a number behind it.
    files = folder.glob(f"wandb/offline-run-*-{run_id}*/run-{run_id}.wandb")
    return max((step for path in files for step in steps(path)), default=-1)


def steps(path: Path) -> Iterator[int]:
    """Of the rows in one file, in their order."""
    from wandb.proto import wandb_internal_pb2

    for data in records(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") != "history":
            continue
        for item in record.history.item:
            if "_step" in (item.key, *item.nested_key):
                yield int(json.loads(item.value_json))


_HEADER, _BLOCK = 7, 1 << 15
_FULL, _FIRST, _LAST = 1, 2, 4


def records(data: bytes) -> Iterator[bytes]:
    """A .wandb file is a log of LevelDB's form (https://github.com/google/leveldb/blob/main/doc/log_format.md) after
    seven bytes of its own: blocks of 32 KiB, in them parts of records, each with checksum, length and kind. wandb's
    own reader has left the package with 0.31, for its service. Ends where the file does, within a record too."""
    at, whole = 7, b""
    while at + _HEADER <= len(data):
        left = _BLOCK - at % _BLOCK
        if left < _HEADER:
            at += left
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        part = data[at + _HEADER : at + _HEADER + size]
        if not kind or len(part) < size:
            return
        at += _HEADER + size
        whole = part if kind in (_FULL, _FIRST) else whole + part
        if kind in (_FULL, _LAST):
            yield whole
