import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clustertrain.report.documents import encode
from clustertrain.submit.preflight import filesystem
from tests.documents import check_document
from tests.fakes.nvml.fixture import nvml_library, nvml_stub
from tests.fakes.slurm.fixture import fake_slurm

__all__ = ["documents_match_their_schemas", "everything_is_on_a_disk", "fake_slurm", "nvml_library", "nvml_stub"]


@pytest.fixture(autouse=True)
def documents_match_their_schemas(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Check every JSON document that a command prints in a test; yield the names of those printed so far."""
    original, names = encode.to_document, list[str]()

    def to_document(name: str, value: Any) -> dict[str, Any]:
        document = original(name, value)
        names.append(name)
        check_document(name, json.dumps(document))
        return document

    monkeypatch.setattr(encode, "to_document", to_document)
    yield names


@pytest.fixture(scope="session")
def mountinfo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What /proc/self/mountinfo says on a machine with one disk."""
    path = tmp_path_factory.mktemp("mounts") / "mountinfo"
    path.write_text("36 35 98:0 / / rw,noatime - ext4 /dev/root rw\n")
    return path


@pytest.fixture(autouse=True)
def everything_is_on_a_disk(mountinfo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The temporary folder may be on a tmpfs or in a container, where a run for Slurm is refused."""
    monkeypatch.setattr(filesystem, "_MOUNTINFO", mountinfo)
