"""Merging profile, recipe, --set and options; everything that is refused before anything is made."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clustertrain.errors import ConfigError, UsageError
from clustertrain.launch.request import Prepared, SubmitRequest, prepare
from tests.fake_slurm.fixture import FakeSlurm

EXAMPLES = Path(__file__).parents[3] / "examples"

Prepare = Callable[..., Prepared]


@pytest.fixture
def profile(tmp_path: Path, fake_slurm: FakeSlurm) -> Path:
    folder = tmp_path / "config" / "clustertrain" / "clusters"
    folder.mkdir(parents=True)
    (folder / "site.toml").write_text(
        'partition = "from-profile"\naccount = "from-profile"\ntime = "60"\ngpu_type = "h100"\ncpus_per_gpu = 4\n'
        '[env]\nA = "profile"\nB = "profile"\nC = "profile"\n[sbatch]\ncomment = "profile"\nmail-type = "END"\n'
    )
    return folder / "site.toml"


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(
        '[train]\nsteps = 7\nglobal_batch = 8\n[job]\ncluster = "site"\naccount = "from-recipe"\nqos = "from-recipe"\n'
        '[job.sbatch]\ncomment = "recipe"\n[env]\nB = "recipe"\nC = "recipe"\n'
    )
    return path


@pytest.fixture
def ask(tmp_path: Path, fake_slurm: FakeSlurm) -> Prepare:
    def ask(target: str = "", **more: Any) -> Prepared:
        return prepare(SubmitRequest(target=target, cwd=tmp_path, **more))

    return ask


def test_options_win_over_the_recipe_and_that_over_the_profile(ask: Prepare, profile: Path, recipe: Path) -> None:
    made = ask("small.toml", job={"qos": "from-option", "sbatch": {"nice": "5"}}, env={"C": "option"})
    job = made.spec.job
    assert (job.partition, job.account, job.qos) == ("from-profile", "from-recipe", "from-option")
    assert (job.time, job.gpu_type, job.cpus_per_gpu) == ("60", "h100", 4)
    assert job.sbatch == {"comment": "recipe", "mail-type": "END", "nice": "5"}
    assert made.spec.env == {"A": "profile", "B": "recipe", "C": "option"}
    assert made.spec.recipe.train.steps == 7 and job.name == "small"
    assert (job.backend, job.device, made.plan.device) == ("slurm", "cuda", "cuda")


def test_the_profile_of_the_option_or_the_environment(
    ask: Prepare, profile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ask().spec.job.partition == ""
    assert ask(job={"cluster": "site"}).spec.job.partition == "from-profile"
    monkeypatch.setenv("CLUSTERTRAIN_CLUSTER", "site")
    assert ask().spec.job.partition == "from-profile"
    with pytest.raises(ConfigError, match="did you mean site"):
        ask(job={"cluster": "sito"})


def test_set_changes_the_recipe_and_yields_to_options(ask: Prepare, recipe: Path, profile: Path) -> None:
    made = ask("small.toml", assignments=("train.steps=9", "job.qos=x", "optim.lr=1e-3"), job={"qos": "y"})
    assert (made.spec.recipe.train.steps, made.spec.recipe.optim.lr, made.spec.job.qos) == (9, 1e-3, "y")


@pytest.mark.parametrize(
    ("assignment", "words"),
    [
        ("train.stpes=9", "did you mean steps"),
        ("trian.steps=9", "did you mean train"),
        ("jobs.time=9", "did you mean job"),
        ("train.steps=-1", "train: steps = -1: must be greater than 0"),
        ("train.steps=x", "train.steps"),
        ("train.steps", "not of the form"),
        ("job.nodes=0", "nodes = 0: must be greater than 0"),
    ],
)
def test_a_bad_set_is_named(assignment: str, words: str, ask: Prepare) -> None:
    with pytest.raises(ConfigError) as e:
        ask(assignments=(assignment,))
    assert words in str(e.value) and e.value.exit_code == 78


def test_nothing_trains_the_default_preset(ask: Prepare) -> None:
    made = ask()
    assert made.spec.script is None and made.spec.job.name == "default"


def test_a_script_keeps_its_arguments_and_folder(ask: Prepare, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    made = ask("train.py", args=("--nodes", "3", "$(x)"))
    script = made.spec.script
    assert script is not None and script.args == ("--nodes", "3", "$(x)") and script.cwd == str(tmp_path)
    assert made.spec.job.name == "train" and made.plan.batch.global_batch == 0


@pytest.mark.parametrize("target", ["missing.py", "missing.toml", "home-folder"])
def test_a_target_that_is_no_file_is_refused_at_submit(target: str, ask: Prepare, tmp_path: Path) -> None:
    (tmp_path / "home-folder").mkdir()
    with pytest.raises(UsageError, match=target) as e:
        ask(target)
    assert e.value.exit_code == 2


def test_a_recipe_takes_no_arguments(ask: Prepare, recipe: Path, profile: Path) -> None:
    with pytest.raises(UsageError, match="--nodes 2"):
        ask("small.toml", args=("--nodes", "2"))


def test_a_broken_recipe_is_named(ask: Prepare, tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text("[train\n")
    with pytest.raises(ConfigError, match=r"bad\.toml: not valid TOML"):
        ask("bad.toml")


@pytest.mark.parametrize("limit", ["1 day", "1:2:3:4", "x"])
def test_a_bad_time_limit_is_refused_at_submit(limit: str, ask: Prepare) -> None:
    with pytest.raises(UsageError, match="time limit"):
        ask(job={"time": limit})


def test_rehearsed_preemptions_are_for_the_local_backend(ask: Prepare) -> None:
    with pytest.raises(ConfigError, match="--backend local"):
        ask(assignments=("rehearsal.preempt_at_steps=[5]",))
    made = ask(assignments=("rehearsal.preempt_at_steps=[5]",), job={"backend": "local", "device": "cpu"})
    assert made.spec.recipe.rehearsal.preempt_at_steps == (5,)


def test_bad_environment_names_are_refused_before_anything_is_made(ask: Prepare, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="A-B"):
        ask(env={"A-B": "x"})
    assert not (tmp_path / "home").exists()


def test_names_of_the_submitting_environment_are_the_users(ask: Prepare, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "TORCH_FR_BUFFER_SIZE" in ask(job={"gpus": 2}).plan.nccl
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "0")
    assert "TORCH_FR_BUFFER_SIZE" not in ask(job={"gpus": 2}).plan.nccl


def test_the_checkpoint_folder_becomes_absolute(ask: Prepare, tmp_path: Path) -> None:
    assert ask(job={"checkpoint_dir": "big"}).spec.job.checkpoint_dir == str(tmp_path / "big")
    assert ask().spec.job.checkpoint_dir == ""


@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("*.toml")), ids=lambda p: p.stem)
def test_every_example_has_a_plan(example: Path, fake_slurm: FakeSlurm) -> None:
    prepared = prepare(SubmitRequest(target=str(example), cwd=EXAMPLES))
    assert prepared.plan.batch.global_batch > 0


@pytest.mark.parametrize(
    "more",
    [
        {"env": {"V": "caf\udce9"}},
        {"job": {"account": "caf\udce9"}},
        {"job": {"sbatch": {"comment": "caf\udce9"}}},
        {"target": "train.py", "args": ("caf\udce9",)},
    ],
)
def test_what_is_not_utf8_is_refused_in_words(ask: Prepare, tmp_path: Path, more: dict[str, Any]) -> None:
    """Python stands a surrogate for each byte of an argument that is not UTF-8 (PEP 383)."""
    (tmp_path / "train.py").write_text("")
    with pytest.raises(UsageError, match=r"'caf\\udce9' is not UTF-8"):
        ask(**more)
