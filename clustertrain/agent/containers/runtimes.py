"""The command line of each container runtime.

All containers share the node's process IDs, network and IPC, so that the agent, NCCL and the telemetry see the ranks as
processes of the node. The values of variables stay out of the arguments, which all users of a node can read.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Mapping
from pathlib import Path, PurePath

from clustertrain.agent.containers import oci_bundle
from clustertrain.agent.containers.spec import START_SCRIPT, Container, Launch
from clustertrain.config.container import REGISTRY_PREFIX, RuntimeName, format_mount
from clustertrain.errors import UnsuitableEnvironment
from clustertrain.sysinfo.containers import Runtime, find_program

_CONMON = Path(__file__).with_name("conmon")
# An option of crun: the container stays in the control group of the job, which limits it. runc has none.
_IN_CGROUP_OF_JOB = "cgroup-manager=disabled"
_MAX_FILES = 1_048_576  # podman's own, and the kernel's fs.nr_open
# What the program of a runtime itself reads. A different value for the container goes into the arguments.
_OF_CLIENT = frozenset({"PATH", "HOME", "LD_LIBRARY_PATH", "LD_PRELOAD", "TMPDIR", "XDG_RUNTIME_DIR"})


def build_launch(runtime: Runtime, container: Container, node_env: Mapping[str, str]) -> Launch:
    """Return how ``runtime`` starts ``container``; ``node_env`` is the environment of the agent.

    Raises:
        UnsuitableEnvironment: the runtime cannot express a mount or a variable.
    """
    return _BUILDERS[runtime.name](runtime.program, container, node_env)


def build_cleanup(runtime: Runtime, container: Container) -> list[str]:
    """Return the command that removes what a killed container leaves; empty if it leaves nothing."""
    if runtime.name == "podman":
        return [runtime.program, "rm", "--force", "--ignore", "--time=0", container.name]
    if runtime.name in ("crun", "runc"):
        state = [f"--root={container.folder / 'state'}"]
        return [*_oci_program(runtime.program, runtime.name), *state, "delete", "--force", container.name]
    return []


def _apptainer(program: str, container: Container, node_env: Mapping[str, str]) -> Launch:
    is_singularity = PurePath(program).name == "singularity"
    prefix = "SINGULARITYENV_" if is_singularity else "APPTAINERENV_"
    argv = [program, "exec", "--cleanenv", "--no-home"]
    argv += [] if is_singularity else ["--no-eval"]  # otherwise a shell expands the values of variables
    argv += ["--nv"] if container.device == "cuda" else []
    for mount in container.mounts:
        if "," in mount.source + mount.target:
            raise UnsuitableEnvironment(f"{mount.source}: Apptainer cannot mount a path with a comma", fix="rename it")
        argv.append(f"--bind={format_mount(mount)}")
    image = str(container.root or container.image)
    env = {**node_env, **_rank_variables(container), **{prefix + k: v for k, v in container.env.items()}}
    return Launch([*argv, *container.options, image, *container.argv], env)


def _charliecloud(program: str, container: Container, node_env: Mapping[str, str]) -> Launch:
    # ch-run passes on its environment, and itself only needs USER.
    env = {"USER": node_env.get("USER") or str(os.getuid()), **container.env}
    argv = [program]
    for mount in container.mounts:
        if mount.target != "/tmp":  # ch-run mounts it
            argv.append(f"--bind={mount.source}:{mount.target}")
    image = str(container.root or container.image)
    return Launch([*argv, *container.options, image, "--", *container.argv], env)


def _enroot(program: str, container: Container, node_env: Mapping[str, str]) -> Launch:
    # With its own command script, the image's entry point is not run.
    script = container.folder / "start.sh"
    script.write_text(START_SCRIPT)
    argv = [program, "start", f"--rc={script}"]
    for mount in container.mounts:
        kind = "dir" if Path(mount.source).is_dir() else "file"
        options = f"x-create={kind},rbind" + (",ro" if mount.read_only else "")
        argv.append(f"--mount={_escape_fstab(mount.source)}:{_escape_fstab(mount.target)}:none:{options}")
    # Hooks of Enroot mount the driver's libraries and the network devices for these.
    gpu = {"NVIDIA_VISIBLE_DEVICES": "all", "MELLANOX_VISIBLE_DEVICES": "all"} if container.device == "cuda" else {}
    env = {**gpu, **container.env}
    for name, value in env.items():
        if "\n" in value:
            raise UnsuitableEnvironment(f"{name}: Enroot cannot pass a value with a line break", fix="change it")
        argv.append(f"--env={name}")
    return Launch([*argv, *container.options, container.image, *container.start_arguments], {**node_env, **env})


def _podman(program: str, container: Container, node_env: Mapping[str, str]) -> Launch:
    argv = [program, f"--conmon={_CONMON}"] if os.access(_CONMON, os.X_OK) else [program]
    if crun := find_program("crun", node_env):
        argv += [f"--runtime={crun}", f"--runtime-flag={_IN_CGROUP_OF_JOB}"]
    argv += ["run", "--rm", f"--name={container.name}", "--log-driver=none"]
    argv += ["--network=host", "--pid=host", "--ipc=host", "--uts=host", "--cgroups=no-conmon"]
    # Without the first, files on SELinux hosts cannot be read; user 0 is the user of the job if that is not root.
    argv += ["--security-opt=label=disable", "--user=0:0", *_list_limits(), "--entrypoint=/bin/sh"]
    if container.device == "cuda":
        argv.append("--device=nvidia.com/gpu=all")
        argv += ["--device=/dev/infiniband"] if Path("/dev/infiniband").is_dir() else []
    argv += [f"--volume={format_mount(mount)}" for mount in container.mounts]
    env = {**node_env, **_rank_variables(container)}
    for name, value in container.env.items():
        if name in _OF_CLIENT and env.get(name) != value:
            argv.append(f"--env={name}={value}")
        else:
            env[name] = value
            argv.append(f"--env={name}")
    # The overlay keeps the folder of the image as it is.
    image = ["--rootfs", f"{container.root}:O"] if container.root else [_full_name(container.image)]
    return Launch([*argv, *container.options, *image, *container.argv[1:]], env)


def _oci(name: RuntimeName) -> Callable[[str, Container, Mapping[str, str]], Launch]:
    def build(program: str, container: Container, node_env: Mapping[str, str]) -> Launch:
        oci_bundle.write(container)
        argv = [*_oci_program(program, name), f"--root={container.folder / 'state'}", "run"]
        argv += [*container.options, f"--bundle={container.folder}", container.name]
        return Launch(argv, {**node_env, **_rank_variables(container)})

    return build


def _oci_program(program: str, name: RuntimeName) -> list[str]:
    return [program, f"--{_IN_CGROUP_OF_JOB}"] if name == "crun" else [program]


_BUILDERS: dict[RuntimeName, Callable[[str, Container, Mapping[str, str]], Launch]] = {
    "apptainer": _apptainer,
    "charliecloud": _charliecloud,
    "crun": _oci("crun"),
    "enroot": _enroot,
    "podman": _podman,
    "runc": _oci("runc"),
}


def _rank_variables(container: Container) -> dict[str, str]:
    """Return the variables by which the agent recognizes the process of the runtime as that of a rank."""
    return {name: value for name, value in container.env.items() if name in ("RANK", "CLUSTERTRAIN_RANK_DIR")}


def _full_name(image: str) -> str:
    """Return the name of an image as Docker completes it: podman may refuse a name without a registry."""
    name = image.removeprefix(REGISTRY_PREFIX)
    first, slash, _ = name.partition("/")
    if slash and (first == "localhost" or "." in first or ":" in first):
        return name
    return f"docker.io/{name}" if slash else f"docker.io/library/{name}"


def _list_limits() -> list[str]:
    """Return options for the resource limits of this process.

    podman otherwise raises them, which needs a privilege. It lowers its own limit of processes to pid_max.
    """
    limits = []
    largest = {"nofile": (resource.RLIMIT_NOFILE, _MAX_FILES), "nproc": (resource.RLIMIT_NPROC, _read_pid_max())}
    for name, (number, most) in largest.items():
        soft, hard = (most if n == resource.RLIM_INFINITY else min(n, most) for n in resource.getrlimit(number))
        limits.append(f"--ulimit={name}={soft}:{hard}")
    return limits


def _read_pid_max() -> int:
    return int(Path("/proc/sys/kernel/pid_max").read_text())


def _escape_fstab(path: str) -> str:
    return "".join(f"\\{ord(c):03o}" if c in " \t\n\\" else c for c in path)
