"""Checks to run before a long run.

A child process in the job's Python runs them; the command line shows the findings and never imports torch. Only
:mod:`registry`, :mod:`runner`, :mod:`terminal` and :mod:`plots` belong to the command line.
"""
