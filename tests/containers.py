"""A container image for tests: an OCI bundle without files, in which this machine's programs are mounted."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from clustertrain.config.container import RuntimeName
from clustertrain.sysinfo.containers import find_program
from tests.paths import ROOT

# The runtimes that Debian has. They are installed by slurm/install-packages.
RUNTIMES: tuple[RuntimeName, ...] = ("charliecloud", "podman", "runc", "crun")
IMAGE_VARIABLE = "IMAGE_VARIABLE"
_HYBRID_HIERARCHY = Path("/sys/fs/cgroup/unified")


def require(runtime: RuntimeName) -> None:
    """Skip the test if the runtime cannot run here; fail instead where CI requires the packages."""
    if os.geteuid() == 0 and find_program(runtime, os.environ):
        return
    if os.environ.get("CLUSTERTRAIN_REQUIRE_SLURM") == "1":
        pytest.fail(f"{runtime} is not installed, or this is not root")
    pytest.skip(f"needs {runtime} and root: run slurm/install-packages")


def write_bundle(folder: Path) -> Path:
    """Write an OCI bundle whose first Python is that of the tests; return its folder."""
    bundle = folder / "image"
    root = bundle / "rootfs"
    for name in ("dev", "etc", "proc", "root", "run", "sys", "tmp", "usr", "var"):
        (root / name).mkdir(parents=True)
    for name in ("bin", "lib", "lib64", "sbin"):
        (root / name).symlink_to(f"usr/{name}")
    for name in ("passwd", "group", "hosts", "resolv.conf"):
        (root / "etc" / name).touch()
    env = [f"PATH={Path(sys.executable).parent}:/usr/bin:/bin", f"{IMAGE_VARIABLE}=1"]
    config = {"ociVersion": "1.0.2", "root": {"path": "rootfs", "readonly": True}, "process": {"cwd": "/", "env": env}}
    (bundle / "config.json").write_text(json.dumps(config))
    return bundle


def mount_options() -> list[str]:
    """Return options that mount the Python of the tests and clustertrain, as an image would contain them."""
    folders = [Path(p).resolve() for p in (sys.prefix, sys.base_prefix, ROOT)]
    outermost = [p for p in dict.fromkeys(folders) if not any(p != o and p.is_relative_to(o) for o in folders)]
    mounts = ["/usr:/usr:ro", *(f"{p}:{p}:ro" for p in outermost if not p.is_relative_to("/usr"))]
    return [f"--container-mount={mount}" for mount in mounts]


def runtime_path(folder: Path) -> str:
    """Return a PATH with a crun that works on this machine: it refuses one with cgroup v1 and v2 at once."""
    path = os.environ["PATH"]
    crun = find_program("crun", os.environ)
    if not crun or not _HYBRID_HIERARCHY.is_dir():
        return path
    wrapper = folder / "bin" / "crun"
    wrapper.parent.mkdir()
    hide = f'umount {_HYBRID_HIERARCHY} && exec {crun} "$@"'
    wrapper.write_text(f"#!/bin/sh\nexec unshare --mount --propagation private sh -c '{hide}' crun \"$@\"\n")
    wrapper.chmod(0o755)
    return f"{wrapper.parent}:{path}"
