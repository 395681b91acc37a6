"""Adapters, roles in recurrences, two streams, and images beside text."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import transformers as hf
import zoo
from bench.families.tiny_models import build, randomise
from torch import Tensor, nn

import tensorlens as tl
from tensorlens.recording.rules.modules import ADAPTERS


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def lens_on(task: str, model_type: str, dtype: torch.dtype = torch.float64) -> tuple[tl.Lens, dict[str, Any]]:
    tiny = build(task, model_type, "eager", dtype)
    return tl.Lens(tiny.model), tiny.arguments


# One's own -----------------------------------------------------------------------------------------------------------


class Cubic(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        return z**3

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]  # wrong on purpose: nobody may ask for it


class CubicActivation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.function = Cubic.apply  # held on the instance, out of sight

    def forward(self, z: Tensor) -> Tensor:
        return self.function(z)


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), CubicActivation()) for _ in range(2))

    def forward(self, inputs_embeds: Tensor) -> Tensor:
        for block in self.blocks:
            inputs_embeds = inputs_embeds + block(inputs_embeds)
        return inputs_embeds


def test_an_adapter_from_outside(monkeypatch: pytest.MonkeyPatch):
    model, x = randomise(Tower()).double(), torch.randn(4, 6, dtype=torch.float64)
    by_kernels = tl.Lens(model)(x).certificate()
    assert by_kernels.passed and not any("cubic" in rule for rule in by_kernels.rules)
    monkeypatch.setattr("tensorlens.recording.rules.modules.ADAPTERS", dict(ADAPTERS))

    @tl.adapter(f"{CubicActivation.__module__}.CubicActivation")
    def cubic(run: Any, module: Any, forward: Any, z: Tensor) -> Tensor:
        return tl.activate(run, "cubic", z, lambda z: z**2)

    certificate = tl.Lens(model)(x).certificate()
    assert certificate.passed and len(certificate.rules["activation gain: cubic"]) == 2


class Clipped(hf.activations.NewGELUActivation):
    def forward(self, z: Tensor) -> Tensor:
        return super().forward(z).clamp(max=0.1)


def replaced(activation: nn.Module) -> nn.Module:
    own = activation.forward
    activation.forward = lambda z: own(z).clamp(max=0.1)  # type: ignore[method-assign]
    return activation


@pytest.mark.parametrize("make", [Clipped, lambda: replaced(hf.activations.NewGELUActivation())])
def test_an_adapter_is_for_the_forward_of_its_own_class_alone(make: Any):
    model: Any = zoo.build("gpt2")
    for block in model.transformer.h:
        block.mlp.act = make()
    T = tl.Lens(model)(zoo.sample("gpt2"))
    with torch.no_grad():
        expected = model(torch.tensor([zoo.sample("gpt2")]), output_hidden_states=True).hidden_states[-1][0]
    torch.testing.assert_close(T.output, expected)
    assert T.certificate().passed


# Experts --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", ["batched_mm", "grouped_mm"])
@pytest.mark.parametrize("model_type", ["mixtral", "gpt_oss"])
def test_experts_implementations_give_one_operator(model_type: str, implementation: str):
    tiny = build("causal", model_type, "eager", torch.float32)
    expected = tl.Lens(tiny.model)(tiny.arguments)
    u = torch.randn(expected.shape[:2])
    wanted = expected.adjoint(u)
    tiny.model.set_experts_implementation(implementation)
    found = tl.Lens(tiny.model)(tiny.arguments)
    assert found.certificate().passed
    assert (found.adjoint(u) - wanted).norm() <= 1e-4 * wanted.norm()


# Recurrences: freeze what gates, stay linear in what is carried ------------------------------------------------------


@pytest.mark.parametrize(
    ("model_type", "kernel"),
    [
        ("mamba", "selective_scan"),
        ("mamba2", "chunk_scan"),
        ("qwen3_next", "gated_delta_rule"),
        ("kimi_linear", "kimi_delta"),
    ],
)
def test_roles_in_recurrences(model_type: str, kernel: str):
    lens, arguments = lens_on("causal", model_type)
    certificate = lens(arguments).certificate()
    assert certificate.passed and not certificate.conventions
    assert any(rule.startswith("recurrence") and kernel in rule for rule in certificate.rules)


def test_a_recurrence_is_causal():
    lens, arguments = lens_on("causal", "mamba")
    dense = lens(arguments).dense()
    above = torch.ones(7, 7).triu(1).bool()
    assert dense.permute(0, 2, 1, 3)[above].abs().max() == 0
    assert dense.permute(0, 2, 1, 3)[~above].abs().max() > 0


# Two streams ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", ["t5", "bart", "marian", "pegasus_x"])
def test_encoder_and_decoder_are_one_operator(model_type: str):
    lens, arguments = lens_on("seq2seq", model_type)
    T = lens(arguments)
    n_encoder, n_decoder = arguments["input_ids"].shape[1], arguments["decoder_input_ids"].shape[1]
    assert T.shape[0] == n_decoder and T.shape[2] >= n_encoder + n_decoder
    assert len(T.tokens) == T.shape[2] and T.out_tokens == T.tokens[-n_decoder:]
    assert T.certificate().passed
    scores = T.map("tensor.norm", probes=2).scores  # some types fill their input up to hundreds of tokens
    assert (scores[:, :n_encoder].sum(0) > 0).all(), "the decoder reads the encoder"
    assert scores[:, -n_decoder:].triu(1).abs().max() == 0, "the decoder is causal"


def test_ranges_of_blocks_compose_across_the_two_streams():
    lens, arguments = lens_on("seq2seq", "bart")
    T = lens(arguments)
    x = torch.randn(*T.shape[2:], dtype=T.dtype)
    for cut in range(1, T.n_blocks):
        in_two = T.blocks(cut, T.n_blocks).apply(T.blocks(0, cut).apply(x))
        assert (in_two - T.apply(x)).norm() <= 1e-10 * T.apply(x).norm(), cut


def test_streams_of_unequal_width_are_refused():
    encoder = hf.BertConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, vocab_size=40
    )
    decoder = hf.BertConfig(
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        vocab_size=40,
        is_decoder=True,
        add_cross_attention=True,
    )
    model = hf.EncoderDecoderModel(hf.EncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)).eval()
    ids = torch.tensor([[3, 4, 5]])
    with pytest.raises(tl.AnatomyError, match="16 channels"):
        tl.Lens(model)({"input_ids": ids, "decoder_input_ids": ids})


# Side channels -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("model_type", "block"), [("zamba2", 1), ("gemma3n_text", 1), ("hrm_text", 3)])
def test_side_channels_are_part_of_T_and_their_ranges_are_refused(model_type: str, block: int):
    lens, arguments = lens_on("causal", model_type)
    T = lens(arguments)
    assert T.certificate().passed
    with pytest.raises(tl.AnatomyError, match="begin at block 0"):
        T.blocks(block, T.n_blocks).apply(T.operator.recording.states[block][0])


# Images beside text --------------------------------------------------------------------------------------------------

_TEXT = dict(
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    intermediate_size=24,
    vocab_size=60,
    max_position_embeddings=64,
)


def _llava() -> tuple[nn.Module, dict[str, Tensor]]:
    vision = hf.CLIPVisionConfig(
        hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=24, image_size=8, patch_size=4
    )
    config = hf.LlavaConfig(
        vision_config=vision,
        text_config=hf.LlamaConfig(**_TEXT),
        image_token_index=50,
        vision_feature_layer=-1,
    )
    ids = torch.tensor([[5, 50, 50, 50, 50, 7, 9]])
    return hf.LlavaForConditionalGeneration(config), {"input_ids": ids, "pixel_values": torch.randn(1, 3, 8, 8)}


def _qwen2_vl() -> tuple[nn.Module, dict[str, Tensor]]:
    vision = dict(depth=2, embed_dim=16, hidden_size=16, num_heads=2, mlp_ratio=2, patch_size=4, spatial_merge_size=2)
    text = dict(_TEXT, rope_parameters={"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4})
    config = hf.Qwen2VLConfig(
        vision_config=vision, text_config=text, image_token_id=50, vision_start_token_id=51, vision_end_token_id=52
    )
    ids = torch.tensor([[5, 51, 50, 50, 50, 50, 52, 7]])
    pixels = {
        "pixel_values": torch.randn(16, 3 * 2 * 16),
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
        "mm_token_type_ids": (ids == 50).long(),
    }
    return hf.Qwen2VLForConditionalGeneration(config), {"input_ids": ids} | pixels


@pytest.mark.parametrize("make", [_llava, _qwen2_vl])
def test_image_patches_and_text_are_in_one_map(make: Any):
    torch.manual_seed(0)
    model, arguments = make()
    T = tl.Lens(randomise(model).eval())(arguments)
    n_tokens = arguments["input_ids"].shape[1]
    assert T.shape == (n_tokens, 16, n_tokens, 16) and T.certificate().passed
    patches = [i for i, label in enumerate(T.tokens) if label.startswith("patch")]
    assert patches == (arguments["input_ids"][0] == 50).nonzero()[:, 0].tolist()
    assert T.tokens[patches[3]] == "patch 1,1"
    scores = T.map("tensor.norm", out_token=-1).scores[0]
    assert (scores > 0).all()
