"""Samples a second of another package's maps in batches: one package in a process of its own, since some patch classes.

    python benchmarks/data_set_peers.py captum.input_x_gradient --samples 256 --tokens 128

Prints a JSON object with the rate, or the reason why there is none. `benchmarks/data_sets.py --only peers` asks all.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import json
import sys
import time
import types
from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn

SMOLLM2 = dict(
    hidden_size=576,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    intermediate_size=1536,
    vocab_size=49152,
    max_position_embeddings=8192,
)
N_STEPS = 32
"""Points along the path of integrated gradients, as in `gradient.integrated`."""

Maps = Callable[[Tensor], Tensor]
"""From embeddings (sample, token, channel) to scores (sample, token)."""


def times_gradient(model: Any, x: Tensor) -> Tensor:
    """Input times whatever the backward pass gives, of the predicted logit at the last token."""
    x = x.detach().requires_grad_()
    logits = model(inputs_embeds=x, use_cache=False, logits_to_keep=1).logits[:, -1]
    return (torch.autograd.grad(logits.max(-1).values.sum(), x)[0] * x).sum(-1)


def plain(model: Any) -> Maps:
    """No package at all."""
    return lambda x: times_gradient(model, x)


def patched(method: str) -> Callable[[Any], Maps]:
    """LRP by the patched classes of lxt, the recipe of its quickstart."""

    def make(model: Any) -> Maps:
        importlib.import_module("transformers.pytorch_utils").find_pruneable_heads_and_indices = None  # type: ignore[attr-defined]
        if importlib.util.find_spec("torchvision") is None:  # for models that are not asked for here
            vision, models = types.ModuleType("torchvision"), types.ModuleType("torchvision.models")
            inner = types.ModuleType("torchvision.models.vision_transformer")
            inner.nn, models.vision_transformer, vision.models = nn, inner, models  # type: ignore[attr-defined]
            sys.modules |= {"torchvision": vision, "torchvision.models": models, inner.__name__: inner}
        modeling: Any = importlib.import_module("transformers.models.llama.modeling_llama")
        maps = importlib.import_module("lxt.efficient.models.llama")
        importlib.import_module("lxt.efficient").monkey_patch(modeling, getattr(maps, method))
        if isinstance(modeling.ALL_ATTENTION_FUNCTIONS, dict):
            modeling.ALL_ATTENTION_FUNCTIONS = _Functions(modeling.ALL_ATTENTION_FUNCTIONS)
        return lambda x: times_gradient(model, x)

    return make


class _Functions(dict):
    """What lxt puts in the place of an interface that transformers asks."""

    def get_interface(self, name: str, default: Any) -> Any:
        """The function of that name."""
        return self.get(name, default)


def captum(method: str) -> Callable[[Any], Maps]:
    """A class of captum.attr, of the logits that are predicted."""

    def make(model: Any) -> Maps:
        package = importlib.import_module("captum.attr")

        def read(x: Tensor) -> Tensor:
            return model(inputs_embeds=x, use_cache=False, logits_to_keep=1).logits[:, -1]

        def maps(x: Tensor) -> Tensor:
            with torch.no_grad():
                target = read(x).argmax(-1)
            more = {} if method == "InputXGradient" else {"n_steps": N_STEPS, "internal_batch_size": len(x)}
            return getattr(package, method)(read).attribute(x.requires_grad_(), target=target, **more).sum(-1)

        return maps

    return make


PEERS: dict[str, Callable[[Any], Maps]] = {
    "input x gradient": plain,
    "lxt.attn_lrp": patched("attnLRP"),
    "lxt.cp_lrp": patched("cp_LRP"),
    "captum.input_x_gradient": captum("InputXGradient"),
    "captum.integrated_gradients": captum("IntegratedGradients"),
}


def rate(name: str, samples: int, tokens: int, batch_size: int) -> dict[str, Any]:
    """Samples a second; the first batch is not counted."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    torch.manual_seed(0)
    model = hf.LlamaForCausalLM._from_config(hf.LlamaConfig(**SMOLLM2), attn_implementation="sdpa")
    model = model.to(device).eval().requires_grad_(False)
    maps = PEERS[name](model)
    ids = torch.randint(5, 30000, (samples, tokens), generator=torch.Generator().manual_seed(0)).to(device)
    embed = model.get_input_embeddings()
    maps(embed(ids[:batch_size])).tolist()
    start = time.perf_counter()
    for some in ids.split(batch_size):
        maps(embed(some)).tolist()
    package = name.partition(".")[0]
    version = importlib.metadata.version(package) if "." in name else transformers_version()
    return {"samples a second": samples / (time.perf_counter() - start), "version": version, "batch": batch_size}


def transformers_version() -> str:
    """Of the package that all of them run on."""
    return importlib.metadata.version("transformers")


def main() -> None:
    """Print what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer", choices=PEERS)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=8)
    chosen = parser.parse_args()
    try:
        found = rate(chosen.peer, chosen.samples, chosen.tokens, chosen.batch_size)
    except Exception as error:  # noqa: BLE001  whatever a package makes of this version of transformers
        found = {"reason": f"{type(error).__name__}: {error}".splitlines()[0]}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
