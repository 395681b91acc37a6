"""`Batch`: several inputs that share one recording, and the maps of all of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from tensorlens.errors import InputError, TensorLensError
from tensorlens.freezing.conventions import Rules
from tensorlens.freezing.record import record
from tensorlens.freezing.recorder import RecordOptions
from tensorlens.freezing.recording import Recording
from tensorlens.freezing.replay import FactorReplay, Replay, logits_at
from tensorlens.maps.batched import BATCHED, PULLS_ONLY, BatchQuestion, predictions
from tensorlens.maps.methods import Answer
from tensorlens.maps.targets import Target
from tensorlens.maps.token_map import TokenMap
from tensorlens.models.anatomy import Anatomy
from tensorlens.models.forward_signature import token_ids
from tensorlens.models.inputs import ModelInput, forward_parameters
from tensorlens.models.plain_pass import own_modes
from tensorlens.operators.base import check_token
from tensorlens.tensor import AttentionTensor, Context

GRAPH_SHARE = 0.5
"""Part of the free memory that the graph of a batch may take: unlike that of one input, it is what was asked for."""


@runtime_checkable
class Source(Protocol):
    """What a batch asks of the lens that it came from."""

    model: nn.Module
    rules: Rules

    @property
    def pad_id(self) -> int:
        """The token that fills up shorter texts."""
        ...

    def prepare_all(self, values: Sequence[Any], *, truncate: bool = False) -> list[ModelInput | TensorLensError]:
        """For each input what the model takes, or the error that it would raise."""
        ...

    def recording_arguments(self, arguments: dict[str, Any]) -> tuple[Anatomy, dict[str, Any]]:
        """Where the model's parts are for such arguments, and the arguments with the constant ones."""
        ...

    def tensor(self, prepared: ModelInput, replay: Replay) -> AttentionTensor:
        """The attention tensor of an input that was recorded."""
        ...

    def context(self, prepared: ModelInput, recording: Recording, n_tokens: int | None = None) -> Context:
        """What maps should say of an input."""
        ...

    def __call__(self, value: Any) -> Any:
        """The attention tensor of an input."""


class Batch(Sequence[AttentionTensor]):
    """Attention tensors of several inputs that share one recording. Made by `Lens.batch`.

    Args:
        lens: Where it came from.
        prepared: The inputs.
        for_method: Record only what this method needs; everything if None.
    """

    def __init__(self, lens: Source, prepared: Sequence[ModelInput], for_method: str | None = None) -> None:
        if not prepared:
            raise InputError("A batch needs at least one input; got none.")
        self.lens, self.prepared = lens, tuple(prepared)
        collated = Collated(prepared, lens.model, lens.pad_id)
        self.lengths, self.is_padded = collated.lengths, collated.is_padded
        options = RecordOptions(
            n_samples=len(prepared), graph_share=GRAPH_SHARE, keeps_factors=for_method not in PULLS_ONLY
        )
        self.replay = FactorReplay(record(*lens.recording_arguments(collated.arguments), lens.rules, options))

    def __len__(self) -> int:
        return len(self.prepared)

    def __iter__(self) -> Iterator[AttentionTensor]:
        return (self[i] for i in range(len(self)))

    def check(self) -> None:
        """Compare the shortest sample with what it is alone."""
        if len(self) == 1:
            return
        shortest = min(range(len(self)), key=lambda i: self.lengths[i])
        alone = self.lens(self.prepared[shortest]).output
        state = self.replay.recording.states[-1][shortest, : len(alone)]
        tolerance = 100 * torch.finfo(alone.dtype).eps ** 0.75
        if not (state - alone).norm() <= tolerance * alone.norm():
            raise InputError(
                "A batch needs a model to which samples and their padding are separate; together they give other "
                "numbers than alone. Pass them to `lens.maps`, which finds out which ones can go together."
            )

    @own_modes
    def __getitem__(self, i: Any) -> Any:
        """The attention tensor of one sample; of a shorter one than the longest by a recording of its own."""
        if isinstance(i, slice):
            return [self[one] for one in range(*i.indices(len(self)))]
        i = check_token(i, len(self), "sample")
        if self.is_padded and self.lengths[i] < max(self.lengths):
            return self.lens(self.prepared[i])
        return self.lens.tensor(self.prepared[i], FactorReplay(self.replay.recording.sample(i)))

    @own_modes
    def maps(
        self, method: str = "tensor.in_out", out_token: int = -1, target: Target | None = None, *,
        probes: int | None = None, seed: int = 0,
    ) -> list[TokenMap]:  # fmt: skip
        """A map of one output of each sample; what these are is said at `AttentionTensor.map`.

        Args:
            method: A name in `METHODS`.
            out_token: The output to explain; negative ones count from each sample's own end.
            target: For `tensor.in_class`.
            probes: For `tensor.norm`.
            seed: Seed for the probes.
        """
        if method not in BATCHED or method == "tensor.norm" and probes is None:
            return [self._one_by_one(i, method, out_token, target, probes, seed) for i in range(len(self))]
        recording = self.replay.recording
        n_out = [length or recording.states[-1].shape[1] for length in self.lengths]
        places = torch.tensor([check_token(out_token, n) for n in n_out])
        asked = BatchQuestion(
            replay=self.replay, lengths=tuple(length or recording.states[0].shape[1] for length in self.lengths),
            out_tokens=places, target=target, classes=self.lens.context(self.prepared[0], recording).classes,
            probes=probes, seed=seed,
        )  # fmt: skip
        answers = BATCHED[method](asked)
        is_prediction = method == "tensor.in_class" and target is None
        said = [one.notes["target"] for one in answers] if is_prediction else predictions(asked)
        notes = [{} for _ in answers] if said is None else [{"prediction": one} for one in said]
        found = zip(places.tolist(), answers, notes, strict=True)
        return [self._map(i, method, place, answer, note) for i, (place, answer, note) in enumerate(found)]

    def _map(self, i: int, method: str, place: int, answer: Answer, notes: dict[str, Any]) -> TokenMap:
        context = self.lens.context(self.prepared[i], self.replay.recording, n_tokens=answer.scores.shape[1])
        labels = context.out_tokens or context.tokens
        pools = self.replay.recording.pools and method == "tensor.in_class"
        return TokenMap(
            scores=answer.scores,
            out_tokens=(answer.notes["target"],) if pools else (labels[place],),
            in_tokens=context.tokens,
            method=method,
            bias_share=answer.bias_share,
            meta=context.meta | {
                "out_positions": [0 if pools else place], "blocks": [0, self.replay.recording.n_blocks],
                "heads": None, "rules": self.lens.rules.as_dict(), "certificate": None, "engine": "batched",
            } | answer.notes | notes,
        )  # fmt: skip

    def _one_by_one(
        self, i: int, method: str, out_token: int, target: Target | None, probes: int | None, seed: int
    ) -> TokenMap:
        return map_of(self[i], method, out_token, target, probes=probes, seed=seed)


def map_of(
    tensor: AttentionTensor, method: str, out_token: int, target: Target | None, *, probes: int | None, seed: int
) -> TokenMap:
    """The map of one sample by itself, as one of a data set: it says what the model predicts too."""
    recording = tensor.operator.recording
    pools = recording.pools and method == "tensor.in_class"
    found = tensor.map(method, None if pools else out_token, target, probes=probes, seed=seed)
    if recording.readout is None or tensor.context.classes is None:
        return found
    place = check_token(out_token, tensor.shape[0])
    best = tensor.context.classes.name(int(logits_at(recording, 0 if recording.pools else place).argmax()))
    return replace(found, meta=found.meta | {"prediction": best})


class Collated:
    """The inputs of several samples as one: stacked where they are alike, padded at the end where lengths differ.

    Attributes:
        arguments: Keyword arguments of the model's forward.
        lengths: Tokens of each sample.
    """

    def __init__(self, prepared: Sequence[ModelInput], model: nn.Module, pad_id: int = 0) -> None:
        self.lengths = tuple(length_of(one) for one in prepared)
        names = prepared[0].arguments.keys()
        if any(one.arguments.keys() != names for one in prepared):
            raise InputError("A batch needs inputs of one kind; got samples with different arguments.")
        if len(prepared) > 1 and not all(map(has_sample_axis, prepared)):
            raise InputError("A batch needs inputs with an axis for samples; got some without. Call the lens on each.")
        self.arguments: dict[str, Any] = {
            name: _stack([one.arguments[name] for one in prepared], pad_id if name == "input_ids" else 0)
            for name in names
        }
        if self.is_padded and "attention_mask" in forward_parameters(model) and "attention_mask" not in names:
            places = torch.arange(max(self.lengths))[None] < torch.tensor(self.lengths)[:, None]
            self.arguments["attention_mask"] = places.long().to(next(model.parameters()).device)

    @property
    def is_padded(self) -> bool:
        """Whether any sample is shorter than the longest."""
        return len(set(self.lengths)) > 1


def length_of(prepared: ModelInput) -> int:
    """Tokens of one sample, as far as its arguments say; 0 for pictures and the like."""
    ids = token_ids(prepared.arguments)
    ids = prepared.arguments.get("inputs_embeds") if ids is None else ids
    return ids.shape[1] if isinstance(ids, Tensor) and ids.dim() > 1 else 0


def has_sample_axis(prepared: ModelInput) -> bool:
    """Whether every tensor of the input begins with an axis for samples; numbers for a plain module need not."""
    values = [value for value in prepared.arguments.values() if isinstance(value, Tensor)]
    least = 3 if prepared.kind == "values" else 1
    return all(value.dim() >= least and len(value) == 1 for value in values)


def _stack(values: list[Any], pad: int) -> Any:
    if isinstance(values[0], Mapping):
        return {
            name: _stack([value[name] for value in values], pad if name == "input_ids" else 0) for name in values[0]
        }
    if not isinstance(values[0], Tensor):
        return values[0]
    longest = max(value.shape[1] for value in values) if values[0].dim() > 1 else 0
    if values[0].dim() > 1 and any(value.shape[1] != longest for value in values):
        values = [torch.cat([v, v.new_full((1, longest - v.shape[1], *v.shape[2:]), pad)], 1) for v in values]
    return torch.cat(values)
