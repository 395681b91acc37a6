"""What a model makes of its first state before the first block runs.

A skip from the embedding (`skip = x.clone()`, added back after the last block) is a function of $X^0$ like everything
else, but it is computed before the state enters the first block, where the operator's input is put in its place. So the
torch functions before that are noted, and those that took the state are run again on the live one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from tensorlens.freezing.rules.linear import describe
from tensorlens.freezing.rules.table import find_rule, name_of


class Prologue(TorchFunctionMode):
    """Notes the functions that run before the first block, until they are repeated."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Tensor]] = []
        self._is_noting = False

    def start(self) -> None:
        """Begin to note. By hand and not in a `with`, because it ends in the middle of the model's own code."""
        self.__enter__()
        self._is_noting = True

    def pause(self) -> None:
        """Note nothing more, and keep what was noted: what follows is the library's own and not the model's."""
        if self._is_noting:
            self._is_noting = False
            self.__exit__(None, None, None)

    def stop(self) -> None:
        """Note nothing more."""
        self.pause()
        self._calls.clear()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.is_floating_point():
            self._calls.append((func, args, kwargs or {}, result))
        return result

    def repeat(self, state: Tensor, live: Tensor, remember: Callable[[Tensor, Tensor], None]) -> None:
        """Run again what was made of `state`, now of `live`, and note nothing more."""
        calls = list(self._calls)
        self.stop()
        made: dict[int, Any] = {id(state): live}
        for function, args, kwargs, result in calls:
            if id(result) in made or find_rule(name_of(function)) is describe:
                continue
            values = (*args, *kwargs.values())
            if not any(isinstance(value, Tensor) and id(value) in made for value in values):
                continue
            again = function(
                *(made.get(id(value), value) for value in args),
                **{key: made.get(id(value), value) for key, value in kwargs.items()},
            )
            if isinstance(again, Tensor):
                made[id(result)] = again
                remember(result, again)
