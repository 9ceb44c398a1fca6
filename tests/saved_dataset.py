"""Data sets in the format of the `save_to_disk` of Hugging Face's `datasets`, written without that library."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa


def save_dataset(folder: Path, rows: list[dict[str, Any]], *, files: int = 1, **state: Any) -> Path:
    """Write ``rows`` to ``folder`` in about ``files`` files and return the folder."""
    folder.mkdir(parents=True)
    table = pa.Table.from_pylist(rows)
    names, size = [], max(1, -(-len(rows) // files))
    for i, first in enumerate(range(0, len(rows), size)):
        names.append(f"data-{i:05d}-of-{files:05d}.arrow")
        with pa.OSFile(str(folder / names[-1]), "wb") as out, pa.ipc.new_stream(out, table.schema) as writer:
            writer.write_table(table.slice(first, size), max_chunksize=2)
    data_files = [{"filename": name} for name in names]
    (folder / "state.json").write_text(json.dumps({"_data_files": data_files, "_split": None, **state}))
    (folder / "dataset_info.json").write_text(json.dumps({"features": {}}))
    return folder
