"""The chain of blocks in a pass: similar calls, one after the other, through which one state flows.

`find_chain` works from the inside out. Its steps, of which `_Search._parts` takes 2 to 5 in every call that has parts:

1. *States first* (`put_states_first`): where calls alike take a mask or positions before their state, the state is what
   each of them hands to the next.
2. *Open stages* (`_opened`): a call whose parts are themselves a chain, with the state going through them rather than
   around (`_is_cut`, `_joins`), stands for the blocks in it; any other, for itself.
3. *What repeats* (`_repeated`): stages, calls with a similar call beside them, and modules in the same list as those.
4. *A series* (`_series`): the heaviest sequence of these in which the state flows from each to the next.
5. *Remove* (`_lonely`, `_between`) members whose similar call is not in the series, and adapters. Then 4
   again, until nothing is removed.
6. *Remove the stem* (`without_stem`): small convolutions over pixels may be similar too.

If fewer than two blocks come out, the search compares modules by class alone: stages of one block each may differ by a
position or a split.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from operator import ne
from typing import Any, NamedTuple

from torch import nn

from tensorlens.models.evidence import CONTAINERS, Evidence, ModuleCall

PASSIVE = (*CONTAINERS, nn.Dropout, nn.Identity, nn.ParameterDict, nn.ParameterList)
"""Modules that may be in a linear layer besides its weights."""
STEM = 0.001
"""A first block with a smaller share of the chain's weights belongs to the part before the blocks."""
SMALL = 0.2
"""Lists among the blocks that hold less than this part of their weights are not blocks."""
Chain = list[ModuleCall]


def find_chain(evidence: Evidence, within: ModuleCall | None = None) -> Chain:
    """The blocks of a model, or of one part of it, in the order of their calls; empty if nothing repeats."""
    put_states_first(evidence)
    for by_weights in (True, False):
        search = _Search(evidence, by_weights)
        chain = search.without_stem(search.chain(within or evidence.root))
        if len(chain) > 1:
            return chain
    return []


def put_states_first(evidence: Evidence) -> None:
    """Put the state first among the tensors of a call that takes something else first: a mask, positions, a memory."""
    alike: dict[Any, Chain] = {}
    for call in evidence.calls:
        if len(call.taken) > 1 and call.given:
            # By parent: a decoder takes the output of its encoder, but not as its state.
            key = (id(call.parent), type(call.module), len(call.taken), call.place)
            alike.setdefault(key, []).append(call)
    for calls in alike.values():
        pairs = list(pairwise(calls))
        if not pairs or any(_passes_on(a, b, 0, evidence) for a, b in pairs):
            continue
        places = range(1, len(calls[0].taken))
        place = next((n for n in places if all(_passes_on(a, b, n, evidence) for a, b in pairs)), 0)
        for call in calls if place else ():
            call.taken = (call.taken[place], *call.taken[:place], *call.taken[place + 1 :])
            call.place = place


def _passes_on(a: ModuleCall, b: ModuleCall, place: int, evidence: Evidence) -> bool:
    """Whether b takes a result of a at this place; a mask that a only passed on does not count."""
    made = a.gave - {seen.node for seen in a.taken}
    return evidence.reaches(made, b.taken[place].node, since=a.start)


def leaving(call: ModuleCall, after: ModuleCall | None, evidence: Evidence) -> int:
    """Index of the state among a block's outputs: the one that the next block takes, or the one most like its input."""
    if after is not None:
        for is_it in (
            lambda seen: evidence.is_same(seen.node, after.state.node),
            lambda seen: evidence.reaches({seen.node}, after.state.node, since=call.start),
        ):
            found = [place for place, seen in enumerate(call.given) if is_it(seen)]
            if found:
                return found[0]
    return next((place for place, seen in enumerate(call.given) if seen.shape == call.state.shape), 0)


def find_encoder(chain: Chain, evidence: Evidence) -> tuple[ModuleCall, Chain] | None:
    """The call whose output every block of a chain takes beside its state, and the blocks in it, if any."""
    kept = [{evidence.origins[seen.node] for seen in call.taken[1:] if seen.node >= 0} for call in chain]
    shared = set.intersection(*kept)
    around = set(map(id, chain[0].holders()))
    for call in evidence.calls[: chain[0].number]:
        if id(call) not in around and call.given and evidence.origins[call.given[0].node] in shared:
            blocks = find_chain(evidence, call)
            return (call, blocks) if blocks else None
    return None


class _Part(NamedTuple):
    """A call, and the blocks it represents: those inside it if it is a stage, otherwise itself."""

    call: ModuleCall
    blocks: Chain

    @property
    def is_stage(self) -> bool:
        return self.blocks != [self.call]


class _Search:
    """A search for the chain.

    Args:
        evidence: The evidence of the pass.
        by_weights: Whether similar modules must share the names of their weights as well as their class.
    """

    def __init__(self, evidence: Evidence, by_weights: bool) -> None:
        self.evidence, self.by_weights = evidence, by_weights
        self._sizes: dict[int, list[int]] = {}
        self._signatures: dict[int, tuple[Any, ...]] = {}

    def without_stem(self, chain: Chain) -> Chain:
        """A chain without its stem: small convolutions over pixels before the first block may be similar too."""
        least = STEM * self._size(chain)
        first = next((n for n, call in enumerate(chain) if self._size([call]) >= least), 0)
        return chain[first:]

    def chain(self, call: ModuleCall) -> Chain:
        """The best chain among the parts of a call."""
        return [block for part in self._parts(call) for block in part.blocks]

    def _parts(self, call: ModuleCall) -> list[_Part]:
        kids = [_Part(kid, self._opened(kid)) for kid in call.children if self._matrices(kid.module)]
        everything = parts = self._repeated([kid for kid in kids if all(b.taken and b.given for b in kid.blocks)])
        while True:
            series = self._series(parts)
            lonely = self._lonely(series, everything) or self._between(series)
            if not lonely:
                return series
            parts = [part for part in parts if part not in lonely]

    def _opened(self, kid: ModuleCall) -> Chain:
        parts = self._parts(kid)
        inner = [block for part in parts for block in part.blocks]
        is_stage = len(inner) > 1 and not self._joins(inner) and self._is_cut(parts, kid)
        return inner if is_stage else [kid]

    def _joins(self, chain: Chain) -> bool:
        """Whether members take, besides the output of the previous one, something else computed from it.

        Gates of a block do. So do first blocks of stages, but their stage computed it: they are parts of two modules.
        """
        evidence = self.evidence
        return any(
            evidence.reaches({given.node}, seen.node, since=a.start) and not evidence.is_same(given.node, seen.node)
            for a, b in pairwise(chain)
            if a.parent is b.parent
            for given in a.given[:1]
            for seen in b.taken[1:]
        )

    def _repeated(self, parts: list[_Part]) -> list[_Part]:
        """Stages, calls with a similar call beside them, and parts in the same list as either."""
        kinds = Counter(self._signature(block) for part in parts for block in part.blocks)
        large = [part for part in parts if part.is_stage or len(self._matrices(part.call.module)) > 1]
        sure = [part for part in large if part.is_stage or kinds[self._signature(part.call)] > 1]
        lists = {self.evidence.list_of(part.call) for part in sure} - {None}
        return [part for part in large if part in sure or self.evidence.list_of(part.call) in lists]

    def _series(self, parts: list[_Part]) -> list[_Part]:
        """The heaviest sequence of parts in which the state flows from each to the next."""
        best: list[tuple[int, list[_Part]]] = []
        for n, part in enumerate(parts):
            before = [found for earlier, found in zip(parts[:n], best, strict=True) if self._flows(earlier, part)]
            before.sort(key=lambda found: -found[0])
            # The encoder's output reaches the decoder's later blocks too, but only through the first one.
            direct = (found for found in before if self._flows(found[1][-1], part, parts))
            weight, series = next(direct, before[0] if before else (0, []))
            best.append((weight + self._size(part.blocks), [*series, part]))
        return max(best, key=lambda found: found[0], default=(0, []))[1]

    def _lonely(self, series: list[_Part], everything: list[_Part]) -> list[_Part]:
        """Parts of a series whose similar calls are beside them but not in the series: they share an input."""
        kinds, of_all = (
            Counter(self._signature(part.call) for part in some if not part.is_stage) for some in (series, everything)
        )
        return [
            part
            for part in series
            if not part.is_stage and of_all[self._signature(part.call)] > kinds[self._signature(part.call)] == 1
        ]

    def _between(self, series: list[_Part]) -> list[_Part]:
        """Modules of a list of their own that stand between the blocks of another: adapters, attention to a memory.

        They are small, or the state goes around all of them.
        """
        by_list: dict[str | None, list[int]] = {}
        for n, part in enumerate(series):
            by_list.setdefault(None if part.is_stage else self.evidence.list_of(part.call), []).append(n)
        sizes = {path: self._size([series[n].call for n in some]) for path, some in by_list.items()}
        largest = max(sizes, key=lambda path: sizes[path], default=None)

        def is_between(path: str | None) -> bool:
            some, blocks = by_list[path], by_list[largest]
            is_mixed = sum(blocks[0] < n < blocks[-1] for n in some) > 1
            return is_mixed and (sizes[path] < SMALL * sizes[largest] or self._is_passed_by(series, some))

        return [
            series[n] for path in by_list if path not in (None, largest) and is_between(path) for n in by_list[path]
        ]

    def _is_passed_by(self, series: list[_Part], places: list[int]) -> bool:
        """Whether the state goes around the parts at these places, if anything follows them."""
        inner = [n for n in places if 0 < n < len(series) - 1]

        def is_passed_by(n: int) -> bool:
            a, b, c = series[n - 1].blocks[-1], series[n].blocks[-1], series[n + 1].blocks[0]
            sources, past = a.gave, b.gave
            return self.evidence.reaches(sources - past, c.state.node, past=past, since=a.start)

        return bool(inner) and all(map(is_passed_by, inner))

    def _flows(self, a: _Part, b: _Part, others: Sequence[_Part] = ()) -> bool:
        """Whether the output of one part reaches the state of another, and not only through other parts."""
        last, first = a.blocks[-1], b.blocks[0]
        sources = last.gave
        past = {
            seen.node for part in others if part is not a and part is not b for seen in part.blocks[-1].given
        } - sources
        return self.evidence.reaches(sources, first.state.node, past=past, since=last.start)

    def _is_cut(self, parts: list[_Part], stage: ModuleCall) -> bool:
        """Whether the state of a stage goes through at least one of its parts, and not around all of them.

        Parts count, not the blocks in them: attention and feed-forward each have a residual around them, and their
        layers may be similar modules of several weights (LoRA) that the whole state goes through.
        """
        start = parts[0].blocks[0].start
        entry = {seen.node for seen in stage.taken}

        def is_bypassed(part: _Part, target: int) -> bool:
            first, given = part.blocks[0], part.blocks[-1].gave
            since = min(start, *entry) if entry else start
            return any(
                self.evidence.reaches(sources, target, past=given, since=since)
                for sources in ({first.state.node, *entry} - given, range(start, first.start))
            )

        targets = [part.blocks[0].state.node for part in parts[1:]] + [seen.node for seen in stage.given[:1]]
        cuts = [
            not self._is_layer(part) and not is_bypassed(part, target)
            for part, target in zip(parts, targets, strict=False)
        ]
        return any(cuts)

    def _is_layer(self, part: _Part) -> bool:
        """Whether a part has only linear layers and changes the number of channels, such as a query layer with LoRA."""
        taken, given = part.blocks[0].state.shape, part.blocks[-1].given[0].shape
        leaves = [leaf for leaf in part.call.module.modules() if not list(leaf.children())]
        is_linear = all(
            isinstance(leaf, PASSIVE) or any(weight.dim() > 1 for weight in leaf.parameters(recurse=False))
            for leaf in leaves
        )
        return is_linear and len(taken) == len(given) and sum(map(ne, taken, given)) == 1

    # What a module is made of ----------------------------------------------------------------------------------------

    def _matrices(self, module: nn.Module) -> list[int]:
        """Sizes of the weights with two axes or more, without embeddings."""
        if id(module) not in self._sizes:
            inside = [part for part in module.modules() if not isinstance(part, nn.Embedding)]
            self._sizes[id(module)] = [
                weight.numel() for part in inside for weight in part.parameters(recurse=False) if weight.dim() > 1
            ]
        return self._sizes[id(module)]

    def _size(self, calls: Sequence[ModuleCall]) -> int:
        return sum(sum(self._matrices(call.module)) for call in calls)

    def _signature(self, call: ModuleCall) -> tuple[Any, ...]:
        """Class and weights of a module: blocks of a stack agree in them, attention and feed-forward differ."""
        module = call.module
        if id(module) not in self._signatures:
            names = tuple(name for name, weight in module.named_parameters() if weight.dim() > 1)
            names = names if self.by_weights else ()
            self._signatures[id(module)] = type(module), names
        return self._signatures[id(module)]
