"""``clustertrain diagnose`` on a sound recipe and on recipes with one fault each."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from clustertrain import clock
from clustertrain.diagnose.registry import CHECKS
from tests.documents import check_document
from tests.runs import CLI, DEVICE, INTERRUPTIBLE

pytestmark = pytest.mark.ranks
RECIPES = Path(__file__).parents[1] / "fixtures" / "broken"
ENTRY = (
    '[model]\nentry = "{module}:{name}"\n[data]\nkind = "custom"\nentry = "sound:Clouds"\n[train]\nglobal_batch = 8\n'
)


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """Yield a short path: it becomes TMPDIR, where data workers create sockets."""
    with tempfile.TemporaryDirectory(prefix="diagnose-") as folder:
        yield Path(folder)


def environment(folder: Path) -> dict[str, str]:
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("CLUSTERTRAIN_", "SLURM_"))}
    (folder / "tmp").mkdir(exist_ok=True)
    home, tmp = str(folder / "home"), str(folder / "tmp")
    return {**environ, "CLUSTERTRAIN_HOME": home, "TMPDIR": tmp, "OMP_NUM_THREADS": "1", "COLUMNS": "80"}


def run_diagnose(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*CLI, "diagnose", *args], cwd=folder, env=environment(folder), text=True, capture_output=True, check=False,
        timeout=300,
    )  # fmt: skip


def call_json(folder: Path, *args: str) -> dict[str, Any]:
    result = run_diagnose(folder, *args, "--json")
    report: dict[str, Any] = check_document("diagnose", result.stdout)
    assert result.returncode == (1 if report["verdict"] == "fail" else 0), result.stderr
    return report


def left_no_files(folder: Path) -> bool:
    """Return whether the command left no files; torch keeps a cache for the next process."""
    remaining = [p.name for p in (folder / "tmp").iterdir() if not p.name.startswith("torchinductor_")]
    return not remaining and not (folder / "home").exists()


def test_sound_recipe_passes_all_checks(tmp_path: Path) -> None:
    report = call_json(tmp_path, "all", str(RECIPES / "sound.toml"))
    name = {"cpu": "cpu", "cuda": "NVIDIA H100 80GB HBM3"}[DEVICE]
    assert report["device"] == name and [c["check"] for c in report["checks"]] == list(CHECKS)
    verdicts = {c["check"]: c["verdict"] for c in report["checks"]}
    verdicts.pop("speed")  # depends on the load of the machine
    assert [verdicts.pop(check) for check in ("pretrained", "adapter")] == ["skipped", "skipped"]  # it has neither
    assert set(verdicts.values()) == {"pass"}, report
    evidence = {c["check"]: c["evidence"] for c in report["checks"]}
    assert evidence["resume"]["resumed_from_step"] == 3 < evidence["resume"]["killed_after_step"]
    assert evidence["resume"]["compared_steps"][:3] == [4, 5, 6] and evidence["resume"]["state_equal"]
    assert sum(evidence["speed"]["parts_s"].values()) > 0 and set(evidence["speed"]["samples_per_s_read"]) == set(
        "0124"
    )
    assert left_no_files(tmp_path)


@pytest.mark.parametrize(
    ("recipe", "check", "message"),
    [
        ("shifted_labels", "data", "labels do not belong to their samples"),
        ("rate_too_high", "lr-range", "times too high"),
        ("dead_units", "layers", "relu after second are dead"),
        ("forgotten_eval", "modes", "in eval mode after a step"),
        ("wrong_gradient", "gradients", "in the backward pass of scaled (Scale)"),
    ],
)
def test_broken_recipe_fails_its_check(tmp_path: Path, recipe: str, check: str, message: str) -> None:
    [result] = call_json(tmp_path, check, str(RECIPES / f"{recipe}.toml"))["checks"]
    assert (result["check"], result["verdict"]) == (check, "fail") and message in result["text"]
    assert result["fix"] and result["evidence"]


def test_plot_writes_page_and_creates_no_run(tmp_path: Path) -> None:
    result = run_diagnose(
        tmp_path, "overfit", str(RECIPES / "sound.toml"), "--plot", "curves.html", "--set", "optim.lr=0.005"
    )
    assert result.returncode == 0 and "lr 0.005" in result.stdout and "│•" in result.stdout, result.stderr
    assert all(len(line) <= 80 for line in result.stdout.splitlines())
    page = (tmp_path / "curves.html").read_text()
    assert "<polyline" in page and "overfit: 8 samples" in page
    assert left_no_files(tmp_path)


MODULE = """
import torch
from sound import Clouds, Perceptron

class Empty(Clouds):
    def __init__(self):
        super().__init__(0)

class Raises(Perceptron):
    def __init__(self):
        raise ValueError("no weights here")

class RaisesInForward(Perceptron):
    def forward(self, points):
        raise ValueError("no such shape")

class Remembers(Perceptron):
    calls = 0

    def forward(self, points):
        self.calls += 1  # in no checkpoint
        return super().forward(points) * (1 + self.calls / 100)

class Noisy(Perceptron):
    def __init__(self):
        super().__init__()
        self.spare = torch.nn.Linear(2, 2)

    def forward(self, points):
        return super().forward(torch.nn.functional.dropout(points, 0.5))

class Exits(Perceptron):
    def __init__(self):
        import os
        os._exit(3)
"""


@pytest.fixture
def module_folder(tmp_path: Path) -> Path:
    (tmp_path / "custom_parts.py").write_text(MODULE)
    (tmp_path / "sound.py").write_text((RECIPES / "sound.py").read_text())
    return tmp_path


@pytest.mark.parametrize(
    ("name", "code", "message"),
    [("Raises", 78, "no weights here"), ("Exits", 1, "exit code 3"), ("Missing", 78, "Missing"),
     ("RaisesInForward", 1, "raised ValueError: no such shape")],
)  # fmt: skip
def test_model_that_raises_is_reported_in_one_line(module_folder: Path, name: str, code: int, message: str) -> None:
    (module_folder / "recipe.toml").write_text(ENTRY.format(module="custom_parts", name=name))
    result = run_diagnose(module_folder, "init-loss", "recipe.toml")
    output = " ".join((result.stdout + result.stderr).split())
    assert result.returncode == code and message in output and "Traceback" not in output
    assert left_no_files(module_folder)


def test_state_missing_from_checkpoint_fails_resume_check(module_folder: Path) -> None:
    (module_folder / "recipe.toml").write_text(ENTRY.format(module="custom_parts", name="Remembers"))
    [check] = call_json(module_folder, "resume", "recipe.toml")["checks"]
    assert check["verdict"] == "fail" and "loss of step 4" in check["text"]
    assert check["evidence"]["reproducible"] is True


def test_noisy_evaluation_and_unused_parameters(module_folder: Path) -> None:
    (module_folder / "recipe.toml").write_text(ENTRY.format(module="custom_parts", name="Noisy"))
    [check] = call_json(module_folder, "modes", "recipe.toml")["checks"]
    assert check["verdict"] == "fail" and "different outputs" in check["text"]
    assert check["evidence"]["unused"] == ["spare.weight", "spare.bias"]


def test_empty_data_is_reported_before_any_check(module_folder: Path) -> None:
    text = ENTRY.format(module="sound", name="Perceptron").replace("sound:Clouds", "custom_parts:Empty")
    (module_folder / "recipe.toml").write_text(text)
    result = run_diagnose(module_folder, "all", "recipe.toml")
    assert result.returncode == 78 and "is empty" in result.stderr and not result.stdout


def test_ctrl_c_ends_all_child_processes(tmp_path: Path) -> None:
    child = subprocess.Popen(
        [*INTERRUPTIBLE, sys.executable, "-m", "clustertrain", "diagnose", "resume", str(RECIPES / "sound.toml")],
        cwd=tmp_path, env=environment(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    process, children = psutil.Process(child.pid), list[psutil.Process]()

    def rank_runs() -> bool:
        children[:] = process.children(recursive=True)
        return len(children) >= 2

    assert clock.wait_until(rank_runs, 120)
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=60)
    assert child.returncode == 130, err
    assert not [p for p in children if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    assert left_no_files(tmp_path)
