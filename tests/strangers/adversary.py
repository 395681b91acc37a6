"""Strangers written to be silently wrong: state that stays, gradients that lie, code that hooks and counters change."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from strangers.cases import Stranger, ids, plainly
from strangers.models import DEPTH, Block, D, FeedForward, Plain, randomised
from strangers.odd_functions import (
    ComplexFeedForward,
    ConvolutionalMixing,
    Experts,
    FourierMixing,
    LinearAttention,
    PlainSparse,
    Scanning,
    SigmoidAttention,
    Sparse,
    as_strided,
    by_condition,
    masked_in_place,
    masked_plainly,
    scattered,
    shared_storage,
    through_unbind,
    turned_in_place,
)
from strangers.odd_state import (
    Averaging,
    Branching,
    Counting,
    DroppingOut,
    HookedGradient,
    Looping,
    Noisy,
    Remembering,
    Reversal,
    backward_hooks,
    without_trace,
)
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
    Stranger(name="blocks that take a named tuple", build=TupleModel, twin=plainly(Plain)),
    Stranger(name="blocks that take a dict", build=DictModel, twin=plainly(Plain)),
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
