"""`METHODS`: every map by name. A method is a name, a sentence, and a function from a `Question` to `Scored` rows.

A question has rows, one per requested output; each row belongs to a sample of the recording. One input has one
sample and perhaps many rows, a batch has many samples with a row each. Methods are written once for both. The command
line, the explorer and the studies iterate over this table, so all of them have every method.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cached_property
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from tensorlens.errors import InputError, MethodError, check_choice, check_seed, check_whole
from tensorlens.maps.targets import METHOD_OF_CLASSES, Classes, Target, no_head, own_prediction
from tensorlens.memory import on_its_way, sent
from tensorlens.operators.operator import FrozenOperator
from tensorlens.recording.recording import Recording
from tensorlens.tolerances import MAP_NOISE, in_float64

NormKind = Literal["frobenius", "spectral"]


class Chosen(NamedTuple):
    """The target of each row, as a weighted sum of logits.

    Attributes:
        ids: (row, k) classes.
        weights: (row, k) their weights.
    """

    ids: Tensor
    weights: Tensor

    def of(self, logits: Tensor) -> Tensor:
        """(row,): the weighted sum, from logits (row, k) of the classes of each row."""
        return (logits * self.weights.to(logits)).sum(1)

    def at(self, rows: Sequence[int]) -> Chosen:
        """The targets of some rows."""
        if len(rows) == len(self.ids):  # all rows: none is repeated
            return self
        return Chosen(self.ids[list(rows)], self.weights[list(rows)])


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question to a method.

    Attributes:
        operator: The attention tensor, with its recording; for several samples, that of the first one.
        out_tokens: The output of each row.
        samples: The sample of each row.
        lengths: Tokens of each sample without padding, if the question is about all samples of a recording.
        target: The target of In+Class; None for the model's own prediction at each output.
        targets: Targets per row, instead of one for all.
        classes: Names of the classes, or None for a model without a head.
        norm: Which norm `tensor.norm` takes of a block.
        probes: How many random probes to sketch norms with; None for exact ones.
        seed: Random seed for the probes.
        raw: For baselines of norms: join the blocks' matrices as they are, without dividing rows by their sums.
        weighed: A part of the input (token, channel) to weigh instead of the whole input.
        shared: Results shared by several methods.
    """

    operator: FrozenOperator
    out_tokens: tuple[int, ...]
    samples: tuple[int, ...] = ()
    lengths: tuple[int, ...] = ()
    target: Target | None = None
    targets: Sequence[Target] | None = None
    classes: Classes | None = None
    norm: NormKind = "frobenius"
    probes: int | None = None
    seed: int = 0
    raw: bool = False
    weighed: Tensor | None = None
    shared: dict[Any, Any] = field(default_factory=dict, repr=False)

    @property
    def recording(self) -> Recording:
        """The recording of the pass, for one sample or several."""
        return self.operator.recording

    @property
    def is_batch(self) -> bool:
        """Whether it is about all samples of a recording, with one row per sample."""
        return len(self.lengths) > 1

    @cached_property
    def of(self) -> tuple[int, ...]:
        """The sample of each row."""
        return self.samples or (0,) * len(self.out_tokens)

    def layers(self) -> Iterator[list[int]]:
        """Rows in groups with at most one row per sample: a group is one pull, since samples do not mix."""
        left = list(range(len(self.out_tokens)))
        while left:
            first: dict[int, int] = {}
            for row in left:
                first.setdefault(self.of[row], row)
            layer = list(first.values())
            yield layer
            left = [row for row in left if row not in set(layer)]

    def at_outputs(self, states: Tensor) -> Tensor:
        """Each row's own output of states (sample, token, …): (row, …)."""
        return states[self._places(range(len(self.out_tokens)), states.device)]

    # What rows explain ------------------------------------------------------------------------------------------------

    @property
    def has_classes(self) -> bool:
        """Whether the outputs have logits."""
        return self.classes is not None and self.recording.readout is not None

    @cached_property
    def logits(self) -> Tensor:
        """(row, class) at each row's output."""
        recording, readout = self.recording, self.recording.readout
        assert readout is not None, "only for a model with a head"
        if recording.head is not None:
            places = self._places(range(len(self.out_tokens)), readout.device, read=True)
            return torch.nn.functional.linear(readout[places], recording.head.weight, recording.head.bias)
        return readout[list(self.of)] if readout.dim() == 2 else self.at_outputs(readout)

    @cached_property
    def chosen(self) -> Chosen:
        """The target of each row as weights on logits.

        Raises:
            MethodError: the model has no head.
        """
        if self.classes is None or self.recording.readout is None:
            raise no_head(self.recording.name)
        device = self.recording.readout.device
        if self.target is None and self.targets is None:
            best = own_prediction(self.logits)
            return Chosen(best[:, None], torch.ones(len(best), 1, device=device))
        wanted = [self.target] * len(self.out_tokens) if self.targets is None else self.targets
        found = [list(self.classes.weights(one).items()) for one in wanted]  # type: ignore[arg-type]
        longest = max(map(len, found))
        filled = [some + [(0, 0.0)] * (longest - len(some)) for some in found]
        ids = sent([[index for index, _ in some] for some in filled], device)
        return Chosen(ids, sent([[weight for _, weight in some] for some in filled], device))

    @cached_property
    def chosen_logits(self) -> Tensor:
        """(row,): the value of each row's target at the input."""
        assert self.recording.readout is not None, "a target has a head"
        return self.explained(self.recording.readout, range(len(self.out_tokens)))

    def explained(self, end: Tensor, rows: Sequence[int]) -> Tensor:
        r"""(row,): the value of some rows' targets, from the end of a pass of all samples.

        $\sum_c w_c\,\mathrm{logit}_c$ of the target, which reads only classes with a weight; without classes
        the length along the output state, $⟨X^N_i, \mathrm{end}_i⟩$.
        """
        head = self.recording.head
        places = self._places(rows, end.device, read=self.has_classes and head is not None)
        read = end[places[0]] if end.dim() == 2 else end[places]  # (row, channel), or (row, class) without a known head
        if not self.has_classes:
            return (read * self.recording.states[-1][places].to(end)).sum(-1)
        chosen = self.chosen.at(rows)
        if head is None:
            return chosen.of(read.gather(1, chosen.ids))
        logits = (head.weight[chosen.ids] * read[:, None]).sum(-1)  # (row, k): of the classes with a weight
        return chosen.of(logits if head.bias is None else logits + head.bias[chosen.ids])

    # Pulls ------------------------------------------------------------------------------------------------------------

    def weigh(self, starts: Tensor) -> Weighed:
        r"""$⟨(T^\top u)_j, x_j⟩$ by input token, for a cotangent (row, channel) at each row's output."""
        if not self.is_batch:
            return self._weigh_one(starts)
        x = self.recording.states[0]
        return self._by_layers(
            lambda layer: self.operator.pull_samples(self.placed(self.recording.states[-1], layer, starts)), x
        )

    def weigh_logits(self) -> Weighed:
        r"""The same for the target of each row, from the input of the head."""
        recording = self.recording
        assert recording.readout is not None, "a target has a head"
        ids, weights = self.chosen
        if recording.head is None:
            columns = torch.zeros_like(self.logits).scatter_add(1, ids, weights.to(self.logits))
        else:
            weight = recording.head.weight
            columns = (weight[ids] * weights.to(weight)[..., None]).sum(1)
        if not self.is_batch:
            rows = [recording.at_readout(one, i) for one, i in zip(columns, self.out_tokens, strict=True)]
            return _weighed(self.operator.pull_from_head(torch.cat(rows)), self._input)
        readout, x = recording.readout, recording.states[self.operator.span.start]
        return self._by_layers(
            lambda layer: self.operator.pull_samples(self.placed(readout, layer, columns, read=True), to_logits=True),
            x,
        )

    @property
    def _input(self) -> Tensor:
        return self.operator.input if self.weighed is None else self.weighed

    def _weigh_one(self, starts: Tensor) -> Weighed:
        x = self._input
        scores, sizes = (x.new_zeros(len(self.out_tokens), len(x)) for _ in range(2))
        for piece in self.operator.pull_outputs(self.out_tokens, starts[:, None]):
            tokens = slice(*piece.tokens)
            found = _weighed(piece.rows.transpose(0, 1).to(x), x[tokens])  # (output, token) of this piece
            scores[slice(*piece.outputs), tokens] = found.scores
            sizes[slice(*piece.outputs), tokens] = found.sizes
        return Weighed(scores, sizes)

    def _by_layers(self, pull: Callable[[list[int]], Tensor], x: Tensor) -> Weighed:
        parts: dict[int, Tensor] = {}
        sizes: dict[int, Tensor] = {}
        for layer in self.layers():
            found = _weighed(pull(layer), x)
            for row in layer:
                parts[row], sizes[row] = found.scores[self.of[row]], found.sizes[self.of[row]]
        n = range(len(self.out_tokens))
        return Weighed(torch.stack([parts[row] for row in n]), torch.stack([sizes[row] for row in n]))

    def placed(self, like: Tensor, layer: list[int], starts: Tensor, *, read: bool = False) -> Tensor:
        """Cotangents (sample, token, channel) of the rows of a layer, at their outputs or where the head reads."""
        u = torch.zeros_like(like)
        places = self._places(layer, like.device, read=read)
        u[places[0] if like.dim() == 2 else places] = starts[layer].to(u)
        return u

    def _places(self, layer: Sequence[int], device: torch.device, *, read: bool = False) -> tuple[Tensor, Tensor]:
        """Samples and outputs of some rows, or the rows of the readout that belong to them."""
        outputs = [self.recording.place_read(self.out_tokens[row]) if read else self.out_tokens[row] for row in layer]
        return sent([self.of[row] for row in layer], device), sent(outputs, device)


class Weighed(NamedTuple):
    """Scores (row, token), and the sums of magnitudes over channels before cancellation."""

    scores: Tensor
    sizes: Tensor

    @property
    def kept(self) -> Tensor:
        """(row,): the part of the magnitudes that did not cancel."""
        total = in_float64(self.sizes).sum(1).clamp_min(torch.finfo(torch.float64).tiny)
        return in_float64(self.scores).abs().sum(1) / total


def _weighed(pulled: Tensor, x: Tensor) -> Weighed:
    products = pulled * x
    return Weighed(products.sum(-1), products.abs().sum(-1))


WARNING = (
    "these scores remain after large terms cancel ({kept:.0e} of their magnitudes), so rounding may be "
    "{noise:.0%} of them. Use a wider type, or rules that keep more fixed, such as `Rules.paper()`"
)


@dataclass(frozen=True, kw_only=True)
class Scored:
    """The result of a method.

    Attributes:
        scores: (row, in_token).
        bias_share: Share of the bias in each row; NaN if the method defines none.
        notes: Further entries for the `meta` of every map.
        by_row: Numbers per row for the `meta`, by name.
        chosen: The target of each row, if the method explains one.
        names: The names of these targets, once known.
    """

    scores: Tensor
    bias_share: Tensor
    notes: dict[str, Any] = field(default_factory=dict)
    by_row: dict[str, Tensor] = field(default_factory=dict)
    chosen: Chosen | None = None
    names: tuple[str, ...] | None = None

    def meta(self, rows: slice | int = slice(None)) -> dict[str, Any]:
        """Notes for a map of some rows, or of one."""
        chosen = slice(rows, rows + 1) if isinstance(rows, int) else rows
        found: dict[str, Any] = dict(self.notes)
        if self.names is not None:
            names = self.names[chosen]
            found["explains" if found.pop("explains", None) else "target"] = (
                names[0] if len(set(names)) == 1 else list(names)
            )
        for name in ("logit", "sink_gives"):
            if name in self.by_row:
                found[name] = self.by_row[name][chosen].tolist()
        if "kept" in self.by_row:
            kept, noise = self.by_row["kept"][chosen], self.by_row["noise"][chosen]
            found["kept"] = kept.tolist()
            worst = int(noise.argmax())
            if float(noise[worst]) > MAP_NOISE:
                found["warning"] = WARNING.format(kept=float(kept[worst]), noise=min(1.0, float(noise[worst])))
        return found


@dataclass(frozen=True, kw_only=True)
class Method:
    """A way to make a map.

    Attributes:
        name: As in `METHODS`.
        summary: One-line description.
        compute: Answers a question.
        takes_target: Whether it explains a target.
        signed: Whether its scores may be negative, which decides the palette of its maps.
        takes_samples: Whether it answers for several samples at once.
        takes_probes: Whether random probes can estimate its scores.
    """

    name: str
    summary: str
    compute: Callable[[Question], Scored]
    takes_target: bool = False
    signed: bool = False
    takes_samples: bool = False
    takes_probes: bool = False


METHODS: dict[str, Method] = {}
"""Every map by name."""


def unknown_bias(question: Question) -> Tensor:
    """NaN per row: the bias share of a method without a bias."""
    return torch.full((len(question.out_tokens),), float("nan"))


def method(
    name: str, summary: str, **traits: bool
) -> Callable[[Callable[[Question], Scored]], Callable[[Question], Scored]]:
    """Register a function from `Question` to `Scored` as a method; its traits are those of `Method`."""

    def register(compute: Callable[[Question], Scored]) -> Callable[[Question], Scored]:
        METHODS[name] = Method(name=name, summary=summary, compute=compute, **traits)
        return compute

    return register


def joins_norms(name: str) -> bool:
    """Whether a method joins matrices of norms over blocks, whose rows do not sum to one."""
    join, _, measure = name.partition(".")
    return join in ("rollout", "mean") and not measure.startswith("attn")


def check_question(
    name: str,
    target: Target | None = None,
    norm: str = "frobenius",
    probes: int | None = None,
    seed: int = 0,
    *,
    raw: bool = False,
) -> None:
    """Refuse a method that does not exist, and options that it does not take."""
    if not isinstance(name, str) or name not in METHODS:
        near = get_close_matches(str(name), METHODS, n=3, cutoff=0.4)
        hint = f" Did you mean {' or '.join(near)}?" if near else ""
        raise MethodError(f"TensorLens has no method {name!r}.{hint} Methods: {', '.join(METHODS)}.")
    if target is not None and not METHODS[name].takes_target:
        raise MethodError(
            f"`{name}` takes no target; it explains the output state itself. Use `tensor.in_class` for a target."
        )
    if name != "tensor.norm" and norm != "frobenius":
        raise MethodError(f"`norm` is an option of `tensor.norm`; got it with `{name}`.")
    if probes is not None and not METHODS[name].takes_probes:
        known = " and ".join(f"`{one.name}`" for one in METHODS.values() if one.takes_probes)
        raise MethodError(f"`probes` is an option of {known}; got it with `{name}`.")
    if raw and not joins_norms(name):
        raise MethodError(f"`raw` is an option of rollouts and means of norms, such as rollout.w_attn; got `{name}`.")
    check_choice(norm, "norm", get_args(NormKind))
    if probes is not None:
        check_whole(probes, "probes", 1)
    check_seed(seed)


def check_out_token(question_token: object, pools: bool, name: str) -> None:
    """Refuse several outputs for a head that pools: it has one row, whatever the token."""
    if pools and question_token is not None and name == METHOD_OF_CLASSES:
        raise InputError(
            "This model's head reads the whole input at once, so `tensor.in_class` has one row. Leave `out_token` out."
        )


# From what a method found to maps -------------------------------------------------------------------------------------


def begin_finishing(found: Scored, classes: Classes | None) -> Callable[[], Scored]:
    """Start copying the result to the CPU; calling the returned function waits for the copy, not for later work."""
    scores, bias_share = on_its_way(found.scores), on_its_way(found.bias_share)
    by_row = {name: on_its_way(values) for name, values in found.by_row.items()}
    chosen = () if found.chosen is None or classes is None else [on_its_way(part) for part in found.chosen]

    def finish() -> Scored:
        rows = zip(*(part().tolist() for part in chosen), strict=True)  # (ids, weights) of each
        pairs = [{index: weight for index, weight in zip(*row, strict=True) if weight} for row in rows]
        return replace(
            found,
            scores=scores(),
            bias_share=bias_share(),
            by_row={name: wait() for name, wait in by_row.items()},
            names=tuple(classes.names(one) for one in pairs) if classes is not None and chosen else None,
        )

    return finish


def begin_predictions(question: Question) -> Callable[[], list[str | None]]:
    """The model's top prediction at each row's output; None for a model without a head."""
    classes = question.classes
    if classes is None or not question.has_classes:
        return lambda: [None] * len(question.out_tokens)
    best = on_its_way(own_prediction(question.logits))
    return lambda: [classes.name(index) for index in best().tolist()]
