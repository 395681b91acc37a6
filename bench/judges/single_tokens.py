r"""Single-token effects: one token is replaced, and the true change of the target is compared with the ranking.

The target is the model's own first choice t after a window of text. The effect of token j is
$\mathrm{logit}_t(X) - \frac1R\sum_r \mathrm{logit}_t(X^{(j \to r)})$, the mean over R tokens drawn from the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from torch import Tensor

from tensorlens.lens import Lens
from tensorlens.studies.datasets import read_dataset
from tensorlens.studies.judge_study import Item, Judge, last_logits
from tensorlens.studies.perturbation_study.samples import Texts

MEASURES = ("spearman", "pearson", "spearman_by_magnitude")
MOST_COPIES = 64
"""Replaced copies that run at a time."""


def single_tokens(
    lens: Lens, file: Path, *, limit: int | None = None, n_tokens: int = 32, n_draws: int = 3, seed: int = 0
) -> Judge:
    """The judge of windows of a text.

    Args:
        lens: The model, with its tokenizer.
        file: The text.
        limit: Windows at most.
        n_tokens: Tokens of a window.
        n_draws: Tokens that each is replaced by, in turn.
        seed: Seed of the draws.
    """
    texts = Texts(lens, read_dataset(file), cut="windows", n_tokens=n_tokens, min_tokens=n_tokens, limit=limit)
    samples = [texts.load(index) for index in range(len(texts))]
    windows = [(sample.name, tuple(sample.inputs["input_ids"][0].tolist()), sample.fixed) for sample in samples]
    pool = np.array(sorted(token for _, ids, fixed in windows for k, token in enumerate(ids) if k not in fixed))
    items = []
    for index, (name, ids, fixed) in enumerate(windows):
        places = [k for k in range(len(ids)) if k not in fixed]
        drawn = np.random.default_rng((seed, index)).choice(pool, (len(places), n_draws))
        items.append(
            Item(
                judge="single_tokens",
                set=file.parent.name,
                name=str(name),
                ids=ids,
                target=None,
                truth=None,
                units=tuple((k,) for k in places),
                labels=tuple(str(k) for k in places),
                right="always",
                extra={"drawn": drawn.tolist()},
            )
        )
    return Judge(name="single_tokens", question="removal", measures=MEASURES, items=tuple(items), truth=true_effects)


def true_effects(lens: Lens, item: Item, target: int, clean: Tensor) -> list[float]:
    """How much of the target's logit goes with each unit; `clean` are the logits of the item as it is."""
    copies: list[Sequence[int]] = []
    for (place,), drawn in zip(item.units, item.extra["drawn"], strict=True):
        copies += [(*item.ids[:place], token, *item.ids[place + 1 :]) for token in drawn]
    logits = [
        float(value)
        for start in range(0, len(copies), MOST_COPIES)
        for value in last_logits(lens, copies[start : start + MOST_COPIES])[:, target]
    ]
    return [float(clean[target]) - float(one) for one in np.array(logits).reshape(len(item.units), -1).mean(1)]
