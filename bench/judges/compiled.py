"""Transformers compiled from programs (tracr), ported into torch: what a token reads is known from the program.

No layer norm, ReLU, bidirectional attention with a token at the start, positions added to the embeddings. A port is
checked against the stored outputs before anything is asked of it.
"""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bench.judges.engine import BenchItem, Judge
from tensorlens.errors import InputError, TensorLensError
from tensorlens.files import from_json
from tensorlens.lens import Lens
from tensorlens.models.foreign_files import check_zip, foreign_reader

MEASURES = ("reciprocal_rank", "top_1")
PORT_TOLERANCE = 1e-5
"""How far a port may be from the stored outputs."""


class CompiledAttention(nn.Module):
    """One head or several, every token to every token."""

    def __init__(self, width: int, inner: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.query, self.key, self.value = (nn.Linear(width, inner) for _ in range(3))
        self.linear = nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        """(sample, token, channel) to the same."""
        q, k, v = (
            part(x).unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        mixed = torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]), -1) @ v
        return self.linear(mixed.transpose(1, 2).flatten(2))


class CompiledBlock(nn.Module):
    """Attention and a feed-forward, each added to the stream."""

    def __init__(self, width: int, inner: int, n_heads: int, hidden: int) -> None:
        super().__init__()
        self.attn = CompiledAttention(width, inner, n_heads)
        self.linear_1, self.linear_2 = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        """(sample, token, channel) to the same."""
        x = x + self.attn(x)
        return x + self.linear_2(torch.relu(self.linear_1(x)))


class CompiledModel(nn.Module):
    """A compiled program. Its logits are the channels of the residual stream that hold the output.

    Args:
        weights: By their stored names.
        sizes: What stands beside them.
    """

    def __init__(self, weights: dict[str, np.ndarray], sizes: dict[str, Any]) -> None:
        super().__init__()
        n_vocabulary, width = weights["token_embed/embeddings"].shape
        inner = weights["transformer/layer_0/attn/query/w"].shape[1]
        self.embed = nn.Embedding(n_vocabulary, width)
        self.positions = nn.Embedding(len(weights["pos_embed/embeddings"]), width)
        self.blocks = nn.ModuleList(
            CompiledBlock(width, inner, sizes["heads"], weights[f"transformer/layer_{n}/mlp/linear_1/w"].shape[1])
            for n in range(sizes["layers"])
        )
        self.head = nn.Linear(width, width, bias=False)
        self._fill(weights)
        self.double().eval().requires_grad_(False)

    def _fill(self, weights: dict[str, np.ndarray]) -> None:
        with torch.no_grad():
            self.embed.weight.copy_(torch.from_numpy(weights["token_embed/embeddings"]))
            self.positions.weight.copy_(torch.from_numpy(weights["pos_embed/embeddings"]))
            self.head.weight.copy_(torch.eye(self.head.in_features))
            for n, block in enumerate(self.blocks):
                for name, part in block.named_modules():
                    if isinstance(part, nn.Linear):
                        stored = name.replace(".", "/") if name.startswith("attn") else f"mlp/{name}"
                        stored = f"transformer/layer_{n}/{stored}"
                        part.weight.copy_(torch.from_numpy(weights[f"{stored}/w"]).T)
                        part.bias.copy_(torch.from_numpy(weights[f"{stored}/b"]))

    def get_input_embeddings(self) -> nn.Module:
        """The token embedding."""
        return self.embed

    def get_output_embeddings(self) -> nn.Module:
        """The unembedding, which is the identity."""
        return self.head

    def forward(self, input_ids: Tensor) -> Any:
        """Logits, one for each channel of the stream."""
        x = self.embed(input_ids) + self.positions.weight[: input_ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return SimpleNamespace(logits=self.head(x))


def load_compiled(path: Path) -> tuple[CompiledModel, dict[str, Any]]:
    """The model of a program and its description.

    Raises:
        InputError: The port gives other numbers than the stored ones.
    """
    sizes = from_json(path.read_text("utf-8"))
    check_zip(path.stem, path.with_suffix(".npz"))
    with np.load(path.with_suffix(".npz")) as file:
        model = CompiledModel({name: file[name].astype(np.float64) for name in file.files}, sizes)
    stored = [example for example in sizes["examples"] if example["transformer_output"] is not None]
    if not stored:
        raise InputError(f"{path.name} stores no output that a port could be checked against.")
    for example in stored:
        with torch.no_grad():
            found = model(torch.tensor([_ids(example, sizes)])).logits[0]
        gap = float((found - torch.tensor(example["transformer_output"], dtype=torch.float64)).abs().max())
        if gap > PORT_TOLERANCE:
            raise InputError(
                f"The port of {path.stem} is {gap:.1e} from the stored outputs; expected {PORT_TOLERANCE}."
            )
    return model, sizes


def _ids(example: dict[str, Any], sizes: dict[str, Any]) -> list[int]:
    return [sizes["encoding"][str(token)] for token in example["tokens"]]


# What each program reads: for an input without its first token and a place, the places whose value or number of equals
# the output is made of.
def _same(tokens: list[Any], i: int) -> set[int]:
    return {j for j, token in enumerate(tokens) if token == tokens[i]}


READS = {
    "first": lambda tokens, i: {0},
    "reverse": lambda tokens, i: {len(tokens) - 1 - i},
    "sort_unique": lambda tokens, i: {tokens.index(sorted(tokens)[i])},
    "fraction_of_x": lambda tokens, i: {j for j in range(i + 1) if tokens[j] == "x"},
    "hist": _same,
}
"""By program: the places that the output at place i reads."""

OUTPUTS = {"first": "first_", "reverse": "reverse_", "sort_unique": "sort_", "hist": "hist_", "fraction_of_x": "frac_"}
"""By program: how the names of the channels begin that hold its output."""


def compiled_programs(folder: Path, *, limit: int | None = None) -> Judge:
    """The judge of a folder of compiled programs.

    Args:
        folder: A .json and an .npz file for each.
        limit: Outputs asked for, of each program, at most.
    """
    items: list[BenchItem] = []
    problems: list[str] = []
    models: dict[str, Lens] = {}
    for path in sorted(folder.glob("*.json")):
        if path.stem not in READS:
            problems.append(f"{path.name}: what the program {path.stem!r} reads is not known.")
            continue
        try:
            with foreign_reader(lambda said: f"not a compiled program ({said})"):
                model, sizes = load_compiled(path)
                found = _items(path.stem, sizes)
        except TensorLensError as error:
            problems.append(f"{path.name}: {error}")
            continue
        models[path.stem] = Lens(model, name=path.stem)
        items += found[:limit]
    return Judge(name="tracr", measures=MEASURES, items=tuple(items), problems=tuple(problems), models=models)


def _items(program: str, sizes: dict[str, Any]) -> list[BenchItem]:
    found = []
    for row, example in enumerate(sizes["examples"], 1):
        tokens = example["tokens"][1:]
        for i in range(len(tokens)):
            reads = READS[program](tokens, i)
            target = _channel(sizes, example["decoded"][i + 1])
            if target is None or not reads or len(reads) == len(tokens):
                continue  # nothing to tell apart
            found.append(
                BenchItem(
                    judge="tracr",
                    set=program,
                    name=f"{program}:{row}:{i}",
                    ids=tuple(_ids(example, sizes)),
                    target=target,
                    units=tuple((k + 1,) for k in range(len(tokens))),
                    labels=tuple(str(token) for token in tokens),
                    model=program,
                    out_token=i + 1,
                    right=False,
                    truth=tuple(float(k in reads) for k in range(len(tokens))),
                    overlap=str(tokens[i]),
                )
            )
    return found


def _channel(sizes: dict[str, Any], value: Any) -> int | None:
    """The channel of the stream that holds an output."""
    for channel, label in enumerate(sizes["residual_labels"]):
        name, _, of = label.partition(":")
        is_output = name.startswith(OUTPUTS[sizes["program"]]) and "selector_width" not in name
        if is_output and (not sizes["output_is_categorical"] or of == str(value)):
            return channel
    return None
