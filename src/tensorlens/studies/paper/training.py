"""Fine-tuning for sentiment: the models of the paper's Table 2 are measured after it, in the same command."""

from __future__ import annotations

import random
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from msgspec import structs

from tensorlens.errors import InputError
from tensorlens.files import from_json, to_json, write_json
from tensorlens.models.foreign_files import foreign_reader
from tensorlens.studies.datasets import Dataset
from tensorlens.studies.paper.protocol import Training
from tensorlens.studies.perturbation_samples import class_index
from tensorlens.studies.processes import Processes
from tensorlens.studies.runs import POLL_SECONDS

LABELS = {0: "negative", 1: "positive"}
LINE_SECONDS = 30.0
RECORD = "trained.json"
Pair = tuple[str, int]


def check_training(model: str, options: Training, *parts: Dataset) -> None:
    """Refuse a model that is not to be trained, and labels that are not sentiments."""
    if not options.epochs:
        raise InputError(
            f"{model} has no head for sentiment; the paper fine-tunes it before measuring. Set training.epochs in "
            "the protocol to 1 or more, or pass a model that was trained with --model."
        )
    for part in parts:
        _pairs(part, None)


def trained(
    model: Path, data: Dataset, held_out: Dataset, folder: Path, options: Training, *, seed: int, device: torch.device
) -> dict[str, Any]:
    """Train a classifier of sentiment into `folder`, unless it is there already, and return the facts about it.

    Args:
        model: Folder of the model without a head.
        data: Labelled reviews to train on.
        held_out: Labelled reviews to say its accuracy on.
        folder: Where it goes, whole or not at all.
        options: How.
        seed: Random seed for the order of reviews and the head.
        device: Where it runs.
    """
    about = {"model": str(model), "seed": seed, "data": data.fingerprint, **structs.asdict(options)}
    record = folder / RECORD
    while not (Processes.from_environment().is_first or record.is_file()):  # the first process trains
        time.sleep(POLL_SECONDS)
    if record.is_file():
        known = from_json(record.read_bytes())
        if {name: known.get(name) for name in about} == from_json(to_json(about)):
            return known
        raise InputError(
            f"The model in {str(folder)!r} was trained with different settings. Choose another folder for the run."
        )
    rows, unseen = (_pairs(one, options.limit) for one in (data, held_out))
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    random.seed(seed)
    torch.manual_seed(seed)
    names = {"id2label": LABELS, "label2id": {name: i for i, name in LABELS.items()}}
    with foreign_reader(lambda said: f"{model}: the checkpoint could not be read: {said}"):
        tokenizer = AutoTokenizer.from_pretrained(model)
        made = AutoModelForSequenceClassification.from_pretrained(model, num_labels=2, dtype=torch.float32, **names)
    made.to(device)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    made.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    _train(made, tokenizer, rows, options)
    found = about | {"n_training": len(rows), "n_held_out": len(unseen)}
    found["accuracy"] = _accuracy(made, tokenizer, unseen, options)
    folder.parent.mkdir(parents=True, exist_ok=True)
    begun = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(begun, ignore_errors=True)
    made.save_pretrained(begun)
    tokenizer.save_pretrained(begun)
    write_json(begun / RECORD, found)
    begun.rename(folder)
    return found


def _pairs(data: Dataset, limit: int | None) -> list[Pair]:
    given = data.labels or ()
    labels = [class_index(label, None, ("0", "1")) for label in given]
    wrong = [label for label, number in zip(given, labels, strict=True) if number not in LABELS]
    if wrong or not labels:
        got = repr(wrong[0]) if wrong else "none"
        raise InputError(f"Fine-tuning for sentiment needs labels 0 and 1, or neg and pos; got {got}.")
    return list(zip(data.items, labels, strict=True))[:limit]  # type: ignore[arg-type]


def _batches(rows: Sequence[Pair], tokenizer: Any, device: Any, options: Training) -> Iterator[tuple[Any, Any]]:
    for start in range(0, len(rows), options.batch_size):
        texts, labels = zip(*rows[start : start + options.batch_size], strict=True)
        inputs = tokenizer(list(texts), truncation=True, max_length=options.n_tokens, padding=True, return_tensors="pt")
        yield inputs.to(device), torch.tensor(labels, device=device)


def _train(model: Any, tokenizer: Any, rows: list[Pair], options: Training) -> None:
    model.train()
    n_steps = options.epochs * -(-len(rows) // options.batch_size)
    optimiser = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimiser, options.learning_rate, total_steps=max(2, n_steps), pct_start=0.1
    )
    began = last = time.monotonic()
    step = 0
    for _ in range(options.epochs):
        random.shuffle(rows)
        for inputs, labels in _batches(rows, tokenizer, model.device, options):
            loss = torch.nn.functional.cross_entropy(model(**inputs).logits.float(), labels)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
            schedule.step()
            optimiser.zero_grad()
            step += 1
            if time.monotonic() - last > LINE_SECONDS or step == 1:
                last = time.monotonic()
                sys.stderr.write(f"training: step {step} of {n_steps}, loss {loss.item():.3f}, {last - began:.0f} s\n")
    model.eval()


@torch.no_grad()
def _accuracy(model: Any, tokenizer: Any, rows: Sequence[Pair], options: Training) -> float:
    right = sum(
        int((model(**inputs).logits.argmax(-1) == labels).sum())
        for inputs, labels in _batches(rows, tokenizer, model.device, options)
    )
    return right / len(rows)
