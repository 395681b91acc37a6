r"""Why heads looked where they did: the strongest thing that a head read, and the score that made it look there.

Of head h, that is the pair of tokens with the largest $|A_{h,ij}⟨λ_{h,i}, v_{h,j}⟩|$: at i it looked at j, and what it
took from there moved the target most.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tensorlens.errors import InputError, MethodError
from tensorlens.inside.component_map import Component
from tensorlens.inside.score import score_map
from tensorlens.maps.token_map import TokenMap
from tensorlens.operators.operator import FrozenOperator

MOST_ROWS = 16
"""How many rows and columns of a pair map a picture shows; the weakest go into one of all others."""


class Look(NamedTuple):
    """Where a head looked: from which token to which, and with what weight."""

    query: int
    key: int
    attention: float


class Why(NamedTuple):
    """The score behind a look, over pairs of tokens and over pairs of components."""

    by_token: TokenMap
    by_component: TokenMap

    def payload(self) -> dict[str, Any]:
        """Both as small tables that sum to the score."""
        score = float(self.by_token.scores.sum())
        return {"score": score, "token": condensed(self.by_token), "component": condensed(self.by_component)}


def strongest(by_pair: Tensor, attention: Tensor) -> Look:
    """Of one head's (token, token) effects, the pair that moved the target most."""
    place = int(by_pair.abs().argmax())
    i, j = divmod(place, by_pair.shape[1])
    return Look(i, j, float(attention[i, j]))


def why(operator: FrozenOperator, head: Component, look: Look, tokens: tuple[str, ...]) -> Why | None:
    """The pair maps of one look; None where queries and keys cannot be followed."""
    if head.block is None or head.head is None:
        return None
    asked = operator, head.block - operator.span.start, head.head, look.query, look.key
    try:
        return Why(
            score_map(*asked, tokens=tokens, meta={}),
            score_map(*asked, by="component", tokens=tokens, meta={}),
        )
    except (MethodError, InputError):
        return None


def condensed(found: TokenMap) -> dict[str, Any]:
    """The strongest rows and columns in their order, and one of all others; empty rows are left out."""
    scores, names = found.scores, {}
    for axis, labels in enumerate((found.out_tokens, found.in_tokens)):
        weight = found.scores.sum(1 - axis).abs()  # what it gives against all of the other side
        is_named = found.meta.get("by") == "component"
        called = [name if is_named or name == "bias" else f"{i} {name}" for i, name in enumerate(labels)]
        n_there = int(found.scores.abs().sum(1 - axis).count_nonzero())
        kept = sorted(weight.topk(min(n_there, MOST_ROWS)).indices.tolist())
        rest = [i for i in range(len(labels)) if i not in set(kept)]
        names[axis] = [called[i] for i in kept] + ([f"{n_there - MOST_ROWS} others"] if n_there > MOST_ROWS else [])
        parts = [scores.index_select(axis, torch.tensor(kept, dtype=torch.long))]
        if n_there > MOST_ROWS:
            parts.append(scores.index_select(axis, torch.tensor(rest)).sum(axis, keepdim=True))
        scores = torch.cat(parts, axis)
    return {"rows": names[0], "columns": names[1], "cells": scores.tolist()}
