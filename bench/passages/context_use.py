"""Context or memory: did the answer come from the context, or did the model know it?

For each country three prompts: a context that contradicts what the model knows, one about a country that does not
exist, and one that says nothing of it. Whether the context was used is known from the model's own answer. A map should
give the context more of the answer where it was used: units are prompts, and the score is the context's share.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import tensorlens as tl
from bench.passages.scores import RULES, bm25

CAPITALS = {
    **{
        "France": "Paris",
        "Italy": "Rome",
        "Germany": "Berlin",
        "Spain": "Madrid",
        "Japan": "Tokyo",
        "Russia": "Moscow",
    },
    **{"China": "Beijing", "Egypt": "Cairo", "Greece": "Athens", "Austria": "Vienna", "Poland": "Warsaw"},
    **{"Ireland": "Dublin", "Portugal": "Lisbon", "England": "London", "Cuba": "Havana", "Norway": "Oslo"},
}
INVENTED = ("Zandoria", "Marvania", "Quellia", "Brontovia", "Ostrania", "Velmora", "Trondania", "Kelvoria")
BESIDE = ("The train was late and the coffee was cold.", "The bus was early and the tea was hot.")


def prompts(number: int, country: str) -> Iterator[tuple[str, str, str, bool]]:
    """Context, question, expected answer, and whether that answer comes from the context."""
    cities = list(CAPITALS.values())
    other, invented = cities[(number + 5) % len(cities)], INVENTED[number % len(INVENTED)]
    for asked, context, answer, used in (
        (country, f"The government has moved: the capital of {country} is now {other}.", other, True),
        (invented, f"Far away, the capital of {invented} is {other}.", other, True),
        (country, BESIDE[number % len(BESIDE)], CAPITALS[country], False),
    ):
        yield context, f" The capital of {asked} is", f" {answer}", used


def lines(lens: tl.Lens, rules: Sequence[str] = RULES) -> Iterator[dict[str, Any]]:
    """One line per country; prompts that the model answers otherwise are left out."""
    n_made = 0
    for number, country in enumerate(CAPITALS):
        truth, scores = list[float](), dict[str, list[float]]()
        for context, question, answer, used in prompts(number, country):
            T = lens(context + question)
            best, second = T.predictions(2)
            if not answer.startswith(best.name):
                continue
            truth.append(float(used))
            for name in rules:
                found = lens.with_rules(name)(context + question).map("tensor.in_class", -1, (best.index, second.index))
                parts = found.group([("context", 0, len(context))]).scores[0]
                inside = float(parts[0]) - float(found.scores[0, 0])  # without the very first token
                scores.setdefault(name, []).append(inside / float(found.scores[0, 1:].abs().sum()))
            scores.setdefault("control: BM25", []).append(bm25(answer, [context, question])[0])
            scores.setdefault("control: length", []).append(float(len(context)))
        if len(set(truth)) == 2:
            name = f"context:{n_made}:{country}"  # numbered as they come, so both halves have as many
            yield {"judge": "context", "set": "capitals", "item": name, "truth": truth, "scores": scores}
            n_made += 1
