"""The rules of pipeline schedules compared with torch's constructors, and micro-batches in flight per rank."""

from __future__ import annotations

from collections import Counter
from itertools import accumulate, pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import schedules

from clustertrain.config.model import ModelSpec
from clustertrain.plan import pipeline_schedules
from clustertrain.plan.cost.activations import blocks_by_rank, split_blocks
from clustertrain.plan.layout import Layout
from clustertrain.train.distributed import pipeline_stages
from clustertrain.train.models.decoder import Decoder

CLASSES: dict[str, Any] = {
    "gpipe": schedules.ScheduleGPipe,
    "1f1b": schedules.Schedule1F1B,
    "interleaved": schedules.ScheduleInterleaved1F1B,
    "zero-bubble": schedules.ScheduleInterleavedZeroBubble,
    "zbv": schedules.ScheduleZBVZeroBubble,
}


def construct(layout: Layout, micro_batches: int) -> Any:
    """Return torch's schedule from the stages of the first rank, without running it; None if torch refuses it."""
    schedule_class = CLASSES[layout.schedule or ""]
    count = pipeline_schedules.num_stages(layout)
    indices = (0, count - 1) if layout.schedule == "zbv" else range(0, count, layout.pp)
    stages = [
        SimpleNamespace(
            stage_index=i, num_stages=count, group_size=layout.pp, group_rank=0,
            submod=nn.Identity(), is_first=i == 0, is_last=False, has_backward=True,
        )
        for i in indices
    ]  # fmt: skip
    single = layout.schedule in ("gpipe", "1f1b")
    try:
        return schedule_class(stages[0] if single else stages, micro_batches, loss_fn=lambda output, target: output)
    except ValueError:
        return None


def torch_accepts(layout: Layout, micro_batches: int) -> bool:
    return construct(layout, micro_batches) is not None


def torch_order(layout: Layout, micro_batches: int, rank: int) -> list[tuple[str, int]]:
    """Return the names and stages of the rank's passes."""
    actions = construct(layout, micro_batches).pipeline_order[rank]
    return [(action.computation_type.name, action.stage_index) for action in actions if action is not None]


@pytest.mark.parametrize("schedule", CLASSES)
def test_unsupported_micro_batches_match_torch(schedule: str) -> None:
    refused = 0
    for pp in (2, 3, 4):
        layout = Layout(pp=pp, schedule=schedule, virtual_stages=1 if schedule in ("gpipe", "1f1b") else 2)
        for micro_batches in range(1, 14):
            reason = pipeline_schedules.unsupported_reason(layout, micro_batches)
            assert (reason == "") is torch_accepts(layout, micro_batches), (pp, micro_batches, reason)
            refused += bool(reason)
    assert (refused > 0) is (schedule in ("1f1b", "interleaved", "zero-bubble"))


def test_no_batch_constraint_without_pipeline() -> None:
    assert (
        pipeline_schedules.unsupported_reason(Layout(), 1) == "" and pipeline_schedules.min_micro_batches(Layout()) == 1
    )
    assert pipeline_schedules.in_flight_micro_batches(Layout(), 7, 0) == 1


@pytest.mark.parametrize(
    ("schedule", "virtual", "first", "last"),
    [
        ("gpipe", 1, 16, 16),
        ("1f1b", 1, 4, 1),
        ("interleaved", 2, 4 * (1 + 3 / 8), 2.5),  # Korthikanti: L (1 + (p - 1) / (p v)); the last rank: (v - 1) p + 1
        ("zero-bubble", 2, 4, 4),
        ("zbv", 2, 4, 4),
    ],
)
def test_micro_batches_in_flight(schedule: str, virtual: int, first: float, last: float) -> None:
    layout = Layout(pp=4, schedule=schedule, virtual_stages=virtual)
    by_rank = [pipeline_schedules.in_flight_micro_batches(layout, 16, rank) for rank in range(4)]
    assert (by_rank[0], by_rank[-1]) == (first, last) and by_rank == sorted(by_rank, reverse=True)
    assert max(pipeline_schedules.in_flight_micro_batches(layout, 2, rank) for rank in range(4)) <= 2


@pytest.mark.parametrize("micro_batches", [4, 8, 16])
@pytest.mark.parametrize(("schedule", "virtual"), [("interleaved", 2), ("interleaved", 3), ("zbv", 2)])
def test_in_flight_by_stage_matches_torch(schedule: str, virtual: int, micro_batches: int) -> None:
    layout = Layout(pp=4, schedule=schedule, virtual_stages=virtual)
    for rank in range(4):
        names = torch_order(layout, micro_batches, rank)
        first_backward = next(i for i, (name, _) in enumerate(names) if name != "FORWARD")
        forwards = Counter(stage for _, stage in names[:first_backward])
        expected = tuple(count for _, count in sorted(forwards.items()))
        counted = pipeline_schedules.in_flight_by_stage(layout, micro_batches, rank)
        assert tuple(filter(None, counted)) == expected, rank


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(
            Layout(pp=pp, schedule=schedule, virtual_stages=virtual), marks=[pytest.mark.long] if pp == 8 else []
        )
        for schedule, virtual in (("zero-bubble", 2), ("zero-bubble", 3), ("zbv", 2))
        for pp in (2, 4, 8)
    ],
    ids=lambda layout: layout.describe(),
)
def test_deferred_passes_match_torch(layout: Layout) -> None:
    for micro_batches in range(layout.pp, 2 * layout.pp + 2):
        if pipeline_schedules.unsupported_reason(layout, micro_batches):
            continue
        for rank in range(layout.pp):
            changes = [
                (name == "BACKWARD_INPUT") - (name == "BACKWARD_WEIGHT")
                for name, _ in torch_order(layout, micro_batches, rank)
            ]
            counted = pipeline_schedules.count_deferred(layout, micro_batches, rank)
            assert max(accumulate(changes)) == 1 + counted, (micro_batches, rank)
    assert pipeline_schedules.count_deferred(Layout(pp=4, schedule="1f1b"), 8, 3) == 0


@pytest.mark.parametrize(
    ("schedule", "virtual", "micro_batches", "bubble"),
    [
        ("gpipe", 1, 16, 3 / 19),
        ("1f1b", 1, 4, 3 / 7),
        ("interleaved", 2, 4, 3 / 11),
        ("zero-bubble", 1, 4, 1 / 5),  # a third of the time of 1f1b's 3 micro-batches, for the same work
        ("zbv", 2, 16, 0.0),
        ("zbv", 2, 4, None),
    ],
)
def test_bubble(schedule: str, virtual: int, micro_batches: int, bubble: float | None) -> None:
    layout = Layout(pp=4, schedule=schedule, virtual_stages=virtual)
    assert pipeline_schedules.bubble_fraction(layout, micro_batches) == (
        None if bubble is None else pytest.approx(bubble)
    )
    assert (
        pipeline_schedules.bubble_fraction(layout, 0) is None
        and pipeline_schedules.bubble_fraction(Layout(), 4) is None
    )


@pytest.mark.parametrize("vocab_size", [256, 8_000, 64_000])
@pytest.mark.parametrize("tied", [False, True])
def test_stage_split_matches_trainer(vocab_size: int, tied: bool) -> None:
    for layers in (4, 7, 12):
        spec = ModelSpec(vocab_size=vocab_size, dim=64, layers=layers, heads=4, kv_heads=4, tie_embeddings=tied)
        with torch.device("meta"):
            model = Decoder(spec)
        units = pipeline_stages.list_units(model)
        for count in (2, 3, 4):
            starts = pipeline_stages.balance_stages(pipeline_stages.estimate_costs(model, units), count)
            blocks = [sum(u[0].startswith("layers.") for u in units[a:b]) for a, b in pairwise([*starts, len(units)])]
            assert split_blocks(spec, count) == (max(blocks[:-1]), blocks[-1]), (layers, count)
            assert blocks_by_rank(spec, Layout(pp=count, schedule="1f1b")) == tuple(blocks)
