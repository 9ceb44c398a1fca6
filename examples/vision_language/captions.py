"""The model and the data sets of this folder's recipes: images of handwritten digits with captions."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from clustertrain.config.model import ConvnetSpec, ModelSpec
from clustertrain.train.models.convnet import ConvNet
from clustertrain.train.models.decoder import Decoder

NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
LENGTH = 24  # bytes of the longest caption and its end
END = 10  # a newline starts and ends a caption
IGNORED = -100


def encode(digit: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a caption's bytes (LENGTH,) and the byte that follows each; IGNORED after the end."""
    text = f"{NAMES[digit]}, an odd digit" if digit % 2 else f"{NAMES[digit]}, an even digit"
    data = torch.tensor(list(text.encode()))
    tokens, targets = torch.full((LENGTH,), END), torch.full((LENGTH,), IGNORED)
    tokens[1 : len(data) + 1] = data
    targets[: len(data) + 1] = torch.cat([data, torch.tensor([END])])
    return tokens, targets


class Captions(Dataset):
    """Captions alone: sample i is (tokens, targets) of digit i % 10."""

    version = "captions 1"

    def __len__(self) -> int:
        return 640

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        return encode(i % 10)


class CaptionedDigits(Dataset):
    """Images with captions: sample i is ((image in bytes (8, 8, 1), tokens), targets)."""

    version = "scikit-learn's digits, captions 1"

    def __init__(self) -> None:
        digits = load_digits()
        self.images = torch.tensor(digits.images * (255 / 16)).round().to(torch.uint8)[..., None]
        self.digits = digits.target.tolist()

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, i: int) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
        tokens, targets = encode(self.digits[i])
        return (self.images[i], tokens), targets


class VisionLanguage(nn.Module):
    """A decoder that reads an image as a prefix of its text: four vectors, projected from an image tower's features.

    The sizes of both parts are those of the recipes that train them alone.
    """

    def __init__(self, tower: dict, decoder: dict) -> None:
        super().__init__()
        spec, text = ConvnetSpec(**{**tower, "blocks": tuple(tower["blocks"])}), ModelSpec(**decoder)
        features = spec.block_shapes()[-1][1]
        self.tower = ConvNet(spec)  # its head classifies, and is not used here
        self.projector = nn.Sequential(nn.Linear(features, text.dim), nn.GELU(), nn.Linear(text.dim, text.dim))
        self.decoder = Decoder(text)

    def forward(self, images: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        prefix = self.projector(self.see(images))
        logits = self.decoder(torch.cat([prefix, self.decoder.embed(tokens)], 1))
        return logits[:, prefix.shape[1] :].contiguous()

    def see(self, images: torch.Tensor) -> torch.Tensor:
        """Return the tower's features of four quarters of each image, (batch, 4, features)."""
        tower = self.tower
        x = images.permute(0, 3, 1, 2).to(tower.stem.weight.dtype) / 127.5 - 1
        x = F.relu(tower.stem_norm(tower.stem(x)))
        for block in tower.blocks:
            x = block(x)
        return F.adaptive_avg_pool2d(x, 2).flatten(2).transpose(1, 2)

    def init_parameter(self, name: str, tensor: torch.Tensor, generator: torch.Generator) -> None:
        part, _, inner = name.partition(".")
        if part != "projector":
            getattr(self, part).init_parameter(inner, tensor, generator)
        elif name.endswith("bias"):
            tensor.zero_()
        else:
            tensor.normal_(0.0, tensor.shape[1] ** -0.5, generator=generator)


@torch.no_grad()
def describe(model: nn.Module, images: torch.Tensor) -> list[str]:
    """Return the caption that the model gives each image: at each position, the most probable byte."""
    tokens = torch.full((len(images), LENGTH), END, device=images.device)
    for i in range(LENGTH - 1):
        tokens[:, i + 1] = model(images, tokens)[:, i].argmax(-1)
    return [bytes(row).split(b"\n")[1].decode(errors="replace") for row in tokens.tolist()]
