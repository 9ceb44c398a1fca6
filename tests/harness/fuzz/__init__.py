"""Hostile inputs for every door of the command line, and a judge of what each call does with them.

`docs/decisions/0032-fuzzing-in-process.md` says why the calls run in this process and what counts as a fault.
"""
