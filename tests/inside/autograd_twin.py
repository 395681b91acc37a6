"""The frozen model with a graph: the steps of its program run forwards, by plain autograd instead of transposes.

Weights and biases are leaves of the graph, so that ⟨∂t/∂p, p⟩ says what each of them gives of a target.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import tensorlens as tl
from tensorlens.program.steps import OPERATIONS, Held, Slot, mapped
from tensorlens.recording.recording import Span


class Twin:
    """A logit of the frozen model at X, with every value on the way to it.

    Attributes:
        t: The logit.
        weights: The leaves, by the path of the parameter; a part of one has the path of the whole.
        values: What each slot holds.
    """

    def __init__(self, T: tl.AttentionTensor, out_token: int, target: int) -> None:
        recording = T.operator.recording
        program = recording.part(Span(0, recording.n_blocks), to_logits=True)
        names: dict[int, str] = recording.program.constants.names  # type: ignore[attr-defined]
        self.weights: list[tuple[str, Tensor]] = []
        leaves: dict[int, Tensor] = {}
        with torch.enable_grad():
            for n in program.used:
                value = program.constants[n]
                if n in names and value.is_floating_point():
                    leaves[n] = value.detach().clone().requires_grad_()
                    self.weights.append((names[n], leaves[n]))
            x = recording.states[0].clone().requires_grad_()
            self.values: dict[int, Tensor] = {program.inputs[0]: x}

            def given(leaf: Any) -> Any:
                if type(leaf) is Slot:
                    return self.values[leaf.index]
                return leaves.get(leaf.index, program.constants[leaf.index]) if type(leaf) is Held else leaf

            for step in program.steps:
                self.values[step.out] = OPERATIONS[step.operation].run(*mapped(step.args, given), **step.options)
            end = self.values[program.outputs[0]][0, out_token]
            if recording.head is None:
                self.t = end[target]
                return
            weight, bias = recording.head.weight, recording.head.bias
            self.t = end @ weight[target]
            if bias is not None:
                leaf = bias.detach().clone().requires_grad_()
                self.weights.append(("head.bias", leaf))
                self.t = self.t + leaf[target]

    def effects(self) -> dict[str, float]:
        """⟨∂t/∂p, p⟩ of every parameter that a gradient of the target reaches."""
        pairs = zip(self.weights, self.gradients(self.t, [leaf for _, leaf in self.weights]), strict=True)
        found: dict[str, float] = {}
        for (path, leaf), g in pairs:
            if g is not None:
                found[path] = found.get(path, 0.0) + float((g * leaf.detach()).sum())
        return found

    def gradient(self, path: str) -> Tensor:
        """∂t/∂p of one parameter, as it lies in the program: a matrix that is transposed there is so here."""
        return self.gradients(self.t, [next(leaf for name, leaf in self.weights if name == path)])[0]

    def at(self, slot: int) -> Tensor:
        """∂t/∂y of a slot."""
        return self.gradients(self.t, [self.values[slot]])[0]

    def gradients(self, y: Tensor, ends: list[Tensor], cotangent: Tensor | None = None) -> tuple[Any, ...]:
        """Gradients of a value on the way."""
        return torch.autograd.grad([y], ends, None if cotangent is None else [cotangent], True, allow_unused=True)


def block_paths(T: tl.AttentionTensor) -> list[str]:
    """Paths of the blocks."""
    recording = T.operator.recording
    assert recording.origin is not None
    return [call.path for call in recording.origin.calls]


def given_by(T: tl.AttentionTensor, path: str) -> int:
    """The slot of what a module gave."""
    return next(one.slot for one in T.operator.recording.modules if one.path == path and one.slot is not None)


def logit(T: tl.AttentionTensor, state: Tensor, out_token: int, target: int, depth: int = 0) -> float:
    """The frozen model's logit with another state at some depth, and without the heads that T leaves out."""
    recording = T.operator.recording
    end = recording.push(state, Span(depth, recording.n_blocks), T.operator.heads, to_logits=True)
    return float(recording.logits(end, out_token)[0, target])
