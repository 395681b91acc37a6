"""From what a method found, on whatever device, to maps: copies to the CPU, names of targets, notes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tensorlens.device_work import on_its_way
from tensorlens.maps.methods import Answer, Question
from tensorlens.maps.targets import Classes
from tensorlens.tolerances import MAP_NOISE

WARNING = (
    "these scores are what is left of sums that cancel: {kept:.0e} of their magnitudes, so that rounding may be "
    "{noise:.0%} of them. Use a wider type, or rules that hold more, such as `Rules.paper()`"
)


@dataclass(frozen=True)
class Finished:
    """An answer on the CPU.

    Attributes:
        scores: (row, in_token).
        bias_share: (row,).
        names: What each row's target is called, if it explains one.
        notes: The same for all rows.
        by_row: Numbers per row.
    """

    scores: Tensor
    bias_share: Tensor
    names: tuple[str, ...] | None
    notes: dict[str, Any]
    by_row: dict[str, Tensor]

    def meta(self, rows: slice | int = slice(None)) -> dict[str, Any]:
        """Notes for a map of some rows, or of one."""
        chosen = slice(rows, rows + 1) if isinstance(rows, int) else rows
        found: dict[str, Any] = dict(self.notes)
        if self.names is not None:
            names = self.names[chosen]
            found["explains" if found.pop("explains", None) else "target"] = (
                names[0] if len(set(names)) == 1 else list(names)
            )
        if "logit" in self.by_row:
            found["logit"] = self.by_row["logit"][chosen].tolist()
        if "kept" in self.by_row:
            kept, noise = self.by_row["kept"][chosen], self.by_row["noise"][chosen]
            found["kept"] = kept.tolist()
            worst = int(noise.argmax())
            if float(noise[worst]) > MAP_NOISE:
                found["warning"] = WARNING.format(kept=float(kept[worst]), noise=min(1.0, float(noise[worst])))
        return found


def begin(answer: Answer, classes: Classes | None) -> Callable[[], Finished]:
    """Start copying an answer to the CPU; a call waits for it, and for nothing that was begun later."""
    waiting = {"scores": on_its_way(answer.scores), "bias_share": on_its_way(answer.bias_share)}
    by_row = {name: on_its_way(values) for name, values in answer.by_row.items()}
    chosen = None if answer.chosen is None else [on_its_way(part) for part in answer.chosen]
    notes = answer.notes

    def finish() -> Finished:
        names = None
        if chosen is not None and classes is not None:
            ids, weights = (part().tolist() for part in chosen)
            names = tuple(
                classes.names({index: weight for index, weight in zip(*row, strict=True) if weight})
                for row in zip(ids, weights, strict=True)
            )
        return Finished(
            waiting["scores"](), waiting["bias_share"](), names, notes, {name: wait() for name, wait in by_row.items()}
        )

    return finish


def predictions(question: Question) -> Callable[[], list[str | None]]:
    """What the model ranks first at each row's output; None for a model without a head."""
    classes = question.classes
    if classes is None or not question.has_classes:
        return lambda: [None] * len(question.out_tokens)
    best = on_its_way(question.logits.argmax(-1))
    return lambda: [classes.name(index) for index in best().tolist()]
