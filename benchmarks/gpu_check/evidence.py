"""The folder of evidence: hashes of its files, the summary for programs, and the summary for people."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from clustertrain.errors import UsageError

SUMS, SUMMARY, REPORT = "SHA256SUMS", "summary.json", "summary.md"
FORMAT = 1


def seal(folder: Path) -> str:
    """Write the hash of each file to ``SHA256SUMS``, in the format of sha256sum; return the hash of that file."""
    text = "".join(f"{_hash(folder / name)}  {name}\n" for name in _files(folder))
    (folder / SUMS).write_text(text)
    return hashlib.sha256(text.encode()).hexdigest()


def verify(folder: Path) -> list[str]:
    """Return what of the evidence was changed, is missing or was added since it was sealed; empty if nothing."""
    try:
        lines = (folder / SUMS).read_text().splitlines()
    except OSError as e:
        return [f"{SUMS}: {e.strerror}"]
    expected = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    present = set(_files(folder))
    problems = [f"{name}: missing" for name in expected if name not in present]
    problems += [f"{name}: added" for name in sorted(present - expected.keys())]
    changed = [name for name in sorted(present & expected.keys()) if _hash(folder / name) != expected[name]]
    return problems + [f"{name}: changed" for name in changed]


def digest(folder: Path) -> str:
    """Return the hash of ``SHA256SUMS``, which stands for the whole evidence."""
    return _hash(folder / SUMS)


def load(folder: Path) -> dict[str, Any]:
    """Return the summary of evidence that is intact.

    Raises:
        UsageError: the folder is no evidence, or was changed after it was sealed.
    """
    problems = verify(folder)
    if problems:
        raise UsageError(f"{folder} is not the evidence that was sealed: {'; '.join(problems)}", fix="copy it again")
    summary = json.loads((folder / SUMMARY).read_text())
    if summary.get("format") != FORMAT:
        raise UsageError(f"{folder}: format {summary.get('format')}, not {FORMAT}", fix="use the version that wrote it")
    return dict(summary)


def write_summaries(folder: Path, summary: Mapping[str, Any]) -> None:
    """Write the summary for programs and the one for people."""
    (folder / SUMMARY).write_text(json.dumps({"format": FORMAT, **summary}, indent=1) + "\n")
    (folder / REPORT).write_text("\n".join(_report(summary)) + "\n")


def _report(summary: Mapping[str, Any]) -> Iterator[str]:
    machine, torch = summary["machine"], summary["torch"]
    yield f"# Check of {describe_gpus(summary)}"
    yield ""
    yield f"{machine['time']}, commit {machine['commit']}, {summary['seconds']:.0f} s on {summary['device']}."
    versions = {"driver": summary["driver"], **{k: torch.get(k) for k in ("torch", "cuda", "cudnn", "nccl")}}
    yield ", ".join(f"{name} {value}" for name, value in versions.items() if value) + "."
    for gpu in summary["gpus"]:
        yield f"- {gpu['name']}: {', '.join(f'{k} {v}' for k, v in gpu.items() if k != 'name' and v is not None)}"
    yield ""
    yield "| part | | seconds | |"
    yield "|---|---|---|---|"
    for part in summary["parts"]:
        status = part["status"] if part["status"] == "ok" else f"**{part['status']}**"
        yield f"| {part['name']}: {part['title']} | {status} | {part['seconds']:.0f} | {_cell(part['reason'])} |"
    yield from _clocks(summary["clocks"])
    for part in summary["parts"]:
        if part["figures"]:
            yield ""
            yield f"## {part['name']}"
            yield ""
            yield "| | |"
            yield "|---|---|"
            for name, value in part["figures"].items():
                yield f"| {name} | {_cell(value)} |"


def _clocks(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    if not rows:
        return
    yield ""
    yield "| part, GPU | mean power, W | median SM clock, MHz | highest temperature, C | throttled |"
    yield "|---|---|---|---|---|"
    for row in rows:
        values = (row["power_w"], row["sm_clock_mhz"], row["temperature_c"])
        cells = " | ".join("-" if value is None else _cell(value) for value in values)
        yield f"| {row['part']}, {row['gpu']} | {cells} | {row['throttled_share']:.0%} |"


def describe_gpus(summary: Mapping[str, Any]) -> str:
    """Return the number and name of the GPUs, or the device of a rehearsal."""
    names = [gpu["name"] for gpu in summary["gpus"] if not gpu.get("mig_slice_of")]
    return f"{len(names)} x {names[0]}" if names else str(summary["device"])


def _cell(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text.replace("|", "\\|").replace("\n", " ")


def _files(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file() and p != folder / SUMS)


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
