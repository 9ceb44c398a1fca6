"""A loop of a program's own with Accelerate's ``Accelerator``."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import clustertrain as ct
from tests.unit.integrations.test_callbacks import STEPS, STOP_STEP, Attempts, attempts

__all__ = ["attempts"]


def build_loop(seed: int) -> tuple[Any, Any]:
    """Return an Accelerator and a function that trains one step and returns the loss."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    torch.manual_seed(seed)
    model = torch.nn.Linear(8, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))

    def train(step: int) -> float:
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return accelerator, train


def test_loop_over_epochs_saves_at_the_agreed_step_and_resumes(attempts: Attempts) -> None:
    accelerator, train = build_loop(0)
    whole = [train(step) for step in range(STEPS)]
    attempts.begin(1, stop_step=STOP_STEP)
    accelerator, train = build_loop(0)
    job = ct.integrations.accelerate.attach(accelerator)
    assert job.resume() == 0
    losses = []
    while not job.should_stop:
        losses.append(train(job.step))
        job.end_step()
    with pytest.raises(SystemExit) as ended:  # a loop that goes on
        job.end_step()
    assert (job.step, ended.value.code) == (STOP_STEP, 75)
    attempts.begin(2)
    accelerator, train = build_loop(1)  # other weights than those that are loaded
    job = ct.integrations.accelerate.attach(accelerator, every=100)
    losses += [train(step) for step in job.steps(STEPS)]
    assert losses == whole
    assert attempts.read_events(1) == [("first_step", 1), ("stop_agreed", STOP_STEP), ("checkpoint", STOP_STEP)]
    assert attempts.read_events(2) == [("restored", STOP_STEP), ("first_step", STOP_STEP + 1), ("checkpoint", STEPS)]


def test_accelerator_that_names_checkpoints_itself_is_refused(tmp_path: Path) -> None:
    from accelerate.utils import ProjectConfiguration

    configuration = ProjectConfiguration(project_dir=str(tmp_path), automatic_checkpoint_naming=True)
    with pytest.raises(ValueError, match="automatic_checkpoint_naming of the ProjectConfiguration must be False"):
        ct.integrations.accelerate.attach(SimpleNamespace(project_configuration=configuration))
