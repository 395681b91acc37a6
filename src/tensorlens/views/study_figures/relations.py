"""Figures of a relation run, from its summary alone: bars by relation, curves over the starting block."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tensorlens.views.study_figures.canvas import new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LABEL = "agreement with the model"
BARS = {
    "tensor.full.beta1@0": ("Tensor", "#2b6cb0"),
    "tensor.subject.tuned@0": ("Tensor, subject only, β tuned", "#90cdf4"),
    "lre.fixed@embedding": ("LRE, β fixed", "#dd6b20"),
    "lre.tuned@embedding": ("LRE, β tuned", "#fbd38d"),
    "control.mean_output": ("mean output (no subject)", "#a0aec0"),
}
CURVES = {
    "tensor.full.beta1": ("Tensor", "#2b6cb0", "-"),
    "tensor.subject.beta1": ("Tensor, subject only", "#63b3ed", "-"),
    "tensor.subject.tuned": ("Tensor, subject only, β tuned", "#63b3ed", "--"),
    "lre.beta1": ("LRE, β = 1", "#dd6b20", "-"),
    "lre.fixed": ("LRE, β fixed", "#dd6b20", ":"),
    "lre.tuned": ("LRE, β tuned", "#dd6b20", "--"),
}


def relation_bars(summary: dict[str, Any]) -> Figure:
    """Agreement by relation, one panel per category, deviations over splits, chance and majority as dashes."""
    by_category = {name: keys for name, keys in summary["survived"].items() if keys}
    n_relations = max(len(keys) for keys in by_category.values())
    figure = new_figure(max(5.0, 0.55 * n_relations + 1.5), 2.6 * len(by_category))
    axes = figure.subplots(len(by_category), 1, squeeze=False)[:, 0]
    for panel, (category, keys) in zip(axes, by_category.items(), strict=True):
        _bars(panel, [summary["relations"][key] for key in keys])
        labels = [key.split("/")[-1].replace("_", " ") for key in keys]
        panel.set_xticks(range(len(keys)), labels, rotation=35, ha="right", fontsize=7)
        panel.set(title=category, ylim=(0, 1.05))
    figure.supylabel(LABEL, fontsize=9)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncol=3, fontsize=7, frameon=False)
    return figure


def _bars(panel: Any, relations: list[dict[str, Any]]) -> None:
    names = [name for name in BARS if all(name in r["methods"] for r in relations)]
    width = 0.8 / max(len(names), 1)
    for i, name in enumerate(names):
        label, colour = BARS[name]
        scores = [r["methods"][name]["agreement"] for r in relations]
        places = [j + (i - (len(names) - 1) / 2) * width for j in range(len(relations))]
        heights, errors = [s["mean"] for s in scores], [s["std"] for s in scores]
        panel.bar(places, heights, width, yerr=errors, color=colour, label=label, error_kw={"lw": 0.6})
    left, right = [j - 0.45 for j in range(len(relations))], [j + 0.45 for j in range(len(relations))]
    for name, dashes in (("chance", "--"), ("majority", ":")):
        heights = [relation[name]["agreement"] for relation in relations]
        panel.hlines(heights, left, right, colors="black", linestyles=dashes, lw=0.8, label=name)


def start_curves(summary: dict[str, Any]) -> Figure:
    """Agreement over the block to start from, one panel per category, with intervals over relations."""
    categories = summary["categories"]
    figure = new_figure(max(5.0, 3.0 * len(categories)), 3.4)
    axes = figure.subplots(1, len(categories), squeeze=False, sharey=True)[0]
    for panel, (category, found) in zip(axes, categories.items(), strict=True):
        for family, (label, colour, style) in CURVES.items():
            points = start_points(found["methods"], family)
            if points:
                starts, middle, low, high = zip(*points, strict=True)
                panel.plot(starts, middle, style, color=colour, marker=".", label=label)
                panel.fill_between(starts, low, high, color=colour, alpha=0.08, lw=0)
        panel.xaxis.get_major_locator().set_params(integer=True)
        panel.axhline(found["majority"]["agreement"], color="black", ls=":", lw=0.8)
        panel.axhline(found["chance"]["agreement"], color="black", ls="--", lw=0.8)
        panel.set(title=f"{category} ({found['n_relations']})", xlabel="first block", ylim=(0, 1.02))
    axes[0].set_ylabel(LABEL)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncol=3, fontsize=7, frameon=False)
    return figure


def start_points(methods: dict[str, Any], family: str) -> list[tuple[int, float, float, float]]:
    """Start, mean and interval of one family of methods, by start."""
    found = []
    for name, scores in methods.items():
        prefix, _, start = name.partition("@")
        if prefix == family and start.isdigit():
            found.append((int(start), *(scores["agreement"][part] for part in ("mean", "low", "high"))))
    return sorted(found)
