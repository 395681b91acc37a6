"""Relation decoding: one mean operator for many facts, beside LRE (the paper's section 4.2)."""
