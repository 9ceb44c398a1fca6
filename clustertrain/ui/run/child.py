"""The child process of :mod:`clustertrain.ui.run.workers`: ``python -m clustertrain.ui.run.child``.

The request is JSON on standard input. The answer is JSON in the file that the request names.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import msgspec

from clustertrain import schema
from clustertrain.ui.run.workers import SEARCH_TIMEOUT_S, Request, SearchRequest, SummaryRequest

MAX_MATCHES = 500


def main() -> None:
    request = schema.decode(sys.stdin.buffer.read(), Request)
    answer = search_logs(request) if isinstance(request, SearchRequest) else summarize_run(request)
    Path(request.out).write_bytes(msgspec.json.encode(answer))


def search_logs(request: SearchRequest) -> dict[str, Any]:
    """Return the matches with the key of their log, by log and place, and how much was searched."""
    from clustertrain.report.html.text import clean, clean_log_line
    from clustertrain.run.logs import search

    query = search.Query(re.compile(request.text)) if request.is_regex else search.find_text(request.text)
    keys = {Path(os.fsdecode(path)): key for key, path in request.logs.items()}
    result = search.search(list(keys), query, max_matches=MAX_MATCHES, timeout_s=SEARCH_TIMEOUT_S)
    return {
        "matches": [{"key": keys[m.path], "offset": m.offset, "text": clean_log_line(m.text)} for m in result.matches],
        "complete": result.is_complete,
        "searched_bytes": result.searched_bytes,
        "total_bytes": result.total_bytes,
        "problems": clean(result.problems),
    }


def summarize_run(request: SummaryRequest) -> dict[str, Any]:
    """Return the telemetry of the whole run as :func:`clustertrain.ui.run.gpus.describe` does."""
    from clustertrain.run.run_dir import RunDir
    from clustertrain.telemetry.analysis import summarize
    from clustertrain.telemetry.analysis.curves import build_curves
    from clustertrain.ui.run import gpus

    os.nice(10)  # the pages and the user's own programs come first
    run = RunDir(Path(os.fsdecode(request.run)))
    summary = summarize.summarize(run, summarize.SummaryRequest(state=request.state))
    return gpus.describe(summary, build_curves(run, summary))


if __name__ == "__main__":
    main()
