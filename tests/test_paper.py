"""The paper, equation by equation: each test is named after the number or the claim that it checks.

Three witnesses that share no code must agree: `equations.py` fed with weights and frozen
factors, the autograd Jacobian of the hand-patched `PlainTransformer`, and its replay on unit inputs.
Where the print is wrong, the test of the equation checks the corrected form and test_errata.py the print.
"""

from __future__ import annotations

import equations as eq
import pytest
import torch
from plain_transformer import NORMS, ORDER, PlainTransformer, blocks, ffn_part, gap, parts, randn, written_out
from pytest import approx
from torch import nn
from torch.nn import functional as F

EXACT = 1e-12
L, D = 5, PlainTransformer.n_channels
FFNS = ["gelu", "silu", *(f"{kind}-{gate}" for kind in ("swiglu", "geglu") for gate in eq.UP_SHARE)]

layouts = pytest.mark.parametrize("layout", NORMS)


# --- Equations 1-8: the model and the algebra -------------------------------------------------------------


@pytest.mark.parametrize("layout", ["post_ln", "pre_ln"])
def test_eq01_to_eq03_the_plain_transformer_is_the_one_of_torch(layout):
    model, x = PlainTransformer(layout, n_blocks=1), randn(L, D)
    w = model.weights[0]
    layer = nn.TransformerEncoderLayer(
        D, 4, 12, dropout=0, activation="gelu", batch_first=True, norm_first=layout == "pre_ln", dtype=x.dtype
    )
    qkv = ("query", "key", "value")
    state = {"self_attn.in_proj_weight": torch.cat([w[f"w_{name}"] for name in qkv], 1).T}
    state |= {"self_attn.in_proj_bias": torch.cat([w[f"b_{name}"] for name in qkv])}
    for ours, theirs in {"out": "self_attn.out_proj", "up": "linear1", "down": "linear2"}.items():
        state |= {f"{theirs}.weight": w[f"w_{ours}"].T, f"{theirs}.bias": w[f"b_{ours}"]}
    for i in (1, 2):
        state |= {f"norm{i}.weight": w[f"scale_norm_{i}"], f"norm{i}.bias": w[f"b_norm_{i}"]}
    layer.load_state_dict(state)
    expected, final = layer(x[None])[0], model.weights[1]
    if layout == "pre_ln":
        expected = F.layer_norm(expected, (D,), final["scale_final"], final["b_final"])
    assert gap(model(x), expected) < EXACT


def test_prerequisites_both_vec_conventions_are_one_operator():
    A, X, B = randn(L, L, seed=2), randn(L, D), randn(D, D, seed=3)
    rows, columns = eq.bilinear(A, B), eq.bilinear_columns(A, B)
    assert gap(rows @ eq.vec(X), eq.vec(A @ X @ B)) < EXACT
    assert gap(columns @ eq.vec_columns(X), eq.vec_columns(A @ X @ B)) < EXACT
    assert gap(eq.columns_to_rows(columns, L), rows) < EXACT
    # Mixed up, the shapes agree and the numbers do not.
    assert gap(columns @ eq.vec(X), eq.vec(A @ X @ B)) > 1
    assert gap(eq.right_product(B, L) @ eq.vec(X), eq.vec(X @ B)) < EXACT
    assert gap(eq.hadamard(A @ X) @ eq.vec(X), eq.vec((A @ X) * X)) < EXACT


def test_eq04_contraction():
    T, X = randn(L, D, L, D), randn(L, D, seed=2)
    by_definition = torch.stack([sum((T[i, :, j, :] @ X[j] for j in range(L)), torch.zeros(D)) for i in range(L)])
    assert gap(eq.contract(T, X), by_definition) < EXACT


def test_eq05_unfolding():
    T, X = randn(L, D, L, D), randn(L, D, seed=2)
    assert gap(eq.unfold(T) @ eq.vec(X), eq.vec(eq.contract(T, X))) < EXACT
    assert gap(eq.apply(eq.unfold(T), X), eq.contract(T, X)) < EXACT


@pytest.mark.parametrize(("is_causal", "n_kv_heads"), [(False, 4), (True, 4), (True, 2), (False, 1)])
def test_eq06_to_eq09_attention_tensor(is_causal, n_kv_heads):
    model, x = PlainTransformer(is_causal=is_causal, n_kv_heads=n_kv_heads), randn(L, D)
    w, factors = model.weights[0], model.factors(x)
    q, k, v = ((x @ w[f"w_{s}"] + w[f"b_{s}"]).unflatten(1, (-1, 2)).transpose(0, 1) for s in ("query", "key", "value"))
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)
    expected = mixed.transpose(0, 1).flatten(1) @ w["w_out"] + w["b_out"]
    A, B = parts(model, factors, 0)["attention"]
    assert gap(eq.apply(A, x) + eq.unvec(B, L), expected) < EXACT
    heads, by_head = model.heads(0), factors[0, "attention"]
    printed = [
        eq.bilinear_columns(A_h, v @ o) for A_h, v, o in zip(by_head, heads["w_value"], heads["w_out"], strict=True)
    ]
    assert gap(eq.columns_to_rows(torch.stack(printed).sum(0), L), A) < EXACT


# --- Equations 10-16: norm, feed-forward, residual ----------------------------------------------------------


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_eq10_and_eq11_norm_tensor(norm):
    model, x = PlainTransformer("pre_ln", norm=norm), randn(L, D)
    w = model.weights[0]
    layer = F.layer_norm(x, (D,), w["scale_norm_1"], w["b_norm_1"], model.eps)
    expected = layer if norm == "layer" else F.rms_norm(x, (D,), w["scale_norm_1"], model.eps)
    T, shift = parts(model, model.factors(x), 0)["norm_1"]
    assert gap(eq.apply(T, x) + eq.unvec(shift, L), expected) < EXACT
    one_at_every_channel = torch.ones_like(x)
    assert (eq.apply(T, one_at_every_channel).norm() < EXACT) == (norm == "layer")


@pytest.mark.parametrize("name", eq.ACTIVATION_GAINS)
def test_eq13_activation_gain_in_closed_form(name):
    phi = {
        "gelu": F.gelu,
        "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
        "silu": F.silu,
        "quick_gelu": lambda z: z * torch.sigmoid(1.702 * z),
        "relu": F.relu,
    }[name]
    gain, z = eq.ACTIVATION_GAINS[name], torch.linspace(-6, 6, 40, dtype=torch.float64)
    assert gap(gain(z), phi(z) / z) < EXACT
    assert gap(eq.activation_tensor(gain(z)[None]) @ z, phi(z)) < EXACT
    at_zero = torch.zeros(1, dtype=z.dtype, requires_grad=True)
    (slope,) = torch.autograd.grad(phi(at_zero), at_zero)
    assert float(gain(at_zero.detach())) == float(slope) == (0 if name == "relu" else 0.5)


@pytest.mark.parametrize("ffn", ["gelu", "silu"])
def test_eq12_to_eq14_ffn_tensor(ffn):
    model, x = PlainTransformer(ffn=ffn), randn(L, D)
    w, phi = model.weights[0], {"gelu": F.gelu, "silu": F.silu}[ffn]
    z = x @ w["w_up"] + w["b_up"]
    gain = eq.ACTIVATION_GAINS[ffn](z)
    M, B = eq.ffn_tensor(w["w_up"], gain, w["w_down"]), eq.ffn_bias(w["b_up"], gain, w["w_down"], w["b_down"])
    assert gap(eq.apply(M, x) + eq.unvec(B, L), phi(z) @ w["w_down"] + w["b_down"]) < EXACT
    no_input = eq.ACTIVATION_GAINS[ffn](torch.zeros_like(z))
    assert eq.ffn_tensor(w["w_up"], no_input, w["w_down"]).isfinite().all()


@pytest.mark.parametrize("gate", eq.UP_SHARE)
def test_gated_ffn_is_counted_once(gate):
    model, x, factors = PlainTransformer(ffn="swiglu", gate=gate), randn(L, D), {}
    w, found = model.weights[0], model._ffn(0, x, lambda site, value: factors.setdefault(site, value))
    expected = (F.silu(x @ w["w_gate"] + w["b_gate"]) * (x @ w["w_up"] + w["b_up"])) @ w["w_down"] + w["b_down"]
    M, B = ffn_part(model, factors, 0)
    assert gap(found, expected) < EXACT
    assert gap(eq.apply(M, x) + eq.unvec(B, L), expected) < EXACT


def test_gated_ffn_with_both_branches_live_counts_twice():
    x, models = randn(L, D), {gate: PlainTransformer(ffn="swiglu", gate=gate, has_biases=False) for gate in eq.UP_SHARE}
    factors: dict = {}
    found = models["half"]._ffn(0, x, lambda site, value: factors.setdefault(site, value))
    tensors = {gate: ffn_part(model, factors, 0).tensor for gate, model in models.items()}
    both = tensors["freeze_gate"] + tensors["freeze_up"]
    assert gap(eq.apply(both, x), 2 * found) < EXACT
    assert gap(tensors["half"], both / 2) < EXACT
    assert gap(tensors["freeze_up"], tensors["freeze_gate"]) > 0.5


def test_eq15_and_eq16_residual():
    G, X = randn(L * D, L * D), randn(L, D)
    assert gap(eq.apply(eq.residual(G), X), X + eq.apply(G, X)) < EXACT


# --- Equations 17-20, 27, 28: the whole, by three witnesses ----------------------------------------------------


@layouts
@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("ffn", FFNS)
@pytest.mark.parametrize("is_causal", [False, True])
def test_eq17_eq19_eq27_eq28_three_witnesses(layout, norm, ffn, is_causal):
    kind, _, gate = ffn.partition("-")
    model = PlainTransformer(
        layout, norm=norm, ffn=kind, gate=gate or "freeze_gate", is_causal=is_causal, n_kv_heads=2 if is_causal else 4
    )
    x = randn(L, D)
    factors = model.factors(x)
    T, B = written_out(model, x)
    by_autograd = eq.jacobian_tensor(model.patched, x)
    by_units = eq.unit_input_tensor(lambda u: model.replay(u, factors), eq.unit_inputs(L, D, x.dtype))
    assert gap(eq.unfold(T), by_autograd) < EXACT
    assert gap(eq.unfold(T), by_units) < EXACT
    # Eq. 20, and F̃ is affine everywhere, not only where it was recorded.
    assert gap(eq.contract(T, x) + B, model(x)) < EXACT
    elsewhere = 10 * randn(L, D, seed=9)
    assert gap(eq.contract(T, elsewhere) + B, model.replay(elsewhere, factors)) < EXACT
    assert (eq.norm_frobenius(T).triu(1).max() == 0) == is_causal


@layouts
def test_bias_by_the_law_of_joint_homogeneity(layout):
    model, x = PlainTransformer(layout), randn(L, D)
    biases = {(n, name): b for n, w in enumerate(model.weights) for name, b in w.items() if name.startswith("b_")}
    leaves = {key: b.requires_grad_() for key, b in biases.items()}
    u = randn(L, D, seed=5)
    slopes = torch.autograd.grad((u * model.patched(x)).sum(), list(leaves.values()), allow_unused=True)
    found = {
        key: float((b.detach() * s).sum()) for (key, b), s in zip(leaves.items(), slopes, strict=True) if s is not None
    }
    with torch.no_grad():
        _, B = written_out(model, x)
    assert sum(found.values()) == approx(float((u * B).sum()), rel=1e-10)
    # Query and key biases act through A alone.
    assert not {name for _, name in found} & {"b_query", "b_key"}


@layouts
def test_eq18_and_eq19_the_last_block_stands_leftmost(layout):
    model, x = PlainTransformer(layout, n_blocks=3, has_biases=False), randn(L, D)
    tensors = [T for T, _ in blocks(model, x)]
    in_order, zero = torch.linalg.multi_dot(tensors[::-1]), [torch.zeros(L * D, dtype=x.dtype)] * len(tensors)
    assert gap(eq.chain(tensors, zero).tensor, in_order) < EXACT
    assert gap(eq.apply(in_order, x), model(x)) < EXACT
    assert gap(eq.apply(torch.linalg.multi_dot(tensors), x), model(x)) > 0.1


@layouts
def test_eq19_blocks_and_ranges_of_blocks_compose(layout):
    model, x = PlainTransformer(layout, n_blocks=3), randn(L, D)
    tensors, biases = zip(*blocks(model, x), strict=True)
    first, second = eq.chain(tensors[:1], biases[:1]), eq.chain(tensors[1:], biases[1:])
    T, B = eq.chain(tensors, biases)
    assert gap(second.tensor @ first.tensor, T) < EXACT
    assert gap(second.tensor @ first.bias + second.bias, B) < EXACT


def test_claim_attention_tensor_is_the_sum_of_its_heads():
    model, x = PlainTransformer(), randn(L, D)
    heads, A = model.heads(0), model.factors(x)[0, "attention"]
    each = [eq.attention_tensor(A[[h]], heads["w_value"][[h]], heads["w_out"][[h]]) for h in range(4)]
    assert gap(torch.stack(each).sum(0), eq.attention_tensor(A, heads["w_value"], heads["w_out"])) < EXACT


# --- Equations 21-26: collapses and the mean ---------------------------------------------------------------


def test_eq21_norm_collapses():
    T = randn(L, D, L, D)
    frobenius = [[T[i, :, j].flatten().norm() for j in range(L)] for i in range(L)]
    spectral = [[torch.linalg.svdvals(T[i, :, j])[0] for j in range(L)] for i in range(L)]
    assert gap(eq.norm_frobenius(T), torch.tensor(frobenius, dtype=T.dtype)) < EXACT
    assert gap(eq.norm_spectral(T), torch.tensor(spectral, dtype=T.dtype)) < EXACT
    assert (eq.norm_spectral(T) <= eq.matrix_norm(eq.unfold(T))).all()


@layouts
def test_eq22_and_eq23_in_out(layout):
    model, x = PlainTransformer(layout), randn(L, D)
    (T, B), y = written_out(model, x), model(x)
    scores = eq.in_out(T, x, y)
    assert float(scores[1, 2]) == approx(float(y[1] @ T[1, :, 2] @ x[2]), rel=EXACT)
    assert gap(scores.sum(1), eq.in_out_sum(y, B)) < 1e-10


@layouts
def test_eq24_in_class_sums_to_the_logit_without_biases(layout):
    model, x, head = PlainTransformer(layout), randn(L, D), randn(D, 7, seed=4)
    (T, B), logits = written_out(model, x), model(x) @ head
    scores = eq.in_class(T, x, head[:, 3])
    assert float(scores[1, 2]) == approx(float(head[:, 3] @ T[1, :, 2] @ x[2]), rel=EXACT)
    assert gap(scores.sum(1), logits[:, 3] - B @ head[:, 3]) < 1e-10


def test_contribution():
    T, X = randn(L, D, L, D), randn(L, D, seed=2)
    assert float(eq.contribution(T, X)[1, 2]) == approx(float((T[1, :, 2] @ X[2]).norm()), rel=EXACT)


def test_eq26_mean_tensor():
    model, inputs, test = PlainTransformer(), [randn(L, D, seed=s) for s in range(3)], randn(L, D, seed=8)
    tensors, biases = zip(*(written_out(model, x) for x in inputs), strict=True)
    found = eq.contract(eq.mean_tensor(tensors), test) + eq.mean_tensor(biases)
    each = [model.replay(test, model.factors(x)) for x in inputs]
    assert gap(found, (each[0] + each[1] + each[2]) / 3) < EXACT


def test_eq28_unit_inputs_as_printed_need_a_model_without_biases():
    x, units = randn(L, D), eq.unit_inputs(L, D, torch.float64)
    assert units[2 * D + 3].nonzero().tolist() == [[2, 3]]
    for has_biases in (False, True):
        model = PlainTransformer(has_biases=has_biases)
        printed = model.replay(units, model.factors(x)).flatten(1).T
        error = gap(printed, eq.unfold(written_out(model, x)[0]))
        assert error > 1 if has_biases else error < EXACT


# --- Equations 25 and 29-34: the bound --------------------------------------------------------------------------


@layouts
@pytest.mark.parametrize("size", [1e-3, 0.1, 1.0, 10.0])
def test_eq25_eq29_eq30_proposition(layout, size):
    model, x, delta = PlainTransformer(layout), randn(L, D), size * randn(L, D, seed=6)
    (T, B), moved = written_out(model, x), model(x + delta)
    error = eq.contract(T, x + delta) + B - moved
    # The second line of the proof, with its sign put right.
    assert gap(eq.contract(T, delta) + model(x) - moved, error) < 1e-10
    assert error.norm() <= eq.proposition_bound(eq.unfold(T), delta, model(x), moved)


@pytest.mark.parametrize("is_causal", [False, True])
def test_eq31_attention_bound(is_causal):
    model, x = PlainTransformer(is_causal=is_causal), 4 * randn(L, D)
    heads, A = model.heads(0), model.factors(x)[0, "attention"]
    by_column_and_row = (A.sum(1).amax(-1) * A.sum(2).amax(-1)).sqrt()
    middle = (eq.matrix_norm(heads["w_value"] @ heads["w_out"]) * by_column_and_row).sum()
    found = eq.matrix_norm(parts(model, model.factors(x), 0)["attention"].tensor)
    assert found <= middle <= eq.attention_bound(heads["w_value"], heads["w_out"], L)


def test_eq31_attention_bound_is_reached_when_all_look_at_one_token():
    A, w_value, w_out = torch.zeros(1, L, L, dtype=torch.float64), randn(1, D, 2), randn(1, 2, D, seed=2)
    A[:, :, 0] = 1
    found = eq.matrix_norm(eq.attention_tensor(A, w_value, w_out))
    assert float(found) == approx(eq.attention_bound(w_value, w_out, L), rel=EXACT)


@pytest.mark.parametrize("ffn", ["gelu", "silu"])
def test_eq32_ffn_bound(ffn):
    model = PlainTransformer(ffn=ffn)
    w = model.weights[0]
    bound = eq.ffn_bound(w["w_up"], w["w_down"])
    for size in (0.1, 1, 10):
        M = parts(model, model.factors(size * randn(L, D)), 0)["ffn"].tensor
        assert eq.matrix_norm(M) <= bound
    all_open = eq.ffn_tensor(torch.eye(D, dtype=torch.float64), torch.ones(L, D, dtype=torch.float64), w["w_down"][:D])
    assert float(eq.matrix_norm(all_open)) == approx(float(eq.matrix_norm(w["w_down"][:D])), rel=EXACT)


def test_eq33_norm_bound_is_reached_without_centring():
    scale, variance, eps = torch.tensor([1.0, -3.0]).double(), torch.tensor([8.0, 4.0]).double(), 5.0
    found = eq.matrix_norm(eq.norm_tensor((variance + eps).rsqrt(), scale, is_centred=False))
    assert float(found) == approx(eq.norm_bound(scale, 4.0, eps), rel=EXACT)
    assert eq.norm_bound_as_printed(scale, 4.0) == 3 / 4


def part_bounds(model: PlainTransformer, factors: dict, n: int) -> list[float]:
    """Bounds of the parts of block `n`, in the order of computation."""
    w, heads = model.weights[n], model.heads(n)
    found = {"attention": eq.attention_bound(heads["w_value"], heads["w_out"], L)}
    if model.is_gated:
        found["ffn"] = eq.gated_ffn_bound(w["w_up"], factors[n, "gain"] * factors[n, "gate"], w["w_down"])
    else:
        found["ffn"] = eq.ffn_bound(w["w_up"], w["w_down"])
    for name in NORMS[model.layout]:
        min_variance = float(factors[n, name].pow(-2).min()) - model.eps
        found[name] = eq.norm_bound(w[f"scale_{name}"], min_variance, model.eps)
    return [found[name] for name in ORDER[model.layout]]


@layouts
@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("ffn", ["gelu", "swiglu"])
def test_eq33_and_eq34_bound_of_the_whole_model(layout, norm, ffn):
    model, x = PlainTransformer(layout, norm=norm, ffn=ffn), randn(L, D)
    factors, N = model.factors(x), model.n_blocks
    block_bound = getattr(eq, f"{layout}_bound")
    by_block = [block_bound(*part_bounds(model, factors, n)) for n in range(N)]
    for found, bound in zip(blocks(model, x), by_block, strict=False):
        assert eq.matrix_norm(found.tensor) <= bound
    final = 1.0
    if model.has_final_norm:
        final = float(model.weights[N]["scale_final"].abs().max() * factors[N, "final"].max())
    assert eq.matrix_norm(eq.unfold(written_out(model, x)[0])) <= eq.model_bound(by_block, final)


@layouts
def test_eq34_block_bound_is_reached_by_positive_numbers(layout):
    sizes = torch.arange(2.0, 2 + len(ORDER[layout])).tolist()
    T = getattr(eq, f"{layout}_tensor")(*(torch.tensor([[size]]) for size in sizes))
    assert float(T) == approx(getattr(eq, f"{layout}_bound")(*sizes))
    assert eq.model_bound([2.0, 3.0], final_norm=5.0) == 30
