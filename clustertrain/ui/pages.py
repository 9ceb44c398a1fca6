"""Pages from ``templates/ui``, and the files that they load.

Text of runs can never become markup or script: Jinja escapes it, the scripts insert it as text, and the policy of
:mod:`clustertrain.ui.auth` allows no other script.
"""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from markupsafe import Markup
from starlette.responses import FileResponse, HTMLResponse, Response

from clustertrain import settings
from clustertrain.errors import NotFound
from clustertrain.report.html import page, runs_page
from clustertrain.run import state
from clustertrain.submit import templates

NAV = (("runs", "/", "Runs"), ("sweeps", "/sweeps", "Sweeps"), ("usage", "/usage", "Usage"))
# Folders of templates/ whose scripts and styles pages may load; a missing one is left out.
STATIC_FOLDERS = ("ui", "parts", "compare")
BADGES = {
    state.PENDING: "warning",
    state.RUNNING: "active",
    state.REQUEUED: "warning",
    state.CANCELLING: "warning",
    state.COMPLETED: "good",
    state.FAILED: "critical",
    state.CANCELLED: "",
    "unknown": "critical",
}
"""Class of a state's badge, as in ``format.js``."""
MEDIA_TYPES = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}


class Pages:
    """Renders the templates and finds the files that pages load."""

    def __init__(self) -> None:
        folder = templates.find_template_folder()
        self._environment = page.make_environment(folder / "ui", folder / "compare")
        self._environment.filters.update(runs_page.FILTERS)
        self._files = find_static_files(folder)
        self._environment.globals["badges"] = BADGES
        self._version = importlib.metadata.version("clustertrain")

    def render(self, template: str, current: str = "", *, status_code: int = 200, **values: Any) -> HTMLResponse:
        """Return a page; ``current`` names the entry of the navigation that it belongs to.

        Each value named ``data`` becomes JSON that a script reads, in an element that its content cannot leave.
        """
        if "data" in values:
            values["data"] = Markup(page.to_script_json(msgspec.to_builtins(values["data"])))
        text = self._environment.get_template(template).render(
            nav=NAV, current=current, version=self._version, home=str(settings.home()), **values
        )
        # File names may contain lone surrogates.
        return HTMLResponse(text.encode("utf-8", "replace"), status_code)

    def file(self, name: str) -> Response:
        """Return a script, style or picture by its name.

        Raises:
            NotFound: there is none of that name.
        """
        path = self._files.get(name)
        if path is None:
            raise NotFound(f"no file {name!r}")
        return FileResponse(path, media_type=MEDIA_TYPES[path.suffix], headers={"Cache-Control": "no-cache"})


def find_static_files(template_folder: Path) -> Mapping[str, Path]:
    """Return the files that pages may load, by name."""
    folders = [*(template_folder / name for name in STATIC_FOLDERS), page.VENDORED]
    return {
        path.name: path
        for folder in folders
        if folder.is_dir()
        for path in sorted(folder.iterdir())
        if path.suffix in MEDIA_TYPES
    }


def encode_json(value: Any) -> bytes:
    """Return ``value`` as JSON on one line, NaN and Inf as null."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:  # half of a surrogate pair, as file names may contain
        return json.dumps(msgspec.to_builtins(value), ensure_ascii=True).encode()


def json_response(value: Any, status_code: int = 200) -> Response:
    return Response(encode_json(value), status_code, media_type="application/json")
