from __future__ import annotations

import re

from tests.extended import EXTENDED, is_extended
from tests.paths import ROOT


def test_every_extended_test_exists() -> None:
    for name in EXTENDED:
        file, _, test = name.partition("::")
        function = test.partition("[")[0]
        case = test.partition("[")[2].rstrip("]")
        # Cases stand in the file itself, or in a module that test files share.
        sources = [ROOT / file, *(ROOT / "tests").glob("*.py")]
        assert not case or any(f'"{case}"' in source.read_text() for source in sources), name
        pattern = rf"^def {function}\(" if function else "^def test_"
        assert re.search(pattern, (ROOT / file).read_text(), re.MULTILINE), name


def test_file_function_and_case_are_recognized() -> None:
    assert is_extended("tests/ranks/test_reshape.py::test_anything[ddp]")
    assert is_extended("tests/slurm/test_containers.py::test_main_job")
    case = "tests/ranks/test_frameworks.py::test_preempted_program_has_the_losses_of_an_uninterrupted_one"
    assert is_extended(f"{case}[fsdp2_dcp.py]")
    assert not is_extended(f"{case}[transformers_trainer.py]")
    assert not is_extended("tests/ranks/test_frameworks.py::test_lightning_stops_saves_and_resumes")
