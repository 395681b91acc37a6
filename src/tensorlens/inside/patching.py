r"""Patching from a corrupted into a clean run: predicted for all components at once, and checked in the real model.

    predicted_c = ⟨λ_c(clean), y_c(corrupted) − y_c(clean)⟩

over all tokens, from two replays and one backward pass. The truth needs a run of the model for each component.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tensorlens.errors import InputError
from tensorlens.freezing.observe import plain_logits
from tensorlens.inside.component_map import Component
from tensorlens.inside.components import Cotangents, kinds, told_apart
from tensorlens.inside.stream import Write
from tensorlens.inside.target import Pass, Weights, pass_to, weights_of
from tensorlens.maps.targets import Classes, Target
from tensorlens.models.plain_pass import hooked, own_modes
from tensorlens.models.precision import in_float64
from tensorlens.operators.base import check_token
from tensorlens.operators.matrix_free import FrozenOperator


@dataclass(frozen=True, kw_only=True, eq=False)
class Patching:
    """Effects of patching each component from a corrupted run into a clean one, over all tokens.

    Attributes:
        labels: Attention outputs, heads and feed-forwards.
        predicted: What T says of each: the change of the target.
        true: What the model does, NaN for heads, and for what no single module writes; None unless it was asked for.
        target: What is measured.
        clean: Its value in the clean run.
    """

    labels: tuple[Component, ...]
    predicted: Float[Tensor, " component"]
    true: Float[Tensor, " component"] | None
    target: str
    clean: float

    @property
    def pearson(self) -> float:
        """Correlation of predicted and true effects; NaN if the truth is not known."""
        return _correlation(*self._known())

    @property
    def rank_correlation(self) -> float:
        """Spearman's correlation of predicted and true effects; NaN if the truth is not known."""
        return _correlation(*(in_float64(part.argsort().argsort()) for part in self._known()))

    def _known(self) -> tuple[Tensor, Tensor]:
        true = torch.full_like(self.predicted, float("nan")) if self.true is None else self.true
        known = ~true.isnan()
        return in_float64(self.predicted[known]), in_float64(true[known])


def _correlation(a: Tensor, b: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([a, b]))[0, 1]) if len(a) > 1 else float("nan")


class _Part(NamedTuple):
    component: Component
    write: Write
    is_heads: bool = False


def _parts(run: Pass) -> Iterator[_Part]:
    for n, sums in run.sums.items():
        for write, kind in kinds(run, n, sums or []):
            yield _Part(Component(block=n, kind=kind), write)
            for _ in told_apart(run, n, write):
                yield _Part(Component(block=n, kind=f"{kind} head"), write, is_heads=True)


@own_modes
def patching(
    lens: Callable[[Any], Any], clean: Any, corrupted: Any, target: Target | Weights | None = None, *,
    out_token: int = -1, verify: bool = False,
) -> Patching:  # fmt: skip
    r"""Predicted effects $⟨λ_c(clean), y_c(corrupted) - y_c(clean)⟩$ of patching every component, over all tokens.

    Args:
        lens: A lens on the model.
        clean: The input whose target is measured.
        corrupted: Another one of the same length, whose components are put in.
        target: A token, a pair for a contrast, or weights by class; the model's own prediction if None.
        out_token: Where the target is read.
        verify: Whether to patch the real model too, attention outputs and feed-forwards one by one.
    """
    first, second = lens(clean), lens(corrupted)
    return patching_of(first.operator, second.operator, first.context.classes, target, out_token, verify=verify)


def patching_of(
    clean: FrozenOperator, corrupted: FrozenOperator, classes: Classes | None, target: Target | Weights | None,
    out_token: int = -1, *, verify: bool = False,
) -> Patching:  # fmt: skip
    """Patching of two recordings of one model, of one length."""
    if clean.shape != corrupted.shape:
        raise InputError(f"Two inputs of one length are needed; got {clean.n_tokens} and {corrupted.n_tokens} tokens.")
    i = 0 if clean.recording.pools else check_token(out_token, clean.shape[0])
    weights = weights_of(clean, classes, target, i)
    assert classes is not None, "a target has classes"
    labels, predicted, true = [], [], []
    with pass_to(clean, weights, i) as run, pass_to(corrupted, weights, i) as other:
        pairs = list(zip(_parts(run), _parts(other), strict=True))
        edges = [part.write.mixtures[0].edge if part.is_heads else part.write.edge for part, _ in pairs]
        at = Cotangents(run, edges)
        for edge, (part, theirs) in zip(edges, pairs, strict=True):
            change = at.times(edge, _value(theirs) - _value(part))
            effects = change.flatten(0, -3).sum((-2, -1)) if part.is_heads else change.sum()[None]
            labels += [
                Component(block=part.component.block, kind=part.component.kind, head=h if part.is_heads else None)
                for h in range(len(effects))
            ]
            predicted.append(effects)
            if verify:
                true += [float("nan")] * len(effects) if part.is_heads else [_patched(run, part, theirs)]
    value = float(run.t.detach())
    found = torch.cat(predicted).cpu()
    truth = (torch.tensor(true, dtype=torch.float64) - value).to(found) if verify else None
    return Patching(
        labels=tuple(labels), predicted=found, true=truth,
        target=" − ".join(classes.name(index) for index in weights), clean=value,
    )  # fmt: skip


def _value(part: _Part) -> Tensor:
    return part.write.mixtures[0].value if part.is_heads else part.write.value


def _patched(run: Pass, part: _Part, theirs: _Part) -> float:
    """The target in the real model with what one module gives taken from the other run; NaN if no module gives it."""
    block = part.component.block
    assert block is not None, "a write is in a block"
    path = run.seen.modules.get((block, part.write.edge.node))
    if path is None:
        return float("nan")

    def patch(module: nn.Module, args: Any, output: Any) -> Any:
        first = output[0] if isinstance(output, tuple) else output
        new = theirs.write.value.reshape(first.shape).to(first)
        return (new, *output[1:]) if isinstance(output, tuple) else new

    recording = run.recording
    with torch.no_grad(), hooked(after=[(recording.model.get_submodule(path), patch)]):
        logits = _logits(recording, run.out_token)
    return float(sum(weight * logits[index] for index, weight in run.weights.items()))


def _logits(recording: Any, out_token: int) -> Tensor:
    """Logits as the unembedding gives them, before any soft cap, where there is one."""
    unembedding, seen = recording.anatomy.unembedding, []
    if unembedding is None:
        return plain_logits(recording, out_token)
    with hooked(after=[(unembedding, lambda module, args, output: seen.append(output))]):
        recording.model(**recording.inputs)
    return seen[-1][0, out_token]
