"""The action of slurm/testbed, run step by step as its workflow runs it on GitHub's runner."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import ROOT
from tests.slurm.conftest import CANNOT_RUN, TESTBED

pytestmark = pytest.mark.slurm

# A network, /etc/hosts and /run/netns for this test alone: the cluster of the other tests keeps running.
ISOLATED = r"""
set -e
sed '/# clustertrain-testbed$/d' /etc/hosts >"$1"
mount --bind "$1" /etc/hosts
mkdir -p /run/netns
mount -t tmpfs none /run/netns
ip link set lo up
shift
exec "$@"
"""


def test_workflow_of_the_action_passes(tmp_path: Path) -> None:
    status = subprocess.run([TESTBED / "status"], capture_output=True, text=True, check=False)
    if status.returncode == CANNOT_RUN and os.environ.get("CLUSTERTRAIN_REQUIRE_SLURM") != "1":
        pytest.skip(status.stderr.strip())
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "CLUSTERTRAIN_"))}
    environ["CLUSTERTRAIN_TESTBED_DIR"] = str(tmp_path / "testbed")
    if shutil.which("sudo") is None:
        (tmp_path / "bin").mkdir()
        (tmp_path / "bin" / "sudo").write_text('#!/bin/sh\nexec "$@"\n')
        (tmp_path / "bin" / "sudo").chmod(0o755)
        environ["PATH"] = f"{tmp_path / 'bin'}{os.pathsep}{environ['PATH']}"
    unshare = ["unshare", "--net", "--mount", "--propagation", "private"]
    job = [sys.executable, "-m", "tests.workflow_runner", ".github/workflows/testbed.yml", "preemption"]
    done = subprocess.run(
        [*unshare, "bash", "-c", ISOLATED, "bash", tmp_path / "hosts", *job],
        cwd=ROOT, env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert "--- A preempted job of two hosts is requeued and runs again\nPREEMPTED\nRUNNING\n" in done.stdout
    assert "--- Logs of the daemons" not in done.stdout
    assert done.stdout.endswith("testbed: down\n")
    assert not (tmp_path / "testbed").exists()
