"""What clustertrain does inside the ranks of a command: hooks on public functions of the frameworks that it imports.

This package runs in the program's own Python, which may be 3.9 or newer and has no clustertrain: it uses only the
standard library, and does nothing until the program imports one of the frameworks. A hook that fails says so once and
is not called again; it never ends the program.
"""

from __future__ import annotations

from . import on_import, scheduler_signal
from .rank import find_rank

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

# The module after whose import a hook is installed, and the function that installs it.
_HOOKS = {
    "torch.optim.optimizer": "torch_steps.install",
    "torch.utils.data.dataloader": "torch_data.install",
    "torch.distributed.checkpoint.state_dict": "torch_steps.install_initialization",
    "torch.distributed.checkpoint.state_dict_saver": "torch_checkpoints.install_save",
    "torch.distributed.checkpoint.state_dict_loader": "torch_checkpoints.install_load",
    "transformers.trainer": "transformers_trainer.install",
    "lightning.pytorch.trainer.trainer": "lightning_trainer.install",
    "pytorch_lightning.trainer.trainer": "lightning_trainer.install",
    "torchtitan.components.checkpoint": "torchtitan_checkpoints.install",
    "torchtitan.components.checkpointer.base": "torchtitan_checkpoints.install",
    "lightning.fabric.fabric": "fabric_states.install",
    "lightning_fabric.fabric": "fabric_states.install",
    "accelerate.accelerator": "accelerate_states.install",
}


def install(environ: Mapping[str, str]) -> None:
    """Hook the frameworks when this process imports them, if the environment is that of a rank."""
    if find_rank(environ) is not None:
        scheduler_signal.survive(environ)
        on_import.install({module: f"{__name__}.{function}" for module, function in _HOOKS.items()})
