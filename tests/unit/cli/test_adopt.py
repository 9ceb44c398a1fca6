"""``clustertrain adopt`` on batch scripts as users write them: its output, and the job that submit makes of it."""

from __future__ import annotations

import json
import re
import shlex
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clustertrain.cli.main import main
from clustertrain.config.cluster import load_profile
from tests.fakes.slurm.fixture import FakeSlurm
from tests.paths import ROOT

pytestmark = pytest.mark.long
SCRIPTS = ROOT / "tests" / "fixtures" / "batch_scripts"
# Options of the job scripts that submit renders, by batch script. Those of --nodes, GPUs and time are the script's own.
JOBS: dict[str, dict[str, str]] = {
    "accelerate": {"nodes": "2", "gpus-per-node": "4", "cpus-per-task": "32", "time": "6:00:00"},
    "apptainer": {"nodes": "1", "gpus-per-node": "2", "time": "1:00:00", "licenses": "matlab:1"},
    "array": {"nodes": "1", "gpus-per-node": "1", "time": "2:00:00"},
    "bash_c": {"nodes": "2", "gpus-per-node": "4", "time": "10:00:00"},
    "chain": {
        "nodes": "2", "gpus-per-node": "4", "time": "4:00:00", "dependency": "afterok:4711", "no-requeue": "",
    },
    "conda": {
        "nodes": "1", "gpus-per-node": "4", "cpus-per-task": "32", "mem": "200G", "time": "08:00:00",
        "constraint": "a100&nvlink", "mail-type": "END,FAIL", "mail-user": "me@example.org",
    },
    "cpu": {"nodes": "1", "cpus-per-task": "8", "mem-per-cpu": "2G", "time": "20", "comment": '"a b"'},
    "deepspeed": {
        "nodes": "2", "gpus-per-node": "8", "mem-per-gpu": "100G", "time": "1:00:00", "partition": "a100,h100",
    },
    "heredoc": {"nodes": "1", "gpus-per-node": "2", "time": "15:00"},
    "megatron": {"nodes": "2", "gpus-per-node": "8", "time": "48:00:00"},
    "mpi": {"nodes": "2", "gpus-per-node": "8", "time": "1:30:00", "nice": ""},
    "srun_procid": {
        "nodes": "2", "gres": "gpu:a100:4", "cpus-per-task": "64", "time": "0-12:00", "partition": "normal",
        "exclude": "node[01-03]", "hint": "nomultithread",
    },
    "torchrun_nodes": {
        "nodes": "4", "gpus-per-node": "8", "cpus-per-task": "96", "time": "24:00:00", "partition": "gpu",
        "account": '"project 12"', "exclusive": "",
    },
    "trap_requeue": {
        "nodes": "2", "gres": "gpu:8,nvme:1", "time": "1-00:00:00", "qos": "preemptible", "reservation": "mlperf",
        "signal": "USR2@300",
    },
    "venv_cd": {"nodes": "1", "gpus-per-node": "1", "time": "30", "begin": "now+1hour"},
}  # fmt: skip
COMMANDS = {
    "accelerate": "accelerate launch --num_machines 2 --mixed_precision bf16 train.py --mixed_precision bf16"
    " --output_dir out",
    "apptainer": "python train.py --x 1",
    "array": "python train.py --seed '$SLURM_ARRAY_TASK_ID' --out runs/'$SLURM_ARRAY_TASK_ID'",
    "bash_c": 'python "$PWD"/train.py --bf16',
    "chain": "python train.py --resume auto",
    "conda": "python train.py --config 'configs/a b.yaml'",
    "cpu": "python train.py --backend gloo",
    "deepspeed": "deepspeed train.py --deepspeed --deepspeed_config ds.json",
    "heredoc": "python -m package.train --config config.yaml",
    "megatron": "python train.py --num-layers 24 --hidden-size 1024 --seq-length 2048"
    ' --data-path "$SCRATCH"/corpus --split 949,50,1 --lr "${LR:-1.5e-4}" \'$@\'',
    "mpi": "python train.py",
    "srun_procid": "python -u procid.py --epochs 90",
    "torchrun_nodes": "python train.py --lr 3e-4 --data '/data/my corpus'",
    "trap_requeue": "python train.py",
    "venv_cd": "python train.py --out results",
}

RunCli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run_cli(
    fake_slurm: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> RunCli:
    """Run a command line in a folder with the programs of the batch scripts; return exit code, stdout and stderr."""
    work = tmp_path / "work"
    for folder in (work, work / "package", work / "project"):
        folder.mkdir(parents=True)
        (folder / "train.py").write_text("import os\n")
    (work / "data").mkdir()
    (work / "torch.sif").write_bytes(b"#!/usr/bin/env run-singularity\n".ljust(32, b"\0") + b"SIF_MAGIC\0")
    (work / "procid.py").write_text("import os\nrank = int(os.environ['SLURM_PROCID'])\n")
    apptainer = tmp_path / "bin" / "apptainer"
    apptainer.parent.mkdir()
    apptainer.write_text("#!/bin/sh\n")
    apptainer.chmod(0o755)
    monkeypatch.setenv("PATH", f"{apptainer.parent}:{Path(sys.executable).parent}", prepend=":")
    monkeypatch.setenv("PWD", str(work))
    monkeypatch.chdir(work)

    def run_cli(*args: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["clustertrain", *args])
        code = main()
        return code, *capsys.readouterr()

    return run_cli


def adopt(run_cli: RunCli, *args: str) -> dict[str, Any]:
    code, out, err = run_cli("adopt", "--json", *args)
    assert code == 0, err
    document: dict[str, Any] = json.loads(out)
    return document


def outcome_of(document: dict[str, Any], text: str) -> str:
    return next(f"{row['outcome']}: {row['detail']}" for row in document["lines"] if text in row["text"])


def test_every_script_has_its_expectations() -> None:
    assert sorted(JOBS) == sorted(COMMANDS) == sorted(path.stem for path in SCRIPTS.iterdir())


@pytest.mark.parametrize("name", sorted(JOBS))
def test_submit_line_makes_a_job_with_the_same_resources(
    name: str, run_cli: RunCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = adopt(run_cli, str(SCRIPTS / f"{name}.sbatch"), "--write", "site")
    lead, _, line = document["submit"].rpartition("clustertrain submit ")
    options, _, command = line.partition(" -- ")
    assert command == COMMANDS[name]
    folder = lead.removeprefix("cd ").removesuffix(" && ")
    command = command.replace("$PWD", str(Path.cwd()))  # as the shell does
    monkeypatch.chdir(folder or ".")
    code, out, err = run_cli(
        "submit", "--dry-run", "--backend", "slurm", *shlex.split(options), "--", *shlex.split(command)
    )
    assert code == 0, err
    head = out.partition("\n\n")[0]
    directives = dict(re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", head, re.MULTILINE))
    given = {key: directives.get(key) for key in JOBS[name]}
    assert given == JOBS[name]
    assert not set(directives) & {"gpus-per-node", "gres"} - set(JOBS[name])
    profile = tomllib.loads(document["profile_text"])
    for setup in profile.get("setup", []):
        assert setup in out
    for key, value in profile.get("env", {}).items():
        assert f"export {key}={shlex.quote(value)}" in out


def test_profile_has_set_up_and_environment(run_cli: RunCli) -> None:
    document = adopt(run_cli, str(SCRIPTS / "torchrun_nodes.sbatch"))
    assert document["profile"] == {
        "setup": ["set -e", "module purge", "module load cuda/12.4 nccl"],
        "partition": "gpu",
        "account": "project 12",
        "cpus_per_gpu": 12,
        "env": {"NCCL_DEBUG": "WARN", "OMP_NUM_THREADS": "12"},
    }
    assert tomllib.loads(document["profile_text"]) == document["profile"]
    assert document["path"] is None and document["decide"] == []
    assert outcome_of(document, "head_node_ip=").startswith("replaced: clustertrain sets the addresses")
    assert outcome_of(document, "--output").startswith("replaced: each rank has a log")
    assert outcome_of(document, "##SBATCH --qos=low") == "dropped: a comment for sbatch"
    assert outcome_of(document, "srun torchrun …") == "replaced: srun; torchrun and its options"


@pytest.mark.parametrize(
    ("name", "line", "text", "detail"),
    [
        ("array", 2, "#SBATCH --array=0-9", "one run is submitted; `clustertrain sweep --grid env.NAME=V,V`"),
        ("array", 7, "$SLURM_ARRAY_TASK_ID", "known only inside the job"),
        ("conda", 14, "conda activate myenv", "submit takes python from the shell in which it is called"),
        ("cpu", 9, "python", "the script requests no GPUs"),
        ("deepspeed", 12, "rm -f $HOSTFILE", "a run executes nothing after it"),
        ("megatron", 8, "${LR:-1.5e-4}", "the shell that gets the submit line expands it"),
        ("megatron", 24, "$@", "an argument or a state of the batch script"),
        ("mpi", 7, "mpirun -np …", "not the variables of MPI"),
        ("srun_procid", 17, "procid.py", "the program reads SLURM_PROCID: let it read RANK"),
        ("bash_c", 8, "$PWD", "another folder after the cd"),
    ],
)
def test_what_the_user_has_to_decide_is_listed(
    name: str, line: int, text: str, detail: str, run_cli: RunCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)  # as in a pipe: one line per row
    document = adopt(run_cli, str(SCRIPTS / f"{name}.sbatch"))
    found = [q for q in document["decide"] if (q["line"], q["text"]) == (line, text)]
    assert any(detail in q["detail"] for q in found), document["decide"]
    out = run_cli("adopt", str(SCRIPTS / f"{name}.sbatch"))[1]
    assert "To decide:" in out and detail in out


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_table_fits_the_terminal(columns: int, run_cli: RunCli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.chdir(SCRIPTS)
    out = run_cli("adopt", "megatron.sbatch")[1]
    table, _, rest = out.partition("\nTo decide:\n")
    questions = rest.partition("\n\n")[0]
    assert max(map(len, [*table.splitlines(), *questions.splitlines()])) <= columns
    assert "MASTER_PORT=6000" in table and "a state of the batch script" in " ".join(questions.split())


def test_secrets_are_neither_printed_nor_stored(run_cli: RunCli, tmp_path: Path) -> None:
    for args in ([], ["--json"], ["--write", "site"]):
        code, out, _ = run_cli("adopt", *args, str(SCRIPTS / "conda.sbatch"))
        assert code == 0 and "hf_abcdef0123" not in out
        assert '--env HF_TOKEN="$HF_TOKEN"' in out.replace('\\"', '"')
    assert "hf_abcdef0123" not in (tmp_path / "config" / "clustertrain" / "clusters" / "site.toml").read_text()


def test_write_stores_the_profile_and_keeps_another_one(run_cli: RunCli, tmp_path: Path) -> None:
    script = str(SCRIPTS / "torchrun_nodes.sbatch")
    path = tmp_path / "config" / "clustertrain" / "clusters" / "site.toml"
    code, out, _ = run_cli("adopt", script, "--write", "site")
    assert code == 0 and f"{path}: written" in out and "--cluster site" in out
    assert load_profile("site").account == "project 12"
    assert run_cli("adopt", script, "--write", "site")[0] == 0  # the same again
    other = str(SCRIPTS / "srun_procid.sbatch")
    code, _, err = run_cli("adopt", other, "--write", "site")
    assert code == 2 and f"cluster profile site exists: {path}" in err and "--force" in err
    assert load_profile("site").account == "project 12"
    assert run_cli("adopt", other, "--write", "site", "--force")[0] == 0
    assert load_profile("site").gpus_flag == "gres"


def test_write_says_that_nothing_needs_a_profile(run_cli: RunCli, tmp_path: Path) -> None:
    script = tmp_path / "job.sbatch"
    script.write_text("#!/bin/bash\n#SBATCH --gpus-per-node=2\npython train.py\n")
    note = "No cluster profile is needed"
    code, out, err = run_cli("adopt", str(script))
    assert code == 0 and f"\n{note}.\n" in out and err == ""
    code, out, err = run_cli("adopt", str(script), "--write", "site")
    assert code == 0 and f"\n{note}: site is not stored.\n" in out and "--cluster" not in out
    code, out, err = run_cli("adopt", str(script), "--write", "site", "--json")
    assert code == 0 and json.loads(out)["path"] is None and err == f"{note}: site is not stored.\n"
    assert not list(tmp_path.rglob("site.toml"))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--write", "../x"], "invalid profile name"),
        (["--write", ""], "invalid profile name"),
        (["--force"], "--write"),
    ],
)
def test_invalid_options_are_refused(run_cli: RunCli, args: list[str], message: str) -> None:
    code, _, err = run_cli("adopt", str(SCRIPTS / "cpu.sbatch"), *args)
    assert code == 2 and message in err


def test_virtual_environment_names_the_python(run_cli: RunCli) -> None:
    python = Path(".venv/bin/python").absolute()
    python.parent.mkdir(parents=True)
    python.touch()
    document = adopt(run_cli, str(SCRIPTS / "venv_cd.sbatch"))
    assert document["argv"][-3:] == ["train.py", "--out", "results"] and document["argv"][-4] == str(python)
    assert document["decide"] == []
    assert document["profile"]["setup"][0] == f"cd {Path.cwd()}"


@pytest.mark.parametrize(
    ("content", "code", "message"),
    [
        (None, 1, "no such file"),
        (b"", 2, "is empty"),
        (b"\n \n", 2, "is empty"),
        (b"\x7fELF\0\0", 2, "is a binary file"),
        (b"just some text\n", 2, "neither a first line such as #!/bin/bash nor #SBATCH lines"),
        (b"#!/bin/csh\n#SBATCH -N 1\n", 2, "is a script for csh"),
        (b"#!/usr/bin/env python3\nimport os\n", 2, "is a script for python3"),
        (b"#!/bin/bash\r\n#SBATCH -N 1\r\nsrun python x.py\r\n", 2, "has DOS line breaks"),
        (b"#!/bin/bash\necho \xff\xfe\n", 2, "line 2: is not UTF-8"),
        (b"#!/bin/bash\n" + b"#" * 10_000_000, 2, "is larger than 0.25 MiB"),
        (b"#!/bin/bash\necho 'open\n", 2, "line 2: the quote ' is not closed"),
        (b"#!/bin/bash\nif true; then\nsrun python x.py\n", 2, "line 2: a block has no closing fi"),
        (b"#!/bin/bash\ncat <<EOF\nsrun python x.py\n", 2, "line 2: the here-document has no line EOF"),
        (b"#!/bin/bash\necho hi\n", 2, "no training command"),
    ],
    ids=lambda value: repr(value)[:40] if isinstance(value, bytes) else str(value),
)
def test_files_that_are_no_batch_scripts_are_refused(
    run_cli: RunCli, content: bytes | None, code: int, message: str
) -> None:
    if content is not None:
        Path("job.sbatch").write_bytes(content)
    result, _, err = run_cli("adopt", "job.sbatch")
    assert result == code and message in err and "fix:" in err and "Traceback" not in err


def test_folder_is_refused(run_cli: RunCli) -> None:
    code, _, err = run_cli("adopt", "package")
    assert code == 2 and "is a folder" in err


def test_text_of_the_script_cannot_control_the_terminal(run_cli: RunCli) -> None:
    Path("job.sbatch").write_text(
        "#!/bin/bash\necho \x1b]52;c;x\x07\nexport A=\x1b[31m\nsrun python train.py \x1b[2J\n"
    )
    code, out, _ = run_cli("adopt", "job.sbatch")
    assert code == 0 and "\x1b" not in out and "\\x1b" in out
