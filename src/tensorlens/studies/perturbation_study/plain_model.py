"""Running a model plainly, in batches, for what a perturbation changes: its output state and its probabilities."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tensorlens.lens import Lens
from tensorlens.memory import is_out_of_memory
from tensorlens.models.anatomy import Anatomies, Anatomy
from tensorlens.models.runner import run

NO_TOKEN = -1
"""An id that no token has."""
BATCH_SIZES = {"cuda": 256, "cpu": 64}
"""Inputs at a time: a GPU has to be launched for each batch, a CPU's cache holds few."""


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """What a model makes of a batch, read at one output token.

    Attributes:
        states: $F(X)_o$ after the final norm.
        logits: One row for each input, or None for a model without a head that has classes at that token.
    """

    states: Float[Tensor, "batch channel"]
    logits: Float[Tensor, "batch class"] | None

    def __getitem__(self, rows: Any) -> Outputs:
        return Outputs(states=self.states[rows], logits=None if self.logits is None else self.logits[rows])


class PlainModel:
    """A lens's model, run as it is: no rule, no interception, no gradient.

    Args:
        lens: Its model is used and left in the mode it was in.
        watch: Which state is read: ``first``, ``last`` or the ``mean`` of all tokens.
        batch_size: Inputs at a time, by the device if None; halved when memory runs out.
    """

    def __init__(self, lens: Lens, watch: str = "last", batch_size: int | None = None) -> None:
        self.lens, self.watch = lens, watch
        self.anatomies = Anatomies(lens.model, lens.specimen.blocks)  # those of the lens are checked by recordings
        self.batch_size = batch_size or BATCH_SIZES.get(next(lens.model.parameters()).device.type, 64)
        parameters = inspect.signature(lens.model.forward).parameters
        self.keeps_last = "logits_to_keep" in parameters
        self.options: dict[str, Any] = {"use_cache": False} if "use_cache" in parameters else {}

    def run(self, inputs: dict[str, Tensor]) -> Outputs:
        """The outputs for a batch of any size."""
        n_inputs = len(next(iter(inputs.values())))
        parts: list[Outputs] = []
        start = 0
        while start < n_inputs:
            batch = {name: value[start : start + self.batch_size] for name, value in inputs.items()}
            try:
                parts.append(self._run(batch))
            except (torch.OutOfMemoryError, RuntimeError) as error:
                if not is_out_of_memory(error) or self.batch_size == 1:
                    raise
                self.batch_size //= 2
                continue
            start += self.batch_size
        logits = [part.logits for part in parts if part.logits is not None]
        return Outputs(states=torch.cat([part.states for part in parts]), logits=torch.cat(logits) if logits else None)

    def n_tokens(self, inputs: dict[str, Tensor]) -> int:
        """How many tokens the model makes of an input."""
        return self._states(inputs, {})[0].shape[1]

    def _states(self, inputs: dict[str, Tensor], options: dict[str, Any]) -> tuple[Tensor, Any]:
        """$X^N$, where the body of the model ends, and what the model returned."""
        states: list[Tensor] = []
        one = {name: value[:1] for name, value in inputs.items()}
        anatomy = self.anatomies.at(self.lens.specimen.arguments(one))
        arguments = inputs | self.options | options
        output = run(anatomy, arguments, ending=states.append, within=_without_padding(anatomy.model))
        return token_states(states[-1], anatomy), output if anatomy.has_head else None

    def _run(self, inputs: dict[str, Tensor]) -> Outputs:
        keep = {"logits_to_keep": 1} if self.keeps_last and self.watch == "last" else {}
        states, output = self._states(inputs, keep)
        logits = getattr(output, "logits", None)
        if logits is not None and logits.dim() == 3:
            # A masked language model has classes at the masked tokens, not at the token its states are read at.
            logits = logits[:, -1] if self.watch == "last" else None
        watched = states.mean(1) if self.watch == "mean" else states[:, -1 if self.watch == "last" else 0]
        return Outputs(states=watched.float(), logits=None if logits is None or logits.dim() != 2 else logits.float())


def token_states(state: Tensor, anatomy: Anatomy) -> Tensor:
    """A state as (sample, token, channel), whatever its layout."""
    if state.dim() == 3:
        return state
    axis = anatomy.channels[-1] if anatomy.channels and anatomy.channels[-1] is not None else state.dim() - 1
    return state.movedim(axis, -1).flatten(1, -2)


@contextmanager
def _without_padding(model: nn.Module) -> Iterator[None]:
    """Temporarily, no token counts as padding to a decoder that classifies.

    It reads its last token that is not padding, and takes no batch if none is named. Copies have no padding, but what
    takes a token's place may be the token that otherwise pads. Other models are left alone: some pad by themselves.
    """
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    if not hasattr(model, "score") or not hasattr(config, "pad_token_id"):  # `score`: the head of such a decoder
        yield
        return
    found, config.pad_token_id = config.pad_token_id, NO_TOKEN
    try:
        yield
    finally:
        config.pad_token_id = found
