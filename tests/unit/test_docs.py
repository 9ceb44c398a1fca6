"""The documentation: it names every option, its links work, and its snippets run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest
from click.testing import CliRunner

from clustertrain import proc
from clustertrain.cli.jobs import wait
from clustertrain.cli.main import cli
from clustertrain.config.cluster import ClusterProfile
from clustertrain.config.job import JobSpec
from clustertrain.config.parsing import reference
from clustertrain.config.parsing.documents import build
from clustertrain.config.recipe import Recipe
from docs.generate import manual, pages
from tests.cuda_emulation import waits
from tests.cuda_emulation.layouts import CASES
from tests.paths import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SCRIPTS = ROOT / "docs" / "guides" / "training-scripts.md"


@pytest.mark.parametrize("name", pages.PAGES)
def test_reference_page_is_current(name: str) -> None:
    committed = (ROOT / "docs" / "reference" / name).read_text()
    assert committed == pages.PAGES[name](), "run: python -m docs.generate"


def test_help_shows_no_mark_of_its_own_source() -> None:
    assert r"\b" not in pages.PAGES["cli.md"]().split(), "a paragraph mark of click is escaped twice"


@pytest.mark.parametrize("group", ["checkpoint", "cluster", "data", "init", "recipe", "sweep"])
def test_list_of_subcommands_is_not_cut(group: str) -> None:
    listed = CliRunner().invoke(cli, [group, "--help"]).output.splitlines()
    assert listed and not [line for line in listed if line.endswith("...") and "Usage" not in line]


def test_manual_pages_are_current() -> None:
    committed = {path.name: path.read_text() for path in (ROOT / "docs" / "man").iterdir()}
    assert committed == manual.render_pages(), "run: python -m docs.generate"


def test_manual_pages_do_not_depend_on_what_click_has_cached() -> None:
    wait.get_help(click.Context(wait))  # without the context of clustertrain, its only help option is --help
    assert r"\fB\-h\fP, \fB\-\-help\fP" in manual.render_pages()["clustertrain-wait.1"]


@pytest.mark.skipif(shutil.which("groff") is None, reason="needs groff")
def test_manual_pages_have_no_warnings() -> None:
    pages = sorted((ROOT / "docs" / "man").iterdir())
    done = subprocess.run(
        ["groff", "-man", "-k", "-ww", "-Tutf8", "-rCHECKSTYLE=1", *pages], capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    assert r"for example as \x1b" in done.stdout, "backslashes stay"


@pytest.mark.parametrize("struct", [Recipe, JobSpec, ClusterProfile])
def test_every_key_has_a_description(struct: type[msgspec.Struct]) -> None:
    tables = list(reference.collect_tables(struct))
    assert [f"{table.name}.{key.name}" for table in tables for key in table.keys if not key.description] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_links_have_a_target(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
        assert link.startswith("https://") or (page.parent / link).exists(), link


def test_every_page_is_in_the_navigation() -> None:
    def list_pages(entries: list[dict[str, Any]]) -> list[str]:
        values = [value for entry in entries for value in entry.values()]
        return [p for v in values for p in ([v] if isinstance(v, str) else list_pages(v))]

    nav = list_pages(tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["nav"])
    assert len(nav) == len(set(nav))
    assert set(nav) == {str(page.relative_to(ROOT / "docs")) for page in PAGES if page.name != "README.md"}


def test_tests_named_in_training_practice_exist() -> None:
    text = (ROOT / "docs" / "reference" / "training-practice.md").read_text()
    named_tests = re.findall(r"`((?:unit|ranks|slurm|gpu)/[\w/]+\.py)(?:::(\w+))?`", text)
    assert len(named_tests) > 100
    for file, test in named_tests:
        path = ROOT / "tests" / file
        assert path.is_file(), file
        assert not test or f"def {test}(" in path.read_text(), f"{file}::{test}"


def test_waits_for_the_gpu_are_current() -> None:
    """The page names the reasons and the layouts of the tests; its counts come from a run of some minutes."""
    text = waits.PAGE.read_text()
    assert "\n".join(waits.format_reasons()) in text, "run: make cuda-waits"
    layouts = {name for line in text.splitlines() if line.count("|") == 3 for name in line.split("|")[1].split(", ")}
    assert {name.strip() for name in layouts} >= set(CASES), "run: make cuda-waits"


def test_sample_cluster_profile_is_valid() -> None:
    text = (ROOT / "docs" / "guides" / "clusters.md").read_text()
    sample = re.search(r"```toml\n(.*?)```", text, re.DOTALL)
    assert sample is not None and build(tomllib.loads(sample[1]), ClusterProfile, "the sample").measured is not None


def test_every_style_of_a_tp_plan_is_documented() -> None:
    from clustertrain.train.distributed.tensor_parallel import STYLES

    text = SCRIPTS.read_text()
    assert [style for style in STYLES if f"| `{style}` |" not in text] == []


def test_every_insight_is_documented() -> None:
    code = "".join(p.read_text() for p in (ROOT / "clustertrain" / "telemetry" / "insights").glob("*.py"))
    written = set(re.findall(r'(?:code=|Cause\(\s*|(?:CRITICAL|WARNING|INFO),\s*)"([a-z_]+)"', code))
    rows = [line for line in (ROOT / "docs/reference/insights.md").read_text().splitlines() if line.startswith("| `")]
    documented = {name for row in rows for name in re.findall(r"`([a-z_]+)`", row.split("|")[1])}
    assert len(written) > 35 and written <= documented
    assert [name for name in documented if f'"{name}"' not in code] == []


@pytest.mark.long
def test_snippets_of_training_scripts_run(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", SCRIPTS.read_text(), re.DOTALL)
    script = tmp_path / "snippets.py"
    # Call the modules that the snippets only define.
    calls = "words = torch.zeros(2, 3).long()\nx = Text().embed(words)\n"
    calls += "print(loss_fn(Text()(words), words)[1], Attention()(x).shape, Dropped()(x).shape)"
    script.write_text("\n".join([*blocks, calls]))
    environ = {k: v for k, v in os.environ.items() if not k.startswith("CLUSTERTRAIN")}
    environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = proc.run([sys.executable, str(script)], env=environ, timeout_s=120.0)
    assert done.stdout.strip() == "tensor(6) torch.Size([2, 3, 16]) torch.Size([2, 3, 16])"
