"""The parts of ``templates/parts``: the modules that pages of ``clustertrain ui`` import, as one script in a page.

A page that is one file cannot import modules. Its script consists of the modules in the order of their imports, in
one scope, so that a name is defined only once in all of them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from clustertrain.submit import templates

VENDORED = Path(__file__).parent / "vendored"
FOLDER = "parts"
# In the order in which each needs the ones before.
CHART_MODULES = ("text.js", "axis.js", "chart.js", "theme.js")
MODULES = (*CHART_MODULES, "tables.js", "packed.js", "curves.js", "timeline.js", "heatmap.js")
STYLES = ("theme.css", "parts.css")

_IMPORT = re.compile(r"^import .*;\n", re.MULTILINE)
_COMMENT = re.compile(r"^ *//.*\n", re.MULTILINE)
_EXPORT = re.compile(r"^export (?=const |function |async function |class )", re.MULTILINE)


def read_text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def read_scripts(modules: Sequence[str], page: Path) -> list[str]:
    """Return uPlot, and ``modules`` with the page's own script ``page`` as one script without imports.

    Raises:
        ConfigError: the installation is incomplete.
    """
    folder = templates.find_template_folder() / FOLDER
    body = "\n".join(_plain(read_text(path)) for path in (*(folder / name for name in modules), page))
    return [read_text(VENDORED / "uPlot.iife.min.js"), f'"use strict";\n(() => {{\n{body}}})();\n']


def read_styles(page: Path) -> list[str]:
    """Return the styles of uPlot, of the parts, and of the page."""
    folder = templates.find_template_folder() / FOLDER
    return [read_text(VENDORED / "uPlot.min.css"), *(read_text(folder / name) for name in STYLES), read_text(page)]


def _plain(module: str) -> str:
    """Return a module without its imports and exports, which are on one line each, and without lines of comments."""
    return _COMMENT.sub("", _EXPORT.sub("", _IMPORT.sub("", module)))
