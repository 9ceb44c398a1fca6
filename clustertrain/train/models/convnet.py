"""A residual network for images: He et al., arXiv 1512.03385, section 4.2, with group norms.

Group norm (Wu and He, arXiv 1803.08494) normalizes each image separately. Batch norm would mix the images of a
micro-batch, and results would depend on how the global batch is split into micro-batches and over ranks.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from clustertrain.config.model import ConvnetSpec


class Convolution(nn.Conv2d):
    """Padded 3 x 3 or 1 x 1 convolution without bias, computed in the channels-last format.

    The weight is converted in each forward pass rather than stored in that format, because ``fully_shard`` rejects
    parameters that are not contiguous. The copy is small compared to the activations.
    """

    def __init__(self, inputs: int, outputs: int, size: int = 3, stride: int = 1) -> None:
        super().__init__(inputs, outputs, size, stride=stride, padding=size // 2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight.contiguous(memory_format=torch.channels_last)
        return F.conv2d(x, weight, None, self.stride, self.padding)


class Residual(nn.Module):
    """Two convolutions and a shortcut, which is a projection where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int, groups: int) -> None:
        super().__init__()
        self.conv1 = Convolution(inputs, outputs, stride=stride)
        self.norm1 = nn.GroupNorm(groups, outputs)
        self.conv2 = Convolution(outputs, outputs)
        self.last_norm = nn.GroupNorm(groups, outputs)
        # Modules rather than functions, so that hooks can count dead units.
        self.relu1, self.relu2 = nn.ReLU(), nn.ReLU()
        keeps_shape = stride == 1 and inputs == outputs
        self.project = None if keeps_shape else Convolution(inputs, outputs, size=1, stride=stride)
        self.project_norm = None if keeps_shape else nn.GroupNorm(groups, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shortcut = x
        if self.project is not None and self.project_norm is not None:
            shortcut = self.project_norm(self.project(x))
        y = self.relu1(self.norm1(self.conv1(x)))
        out: torch.Tensor = self.relu2(shortcut + self.last_norm(self.conv2(y)))
        return out


class ConvNet(nn.Module):
    """Classifier from images (batch, height, width, channels) in bytes to logits (batch, classes); any height and
    width.

    Bytes in that order are already channels-last, and their transfer to the device is a quarter of fp32's.
    """

    def __init__(self, spec: ConvnetSpec) -> None:
        super().__init__()
        self.stem = Convolution(spec.channels, spec.width)
        self.stem_norm = nn.GroupNorm(spec.groups, spec.width)
        self.blocks = nn.ModuleList(Residual(*shape, spec.groups) for shape in spec.block_shapes())
        self.head = nn.Linear(spec.block_shapes()[-1][1], spec.classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        # In a sharded layout, the weight has already been cast to the compute dtype.
        x = images.permute(0, 3, 1, 2).to(self.stem.weight.dtype) / 127.5 - 1
        x = F.relu(self.stem_norm(self.stem(x)))
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(x.mean(dim=(2, 3)))
        return logits

    def init_parameter(self, name: str, tensor: torch.Tensor, generator: torch.Generator) -> None:
        """Initialize the full parameter ``name``.

        Convolutions preserve the variance of gradients (He et al., arXiv 1502.01852, equation 14), blocks start as
        their shortcut (Goyal et al., arXiv 1706.02677, section 5.1), and a small head makes all classes about equally
        likely.
        """
        if name.endswith("bias"):
            tensor.zero_()
        elif name.endswith("norm.weight") or name.endswith("norm1.weight"):
            tensor.fill_(0.0 if name.endswith("last_norm.weight") else 1.0)
        elif name == "head.weight":
            tensor.normal_(0.0, 0.01, generator=generator)
        else:
            fan_out = tensor.shape[0] * tensor.shape[2] * tensor.shape[3]
            tensor.normal_(0.0, math.sqrt(2 / fan_out), generator=generator)
