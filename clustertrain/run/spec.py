"""The frozen request of a run."""

from __future__ import annotations

from clustertrain.run.folder import RunDir
from clustertrain.spec.job import RunSpec
from clustertrain.spec.strict import build, read_toml


def load_spec(run: RunDir) -> RunSpec:
    """Raises ConfigError when spec.toml is missing or not what submit wrote."""
    return build(read_toml(run.spec), RunSpec, str(run.spec))
