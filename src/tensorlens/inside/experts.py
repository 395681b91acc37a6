r"""Experts of a mixture feed-forward: what each wrote, at the tokens that it was chosen for.

A module that takes states and, beside them, the numbers of the experts chosen for each token gives out

    y_j = Σ_{e ∈ chosen(j)} w_{j,e} f_e(x_j),

by adding the experts' rows to their tokens one expert after the other, or by a sum over the choices of each token.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from tensorlens.freezing.interpreter import Interpreter
from tensorlens.freezing.traced import constant, is_live, raw
from tensorlens.inside.stream import edge_of


class ExpertPart(NamedTuple):
    """What one expert wrote: where rows that hold it are in the graph, their values, and whose they are.

    `tokens` has the token of each row that is the expert's, `rows` which of all rows these are.
    """

    expert: int
    edge: GradientEdge
    value: Tensor
    tokens: Tensor
    rows: Tensor


class _Rows(NamedTuple):
    edge: GradientEdge
    value: Tensor
    tokens: Tensor


class ExpertObserver:
    """Watches experts write, in the blocks where they are asked for."""

    def __init__(self, blocks: frozenset[int] = frozenset()) -> None:
        self.blocks = blocks
        self.parts: dict[int, list[ExpertPart]] = {}
        self._added: list[_Rows] = []
        self._summed: _Rows | None = None

    def saw_call(self, run: Interpreter, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Keep what is added by index, and what is summed over choices."""
        if run.block not in self.blocks or not is_live(result):
            return
        if name in ("index_add_", "index_add") and len(args) == 4 and args[1] == 0 and _has_graph(args[3]):
            self._added.append(_Rows(edge_of(args[3]), constant(args[3]).clone(), constant(args[2]).clone()))
        elif name == "sum" and _has_graph(args[0]) and args[0].dim() == 3 and _axis(args, kwargs) in (1, -2):
            n_tokens, n_choices = args[0].shape[:2]
            tokens = torch.arange(n_tokens, device=args[0].device).repeat_interleave(n_choices)
            self._summed = _Rows(edge_of(args[0]), constant(args[0]).clone(), tokens)

    def saw_module(self, run: Interpreter, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """A module that took the numbers of experts says whose rows they were."""
        chosen = next((value for value in args[1:] if _is_choice(value)), None)
        if run.block is None or run.block not in self.blocks or chosen is None:
            return
        chosen = constant(chosen)
        experts = chosen.unique().tolist()
        if len(self._added) == len(experts):  # in the order of their numbers
            self.parts[run.block] = [
                ExpertPart(expert, *rows, torch.arange(len(rows.tokens), device=rows.tokens.device))
                for expert, rows in zip(experts, self._added, strict=True)
            ]
        elif self._summed is not None and self._summed.value.shape[:2] == chosen.shape:
            edge, value, tokens = self._summed
            places = {expert: (chosen.flatten() == expert).nonzero()[:, 0] for expert in experts}
            self.parts[run.block] = [
                ExpertPart(expert, edge, value, tokens[place], place) for expert, place in places.items()
            ]
        self._added, self._summed = [], None


def _has_graph(value: Any) -> bool:
    return is_live(value) and raw(getattr, value, "requires_grad")


def _axis(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return kwargs.get("dim", args[1] if len(args) > 1 else None)


def _is_choice(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 2 and value.dtype in (torch.int64, torch.int32)
