"""What each kind of operation becomes: one file per kind. Importing fills the table."""

from tensorlens.recording.rules import (
    activations,
    attention,
    choices,
    derivatives,
    linear,
    norms,
    products,
    recurrent_cells,
)

__all__ = [
    "activations",
    "attention",
    "choices",
    "derivatives",
    "linear",
    "norms",
    "products",
    "recurrent_cells",
]
