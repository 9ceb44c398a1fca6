"""Sharded checkpoints: one folder per step, one data file per rank, an index in JSON, a commit marker written last.

``format`` and ``offline`` work without torch (commands use them); ``core``, ``save``, ``load`` and ``manager`` run on
the ranks.
"""
