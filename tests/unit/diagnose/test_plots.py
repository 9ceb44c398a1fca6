"""Plots as text and as SVG."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from clustertrain.diagnose import plots
from clustertrain.diagnose.registry import Finding, Plot
from clustertrain.errors import UsageError

X = [10 ** (i / 10 - 7) for i in range(81)]
PLOT = Plot(x_name="lr", y_name="loss", x=X, y=[3 - i / 40 for i in range(81)], log_x=True, marks={"optim.lr": 1e-3})


@pytest.mark.parametrize("width", [56, 76, 96])
def test_text_plot_fills_its_width(width: int) -> None:
    lines = plots.render_text(PLOT, width)
    assert max(map(len, lines)) <= width and len(lines) == plots.TEXT_ROWS + 3
    rows = lines[: plots.TEXT_ROWS]
    columns = [row.index("•") for row in rows]
    assert columns == sorted(columns) and rows[0].strip().startswith("3│") and rows[-1].strip().startswith("1│")


def test_mark_points_at_its_x_value() -> None:
    lines = plots.render_text(PLOT, 80)
    assert lines[-1].index("^") - 3 == pytest.approx((80 - 5) / 2, abs=3)  # 1e-3 is in the middle of 1e-7 to 1e1


def test_divergence_is_clipped_and_a_flat_curve_has_an_axis() -> None:
    diverging = Plot(
        x_name="step", y_name="loss", x=[float(i) for i in range(30)], y=[3 - i / 20 for i in range(29)] + [1e9]
    )
    assert float(plots.render_text(diverging, 60)[0].partition("│")[0]) < 5
    flat = Plot(x_name="step", y_name="loss", x=[0.0, 1.0], y=[2.0, 2.0])
    assert any("•" in line for line in plots.render_text(flat, 60))


def test_files_are_xml_with_the_finding_escaped(tmp_path: Path) -> None:
    finding = Finding(check="lr-range", verdict="pass", text="a < b & c", plot=PLOT)
    for name in ("a.svg", "a.html"):
        plots.write(tmp_path / name, [finding, Finding(check="data", verdict="pass", text="")])
    root = ET.fromstring((tmp_path / "a.svg").read_text())
    assert len(list(root.iter("{http://www.w3.org/2000/svg}polyline"))) == 1
    assert "a &lt; b &amp; c" in (tmp_path / "a.html").read_text()
    with pytest.raises(UsageError, match="png"):
        plots.check_path(Path("a.png"))
    assert math.isclose(PLOT.x[40], 1e-3)
