"""The compiler of the layers: torch's inductor, which can be made tolerant of failures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


class TolerantInductor:
    """torch's compiler. While it is ``tolerant`` it does not fail: what it cannot compile runs as written, so that
    the other ranks meet this one in all that they send. ``first_error`` has the first reason."""

    def __init__(self) -> None:
        self.first_error: Exception | None = None
        self._tolerant = False

    @contextmanager
    def tolerant(self) -> Iterator[None]:
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
            # With its backward pass, which would be compiled when it is reached.
            with config.patch(force_non_lazy_backward_lowering=True):
                return compiler(graph, inputs)
        except Exception as e:  # of the compiler's many
            self.first_error = self.first_error or e
            return graph.forward


inductor = TolerantInductor()  # one for all layers: dynamo compiles anew for another one
