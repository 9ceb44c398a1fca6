"""The metrics row of a step, and the samples of a bad step."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from clustertrain import fsio
from clustertrain.config.job import RunSpec
from clustertrain.config.recipe import Recipe
from clustertrain.config.stability import StabilitySpec
from clustertrain.config.train import TrainSpec
from clustertrain.run.run_dir import RunDir
from clustertrain.train.core.step_types import StepResult
from clustertrain.train.data.loader import Loader
from clustertrain.train.optim.lr_schedule import unscaled_lr
from clustertrain.train.session.heartbeat import ProgressReporter
from clustertrain.train.session.recorder import MetricsProcessor
from clustertrain.train.stability.monitor import StabilityMonitor
from clustertrain.train.stability.step_guard import StepGuard
from clustertrain.train.stability.warnings import WarningReporter
from tests.unit.train.single_process import ALONE

MODEL = nn.Linear(2, 2)


class Files:
    def __len__(self) -> int:
        return 40

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        return torch.tensor([float(i)]), i

    def where(self, i: int) -> str:
        return f"{i}.png"


def step_result(loss: float = 1.0, micro_batch: int = -1, **more: Any) -> StepResult:
    finite = math.isfinite(loss)
    values = {
        "loss": loss, "grad_norm": 2.0, "skipped": not finite, "clipped": True, "clip_fraction": 0.5, "finite": finite,
        "spike": False, **more,
    }  # fmt: skip
    bad = [1, micro_batch, micro_batch**2] if micro_batch >= 0 else [0, 0, 0]
    overflow = values.pop("overflow", False)
    tensors: dict[str, Any] = {name: torch.tensor(value) for name, value in values.items()}
    return StepResult(**tensors, bad=(*map(torch.tensor, bad),), overflow=overflow)  # type: ignore[arg-type]


class RecorderHarness:
    """Recorder of data-parallel rank 0 of two, with one loader."""

    def __init__(self, folder: Path) -> None:
        run = RunDir(folder)
        run.attempt(1).path.mkdir(parents=True)
        spec = RunSpec(recipe=Recipe(train=TrainSpec(log_every=2)))
        context = dataclasses.replace(ALONE, run=run, attempt=run.attempt(1), spec=spec)
        self.events: list[dict[str, Any]] = []
        warnings = WarningReporter(StabilitySpec(), lambda name, **fields: self.events.append(fields))
        values: dict[str, Any] = {"global_batch": 8, "micro_batch": 2, "workers": 0, "seed": 1, "rank": 0, "ranks": 2}
        self.data = Loader(Files(), device=ALONE.device, **values)
        self.recorder = MetricsProcessor(context, ProgressReporter(None, 0, 2, lambda: 0.0), [self.data], warnings)
        self.recorder.monitor = StabilityMonitor(MODEL, StepGuard(StabilitySpec(), ALONE.device), context)
        self.recorder.monitor.track_loaders({"data": self.data})
        self.optimizer = torch.optim.SGD(MODEL.parameters(), lr=0.25)
        self._path = run.metrics_path(1)

    def rows(self, *steps: StepResult, tokens: int = 64) -> list[dict[str, Any]]:
        for step, result in enumerate(steps):
            self.recorder.begin_step(step)
            next(self.data)
            self.recorder.record_step(result, unscaled_lr(self.optimizer))
            self.recorder.end_step(step + 1, tokens)
        self.recorder.writer.close()
        return list(fsio.read_jsonl(self._path))


def test_row_has_signals_of_its_step(tmp_path: Path) -> None:
    first, second = RecorderHarness(tmp_path / "run").rows(step_result(1.0), step_result(3.0))
    assert {k: first[k] for k in ("loss", "lr", "grad_norm", "clipped", "clip_fraction", "skipped", "spike")} == {
        "loss": 1.0, "lr": 0.25, "grad_norm": 2.0, "clipped": 1, "clip_fraction": 0.5, "skipped": 0, "spike": 0,
    }  # fmt: skip
    assert first["tokens_per_s"] == pytest.approx(64 / first["step_s"])
    assert 0 < first["data_wait_s"] <= first["step_s"]
    assert "rss_gib" not in first and second["rss_gib"] > 0  # every log_every steps
    assert not any(name.startswith("_") or name == "bad_samples" for name in first)
    (images, _) = RecorderHarness(tmp_path / "images").rows(step_result(), step_result(), tokens=0)
    assert images["samples_per_s"] == pytest.approx(8 / images["step_s"])


def test_bad_step_names_its_samples(tmp_path: Path) -> None:
    harness = RecorderHarness(tmp_path / "run")
    rows = harness.rows(
        step_result(),
        step_result(math.nan, 3),
        step_result(math.inf),
        step_result(9.0, spike=True),
        step_result(2.0, skipped=True, overflow=True),
    )
    bad_samples = [row.get("bad_samples", "") for row in rows]
    assert bad_samples[0] == bad_samples[4] == ""
    assert (
        bad_samples[1].startswith("micro-batch 1 of data-parallel rank 1, epoch 0: sample ")
        and ".png" in bad_samples[1]
    )
    for i in (2, 3):
        assert bad_samples[i] == harness.data.describe_batch(8 * i) and bad_samples[i].startswith(
            "the global batch, epoch 0: sample "
        )
    assert [e["code"] for e in harness.events] == ["non_finite", "loss_spike"]
    assert bad_samples[1] in harness.events[0]["text"] and bad_samples[3] in harness.events[1]["text"]


def test_bad_samples_are_unknown_without_loader_in_state(tmp_path: Path) -> None:
    harness = RecorderHarness(tmp_path / "run")
    assert harness.recorder.monitor is not None
    harness.recorder.monitor.track_loaders({})
    (row,) = harness.rows(step_result(math.nan, 0))
    assert "bad_samples" not in row and [e["code"] for e in harness.events] == ["non_finite"]


def test_rollback_drops_values_of_current_step(tmp_path: Path) -> None:
    recorder = (harness := RecorderHarness(tmp_path / "run")).recorder
    recorder.begin_step(0)
    recorder.record_step(step_result(), unscaled_lr(harness.optimizer))
    recorder.log({"validation_loss": 0.5})
    recorder.end_step(1, 64)
    recorder.writer.flush(wait=True)
    assert recorder.has_logged("validation_loss") and recorder.writer.latest["validation_loss"] == 0.5
    recorder.on_rollback()
    assert not recorder.has_logged("validation_loss") and recorder.writer.latest == {}
    recorder.writer.close()


def test_rank_0_prints_rows_to_stderr_outside_run(capsys: pytest.CaptureFixture[str]) -> None:
    """The first row is printed immediately, so that a script does not seem to hang, then every tenth."""
    for rank in (0, 1):
        recorder = MetricsProcessor(
            dataclasses.replace(ALONE, rank=rank),
            ProgressReporter(None, rank, 2, lambda: 0.0),
            [],
            WarningReporter(StabilitySpec(), lambda name, **fields: None),
        )
        for step in range(20):
            recorder.begin_step(step)
            recorder.log({"loss": torch.tensor(0.5 + rank), "note": "warm"})
            recorder.end_step(step + 1, 0)
        recorder.writer.close()
        captured = capsys.readouterr()
        assert not captured.out
        steps = [line.partition("step ")[2].split()[0] for line in captured.err.splitlines()]
        assert steps == ([] if rank else ["1", "10", "20"])
        assert all("  loss 0.5  " in line and "  note warm" in line for line in captured.err.splitlines())
