"""Search in logs: newest lines first, each match once, within its limits."""

from __future__ import annotations

from pathlib import Path

import pytest

from clustertrain.errors import UsageError
from clustertrain.run.logs import search
from clustertrain.run.logs.search import Query, SearchResult, compile_pattern, find_text


def run(paths: list[Path], query: Query, max_matches: int = 100, timeout_s: float = 60.0) -> SearchResult:
    return search.search(paths, query, max_matches=max_matches, timeout_s=timeout_s)


@pytest.fixture
def logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    monkeypatch.setattr(search, "BLOCK_BYTES", 64)
    paths = [tmp_path / f"rank-{r}.log" for r in range(3)]
    for r, path in enumerate(paths):
        path.write_text("".join(f"step {i} of rank {r} loss {i % 7}\n" for i in range(50)))
    return paths


def test_every_match_is_found_once_in_the_order_of_the_files(logs: list[Path]) -> None:
    result = run(logs, Query(compile_pattern(r"^step \d of .* loss [56]$", "q")))
    assert [m.text for m in result.matches] == [f"step {i} of rank {r} loss {i}" for r in range(3) for i in (5, 6)]
    assert result.is_complete and result.searched_bytes == sum(p.stat().st_size for p in logs)
    for match in result.matches:
        assert match.path.read_bytes()[match.offset :].startswith(match.text.encode())


def test_text_is_not_a_pattern_and_its_case_does_not_matter(logs: list[Path]) -> None:
    logs[1].write_text("RuntimeError: CUDA (out of memory)\nÜMLAUT\n")
    assert [m.text for m in run(logs, find_text("cuda (out")).matches] == ["RuntimeError: CUDA (out of memory)"]
    assert [m.text for m in run(logs, find_text("ümlaut")).matches] == ["ÜMLAUT"]
    assert run(logs, find_text("loss .")).matches == []


def test_newest_lines_of_all_files_come_before_older_ones(logs: list[Path]) -> None:
    result = run(logs, find_text("step"), max_matches=6)
    assert len(result.matches) == 6 and not result.is_complete
    assert {m.path for m in result.matches} == set(logs)
    assert all(int(m.text.split()[1]) >= 48 for m in result.matches)


def test_search_ends_in_time_and_says_how_far_it_came(logs: list[Path]) -> None:
    result = run(logs, find_text("step"), timeout_s=0.0)
    assert result.matches == [] and result.searched_bytes == 0 and not result.is_complete


def test_unreadable_files_are_named(logs: list[Path], tmp_path: Path) -> None:
    (tmp_path / "folder.log").mkdir()
    result = run([tmp_path / "missing.log", tmp_path / "folder.log", logs[0]], find_text("step 1 "))
    assert len(result.matches) == 1
    assert len(result.problems) == 1 and "folder.log" in result.problems[0]


def test_line_longer_than_a_block_is_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "BLOCK_BYTES", 64)
    path = tmp_path / "log"
    path.write_text("needle" + "x" * 500)
    assert [m.offset for m in run([path], find_text("needle")).matches] == [0]


@pytest.mark.parametrize("pattern", ["(", "x{99999999999999}"])
def test_bad_pattern_is_an_error_of_the_user(pattern: str) -> None:
    with pytest.raises(UsageError, match="not a regular expression"):
        compile_pattern(pattern, "--grep")


def test_of_a_long_line_the_part_around_the_match_is_returned(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.log"
    path.write_text("x" * 30_000 + "needle" + "y" * 30_000 + "\n")
    (match,) = run([path], find_text("needle")).matches
    assert match.offset == 0 and match.text.startswith("…xxx") and match.text.endswith("yyy…")
    assert "needle" in match.text and len(match.text) == search.MAX_MATCH_CHARACTERS + 2
