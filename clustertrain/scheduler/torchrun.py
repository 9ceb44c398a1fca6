"""How torchrun is started on a node."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from clustertrain import proc
from clustertrain.scheduler.rendezvous import Rendezvous

# A rank that fails leaves its peers in a collective. torchrun would wait 30 s before it kills them, and 300 s at its
# exit barrier for nodes that may be gone.
FAILURE_GRACE_S = 10.0
SHUTDOWN_ENV = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(int(FAILURE_GRACE_S / 2))}


def build_command(
    rdzv: Rendezvous,
    program: Sequence[str],
    ranks: int,
    *,
    nodes: int = 1,
    node_rank: int = 0,
    python: str = "",
    log_dir: Path | None = None,
) -> list[str]:
    """The argument list that starts ``ranks`` ranks of this node, each of which runs ``python -m PROGRAM``. They end
    with this process, which must start them from its main thread.

    Args:
        python: default: the one that runs this.
        log_dir: where torchrun keeps files of its own; default: a new folder in /tmp, which stays when it is killed.
    """
    interpreter = python or sys.executable
    argv = proc.python_module_argv(
        interpreter, "clustertrain.agent.die_with_parent", str(os.getpid()), "torch.distributed.run"
    )
    # Static: ranks follow the node order, so rank 0 sits on the rendezvous host and resumes find their own shards.
    argv += ["--rdzv-backend=static", f"--master-addr={rdzv.host}", f"--master-port={rdzv.port}"]
    argv += [f"--rdzv-id={rdzv.id}", f"--nnodes={nodes}", f"--node-rank={node_rank}"]
    argv += [f"--nproc-per-node={ranks}", "--max-restarts=0", "--signals-to-handle=SIGINT"]
    argv += [f"--log-dir={log_dir}"] if log_dir is not None else []
    # Without --no-python torchrun starts `python -u -m`, which imports from the current folder first.
    return [*argv, "--no-python", interpreter, "-u", *proc.python_module_argv(interpreter, *program)[1:]]
