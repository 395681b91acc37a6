"""Logits laid out as public code returns them: tokens first, merged with samples, classes before tokens, in records."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from strangers.cases import ids
from strangers.models import LENGTH, WORDS, D, FeedForward, H, WithHead, randomised
from torch import Tensor, nn

import tensorlens as tl


@dataclass
class Record:
    states: Any
    inner: Any


class Told(WithHead):
    """By its layer or by a product with a weight, which is not known as an unembedding; then in a layout of its own."""

    def __init__(self, end: Callable[[Tensor], Any], *, by_layer: bool) -> None:
        super().__init__()
        self.end, self.by_layer = end, by_layer

    def forward(self, input_ids: Tensor) -> Any:
        x = self.body(input_ids)
        return self.end(self.head(x) if self.by_layer else x @ self.head.weight.T + self.head.bias)


class MergedBefore(WithHead):
    """The unembedding reads the tokens of all samples in one axis."""

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.body(input_ids).view(-1, D))


class TokensFirst(WithHead):
    """Blocks of states (token, sample, channel), as torch's own modules take them."""

    def __init__(self, *, by_layer: bool) -> None:
        super().__init__()
        self.by_layer = by_layer
        self.blocks = nn.ModuleList([nn.TransformerEncoderLayer(D, H, 24) for _ in range(2)])

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedded(input_ids).transpose(0, 1)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return self.head(x) if self.by_layer else x @ self.head.weight.T + self.head.bias


def merged(logits: Tensor) -> Tensor:
    return logits.flatten(0, 1)


def classes_first(logits: Tensor) -> Tensor:
    return logits.transpose(1, 2)


def in_records(logits: Tensor) -> Record:
    return Record((torch.zeros(1, LENGTH, D), torch.ones(1, LENGTH, D)), {"head": {"logits": logits}})


MODELS = {
    f"{end.__name__}, {'a layer' if by_layer else 'a product'}": (lambda e=end, b=by_layer: Told(e, by_layer=b))
    for end in (merged, classes_first, in_records)
    for by_layer in (True, False)
}
MODELS["merged before the layer"] = MergedBefore
MODELS["tokens first, a layer"] = lambda: TokensFirst(by_layer=True)
MODELS["tokens first, a product"] = lambda: TokensFirst(by_layer=False)


def by_autograd(model: Any, out_token: int, target: int) -> tuple[Tensor, Tensor]:
    """Gradient times X\u2070 by token for one logit, and the logits, from the states that the head is given."""
    kept: dict[str, Tensor] = {}

    def keep(_: nn.Module, args: Any) -> Any:
        kept["first"] = args[0].detach().requires_grad_()
        return (kept["first"], *args[1:])

    hooks = [
        model.blocks[0].register_forward_pre_hook(keep),
        model.norm.register_forward_hook(lambda m, a, y: kept.update(last=y)),
    ]
    with torch.enable_grad():
        model(ids())
        logits = model.head(kept["last"].reshape(LENGTH, D))[out_token]
        slope = torch.autograd.grad(logits[target], kept["first"])[0]
    for hook in hooks:
        hook.remove()
    return (slope * kept["first"]).sum(-1).flatten().detach(), logits.detach()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("out_token", [-1, 2])
def test_maps_and_predictions_are_of_the_token_that_was_asked(name: str, out_token: int) -> None:
    model = randomised(MODELS[name]())
    expected, logits = by_autograd(model, out_token, 3)
    T = tl.Lens(model, rules="jacobian")(ids())
    assert T.certificate().passed
    found = T.map("tensor.in_class", out_token=out_token, target=3)
    torch.testing.assert_close(found.scores.flatten(), expected, rtol=1e-9, atol=1e-12)
    by_gradient = T.map("gradient.times_input", out_token=out_token, target=3)
    torch.testing.assert_close(by_gradient.scores.flatten(), expected, rtol=1e-5, atol=1e-7)
    best = T.predictions(1, out_token=out_token)[0]
    assert (best.index, best.logit) == (int(logits.argmax()), pytest.approx(float(logits.max())))


@pytest.mark.parametrize("name", ["merged, a product", "merged before the layer", "tokens first, a product"])
def test_batches_and_runs_of_the_model_take_these_layouts(name: str) -> None:
    model = randomised(MODELS[name]())
    lens, some = tl.Lens(model), [[5, 9, 23], [1, 2, 3, 4], [7, 7, 7], [8, 1, 2]]
    for one, found in zip(some, lens.maps(some, "tensor.in_class"), strict=True):
        alone = tl.Lens(model)(one).map("tensor.in_class", out_token=-1)
        torch.testing.assert_close(found.scores, alone.scores)
    T = lens(ids())
    whole = T.predictions(1)[0]
    change = T.ablate("block 0, feed-forward", target=3)
    assert whole.name == change.before[0].name
    logit = next(one.logit for one in T.predictions(WORDS) if one.index == 3)
    assert change.value == pytest.approx(logit)
    model.blocks[0].register_forward_hook(lambda m, a, y: y - of_feed_forward(m, a[0]))
    edited = tl.Lens(model)(ids()).predictions(WORDS)
    assert change.true == pytest.approx(next(one.logit for one in edited if one.index == 3))


def of_feed_forward(block: Any, x: Tensor) -> Tensor:
    """What would be missing from a block's output without its feed-forward; in torch's layer a norm comes after it."""
    if isinstance(block, nn.TransformerEncoderLayer):
        y = block.norm1(x + block.self_attn(x, x, x, need_weights=False)[0])
        return block.norm2(y + block.linear2(block.linear1(y).relu())) - block.norm2(y)
    return block.mlp(block.ln_2(x + block.attn(block.ln_1(x))))


@pytest.mark.parametrize("end", [lambda y: y[:, :-1], lambda y: y.unflatten(-1, (1, WORDS))])
def test_logits_of_unknown_tokens_are_no_head(end: Callable[[Tensor], Any]) -> None:
    T = tl.Lens(randomised(Told(end, by_layer=False)))(ids())
    assert T.certificate().passed
    with pytest.raises(tl.MethodError, match="no head that gives logits for each token or for the whole input"):
        T.map("tensor.in_class", target=3)


def test_one_row_of_logits_is_of_the_whole_input() -> None:
    T = tl.Lens(randomised(Told(lambda y: y[:, -1:], by_layer=False)))(ids())
    found = T.map("tensor.in_class", target=3)
    assert found.scores.shape == (1, LENGTH)


class Mixture(FeedForward):
    """Two experts that are called even with no token at all."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, D)
        chosen, y = (flat[:, 0] < 1e6).long(), torch.zeros_like(flat)
        for n in range(2):
            places = (chosen == n).nonzero()[:, 0]
            y = y.index_add(0, places, super().forward(flat[places]) * (n + 1))
        return y.view_as(x)


def test_norms_where_an_expert_gets_no_token() -> None:
    model = randomised(WithHead())
    for block in model.blocks:  # type: ignore[union-attr]
        block.mlp = randomised(Mixture())  # type: ignore[union-attr]
    T = tl.Lens(model)(ids())
    full = T.dense()
    norms = T.map("tensor.norm").scores
    torch.testing.assert_close(norms, full.square().sum((1, 3)).sqrt(), rtol=1e-6, atol=1e-8)


class NewPath(WithHead):
    """Leaves out its last block in every other call, once it was recorded."""

    is_recorded, calls = False, 0

    def body(self, input_ids: Tensor) -> Tensor:
        NewPath.calls += NewPath.is_recorded
        x = self.embedded(input_ids)
        for block in self.blocks[: 2 if NewPath.calls % 2 else 3]:  # type: ignore[index]
            x = block(x)
        return self.norm(x)


def test_a_certificate_says_that_a_model_takes_another_path() -> None:
    NewPath.is_recorded, NewPath.calls = False, 0
    T = tl.Lens(randomised(NewPath()))(ids())
    NewPath.is_recorded = True
    with pytest.raises(tl.InputError, match="ran only 2 of the 3 blocks"):
        T.certificate()
