"""Turns a request into a run folder and a job."""
