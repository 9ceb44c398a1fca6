"""Separate processes that count a model, trace its memory or try a micro-batch."""
