"""Defaults for what a question leaves open: the method, the output, the prediction.

Every place that answers a question asks here, and the signatures of users' functions take their defaults from here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from tensorlens.operators.operator import check_token
from tensorlens.recording.recording import Recording

METHOD = "tensor.in_out"
"""The method of `T.map`, `lens.maps` and `batch.maps`: any model has it, with a head or without."""

METHOD_OF_CLASSES = "tensor.in_class"
"""The method of `Mapper`, of `tensorlens maps` and of the explorer where the model has a head."""

METHOD_OF_PICTURES = "tensor.contribution"
"""The first method for a picture in a model without a head."""

OUT_TOKEN = -1
"""The output of questions about one of them: the last, which in a decoder predicts what comes next."""

SHARE, MAX_NODES = 0.8, 200
"""Where a graph stops growing: the share of what flows into its nodes, and how many of them there may be."""


def own_prediction(logits: Tensor) -> Tensor:
    """(…): without a target, the class with the largest of logits (…, class) is explained."""
    return logits.argmax(-1)


def one_output(recording: Recording, out_token: int) -> int:
    """The output that is meant; a head that reads the whole input at once has only one."""
    return 0 if recording.pools else check_token(out_token, recording.states[-1].shape[1])


def has_one_row(recording: Recording, method: str | None) -> bool:
    """Whether a map has one row whatever its output: logits of the whole input are explained."""
    return recording.pools and method == METHOD_OF_CLASSES


def first_output(meta: Mapping[str, Any], n_out: int) -> int:
    """The output to look at first: the token that stands for a picture, or the last of a text."""
    grid = meta.get("grid")
    return 0 if grid is not None and grid["first"] > 0 else n_out - 1
