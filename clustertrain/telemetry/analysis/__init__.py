"""Analysis of a job's samples for reports."""
