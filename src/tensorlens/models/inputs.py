"""From whatever a user passes to a lens to the model's arguments.

Text, token ids, images, embeddings and the output of a tokenizer or processor all become a `ModelInput`: the keyword
arguments of one forward pass on one sample, and what is known about its tokens. Which arguments a model takes is read
from its signature, its config and its own methods.
"""

from __future__ import annotations

import inspect
from collections.abc import KeysView, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeGuard
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from tensorlens.errors import InputError
from tensorlens.models.pictures import Box, SeenPicture, check_pixels, is_picture, open_picture
from tensorlens.models.texts import (
    Offsets,
    check_unicode,
    names_image,
    patch_labels,
    token_labels,
    tokenised,
    tokenizer_of,
    with_patches,
)


@dataclass(frozen=True, kw_only=True)
class ModelInput:
    """One sample, ready for a forward pass.

    Attributes:
        arguments: Keyword arguments of the model's forward, by its own names, with a batch axis of 1.
        kind: Its kind: ``text``, ``ids``, ``embeddings``, ``image``, ``values`` or ``processed``.
        text: The text, if there was one.
        offsets: The place of each token in the text; None if the tokenizer does not report it.
        picture: The picture, if there was one.
        ids: The token ids as plain numbers, if known: reading them from a GPU waits for all its work.
    """

    arguments: dict[str, Any]
    kind: str
    text: str | None = None
    offsets: Offsets | None = None
    picture: SeenPicture | None = field(default=None, repr=False)
    ids: tuple[int, ...] | None = field(default=None, repr=False)

    def labels(self, n_tokens: int, model: nn.Module, processor: Any) -> tuple[str, ...]:
        """A label for each of the `n_tokens` tokens that entered the first block."""
        ids = token_ids(self.arguments)
        decoder_ids = self.arguments.get("decoder_input_ids")
        if decoder_ids is not None and n_tokens > decoder_ids.shape[-1]:
            n_encoder = n_tokens - decoder_ids.shape[-1]
            of_encoder = replace(self, arguments={k: v for k, v in self.arguments.items() if k != "decoder_input_ids"})
            return (*of_encoder.labels(n_encoder, model, processor), *_id_labels(decoder_ids[0].tolist(), processor))
        if ids is not None and ids.shape[-1] == n_tokens:
            return with_patches(_id_labels(self.ids or ids[0].tolist(), processor), self.image_positions(model))
        grid = self.grid(model)
        if grid is not None and grid[0] * grid[1] <= n_tokens:
            return patch_labels(n_tokens, *grid, special=_special_patches(model))
        return tuple(str(position) for position in range(n_tokens))

    def image_positions(self, model: nn.Module) -> list[int]:
        """Positions of image patches among the tokens of a vision–language model."""
        if self.kind in ("text", "ids"):
            return []
        config = getattr(model, "config", None)
        token = getattr(config, "image_token_id", None) or getattr(config, "image_token_index", None)
        ids = self.arguments.get("input_ids")
        return [] if token is None or ids is None else (ids[0] == token).nonzero()[:, 0].tolist()

    def grid(self, model: nn.Module) -> tuple[int, int] | None:
        """Rows and columns of patches, for an image."""
        pixels, patch = self.arguments.get("pixel_values"), _patch_size(model)
        if pixels is None or pixels.dim() != 4 or patch is None:
            return None
        return pixels.shape[-2] // patch[0], pixels.shape[-1] // patch[1]

    def seen(self, model: nn.Module) -> Box | None:
        """The part of the picture that the patches cover together; None if it is not known."""
        grid, patch, part = self.grid(model), _patch_size(model), self.picture and self.picture.part
        if grid is None or patch is None or part is None:
            return None
        height, width = self.arguments["pixel_values"].shape[-2:]  # pixels beyond the last whole patch are not read
        left, top, right, bottom = part
        across, down = grid[1] * patch[1] / width, grid[0] * patch[0] / height
        return left, top, left + (right - left) * across, top + (bottom - top) * down


def _patch_size(model: nn.Module) -> tuple[int, int] | None:
    """Height and width of a patch in pixels."""
    patch = getattr(getattr(model, "config", None), "patch_size", None)
    return None if patch is None else (patch, patch) if isinstance(patch, int) else tuple(patch)[-2:]


def make_input(value: Any, model: nn.Module, processor: Any = None) -> ModelInput:
    """Make a `ModelInput` from anything a user may pass.

    Args:
        value: A text, token ids, an image (PIL, path or pixel array), embeddings (L, D), or a processor's output.
        model: The model it is for.
        processor: Tokenizer or image processor.
    """
    made = _make_input(value, model, processor)
    start = _decoder_start(made.arguments, model)
    return replace(made, arguments=made.arguments | start) if start else made


def _make_input(value: Any, model: nn.Module, processor: Any) -> ModelInput:
    if isinstance(value, Mapping):
        return _from_mapping(value, model)
    if isinstance(value, (str, Path)) and names_image(str(value)):
        return _from_image(open_picture(Path(value)), model, processor)
    if isinstance(value, str):
        return _from_text(value, model, processor)
    if isinstance(value, np.ndarray) and _is_bytes_of_picture(value) and "pixel_values" in forward_parameters(model):
        from PIL import Image

        return _from_image(Image.fromarray(value), model, processor)
    if isinstance(value, (Tensor, np.ndarray)):
        return _from_array(_checked(as_tensor(value, "input"), "input"), model)
    if _is_ids(value):
        return _from_ids(_as_ids(value), model)
    if is_picture(value):
        return _from_image(value, model, processor)
    if isinstance(value, float):
        raise InputError(f"Token ids must be whole numbers; got {value}.")
    if isinstance(value, (list, tuple)) and value and all(isinstance(one, str) for one in value):
        raise InputError(f"Expected one text; got {len(value)}. Take them one by one, or map all with `lens.maps`.")
    raise InputError(
        "Expected a text, a list of token ids, an image (PIL image, path or pixel array), embeddings of shape (token, "
        f"channel), or the output of a processor; got {type(value).__name__}."
    )


def _decoder_start(arguments: dict[str, Any], model: nn.Module) -> dict[str, Tensor]:
    """The first token of a decoder, for which no input was given."""
    config = getattr(model, "config", None)
    if not getattr(config, "is_encoder_decoder", False) or "decoder_input_ids" not in forward_parameters(model):
        return {}
    if "decoder_input_ids" in arguments or "decoder_inputs_embeds" in arguments:
        return {}
    start = getattr(config, "decoder_start_token_id", None)
    if start is None:
        start = getattr(config, "bos_token_id", None)
    if start is None:
        raise InputError("The decoder needs an input: pass `decoder_input_ids` together with the encoder's input.")
    return {"decoder_input_ids": torch.tensor([[start]], device=device_of(model))}


def _from_text(text: str, model: nn.Module, processor: Any) -> ModelInput:
    tokenizer = tokenizer_of(processor)
    if tokenizer is None and getattr(model, "main_input_name", "") == "pixel_values":
        raise InputError(f"Got a text, but {type(model).__name__} takes images. Pass the path of one, or a PIL image.")
    if tokenizer is None:
        raise InputError(
            "Got a text, but this lens has no tokenizer. Pass one, `tensorlens.Lens(model, tokenizer)`, or pass "
            "token ids."
        )
    if not text.strip():
        raise InputError(f"Expected some text; got {text!r}, which has no words.")
    check_unicode(text)
    [(ids, offsets)] = tokenised(tokenizer, [text])
    if not ids:
        raise InputError(f"The tokenizer gives no tokens for {text!r}. Pass a different text.")
    arguments = id_arguments(_checked_ids(torch.tensor(ids), model), model)
    return ModelInput(arguments=arguments, kind="text", text=text, offsets=offsets)


def _is_ids(value: Any) -> TypeGuard[Sequence[int]]:
    is_list = isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray))
    return is_list and all(isinstance(item, (int, np.integer)) for item in value)


def _as_ids(values: Sequence[int]) -> Tensor:
    try:
        return torch.tensor(list(values), dtype=None if values else torch.long)
    except (RuntimeError, ValueError, OverflowError):
        raise InputError(f"Token ids must be in the model's vocabulary; got {max(values, key=abs)}.") from None


def _from_ids(ids: Tensor, model: nn.Module) -> ModelInput:
    return ModelInput(arguments=id_arguments(_checked_ids(ids, model), model), kind="ids")


def id_arguments(ids: Tensor, model: nn.Module) -> dict[str, Any]:
    """Token ids (1, token) as a model's forward takes them."""
    name = ids_parameter(model)
    return {name: {"input_ids": ids, "attention_mask": torch.ones_like(ids)} if takes_mapping(model) else ids}


def _checked_ids(ids: Tensor, model: nn.Module) -> Tensor:
    """Token ids as (1, token), all of them in the model's vocabulary."""
    if ids.is_floating_point() or ids.dtype is torch.bool:
        raise InputError(f"Token ids must be whole numbers; got {ids.dtype}.")
    ids = ids.reshape(1, -1)
    if ids.numel() == 0:
        raise InputError("Expected at least one token; got an empty list of ids.")
    vocabulary = vocabulary_size(model)
    if vocabulary is not None and (int(ids.min()) < 0 or int(ids.max()) >= vocabulary):
        bad = next(int(i) for i in ids[0] if not 0 <= int(i) < vocabulary)
        raise InputError(f"Token ids must be from 0 to {vocabulary - 1}, the model's vocabulary; got {bad}.")
    _check_length(ids.shape[1], model)
    return ids.long().to(device_of(model))


def _from_array(array: Tensor, model: nn.Module) -> ModelInput:
    is_row = array.dim() == 1 or array.dim() == 2 and array.shape[0] == 1
    if is_row and not array.is_floating_point():
        return _from_ids(array, model)
    parameters = forward_parameters(model)
    takes_embeddings = bool({"inputs_embeds", "input_ids"} & parameters)
    if "pixel_values" in parameters and (array.dim() in (3, 4) or not takes_embeddings):
        check_pixels(array, pixel_channels(model))
        pixels = array if array.dim() == 4 else array[None]
        _check_numbers(pixels, "pixels")
        return ModelInput(arguments={"pixel_values": pixels.to(device_of(model), dtype_of(model))}, kind="image")
    if hasattr(model, "config") or takes_embeddings:
        return _from_embeddings(array, model)
    return _from_values(array, model)


def _from_values(values: Tensor, model: nn.Module) -> ModelInput:
    """Numbers for the first argument of a plain module, unchanged: only its own code knows its axes."""
    name = first_parameter(model)
    if begins_with_pixels(model):
        check_pixels(values, pixel_channels(model))
        values = values if values.dim() == 4 else values[None]
    if not values.is_floating_point() or values.dim() < 2:
        raise InputError(
            f"`{name}` of `{type(model).__name__}` takes token ids (a list of whole numbers) or floats with "
            f"token and channel axes; got {values.dtype} of shape {tuple(values.shape)}."
        )
    if values.dim() > 2 and 1 not in values.shape[:2]:
        raise InputError(f"Expected one sample; got shape {tuple(values.shape)}. Pass several as a list.")
    _check_numbers(values, name)
    return ModelInput(arguments={name: values.to(device_of(model), dtype_of(model))}, kind="values")


def _from_embeddings(embeddings: Tensor, model: nn.Module) -> ModelInput:
    if embeddings.dim() == 3 and embeddings.shape[0] == 1:
        embeddings = embeddings[0]
    width = embedding_width(model)
    if embeddings.dim() != 2 or embeddings.shape[0] == 0 or width is not None and embeddings.shape[1] != width:
        raise InputError(
            f"Embeddings must have shape (token, {width or 'channel'}); got {tuple(embeddings.shape)}. "
            "Pass token ids as a list of whole numbers."
        )
    if not embeddings.is_floating_point():
        raise InputError(f"Embeddings must be floating-point numbers; got {embeddings.dtype}.")
    _check_numbers(embeddings, "embeddings")
    _check_length(embeddings.shape[0], model)
    if "inputs_embeds" not in forward_parameters(model):
        raise InputError(f"`{type(model).__name__}` does not take embeddings; pass its processor's output.")
    return ModelInput(
        arguments={"inputs_embeds": embeddings[None].to(device_of(model), dtype_of(model))}, kind="embeddings"
    )


def _from_mapping(processed: Mapping[str, Any], model: nn.Module) -> ModelInput:
    for name in ("past_key_values", "encoder_outputs"):
        if processed.get(name) is not None:
            raise InputError(
                f"`{name}` is a cache of earlier tokens, whose influence would be lost. Pass the whole input instead."
            )
    if not processed:
        raise InputError("Expected the output of a processor; got an empty dictionary.")
    if batch_size(processed) > 1:
        raise InputError(
            f"Expected one input; got the output of a processor for {batch_size(processed)}. Call the lens itself, "
            "which gives a tensor for each, or pass them one by one."
        )
    arguments = {
        name: _checked(value, name).to(device_of(model)) if isinstance(value, Tensor) else value
        for name, value in as_tensors(processed).items()
        if name != "labels"
    }
    arguments = drop_padding(arguments)
    ids = arguments.get("input_ids")
    if ids is not None and (ids.dim() == 1 or len(ids) == 1):
        arguments["input_ids"] = _checked_ids(ids, model)
    for name, value in arguments.items():
        if isinstance(value, Tensor) and value.dim() == 1 and name != "input_ids" and ids is not None:
            arguments[name] = value[None]
        if isinstance(value, Tensor) and value.is_floating_point():
            _check_numbers(value, name)
            arguments[name] = arguments[name].to(dtype_of(model))
    if takes_mapping(model) and first_parameter(model) not in arguments:
        mask = {} if ids is None else {"attention_mask": torch.ones_like(arguments["input_ids"])}
        arguments = {first_parameter(model): mask | arguments}
    return ModelInput(arguments=arguments, kind="processed")


def batch_size(processed: Mapping[str, Any]) -> int:
    """How many samples a processor's output holds."""
    for name in ("input_ids", "inputs_embeds", "attention_mask", "pixel_values", "input_values", "input_features"):
        value = processed.get(name)
        if value is not None:
            dims = as_tensor(value, name).dim()
            return len(value) if dims > 1 and not (name == "inputs_embeds" and dims == 2) else 1
    return 1


def as_tensors(processed: Mapping[str, Any]) -> dict[str, Any]:
    """The output of a processor, its numbers as tensors."""
    return {
        name: as_tensor(value, name) if isinstance(value, (Tensor, np.ndarray, list)) else value
        for name, value in processed.items()
    }


def as_tensor(value: Any, name: str) -> Tensor:
    """Numbers as a tensor."""
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise InputError(f"The {name} must be numbers, in rows of one length; got {value!r:.60}.") from error


def drop_padding(arguments: dict[str, Any]) -> dict[str, Any]:
    """One sample without the padding before and after it.

    A mask with a hole is not padding: tokens after it keep their positions, and the mask stays. So does one with given
    positions, since transformers reads positions alone as several texts in a row.
    """
    arguments = dict(arguments)
    for prefix in ("", "decoder_"):
        mask = arguments.get(f"{prefix}attention_mask")
        ids = arguments.get(f"{prefix}input_ids", arguments.get(f"{prefix}inputs_embeds"))
        has_positions = arguments.get(f"{prefix}position_ids") is not None
        if mask is None and has_positions and isinstance(ids, Tensor) and ids.dim() >= 2:
            arguments[f"{prefix}attention_mask"] = torch.ones(ids.shape[:2], dtype=torch.long, device=ids.device)
            continue
        if not isinstance(mask, Tensor) or mask.dim() != 2 or len(mask) != 1:
            continue
        if ids is None or ids.shape[:2] != mask.shape or not mask.any():
            continue
        places = mask[0].nonzero()[:, 0]
        kept = slice(int(places[0]), int(places[-1]) + 1)
        aligned = [
            name
            for name, value in arguments.items()
            if isinstance(value, Tensor)
            and value.dim() >= 2
            and value.shape[:2] == mask.shape
            and name.startswith("decoder_") == bool(prefix)
        ]
        arguments |= {name: arguments[name][:, kept] for name in aligned}
        if not has_positions and len(places) == kept.stop - kept.start:
            del arguments[f"{prefix}attention_mask"]
    return arguments


# Images --------------------------------------------------------------------------------------------------------------


def _is_bytes_of_picture(value: np.ndarray) -> bool:
    """Whether this is an array as ``numpy.asarray(image)`` makes it: (height, width), or three or four colours last."""
    return value.dtype == np.uint8 and (value.ndim == 2 or value.ndim == 3 and value.shape[-1] in (3, 4))


def _from_image(image: Any, model: nn.Module, processor: Any) -> ModelInput:
    if "pixel_values" not in forward_parameters(model):
        raise InputError(f"Got an image, but `{type(model).__name__}` takes no pixels. Pass a text or token ids.")
    if processor is None:
        raise InputError(
            "Got an image, but this lens has no image processor. Pass one, `tensorlens.Lens(model, processor)`, "
            "or pass pixels."
        )
    image = image.convert("RGB")
    pixels = processor(images=image, return_tensors="pt")["pixel_values"]
    return ModelInput(
        arguments={"pixel_values": pixels.to(device_of(model), dtype_of(model))},
        kind="image",
        picture=SeenPicture(image, processor),
    )


def _id_labels(ids: Sequence[int], processor: Any) -> tuple[str, ...]:
    tokenizer = tokenizer_of(processor)
    return token_labels(list(ids), tokenizer) if tokenizer else tuple(map(str, ids))


def _special_patches(model: nn.Module) -> tuple[str, ...]:
    distilled = any(name.endswith("distillation_token") for name, _ in model.named_parameters())
    return ("[CLS]", "[DIST]") if distilled else ("[CLS]",)


# What is refused -----------------------------------------------------------------------------------------------------


def _check_length(n_tokens: int, model: nn.Module) -> None:
    limit = max_tokens(model)
    if limit is not None and n_tokens > limit:
        raise InputError(f"The model takes at most {limit} tokens; got {n_tokens}. Shorten the input.")


def _check_numbers(values: Tensor, name: str) -> None:
    # A mask that is added to attention scores may be minus infinity.
    is_mask = "mask" in name or "bias" in name
    if not bool((~values.isnan() & (values != torch.inf) if is_mask else torch.isfinite(values)).all()):
        raise InputError(f"The {name} must be finite numbers; found NaN or infinity.")


def _checked(value: Tensor, name: str) -> Tensor:
    """A tensor that holds numbers in the ordinary way."""
    if value.is_meta or value.layout is not torch.strided or value.is_nested or value.is_complex():
        kind = "meta" if value.is_meta else "nested" if value.is_nested else str(value.layout).split(".")[-1]
        kind = "complex" if value.is_complex() else kind
        raise InputError(f"The {name} must be an ordinary dense tensor of real numbers; got a {kind} one.")
    if value.numel() == 0 and value.dim() != 1:
        raise InputError(f"The {name} must have at least one sample and one token; got shape {tuple(value.shape)}.")
    return value


# What a model's signature, config and own methods say about its inputs and parts --------------------------------------

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
