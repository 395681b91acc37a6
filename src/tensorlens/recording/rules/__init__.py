"""The rules, one file per kind of operation. Importing them fills the table."""

from tensorlens.recording.rules import (  # noqa: F401
    activations,
    attention,
    choices,
    linear,
    modules,
    norms,
    products,
)
