"""`Mapper`: maps as columns of a table, for `datasets.Dataset.map` and `ray.data.Dataset.map_batches`."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from tensorlens.errors import InputError, check_iterable
from tensorlens.lens import Lens, load
from tensorlens.maps.methods import check_question
from tensorlens.maps.targets import METHOD_OF_CLASSES, Target
from tensorlens.maps.token_map import TokenMap, sink_columns
from tensorlens.recording.conventions import Rules
from tensorlens.views.captions import sink_given
from tensorlens.views.printing import Printed

OnError = Literal["raise", "skip"]
EMPTY: dict[str, Any] = {
    "tokens": [],
    "scores": [],
    "target": "",
    "logit": float("nan"),
    "bias_share": float("nan"),
    "prediction": "",
}
"""The columns of a row that could not be mapped."""


class Mapper(Printed):
    """Adds maps to a batch of rows; it holds only settings until it is called, so it can be sent to other processes.

    It adds the columns `tokens` and `scores`, lists with one entry per input token; `target`, `logit` and `bias_share`
    from the map; and `prediction`, the class that the model ranks first. Missing values are an empty text or NaN.

    >>> rows = {"text": ["A cat sat.", "It rained."]}
    >>> Mapper("smollm2-135m")(rows)["target"]  # doctest: +SKIP
    [' It', ' The']

    Args:
        model: A name as for `load`; the model is loaded once per process, with the first batch.
        method: A name in `METHODS`.
        column: The column with the texts.
        target: For `tensor.in_class`; the model's own prediction for each row if None.
        batch_size: Rows per batch; as many as fit into free memory if None.
        device: Where to put the model; the GPU if there is one.
        rules: The conventions, or a rule set by name; see `Rules.of`.
        on_error: ``raise`` for a row that the model cannot take, or ``skip``: it keeps its place with no tokens, and a
            column `error` says why.
        truncate: Whether a text that is too long for the model is cut at its end.
        groups: Sum inputs over ``"words"``, ``"sentences"`` or ``"lines"``, with an attention sink beside them;
            tokens if None.
        loading: Anything else that `load` takes.
    """

    def __init__(
        self,
        model: str,
        method: str = METHOD_OF_CLASSES,
        *,
        column: str = "text",
        target: Target | None = None,
        batch_size: int | None = None,
        device: str | None = None,
        rules: Rules | str | None = None,
        on_error: OnError = "raise",
        truncate: bool = False,
        groups: str | None = None,
        **loading: Any,
    ) -> None:
        if not isinstance(model, str):
            raise InputError(f"`Mapper` takes a model by name; got {type(model).__name__}. Use `lens.maps` for a lens.")
        check_question(method, target)
        self.model, self.method, self.column, self.target = model, method, column, target
        self.batch_size, self.truncate, self.groups = batch_size, truncate, groups
        self.on_error: OnError = on_error
        self.loading = loading | {"device": device, "rules": rules}

    def __repr__(self) -> str:
        """One line: model, method and column."""
        return f"Mapper({self.model!r}, method={self.method!r}, column={self.column!r})"

    def __call__(self, rows: Mapping[str, Any]) -> dict[str, Any]:
        """The same rows with the columns of their maps.

        Args:
            rows: Columns by name: lists or arrays of one length.
        """
        if self.column not in rows:
            raise InputError(f"Expected a column {self.column!r}; got {', '.join(rows)}. Name it with `column`.")
        found, skipped = self.part(check_iterable(rows[self.column], self.column, "rows, such as batched=True gives"))
        made = {name: [one[name] for one in found] for name in EMPTY}
        if self.on_error == "skip":
            reasons = dict(skipped)
            made["error"] = [reasons.get(row, "") for row in range(len(found))]
        return {**rows, **made}

    def lens(self) -> Lens:
        """The lens of this process."""
        return _lens(self.model, self.loading)

    def part(
        self, values: Sequence[Any], first: int = 0, *, progress: bool | None = False
    ) -> tuple[list[dict[str, Any]], list[tuple[int, str]]]:
        """For each row the columns of its map, `EMPTY` for one that was skipped; and (row, reason) of those.

        Args:
            values: The texts.
            first: Number of the first one in error messages.
            progress: Whether to show a progress bar; on a terminal if None.
        """
        skipped: list[tuple[int, str]] = []
        maps = self.lens().maps(
            values,
            self.method,
            target=self.target,
            batch_size=self.batch_size,
            on_error=self.on_error,
            skipped=skipped,
            truncate=self.truncate,
            progress=progress,
            first_row=first,
        )
        grouped = (one if self.groups is None else one.group(self.groups) for one in maps)
        made = iter([map_columns(one) for one in grouped])
        skipped = [(row - first, reason) for row, reason in skipped]
        bad = {row for row, _ in skipped}
        return [dict(EMPTY) if row in bad else next(made) for row in range(len(values))], skipped


def map_columns(found: TokenMap) -> dict[str, Any]:
    """One table row from a map of one output, including the share of an attention sink."""
    aside = list(sink_columns(found.scores, found.meta))
    sinks = sink_given(found.meta, found.shape[0]) or found.scores[:, aside].sum(1)
    target, logit = found.meta.get("target"), found.meta.get("logit")
    return {
        "tokens": list(found.in_tokens),
        "scores": found.scores[-1].tolist(),
        "target": target if isinstance(target, str) else "",
        "logit": logit[-1] if logit else float("nan"),
        "bias_share": float(found.bias_share[-1]),
        "prediction": found.meta.get("prediction") or "",
        "sink": float(sinks[-1]),
    }


_lenses: dict[str, Lens] = {}
_loading = threading.Lock()


def _lens(model: str, loading: dict[str, Any]) -> Lens:
    """The lens of this process for a model with these options."""
    key = f"{model} {sorted(loading.items(), key=lambda item: item[0])}"
    with _loading:
        if key not in _lenses:
            _lenses[key] = load(model, **loading)
        return _lenses[key]
