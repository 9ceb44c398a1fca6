"""The published pages, with the generated ones of commands and keys, avoid the phrases that contributing.md lists."""

from __future__ import annotations

import re

import pytest

from tests.paths import ROOT

# The page that lists the phrases, and records of decisions, which stay as they were written.
EXEMPT = ("docs/contributing.md", "docs/decisions/")
PHRASES = {
    r"\bone's own\b": "your own",
    r"\btold\b": "reported, printed, shown",
    r"\banew\b": "again",
    r"\bby heart\b": "memorized",
    r"\bhand(?:s|ed)? on\b": "passes, uploads",
    r"\b(?:GPUs|ranks|tasks|cores|tokens/s|samples/s) an? (?:node|GPU|rank|second|step)\b": "per node, per GPU, …",
    r"\bthe begin of\b": "the start of",
    r"\bbehind the (?:command|option|step)\b": "after",
    r"\bdear(?:er)?\b": "expensive",
    r"\bneighbours?\b": "neighbor",
    r"\bmend(?:s|ed)?\b": "fix, correct",
    r"\breckoned\b": "computed",
}


@pytest.mark.parametrize("phrase", PHRASES)
def test_pages_avoid_the_phrase(phrase: str) -> None:
    pages = [ROOT / name for name in ("README.md", "CHANGELOG.md", "AGENTS.md", "CONTRIBUTING.md", "SECURITY.md")]
    pages += [p for p in sorted((ROOT / "docs").rglob("*.md")) if not str(p.relative_to(ROOT)).startswith(EXEMPT)]
    assert len(pages) > 50
    found = [
        f"{page.relative_to(ROOT)}:{number}: {line.strip()}"
        for page in pages
        for number, line in enumerate(page.read_text().splitlines(), 1)
        if re.search(phrase, line)
    ]
    assert not found, f"write: {PHRASES[phrase]}"
