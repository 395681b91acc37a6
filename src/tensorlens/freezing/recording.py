"""`Recording`: what one pass left behind, and all that a replay needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from tensorlens.errors import InputError
from tensorlens.freezing.conventions import Rules
from tensorlens.freezing.layouts import (
    AxisLayout,
)
from tensorlens.freezing.places import Site
from tensorlens.models.anatomy import Anatomy
from tensorlens.models.fingerprint import Fingerprint, Samples

GRAPH_SHARE = 0.02
"""Part of the free memory that the graph of a recording may take, by the estimate for its factors. It may never be
used, and lies beside the factors and graphs of other inputs; each that is kept leaves less to the next."""


@dataclass(frozen=True, kw_only=True)
class RecordOptions:
    """How a recording is made.

    Attributes:
        n_samples: How many samples the inputs hold.
        graph_share: Part of the free memory that the graph may take; beyond it the graph is not kept.
        keeps_factors: Whether factors are kept; without them only the graph can be asked.
    """

    n_samples: int = 1
    graph_share: float = GRAPH_SHARE
    keeps_factors: bool = True


class Graph(NamedTuple):
    """The autograd graph that a recording was made with, in which every factor is a constant.

    Attributes:
        leaves: $X^0$, (sample, token, channel): the encoder's tokens, then the decoder's.
        end: $X^N$ with the graph; None where the rules make another state the output.
        readout: The same for what the model ended with.
    """

    leaves: tuple[Tensor, ...]
    end: Tensor | None
    readout: Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Recording:
    r"""What one pass left behind: states, held factors and where they belong.

    Holds no L·D·L·D tensor: the hidden states, the factors, and a reference to the model, whose weights it uses. Where
    it is small, it also keeps the graph of the pass, through which cotangents go without a replay.

    Attributes:
        anatomy: Where the model's parts are.
        inputs: What the model was called with.
        rules: The conventions in force.
        factors: The factors held, by site. They cost about as much memory as the activations of one forward pass.
        states: $X^0 … X^N$, each (sample, token, channel); `states[n]` enters block n, the last is the output. With an
            encoder, the encoder's tokens come first and the decoder's after them; the last is the decoder's alone.
        layouts: How the model's own code lays out each of them.
        splits: How many of the tokens of each belong to the encoder.
        block_outputs: What each block returned, for passes that start further up.
        n_encoder_blocks: How many of the blocks are the encoder's.
        embedding_layout: How the model's own code lays out the embeddings, if $X^0$ is the token embeddings because the
            model uses them in other ways than as the state entering block 0; otherwise None, and it is that state.
        side_channels: Blocks that read something of $X^0$ or of earlier blocks beside the hidden state.
        readout: What the recording ended with: the input of the unembedding, or the logits of another head; None
            without a head.
        n_heads: Number of attention heads by block, where a head axis was recognised.
        rules_applied: How often each rule was applied, by (rule, module).
        fingerprint: What the model was, to notice a change; None where its weights come and go with off-loading.
        ignored: Attributes, by module, that a pass changes by itself, and which are no part of it.
        samples: A few numbers of each weight, to notice what a fingerprint does not see; None where reading them would
            wait for a device.
        signature: A hash of the functions that met live tensors, in order: inputs with the same one took the same way.
        graph: The graph of the pass, if it is kept.
    """

    anatomy: Anatomy
    inputs: dict[str, Any]
    rules: Rules
    factors: Mapping[Site, Any] = field(repr=False)
    states: tuple[Tensor, ...] = field(repr=False)
    layouts: tuple[AxisLayout, ...]
    splits: tuple[int, ...]
    block_outputs: tuple[Any, ...] = field(repr=False)
    n_encoder_blocks: int = 0
    embedding_layout: AxisLayout | None = None
    side_channels: tuple[str, ...] = ()
    readout: Tensor | None = field(default=None, repr=False)
    n_heads: Mapping[int, int] = field(default_factory=dict)
    rules_applied: Mapping[tuple[str, str], int] = field(default_factory=dict, repr=False)
    fingerprint: Fingerprint | None = field(default=None, repr=False)
    ignored: frozenset[tuple[int, str]] = field(default=frozenset(), repr=False)
    samples: Samples | None = field(default=None, repr=False)
    signature: int = 0
    graph: Graph | None = field(default=None, repr=False)

    @property
    def model(self) -> nn.Module:
        """The user's model."""
        return self.anatomy.model

    @property
    def n_blocks(self) -> int:
        """Number of blocks, counted by call."""
        return len(self.block_outputs)

    @property
    def n_samples(self) -> int:
        """How many samples were recorded together."""
        return len(self.states[0])

    def sample(self, i: int) -> Recording:
        """One of several samples, by itself: its part of every state and factor."""
        cut = partial(_cut, i=i, n=self.n_samples)
        return replace(
            self, inputs={name: cut(value) for name, value in self.inputs.items()},
            factors=_CutFactors(self.factors, cut), states=tuple(map(cut, self.states)),
            block_outputs=tuple(map(cut, self.block_outputs)), readout=cut(self.readout), graph=None,
        )  # fmt: skip

    @property
    def starts_at_embedding(self) -> bool:
        """Whether $X^0$ is the token embeddings."""
        return self.embedding_layout is not None

    @property
    def first_layout(self) -> AxisLayout:
        """How the model lays out $X^0$."""
        return self.embedding_layout or self.layouts[0]

    @property
    def has_head(self) -> bool:
        """Whether the model goes on after $X^N$, to logits."""
        return self.readout is not None

    def place_read(self, out_token: int) -> int:
        """Where the head reads an output: some models hand it the last token alone."""
        readout, end = self.readout, self.states[-1]
        if readout is None or readout.dim() < 3 or readout.shape[1] == end.shape[1]:
            return out_token
        for place, row in enumerate(readout[0]):
            if row.shape == end[0, out_token].shape and row.equal(end[0, out_token].to(row)):
                return place
        raise InputError(
            f"The head of `{type(self.model).__name__}` reads {readout.shape[1]} of {end.shape[1]} tokens, and token "
            f"{out_token} is none of them. Ask for one that it reads, such as the last."
        )

    @property
    def pools(self) -> bool:
        """Whether the head gives one set of logits for the whole input, and not one for each token."""
        return self.anatomy.unembedding is None and self.readout is not None and self.readout.dim() == 2


def _cut(value: Any, i: int, n: int) -> Any:
    """Sample i of n: of tensors whose first axis counts samples; what has no such axis is the same for all."""
    if isinstance(value, Tensor):
        return value[i : i + 1] if value.dim() and len(value) == n else value
    if isinstance(value, dict):
        parts = {name: _cut(part, i, n) for name, part in value.items()}
        return type(value)(**parts) if hasattr(value, "to_tuple") else parts
    if isinstance(value, (tuple, list)):
        parts = [_cut(part, i, n) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


class _CutFactors(Mapping[Site, Any]):
    """The factors of one sample, cut out of the batch's when they are asked for."""

    def __init__(self, factors: Mapping[Site, Any], cut: Callable[[Any], Any]) -> None:
        self._factors, self._cut = factors, cut

    def __getitem__(self, site: Site) -> Any:
        return self._cut(self._factors[site])

    def __iter__(self) -> Iterator[Site]:
        return iter(self._factors)

    def __len__(self) -> int:
        return len(self._factors)


class Reached(BaseException):
    """Ends a forward pass early with the state asked for. Not an `Exception`, so that no model catches it."""

    def __init__(self, state: Tensor) -> None:
        self.state = state


class StartAtEmbedding(BaseException):
    """Asks for a new recording that starts at the embeddings."""


class Unaudited(BaseException):
    """Asks for a new recording under an audit: this input took a way through the model that none has seen."""


class OtherParts(BaseException):
    """Asks for a new anatomy: on this input other blocks ran, or the same another number of times."""
