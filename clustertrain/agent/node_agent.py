"""The node agent: handles signals, runs torchrun and the sampler, and writes the node's result."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from clustertrain import clock, fsio, proc, settings
from clustertrain.agent.batch_process_watch import SCHEDULER_TIMEOUT_S, BatchProcessWatch
from clustertrain.agent.deadline import LIMIT_SIGNAL, OWN_WARNINGS, load_deadline
from clustertrain.agent.environment_copy import EnvironmentCopy, Stopped, prepare_python
from clustertrain.agent.node_context import NodeContext, load_node_context
from clustertrain.agent.node_environment import NodeJob, inspect_node
from clustertrain.agent.node_result import (
    RankObservations,
    build_node_result,
    failed_record,
    read_finished_records,
    read_rank_records,
    stopped_record,
)
from clustertrain.agent.ranks import rank_start
from clustertrain.agent.ranks.command_ranks import CommandRanks
from clustertrain.agent.ranks.command_stop import CommandStop
from clustertrain.agent.ranks.rank_monitor import RankMonitor
from clustertrain.agent.ranks.stop_step import StopStepAgreement
from clustertrain.agent.relocation import RankPython
from clustertrain.agent.signals import Signals
from clustertrain.agent.telemetry import HURRIED_STOP_S, STOP_S, NodeTelemetry
from clustertrain.agent.tracking import HURRIED_TRACKING_STOP_S, TRACKING_STOP_S, TrackingProcess
from clustertrain.config.job import RunSpec
from clustertrain.errors import EXIT_CONFIG, EXIT_FAILED, EXIT_NO_REQUEUE, ClusterTrainError, UnsuitableEnvironment
from clustertrain.run import heartbeat
from clustertrain.run.events import EventLog
from clustertrain.run.results import ErrorInfo, FailureKind, NodeResult, parse_node_result
from clustertrain.run.run_dir import RunDir
from clustertrain.run.run_spec import load_spec
from clustertrain.run.shipped_environment import load_shipped_environment
from clustertrain.scheduler import rendezvous, torchrun
from clustertrain.scheduler.sockets import find_interface_to

POLL_S = 0.1
RENDEZVOUS_TIMEOUT_S = 600.0  # as AGENTS_S in the batch process
REQUEUE_GRACE_S = 300.0  # for a command to end after a requeue by hand, if the grace time is unknown


class NodeAgent:
    """The agent of one node."""

    def __init__(self, context: NodeContext, signals: Signals) -> None:
        self.context = context
        self.signals = signals
        self.log = EventLog(context.attempt.events_path(f"agent-{context.node}"))
        # If the agent is killed, agent_end.sh finds the folder by this prefix and removes it.
        self.rank_dir = Path(
            tempfile.mkdtemp(prefix=f"clustertrain-{context.run.id}-{context.attempt.n}-{context.node}-")
        )
        self.stop_source: str | None = None
        self.limit_warning = False  # Slurm's early warning was received, with time left to train
        self.num_handled_signals = 0
        self.stop_requested_first: bool | None = None  # a stop was requested before all ranks had ended
        self.deadline = load_deadline(context.attempt.deadline)
        self.stop_deadline: float | None = None
        self.environment_copy: EnvironmentCopy | None = None
        self.rank_python = RankPython()
        self.command_ranks: CommandRanks | None = None
        self.command_stop: CommandStop | None = None
        self.aborted = False
        self.taken_over_by: int | None = None  # number of the newer attempt
        self.telemetry: NodeTelemetry | None = None
        self.tracking = TrackingProcess(context.run, context.attempt, context.environ, self.log)
        self.batch_process_watch = BatchProcessWatch(context, self.log)

    def run(self) -> NodeResult:
        """Run the ranks of the node to their end, and write and return its result."""
        context = self.context
        telemetry = self.telemetry = NodeTelemetry(
            context.run,
            context.attempt,
            context.node,
            context.ranks,
            environ=context.environ,
            heartbeat_dir=self.rank_dir,
            several_nodes=len(context.nodes) > 1,
            log=self.log,
        )
        telemetry.start()
        try:
            self.log.write("agent_started", node=context.node, node_rank=context.node_rank, gpus=telemetry.gpus)
            if context.node_rank == 0:
                telemetry.compact_earlier()
                self.tracking.start()
            result = self._run_ranks()
            fsio.write_json(context.attempt.result_path(context.node), msgspec.to_builtins(result))
            self.log.write("ranks_ended", node=context.node, ending=result.ending, exit_code=result.exit_code)
            self._requeue_if_batch_process_gone()
            hurry = result.ending == "stopped" or self._should_hurry()
            self.tracking.request_stop()
            telemetry.stop(HURRIED_STOP_S if hurry else STOP_S)
            self.tracking.stop(HURRIED_TRACKING_STOP_S if hurry else TRACKING_STOP_S)
            if not hurry:
                if self.environment_copy is not None:
                    self.environment_copy.release()
                telemetry.compact(self._should_hurry)
                self._requeue_if_batch_process_gone()
            return result
        finally:
            telemetry.stop()
            self.tracking.stop(0.0)
            if self.command_stop is not None:
                self.command_stop.close()
            self.log.close()
            shutil.rmtree(self.rank_dir, ignore_errors=True)

    def _copy_environment(self) -> None:
        """Let the ranks run from a node-local copy of their environment, if the run ships it."""
        context = self.context
        environment = load_shipped_environment(context.run)
        if environment is None:
            return
        folder = load_spec(context.run).job.environment_dir
        self.environment_copy = EnvironmentCopy(folder, context.environ, self._should_hurry)
        self.rank_python = prepare_python(self.environment_copy, environment, node=context.node, log=self.log)

    def _requeue_if_batch_process_gone(self) -> None:
        if self.batch_process_watch.is_gone():
            with contextlib.suppress(OSError):
                self.batch_process_watch.ensure_requeued(SCHEDULER_TIMEOUT_S)

    def _should_hurry(self) -> bool:
        """Return whether the job is stopping, so that this node has to be released soon."""
        stop_ordered = fsio.poll_json(self.context.attempt.stop_request) is not None
        return stop_ordered or self.stop_source is not None or self.signals.first is not None

    def _run_ranks(self) -> NodeResult:
        context = self.context
        try:
            self._copy_environment()
        except Stopped:
            self.log.write("signal", node=context.node, source=self._signal_source() if self.signals.first else "batch")
            records = {r: stopped_record(r, "stopped before the ranks were started") for r in context.ranks}
            return build_node_result(context.node, context.node_rank, context.ranks, records)
        try:
            rdzv = self._join_rendezvous()
            spec = _load_spec(context.run)
            is_process_per_rank = spec is not None and (spec.job.container or (spec.script and spec.script.command))
            child = self._start_ranks(rdzv, spec) if spec and is_process_per_rank else self._start_torchrun(rdzv)
        except ClusterTrainError as e:
            kind: FailureKind = "environment" if e.exit_code == EXIT_CONFIG else "communication"
            error = ErrorInfo(type=type(e).__name__, message=str(e))
            records = {r: failed_record(r, kind, error, exit_code=EXIT_CONFIG) for r in context.ranks}
            return build_node_result(context.node, context.node_rank, context.ranks, records)
        self.log.write("ranks_started", world_size=len(context.nodes) * context.ranks_per_node, rendezvous=rdzv.id)
        monitor = RankMonitor(self.rank_dir, context.ranks, child.pid, self._have_others_completed)
        try:
            self._watch_ranks(child, monitor)
        finally:
            exit_code = child.poll()
            if isinstance(child, CommandRanks):
                child.kill()
            proc.kill_descendants(exclude_pid=self.tracking.pid)
            child.wait()
            if isinstance(child, CommandRanks):
                child.clean_up()
        observations = RankObservations(
            launcher_exit_code=exit_code,
            log_tail=_read_tail(self._launcher_log) if exit_code else None,
            stop_requested=self._should_hurry() if self.stop_requested_first is None else self.stop_requested_first,
            finished_records=read_finished_records(self.rank_dir, context.ranks),
            heartbeats=heartbeat.HeartbeatReader(self.rank_dir, context.ranks).read(),
            stopped_ranks=monitor.stopped_ranks,
            hung_ranks=monitor.hung_ranks,
        )
        result = build_node_result(
            context.node,
            context.node_rank,
            context.ranks,
            read_rank_records(self.rank_dir, context.ranks),
            observations,
        )
        if self.taken_over_by is not None:
            return self._no_longer_owner(result, self.taken_over_by)
        if result.ending == "stopped" and self.stop_source is None and self.signals.first is not None:
            # A script that handles signals itself may end before this agent stops the ranks.
            self.log.write("signal", node=context.node, source=self._signal_source())
        return result

    def _no_longer_owner(self, result: NodeResult, newer: int) -> NodeResult:
        """Return ``result`` with the ending "stopped": the ranks did not fail, but were ended for a newer attempt."""
        reason = f"taken over by attempt {newer}"
        print(f"clustertrain agent on {self.context.node}: {reason}", file=sys.stderr, flush=True)
        return msgspec.structs.replace(
            result, ending="stopped", kind=None, message=None, reason=reason, exit_code=EXIT_NO_REQUEUE
        )

    def _have_others_completed(self) -> bool:
        other_nodes = (n for n in self.context.nodes if n != self.context.node)
        results = (parse_node_result(fsio.poll_json(self.context.attempt.result_path(n))) for n in other_nodes)
        return all(result is not None and result.ending == "completed" for result in results)

    @property
    def _launcher_log(self) -> Path:
        return self.context.attempt.logs / f"agent-{self.context.node}.log"

    def _join_rendezvous(self) -> rendezvous.Rendezvous:
        context = self.context
        if context.node_rank == 0:
            rdzv = rendezvous.publish(
                context.attempt.rendezvous, "127.0.0.1" if context.is_single_host else context.node
            )
        else:
            rdzv = rendezvous.wait_for(context.attempt.rendezvous, context.node, RENDEZVOUS_TIMEOUT_S)
        rendezvous.resolve(rdzv, context.node)
        return rdzv

    def _start_torchrun(self, rdzv: rendezvous.Rendezvous) -> Any:
        context = self.context
        program = ("clustertrain", "train")
        argv = torchrun.build_command(
            rdzv,
            program,
            context.ranks_per_node,
            nodes=len(context.nodes),
            node_rank=context.node_rank,
            python=self.rank_python.python,
        )
        return proc.start(
            argv,
            env=self._build_environment(rdzv),
            log=self._launcher_log,
            new_session=True,
            ignore_stop_signals=True,
        )

    def _start_ranks(self, rdzv: rendezvous.Rendezvous, spec: RunSpec) -> CommandRanks:
        if spec.script is not None:
            self.command_stop = CommandStop()
        ranks = rank_start.start_ranks(
            self.context,
            spec,
            rdzv,
            self._build_environment(rdzv),
            rank_dir=self.rank_dir,
            python=self.rank_python,
            stop_requested=self._should_hurry,
        )
        if spec.script is not None:
            self.command_ranks = ranks
        return ranks

    def _build_environment(self, rdzv: rendezvous.Rendezvous) -> dict[str, str]:
        context = self.context
        env = dict(context.environ)
        env[settings.RANK_DIR] = str(self.rank_dir)
        env[settings.NODE] = context.node
        env[settings.NODE_RANK] = str(context.node_rank)
        env[settings.DEVICE] = context.device
        # By default CUDA numbers GPUs by speed and NVML by bus: reports of a mixed node would name the wrong GPUs.
        env.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
        env.update(torchrun.SHUTDOWN_ENV)
        try:
            interface = self._find_interface(rdzv)
        except UnsuitableEnvironment:
            if "GLOO_SOCKET_IFNAME" not in env:
                raise
            interface = None  # with the interface set, the nodes may not need names
        if settings.LOCAL_JOB not in env:  # local nodes share the GPUs and interfaces of this machine
            env.update(self._node_settings(interface or ""))
        if interface:
            # By default gloo uses the address of the host name, which is 127.0.1.1 on Debian.
            env.setdefault("GLOO_SOCKET_IFNAME", interface)
        return self.rank_python.relocate_variables(env)

    def _node_settings(self, interface: str) -> dict[str, str]:
        """Return settings that neither the plan nor the user has set, and record each with its reason."""
        context = self.context
        job = NodeJob(
            device=context.device,
            ranks=context.ranks_per_node,
            is_multi_node=not context.is_single_host,
            peer_interface=interface,
            flight_record_path=context.attempt.flight_record,
        )
        node_environment = inspect_node(job, context.environ)
        settings_json = {name: {"value": s.value, "reason": s.reason} for name, s in node_environment.settings.items()}
        self.log.write("node_settings", node=context.node, settings=settings_json, notes=list(node_environment.notes))
        for line in [
            *(f"{n}={s.value}: {s.reason}" for n, s in node_environment.settings.items()),
            *node_environment.notes,
        ]:
            print(f"clustertrain agent on {context.node}: {line}", file=sys.stderr, flush=True)
        return node_environment.environ()

    def _find_interface(self, rdzv: rendezvous.Rendezvous) -> str | None:
        context = self.context
        if context.is_single_host:
            return find_interface_to("127.0.0.1")
        peer = context.nodes[1] if context.node_rank == 0 else rdzv.host
        return find_interface_to(rendezvous.resolve(rendezvous.Rendezvous(peer, rdzv.port, ""), context.node))

    def _watch_ranks(self, child: Any, monitor: RankMonitor) -> None:
        """Watch the ranks until torchrun has ended, or has to be ended."""
        next_check = 0.0
        while child.poll() is None:
            if clock.monotonic() >= next_check:
                next_check = clock.monotonic() + 10 * POLL_S
                monitor.poll(clock.monotonic())
                if monitor.ended_at is not None and self.stop_requested_first is None:
                    self.stop_requested_first = self._should_hurry()
                self._check_stop_order()
                self._check_deadline()
                self._check_newer_attempt()
                self._check_batch_process()
                self.tracking.poll()
            if self.signals.first and self.stop_source is None:
                self._handle_signals()
            if self.command_ranks is not None and self.command_stop is not None:
                is_own_script = self.deadline is not None and self.deadline.own_script
                self.command_stop.poll(self.command_ranks, is_own_script=is_own_script)
            if self.aborted:
                monitor.record_final_state(clock.monotonic())
            if self.aborted or self._is_overdue() or monitor.should_terminate(clock.monotonic()):
                return
            _wait_briefly(child)

    def _check_stop_order(self) -> None:
        order = fsio.poll_json(self.context.attempt.stop_request)
        if order is not None and order.get("abort"):
            self.aborted = True
        elif order is not None and self.stop_source is None:
            cause = str(order.get("reason"))
            self._stop_ranks("batch", self._find_grace_s(cause), cause)

    def _check_deadline(self) -> None:
        self.deadline = load_deadline(self.context.attempt.deadline) or self.deadline
        if self.stop_source is None and self.deadline is not None and self.deadline.is_due(clock.now()):
            self._stop_ranks("deadline", None)

    def _check_newer_attempt(self) -> None:
        """Abort if a newer attempt exists. The batch process checks too, but may be gone or disconnected."""
        with contextlib.suppress(OSError):
            self.taken_over_by = self.context.run.find_newer_attempt(self.context.attempt.n)
        self.aborted = self.aborted or self.taken_over_by is not None

    def _check_batch_process(self) -> None:
        if self.batch_process_watch.is_gone():
            if self.stop_source is None:
                self.batch_process_watch.stop_other_nodes()
                self._stop_ranks("batch killed", self.context.grace_s)
            with contextlib.suppress(OSError):  # the file system failed: retried in the next round
                self.batch_process_watch.ensure_requeued()

    def _handle_signals(self) -> None:
        if len(self.signals.received) > self.num_handled_signals:
            self.num_handled_signals = len(self.signals.received)
            if self.command_ranks is not None and self.command_stop is not None:
                self.command_stop.note_signals(self.command_ranks)
            # The batch process sends SIGUSR2 too, after it has written the reason.
            self._check_stop_order()
            if self.aborted or self.stop_source is not None:
                return
        source = self._signal_source()
        if source != "deadline":
            self._stop_ranks(source, self._find_grace_s(source))
        elif self.deadline is not None and self.deadline.is_due(clock.now()):
            # The ranks have until the end of the allocation, which may be longer than the grace time.
            self._stop_ranks(source, None)
        elif self.context.node_rank == 0 and not self.context.attempt.signal_warning.exists():
            # The signal may also announce a preemption: only the scheduler knows, and the batch process queries it.
            with contextlib.suppress(OSError):  # a full disk: retried in the next round
                fsio.write_json(self.context.attempt.signal_warning, {"t": clock.now()})

    def _build_agreement(self) -> StopStepAgreement:
        context = self.context
        return StopStepAgreement(
            context.attempt.stop_step, self.rank_dir, context.nodes, context.node_rank, context.ranks
        )

    def _find_grace_s(self, cause: str) -> float | None:
        """Return the seconds from a stop request to the kill; None if only the end of the allocation limits them."""
        if cause == "requeue":
            return None  # by hand; all other stops end in a kill
        # The user has chosen the time between the signal of the batch script and the time limit.
        is_own_warning = self.deadline is not None and self.deadline.own_script and cause in OWN_WARNINGS
        return None if is_own_warning else self.context.grace_s

    def _signal_source(self) -> str:
        """Return the cause of the received signals: the time limit, or the first signal.

        An early warning of the time limit stays one when the time has come, unless another signal follows.
        """
        received = list(self.signals.received)
        if self.deadline is not None and self.deadline.is_limit_warning(received, clock.now()):
            self.limit_warning = True
        is_limit = self.limit_warning and set(received) == {LIMIT_SIGNAL}
        return "deadline" if is_limit else f"signal:{received[0]}"

    def _stop_ranks(self, source: str, grace_s: float | None, cause: str = "") -> None:
        """Request a stop of the ranks, with a deadline: the end of the grace time or of the allocation.

        ``cause``: what the batch process has stopped for, if it is the source.
        """
        self.stop_source = source
        end_time = self.deadline.end_time if self.deadline is not None else None
        candidates = [end_time, clock.now() + grace_s if grace_s is not None else None]
        deadline = min((e for e in candidates if e is not None), default=None)
        if self.command_ranks is not None and deadline is None:
            deadline = clock.now() + (self.context.grace_s or REQUEUE_GRACE_S)
        self.stop_deadline = deadline
        try:
            fsio.write_json(self.rank_dir / "stop", {"source": source, "t": clock.now(), "deadline": deadline})
        except OSError as e:
            # A full /tmp must not cost the state: SIGTERM requests the same stop. A command gets its own signal.
            print(f"clustertrain agent: {e}; warning the ranks by signal", file=sys.stderr, flush=True)
            for process in proc.list_descendants() if self.command_ranks is None else ():
                proc.send_signal(process, signal.SIGTERM)
        if self.command_stop is not None:
            self.command_stop.begin(cause or source, self._build_agreement)
        self.log.write("signal", node=self.context.node, source=source)
        if self.telemetry is not None:
            self.telemetry.suspend()

    def _is_overdue(self) -> bool:
        """Return whether a command has not ended by its deadline."""
        if self.command_ranks is None or self.stop_deadline is None or clock.now() < self.stop_deadline:
            return False
        print("clustertrain agent: the command has not ended in time and is killed", file=sys.stderr, flush=True)
        return True


def _load_spec(run: RunDir) -> RunSpec | None:
    """Return the specification of the run; None if it cannot be read, which the trainer reports."""
    try:
        return load_spec(run)
    except ClusterTrainError:
        return None


def _read_tail(log: Path, size: int = 65_536) -> str:
    try:
        return log.read_bytes()[-size:].decode(errors="replace")
    except OSError:
        return ""


def _wait_briefly(child: Any) -> None:
    clock.wait_until(lambda: child.poll() is not None, POLL_S, POLL_S / 2)


def main() -> int:
    """Run ``clustertrain agent``, which srun or the local step starts once per node."""
    signals = Signals()
    if settings.WRAP_PID in os.environ:
        proc.set_parent_death_signal(int(os.environ[settings.WRAP_PID]))
    proc.become_subreaper()
    try:
        context = load_node_context(os.environ)
        fsio.set_group_umask(context.run.path)
    except ClusterTrainError as e:
        print(f"clustertrain agent: {e}", file=sys.stderr, flush=True)
        return e.exit_code
    try:
        return NodeAgent(context, signals).run().exit_code
    except OSError as e:
        # The disk of the run folder failed. The batch process treats the missing result as a failure, and may requeue.
        print(f"clustertrain agent: {e}", file=sys.stderr, flush=True)
        return EXIT_FAILED
