"""The compiler backend for the layers: torch's inductor, optionally tolerant of failures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


class TolerantInductor:
    """torch's inductor backend, which can tolerate failures.

    While it is ``tolerant``, a graph that does not compile runs eagerly, so that this rank still takes part in all
    collectives.
    """

    def __init__(self) -> None:
        self.first_error: Exception | None = None
        """First failure since :meth:`tolerant` was entered."""
        self._tolerant = False

    @contextmanager
    def tolerant(self) -> Iterator[None]:
        """Run graphs eagerly that fail to compile inside the block."""
        self.first_error, self._tolerant = None, True
        try:
            yield
        finally:
            self._tolerant = False

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        compiler = torch._dynamo.lookup_backend("inductor")
        if not self._tolerant:
            return compiler(graph, inputs)
        from torch._functorch import config

        try:
            # Compile the backward pass too, which is otherwise compiled on first use.
            with config.patch(force_non_lazy_backward_lowering=True):
                return compiler(graph, inputs)
        except Exception as e:  # the compiler raises many types
            self.first_error = self.first_error or e
            return graph.forward


inductor = TolerantInductor()  # shared by all layers: dynamo recompiles for a different backend object
