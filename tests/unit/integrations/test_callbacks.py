"""The callbacks for Trainers and the loop for Accelerate, with the real frameworks in one process.

Each test is rank 0 of two attempts: the first one is told to stop, the second one continues.
"""

from __future__ import annotations

import json
import logging
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import clustertrain as ct

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
hooks_progress: Any = ct.import_hooks("progress")
hooks_checkpoints: Any = ct.import_hooks("checkpoints")
STOP_STEP, STEPS = 5, 9


class Samples(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        x = torch.randn(8, generator=torch.Generator().manual_seed(index))
        return {"x": x, "labels": x.sum().view(1)}


class Attempts:
    """Makes this process rank 0 of an attempt."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.run, self._folder, self._monkeypatch = folder / "run", folder, monkeypatch

    def begin(self, number: int, *, stop_step: int | None = None) -> None:
        rank_dir = self._folder / f"ranks-{number}"
        (self.run / "attempts" / str(number)).mkdir(parents=True)
        rank_dir.mkdir()
        if stop_step is not None:
            proposal = {"id": 1, "step": stop_step, "is_agreed": True}
            (rank_dir / "stop-step.json").write_text(json.dumps(proposal))
        values = {"RANK": 0, "WORLD_SIZE": 1, "CLUSTERTRAIN_ATTEMPT": number}
        values |= {"CLUSTERTRAIN_RUN_DIR": self.run, "CLUSTERTRAIN_RANK_DIR": rank_dir}
        for name, value in values.items():
            self._monkeypatch.setenv(name, str(value))
        hooks_progress._progress = None
        hooks_checkpoints._trainings.clear()

    def read_events(self, number: int) -> list[tuple[str, int]]:
        """Return the names and steps of the events of an attempt."""
        path = self.run / "attempts" / str(number) / "events" / "hooks-rank-0.jsonl"
        return [(event["event"], event["step"]) for event in map(json.loads, path.read_text().splitlines())]

    def read_steps(self, number: int) -> list[int]:
        lines = (self.run / "metrics" / f"attempt-{number}.jsonl").read_text().splitlines()
        return [json.loads(line)["step"] for line in lines]


@pytest.fixture
def attempts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Attempts]:
    handler = signal.getsignal(signal.SIGTERM)
    yield Attempts(tmp_path, monkeypatch)
    signal.signal(signal.SIGTERM, handler)
    hooks_progress._progress = None
    hooks_checkpoints._trainings.clear()


def build_transformers(folder: Path, is_hooked: bool) -> tuple[Any, Callable[[], Any]]:
    """Return a callback, and a function that trains with it and returns the steps that are done."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(8, 1)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            outputs = self.layer(x)
            return {"loss": ((outputs - labels) ** 2).mean(), "logits": outputs}

    class HookedTrainer(Trainer):  # type: ignore[misc,unused-ignore]
        pass

    if is_hooked:
        module = SimpleNamespace(Trainer=HookedTrainer, TrainerCallback=TrainerCallback)
        ct.import_hooks("transformers_trainer").install(module)
    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=STEPS, per_device_train_batch_size=4, save_steps=4, save_total_limit=1,
        save_only_model=True, eval_strategy="steps", eval_steps=STOP_STEP, use_cpu=True, report_to="none",
        disable_tqdm=True,
    )  # fmt: skip
    callback = ct.integrations.transformers.Callback()
    trainer = HookedTrainer(
        model=Model(), args=arguments, train_dataset=Samples(), eval_dataset=Samples(), callbacks=[callback]
    )

    def train() -> int:
        trainer.train(resume_from_checkpoint=callback.find_checkpoint())
        return int(trainer.state.global_step)

    return callback, train


def build_lightning(folder: Path, is_hooked: bool, package: str = "lightning") -> tuple[Any, Callable[[], Any]]:
    """As ``build_transformers``, for Lightning."""
    if package == "lightning":
        import lightning.pytorch as pl
    else:
        import pytorch_lightning as pl  # type: ignore[no-redef]
    logging.getLogger(pl.__name__).setLevel(logging.ERROR)

    class Model(pl.LightningModule):  # type: ignore[misc,unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(8, 1)

        def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
            return ((self.layer(batch["x"]) - batch["labels"]) ** 2).mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    class HookedTrainer(pl.Trainer):  # type: ignore[misc,unused-ignore]
        pass

    if is_hooked:
        module = SimpleNamespace(Trainer=HookedTrainer, __name__=f"{pl.__name__}.trainer.trainer")
        ct.import_hooks("lightning_trainer").install(module)
    callback = getattr(ct.integrations, package).Callback()
    trainer = HookedTrainer(
        accelerator="cpu", devices=1, max_steps=STEPS, default_root_dir=str(folder), enable_progress_bar=False,
        logger=False, enable_checkpointing=False, enable_model_summary=False, callbacks=[callback],
    )  # fmt: skip

    def fit() -> int:
        loader = torch.utils.data.DataLoader(Samples(), batch_size=4)
        trainer.fit(Model(), loader, ckpt_path=callback.find_checkpoint(), weights_only=False)
        return int(trainer.global_step)

    return callback, fit


def build_pytorch_lightning(folder: Path, is_hooked: bool) -> tuple[Any, Callable[[], Any]]:
    return build_lightning(folder, is_hooked, "pytorch_lightning")


@pytest.mark.long
@pytest.mark.parametrize(
    ("build", "is_hooked"),
    [
        (build_transformers, False),
        (build_transformers, True),
        (build_lightning, False),
        (build_lightning, True),
        (build_pytorch_lightning, False),
    ],
)
def test_callback_stops_saves_and_resumes_once(
    tmp_path: Path, attempts: Attempts, build: Callable[..., Any], is_hooked: bool
) -> None:
    """The Trainer of transformers would save only the model after step 4, and evaluate before it saves at the stop."""
    for number, stop_step in ((1, STOP_STEP), (2, STOP_STEP + 2)):
        attempts.begin(number, stop_step=stop_step)
        with pytest.raises(SystemExit):
            build(tmp_path / "out", is_hooked)[1]()
        assert attempts.read_events(number)[-2:] == [("stop_agreed", stop_step), ("checkpoint", stop_step)]
        assert "evaluation" not in dict(attempts.read_events(number))
    attempts.begin(3)
    assert build(tmp_path / "out", is_hooked)[1]() == STEPS
    for number, step in ((2, STOP_STEP), (3, STOP_STEP + 2)):
        assert attempts.read_events(number)[:2] == [("restored", step), ("first_step", step + 1)]
    steps = [step for number in (1, 2, 3) for step in dict.fromkeys(attempts.read_steps(number))]
    assert steps == list(range(1, STEPS + 1))
    of_stops = attempts.run / "program-checkpoints" / "lightning"  # the older one is removed
    assert not of_stops.exists() or [p.name for p in of_stops.iterdir()] == [f"step-{STOP_STEP + 2}.ckpt"]


@pytest.mark.long
@pytest.mark.parametrize("build", [build_transformers, build_lightning])
def test_callback_does_nothing_outside_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, build: Callable[..., Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    handler = signal.getsignal(signal.SIGTERM)
    callback, train = build(tmp_path / "out", False)
    assert (callback.find_checkpoint(), train()) == (None, STEPS)
    assert signal.getsignal(signal.SIGTERM) is handler
    assert {path.name for path in tmp_path.iterdir()} <= {"out"}
