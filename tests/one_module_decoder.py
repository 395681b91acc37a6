"""A decoder as some checkpoints bring it in a file of their own, with the traits that loaders stumble over.

One module holds embedding, blocks, norm and unembedding and returns logits; the wrapper names no base model, does not
say where its embeddings are and never calls `post_init`. The rotary table is complex, made once for the whole class,
and in no file. `write_decoder` puts this file beside the weights, as remote code.
"""

import json
import math
import shutil
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput


class OneModuleConfig(PretrainedConfig):
    model_type = "one_module_decoder"

    def __init__(self, vocab_size=257, width=16, depth=3, n_heads=4, n_pairs=2, n_places=300, **rest):
        self.vocab_size, self.width, self.depth = vocab_size, width, depth
        self.n_heads, self.n_pairs, self.n_places = n_heads, n_pairs, n_places
        super().__init__(**rest)


class Scaled(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.gain


class Turned(nn.Module):
    table = None

    def __init__(self, config):
        super().__init__()
        if Turned.table is None:
            half = config.width // config.n_heads // 2
            speeds = torch.exp(-math.log(10000.0) * torch.arange(half) / half)
            angles = torch.arange(config.n_places)[:, None] * speeds
            Turned.table = torch.polar(torch.ones_like(angles), angles)
        self.register_buffer("angles", Turned.table, persistent=False)

    def forward(self, x):
        pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
        turned = pairs * self.angles[: x.shape[1], None]
        return torch.view_as_real(turned).flatten(-2).to(x.dtype)


class Mixing(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.size = config.width // config.n_heads
        self.query = nn.Linear(config.width, config.width, bias=False)
        self.key = nn.Linear(config.width, config.n_pairs * self.size, bias=False)
        self.value = nn.Linear(config.width, config.n_pairs * self.size, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)
        self.turn = Turned(config)

    def forward(self, x, mask):
        query, key, value = (layer(x).unflatten(-1, (-1, self.size)) for layer in (self.query, self.key, self.value))
        query, key, value = (one.transpose(1, 2) for one in (self.turn(query), self.turn(key), value))
        mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
        return self.out(mixed.transpose(1, 2).flatten(-2))


class Layer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.mixing, self.before, self.between = Mixing(config), Scaled(config.width), Scaled(config.width)
        self.gate, self.up, self.down = (
            nn.Linear(config.width, 2 * config.width, bias=False),
            nn.Linear(config.width, 2 * config.width, bias=False),
            nn.Linear(2 * config.width, config.width, bias=False),
        )

    def forward(self, x, mask):
        x = x + self.mixing(self.before(x), mask)
        inner = self.between(x)
        return x + self.down(functional.silu(self.gate(inner)) * self.up(inner)), None


class Decoder(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.words = nn.Embedding(config.vocab_size, config.width)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.depth))
        self.last = Scaled(config.width)
        self.to_words = nn.Linear(config.width, config.vocab_size, bias=False)

    def forward(self, input_ids, use_cache=False):
        x = self.words(input_ids)
        n = input_ids.shape[-1]
        mask = torch.full((n, n), -torch.inf, device=x.device, dtype=x.dtype).triu(1)
        for layer in self.layers:
            x, _ = layer(x, mask)
        return self.to_words(self.last(x)), None


class OneModuleForCausalLM(PreTrainedModel):
    config_class = OneModuleConfig

    def __init__(self, config):
        super().__init__(config)
        self.decoder = Decoder(config)

    def forward(self, input_ids, use_cache=False, **rest):
        return CausalLMOutput(logits=self.decoder(input_ids, use_cache)[0])


def write_decoder(folder, tokenizer, **sizes):
    """The folder of a random model with this file as its code; returns the model that was saved."""
    from safetensors.torch import save_file

    config = OneModuleConfig(vocab_size=len(tokenizer), **sizes)
    torch.manual_seed(0)
    model = OneModuleForCausalLM(config).eval().requires_grad_(False)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) / 5)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(model.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
    code, name = Path(__file__).stem, "OneModuleForCausalLM"
    maps = {"AutoConfig": f"{code}.OneModuleConfig", "AutoModel": f"{code}.{name}"}
    maps["AutoModelForCausalLM"] = f"{code}.{name}"
    about = config.to_dict() | {"auto_map": maps, "architectures": [name]}
    (folder / "config.json").write_text(json.dumps(about), "utf-8")
    shutil.copy(__file__, folder)
    tokenizer.save_pretrained(folder)
    return model
