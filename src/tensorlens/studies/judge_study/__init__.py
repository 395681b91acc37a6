"""Judges that know the answer: known evidence, compiled programs, needles, patching, single tokens."""

JUDGES = ("evidence", "tracr", "single_tokens", "needles", "patching", "perturbation")
"""Every judge by name; here, so that a command knows them before torch is imported."""
