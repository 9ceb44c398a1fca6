"""Insights for a page, with links to the GPUs that they mention."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence, Set

import msgspec

from clustertrain.report import insights
from clustertrain.telemetry.report_schema import GpuSummary, Insight, Summary

SIGNS = {"critical": "✖", "warning": "▲", "info": "●"}


class Piece(msgspec.Struct, frozen=True):
    """A piece of a text: plain, code, or the name of a GPU."""

    text: str
    gpu: int | None = None
    """Index into the summary's GPUs, whose curves and row a click shows."""
    is_code: bool = False


class Note(msgspec.Struct, frozen=True):
    """One insight."""

    severity: str
    sign: str
    text: list[Piece]
    target: list[Piece]
    """The rank and GPU that the text does not mention."""
    advice_label: str
    advice: list[Piece]
    cost: str
    gpu: int | None


def build_notes(summary: Summary) -> list[Note]:
    """Return the insights in order."""
    linker = Linker(summary.gpus)
    nodes = {h.node for h in summary.hosts} | {g.node for g in summary.gpus}
    return [_note(insight, linker, nodes) for insight in summary.insights]


def _note(insight: Insight, linker: Linker, nodes: Set[str]) -> Note:
    severity = insight.severity if insight.severity in SIGNS else "info"
    gpu = linker.find(insight.node, insight.uuid, insight.rank)
    return Note(
        severity=severity,
        sign=SIGNS[severity],
        text=linker.split(_capitalize(insight.text, nodes), gpu),
        target=[Piece(word, gpu) for word in insights.unmentioned_ids(insight)],
        advice_label=insights.advice_label(insight).capitalize(),
        advice=linker.split(insight.fix, gpu) if insight.fix else [],
        cost=insights.format_cost(insight),
        gpu=gpu,
    )


def _capitalize(text: str, nodes: Set[str]) -> str:
    """Return the text as a sentence; the name of a node at its start stays as it is."""
    starts_with_node = re.split(r"[\s,:;]", text, maxsplit=1)[0] in nodes
    return text if starts_with_node else text[:1].upper() + text[1:]


class Linker:
    """Finds the names of GPUs in a text: a UUID, ``GPU 3 of NODE`` and ``rank 19``."""

    def __init__(self, gpus: Sequence[GpuSummary]) -> None:
        self._by_key = {(g.node, g.uuid): i for i, g in enumerate(gpus)}
        self._by_uuid = {g.uuid: i for i, g in enumerate(gpus)}
        self._by_rank = {rank: i for i, g in enumerate(gpus) for rank in g.ranks}
        self._by_index = {(g.node, g.index): i for i, g in enumerate(gpus) if g.index is not None}
        nodes = sorted({re.escape(g.node) for g in gpus}, key=len, reverse=True)
        uuids = sorted({re.escape(g.uuid) for g in gpus}, key=len, reverse=True)
        parts = [r"`(?P<code>[^`]+)`", r"\brank (?P<rank>\d{1,9})\b"]
        parts += [rf"\bGPU (?P<index>\d{{1,9}}) of (?P<node>{'|'.join(nodes)})(?![\w.-]*\w)"] if nodes else []
        parts += [rf"(?P<uuid>{'|'.join(uuids)})"] if uuids else []
        self._pattern = re.compile("|".join(parts), re.IGNORECASE)

    def find(self, node: str | None, uuid: str | None, rank: int | None) -> int | None:
        """Return the index of the GPU that an insight is about."""
        if node is not None and uuid is not None and (node, uuid) in self._by_key:
            return self._by_key[node, uuid]
        return self._by_rank.get(-1 if rank is None else rank)

    def split(self, text: str, gpu: int | None) -> list[Piece]:
        """Split a text; ``gpu`` is the one that the text is about."""
        return list(self._iter_pieces(text, gpu))

    def _iter_pieces(self, text: str, gpu: int | None) -> Iterator[Piece]:
        start = 0
        for match in self._pattern.finditer(text):
            if match.start() > start:
                yield Piece(text[start : match.start()])
            if match["code"]:
                yield Piece(match["code"], is_code=True)
            else:
                yield Piece(match[0], self._index(match.groupdict(), gpu))
            start = match.end()
        if start < len(text):
            yield Piece(text[start:])

    def _index(self, groups: dict[str, str | None], gpu: int | None) -> int | None:
        rank, index, uuid = groups["rank"], groups.get("index"), groups.get("uuid")
        if rank is not None:
            return self._by_rank.get(int(rank))
        if index is not None:
            return self._by_index.get((groups.get("node") or "", int(index)))
        if uuid is None:
            return None
        return self._by_uuid.get(uuid, gpu)
