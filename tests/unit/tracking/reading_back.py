"""What trackers hold, read with their own libraries: (step, value) of a scalar, in the order of the store."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from clustertrain.run.run_dir import RunDir
from clustertrain.tracking import wandb as to_wandb

Points = list[tuple[int, float]]


def tensorboard(run: RunDir, tag: str = "loss") -> Points:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(run.tracking / "tensorboard"), size_guidance={"scalars": 0})
    found.Reload()
    return [(s.step, s.value) for s in found.Scalars(tag)] if tag in found.Tags()["scalars"] else []


def mlflow(run: RunDir, uri: str = "", tag: str = "loss") -> Points:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(uri or f"sqlite:///{run.tracking}/mlflow.db")
    found = of_mlflow(client)
    return [(m.step, m.value) for m in client.get_metric_history(found.info.run_id, tag)]


def of_mlflow(client: Any) -> Any:
    """The one run that there is."""
    (one,) = client.search_runs([e.experiment_id for e in client.search_experiments()])
    return one


def wandb_records(run: RunDir) -> list[Any]:
    """All records of the offline files, which W&B syncs in the order of their names."""
    from wandb.proto import wandb_internal_pb2

    found = []
    for path in wandb_files(run):
        for data in to_wandb.read_records(path.read_bytes()):
            found.append(wandb_internal_pb2.Record())
            found[-1].ParseFromString(data)
    return found


def wandb_files(run: RunDir) -> list[Path]:
    return sorted(run.tracking.glob("wandb/offline-run-*/*.wandb"))


def wandb(run: RunDir, tag: str = "loss") -> Points:
    found = []
    for record in wandb_records(run):
        if record.WhichOneof("record_type") == "history":
            values = {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.history.item}
            found += [(values["_step"], values[tag])] if tag in values else []
    return found
