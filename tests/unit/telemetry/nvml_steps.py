"""Runner of nvml_child with the NVML stub."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from tests.paths import ROOT


def run_steps(env: dict[str, str], *requests: list[Any]) -> Any:
    """Return the result of each step; ``{"error": …}`` if NVML did not open."""
    argv = [sys.executable, "-W", "error", "-m", "tests.unit.telemetry.nvml_child"]
    result = subprocess.run(
        argv, input=json.dumps(requests), env=env, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)
