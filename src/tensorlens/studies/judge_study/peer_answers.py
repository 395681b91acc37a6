"""The answers of the peers, put beside our own: the same weights, tokens, targets and units."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from itertools import chain, zip_longest
from typing import Any

from tensorlens.lens import Lens
from tensorlens.studies.judge_study.items import Item
from tensorlens.studies.judge_study.options import JudgeOptions
from tensorlens.studies.judge_study.peers import OF_COMPONENTS, Peer, save_model
from tensorlens.studies.judge_study.scoring import unit_sums
from tensorlens.studies.runs import Run


def ask_peers(
    lens: Lens, run: Run, items: Sequence[Item], records: list[dict[str, Any]], options: JudgeOptions
) -> dict[str, Any]:
    """Ask every peer about the items that the model gets right, and put its scores into the records.

    Returns:
        For each peer its version, what its own example gave, how many items it answered, and its error.
    """
    if not options.peers:
        return {}
    of_tokens, of_components = (_questions(items, records, options.peer_limit, which) for which in (False, True))
    model = run.folder / "peers" / "model"
    save_model(lens, model)
    peers = [
        Peer(name, run.folder / "peers", options.peer_python, options.peer_seconds, options.peer_total_seconds)
        for name in options.peers
    ]
    with ThreadPoolExecutor(options.peer_workers) as pool:  # each waits for a process
        asked = [
            pool.submit(copy_context().run, peer.run, model, of_components if peer.name in OF_COMPONENTS else of_tokens)
            for peer in peers
        ]
        found = {peer.name: one.result() for peer, one in zip(peers, asked, strict=True)}
    for name, one in found.items():
        for record in records:
            answer = one["answers"].get(record["index"] + 1)
            if answer is not None:
                _put(record, name, items[record["index"]], answer)
    return {name: one["about"] | {"n": len(one["answers"])} for name, one in found.items()}


def _put(record: dict[str, Any], name: str, item: Item, answer: dict[str, Any]) -> None:
    """A peer's answer beside ours, or why there is none."""
    scores, of_components = answer.get("scores"), name in OF_COMPONENTS
    n, asked = (len(record["labels"]), "components") if of_components else (len(item.ids), "tokens")
    if "error" in answer:
        record["missing"][name] = answer["error"]
    elif not isinstance(scores, list) or len(scores) != n:
        given = len(scores) if isinstance(scores, list) else "no"
        record["missing"][name] = f"it gave {given} scores for {n} {asked}"
    else:
        record["scores"][name] = scores if of_components else unit_sums(item, scores)
        record["seconds"][name] = answer["seconds"]


def _questions(
    items: Sequence[Item], records: Sequence[dict[str, Any]], limit: int | None, of_components: bool
) -> list[dict[str, Any]]:
    """What peers are asked; index 0 is theirs to speak about themselves. The sets in turn: a peer may be ended."""
    of_set: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for record in records:
        item = items[record["index"]]
        if item.model == "" and (item.judge == "patching") == of_components and "left_out" not in record:
            of_set.setdefault((item.judge, item.set), []).append(record)
    in_turn = chain.from_iterable(zip_longest(*(some[:limit] for some in of_set.values())))
    return [_question(items[record["index"]], record) for record in in_turn if record is not None]


def _question(item: Item, record: dict[str, Any]) -> dict[str, Any]:
    asked = {"index": record["index"] + 1, "ids": item.ids}
    if item.judge == "patching":
        weights = list(item.extra["weights"].items())
        return asked | {"corrupted": item.extra["corrupted"], "weights": weights, "labels": record["labels"]}
    target = record["target"]
    return asked | {"target": list(target) if isinstance(target, (tuple, list)) else [target], "units": item.units}
