"""Circuits: edges sum to effects, circuits of nothing and of everything are the two runs, others what hooks give."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from torch import Tensor

import tensorlens as tl
from tensorlens.inside.circuit import best_connected, faithfulness_of
from tensorlens.inside.stream import Component

CLEAN, CORRUPTED = [5, 6, 7, 8, 9, 10, 11], [5, 6, 30, 8, 9, 10, 11]
TARGET = (4, 9)


def found(name: str, rules: str = "paper", **more: Any) -> tl.Circuit:
    lens = tl.Lens(zoo.build(name, "sdpa"), rules=rules)
    return tl.circuit(lens, CLEAN, CORRUPTED, TARGET, progress=False, **more)


@pytest.mark.parametrize("rules", ["paper", "half_gate", "attn_lrp", "gim", "jacobian"])
@pytest.mark.parametrize("name", ["gpt2", "neox-parallel", "opt", "gemma3"])
def test_edges_sum_to_effects(name: str, rules: str) -> None:
    circuit = found(name, rules)
    assert float((circuit.scores.sum(0) - circuit.effects).abs().max()) <= 1e-10 * float(circuit.effects.abs().max())
    assert not circuit.scores[~circuit.is_wired].any()


@pytest.mark.parametrize("unit", ["edges", "nodes"])
@pytest.mark.parametrize("name", ["gpt2", "neox-parallel", "llama", "gemma3"])
def test_nothing_recovers_nothing_and_everything_recovers_all(name: str, unit: Any) -> None:
    f = found(name, unit=unit).faithfulness(progress=False)
    curve = dict(f.curve)
    assert curve[0.0] == pytest.approx(0, abs=1e-10) and curve[1.0] == pytest.approx(1, abs=1e-10)
    assert len(f.curve) == 11 and f.interval == (pytest.approx(f.cpr), pytest.approx(f.cpr))
    shares, values = zip(*f.curve, strict=True)
    areas = [
        (b - a) * (values[i] + values[i + 1]) / 2 for i, (a, b) in enumerate(zip(shares, shares[1:], strict=False))
    ]
    assert f.cpr == pytest.approx(sum(areas))


def test_effects_of_nodes_are_those_of_patching() -> None:
    """Patching puts corrupted values in, so its effects are the negative ones."""
    lens = tl.Lens(zoo.build("gpt2", "sdpa"), rules="attn_lrp")
    circuit = tl.circuit(lens, CLEAN, CORRUPTED, TARGET, unit="nodes", progress=False)
    patched = tl.patching(lens, CLEAN, CORRUPTED, TARGET)
    expected = dict(zip(patched.labels, patched.predicted.tolist(), strict=True))
    assert len(circuit.writers) == 16
    for component, effect in zip(circuit.writers[1:], circuit.scores[1:].tolist(), strict=True):
        assert effect == pytest.approx(-expected[component], rel=1e-8, abs=1e-12)


class ByHand:
    """GPT-2 with every reader's input put together by hand, one reader after the other."""

    def __init__(self, model: Any) -> None:
        self.model, self.n_heads = model, model.config.n_head

    def run(self, clean: list[int], corrupted: list[int], kept: Any) -> Tensor:
        """Logits at the end; `kept(writer, reader)` says whether an edge is in the circuit."""
        body = self.model.transformer
        start = [body.wte(torch.tensor([ids])) + body.wpe(torch.arange(len(ids))) for ids in (clean, corrupted)]
        now: dict[Any, Tensor] = {"embedding": start[0]}
        then: dict[Any, Tensor] = {"embedding": start[1]}

        def reads(reader: Any) -> tuple[Tensor, Tensor]:
            whole = sum(then.values())
            return sum((now[b] if kept(b, reader) else then[b] for b in then), torch.zeros(())), whole  # type: ignore[return-value]

        for n, block in enumerate(body.h):
            heads: dict[Any, tuple[Tensor, Tensor]] = {}
            for h in range(self.n_heads):
                heads[n, h] = tuple(self.head(block, x, h) for x in reads((n, h)))  # type: ignore[assignment]
            constant = {(n, "bias"): block.attn.c_proj.bias.expand_as(start[0])}
            now |= {key: pair[0] for key, pair in heads.items()} | constant
            then |= {key: pair[1] for key, pair in heads.items()} | constant
            both = [block.mlp(block.ln_2(x)) for x in reads((n, "mlp"))]
            now[n, "mlp"], then[n, "mlp"] = both
        x, _ = reads("target")
        return self.model.lm_head(body.ln_f(x))[0, -1]

    def head(self, block: Any, x: Tensor, h: int) -> Tensor:
        q, k, v = (part.chunk(self.n_heads, -1)[h] for part in block.attn.c_attn(block.ln_1(x)).chunk(3, -1))
        scores = q @ k.mT / q.shape[-1] ** 0.5
        a = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf).softmax(-1)
        width = v.shape[-1]
        return a @ v @ block.attn.c_proj.weight[h * width : (h + 1) * width]


def key_of(component: Component) -> Any:
    if component.kind in ("embedding", "target"):
        return component.kind
    return component.block, "mlp" if component.head is None else component.head


@pytest.mark.parametrize("share", [0.1, 0.3, 0.7])
@pytest.mark.parametrize("unit", ["edges", "nodes"])
def test_a_circuit_in_the_model_is_one_put_together_by_hand(unit: Any, share: float) -> None:
    circuit = found("gpt2", "jacobian", unit=unit).select(share=share)
    assert circuit.kept is not None and circuit.n_kept == round(share * circuit.size)
    f = circuit.faithfulness((), progress=False)
    chosen = (
        circuit.kept if unit == "edges" else circuit.kept.expand_as(circuit.is_wired)
    )  # a node with all its readers
    edges = {(key_of(circuit.writers[b]), key_of(circuit.readers[r])) for r, b in chosen.nonzero().tolist()}
    twin = ByHand(zoo.build("gpt2", "sdpa"))

    def read(kept: Any) -> float:
        with torch.no_grad():
            logits = twin.run(CLEAN, CORRUPTED, lambda b, r: b != "embedding" and b[1] == "bias" or kept(b, r))
        return float(logits[TARGET[0]] - logits[TARGET[1]])

    none, every = read(lambda b, r: False), read(lambda b, r: True)
    expected = (read(lambda b, r: (b, r) in edges) - none) / (every - none)
    assert f.selected == (pytest.approx(circuit.n_kept / circuit.size), pytest.approx(expected, abs=1e-10))
    assert abs(expected - 1) > 1e-3, "the circuit must differ from the model"


def test_integrated_gradients_over_one_step_are_the_jacobian_and_over_many_sum_to_the_gap() -> None:
    one = found("gpt2", "jacobian")
    torch.testing.assert_close(found("gpt2", scores="integrated", steps=1).scores, one.scores, rtol=1e-8, atol=1e-12)
    many = found("gpt2", scores="integrated", steps=200)
    assert float(many.effects[0]) == pytest.approx(many.value, rel=2e-2)  # all of it passes the embedding
    assert abs(float(many.effects[0]) - many.value) < abs(float(one.effects[0]) - one.value)


def test_pairs_are_averaged_and_may_have_other_lengths() -> None:
    lens = tl.Lens(zoo.build("gpt2", "sdpa"))
    pairs = [(CLEAN, CORRUPTED), ([1, 2, 3, 4], [1, 9, 3, 4])]
    alone = [tl.circuit(lens, a, b, TARGET, progress=False) for a, b in pairs]
    clean, corrupted = (list(some) for some in zip(*pairs, strict=True))
    both = tl.circuit(lens, clean, corrupted, TARGET, progress=False)
    torch.testing.assert_close(both.scores, (alone[0].scores + alone[1].scores) / 2)
    f = both.faithfulness((0.25,), progress=False)
    assert f.n_pairs == 2 and f.interval[0] <= f.cpr <= f.interval[1] and len(f.pairs) == 2
    own = tl.circuit(lens, [CLEAN, CLEAN], [CORRUPTED, CORRUPTED], [TARGET, (9, 4)], progress=False)
    assert float(own.scores.abs().max()) <= 1e-12  # opposite targets


def test_areas_count_what_overshoots_and_their_intervals_are_over_pairs() -> None:
    rows = [[0.0, 2.0, 1.0], [0.0, 0.5, 1.0], [0.0, 1.0, 1.0]]  # the first overshoots
    f = faithfulness_of(rows, (0.0, 0.5, 1.0), unit="edges", size=2)
    assert (f.cpr, f.cmd) == (pytest.approx((1.25 + 0.5 + 0.75) / 3), pytest.approx((0.75 + 0.5 + 0.25) / 3))
    # One draw in 27 takes the same pair three times, more than the 2.5 % that are cut off.
    assert f.interval == pytest.approx((0.5, 1.25)) and f.cmd_interval == pytest.approx((0.25, 0.75))
    assert [one for _, one in f.curve] == pytest.approx([0.0, 3.5 / 3, 1.0])


@pytest.mark.parametrize("unit", ["edges", "nodes"])
def test_support_of_the_target_comes_first_in_signed_order(unit: Any) -> None:
    circuit = found("gpt2", unit=unit)
    scores, masks = circuit.scores[circuit.is_wired] if unit == "edges" else circuit.scores, list[Any]()
    for order, sizes in (("signed", scores), ("magnitude", scores.abs())):
        chosen = circuit.select(count=6, order=order)  # type: ignore[arg-type]
        masks.append(chosen.kept)
        torch.testing.assert_close(circuit.scores[masks[-1]].sum(), scores[sizes.topk(6).indices].sum())
        f = chosen.faithfulness((6 / circuit.size,), order=order, progress=False)  # type: ignore[arg-type]
        assert f.selected == pytest.approx(f.curve[1])
    assert not torch.equal(*masks)


def test_a_budget_gives_a_connected_circuit_that_no_ranking_of_its_size_need_give() -> None:
    pytest.importorskip("scipy")
    circuit = found("gpt2")
    chosen = circuit.select(budget=9)
    assert chosen.kept is not None and 0 < chosen.n_kept <= 9
    edges = [(r, b) for r, b in chosen.kept.nonzero().tolist()]
    last = len(circuit.readers) - 1
    for r, b in edges:
        assert b == 0 or any(reader == b - 1 for reader, _ in edges), "something flows into the writer"
        assert r == last or any(writer == r + 1 for _, writer in edges), "the reader flows somewhere"
    everything = circuit.select(budget=circuit.size).kept
    assert everything is not None and int(everything.sum()) > 0.9 * circuit.size
    assert float(circuit.scores[chosen.kept].abs().sum()) <= float(
        circuit.scores[circuit.select(count=9).kept].abs().sum()  # type: ignore[index]
    )


def test_a_budget_gives_the_heaviest_connected_circuit() -> None:
    """Tried against all sets of edges in which every component has an edge in and an edge out."""
    pytest.importorskip("scipy")
    is_wired = torch.ones(4, 4).tril().bool()
    is_wired[1, 1] = False  # two components side by side
    edges = is_wired.nonzero().tolist()
    for seed, budget in itertools.product(range(8), (1, 2, 3, 5)):
        weights = torch.randn(4, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        sizes: dict[Any, float] = {(): 0.0}
        for some in itertools.chain.from_iterable(itertools.combinations(edges, n) for n in range(1, budget + 1)):
            read, written = {r for r, _ in some}, {b for _, b in some}
            if {b - 1 for b in written if b > 0} == {r for r in read if r < 3}:
                sizes[tuple(map(tuple, some))] = sum(float(weights[r, b]) for r, b in some)
        best = max(sizes, key=lambda some: sizes[some])
        assert best_connected(weights, is_wired, budget).nonzero().tolist() == [list(edge) for edge in best]


def test_a_small_budget_has_a_way_through_every_component() -> None:
    """The edges of a way through one component may be lighter than any other edge."""
    pytest.importorskip("scipy")
    n = 40
    weights = torch.full((n, n), 10.0, dtype=torch.float64).tril()
    weights[:, 0] = weights[-1] = 1.0
    weights[3:5, 0] = weights[-1, 8:10] = 2.0  # the heaviest start and end in different components
    weights[-1, 0] = 0.0
    kept = best_connected(weights, torch.ones(n, n).tril().bool(), 2)
    assert float(weights[kept].sum()) == 3.0 and int(kept[:, 0].sum()) == 1 and int(kept[-1].sum()) == 1


def test_a_graph_is_saved_for_others(tmp_path: Path) -> None:
    circuit = found("gpt2").select(count=20)
    graph = circuit.graph()
    assert len(graph.edges) == 20 and graph.nodes[0].component.kind == "target"
    for place, node in enumerate(graph.nodes[:1]):
        into = sum(edge.weight for edge in graph.edges if edge.target == place)
        assert into + node.cut == pytest.approx(node.value)
    assert (
        graph.headline == "What carries the change of “4 − 9” between the inputs?" and "all tokens" not in graph.name(1)
    )
    assert graph.value == pytest.approx(circuit.value) and graph.target == "change of 4 − 9"
    assert ["Method", "tl.circuit"] in graph.payload()["caption"]
    circuit.save(tmp_path / "graph.json", format="circuit-tracer")
    read = json.loads((tmp_path / "graph.json").read_text())
    ids = {node["node_id"] for node in read["nodes"]}
    assert len(ids) == len(graph.nodes) and all({e["source"], e["target"]} <= ids for e in read["links"])
    # Its page hides nodes beyond the threshold and those at more than two thirds of the tokens, and it reads the
    # probability of the target from a label.
    assert len(read["metadata"]["prompt_tokens"]) * 2 / 3 >= 1
    nodes = sorted(read["nodes"], key=lambda node: -abs(node["activation"]))
    shares = [node["influence"] for node in nodes]
    assert shares == sorted(shares) and shares[-1] == read["metadata"]["node_threshold"] == 1.0
    assert 0 < shares[0] == pytest.approx(abs(nodes[0]["activation"]) / sum(abs(n["activation"]) for n in nodes))
    assert read["nodes"][0]["clerp"].startswith('Output "change of 4 − 9" (p=–), ')
    known = tl.Lens(zoo.build("gpt2", "sdpa"))(CLEAN).graph(-1, 4, 0.2, max_nodes=5)
    known.save(tmp_path / "known.json", format="circuit-tracer")
    label = json.loads((tmp_path / "known.json").read_text())["nodes"][0]["clerp"]
    assert float(label.split("(p=")[1].split(")")[0]) == pytest.approx(known.meta["why"]["probability"], abs=1e-3)
    circuit.save(tmp_path / "graph.html")
    circuit.save(tmp_path / "own.json")
    assert tl.ComponentGraph.load(tmp_path / "own.json").edges == graph.edges
    with pytest.raises(tl.InputError, match=r"is a \.json file"):
        circuit.save(tmp_path / "graph.html", format="circuit-tracer")
    f = circuit.faithfulness((0.5,), progress=False)
    f.save(tmp_path / "f.json")
    assert tl.Faithfulness.load(tmp_path / "f.json").as_dict() == f.as_dict()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"steps": 0}, "steps"),
        ({"corrupted": CORRUPTED[:-1]}, "Expected two inputs of the same length"),
    ],
)
def test_what_makes_no_circuit_is_refused(change: dict[str, Any], said: str) -> None:
    asked = {"clean": CLEAN, "corrupted": CORRUPTED, "target": TARGET} | change
    with pytest.raises(tl.InputError, match=said):
        tl.circuit(tl.Lens(zoo.build("gpt2", "sdpa")), **asked, progress=False)


@pytest.mark.usefixtures("unchecked")
def test_a_stream_that_is_not_a_sum_is_refused() -> None:
    with pytest.raises(tl.MethodError, match="plain sum"):
        found("bert-mlm")
    circuit = found("gpt2")
    for wrong in ({}, {"share": 0.1, "count": 3}, {"share": 2}, {"share": "all"}, {"count": -1}):
        with pytest.raises(tl.InputError):
            circuit.select(**wrong)  # type: ignore[arg-type]
    for wrong in ({"shares": 0.5}, {"shares": ["all"]}, {"order": "best"}):
        with pytest.raises(tl.InputError):
            circuit.faithfulness(**wrong, progress=False)  # type: ignore[arg-type]
    with pytest.raises(tl.InputError, match=r"an \.html file"):
        circuit.save_page("page.json", circuit.faithfulness((), progress=False))


def test_what_is_selected_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    for unit, heads in (("edges", 2), ("nodes", 1)):
        circuit = found("gpt2", unit=unit)
        weakest = torch.zeros_like(circuit.scores, dtype=torch.bool)
        places = circuit.is_wired.nonzero() if unit == "edges" else torch.arange(len(circuit.writers))[:, None]
        at = min(places.tolist(), key=lambda one: abs(float(circuit.scores[tuple(one)])))
        weakest[tuple(at)] = True
        capsys.readouterr()
        replace(circuit, kept=weakest).show()
        (line,) = capsys.readouterr().out.splitlines()[2:]
        ends = [str(circuit.writers[at[-1]]), *(str(circuit.readers[r]) for r in at[:-1])]
        assert len(ends) == heads and line.split("  ")[0] == ends[0] and all(end in line for end in ends)


@pytest.mark.usefixtures("unchecked")
def test_a_feature_is_no_target_of_a_run() -> None:
    lens = tl.Lens(zoo.build("gpt2", "sdpa"))
    more = {"n_features": 8, "k": 2, "steps": 2, "progress": False}
    feature = tl.Dictionary.fit(lens, [CLEAN] * 4, block=1, **more).feature(3)  # type: ignore[arg-type]
    with pytest.raises(tl.InputError, match="Expected a target on logits; got feature 3 of block 1"):
        tl.circuit(lens, CLEAN, CORRUPTED, feature, progress=False)


@pytest.mark.large
@pytest.mark.skipif(find_spec("circuit_tracer") is None, reason="circuit-tracer comes with `make test-all`")
def test_its_own_models_of_a_graph_read_what_is_saved_for_circuit_tracer(tmp_path: Path) -> None:
    """The file that defines them alone: the package imports others that are not there."""
    pytest.importorskip("pydantic")
    package = find_spec("circuit_tracer")
    assert package is not None and package.submodule_search_locations
    file = Path(package.submodule_search_locations[0]) / "frontend" / "graph_models.py"
    spec = spec_from_file_location("graph_models", file)
    assert spec is not None and spec.loader is not None
    models = module_from_spec(spec)
    spec.loader.exec_module(models)
    T = tl.Lens(zoo.build("gpt2", "sdpa"))(CLEAN)
    for graph in (found("gpt2").select(count=20).graph(), T.graph(-1, 4, 0.5, max_nodes=30)):
        graph.save(tmp_path / "graph.json", format="circuit-tracer")
        read = models.Model.model_validate_json((tmp_path / "graph.json").read_text())
        assert len(read.nodes) == len(graph.nodes) and len(read.links) == len(graph.edges)
        assert read.metadata.prompt_tokens[: len(graph.tokens)] == list(graph.tokens)
        assert [node.is_target_logit for node in read.nodes].count(True) == 1
        for link in read.links:
            models.Link.model_validate(link)
