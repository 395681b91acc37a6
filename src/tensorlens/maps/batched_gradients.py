"""Integrated gradients of many samples at once: points of all their paths go through the model together."""

from __future__ import annotations

import torch
from torch import Tensor

from tensorlens.maps.batch_question import BatchQuestion, Pending, reader, target_names, targets_of
from tensorlens.maps.gradients import Read, integrated_gradients


def integrated(question: BatchQuestion) -> Pending:
    """`gradient.integrated` of every sample."""
    if not question.has_classes:
        directions = question.rows(question.recording.states[-1]).detach()

        def along(states: Tensor) -> Tensor:
            return (question.rows(states) * directions.to(states)).sum(-1)

        return question.answers_without_bias(_scores(question, along), question.alike(explains="output state"))
    ids, weights = targets_of(question)
    names = target_names(question, ids, weights)
    scores = _scores(question, reader(question, ids, weights))
    return question.answers_without_bias(scores, lambda: [{"explains": name} for name in names()])


def _scores(question: BatchQuestion, read: Read) -> Tensor:
    n = len(question.lengths)
    return integrated_gradients(
        question.recording, lambda states: torch.cat([read(point) for point in states.split(n)])
    )
