"""`tensorlens map`: checks the question as early as possible, and fills in its defaults."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer
from msgspec.structs import replace

from tensorlens.app import options
from tensorlens.app.method_names import check_method_name
from tensorlens.app.options import (
    Certify,
    FinalNorm,
    Input,
    Json,
    MapFile,
    Model,
    ModelOptions,
    OtherTarget,
    TargetName,
)
from tensorlens.app.printing import print_json, stage, while_waiting
from tensorlens.errors import InputError, MethodError
from tensorlens.recommendations import default_method, default_output, has_predictions
from tensorlens.views.captions import badge, predicted

if TYPE_CHECKING:
    from tensorlens.maps.headlines import Headlined
    from tensorlens.maps.token_map import TokenMap
    from tensorlens.tensor import AttentionTensor, Prediction

NORMS = ("frobenius", "spectral")
N_PREDICTIONS = 3

MethodName = Annotated[
    str | None,
    typer.Option(
        help="A method, see `tensorlens methods` (default: tensor.in_class for a model with a head, else "
        "tensor.in_out).",
        show_default=False,
    ),
]
Position = Annotated[
    int | None,
    typer.Option(help="Output position to explain (default: the last; all positions if --method is given)."),
]
Heads = Annotated[
    list[str] | None, typer.Option(metavar="BLOCK:HEAD,…", help="Keep only these heads, such as 3:0,2. Repeatable.")
]
WithoutHeads = Annotated[
    list[str] | None, typer.Option(metavar="BLOCK:HEAD,…", help="Leave these heads out, such as 3:0,2. Repeatable.")
]
Aside = Annotated[bool, typer.Option(help="Exclude the first token from the colour scale when it dominates.")]


def map_(
    model: Model,
    input: Input,
    method: MethodName = None,
    target: TargetName = None,
    against: OtherTarget = None,
    out_token: Position = None,
    words: Annotated[bool, typer.Option("--words", help="One score per word instead of one per token.")] = False,
    aside: Aside = True,
    blocks: Annotated[str | None, typer.Option(help="A range of blocks, such as 3:9.")] = None,
    heads: Heads = None,
    without_heads: WithoutHeads = None,
    norm: Annotated[str, typer.Option(help="For tensor.norm: frobenius or spectral.")] = "frobenius",
    certify: Certify = True,
    out: MapFile = None,
    json: Json = False,
    final_norm: FinalNorm = True,
    reading: ModelOptions = ModelOptions(),  # noqa: B008  # a frozen record
) -> None:
    """Which inputs made this output? A map in the terminal, or in a file.

    Example: tensorlens map smollm2-135m "The Eiffel Tower is in the city of"
    """
    reading.check(model)
    part = ModelPart.read(blocks, heads, without_heads)
    wanted = options.target_of(target, against)
    options.check_file(out)
    text = options.read_input(input)
    check_method(method, wanted, norm)
    lens = reading.lens(model, final_norm=final_norm)
    stage("Recording one pass of the model")
    T = part.of(lens(text))
    question = MapQuestion.complete(T, method, out_token, wanted)
    predictions = question.predictions(T, N_PREDICTIONS)
    say = _nothing if json else typer.echo
    if predictions:
        say(f"{predicted([(one.name, one.probability) for one in predictions])}\n")
    certify = certify and question.method.startswith("tensor.")
    if json and certify:  # which prints all at once
        stage("Measuring the certificate")
        T.certificate()
    found = _found(T, question, norm)
    found = found if aside else found.set_aside()
    found = found.words() if words else found
    _show(found, say, is_saved=out is not None, as_json=json)
    found = _certified(T, found, say) if certify else found
    if out is not None:
        say(f"Wrote {found.save(out)}")
    if json:
        print_json(content(found) | {"predictions": [one._asdict() for one in predictions]})


# Before a model is loaded ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ModelPart:
    """The selected part of the model, before the model is loaded.

    Attributes:
        blocks: First block and the one after the last, None for the end; None for all.
        heads: Heads to keep, by block.
        without_heads: Heads to leave out, by block.
    """

    blocks: tuple[int, int | None] | None
    heads: dict[int, list[int]]
    without_heads: dict[int, list[int]]

    @classmethod
    def read(cls, blocks: str | None, heads: list[str] | None, without_heads: list[str] | None) -> ModelPart:
        """The options as they were written."""
        return cls(
            blocks=options.block_range(blocks),
            heads=options.head_choice(heads),
            without_heads=options.head_choice(without_heads),
        )

    def of(self, T: AttentionTensor) -> AttentionTensor:
        """This part of an operator, which refuses blocks and heads that it does not have."""
        if self.blocks is not None:
            start, stop = self.blocks
            T = T.blocks(start, T.n_blocks if stop is None else stop)
        T = T.heads(self.heads) if self.heads else T
        return T.without_heads(self.without_heads) if self.without_heads else T


def check_method(name: str | None, target: Any, norm: str) -> None:
    """Refuse a method that does not exist or does not take what it was given."""
    if norm not in NORMS:
        raise InputError(f"`--norm` must be {' or '.join(NORMS)}; got {norm!r}.")
    if name is None:
        return
    check_method_name(name)
    if norm != NORMS[0] and name != "tensor.norm":
        raise MethodError(f"`--norm` is an option of tensor.norm; got it with {name}.")
    from tensorlens.maps.methods import METHODS

    if target is not None and not METHODS[name].takes_target:
        taking = [other for other, method in METHODS.items() if method.takes_target]
        raise MethodError(f"`{name}` takes no target; {' and '.join(taking)} does. Leave --target or --method out.")


# With a model ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class MapQuestion:
    """A complete question: a method, an output (None for all), and a target or None."""

    method: str
    out_token: int | None
    target: Any

    @classmethod
    def complete(cls, T: AttentionTensor, method: str | None, out_token: int | None, target: Any) -> MapQuestion:
        """Fill in the question's defaults; refuse a position that does not exist."""
        n_out = T.shape[0]
        if out_token is not None and not -n_out <= out_token < n_out:
            raise InputError(
                f"`--out-token` must be from {-n_out} to {n_out - 1} for these {n_out} outputs; got {out_token}."
            )
        if method is None:
            from tensorlens.maps.defaults import METHOD, has_one_row

            method = default_method(T, target)
            if method != METHOD and out_token is None and not has_one_row(T.operator.recording, method):
                out_token = default_output(T)
        return cls(method=method, out_token=out_token, target=target)

    def predictions(self, T: AttentionTensor, k: int) -> list[Prediction]:
        """The model's predictions at the chosen output; empty for all outputs, or for a model without a head."""
        is_one = self.out_token is not None or T.operator.recording.pools
        return T.predictions(k=k, out_token=self._place(T)) if is_one and has_predictions(T) else []

    def headlined(self, T: AttentionTensor) -> Headlined | None:
        """The resolved target and the headline, for a question about one output and a prediction."""
        from tensorlens.maps.headlines import headlined
        from tensorlens.maps.methods import METHODS

        is_one = self.out_token is not None or T.operator.recording.pools
        if not has_predictions(T) or not METHODS[self.method].takes_target or self.target is None and not is_one:
            return None
        first, *others = self.target if isinstance(self.target, tuple) else (self.target,)
        return headlined(T.operator.recording, T.context, self._place(T), first, others[0] if others else None)

    def _place(self, T: AttentionTensor) -> int:
        chosen = default_output(T) if self.out_token is None else self.out_token
        return 0 if T.operator.recording.pools else chosen % T.shape[0]


def _found(T: AttentionTensor, question: MapQuestion, norm: str) -> TokenMap:
    """The map with its headline; prints how the target was read if that differs from how it was written."""
    told = question.headlined(T)
    if told is not None and told.asked.note:
        typer.echo(f"tensorlens: {told.asked.note}", err=True)
    stage(f"Computing {question.method}")
    weights = question.target if told is None else told.asked.weights
    found = T.map(question.method, question.out_token, weights, norm=norm)  # type: ignore[arg-type]  # checked above
    return found if told is None else replace(found, meta=found.meta | told.meta)


def _certified(T: AttentionTensor, found: TokenMap, say: Callable[[str], None]) -> TokenMap:
    """The map with its certificate, which is also printed in one line."""
    with while_waiting("Measuring the certificate; --no-certify skips it"):
        certificate = T.certificate()
    say(f"C{badge(certificate.passed, certificate.errors)[1:]}")
    return replace(found, meta=found.meta | {"certificate": T.meta()["certificate"]})


# What is printed ------------------------------------------------------------------------------------------------------


def _nothing(text: str) -> None:
    """Print nothing: the output is JSON only."""


def _show(found: TokenMap, say: Callable[[str], None], *, is_saved: bool, as_json: bool) -> None:
    """Print the map before its certificate; if it goes to a file, print only its sum."""
    if as_json:
        return
    if is_saved:
        for line in found.view().sums:
            say(f"{line[:1].upper()}{line[1:]}.")
        return
    replace(found, meta={key: value for key, value in found.meta.items() if key != "certificate"}).show()


def content(found: TokenMap) -> dict[str, Any]:
    """A map as plain values, without its picture."""
    return {
        "method": found.method,
        "out_tokens": found.out_tokens,
        "in_tokens": found.in_tokens,
        "scores": found.scores.tolist(),
        "bias_share": found.bias_share.tolist(),
        "meta": {name: value for name, value in found.meta.items() if name != "image"},
    }
