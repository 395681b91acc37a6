"""What `tensorlens map` asks: checked as early as possible, with defaults that answer the first question."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensorlens.app import options
from tensorlens.app.method_names import check_name
from tensorlens.errors import InputError, MethodError

if TYPE_CHECKING:
    from tensorlens.maps.token_map import TokenMap
    from tensorlens.tensor import AttentionTensor, Prediction

IN_CLASS, IN_OUT = "tensor.in_class", "tensor.in_out"
SUFFIXES = (".html", ".png", ".svg", ".pdf", ".json", ".csv", ".safetensors")
NORMS = ("frobenius", "spectral")
N_PREDICTIONS = 3
N_RANKED = 200
"""How many of the model's choices are looked at for a word that was meant."""


@dataclass(frozen=True, kw_only=True)
class Part:
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
    def read(cls, blocks: str | None, heads: list[str] | None, without_heads: list[str] | None) -> Part:
        """The options as they were written."""
        return cls(
            blocks=options.block_range(blocks),
            heads=options.head_choice(heads),
            without_heads=options.head_choice(without_heads),
        )

    def of(self, T: AttentionTensor) -> AttentionTensor:
        """That part of an operator; what does not exist is refused by it."""
        if self.blocks is not None:
            start, stop = self.blocks
            T = T.blocks(start, T.n_blocks if stop is None else stop)
        T = T.heads(self.heads) if self.heads else T
        return T.without_heads(self.without_heads) if self.without_heads else T


@dataclass(frozen=True, kw_only=True)
class MapQuestion:
    """A question with nothing left open: a method, an output or None for every one, a target or None."""

    method: str
    out_token: int | None
    target: Any


def check_method(name: str | None, target: Any, norm: str) -> None:
    """Refuse a method that does not exist or does not take what it was given, before a model is loaded."""
    if norm not in NORMS:
        raise InputError(f"`--norm` must be {' or '.join(NORMS)}; got {norm!r}.")
    if name is None:
        return
    check_name(name)
    if norm != NORMS[0] and name != "tensor.norm":
        raise MethodError(f"`--norm` is an option of tensor.norm; got it with {name}.")
    from tensorlens.maps.methods import METHODS

    if target is not None and not METHODS[name].takes_target:
        taking = [other for other, method in METHODS.items() if method.takes_target]
        raise MethodError(f"`{name}` takes no target; {' and '.join(taking)} does. Leave --target or --method out.")


def check_file(path: Path | None) -> None:
    """Refuse a file that could not be written, before a model is loaded."""
    if path is None:
        return
    if path.suffix.lower() not in SUFFIXES:
        raise InputError(f"`--out` must end in one of {' '.join(SUFFIXES)}; got {str(path)!r}.")
    if not path.parent.is_dir():
        raise InputError(f"`--out` must be in a folder that exists; there is no {str(path.parent)!r}.")


def first_question(T: AttentionTensor, method: str | None, out_token: int | None, target: Any) -> MapQuestion:
    """The question asked, with what was left open filled in; a position that does not exist is refused.

    Without a method it is the first question that people have: why did the model say this? That is In+Class at the
    last output, or at the masked token, where the blocks asked for reach a head; In+Out otherwise.
    """
    recording, classes = T.operator.recording, T.context.classes
    if method is None:
        reaches_head = classes is not None and T.operator.span.stop == recording.n_blocks
        method = IN_CLASS if reaches_head or target is not None else IN_OUT
        if method == IN_CLASS and out_token is None and not recording.pools:
            out_token = _masked(T)
    n_out = T.shape[0]
    if out_token is not None and not -n_out <= out_token < n_out:
        raise InputError(
            f"`--out-token` must be from {-n_out} to {n_out - 1} for these {n_out} outputs; got {out_token}."
        )
    return MapQuestion(method=method, out_token=out_token, target=target)


def _masked(T: AttentionTensor) -> int:
    """The position of the masked token, which a masked language model is asked about; otherwise the last."""
    mask = getattr(getattr(T.context.classes, "tokenizer", None), "mask_token", None)
    return T.out_tokens.index(mask) if mask in T.out_tokens else -1


def check_target(T: AttentionTensor, question: MapQuestion) -> str | None:
    """Refuse a target that the model does not know; a hint where another one is likely to be meant."""
    classes = T.context.classes
    if question.target is None or classes is None:
        return None
    hints = [_missing_space(T, question, one) for one in _targets(question) if isinstance(one, str)]
    try:
        classes.weights(question.target)
    except InputError as error:
        better = " ".join(hint for hint in hints if hint)
        if not better:
            raise
        # Only the sentence that says what is wrong: what follows it suggests the same, knowing less.
        raise InputError(f"{str(error).partition(' Did you mean')[0]} {better}") from None
    return " ".join(hint for hint in hints if hint) or None


def _missing_space(T: AttentionTensor, question: MapQuestion, target: str) -> str:
    """What to say of a word without its space, if with it the word is one token that is likelier to be meant."""
    tokenizer = getattr(T.context.classes, "tokenizer", None)
    spaced = f" {target}"
    if tokenizer is None or target[:1].isspace() or not _is_one_token(tokenizer, spaced):
        return ""
    said = T.predictions(k=N_RANKED, out_token=-1 if question.out_token is None else question.out_token)
    rank = {one.name: place for place, one in reversed([*enumerate(said)])}
    beside = any(str(other).startswith(" ") for other in _targets(question))
    if _is_one_token(tokenizer, target) and not beside and rank.get(spaced, N_RANKED) >= rank.get(target, N_RANKED):
        return ""
    known = {0: "is the model's first choice", N_RANKED: "is one token"}.get(rank.get(spaced, N_RANKED))
    return f"{spaced!r} {known or 'is likelier to the model'}; did you mean that?"


def _targets(question: MapQuestion) -> tuple[Any, ...]:
    return question.target if isinstance(question.target, tuple) else (question.target,)


def _is_one_token(tokenizer: Any, text: str) -> bool:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return len(ids) == 1 and tokenizer.decode(ids) == text


def predictions(T: AttentionTensor, question: MapQuestion) -> list[Prediction]:
    """What the model says at the output asked about; nothing if it has no head, or every output is asked about."""
    recording = T.operator.recording
    if T.context.classes is None or recording.readout is None or (question.out_token is None and not recording.pools):
        return []
    return T.predictions(k=N_PREDICTIONS, out_token=-1 if question.out_token is None else question.out_token)


def recommended(T: AttentionTensor, found: TokenMap) -> str | None:
    """The member of the family that ranks words better, for a map that asks about a word by the paper's.

    Where the model has gates, halving them is what helps; elsewhere that changes nothing, and attention has to move.
    """
    rules = found.meta.get("rules")
    if found.method != IN_CLASS or found.shape[0] != 1 or not isinstance(rules, dict):
        return None
    if (rules.get("attention"), rules.get("gate")) != ("hold", "freeze_gate"):
        return None
    has_gates = any(rule.startswith("gate: ") for rule, _ in T.operator.recording.rules_applied)
    return "half_gate" if has_gates else "attn_lrp"


def recommendation(T: AttentionTensor, found: TokenMap) -> str:
    """The same as a sentence with the option to give; nothing where nothing is recommended."""
    member = recommended(T, found)
    if member is None:
        return ""
    return f"Which word decided? --rules {member} ranked the deciding word higher on known evidence (docs/members.md)."
