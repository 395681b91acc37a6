"""Measurements of this library against the paper's way, on the CPU or a GPU; see `python -m benchmarks --help`."""
