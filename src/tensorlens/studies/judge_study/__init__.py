"""Judges that know the answer: known evidence, compiled programs, needles, patching, single tokens."""
