"""`Explanation`: one question to a model, answered by the method that benchmarks recommend for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from pathlib import Path

from msgspec.structs import replace
from rich.console import Console
from rich.text import Text

from tensorlens.errors import InputError
from tensorlens.inside.components import ComponentMap
from tensorlens.maps.groups import sentences
from tensorlens.maps.methods import METHODS
from tensorlens.maps.targets import MapQuestion, default_output, has_predictions, headline_of_states, headlined, no_head
from tensorlens.maps.token_map import TokenMap
from tensorlens.operators.certificate import Certificate
from tensorlens.recommendations import Recommendation
from tensorlens.recording.conventions import Rules
from tensorlens.tensor import AttentionTensor, Prediction
from tensorlens.views.captions import badge, predicted
from tensorlens.views.printing import as_html, heading, print_parts
from tensorlens.views.table import Table, Tabular
from tensorlens.views.terminal import show_body

N_PREDICTIONS = 3
GROUPS = {"passage": "sentences"}
"""The default grouping of inputs by question; words for other questions."""


def in_words(found: TokenMap) -> TokenMap:
    """The map with one input per word if scores add up; signed scores do, norms do not."""
    adds_up = METHODS[found.method].signed and found.meta.get("grid") is None
    return found.group("words") if adds_up else found


class Explanation(Tabular):
    """Why a model predicts what it predicts. Made by `Lens.explain`; terminals and notebooks show it.

    The model has run already; the map and the certificate are computed on first use.

    Attributes:
        tensor: The operator that it is computed from.
        recommendation: The rules, the method and the target in use.
        out_token: The output that is explained.
    """

    def __init__(
        self,
        tensor: AttentionTensor,
        recommendation: Recommendation,
        target: str | int | None,
        against: str | int | None,
        *,
        tokens: bool,
    ) -> None:
        self.tensor, self.recommendation, self.out_token = tensor, recommendation, default_output(tensor)
        self._by_token = tokens
        recording, of_tokens = tensor.operator.recording, recommendation.method != "components"
        has_head = has_predictions(tensor)
        if has_head:
            against = self._runner_up(target) if against is None else against
        elif target is not None or against is not None or not of_tokens:
            raise no_head(recording.name)
        method = recommendation.method if has_head and of_tokens else None
        self._question = MapQuestion.complete(tensor, method, None, target, against, is_one=has_head)
        place = self._question.place(tensor)
        self._asked = headlined(recording, tensor.context, place, target, against) if has_head else None

    def _runner_up(self, target: str | int | None) -> int | None:
        """The likeliest other token or class, if it is recommended to ask against it."""
        if self.recommendation.target != "runner_up" or len(self._predictions) < 2 or isinstance(target, (tuple, list)):
            return None
        T = self.tensor
        named = headlined(T.operator.recording, T.context, self.out_token, target).asked.weights
        return next((one.index for one in self._predictions if one.index not in named), None)

    @cached_property
    def _predictions(self) -> list[Prediction]:
        return self.tensor.predictions(N_PREDICTIONS, self.out_token)

    def __repr__(self) -> str:
        """The question."""
        return f"Explanation({self.headline})"

    @property
    def prediction(self) -> Prediction | None:
        """The model's top prediction; None for a model without a head."""
        return self._predictions[0] if self._asked is not None else None

    @property
    def rules(self) -> Rules:
        """The rules of the operator."""
        return self.tensor.operator.recording.rules

    @property
    def because(self) -> str:
        """The reason for these rules, one sentence with a number; empty without a head, where nothing was measured."""
        return "" if self._asked is None else self.recommendation.because

    @property
    def note(self) -> str:
        """How the target was read, such as with a leading space, and how to ask for a masked token; often empty."""
        classes, recording = self.tensor.context.classes, self.tensor.operator.recording
        if self._asked is None or classes is None:
            return ""
        mask = None if classes.labels or recording.pools else getattr(classes.tokenizer, "mask_token", None)
        is_missing = (
            mask is not None and mask not in self.tensor.out_tokens and not self.tensor.context.meta.get("causal")
        )
        hint = f"To explain a masked token, write {mask} in its place." if is_missing else ""
        return " ".join(part for part in (self._asked.asked.note, hint) if part)

    def _table(self) -> Table:
        return self.map._table()

    @property
    def headline(self) -> str:
        """The question in one sentence: Why “ Paris” (70 %) rather than “ London” after “… in the city of”?"""
        if self._asked is not None:
            return self._asked.headline
        return headline_of_states(self.tensor.context, self.tensor.out_tokens, self.out_token)

    @cached_property
    def map(self) -> TokenMap | ComponentMap:
        """The contribution of each word, passage or component; its `meta` includes the headline."""
        if self.recommendation.method == "components" and self._asked is not None:
            found = self.tensor.components(self.out_token, self._asked.asked.weights)
        else:
            found = self._token_map()
        said = {"headline": self.headline} if self._asked is None else {"because": self.because} | self._asked.meta
        return replace(found, meta=found.meta | said | {"certificate": self.tensor.meta()["certificate"]})

    def _token_map(self) -> TokenMap:
        found = self._question.answered(self.tensor, self._asked, self.tensor.map)
        if self._by_token or found.meta.get("grid") is not None:
            return found
        text, groups = found.meta.get("text"), GROUPS.get(self.recommendation.question, "words")
        is_one = groups == "sentences" and isinstance(text, str) and len(sentences(text)) == 1
        return found.group("words" if is_one else groups)

    def certificate(self) -> Certificate:
        """Whether the operator is exact, measured on first use; maps saved afterwards include it."""
        found = self.tensor.certificate()
        self.map = replace(self.map, meta=self.map.meta | {"certificate": found.verdict})
        return found

    # Showing ----------------------------------------------------------------------------------------------------------

    def lines(self) -> list[str]:
        """The lines before the map: the headline, the model's prediction, and the note."""
        said = [predicted([(one.name, one.probability) for one in self._predictions])] if self.prediction else []
        return [self.headline, *said, *([self.note] if self.note else [])]

    def badge(self) -> str:
        """The certificate in one line."""
        found = self.certificate()
        return badge(found.passed, found.errors)

    def show(self, console: Console | None = None) -> None:
        """Print headline, prediction, map and its sum; without a console, to standard output."""
        first, *others = self.lines()
        print_parts([heading(first), *map(Text, others)], console)
        self.show_map(console)

    def show_map(self, console: Console | None = None) -> None:
        """Print the map, its sum and its rules, without its provenance."""
        if isinstance(self.map, TokenMap):
            show_body(self.map.view(), console)
        else:
            self.map.show(console=console)
        print_parts([Text(f"Rules {self.rules.name}" + (self.because and f": {self.because}"), style="dim")], console)

    def _repr_html_(self) -> str:
        if isinstance(self.map, TokenMap):
            return self.map._repr_html_()
        return as_html(self.show)

    def save(self, path: str | Path) -> Path:
        """Write the map with its headline, in the format of the suffix; see `TokenMap.save`.

        A page of components is the page of `T.inside` for the same target.
        """
        if isinstance(self.map, ComponentMap) and self._asked is not None and Path(path).suffix.lower() == ".html":
            return self.tensor.inside(self.out_token, self._asked.asked.weights).save(path)
        return self.map.save(path)


def sink_apart(look: Callable[[Rules], AttentionTensor], rules: Rules) -> AttentionTensor:
    """The operator, with an attention sink's contribution in B where it can be separated from that of the word."""
    if rules.attention == "hold":
        with suppress(InputError):  # not causal, or without tokens
            T = look(dataclasses.replace(rules, sink="hold"))
            since = T.operator.recording.rules.sink
            if isinstance(since, int) and since < T.operator.recording.n_blocks:
                return T
    return look(rules)
