"""Launchers before a program: ``torchrun`` and its like, whose work clustertrain's own launch takes over."""
