"""The profiler, the compile trial and the forward timer."""
