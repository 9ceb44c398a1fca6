"""Turns a layout into process groups and applies it to a model."""
