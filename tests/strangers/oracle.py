"""Is an attention tensor right? Answered without the package's own code, by its public members alone.

The witness is a derivative (`frozen.py`) of the model itself, or of a plainly written twin with the same weights, from
a known state to a known state. Value, linearity and the adjoint law alone do not identify an operator; this does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from strangers.frozen import Frozen
from torch import Tensor, nn

N_COTANGENTS = (1, 3, 8, 20)
"""How many at once: an engine may change on the way."""


def randn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def gap(found: Tensor, expected: Tensor) -> float:
    """The relative difference; infinite for another shape, or numbers that are none."""
    if found.shape != expected.shape:
        return float("inf")
    difference = float((found.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-300))
    return difference if difference == difference else float("inf")


def first_tensor(value: Any) -> Tensor:
    """The state in what a module takes or gives."""
    values = value.values() if isinstance(value, Mapping) else value if isinstance(value, (tuple, list)) else (value,)
    for one in values:
        if isinstance(one, Tensor) and one.is_floating_point() and one.dim() >= 2:
            return one
    raise LookupError("no state among the values")


def as_tokens(state: Tensor) -> Tensor:
    """A state of one sample as (token, channel), the batch axis wherever it is."""
    if state.dim() == 3:
        return state[:, 0] if state.shape[1] == 1 else state[0]
    return state


@dataclass(frozen=True, kw_only=True)
class Places:
    """Which states of a model are X⁰ and X^N, by module path.

    Attributes:
        blocks: The path of the list of blocks, or the paths of blocks, in the order of their calls.
        end: The module that gives X^N.
        start: The module that gives X⁰; what enters the first block if None.
        head: The module that gives logits, if one is to be checked.
    """

    blocks: str | tuple[str, ...] = "blocks"
    end: str = "norm"
    start: str | None = None
    head: str | None = None

    def block_paths(self, model: nn.Module) -> tuple[str, ...]:
        if isinstance(self.blocks, tuple):
            return self.blocks
        return tuple(f"{self.blocks}.{name}" for name, _ in model.get_submodule(self.blocks).named_children())


@dataclass
class Pass:
    """The states of one pass: those entering blocks, then X^N, and the logits."""

    states: list[Tensor] = field(default_factory=list)
    end: Tensor | None = None
    logits: Tensor | None = None


class Witness:
    """T, B and the states of a model at an input, by a run of the model and by gradients of the frozen run.

    Args:
        model: The model, or a twin of it that can be differentiated; it is run as it is, in evaluation mode.
        call: Runs a model on the input.
        places: Where its states are.
    """

    def __init__(self, model: nn.Module, call: Callable[[nn.Module], Any], places: Places) -> None:
        self.model, self.call, self.places = model, call, places
        self.paths = places.block_paths(model)
        with torch.no_grad():
            self.plain = self._run(leaf=False)

    @cached_property
    def frozen(self) -> Pass:
        """The states with the graph of the frozen run between them."""
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        for parameter in parameters:
            parameter.requires_grad_(False)
        try:
            with torch.enable_grad(), Frozen():
                return self._run(leaf=True)
        finally:
            for parameter in parameters:
                parameter.requires_grad_(True)

    def _run(self, *, leaf: bool) -> Pass:
        found = Pass()
        with _watched(self.model, self.places, self.paths, found, leaf=leaf):
            self.call(self.model)
        assert found.end is not None, f"{self.places.end} never ran"
        found.states.append(found.end)
        return found

    @property
    def n_blocks(self) -> int:
        return len(self.plain.states) - 1

    @property
    def input(self) -> Tensor:
        return as_tokens(self.plain.states[0])

    @property
    def output(self) -> Tensor:
        return as_tokens(self.plain.states[-1])

    @cached_property
    def dense(self) -> Tensor:
        """T, (out_token, out_channel, in_token, in_channel)."""
        return self.between(0, self.n_blocks)

    @cached_property
    def bias(self) -> Tensor:
        return self.output - torch.einsum("odic,ic->od", self.dense, self.input)

    def between(self, start: int, stop: int) -> Tensor:
        """The operator from the state entering block `start` to the one entering `stop`."""
        shape = as_tokens(self.plain.states[stop]).shape
        unit = torch.eye(shape.numel(), dtype=self.output.dtype).view(-1, *shape)
        return self.pull(unit, start, stop).unflatten(0, shape)

    def pull(self, cotangents: Tensor, start: int, stop: int) -> Tensor:
        """Tᵀu of that operator, for several u."""
        x, y = self.frozen.states[start], as_tokens(self.frozen.states[stop])
        pulled = torch.autograd.grad(y, x, cotangents, is_grads_batched=True, retain_graph=True, allow_unused=True)[0]
        pulled = torch.zeros(len(cotangents), *x.shape, dtype=x.dtype) if pulled is None else pulled
        return torch.stack([as_tokens(one) for one in pulled]).detach()

    def in_class(self, out_token: int, target: int) -> Tensor:
        """What each input token carries of one logit."""
        assert self.frozen.logits is not None
        logits = self.frozen.logits
        logit = logits.reshape(-1, logits.shape[-1])[out_token, target]
        x = self.frozen.states[0]
        gradient = torch.autograd.grad(logit, x, retain_graph=True)[0]
        return (as_tokens(gradient) * self.input).sum(-1)


@contextmanager
def _watched(model: nn.Module, places: Places, paths: tuple[str, ...], found: Pass, *, leaf: bool) -> Iterator[None]:
    """Note the states of a run; with `leaf`, the first of them is cut loose so that it can be differentiated by."""

    def note(state: Tensor) -> Tensor:
        is_first = leaf and not found.states
        state = state.detach().clone().requires_grad_() if is_first else state
        found.states.append(state)
        return state

    def entering(_: nn.Module, args: Any, kwargs: Any) -> Any:
        old = first_tensor((*args, *kwargs.values()))
        if places.start is not None and len(found.states) == 1 and not entered:
            entered.append(True)  # what enters the first block is beyond X⁰ and no state of its own
            return None
        new = note(old)
        entered.append(True)
        return tuple(new if a is old else a for a in args), {k: new if v is old else v for k, v in kwargs.items()}

    def leaving_start(_: nn.Module, args: Any, output: Any) -> Any:
        return note(output) if not found.states else None

    def ending(_: nn.Module, args: Any, output: Any) -> None:
        found.end = first_tensor(output)

    def heading(_: nn.Module, args: Any, output: Any) -> None:
        found.logits = output

    entered: list[bool] = []
    of_end, of_head = model.get_submodule(places.end), places.head and model.get_submodule(places.head)
    # First of all hooks on the way in and last on the way out, so that the user's own count as the model.
    hooks = [
        model.get_submodule(path).register_forward_pre_hook(entering, with_kwargs=True, prepend=True)
        for path in dict.fromkeys(paths)
    ]
    hooks.append(of_end.register_forward_hook(ending))
    if places.start is not None:
        hooks.append(model.get_submodule(places.start).register_forward_hook(leaving_start))
    if of_head:
        hooks.append(of_head.register_forward_hook(heading))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


# What is asked of a tensor -------------------------------------------------------------------------------------------


def states(T: Any, n: int, seed: int = 1, scale: float = 10.0) -> Tensor:
    """States far from X: another direction, `scale` times its size."""
    return scale * float(T.input.square().mean().sqrt()) * randn(n, *T.input.shape, seed=seed).to(T.input.dtype)


def laws(T: Any) -> dict[str, float]:
    """What must hold of T alone, without a witness: linear, adjoint, and every engine the same operator."""
    u, v = states(T, 2)
    both = T @ (2.5 * u - 0.5 * v)
    errors = {"linearity": gap(2.5 * (T @ u) - 0.5 * (T @ v), both)}
    y = T @ v
    for n in N_COTANGENTS:
        w = randn(n, *T.output.shape, seed=n).to(y.dtype)
        pulled = T.T @ w
        inner = (w * y).sum((1, 2)) - (pulled * v).sum((1, 2))
        errors[f"adjoint of {n}"] = float(inner.norm() / (w.norm(dim=(1, 2)) * y.norm()).norm().clamp_min(1e-300))
    last = T.output.shape[0] - 1
    rows = T.rows(last)
    errors["rows"] = gap(torch.einsum("dic,ic->d", rows, v), y[last])
    one = torch.zeros(1, *T.output.shape, dtype=y.dtype)
    one[0, last, 0] = 1
    errors["one row"] = gap(rows[0], (T.T @ one)[0])
    return errors


def all_rows(T: Any) -> dict[str, float]:
    """Maps of every output, against the dense tensor; small models only."""
    dense = T.dense()
    unit = torch.eye(dense[0, 0].numel(), dtype=dense.dtype).unflatten(1, dense.shape[2:])
    columns = torch.stack([T @ one for one in unit[:: max(1, len(unit) // 12)]], -1)
    expected = dense.flatten(2)[..., :: max(1, len(unit) // 12)]
    contributions = torch.einsum("od,odic,ic->oi", T.output, dense, T.input)
    return {
        "dense": gap(expected, columns),
        "norm map": gap(T.map("tensor.norm").scores, dense.norm(dim=(1, 3)).to(torch.float32)),
        "in_out map": gap(T.map("tensor.in_out").scores, contributions.to(torch.float32)),
    }


def passes_nothing(T: Any) -> list[str]:
    """Parts of the operator that pass nothing of a random state on: held too much."""
    silent = []
    ranges = [(0, T.n_blocks)] + [(n, n + 1) for n in range(T.n_blocks)]
    for start, stop in ranges:
        part = T if (start, stop) == (0, T.n_blocks) else T.blocks(start, stop)
        v = states(part, 1, scale=1.0)[0]
        if float((part @ v).norm()) < 1e-6 * float(v.norm()):
            silent.append(f"blocks {start}:{stop}")
    return silent


def against(T: Any, witness: Witness, *, has_ranges: bool = True) -> dict[str, float]:
    """How far a tensor is from a witness, by what was asked of it."""
    wide, dense = witness.output.dtype, witness.dense
    first = T.map("tensor.in_out", out_token=-1).scores[0]  # before anything else: it may use up what was recorded
    expected = torch.einsum("d,dic,ic->i", witness.output[-1], dense[-1], witness.input)
    v, u = states(T, 3), randn(20, *T.output.shape, seed=5).to(wide)
    pulled = torch.einsum("nod,odic->nic", u, dense)
    errors = {
        "first in_out": gap(first, expected.to(torch.float32)),
        "input": gap(T.input, witness.input),
        "output": gap(T.output, witness.output),
        "value": gap(T @ T.input + T.bias, witness.output),
        "bias": gap(T.bias - witness.bias + witness.output, witness.output),
        "apply": gap(T @ v, torch.einsum("odic,nic->nod", dense, v.to(wide))),
    }
    errors |= {f"adjoint of {n}": gap(T.T @ u[:n], pulled[:n]) for n in N_COTANGENTS}
    errors |= {f"row {i}": gap(T.rows(i), dense[i]) for i in (0, T.output.shape[0] - 1)}
    errors["dense"] = gap(T.dense(), dense)
    errors["norm map"] = gap(T.map("tensor.norm").scores, dense.norm(dim=(1, 3)).to(torch.float32))
    in_out = torch.einsum("od,odic,ic->oi", witness.output, dense, witness.input)
    errors["in_out map"] = gap(T.map("tensor.in_out").scores, in_out.to(torch.float32))
    if witness.places.head is not None:
        errors["in_class map"] = gap(
            T.map("tensor.in_class", out_token=-1, target=2).scores[0], witness.in_class(-1, 2).float()
        )
    return errors | (of_blocks(T, witness) if has_ranges else {})


def of_blocks(T: Any, witness: Witness) -> dict[str, float]:
    """Block by block: the number of them, and each by itself, through many cotangents."""
    errors = {"number of blocks": float(abs(T.n_blocks - witness.n_blocks))}
    for n in range(min(T.n_blocks, witness.n_blocks)):
        part, v = T.blocks(n, n + 1), states(T.blocks(n, n + 1), 1)[0]
        u = randn(9, *as_tokens(witness.plain.states[n + 1]).shape, seed=6)
        expected = witness.pull(u, n, n + 1)
        errors[f"block {n} adjoint"] = gap(part.T @ u, expected)
        errors[f"block {n} apply"] = gap((u * (part @ v)).sum((1, 2)), (expected * v).sum((1, 2)))
    return errors
