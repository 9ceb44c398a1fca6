"""Hostile inputs for every interface of the command line, and a judge of each call.

`docs/decisions/0032-fuzzing-in-process.md` explains why the calls run in this process and what counts as a fault.
"""
