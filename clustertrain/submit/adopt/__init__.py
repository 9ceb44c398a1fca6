"""``adopt``: read a batch script, and find the cluster profile and the submit line that do the same.

Nothing of the script is executed. ``script_file`` reads it, ``directives`` its ``#SBATCH`` lines, ``shell``,
``statements`` and ``items`` its commands, ``expansion`` its variables. ``body`` decides what becomes of each command,
``program`` reads the training command, ``resources`` and ``sizes`` what the job requests, and ``adoption`` puts the
result together.
"""
