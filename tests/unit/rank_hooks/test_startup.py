"""The hooks in a program's Python: what they import, what they leave alone, and what happens when one fails."""

from __future__ import annotations

import ast
import functools
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from clustertrain.rank_hooks.clustertrain_hooks.guard import guarded
from tests.paths import ROOT

HOOKS = ROOT / "clustertrain" / "rank_hooks"


def run_python(
    program: str, folder: Path, *, in_run: bool = True, python_path: tuple[Path, ...] = (), check: bool = True
) -> subprocess.CompletedProcess[str]:
    """Run a program with the hooks on its path."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("CLUSTERTRAIN_", "PYTHON"))}
    env["PYTHONPATH"] = os.pathsep.join(map(str, (HOOKS, *python_path)))
    if in_run:
        env |= {"RANK": "0", "WORLD_SIZE": "1", "CLUSTERTRAIN_ATTEMPT": "1"}
        env |= {"CLUSTERTRAIN_RUN_DIR": str(folder), "CLUSTERTRAIN_RANK_DIR": str(folder)}
    return subprocess.run(
        [sys.executable, "-c", program], env=env, cwd=folder, text=True, capture_output=True, check=check, timeout=120
    )


@pytest.mark.parametrize("path", sorted(HOOKS.rglob("*.py")), ids=lambda path: path.name)
def test_hooks_need_python_3_9_and_the_standard_library_only(path: Path) -> None:
    tree = ast.parse(path.read_text(), feature_version=(3, 9))
    imported = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    imported += [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and not node.level]
    packages = {name.partition(".")[0] for name in imported} - {"clustertrain_hooks"}
    assert packages <= sys.stdlib_module_names


def test_startup_imports_little(tmp_path: Path) -> None:
    """Every Python process of a rank starts with the hooks, so they leave slow modules to those that need them."""
    program = "import json, sys; print(json.dumps(sorted(sys.modules)))"
    bare = subprocess.run([sys.executable, "-c", program], text=True, capture_output=True, check=True)
    loaded = set(json.loads(run_python(program, tmp_path).stdout)) - set(json.loads(bare.stdout))
    assert "clustertrain_hooks.on_import" in loaded
    assert not loaded & {"typing", "traceback", "pathlib", "mmap", "threading", "clustertrain", "torch"}


@pytest.mark.parametrize("in_run", [True, False])
def test_own_sitecustomize_still_runs(tmp_path: Path, in_run: bool) -> None:
    (tmp_path / "sitecustomize.py").write_text("import builtins; builtins.customized = __name__, __file__")
    done = run_python("print(*customized)", tmp_path, in_run=in_run, python_path=(tmp_path,))
    assert done.stdout.split() == ["sitecustomize", str(tmp_path / "sitecustomize.py")]
    assert not done.stderr


def test_module_is_hooked_after_its_import_and_keeps_its_loader(tmp_path: Path) -> None:
    package = tmp_path / "torch" / "optim"
    package.mkdir(parents=True)
    (tmp_path / "torch" / "__init__.py").touch()
    (package / "__init__.py").touch()
    (package / "optimizer.py").write_text(
        "hooks = []\ndef register_optimizer_step_post_hook(hook): hooks.append(hook)\n"
    )
    program = "import torch.optim.optimizer as o; print(len(o.hooks), o.__spec__.loader.name, o.__file__)"
    done = run_python(program, tmp_path, python_path=(tmp_path,))
    assert done.stdout.split() == ["1", "torch.optim.optimizer", str(package / "optimizer.py")]


def test_module_is_hooked_at_the_import_that_succeeds(tmp_path: Path) -> None:
    """A program may catch an ImportError, set something and import again."""
    package = tmp_path / "torch" / "optim"
    package.mkdir(parents=True)
    (tmp_path / "torch" / "__init__.py").touch()
    (package / "__init__.py").touch()
    (package / "optimizer.py").write_text(
        "import builtins\n"
        "if not getattr(builtins, 'ready', False): raise ImportError\n"
        "hooks = []\ndef register_optimizer_step_post_hook(hook): hooks.append(hook)\n"
    )
    program = (
        "import builtins\n"
        "try: import torch.optim.optimizer\n"
        "except ImportError: builtins.ready = True\n"
        "import torch.optim.optimizer as o\nprint(len(o.hooks))"
    )
    assert run_python(program, tmp_path, python_path=(tmp_path,)).stdout.split() == ["1"]


def write_transformers(folder: Path, trainer: str) -> None:
    """Write a package that stands for another version of transformers."""
    (folder / "transformers").mkdir()
    (folder / "transformers" / "__init__.py").write_text("__version__ = '9.8.7'")
    (folder / "transformers" / "trainer.py").write_text(trainer)


HANDLER = """
import os, signal
signal.signal(signal.SIGTERM, lambda *_: print("handled"))
os.kill(os.getpid(), signal.SIGTERM)
"""


def test_framework_without_the_hooked_function_is_named_once(tmp_path: Path) -> None:
    write_transformers(tmp_path, "class Trainer: pass")
    done = run_python("import transformers.trainer" + HANDLER, tmp_path, python_path=(tmp_path,))
    assert done.stdout == "handled\n"
    assert re.fullmatch(
        r"clustertrain: the hooks for transformers 9\.8\.7 do not work \(AttributeError: module 'transformers.trainer' "
        r"has no attribute 'TrainerCallback', transformers_trainer\.py, line \d+\): the Trainer neither stops at an "
        r"agreed step nor resumes by itself; signals still work\n",
        done.stderr,
    )


# Its state has no global_step after a step.
TRAINER = """
import os, signal, types
class TrainerCallback: pass
class Trainer:
    def __init__(self):
        self.callbacks = self.callback_handler = types.SimpleNamespace(callbacks=[])
    def add_callback(self, callback):
        self.callbacks.callbacks.append(callback)
    def train(self, resume_from_checkpoint=None):
        state, control = types.SimpleNamespace(global_step=0), types.SimpleNamespace(should_evaluate=0, should_save=0)
        for callback in self.callbacks.callbacks:
            callback.on_train_begin(None, state, control)
        offer = os.path.join(os.environ["CLUSTERTRAIN_RANK_DIR"], "stops-0.json")
        print(os.path.exists(offer), flush=True)
        if BEFORE:
            os.kill(os.getpid(), signal.SIGTERM)
        del state.global_step
        for _ in range(2):
            for callback in self.callbacks.callbacks:
                callback.on_step_end(None, state, control)
        print(os.path.exists(offer), flush=True)
        os.kill(os.getpid(), signal.SIGTERM)
"""


@pytest.mark.parametrize("before", [True, False], ids=["signal before the failure", "signal after it"])
def test_hook_that_fails_during_a_training_leaves_the_stop_to_the_signal(tmp_path: Path, before: bool) -> None:
    """The rank had offered to stop at a step, and ignored the scheduler's SIGTERM until then."""
    write_transformers(tmp_path, TRAINER.replace("BEFORE", str(before)))
    (tmp_path / "attempts" / "1" / "events").mkdir(parents=True)
    program = "import transformers.trainer as t; t.Trainer().train(); print('not stopped')"
    done = run_python(program, tmp_path, python_path=(tmp_path,), check=False)
    assert done.returncode == -signal.SIGTERM, done.stderr
    assert done.stdout.split() == (["True"] if before else ["True", "False"])
    assert done.stderr.count("the hooks for transformers 9.8.7 do not work") == 1
    assert not (tmp_path / "stops-0.json").exists()


def test_failing_hook_is_called_once(capsys: pytest.CaptureFixture[str]) -> None:
    calls, failures = [], []

    @functools.partial(guarded, on_failure=failures.append)
    def fail(number: int) -> None:
        calls.append(number)
        raise KeyError("step")

    assert fail(1) is fail(2) is None
    assert (calls, failures) == ([1], [1])
    printed = capsys.readouterr().err
    assert printed.count("hook fail does not work (KeyError: 'step'") == 1
    assert "the program continues; signals still work" in printed


def test_interrupt_of_a_hook_is_the_programs(capsys: pytest.CaptureFixture[str]) -> None:
    @guarded
    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupt()


TERMINATED = """
import multiprocessing, os, signal, subprocess, sys, time
os.kill(os.getpid(), signal.SIGTERM)
context = multiprocessing.get_context("fork")
ready = context.Event()
forked = context.Process(target=lambda: (ready.set(), time.sleep(60)))
forked.start()
ready.wait()
forked.terminate()
forked.join()
started = subprocess.Popen([sys.executable, "-c", "print(1, flush=True); import time; time.sleep(60)"], stdout=-1)
started.stdout.read(1)
started.terminate()
print("alive", forked.exitcode, started.wait())
"""


@pytest.mark.long
@pytest.mark.parametrize("stop_signal", ["USR1", "none"])
def test_program_with_another_stop_signal_survives_sigterm_and_can_end_its_children(
    tmp_path: Path, stop_signal: str
) -> None:
    (tmp_path / "program.py").write_text(TERMINATED)
    env = {**os.environ, "PYTHONPATH": str(HOOKS), "RANK": "0", "WORLD_SIZE": "1", "CLUSTERTRAIN_ATTEMPT": "1"}
    env |= {"CLUSTERTRAIN_RUN_DIR": str(tmp_path), "CLUSTERTRAIN_RANK_DIR": str(tmp_path)}
    (tmp_path / "run.sh").write_text(f"#!/bin/bash\n{sys.executable} program.py\necho\n")
    (tmp_path / "run.sh").chmod(0o755)
    for command in ([sys.executable, "program.py"], ["./run.sh"]):
        for name, alive in ((stop_signal, True), ("TERM", False)):
            done = subprocess.run(
                command, env={**env, "CLUSTERTRAIN_STOP_SIGNAL": name}, cwd=tmp_path, text=True, check=False,
                stdout=subprocess.PIPE, start_new_session=True, timeout=60,
            )  # fmt: skip
            assert done.stdout.strip() == ("alive -15 -15" if alive else "")
