"""Run a module that the kernel kills when its parent ends.

``python -m clustertrain.agent.ranks.die_with_parent PID MODULE ARGS…``, with the parent's PID.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import runpy
import sys

from clustertrain import extras, proc, settings
from clustertrain.errors import UnsuitableEnvironment


def main() -> None:
    parent, module, *args = sys.argv[1:]
    proc.set_parent_death_signal(int(parent))
    os.environ[settings.LAUNCHER_PID] = str(os.getpid())
    sys.argv = [module, *args]
    # Garbage collections during the import of torch and at exit take 40% of torchrun's CPU time and free nothing. The
    # exit may be part of the grace time.
    gc.disable()
    try:
        extras.require("torch", "torchrun")
    except UnsuitableEnvironment as e:
        sys.exit(f"{e.message}; fix: {e.fix}")
    importlib.util.find_spec(module)  # imports the packages that contain it, here torch and torch.distributed
    gc.freeze()
    gc.enable()
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        gc.freeze()


if __name__ == "__main__":
    main()
