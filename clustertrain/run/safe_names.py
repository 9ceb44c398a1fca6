"""Names that the files of a run say and that become a part of a path or of a command: job ids, nodes, sbatch's options.
They are checked when they are read, so that ``../../x`` or ``--wrap`` gets no further."""

from __future__ import annotations

import re
from typing import Any

JOB_ID = re.compile(r"[1-9][0-9]{0,9}(_[0-9]{1,9})?|local-[0-9]{1,18}")  # Slurm's have 32 bits
_NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}")
_NODES = re.compile(r"[A-Za-z0-9][][A-Za-z0-9._,-]*")  # a list of Slurm's, as n[1-4],n7
OPTIONS = frozenset({"time", "partition", "qos", "account", "exclude", "nodelist"})  # of `clustertrain requeue`


def clean(fields: dict[str, Any]) -> list[str]:
    """Take out of an event, or of another document, the names that are none; which fields that concerned."""
    odd = []
    for key, sound in (("job_id", JOB_ID), ("node", _NODE)):
        if key in fields and not (isinstance(fields[key], str) and (not fields[key] or sound.fullmatch(fields[key]))):
            odd.append(key)
            del fields[key]
    for key, sound in (("nodes", _NODE), ("exclude", _NODES)):
        if isinstance(fields.get(key), list):
            kept = [v for v in fields[key] if isinstance(v, str) and sound.fullmatch(v)]
            odd += [key] * (len(kept) < len(fields[key]))
            fields[key] = kept
    if isinstance(fields.get("options"), dict):
        said = fields["options"]
        fields["options"] = {k: v for k, v in said.items() if k in OPTIONS and isinstance(v, str) and v.isprintable()}
        odd += ["options"] * (len(fields["options"]) < len(said))
    return odd
