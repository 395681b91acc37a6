"""Controls: rankings that know nothing of what the model did. A method that does not beat them says nothing.

For decoders, recency is the one to watch: near tokens matter most to a language model whatever happens inside it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from tensorlens.axes import TokenMatrix
from tensorlens.maps.methods import Answer, Question, method


def random_scores(n_out: int, n_in: int, seed: Sequence[int] | int = 0) -> TokenMatrix:
    """Uniform numbers, the same on every machine for the same seed."""
    return torch.from_numpy(np.random.default_rng(seed).random((n_out, n_in)))


def recency_scores(n_tokens: int) -> Float[Tensor, " in_token"]:
    """The later, the higher."""
    return torch.arange(n_tokens, dtype=torch.float64)


def position_scores(n_tokens: int) -> Float[Tensor, " in_token"]:
    """The earlier, the higher; never negative, since a study may rank by magnitude."""
    return recency_scores(n_tokens).flip(0)


def _answer(question: Question, scores: Tensor) -> Answer:
    rows = len(question.out_tokens)
    scores = scores.expand(rows, -1) if scores.dim() == 1 else scores
    return Answer(scores=scores, bias_share=torch.full((rows,), float("nan")))


@method("control.random", "Control: random numbers, the same for every input of this length")
def _random(question: Question) -> Answer:
    return _answer(question, random_scores(len(question.out_tokens), len(question.operator.input)))


@method("control.recency", "Control: the later the token, the higher")
def _recency(question: Question) -> Answer:
    return _answer(question, recency_scores(len(question.operator.input)))


@method("control.position", "Control: the earlier the token, the higher")
def _position(question: Question) -> Answer:
    return _answer(question, position_scores(len(question.operator.input)))


@method("control.embedding_norm", "Control: length of the state that enters the first block")
def _embedding_norm(question: Question) -> Answer:
    return _answer(question, question.operator.input.norm(dim=-1))
