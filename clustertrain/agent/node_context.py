"""The place of an agent: its node and attempt, and the ranks that it starts."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from clustertrain import settings
from clustertrain.errors import ClusterTrainError, UnsuitableEnvironment
from clustertrain.run import json_files
from clustertrain.run.run_dir import AttemptDir, RunDir, open_run


@dataclass(frozen=True)
class NodeContext:
    """The node and attempt of an agent, and the ranks that it starts."""

    run: RunDir
    attempt: AttemptDir
    node: str
    node_rank: int
    nodes: tuple[str, ...]
    ranks_per_node: int
    device: str
    grace_s: float | None
    environ: Mapping[str, str]

    @property
    def ranks(self) -> list[int]:
        first = self.node_rank * self.ranks_per_node
        return list(range(first, first + self.ranks_per_node))

    @property
    def is_single_host(self) -> bool:
        """Whether all nodes are this machine, as with the local backend."""
        return len(self.nodes) == 1 or settings.LOCAL_JOB in self.environ


def load_node_context(environ: Mapping[str, str]) -> NodeContext:
    """Return the context of this agent; raise UnsuitableEnvironment if this node does not see the job's run folder."""
    node = environ.get(settings.NODE) or environ.get(settings.SLURMD_NODENAME) or socket.gethostname()
    node_rank = int(environ.get(settings.NODE_RANK) or environ.get(settings.SLURM_NODEID) or 0)
    run_dir = Path(environ[settings.RUN_DIR])
    try:
        attempt = RunDir(run_dir).attempt(int(environ[settings.ATTEMPT]))
        nonce = attempt.nonce.read_text()
        run = open_run(run_dir)
    except (OSError, ClusterTrainError) as e:
        raise _not_visible_error(node, run_dir, str(e)) from e
    if nonce != environ[settings.NONCE]:
        raise _not_visible_error(node, run_dir, "it holds the nonce of another attempt")
    plan, error = json_files.load_document(run.plan)
    if not plan:
        raise UnsuitableEnvironment(error or f"{run.plan} is missing", fix="submit the run again")
    return NodeContext(
        run=run,
        attempt=attempt,
        node=node,
        node_rank=node_rank,
        nodes=tuple(environ[settings.NODE_LIST].split(",")),
        ranks_per_node=int(plan["gpus_per_node"]),
        device=str(plan["device"]),
        grace_s=plan["grace_s"],
        environ=environ,
    )


def _not_visible_error(node: str, run_dir: Path, reason: str) -> UnsuitableEnvironment:
    return UnsuitableEnvironment(
        f"node {node} does not see the run folder {run_dir} of the batch host ({reason})",
        fix=f"set {settings.HOME} to a filesystem that all nodes mount at the same path",
    )
