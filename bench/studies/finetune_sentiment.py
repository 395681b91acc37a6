"""Fine-tune a small encoder on the IMDB sample for sentiment; says its accuracy on reviews it has not seen.

    python -m bench.studies.finetune_sentiment --data DATA --out MODEL [--weights PATH]

Writes the model, `heldout.csv` (the reviews left out) and `accuracy.json` into MODEL.
"""

from __future__ import annotations

import argparse
import csv
import random
from pathlib import Path

import torch
from transformers import AutoModelForSequenceClassification

import tensorlens as tl
from tensorlens.strict_json import to_json, write_json


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with imdb/reviews.csv")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--weights", default="minilm", help="bundled name or folder of the encoder")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--heldout", type=int, default=1200, help="reviews left out of the training")
    parser.add_argument("--limit", type=int, help="reviews in all, for a trial")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    random.seed(options.seed)
    torch.manual_seed(options.seed)
    rows = list(csv.DictReader((options.data / "imdb" / "reviews.csv").open(encoding="utf-8", newline="")))
    random.shuffle(rows)
    rows = rows[: options.limit]
    n_heldout = min(options.heldout, len(rows) // 2)
    heldout, training = rows[:n_heldout], rows[n_heldout:]
    lens = tl.load(options.weights)
    device = lens.model.device
    options.out.mkdir(parents=True, exist_ok=True)
    lens.model.save_pretrained(options.out)
    labels = {0: "negative", 1: "positive"}
    model = AutoModelForSequenceClassification.from_pretrained(options.out, num_labels=2, id2label=labels).to(device)
    train(model, lens.processor, training, options.epochs)
    found = {
        "accuracy": accuracy(model, lens.processor, heldout),
        "n_training": len(training),
        "n_heldout": len(heldout),
        "epochs": options.epochs,
        "seed": options.seed,
        "torch": torch.__version__,
        "device": str(device),
    }
    model.save_pretrained(options.out)
    lens.processor.save_pretrained(options.out)
    with (options.out / "heldout.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(heldout[0]))
        writer.writeheader()
        writer.writerows(heldout)
    write_json(options.out / "accuracy.json", found)
    print(to_json(found))


def batches(rows: list[dict[str, str]], tokenizer, device, size: int):
    for start in range(0, len(rows), size):
        part = rows[start : start + size]
        texts = [row["review"] for row in part]
        inputs = tokenizer(texts, truncation=True, max_length=128, padding=True, return_tensors="pt").to(device)
        yield inputs, torch.tensor([int(row["sentiment"]) for row in part], device=device)


def train(model, tokenizer, rows: list[dict[str, str]], epochs: int) -> None:
    model.train()
    optimiser = torch.optim.AdamW(model.parameters(), lr=5e-5, weight_decay=0.01)
    n_steps = epochs * -(-len(rows) // 32)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 5e-5, total_steps=n_steps, pct_start=0.1)
    for _ in range(epochs):
        random.shuffle(rows)
        for inputs, labels in batches(rows, tokenizer, model.device, 32):
            loss = torch.nn.functional.cross_entropy(model(**inputs).logits, labels)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
            schedule.step()
            optimiser.zero_grad()
    model.eval()


@torch.no_grad()
def accuracy(model, tokenizer, rows: list[dict[str, str]]) -> float:
    right = sum(
        int((model(**inputs).logits.argmax(-1) == labels).sum())
        for inputs, labels in batches(rows, tokenizer, model.device, 128)
    )
    return right / len(rows)


if __name__ == "__main__":
    main()
