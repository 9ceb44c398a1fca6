"""The trial of compilation before the first step: its timings, and a compiler that fails."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from clustertrain.plan.layout import Layout
from tests.ranks.rank_pool import DEVICE, Ranks, make_run, one_thread

pytestmark = pytest.mark.ranks
NEEDS_GXX = pytest.mark.skipif(
    shutil.which("g++") is None and "CLUSTERTRAIN_REQUIRE_SLURM" not in os.environ,
    reason="torch.compile needs g++ on the CPU",
)
FSDP = Layout(strategy="fsdp", dp_shard=2)


def fast_compiler() -> None:
    one_thread()
    from torch._inductor import config

    config.cpp.simdlen = 1  # no vector instructions: g++ is faster


def no_compiler_on_rank_1() -> None:
    """Setup: remove g++ from the node of rank 1; the other ranks compile with a backend that does not need it."""
    one_thread()
    if os.environ["RANK"] != "1":
        original = torch._dynamo.lookup_backend
        torch._dynamo.lookup_backend = lambda _: original("aot_eager")
        return
    os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"
    os.environ["CLUSTERTRAIN_NODE"] = "b"
    if DEVICE == "cuda":  # emulated, without Inductor
        torch._dynamo.lookup_backend = lambda _: failing_compiler
        return
    from torch._inductor import config

    config.cpp.cxx = ("/nowhere/g++",)


def failing_compiler(*_: object) -> None:
    raise RuntimeError("no compiler")


@NEEDS_GXX
@pytest.mark.parametrize("layout", [FSDP, Layout(tp=2)], ids=lambda layout: layout.describe())
def test_failed_compiler_on_one_rank_keeps_all_ranks_eager(tmp_path: Path, layout: Layout) -> None:
    reference = Ranks(make_run(tmp_path / "plain" / "run", layout, 2, steps=3), 2, setup=one_thread)
    plain = reference.expect(0).losses()
    run = make_run(tmp_path / "compiled" / "run", layout, 2, steps=3, parallel={"compile": True})
    ranks = Ranks(run, 2, setup=no_compiler_on_rank_1).expect(0)
    (failure,) = ranks.events("compile_failed")
    assert failure["reason"].startswith("on rank 1 (node b): ") and "compile" in failure["fix"]
    assert ranks.events("compiled") == []
    assert ranks.losses() == plain, "the trial has changed the training state"


@NEEDS_GXX
def test_both_times_are_reported_and_resume_is_exact(tmp_path: Path) -> None:
    options = {"steps": 4, "every": 2, "parallel": {"compile": True}, "model": {"dropout": 0.1}}
    run = make_run(tmp_path / "whole" / "run", Layout(), 1, **options)  # type: ignore[arg-type]
    ranks = Ranks(run, 1, setup=fast_compiler).expect(0)
    (event,) = ranks.events("compiled")
    assert event["loss_difference"] < 1e-5 and event["grad_norm_difference"] < 1e-4
    assert ranks.events("training_warning") == []
    assert event["eager_s"] > 0 and event["compiled_s"] > 0 and event["compile_s"] > event["compiled_s"]
    shutil.rmtree(run.checkpoints / "step-00000004")
    resumed = Ranks(run, 1, 2, setup=fast_compiler).expect(0)
    assert resumed.events("restored")[0]["step"] == 2
    assert resumed.losses() == {s: v for s, v in ranks.losses().items() if s > 2}


def test_compiler_that_computes_something_else_warns(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", FSDP, 2, steps=2, parallel={"compile": True})
    ranks = Ranks(run, 2, setup=wrong_compiler_on_rank_1).expect(0)
    (event,) = ranks.events("compiled")
    (warning,) = [e for e in ranks.events("training_warning") if e["code"] == "compile_differs"]
    assert warning["value"] == pytest.approx(event["loss_difference"]) and warning["value"] > warning["limit"] == 1e-4


def wrong_compiler_on_rank_1() -> None:
    """Setup: compile without a compiler; rank 1's layers return twice their output."""
    one_thread()
    original, factor = torch._dynamo.lookup_backend("eager"), 1 + int(os.environ["RANK"])

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        compiled = original(graph, inputs)
        return lambda *args: tuple(factor * output for output in compiled(*args))

    torch._dynamo.lookup_backend = lambda _: backend
