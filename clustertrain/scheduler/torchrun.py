"""The command line of torchrun on a node."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from clustertrain import proc
from clustertrain.scheduler.rendezvous import Rendezvous

# The peers of a failed rank wait in a collective. torchrun would kill them only after 30 s, and wait 300 s at its exit
# barrier for nodes that may be gone.
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
    """Return the arguments that start ``ranks`` ranks on this node, each with ``python -m PROGRAM``.

    The ranks end with this process, which must start the command from its main thread.

    Args:
        python: the interpreter; default: that of this process.
        log_dir: folder of torchrun's files; default: a new folder in /tmp, which remains if torchrun is killed.
    """
    interpreter = python or sys.executable
    argv = proc.python_module_argv(
        interpreter, "clustertrain.agent.ranks.die_with_parent", str(os.getpid()), "torch.distributed.run"
    )
    # Static: ranks follow the node order, so rank 0 runs on the rendezvous host and resumed ranks find their shards.
    argv += ["--rdzv-backend=static", f"--master-addr={rdzv.host}", f"--master-port={rdzv.port}"]
    argv += [f"--rdzv-id={rdzv.id}", f"--nnodes={nodes}", f"--node-rank={node_rank}"]
    argv += [f"--nproc-per-node={ranks}", "--max-restarts=0", "--signals-to-handle=SIGINT"]
    argv += [f"--log-dir={log_dir}"] if log_dir is not None else []
    # Without --no-python, torchrun starts `python -u -m`, which imports from the current folder first.
    return [*argv, "--no-python", interpreter, "-u", *proc.python_module_argv(interpreter, *program)[1:]]
