"""A program as text: one line for each step, with the names that the model gives its weights."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from inspect import signature
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import torch

from tensorlens.program.steps import OPERATIONS, Held, Slot, Step

if TYPE_CHECKING:
    from tensorlens.program.program import Program

WIDTH = 84
"""The column at which module paths begin, at most."""

NAMES = {"inverse": "1/σ", "unit": "x̂"}
"""Names of arguments as readers know them, if the code uses different ones."""


def printed(program: Program) -> str:
    """The steps of a program, by block: ``x7  1×4×32  linear(x6, attn.c_proj.weight, .bias)``.

    Live values are x0, x1, …, each with its shape; weights have their names, within a block those inside it; other
    constants are shown by their shapes in angle brackets. Where no weight says it, the module stands at the end.
    """
    names, shapes = program.constants.names, {slot: _shape(spec.shape) for slot, spec in program.specs.items()}
    made = [*program.inputs, *(step.out for step in program.steps)]
    widths = max(len(str(slot)) for slot in made) + 1, max(len(shapes[slot]) for slot in made)
    ends = f"{len(program.steps)} steps from {_list(program.inputs)} to {_list(program.outputs)}"
    lines = [f"{ends}: x is live, ⟨…⟩ is held at this input, weights have their names"]
    lines += [f"  {f'x{slot}':<{widths[0]}}  {shapes[slot]:<{widths[1]}}  given" for slot in program.inputs]
    prefix, block, last = "", -1, max((step.block for step in program.steps if step.block is not None), default=-1)
    for n, step in enumerate(program.steps):
        if step.block != block:
            is_over = all(later.block is None for later in program.steps[n:]) and last >= 0
            place = "after the blocks" if is_over else "before the blocks" if block == -1 else "between blocks"
            block, prefix = step.block, _prefix(program, step.block)
            lines.append(place if block is None else f"block {block}{f' ({prefix})' if prefix else ''}")
        start = f"  {f'x{step.out}':<{widths[0]}}  {shapes[step.out]:<{widths[1]}}  "
        lines.append(start + _line(program, step, names, prefix, WIDTH - len(start)))
    return "\n".join(lines)


def _line(program: Program, step: Step, names: Mapping[int, str], prefix: str, width: int) -> str:
    weights: list[str] = []

    def shown(value: Any) -> str:
        if type(value) is Slot:
            return f"x{value.index}"
        if type(value) is Held and value.index in names:
            weights.append(names[value.index])
            owners = [name.rpartition(".")[0] for name in weights[-2:]]
            if len(owners) == 2 and owners[0] == owners[1]:  # the bias after its weight
                return f".{weights[-1].rpartition('.')[2]}"
            return _within(weights[-1], prefix)
        if type(value) is Held:
            value = program.constants[value.index]
        if isinstance(value, torch.Tensor):
            return f"⟨{_shape(value.shape)}⟩"
        if isinstance(value, (tuple, list)):
            left, right = "()" if isinstance(value, tuple) else "[]"
            return left + ", ".join(shown(one) for one in value) + right
        return _plain(value)

    def named(value: Any, parameter: str) -> str:
        is_clear = type(value) in (Slot, list, str) or type(value) is Held and value.index in names
        return shown(value) if is_clear or len(parameter) < 2 else f"{NAMES.get(parameter, parameter)}={shown(value)}"

    pairs = [*zip(step.args, _parameters(step.operation), strict=False)]
    pairs = [pair for pair in pairs if pair[0] is not None and pair[0] is not False and pair[1] != "shape"]
    options = [f"{name}={shown(value)}" for name, value in step.options.items()]
    text = f"{step.operation}({', '.join([*(named(*pair) for pair in pairs), *options])})"
    module = _within(step.module, prefix)
    if not module or any(weight.startswith(f"{step.module}.") for weight in weights):
        return text
    return f"{text:<{width}}  {module}"


@cache
def _parameters(operation: str) -> tuple[str, ...]:
    """Names of the arguments of an operation; empty for functions of torch, which report no signature."""
    found, one = (), OPERATIONS[operation]
    with suppress(ValueError):
        found = tuple(signature(one.run).parameters if one.transpose is None else signature(one.transpose).parameters)
    return (*found[one.transpose is not None :], *("" for _ in range(8)))


def _plain(value: Any) -> str:
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, slice):
        edges = ["" if edge is None else str(edge) for edge in (value.start, value.stop, value.step)]
        return ":".join(edges[:2] if value.step is None else edges)
    return "…" if value is Ellipsis else f"{value:.6g}" if isinstance(value, float) else str(value)


def _shape(shape: Any) -> str:
    return "×".join(map(str, shape)) or "1"


def _list(slots: tuple[int, ...]) -> str:
    return ", ".join(f"x{slot}" for slot in slots)


def _prefix(program: Program, block: int | None) -> str:
    """The path that all modules of a block have in common."""
    paths = [step.module.split(".") for step in program.steps if step.block == block and block is not None]
    same = list(takewhile(lambda names: len(set(names)) == 1, zip(*paths, strict=False)))
    return ".".join(names[0] for names in same)


def _within(name: str | None, prefix: str) -> str:
    if not name or name == prefix:
        return ""
    return name.removeprefix(f"{prefix}.") if prefix else name
