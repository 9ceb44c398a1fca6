"""A run directory that lasts as long as a question: what ranks on this machine read, for trials and diagnoses."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType

import msgspec

from clustertrain import fsio, proc, settings
from clustertrain.plan.layout import Batch, Layout
from clustertrain.run.run_dir import RunDir
from clustertrain.scheduler import torchrun
from clustertrain.scheduler.sockets import find_interface_to
from clustertrain.submit import python_path
from clustertrain.submit.prepared_run import PreparedRun
from clustertrain.submit.transaction import format_spec

LOOPBACK = "127.0.0.1"


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """What ends this process ends what it has started first: a closed terminal and a kill leave as Ctrl-C does."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    proc.become_subreaper()  # the ranks' own parent may be gone before them
    handled = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) != signal.SIG_IGN]  # nohup ignores one
    previous = {number: signal.signal(number, stop) for number in handled}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def write_run_dir(prepared: PreparedRun, layout: Layout, split: Batch, folder: Path) -> RunDir:
    """What a rank reads of a run in ``folder``, with another layout and batch than the plan's."""
    run = RunDir(folder)
    attempt = run.attempt(1)
    for subfolder in (attempt.events, attempt.logs, run.metrics):
        subfolder.mkdir(parents=True)
    plan = msgspec.structs.replace(prepared.plan, layout=layout, batch=split, world_size=layout.world_size)
    fsio.write_text(run.spec, format_spec(prepared.spec))
    fsio.write_json(run.plan, msgspec.to_builtins(plan))
    return run


def build_environment(prepared: PreparedRun, run: RunDir, environ: Mapping[str, str]) -> dict[str, str]:
    """As job.sh and the agent make it: what is set stays, then the recipe's, then what the plan chose."""
    env = {**settings.strip_allocation_env(environ), **prepared.spec.env}
    for name, setting in {**prepared.plan.env, **prepared.plan.nccl}.items():
        env.setdefault(name, setting.value)
    env = python_path.build_environment(prepared.code, env)
    env.update(torchrun.SHUTDOWN_ENV)
    env[settings.RUN_DIR] = env[settings.RANK_DIR] = str(run.path)
    env[settings.ATTEMPT] = "1"
    env[settings.DEVICE] = prepared.plan.device
    # All ranks are here, whatever interface the plan has found for many nodes.
    interface = find_interface_to(LOOPBACK)
    if interface:
        env["GLOO_SOCKET_IFNAME"] = interface
    return env
