"""Packing of documents into samples of one length."""

from __future__ import annotations

import numpy as np
import pytest

from clustertrain.train.data.packing import PACKING_WINDOW, Packing, pack


def pack_lengths(lengths: list[int], size: int) -> Packing:
    """Pack consecutive documents of ``lengths`` tokens."""
    counts = np.array(lengths, dtype=np.int64)
    return pack(np.cumsum(counts) - counts, counts, size)


def target_tokens(packing: Packing) -> list[int]:
    """Return the positions of all target tokens, sorted."""
    return sorted(int(b) + 1 + i for b, n in zip(packing.starts, packing.lengths, strict=True) for i in range(int(n)))


@pytest.mark.parametrize("size", [1, 5, 16, 100])
def test_each_token_after_the_first_is_predicted_once(size: int) -> None:
    random = np.random.default_rng(0)
    lengths = [*random.integers(0, 60, 300).tolist(), 1, 2, 0]
    packed = pack_lengths(lengths, size)
    firsts = {int(b) for b, n in zip(np.cumsum(lengths) - lengths, lengths, strict=True) if n}
    assert target_tokens(packed) == sorted(set(range(sum(lengths))) - firsts)
    sums = np.add.reduceat(packed.lengths, packed.sample_offsets[:-1])
    assert sums.max() <= size and packed.padding == pytest.approx(1 - sums.sum() / (len(packed) * size))


def test_fitting_chunks_share_a_sample() -> None:
    packed = pack_lengths([9, 3, 7, 5], 10)  # 8 + 2 and 6 + 4 predictions
    assert packed.sample_offsets.tolist() == [0, 2, 4] and packed.padding == 0
    assert packed.starts.tolist() == [0, 9, 12, 19]


def test_long_document_is_split_into_contiguous_chunks() -> None:
    packed = pack_lengths([26], 10)
    pieces = sorted(zip(packed.starts.tolist(), packed.lengths.tolist(), strict=True))
    assert pieces == [(0, 10), (10, 10), (20, 5)]


def test_samples_stay_within_packing_windows() -> None:
    packed = pack_lengths([3] * (PACKING_WINDOW + 1), 1000)
    windows_of_samples = [
        {int(b) // 3 // PACKING_WINDOW for b in packed.starts[a:b]}
        for a, b in zip(packed.sample_offsets, packed.sample_offsets[1:], strict=False)
    ]
    assert all(len(windows) == 1 for windows in windows_of_samples)
    assert windows_of_samples[0] == {0} and windows_of_samples[-1] == {1}


def test_documents_without_predictions_pack_to_nothing() -> None:
    assert len(pack_lengths([1, 1], 10)) == 0 and pack_lengths([1], 10).padding == 0
