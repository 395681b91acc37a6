"""The weights of a model as they were when it was recorded."""

from __future__ import annotations

from torch import nn

from tensorlens.errors import InputError
from tensorlens.recording.module_paths import ModulePlaces


class Weights:
    """Which memory the weights of a model were in, and how often it had been written to.

    Args:
        places: Where the parts of the model are.
    """

    def __init__(self, places: ModulePlaces) -> None:
        self._model, self._then = places.model, _memory(places)

    def check(self, what: str) -> None:
        """Refuse a question that runs the model again where its weights are others now.

        Args:
            what: The question.

        Raises:
            InputError: says which weight.
        """
        now = _memory(ModulePlaces(self._model))
        changed = next((name for name in {**self._then, **now} if now.get(name) != self._then.get(name)), None)
        if changed is not None:
            raise InputError(
                f"`{changed}` was modified or replaced after this input was recorded. {what} needs the model as it "
                "was: ask the lens for the input again."
            )


def _memory(places: ModulePlaces) -> dict[str, tuple[int, int]]:
    where = places.addresses
    return {
        name: (where[name], 0 if one.is_inference() else one._version)
        for name, one in places.weights.items()
        if isinstance(one, nn.Parameter)
    }
