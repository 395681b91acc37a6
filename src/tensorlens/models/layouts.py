"""The hidden state among the arguments and results of modules, and how its axes become tokens and channels."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from types import NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from tensorlens.errors import AnatomyError
from tensorlens.trees import map_tensors, tensors_in


class AxisLayout(NamedTuple):
    """The axes of a model's own state that count samples and channels; all others count tokens.

    A state is (batch, token, channel) in most models; images have (batch, channel, row, column), some models put the
    batch second, and some carry several streams per token, which count as channels here.
    """

    shape: tuple[int, ...]
    batch: int | None
    channels: tuple[int, ...]

    @property
    def _order(self) -> tuple[int, ...]:
        front = () if self.batch is None else (self.batch,)
        tokens = tuple(axis for axis in range(len(self.shape)) if axis not in (*front, *self.channels))
        return (*front, *tokens, *self.channels)

    @property
    def _is_plain(self) -> bool:
        return self.batch == 0 and self.channels == (2,)

    def to_tokens(self, state: Tensor) -> Tensor:
        """The state as (batch, token, channel)."""
        if self._is_plain:
            return state
        n_batch = 1 if self.batch is None else state.shape[self.batch]
        n_channels = math.prod(self.shape[axis] for axis in self.channels)
        return state.permute(self._order).reshape(n_batch, -1, n_channels)

    def to_native(self, x: Tensor) -> Tensor:
        """(batch, token, channel) in the layout of the model's own code."""
        if self._is_plain:
            return x
        if self.batch is None and x.shape[0] != 1:
            raise AnatomyError(
                "This model merges the sample and token axes: expected one state at a time, got a batch."
            )
        sizes = [x.shape[0] if axis == self.batch else self.shape[axis] for axis in self._order]
        back = sorted(range(len(self._order)), key=lambda place: self._order[place])
        return x.reshape(sizes).permute(back)


def axis_layout(
    shape: tuple[int, ...], channel: int | None, n_tokens: int | None = None, n_samples: int = 1
) -> AxisLayout:
    """The layout of a state.

    Args:
        shape: Shape of the state that enters a block, or leaves the body.
        channel: The axis that the weights read as channels, from `Anatomy.channels`; the last one if None.
        n_tokens: The number of tokens of a text, where it is known: in a state of four axes or more, or without an
            axis of samples, axes of other sizes are then streams, which are channels.
        n_samples: How many samples there are.
    """
    shape, last = tuple(shape), len(shape) - 1
    if len(shape) < 2:
        raise AnatomyError(f"Expected a state with tokens and channels; got one of shape {shape}.")
    if len(shape) == 2:
        # One vector for the whole input, or a sequence without a batch axis.
        return AxisLayout(shape, 0 if shape[0] == n_samples else None, (1,))
    batch = next((axis for axis in (0, 1) if shape[axis] == n_samples and axis != channel), None)
    # An axis that counts neither samples nor tokens nor channels counts streams; often it is in place of samples.
    has_more = len(shape) > 3 or channel is None or batch is None
    token = _text_axis(shape, batch, channel, n_tokens) if has_more else None
    if token is not None:
        return AxisLayout(shape, batch, tuple(axis for axis in range(len(shape)) if axis not in (batch, token)))
    return AxisLayout(shape, batch, (last if channel is None else channel,))


def state_layout(
    state: Tensor, n: int, channels: Sequence[int | None], inputs: Mapping[str, Any], n_samples: int = 1
) -> AxisLayout:
    """The layout of the state that enters block n; of the last state for n = -1.

    Args:
        state: The state.
        n: Which one.
        channels: `Anatomy.channels`.
        inputs: The arguments of the model.
        n_samples: How many samples there are.
    """
    channel = channels[n] if channels and n < len(channels) else None
    return axis_layout(state.shape, channel, n_text_tokens(inputs), n_samples)


def n_text_tokens(inputs: Mapping[str, Any]) -> int | None:
    """Number of tokens of a text, as far as the inputs say."""
    for name, axis in (("input_ids", -1), ("inputs_embeds", 1), ("decoder_input_ids", -1)):
        if isinstance(inputs.get(name), Tensor):
            return inputs[name].shape[axis]
    ids = [v for v in inputs.values() if isinstance(v, Tensor) and v.dtype in (torch.int32, torch.int64)]
    return next((tensor.shape[-1] for tensor in ids if tensor.dim() == 2), None)  # by whatever name


def _text_axis(shape: tuple[int, ...], batch: int | None, channel: int | None, n_tokens: int | None) -> int | None:
    """The axis that counts the tokens of a text; of several possible ones, that after the samples."""
    fitting = [axis for axis in range(len(shape)) if axis not in (batch, channel) and shape[axis] == n_tokens]
    behind = [axis for axis in fitting if batch is not None and axis == batch + 1]
    return (behind or fitting or [None])[0]


def readout_layout(readout: Tensor, n_samples: int, n_tokens: int, *, is_read: bool) -> Tensor | None:
    """The end of a pass as (sample, token, channel), or (sample, class) for one set of logits for the whole input.

    Models also put tokens first, merge samples and tokens, or put classes where `cross_entropy` takes them.

    Args:
        readout: What the unembedding reads, or the model's logits.
        n_samples: How many samples there are.
        n_tokens: How many tokens $X^N$ has.
        is_read: Whether an unembedding reads it, which may take some of the tokens alone.

    Returns:
        None for logits whose tokens are not known.
    """
    if readout.dim() == 2 and readout.shape[0] != n_samples and readout.shape[0] % n_samples == 0:
        readout = readout.reshape(n_samples, -1, readout.shape[1])
    if readout.dim() == 3 and readout.shape[0] != n_samples == readout.shape[1]:
        readout = readout.transpose(0, 1)
    if readout.dim() == 3 and not is_read and readout.shape[1] != n_tokens:
        if readout.shape[2] == n_tokens:
            return readout.transpose(1, 2)
        return readout[:, 0] if readout.shape[1] == 1 else None
    return readout if readout.dim() <= 3 else None


# In what modules take and give ---------------------------------------------------------------------------------------

NAMES = ("last_hidden_state", "logits", "sentence_embedding", "token_embeddings")
"""Names of the state or the logits in outputs with names."""


def main_tensor(output: Any) -> Tensor | None:
    """The state or the logits among the results of a module; a loss, or None in its place, is skipped."""
    if isinstance(output, Tensor):
        return output if is_state(output) else None
    for name in NAMES:
        named = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
        if isinstance(named, Tensor):
            return named
    within = _logits_within(output)
    if within is not None:
        return within
    return next((tensor for tensor in tensors_in(output) if is_state(tensor)), None)


def _logits_within(output: Any) -> Tensor | None:
    """Logits that are named as such in a record inside another."""
    parts = output if isinstance(output, Mapping) else vars(output) if is_dataclass(output) else {}
    found = parts.get("logits")
    if isinstance(found, Tensor):
        return found
    return next((one for part in parts.values() if (one := _logits_within(part)) is not None), None)


def is_state(tensor: Tensor) -> bool:
    """Whether a tensor may be a state: of floats, with tokens and channels."""
    return tensor.dtype.is_floating_point and tensor.dim() >= 2 and not tensor.is_nested


def find_state(args: tuple[Any, ...], kwargs: dict[str, Any], module: str = "", place: int = 0) -> Tensor:
    """The hidden state among a block's arguments: `hidden_states`, or a tensor of floats, the first if `place` is 0."""
    candidates = [kwargs["hidden_states"]] if "hidden_states" in kwargs else [*args, *kwargs.values()]
    if place == 0 and candidates and isinstance(candidates[0], Tensor) and is_state(candidates[0]):
        return candidates[0]
    found = [one for one in tensors_in(candidates) if is_state(one)]
    if found:
        return found[place if place < len(found) else 0]
    given = ", ".join(type(value).__name__ for value in (*args, *kwargs.values())) or "nothing"
    raise AnatomyError(
        f"`{module}` was called with {given}; expected a hidden state, a tensor of floats, among its arguments. Let "
        "the block take its state as a tensor, or pass the path of the right list of blocks as `blocks=`."
    )


def put_state(
    args: tuple[Any, ...], kwargs: dict[str, Any], state: Tensor, place: int = 0
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with a different hidden state."""
    return replace_state((args, kwargs), find_state(args, kwargs, place=place), state)


def state_of(output: Any, place: int = 0) -> Tensor:
    """The state in the result of a module or a model.

    Args:
        output: A tensor, or tensors in tuples, lists and dictionaries. Logits or a last hidden state that are named as
            such come before others; numbers, such as a loss, and everything else are passed over.
        place: Which of the tensors it is, from `Anatomy.state_place`; the first if there are fewer.
    """
    found = main_tensor(output) if place == 0 else None
    if found is None:
        states = [tensor for tensor in tensors_in(output) if is_state(tensor)]
        found = states[place if place < len(states) else 0] if states else None
    if found is None:
        raise AnatomyError(f"Expected a module that returns a state or logits; got {_described(output)}.")
    return found


def _described(output: Any) -> str:
    if isinstance(output, Tensor):
        return f"a tensor of {str(output.dtype).removeprefix('torch.')} of shape {tuple(output.shape)}"
    return type(output).__name__


def replace_state(output: Any, old: Tensor, new: Tensor) -> Any:
    """Arguments or results of a module with a different hidden state."""
    return map_tensors(lambda tensor: new if tensor is old else tensor, output)


def is_plain(value: Any) -> bool:
    """Whether an argument consists of tensors and plain values, without an object that a call may change (a cache)."""
    plain = (Tensor, int, float, str, slice, torch.dtype, torch.device, type, NoneType)
    if type(value) is tuple or type(value) is list:
        return all(map(is_plain, value))
    return isinstance(value, plain) or all([isinstance(leaf, plain) for leaf in tree_leaves(value)])
