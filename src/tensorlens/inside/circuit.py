r"""`Circuit`: the edges or nodes that carry the difference of a clean and a corrupted input: scored, selected, tested.

    edge(b → r) = ⟨λ_r, y_b(clean) − y_b(corrupted)⟩,   Σ_r edge(b → r) = ⟨λ_b, y_b(clean) − y_b(corrupted)⟩

with λ_r the target's cotangent where r reads the stream, pulled through r alone. The rules of the lens decide λ;
the alternative is gradients averaged along the way from the corrupted input to the clean one (EAP-IG).

A circuit is tested in the model itself. With m the target, M the model on the clean input, C_k the circuit that keeps
the share k of all edges, and everything outside of it as it is for the corrupted input,

    f(k) = (m(C_k) − m(∅)) / (m(M) − m(∅)),   CPR = ∫ f dk,   CMD = ∫ |1 − f| dk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec
import numpy as np
import torch
from rich.console import Console, RenderableType
from torch import Tensor

from tensorlens.errors import (
    InputError,
    MethodError,
    check_choice,
    check_iterable,
    check_lens,
    check_path,
    check_whole,
    missing_extra,
)
from tensorlens.files import write_whole
from tensorlens.inside.graph import ComponentGraph, Edge, GraphFormat, Node
from tensorlens.inside.stream import Component
from tensorlens.inside.target import Explained, Pass
from tensorlens.inside.wiring import TARGET, InputPair, scored_pair
from tensorlens.maps.targets import OUT_TOKEN, Target
from tensorlens.models.runner import own_modes
from tensorlens.progress import bar, check_cancelled
from tensorlens.records import Index, Record
from tensorlens.views.labels import visible
from tensorlens.views.page import curve_svg, inside_page
from tensorlens.views.printing import as_html, heading, print_parts, table
from tensorlens.views.table import Table

SHARES = (0.0, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""Sizes at which circuits are tested, as shares of all edges or nodes."""

N_RESAMPLES = 2000
"""Bootstrap samples of an interval."""

Point = tuple[float, float]
Unit = Literal["edges", "nodes"]
"""The units of a circuit."""

Scoring = Literal["rules", "integrated"]
Order = Literal["magnitude", "signed"]
STEPS = 5
"""Points of integrated gradients."""
SHOWN = 300
"""Number of edges in a graph if nothing was selected."""

CANDIDATES = 20
"""Edges that may be chosen, as a multiple of the budget: the heaviest. Beside them all from the embedding and to the
target, so that every component may be in a circuit, and of every component the two heaviest."""

SECONDS = 60.0
GAP = 1e-3
"""The search stops once its result is proved to be this close to the optimum, or after this many seconds."""


@dataclass(frozen=True, eq=False, repr=False)
class Circuit:
    """Scores of all edges or nodes between a clean and a corrupted input, and a selection of them.

    Attributes:
        unit: ``"edges"`` or ``"nodes"``.
        writers: The embedding and all components, in order.
        readers: All components and the target, in order.
        scores: (reader, writer) for edges, (writer,) for nodes: the part of the target on each, averaged over pairs.
        effects: (writer,): the same for the whole output of a writer; edges sum to it over readers.
        is_wired: (reader, writer): which edges exist.
        target: What is explained.
        value: The target in the clean run minus that in the corrupted one, averaged over pairs.
        kept: The selection, in the shape of `scores`; None for all.
        meta: Model, versions, rules, how it was scored.
    """

    unit: Unit
    writers: tuple[Component, ...]
    readers: tuple[Component, ...]
    scores: Tensor
    effects: Tensor
    is_wired: Tensor
    target: str
    value: float
    pairs: tuple[InputPair, ...]
    kept: Tensor | None = None
    meta: dict[str, Any] = field(default_factory=dict)

    @property
    def _units(self) -> Tensor:
        """Which places of `scores` are edges or nodes."""
        return self.is_wired if self.unit == "edges" else torch.ones_like(self.scores, dtype=torch.bool)

    @property
    def size(self) -> int:
        """How many edges or nodes there are."""
        return int(self._units.sum())

    @property
    def n_kept(self) -> int:
        """How many edges or nodes are selected."""
        return self.size if self.kept is None else int(self.kept.sum())

    def __repr__(self) -> str:
        """One line: how many of how many."""
        chosen = "" if self.kept is None else f"{self.n_kept} of "
        pairs = "1 pair" if len(self.pairs) == 1 else f"{len(self.pairs)} pairs"
        return f"Circuit({chosen}{self.size} {self.unit} on {self.target!r}, {pairs})"

    # Selection --------------------------------------------------------------------------------------------------------

    def _best(self, count: int, order: Order) -> Tensor:
        check_choice(order, "order", get_args(Order))
        places, scores = self._units.nonzero(), self.scores[self._units]
        best = (scores if order == "signed" else scores.abs()).argsort(descending=True, stable=True)[:count]
        chosen = torch.zeros_like(self._units)
        chosen[places[best].unbind(1)] = True
        return chosen

    def select(
        self,
        *,
        share: float | int | None = None,
        count: int | None = None,
        budget: int | None = None,
        order: Order = "magnitude",
    ) -> Circuit:
        """The same circuit with the best edges or nodes selected.

        Args:
            share: This share of all of them, the heaviest.
            count: This number of them, the heaviest.
            budget: At most this number of edges without dead ends: the heaviest set in which every edge is on a path
                from the embedding to the target, by an integer programme (needs scipy).
            order: By ``"magnitude"``, or ``"signed"``: support of the target first.
        """
        if [share, count, budget].count(None) != 2:
            raise InputError("Expected one of `share`, `count` and `budget`.")
        if budget is not None:
            if self.unit != "edges":
                raise InputError("`budget` counts edges; select nodes by `share` or `count`.")
            weights = self.scores if order == "signed" else self.scores.abs()
            return replace(self, kept=best_connected(weights, self.is_wired, check_whole(budget, "budget", 1)))
        if share is not None:
            count = round(_check_share(share, "share") * self.size)
        return replace(self, kept=self._best(min(check_whole(count, "count", 0), self.size), order))

    # Faithfulness -----------------------------------------------------------------------------------------------------

    @own_modes
    def faithfulness(
        self, shares: Sequence[float | int] = SHARES, *, order: Order = "magnitude", progress: bool | None = None
    ) -> Faithfulness:
        """Run the model with circuits of growing size, and everything outside of each as for the corrupted input.

        Args:
            shares: Sizes as shares of all edges or nodes; 0 and 1 are always among them.
            order: As for `select`.
            progress: Whether to show a progress bar; on a terminal if None.
        """
        shares = check_iterable(shares, "shares", "numbers from 0 to 1")
        sizes = sorted({0.0, 1.0, *(_check_share(one, "shares") for one in shares)})
        masks = [self._best(round(share * self.size), order) for share in sizes]
        masks += [] if self.kept is None else [self.kept]
        edges = torch.stack([self._edges(mask) for mask in masks])
        rows = [pair.recovered(edges) for pair in bar(self.pairs, progress)]
        selected = None
        if self.kept is not None:
            of_kept = [row.pop() for row in rows]
            selected = (self.n_kept / self.size, sum(of_kept) / len(of_kept))
        more = {"unit": self.unit, "size": self.size, "selected": selected, "meta": self.meta | {"order": order}}
        return faithfulness_of(rows, sizes, **more)

    def _edges(self, kept: Tensor) -> Tensor:
        """(reader, writer): a node that is kept passes its output to all its readers."""
        return kept if self.unit == "edges" else self.is_wired & kept[None]

    # Looking at it ----------------------------------------------------------------------------------------------------

    def graph(self) -> ComponentGraph:
        """The selected edges as a graph over all tokens; without a selection, the heaviest.

        The edges into a node sum to its score minus the part that is cut off.
        """
        kept = self._best(min(SHOWN, self.size), "magnitude") if self.kept is None else self.kept
        edges = self._edges(kept)
        weights = self.scores if self.unit == "edges" else torch.where(self.is_wired, self.scores[None], 0)
        r, b = edges.nonzero(as_tuple=True)
        heaviest = weights[r, b].abs().argsort(descending=True)
        named = list(dict.fromkeys([TARGET, *map(self.writers.__getitem__, b), *map(self.readers.__getitem__, r)]))
        places = {component: place for place, component in enumerate(named)}
        values = dict(zip(self.writers, self.effects.tolist(), strict=True)) | {TARGET: self.value}
        into = {reader: float((weights[i] * edges[i]).sum()) for i, reader in enumerate(self.readers)}
        nodes = tuple(
            Node(component=one, token=0, value=values[one], cut=values[one] - into.get(one, values[one]))
            for one in named
        )
        made = tuple(
            Edge(
                source=places[self.writers[int(b[i])]],
                target=places[self.readers[int(r[i])]],
                weight=float(weights[r[i], b[i]]),
            )
            for i in heaviest.tolist()
        )
        whole = float((weights * self.is_wired).abs().sum())
        return ComponentGraph(
            nodes=nodes,
            edges=made,
            tokens=("all tokens",),
            target=f"change of {self.target}",
            value=self.value,
            share=float((weights * edges).abs().sum()) / whole if whole else 1.0,
            meta=self.meta
            | {
                "method": "tl.circuit",
                "headline": f"What carries the change of “{visible(self.target)}” between the inputs?",
            },
        )

    def save(self, path: str | Path, *, format: GraphFormat = "tensorlens") -> Path:
        """Write the graph: .html, or .json in this library's format or in circuit-tracer's."""
        return self.graph().save(path, format=format)

    def save_page(self, path: str | Path, judged: Faithfulness) -> Path:
        """Write a page with the curve and the graph, an .html file."""
        graph, path = self.graph(), check_path(path)
        if path.suffix.lower() != ".html" or not isinstance(judged, Faithfulness):
            raise InputError(f"Expected an .html file and a `Faithfulness`; got {path.name!r} and {judged!r:.60}.")
        picture = curve_svg(judged.curve, [f"{share:.1%}" for share, _ in judged.curve])
        low, high = judged.interval
        over_pairs = f" [{low:.3f}, {high:.3f}]" if judged.n_pairs > 1 else ""
        said = [
            f"What circuits of growing size recover of “{self.target}” in the model, everything else corrupted. "
            f"Area under the curve (CPR): {judged.cpr:.3f}{over_pairs}. Area between it and 1 (CMD): {judged.cmd:.3f}. "
            f"There are {judged.size} {self.unit}."
        ]
        if judged.selected is not None:
            share, f = judged.selected
            said.append(f"The graph shows {share:.1%} of the {self.unit}, which recover {f:.3f}.")
        return write_whole(path, inside_page(graph.payload(), f"Circuit of {self.target}", below=[*said, picture]))

    def show(self, k: int = 10, console: Console | None = None) -> None:
        """Print the heaviest edges or nodes that are selected; without a console, to standard output."""
        print_parts(self._printed(k), console)

    def _repr_html_(self) -> str:
        return as_html(lambda console: self.show(console=console))

    def _printed(self, k: int) -> Iterator[RenderableType]:
        yield heading(repr(self))
        kept = (self._units if self.kept is None else self.kept).nonzero()
        scores = self.scores[kept.unbind(1)]
        rows = list[tuple[str, ...]]()
        for i in scores.abs().topk(min(check_whole(k, "k", 1), len(scores))).indices.tolist():
            *reader, writer = kept[i].tolist()
            ends = [self.writers[writer], *(self.readers[r] for r in reader)]
            rows.append((*map(str, ends), f"{float(scores[i]):+.4g}"))
        columns = ("node", "score") if self.unit == "nodes" else ("from", "to", "score")
        yield table(columns, rows, numbers=(len(columns) - 1,))


def _check_share(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= float(value) <= 1:
        raise InputError(f"`{name}` must be from 0 to 1; got {value!r:.60}.")
    return float(value)


# How faithful circuits are --------------------------------------------------------------------------------------------


class Faithfulness(Record, frozen=True, kw_only=True, tag="tensorlens.faithfulness/1"):
    """How faithful circuits of growing size are, each run in the model.

    Attributes:
        curve: (share of all edges or nodes, f): 0 is the corrupted run, 1 the clean one.
        cpr: The area under f; higher is better, but above 1 circuits overshoot.
        cmd: The area between f and 1; lower is better.
        interval: 95 % bootstrap interval of `cpr` over pairs; for one pair, its own value.
        cmd_interval: The same for `cmd`.
        n_pairs: How many pairs of inputs.
        unit: ``"edges"`` or ``"nodes"``.
        size: The number of edges or nodes.
        pairs: f at every share, one row per pair.
        selected: (share, f) of the selection, if there is one.
        meta: Model, versions, rules, and how edges were scored.
    """

    curve: tuple[Point, ...]
    cpr: float
    cmd: float
    interval: Point
    cmd_interval: Point
    n_pairs: Index
    unit: Unit
    size: Index
    pairs: tuple[tuple[float, ...], ...]
    selected: Point | None = None
    meta: dict[str, Any] = msgspec.field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check that every pair has the whole curve."""
        super().__post_init__()
        if len(self.pairs) != self.n_pairs or {len(row) for row in self.pairs} != {len(self.curve)}:
            raise InputError(
                f"Expected {len(self.curve)} numbers for each of {self.n_pairs} pairs; got a different number."
            )

    def __repr__(self) -> str:
        """One line: the areas."""
        pairs = "1 pair" if self.n_pairs == 1 else f"{self.n_pairs} pairs"
        return f"Faithfulness(CPR {self.cpr:.3f}, CMD {self.cmd:.3f}, {pairs}, {self.size} {self.unit})"

    @property
    def headline(self) -> str:
        """The question that it answers."""
        return f"How much of the target do circuits of a share of {self.unit} recover in the model?"

    def _table(self) -> Table:
        """F at every share."""
        return Table(np.array([[f] for _, f in self.curve]), [f"{share:.1%}" for share, _ in self.curve], ["f"])

    def _printed(self, k: int) -> Iterator[RenderableType]:
        yield heading(repr(self))
        yield table((f"share of {self.unit}", "f"), [(f"{share:.1%}", f"{f:.3f}") for share, f in self.curve])


def faithfulness_of(rows: Sequence[Sequence[float]], shares: Sequence[float], **more: Any) -> Faithfulness:
    """The record of curves, one row per pair."""
    values, at = np.asarray(rows, dtype=np.float64), np.asarray(shares, dtype=np.float64)
    cpr, cmd = (np.asarray(np.trapezoid(one, at, axis=1)) for one in (values, np.abs(1 - values)))
    return Faithfulness(
        curve=tuple(zip(map(float, shares), values.mean(0).tolist(), strict=True)),
        cpr=float(cpr.mean()),
        cmd=float(cmd.mean()),
        interval=_interval(cpr),
        cmd_interval=_interval(cmd),
        n_pairs=len(values),
        pairs=tuple(tuple(row) for row in values.tolist()),
        **more,
    )


def _interval(values: np.ndarray) -> Point:
    drawn = np.random.default_rng(0).integers(len(values), size=(N_RESAMPLES, len(values)))
    low, high = np.quantile(values[drawn].mean(1), (0.025, 0.975))
    return float(low), float(high)


# Scoring --------------------------------------------------------------------------------------------------------------


@own_modes
def circuit(
    lens: Any,
    clean: Any,
    corrupted: Any,
    target: Target | Sequence[Target] | None = None,
    *,
    unit: Unit = "edges",
    scores: Scoring = "rules",
    steps: int = STEPS,
    out_token: int = OUT_TOKEN,
    progress: bool | None = None,
) -> Circuit:
    r"""Which edges between components carry the difference between a clean and a corrupted input?

    Args:
        lens: A lens on the model; its rules decide how cotangents are pulled back.
        clean: An input, or a list of texts or of inputs as `lens` takes them.
        corrupted: The same input with something changed, of the same length in tokens; one for each clean one.
        target: As for `patching`; for several pairs one target for all, or a list with one per pair.
        unit: ``"edges"`` between components, or ``"nodes"``: components with all their edges.
        scores: ``"rules"``: $⟨λ, y(clean) - y(corrupted)⟩$ under the rules of the lens. ``"integrated"``: with λ the
            gradient of the model averaged along the way from the corrupted input to the clean one (EAP-IG).
        steps: Points on that way.
        out_token: Where the target is read.
        progress: Whether to show a progress bar; on a terminal if None.

    Raises:
        MethodError: the residual stream of the model is not a plain sum of the outputs of its modules.
    """
    check_lens(lens)
    check_choice(unit, "unit", get_args(Unit))
    check_choice(scores, "scores", get_args(Scoring))
    check_whole(steps, "steps", 1)
    items = _items(clean, corrupted, target)
    pairs, sums, asked = list[InputPair](), list[tuple[Tensor, Tensor]](), None
    for one, other, wanted in bar(items, progress, unit=" pairs"):
        check_cancelled()
        asked = Explained.of(lens(one), out_token, wanted)
        run = Pass(asked.operator, asked.weights, asked.out_token)  # logits alone: a feature has no run of the model
        pair, found = scored_pair(lens, run, other, steps if scores == "integrated" else None)
        pairs.append(pair)
        sums.append(found)
    assert asked is not None, "there is at least one pair"
    wiring = pairs[0].wiring
    edges, effects = (torch.stack(some).mean(0) for some in zip(*sums, strict=True))
    return Circuit(
        unit=unit,
        writers=wiring.writers,
        readers=(*wiring.writers[1:], TARGET),
        scores=edges if unit == "edges" else effects,
        effects=effects,
        is_wired=wiring.is_wired(),
        target=asked.name if len(pairs) == 1 else "the targets of the pairs",
        value=sum(pair.gap for pair in pairs) / len(pairs),
        pairs=tuple(pairs),
        meta={key: asked.meta.get(key) for key in ("model", "versions", "rules")}
        | {"scores": scores, **({"steps": steps} if scores == "integrated" else {})},
    )


def _items(clean: Any, corrupted: Any, target: Any) -> list[tuple[Any, Any, Any]]:
    is_list = isinstance(clean, (list, tuple)) and bool(clean) and not isinstance(clean[0], int)
    if not is_list:
        return [(clean, corrupted, target)]
    if not isinstance(corrupted, (list, tuple)) or len(corrupted) != len(clean):
        raise InputError(f"Expected as many corrupted inputs as clean ones, {len(clean)}; got {corrupted!r:.60}.")
    targets = target if isinstance(target, list) else [target] * len(clean)
    if len(targets) != len(clean):
        raise InputError(f"Expected one target, or one for each of {len(clean)} pairs; got {len(targets)}.")
    return list(zip(clean, corrupted, targets, strict=True))


# The heaviest connected circuit ---------------------------------------------------------------------------------------


def best_connected(weights: Tensor, is_wired: Tensor, budget: int) -> Tensor:
    r"""(reader, writer): the heaviest edges, at most `budget`, each on a path from the embedding to the target.

    An integer programme:

        maximise Σ_e w_e x_e   over x ∈ {0, 1}^edges, z ∈ {0, 1}^components
        Σ_e x_e ≤ budget,   x_{b→r} ≤ z_b,   x_{b→r} ≤ z_r,   z_c ≤ Σ_b x_{b→c},   z_c ≤ Σ_r x_{c→r}

    with z_c = 1 if component c is in the circuit: every component in it has an edge in and an edge out. The embedding
    needs no edge into it, and the target none out of it.
    """
    try:
        from scipy import optimize, sparse
    except ImportError as error:
        raise missing_extra("A budget", "scipy", "circuits") from error
    reader, writer = _candidates(weights, is_wired, budget).T.numpy()
    n, n_inner = len(reader), len(weights) - 1  # edges; components, without the embedding and the target
    ends, edge = (reader, writer - 1), np.arange(n)  # components by number: the embedding is -1, the target n_inner
    is_free = [(some < 0) | (some == n_inner) for some in ends]
    into, out = (  # (component, edge)
        sparse.csr_array((np.ones(n)[~free], (some[~free], edge[~free])), shape=(n_inner, n))
        for some, free in zip(ends, is_free, strict=True)
    )
    one_each, one = sparse.eye_array(n), sparse.eye_array(n_inner)
    rows = [[np.ones((1, n)), None], [one_each, -into.T], [one_each, -out.T], [-into, one], [-out, one]]
    upper: Any = np.concatenate([[budget], *is_free, np.zeros(2 * n_inner)])
    found: Any = optimize.milp(
        np.concatenate([-weights.numpy()[reader, writer], np.zeros(n_inner)]),
        constraints=optimize.LinearConstraint(sparse.block_array(rows, format="csr"), ub=upper),
        integrality=np.ones(n + n_inner),
        bounds=optimize.Bounds(0, 1),
        options={"time_limit": SECONDS, "mip_rel_gap": GAP},
    )
    if found.x is None:
        raise MethodError(f"No circuit of {budget} edges was found: {found.message}. Choose a larger budget.")
    kept = torch.zeros_like(is_wired)
    kept[reader, writer] = torch.from_numpy(found.x[:n] > 0.5)
    return kept


def _candidates(weights: Tensor, is_wired: Tensor, budget: int) -> Tensor:
    """(edge, 2): reader and writer of the edges that may be chosen."""
    sizes = torch.where(is_wired, weights.abs(), -1.0)
    chosen = torch.zeros_like(is_wired)
    most = min(int(is_wired.sum()), CANDIDATES * budget)
    chosen.view(-1)[sizes.flatten().topk(most).indices] = True
    n = min(2, sizes.shape[1])
    chosen.scatter_(1, sizes.topk(n, dim=1).indices, True)
    chosen.scatter_(0, sizes.topk(n, dim=0).indices, True)
    chosen[:, 0] = chosen[-1] = True
    return (chosen & is_wired).nonzero()
