"""The README's pair of examples: the same training with DDP and with a session."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.paths import ROOT

pytestmark = pytest.mark.ranks

PROGRAM = """
import ddp_script, ddp_session_script
import clustertrain as ct

ddp_script.STEPS = ddp_session_script.STEPS = 501
assert ddp_script.build_dataset()[:][0].equal(ddp_session_script.build_dataset()[:][0])
ddp_script.train()
with ct.session() as session:
    ddp_session_script.train(session)
"""


def test_both_examples_learn() -> None:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("CLUSTERTRAIN_", "SLURM_"))}
    path = os.pathsep.join((str(ROOT / "examples"), str(ROOT)))
    one_rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**kept, **one_rank, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    losses = [float(text) for text in re.findall(r"loss ([\d.]+)", output)]
    first, last = losses[0], losses[1]
    assert first > 0.6 and last < 0.1, output
    assert losses[-1] < 0.1, output
