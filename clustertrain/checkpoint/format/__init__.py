"""The files of a checkpoint: manifest, shards, checksums and storage."""
