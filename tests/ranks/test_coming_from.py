"""The commands on the pages for users of other tools run."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import ROOT

pytestmark = pytest.mark.ranks
PAGES = sorted((ROOT / "docs" / "coming-from").glob("*.md"))
FSDP = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config: {fsdp_version: 2}
mixed_precision: bf16
num_machines: 2
num_processes: 16
"""


def list_commands(page: Path) -> list[list[str]]:
    blocks = re.findall(r"```sh\n(.*?)```", page.read_text(), re.DOTALL)
    return [shlex.split(line, comments=True) for block in blocks for line in block.splitlines() if line]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_of_the_page_run(page: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import sys\n")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "train.py").touch()
    (tmp_path / "fsdp.yaml").write_text(FSDP)
    env = {k: v for k, v in os.environ.items() if not k.startswith(("CLUSTERTRAIN_", "SLURM_"))}
    env |= {"CLUSTERTRAIN_HOME": str(tmp_path / "home")}
    env["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), env["PATH"]))
    commands = list_commands(page)
    assert commands
    for program, command, *arguments in commands:
        assert program == "clustertrain"
        # A dry run writes the job without a scheduler; commands about a run only have to exist.
        backend = () if "--backend" in arguments else ("--backend", "slurm")
        checked = ["--dry-run", *backend, *arguments] if command == "submit" else ["--help"]
        argv = [program, command, *checked]
        done = subprocess.run(argv, cwd=tmp_path, env=env, text=True, capture_output=True, check=False, timeout=300)
        assert done.returncode == 0, f"{command} {arguments}: {done.stderr}"
        if "--nodes" in arguments:
            assert f"#SBATCH --nodes={arguments[arguments.index('--nodes') + 1]}" in done.stdout
