"""Errors of the user's model itself: it cannot run on this input, or has no values to run with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.fx import GraphModule
from torch.jit import ScriptModule

from tensorlens.errors import InputError, TensorLensError
from tensorlens.memory import is_out_of_memory


@contextmanager
def own_errors(model: nn.Module, arguments: Mapping[str, Any]) -> Iterator[None]:
    """What the model raises in a plain pass, as an `InputError` that says so and shows what it was given."""
    try:
        yield
    except (TensorLensError, MemoryError):
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        given = ", ".join(f"`{name}` {_described(value)}" for name, value in arguments.items())
        raise InputError(
            f"`{type(model).__name__}` itself cannot run on this input: {type(error).__name__}: {error}. It was called "
            f"with {given or 'nothing'}; pass what its forward takes (token ids are whole numbers)."
        ) from error


def _described(value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"({type(value).__name__})"
    return f"({str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)})"


def refuse_traced(model: nn.Module) -> None:
    """A model that torch has traced runs as one graph: none of its modules is called any more."""
    called = [n.target for n in model.graph.nodes if n.op == "call_module"] if isinstance(model, GraphModule) else []
    has_weights = any(list(model.get_submodule(str(path)).parameters()) for path in called)
    is_flat = isinstance(model, GraphModule) and not has_weights  # an exported one still calls its guards
    if is_flat or isinstance(model, ScriptModule):
        how = "exported or traced by `torch.fx`" if is_flat else "scripted or traced by `torch.jit`"
        raise InputError(
            f"`{type(model).__name__}` was {how}, so that it runs as one graph in which no block is called as a "
            "module. Expected a model whose blocks are modules; pass the one that it was made from."
        )


def refuse_without_values(model: nn.Module) -> None:
    """A model on the meta device has shapes alone; weights that a hook brings when they are needed are another case."""
    if any(hasattr(module, "_hf_hook") for module in model.modules()):
        return
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        if value.is_meta:
            raise InputError(
                f"`{name}` of `{type(model).__name__}` is on the meta device, where tensors have no values. Expected a "
                "model with its weights; load them, or move it by `to_empty` and fill it, before looking through it."
            )
