"""Documents put into samples of one length."""

from __future__ import annotations

import numpy as np
import pytest

from clustertrain.train.data.packing import PACKING_WINDOW, Packing, pack


def packed(lengths: list[int], size: int) -> Packing:
    """Documents of ``lengths`` tokens, one after the other."""
    counts = np.array(lengths, dtype=np.int64)
    return pack(np.cumsum(counts) - counts, counts, size)


def predicted(packing: Packing) -> list[int]:
    """The tokens that are targets."""
    return sorted(int(b) + 1 + i for b, n in zip(packing.starts, packing.lengths, strict=True) for i in range(int(n)))


@pytest.mark.parametrize("size", [1, 5, 16, 100])
def test_every_token_but_the_first_of_a_document_is_predicted_once(size: int) -> None:
    random = np.random.default_rng(0)
    lengths = [*random.integers(0, 60, 300).tolist(), 1, 2, 0]
    found = packed(lengths, size)
    firsts = {int(b) for b, n in zip(np.cumsum(lengths) - lengths, lengths, strict=True) if n}
    assert predicted(found) == sorted(set(range(sum(lengths))) - firsts)
    sums = np.add.reduceat(found.lengths, found.sample_offsets[:-1])
    assert sums.max() <= size and found.padding == pytest.approx(1 - sums.sum() / (len(found) * size))


def test_pieces_that_fit_together_share_a_sample() -> None:
    found = packed([9, 3, 7, 5], 10)  # 8 + 2 and 6 + 4 predictions
    assert found.sample_offsets.tolist() == [0, 2, 4] and found.padding == 0
    assert found.starts.tolist() == [0, 9, 12, 19]


def test_a_document_that_is_too_long_is_cut_and_goes_on_where_it_was() -> None:
    found = packed([26], 10)
    pieces = sorted(zip(found.starts.tolist(), found.lengths.tolist(), strict=True))
    assert pieces == [(0, 10), (10, 10), (20, 5)]


def test_samples_do_not_reach_across_windows() -> None:
    found = packed([3] * (PACKING_WINDOW + 1), 1000)
    holding = [
        {int(b) // 3 // PACKING_WINDOW for b in found.starts[a:b]}
        for a, b in zip(found.sample_offsets, found.sample_offsets[1:], strict=False)
    ]
    assert all(len(windows) == 1 for windows in holding)
    assert holding[0] == {0} and holding[-1] == {1}


def test_nothing_to_pack() -> None:
    assert len(packed([1, 1], 10)) == 0 and packed([1], 10).padding == 0
