"""Detection of calls of session.train_step in the source of a script."""

from __future__ import annotations

from typing import Any

import pytest

from clustertrain.errors import ConfigError
from clustertrain.plan.layout import Layout
from clustertrain.plan.script_checks import check_script, uses_train_step
from tests.paths import ROOT

PLAIN = "import argparse\nimport torch\nfrom torch.nn import functional as F\nimport clustertrain as ct\n"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (PLAIN + "loss.backward()", False),
        (PLAIN + "session.train_step(batch, F.mse_loss)", True),
        (PLAIN + "step = getattr(session, 'train_step')", True),
        (PLAIN + "def train_step(batch): ...\ntrain_step(1)", False),  # another function of that name
        (PLAIN + "# session.train_step", False),
        (PLAIN + "from training import run", None),
        (PLAIN + "from . import run", None),
        (PLAIN + "import training.loop", None),
        (PLAIN + "from training import run\nsession.train_step(b, f)", True),
        (PLAIN + "exec(code)", None),
        (PLAIN + "import importlib", None),
        (PLAIN + "import runpy", None),
        ("", False),
        ("this is no Python", None),
        ("\0", None),
    ],
)
def test_uses_train_step(source: str, expected: bool | None) -> None:
    assert uses_train_step(source) is expected


@pytest.mark.parametrize(
    ("fields", "precision", "reason"),
    [
        ({"pp": 2, "schedule": "1f1b"}, "fp32", "stages alternate"),
        ({"strategy": "zero1", "zero1": True, "dp_replicate": 2}, "fp32", "split over the ranks"),
        ({"tp": 2}, "fp32", "the logits, and thus the loss, may be split"),
        ({"cp": 2}, "fp32", "a part of every sequence"),
        ({"strategy": "ddp", "dp_replicate": 2}, "fp16", "the loss is scaled"),
    ],
)
def test_custom_backward_cannot_drive_every_layout(fields: dict[str, Any], precision: str, reason: str) -> None:
    layout = Layout(**fields)
    with pytest.raises(ConfigError, match=r"train.py does not call session.train_step") as e:
        check_script(layout, precision, PLAIN, "train.py")
    assert reason in str(e.value) and "session.optimizer" in str(e.value)
    assert check_script(layout, precision, PLAIN + "session.train_step(b, f)", "train.py") is None
    assert "unknown whether" in (check_script(layout, precision, PLAIN + "import mine", "train.py") or "")


def test_drivable_layout_skips_source_check() -> None:
    for layout in (Layout(strategy="ddp", dp_replicate=2), Layout(strategy="fsdp", dp_shard=2), Layout()):
        assert check_script(layout, "bf16", "no Python", "train.py") is None


def test_example_script_passes() -> None:
    source = (ROOT / "examples" / "train_script.py").read_text()
    assert uses_train_step(source) is (".train_step(" in source)
