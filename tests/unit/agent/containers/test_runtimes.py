"""The command line of each runtime, compared as a whole."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from clustertrain.agent.containers import runtimes
from clustertrain.agent.containers.spec import START_SCRIPT, Container
from clustertrain.config.container import Mount, RuntimeName
from clustertrain.errors import UnsuitableEnvironment
from clustertrain.sysinfo.containers import Runtime

NODE_ENV = {"PATH": "/node/bin", "HOME": "/home/u", "SECRET": "s3cret", "USER": "u"}
ENV = {"RANK": "1", "CLUSTERTRAIN_RANK_DIR": "/tmp/ranks", "SECRET": "s3cret", "PATH": "/image/bin"}
INSIDE = ["sh", "/tmp/ranks/program-1.pid", "/project", "/hooks", "python", "train.py", "a b"]
SHELL = ["/bin/sh", "-c", START_SCRIPT, *INSIDE]
CONMON = str(Path(runtimes.__file__).with_name("conmon"))


def build(tmp_path: Path, **changes: object) -> Container:
    values = {
        "name": "ranks-1", "image": "/images/a.sif", "kind": "sif", "command": ("python", "train.py", "a b"),
        "cwd": "/project", "python_path": "/hooks", "env": ENV, "folder": tmp_path, "options": ("--more=1",),
        "mounts": (Mount("/tmp", "/tmp"), Mount("/data set", "/data"), Mount("/hooks", "/hooks", read_only=True)),
        "pid_path": Path("/tmp/ranks/program-1.pid"),
    }  # fmt: skip
    return Container(**{**values, **changes})  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def no_crun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtimes, "find_program", lambda name, environ: "")


def launch(runtime: RuntimeName, program: str, container: Container) -> tuple[list[str], dict[str, str]]:
    return runtimes.build_launch(Runtime(runtime, program), container, NODE_ENV)


def test_apptainer(tmp_path: Path) -> None:
    argv, env = launch("apptainer", "/usr/bin/apptainer", build(tmp_path, device="cuda"))
    assert argv == [
        "/usr/bin/apptainer", "exec", "--cleanenv", "--no-home", "--no-eval", "--nv",
        "--bind=/tmp:/tmp", "--bind=/data set:/data", "--bind=/hooks:/hooks:ro", "--more=1", "/images/a.sif", *SHELL,
    ]  # fmt: skip
    of_container = {f"APPTAINERENV_{name}": value for name, value in ENV.items()}
    assert env == {**NODE_ENV, **of_container, "RANK": "1", "CLUSTERTRAIN_RANK_DIR": "/tmp/ranks"}
    argv, env = launch("apptainer", "/usr/bin/singularity", build(tmp_path))
    assert argv[:5] == ["/usr/bin/singularity", "exec", "--cleanenv", "--no-home", "--bind=/tmp:/tmp"]
    assert env["SINGULARITYENV_PATH"] == "/image/bin"


def test_apptainer_refuses_a_comma_in_a_mount(tmp_path: Path) -> None:
    with pytest.raises(UnsuitableEnvironment, match="/a,b: Apptainer cannot mount a path with a comma"):
        launch("apptainer", "/usr/bin/apptainer", build(tmp_path, mounts=(Mount("/a,b", "/a,b"),)))


def test_charliecloud(tmp_path: Path) -> None:
    container = build(tmp_path, image="/images/b", kind="bundle", root=Path("/images/b/rootfs"))
    argv, env = launch("charliecloud", "/usr/bin/ch-run", container)
    assert argv == [
        "/usr/bin/ch-run", "--bind=/data set:/data", "--bind=/hooks:/hooks", "--more=1", "/images/b/rootfs", "--",
        *SHELL,
    ]  # fmt: skip
    assert env == {**ENV, "USER": "u"}


def test_enroot(tmp_path: Path) -> None:
    container = build(tmp_path, image="/images/c.sqsh", kind="squashfs", device="cuda")
    argv, env = launch("enroot", "/usr/bin/enroot", container)
    assert argv == [
        "/usr/bin/enroot", "start", f"--rc={tmp_path}/start.sh",
        "--mount=/tmp:/tmp:none:x-create=dir,rbind", "--mount=/data\\040set:/data:none:x-create=file,rbind",
        "--mount=/hooks:/hooks:none:x-create=file,rbind,ro",
        "--env=NVIDIA_VISIBLE_DEVICES", "--env=MELLANOX_VISIBLE_DEVICES", "--env=RANK",
        "--env=CLUSTERTRAIN_RANK_DIR", "--env=SECRET", "--env=PATH", "--more=1", "/images/c.sqsh", *INSIDE[1:],
    ]  # fmt: skip
    assert (tmp_path / "start.sh").read_text() == START_SCRIPT
    assert env["NVIDIA_VISIBLE_DEVICES"] == "all"
    with pytest.raises(UnsuitableEnvironment, match="A: Enroot cannot pass a value with a line break"):
        launch("enroot", "/usr/bin/enroot", build(tmp_path, env={"A": "1\n2"}))


@pytest.mark.parametrize(
    ("image", "argument"),
    [
        ("docker://nvcr.io/nvidia/pytorch:25.01", "nvcr.io/nvidia/pytorch:25.01"),
        ("docker://localhost:5000/a", "localhost:5000/a"),
        ("docker://pytorch/pytorch", "docker.io/pytorch/pytorch"),
        ("docker://debian:12", "docker.io/library/debian:12"),
    ],
)
def test_podman(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, image: str, argument: str) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda number: (1024, resource.RLIM_INFINITY))
    monkeypatch.setattr(runtimes, "_read_pid_max", lambda: 32768)
    argv, env = launch("podman", "/usr/bin/podman", build(tmp_path, image=image, kind="registry"))
    assert argv == [
        "/usr/bin/podman", f"--conmon={CONMON}", "run", "--rm", "--name=ranks-1", "--log-driver=none",
        "--network=host", "--pid=host", "--ipc=host", "--uts=host", "--cgroups=no-conmon",
        "--security-opt=label=disable", "--user=0:0", "--ulimit=nofile=1024:1048576", "--ulimit=nproc=1024:32768",
        "--entrypoint=/bin/sh", "--volume=/tmp:/tmp", "--volume=/data set:/data", "--volume=/hooks:/hooks:ro",
        "--env=RANK", "--env=CLUSTERTRAIN_RANK_DIR", "--env=SECRET", "--env=PATH=/image/bin", "--more=1", argument,
        *SHELL[1:],
    ]  # fmt: skip
    assert env == {**NODE_ENV, "RANK": "1", "CLUSTERTRAIN_RANK_DIR": "/tmp/ranks"}


def test_podman_with_crun_and_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtimes, "find_program", lambda name, environ: "/usr/bin/crun")
    container = build(tmp_path, image="/images/d", kind="folder", root=Path("/images/d"), device="cuda")
    argv, _ = launch("podman", "/usr/bin/podman", container)
    assert argv[2:5] == ["--runtime=/usr/bin/crun", "--runtime-flag=cgroup-manager=disabled", "run"]
    assert "--device=nvidia.com/gpu=all" in argv
    assert argv[-len(SHELL) - 2 :] == ["--more=1", "--rootfs", "/images/d:O", *SHELL[1:]]


@pytest.mark.parametrize(("runtime", "more"), [("runc", []), ("crun", ["--cgroup-manager=disabled"])])
def test_oci_runtimes(tmp_path: Path, runtime: RuntimeName, more: list[str]) -> None:
    container = build(tmp_path, image="/images/d", kind="folder", root=Path("/images/d"))
    program = f"/usr/sbin/{runtime}"
    argv, env = launch(runtime, program, container)
    state = f"--root={tmp_path}/state"
    assert argv == [program, *more, state, "run", "--more=1", f"--bundle={tmp_path}", "ranks-1"]
    assert env == {**NODE_ENV, "RANK": "1", "CLUSTERTRAIN_RANK_DIR": "/tmp/ranks"}
    assert (tmp_path / "config.json").is_file()
    cleanup = runtimes.build_cleanup(Runtime(runtime, program), container)
    assert cleanup == [program, *more, state, "delete", "--force", "ranks-1"]


def test_start_script_becomes_the_command(tmp_path: Path) -> None:
    """The command keeps its arguments and the PID that was written, and ignores Slurm's early warning."""
    values = "os.getpid(), os.getcwd(), signal.getsignal(10), os.environ['PYTHONPATH'], sys.argv[1:]"
    code = f"import os, signal, sys; print({values})"
    argv = ["/bin/sh", "-c", START_SCRIPT, "sh", str(tmp_path / "pid"), str(tmp_path), "/hooks"]
    command = [sys.executable, "-c", code, "a b", "$HOME"]
    done = subprocess.run([*argv, *command], env={"PYTHONPATH": "/image"}, capture_output=True, text=True, check=True)
    pid = (tmp_path / "pid").read_text().strip()
    assert done.stdout == f"{pid} {tmp_path} 1 /hooks:/image ['a b', '$HOME']\n"
    missing = subprocess.run([*argv, "no-such-program"], capture_output=True, text=True, check=False)
    assert missing.returncode == 127
