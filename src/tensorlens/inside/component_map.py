"""`ComponentMap`: what each component carries of a target at every token. A record."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from rich.console import Console
from rich.table import Table
from rich.text import Text
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from tensorlens.errors import InputError, check_whole
from tensorlens.inside.record_files import read_document, reading, save_record
from tensorlens.strict_json import from_json, to_json

FORMAT = "tensorlens.component_map/1"
_TEXT = ("tokens", "effect", "target", "value", "meta")


@dataclass(frozen=True, kw_only=True)
class Component:
    """Something that writes to the residual stream.

    Attributes:
        kind: ``"embedding"``, ``"attention head"``, ``"attention"`` where its heads cannot be told apart,
            ``"attention bias"`` (of its output projection), ``"feed-forward"``, ``"bias"`` (on the stream itself), or
            ``"block"`` where the parts of a block cannot be told apart. Parts of a block without attention are
            ``"part 1"``, ``"part 2"``; what is written after a block and before the next is ``"between blocks"``. A
            second one of a kind is ``"attention 2"``, ``"feed-forward 2"``. Where neurons were asked for,
            ``"neuron"`` and ``"feed-forward bias"``; where experts were, ``"expert"``, and ``"feed-forward"`` for what
            belongs to no expert.
        block: The block it is in, if any.
        head: Its number, if it is a head.
        neuron: Its number, if it is a neuron.
        expert: Its number, if it is an expert.
    """

    kind: str
    block: int | None = None
    head: int | None = None
    neuron: int | None = None
    expert: int | None = None

    def __str__(self) -> str:
        if self.kind == "block":
            return f"block {self.block}"
        number = next((one for one in (self.neuron, self.expert) if one is not None), self.head)
        what = self.kind if number is None else f"{self.kind} {number}"
        return what if self.block is None else f"block {self.block}, {what}"

    @property
    def column(self) -> str | None:
        """Its column in the picture of blocks and heads; None if it has no cell there."""
        if self.block is None or self.kind.endswith("bias") or self.neuron is not None or self.expert is not None:
            return None
        if self.head is None:
            return self.kind
        return str(self.head) if self.kind == "attention head" else f"{self.kind} {self.head}"

    @property
    def short(self) -> str:
        """A name for a picture."""
        if self.block is None:
            return self.kind
        what = {"feed-forward": "ff", "attention bias": "b", "bias": "b"}.get(self.kind, "")
        return f"{self.block}.{self.head}" if self.head is not None else f"{self.block} {what}".strip()


class TopComponent(NamedTuple):
    """One of the components that carry most: its score over all tokens, and the token where it carries most."""

    component: Component
    score: float
    token: int


@dataclass(frozen=True, kw_only=True, eq=False)
class ComponentMap:
    r"""What each component carries of a target at every token.

    Total effects $e_c = ⟨\partial t/\partial y_c, y_c⟩$ count all paths from a component to the target, so what passes
    through several components counts in each; at every depth, the flow and the biases after it sum to the target.
    Direct effects count the path along the stream alone and sum to the target.

    Attributes:
        scores: One row per component, one column per token.
        labels: The component of each row.
        tokens: A label for each token.
        effect: ``"total"`` or ``"direct"``.
        target: What is explained.
        value: The number that is explained.
        depths: The flow $⟨λ^n_j, X^n_j⟩$: row n is the state that enters block n, the last one leaves the last block.
        meta: Model, versions, rules, blocks, output.
    """

    scores: Float[Tensor, "component token"]
    labels: tuple[Component, ...]
    tokens: tuple[str, ...]
    effect: str
    target: str
    value: float
    depths: Float[Tensor, "depth token"]
    meta: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Take copies on the CPU and check shapes against labels."""
        for name in ("scores", "depths"):
            object.__setattr__(self, name, getattr(self, name).detach().to("cpu", copy=True))
        expected = (len(self.labels), len(self.tokens))
        if tuple(self.scores.shape) != expected or self.depths.shape[1:] != self.scores.shape[1:]:
            raise InputError(
                f"Expected scores of shape {expected} and a flow with as many columns; got {tuple(self.scores.shape)} "
                f"and {tuple(self.depths.shape)}."
            )

    def __repr__(self) -> str:
        """One line: what of what."""
        return (
            f"ComponentMap({self.effect} effects of {len(self.labels)} components × {len(self.tokens)} tokens on "
            f"{self.target!r} = {self.value:.4g})"
        )

    def flow(self) -> Float[Tensor, "depth token"]:
        """What the state at each depth and token carries of the target; of total effects, row 0 is the In+Class map."""
        return self.depths.clone()

    def heads(self) -> Float[Tensor, "block head"]:
        """Each head's score over all tokens; NaN where a block has fewer heads, or none that can be told apart."""
        found = [
            (label, row) for label, row in zip(self.labels, self.scores.sum(1), strict=True) if label.head is not None
        ]
        first, stop = self.meta.get("blocks") or (0, len(self.depths) - 1)
        size = max((label.head for label, _ in found if label.head is not None), default=-1) + 1
        table = torch.full((stop - first, size), float("nan"), dtype=self.scores.dtype)
        for label, score in found:
            assert label.block is not None and label.head is not None, "a head is in a block"
            place = label.block - first, label.head
            table[place] = score + torch.nan_to_num(table[place])
        return table

    def top(self, k: int = 10) -> list[TopComponent]:
        """The components with the largest scores over all tokens, of either sign."""
        k = check_whole(k, "k", 1)
        sums = self.scores.sum(1)
        best = sums.abs().topk(min(k, len(sums))).indices.tolist()
        return [TopComponent(self.labels[i], float(sums[i]), int(self.scores[i].abs().argmax())) for i in best]

    def show(self, console: Console | None = None, k: int = 10) -> None:
        """Print the strongest components; without a console, to standard output."""
        table = Table("component", "score", "most at", box=None, pad_edge=False)
        table.columns[1].justify = "right"
        for component, score, token in self.top(k):
            table.add_row(str(component), f"{score:+.4g}", Text(f"{token} {self.tokens[token]!r}"))
        console = console or Console(highlight=False)
        console.print(Text(f"{self.effect} effects on {self.target!r} = {self.value:.4g}", style="bold"))
        console.print(table)

    # Files ------------------------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> Path:
        """Write a .json or .safetensors file, whole or not at all."""
        return save_record(path, {".json": lambda: to_json(self.as_dict()), ".safetensors": self._safetensors})

    def as_dict(self) -> dict[str, Any]:
        """What the JSON file holds."""
        tensors = {name: getattr(self, name) for name in ("scores", "depths")}
        values = {name: tensor.tolist() for name, tensor in tensors.items()}
        return {"format": FORMAT, **self._text(), "dtype": str(self.scores.dtype).removeprefix("torch."), **values}

    def _text(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _TEXT} | {"labels": [asdict(label) for label in self.labels]}

    def _safetensors(self) -> bytes:
        tensors = {name: getattr(self, name).contiguous() for name in ("scores", "depths")}
        return save(tensors, metadata={"format": FORMAT, "record": to_json(self._text())})

    @classmethod
    def load(cls, path: str | Path) -> ComponentMap:
        """Read a file of `save`; `InputError` for a foreign or damaged one."""
        path = Path(path)
        with reading(cls, FORMAT, path):
            found = _read_json(path) if path.suffix == ".json" else _read_safetensors(path)
            labels = tuple(Component(**label) for label in found.pop("labels"))
            return cls(labels=labels, tokens=tuple(found.pop("tokens")), **found)


def _read_json(path: Path) -> dict[str, Any]:
    document = read_document(path, FORMAT)
    dtype = getattr(torch, document.pop("dtype"))
    return document | {name: torch.tensor(document[name], dtype=dtype) for name in ("scores", "depths")}


def _read_safetensors(path: Path) -> dict[str, Any]:
    with safe_open(path, framework="pt") as file:
        header = file.metadata() or {}
        if header["format"] != FORMAT:
            raise ValueError("another format")
        tensors = {name: file.get_tensor(name) for name in ("scores", "depths")}
        return from_json(header["record"]) | tensors
