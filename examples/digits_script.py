"""Example script: a convolutional network learns scikit-learn's handwritten digits.

clustertrain submit --gpus 2 digits_script.py --steps 300     # or without a launcher:
python digits_script.py --steps 300 --checkpoint-dir /tmp/digits
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Subset, TensorDataset

import clustertrain as ct


def load_dataset() -> TensorDataset:
    """Return the digits: sample i is (image (1, 8, 8) from 0 to 1, class)."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    return TensorDataset(images, torch.tensor(digits.target))


def build_network() -> nn.Module:
    # Group norms use one image at a time; batch norms would mix the images that are on the same rank.
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1, stride=2), nn.GroupNorm(4, 64), nn.ReLU(),
        nn.Conv2d(64, 64, 3, padding=1), nn.GroupNorm(4, 64), nn.ReLU(),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(256, 10),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--checkpoint-every", type=int, default=100)
    parser.add_argument("--checkpoint-dir", help="only needed outside clustertrain submit")
    args = parser.parse_args()

    dataset = load_dataset()
    order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(0)).tolist()
    held_out, training = Subset(dataset, order[:360]), Subset(dataset, order[360:])

    with ct.session(checkpoint_dir=args.checkpoint_dir) as session:
        model = session.parallelize(build_network())
        optimizer = session.optimizer(torch.optim.AdamW, lr=args.lr)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=args.lr, total_steps=args.steps)
        data = session.loader(training, global_batch=64, micro_batch=16)
        state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "data": data}
        for step in session.steps(args.steps, state, checkpoint_every=args.checkpoint_every):
            result = session.train_step(next(data), F.cross_entropy, clip_norm=1.0)
            scheduler.step()
            session.log(loss=result.loss, grad_norm=result.grad_norm, lr=scheduler.get_last_lr()[0])
            if (step + 1) % 100 == 0:
                metrics = session.evaluate(held_out, F.cross_entropy, metrics=["accuracy"])
                session.log(**metrics)
                if session.is_main and metrics:
                    print(f"step {step + 1}: held-out accuracy {metrics['validation_accuracy']:.1%}")


if __name__ == "__main__":
    main()
