"""Statistics per layer in selected steps: norms of gradients and weights, update ratios, activations, and the shares of
dead and saturated outputs.

A unit is an element of an outermost module list (``layers.0``) or a top-level module outside of one (``embed``). In
every layout, one collective sums the values of all ranks. In other steps, nothing is attached to the model.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from clustertrain import clock, reading
from clustertrain.checkpoint.core.state_dict import all_stage_fqns, clean_fqn, is_dtensor, model_parts
from clustertrain.train.core.async_copy import AsyncCopy
from clustertrain.train.core.context import RankContext
from clustertrain.train.distributed import grad_norm

log = logging.getLogger(__name__)

MAX_SAMPLED_ELEMENTS = 1 << 16  # elements per parameter saved across an update; a copy of all weights might not fit
_RELU_TYPES = (nn.ReLU, nn.ReLU6)
_BOUNDS: dict[type[nn.Module], tuple[float, float]] = {nn.Sigmoid: (0.0, 1.0), nn.Tanh: (-1.0, 1.0)}
SATURATED_MARGIN = 0.01  # of the range of a sigmoid or tanh: an output this close to a bound passes almost no gradient
_GRADIENT, _WEIGHT, _UPDATE, _SAMPLED_WEIGHT, _ACTIVATION, _COUNT = range(6)


def find_unit_name(name: str) -> str:
    """Return the unit of a parameter or module: its name up to the first number, or its first part."""
    match = re.match(r"(?:.*?\.)?\d+(?=\.|$)", name)
    return match[0] if match else name.partition(".")[0]


class LayerStats:
    """Collector of layer statistics.

    With ``parallel.compile``, it omits activations, because hooks would force recompilation. Frozen matrices in 8 or 4
    bits are not among the weights.
    """

    def __init__(self, model: nn.Module, context: RankContext) -> None:
        self._model = model
        self._context = context
        modules = [(clean_fqn(n), m) for part in model_parts(model) for n, m in part.named_modules()]
        params = [(clean_fqn(n), p) for part in model_parts(model) for n, p in part.named_parameters()]
        names = all_stage_fqns(model) or {n for n, _ in params}
        self._params = [(n, p) for n, p in params if p.is_floating_point()]
        self.units = sorted({find_unit_name(n) for n in names}, key=_natural_sort_key)
        self._counted_elsewhere = getattr(model, "counted_elsewhere", ())
        self._hooked_modules = [] if context.parallel.compile else [(n, m) for n, m in modules if n in self.units]
        self._relus = [] if context.parallel.compile else [(n, m) for n, m in modules if isinstance(m, _RELU_TYPES)]
        self._bounded = [] if context.parallel.compile else [(n, m) for n, m in modules if type(m) in _BOUNDS]
        self._sums = torch.zeros(0)
        self._active_units: dict[str, torch.Tensor] = {}
        self._saturations: dict[str, torch.Tensor] = {}  # (saturated outputs, outputs)
        self._weight_samples: list[torch.Tensor] = []
        self._elapsed_s = 0.0
        if context.parallel.compile and context.rank == 0:
            log.info("parallel.compile: layer statistics omit activations")

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Collect activations during the forward and backward pass inside the block."""
        self._elapsed_s = 0.0
        self._sums = torch.zeros(len(self.units), 6, dtype=torch.float64, device=self._context.device)
        self._active_units, self._saturations = {}, {}
        handles = [
            m.register_forward_hook(self._build_activation_hook(self.units.index(n))) for n, m in self._hooked_modules
        ]
        handles += [m.register_forward_hook(self._build_dead_unit_hook(n)) for n, m in self._relus]
        handles += [
            m.register_forward_hook(self._build_saturation_hook(n, *_BOUNDS[type(m)])) for n, m in self._bounded
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _build_activation_hook(self, unit: int) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            tensor = _first_tensor(output)
            if tensor is not None:
                abs_sum = torch.linalg.vector_norm(tensor, 1, dtype=torch.float32).double()
                self._sums[unit, _ACTIVATION] += abs_sum.to(self._sums.device)
                self._sums[unit, _COUNT] += tensor.numel()

        return hook

    def _build_dead_unit_hook(self, name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            tensor = _first_tensor(output)
            if tensor is not None and tensor.dim() > 1:
                # Images are (batch, features, …); otherwise the features are the last dimension.
                feature_dim = 1 if tensor.dim() > 3 else tensor.dim() - 1
                active = (tensor > 0).any(dim=[d for d in range(tensor.dim()) if d != feature_dim])
                self._active_units[name] = self._active_units[name] | active if name in self._active_units else active

        return hook

    def _build_saturation_hook(self, name: str, low: float, high: float) -> Any:
        margin = SATURATED_MARGIN * (high - low)

        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            tensor = _first_tensor(output)
            if tensor is not None:
                saturated = ((tensor < low + margin) | (tensor > high - margin)).sum().double()
                counts = torch.stack([saturated, torch.full_like(saturated, tensor.numel())])
                self._saturations[name] = self._saturations[name] + counts if name in self._saturations else counts

        return hook

    def before_update(self, factor: torch.Tensor) -> None:
        """Collect gradients and weights after the backward pass.

        Args:
            factor: factor by which the update multiplies the gradients, excluding clipping.
        """
        started = clock.monotonic()
        self._weight_samples = []
        for unit, p, ranks in self._local_params():
            if p.grad is not None:
                square = _squared_norm(_to_local(p.grad)).to(factor.device) * factor.double().square()
                self._sums[unit, _GRADIENT] += square / ranks
            self._sums[unit, _WEIGHT] += _squared_norm(_to_local(p)).to(factor.device) / ranks
            self._weight_samples.append(_sample_elements(_to_local(p)).clone())
        self._elapsed_s += clock.monotonic() - started

    def after_update(self) -> AsyncCopy:
        """Return the columns of the metrics row. Collective."""
        started = clock.monotonic()
        device = self._sums.device
        for (unit, p, ranks), previous in zip(self._local_params(), self._weight_samples, strict=True):
            self._sums[unit, _UPDATE] += _squared_norm(_sample_elements(_to_local(p)) - previous).to(device) / ranks
            self._sums[unit, _SAMPLED_WEIGHT] += _squared_norm(previous).to(device) / ranks
        self._weight_samples = []
        relus = self._relu_names
        dead = torch.zeros(len(relus), 2, dtype=torch.float64, device=device)
        for name, active in self._active_units.items():
            dead[relus.index(name), 0] += (~active).sum().to(device)
            dead[relus.index(name), 1] += active.numel()
        saturated = torch.zeros(len(self._bounded_names), 2, dtype=torch.float64, device=device)
        for name, counts in self._saturations.items():
            saturated[self._bounded_names.index(name)] += counts.to(device)
        packed = torch.cat([self._sums.flatten(), dead.flatten(), saturated.flatten()])
        if dist.is_initialized():
            dist.all_reduce(packed)
        columns = self._build_columns(packed, relus, self._bounded_names)
        self._elapsed_s += clock.monotonic() - started
        return columns

    def _build_columns(self, packed: torch.Tensor, relus: list[str], bounded: list[str]) -> AsyncCopy:
        unit_sums = packed[: 6 * len(self.units)].view(-1, 6)
        counts = packed[6 * len(self.units) :].view(-1, 2)  # of dead units by ReLU, then of saturated outputs
        table = {
            "grad_norm": unit_sums[:, _GRADIENT].sqrt(),
            "weight_norm": unit_sums[:, _WEIGHT].sqrt(),
            "update_ratio": (unit_sums[:, _UPDATE] / unit_sums[:, _SAMPLED_WEIGHT]).sqrt(),
        }
        names = [f"{stat}/{unit}" for stat in table for unit in self.units]
        values = torch.cat([*table.values()])
        names += [f"activation/{n}" for n in self._activation_names] + [f"dead/{n}" for n in relus]
        names += [f"saturated/{n}" for n in bounded]
        rows = unit_sums[self._activation_units]
        values = torch.cat([values, rows[:, _ACTIVATION] / rows[:, _COUNT], counts[:, 0] / counts[:, 1]])
        return AsyncCopy(names, values)

    def _local_params(self) -> Iterator[tuple[int, nn.Parameter, int]]:
        """Yield this rank's parameters as (unit, parameter, number of ranks with the same shard)."""
        for name, p in self._params:
            if id(p) not in self._counted_elsewhere:
                yield self.units.index(find_unit_name(name)), p, grad_norm.replica_count(p, self._context.layout.pp)

    @functools.cached_property
    def _activation_names(self) -> list[str]:
        return self._gather_from_stages([n for n, _ in self._hooked_modules])

    @functools.cached_property
    def _activation_units(self) -> torch.Tensor:
        """Indices of the units with activations, on the device: the host would wait for a copy of an index from it."""
        return torch.tensor(
            [self.units.index(n) for n in self._activation_names], device=self._context.device, dtype=torch.long
        )

    @functools.cached_property
    def _relu_names(self) -> list[str]:
        return self._gather_from_stages([n for n, _ in self._relus])

    @functools.cached_property
    def _bounded_names(self) -> list[str]:
        return self._gather_from_stages([n for n, _ in self._bounded])

    def _gather_from_stages(self, local_names: Iterable[str]) -> list[str]:
        """Return the sorted names from all pipeline stages. Collective."""
        if self._context.layout.pp == 1:
            return sorted(local_names, key=_natural_sort_key)
        gathered: list[list[str]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(gathered, list(local_names))
        return sorted({n for names in gathered for n in names}, key=_natural_sort_key)


def _natural_sort_key(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if reading.is_unsigned_int(part) else (-1, part) for part in name.split(".")]


def _to_local(t: Any) -> torch.Tensor:
    t = t.detach()
    local: torch.Tensor = t.to_local() if is_dtensor(t) else t
    return local


def _squared_norm(t: torch.Tensor) -> torch.Tensor:
    norm: torch.Tensor = torch.linalg.vector_norm(t, dtype=torch.float32)
    return norm.double().square()


def _sample_elements(t: torch.Tensor) -> torch.Tensor:
    """Return evenly spaced elements of a tensor, at most :data:`MAX_SAMPLED_ELEMENTS`."""
    flat = t.reshape(-1)
    return flat[:: max(1, -(-flat.numel() // MAX_SAMPLED_ELEMENTS))]


def _first_tensor(output: Any) -> torch.Tensor | None:
    if isinstance(output, (tuple, list)):
        output = output[0] if output else None
    if not isinstance(output, torch.Tensor) or not output.is_floating_point():
        return None
    return _to_local(output)
