"""Questions about the inside of a model: the part of `AttentionTensor` that knows components."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tensorlens.errors import InputError, MethodError, check_iterable, check_whole
from tensorlens.inside.block import Finer
from tensorlens.inside.components import ComponentMap, Effect, carried, component_map
from tensorlens.inside.dictionary import Dictionary, check_features
from tensorlens.inside.graph import ComponentGraph, component_graph
from tensorlens.inside.inside_record import Inside, look_inside
from tensorlens.inside.patching import Ablation, Named, Replacement, ablation
from tensorlens.inside.score import By, grouped, score_map
from tensorlens.inside.target import Explained
from tensorlens.maps.groups import Groups, find_groups
from tensorlens.maps.targets import MAX_NODES, METHOD_OF_CLASSES, OUT_TOKEN, SHARE, Context, Feature, Target
from tensorlens.maps.tensor_maps import BY_COMPLETENESS, not_carried
from tensorlens.maps.token_map import TokenMap
from tensorlens.models.runner import own_modes
from tensorlens.operators.operator import FrozenOperator


class InsideQuestions(ABC):
    """Questions about components. Abstract; `AttentionTensor` is the subclass that answers them."""

    operator: FrozenOperator
    context: Context

    @abstractmethod
    def meta(self) -> dict[str, Any]:
        """The origin that maps record."""

    @own_modes
    def components(
        self,
        out_token: int = OUT_TOKEN,
        target: Target | None = None,
        effect: Effect = "total",
        *,
        neurons: Sequence[int] = (),
        experts: Sequence[int] = (),
        features: Mapping[int, Dictionary] | None = None,
    ) -> ComponentMap:
        r"""The contribution of each head, feed-forward and bias to a target, at every token, by one backward pass.

        Args:
            out_token: The output to explain; a head that reads the whole input at once has only one.
            target: As for `map`; None explains the model's own prediction. `Dictionary.feature` gives a feature as the
                target, which the earlier components explain.
            effect: ``"total"``: $e_c = ⟨\partial t/\partial y_c, y_c⟩$, all paths from a component to the target.
                ``"direct"``: the path along the residual stream alone; these sum to the target.
            neurons: Blocks whose feed-forwards are split into neurons: the channels that enter their last matrix.
            experts: Blocks whose feed-forwards are split into the chosen experts; elsewhere a mixture of experts is one
                feed-forward.
            features: Dictionaries by block. They replace what they decompose with active features, the decoder's bias
                and the error, which sum to it; `meta["error_share"]` is the error's share of its variance.
        """
        start, stop = self.operator.span
        named = [check_iterable(some, name, "blocks") for name, some in (("neurons", neurons), ("experts", experts))]
        wrong = [n for some in named for n in some if type(n) is not int or not 0 <= n < stop - start]
        if wrong:
            raise InputError(f"This operator has no block {wrong[0]!r}; expected some of 0 to {stop - start - 1}.")
        in_neurons, in_experts = (frozenset(start + n for n in blocks) for blocks in named)
        finer = Finer(in_neurons, in_experts, self._features(features))
        return component_map(self._explained(out_token, target), effect, finer)

    def _features(self, features: Mapping[int, Dictionary] | None) -> dict[int, Dictionary]:
        start, stop = self.operator.span
        return {start + n: one for n, one in check_features(features or {}, stop - start).items()}

    @own_modes
    def graph(
        self,
        out_token: int = OUT_TOKEN,
        target: Target | None = None,
        share: float = SHARE,
        *,
        max_nodes: int = MAX_NODES,
        features: Mapping[int, Dictionary] | None = None,
    ) -> ComponentGraph:
        r"""The flow from the input to a target, by component and token: nodes and signed edges.

        The edge from b to c is $⟨λ^c, y_b⟩$ with $λ^c$ the cotangent of c where it reads the stream, pulled along the
        stream alone; the edges into a node sum to its total effect. The graph grows from the target, the heaviest edge
        first.

        Args:
            out_token: The output to explain.
            target: As for `map`; None explains the model's own prediction.
            share: Stop when the edges carry this share of the magnitude of everything that flows into the nodes.
            max_nodes: Add no more nodes than this; the record says which share was reached.
            features: As for `components`: nodes are then features, and the edge from b to feature k is what b gave to
                the encoder's row of k; the feature is held as active.
        """
        finer = Finer(features=self._features(features))
        return component_graph(self._explained(out_token, target), share, max_nodes, finer)

    @own_modes
    def inside(
        self,
        out_token: int = OUT_TOKEN,
        target: Target | None = None,
        share: float = SHARE,
        *,
        max_nodes: int = MAX_NODES,
        n_whys: int = 4,
    ) -> Inside:
        """Components, flow, what heads read, and the graph of one target, together; `.save("inside.html")` is a page.

        Args:
            out_token: The output to explain.
            target: As for `map`; None explains the model's own prediction.
            share: As for `graph`.
            max_nodes: As for `graph`.
            n_whys: Number of heads, the strongest first, for which to say why they attended where they did: two pair
                maps each.
        """
        check_whole(n_whys, "n_whys")
        return look_inside(self._explained(out_token, target), share, max_nodes, n_whys)

    @own_modes
    def score(
        self,
        block: int,
        head: int,
        query: int,
        key: int | tuple[int, int],
        *,
        by: By = "token",
        attention: int | None = None,
        groups: Groups | None = None,
    ) -> TokenMap:
        r"""Why a head attended there: its score $c·q_i^T k_j$ before softmax and before any soft cap, over pairs.

        Rows are inputs of the query, columns inputs of the key, the bias last in both. The sum of all entries is the
        score; the last corner includes any term that the model adds to it.

        Args:
            block: Which one.
            head: Counts query heads.
            query: The token that attends.
            key: The token it attends to, or a pair of tokens for the difference of two scores.
            by: ``"token"``: pairs of input tokens. ``"component"``: pairs of earlier components, by what each wrote to
                the stream where the query and the key read it.
            attention: Which attention layer of the block, from 0, if it has several. Queries and keys count the tokens
                of this layer.
            groups: As for `map`: rows and columns are summed by group, the bias apart.
        """
        own = ("model", "versions", "blocks", "heads", "rules")
        meta = {name: value for name, value in self.meta().items() if name in own}
        tokens = self.context.tokens
        if groups is not None and by == "component":
            raise InputError("Groups are groups of tokens; leave them out with by='component'.")
        made = score_map(self.operator, block, head, query, key, by=by, attention=attention, tokens=tokens, meta=meta)
        return made if groups is None else grouped(made, find_groups(groups, tokens, self.meta()))

    @own_modes
    def ablate(
        self,
        components: Sequence[Named] | Named,
        out_token: int = OUT_TOKEN,
        target: Target | None = None,
        *,
        to: Replacement = "zero",
        over: Sequence[InsideQuestions] = (),
    ) -> Ablation:
        """Run the *model* with components switched off, and compare T's prediction with the true result.

        Args:
            components: Heads as (block, head), components of `components`, or their names; all of them at once.
            out_token: The output to measure.
            target: As for `map`; None measures the model's own prediction.
            to: What replaces their outputs at every token: ``"zero"``, or their ``"mean"`` over tokens.
            over: Attention tensors of other inputs to take the mean over, instead of this one.
        """
        others = check_iterable(over, "over", "attention tensors")
        if not all(isinstance(one, InsideQuestions) for one in others):
            raise InputError(f"`over` must be a list of attention tensors; got {over!r:.60}.")
        return ablation(self._explained(out_token, target), components, to, [one.operator for one in others])

    def map_of_feature(
        self, target: Feature, out_tokens: Sequence[int], method: str = METHOD_OF_CLASSES, groups: Groups | None = None
    ) -> TokenMap:
        r"""Contributions of inputs to a feature at some tokens: $⟨\partial t/\partial x_j, x_j⟩$, one pull each."""
        if method != METHOD_OF_CLASSES:
            raise MethodError(f"A feature is a target of `{METHOD_OF_CLASSES}` alone; got `{method}`.")
        runs = [self._explained(i, target).run() for i in out_tokens]
        scores = torch.stack([carried(run, run.start) for run in runs])
        values = torch.tensor([run.value for run in runs], dtype=torch.float64)
        notes = {"target": str(target), "logit": values.tolist(), "bias": BY_COMPLETENESS, "sums_to": str(target)}
        found = TokenMap(
            scores=scores,
            out_tokens=tuple(self.context.tokens[i] for i in out_tokens),
            in_tokens=self.context.tokens,
            method=METHOD_OF_CLASSES,
            bias_share=not_carried(scores, values.to(scores.device)),
            meta=self.meta() | notes | {"out_positions": list(out_tokens)},
        )
        return found if groups is None else found.group(groups)

    def _explained(self, out_token: int, target: Target | None) -> Explained:
        return Explained.of(self, out_token, target)
