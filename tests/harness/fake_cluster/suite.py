"""``python -m tests.harness.fake_cluster.suite``: what the test suite runs in one process; prints one JSON document."""

from __future__ import annotations

import json
import sys
from typing import Any
from unittest import mock

from tests.harness.fake_cluster import fake_cuda

# Values of factors; the others have their first value.
LAYOUTS: tuple[dict[str, Any], ...] = (
    {"preset": "llama3.1-8b", "ranks": 512, "strategy": "fsdp", "tp": 8, "cp": 4, "pp": 4, "schedule": "interleaved",
     "recompute": "full"},
    {"preset": "llama3.1-405b", "ranks": 512, "tp": 8, "pp": 4, "schedule": "zbv", "sequence_parallel": False,
     "loss_parallel": False},
    {"preset": "llama3.1-70b", "ranks": 128, "strategy": "hybrid-shard", "tp": 4, "recompute": "selective",
     "precision": "fp16"},
    {"preset": "125m", "strategy": "zero1"},
)  # fmt: skip
REFUSED = {"preset": "125m", "strategy": "fsdp", "tp": 4}


def main() -> int:
    try:
        fake_cuda.install()
    except fake_cuda.Unavailable as e:
        print(e, file=sys.stderr)
        return 77
    # Imports torch, which must come after the device.
    from clustertrain.train.distributed import mesh, tensor_parallel
    from tests.harness.fake_cluster.in_child import ChildFailed, call_in_child
    from tests.harness.fake_cluster.layout_cells import LayoutCell, build_cell, shorten
    from tests.harness.fake_cluster.layouts_command import check_cell
    from tests.harness.fake_cluster.measure_memory import measure_cell
    from tests.harness.fake_cluster.memory_cells import draw_cells
    from tests.harness.fake_cluster.rank import trace_rank

    def trace(cell: LayoutCell) -> str:
        """Return the error of the last rank's trace, empty if there is none."""
        try:
            call_in_child(trace_rank, shorten(cell), cell.layout.world_size - 1)
        except ChildFailed as e:
            return e.error
        return ""

    outcomes = [check_cell(build_cell(**values)) for values in LAYOUTS]
    tensor_parallel_cell = build_cell(**LAYOUTS[2])
    dimensions = mesh.mesh_dimensions(tensor_parallel_cell.layout)
    with mock.patch.object(mesh, "mesh_dimensions", lambda layout: (dimensions[0], dimensions[1][::-1])):
        wrong_groups = trace(tensor_parallel_cell)
    plan = {"layers.*.attention.out": "colwise"}
    with (
        mock.patch.object(tensor_parallel, "check", lambda model, context: None),
        mock.patch.dict("clustertrain.train.models.decoder.Decoder.TP_PLAN", plan),
    ):
        wrong_shapes = trace(tensor_parallel_cell)
    cells = [cell for cell in draw_cells() if cell.model in ("125m", "400m") and cell.layout.pp == 1][:2]
    peaks = {cell.name: (cell.predict(), measure_cell(cell).at_peak) for cell in cells}
    refused = build_cell(**REFUSED)
    print(json.dumps({
        "layouts": [[o.verdict, o.detail] for o in outcomes],
        "wrong_groups": wrong_groups, "wrong_shapes": wrong_shapes,
        "refused": [refused.refusal, trace(refused)], "peaks": peaks,
    }))  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
