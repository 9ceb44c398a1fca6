from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import clustertrain as ct
from clustertrain.train.core import seeds


@pytest.fixture
def restore_torch_state(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    threads, generator = torch.get_num_threads(), torch.get_rng_state()
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", False)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)
    torch.set_rng_state(generator)


def test_deterministic_mode_raises_without_algorithm(restore_torch_state: None) -> None:
    values = torch.ones(4, requires_grad=True)
    torch.put(torch.zeros(4), torch.tensor([0, 0]), torch.ones(2), accumulate=False)
    seeds.enable_determinism()
    assert torch.backends.cudnn.deterministic
    with pytest.raises(RuntimeError, match="deterministic"):
        torch.put(values.detach(), torch.tensor([0, 0]), torch.ones(2), accumulate=False)


def test_session_keeps_determinism_chosen_by_script(restore_torch_state: None) -> None:
    with ct.session(device="cpu"):
        assert not torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    with ct.session(device="cpu"):
        assert torch.are_deterministic_algorithms_enabled()
