"""`tensorlens check`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

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

    from tensorlens.models.inputs import forward_parameters, tokenizer_of

    if tokenizer_of(lens.processor) is not None:
        return SENTENCE
    if "pixel_values" in forward_parameters(lens.model):
        size = getattr(lens.model.config, "image_size", 224)
        height, width = (size, size) if isinstance(size, int) else size
        return torch.randn(3, height, width, generator=torch.Generator().manual_seed(0))
    return list(range(1, 9))


def print_certificate(certificate: Certificate, title: str, console: Console | None = None) -> None:
    """Print a certificate: verdict, numbers, and the rules that fired."""
    console = console or Console(highlight=False)
    console.print(title, style="bold", markup=False)
    verdict = "exact and linear" if certificate.passed else "NOT CERTIFIED: " + ", ".join(certificate.failures)
    console.print(verdict, style="green" if certificate.passed else "bold red")
    for reservation in certificate.reservations:
        console.print(f"but: {reservation}", style="yellow", markup=False)
    numbers = Table("law", "relative error", "accepted", box=None, pad_edge=False)
    for law, error in certificate.errors.items():
        accepted = certificate.accepted(law)
        is_judged = law not in certificate.rounded
        style = "dim" if not is_judged else "" if error <= accepted else "bold red"
        numbers.add_row(law, f"{error:.1e}", f"{accepted:.0e}" if is_judged else "in float32", style=style)
    numbers.add_row("|T X| / |F(X)|", f"{certificate.carried:.3g}", "", style="dim")
    console.print(numbers)
    rules = Table("rule", "modules", "first module", box=None, pad_edge=False)
    for rule, modules in certificate.rules.items():
        rules.add_row(rule, str(len(modules)), modules[0])
    console.print(rules)
    for convention, modules in certificate.conventions.items():
        console.print(f"convention: {convention} in {len(modules)} modules, such as {modules[0]}", markup=False)
