"""Measurements of the library: judges and peers, the compatibility table, speed, and the claims of docs/results.md.

Beside the package and not in its wheel. Run from the root of the repository: ``python -m bench --help``.
"""
