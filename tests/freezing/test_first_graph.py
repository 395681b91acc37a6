"""The graph of a recording: for the first cotangents alone, equal to a replay, and never in anybody's way."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch
import zoo
from torch import Tensor, nn

import tensorlens as tl
from tensorlens.freezing import frozen_model, walk
from tensorlens.freezing.frozen_model import FrozenModel, Span
from tensorlens.freezing.rules import modules as adapters
from tensorlens.freezing.rules.linear import held
from tensorlens.freezing.traced import mark, plain
from tensorlens.studies.family_study.tiny_models import build

CLASSES = {"gpt2": 5, "llama": 5, "bert-classifier": 1, "vit": 1}


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Grows with every pass through a model."""
    made: list[Any] = []
    go = walk.Walk.go

    def counted(self: walk.Walk) -> Tensor:
        made.append(self)
        return go(self)

    monkeypatch.setattr(walk.Walk, "go", counted)
    return made


def tensor_of(name: str, attention: str = "eager", **options: Any) -> tl.AttentionTensor:
    return tl.Lens(zoo.build(name, attention), **options)(zoo.sample(name))


def whole(frozen: FrozenModel) -> Span:
    return Span(0, frozen.n_blocks)


def cotangents(frozen: FrozenModel, n: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(n, *frozen.hidden[-1].shape[1:], generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize(("name", "attention"), zoo.CASES)
def test_the_first_pull_equals_a_replay(name, attention, n, replays):
    frozen = tensor_of(name, attention).operator.frozen
    u = cotangents(frozen, n)
    replays.clear()
    first = frozen.pull(u, whole(frozen))
    assert not replays and frozen.first_graph is None
    again = frozen.pull(u, whole(frozen))
    assert len(replays) == 1
    torch.testing.assert_close(first, again, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize(("name", "target"), CLASSES.items())
def test_the_first_map_equals_the_second(name, target, attention, replays):
    T = tensor_of(name, attention)
    token = -1 if zoo.ZOO[name].causal else None
    replays.clear()
    first = T.map("tensor.in_class", out_token=token, target=target)
    assert not replays
    again = T.map("tensor.in_class", out_token=token, target=target)
    assert replays
    torch.testing.assert_close(first.scores, again.scores, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(first.bias_share, again.bias_share, rtol=1e-9, atol=1e-12)
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
    frozen = tl.Lens(tiny.model)(tiny.arguments).operator.frozen
    assert frozen.first_graph is not None
    u = cotangents(frozen, n)
    replays.clear()
    first = frozen.pull(u, whole(frozen))
    assert not replays and first.shape == (n, *frozen.hidden[0].shape[1:])
    again = frozen.pull(u, whole(frozen))
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
    frozen = tensor_of(name, attention).operator.frozen
    kept = [frozen.tape.factors, frozen.hidden, frozen.block_outputs, frozen.readout, frozen.inputs]
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
    with pytest.raises(tl.InputError, match="weights of the model have changed"):
        T.adjoint(T.output)


def test_a_first_pass_may_write_into_the_weights():
    tiny = build("causal", "rwkv", "eager", torch.float64)  # which rescales some for inference
    before = [parameter._version for parameter in tiny.model.parameters()]
    T = tl.Lens(tiny.model)(tiny.arguments)
    assert before != [parameter._version for parameter in tiny.model.parameters()]
    first, again = T.adjoint(T.output), T.adjoint(T.output)
    torch.testing.assert_close(first, again, rtol=1e-6, atol=1e-9)


# When it is not used --------------------------------------------------------------------------------------------------


def test_ranges_and_silenced_heads_leave_it_alone():
    T = tensor_of("gpt2")
    frozen = T.operator.frozen
    kept = frozen.first_graph
    parts = (T.blocks(0, 2), T.blocks(1, 3), T.heads({1: [0, 2]}), T.without_heads({0: [1]}))
    for part in parts:
        u = torch.ones(part.shape[:2], dtype=torch.float64)
        expected = torch.einsum("id,idje->je", u, part.dense())
        torch.testing.assert_close(part.adjoint(u), expected, rtol=1e-6, atol=1e-9)
    assert kept is not None and frozen.first_graph is kept


def test_a_final_norm_left_out_is_left_out_of_it():
    T = tensor_of("gpt2", rules=tl.Rules(include_final_norm=False))
    first, again = T.adjoint(T.output), T.adjoint(T.output)
    assert torch.equal(first, again)
    assert T.operator.frozen.first_graph is not None  # the logits go through the norm, whatever the output is
    torch.testing.assert_close(
        T.map("tensor.in_class", target=4, out_token=-1).scores,
        tensor_of("gpt2").map("tensor.in_class", target=4, out_token=-1).scores,
    )
    assert T.operator.frozen.first_graph is None


def test_a_large_input_keeps_none(monkeypatch):
    expected = tensor_of("gpt2").map(out_token=-1).scores
    monkeypatch.setattr(walk, "GRAPH_SHARE", 0.0)
    T = tensor_of("gpt2")
    assert T.operator.frozen.first_graph is None
    assert T.certificate().passed
    assert torch.equal(T.map(out_token=-1).scores, expected)


def test_how_large_is_measured_in_tokens(monkeypatch):
    T = tensor_of("vit")  # whose arguments do not say how many there are
    anatomy = T.operator.frozen.anatomy
    for free, kept in ((T.n_tokens * anatomy.bytes_per_token, True), (T.n_tokens * anatomy.bytes_per_token - 1, False)):
        monkeypatch.setattr(walk, "free_bytes", lambda device, free=free: free / walk.GRAPH_SHARE)
        assert (tensor_of("vit").operator.frozen.first_graph is not None) == kept


def test_off_loaded_weights_keep_none():
    accelerate = pytest.importorskip("accelerate")
    model = accelerate.cpu_offload(zoo.build("llama"), execution_device="cpu")
    T = tl.Lens(model)(zoo.sample("llama"))
    assert T.operator.frozen.first_graph is None
    torch.testing.assert_close(T.map(out_token=-1).scores, tensor_of("llama").map(out_token=-1).scores)


def test_inference_tensors_keep_none():
    with torch.inference_mode():
        model = zoo.build("gpt2")
    T = tl.Lens(model)(zoo.sample("gpt2"))
    assert T.operator.frozen.first_graph is None
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
    assert T.operator.frozen.first_graph is None
    value = T.apply(T.input) + T.bias
    torch.testing.assert_close(value, T.output)
    with pytest.raises((tl.NotLinearError, RuntimeError)):
        T.map(out_token=-1)


def test_a_factor_that_an_adapter_leaves_connected_is_cut(monkeypatch):
    """Eq. 13 holds φ(z)/z; an adapter may forget to take its values alone, as it could when there was no graph."""
    monkeypatch.setattr(adapters, "ADAPTERS", dict(adapters.ADAPTERS))

    @tl.adapter("transformers.activations.NewGELUActivation")
    def gated(run: Any, module: nn.Module, forward: Any, z: Tensor) -> Tensor:
        gate, _ = held(run, "gate", lambda: (torch.sigmoid(plain(z)), [plain(z)]))
        return mark(plain(z) * plain(gate), live=True)

    T = tensor_of("gpt2")
    first, again = T.adjoint(T.output), T.adjoint(T.output)
    torch.testing.assert_close(first, again, rtol=1e-9, atol=1e-12)


def test_what_was_written_over_since_is_replayed():
    T = tensor_of("gpt2")
    expected = tensor_of("gpt2").adjoint(T.output)
    factors = [factor for _, factor in T.operator.frozen.tape.sites("softmax")]
    for factor in factors:
        factor.mul_(1)
    torch.testing.assert_close(T.adjoint(T.output), expected, rtol=1e-9, atol=1e-12)


# Once, and no longer than needed --------------------------------------------------------------------------------------


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
        assert len(found) == 2 and len(replays) == 1
        for scores in found:
            torch.testing.assert_close(scores, expected, rtol=1e-9, atol=1e-12)


class Product(nn.Module):
    """Two live factors, whose roles are a convention: a replay watches them by a hook."""

    def forward(self, x: Tensor) -> Tensor:
        return x * x.flip(-1)


@pytest.mark.parametrize("asked", [False, True])
def test_it_goes_when_it_was_used_or_its_tensor_goes(asked):
    T = tl.Lens(with_activation(Product()))(zoo.sample("gpt2"))
    graph = T.operator.frozen.first_graph
    assert graph is not None and graph.end is not None
    gone = [weakref.ref(tensor) for tensor in (graph.end, graph.readout, *graph.leaves)]
    del graph
    if asked:
        T.map(out_token=-1)
    else:
        gc.disable()  # by counting alone: the collector does not see through graphs
        del T
        gc.enable()
    assert [ref() for ref in gone] == [None] * len(gone)


def test_the_certificate_sees_a_graph_that_is_wrong(monkeypatch):
    assert tensor_of("gpt2").certificate().passed
    gradients = frozen_model._gradients
    monkeypatch.setattr(frozen_model, "_gradients", lambda *arguments: 1.01 * gradients(*arguments))
    certificate = tensor_of("gpt2").certificate()
    assert certificate.failures == ("adjoint",)
