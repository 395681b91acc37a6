"""Freezing: one forward pass, held still.

A *recording* runs the model once and keeps every factor that makes it nonlinear (attention, norm
scales, activation gains, gates). A *replay* runs the same model on another hidden state
with those factors put back, which is an affine function: the paper's F̃_X. Nothing here knows any
model family; the rules are keyed by torch function and by module class.
"""
