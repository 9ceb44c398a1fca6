"""clustertrain: submit, survive and see PyTorch training runs on Slurm clusters.

``import clustertrain as ct; ct.session()`` is the API for training scripts. Importing the package costs nothing: torch
is imported when a session is opened.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from clustertrain.train.session.session import Session, session
    from clustertrain.train.stability.clipping import Clipping

__version__ = "0.1.0"
__all__ = ["Clipping", "Session", "__version__", "session"]


def __getattr__(name: str) -> object:
    if name in __all__:
        # Not at the top: `clustertrain --help`, `submit` and `status` must not import torch.
        from clustertrain import extras

        extras.require("torch", f"clustertrain.{name}")
        if name == "Clipping":
            from clustertrain.train.stability import clipping

            return clipping.Clipping
        from clustertrain.train.session import session

        return getattr(session, name)
    raise AttributeError(f"module 'clustertrain' has no attribute {name!r}")
