"""``python -m docs.generate``: write every generated page of docs/reference, and the manual pages in docs/man."""

from __future__ import annotations

from docs.generate import manual
from docs.generate.pages import MANUAL, PAGES, REFERENCE


def main() -> None:
    """Write all pages."""
    (REFERENCE / "json").mkdir(exist_ok=True)
    for path in (REFERENCE / "json").glob("*.json"):
        path.unlink()  # of a document that there is no longer
    for name, render in PAGES.items():
        (REFERENCE / name).write_text(render())
    manual_pages = manual.render_pages()
    MANUAL.mkdir(exist_ok=True)
    for path in MANUAL.iterdir():  # of commands that no longer exist
        if path.name not in manual_pages:
            path.unlink()
    for name, text in manual_pages.items():
        (MANUAL / name).write_text(text)


if __name__ == "__main__":
    main()
