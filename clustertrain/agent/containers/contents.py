"""What a container sees of its node: environment variables, files and folders."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path, PurePath
from typing import Any

from clustertrain import reading
from clustertrain.config.container import Mount, parse_mount
from clustertrain.config.job import RunSpec
from clustertrain.errors import UnsuitableEnvironment
from clustertrain.run.run_dir import RunDir
from clustertrain.sysinfo.containers import ImageKind, read_bundle

DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# Of the variables that nobody named, only these enter. Most others describe the node's file system (PATH, HOME,
# LD_LIBRARY_PATH, CONDA_PREFIX, SSL_CERT_FILE) and would break the image.
_PREFIXES = ("CLUSTERTRAIN_", "SLURM_", "NCCL_", "TORCH_NCCL_", "GLOO_", "UCX_", "OMP_")
_NAMES = frozenset({"CUDA_DEVICE_ORDER", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "LOGNAME", "TMPDIR", "USER"})
_CHARLIECLOUD_ENVIRONMENT = "ch/environment"
_SHARED_FOLDER = Path("/tmp")  # by the ranks of a node, as without containers
_PYTHON_PATH = "PYTHONPATH"


def select_environment(
    rank_env: Mapping[str, str], node_env: Mapping[str, str], named: Collection[str]
) -> dict[str, str]:
    """Return the variables of a rank that enter its container.

    These are the ones that the agent has set, those in ``named`` (by the user, the profile or the plan), and those of
    the job. ``PYTHONPATH`` is passed separately, because the image may have one.
    """
    return {
        name: value
        for name, value in rank_env.items()
        if name != _PYTHON_PATH
        and (name in named or name in _NAMES or name.startswith(_PREFIXES) or node_env.get(name) != value)
    }


def select_python_path(python_path: str, own_folders: Iterable[Path], *, is_named: bool) -> str:
    """Return the entries of ``PYTHONPATH`` in ``own_folders``; all if the user has named the variable for the job."""
    folders = tuple(own_folders)
    entries = python_path.split(os.pathsep) if python_path else []
    return os.pathsep.join(e for e in entries if is_named or any(PurePath(e).is_relative_to(f) for f in folders))


def read_image_environment(image: str, kind: ImageKind) -> dict[str, str]:
    """Return the variables of an image that its runtime may not set: those of a folder or an OCI bundle."""
    if kind == "bundle":
        lines = read_bundle(Path(image)).get("process", {}).get("env", [])
    elif kind == "folder":
        try:
            lines = reading.read_text(Path(image) / _CHARLIECLOUD_ENVIRONMENT).splitlines()
        except (OSError, ValueError):
            lines = []
    else:
        return {}
    variables = dict(line.split("=", 1) for line in lines if isinstance(line, str) and "=" in line)
    return {"PATH": DEFAULT_PATH, **variables}


def list_mounts(run: RunDir, spec: RunSpec, cwd: str, rank_dir: Path, hooks: Path) -> tuple[Mount, ...]:
    """Return what every container sees, parents before their children; the user's mounts replace others.

    Raises:
        UnsuitableEnvironment: a path contains a colon, or a mount of the user does not exist on this node.
    """
    folders = [_SHARED_FOLDER, Path(tempfile.gettempdir()), rank_dir, run.path, run.code.resolve()]
    folders += [run.checkpoints.resolve(), *([Path(cwd)] if cwd not in ("", "/") else [])]
    # The files of other tools have others beside them.
    data = [p.parent if p.suffix in (".idx", ".ds") else p for p in spec.recipe.data_files.values()]
    weight_files = (*spec.recipe.model.weight_files.values(), spec.recipe.adapter.init)
    weights = [Path(path) for path in weight_files if path]
    read_only = [hooks, *data, *weights]
    folders = [p for p in dict.fromkeys(folders) if p.exists()]
    mounts = {
        str(p): Mount(str(p), str(p)) for p in folders if not any(p != o and p.is_relative_to(o) for o in folders)
    }
    mounts |= {str(p): Mount(str(p), str(p), read_only=True) for p in read_only if p.exists()}
    if colons := [path for path in mounts if ":" in path]:
        raise UnsuitableEnvironment(f"{colons[0]}: a container cannot mount a path with a colon", fix="rename it")
    for text in spec.job.container_mounts:
        mount = parse_mount(text)
        if not Path(mount.source).exists():
            raise UnsuitableEnvironment(
                f"container_mounts: {mount.source} does not exist on this node", fix="correct or remove the mount"
            )
        mounts[mount.target] = mount
    return tuple(sorted(mounts.values(), key=lambda mount: len(PurePath(mount.target).parts)))


def make_mount_points(root: Path, mounts: Iterable[Mount]) -> None:
    """Create what is missing in a root file system for mounts, as runc and podman do; Charliecloud does not.

    A symbolic link on the way is left to the runtime: it may lead out of the image.

    Raises:
        UnsuitableEnvironment: the folder of the image cannot be written.
    """
    for mount in mounts:
        path = root
        *parents, name = PurePath(mount.target).parts[1:] or ("",)
        try:
            for part in parents:
                path /= part
                if path.is_symlink():
                    break
                path.mkdir(exist_ok=True)
            else:
                path /= name
                if path.is_symlink() or path.exists():
                    continue
                if Path(mount.source).is_dir():
                    path.mkdir(exist_ok=True)
                else:
                    path.touch()
        except OSError as e:
            raise UnsuitableEnvironment(
                f"{path}: the image has no such mount point, and it cannot be created: {e.strerror}",
                fix=f"create it in the image: mkdir -p {root}{mount.target}",
            ) from e


def list_named_variables(spec: RunSpec, plan: Mapping[str, Any]) -> set[str]:
    """Return the variables that the user, the profile or the plan has named for this run."""
    of_plan = (plan.get(key) for key in ("nccl", "env"))
    return {*spec.env, *spec.secret_env, *(name for table in of_plan if isinstance(table, dict) for name in table)}
