"""`tensorlens explain`, the front door, and `tensorlens map`, for those who choose the method.

Both print the answer first and its certificate afterwards. A question is checked as early as possible.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tensorlens.app import options
from tensorlens.app.options import (
    Certify,
    FinalNorm,
    Input,
    Json,
    LeftOut,
    LoadOptions,
    MapFile,
    Model,
    ModelOptions,
    OtherTarget,
    TargetName,
    check_method_name,
)
from tensorlens.app.printing import certified, map_content, print_json, save, show_map, stage, teller, while_waiting
from tensorlens.errors import InputError, MethodError, check_choice
from tensorlens.recommendations import QUESTIONS
from tensorlens.views.captions import is_of_tensor, predicted

if TYPE_CHECKING:
    from tensorlens.explanation import Explanation
    from tensorlens.maps.targets import MapQuestion
    from tensorlens.maps.token_map import TokenMap
    from tensorlens.tensor import AttentionTensor


Texts = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="TEXT",
        help="A text in quotes, the path of an image, or - for standard input.",
    ),
]
For = Annotated[
    str, typer.Option("--for", help=f"What to find: {', '.join(QUESTIONS[:-1])}; or paper, for the paper's rules.")
]
Tokens = Annotated[bool, typer.Option("--tokens", help="Use single tokens instead of whole words or sentences.")]


def explain_(
    model: Model,
    text: Texts = None,
    question: For = QUESTIONS[0],
    target: TargetName = None,
    against: OtherTarget = None,
    tokens: Tokens = False,
    out: MapFile = None,
    certify: Certify = True,
    json: Json = False,
    reading: LoadOptions = LoadOptions(),  # noqa: B008  # a frozen record
) -> None:
    """Why does the model say this? Headline, prediction, map, certificate.

    Example: tensorlens explain smollm2-135m "The Eiffel Tower is in the city of"
    """
    written = one_text(model, text or [])
    check_choice(question, "--for", QUESTIONS)
    reading.check(model)
    options.check_file(out, (".html", ".json", ".safetensors") if question == "component" else options.SUFFIXES)
    read = options.read_input(written)
    lens = reading.lens(model)
    with while_waiting("Recording one pass of the model"):
        e = lens.explain(read, question, options.number(target), options.number(against), tokens=tokens)
    say = teller(as_json=json)
    say("\n".join(e.lines()))
    with while_waiting("Computing the map"):
        e.map  # noqa: B018  # computed here
    if not json:
        e.show_map()
    if certify:
        with while_waiting("Measuring the certificate; --no-certify skips it"):
            line = e.badge()
        say(line)
    save(e, out, say)
    if json:
        print_json(_content(e))


def one_text(model: str, words: list[str]) -> str:
    """The text, if it is one argument; if quotes or the model are missing, an error with the command that works."""
    if len(words) == 1:
        return words[0]
    if any(" " in word for word in words):  # the text is quoted: a target is not, or there are two texts
        raise InputError(
            f"Expected one text after the model; got {len(words)}: {', '.join(map(repr, words))}. Put the text in "
            'quotes, and a target of several words too: --target "New York"'
        )
    if words:
        raise InputError(f'Put the text in quotes: tensorlens explain {model} "{" ".join(words)}"')
    if " " in model.strip():
        raise InputError(f'Name a model before the text: tensorlens explain smollm2-135m "{model}"')
    raise InputError(
        f'Expected a text after the model: tensorlens explain {model} "The Eiffel Tower is in the city of"'
    )


def _content(e: Explanation) -> dict[str, Any]:
    """Everything as plain values, without the picture."""
    meta = {key: value for key, value in e.map.meta.items() if key != "image"}
    return {
        "headline": e.headline,
        "prediction": None if e.prediction is None else e.prediction._asdict(),
        "rules": e.rules.as_dict(),
        "because": e.because,
        "note": e.note,
        "map": e.map.as_dict() | {"meta": meta},
    }


# Map ------------------------------------------------------------------------------------------------------------------

NORMS = ("frobenius", "spectral")
N_PREDICTIONS = 3

MethodName = Annotated[
    str | None,
    typer.Option(
        help="A method, see `tensorlens methods` (default: tensor.in_class for a model with a head, else "
        "tensor.in_out)."
    ),
]
Position = Annotated[
    int | None,
    typer.Option(help="Output position to explain (default: the last; all positions if --method is given)."),
]
Words = Annotated[
    bool | None,
    typer.Option(
        "--words/--tokens",
        help="One score per word or per token (default: words where scores add up, tokens in JSON and in data files).",
    ),
]


Aside = Annotated[bool, typer.Option(help="Exclude the first token from the colour scale when it dominates.")]


@dataclass(frozen=True, kw_only=True)
class PartOptions:
    """The part of the model that a map is about."""

    blocks: Annotated[str | None, typer.Option(help="A range of blocks, such as 3:9.")] = None
    heads: Annotated[
        list[str] | None, typer.Option(metavar="BLOCK:HEAD,…", help="Keep only these heads, such as 3:0,2. Repeatable.")
    ] = None
    without_heads: LeftOut = None

    def read(self) -> Callable[[AttentionTensor], AttentionTensor]:
        """A function that takes this part of an operator and refuses blocks and heads that do not exist."""
        span, kept = options.block_range(self.blocks), options.head_choice(self.heads)
        left_out = options.head_choice(self.without_heads)

        def part(T: AttentionTensor) -> AttentionTensor:
            if span is not None:
                T = T.blocks(span[0], T.n_blocks if span[1] is None else span[1])
            T = T.heads(kept) if kept else T
            return T.without_heads(left_out) if left_out else T

        return part


def map_(
    model: Model,
    input: Input,
    method: MethodName = None,
    target: options.TargetName = None,
    against: options.OtherTarget = None,
    out_token: Position = None,
    words: Words = None,
    aside: Aside = True,
    part: PartOptions = PartOptions(),  # noqa: B008  # a frozen record
    norm: Annotated[str, typer.Option(help="For tensor.norm: frobenius or spectral.")] = NORMS[0],
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
    part_of = part.read()
    first, second = options.two_targets(target, against)
    options.check_file(out)
    text = options.read_input(input)
    _check_method(method, first, norm)
    lens = reading.lens(model, final_norm=final_norm)
    from tensorlens.explanation import in_words
    from tensorlens.maps.targets import MapQuestion

    stage("Recording one pass of the model")
    T = part_of(lens(text))
    question = MapQuestion.complete(T, method, out_token, first, second)
    predictions = question.predictions(T, N_PREDICTIONS)
    say = teller(as_json=json)
    if predictions:
        say(f"{predicted([(one.name, one.probability) for one in predictions])}\n")
    certify = certify and is_of_tensor(question.method)
    if json and certify:  # it prints everything at once
        stage("Measuring the certificate")
        T.certificate()
    found = _found(T, question, norm, words, aside=aside)
    if not json:
        show_map(in_words(found) if words is None else found, say, is_saved=out is not None)
    found = certified(T, found, say) if certify else found
    is_picture = words is None and out is not None and out.suffix.lower() in (".png", ".svg", ".pdf")
    save(in_words(found) if is_picture else found, out, say)
    if json:
        print_json(map_content(found) | {"predictions": [one._asdict() for one in predictions]})


def _found(T: AttentionTensor, question: MapQuestion, norm: str, words: bool | None, *, aside: bool) -> TokenMap:
    """The map; prints how the target was read if that differs from how it was written."""
    told = question.headlined(T)
    if told is not None and told.asked.note:
        typer.echo(f"tensorlens: {told.asked.note}", err=True)
    stage(f"Computing {question.method}")
    found = question.answered(T, told, partial(T.map, norm=norm))  # type: ignore[arg-type]  # checked above
    found = found if aside else found.set_aside()
    if words:
        return found.words()
    return found.group("tokens") if words is False and "grid" not in found.meta else found


def _check_method(name: str | None, target: Any, norm: str) -> None:
    """Refuse a method that does not exist or does not take these options."""
    check_choice(norm, "--norm", NORMS)
    if name is None:
        return
    check_method_name(name)
    if norm != NORMS[0] and name != "tensor.norm":
        raise MethodError(f"`--norm` is an option of tensor.norm; got it with {name}.")
    from tensorlens.maps.methods import METHODS

    if target is not None and not METHODS[name].takes_target:
        taking = [other for other, method in METHODS.items() if method.takes_target]
        raise MethodError(f"`{name}` takes no target. Leave --target out, or choose {' or '.join(taking)}.")
