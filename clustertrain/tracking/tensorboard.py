"""The TensorBoard tracker: event files in the run's ``tracking/tensorboard``.

Events are written with TensorBoard's record writer and protocol buffers. Its event writer uses a queue and a thread and
loads TensorFlow if installed; torch's writer wraps that one and imports torch.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

from clustertrain import clock, extras
from clustertrain.run.run_dir import RunDir
from clustertrain.tracking.row_follower import Row, scalars
from clustertrain.tracking.run_facts import RunMetadata
from clustertrain.tracking.tracker import TrackerState, make_tracker_dir

PREFIX = "events.out.tfevents."  # TensorBoard looks for this prefix
SUFFIX = ".clustertrain"


class TensorBoard:
    """Tracker that writes each step to event files once.

    Each start writes a new file, because readers move on to the next file by name after the end of one. Bytes that a
    killed process wrote after its last saved state are truncated and written again.
    """

    name = "tensorboard"

    def __init__(self, run: RunDir, metadata: RunMetadata) -> None:
        extras.require("tensorboard.compat.proto.event_pb2", "the tracker tensorboard")
        self._metadata = metadata
        self._folder = make_tracker_dir(run, self.name)
        self._state = TrackerState(run, self.name)
        self._file: BinaryIO | None = None
        self._records: Any = None
        self._path = Path()
        self._last_step = -1

    def open(self) -> int:
        """Truncate the files to the saved state; return the last step that they hold."""
        state = self._state.read()
        last_file = str(state.get("file") or "")
        self._last_step = int(state.get("step", -1))
        for path in self._event_files():
            if path.name > last_file:
                path.unlink()
            elif path.name == last_file and path.stat().st_size > int(state["bytes"]):
                os.truncate(path, int(state["bytes"]))
        if last_file and not (self._folder / last_file).exists():
            return self._start_over()
        return self._last_step

    def _start_over(self) -> int:
        """Delete all files because the newest one is missing; they are written again from the rows."""
        for path in self._event_files():
            path.unlink()
        self._last_step = -1
        return self._last_step

    def _event_files(self) -> list[Path]:
        return sorted(p for p in self._folder.iterdir() if p.name.startswith(PREFIX) and p.name.endswith(SUFFIX))

    def log_rows(self, rows: Sequence[Row]) -> None:
        if self._file is None:
            self._open_file()
        for row in rows:
            # TensorBoard stores float32; larger values become infinite, as with its writers.
            self._write_scalars(row["step"], float(row.get("t") or clock.now()), scalars(row))
        self._last_step = rows[-1]["step"]
        self._commit()

    def _open_file(self) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        is_first = not self._event_files()
        newest_time = max((int(p.name.removeprefix(PREFIX).partition(".")[0]) for p in self._event_files()), default=0)
        timestamp = max(int(clock.now()), newest_time + 1)  # the clock may have been set back
        self._path = self._folder / f"{PREFIX}{timestamp:010d}.{socket.gethostname()}.{os.getpid()}{SUFFIX}"
        self._file = self._path.open("xb")
        self._records = RecordWriter(self._file)
        self._records.write(Event(wall_time=clock.now(), file_version="brain.Event:2").SerializeToString())
        for summary in _metadata_summaries(self._metadata, is_first=is_first):
            event = Event(wall_time=clock.now(), step=max(0, self._last_step), summary=summary)
            self._records.write(event.SerializeToString())

    def _write_scalars(self, step: int, t: float, values: dict[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        summary_values = [Summary.Value(tag=tag, simple_value=_to_float32(value)) for tag, value in values.items()]
        self._records.write(Event(wall_time=t, step=step, summary=Summary(value=summary_values)).SerializeToString())

    def _commit(self) -> None:
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._state.write(file=self._path.name, bytes=self._file.tell(), step=self._last_step)

    def close(self, ending: str | None) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def abandon(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):  # a partial record is truncated at the next start
                self._file.close()
            self._file = None


_FLOAT32_MAX = 3.4028234663852886e38


def _to_float32(value: float) -> float:
    return math.copysign(math.inf, value) if abs(value) > _FLOAT32_MAX else value


def _metadata_summaries(metadata: RunMetadata, *, is_first: bool) -> list[Any]:
    """Return summaries of the attempt's tags, and in the first file the settings for the Text and HParams tabs."""
    from tensorboard.plugins.hparams.summary_v2 import hparams_pb

    summaries = [_text_summary("attempt", _markdown_table(metadata.attempt_tags))] if metadata.attempt_tags else []
    if is_first:
        hparams = {key: v if isinstance(v, (bool, int, float, str)) else str(v) for key, v in metadata.config.items()}
        summaries += [
            _text_summary("run", _markdown_table(metadata.tags)),
            _text_summary("recipe", _markdown_table(hparams)),
        ]
        summaries.append(hparams_pb(hparams, trial_id=metadata.run))
    return summaries


def _markdown_table(values: dict[str, Any]) -> str:
    """Return a Markdown table for the Text tab."""
    rows = [f"| {key} | `{str(value).replace('|', chr(92) + '|')}` |" for key, value in values.items()]
    return "\n".join(["| key | value |", "|---|---|", *rows])


def _text_summary(tag: str, markdown: str) -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto

    tensor = TensorProto(dtype="DT_STRING", string_val=[markdown.encode()], tensor_shape=TensorShapeProto())
    summary_metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
    return Summary(value=[Summary.Value(tag=f"{tag}/text_summary", metadata=summary_metadata, tensor=tensor)])
