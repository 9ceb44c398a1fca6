"""How a save begins: each rank offers what it holds, all learn who writes what and where, and copy that into memory."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from clustertrain.checkpoint.core import fault_points
from clustertrain.checkpoint.core.control_group import Ranks
from clustertrain.checkpoint.core.failures import Trouble, error, told
from clustertrain.checkpoint.core.state_dict import Block, collect
from clustertrain.checkpoint.format import folders
from clustertrain.checkpoint.format.staged_segments import Segment
from clustertrain.checkpoint.save.global_plan import MARK_BYTES, Offer, Share, Union
from clustertrain.checkpoint.save.pending_saves import LATE
from clustertrain.checkpoint.save.staging import Staging
from clustertrain.errors import CheckpointError

_TOKEN_BYTES = 4


@dataclass(frozen=True)
class Begun:
    """A save: this rank's ``share`` of it, the ``folder`` that it goes to, the values of this rank's ``own``, and what
    is in the memory now, or why not, which the others hear when the save lands."""

    share: Share
    folder: Path
    own: Any
    staged: list[Segment] | Trouble


@dataclass(frozen=True)
class _Offering:
    """What this rank can give to a save, or why it cannot; ``records`` waits for the word of all ranks."""

    offer: Offer | None
    trouble: Trouble | None
    records: Callable[[], list[bytes]]


class Offers:
    """Those of one rank, for saves in ``root``. Its methods are collective."""

    def __init__(self, root: Path, ranks: Ranks, attempt: str) -> None:
        self._root = root
        self._ranks = ranks
        self._union = Union(ranks)
        self._attempt = attempt

    def blocks(self, state: Mapping[str, Any], rank_state: Mapping[str, Any], *, failure: str) -> Sequence[Block]:
        """What this rank would write now. Raises CheckpointError, after the word ``failure``, as :meth:`stage`."""
        return self._agreed(self._begin(state, rank_state), state, failure)[1].blocks

    def stage(
        self,
        staging: Staging,
        step: int,
        state: Mapping[str, Any],
        rank_state: Mapping[str, Any],
        *,
        failure: str,
        late: bool,
    ) -> Begun:
        """Copy this rank's share into ``staging``, but where it is too ``late`` for that.

        Raises:
            CheckpointError: on all ranks, what any cannot save.
        """
        offering = self._begin(state, rank_state, step)
        # The ranks tell each other while they copy: what each has to write is what it wrote the last time, as a rule.
        expected = None if offering.offer is None or late else self._union.expected(offering.offer)
        staged = self._fill(staging, expected) if expected is not None else None
        offer, share, token, as_expected = self._agreed(offering, state, failure, step)
        if late:
            staged = Trouble(why=LATE, of="deadline")
        elif staged is None or not as_expected:
            staged = self._fill(staging, share.blocks)
        return Begun(share, self._folder(step, token), offer.collected.own, staged)

    def _folder(self, step: int, token: bytes) -> Path:
        return folders.of_save(self._root, step, self._attempt, token)

    def _begin(self, state: Mapping[str, Any], rank_state: Mapping[str, Any], step: int | None = None) -> _Offering:
        """Begin to tell the others what this rank holds; with a ``step`` there is a folder for it afterwards."""
        trouble, offer, token = None, None, secrets.token_bytes(_TOKEN_BYTES)
        try:
            offer = Offer(collect(state, rank_state, self._ranks.rank))
            if step is not None and self._ranks.rank == 0:
                folders.make(self._folder(step, token))
        except (OSError, CheckpointError) as e:
            trouble = told(e)
        mark = offer.mark if offer is not None and trouble is None else bytes(MARK_BYTES)
        records = self._ranks.exchange(bytes([trouble is not None]) + token + mark)
        return _Offering(offer, trouble, records)

    def _agreed(
        self, offering: _Offering, state: Mapping[str, Any], failure: str, step: int | None = None
    ) -> tuple[Offer, Share, bytes, bool]:
        """What this rank holds and what it writes, the token of the folder, and whether nobody holds anything new.
        Where all ranks hold the same things, what was begun is all that they have to tell each other."""
        records = offering.records()
        token = records[0][1 : 1 + _TOKEN_BYTES]
        if offering.offer is None or any(r[0] for r in records):
            troubles = self._ranks.troubles(offering.trouble)
            if step is not None and self._ranks.rank == 0:
                shutil.rmtree(self._folder(step, token), ignore_errors=True)
            raise error(failure, troubles)
        optimizers = [k for k, v in state.items() if isinstance(v, torch.optim.Optimizer)]
        marks = [r[1 + _TOKEN_BYTES :] for r in records]
        known = self._union.agrees(marks)
        return offering.offer, self._union.share(offering.offer, marks, optimizers), token, known

    def _fill(self, staging: Staging, blocks: Sequence[Block]) -> list[Segment] | Trouble:
        fault_points.reached("while staging", self._ranks.rank)
        try:
            segments = staging.fill(blocks)
        except OSError as e:
            return told(e)
        fault_points.reached("staged", self._ranks.rank)
        return segments
