"""NaN, Inf and loss spikes under every layout: all ranks skip the same steps and roll back to the same step, and the
run continues as if it had never seen the excluded samples."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clustertrain import clock
from clustertrain.checkpoint.load import rollback
from clustertrain.checkpoint.offline import inspect
from clustertrain.plan.layout import Layout
from clustertrain.run import attempts, metrics
from clustertrain.run.events import EventLog
from clustertrain.run.run_dir import RunDir
from clustertrain.run.usage import goodput
from clustertrain.train.stability.divergence import CHECK_LAG_STEPS
from tests.ranks import faulty_data, known_noise
from tests.ranks.rank_pool import DEVICE, Ranks, digest, make_run, write_plan

pytestmark = pytest.mark.ranks

SINGLE = Layout()
DDP = Layout(strategy="ddp", dp_replicate=4)
ZERO1 = Layout(strategy="zero1", dp_replicate=4)
FSDP = Layout(strategy="fsdp", dp_shard=4)
FSDP_TP = Layout(strategy="fsdp", dp_shard=2, tp=2)
FSDP_PP = Layout(strategy="fsdp", dp_shard=2, pp=2, schedule="1f1b")

BATCH = 16
SPIKE = {"spike": "roll-back", "spike_window": 16}
SPIKE_AT = 20  # the step with bad samples; a spike needs 16 losses before it
BAD = ((SPIKE_AT - 1) * BATCH,)
MARGIN = 2
SPIKE_FOUND_AT = SPIKE_AT + (CHECK_LAG_STEPS if DEVICE == "cuda" else 0)
STEPS, EVERY = 26, 6
MODEL = {"dim": 16, "layers": 2, "heads": 2, "kv_heads": 2}


def make_spike_run(folder: Path, layout: Layout, **kw: Any) -> RunDir:
    options: dict[str, Any] = {"model": MODEL, **kw}
    return make_run(folder, layout, layout.world_size, **options)


@pytest.mark.parametrize(
    ("layout", "setup"),
    [
        *((layout, faulty_data.poison_gradients) for layout in (DDP, ZERO1, FSDP, FSDP_TP, FSDP_PP)),
        *((layout, faulty_data.poison_gradients_with_device_skip) for layout in (ZERO1, FSDP_TP, FSDP_PP)),
    ],
    ids=lambda value: value.describe() if isinstance(value, Layout) else value.__name__,
)
def test_nan_on_one_rank_makes_all_ranks_skip(tmp_path: Path, layout: Layout, setup: Callable[..., None]) -> None:
    run = make_spike_run(tmp_path / "run", layout, steps=5, every=1, keep=5)
    ranks = Ranks(run, 4, setup=setup, args=(3, (3, 4))).expect(0)
    skips = [(ranks.rank_dir / f"skips-{r}").read_text() for r in range(4)]
    assert skips == ["00110"] * 4
    rows = metrics.load_rows(run)
    assert [r["skipped"] for r in rows] == [0, 0, 1, 1, 0]
    assert rows[4]["loss"] != rows[2]["loss"]  # other samples, same weights
    bad_samples = [r.get("bad_samples", "").partition(", epoch 0: sample ")[0] for r in rows]
    assert bad_samples == ["", "", "the global batch", "micro-batch 1 of data-parallel rank 1", ""]
    # Weights and optimizer state are bitwise unchanged.
    assert digest(run, 2) == digest(run, 3) == digest(run, 4) != digest(run, 5)
    assert ranks.events("session_ended")[0]["skipped_steps"] == 2
    (warning,) = (e for e in ranks.events("training_warning") if e["code"] == "non_finite")
    assert rows[2]["bad_samples"] in warning["text"]


def test_too_many_skipped_steps_in_a_row_end_run(tmp_path: Path) -> None:
    run = make_spike_run(tmp_path / "run", FSDP_PP, steps=9, every=2, tables={"stability": {"max_skipped": 3}})
    ranks = Ranks(run, 4, setup=faulty_data.poison_gradients, args=(0, range(4, 99))).expect(78)
    results = ranks.results()
    assert {r["kind"] for r in results} == {"environment"} and {r["step"] for r in results} == {6}
    assert "3 steps in a row were skipped, 4 to 6" in results[0]["error"]["message"]


@pytest.fixture(scope="module")
def digest_without_samples(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function from the layout to the digest of a run that excluded the samples from the start."""
    digests: dict[Layout, str] = {}

    def digest_of(layout: Layout) -> str:
        if layout not in digests:
            run = make_spike_run(
                tmp_path_factory.mktemp("without") / "run",
                layout,
                steps=STEPS,
                every=EVERY,
                tables={"stability": {"spike": "off"}},
            )
            excluded = ((SPIKE_AT - 1 - MARGIN) * BATCH, SPIKE_AT * BATCH)
            Ranks(run, layout.world_size, setup=faulty_data.exclude_samples, args=excluded).expect(0)
            digests[layout] = digest(run)
        return digests[layout]

    return digest_of


def make_rollback_run(folder: Path, layout: Layout, **kw: Any) -> RunDir:
    stability = {**SPIKE, "roll_back_margin": MARGIN}
    return make_spike_run(folder, layout, steps=STEPS, every=EVERY, tables={"stability": stability}, **kw)


@pytest.mark.parametrize("layout", [DDP, FSDP_PP], ids=Layout.describe)
def test_rollback_matches_run_without_the_samples(tmp_path: Path, layout: Layout, digest_without_samples: Any) -> None:
    run = make_rollback_run(tmp_path / "run", layout, data={"workers": 1} if layout is DDP else None)
    batch = EventLog(run.attempt(1).events_path("batch"))
    batch.write("started", job_id="7")
    ranks = Ranks(run, 4, setup=faulty_data.bad_samples, args=(BAD, 50.0)).expect(0)
    batch.write("ended", ending="completed", last_step=STEPS)
    batch.close()
    (rollback_event,) = ranks.events("rolled_back")
    # The checkpoint of step 18 was trained on samples within the margin.
    assert (rollback_event["step"], rollback_event["to_step"], rollback_event["samples"]) == (
        SPIKE_AT,
        12,
        (MARGIN + 1) * BATCH,
    )
    assert digest(run) == digest_without_samples(layout)
    assert [r["step"] for r in metrics.load_rows(run)] == list(range(1, STEPS + 1))
    assert [r["step"] for r in ranks.rows()] == [*range(1, SPIKE_FOUND_AT + 1), *range(13, STEPS + 1)]
    ledger = goodput.compute_goodput(run, attempts.load_attempts(run), clock.now(), is_finished=True)
    assert sum(getattr(ledger, part) for part in goodput.TIME_CATEGORIES) == pytest.approx(ledger.wall_s, rel=1e-12)
    assert ledger.repeated_s > 0 and ledger.restore_s >= rollback_event["restore_s"] * 0.99


@pytest.mark.parametrize(
    "point", ["before_rollback_record", "after_rollback_record", "between_invalidated_checkpoints"]
)
def test_attempt_after_kill_in_rollback_completes_it(tmp_path: Path, point: str, digest_without_samples: Any) -> None:
    layout = Layout(strategy="ddp", dp_replicate=2)
    run = make_rollback_run(tmp_path / "run", layout)
    first = Ranks(run, 2, setup=faulty_data.bad_samples_and_kill, args=(BAD, 50.0, point)).wait()
    assert first[0] == -9 and first[1] != 0
    second = Ranks(run, 2, 2, setup=faulty_data.bad_samples, args=(BAD, 50.0)).expect(0)
    recorded = point != "before_rollback_record"
    assert second.events("restored")[0]["step"] == (12 if recorded else 18)
    assert len(second.events("rolled_back")) == (not recorded)
    assert len(rollback.read_records(run.checkpoints)) == 1
    assert digest(run) == digest_without_samples(layout)


@pytest.mark.parametrize("was_saved_since", [True, False])
def test_run_may_lose_its_record_of_rollbacks(
    tmp_path: Path, was_saved_since: bool, digest_without_samples: Any
) -> None:
    """The guide says to delete a damaged record."""
    layout = Layout(strategy="ddp", dp_replicate=2)
    run = make_rollback_run(tmp_path / "run", layout)
    if was_saved_since:
        stopped_at = Ranks(run, 2, setup=stop_after_rollback).expect(0).results()[0]["step"]
    else:
        Ranks(run, 2, setup=faulty_data.bad_samples_and_kill, args=(BAD, 50.0, "after_rollback_record")).wait()
    run.rollback_record.unlink()
    second = Ranks(run, 2, 2, setup=faulty_data.bad_samples, args=(BAD, 50.0)).expect(0)
    assert second.events("restored")[0]["step"] == (stopped_at if was_saved_since else 18)
    assert len(second.events("rolled_back")) == (not was_saved_since)
    assert digest(run) == digest_without_samples(layout)


def test_run_continues_under_other_layout_after_rollback(tmp_path: Path) -> None:
    two, four = Layout(strategy="ddp", dp_replicate=2), FSDP_TP
    run = make_rollback_run(tmp_path / "run", two)
    first = Ranks(run, 2, setup=stop_after_rollback).expect(0)
    assert {r["ending"] for r in first.results()} == {"stopped"}
    stopped_at = first.results()[0]["step"]
    assert 12 < stopped_at < SPIKE_AT
    write_plan(run, four, 4, global_batch=BATCH, micro_batch=8)
    second = Ranks(run, 4, 2, setup=faulty_data.bad_samples, args=(BAD, 50.0)).expect(0)
    assert second.events("restored")[0]["step"] == stopped_at and not second.events("rolled_back")
    reference = make_rollback_run(tmp_path / "whole", SINGLE)
    expected = Ranks(reference, 1, setup=faulty_data.bad_samples, args=(BAD, 50.0)).expect(0).losses()
    for row in metrics.load_rows(run):
        assert row["loss"] == pytest.approx(expected[row["step"]][0], rel=1e-4), row["step"]


def stop_after_rollback() -> None:
    """Setup: request a stop when the run reaches step 14 for the second time."""
    from clustertrain.train.session.step_loop import StepLoop
    from tests.ranks.rank_pool import touch_stop_at

    faulty_data.bad_samples(BAD, 50.0)
    original = StepLoop._roll_back

    def roll_back(self: StepLoop, *args: Any) -> None:
        original(self, *args)
        touch_stop_at(self._step + 2)

    StepLoop._roll_back = roll_back  # type: ignore[method-assign]


def test_repeated_rollbacks_end_run(tmp_path: Path) -> None:
    tables = {"stability": {"on_divergence": "roll-back", "max_skipped": 1, "max_roll_backs": 2}}
    run = make_spike_run(tmp_path / "run", SINGLE, steps=9, every=2, tables=tables)
    # The step after each rollback is bad again.
    ranks = Ranks(run, 1, setup=faulty_data.poison_gradients, args=(0, range(4, 99))).expect(78)
    assert [e["to_step"] for e in ranks.events("rolled_back")] == [2, 2]
    assert "has rolled back 2 times" in ranks.results()[0]["error"]["message"]
    assert [r.count for r in rollback.read_records(run.checkpoints)] == [1, 2]
    assert [c["step"] for c in inspect.list_checkpoints(run.checkpoints)] == [2]


@pytest.mark.parametrize(
    ("layout", "optim"),
    [
        (FSDP, {"clip": "value", "clip_value": 0.001}),
        (FSDP_PP, {"clip": "adaptive", "clip_quantile": 0.5}),
        (FSDP_TP, {"clip": "adaptive", "clip_quantile": 0.5}),
    ],
    ids=lambda value: value.describe() if isinstance(value, Layout) else value["clip"],
)
def test_clipping_matches_one_process(tmp_path: Path, layout: Layout, optim: dict[str, Any]) -> None:
    def rows(name: str, layout: Layout) -> list[dict[str, Any]]:
        run = make_spike_run(tmp_path / name, layout, steps=22, every=50, micro_batch=4, tables={"optim": optim})
        return Ranks(run, layout.world_size).expect(0).rows()

    actual, expected = rows("actual", layout), rows("expected", SINGLE)
    assert {r["clipped"] for r in expected[16:]} == ({1} if optim["clip"] == "value" else {0, 1})
    for row, expected_row in zip(actual, expected, strict=True):
        assert row["loss"] == pytest.approx(expected_row["loss"], rel=1e-5), row["step"]
        assert row["grad_norm"] == pytest.approx(expected_row["grad_norm"], rel=1e-4), row["step"]
        assert row["clipped"] == expected_row["clipped"], row["step"]


@pytest.mark.parametrize("layout", [DDP, ZERO1, FSDP, FSDP_TP, FSDP_PP], ids=Layout.describe)
def test_layer_figures_are_independent_of_layout(tmp_path: Path, layout: Layout) -> None:
    def figures(name: str, layout: Layout) -> dict[str, float]:
        run = make_spike_run(tmp_path / name, layout, steps=2, every=50, tables={"stability": {"layer_stats_every": 2}})
        rows = Ranks(run, layout.world_size).expect(0).rows()
        assert not any("/" in key for key in rows[0])
        return {k: v for k, v in rows[1].items() if "/" in k}

    actual, expected = figures("actual", layout), figures("expected", SINGLE)
    units = ["embed", "head", "layers.0", "layers.1", "norm"]
    columns = ("grad_norm", "weight_norm", "update_ratio", "activation")
    assert sorted(expected) == sorted(f"{column}/{unit}" for column in columns for unit in units)
    assert actual == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(
    ("layout", "micro_batch"),
    [
        (Layout(strategy="ddp", dp_replicate=2), 8),  # one micro-batch per step
        (Layout(strategy="zero1", dp_replicate=2), 4),
        (Layout(strategy="fsdp", dp_shard=2), 4),
    ],
    ids=lambda value: value.describe() if isinstance(value, Layout) else str(value),
)
def test_noise_scale_and_momentum_cycle_under_each_layout(tmp_path: Path, layout: Layout, micro_batch: int) -> None:
    steps = 20
    run = make_run(
        tmp_path / "run",
        layout,
        2,
        steps=steps,
        every=steps,
        micro_batch=micro_batch,
        model={"entry": "tests.ranks.known_noise:Quadratic"},
        data={"kind": "custom", "entry": "tests.ranks.known_noise:Samples"},
        tables={
            "objective": {"kind": "mse"},
            "optim": {"name": "sgd", "lr": 1e-9},
            "schedule": {"kind": "one-cycle"},
            "stability": {"noise_scale_every": 2},
        },
    )
    rows = Ranks(run, 2).expect(0).rows()
    assert [r["step"] for r in rows if "noise_scale" in r] == list(range(2, steps + 1, 2))
    assert rows[-1]["noise_scale"] == pytest.approx(known_noise.NOISE_SCALE, rel=0.15)
    # A measurement does not change the gradient: it reduces that of the whole batch in another order.
    norms = [r["grad_norm"] for r in rows]
    assert max(norms) < 1.1 * min(norms)
    assert [rows[i]["momentum"] for i in (0, 5, steps - 1)] == pytest.approx([0.95, 0.85, 0.95])
