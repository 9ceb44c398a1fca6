"""Data sets that the library `datasets` of Hugging Face wrote with ``save_to_disk``, read in place with pyarrow.

A saved data set is a folder with ``dataset_info.json``, ``state.json`` and the Arrow streams that ``state.json`` lists
under ``_data_files``. A folder of splits has ``dataset_dict.json``, which names them, and one data set per split
(`datasets/arrow_dataset.py` and `datasets/dataset_dict.py`, version 5). The files are memory-mapped. Nothing in them is
unpickled: types that only `datasets` knows are read as the Arrow types that store them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clustertrain import extras, reading
from clustertrain.errors import ConfigError

if TYPE_CHECKING:
    import pyarrow

STATE_FILE, INFO_FILE, SPLITS_FILE = "state.json", "dataset_info.json", "dataset_dict.json"
TEXT_COLUMN = "text"
_FIX = "save it again with Dataset.save_to_disk"
_MAX_LISTED = 8


def is_saved_dataset(path: Path) -> bool:
    """Return whether ``path`` is a folder that ``save_to_disk`` wrote, of one data set or of splits."""
    return (path / SPLITS_FILE).is_file() or ((path / STATE_FILE).is_file() and (path / INFO_FILE).is_file())


def list_arrow_files(path: Path, key: str = "data.path") -> list[Path]:
    """Return the Arrow files of the saved data set at ``path``, in order.

    Raises:
        ConfigError: ``path`` has several splits, an index of selected rows, or lacks a file.
    """
    label = f"{key} = {str(path)!r}"
    if (path / SPLITS_FILE).is_file():
        splits = _read_object(path / SPLITS_FILE).get("splits")
        names = [name for name in splits if isinstance(name, str)] if isinstance(splits, list) else []
        raise ConfigError(
            f"{label}: a folder of splits: {', '.join(names[:_MAX_LISTED]) or 'none'}",
            fix=f"name the folder of one of them: {path / names[0]}" if names else _FIX,
        )
    state = _read_object(path / STATE_FILE)
    if state.get("_indices_data_files") or state.get("_indices_files"):
        raise ConfigError(
            f"{label}: an index selects and orders its rows", fix="call flatten_indices() and save it again"
        )
    entries = state.get("_data_files")
    if entries == []:
        raise ConfigError(f"{label}: the data set has no rows", fix="choose a data set with rows")
    found = [entry.get("filename") if isinstance(entry, dict) else None for entry in entries or ()]
    file_names = [name for name in found if isinstance(name, str) and Path(name).name == name]
    if not file_names or len(file_names) < len(found):
        raise ConfigError(f"{path / STATE_FILE}: _data_files does not list files of this folder", fix=_FIX)
    files = [path / name for name in file_names]
    for file in files:
        if not file.is_file():
            raise ConfigError(f"{file}: no such file, but {STATE_FILE} lists it", fix="copy the folder again")
    return files


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = reading.parse_json(reading.read_bytes(path))
    except (OSError, ValueError) as e:
        raise ConfigError(f"{path}: {e}", fix=_FIX) from e
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: not a JSON object", fix=_FIX)
    return value


def read_columns(path: Path, key: str = "data.path") -> list[str]:
    """Return the names of the columns of the saved data set at ``path``.

    Raises:
        ConfigError: it is not readable.
        UnsuitableEnvironment: pyarrow is not installed.
    """
    first = list_arrow_files(path, key)[0]
    with _open_stream(first) as stream:
        return list(stream.schema.names)


def iter_batches(path: Path, columns: Sequence[str], key: str = "data.path") -> Iterator[pyarrow.RecordBatch]:
    """Yield the rows of the saved data set at ``path`` in batches whose buffers are parts of the mapped files.

    Args:
        columns: which columns to keep, of those that exist.

    Raises:
        ConfigError: the data set has none of ``columns``, or a file is not readable.
        UnsuitableEnvironment: pyarrow is not installed.
    """
    for file in list_arrow_files(path, key):
        with _open_stream(file) as stream:
            import pyarrow

            kept = [name for name in stream.schema.names if name in columns]
            if not kept:
                raise missing_columns(path, stream.schema.names, columns, key)
            try:
                for batch in stream:
                    yield batch.select(kept)
            except (OSError, pyarrow.ArrowException) as e:
                raise _unreadable(file, e) from e


def missing_columns(path: Path, present: Sequence[str], wanted: Sequence[str], key: str) -> ConfigError:
    """Return the error that the data set has no column of ``wanted``."""
    return ConfigError(
        f"{key} = {str(path)!r}: no column {' or '.join(wanted)}; its columns: {', '.join(present[:_MAX_LISTED])}",
        fix="rename a column, or choose another data.kind",
    )


def read_texts(path: Path, column: str, key: str = "data.path") -> Iterator[bytes]:
    """Yield the text of ``column`` in each row, as UTF-8.

    Raises:
        ConfigError: there is no such column, or a row has no text there.
        UnsuitableEnvironment: pyarrow is not installed.
    """
    number = 0
    for batch in iter_batches(path, (column,), key):
        for text in batch.column(0).to_pylist():
            number += 1
            if not isinstance(text, str):
                raise ConfigError(
                    f"{path}, row {number}: {column!r} is {type(text).__name__}, not text",
                    fix="name a column of text, or remove the rows without text",
                )
            yield text.encode()


def _open_stream(file: Path) -> pyarrow.RecordBatchStreamReader:
    extras.require("pyarrow", str(file), alternative="convert the data to JSON lines")
    import pyarrow

    try:
        return pyarrow.ipc.open_stream(pyarrow.memory_map(str(file)))
    except (OSError, pyarrow.ArrowException) as e:
        raise _unreadable(file, e) from e


def _unreadable(file: Path, error: Exception) -> ConfigError:
    return ConfigError(f"{file}: not a readable Arrow file: {error}", fix=_FIX)
