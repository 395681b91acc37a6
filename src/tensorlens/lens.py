"""`Lens` and `load`: from a model to its attention tensor at an input."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from tensorlens.errors import InputError
from tensorlens.freezing.frozen_model import FrozenModel
from tensorlens.freezing.rules import Rules
from tensorlens.freezing.streaming import hold
from tensorlens.maps.targets import Classes
from tensorlens.models.anatomy import find_anatomy
from tensorlens.models.inputs import ModelInput, batch_size, make_input, split_batch, tokenizer_of
from tensorlens.operators.matrix_free import FrozenOperator
from tensorlens.tensor import AttentionTensor, Context
from tensorlens.versions import package_versions


class Lens:
    """A model to look through: call it on an input to get the `AttentionTensor` there.

    The model stays the user's: the same object, untouched after every call.

    Args:
        model: A model in memory, in any state; it is looked at as it would run at inference.
        processor: Its tokenizer, image processor or processor, if inputs are to be text or images.
        rules: The conventions; see `Rules`.
        blocks: Path of the list of blocks, for a model where the guess is wrong.
        name: What maps should call the model.
    """

    def __init__(
        self, model: nn.Module, processor: Any = None, *, rules: Rules | None = None, blocks: str | None = None,
        name: str | None = None,
    ) -> None:  # fmt: skip
        if not isinstance(model, nn.Module):
            raise InputError(
                f"`Lens` expected a torch module; got {type(model).__name__}. To load by name use `tensorlens.load`."
            )
        model = getattr(model, "_orig_mod", model)  # what torch.compile wrapped: its code is read, not the compiled one
        self.model, self.processor, self.rules = model, processor, rules or Rules()
        self.anatomy = find_anatomy(model, blocks)
        self.name = name or getattr(getattr(model, "config", None), "name_or_path", "") or type(model).__name__

    def __repr__(self) -> str:
        """One line: model and number of blocks."""
        return f"Lens({self.name}: {type(self.model).__name__}, blocks in `{self.anatomy.stack}`)"

    def __call__(self, value: Any) -> Any:
        """The attention tensor at an input, or a list of them for a batch.

        The samples of a batch go through the model one by one and without their padding, so that each is what it would
        be alone.

        Args:
            value: A text, a list of token ids, an image (PIL, path or pixel array), embeddings (L, D), a processor's
                output, or a list of any of these.
        """
        if isinstance(value, Mapping) and batch_size(value) > 1:
            return [self(one) for one in split_batch(value)]
        if isinstance(value, (list, tuple)) and value and not isinstance(value[0], (int, np.integer)):
            return [self(one) for one in value]
        prepared = make_input(value, self.model, self.processor)
        arguments = prepared.arguments | _constant_arguments(self.model)
        frozen = hold(self.anatomy, arguments, self.rules)
        return AttentionTensor(FrozenOperator(frozen), self._context(prepared, frozen))

    def _context(self, prepared: ModelInput, frozen: FrozenModel) -> Context:
        n_tokens = frozen.hidden[0].shape[1]
        meta: dict[str, Any] = {"model": self.name, "versions": package_versions()}
        if prepared.text is not None:
            meta["text"] = prepared.text
        grid = prepared.grid(self.model)
        if grid is not None and grid[0] * grid[1] <= n_tokens:
            meta["grid"] = {"rows": grid[0], "columns": grid[1], "first": n_tokens - grid[0] * grid[1]}
            meta["image"] = prepared.image
        tokens = prepared.labels(n_tokens, self.model, self.processor)
        out_tokens = _out_labels(tokens, frozen.hidden[-1].shape[1], is_decoder=frozen.n_encoder_blocks > 0)
        return Context(tokens=tokens, classes=self._classes(frozen), meta=meta, out_tokens=out_tokens)

    def _classes(self, frozen: FrozenModel) -> Classes | None:
        if frozen.readout is None:
            return None
        unembedding = frozen.anatomy.unembedding
        if unembedding is not None:
            return Classes(n_classes=unembedding.weight.shape[0], tokenizer=tokenizer_of(self.processor))
        labels = getattr(getattr(self.model, "config", None), "id2label", None)
        return Classes(
            n_classes=frozen.readout.shape[-1], labels=labels or {i: str(i) for i in range(frozen.readout.shape[-1])}
        )


def load(
    name: str, *, device: str | None = None, dtype: str | torch.dtype | None = None, device_map: Any = None,
    attention: str | None = None, rules: Rules | None = None, trust_remote_code: bool = False,
) -> Lens:  # fmt: skip
    """Load a model and look through it.

    Args:
        name: A bundled short name (``smollm2-135m``), a folder, a ``.gguf`` file, or a hub id.
        device: Where to put it; the GPU if there is one.
        dtype: Type of the weights; float32 unless told otherwise.
        device_map: Placement over several devices, as in transformers; instead of `device`.
        attention: ``"eager"`` or ``"sdpa"``; transformers' own choice if None.
        rules: The conventions; see `Rules`.
        trust_remote_code: Whether code that comes with the model may run. Never on unless asked for.
    """
    from tensorlens.models.loading import load_pretrained

    loaded = load_pretrained(
        name,
        device=device,
        dtype=dtype,
        device_map=device_map,
        attention=attention,
        trust_remote_code=trust_remote_code,
    )
    return Lens(loaded.model, loaded.processor, rules=rules, name=loaded.name)


def _constant_arguments(model: nn.Module) -> dict[str, Any]:
    """No cache, which would cut the influence of earlier tokens; outputs by name."""
    parameters = inspect.signature(model.forward).parameters
    open_ended = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    arguments = {"use_cache": False} if "use_cache" in parameters else {}
    return arguments | (
        {"return_dict": True} if "return_dict" in parameters or open_ended and hasattr(model, "config") else {}
    )


def _out_labels(tokens: tuple[str, ...], n_out: int, *, is_decoder: bool) -> tuple[str, ...] | None:
    """Labels of outputs that are not the inputs: the decoder's tokens, or places after patches were merged."""
    if n_out == len(tokens):
        return None
    return tokens[len(tokens) - n_out :] if is_decoder else tuple(str(position) for position in range(n_out))
