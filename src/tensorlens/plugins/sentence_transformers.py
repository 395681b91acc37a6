"""sentence-transformers: the pair maps behind `model.similarity`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tensorlens.errors import InputError
from tensorlens.maps.groups import Groups
from tensorlens.pairs.pair_map import PairMap
from tensorlens.pairs.similarity import similarities


def pair_maps(
    model: Any, sentences: Sequence[str], others: Sequence[str] | None = None, *, groups: Groups | None = None
) -> list[list[PairMap]]:
    """One pair map per entry of ``model.similarity``: its `value` is that entry, its scores add up to it.

    Args:
        model: A `SentenceTransformer`; its own similarity function is taken, the cosine or the dot product.
        sentences: The rows.
        others: The columns; the same sentences if None.
        groups: Sum the pairs over groups of tokens, such as ``"words"``; see `similarity`.

    Raises:
        InputError: The model's similarity is a distance, which is not a sum over pairs.
    """
    measure = str(getattr(model, "similarity_fn_name", "cosine") or "cosine")
    if measure not in ("cosine", "dot"):
        raise InputError(f"The model compares by {measure}; a pair map needs the cosine or the dot product.")
    columns = sentences if others is None else others
    return [similarities(model, one, columns, groups=groups, measure=measure) for one in sentences]
