"""The graph of a recording: kept for every pull, equal to a replay, and never in anybody's way."""

from __future__ import annotations

import gc
import threading
import weakref
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import zoo
from torch import Tensor, nn

import tensorlens as tl
from tensorlens.freezing import recorder
from tensorlens.freezing import replay as replaying
from tensorlens.freezing.interpreter import Interpreter
from tensorlens.freezing.places import Span
from tensorlens.freezing.recording import GRAPH_SHARE, Recording
from tensorlens.freezing.replay import FactorReplay
from tensorlens.freezing.rules import modules as adapters
from tensorlens.freezing.rules.gains import gelu_tanh
from tensorlens.freezing.rules.linear import held
from tensorlens.freezing.traced import mark, plain
from tensorlens.studies.family_study.tiny_models import build

CLASSES = {"gpt2": 5, "llama": 5, "bert-classifier": 1, "vit": 1}


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Grows with every pass through a model."""
    made: list[Any] = []
    begin = Interpreter.__init__

    def counted(self: Interpreter, *args: Any, **kwargs: Any) -> None:
        made.append(self)
        begin(self, *args, **kwargs)

    monkeypatch.setattr(Interpreter, "__init__", counted)
    return made


def tensor_of(name: str, attention: str = "eager", **options: Any) -> tl.AttentionTensor:
    return tl.Lens(zoo.build(name, attention), **options)(zoo.sample(name))


@cache
def recording_of(name: str, attention: str) -> Recording:
    """For tests that only read it."""
    return tensor_of(name, attention).operator.recording


def whole(recording: Recording) -> Span:
    return Span(0, recording.n_blocks)


def without_graph(recording: Recording) -> FactorReplay:
    return FactorReplay(replace(recording, graph=None))


def cotangents(recording: Recording, n: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(n, *recording.states[-1].shape[1:], generator=generator, dtype=torch.float64)


def assert_pulls_as_a_replay(T: tl.AttentionTensor, tolerance: float) -> None:
    recording = T.operator.recording
    assert recording.graph is not None
    expected = without_graph(recording).pull(T.output[None], whole(recording))[0]
    torch.testing.assert_close(T.adjoint(T.output), expected, rtol=tolerance, atol=1e-3 * tolerance)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize(("name", "attention"), zoo.CASES)
def test_a_pull_equals_a_replay_and_so_does_the_next(name, attention, n, replays):
    recording = recording_of(name, attention)
    replay, u = FactorReplay(recording), cotangents(recording, n)
    replays.clear()
    first, second = (replay.pull(u, whole(recording)) for _ in range(2))
    assert not replays
    again = without_graph(recording).pull(u, whole(recording))
    assert len(replays) == 1
    torch.testing.assert_close(first, again, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(second, again, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize(("name", "target"), CLASSES.items())
def test_maps_equal_that_of_a_replay(name, target, attention, replays, monkeypatch):
    T = tensor_of(name, attention)
    token = -1 if zoo.ZOO[name].causal else None
    replays.clear()
    found = [T.map("tensor.in_class", out_token=token, target=target) for _ in range(2)]
    assert not replays
    with monkeypatch.context() as patch:
        patch.setattr(recorder, "free_bytes", lambda device: 0)
        without = tensor_of(name, attention)
    replays.clear()
    again = without.map("tensor.in_class", out_token=token, target=target)
    assert replays
    for one in found:
        torch.testing.assert_close(one.scores, again.scores, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(one.bias_share, again.bias_share, rtol=1e-9, atol=1e-12)
    rows = T.rows(2)  # by folded blocks, which know nothing of graphs
    in_out = tensor_of(name, attention).map("tensor.in_out", out_token=2).scores[0]
    torch.testing.assert_close(in_out, torch.einsum("d,dje,je->j", T.output[2], rows, T.input), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize(
    ("task", "model_type"),
    [("seq2seq", "t5"), ("seq2seq", "bart"), ("vision", "swin"), ("vision", "convnext"), ("causal", "gemma3n_text"),
     ("causal", "mixtral"), ("causal", "mamba"), ("masked", "xlm")],
)  # fmt: skip
def test_two_streams_other_layouts_and_starts_at_the_embeddings(task, model_type, n, replays):
    tiny = build(task, model_type, "eager", torch.float64)
    operator = tl.Lens(tiny.model)(tiny.arguments).operator
    recording, u = operator.recording, cotangents(operator.recording, n)
    assert recording.graph is not None
    replays.clear()
    first = operator.replay.pull(u, whole(recording))
    assert not replays and first.shape == (n, *recording.states[0].shape[1:])
    again = without_graph(recording).pull(u, whole(recording))
    assert len(replays) == 1
    torch.testing.assert_close(first, again, rtol=1e-6, atol=1e-9)


# What must not happen to the user's model -----------------------------------------------------------------------------


def test_parameters_get_no_gradient_and_keep_their_flags():
    model = zoo.build("gpt2")
    model.transformer.h[1].requires_grad_(False)
    flags = [parameter.requires_grad for parameter in model.parameters()]
    T = tl.Lens(model)(zoo.sample("gpt2"))
    assert [parameter.requires_grad for parameter in model.parameters()] == flags
    for _ in range(2):
        assert not T.map("tensor.in_class", out_token=-1, target=5).scores.requires_grad
        assert [parameter.requires_grad for parameter in model.parameters()] == flags
        assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(("name", "attention"), zoo.CASES)
def test_nothing_that_is_held_has_a_way_back(name, attention):
    recording = recording_of(name, attention)
    assert recording.graph is not None  # otherwise there would be no way
    kept = [recording.factors, recording.states, recording.block_outputs, recording.readout, recording.inputs]
    assert not [t for t in tensors_in(kept) if t.requires_grad]


def tensors_in(values: Any) -> list[Tensor]:
    if isinstance(values, Tensor):
        return [values]
    values = list(values.values()) if isinstance(values, dict) else values
    return [t for value in values for t in tensors_in(value)] if isinstance(values, (list, tuple)) else []


def test_changed_weights_are_noticed():
    model = zoo.build("llama")
    T = tl.Lens(model)(zoo.sample("llama"))
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight.mul_(1)  # of which the graph knows nothing: queries are held
    with pytest.raises(tl.InputError, match="changed since .*: `weight` of `model.layers.0.self_attn.q_proj` changed"):
        T.adjoint(T.output)


def test_a_first_pass_may_write_into_the_weights():
    tiny = build("causal", "rwkv", "eager", torch.float64)  # which rescales some for inference
    before = [parameter._version for parameter in tiny.model.parameters()]
    T = tl.Lens(tiny.model)(tiny.arguments)
    assert before != [parameter._version for parameter in tiny.model.parameters()]
    assert_pulls_as_a_replay(T, tolerance=1e-6)


# When it is not used --------------------------------------------------------------------------------------------------


def test_ranges_and_silenced_heads_leave_it_alone(replays):
    T = tensor_of("gpt2")
    before = T.adjoint(T.output)
    parts = (T.blocks(0, 2), T.blocks(1, 3), T.heads({1: [0, 2]}), T.without_heads({0: [1]}))
    for part in parts:
        u = torch.ones(part.shape[:2], dtype=torch.float64)
        expected = torch.einsum("id,idje->je", u, part.dense())
        torch.testing.assert_close(part.adjoint(u), expected, rtol=1e-6, atol=1e-9)
    replays.clear()
    assert torch.equal(T.adjoint(T.output), before) and not replays


def test_a_final_norm_left_out_is_left_out_of_it(replays):
    T = tensor_of("gpt2", rules=tl.Rules(include_final_norm=False))
    u = T.output
    by_rows = sum(torch.einsum("d,dje->je", u[i], T.rows(i)) for i in range(len(u)))
    torch.testing.assert_close(T.adjoint(u), by_rows, rtol=1e-6, atol=1e-9)
    assert T.operator.recording.graph is not None  # the logits go through the norm, whatever the output is
    replays.clear()
    found = T.map("tensor.in_class", target=4, out_token=-1).scores
    assert not replays
    torch.testing.assert_close(found, tensor_of("gpt2").map("tensor.in_class", target=4, out_token=-1).scores)


def test_a_large_input_keeps_none(monkeypatch):
    expected = tensor_of("gpt2").map(out_token=-1).scores
    monkeypatch.setattr(recorder, "free_bytes", lambda device: 0)
    T = tensor_of("gpt2")
    assert T.operator.recording.graph is None
    assert T.certificate().passed
    assert torch.equal(T.map(out_token=-1).scores, expected)


def test_how_large_is_measured_in_tokens(monkeypatch):
    T = tensor_of("vit")  # whose arguments do not say how many there are
    anatomy = T.operator.recording.anatomy
    for free, kept in ((T.n_tokens * anatomy.bytes_per_token, True), (T.n_tokens * anatomy.bytes_per_token - 1, False)):
        monkeypatch.setattr(recorder, "free_bytes", lambda device, free=free: free / GRAPH_SHARE)
        assert (tensor_of("vit").operator.recording.graph is not None) == kept


def test_off_loaded_weights_keep_none():
    accelerate = pytest.importorskip("accelerate")
    model = accelerate.cpu_offload(zoo.build("llama"), execution_device="cpu")
    T = tl.Lens(model)(zoo.sample("llama"))
    assert T.operator.recording.graph is None
    torch.testing.assert_close(T.map(out_token=-1).scores, tensor_of("llama").map(out_token=-1).scores)


def test_inference_tensors_keep_none():
    with torch.inference_mode():
        model = zoo.build("gpt2")
    T = tl.Lens(model)(zoo.sample("gpt2"))
    assert T.operator.recording.graph is None
    expected = tensor_of("gpt2")
    torch.testing.assert_close(T.apply(T.input), expected.apply(expected.input))


# When it fails --------------------------------------------------------------------------------------------------------


class Leaving(nn.Module):
    """Fails for gradients alone: a value of a weight leaves for numpy."""

    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x * float((2 * self.slope).numpy())


class Tripled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 3 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return 3 * gradient


class Custom(nn.Module):
    """Has a derivative of its own, and hides it behind another name."""

    triple = staticmethod(Tripled.apply)

    def forward(self, x: Tensor) -> Tensor:
        return self.triple(x)


def with_activation(activation: nn.Module) -> nn.Module:
    model = zoo.build("gpt2")
    for block in model.transformer.h:
        block.mlp.act = activation
    return model


@pytest.mark.parametrize("activation", [Leaving, Custom])
def test_a_model_that_fails_with_gradients_is_held_without(activation):
    T = tl.Lens(with_activation(activation()))(zoo.sample("gpt2"))
    assert T.operator.recording.graph is None
    value = T.apply(T.input) + T.bias
    torch.testing.assert_close(value, T.output)
    with pytest.raises((tl.NotLinearError, RuntimeError)):
        T.map(out_token=-1)


def test_a_factor_that_an_adapter_leaves_connected_is_cut(monkeypatch):
    """Eq. 13 holds φ(z)/z; an adapter may forget to take its values alone, as it could when there was no graph."""
    monkeypatch.setattr(adapters, "ADAPTERS", dict(adapters.ADAPTERS))

    @tl.adapter("transformers.activations.NewGELUActivation")
    def gated(run: Any, module: nn.Module, forward: Any, z: Tensor) -> Tensor:
        gate, _ = held(run, "gate", lambda: (gelu_tanh(plain(z)), [plain(z)]))
        return mark(plain(z) * plain(gate), live=True)

    T = tensor_of("gpt2")
    assert_pulls_as_a_replay(T, tolerance=1e-9)


def test_what_was_written_over_since_is_replayed(replays):
    T = tensor_of("gpt2")
    expected = tensor_of("gpt2").adjoint(T.output)
    for site, factor in T.operator.recording.factors.items():
        if site.operation == "softmax":
            factor.mul_(1)
    replays.clear()
    torch.testing.assert_close(T.adjoint(T.output), expected, rtol=1e-9, atol=1e-12)
    assert len(replays) == 1


# For all, and no longer than needed ----------------------------------------------------------------------------------


def test_two_threads_ask_at_once(replays):
    expected = tensor_of("gpt2").map("tensor.in_class", out_token=-1, target=5).scores
    for _ in range(10):
        T = tensor_of("gpt2")
        replays.clear()
        together, found = threading.Barrier(2), []

        def ask(T: Any = T, together: Any = together, found: Any = found) -> None:
            together.wait()
            found.append(T.map("tensor.in_class", out_token=-1, target=5).scores)

        threads = [threading.Thread(target=ask) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 2 and not replays
        for scores in found:
            torch.testing.assert_close(scores, expected, rtol=1e-9, atol=1e-12)


class Product(nn.Module):
    """Two live factors, whose roles are a convention: a replay watches them by a hook."""

    def forward(self, x: Tensor) -> Tensor:
        return x * x.flip(-1)


@pytest.mark.parametrize("asked", [False, True])
def test_it_goes_when_its_tensor_goes(asked):
    T = tl.Lens(with_activation(Product()))(zoo.sample("gpt2"))
    graph = T.operator.recording.graph
    assert graph is not None and graph.end is not None
    gone = [weakref.ref(tensor) for tensor in (graph.end, graph.readout, *graph.leaves)]
    del graph
    if asked:
        T.map(out_token=-1)
    gc.disable()  # by counting alone: the collector does not see through graphs
    del T
    gc.enable()
    assert [ref() for ref in gone] == [None] * len(gone)


def test_the_certificate_sees_a_graph_that_is_wrong(monkeypatch):
    assert tensor_of("gpt2").certificate().passed
    gradients = replaying.gradients
    monkeypatch.setattr(replaying, "gradients", lambda *arguments: 1.01 * gradients(*arguments))
    certificate = tensor_of("gpt2").certificate()
    assert certificate.failures == ("adjoint", "logits", "recorded graph")
