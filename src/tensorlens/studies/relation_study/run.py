"""Relation decoding as a run: every relation, every split, every method, the paper's second evaluation (section 4.2).

One sample of the run is one split of one relation. What a method is called says where it starts: ``tensor.full@0`` is
the mean operator of the whole model, ``lre.fixed@embedding`` is LRE on the token embedding as in the paper.
"""

from __future__ import annotations

import random
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

import torch
from msgspec import structs
from torch import Tensor

from tensorlens.errors import InputError, TensorLensError
from tensorlens.lens import Lens
from tensorlens.models.runner import own_modes
from tensorlens.models.texts import tokenizer_of
from tensorlens.studies.options import Options, chosen_options
from tensorlens.studies.plain_model import read_out
from tensorlens.studies.relation_study.decoding import (
    EMBEDDING,
    LocalLinear,
    Predictor,
    Start,
    Tuned,
    expand_locally,
    lre_predictor,
    run_prompts,
    tensor_predictors,
    tune_scale,
)
from tensorlens.studies.relation_study.prompts import (
    Fact,
    FactSplit,
    Problem,
    Relation,
    RelationPrompt,
    Tokens,
    align,
    chance,
    is_prefix_match,
    load_relations,
    long_objects,
    majority,
    query_text,
    split_facts,
    testing_prompts,
    training_prompts,
)
from tensorlens.studies.relation_study.report import relation_report, relation_summary
from tensorlens.studies.runs import Run, StudyResult, model_settings, reason_of

LRE_SCALE = 2.5
"""LRE's fixed β."""
SCALES = tuple(i / 4 for i in range(21))
"""LRE's grid: 21 points on [0, 5]."""


class RelationOptions(Options, frozen=True, kw_only=True):
    """Everything a relation run depends on besides model and data.

    Attributes:
        n_train: m, the number of examples in the mean; the prompt of each example contains the other m - 1.
        n_splits: Splits into training and test, each with a seed of its own.
        seed: Seed of the first split.
        top_k: Test facts are kept if the object's first token is among the model's `top_k`.
        min_test: Test facts that a split needs to be scored; at least half of the splits must be scored.
        max_test: Largest number of test facts per split, drawn at random.
        test_examples: Examples in a test prompt: ``m-1``, as in training, or all ``m``. A mean needs prompts of one
            length, so with ``m`` training prompts contain all m too, including their own fact.
        starts: Blocks to start from; 0 is the whole model.
        scales: The values that β is tuned over.
        with_lre: Whether to run LRE, which costs as much as the slices.
        limit: Largest number of relations per category; all if None.
        categories: Only these; all if None.
    """

    n_train: int = 3
    n_splits: int = 6
    seed: int = 0
    top_k: int = 20
    min_test: int = 3
    max_test: int = 100
    test_examples: Literal["m-1", "m"] = "m-1"
    starts: tuple[int, ...] = (0,)
    scales: tuple[float, ...] = SCALES
    with_lre: bool = True
    limit: int | None = None
    categories: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        self.check_positive("n_train", "n_splits", "top_k", "min_test", "max_test", "limit")
        if self.test_examples not in ("m-1", "m"):
            raise InputError(f"Expected `test_examples` to be m-1 or m; got {self.test_examples!r}.")
        self.check_positive("seed", least=0)
        if not self.starts or min(self.starts) < 0:
            raise InputError(f"`starts` must name at least one block to start from, such as (0,); got {self.starts}.")


@own_modes
def relations(
    lens: Lens,
    data: str | Path,
    out: str | Path,
    *,
    options: RelationOptions | None = None,
    progress: bool | None = None,
    **changes: Any,
) -> StudyResult:
    """Decode relations with the mean attention tensor, LRE and controls, and write a run.

    Args:
        lens: A causal language model with its tokenizer.
        data: Folder of relation files, by category.
        out: Folder of the run: config, samples, summary, figures, report. An interrupted run is resumed.
        options: Splits, filters, starts, scales; see `RelationOptions`.
        progress: Whether to show a bar; None shows it in a terminal.
        **changes: Single options by name, such as ``limit=1``, instead of a record or over it.

    Returns:
        The summary, with accuracies by relation and category and what was left out and why, and where everything is.
    """
    chosen = chosen_options(RelationOptions, options, changes)
    every, problems = load_relations(data, chosen.categories)
    found = _limited(every, chosen.limit)
    decoder = _Decoder(lens, chosen)
    # The options that select relations may differ when a run is resumed.
    settings = {name: one for name, one in structs.asdict(chosen).items() if name not in ("limit", "categories")}
    about = {"relations": {relation.key: relation.digest for relation in found}, "options": settings}
    run = Run(out, "relations", model_settings(decoder.lens) | about)
    plan = [(relation, split) for relation in found for split in range(chosen.n_splits)]
    run.work([[i] for i in range(len(plan))], lambda group: [decoder.measure(*plan[i]) for i in group], progress)
    return run.finish(
        len(plan),
        lambda records: relation_summary(records, decoder.described(problems, found), chosen.min_test),
        relation_report,
    )


def _limited(relations: list[Relation], limit: int | None) -> list[Relation]:
    kept: dict[str, list[Relation]] = {}
    for relation in relations:
        kept.setdefault(relation.category, []).append(relation)
    return [relation for group in kept.values() for relation in group[:limit]]


class _Decoder:
    """Measures one split of one relation."""

    def __init__(self, lens: Lens, options: RelationOptions) -> None:
        rules = replace(lens.rules, include_final_norm=False)
        self.lens = Lens(lens.model, lens.processor, rules=rules, blocks=lens.anatomy.stack, name=lens.name)
        self.anatomy, self.options = self.lens.anatomy, options
        self.tokens = Tokens(tokenizer_of(lens.processor))
        self._aligned: dict[str, tuple[Fact, ...]] = {}
        n_blocks = len(self.anatomy.blocks)
        if max(options.starts) >= n_blocks or min(options.starts) < 0:
            raise InputError(f"`starts` must be blocks from 0 to {n_blocks - 1}; got {options.starts}.")
        run_prompts(self.anatomy, [self.tokens.encode("a")], ())  # raises if it is not a language model

    def described(self, problems: list[Problem], relations: list[Relation]) -> list[dict[str, Any]]:
        """The faults of the files, without the folder of the data, which differs from machine to machine."""
        every = [*problems, *(note for relation in relations for note in long_objects(relation, self.tokens))]
        return [asdict(problem) | {"path": "/".join(Path(problem.path).parts[-2:])} for problem in every]

    def measure(self, relation: Relation, split: int) -> dict[str, Any]:
        """The record of one split; one that cannot be measured records the reason, and the run continues."""
        if relation.key not in self._aligned:
            self._aligned[relation.key] = align(relation, self.tokens)
        aligned = self._aligned[relation.key]
        head = {"relation": relation.key, "category": relation.category, "split": split}
        head |= {"n_facts": len(relation.facts), "n_aligned": len(aligned)}
        try:
            return head | self._decode(relation, aligned, split)
        except _Skip as skip:
            return head | {"skipped": str(skip)}
        except TensorLensError as error:
            return head | {"skipped": reason_of(error)}

    def _decode(self, relation: Relation, aligned: tuple[Fact, ...], split: int) -> dict[str, Any]:
        options = self.options
        needed = options.n_train + options.min_test
        if len(aligned) < needed:
            raise _Skip(f"{len(aligned)} facts of one token length; {needed} are needed")
        facts = split_facts(aligned, options.n_train, options.seed + split)
        with_all = options.test_examples == "m"
        train = training_prompts(self.tokens, relation.template, facts.train, with_all=with_all)
        if len({prompt.layout for prompt in train}) > 1:
            raise _Skip("the training prompts have different token lengths")
        test = self._known(relation, facts, train[0], options.seed + split)
        if len(test.facts) < options.min_test:
            raise _Skip(f"{len(test.facts)} test facts known to the model; {options.min_test} are needed")
        answers = run_prompts(self.anatomy, [prompt.ids for prompt in train], ()).output.argmax(-1).tolist()
        predictors, constant = self._predictors(train, test)
        return {
            "n_candidates": test.n_candidates,
            "n_tokens": len(train[0].ids),
            "subject_tokens": list(train[0].subject_tokens),
            "train": [[fact.subject, fact.object] for fact in facts.train],
            **self._model_scores(relation, test),
            **self._method_scores(predictors, constant, test, answers),
        }

    # The model itself ---------------------------------------------------------------------------------------------

    def _known(self, relation: Relation, facts: FactSplit, like: RelationPrompt, seed: int) -> _Test:
        """The test facts that align with training and that the model knows."""
        prompts = testing_prompts(self.tokens, relation.template, facts, with_all=self.options.test_examples == "m")
        pairs = zip(facts.test, prompts, strict=True)
        aligned = [(fact, prompt) for fact, prompt in pairs if prompt.layout == like.layout]
        if not aligned:
            return _Test([], 0)
        logits = run_prompts(self.anatomy, [prompt.ids for _, prompt in aligned], ()).output
        top = logits.topk(min(self.options.top_k, logits.shape[-1])).indices.tolist()
        known = []
        for (fact, prompt), best in zip(aligned, top, strict=True):
            first = self.tokens.first_token(query_text(relation.template, fact.subject), fact.object)
            known += [(fact, prompt, best[0], first)] if first in best else []
        chosen = sorted(random.Random(seed).sample(range(len(known)), min(self.options.max_test, len(known))))
        return _Test([known[i] for i in chosen], len(aligned))

    def _model_scores(self, relation: Relation, test: _Test) -> dict[str, Any]:
        said = [self.tokens.decode(answer) for answer in test.answers]
        return {
            "n_test": len(test.facts),
            "facts": [[f.subject, f.object, s] for f, s in zip(test.facts, said, strict=True)],
            "chance": {"agreement": chance(test.answers), "match": chance(test.expected)},
            "majority": {"agreement": majority(test.answers), "match": majority(test.expected)},
            "model_match": _bits(is_prefix_match(s, f.object) for f, s in zip(test.facts, said, strict=True)),
        }

    # The methods --------------------------------------------------------------------------------------------------

    def _predictors(self, train: list[RelationPrompt], test: _Test) -> tuple[dict[str, Predictor], Tensor]:
        """By method and start, and the mean training output: the constant that knows no subject at all."""
        starts, position = self.options.starts, train[0].subject_tokens[-1]
        states = run_prompts(self.anatomy, [prompt.ids for prompt in test.prompts], starts)
        tensors = [self.lens(list(prompt.ids)) for prompt in train]
        n_blocks = tensors[0].n_blocks
        found: dict[str, Predictor] = {}
        for start in starts:
            parts = [tensor.blocks(start, n_blocks) for tensor in tensors]
            for name, predictor in tensor_predictors(parts, states.entering[start], train[0].subject_tokens).items():
                found[f"tensor.{name}@{start}"] = predictor
        if self.options.with_lre:
            assert states.embedded is not None, "token ids go through their embedding"
            sources: dict[Start, Tensor] = {EMBEDDING: states.embedded, **states.entering}
            expanded = [expand_locally(self.anatomy, prompt.ids, position, list(sources)) for prompt in train]
            for start, state in sources.items():
                expansions: list[LocalLinear] = [local[start] for local, _ in expanded]
                own = torch.stack([subjects[start] for _, subjects in expanded])
                found[f"lre@{start}"] = lre_predictor(expansions, own, state[:, position])
        return found, torch.stack([tensor.output[-1] for tensor in tensors]).mean(0)

    def _method_scores(
        self, predictors: dict[str, Predictor], constant: Tensor, test: _Test, answers: list[int]
    ) -> dict[str, Any]:
        tuned = {
            name: tune_scale(self.anatomy, predictor, answers, self.options.scales)
            for name, predictor in predictors.items()
        }
        methods: dict[str, dict[str, Any]] = {"control.mean_output": self._score(constant[None], test)}
        for name, predictor in predictors.items():
            family, start = name.split("@")
            for variant, scale in {"beta1": 1.0, "fixed": LRE_SCALE, "tuned": tuned[name].scale, "bias": 0.0}.items():
                methods[f"{family}.{variant}@{start}"] = {"scale": scale} | self._score(predictor.at(scale), test)
        best = _best_lre(tuned)
        if best is not None:
            methods["lre.tuned@chosen"] = {"start": best.split("@")[1], **methods[best.replace("lre", "lre.tuned")]}
        return {"methods": methods, "held_out": {name: asdict(choice) for name, choice in tuned.items()}}

    def _score(self, states: Tensor, test: _Test) -> dict[str, str]:
        """Agreement with the model, and prefix match with the object, a digit for each test fact."""
        said = read_out(self.anatomy, states).argmax(-1).tolist()
        said = said * len(test.facts) if len(said) == 1 else said
        texts = {token: self.tokens.decode(token) for token in set(said)}
        return {
            "agreement": _bits(mine == theirs for mine, theirs in zip(said, test.answers, strict=True)),
            "match": _bits(is_prefix_match(texts[t], f.object) for t, f in zip(said, test.facts, strict=True)),
        }


class _Skip(Exception):
    """Why a split cannot be scored."""


class _Test:
    """Test facts with prompts, the model's own answers, the objects' first tokens; and the number of candidates."""

    def __init__(self, rows: list[tuple[Fact, RelationPrompt, int, int]], n_candidates: int) -> None:
        self.facts, self.prompts = [row[0] for row in rows], [row[1] for row in rows]
        self.answers, self.expected = [row[2] for row in rows], [row[3] for row in rows]
        self.n_candidates = n_candidates


def _best_lre(tuned: dict[str, Tuned]) -> str | None:
    """The start whose LRE does best on held-out training examples."""
    names = [name for name in tuned if name.startswith("lre@")]
    return max(names, key=lambda name: (tuned[name].agreement, tuned[name].log_probability), default=None)


def _bits(values: Any) -> str:
    return "".join("1" if value else "0" for value in values)
