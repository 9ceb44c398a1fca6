"""The files of a checkpoint: manifest, shards, checksums and the storage they lie on."""
