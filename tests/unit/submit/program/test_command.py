"""Any command as the program of a run: launchers that are replaced, files that are found, and refusals."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clustertrain.errors import UsageError
from clustertrain.submit.launchers.replace import replace_launcher
from clustertrain.submit.program.command import build_script_spec
from clustertrain.submit.request import SubmitRequest


def request(*command: str, cwd: Path = Path("/"), **job: Any) -> SubmitRequest:
    return SubmitRequest(command=command, cwd=cwd, job=job, environ={"PATH": os.environ["PATH"]})


TORCHRUN = {
    ("torchrun", "train.py", "--lr", "1"): ("python", "train.py", "--lr", "1"),
    ("torchrun", "--standalone", "--nproc-per-node=2", "train.py"): ("python", "train.py"),
    ("torchrun", "--nproc_per_node", "2", "-m", "pkg.train", "-x"): ("python", "-m", "pkg.train", "-x"),
    ("env/bin/torchrun", "train.py"): ("env/bin/python", "train.py"),
    ("torchrun", "--no-python", "./run", "a"): ("./run", "a"),
    ("torchrun", "-r", "3", "-t", "3", "--", "train.py"): ("python", "train.py"),
    ("/env/bin/python", "-m", "torch.distributed.run", "train.py"): ("/env/bin/python", "train.py"),
    ("python3", "-u", "-m", "torch.distributed.launch", "--use_env", "train.py"): ("python3", "train.py"),
    ("python", "-OO", "-m", "torch.distributed.run", "train.py"): ("python", "train.py"),
    ("python", "-W", "ignore", "-X", "importtime", "-m", "torch.distributed.run", "t.py"): ("python", "t.py"),
    ("python", "-Im", "torch.distributed.run", "train.py"): ("python", "train.py"),
    ("python", "-BEsu", "-mtorch.distributed.run", "train.py"): ("python", "train.py"),
    ("python", "--check-hash-based-pycs", "never", "-m", "torch.distributed.run", "t.py"): ("python", "t.py"),
    ("python", "env/bin/torchrun", "train.py"): ("python", "train.py"),
}


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """Return a folder with an environment ``env`` that has launchers."""
    (tmp_path / "env" / "bin").mkdir(parents=True)
    for name in ("torchrun", "deepspeed", "python"):
        (tmp_path / "env" / "bin" / name).touch()
    return tmp_path


@pytest.mark.parametrize("command", TORCHRUN)
def test_torchrun_is_replaced(command: tuple[str, ...], environment: Path) -> None:
    translation = replace_launcher(request(*command, cwd=environment))
    assert translation.request.command == TORCHRUN[command]
    assert "torchrun is replaced" in translation.notes[0]


@pytest.mark.parametrize(
    ("command", "fix"),
    [
        (("mpirun", "-np", "8", "x"), "srun --ntasks-per-node=1 clustertrain wrap -- x (ranks get RANK"),
        (("bash", "-c", "torchrun x.py"), "put the other commands into the batch script"),
        (("apptainer", "exec", "i", "torchrun", "x.py"), "leave torchrun out: name the program after apptainer"),
        (("A=1", "python", "x.py"), "write env A=1 before the program"),
    ],
)
def test_fix_in_a_batch_script_is_one_of_wrap(command: tuple[str, ...], fix: str) -> None:
    asked = replace(request(*command), wrapped=True)
    with pytest.raises(UsageError) as e:
        build_script_spec(replace_launcher(asked).request)
    assert fix in str(e.value.fix)


WRAPPED = {
    "env FOO=1 torchrun train.py": "env FOO=1 python train.py",
    "env -u A -C /x B=1 torchrun train.py": "env -u A -C /x B=1 python train.py",
    "nice -n 5 uv run --with torch -p 3.12 torchrun train.py": "nice -n 5 uv run --with torch -p 3.12 python train.py",
    "uv --project p run -- torchrun -m pkg.train": "uv --project p run -- python -m pkg.train",
    "uv run -m torch.distributed.run train.py": "uv run python train.py",
    "uv run --new-option value torchrun train.py": "uv run --new-option value python train.py",
    "conda run -n x --live-stream torchrun train.py": "conda run -n x --live-stream python train.py",
    "conda run -n x /env/bin/torchrun train.py": "conda run -n x /env/bin/python train.py",
    "timeout -k 5 1h taskset -c 0-3 torchrun train.py": "timeout -k 5 1h taskset -c 0-3 python train.py",
    "nsys profile -o out --trace=cuda torchrun train.py": "nsys profile -o out --trace=cuda python train.py",
    "strace -f -o out torchrun train.py": "strace -f -o out python train.py",
    "chrt -f 10 numactl -N 0 torchrun train.py": "chrt -f 10 numactl -N 0 python train.py",
    "perf stat -e cycles torchrun train.py": "perf stat -e cycles python train.py",
    "hatch -e test run torchrun train.py": "hatch -e test run python train.py",
    "uv run python -O -m torch.distributed.run train.py": "uv run python train.py",
}


@pytest.mark.parametrize("command", WRAPPED)
def test_torchrun_behind_a_wrapper_is_replaced(command: str) -> None:
    translation = replace_launcher(request(*command.split(), "--x"))
    assert " ".join(translation.request.command) == f"{WRAPPED[command]} --x"
    assert "torchrun is replaced" in translation.notes[0]


def test_launcher_behind_a_wrapper_has_sizes_and_passes_the_local_rank() -> None:
    translated = replace_launcher(request("uv", "run", "deepspeed", "--num_gpus", "4", "train.py")).request
    assert translated.command == ("uv", "run", "python", "-u", "train.py", "--local_rank")
    assert (translated.job, translated.local_rank_index) == ({"gpus": 4}, 5)
    old = replace_launcher(request("nice", "python", "-m", "torch.distributed.launch", "train.py")).request
    assert (old.command[old.local_rank_index or 0], old.command[:3]) == ("--local-rank", ("nice", "python", "train.py"))


@pytest.mark.parametrize(
    "command",
    [
        "python train.py -m torch.distributed.run",
        "trl env",
        "trl vllm-serve --model x",
        "trl --help",
        "torchrun --help",
        "accelerate config",
        "tune run recipe --config c",
        "llamafactory-cli version",
        "composer install",
        "python -O train.py -m torch.distributed.run",
        "python -c pass -m torch.distributed.run",
        "uvx ruff check torchrun",
        "uv tool run ruff torchrun",
        "hatch run test:python train.py torchrun",
        "flock F python train.py torchrun",
        "env -S python train.py torchrun",
        "uv run train.py torchrun",
        "uv run --with torchrun python train.py torchrun x.py",
        "env A=torchrun python train.py",
        "nice python compare.py torchrun accelerate launch",
        "uv sync torchrun",
        "apptainer exec --bind torchrun i.sif python train.py torchrun",
        "podman run --name torchrun i python train.py torchrun",
        "uv",
        "uv run",
        "timeout",
        "bash run.sh torchrun",
        "bash -c",
    ],
)
def test_word_of_a_harmless_command_is_no_launcher(command: str) -> None:
    words = tuple(command.split())
    assert replace_launcher(request(*words)).request.command == words


def test_other_commands_are_unchanged() -> None:
    for command in (
        ("bash", "-c", "python train.py torchrun; echo torchrun 'torchrun x.py'"),
        ("bash", "-c", "echo 'not closed"),
    ):
        translation = replace_launcher(request(*command))
        assert (translation.request.command, translation.notes) == (command, ())


def test_sizes_of_torchrun_are_the_job_s() -> None:
    command = ("torchrun", "--nnodes", "3", "--nproc-per-node=4", "train.py")
    assert replace_launcher(request(*command)).request.job == {"nodes": 3, "gpus": 4}
    assert replace_launcher(request(*command, gpus=4)).request.job == {"nodes": 3, "gpus": 4}
    unknown = ("torchrun", "--nnodes=$SLURM_NNODES", "--nproc-per-node", "gpu", "train.py")
    assert replace_launcher(request(*unknown, gpus=8)).request.job == {"gpus": 8}


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (("torchrun", "--nnodes", "1:4", "x.py"), "a range of sizes cannot be honored"),
        (("torchrun", "--nproc-per-node", "4", "x.py"), "--gpus 2 contradicts torchrun, which was given 4"),
        (("torchrun", "--numa-binding=node", "x.py"), "--numa-binding: cannot be honored"),
        (("torchrun", "--elastic", "x.py"), "not an option of torchrun"),
        (("torchrun", "--nnodes"), "the value is missing"),
        (("torchrun", "--nnodes=1"), "no program after its options"),
        (("mpirun", "-n", "4", "x"), "mpirun in front of the program is .*--gpus 4 -- x .*not OMPI"),
        (("env", "A=1", "mpirun", "-np", "8", "-N", "4", "x"), "--nodes 2 --gpus 4 -- x"),
        (("mpiexec", "--bogus", "x"), "--gpus N -- PROGRAM"),
        (("horovodrun", "-np", "4", "python", "x.py"), "horovodrun in front of the program"),
        (("srun", "-n", "4", "x"), "srun in front of the program is not supported: clustertrain starts the processes"),
        (("axolotl", "train", "c.yml"), "axolotl train in front.*-- python -m axolotl.cli.train CONFIG"),
        (("llamafactory-cli", "train", "c.yml"), "-- python -m llamafactory.launcher CONFIG"),
        (("python", "-m", "llamafactory.cli", "train", "c.yml"), "llamafactory-cli train in front"),
        (("tune", "run", "--nproc_per_node", "8", "recipe"), "leave its options for torchrun out, and give --gpus"),
        (("fabric", "run", "x.py"), "fabric run in front.*let it call fabric.launch"),
        (("composer", "-n", "8", "x.py"), "composer in front.*-- python SCRIPT"),
        (("ibrun", "python", "x.py"), "ibrun in front.*name the program itself"),
        (("uvx", "torchrun", "x.py"), "torchrun behind uvx: .*write uv run --no-project --with PACKAGE torchrun"),
        (("uvx", "--from", "torch", "torchrun", "x.py"), "torchrun behind uvx"),
        (("uv", "tool", "run", "--from", "torch", "torchrun", "x.py"), "torchrun behind uv tool run"),
        (("pipx", "run", "--spec", "torch", "torchrun", "x.py"), "torchrun behind pipx"),
        (("hatch", "run", "test:torchrun", "x.py"), "hatch run test:torchrun: .*write hatch -e test run torchrun"),
        (("flock", "F", "torchrun", "x.py"), "torchrun behind flock: each rank would wait for the lock"),
        (("env", "-S", "A=1 torchrun x.py"), "torchrun inside env -S: each rank would start torchrun again"),
        (("nice", "env", "-iStorchrun x.py"), "torchrun inside env -S"),
        (("uv", "run", "trl", "sft", "--x"), "trl behind uv: .*start trl without uv"),
        (("apptainer", "exec", "i.sif", "trl", "sft"), "trl inside apptainer"),
        (("uv", "run", "accelerate", "launch", "x.py"), "accelerate launch behind uv: .* without uv"),
        (("env", "A=1", "accelerate-launch", "x.py"), "accelerate launch behind env: .*export the variables"),
        (("bash", "-c", "torchrun x.py"), "torchrun inside bash: .*name torchrun itself"),
        (("sh", "-ec", "cd /a && A=1 exec nice\\\n uv run torchrun x.py"), "torchrun inside sh"),
        (("bash", "-c", "if a; then\npython -m torch.distributed.run x.py; fi"), "torchrun inside bash"),
        (("uv", "run", "bash", "-lc", "(accelerate launch x.py)"), "accelerate launch inside bash"),
        (("apptainer", "exec", "--nv", "i.sif", "torchrun", "x.py"), "torchrun inside apptainer: .*--container IMAGE"),
        (("podman", "run", "-v", "/a:/a", "i", "bash", "-c", "torchrun x.py"), "torchrun inside podman"),
        (("docker", "run", "i", "mpirun", "x"), "mpirun inside docker: .*the program without docker and mpirun"),
        (("shifter", "i", "accelerate", "launch", "x"), "accelerate launch inside shifter: .*ACCELERATE_USE_FSDP"),
        (("ch-run", "i", "--", "deepspeed", "x.py"), "deepspeed inside ch-run"),
        (("deepspeed", "--include", "a:0,1", "x.py"), "deepspeed --include: cannot be honored"),
        (("deepspeed", "-e", "a:0", "x.py"), "deepspeed --exclude: cannot be honored"),
        (("deepspeed", "--bind_cores_to_rank", "x.py"), "--bind_cores_to_rank: cannot be honored"),
        (("deepspeed", "--bogus", "x.py"), "--bogus: not an option of deepspeed"),
        (("deepspeed", "--num_gpus=4", "x.py"), "--gpus 2 contradicts deepspeed, which was given 4"),
        (("deepspeed", "--num_gpus"), "the value is missing"),
        (("deepspeed", "--num_gpus", "2"), "no script after its options"),
        (("deepspeed", "--hostfile", "/missing/hosts", "x.py"), "no such file"),
    ],
)
def test_what_cannot_be_honored_is_refused_by_name(command: tuple[str, ...], message: str) -> None:
    with pytest.raises(UsageError, match=f"(?s){message}"):
        replace_launcher(request(*command, gpus=2))


def test_gpus_of_torchrun_are_the_profile_s(tmp_path: Path) -> None:
    (tmp_path / "clustertrain" / "clusters").mkdir(parents=True)
    (tmp_path / "clustertrain" / "clusters" / "site.toml").write_text("gpus_per_node = 8\n")
    command = ("torchrun", "--nproc-per-node", "gpu", "train.py")

    def translate(**fields: Any) -> tuple[dict[str, Any], tuple[str, ...]]:
        environ = {"XDG_CONFIG_HOME": str(tmp_path)}
        translation = replace_launcher(SubmitRequest(command=command, cwd=tmp_path, environ=environ, **fields))
        return dict(translation.request.job), translation.notes

    job, notes = translate(job={"cluster": "site"})
    assert job["gpus"] == 8 and any("8, the GPUs per node of the cluster profile" in note for note in notes)
    assert translate(job={"cluster": "site", "gpus": 2})[0]["gpus"] == 2
    assert translate(assignments=("job.gpus=2",))[0] == {}
    assert translate(wrapped=True)[0] == {}
    with pytest.raises(UsageError, match=r"torchrun --nproc-per-node gpu: the number of GPUs.*\n.*give --gpus N"):
        translate(job={"backend": "slurm"})
    with pytest.raises(
        UsageError, match="torchrun --nproc-per-node gpu means all GPUs of the node, but this run uses CPUs"
    ):
        translate(job={"cluster": "site", "device": "cpu"})


def test_python_without_accelerate_is_named(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')  # without the packages of its environment
    python.chmod(0o755)
    (tmp_path / "accelerate").touch()
    with pytest.raises(UsageError, match=f"accelerate launch: {python} has no accelerate") as e:
        replace_launcher(request(str(tmp_path / "accelerate"), "launch", "train.py", cwd=tmp_path))
    assert "activate the one that has it" in str(e.value.fix)


DEEPSPEED = {
    ("deepspeed", "train.py", "--deepspeed", "ds.json"): "python -u train.py --local_rank --deepspeed ds.json",
    ("env/bin/deepspeed", "--no_local_rank", "train.py"): "env/bin/python -u train.py",
    ("deepspeed", "--module", "--master_port", "1", "pkg.train", "-x"): "python -u -m pkg.train --local_rank -x",
    ("deepspeed", "-q", "--no_python", "--launcher=slurm", "./run"): "./run --local_rank",
    ("python", "-m", "deepspeed.launcher.runner", "train.py"): "python -u train.py --local_rank",
    ("python", "-m", "torch.distributed.launch", "train.py", "-x"): "python train.py --local-rank -x",
}


@pytest.mark.parametrize("command", DEEPSPEED)
def test_launcher_that_passes_the_local_rank_is_replaced(command: tuple[str, ...], environment: Path) -> None:
    translated = replace_launcher(request(*command, cwd=environment, gpus=2)).request
    assert " ".join(translated.command) == DEEPSPEED[command]
    index = translated.local_rank_index
    assert [i for i, word in enumerate(translated.command) if word.startswith("--local")] == ([index] if index else [])


def test_deepspeed_without_a_size_means_all_gpus_of_the_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="deepspeed without --num_gpus: the number of GPUs per node is not known"):
        replace_launcher(request("deepspeed", "train.py", backend="slurm"))
    with pytest.raises(UsageError, match="deepspeed without --num_gpus means all GPUs of the node, but this run uses"):
        replace_launcher(request("deepspeed", "train.py", device="cpu"))
    (tmp_path / "site.toml").write_text("gpus_per_node = 8\n")
    sized = SubmitRequest(
        command=("deepspeed", "train.py"), job={"cluster": "site"},
        environ={"PATH": os.environ["PATH"], "CLUSTERTRAIN_CLUSTER_PATH": str(tmp_path)},
    )  # fmt: skip
    assert replace_launcher(sized).request.job["gpus"] == 8


def test_hosts_and_environment_of_deepspeed_are_the_job_s(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("# nodes\nworker-0 slots=8\n\nworker-1 slots=8\n")
    (tmp_path / ".deepspeed_env").write_text("NCCL_IB_HCA=mlx5_0,mlx5_1\nUCX_TLS=rc=x\n")

    def translate(*options: str) -> SubmitRequest:
        command = ("deepspeed", "--hostfile", "hosts", *options, "train.py")
        plain = SubmitRequest(command=command, cwd=tmp_path, environ={"HOME": "/missing"}, env={"UCX_TLS": "mine"})
        return replace_launcher(plain).request

    assert translate().job == {"nodes": 2, "gpus": 8}
    assert translate("--num_nodes", "1", "--num_gpus", "-1").job == {"nodes": 1, "gpus": 8}
    assert translate().env == {"NCCL_IB_HCA": "mlx5_0,mlx5_1", "UCX_TLS": "mine"}
    (tmp_path / "hosts").write_text("worker-0 slots=8\nworker-1 slots=4\n")
    with pytest.raises(UsageError, match=r"different numbers of slots \(8, 4\)"):
        translate()
    (tmp_path / "hosts").write_text("worker-0 8\n")
    with pytest.raises(UsageError, match="not a line of a hostfile: worker-0 8"):
        translate()
    (tmp_path / "hosts").write_text("worker-0 slots=8\n")
    (tmp_path / ".deepspeed_env").write_text("export A=1\n")
    with pytest.raises(UsageError, match="not a variable: export A=1"):
        translate()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "train.py").touch()
    (tmp_path / "plain.sh").touch()
    (tmp_path / "lib" / "site-packages").mkdir(parents=True)
    (tmp_path / "lib" / "site-packages" / "tool.py").touch()
    (tmp_path / "run.sh").write_text("#!/bin/bash\n")
    (tmp_path / "run.sh").chmod(0o755)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "pyvenv.cfg").touch()  # an environment that has uv
    (tmp_path / "bin" / "uv").write_text("#!/bin/sh\n")
    (tmp_path / "bin" / "uv").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    (tmp_path / "pkg" / "sub").mkdir(parents=True)
    (tmp_path / "pkg" / "sub" / "main.py").touch()
    return tmp_path


@pytest.mark.parametrize(
    ("command", "path", "index"),
    [
        ((sys.executable, "train.py", "1"), "train.py", 1),
        ((sys.executable, "-u", "-W", "ignore", "train.py"), "train.py", 4),
        ((sys.executable, "-O", "train.py"), "train.py", 2),
        ((sys.executable, "-Xdev", "-OO", "train.py"), "train.py", 3),
        ((sys.executable, "-Om", "pkg.sub.main"), "pkg", None),
        ((sys.executable, "-mpkg.sub.main"), "pkg", None),
        ((sys.executable, "lib/site-packages/tool.py"), "", None),
        (("bash", "-O", "extglob", "run.sh"), "run.sh", 3),
        (("bash", "-e", "run.sh"), "run.sh", 2),
        (("./run.sh", "a"), "run.sh", 0),
        ((sys.executable, "-m", "pkg.sub.main"), "pkg", None),
        ((sys.executable, "-m", "json.tool"), "", None),
        ((sys.executable, "-c", "print()"), "", None),
        (("env", "A=1", sys.executable, "-u", "train.py"), "train.py", 4),
        (("nice", "-n", "1", "bash", "run.sh"), "run.sh", 4),
        (("nice", "./run.sh"), "run.sh", 1),
        (("uv", "run", "--with", "x", "train.py", "a"), "train.py", 4),
        (("uv", "run", "-m", "pkg.sub.main"), "pkg", None),
        (("uv", "run", "python", "-m", "of_its_environment"), "", None),
        (("uv", "run", "--directory", "pkg", "train.py"), "", None),
        (("uv", "run", "trl", "train.py"), "", None),
        (("nice", "train.py"), "", None),
        (("cat", "train.py"), "", None),
    ],
)
def test_file_of_the_user_is_found(folder: Path, command: tuple[str, ...], path: str, index: int | None) -> None:
    script = build_script_spec(request(*command, cwd=folder))
    assert (script.path, script.path_index) == (str(folder / path) if path else "", index)
    assert script.is_package == (path == "pkg")
    assert Path(script.command[0]).is_absolute() and script.command[1:] == command[1:]


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (("nosuchprogram", "x"), "nosuchprogram: command not found"),
        ((sys.executable, "missing.py"), "missing.py: no such file"),
        ((sys.executable, "-O", "missing.py"), "missing.py: no such file"),
        ((sys.executable, "pkg"), "pkg: it is a folder"),
        (("uv", "run", "nope.py"), "nope.py: no such file"),
        (("env", "A=1", "python", "nope.py"), "nope.py: no such file"),
        (("train.py",), "not a command in PATH.*\\./train.py, or python train.py"),
        (("A=" + "1" * 300, "python", "train.py"), "a variable, not a program"),
        (("A=1", "python", "train.py"), "a variable, not a program.*--env A=1"),
        ((sys.executable, "-m", "nosuchmodule.x"), "has no module nosuchmodule"),
        ((sys.executable, "-m", "json.nope"), "has no module json.nope"),
        ((sys.executable, "-m", "pkg.sub.nope"), "no such module in"),
        (("./train.py",), r"\./train.py is not executable\n.*write python train.py"),
        (("./plain.sh",), r"\./plain.sh is not executable\n.*write bash plain.sh"),
        (("./nothing",), "./nothing: no such file"),
        (("./pkg",), "./pkg: it is a folder"),
        (("cat", "a\0b"), "NUL"),
    ],
)
def test_missing_programs_are_refused(folder: Path, command: tuple[str, ...], message: str) -> None:
    with pytest.raises(UsageError, match=f"(?s){message}"):
        build_script_spec(request(*command, cwd=folder))


def test_missing_python_is_named_as_given(folder: Path) -> None:
    with pytest.raises(UsageError, match=r"--python /nope/python: no such file\n.*name an existing interpreter"):
        build_script_spec(request("python", "train.py", cwd=folder, python="/nope/python"))
