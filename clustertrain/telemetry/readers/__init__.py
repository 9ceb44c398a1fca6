"""Reads NVML, /proc, /sys and cgroups."""
