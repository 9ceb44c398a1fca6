"""Fills ``templates/telemetry/page.html.j2``. Nothing that the run chose is markup or script: Jinja escapes it, the
page's script puts it in as text, and a Content-Security-Policy allows no other script and no request at all."""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from clustertrain.report.html import charts, facts
from clustertrain.report.html.pack import Packer
from clustertrain.submit import templates
from clustertrain.telemetry.analysis.curves import Curves
from clustertrain.telemetry.report_schema import AttemptSummary, Summary

if TYPE_CHECKING:
    import jinja2

UPLOT = "1.6.32"
VENDORED = Path(__file__).parent / "vendored"
SCRIPTS = ("data.js", "charts.js", "maps.js", "page.js")
STYLES = ("page.css",)


def render(summary: Summary, curves: Curves) -> str:
    """The page. Raises ConfigError when the installation is incomplete."""
    from markupsafe import Markup

    folder = templates.folder() / "telemetry"
    scripts = [read(VENDORED / "uPlot.iife.min.js"), _wrapped(folder)]
    styles = [read(VENDORED / "uPlot.min.css"), *(read(folder / s) for s in STYLES)]
    marks, left_out = charts.placed(summary)
    packer = Packer()
    phases, phases_left_out = charts.phases(summary)
    data = _data(summary, curves, marks, packer) | {"phases": phases}
    filled = environment(folder)
    filled.filters.update(facts.FILTERS)
    return filled.get_template("page.html.j2").render(
        s=summary,
        curves=curves,
        facts=facts.of(summary),
        marks=marks,
        marks_left_out=left_out,
        phases_left_out=phases_left_out,
        has_curves=bool(data["charts"]),
        policy=policy(scripts, styles),
        scripts=[Markup(x) for x in scripts],
        styles=[Markup(x) for x in styles],
        data=Markup(in_script(data)),
        blob=packer.blob(),
        uplot=UPLOT,
        licence=read(VENDORED / "uPlot.LICENSE"),
    )


def environment(folder: Path) -> jinja2.Environment:
    """Escapes all that is not marked as safe."""
    import jinja2

    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=True,
    )


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def _wrapped(folder: Path) -> str:
    body = "\n".join(read(folder / name) for name in SCRIPTS)
    return f'"use strict";\n(() => {{\n{body}}})();\n'


def policy(scripts: Sequence[str], styles: Sequence[str]) -> str:
    """Only what the page brings along may run, and nothing may be fetched."""
    return "; ".join(
        [
            "default-src 'none'",
            "script-src " + " ".join(map(_hash, scripts)),
            "style-src " + " ".join(map(_hash, styles)),
            "base-uri 'none'",
            "form-action 'none'",
        ]
    )


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def in_script(value: Any) -> str:
    """JSON that cannot end the element that it stands in."""
    text = json.dumps(_finite(value), separators=(",", ":"), ensure_ascii=True)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    return [_finite(v) for v in value] if isinstance(value, list | tuple) else value


def _data(summary: Summary, curves: Curves, marks: Sequence[charts.Placed], packer: Packer) -> dict[str, Any]:
    gpu, host, training = (charts.scales(of) for of in ("gpus", "hosts", "training"))
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
        "gpus": [{"label": facts.label(g), "node": g.node, "ranks": facts.ranks(g)} for g in summary.gpus],
        "nodes": curves.node_names,
        "chosen": curves.chosen,
        "attempts": [_attempt(a) for a in summary.attempts],
        "lanes": charts.lanes(marks),
        "marks": charts.for_page(marks),
        "charts": [msgspec.to_builtins(c) for c in charts.drawn(curves)],
        "tables": tables,
    }


def _attempt(attempt: AttemptSummary) -> dict[str, Any]:
    start = attempt.start if attempt.start is not None else attempt.window.start
    end = attempt.end if attempt.end is not None else attempt.window.end
    return {"n": attempt.n, "start": start, "end": end, "ending": attempt.ending}
