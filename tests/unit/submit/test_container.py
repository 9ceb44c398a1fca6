"""Requests for containers: what the program is, what is merged from the profile, and what is refused."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clustertrain.config.container import find_registry_image
from clustertrain.config.job import ScriptSpec
from clustertrain.errors import ClusterTrainError, UsageError
from clustertrain.submit import checks
from clustertrain.submit.launchers.replace import replace_launcher
from clustertrain.submit.prepare import prepare
from clustertrain.submit.prepared_run import PreparedRun
from clustertrain.submit.program.command import build_script_spec
from clustertrain.submit.request import SubmitRequest
from clustertrain.sysinfo import containers

Prepare = Callable[..., PreparedRun]
IMAGE = "docker://localhost/image"


def build(cwd: Path, *command: str, **job: Any) -> ScriptSpec:
    return build_script_spec(SubmitRequest(command=command, cwd=cwd, job={"container": IMAGE, **job}, environ={}))


def test_programs_and_modules_are_those_of_the_image(tmp_path: Path) -> None:
    for command in (
        ("no-such-program", "a"),
        ("/opt/bin/tool",),
        ("python9", "-m", "of_image"),
        ("bash", "-c", "true"),
    ):
        assert build(tmp_path, *command) == ScriptSpec(cwd=str(tmp_path), command=command)
    in_image = build(tmp_path, "python", "/opt/app/train.py", python="/opt/bin/python")
    assert in_image == ScriptSpec(cwd=str(tmp_path), command=("/opt/bin/python", "/opt/app/train.py"))


def test_files_in_the_folder_of_submit_are_code(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    (tmp_path / "package").mkdir()
    script = build(tmp_path, "python", "-u", "train.py", "x")
    assert (script.path, script.path_index, script.command[0]) == (str(tmp_path / "train.py"), 2, "python")
    assert build(tmp_path, "./train.py").path_index == 0
    assert build(tmp_path, "python", "-m", "package.main").is_package


@pytest.mark.parametrize(
    ("command", "job", "message"),
    [
        (("python", "no.py"), {}, "no.py: no such file"),
        (("./no",), {}, "./no: no such file"),
        (("python", "folder"), {}, "folder: it is a folder"),
        (("tool",), {"python": "/opt/bin/python"}, "--python /opt/bin/python: no effect on tool"),
    ],
)
def test_refused_programs(tmp_path: Path, command: tuple[str, ...], job: dict[str, str], message: str) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(UsageError, match=message):
        build(tmp_path, *command, **job)


def test_accelerate_is_refused(tmp_path: Path) -> None:
    command = ("accelerate", "launch", "train.py")
    with pytest.raises(UsageError, match="accelerate launch: its options are read with accelerate"):
        replace_launcher(SubmitRequest(command=command, cwd=tmp_path, job={"container": IMAGE}))


@pytest.fixture
def prepare_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Prepare:
    monkeypatch.setenv("CLUSTERTRAIN_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HOME", str(tmp_path))
    profile = tmp_path / "config" / "clustertrain" / "clusters" / "c.toml"
    profile.parent.mkdir(parents=True)
    environ = {"XDG_CONFIG_HOME": str(tmp_path / "config"), "PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    installed = {"podman": "/usr/bin/podman", "crun": "/usr/bin/crun"}
    monkeypatch.setattr(containers, "find_program", lambda name, environ: installed.get(name, ""))

    def call(*, text: str = "", command: tuple[str, ...] = ("tool",), target: str = "", **job: Any) -> PreparedRun:
        profile.write_text(text)
        job = {"backend": "local", "device": "cpu", "cluster": "c", **job}
        return prepare(SubmitRequest(target=target, command=command, cwd=tmp_path, job=job, environ=environ))

    return call


def test_profile_and_options_are_merged(prepare_run: Prepare, tmp_path: Path) -> None:
    text = f"""
python = "{sys.executable}"
container = "{IMAGE}"
container_runtime = "podman"
container_mounts = ["/etc:/in:ro"]
container_options = ["--a"]
"""
    prepared = prepare_run(text=text, container_mounts=("~/x:/y", "data"), container_options=("--b",))
    job = prepared.spec.job
    assert job.container_mounts == ("/etc:/in:ro", f"{tmp_path}/x:/y", f"{tmp_path}/data:{tmp_path}/data")
    assert (job.container, job.container_runtime, job.container_options) == (IMAGE, "podman", ("--a", "--b"))
    assert (job.python, prepared.python.ranks.path, prepared.python.agents.path) == ("", "python3", sys.executable)
    (tmp_path / "x").mkdir()
    (tmp_path / "data").touch()
    assert "the ranks run in containers of podman" in checks.check_plan(prepared)
    without = prepare_run(text=text, container="", command=("true",))
    assert (without.spec.job.container, without.spec.job.container_mounts) == ("", ())


def test_script_becomes_a_command_and_its_repository_is_mounted(prepare_run: Prepare, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import clustertrain")
    (tmp_path / ".git").mkdir()
    prepared = prepare_run(target="train.py", command=(), container=IMAGE, python="/opt/python")
    script = prepared.spec.script
    assert script is not None
    assert script.command == ("/opt/python", "-u", str(tmp_path / "train.py"))
    assert script.path_index == 2
    assert prepared.spec.job.python == "/opt/python"


BAD: dict[str, dict[str, Any]] = {
    "^--container: .*/no.sif does not exist\n.*check the path; write docker://NAME": {"container": "no.sif"},
    "the file is neither a SIF nor a SquashFS image": {"container": "text"},
    "^--container docker://: not the name of an image": {"container": "docker://"},
    "fix: write docker://nvcr.io/a:1$": {"container": "docker://nvcr.io#a:1"},
    "neither config.json, as an OCI bundle, nor bin or usr": {"container": "empty"},
    "^--container-mount: /no/folder does not exist": {"container": IMAGE, "container_mounts": ("/no/folder:/x",)},
    "^--container-mount /etc:in: in is not an absolute .*\n  fix: --container-mount /etc:/in$": {
        "container": IMAGE,
        "container_mounts": ("/etc:in",),
    },
    "^--container-mount /a:/b:w: w is neither ro .*\n  fix: --container-mount /a:/b:ro$": {
        "container": IMAGE,
        "container_mounts": ("/a:/b:w",),
    },
    "^--container-mount :/b: not SRC, SRC:DST or SRC:DST:ro\n.* /scratch:/data:ro": {
        "container": IMAGE,
        "container_mounts": (":/b",),
    },
    "^--container-runtime crun: cannot start an image of a registry": {"container": IMAGE, "container_runtime": "crun"},
    "^--container-runtime apptainer: it is not installed\n.*install it, or use podman": {
        "container": IMAGE,
        "container_runtime": "apptainer",
    },
    "no runtime for a SIF image is installed\n.*install apptainer": {"container": "image.sif"},
    "^--container-mount: no effect without a container": {"container_mounts": ("/etc",), "command": ("true",)},
    "^--container-runtime: .*'docker'.*\n.*use one of podman": {"container": IMAGE, "container_runtime": "docker"},
    "^--container oras://x/y: oras:// is not supported\n.*pull image.sif oras://x/y": {"container": "oras://x/y"},
}


@pytest.mark.parametrize("message", BAD)
def test_bad_containers_are_refused(prepare_run: Prepare, tmp_path: Path, message: str) -> None:
    (tmp_path / "text").write_text("no image")
    (tmp_path / "empty").mkdir()
    (tmp_path / "image.sif").write_bytes(b"#!/usr/bin/env run-singularity\n".ljust(32, b"\0") + b"SIF_MAGIC\0")
    with pytest.raises(ClusterTrainError, match=message) as caught:
        checks.check_plan(prepare_run(**BAD[message]))
    assert caught.value.exit_code in (2, 78)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('container = "image.sif"', "must be an absolute path or docker://NAME"),
        ('container_mounts = ["data:/x"]', "'data:/x' must begin with an absolute path"),
    ],
)
def test_relative_paths_in_a_profile_are_refused(prepare_run: Prepare, line: str, message: str) -> None:
    with pytest.raises(ClusterTrainError, match=message):
        prepare_run(text=line)


@pytest.mark.parametrize(
    ("name", "image"),
    [
        ("ubuntu:22.04", "ubuntu:22.04"),
        ("nvcr.io#nvidia/pytorch:25.01-py3", "nvcr.io/nvidia/pytorch:25.01-py3"),
        ("localhost:5000/me/image", "localhost:5000/me/image"),
        ("ghcr.io/me/image@sha256:0a1b", "ghcr.io/me/image@sha256:0a1b"),
    ],
)
def test_images_as_docker_and_pyxis_name_them(prepare_run: Prepare, name: str, image: str) -> None:
    with pytest.raises(ClusterTrainError) as caught:
        prepare_run(container=name)
    assert str(caught.value) == (
        f"--container {shlex.quote(name)}: no such file or folder\n"
        f"  fix: --container docker://{image} for the image of a registry"
    )


@pytest.mark.parametrize("name", ["images/a:1.sif", "images/trainer", "a.sqsh", "/images/a:1", "~/a:1", "./a:1"])
def test_paths_are_no_images_of_a_registry(name: str) -> None:
    assert find_registry_image(name) == ""


def test_file_with_the_name_of_an_image_is_the_file(prepare_run: Prepare, tmp_path: Path) -> None:
    (tmp_path / "ubuntu:22.04").mkdir()
    assert prepare_run(container="ubuntu:22.04").spec.job.container == f"{tmp_path}/ubuntu:22.04"


def test_values_that_come_from_no_option_are_named_by_their_keys(prepare_run: Prepare) -> None:
    with pytest.raises(ClusterTrainError, match="container_mounts = '/a:b': b is not an absolute path"):
        prepare_run(text='container_mounts = ["/a:b"]', container=IMAGE)
    with pytest.raises(ClusterTrainError, match=r"^container_runtime = 'crun': cannot start"):
        checks.check_plan(prepare_run(text='container_runtime = "crun"', container=IMAGE))
