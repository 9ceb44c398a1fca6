"""Results: the record that a rank writes when it ends, and the result that the agent of a node derives from them.

The training process writes :class:`RankResult`. The agent reads those of its node and writes one :class:`NodeResult`.
The batch process reads the results of all nodes and decides whether the run continues.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from clustertrain.errors import EXIT_FAILED
from clustertrain.run import json_files

RankEnding = Literal["completed", "stopped", "failed"]
"""How a rank, or all ranks of a node, ended. How an attempt ended: :data:`clustertrain.run.endings.Ending`."""

FailureKind = Literal[
    "environment",  # the recipe, the machine or the checkpoints are unfit, or a disk is full: a requeue would not help
    "out_of_memory",
    "error",  # the training raised another Python error
    "device",  # a CUDA error; ECC errors, illegal accesses and lost GPUs look alike
    "storage",  # a file system that did not answer
    "hang",
    "communication",
    "crashed",  # a signal that the process raised itself, such as SIGSEGV
    "exited",  # a nonzero exit code without a Python error
    "killed",
    "launcher",  # torchrun failed, not the ranks
    "unknown",
]

KIND_PRIORITY: tuple[FailureKind, ...] = (
    "environment", "out_of_memory", "error", "device", "storage", "hang", "crashed", "exited", "communication",
    "killed",
)  # fmt: skip
"""The first kind in this list explains the others: a rank that raises or crashes makes its peers' collectives fail."""


class ErrorInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The error that ended a rank."""

    type: str
    """Class name of the exception, or another short label."""
    message: str
    traceback: str | None = None
    """The last 16 KiB of the Python traceback."""


class LastSeen(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where a rank was, from its last heartbeat."""

    step: int | None = None
    """Number of steps completed."""
    phase: str | None = None
    stopped: bool = False
    """The process was stopped by SIGSTOP or a debugger when another rank failed."""


class RankResult(msgspec.Struct, frozen=True, kw_only=True):
    """The content of ``rank-<r>.json`` in the rank folder of a node."""

    rank: int = 0
    local_rank: int | None = None
    """None in records that the agent inferred."""
    ending: RankEnding
    finished: bool = True
    """The last loop of steps ran to its end. Records of versions that did not write this field count as finished."""
    step: int | None = None
    """Last completed step."""
    committed_step: int | None = None
    """Step of the newest checkpoint that this attempt committed."""
    exit_code: int | None = None
    kind: FailureKind | None = None
    reason: str | None = None
    """Why the rank ended this way, if it is not obvious."""
    budget_spent: bool = False
    """The budget of the run's contract is spent, so a requeue would be useless."""
    error: ErrorInfo | None = None
    ended_by_signal: bool = False
    """The stop signal ended the program, which does not handle it and so saved nothing at the stop."""
    peak_allocated_gib: float | None = None
    """Peak memory of torch's CUDA allocator, in GiB; None on CPU."""


class RankOutcome(RankResult, frozen=True, kw_only=True):
    """How a rank ended according to its record and to what the agent observed."""

    ended_by_script: bool = False
    """The script itself exited with 0 after a stop request, without finishing its session."""
    ended_by_agent: bool = False
    """The agent ended the rank because it hung after all others had completed."""
    last_seen: LastSeen | None = None


class NodeResult(msgspec.Struct, frozen=True, kw_only=True):
    """The content of ``results/<node>.json``: the result of all ranks of a node."""

    node: str = ""
    node_rank: int = 0
    ending: RankEnding
    kind: FailureKind | None = None
    """The failure that explains the others; None if no rank failed."""
    exit_code: int = EXIT_FAILED
    """Exit code of the agent."""
    step: int | None = None
    """Highest step that a rank of the node completed."""
    committed_step: int | None = None
    message: str | None = None
    """The failure in one sentence."""
    ranks: tuple[RankOutcome, ...] = ()
    reason: str | None = None
    """Why the ranks ended this way, if it is not obvious."""
    budget_spent: bool = False
    """The budget of the run's contract is spent, so a requeue would be useless."""


def sort_failures(outcomes: Sequence[RankOutcome]) -> list[RankOutcome]:
    """Return the ranks that failed, those first that explain the failures of the others."""
    priority = {kind: i for i, kind in enumerate(KIND_PRIORITY)}
    failed = [o for o in outcomes if o.ending == "failed"]
    return sorted(failed, key=lambda o: priority.get(o.kind or "unknown", len(KIND_PRIORITY)))


def _rename_kind(document: object) -> object:
    """Return a document of an earlier version with today's name of the failure."""
    if isinstance(document, dict) and document.get("kind") == "user_error":
        return {**document, "kind": "error"}
    return document


def parse_rank_result(document: object) -> RankResult | None:
    """Return the record in a JSON ``document``, without fields of a wrong type; None if it is not a record."""
    return json_files.convert_leniently(_rename_kind(document), RankResult)


def parse_node_result(document: object) -> NodeResult | None:
    """Return the result in a JSON ``document``, without fields of a wrong type; None if it is not a result."""
    if isinstance(document, dict) and isinstance(document.get("ranks"), list):
        ranks = [json_files.convert_leniently(_rename_kind(rank), RankOutcome) for rank in document["ranks"]]
        document = {**document, "ranks": tuple(rank for rank in ranks if rank is not None)}
    return json_files.convert_leniently(_rename_kind(document), NodeResult)


def load_node_results(folder: Path) -> list[NodeResult]:
    """Return the results in the folder of an attempt, by node; those that cannot be read are left out."""
    try:
        paths = sorted(folder.glob("*.json"))
    except OSError:
        return []
    return [result for path in paths if (result := _load_node_result(path)) is not None]


def _load_node_result(path: Path) -> NodeResult | None:
    try:
        return parse_node_result(json_files.load_document(path).value)
    except OSError:
        return None


def last_steps(nodes: Iterable[NodeResult]) -> dict[int, int]:
    """Return the last completed step of each rank that reported one."""
    reported = {o.rank: (o.step, o.last_seen.step if o.last_seen is not None else None) for n in nodes for o in n.ranks}
    known = {rank: [step for step in steps if step is not None] for rank, steps in reported.items()}
    return {rank: max(steps) for rank, steps in known.items() if steps}
