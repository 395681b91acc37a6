"""Controls: rankings that do not use the model. A useful method must beat them.

For decoders, recency is the strongest: near tokens matter most to a language model, whatever happens inside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from tensorlens.axes import TokenMatrix
from tensorlens.maps.methods import Question, Scored, method, unknown_bias


def random_scores(n_out: int, n_in: int, seed: Sequence[int] | int = 0) -> TokenMatrix:
    """Uniform numbers, the same on every machine for the same seed."""
    return torch.from_numpy(np.random.default_rng(seed).random((n_out, n_in)))


def _by_place(question: Question, of: Callable[[int], Tensor]) -> Scored:
    """Scores of each sample's own length, padded with zeros where others are longer."""
    lengths = question.lengths or (len(question.operator.input),) * (max(question.of) + 1)
    rows = [of(lengths[sample]) for sample in question.of]
    longest = max(map(len, rows))
    scores = torch.stack([torch.nn.functional.pad(row, (0, longest - len(row))) for row in rows])
    return Scored(scores=scores, bias_share=unknown_bias(question))


@method("control.random", "Control: random numbers, the same for every input of this length", takes_samples=True)
def _random(question: Question) -> Scored:
    if question.is_batch:
        return _by_place(question, lambda n: random_scores(1, n)[0])
    scores = random_scores(len(question.out_tokens), len(question.operator.input))
    return Scored(scores=scores, bias_share=unknown_bias(question))


@method("control.recency", "Control: later tokens score higher", takes_samples=True)
def _recency(question: Question) -> Scored:
    return _by_place(question, lambda n: torch.arange(n, dtype=torch.float64))


@method("control.position", "Control: earlier tokens score higher", takes_samples=True)
def _position(question: Question) -> Scored:
    # Never negative, since a study may rank by magnitude.
    return _by_place(question, lambda n: torch.arange(n, dtype=torch.float64).flip(0))


@method("control.embedding_norm", "Control: norm of the state that enters the first block", takes_samples=True)
def _embedding_norm(question: Question) -> Scored:
    states = question.recording.states[question.operator.span.start]
    return Scored(scores=states.norm(dim=-1)[list(question.of)], bias_share=unknown_bias(question))
