"""Data that can only be iterated."""
