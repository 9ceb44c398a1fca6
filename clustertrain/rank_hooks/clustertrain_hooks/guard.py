"""Failures of hooks: said once, and never the program's."""

from __future__ import annotations

import functools
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # importing typing takes milliseconds in every Python process
    from typing import Any, Callable

_TRAINER_LOSS = "the Trainer neither stops at an agreed step nor resumes by itself"
# By module of this package: the packages that it hooks, and what the program lacks without it.
_HOOKED = {
    "torch_steps": (("torch",), "steps are not tracked"),
    "torch_data": (("torch",), "waits for data are not tracked, and the scheduler's SIGTERM ends the loader's workers"),
    "torch_checkpoints": (("torch",), "checkpoints of torch.distributed.checkpoint are not tracked"),
    "transformers_trainer": (("transformers",), _TRAINER_LOSS),
    "lightning_trainer": (("lightning", "pytorch_lightning"), _TRAINER_LOSS),
    "torchtitan_checkpoints": (("torchtitan",), "torchtitan does not save when the run has to stop"),
    "fabric_states": (("lightning", "lightning_fabric"), "checkpoints of Fabric are not tracked"),
    "accelerate_states": (("accelerate",), "checkpoints of save_state are not tracked"),
}


def guarded(
    function: Callable[..., Any], *, hook: str = "", on_failure: Callable[..., object] | None = None
) -> Callable[..., Any]:
    """Return ``function`` such that an error is printed, returns None, and makes later calls do nothing.

    Args:
        hook: full name of the function that is reported; by default that of ``function``.
        on_failure: called with the arguments of the call that failed.
    """
    failed = False

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal failed
        if failed:
            return None
        try:
            return function(*args, **kwargs)
        except Exception as e:
            failed = True
            _report(hook or f"{function.__module__}.{function.__name__}", e)
        if on_failure is not None:
            guarded(on_failure)(*args, **kwargs)
        return None

    return call


def _report(hook: str, error: Exception) -> None:
    """Print what does not work, and what the program lacks for it."""
    import os
    import re
    import traceback

    module, _, function = hook.rpartition(".")
    packages, loss = _HOOKED.get(module.rpartition(".")[2], ((), "the program continues"))
    package = next((p for p in packages if p in sys.modules), "")
    # A module is hooked before Python has marked its import as done.
    reason = re.sub(r"^partially initialized (module '[^']*').* (has no attribute '\w+').*", r"\1 \2", str(error))
    frame = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{os.path.basename(frame.filename)}, line {frame.lineno}"
    what = f"the hooks for {package}{_find_version(package)} do" if package else f"hook {function} does"
    print(
        f"clustertrain: {what} not work ({type(error).__name__}: {reason}, {where}): {loss}; signals still work",
        file=sys.stderr, flush=True,
    )  # fmt: skip


def _find_version(package: str) -> str:
    """Return the version of an imported package after a space; empty if it has none."""
    import importlib.metadata

    version = getattr(sys.modules[package], "__version__", "")
    if not version:
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return ""
    return f" {version}"
