"""`METHODS`: every map by name. The one place that knows both the operator and the model behind it.

A method is data: a name, a sentence, and a function from a `Question` to an `Answer`. The command line, the explorer
and the studies iterate over this table, so none of them can forget one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor

from tensorlens.errors import InputError, MethodError, check_whole
from tensorlens.maps import collapse
from tensorlens.maps.targets import Classes, Target, no_head
from tensorlens.models.precision import in_float64
from tensorlens.operators.norms import sketched_norms
from tensorlens.operators.operator import FrozenOperator


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is asked of a method.

    Attributes:
        operator: The attention tensor, with the frozen model behind it.
        out_tokens: The outputs asked for, one row each.
        target: What In+Class explains; None for the model's own prediction at each output.
        classes: Names of the classes, or None for a model without a head.
        norm: Which norm `tensor.norm` takes of a block.
        probes: For `tensor.norm`: how many random probes to sketch it with; None for the exact norm.
        seed: Of the probes.
    """

    operator: FrozenOperator
    out_tokens: tuple[int, ...]
    target: Target | None = None
    classes: Classes | None = None
    norm: collapse.NormKind = "frobenius"
    probes: int | None = None
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a method found: one row for each output.

    Attributes:
        scores: (row, in_token).
        bias_share: Share of the bias in each row; NaN where a method has no such thing.
        row_labels: Names of the rows, where they are not the output tokens.
        notes: More for the map's `meta`.
    """

    scores: Tensor
    bias_share: Tensor
    row_labels: tuple[str, ...] | None = None
    notes: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Method:
    """A way to make a map.

    Attributes:
        name: As in `METHODS`.
        summary: What it says, in a line.
        compute: Answers a question.
        takes_target: Whether it explains a target.
        signed: Whether its scores may be below zero, and so which palette all of its maps have.
    """

    name: str
    summary: str
    compute: Callable[[Question], Answer]
    takes_target: bool = False
    signed: bool = False


SHARE_ROUNDING = 1e-3
"""How far rounding may move a share of the bias that is found by completeness; beyond it, a run at zero is worth its
time."""

METHODS: dict[str, Method] = {}
"""Every map by name."""


def method(
    name: str, summary: str, *, takes_target: bool = False, signed: bool = False
) -> Callable[[Callable[[Question], Answer]], Callable[[Question], Answer]]:
    """Register a function from `Question` to `Answer` as a method."""

    def register(compute: Callable[[Question], Answer]) -> Callable[[Question], Answer]:
        METHODS[name] = Method(name=name, summary=summary, compute=compute, takes_target=takes_target, signed=signed)
        return compute

    return register


def answer(name: str, question: Question) -> Answer:
    """Ask one method."""
    check_question(name, question.target, question.norm, question.probes, question.seed)
    question = replace(question, probes=question.probes and int(question.probes), seed=int(question.seed))
    return METHODS[name].compute(question)


def check_question(
    name: str, target: Target | None = None, norm: str = "frobenius", probes: int | None = None, seed: int = 0
) -> None:  # fmt: skip
    """Refuse a method that does not exist, and options that it does not take."""
    if not isinstance(name, str) or name not in METHODS:
        near = get_close_matches(str(name), METHODS, n=3, cutoff=0.4)
        hint = f" Did you mean {' or '.join(near)}?" if near else ""
        raise MethodError(f"There is no method {name!r}.{hint} Methods: {', '.join(METHODS)}.")
    if target is not None and not METHODS[name].takes_target:
        raise MethodError(
            f"`{name}` takes no target; it explains the output state itself. Use `tensor.in_class` for a target."
        )
    if name != "tensor.norm" and (norm != "frobenius" or probes is not None):
        raise MethodError(f"`norm` and `probes` are options of `tensor.norm`; got one of them with `{name}`.")
    if probes is not None:
        check_whole(probes, "probes", 1)
    check_whole(seed, "seed", -(2**63), 2**63 - 1)


BY_COMPLETENESS = "by completeness"
"""What the notes say of a bias whose share is no finding of its own."""


def not_carried(scores: Tensor, total: Tensor) -> Tensor:
    """What the inputs do not carry of each row's total is the bias's."""
    return (1 - in_float64(scores).sum(1) / in_float64(total)).to(scores)


def _share(question: Question) -> Tensor:
    operator = question.operator
    return collapse.bias_share(operator.output, operator.bias, question.out_tokens)


@method("tensor.norm", "Norm of each D×D block of T: how strongly an input can move an output")
def _norm(question: Question) -> Answer:
    operator, notes = question.operator, {"norm": question.norm, "probes": question.probes}
    if question.probes is None:
        scores = collapse.norm(operator, question.out_tokens, question.norm)
        return Answer(scores=scores, bias_share=_share(question), notes=notes)
    if question.norm != "frobenius":
        raise MethodError("`probes` sketches the Frobenius norm; for the spectral norm leave `probes` out.")
    sketch = sketched_norms(operator, question.out_tokens, question.probes, question.seed)
    notes |= {"seed": question.seed, "standard_error": sketch.standard_error.tolist()}
    return Answer(scores=sketch.norms, bias_share=_share(question), notes=notes)


@method("tensor.in_out", "What each input contributes along the output that came out; signed", signed=True)
def _in_out(question: Question) -> Answer:
    operator = question.operator
    scores = collapse.in_out(operator, operator.input, operator.output, question.out_tokens)
    size = in_float64(operator.output[list(question.out_tokens)]).square().sum(-1)
    is_single = len(question.out_tokens) == 1 and not operator.heads and _is_exact(scores, size)
    if not operator.recording.is_streamed and not is_single:
        return Answer(scores=scores, bias_share=_share(question))
    # A run at zero would cost as much as the map.
    return Answer(scores=scores, bias_share=not_carried(scores, size), notes={"bias": BY_COMPLETENESS})


@method("tensor.contribution", "Length of what each input contributes to the output")
def _contribution(question: Question) -> Answer:
    operator = question.operator
    return Answer(
        scores=collapse.contribution(operator, operator.input, question.out_tokens), bias_share=_share(question)
    )


@method(
    "tensor.in_class", "What each input contributes to a logit, or to the difference of two; signed",
    takes_target=True, signed=True,
)  # fmt: skip
def _in_class(question: Question) -> Answer:
    r"""$T^{CLS}_{(c,i)←j} = E_{out,c} · T_{[i,:,j,:]} · X^0_{[j]}$ (Eq. 24).

    Rows sum to the logit less what the biases give.
    """
    operator, classes = question.operator, question.classes
    recording = operator.recording
    if classes is None or recording.readout is None:
        raise no_head(recording.name)
    if operator.span.stop != recording.n_blocks:
        raise MethodError(
            f"`tensor.in_class` needs a range of blocks that ends at the last one ({recording.n_blocks}); got "
            f"{operator.span.stop}."
        )
    positions = (0,) if recording.pools else question.out_tokens
    chosen = [
        classes.weights(int(recording.logits_at(i).argmax()) if question.target is None else question.target)
        for i in positions
    ]
    weights = torch.zeros(len(positions), classes.n_classes, dtype=operator.dtype, device=operator.device)
    for row, by_class in enumerate(chosen):
        for index, weight in by_class.items():
            weights[row, index] = weight
    scores = collapse.weigh(operator.pull_logits(weights, positions), operator.input)
    named = weights.abs().sum(0).nonzero()[:, 0]
    at_x = torch.stack([recording.logits_at(i, named) for i in positions])
    names = tuple(classes.names(by_class) for by_class in chosen)
    logits = (weights[:, named] * at_x).sum(1)
    notes = {"target": names[0] if len(set(names)) == 1 else list(names), "logit": logits.tolist()}
    # A run at zero would cost as much as the map.
    if not operator.heads and (recording.is_streamed or _is_exact(scores, logits)):
        bias_share, notes["bias"] = not_carried(scores, logits), BY_COMPLETENESS
    else:  # without all of its heads, the model gives other logits than these
        at_zero = torch.stack([operator.logits_at_zero(i) for i in positions])
        bias_share = (weights * at_zero).sum(1) / logits
    return Answer(scores=scores, bias_share=bias_share, row_labels=names if recording.pools else None, notes=notes)


def _is_exact(scores: Tensor, logits: Tensor) -> bool:
    """Whether scores that sum to a logit, less the biases' part, were rounded by little of it."""
    rounded = torch.finfo(scores.dtype).eps * scores.abs().sum(1)
    return bool((in_float64(rounded) <= SHARE_ROUNDING * in_float64(logits).abs()).all())


def check_out_token(question_token: object, pools: bool, name: str) -> None:
    """A head that pools has one row, whatever the token."""
    if pools and question_token is not None and name == "tensor.in_class":
        raise InputError(
            "This model's head reads the whole input at once, so `tensor.in_class` has one row. Leave `out_token` out."
        )
