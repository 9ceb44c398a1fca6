"""Measured rates of this machine, or of the nodes of the allocation that this process is in. Imports no torch: every
measurement is a process of its own, and one that fails takes nothing from the others."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clustertrain import clock, proc
from clustertrain.config.cluster import ClusterProfile, MeasuredRates
from clustertrain.config.node_facts import NodeFacts
from clustertrain.config.parsing.documents import build
from clustertrain.errors import ConfigError
from clustertrain.plan.env import nccl

OUTPUT_PREFIX = "clustertrain-measured "  # before each line of JSON that a measurement prints
TIMEOUT_S = 180.0  # of one measurement; most of it is for importing torch from a busy network filesystem
TERMINATE_TIMEOUT_S = 10.0
POLL_S = 0.1
CPU_RANKS = 2  # the fewest that have something between them


@dataclass(frozen=True)
class BenchTarget:
    """``nodes`` are the allocation's, empty for this machine alone. ``python`` is the interpreter there;
    ``env`` is added to the environment."""

    python: str
    nodes: tuple[str, ...] = ()
    device: str = "auto"
    env: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def from_profile(cls, profile: ClusterProfile, python: str, nodes: tuple[str, ...], device: str) -> BenchTarget:
        """With the environment that the plan gives runs of ``profile``, so that it is measured as they will go."""
        facts = profile.node if len(nodes) > 1 else None
        nccl_settings = nccl.communication_env(device, profile.fabric_interface, {*os.environ, *profile.env}, facts)
        env = {**profile.env, **{name: setting.value for name, setting in nccl_settings.items()}}
        return cls(python=profile.python or python, nodes=nodes, device=device, env=env)

    def srun_argv(self, nodes: Sequence[str]) -> list[str]:
        """The step launcher for one process on each of ``nodes``; nothing for this machine."""
        if not self.nodes:
            return []
        # --overlap: the shell that this was typed in may be a step that holds the allocation's processors and GPUs.
        return [
            "srun", f"--nodes={len(nodes)}", f"--ntasks={len(nodes)}", "--ntasks-per-node=1",
            f"--nodelist={','.join(nodes)}", "--overlap", "--export=ALL", "--cpu-bind=none", "--kill-on-bad-exit=1",
        ]  # fmt: skip


@dataclass(frozen=True)
class BenchResult:
    """``measured`` and ``node`` are None where nothing was measured or read. ``failures`` are sentences, one for each
    that failed."""

    measured: MeasuredRates | None = None
    node: NodeFacts | None = None
    notes: tuple[str, ...] = ()
    failures: tuple[str, ...] = ()


class _BenchRunner:
    """One part after the other, each told before it begins, and what has failed so far."""

    def __init__(self, target: BenchTarget, on_progress: Callable[[str], None]) -> None:
        self.target = target
        self.on_progress = on_progress
        self.failures: list[str] = []

    def run(self, description: str, nodes: Sequence[str], module: str, *args: str, required_key: str) -> dict[str, Any]:
        """What ``module`` said on ``nodes``; a failure where ``required_key`` is not among it."""
        self.on_progress(description)
        argv = [
            *self.target.srun_argv(nodes),
            *proc.python_module_argv(self.target.python, f"clustertrain.cluster.{module}", *args),
        ]
        output, failure = _run_measurement(argv, self.target.env)
        if required_key not in output:
            self.failures.append(f"{description}: {failure or 'it ended without a result'}")
        return output


def measure(target: BenchTarget, on_progress: Callable[[str], None]) -> BenchResult:
    """All there is to read and measure; ``on_progress`` hears of each part before it begins. Takes about half a minute.

    A KeyboardInterrupt ends the one that runs, with every process of it, and is passed on.
    """
    runner = _BenchRunner(target, on_progress)
    first_node = target.nodes[:1]
    node = _parse_node_facts(
        runner.run("reading what the node is made of", first_node, "node_facts", required_key="node"), runner.failures
    )
    gemm = runner.run(
        "measuring matrix products",
        first_node,
        "bench_ranks",
        "gemm",
        "--device",
        target.device,
        required_key="gemm_tflops",
    )
    if "kind" not in gemm:
        return BenchResult(node=node, failures=tuple(runner.failures))
    notes = []
    if gemm["kind"] == "cpu" and target.device == "auto":
        notes.append("torch sees no GPU here: these are rates of the CPU")
    ranks = int(gemm["count"]) or CPU_RANKS
    if ranks == 1:
        notes.append("one GPU: no all-reduce inside a node to measure")
    intra_node, inter_node = _measure_all_reduces(runner, ranks, gemm["kind"], gemm["port"])
    measured = MeasuredRates(
        gemm_tflops=_round_rate(gemm.get("gemm_tflops")),
        gemm_dtype=gemm.get("gemm_dtype", ""),
        node_bus_gb_s=_round_rate(intra_node),
        fabric_bus_gb_s=_round_rate(inter_node),
        device=gemm["device"],
        ranks=ranks,
        nodes=max(1, len(target.nodes)),
        torch=gemm["torch"],
        measured_at=float(round(clock.now())),
    )
    has_rates = any((measured.gemm_tflops, measured.node_bus_gb_s, measured.fabric_bus_gb_s))
    return BenchResult(measured if has_rates else None, node, tuple(notes), tuple(runner.failures))


def _measure_all_reduces(
    runner: _BenchRunner, ranks: int, device_type: str, port: int
) -> tuple[float | None, float | None]:
    """GB/s inside a node and across nodes, where there is something between the ranks. ``port`` is the first node's."""
    intra_node: dict[str, Any] = {}
    inter_node: dict[str, Any] = {}
    nodes, rank_options = runner.target.nodes, ["--ranks", str(ranks), "--device", device_type]
    if ranks > 1:
        description = f"measuring an all-reduce over {ranks} ranks of one node"
        intra_node = runner.run(
            description, nodes[:1], "bench_node", "all-reduce", *rank_options, required_key="bus_gb_s"
        )
    if len(nodes) > 1:
        description = f"measuring all-reduces across {len(nodes)} nodes"
        rdzv_options = ["--nodes", ",".join(nodes), "--port", str(port)]
        inter_node = runner.run(
            description, nodes, "bench_node", "all-reduce-across", *rank_options, *rdzv_options, required_key="bus_gb_s"
        )
    return intra_node.get("bus_gb_s"), inter_node.get("bus_gb_s")


def _parse_node_facts(output: Mapping[str, Any], failures: list[str]) -> NodeFacts | None:
    try:
        return build(output["node"], NodeFacts, "the node") if "node" in output else None
    except ConfigError as e:  # another version of clustertrain on the nodes
        failures.append(f"reading what the node is made of: {e}")
        return None


def _round_rate(value: float | None) -> float | None:
    """To four digits: the next run differs in the third."""
    return None if value is None else float(f"{value:.4g}")


def _run_measurement(argv: Sequence[str], env: Mapping[str, str]) -> tuple[dict[str, Any], str]:
    """What a measurement said, and why it failed (empty where it did not)."""
    with tempfile.TemporaryDirectory(prefix="clustertrain-measure-") as folder:
        log = Path(folder) / "log"
        try:
            # A session of its own: Ctrl-C is for this process, which then ends the child in order.
            child = proc.start(argv, env={**os.environ, **env}, log=log, new_session=True)
        except FileNotFoundError as e:
            return {}, f"{argv[0]} cannot be started: {e.strerror}"
        try:
            has_ended = clock.wait_until(lambda: child.poll() is not None, TIMEOUT_S, POLL_S)
        finally:
            proc.terminate(child, TERMINATE_TIMEOUT_S)
        text = log.read_text(errors="replace")
    output: dict[str, Any] = {}
    for line in text.splitlines():
        if line.startswith(OUTPUT_PREFIX):
            # The first word on a key counts: the rank that failed first is the one that knows why.
            output = {**json.loads(line.removeprefix(OUTPUT_PREFIX)), **output}
    failure = str(output.pop("error", ""))
    if not has_ended:
        failure = failure or f"it took longer than {TIMEOUT_S:g} s"
    elif child.returncode:
        failure = failure or f"exit code {child.returncode}: {_last_lines(text)}"
    return output, failure


def _last_lines(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith(OUTPUT_PREFIX)]
    return " / ".join(lines[-2:]) or "it printed nothing"
