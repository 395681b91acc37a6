"""`AttentionTensor`: the operator of one model at one input, as users see it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from tensorlens import tensor_files
from tensorlens.axes import TensorSlice
from tensorlens.errors import (
    InputError,
    MethodError,
    check_iterable,
    check_lens,
    check_path,
    check_whole,
    missing_extra,
)
from tensorlens.inside.questions import InsideQuestions
from tensorlens.maps.groups import Groups, find_groups
from tensorlens.maps.methods import METHODS, NormKind, Question, begin_finishing, check_out_token, check_question
from tensorlens.maps.targets import (
    METHOD,
    OUT_TOKEN,
    Context,
    Feature,
    MapQuestion,
    Target,
    default_output,
    has_one_row,
    has_predictions,
    no_head,
)
from tensorlens.maps.tensor_maps import check_split, with_positions
from tensorlens.maps.token_map import TokenMap
from tensorlens.models.runner import Precision, garbage_kept, modes_left, own_modes
from tensorlens.operators.certificate import Certificate, certify
from tensorlens.operators.operator import FrozenOperator, Pulled, TensorOperator, check_token
from tensorlens.operators.plain import plain_logits
from tensorlens.operators.spectrum import Split, projector
from tensorlens.program.program import Program
from tensorlens.recording.recording import Span
from tensorlens.views.printing import text_as_html

if TYPE_CHECKING:
    from tensorlens.views.widget import MapWidget

OutTokens = int | Sequence[int] | slice | Tensor | np.ndarray | None
"""One output, several, or all."""


class Prediction(NamedTuple):
    """One of the classes a model ranks highest."""

    name: str
    index: int  # type: ignore[assignment]
    logit: float
    probability: float


class AttentionTensor(InsideQuestions, TensorOperator):
    r"""The whole model at one input as one linear operator: $F(X) = T·X + B$ (Eq. 19).

    It is never stored as a matrix: it consists of the program of one forward pass, its hidden states and its fixed
    tensors. Made by calling a `Lens`.
    """

    def __init__(self, operator: FrozenOperator, context: Context) -> None:
        self.operator, self.context = operator, context
        self.shape, self.dtype, self.device = operator.shape, operator.dtype, operator.device
        self._certified: Certificate | None = None

    def __repr__(self) -> str:
        """One line: model, sizes, blocks, and blocks with heads left out."""
        start, stop = self.operator.span
        size = f"{self.n_tokens} tokens × {self.n_channels} channels"
        heads = f", some heads of block {', '.join(map(str, self.operator.heads))}" if self.operator.heads else ""
        return f"AttentionTensor({self.context.meta.get('model')}, {size}, blocks {start}:{stop}{heads})"

    def _repr_html_(self) -> str:
        return text_as_html(f"{self!r}\n{shorten(' '.join(self.tokens), 600, placeholder=' …')}")

    def __copy__(self) -> AttentionTensor:
        """The tensor itself: it is immutable, and it does not own its model."""
        return self

    def __deepcopy__(self, memo: Any) -> AttentionTensor:
        """The tensor itself, as in `copy.copy`."""
        return self

    def __reduce__(self) -> Any:
        """Pickle the content of a saved file: the program with its numbers, without the model."""
        return _unpickled, tensor_files.pack(self.operator, self.context)

    # Files ------------------------------------------------------------------------------------------------------------

    @property
    def program(self) -> Program:
        """The steps of T and B, each affine: ``print(T.program)`` shows one per line. It runs without the model."""
        return self.operator.recording.part(self.operator.span, self.operator.heads)

    @own_modes
    def save(self, path: str | Path, *, weights: tensor_files.Weights = "inside") -> Path:
        """Write T as a safetensors file: its program in the header, its numbers as tensors, no code.

        Args:
            path: A name that ends in ``.safetensors``.
            weights: ``"inside"`` puts the model's weights into the file; ``"reference"`` only their names and
                checksums, for a lens that has them.
        """
        path = check_path(path)
        tensor_files.write_tensor(self.operator, self.context, path, weights)
        return path

    @classmethod
    def load(cls, path: str | Path, *, lens: Any = None, device: str | None = None) -> AttentionTensor:
        """Load T from a file, without its model; anything that needs the model raises an error.

        Args:
            path: A file that `save` wrote.
            lens: A lens on the model, for a file with ``weights="reference"``.
            device: Where its numbers go. If None, the device they were saved from, or the CPU if this machine lacks it.
        """
        if lens is not None:
            check_lens(lens)
        return cls(*tensor_files.read_tensor(check_path(path), None if lens is None else lens.model, device))

    # The operator -----------------------------------------------------------------------------------------------------

    @property
    @own_modes
    def bias(self) -> Float[Tensor, "out_token out_channel"]:
        """B: the output of the frozen model at zero; a copy."""
        return self.operator.bias.clone()

    def _apply(self, x: Tensor) -> Tensor:
        return self.operator._apply(x)

    def _adjoint(self, u: Tensor) -> Tensor:
        return self.operator._adjoint(u)

    def _rows(self, out_token: int) -> TensorSlice:
        return self.operator._rows(out_token)

    def pull_outputs(self, out_tokens: Sequence[int], starts: Tensor) -> Iterator[Pulled]:
        """Cotangents that live on one output each, pulled to the input a piece at a time."""
        return self.operator.pull_outputs(out_tokens, starts)

    # What it is made of -----------------------------------------------------------------------------------------------

    @property
    @own_modes
    def input(self) -> Float[Tensor, "in_token in_channel"]:
        """X⁰: the state entering the first block; a copy."""
        return self.operator.input.clone()

    @property
    @own_modes
    def output(self) -> Float[Tensor, "out_token out_channel"]:
        """X^N: the state after the last block, and after the final norm if there is one; a copy.

        Always the model's own state, even if heads are left out; without them the state is ``T @ T.input + T.bias``.
        """
        return self.operator.output.clone()

    @property
    def tokens(self) -> tuple[str, ...]:
        """A label for each input token."""
        return self.context.tokens

    @property
    def out_tokens(self) -> tuple[str, ...]:
        """A label for each output: the input's, except after an encoder or where patches are merged."""
        of_context = self.context.out_tokens
        whole = of_context is not None and len(of_context) == self.shape[0]
        return of_context if whole else self.context.tokens  # type: ignore[return-value]

    @property
    def n_blocks(self) -> int:
        """Number of blocks in the range of this operator."""
        return self.operator.n_blocks

    # Parts --------------------------------------------------------------------------------------------------------

    @own_modes
    def blocks(self, start: int, stop: int) -> AttentionTensor:
        """The operator of blocks `start` … `stop` - 1 only, from the same forward pass.

        `T.blocks(a, c)` is `T.blocks(b, c)` after `T.blocks(a, b)`.
        """
        start, stop, first = check_whole(start, "start"), check_whole(stop, "stop"), self.operator.span.start
        if not start < stop <= self.n_blocks:
            raise InputError(f"Blocks must be a range within 0:{self.n_blocks}, not empty; got {start}:{stop}.")
        return self._but(span=Span(first + start, first + stop))

    @own_modes
    def heads(self, chosen: Mapping[int, Iterable[int]]) -> AttentionTensor:
        """Only the named heads' token mixing, in the blocks named; other blocks stay whole.

        With the residual and the biases held, the parts add up to the whole: for block b with H heads,
        Σ_h T.heads({b: [h]}) - (H - 1)·T.heads({b: []}) = T.
        """
        return self._with_heads(chosen, keep=True)

    @own_modes
    def without_heads(self, left_out: Mapping[int, Iterable[int]]) -> AttentionTensor:
        """All but the named heads' token mixing, in the blocks named."""
        return self._with_heads(left_out, keep=False)

    def _with_heads(self, chosen: Mapping[int, Iterable[int]], *, keep: bool) -> AttentionTensor:
        multipliers = dict(self.operator.heads)
        if not isinstance(chosen, Mapping) or not all(isinstance(heads, Iterable) for heads in chosen.values()):
            raise InputError(f"Heads are named by block, such as {{0: [1, 2]}}; got {chosen!r}.")
        for block, heads in chosen.items():
            index = self.operator.span.start + check_whole(block, "block", 0, self.n_blocks - 1)
            multiplier = self._head_multiplier(index, check_iterable(heads, "heads", "heads of a block"), keep=keep)
            multipliers[index] = multiplier * multipliers.get(index, torch.ones_like(multiplier))
        return self._but(heads=multipliers)

    def _head_multiplier(self, index: int, heads: list[Any], *, keep: bool) -> Tensor:
        """One factor per head of a block: 1 for a head kept, 0 for a head left out."""
        n_heads = self.operator.recording.n_heads.get(index)
        if n_heads is None:
            raise MethodError(f"Block {index} has no attention heads that could be told apart; use `blocks` instead.")
        multiplier = torch.full((n_heads,), 0.0 if keep else 1.0)
        chosen = [check_whole(head, f"head of block {index}", 0, n_heads - 1) for head in heads]
        multiplier[chosen] = 1.0 if keep else 0.0
        return multiplier

    def _but(self, **changes: Any) -> AttentionTensor:
        """The same operator with a different span, heads or precision."""
        return AttentionTensor(self.operator.but(**changes), self.context)

    @own_modes
    def split(self, block: int, basis: Tensor) -> Split:
        r"""The contributions to the output of a subspace of the state that enters a block, and of the rest of it.

        With Q the projector on the subspace and $T_n$ the operator from block n on, $T_n (Q X^n)$ and
        $T_n ((1 - Q) X^n)$: together with its bias they are the output.

        Args:
            block: The block that the state enters.
            basis: Directions (direction, channel) that span the subspace, or one (channel,); they need not be
                orthogonal or normalised. (channel, direction) is accepted too.
        """
        block = check_token(block, self.n_blocks, "block")
        rest = self.blocks(block, self.n_blocks)
        x = rest.input
        inside = x @ projector(basis, x)
        found = rest.apply(torch.stack([inside, x - inside]))
        return Split(found[0], found[1])

    # Questions ----------------------------------------------------------------------------------------------------

    @own_modes
    @garbage_kept()
    def map(
        self,
        method: str = METHOD,
        out_token: OutTokens = None,
        target: Target | None = None,
        *,
        groups: Groups | None = None,
        norm: NormKind = "frobenius",
        probes: int | None = None,
        seed: int = 0,
        raw: bool = False,
        precision: Precision | None = None,
        positions: bool = False,
    ) -> TokenMap:
        """A token map: how much each input contributes to each output.

        Args:
            method: A name in `METHODS`.
            out_token: The output to explain, several of them as a list, range or slice, or None for every one.
            target: For `tensor.in_class`: a token string, an id, a class label, a pair of them for a contrast, or
                weights by id; None explains the model's own prediction. A logit is what the unembedding gives, before
                any soft cap or scale. Also a feature of a dictionary: `Dictionary.feature`.
            groups: Sum the inputs of each group: ``"words"``, ``"sentences"``, ``"lines"``, or a list of (label, start,
                stop); see `TokenMap.group`.
            norm: For `tensor.norm`: ``"frobenius"`` or ``"spectral"``.
            probes: For `tensor.norm` and `tensor.contribution`: how many random probes to sketch it with, the standard
                error going into `meta`; None for the exact values.
            seed: Random seed for the probes.
            raw: For rollouts and means of norms: join the blocks' matrices as they are; otherwise rows are divided by
                their sums first.
            precision: Precision of the matrix products behind rows, norms and sketches: ``"float32"``, ``"tf32"`` or
                ``"bfloat16"``; the model's own type, in float32 or better, if None.
            positions: For `tensor.in_class` and `tensor.in_out` of a model that adds positions to its words,
                $X^0 = E + P$: a column per word, then one per position; a word and its position sum to the column
                without this option.
        """
        check_out_token(out_token, self.operator.recording.pools, method)
        check_question(method, target, norm, probes, seed, raw=raw)
        every = self._outputs(out_token)
        if isinstance(target, Feature):
            return self.map_of_feature(target, every, method, groups)
        if positions:
            check_split(method, groups)
        if groups is not None:  # before the work
            find_groups(groups, self.tokens, self.context.meta)
        operator = self.operator if precision is None else self.with_precision(precision).operator
        pools = has_one_row(operator.recording, method)
        question = Question(
            operator=operator,
            out_tokens=(0,) if pools else every,
            samples=(operator.sample,) * (1 if pools else len(every)),
            target=target,
            classes=self.context.classes,
            norm=norm,
            probes=probes and int(probes),
            seed=int(seed),
            raw=raw,
        )
        found = begin_finishing(METHODS[method].compute(question), question.classes)()
        made = TokenMap(
            scores=found.scores,
            out_tokens=found.names if pools and found.names else tuple(self.out_tokens[i] for i in every),
            in_tokens=self.tokens,
            method=method,
            bias_share=found.bias_share,
            meta=self.meta() | {"out_positions": list(every)} | found.meta(),
        )
        if positions:
            return with_positions(made, question)
        return made if groups is None else made.group(groups)

    def explore(self, out_token: int | None = None, target: str = "", against: str = "") -> MapWidget:
        """A clickable map for a notebook: the selected output, target and input are available in Python.

        >>> widget = T.explore()  # doctest: +SKIP
        >>> widget.out_token, widget.in_token, widget.map  # what was clicked, and the map shown  # doctest: +SKIP

        Args:
            out_token: The output to explain first; if None, the masked token, the one that represents a picture, or
                the last one.
            target: What to explain first, as people write it; the model's top prediction if empty.
            against: The contrast target.

        Raises:
            MissingExtraError: anywidget is not installed.
        """
        if find_spec("anywidget") is None:
            raise missing_extra("`T.explore`", "anywidget", "notebook")
        from tensorlens.views.widget import MapWidget

        first = default_output(self) if out_token is None else check_token(out_token, self.shape[0])
        has_head = has_predictions(self)
        return MapWidget(
            self._told, self.out_tokens, takes_target=has_head, out_token=first, target=target, against=against
        )

    @own_modes
    def _told(self, out_token: int, target: str, against: str) -> TokenMap:
        """The map of one output with its headline."""
        asked = MapQuestion.complete(self, None, out_token, target or None, against or None)
        return asked.answered(self, asked.headlined(self), self.map)

    def _outputs(self, out_token: OutTokens) -> tuple[int, ...]:
        n_out = self.shape[0]
        if out_token is None or isinstance(out_token, slice):
            try:
                every: Any = range(n_out)[slice(None) if out_token is None else out_token]
            except TypeError as error:
                raise InputError(f"A slice as `out_token` needs whole numbers; got {out_token!r:.60}.") from error
        else:
            every = out_token.tolist() if isinstance(out_token, (Tensor, np.ndarray)) else out_token
            every = every if isinstance(every, Sequence) and not isinstance(every, str) else (every,)
        if not every:
            raise InputError(f"`out_token` must name at least one of the {n_out} outputs; got {out_token!r}.")
        return tuple(check_token(i, n_out) for i in every)

    @own_modes
    def attentions(self, method: str = "tensor.norm", *, per_head: bool = False) -> tuple[Tensor, ...]:
        """A map of each block, in the shape of transformers' `output_attentions`, for tools that draw attention.

        Args:
            method: A method whose scores are not negative; rows are divided by their sums.
            per_head: One map per head (with the block's residual) instead of one per block.

        Returns:
            For each block (1, head, out_token, in_token), with one head unless `per_head`.
        """
        check_question(method)
        if METHODS[method].signed:
            raise MethodError(f"The scores of `{method}` are signed, and attention is not. Use `tensor.norm`.")
        maps = []
        for n in range(self.n_blocks):
            block = self.blocks(n, n + 1)
            heads = range(self.operator.recording.n_heads.get(self.operator.span.start + n, 0)) if per_head else ()
            parts = [block.heads({0: [head]}) for head in heads] or [block]
            maps.append(torch.stack([part.map(method).normalised().scores for part in parts])[None])
        return tuple(maps)

    def meta(self) -> dict[str, Any]:
        """Provenance of a map: input, model, blocks, heads, rules, certificate."""
        heads = {str(block): multiplier.nonzero()[:, 0].tolist() for block, multiplier in self.operator.heads.items()}
        return {
            **self.context.meta,
            "blocks": list(self.operator.span),
            "heads": heads or None,
            "rules": self.operator.recording.rules.as_dict(),
            "certificate": None if self._certified is None else self._certified.verdict,
            **({"switched_off": list(modes_left())} if modes_left() else {}),
        }

    def with_precision(self, precision: Precision | None) -> AttentionTensor:
        """The same operator with its rows, norms and sketches computed in a different precision."""
        return self if precision == self.operator.precision else self._but(precision=precision)

    @own_modes
    def certificate(self) -> Certificate:
        """Whether T is exact, linear and complete: the errors of its laws, the verdict, and the rules. Cached."""
        if self._certified is None:
            self._certified = certify(self.operator)
        return self._certified

    @own_modes
    def predictions(self, k: int = 5, out_token: int = OUT_TOKEN) -> list[Prediction]:
        """The `k` classes or next tokens that the model ranks highest at one output, with their logits.

        They come from the whole model, its soft caps and scales included, whatever the range of blocks.
        """
        recording, classes = self.operator.recording, self.context.classes
        k = check_whole(k, "k", 1)
        if classes is None or recording.readout is None:
            raise no_head(recording.name)
        logits = plain_logits(recording, [check_token(out_token, self.shape[0])])[0]
        probabilities = logits.softmax(-1)
        best = logits.topk(min(k, len(logits))).indices.tolist()
        return [Prediction(classes.name(i), i, float(logits[i]), float(probabilities[i])) for i in best]


def _unpickled(header: bytes, memories: dict[str, Tensor]) -> AttentionTensor:
    return AttentionTensor(*tensor_files.unpack(header, memories.__getitem__))
