"""Label-smoothed cross-entropy with ignored targets is the same under every layout, even with split logits."""

from __future__ import annotations

from pathlib import Path

import pytest

from clustertrain.plan.layout import Layout
from tests.ranks.rank_pool import Ranks, make_run, one_thread

pytestmark = pytest.mark.ranks

NEWLINE = 10
TABLES = {
    "objective": {"label_smoothing": 0.1, "ignore_index": NEWLINE},
    # No sum may depend on the order of threads.
    "train": {"deterministic": True},
}
LAYOUTS = (
    Layout(strategy="fsdp", dp_shard=2),
    Layout(tp=2, sequence_parallel=True),
    Layout(pp=2, schedule="gpipe"),
    Layout(cp=2, strategy="fsdp", dp_shard=1),
)


def losses(folder: Path, layout: Layout) -> list[tuple[float, float]]:
    """Return (loss, gradient norm) of each step, with micro-batches of 2."""
    run = make_run(folder, layout, layout.world_size, steps=3, every=100, global_batch=8, micro_batch=2, tables=TABLES)
    return list(Ranks(run, layout.world_size, setup=one_thread).expect(0).losses().values())


def test_smoothed_loss_is_independent_of_layout(tmp_path: Path) -> None:
    single = losses(tmp_path / "single" / "run", Layout())
    assert len(single) == 3
    for layout in LAYOUTS:
        steps = losses(tmp_path / layout.describe().replace(" ", "-") / "run", layout)
        for i, limit in enumerate((2e-6, 5e-6)):
            expected = [step[i] for step in single]
            assert [step[i] for step in steps] == pytest.approx(expected, rel=limit), layout.describe()
