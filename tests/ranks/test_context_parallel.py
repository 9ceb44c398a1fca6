"""Context parallelism, alone and combined with other dimensions, matches one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from clustertrain.plan.layout import Layout
from tests.ranks.rank_pool import digest
from tests.ranks.test_tensor_parallel import (
    Reference,
    assert_equal_up_to_rounding,
    reference,
    run_of,
    save_initial_values,
    start,
    tensors,
    train_custom_model,
)

pytestmark = pytest.mark.ranks
__all__ = ["reference"]


@pytest.mark.parametrize(
    ("layout", "model"),
    [
        (Layout(cp=4), {"dropout": 0.2}),
        (Layout(strategy="fsdp", dp_shard=2, cp=2, activation_checkpointing="full"), {"dropout": 0.2}),
        (Layout(strategy="ddp", dp_replicate=2, cp=2), {}),
    ],
    ids=lambda value: value.describe() if isinstance(value, Layout) else "-".join(value) or "plain",
)
def test_layout_matches_one_process(
    tmp_path: Path, reference: Reference, layout: Layout, model: dict[str, Any]
) -> None:
    losses, single = reference(**model)
    run = run_of(tmp_path / "run", layout, model=model)
    ranks = start(run, layout, setup=save_initial_values).expect(0)
    assert_equal_up_to_rounding(ranks.losses(), losses)
    assert digest(run, 1) == digest(single, 1), "the initial values depend on the layout"
    assert tensors(run) == tensors(single)


@pytest.mark.parametrize(
    ("layout", "faults", "message"),
    [(Layout(cp=2), ["odd-length"], "17 does not divide over cp = 2: 17 / 2 = 8.5")],
)
def test_sequence_length_must_divide_by_cp(tmp_path: Path, layout: Layout, faults: list[str], message: str) -> None:
    ranks = train_custom_model(tmp_path / "run", layout, "8", *faults)
    assert all(ranks.wait())
    assert all(message in r["error"]["message"] for r in ranks.results())
