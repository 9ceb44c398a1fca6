"""The command ``clustertrain submit``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from clustertrain import settings
from clustertrain.config.command_options import split_arguments
from clustertrain.run.lookup import list_runs
from clustertrain.run.run_dir import RunDir
from clustertrain.run.run_spec import load_spec
from tests.fakes.slurm.fixture import FakeSlurm
from tests.paths import ROOT
from tests.unit.cli.conftest import THREE_D, RunCli

pytestmark = pytest.mark.long


def test_submit_prints_run_and_job(run_cli: RunCli, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli("submit", "--nodes", "2", "--gpus", "4") == 0
    out = capsys.readouterr().out
    assert out.startswith("run default-") and out.endswith("  job 4711\n")


def test_submit_json_has_the_documented_keys(
    run_cli: RunCli, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_cli("submit", "--name", "demo", "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert set(shown) == {"schema_version", "run", "job_id", "backend", "state", "run_dir"}
    assert (shown["job_id"], shown["backend"], shown["state"]) == ("4711", "slurm", "pending")
    assert shown["run_dir"] == str(tmp_path / "home" / "runs" / shown["run"])


def test_arguments_after_the_script_go_to_the_script(
    run_cli: RunCli, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    Path("train.py").write_text("")
    assert run_cli("submit", "--gpus", "2", "--json", "train.py", "--gpus", "9", "--", "-h", "--json") == 0
    out, err = capsys.readouterr()
    run = Path(json.loads(out)["run_dir"])
    spec = (run / "spec.toml").read_text()
    assert "note: --gpus was passed to train.py; put submit's options before it" in err
    assert "gpus = 2" in spec
    assert [w for w in ("--gpus", "9", "-h", "--json") if f'"{w}"' in spec] == ["--gpus", "9", "-h", "--json"]


@pytest.mark.parametrize(
    ("args", "command"),
    [
        (["--", "cat", "--json", "-x"], ["cat", "--json", "-x"]),
        (["-m", "json.tool", "--gpus", "9"], ["python", "-m", "json.tool", "--gpus", "9"]),
        (["--", "torchrun", "--nproc-per-node=2", "train.py", "--dry-run"], ["python", "train.py", "--dry-run"]),
    ],
)
def test_any_command_is_submitted_as_it_is(
    run_cli: RunCli, capsys: pytest.CaptureFixture[str], args: list[str], command: list[str]
) -> None:
    Path("train.py").touch()
    assert run_cli("submit", "--gpus", "2", "--json", *args) == 0
    run = RunDir(Path(json.loads(capsys.readouterr().out)["run_dir"]))
    spec = load_spec(run)
    assert spec.script is not None and spec.job.gpus == 2
    assert [Path(spec.script.command[0]).name, *spec.script.command[1:]] == command
    assert (run.code / "train.py").exists() == ("train.py" in command)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--"], "--: no command after it"),
        (["-m"], "-m: no module after it"),
        (["--", "nosuchprogram"], "nosuchprogram: command not found"),
        (["--tp", "2", "--", "cat", "x"], "--tp: no effect on cat"),
        (["--set", "optim.lr=1", "--", "cat", "x"], "optim.lr has no effect on cat"),
        (
            ["--stop-signal", "FOO", "--", "cat", "x"],
            ": --stop-signal FOO: not TERM, USR1, USR2, INT, HUP or none\n"
            "  fix: --stop-signal USR1 (add :all for every process of a rank)\n",
        ),
        (["--stop-signal", "USR2:al", "--", "cat", "x"], "fix: --stop-signal USR2 (add :all"),
        (["--set", "job.stop_signal=FOO", "--", "cat", "x"], "job.stop_signal = 'FOO': not TERM"),
        (
            ["--resume-args", "--a 'x", "--", "cat", "x"],
            ': --resume-args "--a \'x": a quote is not closed\n  fix: close it, or put a backslash before a quote',
        ),
        (["--resume-args", "{chekpoint}", "--", "cat", "x"], "fix: write {checkpoint} in place of it"),
        (["--resume-args", "--from {checkpoint", "--", "cat", "x"], "the brace of {checkpoint is not closed"),
        (
            ["--checkpoints", "out/{step}.pt", "--", "cat", "x"],
            ": --checkpoints 'out/{step}.pt': {step} is not replaced, and no file matches it\n"
            "  fix: --checkpoints 'out/*.pt'; * matches any text\n",
        ),
        (["--checkpoints", "out/{checkpoint}.pt", "--", "cat", "x"], "fix: --checkpoints 'out/*.pt'"),
        (["--checkpoints", "{epoch:02d}-x", "--", "cat", "x"], "fix: --checkpoints '*-x'"),
        (["--checkpoints", "{rundir}/x", "--", "cat", "x"], "fix: --checkpoints '{run_dir}/x'"),
        (["--checkpoints", "", "--", "cat", "x"], "--checkpoints: the pattern is empty"),
        (["--nodes", "400000", "--", "cat", "x"], ": --nodes 400000: at most 100000; the"),
        (["--nodes", "90000", "--gpus", "64", "--", "cat", "x"], ": --nodes 90000 x --gpus 64: 5760000 ranks"),
        (["--profile", "steps=1:3", "--", "cat", "x"], "--profile: no effect on cat, which has its own steps"),
        (["--container-runtime", "pyxis", "--", "cat", "x"], "pyxis: not needed, since Enroot starts the image"),
        (["--container-runtime", "docker", "--", "cat", "x"], "fix: --container-runtime podman"),
        (["--no-hooks"], "--no-hooks: no effect on a recipe"),
        (["--set", "job.checkpoints='out'", "uses.py"], "--checkpoints: no effect on uses.py, which uses clustertrain"),
    ],
)
def test_commands_that_cannot_run_are_refused(
    run_cli: RunCli, capsys: pytest.CaptureFixture[str], fake_slurm: FakeSlurm, args: list[str], message: str
) -> None:
    Path("uses.py").write_text("import clustertrain\n")
    assert run_cli("submit", *args) in (2, 78)
    assert message in capsys.readouterr().err
    assert fake_slurm.calls("sbatch") == []


def test_options_of_a_command_are_kept(run_cli: RunCli, capsys: pytest.CaptureFixture[str]) -> None:
    Path("train.py").touch()
    resume = ("--resume-args", "--init_from=resume", "--resume-args", "'a b' {checkpoint}")
    options = ("--stop-signal", "USR1:all", *resume, "--set", "job.checkpoints='out/*'", "--json")
    assert run_cli("submit", *options, "train.py") == 0
    out, err = capsys.readouterr()
    job = load_spec(RunDir(Path(json.loads(out)["run_dir"]))).job
    assert (job.stop_signal, job.checkpoints) == ("USR1:all", "out/*")
    assert split_arguments(job.resume_args) == ["--init_from=resume", "a b", "{checkpoint}"]
    assert "whether or not" not in err
    assert run_cli("submit", *resume[:2], "train.py") == 0
    assert "note: --resume-args: added from the second attempt on, whether or not train.py" in capsys.readouterr().err


@pytest.mark.parametrize(("typed", "kept"), [("SIGTERM", "TERM"), ("usr1", "USR1"), ("sigusr2:ALL", "USR2:all")])
def test_stop_signals_have_one_spelling(
    run_cli: RunCli, capsys: pytest.CaptureFixture[str], typed: str, kept: str
) -> None:
    assert run_cli("submit", "--stop-signal", typed, "--json", "--", "cat", "x") == 0
    assert load_spec(RunDir(Path(json.loads(capsys.readouterr().out)["run_dir"]))).job.stop_signal == kept


def test_braces_that_are_no_placeholders_are_passed_on(run_cli: RunCli, capsys: pytest.CaptureFixture[str]) -> None:
    note = "{ckpt}, {step} are passed as they are; known: {checkpoint}, {run_dir}, {attempt}"
    for text, is_noted in (("--from {ckpt} {step}", True), ("""--a '{"a": 1}' x={checkpoint:1}""", False)):
        assert run_cli("submit", "--dry-run", "--resume-args", text, "--", "cat", "x") == 0
        assert (note in capsys.readouterr().err) is is_noted


def test_singularity_is_apptainer(run_cli: RunCli, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--container", "docker://x", "--container-runtime", "singularity", "--container-mount", "/tmp:/d:rw")
    assert run_cli("plan", *options, "--", "cat", "x") == 0
    assert " ".join(capsys.readouterr().out.split()).find("docker://x with apptainer; mounts /tmp:/d") > 0


@pytest.mark.parametrize("command", [["submit"], ["sweep", "--grid", "env.N=1,2"]])
def test_dry_run_after_script_needs_that_option_in_the_script(
    run_cli: RunCli, capsys: pytest.CaptureFixture[str], fake_slurm: FakeSlurm, command: list[str]
) -> None:
    Path("train.py").write_text("")
    assert run_cli(*command, "train.py", "--dry-run") == 2
    assert f"clustertrain {command[0]} --dry-run … train.py" in capsys.readouterr().err
    Path("train.py").write_text("parser.add_argument('--dry-run')")
    assert run_cli(*command, "train.py", "--dry-run") == 0
    assert "note: --dry-run was passed to train.py" in capsys.readouterr().err


def test_every_job_option_reaches_sbatch(run_cli: RunCli, fake_slurm: FakeSlurm) -> None:
    args = [
        "--partition", "p", "--account", "a", "--qos", "q", "--time", "1:00:00", "--mem", "4G", "--constraint", "c",
        "--exclude", "n1", "--nodelist", "n2", "--reservation", "r", "--dependency", "afterok:1", "--nodes", "2",
        "--gpus", "2", "--gpu-type", "h100", "--cpus-per-gpu", "3", "--sbatch", "comment=a b", "--sbatch", "exclusive",
        "--max-requeues", "0", "--env", "A=b=c",
    ]  # fmt: skip
    assert run_cli("submit", *args) == 0
    (call,) = fake_slurm.calls("sbatch")
    directives = [line.removeprefix("#SBATCH --") for line in call.script.splitlines() if line.startswith("#SBATCH")]
    assert directives[1:] == [
        "nodes=2", "ntasks-per-node=1", "gpus-per-node=h100:2", "cpus-per-task=6", "mem=4G", "time=1:00:00",
        "partition=p", "account=a", "qos=q", "constraint=c", "exclude=n1", "nodelist=n2", "reservation=r",
        "dependency=afterok:1", "signal=USR2@120", "no-requeue", "open-mode=append", "output=job.log",
        'comment="a b"', "exclusive",
    ]  # fmt: skip
    assert " A\n" in call.script and "b=c" not in call.script
    (secrets,) = (settings.home() / "runs").glob("*/secrets.sh")
    assert secrets.read_text() == "export A=b=c\n"


def test_dry_run_prints_the_script_and_creates_nothing(
    run_cli: RunCli, fake_slurm: FakeSlurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_cli("submit", "--dry-run", "--gpus", "2") == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("#!/bin/bash\n#SBATCH --job-name=default-")
    assert "ddp: " in shown.err and "batch: " in shown.err
    assert "schedule: cosine over 200 steps: " in shown.err
    assert fake_slurm.calls("sbatch") == [] and not (tmp_path / "home").exists()
    assert run_cli("submit", "--dry-run", "--json") == 0
    assert set(json.loads(capsys.readouterr().out)) == {"schema_version", "script", "plan"}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--nodes", "0"], "0 is not in the range"),
        (["--gpus", "-1"], "-1 is not in the range"),
        (["--gpus", "two"], "'two' is not a valid integer"),
        (["--layout", "fdsp"], "'fsdp'"),
        (["--backend", "slrum"], "'slurm'"),
        (["--device", "gpu"], "'cuda'"),
        (["--partitoin", "x"], "--partition"),
        (["--env", "A"], "KEY=VALUE"),
        (["--sbatch", "=x"], "KEY=VALUE"),
        (["--time", "soon"], "time limit 'soon'"),
        (["missing.py"], "missing.py: no such file"),
        (["--wait", "--follow"], "exclude each other"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_usage_exits_with_2_and_a_message(
    args: list[str], message: str, run_cli: RunCli, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_cli("submit", *args) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "home").exists()


def test_bad_configuration_exits_with_78(run_cli: RunCli, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli("submit", "--nodes", "3", "--gpus", "7", "--set", "train.global_batch=16") == 78
    assert "16 / 21" in capsys.readouterr().err


def test_refusal_exits_with_1_and_quotes_slurm(
    run_cli: RunCli, fake_slurm: FakeSlurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_slurm.answers("sbatch", stderr="sbatch: error: invalid partition specified: nope\n", rc=1)
    assert run_cli("submit", "--partition", "nope") == 1
    assert capsys.readouterr().err.splitlines()[-1] == (
        "clustertrain: Slurm refused the job: invalid partition specified: nope"
    )
    assert list((tmp_path / "home" / "runs").iterdir()) == []


def test_model_that_does_not_fit_is_planned_but_not_submitted(
    run_cli: RunCli, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["--gpu-type", "t4", "--set", "model.dim=8192", "--set", "model.heads=64", "--set", "model.layers=12"]
    assert run_cli("plan", *args) == 0
    assert "DOES NOT FIT" in capsys.readouterr().out
    assert run_cli("submit", *args) == 78


def test_combined_layout_reaches_the_plan_of_the_run(
    run_cli: RunCli, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_cli("submit", "--json", *THREE_D, "--set", "parallel.schedule=gpipe") == 0
    run = Path(json.loads(capsys.readouterr().out)["run_dir"])
    layout = json.loads((run / "plan.json").read_text())["layout"]
    assert (layout["strategy"], layout["dp_shard"], layout["tp"], layout["pp"]) == ("fsdp", 2, 2, 2)
    assert (layout["schedule"], layout["sequence_parallel"]) == ("gpipe", True)


@pytest.mark.parametrize(
    ("args", "strategy"),
    [
        (["--layout", "zero1"], "zero1"),
        (["--layout", "fsdp-grad-op"], "fsdp-grad-op"),
        (["--layout", "hybrid-shard"], "hybrid-shard"),
        (["--dp-replicate", "2", "--dp-shard", "4"], "hybrid-shard"),
        (["--cp", "2", "--layout", "ddp"], "ddp"),
    ],
)
def test_layout_options_select_the_strategy(
    args: list[str], strategy: str, run_cli: RunCli, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_cli("plan", "--nodes", "2", "--gpus", "4", "--json", *args) == 0
    assert json.loads(capsys.readouterr().out)["layout"]["strategy"] == strategy


def test_status_shows_the_layout(run_cli: RunCli, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli("submit", *THREE_D) == 0
    assert run_cli("status") == 0
    assert "fsdp 2, tp 2 + sp, pp 2 (1f1b)" in capsys.readouterr().out


def test_impossible_layout_creates_nothing(run_cli: RunCli, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli("submit", "--gpus", "4", "--tp", "3") == 78
    assert "4 / 3 = 1.33333" in capsys.readouterr().err
    assert run_cli("submit", "--tp", "0") == 2 and run_cli("submit", "--layout", "zero-1") == 2
    assert not (tmp_path / "home").exists()


def test_submit_notes_tensor_parallelism_across_nodes(run_cli: RunCli, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["--nodes", "4", "--gpus", "1", "--tp", "2"]
    assert run_cli("submit", *args) == 0
    assert "note: tp 2 crosses nodes of 1: " in capsys.readouterr().err


@pytest.mark.parametrize("command", ["submit", "plan"])
def test_script_that_cannot_run_its_layout_is_refused(
    command: str, run_cli: RunCli, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("train.py").write_text("import torch\nimport clustertrain as ct\nloss.backward()\n")
    for args in (["--pp=2"], ["--layout=zero1"], ["--set=train.precision=fp16"], ["--cp=2"], ["--tp=2"]):
        assert run_cli(command, "--gpus", "2", *args, "train.py") == 78
        assert "train.py does not call session.train_step" in capsys.readouterr().err
    assert not (tmp_path / "home").exists()
    assert run_cli(command, "--gpus", "2", "--layout", "fsdp", "train.py") == 0
    capsys.readouterr()
    Path("train.py").write_text("import mine\n")
    assert run_cli(command, "--gpus", "2", "--pp", "2", "train.py") == 2
    assert "--pp: no effect on train.py" in capsys.readouterr().err
    Path("mine.py").write_text("from clustertrain import session\n")
    assert run_cli(command, "--gpus", "2", "--pp", "2", "train.py") == 0
    assert "note: train.py imports other modules" in capsys.readouterr().err


def test_three_d_example_is_accepted(run_cli: RunCli, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = ROOT / "examples" / "three_d.toml"
    assert run_cli("submit", "--dry-run", "--json", "--nodes", "4", "--gpus", "2", str(recipe)) == 0
    layout = json.loads(capsys.readouterr().out)["plan"]["layout"]
    assert (layout["dp_shard"], layout["tp"], layout["pp"]) == (2, 2, 2)


def test_help_imports_no_heavy_packages_and_dry_run_no_torch() -> None:
    code = (
        "import sys; sys.argv = ['clustertrain', 'submit', *{args!r}]\n"
        "from clustertrain.cli.main import main\n"
        "main()\n"
        "print(sorted({{'torch', 'submitit', 'jinja2', 'rich', 'numpy'}} & set(sys.modules)), file=sys.stderr)"
    )
    for args, loaded in ((["--help"], "[]"), (["--dry-run", "--backend", "local"], "['jinja2']")):
        done = subprocess.run(
            [sys.executable, "-c", code.format(args=args)], capture_output=True, text=True, check=True
        )  # fmt: skip
        assert done.stderr.splitlines()[-1] == loaded


def test_missing_data_is_refused_locally_and_noted_on_a_cluster(
    run_cli: RunCli, fake_slurm: FakeSlurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["--set", "data.path=texts"]
    assert run_cli("submit", "--backend", "local", *args) == 78
    assert f"data.path = '{tmp_path / 'work' / 'texts'}': no such file" in capsys.readouterr().err
    assert not (tmp_path / "home").exists()
    assert run_cli("submit", *args) == 0
    assert "note: data.path" in capsys.readouterr().err
    Path("texts").mkdir()
    Path("texts", "a.py").touch()
    assert run_cli("submit", "--json", *args) == 0
    shown = capsys.readouterr()
    assert "data.path" not in shown.err
    assert f'path = "{tmp_path / "work" / "texts"}"' in Path(json.loads(shown.out)["run_dir"], "spec.toml").read_text()


def test_demo_submits_the_packaged_recipe_and_shows_the_run(
    run_cli: RunCli, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("clustertrain.scheduler.local.LocalBackend.submit", lambda _self, _submission: "local-1")
    monkeypatch.setattr("clustertrain.cli.follow.follow_run", lambda _run: 0)
    assert run_cli("demo") == 0
    out, err = capsys.readouterr()
    assert "run demo-" in out and "state" in out and " --brief" in err
    (run,) = list_runs()
    spec = load_spec(run)
    assert (spec.job.nodes, spec.job.gpus, spec.job.layout) == (2, 2, "fsdp")
    assert spec.recipe.preemption_test.preempt_at_steps == (50,)
