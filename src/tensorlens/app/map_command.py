"""`tensorlens map`: the question is checked as early as possible, and what was left open is filled in."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

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
from tensorlens.app.printing import print_json, stage
from tensorlens.errors import InputError, MethodError
from tensorlens.recommendations import default_method, default_output, has_predictions
from tensorlens.views.captions import predicted

if TYPE_CHECKING:
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
    weights, note = read_targets(T, question)
    if note:
        typer.echo(f"tensorlens: {note}", err=True)
    if certify and question.method.startswith("tensor."):
        stage("Measuring the certificate")
        T.certificate()
    stage(f"Computing {question.method}")
    found = T.map(question.method, question.out_token, weights, norm=norm)  # type: ignore[arg-type]  # checked above
    found = found if aside else found.set_aside()
    found = found.words() if words else found  # pyright: ignore[reportAttributeAccessIssue]
    _deliver(T, question, found, out, as_json=json)


# Before a model is loaded ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ModelPart:
    """Which part of the model is asked for, before there is a model.

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
        """That part of an operator, which refuses blocks and heads that it does not have."""
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
    """A question with nothing left open: a method, an output or None for all of them, a target or None."""

    method: str
    out_token: int | None
    target: Any

    @classmethod
    def complete(cls, T: AttentionTensor, method: str | None, out_token: int | None, target: Any) -> MapQuestion:
        """The question asked, with what was left open filled in; a position that does not exist is refused."""
        n_out = T.shape[0]
        if out_token is not None and not -n_out <= out_token < n_out:
            raise InputError(
                f"`--out-token` must be from {-n_out} to {n_out - 1} for these {n_out} outputs; got {out_token}."
            )
        if method is None:
            from tensorlens.maps.defaults import METHOD

            method = default_method(T, target)
            if method != METHOD and out_token is None and not T.operator.recording.pools:
                out_token = default_output(T)
        return cls(method=method, out_token=out_token, target=target)

    def predictions(self, T: AttentionTensor, k: int) -> list[Prediction]:
        """What the model says at the output asked about: the last one if all are."""
        return T.predictions(k=k, out_token=-1 if self.out_token is None else self.out_token)

    @property
    def targets(self) -> tuple[Any, ...]:
        """The target, or both of a contrast."""
        return self.target if isinstance(self.target, tuple) else (self.target,)


def read_targets(T: AttentionTensor, question: MapQuestion) -> tuple[Any, str]:
    """The target on logits, and what was taken differently from how it was written; one it does not know is refused."""
    classes = T.context.classes
    if question.target is None or classes is None:
        return question.target, ""
    from tensorlens.maps.targets import read_target

    place = default_output(T) if question.out_token is None else question.out_token
    first, *others = question.targets
    asked = read_target(classes, first, others[0] if others else None, T.operator.recording.logits_at(place))
    return asked.weights, asked.note


# What is printed ------------------------------------------------------------------------------------------------------


def _deliver(T: AttentionTensor, question: MapQuestion, found: TokenMap, out: Path | None, *, as_json: bool) -> None:
    is_one = question.out_token is not None or T.operator.recording.pools
    said = question.predictions(T, N_PREDICTIONS) if is_one and has_predictions(T) else []
    if out is not None:
        found.save(out)
    if as_json:
        print_json(content(found) | {"predictions": [one._asdict() for one in said]})
        return
    if said:
        typer.echo(f"{predicted([(one.name, one.probability) for one in said])}\n")
    if out is None:
        found.show()  # and what it sums to
    else:
        for line in found.view().sums:
            typer.echo(f"{line[:1].upper()}{line[1:]}.")
        typer.echo(f"Wrote {out}")


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
