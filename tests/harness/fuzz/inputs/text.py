"""Text and values that break shells, TOML, paths, terminals, templates and integers."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from tests.harness.fuzz.sandbox import CANARY

COMMANDS = (
    f"$(touch {CANARY})",
    f"`touch {CANARY}`",
    f"; touch {CANARY};",
    f"'; touch {CANARY}; '",
    f'"; touch {CANARY}; "',
    f"\\'; touch {CANARY} #",
    f"\ntouch {CANARY}\n",
    f"x && touch {CANARY}",
    f"|touch {CANARY}",
    f"__import__('os').system('touch {CANARY}')",
    f"{{{{ ''.__class__.__mro__[1].__subclasses__() }}}}{{% set x = 1 %}}$(touch {CANARY})",
    f"() {{ :; }}; touch {CANARY}",
    f"%(touch {CANARY})s",
)
ODD = (
    "",
    " ",
    ".",
    "..",
    "/",
    "-",
    "--",
    "--help",
    "-rf",
    "../../../outside/x",
    "~nouser/x",
    "~/x",
    "a" * 256,
    "é" * 200,
    "x/" * 300,
    "a b",
    "it's",
    'say "x"',
    "ends in \\",
    "two\nlines\n",
    "\ttab\rreturn",
    "\x1b]52;c;Y2FuYXJ5\x07",
    "\x1b[2J\x1b[31m",
    "\x9b31m",
    "\x7f\x08\x08",
    "\u202egpj.exe",
    "\u2028\u2029\ufeff",
    "nul\0nul",
    "\udcff\udc80",
    "漢字 🙂",
    "İı ß",
    "{{ home }}{% endif %}{# x",
    "{x!r:{y}}",
    "%s%n%d",
    "[bold red]x[/]",
    "[/x]",
    "null",
    "nan",
    "1e309",
    "0x10",
    "1_000",
    "٣",
    "9" * 30,
    "9" * 5000,
    "latest",
    "@",
    "x@",
    "x@1@2",
    "*",
    "file:///etc/passwd",
    "memory://x",
    "s3://bucket/prefix",
    "http://[::1",
    "torch:load",
    "os:system",
    "a:b:c",
)
NUMBERS = (
    0, -1, 1, 2, 3, 7, 255, 256, 65535, 2**31 - 1, 2**31, 2**32, 2**53, 2**53 + 1, 2**63 - 1, 2**63, 2**64, 10**9,
    10**18, 10**30, -(2**63), 10**400,
)  # fmt: skip
FLOATS = (0.0, -0.0, 1e-320, 5e-324, 1e-30, 0.1, 0.999999, 1.0, 1.5, 1e30, 1e308, -1e308)


def words() -> SearchStrategy[str]:
    """Draw hostile text, mostly known tricks, sometimes arbitrary text."""
    tricks = st.sampled_from(COMMANDS) | st.sampled_from(ODD)
    prefixed = st.builds(lambda a, b: a + b, st.sampled_from(("x", "gpt", "a.toml", "")), tricks)
    return st.one_of(tricks, prefixed, st.text(max_size=20), st.text(alphabet="abc._-/=[]{}\"'0123 ", max_size=20))


def arguments() -> SearchStrategy[str]:
    """Draw :func:`words` that can be arguments of a process: without NUL."""
    return words().map(lambda word: word.replace("\0", "")).filter(_encodes)


def _encodes(word: str) -> bool:
    try:
        return len(word.encode("utf-8", "surrogateescape")) < 100_000
    except UnicodeEncodeError:
        return False


def numbers() -> SearchStrategy[Any]:
    return st.one_of(st.sampled_from(NUMBERS), st.sampled_from(FLOATS), st.integers(-5, 5000), st.floats())


def values() -> SearchStrategy[Any]:
    """Draw values that JSON or TOML can represent, including None."""
    plain = st.one_of(st.none(), st.booleans(), numbers(), words())
    return st.recursive(
        plain, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(words(), inner, max_size=3), max_leaves=6
    )


def deep(depth: int, opening: str = "[", closing: str = "]") -> str:
    return opening * depth + closing * depth
