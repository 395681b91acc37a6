"""T is a program: what is done to the model later is not done to T, and T does to the model nothing at all."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import zoo
from strangers.cases import Stranger, ids, judge_tensor
from strangers.models import IDS, Attention, Block, D, FeedForward, H, Plain, WithHead, randomised
from strangers.odd_operations import scripted
from strangers.oracle import Places, Witness, gap, randn
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

import tensorlens as tl

pytestmark = pytest.mark.filterwarnings("ignore")


def exact(lens: tl.Lens, twin: nn.Module, given: Tensor) -> bool:
    witness = Witness(twin, lambda model: model(given), Places())
    found = judge_tensor(lambda: lens(given), [witness], Stranger(name="here"))
    assert found.outcome == "exact", found
    return True


# Faults of watching --------------------------------------------------------------------------------------------------

scale = 1.3


def inner(z: Tensor) -> Tensor:
    return z * scale


def outer(z: Tensor) -> Tensor:
    return inner(F.gelu(z))


def test_a_global_that_a_helper_of_a_helper_reads(monkeypatch: pytest.MonkeyPatch):
    model = randomised(Plain(lambda: Block(mlp=FeedForward(outer))))
    lens = tl.Lens(model)
    T = lens(ids())
    before = T.T @ T.output
    monkeypatch.setitem(globals(), "scale", 0.4)
    assert torch.equal(T.T @ T.output, before), "T is what it was"
    assert exact(lens, model, ids()), "the next one is of the model as it is"


@scripted
def doubled(z: Tensor) -> Tensor:
    z.mul_(2.0)
    return z.add_(0.5)


def sometimes_scripted(z: Tensor) -> Tensor:
    y = F.gelu(z)
    return doubled(y) if float(z.mean()) > 0 else y


def sometimes(z: Tensor) -> Tensor:
    return 2 * F.gelu(z) + 0.5 if float(z.mean()) > 0 else F.gelu(z)


def test_a_scripted_write_that_only_some_inputs_take():
    model, twin = (randomised(Plain(lambda f=f: Block(mlp=FeedForward(f)))) for f in (sometimes_scripted, sometimes))
    lens = tl.Lens(model)
    for seed in range(4):
        exact(lens, twin, torch.randint(0, 29, (1, 6), generator=torch.Generator().manual_seed(seed)))


class Remembering(Block):
    def __init__(self) -> None:
        super().__init__()
        self.memory: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x) + (0 if self.memory is None else 0.3 * self.memory)
        self.memory = y.detach()
        return y


class Counting(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("n", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        self.n.add_(1)
        return super().forward(x) * self.n


@pytest.mark.parametrize("block", [Remembering, Counting])
def test_state_from_call_to_call_is_found_and_left_as_it_was(block: Any):
    model = randomised(Plain(block))
    lens = tl.Lens(model)
    for _ in range(2):
        T, expected = lens(ids()), copy.deepcopy(model)(ids())[0]
        assert gap(T @ T.input + T.bias, expected) < 1e-12 and T.certificate().passed
        model(ids())


def test_tensors_swapped_under_a_living_T():
    model: Any = randomised(Plain())
    T = tl.Lens(model)(ids())
    before = T.T @ T.output
    torch.utils.swap_tensors(model.blocks[1].mlp.up.weight, nn.Parameter(randn(24, D)))
    assert torch.equal(T.T @ T.output, before)


def test_a_parametrisation_that_steps_when_it_is_read():
    model: Any = randomised(Plain())
    for block in model.blocks:
        parametrizations.spectral_norm(block.mlp.up)
    model.double().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    T = tl.Lens(model)(ids())
    pulled = T.T @ T.output
    _ = T.rows(2), T.map("tensor.norm")
    assert T.certificate().passed and torch.equal(T.T @ T.output, pulled)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.int64])
def test_numbers_read_as_others_are_refused(kind: torch.dtype):
    model = randomised(Plain(lambda: Block(mlp=FeedForward(lambda z: z.view(kind).view(torch.float64)))))
    with pytest.raises(tl.NotLinearError, match="another type of numbers"):
        tl.Lens(model)(ids())


class Windows(Attention):
    """Attention within halves of the input, of one head or of several."""

    def __init__(self, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads

    def forward(self, x: Tensor) -> Tensor:
        halves = x.unflatten(1, (2, -1))
        q, k, v = (t.unflatten(-1, (self.n_heads, -1)).transpose(-3, -2) for t in self.qkv(halves).chunk(3, -1))
        if self.n_heads == 1:
            q, k, v = q.squeeze(-3), k.squeeze(-3), v.squeeze(-3)
        mixed = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1) @ v
        mixed = mixed if self.n_heads == 1 else mixed.transpose(-3, -2).flatten(-2)
        return self.proj(mixed.flatten(1, 2))


def test_windows_are_not_heads():
    T = tl.Lens(randomised(Plain(lambda: Block(Windows(1)))))(ids())
    with pytest.raises(tl.TensorLensError, match="no attention heads"):
        T.heads({0: [0]})
    T = tl.Lens(randomised(Plain(lambda: Block(Windows(H)))))(ids())
    parts = sum(T.blocks(0, 1).heads({0: [head]}) @ T.input for head in range(H))
    none = T.blocks(0, 1).without_heads({0: range(H)}) @ T.input
    # Heads add up where nothing bends between them: all of them, less the rest counted once too often.
    assert gap(parts - (H - 1) * none, T.blocks(0, 1) @ T.input) < 1e-12


class TwoAttentions(Block):
    """One of four heads and one of two."""

    def __init__(self) -> None:
        super().__init__()
        self.other, self.ln_3 = Attention(), nn.LayerNorm(D)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(-3, -2) for t in self.other.qkv(self.ln_3(x)).chunk(3, -1))
        x = x + self.other.proj(((q @ k.mT).softmax(-1) @ v).transpose(-3, -2).flatten(-2))
        return x + self.mlp(self.ln_2(x))


def test_two_attentions_of_different_heads_are_told_apart_or_said():
    model: Any = WithHead()
    model.blocks = nn.ModuleList([TwoAttentions() for _ in range(2)])
    T = tl.Lens(randomised(model))(ids())
    assert T.certificate().passed
    with pytest.raises(tl.TensorLensError, match="heads"):
        _ = T.without_heads({1: [1]}) @ T.input
    found = T.components(out_token=-1, target=3)
    assert {len({one.head for one in found.labels if one.kind == kind}) for kind in _kinds(found)} == {H, 2}


def _kinds(found: Any) -> set[str]:
    return {one.kind for one in found.labels if one.head is not None}


# What a recording leaves behind --------------------------------------------------------------------------------------


class Cached(Attention):
    """Values are written into a buffer and read from there."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("room", torch.zeros(1, 8, 3 * D))

    def forward(self, x: Tensor) -> Tensor:
        places = (torch.arange(x.shape[1]) + 3) % 8
        self.room.index_copy_(1, places, self.qkv(x))
        q, k, v = (t.unflatten(-1, (H, -1)).transpose(-3, -2) for t in self.room[:, places].chunk(3, -1))
        return self.proj(((q @ k.mT).softmax(-1) @ v).transpose(-3, -2).flatten(-2))


def test_buffers_that_live_values_were_written_into_are_ordinary_again():
    model: Any = randomised(Plain(lambda: Block(Cached())))
    T = tl.Lens(model)(ids())
    assert T.certificate().passed
    for block in model.blocks:
        assert type(block.attn.room) is Tensor and not vars(block.attn.room) and not block.attn.room.any()
    copies = [copy.deepcopy(model) for _ in range(3)]
    assert all(gap(one(ids())[0], T.output) < 1e-12 for one in copies)


def test_what_a_hook_has_kept_is_ordinary():
    model: Any = randomised(Plain())
    kept: list[Any] = []
    model.blocks[1].mlp.register_forward_hook(lambda module, args, output: kept.append(output))
    T = tl.Lens(model)(ids())
    assert kept and all(type(one) is Tensor and not vars(one) for one in kept)
    assert T.certificate().passed


class Latents(nn.Module):
    """Learnt queries are the first state: a view of a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.latents = nn.Embedding(29, D), nn.Parameter(torch.randn(5, D))
        self.blocks, self.norm = nn.ModuleList([Reading() for _ in range(3)]), nn.LayerNorm(D)

    def forward(self, input_ids: Tensor) -> Tensor:
        memory, x = self.embed(input_ids), self.latents[None]
        for block in self.blocks:
            x = block(x, memory)
        return self.norm(x)


class Reading(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv, self.norm, self.mlp = nn.Linear(D, D), nn.Linear(D, 2 * D), nn.LayerNorm(D), FeedForward()

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        k, v = self.kv(memory).chunk(2, -1)
        x = x + (self.q(self.norm(x)) @ k.mT / 4).softmax(-1) @ v
        return x + self.mlp(x)


def test_a_certificate_writes_into_no_weight_and_no_input():
    model = randomised(Latents())
    before = {name: (value.clone(), value._version) for name, value in model.state_dict().items()}
    assert tl.Lens(model)(ids()).certificate().passed
    after = model.state_dict()
    assert all(torch.equal(after[name], was) and after[name]._version == n for name, (was, n) in before.items())
    tower = nn.Sequential(*(nn.Sequential(nn.Linear(D, D), nn.GELU(), nn.Linear(D, D)) for _ in range(3)))
    given = randn(6, D)
    was = given.clone()
    assert tl.Lens(randomised(tower))(given).certificate().passed and torch.equal(given, was)


# False alarms and refusals -------------------------------------------------------------------------------------------


def test_a_compiled_copy_and_a_counter_change_nothing():
    counter = [0]

    def counting(z: Tensor) -> Tensor:
        counter[0] += 1
        return F.gelu(z)

    model = randomised(Plain(lambda: Block(mlp=FeedForward(counting))))
    T = tl.Lens(model)(ids())
    before = T.T @ T.output
    torch.compile(model, backend="eager")(ids())
    model.share_memory()  # for workers: the same weights at another address
    assert counter[0] > 3 and torch.equal(T.T @ T.output, before) and T.certificate().passed


@pytest.mark.parametrize("batch_first", [True, False])
def test_torchs_encoder_with_a_padding_mask(batch_first: bool):
    class Encoding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(D, H, 24, batch_first=batch_first, norm_first=False)
            self.embed, self.encoder = nn.Embedding(29, D), nn.TransformerEncoder(layer, 3)

        def forward(self, input_ids: Tensor) -> Tensor:
            x = self.embed(input_ids)
            x = self.encoder(x if batch_first else x.transpose(0, 1), src_key_padding_mask=input_ids == 0)
            return x if batch_first else x.transpose(0, 1)

    model, given = randomised(Encoding()), torch.tensor([[5, 9, 23, 12, 0, 0]])
    T = tl.Lens(model)(given)
    assert T.certificate().passed
    assert gap((T @ T.input + T.bias)[:4], model(given)[0, :4]) < 1e-12  # torch leaves zeros at what is masked


class ByForward(Plain):
    def body(self, input_ids: Tensor) -> Tensor:
        x = self.embedded(input_ids)
        for block in self.blocks:
            x = block.forward(x)
        return self.norm(x)


class InSteps(Block):
    """Has no forward; its methods call each other."""

    forward = None  # type: ignore[assignment]

    def attend(self, x: Tensor) -> Tensor:
        return x + self.attn(self.ln_1(x))

    def run(self, x: Tensor) -> Tensor:
        x = self.attend(x)
        return x + self.mlp(self.ln_2(x))


class ByMethod(Plain):
    def __init__(self) -> None:
        super().__init__(InSteps)

    def body(self, input_ids: Tensor) -> Tensor:
        x = self.embedded(input_ids)
        for block in self.blocks:
            x = block.run(x)  # type: ignore[operator]
        return self.norm(x)


@pytest.mark.parametrize("build", [ByForward, ByMethod])
def test_blocks_run_by_a_method(build: Callable[[], nn.Module]):
    assert exact(tl.Lens(randomised(build())), randomised(Plain()), ids())


class WithoutPositions(Plain):
    def embedded(self, input_ids: Tensor) -> Tensor:
        return self.embed(input_ids)


class BlocksAreLeaves(torch.fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, Block) or super().is_leaf_module(m, module_qualified_name)


def test_a_graph_whose_leaves_are_the_blocks():
    model = randomised(WithoutPositions())
    graph = torch.fx.GraphModule(model, BlocksAreLeaves().trace(model))
    assert exact(tl.Lens(graph), model, ids())


def test_models_that_torch_has_traced_are_named():
    model = randomised(Plain())
    for made in (torch.jit.trace(model, (ids(),)), torch.export.export(model, (ids(),)).module()):
        with pytest.raises(tl.InputError, match="runs as one graph in which no block is called"):
            tl.Lens(made)


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert-classifier"])
def test_baselines_do_not_depend_on_the_member(name: str):
    model, place = zoo.build(name), 0 if name == "bert-classifier" else -1
    expected = tl.Lens(model)(zoo.sample(name))
    for member in ("jacobian", "attn_lrp"):
        T = tl.Lens(model, rules=getattr(tl.Rules, member)())(zoo.sample(name))
        for method in ("rollout.attn", "rollout.w_attn", "mean.glob_enc", "alti"):
            found, wanted = (one.map(method, out_token=place).scores for one in (T, expected))
            assert gap(found, wanted) < 1e-5, (member, method)


# Ways out and back in ------------------------------------------------------------------------------------------------


def test_a_subclass_of_the_users_does_not_hide_a_live_tensor():
    def plain(z: Tensor) -> Tensor:
        return F.gelu(z.as_subclass(Tensor))

    model, twin = (randomised(Plain(lambda f=f: Block(mlp=FeedForward(f)))) for f in (plain, F.gelu))
    assert exact(tl.Lens(model), twin, ids())
    model = randomised(Plain(lambda: Block(mlp=FeedForward(lambda z: z.as_subclass(nn.Parameter)))))
    with pytest.raises(tl.NotLinearError, match="would hide it"):
        tl.Lens(model)(ids())


def test_what_leaves_by_dlpack_is_refused():
    model = randomised(Plain(lambda: Block(mlp=FeedForward(lambda z: F.gelu(torch.from_dlpack(z))))))
    with pytest.raises(tl.NotLinearError, match="dlpack"):
        tl.Lens(model)(ids())


def test_tokens_of_very_different_sizes_are_not_taken_for_a_lost_path():
    class Uneven(Plain):
        def embedded(self, input_ids: Tensor) -> Tensor:
            sizes = torch.tensor([1e6] * (len(IDS) - 1) + [1.0], dtype=torch.float64)[:, None]
            return super().embedded(input_ids) * sizes

    T = tl.Lens(randomised(Uneven()))(ids())
    assert T.certificate().passed, T.certificate()


@pytest.mark.parametrize("where", ["class", "subclass", "instance"])
def test_an_adapter_is_not_taken_where_the_forward_is_another(where: str, monkeypatch: pytest.MonkeyPatch):
    model = zoo.build("bert")
    kind = type(model.encoder.layer[0].intermediate.intermediate_act_fn)

    def clipped(self: Any, z: Tensor) -> Tensor:
        return nn.functional.gelu(z).clamp(-0.05, 0.3)

    if where == "class":
        monkeypatch.setattr(kind, "forward", clipped)
    for layer in model.encoder.layer:
        if where == "subclass":
            layer.intermediate.intermediate_act_fn = type("Clipped", (kind,), {"forward": clipped})()
        elif where == "instance":
            one = layer.intermediate.intermediate_act_fn
            one.forward = clipped.__get__(one)
    T = tl.Lens(model)(zoo.sample("bert"))
    with torch.no_grad():
        expected = model(torch.tensor([zoo.sample("bert")])).last_hidden_state[0]
    assert float((T.apply(T.input) + T.bias - expected).norm() / expected.norm()) < 1e-12 and T.certificate().passed


def test_a_model_runs_twice_when_it_is_new_and_once_afterwards():
    model, runs = zoo.build("gpt2"), []
    forward = model.forward

    def counted(*args: Any, **kwargs: Any) -> Any:
        runs.append(1)
        return forward(*args, **kwargs)

    model.forward = counted
    lens = tl.Lens(model)
    counts = []
    for given in ([3, 5, 7], [3, 5, 7], [4, 4, 8, 2]):
        lens(given)
        counts.append(len(runs))
    assert counts == [2, 3, 4]
    T = lens([3, 5, 7])
    before = len(runs)
    T.certificate()
    assert 0 < len(runs) - before <= 8
