"""``python -m docs.generate``: write every generated page of docs/reference."""

from __future__ import annotations

from docs.generate.pages import PAGES, REFERENCE


def main() -> None:
    """Write all pages."""
    (REFERENCE / "json").mkdir(exist_ok=True)
    for path in (REFERENCE / "json").glob("*.json"):
        path.unlink()  # of a document that there is no longer
    for name, render in PAGES.items():
        (REFERENCE / name).write_text(render())


if __name__ == "__main__":
    main()
