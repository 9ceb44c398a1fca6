"""Links from insights to GPUs."""

from __future__ import annotations

import pytest

from clustertrain.report.html.notes import Linker, Piece, build_notes
from clustertrain.telemetry.report_schema import Insight
from tests.unit.telemetry.summaries import broken, healthy, replace


def links(text: str) -> list[tuple[str, int | None]]:
    return [(p.text, p.gpu) for p in Linker(healthy(2, 2).gpus).split(text, None) if p.gpu is not None]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("GPU 1 of n2 was not used", [("GPU 1 of n2", 3)]),
        ("rank 2 on n2 is late, Rank 0 is not", [("rank 2", 2), ("Rank 0", 0)]),
        ("GPU-n1-1-5b1c9f0e is lost", [("GPU-n1-1-5b1c9f0e", 1)]),
        ("GPU 1 of n22 and GPU 7 of n1 and rank 99 are unknown", []),
        ("frank 2, 3 ranks", []),
    ],
)
def test_names_of_gpus_are_links(text: str, expected: list[tuple[str, int | None]]) -> None:
    assert links(text) == expected


def test_pieces_are_the_whole_text() -> None:
    text = "GPU 1 of n2: check `clustertrain logs r --rank 3` or rank 3"
    pieces = Linker(healthy(2, 2).gpus).split(text, None)
    assert pieces == [
        Piece("GPU 1 of n2", 3), Piece(": check "), Piece("clustertrain logs r --rank 3", is_code=True), Piece(" or "),
        Piece("rank 3", 3),
    ]  # fmt: skip


def test_hostile_names_are_no_patterns() -> None:
    gpus = [replace(g, node="n(1|.*", uuid="GPU-[") for g in healthy(1, 1).gpus]
    pieces = Linker(gpus).split("GPU 0 of n(1|.* and GPU-[ and n1", None)
    assert [p.gpu for p in pieces] == [0, None, 0, None]


def test_each_note_has_its_gpu_cost_and_advice() -> None:
    notes = {n.text[0].text: n for n in build_notes(broken()) if n.severity != "info"}
    unused = notes["GPU 1 of n2"]
    assert (unused.severity, unused.gpu, unused.advice_label) == ("critical", 3, "Fix")
    assert [p.text for p in unused.target] == ["rank 3", "GPU-n2-1-5b1c9f0e"] and {p.gpu for p in unused.target} == {3}
    info = build_notes(replace(healthy(), insights=[Insight(severity="info", code="x", text="y", fix="use less")]))
    assert info[0].advice_label == "Tip" and info[0].cost == "" and info[0].text == [Piece("Y")]


def test_node_at_the_start_keeps_its_name() -> None:
    texts = ("n1 has no GPU samples", "n1: no samples", "n10 nodes")
    insights = [Insight(severity="info", code="x", text=text) for text in texts]
    notes = build_notes(replace(healthy(), insights=insights))
    assert ["".join(p.text for p in n.text) for n in notes] == [*texts[:2], "N10 nodes"]
