r"""Why are two inputs similar? The pair map of their vectors, exact.

With norms held, the vector of a text is affine in its input: $y_a = Σ_i y_{a,i} + P B$ with $y_{a,i} = P T (e_i ⊙ X)$.
So a dot product of two is a sum over pairs, $⟨y_a, y_b⟩ = Σ_{ij} ⟨y_{a,i}, y_{b,j}⟩$, biases as one more index.

The $y_{a,i}$ are one push per group of tokens, or one pull per channel. With those of one side known, the other side
need not be taken apart: a pull of each $y_{a,i}$ gives $⟨y_{a,i}, y_{b,j}⟩$ for all j. Whatever takes fewest passes is
done; so the words of a short query are pulled through long passages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from tensorlens.errors import InputError, check_iterable
from tensorlens.lens import Lens
from tensorlens.maps.groups import Groups, find_groups
from tensorlens.models.modes import own_modes
from tensorlens.models.pictures import cells
from tensorlens.pairs.pair_map import BIAS, Measure, PairMap
from tensorlens.pairs.pooling import Pooling, find_pooling, modules_of
from tensorlens.program.program import Program
from tensorlens.program.several import of_each
from tensorlens.tensor import AttentionTensor

AT_A_TIME = 64
"""Groups pushed, or channels pulled, before they are pooled: the states of all of them would be large."""


@own_modes
def similarity(
    lens: Any,
    a: Any,
    b: Any,
    *,
    other: Any = None,
    pooling: str | None = None,
    groups: Groups | None = None,
    measure: Measure = "cosine",
    against: Any = None,
) -> PairMap:
    """How much each pair of tokens, one of a and one of b, carries of the similarity of a and b.

    Args:
        lens: A lens on an encoder, or a `SentenceTransformer`.
        a: A text, or anything else that the lens takes: the rows.
        b: The same: the columns.
        other: The lens for b, for models with two towers; that of a if None.
        pooling: ``"mean"``, ``"cls"``, ``"last"``, ``"max"`` (its choice held); ``"late"``: the sum over the tokens of
            a of the largest similarity with a token of b (the choices held); None for the model's own.
        groups: Sum the pairs over groups of tokens: ``"words"``, ``"sentences"``, ``"lines"``, or a list of passages,
            those that stand in a for the rows and those in b for the columns; for patches of a picture
            ``{"regions": (rows, columns)}`` or ``{"regions": {"sky": (0, 0, 1, 0.5)}}``, with words on a side of text.
        measure: ``"cosine"``, with the norms held, or ``"dot"``.
        against: A third input c for the columns: why is b closer to a than c is? Scores are those of a and b, then
            those of a and c with the sign turned, and sum to the difference of the two similarities.

    Raises:
        InputError: A pooling that is not known, vectors of different widths, or a vector of norm zero.
    """
    sides = _Sides(lens, other, pooling, groups, measure)
    first, second = sides.look(a), sides.look(b, is_second=True)
    if against is None:
        return sides.compare(first, second)
    return _difference(sides.compare(first, second), sides.compare(first, sides.look(against, is_second=True)))


@own_modes
def similarities(
    lens: Any,
    query: Any,
    passages: Sequence[Any],
    *,
    other: Any = None,
    pooling: str | None = None,
    groups: Groups | None = None,
    measure: Measure = "cosine",
) -> list[PairMap]:
    """One pair map per passage, in their order; the query and each passage are recorded once.

    Args:
        lens: A lens on an encoder, or a `SentenceTransformer`.
        query: The rows of every map.
        passages: The columns, each as for `similarity`.
        other: The lens for passages; that of the query if None.
        pooling: As for `similarity`.
        groups: As for `similarity`.
        measure: As for `similarity`.
    """
    passages = check_iterable(passages, "passages", "texts or other inputs")
    sides = _Sides(lens, other, pooling, groups, measure)
    first = sides.look(query)
    return [sides.compare(first, sides.look(passage, is_second=True)) for passage in passages]


@dataclass(frozen=True, eq=False)
class _Side:
    """One input: its vector `whole` (place, channel), and how to take it apart by groups of tokens.

    There is one place, or one per token with late interaction. Vectors are float64 on the CPU.
    """

    taken: _Taken
    labels: tuple[str, ...]
    members: Tensor
    whole: Tensor

    @property
    def pooling(self) -> Pooling:
        """How its states become a vector."""
        return self.taken.pooling

    @cached_property
    def parts(self) -> Tensor:
        """(group + 1, place, channel): what each group gives of the vector, the bias last."""
        parts, whole = self.taken.parts(self.members), self.taken.whole()
        for projection in self.pooling.projections:
            parts, whole = projection(parts, whole)
        if not self.taken.is_exact:  # the bias is what is left, so that roundings do not add up
            parts[-1] = whole - parts[:-1].sum(0)
        return parts

    def pictures(self) -> list[dict[str, Any]]:
        """The picture that it is, with the group and the box of each patch; none for a text."""
        meta = self.taken.tensor.meta()
        grid = meta.get("grid")
        if not isinstance(grid, dict):
            return []
        group_of = self.members.double().argmax(0).tolist()
        boxes = cells(grid["rows"], grid["columns"])
        places = [[group_of[grid["first"] + k], *box] for k, box in enumerate(boxes)]
        return [{"image": meta.get("image"), "places": places}]

    @property
    def n_passes(self) -> int:
        """How many passes its parts take."""
        return 0 if "parts" in self.__dict__ else self.taken.n_passes(len(self.members))

    def carried(self, u: Tensor) -> Tensor:
        """(vector, group + 1): products of some vectors (vector, place, channel) with each part, by pulls."""
        before, wholes = self.taken.whole(), list[Tensor]()
        for projection in self.pooling.projections:
            wholes.append(before)
            _, before = projection(before[None].clone(), before)
        pulled = u
        for projection, whole in zip(reversed(self.pooling.projections), reversed(wholes), strict=True):
            pulled = projection.back(pulled, whole)
        found = self.taken.pull_back(pulled) @ self.members.double().T
        if self.taken.is_exact:
            bias = torch.einsum("kpc,pc->k", u, self._bias())
        else:
            bias = torch.einsum("kpc,pc->k", u, self.whole) - found.sum(1)
        return torch.cat([found, bias[:, None]], 1)

    def _bias(self) -> Tensor:
        parts, whole = self.taken.parts(self.members[:0]), self.taken.whole()
        for projection in self.pooling.projections:
            parts, whole = projection(parts, whole)
        return parts[-1]

    def norms(self, by_norm: bool) -> Tensor:
        """(place, 1): what the vector is divided by, held."""
        if not by_norm and not self.pooling.normalised:
            return torch.ones_like(self.whole[:, :1])
        norms = self.whole.norm(dim=-1, keepdim=True)
        if not bool((norms > 0).all()):
            raise InputError('The vector of an input is zero and has no cosine. Pass `measure="dot"`.')
        return norms


class _Sides:
    """Both encoders, and what is asked of them."""

    def __init__(self, lens: Any, other: Any, pooling: str | None, groups: Groups | None, measure: Any) -> None:
        if measure not in ("cosine", "dot"):
            raise InputError(f"`measure` must be cosine or dot; got {measure!r:.60}.")
        first = _as_lens(lens, "lens")
        self.encoders = (first, first if other is None else _as_lens(other, "other"))
        self.pooling, self.groups = pooling, groups
        self.measure: Measure = measure
        passages = groups if isinstance(groups, (list, tuple)) else ()
        self.not_found = {one for one in passages if isinstance(one, str)}

    def look(self, value: Any, *, is_second: bool = False) -> _Side:
        """Record one input and take its vector apart."""
        lens, modules = self.encoders[is_second]
        if isinstance(value, (list, tuple)) and value and not isinstance(value[0], int):
            raise InputError("Expected one input on each side, got a list. Use `similarities` for several passages.")
        prepared = lens.prepare(value)
        T = lens.specimen.look(prepared)
        pooling = find_pooling(self.pooling, lens.model, T.operator.recording, modules)
        labels, members = self._members(T)
        taken = _Taken(T, pooling, _mask(prepared.arguments.get("attention_mask"), T.shape[0]))
        whole = taken.whole()
        for projection in pooling.projections:
            _, whole = projection(whole[None].clone(), whole)
        return _Side(taken, (*labels, BIAS), members, whole)

    def _members(self, T: AttentionTensor) -> tuple[list[str], Tensor]:
        """The groups of the input tokens: labels, and which tokens each has (group, token)."""
        chosen = self.groups
        text = T.context.meta.get("text")
        if isinstance(chosen, (list, tuple)) and isinstance(text, str):  # a passage stands in one of the two texts
            chosen = [one for one in chosen if not isinstance(one, str) or one in text] or "tokens"
            self.not_found -= set(chosen)
        if isinstance(chosen, Mapping) and "regions" in chosen and "grid" not in T.context.meta:
            chosen = "words"  # regions are those of the other side
        found = find_groups("tokens" if chosen is None else chosen, T.tokens, T.context.meta)
        members = torch.zeros(len(found), T.n_tokens, dtype=torch.bool)
        for k, group in enumerate(found):
            members[k, list(group.tokens)] = True
        return [group.label for group in found], members

    def compare(self, a: _Side, b: _Side) -> PairMap:
        """The pair map of two inputs."""
        if self.not_found:
            raise InputError(f"The passage {min(self.not_found)!r:.60} does not occur in any of the texts.")
        if a.whole.shape[-1] != b.whole.shape[-1]:
            raise InputError(
                f"The two sides must have vectors of the same width; {self.encoders[0][0].name} gives "
                f"{a.whole.shape[-1]} channels and {self.encoders[1][0].name} {b.whole.shape[-1]}."
            )
        by_norm = self.measure == "cosine"
        norms = a.norms(by_norm), b.norms(by_norm)
        first, second = a.whole / norms[0], b.whole / norms[1]
        # Which place of b each place of a meets: the one there is, or the nearest.
        met = (first @ second.T).argmax(1) if a.pooling.kind == "late" else torch.zeros(1, dtype=torch.long)
        return PairMap(
            scores=_products(a, b, norms[0] * norms[1][met], met),
            out_tokens=a.labels,
            in_tokens=b.labels,
            measure=self.measure,
            value=float((first * second[met]).sum()),
            meta=self._meta(a, b),
        )

    def _meta(self, a: _Side, b: _Side) -> dict[str, Any]:
        first, second = a.taken.tensor.meta(), b.taken.tensor.meta()
        names = [a.pooling.name] if a.pooling.name == b.pooling.name else [a.pooling.name, b.pooling.name]
        groups = self.groups if isinstance(self.groups, str) else "by the user"
        return {
            "model": first["model"],
            **({} if self.encoders[0] is self.encoders[1] else {"other": second["model"]}),
            "pooling": " and ".join(names),
            "groups": "tokens" if self.groups is None else groups,
            "rules": first["rules"],
            "versions": first["versions"],
            "a": first.get("text"),
            "b": second.get("text"),
            **{f"{name}_pictures": side.pictures() for name, side in (("a", a), ("b", b)) if side.pictures()},
        }


def _products(a: _Side, b: _Side, norms: Tensor, met: Tensor) -> Tensor:
    """(group of a + 1, group of b + 1): products of parts over norms (place of a, 1), in the fewest passes."""
    n_a, n_b = len(a.labels), len(b.labels)
    passes = {"both": a.n_passes + b.n_passes, "b": a.n_passes + n_a, "a": b.n_passes + n_b}
    through = min(passes, key=lambda name: passes[name])
    if 2 * passes[through] > passes["both"]:  # little to win, and a pull costs more than a push
        through = "both"
    if through == "b":
        u = b.whole.new_zeros(n_a, *b.whole.shape).index_add_(1, met, a.parts / norms)
        return b.carried(u)
    if through == "a":
        return a.carried(b.parts[:, met] / norms).T
    return torch.einsum("ikc,jkc->ij", a.parts / norms, b.parts[:, met])


def _difference(closer: PairMap, third: PairMap) -> PairMap:
    """Columns of b, those of c with the sign turned, and one of both biases."""
    biases = closer.scores[:, -1:] - third.scores[:, -1:]
    return PairMap(
        scores=torch.cat([closer.scores[:, :-1], -third.scores[:, :-1], biases], 1),
        out_tokens=closer.out_tokens,
        in_tokens=(*closer.in_tokens[:-1], *third.in_tokens),
        measure=closer.measure,
        value=closer.value - third.value,
        n_against=len(third.in_tokens) - 1,
        meta=closer.meta | {"against": third.meta["b"]},
    )


def _as_lens(model: Any, name: str) -> tuple[Lens, list[Any] | None]:
    """A lens, and the modules after its model where it came from a `SentenceTransformer`."""
    if isinstance(model, Lens):
        return model, None
    inner = getattr(model[0], "auto_model", None) if isinstance(model, nn.Sequential) and len(model) else None
    if not isinstance(inner, nn.Module):
        raise InputError(f"`{name}` must be a lens or a SentenceTransformer; got {type(model).__name__}.")
    return Lens(inner, getattr(model, "tokenizer", None)), modules_of(model)


def _mask(given: Any, n_tokens: int) -> Tensor:
    """(token,): which outputs take part; all of them unless an attention mask of that length says otherwise."""
    if isinstance(given, Tensor) and given.shape == (1, n_tokens) and bool(given.any()):
        return given[0].cpu() != 0
    return torch.ones(n_tokens, dtype=torch.bool)


# Taking a vector apart -----------------------------------------------------------------------------------------------


class _Taken:
    """The vector of one input, before any projection, by what each group of tokens gives of it.

    Args:
        tensor: The operator at the input.
        pooling: How states become a vector.
        mask: Which outputs take part.
    """

    def __init__(self, tensor: AttentionTensor, pooling: Pooling, mask: Tensor) -> None:
        self.tensor, self.pooling, self.input = tensor, pooling, tensor.input
        self.mask = mask
        recording = tensor.operator.recording
        self.program: Program | None = None
        if pooling.slot is not None:
            self.program = recording.program.part(recording.slots[0], (pooling.slot,))
        self.states = tensor.output if self.program is None else self._run(self.program, self.input)
        self.is_exact = self.states.dtype is torch.float64
        is_pooled = pooling.kind not in ("late", "module")
        self.weights = pooling.weights(self.states, mask.to(self.states.device)) if is_pooled else None

    @staticmethod
    def _run(program: Program, x: Tensor) -> Tensor:
        """The vector of a module at one state (token, channel), as one place: (1, channel)."""
        return program.run(x[None])[0]

    def _pooled(self, states: Tensor) -> Tensor:
        """(…, token, channel) to (…, place, channel), in float64 on the CPU."""
        if self.weights is not None:
            states = (states * self.weights).sum(-2, keepdim=True, dtype=_exact(states))
        elif self.pooling.kind == "late":
            states = states[..., self.mask.to(states.device), :]
        return states.cpu().double()

    def whole(self) -> Tensor:
        """(place, channel): what the model gives."""
        return self._pooled(self.states)

    def parts(self, members: Tensor) -> Tensor:
        """(group + 1, place, channel): what each group (group, token) gives, and the bias."""
        zero = torch.zeros_like(self.input)
        bias = self.tensor.bias if self.program is None else self._run(self.program, zero)
        if not len(members):
            return self._pooled(bias)[None]
        is_pushed = self.n_passes(len(members)) == len(members)
        found = self._pushed(members) if is_pushed else self._pulled(members)
        return torch.cat([found, self._pooled(bias)[None]])

    def n_passes(self, n_groups: int) -> int:
        """How many passes it takes to take the vector apart: pushes, or one pull per channel."""
        return n_groups if self.pooling.kind == "late" else min(n_groups, self.states.shape[-1])

    def _pushed(self, members: Tensor) -> Tensor:
        """One push per group."""
        found = []
        for some in members.to(self.input.device).split(AT_A_TIME):
            alone = self.input * some[:, :, None].to(self.input)
            if self.program is None:
                states = self.tensor.apply(alone)
            else:
                linear = self.program.linear
                states = of_each(lambda x, linear=linear: self._run(linear, x), alone)
            found.append(self._pooled(states))
        return torch.cat(found)

    def _pulled(self, members: Tensor) -> Tensor:
        """One pull per channel of the vector, which gives what every token carries of that channel."""
        channels = torch.eye(self.states.shape[-1], dtype=torch.float64)[:, None]
        return (members.double() @ self.pull_back(channels).T)[:, None]

    def pull_back(self, u: Tensor) -> Tensor:
        """(vector, token): what each token carries of ⟨u, y⟩, for some vectors u (vector, place, channel)."""
        return torch.cat([self._pull_some(some) for some in u.split(AT_A_TIME)])

    def _pull_some(self, u: Tensor) -> Tensor:
        u = u.to(self.states)
        if self.weights is not None:
            u = u * self.weights
        elif self.pooling.kind == "late":
            u = u.new_zeros(len(u), *self.states.shape).index_copy_(1, self.mask.nonzero()[:, 0].to(u.device), u)
        if self.program is None:
            pulled = self.tensor.adjoint(u)
        else:
            linear = self.program.linear
            pulled = of_each(lambda one: linear.pull(one)[0][0], u)
        return (pulled * self.input).sum(-1, dtype=_exact(pulled)).cpu().double()


def _exact(x: Tensor) -> torch.dtype:
    """The type of sums: float64 wherever the device has it."""
    return torch.float32 if x.device.type == "mps" else torch.float64
