"""Token maps: an operator collapsed to one number for each pair of output and input."""
