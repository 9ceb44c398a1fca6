"""``python -m tests.harness.fake_cluster layouts`` and ``memory``: one rank of fake jobs, traced without memory.

``layouts`` traces one optimizer step in layouts of the presets on 16 to 512 ranks: what the planner accepts must run.
``--all`` takes every combination instead of a covering set (hours).
``memory`` compares the peak of torch's memory tracker with the plan's prediction. ``--held-out`` also prints the cells
from which no formula was derived. ``--only GLOB`` selects cells by name.

Results go to ``benchmarks/results/`` if all cells ran. Exit status: 0 if all is as expected, 1 otherwise, 77 without a
C++ compiler.
"""

from __future__ import annotations

import argparse
import sys

from tests.harness.fake_cluster import fake_cuda

SKIPPED = 77


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.harness.fake_cluster", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    layouts = commands.add_parser("layouts", help="trace the layouts of the presets")
    layouts.add_argument("--all", action="store_true", help="every combination")
    memory = commands.add_parser("memory", help="compare peak memory with the plan")
    memory.add_argument("--held-out", action="store_true", help="print the held-out cells too")
    adapters = commands.add_parser("adapters", help="compare peak memory of fine-tunes with the plan")
    for command in (layouts, memory, adapters):
        command.add_argument("--only", default="*", metavar="GLOB", help="cells whose names match")
        command.add_argument("--first", type=int, metavar="N", help="at most N cells")
    args = parser.parse_args()
    try:
        fake_cuda.install()
    except fake_cuda.Unavailable as e:
        print(e, file=sys.stderr)
        return SKIPPED
    # Imports torch, which must come after the device.
    from tests.harness.fake_cluster import adapters_command, layouts_command, memory_command

    if args.command == "layouts":
        return layouts_command.run(everything=args.all, pattern=args.only, limit=args.first)
    if args.command == "adapters":
        return adapters_command.run(pattern=args.only, limit=args.first)
    return memory_command.run(pattern=args.only, limit=args.first, print_held_out=args.held_out)


if __name__ == "__main__":
    sys.exit(main())
