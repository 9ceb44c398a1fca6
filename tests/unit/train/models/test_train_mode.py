"""Modules that train in evaluation mode."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch import nn

import clustertrain as ct
from clustertrain.config.parsing.documents import build
from clustertrain.config.recipe import Recipe
from clustertrain.train.models import train_mode
from clustertrain.train.models.build import build_task
from clustertrain.train.stability import warnings


class Finetuned(nn.Module):
    """A head on a backbone that a library returned in evaluation mode, as ``from_pretrained`` does."""

    def __init__(self, *, frozen: bool = False) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).eval()
        self.head = nn.Linear(4, 4)
        if frozen:
            self.backbone.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.backbone(x))
        return out


def test_find_eval_mode_modules_ignores_frozen_ones() -> None:
    assert train_mode.find_eval_mode_modules(Finetuned()) == ["backbone"]
    assert train_mode.find_eval_mode_modules(Finetuned(frozen=True)) == []
    assert train_mode.find_eval_mode_modules(Finetuned().eval()) == [""]
    model = Finetuned()
    assert train_mode.set_train_mode(model) == ["backbone"]
    assert all(m.training for m in model.modules())
    frozen = Finetuned(frozen=True)
    assert train_mode.set_train_mode(frozen) == [] and not frozen.backbone.training


@pytest.mark.parametrize(("mode", "warned"), [("unchanged", True), ("train()", False)])
def test_script_is_warned_in_the_first_training_step(mode: str, warned: bool, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), ct.session(device="cpu") as session:
        model = session.parallelize(Finetuned())
        with torch.no_grad():
            model(torch.zeros(1, 4))  # evaluation before the first step does not count as training
        assert not caplog.messages
        if mode == "train()":
            model.train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in session.steps(total=3, state={"model": model, "optimizer": optimizer}):
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
    messages = [m for m in caplog.messages if "evaluation mode" in m]
    assert len(messages) == warned
    if warned:
        assert "step 1: backbone was in evaluation mode in a training step" in messages[0]
        assert "call model.train()" in messages[0]


@pytest.mark.long
def test_trainer_switches_an_entry_to_training_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "entry_in_eval_mode.py").write_text(
        "from torch import nn\ndef model(): return nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).eval()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    recipe = build(
        {"model": {"entry": "entry_in_eval_mode:model"}, "data": {"kind": "images", "path": "digits", "image_size": 8}},
        Recipe,
        "recipe.toml",
    )
    task = build_task(recipe)
    assert task.left_eval_mode == [""] and task.model.training
    text = warnings.build_eval_mode_warning(task.left_eval_mode, switched=True).text
    assert text == "the model was in evaluation mode with parameters to train, and is now in training mode"


def test_warning_agrees_with_the_number_of_modules() -> None:
    text = warnings.build_eval_mode_warning(["backbone", "neck"], switched=True).text
    assert text == "backbone, neck were in evaluation mode with parameters to train, and are now in training mode"
