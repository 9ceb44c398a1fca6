"""The parts of ``templates/parts``, as modules and as one script."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from clustertrain.report.html import parts

ROOT = Path(parts.__file__).parents[3]
FOLDER = ROOT / "templates" / parts.FOLDER
PAGE = ROOT / "templates" / "telemetry" / "page.js"
COMPARE = ROOT / "templates" / "compare" / "compare.js"
PAGES = [(PAGE, parts.MODULES), (COMPARE, parts.CHART_MODULES)]
TOP_LEVEL = re.compile(r"^(?:export )?(?:async )?(?:const|let|function|class) ([\w$]+)", re.MULTILINE)


def test_every_module_and_style_is_in_a_list() -> None:
    assert {p.name for p in FOLDER.iterdir()} == {*parts.MODULES, *parts.STYLES}


@pytest.mark.parametrize(("page", "used"), PAGES, ids=["report", "compare"])
def test_names_are_unique_in_the_one_scope_of_a_page(page: Path, used: Sequence[str]) -> None:
    modules = [*(FOLDER / name for name in used), page]
    names = Counter(name for path in modules for name in TOP_LEVEL.findall(path.read_text()))
    assert len(names) > 30 and [name for name, count in names.items() if count > 1] == []


@pytest.mark.parametrize(("page", "used"), PAGES, ids=["report", "compare"])
def test_one_script_has_neither_imports_nor_exports(page: Path, used: Sequence[str]) -> None:
    _, script = parts.read_scripts(used, page)
    assert not re.search(r"^\s*(?:import|export)\b", script, re.MULTILINE)


@pytest.mark.parametrize("path", [*sorted(FOLDER.glob("*.js")), PAGE, COMPARE], ids=lambda p: p.name)
def test_a_module_imports_only_what_an_earlier_one_exports(path: Path) -> None:
    order = [*(parts.CHART_MODULES if path == COMPARE else parts.MODULES), path.name]
    for names, source in re.findall(r'^import \{ (.*) \} from "\./(.*)";$', path.read_text(), re.MULTILINE):
        assert order.index(source) < order.index(path.name), f"{path.name} comes before {source}"
        exported = re.findall(r"^export (?:async )?(?:const|function|class) (\w+)", (FOLDER / source).read_text(), re.M)
        assert set(names.split(", ")) <= set(exported)
    assert len(re.findall("^import", path.read_text(), re.M)) == len(
        re.findall(r"^import .*;$", path.read_text(), re.M)
    )
