"""The frozen specification of a run, ``spec.toml``."""

from __future__ import annotations

import functools

from clustertrain import reading
from clustertrain.config.job import RunSpec, ScriptSpec
from clustertrain.config.parsing.documents import build, parse_toml
from clustertrain.errors import ClusterTrainError, ConfigError
from clustertrain.run.run_dir import RunDir, permission_error

_FIX = "it is not what submit wrote: restore it from a backup, or submit the run again"


def load_spec(run: RunDir) -> RunSpec:
    """Load the specification.

    Raises:
        ConfigError: spec.toml is missing or invalid.
        PermissionDenied: the user may not read it.
    """
    try:
        text = reading.read_text(run.spec)
    except FileNotFoundError as e:
        raise ConfigError(f"{run.spec}: no such file", fix=_FIX) from e
    except PermissionError as e:
        raise permission_error(run.spec) from e
    except OSError as e:
        raise ConfigError(f"{run.spec}: {e.strerror or e}", fix=_FIX) from e
    return _parse(text, str(run.spec))


@functools.lru_cache(
    maxsize=1024
)  # a status needs the specification several times, and a page of all runs every second
def _parse(text: str, source: str) -> RunSpec:
    try:
        return build(parse_toml(text, source), RunSpec, source)
    except ConfigError as e:
        raise _with_run_fix(e) from e


def is_script_run(run: RunDir) -> bool:
    """Return whether the run trains with a script of the user; True if the specification cannot be read."""
    try:
        return load_spec(run).script is not None
    except ClusterTrainError:
        return True


def load_command(run: RunDir) -> ScriptSpec | None:
    """Return the program of a run that executes a command; None for other runs, or if the spec cannot be read."""
    try:
        script = load_spec(run).script
    except ClusterTrainError:
        return None
    return script if script is not None and script.command else None


def _with_run_fix(e: ConfigError) -> ConfigError:
    """Replace the fix of an error: only submit writes spec.toml, so advice about the value would mislead."""
    return ConfigError(e.message, fix=_FIX)
