"""The graph: what enters a node sums to it, constants are those of its parameters, and what is cut off is said."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import transformers as hf
import zoo
from laws import is_bias
from test_components import FAMILIES, OUT, TARGET, Knots, family, found, tolerance, twin
from torch import nn

import tensorlens as tl
from tensorlens.inside.target import Pass


@cache
def whole(name: str) -> tl.ComponentGraph:
    return family(name)[1].graph(OUT, TARGET, share=1.0, max_nodes=10**6)


def into(graph: tl.ComponentGraph, node: int) -> float:
    return sum(edge.weight for edge in graph.edges if edge.target == node)


@pytest.mark.parametrize("name", FAMILIES)
def test_what_enters_a_node_sums_to_it(name: str) -> None:
    graph, close = whole(name), tolerance(name)
    assert graph.share == pytest.approx(1.0)
    assert graph.nodes[0].component.kind == "target" and graph.nodes[0].value == pytest.approx(graph.value)
    for i, node in enumerate(graph.nodes):
        if node.component.kind in ("target", "attention head", "feed-forward"):
            assert into(graph, i) + node.constant == pytest.approx(node.value, rel=close, abs=close)
            assert node.cut == pytest.approx(0.0, abs=close)


@pytest.mark.parametrize("name", FAMILIES)
def test_nodes_are_worth_their_total_effects_and_the_target_gets_the_direct_ones(name: str) -> None:
    graph, total, direct = whole(name), found(name), found(name, "direct")
    rows = {label: row for label, row in zip(total.labels, total.scores, strict=True)}
    worth = {(node.component, node.token): node.value for node in graph.nodes}
    for label in total.labels:
        if label.kind in ("attention head", "feed-forward"):
            for token, score in enumerate(rows[label].tolist()):
                assert worth.get((label, token), 0.0) == pytest.approx(score, rel=1e-6, abs=1e-12)
    given = {
        (graph.nodes[e.source].component, graph.nodes[e.source].token): e.weight for e in graph.edges if not e.target
    }
    for label, row in zip(direct.labels, direct.scores.tolist(), strict=True):
        assert [given.get((label, token), 0.0) for token in range(len(row))] == pytest.approx(row, rel=1e-9, abs=1e-12)


PARALLEL = ("neox-parallel", "phi")


@pytest.mark.parametrize("name", FAMILIES)
def test_a_feed_forward_reads_the_attention_of_its_own_block_unless_they_are_parallel(name: str) -> None:
    graph = whole(name)
    within = [
        edge
        for edge in graph.edges
        if graph.nodes[edge.target].component.kind == "feed-forward"
        and graph.nodes[edge.source].component.kind == "attention head"
        and graph.nodes[edge.source].component.block == graph.nodes[edge.target].component.block
    ]
    assert bool(within) == (name not in PARALLEL)
    assert all(graph.nodes[edge.source].token == graph.nodes[edge.target].token for edge in within)


def own_biases(name: str, block: int) -> float:
    """⟨∂f/∂b, b⟩ over all biases between the stream and a feed-forward's write at one token, pulled with its λ."""
    model, T = family(name)
    parameters, by_graph = dict(model.named_parameters()), twin(name)
    ends = [leaf for path, leaf in by_graph.weights if path in parameters and is_bias(path, parameters[path])]
    run = Pass(T.operator, {TARGET: 1.0}, OUT)
    one, write = next((one, write) for one in run.block(block).sums or [] for write in one.writes if not write.mixtures)
    chosen = torch.zeros_like(by_graph.at(write.slot))
    chosen[0, OUT] = by_graph.at(write.slot)[0, OUT]
    wrote, stream = by_graph.values[write.slot], by_graph.values[one.stream]
    found = 0.0
    for value, cotangent, sign in ((wrote, chosen, 1), (stream, by_graph.gradients(wrote, [stream], chosen)[0], -1)):
        of = by_graph.gradients(value, ends, cotangent)
        found += sign * sum(float((g * p.detach()).sum()) for g, p in zip(of, ends, strict=True) if g is not None)
    return found


@pytest.mark.parametrize("name", [name for name in FAMILIES if zoo.ZOO[name].has_biases])
def test_constants_are_those_of_the_parameters(name: str) -> None:
    nodes = [one for one in whole(name).nodes if one.component.kind == "feed-forward" and one.token == OUT]
    assert len(nodes) == 3
    for node in nodes:
        assert node.component.block is not None
        assert node.constant == pytest.approx(own_biases(name, node.component.block), rel=tolerance(name), abs=1e-10)


@pytest.mark.parametrize("name", [name for name in FAMILIES if not zoo.ZOO[name].has_biases])
def test_without_biases_there_are_no_constants(name: str) -> None:
    assert max(abs(node.constant) for node in whole(name).nodes) < tolerance(name)


def test_a_smaller_share_keeps_the_heaviest_and_says_what_is_cut_off() -> None:
    _, T = family("gpt2")
    graph = T.graph(OUT, TARGET, share=0.5)
    assert 0.5 <= graph.share < 0.8 and len(graph.edges) < len(whole("gpt2").edges) / 2
    cuts = []
    for i, node in enumerate(graph.nodes):
        if node.component.kind in ("target", "attention head", "feed-forward"):
            cuts.append(abs(node.cut))
            assert into(graph, i) + node.constant + node.cut == pytest.approx(node.value, rel=1e-9, abs=1e-12)
    assert max(cuts) > 1e-3
    all_into_target = sorted((abs(e.weight) for e in whole("gpt2").edges if e.target == 0), reverse=True)
    kept = sorted((abs(e.weight) for e in graph.edges if e.target == 0), reverse=True)
    assert kept == pytest.approx(all_into_target[: len(kept)])
    small = T.graph(OUT, TARGET, share=1.0, max_nodes=9)
    assert len(small.nodes) == 9 and small.share < 1 and small.meta["max_nodes"] == 9


def built(config: Any, cls: Any) -> nn.Module:
    return zoo.randomise(cls(config)).double().eval()


def test_edges_cross_from_the_decoder_to_the_encoder() -> None:
    config = hf.T5Config(
        d_model=16,
        d_kv=4,
        num_heads=4,
        d_ff=24,
        num_layers=2,
        num_decoder_layers=2,
        vocab_size=60,
        pad_token_id=0,
        decoder_start_token_id=0,
        tie_word_embeddings=False,
    )
    T = tl.Lens(built(config, hf.T5ForConditionalGeneration))(
        {"input_ids": [[5, 6, 7, 8, 9]], "decoder_input_ids": [[0, 11, 12]]}
    )
    graph = T.graph(2, TARGET, share=1.0, max_nodes=10**6)
    kinds = {(node.component.block, node.component.kind) for node in graph.nodes}
    assert {(0, "attention head"), (2, "attention 2 head"), (3, "feed-forward")} <= kinds
    c = T.components(2, TARGET)
    worth = {label: row for label, row in zip(c.labels, c.scores, strict=True)}
    for i, node in enumerate(graph.nodes):
        assert node.constant == pytest.approx(0.0, abs=1e-5)  # it has no biases
        if node.component.kind in ("attention head", "attention 2 head", "feed-forward"):
            assert node.value == pytest.approx(float(worth[node.component][node.token]), rel=1e-5, abs=1e-8)
        if node.component.kind not in ("embedding", "bias", "attention bias", "attention 2 bias"):
            assert into(graph, i) == pytest.approx(node.value, rel=1e-5, abs=1e-5)


def test_experts_and_blocks_of_one_piece_are_nodes() -> None:
    config = hf.MixtralConfig(**zoo.TEXT, **zoo.GROUPED, num_local_experts=4, num_experts_per_tok=2)
    config._experts_implementation = "eager"
    T = tl.Lens(built(config, hf.MixtralForCausalLM))(zoo.sample("llama"))
    knots = tl.Lens(zoo.randomise(Knots()).double().eval(), blocks="layers")([3, 4, 5])
    for tensor, target in ((T, TARGET), (knots, 7)):
        graph = tensor.graph(-1, target, share=1.0, max_nodes=10**6)
        blocks = {node.component.block for node in graph.nodes}
        assert {0, 1} <= blocks
        for i, node in enumerate(graph.nodes):
            if node.component.kind in ("target", "block", "attention head", "feed-forward"):
                assert into(graph, i) + node.constant == pytest.approx(node.value, rel=1e-6, abs=1e-6)


def test_a_block_of_one_piece_reads_all_but_what_it_hands_on() -> None:
    model = zoo.randomise(Knots()).double().eval()
    for path, parameter in model.named_parameters():
        if path.endswith("bias"):
            nn.init.zeros_(parameter)
    graph = tl.Lens(model, blocks="layers")([3, 4, 5]).graph(-1, 7, share=1.0, max_nodes=10**6)
    nodes = [i for i, node in enumerate(graph.nodes) if node.component.kind == "block"]
    assert len(nodes) > 3
    for i in nodes:
        assert into(graph, i) == pytest.approx(graph.nodes[i].value, rel=1e-9, abs=1e-12)


# The record ----------------------------------------------------------------------------------------------------------


def test_a_saved_graph_comes_back(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    graph = family("gpt2")[1].graph(OUT, TARGET, share=0.5)
    back = tl.ComponentGraph.load(graph.save(tmp_path / "graph.json"))
    assert (back.nodes, back.edges, back.tokens, back.meta) == (graph.nodes, graph.edges, graph.tokens, graph.meta)
    assert (back.target, back.value, back.share) == (graph.target, graph.value, graph.share)
    graph.show(k=2)
    heaviest = max(graph.edges, key=lambda edge: abs(edge.weight))
    assert graph.name(heaviest.source) in capsys.readouterr().out


def test_wrong_shares_and_files_are_refused(tmp_path: Any) -> None:
    _, T = family("gpt2")
    for options in ({"share": 0.0}, {"share": 1.5}, {"max_nodes": 0}):
        with pytest.raises(tl.InputError, match="must be"):
            T.graph(OUT, TARGET, **options)
    with pytest.raises(tl.InputError, match="json"):
        whole("gpt2").save(tmp_path / "graph.csv")
    (tmp_path / "graph.json").write_text("{}")
    with pytest.raises(tl.InputError, match="ComponentGraph"):
        tl.ComponentGraph.load(tmp_path / "graph.json")
