"""Blocks of a pass: cotangents and values are those of autograd, also with several streams and without a model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import zoo
from autograd_twin import Twin
from torch import Tensor, nn

import tensorlens as tl
from tensorlens.corpus_tensor import at_depths
from tensorlens.inside.target import Pass
from tensorlens.operators.attention_matrices import mixing
from tensorlens.operators.operator import FrozenOperator
from tensorlens.program.steps import OPERATIONS, Spec

OUT, TARGET = 4, 5
MEMBERS = {name: getattr(tl.Rules, name)() for name in ("paper", "half_gate", "attn_lrp", "jacobian")}


@pytest.mark.parametrize("member", MEMBERS)
@pytest.mark.parametrize(("name", "attention"), [("llama", "sdpa"), ("gemma2", "eager"), ("bert-mlm", "eager")])
def test_cotangents_and_values_are_those_of_autograd(name: str, attention: str, member: str) -> None:
    T = tl.Lens(zoo.build(name, attention), rules=MEMBERS[member])(zoo.sample(name))
    run, by_graph = Pass(T.operator, {TARGET: 1.0}, OUT), Twin(T, OUT, TARGET)
    assert run.value == pytest.approx(float(by_graph.t.detach()), rel=1e-6)
    for block in run.downwards:
        assert len(block.marked) >= 6
        for slot, cotangent in run.cotangents(block.n).items():
            close: dict[str, float] = (
                {"rtol": 1e-4, "atol": 1e-5} if zoo.ZOO[name].casts else {"rtol": 1e-9, "atol": 1e-11}
            )
            torch.testing.assert_close(block.values[slot], by_graph.values[slot].detach(), **close)
            torch.testing.assert_close(cotangent, by_graph.at(slot), **close)


# Models of our own ----------------------------------------------------------------------------------------------------


class Mixer(nn.Module):
    """Attention with one head of its own reckoning, whose values may also be those of the first block."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor, first: Tensor | None) -> tuple[Tensor, Tensor]:
        q, k, v = self.mix(x).chunk(3, -1)
        mixed = (q @ k.transpose(1, 2) / 8**0.5).softmax(-1) @ (v if first is None else 0.5 * v + 0.5 * first)
        return self.out(mixed), v


class Layer(nn.Module):
    """A block that hands the values of the first one on."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.up, self.down = Mixer(), nn.Linear(8, 12), nn.Linear(12, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor, first: Tensor | None) -> tuple[Tensor, Tensor]:
        wrote, v = self.attention(self.norm(x), first)
        x = x + wrote
        return x + self.down(self.up(x).relu()), v if first is None else first


class ValueResidual(nn.Module):
    """Three blocks, of which the later ones also read the values of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(20, 8), nn.ModuleList([Layer(), Layer(), Layer()])
        self.lm_head = nn.Linear(8, 20)

    def forward(self, input_ids: Tensor) -> Tensor:
        x, first = self.embed(input_ids), None
        for layer in self.layers:
            x, first = layer(x, first)
        return self.lm_head(x)


def value_residual(rules: tl.Rules | None = None) -> tl.AttentionTensor:
    model = zoo.randomise(ValueResidual()).double().eval()
    return tl.Lens(model, blocks="layers", rules=rules or tl.Rules())([3, 4, 5, 9])


@pytest.mark.parametrize("member", MEMBERS)
def test_what_crosses_blocks_beside_the_state_is_followed(member: str) -> None:
    T = value_residual(MEMBERS[member])
    run, by_graph = Pass(T.operator, {TARGET: 1.0}, 3), Twin(T, 3, TARGET)
    for block in run.downwards:
        for slot, cotangent in run.cotangents(block.n).items():
            torch.testing.assert_close(cotangent, by_graph.at(slot), rtol=1e-9, atol=1e-11)
    in_class = T.map("tensor.in_class", 3, TARGET).scores[0]
    c, d = T.components(3, TARGET), T.components(3, TARGET, "direct")
    torch.testing.assert_close(c.flow()[0], in_class, rtol=1e-9, atol=1e-11)
    assert float(d.scores.sum()) == pytest.approx(d.value, rel=1e-9)
    assert "layers.1" in c.meta["flow"]
    graph = T.graph(3, TARGET, share=1.0, max_nodes=10**6)
    assert "layers.1" in graph.meta["constants"]


class Plain(nn.Module):
    """A block without attention that writes twice."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, first: Any) -> tuple[Tensor, Any]:
        x = x + self.one(x).relu()
        return x + self.two(x).relu(), first


class Wider(nn.Module):
    """A block without a residual that changes the number of channels."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.out = Mixer(), nn.Linear(8, 16)

    def forward(self, x: Tensor, first: Any) -> tuple[Tensor, Any]:
        return self.out(self.attention(x, None)[0]), first


def test_parts_of_a_block_without_attention_have_names_of_their_own() -> None:
    model = ValueResidual()
    model.layers = nn.ModuleList([Plain(), Plain()])
    T = tl.Lens(zoo.randomise(model).double().eval(), blocks="layers")([3, 4, 5])
    c, graph = T.components(-1, TARGET), T.graph(-1, TARGET, share=1.0, max_nodes=10**6)
    assert [str(label) for label in c.labels] == [
        "embedding",
        *(f"block {n}, part {i}" for n in (0, 1) for i in (1, 2)),
    ]
    worth = dict(zip(c.labels, c.scores.sum(1).tolist(), strict=True))
    for label in c.labels[1:]:
        nodes = [i for i, node in enumerate(graph.nodes) if node.component == label]
        assert sum(graph.nodes[i].value for i in nodes) == pytest.approx(worth[label], rel=1e-9)
        into = sum(edge.weight for edge in graph.edges if edge.target in nodes)
        constant = sum(graph.nodes[i].constant for i in nodes)
        assert into + constant == pytest.approx(worth[label], rel=1e-9)


def test_a_block_that_changes_channels_writes_all_that_leaves_it() -> None:
    model = ValueResidual()
    model.layers, model.lm_head = nn.ModuleList([Plain(), Wider()]), nn.Linear(16, 20)
    T = tl.Lens(zoo.randomise(model).double().eval(), blocks="layers")([3, 4, 5])
    d = T.components(-1, TARGET, "direct")
    assert float(d.scores.sum()) == pytest.approx(d.value, rel=1e-9)
    wider = next(row for label, row in zip(d.labels, d.scores, strict=True) if str(label) == "block 1")
    assert float(wider.sum() + d.scores[-1].sum()) == pytest.approx(d.value, rel=1e-9)  # and the bias of the head


class Uncommon(nn.Module):
    """A norm spelled out, a stream that is flattened, masks of a finite number, keys of an earlier state, no biases."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12, bias=False), nn.Linear(12, 8, bias=False)
        self.both, self.key, self.out = (nn.Linear(8, n, bias=False) for n in (16, 8, 8))
        self.gain = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor, first: Any) -> tuple[Tensor, Any]:
        shape, flat = x.shape, x.reshape(-1, 8)
        flat = flat + self.down(self.up(x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()).relu()).reshape(-1, 8)
        state = flat.reshape(shape)
        q, v = self.both(state / (state.square().mean(-1, keepdim=True) + 1e-6).sqrt()).chunk(2, -1)
        k = self.key(x)
        later = torch.ones(shape[1], shape[1], dtype=torch.bool).triu(1)
        scores = (q @ k.transpose(1, 2) / 8**0.5).masked_fill(later, -1e4)
        flat = flat + self.out(scores.softmax(-1) @ v).reshape(-1, 8)
        return (flat + self.gain * flat.relu()).reshape(shape), first


def uncommon(rules: tl.Rules | None = None) -> tl.AttentionTensor:
    model = ValueResidual()
    model.layers, model.lm_head = nn.ModuleList([Uncommon(), Uncommon()]), nn.Linear(8, 20, bias=False)
    return tl.Lens(zoo.randomise(model).double().eval(), blocks="layers", rules=rules or tl.Rules())([3, 4, 5])


PARTS = ["feed-forward", "attention head 0", "attention bias", "feed-forward 2"]


@pytest.mark.parametrize("member", MEMBERS)
def test_parts_are_told_apart_alike_by_every_member(member: str) -> None:
    T = uncommon(MEMBERS[member])
    c = T.components(-1, TARGET)
    assert [str(label) for label in c.labels] == [
        "embedding",
        *(f"block {n}, {part}" for n in (0, 1) for part in PARTS),
    ]


def test_without_biases_all_of_a_node_comes_by_its_edges() -> None:
    T = uncommon()
    graph = T.graph(-1, TARGET, share=1.0, max_nodes=10**6)
    # The attention reads the state that enters its block beside the stream of its own sum.
    nodes = [i for i, node in enumerate(graph.nodes) if "feed-forward" in node.component.kind]
    assert len(nodes) > 4
    for i in nodes:
        into = sum(edge.weight for edge in graph.edges if edge.target == i)
        assert into == pytest.approx(graph.nodes[i].value, rel=1e-9, abs=1e-12)


def test_neurons_of_a_feed_forward_are_its_own() -> None:
    c = uncommon().components(-1, TARGET, neurons=[1])
    names = [str(label) for label in c.labels if label.block == 1]
    assert names[:12] == [f"block 1, neuron {i}" for i in range(12)]
    assert "block 1, feed-forward 2" in names  # it has no matrix
    assert len([name for name in names if "neuron" in name]) == 12


def test_a_key_that_a_finite_number_masks_is_refused_and_keys_may_be_of_an_earlier_state() -> None:
    T = uncommon()
    with pytest.raises(tl.InputError, match="masked"):
        T.score(1, 0, 0, 2)
    by_token, by_component = T.score(1, 0, 2, 0), T.score(1, 0, 2, 0, by="component")
    assert float(by_component.scores.sum()) == pytest.approx(float(by_token.scores.sum()), rel=1e-9)
    for found in (by_token, by_component):
        assert found.scores[-1].abs().max() < 1e-12 and found.scores[:, -1].abs().max() < 1e-12  # there are no biases
    assert "block 1, feed-forward" in by_component.out_tokens
    column = by_component.scores[:, by_component.in_tokens.index("block 1, feed-forward")]
    assert column.abs().max() < 1e-12  # keys read what was there before it


# Without a model, with several samples --------------------------------------------------------------------------------


def test_a_tensor_without_its_model_answers_all_but_runs_of_it() -> None:
    T = tl.Lens(zoo.build("gpt2", "sdpa"))(zoo.sample("gpt2"))
    alone = tl.AttentionTensor(FrozenOperator(replace(T.operator.recording, origin=None)), T.context)
    for effect in ("total", "direct"):
        ours, theirs = (one.components(OUT, TARGET, effect, neurons=[0]) for one in (T, alone))  # type: ignore[arg-type]
        assert ours.labels == theirs.labels and torch.equal(ours.scores, theirs.scores)
    assert T.graph(OUT, TARGET).edges == alone.graph(OUT, TARGET).edges
    for by in ("token", "component"):
        assert torch.equal(T.score(1, 2, 5, 3, by=by).scores, alone.score(1, 2, 5, 3, by=by).scores)  # type: ignore[arg-type]
    assert alone.inside(OUT, TARGET, max_nodes=5).reads.keys() == T.inside(OUT, TARGET, max_nodes=5).reads.keys()
    with pytest.raises(tl.MethodError, match="needs the model"):
        alone.ablate((0, 1), OUT, TARGET)


def samples(name: str, attention: str, rules: tl.Rules) -> tuple[tl.Lens, list[list[int]], Any]:
    lens = tl.Lens(zoo.build(name, attention), rules=rules)
    rows = [[5, 6, 7, 8], [9, 3, 30, 11]]
    return lens, rows, lens.specimen.record({"input_ids": torch.tensor(rows)}, n_samples=2)


@pytest.mark.parametrize("member", ["paper", "jacobian"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_cotangents_at_every_depth_of_several_samples(attention: str, member: str) -> None:
    lens, rows, recording = samples("gpt2", attention, MEMBERS[member])
    u = torch.randn(3, 2, 4, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    depths = dict(at_depths(recording, u))
    assert list(depths) == [2, 1, 0]
    for sample, ids in enumerate(rows):
        T = lens(ids)
        for n, found in depths.items():
            torch.testing.assert_close(found[:, sample], T.blocks(n, 3).adjoint(u[:, sample]), rtol=1e-9, atol=1e-11)


# Attention matrices ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("member", ["paper", "attn_lrp"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert-mlm"])
def test_attention_is_what_the_model_itself_says(name: str, attention: str, member: str) -> None:
    ids = zoo.sample(name)
    with torch.no_grad():
        theirs = zoo.build(name, "eager")(torch.tensor([ids]), output_attentions=True).attentions
    recording = tl.Lens(zoo.build(name, attention), rules=MEMBERS[member])(ids).operator.recording
    for n, expected in enumerate(theirs):
        found = mixing(recording, n)
        torch.testing.assert_close(found.attention, expected[0], rtol=1e-5, atol=1e-7)
        mixed = recording.values(n, [one.slot for one in recording.mixtures if one.block == n])
        torch.testing.assert_close(
            found.attention @ found.values, *(x[0] for x in mixed.values()), rtol=1e-5, atol=1e-7
        )


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_attention_of_several_samples_has_an_axis_for_them(attention: str) -> None:
    lens, rows, recording = samples("llama", attention, tl.Rules())
    found = mixing(recording, 1)
    for sample, ids in enumerate(rows):
        alone = mixing(lens(ids).operator.recording, 1)
        torch.testing.assert_close(found.attention[sample], alone.attention, rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(found.values[sample], alone.values, rtol=1e-6, atol=1e-9)


def test_a_block_without_attention_has_no_matrix() -> None:
    model = ValueResidual()
    model.layers = nn.ModuleList([Plain(), Plain()])
    recording = tl.Lens(zoo.randomise(model).double().eval(), blocks="layers")([3, 4, 5]).operator.recording
    with pytest.raises(tl.MethodError, match="0 softmax attention layers"):
        mixing(recording, 0)


@pytest.mark.parametrize("n_shared", [1, 2])
@pytest.mark.parametrize("mask", ["none", "added", "chosen"])
def test_several_cotangents_go_through_fused_attention_together(mask: str, n_shared: int) -> None:
    draw = torch.Generator().manual_seed(1)
    q, u = (torch.randn(*n, 1, 4, 7, 8, generator=draw, dtype=torch.float64) for n in ((), (3,)))
    k, v = (torch.randn(1, 4 // n_shared, 9, 8, generator=draw, dtype=torch.float64) for _ in range(2))
    hidden = torch.rand(1, 1, 7, 9, generator=draw) < 0.3
    masks = {"none": None, "added": hidden.double() * -2.0, "chosen": ~hidden}
    spec = Spec(tuple(v.shape), v.dtype, v.device)
    args = (q, k, spec, masks[mask], False, None, n_shared > 1)

    def pull(one: torch.Tensor) -> torch.Tensor:
        return OPERATIONS["attention"].pull(one, args, {})[0]

    one_by_one = torch.stack([pull(one) for one in u])
    torch.testing.assert_close(torch.vmap(pull)(u), one_by_one, rtol=1e-10, atol=1e-12)
