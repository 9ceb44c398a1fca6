"""Commands in a folder with modules of another user: no module from this folder is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.ranks
MODULES = ("clustertrain", "torch", "numpy", "json", "psutil", "msgspec", "sitecustomize", "usercustomize")


@pytest.mark.parametrize(
    "args",
    [
        ("diagnose", "resume", "recipe.toml"),
        ("plan", "--find-micro-batch", "--backend", "local", "--device", "cpu", "--gpus", "1", "recipe.toml"),
    ],
    ids=["diagnose", "plan"],
)
def test_no_module_of_current_folder_is_imported(args: tuple[str, ...], tmp_path: Path) -> None:
    folder = tmp_path / "downloads"
    folder.mkdir()
    for name in MODULES:
        (folder / f"{name}.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'a').write({name!r})\n")
    (folder / "recipe.toml").write_text("[train]\nglobal_batch = 2\n")
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("CLUSTERTRAIN_", "SLURM_", "PYTHON"))}
    environ |= {"CLUSTERTRAIN_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1"}
    script = Path(sys.executable).with_name("clustertrain")
    result = subprocess.run(
        [str(script), *args], cwd=folder, env=environ, text=True, capture_output=True, check=False, timeout=300
    )
    assert not (tmp_path / "imported").exists(), (tmp_path / "imported").read_text()
    assert result.returncode == 0, result.stdout + result.stderr
