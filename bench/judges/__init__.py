"""Judges that know the answer, every method and other packages on the same items: ``python -m bench judge``."""

JUDGES = ("evidence", "tracr", "single_tokens", "needles", "patching", "perturbation")
"""Every judge by name; here, so that a command knows them before torch is imported."""
