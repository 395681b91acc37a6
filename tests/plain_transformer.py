"""A Transformer written out by hand, small enough to be believed, whose frozen factors can be held.

The class shares no code with the package, so that it can be a witness; `written_out`, at the end, is
the other witness: what `equations.py` makes of the same weights and factors. Every quantity
that the paper holds fixed passes through `hold(site, value)`, so that one forward pass serves as

* the model itself              `model(x)`                        hold returns the value
* the hand-patched model        `model.patched(x)`                hold detaches it: the Jacobian is T
* a recording                   `model.factors(x)`                hold writes it down
* the frozen, affine function   `model.replay(x, factors)`        hold returns what was written down
"""

from __future__ import annotations

from collections.abc import Callable

import equations as eq
import torch
from torch import Tensor
from torch.nn import functional as F

Site = tuple[int, str]
Hold = Callable[[Site, Tensor], Tensor]

NORMS = {
    "post_ln": ("norm_1", "norm_2"),
    "pre_ln": ("norm_1", "norm_2"),
    "parallel": ("norm_1", "norm_2"),
    "sandwich": ("norm_1", "post_1", "norm_2", "post_2"),
    "post_sublayer": ("post_1", "post_2"),
}
ORDER = {
    "post_ln": ("attention", "norm_1", "ffn", "norm_2"),
    "pre_ln": ("norm_1", "attention", "norm_2", "ffn"),
    "parallel": ("norm_1", "attention", "norm_2", "ffn"),
    "sandwich": ("norm_1", "attention", "post_1", "norm_2", "ffn", "post_2"),
    "post_sublayer": ("attention", "post_1", "ffn", "post_2"),
}
ACTIVATIONS = {"gelu": F.gelu, "silu": F.silu, "geglu": F.gelu, "swiglu": F.silu}


def randn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def gap(found: Tensor, expected: Tensor) -> float:
    """The relative difference of two tensors."""
    return float(((found - expected).norm() / expected.norm()).detach())


def live(_: Site, value: Tensor) -> Tensor:
    return value


class PlainTransformer:
    """Blocks of one of five layouts; weights, biases and norm gains are random, in float64."""

    eps = 1e-5
    n_channels, n_heads, head_channels, hidden_channels = 8, 4, 2, 12

    def __init__(
        self,
        layout: str = "post_ln",
        *,
        norm: str = "layer",
        ffn: str = "gelu",
        gate: str = "freeze_gate",
        is_causal: bool = False,
        n_kv_heads: int = 4,
        n_blocks: int = 2,
        has_biases: bool = True,
        seed: int = 0,
    ) -> None:
        self.layout, self.norm_kind, self.ffn_kind, self.gate = layout, norm, ffn, gate
        self.is_causal, self.n_kv_heads, self.n_blocks, self.has_biases = is_causal, n_kv_heads, n_blocks, has_biases
        self.is_gated, self.has_final_norm = ffn in ("geglu", "swiglu"), layout != "post_ln"
        self.random = torch.Generator().manual_seed(seed)
        self.weights = [self._block_weights() for _ in range(n_blocks)] + [self._norm_weights("final")]

    def _randn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=self.random)

    def _linear(self, name: str, n_in: int, n_out: int) -> dict[str, Tensor]:
        bias = self.has_biases * self._randn(n_out)
        return {f"w_{name}": self._randn(n_in, n_out) / n_in**0.5, f"b_{name}": bias / 2}

    def _norm_weights(self, name: str) -> dict[str, Tensor]:
        has_shift = self.has_biases and self.norm_kind == "layer"
        shift = has_shift * self._randn(self.n_channels)
        return {f"scale_{name}": 1 + self._randn(self.n_channels) / 2, f"b_{name}": shift / 2}

    def _block_weights(self) -> dict[str, Tensor]:
        d, kv = self.n_channels, self.n_kv_heads * self.head_channels
        linears = {"query": (d, d), "key": (d, kv), "value": (d, kv), "out": (d, d)}
        linears |= {"up": (d, self.hidden_channels), "down": (self.hidden_channels, d)}
        linears |= {"gate": (d, self.hidden_channels)} if self.is_gated else {}
        parts = [self._linear(name, *shape) for name, shape in linears.items()]
        parts += [self._norm_weights(name) for name in NORMS[self.layout]]
        return {key: value for part in parts for key, value in part.items()}

    def __call__(self, x: Tensor, hold: Hold = live) -> Tensor:
        for n in range(self.n_blocks):
            x = self._block(n, x, hold)
        return self._norm(self.n_blocks, "final", x, hold) if self.has_final_norm else x

    def patched(self, x: Tensor) -> Tensor:
        return self(x, lambda _, value: value.detach())

    def factors(self, x: Tensor) -> dict[Site, Tensor]:
        factors: dict[Site, Tensor] = {}
        self(x, lambda site, value: factors.setdefault(site, value))
        return factors

    def replay(self, x: Tensor, factors: dict[Site, Tensor]) -> Tensor:
        return self(x, lambda site, _: factors[site])

    def heads(self, n: int) -> dict[str, Tensor]:
        """Value and output weights of block `n`, one for each query head, as the equations take them."""
        w, groups = self.weights[n], self.n_heads // self.n_kv_heads
        w_value = w["w_value"].unflatten(1, (self.n_kv_heads, -1)).transpose(0, 1)
        b_value = w["b_value"].unflatten(0, (self.n_kv_heads, -1))
        w_out = w["w_out"].unflatten(0, (self.n_heads, -1))
        serving = [h // groups for h in range(self.n_heads)]
        return {"w_value": w_value[serving], "b_value": b_value[serving], "w_out": w_out}

    def _block(self, n: int, x: Tensor, hold: Hold) -> Tensor:
        def attend(v: Tensor) -> Tensor:
            return self._attention(n, v, hold)

        def ffn(v: Tensor) -> Tensor:
            return self._ffn(n, v, hold)

        def norm(name: str, v: Tensor) -> Tensor:
            return self._norm(n, name, v, hold)

        if self.layout == "post_ln":
            z = norm("norm_1", attend(x) + x)
            return norm("norm_2", ffn(z) + z)
        if self.layout == "parallel":
            return x + attend(norm("norm_1", x)) + ffn(norm("norm_2", x))
        if self.layout == "pre_ln":
            z = x + attend(norm("norm_1", x))
            return z + ffn(norm("norm_2", z))
        if self.layout == "sandwich":
            z = x + norm("post_1", attend(norm("norm_1", x)))
            return z + norm("post_2", ffn(norm("norm_2", z)))
        z = x + norm("post_1", attend(x))
        return z + norm("post_2", ffn(z))

    def _attention(self, n: int, x: Tensor, hold: Hold) -> Tensor:
        w, groups = self.weights[n], self.n_heads // self.n_kv_heads
        q, k, v = (
            (x @ w[f"w_{name}"] + w[f"b_{name}"]).unflatten(-1, (-1, self.head_channels)).transpose(-3, -2)
            for name in ("query", "key", "value")
        )
        k, v = (t.repeat_interleave(groups, dim=-3) for t in (k, v))
        scores = q @ k.transpose(-1, -2) / self.head_channels**0.5
        if self.is_causal:
            later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
            scores = scores.masked_fill(later, -torch.inf)
        attention = hold((n, "attention"), scores.softmax(-1))
        return (attention @ v).transpose(-3, -2).flatten(-2) @ w["w_out"] + w["b_out"]

    def _norm(self, n: int, name: str, x: Tensor, hold: Hold) -> Tensor:
        w = self.weights[n]
        centred = x - x.mean(-1, keepdim=True) if self.norm_kind == "layer" else x
        inverse_std = (centred.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        return centred * hold((n, name), inverse_std) * w[f"scale_{name}"] + w[f"b_{name}"]

    def _ffn(self, n: int, x: Tensor, hold: Hold) -> Tensor:
        w = self.weights[n]
        up = x @ w["w_up"] + w["b_up"]
        gate = x @ w["w_gate"] + w["b_gate"] if self.is_gated else up
        gain = hold((n, "gain"), ACTIVATIONS[self.ffn_kind](gate) / gate)
        if not self.is_gated:
            return (gain * up) @ w["w_down"] + w["b_down"]
        through_up = gain * hold((n, "gate"), gate) * up
        through_gate = gain * hold((n, "up"), up) * gate
        hidden = {"freeze_gate": through_up, "freeze_up": through_gate, "half": (through_up + through_gate) / 2}
        return hidden[self.gate] @ w["w_down"] + w["b_down"]


def norm_part(model: PlainTransformer, factors: dict[Site, Tensor], n: int, name: str) -> eq.Affine:
    w, inverse_std = model.weights[n], factors[n, name].squeeze(-1)
    T = eq.norm_tensor(inverse_std, w[f"scale_{name}"], is_centred=model.norm_kind == "layer")
    return eq.Affine(T, eq.broadcast(w[f"b_{name}"], len(inverse_std)))


def attention_part(model: PlainTransformer, factors: dict[Site, Tensor], n: int) -> eq.Affine:
    heads, A, b_out = model.heads(n), factors[n, "attention"], model.weights[n]["b_out"]
    T = eq.attention_tensor(A, heads["w_value"], heads["w_out"])
    return eq.Affine(T, eq.attention_bias(A, heads["b_value"], heads["w_out"], b_out))


def ffn_part(model: PlainTransformer, factors: dict[Site, Tensor], n: int) -> eq.Affine:
    w, gain = model.weights[n], factors[n, "gain"]
    if not model.is_gated:
        T = eq.ffn_tensor(w["w_up"], gain, w["w_down"])
        return eq.Affine(T, eq.ffn_bias(w["b_up"], gain, w["w_down"], w["b_down"]))
    held = {"gain": gain, "gate": factors[n, "gate"], "up": factors[n, "up"], "convention": model.gate}
    T = eq.gated_ffn_tensor(w["w_gate"], w["w_up"], w["w_down"], **held)
    return eq.Affine(T, eq.gated_ffn_bias(w["b_gate"], w["b_up"], w["w_down"], w["b_down"], **held))


def parts(model: PlainTransformer, factors: dict[Site, Tensor], n: int) -> dict[str, eq.Affine]:
    """The sub-layers of block `n`, in the order in which it computes."""
    found = {name: norm_part(model, factors, n, name) for name in NORMS[model.layout]}
    found |= {"attention": attention_part(model, factors, n), "ffn": ffn_part(model, factors, n)}
    return {name: found[name] for name in ORDER[model.layout]}


def blocks(model: PlainTransformer, x: Tensor, bias: Callable[..., Tensor] | None = None) -> list[eq.Affine]:
    """Every block, and the final norm as one more; `bias` replaces the formula of the block's bias."""
    factors, found = model.factors(x), []
    block_tensor, block_bias = getattr(eq, f"{model.layout}_tensor"), bias or getattr(eq, f"{model.layout}_bias")
    for n in range(model.n_blocks):
        ordered = parts(model, factors, n).values()
        found.append(eq.Affine(block_tensor(*(part.tensor for part in ordered)), block_bias(*ordered)))
    return found + ([norm_part(model, factors, model.n_blocks, "final")] if model.has_final_norm else [])


def written_out(model: PlainTransformer, x: Tensor, bias: Callable[..., Tensor] | None = None) -> tuple[Tensor, Tensor]:
    """T of shape (L, D, L, D) and B of shape (L, D) at `x`, without autograd."""
    tensors, biases = zip(*blocks(model, x, bias), strict=True)
    T, B = eq.chain(tensors, biases)
    n = len(x)
    return T.reshape(n, -1, n, len(T) // n), eq.unvec(B, n)
