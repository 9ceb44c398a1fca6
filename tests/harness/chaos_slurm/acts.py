"""How each fault is done to a run."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.harness.chaos_slurm import disks, testbed
from tests.harness.chaos_slurm.patience import pause
from tests.harness.chaos_slurm.subject import Subject, finish, send

OTHER_LIMIT = 100  # minutes


@dataclass(frozen=True)
class Fault:
    """A kind of ``faults.MENU``, drawn. ``moment``: while the run trains, stops for a requeue, or begins again.
    ``seconds``: for how long, of a kind that lasts. ``pick``: between 0 and 1, chooses ranks, nodes and moments."""

    kind: str
    moment: str
    seconds: float
    pick: float
    during: str = ""  # what happens to the run while the fault lasts

    def __str__(self) -> str:
        during = f", meanwhile {self.during}" if self.during else ""
        away = f" for {self.seconds:.0f} s" if self.seconds else ""
        return f"{self.kind}{away}{during} while {self.moment}"


@dataclass
class Deed:
    """A fault that is being done to a run. ``notes``: what was done, in words. ``reached``: somebody was there to be
    hit. ``accepted``: commands that said the run goes on, with nothing after them that ends it."""

    subject: Subject
    fault: Fault
    notes: list[str] = field(default_factory=list)
    reached: bool = True
    accepted: list[str] = field(default_factory=list)
    cancelled: bool = False  # and nobody has asked for anything else
    lost_rank_dirs: int = 0
    broken: list[str] = field(default_factory=list)  # what the act itself saw and must not be
    other_limit: bool = False  # a requeue with ``OTHER_LIMIT`` was accepted

    def hit(self, what: str, number: signal.Signals = signal.SIGKILL) -> None:
        """One process of that name."""
        found = sorted(self.subject.named(what), key=lambda p: p.pid)
        chosen = found[int(self.fault.pick * len(found)) :][:1]
        pids = send(chosen, number)
        self.reached = bool(pids)
        self.notes.append(f"{number.name} to {what} {pids}")

    def commands(self, *verbs: str) -> list[int]:
        """Commands of ours with their options, all started at the same moment; their exit codes."""
        started = [self.subject.start(*verb.split(), self.subject.id) for verb in verbs]
        done = [finish(p) for p in started]
        for verb, d in zip(verbs, done, strict=True):
            said = (d.stdout + d.stderr).strip().splitlines()
            self.notes.append(f"{verb}: {d.returncode} {said[0] if said else ''}")
            if "Traceback" in d.stderr:
                raise AssertionError(f"`{verb}` ended with a traceback:\n{d.stderr}")
        return [d.returncode for d in done]

    def slurm(self, *argv: str) -> None:
        done = testbed.run(*argv)
        self.notes.append(f"{' '.join(argv)}: {done.returncode} {done.stderr.strip()}")


# -- processes


def kill_rank(deed: Deed) -> None:
    deed.hit("rank")


def stop_rank(deed: Deed) -> None:
    deed.hit("rank", signal.SIGSTOP)


def pause_rank(deed: Deed) -> None:
    found = deed.subject.named("rank")[:1]
    send(found, signal.SIGSTOP)
    try:
        pause(min(deed.fault.seconds, 8.0))
    finally:
        send(found, signal.SIGCONT)


def _pause(deed: Deed, what: str) -> None:
    """One process of that name stands still for the fault's seconds."""
    found = sorted(deed.subject.named(what), key=lambda p: p.pid)
    chosen = found[int(deed.fault.pick * len(found)) :][:1]
    deed.notes.append(f"SIGSTOP to {what} {send(chosen, signal.SIGSTOP)}")
    try:
        DURING[deed.fault.during](deed)
        pause(deed.fault.seconds)
    finally:
        send(chosen, signal.SIGCONT)


def pause_agent(deed: Deed) -> None:
    _pause(deed, "agent")


def pause_batch(deed: Deed) -> None:
    _pause(deed, "batch")


def pause_srun(deed: Deed) -> None:
    _pause(deed, "srun")


def kill_torchrun(deed: Deed) -> None:
    deed.hit("torchrun")


def kill_agent(deed: Deed) -> None:
    deed.hit("agent")


def kill_batch(deed: Deed) -> None:
    deed.hit("batch")


def kill_srun(deed: Deed) -> None:
    deed.hit("srun")


# -- the scheduler's and our commands


def preempt(deed: Deed) -> None:
    deed.notes.append(testbed.preempt(deed.subject.nodes()).strip())


def scontrol_requeue(deed: Deed) -> None:
    deed.slurm("scontrol", "requeue", deed.subject.job_id())


def scancel_term(deed: Deed) -> None:
    deed.slurm("scancel", "-s", "TERM", deed.subject.job_id())


def scancel(deed: Deed) -> None:
    deed.slurm("scancel", deed.subject.job_id())
    deed.cancelled = True


def time_limit(deed: Deed) -> None:
    job = deed.subject.job_id()
    minutes = testbed.minutes_run(job) + 1
    deed.slurm("scontrol", "update", f"jobid={job}", f"TimeLimit={minutes}")


def requeue(deed: Deed) -> None:
    deed.accepted += ["requeue"] * deed.commands("requeue").count(0)


def two_requeues(deed: Deed) -> None:
    codes = deed.commands("requeue", f"requeue --time {OTHER_LIMIT}")
    deed.accepted += ["requeue"] * codes.count(0)
    deed.other_limit = codes[1] == 0


def cancel(deed: Deed) -> None:
    deed.cancelled = deed.commands("cancel") == [0]


def two_cancels(deed: Deed) -> None:
    deed.cancelled = 0 in deed.commands("cancel", "cancel")


def cancel_and_requeue(deed: Deed) -> None:
    deed.commands("cancel", "requeue")


def cancel_then_requeue(deed: Deed) -> None:
    deed.commands("cancel")
    deed.accepted += ["requeue"] * deed.commands("requeue").count(0)


def cancel_then_two_requeues(deed: Deed) -> None:
    deed.commands("cancel")
    deed.subject.wait_for_end()
    deed.accepted += ["requeue"] * deed.commands("requeue", "requeue").count(0)


def kill_batch_then_two_requeues(deed: Deed) -> None:
    kill_batch(deed)
    deed.subject.wait_for_end()
    deed.accepted += ["requeue"] * deed.commands("requeue", "requeue").count(0)


def suspend(deed: Deed) -> None:
    """All processes of the job stand still."""
    job = deed.subject.job_id()
    try:
        deed.slurm("scontrol", "suspend", job)
        DURING[deed.fault.during](deed)
        pause(deed.fault.seconds)
    finally:
        deed.slurm("scontrol", "resume", job)


def _held(deed: Deed, *hold: str, then: Callable[[Deed], None]) -> None:
    """The job gets that hold and is put back in the queue, where it waits for its release."""
    job = deed.subject.job_id()
    try:
        deed.slurm("scontrol", *hold, job)
        then(deed)
        pause(deed.fault.seconds)
    finally:
        deed.slurm("scontrol", "release", job)


def hold_then_requeue(deed: Deed) -> None:
    _held(deed, "hold", then=requeue)


def hold_then_scontrol_requeue(deed: Deed) -> None:
    _held(deed, "hold", then=scontrol_requeue)


def requeuehold(deed: Deed) -> None:
    _held(deed, "requeuehold", then=nothing)


# -- nodes, daemons, disks


def _chosen_node(deed: Deed) -> str:
    nodes = deed.subject.nodes()
    return nodes[int(deed.fault.pick * len(nodes))]


def away(deed: Deed, action: str) -> None:
    name = _chosen_node(deed)
    deed.notes.append(f"{action} {name}")
    deed.lost_rank_dirs += 1
    try:
        testbed.node(action, name)
        pause(deed.fault.seconds)
    finally:
        testbed.node("heal", name)


def kill_node(deed: Deed) -> None:
    away(deed, "kill")


def partition(deed: Deed) -> None:
    away(deed, "partition")


def slurmd(deed: Deed) -> None:
    """Of one node; what it has started lives on."""
    name = _chosen_node(deed)
    deed.notes.append(f"no slurmd on {name}")
    deed.lost_rank_dirs += 1
    try:
        testbed.node("kill-slurmd", name)
        pause(deed.fault.seconds)
    finally:
        testbed.node("start-slurmd", name)


def _set_node(deed: Deed, name: str, state: str) -> None:
    deed.slurm("scontrol", "update", f"nodename={name}", f"state={state}", "reason=storm")


def drain(deed: Deed) -> None:
    """An administrator wants a node of the run back, once the run has left it."""
    name, n = _chosen_node(deed), deed.subject.claimed()
    try:
        _set_node(deed, name, "drain")
        DURING[deed.fault.during](deed)
        pause(deed.fault.seconds)
        if deed.subject.claimed() > n and name in deed.subject.nodes():
            deed.broken.append(f"{name} is drained, and attempt {deed.subject.claimed()} began on it")
    finally:
        _set_node(deed, name, "resume")


def down(deed: Deed) -> None:
    """An administrator takes a node away at once."""
    name = _chosen_node(deed)
    deed.lost_rank_dirs += 1
    try:
        _set_node(deed, name, "down")
        pause(deed.fault.seconds)
    finally:
        _set_node(deed, name, "resume")


def daemon(deed: Deed, name: str) -> None:
    during = DURING[deed.fault.during]
    try:
        if during is preempt:  # it needs the scheduler to begin
            during(deed)
            pause(3.0 * deed.fault.pick)
        testbed.kill_daemon(name)
        if during is not preempt:
            during(deed)
        pause(deed.fault.seconds)
    finally:
        testbed.repair()


def slurmctld(deed: Deed) -> None:
    daemon(deed, "slurmctld")


def slurmdbd(deed: Deed) -> None:
    daemon(deed, "slurmdbd")


def munged(deed: Deed) -> None:
    """Nobody in the cluster can prove to anybody who he is."""
    daemon(deed, "munged")


def full(deed: Deed) -> None:
    with disks.full(deed.subject.home):
        pause(deed.fault.seconds)


def no_inodes(deed: Deed) -> None:
    with disks.no_inodes(deed.subject.home):
        pause(deed.fault.seconds)


def rename_run(deed: Deed) -> None:
    """The run's folder is not where it was, and comes back."""
    path = deed.subject.path
    aside, made = path.with_name(f"{path.name}.aside"), path.with_name(f"{path.name}.made")
    path.rename(aside)
    try:
        pause(deed.fault.seconds)
    finally:
        if path.exists():
            deed.broken.append(f"something made {path} while it was away: {sorted(map(str, path.rglob('*')))[:5]}")
            path.rename(made)
        aside.rename(path)


def run_read_only(deed: Deed) -> None:
    with disks.read_only(deed.subject.path):
        pause(deed.fault.seconds)


def checkpoints_read_only(deed: Deed) -> None:
    with disks.read_only(deed.subject.run.checkpoints):
        pause(deed.fault.seconds)


def nothing(deed: Deed) -> None:
    pass


# To a run while a daemon is away, a process stands still, and so on.
DURING: dict[str, Callable[[Deed], None]] = {
    "": nothing,
    "kill rank": kill_rank,
    "requeue": requeue,
    "preempt": preempt,
    "cancel": cancel,
    "kill batch": kill_batch,
}
