"""``diagnose``: the parts that start no process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from clustertrain.cli.diagnose import diagnose
from clustertrain.diagnose.registry import CHECKS
from clustertrain.errors import ConfigError, UsageError


def test_diagnose_without_arguments_lists_the_checks() -> None:
    done = CliRunner().invoke(diagnose, [])
    assert done.exit_code == 0
    names = [line.split()[0] for line in done.output.splitlines() if not line.startswith("    ")]
    assert names == [*CHECKS, "all"] and max(map(len, done.output.splitlines())) <= 80
    assert json.loads(CliRunner().invoke(diagnose, ["--json"]).output)["checks"] == CHECKS


@pytest.mark.parametrize(
    ("argv", "error", "text"),
    [
        (["gradient", "recipe.toml"], UsageError, "gradients"),
        (["overfit"], UsageError, "RECIPE.toml"),
        (["missing.toml"], UsageError, "missing.toml"),
        (["odd.toml", "overfit"], ConfigError, "not valid TOML"),
        (["fine.toml", "gradient"], UsageError, "gradients"),
        (["train.py"], UsageError, "model.entry"),
        (["overfit", "train.py"], UsageError, "model.entry"),
        (["overfit", "missing.toml"], UsageError, "missing.toml"),
        (["overfit", "odd.toml"], ConfigError, "not valid TOML"),
        (["overfit", "unknown.toml"], ConfigError, "modle"),
        (["overfit", "fine.toml", "--set", "optim.lr=-1"], ConfigError, "lr"),
        (["overfit", "fine.toml", "--set", 'data.path="nowhere"'], ConfigError, "nowhere"),
        (["overfit", "fine.toml", "--plot", "curve.png"], UsageError, ".svg"),
        (["overfit", "fine.toml", "--plot", "no/such/curve.svg"], UsageError, "no such folder: no/such"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_invalid_arguments_and_recipes_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, argv: list[str], error: type[Exception], text: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, content in (("odd", "[model"), ("unknown", "[modle]\n"), ("fine", "")):
        (tmp_path / f"{name}.toml").write_text(content)
    (tmp_path / "train.py").write_text("")
    raised = CliRunner().invoke(diagnose, argv).exception
    assert isinstance(raised, error) and text in str(raised)


def test_unwritable_plot_folder_is_refused_before_the_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)  # root may write anywhere
    raised = CliRunner().invoke(diagnose, ["overfit", "fine.toml", "--plot", "curve.svg"]).exception
    assert isinstance(raised, UsageError) and "is not writable" in str(raised)
