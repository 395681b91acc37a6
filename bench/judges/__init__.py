"""Judges that know the answer, every method and other packages on the same items: ``python -m bench judge``."""

JUDGES = ("evidence", "tracr", "patching")
"""Every judge by name; here, so that a command knows them before torch is imported."""
