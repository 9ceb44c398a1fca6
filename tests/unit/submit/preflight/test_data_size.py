"""The number of training samples before submission, for keys in epochs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from clustertrain.errors import ConfigError
from clustertrain.submit.prepare import prepare
from clustertrain.submit.prepared_run import PreparedRun
from clustertrain.submit.request import SubmitRequest
from clustertrain.train.data.datasets import build_datasets
from clustertrain.train.data.sample_checks import Limits
from clustertrain.train.data.tokenize import write

pytestmark = [pytest.mark.usefixtures("fake_slurm"), pytest.mark.long]


def prepare_run(cwd: Path, *assignments: str, target: str = "") -> PreparedRun:
    return prepare(SubmitRequest(target=target, cwd=cwd, assignments=("train.global_batch=8", *assignments)))


@pytest.mark.parametrize("validation", ["0.0", "0.13"])
def test_count_of_tokens_and_text_is_that_of_the_dataset(tmp_path: Path, validation: str) -> None:
    write(tmp_path / "shards", [np.arange(997)], dtype="uint16")
    (tmp_path / "a.txt").write_text("abc" * 300)
    for data in (("data.kind=tokens", "data.path=shards", "model.vocab_size=1000"), ("data.path=a.txt",)):
        keys = (*data, "data.seq_len=16", f"data.validation={validation}", "train.epochs=3")
        recipe = prepare_run(tmp_path, *keys).spec.recipe
        assert recipe.data.samples == len(build_datasets(recipe, Limits()).train)
        assert recipe.train.steps == -(-3 * recipe.data.samples // 8)


def test_plan_shows_the_steps_and_their_source(tmp_path: Path) -> None:
    plan = prepare_run(tmp_path, "data.samples=100", "train.epochs=2").plan
    assert plan.training["epochs"] == "100 samples / 8 per step = 12.5 steps; train.epochs = 2: 25"
    assert plan.training["schedule"].startswith("cosine over 25 steps")


def test_global_batch_of_the_plan_counts(tmp_path: Path) -> None:
    request = SubmitRequest(cwd=tmp_path, assignments=("data.samples=6400", "train.epochs=1"), job={"gpus": 64})
    prepared = prepare(request)
    assert prepared.spec.recipe.train.steps == 6400 / prepared.plan.batch.global_batch == 100


def test_samples_of_an_entry_are_counted_in_a_process(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from pathlib import Path\n\n\n"
        "class Data:\n    def __len__(self):\n        return 41\n\n"
        "    def __getitem__(self, i):\n        return i\n\n\n"
        "def make():\n    print('hello')\n    with Path(__file__).with_name('calls').open('a') as f:\n"
        "        f.write('.')\n    return Data()\n\n\ndef fail():\n    raise OSError('no disk')\n"
    )
    custom = ("data.kind=custom", "train.epochs=2")
    for lr in (0.1, 0.2):  # as in a sweep
        assert prepare_run(tmp_path, *custom, "data.entry=mine:make", f"optim.lr={lr}").spec.recipe.train.steps == 11
    assert (tmp_path / "calls").read_text() == "."
    with pytest.raises(ConfigError, match="the samples cannot be counted: OSError: no disk") as caught:
        prepare_run(tmp_path, *custom, "data.entry=mine:fail")
    assert "data.samples" in caught.value.fix


def test_data_that_only_the_nodes_have_needs_a_number(tmp_path: Path) -> None:
    keys = ("data.kind=tokens", "data.path=elsewhere", "train.epochs=2")
    with pytest.raises(ConfigError, match=r"train.epochs: data.path = .*does not exist on this machine") as caught:
        prepare_run(tmp_path, *keys)
    assert "set data.samples" in caught.value.fix
    assert prepare_run(tmp_path, *keys, "data.samples=80").spec.recipe.train.steps == 20


def test_set_wins_over_the_file(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("[train]\nsteps = 7\n[data]\nsamples = 80\n[schedule]\nwarmup_epochs = 0.1\n")
    recipe = prepare_run(tmp_path, "train.epochs=2", "schedule.warmup_steps=3", target="a.toml").spec.recipe
    assert (recipe.train.steps, recipe.schedule.warmup_steps, recipe.schedule.warmup_epochs) == (20, 3, None)


def test_steps_after_the_last_are_still_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"ends after the last step \(train.steps = 20\)"):
        prepare_run(tmp_path, "data.samples=80", "train.epochs=2", "train.profile=10:21")
