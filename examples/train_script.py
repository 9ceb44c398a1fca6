"""Example script: a small network learns which arm of a spiral a point belongs to.

clustertrain submit --gpus 2 train_script.py --steps 400      # or without a launcher:
python train_script.py --steps 400 --checkpoint-dir /tmp/spiral
"""

import argparse
import math

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import clustertrain as ct


class Spiral(Dataset):
    """A spiral of two arms. Sample i is a point and its arm, always the same."""

    def __init__(self, size: int) -> None:
        generator = torch.Generator().manual_seed(7)
        turn = torch.rand(size, generator=generator) * 1.5 * math.pi
        self.label = torch.arange(size) % 2
        angle = turn + self.label * math.pi
        self.point = torch.stack((turn * angle.cos(), turn * angle.sin()), dim=1) / 4

    def __len__(self) -> int:
        return len(self.label)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.point[i], self.label[i]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--batch", type=int, default=256, help="samples per step, over all ranks")
    parser.add_argument("--checkpoint-every", type=int, default=100)
    parser.add_argument("--checkpoint-dir", help="only needed outside clustertrain submit")
    args = parser.parse_args()

    with ct.session(checkpoint_dir=args.checkpoint_dir) as session:
        network = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
        model = session.parallelize(network)
        optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
        data = session.loader(Spiral(4096), global_batch=args.batch)
        state = {"model": model, "optimizer": optimizer, "data": data}
        for step in session.steps(args.steps, state, checkpoint_every=args.checkpoint_every):
            point, label = next(data)
            loss = F.cross_entropy(model(point), label)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            session.log(loss=session.mean(loss))
            if session.is_main and step % 50 == 0:
                print(f"step {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
