"""Find and render the templates: a wheel has them in the package, a checkout next to it."""

from __future__ import annotations

import functools
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clustertrain.errors import ConfigError

if TYPE_CHECKING:
    import jinja2


def find_template_folder() -> Path:
    """Return the folder of the templates. Raise ConfigError if the installation is incomplete."""
    package = Path(__file__).resolve().parents[1]
    for candidate in (package / "templates", package.parent / "templates"):
        if (candidate / "job.sh.j2").is_file():
            return candidate
    raise ConfigError(f"the templates are missing next to {package}", fix="reinstall clustertrain")


def quote_directive(value: str) -> str:
    """Return ``value`` quoted for an ``#SBATCH`` line.

    sbatch parses these lines itself: a backslash escapes the next character even within quotes of either kind, and an
    unquoted ``#`` starts a comment. Control characters such as line breaks have been refused before.
    """
    if value and all(c.isalnum() or c in "-_./:,=@%+[]~*&|()<>!^?" for c in value) and value.isascii():
        return value
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


def read_template(name: str) -> str:
    """Return the text of a template without placeholders."""
    return (find_template_folder() / name).read_text()


def render_template(name: str, values: dict[str, Any]) -> str:
    return _build_environment().get_template(name).render(values)


@functools.cache  # keeps compiled templates: compiling one takes longer than rendering it for every run of a sweep
def _build_environment() -> jinja2.Environment:
    # Not at the top: importing jinja2 takes longer than all other imports of a submission.
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
