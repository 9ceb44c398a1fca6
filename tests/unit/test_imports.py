"""The modules that commands import. torch takes seconds, and on login nodes it often does not work."""

from __future__ import annotations

import ast
import graphlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import clustertrain
from clustertrain.errors import ConfigError
from clustertrain.submit.preflight import filesystem
from clustertrain.submit.request import SubmitRequest
from clustertrain.submit.transaction import submit
from tests.fakes.slurm.fixture import fake_slurm  # noqa: F401
from tests.paths import ROOT

pytestmark = pytest.mark.long
# Runs the command line, then writes the names of all loaded modules.
_PROGRAM = """
import json, pathlib, sys
report = pathlib.Path(sys.argv.pop(1))
sys.argv[0] = "clustertrain"
from clustertrain.cli.main import main
try:
    code = main()
except SystemExit as e:  # click's own way out of --help and --version
    code = e.code
report.write_text(json.dumps({"code": code or 0, "modules": sorted(sys.modules)}))
"""
_PACKAGE = """
import json, sys
before = set(sys.modules)
import clustertrain
print(json.dumps(sorted(set(sys.modules) - before)))
"""


def _modules(folder: Path, *argv: str) -> set[str]:
    """Return the modules that are loaded when ``clustertrain ARGV`` ends."""
    report = folder / "modules.json"
    command = [sys.executable, "-c", _PROGRAM, str(report), *argv]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder, timeout=120)
    assert report.exists(), done.stderr
    loaded = json.loads(report.read_text())
    assert loaded["code"] == 0, done.stderr
    return set(loaded["modules"])


@pytest.fixture
def submitted(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """The folder of a test in which fake Slurm has accepted a run."""
    request.getfixturevalue("fake_slurm")
    home = Path(os.environ["CLUSTERTRAIN_HOME"])
    if not _on_real_disk(tmp_path):
        pytest.skip(f"{home} is on a filesystem that a submission to Slurm refuses")
    submit(SubmitRequest(target="", cwd=tmp_path, argv=("clustertrain", "submit"), job={"name": "imports"}))
    return tmp_path


def _on_real_disk(folder: Path) -> bool:
    try:
        filesystem.check_folder(folder, "folder", shared=True)
    except ConfigError:
        return False
    return True


@pytest.mark.parametrize(
    "argv", [["--help"], ["--version"], ["submit", "--help"], ["status", "--help"], ["diagnose"]], ids=" ".join
)
def test_help_imports_nothing_heavy(tmp_path: Path, argv: list[str]) -> None:
    heavy = {"torch", "numpy", "rich", "submitit", "jinja2", "pynvml", "psutil", "asyncio"}
    assert not heavy & _modules(tmp_path, *argv)


@pytest.mark.usefixtures("fake_slurm")
def test_dry_run_imports_nothing_for_submission(tmp_path: Path) -> None:
    modules = _modules(tmp_path, "submit", "--backend", "local", "--dry-run", "--gpus", "2")
    assert not {"torch", "numpy", "submitit", "asyncio", "rich", "pynvml"} & modules
    assert "clustertrain.plan.planner" in modules  # the plan was made


def test_plan_and_table_of_predictions_import_no_torch(tmp_path: Path) -> None:
    heavy = {"torch", "numpy", "submitit", "rich", "pynvml"}
    model = ("--set", "model.preset=llama3.1-8b")
    modules = _modules(tmp_path, "plan", "--json", "--nodes", "4", "--gpus", "8", "--gpu-type", "h100", *model)
    assert {
        "clustertrain.plan.search.layouts",
        "clustertrain.plan.explain.search_result",
    } <= modules and not heavy & modules
    (tmp_path / "in.csv").write_text("model,gpu,seq,n_gpus\nLlama-8B,H100,8192,8\n")
    modules = _modules(tmp_path, "plan", "--table", "in.csv", "--output", "out.csv")
    assert "clustertrain.plan.table.predict" in modules and not heavy & modules
    assert "pred_tokens_per_s_per_gpu" in (tmp_path / "out.csv").read_text()


def test_submit_imports_no_torch(submitted: Path) -> None:
    modules = _modules(submitted, "submit", "--name", "again")
    assert "submitit" in modules
    assert not {"torch", "numpy", "rich", "pynvml"} & modules


@pytest.mark.parametrize(
    ("argv", "proof"),
    [
        (["status"], "clustertrain.report.status"),
        (["status", "--json"], "clustertrain.scheduler.run_status"),
        (["list"], "clustertrain.report.status"),
        (["list", "--same-as", "latest"], "clustertrain.run.recipe_hash"),
        (["telemetry"], "clustertrain.telemetry.analysis.summarize"),
        (["top", "--once"], "clustertrain.report.top.state"),
        (["top", "--once", "--json"], "clustertrain.report.top.state"),
        (["checkpoint", "list"], "clustertrain.checkpoint.offline.inspect"),
        (["cluster", "list"], "clustertrain.config.cluster"),
        (["cluster", "detect", "--local", "--dry-run"], "clustertrain.cluster.bench"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_reading_a_run_imports_no_torch(submitted: Path, argv: list[str], proof: str) -> None:
    modules = _modules(submitted, *argv)
    assert proof in modules
    assert not {"torch", "submitit", "jinja2"} & modules


def test_sweep_show_and_compare_import_no_torch(submitted: Path) -> None:
    modules = _modules(submitted, "sweep", "--grid", "train.seed=1,2", "--name", "two")
    assert not {"torch", "numpy", "rich"} & modules
    modules = _modules(submitted, "sweep", "show")
    assert "clustertrain.report.runs.sweep" in modules and not {"torch", "submitit", "tensorboard"} & modules
    runs = sorted(p.name for p in (Path(os.environ["CLUSTERTRAIN_HOME"]) / "runs").glob("two-*"))
    modules = _modules(submitted, "compare", *runs)
    assert "clustertrain.report.braille_plot" in modules and not {"torch", "submitit", "tensorboard"} & modules


def test_package_imports_only_the_standard_library() -> None:
    done = subprocess.run([sys.executable, "-c", _PACKAGE], capture_output=True, text=True, check=True, timeout=60)
    new = json.loads(done.stdout)
    assert "clustertrain" in new
    assert [name for name in new if name.partition(".")[0] not in sys.stdlib_module_names] == ["clustertrain"]


def test_trainer_and_session_import_no_dtensor() -> None:
    """DTensor imports sympy. Torch imports DTensor with the first optimizer; a script without one starts sooner."""
    program = "import sys, clustertrain.train.trainer; sys.exit('torch.distributed.tensor' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_exported_names() -> None:
    names = ["Clipping", "ContrastiveLoss", "Job", "Session", "__version__", "attach", "integrations", "session"]
    assert sorted(clustertrain.__all__) == names
    for name in clustertrain.__all__:
        assert getattr(clustertrain, name)
    with pytest.raises(AttributeError, match="sesion"):
        clustertrain.sesion  # noqa: B018


def test_session_keeps_the_names_that_scripts_use() -> None:
    """User scripts call these. Names may be added to the list but never removed."""
    names = {
        "parallelize", "loader", "accumulate", "autocast", "clip_grad_norm", "mean", "log", "poll", "stop_requested",
        "evaluation", "steps", "__enter__", "__exit__",
    }  # fmt: skip
    assert names <= set(dir(clustertrain.Session))


def test_no_circular_imports() -> None:
    """Imports inside functions count. Those under TYPE_CHECKING do not."""
    paths = {_module_name(path): path for path in (ROOT / "clustertrain").rglob("*.py")}
    graph = {
        name: _imported_modules(ast.parse(path.read_text()), set(paths), package=name.rpartition(".")[0]) - {name}
        for name, path in paths.items()
    }
    graph["clustertrain"] = set()  # its __getattr__ imports the public API on first use
    assert graph["clustertrain.submit.prepare"] >= {"clustertrain.submit.checks", "clustertrain.plan.planner"}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as e:
        pytest.fail(" <- ".join(e.args[1]))


def _module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imported_modules(node: ast.AST, modules: set[str], package: str = "") -> set[str]:
    """Return the ``modules`` that the code in ``node`` imports.

    Only the hooks of ``rank_hooks`` import relatively, within their ``package``: in a rank it has another name.
    """
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names} & modules
    if isinstance(node, ast.ImportFrom):
        assert node.level == 0 or (node.level == 1 and "rank_hooks" in package), "relative import"
        source = ".".join(filter(None, (package if node.level else "", node.module)))
        submodules = {f"{source}.{alias.name}" for alias in node.names}
        is_module_needed = bool(submodules - modules)
        return (submodules | ({source} if is_module_needed else set())) & modules
    if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
        return set().union(*(_imported_modules(child, modules, package) for child in node.orelse))
    return set().union(*(_imported_modules(child, modules, package) for child in ast.iter_child_nodes(node)))
