"""The rules, one file per kind of operation. Importing them fills the table."""

from tensorlens.recording.rules import (  # noqa: F401
    attention,
    choices,
    linear,
    modules,
    nonlinear,
    products,
)
