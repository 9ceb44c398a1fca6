"""What a storm does to a run, and what may then be recorded of it: the menu, and the endings that are true."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from clustertrain.run.endings import (
    CANCELLED,
    COMMUNICATION,
    HANG,
    NODE_FAILURE,
    PREEMPTED,
    SIGNAL,
    TIME_LIMIT,
    UNKNOWN,
    USER_ERROR,
)
from tests.harness.chaos_slurm import acts
from tests.harness.chaos_slurm.acts import DURING, Deed, Fault

MOMENTS = ("training", "training", "training", "training", "stopping", "beginning")


@dataclass(frozen=True)
class Kind:
    """``endings``: all that may truly be recorded of an attempt that this is done to, beside completed. ``harmless``:
    the attempt may also go on. ``by_hand``: the run may stop, and ``status`` then says to type ``requeue``.
    ``cancels``: the run may end cancelled. ``away``: lasts for the fault's seconds. ``alone``: hits the whole cluster.
    ``only_training``: at no other moment. ``meanwhile``: one of ``DURING`` may be done to the run while it lasts,
    as while one that is ``alone``. ``ranks``: needs so many ranks."""

    weight: int
    act: Callable[[Deed], None]
    endings: frozenset[str]
    harmless: bool = False
    by_hand: bool = False
    cancels: bool = False
    away: bool = False
    alone: bool = False
    only_training: bool = False
    meanwhile: bool = False
    ranks: int = 1


def _of(*endings: str) -> frozenset[str]:
    return frozenset(endings)


# A rank's death reaches its peers as a broken connection, and which of the two is seen first is chance.
_DIED = _of(UNKNOWN, COMMUNICATION)
# Slurm calls a job whose node is gone a node failure; peers may see the broken connection before that.
_NODE = _of(NODE_FAILURE, COMMUNICATION, HANG, UNKNOWN)
# A checkpoint that finds no room ends the run, with a word on what to do.
_FULL = _of(UNKNOWN, USER_ERROR)

MENU: dict[str, Kind] = {
    "kill rank": Kind(4, acts.kill_rank, _DIED),
    "stop rank": Kind(2, acts.stop_rank, _of(HANG, COMMUNICATION), ranks=2),
    "pause rank": Kind(1, acts.pause_rank, _of(), harmless=True, away=True),
    "pause agent": Kind(2, acts.pause_agent, _of(), harmless=True, away=True, meanwhile=True),
    "pause batch": Kind(3, acts.pause_batch, _of(), harmless=True, away=True, meanwhile=True),
    "pause srun": Kind(1, acts.pause_srun, _of(), harmless=True, away=True, meanwhile=True),
    "kill torchrun": Kind(3, acts.kill_torchrun, _DIED),
    "kill agent": Kind(3, acts.kill_agent, _DIED),
    "kill batch": Kind(3, acts.kill_batch, _of(UNKNOWN), by_hand=True),
    "kill srun": Kind(2, acts.kill_srun, _of(UNKNOWN), by_hand=True),
    "preempt": Kind(4, acts.preempt, _of(PREEMPTED)),
    "scontrol requeue": Kind(3, acts.scontrol_requeue, _of(PREEMPTED)),
    "scancel -s TERM": Kind(3, acts.scancel_term, _of(SIGNAL)),
    "scancel": Kind(2, acts.scancel, _of(CANCELLED), cancels=True),
    "lower time limit": Kind(2, acts.time_limit, _of(TIME_LIMIT), only_training=True),
    "suspend": Kind(3, acts.suspend, _of(), harmless=True, away=True, meanwhile=True),
    "hold then requeue": Kind(2, acts.hold_then_requeue, _of(PREEMPTED), away=True),
    "hold then scontrol requeue": Kind(1, acts.hold_then_scontrol_requeue, _of(PREEMPTED), away=True),
    "scontrol requeuehold": Kind(1, acts.requeuehold, _of(PREEMPTED), away=True),
    "requeue": Kind(2, acts.requeue, _of(PREEMPTED)),
    "two requeues": Kind(3, acts.two_requeues, _of(PREEMPTED)),
    "cancel": Kind(1, acts.cancel, _of(CANCELLED), cancels=True),
    "two cancels": Kind(2, acts.two_cancels, _of(CANCELLED), cancels=True),
    "cancel and requeue": Kind(3, acts.cancel_and_requeue, _of(CANCELLED, PREEMPTED), cancels=True),
    "cancel then requeue": Kind(3, acts.cancel_then_requeue, _of(CANCELLED), cancels=True),
    "cancel then two requeues": Kind(4, acts.cancel_then_two_requeues, _of(CANCELLED, PREEMPTED), cancels=True),
    "kill batch then two requeues": Kind(3, acts.kill_batch_then_two_requeues, _of(UNKNOWN, PREEMPTED), by_hand=True),
    "kill node": Kind(2, acts.kill_node, _NODE, away=True),
    "partition node": Kind(2, acts.partition, _NODE, harmless=True, away=True),
    # Nothing else meanwhile: where a job ends before Slurm has noticed, Slurm 22.05 forgets the GPUs of the job's next
    # start ("gres/gpu: job 4 dealloc of node node02 bad node_offset 0 count is 0"), and never gives them out again.
    "kill slurmd": Kind(2, acts.slurmd, _NODE, harmless=True, away=True, only_training=True),
    "drain node": Kind(2, acts.drain, _of(), harmless=True, away=True, meanwhile=True),
    "node set down": Kind(1, acts.down, _NODE, away=True),
    "kill slurmctld": Kind(5, acts.slurmctld, _of(), harmless=True, away=True, alone=True, only_training=True),
    "kill slurmdbd": Kind(2, acts.slurmdbd, _of(), harmless=True, away=True, alone=True, only_training=True),
    "kill munged": Kind(2, acts.munged, _of(), harmless=True, away=True, alone=True, only_training=True),
    "disk full": Kind(2, acts.full, _FULL, harmless=True, by_hand=True, away=True),
    "no inodes": Kind(2, acts.no_inodes, _FULL, harmless=True, by_hand=True, away=True),
    "rename run": Kind(2, acts.rename_run, _of(UNKNOWN), harmless=True, by_hand=True, away=True),
    "run read-only": Kind(2, acts.run_read_only, _of(UNKNOWN), harmless=True, by_hand=True, away=True),
    "checkpoints read-only": Kind(2, acts.checkpoints_read_only, _of(UNKNOWN), harmless=True, by_hand=True, away=True),
}
OF_MOMENT = {"training": _of(), "stopping": _of(PREEMPTED), "beginning": _of(PREEMPTED)}


def draw(rng: random.Random, ranks: int, only: Collection[str] = ()) -> Fault:
    """Of all kinds, or of those that are named."""
    kinds = [name for name, kind in MENU.items() if kind.ranks <= ranks and (not only or name in only)]
    name = rng.choices(kinds, [MENU[k].weight for k in kinds])[0]
    moment = rng.choice(MOMENTS)
    seconds = 5.0 * 18.0 ** (rng.random() ** 1.5)  # 5 to 90, mostly short
    pick = rng.random()
    kind = MENU[name]
    during = rng.choice(list(DURING)) if kind.alone or kind.meanwhile else ""
    return Fault(name, "training" if kind.only_training else moment, seconds if kind.away else 0.0, pick, during)


def kind_of(fault: Fault) -> Kind:
    """The fault's kind, with what may come of what happens meanwhile."""
    kind = MENU[fault.kind]
    other = MENU.get(fault.during)
    endings = kind.endings | OF_MOMENT[fault.moment] | (other.endings if other else _of())
    if other is None:
        return replace(kind, endings=endings)
    if fault.kind == "kill slurmctld" and fault.during == "preempt":
        # Nobody else knows that it was a preemption, and slurmctld itself forgets it in a restart. What stays is that
        # the allocation ends within the grace time.
        endings |= _of(UNKNOWN, SIGNAL, TIME_LIMIT)
    return replace(kind, endings=endings, harmless=other.harmless, by_hand=other.by_hand, cancels=other.cancels)
