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
    """Return the positions of the samples in the next global batch."""
    for loader in loaders:
        next(loader)
    return [p for loader in loaders for part in loader.sample_positions for p in part.tolist() if p >= 0]


@pytest.mark.parametrize("seed", range(5))
def test_included_runs_skip_excluded_ranges(seed: int) -> None:
    rng = random.Random(seed)
    excluded = ExcludedRanges()
    excluded_positions: set[int] = set()
    for _ in range(6):
        first = rng.randrange(80)
        end = first + rng.randrange(12)
        excluded.add(first, end)
        excluded_positions |= set(range(first, end))
    remaining = [p for p in range(300) if p not in excluded_positions]
    for position in range(0, 90, 7):
        for count in (1, 5, 40):
            included = [p for first, n in excluded.included_runs(position, count) for p in range(first, first + n)]
            assert included == [p for p in remaining if p >= position][:count]
    assert all(b < c for (_, b), (c, _) in zip(excluded.ranges, excluded.ranges[1:], strict=False))


@pytest.mark.parametrize("global_batch", [12, 10])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_batches_do_not_depend_on_the_number_of_ranks(ranks: int, global_batch: int) -> None:
    loaders = [make_loader(r, ranks, global_batch, micro_batch=2) for r in range(ranks)]
    for loader in loaders:
        loader.exclude([(13, 20), (36, 60)])
    remaining = [p for p in range(200) if not (13 <= p < 20 or 36 <= p < 60)]
    for i in range(8):
        assert next_positions(*loaders) == remaining[i * global_batch : (i + 1) * global_batch]


@pytest.mark.long
def test_exclude_works_with_workers_and_after_resume() -> None:
    one = make_loader(workers=2)
    next(one)
    one.exclude([(24, 48)])
    seen = [next_positions(one) for _ in range(2)]
    assert seen == [list(range(12, 24)), list(range(48, 60))]
    state = one.state_dict()
    assert state["excluded"] == [[24, 48]] and state["position"] == 60
    others = [make_loader(r, 3) for r in range(3)]
    for loader in others:
        loader.load_state_dict(state)
        loader.exclude([(24, 48)])  # repeated from the run's record
    assert next_positions(*others) == list(range(60, 72))
    one.load_state_dict({**state, "position": 12})
    assert next_positions(one) == list(range(12, 24)) and next_positions(one)[0] == 48
    one.close()


def test_older_state_drops_later_exclusions() -> None:
    loader = make_loader()
    state = loader.state_dict()
    assert "excluded" not in state
    loader.exclude([(0, 12)])
    assert next_positions(loader)[0] == 12
    loader.load_state_dict(state)
    assert next_positions(loader)[0] == 0
