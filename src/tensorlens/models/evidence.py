"""`watch`: one plain pass of a model, and the evidence it gives.

Module calls are seen by hooks, the flow of values between them by a dispatch mode: every tensor that an operation makes
is a node, whose parents are the nodes it was made from. Only node numbers are kept, no tensors.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from tensorlens.models.layouts import is_state, main_tensor
from tensorlens.models.runner import Call, module_tree, own_errors, refuse_without_values, running
from tensorlens.trees import map_tensors, tensors_in

BLOCK_LISTS = (nn.ModuleList, nn.Sequential)
"""Lists whose order is that of their blocks: only such a list can be named, or guessed, as the list of blocks."""
CONTAINERS = (*BLOCK_LISTS, nn.ModuleDict)
"""Containers of modules. A pass shows the order in which a dictionary of modules is called."""

MOVES = frozenset({"clone", "_to_copy", "index", "index_select", "gather", "alias", "detach", "constant_pad_nd"})
"""Operations whose output holds values of their first input in new memory. Views share storage and need no entry."""

ENDS = frozenset({"_softmax", "_log_softmax", "sigmoid", "log_sigmoid_forward", "argmax"})
"""Operations that may turn logits into probabilities or a choice at the end of a model."""


@dataclass(frozen=True, slots=True)
class Seen:
    """The trace of a tensor.

    Attributes:
        shape: Its sizes.
        dtype: Its type.
        node: Its place in the flow of values.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    node: int


@dataclass(slots=True)
class ModuleCall:
    """One call of a module.

    Attributes:
        number: The index among all calls, ordered by their start; that of the whole model is 0.
        path: The module's path in the model.
        module: The module.
        parent: The call that it was part of, None for the whole model.
        start: Number of nodes before it began.
        stop: Number of nodes when it ended.
        taken: The floating-point tensors of two axes or more among its arguments, in order.
        given: The same among its results.
        children: The calls that were part of it.
        place: The index, among its tensors, of the one that is first in `taken`: its state.
        sizes: The norms of the tensors that it took.
    """

    number: int
    path: str
    module: nn.Module
    parent: ModuleCall | None
    start: int
    stop: int = 0
    taken: tuple[Seen, ...] = ()
    given: tuple[Seen, ...] = ()
    children: list[ModuleCall] = field(default_factory=list)
    place: int = 0
    sizes: tuple[Tensor, ...] = ()

    @property
    def state(self) -> Seen:
        """The state that a block takes."""
        return self.taken[0]

    @property
    def gave(self) -> set[int]:
        """The nodes of its results."""
        return {seen.node for seen in self.given}

    def walk(self) -> Iterator[ModuleCall]:
        """This call and all that were part of it, in order."""
        yield self
        for child in self.children:
            yield from child.walk()

    def holders(self) -> Iterator[ModuleCall]:
        """The calls that this one was part of, innermost first."""
        call = self.parent
        while call is not None:
            yield call
            call = call.parent


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """The evidence of one plain pass.

    Attributes:
        calls: Every module call, ordered by start.
        parents: For each node the nodes that it was made from.
        origins: For each node the node that first held its values; views and copies have that of their source.
        ends: For nodes that a softmax or its like made, the node it took.
        output: The model's result: its logits or its state.
        n_inputs: Number of nodes, the first ones, that are tensors the model was called with.
    """

    calls: tuple[ModuleCall, ...]
    parents: tuple[tuple[int, ...], ...]
    origins: tuple[int, ...]
    ends: Mapping[int, int]
    output: Seen | None
    n_inputs: int = 0

    @property
    def root(self) -> ModuleCall:
        """The call of the whole model."""
        return self.calls[0]

    def before(self, targets: Iterable[int], past: Container[int] = (), since: int = 0) -> set[int]:
        """The nodes from which values reach `targets` along a path that avoids `past`: a cut of the graph.

        Args:
            targets: Where paths end; part of the result.
            past: Nodes that paths may not go through, begin at or end at.
            since: Nodes before this one are not followed further back, but a path may begin at one.
        """
        todo, met = list(targets), set[int]()
        while todo:
            node = todo.pop()
            if node not in met and node not in past:
                met.add(node)
                if node >= since:
                    todo += self.parents[node]
        return met

    def after(self, sources: Iterable[int]) -> set[int]:
        """`sources` and the nodes that their values reach, parents before children."""
        met = set(sources)
        for node, parents in enumerate(self.parents):
            if not met.isdisjoint(parents):
                met.add(node)
        return met

    def reaches(self, sources: Iterable[int], target: int, *, past: Container[int] = (), since: int = 0) -> bool:
        """Whether values of `sources` reach `target`; the rest as for `before`."""
        return not self.before((target,), past, since).isdisjoint(sources)

    def is_read(self, seen: Seen, call: ModuleCall) -> bool:
        """Whether a call takes something made from an earlier tensor."""
        return any(self.reaches({seen.node}, taken.node, since=seen.node) for taken in call.taken)

    def list_of(self, call: ModuleCall) -> str | None:
        """The path of the list of modules in which a call's module stands, if it does."""
        path, _, name = call.path.rpartition(".")
        return path if name and isinstance(self.root.module.get_submodule(path), CONTAINERS) else None

    def roots(self, node: int) -> set[int]:
        """The inputs of the pass from which `node` was made: nodes without parents."""
        return {source for source in self.before((node,)) if not self.parents[source]}

    def is_same(self, a: int, b: int) -> bool:
        """Whether one node holds values of the other, viewed, copied or chosen from."""
        return self.origins[a] == self.origins[b]


def watch(model: nn.Module, arguments: Mapping[str, Any], methods_of: Sequence[nn.Module] = ()) -> Evidence:
    """Run the model once as it is and note which modules were called and what flowed between them.

    Args:
        model: Any module; left as it was.
        arguments: Keyword arguments of its forward.
        methods_of: Modules whose methods count as calls too.
    """
    refuse_without_values(model)
    flow = _Flow()
    calls = _Calls(model, flow, methods_of)
    with own_errors(model, arguments), running(model, observer=calls.at, methods_of=methods_of), flow:
        arguments = map_tensors(lambda tensor: tensor, arguments)  # a model may write into dictionaries it is given
        for tensor in tensors_in(arguments):
            flow.see(tensor)
        n_inputs = len(flow.parents)
        output = model(**arguments)
    found = main_tensor(output)
    found = next(tensors_in(output), None) if found is None else found
    return Evidence(
        calls=tuple(calls.made),
        parents=tuple(flow.parents),
        origins=tuple(flow.origins),
        ends=dict(flow.ends),
        output=None if found is None else flow.see(found),
        n_inputs=n_inputs,
    )


def _size(tensor: Tensor) -> Tensor:
    """A norm, on the tensor's own device: nothing waits for it."""
    with torch._C._DisableTorchDispatch():  # not part of the flow
        return torch.linalg.vector_norm(tensor.detach(), dtype=torch.promote_types(tensor.dtype, torch.float32))


class _Flow(TorchDispatchMode):
    """Which tensor was made from which, by the identity of their storage."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.parents: list[tuple[int, ...]] = []
        self.origins: list[int] = []
        self.ends: dict[int, int] = {}
        self._nodes: dict[int, int] = {}
        self._storages: list[StorageWeakRef] = []  # kept alive, so that no address is used twice

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and note its results."""
        result = func(*args, **(kwargs or {}))
        sources = [node for node in map(self._find, tensors_in((args, kwargs))) if node is not None]
        if sources:
            is_one = isinstance(func, OpOverload)  # not an operator that takes functions, such as flex attention
            name = func._schema.name.split("::")[-1] if is_one else ""
            for tensor in tensors_in(result):
                if not (is_one and func.is_view and self._find(tensor) is not None):
                    self._note(tensor, name, sources)
        return result

    def _note(self, tensor: Tensor, name: str, sources: list[int]) -> None:
        node = self._new(tensor, tuple(dict.fromkeys(sources)))
        if node is not None and name in MOVES:
            self.origins[node] = self.origins[sources[0]]
        if node is not None and name in ENDS:
            self.ends[node] = sources[0]

    def see(self, tensor: Tensor, sources: tuple[int, ...] = ()) -> Seen:
        """The trace of a module's argument or result; an unknown tensor was made from `sources` by unseen code."""
        node = self._find(tensor)
        node = self._new(tensor, sources) if node is None else node
        return Seen(tuple(tensor.shape), tensor.dtype, -1 if node is None else node)

    def _find(self, tensor: Tensor) -> int | None:
        try:
            return self._nodes.get(tensor.untyped_storage()._cdata)
        except (RuntimeError, NotImplementedError):  # sparse and nested tensors have no storage
            return None

    def _new(self, tensor: Tensor, sources: tuple[int, ...]) -> int | None:
        try:
            storage = tensor.untyped_storage()
        except (RuntimeError, NotImplementedError):
            return None
        node = len(self.parents)
        if storage._cdata not in self._nodes:
            self._storages.append(StorageWeakRef(storage))
        self._nodes[storage._cdata] = node
        self.parents.append(sources)
        self.origins.append(node)
        return node


class _Calls:
    """The module calls of one pass in this thread."""

    def __init__(self, model: nn.Module, flow: _Flow, methods_of: Sequence[nn.Module]) -> None:
        self._paths = {id(module): path for path, module in module_tree(model).items()}
        self._flow = flow
        self._by_methods = set(map(id, methods_of))
        self.made: list[ModuleCall] = []
        self._open: list[ModuleCall] = []

    def at(self, module: nn.Module, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a module and note its arguments and results; an observer, see `observing`."""
        path = self._paths.get(id(module))
        is_within = id(module) in self._by_methods and any(one.module is module for one in self._open)
        if path is None or is_within:  # a method that another method calls is part of that call
            return call(module, *args, **kwargs)
        parent = self._open[-1] if self._open else None
        made = ModuleCall(len(self.made), path, module, parent, len(self._flow.parents))
        made.taken = self._taken(args, kwargs)
        made.sizes = tuple(map(_size, filter(is_state, tensors_in((args, kwargs)))))
        self.made.append(made)
        if parent is not None:
            parent.children.append(made)
        self._open.append(made)
        try:
            output = call(module, *args, **kwargs)
        finally:
            self._open.pop()
        found = main_tensor(output)
        sources = tuple(seen.node for seen in made.taken)
        others = [tensor for tensor in tensors_in(output) if is_state(tensor) and tensor is not found]
        given = ([] if found is None else [found]) + others
        made.given = tuple(self._flow.see(tensor, sources) for tensor in given if is_state(tensor))
        made.stop = len(self._flow.parents)
        return output

    def _taken(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Seen, ...]:
        taken, named = self._seen(args), self._seen(kwargs)
        return named + taken if "hidden_states" in kwargs or not taken else taken + named

    def _seen(self, values: Any) -> tuple[Seen, ...]:
        return tuple(self._flow.see(tensor) for tensor in tensors_in(values) if is_state(tensor))
