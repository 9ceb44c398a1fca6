"""What containers see of a node: variables, mounts and mount points."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from clustertrain.agent.containers import contents
from clustertrain.config.container import Mount
from clustertrain.config.data import DataSpec
from clustertrain.config.job import JobSpec, RunSpec
from clustertrain.config.recipe import Recipe
from clustertrain.errors import UnsuitableEnvironment
from clustertrain.run.run_dir import RunDir


def test_variables_of_the_node_stay_outside() -> None:
    node = {
        "PATH": "/node/bin", "LD_LIBRARY_PATH": "/node/lib", "CONDA_PREFIX": "/node", "HF_TOKEN": "t",
        "NCCL_DEBUG": "INFO", "SLURM_JOB_ID": "7", "CLUSTERTRAIN_RUN_DIR": "/runs/a", "USER": "u",
        "PYTHONPATH": "/code:/node/site",
    }  # fmt: skip
    node |= {"NCCL_SOCKET_IFNAME": "ib0", "OMP_NUM_THREADS": "8"}  # of the user's shell: the plan leaves them alone
    ranks = {**node, "RANK": "1", "MASTER_ADDR": "n1"}
    assert contents.select_environment(ranks, node, {"HF_TOKEN", "NCCL_DEBUG", "PYTHONPATH"}) == {
        "HF_TOKEN": "t", "NCCL_DEBUG": "INFO", "SLURM_JOB_ID": "7", "CLUSTERTRAIN_RUN_DIR": "/runs/a", "USER": "u",
        "RANK": "1", "MASTER_ADDR": "n1", "NCCL_SOCKET_IFNAME": "ib0", "OMP_NUM_THREADS": "8",
    }  # fmt: skip


def test_python_path_has_only_our_folders_unless_it_is_named() -> None:
    path, own = "/hooks:/runs/a/code/src:/home/u/lib:/runs/ab", [Path("/hooks"), Path("/runs/a")]
    assert contents.select_python_path(path, own, is_named=False) == "/hooks:/runs/a/code/src"
    assert contents.select_python_path(path, own, is_named=True) == path
    assert contents.select_python_path("", own, is_named=False) == ""


def test_variables_of_images(tmp_path: Path) -> None:
    assert contents.read_image_environment("/a.sif", "sif") == {}
    assert contents.read_image_environment(str(tmp_path), "folder") == {"PATH": contents.DEFAULT_PATH}
    (tmp_path / "ch").mkdir()
    (tmp_path / "ch" / "environment").write_text("PATH=/image/bin\nA=b=c\n\n# no variable\n")
    assert contents.read_image_environment(str(tmp_path), "folder") == {"PATH": "/image/bin", "A": "b=c"}
    (tmp_path / "config.json").write_text(json.dumps({"process": {"env": ["B=1", 7, "no variable"]}}))
    assert contents.read_image_environment(str(tmp_path), "bundle") == {"PATH": contents.DEFAULT_PATH, "B": "1"}


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    for name in ("runs/a/code", "shared/checkpoints", "project", "data", "hooks", "ranks"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "runs/a/checkpoints").symlink_to(tmp_path / "shared/checkpoints")
    return RunDir(tmp_path / "runs/a")


def test_mounts_have_each_folder_once_and_parents_first(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contents.tempfile, "gettempdir", lambda: "/var/tmp")
    monkeypatch.setattr(contents, "_SHARED_FOLDER", Path("/run"))  # the test's folder is in /tmp
    spec = RunSpec(job=JobSpec(container_mounts=(f"{tmp_path}/data:/data:ro", "/etc:/var/tmp", f"{tmp_path}/data")))
    mounts = contents.list_mounts(run, spec, str(tmp_path / "project"), tmp_path / "ranks", tmp_path / "hooks")
    paths = [tmp_path / "runs/a", tmp_path / "ranks", tmp_path / "shared/checkpoints", tmp_path / "project"]
    assert set(mounts) == {
        Mount("/run", "/run"), Mount("/etc", "/var/tmp"), Mount(f"{tmp_path}/data", "/data", read_only=True),
        *(Mount(str(p), str(p)) for p in (*paths, tmp_path / "data")),
        Mount(f"{tmp_path}/hooks", f"{tmp_path}/hooks", read_only=True),
    }  # fmt: skip
    depths = [mount.target.count("/") for mount in mounts]
    assert depths == sorted(depths)


def test_data_tokenizer_and_template_are_mounted(run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contents, "_SHARED_FOLDER", Path("/run"))
    for name in ("megatron", "t"):
        (tmp_path / name).mkdir()
    for name in ("chats.jsonl", "mine.jinja", "megatron/a.idx"):
        (tmp_path / name).touch()
    chats = {"kind": "chat", "path": "chats.jsonl", "tokenizer": "t", "chat_template": "mine.jinja"}
    for keys, expected in (
        (chats, ("chats.jsonl", "t", "mine.jinja")),
        ({"kind": "tokens", "path": "megatron/a.idx"}, ("megatron",)),  # its tokens are in another file
    ):
        data = {key: value if key == "kind" else str(tmp_path / value) for key, value in keys.items()}
        spec = RunSpec(recipe=Recipe(data=DataSpec(**data)))
        mounts = contents.list_mounts(run, spec, "/", tmp_path / "ranks", tmp_path / "hooks")
        assert {m.target for m in mounts if m.read_only} == {str(tmp_path / name) for name in (*expected, "hooks")}


def test_mount_that_the_node_lacks(run: RunDir, tmp_path: Path) -> None:
    spec = RunSpec(job=JobSpec(container_mounts=("/no/such/folder:/data",)))
    with pytest.raises(UnsuitableEnvironment, match="/no/such/folder does not exist on this node"):
        contents.list_mounts(run, spec, "/", tmp_path / "ranks", tmp_path / "hooks")


def test_mount_points_are_created_in_the_image_only(tmp_path: Path) -> None:
    root, file = tmp_path / "root", tmp_path / "file"
    file.touch()
    (root / "var").mkdir(parents=True)
    (root / "home").symlink_to(tmp_path / "outside")
    mounts = [Mount("/tmp", "/a/b"), Mount(str(file), "/a/c"), Mount("/tmp", "/home/u/x"), Mount("/tmp", "/var")]
    contents.make_mount_points(root, mounts)
    contents.make_mount_points(root, mounts)
    assert ((root / "a/b").is_dir(), (root / "a/c").is_file()) == (True, True)
    assert not (tmp_path / "outside").exists()
    with pytest.raises(UnsuitableEnvironment, match="/a/c: the image has no such mount point"):
        contents.make_mount_points(root, [Mount("/tmp", "/a/c/d")])
