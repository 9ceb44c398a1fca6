"""Render ``templates/telemetry/page.html.j2``.

Content from the run can never become markup or script: Jinja escapes it, the page's script inserts it as text, and a
Content-Security-Policy allows no other script and no request.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

import clustertrain
from clustertrain import clock
from clustertrain.report.gpu_table import find_severities
from clustertrain.report.html import charts, facts, gpu_cells, notes, parts
from clustertrain.report.html.context import PageContext
from clustertrain.report.html.pack import Packer
from clustertrain.submit import templates
from clustertrain.telemetry.analysis.curves import Curves
from clustertrain.telemetry.report_schema import AttemptSummary, Summary

if TYPE_CHECKING:
    import jinja2

UPLOT = "1.6.32"
VENDORED = parts.VENDORED


# A chip with one bad core; the colors are legible on light and dark tabs.
_ICON = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 16 16"><rect x="1" y="1" width="14" height="14" rx="3" \
fill="#0b7285"/><path d="M4 4h3v3H4zM9 4h3v3H9zM4 9h3v3H4z" fill="#fff"/><path d="M9 9h3v3H9z" fill="#ffb454"/></svg>"""


def render(summary: Summary, curves: Curves, context: PageContext | None = None) -> str:
    """Return the page as HTML; without ``context``, it has only telemetry.

    Raises:
        ConfigError: the installation is incomplete.
    """
    from markupsafe import Markup

    template_dir = templates.find_template_folder() / "telemetry"
    scripts = parts.read_scripts(parts.MODULES, template_dir / "page.js")
    styles = parts.read_styles(template_dir / "page.css")
    marks, marks_left_out = charts.lane_events(summary)
    packer = Packer()
    phases, phases_left_out = charts.phase_spans(summary)
    data = page_data(summary, curves, marks, packer) | {"phases": phases}
    has_curves = bool(data["charts"])
    template_env = make_environment(template_dir)
    template_env.filters.update(facts.FILTERS)
    return template_env.get_template("page.html.j2").render(
        s=summary,
        curves=curves,
        facts=facts.build_summary(summary),
        notes=notes.build_notes(summary),
        table=gpu_cells.build_table(summary),
        context=context,
        history={a.n: a for a in context.history} if context is not None else {},
        contents=_contents(summary, context, has_curves),
        marks=marks,
        marks_left_out=marks_left_out,
        phases_left_out=phases_left_out,
        has_curves=has_curves,
        policy=content_security_policy(scripts, styles),
        scripts=[Markup(x) for x in scripts],
        styles=[Markup(x) for x in styles],
        data=Markup(to_script_json(data)),
        blob=packer.encode(),
        icon=Markup(f"data:image/svg+xml;base64,{base64.b64encode(_ICON.encode()).decode()}"),
        made_at=clock.now(),
        version=clustertrain.__version__,
        page_command=f"clustertrain telemetry {shlex.quote(summary.run)} --html report.html",
        uplot=UPLOT,
        licence=parts.read_text(VENDORED / "uPlot.LICENSE"),
    )


def _contents(summary: Summary, context: PageContext | None, has_curves: bool) -> list[tuple[str, str]]:
    """Return (id, title) of the sections that the page has, in order."""
    sections = [
        ("insights", "Insights", summary.insights),
        ("goodput", "Where the time went", not summary.watched and summary.goodput and summary.goodput.wall_s > 0),
        ("curves", "Over time", has_curves),
        ("gpu-table", "GPUs", summary.gpus),
        ("nodes", "Nodes", summary.hosts),
        ("attempts", "Attempts", summary.attempts),
        ("setup", "Setup", context is not None and context.setup),
        ("checkpoints", "Checkpoints", context is not None and context.checkpoints),
        ("log", "Log", context is not None and context.log),
    ]
    return [(name, title) for name, title, is_there in sections if is_there]


def make_environment(*template_dirs: Path) -> jinja2.Environment:
    """Return an environment that escapes everything not marked as safe."""
    import jinja2

    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(template_dirs),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=True,
    )


def content_security_policy(scripts: Sequence[str], styles: Sequence[str]) -> str:
    """Return a policy that allows only the given scripts and styles, and no request."""
    return "; ".join(
        [
            "default-src 'none'",
            "img-src data:",
            "script-src " + " ".join(map(_csp_hash, scripts)),
            "style-src " + " ".join(map(_csp_hash, styles)),
            "base-uri 'none'",
            "form-action 'none'",
        ]
    )


def _csp_hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def to_script_json(value: Any) -> str:
    """Return JSON that cannot close the script element around it."""
    text = json.dumps(_replace_non_finite(value), separators=(",", ":"), ensure_ascii=True)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _replace_non_finite(value: Any) -> Any:
    """Replace NaN and Inf, which JSON lacks, by None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {k: _replace_non_finite(v) for k, v in value.items()}
    return [_replace_non_finite(v) for v in value] if isinstance(value, list | tuple) else value


def page_data(summary: Summary, curves: Curves, marks: Sequence[charts.LaneEvent], packer: Packer) -> dict[str, Any]:
    """Return what the scripts draw, except for the values, which are in ``packer``."""
    gpu, host, training = (charts.scales(table) for table in ("gpus", "hosts", "training"))
    training |= {"step": 1.0}
    tables = {
        "gpus": packer.add(curves.gpus, gpu),
        "overall": packer.add(curves.overall, gpu),
        "nodes": packer.add(curves.nodes, gpu),
        "hosts": packer.add(curves.hosts, host),
        "training": packer.add(curves.training, training),
        "ranks": packer.add(curves.ranks, charts.scales("ranks")),
    }
    if curves.heat is not curves.gpus and len(curves.chosen) < len(summary.gpus):
        tables["heat"] = packer.add(curves.heat, gpu)
    return {
        "window": [summary.window.start, summary.window.end],
        "gpus": _gpus_to_json(summary),
        "nodes": curves.node_names,
        "chosen": curves.chosen,
        "attempts": [_attempt_to_json(a) for a in summary.attempts],
        "lanes": charts.used_lanes(marks),
        "marks": charts.events_to_json(marks),
        "charts": [msgspec.to_builtins(c) for c in charts.charts_with_data(curves)],
        "tables": tables,
    }


def _gpus_to_json(summary: Summary) -> list[dict[str, Any]]:
    severities = find_severities(summary)
    return [
        {
            "label": facts.gpu_label(g),
            "node": g.node,
            "ranks": facts.format_ranks(g),
            "severity": severities.get((g.node, g.uuid)),
        }
        for g in summary.gpus
    ]


def _attempt_to_json(attempt: AttemptSummary) -> dict[str, Any]:
    start = attempt.start if attempt.start is not None else attempt.window.start
    end = attempt.end if attempt.end is not None else attempt.window.end
    return {"n": attempt.n, "start": start, "end": end, "ending": attempt.ending}
