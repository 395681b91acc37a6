"""Fidelity: how accurate the operator is away from its input, compared with its bounds, and its properties."""
