"""Where an agent is: which node of which attempt, and what it has to start there."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from clustertrain import settings
from clustertrain.errors import ClusterTrainError, EnvironmentNotFit
from clustertrain.run import json_files
from clustertrain.run.run_dir import AttemptDir, RunDir, open_run


@dataclass(frozen=True)
class Place:
    """Which node of which attempt this is, and what it has to start."""

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
    def on_one_host(self) -> bool:
        """All nodes, so this one: those of the local backend are on this machine."""
        return len(self.nodes) == 1 or settings.LOCAL_JOB in self.environ


def place_from(environ: Mapping[str, str]) -> Place:
    """Raises EnvironmentNotFit when the run directory that the job was started for is not the one seen here."""
    node = environ.get(settings.NODE) or environ.get(settings.SLURMD_NODENAME) or socket.gethostname()
    node_rank = int(environ.get(settings.NODE_RANK) or environ.get(settings.SLURM_NODEID) or 0)
    run_dir = Path(environ[settings.RUN_DIR])
    try:
        attempt = RunDir(run_dir).attempt(int(environ[settings.ATTEMPT]))
        seen = attempt.nonce.read_text()
        run = open_run(run_dir)
    except (OSError, ClusterTrainError) as e:
        raise _unseen(node, run_dir, str(e)) from e
    if seen != environ[settings.NONCE]:
        raise _unseen(node, run_dir, "another attempt's nonce is there")
    plan, trouble = json_files.read(run.plan)
    if not plan:
        raise EnvironmentNotFit(trouble or f"{run.plan} is missing", fix="submit the run again")
    return Place(
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


def _unseen(node: str, run_dir: Path, why: str) -> EnvironmentNotFit:
    return EnvironmentNotFit(
        f"node {node} does not see the run directory {run_dir} of the batch host ({why})",
        fix=f"set {settings.HOME} to a filesystem that all nodes mount at the same path",
    )
