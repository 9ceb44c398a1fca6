"""Layouts: process groups, and the application of a layout to a model."""
