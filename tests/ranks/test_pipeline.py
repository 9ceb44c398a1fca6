"""Pipelines and their checkpoints match one process, with each schedule and combined with other dimensions."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clustertrain import fsio
from clustertrain.checkpoint.format import manifest as index
from clustertrain.checkpoint.offline import inspect
from clustertrain.plan.layout import Layout
from clustertrain.run.run_dir import RunDir
from tests.ranks.rank_pool import Ranks, digest, make_run, one_thread, touch_stop_at, write_plan

pytestmark = pytest.mark.ranks

SCRIPT = Path(__file__).with_name("pipeline_script.py")
STEPS = 6
SINGLE = Layout()
PIPELINE = functools.partial(Layout, pp=2)
FSDP = functools.partial(Layout, pp=2, strategy="fsdp", dp_shard=2)


def run_of(folder: Path, layout: Layout, **options: Any) -> RunDir:
    options = {"steps": STEPS, "micro_batch": 2, "every": 100, **options}
    return make_run(folder, layout, layout.world_size, **options)


def train(run: RunDir, layout: Layout, attempt: int = 1, **options: Any) -> Ranks:
    return Ranks(run, layout.world_size, attempt, **{"setup": one_thread, **options}).expect(0)


def stop_at(step: int) -> None:
    one_thread()
    touch_stop_at(step)


@pytest.fixture(scope="module")
def reference() -> Iterator[Any]:
    """Yield a function that trains a model on one process and returns its losses and norms by step, and the run."""
    with tempfile.TemporaryDirectory() as folder:

        @functools.cache
        def losses(**model: Any) -> tuple[dict[int, tuple[float, float]], RunDir]:
            run = run_of(Path(folder, "-".join(["run", *model])), SINGLE, model=model)
            return train(run, SINGLE).losses(), run

        yield losses


def logical_tensors(run: RunDir) -> list[tuple[str, str, tuple[int, ...]]]:
    return [
        (t.name, t.dtype, t.shape)
        for t in index.read_manifest(inspect.find_checkpoint(run.checkpoints)).tensors
        if t.kind != "other"
    ]


@pytest.mark.parametrize(
    ("layout", "model"),
    [
        (PIPELINE(schedule="gpipe"), {}),
        (PIPELINE(schedule="interleaved", virtual_stages=2), {"dropout": 0.2}),
        (PIPELINE(schedule="zbv", virtual_stages=2), {"tie_embeddings": True}),
        (Layout(pp=3, schedule="1f1b"), {"tie_embeddings": True}),
        (FSDP(schedule="1f1b"), {"tie_embeddings": True}),
        (FSDP(schedule="zero-bubble", virtual_stages=2, activation_checkpointing="full"), {}),
        (Layout(pp=2, strategy="ddp", dp_replicate=2, schedule="gpipe"), {"dropout": 0.2}),
    ],
    ids=lambda value: value.describe() if isinstance(value, Layout) else "-".join(value),
)
def test_pipeline_matches_one_process(tmp_path: Path, reference: Any, layout: Layout, model: dict[str, Any]) -> None:
    expected, single = reference(**model)
    run = run_of(tmp_path / "run", layout, model=model)
    losses = train(run, layout).losses()
    assert losses.keys() == expected.keys()
    for step, (loss, norm) in expected.items():
        assert losses[step][0] == pytest.approx(loss, rel=2e-6), step
        assert losses[step][1] == pytest.approx(norm, rel=5e-6), step
    assert logical_tensors(run) == logical_tensors(single)


@pytest.mark.parametrize(
    ("layout", "model"),
    [
        (FSDP(schedule="1f1b"), {"dropout": 0.2, "tie_embeddings": True}),
        (FSDP(schedule="zero-bubble", virtual_stages=2), {}),
    ],
)
def test_stopped_and_resumed_equals_uninterrupted(tmp_path: Path, layout: Layout, model: dict[str, Any]) -> None:
    reference_run = run_of(tmp_path / "whole", layout, model=model)
    expected = train(reference_run, layout).losses()
    run = run_of(tmp_path / "parts", layout, model=model)
    first = train(run, layout, 1, setup=stop_at, args=(2,))
    assert {r["ending"] for r in first.results()} == {"stopped"}
    second = train(run, layout, 2)
    assert second.events("restored")[0]["step"] == 4
    assert {**first.losses(), **second.losses()} == expected
    assert digest(run) == digest(reference_run)


def test_user_model_with_named_inputs_resumes_elsewhere(tmp_path: Path) -> None:
    script = (SCRIPT, ())
    options: dict[str, Any] = {"global_batch": 8, "micro_batch": 2}
    single = run_of(tmp_path / "single", SINGLE, script=script, **options)
    expected = train(single, SINGLE, argv=(str(SCRIPT), "8")).losses()
    run = run_of(tmp_path / "run", SINGLE, script=script, **options)
    layouts = [
        PIPELINE(schedule="interleaved", virtual_stages=2),
        Layout(strategy="fsdp", dp_shard=2),
        FSDP(schedule="1f1b"),
        SINGLE,
    ]
    losses: dict[int, tuple[float, float]] = {}
    for attempt, layout in enumerate(layouts, start=1):
        write_plan(run, layout, layout.world_size, **options)
        ranks = train(run, layout, attempt, argv=(str(SCRIPT), str(2 * attempt)))
        losses.update(ranks.losses())
    assert list(losses) == list(expected)
    for step, (loss, norm) in expected.items():
        assert losses[step] == (pytest.approx(loss, rel=2e-6), pytest.approx(norm, rel=5e-6))
    assert logical_tensors(run) == logical_tensors(single)
    # Two steps per layout, with 4 micro-batches per rank, or 2 with two data-parallel ranks: none is counted twice.
    assert list(fsio.read_jsonl(run.metrics_path(4)))[-1]["batches"] == 2 * (4 + 2 + 2 + 4)


@pytest.mark.parametrize(
    ("layout", "options", "message"),
    [
        (PIPELINE(schedule="1f1b"), {"micro_batch": 16}, "1f1b needs at least as many micro-batches as stages, 2"),
        (PIPELINE(schedule="1f1b"), {"micro_batch": 6}, "must all have one shape"),
        (Layout(pp=5, schedule="1f1b"), {}, "5 pipeline stages"),
    ],
)
def test_unsupported_pipeline_is_refused(tmp_path: Path, layout: Layout, options: dict[str, Any], message: str) -> None:
    ranks = Ranks(run_of(tmp_path / "run", layout, **options), layout.world_size)
    assert set(ranks.wait()) == {78}
    assert all(message in r["error"]["message"] for r in ranks.results())
