"""Recordings: what an NVIDIA GPU reported over time, with the source of each figure, for the stub to play.

A recording is ``recordings/<name>.toml``: ``[sources]``, ``[device]`` in the stub's keys and units, a ``[[slice]]``
for each MIG slice, ``[nvidia_smi]`` with what nvidia-smi prints for that state, and a ``[[step]]`` for each change at
``t`` seconds: ``at`` sets values, ``ramp`` changes them until ``ramp_until``, ``slice`` sets values of the first slice,
``event`` is an XID or ECC error, ``fail`` maps functions to NVML's errors from then on. A step's ``nvidia_smi`` is
what of its changes nvidia-smi prints at ``check_at``.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).with_name("recordings")
NAMES = sorted(path.stem for path in FOLDER.glob("*.toml"))


class Check(NamedTuple):
    """What nvidia-smi prints at a time of a recording."""

    at_s: float
    printed: Mapping[str, str]


class Recording(NamedTuple):
    """A recording and its text for the stub's driving file, whose time starts at ``start``."""

    driver: str
    text: str
    checks: list[Check]


def load(name: str) -> Recording:
    """Return a recording by its name."""
    document = tomllib.loads((FOLDER / f"{name}.toml").read_text())
    device: dict[str, Any] = dict(document["device"])
    driver = device.pop("driver")
    lines = [f"driver {driver}", *_describe(0, device)]
    current = dict(device)
    for number, values in enumerate(document.get("slice", []), start=1):
        lines += _describe(number, {"parent": 0, **values})
    checks = [Check(5.0, document["nvidia_smi"])]
    for step in document.get("step", []):
        lines += _change(step, current)
        if "check_at" in step:
            checks.append(Check(step["check_at"], step["nvidia_smi"]))
    return Recording(driver, "\n".join(lines) + "\n", checks)


def _describe(number: int, values: Mapping[str, Any]) -> list[str]:
    return [f"device {number} {key} {value}" for key, value in values.items()]


def _change(step: Mapping[str, Any], current: dict[str, Any]) -> list[str]:
    """Return the lines of a step; ``current`` has the values before it, and after it those at its end."""
    import pynvml

    t = step["t"]
    lines = [f"at 0 {key} {t} {value}" for key, value in step.get("at", {}).items()]
    lines += [f"at 1 {key} {t} {value}" for key, value in step.get("slice", {}).items()]
    for key, value in step.get("ramp", {}).items():
        lines += [f"at 0 {key} {t} {current[key]}", f"ramp 0 {key} {step['ramp_until']} {value}"]
    lines += [f"event 0 {t} {kind} {number}" for kind, number in step.get("event", {}).items()]
    for function, error in step.get("fail", {}).items():
        lines.append(f"fail 0 {function} {getattr(pynvml, f'NVML_ERROR_{error}')} {t}")
    current |= step.get("at", {}) | step.get("ramp", {})
    return lines
