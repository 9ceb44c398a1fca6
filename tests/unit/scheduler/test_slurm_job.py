"""What squeue and scontrol (22.05) print about the jobs of others."""

from __future__ import annotations

from clustertrain.scheduler.slurm_job import NodeGroup, order_nodes, parse_details, parse_jobs

QUEUE = """\
18_5|18|RUNNING|0|root|0|1795913751|1795913751|1795917351|N/A|node[01-02]|None|
18_3|19|PENDING|1000|amy|2|1795913751|N/A|N/A|N/A||Priority|
20+1|21|RUNNING|0|root|0|1795913753|1795913753|1795917353|20|node02|None|
no job
"""
DETAILS = """\
JobId=19 ArrayJobId=18 ArrayTaskId=3 JobName=we|rd name
   UserId=root(0) GroupId=root(0) MCS_label=N/A
   JobState=RUNNING Reason=None Dependency=(null)
   NodeList=node[01-03]
   JOB_GRES=gpu:h100:17
     Nodes=node[01-02] CPU_IDs=0-3 Mem=8000 GRES=gpu:h100:7(IDX:0-6)
     Nodes=node04 CPU_IDs=0-3 Mem=8000 GRES=gpu:h100:7(IDX:0-6)
     Nodes=node03 CPU_IDs=0-1 Mem=4000 GRES=gpu:h100:2(IDX:0-1),gpu:a100:1(IDX:4),nic:mlx5:2(IDX:0-1)
   MinCPUsNode=1 MinMemoryCPU=2000M MinTmpDiskNode=0
   Command=/home/amy/train it.sh --fast
   WorkDir=/home/amy
   StdErr=/dev/null
   StdOut=/home/amy/slurm-19.out
   Power=
"""


def test_jobs_of_the_queue() -> None:
    task, pending, component = parse_jobs(QUEUE)
    assert (task.job_id, task.number, task.state, task.nodes) == ("18_5", "18", "RUNNING", ("node01", "node02"))
    assert (task.submit_time, task.start_time, task.end_time) == (1795913751, 1795913751, 1795917351)
    assert (pending.user, pending.uid, pending.restart, pending.reason) == ("amy", 1000, 2, "Priority")
    assert pending.is_pending and not pending.is_running and pending.start_time is None
    assert [job.is_heterogeneous for job in (task, pending, component)] == [False, False, True]


def test_details_with_different_nodes() -> None:
    details = parse_details(DETAILS)
    assert (details.name, details.command) == ("we|rd name", "/home/amy/train it.sh --fast")
    assert (details.work_dir, details.output) == ("/home/amy", "/home/amy/slurm-19.out")
    assert details.groups == (
        NodeGroup(("node01", "node02", "node04"), 7, 8000),
        NodeGroup(("node03",), 3, 4000),
    )
    assert order_nodes(details.groups) == ("node01", "node02", "node03", "node04")


def test_job_without_gpus_script_and_memory_limit() -> None:
    text = "JobId=5 JobName=bash\n     Nodes=node01 CPU_IDs=0-1 Mem=0 GRES=\n   Command=(null)\n   WorkDir=/tmp\n"
    details = parse_details(text)
    assert (details.command, details.output) == ("", "")
    assert details.groups == (NodeGroup(("node01",), 0, None),)


def test_gpus_of_older_slurm_without_a_type() -> None:
    (group,) = parse_details("     Nodes=n1 CPU_IDs=0 Mem=10 GRES=gpu:4\n").groups
    assert group.gpus == 4


def test_unknown_job_has_no_details() -> None:
    assert parse_details("slurm_load_jobs error: Invalid job id specified").groups == ()
