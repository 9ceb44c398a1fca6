"""The map from packages to extras, compared with pyproject.toml and with the imports of the package."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest

from clustertrain import extras
from clustertrain.errors import UnsuitableEnvironment
from tests.paths import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# Names on the package index that differ from the names under which they are imported.
DISTRIBUTIONS = {"prometheus_client": "prometheus-client", "PIL": "pillow", "sklearn": "scikit-learn",
                 "pytorch_optimizer": "pytorch-optimizer", "mlflow": "mlflow-skinny"}  # fmt: skip
# Their importers call require. bench_ranks is a process whose parent reports that torch is missing.
BEHIND_A_CHECK = {
    "checkpoint/format/storage.py", "cluster/bench_ranks.py", "telemetry/export/prometheus.py",
    "telemetry/export/table.py", "train/optim/adamw8bit.py", "cli/mcp/answer.py", "cli/mcp/server.py",
}  # fmt: skip
WITH_TORCH = ("train/", "checkpoint/", "diagnose/")


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[<>=\[ ;]", requirement)[0] for requirement in requirements}


def test_each_package_is_in_its_extra_and_not_in_the_base_install() -> None:
    groups = PROJECT["optional-dependencies"]
    for package, extra in extras.EXTRAS.items():
        distribution = DISTRIBUTIONS.get(package, package)
        assert distribution in names(groups[extra]), package
        assert distribution not in names(PROJECT["dependencies"]), package
    assert set(extras.EXTRAS.values()) == set(groups) - {"all", "dev"}
    listed = {name for text in groups["all"] for name in re.split(r"[\[\],]", text)[1:-1]}
    assert listed == set(groups) - {"all", "dev"}


def test_oldest_torch_is_that_of_the_extra() -> None:
    assert PROJECT["optional-dependencies"]["train"] == [f"torch>={'.'.join(map(str, extras.MIN_TORCH))}"]


@pytest.mark.long
def test_imports_of_extras_follow_a_check() -> None:
    for path in (ROOT / "clustertrain").rglob("*.py"):
        name = str(path.relative_to(ROOT / "clustertrain"))
        source = path.read_text()
        expected = set(extras.EXTRAS) - ({"torch"} if name.startswith(WITH_TORCH) else set())
        named = {package for package in expected if package in source}
        packages = named and imported_packages(ast.parse(source)) & named  # few are named: parsing all takes a second
        if name not in BEHIND_A_CHECK:
            for package in packages:
                assert f'extras.require("{package}' in source, f"{name} imports {package}"


def test_collection_of_tests_imports_no_slow_package() -> None:
    """Each takes about a second, in every worker of pytest: tests import it where they use it."""
    slow = {"accelerate", "lightning", "matplotlib", "mcp", "peft", "scipy", "sklearn", "torchao", "transformers"}
    at_start = re.compile(rf"^(from|import) ({'|'.join(sorted(slow))})\b", re.MULTILINE)
    for path in (ROOT / "tests").rglob("test_*.py"):
        if at_start.search(source := path.read_text()):  # an import, or a line of a program in a string
            body = [node for node in ast.parse(source).body if isinstance(node, ast.Import | ast.ImportFrom)]
            assert imported_packages(ast.Module(body, [])) & slow == set(), path


def imported_packages(tree: ast.Module) -> set[str]:
    modules = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules.append(node.module or "")
    return {module.partition(".")[0] for module in modules}


def test_missing_package_names_the_extra_and_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kornia", None)
    with pytest.raises(UnsuitableEnvironment) as caught:
        extras.require("kornia", "data.augment", alternative="remove the table")
    assert str(caught.value) == (
        "data.augment: the package kornia is not installed\n"
        f"  fix: {sys.executable} -m pip install 'clustertrain[augment]', or remove the table"
    )


def test_package_that_cannot_be_imported_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb" / "__init__.py").write_text("import no_such_module_at_all\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(
        UnsuitableEnvironment, match="wandb cannot be imported: No module named 'no_such_module_at_all'"
    ):
        extras.require("wandb", "the tracker wandb")


def test_folder_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "no_such_package_anywhere").mkdir()  # wandb creates a folder of its name
    monkeypatch.syspath_prepend(tmp_path)
    assert extras.is_installed("click") and not extras.is_installed("no_such_package_anywhere")
