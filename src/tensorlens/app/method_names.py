"""The names of the methods, known before torch is imported, so that a mistyped one is answered at once."""

from __future__ import annotations

from difflib import get_close_matches

from tensorlens.errors import MethodError
from tensorlens.studies.options import check_member, split

METHOD_NAMES = (
    "tensor.in_out",
    "tensor.in_class",
    "tensor.contribution",
    "tensor.norm",
    "rollout.attn",
    "mean.attn",
    "rollout.w_attn",
    "mean.w_attn",
    "rollout.w_attn_res_ln",
    "mean.w_attn_res_ln",
    "rollout.glob_enc",
    "mean.glob_enc",
    "alti",
    "rollout.attn_without_sink",
    "control.random",
    "control.recency",
    "control.position",
    "control.embedding_norm",
    "gradient.times_input",
    "gradient.integrated",
)
"""The keys of `METHODS`; a test compares the two."""


def check_method_name(name: str) -> None:
    """Refuse a name that no method has."""
    if name not in METHOD_NAMES:
        near = get_close_matches(name, METHOD_NAMES, n=3, cutoff=0.4)
        hint = f" Did you mean {' or '.join(near)}?" if near else ""
        raise MethodError(
            f"TensorLens has no method {name!r}.{hint} `tensorlens methods` lists all {len(METHOD_NAMES)}."
        )


def check_name_with_member(name: str) -> None:
    """The same for a name that may have a rule set after an @."""
    check_method_name(split(name)[0])
    check_member(name)
