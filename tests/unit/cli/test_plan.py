"""The command ``clustertrain plan``."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.unit.cli.conftest import THREE_D, RunCli

pytestmark = pytest.mark.long


def test_plan_of_a_command_names_no_layout(run_cli: RunCli, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli("plan", "--gpus", "2", "--", "cat", "x") == 0
    shown = capsys.readouterr().out
    assert "cat on 2 ranks" in shown and "ddp" not in shown and "layout" not in shown
    assert "each of 2 ranks runs " in shown and "Training" not in shown


def test_plan_shows_the_layout_and_the_reasons(run_cli: RunCli, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli("plan", "--why", "--nodes", "2", "--gpus", "8", "--gpu-type", "h100") == 0
    out = capsys.readouterr().out
    for args in ("ddp on 16 ranks", "Training", "objective", "Why", "Not chosen", "fsdp", "TORCH_FR_BUFFER_SIZE=2000"):
        assert args in out


def test_plan_leads_with_the_time_of_the_whole_run(run_cli: RunCli, capsys: pytest.CaptureFixture[str]) -> None:
    model = ("--gpu-type", "h100", "--set", "model.preset=llama3.1-8b")
    assert run_cli("plan", "--nodes", "4", "--gpus", "8", "--set", "train.steps=100000", *model) == 0
    out = capsys.readouterr().out
    verdict = " ".join(out.partition("  layout  ")[0].split())
    pattern = (
        r"fsdp on 32 x h100: (.*) s per step, MFU (\d+)%, [\d.]+ of 80 GiB; 100,000 steps in (\d+)d\d\dh, ([\d,]+) GPU-"
    )
    match = re.match(pattern, verdict)
    assert match is not None, verdict
    assert int(match[4].replace(",", "")) == pytest.approx(100_000 * float(match[1]) * 32 / 3600, rel=0.01)
    assert int(match[3]) == int(100_000 * float(match[1]) / 86400)
    assert "\nWhy\n" not in out and "--why also shows" in out
    assert run_cli("plan", *model) == 0
    assert re.match(r"single on 1 x h100: \d+ of 80 GiB, DOES NOT FIT\n", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("options", "verdict"),
    [
        (("--device", "cpu"), r"ddp on 2 CPU ranks: [\d.]+ GiB per rank; 50 steps, speed not predicted on a CPU"),
        (("--device", "cuda"), r"ddp on 2 GPUs: .* per rank; 50 steps, speed not predicted without --gpu-type"),
        (
            ("--gpu-type", "rtx4090"),
            r"ddp on 2 x rtx4090: .* per rank; 50 steps, speed not predicted for an unknown GPU type",
        ),
        (
            ("--gpu-type", "h99", "--set", "model.preset=llama3.1-8b"),
            r"fsdp on 2 x h99: [\d.]+ GiB per rank, may not fit; 50 steps, speed not predicted for an unknown GPU type",
        ),
        (
            ("--device", "cuda", "--set", "model.kind=convnet"),
            r"ddp on 2 GPUs: .* per rank without activations; 50 steps, speed not predicted for this model",
        ),
    ],
)
def test_plan_leads_with_what_it_can_predict(
    run_cli: RunCli, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], verdict: str
) -> None:
    assert run_cli("plan", "--gpus", "2", *options, "--set", "train.steps=50") == 0
    out = capsys.readouterr().out
    first = " ".join(out.partition("  layout  ")[0].split())
    assert re.fullmatch(verdict, first), first
    if "rtx4090" in options:
        assert "did you mean rtx-4090" in " ".join(out.split())


def test_plan_json_has_the_documented_keys(run_cli: RunCli, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli("plan", "--gpus", "2", "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert {"layout", "batch", "memory", "time", "nccl", "training", "reasons", "rejected"} <= set(shown)
    assert shown["nccl"]["TORCH_NCCL_DUMP_ON_TIMEOUT"].keys() == {"value", "reason"}


def test_plan_shows_the_mesh_in_80_columns(run_cli: RunCli, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli("plan", *THREE_D) == 0
    out = capsys.readouterr().out
    assert "fsdp 2, tp 2 + sp, pp 2 (1f1b) on 8 ranks = 4 nodes x 2" in out
    assert "8 ranks = pp 2 x dp_shard 2 x tp 2" in out
    assert all(len(line) <= 80 for line in out.splitlines())


def test_plan_shows_warnings_separately_and_the_whole_layout(
    run_cli: RunCli, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--set", "parallel.schedule=interleaved", "--set", "parallel.activation_checkpointing=full"]
    assert run_cli("plan", "--why", *THREE_D, *options, "--set", "parallel.static_graph=true") == 0
    out = capsys.readouterr().out
    assert "activation checkpointing full, 2 stages per rank" in out and "bubble" in out
    warnings, _, why = out.partition("\nWarnings\n")[2].partition("\nWhy\n")
    assert "static_graph has no effect" in warnings and "static_graph" not in why
    assert run_cli("plan", "--why", "--device", "cpu") == 0
    out = capsys.readouterr().out
    assert "1 rank = 1 node x 1" in out and "x 1 data-parallel rank" in out and "Warnings" not in out


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({}, "needs an allocation"),
        ({"SLURM_JOB_ID": "7"}, "not on one of its nodes"),
    ],
    ids=["no-allocation", "not-on-its-nodes"],
)
def test_micro_batch_trials_need_a_node_of_an_allocation(
    environ: dict[str, str],
    message: str,
    run_cli: RunCli,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert run_cli("plan", "--find-micro-batch", "--gpus", "2") == 78
    assert message in capsys.readouterr().err


def test_micro_batch_trials_are_refused_if_not_representative(
    run_cli: RunCli, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    assert run_cli("plan", "--find-micro-batch", "--nodes", "2", "--gpus", "2", "--layout", "fsdp") == 78
    assert "fsdp is for 4 ranks, but only 2 can start here" in capsys.readouterr().err
    assert run_cli("plan", "--find-micro-batch", "--gpus", "2", "--set", "train.global_batch=3") == 78
    assert "3 / 2 = 1.5" in capsys.readouterr().err
    Path("train.py").write_text("")
    assert run_cli("plan", "--find-micro-batch", "train.py") == 2
    assert "a script has its own" in capsys.readouterr().err
    assert run_cli("plan", "--find-micro-batch", "--backend", "local", "--set", "data.path=/no/such") == 78
    assert "data.path = '/no/such'" in capsys.readouterr().err


def test_trace_memory_and_no_count_model_exclude_each_other(
    run_cli: RunCli, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_cli("plan", "--trace-memory", "--no-count-model") == 2
    assert "use one of them" in capsys.readouterr().err
