"""``python -m clustertrain``: the command line, and four internal commands that job.sh, srun and torchrun run."""

from __future__ import annotations

import importlib
import sys

INTERNAL = {
    "batch": "clustertrain.agent.batch_process",
    "agent": "clustertrain.agent.node_agent",
    "train": "clustertrain.train.main",
    "watch-node": "clustertrain.watch.node",
}


def main() -> int:
    command = sys.argv[1] if len(sys.argv) > 1 else ""
    if command in INTERNAL:
        exit_code = importlib.import_module(INTERNAL[command]).main()
        return int(exit_code or 0)
    from clustertrain.cli.main import main as cli

    return cli()


if __name__ == "__main__":
    sys.exit(main())
