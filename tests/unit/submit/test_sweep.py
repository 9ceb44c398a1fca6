"""sweep --grid: its values, sweeps that are refused before anything is created, and the array of runs."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clustertrain.errors import ClusterTrainError, ConfigError, SchedulerError, UsageError
from clustertrain.run import events
from clustertrain.run.lookup import resolve_runs
from clustertrain.run.run_dir import RunDir
from clustertrain.run.run_spec import load_spec
from clustertrain.submit import sweep as sweeps
from clustertrain.submit.request import SubmitRequest
from clustertrain.submit.sweep import SubmittedSweep, dry_run_sweep, expand_grid, format_values, submit_sweep
from tests.fakes.slurm.fixture import FakeSlurm

pytestmark = pytest.mark.long

Sweep = Callable[..., SubmittedSweep]
SIX = ("env.LR=1e-4,3e-4,1e-3", "train.seed=1,2")


@pytest.fixture
def sweep(fake_slurm: FakeSlurm, tmp_path: Path) -> Sweep:
    def sweep(*grid: str, at_once: int | None = None, target: str = "", **more: Any) -> SubmittedSweep:
        return submit_sweep(SubmitRequest(target=target, cwd=tmp_path, **more), grid, at_once)

    return sweep


def leftovers(tmp_path: Path) -> list[Path]:
    return [path for kind in ("runs", "sweeps", "local") for path in (tmp_path / "home" / kind).glob("*")]


@pytest.mark.parametrize(
    ("grid", "values"),
    [
        (["seed=1,2"], [{"seed": 1}, {"seed": 2}]),
        (["seed=7"], [{"seed": 7}]),
        (["a.b=1e-4, adam, true"], [{"a.b": 1e-4}, {"a.b": "adam"}, {"a.b": True}]),
        (['name=["a,b", "c"]'], [{"name": "a,b"}, {"name": "c"}]),
        (["steps=[[1, 2], [3]]"], [{"steps": [1, 2]}, {"steps": [3]}]),
        (['qos=["", "high"]'], [{"qos": ""}, {"qos": "high"}]),
        (["lr=log:1e-5:1e-2:4"], [{"lr": lr} for lr in (1e-5, 1e-4, 1e-3, 1e-2)]),
        (["lr=log:3e-3:1e-4:3"], [{"lr": lr} for lr in (3e-3, 5.477e-4, 1e-4)]),
        (["train.steps=log:10:1000:4"], [{"train.steps": n} for n in (10, 46, 215, 1000)]),
        (["train.steps=log:1:2:4"], [{"train.steps": 1}, {"train.steps": 2}]),
        (["env.LR=1e-4, x"], [{"env.LR": "1e-4"}, {"env.LR": "x"}]),
        (["env.LR=log:1e-4:1e-2:2"], [{"env.LR": "0.0001"}, {"env.LR": "0.01"}]),
        (["a=1,2", "b=x,y"], [{"a": a, "b": b} for a in (1, 2) for b in ("x", "y")]),
    ],
)
def test_grid_is_product_of_all_values(grid: list[str], values: list[dict[str, Any]]) -> None:
    assert expand_grid(grid, ()) == values


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        (["seed="], "an empty value"),
        (["seed=1,,2"], "an empty value"),
        (["seed=1,2,"], "an empty value"),
        (["seed=[]"], "no value"),
        (["seed"], "--grid 'seed': not of the form"),
        (["seed=[1"], "not a list in TOML"),
        (["lr=log:0:1:3"], "not of the form log:FIRST:LAST:COUNT"),
        (["lr=log:1e-4:1e-2"], "not of the form log:FIRST:LAST:COUNT"),
        (["lr=log:1e-4:1e-2:1"], "not of the form log:FIRST:LAST:COUNT"),
        (["lr=log:a:b:3"], "not of the form log:FIRST:LAST:COUNT"),
        (["lr=log:1e-3:1e-3:3"], "0.001 is given twice"),
        (["lr=1e-4,0.0001"], "0.0001 is given twice"),
        (["seed=1,2", "seed=3"], "seed is given twice"),
        (["data.seed=1,2"], "data.seed is given twice"),
        (["a=" + ",".join(map(str, range(50))), "b=" + ",".join(map(str, range(21)))], "50 x 21 = 1050 runs"),
    ],
)
def test_bad_grid_values_are_named(grid: list[str], message: str) -> None:
    with pytest.raises((UsageError, ConfigError)) as e:
        expand_grid(grid, ["data.seed=3"])
    assert message in str(e.value)


def test_thousand_runs_are_allowed() -> None:
    assert len(expand_grid(["a=" + ",".join(map(str, range(100))), "b=0,1,2,3,4,5,6,7,8,9"], ())) == 1000


def test_values_are_formatted_as_typed() -> None:
    assert format_values({"optim.lr": 1e-4, "name": "x", "on": True, "steps": [1, 2]}) == (
        "optim.lr=0.0001 name=x on=true steps=[1, 2]"
    )


def test_runs_are_ordinary_and_array_is_one_job(sweep: Sweep, fake_slurm: FakeSlurm, tmp_path: Path) -> None:
    submitted_sweep = sweep("optim.lr=1e-4,3e-4", "train.steps=5,6", at_once=3, job={"name": "lr", "time": "30"})
    (call,) = fake_slurm.calls("sbatch")
    assert call.argv[:-1] == ["--parsable", f"--chdir={submitted_sweep.folder}"]
    assert call.script == (submitted_sweep.folder / "job.sh").read_text()
    directives = [line.removeprefix("#SBATCH --") for line in call.script.splitlines() if line.startswith("#SBATCH")]
    assert directives[:2] == ["array=0-3%3", f"job-name={submitted_sweep.folder.name}"]
    assert directives[-2:] == ["open-mode=append", "output=%a/job.log"] and "time=30" in directives
    assert (submitted_sweep.job_id, submitted_sweep.backend) == ("4711", "slurm")
    assert [values for _, values in submitted_sweep.runs] == [
        {"optim.lr": lr, "train.steps": steps} for lr in (1e-4, 3e-4) for steps in (5, 6)
    ]
    for n, (submitted, values) in enumerate(submitted_sweep.runs):
        run = submitted.run
        assert submitted.job_id == f"4711_{n}" and (submitted_sweep.folder / str(n)).resolve() == run.path
        spec = load_spec(run)
        assert (spec.recipe.optim.lr, spec.recipe.train.steps) == tuple(values.values())
        script = run.job_script.read_text()
        assert (
            f"#SBATCH --job-name={run.id}\n" in script
            and "#SBATCH --output=job.log\n" in script
            and "--array" not in script
        )
        assert json.loads(run.record.read_text())["sweep"] == {"id": submitted_sweep.folder.name, "values": values}
        assert [e["job_id"] for e in events.for_run(run)] == [f"4711_{n}"] and run.checkpoints.is_dir()
    assert [p.name for p in sorted(submitted_sweep.folder.iterdir())] == ["0", "1", "2", "3", "job.sh"]
    assert stat.S_IMODE(submitted_sweep.folder.stat().st_mode) == 0o700


def test_array_without_at_once_has_no_limit(sweep: Sweep, fake_slurm: FakeSlurm) -> None:
    sweep("train.seed=1,2")
    assert "#SBATCH --array=0-1\n" in fake_slurm.calls("sbatch")[0].script


def test_script_is_copied_once_per_sweep(sweep: Sweep, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print(1)\n")
    submitted_sweep = sweep("env.LR=1e-4,3e-4", target="train.py", job={"share": True})
    for submitted, values in submitted_sweep.runs:
        run = submitted.run
        assert run.code.readlink() == Path("../../sweeps", submitted_sweep.folder.name, "code")
        assert (run.code / "train.py").read_text() == "print(1)\n"
        assert f"export LR={values['env.LR']}\n" in run.job_script.read_text()
    assert stat.S_IMODE(submitted_sweep.folder.stat().st_mode) == 0o750


@pytest.mark.parametrize(
    ("grid", "more", "message"),
    [
        (["train.stpes=1,2"], {}, "with train.stpes=1: --set: unknown key 'train.stpes'"),
        (["train.steps=5,-2"], {}, "with train.steps=-2: "),
        (
            ["optim.name=lion,adamw"],
            {"assignments": ("optim.momentum=0.8",)},
            'in every run of the sweep: optim.momentum has no effect with optim.name = "lion"',
        ),
        (["train.seed=1,2"], {"assignments": ("train.seed=3",)}, "train.seed is given twice"),
        (["train.seed=1,2"], {"target": "missing.py"}, "missing.py: no such file"),
        (["train.global_batch=16,12"], {"job": {"gpus": 8}}, "with train.global_batch=12: "),
        (["job.nodes=1,2"], {}, "differ in --nodes (1 and 2), and the tasks of an array share"),
        (["job.time=1:00:00,2:00:00"], {}, "differ in --time"),
        (["job.max_requeues=0,3"], {}, "differ in --no-requeue (present and absent)"),
        (["job.partition=a,b"], {"job": {"partition": "c"}}, "give the same run"),
        (["job.backend=slurm,local"], {"job": {"device": "cpu"}}, "differ in --backend (slurm and local)"),
    ],
)
def test_refused_sweep_creates_nothing(
    grid: list[str], more: dict[str, Any], message: str, sweep: Sweep, fake_slurm: FakeSlurm, tmp_path: Path
) -> None:
    with pytest.raises((UsageError, ConfigError)) as e:
        sweep(*grid, **more)
    assert message in str(e.value)
    assert leftovers(tmp_path) == [] and fake_slurm.calls("sbatch") == []


def test_key_unused_by_some_runs_is_noted_once(sweep: Sweep, tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text("[schedule]\nfloor = 0.2\n")
    grid = ("optim.name=sgd,adamw", "schedule.kind=cosine,constant", "optim.momentum=0.8")
    submitted_sweep = sweep(*grid, target="small.toml", assignments=("optim.betas=[0.9, 0.98]",))
    assert [note for note in submitted_sweep.notes if "no effect" in note] == [
        'optim.betas has no effect with optim.name = "sgd"',
        'schedule.floor has no effect with schedule.kind = "constant"',
        'optim.momentum has no effect with optim.name = "adamw"',
    ]


def test_error_of_file_does_not_name_grid_values(sweep: Sweep, tmp_path: Path) -> None:
    (tmp_path / "odd.toml").write_text("[model")
    (tmp_path / "key.toml").write_text("[train]\nstpes = 3\n")
    (tmp_path / "data.toml").write_text('[data]\npath = "empty"\n')
    (tmp_path / "empty").mkdir()
    for target in ("missing.toml", "odd.toml", "key.toml", "data.toml"):
        with pytest.raises((UsageError, ConfigError)) as e:
            sweep("train.seed=1,2", target=target)
        assert "with train.seed" not in str(e.value)
        assert target in str(e.value) or target == "data.toml"
    with pytest.raises(ConfigError, match=r"^--set: unknown key 'train\.stpes'"):
        sweep("train.seed=1,2", assignments=("train.stpes=3",))


def test_refusal_or_interrupt_leaves_nothing(
    sweep: Sweep, fake_slurm: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text("")
    fake_slurm.answers("sbatch", stderr="sbatch: error: Batch job submission failed: Invalid job array\n", rc=1)
    with pytest.raises(SchedulerError, match="Invalid job array"):
        sweep(*SIX, target="train.py", job={"checkpoint_dir": str(tmp_path / "big")})
    assert leftovers(tmp_path) == [] and list((tmp_path / "big").iterdir()) == []

    write, written = sweeps.transaction.write, []

    def write_and_interrupt(*args: Any) -> None:
        write(*args)
        written.append(args)
        if len(written) == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(sweeps.transaction, "write", write_and_interrupt)
    with pytest.raises(KeyboardInterrupt):
        sweep(*SIX)
    assert len(written) == 4 and leftovers(tmp_path) == []

    (tmp_path / "large.py").write_text("x" * (2 * 1024 * 1024))
    with pytest.raises(ConfigError):
        sweep(*SIX, target="large.py", snapshot_limit_mib=1)
    assert leftovers(tmp_path) == []


def test_scheduler_is_queried_once_per_sweep(
    sweep: Sweep, fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    queries: list[str] = []
    monkeypatch.setattr(
        "clustertrain.scheduler.slurm.SlurmBackend.sbatch_version", lambda _: queries.append("x") or "22.05"
    )
    sweep(*SIX)
    assert len(queries) == 1 and len(fake_slurm.calls("scontrol")) == 1


def test_array_script_runs_script_of_task(sweep: Sweep, tmp_path: Path) -> None:
    submitted_sweep = sweep("train.seed=1,2")
    script = submitted_sweep.folder / "job.sh"
    for submitted, _ in submitted_sweep.runs:
        submitted.run.job_script.write_text('echo "$PWD $$"\n')
    task = {**os.environ, "SLURM_ARRAY_TASK_ID": "1"}
    with subprocess.Popen(
        ["bash", script], cwd=submitted_sweep.folder, env=task, stdout=subprocess.PIPE, text=True
    ) as process:
        # The shell is replaced with exec, so that signals to the batch shell reach the run's script.
        assert process.communicate()[0] == f"{submitted_sweep.runs[1][0].run.path} {process.pid}\n"
    task["SLURM_ARRAY_TASK_ID"] = "7"
    assert subprocess.run(["bash", script], cwd=submitted_sweep.folder, env=task, check=False).returncode == 1


def test_shellcheck_accepts_array_script(sweep: Sweep, tmp_path: Path) -> None:
    submitted_sweep = sweep("train.seed=1,2", at_once=1, job={"constraint": "a&b", "name": "a b'$(touch pwned)"})
    subprocess.run([Path(sys.executable).parent / "shellcheck", submitted_sweep.folder / "job.sh"], check=True)


def test_dry_run_creates_nothing_and_matches_submission(sweep: Sweep, fake_slurm: FakeSlurm, tmp_path: Path) -> None:
    planned = dry_run_sweep(SubmitRequest(cwd=tmp_path), SIX, 2)
    assert not (tmp_path / "home").exists() and fake_slurm.calls("sbatch") == []
    submitted_sweep = sweep(*SIX, at_once=2)
    assert planned.script is not None
    suffix = submitted_sweep.folder.name.rpartition("-")[2]
    assert planned.script.replace("xxxxxx", suffix) == (submitted_sweep.folder / "job.sh").read_text()
    assert len(planned.runs) == 6 and [v for _, v in planned.runs] == [v for _, v in submitted_sweep.runs]


def test_sweep_and_array_name_all_runs(sweep: Sweep, tmp_path: Path) -> None:
    submitted_sweep = sweep("train.seed=1,2,3")
    ids = [submitted.run.id for submitted, _ in submitted_sweep.runs]
    assert [r.id for r in resolve_runs(submitted_sweep.folder.name)] == ids
    assert {r.id for r in resolve_runs("4711")} == set(ids)
    assert [r.id for r in resolve_runs("4711_1")] == [ids[1]] == [r.id for r in resolve_runs(ids[1])]
    subprocess.run(["rm", "-r", tmp_path / "home" / "runs" / ids[0]], check=True)
    assert [r.id for r in resolve_runs(submitted_sweep.folder.name)] == ids[1:]
    with pytest.raises(ClusterTrainError, match="no run '471'"):
        resolve_runs("471")
    assert isinstance(resolve_runs("latest")[0], RunDir)


def test_runs_with_the_same_checkpoints_are_refused(sweep: Sweep, tmp_path: Path) -> None:
    command = ("sh", "-c", "true")
    with pytest.raises(ConfigError, match="would resume from one another's checkpoints"):
        sweep("env.LR=1,2", command=command, job={"checkpoints": "runs/*/step-*"})
    assert leftovers(tmp_path) == []
    assert sweep("env.LR=1,2", command=command, job={"checkpoints": "{run_dir}/step-*"})
