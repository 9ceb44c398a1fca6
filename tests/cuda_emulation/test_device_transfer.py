"""Batches of every container that torch collates reach the device, from pinned memory."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch

from tests.cuda_emulation.process import run

pytestmark = [pytest.mark.ranks, pytest.mark.emulated]


class Pair(NamedTuple):
    inputs: Any
    target: Any


class Encoding(UserDict[str, Any]):
    """A mapping with an attribute beside its items, like a tokenizer's output."""

    n_sequences = 0


def _encoding() -> Encoding:
    encoding = Encoding(ids=torch.ones(3), name="a")
    encoding.n_sequences = 2
    return encoding


BATCHES: dict[str, Any] = {
    "list of tuples": lambda: [(torch.ones(3), 1)],
    "named tuple": lambda: Pair(torch.ones(3), {"label": torch.ones(2)}),
    "ordered dict": lambda: OrderedDict(x=torch.ones(3)),
    "mapping with attributes": _encoding,
    "read-only mapping": lambda: MappingProxyType({"x": torch.ones(3)}),
}


def _describe(value: Any) -> Any:
    """Return the containers and tensors' devices of ``value``."""
    if isinstance(value, torch.Tensor):
        return value.device.type, value.sum().item()
    if hasattr(value, "items"):
        return type(value).__name__, getattr(value, "n_sequences", None), {k: _describe(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [_describe(v) for v in value]
    return value


def _transfer(name: str) -> tuple[Any, Any, set[str]]:
    """Return the batch before and after its transfer, and the host's waits during it."""
    from clustertrain.train.data.prefetch import DeviceTransfer
    from tests.cuda_emulation.trace import Trace

    batch, trace = BATCHES[name](), Trace("sync")
    before = _describe(batch)
    trace.start()
    on_device = DeviceTransfer(torch.device("cuda", 0))(batch)
    trace.stop()
    assert _describe(batch) == before, "the transfer changed the batch"
    return before, _describe(on_device), {event.name for event in trace.events}


@pytest.mark.parametrize("name", BATCHES)
def test_tensors_of_container_reach_the_device(name: str) -> None:
    before, after, waits = run(_transfer, name)
    assert repr(after) == repr(before).replace("'cpu'", "'cuda'")
    assert waits <= {"allocation of pinned memory"}
