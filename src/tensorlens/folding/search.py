"""`block_parts`: which weights a block is made of, found by watching one replay and proved by rebuilding it.

No family is known by name. A replay of one block shows which layer's output the attention mixed, which layer took the
mixture, which products went into the feed-forward's way back, and in which order norms stood between them. Fused and
interleaved projections are found by the values in their columns. What rebuilds the block away from X to rounding is
taken; for anything else `AnatomyError` says what was looked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations, product
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from tensorlens.errors import AnatomyError
from tensorlens.folding.parts import BlockParts, FeedForward, Layout, NormPart, Projection, match_columns
from tensorlens.folding.rebuild import held_factors, norm_scale, rebuild, rebuild_norm
from tensorlens.freezing.conventions import Rules
from tensorlens.freezing.observe import BlockSteps, Mixed, Step, by_token, watch_block
from tensorlens.freezing.places import Place
from tensorlens.freezing.recording import Recording
from tensorlens.models.fingerprint import Fingerprint
from tensorlens.models.precision import tf32

TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-4, torch.bfloat16: 4e-2, torch.float16: 1e-2}
"""Relative error up to which a rebuilt block counts as the block; models may compute parts in float32."""

NORM_OPERATIONS = ("layer_norm", "rms_norm", "rsqrt")

Found = BlockParts | NormPart | None | str
"""Parts, a final norm or the absence of one, or the message of what went wrong."""

State = tuple[Fingerprint | None, Rules, bool, int]
"""What the wiring depends on: the state of the model, the rules, whether the input has one token alone, which proves
too little, and the way the input took."""

MOST_STATES = 8
"""States of a model whose parts are remembered."""

_known: WeakKeyDictionary[nn.Module, dict[State, dict[int, Found]]] = WeakKeyDictionary()
"""What a survey found, by model, by its state and by block; -1 stands for the final norm."""


def block_parts(recording: Recording, n: int) -> BlockParts:
    """The weights of block n and how they are wired, proved by rebuilding the frozen block at a random state.

    Raises:
        AnatomyError: the block is made of something else, such as experts or a recurrence; says what was missing.
    """
    known = _found(recording)
    if n not in known:
        _learn(recording, n, known)
    return _or_raise(known[n])


def final_norm(recording: Recording) -> NormPart | None:
    """The norm between the last block and X^N, or None where there is nothing between them.

    Raises:
        AnatomyError: there is something else.
    """
    known = _found(recording)
    if -1 not in known:
        _learn(recording, recording.n_blocks - 1, known)
    return _or_raise(known[-1])


def state_of(recording: Recording) -> State:
    """Everything that a reading of the blocks is valid for."""
    return recording.fingerprint, recording.rules, recording.states[0].shape[1] == 1, recording.signature


def _found(recording: Recording) -> dict[int, Found]:
    """What is known of a model in the state it was recorded in; nothing where it may change unseen."""
    state = state_of(recording)
    if recording.fingerprint is None:
        return {}
    states = _known.setdefault(recording.model, {})
    if state not in states and len(states) >= MOST_STATES:
        states.pop(next(iter(states)), None)  # the oldest
    return states.setdefault(state, {})


def _learn(recording: Recording, n: int, known: dict[int, Found]) -> None:
    try:
        known[n], tail = _survey(recording, n)
    except AnatomyError as error:
        known[n] = tail = str(error)
    if n == recording.n_blocks - 1:
        known[-1] = tail


def _or_raise(found: Found) -> Any:
    if isinstance(found, str):
        raise AnatomyError(found)
    return found


# From what was seen to parts -----------------------------------------------------------------------------------------


def _survey(recording: Recording, n: int) -> tuple[BlockParts, NormPart | str | None]:
    """The parts of block n, and what lies between it and the output if it is the last."""
    name = type(recording.anatomy.model).__name__
    instead = "Rows and norms go by backward passes instead; methods that need the weights do not apply."
    if recording.n_encoder_blocks or recording.side_channels or recording.starts_at_embedding:
        raise AnatomyError(
            f"The blocks of `{name}` cannot be taken apart: they take more than one hidden state. {instead}"
        )
    try:
        with tf32(False):  # a user's tf32 would let no block be rebuilt to rounding
            return _search(recording, n)
    except (RuntimeError, ValueError, IndexError) as error:
        # A state of another shape than (token, channel) fails somewhere in the comparisons.
        raise AnatomyError(f"Block {n} of `{name}` cannot be taken apart: {error}. {instead}") from None


def _search(recording: Recording, n: int) -> tuple[BlockParts, NormPart | str | None]:
    seen = watch_block(recording, n)
    search, is_last = _Search(recording, n, seen), n == recording.n_blocks - 1
    if not is_last and not (seen.end is not None and _agrees(seen.end[0], seen.y)):
        raise search.error(f"something between it and block {n + 1}, such as a hook, changes the state")
    with torch.no_grad():
        for parts in search.candidates():
            rebuilt = rebuild(parts, held_factors(recording, parts), seen.x[0])
            if _agrees(rebuilt, seen.y):
                return parts, _tail(recording, n, seen) if is_last else None
    raise search.error("no wiring of its norms, attention and feed-forward rebuilds it")


def _agrees(rebuilt: Tensor, seen: Tensor | None) -> bool:
    if seen is None:
        return False
    seen = seen.reshape(rebuilt.shape)
    return bool((rebuilt - seen).norm() <= TOLERANCES[seen.dtype] * seen.norm())


def _tail(recording: Recording, n: int, seen: BlockSteps) -> NormPart | str | None:
    """The final norm: the first norm after the block whose output is where the walk ended."""
    state = seen.end
    assert state is not None, "a replay ends somewhere"
    if seen.y is not None and _agrees(seen.y, state):
        return None
    for step in seen.tail:
        norm = find_norm(recording, Place(n), step, 0)
        if norm is not None and _agrees(step.output, state[0]) and _agrees(step.input, seen.y):
            return norm
    found = ", ".join(step.path for step in seen.tail) or "something that is no module"
    return (
        f"Between the last block of `{type(recording.anatomy.model).__name__}` and its output expected one norm or "
        f"nothing; found {found}. Rows and norms go by backward passes instead."
    )


def find_norm(recording: Recording, place: Place, step: Step, occurrence: int) -> NormPart | None:
    """A step as a norm with a held scale for each token, if it is one."""
    eps = getattr(step.module, "eps", getattr(step.module, "variance_epsilon", None))
    for operation, kind, offset in product(NORM_OPERATIONS, ("layer", "rms"), (0.0, 1.0)):
        norm = NormPart(path=step.path, module=step.module, kind=kind, offset=offset, operation=operation,
                        occurrence=occurrence, eps=eps)  # fmt: skip
        scale = norm_scale(recording, place, norm)
        if scale is None or len(scale) != len(step.input):
            continue
        if _agrees(rebuild_norm(norm, scale, step.input), step.output):
            return norm
    return None


class _Search:
    """The parts of one block, one question at a time."""

    def __init__(self, recording: Recording, n: int, seen: BlockSteps) -> None:
        self.recording, self.n, self.seen = recording, n, seen
        blocks = recording.anatomy.blocks
        self.block = blocks[min(n, len(blocks) - 1)]
        self.linears = [(i, step) for i, step in enumerate(seen.steps) if _is_linear(step.module)]

    def error(self, missing: str) -> AnatomyError:
        return AnatomyError(
            f"Block {self.n} (`{type(self.block).__name__}`) cannot be taken apart: {missing}. Expected one attention, "
            "one feed-forward and norms around them. Rows and norms go by backward passes instead; methods that need "
            "the weights do not apply."
        )

    def candidates(self) -> Iterator[BlockParts]:
        """Every reading of the block that its steps allow, likeliest first."""
        if len(self.seen.mixed) != 1:
            raise self.error(f"{len(self.seen.mixed)} places where attention meets values")
        mixed = self.seen.mixed[0]
        value, n_kv_heads = self.value(mixed)
        out = self.out(mixed)
        down_at, feed_forward = self.feed_forward({value.path, out.path})
        norms = self.norms(mixed)
        scales = [vector for _, vector in self.layer_scales(norms)]
        scale_1, scale_2 = scales if len(scales) == 2 else (None, None)
        for layout, named in _wirings(norms, down_at):
            yield BlockParts(
                index=self.n, layout=layout, attention=mixed.path, value=value, out=out, feed_forward=feed_forward,
                n_heads=mixed.mixture.shape[1], n_kv_heads=n_kv_heads, layer_scale_1=scale_1, layer_scale_2=scale_2,
                residual_multiplier=float(getattr(self.block, "residual_multiplier", 1.0)), **named,
            )  # fmt: skip

    def value(self, mixed: Mixed) -> tuple[Projection, int]:
        """The layer whose outputs were mixed, a column for each value channel, heads in order."""
        by_head = mixed.values[0].transpose(0, 1)  # (token, head, head_channel)
        for _, step in reversed([pair for pair in self.linears if pair[0] < mixed.after]):
            columns = match_columns(by_head.flatten(1), step.output)
            if columns is not None:
                columns = columns.view(by_head.shape[1:])
                columns = _shared_heads(columns)
                return _projection(step, columns=columns.flatten()), len(columns)
        raise self.error("no linear layer gives the values that attention mixes")

    def out(self, mixed: Mixed) -> Projection:
        """The layer that takes the mixture."""
        by_token = mixed.mixture[0].transpose(0, 1).flatten(1)
        for at, step in self.linears:
            if at >= mixed.after and step.input.shape[-1] == by_token.shape[-1]:
                rows = match_columns(by_token, step.input)
                if rows is not None:
                    return _projection(step, rows=rows)
        raise self.error("no linear layer takes the mixture as it is")

    def feed_forward(self, used: set[str]) -> tuple[int, FeedForward]:
        """The layer back to the residual stream, and what multiplies what on the way into it."""
        place = Place(self.n, inside=True)
        sites = {site: factor for site, factor in self.recording.factors.items() if site.place == place}
        for at, step in self.linears:
            if step.path in used or step.output.shape[-1] != self.seen.x.shape[-1]:
                continue
            n_tokens, width = step.input.shape
            # A factor of each token and channel; attention can be as wide, at an input of just that many tokens.
            near = {site: f for site, f in sites.items() if isinstance(f, Tensor) and f.shape[-1] == width}
            near = {site: f for site, f in near.items() if f.numel() == n_tokens * width}
            for site in near:
                if site.operation in (*NORM_OPERATIONS, "pow", "gate", "up") or site.operation.startswith("attention"):
                    continue
                found = self._branches(step, site, [s for s in near if s.operation in ("gate", "up")])
                if found is not None:
                    return at, found
        raise self.error("no feed-forward of two or three linear layers and one activation")

    def _branches(self, down: Step, site: Any, products: list[Any]) -> FeedForward | None:
        """Up and gate, by which layer's outputs times the held factors are what `down` took."""
        gain = by_token(self.recording.factors[site])
        meeting = products[0].module if products else None
        halves = [half for _, step in self.linears if step.path != down.path for half in _halves(step, gain.shape[-1])]
        halves.sort(key=lambda half: not half[0].path.startswith(meeting or ""))
        common: dict[str, Any] = dict(
            down=_projection(down), activation=site.module, operation=site.operation, product=meeting
        )
        if not products:
            ups = [up for up, z in halves if _agrees(gain * z, down.input)]
            return FeedForward(up=ups[0], gate=None, **common) if ups else None
        activated = [step.output for step in self.seen.steps if step.path == site.module]
        for (gate, g), (up, u) in permutations(halves, 2):
            # The branch that the gate rule holds leaves no trace in the product, but the gate's does in the activation.
            if all(_agrees(gain * g, out) for out in activated) and _agrees(
                self._gated(products, gain, u, g), down.input
            ):
                return FeedForward(up=up, gate=gate, **common)
        return None

    def _gated(self, products: list[Any], gain: Tensor, up: Tensor, gate: Tensor) -> Tensor:
        """What the gate rule makes of the two branches."""
        held = {site.operation: by_token(self.recording.factors[site]) for site in products}
        by_up = up * held["gate"] if "gate" in held else None
        by_gate = gate * gain * held["up"] if "up" in held else None
        if by_up is None or by_gate is None:
            return by_gate if by_up is None else by_up  # type: ignore[return-value]
        return 0.5 * (by_up + by_gate)

    def norms(self, mixed: Mixed) -> list[tuple[int, NormPart]]:
        """Norms of the residual stream, in order; those of queries and keys are none of them."""
        found, count = [], {}
        for at, step in enumerate(self.seen.steps):
            if at < mixed.after and step.path.startswith(mixed.path + ".") or step.input.shape != step.output.shape:
                continue
            norm = find_norm(self.recording, Place(self.n, inside=True), step, count.get(step.path, 0))
            if norm is not None:
                count[step.path] = count.get(step.path, 0) + 1
                found.append((at if at >= mixed.after else at - len(self.seen.steps), norm))
        return found

    def layer_scales(self, norms: list[tuple[int, NormPart]]) -> Iterator[tuple[int, Tensor]]:
        """Modules that multiply each channel by a parameter of theirs."""
        paths = {norm.path for _, norm in norms}
        for at, step in enumerate(self.seen.steps):
            own = [p.detach() for p in step.module.parameters(recurse=False)]
            if step.path in paths or len(own) != 1 or own[0].shape != step.output.shape[-1:]:
                continue
            if step.input.shape == step.output.shape and _agrees(step.input * own[0], step.output):
                yield at, own[0]


def _wirings(norms: list[tuple[int, NormPart]], down_at: int) -> Iterator[tuple[Layout, dict[str, Any]]]:
    """Layouts with norms in these places: before attention, between it and the feed-forward, after both."""
    before = [norm for at, norm in norms if at < 0]
    between = [norm for at, norm in norms if 0 <= at < down_at]
    after = [norm for at, norm in norms if at > down_at]

    match before, between, after:
        case [], [], []:
            tries = [("pre_ln", {}), ("parallel", {})]
        case [a], [], []:
            tries = [("parallel", {"norm_1": a, "norm_2": a}), ("pre_ln", {"norm_1": a}), ("parallel", {"norm_1": a})]
        case [a, b], [], []:
            tries = [("parallel", {"norm_1": a, "norm_2": b}), ("parallel", {"norm_1": b, "norm_2": a})]
        case [], [a], []:
            tries = [("pre_ln", {"norm_2": a}), ("parallel", {"norm_2": a})]
        case [a], [b], []:
            tries = [("pre_ln", {"norm_1": a, "norm_2": b}), ("parallel", {"norm_1": a, "norm_2": b})]
        case [], [a], [b]:
            tries = [("post_ln", {"norm_1": a, "norm_2": b}), ("post_sublayer", {"post_norm_1": a, "post_norm_2": b})]
        case [a], [b, c], [d]:
            tries = [("sandwich", {"norm_1": a, "post_norm_1": b, "norm_2": c, "post_norm_2": d})]
        case _:
            tries = []
    absent: dict[str, Any] = dict.fromkeys(("norm_1", "post_norm_1", "norm_2", "post_norm_2"))
    yield from ((layout, absent | named) for layout, named in tries)  # type: ignore[misc]


def _is_linear(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    named = isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
    return named and isinstance(weight, Tensor) and weight.dim() == 2 and weight.is_floating_point()


def _projection(step: Step, columns: Tensor | None = None, rows: Tensor | None = None) -> Projection:
    """A step as a projection; an order that changes nothing is left out, so that the weight stays a view."""
    n_in, n_out = step.input.shape[-1], step.output.shape[-1]
    return Projection(
        path=step.path,
        module=step.module,
        is_row_major=not isinstance(step.module, nn.Linear),
        columns=None if _in_order(columns, n_out) else columns,
        rows=None if _in_order(rows, n_in) else rows,
    )


def _in_order(index: Tensor | None, n: int) -> bool:
    return index is None or len(index) == n and bool((index == torch.arange(n, device=index.device)).all())


def _halves(step: Step, width: int) -> list[tuple[Projection, Tensor]]:
    """Ways in which a layer can give `width` channels: all of them, a half, or every second one."""
    every = torch.arange(step.output.shape[-1], device=step.output.device)
    if len(every) == width:
        return [(_projection(step), step.output)]
    if len(every) != 2 * width:
        return []
    return [
        (_projection(step, columns=c), step.output[:, c])
        for c in (every[:width], every[width:], every[::2], every[1::2])
    ]


def _shared_heads(columns: Tensor) -> Tensor:
    """One row of columns for each value head: neighbours that repeat it are dropped."""
    changed = (columns[1:] != columns[:-1]).any(1)
    keep = torch.cat([changed.new_ones(1), changed])
    n_kept = int(keep.sum())
    regular = len(columns) % n_kept == 0 and bool(
        (columns == columns[keep].repeat_interleave(len(columns) // n_kept, 0)).all()
    )
    return columns[keep] if regular else columns
