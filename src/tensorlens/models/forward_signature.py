"""What a model's signature, config and own methods say about its inputs and parts."""

from __future__ import annotations

import inspect
from collections.abc import KeysView, Mapping
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from tensorlens.errors import InputError

WHAT_IS_NEEDED = (
    "What is needed: blocks in a list of modules (`nn.ModuleList` or `nn.Sequential`), and a forward that takes "
    "embeddings (batch, token, channel) as `inputs_embeds`, or token ids, and returns states of that shape. "
    "docs/tutorials/your-own-model.md has an example."
)
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class Forward:
    """The arguments of a model's forward.

    Attributes:
        signature: The whole signature.
        names: The arguments that can be passed by name, in order.
        needed: The names of arguments without a default.
        is_open: Whether it accepts any other name too.
    """

    def __init__(self, signature: inspect.Signature) -> None:
        self.signature = signature
        self.names, self.needed, self.is_open = dict[str, inspect.Parameter](), set[str](), False
        for parameter in signature.parameters.values():
            self.is_open |= parameter.kind is parameter.VAR_KEYWORD
            if parameter.kind in _NAMED:
                self.names[parameter.name] = parameter
            if parameter.default is parameter.empty and parameter.kind in (*_NAMED, parameter.POSITIONAL_ONLY):
                self.needed.add(parameter.name if parameter.kind in _NAMED else "/")  # which no name can be


def forward_of(model: nn.Module) -> Forward:
    """The arguments of a model's forward, looked up once per function of a class.

    A wrapper on the instance may show the function of the class, with its `self`.
    """
    if "forward" in vars(model):
        found = inspect.signature(model.forward)
        names = list(found.parameters.values())
        return Forward(found.replace(parameters=names[1:]) if names and names[0].name == "self" else found)
    function = getattr(model.forward, "__func__", None)
    if not inspect.isfunction(function):
        return Forward(inspect.signature(model.forward))
    if function not in _FORWARDS:
        _FORWARDS[function] = Forward(inspect.signature(model.forward))
    return _FORWARDS[function]


_FORWARDS: WeakKeyDictionary[Any, Forward] = WeakKeyDictionary()


def ask(model: nn.Module, method: str) -> Any:
    """The result of a method by which a model names its parts; None if it has no such method."""
    try:
        return getattr(model, method)()
    except (AttributeError, NotImplementedError, TypeError):
        return None


def forward_parameters(model: nn.Module) -> KeysView[str]:
    """Names of the arguments that a model's forward takes."""
    return forward_of(model).names.keys()


def first_parameter(model: nn.Module) -> str:
    """Name of the first argument of a model's forward, or of the forward that it passes its arguments on to."""
    forward = forward_of(model)
    found = next(iter(forward.names), None)
    if found is not None:
        return found
    inside = list(model.children())
    if not forward.is_open:
        raise InputError(
            f"`{type(model).__name__}.forward` takes positional arguments only; the lens calls a model by "
            f"argument names. Pass the inner module to the lens, or let forward take `**kwargs` too."
        )
    if len(inside) == 1:
        return first_parameter(inside[0])
    raise InputError(
        f"`{type(model).__name__}.forward` names no argument. Pass the input as a dictionary of keyword arguments."
    )


def takes_mapping(model: nn.Module) -> bool:
    """Whether the first argument of a model's forward is annotated as a dictionary."""
    parameters = list(forward_of(model).signature.parameters.values())
    annotation = str(parameters[0].annotation).lower() if parameters else ""
    return "dict[" in annotation or "mapping" in annotation or annotation in ("dict", "<class 'dict'>")


def ids_parameter(model: nn.Module) -> str:
    """Name of the argument for token ids: `input_ids`, or the first one, whatever its name."""
    forward = forward_of(model)
    if "input_ids" in forward.names or forward.is_open and not takes_mapping(model) and hasattr(model, "config"):
        return "input_ids"
    if "pixel_values" in forward.names or not any(isinstance(module, nn.Embedding) for module in model.modules()):
        raise InputError(
            f"Got token ids, but `{type(model).__name__}` has no token embedding. Pass what it takes, or "
            "embeddings of shape (token, channel)."
        )
    return first_parameter(model)


def check_arguments(model: nn.Module, arguments: Mapping[str, Any]) -> None:
    """Refuse arguments that a model's forward cannot be called with, before the call."""
    forward, given = forward_of(model), arguments.keys()
    if forward.needed <= given and (forward.is_open or given <= forward.names.keys()):
        return
    try:
        forward.signature.bind(**arguments)
    except TypeError as error:
        raise InputError(
            f"`{type(model).__name__}` cannot be called with these inputs "
            f"({', '.join(arguments) or 'none'}): {error}. Pass a dictionary with all its arguments. {WHAT_IS_NEEDED}"
        ) from error


def constant_arguments(model: nn.Module) -> dict[str, Any]:
    """Constant arguments: no cache, which would cut the influence of earlier tokens; outputs by name."""
    forward = forward_of(model)
    arguments: dict[str, Any] = {"use_cache": False} if "use_cache" in forward.names else {}
    if "return_dict" in forward.names or forward.is_open and hasattr(model, "base_model_prefix"):
        arguments["return_dict"] = True
    return arguments


def token_ids(arguments: Mapping[str, Any]) -> Tensor | None:
    """The token ids of a text, (sample, token), among the arguments of a forward pass or one dictionary deeper."""
    for level in (arguments, *(value for value in arguments.values() if isinstance(value, Mapping))):
        if isinstance(level.get("input_ids"), Tensor):
            return level["input_ids"]
    first = next(iter(arguments.values()), None)
    return first if isinstance(first, Tensor) and first.dim() == 2 and first.dtype == torch.long else None


def is_causal(model: nn.Module) -> bool:
    """Whether transformers says that the model reads from left to right."""
    name = type(model).__name__
    return name in _causal_names() and not name.startswith(("Bert", "Roberta", "Electra"))


@cache
def _causal_names() -> frozenset[str]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return frozenset(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())


def max_tokens(model: nn.Module) -> int | None:
    """The longest input that the model has positions for."""
    config = getattr(model, "config", None)
    limit = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    if limit is None or limit <= 0:
        return None
    # RoBERTa and similar models count positions from the padding index on.
    offset = getattr(config, "pad_token_id", None)
    return limit - (offset + 1) if offset is not None and _positions_are_offset(model) else limit


def _positions_are_offset(model: nn.Module) -> bool:
    return any(
        name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None
        for name, module in model.named_modules()
    )


def vocabulary_size(model: nn.Module) -> int | None:
    """How many token ids there are: entries of the input embedding, or at most those of the largest embedding."""
    named = ask(model, "get_input_embeddings")
    if named is not None:
        return getattr(named, "num_embeddings", None)
    return max((m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)), default=None)


def embedding_width(model: nn.Module) -> int | None:
    """How many channels the input embedding has."""
    return getattr(ask(model, "get_input_embeddings"), "embedding_dim", None)


def begins_with_pixels(model: nn.Module) -> bool:
    """Whether the first weights of a model are those of a convolution over pictures."""
    leaves = (module for module in model.modules() if next(module.children(), None) is None)  # no class token beside
    return isinstance(next((m for m in leaves if next(m.parameters(), None) is not None), None), nn.Conv2d)


def pixel_channels(model: nn.Module) -> list[int]:
    """Numbers of channels that the convolutions of a model read; the first is usually the number of colours."""
    return [module.in_channels for module in model.modules() if isinstance(module, nn.Conv2d)]


def device_of(model: nn.Module) -> torch.device:
    """The device of a model's inputs; off-loaded weights are on none."""
    for module in (ask(model, "get_input_embeddings"), model):
        hook = getattr(module, "_hf_hook", None)
        for part in getattr(hook, "hooks", (hook,)):
            if getattr(part, "execution_device", None) is not None:
                return torch.device(part.execution_device)  # type: ignore[union-attr]
    found = getattr(model, "device", None)
    return found if isinstance(found, torch.device) else next(model.parameters()).device


def dtype_of(model: nn.Module) -> torch.dtype:
    """The floating-point type of a model's weights."""
    found = getattr(model, "dtype", None)
    return found if isinstance(found, torch.dtype) else next(model.parameters()).dtype
