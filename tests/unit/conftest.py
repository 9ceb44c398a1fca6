import json
from collections.abc import Iterator
from typing import Any

import pytest

from clustertrain.report.documents import encode
from tests.documents import check_document
from tests.fakes.nvml.fixture import nvml_library, nvml_stub
from tests.fakes.slurm.fixture import fake_slurm

__all__ = ["documents_match_their_schemas", "fake_slurm", "nvml_library", "nvml_stub"]


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
