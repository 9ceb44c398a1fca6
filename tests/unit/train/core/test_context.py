"""Stop flag, result record, metrics, environment and seeds of a rank."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from clustertrain import fsio
from clustertrain.checkpoint.format.storage_errors import StorageError
from clustertrain.errors import CheckpointError, ConfigError, UnsuitableEnvironment, UsageError
from clustertrain.run.run_dir import RunDir
from clustertrain.train.core import context, seeds
from clustertrain.train.core.result import RankResultWriter, classify_failure
from clustertrain.train.core.stop import SIGNALS, StopAgreement, StopFlag
from clustertrain.train.distributed.mesh import mesh_dimensions
from clustertrain.train.session.metrics_writer import MetricsWriter, check_scalar


@pytest.mark.parametrize("number", SIGNALS)
def test_signal_sets_stop_flag_and_handler_is_uninstalled(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    flag = StopFlag(None)
    flag.install()
    try:
        assert not flag
        os.kill(os.getpid(), number)
        assert flag
    finally:
        flag.uninstall()
    assert signal.getsignal(number) is before


def test_stop_file_sets_stop_flag_permanently(tmp_path: Path) -> None:
    flag = StopFlag(tmp_path)
    assert not flag
    (tmp_path / "stop").touch()
    assert flag
    (tmp_path / "stop").unlink()
    assert flag


def test_single_process_agrees_with_its_flag() -> None:
    requested = [False]
    agreement = StopAgreement(lambda: requested[0], None)
    assert not agreement.poll()
    requested[0] = True
    assert agreement.poll()
    requested[0] = False
    assert agreement.poll()


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ValueError("x"), "error"),
        (FileNotFoundError("x"), "error"),
        (OSError(28, "No space left on device"), "environment"),
        (OSError(errno.EDQUOT, "x"), "environment"),
        (OSError(errno.EACCES, "x"), "environment"),
        (OSError(errno.EROFS, "x"), "storage"),
        (OSError(errno.EIO, "x"), "storage"),
        (OSError(errno.ESTALE, "x"), "storage"),
        (StorageError("x"), "storage"),
        (StorageError("x", full=True), "environment"),
        (UnsuitableEnvironment("x"), "environment"),
        (ConfigError("x"), "environment"),
        (CheckpointError("x"), "environment"),
        (MemoryError(), "out_of_memory"),
        (torch.OutOfMemoryError("x"), "out_of_memory"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), "out_of_memory"),
        (RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer"), "communication"),
        (dist.DistBackendError("NCCL error"), "communication"),
        (RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 2000ms for recv operation"), "hang"),
        (dist.DistBackendError("[Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7"), "hang"),
        (RuntimeError("shape mismatch"), "error"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_exceptions_are_classified(error: BaseException, kind: str) -> None:
    assert classify_failure(error) == kind


def test_result_record(tmp_path: Path) -> None:
    result = RankResultWriter({"CLUSTERTRAIN_RANK_DIR": str(tmp_path), "RANK": "3", "LOCAL_RANK": "1"})
    result.step, result.committed_step = 7, 4
    try:
        raise ValueError("no good")
    except ValueError as e:
        assert result.record_failure(e) == 1
    record = json.loads((tmp_path / "rank-3.json").read_text())
    assert "raise ValueError" in record["error"].pop("traceback")
    assert record == {
        "rank": 3,
        "local_rank": 1,
        "ending": "failed",
        "finished": False,
        "step": 7,
        "committed_step": 4,
        "exit_code": 1,
        "kind": "error",
        "reason": None,
        "budget_spent": False,
        "ended_by_signal": False,
        "error": {"type": "ValueError", "message": "no good"},
        "peak_allocated_gib": None,  # CPU tensors have no such allocator
    }
    result.record_stopped()
    assert json.loads((tmp_path / "rank-3.json").read_text())["ending"] == "stopped"
    RankResultWriter({}).record_completed()  # outside a run: no record, no error


def test_closed_session_is_recorded_before_script_returns(tmp_path: Path) -> None:
    result = RankResultWriter({"CLUSTERTRAIN_RANK_DIR": str(tmp_path), "RANK": "3"})
    finished_file = tmp_path / "finished-3.json"
    result.defer_completion()
    result.begin_loop(4)
    result.record_session_closed()
    assert not finished_file.exists()  # the loop has not finished
    result.finished, result.step, result.committed_step = True, 4, 4
    result.record_session_closed()
    record = json.loads(finished_file.read_text())
    assert (record["ending"], record["finished"], record["step"], record["committed_step"]) == ("completed", True, 4, 4)
    assert not (tmp_path / "rank-3.json").exists()
    result.begin_loop(8)  # another loop begins
    assert not finished_file.exists() and not result.finished


def test_metrics_rows_are_written_one_step_late(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "metrics" / "attempt-1.jsonl"
    metrics = MetricsWriter(path, echo_every=2)
    loss = torch.tensor(1.0)
    metrics.enqueue({"step": 1}, {"loss": loss, "lr": 0.5})
    loss.fill_(2.0)
    assert list(fsio.read_jsonl(path)) == []
    metrics.enqueue({"step": 2}, {"loss": loss})
    assert list(fsio.read_jsonl(path)) == [{"step": 1, "lr": 0.5, "loss": 1.0}]
    metrics.close()
    assert [r["loss"] for r in fsio.read_jsonl(path)] == [1.0, 2.0]
    assert capsys.readouterr().out == "step 2  loss 2\n"
    with pytest.raises(ConfigError, match="one element"):
        MetricsWriter(None).enqueue({"step": 1}, {"loss": torch.zeros(2)})


def test_loggable_scalars_besides_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = {"loss": np.float32(0.5), "n": np.array(3), "best": np.bool_(True), "phase": "warm-up", "lr": None}
    metrics = MetricsWriter(tmp_path / "m.jsonl", echo_every=1)
    metrics.enqueue({"step": 1}, {**{k: check_scalar(k, v) for k, v in values.items()}, "step": "mine"})
    metrics.close()
    row = {"step": 1, "loss": 0.5, "n": 3, "best": True, "phase": "warm-up", "lr": None}
    assert list(fsio.read_jsonl(tmp_path / "m.jsonl")) == [row]
    assert capsys.readouterr().out == "step 1  loss 0.5  lr None  n 3  best True  phase warm-up\n"


@pytest.mark.parametrize("value", [[1.0], {"a": 1}, np.zeros(2), 1j, np.complex64(1), torch.tensor(1j), object()])
def test_unloggable_value_raises_with_its_name(value: Any) -> None:
    with pytest.raises(UsageError, match=r"session\.log\(odd="):
        check_scalar("odd", value)


def test_context_from_environment(tmp_path: Path) -> None:
    single_process = context.context_from_environment(environ={"CLUSTERTRAIN_DEVICE": "cpu"})
    assert (
        single_process.rank,
        single_process.world_size,
        single_process.launched_by_torchrun,
        single_process.layout.strategy,
    ) == (0, 1, False, "single")
    torchrun = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "x", "CLUSTERTRAIN_DEVICE": "cpu"}
    distributed = context.context_from_environment(environ=torchrun)
    assert (
        distributed.launched_by_torchrun,
        distributed.layout.strategy,
        distributed.layout.world_size,
        distributed.run,
    ) == (True, "ddp", 2, None)
    with pytest.raises(ConfigError, match="WORLD_SIZE = 'two'"):
        context.context_from_environment(environ={**torchrun, "WORLD_SIZE": "two"})
    with pytest.raises(ConfigError, match=r"plan\.json: the file is missing"):
        context.load_plan(RunDir(tmp_path))
    fsio.write_json(tmp_path / "plan.json", {"layout": {"strategy": "fsdp", "dp_shart": 2}})
    with pytest.raises(ConfigError, match="dp_shart"):
        context.load_plan(RunDir(tmp_path))


def test_mesh_dimensions_have_degrees_above_one() -> None:
    layout = context.Layout(strategy="fsdp", dp_shard=4)
    assert mesh_dimensions(layout) == (("dp_shard",), (4,))
    assert mesh_dimensions(context.Layout()) == (("dp_replicate",), (1,))
    both = context.Layout(strategy="fsdp", dp_replicate=2, dp_shard=4)
    assert mesh_dimensions(both) == (("dp_replicate", "dp_shard"), (2, 4))


def test_rng_state_is_captured_and_restored() -> None:
    cpu = torch.device("cpu")

    def draw() -> list[float]:
        return [random.random(), random.gauss(0, 1), float(np.random.rand()), np.random.randn(), torch.rand(1).item()]

    seeds.seed_everything(11)
    draw()
    state = seeds.capture_rng_state(cpu)
    first = draw()
    seeds.restore_rng_state(state, cpu)
    assert draw() == first
    seeds.seed_everything(11)
    draw()
    assert draw() == first


def test_derived_seeds_do_not_change() -> None:
    # The data order and the initial values depend on them.
    assert seeds.derive_seed(1, "order", 0) == 7977229684334264838
    assert seeds.derive_seed(1, "order", 0) != seeds.derive_seed(1, "order", 1)
    assert 0 <= seeds.derive_seed(2**63 - 1, "x") < 2**63
