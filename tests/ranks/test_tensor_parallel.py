"""Tensor and sequence parallelism, alone and with replicas and shards, match one process."""

from __future__ import annotations

import functools
import tempfile
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from clustertrain.checkpoint.format import manifest as index
from clustertrain.checkpoint.offline import inspect
from clustertrain.plan.layout import Layout
from clustertrain.run.run_dir import RunDir
from tests.ranks.rank_pool import Ranks, digest, make_run, one_thread, write_plan
from tests.ranks.test_resume import save_restored_state

pytestmark = pytest.mark.ranks

SCRIPT = Path(__file__).with_name("custom_model_script.py")
LOSS, NORM = 2e-6, 5e-6  # relative, in fp32
# Sizes that leave no power of two for the shards: 24 rows of q over 2 x 3 ranks, 10 of k.
ODD = {"dim": 24, "heads": 12, "kv_heads": 6, "ffn_dim": 34, "vocab_size": 262}
Reference = Callable[..., tuple[dict[int, tuple[float, float]], RunDir]]


def start(run: RunDir, layout: Layout, attempt: int = 1, setup: Callable[[], None] | None = None, **kw: Any) -> Ranks:
    return Ranks(run, layout.world_size, attempt, setup=setup or one_thread, **kw)


def save_initial_values() -> None:
    """Setup: save the initial state as step 1."""
    from clustertrain.train.session.checkpointing import SessionCheckpointer

    one_thread()
    original = SessionCheckpointer.restore

    def restore(self: SessionCheckpointer, state: Any, seed: int) -> int:
        step = original(self, state, seed)
        self.save(1, state, "end", {})
        return step

    SessionCheckpointer.restore = restore  # type: ignore[method-assign]


def run_of(folder: Path, layout: Layout, parallel: dict[str, Any] | None = None, **kw: Any) -> RunDir:
    options = {"steps": 3, "every": 100, "global_batch": 12, **kw}
    run = make_run(folder, layout, layout.world_size, **options)
    spec = tomllib.loads(run.spec.read_text())
    spec["recipe"]["parallel"] = parallel or {}
    run.spec.write_text(tomli_w.dumps(spec))
    return run


def tensors(run: RunDir) -> list[tuple[str, str, tuple[int, ...]]]:
    """Return (name, dtype, shape) of the logical tensors in the newest checkpoint."""
    manifest_tensors = index.read_manifest(inspect.find_checkpoint(run.checkpoints)).tensors
    return [(t.name, t.dtype, t.shape) for t in manifest_tensors if t.kind != "other"]


def assert_equal_up_to_rounding(
    actual: dict[int, tuple[float, float]], expected: dict[int, tuple[float, float]]
) -> None:
    assert list(actual) == list(expected)
    for step, (loss, norm) in expected.items():
        assert actual[step][0] == pytest.approx(loss, rel=LOSS), f"loss of step {step}"
        assert actual[step][1] == pytest.approx(norm, rel=NORM), f"norm of step {step}"


@pytest.fixture(scope="module")
def reference() -> Iterator[Reference]:
    """Yield a function that trains a model on one process and returns its losses and norms by step, and the run."""
    with tempfile.TemporaryDirectory() as folder:

        @functools.cache
        def train(**model: Any) -> tuple[dict[int, tuple[float, float]], RunDir]:
            run = run_of(Path(folder, "-".join(["run", *model])), Layout(), model=model)
            return start(run, Layout(), setup=save_initial_values).expect(0).losses(), run

        yield train


@pytest.mark.parametrize(
    ("layout", "parallel", "model"),
    [
        (Layout(tp=2, sequence_parallel=True, activation_checkpointing="full"), {}, {"dropout": 0.2}),
        (Layout(tp=2, sequence_parallel=True), {}, {"tie_embeddings": True}),
        (Layout(tp=2), {"loss_parallel": False}, {"tie_embeddings": True}),
        (Layout(strategy="fsdp", dp_shard=2, tp=2, activation_checkpointing="selective"), {}, {"dropout": 0.2}),
    ],
    ids=lambda value: value.describe() if isinstance(value, Layout) else "-".join(value),
)
def test_layout_matches_one_process(
    tmp_path: Path, reference: Reference, layout: Layout, parallel: dict[str, Any], model: dict[str, Any]
) -> None:
    losses, single_run = reference(**model)
    run = run_of(tmp_path / "run", layout, parallel, model=model)
    ranks = start(run, layout, setup=save_initial_values).expect(0)
    assert_equal_up_to_rounding(ranks.losses(), losses)
    assert digest(run, 1) == digest(single_run, 1), "the initial values depend on the layout"
    assert tensors(run) == tensors(single_run)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (Layout(strategy="fsdp", dp_shard=3, tp=2, sequence_parallel=True), Layout(strategy="ddp", dp_replicate=2)),
        (Layout(strategy="ddp", dp_replicate=2), Layout(strategy="fsdp", dp_shard=3, tp=2, sequence_parallel=True)),
    ],
    ids=Layout.describe,
)
def test_other_layout_restores_equal_tensors(tmp_path: Path, old: Layout, new: Layout) -> None:
    run = run_of(tmp_path / "run", old, steps=4, every=4, model=ODD)
    start(run, old).expect(0)
    before = digest(run, 4)
    write_plan(run, new, new.world_size, global_batch=12)
    saved_again = start(run, new, 2, setup=save_restored_state).expect(0)
    assert saved_again.events("restored")[0]["step"] == 4
    assert digest(run, 5) == before


def train_custom_model(folder: Path, layout: Layout, *arguments: str) -> Ranks:
    run = make_run(folder, layout, layout.world_size, script=(SCRIPT, ()))
    return start(run, layout, argv=(str(SCRIPT), *arguments))


@pytest.fixture(scope="module")
def single() -> Iterator[Ranks]:
    with tempfile.TemporaryDirectory() as folder:
        yield train_custom_model(Path(folder, "single"), Layout(), "8").expect(0)


@pytest.mark.parametrize(
    ("layout", "micro_batch"),
    [
        (Layout(strategy="fsdp", dp_shard=2, tp=2, sequence_parallel=True), 2),
        (Layout(cp=2, tp=2, sequence_parallel=True), 8),
    ],
    ids=lambda value: value.describe() if isinstance(value, Layout) else str(value),
)
def test_custom_model_with_tp_plan_and_sgd_matches_one_process(
    tmp_path: Path, single: Ranks, layout: Layout, micro_batch: int
) -> None:
    ranks = train_custom_model(tmp_path / "run", layout, str(micro_batch)).expect(0)
    assert_equal_up_to_rounding(ranks.losses(), single.losses())
    assert tensors(ranks.run) == tensors(single.run)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("norm-without-pattern", "no pattern covers parameter norm.weight"),
        ("odd-length", "17 does not divide over tp = 2: 17 / 2 = 8.5"),
        ("torch-dropout", "layers.0.dropout: Dropout would drop different values"),
    ],
)
def test_layout_that_would_change_results_is_refused(tmp_path: Path, fault: str, message: str) -> None:
    ranks = train_custom_model(tmp_path / "run", Layout(tp=2, sequence_parallel=True), "8", fault)
    assert all(ranks.wait())
    errors = [r["error"] for r in ranks.results()]
    assert [e["type"] for e in errors] == ["ConfigError"] * 2
    assert all(message in e["message"] for e in errors)
