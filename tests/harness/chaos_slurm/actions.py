"""Actions that inject the faults into a run."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.harness.chaos_slurm import disks, testbed
from tests.harness.chaos_slurm.subject import Subject, finish, send
from tests.harness.chaos_slurm.waiting import pause

OTHER_LIMIT = 100  # minutes


@dataclass(frozen=True)
class Fault:
    """A drawn fault.

    Attributes:
        kind: key of ``faults.MENU``.
        moment: when it happens: while the run trains, stops for a requeue, or starts again.
        seconds: duration, or 0 for a fault without one.
        pick: number in [0, 1) that selects ranks, nodes and moments.
        during: key of ``DURING``: the action on the run while the fault lasts.
    """

    kind: str
    moment: str
    seconds: float
    pick: float
    during: str = ""

    def __str__(self) -> str:
        during = f", meanwhile {self.during}" if self.during else ""
        duration = f" for {self.seconds:.0f} s" if self.seconds else ""
        return f"{self.kind}{duration}{during} while {self.moment}"


@dataclass
class Injection:
    """The injection of a fault into a run.

    Attributes:
        notes: the actions as text.
        reached: whether a signal reached a process.
        accepted: accepted requests to continue the run that no later command revokes.
        cancelled: whether the last accepted command cancelled the run.
        orphaned_rank_dirs: number of node-local folders whose agents could not remove them.
        broken: violations that the action itself observed.
        other_limit: whether a requeue with ``OTHER_LIMIT`` was accepted.
    """

    subject: Subject
    fault: Fault
    notes: list[str] = field(default_factory=list)
    reached: bool = True
    accepted: list[str] = field(default_factory=list)
    cancelled: bool = False
    orphaned_rank_dirs: int = 0
    broken: list[str] = field(default_factory=list)
    other_limit: bool = False

    def hit(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to one process of that name, see :meth:`Subject.named`."""
        matches = sorted(self.subject.named(name), key=lambda p: p.pid)
        target = matches[int(self.fault.pick * len(matches)) :][:1]
        pids = send(target, number)
        self.reached = bool(pids)
        self.notes.append(f"{number.name} to {name} {pids}")

    def commands(self, *verbs: str) -> list[int]:
        """Run clustertrain commands at the same time and return their exit codes."""
        started = [self.subject.start(*verb.split(), self.subject.id) for verb in verbs]
        results = [finish(p) for p in started]
        for verb, result in zip(verbs, results, strict=True):
            output = (result.stdout + result.stderr).strip().splitlines()
            self.notes.append(f"{verb}: {result.returncode} {output[0] if output else ''}")
            if "Traceback" in result.stderr:
                raise AssertionError(f"`{verb}` ended with a traceback:\n{result.stderr}")
        return [result.returncode for result in results]

    def slurm(self, *argv: str) -> None:
        result = testbed.run(*argv)
        self.notes.append(f"{' '.join(argv)}: {result.returncode} {result.stderr.strip()}")


# -- processes


def kill_rank(injection: Injection) -> None:
    injection.hit("rank")


def stop_rank(injection: Injection) -> None:
    injection.hit("rank", signal.SIGSTOP)


def pause_rank(injection: Injection) -> None:
    ranks = injection.subject.named("rank")[:1]
    send(ranks, signal.SIGSTOP)
    try:
        pause(min(injection.fault.seconds, 8.0))
    finally:
        send(ranks, signal.SIGCONT)


def _pause(injection: Injection, name: str) -> None:
    """Stop one process of that name for the duration of the fault."""
    matches = sorted(injection.subject.named(name), key=lambda p: p.pid)
    target = matches[int(injection.fault.pick * len(matches)) :][:1]
    injection.notes.append(f"SIGSTOP to {name} {send(target, signal.SIGSTOP)}")
    try:
        DURING[injection.fault.during](injection)
        pause(injection.fault.seconds)
    finally:
        send(target, signal.SIGCONT)


def pause_agent(injection: Injection) -> None:
    _pause(injection, "agent")


def pause_batch(injection: Injection) -> None:
    _pause(injection, "batch")


def pause_srun(injection: Injection) -> None:
    _pause(injection, "srun")


def kill_torchrun(injection: Injection) -> None:
    injection.hit("torchrun")


def kill_agent(injection: Injection) -> None:
    injection.hit("agent")


def kill_batch(injection: Injection) -> None:
    injection.hit("batch")


def kill_srun(injection: Injection) -> None:
    injection.hit("srun")


# -- commands of Slurm and clustertrain


def preempt(injection: Injection) -> None:
    injection.notes.append(testbed.preempt(injection.subject.nodes()).strip())


def scontrol_requeue(injection: Injection) -> None:
    injection.slurm("scontrol", "requeue", injection.subject.job_id())


def scancel_term(injection: Injection) -> None:
    injection.slurm("scancel", "-s", "TERM", injection.subject.job_id())


def scancel(injection: Injection) -> None:
    injection.slurm("scancel", injection.subject.job_id())
    injection.cancelled = True


def time_limit(injection: Injection) -> None:
    job = injection.subject.job_id()
    minutes = testbed.minutes_run(job) + 1
    injection.slurm("scontrol", "update", f"jobid={job}", f"TimeLimit={minutes}")


def requeue(injection: Injection) -> None:
    injection.accepted += ["requeue"] * injection.commands("requeue").count(0)


def two_requeues(injection: Injection) -> None:
    codes = injection.commands("requeue", f"requeue --time {OTHER_LIMIT}")
    injection.accepted += ["requeue"] * codes.count(0)
    injection.other_limit = codes[1] == 0


def cancel(injection: Injection) -> None:
    injection.cancelled = injection.commands("cancel") == [0]


def two_cancels(injection: Injection) -> None:
    injection.cancelled = 0 in injection.commands("cancel", "cancel")


def cancel_and_requeue(injection: Injection) -> None:
    injection.commands("cancel", "requeue")


def cancel_then_requeue(injection: Injection) -> None:
    injection.commands("cancel")
    injection.accepted += ["requeue"] * injection.commands("requeue").count(0)


def cancel_then_two_requeues(injection: Injection) -> None:
    injection.commands("cancel")
    injection.subject.wait_for_end()
    injection.accepted += ["requeue"] * injection.commands("requeue", "requeue").count(0)


def kill_batch_then_two_requeues(injection: Injection) -> None:
    kill_batch(injection)
    injection.subject.wait_for_end()
    injection.accepted += ["requeue"] * injection.commands("requeue", "requeue").count(0)


def suspend(injection: Injection) -> None:
    """Suspend all processes of the job."""
    job = injection.subject.job_id()
    try:
        injection.slurm("scontrol", "suspend", job)
        DURING[injection.fault.during](injection)
        pause(injection.fault.seconds)
    finally:
        injection.slurm("scontrol", "resume", job)


def _hold_and_release(injection: Injection, *hold: str, then: Callable[[Injection], None]) -> None:
    """Hold the job, call ``then``, which requeues it, and release it after the duration of the fault."""
    job = injection.subject.job_id()
    try:
        injection.slurm("scontrol", *hold, job)
        then(injection)
        pause(injection.fault.seconds)
    finally:
        injection.slurm("scontrol", "release", job)


def hold_then_requeue(injection: Injection) -> None:
    _hold_and_release(injection, "hold", then=requeue)


def hold_then_scontrol_requeue(injection: Injection) -> None:
    _hold_and_release(injection, "hold", then=scontrol_requeue)


def requeuehold(injection: Injection) -> None:
    _hold_and_release(injection, "requeuehold", then=nothing)


# -- nodes, daemons, disks


def _chosen_node(injection: Injection) -> str:
    nodes = injection.subject.nodes()
    return nodes[int(injection.fault.pick * len(nodes))]


def remove_node(injection: Injection, action: str) -> None:
    name = _chosen_node(injection)
    injection.notes.append(f"{action} {name}")
    injection.orphaned_rank_dirs += 1
    try:
        testbed.node(action, name)
        pause(injection.fault.seconds)
    finally:
        testbed.node("heal", name)


def kill_node(injection: Injection) -> None:
    remove_node(injection, "kill")


def partition(injection: Injection) -> None:
    remove_node(injection, "partition")


def slurmd(injection: Injection) -> None:
    """Kill slurmd on one node; the processes that it has started continue."""
    name = _chosen_node(injection)
    injection.notes.append(f"killed slurmd on {name}")
    injection.orphaned_rank_dirs += 1
    try:
        testbed.node("kill-slurmd", name)
        pause(injection.fault.seconds)
    finally:
        testbed.node("start-slurmd", name)


def _set_node(injection: Injection, name: str, state: str) -> None:
    injection.slurm("scontrol", "update", f"nodename={name}", f"state={state}", "reason=storm")


def drain(injection: Injection) -> None:
    """Drain a node of the run, as an administrator does."""
    name, n = _chosen_node(injection), injection.subject.claimed()
    try:
        _set_node(injection, name, "drain")
        DURING[injection.fault.during](injection)
        pause(injection.fault.seconds)
        if injection.subject.claimed() > n and name in injection.subject.nodes():
            injection.broken.append(f"attempt {injection.subject.claimed()} started on {name}, which is drained")
    finally:
        _set_node(injection, name, "resume")


def down(injection: Injection) -> None:
    """Set a node of the run down, as an administrator does."""
    name = _chosen_node(injection)
    injection.orphaned_rank_dirs += 1
    try:
        _set_node(injection, name, "down")
        pause(injection.fault.seconds)
    finally:
        _set_node(injection, name, "resume")


def daemon(injection: Injection, name: str) -> None:
    during = DURING[injection.fault.during]
    try:
        if during is preempt:  # it needs the scheduler to start
            during(injection)
            pause(3.0 * injection.fault.pick)
        testbed.kill_daemon(name)
        if during is not preempt:
            during(injection)
        pause(injection.fault.seconds)
    finally:
        testbed.repair()


def slurmctld(injection: Injection) -> None:
    daemon(injection, "slurmctld")


def slurmdbd(injection: Injection) -> None:
    daemon(injection, "slurmdbd")


def munged(injection: Injection) -> None:
    """Kill munged, so that authentication fails in the whole cluster."""
    daemon(injection, "munged")


def full(injection: Injection) -> None:
    with disks.full(injection.subject.home):
        pause(injection.fault.seconds)


def no_inodes(injection: Injection) -> None:
    with disks.no_inodes(injection.subject.home):
        pause(injection.fault.seconds)


def rename_run(injection: Injection) -> None:
    """Rename the run's folder, and rename it back after the duration of the fault."""
    path = injection.subject.path
    moved, created = path.with_name(f"{path.name}.aside"), path.with_name(f"{path.name}.made")
    path.rename(moved)
    try:
        pause(injection.fault.seconds)
    finally:
        if path.exists():
            injection.broken.append(
                f"{path} was created while the run was renamed: {sorted(map(str, path.rglob('*')))[:5]}"
            )
            path.rename(created)
        moved.rename(path)


def run_read_only(injection: Injection) -> None:
    with disks.read_only(injection.subject.path):
        pause(injection.fault.seconds)


def checkpoints_read_only(injection: Injection) -> None:
    with disks.read_only(injection.subject.run.checkpoints):
        pause(injection.fault.seconds)


def nothing(injection: Injection) -> None:
    pass


# Actions on a run while another fault lasts.
DURING: dict[str, Callable[[Injection], None]] = {
    "": nothing,
    "kill rank": kill_rank,
    "requeue": requeue,
    "preempt": preempt,
    "cancel": cancel,
    "kill batch": kill_batch,
}
