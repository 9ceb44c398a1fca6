"""Temporary run folders for ranks on this machine, in trials and diagnoses."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType

import msgspec

from clustertrain import fsio, proc, settings
from clustertrain.plan.layout import Batch, Layout
from clustertrain.run.run_dir import RunDir
from clustertrain.scheduler import torchrun
from clustertrain.scheduler.sockets import find_interface_to
from clustertrain.submit.prepared_run import PreparedRun
from clustertrain.submit.snapshot import python_path
from clustertrain.submit.transaction import format_spec

LOOPBACK = "127.0.0.1"


@contextlib.contextmanager
def interruptible() -> Iterator[Callable[[], None]]:
    """Raise KeyboardInterrupt on SIGINT, SIGTERM and SIGHUP, so that the process can end its children first.

    Python discards an exception that a signal handler raises inside a destructor or a callback of the interpreter. The
    context yields a function that raises it again: call it in each loop. The end of the context calls it too.
    """
    interrupted = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        interrupted = True
        raise KeyboardInterrupt

    def raise_if_interrupted() -> None:
        if interrupted:
            raise KeyboardInterrupt

    proc.become_subreaper()  # the parent of the ranks may end before them
    # Not if it is ignored: nohup ignores SIGHUP.
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handled = [n for n in numbers if signal.getsignal(n) != signal.SIG_IGN]
    previous = {number: signal.signal(number, interrupt) for number in handled}
    try:
        yield raise_if_interrupted
        raise_if_interrupted()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def write_run_dir(prepared: PreparedRun, layout: Layout, split: Batch, folder: Path) -> RunDir:
    """Write the files of a run that ranks read to ``folder``, with this layout and batch instead of the plan's."""
    run = RunDir(folder)
    attempt = run.attempt(1)
    for subfolder in (attempt.events, attempt.logs, run.metrics):
        subfolder.mkdir(parents=True)
    plan = msgspec.structs.replace(prepared.plan, layout=layout, batch=split, world_size=layout.world_size)
    fsio.write_text(run.spec, format_spec(prepared.spec))
    fsio.write_json(run.plan, msgspec.to_builtins(plan))
    return run


def build_environment(prepared: PreparedRun, run: RunDir, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment that job.sh and the agent would set: ``environ``, the recipe's, then the plan's."""
    env = {**settings.strip_allocation_env(environ), **prepared.spec.env}
    for name, setting in {**prepared.plan.env, **prepared.plan.nccl}.items():
        env.setdefault(name, setting.value)
    env = python_path.build_environment(prepared.code, env)
    env.update(torchrun.SHUTDOWN_ENV)
    env[settings.RUN_DIR] = env[settings.RANK_DIR] = str(run.path)
    env[settings.ATTEMPT] = "1"
    env[settings.DEVICE] = prepared.plan.device
    # The plan may have chosen an interface between nodes, but all ranks are on this machine.
    interface = find_interface_to(LOOPBACK)
    if interface:
        env["GLOO_SOCKET_IFNAME"] = interface
    return env
