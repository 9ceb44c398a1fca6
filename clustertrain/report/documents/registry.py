"""The JSON documents by name. Their types are imported on demand, because most commands need one of them."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from clustertrain.errors import NotFound


class Document(NamedTuple):
    """A JSON document of a command."""

    type_path: str
    """``module:class``, relative to the package, of the struct that describes the document."""
    command: str
    """The command that prints it."""
    version: int = 1
    """``schema_version`` of the document. It rises when a key is removed or renamed, or changes its type or meaning."""

    def load_type(self) -> Any:
        """Return the struct that describes the document."""
        module, _, name = self.type_path.partition(":")
        return getattr(importlib.import_module(f"clustertrain.{module}"), name)


_HERE = "report.documents"
DOCUMENTS: Mapping[str, Document] = {
    "adopt": Document(f"{_HERE}.submissions:Adoption", "adopt SCRIPT --json"),
    "cancel": Document(f"{_HERE}.runs:CancelledRuns", "cancel RUN --json"),
    "checkpoint-diff": Document(f"{_HERE}.checkpoints:CheckpointComparison", "checkpoint diff A B --json"),
    "checkpoint-digest": Document(f"{_HERE}.checkpoints:CheckpointDigest", "checkpoint digest RUN --json"),
    "checkpoint-export": Document(f"{_HERE}.checkpoints:CheckpointExport", "checkpoint export RUN -o FOLDER --json"),
    "checkpoint-list": Document(f"{_HERE}.checkpoints:CheckpointList", "checkpoint list RUN --json"),
    "checkpoint-prune": Document(f"{_HERE}.checkpoints:PrunedCheckpoints", "checkpoint prune RUN --keep N --json"),
    "checkpoint-verify": Document(f"{_HERE}.checkpoints:VerifiedCheckpoints", "checkpoint verify RUN --json"),
    "cluster-detect": Document(f"{_HERE}.clusters:DetectedProfile", "cluster detect --json"),
    "cluster-list": Document(f"{_HERE}.clusters:ProfileList", "cluster list --json"),
    "cluster-show": Document(f"{_HERE}.clusters:Profile", "cluster show NAME --json"),
    "compare": Document("report.runs.compare:RunsComparison", "compare A B --json"),
    "data-tokenize": Document(f"{_HERE}.tools:TokenShards", "data tokenize PATH -o FOLDER --json"),
    "diagnose": Document(f"{_HERE}.tools:Diagnosis", "diagnose RECIPE.toml --json"),
    "diagnose-checks": Document(f"{_HERE}.tools:CheckNames", "diagnose --json"),
    "list": Document(f"{_HERE}.runs:RunList", "list --json"),
    "plan": Document("plan.planner:Plan", "plan RECIPE.toml --json"),
    "plan-find-micro-batch": Document(f"{_HERE}.plans:MicroBatchSearch", "plan --find-micro-batch --json"),
    "plan-gpus-range": Document(f"{_HERE}.plans:PlansBySize", "plan --gpus-range LOW-HIGH --json"),
    "plan-table": Document(f"{_HERE}.plans:PredictedTable", "plan --table IN.csv --json"),
    "recipe-explain": Document(f"{_HERE}.tools:RecipeKeys", "recipe explain KEY --json"),
    "requeue": Document(f"{_HERE}.runs:RequeuedRun", "requeue RUN --json"),
    "rm": Document(f"{_HERE}.runs:DeletedRuns", "rm RUN --json"),
    "status": Document(f"{_HERE}.status:RunStatusDocument", "status RUN --json"),
    "submit": Document(f"{_HERE}.submissions:SubmittedRun", "submit RECIPE.toml --json"),
    "submit-dry-run": Document(f"{_HERE}.submissions:SubmissionPreview", "submit RECIPE.toml --dry-run --json"),
    "sweep": Document(f"{_HERE}.submissions:SubmittedSweep", "sweep RECIPE.toml --grid … --json"),
    "sweep-dry-run": Document(f"{_HERE}.submissions:SweepPreview", "sweep RECIPE.toml --grid … --dry-run --json"),
    "sweep-show": Document("report.runs.sweep:SweepResults", "sweep show SWEEP --json"),
    "telemetry": Document("telemetry.report_schema:Summary", "telemetry RUN --json"),
    "top": Document("report.top.view:RunView", "top RUN --json"),
    "track": Document(f"{_HERE}.tools:TrackedRun", "track RUN --json"),
    "version": Document(f"{_HERE}.tools:Versions", "version --json"),
    "wait": Document(f"{_HERE}.runs:EndedRuns", "wait RUN --json"),
}


def find_document(name: str) -> Document:
    """Return the document called ``name``. Raise NotFound with the nearest name if there is none."""
    if name not in DOCUMENTS:
        from clustertrain.config.parsing.documents import did_you_mean

        raise NotFound(f"there is no document {name!r}", fix=did_you_mean(name, list(DOCUMENTS)))
    return DOCUMENTS[name]
