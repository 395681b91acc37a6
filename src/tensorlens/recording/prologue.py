"""The part of a model between its first state and the first block.

A skip from the embedding (`skip = x.clone()`, added back after the last block) is a function of $X^0$ like everything
else, but it is computed before the state enters the first block and becomes live. The torch functions before that
are therefore noted, and those that took the state are run again once it is live.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tensorlens.recording.live import SIMPLE, Live, found_in, is_live, raw
from tensorlens.recording.table import DESCRIBES, name_of

if TYPE_CHECKING:
    from tensorlens.recording.tape import Tape

NOTED = (Tensor, tuple, list)
"""Types of results that are noted."""

SAME = frozenset(["clone", "contiguous", "detach", "to", "dropout", "alias"])
"""Functions that may return the numbers they take, so that the argument is the state as well as the result."""


class Prologue(TorchFunctionMode):
    """Notes the functions that run before the first block, so that they can be repeated."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []
        self._is_noting = False

    def start(self) -> None:
        """Start noting. Not a `with` block, because it ends in the middle of the model's own code."""
        self.__enter__()
        self._is_noting = True

    def pause(self) -> None:
        """Stop noting, and keep the notes: the code that follows is the library's, not the model's."""
        if self._is_noting:
            self._is_noting = False
            self.__exit__(None, None, None)

    def stop(self) -> None:
        """Stop noting."""
        self.pause()
        self._calls.clear()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if isinstance(result, NOTED):
            self._calls.append((func, args, kwargs, result))
        return result

    def repeat(self, run: Tape) -> None:
        """Run the noted functions whose arguments are live by now again, and stop noting."""
        calls = list(self._calls)
        self.stop()
        for function, args, _, result in reversed(calls):  # the state may be a copy of what others read
            is_same = type(result) is Live and name_of(function) in SAME and type(args[0]) is Tensor
            if is_same and _equal(result, args[0]):
                run.writes.borrow(args[0], run.slot_of(result))
        for function, args, kwargs, result in calls:
            if not kwargs and SIMPLE.issuperset(map(type, args)):
                continue  # the usual case: made only of positions and masks
            if not found_in(args, kwargs) or found_in(result):
                continue
            if (name := name_of(function)).endswith("_") or name in DESCRIBES:
                continue
            again = function(*args, **kwargs)
            for old, new in zip(_parts(result), _parts(again), strict=False):
                if is_live(new) and type(old) is Tensor and _equal(new, old):
                    run.writes.borrow(old, run.slot_of(new))


def _parts(result: Any) -> list[Any]:
    return list(result) if isinstance(result, (tuple, list)) else [result]


def _equal(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same numbers; False if one was written to in between."""
    return a.shape == b.shape and a.dtype == b.dtype and bool(raw(torch.allclose, a, b, equal_nan=True))
