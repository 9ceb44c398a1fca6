"""Each rank's part of a stream continues where that rank stopped, and another number of ranks is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from clustertrain.run.run_dir import RunDir
from tests.ranks.rank_pool import Ranks, make_run, one_thread, write_plan

pytestmark = pytest.mark.ranks


class Part:
    """The numbers from ``data_rank`` on, in steps of ``data_ranks``, with a state."""

    def __init__(self, data_rank: int, data_ranks: int) -> None:
        self._next, self._ranks = data_rank, data_ranks

    def __iter__(self) -> Iterator[Any]:
        while True:
            self._next += self._ranks
            values = torch.tensor([self._next % 7, self._next % 5, self._next % 3], dtype=torch.float32)
            yield values, torch.tensor(self._next % 2)

    def state_dict(self) -> dict[str, Any]:
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._next = state["next"]


def make_stream_run(folder: Path) -> RunDir:
    tables = {
        "model": {"entry": "torch.nn:Linear", "args": {"in_features": 3, "out_features": 2}},
        "train": {"steps": 8, "global_batch": 4, "deterministic": True},
    }
    run = make_run(folder / "run", "ddp", 2, every=100, global_batch=4, tables=tables)
    text = run.spec.read_text().replace("[recipe.data]", '[recipe.data]\nkind = "custom"\nentry = "' + ENTRY + '"')
    run.spec.write_text("\n".join(line for line in text.splitlines() if not line.startswith(UNUSED)))
    return run


ENTRY = f"{__name__}:Part"
UNUSED = ("dim", "layers", "heads", "kv_heads", "seq_len", "max_bytes", "path")


def test_parts_of_a_stream_resume(tmp_path: Path) -> None:
    whole = Ranks(make_stream_run(tmp_path / "whole"), 2, setup=one_thread).expect(0)
    (event,) = whole.events("stream_described")
    assert event["sharded"] and event["own_state"]
    run = make_stream_run(tmp_path / "resumed")
    first = Ranks(run, 2, setup=one_thread, args=(2,)).expect(0)
    assert 0 < first.rows()[-1]["step"] < 8
    second = Ranks(run, 2, 2, setup=one_thread).expect(0)
    assert {**first.losses(), **second.losses()} == whole.losses()
    write_plan(run, "ddp", 1, global_batch=4)
    other = Ranks(run, 1, 3, setup=one_thread)
    assert other.wait() != [0] and "saved with 2 parts, and there are 1 parts now" in other.logs()
