"""Measure rates of this machine, or of the nodes of the current allocation.

This module does not import torch: each measurement is a separate process, and a failure does not affect the others.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clustertrain import clock, extras, proc
from clustertrain.config.cluster import ClusterProfile, MeasuredRates
from clustertrain.config.node_facts import NodeFacts
from clustertrain.config.parsing.documents import build
from clustertrain.errors import ConfigError
from clustertrain.plan.env import nccl

OUTPUT_PREFIX = "clustertrain-measured "  # starts each line of JSON that a measurement prints
TIMEOUT_S = 180.0  # per measurement; mostly for importing torch from a busy network file system
TERMINATE_TIMEOUT_S = 10.0
POLL_S = 0.1
CPU_RANKS = 2  # the minimum for a collective


@dataclass(frozen=True)
class BenchTarget:
    """The nodes, interpreter and environment of a measurement."""

    python: str
    """The interpreter on the nodes."""
    nodes: tuple[str, ...] = ()
    """The nodes of the allocation; empty for this machine."""
    device: str = "auto"
    env: Mapping[str, str] = field(default_factory=dict)
    """Additions to the environment."""

    @classmethod
    def from_profile(cls, profile: ClusterProfile, python: str, nodes: tuple[str, ...], device: str) -> BenchTarget:
        """Return a target with the environment that the plan gives to runs of ``profile``, to measure what they get."""
        facts = profile.node if len(nodes) > 1 else None
        nccl_settings = nccl.communication_env(device, profile.fabric_interface, {*os.environ, *profile.env}, facts)
        env = {**profile.env, **{name: setting.value for name, setting in nccl_settings.items()}}
        return cls(python=profile.python or python, nodes=nodes, device=device, env=env)

    def srun_argv(self, nodes: Sequence[str]) -> list[str]:
        """Return the srun command for one process on each of ``nodes``, empty for this machine."""
        if not self.nodes:
            return []
        # --overlap: the user's shell may be a job step that holds the allocation's CPUs and GPUs.
        return [
            "srun", f"--nodes={len(nodes)}", f"--ntasks={len(nodes)}", "--ntasks-per-node=1",
            f"--nodelist={','.join(nodes)}", "--overlap", "--export=ALL", "--cpu-bind=none", "--kill-on-bad-exit=1",
        ]  # fmt: skip


@dataclass(frozen=True)
class BenchResult:
    """Measured rates and node facts."""

    measured: MeasuredRates | None = None
    """None if nothing was measured."""
    node: NodeFacts | None = None
    """None if the facts could not be read."""
    notes: tuple[str, ...] = ()
    failures: tuple[str, ...] = ()
    """One message per failed measurement."""


class _BenchRunner:
    """Runner that executes measurements one after another, reports each before it starts, and collects failures."""

    def __init__(self, target: BenchTarget, on_progress: Callable[[str], None]) -> None:
        self.target = target
        self.on_progress = on_progress
        self.failures: list[str] = []

    def run(self, description: str, nodes: Sequence[str], module: str, *args: str, required_key: str) -> dict[str, Any]:
        """Return the output of ``module`` on ``nodes``; record a failure if it lacks ``required_key``."""
        self.on_progress(description)
        argv = [
            *self.target.srun_argv(nodes),
            *proc.python_module_argv(self.target.python, f"clustertrain.cluster.{module}", *args),
        ]
        output, failure = _run_measurement(argv, self.target.env)
        if "No module named 'torch'" in failure:
            error = extras.missing("torch", "the measurement", self.target.python)
            failure = f"{error.message}; {error.fix}"
        if required_key not in output:
            self.failures.append(f"{description}: {failure or 'ended without a result'}")
        return output


def measure(target: BenchTarget, on_progress: Callable[[str], None]) -> BenchResult:
    """Read the node facts and measure all rates, in about half a minute.

    ``on_progress`` is called before each part. A KeyboardInterrupt ends the running measurement with all its processes
    and propagates.
    """
    runner = _BenchRunner(target, on_progress)
    first_node = target.nodes[:1]
    node = _parse_node_facts(
        runner.run("reading the node's hardware", first_node, "node_facts", required_key="node"), runner.failures
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
        notes.append("torch finds no GPU here: the rates are those of the CPU")
    ranks = int(gemm["count"]) or CPU_RANKS
    if ranks == 1:
        notes.append("one GPU: no all-reduce within a node to measure")
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
    """Return the GB/s within a node (None for one rank) and across nodes (None for one node).

    ``port`` is a free port on the first node.
    """
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
        failures.append(f"reading the node's hardware: {e}")
        return None


def _round_rate(value: float | None) -> float | None:
    """Round to four significant digits; repeated measurements differ in the third."""
    return None if value is None else float(f"{value:.4g}")


def _run_measurement(argv: Sequence[str], env: Mapping[str, str]) -> tuple[dict[str, Any], str]:
    """Run a measurement; return its output, and the reason if it failed or an empty string."""
    with tempfile.TemporaryDirectory(prefix="clustertrain-measure-") as folder:
        log = Path(folder) / "log"
        try:
            # In a new session, Ctrl-C reaches only this process, which then terminates the child.
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
            # The first value of a key wins: the rank that failed first knows the cause.
            output = {**json.loads(line.removeprefix(OUTPUT_PREFIX)), **output}
    failure = str(output.pop("error", ""))
    if not has_ended:
        failure = failure or f"took longer than {TIMEOUT_S:g} s"
    elif child.returncode:
        failure = failure or f"exit code {child.returncode}: {_last_lines(text)}"
    return output, failure


def _last_lines(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith(OUTPUT_PREFIX)]
    return " / ".join(lines[-2:]) or "no output"
