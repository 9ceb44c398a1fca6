"""Checks of names in a run's files that become part of a path or command: job ids, nodes, sbatch options.

They are checked on reading, so that ``../../x`` or ``--wrap`` gets no further.
"""

from __future__ import annotations

import re
from typing import Any

JOB_ID = re.compile(r"[1-9][0-9]{0,9}(_[0-9]{1,9})?|local-[0-9]{1,18}")  # Slurm's ids have 32 bits
_HOSTNAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}")
_HOSTLIST = re.compile(r"[A-Za-z0-9][][A-Za-z0-9._,-]*")  # a hostlist expression of Slurm, such as n[1-4],n7
REQUEUE_OPTIONS = frozenset({"time", "partition", "qos", "account", "exclude", "nodelist"})  # of `clustertrain requeue`


def sanitize(fields: dict[str, Any]) -> list[str]:
    """Remove invalid names from an event or another document; return the fields that had any."""
    invalid_fields = []
    for key, pattern in (("job_id", JOB_ID), ("node", _HOSTNAME)):
        if key in fields and not (isinstance(fields[key], str) and (not fields[key] or pattern.fullmatch(fields[key]))):
            invalid_fields.append(key)
            del fields[key]
    for key, pattern in (("nodes", _HOSTNAME), ("exclude", _HOSTLIST)):
        if isinstance(fields.get(key), list):
            valid = [v for v in fields[key] if isinstance(v, str) and pattern.fullmatch(v)]
            invalid_fields += [key] * (len(valid) < len(fields[key]))
            fields[key] = valid
    if isinstance(fields.get("options"), dict):
        options = fields["options"]
        fields["options"] = {
            k: v for k, v in options.items() if k in REQUEUE_OPTIONS and isinstance(v, str) and v.isprintable()
        }
        invalid_fields += ["options"] * (len(fields["options"]) < len(options))
    return invalid_fields
