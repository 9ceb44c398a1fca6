"""The Weights & Biases tracker: the W&B run has our run's id, and each attempt continues it.

Offline, or without an API key, everything stays in the run's ``tracking/wandb`` for `wandb sync`.
"""

from __future__ import annotations

import contextlib
import json
import netrc
import os
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from clustertrain import extras, fsio
from clustertrain.errors import EXIT_STOPPED
from clustertrain.run.run_dir import RunDir
from clustertrain.tracking.model_files import ModelFiles, exported_model
from clustertrain.tracking.row_follower import Row, scalars
from clustertrain.tracking.run_facts import RunMetadata

INIT_TIMEOUT_S = 60  # for the server's first response
MAX_ARTIFACT_NAME = 128  # characters, the limit of W&B


class Wandb:
    """Tracker that uploads each step to W&B once.

    Online, the last uploaded step comes from the server. Offline it comes from the files, because the service that
    writes them buffers and may have been killed.
    """

    name = "wandb"

    def __init__(self, run: RunDir, metadata: RunMetadata) -> None:
        extras.require("wandb", "the tracker wandb")
        import wandb

        self._wandb: Any = wandb
        self._metadata = metadata
        self._folder = run.tracking
        self._clustertrain_run = run
        self._run: Any = None

    def open(self) -> int:
        """Start or resume the W&B run; return the last step that it holds."""
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
        """Return settings without system metrics, code and console, which clustertrain records itself."""
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
            # Without commit, W&B would hold a row until the next one.
            self._run.log({**scalars(row), **timestamp}, step=row["step"], commit=True)

    def close(self, ending: str | None) -> None:
        which = self._metadata.spec.log_model
        if ending != "completed" or which == "none":
            self._finish(ending, None)
            return
        try:
            with exported_model(self._clustertrain_run, which, self.name) as model:
                self._finish(ending, model)
        except Exception:
            if self._run is not None:  # the run has ended, whether its model could be logged or not
                self._finish(ending, None)
            raise

    def _finish(self, ending: str | None, model: ModelFiles | None) -> None:
        """Finish the run after the upload of ``model``; W&B reads its files until then."""
        if model is not None:
            name = re.sub(r"[^A-Za-z0-9_.-]", "_", self._metadata.project or self._metadata.name)[:MAX_ARTIFACT_NAME]
            artifact = self._wandb.Artifact(name, type="model", metadata={"step": model.step})
            artifact.add_dir(str(model.folder))
            self._run.log_artifact(artifact)
        if ending is None:
            self._run.mark_preempting()
        self._run.finish(exit_code={"completed": 0, None: EXIT_STOPPED}.get(ending, 1))
        self._run = None
        self._wandb.teardown()

    def abandon(self) -> None:
        self._run = None
        with contextlib.suppress(Exception):  # the service may be dead; without teardown W&B refuses a second init
            self._wandb.teardown(exit_code=1)


def is_offline(requested: bool, environ: Mapping[str, str]) -> bool:
    """Return whether to work offline: on request, or without a key, because W&B would prompt for one."""
    mode = environ.get("WANDB_MODE", "")
    return requested or mode in ("offline", "dryrun") or (not mode and not has_api_key(environ))


def has_api_key(environ: Mapping[str, str]) -> bool:
    """Return whether an API key is in the environment or in the netrc file that `wandb login` writes."""
    if environ.get("WANDB_API_KEY"):
        return True
    host = urlsplit(environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname or ""
    path = Path(environ.get("NETRC") or "~/.netrc").expanduser()
    try:
        return netrc.netrc(path).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def find_last_offline_step(folder: Path, run_id: str) -> int:
    """Return the last step in the offline files of a run, -1 for none."""
    # If two W&B runs start in the same second, the second folder's name ends in a number.
    files = folder.glob(f"wandb/offline-run-*-{run_id}*/run-{run_id}.wandb")
    return max((step for path in files for step in read_steps(path)), default=-1)


def read_steps(path: Path) -> Iterator[int]:
    """Yield the steps of the rows in one .wandb file, in order."""
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
    """Yield the records of a .wandb file; stop at an incomplete record at its end.

    After a 7-byte header, the file is a LevelDB log (https://github.com/google/leveldb/blob/main/doc/log_format.md):
    blocks of 32 KiB with fragments of records, each with checksum, length and type. wandb 0.31 removed its Python
    reader.
    """
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
