r"""The eight baselines: four measures within a block, joined over blocks by rollout or by mean; and ALTI.

| measure         | N_ij within a block                                                                         |
|-----------------|---------------------------------------------------------------------------------------------|
| `attn`          | attention, averaged over heads                                                              |
| `w_attn`        | $\lVert c_{ij} \rVert$: attention times transformed values (Kobayashi et al. 2020)            |
| `w_attn_res_ln` | $\lVert y_{ij} \rVert$ with the residual, through the norm behind it (Kobayashi et al. 2021)  |
| `glob_enc`      | the same through the block's second norm (GlobEnc, Modarressi et al. 2022)                  |

Conventions where the sources are silent: layouts other than post-LN follow the principle *decompose what the attention
sub-block adds, hold every norm on the way*; norm maps are divided by their row sums before they are joined.

One block is split by source token, with every norm on the way kept at its actual scale. For output i and source
j, in the notation of Kobayashi et al.:

- $c_{ij} = \sum_h A_{h,ij}\, v_{h,j} W_{o,h}$, with the *actual* values, biases and norm before them included;
- $s_{ij}$: the same after anything between attention and the residual sum (a norm, a layer scale);
- $y_{ij} = \delta_{ij} x_i + s_{ij}$: with the residual; $\sum_j y_{ij}$ and the output bias make the residual stream.

T leaves value biases to B; these measures, like their sources, do not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float
from torch import Tensor

from tensorlens.errors import AnatomyError, MethodError
from tensorlens.maps.methods import Question, Scored, method, unknown_bias
from tensorlens.memory import BYTES_OF_VECTORS, bytes_on
from tensorlens.operators.attention_matrices import Mixing, mixing
from tensorlens.operators.operator import FrozenOperator
from tensorlens.program.folding import dense
from tensorlens.program.paths import Chain, Path, Wiring, before_weight, has_norm, wiring
from tensorlens.program.steps import at_least_float32
from tensorlens.recording.conventions import Rules
from tensorlens.recording.recorder import record
from tensorlens.recording.recording import Recording, Span
from tensorlens.tolerances import in_float64

HAS_RESIDUAL = {"attn": False, "w_attn": False, "w_attn_res_ln": True, "glob_enc": True, "alti": True}
"""Measures without the residual: rollout adds the identity to these only."""


Matrices = Float[Tensor, "*sample out_token in_token"]
"""One for each of several samples that were recorded together, or for one sample alone."""


# Within a block ------------------------------------------------------------------------------------------------------


def measured(block: Decomposition, measure: str) -> Matrices:
    """One of `MEASURES` of a block."""
    return torch.cat([MEASURES[measure](block, rows) for rows in block.chunks()], -2)


def _lengths(vectors: Vectors) -> Matrices:
    return in_float64(vectors.norm(dim=-1))


def _glob_enc(block: Decomposition, rows: slice) -> Matrices:
    """The vectors of `w_attn_res_ln` through the block's second norm, without the feed-forward's own part.

    Raises:
        MethodError: the second norm never sees what attention added.
    """
    if block.second is None:
        raise MethodError(
            f"`glob_enc` does not apply to block {block.block}: it needs a second norm that reads the attention "
            f"output, and this block has none. Use `w_attn_res_ln`."
        )
    return _lengths(block.second(block.attended(rows), rows))


def _alti(block: Decomposition, rows: slice) -> Matrices:
    r"""How close the contribution of each source is to the whole (Ferrando et al. 2022).

    $\max(0, \lVert ŷ_i \rVert_1 - \lVert y_{ij} - ŷ_i \rVert_1)$, with ŷ the true output of the attention sub-block.
    Rows are divided by their sum; a row in which no source comes close keeps its own token.
    """
    vectors, whole = block.attended(rows), block.output[..., rows, None, :]
    nearness = (whole.abs() - (vectors - whole).abs()).sum(-1)  # a source that contributes nothing gets exactly zero
    matrix = in_float64(nearness.clamp_min(0))
    empty = matrix.sum(-1, keepdim=True) == 0
    own = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)[rows]
    return rows_to_one(torch.where(empty, own, matrix))


MEASURES: dict[str, Callable[[Decomposition, slice], Matrices]] = {
    "w_attn": lambda block, rows: _lengths(block.mixed(rows)),
    "w_attn_res_ln": lambda block, rows: _lengths(block.attended(rows)),
    "glob_enc": _glob_enc,
    "alti": _alti,
}
"""Measures of the vectors of a block, for some of its outputs; `attn` needs none."""


# Across blocks -------------------------------------------------------------------------------------------------------


def rows_to_one(matrix: Matrices) -> Matrices:
    """Each row divided by its sum."""
    return matrix / matrix.sum(-1, keepdim=True).clamp_min(torch.finfo(matrix.dtype).tiny)


def rollout(matrices: Sequence[Matrices], *, has_residual: bool, raw: bool = False) -> Matrices:
    r"""$R = \hat N^N \cdots \hat N^1$ (Abnar and Zuidema 2020), the later block on the left.

    Args:
        matrices: One for each block, the first block first.
        has_residual: Whether the measure holds the residual; if not, $\hat N = \frac12 N + \frac12 I$.
        raw: Multiply norm maps as they are, as GlobEnc's code does, scaled by one number per block to stay finite.
    """
    joined = None
    for matrix in matrices:
        step = matrix / matrix.max() if raw else rows_to_one(matrix)
        if not has_residual:
            step = 0.5 * step + 0.5 * torch.eye(step.shape[-1], dtype=step.dtype, device=step.device)
        joined = step if joined is None else step @ joined
    assert joined is not None, "a range of blocks is not empty"
    return joined


def average(matrices: Sequence[Matrices], *, raw: bool = False) -> Matrices:
    """The average over blocks, no identity added.

    Convention: norm maps by row sums first, or late blocks with large states would dominate the others; `raw` does not.
    """
    return torch.stack([matrix if raw else rows_to_one(matrix) for matrix in matrices]).mean(0)


def without_sink_column(matrix: Matrices) -> Matrices:
    """The map without its first column, with rows divided by their sums.

    A causal rollout ends in its first token, which attends to nothing but itself. The first row is left as it is.
    """
    kept = matrix.clone()
    kept[..., 1:, 0] = 0
    return rows_to_one(kept)


# By name -------------------------------------------------------------------------------------------------------------

_matrices: WeakKeyDictionary[Recording, dict[Any, list[Matrices]]] = WeakKeyDictionary()
"""The matrices that all joins of one measure share; kept as long as the recording."""

_held: WeakKeyDictionary[Recording, Recording] = WeakKeyDictionary()
"""Recordings of the same pass under the paper's rules."""


def block_matrices(operator: FrozenOperator, measure: str) -> list[Matrices]:
    """The measure's matrix for each block in the operator's range, of all samples that were recorded."""
    if operator.heads:
        raise MethodError(
            "Baselines describe the model's own attention and do not support selected heads. Use the whole "
            "tensor, or use a method of the tensor."
        )
    known = _matrices.setdefault(operator.recording, {})
    if (measure, operator.span) not in known:
        found = [_block_matrix(operator.recording, block, measure) for block in range(*operator.span)]
        if any(matrix.shape[-2:] != (operator.n_tokens, operator.n_tokens) for matrix in found):
            raise MethodError(
                f"The blocks of `{operator.recording.name}` attend to different numbers of tokens; expected "
                f"{operator.n_tokens} in all of them. Use a method of the tensor."
            )
        known[measure, operator.span] = found
    return known[measure, operator.span]


def _block_matrix(recording: Recording, block: int, measure: str) -> Matrices:
    recording = recording if measure == "attn" else _with_held_factors(recording)
    found = mixing(recording, block)
    with torch.no_grad():
        if measure == "attn":
            return in_float64(found.attention).mean(-3)  # over heads; rows sum to one
        return measured(decompose(recording, block, found), measure)


def _with_held_factors(recording: Recording) -> Recording:
    """The pass under rules whose blocks can be split: baselines describe the model, whatever the rules of T."""
    if recording.rules.holds_factors:
        return recording
    if recording not in _held:
        origin = recording.from_model("A baseline under rules with live attention or norms")
        _held[recording] = record(origin.anatomy, origin.inputs, Rules(), n_samples=recording.n_samples)
    return _held[recording]


def _scored(question: Question, matrix: Matrices) -> Scored:
    scores = question.at_outputs(matrix if matrix.dim() == 3 else matrix[None])
    return Scored(scores=scores, bias_share=unknown_bias(question))


def _rollout(question: Question, measure: str) -> Scored:
    matrices = block_matrices(question.operator, measure)
    return _scored(question, rollout(matrices, has_residual=HAS_RESIDUAL[measure], raw=question.raw))


def _mean(question: Question, measure: str) -> Scored:
    return _scored(question, average(block_matrices(question.operator, measure), raw=question.raw))


def _without_sink_column(question: Question) -> Scored:
    matrices = block_matrices(question.operator, "attn")
    return _scored(question, without_sink_column(rollout(matrices, has_residual=False)))


SUMMARIES = {
    "attn": "attention averaged over heads",
    "w_attn": "attention times transformed values",
    "w_attn_res_ln": "attention, residual and norm together",
    "glob_enc": "attention, residual and both norms of a block",
}
BASELINES: dict[str, tuple[str, Callable[[Question], Scored]]] = {}
for _name, _words in SUMMARIES.items():
    BASELINES[f"rollout.{_name}"] = f"Baseline: {_words}, multiplied over blocks", partial(_rollout, measure=_name)
    BASELINES[f"mean.{_name}"] = f"Baseline: {_words}, averaged over blocks", partial(_mean, measure=_name)
BASELINES["alti"] = (
    "Peer: how close each source's contribution comes to the whole, multiplied over blocks",
    partial(_rollout, measure="alti"),
)
BASELINES["rollout.attn_without_sink"] = (
    "Peer: rollout.attn with the first token's column dropped",
    _without_sink_column,
)
for _name, (_words, _compute) in BASELINES.items():
    method(_name, _words, takes_samples=True)(_compute)


# One block by source token --------------------------------------------------------------------------------------------


Vectors = Float[Tensor, "*sample out_token in_token channel"]


@dataclass(frozen=True, kw_only=True)
class Way:
    """Norms and scalings on the way, as a linear map with statistics held, without shifts.

    Attributes:
        pieces: The pieces, none of which is a matrix.
        shape: Samples, if there are several, and tokens.
    """

    pieces: Chain
    shape: tuple[int, ...]

    def __call__(self, vectors: Vectors, rows: slice) -> Vectors:
        """Each vector times the scale of its output, and centred by its own mean if a norm centres."""
        # vectors: (…, out_token, in_token, channel); a scale belongs to the output, and is the same for every source.
        for piece in self.pieces:
            if piece.kind == "centre":
                vectors = vectors - vectors.mean(-1, keepdim=True)
            else:
                by = at_least_float32(piece.by).to(vectors)
                vectors = vectors * (by.view(self.shape)[..., rows, None, None] if piece.kind == "token" else by)
        return vectors


@dataclass(frozen=True, kw_only=True)
class Decomposition:
    r"""The contribution of each source token to each output within one block.

    Attributes:
        recording: The pass.
        block: The block.
        wiring: Its wiring.
        x: The state entering the block, as the residual carries it around attention.
        attention: $A_h$.
        projected: $v_{h,j} W_{o,h}$.
        before: The pieces between the mixture and the output weight.
        after: The pieces between the output weight and the residual sum.
        first: The pieces of the residual stream after that sum: the first norm of a post-LN block.
        second: The next pieces: the norm before the feed-forward, or the second norm of a post-LN block. None if
            no norm reads the sum.
    """

    recording: Recording
    block: int
    wiring: Wiring
    x: Float[Tensor, "*sample token channel"]
    attention: Float[Tensor, "*sample head out_token in_token"]
    projected: Float[Tensor, "*sample head in_token channel"]
    before: Way
    after: Way
    first: Way
    second: Way | None

    def chunks(self) -> Iterator[slice]:
        """Ranges of output tokens small enough for vectors from every source."""
        n_tokens, most = self.x.shape[-2], bytes_on(self.x.device, BYTES_OF_VECTORS)
        size = max(1, most // self.x.nbytes)
        return (slice(start, min(start + size, n_tokens)) for start in range(0, n_tokens, size))

    def mixed(self, rows: slice) -> Vectors:
        """$c_{ij}$; layer scales and factors of the model are part of its output weight, unless a norm comes first."""
        vectors = torch.einsum("...hij,...hjd->...ijd", self.attention[..., rows, :], self.projected)
        return self.before(vectors, rows)

    def with_residual(self, rows: slice) -> Vectors:
        """$y_{ij} = δ_{ij} x_i + s_{ij}$."""
        vectors = self.after(self.mixed(rows), rows)
        # The diagonal i = j of (out_token, in_token), its tokens on the last axis: (…, channel, out_token).
        vectors.diagonal(rows.start, -3, -2).add_(self.x[..., rows, :].to(vectors).mT)
        return vectors

    def attended(self, rows: slice) -> Vectors:
        """The contribution of each source to the attention sub-block's output, after its norm (post-LN)."""
        return self.first(self.with_residual(rows), rows)

    @cached_property
    def output(self) -> Float[Tensor, "*sample token channel"]:
        """The true output of the attention sub-block, including biases and the norm after it (post-LN)."""
        found = self.wiring
        outs = [path for path in found.own if path.source == found.mixing.slot]
        paths = outs if found.is_parallel else [Path(found.start, self.first.pieces)]
        slot, x = found.slot_of(*paths), self.recording.states[self.block]
        if slot is None:
            raise _not_found(self.block, "no step contains what attention adds to the residual stream.")
        value = at_least_float32(found.program.observe((x,), (slot,))[slot]).reshape(self.x.shape)
        return value + self.x if found.is_parallel else value


def decompose(recording: Recording, block: int, mixing: Mixing) -> Decomposition:
    """Split one block by source token.

    Raises:
        MethodError: the block is not made of attention and a feed-forward that are known.
    """
    try:
        found = wiring(recording.part(Span(block, block + 1)), block, recording.name)
    except AnatomyError as error:
        raise _not_found(block, str(error)) from error
    out, carry, first, second = _sub_layers(found, block)
    shape = tuple(recording.states[block].shape[:2])[recording.n_samples == 1 :]
    last = 1 + max(place for place, piece in enumerate(out) if piece.kind == "weight")
    # Without a norm after it, everything that follows the output weight counts as part of the weight.
    last = last if has_norm(out[last:]) else len(out)
    tokens = tuple([piece for piece in out[:last] if piece.kind == "token"])
    values = at_least_float32(mixing.values)
    weight = dense(tuple([piece for piece in out[:last] if piece.kind != "token"]), -1)
    weight = weight.T.to(values).unflatten(0, (values.shape[-3], -1))  # (head, head_channel, channel)
    x = at_least_float32(recording.states[block]).reshape(*shape, 1, -1)  # (…, token, one source, channel)
    return Decomposition(
        recording=recording,
        block=block,
        wiring=found,
        x=Way(pieces=carry, shape=shape)(x, slice(None))[..., 0, :],
        attention=at_least_float32(mixing.attention),
        projected=torch.einsum("...hjc,hcd->...hjd", values, weight),
        before=Way(pieces=tokens, shape=shape),
        after=Way(pieces=out[last:], shape=shape),
        first=Way(pieces=first, shape=shape),
        second=None if second is None else Way(pieces=second, shape=shape),
    )


def _sub_layers(found: Wiring, block: int) -> tuple[Chain, Chain, Chain, Chain | None]:
    """The output weight and the pieces around it, the residual around attention, and the first and second norm."""
    outs = [path for path in found.own if path.source == found.mixing.slot] if found.is_parallel else list(found.out)
    carries = found.streams if found.is_parallel else found.carry
    if (len(outs), len(carries), len(found.streams)) != (1, 1, 1):
        raise _not_found(block, "attention, residual and feed-forward are joined by more than one sum.")
    if not outs[0].has_weights or any(piece.kind == "gain" for piece in outs[0].pieces):
        raise _not_found(block, "the attention output is gated before the output weight, or there is no output weight.")
    if found.is_parallel:
        return outs[0].pieces, carries[0].pieces, (), None
    stream = found.streams[0].pieces
    second = (
        stream[len(found.first) :] if found.first or not found.branches else before_weight(found.branches[0].pieces)
    )
    return outs[0].pieces, carries[0].pieces, found.first, second if has_norm(second) else None


def _not_found(block: int, why: str) -> MethodError:
    return MethodError(
        f"This baseline needs the value and output weights of block {block}, which were not found. {why} "
        "`rollout.attn` and `mean.attn` need none."
    )
