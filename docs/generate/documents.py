"""The page of JSON documents and the files of their schemas, from ``clustertrain/report/documents``."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping

from clustertrain.report.documents.registry import DOCUMENTS
from clustertrain.report.documents.schemas import build_schema

_HEADER = """<!-- Written by python -m docs.generate from clustertrain/report/documents. -->

# JSON documents

`--json` makes a command print one JSON document on standard output, and everything else on standard error. These
documents are a public interface: scripts, agents and other tools may rely on them.

```sh
clustertrain list --json | jq -r '.runs[] | select(.state == "failed") | .run'
clustertrain status RUN --json | jq .eta_s
clustertrain schema              # the names of the documents
clustertrain schema status       # the JSON Schema of one
```

## Schemas

Each document has a [JSON Schema](https://json-schema.org) (draft 2020-12), which is generated from the types in the
code: `clustertrain schema NAME` prints it, and the last column links to it. Each key of a document has a type and a
description: what it is and over what. What null means is below, or in the description where it means more.

"""
_FOOTER = """
`top --json` prints one document per line; the others print one formatted document. `recipe schema` and `schema` print
JSON Schemas, which are no documents of this list. Files in a run folder, such as the events, have formats of their
own: [Events](events.md).

## Versions

`schema_version` is the first key. It is the version of this document, not of clustertrain.

- It rises when a key is removed or renamed, or when its type, unit or meaning changes.
  [CHANGELOG.md](https://github.com/clustertrain/clustertrain/blob/main/CHANGELOG.md) has an entry for each such
  change.
- It stays when a key or a document is added, or when an enumeration gets another value. So a program must ignore keys
  that it does not know, and the schemas allow them.

A program that checks `schema_version == 1` fails at once, and not with a wrong number, if a later release changes a
key that it reads.

## Conventions

- Units are in the names of the keys: `_s` (seconds), `_unix_s` (a point in time: UTC, in seconds since 1970-01-01),
  `_gib`, `_bytes`, `_w`, `_c`, `_mhz`, `_per_s`. Names that end in `_ratio`, `_share` or `utilization` are from 0 to
  1.
- Every key is always present. `null` means unknown, not measured, not yet or, in a cluster profile, unset; a zero is
  a measured zero.
- Measured and derived figures have at most nine significant digits, which is all that float32 has, and points in time
  have milliseconds. Whole numbers, such as counts of bytes, are exact. Settings, such as the values of a sweep, are
  as somebody wrote them.
- Text that came from elsewhere, such as the name of a run, a reason of Slurm or a line of a log, may contain
  anything. JSON escapes its control characters.
- If a command fails, it prints an error on standard error and has an [exit code](cli.md#exit-codes) other than 0.
  Standard output is then empty, unless the failure is the result: `checkpoint verify`, `checkpoint diff`, `diagnose`,
  `wait` and `cluster detect` print their document and exit with 1.
"""


def render() -> str:
    """Return the page with the table of all documents."""
    rows = [
        f"| `clustertrain {entry.command}` | {entry.version} | [{name}](json/{name}.json) |"
        for name, entry in DOCUMENTS.items()
    ]
    table = ["| command | version | document and schema |", "|-|-|-|", *rows]
    return _HEADER + "\n".join(table) + "\n" + _FOOTER


def render_schema(name: str) -> str:
    """Return the schema of a document as JSON."""
    return json.dumps(build_schema(name), indent=1, ensure_ascii=False) + "\n"


SCHEMA_FILES: Mapping[str, Callable[[], str]] = {
    f"json/{name}.json": functools.partial(render_schema, name) for name in DOCUMENTS
}
