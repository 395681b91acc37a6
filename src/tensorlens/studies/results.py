"""What every study returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tensorlens.errors import InputError


@dataclass(frozen=True, kw_only=True)
class StudyResult:
    """A finished run.

    ``result["n_samples"]`` is short for ``result.summary["n_samples"]``.

    Attributes:
        folder: Where it is.
        summary: What `summary.json` holds.
    """

    folder: Path
    summary: dict[str, Any]

    @property
    def report(self) -> Path:
        """The page with figures and tables."""
        return self.folder / "report.html"

    def __getitem__(self, key: str) -> Any:
        return self.summary[key]

    def areas(self, condition: str | None = None, metric: str = "hs_mse", order: str = "most") -> dict[str, float]:
        """Of a perturbation study: the area under the curve of each method, best first.

        Args:
            condition: Preset and replacement, as the summary calls them; the first if None.
            metric: ``hs_mse`` or ``abs_aopc``.
            order: ``most`` relevant first, or ``least``.

        Raises:
            InputError: no sample could be measured, or the study is another.
        """
        conditions = self.summary.get("conditions")
        if conditions is None:
            raise InputError("Only a perturbation study has areas; this is another. Read `summary` instead.")
        if not conditions:
            raise InputError(f"No sample could be measured; the first: {self.summary['skipped'][0]['reason']}")
        chosen = conditions[next(iter(conditions)) if condition is None else condition]
        methods = chosen.get(order, {}).get(metric, {"methods": {}})["methods"]  # none where every method has a gap
        return {name: methods[name]["auc"] for name in best_first(methods, order)}


def best_first(methods: Mapping[str, Any], order: str) -> list[str]:
    """The methods of a perturbation study by their area: the largest first where the most relevant tokens go first."""
    return sorted(methods, key=lambda name: methods[name]["auc"], reverse=order == "most")
