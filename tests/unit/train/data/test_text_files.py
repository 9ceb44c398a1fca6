"""Files of a text corpus."""

from __future__ import annotations

from pathlib import Path

import pytest

from clustertrain.config.data import DataSpec
from clustertrain.errors import ConfigError
from clustertrain.train.data.text_files import list_files

NAMES = ("b.txt", "a/z.txt", "a/b/c.txt", "a.txt", "A.TXT", "notes.md", "__pycache__/x.txt", ".hidden.txt", "[1].txt")


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    for name in NAMES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    return tmp_path


@pytest.mark.parametrize("pattern", ["*.txt", "*", "?.txt", "[ab].*", "**", "a/*.txt", "a/*/*.txt", "[[]1].txt"])
def test_files_match_like_path_match_and_are_sorted(corpus: Path, pattern: str) -> None:
    expected = [n for n in NAMES if not n.startswith("__pycache__") and (corpus / n).match(pattern)]
    assert expected
    assert [str(p.relative_to(corpus)) for p in list_files(DataSpec(path=str(corpus), pattern=pattern))] == sorted(
        expected
    )


@pytest.mark.parametrize("pattern", ["*.json", ""])
def test_pattern_without_match_is_named_in_error(corpus: Path, pattern: str) -> None:
    with pytest.raises(ConfigError, match=rf"no file matches data\.pattern = {pattern.replace('*', r'[*]')!r}"):
        list_files(DataSpec(path=str(corpus), pattern=pattern))


def test_missing_folder_is_named_in_error(corpus: Path) -> None:
    with pytest.raises(ConfigError, match="missing': no such file or folder"):
        list_files(DataSpec(path=str(corpus / "missing")))
