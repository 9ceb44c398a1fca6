"""The hooks in a program's Python: what they import, what they leave alone, and what happens when one fails."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from clustertrain.rank_hooks.clustertrain_hooks.guard import guarded
from tests.paths import ROOT

HOOKS = ROOT / "clustertrain" / "rank_hooks"


def run_python(
    program: str, folder: Path, *, in_run: bool = True, python_path: tuple[Path, ...] = ()
) -> subprocess.CompletedProcess[str]:
    """Run a program with the hooks on its path."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("CLUSTERTRAIN_", "PYTHON"))}
    env["PYTHONPATH"] = os.pathsep.join(map(str, (HOOKS, *python_path)))
    if in_run:
        env |= {"RANK": "0", "WORLD_SIZE": "1", "CLUSTERTRAIN_ATTEMPT": "1"}
        env |= {"CLUSTERTRAIN_RUN_DIR": str(folder), "CLUSTERTRAIN_RANK_DIR": str(folder)}
    return subprocess.run(
        [sys.executable, "-c", program], env=env, cwd=folder, text=True, capture_output=True, check=True, timeout=120
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


def test_framework_without_the_hooked_function_is_named_once(tmp_path: Path) -> None:
    package = tmp_path / "transformers"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "trainer.py").write_text("class Trainer: pass")
    done = run_python("import transformers.trainer; print('goes on')", tmp_path, python_path=(tmp_path,))
    assert done.stdout == "goes on\n"
    assert done.stderr.count("clustertrain: hook") == 1
    assert "AttributeError" in done.stderr
    assert "Traceback" not in done.stderr


def test_failing_hook_is_called_once(capsys: pytest.CaptureFixture[str]) -> None:
    calls = []

    @guarded
    def fail() -> None:
        calls.append(1)
        raise KeyError("step")

    assert fail() is fail() is None
    assert calls == [1]
    assert capsys.readouterr().err.count("KeyError: 'step'") == 1


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
