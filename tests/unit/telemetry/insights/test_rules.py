"""Every rule of the insights package is in use."""

from __future__ import annotations

import ast
import collections
from pathlib import Path

from clustertrain.telemetry import insights


def test_every_rule_is_in_a_list_or_called() -> None:
    trees = [ast.parse(path.read_text()) for path in Path(insights.__file__).parent.glob("*.py")]
    rules = {
        function.name
        for tree in trees
        for function in tree.body
        if isinstance(function, ast.FunctionDef) and function.args.args and function.args.args[0].arg == "job"
    }
    uses = collections.Counter(
        node.id if isinstance(node, ast.Name) else node.attr
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Name | ast.Attribute)
    )
    assert len(rules) > 35
    assert [rule for rule in sorted(rules) if not uses[rule]] == []
