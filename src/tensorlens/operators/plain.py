"""The model itself, without recording: its states, for laws to compare with, and its own logits."""

from __future__ import annotations

from inspect import signature

import torch
from torch import Tensor

from tensorlens.errors import MethodError
from tensorlens.models.layouts import readout_layout, state_layout, state_of
from tensorlens.models.runner import End, run
from tensorlens.recording.recording import Origin, Recording


def plain_output(recording: Recording, *, is_nudged: bool = False) -> Tensor:
    """$X^N$ (sample, token, channel) from the unmodified model: the value to reproduce.

    Args:
        recording: The recording of the model at the input.
        is_nudged: Whether every second number that enters the first block is changed in its last digit.
    """
    origin = recording.from_model("The value law")

    def nudge(n: int, state: Tensor) -> Tensor | None:
        if n or not is_nudged:
            return None
        steps = torch.arange(state.numel(), device=state.device).view(state.shape) % 2
        return state + state * steps * torch.finfo(state.dtype).eps

    state = run(origin.anatomy, origin.inputs, to=body_end(recording), n_blocks=recording.n_blocks, entering=nudge)
    return as_tokens(origin, state, recording.n_samples)


def body_end(recording: Recording) -> End:
    """Where $X^N$ is: after the final norm, or before it."""
    return "end" if recording.rules.include_final_norm else "last block"


def as_tokens(origin: Origin, state: Tensor, n_samples: int = 1, *, n: int = -1) -> Tensor:
    """The state that enters block n, or the last one, as (sample, token, channel)."""
    return state_layout(state, n, origin.anatomy.channels, origin.inputs, n_samples).to_tokens(state)


def plain_logits(recording: Recording, out_tokens: list[int]) -> Tensor:
    """The model's own logits (output, class), including whatever its code does after the unembedding.

    One row for a head that reads the whole input at once. This runs the model only if code follows the unembedding.
    """
    if recording.head is None or recording.gives_raw_logits:
        return torch.stack([recording.logits_at(i) for i in out_tokens])
    origin = recording.from_model("A logit after a soft cap or a scale")
    places = torch.tensor(out_tokens, device=recording.states[-1].device)
    keeps = recording.head is not None and "logits_to_keep" in signature(origin.model.forward).parameters
    inputs = {**origin.inputs, **({"logits_to_keep": places} if keeps else {})}
    found = state_of(run(origin.anatomy, inputs))
    if keeps:
        return found[0]
    assert recording.readout is not None, "only models with a head have a readout"
    found = readout_layout(found, recording.n_samples, recording.readout.shape[1], is_read=False)
    if found is None:
        raise MethodError(f"It is not known which of the logits that `{recording.name}` returns belong to which token.")
    return found[0][None] if found.dim() == 2 else found[0, [recording.place_read(i) for i in out_tokens]]
