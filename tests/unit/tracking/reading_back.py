"""Read the contents of trackers with their libraries: (step, value) of a scalar, in the order of the store."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from clustertrain.run.run_dir import RunDir
from clustertrain.tracking import wandb as wandb_tracker

Points = list[tuple[int, float]]


def tensorboard(run: RunDir, tag: str = "loss") -> Points:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run.tracking / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    return [(s.step, s.value) for s in events.Scalars(tag)] if tag in events.Tags()["scalars"] else []


def mlflow(run: RunDir, uri: str = "", tag: str = "loss") -> Points:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(uri or f"sqlite:///{run.tracking}/mlflow.db")
    mlflow_run = only_mlflow_run(client)
    return [(m.step, m.value) for m in client.get_metric_history(mlflow_run.info.run_id, tag)]


def only_mlflow_run(client: Any) -> Any:
    """Return the only run in the store."""
    (mlflow_run,) = client.search_runs([e.experiment_id for e in client.search_experiments()])
    return mlflow_run


def wandb_records(run: RunDir) -> list[Any]:
    """Return all records of the offline files, which W&B syncs in the order of their names."""
    from wandb.proto import wandb_internal_pb2

    records = []
    for path in wandb_files(run):
        for data in wandb_tracker.read_records(path.read_bytes()):
            records.append(wandb_internal_pb2.Record())
            records[-1].ParseFromString(data)
    return records


def wandb_files(run: RunDir) -> list[Path]:
    return sorted(run.tracking.glob("wandb/offline-run-*/*.wandb"))


def wandb(run: RunDir, tag: str = "loss") -> Points:
    points = []
    for record in wandb_records(run):
        if record.WhichOneof("record_type") == "history":
            values = {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.history.item}
            points += [(values["_step"], values[tag])] if tag in values else []
    return points
