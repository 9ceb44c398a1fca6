"""A session of one process for the trainer's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import clustertrain as ct


@pytest.fixture
def session() -> Iterator[ct.Session]:
    """An open session on the CPU, after which the threads and random numbers of the process are restored."""
    threads, generator = torch.get_num_threads(), torch.get_rng_state()
    with ct.session(device="cpu") as opened:
        yield opened
    torch.set_num_threads(threads)
    torch.set_rng_state(generator)
