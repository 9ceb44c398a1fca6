"""Sharded checkpoints: one folder a step, one data file a rank, an index in JSON, a commit marker written last.

``manifest``, ``blocks`` and ``offline`` work without torch (the command line uses them); ``state``, ``writer``,
``reader`` and ``manager`` run on the ranks.
"""
