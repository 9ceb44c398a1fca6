"""Programs that nobody here wrote, as their registry has them: preempted once, they resume with the same losses."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from clustertrain.run import attempts
from clustertrain.run.run_dir import RunDir
from tests import runs
from tests.paths import ROOT
from tests.runs import LOCAL, Run

pytestmark = pytest.mark.ranks
# Those that the test environment lacks. The others, such as torch, are in it.
PACKAGES = (
    "trl==1.16.0", "datasets==5.2.0", "pandas==3.1.1", "dill==0.4.1", "multiprocess==0.70.19",
    "litgpt==0.5.13", "jsonargparse==4.41.0", "docstring-parser==0.18.0", "typeshed-client==2.15.0",
)  # fmt: skip
STEPS = 200
PREEMPT = ("--set", "preemption_test.preempt_at_steps=[4]")


@pytest.fixture(scope="module")
def env(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a user who has installed these programs."""
    folder = tmp_path_factory.mktemp("packages")
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--retries=1")
    done = subprocess.run([*pip, "--target", folder, *PACKAGES], text=True, capture_output=True, check=False)
    if done.returncode:
        reason = f"the package registry does not answer: {done.stderr[-500:]}"
        if os.environ.get("CLUSTERTRAIN_REQUIRE_SLURM") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    variables = {k: v for k, v in os.environ.items() if not k.startswith(("CLUSTERTRAIN_", "SLURM_"))}
    path = [str(folder), *filter(None, [variables.get("PYTHONPATH")])]
    variables |= {"PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    variables["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), variables["PATH"]))
    return variables | {"HF_HOME": str(tmp_path_factory.mktemp("huggingface")), "TOKENIZERS_PARALLELISM": "false"}


@pytest.fixture(scope="module")
def models(env: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    script = ROOT / "tests" / "fixtures" / "tiny_models.py"
    subprocess.run([sys.executable, script, folder], env=env, check=True, capture_output=True)
    return folder


class Program:
    """A published program in a folder of its own."""

    def __init__(self, env: dict[str, str], folder: Path) -> None:
        self.env = env | {"CLUSTERTRAIN_HOME": str(folder / "home")}
        self.folder = folder
        self.submitted: list[Run] = []

    def submit(self, module: str, *arguments: str) -> Run:
        self.submitted.append(runs.submit(self.env, *LOCAL, "--gpus", "1", *PREEMPT, "-m", module, *arguments))
        return self.submitted[-1]

    def run_alone(self, module: str, *arguments: str) -> None:
        argv = [sys.executable, "-m", module, *arguments]
        done = subprocess.run(argv, env=self.env, cwd=self.folder, text=True, capture_output=True, check=False)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.fixture
def program(env: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Program]:
    monkeypatch.chdir(tmp_path)
    program = Program(env, tmp_path)
    yield program
    for run in program.submitted:
        run.cancel_if_active()
        run.wait_until_final()


def test_trl_has_the_losses_of_an_uninterrupted_run(program: Program, models: Path, tmp_path: Path) -> None:
    arguments = (
        "--model_name_or_path", str(models / "llama"), "--dataset_name", str(models / "text"),
        "--max_steps", str(STEPS), "--per_device_train_batch_size", "4", "--max_length", "32",
        "--learning_rate", "1e-2", "--logging_steps", "1", "--save_steps", "1000",
        "--use_cpu", "True", "--bf16", "False", "--gradient_checkpointing", "False", "--report_to", "none",
    )  # fmt: skip
    run = program.submit("trl.scripts.sft", *arguments, "--output_dir", str(tmp_path / "out"))
    run.complete()
    assert run.endings() == ["preempted", "completed"], run.explain()
    first, second = attempts.load_attempts(RunDir(run.path))
    assert 0 < first.last_step < STEPS
    assert (first.committed_step, second.restored_step, second.first_step) == (
        first.last_step, first.last_step, first.last_step + 1,
    )  # fmt: skip
    program.run_alone("trl.scripts.sft", *arguments, "--output_dir", str(tmp_path / "whole"))
    losses = read_losses_of_trainer(tmp_path / "out")
    assert len(losses) == STEPS
    assert losses == read_losses_of_trainer(tmp_path / "whole")


def read_losses_of_trainer(out: Path) -> dict[int, float]:
    state = json.loads((out / f"checkpoint-{STEPS}" / "trainer_state.json").read_text())
    return {row["step"]: row["loss"] for row in state["log_history"] if "loss" in row}


def test_litgpt_repeats_the_steps_after_its_checkpoint(program: Program, models: Path, tmp_path: Path) -> None:
    """SIGTERM ends it, and it continues from the newest checkpoint that it has saved."""
    arguments = (
        "finetune_full", str(models / "gpt"), "--out_dir", str(tmp_path / "out"), "--resume", "auto",
        "--data", "JSON", "--data.json_path", str(models / "instructions.json"), "--data.val_split_fraction", "0.1",
        "--data.num_workers", "0", "--precision", "32-true", "--train.save_interval", "20", "--train.epochs", "100",
        "--train.max_steps", str(STEPS), "--train.global_batch_size", "4", "--train.micro_batch_size", "4",
        "--train.lr_warmup_steps", "1", "--eval.interval", "100000", "--eval.final_validation", "false",
    )  # fmt: skip
    run = program.submit("litgpt", *arguments)
    run.complete()
    assert run.endings() == ["preempted", "completed"], run.explain()
    first, second = attempts.load_attempts(RunDir(run.path))
    saved = int(second.restored_step)
    assert first.committed_step == saved
    assert saved % 20 == 0 < saved <= first.last_step < STEPS
    before, after = (read_losses_of_litgpt(tmp_path / "out", version) for version in (0, 1))
    assert list(after) == list(range(saved + 1, STEPS + 1))
    repeated = [step for step in before if step > saved]
    assert [after[step] for step in repeated] == [before[step] for step in repeated]


def read_losses_of_litgpt(out: Path, version: int) -> dict[int, str]:
    with (out / "logs" / "csv" / f"version_{version}" / "metrics.csv").open() as file:
        return {int(row["step"]): row["loss"] for row in csv.DictReader(file)}
