"""What each kind of operation becomes once its factors are held fixed: one file per kind. Importing fills the table."""

from tensorlens.freezing.rules import (
    activations,
    attention,
    choices,
    coarse,
    in_place,
    linear,
    norms,
    products,
    recurrent_cells,
    written_out,
)

__all__ = [
    "activations",
    "attention",
    "choices",
    "coarse",
    "in_place",
    "linear",
    "norms",
    "products",
    "recurrent_cells",
    "written_out",
]
