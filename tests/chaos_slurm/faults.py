"""What a storm does to a run, and what may be recorded of it: the menu, the acts, and the endings that are true."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable
from dataclasses import dataclass, field

from clustertrain.run.endings import (
    CANCELLED,
    COMMUNICATION,
    HANG,
    NODE_FAILURE,
    PREEMPTED,
    TIME_LIMIT,
    UNKNOWN,
)
from tests.chaos_slurm import disks, testbed
from tests.chaos_slurm.patience import pause
from tests.chaos_slurm.subject import Subject, finish, send

MOMENTS = ("training", "training", "training", "training", "stopping", "beginning")


@dataclass(frozen=True)
class Fault:
    """One of ``MENU``, drawn. ``moment``: while the run trains, stops for a requeue, or begins again. ``seconds``: how
    long what is taken away stays away. ``pick``: between 0 and 1, chooses among ranks, nodes and moments."""

    kind: str
    moment: str
    seconds: float
    pick: float
    during: str = ""  # what happens to the run while a daemon is away

    def __str__(self) -> str:
        during = f", meanwhile {self.during}" if self.during else ""
        away = f" for {self.seconds:.0f} s" if MENU[self.kind].away else ""
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
    lost_rank_dirs: int = 0

    def hit(self, what: str, number: signal.Signals = signal.SIGKILL) -> None:
        """One process of that name."""
        found = sorted(self.subject.named(what), key=lambda p: p.pid)
        chosen = found[int(self.fault.pick * len(found)) :][:1]
        pids = send(chosen, number)
        self.reached = bool(pids)
        self.notes.append(f"{number.name} to {what} {pids}")

    def commands(self, *verbs: str) -> list[int]:
        """Commands of ours, all started at the same moment; their exit codes."""
        started = [self.subject.start(verb, self.subject.id) for verb in verbs]
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


def _kill_rank(deed: Deed) -> None:
    deed.hit("rank")


def _stop_rank(deed: Deed) -> None:
    deed.hit("rank", signal.SIGSTOP)


def _pause_rank(deed: Deed) -> None:
    found = deed.subject.named("rank")[:1]
    send(found, signal.SIGSTOP)
    try:
        pause(min(deed.fault.seconds, 8.0))
    finally:
        send(found, signal.SIGCONT)


def _kill_torchrun(deed: Deed) -> None:
    deed.hit("torchrun")


def _kill_agent(deed: Deed) -> None:
    deed.hit("agent")
    deed.lost_rank_dirs += 1


def _kill_batch(deed: Deed) -> None:
    deed.hit("batch")
    deed.lost_rank_dirs += deed.subject.shape.nodes


def _kill_srun(deed: Deed) -> None:
    deed.hit("srun")
    deed.lost_rank_dirs += deed.subject.shape.nodes


# -- the scheduler's and our commands


def _preempt(deed: Deed) -> None:
    deed.notes.append(testbed.preempt(deed.subject.nodes()).strip())


def _scontrol_requeue(deed: Deed) -> None:
    deed.slurm("scontrol", "requeue", deed.subject.job_id())


def _scancel_term(deed: Deed) -> None:
    deed.slurm("scancel", "-s", "TERM", deed.subject.job_id())


def _scancel(deed: Deed) -> None:
    deed.slurm("scancel", deed.subject.job_id())


def _time_limit(deed: Deed) -> None:
    job = deed.subject.job_id()
    minutes = testbed.minutes_run(job) + 1
    deed.slurm("scontrol", "update", f"jobid={job}", f"TimeLimit={minutes}")


def _requeue(deed: Deed) -> None:
    deed.accepted += ["requeue"] * deed.commands("requeue").count(0)


def _two_requeues(deed: Deed) -> None:
    deed.accepted += ["requeue"] * deed.commands("requeue", "requeue").count(0)


def _cancel(deed: Deed) -> None:
    deed.commands("cancel")


def _two_cancels(deed: Deed) -> None:
    deed.commands("cancel", "cancel")


def _cancel_and_requeue(deed: Deed) -> None:
    deed.commands("cancel", "requeue")


def _cancel_then_requeue(deed: Deed) -> None:
    deed.commands("cancel")
    deed.accepted += ["requeue"] * deed.commands("requeue").count(0)


def _cancel_then_two_requeues(deed: Deed) -> None:
    deed.commands("cancel")
    deed.subject.wait_for_final()
    deed.accepted += ["requeue"] * deed.commands("requeue", "requeue").count(0)


def _kill_batch_then_two_requeues(deed: Deed) -> None:
    _kill_batch(deed)
    deed.subject.wait_for_final()
    deed.accepted += ["requeue"] * deed.commands("requeue", "requeue").count(0)


# -- nodes, daemons, disks


def _away(deed: Deed, action: str) -> None:
    nodes = deed.subject.nodes()
    name = nodes[int(deed.fault.pick * len(nodes))]
    deed.notes.append(f"{action} {name}")
    deed.lost_rank_dirs += 1
    try:
        testbed.node(action, name)
        pause(deed.fault.seconds)
    finally:
        testbed.node("heal", name)


def _kill_node(deed: Deed) -> None:
    _away(deed, "kill")


def _partition(deed: Deed) -> None:
    _away(deed, "partition")


def _daemon(deed: Deed, name: str) -> None:
    during = DURING[deed.fault.during]
    try:
        if during is _preempt:  # it needs the scheduler to begin
            during(deed)
            pause(3.0 * deed.fault.pick)
        testbed.kill_daemon(name)
        if during is not _preempt:
            during(deed)
        pause(deed.fault.seconds)
    finally:
        testbed.repair()


def _slurmctld(deed: Deed) -> None:
    _daemon(deed, "slurmctld")


def _slurmdbd(deed: Deed) -> None:
    _daemon(deed, "slurmdbd")


def _full(deed: Deed) -> None:
    with disks.full(deed.subject.home):
        pause(deed.fault.seconds)


def _run_read_only(deed: Deed) -> None:
    with disks.read_only(deed.subject.path):
        pause(deed.fault.seconds)


def _checkpoints_read_only(deed: Deed) -> None:
    with disks.read_only(deed.subject.run.checkpoints):
        pause(deed.fault.seconds)


def _nothing(deed: Deed) -> None:
    pass


# To a run while a daemon is away.
DURING: dict[str, Callable[[Deed], None]] = {
    "": _nothing,
    "kill rank": _kill_rank,
    "requeue": _requeue,
    "preempt": _preempt,
    "cancel": _cancel,
    "kill batch": _kill_batch,
}


@dataclass(frozen=True)
class Kind:
    """``endings``: all that may truly be recorded of an attempt that this is done to, beside completed. ``harmless``:
    the attempt may also go on. ``by_hand``: the run may stop, and ``status`` then says to type ``requeue``.
    ``cancels``: the run may end cancelled. ``away``: lasts for the fault's seconds. ``alone``: hits the whole cluster.
    ``ranks``: needs so many ranks."""

    weight: int
    act: Callable[[Deed], None]
    endings: frozenset[str]
    harmless: bool = False
    by_hand: bool = False
    cancels: bool = False
    away: bool = False
    alone: bool = False
    ranks: int = 1


def _of(*endings: str) -> frozenset[str]:
    return frozenset(endings)


# A rank's death reaches its peers as a broken connection, and which of the two is seen first is chance.
_DIED = _of(UNKNOWN, COMMUNICATION)
# Slurm calls a job whose node is gone a node failure; peers may see the broken connection before that.
_NODE = _of(NODE_FAILURE, COMMUNICATION, HANG, UNKNOWN)

MENU: dict[str, Kind] = {
    "kill rank": Kind(4, _kill_rank, _DIED),
    "stop rank": Kind(2, _stop_rank, _of(HANG, COMMUNICATION), ranks=2),
    "pause rank": Kind(1, _pause_rank, _of(), harmless=True),
    "kill torchrun": Kind(3, _kill_torchrun, _DIED),
    "kill agent": Kind(3, _kill_agent, _DIED),
    "kill batch": Kind(3, _kill_batch, _of(UNKNOWN), by_hand=True),
    "kill srun": Kind(2, _kill_srun, _of(UNKNOWN), by_hand=True),
    "preempt": Kind(4, _preempt, _of(PREEMPTED)),
    "scontrol requeue": Kind(3, _scontrol_requeue, _of(PREEMPTED)),
    "scancel -s TERM": Kind(3, _scancel_term, _of(PREEMPTED, UNKNOWN), harmless=True),
    "scancel": Kind(2, _scancel, _of(CANCELLED), cancels=True),
    "lower time limit": Kind(2, _time_limit, _of(TIME_LIMIT)),
    "requeue": Kind(2, _requeue, _of(PREEMPTED)),
    "two requeues": Kind(3, _two_requeues, _of(PREEMPTED)),
    "cancel": Kind(1, _cancel, _of(CANCELLED), cancels=True),
    "two cancels": Kind(2, _two_cancels, _of(CANCELLED), cancels=True),
    "cancel and requeue": Kind(3, _cancel_and_requeue, _of(CANCELLED, PREEMPTED), cancels=True),
    "cancel then requeue": Kind(3, _cancel_then_requeue, _of(CANCELLED), cancels=True),
    "cancel then two requeues": Kind(4, _cancel_then_two_requeues, _of(CANCELLED, PREEMPTED), cancels=True),
    "kill batch then two requeues": Kind(3, _kill_batch_then_two_requeues, _of(UNKNOWN, PREEMPTED), by_hand=True),
    "kill node": Kind(2, _kill_node, _NODE, away=True),
    "partition node": Kind(2, _partition, _NODE, harmless=True, away=True),
    "kill slurmctld": Kind(5, _slurmctld, _of(), harmless=True, away=True, alone=True),
    "kill slurmdbd": Kind(2, _slurmdbd, _of(), harmless=True, away=True, alone=True),
    "disk full": Kind(2, _full, _of(UNKNOWN), harmless=True, by_hand=True, away=True),
    "run read-only": Kind(2, _run_read_only, _of(UNKNOWN), harmless=True, by_hand=True, away=True),
    "checkpoints read-only": Kind(2, _checkpoints_read_only, _of(UNKNOWN), harmless=True, by_hand=True, away=True),
}
OF_MOMENT = {"training": _of(), "stopping": _of(PREEMPTED), "beginning": _of(PREEMPTED)}


def draw(rng: random.Random, ranks: int) -> Fault:
    kinds = [name for name, kind in MENU.items() if kind.ranks <= ranks]
    name = rng.choices(kinds, [MENU[k].weight for k in kinds])[0]
    moment = rng.choice(MOMENTS)
    seconds = 5.0 * 18.0 ** (rng.random() ** 1.5)  # 5 to 90, mostly short
    pick = rng.random()
    during = rng.choice(list(DURING))
    if not name.startswith("kill slurm"):
        return Fault(name, moment, seconds, pick)
    return Fault(name, "training", seconds, pick, during)


def kind_of(fault: Fault) -> Kind:
    """The fault's kind, with what may come of what happens meanwhile."""
    kind = MENU[fault.kind]
    other = MENU.get(fault.during)
    endings = kind.endings | OF_MOMENT[fault.moment] | (other.endings if other else _of())
    if other is None:
        return _with(kind, endings, kind.harmless)
    return _with(kind, endings, other.harmless, by_hand=other.by_hand, cancels=other.cancels)


def _with(kind: Kind, endings: frozenset[str], harmless: bool, **more: bool) -> Kind:
    fields = {**kind.__dict__, "endings": endings, "harmless": harmless, **more}
    return Kind(**fields)
