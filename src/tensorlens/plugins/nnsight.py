"""nnsight: a wrapped model as a model, and the inputs of a trace as an input."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tensorlens.errors import InputError
from tensorlens.lens import Lens
from tensorlens.models.inputs import forward_of
from tensorlens.recording.conventions import Rules


def nnsight_lens(model: Any, *, rules: Rules | str | None = None) -> Lens:
    """A lens on the model that nnsight wraps; its weights are loaded if they are not there yet.

    Args:
        model: An `nnsight.NNsight`, such as a `TransformersModel`.
        rules: The conventions, as for `Lens`.
    """
    if hasattr(model, "dispatched") and not model.dispatched:
        model.dispatch()
    return Lens(model._module, getattr(model, "tokenizer", None), rules=rules)


def traced_input(model: Any, inputs: Any) -> dict[str, Any]:
    """The input for a lens, from the ``model.inputs`` saved in a trace: positional and keyword arguments.

    Args:
        model: The model that was traced.
        inputs: ``model.inputs.save()``.

    Raises:
        InputError: The inputs are not those of a trace.
    """
    if not isinstance(inputs, tuple) or len(inputs) != 2 or not isinstance(inputs[1], Mapping):
        raise InputError(
            f"Expected `model.inputs` as saved in a trace, a pair of arguments; got {type(inputs).__name__}."
        )
    names = forward_of(model._module).names
    return dict(zip(names, inputs[0], strict=False)) | dict(inputs[1])
