"""Strangers written to be silently wrong: state that stays, gradients that lie, code that hooks and counters change."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from strangers.cases import Stranger, ids, plainly
from strangers.frozen import held
from strangers.models import DEPTH, Attention, Block, D, FeedForward, H, Plain, randomised
from strangers.oracle import Places
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, prune

TWICE = Places(blocks=tuple(f"blocks.{n}" for n in (0, 1, 2, 0, 1, 2)))


# Weights that are computed -------------------------------------------------------------------------------------------


def with_weights(change: Callable[[nn.Linear], Any]) -> Callable[[], nn.Module]:
    """The plain model with every linear layer of a feed-forward changed."""

    def build() -> nn.Module:
        model = randomised(Plain())
        for block in model.blocks:  # type: ignore[union-attr]
            for layer in (block.mlp.up, block.mlp.down):
                change(layer)
        return model

    return build


class LowRank(nn.Module):
    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(layer.weight[:2].clone()), nn.Parameter(layer.weight[:, :2].clone())

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.b @ self.a


def old_spectral_norm(layer: nn.Linear) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nn.utils.spectral_norm(layer)


def lora_parametrization(layer: nn.Linear) -> None:
    parametrize.register_parametrization(layer, "weight", LowRank(layer))


class Lazy(FeedForward):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.LazyLinear(24, dtype=torch.float64), nn.LazyLinear(D, dtype=torch.float64)  # type: ignore[assignment]


def lazy_model() -> nn.Module:
    """Some layers have no weights before the first input."""
    model = Plain().double().eval()
    for block in model.blocks:
        block.mlp = Lazy()
    return model


# Blocks run otherwise ------------------------------------------------------------------------------------------------


class Twice(Plain):
    """All blocks, and then all of them again."""

    def body(self, input_ids: Tensor) -> Tensor:
        x = self.embedded(input_ids)
        for _ in range(2):
            for block in self.blocks:
                x = block(x)
        return self.norm(x)


class ByFunctionalCall(Plain):
    """Every block with its own weights made smaller for the occasion."""

    def body(self, input_ids: Tensor) -> Tensor:
        x = self.embedded(input_ids)
        for block in self.blocks:
            x = functional_call(block, {name: 0.7 * value for name, value in block.named_parameters()}, (x,))
        return self.norm(x)


class Smaller(Plain):
    """The twin: the weights are smaller for good."""

    def __init__(self) -> None:
        super().__init__()
        self.is_smaller = False

    def load_state_dict(self, state: Any, **options: Any) -> Any:
        return super().load_state_dict({k: 0.7 * v if k.startswith("blocks") else v for k, v in state.items()})


class CallBlock(Block):
    """Does something outside of its forward."""

    def __call__(self, x: Tensor) -> Tensor:
        return 1.3 * super().__call__(x)


class ListBlock(Block):
    """Returns a list with the state second."""

    def forward(self, x: Tensor) -> Any:
        return [x.mean(1), super().forward(x)]


class ListModel(Plain):
    def __init__(self) -> None:
        super().__init__(ListBlock)

    def body(self, input_ids: Tensor) -> Tensor:
        x = self.embedded(input_ids)
        for block in self.blocks:
            x = block(x)[1]
        return self.norm(x)


class State(NamedTuple):
    x: Tensor
    step: int


class TupleBlock(Block):
    def forward(self, state: State) -> State:  # type: ignore[override]
        return State(super().forward(state.x), state.step + 1)


class TupleModel(Plain):
    """The state travels in a tuple with names, beside a number."""

    def __init__(self) -> None:
        super().__init__(TupleBlock)

    def body(self, input_ids: Tensor) -> Tensor:
        state = State(self.embedded(input_ids), 0)
        for block in self.blocks:
            state = block(state)
        return self.norm(state.x)


class DictBlock(Block):
    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:  # type: ignore[override]
        return {**batch, "x": super().forward(batch["x"])}


class DictModel(Plain):
    """The state travels in a dict."""

    def __init__(self) -> None:
        super().__init__(DictBlock)

    def body(self, input_ids: Tensor) -> Tensor:
        batch = {"mask": torch.ones(1, input_ids.shape[1]), "x": self.embedded(input_ids)}
        for block in self.blocks:
            batch = block(batch)
        return self.norm(batch["x"])


class HiddenBlocks(Plain):
    """Blocks in a plain list, of which the module knows nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.__dict__["hidden"] = [randomised(Block()) for _ in range(DEPTH)]
        self.blocks = nn.ModuleList()

    def body(self, input_ids: Tensor) -> Tensor:
        x = self.embedded(input_ids)
        for block in self.__dict__["hidden"]:
            x = block(x)
        return self.norm(x)


class ScalarMix(Plain):
    """A weighted sum of the states of all blocks is what counts."""

    def __init__(self) -> None:
        super().__init__()
        self.weights, self.begin = nn.Parameter(torch.ones(DEPTH + 1)), nn.Identity()

    def body(self, input_ids: Tensor) -> Tensor:
        states = [self.begin(self.embedded(input_ids))]
        for block in self.blocks:
            states.append(block(states[-1]))
        return self.norm(sum(weight * state for weight, state in zip(self.weights, states, strict=True)))


def traced_blocks() -> nn.Module:
    model = randomised(Plain())
    x = torch.randn(1, 6, D, dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.blocks = nn.ModuleList([torch.jit.trace(block, x) for block in model.blocks])  # type: ignore[union-attr]
    return model


# Gradients that lie --------------------------------------------------------------------------------------------------


class HookedGradient(Block):
    """The gradient is changed on its way back."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if y.requires_grad:
            y.register_hook(lambda gradient: 2 * gradient)
        return y


def backward_hooks() -> nn.Module:
    model = Plain()
    for block in model.blocks:
        block.register_full_backward_hook(lambda module, taken, given: tuple(2 * one for one in taken))
    return model


class Reversal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return -gradients[0]


# State that stays, and branches --------------------------------------------------------------------------------------


def without_trace(model: nn.Module) -> Any:
    """Call a model and leave it as it was."""
    kept = [
        (m, dict(m.__dict__), {k: v.clone() for k, v in m._buffers.items() if v is not None}) for m in model.modules()
    ]
    try:
        return model(ids())
    finally:
        for module, attributes, buffers in kept:
            for name in {"n_calls", "last"} & module.__dict__.keys():
                module.__dict__.pop(name)
            module.__dict__.update({k: v for k, v in attributes.items() if k in ("n_calls", "last")})
            for name, value in buffers.items():
                module._buffers[name] = value


class Counting(Block):
    """Every call scales a little more."""

    def __init__(self) -> None:
        super().__init__()
        self.n_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.n_calls += 1
        return super().forward(x) * (1 + 0.1 * self.n_calls)


class Remembering(Block):
    """Mixes with what it saw in the call before."""

    last: Any = None

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        y = y if self.last is None else y + 0.5 * self.last
        self.last = y.detach()
        return y


class Averaging(Block):
    """A buffer follows the mean of what it sees, in evaluation too."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(D))
        self.mean: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.mean((0, 1))
        return super().forward(x - self.mean)


class Branching(Block):
    """Two ways, by the sign of a mean."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.mean() > -5 else x.flip(-1)


class Looping(Block):
    """As many rounds as the state says."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(1 + int(x[0, 0].argmax()) % 3):
            x = super().forward(x)
        return x


class Noisy(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + 0.1 * torch.randn_like(x))


class DroppingOut(Block):
    """Dropout that is never switched off."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.dropout(x, 0.3, training=True))


# Writing in place ----------------------------------------------------------------------------------------------------


def masked_in_place(x: Tensor) -> Tensor:
    y = F.gelu(x).clone()
    y[:, 1] = 0
    y[..., ::2] += 0.5 * x[..., ::2]
    y.masked_fill_(torch.arange(y.shape[-1]) == 3, 0.7)
    return y.index_add_(1, torch.tensor([0, 2]), x[:, :2])


def masked_plainly(x: Tensor) -> Tensor:
    rows, columns = torch.arange(x.shape[1])[:, None], torch.arange(x.shape[2])
    y = F.gelu(x) * (rows != 1) + 0.5 * x * (columns % 2 == 0)
    y = torch.where(columns == 3, 0.7, y)
    moved = torch.zeros(x.shape[1], x.shape[1], dtype=x.dtype)
    moved[0, 0] = moved[2, 1] = 1
    return y + moved @ x


def turned_in_place(x: Tensor) -> Tensor:
    y = x.clone().transpose_(1, 2).mul_(2).transpose_(1, 2)
    return y.relu_().sub_(0.1)


def scattered(x: Tensor) -> Tensor:
    order = torch.arange(x.shape[-1]).flip(0).expand_as(x)
    return torch.zeros_like(x).scatter_(-1, order, x)


def shared_storage(x: Tensor) -> Tensor:
    room = torch.empty(2, *x.shape, dtype=x.dtype)
    room[0], room[1] = x, 2 * x
    room[0].add_(room[1])
    return room.view(2, -1)[0].view(x.shape)


def as_strided(x: Tensor) -> Tensor:
    return x.contiguous().as_strided(x.shape, x.stride()) * 1.5


def set_by_data(x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    y.data = x * 2
    return y


def through_unbind(x: Tensor) -> Tensor:
    return torch.stack([row + 0.3 * rows[0] for rows in [x.unbind(1)] for row in rows], 1)


# Ways to mix ---------------------------------------------------------------------------------------------------------


def heads_of(x: Tensor) -> Tensor:
    return x.unflatten(-1, (H, -1)).transpose(-3, -2)


class SigmoidAttention(Attention):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (heads_of(t) for t in self.qkv(x).chunk(3, -1))
        scores = held(torch.sigmoid(q @ k.transpose(-1, -2) - 1))
        return self.proj((scores @ v).transpose(-3, -2).flatten(-2))


class LinearAttention(Attention):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (heads_of(t) for t in self.qkv(x).chunk(3, -1))
        q, k = held(F.elu(q) + 1), held(F.elu(k) + 1)
        mixed = q @ (k.transpose(-1, -2) @ v) / (q @ k.sum(-2)[..., None])
        return self.proj(mixed.transpose(-3, -2).flatten(-2))


class FourierMixing(Attention):
    def forward(self, x: Tensor) -> Tensor:
        return self.proj(torch.fft.fft2(x, dim=(1, 2)).real)


class ConvolutionalMixing(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Conv1d(D, D, 3, padding=2, groups=D)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(self.mix(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))


class Scanning(Attention):
    """A recurrence over tokens with a gate of the input."""

    def forward(self, x: Tensor) -> Tensor:
        _, gate, v = self.qkv(x).chunk(3, -1)
        gate, h, rows = held(torch.sigmoid(gate)), torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            h = gate[:, t] * h + v[:, t]
            rows.append(h)
        return self.proj(torch.stack(rows, 1))


class Sparse(Attention):
    def forward(self, x: Tensor) -> Tensor:
        neighbours = (
            torch.eye(x.shape[1], dtype=x.dtype) + torch.eye(x.shape[1], dtype=x.dtype).roll(1, 0)
        ).to_sparse()
        return self.proj(torch.sparse.mm(neighbours, x[0])[None])


class PlainSparse(Attention):
    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x + x.roll(1, 1))


class Experts(FeedForward):
    """Each token goes to the expert with the larger score, by a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(D, 2)
        self.experts = nn.ModuleList([FeedForward(), FeedForward()])

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        chosen, out = weights.argmax(-1), torch.zeros_like(x)
        for n, expert in enumerate(self.experts):
            mask = chosen == n
            out[mask] = held(weights[mask][:, n : n + 1]) * expert(x[mask])
        return out


class ComplexFeedForward(FeedForward):
    def forward(self, x: Tensor) -> Tensor:
        y = torch.complex(self.up(x), self.up(x.flip(-1))) * torch.tensor(0.6 + 0.8j)
        return self.down(y.real + 0.5 * y.imag)


def by_condition(x: Tensor) -> Tensor:
    return torch.cond(x.sum() > -1e9, lambda v: F.gelu(v), lambda v: v, (x,))


# The list ------------------------------------------------------------------------------------------------------------


def prepared(name: str, build: Callable[[], nn.Module], **more: Any) -> Stranger:
    """A model whose weights are already drawn."""
    return Prepared(name=name, build=build, **more)


class Prepared(Stranger):
    def model(self) -> nn.Module:
        return self.build().double().eval()


def mixing(
    name: str, kind: Callable[[], nn.Module], plain: Callable[[], nn.Module] | None = None, **more: Any
) -> Stranger:
    twin = None if plain is None else plainly(lambda: Plain(lambda: Block(plain())))
    return Stranger(name=f"mixing: {name}", build=lambda: Plain(lambda: Block(kind())), twin=twin, **more)


def feeding(name: str, kind: Callable[[], nn.Module], **more: Any) -> Stranger:
    return Stranger(name=f"feed-forward: {name}", build=lambda: Plain(lambda: Block(mlp=kind())), **more)


def activated(name: str, function: Any, plain: Any = None, **more: Any) -> Stranger:
    def model(one: Any) -> Callable[[], nn.Module]:
        return lambda: Plain(lambda: Block(mlp=FeedForward(one)))

    twin = None if plain is None else plainly(model(plain))
    return Stranger(name=f"feed-forward: {name}", build=model(function), twin=twin, **more)


def block(name: str, kind: Callable[[], nn.Module], twin: Any = None, **more: Any) -> Stranger:
    return Stranger(name=name, build=lambda: Plain(kind), twin=twin, **more)


STRANGERS = [
    prepared("weights: weight_norm", with_weights(parametrizations.weight_norm)),
    prepared("weights: spectral_norm", with_weights(parametrizations.spectral_norm)),
    prepared("weights: spectral_norm by a hook", with_weights(old_spectral_norm)),
    prepared("weights: LoRA as a parametrization", with_weights(lora_parametrization)),
    prepared("weights: pruned", with_weights(functools.partial(prune.l1_unstructured, name="weight", amount=0.5))),
    prepared("weights: lazy", lazy_model, expect="either"),
    Stranger(name="blocks twice", build=Twice, places=TWICE),
    Stranger(name="blocks by functional_call", build=ByFunctionalCall, twin=plainly(Smaller), expect="either"),
    block("blocks with code around their forward", CallBlock),
    Stranger(name="blocks that return a list", build=ListModel, twin=plainly(Plain), expect="either"),
    Stranger(name="blocks that take a named tuple", build=TupleModel, twin=plainly(Plain), expect="either"),
    Stranger(name="blocks that take a dict", build=DictModel, twin=plainly(Plain), expect="either"),
    Stranger(
        name="blocks in a plain list", build=HiddenBlocks, expect="refused", places=Places(blocks=(), start="embed")
    ),
    Stranger(name="a mean of all states", build=ScalarMix, has_ranges=False, places=Places(start="begin")),
    prepared("blocks by torch.jit.trace", traced_blocks, twin=lambda m: randomised(Plain()), expect="either"),
    Stranger(
        name="DataParallel",
        build=lambda: nn.DataParallel(Plain()),
        given=lambda: {"input_ids": ids()},
        places=Places(blocks="module.blocks", end="module.norm"),
    ),
    block("gradients: a hook of a tensor", HookedGradient, plainly(Plain), expect="either"),
    Stranger(name="gradients: backward hooks of blocks", build=backward_hooks, twin=plainly(Plain), expect="either"),
    activated("gradients reversed", Reversal.apply, lambda x: x, expect="either"),
    block("state: a counter", Counting, call=without_trace),
    block("state: what was seen before", Remembering, call=without_trace, expect="either"),
    block("state: a running mean", Averaging, call=without_trace),
    block("branches: by the sign of a mean", Branching, plainly(Plain)),
    block("branches: as many rounds as the state says", Looping, expect="either"),
    block("random: noise", Noisy, expect="refused"),
    block("random: dropout always on", DroppingOut, expect="refused"),
    activated("written in place", masked_in_place, masked_plainly, expect="either"),
    activated("turned in place", turned_in_place, lambda x: (2 * x).relu() - 0.1, expect="either"),
    activated("scatter_", scattered, lambda x: x.flip(-1), expect="either"),
    activated("parts of one storage", shared_storage, lambda x: 3 * x, expect="either"),
    activated("as_strided", as_strided, lambda x: 1.5 * x, expect="either"),
    activated("set by data", set_by_data, lambda x: 2 * x, expect="either"),
    activated("unbind and stack", through_unbind),
    activated("torch.cond", by_condition, F.gelu, expect="either"),
    feeding("experts by a mask", Experts, expect="either"),
    feeding("complex numbers", ComplexFeedForward, expect="either"),
    mixing("sigmoid", SigmoidAttention),
    mixing("linear attention", LinearAttention),
    mixing("Fourier", FourierMixing, expect="either"),
    mixing("convolution", ConvolutionalMixing),
    mixing("scan", Scanning),
    mixing("sparse", Sparse, PlainSparse, expect="either"),
]
