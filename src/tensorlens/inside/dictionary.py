r"""`Dictionary`: sparse features that read a state and write a component, from published files or trained here.

A dictionary reads f = σ(W_enc x + b_enc) at one place and writes Σ_k f_k d_k + b_dec where a feed-forward or an
attention writes. With everything held, feature k at token i is a component that writes f_k d_k, so

    y = Σ_k f_k d_k + b_dec + error

holds for any dictionary, good or bad; the share of the error says how good it is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tensorlens.errors import (
    InputError,
    MethodError,
    TensorLensError,
    check_choice,
    check_lens,
    check_path,
    check_whole,
)
from tensorlens.files import write_json, write_whole
from tensorlens.inside.stream import Component, Write
from tensorlens.maps.targets import Feature
from tensorlens.models.samples import check_several
from tensorlens.views.printing import text_as_html

if TYPE_CHECKING:
    from tensorlens.inside.block import Block

Reads = Literal["output", "input", "stream"]
"""The state that features read: the component's output, its input (after its norm), or the stream before the norm."""

Kind = Literal["dictionary", "transcoder"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Encoder:
    """The encoder of some features.

    Attributes:
        weight: (feature, channel).
        bias: (feature,).
        threshold: (feature,): below it a feature is not active (JumpReLU).
        k: Number of active features per token (top-k); with neither, those above zero are active (ReLU).
        is_rectified: Whether a value below zero counts as zero; top-k and JumpReLU of circuit-tracer keep it.
        block: The block that they read; if None, the one that they write to.
        reads: The state of the block that they read.
    """

    weight: Tensor
    bias: Tensor
    threshold: Tensor | None = None
    k: int | None = None
    is_rectified: bool = True
    block: int | None = None
    reads: Reads = "output"

    def __post_init__(self) -> None:
        """Check that shapes and choices belong together."""
        n = len(self.weight)
        if self.weight.dim() != 2 or self.bias.shape != (n,) or self.k and self.threshold is not None:
            raise InputError(
                f"Expected rows of an encoder with a bias each, and a threshold or k; got {tuple(self.weight.shape)}."
            )
        check_choice(self.reads, "reads", get_args(Reads))

    def __call__(self, x: Tensor) -> Tensor:
        """Activations (token, feature) of states (token, channel)."""
        before = torch.nn.functional.linear(x, self.weight.to(x), self.bias.to(x))
        kept = before.relu() if self.is_rectified else before
        if self.threshold is not None:
            return torch.where(before > self.threshold.to(x), kept, 0)
        if self.k is not None:
            best = before.topk(min(self.k, before.shape[-1]), dim=-1).indices
            return torch.zeros_like(before).scatter(-1, best, kept.gather(-1, best))
        return before.relu()


@dataclass(frozen=True, kw_only=True, eq=False)
class Dictionary:
    r"""Features of one component: their encoders and decoders.

    Attributes:
        encoders: One; for a cross-layer transcoder, one for each block that it reads.
        decoders: The write vectors (feature, channel) of each.
        bias: b_dec (channel,).
        component: What it decomposes: ``"feed-forward"`` or ``"attention"``.
        meta: Its origin.
    """

    encoders: tuple[Encoder, ...]
    decoders: tuple[Tensor, ...]
    bias: Tensor
    component: str = "feed-forward"
    meta: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check that each encoder has its decoder."""
        width = len(self.bias)
        fits = len(self.encoders) == len(self.decoders) > 0 and all(
            one.shape == (len(encoder.weight), width)
            for encoder, one in zip(self.encoders, self.decoders, strict=False)
        )
        if not fits or self.component not in ("feed-forward", "attention"):
            raise InputError(
                "Expected a decoder row of as many channels as the bias for each feature; got different shapes."
            )

    @property
    def n_features(self) -> int:
        """Number of features."""
        return sum(len(one.weight) for one in self.encoders)

    def feature(self, number: int, block: int | None = None) -> Feature:
        """A feature as the target of `T.components`, `T.graph` and of the method ``tensor.in_class`` of `T.map`.

        Args:
            number: Which one; in a cross-layer dictionary, among those that read this block.
            block: The block that it decomposes; by default the one that it was made for.
        """
        block = self.meta.get("block") if block is None else block
        found = next((one for one in self.encoders if one.block in (None, block)), None)
        if type(block) is not int or block < 0 or found is None:
            raise InputError(f"Expected the block whose features these are; got {block!r:.40}.")
        k = check_whole(number, "number", 0, len(found.weight) - 1)
        row, bias = found.weight[k], float(found.bias[k])
        return Feature(number=k, block=block, row=row, bias=bias, component=self.component, reads=found.reads)

    def __repr__(self) -> str:
        """One line: sizes."""
        return f"Dictionary({self.n_features} features × {len(self.bias)} channels of the {self.component})"

    def _repr_html_(self) -> str:
        return text_as_html(f"{self!r}\n{self.meta}")

    # Files ------------------------------------------------------------------------------------------------------------

    @classmethod
    def load(cls, folder: str | Path) -> Any:
        """A dictionary from a folder of SAELens, or of circuit-tracer's transcoders as a dict by block.

        Args:
            folder: With ``cfg.json`` and ``sae_weights.safetensors`` (SAELens, and `save`); with
                ``layer_0.safetensors`` … (a transcoder per layer); or with ``W_enc_0.safetensors`` and
                ``W_dec_0.safetensors`` … (cross-layer).

        Returns:
            A `Dictionary`, or for several layers ``{block: Dictionary}``, which `components` takes as it is.
        """
        folder = check_path(folder)
        try:
            if (folder / "cfg.json").is_file():
                return _from_saelens(folder)
            if (folder / "W_enc_0.safetensors").is_file():
                return _from_cross_layer(folder)
            layers = {int(m[1]): p for p in folder.glob("*.safetensors") if (m := re.fullmatch(r"layer_(\d+)", p.stem))}
            if layers:
                return {n: _from_transcoder(folder, path, n) for n, path in sorted(layers.items())}
        except TensorLensError:
            raise
        except Exception as error:  # whatever a damaged file provokes
            raise InputError(
                f"Could not read a dictionary from {folder.name!r}: {type(error).__name__}: {str(error)[:200]}."
            ) from error
        raise InputError(
            f"Expected a folder with cfg.json and sae_weights.safetensors, layer_0.safetensors or W_enc_0.safetensors; "
            f"{str(folder)!r} has none of them."
        )

    @classmethod
    def fit(
        cls,
        lens: Any,
        texts: Iterable[Any],
        *,
        block: int,
        kind: Kind = "dictionary",
        n_features: int | None = None,
        k: int = 32,
        steps: int = 2000,
        batch_size: int = 1024,
        seed: int = 0,
        progress: bool | None = None,
    ) -> Dictionary:
        """Train a small top-k dictionary of a feed-forward; minutes on a GPU.

        Args:
            lens: A lens on the model.
            texts: What the lens takes; every token of every text counts.
            block: The block whose feed-forward it decomposes.
            kind: ``"dictionary"`` reads the output of the feed-forward, ``"transcoder"`` its input.
            n_features: How many features; four times the channels if None.
            k: How many are active at a token.
            steps: Steps of Adam.
            batch_size: Tokens in each.
            seed: Random seed.
            progress: Whether to show a progress bar; on a terminal if None.

        Returns:
            The dictionary; `meta["error_share"]` is the unexplained share of the variance on held-out tokens.
        """
        from tensorlens.inside.dictionary_training import gathered_states, trained_parts

        check_choice(kind, "kind", get_args(Kind))
        check_lens(lens)
        check_several(texts)
        reads: Reads = "output" if kind == "dictionary" else "input"
        x, y = gathered_states(lens, texts, check_whole(block, "block"), reads)
        encoder, decoder, centre, share = trained_parts(
            x,
            y,
            n_features=check_whole(n_features or 4 * y.shape[1], "n_features", 1),
            k=check_whole(k, "k", 1),
            steps=check_whole(steps, "steps", 1),
            batch_size=check_whole(batch_size, "batch_size", 1),
            seed=seed,
            progress=progress,
        )
        meta = {"format": "tensorlens", "block": block, "error_share": share, "n_tokens": len(y)}
        return cls(encoders=(replace(encoder, reads=reads),), decoders=(decoder,), bias=centre, meta=meta)

    def save(self, folder: str | Path) -> Path:
        """Write a folder in SAELens' format, which `load` reads."""
        folder = check_path(folder)
        if len(self.encoders) != 1 or not self.encoders[0].is_rectified:
            raise InputError(
                "SAELens has no format for features that read several blocks, or that keep values below zero."
            )
        folder.mkdir(parents=True, exist_ok=True)
        (encoder,), (decoder,) = self.encoders, self.decoders
        tensors = {"W_enc": encoder.weight.T, "b_enc": encoder.bias, "W_dec": decoder, "b_dec": self.bias}
        tensors |= {} if encoder.threshold is None else {"threshold": encoder.threshold}
        plain = {name: one.detach().cpu().contiguous() for name, one in tensors.items()}
        is_attention, block = self.component == "attention", encoder.block or self.meta.get("block") or 0
        out = "hook_attn_out" if is_attention else "hook_mlp_out"
        norm, stream = ("ln1", "hook_resid_pre") if is_attention else ("ln2", "hook_resid_mid")
        name = {"output": out, "input": f"{norm}.hook_normalized", "stream": stream}[encoder.reads]
        kind = "jumprelu" if encoder.threshold is not None else "standard" if encoder.k is None else "topk"
        if encoder.reads != "output":
            kind = "transcoder" if kind == "standard" else f"{kind}_transcoder"
        config = {
            "architecture": kind,
            "d_in": encoder.weight.shape[1],
            "d_sae": len(encoder.weight),
            "dtype": str(encoder.weight.dtype).removeprefix("torch."),
            "apply_b_dec_to_input": False,
            "normalize_activations": "none",
            **({} if encoder.k is None else {"k": encoder.k}),
            "metadata": {
                "hook_name": f"blocks.{block}.{name}",
                "hook_name_out": f"blocks.{block}.{out}",
                "tensorlens": {key: value for key, value in self.meta.items() if isinstance(value, (str, int, float))},
            },
        }
        write_whole(folder / "sae_weights.safetensors", lambda path: save_file(plain, path))
        write_json(folder / "cfg.json", config)
        return folder


# At one input ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class ActiveFeature:
    """A feature that is active somewhere.

    Attributes:
        component: Its name.
        activation: f_k (token,).
        write: d_k (channel,).
        written: The slot of the write that it is part of.
        read: Its row of the encoder (channel,).
        block: The block that it reads.
        slot: The slot that it reads there.
        place: The sum of that block before which it reads the stream.
    """

    component: Component
    activation: Tensor
    write: Tensor
    written: int
    read: Tensor
    block: int
    slot: int
    place: int


@dataclass(frozen=True, eq=False)
class FeatureParts:
    """The parts of a write: active features, the decoder's bias, and the share of the variance that is error."""

    features: tuple[ActiveFeature, ...]
    bias: Tensor
    share: float


def feature_parts(block: Block, write: Write, dictionary: Dictionary) -> FeatureParts:
    """Split one write of a block into features."""
    y = block.to_tokens(block.values[write.slot])[0]
    if len(dictionary.bias) != y.shape[-1]:
        raise InputError(
            f"Expected a dictionary of {y.shape[-1]} channels for block {block.n}; got {len(dictionary.bias)}."
        )
    found = list[ActiveFeature]()
    rest = y - dictionary.bias.to(y)
    for encoder, decoder in zip(dictionary.encoders, dictionary.decoders, strict=True):
        n = block.n if encoder.block is None else encoder.block
        if not block.run.start <= n <= block.n:
            raise MethodError(
                f"Features of block {block.n} that read block {n} need a range of blocks with both, in this order."
            )
        own = block.run.block(n)
        slot, place = read_slot(own, dictionary.component if own.n == block.n else "feed-forward", encoder.reads)
        f = encoder(own.to_tokens(own.values_of([slot])[slot])[0]).to(y)
        active = f.any(0).nonzero()[:, 0]
        kind = "feature" if own.n == block.n else f"feature of block {own.n}"
        vectors, rows = decoder.to(y)[active], encoder.weight.to(y)[active]
        rest = rest - f[:, active] @ vectors
        for i, k in enumerate(active.tolist()):
            name = Component(block=block.n, kind=kind, feature=k)
            found.append(ActiveFeature(name, f[:, k], vectors[i], write.slot, rows[i], own.n, slot, place))
    share = float(rest.square().sum() / (y - y.mean(0)).square().sum().clamp_min(torch.finfo(y.dtype).tiny))
    return FeatureParts(tuple(found), dictionary.bias.to(y), share)


def read_slot(block: Block, component: str, reads: str) -> tuple[int, int]:
    """The slot that features of a component read: its output, the stream before it, or the input of its matrices.

    Also the place of the sum that it belongs to.
    """
    write = next((one for one, kind in block.writes if kind == component), None)
    if write is None:
        raise MethodError(f"Block {block.n} of `{block.recording.name}` has no {component} that can be told apart.")
    place, one = next((place, one) for place, one in enumerate(block.sums or ()) if write in one.writes)
    slots = {"output": write.slot, "stream": one.stream, "input": block.stream.read_state(write, one)}
    slot = slots[reads]
    if slot is None:
        raise MethodError(
            f"The {component} of block {block.n} does not read a single state. Use a dictionary that reads the stream "
            "or the output."
        )
    return slot, place


def features_of(block: Block, write: Write, kind: str) -> FeatureParts | None:
    """The parts of a write for which there is a dictionary; kept with the pass."""
    dictionary = block.run.finer.features.get(block.n)
    if dictionary is None or dictionary.component != kind:
        return None
    kept = block.run.kept_features
    if block.n not in kept:
        kept[block.n] = feature_parts(block, write, dictionary)
    return kept[block.n]


# Formats of others ----------------------------------------------------------------------------------------------------

IN_SAELENS = frozenset({"W_enc", "b_enc", "W_dec", "b_dec", "threshold", "topk_threshold", "scaling_factor"})
IN_TRANSCODERS = frozenset({"W_enc", "b_enc", "W_dec", "b_dec", "activation_function.threshold", "k"})
"""The tensors that are read: a file with others, such as a gate or a skip connection, is not a sum of features."""


def _check_tensors(tensors: Mapping[str, Tensor], known: Iterable[str], name: str) -> None:
    odd = sorted(set(tensors) - set(known))
    if odd:
        raise InputError(
            f"Expected features with an encoder, a decoder, biases and thresholds; {name!r} also holds "
            f"{', '.join(odd)}, so that what it writes is not their sum."
        )


def _from_saelens(folder: Path) -> Dictionary:
    config = json.loads((folder / "cfg.json").read_text("utf-8"))
    config |= config.get("metadata") or {}
    tensors = load_file(folder / "sae_weights.safetensors")
    name = config.get("hook_name") or config.get("hook_point") or ""
    out = config.get("hook_name_out") or name
    component, reads = _place(name, out)
    if config.get("normalize_activations", "none") not in ("none", None, False):
        raise InputError(f"Expected a dictionary of unscaled states; this one rescales them ({folder.name}).")
    kind = str(config.get("architecture") or "standard").removeprefix("matryoshka_")
    activation = kind.removesuffix("transcoder").removesuffix("_") or "standard"
    own = config.get("activation_fn") or config.get("activation_fn_str") or "relu"
    activation = "topk" if (activation, own) == ("standard", "topk") else activation
    if activation not in ("standard", "jumprelu", "topk", "batchtopk") or own not in ("relu", "topk"):
        raise InputError(
            f"Expected features by relu, jumprelu, topk or batchtopk; {folder.name!r} has {kind} and {own}."
        )
    _check_tensors(tensors, IN_SAELENS, folder.name)
    weight, bias, decoder = tensors["W_enc"].T.contiguous(), tensors["b_enc"], tensors["W_dec"]
    if "scaling_factor" in tensors:  # of each feature, found by fine-tuning
        decoder = decoder * tensors["scaling_factor"][:, None]
    if config.get("apply_b_dec_to_input", "transcoder" not in kind):
        bias = bias - weight @ tensors["b_dec"]
    if config.get("rescale_acts_by_decoder_norm") and "topk" in activation:
        norms = decoder.norm(dim=1)
        weight, bias, decoder = weight * norms[:, None], bias * norms, decoder / norms[:, None]
    threshold = k = None
    if activation == "topk":
        k = config.get("k", (config.get("activation_fn_kwargs") or {}).get("k"))
    elif activation != "standard":
        threshold = tensors.get("threshold", tensors.get("topk_threshold"))
    if activation != "standard" and k is None and threshold is None:
        raise InputError(
            f"Expected `k` or a threshold for the features of {folder.name!r} ({activation}); got neither."
        )
    block, own_block = _number(out), _number(name)
    encoder = Encoder(
        weight=weight,
        bias=bias,
        threshold=None if threshold is None else threshold.to(bias).expand_as(bias),
        k=None if k is None else int(k),
        block=None if own_block == block else own_block,
        reads=reads,
    )
    meta = {"format": "saelens", "hook": out} | ({} if block is None else {"block": block})
    return Dictionary(encoders=(encoder,), decoders=(decoder,), bias=tensors["b_dec"], component=component, meta=meta)


def _number(hook: str) -> int | None:
    found = re.search(r"\d+", hook)
    return None if found is None else int(found[0])


def _place(name: str, out: str) -> tuple[str, Reads]:
    """The component that features decompose and the state that they read, by the names of hooks."""
    if out and re.search(r"(mlp|attn)(_out|\.hook_out)?$", out) is None:
        raise InputError(
            f"{out!r} is not the output of a feed-forward or an attention; a dictionary of the stream itself "
            f"does not decompose a component."
        )
    component, stream = "feed-forward", ("resid_mid", "mlp_in")
    if "attn" in out:
        component, stream = "attention", ("resid_pre", "attn_in")
    if name == out:
        return component, "output"
    if name.endswith(("hook_normalized", "mlp.hook_in")):
        return component, "input"
    if name.endswith(stream):
        return component, "stream"
    raise InputError(f"Expected features that read what {out!r} reads, or the stream before it; they read {name!r}.")


def _reads(folder: Path) -> tuple[Reads, Mapping[str, Any]]:
    """The state that transcoders of circuit-tracer read, and the rest of their config; the stream without one."""
    import yaml

    file = folder / "config.yaml"
    config = (yaml.safe_load(file.read_text("utf-8")) or {}) if file.is_file() else {}
    name, out = config.get("feature_input_hook", "hook_resid_mid"), config.get("feature_output_hook", "hook_mlp_out")
    return _place(name, out)[1], config


def _from_transcoder(folder: Path, path: Path, n: int) -> Dictionary:
    tensors, (reads, config) = load_file(path), _reads(folder)
    _check_tensors(tensors, IN_TRANSCODERS, path.name)
    activation, threshold = config.get("activation"), tensors.get("activation_function.threshold")
    k = tensors.get("k", config.get("k") if activation == "topk" else None)
    encoder = Encoder(
        weight=tensors["W_enc"],
        bias=tensors["b_enc"],
        threshold=None if threshold is None or activation == "relu" or k is not None else threshold.flatten(),
        k=None if k is None or activation == "relu" else int(k),
        is_rectified=False,
        block=n,
        reads=reads,
    )
    meta = {"format": "circuit-tracer", "block": n}
    return Dictionary(encoders=(encoder,), decoders=(tensors["W_dec"],), bias=tensors["b_dec"], meta=meta)


def _from_cross_layer(folder: Path) -> dict[int, Dictionary]:
    """A cross-layer transcoder: the features of block l write to block l and every later one."""
    n, (reads, _) = len(list(folder.glob("W_enc_*.safetensors"))), _reads(folder)
    read = [load_file(folder / f"W_enc_{i}.safetensors") for i in range(n)]
    write = [load_file(folder / f"W_dec_{i}.safetensors")[f"W_dec_{i}"] for i in range(n)]  # (feature, later, channel)
    encoders = list[Encoder]()
    for i, one in enumerate(read):
        _check_tensors(one, [f"{name}_{i}" for name in ("W_enc", "b_enc", "b_dec", "threshold")], f"W_enc_{i}")
        least = one[f"threshold_{i}"].flatten() if f"threshold_{i}" in one else None
        weight, bias = one[f"W_enc_{i}"], one[f"b_enc_{i}"]
        encoders.append(Encoder(weight=weight, bias=bias, threshold=least, is_rectified=False, block=i, reads=reads))
    return {
        m: Dictionary(
            encoders=tuple(encoders[: m + 1]),
            decoders=tuple(write[i][:, m - i].contiguous() for i in range(m + 1)),
            bias=read[m][f"b_dec_{m}"],
            meta={"format": "circuit-tracer", "block": m},
        )
        for m in range(n)
    }


def check_features(features: Any, n_blocks: int) -> dict[int, Dictionary]:
    """Dictionaries by block, or an error about them."""
    if not isinstance(features, Mapping):
        raise InputError(f"`features` must be dictionaries by block, such as {{12: dictionary}}; got {features!r:.60}.")
    for block, one in features.items():
        if type(block) is not int or not 0 <= block < n_blocks or not isinstance(one, Dictionary):
            raise InputError(
                f"`features` must be a `Dictionary` for some of the blocks 0 to {n_blocks - 1}; got "
                f"{block!r:.40}: {one!r:.60}."
            )
    return dict(features)
