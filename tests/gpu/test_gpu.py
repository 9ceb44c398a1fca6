"""On one NVIDIA GPU, without Slurm: `make gpu-check`."""

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

# Steps take milliseconds and the warning about a second to reach the ranks, so there are many. One tile of keys: over
# several, the backward of fused attention adds in any order, and the end would differ in its last bits without a fault.
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
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("CLUSTERTRAIN_", "SLURM_"))}
    return {**kept, "CLUSTERTRAIN_HOME": str(home)}


def _command(env: Mapping[str, str], *argv: str) -> Any:
    """What ``clustertrain ARGV --json`` prints."""
    command = [sys.executable, "-m", "clustertrain", *argv]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=800)
    assert done.returncode == 0, f"{' '.join(argv)}: {done.stderr}\n{_logs(Path(env['CLUSTERTRAIN_HOME']))}"
    return json.loads(done.stdout)


def _logs(home: Path) -> str:
    found = sorted([*home.glob("runs/*/job.log"), *home.glob("runs/*/attempts/*/logs/*.log")])
    return "\n".join(f"--- {p.relative_to(home)}\n{p.read_text()[-4000:]}" for p in found)


def _train(home: Path, name: str, more: str = "") -> dict[str, Any]:
    """Run the recipe to its end; returns its status."""
    env = _environ(home)
    recipe = home / f"{name}.toml"
    recipe.write_text(RECIPE.format(device=DEVICE, steps=STEPS) + more)
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
    """The status of a run on the GPU that was preempted once and has completed."""
    return _train(home, "preempted", PREEMPTION_TEST)


def test_preempted_run_resumes_and_completes(preempted: dict[str, Any]) -> None:
    first, second = preempted["attempts"]
    assert (preempted["state"], preempted["step"]) == ("completed", STEPS)
    assert (first["state"], second["state"]) == ("preempted", "completed")
    assert 300 <= first["last_step"] < STEPS
    assert (second["first_step"], second["last_step"]) == (first["last_step"] + 1, STEPS)
    plan = json.loads((Path(preempted["run_dir"]) / "plan.json").read_text())
    assert (plan["device"], plan["precision"]) == (DEVICE, "bf16")
    beside = preempted["prediction"]
    assert beside["attempts"] == [1, 2] and beside["steps"] > STEPS - 100
    # NVML sees what the allocator gives out, and more: its reserve, and the CUDA context.
    assert 0 < beside["allocated_gib"]["measured"] < beside["peak_gib"]["measured"]
    assert 0 < beside["allocated_gib"]["predicted"] < beside["peak_gib"]["predicted"]


def test_run_equals_uninterrupted_run(home: Path, preempted: dict[str, Any]) -> None:
    whole = _train(home, "whole")
    assert [a["state"] for a in whole["attempts"]] == ["completed"]
    wanted, got = _digest(home, whole["run"]), _digest(home, preempted["run"])
    if got != wanted:
        again = _digest(home, _train(home, "again")["run"])
        pytest.fail(
            "the resumed run ends elsewhere, and two uninterrupted ones "
            + ("agree: the resume is wrong" if again == wanted else "differ too: a kernel adds in any order")
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
    # NVML counts what the driver reserves, CUDA does not.
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
flag = torch.ones(1, dtype=torch.int32)
dist.all_reduce(flag, group=groups.stop)
dist.barrier(group=groups.stop)
print(json.dumps({
    "device": str(values.device),
    "backends": dist.get_backend_config(),
    "stop": dist.get_backend(groups.stop),
    "values": values.tolist(),
    "flag": flag.item(),
}))
mesh.close_groups()
"""


def test_nccl_and_gloo_side_by_side() -> None:
    from clustertrain.scheduler.rendezvous import find_free_port

    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    env = {**_environ(Path("unused")), **ranks, "MASTER_PORT": str(find_free_port())}
    done = subprocess.run(
        [sys.executable, "-c", _GROUPS], env=env, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["values"] == [0.0, 1.0, 2.0, 3.0]
    assert found["backends"] == "cpu:gloo,cuda:nccl"
    assert (found["stop"], found["flag"]) == ("gloo", 1)
    assert found["device"] == "cuda:0"


def set_up(stop_at: int | None) -> None:
    """Runs in a rank before it begins."""
    from tests.ranks.rank_pool import touch_stop_at

    os.environ["CLUSTERTRAIN_DEVICE"] = DEVICE
    if stop_at is not None:
        touch_stop_at(stop_at)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_layout_stops_and_resumes_bit_exactly(tmp_path: Path, strategy: str, precision: str) -> None:
    """The wrappers themselves, which a plan for a single GPU leaves out."""
    from tests.ranks.rank_pool import Ranks, digest, make_run

    kw: dict[str, Any] = {"precision": precision, "micro_batch": 8, "data": {"workers": 1}}
    whole = Ranks(make_run(tmp_path / "whole", strategy, 1, **kw), 1, setup=set_up, args=(None,)).expect(0)
    run = make_run(tmp_path / "parts", strategy, 1, **kw)
    first = Ranks(run, 1, 1, setup=set_up, args=(4,)).expect(0)
    assert [r["ending"] for r in first.results()] == ["stopped"]
    second = Ranks(run, 1, 2, setup=set_up, args=(None,)).expect(0)
    assert [(r["ending"], r["step"]) for r in second.results()] == [("completed", 8)]
    assert {**first.losses(), **second.losses()} == whole.losses()
    assert digest(run) == digest(whole.run)
    assert whole.events("session_started")[0]["device"] == DEVICE


def test_offload_trains_equally(tmp_path: Path) -> None:
    """Parameters, gradients and optimizer state in host memory; the norm is that of the device to rounding."""
    from clustertrain.plan.layout import Layout
    from tests.ranks.rank_pool import Ranks, make_run

    found = []
    for offload in (False, True):
        layout = Layout(strategy="fsdp", dp_shard=1, offload=offload)
        run = make_run(tmp_path / str(offload), layout, 1, micro_batch=8, parallel={"offload": offload})
        found.append(Ranks(run, 1, setup=set_up, args=(None,)).expect(0).losses())
    there, here = found
    assert list(there) == list(here) == list(range(1, 9))
    for step, pair in there.items():
        assert here[step] == pytest.approx(pair, rel=1e-4), f"step {step}"


# 7.5 GB of logits, in all their copies, a sequence: a few doublings end the memory of any GPU.
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
    found = _command(_environ(home), "plan", "--find-micro-batch", "--json", str(recipe))
    rows = {row["micro_batch"]: row for row in found["trials"]}
    assert [row["fits"] for row in rows.values()] == [True] * (len(rows) - 1) + [False]
    peaks = [row["peak_gib"] for row in rows.values() if row["fits"]]
    assert 4 < peaks[0] <= peaks[-1]
    for row in rows.values():
        if row["fits"]:
            assert row["allocated_gib"] < row["peak_gib"] < 0.8 * row["capacity_gib"]
    assert rows[found["recommended"]]["fits"] and found["error"] is None
