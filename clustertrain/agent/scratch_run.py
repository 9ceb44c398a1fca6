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
from clustertrain.scheduler.sockets import interface_towards
from clustertrain.submit import python_path
from clustertrain.submit.request import Prepared
from clustertrain.submit.transaction import spec_text

HERE = "127.0.0.1"


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """What ends this process ends what it has started first: a closed terminal and a kill leave as Ctrl-C does."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    proc.adopt_orphans()  # the ranks' own parent may be gone before them
    heard = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) != signal.SIG_IGN]  # nohup ignores one
    before = {number: signal.signal(number, stop) for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_folder(prepared: Prepared, layout: Layout, split: Batch, folder: Path) -> RunDir:
    """What a rank reads of a run in ``folder``, with another layout and batch than the plan's."""
    run = RunDir(folder)
    attempt = run.attempt(1)
    for inner in (attempt.events, attempt.logs, run.metrics):
        inner.mkdir(parents=True)
    chosen = msgspec.structs.replace(prepared.plan, layout=layout, batch=split, world_size=layout.world_size)
    fsio.write_text(run.spec, spec_text(prepared.spec))
    fsio.write_json(run.plan, msgspec.to_builtins(chosen))
    return run


def environment(prepared: Prepared, run: RunDir, environ: Mapping[str, str]) -> dict[str, str]:
    """As job.sh and the agent make it: what is set stays, then the recipe's, then what the plan chose."""
    env = {**settings.without_allocation(environ), **prepared.spec.env}
    for name, setting in {**prepared.plan.env, **prepared.plan.nccl}.items():
        env.setdefault(name, setting.value)
    env = python_path.environment_in_place(prepared.code, env)
    env.update(torchrun.SHUTDOWN)
    env[settings.RUN_DIR] = env[settings.RANK_DIR] = str(run.path)
    env[settings.ATTEMPT] = "1"
    env[settings.DEVICE] = prepared.plan.device
    # All ranks are here, whatever interface the plan has found for many nodes.
    interface = interface_towards(HERE)
    if interface:
        env["GLOO_SOCKET_IFNAME"] = interface
    return env
