"""TransformerLens: a bridge as a model, and its names for components, in and out.

A bridge wraps the modules of the model inside it, so a lens looks through them, and whatever they do in compatibility
mode or under hooks is part of T. A `HookedTransformer` of releases before 4 is a model as it is.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from torch import nn

from tensorlens.errors import InputError
from tensorlens.inside.stream import Component
from tensorlens.lens import Lens
from tensorlens.recording.conventions import Rules


class Hook(NamedTuple):
    """TransformerLens' place of a component: the name of a hook, and the index of a head or neuron there, if any."""

    name: str
    part: int | None = None


def bridge_lens(bridge: nn.Module, *, rules: Rules | str | None = None) -> Lens:
    """A lens on the model of a bridge, or on a `HookedTransformer`.

    TransformerLens may put a token before a text: pass ``bridge.to_tokens(text)[0]`` to have the same input.

    Args:
        bridge: A `TransformerBridge` or a `HookedTransformer`.
        rules: The conventions, as for `Lens`.
    """
    model = getattr(bridge, "original_model", bridge)
    return Lens(model, getattr(bridge, "tokenizer", None), rules=rules)


HOOKS = {
    "attention head": "blocks.{}.attn.hook_z",
    "attention": "blocks.{}.hook_attn_out",
    "feed-forward": "blocks.{}.hook_mlp_out",
    "neuron": "blocks.{}.mlp.hook_post",
    "embedding": "hook_embed",
}
"""The hook of each kind of component."""

LABELS = {"attention head": "L{}H{}", "attention": "{}_attn_out", "feed-forward": "{}_mlp_out", "embedding": "embed"}
"""The label of each kind in `stack_head_results` and `decompose_resid`."""


def hook_of(component: Component) -> Hook:
    """The hook of a component, such as ``blocks.5.attn.hook_z`` with the head's number.

    Raises:
        InputError: TransformerLens has no hook for it, such as for a bias.
    """
    if component.kind not in HOOKS:
        raise InputError(f"TransformerLens has no hook for “{component}”; it has some for {', '.join(HOOKS)}.")
    part = component.neuron if component.kind == "neuron" else component.head
    return Hook(HOOKS[component.kind].format(component.block), part)


def label_of(component: Component) -> str:
    """The label of a component in lists of TransformerLens: ``L5H3``, ``5_mlp_out``, ``embed``.

    Raises:
        InputError: TransformerLens has no label for it.
    """
    if component.kind not in LABELS:
        raise InputError(f"TransformerLens has no label for “{component}”; it has some for {', '.join(LABELS)}.")
    return LABELS[component.kind].format(component.block, component.head)


def component_of(name: str, part: int | None = None) -> Component:
    """The component behind a label (``L5H3``) or a hook (``blocks.5.attn.hook_z``).

    Args:
        name: The label or the hook.
        part: The head or neuron, for a hook that has several.

    Raises:
        InputError: The name is not one of a component, or `part` is missing.
    """
    for kind, pattern in (*LABELS.items(), *HOOKS.items()):
        found = re.fullmatch(re.escape(pattern).replace(r"\{\}", r"(\d+)"), name)
        if found is None:
            continue
        block, *rest = [int(one) for one in found.groups()] or [None]
        if kind not in ("attention head", "neuron"):
            return Component(kind=kind, block=block)
        number = rest[0] if rest else part
        if number is None:
            raise InputError(f"`{name}` has one entry per {kind}; pass `part` to name one.")
        return Component(kind=kind, block=block, **{"head" if kind == "attention head" else kind: number})
    raise InputError(
        f"`{name}` is not a hook or label of a component. Examples: L5H3, 5_mlp_out, blocks.5.attn.hook_z."
    )


def by_label(components: Any) -> dict[str, float]:
    """Scores of a `ComponentMap` over all tokens, by label, for comparison with `logit_attrs`.

    Args:
        components: The result of ``T.components(…)``; components without a label of their own are left out.
    """
    rows = zip(components.labels, components.scores.sum(1).tolist(), strict=True)
    return {label_of(component): score for component, score in rows if component.kind in LABELS}
