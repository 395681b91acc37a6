"""What each kind of operation becomes: one file per kind. Importing fills the table."""

from tensorlens.recording.rules import (  # noqa: F401
    activations,
    attention,
    by_derivative,
    choices,
    linear,
    norms,
    packed,
    products,
    recurrent_cells,
)
