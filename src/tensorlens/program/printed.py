"""A program as text: one line for each step, with the names that the model gives its weights."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from inspect import signature
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import torch

from tensorlens.program.nodes import Held, Slot, Step
from tensorlens.program.operations import OPERATIONS

if TYPE_CHECKING:
    from tensorlens.program.program import Program

WIDTH = 88
"""Where the column of module paths begins, at most."""


def printed(program: Program) -> str:
    """The steps of a program: ``x7 = linear(x6, attn.c_proj.weight, attn.c_proj.bias)``, by block.

    Live values are x0, x1, …; weights have their names, within a block those inside it; other constants are shown by
    their shapes in angle brackets.
    """
    names = _names(program)
    lines = [f"{len(program.steps)} steps from {_list(program.inputs)} to {_list(program.outputs)}"]
    lines += [f"  x{slot} {_shape(program.specs[slot].shape)} given" for slot in program.inputs]
    prefix, block = "", -1
    for step in program.steps:
        if step.block != block:
            block, place = step.block, "before the blocks" if block == -1 else "between or after the blocks"
            prefix = _prefix(program, block)
            lines.append(place if block is None else f"block {block}{f' ({prefix})' if prefix else ''}")
        lines.append(_line(program, step, names, prefix))
    return "\n".join(lines)


def _line(program: Program, step: Step, names: Mapping[int, str], prefix: str) -> str:
    def shown(value: Any) -> str:
        if type(value) is Slot:
            return f"x{value.index}"
        if type(value) is Held:
            return _within(names.get(value.index), prefix) or f"⟨{_shape(program.constants[value.index].shape)}⟩"
        if type(value) in (tuple, list):
            left, right = "()" if type(value) is tuple else "[]"
            return left + ", ".join(shown(one) for one in value) + right
        return _plain(value)

    def named(value: Any, parameter: str) -> str:
        is_clear = type(value) in (Slot, tuple, list, str) or type(value) is Held and value.index in names
        return shown(value) if is_clear or len(parameter) < 2 else f"{parameter}={shown(value)}"

    pairs = zip(step.args, _parameters(step.operation), strict=False)
    args = [named(value, parameter) for value, parameter in pairs if value is not None and value is not False]
    options = [f"{name}={shown(value)}" for name, value in step.options.items()]
    shape = _shape(program.specs[step.out].shape)
    text = f"  x{step.out} = {step.operation}({', '.join([*args, *options])}) {shape}"
    module = _within(step.module, prefix)
    return f"{text:<{WIDTH}}  {module}" if module else text


@cache
def _parameters(operation: str) -> tuple[str, ...]:
    """Names of the arguments of an operation; empty for functions of torch, which have no signature to ask."""
    try:
        found = tuple(signature(OPERATIONS[operation].run).parameters)
    except ValueError:
        found = ()
    return (*found, *("" for _ in range(8)))


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


def _names(program: Program) -> Mapping[int, str]:
    """Names of the weights, also where further constants were appended."""
    constants: Any = program.constants
    while hasattr(constants, "first"):
        constants = constants.first
    return getattr(constants, "names", {})


def _prefix(program: Program, block: int | None) -> str:
    """The path that all modules of a block have in common."""
    paths = [step.module.split(".") for step in program.steps if step.block == block and block is not None]
    same = list(takewhile(lambda names: len(set(names)) == 1, zip(*paths, strict=False)))
    return ".".join(names[0] for names in same)


def _within(name: str | None, prefix: str) -> str:
    if not name or name == prefix:
        return ""
    return name.removeprefix(f"{prefix}.") if prefix else name
