r"""From the states of all tokens to the vector of a text: a linear map, with choices held.

$y = P X^N$ with $y_c = Σ_t W_{tc} X^N_{tc}$: weights over tokens, the same in each channel except for ``max``, where
each channel has the token that it chose. A dense layer after it is linear with its gain held.

| pooling | W |
|---|---|
| ``mean`` | 1 / n on the tokens that are not masked |
| ``cls``, ``last`` | 1 on the first, or on the last of them |
| ``max`` | 1 on the token that is largest in a channel |
| ``attention`` | the weights of the model's own attention pooling after its blocks |
| ``late`` | none: every token keeps its vector, and each token of a is paired with the most similar token of b |

The model's own pooling is, in this order: that of sentence-transformers in ``modules.json`` beside the weights; the
last module after the blocks that returns one vector (a pooler, a projection, an attention pooling), as recorded;
the last token of a causal model; the mean.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from tensorlens.errors import InputError
from tensorlens.files import from_json
from tensorlens.models.inputs import is_causal
from tensorlens.program.steps import Slot, Step
from tensorlens.recording.recording import Recording
from tensorlens.views.labels import shorten

POOLINGS = ("mean", "cls", "last", "max", "attention", "late")
"""Poolings by name."""

MODES = {
    "mean": "mean",
    "cls": "cls",
    "max": "max",
    "lasttoken": "last",
    "mean_sqrt_len": "mean_sqrt",
    "weightedmean": "weighted_mean",
}
"""Pooling modes by their names in sentence-transformers' files, without prefix and suffix, and our names."""


@dataclass(frozen=True)
class Projection:
    """A dense layer after the pooling: $f(W y + b)$, with the gain $f(z)/z$ held."""

    weight: Tensor
    bias: Tensor | None
    activation: nn.Module

    def __call__(self, whole: Tensor) -> tuple[Tensor, Tensor]:
        """Its output for vectors (…, channel), and the gain."""
        z = whole @ self.weight.to(whole).T
        z = z if self.bias is None else z + self.bias.to(z)
        given = self.activation(z)
        return given, torch.where(z == 0, 0.0, given / torch.where(z == 0, 1.0, z))


@dataclass(frozen=True)
class Pooling:
    """How the states of tokens become one vector.

    Attributes:
        kind: How tokens are weighted; ``module`` if a module of the model does it.
        name: Its name in maps.
        slot: For ``module``, the slot of the vector in the program.
        projections: Dense layers after it.
        normalised: Whether the vector is divided by its norm.
        longest: How many tokens of a text the encoder reads.
        prompt: The text that the encoder puts before every text.
    """

    kind: str
    name: str
    slot: int | None = None
    projections: tuple[Projection, ...] = ()
    normalised: bool = False
    longest: int | None = None
    prompt: str = ""

    def check(self, text: str, n_tokens: int) -> None:
        """Refuse a text that the encoder itself would read in part, or with something before it."""
        if self.longest is not None and n_tokens > self.longest:
            raise InputError(
                f"The encoder reads the first {self.longest} tokens of a text; {shorten(text, 40)!r} has {n_tokens}. "
                "Cut it there, or name a `pooling` to compare the whole text."
            )
        if not text.startswith(self.prompt):
            raise InputError(
                f"The encoder puts {self.prompt!r} before every text. Write it before {shorten(text, 40)!r}, or name a "
                "`pooling` to compare the text without it."
            )

    def weights(self, states: Tensor, mask: Tensor) -> Tensor | None:
        """W (sample, token, channel) at the states and the mask (sample, token); None if there is no such matrix."""
        if self.kind in ("late", "module"):
            return None
        seen = mask.to(states)[..., None].expand_as(states)
        if self.kind == "max":
            chosen = states.masked_fill(seen == 0, -torch.inf).argmax(1, keepdim=True)
            return torch.zeros_like(states).scatter_(1, chosen, 1.0)
        rank, n = seen.cumsum(1) * seen, seen.sum(1, keepdim=True)
        made = {
            "mean": lambda: seen / n,
            "mean_sqrt": lambda: seen / n.sqrt(),
            "weighted_mean": lambda: rank / rank.sum(1, keepdim=True),
            "cls": lambda: (rank == 1).to(states),
            "last": lambda: (rank == n).to(states),
        }
        return made[self.kind]()


def find_pooling(name: str | None, model: nn.Module, recording: Recording, around: Around | None) -> Pooling:
    """The pooling asked for, or the model's own.

    Args:
        name: One of `POOLINGS`, or None for the model's own.
        model: The model.
        recording: Its pass.
        around: The modules of a `SentenceTransformer` around the model; looked for beside the weights if None.
    """
    if len(recording.slots[0]) > 1:
        raise InputError(
            f"`{type(model).__name__}` has an encoder and a decoder, and their states are not one text. Pass a lens on "
            "one of them, such as tl.Lens(model.get_encoder(), tokenizer)."
        )
    if name is not None:
        if name not in POOLINGS:
            raise InputError(
                f"`pooling` must be one of {', '.join(POOLINGS)}, or None for the model's own; got {name!r}."
            )
        return _attention_pooling(model, recording) if name == "attention" else Pooling(name, name)
    around = _beside(model) if around is None else around
    if around is not None:
        return _of_modules(around)
    found = _of_module(recording)
    if found is not None:
        return found
    return Pooling("last", "last") if is_causal(model) else Pooling("mean", "mean")


def _of_module(recording: Recording) -> Pooling | None:
    """The last module after the blocks that returns one vector; logits of a classifier do not count."""
    end, specs = max(recording.slots[-1]), recording.program.specs
    for module in reversed(recording.modules):
        if module.slot is None or module.slot <= end or recording.pools and module.slot == recording.readout_slot:
            continue
        shape = tuple(specs[module.slot].shape)
        if len(shape) == 2 and shape[0] == recording.n_samples:
            return Pooling("module", f"module {module.path}", slot=module.slot)
    return None


def _mixes_tokens(step: Step) -> bool:
    """Whether tokens are mixed by weights: fused attention, or a product with a held matrix on the left."""
    is_product = step.operation in ("matmul", "bmm") and type(step.args[0]) is not Slot
    return is_product or step.operation in ("attention", "live_attention")


def _attention_pooling(model: nn.Module, recording: Recording) -> Pooling:
    found, mixes = _of_module(recording), False
    if found is not None and found.slot is not None:
        steps = recording.program.part(recording.slots[-1], (found.slot,)).steps
        mixes = any(map(_mixes_tokens, steps))
    if found is None or not mixes:
        raise InputError(
            f"`{type(model).__name__}` has no attention pooling after its blocks. Name another `pooling`: "
            f"{', '.join(one for one in POOLINGS if one != 'attention')}."
        )
    return found


# sentence-transformers -----------------------------------------------------------------------------------------------


Module = tuple[str, Mapping[str, Any], Mapping[str, Tensor]]
"""Kind, settings and weights of one module."""


class Around(NamedTuple):
    """The encoder around its Transformer: the modules after it, and changes to a text before it (see `Pooling`)."""

    modules: list[Module]
    longest: int | None
    prompt: str


def around_of(encoder: Any) -> Around:
    """The same of a `SentenceTransformer`."""
    modules = [(type(one).__name__, one.get_config_dict(), one.state_dict()) for one in list(encoder)[1:]]
    return Around(modules, getattr(encoder, "max_seq_length", None), _prompt(vars(encoder)))


def _prompt(settings: Mapping[str, Any]) -> str:
    return (settings.get("prompts") or {}).get(settings.get("default_prompt_name")) or ""


def _beside(model: nn.Module) -> Around | None:
    """The same from ``modules.json`` in the folder that the model was loaded from; None where there is no such file."""
    folder = Path(str(getattr(getattr(model, "config", None), "name_or_path", "") or "."))
    if str(folder) == "." or not (folder / "modules.json").is_file():
        return None
    found = list[Module]()
    for row in from_json((folder / "modules.json").read_text("utf-8"))[1:]:
        place = folder / row["path"]
        packed, pickled = place / "model.safetensors", place / "pytorch_model.bin"
        weights = load_file(packed) if packed.is_file() else {}
        if pickled.is_file() and not weights:
            weights = torch.load(pickled, map_location="cpu", weights_only=True)
        found.append((row["type"].rsplit(".", 1)[-1], _settings(place / "config.json"), weights))
    longest = _settings(folder / "sentence_bert_config.json").get("max_seq_length")
    longest = longest or _settings(folder / "tokenizer_config.json").get("model_max_length")
    return Around(found, longest, _prompt(_settings(folder / "config_sentence_transformers.json")))


def _settings(file: Path) -> dict[str, Any]:
    return from_json(file.read_text("utf-8")) if file.is_file() else {}


def _of_modules(around: Around) -> Pooling:
    kind, projections, normalised = None, list[Projection](), False
    for name, config, weights in around.modules:
        if name == "Pooling" and kind is None:
            kind = _mode(config)
        elif name == "Dense" and kind is not None and not normalised and "linear.weight" in weights:
            projections.append(Projection(weights["linear.weight"], weights.get("linear.bias"), _activation(config)))
        elif name == "Normalize" and kind is not None:
            normalised = True
        elif name != "Dropout":
            kind = None
            break
    if kind is None:
        raise InputError(
            "Expected an encoder whose modules are a Pooling, then Dense, then Normalize; it has "
            f"{', '.join(name for name, *_ in around.modules) or 'none'}. Name a `pooling`: {', '.join(POOLINGS)}."
        )
    names = [kind, *("dense" for _ in projections), *(["normalise"] if normalised else [])]
    return Pooling(
        kind,
        " + ".join(names),
        projections=tuple(projections),
        normalised=normalised,
        longest=around.longest,
        prompt=around.prompt,
    )


def _mode(config: Mapping[str, Any]) -> str:
    given = config.get("pooling_mode") or [key for key in config if key.startswith("pooling_mode_") and config[key]]
    given = [given] if isinstance(given, str) else given
    names = [re.sub(r"^pooling_mode_|_tokens?$", "", str(name)) for name in given]
    if len(names) != 1 or names[0] not in MODES:
        raise InputError(
            f"The encoder pools by {' and '.join(names) or 'nothing'}; expected one of {', '.join(MODES)}. "
            f"Name a `pooling`: {', '.join(POOLINGS)}."
        )
    return MODES[names[0]]


def _activation(config: Mapping[str, Any]) -> nn.Module:
    path = str(config.get("activation_function") or "torch.nn.Tanh")
    kind = getattr(nn, path.rsplit(".", 1)[-1], None) if path.startswith("torch.") else None
    if not isinstance(kind, type) or not issubclass(kind, nn.Module):
        raise InputError(f"The encoder's dense layer has the activation {path!r}; expected one of torch.nn.")
    return kind()
