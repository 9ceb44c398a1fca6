"""The live screen of ``clustertrain top``."""
