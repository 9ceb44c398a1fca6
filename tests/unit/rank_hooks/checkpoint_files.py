"""Checkpoints as the frameworks write them, without the frameworks."""

from __future__ import annotations

import json
import os
import pickle
import zipfile
from pathlib import Path


def write_safetensors(path: Path, size: int = 64) -> None:
    header = json.dumps({"w": {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(size))


def write_torch(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02.")
        archive.writestr("archive/data/0", bytes(4096))


def cut(path: Path, count: int) -> None:
    os.truncate(path, path.stat().st_size - count)


def write_distributed(folder: Path, ranks: int = 2) -> Path:
    """Write a folder of ``torch.distributed.checkpoint``."""
    folder.mkdir(parents=True)
    shards = [f"__{rank}_0.distcp" for rank in range(ranks)]
    for name in shards:
        (folder / name).write_bytes(b"shard")
    (folder / ".metadata").write_bytes(pickle.dumps({"storage_data": shards}))
    return folder


def write_trainer_checkpoint(folder: Path, ranks: int = 2) -> Path:
    """Write a checkpoint of the Trainer with FSDP, whose files are those with one process too."""
    write_distributed(folder / "pytorch_model_fsdp_0")
    write_safetensors(folder / "model-00001-of-00002.safetensors")
    write_safetensors(folder / "model-00002-of-00002.safetensors")
    weights = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    (folder / "config.json").write_text("{}")
    rng_states = [f"rng_state_{rank}.pth" for rank in range(ranks)]
    for name in ("training_args.bin", "optimizer.pt", "scheduler.pt", *rng_states):
        write_torch(folder / name)
    (folder / "trainer_state.json").write_text('{"global_step": 7}')
    return folder


def write_accelerate_state(folder: Path, ranks: int = 2) -> Path:
    """Write a folder of ``Accelerator.save_state``."""
    folder.mkdir()
    write_safetensors(folder / "model.safetensors")
    for name in ("optimizer.bin", "scheduler.bin", *(f"random_states_{rank}.pkl" for rank in range(ranks))):
        write_torch(folder / name)
    return folder
