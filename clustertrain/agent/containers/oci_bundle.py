"""The OCI bundle of one rank: the image's configuration with our process, mounts and namespaces."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from clustertrain import fsio
from clustertrain.agent.containers.spec import Container
from clustertrain.config.container import Mount
from clustertrain.sysinfo.containers import read_bundle

# The node's, so that its process IDs, shared memory, GPUs and network devices are in the container. A user without
# privileges could not mount a new /proc or /sys beside the node's process IDs and network.
_SYSTEM_FOLDERS = ("/proc", "/sys", "/dev")
# What Docker leaves to root in a container.
_CAPABILITIES = (
    "CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_FSETID", "CAP_KILL", "CAP_NET_BIND_SERVICE", "CAP_SETFCAP",
    "CAP_SETGID", "CAP_SETPCAP", "CAP_SETUID", "CAP_SYS_CHROOT",
)  # fmt: skip
_NVIDIA_HOOK = Path("/usr/bin/nvidia-container-runtime-hook")


def write(container: Container) -> None:
    """Write ``config.json`` into the container's folder, which only its owner can read."""
    config = read_bundle(Path(container.image)) if container.kind == "bundle" else {}
    fsio.write_json(container.folder / "config.json", build_config(container, config))


def build_config(container: Container, image: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration; ``image`` is that of the image's bundle, empty for a folder.

    Of the image's configuration the root file system, the seccomp filter and the hooks remain. Its resource limits are
    dropped: those of the job apply.
    """
    uid, gid = os.geteuid(), os.getegid()
    process: dict[str, Any] = {
        "terminal": False,
        "user": {"uid": 0, "gid": 0},
        "args": list(container.argv),
        "env": [f"{name}={value}" for name, value in container.env.items()],
        "cwd": "/",
        "noNewPrivileges": True,
        "capabilities": {kind: list(_CAPABILITIES) for kind in ("bounding", "effective", "permitted")},
    }
    namespaces: list[dict[str, str]] = [{"type": "mount"}]
    linux: dict[str, Any] = {"namespaces": namespaces, "resources": {"devices": [{"allow": True, "access": "rwm"}]}}
    if uid:
        namespaces.append({"type": "user"})
        # runc requires that root is mapped. Files belong to the user outside.
        linux["uidMappings"] = [{"containerID": 0, "hostID": uid, "size": 1}]
        linux["gidMappings"] = [{"containerID": 0, "hostID": gid, "size": 1}]
    if seccomp := image.get("linux", {}).get("seccomp"):
        linux["seccomp"] = seccomp
    hooks = dict(image.get("hooks") or {})
    if container.device == "cuda" and _NVIDIA_HOOK.exists():
        nvidia = {"path": str(_NVIDIA_HOOK), "args": [_NVIDIA_HOOK.name, "prestart"]}
        hooks["prestart"] = [*hooks.get("prestart", ()), nvidia]
        gpu = {"NVIDIA_VISIBLE_DEVICES": "all", "NVIDIA_DRIVER_CAPABILITIES": "compute,utility"}
        process["env"] = [f"{n}={v}" for n, v in {**gpu, **container.env}.items()]
    return {
        "ociVersion": image.get("ociVersion", "1.0.2"),
        "process": process,
        "root": {"path": str(container.root), "readonly": image.get("root", {}).get("readonly", True)},
        "mounts": [*(_bind(Mount(path, path)) for path in _SYSTEM_FOLDERS), *map(_bind, container.mounts)],
        "linux": linux,
        **({"hooks": hooks} if hooks else {}),
    }


def _bind(mount: Mount) -> dict[str, Any]:
    options = ["rbind", "rprivate", "ro" if mount.read_only else "rw"]
    return {"destination": mount.target, "type": "bind", "source": mount.source, "options": options}
