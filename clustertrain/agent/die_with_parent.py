"""Run a module that the kernel kills when its parent ends.

``python -m clustertrain.agent.die_with_parent PID MODULE ARGS…``, with the parent's PID.
"""

from __future__ import annotations

import os
import runpy
import sys

from clustertrain import proc, settings


def main() -> None:
    parent, module, *args = sys.argv[1:]
    proc.set_parent_death_signal(int(parent))
    os.environ[settings.LAUNCHER_PID] = str(os.getpid())
    sys.argv = [module, *args]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
