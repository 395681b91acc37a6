"""Blocks as matrices: the paths through a block, read from its program and folded into a handful of products."""
