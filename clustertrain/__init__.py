"""clustertrain: submit, survive and see PyTorch training runs on Slurm clusters.

``import clustertrain as ct; ct.session()`` is the API for training scripts. Importing the package costs nothing: torch
is imported when a session is opened.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from clustertrain import integrations
    from clustertrain.rank_hooks.clustertrain_hooks.attach import Job, attach
    from clustertrain.train.models.contrastive import ContrastiveLoss
    from clustertrain.train.session.session import Session, session
    from clustertrain.train.stability.clipping import Clipping

__version__ = "0.1.0"
__all__ = ["Clipping", "ContrastiveLoss", "Job", "Session", "__version__", "attach", "integrations", "session"]


def __getattr__(name: str) -> object:
    if name in ("Job", "attach"):
        return getattr(import_hooks("attach"), name)
    if name == "integrations":
        return importlib.import_module("clustertrain.integrations")
    if name in __all__:
        # Not at the top: `clustertrain --help`, `submit` and `status` must not import torch.
        from clustertrain import extras

        extras.require("torch", f"clustertrain.{name}")
        if name == "Clipping":
            from clustertrain.train.stability import clipping

            return clipping.Clipping
        if name == "ContrastiveLoss":
            from clustertrain.train.models import contrastive

            return contrastive.ContrastiveLoss
        from clustertrain.train.session import session

        return getattr(session, name)
    raise AttributeError(f"module 'clustertrain' has no attribute {name!r}")


def import_hooks(name: str) -> ModuleType:
    """Import a module of ``clustertrain_hooks`` from where the ranks of a command find it, so that it exists once."""
    folder = str(Path(__file__).with_name("rank_hooks"))
    if folder not in sys.path:
        sys.path.append(folder)
    return importlib.import_module(f"clustertrain_hooks.{name}")
