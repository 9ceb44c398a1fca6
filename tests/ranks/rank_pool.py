"""Real ranks for tests, forked from a process that has imported torch, with the environment that the node agent sets.

A fork takes 0.1 s where a new process takes several on busy cores. The fork server has run no torch operation, so no
thread of OpenMP or autograd is lost in the fork.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import shutil
import signal
import sys
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import tomli_w
import torch
import torch.distributed as dist

from clustertrain import fsio
from clustertrain.checkpoint.offline import inspect
from clustertrain.config.checkpoint import CheckpointSpec
from clustertrain.config.preemption_test import PreemptionTestSpec
from clustertrain.plan.layout import Layout
from clustertrain.run.run_dir import RunDir
from clustertrain.run.run_spec import load_spec
from tests.runs import DEVICE


def preloaded_modules(*, has_cuda: bool) -> list[str]:
    """Return the modules that the fork server imports for all ranks, some of which may not be installed.

    Args:
        has_cuda: torch was built with CUDA. Then torchao is not among them: its import counts the GPUs, after which
            CUDA cannot be initialized in a fork.
    """
    return [
        "torch", "torch._dynamo", "torch.distributed.tensor", "torch.distributed.fsdp", "torch.distributed.optim",
        "pytorch_optimizer", *([] if has_cuda else ["torchao.optim"]), "sklearn.datasets", "clustertrain.train.trainer",
    ]  # fmt: skip


CONTEXT = multiprocessing.get_context("forkserver")
# Modules that are not installed are omitted.
CONTEXT.set_forkserver_preload(
    [
        *(["tests.cuda_emulation.device"] if DEVICE == "cuda" else []),
        *preloaded_modules(has_cuda=torch.backends.cuda.is_built()),
    ]
)
SEQ_LEN = 16
TEXT = typing.__file__  # one file: listing the whole standard library takes 10 ms per rank
TINY = {"dim": 32, "layers": 2, "heads": 4, "kv_heads": 2}


def layout_of(strategy: str | Layout, ranks: int) -> Layout:
    if isinstance(strategy, Layout):
        return strategy
    shards = ranks if strategy == "fsdp" else 1
    return Layout(strategy=strategy, dp_replicate=ranks // shards, dp_shard=shards)  # type: ignore[arg-type]


def write_plan(
    run: RunDir,
    strategy: str | Layout,
    ranks: int,
    *,
    global_batch: int = 16,
    micro_batch: int | None = None,
    precision: str = "fp32",
) -> None:
    """Write plan.json.

    Without ``micro_batch``, a step has two micro-batches (in a pipeline, two per stage): each costs a forward and a
    backward pass, and most tests need no more. If that does not divide, a micro-batch has one sample.
    """
    layout = layout_of(strategy, ranks)
    if micro_batch is None:
        per_chunk, remainder = divmod(global_batch, layout.data_parallel * layout.pp * 2)
        micro_batch = 1 if remainder else per_chunk
    batch = {
        "micro_batch": micro_batch,
        "grad_accum": global_batch // layout.data_parallel // micro_batch,
        "global_batch": global_batch,
        "tokens_per_step": global_batch * SEQ_LEN,
    }
    plan = {"layout": msgspec.to_builtins(layout), "batch": batch, "precision": precision}
    fsio.write_json(run.plan, plan)


def make_run(
    folder: Path,
    strategy: str | Layout,
    ranks: int,
    *,
    steps: int = 8,
    every: int = 4,
    keep: int = 3,
    global_batch: int = 16,
    micro_batch: int | None = None,
    precision: str = "fp32",
    model: dict[str, Any] | None = None,
    data: dict[str, Any] | None = None,
    parallel: dict[str, Any] | None = None,
    tables: dict[str, dict[str, Any]] | None = None,
    script: tuple[Path, tuple[str, ...]] | None = None,
) -> RunDir:
    """Create a run folder as submit does.

    Args:
        tables: tables of the recipe; their keys override the defaults below.
        script: script to snapshot, with its arguments.
    """
    run = RunDir(folder)
    (run.path / "attempts").mkdir(parents=True)
    recipe: dict[str, dict[str, Any]] = {
        "model": {**TINY, **(model or {})},
        "data": {"seq_len": SEQ_LEN, "max_bytes": 100_000, "workers": 0, **(data or {})},
        "parallel": parallel or {},
        "train": {"steps": steps, "global_batch": global_batch},
        "optim": {"lr": 3e-3},
        "checkpoint": {"every": every, "keep": keep},
    }
    for table, keys in (tables or {}).items():
        recipe[table] = {**recipe.get(table, {}), **keys}
    if recipe["model"].get("kind", "decoder") == "decoder" and recipe["data"].keys().isdisjoint(("kind", "path")):
        recipe["data"]["path"] = TEXT
    spec: dict[str, Any] = {"recipe": recipe}
    if script is not None:
        run.code.mkdir()
        shutil.copy(script[0], run.code)
        spec["script"] = {"path": script[0].name, "args": list(script[1]), "cwd": str(folder)}
    run.spec.write_text(tomli_w.dumps(spec))
    write_plan(run, strategy, ranks, global_batch=global_batch, micro_batch=micro_batch, precision=precision)
    return run


class Ranks:
    """The ranks of one attempt, as processes on this machine."""

    def __init__(
        self,
        run: RunDir,
        ranks: int,
        attempt: int = 1,
        *,
        setup: Callable[..., None] | None = None,
        args: tuple[Any, ...] = (),
        argv: tuple[str, ...] = (),
        device: str = DEVICE,
    ) -> None:
        """Start the ranks; each first calls ``setup(*args)``, with which a test can inject a fault."""
        self.run, self.attempt = run, run.attempt(attempt)
        self.attempt.path.mkdir(parents=True, exist_ok=True)
        self.rank_dir = run.path.parent / f"ranks-{run.id}-{attempt}"
        self.rank_dir.mkdir()
        # As with torchrun, the launcher owns the store, so that no other process can take the port meanwhile.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        common = {
            "CLUSTERTRAIN_RUN_DIR": str(run.path),
            "CLUSTERTRAIN_ATTEMPT": str(attempt),
            "CLUSTERTRAIN_RANK_DIR": str(self.rank_dir),
            "CLUSTERTRAIN_DEVICE": device,
            "CLUSTERTRAIN_NODE": "here",
            "CLUSTERTRAIN_NODE_RANK": "0",
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        self.processes = []
        for rank in range(ranks):
            environ = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            process = CONTEXT.Process(target=_start_rank, args=(environ, setup, args, argv))
            process.start()
            self.processes.append(process)

    def request_stop(self) -> None:
        """Request a stop, as the agent does on a warning."""
        (self.rank_dir / "stop").touch()

    def wait(self, timeout_s: float = 120.0) -> list[int]:
        """Wait for the ranks and return their exit codes; fail if one has not ended in time."""
        for process in self.processes:
            process.join(timeout_s)
        unfinished = [r for r, p in enumerate(self.processes) if p.exitcode is None]
        for rank in unfinished:
            self.processes[rank].kill()
        assert not unfinished, f"ranks {unfinished} hung:\n{self.logs()}"
        return [int(p.exitcode or 0) for p in self.processes]

    def expect(self, *codes: int) -> Ranks:
        exit_codes = self.wait()
        expected = list(codes) * (len(exit_codes) if len(codes) == 1 else 1)
        assert exit_codes == expected, f"exit codes {exit_codes}, expected {expected}\n{self.logs()}"
        return self

    def logs(self) -> str:
        return "\n".join(f"--- {p.name}\n{p.read_text()}" for p in sorted(self.attempt.logs.glob("*.log")))

    def results(self) -> list[dict[str, Any]]:
        """Return the result records of the ranks."""
        paths = sorted(self.rank_dir.glob("rank-*.json"), key=lambda p: int(p.stem.split("-")[1]))
        return [json.loads(p.read_text()) for p in paths]

    def events(self, name: str) -> list[dict[str, Any]]:
        return [e for e in fsio.read_jsonl(self.attempt.events_path("rank-0")) if e["event"] == name]

    def losses(self) -> dict[int, tuple[float, float]]:
        """Return loss and gradient norm by step."""
        return {r["step"]: (r["loss"], r["grad_norm"]) for r in self.rows()}

    def rows(self) -> list[dict[str, Any]]:
        """Return the metrics rows of all files of the attempt, as written."""
        return [r for path in self.run.metrics_files(self.attempt.n) for r in fsio.read_jsonl(path)]


def _start_rank(
    environ: dict[str, str], setup: Callable[..., None] | None, args: tuple[Any, ...], argv: list[str]
) -> None:
    gc.freeze()  # otherwise the collector would touch, and so copy, the pages of a million objects of torch
    os.environ.update(environ)
    # A child of the fork server would start its data workers through another fork server.
    multiprocessing.set_start_method("fork", force=True)
    # After the Python stacks from faulthandler, a rank that crashes prints the C++ stacks.
    torch._C._set_print_stack_traces_on_fatal_signal(True)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # torch treats SIGINT as a crash
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    from clustertrain.train.main import main

    if setup is not None:
        setup(*args)
    sys.exit(main(list(argv)))


def digest(run: RunDir, step: int | None = None) -> str:
    return inspect.digest(inspect.find_checkpoint(run.checkpoints, step))


def _import_from(folder: str) -> None:
    """Setup: search ``folder`` first for modules."""
    sys.path.insert(0, folder)


_digests: dict[str, str] = {}


def undisturbed(submitted: Path, folder: Path) -> str:
    """Return the final digest that a submitted run would have without disturbances.

    Its plan and code run once in ranks only, without scheduler and agent. Recipes that differ only in their checkpoint
    settings or preemption tests share the result.

    Args:
        submitted: the run's folder.
        folder: folder for the undisturbed run; must not exist yet.
    """
    source = RunDir(submitted)
    spec, plan = load_spec(source), fsio.read_json(source.plan)
    recipe = msgspec.structs.replace(spec.recipe, checkpoint=CheckpointSpec(), preemption_test=PreemptionTestSpec())
    key = repr((recipe, spec.script, plan["layout"], plan["batch"]))
    if key not in _digests:
        run = RunDir(folder)
        (run.path / "attempts").mkdir(parents=True)
        for file in (source.spec, source.plan):
            shutil.copy(file, run.path)
        if source.code.exists():
            shutil.copytree(source.code, run.code)
        Ranks(run, plan["world_size"], setup=_import_from, args=(str(run.code),)).expect(0)
        _digests[key] = digest(run)
    return _digests[key]


def one_thread(stop_at: int = 0) -> None:
    """Setup: use one thread; more would compete for the cores. Stop the run during step ``stop_at``, if any."""
    os.environ["OMP_NUM_THREADS"] = "1"
    if stop_at:
        touch_stop_at(stop_at)


def touch_stop_at(step: int, only_rank: int | None = None) -> None:
    """Setup: request a stop during step ``step``; with ``only_rank``, by a signal to that rank only."""
    from clustertrain.train.session.session import Session

    original = Session.log

    def log(self: Session, **scalars: Any) -> None:
        original(self, **scalars)
        if self.step == step:
            if only_rank is None:
                Path(os.environ["CLUSTERTRAIN_RANK_DIR"], "stop").touch()
            elif self.rank == only_rank:
                os.kill(os.getpid(), signal.SIGTERM)

    Session.log = log  # type: ignore[method-assign]
