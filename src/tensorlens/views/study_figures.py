"""Figures of studies, from their plain summaries; vector output for print."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

from tensorlens.errors import missing_extra

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def new_figure(width: float, height: float, layout: Any = "constrained") -> Figure:
    """A figure of this size in inches.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise missing_extra("Drawing a figure", "matplotlib", "plot") from None
    return Figure(figsize=(width, height), layout=layout)


def figure_svg(figure: Figure) -> str:
    """A figure as an SVG document, the same bytes each time, its words as text that can be searched and read aloud."""
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "tensorlens", "svg.fonttype": "none"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


# Perturbation ---------------------------------------------------------------------------------------------------------

# Colours that stay apart for colour-blind readers (Okabe and Ito), then the same dashed.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6D1F", "#555555")
STYLES = tuple((colour, dashes) for dashes, colour in product(("-", "--", ":", "-."), COLOURS))
Panel = tuple[str, str, Mapping[str, Sequence[float]]]
"""Title, label of the vertical axis, and values by method, one per point of the grid."""


def perturbation_curves(panels: Sequence[Panel], grid: Sequence[float], methods: Sequence[str]) -> Figure:
    """Line charts over the fractions of tokens replaced, with one legend, in the order of the first panel.

    Args:
        panels: At most two side by side.
        grid: Fractions of tokens replaced.
        methods: All methods of the run, so that each has the same colour in every figure.
    """
    n_columns = min(2, len(panels))
    n_rows = -(-len(panels) // n_columns)
    width, height = 2.5 + 4.4 * n_columns, 3.4 * n_rows  # one panel is as wide as a page with two columns
    figure = new_figure(width, height, None)  # a layout engine would take as long as the rest of a small run
    right, place = 1 - 2.2 / width, {"wspace": 0.2, "hspace": 0.35}
    figure.subplots_adjust(0.6 / width, 0.5 / height, right, 1 - 0.3 / height, **place)
    every = figure.subplots(n_rows, n_columns, squeeze=False).flatten()
    for axes, (title, label, curves) in zip(every, panels, strict=False):
        for name, curve in curves.items():
            colour, dashes = STYLES[methods.index(name) % len(STYLES)]
            axes.plot(grid, curve, dashes, color=colour, lw=1.4, label=name)
        axes.set_title(title, fontsize=8, loc="left")
        axes.set_xlabel("fraction of tokens replaced", fontsize=8)
        axes.set_ylabel(label, fontsize=8)
        axes.set_xlim(grid[0], grid[-1])
        axes.set_ylim(bottom=0)
        axes.tick_params(labelsize=7)
        axes.grid(axis="y", alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in every[len(panels) :]:
        axes.remove()
    legend = every[0].get_legend_handles_labels()
    place = {"loc": "upper left", "bbox_to_anchor": (right + 0.1 / width, 1 - 0.2 / height)}
    figure.legend(*legend, **place, fontsize=6.5, frameon=False, handlelength=2.6)
    return figure


# Fidelity -------------------------------------------------------------------------------------------------------------

ERROR_CURVES = {
    "tensor": ("tensor: ‖T(X+ε)+B − F(X+ε)‖", "#2b6cb0", "-"),
    "jacobian": ("Jacobian: ‖F(X)+Jε − F(X+ε)‖", "#2f855a", "-"),
    "nothing": ("no change: ‖F(X) − F(X+ε)‖", "#718096", "-"),
    "bound_norm": ("Prop. 1, measured ‖T‖₂", "#dd6b20", "--"),
    "bound_measured": ("Prop. 1, product with measured gates", "#c05621", ":"),
    "bound_weights": ("Prop. 1, product from weights", "#9b2c2c", ":"),
}
PANELS = {
    "stable_rank": "stable rank of T[i]",
    "effective_rank": "effective rank of T[i]",
    "mean_pair_effective_rank": "effective rank of a D × D block",
    "token_perplexity": "input tokens (perplexity)",
    "token_sparsity": "sparsity over tokens",
    "bias_share": "share of the bias",
}
KIND_STYLES = {
    "single": ("block n alone", "#2b6cb0"),
    "prefix": ("blocks 0 to n", "#dd6b20"),
    "suffix": ("blocks n to the end", "#2f855a"),
}


def error_curves(summary: dict[str, Any]) -> Figure:
    """Error over size on log axes, one panel per kind of direction; then a panel with each value for the norm."""
    kinds = summary["kinds"]
    figure = new_figure(3.4 * len(kinds) + 3.4, 3.8)
    *axes, last = figure.subplots(1, len(kinds) + 1)
    for panel, (kind, found) in zip(axes, kinds.items(), strict=True):
        for name, (label, colour, style) in ERROR_CURVES.items():
            curve = found["curves"].get(name)
            if curve is not None:
                panel.plot(found["sizes"], curve["median"], style, color=colour, label=label)
                panel.fill_between(found["sizes"], curve["low"], curve["high"], color=colour, alpha=0.12, lw=0)
        panel.set(xscale="log", yscale="log", xlabel="‖ε‖ / ‖X‖", title=f"{kind} directions")
        # The products may be 10⁶⁰ times too large: they have a panel of their own.
        lowest = max(min(found["curves"]["jacobian"]["median"]), 1e-9)
        panel.set_ylim(lowest / 3, 100 * max(found["curves"]["bound_norm"]["high"]))
    axes[0].set_ylabel("error / ‖F(X)‖")
    _looseness(last, summary["norms"])
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncol=3, fontsize=7, frameon=False)
    return figure


def _looseness(panel: Any, norms: dict[str, Any]) -> None:
    bars = {
        "measured ‖T‖₂": (math.log10(max(norms["measured"], 1e-300)), ERROR_CURVES["bound_norm"][1]),
        "product,\nmeasured gates": (norms["log10_measured"], ERROR_CURVES["bound_measured"][1]),
        "product,\nfrom weights": (norms["log10_weights"], ERROR_CURVES["bound_weights"][1]),
    }
    known = {name: (value, colour) for name, (value, colour) in bars.items() if value is not None}
    values, colours = zip(*known.values(), strict=True)
    drawn = panel.barh(range(len(known)), values, color=colours)
    panel.bar_label(drawn, [f"10^{value:.1f}" for value in values], padding=2, fontsize=7)
    panel.set_yticks(range(len(known)), list(known), fontsize=7)
    panel.set(title="upper bounds of ‖T‖₂", xlabel="log₁₀")
    panel.margins(x=0.25)


def property_panels(records: list[dict[str, Any]]) -> Figure:
    """Each property over the blocks: alone, from the first on, and up to the last."""
    figure = new_figure(9.0, 5.0)
    axes = figure.subplots(2, 3).flatten()
    for panel, (name, title) in zip(axes, PANELS.items(), strict=True):
        for kind, (label, colour) in KIND_STYLES.items():
            points = [(_place(record), record[name]) for record in records if record["kind"] == kind]
            if points:
                panel.plot(*zip(*sorted(points), strict=True), color=colour, marker=".", label=label)
        panel.set_title(title, fontsize=9)
        panel.set_xlabel("block n", fontsize=8)
        panel.xaxis.get_major_locator().set_params(integer=True)
        if name != "bias_share":
            panel.set_ylim(bottom=0)
    axes[0].legend(fontsize=7, frameon=False)
    return figure


def _place(record: dict[str, Any]) -> int:
    return record["stop"] - 1 if record["kind"] == "prefix" else record["start"]


# Relations ------------------------------------------------------------------------------------------------------------

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
