"""Example script: one stage of a vision-language model. The file `stages` runs all four.

clustertrain submit --gpus 2 script.py --stage tower
clustertrain checkpoint export latest --output weights/tower --names own
"""

import argparse
from pathlib import Path

import torch
from captions import IGNORED, CaptionedDigits, Captions, VisionLanguage, describe, encode
from torch.nn import functional as F
from torch.utils.data import Subset

import clustertrain as ct
from clustertrain.config.model import ConvnetSpec, ModelSpec
from clustertrain.train.models.convnet import ConvNet
from clustertrain.train.models.decoder import Decoder

TOWER = {"width": 16, "blocks": (1, 1), "groups": 4, "classes": 10, "channels": 1}
TEXT = {"dim": 64, "layers": 2, "heads": 4, "kv_heads": 4}
STEPS = {"tower": 200, "text": 100, "projector": 150, "whole": 120}
RATES = {"tower": 1e-2, "text": 3e-3, "projector": 1e-2, "whole": 1e-3}
FREEZE = {"projector": ["tower", "decoder"], "whole": ["tower.head"]}
UNFREEZE = {"whole": [(60, ["tower.stem", "tower.stem_norm", "tower.blocks"])]}


class ClassifiedDigits(CaptionedDigits):
    """Images with classes: sample i is (image, digit)."""

    version = "scikit-learn's digits"

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        return self.images[i], self.digits[i]


def build(session: ct.Session, stage: str, weights: Path) -> torch.nn.Module:
    """Return the model of the stage. ``parallelize`` loads the trained parts; each rank reads its share."""
    with torch.device("meta"):
        if stage == "tower":
            return ConvNet(ConvnetSpec(**TOWER))
        if stage == "text":
            return Decoder(ModelSpec(**TEXT))
        model = VisionLanguage(TOWER, TEXT)
    if stage == "whole":
        return session.load_pretrained(model, weights / "projector")
    session.load_pretrained(model.tower, weights / "tower")
    session.load_pretrained(model.decoder, weights / "text")
    return model


def loss(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum of the cross-entropy and the number of targets."""
    total = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="sum", ignore_index=IGNORED)
    return total, (targets != IGNORED).sum()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", choices=list(STEPS), required=True)
    parser.add_argument(
        "--weights", type=Path, default=Path("weights"), help="folder with the exports of earlier stages"
    )
    parser.add_argument("--steps", type=int, help="default: as many as the stage needs")
    parser.add_argument("--checkpoint-dir", help="only needed outside clustertrain submit")
    args = parser.parse_args()
    stage, steps = args.stage, args.steps or STEPS[args.stage]

    dataset = {"tower": ClassifiedDigits, "text": Captions}.get(stage, CaptionedDigits)()
    order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(0)).tolist()
    held_out, training = order[: len(order) // 5], Subset(dataset, order[len(order) // 5 :])

    with ct.session(checkpoint_dir=args.checkpoint_dir) as session:
        model = session.parallelize(
            build(session, stage, args.weights), freeze=FREEZE.get(stage, ()), unfreeze=UNFREEZE.get(stage, ())
        )
        optimizer = session.optimizer("adamw", lr=RATES[stage])
        data = session.loader(training, global_batch=64, micro_batch=16)
        state = {"model": model, "optimizer": optimizer, "data": data}
        for _ in session.steps(steps, state, checkpoint_every=50):
            result = session.train_step(next(data), loss, clip_norm=1.0)
            session.log(loss=result.loss, grad_norm=result.grad_norm)
        if stage in ("projector", "whole"):
            model.eval()
            images = torch.stack([dataset.images[i] for i in held_out]).to(session.device)
            expected = [bytes(encode(dataset.digits[i])[0].tolist()).decode().strip() for i in held_out]
            right = sum(a == b for a, b in zip(describe(model, images), expected, strict=True))
            if session.is_main:
                print(f"{stage}: {right / len(held_out):.0%} of the held-out images are described correctly")


if __name__ == "__main__":
    main()
