"""Figures of a fidelity run, from its summary: errors and bounds over the size of a move; properties over blocks."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from tensorlens.views.study_figures.canvas import new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CURVES = {
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
    """Error over size on log axes, one panel per kind of direction; then how large each value for the norm is."""
    kinds = summary["kinds"]
    figure = new_figure(3.4 * len(kinds) + 3.4, 3.8)
    *axes, last = figure.subplots(1, len(kinds) + 1)
    for panel, (kind, found) in zip(axes, kinds.items(), strict=True):
        for name, (label, colour, style) in CURVES.items():
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
        "measured ‖T‖₂": (math.log10(max(norms["measured"], 1e-300)), CURVES["bound_norm"][1]),
        "product,\nmeasured gates": (norms["log10_measured"], CURVES["bound_measured"][1]),
        "product,\nfrom weights": (norms["log10_weights"], CURVES["bound_weights"][1]),
    }
    known = {name: (value, colour) for name, (value, colour) in bars.items() if value is not None}
    values, colours = zip(*known.values(), strict=True)
    drawn = panel.barh(range(len(known)), values, color=colours)
    panel.bar_label(drawn, [f"10^{value:.1f}" for value in values], padding=2, fontsize=7)
    panel.set_yticks(range(len(known)), list(known), fontsize=7)
    panel.set(title="what ‖T‖₂ is bounded by", xlabel="log₁₀")
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
