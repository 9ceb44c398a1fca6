"""Generates docs/reference from the code; tests/unit/test_docs.py fails if a committed page is out of date."""
