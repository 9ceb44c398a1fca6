"""Suggestions for patterns of module names that match nothing."""

from __future__ import annotations

import pytest

from clustertrain.config.checks.module_patterns import suggest_modules

MODULES = ("embed", "layers.0.attention.wq", "layers.0.attention.wk", "head")


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("hed", "did you mean head?"),
        ("layers.0.atention", "did you mean layers.0.attention"),
        ("lay", "did you mean layers or layers.0 or layers.0.attention?"),
        ("mean", "top-level modules: embed, head, layers"),  # shares two letters with `head`
    ],
)
def test_only_near_modules_are_suggested(pattern: str, expected: str) -> None:
    assert suggest_modules(pattern, MODULES).startswith(expected)
