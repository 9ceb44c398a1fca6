"""Decoders of Hugging Face transformers: their ``config.json`` and tensor names, and those of the built-in decoder."""
