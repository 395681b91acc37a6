"""`tensorlens map`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from tensorlens.app import options
from tensorlens.app.options import AttentionBackend, Device, Dtype, FinalNorm, Gate, Json, Model, TrustRemoteCode
from tensorlens.maps.token_map import TokenMap
from tensorlens.tensor import AttentionTensor


def map_(
    model: Model,
    input: Annotated[
        str, typer.Argument(help="A text, the path of an image, or - for standard input.", show_default=False)
    ],
    method: Annotated[str, typer.Option(help="A method; `tensorlens methods` lists them.")] = "tensor.in_out",
    target: Annotated[str | None, typer.Option(help="For tensor.in_class: a token, id or class label.")] = None,
    against: Annotated[str | None, typer.Option(help="The other target of a contrast.")] = None,
    out_token: Annotated[
        int | None, typer.Option(help="Position of the output to explain; every one if not given.")
    ] = None,
    blocks: Annotated[str | None, typer.Option(help="A range of blocks, such as 3:9.")] = None,
    heads: Annotated[list[str] | None, typer.Option(help="Keep only these heads: BLOCK:HEAD,HEAD. Repeatable.")] = None,
    without_heads: Annotated[
        list[str] | None, typer.Option(help="Leave these heads out: BLOCK:HEAD,HEAD. Repeatable.")
    ] = None,
    norm: Annotated[str, typer.Option(help="For tensor.norm: frobenius or spectral.")] = "frobenius",
    certify: Annotated[bool, typer.Option(help="Measure the certificate and put it beside the map.")] = True,
    out: Annotated[
        Path | None, typer.Option(help="File to write, by suffix: .html .png .svg .pdf .json .csv .safetensors.")
    ] = None,
    json: Json = False,
    device: Device = None,
    dtype: Dtype = None,
    attention: AttentionBackend = None,
    gate: Gate = "freeze_gate",
    final_norm: FinalNorm = True,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Which inputs made this output? A map in the terminal, or in a file.

    Example: tensorlens map smollm2-135m "The Eiffel Tower is in the city of" --method tensor.in_class --out-token -1
    """
    lens = options.load_lens(
        model, device=device, dtype=dtype, attention=attention, gate=gate, final_norm=final_norm,
        trust_remote_code=trust_remote_code,
    )  # fmt: skip
    T = lens(options.read_input(input))
    T = _part(T, blocks, heads or [], without_heads or [])
    if certify:
        T.certificate()
    found = T.map(method, out_token, options.target_of(target, against), norm=norm)  # type: ignore[arg-type]
    _deliver(found, out, as_json=json)


def _part(T: AttentionTensor, blocks: str | None, heads: list[str], without_heads: list[str]) -> AttentionTensor:
    span = options.block_range(blocks, T.n_blocks)
    T = T if span is None else T.blocks(*span)
    T = T.heads(options.head_choice(heads)) if heads else T
    return T.without_heads(options.head_choice(without_heads)) if without_heads else T


def _deliver(found: TokenMap, out: Path | None, *, as_json: bool) -> None:
    if out is not None:
        found.save(out)
    if as_json:
        typer.echo(_json(found))
    elif out is not None:
        typer.echo(f"Wrote {out}")
    else:
        found.show()


def _json(found: TokenMap) -> str:
    import json

    content: dict[str, Any] = {
        "method": found.method,
        "out_tokens": found.out_tokens,
        "in_tokens": found.in_tokens,
        "scores": found.scores.tolist(),
        "bias_share": found.bias_share.tolist(),
        "meta": {name: value for name, value in found.meta.items() if name != "image"},
    }
    return json.dumps(content, ensure_ascii=False)
