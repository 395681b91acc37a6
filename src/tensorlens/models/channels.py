"""Which axis of a state holds its channels, by the weights that read or wrote it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from tensorlens.models.evidence import Evidence, ModuleCall, Seen

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_CHANNELS_SECOND = (nn.modules.batchnorm._NormBase, nn.GroupNorm)


def reading_axis(state: Seen, calls: Iterable[ModuleCall], evidence: Evidence) -> int | None:
    """The channel axis of a state by the first weights among `calls` that read it; None if none tells."""
    readers = [
        call
        for call in calls
        if not call.children and call.taken and evidence.reaches({state.node}, call.taken[0].node, since=state.node)
    ]
    return _first_axis(state, [(call.taken[0].shape, *_weights_of(call.module, "in")) for call in readers])


def writing_axis(state: Seen, calls: Iterable[ModuleCall]) -> int | None:
    """The channel axis of a state by the last weights among `calls` that wrote it; None if none tells."""
    writers = reversed([call for call in calls if not call.children and call.given])
    return _first_axis(state, [(call.given[0].shape, *_weights_of(call.module, "out")) for call in writers])


def _first_axis(state: Seen, witnesses: list[tuple[tuple[int, ...], int | None, int | None]]) -> int | None:
    """The axis by the first witness that saw the state as it is, or else by the first with a number that fits."""
    shape = state.shape
    for other, n_channels, axis in witnesses:
        if axis is not None and shape == other and -len(shape) <= axis < len(shape) and shape[axis] == n_channels:
            return axis % len(shape)
    batch = next((i for i in (0, 1) if shape[i] == 1), None)
    for _, n_channels, _ in witnesses:
        fitting = [i for i, size in enumerate(shape) if size == n_channels and i != batch]
        if len(fitting) == 1:
            return fitting[0]
    return None


def _weights_of(module: Any, side: str) -> tuple[int | None, int | None]:
    """How many channels a module reads or writes, and at which axis of its own input or output, as far as known."""
    if isinstance(module, _CONVOLUTIONS):
        return getattr(module, f"{side}_channels"), 1 - module.weight.dim()
    if isinstance(getattr(module, f"{side}_features", None), int):
        return getattr(module, f"{side}_features"), -1
    if isinstance(module, _CHANNELS_SECOND):
        return int(getattr(module, "num_features", None) or module.num_channels), 1  # type: ignore[arg-type]
    weights = list(module.parameters(recurse=False))
    if not weights or any(weight.dim() != 1 for weight in weights):
        return None, None
    # A subclass of the norms may put its channels elsewhere, and an own norm says nothing of where they are.
    return weights[0].numel(), -1 if type(module) in (nn.LayerNorm, nn.RMSNorm) else None
