"""`Headlined`: a question about one output, read as weights on logits, with the question in one sentence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tensorlens.errors import InputError
from tensorlens.maps.targets import Context, ReadTarget, own_prediction, read_target
from tensorlens.operators.plain import plain_logits
from tensorlens.recording.recording import Recording
from tensorlens.views.captions import after, headline_of, within


@dataclass(frozen=True, kw_only=True, eq=False)
class Headlined:
    """A question about a target at one output.

    Attributes:
        asked: The target on logits, and how it is called.
        probability: The model's for the target; None for a sum of several tokens.
        where: What stands before the output, or what it belongs to; as `place_of` says it.
        logits: (class,) the model's own at that output.
    """

    asked: ReadTarget
    probability: float | None
    where: str
    logits: Tensor

    @property
    def meta(self) -> dict[str, Any]:
        """What a map stores of it, so every view shows the same headline."""
        why = {
            "target": self.asked.target,
            "probability": self.probability,
            "against": self.asked.against,
            "where": self.where,
        }
        return {"why": why} | ({"note": self.asked.note} if self.asked.note else {})

    @property
    def headline(self) -> str:
        """Why “ Paris” (70 %) rather than “ London” after “… in the city of”?"""
        return headline_of(self.meta, self.asked.target)


def headlined(
    recording: Recording, context: Context, out_token: int, target: Any = None, against: Any = None
) -> Headlined:
    """A question as people write it; the model's top prediction where no target is named.

    Args:
        recording: The pass.
        context: Names of tokens and classes; there must be classes.
        out_token: The output, counted from the start.
        target: A token, a text of several tokens, a class or a number; see `read_target`.
        against: The same for what it is compared with.
    """
    assert context.classes is not None, "asked of a model with a head"
    if isinstance(target, (tuple, list)):
        raise InputError(f"`target` must be one token or class; got {target!r:.60}. Pass the other as `against`.")
    logits = plain_logits(recording, [0 if recording.pools else out_token])[0]
    asked = read_target(context.classes, int(own_prediction(logits)) if target is None else target, against, logits)
    added = [index for index, weight in asked.weights.items() if weight > 0]
    chance = float(logits.float().softmax(-1)[added[0]]) if len(added) == 1 else None
    n_out = recording.states[-1].shape[1]
    return Headlined(
        asked=asked, probability=chance, where=place_of(context.meta, context.tokens, out_token, n_out), logits=logits
    )


def headline_of_states(context: Context, out_tokens: Sequence[str], out_token: int) -> str:
    """The question without a head: about the state that stands for a picture, or about all of a text's."""
    is_one = context.meta.get("grid") is not None
    what = f"the output “{out_tokens[out_token]}”" if is_one else "these outputs"
    return f"Why {what} {place_of(context.meta, context.tokens, out_token, len(out_tokens))}?"


def place_of(meta: Mapping[str, Any], tokens: Sequence[str], out_token: int, n_out: int) -> str:
    """Where an output stands: after which words, or in which text or picture."""
    if meta.get("grid") is not None:
        return "for this picture"
    text = meta.get("text")
    if not meta.get("causal"):
        return within(text if isinstance(text, str) else " ".join(tokens))
    is_last = out_token % n_out == n_out - 1
    return after(text if isinstance(text, str) and is_last else "".join(tokens[: out_token % n_out + 1]))
