"""Positions excluded from all batches, for any number of ranks and workers."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from clustertrain.train.data.loader import Loader
from clustertrain.train.data.permutation import ExcludedRanges

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


class Numbers:
    def __len__(self) -> int:
        return 1000

    def __getitem__(self, i: int) -> int:
        return i


def make_loader(rank: int = 0, ranks: int = 1, global_batch: int = 12, **kw: Any) -> Loader:
    options: dict[str, Any] = {"micro_batch": None, "workers": 0, "ragged": True, **kw}
    return Loader(
        Numbers(), global_batch=global_batch, seed=1, rank=rank, ranks=ranks, device=torch.device("cpu"), **options
    )


def next_positions(*loaders: Loader) -> list[int]:
    """Return the next_positions of the next global batch."""
    for each in loaders:
        next(each)
    return [p for each in loaders for part in each.sample_positions for p in part.tolist() if p >= 0]


@pytest.mark.parametrize("seed", range(5))
def test_included_runs_skip_excluded_ranges(seed: int) -> None:
    draw = random.Random(seed)
    excluded = ExcludedRanges()
    gone: set[int] = set()
    for _ in range(6):
        first = draw.randrange(80)
        end = first + draw.randrange(12)
        excluded.add(first, end)
        gone |= set(range(first, end))
    left = [p for p in range(300) if p not in gone]
    for position in range(0, 90, 7):
        for count in (1, 5, 40):
            found = [p for first, n in excluded.included_runs(position, count) for p in range(first, first + n)]
            assert found == [p for p in left if p >= position][:count]
    assert all(b < c for (_, b), (c, _) in zip(excluded.ranges, excluded.ranges[1:], strict=False))


@pytest.mark.parametrize("global_batch", [12, 10])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_batches_do_not_depend_on_the_number_of_ranks(ranks: int, global_batch: int) -> None:
    loaders = [make_loader(r, ranks, global_batch, micro_batch=2) for r in range(ranks)]
    for each in loaders:
        each.exclude([(13, 20), (36, 60)])
    left = [p for p in range(200) if not (13 <= p < 20 or 36 <= p < 60)]
    for i in range(8):
        assert next_positions(*loaders) == left[i * global_batch : (i + 1) * global_batch]


def test_exclude_works_with_workers_and_after_resume() -> None:
    one = make_loader(workers=2)
    next(one)
    one.exclude([(24, 48)])
    taken = [next_positions(one) for _ in range(2)]
    assert taken == [list(range(12, 24)), list(range(48, 60))]
    state = one.state_dict()
    assert state["excluded"] == [[24, 48]] and state["position"] == 60
    others = [make_loader(r, 3) for r in range(3)]
    for each in others:
        each.load_state_dict(state)
        each.exclude([(24, 48)])  # repeated from the run's record
    assert next_positions(*others) == list(range(60, 72))
    one.load_state_dict({**state, "position": 12})
    assert next_positions(one) == list(range(12, 24)) and next_positions(one)[0] == 48
    one.close()


def test_older_state_drops_later_exclusions() -> None:
    one = make_loader()
    state = one.state_dict()
    assert "excluded" not in state
    one.exclude([(0, 12)])
    assert next_positions(one)[0] == 12
    one.load_state_dict(state)
    assert next_positions(one)[0] == 0
