"""Check that a user's script can drive a layout, since some need ``session.train_step``."""

from __future__ import annotations

import ast
import sys

from clustertrain.errors import ConfigError
from clustertrain.plan.layout import Layout

# Libraries that do not call clustertrain. Any other import may be the user's code, which may drive the step.
_KNOWN_LIBRARIES = frozenset({
    "clustertrain", "datasets", "einops", "matplotlib", "numpy", "pandas", "safetensors", "scipy", "tiktoken",
    "tokenizers", "torch", "torchaudio", "torchvision", "tqdm", "transformers", "wandb", "webdataset",
})  # fmt: skip
_DYNAMIC_IMPORTS = frozenset({"importlib", "runpy"})


def train_step_requirements(layout: Layout, precision: str) -> list[str]:
    """Return the features of the plan that need ``session.train_step``, each with its reason."""
    return [
        reason
        for needed, reason in (
            (layout.pp > 1, f"pp {layout.pp}: forward and backward passes of the stages alternate"),
            (layout.tp > 1, f"tp {layout.tp}: the logits, and thus the loss, may be split over the ranks"),
            (layout.zero1, "zero1: the optimizer is split over the ranks"),
            (layout.cp > 1, f"cp {layout.cp}: each rank processes a part of every sequence"),
            (precision == "fp16", "precision fp16: the loss is scaled"),
        )
        if needed
    ]


def uses_train_step(source: str) -> bool | None:
    """Return whether the script ``source`` mentions ``.train_step``; None if this file alone cannot tell."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):  # written for another Python version, or not text
        return None
    nodes = list(ast.walk(tree))
    if any(
        getattr(node, "attr", None) == "train_step" or getattr(node, "value", None) == "train_step" for node in nodes
    ):
        return True
    if any(isinstance(node, ast.Name) and node.id in ("exec", "__import__") for node in nodes):
        return None
    return None if _imported_modules(nodes) - (sys.stdlib_module_names - _DYNAMIC_IMPORTS) - _KNOWN_LIBRARIES else False


def _imported_modules(nodes: list[ast.AST]) -> set[str]:
    """Return the top-level names of the imported modules; an empty name for relative imports."""
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {"" if n.level else n.module or "" for n in nodes if isinstance(n, ast.ImportFrom)}
    return {name.partition(".")[0] for name in names}


def check_script(layout: Layout, precision: str, source: str, name: str) -> str | None:
    """Return a note if it is unknown whether the script ``name`` can drive the plan; otherwise None.

    Raises:
        ConfigError: the script cannot drive the plan.
    """
    requirements = train_step_requirements(layout, precision)
    uses = uses_train_step(source) if requirements else True
    if uses:
        return None
    reasons = "; ".join(requirements)
    if uses is None:
        return f"{name} imports other modules, so it is unknown whether it calls session.train_step: {reasons}"
    raise ConfigError(
        f"{name} does not call session.train_step, which this plan needs: {reasons}",
        fix="create the optimizer with session.optimizer(cls, ...) and call session.train_step(batch, loss_fn) in each "
        "step, or remove these options",
    )
