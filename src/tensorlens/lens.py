"""`Lens` and `load`: from a model to its attention tensor at an input."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from tensorlens.answers.answer import Answer, make_answer
from tensorlens.batch import Batch
from tensorlens.dataset_maps import Asked, Rows, maps
from tensorlens.errors import InputError, TensorLensError
from tensorlens.maps.targets import Classes, Target
from tensorlens.maps.token_map import TokenMap
from tensorlens.models.anatomies import Anatomies
from tensorlens.models.anatomy import Anatomy, find_anatomy
from tensorlens.models.around import said_of
from tensorlens.models.forward_signature import check_arguments, is_causal
from tensorlens.models.inputs import ModelInput, batch_size, make_input, split_batch, tokenizer_of
from tensorlens.models.plain_pass import own_modes
from tensorlens.models.rows import check_several, make_inputs
from tensorlens.operators.operator import FrozenOperator
from tensorlens.recording.conventions import Rules
from tensorlens.recording.record import record
from tensorlens.recording.recording import Recording
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
        if rules is not None and not isinstance(rules, Rules):
            raise InputError(f"`rules` must be a `tensorlens.Rules`, such as `Rules.attn_lrp()`; got {rules!r}.")
        if blocks is not None and not isinstance(blocks, str):
            raise InputError(
                f"`blocks` must be the path of a list of blocks, such as 'model.layers'; got {blocks!r:.60}."
            )
        model = getattr(model, "_orig_mod", model)  # what torch.compile wrapped: its code is read, not the compiled one
        self.model, self.processor, self.rules = model, processor, rules or Rules()
        self.anatomies, self._blocks = Anatomies(model, blocks), blocks
        if blocks is not None:  # a wrong path is said at once
            find_anatomy(model, blocks=blocks)
        self.name = name or getattr(getattr(model, "config", None), "name_or_path", "") or type(model).__name__

    def __repr__(self) -> str:
        """One line: model and number of blocks."""
        return f"Lens({self.name}: {type(self.model).__name__})"

    @own_modes
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
        prepared = self.prepare(value)
        return self.tensor(prepared, self.record(prepared.arguments))

    def record(self, arguments: dict[str, Any], *, n_samples: int = 1) -> Recording:
        """Run the model once on some arguments and keep the program it leaves behind."""
        anatomy, arguments = self.recording_arguments(arguments)
        found = record(anatomy, arguments, self.rules, n_samples=n_samples)
        if found.origin is not None and found.origin.anatomy is not anatomy:
            self.anatomies.learn(arguments, found.origin.anatomy)
        return found

    @own_modes
    def batch(self, inputs: Sequence[Any]) -> Batch:
        """Attention tensors of several inputs that share one recording.

        Args:
            inputs: Each as for a call; texts of different lengths are padded at their end.

        Raises:
            InputError: The model hears padding, or mixes samples, so that they would not be what they are alone.
        """
        check_several(inputs)
        made = Batch(self, [self.prepare(value) for value in inputs])
        made.check()
        return made

    def maps(
        self, inputs: Iterable[Any], method: str = "tensor.in_out", *, out_token: int = -1,
        target: Target | None = None, batch_size: int | None = None, probes: int | None = None, seed: int = 0,
        progress: bool | None = None, on_error: Literal["raise", "skip"] = "raise",
        skipped: list[tuple[int, str]] | None = None, truncate: bool = False,
        first_row: int = 0,
    ) -> Iterator[TokenMap]:  # fmt: skip
        """Maps of a data set, in batches and in the order of the inputs: each is what it would be alone.

        Args:
            inputs: Each as for a call; any iterable.
            method: A name in `METHODS`.
            out_token: The output to explain; negative ones count from each sample's own end.
            target: For `tensor.in_class`; the model's own prediction for each sample if None.
            batch_size: Samples at a time; as many as go into free memory if None.
            probes: For `tensor.norm`: random probes to sketch it with.
            seed: Seed for the probes.
            progress: Whether to show a progress bar; on a terminal if None.
            on_error: What becomes of an input that the model cannot take (empty, too long, no text): ``raise``, with
                its row, or ``skip``: there is no map of it.
            skipped: A list that is given the (row, reason) of each input left out.
            truncate: Whether a text that is too long for the model is cut at its end.
            first_row: What errors call the first input.

        Raises:
            InputError: An input that the model cannot take, with its row.
        """
        check_several(inputs)
        asked = Asked(method=method, out_token=out_token, target=target, probes=probes, seed=seed)
        rows = Rows(on_error=on_error, skipped=[] if skipped is None else skipped, truncate=truncate, first=first_row)
        return maps(self, inputs, asked, rows, batch_size=batch_size, progress=progress)

    @own_modes
    def answer(
        self, prompt: Any, answer: str | Sequence[int] | None = None, *, logprobs: Sequence[float] | None = None,
        max_new_tokens: int = 64, seed: int | None = None, **options: Any,
    ) -> Answer:  # fmt: skip
        """What the model says after a prompt, or an answer given, ready to be traced back to the prompt.

        Args:
            prompt: A text, chat messages (dicts with `role` and `content`; the tokenizer's own template renders them)
                or token ids.
            answer: The answer to explain, as it continues the prompt; generated by the model if None.
            logprobs: What a server gave as the log-probability of each token of that answer: compared with the model's
                own in `Answer.agreement`, with a warning where they differ by more than rounding.
            max_new_tokens: How long an answer may become; no longer than the model has places for.
            seed: Of a sampled answer.
            **options: Of the model's `generate`. Without any the answer is the greedy one.
        """
        return make_answer(
            self, prompt, answer, logprobs=logprobs, max_new_tokens=max_new_tokens, seed=seed, options=options
        )

    def prepare(self, value: Any) -> ModelInput:
        """What the model takes, of anything that a call takes."""
        return value if isinstance(value, ModelInput) else make_input(value, self.model, self.processor)

    def prepare_all(self, values: Sequence[Any], *, truncate: bool = False) -> list[ModelInput | TensorLensError]:
        """For each input what the model takes, or the error that it would raise; texts are tokenised together.

        Args:
            values: The inputs.
            truncate: Whether a text that is too long for the model is cut at its end.
        """
        return make_inputs(values, self.model, self.processor, truncate=truncate)

    def recording_arguments(self, arguments: dict[str, Any]) -> tuple[Anatomy, dict[str, Any]]:
        """Where the model's parts are for such arguments, and the arguments with the constant ones."""
        arguments = arguments | _constant_arguments(self.model)
        check_arguments(self.model, arguments)
        return self.anatomies.at(arguments), arguments

    def tensor(self, prepared: ModelInput, recording: Recording) -> AttentionTensor:
        """The attention tensor of an input that was recorded."""
        return AttentionTensor(FrozenOperator(recording), self.context(prepared, recording))

    @cached_property
    def anatomy(self) -> Anatomy:
        """Where the model's parts are by its module tree alone; an input may show them to be elsewhere."""
        return find_anatomy(self.model, blocks=self._blocks)

    @property
    def pad_id(self) -> int:
        """The token that fills up the shorter texts of a batch; it is masked, so that any would do."""
        found = getattr(tokenizer_of(self.processor), "pad_token_id", None)
        found = getattr(getattr(self.model, "config", None), "pad_token_id", None) if found is None else found
        return found if isinstance(found, int) and found >= 0 else 0

    def context(self, prepared: ModelInput, recording: Recording, n_tokens: int | None = None) -> Context:
        """What maps should say of an input.

        Args:
            prepared: The input.
            recording: Its recording, or that of a batch with it.
            n_tokens: Its number of tokens, where the recording is of longer ones too.
        """
        n_tokens = n_tokens or recording.states[0].shape[1]
        meta: dict[str, Any] = {"model": self.name, "versions": package_versions()}
        anatomy = recording.from_model("A map").anatomy
        if anatomy.beside:
            meta["beside"] = said_of(anatomy.stack, anatomy.beside)
        if prepared.text is not None:
            meta["text"] = prepared.text
            if prepared.offsets is not None and len(prepared.offsets) == n_tokens:
                meta["offsets"] = [pair and list(pair) for pair in prepared.offsets]
        if is_causal(self.model):
            meta["causal"] = True
        grid = prepared.grid(self.model)
        if grid is not None and grid[0] * grid[1] <= n_tokens:
            meta["grid"] = {"rows": grid[0], "columns": grid[1], "first": n_tokens - grid[0] * grid[1]}
            meta["image"] = prepared.image
        tokens = prepared.labels(n_tokens, self.model, self.processor)
        n_out = recording.states[-1].shape[1]
        n_out = n_tokens if n_out == recording.states[0].shape[1] else n_out
        out_tokens = _out_labels(tokens, n_out, is_decoder=recording.n_encoder_blocks > 0)
        return Context(tokens=tokens, classes=self._classes(recording), meta=meta, out_tokens=out_tokens)

    def _classes(self, recording: Recording) -> Classes | None:
        if recording.readout is None:
            return None
        if recording.head is not None:
            return Classes(n_classes=len(recording.head.weight), tokenizer=tokenizer_of(self.processor))
        labels = getattr(getattr(self.model, "config", None), "id2label", None)
        return Classes(
            n_classes=recording.readout.shape[-1],
            labels=labels or {i: str(i) for i in range(recording.readout.shape[-1])},
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
        {"return_dict": True}
        if "return_dict" in parameters or open_ended and hasattr(model, "base_model_prefix")
        else {}
    )


def _out_labels(tokens: tuple[str, ...], n_out: int, *, is_decoder: bool) -> tuple[str, ...] | None:
    """Labels of outputs that are not the inputs: the decoder's tokens, or places after patches were merged."""
    if n_out == len(tokens):
        return None
    return tokens[len(tokens) - n_out :] if is_decoder else tuple(str(position) for position in range(n_out))
