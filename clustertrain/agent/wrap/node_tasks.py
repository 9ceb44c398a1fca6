"""The tasks of one node: the first one runs the agent, and the others wait for it without using a core.

They meet at a socket in the kernel's abstract namespace, which needs no file and closes with its process.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import struct

from clustertrain import clock
from clustertrain.errors import EXIT_FAILED, ClusterTrainError
from clustertrain.scheduler.slurm_step import StepTask

START_S = 600.0  # for all tasks to start: Python on a busy network file system takes minutes
RETRY_S = 0.2
_MAX_BYTES = 1 << 16


def _socket_name(task: StepTask) -> bytes:
    name = f"clustertrain-{os.getuid()}-{task.job_id}-{task.restart}-{task.step}-{task.node}"
    return b"\0" + re.sub(r"[^\w.-]", "_", name)[:100].encode()


class NodeTasks:
    """The other tasks of this node, for its first task."""

    def __init__(self, task: StepTask) -> None:
        self._connections: list[socket.socket] = []
        self._task = task
        self._server: socket.socket | None = None
        if task.tasks_per_node > 1:
            self._server = socket.socket(socket.AF_UNIX)
            try:
                self._server.bind(_socket_name(task))
            except OSError as e:
                raise ClusterTrainError(f"{task.node}: no socket for the tasks of the node: {e.strerror}") from e
            self._server.listen(task.tasks_per_node)

    def gather(self) -> None:
        """Wait for the other tasks, and let this one run on the cores of all.

        Raises:
            ClusterTrainError: a task has not started.
        """
        if self._server is None:
            return
        cores = set(os.sched_getaffinity(0))
        self._server.settimeout(START_S)
        expected = self._task.tasks_per_node - 1
        while len(self._connections) < expected:
            try:
                connection, _ = self._server.accept()
            except TimeoutError as e:
                raise ClusterTrainError(
                    f"{expected - len(self._connections)} of {expected + 1} tasks on {self._task.node} have not started"
                    f" in {START_S:g} s"
                ) from e
            if not _is_own(connection):
                connection.close()
                continue
            cores |= _receive_cores(connection)
            self._connections.append(connection)
        with contextlib.suppress(OSError):  # a core was taken offline
            os.sched_setaffinity(0, cores)

    def release(self, exit_code: int) -> None:
        """Let the other tasks exit with ``exit_code``."""
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.sendall(bytes([exit_code & 0xFF]))
        self.close()

    def close(self) -> None:
        """Close all sockets, as the kernel does when this process is killed."""
        for connection in (*self._connections, *([self._server] if self._server else [])):
            connection.close()


def wait_for_first_task(task: StepTask) -> int:
    """Return the exit code of the node's first task, after it has ended; 1 if it was killed.

    Raises:
        ClusterTrainError: the first task does not start.
    """
    connection = socket.socket(socket.AF_UNIX)

    def try_connect() -> bool:
        try:
            connection.connect(_socket_name(task))
        except OSError:
            return False
        return True

    with connection:
        if not clock.wait_until(try_connect, START_S, RETRY_S) or not _is_own(connection):
            raise ClusterTrainError(f"the first task on {task.node} has not started in {START_S:g} s")
        try:
            connection.sendall(json.dumps(sorted(os.sched_getaffinity(0))).encode() + b"\n")
            answer = connection.recv(1)
        except OSError:
            answer = b""
    return answer[0] if answer else EXIT_FAILED


def _is_own(connection: socket.socket) -> bool:
    """Return whether the other end belongs to this user: every user of the node may connect."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return bool(struct.unpack("3i", credentials)[1] == os.getuid())


def _receive_cores(connection: socket.socket) -> set[int]:
    connection.settimeout(START_S)
    data = b""
    with contextlib.suppress(OSError, ValueError):
        while not data.endswith(b"\n") and len(data) < _MAX_BYTES:
            chunk = connection.recv(_MAX_BYTES)
            if not chunk:
                return set()
            data += chunk
        return set(json.loads(data))
    return set()
