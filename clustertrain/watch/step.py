"""The step that samples the nodes of a job: `srun --overlap`, which takes none of the job's resources.

One srun starts all nodes if they are alike, as in nearly all jobs. It must ask for all of the job's GPUs, or the step
would not see them; with ``--overlap`` the other steps keep them. The step lives as long as the
standard input of srun is open, so it ends with this process, however that ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO

import msgspec

import clustertrain
from clustertrain import clock, proc, reading, settings
from clustertrain.scheduler import slurm_job, slurm_parse
from clustertrain.scheduler.slurm import COMMAND_TIMEOUT_S, client_environ
from clustertrain.scheduler.slurm_job import NodeGroup
from clustertrain.watch.node_request import NodeRequest

STEP_NAME = "clustertrain-watch"
END_S = 6.0  # for the samplers to write what they hold
_EXIT = re.compile(r"srun: error: (\S+): tasks? \S+: \S")
READ_S = 1.0  # for the rest of the output, which a process that outlives srun may keep open
_LABELED = re.compile(r"^ *(\d+): (.*)$")
_MAX_LINES = 40
# Nothing of the request is part of the script: it is "$@".
_START = (
    'printf "{\\"node\\": \\"%s\\"}\\n" "$SLURMD_NODENAME"; if [ -x "$0" ]; then exec "$0" "$@"; fi; '
    'echo "there is no Python at $0; clustertrain must be installed at the same path on all nodes" >&2; exit 78'
)
# Printed by every srun of some sites, or as a consequence of another error.
_NOISE = ("lacks support for cpu binding", "Terminating StepId", "Exited with exit code", "Check SLURM_JOB_ID")


class WatchStep:
    """The samplers on all nodes of a job.

    Attributes:
        ready: nodes that are sampled.
        errors: why a node is not sampled, by node.
    """

    def __init__(self, request: NodeRequest, groups: Sequence[NodeGroup], environ: dict[str, str]) -> None:
        self.ready: set[str] = set()
        self.errors: dict[str, str] = {}
        self.step_ids: set[str] = set()
        self._request = request
        self._groups = _split_groups(groups)
        self._lines: list[deque[str]] = [deque(maxlen=_MAX_LINES) for _ in self._groups]
        self._exited: set[str] = set()
        self._by_task: dict[tuple[int, int], deque[str]] = {}  # by group and task, what is not a report
        self._node_names: dict[tuple[int, int], str] = {}
        self._lock = threading.Lock()
        self._readers: list[threading.Thread] = []
        self._sruns = [self._start(number, group, environ) for number, group in enumerate(self._groups)]

    def _start(self, number: int, group: NodeGroup, environ: dict[str, str]) -> subprocess.Popen[bytes]:
        has_gpus = group.gpus > 0 or not slurm_job.has_managed_gpus(group.nodes[0])
        request = msgspec.structs.replace(self._request, memory_mib=group.memory_mib, has_gpus=has_gpus)
        argv = build_srun(self._request.number, group, request)
        child = proc.start_with_pipes(argv, env=environ)
        for stream in (child.stdout, child.stderr):
            reader = threading.Thread(target=self._read, args=(stream, number), name="watch-step", daemon=True)
            reader.start()
            self._readers.append(reader)
        return child

    def _read(self, stream: IO[bytes], group: int) -> None:
        with stream:
            for raw in stream:
                line = raw.decode(errors="replace").rstrip()
                match = _LABELED.match(line)
                with self._lock:
                    if match is None:
                        self._lines[group].append(line)
                        self._exited |= _parse_exit(line)
                    else:
                        self._add_line(match[2], (group, int(match[1])))

    def _add_line(self, text: str, task: tuple[int, int]) -> None:
        report = _parse_report(text)
        if report is None:
            self._by_task.setdefault(task, deque(maxlen=_MAX_LINES)).append(text)
            return
        name = self._node_names[task] = str(report["node"])
        if "error" not in report:  # the node has started its Python
            return
        if report["error"]:
            self.errors[name] = str(report["error"])
        else:
            self.ready.add(name)
        if reading.is_unsigned_int(str(report.get("step"))):
            self.step_ids.add(str(report["step"]))

    @property
    def answered(self) -> set[str]:
        """Nodes that are sampled, or known not to be."""
        return self.ready | self.errors.keys() | self._exited | self._ended_nodes()

    @property
    def has_started(self) -> bool:
        """Whether Slurm has started a task, which then says itself what is wrong."""
        return bool(self._node_names)

    def _ended_nodes(self) -> set[str]:
        """Return the nodes whose srun has ended."""
        ended = (g for g, srun in zip(self._groups, self._sruns, strict=True) if srun.poll() is not None)
        return {node for group in ended for node in group.nodes}

    @property
    def is_alive(self) -> bool:
        """Whether a node may still be sampled."""
        return any(srun.poll() is None for srun in self._sruns)

    def beat(self) -> None:
        """Extend the lease of the samplers."""
        for srun in self._sruns:
            with contextlib.suppress(OSError, ValueError):  # it has ended
                assert srun.stdin is not None
                srun.stdin.write(b".\n")
                srun.stdin.flush()

    def describe_failure(self) -> str:
        """Return what srun printed, without what follows from it; empty if it printed nothing."""
        self._join_readers()
        with self._lock:
            return "; ".join(dict.fromkeys(filter(None, map(_join_messages, self._lines))))

    def node_errors(self) -> dict[str, str]:
        """Return by node why it is not sampled. A node that is not ready while others are is still starting."""
        if self._ended_nodes():
            self._join_readers(quick=self.is_alive)
        with self._lock:
            errors = dict(self.errors)
            for (group, task), lines in self._by_task.items():
                node = self._node_names.get((group, task), f"task {task}")
                if node not in self.ready and node not in errors:
                    errors[node] = _shorten(lines)
            for node in self._exited - self.ready:
                errors.setdefault(node, "its sampler ended without output")
            ended = self._ended_nodes()
            for nodes, messages in zip(self._groups, self._lines, strict=True):
                for node in ended.intersection(nodes.nodes) - self.ready:
                    errors.setdefault(node, _join_messages(messages) or "srun printed nothing")
        return errors

    def _join_readers(self, *, quick: bool = False) -> None:
        """Wait for the rest of the output of each srun that has ended."""
        deadline = clock.monotonic() + (READ_S / 4 if quick else READ_S)
        for reader in self._readers:
            reader.join(max(0.0, deadline - clock.monotonic()))

    def close(self) -> None:
        """End the samplers and wait for them; kill the step if they do not answer."""
        self._end()
        self._join_readers()

    def _end(self) -> None:
        for srun in self._sruns:
            with contextlib.suppress(OSError):
                assert srun.stdin is not None
                srun.stdin.close()
        if clock.wait_until(lambda: not self.is_alive, END_S, 0.02):
            return
        steps = [f"{self._request.number}.{step}" for step in sorted(self.step_ids)]
        if steps:
            with contextlib.suppress(Exception):  # the edge of this command: the lease ends the samplers anyway
                proc.run(
                    ["scancel", "--signal=KILL", *steps],
                    env=client_environ(os.environ),
                    check=False,
                    timeout_s=COMMAND_TIMEOUT_S,
                )
        for srun in self._sruns:
            srun.terminate()
        if not clock.wait_until(lambda: not self.is_alive, 2.0, 0.05):
            for srun in self._sruns:
                srun.kill()


def build_srun(number: str, group: NodeGroup, request: NodeRequest) -> list[str]:
    """Return the command of the step on the nodes of a group."""
    count = str(len(group.nodes))
    options = [
        f"--jobid={number}",
        "--overlap",
        f"--nodelist={','.join(group.nodes)}",
        f"--nodes={count}",
        f"--ntasks={count}",
        "--ntasks-per-node=1",
        "--mem=0",  # none of the job's memory is set aside for the step
        _gpu_option(group),
        "--cpu-bind=none",
        "--mpi=none",
        "--kill-on-bad-exit=0",
        "--no-kill",  # the end of one node does not end the others
        "--wait=0",
        "--input=all",
        "--label",
        "--chdir=/",  # a core file, for example, must not end up in the job's folder
        f"--job-name={STEP_NAME}",
    ]
    body = msgspec.json.encode(request).decode()
    python = proc.python_module_argv(sys.executable, "clustertrain", "watch-node", body)
    return ["srun", *options, "/bin/sh", "-c", _START, *python]


def _gpu_option(group: NodeGroup) -> str:
    if not group.gpus:
        return "--gres=none"
    return f"--gpus-per-node={group.gpus}" if len(group.nodes) > 1 else f"--gpus={group.gpus}"


def _split_groups(groups: Sequence[NodeGroup]) -> list[NodeGroup]:
    """Return one group if all nodes are alike, otherwise one for each node.

    Slurm 22.05 compares the GPUs per node with only one of the job's nodes, and refuses the right number of another.
    """
    if len(groups) == 1:
        return list(groups)
    return [group._replace(nodes=(node,)) for group in groups for node in group.nodes]


def _join_messages(lines: Iterable[str]) -> str:
    """Return Slurm's messages on one line, without those that follow from another one."""
    messages = (re.sub(r"^srun:( error:)? ", "", line) for line in lines)
    return "; ".join(dict.fromkeys(line for line in messages if line and not any(n in line for n in _NOISE)))


def step_environ(environ: dict[str, str]) -> dict[str, str]:
    """Return the environment of the step: the user's, without an enclosing job and without chosen GPUs."""
    env = settings.strip_allocation_env(environ)
    env.pop(settings.CUDA_VISIBLE_DEVICES, None)
    # The step starts in another folder.
    package = str(Path(clustertrain.__file__).resolve().parents[1])
    paths = [str(Path(p).absolute()) for p in env.get("PYTHONPATH", "").split(":") if p]
    if "site-packages" not in package and package not in paths:
        paths.append(package)
    return {**env, "PYTHONPATH": ":".join(paths)} if paths else env


def _parse_report(text: str) -> dict[str, object] | None:
    """Return the report of a node; None for other output."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) and isinstance(value.get("node"), str) else None


def _parse_exit(line: str) -> set[str]:
    """Return the nodes whose task has ended, from a line such as ``srun: error: n[1-2]: tasks 0-1: Exited with …``."""
    match = _EXIT.match(line)
    try:
        return set(slurm_parse.expand_nodes(match[1])) if match else set()
    except ValueError:
        return set()


def _shorten(lines: Iterable[str]) -> str:
    """Return the last line that says something, which of a traceback is the error."""
    return next((line.strip() for line in reversed(list(lines)) if line.strip()), "it ended without output")
