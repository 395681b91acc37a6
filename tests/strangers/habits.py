"""What users do to a model between two questions: hooks, layers replaced, adapters, weights changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers as hf
from strangers.cases import Stranger, Verdict, ids, judge_tensor
from strangers.models import DEPTH, HIDDEN, IDS, LENGTH, WORDS, D, H, Plain, randomised
from strangers.oracle import Places, Witness, gap, randn, states
from torch import Tensor, nn

import tensorlens as tl


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A model that users have, and the paths of what they lay hands on, in block 1."""

    name: str
    build: Callable[[], nn.Module]
    places: Places
    mlp: str
    norm: str
    linear: str
    activation: str
    tolerance: float = 1e-9

    @property
    def blocks(self) -> str:
        assert isinstance(self.places.blocks, str)
        return self.places.blocks

    def model(self) -> nn.Module:
        return randomised(self.build())

    def witness(self, model: nn.Module) -> Witness:
        return Witness(model, lambda m: m(ids()), self.places)

    def stranger(self, name: str) -> Stranger:
        # A pre-hook of a block may count to it or to the block before; only the whole is the same either way.
        return Stranger(
            name=name, tolerance=self.tolerance, places=self.places, has_ranges=not name.startswith("pre-hook")
        )


class PlainWithActivation(Plain):
    """The hand-written model with its activation as a module."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.mlp.activation = nn.GELU()  # type: ignore[union-attr]


def llama() -> nn.Module:
    config = hf.LlamaConfig(
        vocab_size=WORDS,
        hidden_size=D,
        intermediate_size=HIDDEN,
        num_hidden_layers=DEPTH,
        num_attention_heads=H,
        num_key_value_heads=2,
        max_position_embeddings=2 * LENGTH,
        attn_implementation="eager",
    )
    return hf.LlamaModel(config)


def bert() -> nn.Module:
    config = hf.BertConfig(
        vocab_size=WORDS,
        hidden_size=D,
        intermediate_size=HIDDEN,
        num_hidden_layers=DEPTH,
        num_attention_heads=H,
        max_position_embeddings=2 * LENGTH,
        attn_implementation="eager",
    )
    return hf.BertModel(config, add_pooling_layer=False)


KINDS = {
    "hand-written": Kind(
        name="hand-written",
        build=PlainWithActivation,
        places=Places(),
        mlp="blocks.1.mlp",
        norm="blocks.1.ln_1",
        linear="blocks.1.mlp.down",
        activation="blocks.1.mlp.activation",
    ),
    "Llama": Kind(
        name="Llama",
        build=llama,
        places=Places(blocks="layers", end="norm"),
        mlp="layers.1.mlp",
        norm="layers.1.input_layernorm",
        linear="layers.1.mlp.down_proj",
        activation="layers.1.mlp.act_fn",
        tolerance=1e-5,
    ),
    "BERT": Kind(
        name="BERT",
        build=bert,
        places=Places(blocks="encoder.layer", end=f"encoder.layer.{DEPTH - 1}"),
        mlp="encoder.layer.1.intermediate",
        norm="encoder.layer.1.output.LayerNorm",
        linear="encoder.layer.1.output.dense",
        activation="encoder.layer.1.intermediate.intermediate_act_fn",
    ),
}


def replace(model: nn.Module, path: str, new: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, new.double().eval())


def edit(change: Callable[[Tensor], Tensor]) -> Callable[[nn.Module, Any, Any], Any]:
    """A forward hook that changes the state in what a module returns."""

    def hook(_: nn.Module, args: Any, output: Any) -> Any:
        return (change(output[0]), *output[1:]) if isinstance(output, tuple) else change(output)

    return hook


def scaled(x: Tensor) -> Tensor:
    return 1.7 * x


def without_direction(x: Tensor) -> Tensor:
    direction = nn.functional.normalize(randn(x.shape[-1], seed=21), dim=0).to(x.dtype)
    return x - (x @ direction)[..., None] * direction


def without_token(x: Tensor) -> Tensor:
    x = x.clone()
    x[:, 2] = 0
    return x


def hook_on_block(change: Callable[[Tensor], Tensor]) -> Callable[[nn.Module, Kind], None]:
    return lambda model, kind: _ignore(model.get_submodule(f"{kind.blocks}.1").register_forward_hook(edit(change)))


def hook_before_block(change: Callable[[Tensor], Tensor]) -> Callable[[nn.Module, Kind], None]:
    def entering(_: nn.Module, args: Any) -> Any:
        return (change(args[0]), *args[1:])

    return lambda model, kind: _ignore(model.get_submodule(f"{kind.blocks}.1").register_forward_pre_hook(entering))


def _ignore(_: Any) -> None:
    return None


def hook_on_mlp(model: nn.Module, kind: Kind) -> None:
    model.get_submodule(kind.mlp).register_forward_hook(edit(lambda y: 0.2 * y))


def other_norm(model: nn.Module, kind: Kind) -> None:
    replace(model, kind.norm, randomised(nn.LayerNorm(D, eps=0.5), seed=7))


def other_linear(model: nn.Module, kind: Kind) -> None:
    old = model.get_submodule(kind.linear)
    assert isinstance(old, nn.Linear)
    replace(model, kind.linear, randomised(nn.Linear(old.in_features, old.out_features), seed=8))


def other_activation(model: nn.Module, kind: Kind) -> None:
    replace(model, kind.activation, nn.ReLU())


def reordered(model: nn.Module, kind: Kind) -> None:
    blocks = model.get_submodule(kind.blocks)
    assert isinstance(blocks, nn.ModuleList)
    blocks[0], blocks[2] = blocks[2], blocks[0]


class LoRA(nn.Module):
    """A linear layer with a low-rank change beside it, and a flag that turns it off."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.enabled = base, True
        self.a = randomised(nn.Linear(base.in_features, 2, bias=False), seed=9)
        self.b = randomised(nn.Linear(2, base.out_features, bias=False), seed=10)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 1.5 * self.b(self.a(x)) if self.enabled else self.base(x)


def lora_in_place(model: nn.Module, kind: Kind) -> None:
    old = model.get_submodule(kind.linear)
    assert isinstance(old, nn.Linear)
    replace(model, kind.linear, LoRA(old))


def lora_by_hook(model: nn.Module, kind: Kind) -> None:
    layer = model.get_submodule(kind.linear)
    assert isinstance(layer, nn.Linear)
    a, b = randn(layer.in_features, 2, seed=9), randn(2, layer.out_features, seed=10)
    layer.register_forward_hook(lambda _, args, y: y + 0.3 * (args[0] @ a.to(y.dtype)) @ b.to(y.dtype))


def forward_replaced(model: nn.Module, kind: Kind) -> None:
    layer = model.get_submodule(kind.mlp)
    old = layer.forward
    layer.forward = lambda *args: 0.3 * old(*args)


def weights_changed(model: nn.Module, kind: Kind) -> None:
    with torch.no_grad():
        model.get_submodule(kind.linear).weight.mul_(0.4)  # type: ignore[union-attr, operator]


def weights_swapped_by_data(model: nn.Module, kind: Kind) -> None:
    weight: Any = model.get_submodule(kind.linear).weight
    weight.data = 0.4 * weight.data


def training(model: nn.Module, kind: Kind) -> None:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.5
    model.train()


HABITS: dict[str, Callable[[nn.Module, Kind], None]] = {
    "hook on a block: scale": hook_on_block(scaled),
    "hook on a block: project out": hook_on_block(without_direction),
    "hook on a block: zero a token": hook_on_block(without_token),
    "pre-hook on a block: scale": hook_before_block(scaled),
    "pre-hook on a block: zero a token": hook_before_block(without_token),
    "hook on a feed-forward": hook_on_mlp,
    "norm replaced": other_norm,
    "linear replaced": other_linear,
    "activation replaced": other_activation,
    "blocks reordered": reordered,
    "LoRA in place": lora_in_place,
    "LoRA by a hook": lora_by_hook,
    "forward replaced": forward_replaced,
    "weights changed": weights_changed,
    "weights swapped by data": weights_swapped_by_data,
    "training mode": training,
}


def warm(T: Any) -> None:
    """Let every engine learn what it wants to remember."""
    T.rows(0)
    T.map("tensor.norm")
    _ = T.T @ randn(12, *T.output.shape, seed=3).to(T.dtype)


def cold_verdict(kind: Kind, habit: str) -> Verdict:
    """The habit first, then the first question."""
    model = kind.model()
    HABITS[habit](model, kind)
    return judge_tensor(lambda: tl.Lens(model)(list(IDS)), [_evaluated(kind, model)], kind.stranger(habit))


def warm_verdicts(kind: Kind, habit: str) -> dict[str, Verdict]:
    """A question, the habit, and the same question of a new lens, of the old lens, and of the old tensor."""
    model = kind.model()
    before = kind.witness(model)
    _ = before.dense, before.bias
    lens = tl.Lens(model)
    T = lens(list(IDS))
    warm(T)
    HABITS[habit](model, kind)
    after = _evaluated(kind, model)
    stranger = kind.stranger(habit)
    return {
        "new lens": judge_tensor(lambda: tl.Lens(model)(list(IDS)), [after], stranger),
        "same lens": judge_tensor(lambda: lens(list(IDS)), [after], stranger),
        "old tensor": stale_verdict(T, before, kind.tolerance),
    }


def _evaluated(kind: Kind, model: nn.Module) -> Witness:
    """The witness is of the model as it would run at inference."""
    was = model.training
    model.eval()
    witness = kind.witness(model)
    _ = witness.dense
    model.train(was)
    return witness


def stale_verdict(T: Any, before: Witness, tolerance: float) -> Verdict:
    """A tensor made before a change is still what it was, or refuses."""
    v, u, dense = states(T, 1)[0], randn(20, *T.output.shape, seed=5), before.dense
    pulled = torch.einsum("nod,odic->nic", u, dense)
    questions = {
        "apply": (lambda: T @ v, torch.einsum("odic,ic->od", dense, v)),
        "adjoint of 1": (lambda: T.T @ u[:1].to(T.dtype), pulled[:1]),
        "adjoint of 20": (lambda: T.T @ u.to(T.dtype), pulled),
        "row": (lambda: T.rows(1), dense[1]),
        "bias": (lambda: T.bias + before.output, before.bias + before.output),
    }
    refusals, worst = [], 0.0
    for name, (ask, expected) in questions.items():
        try:
            error = gap(ask(), expected)
        except tl.TensorLensError as refusal:
            refusals.append(str(refusal))
            continue
        except Exception as crash:
            return Verdict("crash", f"{name}: {type(crash).__name__}: {str(crash)[:200]}")
        if not error <= tolerance:
            return Verdict("wrong", f"{name} {error:.2g}")
        worst = max(worst, error)
    return Verdict("refused", refusals[0]) if refusals else Verdict("exact", f"{worst:.1e}")
