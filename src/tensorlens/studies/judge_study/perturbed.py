"""Perturbation as a judge: the perturbation study of every member, on the same windows of text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tensorlens.lens import Lens
from tensorlens.studies.judge_study.methods import WORD_OVERLAP, default_methods
from tensorlens.studies.judge_study.options import JudgeOptions
from tensorlens.studies.members import member_lens, split
from tensorlens.studies.perturbation_study.run import perturbation

N_TOKENS = 128
"""Tokens of a window, as in the paper."""


def perturbed(lens: Lens, file: Path, out: Path, options: JudgeOptions, progress: bool | None) -> dict[str, Any]:
    """Areas under the curve of HS-MSE by method, most relevant first, with intervals; a run for each member.

    Args:
        lens: The model.
        file: The text.
        out: Folder of the judges' run.
        options: Which methods, and how many windows.
        progress: Whether to show a bar.
    """
    names = default_methods() if options.methods is None else options.methods
    areas: dict[str, Any] = {}
    for member in dict.fromkeys(split(name)[1] for name in names):
        chosen = [name for name in names if split(name)[1] == member and name != WORD_OVERLAP]
        other = member_lens(lens, member)
        result = perturbation(
            other,
            file,
            out / f"perturbation-{member}",
            methods=[split(name)[0] for name in chosen],
            cut="windows",
            n_tokens=N_TOKENS,
            limit=options.limit,
            norm_probes=16,
            seed=options.seed,
            progress=progress,
        )
        areas |= _areas(result.summary, chosen)
    return dict(sorted(areas.items(), key=lambda pair: -pair[1]["auc"]))


def _areas(summary: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    condition = next(iter(summary["conditions"].values()), {})
    found = condition.get("most", {}).get("hs_mse", {"methods": {}})["methods"]
    return {
        name: {part: found[split(name)[0]][part] for part in ("auc", "interval", "n")}
        for name in names
        if split(name)[0] in found
    }
