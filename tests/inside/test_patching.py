"""Patching: predictions follow the frozen target, and the truth is what the model itself does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf
import zoo
from autograd_twin import block_paths

import tensorlens as tl
from tensorlens.inside.target import Pass

CLEAN, CORRUPTED = [5, 6, 7, 8, 9, 10, 11], [5, 6, 30, 8, 9, 10, 11]


@pytest.mark.parametrize(("name", "end"), [("llama", "mlp"), ("gpt2", "mlp"), ("neox-parallel", "mlp")])
def test_the_truth_is_the_model_with_one_output_replaced(name: str, end: str) -> None:
    model: Any = zoo.build(name, "sdpa")
    lens = tl.Lens(model)
    found = tl.patching(lens, CLEAN, CORRUPTED, target=(4, 9), verify=True, progress=False)
    blocks = block_paths(lens(CLEAN))
    place = next(i for i, label in enumerate(found.labels) if label.block == 1 and label.kind == "feed-forward")
    module, kept = model.get_submodule(f"{blocks[1]}.{end}"), []
    handle = module.register_forward_hook(lambda m, args, y: kept.append(y))
    with torch.no_grad():
        model(torch.tensor([CORRUPTED]))
        handle.remove()
        before = model(torch.tensor([CLEAN])).logits[0, -1]
        handle = module.register_forward_hook(lambda m, args, y: kept[0])
        after = model(torch.tensor([CLEAN])).logits[0, -1]
        handle.remove()
    assert found.true is not None
    change = (after - before)[4] - (after - before)[9]
    assert float(found.true[place]) == pytest.approx(float(change), rel=1e-6, abs=1e-9)
    assert -1 <= found.rank_correlation <= 1 and -1 <= found.pearson <= 1
    measured = [label.kind for label, effect in zip(found.labels, found.true.tolist(), strict=True) if effect == effect]
    assert measured == ["attention", *["attention head"] * 4, "feed-forward"] * 3


@pytest.mark.parametrize(
    ("name", "end"),
    [("llama", "self_attn.o_proj"), ("gpt2", "attn.c_proj"), ("bert-mlm", "attention.output.dense")],
)
def test_a_head_is_patched_where_its_channels_enter_the_output_projection(name: str, end: str) -> None:
    model: Any = zoo.build(name, "sdpa")
    lens = tl.Lens(model)
    found = tl.patching(lens, CLEAN, CORRUPTED, target=4, verify=True, progress=False)
    block = block_paths(lens(CLEAN))[1]
    place = next(i for i, label in enumerate(found.labels) if (label.block, label.head) == (1, 2))
    module, kept = model.get_submodule(f"{block}.{end}"), []

    def put_in(m: Any, args: Any) -> Any:
        both = args[0].clone()
        both[..., 8:12] = kept[0][..., 8:12]  # four heads of four channels
        return (both,)

    handle = module.register_forward_pre_hook(lambda m, args: kept.append(args[0]))
    with torch.no_grad():
        model(torch.tensor([CORRUPTED]))
        handle.remove()
        before = model(torch.tensor([CLEAN])).logits[0, -1, 4]
        handle = module.register_forward_pre_hook(put_in)
        after = model(torch.tensor([CLEAN])).logits[0, -1, 4]
        handle.remove()
    assert found.true is not None
    assert float(found.true[place]) == pytest.approx(float(after - before), rel=1e-6, abs=1e-9)


def test_by_the_jacobian_a_prediction_is_the_gradient_times_the_change() -> None:
    model: Any = zoo.build("gpt2", "sdpa")
    found = tl.patching(tl.Lens(model, rules="jacobian"), CLEAN, CORRUPTED, target=(4, 9))
    kept: list[torch.Tensor] = []
    handle = model.transformer.h[1].mlp.register_forward_hook(lambda m, args, y: kept.append(y))
    logits = model(torch.tensor([CLEAN])).logits[0, -1]
    model(torch.tensor([CORRUPTED]))
    handle.remove()
    (slope,) = torch.autograd.grad(logits[4] - logits[9], kept[0])
    place = [str(label) for label in found.labels].index("block 1, feed-forward")
    assert float(found.predicted[place]) == pytest.approx(float((slope * (kept[1] - kept[0])).sum().detach()), rel=1e-6)


def test_a_module_that_several_blocks_use_cannot_be_patched() -> None:
    sizes: dict[str, Any] = zoo.TEXT | {"embedding_size": 8}
    config = hf.AlbertConfig(**sizes)
    lens = tl.Lens(zoo.randomise(hf.AlbertForMaskedLM(config)).double().eval())
    found = tl.patching(lens, CLEAN, CORRUPTED, target=4, verify=True, progress=False)
    assert found.true is not None and found.true.isnan().all()
    assert found.predicted.abs().max() > 1e-3


def test_a_saved_record_comes_back(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    found = tl.patching(tl.Lens(zoo.build("gpt2", "sdpa")), CLEAN, CORRUPTED, target=4, verify=True, progress=False)
    back = tl.Patching.load(found.save(tmp_path / "patching.json"))
    assert torch.equal(back.predicted, found.predicted) and back.labels == found.labels and back.meta == found.meta
    assert back.true is not None and found.true is not None and torch.equal(back.true, found.true)
    assert (
        back.correlation("feed-forward") == found.correlation("feed-forward")
        and found.correlation("feed-forward").n == 3
    )
    found.show(k=1)
    assert str(found.labels[int(found.predicted.abs().argmax())]) in capsys.readouterr().out
    with pytest.raises(tl.InputError, match="json"):
        found.save(tmp_path / "patching.csv")


@pytest.mark.parametrize("name", ["llama", "bert-mlm", "phi"])
def test_heads_add_up_to_attention_and_nothing_changes_without_corruption(name: str) -> None:
    lens = tl.Lens(zoo.build(name, "sdpa"))
    found = tl.patching(lens, CLEAN, CORRUPTED, target={4: 1.0, 9: -0.5})
    assert found.true is None
    for block in range(3):
        effects = {
            kind: sum(
                float(effect)
                for label, effect in zip(found.labels, found.predicted, strict=True)
                if label.block == block and label.kind == kind
            )
            for kind in ("attention", "attention head")
        }
        assert effects["attention"] == pytest.approx(effects["attention head"], rel=1e-6, abs=1e-10)
    assert found.predicted.abs().max() > 1e-3
    assert not tl.patching(lens, CLEAN, CLEAN, target=4).predicted.any()


def test_weights_are_named_with_their_numbers() -> None:
    lens = tl.Lens(zoo.build("gpt2"))
    assert tl.patching(lens, CLEAN, CORRUPTED, {4: 1.0, 6: -1.0}).target == "4 − 6"
    assert tl.patching(lens, CLEAN, CORRUPTED, {4: -0.5, 6: 0.5, 7: 1}).target == "−0.5·4 + 0.5·6 + 7"


@pytest.mark.parametrize("weights", [{}, {4: float("nan")}, {4: "one"}])
def test_weights_that_are_no_numbers_are_refused(weights: Any, unchecked: None) -> None:
    with pytest.raises(tl.InputError, match="not all zero"):
        tl.patching(tl.Lens(zoo.build("gpt2")), CLEAN, CORRUPTED, weights)


def test_inputs_of_two_lengths_are_refused() -> None:
    with pytest.raises(tl.InputError, match="length"):
        tl.patching(tl.Lens(zoo.build("gpt2")), CLEAN, CLEAN[:3], target=4)


def test_lengths_are_those_of_each_stream() -> None:
    sizes: dict[str, Any] = {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4}
    sizes |= {"decoder_start_token_id": 0}
    config = hf.T5Config(vocab_size=60, **sizes)
    lens = tl.Lens(zoo.randomise(hf.T5ForConditionalGeneration(config)).double().eval())
    clean = {"input_ids": [CLEAN[:5]], "decoder_input_ids": [[2, 11, 12]]}
    for ids, own in ((CORRUPTED[:4], [2, 11, 12, 13]), (CORRUPTED[:6], [2, 11])):  # as many tokens in all
        with pytest.raises(tl.InputError, match="in the encoder"):
            tl.patching(lens, clean, {"input_ids": [ids], "decoder_input_ids": [own]}, target=4)


@pytest.mark.parametrize("name", ["llama", "bert-mlm"])
def test_patches_that_share_a_run_are_what_they_are_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lens = tl.Lens(zoo.build(name, "sdpa"))
    found = tl.patching(lens, CLEAN, CORRUPTED, target=4, verify=True, progress=False)
    monkeypatch.setattr("tensorlens.inside.seats.is_recorded", lambda run, end: False)  # as if rows touched each other
    alone = tl.patching(lens, CLEAN, CORRUPTED, target=4, verify=True, progress=False)
    assert found.true is not None and alone.true is not None
    torch.testing.assert_close(found.true, alone.true, rtol=1e-9, atol=1e-12)


def test_values_by_plain_runs_are_those_of_two_recordings(monkeypatch: pytest.MonkeyPatch) -> None:
    lens = tl.Lens(zoo.build("gpt2", "sdpa"), rules="attn_lrp")
    found = tl.patching(lens, CLEAN, CORRUPTED, target=4)
    monkeypatch.setattr("tensorlens.inside.patching.seat_of", lambda run, part: None)
    recorded = tl.patching(lens, CLEAN, CORRUPTED, target=4)
    torch.testing.assert_close(found.predicted, recorded.predicted, rtol=1e-9, atol=1e-12)
    with pytest.raises(tl.InputError, match="Expected two inputs of the same length"):
        tl.patching(lens, CLEAN, CORRUPTED[:-1], target=4)


# AtP* -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize("rules", ["paper", "jacobian"])
def test_queries_and_keys_go_through_the_true_softmax(name: str, rules: str) -> None:
    """Patched in a model whose attention is written out; behind the head everything is as T has it."""
    lens = tl.Lens(zoo.build(name, "sdpa"), rules=rules)
    found = tl.patching(lens, CLEAN, CORRUPTED, target=(4, 9), queries_and_keys=True)
    effects = {str(label): effect for label, effect in zip(found.labels, found.predicted.tolist(), strict=True)}
    assert sum("attention query" in label for label in effects) == 12
    # All heads of the last block, with queries and keys taken together: A' v - A v by the model's own kernel.
    kept: list[Any] = []
    plain = torch.nn.functional.scaled_dot_product_attention

    def watched(q: Any, k: Any, v: Any, *args: Any, **kwargs: Any) -> Any:
        kept.append((q, k, v, args, kwargs))
        return plain(q, k, v, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
        for ids in (CLEAN, CORRUPTED):
            lens.model(torch.tensor([ids]), use_cache=False)
    (q, k, v, args, kwargs), (other_q, other_k, *_) = kept[2], kept[5]
    T = lens(CLEAN)
    asked = Pass(T.operator, {4: 1.0, 9: -1.0}, len(CLEAN) - 1)
    slot = next(one.slot for one in T.operator.recording.mixtures if one.block == 2)
    for what, moved in (("query", (other_q, k)), ("key", (q, other_k))):
        change = (plain(*moved, v, *args, **kwargs) - plain(q, k, v, *args, **kwargs))[0]
        expected = (asked.cotangents(2)[slot][0] * change).sum((1, 2))
        ours = torch.tensor([effects[f"block 2, attention {what} {h}"] for h in range(4)], dtype=torch.float64)
        torch.testing.assert_close(ours, expected.detach(), rtol=1e-6, atol=1e-9)


def test_dropping_blocks_shows_what_cancels() -> None:
    """A block is dropped by detaching what it writes, so that gradients pass by the stream alone."""
    model: Any = zoo.build("gpt2", "sdpa")
    found = tl.patching(tl.Lens(model, rules="jacobian"), CLEAN, CORRUPTED, target=4, drop=True)
    kept, effects, blocks = list[torch.Tensor](), list[float](), model.transformer.h
    blocks[0].mlp.register_forward_hook(lambda m, args, y: kept.append(y))
    model(torch.tensor([CORRUPTED]))
    for block in blocks[1:]:
        handles = [
            block.mlp.register_forward_hook(lambda m, args, y: y.detach()),
            block.attn.register_forward_hook(lambda m, args, y: (y[0].detach(), *y[1:])),
        ]
        (slope,) = torch.autograd.grad(model(torch.tensor([CLEAN])).logits[0, -1, 4], kept[-1])
        effects.append(abs(float((slope * (kept[0] - kept[-1])).sum().detach())))
        for handle in handles:
            handle.remove()
    assert found.robust is not None and effects[0] != pytest.approx(effects[1], rel=0.1)
    place = [str(label) for label in found.labels].index("block 0, feed-forward")
    assert float(found.robust[place]) == pytest.approx(sum(effects) / 2, rel=1e-6)
    assert float(found.robust[-1]) == pytest.approx(abs(float(found.predicted[-1])), rel=1e-9)  # nothing comes after it


def test_the_best_are_verified_and_the_rest_is_estimated() -> None:
    lens = tl.Lens(zoo.build("gpt2", "sdpa"), rules="jacobian")
    every = tl.patching(lens, CLEAN, CORRUPTED, target=4, verify=True, progress=False)
    some = tl.patching(lens, CLEAN, CORRUPTED, target=4, verify=5, progress=False)
    assert every.true is not None and some.true is not None and every.missed is None
    known = ~some.true.isnan()
    best = every.predicted.abs().topk(5).indices.sort().values
    assert known.nonzero()[:, 0].tolist() == best.tolist()
    torch.testing.assert_close(some.true[known], every.true[known], rtol=1e-9, atol=1e-12)
    # What is left over, an attention by its heads: no effect is larger than the length of all of them.
    rest = [i for i, label in enumerate(every.labels) if not known[i] and label.kind != "attention"]
    assert some.missed is not None and some.missed > float(every.true[rest].abs().max())
    assert some.missed == pytest.approx(float(every.true[rest].norm()), rel=0.5)
