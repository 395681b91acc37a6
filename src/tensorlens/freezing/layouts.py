"""Where the hidden state is in what modules take and give, and how its axes become tokens and channels."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from torch import Tensor, nn

from tensorlens.errors import AnatomyError
from tensorlens.freezing.traced import constant


class Layout(NamedTuple):
    """Which axes of a model's own state count samples, and which are channels; all others count tokens.

    A state is (batch, token, channel) in most models; images are (batch, channel, row, column), some models put the
    batch second, and some carry several streams for each token, which are channels here.
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
        """(batch, token, channel) as the model's own code takes it."""
        if self._is_plain:
            return x
        if self.batch is None and x.shape[0] != 1:
            raise AnatomyError("This model joins samples and tokens: expected one state at a time, got a batch.")
        sizes = [x.shape[0] if axis == self.batch else self.shape[axis] for axis in self._order]
        back = sorted(range(len(self._order)), key=lambda place: self._order[place])
        return x.reshape(sizes).permute(back)


def layout_of(state: Tensor, module: nn.Module | None, n_tokens: int | None, like: Layout | None = None) -> Layout:
    """How the state of one sample is laid out.

    Args:
        state: What enters a block, or leaves the model.
        module: The block, whose weights tell channels first from channels last.
        n_tokens: The number of tokens of a text, where it is known: axes of other sizes are then channels.
        like: The layout of the states before, for a state without a block of its own.
    """
    shape = tuple(state.shape)
    if len(shape) == 2:
        # One vector for the whole input, or a sequence without a batch axis.
        return Layout(shape, 0, (1,)) if shape[0] == 1 else Layout(shape, None, (1,))
    batch = next((axis for axis in (0, 1) if shape[axis] == 1), None)
    last = len(shape) - 1
    if len(shape) == 3:
        return Layout(shape, batch, (last,))
    if n_tokens is not None:
        candidates = [axis for axis in range(len(shape)) if axis != batch and shape[axis] == n_tokens]
        after = [axis for axis in candidates if batch is not None and axis == batch + 1]
        if candidates:
            token = (after or candidates)[0]
            return Layout(shape, batch, tuple(a for a in range(len(shape)) if a not in (batch, token)))
    first = like.channels == (1,) if like is not None and module is None else _channels_first(module, shape)
    return Layout(shape, batch, (1,) if first else (last,))


def _channels_first(module: nn.Module | None, shape: tuple[int, ...]) -> bool:
    """Whether the first layer of a block that fits the state reads axis 1 as channels."""
    for layer in module.modules() if module is not None else ():
        if isinstance(layer, (nn.Conv2d, nn.Conv3d, nn.BatchNorm2d)):
            return True
        if isinstance(layer, (nn.Linear, nn.LayerNorm)):
            return False
    return True


# In what modules take and give ---------------------------------------------------------------------------------------


def find_state(args: tuple[Any, ...], kwargs: dict[str, Any], module: str = "") -> Tensor:
    """The hidden state among a block's arguments: `hidden_states`, or the first tensor of floats."""
    candidates = [kwargs["hidden_states"]] if "hidden_states" in kwargs else [*args, *kwargs.values()]
    for value in candidates:
        if isinstance(value, Tensor) and value.is_floating_point() and value.dim() >= 2:
            return value
    raise AnatomyError(
        f"`{module}` was called without a hidden state. Pass the path of the right list of blocks as `blocks=`."
    )


def put_state(args: tuple[Any, ...], kwargs: dict[str, Any], state: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same arguments with another hidden state."""
    old = find_state(args, kwargs)
    return (
        tuple(state if value is old else value for value in args),
        {name: state if value is old else value for name, value in kwargs.items()},
    )


def first_tensor(output: Any) -> Tensor:
    """The first tensor in what a module returned."""
    if isinstance(output, Tensor):
        return output
    values = list(output.values()) if isinstance(output, dict) else output
    if not isinstance(values, (tuple, list)) or not values:
        raise AnatomyError(f"Expected a module that returns tensors; got {type(output).__name__}.")
    return first_tensor(values[0])


def state_of(output: Any, *names: str) -> Tensor:
    """The hidden state, or failing that the logits, in what a model returned; or what has the first of `names`."""
    for name in names or ("last_hidden_state", "logits"):
        if getattr(output, name, None) is not None:
            return getattr(output, name)
    return first_tensor(output)


def replace_state(output: Any, old: Tensor, new: Tensor) -> Any:
    """What a module returned, with another hidden state in it."""
    if output is old:
        return new
    if isinstance(output, dict):
        items = {name: replace_state(value, old, new) for name, value in output.items()}
        return type(output)(**items) if hasattr(output, "to_tuple") else items
    return (
        type(output)(replace_state(part, old, new) for part in output) if isinstance(output, (tuple, list)) else output
    )


def constants(output: Any) -> Any:
    """What a module returned, values alone."""
    if isinstance(output, (tuple, list)):
        parts = [constants(part) for part in output]
        return type(output)(*parts) if hasattr(output, "_fields") else type(output)(parts)
    if isinstance(output, dict):
        items = {name: constants(value) for name, value in output.items()}
        return type(output)(**items) if hasattr(output, "to_tuple") else items
    return constant(output) if isinstance(output, Tensor) else output
