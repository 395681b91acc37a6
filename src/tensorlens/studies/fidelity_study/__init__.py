"""Fidelity: how far the operator holds away from its input, against its bounds, and what shape it has."""
