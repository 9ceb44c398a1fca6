"""Training data for runs that a test disturbs, copied beside their recipe by ``tests/runs.py``.

A step takes at least PACE_S, and hardly any CPU time. At full speed, a run needs a core and many more steps to last
until the disturbance.
"""

import os
import time

import torch
from torch.utils.data import Dataset

PACE_S = 0.1
GLOBAL_BATCH = 16  # of the recipe in tests/runs.py


class PacedText(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """``size`` samples of ``seq_len`` tokens: (tokens, next tokens)."""

    vocab_size = 256

    def __init__(self, size: int, seq_len: int) -> None:
        self._size = size
        self._positions = torch.arange(seq_len + 1)
        self._sleep_s = PACE_S * int(os.environ["WORLD_SIZE"]) / GLOBAL_BATCH

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        time.sleep(self._sleep_s)
        tokens = self._positions * (i % 11 + 1) % 251
        return tokens[:-1], tokens[1:]
