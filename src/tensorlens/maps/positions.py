"""Positions as inputs of their own: where a model adds them to its words, X⁰ = E + P, every column splits exactly."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from msgspec import structs
from torch import Tensor

from tensorlens.errors import InputError, MethodError
from tensorlens.maps.methods import METHODS, Question
from tensorlens.maps.token_map import TokenMap
from tensorlens.models.runner import run
from tensorlens.recording.recording import Recording
from tensorlens.tolerances import repeated

SPLITS = ("tensor.in_class", "tensor.in_out")
"""Maps that are linear in each column of the input."""


def added_positions(recording: Recording) -> Tensor:
    """P (token, channel) of $X^0 = E + P$: the part of $X^0$ beside the word embeddings.

    A pass with the words in a different order must leave the same P; otherwise P depends on more than positions.

    Raises:
        MethodError: the model adds no positions to its words before the first block, or does more than add.
    """
    name, states = recording.name, recording.states[0]
    own, other = _beside_words(recording, shift=0), _beside_words(recording, shift=1)
    if own is None or other is None or own.shape != states.shape[1:]:
        raise MethodError(f"`{name}` has no word embeddings to which positions are added; leave `positions` out.")
    size = float(states.norm()) * repeated(states.dtype)
    if float((own - other).norm()) > size:
        raise MethodError(
            f"`{name}` does more than add positions to its words before the first block (a norm, a projection, a "
            "sum with other embeddings), so a column has no part that is the position's alone; leave `positions` out."
        )
    if float(own.norm()) <= size:
        raise MethodError(
            f"`{name}` does not add positions to its word embeddings: they enter inside its blocks, or not at all."
        )
    return own


def check_split(method: str, groups: Any) -> None:
    """Refuse what has no columns that split."""
    if method not in SPLITS or groups is not None:
        raise InputError(f"`positions` are columns of their own of {', '.join(SPLITS)}, without groups.")


def with_positions(made: TokenMap, question: Question) -> TokenMap:
    """The same map with the part of each column that its position carries as a column of its own, after the words."""
    alone = replace(question, weighed=added_positions(question.recording), shared={})
    places = METHODS[made.method].compute(alone).scores.to(made.scores)
    labels = tuple(f"position {j}" for j in range(len(made.in_tokens)))
    return structs.replace(
        made,
        scores=torch.cat([made.scores - places, places], 1),
        in_tokens=(*made.in_tokens, *labels),
        meta={key: value for key, value in made.meta.items() if key not in ("text", "offsets")},
    )


def _beside_words(recording: Recording, shift: int) -> Tensor | None:
    """X⁰ minus the words' embeddings in a pass with the words moved on by `shift`; None if this does not exist."""
    origin = recording.from_model("Finding positions")
    anatomy, layout, seen = origin.anatomy, origin.calls[0].layout, dict[str, Tensor]()
    if anatomy.embedding is None:
        return None

    def moved(ids: Any) -> Any:
        return ids.roll(shift, -1)

    def embedded(words: Any) -> None:
        seen["words"] = words

    def entering(n: int, state: Tensor) -> None:
        if n == 0:
            seen["state"] = layout.to_tokens(state)

    given = {anatomy.embedding: embedded}
    run(anatomy, origin.inputs, entering=entering, taken={anatomy.embedding: moved}, given=given)
    words, state = seen.get("words"), seen.get("state")
    if words is None or state is None or words.shape != state.shape or not isinstance(words, torch.Tensor):
        return None
    return (state - words.to(state))[0]
