"""The version of an interpreter, and those of packages that it can import.

``submit`` executes this file with the job's Python, which may be older and lack clustertrain. It therefore imports the
standard library only.
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Only these are read: on a network file system, each file takes milliseconds.
_WITH_VERSION = ("clustertrain", "torch")
_VERSION = re.compile(r"^__version__\s*(?::[^=]*)?=\s*['\"]([^'\"]+)", re.MULTILINE)


def inspect(packages: Sequence[str]) -> dict[str, Any]:
    """Return ``version`` of this interpreter, and under ``packages`` the version of each that it can import.

    No package is imported. The version is empty for others than clustertrain and torch.
    """
    found = {}
    for name in packages:
        module_spec = importlib.util.find_spec(name)
        # A folder without __init__.py has no origin. wandb creates one of its name.
        if module_spec is not None and module_spec.origin is not None:
            found[name] = _find_version(Path(module_spec.origin)) if name in _WITH_VERSION else ""
    return {"version": list(sys.version_info[:2]), "packages": found}


def _find_version(init: Path) -> str:
    for path in (init.with_name("version.py"), init):
        try:
            match = _VERSION.search(path.read_text(encoding="utf-8", errors="replace"))
        except OSError:
            continue
        if match:
            return match[1]
    return ""


if __name__ == "__main__":
    del sys.path[0]  # the folder of this file
    print(json.dumps(inspect(sys.argv[1:])))
