"""ddp_script.py with a session, which resumes exactly: clustertrain submit --gpus 2 ddp_session_script.py"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import clustertrain as ct

STEPS = 3000


def build_dataset() -> TensorDataset:
    points = torch.randn(8192, 2, generator=torch.Generator().manual_seed(0))
    return TensorDataset(points, (points.norm(dim=1) > 1.2).long())  # inside or outside a circle


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 2))


def train(session: ct.Session) -> None:
    model = session.parallelize(build_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = session.loader(build_dataset(), global_batch=256)
    state = {"model": model, "optimizer": optimizer, "data": data}
    for _ in session.steps(STEPS, state, checkpoint_every=500):
        x, y = next(data)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        session.log(loss=session.mean(loss))


if __name__ == "__main__":
    with ct.session() as session:
        train(session)
