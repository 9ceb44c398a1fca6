"""torchao's 8-bit AdamW with plain tensors as state, for checkpoints, and a float learning rate, for schedules."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torchao.optim import AdamW8bit as _AdamW8bit
from torchao.optim.subclass_8bit import OptimState8bit

_SIGNED = {"exp_avg": True, "exp_avg_sq": False}
_CODES, _SCALE = "codes", "scale"


class AdamW8bit(_AdamW8bit):
    """AdamW with 8-bit moments.

    A moment of a parameter with at least 4096 elements, divisible into blocks of 256, is ``{"codes", "scale"}``: uint8
    in the parameter's shape and one fp32 scale per block. Other moments are fp32.
    """

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        self.param_groups[-1]["lr"] = float(self.param_groups[-1]["lr"])

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        # torch.compile takes 20 s per parameter shape and gains nothing on the CPU.
        on_cpu = all(p.device.type == "cpu" for g in self.param_groups for p in g["params"])
        with self._torchao_state(), torch.compiler.set_stance("force_eager") if on_cpu else nullcontext():
            return super().step(closure)  # type: ignore[no-untyped-call]

    @contextmanager
    def _torchao_state(self) -> Iterator[None]:
        for group in self.param_groups:
            group["lr"] = torch.tensor(group["lr"], dtype=torch.float32)
        for p, state in self.state.items():
            for name, signed in _SIGNED.items():
                if isinstance(state.get(name), dict):
                    state[name] = _to_torchao_state(state[name], signed, p)
        try:
            yield
        finally:
            for group in self.param_groups:
                group["lr"] = float(group["lr"])
            for state in self.state.values():
                for name in _SIGNED:
                    if isinstance(state.get(name), OptimState8bit):
                        state[name] = {_CODES: state[name].codes, _SCALE: state[name].scale}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for state in self.state.values():
            for name in _SIGNED:
                if isinstance(state.get(name), dict):  # torch has cast the state to the parameter's dtype
                    state[name][_CODES] = state[name][_CODES].to(torch.uint8)


def _to_torchao_state(moment: dict[str, torch.Tensor], signed: bool, p: torch.Tensor) -> OptimState8bit:
    qmap = _quantization_map(signed, p.device)
    return OptimState8bit(moment[_CODES], moment[_SCALE], qmap, signed, dtype=p.dtype)


@functools.cache
def _quantization_map(signed: bool, device: torch.device) -> torch.Tensor:
    """Return torchao's map, (256,) on ``device``. Each copy of it to a GPU makes the host wait."""
    qmap: torch.Tensor = OptimState8bit.zeros((1,), signed, 1, device).qmap
    return qmap
