r"""`Dictionary`: sparse features that read a state and write a component, from published files or trained here.

A dictionary reads f = σ(W_enc x + b_enc) at one place and writes Σ_k f_k d_k + b_dec where a feed-forward or an
attention writes. With everything held, feature k at token i is a component: what it wrote is f_k d_k, so

    y = Σ_k f_k d_k + b_dec + error

holds for any dictionary, good or bad; the error's share says how good it is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from tensorlens.errors import InputError, check_lens, check_path, check_whole
from tensorlens.files import to_json, write_whole
from tensorlens.maps.targets import Feature
from tensorlens.models.samples import check_several
from tensorlens.views.printing import text_as_html

Reads = Literal["output", "input", "stream"]
"""What features read: the component's output, its input (after its norm), or the stream before the norm."""

Kind = Literal["dictionary", "transcoder"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Encoder:
    """The reading half of some features.

    Attributes:
        weight: (feature, channel).
        bias: (feature,).
        threshold: (feature,): below it a feature is not active (JumpReLU).
        k: Number of active features per token (top-k); with neither, those above zero are active (ReLU).
        block: The block that they read; if None, the one that they write to.
        reads: Where in it.
    """

    weight: Tensor
    bias: Tensor
    threshold: Tensor | None = None
    k: int | None = None
    block: int | None = None
    reads: Reads = "output"

    def __post_init__(self) -> None:
        """Check that shapes and choices belong together."""
        n = len(self.weight)
        if self.weight.dim() != 2 or self.bias.shape != (n,) or self.k and self.threshold is not None:
            raise InputError(
                f"Expected rows of an encoder with a bias each, and a threshold or k; got {tuple(self.weight.shape)}."
            )
        if self.reads not in get_args(Reads):
            raise InputError(f"`reads` must be one of {', '.join(get_args(Reads))}; got {self.reads!r:.60}.")

    def __call__(self, x: Tensor) -> Tensor:
        """Activations (token, feature) of states (token, channel)."""
        before = torch.nn.functional.linear(x, self.weight.to(x), self.bias.to(x))
        if self.threshold is not None:
            return torch.where(before > self.threshold.to(x), before, 0).relu()
        if self.k is not None:
            best = before.topk(min(self.k, before.shape[-1]), dim=-1)
            return torch.zeros_like(before).scatter(-1, best.indices, best.values.relu())
        return before.relu()


@dataclass(frozen=True, kw_only=True, eq=False)
class Dictionary:
    r"""Features of one component: what they read, and what they write.

    Attributes:
        encoders: One; for a cross-layer transcoder, one for each block that it reads.
        decoders: The write vectors (feature, channel) of each.
        bias: b_dec (channel,).
        component: What it decomposes: ``"feed-forward"`` or ``"attention"``.
        meta: Where it came from.
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
        """How many features it has."""
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
                return {n: _from_transcoder(load_file(path), n) for n, path in sorted(layers.items())}
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            if isinstance(error, InputError):
                raise
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

        if kind not in get_args(Kind):
            raise InputError(f"`kind` must be one of {', '.join(get_args(Kind))}; got {kind!r:.60}.")
        check_lens(lens)
        check_several(texts)
        x, y = gathered_states(lens, texts, check_whole(block, "block"))
        reads: Reads = "output" if kind == "dictionary" else "input"
        encoder, decoder, centre, share = trained_parts(
            y if kind == "dictionary" else x,
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
        if len(self.encoders) != 1:
            raise InputError("A cross-layer dictionary has no SAELens format; expected one that reads one block.")
        folder.mkdir(parents=True, exist_ok=True)
        (encoder,), (decoder,) = self.encoders, self.decoders
        tensors = {"W_enc": encoder.weight.T, "b_enc": encoder.bias, "W_dec": decoder, "b_dec": self.bias}
        tensors |= {} if encoder.threshold is None else {"threshold": encoder.threshold}
        plain = {name: one.detach().cpu().contiguous() for name, one in tensors.items()}
        hooks = {"output": "hook_mlp_out", "input": "ln2.hook_normalized", "stream": "hook_resid_mid"}
        part = "hook_attn_out" if self.component == "attention" else "hook_mlp_out"
        block = encoder.block or self.meta.get("block") or 0
        kind = "jumprelu" if encoder.threshold is not None else "standard" if encoder.k is None else "topk"
        config = {
            "architecture": f"{kind}{'' if encoder.reads == 'output' else '_transcoder'}",
            "d_in": encoder.weight.shape[1],
            "d_sae": len(encoder.weight),
            "dtype": str(encoder.weight.dtype).removeprefix("torch."),
            "apply_b_dec_to_input": False,
            "normalize_activations": "none",
            **({} if encoder.k is None else {"k": encoder.k}),
            "metadata": {
                "hook_name": f"blocks.{block}.{part if encoder.reads == 'output' else hooks[encoder.reads]}",
                "hook_name_out": f"blocks.{block}.{part}",
                "tensorlens": {key: value for key, value in self.meta.items() if isinstance(value, (str, int, float))},
            },
        }
        write_whole(folder / "sae_weights.safetensors", lambda path: save_file(plain, path))
        text = to_json(config, indent=2)
        write_whole(folder / "cfg.json", lambda path: path.write_text(text, encoding="utf-8"))
        return folder


def _from_saelens(folder: Path) -> Dictionary:
    config = json.loads((folder / "cfg.json").read_text("utf-8"))
    tensors = load_file(folder / "sae_weights.safetensors")
    more = config.get("metadata") or {}
    name = more.get("hook_name") or config.get("hook_name") or ""
    out = more.get("hook_name_out") or config.get("hook_name_out") or name
    if config.get("normalize_activations", "none") not in ("none", None):
        raise InputError(f"Expected a dictionary of unscaled states; this one rescales them ({folder.name}).")
    weight, bias = tensors["W_enc"].T.contiguous(), tensors["b_enc"]
    if config.get("apply_b_dec_to_input"):
        bias = bias - weight @ tensors["b_dec"]
    threshold, k = tensors.get("threshold"), config.get("k")
    k = k if k is not None else (config.get("activation_fn_kwargs") or {}).get("k")
    is_topk = "topk" in str(config.get("architecture")) or config.get("activation_fn_str") == "topk"
    if is_topk and k is None:
        raise InputError(f"Expected `k` in the cfg.json of a top-k dictionary; {folder.name!r} has none.")
    k = None if k is None or not is_topk or threshold is not None else int(k)
    encoder = Encoder(weight=weight, bias=bias, threshold=threshold, k=k, reads=_place(name, out))
    kind = "attention" if "attn" in out else "feed-forward"
    found = re.search(r"(\d+)", out)
    meta = {"format": "saelens", "hook": out} | ({"block": int(found[1])} if found else {})
    return Dictionary(
        encoders=(encoder,), decoders=(tensors["W_dec"],), bias=tensors["b_dec"], component=kind, meta=meta
    )


def _place(name: str, out: str) -> Reads:
    """Where features read, by the name of a hook of TransformerLens."""
    if "resid_pre" in out or "resid_post" in out or "hook_z" in out:
        raise InputError(
            f"{out!r} is not the output of a feed-forward or an attention; a dictionary of the stream itself "
            f"does not decompose a component."
        )
    if name == out:
        return "output"
    return "input" if name.endswith(("normalized", "mlp.hook_in")) else "stream"


def _transcoder(tensors: Mapping[str, Tensor], weight: str, bias: str, threshold: str, block: int) -> Encoder:
    """An encoder of circuit-tracer's: rows are features, which read the stream."""
    if "W_skip" in tensors:
        raise InputError("A transcoder with a skip connection is not a sum of features; expected one without.")
    least = tensors[threshold].flatten() if threshold in tensors else None
    return Encoder(weight=tensors[weight], bias=tensors[bias], threshold=least, block=block, reads="stream")


def _from_transcoder(tensors: Mapping[str, Tensor], n: int) -> Dictionary:
    encoder = _transcoder(tensors, "W_enc", "b_enc", "activation_function.threshold", n)
    meta = {"format": "circuit-tracer", "block": n}
    return Dictionary(encoders=(encoder,), decoders=(tensors["W_dec"],), bias=tensors["b_dec"], meta=meta)


def _from_cross_layer(folder: Path) -> dict[int, Dictionary]:
    """A cross-layer transcoder: the features of block l write to block l and every later one."""
    n = len(list(folder.glob("W_enc_*.safetensors")))
    read = [load_file(folder / f"W_enc_{i}.safetensors") for i in range(n)]
    write = [load_file(folder / f"W_dec_{i}.safetensors")[f"W_dec_{i}"] for i in range(n)]  # (feature, later, channel)
    encoders = [_transcoder(one, f"W_enc_{i}", f"b_enc_{i}", f"threshold_{i}", i) for i, one in enumerate(read)]
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
    """Dictionaries by block, or what is wrong with them."""
    if not isinstance(features, Mapping):
        raise InputError(f"`features` must be dictionaries by block, such as {{12: dictionary}}; got {features!r:.60}.")
    for block, one in features.items():
        if type(block) is not int or not 0 <= block < n_blocks or not isinstance(one, Dictionary):
            raise InputError(
                f"`features` must be a `Dictionary` for some of the blocks 0 to {n_blocks - 1}; got "
                f"{block!r:.40}: {one!r:.60}."
            )
    return dict(features)
