"""Streams: samples by iteration, with a position of their own."""

from __future__ import annotations

import itertools
import random
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import clustertrain as ct
from clustertrain.config.parsing.documents import build
from clustertrain.config.recipe import Recipe
from clustertrain.errors import CheckpointError, ConfigError
from clustertrain.plan.layout import Batch
from clustertrain.train.data.datasets import build_datasets
from clustertrain.train.data.describe import report_datasets
from clustertrain.train.data.sample_checks import Limits
from clustertrain.train.data.streams.loader import StreamLoader
from clustertrain.train.data.streams.source import StreamSource
from clustertrain.train.trainer import build_trainer

SIZE = 10
Sample = tuple[torch.Tensor, torch.Tensor]


def make_sample(value: float) -> Sample:
    """Return a sample that shows its number and a random draw."""
    return torch.tensor([value, random.random()]), torch.tensor(0)


class Counter:
    """A stream with a state, which, like those of `datasets`, starts each pass at the state that was loaded."""

    def __init__(self, size: int = SIZE, first: int = 0, stride: int = 1) -> None:
        self._values = range(first, size, stride)
        self._start, self._next = 0, 0
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Sample]:
        for i in range(self._start, len(self._values)):
            self._next = i + 1
            yield make_sample(100 * self.epoch + self._values[i])

    def state_dict(self) -> dict[str, Any]:
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._start = self._next = state["next"]


class Shuffled:
    """A stream that draws its order when it is iterated."""

    def __iter__(self) -> Iterator[Sample]:
        order = random.sample(range(SIZE), SIZE)
        return (make_sample(float(n)) for n in order)


def counter(size: int = SIZE) -> Counter:
    return Counter(size)


def part(data_rank: int, data_ranks: int) -> Counter:
    return Counter(SIZE, data_rank, data_ranks)


def stateless_part(data_rank: int, data_ranks: int) -> Iterator[Sample]:
    return (make_sample(float(n)) for n in range(data_rank, SIZE, data_ranks))


def generator(path: str = "") -> Iterator[Sample]:
    return (make_sample(float(n)) for n in range(SIZE))


@pytest.fixture(autouse=True)
def entries(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("stream_entries")
    vars(module).update(
        counter=counter,
        part=part,
        stateless_part=stateless_part,
        generator=generator,
        shuffled=Shuffled,
        nothing=lambda: iter(()),
        number=lambda: 3,
        numbers_by_rank=lambda data_rank, data_ranks: [0],
    )
    monkeypatch.setitem(sys.modules, "stream_entries", module)


def make_recipe(entry: str, **tables: Any) -> Recipe:
    data = {"kind": "custom", "entry": f"stream_entries:{entry}", **tables.pop("data", {})}
    return build({"data": data, **tables}, Recipe, "recipe")


def open_loader(entry: str, rank: int = 0, ranks: int = 1, *, global_batch: int = 4) -> StreamLoader:
    source = build_datasets(make_recipe(entry), Limits(), (rank, ranks)).train
    assert isinstance(source, StreamSource)
    return StreamLoader(
        source,
        global_batch=global_batch,
        micro_batch=1,
        seed=1,
        rank=rank,
        ranks=ranks,
        device=torch.device("cpu"),
        ragged=True,
    )


def read_steps(loader: StreamLoader, count: int) -> list[list[list[float]]]:
    """Return the samples that count of ``count`` steps: (number, random draw) of each."""
    steps = []
    for _ in range(count):
        batch = next(loader)
        kept = zip(batch, loader.sample_positions, strict=True)
        steps.append([row for (inputs, _), positions in kept if positions[0] >= 0 for row in inputs.tolist()])
    return steps


def numbers(steps: list[list[list[float]]]) -> list[list[float]]:
    return [[number for number, _ in step] for step in steps]


def test_samples_come_in_order_and_each_pass_is_an_epoch() -> None:
    assert numbers(read_steps(open_loader("counter"), 4)) == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9, 100, 101],
        [102, 103, 104, 105],
    ]


@pytest.mark.parametrize("entry", ["counter", "generator", "shuffled"])
def test_ranks_share_a_stream_and_resume_with_another_number(entry: str) -> None:
    whole = read_steps(open_loader(entry, global_batch=5), 5)
    ranks = [open_loader(entry, rank, 3, global_batch=5) for rank in range(3)]  # 2, 2 and 1 samples
    random.seed(9)
    divided = [read_steps(loader, 3) for loader in ranks]
    assert [list(itertools.chain(*step)) for step in zip(*divided, strict=True)] == whole[:3]
    resumed = open_loader(entry, global_batch=5)
    resumed.load_state_dict(ranks[0].state_dict())
    assert read_steps(resumed, 2) == whole[3:]


@pytest.mark.parametrize("entry", ["part", "stateless_part"])
def test_parts_resume_on_the_rank_that_read_them(entry: str) -> None:
    undisturbed = read_steps(open_loader(entry, 1, 2), 8)
    assert numbers(undisturbed)[:2] == [[1, 3], [5, 7]]
    first = open_loader(entry, 1, 2)
    read_steps(first, 3)
    state, rank_state = first.state_dict(), first.rank_state()
    second = open_loader(entry, 1, 2)
    second.load_state_dict(state)
    second.load_rank_state(rank_state)
    assert read_steps(second, 5) == undisturbed[3:]
    with pytest.raises(CheckpointError, match="saved with 2 parts, and there are 1 parts now"):
        open_loader(entry).load_state_dict(state)
    with pytest.raises(CheckpointError, match="no state of the part of data-parallel rank 0 of 2"):
        open_loader(entry, 0, 2).load_rank_state(rank_state)


def test_bad_micro_batch_is_described_by_the_samples_before_it() -> None:
    loader = open_loader("counter", 1, 2)  # micro-batches of 1, two for each rank
    assert loader.describe_batch(8).startswith("the global batch: samples 8 to 11 of the stream")
    assert loader.describe_batch(8, 3).startswith("micro-batch 1 of data-parallel rank 1: samples 11 to 11 of the")


def test_reading_does_not_touch_the_generators_of_training() -> None:
    loader = open_loader("generator", 0, 2)
    random.seed(5)
    expected = random.Random(5).random()
    next(loader)
    assert random.random() == expected


def test_shorter_stream_is_refused() -> None:
    loader = open_loader("generator")
    read_steps(loader, 2)
    state = loader.state_dict()
    state["stream"]["taken"] = 11
    with pytest.raises(CheckpointError, match="pass 1 has 10 samples, fewer than the checkpoint's"):
        open_loader("generator").load_state_dict(state)
    with pytest.raises(CheckpointError, match="the dataset has version"):
        open_loader("counter").load_state_dict(state)


@pytest.mark.parametrize(
    ("entry", "tables", "message"),
    [
        ("number", {}, "returned int"),
        ("numbers_by_rank", {}, "returned map-style data"),
        ("generator", {"data": {"validation": 0.1}}, "data.validation = 0.1 requires map-style data"),
        ("generator", {"data": {"workers": 2}}, "data.workers = 2 requires map-style data"),
        ("generator", {"data": {"validation_path": "held"}}, "data.validation_path = 'held': .* returned a stream"),
        ("generator", {"stability": {"spike": "roll-back"}}, "a rollback .* requires map-style data"),
        ("generator", {"contract": {"resume": "exact"}}, "contract.resume = 'exact' requires map-style data"),
    ],
)
def test_keys_that_need_positions_are_refused(entry: str, tables: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_datasets(make_recipe(entry, **tables), Limits())


def test_stream_without_samples_is_refused() -> None:
    with pytest.raises(ConfigError, match="the stream has no samples"):
        next(open_loader("nothing"))


def test_report_says_what_is_exact(capsys: pytest.CaptureFixture[str]) -> None:
    events: list[dict[str, Any]] = []
    report_datasets(open_loader("part").source, None, lambda name, **fields: events.append({"event": name, **fields}))
    assert events[0]["event"] == "stream_described" and events[0]["sharded"] and events[0]["own_state"]
    assert "each rank reads its own part; a resume restores the stream's own state" in capsys.readouterr().out


@pytest.mark.long
def test_training_on_a_stream_resumes(tmp_path: Path) -> None:
    model = {"entry": "torch.nn:Linear", "args": {"in_features": 2, "out_features": 2}}
    recipe = make_recipe("part", model=model, train={"steps": 6})
    losses: dict[str, list[float]] = {}
    for name, ends in (("whole", (6,)), ("resumed", (3, 6))):
        losses[name] = []
        for end in ends:
            with ct.session(checkpoint_dir=tmp_path / name, device="cpu") as session:
                trainer = build_trainer(session, recipe, Batch(global_batch=4, micro_batch=2, grad_accum=2))
                state = {"model": trainer.model, "optimizer": trainer.optimizer, "data": trainer.data}
                for step in session.steps(end, state):
                    trainer.schedule.apply(trainer.optimizer, step + 1)
                    losses[name].append(trainer.step().loss.item())
    assert losses["resumed"] == losses["whole"]
