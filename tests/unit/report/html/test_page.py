"""The HTML report: content, safety, size, and what it omits for large runs."""

from __future__ import annotations

import base64
import hashlib
import html.parser
import itertools
import json
import os
import re
import time
import tomllib
import zlib
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from clustertrain.errors import ConfigError
from clustertrain.report import html as report
from clustertrain.report.html import charts, page
from clustertrain.report.html.pack import Packer
from clustertrain.report.status import GOODPUT_LABELS
from clustertrain.run.usage.goodput import TIME_CATEGORIES, Goodput
from clustertrain.telemetry.analysis.curves import Curves
from clustertrain.telemetry.analysis.resample import CurveTable
from clustertrain.telemetry.report_schema import AttemptSummary, Insight, Summary, TimelineEvent, TimeWindow, Waste
from tests import pages

pytestmark = pytest.mark.long

EVIL = '</script></title></style>--><img src=x onerror="alert(1)"><script>alert(2)</script>\u2028{{ 7*7 }}'


class Elements(html.parser.HTMLParser):
    """Parser that collects the elements of a page with their attributes and text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self.visible: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        tag = self.tags[-1][0] if self.tags else ""
        self.texts.setdefault(tag, []).append(data)
        if tag not in ("script", "style"):
            self.visible.append(data)


@pytest.fixture(scope="module")
def report_data() -> tuple[Summary, Curves]:
    return pages.page(nodes=2, gpus=2, hours=4)


def empty_curves() -> Curves:
    table = CurveTable(0.0, 1.0, 0)
    return Curves(table, [], table, table, table, table, [], table, "", None)


def embedded_data(text: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(
        re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)[1]  # type: ignore[index]
    )
    return data


def test_static_content_has_the_summary(report_data: tuple[Summary, Curves]) -> None:
    text = " ".join(Elements(page.render(*report_data)).visible)
    header = ("llama-8b-pretrain-k3v7xq", "8812", "99.8%", "hybrid_shard")
    for expected in (*header, "critical", "was not used", "cost about 3.83 GPU-hours",
                     "request fewer GPUs", "preempted", "productive steps",
                     "GPU-00000002-77aa-4b1e-9c3d", "XID 63"):  # fmt: skip
        assert expected in text, expected


def test_run_content_cannot_inject_markup(report_data: tuple[Summary, Curves]) -> None:
    summary, curves = report_data
    evil = msgspec.structs.replace(
        summary,
        run=EVIL,
        user=EVIL,
        layout=EVIL,
        state=EVIL,
        read_errors=[EVIL],
        insights=[Insight(severity=EVIL, code=EVIL, text=EVIL, fix=EVIL)],
        gpus=[msgspec.structs.replace(g, node=EVIL, uuid=EVIL, name=EVIL) for g in summary.gpus],
        hosts=[msgspec.structs.replace(h, node=EVIL, driver=EVIL, nvml_error=EVIL) for h in summary.hosts],
        attempts=[AttemptSummary(1, EVIL, TimeWindow(0, 1), [EVIL], 0.0, 1.0, EVIL, [TimelineEvent(0.5, EVIL, EVIL)])],
    )
    named = Curves(**{**vars(curves), "node_names": [EVIL] * 2, "choice": EVIL, "source": EVIL})
    expected = [tag for tag, _ in Elements(page.render(*report_data)).tags]
    elements = Elements(text := page.render(evil, named))
    tags = [tag for tag, _ in elements.tags]
    assert "img" not in tags
    for singleton_tag in ("script", "style", "title", "meta"):
        assert tags.count(singleton_tag) == expected.count(singleton_tag)
    assert not [a for _, attributes in elements.tags for a in attributes if a.startswith("on")]
    assert embedded_data(text)["nodes"] == [EVIL] * 2, "the text itself is kept"
    assert embedded_data(text)["marks"][0]["text"] == EVIL


def test_policy_allows_only_embedded_scripts(report_data: tuple[Summary, Curves]) -> None:
    elements = Elements(text := page.render(*report_data))
    policy = next(a["content"] for _, a in elements.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None and policy.startswith("default-src 'none'; ") and "unsafe" not in policy
    embedded = re.findall(r"<script>(.*?)</script>", text, re.S) + re.findall(r"<style>(.*?)</style>", text, re.S)
    hashes = [f"sha256-{base64.b64encode(hashlib.sha256(x.encode()).digest()).decode()}" for x in embedded]
    assert sorted(hashes) == sorted(re.findall(r"'(sha256-[^']+)'", policy))
    for tag, attributes in elements.tags:
        assert not {"src", "style", "action"} & attributes.keys(), (tag, attributes)
        assert (attributes.get("href") or "#").startswith(("#", "data:image/svg+xml;base64,")), (tag, attributes)


@pytest.mark.parametrize("rows", [1, 40])
def test_packed_numbers_round_trip(rows: int) -> None:
    rng = np.random.default_rng(3)
    values = rng.uniform(-50, 700, (rows, 1500))
    values[rng.random(values.shape) < 0.1] = np.nan
    packer = Packer()
    packer.add(CurveTable(0.0, 1.0, 1500, {"other": values[:1]}), {"other": 1.0})
    table = packer.add(CurveTable(5.0, 2.0, 1500, {"power_w": values, "unknown": values}), {"power_w": 2.0})
    assert table["curves"].keys() == {"power_w"} and (table["start"], table["step"]) == (5.0, 2.0)
    curve = table["curves"]["power_w"]
    data = np.frombuffer(zlib.decompress(base64.b64decode(packer.encode())), np.uint8)[curve["offset"] :]
    steps = data[: values.size].astype(int)
    if curve["bits"] == 16:
        steps = steps + 256 * data[values.size : 2 * values.size].astype(int)
    levels = np.cumsum(steps.reshape(values.shape), axis=1) % 2 ** curve["bits"]
    top = 2 ** curve["bits"] - 2
    assert np.array_equal(levels > top, np.isnan(values))
    decoded = np.where(levels > top, np.nan, curve["low"] + levels * (curve["high"] - curve["low"]) / top)
    assert np.nanmax(np.abs(decoded - 2 * values)) <= 1500 / top / 2 + 1e-6
    assert curve["bits"] == (16 if rows == 1 else 8)


@pytest.mark.parametrize(
    "values", [[[5.0, 5.0]], [[np.nan, np.nan]], [[np.inf, 1.0]]], ids=["flat", "none", "infinite"]
)
def test_degenerate_curves_are_packed(values: list[list[float]]) -> None:
    curve = Packer().add(CurveTable(0.0, 1.0, 2, {"loss": np.array(values)}), {"loss": 1.0})["curves"]["loss"]
    assert np.isfinite([curve["low"], curve["high"]]).all()


def test_page_of_32_gpus_for_a_day_is_under_1_mb(tmp_path: Path) -> None:
    report_data = pages.page()
    before = time.perf_counter()
    size = report.write(*report_data, tmp_path / "page.html")
    print(f"\n32 GPUs for a day: {size / 1e6:.3f} MB in {time.perf_counter() - before:.2f} s")
    assert size == (tmp_path / "page.html").stat().st_size < 1_000_000


def test_page_of_1024_gpus_for_a_week_is_under_3_mb(tmp_path: Path) -> None:
    summary, curves = pages.page(nodes=128, gpus=8, hours=168, step_s=3600)
    selected = list(range(64))
    names = curves.node_names[:64]
    curves = Curves(
        gpus=curves.gpus.rows(selected),
        chosen=selected,
        heat=CurveTable(curves.heat.start, 3600, curves.heat.points, {"power_w": curves.heat.values["power_w"]}),
        overall=curves.overall,
        nodes=curves.nodes.rows(range(64)),
        hosts=curves.hosts.rows(range(64)),
        node_names=names,
        training=curves.training,
        source=curves.source,
        choice="64 of 1024 GPUs have individual curves",
    )
    size = report.write(summary, curves, tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    print(f"\n1,024 GPUs for a week: {size / 1e6:.3f} MB")
    assert size < 3_000_000
    assert "64 of 1024 GPUs have individual curves" in text
    assert embedded_data(text)["tables"]["heat"]["curves"]["power_w"]["rows"] == 1024
    assert len(re.findall(r'<td class="uuid">', text)) == 1024


def test_page_without_samples(report_data: tuple[Summary, Curves]) -> None:
    summary = msgspec.structs.replace(
        report_data[0],
        gpus=[],
        hosts=[],
        attempts=[],
        window=TimeWindow(None, None),
        goodput=None,
        training=None,
        waste=None,
    )
    elements = Elements(page.render(summary, empty_curves()))
    text = " ".join(elements.visible)
    assert "No samples were recorded" in text and "was not used" in text
    assert "need JavaScript" not in text, "there is nothing for a script to draw"


def test_missing_values_are_dashes(report_data: tuple[Summary, Curves]) -> None:
    summary, curves = report_data
    gpu = msgspec.structs.replace(
        summary.gpus[0],
        utilization=None,
        power_w=None,
        memory_used_gib=None,
        energy_j=None,
        index=None,
        samples_expected=0,
    )
    text = page.render(msgspec.structs.replace(summary, gpus=[gpu, *summary.gpus[1:]], coverage=None), curves)
    row = text[(start := text.index('<tr id="row-0"')) : text.index("</tr>", start)]
    assert row.count("–</td>") >= 8 and "None" not in row and "nan" not in " ".join(Elements(text).visible)


def test_rare_events_are_kept_among_many(report_data: tuple[Summary, Curves]) -> None:
    frequent = [TimelineEvent(float(i), "checkpoint", f"step {i}") for i in range(6000)]
    rare = [TimelineEvent(i + 0.5, "xid", f"Xid {i}") for i in range(200)]
    attempt = msgspec.structs.replace(report_data[0].attempts[0], events=frequent + rare)
    marks, omitted = charts.lane_events(msgspec.structs.replace(report_data[0], attempts=[attempt]))
    assert sum(p.mark.kind == "xid" for p in marks) == 200 and len(marks) == 1500
    assert [p.mark.t for p in marks] == sorted(p.mark.t for p in marks)
    assert omitted is not None and "1500 of 6200 events" in omitted


def test_unwritable_path_raises(report_data: tuple[Summary, Curves], tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name in ("folder", "pipe"):
        with pytest.raises(ConfigError, match="is not a regular file and will not be replaced"):
            report.write(*report_data, tmp_path / name)
    with pytest.raises(ConfigError, match="is not a regular file"):
        report.write(*report_data, Path("/dev/null"))
    with pytest.raises(ConfigError, match="no such folder"):
        report.write(*report_data, tmp_path / "missing" / "page.html")
    with pytest.raises(ConfigError, match="cannot be written: File name too long") as error:
        report.write(*report_data, tmp_path / ("x" * 250))
    assert error.value.fix


def test_existing_page_is_replaced_atomically(report_data: tuple[Summary, Curves], tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text("old")
    size = report.write(*report_data, path)
    assert path.stat().st_size == size and [p.name for p in tmp_path.iterdir()] == ["page.html"]


def test_uplot_is_the_published_file() -> None:
    """npm's uplot 1.6.32, dist/ and LICENSE; an update changes the version, these sums and docs/dependencies.md."""
    sums = {
        "uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
        "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
        "uPlot.LICENSE": "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd",
    }
    folder = Path(page.__file__).parent / "vendored"
    assert {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir()} == sums
    assert f"(v{page.UPLOT})" in (folder / "uPlot.iife.min.js").read_text()[:100]


def test_uplot_license_is_in_the_page(report_data: tuple[Summary, Curves]) -> None:
    text = " ".join(Elements(page.render(*report_data)).visible)
    assert "Leon Sorokin" in text and "Permission is hereby granted" in text


def test_wheel_includes_the_templates() -> None:
    root = Path(page.__file__).parents[3]
    shipped = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert shipped["force-include"]["templates"] == "clustertrain/templates"
    assert {p.name for p in (root / "templates" / "telemetry").iterdir()} == {
        "page.html.j2", "context.html.j2", "page.js", "page.css"
    }  # fmt: skip


def test_header_shows_wasted_gpu_hours(report_data: tuple[Summary, Curves]) -> None:
    summary, curves = report_data
    waste = Waste(gpu_hours=0.104, wasted_gpu_hours=0.0385, by_cause={})
    text = " ".join(Elements(page.render(msgspec.structs.replace(summary, waste=waste), curves)).visible)
    assert "▲ 37%" in text and "0.04 of 0.10 GPU-hours trained nothing" in text


def plain_links(text: str) -> str:
    return re.sub(r"</?a\b[^>]*>", "", text)


def test_insight_names_rank_and_full_uuid_once(report_data: tuple[Summary, Curves]) -> None:
    uuid = "GPU-5b1c9f0e-77aa-4b1e-9c3d-0123456789ab"
    insights = [
        Insight(severity="warning", code="a", text="GPU 3 of n1 is slow, rank 31 waits", uuid=uuid, rank=3),
        Insight(severity="info", code="b", text=f"Rank 7 on {uuid} is late", uuid=uuid, rank=7),
    ]
    text = page.render(msgspec.structs.replace(report_data[0], insights=insights), report_data[1])
    assert f'rank 31 waits <span class="of">rank 3</span> <span class="of">{uuid}</span></p>' in plain_links(text)
    assert f"Rank 7 on {uuid} is late</p>" in plain_links(text), "ids in the text are not repeated"


def test_goodput_parts_have_the_terminal_labels_and_a_color(report_data: tuple[Summary, Curves]) -> None:
    ledger = Goodput(**dict.fromkeys(TIME_CATEGORIES, 10.0), wall_s=10.0 * len(TIME_CATEGORIES))
    text = page.render(msgspec.structs.replace(report_data[0], goodput=ledger), report_data[1])
    visible = " ".join(Elements(text).visible)
    for part in TIME_CATEGORIES:
        assert f".part-{part.removesuffix('_s')} {{" in text
        assert GOODPUT_LABELS[part] in visible
    assert "between steps" in visible


def test_page_has_the_phases_of_the_terminal(report_data: tuple[Summary, Curves]) -> None:
    phases = embedded_data(page.render(*report_data))["phases"]
    assert {p[2] for p in phases} == {"start-up", "training", "restore", "evaluation", "checkpoint", "shutdown"}
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(phases))
    script = Elements(page.render(*report_data)).texts["script"]
    assert all(p[2] in "".join(script) for p in phases)
    bare = [msgspec.structs.replace(a, events=[]) for a in report_data[0].attempts]
    assert (
        embedded_data(page.render(msgspec.structs.replace(report_data[0], attempts=bare), report_data[1]))["phases"]
        == []
    )


def test_shortest_of_many_phases_are_dropped_with_a_note(report_data: tuple[Summary, Curves]) -> None:
    marks = [TimelineEvent(10.0, "first_step", "")]
    marks += [
        TimelineEvent(20.0 + 10 * i, "checkpoint", "", 20.0 + 10 * i + (2 if i % 100 else 6)) for i in range(20_000)
    ]
    attempt = AttemptSummary(1, "1", TimeWindow(0.0, 200_100.0), ["n"], 0.0, 200_100.0, "completed", marks)
    summary = msgspec.structs.replace(report_data[0], attempts=[attempt], window=attempt.window)
    text = page.render(summary, report_data[1])
    phases = embedded_data(text)["phases"]
    assert 100 < len(phases) <= 3000
    assert (phases[0][0], phases[-1][1]) == (0.0, 200_100.0)
    assert {p[1] - p[0] for p in phases if p[2] == "checkpoint"} == {6.0}
    assert "Phases of 2.00 s or less are left out." in text
