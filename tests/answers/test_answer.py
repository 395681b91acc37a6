"""Whole answers: rows that sum to what they explain, pushes that equal pulls, and answers that are refused."""

from __future__ import annotations

import pytest
import torch
import transformers as hf
import zoo
from tiny_language import tiny_lens, tokenizer

import tensorlens as tl
from tensorlens.answers.prompts import decoded
from tensorlens.errors import InputError, MethodError
from tensorlens.recording import calls

PROMPT = "The cat sat. It was dark! Who sat there?"
GIVEN = " A cat did. So it goes."
TARGETS = ("centred", "logit", "runner_up")
CHAT = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def lens_of(kind: str) -> tl.Lens:
    if kind == "gpt2":
        config = hf.GPT2Config(
            n_embd=16, n_layer=3, n_head=4, vocab_size=len(tokenizer()), n_positions=400, bos_token_id=0, eos_token_id=0
        )
        lens = tl.Lens(zoo.randomise(hf.GPT2LMHeadModel(config)).eval(), tokenizer(), name="tiny-gpt2")
    else:
        lens = tiny_lens(kind)
    lens.model.double()
    return lens


def tolerance(answer) -> dict[str, float]:
    """Llama's own code computes its norms in float32, whatever the type of its weights."""
    size = 2e-5 if answer.specimen.name == "tiny-llama" else 1e-10
    return {"rtol": size, "atol": size}


@pytest.fixture(scope="module", params=["llama", "neox", "gpt2"])
def answer(request):
    return lens_of(request.param).answer(PROMPT, GIVEN)


def token_targets(answer, target) -> torch.Tensor:
    """The targets from the model's own logits, by their definitions."""
    arguments = {"input_ids": torch.tensor([answer.prompt.ids + answer.ids])}
    with torch.no_grad():
        logits = answer.specimen.model(**arguments).logits[0, list(answer.positions)]
    chosen = torch.tensor(answer.ids)[:, None]
    own = logits.gather(1, chosen)[:, 0]
    others = logits.scatter(1, chosen, -torch.inf).amax(1)
    return own - {"centred": logits.mean(1), "logit": 0, "runner_up": others}[target]


def bias_of(answer, target) -> torch.Tensor:
    """The same of the frozen model at zero."""
    operator = answer.tensor.operator
    at_zero = torch.stack([operator.logits_at_zero(i) for i in answer.positions])
    chosen = torch.tensor(answer.ids)[:, None]
    own = at_zero.gather(1, chosen)[:, 0]
    if target == "runner_up":
        with torch.no_grad():
            logits = answer.specimen.model(input_ids=torch.tensor([answer.prompt.ids + answer.ids])).logits[0]
        others = logits[list(answer.positions)].scatter(1, chosen, -torch.inf).argmax(1)
        return own - at_zero.gather(1, others[:, None])[:, 0]
    return own - at_zero.mean(1) if target == "centred" else own


# Laws ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("engine", ["pulls", "pushes"])
@pytest.mark.parametrize("rows", ["answer", "sentences", "tokens"])
def test_rows_sum_to_the_target_less_the_bias(answer, rows, engine, target):
    found = answer.map("sentences", rows, target, engine=engine, set_aside=())
    members = [part.tokens for part in answer._parts(rows)]
    values, biases = token_targets(answer, target), bias_of(answer, target)
    expected = torch.stack([(values - biases)[list(some)].sum() for some in members])
    torch.testing.assert_close(found.scores.sum(1), expected, **tolerance(answer))
    explained = torch.stack([values[list(some)].sum() for some in members])
    torch.testing.assert_close(torch.tensor(found.meta["logit"], dtype=torch.float64), explained, **tolerance(answer))
    torch.testing.assert_close(found.bias_share * explained, explained - expected, **tolerance(answer))
    assert found.in_tokens == ("The cat sat.", "It was dark!", "Who sat there?", "answer")


@pytest.mark.parametrize("groups", ["words", "sentences", [("doc", 4, 12)], ["It was dark!"]])
def test_pushes_equal_pulls_and_groups_are_sums(answer, groups):
    one, other = (answer.map(groups, "words", engine=engine, set_aside=()) for engine in ("pulls", "pushes"))
    torch.testing.assert_close(one.scores, other.scores, **tolerance(answer))
    by_token = answer.map("tokens", "words")
    assert one.scores[:, -1].allclose(by_token.scores[:, -1], **tolerance(answer))
    expected = torch.stack([by_token.scores[:, list(group.tokens)].sum(1) for group in answer._groups(groups)], 1)
    torch.testing.assert_close(one.scores[:, :-1], expected, **tolerance(answer))


def test_token_rows_are_in_class_maps(answer):
    found = answer.map("tokens", "tokens", "logit")
    for k in (0, len(answer.ids) - 1):
        one = answer.tensor.map("tensor.in_class", out_token=answer.positions[k], target=answer.ids[k])
        n = answer.n_prompt_tokens
        torch.testing.assert_close(found.scores[k, :n], one.scores[0, :n], **tolerance(answer))
        torch.testing.assert_close(found.scores[k, n], one.scores[0, n:].sum(), **tolerance(answer))


def test_the_cheaper_engine_is_taken_and_said(answer):
    assert answer.map("sentences", "answer", set_aside=()).meta["engine"] == "1 pull"
    assert answer.map("sentences", "tokens", set_aside=()).meta["engine"] == "5 pushes"  # four columns and zero
    assert answer.map("tokens", "sentences").meta["engine"] == "2 pulls"


def test_parts_of_the_answer_as_columns(answer):
    one = answer.map("sentences", "sentences")
    parts = answer.map("sentences", "sentences", answer_columns=True)
    assert parts.in_tokens[-2:] == parts.out_tokens == ("A cat did.", "So it goes.")
    torch.testing.assert_close(parts.scores[:, -2:].sum(1), one.scores[:, -1], **tolerance(answer))
    assert parts.scores[0, -1] == 0  # no part sees a later one


def test_tokens_set_aside_have_columns_of_their_own_and_stay_in_the_sum(answer):
    whole, apart = answer.map("sentences", set_aside=()), answer.map("sentences")
    assert apart.in_tokens == ("T", *whole.in_tokens) and apart.view().set_aside == (0,)
    torch.testing.assert_close(apart.scores[:, :2].sum(1), whole.scores[:, 0], **tolerance(answer))
    torch.testing.assert_close(apart.scores[:, 2:], whole.scores[:, 1:], **tolerance(answer))
    assert answer.map("tokens", set_aside=()).in_tokens == answer.map("tokens").in_tokens
    with pytest.raises(InputError, match="set_aside"):
        answer.map("sentences", set_aside=(len(PROMPT),))


def test_the_default_target_is_the_recommended_one(answer):
    kind = tl.recommended("passage").target
    torch.testing.assert_close(answer.map().scores, answer.map(target=kind).scores)
    assert answer.map().meta["target"] == "logits minus those of the runners-up"


def test_against_is_the_difference_of_two_answers(answer):
    other = tl.Lens(answer.specimen.model, answer.specimen.processor).answer(PROMPT, " No one.")
    found, ours, theirs = answer.map(against=" No one."), answer.map(target="centred"), other.map(target="centred")
    torch.testing.assert_close(found.scores[:, :3], ours.scores[:, :3] - theirs.scores[:, :3])
    assert found.in_tokens[-2:] == ("answer", "against")
    assert (
        found.meta["target"].endswith("minus the same for “No one.”") and "rather than “No one.”" in found.view().title
    )
    torch.testing.assert_close(found.scores[0, -2:], torch.stack([ours.scores[0, -1], -theirs.scores[0, -1]]))
    value = found.meta["logit"][0]
    assert value == pytest.approx(ours.meta["logit"][0] - theirs.meta["logit"][0])
    assert float(found.scores.sum() + found.bias_share[0] * value) == pytest.approx(value, rel=1e-9)


def test_through_follows_every_hop(answer):
    found = answer.map("sentences", "tokens", answer_columns=True, set_aside=())
    n, tokens = 3, found.scores
    totals = tokens.abs().sum(1) + (found.bias_share * torch.tensor(found.meta["logit"], dtype=torch.float64)).abs()
    direct, own = tokens[:, :n] / totals[:, None], tokens[:, n:] / totals[:, None]
    expected = torch.zeros_like(direct)
    for q in range(len(direct)):  # each token passes on what it got itself
        expected[q] = direct[q] + own[q, :q] @ expected[:q]
    expected *= totals[:, None]
    followed = answer.map("sentences", "tokens", through=True, set_aside=())
    torch.testing.assert_close(followed.scores, expected, **tolerance(answer))
    assert bool((followed.scores.abs().sum(1) <= totals + 1e-12).all())
    assert "convention" in followed.meta["through"] and "logit" not in followed.meta
    whole = answer.map("sentences", "answer", through=True, set_aside=())
    torch.testing.assert_close(whole.scores[0], expected.sum(0), **tolerance(answer))


def test_long_inputs_keep_no_constants_and_are_pushed_and_pulled_alike(monkeypatch):
    kept = lens_of("llama").answer(PROMPT, GIVEN)
    monkeypatch.setattr(calls, "SHARE_OF_RECORDING", 0.0)
    found = lens_of("llama").answer(PROMPT, GIVEN)
    assert found.tensor.operator.recording.is_streamed and not kept.tensor.operator.recording.is_streamed
    expected = kept.map("sentences", "tokens", engine="pulls", set_aside=())
    for engine in ("pulls", "pushes"):
        made = found.map("sentences", "tokens", engine=engine, set_aside=())
        torch.testing.assert_close(made.scores, expected.scores, **tolerance(found))
        torch.testing.assert_close(made.bias_share, expected.bias_share, **tolerance(found))
    assert found.map("sentences", "tokens", set_aside=()).meta["engine"] == "5 pushes"


# Answers -------------------------------------------------------------------------------------------------------------


def test_the_record(answer):
    assert answer.text == GIVEN == "".join(answer.tokens)
    assert answer.n_prompt_tokens == len(PROMPT) and len(answer.ids) == len(GIVEN)
    with torch.no_grad():
        logits = answer.specimen.model(input_ids=torch.tensor([answer.prompt.ids + answer.ids])).logits[0]
    expected = logits.log_softmax(-1)[list(answer.positions), list(answer.ids)]
    torch.testing.assert_close(torch.tensor(answer.log_probabilities), expected.float(), rtol=1e-4, atol=1e-5)


def test_generated_answers_are_the_models_own():
    lens = lens_of("llama")
    found = lens.answer(PROMPT, max_new_tokens=6)
    ids = torch.tensor([found.prompt.ids])
    made = lens.model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False, pad_token_id=0
    )
    own = made[0, len(found.prompt.ids) :].tolist()
    assert list(found.ids) == own[: len(found.ids)] and len(found.ids) >= 1
    again = lens.answer(list(found.prompt.ids), list(found.ids))
    torch.testing.assert_close(found.map("tokens").scores, again.map("tokens").scores)
    sampled = [lens.answer(PROMPT, max_new_tokens=5, do_sample=True, seed=3).ids for _ in range(2)]
    assert sampled[0] == sampled[1]


def test_training_mode_and_random_state_are_left_alone():
    lens = lens_of("llama")
    lens.model.train()
    state = torch.random.get_rng_state()
    lens.answer(PROMPT, max_new_tokens=2, do_sample=True, seed=1)
    assert lens.model.training and torch.random.get_rng_state().equal(state)


def test_pieces_of_one_character_stand_at_one_place():
    lens = tiny_lens()
    ids = tokenizer()("aé b")["input_ids"]
    assert decoded(lens.specimen, ids) == ("aé b", ((0, 1), (1, 2), (1, 2), (2, 3), (3, 4)))


def test_places_of_a_long_answer_are_those_of_its_decoded_prefixes():
    lens, cut = tiny_lens(), tokenizer()
    ids = cut("Zoë sat. 😀 naïve — 你好! " * 20)["input_ids"]
    text, offsets = decoded(lens.specimen, ids)
    assert len(ids) > 300 and text == cut.decode(ids)
    ends = [len(cut.decode(ids[: k + 1]).rstrip("\ufffd")) for k in range(len(ids))]
    assert [pair[1] for pair in offsets if pair] == [
        max(end, pair[0] + 1) for end, pair in zip(ends, offsets, strict=True) if pair
    ]


def test_roles_of_a_chat_are_groups():
    backend = tokenizer().backend_tokenizer
    lens = tl.Lens(tiny_lens().model, type(tokenizer())(tokenizer_object=backend, chat_template=CHAT))
    messages = [{"role": r, "content": c} for r, c in (("system", "Be."), ("user", "Hi."), ("user", "Go."))]
    found = lens.answer(messages, "Yes.").map(set_aside=())
    assert found.in_tokens == ("system", "user", "user 2", "rest", "answer")
    assert found.meta["text"].startswith("[system]Be.\n[user]Hi.\n")
    assert found.meta["offsets"][:2] == [[0, 12], [12, 22]]
    with pytest.raises(InputError, match="role"):
        lens.answer([{"role": "user"}], "Yes.")
    with pytest.raises(InputError, match="chat template"):
        tiny_lens().answer(messages, "Yes.")


def test_maps_of_answers_save_and_draw(tmp_path):
    found = tiny_lens().answer(PROMPT, GIVEN).map(rows="sentences", set_aside=())
    loaded = tl.TokenMap.load(found.save(tmp_path / "answer.json"))
    assert loaded.scores.equal(found.scores) and loaded.meta["answer"] == GIVEN
    assert found.save(tmp_path / "answer.html").stat().st_size > 1000
    assert "inputs sum to" in found.view().sums[0] and "the target is" in found.view().sums[0]
    long = tiny_lens().answer("Word. " * 60 + "So", " it is.").map()
    assert len(dict(long.view().caption)["Text"]) == 300  # a prompt is not said again in full


# What is refused -----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("given", "options", "words"),
    [
        ("", {}, "not empty"),
        ("  ", {}, "not empty"),
        ([], {}, "not empty"),
        (3, {}, "text or token ids"),
        (None, {"do_sample": True}, "seed"),
        (None, {"num_return_sequences": 2, "num_beams": 2}, "One answer"),
        (None, {"max_new_tokens": 0}, "max_new_tokens"),
        (" A", {"temperature": 0.5}, "leave temperature out"),
        (" A", {"seed": 1}, "leave seed out"),
        (None, {"no_such_option": 1}, "no_such_option"),
        ([True], {}, "whole number"),
        ([10**6], {}, "vocabulary"),
        (" A" * 400, {}, "at most 400 tokens"),
        (None, {"logprobs": [-1.0]}, "need a given answer"),
        (" A", {"logprobs": [-1.0]}, "has 2 tokens here, but `logprobs` has 1"),
        (" A", {"logprobs": [-1.0, 0.5]}, "not above zero"),
        (" A", {"logprobs": [-1.0, float("nan")]}, "finite"),
        (" A", {"logprobs": 3}, "a list"),
    ],
)
def test_answers_that_are_none(given, options, words):
    with pytest.raises(InputError, match=words):
        tiny_lens().answer(PROMPT, given, **options)


def test_prompts_past_the_models_length_are_refused():
    lens = tiny_lens()
    with pytest.raises(InputError, match="at most 400 tokens; got 500"):
        lens.answer("a" * 500)
    with pytest.raises(InputError, match="the prompt alone has 400"):
        lens.answer("a" * 400)
    assert len(lens.answer("a" * 398, max_new_tokens=9).ids) <= 2
    with pytest.raises(InputError, match="one prompt; got a list with texts"):
        lens.answer(["Hello", "there"])


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"groups": [("a", 0, 5), ("b", 4, 8)]}, "overlap"),
        ({"groups": [("a", 3, 3)]}, "empty"),
        ({"groups": ["nowhere"]}, "does not occur in the text"),
        ({"groups": [("a", 0, len(PROMPT) + 1)]}, "within"),
        ({"groups": "turns"}, "chat"),
        ({"target": "logits"}, "target"),
        ({"engine": "both"}, "engine"),
        ({"rows": "paragraphs"}, "must be one of"),
        ({"against": GIVEN}, "a different answer"),
        ({"against": " x", "rows": "words"}, "whole answer"),
        ({"against": " x", "through": True}, "whole answer"),
    ],
)
def test_questions_that_do_not_fit(options, words):
    with pytest.raises(InputError, match=words):
        tiny_lens().answer(PROMPT, GIVEN).map(**options)


def test_an_answer_that_is_cut_into_other_tokens_than_the_prompt_is_refused():
    merging = tokenizer().backend_tokenizer.from_str(tokenizer().backend_tokenizer.to_str())
    merging.add_tokens(["there?!"])  # a token across the border
    lens = tl.Lens(tiny_lens().model, type(tokenizer())(tokenizer_object=merging, eos_token="<|endoftext|>"))
    with pytest.raises(InputError, match="does not continue the tokenised prompt.*there\\?!"):
        lens.answer(PROMPT, "! It was I.")
    assert lens.answer(PROMPT, " It was I.").text == " It was I."


def test_models_that_give_no_answers():
    with pytest.raises(MethodError, match="no head"):
        tl.Lens(zoo.build("bert")).answer([3, 4, 5], [6])
    with pytest.raises(MethodError, match="not causal"):
        tl.Lens(zoo.build("bert-mlm")).answer([3, 4, 5], [6]).map("tokens")


# Served elsewhere ----------------------------------------------------------------------------------------------------


def test_a_servers_log_probabilities_are_compared():
    lens = tiny_lens()
    own = lens.answer(PROMPT, GIVEN).log_probabilities
    near = [one - 0.02 for one in own]
    found = lens.answer(PROMPT, GIVEN, logprobs=near)
    assert found.agreement is not None and found.agreement.holds
    assert found.agreement.mean == pytest.approx(0.02, abs=1e-4)
    assert "agree" in found.map().meta["served"]
    far = [*near[:3], near[3] - 2, *near[4:]]
    with pytest.warns(UserWarning, match=r"not this model's.*at most \(token 3\)"):
        other = lens.answer(PROMPT, GIVEN, logprobs=far)
    assert other.agreement is not None and not other.agreement.holds and other.agreement.largest > 2
    assert lens.answer(PROMPT, GIVEN).agreement is None


def test_an_answer_that_continues_the_last_word_is_refused():
    lens = tiny_lens()
    with pytest.raises(tl.InputError, match="continues the prompt's last word: 'Bob hasa boat'"):
        lens.answer("Bob has", "a boat")
    assert lens.answer("Bob has", " a boat").text == " a boat" and lens.answer("Bob has:", "a").text == "a"
