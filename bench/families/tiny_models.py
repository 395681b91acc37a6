"""Tiny random models of every type that transformers can build.

A configuration is shrunk by the names of its attributes, which transformers keeps to across families; what needs more
than that has a line in `tiny_overrides.py`. Every parameter is drawn, biases and gains too: the default
initialisation sets biases to zero and gains to one, which hides most errors.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from bench.families.tiny_overrides import ARGUMENTS, OVERRIDES, SINGLE_PRECISION, SIZES
from tensorlens.errors import LoadError

TASKS = {
    "causal": ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",),
    "masked": ("MODEL_FOR_MASKED_LM_MAPPING_NAMES",),
    "seq2seq": ("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",),
    "vision": (
        "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
        "MODEL_FOR_VIDEO_CLASSIFICATION_MAPPING_NAMES",
        "MODEL_FOR_IMAGE_MAPPING_NAMES",
    ),
    "audio": ("MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES", "MODEL_FOR_CTC_MAPPING_NAMES"),
}
"""By task: the mappings of transformers that list its model types, the first that has a type deciding on the class."""

N_TOKENS = 7
N_DECODER_TOKENS = 5


@dataclass(frozen=True, kw_only=True)
class TinyModel:
    """A tiny random model with an input for it.

    Attributes:
        model: In evaluation mode, float64.
        arguments: Keyword arguments of one forward pass.
    """

    model: nn.Module
    arguments: dict[str, Any]


def model_types(task: str) -> list[str]:
    """The model types that the installed transformers lists for a task."""
    auto = import_module("transformers.models.auto.modeling_auto")
    return sorted({name for key in TASKS[task] for name in getattr(auto, key, {})})


def build(
    task: str, model_type: str, attention: str = "eager", dtype: torch.dtype = torch.float64, seed: int = 0
) -> TinyModel:
    """A tiny model of one type with every parameter drawn at random.

    Raises:
        LoadError: If transformers cannot build it, with the reason.
    """
    dtype = torch.float32 if model_type in SINGLE_PRECISION else dtype
    try:
        config = tiny_config(model_type, task)
        model = _from_config(task, config, attention)
        model = randomise(model, seed).to(dtype).eval()
        return TinyModel(model=model, arguments=tiny_arguments(model, task, dtype, seed))
    except Exception as error:
        raise LoadError(f"{type(error).__name__}: {str(error).strip() or 'no message'}") from error


def _from_config(task: str, config: Any, attention: str) -> nn.Module:
    transformers = import_module("transformers")
    model_class = getattr(transformers, class_name(task, config.model_type))
    for name, part in config.sub_configs.items():
        if model_class.config_class is part and not isinstance(config, part):
            config = getattr(config, name)
    # The other implementations take no float64; they are tested by themselves.
    config._experts_implementation = "eager"
    return model_class._from_config(config, attn_implementation=attention)


def class_name(task: str, model_type: str) -> str:
    """The class that transformers lists for a model type; its auto classes would import every other one first."""
    auto = import_module("transformers.models.auto.modeling_auto")
    for key in TASKS[task]:
        found = getattr(auto, key, {}).get(model_type)
        if found is not None:
            return found if isinstance(found, str) else found[0]
    raise LoadError(f"transformers lists no class of `{model_type}` for {task}.")


# Configurations ------------------------------------------------------------------------------------------------------


def tiny_config(model_type: str, task: str = "") -> Any:
    """The configuration of a model type with every size brought down."""
    config_class = import_module("transformers").CONFIG_MAPPING[model_type]
    overrides = OVERRIDES.get(model_type, {}) | OVERRIDES.get(f"{task}/{model_type}", {})
    return _shrunk(config_class, overrides)


def _shrunk(config_class: type, overrides: dict[str, Any], default: Any = None) -> Any:
    default = _default(config_class, overrides) if default is None else default
    chosen: dict[str, Any] = {}
    for name, value in vars(default).items():
        if hasattr(value, "model_type") and hasattr(value, "to_dict"):
            chosen[name] = _shrunk(type(value), overrides.get(name, {}), value)
        elif name in SIZES and value is not None and not isinstance(value, bool):
            chosen[name] = _resized(SIZES[name], value)
    chosen |= {
        name: value for name, value in overrides.items() if not isinstance(chosen.get(name), type(default).__mro__[1])
    }
    _fit_lists(default, chosen, overrides)
    return config_class(**chosen)


def _default(config_class: type, overrides: dict[str, Any]) -> Any:
    try:
        return config_class()
    except Exception:  # noqa: BLE001  a configuration without defaults of its own
        return config_class(**overrides)


def _resized(size: int, value: Any) -> Any:
    """The small size, in as many copies as the configuration lists."""
    if isinstance(value, (list, tuple)):
        return type(value)(_resized(size, part) for part in value)
    return size if isinstance(value, int) else value


def _fit_lists(default: Any, chosen: dict[str, Any], overrides: dict[str, Any]) -> None:
    """Lists with one entry for each block: as many entries as blocks, each kind once before any comes again."""
    names = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
    before = next((vars(default)[name] for name in names if name in vars(default)), None)
    after = next((chosen[name] for name in names if name in chosen), None)
    for name, value in vars(default).items():
        if isinstance(value, (list, tuple)) and name not in overrides and after and len(value) == before:
            kinds = list(dict.fromkeys(value))
            chosen[name] = type(value)((kinds * after)[:after])


# Weights -------------------------------------------------------------------------------------------------------------


def randomise(model: nn.Module, seed: int = 0) -> nn.Module:
    """Draw every parameter: matrices to keep the scale, gains around one, biases around zero."""
    generator = torch.Generator().manual_seed(seed)
    convolutions = {id(m.weight) for m in model.modules() if isinstance(m, (nn.Conv1d, nn.Conv2d, nn.Conv3d))}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                fan_in = parameter[0].numel() if id(parameter) in convolutions else parameter.shape[-1]
                parameter.copy_(noise * 1.5 / fan_in**0.5)
            else:
                parameter.copy_(float(name.endswith("weight")) + 0.3 * noise)
        for name, buffer in model.named_buffers():
            if name.endswith(("running_mean", "running_var")):
                noise = torch.randn(buffer.shape, generator=generator)
                buffer.copy_(0.3 * noise if name.endswith("mean") else 0.5 + noise.abs())
    return model


# Inputs --------------------------------------------------------------------------------------------------------------


def tiny_arguments(model: nn.Module, task: str, dtype: torch.dtype, seed: int = 0) -> dict[str, Any]:
    """What one forward pass of a tiny model takes."""
    generator = torch.Generator().manual_seed(seed)
    config: Any = model.config
    parameters = inspect.signature(model.forward).parameters
    arguments: dict[str, Any] = {}
    special = ARGUMENTS.get(config.model_type, {}) | ARGUMENTS.get(f"{task}/{config.model_type}", {})
    main = getattr(model, "main_input_name", "input_ids")
    if task in ("causal", "masked", "seq2seq") and "input_ids" in parameters:
        main = "input_ids"
    if task == "vision" and "pixel_values" in parameters:
        main = "pixel_values"
    arguments[main] = _main_input(main, config, dtype, generator)
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in parameters:
        arguments["decoder_input_ids"] = _ids(config, N_DECODER_TOKENS, generator)
    for name, value in special.items():
        arguments[name] = value(generator, dtype) if callable(value) else value
    return {name: value for name, value in arguments.items() if value is not None}


def _main_input(name: str, config: Any, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    if name == "input_ids":
        return _ids(config, N_TOKENS, generator)
    if name in ("pixel_values", "pixel_values_videos"):
        return torch.randn(_pixel_shape(config), generator=generator, dtype=dtype)
    if name == "input_features":
        return torch.randn(
            1, _attribute(config, "num_mel_bins", "feature_size") or 16, 32, generator=generator, dtype=dtype
        )
    return torch.randn(1, 2400, generator=generator, dtype=dtype)


def _ids(config: Any, n_tokens: int, generator: torch.Generator) -> Tensor:
    return torch.randint(5, 40, (1, n_tokens), generator=generator)


def _pixel_shape(config: Any) -> tuple[int, ...]:
    size = _attribute(config, "image_size") or 32
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    channels = _attribute(config, "num_channels", "in_chans") or 3
    frames = _attribute(config, "num_frames")
    return (1, frames, channels, height, width) if frames else (1, channels, height, width)


def _attribute(config: Any, *names: str) -> Any:
    """The first of the names that a configuration, or one of the configurations in it, has."""
    for part in _configs(config):
        for name in names:
            if getattr(part, name, None) is not None:
                return getattr(part, name)
    return None


def _configs(config: Any) -> Iterator[Any]:
    yield config
    for value in vars(config).values():
        if hasattr(value, "model_type") and hasattr(value, "to_dict"):
            yield from _configs(value)
