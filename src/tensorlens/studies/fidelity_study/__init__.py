"""Fidelity: how well the operator holds away from its input, compared with its bounds, and its properties."""
