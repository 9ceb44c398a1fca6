"""Runs on one NVIDIA GPU, without Slurm: `make gpu-check`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

DEVICE = "cuda"
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

# Many steps, because a step takes milliseconds and a warning about a second to reach the ranks. The sequence fits one
# tile of keys: with several, the backward pass of fused attention sums in any order, and the last bits could differ.
RECIPE = """
[job]
name = "gpu"
backend = "local"
device = "{device}"

[model]
dim = 128
layers = 2
heads = 4
kv_heads = 2

[data]
seq_len = 64
max_bytes = 2_000_000

[train]
steps = {steps}
global_batch = 16
precision = "bf16"
log_every = 500

[checkpoint]
every = 1000
"""
STEPS = 4000
PREEMPTION_TEST = """
[preemption_test]
preempt_at_steps = [300]
grace_s = 120
"""


def _environ(home: Path) -> dict[str, str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("CLUSTERTRAIN_", "SLURM_"))}
    return {**clean, "CLUSTERTRAIN_HOME": str(home)}


def _command(env: Mapping[str, str], *argv: str) -> Any:
    """Run ``clustertrain ARGV``, which includes ``--json``, and return the parsed output."""
    command = [sys.executable, "-m", "clustertrain", *argv]
    result = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=800)
    assert result.returncode == 0, f"{' '.join(argv)}: {result.stderr}\n{_logs(Path(env['CLUSTERTRAIN_HOME']))}"
    return json.loads(result.stdout)


def _logs(home: Path) -> str:
    logs = sorted([*home.glob("runs/*/job.log"), *home.glob("runs/*/attempts/*/logs/*.log")])
    return "\n".join(f"--- {p.relative_to(home)}\n{p.read_text()[-4000:]}" for p in logs)


def _train(home: Path, name: str, tables: str = "") -> dict[str, Any]:
    """Run the recipe to its end and return its status."""
    env = _environ(home)
    recipe = home / f"{name}.toml"
    recipe.write_text(RECIPE.format(device=DEVICE, steps=STEPS) + tables)
    run = _command(env, "submit", "--wait", "--json", "--name", name, str(recipe))["run"]
    status: dict[str, Any] = _command(env, "status", "--json", run)
    return status


def _digest(home: Path, run: str) -> str:
    return str(_command(_environ(home), "checkpoint", "digest", "--json", run)["digest"])


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def preempted(home: Path) -> dict[str, Any]:
    """Return the status of a completed run on the GPU that was preempted once."""
    return _train(home, "preempted", PREEMPTION_TEST)


def test_preempted_run_resumes_and_completes(preempted: dict[str, Any]) -> None:
    first, second = preempted["attempts"]
    assert (preempted["state"], preempted["step"]) == ("completed", STEPS)
    assert (first["state"], second["state"]) == ("preempted", "completed")
    assert 300 <= first["last_step"] < STEPS
    assert (second["first_step"], second["last_step"]) == (first["last_step"] + 1, STEPS)
    plan = json.loads((Path(preempted["run_dir"]) / "plan.json").read_text())
    assert (plan["device"], plan["precision"]) == (DEVICE, "bf16")
    prediction = preempted["prediction"]
    assert prediction["attempts"] == [1, 2] and prediction["steps"] > STEPS - 100
    # NVML reports more than the allocated memory: also the allocator's reserve and the CUDA context.
    assert 0 < prediction["allocated_gib"]["measured"] < prediction["peak_gib"]["measured"]
    assert 0 < prediction["allocated_gib"]["predicted"] < prediction["peak_gib"]["predicted"]


def test_run_equals_uninterrupted_run(home: Path, preempted: dict[str, Any]) -> None:
    whole = _train(home, "whole")
    assert [a["state"] for a in whole["attempts"]] == ["completed"]
    expected, actual = _digest(home, whole["run"]), _digest(home, preempted["run"])
    if actual != expected:
        repeated = _digest(home, _train(home, "again")["run"])
        pytest.fail(
            "the resumed run has another digest, and two uninterrupted runs "
            + ("agree: the resume is wrong" if repeated == expected else "differ too: a kernel is nondeterministic")
        )


def test_telemetry_has_the_gpu(home: Path, preempted: dict[str, Any]) -> None:
    import torch

    report = _command(_environ(home), "telemetry", "--json", preempted["run"])
    (gpu,) = report["gpus"]
    properties = torch.cuda.get_device_properties(0)
    assert gpu["uuid"] == f"GPU-{properties.uuid}"
    assert gpu["ranks"] == [0]
    assert gpu["attempts"] == [1, 2]
    assert gpu["samples"] > 0
    for field in ("utilization", "memory_used_gib", "power_w"):
        assert gpu[field] is not None, f"{field}: {gpu['missing']}"
    assert gpu["utilization"]["max"] > 0
    assert 0 < gpu["memory_used_gib"]["max"] <= gpu["memory_total_gib"]
    # NVML includes the memory that the driver reserves, CUDA does not.
    assert gpu["memory_total_gib"] >= properties.total_memory / 2**30 * 0.99
    assert (gpu["energy_j"] is not None) or "energy_j" in gpu["missing"]


_GROUPS = """
import json, torch
import torch.distributed as dist
from clustertrain.train.core import context
from clustertrain.train.distributed import mesh

here = context.context_from_environment(device="cuda")
groups = mesh.open_groups(here, 120.0)
values = torch.arange(4.0, device=here.device)
dist.all_reduce(values)
flag = groups.stop.reduce(b"\x01", b"".join)()
groups.stop.barrier()
print(json.dumps({
    "device": str(values.device),
    "backends": dist.get_backend_config(),
    "values": values.tolist(),
    "flag": list(flag),
}))
mesh.close_groups(groups)
"""


def test_nccl_beside_control_group() -> None:
    from clustertrain.scheduler.rendezvous import find_free_port

    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    env = {**_environ(Path("unused")), **ranks, "MASTER_PORT": str(find_free_port())}
    result = subprocess.run(
        [sys.executable, "-c", _GROUPS], env=env, capture_output=True, text=True, check=False, timeout=300
    )
    assert result.returncode == 0, result.stderr
    output = json.loads(result.stdout.splitlines()[-1])
    assert output["values"] == [0.0, 1.0, 2.0, 3.0]
    assert "gloo" not in output["backends"] and output["flag"] == [1]
    assert output["device"] == "cuda:0"


def set_up_rank(stop_at: int | None) -> None:
    """Setup: train on the GPU, and request a stop in step ``stop_at``, if given."""
    from tests.ranks.rank_pool import touch_stop_at

    os.environ["CLUSTERTRAIN_DEVICE"] = DEVICE
    if stop_at is not None:
        touch_stop_at(stop_at)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_layout_stops_and_resumes_bit_exactly(tmp_path: Path, strategy: str, precision: str) -> None:
    """Cover DDP and FSDP, which a plan for a single GPU does not use."""
    from tests.ranks.rank_pool import Ranks, digest, make_run

    options: dict[str, Any] = {"precision": precision, "micro_batch": 8, "data": {"workers": 1}}
    reference = Ranks(make_run(tmp_path / "whole", strategy, 1, **options), 1, setup=set_up_rank, args=(None,)).expect(
        0
    )
    run = make_run(tmp_path / "parts", strategy, 1, **options)
    first = Ranks(run, 1, 1, setup=set_up_rank, args=(4,)).expect(0)
    assert [r["ending"] for r in first.results()] == ["stopped"]
    second = Ranks(run, 1, 2, setup=set_up_rank, args=(None,)).expect(0)
    assert [(r["ending"], r["step"]) for r in second.results()] == [("completed", 8)]
    assert {**first.losses(), **second.losses()} == reference.losses()
    assert digest(run) == digest(reference.run)
    assert reference.events("session_started")[0]["device"] == DEVICE


def test_offload_trains_equally(tmp_path: Path) -> None:
    """Parameters, gradients and optimizer state are in host memory; results are equal up to rounding."""
    from clustertrain.plan.layout import Layout
    from tests.ranks.rank_pool import Ranks, make_run

    losses = []
    for offload in (False, True):
        layout = Layout(strategy="fsdp", dp_shard=1, offload=offload)
        run = make_run(tmp_path / str(offload), layout, 1, micro_batch=8, parallel={"offload": offload})
        losses.append(Ranks(run, 1, setup=set_up_rank, args=(None,)).expect(0).losses())
    on_device, offloaded = losses
    assert list(on_device) == list(offloaded) == list(range(1, 9))
    for step, pair in on_device.items():
        assert offloaded[step] == pytest.approx(pair, rel=1e-4), f"step {step}"


# 7.5 GB per sequence for the logits, with all copies: a few doublings exceed the memory of any GPU.
LOGITS = """
[job]
backend = "local"
device = "{device}"
[model]
dim = 128
layers = 1
vocab_size = 131072
[data]
seq_len = 4096
max_bytes = 2_000_000
[train]
global_batch = 64
precision = "bf16"
"""


def test_micro_batch_search_ends_at_out_of_memory(home: Path) -> None:
    recipe = home / "logits.toml"
    recipe.write_text(LOGITS.format(device=DEVICE))
    report = _command(_environ(home), "plan", "--find-micro-batch", "--json", str(recipe))
    rows = {row["micro_batch"]: row for row in report["trials"]}
    assert [row["fits"] for row in rows.values()] == [True] * (len(rows) - 1) + [False]
    peaks = [row["peak_gib"] for row in rows.values() if row["fits"]]
    assert 4 < peaks[0] <= peaks[-1]
    for row in rows.values():
        if row["fits"]:
            assert row["allocated_gib"] < row["peak_gib"] < 0.8 * row["capacity_gib"]
    assert rows[report["recommended"]]["fits"] and report["error"] is None
