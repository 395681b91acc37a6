"""Captions: all text beside a map, for page, terminal and figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tensorlens.views.labels import shorten, visible

FIRST = ("target", "model", "blocks", "heads", "certificate", "rules", "versions")
"""Keys of `meta` that are printed first, in this order; others follow in their own order."""

NOT_SAID = frozenset(
    ("grid", "image", "pictures", "standard_error", "out_positions", "offsets", "causal", "answer_parts", "kept")
    + ("set_aside", "sink", "sink_gives", "sums_to", "why", "headline")
)
"""Keys of `meta` that are drawn, not printed."""

BY_OUTPUT = ("target", "logit", "standard_error", "out_positions", "sink_gives", "kept")
"""Keys of `meta` that may hold a list with one entry for each output."""


def is_by_output(key: str, value: Any, n_out: int) -> bool:
    """Whether `value` is a list of one entry for each output."""
    return key in BY_OUTPUT and isinstance(value, (list, tuple)) and len(value) == n_out


def row_caption_lines(meta: Mapping[str, Any], n_out: int) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Names with one printed value for each output."""
    keys = [key for key in meta if is_by_output(key, meta[key], n_out) and key not in NOT_SAID]
    return tuple((_title(key), tuple(_plain(value) for value in meta[key])) for key in keys)


MOST_LISTED, MOST_CHARACTERS = 12, 300
"""Numbers of list entries, and of characters of a text, that are printed."""

NOT_DERIVED = "not derived from T"
"""The text in place of a certificate for a baseline or a control."""


BIAS = "Bias share"
BIAS_UNKNOWN = "not known for this method"


def title_of(method: str, meta: Mapping[str, Any], *, is_answer: bool, n_out: int) -> str:
    """The title of a map: the question that it answers, or its method if it has no target."""
    if is_answer:
        against = meta.get("against")
        answer, text = str(meta.get("answer", "")), str(meta.get("text", ""))
        where = after(text.removesuffix(answer)) if text.removesuffix(answer).strip() else ""
        return why_headline(" ".join(answer.split()), None, None if against is None else str(against).strip(), where)
    target = meta.get("target")
    is_said = isinstance(meta.get("headline"), str) or isinstance(meta.get("why"), Mapping)
    has_target = is_said or n_out == 1 and isinstance(target, str)
    return headline_of(meta, str(target)) if has_target else method


def headline_of(meta: Mapping[str, Any], target: str) -> str:
    """The headline of a result about a target: its own, that of the explanation, or else the target's name."""
    if isinstance(meta.get("headline"), str):
        return meta["headline"]
    known = meta.get("why")
    if isinstance(known, Mapping) and isinstance(known.get("target"), str):
        chance, against, where = (known.get(name) for name in ("probability", "against", "where"))
        return why_headline(
            known["target"],
            float(chance) if chance is not None and _is_number(chance) else None,
            against if isinstance(against, str) else None,
            where if isinstance(where, str) else "",
        )
    first, _, second = target.partition(" − ")
    return why_headline(first, None, second or None, "")


def why_headline(target: str, probability: float | None, against: str | None, where: str) -> str:
    """The headline of an explanation: Why “ Paris” (70 %) rather than “ London” after “… in the city of”?

    Args:
        target: What is explained.
        probability: The model's probability, if the target is one token or class.
        against: The contrast target.
        where: The place, as text of `after` or `within`.
    """
    chance = "" if probability is None else f" ({percent(probability)})"
    contrast = "" if against is None else f" rather than “{shorten(visible(against), 60)}”"
    return f"Why “{shorten(visible(target), 60)}”{chance}{contrast}{where and f' {where}'}?"


LAST_WORDS = 4
"""Number of words that a headline quotes before a prediction."""


def after(text: str) -> str:
    """The place of a next token: after the last words before it."""
    words = text.split()
    quoted = " ".join(words[-LAST_WORDS:])[-40:]
    return f"after “{'… ' if quoted != ' '.join(words) else ''}{visible(quoted)}”"


def within(text: str) -> str:
    """The place of a class or a masked token: the text, by its first words."""
    return f"in “{shorten(visible(' '.join(text.split())), 60)}”"


def percent(share: float) -> str:
    """A probability as text."""
    return f"{share:.0%}".replace("%", " %") if share >= 0.01 else "below 1 %"


def predicted(pairs: Sequence[tuple[str, float]]) -> str:
    """The model's predictions in one sentence, the likeliest first."""
    first, *others = (f"“{visible(name)}” ({percent(probability)})" for name, probability in pairs)
    return f"The model says {first}, then {' or '.join(others)}." if others else f"The model says {first}."


def badge(passed: bool, errors: Mapping[str, float]) -> str:
    """A certificate in one line."""
    numbers = ", ".join(
        f"{law} {error:.0e}".replace("e-0", "e-") if error else f"{law} 0" for law, error in errors.items()
    )
    return f"certificate {'passed' if passed else 'FAILED'}: {numbers}"


def bias_line(bias_share: np.ndarray) -> tuple[tuple[str, str], ...]:
    """The bias share of the outputs, in one line for all of them; empty if it is not known."""
    known = bias_share[np.isfinite(bias_share)]
    if not known.size:
        return ()
    if known.size == 1:
        return ((BIAS, _percent(known[0])),)
    low, high, middle = map(_percent, (known.min(), known.max(), np.median(known)))
    return ((BIAS, f"{low} to {high}, median {middle}"),)


def bias_by_output(bias_share: np.ndarray) -> tuple[str, tuple[str, ...]]:
    """The same with a text for each output."""
    texts = [f"{round(1000 * s) / 10 + 0:.1f} % of this output" if np.isfinite(s) else BIAS_UNKNOWN for s in bias_share]
    return BIAS, tuple(texts)


def _percent(share: float) -> str:
    return f"{round(float(share), 3) + 0:.1%}"  # no minus before a zero


def is_of_tensor(method: str) -> bool:
    """Whether a method's maps are of T itself, so that a certificate of T applies to them."""
    return method.startswith("tensor.")


def sum_lines(
    sums: np.ndarray, bias_share: np.ndarray, meta: Mapping[str, Any], aside: Sequence[tuple[str, np.ndarray]] = ()
) -> tuple[str, ...]:
    """The sum of each row that explains a logit, in words: inputs + bias = logit.

    Args:
        sums: (out,) the sum of the scores of each row.
        bias_share: (out,) the share of the bias.
        meta: The map's `meta`.
        aside: Label and scores (out,) of each input that is outside the colour scale.
    """
    logits: Any = meta.get("logit")
    if not is_by_output("logit", logits, len(sums)) or not all(map(_is_number, logits)):
        return ()
    target = str(meta.get("target"))
    explained = "the logit difference" if " − " in target else "the sum of logits" if " + " in target else "the logit"
    lines, what = [], meta["sums_to"] if isinstance(meta.get("sums_to"), str) else explained
    for i, (total, share, logit) in enumerate(zip(sums, bias_share, logits, strict=True)):
        bias = share * logit
        line = f"inputs sum to {_fixed(total)}; the bias gives {_fixed(bias)}; {what} is {_fixed(logit)}"
        is_whole = abs(total + bias - logit) <= 0.005 + 0.001 * abs(logit)
        sink = sink_given(meta, len(sums))
        if (aside or sink) and is_whole:
            own = [(label, float(scores[i])) for label, scores in aside]
            line = _sum_with_aside(float(total), float(bias), float(logit), what, meta, own, sink[i] if sink else None)
        lines.append(line if is_whole else f"{line} with all heads, {_fixed(total + bias)} with those kept")
    return tuple(lines)


def sink_given(meta: Mapping[str, Any], n_out: int) -> tuple[float, ...]:
    """The contribution of a held attention sink to each output; empty if none is held."""
    given: Any = meta.get("sink_gives")
    is_known = is_by_output("sink_gives", given, n_out) and all(map(_is_number, given))
    return tuple(map(float, given)) if is_known else ()


def _sum_with_aside(
    total: float,
    bias: float,
    logit: float,
    what: str,
    meta: Mapping[str, Any],
    aside: Sequence[tuple[str, float]],
    sink: float | None,
) -> str:
    """The sum in two parts: inputs in the colour scale, and inputs outside it. A sink is named only if measured."""
    called = "set aside" if "set_aside" in meta else "the first token"
    grouped = meta.get("grouped", "tokens")
    grouped = "passages" if grouped == "answer" else grouped
    shown = grouped if grouped in ("tokens", "words", "sentences", "lines", "passages") else "groups"
    line = f"the {shown} shown give {_fixed(total - sum(own for _, own in aside))} of {_fixed(logit)}, {what}"
    named = [(f"“{visible(label).strip()}”, {called},", own) for label, own in aside]
    named += [] if sink is None else [("an attention sink", sink)]
    for name, own in named:
        share = f" ({own / logit:.0%})".replace("%", " %") if logit and 0 < own / logit <= 1 else ""
        line += f"; {name} {_fixed(own)}{share}"
    bias -= sink or 0.0
    return line if _fixed(bias) == "0.00" else f"{line}; the bias {_fixed(bias)}"


def _is_number(value: Any) -> bool:
    """Whether a value is a number that a float can hold: a file may contain others."""
    return isinstance(value, float) or isinstance(value, int) and abs(value) < 1e300


def _fixed(value: float) -> str:
    """Two decimals, no minus before a zero."""
    return f"{round(float(value), 2) + 0:.2f}".replace("-", "−") if np.isfinite(value) else "unknown"


def caption_lines(method: str, meta: Mapping[str, Any], n_out: int) -> tuple[tuple[str, str], ...]:
    """Names and values to print beside a map: the method first, then what is known about its origin."""
    meta = {key: value for key, value in meta.items() if not is_by_output(key, value, n_out)}
    known = [key for key in FIRST if key in meta]
    others = [key for key in meta if key not in FIRST and key not in NOT_SAID]
    lines = [("Method", method)]
    for key in known + others:
        text = _PRINTED.get(key, _plain)(meta[key])
        if key == "certificate" and not is_of_tensor(method):
            text = NOT_DERIVED
        if text:
            lines.append((_title(key), text))
    return tuple(lines)


def _title(key: str) -> str:
    return key.replace("_", " ").capitalize()


def _verdict(certificate: Any) -> str:
    if certificate is None:
        return "not checked"
    if not isinstance(certificate, Mapping) or "passed" not in certificate:
        return _plain(certificate)
    numbers = _plain(certificate.get("errors"))
    return ("passed" if certificate["passed"] else "FAILED") + (f" ({numbers})" if numbers else "")


def _range(blocks: Any) -> str:
    """A range of blocks as Python writes it, so that it can be given back to `--blocks`."""
    is_pair = isinstance(blocks, (list, tuple)) and len(blocks) == 2 and all(type(k) is int for k in blocks)
    return f"{blocks[0]}:{blocks[1]}" if is_pair else _plain(blocks)


def _plain(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, Mapping):
        has_lists = any(isinstance(inner, (list, tuple)) for inner in value.values())
        between, after = ("; ", ":") if has_lists else (", ", "")
        return between.join(f"{key}{after} {_plain(inner)}" for key, inner in value.items())
    if isinstance(value, (list, tuple)):
        if len(value) > 2 and all(type(k) is int for k in value) and value == [*range(value[0], value[0] + len(value))]:
            return f"{value[0]} to {value[-1]}"
        more = f", … ({len(value)} in all)" if len(value) > MOST_LISTED else ""
        return ", ".join(_plain(inner) for inner in value[:MOST_LISTED]) + more
    if isinstance(value, bool):
        return "yes" if value else "no"
    text = f"{value:.3g}" if isinstance(value, float) else str(value)
    return f"“{text}”" if text != text.strip() else text


UNSEEN = "not known, so the picture is not shown: the processor does more than scale and crop it"
"""The note for a picture in which the places of the patches are not known."""


def _part(seen: Any) -> str:
    """Which part of a picture the model sees; nothing for the whole."""
    if seen is None:
        return UNSEEN
    if not isinstance(seen, (list, tuple)) or len(seen) != 4 or not all(map(_is_number, seen)):
        return _plain(seen)
    left, top, right, bottom = (f"{100 * edge:.0f} %" for edge in seen)
    return "" if tuple(seen) == (0, 0, 1, 1) else f"{left} to {right} of the width, {top} to {bottom} of the height"


_PRINTED: dict[str, Callable[[Any], str]] = {
    "certificate": _verdict,
    "blocks": _range,
    "text": lambda text: shorten(_plain(text), MOST_CHARACTERS),  # its tokens are in the map
    "seen": _part,
}
"""Formats for values that need one of their own."""
