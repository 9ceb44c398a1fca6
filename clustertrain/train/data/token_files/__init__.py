"""Parts of token corpora that belong to one format of files."""
