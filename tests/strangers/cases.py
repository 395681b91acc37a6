"""A stranger: a model, an input, what is known of it, and what became of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch
from strangers.models import IDS, Plain, randomised
from strangers.oracle import Places, Witness, against, gap
from torch import Tensor, nn

import tensorlens as tl

Outcome = Literal["exact", "refused", "wrong", "crash"]
MAPS = ("map", "in_out")
"""Errors of maps, whose scores may be kept in float32."""


def ids() -> Tensor:
    return torch.tensor([IDS])


@dataclass(frozen=True, kw_only=True)
class Stranger:
    """One case.

    Attributes:
        name: What it is called in tables.
        build: Makes the model; its weights are then drawn at random.
        given: What the lens is called with.
        call: How the model itself is called on the same.
        places: Which of its states are X⁰ and X^N.
        other_places: Choices of X⁰ that are as good.
        twin: Makes of the model one with plainer code and the same weights, to take the witness from.
        expect: ``exact``; ``refused``; or ``either``, where a clear error is as good.
        has_ranges: Whether ranges of blocks mean something.
        tolerance: Relative.
    """

    name: str
    build: Callable[[], nn.Module] = Plain
    given: Callable[[], Any] = lambda: list(IDS)
    call: Callable[[nn.Module], Any] = lambda model: model(ids())
    places: Places = Places()
    other_places: tuple[Places, ...] = ()
    twin: Callable[[nn.Module], nn.Module] | None = None
    expect: Literal["exact", "refused", "either"] = "exact"
    has_ranges: bool = True
    tolerance: float = 1e-9

    def model(self) -> nn.Module:
        return randomised(self.build())

    def witnesses(self, model: nn.Module) -> list[Witness]:
        twin = model if self.twin is None else self.twin(model)
        return [Witness(twin, self.call, places) for places in (self.places, *self.other_places)]


def plainly(build: Callable[[], nn.Module]) -> Callable[[nn.Module], nn.Module]:
    """A twin that is built otherwise and takes over the weights."""

    def twin(model: nn.Module) -> nn.Module:
        made = randomised(build())
        made.load_state_dict(model.state_dict())
        return made

    return twin


@dataclass(frozen=True)
class Verdict:
    """What became of a stranger, with the reason or the largest error."""

    outcome: Outcome
    detail: str
    certified: bool | None = None

    def __str__(self) -> str:
        said = "" if self.certified is None or self.outcome != "wrong" else f"; certificate passed: {self.certified}"
        return f"{self.outcome}: {self.detail}{said}"


def judge(stranger: Stranger) -> Verdict:
    """Try a stranger's model through the public members, against its witness."""
    model = stranger.model()
    witnesses = stranger.witnesses(model)
    return judge_tensor(lambda: tl.Lens(model)(stranger.given()), witnesses, stranger)


def judge_tensor(make: Callable[[], Any], witnesses: list[Witness], stranger: Stranger) -> Verdict:
    """The same for a tensor made in some other way."""
    for witness in witnesses:
        _ = witness.dense, witness.bias
    try:
        T = make()
        return _compare(T, min(witnesses, key=lambda witness: gap(T.input, witness.input)), stranger)
    except tl.TensorLensError as error:
        return Verdict("refused", f"{type(error).__name__}: {error}")
    except Exception as error:  # the table wants every kind of crash
        return Verdict("crash", f"{type(error).__name__}: {str(error)[:300]}")


def _compare(T: Any, witness: Witness, stranger: Stranger) -> Verdict:
    if T.shape != tuple(witness.dense.shape):
        return Verdict("wrong", f"T is {T.shape}, not {tuple(witness.dense.shape)}", bool(T.certificate().passed))
    errors = against(T, witness, has_ranges=stranger.has_ranges)
    certified = bool(T.certificate().passed)
    bad = {k: v for k, v in errors.items() if not v <= (1e-5 if k.endswith(MAPS) else stranger.tolerance)}
    if bad:
        worst = sorted(bad.items(), key=lambda item: -item[1])
        text = ", ".join(f"{law} {error:.2g}" for law, error in worst[:3])
        return Verdict("wrong", f"{text} ({len(bad)} of {len(errors)} off)", certified)
    if not certified:
        return Verdict("wrong", f"exact, but not certified: {T.certificate().errors}", certified)
    return Verdict("exact", f"{max(errors.values()):.1e}", certified)


def check(stranger: Stranger, verdict: Verdict) -> None:
    """Fail unless the verdict is what the stranger may expect; a refusal must say what and what to do."""
    allowed = {"exact": ("exact",), "refused": ("refused",), "either": ("exact", "refused")}[stranger.expect]
    assert verdict.outcome in allowed, f"{stranger.name}: {verdict}"
    if verdict.outcome == "refused":
        assert len(verdict.detail) > 60 and ("`" in verdict.detail or "'" in verdict.detail), verdict.detail


SAMPLE = {
    "nanoGPT, a list of ids",
    "Meta's Llama with its cache",
    "TransformerEncoder, -inf causal mask",
    "Sequential blocks and a list of heads",
    "plain, to begin with",
    "between blocks: a weight in the model's forward",
    "skip from the embedding, cloned",
    "ends in softmax",
    "BatchNorm1d without running statistics",
    "feed-forward: shifted softplus",
    "feed-forward: through numpy",
    "feed-forward: a scripted gelu",
    "feed-forward: out=",
    "branches in threads",
    "checkpoint in evaluation",
    "state: a counter",
    "random: noise",
    "hooks: on the final norm",
    "hooks: on the head",
    "head: the sum of two",
    "GRU gates",
    "writes: the head into the state",
    "writes: blocks into their input",
    "flex_attention",
    "end: by weights of a gate",
    "beginning: residuals outside of modules",
    "state: behind positions",
    "layers: attention adapted",
    "layers: adapted side by side",
    "end: a norm by a function",
    "end: a norm that blocks share",
    "lists: an encoder's and a decoder's",
    "rounded: to whole numbers and back",
    "rounded: by the largest, in int8",
    "rounded: to 8-bit floats",
    "streams: in the place of samples",
    "gradients: a hook of a tensor",
    "gradients: backward hooks of blocks",
    "blocks by torch.jit.trace",
}
"""Those that are tried every time; the others take their turn in the long run."""


def as_parameters(strangers: list[Stranger]) -> list[Any]:
    """Strangers as parameters of a test, all but the sample marked as large."""
    return [
        pytest.param(one, id=one.name, marks=[] if one.name in SAMPLE else [pytest.mark.large]) for one in strangers
    ]
