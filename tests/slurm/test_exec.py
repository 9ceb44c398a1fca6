"""Commands inside the job of a running run, on the node of a rank."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.runs import Run

pytestmark = pytest.mark.slurm
PRINT_STEP = ("sh", "-c", "echo $SLURM_JOB_ID $SLURMD_NODENAME; exit 7")


def test_command_is_a_step_of_the_job_on_the_node_of_a_rank(submit_run: Callable[..., Run]) -> None:
    run = submit_run("--nodes", "2", "--gpus", "1", "--device", "cpu", "--", "sleep", "300")
    run.wait_for(lambda s: bool(s["attempts"] and s["attempts"][0]["nodes"]), "the first attempt")
    (attempt,) = run.poll_status()["attempts"]
    for rank, node in enumerate(attempt["nodes"]):
        result = run.call("exec", run.id, "--rank", str(rank), "--", *PRINT_STEP, check=False)
        assert (result.returncode, result.stdout.split()) == (7, [run.job_id, node]), result.stderr
    by_name = run.call("exec", "--node", attempt["nodes"][1], run.id, "hostname", check=False)
    assert by_name.returncode == 0, by_name.stderr
    for options, message in ((("--rank", "2"), "has no rank 2: it has 2"), (("--node", "x"), "has no node 'x'")):
        refused = run.call("exec", *options, run.id, "hostname", check=False)
        assert refused.returncode == 1 and message in refused.stderr
    run.call("cancel", run.id)
    run.wait_until_final()
    ended = run.call("exec", run.id, "hostname", check=False)
    assert ended.returncode == 1 and "there is no job to run in" in ended.stderr
