"""The page of ``clustertrain compare --html``: the curves of several runs in shared charts. Opens offline."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from clustertrain.report import braille_plot, html
from clustertrain.report.html import page, parts
from clustertrain.report.runs import compare_text
from clustertrain.report.runs.compare import RunsComparison
from clustertrain.submit import templates


def write(comparison: RunsComparison, path: Path) -> int:
    """Write the page atomically and return its size in bytes; raise as :func:`clustertrain.report.html.write`."""
    return html.write_page(path, render(comparison))


def render(comparison: RunsComparison) -> str:
    """Return the page as HTML.

    Raises:
        ConfigError: the installation is incomplete.
    """
    from markupsafe import Markup

    template_dir = templates.find_template_folder() / "compare"
    scripts = parts.read_scripts(parts.CHART_MODULES, template_dir / "compare.js")
    styles = parts.read_styles(templates.find_template_folder() / "telemetry" / "page.css")
    environment = page.make_environment(template_dir)
    environment.filters.update(FILTERS)
    data = page_data(comparison)
    return environment.get_template("page.html.j2").render(
        c=comparison,
        verdict=compare_text.verdict(comparison).plain,
        policy=page.content_security_policy(scripts, styles),
        scripts=[Markup(x) for x in scripts],
        styles=[Markup(x) for x in styles],
        data=Markup(page.to_script_json(data)),
        uplot=page.UPLOT,
        licence=parts.read_text(page.VENDORED / "uPlot.LICENSE"),
    )


def page_data(comparison: RunsComparison) -> dict[str, Any]:
    """Return what ``compare.js`` draws."""
    return {
        "axis": compare_text.AXIS_LABELS[comparison.by],
        "runs": [
            {"letter": s.letter, "run": s.run, "curves": {n: {"x": c.x, "y": c.y} for n, c in s.curves.items()}}
            for s in comparison.runs
        ],
    }


def _format_value(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.5g}"


# Of ``compared.html.j2``.
FILTERS: Mapping[str, Callable[..., str]] = {
    "number": _format_value,
    "compact": lambda value: "–" if value is None else braille_plot.format_compact(value),
    "setting": lambda value: compare_text.format_setting(value, "–"),
}
