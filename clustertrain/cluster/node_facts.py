"""``python -m clustertrain.cluster.node_facts``: print the hardware facts of this node as one line of JSON."""

from __future__ import annotations

import sys

import msgspec

from clustertrain.cluster.bench import OUTPUT_PREFIX
from clustertrain.config.node_facts import NodeFacts
from clustertrain.sysinfo.node import read_node
from clustertrain.telemetry.readers.nvml import NvmlError
from clustertrain.telemetry.readers.topology import read_gpus


def read_local_node_facts() -> NodeFacts:
    """Read the facts of this node, including all its GPUs unless Slurm hides them."""
    try:
        return read_node(gpus=read_gpus({}))
    except NvmlError:
        return read_node()


def main() -> int:
    print(OUTPUT_PREFIX + msgspec.json.encode({"node": read_local_node_facts()}).decode(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
