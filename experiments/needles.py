"""Needles: which method finds the sentence that an answer stands on?

    python experiments/needles.py --model smollm2-135m --needles FOLDER --wikitext FILE --out needles.json

Sentences of data/needles are hidden in sentences of WikiText; every second item holds a decoy, the answer's words in a
sentence that says nothing. The model answers, and only answers that hold the needle's words are explained. Written
after each item, so that a run that is stopped keeps what it found.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from needle_items import Item, items
from passage_scores import SCORES, place, recall

import tensorlens as tl


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--needles", required=True, type=Path)
    parser.add_argument("--wikitext", required=True, type=Path)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--lengths", nargs="+", type=int, default=[512, 2048, 8192])
    parser.add_argument("--items", type=int, default=40, help="of each length, half of them with several needles")
    parser.add_argument("--minutes", type=float, default=1e9, help="stop after this long")
    parser.add_argument("--dtype", default=None)
    parser.add_argument("--leave-out", nargs="*", default=[], choices=SCORES, help="methods that would take too long")
    parser.add_argument("--peers", nargs="*", default=[], help="packages of others: flashtrace, context-cite")
    arguments = parser.parse_args()
    for name in arguments.leave_out:
        del SCORES[name]
    for name in arguments.peers:
        from needle_peers import PEERS

        SCORES[name] = PEERS[name]
    lens, began, rows = tl.load(arguments.model, dtype=arguments.dtype), time.time(), []
    asked = [
        (length, item)
        for length in arguments.lengths
        for pair in zip(*(_items(lens, arguments, kind, length) for kind in ("single", "several")), strict=True)
        for item in pair
    ]
    for length, item in asked:
        if time.time() - began > 60 * arguments.minutes:
            break
        rows.append({"item": item.name, "length": length} | measured(lens, item))
        arguments.out.write_text(json.dumps({"asked": len(asked), "rows": rows}, indent=1, allow_nan=False))
    print(table(rows))
    print(f"{len(rows)} of {len(asked)} items in {time.time() - began:.0f} s on {next(lens.model.parameters()).device}")


def _items(lens: tl.Lens, arguments: Any, kind: str, length: int) -> list[Item]:
    return items(arguments.needles, arguments.wikitext, kind, arguments.items // 2, lens.processor, length)


def measured(lens: tl.Lens, item: Item) -> dict[str, Any]:
    """What the model answers, and where each method puts the needles that it used."""
    began = time.perf_counter()
    found = lens.answer(item.messages(), max_new_tokens=48)
    used = item.used(found.text)
    row: dict[str, Any] = {
        "answer": found.text, "tokens": found.n_prompt_tokens, "answer_tokens": len(found.ids),
        "sentences": len(item.sentences), "used": used, "decoys": len(item.decoys),
        "answer_s": time.perf_counter() - began, "methods": {},
    }  # fmt: skip
    if used:
        passages = item.passages(found.prompt.text)
        for name, score in SCORES.items():
            _wait()
            began = time.perf_counter()
            scores, forward, backward = score(lens, found, passages)
            _wait()
            row["methods"][name] = {
                "seconds": time.perf_counter() - began, "forward": forward, "backward": backward,
                **placed(scores, used, [k for k in range(len(scores)) if k not in item.needles]),
                "decoy_first": [place(scores, k)[0] < min(place(scores, j)[0] for j in used) for k in item.decoys],
            }  # fmt: skip
    return row


def placed(scores: list[float], used: list[int], others: list[int]) -> dict[str, float]:
    """Recall and rank of the needles, each among the sentences that are no needle and itself."""
    each = [
        (recall(scores, k, 1, [*others, k]), recall(scores, k, 5, [*others, k]), place(scores, k, [*others, k])[0])
        for k in used
    ]
    return dict(
        zip(
            ("recall_1", "recall_5", "rank"),
            (sum(values) / len(each) for values in zip(*each, strict=True)),
            strict=True,
        )
    )


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def table(rows: list[dict[str, Any]]) -> str:
    names = ("tokens", "right of asked", "with decoy", "method", "recall@1", "recall@5", "mean rank", "@1 with decoy")
    names += ("decoy before needle", "s", "forward", "backward")
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    for length in sorted({row["length"] for row in rows}):
        here = [row for row in rows if row["length"] == length]
        right = [row for row in here if row["methods"]]
        decoyed = [row for row in right if row["decoys"]]
        for name in SCORES:
            if not right:
                continue
            of = [row["methods"][name] for row in right]
            hard = [row["methods"][name] for row in decoyed]
            cells = [
                str(length), f"{len(right)} of {len(here)}", str(len(decoyed)), name, _mean(of, "recall_1"),
                _mean(of, "recall_5"), _mean(of, "rank", 1), _mean(hard, "recall_1"),
                f"{sum(any(one['decoy_first']) for one in hard)}",
                _mean(of[1:] or of, "seconds"), _mean(of, "forward", 0), _mean(of, "backward", 0),
            ]  # fmt: skip
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _mean(rows: list[dict[str, Any]], key: str, digits: int = 2) -> str:
    return f"{sum(row[key] for row in rows) / len(rows):.{digits}f}" if rows else "–"


if __name__ == "__main__":
    main()
