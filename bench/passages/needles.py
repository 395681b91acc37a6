"""Needles: which method finds the sentence that an answer stands on?

    python -m bench.passages.needles --model smollm2-135m --needles FOLDER --wikitext FILE --out needles.jsonl
    python -m bench.passages.needles --show needles.*.jsonl

Sentences of data/needles are hidden in sentences of WikiText; every second item holds a decoy, the answer's words in a
sentence that says nothing. The model answers, and only answers that hold the needle's words are explained.
"""

import argparse
import time
from typing import Any

import tensorlens as tl
from bench.passages import run as passage_run
from bench.passages.needle_items import Item, items
from bench.passages.run import Row, mean, place, recall
from bench.tables import markdown

REFERENCE = "T (paper)"


def main() -> None:
    parser = passage_run.command_line(__doc__, 40)
    parser.add_argument("--lengths", nargs="+", type=int, default=[512, 2048, 8192])
    arguments = parser.parse_args()
    if arguments.show:
        print(table(passage_run.read(arguments.show)))
        return
    lens, scores = tl.load(arguments.model, dtype=arguments.dtype), passage_run.scores_of(arguments)
    rows = passage_run.run(arguments, lens, asked(lens, arguments), lambda lens, item: measured(lens, item, scores))
    print(table(rows))


def asked(lens: tl.Lens, arguments: argparse.Namespace) -> list[Item]:
    """For each length as many items with one needle as with several, in turn."""
    found = []
    for length in arguments.lengths:
        kinds = [
            items(arguments.needles, arguments.wikitext, kind, arguments.items // 2, lens.processor, length)
            for kind in ("single", "several")
        ]
        found += [item for pair in zip(*kinds, strict=True) for item in pair]
    return found


def measured(lens: tl.Lens, item: Item, scores: dict[str, Any]) -> Row:
    """What the model answers, and what each method gives the sentences if it used a needle."""
    began = time.perf_counter()
    found = lens.answer(item.messages(), max_new_tokens=48)
    used = item.used(found.text)
    row: Row = {
        "length": item.n_tokens,
        "answer": found.text,
        "tokens": found.n_prompt_tokens,
        "answer_tokens": len(found.ids),
        "sentences": len(item.sentences),
        "needles": list(item.needles),
        "used": used,
        "decoys": list(item.decoys),
        "answer_s": time.perf_counter() - began,
    }
    passages = item.passages(found.prompt.text)
    return row | {"methods": passage_run.explained(lens, found, passages, scores) if used else {}}


def placed(row: Row, scores: list[float]) -> tuple[float, float, float]:
    """Recall at 1 and 5 and rank of the needles, each among the sentences that are no needle and itself."""
    others = [k for k in range(len(scores)) if k not in row["needles"]]
    each = [
        (recall(scores, k, 1, [*others, k]), recall(scores, k, 5, [*others, k]), place(scores, k, [*others, k])[0])
        for k in row["used"]
    ]
    at_1, at_5, rank = (sum(values) / len(each) for values in zip(*each, strict=True))
    return at_1, at_5, rank


def decoy_first(row: Row, scores: list[float]) -> bool:
    """Whether a decoy stands before every needle."""
    best = min(place(scores, k)[0] for k in row["used"])
    return any(place(scores, k)[0] < best for k in row["decoys"])


def table(rows: list[Row]) -> str:
    """By length and method, with the paired difference to the paper's T on the items that both have."""
    head = (
        "tokens",
        "right of asked",
        "with decoy",
        "method",
        "recall@1",
        "less the paper's T",
        "recall@5",
        "mean rank",
        "@1 with decoy",
        "decoy before needle",
        "s",
        "forward",
        "backward",
    )
    lines = []
    for length in sorted({row["length"] for row in rows}):
        here = [row for row in rows if row["length"] == length]
        for name in passage_run.methods_of(here):
            some = [row for row in here if "scores" in row["methods"].get(name, {})]
            lines.append([str(length), f"{len(some)} of {len(here)}", *_cells(some, name)])
    return markdown([dict(zip(head, line, strict=True)) for line in lines])


def _cells(rows: list[Row], name: str) -> list[str]:
    of = [row["methods"][name] for row in rows]
    at_1, at_5, rank = zip(*(placed(row, one["scores"]) for row, one in zip(rows, of, strict=True)), strict=True)
    both = [k for k, row in enumerate(rows) if "scores" in row["methods"].get(REFERENCE, {})]
    base = [placed(rows[k], rows[k]["methods"][REFERENCE]["scores"])[0] for k in both]
    hard = [k for k, row in enumerate(rows) if row["decoys"]]
    return [
        str(len(hard)),
        name,
        mean(at_1),
        passage_run.less([at_1[k] for k in both], base),
        mean(at_5),
        mean(rank, 1),
        mean([at_1[k] for k in hard]),
        str(sum(decoy_first(rows[k], of[k]["scores"]) for k in hard)),
        mean([one["seconds"] for one in of[1:] or of]),
        mean([one["forward"] for one in of], 0),
        mean([one["backward"] for one in of], 0),
    ]


if __name__ == "__main__":
    main()
