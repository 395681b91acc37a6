"""Relation decoding: files, prompts, scores, the mean operator, LRE against its twins, and whole runs."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import torch
import transformers as hf
import zoo
from tiny_language import COLOURS, START, tiny_lens, tokenizer, write_relation

import tensorlens as tl
from tensorlens.studies import RelationOptions, relations
from tensorlens.studies import relation_prompts as prompts
from tensorlens.studies.plain_model import plain_states, read_out
from tensorlens.studies.relation_prompts import Fact, load_relations, read_relation
from tensorlens.studies.relation_report import category_table, mean_with_interval, share, survival
from tensorlens.studies.relation_study import (
    EMBEDDING,
    expand_locally,
    lre_predictor,
    only_tokens,
    run_prompts,
    tensor_predictors,
    tune_scale,
)

CAUSAL = ["gpt2", "llama", "gemma3", "olmo2", "neox-parallel", "phi"]
QUICK = RelationOptions(n_splits=2, top_k=300, min_test=2, max_test=4, starts=(0, 2))


def facts(*pairs: tuple[str, str]) -> list[Fact]:
    return [Fact(subject=subject, object=value) for subject, value in pairs]


# Files ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "place", "message"),
    [
        ({"name": None}, "the file", "missing required field `name`"),
        ({"prompt_templates": None}, "the file", "missing required field `prompt_templates`"),
        ({"prompt_templates": []}, "prompt_templates", "length >= 1"),
        ({"prompt_templates": ["no place"]}, "prompt_templates[0]", "with `{}` in the subject's place"),
        ({"samples": None}, "the file", "missing required field `samples`"),
        ({"samples": []}, "samples", "length >= 1"),
        ({"samples": [{"subject": "apple"}]}, "samples", "every sample is malformed"),
    ],
)
def test_malformed_file_is_left_out_with_its_place(tmp_path, changes, place, message):
    write_relation(tmp_path / "commonsense" / "bad.json", **changes)
    write_relation(tmp_path / "commonsense" / "good.json")
    found, problems = load_relations(tmp_path)
    fatal = [problem for problem in problems if problem.is_fatal]
    assert [relation.key for relation in found] == ["commonsense/good"]
    assert len(fatal) == 1
    assert fatal[0].path.endswith("bad.json")
    assert fatal[0].place == place
    assert message in str(fatal[0])


@pytest.mark.parametrize(
    ("content", "message"), [(b'{"name": ', "truncated"), (b"[1]", "Expected `object`"), (b"\xff", "byte 0")]
)
def test_unreadable_file_says_why(tmp_path, content, message):
    (tmp_path / "bad.json").write_bytes(content)
    relation, problems = read_relation(tmp_path / "bad.json")
    assert relation is None
    assert message in problems[0].message


def test_bad_samples_and_duplicate_subjects_are_named_and_the_rest_is_used(tmp_path):
    samples = [
        {"subject": "a", "object": "x"},
        {"subject": "b"},
        "c",
        {"subject": "a", "object": "y"},
        {"subject": "d", "object": "z"},
    ]
    path = write_relation(tmp_path / "r.json", samples=samples)
    relation, problems = read_relation(path)
    assert relation is not None
    assert list(relation.facts) == facts(("a", "x"), ("d", "z"))
    assert [problem.place for problem in problems] == ["samples[1]", "samples[2]", "samples[3].subject"]
    assert not any(problem.is_fatal for problem in problems)


def test_objects_of_several_tokens_are_noted(tmp_path):
    relation, _ = read_relation(write_relation(tmp_path / "r.json"))
    assert relation is not None
    note = prompts.long_objects(relation, prompts.Tokens(tokenizer()))
    assert "10 of 10 have several tokens" in note[0].message
    assert "apple" in note[0].place


def test_category_is_the_folder_or_what_the_file_says(tmp_path):
    write_relation(tmp_path / "bias" / "a.json")
    write_relation(tmp_path / "b.json")
    found, _ = load_relations(tmp_path)
    assert {relation.key for relation in found} == {"bias/a", "commonsense/b"}
    assert [relation.key for relation in load_relations(tmp_path, ["bias"])[0]] == ["bias/a"]


def test_folder_without_relations_is_refused(tmp_path):
    with pytest.raises(tl.InputError, match="found none"):
        load_relations(tmp_path)
    with pytest.raises(tl.InputError, match="is not one"):
        load_relations(tmp_path / "absent")


# Prompts -------------------------------------------------------------------------------------------------------------


def test_prompt_is_examples_then_query_opened_as_lre_does():
    tokens = prompts.Tokens(tokenizer())
    prompt = prompts.make_prompt(tokens, "The {} is", facts(("sky", "blue"), ("sea", "green")), "sun")
    assert prompt.text == "The sky is blue\nThe sea is green\nThe sun is"
    assert tokenizer().decode(list(prompt.ids)) == START + prompt.text


@pytest.mark.parametrize(
    ("template", "examples", "subject", "last"),
    [
        ("{} is", [("sun", "hot")], "sun", 13),  # the same subject in an example
        ("{} of a sun is", [], "sun", 2),  # and in the template's own words
        ("'{}', I say {}, is", [], "sun", 15),  # several places: the last
    ],
)
def test_subject_is_found_at_its_last_place(template, examples, subject, last):
    tokens = prompts.Tokens(tokenizer())
    prompt = prompts.make_prompt(tokens, template, facts(*examples), subject)
    assert prompt.subject_tokens[-1] == last + 1  # one token opens the text
    assert tokenizer().decode([prompt.ids[i] for i in prompt.subject_tokens]) == subject


def test_positions_without_offsets_agree_with_those_with(monkeypatch):
    tokens = prompts.Tokens(tokenizer())
    with_offsets = tokens.positions("The sun is", 4, 7)
    monkeypatch.setattr(type(tokenizer()), "is_fast", property(lambda self: False))
    assert tokens.positions("The sun is", 4, 7) == with_offsets == (5, 6, 7)


def test_alignment_keeps_the_most_common_lengths(tmp_path):
    relation, _ = read_relation(write_relation(tmp_path / "r.json"))
    assert relation is not None
    kept = prompts.align(relation, prompts.Tokens(tokenizer()))
    lengths = Counter(len(colour) for colour in COLOURS.values())
    assert len(kept) == max(lengths.values())
    assert {len(fact.object) for fact in kept} == {4}


def test_split_covers_objects_and_shares_no_subject():
    pairs = facts(*[(f"s{i}", "common") for i in range(20)], ("t", "rare"), ("u", "odd"))
    for seed in range(5):
        split = prompts.split_facts(pairs, 3, seed)
        assert {fact.object for fact in split.train} == {"common", "rare", "odd"}
        assert len(split.train) + len(split.test) == len(pairs)
        assert not {f.subject for f in split.train} & {f.subject for f in split.test}
    assert prompts.split_facts(pairs, 3, 1) == prompts.split_facts(pairs, 3, 1)
    assert prompts.split_facts(pairs, 3, 1) != prompts.split_facts(pairs, 3, 2)


def test_training_and_test_prompts_hold_m_less_one_examples_and_align():
    tokens, pairs = prompts.Tokens(tokenizer()), facts(*COLOURS.items())
    split = prompts.split_facts([fact for fact in pairs if len(fact.object) == 4], 3, 0)
    train, test = (
        prompts.training_prompts(tokens, "{} are", split.train),
        prompts.testing_prompts(tokens, "{} are", split),
    )
    assert {prompt.text.count("\n") for prompt in [*train, *test]} == {2}
    assert len({prompt.layout for prompt in [*train, *test]}) == 1
    for fact, prompt in zip(split.train, train, strict=True):
        assert f"{fact.subject} are {fact.object}" not in prompt.text


# Scores --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "expected", "matches"),
    [
        (" Par", "Paris", True),
        ("paris", "Paris ", True),
        (" ", "Paris", False),
        ("", "Paris", False),
        ("aris", "Paris", False),
        ("Paris!", "Paris", False),
    ],
)
def test_prefix_match(said, expected, matches):
    assert prompts.is_prefix_match(said, expected) is matches


def test_chance_is_the_sum_of_squared_shares_and_never_above_majority():
    assert prompts.chance([1, 1, 2, 3]) == pytest.approx(0.5**2 + 0.25**2 + 0.25**2)
    assert prompts.majority([1, 1, 2, 3]) == 0.5
    assert prompts.chance([7, 7]) == prompts.majority([7, 7]) == 1
    drawn = torch.randint(0, 5, (50,), generator=torch.Generator().manual_seed(0)).tolist()
    assert prompts.chance(drawn) <= prompts.majority(drawn)
    assert prompts.chance([]) == prompts.majority([]) == 0


def test_first_token_has_its_space():
    tokens = prompts.Tokens(tokenizer())
    assert tokens.decode(tokens.first_token("The sky is", "blue")) == " "


def test_interval_holds_the_mean_and_bits_are_counted():
    found = mean_with_interval(torch.linspace(0, 1, 11).numpy())
    assert found["low"] < found["mean"] < found["high"]
    assert found["mean"] == pytest.approx(0.5)
    assert share("1101") == 0.75


# The mean operator ---------------------------------------------------------------------------------------------------


def unnormed_lens(name: str) -> tl.Lens:
    return tl.Lens(zoo.build(name, "sdpa"), rules=tl.Rules(include_final_norm=False))


@pytest.mark.parametrize("name", CAUSAL)
def test_mean_of_one_on_its_own_prompt_reproduces_the_logits(name):
    lens, ids = unnormed_lens(name), zoo.sample(name)
    T = lens(ids)
    expected = lens.model(torch.tensor([ids])).logits[0, -1].detach()
    mean = tl.MeanTensor([T])
    by_rows = torch.einsum("dje,je->d", mean.rows(-1), T.input) + mean.bias[-1]
    for state in (by_rows, mean(T.input)[-1], T.output[-1]):
        assert torch.allclose(read_out(lens.anatomy, state[None])[0], expected, rtol=1e-5, atol=1e-5)
    for start in (0, 1):
        found = tensor_predictors([T.blocks(start, 3)], T.operator.recording.states[start], [2, 3])
        for predictor in found.values():
            assert torch.allclose(read_out(lens.anatomy, predictor.at(1.0))[0], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rules", ["paper", "jacobian"])
def test_the_whole_prompt_is_predicted_by_the_mean_of_dense_slices(rules):
    rule_set = getattr(tl.Rules, rules)(include_final_norm=False)
    lens = tl.Lens(zoo.build("neox-parallel", "sdpa"), rules=rule_set)
    tensors = [lens(zoo.sample("neox-parallel", seed=seed)) for seed in range(3)]
    x = torch.randn(9, *tensors[0].input.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = tensor_predictors(tensors, x, [2, 3])["full"]
    each = torch.stack([torch.einsum("dje,sje->sd", tensor.rows(-1), x) for tensor in tensors])
    assert torch.allclose(found.linear, each.mean(0), atol=1e-9)
    assert torch.allclose(found.constant, torch.stack([tensor.bias[-1] for tensor in tensors]).mean(0), atol=1e-9)
    others = torch.stack([tensor.rows(-1) for tensor in tensors[1:]]).mean(0)
    own = torch.einsum("dje,je->d", others, tensors[0].input)
    assert torch.allclose(found.held_out_linear[0], own, atol=1e-9)


def test_subject_only_predictor_equals_its_definition():
    lens, kept = unnormed_lens("neox-parallel"), [2, 3]
    tensors = [lens(zoo.sample("neox-parallel", seed=seed)) for seed in range(3)]
    x = torch.randn(2, *tensors[0].input.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = tensor_predictors(tensors, x, kept)["subject"]
    slices = [tensor.rows(-1)[:, kept] for tensor in tensors]
    linear = torch.stack([torch.einsum("dje,sje->sd", part, x[:, kept]) for part in slices]).mean(0)
    rests = [
        t.output[-1] - torch.einsum("dje,je->d", part, t.input[kept]) for t, part in zip(tensors, slices, strict=True)
    ]
    assert torch.allclose(found.linear, linear, atol=1e-9)
    assert torch.allclose(found.constant, torch.stack(rests).mean(0), atol=1e-9)
    others = torch.stack([torch.einsum("dje,je->d", slices[k], tensors[0].input[kept]) for k in (1, 2)]).mean(0)
    assert torch.allclose(found.held_out_linear[0], others, atol=1e-9)
    assert torch.allclose(found.held_out_constant[0], (rests[1] + rests[2]) / 2, atol=1e-9)
    assert float(only_tokens(x, kept).abs().sum((0, 2))[[0, 1, 4, 5, 6]].sum()) == 0


# LRE -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CAUSAL)
def test_lre_equals_the_autograd_jacobian(name):
    model, ids, position = zoo.build(name), zoo.sample(name), 3
    lens = tl.Lens(model)
    found = expand_locally(lens.anatomy, ids, position, [EMBEDDING, 0, 2])
    inputs = {"input_ids": torch.tensor([ids]), "use_cache": False}
    states = plain_states(lens.anatomy, inputs, read=(0, 2))
    for start in (0, 2):
        rest = states.entering[start]

        def from_subject(h, start=start, rest=rest):
            x = torch.cat([rest[:, :position], h[None, None], rest[:, position + 1 :]], 1)
            leaving = plain_states(lens.anatomy, inputs, put={start: x}, grad=True).leaving
            return leaving[0, -1]  # type: ignore[index]

        jacobian = torch.autograd.functional.jacobian(from_subject, rest[0, position])
        assert torch.allclose(found[start].weight, jacobian, atol=1e-7)
        assert torch.equal(found[start].subject, rest[0, position])
        assert torch.allclose(jacobian @ found[start].subject + found[start].bias, states.leaving[0, -1], atol=1e-9)  # type: ignore[index]
    embedded = model.get_input_embeddings()(torch.tensor(ids))[position].detach()  # type: ignore[operator]
    assert torch.allclose(found[EMBEDDING].subject, embedded)


def literal_lre(
    states: list[torch.Tensor], outputs: list[torch.Tensor], jacobians: list[torch.Tensor], h: torch.Tensor, beta: float
):
    """The estimator as its authors write it: Jacobians and biases averaged, the scale on the Jacobian's term alone."""
    weight, bias = torch.zeros_like(jacobians[0]), torch.zeros_like(outputs[0])
    for state, output, jacobian in zip(states, outputs, jacobians, strict=True):
        weight += jacobian / len(states)
        bias += (output - jacobian @ state) / len(states)
    return beta * (weight @ h) + bias


def test_lre_equals_a_literal_twin():
    lens, position = unnormed_lens("gpt2"), 2
    samples = [zoo.sample("gpt2", seed=seed) for seed in range(3)]
    expanded = [expand_locally(lens.anatomy, ids, position, [1]) for ids in samples]
    locals_, states = [local[1] for local in expanded], [local[1].subject for local in expanded]
    outputs = [lens(ids).output[-1] for ids in samples]
    h = torch.randn(16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    twin = literal_lre(states, outputs, [local.weight for local in locals_], h, 2.5)
    predictor = lre_predictor(locals_, h[None])
    assert torch.allclose(predictor.at(2.5)[0], twin, atol=1e-10)
    held_out = literal_lre(states[1:], outputs[1:], [local.weight for local in locals_[1:]], states[0], 2.5)
    assert torch.allclose(2.5 * predictor.held_out_linear[0] + predictor.held_out_constant[0], held_out, atol=1e-10)


def test_scale_is_chosen_on_held_out_training_examples():
    lens = unnormed_lens("gpt2")
    samples = [zoo.sample("gpt2", seed=seed) for seed in range(3)]
    tensors = [lens(ids) for ids in samples]
    predictor = tensor_predictors(tensors, torch.stack([t.input for t in tensors]), [2])["subject"]
    answers = run_prompts(lens.anatomy, samples, ()).output.argmax(-1).tolist()
    grid = (0.0, 0.5, 1.0, 2.0)
    found = tune_scale(lens.anatomy, predictor, answers, grid)
    scores = {}
    for scale in grid:
        logits = read_out(lens.anatomy, scale * predictor.held_out_linear + predictor.held_out_constant)
        right = (logits.argmax(-1) == torch.tensor(answers)).double().mean()
        scores[scale] = (float(right), float(logits.log_softmax(-1)[range(3), answers].mean()))
    assert found.scale == max(grid, key=lambda scale: scores[scale])


# Runs ----------------------------------------------------------------------------------------------------------------


def test_run_scores_every_method_and_goes_on_where_it_stopped(tmp_path):
    data, lens = tmp_path / "data", tiny_lens("neox")
    write_relation(data / "commonsense" / "fruit.json")
    write_relation(data / "commonsense" / "bad.json", samples=[])
    write_relation(data / "factual" / "small.json", samples=[{"subject": "a", "object": "b"}])
    summary = relations(lens, data, tmp_path / "run", options=QUICK, progress=False).summary
    assert summary["n_survived"] == 1
    assert "facts of one token length" in summary["left_out"]["factual/small"]
    assert any(problem["is_fatal"] and problem["path"] == "commonsense/bad.json" for problem in summary["problems"])
    methods = summary["relations"]["commonsense/fruit"]["methods"]
    variants = [
        f"{family}.{variant}@{start}"
        for family in ("tensor.full", "tensor.subject", "lre")
        for start in (0, 2)
        for variant in ("beta1", "fixed", "tuned", "bias")
    ]
    assert {*variants, "lre.fixed@embedding", "lre.tuned@chosen", "control.mean_output"} <= set(methods)
    assert "commonsense (1)" in category_table(summary)[0]
    assert "1 of 2" in survival(summary)
    whole = (tmp_path / "run" / "samples.jsonl").read_text()
    (tmp_path / "run" / "samples.jsonl").write_text(whole.splitlines(keepends=True)[0])
    assert relations(lens, data, tmp_path / "run", options=QUICK, progress=False).summary == summary
    assert (tmp_path / "run" / "samples.jsonl").read_text() == whole
    report = (tmp_path / "run" / "report.html").read_text()
    assert "fruit" in report
    assert "<script" not in report
    assert "<link" not in report


def test_run_agrees_with_the_model_where_test_is_training(tmp_path):
    """With one example and the last block alone, the whole-prompt tensor at its own prompt is the model."""
    write_relation(tmp_path / "data" / "fruit.json")
    options = RelationOptions(n_splits=1, n_train=1, top_k=300, min_test=2, max_test=8, starts=(2,), with_lre=False)
    relations(tiny_lens("neox"), tmp_path / "data", tmp_path / "run", options=options, progress=False)
    record = json.loads((tmp_path / "run" / "samples.jsonl").read_text().splitlines()[0])
    assert record["held_out"]["tensor.full@2"]["agreement"] == 1


def test_other_settings_are_refused(tmp_path):
    write_relation(tmp_path / "data" / "fruit.json")
    quick = RelationOptions(n_splits=1, top_k=300, min_test=2, max_test=2, with_lre=False)
    relations(tiny_lens(), tmp_path / "data", tmp_path / "run", options=quick, progress=False)
    with pytest.raises(tl.InputError, match="different settings"):
        relations(tiny_lens("neox"), tmp_path / "data", tmp_path / "run", options=quick, progress=False)


def test_lens_without_head_or_tokenizer_is_refused(tmp_path):
    write_relation(tmp_path / "data" / "fruit.json")
    with pytest.raises(tl.InputError, match="needs a tokenizer"):
        relations(tl.Lens(zoo.build("llama")), tmp_path / "data", tmp_path / "run")
    with pytest.raises(tl.InputError, match="blocks from 0 to 2"):
        relations(tiny_lens(), tmp_path / "data", tmp_path / "run", options=RelationOptions(starts=(7,)))
    with pytest.raises(tl.MethodError, match="no unembedding"):
        read_out(tl.Lens(zoo.build("bert")).anatomy, torch.zeros(1, 16, dtype=torch.float64))
    with pytest.raises(tl.InputError, match="at least 1"):
        RelationOptions(n_train=0)


def test_a_model_without_next_tokens_is_refused(tmp_path):
    write_relation(tmp_path / "data" / "fruit.json")
    encoder = hf.BertForSequenceClassification(hf.BertConfig(**zoo.TEXT | {"vocab_size": len(tokenizer())}))
    with pytest.raises(tl.InputError, match="needs a language model; `BertForSequenceClassification`"):
        relations(tl.Lens(encoder.eval(), tokenizer()), tmp_path / "data", tmp_path / "run", progress=False)
