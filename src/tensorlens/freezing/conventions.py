"""The conventions a user may choose, as one record."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal, get_args

from tensorlens.errors import InputError

Gate = Literal["freeze_gate", "freeze_up", "half"]


@dataclass(frozen=True, kw_only=True)
class Rules:
    r"""Choices that exactness alone does not make, because every one of them reproduces F(X).

    Attributes:
        gate: What is held fixed in a gated feed-forward $W_d(\varphi(W_g x) \odot (W_u x))$:
            ``"freeze_gate"`` holds $\varphi(W_g x)$ and stays linear in the up branch (the default),
            ``"freeze_up"`` holds $W_u x$ and stays linear in the gate through $\varphi(z)/z$,
            ``"half"`` is the mean of the two.
        include_final_norm: Whether the output state $X^N$ is taken after the model's final norm.
    """

    gate: Gate = "freeze_gate"
    include_final_norm: bool = True

    def __post_init__(self) -> None:
        if self.gate not in get_args(Gate):
            raise InputError(f"`gate` must be one of {', '.join(get_args(Gate))}; got {self.gate!r}.")

    def as_dict(self) -> dict[str, str | bool]:
        """The choices as plain data, for certificates and saved maps."""
        return asdict(self)
