"""``adopt``: read a batch script, and find the cluster profile and the submit line that do the same.

Nothing of the script is executed. ``script_file`` reads it, ``directives`` its ``#SBATCH`` lines, ``items`` its
commands (with :mod:`clustertrain.submit.shell`). ``body`` decides what becomes of each command, ``program`` reads the
training command, ``resources`` and ``sizes`` what the job requests, and ``adoption`` puts the result together.
"""
