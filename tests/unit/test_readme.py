"""The README: short, with links that resolve, a diff of two examples, and numbers and cells equal to their sources."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clustertrain.cli.main import COMMANDS, main
from tests.paths import ROOT

README = (ROOT / "README.md").read_text()
REPOSITORY = "https://github.com/clustertrain/clustertrain/"
PICTURES = "https://raw.githubusercontent.com/clustertrain/clustertrain/main/"
MOST_WORDS = 900
MARKS = {"✓": "yes", "◐": "partly", "–": "no"}


def strip_code(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)


def list_links() -> list[str]:
    return re.findall(r'(?:\]\(|src="|srcset=")([^)"\s]+)', README)


def list_anchors(markdown: str) -> set[str]:
    """Return the anchors of GitHub and of the site for all headings."""
    headings = re.findall(r"^#+ (.*)$", strip_code(markdown), re.MULTILINE)
    words = [re.sub(r"[^\w\- ]", "", re.sub(r"\[(.*?)\]\(.*?\)", r"\1", heading).lower()) for heading in headings]
    return {heading.strip().replace(" ", "-") for heading in words}


def read_result(name: str) -> Any:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


def test_is_short() -> None:
    text = re.sub(r"<(picture|source|img)[^>]*>|\]\([^)]*\)|[-|]{2,}", " ", strip_code(README))
    words = [word for word in text.split() if re.search(r"\w", word)]
    assert len(words) <= MOST_WORDS


def test_links_are_absolute_and_resolve() -> None:
    links = list_links()
    assert len(links) > 40
    for link in links:
        target, _, anchor = link.partition("#")
        assert not target or target.startswith("https://"), f"{link}: PyPI resolves no relative link"
        path = target.removeprefix(f"{REPOSITORY}blob/main/").removeprefix(PICTURES)
        path = path.replace(f"{REPOSITORY}actions/", ".github/").removesuffix("/badge.svg")
        if not target.startswith((REPOSITORY, PICTURES)) and target:
            continue
        file = ROOT / (path if target else "README.md")
        assert file.is_file(), link
        assert not anchor or anchor in list_anchors(file.read_text()), link


def test_pictures_of_both_schemes_exist() -> None:
    dark = re.findall(r'prefers-color-scheme: dark\)" srcset="([^"]*)"', README)
    assert len(dark) == 2
    assert all(link in list_links() for link in [url.replace("-dark.", "-light.") for url in dark])
    assert all((ROOT / url.removeprefix(PICTURES)).stat().st_size < 1_000_000 for url in dark if url.endswith(".gif"))


def test_commands_exist() -> None:
    named = set(re.findall(r"(?:^\$ |^|`)clustertrain ([a-z]+)", README, re.MULTILINE))
    assert named >= {"demo", "submit", "plan", "status"}
    assert named <= set(COMMANDS) | {"submits"}


def test_diff_leads_from_one_example_to_the_other() -> None:
    diff = re.search(r"```diff\n(.*?)```", README, re.DOTALL)
    assert diff is not None
    lines = diff[1].splitlines()
    for sign, name in (("-", "ddp_script.py"), ("+", "ddp_session_script.py")):
        hunk = [line[1:] for line in lines if line[0] in (sign, " ")]
        assert "\n".join(hunk) in (ROOT / "examples" / name).read_text(), name


def test_output_of_plan_is_current(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = re.search(r"\$ cat llama.toml\n(.*?)\$ clustertrain (plan .*?)\n(.*?)```", README, re.DOTALL)
    assert found is not None
    recipe, command, output = found.groups()
    (tmp_path / "llama.toml").write_text(recipe)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("CLUSTERTRAIN_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(sys, "argv", ["clustertrain", *command.split()])
    assert main() == 0
    assert capsys.readouterr().out.splitlines()[0] == output.strip()


def count_interruptions(system: str) -> tuple[int, int, int, int]:
    rows = [row for row in read_result("interruptions") if row["system"] == system]
    wrong, by_hand = sum(bool(row["wrong_losses"]) for row in rows), sum(row["needed_hand"] for row in rows)
    return len(rows), len({row["program"] for row in rows}), wrong, by_hand


def count_cells(name: str) -> tuple[int, int]:
    rows = read_result(name)["rows"]
    return sum(row["ok"] for row in rows), len(rows)


def find_stall(base: str) -> str:
    for row in read_result("checkpoint")["rows"]:
        if (row["mib"], row["ranks"], row["what"]) == (4096, 2, "stall of a later save"):
            for who in ("ours", "base"):
                if row[who] == base:
                    return f"{row[f'{who}_s']['median']:.2f} s"
    raise KeyError(base)


def format_planner() -> str:
    error = read_result("planner")["result"]["judging"]["throughput"]
    return f"median error of {error['median']:.1%} on {error['rows']} published"


def format_memory() -> str:
    rows = (ROOT / "docs" / "explanation" / "planner.md").read_text()
    found = re.findall(r"\| (used|held out) \| (\d+) \| ([\d.]+%) \|", rows)
    assert {error for _, _, error in found} == {"0.1%"}
    return f"median error of 0.1% against torch's memory tracker in {sum(int(n) for _, n, _ in found)} jobs"


@pytest.mark.parametrize(
    "write",
    [
        lambda: "{0} interruptions of six programs, {2} wrong resumes, {3} that".format(
            *count_interruptions("clustertrain")
        ),
        lambda: "{3} of\n  {0} needed one".format(*count_interruptions("alone")),
        lambda: "{} of {} combinations".format(*count_cells("parity")),
        lambda: "{} of {} pairs of layouts".format(*count_cells("reshape")),
        format_planner,
        format_memory,
        lambda: f"two ranks for {find_stall('clustertrain')}; `dcp.async_save` for {find_stall('dcp.async_save')}",
        lambda: f"or {find_stall('dcp.async_save, stager kept')} if",
        lambda: f"costs {read_result('telemetry')['overhead']['cpu_s_per_wall_s']:.2%} of a core",
        lambda: f"1,024 GPUs, synthetic, in {read_result('telemetry')['report']['week']['wall_s']['median']:.2f} s",
    ],
)
def test_numbers_are_those_of_the_results(write: Callable[[], str]) -> None:
    assert write() in README


def test_programs_are_counted_in_words() -> None:
    assert (count_interruptions("clustertrain")[1], count_interruptions("alone")[1]) == (6, 5)  # "six", "Five of them"


def list_rows(markdown: str) -> list[list[str]]:
    rows = [line.strip("|").split("|") for line in markdown.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows]


def test_cells_of_the_comparison_are_those_of_its_sources() -> None:
    table = list_rows(README.partition("## Comparison")[2].partition("\n## ")[0])
    tools, rows = table[0][1:], table[2:]
    page = (ROOT / "docs" / "explanation" / "comparison.md").read_text()
    assert len(rows) == 9
    for title, *cells in rows:
        section = page.partition(f"\n## {title[0].upper()}{title[1:]}\n")[2].partition("\n## ")[0]
        # One row of the page may hold several tools, separated by commas.
        sourced = {name: row[1] for row in list_rows(section)[2:] for name in row[0].split(", ")}
        assert {tool: MARKS[cell] for tool, cell in zip(tools, cells, strict=True)} == sourced, title
