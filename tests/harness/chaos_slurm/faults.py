"""The menu of faults, and the endings of an attempt that are correct after each."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from clustertrain.run.endings import (
    CANCELLED,
    COMMUNICATION,
    FAILED,
    HANG,
    NODE_FAILURE,
    PREEMPTED,
    SIGNAL,
    TIME_LIMIT,
    UNKNOWN,
)
from tests.harness.chaos_slurm import actions
from tests.harness.chaos_slurm.actions import DURING, Fault, Injection

MOMENTS = ("training", "training", "training", "training", "stopping", "beginning")


@dataclass(frozen=True)
class Kind:
    """A kind of fault.

    Attributes:
        weight: relative frequency.
        act: function that injects it.
        endings: correct endings of an attempt that it hits, in addition to completed.
        harmless: whether the attempt may also survive.
        by_hand: whether the run may stop; ``status`` must then print ``clustertrain requeue``.
        cancels: whether the run may end as cancelled.
        lasts: whether it lasts for ``Fault.seconds``.
        whole_cluster: whether it hits the whole cluster, so that no other round runs at the same time.
        only_training: whether it happens only while the run trains.
        concurrent: whether an action of ``DURING`` may run while it lasts, as for ``whole_cluster``.
        ranks: smallest number of ranks that it needs.
    """

    weight: int
    act: Callable[[Injection], None]
    endings: frozenset[str]
    harmless: bool = False
    by_hand: bool = False
    cancels: bool = False
    lasts: bool = False
    whole_cluster: bool = False
    only_training: bool = False
    concurrent: bool = False
    ranks: int = 1


def _endings(*endings: str) -> frozenset[str]:
    return frozenset(endings)


# The peers of a dead rank see a broken connection, and either of the two may be noticed first.
_DIED = _endings(UNKNOWN, COMMUNICATION)
# Slurm reports a node failure for a job that lost its node; peers may see the broken connection earlier.
_NODE = _endings(NODE_FAILURE, COMMUNICATION, HANG, UNKNOWN)
# A checkpoint on a full disk ends the run with an error that names the fix.
_FULL = _endings(UNKNOWN, FAILED)

MENU: dict[str, Kind] = {
    "kill rank": Kind(4, actions.kill_rank, _DIED),
    "stop rank": Kind(2, actions.stop_rank, _endings(HANG, COMMUNICATION), ranks=2),
    "pause rank": Kind(1, actions.pause_rank, _endings(), harmless=True, lasts=True),
    "pause agent": Kind(2, actions.pause_agent, _endings(), harmless=True, lasts=True, concurrent=True),
    "pause batch": Kind(3, actions.pause_batch, _endings(), harmless=True, lasts=True, concurrent=True),
    "pause srun": Kind(1, actions.pause_srun, _endings(), harmless=True, lasts=True, concurrent=True),
    "kill torchrun": Kind(3, actions.kill_torchrun, _DIED),
    "kill agent": Kind(3, actions.kill_agent, _DIED),
    "kill batch": Kind(3, actions.kill_batch, _endings(UNKNOWN), by_hand=True),
    "kill srun": Kind(2, actions.kill_srun, _endings(UNKNOWN), by_hand=True),
    "preempt": Kind(4, actions.preempt, _endings(PREEMPTED)),
    "scontrol requeue": Kind(3, actions.scontrol_requeue, _endings(PREEMPTED)),
    "scancel -s TERM": Kind(3, actions.scancel_term, _endings(SIGNAL)),
    "scancel": Kind(2, actions.scancel, _endings(CANCELLED), cancels=True),
    "lower time limit": Kind(2, actions.time_limit, _endings(TIME_LIMIT), only_training=True),
    "suspend": Kind(3, actions.suspend, _endings(), harmless=True, lasts=True, concurrent=True),
    "hold then requeue": Kind(2, actions.hold_then_requeue, _endings(PREEMPTED), lasts=True),
    "hold then scontrol requeue": Kind(1, actions.hold_then_scontrol_requeue, _endings(PREEMPTED), lasts=True),
    "scontrol requeuehold": Kind(1, actions.requeuehold, _endings(PREEMPTED), lasts=True),
    "requeue": Kind(2, actions.requeue, _endings(PREEMPTED)),
    "two requeues": Kind(3, actions.two_requeues, _endings(PREEMPTED)),
    "cancel": Kind(1, actions.cancel, _endings(CANCELLED), cancels=True),
    "two cancels": Kind(2, actions.two_cancels, _endings(CANCELLED), cancels=True),
    "cancel and requeue": Kind(3, actions.cancel_and_requeue, _endings(CANCELLED, PREEMPTED), cancels=True),
    "cancel then requeue": Kind(3, actions.cancel_then_requeue, _endings(CANCELLED), cancels=True),
    "cancel then two requeues": Kind(4, actions.cancel_then_two_requeues, _endings(CANCELLED, PREEMPTED), cancels=True),
    "kill batch then two requeues": Kind(
        3, actions.kill_batch_then_two_requeues, _endings(UNKNOWN, PREEMPTED), by_hand=True
    ),
    "kill node": Kind(2, actions.kill_node, _NODE, lasts=True),
    "partition node": Kind(2, actions.partition, _NODE, harmless=True, lasts=True),
    # No concurrent action: if a job ends before Slurm has noticed the loss, Slurm 22.05 leaks the GPUs of its next
    # start ("gres/gpu: job 4 dealloc of node node02 bad node_offset 0 count is 0") and never allocates them again.
    "kill slurmd": Kind(2, actions.slurmd, _NODE, harmless=True, lasts=True, only_training=True),
    "drain node": Kind(2, actions.drain, _endings(), harmless=True, lasts=True, concurrent=True),
    "node set down": Kind(1, actions.down, _NODE, lasts=True),
    "kill slurmctld": Kind(
        5, actions.slurmctld, _endings(), harmless=True, lasts=True, whole_cluster=True, only_training=True
    ),
    "kill slurmdbd": Kind(
        2, actions.slurmdbd, _endings(), harmless=True, lasts=True, whole_cluster=True, only_training=True
    ),
    "kill munged": Kind(
        2, actions.munged, _endings(), harmless=True, lasts=True, whole_cluster=True, only_training=True
    ),
    "disk full": Kind(2, actions.full, _FULL, harmless=True, by_hand=True, lasts=True),
    "no inodes": Kind(2, actions.no_inodes, _FULL, harmless=True, by_hand=True, lasts=True),
    "rename run": Kind(2, actions.rename_run, _endings(UNKNOWN), harmless=True, by_hand=True, lasts=True),
    "run read-only": Kind(2, actions.run_read_only, _endings(UNKNOWN), harmless=True, by_hand=True, lasts=True),
    "checkpoints read-only": Kind(
        2, actions.checkpoints_read_only, _endings(UNKNOWN), harmless=True, by_hand=True, lasts=True
    ),
}
MOMENT_ENDINGS = {"training": _endings(), "stopping": _endings(PREEMPTED), "beginning": _endings(PREEMPTED)}


def draw(rng: random.Random, ranks: int, only: Collection[str] = ()) -> Fault:
    """Draw a fault of any kind, or of the kinds in ``only``, that fits a run of ``ranks`` ranks."""
    kinds = [name for name, kind in MENU.items() if kind.ranks <= ranks and (not only or name in only)]
    name = rng.choices(kinds, [MENU[k].weight for k in kinds])[0]
    moment = rng.choice(MOMENTS)
    seconds = 5.0 * 18.0 ** (rng.random() ** 1.5)  # 5 to 90, mostly short
    pick = rng.random()
    kind = MENU[name]
    during = rng.choice(list(DURING)) if kind.whole_cluster or kind.concurrent else ""
    return Fault(name, "training" if kind.only_training else moment, seconds if kind.lasts else 0.0, pick, during)


def resolve_kind(fault: Fault) -> Kind:
    """Return the kind of ``fault``, combined with the kind of the action during it."""
    kind = MENU[fault.kind]
    other = MENU.get(fault.during)
    endings = kind.endings | MOMENT_ENDINGS[fault.moment] | (other.endings if other else _endings())
    if other is None:
        return replace(kind, endings=endings)
    if fault.kind == "kill slurmctld" and fault.during == "preempt":
        # Only slurmctld knows about the preemption, and a restart makes it forget. The allocation still ends within the
        # grace time.
        endings |= _endings(UNKNOWN, SIGNAL, TIME_LIMIT)
    return replace(kind, endings=endings, harmless=other.harmless, by_hand=other.by_hand, cancels=other.cancels)
