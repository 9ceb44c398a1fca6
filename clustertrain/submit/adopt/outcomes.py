"""What becomes of the lines of a batch script."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

OutcomeKind = Literal["submit", "profile", "replaced", "dropped", "decide"]
"""In the submit line; in the profile; clustertrain does it; not needed; the user has to say."""

_SECRET = re.compile(r"(?:^|_)(?:API_?KEY|KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)$", re.IGNORECASE)

_SECRET_VALUE = re.compile(r"\b(\w*(?:KEY|TOKEN|SECRET|PASSWORD|PASSWD))=(?!\$)[^\s;,]+")
MASK = "…"


def is_secret(name: str) -> bool:
    """Return whether the variable ``name`` usually holds a secret."""
    return _SECRET.search(name) is not None


@dataclass(frozen=True)
class Outcome:
    """What becomes of a line, or of one option of it."""

    line: int
    """Number of the line; 0: something that the script does not say."""
    text: str
    """The line or the option, with secrets masked."""
    outcome: OutcomeKind
    """``submit``: in the submit command; ``profile``: in the cluster profile; ``replaced``: clustertrain does it;
    ``dropped``: not needed; ``decide``: the user has to say."""
    detail: str
    """How: the option, the key, or the reason."""


@dataclass
class Findings:
    """What is found while the script is read."""

    outcomes: list[Outcome] = field(default_factory=list)
    setup: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    secrets: list[str] = field(default_factory=list)
    """Names of variables whose values stay out of the profile."""
    folders: list[str] = field(default_factory=list)
    """Folders to which the script changes, one after the other, as shell words."""

    def set_variable(self, name: str, value: str) -> bool:
        """Set a variable of the ranks; return False if it usually holds a secret, so that only its name is kept."""
        if is_secret(name):
            self.secrets.append(name)
            return False
        self.env[name] = value
        return True

    def add(self, line: int, text: str, outcome: OutcomeKind, detail: str) -> None:
        """Record an outcome, with the values of secrets masked."""
        masked = [_SECRET_VALUE.sub(rf"\1={MASK}", part) for part in (text, detail)]
        self.outcomes.append(Outcome(line, masked[0], outcome, masked[1]))
