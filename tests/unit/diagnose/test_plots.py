"""Curves in characters and as SVG."""

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
def test_a_curve_fills_its_width_and_falls_from_left_to_right(width: int) -> None:
    lines = plots.render_text(PLOT, width)
    assert max(map(len, lines)) <= width and len(lines) == plots.TEXT_ROWS + 3
    rows = lines[: plots.TEXT_ROWS]
    firsts = [row.index("•") for row in rows]
    assert firsts == sorted(firsts) and rows[0].strip().startswith("3│") and rows[-1].strip().startswith("1│")


def test_a_mark_stands_below_its_place() -> None:
    lines = plots.render_text(PLOT, 80)
    assert lines[-1].index("^") - 3 == pytest.approx((80 - 5) / 2, abs=3)  # 1e-3 is in the middle of 1e-7 to 1e1


def test_what_runs_off_is_cut_at_the_top_and_a_flat_curve_has_an_axis() -> None:
    lost = Plot(
        x_name="step", y_name="loss", x=[float(i) for i in range(30)], y=[3 - i / 20 for i in range(29)] + [1e9]
    )
    assert float(plots.render_text(lost, 60)[0].partition("│")[0]) < 5
    flat = Plot(x_name="step", y_name="loss", x=[0.0, 1.0], y=[2.0, 2.0])
    assert any("•" in line for line in plots.render_text(flat, 60))


def test_pictures_are_xml_and_hold_what_was_found(tmp_path: Path) -> None:
    found = Finding(check="lr-range", verdict="pass", text="a < b & c", plot=PLOT)
    for name in ("a.svg", "a.html"):
        plots.write(tmp_path / name, [found, Finding(check="data", verdict="pass", text="")])
    root = ET.fromstring((tmp_path / "a.svg").read_text())
    assert len(list(root.iter("{http://www.w3.org/2000/svg}polyline"))) == 1
    assert "a &lt; b &amp; c" in (tmp_path / "a.html").read_text()
    with pytest.raises(UsageError, match="png"):
        plots.check_path(Path("a.png"))
    assert math.isclose(PLOT.x[40], 1e-3)
