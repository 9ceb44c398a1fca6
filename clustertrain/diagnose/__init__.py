"""Checks to run before a long job. A process of the job's Python does them; the command line only shows what it found,
and imports no torch: :mod:`names`, :mod:`process`, :mod:`shown` and :mod:`curves` are its side, the rest is that of the
process."""
