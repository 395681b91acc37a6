"""Peers: other packages asked the same questions, each in a process of its own.

A peer never shares our process: some change the classes of transformers for good, others need other versions. The
process is given a folder with the model and a file of items (tokens, target, units) and writes one line per item. A
peer that is missing, hangs or crashes is listed with its error, and the others continue.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from itertools import chain, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensorlens.files import write_whole
from tensorlens.lens import Lens
from tensorlens.models.texts import tokenizer_of
from tensorlens.studies.judge_study import unit_sums
from tensorlens.studies.runs import Run, as_line, read_record, whole_lines

if TYPE_CHECKING:
    from bench.judges.engine import BenchItem
    from bench.judges.run import BenchOptions

PEERS = (
    "lxt.attn_lrp",
    "lxt.cp_lrp",
    "captum.integrated_gradients",
    "captum.feature_ablation",
    "inseq.input_x_gradient",
    "flashtrace",
    "context_cite",
    "transformer_lens",
)
"""Every peer by name: the package, and its method where it has several."""

OF_COMPONENTS = ("transformer_lens",)
"""Those that are asked which component; the others are asked which word or passage."""

START_SECONDS, ITEM_SECONDS = 600.0, 300.0
"""How long a peer may take to load and to check itself, and then for one item, before it is given up."""
LINES_BEFORE = 2
"""Lines that a peer writes about itself before it is asked anything."""
SCRIPT = Path(__file__).with_name("peer_process.py")


def save_model(lens: Lens, folder: Path) -> None:
    """The model and its tokenizer as files that transformers reads, for other processes."""
    if not (folder / "config.json").is_file():
        lens.model.save_pretrained(folder)  # type: ignore[operator]
        tokenizer: Any = tokenizer_of(lens.processor)
        tokenizer.save_pretrained(folder)


class Peer:
    """One peer on one run's items.

    Args:
        name: A name in `PEERS`.
        folder: Where its files go.
        python: Interpreter of its environment; this one's if None.
        tell: Is told how many items it has answered.
    """

    def __init__(
        self, name: str, folder: Path, python: str | None = None, tell: Callable[[str], None] = lambda said: None
    ) -> None:
        self.name, self.folder, self.python, self.tell = name, folder, python or sys.executable, tell
        self.output = folder / f"{name}.jsonl"

    def run(self, model: Path, questions: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Ask for what is not answered yet.

        Returns:
            `answers` by index (`scores` of units, `seconds`), and `about`: version, check, error.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        done = self._answers()["answers"]
        wanted = [one for one in questions if one["index"] not in done]
        if wanted:
            asked = self.folder / f"{self.name}.questions.jsonl"
            write_whole(asked, "".join(map(as_line, wanted)))
            error = self._process(model, asked, len(wanted))
            found = self._answers()
            return found if error is None else found | {"about": found["about"] | {"error": error}}
        return self._answers()

    def _process(self, model: Path, asked: Path, n: int) -> str | None:
        """Run the peer's process; the reason if it did not end well."""
        log = self.folder / f"{self.name}.log"
        command = [self.python, "-W", "ignore", str(SCRIPT), self.name, str(model), str(asked), str(self.output)]
        try:
            with log.open("wb") as said:
                process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT)
        except OSError as error:
            return f"could not be started: {error}"
        try:
            return self._watch(process, log, n)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()

    def _watch(self, process: subprocess.Popen, log: Path, n: int) -> str | None:
        first = size = self._n_lines()
        patience, deadline = START_SECONDS, time.monotonic() + START_SECONDS
        while process.poll() is None:
            if self._n_lines() != size:
                size = self._n_lines()
                self.tell(f"{self.name}: {max(0, size - first - LINES_BEFORE)} of {n} items done")
                patience = ITEM_SECONDS if size - first >= LINES_BEFORE else START_SECONDS
                deadline = time.monotonic() + patience
            if time.monotonic() > deadline:
                return f"gave nothing for {patience:g} seconds and was ended"
            time.sleep(0.1)
        if process.returncode == 0:
            return None
        lines = log.read_text("utf-8", "replace").strip().splitlines()
        return lines[-1][:300] if lines else f"ended with exit code {process.returncode}"

    def _n_lines(self) -> int:
        return sum(1 for _ in whole_lines(self.output))

    def _answers(self) -> dict[str, Any]:
        answers: dict[int, dict[str, Any]] = {}
        about: dict[str, Any] = {}
        for _, line in whole_lines(self.output):
            try:
                record = read_record(line)
            except ValueError:
                continue
            if record["index"] == 0 and isinstance(record.get("about"), dict):
                about = record["about"]
            elif record["index"]:
                answers[record["index"]] = record
        return {"answers": answers, "about": about}


def ask_peers(
    lens: Lens,
    run: Run,
    items: Sequence[BenchItem],
    records: list[dict[str, Any]],
    options: BenchOptions,
    tell: Callable[[str], None],
) -> dict[str, Any]:
    """Ask every peer about the items that the model gets right, and put its scores into the records.

    Their own scores are kept too, as samples in the folder ``peers``, from which `bench keep` takes them.

    Returns:
        For each peer its version, what its own example gave, how many items it answered, and its error.
    """
    if not options.peers:
        return {}
    tell(f"asking {', '.join(options.peers)}, each in a process of its own")
    of_tokens, of_components = (_questions(items, records, options.peer_limit, which) for which in (False, True))
    model = run.folder / "peers" / "model"
    save_model(lens, model)
    found = {}
    for name in options.peers:
        peer = Peer(name, run.folder / "peers", options.peer_python, tell)
        found[name] = one = peer.run(model, of_components if name in OF_COMPONENTS else of_tokens)
        for record in records:
            answer = one["answers"].get(record["index"] + 1)
            if answer is not None:
                _put(record, name, items[record["index"]], answer)
    own = [
        record | {"scores": {name: some for name, some in record["scores"].items() if name in found}}
        for record in records
        if "scores" in record
    ]
    run.write_text("peers/samples.jsonl", "".join(map(as_line, own)))
    return {name: one["about"] | {"n": len(one["answers"])} for name, one in found.items()}


def _put(record: dict[str, Any], name: str, item: BenchItem, answer: dict[str, Any]) -> None:
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


def _questions(
    items: Sequence[BenchItem], records: Sequence[dict[str, Any]], limit: int | None, of_components: bool
) -> list[dict[str, Any]]:
    """What peers are asked; index 0 is theirs to speak about themselves. The sets in turn: a peer may be ended."""
    of_set: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for record in records:
        item = items[record["index"]]
        if item.model == "" and (item.judge == "patching") == of_components and "left_out" not in record:
            of_set.setdefault((item.judge, item.set), []).append(record)
    in_turn = chain.from_iterable(zip_longest(*(some[:limit] for some in of_set.values())))
    return [_question(items[record["index"]], record) for record in in_turn if record is not None]


def _question(item: BenchItem, record: dict[str, Any]) -> dict[str, Any]:
    asked = {"index": record["index"] + 1, "ids": item.ids}
    if item.judge == "patching":
        weights = list(item.extra["weights"].items())
        return asked | {"corrupted": item.extra["corrupted"], "weights": weights, "labels": record["labels"]}
    target = record["target"]
    return asked | {"target": list(target) if isinstance(target, (tuple, list)) else [target], "units": item.units}
