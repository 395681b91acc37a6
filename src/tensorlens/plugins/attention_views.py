"""bertviz and circuitsvis: their views, of T in place of attention. They take matrices, so one file serves both."""

from __future__ import annotations

from typing import Any

from tensorlens.errors import InputError
from tensorlens.maps.token_map import TokenMap
from tensorlens.tensor import AttentionTensor

METHOD = "tensor.contribution"
"""The map of each block: the length of what an input contributes, as signed scores have no width to draw."""


def bertviz_head_view(T: AttentionTensor, method: str = METHOD, **options: Any) -> Any:
    """`bertviz.head_view` of the heads of every block, each with its block's residual.

    Args:
        T: The operator, or some of its blocks.
        method: A method whose scores are not negative.
        **options: Options for bertviz, such as ``html_action="return"``.
    """
    from bertviz import head_view  # type: ignore[import-not-found]

    return head_view(T.attentions(method, per_head=True), list(T.tokens), **options)


def bertviz_model_view(T: AttentionTensor, method: str = METHOD, **options: Any) -> Any:
    """`bertviz.model_view` of the heads of every block; see `bertviz_head_view`."""
    from bertviz import model_view  # type: ignore[import-not-found]

    return model_view(T.attentions(method, per_head=True), list(T.tokens), **options)


def circuitsvis_heads(T: AttentionTensor, block: int, method: str = METHOD) -> Any:
    """`circuitsvis.attention.attention_heads` of the heads of one block, each with the block's residual.

    Args:
        T: The operator.
        block: The block, counted from the first of T.
        method: A method whose scores are not negative.
    """
    from circuitsvis.attention import attention_heads  # type: ignore[import-not-found]

    heads = T.blocks(block, block + 1).attentions(method, per_head=True)[0][0]
    return attention_heads(heads, list(T.tokens))


def circuitsvis_tokens(found: TokenMap) -> Any:
    """`circuitsvis.tokens.colored_tokens` of a map with one row, such as In+Class.

    Args:
        found: The map.

    Raises:
        InputError: The map has several rows.
    """
    from circuitsvis.tokens import colored_tokens  # type: ignore[import-not-found]

    if found.shape[0] != 1:
        raise InputError(f"Expected a map of one output, got {found.shape[0]}. Choose one with `found.row(i)`.")
    return colored_tokens(list(found.in_tokens), found.scores[0])
