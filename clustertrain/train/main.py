"""``python -m clustertrain train [SCRIPT ARGS…]``: one rank, started by torchrun.

Runs the script named on the command line or in spec.toml, otherwise the built-in trainer. Output goes to the rank's
log, and the rank always leaves a result record.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from clustertrain import fsio, proc, settings
from clustertrain.errors import EXIT_FAILED, EXIT_STOPPED, EXIT_SUCCESS, ClusterTrainError, ConfigError
from clustertrain.run.run_dir import RunDir, open_run
from clustertrain.run.run_spec import load_spec


def redirect_output(log: Path) -> None:
    """Redirect file descriptors 1 and 2 to the end of ``log``, including output of C libraries and child processes."""
    fsio.make_folder(log.parent)
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o640)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(line_buffering=True)


def set_cpu_affinity(cpus: str, local_rank: int) -> None:
    """Pin this process to the CPUs near its GPU, before torch starts threads, which inherit the affinity.

    ``cpus`` has one list per local rank: ``0,1;2,3``. If it is invalid or the kernel refuses, nothing changes.
    """
    with contextlib.suppress(OSError, ValueError, IndexError):
        os.sched_setaffinity(0, [int(n) for n in cpus.split(";")[local_rank].split(",")])


def _run_script(script: Path, args: Sequence[str]) -> None:
    """Run ``script`` as ``python script args…`` would."""
    if not script.is_file():
        raise ConfigError(f"{script}: no such script")
    sys.argv = [str(script), *args]
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")


def _run_training(run: RunDir | None, args: Sequence[str]) -> None:
    if args:
        _run_script(Path(args[0]).absolute(), args[1:])
        return
    if run is None:
        raise ConfigError(
            f"{settings.RUN_DIR} is not set", fix="name a script, or start the run with clustertrain submit"
        )
    spec = load_spec(run)
    if spec.script is not None:
        if Path(spec.script.cwd).is_dir():
            os.chdir(spec.script.cwd)  # paths in the arguments are relative to the folder where submit ran
        _run_script(run.code / spec.script.path, spec.script.args)
        return
    from clustertrain.train import trainer
    from clustertrain.train.core.context import load_plan

    trainer.train(spec.recipe, load_plan(run)[1])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the rank and return its exit code: 0 (completed or stopped), 1 (failed), 78 (a retry would fail as well)."""
    args = list(sys.argv[1:] if argv is None else argv)
    if args[:1] == ["train"]:
        args = args[1:]
    return run_as_rank(lambda run: _run_training(run, args))


def run_as_rank(target: Callable[[RunDir | None], None]) -> int:
    """Call ``target`` with the environment's run, write the rank's log and result record, and return the exit code."""
    launcher_pid = os.environ.pop(settings.LAUNCHER_PID, None)
    if launcher_pid is not None:
        proc.set_parent_death_signal(int(launcher_pid))
    folder = os.environ.get(settings.RUN_DIR)
    run = RunDir(Path(folder)) if folder else None
    if run is not None:
        attempt = run.attempt(int(os.environ.get(settings.ATTEMPT, "1")))
        redirect_output(attempt.rank_log(int(os.environ.get("RANK", "0"))))
    faulthandler.enable()
    if settings.RANK_CPUS in os.environ:
        set_cpu_affinity(os.environ[settings.RANK_CPUS], int(os.environ.get("LOCAL_RANK", "0")))
    # Imported after the redirection, so that what the import of torch prints goes to the log. Garbage collections
    # during the import find nothing and take a tenth of its time; later ones need not visit the objects it created.
    gc.disable()
    from clustertrain.train.core import result

    gc.freeze()
    gc.enable()
    result.current().defer_completion()
    try:
        return _run_and_record(run, target)
    finally:
        # Garbage collection takes a third of the exit's time, about one CPU second, for objects that die with the
        # process. After a warning signal, that second is part of the grace time.
        gc.freeze()


def _run_and_record(run: RunDir | None, target: Callable[[RunDir | None], None]) -> int:
    """Call ``target``, record how it ended, and return the exit code."""
    from clustertrain.train.core import result

    try:
        if run is not None:
            open_run(run.path)
        target(run)
    except SystemExit as e:
        if not e.code or result.current().ending == "stopped":
            return _record_success()
        if e.code == EXIT_STOPPED:
            result.current().reason = f"the script ended with exit code {EXIT_STOPPED}, which requests another attempt"
            result.current().record_stopped()
            return EXIT_SUCCESS  # torchrun treats any other code as a failure
        print(e.code if isinstance(e.code, str) else f"the script ended with exit code {e.code}", file=sys.stderr)
        return result.current().record_failure(e)
    except BaseException as e:  # process boundary: every failure must be recorded before the rank exits
        sys.excepthook(type(e), e, e.__traceback__)
        if isinstance(e, ClusterTrainError):
            print(f"clustertrain: {e}", file=sys.stderr)
        return result.current().record_failure(e)
    return _record_success()


def _record_success() -> int:
    from clustertrain.train.core import result

    if result.current().ending in (None, "completed"):  # None: the script opened no session
        result.current().record_completed()
    return EXIT_SUCCESS if result.current().ending != "failed" else EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main())
