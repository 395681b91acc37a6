"""torch's recurrent layers, which it computes in one call: taken apart for the rules of their steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tensorlens.errors import NotLinearError
from tensorlens.recording.table import family
from tensorlens.recording.tape import Tape

State = tuple[Tensor, ...]
Cell = Callable[[Tensor, State, list[Any]], State]


def _gru(x: Tensor, state: State, weights: list[Any]) -> State:
    """One step: h' = (1 - z) ⊙ n + z ⊙ h with n = tanh(W x + r ⊙ (U h)); the gates r and z are factors."""
    (h,), (w_in, w_h, b_in, b_h) = state, weights
    from_x, from_h = F.linear(x, w_in, b_in).chunk(3, -1), F.linear(h, w_h, b_h).chunk(3, -1)
    reset, update = (torch.sigmoid(from_x[i] + from_h[i]) for i in (0, 1))
    new = torch.tanh(from_x[2] + reset * from_h[2])
    return ((1 - update) * new + update * h,)


def _lstm(x: Tensor, state: State, weights: list[Any]) -> State:
    """One step: c' = f ⊙ c + i ⊙ g and h' = o ⊙ tanh(c'); i, f and o are factors."""
    (h, c), (w_in, w_h, b_in, b_h) = state, weights
    i, f, g, o = (F.linear(x, w_in, b_in) + F.linear(h, w_h, b_h)).chunk(4, -1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


def _rnn(activation: Callable[[Tensor], Tensor]) -> Cell:
    def step(x: Tensor, state: State, weights: list[Any]) -> State:
        w_in, w_h, b_in, b_h = weights
        return (activation(F.linear(x, w_in, b_in) + F.linear(state[0], w_h, b_h)),)

    return step


CELLS: dict[str, Cell] = {"gru": _gru, "lstm": _lstm, "rnn_tanh": _rnn(torch.tanh), "rnn_relu": _rnn(torch.relu)}


@family("gru_cell lstm_cell rnn_tanh_cell rnn_relu_cell")
def cell(run: Tape, function: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One step."""
    kind = name.removesuffix("_cell")
    x, state, *weights = args
    weights = [*weights, None, None][:4]
    found = CELLS[kind](x, tuple(state) if kind == "lstm" else (state,), weights)
    return found if kind == "lstm" else found[0]


@family("gru lstm rnn_tanh rnn_relu")
def layers(run: Tape, function: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """All steps of all layers, in both directions where the model has them."""
    kind = name
    if not isinstance(args[3], bool):
        raise NotLinearError(
            f"`{kind}` of packed sequences has no rule. Expected padded tensors; call the layer without "
            "`pack_padded_sequence`, or register an adapter for its class with `tensorlens.adapter`."
        )
    x, start, flat, has_biases, n_layers, _, _, bidirectional, batch_first = args
    start = tuple(start) if kind == "lstm" else (start,)
    x = x.transpose(0, 1) if batch_first else x
    n_directions, size = 1 + bidirectional, 4 if has_biases else 2
    if len(flat) != n_layers * n_directions * size:
        raise NotLinearError(f"`{kind}` with projections has no rule. Expected `proj_size=0`.")
    ends: list[State] = []
    for layer in range(n_layers):
        outputs = []
        for direction in range(n_directions):
            n = layer * n_directions + direction
            weights = [*flat[n * size : (n + 1) * size], None, None][:4]
            steps, end = _one_way(CELLS[kind], x, tuple(s[n] for s in start), weights, backwards=direction == 1)
            outputs.append(steps)
            ends.append(end)
        x = outputs[0] if n_directions == 1 else torch.cat(outputs, -1)
    return (x.transpose(0, 1) if batch_first else x, *(torch.stack(parts) for parts in zip(*ends, strict=True)))


def _one_way(step: Cell, x: Tensor, state: State, weights: list[Any], *, backwards: bool) -> tuple[Tensor, State]:
    found = []
    for row in x.flip(0).unbind(0) if backwards else x.unbind(0):
        state = step(row, state, weights)
        found.append(state[0])
    return torch.stack(found[::-1] if backwards else found), state
