"""Training a small top-k dictionary or transcoder on the inputs and outputs of one component of a model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, normalize

from tensorlens.errors import InputError
from tensorlens.inside.block import StreamPass
from tensorlens.inside.dictionary import Encoder, read_slot
from tensorlens.progress import bar, check_cancelled

HELD_OUT = 0.1
"""Share of the tokens on which the error is measured."""
REVIVED_EVERY = 200
"""Number of steps after which features that were never active are restarted at the tokens explained worst."""


def gathered_states(lens: Any, texts: Iterable[Any], block: int, reads: str) -> tuple[Tensor, Tensor]:
    """The input and the output of a block's feed-forward: (token, channel) each, at all tokens of texts."""
    kept = list[list[Tensor]]()
    for text in texts:
        check_cancelled()
        operator = lens(text).operator
        if not 0 <= block < operator.n_blocks:
            raise InputError(f"This operator has no block {block!r}; expected one of 0 to {operator.n_blocks - 1}.")
        run = StreamPass(operator, operator.recording.pieces(operator.span, {}))
        one = run.block(block)
        slots = [read_slot(one, "feed-forward", what)[0] for what in (reads, "output")]
        values = one.values_of(slots)
        kept.append([one.to_tokens(values[slot])[0].detach() for slot in slots])
    if not kept:
        raise InputError("Expected texts to train on; got none.")
    read, written = (torch.cat(some) for some in zip(*kept, strict=True))
    return read, written


def trained_parts(
    x: Tensor, y: Tensor, *, n_features: int, k: int, steps: int, batch_size: int, seed: int, progress: bool | None
) -> tuple[Encoder, Tensor, Tensor, float]:
    """Train a top-k encoder of `x` and decoder of `y` with Adam: both, the decoder's bias and the held-out error."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(x), generator=generator)
    n_held = max(1, int(HELD_OUT * len(x)))
    held, own = order[:n_held].to(x.device), order[n_held:].to(x.device)
    if len(own) < n_features // 8 or k > n_features:
        raise InputError(f"Expected more tokens than {len(own)} for {n_features} features, and k at most as many.")
    scale = float(y[own].std()) or 1.0
    decoder = normalize(torch.randn(n_features, y.shape[1], generator=generator), dim=1).to(y)
    is_same = x.shape == y.shape and torch.equal(x, y)
    first = (
        torch.randn(n_features, x.shape[1], generator=generator).to(x) / x.shape[1] ** 0.5 if not is_same else decoder
    )
    made = [one.clone().requires_grad_() for one in (first, x.new_zeros(n_features), decoder, y[own].mean(0))]
    weight, bias, decoder, centre = made
    optimiser = torch.optim.Adam(made, lr=1e-3)
    seen = torch.zeros(n_features, dtype=torch.bool, device=x.device)
    for step in bar(range(steps), progress, unit=" steps"):
        check_cancelled()
        some = own[torch.randint(len(own), (batch_size,), generator=generator).to(own.device)]
        with torch.enable_grad():
            before = linear(x[some], weight, bias)
            best = before.topk(k, dim=-1)
            f = torch.zeros_like(before).scatter(-1, best.indices, best.values.relu())
            rest = (y[some] - centre - f @ decoder) / scale
            rest.square().mean().backward()
        optimiser.step()
        optimiser.zero_grad()
        with torch.no_grad():
            decoder.copy_(normalize(decoder, dim=1))
            seen[best.indices[best.values > 0]] = True
            if step % REVIVED_EVERY == REVIVED_EVERY - 1 and step < steps - REVIVED_EVERY:
                _revive(made, seen, x[some], rest)
                seen.zero_()
    weight, bias, decoder, centre = (one.detach() for one in made)
    encoder = Encoder(weight=weight, bias=bias, k=k)
    rest = y[held] - centre - encoder(x[held]) @ decoder
    share = float(rest.square().sum() / (y[held] - y[held].mean(0)).square().sum())
    return encoder, decoder, centre, share


def _revive(made: list[Tensor], seen: Tensor, x: Tensor, rest: Tensor) -> None:
    """Restart features that were never active, at the tokens explained worst."""
    dead = (~seen).nonzero()[:, 0]
    worst = rest.square().sum(1).argsort(descending=True)[: len(dead)]
    dead = dead[: len(worst)]
    made[2][dead] = normalize(rest[worst], dim=1)
    made[0][dead] = normalize(x[worst] - x.mean(0), dim=1) * made[0].norm(dim=1).mean()
    made[1][dead] = 0
