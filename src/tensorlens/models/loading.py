"""A checkpoint made ready for a lens: on its device, in evaluation mode, without gradients of its weights.

`resolving` finds the folder of a name; this file chooses the class that reads it, its options and its errors.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tensorlens.errors import LoadError, MissingExtraError, missing_extra
from tensorlens.memory import chosen_device
from tensorlens.models.conversions import cache_folder
from tensorlens.models.foreign_files import (
    check_complete,
    check_config_file,
    check_proportion,
    check_zip,
    foreign_reader,
)
from tensorlens.models.inputs import forward_parameters
from tensorlens.models.resolving import local_folder, weight_files

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_WITH_HEADS = (
    "AutoModelForCausalLM",
    "AutoModelForMaskedLM",
    "AutoModelForSeq2SeqLM",
    "AutoModelForSequenceClassification",
    "AutoModelForImageClassification",
)
"""Keys by which a checkpoint with code of its own may name the class of its model."""

PLAIN_ATTENTION = (None, "eager", "sdpa")
"""Attention that the configuration of a checkpoint may choose without the user."""

_DTYPES = ("float32", "float64", "float16", "bfloat16")

# Parts that no hidden state passes through, so a checkpoint without them counts as complete.
_UNUSED_PARTS = ("pooler", "mask_token")

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.txt", "vocab.json")
_IMAGE_FILES = ("preprocessor_config.json", "processor_config.json")


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A model ready for a lens, with the processor for its inputs.

    Attributes:
        model: In evaluation mode, its parameters without gradients.
        processor: Tokenizer or image processor; None if the checkpoint has none.
        name: What the user called it.
    """

    model: PreTrainedModel
    processor: Any
    name: str


def load_pretrained(
    name: str | Path,
    *,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    device_map: str | dict[str, Any] | None = None,
    attention: str | None = None,
    trust_remote_code: bool = False,
    revision: str | None = None,
) -> Loaded:
    """Load a model with its tokenizer or image processor, and with the checkpoint's own head if its weights are there.

    Args:
        name: Bundled short name, `.gguf` file, local folder or hub id, looked up in this order.
        device: Where to put the model; by default the accelerator that torch finds, if any.
        dtype: Precision of the weights, or "auto" for that of the checkpoint; float32 by default.
        device_map: How to spread a large model over devices, as in transformers; excludes `device`.
        attention: Attention implementation; by default transformers chooses between "eager" and "sdpa".
        trust_remote_code: Allow code that comes with a hub checkpoint.
        revision: Its version: a branch, tag or commit of the hub, or a checkpoint folder inside the folder.

    Raises:
        LoadError: The model cannot be found or read, or an option is unknown.
    """
    options = _options(device, dtype, device_map, attention, trust_remote_code)
    with _quiet():
        folder = local_folder(name, revision)
        with _converted(folder):
            config = _load_config(name, folder, trust_remote_code)
            model = _load_model(name, folder, config, options)
            processor = _load_processor(name, folder, model, trust_remote_code)
    if device_map is None:
        model = model.to(chosen_device(device))  # pyright: ignore[reportArgumentType]
    return Loaded(model=model.eval().requires_grad_(False), processor=processor, name=str(name))


def _options(
    device: str | torch.device | None,
    dtype: str | torch.dtype | None,
    device_map: str | dict[str, Any] | None,
    attention: str | None,
    trust_remote_code: bool,
) -> dict[str, Any]:
    """Keyword arguments for `from_pretrained`, all checked before anything is read."""
    if device_map is not None and device is not None:
        raise LoadError(f"Either device= or device_map= places a model; got {device!r} and {device_map!r}. Drop one.")
    chosen_device(device)
    options: dict[str, Any] = {"dtype": chosen_dtype(dtype), "trust_remote_code": trust_remote_code}
    if attention is not None:
        options["attn_implementation"] = _attention(attention)
    if device_map is not None:
        if importlib.util.find_spec("accelerate") is None:
            raise missing_extra("device_map=", "accelerate", "studies")
        options["device_map"] = device_map
    return options


def chosen_dtype(dtype: str | torch.dtype | None) -> torch.dtype | str:
    """The type that was asked for, or "auto"; float32 for None."""
    if dtype is None:
        return torch.float32
    if dtype == "auto" or (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        return dtype
    if dtype in _DTYPES:
        return getattr(torch, str(dtype))
    raise LoadError(f"dtype= takes {', '.join(_DTYPES)}, auto or a floating torch dtype; got {dtype!r}.")


def _attention(attention: str) -> str:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    known = sorted({"eager", *ALL_ATTENTION_FUNCTIONS.valid_keys()})
    if attention not in known:
        raise LoadError(f'attention= takes "eager" or "sdpa" (registered: {", ".join(known)}); got {attention!r}.')
    return attention


def _pin_attention(config: PretrainedConfig) -> None:
    """The attention to load with: transformers' choice, or a plain one that the configuration names.

    Any other name may be a repository of kernels, which is code from elsewhere, so the user must ask for it.
    """
    for part in [getattr(config, name, None) for name in config.sub_configs]:
        if part is not None:
            _pin_attention(part)
    if config._attn_implementation not in PLAIN_ATTENTION:
        config._attn_implementation_internal = None


def read_config(name: str | Path, *, trust_remote_code: bool = False, revision: str | None = None) -> PretrainedConfig:
    """The config of a model, without its weights: a folder may contain nothing else."""
    with _quiet():
        has_config = (Path(name) / "config.json").is_file()
        folder = Path(name) if has_config else local_folder(name, revision, weights=False)
        with _converted(folder):
            return _load_config(name, folder, trust_remote_code)


def _load_config(name: str | Path, folder: Path, trust_remote_code: bool) -> PretrainedConfig:
    from transformers import CONFIG_MAPPING, AutoConfig

    content = check_config_file(name, folder / "config.json")
    brings_code = "AutoConfig" in (content.get("auto_map") or {}) and content.get("model_type") not in CONFIG_MAPPING
    if brings_code and not trust_remote_code:
        raise LoadError(
            f"{name} comes with code of its own, which runs only if you trust it: pass --trust-remote-code, in Python "
            "trust_remote_code=True."
        )
    with foreign_reader(lambda said: f"{name}: config.json could not be read: {said}"):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
        _pin_attention(config)
    return config


def _load_model(name: str | Path, folder: Path, config: PretrainedConfig, options: dict[str, Any]) -> PreTrainedModel:
    """The model with its head, or without one if there are no weights for it."""
    import transformers

    with foreign_reader(lambda said: f"{name}: config.json could not be read: {said}"):
        model_class = model_class_of(config)
    files = weight_files(folder)
    for file in files:
        if file.suffix == ".bin":
            check_zip(name, file)
    if not (options["trust_remote_code"] or getattr(config, "auto_map", None)):  # foreign code does not run twice
        check_proportion(name, config, model_class, files)
    model, missing = _read(name, folder, model_class, config, options)
    prefix = f"{model.base_model_prefix}."
    if missing and model.base_model is not model and not any(key.startswith(prefix) for key in missing):
        model, missing = _read(name, folder, transformers.AutoModel, config, options)
    check_complete(name, model, missing)
    return model


def model_class_of(config: PretrainedConfig) -> Any:
    """The class the checkpoint was saved from, with the head it was trained with."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING

    architecture = (getattr(config, "architectures", None) or [""])[0]
    remote = getattr(config, "auto_map", None) or {}
    for auto_class in _WITH_HEADS:
        if remote.get(auto_class, "").endswith(f".{architecture}"):
            return getattr(transformers, auto_class)
    if architecture.endswith("ForPreTraining") and type(config) in MODEL_FOR_MASKED_LM_MAPPING:
        return transformers.AutoModelForMaskedLM
    own = getattr(transformers, architecture, None) if architecture else None
    if isinstance(own, type) and issubclass(own, transformers.PreTrainedModel):
        return own
    return transformers.AutoModel


def _read(
    name: str | Path, folder: Path, model_class: Any, config: PretrainedConfig, options: dict[str, Any]
) -> tuple[Any, list[str]]:
    """The model, and the names of weights that were not in the checkpoint."""
    with foreign_reader(lambda said: f"{name}: {model_class.__name__} could not read the checkpoint: {said}"):
        try:
            made = _built(model_class, folder, config, options)
            if made is not None:
                return made
            model, info = model_class.from_pretrained(folder, config=config, output_loading_info=True, **options)
        except ImportError as error:
            raise LoadError(f"{name}: a package this checkpoint needs is not installed. {error}") from error
    missing = [key for key in info["missing_keys"] if not any(part in key for part in _UNUSED_PARTS)]
    return model, sorted(missing)


def _built(
    model_class: Any, folder: Path, config: PretrainedConfig, options: dict[str, Any]
) -> tuple[Any, list[str]] | None:
    """A model whose code comes with its weights, built in real memory; None if transformers has to load it.

    transformers builds a model without memory first, and gives it memory and weights later. Code written for an older
    version may not survive that: it lacks the call of `post_init` that the loader relies on, or makes a table (of
    rotary angles) that no file holds and that would stay empty. So such a model is built as its code says, and then
    takes its weights from the files.
    """
    if not options["trust_remote_code"] or "device_map" in options or getattr(config, "quantization_config", None):
        return None
    reference = (getattr(config, "auto_map", None) or {}).get(model_class.__name__)
    if reference is None:
        return None
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    if "attn_implementation" in options:
        config._attn_implementation = options["attn_implementation"]
    dtype = options["dtype"] if options["dtype"] != "auto" else getattr(config, "dtype", None) or torch.float32
    return _build(get_class_from_dynamic_module(reference, folder), config, folder, dtype)


def _build(kind: type[nn.Module], config: Any, folder: Path, dtype: torch.dtype) -> tuple[nn.Module, list[str]] | None:
    """The model with its weights, and the weights in no file; None if the files name weights that the model lacks.

    In that case transformers renames the weights while loading. Weights are cast to `dtype`;
    tables that no file holds stay as the code made them: complex angles are not real numbers.
    """
    model = kind(config)
    wanted, found = model.state_dict(), set()
    for file in sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")]):
        weights = _weights(file)
        if not set(weights) <= set(wanted):
            return None
        found |= set(weights)
        model.load_state_dict(weights, strict=False)
    if hasattr(model, "all_tied_weights_keys"):  # made by `post_init`
        model.tie_weights()  # type: ignore[operator]
    wanted = model.state_dict()
    shared = {wanted[name].data_ptr() for name in found}
    missing = sorted(name for name, weight in wanted.items() if name not in found and weight.data_ptr() not in shared)
    for weight in model.parameters():
        if weight.is_floating_point():
            weight.data = weight.data.to(dtype)
    return model, missing


def _weights(file: Path) -> dict[str, torch.Tensor]:
    if file.suffix == ".bin":
        return torch.load(file, map_location="cpu", weights_only=True)
    from safetensors.torch import load_file

    return load_file(file)


def _load_processor(name: str | Path, folder: Path, model: PreTrainedModel, trust_remote_code: bool) -> Any | None:
    """The tokenizer or image processor of the checkpoint, the one of the model's main input first."""
    import transformers

    readers: list[Any] = [
        ((TOKENIZER_FILES,), transformers.AutoTokenizer.from_pretrained),
        ((_IMAGE_FILES,), _read_image_processor),
    ]
    if model.main_input_name == "pixel_values":
        readers.reverse()
    elif "pixel_values" in forward_parameters(model):
        readers.insert(0, ((TOKENIZER_FILES, _IMAGE_FILES), transformers.AutoProcessor.from_pretrained))
    for kinds, read in readers:
        if all(any((folder / file).is_file() for file in files) for files in kinds):
            with foreign_reader(lambda said: f"{name}: the tokenizer or image processor could not be read: {said}"):
                try:
                    return read(folder, trust_remote_code=trust_remote_code)
                except MissingExtraError:
                    raise
                except ImportError as error:
                    raise LoadError(f"{name}: the tokenizer needs a package that is not installed. {error}") from error
    return None


def _read_image_processor(folder: Path, *, trust_remote_code: bool) -> Any:
    if importlib.util.find_spec("PIL") is None:
        raise missing_extra("Reading images", "pillow", "demo")
    import transformers

    # The PIL variant gives the same pixels with and without torchvision; older versions of `AutoImageProcessor` need
    # torchvision even to name it.
    settings, _ = transformers.ImageProcessingMixin.get_image_processor_dict(folder)
    kind = str(settings.get("image_processor_type") or settings.get("feature_extractor_type") or "")
    kind = kind.replace("FeatureExtractor", "ImageProcessor").removesuffix("Fast").removesuffix("Pil")
    pil_class = getattr(transformers, f"{kind}Pil", None)
    if pil_class is not None:
        return pil_class.from_pretrained(folder)
    return transformers.AutoImageProcessor.from_pretrained(folder, backend="pil", trust_remote_code=trust_remote_code)


@contextmanager
def _converted(folder: Path) -> Iterator[None]:
    """A context in which errors about a converted copy name its folder: removing it fixes them."""
    try:
        yield
    except LoadError as error:
        if isinstance(error, MissingExtraError) or cache_folder() not in folder.parents:
            raise
        raise LoadError(f"{error} If the converted copy is damaged, remove {folder}.") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """A context without warnings and progress bars of transformers, except for downloads."""
    from huggingface_hub.utils import enable_progress_bars
    from transformers.utils import logging

    verbosity, had_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if had_bars:
        enable_progress_bars()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if had_bars:
            logging.enable_progress_bar()
