"""The agent: one process a node. It owns the signals, starts torchrun and the sampler, and writes the node's result."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from clustertrain import clock, fsio, proc, settings
from clustertrain.agent import deadline as deadlines
from clustertrain.agent.controller_watch import NO_ANSWER_S, BatchWatch
from clustertrain.agent.node_context import Place, place_from
from clustertrain.agent.node_environment import Job, look
from clustertrain.agent.node_result import NodeResult, Seen, judge, read_left, read_ranks
from clustertrain.agent.rank_monitor import Watched
from clustertrain.agent.signals import Signals
from clustertrain.agent.telemetry import HURRIED_STOP_S, STOP_S, Recording
from clustertrain.agent.tracking import HURRIED_STOP_S as HURRIED_TRACKING_S
from clustertrain.agent.tracking import STOP_S as TRACKING_S
from clustertrain.agent.tracking import Tracking
from clustertrain.errors import EXIT_CONFIG, EXIT_FAILED, EXIT_NO_REQUEUE, ClusterTrainError, EnvironmentNotFit
from clustertrain.run import heartbeat
from clustertrain.run.events import EventLog
from clustertrain.scheduler import rendezvous, torchrun
from clustertrain.scheduler.sockets import interface_towards

POLL_S = 0.1
RENDEZVOUS_TIMEOUT_S = 600.0  # as AGENTS_S in batch


class Agent:
    """Runs the ranks of one node to their end."""

    def __init__(self, place: Place, signals: Signals) -> None:
        self.place = place
        self.signals = signals
        self.log = EventLog(place.attempt.events_of(f"agent-{place.node}"))
        # A killed agent's is removed by agent_end.sh, which knows it by these names.
        self.rank_dir = Path(tempfile.mkdtemp(prefix=f"clustertrain-{place.run.id}-{place.attempt.n}-{place.node}-"))
        self.stopping: str | None = None
        self.stop_came_first: bool | None = None  # whether somebody had asked to stop when all ranks had ended
        self.deadline = deadlines.read(place.attempt.deadline)
        self.aborted = False
        self.taken_over: int | None = None  # by which attempt
        self.recording: Recording | None = None
        self.tracking = Tracking(place.run, place.attempt, place.environ, self.log)
        self.batch = BatchWatch(place, self.log)

    def run(self) -> NodeResult:
        p = self.place
        recording = self.recording = Recording(
            p.run,
            p.attempt,
            p.node,
            p.ranks,
            environ=p.environ,
            beats=self.rank_dir,
            several_nodes=len(p.nodes) > 1,
            log=self.log,
        )
        recording.start()
        try:
            self.log.write("agent_started", node=p.node, node_rank=p.node_rank, gpus=recording.gpus)
            if p.node_rank == 0:
                recording.compact_earlier()
                self.tracking.start()
            result = self._ranks()
            fsio.write_json(p.attempt.result_of(p.node), result.to_json())
            self.log.write("ranks_ended", node=p.node, ending=result.ending, exit_code=result.exit_code)
            self._settle_for_batch()
            hurried = result.ending == "stopped" or self._hurried()
            self.tracking.ask_to_stop()
            recording.stop(HURRIED_STOP_S if hurried else STOP_S)
            self.tracking.stop(HURRIED_TRACKING_S if hurried else TRACKING_S)
            if not hurried:
                recording.compact(self._hurried)
                self._settle_for_batch()
            return result
        finally:
            recording.stop()
            self.tracking.stop(0.0)
            self.log.close()
            shutil.rmtree(self.rank_dir, ignore_errors=True)

    def _settle_for_batch(self) -> None:
        if self.batch.gone():
            with contextlib.suppress(OSError):
                self.batch.settle(NO_ANSWER_S)

    def _hurried(self) -> bool:
        """Whether this node is to be left now: somebody has asked to stop, or given up on the step."""
        ordered = fsio.peek_json(self.place.attempt.stop) is not None
        return ordered or self.stopping is not None or self.signals.first is not None

    def _ranks(self) -> NodeResult:
        p = self.place
        try:
            meeting = self._meet()
            child = self._torchrun(meeting)
        except ClusterTrainError as e:
            kind = "environment" if e.exit_code == EXIT_CONFIG else "communication"
            error = {"type": type(e).__name__, "message": str(e)}
            return judge(p.node, p.node_rank, p.ranks, {r: _failed(r, kind, error) for r in p.ranks})
        self.log.write("ranks_started", world_size=len(p.nodes) * p.ranks_per_node, rendezvous=meeting.id)
        watched = Watched(self.rank_dir, p.ranks, child.pid, self._others_done)
        try:
            self._watch(child, watched)
        finally:
            exit_code = child.poll()
            proc.kill_descendants(spare=self.tracking.pid)
            child.wait()
        seen = Seen(
            launcher=exit_code,
            log_tail=_tail(self._launcher_log) if exit_code else None,
            stop_asked=self._hurried() if self.stop_came_first is None else self.stop_came_first,
            left=read_left(self.rank_dir, p.ranks),
            beats=heartbeat.Reader(self.rank_dir, p.ranks).read(),
            stopped=watched.stopped,
            hung=watched.hung,
        )
        result = judge(p.node, p.node_rank, p.ranks, read_ranks(self.rank_dir, p.ranks), seen)
        if self.taken_over is not None:
            return self._no_longer_owner(result, self.taken_over)
        if result.ending == "stopped" and self.stopping is None and self.signals.first is not None:
            # A script that heeds signals by itself need not wait until this agent stops the ranks.
            self.log.write("signal", node=p.node, source=self._signal_source())
        return result

    def _no_longer_owner(self, found: NodeResult, newer: int) -> NodeResult:
        """That the ranks were ended is no failure of theirs."""
        why = f"taken over by attempt {newer}"
        print(f"clustertrain agent on {self.place.node}: {why}", file=sys.stderr, flush=True)
        return replace(found, ending="stopped", kind=None, message=None, why=why, exit_code=EXIT_NO_REQUEUE)

    def _others_done(self) -> bool:
        results = (fsio.peek_json(self.place.attempt.result_of(n)) for n in self.place.nodes if n != self.place.node)
        return all(result is not None and result["ending"] == "completed" for result in results)

    @property
    def _launcher_log(self) -> Path:
        return self.place.attempt.logs / f"agent-{self.place.node}.log"

    def _meet(self) -> rendezvous.Rendezvous:
        p = self.place
        if p.node_rank == 0:
            meeting = rendezvous.publish(p.attempt.rendezvous, "127.0.0.1" if p.on_one_host else p.node)
        else:
            meeting = rendezvous.wait_for(p.attempt.rendezvous, p.node, RENDEZVOUS_TIMEOUT_S)
        rendezvous.resolve(meeting, p.node)
        return meeting

    def _torchrun(self, meeting: rendezvous.Rendezvous) -> Any:
        p = self.place
        program = ("clustertrain", "train")
        argv = torchrun.command(meeting, program, p.ranks_per_node, nodes=len(p.nodes), node_rank=p.node_rank)
        return proc.start(
            argv,
            env=self._environment(meeting),
            log=self._launcher_log,
            new_session=True,
            ignore_stop_signals=True,
        )

    def _environment(self, meeting: rendezvous.Rendezvous) -> dict[str, str]:
        p = self.place
        env = dict(p.environ)
        env[settings.RANK_DIR] = str(self.rank_dir)
        env[settings.NODE] = p.node
        env[settings.NODE_RANK] = str(p.node_rank)
        env[settings.DEVICE] = p.device
        # CUDA numbers GPUs by speed otherwise, and NVML by bus: on a mixed node the report would name the wrong ones.
        env.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
        env.update(torchrun.SHUTDOWN)
        try:
            interface = self._interface(meeting)
        except EnvironmentNotFit:
            if "GLOO_SOCKET_IFNAME" not in env:
                raise
            interface = None  # who names the interface may know a node by more than its name
        if settings.LOCAL_JOB not in env:  # there all nodes are this machine, and share its GPUs and interfaces
            env.update(self._of_this_node(interface or ""))
        if interface:
            # gloo would take the address that the host's own name resolves to, which on Debian is 127.0.1.1.
            env.setdefault("GLOO_SOCKET_IFNAME", interface)
        return env

    def _of_this_node(self, interface: str) -> dict[str, str]:
        """Settings for names that neither the plan nor the user has set; each with its reason among the events."""
        p = self.place
        job = Job(
            device=p.device,
            ranks=p.ranks_per_node,
            several_nodes=not p.on_one_host,
            towards=interface,
            dumps=p.attempt.flight_record,
        )
        found = look(job, p.environ)
        told = {name: {"value": s.value, "reason": s.reason} for name, s in found.settings.items()}
        self.log.write("node_settings", node=p.node, settings=told, notes=list(found.notes))
        for line in [*(f"{n}={s.value}: {s.reason}" for n, s in found.settings.items()), *found.notes]:
            print(f"clustertrain agent on {p.node}: {line}", file=sys.stderr, flush=True)
        return found.environ()

    def _interface(self, meeting: rendezvous.Rendezvous) -> str | None:
        p = self.place
        if p.on_one_host:
            return interface_towards("127.0.0.1")
        other = p.nodes[1] if p.node_rank == 0 else meeting.host
        return interface_towards(rendezvous.resolve(rendezvous.Rendezvous(other, meeting.port, ""), p.node))

    def _watch(self, child: Any, watched: Watched) -> None:
        """Until torchrun has ended, or has no reason left to live."""
        next_look = 0.0
        while child.poll() is None:
            if clock.monotonic() >= next_look:
                next_look = clock.monotonic() + 10 * POLL_S
                watched.look(clock.monotonic())
                if watched.ended_at is not None and self.stop_came_first is None:
                    self.stop_came_first = self._hurried()
                self._look_for_stop()
                self._look_for_newer_attempt()
                self._look_for_batch()
                self.tracking.look()
            if self.signals.first and self.stopping is None:
                self._heed_signals()
            if self.aborted:
                watched.give_up(clock.monotonic())
            if self.aborted or watched.over(clock.monotonic()):
                return
            _doze(child)

    def _look_for_stop(self) -> None:
        order = fsio.peek_json(self.place.attempt.stop)
        if order is not None and order.get("abort"):
            self.aborted = True
        elif order is not None and self.stopping is None:
            # By hand there is no hurry; every other reason to stop ends in a kill.
            self._stop_ranks("batch", None if order.get("why") == "requeue" else self.place.grace_s)
        self.deadline = deadlines.read(self.place.attempt.deadline) or self.deadline
        if self.stopping is None and self.deadline is not None and self.deadline.due(clock.now()):
            self._stop_ranks("deadline", None)

    def _look_for_newer_attempt(self) -> None:
        """Batch looks as well, but it may be gone, or on a node that is cut off."""
        with contextlib.suppress(OSError):
            self.taken_over = self.place.run.newer_attempt(self.place.attempt.n)
        self.aborted = self.aborted or self.taken_over is not None

    def _look_for_batch(self) -> None:
        if self.batch.gone():
            if self.stopping is None:
                self.batch.stop_others()
                self._stop_ranks("batch killed", self.place.grace_s)
            with contextlib.suppress(OSError):  # the file system; the next round tries again
                self.batch.settle()

    def _heed_signals(self) -> None:
        if self._signal_source() != "deadline":
            self._stop_ranks(self._signal_source(), self.place.grace_s)
        elif self.place.node_rank == 0 and not self.place.attempt.warned.exists():
            # A preemption announced by the same signal is known to the scheduler alone, which batch will ask.
            with contextlib.suppress(OSError):  # a full disk; the next round tries again
                fsio.write_json(self.place.attempt.warned, {"t": clock.now()})

    def _signal_source(self) -> str:
        """Whose request the signals are."""
        explained = self.deadline is not None and self.deadline.explains(self.signals.received, clock.now())
        return "deadline" if explained else f"signal:{self.signals.first}"

    def _stop_ranks(self, source: str, grace_s: float | None) -> None:
        """Tell the ranks, and by when they must have left: the grace time, and the end of the allocation anyway."""
        self.stopping = source
        end_time = self.deadline.end_time if self.deadline is not None else None
        ends = [end_time, clock.now() + grace_s if grace_s is not None else None]
        deadline = min((e for e in ends if e is not None), default=None)
        try:
            fsio.write_json(self.rank_dir / "stop", {"source": source, "t": clock.now(), "deadline": deadline})
        except OSError as e:
            # A full /tmp must not cost the state: the ranks take SIGTERM for the same word.
            print(f"clustertrain agent: {e}; warning the ranks by signal", file=sys.stderr, flush=True)
            for process in proc.descendants():
                proc.send_signal(process, signal.SIGTERM)
        self.log.write("signal", node=self.place.node, source=source)
        if self.recording is not None:
            self.recording.quiet()


def _failed(rank: int, kind: str, error: dict[str, str]) -> dict[str, Any]:
    return {"rank": rank, "ending": "failed", "kind": kind, "exit_code": EXIT_CONFIG, "error": error}


def _tail(log: Path, size: int = 65_536) -> str:
    try:
        return log.read_bytes()[-size:].decode(errors="replace")
    except OSError:
        return ""


def _doze(child: Any) -> None:
    clock.wait_until(lambda: child.poll() is not None, POLL_S, POLL_S / 2)


def main() -> int:
    """``clustertrain agent``, run by srun or the local step once on every node."""
    signals = Signals()
    proc.adopt_orphans()
    try:
        place = place_from(os.environ)
        fsio.as_open_from_now_on(place.run.path)
    except ClusterTrainError as e:
        print(f"clustertrain agent: {e}", file=sys.stderr, flush=True)
        return e.exit_code
    try:
        return Agent(place, signals).run().exit_code
    except OSError as e:
        # The disk under the run directory. Batch takes the missing result for a failure, and may requeue.
        print(f"clustertrain agent: {e}", file=sys.stderr, flush=True)
        return EXIT_FAILED
