"""8-bit matmuls with torchao: inputs and weights in e4m3, gradients in e5m2, dynamic scaling per tensor.

Source for speed and accuracy: "FP8 Formats for Deep Learning", arXiv 2209.05433.
"""

from __future__ import annotations

import torch
from torch import nn

from clustertrain import extras
from clustertrain.errors import UnsuitableEnvironment
from clustertrain.train.distributed.data_parallel import repeated_layers

_MIN_CAPABILITY = (8, 9)  # Ada
_DIM_MULTIPLE = 16  # required divisor of both sizes of a weight in 8-bit matmuls


def apply(model: nn.Module, device: torch.device) -> None:
    """Convert the Linear layers of the repeated units of ``model`` to fp8 in place, keeping parameters and names.

    Embeddings, norms and the head stay in bf16, because 8 bits would cost the most accuracy there. On the CPU, fp8 is
    emulated and not faster.

    Raises:
        UnsuitableEnvironment: torchao is missing, or the GPU does not support 8-bit matmuls.
    """
    extras.require("torchao.float8", "train.precision = 'fp8'")
    if device.type == "cuda" and torch.version.hip is None:
        capability = torch.cuda.get_device_capability(device)
        if capability < _MIN_CAPABILITY:
            raise UnsuitableEnvironment(
                f"precision fp8: {torch.cuda.get_device_name(device)} has compute capability "
                f"{capability[0]}.{capability[1]}, and 8-bit matmuls need 8.9",
                fix="set train.precision = 'bf16'",
            )
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig(emulate=device.type == "cpu")
    for _, unit in repeated_layers(model):
        convert_to_float8_training(unit, config=config, module_filter_fn=_is_convertible)


def _is_convertible(module: nn.Module, name: str) -> bool:
    return isinstance(module, nn.Linear) and not (
        module.in_features % _DIM_MULTIPLE or module.out_features % _DIM_MULTIPLE
    )
