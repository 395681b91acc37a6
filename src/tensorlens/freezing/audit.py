"""The audit of a first recording: no live value may leave unseen.

Rules see torch functions called from Python. A scripted function, `torch.vmap`, `torch.tensor(x)`, a compiled helper or
a view that was made before its base became live go past them, and what they give would be taken for a constant. Below
the rules every kernel passes torch's dispatcher, whoever called it: here each one that reads the memory of a live
tensor and that no rule asked for is a leak, and is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from tensorlens.errors import NotLinearError
from tensorlens.freezing.traced import raw, traced_in
from tensorlens.models.evidence import tensors_in
from tensorlens.models.fingerprint import Fingerprint
from tensorlens.models.module_tree import named_modules


class LeakAudit(TorchDispatchMode):
    """Refuses kernels that read live memory outside of any rule.

    Costs some microseconds a kernel, so that each way through a model in one state is audited once.

    Args:
        where: Says in which module the pass is.
    """

    def __init__(self, where: Callable[[], str]) -> None:
        super().__init__()
        self._where, self._depth = where, 0
        # By address of the memory, which other storages may look at (DLPack); a dead reference says it was given away.
        self._live: dict[int, StorageWeakRef] = {}
        self.leak: str | None = None

    @contextmanager
    def explained(self) -> Iterator[None]:
        """While a rule, an adapter or the library itself is at work."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def note_live(self, result: Any) -> None:
        """What a rule gave: from now on only rules may read it."""
        for tensor in traced_in(result):
            if tensor.live:
                storage = _storage(tensor)
                if storage is not None and not self._is_live(storage):
                    self._live[storage.data_ptr()] = StorageWeakRef(storage)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A view reads nothing yet, and what is made of it is seen by its memory.
        if self._depth == 0 and self.leak is None and not func.is_view and self._reads_live(args, kwargs):
            self.leak = (
                f"`{func}` in {self._where()} read a live tensor without passing through torch's Python functions: "
                "a scripted or compiled function, `torch.vmap`, `torch.tensor(x)`, or a view made before its base was "
                "written to. What it gave would be lost to the operator. Expected plain torch functions; write the "
                "step with those, or register an adapter for the module's class with `tensorlens.adapter`."
            )
            raise NotLinearError(self.leak)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def _reads_live(self, args: Any, kwargs: Any) -> bool:
        storages = map(_storage, tensors_in((args, kwargs)))
        return any(storage is not None and self._is_live(storage) for storage in storages)

    def _is_live(self, storage: Any) -> bool:
        known = self._live.get(storage.data_ptr())
        return known is not None and not known.expired()


def _storage(tensor: Tensor) -> Any:
    try:
        storage = raw(Tensor.untyped_storage, tensor)
        return storage if storage.data_ptr() else None  # nothing lies in it
    except (RuntimeError, NotImplementedError):  # sparse tensors and wrappers have none
        return None


def refuse_custom_nodes(*ends: Tensor | None) -> None:
    """Raise for a derivative that no rule has seen, anywhere in the graph of a recording."""
    waiting = [end.grad_fn for end in ends if end is not None]
    seen: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            raise NotLinearError(
                f"The custom autograd function `{type(node).__name__}` brings a derivative of its own, which no rule "
                "has seen. Switch to the model's plain implementation, or register an adapter for the module's class "
                "with `tensorlens.adapter`."
            )
        waiting += [parent for parent, _ in node.next_functions]


def refuse_scripts(model: nn.Module) -> None:
    """Raise for a model with a part that `torch.jit` made."""
    for path, module in named_modules(model).items():
        if isinstance(module, torch.jit.ScriptModule):
            raise NotLinearError(
                f"`{path or 'the model'}` is scripted or traced by `torch.jit`, so that no rule sees what it does. "
                "Give the lens the module that it was made from."
            )


Sizes = tuple[int, ...]

_audited: dict[Hashable, dict[int, tuple[Sizes, Sizes]]] = {}
"""By state of a model, rules and kind of input: the ways that were audited, each with the smallest and largest sizes of
inputs that took it. The newest state last."""

_apart: dict[Hashable, bool] = {}
"""By the same: whether the first block was seen to take something else than the embeddings."""

_left_traces: dict[Hashable, bool] = {}
"""By the same: whether a pass has changed the model by itself."""

MAX_AUDITED = 64


class AuditLog:
    """What was audited of a model in one state, by rules and on inputs of one kind.

    A way is the signature of a recording. Code may branch by length, so that a way is known only for sizes between
    those that were audited. A model whose weights come and go is not audited: it has no state to note.
    """

    def __init__(self, state: Fingerprint | None, rules: Hashable, inputs: dict[str, Any]) -> None:
        tensors = {name: value for name, value in sorted(inputs.items()) if isinstance(value, Tensor)}
        others = tuple((name, repr(value)) for name, value in sorted(inputs.items()) if name not in tensors)
        kinds = tuple((name, value.dtype, tuple(n == 1 for n in value.shape)) for name, value in tensors.items())
        self._key = None if state is None else (state, rules, kinds, others)
        self._sizes = tuple(n for value in tensors.values() for n in value.shape)

    @property
    def is_due(self) -> bool:
        """Whether no way is known for inputs of these sizes."""
        return self._key is not None and not any(map(self.has_seen, _audited.get(self._key, ())))

    def has_seen(self, way: int) -> bool:
        """Whether recordings that went this way were audited, at sizes around these."""
        if self._key is None:
            return True
        least, most = _audited.get(self._key, {}).get(way, ((), ()))
        return bool(least) and all(low <= n <= high for low, n, high in zip(least, self._sizes, most, strict=True))

    def knows(self, way: int) -> bool:
        """Whether recordings that went this way were audited, at any sizes."""
        return way in _audited.get(self._key, ())

    @property
    def is_apart(self) -> bool:
        """Whether the first block was seen to take something else than the embeddings."""
        return _apart.get(self._key, False)

    @property
    def leaves_no_trace(self) -> bool:
        """Whether every audited pass left the model as it was found."""
        return not _left_traces.get(self._key, True)

    def note(self, way: int, *, is_apart: bool, left_trace: bool) -> None:
        """An audited recording came to its end."""
        if self._key is not None:
            _apart[self._key] = is_apart
            _left_traces[self._key] = left_trace or _left_traces.get(self._key, False)
            ways = _audited.setdefault(self._key, {})
            least, most = ways.get(way, (self._sizes, self._sizes))
            ways[way] = tuple(map(min, least, self._sizes)), tuple(map(max, most, self._sizes))
        while len(_audited) > MAX_AUDITED:
            oldest = next(iter(_audited))
            for noted in (_apart, _left_traces, _audited):
                noted.pop(oldest, None)
