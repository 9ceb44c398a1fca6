"""Parsers of Slurm's output. The texts are from a real Slurm 22.05, shortened."""

from __future__ import annotations

import pytest

from clustertrain.scheduler import slurm_parse
from clustertrain.scheduler.slurm_parse import expand_nodes, parse_sacct, parse_squeue


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("node01", "node01"),
        ("node[01-03,07]", "node01 node02 node03 node07"),
        ("gpu-a[1-2]b", "gpu-a1b gpu-a2b"),
        ("node[01-03,07],gpu-a[1-2]b,x", "node01 node02 node03 node07 gpu-a1b gpu-a2b x"),
        ("r[1-2]n[08-10]", "r1n08 r1n09 r1n10 r2n08 r2n09 r2n10"),
        ("n[9-11]", "n9 n10 n11"),
        ("n[009-011]", "n009 n010 n011"),
        ("None assigned", ""),
        ("", ""),
        ("(null)", ""),
        ("N/A", ""),
    ],
)
def test_node_lists_expand(text: str, names: str) -> None:
    assert expand_nodes(text) == tuple(names.split())


@pytest.mark.parametrize("text", ["n[1-2", "n1]", "n[a-b]", "n[[1]]", "n[]"])
def test_bad_node_lists_are_errors(text: str) -> None:
    with pytest.raises(ValueError, match="not a"):
        expand_nodes(text)


@pytest.mark.parametrize(
    ("printed", "state", "alive"),
    [
        ("SIGNALING", "RUNNING", True),  # on 22.05, briefly while --signal is delivered
        ("RESIZING", "RUNNING", True),
        ("STAGE_OUT", "COMPLETING", True),
        ("REQUEUE_HOLD", "PENDING", True),
        ("SPECIAL_EXIT", "PENDING", True),
        ("STOPPED", "STOPPED", True),
        ("A_WORD_OF_A_LATER_SLURM", "A_WORD_OF_A_LATER_SLURM", True),  # an unknown state counts as alive
        ("REVOKED", "REVOKED", False),
        ("BOOT_FAIL", "BOOT_FAIL", False),
    ],
)
def test_flags_that_squeue_prints_instead_of_the_state(printed: str, state: str, alive: bool) -> None:
    view = parse_squeue(f"3|{printed}|0|1795254459|1795254759|N/A|node01|None|\n")["3"]
    assert (view.state, view.is_alive) == (state, alive)


def test_squeue_lines_become_job_views() -> None:
    text = (
        "5|PENDING|0|1795254759|1795258359|N/A||Resources|\n"
        "3|RUNNING|2|1795254459|1795254759|1795254500|node[01-02]|None|\n"
        "2_[1-2%1]|CANCELLED|0|N/A|N/A|N/A||JobArrayTaskLimit|\n"
        "7|PENDING|0|N/A|N/A|N/A||ReqNodeNotAvail, UnavailableNodes:node[03-04]|\n"
        "garbage\n\n"
    )
    views = parse_squeue(text)
    assert set(views) == {"5", "3", "2_[1-2%1]", "7"}
    pending, running = views["5"], views["3"]
    assert (pending.state, pending.reason, pending.start_time, pending.nodes) == (
        "PENDING",
        "Resources",
        1795254759,
        (),
    )
    assert pending.is_alive and pending.preempt_time is None
    assert running.nodes == ("node01", "node02") and running.restarts == 2 and running.reason == ""
    assert running.end_time == 1795254759 and running.preempt_time == 1795254500
    assert not views["2_[1-2%1]"].is_alive
    assert views["7"].reason == "ReqNodeNotAvail, UnavailableNodes:node[03-04]"


def test_sacct_lists_every_start_oldest_first() -> None:
    text = (
        "9|PENDING|Unknown|Unknown|None assigned|0:0|None\n"
        "9|REQUEUED|1795254459|1795254500|node[01-02]|75:0|None\n"
        "9|CANCELLED by 1000|1795254600|1795254700|node03|0:15|None\n"
        "9_1|RUNNING|1795254600|Unknown|node03|0:0|None\n"
        "9.batch|COMPLETED|1795254459|1795254500|node01|0:0|\n"
        "not a line\n"
    )
    starts = parse_sacct(text, "9")
    assert [s.state for s in starts] == ["REQUEUED", "CANCELLED", "PENDING"]
    first, second, third = starts
    assert (first.exit_code, first.signal, first.nodes) == (75, None, ("node01", "node02"))
    assert (second.exit_code, second.signal, second.start, second.end) == (0, 15, 1795254600, 1795254700)
    assert third.start is None and third.nodes == ()
    assert [s.state for s in parse_sacct(text, "9_1")] == ["RUNNING"]
    assert parse_sacct("", "9") == []


def test_slurm_errors_lose_their_prefixes() -> None:
    stderr = "sbatch: error: invalid partition specified: x\nsbatch: error: Batch job submission failed: Invalid name\n"
    assert (
        slurm_parse.format_error(stderr) == "invalid partition specified: x; Batch job submission failed: Invalid name"
    )
    assert slurm_parse.format_error("slurm_load_jobs error: Invalid job id specified") == "Invalid job id specified"
    assert slurm_parse.format_error("  \n") == "it gave no reason"


@pytest.mark.parametrize(
    ("text", "state"), [("CANCELLED by 0", "CANCELLED"), ("COMPLETED+", "COMPLETED"), ("", "UNKNOWN")]
)
def test_state_word_loses_its_suffix(text: str, state: str) -> None:
    assert slurm_parse.parse_state(text) == state


@pytest.mark.parametrize(
    ("line", "partition", "advice"),
    [
        ("PartitionName=low Default=YES GraceTime=0 PreemptMode=REQUEUE", "", "no grace time"),
        ("PartitionName=low Default=NO GraceTime=20 PreemptMode=REQUEUE", "low", "gives a preempted job 20 s"),
        ("PartitionName=low Default=YES GraceTime=300 PreemptMode=REQUEUE", "", ""),
        ("PartitionName=high Default=YES GraceTime=0 PreemptMode=OFF", "", ""),
        ("PartitionName=low Default=NO GraceTime=0 PreemptMode=REQUEUE", "", ""),
        ("PartitionName=low Default=YES GraceTime=300 PreemptMode=CANCEL", "", "Slurm cancels preempted jobs"),
        ("PartitionName=low Default=YES GraceTime=0 PreemptMode=CANCEL", "", "no grace time"),
        ("what is this", "low", ""),
    ],
    ids=[
        "no-grace",
        "short-grace",
        "long-grace",
        "not-preemptible",
        "not-the-default",
        "cancel",
        "cancel-without-grace",
        "garbage",
    ],
)
def test_advice_on_a_partition_without_grace_time(line: str, partition: str, advice: str) -> None:
    notes = slurm_parse.preemption_advice(line + "\n", partition)
    assert advice in "".join(notes)
    assert bool(notes) == bool(advice)
