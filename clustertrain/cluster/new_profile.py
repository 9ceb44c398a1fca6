"""Text of a new cluster profile from what its user knows about the site."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from clustertrain.cluster import profile_file
from clustertrain.config.parsing import time_limits
from clustertrain.errors import ConfigError


@dataclass(frozen=True)
class SiteAnswers:
    """What a person knows about a site. Empty or 0: not known, so Slurm's default holds."""

    partition: str = ""
    account: str = ""
    gpu_type: str = ""
    gpus_per_node: int = 0
    time: str = ""
    setup: Sequence[str] = ()
    """Shell lines that the job runs first."""


def format_profile(answers: SiteAnswers, name: str) -> str:
    """Return the profile with a comment for each key; unknown ones are commented out, to be filled in.

    Raises:
        ConfigError: a value is not one that a profile takes.
    """
    rows = (
        ("partition", answers.partition, "gpu", "see `sinfo`"),
        ("account", answers.account, "project-123", "who pays: see `sacctmgr show associations user=$USER`"),
        ("time", answers.time, "1-00:00:00", "default time limit"),
        ("gpu_type", answers.gpu_type, "h100", "as the site's gres names it: see `sinfo -o %G`"),
        ("gpus_per_node", answers.gpus_per_node, 8, "GPUs of a node"),
        ("setup", list(answers.setup), ["module load cuda"], "shell lines that the job runs first"),
    )
    lines = [
        f"# Cluster profile {name}. Options and recipes win over it. All keys: `clustertrain cluster show {name}`."
    ]
    for key, value, example, comment in rows:
        lines.append(f"{'' if value else '# '}{key} = {_format_value(value or example)}  # {comment}")
    text = "\n".join(lines) + "\n"
    try:
        text.encode()
    except UnicodeEncodeError as e:
        raise ConfigError("a value is not UTF-8, as a profile must be", fix="type it again") from e
    profile_file.parse_profile(text, f"profile {name}")
    time_limits.parse_time_limit_s(answers.time)
    return text


def _format_value(value: object) -> str:
    # JSON's strings, numbers and arrays are TOML's too.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
