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
from clustertrain.config.cluster import ClusterProfile, Measured
from clustertrain.config.node_facts import NodeFacts
from clustertrain.config.parsing import build
from clustertrain.errors import ConfigError
from clustertrain.plan.env import nccl

MARK = "clustertrain-measured "  # before each line of JSON that a measurement prints
TIMEOUT_S = 180.0  # of one measurement; most of it is for importing torch from a busy network filesystem
END_S = 10.0
POLL_S = 0.1
RANKS_ON_CPU = 2  # the fewest that have something between them


@dataclass(frozen=True)
class Where:
    """``nodes`` are the allocation's, empty for this machine alone. ``python`` is the interpreter there;
    ``env`` is added to the environment."""

    python: str
    nodes: tuple[str, ...] = ()
    device: str = "auto"
    env: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, profile: ClusterProfile, python: str, nodes: tuple[str, ...], device: str) -> Where:
        """With the environment that the plan gives runs of ``profile``, so that it is measured as they will go."""
        facts = profile.node if len(nodes) > 1 else None
        found = nccl.communication(device, profile.fabric_interface, {*os.environ, *profile.env}, facts)
        env = {**profile.env, **{name: setting.value for name, setting in found.items()}}
        return cls(python=profile.python or python, nodes=nodes, device=device, env=env)

    def srun(self, nodes: Sequence[str]) -> list[str]:
        """The step launcher for one process on each of ``nodes``; nothing for this machine."""
        if not self.nodes:
            return []
        # --overlap: the shell that this was typed in may be a step that holds the allocation's processors and GPUs.
        return [
            "srun", f"--nodes={len(nodes)}", f"--ntasks={len(nodes)}", "--ntasks-per-node=1",
            f"--nodelist={','.join(nodes)}", "--overlap", "--export=ALL", "--cpu-bind=none", "--kill-on-bad-exit=1",
        ]  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """``measured`` and ``node`` are None where nothing was measured or read. ``failures`` are sentences, one for each
    that failed."""

    measured: Measured | None = None
    node: NodeFacts | None = None
    notes: tuple[str, ...] = ()
    failures: tuple[str, ...] = ()


class _Measuring:
    """One part after the other, each told before it begins, and what has failed so far."""

    def __init__(self, where: Where, say: Callable[[str], None]) -> None:
        self.where = where
        self.say = say
        self.failures: list[str] = []

    def run(self, what: str, nodes: Sequence[str], module: str, *args: str, needed: str) -> dict[str, Any]:
        """What ``module`` said on ``nodes``; a failure where ``needed`` is not among it."""
        self.say(what)
        argv = [
            *self.where.srun(nodes),
            *proc.python_module(self.where.python, f"clustertrain.cluster.{module}", *args),
        ]
        found, failure = _run(argv, self.where.env)
        if needed not in found:
            self.failures.append(f"{what}: {failure or 'it ended without a result'}")
        return found


def measure(where: Where, say: Callable[[str], None]) -> Outcome:
    """All there is to read and measure; ``say`` hears of each part before it begins. Takes about half a minute.

    A KeyboardInterrupt ends the one that runs, with every process of it, and is passed on.
    """
    do = _Measuring(where, say)
    first = where.nodes[:1]
    node = _facts(do.run("reading what the node is made of", first, "node_facts", needed="node"), do.failures)
    gemm = do.run(
        "measuring matrix products", first, "bench_ranks", "gemm", "--device", where.device, needed="gemm_tflops"
    )
    if "kind" not in gemm:
        return Outcome(node=node, failures=tuple(do.failures))
    notes = []
    if gemm["kind"] == "cpu" and where.device == "auto":
        notes.append("torch sees no GPU here: these are rates of the CPU")
    ranks = int(gemm["count"]) or RANKS_ON_CPU
    if ranks == 1:
        notes.append("one GPU: no all-reduce inside a node to measure")
    inside, across = _all_reduces(do, ranks, gemm["kind"], gemm["port"])
    measured = Measured(
        gemm_tflops=_rounded(gemm.get("gemm_tflops")),
        gemm_dtype=gemm.get("gemm_dtype", ""),
        node_bus_gb_s=_rounded(inside),
        fabric_bus_gb_s=_rounded(across),
        device=gemm["device"],
        ranks=ranks,
        nodes=max(1, len(where.nodes)),
        torch=gemm["torch"],
        measured_at=float(round(clock.now())),
    )
    some = any((measured.gemm_tflops, measured.node_bus_gb_s, measured.fabric_bus_gb_s))
    return Outcome(measured if some else None, node, tuple(notes), tuple(do.failures))


def _all_reduces(do: _Measuring, ranks: int, kind: str, port: int) -> tuple[float | None, float | None]:
    """GB/s inside a node and across nodes, where there is something between the ranks. ``port`` is the first node's."""
    inside: dict[str, Any] = {}
    across: dict[str, Any] = {}
    nodes, each = do.where.nodes, ["--ranks", str(ranks), "--device", kind]
    if ranks > 1:
        what = f"measuring an all-reduce over {ranks} ranks of one node"
        inside = do.run(what, nodes[:1], "bench_node", "all-reduce", *each, needed="bus_gb_s")
    if len(nodes) > 1:
        what = f"measuring all-reduces across {len(nodes)} nodes"
        meeting = ["--nodes", ",".join(nodes), "--port", str(port)]
        across = do.run(what, nodes, "bench_node", "all-reduce-across", *each, *meeting, needed="bus_gb_s")
    return inside.get("bus_gb_s"), across.get("bus_gb_s")


def _facts(said: Mapping[str, Any], failures: list[str]) -> NodeFacts | None:
    try:
        return build(said["node"], NodeFacts, "the node") if "node" in said else None
    except ConfigError as e:  # another version of clustertrain on the nodes
        failures.append(f"reading what the node is made of: {e}")
        return None


def _rounded(value: float | None) -> float | None:
    """To four digits: the next run differs in the third."""
    return None if value is None else float(f"{value:.4g}")


def _run(argv: Sequence[str], env: Mapping[str, str]) -> tuple[dict[str, Any], str]:
    """What a measurement said, and why it failed (empty where it did not)."""
    with tempfile.TemporaryDirectory(prefix="clustertrain-measure-") as folder:
        log = Path(folder) / "log"
        try:
            # A session of its own: Ctrl-C is for this process, which then ends the child in order.
            child = proc.start(argv, env={**os.environ, **env}, log=log, new_session=True)
        except FileNotFoundError as e:
            return {}, f"{argv[0]} cannot be started: {e.strerror}"
        try:
            ended = clock.wait_until(lambda: child.poll() is not None, TIMEOUT_S, POLL_S)
        finally:
            proc.end(child, END_S)
        text = log.read_text(errors="replace")
    found: dict[str, Any] = {}
    for line in text.splitlines():
        if line.startswith(MARK):
            # The first word on a key counts: the rank that failed first is the one that knows why.
            found = {**json.loads(line.removeprefix(MARK)), **found}
    failure = str(found.pop("error", ""))
    if not ended:
        failure = failure or f"it took longer than {TIMEOUT_S:g} s"
    elif child.returncode:
        failure = failure or f"exit code {child.returncode}: {_last_words(text)}"
    return found, failure


def _last_words(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith(MARK)]
    return " / ".join(lines[-2:]) or "it printed nothing"
