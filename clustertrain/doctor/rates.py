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
from clustertrain.spec.cluster import ClusterProfile, Measured

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
        """What the runs of ``profile`` would get, so that it is measured as they will go."""
        env = dict(profile.env)
        if profile.fabric_interface:
            env |= dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), profile.fabric_interface)
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
    """``measured`` is None where nothing was. ``failures`` are sentences, one for each measurement that failed."""

    measured: Measured | None
    notes: tuple[str, ...]
    failures: tuple[str, ...]


def measure(where: Where, say: Callable[[str], None]) -> Outcome:
    """All measurements, one after the other; ``say`` hears of each before it begins. Takes about half a minute.

    A KeyboardInterrupt ends the one that runs, with every process of it, and is passed on.
    """
    notes: list[str] = []
    failures: list[str] = []

    def attempt(what: str, argv: Sequence[str], needed: str) -> dict[str, Any]:
        say(f"measuring {what}")
        found, failure = _run(argv, where.env)
        if needed not in found:
            failures.append(f"{what}: {failure or 'it ended without a result'}")
        return found

    first = where.nodes[:1]
    argv = [*where.srun(first), where.python, "-m", "clustertrain.doctor.measure", "gemm", "--device", where.device]
    seen = attempt("matrix products", argv, "gemm_tflops")
    if "kind" not in seen:
        return Outcome(None, (), tuple(failures))
    ranks = int(seen["count"]) or RANKS_ON_CPU
    inside: dict[str, Any] = {}
    across: dict[str, Any] = {}
    step = [where.python, "-m", "clustertrain.doctor.node_step", "--ranks", str(ranks)]
    if ranks > 1:
        argv = [*where.srun(first), *step, "all-reduce", "--device", seen["kind"]]
        inside = attempt(f"an all-reduce over {ranks} ranks of one node", argv, "bus_gb_s")
    else:
        notes.append("one GPU: no all-reduce inside a node to measure")
    if len(where.nodes) > 1:
        meeting = ["--nodes", ",".join(where.nodes), "--port", str(seen["port"])]
        argv = [*where.srun(where.nodes), *step, *meeting, "all-reduce-across", "--device", seen["kind"]]
        across = attempt(f"all-reduces across {len(where.nodes)} nodes", argv, "bus_gb_s")
    if seen["kind"] == "cpu" and where.device == "auto":
        notes.append("torch sees no GPU here: these are rates of the CPU")
    if not {"gemm_tflops"} & seen.keys() | {"bus_gb_s"} & (inside.keys() | across.keys()):
        return Outcome(None, tuple(notes), tuple(failures))
    measured = Measured(
        gemm_tflops=_rounded(seen.get("gemm_tflops")),
        gemm_dtype=seen.get("gemm_dtype", ""),
        node_bus_gb_s=_rounded(inside.get("bus_gb_s")),
        fabric_bus_gb_s=_rounded(across.get("bus_gb_s")),
        device=seen["device"],
        ranks=ranks,
        nodes=max(1, len(where.nodes)),
        torch=seen["torch"],
        measured_at=float(round(clock.now())),
    )
    return Outcome(measured, tuple(notes), tuple(failures))


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
