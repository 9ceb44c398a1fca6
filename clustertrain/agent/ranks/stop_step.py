"""The step after which the ranks of a command stop: the agents' part in the agreement of ``rank_hooks``.

Each agent reports what its ranks have done and answered in the attempt's folder. The first node's agent proposes a
step, moves it if a rank is past it, and publishes that it is agreed once all ranks have accepted. Each agent hands the
proposal to its ranks.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from clustertrain import clock, fsio
from clustertrain.run import heartbeat, json_files

AgreementState = Literal["pending", "agreed", "impossible"]
REPORT_PATIENCE_S = 30.0  # for the agents of all nodes to learn of the stop
MEASURE_S = 0.3
# From the proposal to the last rank's look at it, without the step that the rank is in.
LATENCY_S, LATENCY_ACROSS_NODES_S = 0.5, 3.0


class Proposal(msgspec.Struct, frozen=True, kw_only=True):
    """The content of ``stop-step/proposal.json``, and of ``stop-step.json`` in a rank folder."""

    id: int
    step: int | None = None
    """Steps done when the ranks stop; None if they cannot agree on one."""
    is_agreed: bool = False


class NodeReport(msgspec.Struct, frozen=True, kw_only=True):
    """The content of ``stop-step/<node>.json``."""

    offers: bool = False
    """Whether all ranks of the node save and stop at a given step."""
    step: int = 0
    """The most steps that a rank of the node has done."""
    steps_per_s: float = 0.0
    answered: int = 0
    """Id of the newest proposal that all ranks of the node have answered."""
    accepts: bool = False


class _Answer(msgspec.Struct, frozen=True, kw_only=True):
    """The content of ``stop-answer-<rank>.json`` in a rank folder."""

    id: int = 0
    step: int = 0
    accepts: bool = False


class StopStepAgreement:
    """The agreement of one attempt, begun at a stop request.

    Args of the constructor:
        folder: ``stop-step`` in the attempt's folder.
        node_rank: 0 for the agent that proposes.
    """

    def __init__(
        self, folder: Path, rank_dir: Path, nodes: Sequence[str], node_rank: int, ranks: Sequence[int]
    ) -> None:
        self._folder, self._rank_dir = folder, rank_dir
        self._nodes, self._node_rank, self._ranks = tuple(nodes), node_rank, tuple(ranks)
        self._began = clock.monotonic()
        self._first_step = max(self._find_steps().values())
        self._report: NodeReport | None = None
        self._proposal: Proposal | None = None
        self._state: AgreementState = "pending"

    def poll(self) -> AgreementState:
        """Advance the agreement; called several times per second."""
        if self._state == "pending" and clock.monotonic() >= self._began + MEASURE_S:
            try:
                self._exchange()
            except OSError as e:  # a full disk
                print(f"clustertrain agent: no common step to stop at: {e}", file=sys.stderr, flush=True)
                self._state = "impossible"
        return self._state

    def _exchange(self) -> None:
        self._publish_report()
        if self._node_rank == 0:
            self._propose()
        self._hand_over(self._read_proposal())
        if self._report is not None and not self._report.offers:
            self._state = "impossible"  # not even the first node's agent has to say so
        if self._proposal is None and clock.monotonic() > self._began + 2 * REPORT_PATIENCE_S:
            self._state = "impossible"  # the first node's agent is gone

    def _find_steps(self) -> dict[int, int]:
        """Return the steps that each rank has done, by rank."""
        beats = heartbeat.HeartbeatReader(self._rank_dir, list(self._ranks)).read()
        return {rank: beats[rank].step if rank in beats else 0 for rank in self._ranks}

    def _publish_report(self) -> None:
        """Write the report of this node, if there is news other than steps."""
        old, steps = self._report, self._find_steps()
        answers = [self._find_answer(rank, steps[rank]) for rank in self._ranks]
        step = max(*steps.values(), *(answer.step for answer in answers))
        is_answered = len({answer.id for answer in answers}) == 1
        report = NodeReport(
            offers=all((self._rank_dir / f"stops-{rank}.json").exists() for rank in self._ranks),
            step=step,
            steps_per_s=(step - self._first_step) / (clock.monotonic() - self._began),
            answered=answers[0].id if is_answered else 0,
            accepts=is_answered and all(answer.accepts for answer in answers),
        )
        if old is None or (report.offers, report.answered) != (old.offers, old.answered):
            self._folder.mkdir(exist_ok=True)
            fsio.write_json(self._folder / f"{self._nodes[self._node_rank]}.json", msgspec.to_builtins(report))
            self._report = report

    def _find_answer(self, rank: int, step: int) -> _Answer:
        """Return the rank's answer to the newest proposal, or to an earlier one.

        A rank that has done the proposed step without an answer had looked before the proposal was there. It may wait
        in a collective of its next step for a rank that waits at the proposed one, so the agent refuses in its place.
        If the rank answers after all, it learns of the next proposal where it waits.
        """
        document = fsio.read_json(self._rank_dir / f"stop-answer-{rank}.json")
        answer = json_files.convert_leniently(document, _Answer) or _Answer()
        newest = self._proposal
        if newest is not None and newest.step is not None and answer.id != newest.id and step >= newest.step:
            return _Answer(id=newest.id, step=step, accepts=False)
        return answer

    def _propose(self) -> None:
        """Publish the first proposal, the next one, or that the newest one is agreed."""
        documents = (fsio.poll_json(self._folder / f"{node}.json") for node in self._nodes)
        reports = (json_files.convert_leniently(document, NodeReport) for document in documents)
        known = [report for report in reports if report is not None]
        newest = self._proposal
        is_late = newest is None and clock.monotonic() > self._began + REPORT_PATIENCE_S
        if not all(report.offers for report in known) or (len(known) < len(self._nodes) and is_late):
            self._publish(Proposal(id=0))
        elif len(known) < len(self._nodes):
            return
        elif newest is None:
            self._publish(self._next_proposal(known, 1))
        elif all(report.answered == newest.id for report in known):
            is_agreed = all(report.accepts for report in known)
            self._publish(
                Proposal(id=newest.id, step=newest.step, is_agreed=True)
                if is_agreed
                else self._next_proposal(known, newest.id + 1)
            )

    def _next_proposal(self, reports: Sequence[NodeReport], number: int) -> Proposal:
        """Return a proposal that the ranks reach soon after they have seen it, with twice the margin each time."""
        latency_s = (LATENCY_ACROSS_NODES_S if len(self._nodes) > 1 else LATENCY_S) * 2 ** (number - 1)
        margin = math.ceil(latency_s * max(report.steps_per_s for report in reports))
        return Proposal(id=number, step=max(report.step for report in reports) + 1 + margin)

    def _publish(self, proposal: Proposal) -> None:
        fsio.write_json(self._folder / "proposal.json", msgspec.to_builtins(proposal))

    def _read_proposal(self) -> Proposal | None:
        return json_files.convert_leniently(fsio.poll_json(self._folder / "proposal.json"), Proposal)

    def _hand_over(self, proposal: Proposal | None) -> None:
        if proposal is None or proposal == self._proposal:
            return
        self._proposal = proposal
        fsio.write_json(self._rank_dir / "stop-step.json", msgspec.to_builtins(proposal))
        if proposal.step is None or proposal.is_agreed:
            self._state = "agreed" if proposal.is_agreed else "impossible"
