"""The parts of models written by hand, found by what ran: blocks, the end of the body, the head, axes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from bench.families import tiny_models
from torch import nn
from torch.nn import functional as F
from zoo import build, sample

import tensorlens as tl
from tensorlens.errors import AnatomyError, InputError
from tensorlens.models.anatomy import Anatomies, Anatomy, find_anatomy, kind_of_input, observe
from tensorlens.models.evidence import watch
from tensorlens.models.inputs import make_input
from tensorlens.models.layouts import axis_layout, state_of

D, L, V = 8, 5, 11


class Block(nn.Module):
    def __init__(self, width: int = D, wider: int | None = None) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )
        self.widen = nn.Linear(width, wider) if wider else nn.Identity()

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v))
        return self.widen(x + self.mlp(x))


class Gpt(nn.Module):
    """As nanoGPT: the first argument is `idx`, logits of the last token alone, and a loss that is not there."""

    def __init__(self) -> None:
        super().__init__()
        parts = {"wte": nn.Embedding(V, D), "wpe": nn.Embedding(9, D), "ln_f": nn.LayerNorm(D)}
        self.transformer = nn.ModuleDict(parts | {"h": nn.ModuleList(Block() for _ in range(3))})
        self.lm_head = nn.Linear(D, V, bias=False)

    def forward(self, idx, targets=None):
        x = self.transformer["wte"](idx) + self.transformer["wpe"](torch.arange(idx.shape[1]))
        for block in self.transformer["h"]:  # type: ignore[union-attr]
            x = block(x)
        return self.lm_head(self.transformer["ln_f"](x)[:, [-1], :]), None


class Named(nn.Module):
    """A language model around another that returns its loss first."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Gpt()

    def forward(self, tokens):
        logits, _ = self.inner(tokens)
        return {"loss": logits.sum(), "logits": logits}


class Classifier(nn.Module):
    """Blocks in a Sequential, more weights in a ModuleList of heads, code between blocks and behind the logits."""

    def __init__(self, end=None, n_heads: int = 4) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(3)))
        self.last = Block()
        self.norm = nn.LayerNorm(D)
        self.heads = nn.ModuleList(nn.Sequential(nn.Linear(D, 90), nn.GELU(), nn.Linear(90, 5)) for _ in range(n_heads))
        self.fc, self.end = nn.Linear(5, 3), end

    def forward(self, x):
        x = self.norm(self.last(0.5 * self.blocks(x))).mean(1)
        logits = self.fc(sum(head(x) for head in self.heads))
        return logits if self.end is None else self.end(logits)


class Conv(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise, self.norm = nn.Conv2d(width, width, 3, padding=1, groups=width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        y = self.down(F.gelu(self.up(self.norm(self.depthwise(x).permute(0, 2, 3, 1)))))
        return x + y.permute(0, 3, 1, 2)


class Stages(nn.Module):
    """As ConvNeXt: stages of channels-first blocks, fewer and wider tokens from stage to stage."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 1)
        self.stages = nn.Sequential(
            nn.Sequential(Conv(4), Conv(4)), nn.Sequential(nn.Conv2d(4, 6, 2, 2), Conv(6), Conv(6), Conv(6))
        )
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.stages(self.stem(x)).mean((2, 3)))


class ClassAttention(nn.Module):
    """As CaiT: after the blocks, layers that read the tokens and a class token beside them."""

    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.kv, self.mlp = nn.Linear(D, D), nn.Linear(D, 2 * D), nn.Linear(D, D)

        def forward(self, x, cls):
            k, v = self.kv(torch.cat([cls, x], 1)).chunk(2, -1)
            return cls + self.mlp(F.scaled_dot_product_attention(self.q(cls), k, v))

    def __init__(self) -> None:
        super().__init__()
        self.cls = nn.Parameter(torch.randn(1, 1, D))
        self.blocks = nn.Sequential(*(Block() for _ in range(3)))
        self.readers = nn.ModuleList(self.Reader() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, 3)

    def forward(self, x):
        x, cls = self.blocks(x), self.cls
        for reader in self.readers:
            cls = reader(x, cls)
        return self.head(self.norm(torch.cat([cls, x], 1))[:, 0])


class TwoStates(nn.Module):
    """As CrossViT: two states side by side in a list."""

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Sequential(Block(), Block()), nn.Sequential(Block(), Block())

        def forward(self, states):
            a, b = self.a(states[0]), self.b(states[1])
            return [a + b.mean(1, keepdim=True), b + a.mean(1, keepdim=True)]

    def __init__(self) -> None:
        super().__init__()
        self.pairs = nn.ModuleList(self.Pair() for _ in range(2))

    def forward(self, x):
        states = [x, x[:, :3]]
        for pair in self.pairs:
            states = pair(states)
        return states[0].mean(1) + states[1].mean(1)


class Mixer(nn.Module):
    """As MLP-Mixer: two feed-forwards of one kind in a block, with a residual around each."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.LayerNorm(D), nn.LayerNorm(D)
            self.tokens, self.channels = (nn.Sequential(nn.Linear(n, 9), nn.GELU(), nn.Linear(9, n)) for n in (L, D))

        def forward(self, x):
            x = x + self.tokens(self.a(x).transpose(1, 2)).transpose(1, 2)
            return x + self.channels(self.b(x))

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(self.Block() for _ in range(3)))

    def forward(self, x):
        return self.blocks(x)


class Inner(nn.Module):
    """As Transformer in Transformer: every block takes and gives two states, both of the same picture."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = Block(), Block()

        def forward(self, a, b):
            a = self.a(a)
            return a, self.b(b + a)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Block() for _ in range(3))

    def forward(self, x):
        a, b = x * 2, x * 3
        for block in self.blocks:
            a, b = block(a, b)
        return b


class Twice(nn.Module):
    """One block that runs three times, by another name than any list."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x):
        return self.block(self.block(self.block(x)))


class Direct(nn.Module):
    """Blocks entered by their `forward`, past every hook."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block.forward(x)
        return x


def at(model: nn.Module, **arguments) -> Anatomy:
    torch.manual_seed(0)
    return observe(model, arguments)[0]


STATE = torch.randn(1, L, D)
IDS = torch.arange(L)[None]


def test_a_language_model_by_hand():
    model = Gpt()
    found = at(model, idx=IDS)
    assert (found.stack, found.blocks) == ("transformer.h", tuple(model.transformer["h"]))  # type: ignore[arg-type]
    assert found.body_end == "transformer.ln_f"
    assert found.embedding is model.transformer["wte"]
    assert found.unembedding is model.lm_head
    assert found.has_head
    assert found.readout is None


def test_logits_behind_a_loss():
    found = at(Named(), tokens=IDS)
    assert (found.stack, found.body_end) == ("inner.transformer.h", "inner.transformer.ln_f")
    assert found.unembedding is not None
    logits = torch.randn(1, 2, 3)
    for output in (
        (torch.tensor(1.0), logits),
        (logits, None),
        {"loss": logits.sum(), "logits": logits},
        [None, logits],
    ):
        assert state_of(output) is logits
    with pytest.raises(AnatomyError, match="returns a state or logits; got NoneType"):
        state_of(None)


ENDS = {
    "softmax": lambda x: x.softmax(-1),
    "sigmoid": torch.sigmoid,
    "log_softmax": lambda x: F.log_softmax(x, -1)[:, :2],
}


@pytest.mark.parametrize("name", [None, *ENDS])
def test_blocks_in_a_sequential_and_larger_heads_in_a_list(name):
    model = Classifier(ENDS.get(name))
    found = at(model, x=STATE)
    assert found.blocks == (*model.blocks, model.last)
    assert found.stack == "blocks, last"
    assert find_anatomy(model, watch(model, {"x": STATE}), blocks=found.stack).blocks == found.blocks
    assert (found.body_end, found.unembedding, found.readout) == ("norm", None, "fc" if name else None)


def test_stages_are_one_chain_and_their_channels_are_those_of_the_weights():
    model = Stages()
    found = at(model, x=torch.randn(1, 3, 8, 8))
    assert [type(block) for block in found.blocks] == [Conv] * 5
    assert found.channels == (1,) * 6
    assert axis_layout((1, 6, 4, 4), found.channels[-1]).to_tokens(torch.randn(1, 6, 4, 4)).shape == (
        1,
        16,
        6,
    )
    # Three rows, three columns and three channels: no size tells them apart, the weights do.
    square = nn.Sequential(Conv(3), Conv(3))
    assert at(square, input=torch.randn(1, 3, 3, 3)).channels == (1, 1, 1)


def test_class_attention_takes_two_tensors_and_is_no_part_of_the_chain():
    found = at(ClassAttention(), x=STATE)
    assert (found.stack, len(found.blocks)) == ("blocks", 3)
    assert found.body_end == "norm"


def test_several_states_at_once_are_refused():
    with pytest.raises(AnatomyError, match=r"`pairs.1` takes two states .* of shapes \(1, 5, 8\) and \(1, 3, 8\)"):
        at(TwoStates(), x=STATE)


def test_two_states_through_every_block_are_refused():
    with pytest.raises(AnatomyError, match="`blocks.1` takes two states"):
        at(Inner(), x=STATE)


def test_a_block_is_no_stage():
    model = Mixer()
    found = at(model, x=STATE)
    assert found.blocks == tuple(model.blocks)
    assert found.channels == (2,) * 4


def test_one_block_that_runs_often_and_blocks_that_no_hook_sees():
    assert at(Twice(), x=STATE).channels == (2,) * 4
    direct = Direct()
    assert at(direct, x=STATE).blocks == tuple(direct.blocks)


def test_widths_may_change_within_the_chain():
    model = nn.Sequential(Block(D, 12), Block(12, 6), Block(6))
    assert at(model, input=STATE).blocks == tuple(model)


ENCODER = {"d_model": D, "nhead": 2, "dim_feedforward": 16}


@pytest.mark.parametrize(("state", "channel"), [(STATE, 2), (STATE.transpose(0, 1), 2), (STATE[0], 1)])
def test_torch_encoder_with_a_mask(state, channel):
    layer = nn.TransformerEncoderLayer(**ENCODER, batch_first=state.shape[0] == 1)
    model = nn.TransformerEncoder(layer, 2, nn.LayerNorm(D), enable_nested_tensor=False)
    mask = torch.zeros(L, dtype=torch.bool) if state.dim() == 2 else torch.zeros(1, L, dtype=torch.bool)
    found = at(model, src=state, src_key_padding_mask=mask)
    assert (found.stack, found.body_end, found.has_head) == ("layers", "norm", False)
    assert found.channels == (channel,) * 3
    layout = axis_layout(state.shape, found.channels[0])
    torch.testing.assert_close(layout.to_tokens(state), STATE)
    torch.testing.assert_close(layout.to_native(STATE), state)


def test_torch_decoder_and_both():
    decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(**ENCODER, batch_first=True), 2)
    assert at(decoder, tgt=STATE, memory=torch.randn(1, 4, D)).blocks == tuple(decoder.layers)
    both = nn.Transformer(D, 2, 2, 2, 16, batch_first=True)
    found = at(both, src=torch.randn(1, 4, D), tgt=STATE)
    assert (found.stack, found.encoder) == ("decoder.layers", "encoder")
    assert found.encoder_blocks == tuple(both.encoder.layers)
    assert found.blocks == (*both.encoder.layers, *both.decoder.layers)


@pytest.mark.parametrize("name", ["gpt2", "bert", "vit", "llama"])
def test_known_types_are_what_their_tree_says(name):
    model = build(name)
    by_tree = find_anatomy(model)
    arguments = make_input(sample(name), model).arguments
    found = find_anatomy(model, watch(model, arguments))
    assert (found.stack, found.blocks, found.unembedding) == (by_tree.stack, by_tree.blocks, by_tree.unembedding)


def test_a_pass_is_watched_once_for_a_structure_and_a_kind_of_input():
    model, passes = Gpt(), []
    model.register_forward_hook(lambda *_: passes.append(1))
    anatomies = Anatomies(model)
    first = anatomies.at({"idx": IDS})
    assert anatomies.at({"idx": IDS[:, :3]}) is first
    assert len(passes) == 1
    model.transformer["h"].append(Block())  # type: ignore[union-attr]
    assert len(anatomies.at({"idx": IDS}).blocks) == 4
    assert kind_of_input({"x": STATE}) != kind_of_input({"x": STATE.transpose(0, 1)})


def test_watching_leaves_a_model_as_it_was():
    model = Classifier().train()
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    with torch.inference_mode():
        watch(model, {"x": STATE.clone()})
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == before
    assert not nn.modules.module._global_forward_hooks
    with pytest.raises(InputError, match=r"itself cannot run .*normalized_shape.*`x` \(float32 of shape"):
        watch(model, {"x": torch.randn(1, L, 3)})
    assert not nn.modules.module._global_forward_pre_hooks


def test_a_compiled_part_is_seen_as_its_own_code():
    model = nn.Sequential(Block(), torch.compile(Block(), backend="eager"), Block())  # type: ignore[arg-type]
    found = at(model, input=STATE)
    assert len(found.blocks) == 3


class Beside(nn.Module):
    """Hands one state on as it is and works on another."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> Any:
        return x + self.down(self.up(x).relu()) if y is None else (x, self.forward(y))


class TwoStages(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(29, 8)
        self.first, self.second, self.both = (nn.ModuleList([Beside(), Beside()]) for _ in range(3))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for block in self.first:
            x = block(x)
        y = 2 * x[:, ::2]
        for block in self.second:
            y = block(y)
        for block in self.both:
            x, y = block(x, y)
        return y


def test_a_state_that_the_last_blocks_only_hand_on_is_not_taken_for_the_end():
    model = TwoStages().eval()
    with pytest.raises(AnatomyError, match="passes on the state"):
        tl.Lens(model)([3, 5, 7, 2])
    assert tl.Lens(model, blocks="first, second")([3, 5, 7, 2]).certificate().passed


@pytest.mark.parametrize("kind", ["vision/clip", "vision/siglip", "audio/whisper", "audio/lasr_ctc"])
def test_a_classifier_that_does_not_name_its_body_has_classes(kind: str):
    """Its base model is itself: what it returns is not taken for a state."""
    tiny = tiny_models.build(*kind.split("/"))
    T = tl.Lens(tiny.model)(tiny.arguments)
    assert T.shape[:2] == T.shape[2:] and T.shape[0] > 1
    assert T.map("tensor.in_class", target=1).scores.shape[-1] == T.shape[2]
