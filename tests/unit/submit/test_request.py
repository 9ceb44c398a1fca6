"""Merging of profile, recipe, --set and options, and requests that are refused before anything is created."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clustertrain.errors import ConfigError, UsageError
from clustertrain.submit.prepare import prepare
from clustertrain.submit.prepared_run import PreparedRun
from clustertrain.submit.request import SubmitRequest
from tests.fakes.slurm.fixture import FakeSlurm
from tests.paths import ROOT

EXAMPLES = ROOT / "examples"

Prepare = Callable[..., PreparedRun]


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
def prepare_request(tmp_path: Path, fake_slurm: FakeSlurm) -> Prepare:
    def prepare_request(target: str = "", **options: Any) -> PreparedRun:
        return prepare(SubmitRequest(target=target, cwd=tmp_path, **options))

    return prepare_request


def test_options_win_over_recipe_over_profile(prepare_request: Prepare, profile: Path, recipe: Path) -> None:
    run = prepare_request("small.toml", job={"qos": "from-option", "sbatch": {"nice": "5"}}, env={"C": "option"})
    job = run.spec.job
    assert (job.partition, job.account, job.qos) == ("from-profile", "from-recipe", "from-option")
    assert (job.time, job.gpu_type, job.cpus_per_gpu) == ("60", "h100", 4)
    assert job.sbatch == {"comment": "recipe", "mail-type": "END", "nice": "5"}
    assert run.spec.env == {"A": "profile", "B": "recipe", "C": "option"}
    assert run.spec.recipe.train.steps == 7 and job.name == "small"
    assert (job.backend, job.device, run.plan.device) == ("slurm", "cuda", "cuda")


def test_profile_from_option_or_environment(
    prepare_request: Prepare, profile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert prepare_request().spec.job.partition == ""
    assert prepare_request(job={"cluster": "site"}).spec.job.partition == "from-profile"
    monkeypatch.setenv("CLUSTERTRAIN_CLUSTER", "site")
    assert prepare_request().spec.job.partition == "from-profile"
    with pytest.raises(ConfigError, match="did you mean site"):
        prepare_request(job={"cluster": "sito"})


def test_set_wins_over_recipe_and_yields_to_options(prepare_request: Prepare, recipe: Path, profile: Path) -> None:
    run = prepare_request("small.toml", assignments=("train.steps=9", "job.qos=x", "optim.lr=1e-3"), job={"qos": "y"})
    assert (run.spec.recipe.train.steps, run.spec.recipe.optim.lr, run.spec.job.qos) == (9, 1e-3, "y")


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("train.stpes=9", "did you mean train.steps"),
        ("trian.steps=9", "did you mean train"),
        ("jobs.time=9", "did you mean job"),
        ("train.steps=-2", "--set: train.steps = -2: must be greater than 0"),
        ("train.steps=x", "train.steps"),
        ("train.steps", "not of the form"),
        ("job.nodes=0", "nodes = 0: must be greater than 0"),
        ("schedule.gamma=0.5", 'schedule.gamma has no effect with schedule.kind = "cosine"'),
    ],
)
def test_bad_set_is_named(assignment: str, message: str, prepare_request: Prepare) -> None:
    with pytest.raises(ConfigError) as e:
        prepare_request(assignments=(assignment,))
    assert message in str(e.value) and e.value.exit_code == 78


RECIPE = "[data]\nvalidation = 0.1\n[evaluation]\nevery = 5\n[optim]\nbetas = [0.9, 0.98]\n[schedule]\nfloor = 0.2\n"


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("data.validation=0", "evaluation.every has no effect with no validation data"),
        ("optim.name=sgd", 'optim.betas has no effect with optim.name = "sgd"'),
        ("schedule.kind=constant", 'schedule.floor has no effect with schedule.kind = "constant"'),
    ],
)
def test_override_may_disable_file_key(assignment: str, message: str, prepare_request: Prepare, tmp_path: Path) -> None:
    (tmp_path / "kept.toml").write_text(RECIPE)
    plan = prepare_request("kept.toml", assignments=(assignment,)).plan
    assert message in plan.warnings and message in plan.reasons
    assert message not in prepare_request("kept.toml").plan.warnings


def test_unused_key_is_refused(prepare_request: Prepare, tmp_path: Path) -> None:
    (tmp_path / "idle.toml").write_text("[schedule]\ngamma = 0.5\n")
    for assignments in ((), ("schedule.kind=linear",)):
        with pytest.raises(ConfigError, match=r"^idle\.toml: schedule\.gamma has no effect"):
            prepare_request("idle.toml", assignments=assignments)
    assert prepare_request("idle.toml", assignments=("schedule.kind=step",)).plan.warnings == ()
    (tmp_path / "kept.toml").write_text(RECIPE)
    with pytest.raises(ConfigError, match=r"^--set: optim\.betas has no effect"):
        prepare_request("kept.toml", assignments=("optim.name=sgd", "optim.betas=[0.9, 0.95]"))


def test_file_that_is_valid_only_with_set(prepare_request: Prepare, tmp_path: Path) -> None:
    (tmp_path / "half.toml").write_text("[schedule]\nkind = 'plateau'\npatience = 2\n")
    run = prepare_request("half.toml", assignments=("schedule.kind=cosine",))
    assert run.plan.warnings == ('schedule.patience has no effect with schedule.kind = "cosine"',)


def test_patience_beyond_run_end_warns(prepare_request: Prepare) -> None:
    assignments = ("data.validation=0.1", "evaluation.every=40", "train.steps=100")
    message = "evaluation.patience = 3 never ends the run, which has 3 evaluations, the last at its end"
    assert message in prepare_request(assignments=(*assignments, "evaluation.patience=3")).plan.warnings
    assert prepare_request(assignments=(*assignments, "evaluation.patience=2")).plan.warnings == ()
    assignments = (*assignments, "schedule.kind=plateau")
    message = "evaluation 3 is the first that can, but the run has 3 evaluations, the last at its end"
    (note,) = prepare_request(assignments=(*assignments, "schedule.patience=1")).plan.warnings
    assert note == f"schedule.patience = 1 never lowers the rate: {message}"
    assert prepare_request(assignments=(*assignments, "schedule.patience=1", "evaluation.every=30")).plan.warnings == ()


def test_empty_target_is_default_preset(prepare_request: Prepare) -> None:
    run = prepare_request()
    assert run.spec.script is None and run.spec.job.name == "default"


def test_script_keeps_arguments_and_folder(prepare_request: Prepare, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import clustertrain")
    run = prepare_request("train.py", args=("--nodes", "3", "$(x)"))
    script = run.spec.script
    assert script is not None and script.args == ("--nodes", "3", "$(x)") and script.cwd == str(tmp_path)
    assert run.spec.job.name == "train" and run.plan.batch.global_batch == 0


@pytest.mark.parametrize(
    "assignment",
    [
        "optim.lr=1e-3",
        "schedule.kind=linear",
        "train.steps=9",
        "train.micro_batch=2",
        "data.workers=4",
        "checkpoint.every=5",
        "optim={lr = 1e-3}",
    ],
)
def test_trainer_key_for_script_is_refused(assignment: str, prepare_request: Prepare, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    key = "optim.lr" if "lr" in assignment else assignment.partition("=")[0]
    with pytest.raises(ConfigError, match=rf"{key} has no effect on train\.py") as e:
        prepare_request("train.py", assignments=(assignment,))
    assert "as an argument after train.py" in e.value.fix and "--grid env.NAME" in e.value.fix
    with pytest.raises(ConfigError, match="has no effect on train"):
        prepare_request("train.py", sweep_values={key: 1})


def test_env_values_are_text(prepare_request: Prepare, tmp_path: Path) -> None:
    run = prepare_request(assignments=("env.LR=1e-3", "env.N=007", "env.ON=true", "env.Q='a'"))
    assert run.spec.env == {"LR": "1e-3", "N": "007", "ON": "true", "Q": "a"}


def test_script_takes_session_keys(prepare_request: Prepare, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    assignments = ("train.seed=2", "checkpoint.keep=5", "stability.spike=skip", "parallel.compile=true", "env.A=b")
    # A script evaluates by itself, so its metrics are unknown here.
    recipe = prepare_request("train.py", assignments=(*assignments, "contract.metric=validation_f1")).spec.recipe
    assert (recipe.train.seed, recipe.checkpoint.keep, recipe.deciding_metric) == (2, 5, "validation_f1")
    with pytest.raises(ConfigError, match=r"did you mean train\.seed"):
        prepare_request("train.py", assignments=("train.sed=2",))
    with pytest.raises(ConfigError, match=r"set data\.validation"):
        prepare_request(assignments=("contract.metric=validation_f1",))


@pytest.mark.parametrize("target", ["missing.py", "missing.toml", "home-folder"])
def test_target_that_is_not_a_file_is_refused(target: str, prepare_request: Prepare, tmp_path: Path) -> None:
    (tmp_path / "home-folder").mkdir()
    with pytest.raises(UsageError, match=target) as e:
        prepare_request(target)
    assert e.value.exit_code == 2


def test_recipe_with_arguments_is_refused(prepare_request: Prepare, recipe: Path, profile: Path) -> None:
    with pytest.raises(UsageError, match="--nodes 2"):
        prepare_request("small.toml", args=("--nodes", "2"))


def test_broken_recipe_is_named(prepare_request: Prepare, tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text("[train\n")
    with pytest.raises(ConfigError, match=r"bad\.toml: not valid TOML"):
        prepare_request("bad.toml")


@pytest.mark.parametrize("limit", ["1 day", "1:2:3:4", "x"])
def test_bad_time_limit_is_refused(limit: str, prepare_request: Prepare) -> None:
    with pytest.raises(UsageError, match="time limit"):
        prepare_request(job={"time": limit})


def test_preemption_test_needs_local_backend(prepare_request: Prepare) -> None:
    with pytest.raises(ConfigError, match="--backend local"):
        prepare_request(assignments=("preemption_test.preempt_at_steps=[5]",))
    local = {"backend": "local", "device": "cpu"}
    run = prepare_request(assignments=("preemption_test.preempt_at_steps=[5]",), job=local)
    assert run.spec.recipe.preemption_test.preempt_at_steps == (5,)
    with pytest.raises(ConfigError, match=r"step 200 is never reached"):
        prepare_request(assignments=("preemption_test.preempt_at_steps=[5, 200]",), job=local)
    (note,) = (
        w for w in prepare_request(assignments=("preemption_test.grace_s=3",)).plan.warnings if "preemption_test" in w
    )
    assert "preemption_test.grace_s has no effect on Slurm" in note
    assert not any(
        "preemption_test" in w
        for w in prepare_request(assignments=("preemption_test.grace_s=3",), job=local).plan.warnings
    )


def test_profiled_steps_after_last_step_are_refused(prepare_request: Prepare, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'7:9' starts after the last step \(train\.steps = 7\)"):
        prepare_request(assignments=("train.steps=7", 'train.profile="7:9"'))
    with pytest.raises(ConfigError, match=r"'5:9' ends after the last step \(train\.steps = 7\)") as e:
        prepare_request(assignments=("train.steps=7", 'train.profile="5:9"'))
    assert e.value.fix == "profile steps up to 7, as --profile steps=0:7"
    assert prepare_request(assignments=("train.steps=7", 'train.profile="5:7"')).spec.recipe.profiled_steps == range(
        5, 7
    )
    (tmp_path / "train.py").write_text("import clustertrain")  # a script has its own number of steps
    assert prepare_request("train.py", assignments=('train.profile="700:900"',)).spec.script is not None


@pytest.mark.parametrize(
    ("path", "convnet", "message", "fix"),
    [
        ("digits", "", "data.path = 'digits' and model.convnet: the images have channels 1, not 3", "channels = 1"),
        ("digits", "channels = 1\nclasses = 4", "have classes 10, not 4", "set model.convnet.classes = 10"),
        ("shapes", "channels = 1", "data.path = 'shapes' and .* channels 3, not 1", "set model.convnet.channels = 3"),
        ("", "classes = 2", "data.path = '' and .* classes 10, not 2", "classes = 10"),
    ],
)
def test_convnet_for_other_images_is_refused(
    path: str, convnet: str, message: str, fix: str, prepare_request: Prepare, tmp_path: Path
) -> None:
    (tmp_path / "net.toml").write_text(
        f'[data]\npath = "{path}"\n[model]\nkind = "convnet"\n[model.convnet]\n{convnet}'
    )
    with pytest.raises(ConfigError, match=message) as e:
        prepare_request("net.toml")
    assert fix in str(e.value.fix)


def test_more_classes_than_images_have_are_allowed(prepare_request: Prepare, tmp_path: Path) -> None:
    (tmp_path / "net.toml").write_text('[model]\nkind = "convnet"\n[model.convnet]\nclasses = 12\n')
    assert prepare_request("net.toml").spec.recipe.model.convnet.classes == 12


def test_unknown_url_protocol_is_refused_also_by_plan(prepare_request: Prepare) -> None:
    with pytest.raises(ConfigError, match="fsspec does not know the protocol foo://"):
        prepare_request(assignments=("checkpoint.remote=foo://x",))


@pytest.mark.parametrize("package", ["s3fs", "fsspec"])
def test_plan_does_not_need_remote_package(
    prepare_request: Prepare, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    assert (
        prepare_request(assignments=("checkpoint.remote=s3://bucket/x",)).spec.recipe.checkpoint.remote
        == "s3://bucket/x"
    )


def test_bad_environment_name_is_refused(prepare_request: Prepare, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="A-B"):
        prepare_request(env={"A-B": "x"})
    assert not (tmp_path / "home").exists()


def test_submitting_environment_wins_over_plan(prepare_request: Prepare, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "TORCH_FR_BUFFER_SIZE" in prepare_request(job={"gpus": 2}).plan.nccl
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "0")
    assert "TORCH_FR_BUFFER_SIZE" not in prepare_request(job={"gpus": 2}).plan.nccl


def test_checkpoint_dir_becomes_absolute(prepare_request: Prepare, tmp_path: Path) -> None:
    assert prepare_request(job={"checkpoint_dir": "big"}).spec.job.checkpoint_dir == str(tmp_path / "big")
    assert prepare_request().spec.job.checkpoint_dir == ""


# adapt.toml needs the export of another run: see preflight/test_adapter.py.
@pytest.mark.parametrize(
    "example", sorted(set(EXAMPLES.glob("*.toml")) - {EXAMPLES / "adapt.toml"}), ids=lambda p: p.stem
)
def test_all_examples_can_be_planned(example: Path, fake_slurm: FakeSlurm) -> None:
    prepared = prepare(SubmitRequest(target=str(example), cwd=EXAMPLES))
    assert prepared.plan.batch.global_batch > 0


@pytest.mark.parametrize(
    "options",
    [
        {"env": {"V": "caf\udce9"}},
        {"job": {"account": "caf\udce9"}},
        {"job": {"sbatch": {"comment": "caf\udce9"}}},
        {"target": "train.py", "args": ("caf\udce9",)},
    ],
)
def test_non_utf8_values_are_refused(prepare_request: Prepare, tmp_path: Path, options: dict[str, Any]) -> None:
    """Python represents bytes of an argument that are not UTF-8 as surrogates (PEP 383)."""
    (tmp_path / "train.py").write_text("")
    with pytest.raises(UsageError, match=r"'caf\\udce9' is not UTF-8"):
        prepare_request(**options)


def test_preset_is_planned_as_trained(prepare_request: Prepare) -> None:
    run = prepare_request(assignments=("model.preset=llama3.1-8b",), job={"nodes": 4, "gpus": 8, "gpu_type": "h100"})
    assert run.spec.recipe.data.seq_len == 8192 and run.plan.batch.global_batch == 128
    assert run.plan.time.mfu is not None and run.plan.time.mfu > 0.3
    assert any(r == "data.seq_len 8192: the context of preset llama3.1-8b" for r in run.plan.reasons)
    assert any("train.global_batch is not set: 128 or more, for preset llama3.1-8b" in r for r in run.plan.reasons)


@pytest.mark.parametrize(("gpus", "batch"), [(3, 129), (8, 128)])
def test_preset_batch_divides_over_ranks(prepare_request: Prepare, gpus: int, batch: int) -> None:
    run = prepare_request(
        assignments=("model.preset=llama3.2-1b",), job={"gpus": gpus, "gpu_type": "h100", "layout": "fsdp"}
    )
    assert run.plan.batch.global_batch == batch


def test_recipe_length_and_batch_win_over_preset(prepare_request: Prepare) -> None:
    overrides = ("model.preset=llama3.1-8b", "data.seq_len=256", "train.global_batch=32")
    run = prepare_request(assignments=overrides, job={"nodes": 4, "gpus": 8, "gpu_type": "h100"})
    assert (run.spec.recipe.data.seq_len, run.plan.batch.global_batch) == (256, 32)
    assert not any("preset" in reason for reason in run.plan.reasons)
