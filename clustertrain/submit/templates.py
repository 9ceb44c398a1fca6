"""Finds and fills the templates: in a wheel they lie in the package, in a checkout beside it."""

from __future__ import annotations

import functools
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clustertrain.errors import ConfigError

if TYPE_CHECKING:
    import jinja2


def find_template_folder() -> Path:
    """Raises ConfigError when the installation is incomplete."""
    package = Path(__file__).resolve().parents[1]
    for candidate in (package / "templates", package.parent / "templates"):
        if (candidate / "job.sh.j2").is_file():
            return candidate
    raise ConfigError(f"the templates are missing beside {package}", fix="install clustertrain again")


def quote_directive(value: str) -> str:
    """``value`` quoted for an ``#SBATCH`` line.

    sbatch's own parser, not a shell, reads these lines: a backslash escapes the next character everywhere, also inside
    quotes of either kind, and a bare ``#`` starts a comment. Control characters are refused before (a line ends there).
    """
    if value and all(c.isalnum() or c in "-_./:,=@%+[]~*&|()<>!^?" for c in value) and value.isascii():
        return value
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


def read_template(name: str) -> str:
    """A file that has nothing to fill in."""
    return (find_template_folder() / name).read_text()


def render_template(name: str, values: dict[str, Any]) -> str:
    return _build_environment().get_template(name).render(values)


@functools.cache  # it keeps the compiled templates: compiling one takes longer than filling it for each run of a sweep
def _build_environment() -> jinja2.Environment:
    # Not at the top: importing jinja2 takes longer than everything else that a submission needs.
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(find_template_folder()),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # a shell script, not HTML: every value passes through `sh` or `quote_directive`
    )
    environment.filters["sh"] = shlex.quote
    environment.filters["directive"] = quote_directive
    return environment
