"""``clustertrain submit`` and ``clustertrain plan`` as a user types them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from clustertrain import settings
from clustertrain.cli.main import main
from tests.fakes.slurm.fixture import FakeSlurm
from tests.paths import ROOT

pytestmark = pytest.mark.long

Type = Callable[..., int]


@pytest.fixture
def type_(fake_slurm: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Type:
    """Type a command line in an empty folder; returns the exit code."""
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)

    def type_(*words: str) -> int:
        monkeypatch.setattr(sys, "argv", ["clustertrain", *words])
        return main()

    return type_


def test_submit_prints_run_and_job(type_: Type, capsys: pytest.CaptureFixture[str]) -> None:
    assert type_("submit", "--nodes", "2", "--gpus", "4") == 0
    out = capsys.readouterr().out
    assert out.startswith("run default-") and out.endswith("  job 4711\n")


def test_submit_json_has_the_keys_of_the_contract(
    type_: Type, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert type_("submit", "--name", "demo", "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert set(shown) == {"run", "job_id", "backend", "state", "run_dir"}
    assert (shown["job_id"], shown["backend"], shown["state"]) == ("4711", "slurm", "pending")
    assert shown["run_dir"] == str(tmp_path / "home" / "runs" / shown["run"])


def test_arguments_after_the_script_go_to_the_script(
    type_: Type, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    Path("train.py").write_text("")
    assert type_("submit", "--gpus", "2", "--json", "train.py", "--gpus", "9", "--", "-h", "--json") == 0
    out, err = capsys.readouterr()
    run = Path(json.loads(out)["run_dir"])
    spec = (run / "spec.toml").read_text()
    assert "note: --gpus was passed to train.py; put submit's options before it" in err
    assert "gpus = 2" in spec
    assert [w for w in ("--gpus", "9", "-h", "--json") if f'"{w}"' in spec] == ["--gpus", "9", "-h", "--json"]


@pytest.mark.parametrize("command", [["submit"], ["sweep", "--grid", "env.N=1,2"]])
def test_dry_run_after_script_submits_only_if_the_script_has_one(
    type_: Type, capsys: pytest.CaptureFixture[str], fake_slurm: FakeSlurm, command: list[str]
) -> None:
    Path("train.py").write_text("")
    assert type_(*command, "train.py", "--dry-run") == 2
    assert f"clustertrain {command[0]} --dry-run … train.py" in capsys.readouterr().err
    Path("train.py").write_text("parser.add_argument('--dry-run')")
    assert type_(*command, "train.py", "--dry-run") == 0
    assert "note: --dry-run was passed to train.py" in capsys.readouterr().err


def test_every_option_of_the_job_reaches_sbatch(type_: Type, fake_slurm: FakeSlurm) -> None:
    words = [
        "--partition", "p", "--account", "a", "--qos", "q", "--time", "1:00:00", "--mem", "4G", "--constraint", "c",
        "--exclude", "n1", "--nodelist", "n2", "--reservation", "r", "--dependency", "afterok:1", "--nodes", "2",
        "--gpus", "2", "--gpu-type", "h100", "--cpus-per-gpu", "3", "--sbatch", "comment=a b", "--sbatch", "exclusive",
        "--max-requeues", "0", "--env", "A=b=c",
    ]  # fmt: skip
    assert type_("submit", *words) == 0
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


def test_dry_run_prints_the_script_and_makes_nothing(
    type_: Type, fake_slurm: FakeSlurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert type_("submit", "--dry-run", "--gpus", "2") == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("#!/bin/bash\n#SBATCH --job-name=default-")
    assert "ddp: " in shown.err and "batch: " in shown.err
    assert "schedule: cosine over 200 steps: " in shown.err
    assert fake_slurm.calls("sbatch") == [] and not (tmp_path / "home").exists()
    assert type_("submit", "--dry-run", "--json") == 0
    assert set(json.loads(capsys.readouterr().out)) == {"script", "plan"}


@pytest.mark.parametrize(
    ("words", "said"),
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
)
def test_bad_usage_exits_2_and_says_what_is_valid(
    words: list[str], said: str, type_: Type, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert type_("submit", *words) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "home").exists()


def test_a_bad_configuration_exits_78(type_: Type, capsys: pytest.CaptureFixture[str]) -> None:
    assert type_("submit", "--nodes", "3", "--gpus", "7", "--set", "train.global_batch=16") == 78
    assert "16 / 21" in capsys.readouterr().err


def test_a_refusal_exits_1_with_slurms_words(
    type_: Type, fake_slurm: FakeSlurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_slurm.answers("sbatch", stderr="sbatch: error: invalid partition specified: nope\n", rc=1)
    assert type_("submit", "--partition", "nope") == 1
    assert capsys.readouterr().err.splitlines()[-1] == (
        "clustertrain: Slurm refused the job: invalid partition specified: nope"
    )
    assert list((tmp_path / "home" / "runs").iterdir()) == []


def test_plan_shows_the_choice_and_why(type_: Type, capsys: pytest.CaptureFixture[str]) -> None:
    assert type_("plan", "--nodes", "2", "--gpus", "8", "--gpu-type", "h100") == 0
    out = capsys.readouterr().out
    for words in ("ddp on 16 ranks", "Training", "objective", "Why", "Not chosen", "fsdp", "TORCH_FR_BUFFER_SIZE=2000"):
        assert words in out


def test_plan_json_has_the_keys_of_the_contract(type_: Type, capsys: pytest.CaptureFixture[str]) -> None:
    assert type_("plan", "--gpus", "2", "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert {"layout", "batch", "memory", "time", "nccl", "training", "reasons", "rejected"} <= set(shown)
    assert shown["nccl"]["TORCH_NCCL_DUMP_ON_TIMEOUT"].keys() == {"value", "reason"}


def test_plan_of_what_does_not_fit_says_so_and_submit_refuses(type_: Type, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--gpu-type", "t4", "--set", "model.dim=8192", "--set", "model.heads=64", "--set", "model.layers=12"]
    assert type_("plan", *words) == 0
    assert "DOES NOT FIT" in capsys.readouterr().out
    assert type_("submit", *words) == 78


THREE_D = ["--nodes", "4", "--gpus", "2", "--layout", "fsdp", "--tp", "2", "--pp", "2", "--device", "cpu"]


def test_a_product_of_layouts_reaches_the_plan_of_the_run(
    type_: Type, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert type_("submit", "--json", *THREE_D, "--set", "parallel.schedule=gpipe") == 0
    run = Path(json.loads(capsys.readouterr().out)["run_dir"])
    layout = json.loads((run / "plan.json").read_text())["layout"]
    assert (layout["strategy"], layout["dp_shard"], layout["tp"], layout["pp"]) == ("fsdp", 2, 2, 2)
    assert (layout["schedule"], layout["sequence_parallel"]) == ("gpipe", True)


@pytest.mark.parametrize(
    ("words", "strategy"),
    [
        (["--layout", "zero1"], "zero1"),
        (["--layout", "fsdp-grad-op"], "fsdp-grad-op"),
        (["--layout", "hybrid-shard"], "hybrid-shard"),
        (["--dp-replicate", "2", "--dp-shard", "4"], "hybrid-shard"),
        (["--cp", "2", "--layout", "ddp"], "ddp"),
    ],
)
def test_every_layout_has_a_name(
    words: list[str], strategy: str, type_: Type, capsys: pytest.CaptureFixture[str]
) -> None:
    assert type_("plan", "--nodes", "2", "--gpus", "4", "--json", *words) == 0
    assert json.loads(capsys.readouterr().out)["layout"]["strategy"] == strategy


def test_plan_shows_the_mesh_in_80_columns(type_: Type, capsys: pytest.CaptureFixture[str]) -> None:
    assert type_("plan", *THREE_D) == 0
    out = capsys.readouterr().out
    assert "fsdp 2, tp 2 + sp, pp 2 (1f1b) on 8 ranks = 4 nodes x 2" in out
    assert "8 ranks = pp 2 x dp_shard 2 x tp 2" in out
    assert all(len(line) <= 80 for line in out.splitlines())


def test_plan_shows_warnings_apart_and_all_of_the_layout(type_: Type, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--set", "parallel.schedule=interleaved", "--set", "parallel.activation_checkpointing=full"]
    assert type_("plan", *THREE_D, *options, "--set", "parallel.static_graph=true") == 0
    out = capsys.readouterr().out
    assert "activation checkpointing full, 2 stages per rank" in out and "bubble" in out
    warnings, _, why = out.partition("\nWarnings\n")[2].partition("\nWhy\n")
    assert "static_graph has no effect" in warnings and "static_graph" not in why
    assert type_("plan", "--device", "cpu") == 0
    out = capsys.readouterr().out
    assert "1 rank = 1 node x 1" in out and "x 1 data-parallel rank" in out and "Warnings" not in out


def test_status_names_the_layout(type_: Type, capsys: pytest.CaptureFixture[str]) -> None:
    assert type_("submit", *THREE_D) == 0
    assert type_("status") == 0
    assert "fsdp 2, tp 2 + sp, pp 2 (1f1b)" in capsys.readouterr().out


def test_a_layout_that_cannot_be_leaves_nothing_behind(
    type_: Type, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert type_("submit", "--gpus", "4", "--tp", "3") == 78
    assert "4 / 3 = 1.33333" in capsys.readouterr().err
    assert type_("submit", "--tp", "0") == 2 and type_("submit", "--layout", "zero-1") == 2
    assert not (tmp_path / "home").exists()


def test_submit_notes_what_crosses_nodes(type_: Type, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--nodes", "4", "--gpus", "1", "--tp", "2"]
    assert type_("submit", *words) == 0
    assert "note: tp 2 crosses nodes of 1: " in capsys.readouterr().err


@pytest.mark.parametrize("command", ["submit", "plan"])
def test_a_script_that_cannot_drive_its_layout_is_refused(
    command: str, type_: Type, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("train.py").write_text("import torch\nimport clustertrain as ct\nloss.backward()\n")
    for words in (["--pp=2"], ["--layout=zero1"], ["--set=train.precision=fp16"], ["--cp=2"], ["--tp=2"]):
        assert type_(command, "--gpus", "2", *words, "train.py") == 78
        assert "train.py does not call session.train_step" in capsys.readouterr().err
    assert not (tmp_path / "home").exists()
    assert type_(command, "--gpus", "2", "--layout", "fsdp", "train.py") == 0
    capsys.readouterr()
    Path("train.py").write_text("import mine\n")
    assert type_(command, "--gpus", "2", "--pp", "2", "train.py") == 0
    assert "note: train.py imports other modules" in capsys.readouterr().err


def test_the_three_dimensional_example_is_accepted(type_: Type, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = ROOT / "examples" / "three_d.toml"
    assert type_("submit", "--dry-run", "--json", "--nodes", "4", "--gpus", "2", str(recipe)) == 0
    layout = json.loads(capsys.readouterr().out)["plan"]["layout"]
    assert (layout["dp_shard"], layout["tp"], layout["pp"]) == (2, 2, 2)


def test_neither_torch_nor_what_is_heavy_is_imported_for_help_and_torch_never() -> None:
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


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({}, "needs an allocation"),
        ({"SLURM_JOB_ID": "7"}, "not on one of its nodes"),
    ],
)
def test_trials_need_a_node_of_an_allocation(
    environ: dict[str, str],
    said: str,
    type_: Type,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert type_("plan", "--find-micro-batch", "--gpus", "2") == 78
    assert said in capsys.readouterr().err


def test_trials_are_refused_where_they_would_stand_for_nothing(
    type_: Type, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    assert type_("plan", "--find-micro-batch", "--nodes", "2", "--gpus", "2", "--layout", "fsdp") == 78
    assert "fsdp is for 4 ranks, but only 2 can start here" in capsys.readouterr().err
    assert type_("plan", "--find-micro-batch", "--gpus", "2", "--set", "train.global_batch=3") == 78
    assert "3 / 2 = 1.5" in capsys.readouterr().err
    Path("train.py").write_text("")
    assert type_("plan", "--find-micro-batch", "train.py") == 2
    assert "a script has its own" in capsys.readouterr().err
    assert type_("plan", "--find-micro-batch", "--backend", "local", "--set", "data.path=/no/such") == 78
    assert "data.path = '/no/such'" in capsys.readouterr().err


def test_data_that_is_not_there_is_refused_here_and_noted_on_a_cluster(
    type_: Type, fake_slurm: FakeSlurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--set", "data.path=texts"]
    assert type_("submit", "--backend", "local", *words) == 78
    assert f"data.path = '{tmp_path / 'work' / 'texts'}': no such file" in capsys.readouterr().err
    assert not (tmp_path / "home").exists()
    assert type_("submit", *words) == 0
    assert "note: data.path" in capsys.readouterr().err
    Path("texts").mkdir()
    Path("texts", "a.py").touch()
    assert type_("submit", "--json", *words) == 0
    shown = capsys.readouterr()
    assert "data.path" not in shown.err
    assert f'path = "{tmp_path / "work" / "texts"}"' in Path(json.loads(shown.out)["run_dir"], "spec.toml").read_text()


def test_counting_and_not_counting_exclude_each_other(type_: Type, capsys: pytest.CaptureFixture[str]) -> None:
    assert type_("plan", "--trace-memory", "--no-count-model") == 2
    assert "use one of them" in capsys.readouterr().err
