"""What each kind of operation becomes: one file per kind. Importing fills the table."""

from tensorlens.recording.rules import (
    activations,
    attention,
    by_derivative,
    choices,
    linear,
    norms,
    products,
    recurrent_cells,
)

__all__ = [
    "activations",
    "attention",
    "choices",
    "by_derivative",
    "linear",
    "norms",
    "products",
    "recurrent_cells",
]
