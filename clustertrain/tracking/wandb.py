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
from clustertrain.tracking.run_facts import RunMetadata

INIT_TIMEOUT_S = 60  # for the server's first answer
STOPPED_EXIT_CODE = 75  # as an agent's, which is to be continued


class Wandb:
    """What is there already is asked where it is kept: online the server, which numbers the steps of a run that it
    resumes; offline the files, since the service that writes them buffers, and may have been killed."""

    name = "wandb"

    def __init__(self, run: RunDir, metadata: RunMetadata) -> None:
        try:
            import wandb
        except ImportError as e:
            raise ConfigError(f"wandb cannot be imported: {e}", fix="pip install 'clustertrain[wandb]'") from e
        self._wandb: Any = wandb
        self._metadata = metadata
        self._folder = run.tracking
        self._run: Any = None

    def open(self) -> int:
        metadata, offline = self._metadata, is_offline(self._metadata.spec.offline, os.environ)
        last_step = find_last_offline_step(self._folder, metadata.run) if offline else -1
        fsio.make_folder(self._folder)
        self._run = self._wandb.init(
            dir=str(self._folder),
            id=metadata.run,
            name=metadata.run,
            resume="allow",
            project=metadata.project or os.environ.get("WANDB_PROJECT") or metadata.name,
            group=metadata.tags.get("sweep"),
            tags=[tag for key in ("recipe_hash", "target", "task") if (tag := metadata.tags.get(key, "")[:64])],
            config={
                **metadata.config,
                **{f"run.{k}": v for k, v in {**metadata.tags, **metadata.attempt_tags}.items()},
            },
            allow_val_change=True,
            mode="offline" if offline else None,
            settings=self._settings(),
        )
        self._run.define_metric(metadata.metric, summary="max" if metadata.higher_is_better else "min")
        return last_step if offline else int(self._run.step) - 1

    def _settings(self) -> Any:
        """The sampler records the machine and submit the code; what the ranks print is in their logs."""
        return self._wandb.Settings(
            silent=True,
            console="off",
            disable_git=True,
            disable_code=True,
            init_timeout=INIT_TIMEOUT_S,
            x_disable_stats=True,
            x_disable_meta=True,
            x_save_requirements=False,
        )

    def log_rows(self, rows: Sequence[Row]) -> None:
        for row in rows:
            timestamp = {"_timestamp": float(row["t"])} if "t" in row else {}
            # Committed, since the row of a step would otherwise wait for the next one.
            self._run.log({**scalars(row), **timestamp}, step=row["step"], commit=True)

    def close(self, ending: str | None) -> None:
        if ending is None:
            self._run.mark_preempting()
        self._run.finish(exit_code={"completed": 0, None: STOPPED_EXIT_CODE}.get(ending, 1))
        self._run = None
        self._wandb.teardown()

    def abandon(self) -> None:
        self._run = None
        with contextlib.suppress(Exception):  # its service may be what failed; without this a second init is refused
            self._wandb.teardown(exit_code=1)


def is_offline(requested: bool, environ: Mapping[str, str]) -> bool:
    """Whether nothing is to be sent: so wanted, or without a key, where W&B would ask for one at the terminal."""
    mode = environ.get("WANDB_MODE", "")
    return requested or mode in ("offline", "dryrun") or (not mode and not has_api_key(environ))


def has_api_key(environ: Mapping[str, str]) -> bool:
    """In the environment, or in the file in which `wandb login` keeps it."""
    if environ.get("WANDB_API_KEY"):
        return True
    host = urlsplit(environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname or ""
    path = Path(environ.get("NETRC") or "~/.netrc").expanduser()
    try:
        return netrc.netrc(path).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def find_last_offline_step(folder: Path, run_id: str) -> int:
    """The last step that the offline files of a run hold, -1 for none."""
    # Of two that begin in one second the later one's folder has a number behind it.
    files = folder.glob(f"wandb/offline-run-*-{run_id}*/run-{run_id}.wandb")
    return max((step for path in files for step in read_steps(path)), default=-1)


def read_steps(path: Path) -> Iterator[int]:
    """Of the rows in one file, in their order."""
    from wandb.proto import wandb_internal_pb2

    for data in read_records(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") != "history":
            continue
        for item in record.history.item:
            if "_step" in (item.key, *item.nested_key):
                yield int(json.loads(item.value_json))


_HEADER_BYTES, _BLOCK_BYTES = 7, 1 << 15
_FULL, _FIRST, _LAST = 1, 2, 4


def read_records(data: bytes) -> Iterator[bytes]:
    """A .wandb file is a log of LevelDB's form (https://github.com/google/leveldb/blob/main/doc/log_format.md) after
    seven bytes of its own: blocks of 32 KiB, in them parts of records, each with checksum, length and kind. wandb's
    own reader has left the package with 0.31, for its service. Ends where the file does, within a record too."""
    offset, record = 7, b""
    while offset + _HEADER_BYTES <= len(data):
        block_left = _BLOCK_BYTES - offset % _BLOCK_BYTES
        if block_left < _HEADER_BYTES:
            offset += block_left
            continue
        _, size, record_type = struct.unpack_from("<IHB", data, offset)
        fragment = data[offset + _HEADER_BYTES : offset + _HEADER_BYTES + size]
        if not record_type or len(fragment) < size:
            return
        offset += _HEADER_BYTES + size
        record = fragment if record_type in (_FULL, _FIRST) else record + fragment
        if record_type in (_FULL, _LAST):
            yield record
