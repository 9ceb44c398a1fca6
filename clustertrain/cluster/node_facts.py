"""``python -m clustertrain.cluster.node_facts``: what the node that it runs on is made of, as a line for who asked."""

from __future__ import annotations

import sys

import msgspec

from clustertrain.cluster.bench import MARK
from clustertrain.config.node_facts import NodeFacts
from clustertrain.sysinfo.node import read
from clustertrain.telemetry.readers.nvml import NvmlError
from clustertrain.telemetry.readers.topology import read_gpus


def here() -> NodeFacts:
    """All that this process may see, with the GPUs of the whole node where Slurm does not hide them."""
    try:
        return read(gpus=read_gpus({}))
    except NvmlError:
        return read()


def main() -> int:
    print(MARK + msgspec.json.encode({"node": here()}).decode(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
