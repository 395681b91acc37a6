"""`Specimen`: a model with its processor and rules. Every question begins here: inputs are made, and recorded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from tensorlens.__about__ import package_versions
from tensorlens.errors import InputError, NotLinearError, TensorLensError
from tensorlens.maps.targets import Classes, Context
from tensorlens.models.anatomy import Anatomies, Anatomy, find_anatomy
from tensorlens.models.around import said_of
from tensorlens.models.evidence import Evidence
from tensorlens.models.inputs import ModelInput, check_arguments, constant_arguments, is_causal, make_input, token_ids
from tensorlens.models.pictures import data_uri
from tensorlens.models.samples import make_inputs
from tensorlens.models.texts import tokenizer_of
from tensorlens.operators.operator import FrozenOperator
from tensorlens.recording.conventions import Rules
from tensorlens.recording.recorder import record
from tensorlens.recording.recording import Recording, Span
from tensorlens.recording.rules.attention import settled_block, tokens_to_try
from tensorlens.tensor import AttentionTensor
from tensorlens.tolerances import repeated


class Specimen:
    """A model with everything needed to record it.

    Args:
        model: The user's model.
        processor: Its tokenizer, image processor or processor.
        rules: The conventions.
        blocks: Path of the list of blocks, where the guess is wrong.
        name: Name of the model in maps.
    """

    def __init__(self, model: nn.Module, processor: Any, rules: Rules, blocks: str | None, name: str) -> None:
        self.model, self.processor, self.rules, self.name = model, processor, rules, name
        self.anatomies, self.blocks = Anatomies(model, blocks), blocks
        self._is_forward: bool | None = None

    def prepare(self, value: Any) -> ModelInput:
        """The model's input, from anything that a lens takes."""
        return value if isinstance(value, ModelInput) else make_input(value, self.model, self.processor)

    def prepare_all(self, values: Sequence[Any], *, truncate: bool = False) -> list[ModelInput | TensorLensError]:
        """For each input the model's arguments, or the error that it would raise; texts are tokenised together.

        Args:
            values: The inputs.
            truncate: Whether a text that is too long for the model is cut at its end.
        """
        return make_inputs(values, self.model, self.processor, truncate=truncate)

    def arguments(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Arguments of the model with the constant ones: no cache, outputs by name."""
        arguments = arguments | constant_arguments(self.model)
        check_arguments(self.model, arguments)
        return arguments

    def record(self, arguments: dict[str, Any], *, n_samples: int = 1) -> Recording:
        """Run the model once on some arguments and record its program."""
        found = self._record(arguments, self._rules_at(arguments), n_samples)
        self._refuse_seeing_first(found)
        return found

    def _record(self, arguments: dict[str, Any], rules: Rules, n_samples: int) -> Recording:
        arguments = self.arguments(arguments)
        anatomy = self.anatomies.at(arguments)
        seen, self.anatomies.seen = self.anatomies.seen, None  # nothing remains of a cancelled recording
        found = record(anatomy, arguments, rules, n_samples=n_samples)
        if found.origin is not None and found.origin.anatomy is not anatomy:
            self.anatomies.learn(arguments, found.origin.anatomy)
        if seen is not None:
            refuse_other_numbers(found, seen)
        return found

    # Held sinks -------------------------------------------------------------------------------------------------------

    def _rules_at(self, arguments: dict[str, Any]) -> Rules:
        """The rules, with the block from which on a sink is held: block 0 for a token that begins every text."""
        if self.rules.sink != "hold":
            return self.rules
        ids, begins = token_ids(arguments), getattr(getattr(self.model, "config", None), "bos_token_id", None)
        is_begun = ids is not None and isinstance(begins, int) and bool((ids[:, 0] == begins).all())
        return replace(self.rules, sink=0 if is_begun else self._settled())

    def _settled(self) -> int:
        """The first block at which the first position no longer depends on its token, measured on common ones."""
        if self.anatomies.settled is not None:
            return self.anatomies.settled
        try:
            table: Any = self.model.get_input_embeddings()  # type: ignore[operator]
            ids = tokens_to_try(table.num_embeddings).to(table.weight.device)
            tried = self._record({"input_ids": ids}, Rules(), len(ids))
        except (TensorLensError, AttributeError) as error:
            raise InputError(
                f"Where the sink of `{type(self.model).__name__}` begins is measured on single tokens, which it "
                f"does not take ({error!s:.200}). Pass the block instead, as in Rules(sink=5)."
            ) from error
        self.anatomies.settled = settled_block(tried)
        return self.anatomies.settled

    def _refuse_seeing_first(self, recording: Recording) -> None:
        """Refuse a held sink in a model whose first position sees others: their columns would change with it."""
        if recording.rules.sink != "live" and recording.states[-1].shape[1] > 1 and not self._reads_forward(recording):
            raise InputError(
                "`sink` can only be kept fixed in a causal model, where the first position attends only to itself; in "
                f"`{recording.name}` it attends to others. Leave `sink` out of the rules."
            )

    def _reads_forward(self, recording: Recording) -> bool:
        """Whether the first of several positions depends on itself alone, as in a causal model; measured once."""
        if recording.n_encoder_blocks:
            return False
        if self._is_forward is None:
            u = torch.zeros_like(recording.states[-1])
            u[:, 0] = 1
            self._is_forward = not bool(recording.pull(u, Span(0, recording.n_blocks))[:, 1:].any())
        return self._is_forward

    def look(self, prepared: ModelInput) -> AttentionTensor:
        """The attention tensor at one input."""
        recording = self.record(prepared.arguments)
        return AttentionTensor(FrozenOperator(recording), self.context(prepared, recording))

    @cached_property
    def anatomy(self) -> Anatomy:
        """Where the model's parts are, according to its module tree; an input may show something else."""
        return find_anatomy(self.model, blocks=self.blocks)

    @property
    def pad_id(self) -> int:
        """The token that pads the shorter texts of a batch: the tokenizer's, else the model's, else 0.

        It is masked, so any token would do; batches are checked for models that react to padding.
        """
        found = getattr(tokenizer_of(self.processor), "pad_token_id", None)
        found = getattr(getattr(self.model, "config", None), "pad_token_id", None) if found is None else found
        return found if isinstance(found, int) and found >= 0 else 0

    # What maps say ----------------------------------------------------------------------------------------------------

    def context(self, prepared: ModelInput, recording: Recording, n_tokens: int | None = None) -> Context:
        """The context that maps of an input record.

        Args:
            prepared: The input.
            recording: Its recording, or that of a batch with it.
            n_tokens: Its number of tokens, if the recording has longer samples too.
        """
        n_tokens = n_tokens or recording.states[0].shape[1]
        meta: dict[str, Any] = {"model": self.name, "versions": dict(package_versions())}
        anatomy = recording.anatomy
        if anatomy.beside:
            meta["beside"] = said_of(anatomy.stack, anatomy.beside)
        if prepared.text is not None:
            meta["text"] = prepared.text
            if prepared.offsets is not None and len(prepared.offsets) == n_tokens:
                meta["offsets"] = [pair and list(pair) for pair in prepared.offsets]
        if is_causal(self.model) or self._is_own_reader(recording):
            meta["causal"] = True
        grid = prepared.grid(self.model)
        if grid is not None and grid[0] * grid[1] <= n_tokens:
            meta["grid"] = {"rows": grid[0], "columns": grid[1], "first": n_tokens - grid[0] * grid[1]}
            if prepared.picture is not None:
                seen = prepared.seen(self.model)
                meta["seen"] = seen and list(seen)
                meta["image"] = seen and data_uri(prepared.picture.image, seen)
        tokens = prepared.labels(n_tokens, self.model, self.processor)
        n_out = recording.states[-1].shape[1]
        n_out = n_tokens if n_out == recording.states[0].shape[1] else n_out
        out_tokens = _out_labels(tokens, n_out, is_decoder=recording.n_encoder_blocks > 0)
        return Context(tokens=tokens, classes=self.classes(recording), meta=meta, out_tokens=out_tokens)

    def _is_own_reader(self, recording: Recording) -> bool:
        """Whether a model that transformers does not know predicts from left to right."""
        says_each = recording.readout is not None and not recording.pools and recording.states[-1].shape[1] > 1
        return says_each and not hasattr(self.model, "config") and self._reads_forward(recording)

    def classes(self, recording: Recording) -> Classes | None:
        """Names of the classes, or None for a model without a head."""
        if recording.readout is None:
            return None
        if recording.head is not None:
            return Classes(n_classes=len(recording.head.weight), tokenizer=tokenizer_of(self.processor))
        labels = getattr(getattr(self.model, "config", None), "id2label", None)
        n_classes, tokenizer = recording.readout.shape[-1], tokenizer_of(self.processor)
        if tokenizer is not None and recording.readout.dim() == 3 and len(labels or ()) != n_classes:
            return Classes(n_classes=n_classes, tokenizer=tokenizer)  # a vocabulary, after a head of a different form
        return Classes(n_classes=n_classes, labels=labels or {i: str(i) for i in range(n_classes)})


def refuse_other_numbers(recording: Recording, seen: Evidence) -> None:
    """Refuse a model whose output differs in a second pass: T would describe an arbitrary one of the two.

    Raises:
        NotLinearError: what enters the last block is not what entered it in a plain pass.
    """
    anatomy, last = recording.from_model("A recording").anatomy, recording.n_blocks - 1
    blocks = set(map(id, anatomy.blocks))
    calls = [
        one for one in seen.calls if id(one.module) in blocks and not any(id(h.module) in blocks for h in one.holders())
    ]
    if recording.n_encoder_blocks or len(calls) != recording.n_blocks or not calls[last].sizes:
        return
    state = recording.states[last]
    size = float(state.norm(dtype=torch.promote_types(state.dtype, torch.float32)))
    accepted = repeated(state.dtype) * size
    if all(abs(float(one) - size) > accepted for one in calls[last].sizes):
        raise NotLinearError(
            f"`{anatomy.model.__class__.__name__}` gave a different output in a second pass: what entered block {last} "
            f"had norm {float(calls[last].sizes[0]):.6g}, then {size:.6g}. Expected the same output for the same "
            "input; switch off randomness, and any state kept between calls outside its modules."
        )


def _out_labels(tokens: tuple[str, ...], n_out: int, *, is_decoder: bool) -> tuple[str, ...] | None:
    """Labels of outputs that are not the inputs: the decoder's tokens, or places after patches were merged."""
    if n_out == len(tokens):
        return None
    return tokens[len(tokens) - n_out :] if is_decoder else tuple(str(position) for position in range(n_out))
