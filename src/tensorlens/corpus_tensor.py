r"""`CorpusTensor`: the mean operator of a corpus from every block to the end.

    M_n = mean over inputs and positions i of T.blocks(n, N)[i, :, i, :],   b_n = mean of F(X)_i − T_ii x_i

is a linear reading of block n for any input: the output that a state will become. Through the unembedding, it names
words. With `outputs="later"` it is Σ_{i' ≥ i} T[i', :, i, :] instead, averaged over i, without a constant; by
`Rules.jacobian(include_final_norm=False)` that is the J-lens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

import msgspec
import numpy as np
import torch
from jaxtyping import Float
from rich.console import Console, RenderableType
from torch import Tensor

from tensorlens.__about__ import package_versions
from tensorlens.batches import Batch
from tensorlens.errors import InputError, MethodError, check_choice, check_lens, check_path, check_seed, check_whole
from tensorlens.files import from_json, reading, to_json, write_whole
from tensorlens.inside.block import StreamPass
from tensorlens.inside.dictionary import read_slot
from tensorlens.maps.targets import Classes, Said
from tensorlens.models.layouts import state_of
from tensorlens.models.runner import own_modes, run
from tensorlens.models.samples import check_several
from tensorlens.operators.operator import FrozenOperator, check_token
from tensorlens.program.program import of_each
from tensorlens.progress import bar, check_cancelled
from tensorlens.recording.recording import Recording, Span
from tensorlens.records import Index, Record, as_array
from tensorlens.specimen import Specimen
from tensorlens.tensor import AttentionTensor
from tensorlens.views.captions import caption_lines
from tensorlens.views.printing import as_html, heading, print_parts, table
from tensorlens.views.table import Table

Outputs = Literal["own", "later"]
LensFormat = Literal["tensorlens", "jacobian-lens"]
EXACT_UP_TO = 4096
"""Largest number of cotangents per text before probes are used instead."""
DEFAULT_PROBES = 64
CHUNK = 32


Reading = tuple[tuple[tuple[Said, ...], ...], ...]
"""The words read from a state, by block and token."""


class CorpusReading(Record, frozen=True, kw_only=True, tag="tensorlens.corpus_reading/1"):
    """The words that each state leads to: by the mean operator of a corpus, and by the plain logit lens.

    Attributes:
        tokens: A label for each token.
        corpus: For each block and token, the words that the mean operator reads in the state entering the block.
        plain: The plain logit lens: the model's own head applied to the state.
        first: The first block that is read.
        identity: For each row, the share of the identity in the mean operator, as in the plain reading.
        places: The state behind each row, if some are not states that enter blocks.
    """

    tokens: tuple[str, ...]
    corpus: Reading
    plain: Reading
    first: Index = 0
    identity: tuple[float, ...] = ()
    places: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check that both read every block at every token."""
        super().__post_init__()
        sizes = {len(words) for words in (*self.corpus, *self.plain)}
        if not self.tokens or len(self.corpus) != len(self.plain) or not sizes <= {len(self.tokens)}:
            raise InputError(f"Expected two readings of every block at {len(self.tokens)} tokens; got something else.")

    def __repr__(self) -> str:
        """One line: sizes."""
        return f"CorpusReading({len(self.corpus)} blocks × {len(self.tokens)} tokens)"

    @property
    def headline(self) -> str:
        """The question that it answers."""
        return "Which words does each state lead to?"

    def _table(self) -> Table:
        """The first word of the mean operator, by block and token."""
        words = np.array([[said[0].name if said else "" for said in row] for row in self.corpus], dtype=object)
        return Table(words, [f"block {name}" for name in self._names], self.tokens)

    @property
    def _names(self) -> tuple[str, ...]:
        return self.places or tuple(str(self.first + n) for n in range(len(self.corpus)))

    def show(  # pyright: ignore[reportIncompatibleMethodOverride] -- it is asked about one token
        self, token: int = -1, console: Console | None = None
    ) -> None:
        """Print the words of each block at one token; without a console, to standard output."""
        print_parts(self._at(check_token(token, len(self.tokens), "token")), console)

    def _repr_html_(self) -> str:
        return as_html(lambda console: self.show(console=console))

    def _at(self, token: int) -> Iterator[RenderableType]:
        yield heading(f"at token {self.tokens[token]!r}")
        both = enumerate(zip(self.corpus, self.plain, strict=True))
        shares = [f"{share:.0%}" for share in self.identity] or [""] * len(self.corpus)
        rows = [
            (self._names[n], shares[n], *(", ".join(repr(word.name) for word in one[token]) for one in pair))
            for n, pair in both
        ]
        yield table(("block", "identity", "corpus", "logit lens"), rows)


class CorpusTensor(Record, frozen=True, kw_only=True, tag="tensorlens.corpus_tensor/1"):
    """The mean operator of a corpus from every block to the end.

    Attributes:
        matrices: $M_n$ for each block.
        bias: $b_n$ for each block.
        outputs: ``"own"``: from a token to itself. ``"later"``: from a token to itself and all later ones, summed.
        n_texts: The number of texts averaged.
        first: The block of the first matrix; published lenses start after the first block.
        middle: The same matrices from the stream after the attention of each block, if requested.
        middle_bias: Their constants.
        meta: Model, versions, rules, positions left out, probes.
    """

    matrices: Float[Tensor, "block out_channel in_channel"]
    bias: Float[Tensor, "block out_channel"]
    outputs: Outputs
    n_texts: Index
    first: Index = 0
    middle: Float[Tensor, "block out_channel in_channel"] | None = None
    middle_bias: Float[Tensor, "block out_channel"] | None = None
    meta: dict[str, Any] = msgspec.field(default_factory=dict)

    loadable: ClassVar[tuple[str, ...]] = (".safetensors",)

    def __post_init__(self) -> None:
        """Check that each block has a matrix and a bias of matching shapes."""
        super().__post_init__()
        if self.matrices.dim() != 3 or self.bias.shape != self.matrices.shape[:2]:
            raise InputError(
                f"Expected a matrix and a bias of as many channels for each block; got shapes "
                f"{tuple(self.matrices.shape)} and {tuple(self.bias.shape)}."
            )
        check_choice(self.outputs, "outputs", get_args(Outputs))
        n, (n_out, n_in) = self.first + len(self.matrices), self.matrices.shape[1:]
        inner = [None if one is None else tuple(one.shape) for one in (self.middle, self.middle_bias)]
        if inner not in ([None, None], [(n, n_out, n_in), (n, n_out)]):
            raise InputError(f"Expected matrices and constants after attention of the same channels; got {inner}.")

    def __repr__(self) -> str:
        """One line: sizes."""
        n, n_out, n_in = self.matrices.shape
        return f"CorpusTensor({self.meta.get('model')}, {n} blocks, {n_out} × {n_in}, {self.n_texts} texts)"

    @property
    def headline(self) -> str:
        """The question that it answers."""
        return f"What does each block's state turn into, on average over {self.n_texts} texts?"

    def _table(self) -> Table:
        """One row per block and output channel, one column per input channel."""
        n, n_out, n_in = self.matrices.shape
        rows = [f"block {i}, channel {c}" for i in range(n) for c in range(n_out)]
        return Table(as_array(self.matrices).reshape(n * n_out, n_in), rows, [*map(str, range(n_in))])

    @property
    def identity_shares(self) -> Float[Tensor, " block"]:
        r"""The share of the identity in each $M_n$: $(\mathrm{tr} M)^2 / (D \lVert M \rVert^2)$, from 0 to 1."""
        return _identity_shares(self.matrices)

    def save(  # pyright: ignore[reportIncompatibleMethodOverride] -- it has another format
        self, path: str | Path, *, format: LensFormat = "tensorlens"
    ) -> Path:
        """Write a file, whole or not at all.

        Args:
            path: A name that ends in ``.safetensors``, or in ``.pt`` for a Jacobian lens.
            format: ``"tensorlens"``, or ``"jacobian-lens"``: the layout of published lenses, which TransformerLens
                opens. It reads words by the model's own norm and head and has no constant, so the lens must have been
                fitted with ``Rules.jacobian(include_final_norm=False)`` or another set without the final norm.
        """
        check_choice(format, "format", get_args(LensFormat))
        if format == "tensorlens":
            return super().save(path)
        path, rules = check_path(path), self.meta.get("rules")
        if path.suffix != ".pt" or (isinstance(rules, dict) and rules.get("include_final_norm", True)):
            raise InputError(
                f"A Jacobian lens is a .pt file of operators before the final norm; got {path.name!r}. Fit with "
                "`Rules.jacobian(include_final_norm=False)`, outputs='later'."
            )
        return write_whole(path, lambda file: torch.save(_as_lens(self), file))

    @classmethod
    def load(cls, path: str | Path) -> CorpusTensor:
        """Read a file of `save`, or a ``.pt`` of a Jacobian lens that TransformerLens or others fitted."""
        path = check_path(path)
        if path.suffix != ".pt":
            return super().load(path)
        with reading(path, "`CorpusTensor.save` or another fit of a lens"):
            return cls(**_of_lens(torch.load(path, map_location="cpu", weights_only=True)))

    def _printed(self, k: int) -> Iterator[RenderableType]:
        yield heading(repr(self))
        yield table(("", ""), [*caption_lines(f"mean operator, outputs={self.outputs!r}", self.meta, 0)])

    @classmethod
    @own_modes
    def fit(
        cls,
        lens: Any,
        texts: Iterable[Any],
        *,
        outputs: Outputs = "own",
        probes: int | None = None,
        batch_size: int = 4,
        skip_first: int = 0,
        skip_last: int = 0,
        middle: bool = False,
        seed: int = 0,
        progress: bool | None = None,
    ) -> CorpusTensor:
        """Average over texts; every text has the same weight, however long it is.

        Args:
            lens: A lens on the model.
            texts: Inputs of the lens.
            outputs: From a token to itself (``"own"``), or to itself and all later ones (``"later"``).
            probes: Random cotangents for each text; None is exact where at most 4,096 cotangents are needed, and 64
                probes otherwise. The record says which.
            batch_size: How many texts share one recording.
            skip_first: Positions at the start of each text that do not count, neither as source nor as output.
            skip_last: The same at the end.
            middle: Whether to average from the stream after the attention of each block, too.
            seed: Random seed for the probes.
            progress: Whether to show a progress bar; on a terminal if None.
        """
        check_choice(outputs, "outputs", get_args(Outputs))
        check_lens(lens)
        check_several(texts)
        probes = None if probes is None else check_whole(probes, "probes", 1)
        skip_first, skip_last = check_whole(skip_first, "skip_first"), check_whole(skip_last, "skip_last")
        generator = torch.Generator().manual_seed(check_seed(seed))
        sums = _Sums(outputs, probes, skip_first, skip_last, generator, middle)
        rest, batch_size = iter(texts), check_whole(batch_size, "batch_size", 1)
        with bar(progress=progress, unit=" texts") as shown:
            while some := list(islice(rest, batch_size)):
                check_cancelled()
                sums.add(lens.specimen, some)
                shown.update(len(some))
        if sums.n_texts == 0 or sums.matrices is None or sums.bias is None:
            raise InputError(
                f"Expected texts with more than {skip_first + skip_last} tokens; got {sums.n_short} shorter ones."
            )
        matrices, bias = ((one / sums.n_texts).cpu() for one in (sums.matrices, sums.bias))
        n = len(matrices) // 2 if middle else len(matrices)  # the states that enter blocks, then those after attention
        return cls(
            matrices=matrices[:n],
            bias=bias[:n],
            middle=matrices[n:] if middle else None,
            middle_bias=bias[n:] if middle else None,
            outputs=outputs,
            n_texts=sums.n_texts,
            meta={
                "model": getattr(lens, "name", None),
                "versions": dict(package_versions()),
                "rules": lens.rules.as_dict(),
                "skip_first": skip_first,
                "skip_last": skip_last,
                "probes": sums.n_probes,
                "texts_left_out": sums.n_short,
            },
        )

    @own_modes
    def read(self, T: AttentionTensor, k: int = 5) -> CorpusReading:
        """The words that each state of an input leads to, by block and position, beside the plain logit lens."""
        k = check_whole(k, "k", 1)
        recording, classes = T.operator.recording, T.context.classes
        states = [state[0] for state in recording.states[: recording.n_blocks]]
        expected = (len(states), states[0].shape[1])
        if (self.first + len(self.matrices), self.matrices.shape[2]) != expected or classes is None:
            raise InputError(
                f"Expected a tensor of {self.first + len(self.matrices)} blocks with {self.matrices.shape[2]} channels "
                f"and a head; got {expected[0]} blocks with {expected[1]} channels."
            )
        rules = self.meta.get("rules")
        is_normed = not isinstance(rules, dict) or rules.get("include_final_norm", True)
        read = unembedded if is_normed else logits_from
        places: list[Any] = [
            (str(n), states[n], *pair) for n, pair in enumerate(zip(self.matrices, self.bias, strict=True), self.first)
        ]
        if self.middle is not None and self.middle_bias is not None:
            inner = zip(after_attention(recording).items(), self.middle, self.middle_bias, strict=True)
            places += [
                (f"{n}, after attention", recording.values(n, [slot])[slot][0], *pair) for (n, slot), *pair in inner
            ]
            places.sort(key=lambda one: int(one[0].partition(",")[0]))
        corpus, plain = [], []
        for _, state, matrix, bias in places:
            corpus.append(_said(read(recording, state @ matrix.to(state).T + bias.to(state)), classes, k))
            plain.append(_said(logits_from(recording, state), classes, k))
        return CorpusReading(
            tokens=T.tokens,
            corpus=tuple(corpus),
            plain=tuple(plain),
            first=self.first,
            identity=tuple(_identity_shares(torch.stack([one[2] for one in places])).tolist()),
            places=() if self.middle is None else tuple(one[0] for one in places),
        )


# The .pt files of published Jacobian lenses, which TransformerLens reads and writes too ------------------------------

OWN = "tensorlens"
"""The key of a lens file for everything its format has no place for: the state that enters the first block, biases."""


def _as_lens(made: CorpusTensor) -> dict[str, Any]:
    """The content of a lens file: `J[n]` leads from the output of block n, the state that enters block n + 1."""
    matrices, first, rules = made.matrices, made.first, made.meta.get("rules")
    jacobians = {first + i - 1: matrix.clone() for i, matrix in enumerate(matrices) if first + i > 0}
    said = {
        "fitted_by": "tensorlens",
        "model": str(made.meta.get("model")),
        "rules": ", ".join(f"{key}={value}" for key, value in rules.items()) if isinstance(rules, dict) else "",
    }
    own = {"first": first, "bias": made.bias.clone(), "before": matrices[: 1 if first == 0 else 0].clone()}
    middle = {} if made.middle is None else {"middle": made.middle, "middle_bias": made.middle_bias}
    return {
        "J": jacobians,
        "n_prompts": made.n_texts,
        "source_layers": sorted(jacobians),
        "d_model": matrices.shape[-1],
        "metadata": said,
        OWN: {**own, "outputs": made.outputs, "meta": to_json(made.meta), **middle},
    }


def _of_lens(held: dict[str, Any]) -> dict[str, Any]:
    """The fields of a `CorpusTensor` in such a file; a fit that was interrupted holds sums instead of means."""
    n_texts = int(held.get("n_prompts", held.get("n_done", 0)))
    found, scale = (held["J"], 1) if "J" in held else (held["jacobian_sum"], max(1, n_texts))
    layers = sorted(int(layer) for layer in found)
    matrices = torch.stack([torch.as_tensor(found[layer]) / scale for layer in layers])
    matrices = matrices if matrices.dtype == torch.float64 else matrices.float()
    if layers != list(range(layers[0], layers[-1] + 1)) or matrices.dim() != 3:
        raise ValueError(f"layers {layers[:8]} with matrices of {matrices.dim() - 1} axes")
    own, said, first = held.get(OWN) or {}, held.get("metadata"), layers[0] + 1
    if own and len(own["before"]):
        matrices, first = torch.cat([own["before"].to(matrices), matrices]), 0
    return {
        "matrices": matrices,
        "bias": own["bias"].to(matrices) if own else matrices.new_zeros(matrices.shape[:2]),
        "first": first,
        "n_texts": n_texts,
        "outputs": own["outputs"] if own else "later",
        "meta": from_json(own["meta"])
        if own
        else {"rules": {"include_final_norm": False}} | (said if isinstance(said, dict) else {}),
        **{name: own[name].to(matrices) for name in ("middle", "middle_bias") if name in own},
    }


def _identity_shares(matrices: Tensor) -> Tensor:
    traces = matrices.diagonal(dim1=1, dim2=2).sum(1)
    sizes = matrices.shape[-1] * matrices.square().sum((1, 2))
    return traces.square() / sizes.clamp_min(torch.finfo(traces.dtype).tiny)


def _said(logits: Tensor, classes: Classes, k: int) -> tuple[tuple[Said, ...], ...]:
    return tuple([classes.said(one, k) for one in logits.float().softmax(-1)])


@dataclass
class _Sums:
    """Sums over texts."""

    outputs: Outputs
    probes: int | None
    skip_first: int
    skip_last: int
    generator: torch.Generator
    middle: bool = False
    n_texts: int = 0
    n_short: int = 0
    n_probes: int | None = None
    matrices: Tensor | None = None
    bias: Tensor | None = None

    def add(self, specimen: Specimen, texts: list[Any]) -> None:
        """Add some texts that share one recording."""
        batch = Batch(specimen, [specimen.prepare(text) for text in texts])
        batch.check()
        recording = batch.recording
        check_one_stream(recording)
        counted = self._counted(batch.lengths, recording.states[0])
        n_of = counted.sum(1)
        self.n_texts += int((n_of > 0).sum())
        self.n_short += int((n_of == 0).sum())
        share = counted / n_of.clamp(min=1)[:, None]  # (sample, token): all texts have the same weight
        end = recording.states[-1]
        for cotangents in self._cotangents(counted, end):
            self._pull(recording, cotangents, share)
        if self.outputs == "own" and self.bias is not None:
            self.bias += (share[..., None] * end).sum((0, 1))

    def _counted(self, lengths: tuple[int, ...], state: Tensor) -> Tensor:
        """(sample, token): 1 where a position counts."""
        places = torch.arange(state.shape[1])[None]
        ends = torch.tensor([(length or state.shape[1]) - self.skip_last for length in lengths])[:, None]
        return ((places >= self.skip_first) & (places < ends)).to(state)

    def _cotangents(self, counted: Tensor, end: Tensor) -> Iterator[Tensor]:
        """Cotangents (cotangent, sample, token, channel), some at a time; their outer products sum to the identity."""
        n_tokens, width = end.shape[1:]
        n_exact = width * (n_tokens if self.outputs == "own" else 1)
        self.n_probes = self.probes if self.probes is not None or n_exact <= EXACT_UP_TO else DEFAULT_PROBES
        n = n_exact if self.n_probes is None else self.n_probes
        for rows in torch.arange(n).split(CHUNK):
            if self.n_probes is None:  # unit vectors of (token, channel), or of the channels alone
                units = torch.nn.functional.one_hot(rows, n_exact).reshape(len(rows), 1, -1, width).to(end)
            else:
                shape = (len(rows), len(end), n_exact // width, width)
                units = (torch.randint(0, 2, shape, generator=self.generator) * 2 - 1).to(end) / self.n_probes**0.5
            yield units.expand(len(rows), *end.shape) * counted[..., None]

    def _pull(self, recording: Recording, cotangents: Tensor, share: Tensor) -> None:
        inner = after_attention(recording) if self.middle else {}
        states, end = [*recording.states[:-1]], recording.states[-1]
        states += [recording.values(n, [slot])[slot] for n, slot in inner.items()]
        if self.matrices is None or self.bias is None:
            self.matrices = end.new_zeros(len(states), end.shape[-1], states[0].shape[-1])
            self.bias = end.new_zeros(len(states), end.shape[-1])
        for n, pulled in at_depths(recording, cotangents, inner):
            weighted = pulled * share[..., None]
            # With Σ_r u_r u_rᵀ = 1, Σ_r u_r (Tᵀu_r)ᵀ is T; at one and the same token t, its block T[t, :, t, :].
            self.matrices[n] += torch.einsum("rsto,rsti->oi", cotangents, weighted)
            if self.outputs == "own":
                self.bias[n] -= torch.einsum("rsto,rst->o", cotangents, (weighted * states[n]).sum(-1))


# Cotangents at the states of every depth, and the model's own head on any state ---------------------------------------


def check_one_stream(recording: Recording) -> None:
    """Refuse a model whose states are not one stream of (token, channel).

    Raises:
        MethodError: there is an encoder, or states change their number of tokens on the way.
    """
    sizes = {state.shape[1] for state in recording.states}
    if recording.n_encoder_blocks or recording.starts_at_embedding or len(sizes) > 1:
        raise MethodError(
            f"`{recording.name}` has no single stream of (token, channel) from its first block to its last; the "
            "operator of a corpus needs one."
        )


def at_depths(
    recording: Recording, cotangents: Tensor, inner: Mapping[int, int] | None = None
) -> Iterator[tuple[int, Tensor]]:
    """Cotangents (row, sample, token, channel) of $X^N$ at the state that enters each block, from the last block.

    Also at slots of `inner`, one for each block: that of block n is number N + n.
    """
    pieces, inner = recording.pieces(Span(0, recording.n_blocks)), inner or {}
    waiting = {pieces.program.outputs[0]: cotangents}
    for n in reversed(range(recording.n_blocks)):
        pieces.programs[n].load()
        slots = [inner[n]] if inner else []
        found, waiting = of_each(lambda one, n=n, slots=slots: pieces.pull(n, one, slots), waiting)
        yield from ((recording.n_blocks + n, found[slot]) for slot in slots)
        yield n, waiting[recording.slots[n][0]]


def after_attention(recording: Recording) -> dict[int, int]:
    """By block, the slot of the stream between its attention and its feed-forward.

    Raises:
        MethodError: a block adds both at once, or they cannot be told apart.
    """
    span = Span(0, recording.n_blocks)
    run, specs = StreamPass(FrozenOperator(recording), recording.pieces(span)), recording.program.specs
    found = {n: read_slot(run.block(n), "feed-forward", "stream")[0] for n in range(*span)}
    for n, slot in found.items():
        if slot == run.entry(n) or specs[slot].shape != specs[run.entry(n)].shape:
            raise MethodError(
                f"Block {n} of `{recording.name}` has no state between attention and feed-forward; leave `middle` out."
            )
    return found


def unembedded(recording: Recording, states: Tensor) -> Tensor:
    """Logits (token, class) of states after the final norm.

    Raises:
        MethodError: Something stands between the output state and the unembedding.
    """
    head, readout = recording.head, recording.readout
    is_direct = readout is not None and readout.shape == recording.states[-1].shape
    if head is None or readout is None or not is_direct or not torch.allclose(readout, recording.states[-1]):
        raise MethodError(
            f"`{recording.name}` does not compute its logits from the output state by one matrix; fit with "
            f"`Rules(include_final_norm=False)`, which uses the model's own head."
        )
    return torch.nn.functional.linear(states, head.weight, head.bias)


def logits_from(recording: Recording, states: Tensor) -> Tensor:
    """The model's own logits (token, class), with `states` (token, channel) in place of its last block's output."""
    origin, last = recording.from_model("The model's own head"), recording.n_blocks - 1

    def put_in(n: int, state: Tensor) -> Tensor | None:
        return states.reshape(state.shape).to(state) if n == last else None

    return state_of(run(origin.anatomy, origin.inputs, n_blocks=recording.n_blocks, leaving=put_in))[0]
