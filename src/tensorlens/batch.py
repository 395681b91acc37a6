"""`Batch`: several inputs that share one recording, and the maps of all of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from tensorlens.errors import InputError, MethodError, TensorLensError, check_iterable
from tensorlens.folding.search import state_of
from tensorlens.freezing.conventions import Rules
from tensorlens.freezing.places import Span
from tensorlens.freezing.proof import TOLERANCE_TF32, TOLERANCES, Proof, known_proof, remember_proof, tolerance_of
from tensorlens.freezing.recording import Recording
from tensorlens.freezing.replay import FactorReplay, Replay, logits_at
from tensorlens.maps.batch_question import BatchQuestion, predictions
from tensorlens.maps.batched import BATCHED, PULLS_ONLY, record_samples
from tensorlens.maps.methods import Answer, check_question
from tensorlens.maps.targets import Target
from tensorlens.maps.token_map import TokenMap
from tensorlens.models.anatomy import Anatomy
from tensorlens.models.collated import Collated
from tensorlens.models.inputs import ModelInput
from tensorlens.models.plain_pass import own_modes
from tensorlens.models.precision import tf32_allowed
from tensorlens.operators.base import check_token
from tensorlens.tensor import AttentionTensor, Context


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
        methods: All that will be asked: only what they need is recorded, and what several of them need is computed
            once. Anything may be asked if None.
        probes: Of `tensor.norm` among them; None if it is to be exact.

    Attributes:
        was_cut: Whether a tensor of one sample was cut out of the shared recording.
    """

    def __init__(
        self, lens: Source, prepared: Sequence[ModelInput], methods: Collection[str] | None = None,
        probes: int | None = None,
    ) -> None:  # fmt: skip
        if not prepared:
            raise InputError("A batch needs at least one input; got none.")
        self.lens, self.prepared = lens, tuple(prepared)
        collated = Collated(prepared, lens.model, lens.pad_id)
        self.lengths, self.is_padded = collated.lengths, collated.is_padded
        anatomy, arguments = lens.recording_arguments(collated.arguments)
        sketched = {"tensor.norm"} if probes is not None else frozenset()
        keeps_factors = not methods or not (PULLS_ONLY | sketched).issuperset(methods)
        keeps_factors |= not lens.rules.include_final_norm  # the graph does not end there: pulls go by factors
        self.replay = FactorReplay(
            record_samples(anatomy, arguments, lens.rules, len(prepared), keeps_factors=keeps_factors)
        )
        self.methods = frozenset(methods or ()) - sketched
        self._shared: dict[Any, dict[str, Any]] = {}
        self._contexts: dict[tuple[int, int], Context] = {}
        self.was_cut = False

    def __repr__(self) -> str:
        """One line: how many inputs, and how long they are."""
        lengths = sorted({length or self.replay.recording.states[0].shape[1] for length in self.lengths})
        return f"Batch({len(self)} inputs of {' to '.join(map(str, dict.fromkeys([lengths[0], lengths[-1]])))} tokens)"

    def __len__(self) -> int:
        return len(self.prepared)

    def __iter__(self) -> Iterator[AttentionTensor]:
        return (self[i] for i in range(len(self)))

    def is_separable(self) -> bool:
        """Whether two samples give what they give alone: what a model takes from one for all is right for that one."""
        return len(self) == 1 or all(map(self._is_as_alone, {self._shortest, 0}))

    @property
    def _shortest(self) -> int:
        return min(range(len(self)), key=lambda i: (self.lengths[i], -i))  # the last of them

    def _is_as_alone(self, i: int) -> bool:
        alone = self.lens(self.prepared[i]).output
        state = self.replay.recording.states[-1][i, : len(alone)]
        # Code may cast its norms to float32, whatever the type of the states.
        tolerance = max(TOLERANCES[torch.float64], 100 * torch.finfo(alone.dtype).eps ** 0.75)
        tolerance = max(tolerance, TOLERANCE_TF32) if tf32_allowed() and alone.is_cuda else tolerance
        return bool((state - alone).norm() <= tolerance * alone.norm())

    def check(self) -> None:
        """Compare samples with what they are alone."""
        if not self.is_separable():
            raise InputError(
                "A batch needs a model to which samples and their padding are separate; together they give other "
                "numbers than alone. (Where a model puts its samples second, as many of them as there are tokens "
                "cannot be told from tokens.) Pass them to `lens.maps`, which finds out which ones can go together."
            )

    @own_modes
    def __getitem__(self, i: Any) -> Any:
        """The attention tensor of one sample.

        By a recording of its own if it is shorter than the longest, or if its part of the factors cannot be cut out.
        """
        if isinstance(i, slice):
            return [self[one] for one in range(*i.indices(len(self)))]
        i = check_token(i, len(self), "sample")
        if self.is_padded and self.lengths[i] < max(self.lengths):
            return self.lens(self.prepared[i])
        if self.replay.recording.n_encoder_blocks or not self._samples_can_be_cut:
            return self.lens(self.prepared[i])
        self.was_cut = True
        return self.lens.tensor(self.prepared[i], FactorReplay(self.replay.recording.sample(i)))

    @cached_property
    def _samples_can_be_cut(self) -> bool:
        """Whether the last sample, cut out of the batch, is what the batch makes of it.

        Which axis of a factor counts samples is told by its length alone, and a model may lay it out otherwise. Not the
        first sample: what was not cut may come out as the first of several.
        """
        if len(self) == 1:
            return True
        recording, generator = self.replay.recording, torch.Generator().manual_seed(0)
        span, last, edges = Span(0, recording.n_blocks), len(self) - 1, (recording.states[0], recording.states[-1])
        x, u = (torch.randn(state.shape, generator=generator).to(state) for state in edges)
        cut = FactorReplay(recording.sample(last))
        try:
            alone = cut.push(x[last:], span), cut.pull(u[last:], span)
        except (RuntimeError, IndexError, ValueError):  # of shapes that do not fit
            return False
        together = self.replay.push(x, span)[last:], self.replay.pull(u[None], span)[0, last:]
        accepted = tolerance_of(x.dtype, x.dtype, is_tf32=x.is_cuda and tf32_allowed())
        return all(
            one.shape == other.shape and bool((one - other).norm() <= accepted * other.norm())
            for one, other in zip(alone, together, strict=True)
        )

    @own_modes
    def maps(
        self, method: str = "tensor.in_out", out_token: int = -1, target: Target | None = None, *,
        targets: Sequence[Target] | None = None, probes: int | None = None, seed: int = 0,
    ) -> list[TokenMap]:  # fmt: skip
        """A map of one output of each sample; what these are is said at `AttentionTensor.map`.

        The first time a model answers so, two samples are mapped alone and compared; if they differ all are, and the
        maps say so.

        Args:
            method: A name in `METHODS`.
            out_token: The output to explain; negative ones count from each sample's own end.
            target: For `tensor.in_class`.
            targets: The same, one for each sample, instead of one for all.
            probes: For `tensor.norm`.
            seed: Seed for the probes.
        """
        made = self.begin(method, out_token, target, targets=targets, probes=probes, seed=seed)()
        if method not in BATCHED:
            return made

        def alone(i: int) -> TokenMap:
            its = target if targets is None else targets[i]
            return map_of(self.lens(self.prepared[i]), method, out_token, its, probes=probes, seed=seed)

        kinds = tuple(sorted({type(one).__name__ for one in (target, *(targets or ()))}))
        if self._is_proved((method, out_token < 0, kinds, probes is None), made, alone):
            return made
        said = {"fallback": "samples of this batch gave other numbers together than alone; each was mapped alone"}
        return [replace(found, meta=found.meta | said) for found in map(alone, range(len(self)))]

    def _is_proved(self, asked: tuple[Any, ...], made: list[TokenMap], alone: Callable[[int], TokenMap]) -> bool:
        """Whether the maps of the shortest and of a longest sample are what they are alone.

        Found out once for a state of the model, a kind of question, and as many samples and tokens to a power of two.
        """
        recording = self.replay.recording
        sizes = [size.bit_length() for size in recording.states[0].shape[:2]]
        key = ("batched", *asked, *sizes, self.is_padded, *state_of(recording))
        proof = None if recording.fingerprint is None else known_proof(recording.model, key)
        if proof is None:
            longest = max(range(len(self)), key=lambda i: (self.lengths[i], i))
            found = [difference(made[i], alone(i), recording.states[0].dtype) for i in {self._shortest, longest}]
            error, tolerance = max(error for error, _ in found), found[0][1]
            tolerance = max(tolerance, TOLERANCE_TF32) if tf32_allowed() and recording.states[0].is_cuda else tolerance
            proof = remember_proof(recording.model, key, Proof(error, tolerance))
        return proof.holds

    def begin(
        self, method: str, out_token: int, target: Target | None, *, targets: Sequence[Target] | None = None,
        probes: int | None = None, seed: int = 0,
    ) -> Callable[[], list[TokenMap]]:  # fmt: skip
        """Begin the work of `maps` on the device; what this returns waits for it, and gives maps that are not proved.

        Args:
            method: As for `maps`, and so are the others.
            out_token: The output to explain.
            target: For `tensor.in_class`.
            targets: One for each sample in place of `target`.
            probes: For `tensor.norm`.
            seed: Seed for the probes.
        """
        check_question(method, target, probes=probes, seed=seed)
        probes, seed = probes and int(probes), int(seed)  # numpy's as plain ones
        targets = None if targets is None else check_iterable(targets, "targets", "a target for each sample")
        if targets is not None and len(targets) != len(self):
            raise InputError(f"`targets` must be one for each of the {len(self)} samples; got {len(targets)}.")
        pending = self.begin_together(method, out_token, target, targets=targets, probes=probes, seed=seed)
        if pending is not None:
            return pending
        each = zip(self, [target] * len(self) if targets is None else targets, strict=True)
        found = [map_of(one, method, out_token, its, probes=probes, seed=seed) for one, its in each]
        return lambda: found

    @own_modes
    def begin_together(
        self, method: str, out_token: int, target: Target | None = None, *, targets: Sequence[Target] | None = None,
        probes: int | None = None, seed: int = 0,
    ) -> Callable[[], list[TokenMap]] | None:  # fmt: skip
        """The same for all samples at once; None where this method has no such way for this model."""
        if self.replay.recording.n_encoder_blocks:  # whose outputs are those of a second text
            return None
        asked = self._question(out_token, target, targets, probes, seed)
        try:
            pending = BATCHED[method](asked) if method in BATCHED else None
        except MethodError:  # each sample by itself says why, or has another way
            return None
        if pending is None:
            return None
        said, places = predictions(asked), asked.out_tokens.tolist()

        def finish() -> list[TokenMap]:
            found = zip(places, pending(), said(), strict=True)
            return [self._map(i, method, place, answer, note) for i, (place, answer, note) in enumerate(found)]

        return finish

    def _question(
        self, out_token: int, target: Target | None, targets: Sequence[Target] | None, probes: int | None, seed: int
    ) -> BatchQuestion:
        recording = self.replay.recording
        n_out = [length or recording.states[-1].shape[1] for length in self.lengths]
        places = torch.tensor([check_token(out_token, n) for n in n_out])
        return BatchQuestion(
            replay=self.replay, lengths=tuple(length or recording.states[0].shape[1] for length in self.lengths),
            out_tokens=places, target=target, targets=targets, probes=probes, seed=seed,
            classes=self._context(0, recording.states[0].shape[1]).classes, methods=self.methods,
            shared=self._shared.setdefault((out_token, repr(target)), {}) if targets is None else {},
        )  # fmt: skip

    def _context(self, i: int, n_tokens: int) -> Context:
        if (i, n_tokens) not in self._contexts:
            recording = self.replay.recording
            self._contexts[i, n_tokens] = self.lens.context(self.prepared[i], recording, n_tokens=n_tokens)
        return self._contexts[i, n_tokens]

    def release(self) -> None:
        """Let go of the graph, when nothing more will be begun."""
        self.replay = FactorReplay(replace(self.replay.recording, graph=None))
        for of_question in self._shared.values():
            of_question.clear()

    def _map(self, i: int, method: str, place: int, answer: Answer, notes: dict[str, Any]) -> TokenMap:
        context = self._context(i, answer.scores.shape[1])
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


def difference(one: TokenMap, other: TokenMap, dtype: torch.dtype | None = None) -> tuple[float, float]:
    """How far two maps of one sample are from each other, relative, and what rounding may account for.

    Args:
        one: A map.
        other: Another.
        dtype: Of the model, whose scores some baselines have in a finer type.
    """
    eps = max(torch.finfo(dtype or one.scores.dtype).eps, torch.finfo(one.scores.dtype).eps)
    tolerance = min(0.1, max(TOLERANCES[torch.float64], 100 * eps**0.75))  # norms may be in float32 all the same
    if one.scores.shape != other.scores.shape:
        return math.inf, tolerance
    scale = other.scores.double().norm().clamp_min(torch.finfo(torch.float64).tiny)
    return float((one.scores.double() - other.scores.double()).norm() / scale), tolerance
