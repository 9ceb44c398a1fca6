"""MLflow: a server, a database, or the run's own ``tracking/mlflow.db``. Its run is found again by its id, which is in
the state, or by the tag that names our run."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any

from clustertrain import fsio
from clustertrain.errors import ConfigError
from clustertrain.run.run_dir import RunDir
from clustertrain.tracking.row_follower import Row, scalars
from clustertrain.tracking.run_facts import Facts
from clustertrain.tracking.tracker import State

TAG = "clustertrain.run"
MOST_METRICS, MOST_PARAMS = 1000, 100  # in one request, MLflow's own limits
LONGEST_PARAM = 6000
# By itself it tries seven times over minutes, in which it hears of no end; the rows wait here just as well.
_PATIENCE = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "20"}
_STATUS = {"completed": "FINISHED", "failed": "FAILED"}


class MLflow:
    """Before rows are sent, the state says up to which step: after a kill these alone are looked up, and what arrived
    is not sent again. Not every store refuses a value that it has."""

    name = "mlflow"

    def __init__(self, run: RunDir, facts: Facts) -> None:
        for name, value in _PATIENCE.items():
            os.environ.setdefault(name, value)
        self._uri = facts.spec.uri or os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{run.tracking}/mlflow.db"
        if is_folder(self._uri):
            # MLflow 3 has put file stores into maintenance, and refuses them but for this word. Whoever names one has
            # chosen it.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        try:
            import mlflow.entities
            import mlflow.exceptions
            import mlflow.tracking
        except ImportError as e:
            raise ConfigError(f"mlflow cannot be imported: {e}", fix="pip install 'clustertrain[mlflow]'") from e
        self._mlflow: Any = mlflow
        self._facts = facts
        self._artifacts = (run.tracking / "mlflow-artifacts").as_uri()
        self._folder = run.tracking
        self._state = State(run, self.name)
        self._client: Any = None
        self._id = ""
        self._step = -1
        self._there: set[tuple[str, int]] = set()

    def open(self) -> int:
        fsio.make_folder(self._folder)
        self._client = self._mlflow.tracking.MlflowClient(self._uri)
        state = self._state.read()
        if state.get("uri") != self._uri:
            state = {}
        self._step = int(state.get("step", -1))
        found = str(state.get("run_id") or "") or self._find()
        self._id = found or self._create()
        self._there = set()
        if found and int(state.get("sending", self._step + 1)) > self._step:
            self._there = self._arrived()
        self._client.update_run(self._id, "RUNNING")
        for key, value in self._facts.attempt.items():
            self._client.set_tag(self._id, f"clustertrain.{key}", value)
        self._write(self._step)
        return self._step

    def _experiment(self) -> str:
        name = self._facts.project or os.environ.get("MLFLOW_EXPERIMENT_NAME") or self._facts.name
        known = self._client.get_experiment_by_name(name)
        if known is not None:
            return str(known.experiment_id)
        local = self._uri.startswith("sqlite:") or is_folder(self._uri)
        try:
            return str(self._client.create_experiment(name, self._artifacts if local else None))
        except self._mlflow.exceptions.MlflowException:
            known = self._client.get_experiment_by_name(name)  # another run of the sweep was first
            if known is None:
                raise
            return str(known.experiment_id)

    def _find(self) -> str:
        """The run that a killed process made and could not write down; "" for none."""
        rows = self._client.search_runs([self._experiment()], f"tags.`{TAG}` = '{self._facts.run}'", max_results=1)
        return str(rows[0].info.run_id) if rows else ""

    def _create(self) -> str:
        facts = self._facts
        tags = {TAG: facts.run, **{f"clustertrain.{k}": v for k, v in facts.tags.items() if k != "run"}}
        made = self._client.create_run(self._experiment(), run_name=facts.run, tags=tags)
        params = [
            self._mlflow.entities.Param(_name(key), str(value)[:LONGEST_PARAM]) for key, value in facts.config.items()
        ]
        for i in range(0, len(params), MOST_PARAMS):
            self._client.log_batch(made.info.run_id, params=params[i : i + MOST_PARAMS])
        return str(made.info.run_id)

    def _arrived(self) -> set[tuple[str, int]]:
        """By name and step, what was being sent when the process ended."""
        names = self._client.get_run(self._id).data.metrics
        return {
            (name, m.step)
            for name in names
            for m in self._client.get_metric_history(self._id, name)
            if m.step > self._step
        }

    def _write(self, sending: int) -> None:
        self._state.write(uri=self._uri, run_id=self._id, step=self._step, sending=sending)

    def hand(self, rows: Sequence[Row]) -> None:
        metrics = [
            self._mlflow.entities.Metric(_name(key), value, int(1000 * float(row.get("t") or 0)), row["step"])
            for row in rows
            for key, value in scalars(row).items()
            if (_name(key), row["step"]) not in self._there
        ]
        self._write(rows[-1]["step"])
        for i in range(0, len(metrics), MOST_METRICS):
            self._client.log_batch(self._id, metrics=metrics[i : i + MOST_METRICS])
        self._step = rows[-1]["step"]
        self._write(self._step)

    def close(self, ending: str | None) -> None:
        if ending is not None:
            self._client.set_terminated(self._id, _STATUS.get(ending, "KILLED"))

    def abandon(self) -> None:
        self._client = None


def is_folder(uri: str) -> bool:
    return uri.startswith("file:") or "://" not in uri


def _name(key: str) -> str:
    """As MLflow takes it."""
    return re.sub(r"[^\w\-. /]", "_", key)
