"""Example script: LoRA adapters teach a transformers model of Python source the English of Python's reference manual.

The base is a finished run of text.toml, or any byte-level causal language model that transformers can load:

clustertrain submit --wait text.toml
clustertrain checkpoint export latest --output base
clustertrain submit --gpus 2 adapt_script.py --base base       # or without a launcher:
python adapt_script.py --base base --checkpoint-dir /tmp/adapt
"""

import argparse
import sysconfig
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F
from torch.utils.data import Dataset
from transformers import AutoConfig, AutoModelForCausalLM

import clustertrain as ct

LENGTH = 128


class Manual(Dataset):
    """Windows of a text: sample i is (bytes, the next byte of each), both (LENGTH,)."""

    def __init__(self, text: bytes) -> None:
        self.text = np.frombuffer(text, dtype=np.uint8)

    def __len__(self) -> int:
        return (len(self.text) - 1) // LENGTH

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        window = torch.from_numpy(self.text[i * LENGTH : (i + 1) * LENGTH + 1].astype(np.int64))
        return window[:-1], window[1:]


def next_byte_loss(output: object, target: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return the sum over bytes and their number, so that the mean does not depend on how a batch is split."""
    return F.cross_entropy(output.logits.flatten(0, 1), target.flatten(), reduction="sum"), target.numel()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--base", required=True, help="folder of the model to adapt")
    parser.add_argument("--adapter", default="", help="folder of an adapter to start from")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--checkpoint-every", type=int, default=100)
    parser.add_argument("--checkpoint-dir", help="only needed outside clustertrain submit")
    args = parser.parse_args()

    text = (Path(sysconfig.get_paths()["stdlib"]) / "pydoc_data" / "topics.py").read_bytes()
    training, held_out = Manual(text[: -32 << 10]), Manual(text[-32 << 10 :])

    with ct.session(checkpoint_dir=args.checkpoint_dir) as session:
        with torch.device("meta"):  # no memory: each rank reads only its own part of the weights
            config = AutoConfig.from_pretrained(args.base, use_cache=False)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        session.load_pretrained(model, args.base)
        session.add_adapters(model, ["*.self_attn", "*.mlp"], rank=8, alpha=16.0, init=args.adapter)
        model = session.parallelize(model.train())
        optimizer = session.optimizer(torch.optim.AdamW, lr=args.lr, betas=(0.9, 0.95), weight_decay=0.0)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps, eta_min=args.lr / 10)
        data = session.loader(training, global_batch=16, micro_batch=8)
        session.tokens_per_step = 16 * LENGTH
        state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "data": data}
        for step in session.steps(args.steps, state, checkpoint_every=args.checkpoint_every):
            if step % 100 == 0:
                report(session, held_out, step)
            result = session.train_step(next(data), next_byte_loss, clip_norm=1.0)
            scheduler.step()
            session.log(loss=result.loss, grad_norm=result.grad_norm, lr=scheduler.get_last_lr()[0])
        report(session, held_out, args.steps)


def report(session: ct.Session, held_out: Manual, step: int) -> None:
    """Print the loss on held-out text."""
    metrics = session.evaluate(held_out, next_byte_loss, samples=256)
    if session.is_main and metrics:
        print(f"step {step}: {metrics['validation_loss']:.3f} nats per byte on held-out text", flush=True)


if __name__ == "__main__":
    main()
