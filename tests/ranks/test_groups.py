"""The process groups of a session."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from clustertrain.plan.layout import Layout
from tests.ranks.rank_pool import Ranks, make_run

pytestmark = pytest.mark.ranks
LAYOUT = Layout(strategy="hybrid-shard", dp_replicate=2, dp_shard=2)
TIMEOUT_S = 77.0


def record_timeouts(path: str) -> None:
    """Setup: open the session with a timeout, and write those of all groups into ``path``."""
    from clustertrain.train.distributed import mesh

    open_groups = mesh.open_groups

    def opened(context: object, _timeout_s: float) -> object:
        groups = open_groups(context, TIMEOUT_S)  # type: ignore[arg-type]
        if dist.get_rank() == 0:
            world = dist.distributed_c10d._world
            timeouts = [
                group._get_backend(device).options._timeout / timedelta(seconds=1)
                for group in world.pg_map
                for device in group._device_types
            ]
            Path(path).write_text(json.dumps(timeouts))
        return groups

    mesh.open_groups = opened  # type: ignore[assignment]


def test_groups_of_the_mesh_have_the_timeout_of_the_session(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", LAYOUT, 4, steps=1, every=100)
    Ranks(run, 4, setup=record_timeouts, args=(str(tmp_path / "timeouts.json"),)).expect(0)
    timeouts = json.loads((tmp_path / "timeouts.json").read_text())
    assert len(timeouts) > 2 and set(timeouts) == {TIMEOUT_S}
