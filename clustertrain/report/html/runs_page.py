"""The page of ``clustertrain runs compare --html``: the runs' curves over each other. Opens offline."""

from __future__ import annotations

from pathlib import Path

from clustertrain.report import braille_plot, html
from clustertrain.report.html import page
from clustertrain.report.runs import compare_text
from clustertrain.report.runs.compare import Comparison
from clustertrain.submit import templates


def write(found: Comparison, path: Path) -> int:
    """Write the page, whole or not at all; returns its bytes. Raises as :func:`clustertrain.report.html.write`."""
    return html.replace(path, render(found))


def render(found: Comparison) -> str:
    """The page. Raises ConfigError when the installation is incomplete."""
    from markupsafe import Markup

    folder = templates.folder() / "compare"
    script = page.read(folder / "compare.js")
    scripts = [page.read(page.VENDORED / "uPlot.iife.min.js"), f'"use strict";\n(() => {{\n{script}}})();\n']
    styles = [page.read(page.VENDORED / "uPlot.min.css"), page.read(templates.folder() / "telemetry" / "page.css")]
    environment = page.environment(folder)
    environment.filters["shown"] = _shown
    environment.filters["brief"] = lambda value: "–" if value is None else braille_plot.brief(value)
    environment.filters["said"] = lambda value: compare_text.said(value, "–")
    data = {
        "axis": compare_text.AXES[found.by],
        "runs": [
            {"letter": s.letter, "run": s.run, "curves": {n: {"x": c.x, "y": c.y} for n, c in s.curves.items()}}
            for s in found.runs
        ],
    }
    return environment.get_template("page.html.j2").render(
        c=found,
        verdict=compare_text.verdict(found).plain,
        policy=page.policy(scripts, styles),
        scripts=[Markup(x) for x in scripts],
        styles=[Markup(x) for x in styles],
        data=Markup(page.in_script(data)),
        uplot=page.UPLOT,
        licence=page.read(page.VENDORED / "uPlot.LICENSE"),
    )


def _shown(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.5g}"
