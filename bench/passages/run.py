"""What the studies of passages share: their command line, a run that continues where it stopped, every method measured.

A line of the output is one item: what the model answered, and where the answer is what was hoped for, the raw scores of
the passages by every method, so that each number of a table can be computed again.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import tensorlens as tl
from bench.passages.scores import SCORES, Passages, Score
from bench.tables import ranged
from tensorlens.studies.intervals import interval, short
from tensorlens.studies.judge_study import now, reason_of

Row = dict[str, Any]


def command_line(description: str | None, n_items: int) -> argparse.ArgumentParser:
    """The options that every study of passages has."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--needles", type=Path, help="folder with single.json and several.json")
    parser.add_argument("--wikitext", type=Path, help="a text file")
    parser.add_argument("--out", type=Path, help="lines of JSON; a run with the same file continues")
    parser.add_argument("--items", type=int, default=n_items)
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no item after this long")
    parser.add_argument("--part", default="0/1", help="K/N: every N-th item from the K-th on, for N processes at once")
    parser.add_argument("--dtype", default=None)
    parser.add_argument("--leave-out", nargs="*", default=[], choices=SCORES, help="methods that would take too long")
    parser.add_argument("--peers", nargs="*", default=[], help="packages of others: flashtrace, context-cite")
    parser.add_argument(
        "--peers-alone", action="store_true", help="no methods but the peers; --show puts files together"
    )
    parser.add_argument("--show", nargs="*", type=Path, help="only the table of these files")
    return parser


def scores_of(arguments: argparse.Namespace) -> dict[str, Score]:
    """The methods asked for."""
    left_out = SCORES if arguments.peers_alone else arguments.leave_out
    found = {name: score for name, score in SCORES.items() if name not in left_out}
    if arguments.peers:
        from bench.passages.peers import PEERS

        found |= {name: PEERS[name] for name in arguments.peers}
    return found


def run(
    arguments: argparse.Namespace, lens: tl.Lens, asked: Sequence[Any], measure: Callable[[tl.Lens, Any], Row]
) -> list[Row]:
    """Measure the items that the file does not hold yet, each named by its `name`, until time is up."""
    began, (first, step) = time.time(), (int(one) for one in arguments.part.split("/"))
    rows = read([arguments.out])
    arguments.out.write_text("".join(map(_line, rows)), "utf-8")  # without the line that a stopped run cut off
    known = {row["item"] for row in rows}
    for item in asked[first::step]:
        if time.time() - began > arguments.seconds:
            break
        if item.name not in known:
            rows.append({"item": item.name, **measure(lens, item)})
            with arguments.out.open("a", encoding="utf-8") as file:
                file.write(_line(rows[-1]))
    print(f"{len(rows)} of {len(asked[first::step])} items in {time.time() - began:.0f} s on {lens.model.device}")
    return rows


def _line(row: Row) -> str:
    return json.dumps(row, allow_nan=False) + "\n"


def read(files: Sequence[Path]) -> list[Row]:
    """The rows of some files, the methods of an item put together; a line that was cut off is left out."""
    found: dict[str, Row] = {}
    for file in files:
        for line in file.read_text("utf-8").splitlines() if file.is_file() else ():
            try:
                row = json.loads(line)
            except ValueError:
                continue
            before = found.get(row["item"])
            if before is not None and before["answer"] == row["answer"]:
                row["methods"] = before["methods"] | row["methods"]
            found[row["item"]] = row
    return list(found.values())


def explained(lens: tl.Lens, found: Any, passages: Passages, scores: dict[str, Score]) -> dict[str, Row]:
    """What each method gives the passages, how long it took and how often the model ran; or why it gives nothing."""
    return dict(_each(lens, found, passages, scores))


def _each(lens: tl.Lens, found: Any, passages: Passages, scores: dict[str, Score]) -> Iterator[tuple[str, Row]]:
    for name, score in scores.items():
        began = now()
        try:
            given, forward, backward = score(lens, found, passages)
        except (tl.TensorLensError, RuntimeError, ValueError) as error:  # one method must not end the others
            yield name, {"error": reason_of(error)}
            continue
        cost = {"seconds": round(now() - began, 4), "forward": forward, "backward": backward}
        yield name, cost | {"scores": [short(one, 7) for one in given]}


def place(scores: Sequence[float], wanted: int, among: Sequence[int] | None = None) -> tuple[float, int, int]:
    """The expected rank of one passage, ties in random order; how many are above it, and how many share its place."""
    others = [scores[k] for k in (range(len(scores)) if among is None else among)]
    above, level = sum(one > scores[wanted] for one in others), sum(one == scores[wanted] for one in others)
    return 1 + above + (level - 1) / 2, above, level


def recall(scores: Sequence[float], wanted: int, k: int, among: Sequence[int] | None = None) -> float:
    """The chance that a passage is among the first k."""
    _, above, level = place(scores, wanted, among)
    return min(1.0, max(0.0, (k - above) / level))


def methods_of(rows: Sequence[Row]) -> list[str]:
    """Every method that has scores somewhere, in the order in which they were asked."""
    return list(dict.fromkeys(name for row in rows for name, one in row["methods"].items() if "scores" in one))


def less(values: Sequence[float], others: Sequence[float], n_resamples: int = 5000) -> str:
    """The mean paired difference with its 95 % bootstrap interval."""
    if not values:
        return "–"
    gaps = np.subtract(values, others)
    draws = np.random.default_rng(0).integers(len(gaps), size=(n_resamples, len(gaps)))
    return ranged(float(gaps.mean()), *interval(gaps[draws].mean(1)), "+.2f")


def mean(values: Sequence[float], digits: int = 2) -> str:
    """A mean, or a dash where there is none."""
    return f"{sum(values) / len(values):.{digits}f}" if values else "–"
