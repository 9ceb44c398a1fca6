"""The containers of a node's ranks: preparation, command lines, processes, and what is left of killed ones."""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from clustertrain import proc, settings
from clustertrain.agent.containers import contents, runtimes
from clustertrain.agent.containers.spec import Container, Launch
from clustertrain.config.job import RunSpec
from clustertrain.errors import CommandFailed
from clustertrain.run import json_files
from clustertrain.run.run_dir import RunDir
from clustertrain.sysinfo import containers

_CLEANUP_TIMEOUT_S = 30.0
_MAX_SIGNAL = 64


class RankContainers:
    """One container for each rank of a node.

    Args of the constructor:
        node_env: environment of the agent.
        hooks: folder of the rank hooks, which the containers see.
    """

    def __init__(
        self,
        run: RunDir,
        spec: RunSpec,
        *,
        cwd: str,
        rank_dir: Path,
        device: str,
        node_env: Mapping[str, str],
        hooks: Path,
    ) -> None:
        """Raise ConfigError or UnsuitableEnvironment if this node lacks the image, a mount or the runtime."""
        job = spec.job
        self._image = job.container
        self._kind = containers.find_image_kind(job.container)
        self.runtime = containers.choose_runtime(job.container, self._kind, job.container_runtime, node_env)
        is_folder = self._kind in ("folder", "bundle")
        self._root = containers.find_root_folder(job.container, self._kind).absolute() if is_folder else None
        self._mounts = contents.list_mounts(run, spec, cwd, rank_dir, hooks)
        if self.runtime.name == "charliecloud" and self._root is not None:
            contents.make_mount_points(self._root, self._mounts)
        self._image_env = contents.read_image_environment(job.container, self._kind)
        self._named = contents.list_named_variables(spec, json_files.poll_document(run.plan))
        self._own_folders = (run.path, run.code.resolve(), hooks)
        self._cwd, self._rank_dir, self._device, self._node_env = cwd, rank_dir, device, node_env
        self._options = job.container_options
        self._folder = rank_dir / "containers"
        self._containers: dict[int, Container] = {}

    def build_launch(self, rank: int, command: Sequence[str], rank_env: Mapping[str, str]) -> Launch:
        """Return what the agent executes to start ``command`` as a rank; called once for each rank."""
        folder = self._folder / str(rank)
        folder.mkdir(parents=True)
        env = {**self._image_env, **contents.select_environment(rank_env, self._node_env, self._named)}
        container = self._containers[rank] = Container(
            name=f"{self._rank_dir.name}-{rank}",
            image=self._image,
            kind=self._kind,
            root=self._root,
            command=tuple(command),
            cwd=self._cwd or "/",
            python_path=contents.select_python_path(
                rank_env.get("PYTHONPATH", ""), self._own_folders, is_named="PYTHONPATH" in self._named
            ),
            env=env,
            mounts=self._mounts,
            folder=folder,
            pid_path=self._rank_dir / f"program-{rank}.pid",
            device=self._device,
            options=self._options,
        )
        launch = runtimes.build_launch(self.runtime, container, self._node_env)
        self._write_cleanup_script()
        return launch

    def has_started(self, rank: int) -> bool:
        """Return whether the container of a rank has begun to execute; False if the runtime could not start it."""
        return self._containers[rank].pid_path.exists()

    def read_pid(self, rank: int) -> int | None:
        """Return the PID that the container of a rank has written; None if it has not started."""
        with contextlib.suppress(OSError, ValueError):
            return int(self._containers[rank].pid_path.read_text())
        return None

    def find_program(self, rank: int) -> int | None:
        """Return the PID of the rank's program on the node; None if it has not started or has ended."""
        pid = self.read_pid(rank)
        with contextlib.suppress(OSError):
            # The runtime may give the container process IDs of its own, against its options.
            entry = f"{settings.RANK_DIR}={self._rank_dir}".encode()
            return pid if entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") else None
        return None

    def to_exit_code(self, code: int) -> int:
        """Return the exit code of the program, negative for a signal, from that of the runtime's process."""
        has_become_program = self.runtime.name in ("charliecloud", "enroot")
        return 128 - code if 128 < code <= 128 + _MAX_SIGNAL and not has_become_program else code

    def clean_up(self, rank: int) -> None:
        """Remove what the killed container of a rank has left."""
        if argv := runtimes.build_cleanup(self.runtime, self._containers[rank]):
            try:
                proc.run(argv, timeout_s=_CLEANUP_TIMEOUT_S, env=self._node_env, check=False)
            except CommandFailed as e:
                print(f"clustertrain agent: {e}", file=sys.stderr, flush=True)

    def _write_cleanup_script(self) -> None:
        """Write the clean-up for agent_end.sh, which runs it if the agent is killed."""
        commands = [runtimes.build_cleanup(self.runtime, c) for c in self._containers.values()]
        lines = [f"{shlex.join(argv)} >/dev/null 2>&1\n" for argv in commands if argv]
        (self._folder / "clean-up.sh").write_text("".join(lines))
