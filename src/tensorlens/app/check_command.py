"""`tensorlens check`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from tensorlens.app import options
from tensorlens.app.options import FinalNorm, Json, Model, ModelOptions
from tensorlens.app.printing import print_json, while_waiting

if TYPE_CHECKING:
    from tensorlens.lens import Lens
    from tensorlens.operators.certificate import Certificate

SENTENCE = "The quick brown fox jumps over the lazy dog."


def check_(
    model: Model,
    input: Annotated[
        str | None,
        typer.Argument(metavar="INPUT", help="A text or the path of an image (default: an example sentence)."),
    ] = None,
    json: Json = False,
    final_norm: FinalNorm = True,
    reading: ModelOptions = ModelOptions(),  # noqa: B008  # a frozen record
) -> None:
    """Is the operator exact and linear for this model? Exits with 1 if it is not.

    Example: tensorlens check minilm "A sentence of your own."
    """
    text = None if input is None else options.read_input(input)
    lens = reading.lens(model, final_norm=final_norm)
    with while_waiting("Recording one pass of the model"):
        T = lens(default_input(lens) if text is None else text)
    with while_waiting("Measuring the certificate"):
        certificate = T.certificate()
    if json:
        content = {"model": lens.name, "n_tokens": T.n_tokens, "n_channels": T.n_channels, "n_blocks": T.n_blocks}
        print_json(content | certificate.as_dict())
    else:
        print_certificate(
            certificate, f"{lens.name}: {T.n_tokens} tokens × {T.n_channels} channels, {T.n_blocks} blocks"
        )
    raise typer.Exit(0 if certificate.passed else 1)


def default_input(lens: Lens) -> Any:
    """An input that any model of this kind can take."""
    import torch

    from tensorlens.models.forward_signature import forward_parameters
    from tensorlens.models.texts import tokenizer_of

    if tokenizer_of(lens.processor) is not None:
        return SENTENCE
    if "pixel_values" in forward_parameters(lens.model):
        size = getattr(lens.model.config, "image_size", 224)
        height, width = (size, size) if isinstance(size, int) else size
        return torch.randn(3, height, width, generator=torch.Generator().manual_seed(0))
    return list(range(1, 9))


def print_certificate(certificate: Certificate, title: str) -> None:
    """Print a certificate: verdict, numbers, the rules that fired, and conventions."""
    typer.echo(f"{title}\n{certificate}")
    for convention, modules in certificate.conventions.items():
        typer.echo(f"convention: {convention} in {len(modules)} modules, such as {modules[0]}")
