"""One optimizer step under every layout."""
