"""Answers on real weights in float32: every kind of group and target sums to what the model itself says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import tensorlens as tl

pytestmark = pytest.mark.large

PROMPT = (
    "Anna's car is red.\nTom's bike is blue. It rained on Monday.\nQuestion: What colour is Anna's car? Answer: It is"
)
ANSWER = " red. Tom's is blue."
GROUPS = [
    "tokens",
    "words",
    "sentences",
    "lines",
    [("car", 0, 18), ("bike", 19, 38)],
    ["It rained on Monday."],
]


@pytest.fixture(scope="module", params=["smollm2-135m", "gemma3-270m"])
def answer(request):
    return tl.load(request.param, device="cpu").answer(PROMPT, ANSWER)


@pytest.fixture(scope="module")
def logits(answer):
    """What the model left to itself gives at the answer, and what its frozen twin gives there at zero."""
    ids = torch.tensor([answer.prompt.ids + answer.ids])
    at = list(answer.positions)
    with torch.no_grad():
        own = answer.specimen.model(input_ids=ids, use_cache=False).logits[0, at].double()
    return own, torch.stack([answer.tensor.operator.logits_at_zero(i) for i in at]).double()


def targets(values, chosen, others, target):
    own = values.gather(1, chosen)[:, 0]
    return own - {"logit": 0, "centred": values.mean(1), "runner_up": values.gather(1, others)[:, 0]}[target]


@pytest.mark.parametrize("target", ["centred", "logit", "runner_up"])
@pytest.mark.parametrize(
    "groups", GROUPS, ids=lambda groups: groups if isinstance(groups, str) else type(groups[0]).__name__
)
def test_rows_sum_to_the_target_less_the_bias(answer, logits, groups, target):
    own, at_zero = logits
    chosen = torch.tensor(answer.ids)[:, None]
    others = own.scatter(1, chosen, -torch.inf).argmax(1)[:, None]
    expected = targets(own, chosen, others, target) - targets(at_zero, chosen, others, target)
    found = answer.map(groups, "sentences", target)
    by_part = torch.stack([expected[list(part.tokens)].sum() for part in answer._parts("sentences")])
    size = found.scores.double().abs().sum(1)
    assert bool(((found.scores.double().sum(1) - by_part).abs() <= 3e-5 * size).all())


@pytest.mark.parametrize("target", ["centred", "runner_up"])
def test_pushes_equal_pulls_and_groups_are_sums_of_tokens(answer, target):
    pulled, pushed = (
        answer.map("lines", "sentences", target, set_aside=(), engine=engine) for engine in ("pulls", "pushes")
    )
    by_token = answer.map("tokens", "sentences", target)
    sums = torch.stack([by_token.scores[:, list(group.tokens)].sum(1) for group in answer._groups("lines")], 1)
    limit = 3e-5 * by_token.scores.abs().sum(1, keepdim=True)
    assert bool(((pulled.scores - pushed.scores).abs() <= limit).all())
    assert bool(((pulled.scores[:, :-1] - sums).abs() <= limit).all())


def test_a_contrast_sums_to_the_difference_of_two_answers(answer):
    found = answer.map(against=" blue. Tom's is red.")
    assert found.in_tokens[-2:] == ("answer", "against")
    value, other = (
        found.meta["logit"][0],
        tl.Lens(answer.specimen.model, answer.specimen.processor).answer(PROMPT, " blue. Tom's is red."),
    )
    own, theirs = (_centred(one) for one in (answer, other))
    assert value == pytest.approx(own - theirs, rel=1e-4, abs=1e-3)
    total = float(found.scores.double().sum() + found.bias_share[0] * value)
    assert abs(total - value) <= 3e-5 * float(found.scores.abs().sum())


def _centred(answer) -> float:
    with torch.no_grad():
        ids = torch.tensor([answer.prompt.ids + answer.ids])
        logits = answer.specimen.model(input_ids=ids, use_cache=False).logits[0, list(answer.positions)].double()
    return float((logits.gather(1, torch.tensor(answer.ids)[:, None])[:, 0] - logits.mean(1)).sum())


def test_the_example_of_the_docs_ranks_the_right_sentence_first():
    text = (Path(__file__).parents[2] / "docs" / "how-to" / "answers.md").read_text("utf-8")
    prompt = re.search(r'prompt = "(.*)"', text)[1]
    found = tl.load("smollm2-135m", rules=tl.recommended("passage")).answer(prompt, " a blue boat.").map("sentences")
    assert found.top(1)[0].token.strip() == "Bob has a blue boat."
    assert found.headline == "Why “a blue boat.” after “… have? Answer: Bob has”?"
