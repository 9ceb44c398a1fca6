"""A process that answers one request: JSON as its argument, JSON on its stdout."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any


def run(handle_request: Callable[[dict[str, Any]], dict[str, Any]]) -> int:
    """Print the answer to the request in ``sys.argv[1]``, and return the exit status.

    What the user's code prints goes to stderr, so that stdout has only the answer.
    """
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    print(json.dumps(handle_request(json.loads(sys.argv[1]))), file=out, flush=True)
    return 0
