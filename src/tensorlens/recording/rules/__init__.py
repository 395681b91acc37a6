"""What each kind of operation becomes: one file per kind. Importing fills the table."""

from tensorlens.recording.rules import (  # noqa: F401
    activations,
    attention,
    choices,
    linear,
    norms,
    products,
    recurrent_cells,
)
