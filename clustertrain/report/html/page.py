"""Render ``templates/telemetry/page.html.j2``.

Content from the run can never become markup or script: Jinja escapes it, the page's script inserts it as text, and a
Content-Security-Policy allows no other script and no request.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from clustertrain.report.html import charts, facts, parts
from clustertrain.report.html.pack import Packer
from clustertrain.submit import templates
from clustertrain.telemetry.analysis.curves import Curves
from clustertrain.telemetry.report_schema import AttemptSummary, Summary

if TYPE_CHECKING:
    import jinja2

UPLOT = "1.6.32"
VENDORED = parts.VENDORED


def render(summary: Summary, curves: Curves) -> str:
    """Return the page as HTML.

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
    template_env = make_environment(template_dir)
    template_env.filters.update(facts.FILTERS)
    return template_env.get_template("page.html.j2").render(
        s=summary,
        curves=curves,
        facts=facts.build_summary(summary),
        marks=marks,
        marks_left_out=marks_left_out,
        phases_left_out=phases_left_out,
        has_curves=bool(data["charts"]),
        policy=content_security_policy(scripts, styles),
        scripts=[Markup(x) for x in scripts],
        styles=[Markup(x) for x in styles],
        data=Markup(to_script_json(data)),
        blob=packer.encode(),
        uplot=UPLOT,
        licence=parts.read_text(VENDORED / "uPlot.LICENSE"),
    )


def make_environment(template_dir: Path) -> jinja2.Environment:
    """Return an environment that escapes everything not marked as safe."""
    import jinja2

    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(template_dir),
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
    gpu, host, training = (charts.scales(table) for table in ("gpus", "hosts", "training"))
    training |= {"step": 1.0}
    tables = {
        "gpus": packer.add(curves.gpus, gpu),
        "overall": packer.add(curves.overall, gpu),
        "nodes": packer.add(curves.nodes, gpu),
        "hosts": packer.add(curves.hosts, host),
        "training": packer.add(curves.training, training),
    }
    if curves.heat is not curves.gpus and len(curves.chosen) < len(summary.gpus):
        tables["heat"] = packer.add(curves.heat, gpu)
    return {
        "window": [summary.window.start, summary.window.end],
        "gpus": [{"label": facts.gpu_label(g), "node": g.node, "ranks": facts.format_ranks(g)} for g in summary.gpus],
        "nodes": curves.node_names,
        "chosen": curves.chosen,
        "attempts": [_attempt_to_json(a) for a in summary.attempts],
        "lanes": charts.used_lanes(marks),
        "marks": charts.events_to_json(marks),
        "charts": [msgspec.to_builtins(c) for c in charts.charts_with_data(curves)],
        "tables": tables,
    }


def _attempt_to_json(attempt: AttemptSummary) -> dict[str, Any]:
    start = attempt.start if attempt.start is not None else attempt.window.start
    end = attempt.end if attempt.end is not None else attempt.window.end
    return {"n": attempt.n, "start": start, "end": end, "ending": attempt.ending}
