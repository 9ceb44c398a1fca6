"""Install the hooks in the Python processes of a rank, then run the environment's own ``sitecustomize``, if any.

The node agent puts this folder on ``PYTHONPATH``.
"""

from __future__ import annotations

import os
import sys


def _run_next() -> None:
    """Run the ``sitecustomize`` that Python would have found without this folder."""
    from importlib.machinery import PathFinder

    folder = os.path.dirname(os.path.abspath(__file__))
    spec = PathFinder.find_spec("sitecustomize", [p for p in sys.path if os.path.abspath(p or ".") != folder])
    if spec is None or spec.loader is None:
        return
    from importlib.util import module_from_spec  # only here: it takes milliseconds

    module = module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


try:
    import clustertrain_hooks  # type: ignore[import-not-found,unused-ignore]

    clustertrain_hooks.install(os.environ)
except Exception as e:  # whatever is wrong with the hooks, the program runs
    print(f"clustertrain: no hooks in this process: {e!r}", file=sys.stderr)
_run_next()
