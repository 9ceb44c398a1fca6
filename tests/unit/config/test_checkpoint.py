"""The [checkpoint] table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import tomli_w

from clustertrain.config.checkpoint import CheckpointSpec, check_interval, parse_interval_s
from clustertrain.config.parsing.documents import build, load_toml, parse_value
from clustertrain.config.recipe import Recipe
from clustertrain.errors import ConfigError


def table(**values: Any) -> CheckpointSpec:
    return build({"checkpoint": values}, Recipe, "recipe.toml").checkpoint


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30s", 30.0),
        ("10min", 600.0),
        ("10m", 600.0),
        ("2h", 7200.0),
        ("1d", 86_400.0),
        ("1.5h", 5400.0),
        ("1h30min", 5400.0),
        ("1h 30 min", 5400.0),
    ],
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_interval_s("every", text) == seconds
    assert table(every=text).every == text


@pytest.mark.parametrize("text", ["auto", "10min", "1h", "250"])
def test_set_value_survives_spec_toml(text: str, tmp_path: Path) -> None:
    spec = table(every=parse_value(text))
    assert spec.every == (250 if text == "250" else text)
    file = tmp_path / "spec.toml"
    file.write_text(tomli_w.dumps(msgspec.to_builtins(spec)))
    assert build(load_toml(file), CheckpointSpec, "spec.toml") == spec


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"every": 0}, "every = 0: must be greater than 0"),
        ({"every": "0s"}, "every = '0s': must be greater than 0"),
        ({"every": "100"}, 'every = \'100\': must be a number of steps, a duration ("30s", "10min", "2h") or "auto"'),
        ({"every": "Auto"}, "every = 'Auto': must be"),
        ({"every": "10 minutes"}, "every = '10 minutes': must be"),
        ({"every": "h"}, "every = 'h': must be"),
        ({"every": 1.5}, "checkpoint.every"),
        ({"every": True}, "checkpoint.every"),
        ({"evry": 10}, "did you mean checkpoint.every"),
        ({"keep": 0}, "keep = 0"),
        ({"keep_every": -1}, "keep_every = -1: must be 0 (none) or more"),
        ({"keep_best": -2, "best": "loss"}, "keep_best = -2"),
        ({"best": "loss"}, "best = 'loss' has no effect without keep_best"),
        ({"best_mode": "max"}, "best_mode = 'max' has no effect without keep_best"),
        ({"keep_best": 1, "best": "loss", "best_mode": "least"}, "use one of"),
        ({"engine": "dpc"}, "use one of dcp"),
        ({"async_save": "yes"}, "checkpoint.async_save"),
        ({"local": "scratch/x"}, "local = 'scratch/x': must be a folder on the nodes"),
        ({"local": "/tmp/{jobb}"}, "{jobb} is unknown; use {job}"),
        ({"local": "$TMPDIR", "async_save": False}, "local needs async_save = true"),
        ({"remote": "bucket/prefix"}, "remote = 'bucket/prefix': must be a URL, for example s3://bucket/prefix"),
        ({"remote": "s3://bucket", "async_save": False}, "remote needs async_save = true"),
        ({"remote": "s3://bucket", "remote_keep": -1}, "remote_keep = -1: must be 0 (as keep) or more"),
        ({"remote_keep": 2}, "remote_keep = 2 has no effect without remote"),
    ],
)
def test_invalid_value_names_key_and_fix(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as e:
        table(**values)
    assert message in str(e.value)


def test_every_accepts_steps_durations_and_auto() -> None:
    for every in (1, 100, "30s", "auto"):
        check_interval("every", every)
