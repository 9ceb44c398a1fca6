"""The MLflow tracker: a server, a database, or by default the run's ``tracking/mlflow.db``.

An existing MLflow run is found by its id in the state, or by a tag with our run id.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any, Literal

from clustertrain import extras, fsio
from clustertrain.run.run_dir import RunDir
from clustertrain.tracking.model_files import exported_model
from clustertrain.tracking.row_follower import Row, scalars
from clustertrain.tracking.run_facts import RunMetadata
from clustertrain.tracking.tracker import TrackerState

TAG = "clustertrain.run"
MODEL_FOLDER = "model"  # of the run's artifacts
MAX_METRICS_PER_REQUEST, MAX_PARAMS_PER_REQUEST = 1000, 100  # MLflow's limits
MAX_PARAM_LENGTH = 6000
# By default MLflow retries seven times over minutes and cannot be stopped meanwhile; rows can wait instead.
_HTTP_DEFAULTS = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "20"}
_STATUS = {"completed": "FINISHED", "failed": "FAILED"}


class MLflow:
    """Tracker that uploads each step to MLflow once.

    The state records the last step before rows are sent. After a kill, only steps up to it are looked up, and values
    that arrived are not sent again, because not every store rejects duplicates.
    """

    name = "mlflow"

    def __init__(self, run: RunDir, metadata: RunMetadata) -> None:
        for name, value in _HTTP_DEFAULTS.items():
            os.environ.setdefault(name, value)
        self._uri = metadata.spec.uri or os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{run.tracking}/mlflow.db"
        if is_file_store(self._uri):
            # Without this variable, MLflow 3 rejects file stores, which are in maintenance mode. The user chose one.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        extras.require("mlflow.tracking", "the tracker mlflow")
        import mlflow.entities
        import mlflow.exceptions
        import mlflow.tracking

        self._mlflow: Any = mlflow
        self._metadata = metadata
        self._artifacts = (run.tracking / "mlflow-artifacts").as_uri()
        self._folder = run.tracking
        self._clustertrain_run = run
        self._state = TrackerState(run, self.name)
        self._client: Any = None
        self._run_id = ""
        self._last_step = -1
        self._already_logged: set[tuple[str, int]] = set()

    def open(self) -> int:
        """Find or create the MLflow run; return the last step that it holds."""
        fsio.make_folder(self._folder)
        self._client = self._mlflow.tracking.MlflowClient(self._uri)
        state = self._state.read()
        if state.get("uri") != self._uri:
            state = {}
        self._last_step = int(state.get("step", -1))
        run_id = str(state.get("run_id") or "") or self._find_run()
        self._run_id = run_id or self._create_run()
        self._already_logged = set()
        if run_id and int(state.get("sending_step", self._last_step + 1)) > self._last_step:
            self._already_logged = self._find_logged()
        self._client.update_run(self._run_id, "RUNNING")
        for key, value in self._metadata.attempt_tags.items():
            self._client.set_tag(self._run_id, f"clustertrain.{key}", value)
        self._save_state(self._last_step)
        return self._last_step

    def _experiment(self) -> str:
        name = self._metadata.project or os.environ.get("MLFLOW_EXPERIMENT_NAME") or self._metadata.name
        experiment = self._client.get_experiment_by_name(name)
        if experiment is not None:
            return str(experiment.experiment_id)
        local = self._uri.startswith("sqlite:") or is_file_store(self._uri)
        try:
            return str(self._client.create_experiment(name, self._artifacts if local else None))
        except self._mlflow.exceptions.MlflowException:
            experiment = self._client.get_experiment_by_name(name)  # another run of the sweep created it first
            if experiment is None:
                raise
            return str(experiment.experiment_id)

    def _find_run(self) -> str:
        """Return the id of an MLflow run whose creator was killed before saving the id, or an empty string."""
        rows = self._client.search_runs([self._experiment()], f"tags.`{TAG}` = '{self._metadata.run}'", max_results=1)
        return str(rows[0].info.run_id) if rows else ""

    def _create_run(self) -> str:
        metadata = self._metadata
        tags = {TAG: metadata.run, **{f"clustertrain.{k}": v for k, v in metadata.tags.items() if k != "run"}}
        created_run = self._client.create_run(self._experiment(), run_name=metadata.run, tags=tags)
        params = [
            self._mlflow.entities.Param(_sanitize_name(key), str(value)[:MAX_PARAM_LENGTH])
            for key, value in metadata.config.items()
        ]
        for i in range(0, len(params), MAX_PARAMS_PER_REQUEST):
            self._client.log_batch(created_run.info.run_id, params=params[i : i + MAX_PARAMS_PER_REQUEST])
        return str(created_run.info.run_id)

    def _find_logged(self) -> set[tuple[str, int]]:
        """Return (name, step) of the values that a killed process sent but did not record."""
        names = self._client.get_run(self._run_id).data.metrics
        return {
            (name, m.step)
            for name in names
            for m in self._client.get_metric_history(self._run_id, name)
            if m.step > self._last_step
        }

    def _save_state(self, sending_step: int) -> None:
        self._state.write(uri=self._uri, run_id=self._run_id, step=self._last_step, sending_step=sending_step)

    def log_rows(self, rows: Sequence[Row]) -> None:
        metrics = [
            self._mlflow.entities.Metric(_sanitize_name(key), value, int(1000 * float(row.get("t") or 0)), row["step"])
            for row in rows
            for key, value in scalars(row).items()
            if (_sanitize_name(key), row["step"]) not in self._already_logged
        ]
        self._save_state(rows[-1]["step"])
        for i in range(0, len(metrics), MAX_METRICS_PER_REQUEST):
            self._client.log_batch(self._run_id, metrics=metrics[i : i + MAX_METRICS_PER_REQUEST])
        self._last_step = rows[-1]["step"]
        self._save_state(self._last_step)

    def close(self, ending: str | None) -> None:
        try:
            if ending == "completed" and self._metadata.spec.log_model != "none":
                self._register_model(self._metadata.spec.log_model)
        finally:  # the run has ended, whether its model could be logged or not
            if ending is not None:
                self._client.set_terminated(self._run_id, _STATUS.get(ending, "KILLED"))

    def _register_model(self, which: Literal["best", "last"]) -> None:
        """Upload the model's files and register them as a new version, unless a version of this run exists."""
        name = _sanitize_name(self._metadata.project or self._metadata.name).replace("/", "_")  # refused in a model's
        if any(v.run_id == self._run_id for v in self._client.search_model_versions(f"name='{name}'")):
            return
        with exported_model(self._clustertrain_run, which, self.name) as model:
            self._client.log_artifacts(self._run_id, str(model.folder), MODEL_FOLDER)
            tags = {"clustertrain.run": self._metadata.run, "clustertrain.step": str(model.step)}
        try:
            self._client.create_registered_model(name)
        except self._mlflow.exceptions.MlflowException as e:
            if e.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        source = f"{self._client.get_run(self._run_id).info.artifact_uri}/{MODEL_FOLDER}"
        self._client.create_model_version(name, source, self._run_id, tags=tags)

    def abandon(self) -> None:
        self._client = None


def is_file_store(uri: str) -> bool:
    """Return whether ``uri`` is a folder of MLflow's file store."""
    return uri.startswith("file:") or "://" not in uri


def _sanitize_name(key: str) -> str:
    """Replace characters that MLflow does not allow in names."""
    return re.sub(r"[^\w\-. /]", "_", key)
