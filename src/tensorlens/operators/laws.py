r"""The laws of an attention tensor, as data: a name and a function that gives the error.

`LawEvidence` computes every quantity that they compare once: one walk over the blocks gives the affine program at X, at
zero and at a random V; one push gives T·V, one pull Tᵀu. `LAWS` are short functions of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from tensorlens import tolerances
from tensorlens.errors import AnatomyError, InputError, NotLinearError
from tensorlens.models.runner import tf32
from tensorlens.operators.operator import FrozenOperator, beside_zeros
from tensorlens.operators.plain import plain_output
from tensorlens.program.verify import verify
from tensorlens.recording.recording import Recording, Span
from tensorlens.tolerances import in_float64, relative

N_CLASSES = 5
"""Number of classes whose logits are tested."""

CLEARLY = 1e-3
"""If at least this share of a random V passes through a block, the block is not tested on its own."""


def normal(shape: Sequence[int], like: Tensor, generator: torch.Generator) -> Tensor:
    """Standard normal numbers in a tensor's type, drawn on its device, because a CPU takes long."""
    if like.device.type == "cpu":
        return torch.randn(shape, generator=generator, dtype=like.dtype)
    seed = int(torch.randint(2**62, (), generator=generator))
    there = torch.Generator(like.device).manual_seed(seed)
    return torch.randn(shape, generator=there, dtype=like.dtype, device=like.device)


class LawEvidence:
    """The quantities that the laws of an operator compare.

    Args:
        operator: The operator.
        generator: For a random state V as large as X, and a random cotangent u.

    Attributes:
        at_x: The program at X.
        bias: B, the program at zero.
        at_v: The program at V.
        held: For each module the norm of its output at zero, divided by that at X. Empty for a range of blocks, for
            chosen heads, for one sample of several, and for a long input.
    """

    def __init__(self, operator: FrozenOperator, generator: torch.Generator) -> None:
        self.operator, self.recording, self.generator = operator, operator.recording, generator
        n_out, d_out, n_in, d_in = operator.shape
        self.x = operator.input
        self.u = self.normal(1, n_out, d_out)
        self.v = self.x.square().mean().sqrt() * self.normal(n_in, d_in)
        self._walk()

    def normal(self, *shape: int) -> Tensor:
        """Standard normal numbers of the operator's type."""
        return normal(shape, self.operator.input, self.generator)

    # Forwards ---------------------------------------------------------------------------------------------------------

    def _walk(self) -> None:
        """Take X, zero and V through the blocks, one block after the other."""
        operator, recording = self.operator, self.recording
        is_plain = operator.is_whole and not recording.is_streamed and recording.n_samples == 1
        # Slots that no step reads any more, such as held queries, are gone.
        live = {output.slot for output in recording.modules if output.slot is not None} if is_plain else set()
        live &= set(recording.program.specs)
        self._pieces = recording.pieces(operator.span, operator.heads, also=live).programs
        self._values = [self._start(x) for x in (self.x, torch.zeros_like(self.x), self.v)]
        at_x, at_zero, _ = self._values
        sizes: tuple[dict[int, float], dict[int, float]] = ({}, {})
        for piece in self._pieces:
            here = [slot for slot in live if slot in piece.makers]
            for values, size in zip(self._values, (*sizes, None), strict=True):
                kept = {*piece.outputs, *(here if size is not None else ())}
                found = piece.observe([values[slot] for slot in piece.inputs], kept)
                values |= {slot: found[slot] for slot in piece.outputs}
                if size is not None:
                    size |= zip(here, _norms([found[slot] for slot in here]), strict=True)
        ends = [self._state(values, operator.span.stop) for values in self._values]
        self.at_x, self.bias, self.at_v = (end for end in ends if end is not None)  # the last state is always there
        self.held = self._held(*sizes)

    def _start(self, x: Tensor) -> dict[int, Tensor]:
        slots, n_samples = self.recording.slots[self.operator.span.start], self.recording.n_samples
        return dict(
            zip(slots, self.recording._divided(slots, beside_zeros(x, self.operator.sample, n_samples)), strict=True)
        )

    def _state(self, values: dict[int, Tensor], n: int) -> Tensor | None:
        """State n of a walk; None if no later step reads it."""
        slots = self.recording.slots[n]
        if not values.keys() >= set(slots):
            return None
        return self.recording._joined(tuple([values[slot] for slot in slots]))[self.operator.sample]

    def _held(self, there: dict[int, float], left: dict[int, float]) -> dict[str, float]:
        squares: dict[str, tuple[float, float]] = {}
        modules = self.recording.modules if there else ()
        for module in modules:
            path, slot = module.path, module.slot
            if slot is None or slot in there:  # without a slot it is held, unless it also returned something live
                zero, whole = squares.get(path, (0.0, 0.0))
                squares[path] = (zero, whole) if slot is None else (zero + left[slot] ** 2, whole + there[slot] ** 2)
        all_held = {module.path for module in modules if module.slot is None}
        return {
            path: (zero / whole) ** 0.5 if whole else 1.0
            for path, (zero, whole) in squares.items()
            if whole or path in all_held
        }

    @cached_property
    def passing(self) -> tuple[float, ...]:
        r"""For each block $\lVert T_n V_n \rVert / \lVert X^{n+1} \rVert$, at a $V_n$ as large as $X^n$.

        Relative to the size of the block's output, since a norm at its end makes any state small. $V_n$ is V after n
        blocks. If the block also reads earlier blocks or passes on next to nothing, it is tested on its own, at a
        random state and with zero for everything else it reads.
        """
        start, stop = self.operator.span
        _, at_zero, at_v = self._values
        moved, sizes = list[float](), list[float]()
        for n in range(start, stop + 1):
            one, other = self._state(at_v, n), self._state(at_zero, n)
            moved.append(0.0 if one is None or other is None else float((in_float64(one) - in_float64(other)).norm()))
            sizes.append(max(float(in_float64(self.recording.states[n]).norm()), tolerances.TINY))
        found = []
        for place, piece in enumerate(self._pieces[: stop - start]):
            n = start + place
            part = moved[place + 1] / sizes[place + 1] * sizes[place] / max(moved[place], tolerances.TINY)
            is_alone = set(piece.inputs) <= set(self.recording.slots[n])
            found.append(part if is_alone and moved[place] > 0 and part > CLEARLY else self._passing_alone(n))
        return tuple(found)

    def _passing_alone(self, n: int) -> float:
        """The share of its state that a block passes on to its readers, or of its streams if it reads others."""
        recording, program = self.recording, self.recording.scaled(self.operator.heads)
        steps = tuple([step for step in program.steps if step.block == n])
        made = {step.out for step in steps}
        read = {slot for step in steps for slot in step.slots} - made
        following = set(recording.slots[n + 1])
        if not following.isdisjoint(recording.slots[n]):
            return 1.0  # the state is passed on as it is
        outputs = [
            slot for slot in made if slot in following or any(r.block != n for r in program.readers.get(slot, ()))
        ]
        at_x = recording.values(n, read.union(outputs))
        entering = read.intersection(recording.slots[n]) or read
        inputs = tuple(read)
        given = [
            at_x[slot].square().mean().sqrt() * normal(at_x[slot].shape, at_x[slot], self.generator)
            if slot in entering
            else torch.zeros_like(at_x[slot])
            for slot in inputs
        ]
        block = replace(program, steps=steps, inputs=inputs, outputs=tuple(outputs))
        pushed = zip(outputs, block.linear.run(*given), strict=True)
        return max([relative(y, at_x[slot]) for slot, y in pushed], default=0.0)

    @cached_property
    def of_v(self) -> Tensor:
        """T·V."""
        return self.operator.apply(self.v)

    @cached_property
    def expected(self) -> Tensor:
        """F(X), by the model itself if there is one and all heads are kept."""
        operator = self.operator
        if operator.heads:
            return self.at_x
        has_model = operator.recording.origin is not None
        return plain_output(operator.recording)[0] if operator.is_whole and has_model else operator.output

    # Backwards --------------------------------------------------------------------------------------------------------

    @cached_property
    def pulled(self) -> Tensor:
        """Tᵀu."""
        return self.operator.pull(self.u)

    def mismatch(self, y: Tensor, x: Tensor, scale: Tensor) -> float:
        """⟨u, y⟩ - ⟨Tᵀu, x⟩, relative to the norm of `scale`."""
        difference = in_float64(self.u * y).sum() - in_float64(self.pulled * x).sum()
        return float(difference.abs() / in_float64(scale).norm().clamp_min(tolerances.TINY))


def _norms(tensors: list[Tensor]) -> list[float]:
    """Norms of several tensors, computed together and read from the device at once."""
    found: dict[int, float] = {}
    for kind in {(x.device, x.dtype) for x in tensors}:
        places = [n for n, x in enumerate(tensors) if (x.device, x.dtype) == kind]
        wide = torch.float32 if kind[1].itemsize < 4 else kind[1].to_real()
        norms = torch._foreach_norm([tensors[n] for n in places], 2, dtype=wide)  # pyright: ignore[reportPrivateImportUsage]
        found |= zip(places, torch.stack(norms).tolist(), strict=True)
    return [found[n] for n in range(len(tensors))]


# The laws -------------------------------------------------------------------------------------------------------------


def value(e: LawEvidence) -> float:
    """F̃(X) = F(X); with heads chosen in one block F̃(m) + F̃(1 - m) - F̃(0) = F̃(1) in their multipliers m."""
    operator, recording = e.operator, e.recording
    if not operator.heads:
        return relative(e.at_x - e.expected, e.expected)
    if len(operator.heads) != 1:  # the multipliers of several blocks multiply each other
        return 0.0
    others, none = ({n: change * m + rest for n, m in operator.heads.items()} for change, rest in ((-1, 1), (0, 0)))
    x = operator.input[None]
    found = e.at_x + recording.push(x, operator.span, others)[0] - recording.push(x, operator.span, none)[0]
    return relative(found - operator.output, operator.output)


def structure(e: LawEvidence) -> float:
    """Zero for a program that is affine according to the table of `verify`, infinite for any other."""
    try:
        verify(e.recording.part(e.operator.span, e.operator.heads))
    except NotLinearError:
        return float("inf")
    return 0.0


def linearity(e: LawEvidence) -> float:
    """F̃(V) - B = T·V."""
    return relative(e.at_v - e.bias - e.of_v, e.at_v)


def adjoint(e: LawEvidence) -> float:
    """⟨u, T·V⟩ = ⟨Tᵀu, V⟩."""
    return e.mismatch(e.of_v, e.v, e.of_v)


def completeness(e: LawEvidence) -> float:
    """⟨u, F(X) - B⟩ = ⟨Tᵀu, X⟩, with B the program at zero."""
    return e.mismatch(e.expected - e.bias, e.x, e.expected)


def composition(e: LawEvidence) -> float | None:
    """F̃ₙ(F̃ₘ(V)) = F̃(V): the blocks in two steps; None if a range in the middle is refused."""
    recording, (start, stop), heads = e.recording, e.operator.span, e.operator.heads
    if stop - start < 2:
        return 0.0
    middle = (start + stop) // 2
    try:
        recording.part(Span(middle, stop), heads)
    except AnatomyError:
        return None
    v = beside_zeros(e.v, e.operator.sample, recording.n_samples)
    halfway = recording.push(v, Span(start, middle), heads)
    return relative(recording.push(halfway, Span(middle, stop), heads)[e.operator.sample] - e.at_v, e.at_v)


def logits(e: LawEvidence) -> float | None:
    r"""⟨w, T_logits V⟩ = ⟨T_logitsᵀ w, V⟩ for weights w of a few classes; None without a head."""
    operator, recording = e.operator, e.recording
    readout = recording.readout
    if (
        recording.readout_slot is None
        or readout is None
        or readout.dim() > 3
        or operator.span.stop < recording.n_blocks
    ):
        return None
    out_token = _last_read(recording, operator.shape[0])
    weights = torch.zeros(recording.logits_at(out_token).shape, dtype=operator.dtype, device=operator.device)
    some = torch.randperm(len(weights), generator=e.generator)[:N_CLASSES].to(weights.device)
    weights[some] = e.normal(len(some))
    w = recording.head_cotangent(weights, out_token)
    try:  # the head on its own, unless it reads more than the last state
        head = Span(recording.n_blocks, recording.n_blocks)
        end = recording.push(e.of_v[None], head, linear=True, to_logits=True)
        pulled = operator.pull(recording.pull(w, head, to_logits=True))[0]
    except AnatomyError:
        end, pulled = operator.push_to_head(e.v[None], linear=True), operator.pull_from_head(w)[0]
    difference = in_float64(w * end).sum() - in_float64(pulled * e.v).sum()
    return float(difference.abs() / (in_float64(w).norm() * in_float64(end).norm()).clamp_min(tolerances.TINY))


def _last_read(recording: Recording, n_tokens: int) -> int:
    """The last output that the head reads: it may read fewer positions than the body returns."""
    readout = recording.readout
    if recording.head is None:
        n_read = n_tokens if readout is None or readout.dim() < 3 else readout.shape[1]
        return min(n_tokens, n_read) - 1
    for token in reversed(range(n_tokens)):
        with suppress(InputError):
            recording.place_read(token)
            return token
    return n_tokens - 1


def folded(e: LawEvidence) -> float | None:
    """Tᵀu by folded blocks and by the program; None unless rows or norms were computed."""
    operator = e.operator
    if operator.__dict__.get("folded") is None:
        return None
    ways = (False, True) if operator.matrices_fit(n_passes=3) else (False,)  # for few cotangents and for many
    found = [operator.adjoint_folded(e.u, by_matrices=way).to(e.pulled) for way in ways]
    return max(relative(one - e.pulled, e.pulled) for one in found)


LAWS: dict[str, Callable[[LawEvidence], float | None]] = {
    "value": value,
    "structure": structure,
    "linearity": linearity,
    "adjoint": adjoint,
    "completeness": completeness,
    "composition": composition,
    "logits": logits,
    "folded": folded,
}
"""By name, the relative error of a law; None if the law does not apply to an operator."""


# In float32 -----------------------------------------------------------------------------------------------------------


def in_float32(operator: FrozenOperator, generator: torch.Generator) -> dict[str, float]:
    """The largest error of the laws over a few blocks of a half-precision model, cast to float32.

    In bfloat16 every law holds only to a few per cent. The constants of a block are copied; the model is not.
    """
    start, stop = operator.span
    some = int(torch.randint(start, stop, (1,), generator=generator))
    worst: dict[str, float] = {}
    wide = operator.input.float()
    with tf32(False):
        for n in sorted({start, (start + stop) // 2, stop - 1, some}):
            try:
                program = operator.recording.part(Span(n, n + 1), operator.heads).to(torch.float32)
            except AnatomyError:  # the block reads more than the state
                continue
            ends = (program.inputs[0], program.outputs[0])
            v, u = (normal(program.specs[slot].shape, wide, generator) for slot in ends)
            at_v, at_zero = program.run(v)[0], program.run(torch.zeros_like(v))[0]
            of_v, pulled = program.linear.run(v)[0], program.linear.pull(u)[0]
            found = {
                "linearity, float32": relative(at_v - at_zero - of_v, at_v),
                "adjoint, float32": relative((u * of_v).sum() - (pulled * v).sum(), u.norm() * of_v.norm()),
            }
            worst = {law: max(error, worst.get(law, 0.0)) for law, error in found.items()}
    return worst
