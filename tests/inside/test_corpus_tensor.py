"""The operator of a corpus: the mean of derivatives by plain autograd, whatever the batches; probes come near it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf
import zoo
from torch import Tensor

import tensorlens as tl

TEXTS = [[5, 6, 7, 8, 9], [11, 4, 30], [7, 7, 31, 2, 40]]
CLOSE = dict(rtol=1e-9, atol=1e-10)
CASTS = dict(rtol=1e-5, atol=1e-6)  # the model's own code computes parts in float32


def plain_hidden(model: Any, ids: list[int]) -> tuple[Tensor, ...]:
    """Hidden states of the model left to itself, with their graph; the last is after the final norm."""
    x = model.get_input_embeddings()(torch.tensor([ids])).detach().requires_grad_()
    return model(inputs_embeds=x, output_hidden_states=True, use_cache=False).hidden_states


def own_jacobians(model: Any, ids: list[int], n: int) -> Tensor:
    """∂h_i/∂x_i of plain autograd, (token, channel, channel)."""
    hidden = plain_hidden(model, ids)
    return torch.stack(
        [
            torch.stack([torch.autograd.grad(h, hidden[n], retain_graph=True)[0][0, i] for h in hidden[-1][0, i]])
            for i in range(len(ids))
        ]
    )


@pytest.mark.parametrize(("name", "close"), [("gpt2", CLOSE), ("phi", CASTS)])
def test_with_the_jacobian_it_is_the_mean_of_plain_derivatives(name: str, close: dict[str, float]) -> None:
    model: Any = zoo.build(name, "eager")
    fitted = tl.CorpusTensor.fit(tl.Lens(model, rules=tl.Rules.jacobian()), TEXTS, batch_size=2, progress=False)
    assert fitted.matrices.shape == (3, 16, 16) and fitted.n_texts == 3 and fitted.meta["probes"] is None
    for n in range(3):
        means, constants = [], []
        for ids in TEXTS:
            j, hidden = own_jacobians(model, ids, n), plain_hidden(model, ids)
            means.append(j.mean(0))
            constants.append((hidden[-1][0] - torch.einsum("ioc,ic->io", j, hidden[n][0])).mean(0).detach())
        torch.testing.assert_close(fitted.matrices[n], torch.stack(means).mean(0), **close)
        torch.testing.assert_close(fitted.bias[n], torch.stack(constants).mean(0), **close)


def test_later_outputs_are_summed_before_the_final_norm() -> None:
    model: Any = zoo.build("gpt2", "eager")
    lens = tl.Lens(model, rules=tl.Rules.jacobian(include_final_norm=False))
    fitted = tl.CorpusTensor.fit(lens, TEXTS, outputs="later", skip_first=1, skip_last=1, progress=False)
    assert fitted.n_texts == 3 and not fitted.bias.any()
    means = []
    for ids in TEXTS:
        seen: list[Tensor] = []
        handle = model.transformer.h[2].register_forward_hook(lambda m, a, y, seen=seen: seen.append(y))
        hidden = plain_hidden(model, ids)
        handle.remove()
        last = seen[0] if isinstance(seen[0], Tensor) else seen[0][0]
        inner = slice(1, len(ids) - 1)
        rows = [
            torch.autograd.grad(last[0, inner, d].sum(), hidden[1], retain_graph=True)[0][0, inner].mean(0)
            for d in range(16)
        ]
        means.append(torch.stack(rows))
    torch.testing.assert_close(fitted.matrices[1], torch.stack(means).mean(0), **CLOSE)


def test_a_lens_reads_inside_a_block_too(tmp_path: Any) -> None:
    """From the stream after attention: against plain autograd, through both files, and in words."""
    model: Any = zoo.build("gpt2", "eager")
    lens = tl.Lens(model, rules=tl.Rules.jacobian(include_final_norm=False))
    fitted = tl.CorpusTensor.fit(lens, TEXTS, batch_size=2, outputs="later", middle=True, progress=False)
    whole = tl.CorpusTensor.fit(lens, TEXTS, batch_size=2, outputs="later", progress=False)
    torch.testing.assert_close(fitted.matrices, whole.matrices, **CLOSE)
    assert fitted.middle is not None and whole.middle is None
    means, states = [], []
    for ids in TEXTS:
        seen: dict[str, Tensor] = {}
        handles = [
            model.transformer.h[1].ln_2.register_forward_pre_hook(lambda m, a, seen=seen: seen.update(middle=a[0])),
            model.transformer.ln_f.register_forward_pre_hook(lambda m, a, seen=seen: seen.update(last=a[0])),
        ]
        plain_hidden(model, ids)
        [handle.remove() for handle in handles]
        states.append(seen["middle"][0].detach())
        rows = [
            torch.autograd.grad(seen["last"][0, :, d].sum(), seen["middle"], retain_graph=True)[0][0].mean(0)
            for d in range(16)
        ]
        means.append(torch.stack(rows))
    torch.testing.assert_close(fitted.middle[1], torch.stack(means).mean(0), **CLOSE)
    for path in (fitted.save(tmp_path / "lens.safetensors"), fitted.save(tmp_path / "lens.pt", format="jacobian-lens")):
        back = tl.CorpusTensor.load(path)
        assert back.middle is not None and torch.equal(back.middle, fitted.middle)
        read = back.read(lens(TEXTS[0]), k=1)
        assert read.places == ("0", "0, after attention", "1", "1, after attention", "2", "2, after attention")
        with torch.no_grad():
            words = model.lm_head(model.transformer.ln_f(states[0] @ fitted.middle[1].T)).argmax(-1)
        assert [one[0].index for one in read.corpus[3]] == words.tolist()
        assert len(read.identity) == 6
    parallel = tl.Lens(zoo.build("neox-parallel"), rules=tl.Rules.jacobian())
    with pytest.raises(tl.MethodError, match="between attention and feed-forward"):
        tl.CorpusTensor.fit(parallel, TEXTS, middle=True, progress=False)


def test_by_the_papers_rules_it_is_the_mean_of_the_blocks_of_T() -> None:
    lens = tl.Lens(zoo.build("llama", "sdpa"))
    fitted = tl.CorpusTensor.fit(lens, TEXTS, batch_size=3, progress=False)
    for n in range(3):
        of = [lens(ids).blocks(n, 3) for ids in TEXTS]
        means = [torch.stack([T.rows(i)[:, i] for i in range(T.n_tokens)]).mean(0) for T in of]
        torch.testing.assert_close(fitted.matrices[n], torch.stack(means).mean(0), **CASTS)


def test_probes_come_near_and_are_said() -> None:
    lens = tl.Lens(zoo.build("gpt2", "eager"))
    exact = tl.CorpusTensor.fit(lens, TEXTS, progress=False)
    errors = []
    for n_probes in (50, 5000):
        fitted = tl.CorpusTensor.fit(lens, TEXTS, probes=n_probes, progress=False)
        assert fitted.meta["probes"] == n_probes
        errors.append(float((fitted.matrices - exact.matrices).norm() / exact.matrices.norm()))
    assert errors[1] < 0.2 * errors[0] and errors[1] < 0.2  # it falls with the root of their number: a tenth


@pytest.mark.parametrize("final_norm", [True, False])
def test_the_last_state_reads_as_what_the_model_says(final_norm: bool) -> None:
    model: Any = zoo.build("llama", "sdpa")
    lens = tl.Lens(model, rules=tl.Rules(include_final_norm=final_norm))
    T = lens(TEXTS[0])
    fitted = tl.CorpusTensor.fit(lens, [TEXTS[0]], progress=False)
    read = fitted.read(T, k=3)
    assert len(read.corpus) == len(read.plain) == 3 and len(read.corpus[0]) == 5
    with torch.no_grad():
        hidden = model(torch.tensor([TEXTS[0]]), output_hidden_states=True).hidden_states
        plain = model.lm_head(model.model.norm(hidden[2]))[0]
        y = hidden[1][0] @ fitted.matrices[1].T + fitted.bias[1]
        ours = model.lm_head(y if final_norm else model.model.norm(y))
    assert [one[0].name for one in read.plain[2]] == [str(i) for i in plain.argmax(-1).tolist()]
    assert [one[0].name for one in read.corpus[1]] == [str(i) for i in ours.argmax(-1).tolist()]
    assert read.corpus[1][0][0].probability == pytest.approx(float(ours[0].softmax(-1).max()), rel=1e-4)


def test_a_saved_one_comes_back(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    lens = tl.Lens(zoo.build("gpt2", "eager"))
    fitted = tl.CorpusTensor.fit(lens, TEXTS, progress=False)
    back = tl.CorpusTensor.load(fitted.save(tmp_path / "corpus.safetensors"))
    assert torch.equal(back.matrices, fitted.matrices) and torch.equal(back.bias, fitted.bias)
    assert (back.outputs, back.n_texts, back.meta) == (fitted.outputs, fitted.n_texts, fitted.meta)
    read = back.read(lens(TEXTS[0]), k=1)
    read.show()
    assert repr(read.corpus[0][-1][0].name) in capsys.readouterr().out
    (tmp_path / "other.safetensors").write_bytes(b"x")
    with pytest.raises(tl.InputError, match="CorpusTensor"):
        tl.CorpusTensor.load(tmp_path / "other.safetensors")
    with pytest.raises(tl.InputError, match="safetensors"):
        fitted.save(tmp_path / "corpus.json")


def test_what_it_cannot_be_fitted_on_is_refused(unchecked: None) -> None:
    lens = tl.Lens(zoo.build("gpt2", "eager"))
    with pytest.raises(tl.InputError, match="tokens"):
        tl.CorpusTensor.fit(lens, TEXTS, skip_first=9, progress=False)
    with pytest.raises(tl.InputError, match="own"):
        tl.CorpusTensor.fit(lens, TEXTS, outputs="all")  # type: ignore[arg-type]
    fitted = tl.CorpusTensor.fit(lens, TEXTS, progress=False)
    with pytest.raises(tl.InputError, match="blocks"):
        fitted.read(tl.Lens(zoo.build("bert"))(TEXTS[0]))
    config = hf.T5Config(
        d_model=16,
        d_kv=4,
        num_heads=4,
        d_ff=24,
        num_layers=2,
        num_decoder_layers=2,
        vocab_size=60,
        pad_token_id=0,
        decoder_start_token_id=0,
    )
    t5 = tl.Lens(zoo.randomise(hf.T5ForConditionalGeneration(config)).double().eval())
    with pytest.raises(tl.MethodError, match="stream"):
        tl.CorpusTensor.fit(t5, [{"input_ids": [[5, 6]], "decoder_input_ids": [[0, 11]]}], progress=False)


def test_a_lens_in_the_layout_of_others_comes_back(tmp_path: Any) -> None:
    lens = tl.Lens(zoo.build("gpt2", "sdpa"), rules=tl.Rules.jacobian(include_final_norm=False))
    fitted = tl.CorpusTensor.fit(lens, TEXTS, outputs="later", progress=False)
    fitted.save(tmp_path / "lens.pt", format="jacobian-lens")
    held = torch.load(tmp_path / "lens.pt", weights_only=True)
    assert held["source_layers"] == [0, 1] and held["d_model"] == 16 and held["n_prompts"] == 3
    torch.testing.assert_close(held["J"][1], fitted.matrices[2])  # what leaves block 1 enters block 2
    again = tl.CorpusTensor.load(tmp_path / "lens.pt")
    assert again.as_dict() == fitted.as_dict()
    foreign = {name: held[name] for name in ("J", "n_prompts", "source_layers", "d_model")}
    torch.save(foreign | {"J": {k: v.half() for k, v in held["J"].items()}}, tmp_path / "published.pt")
    published = tl.CorpusTensor.load(tmp_path / "published.pt")
    assert published.first == 1 and published.outputs == "later" and published.matrices.dtype == torch.float32
    read = published.read(lens(TEXTS[0]), k=1)
    assert len(read.corpus) == 2 and read.first == 1 and len(read.identity) == 2
    torch.save({"jacobian_sum": {0: 3 * held["J"][0], 1: 3 * held["J"][1]}, "n_done": 3}, tmp_path / "checkpoint.pt")
    torch.testing.assert_close(tl.CorpusTensor.load(tmp_path / "checkpoint.pt").matrices, fitted.matrices[1:])
    torch.save({"K": 3}, tmp_path / "other.pt")
    for wrong in ("other.pt", "none.pt"):
        with pytest.raises(tl.InputError, match="lens"):
            tl.CorpusTensor.load(tmp_path / wrong)
    with_norm = tl.CorpusTensor.fit(tl.Lens(zoo.build("gpt2", "sdpa")), TEXTS, progress=False)
    with pytest.raises(tl.InputError, match="before the final norm"):
        with_norm.save(tmp_path / "lens.pt", format="jacobian-lens")


def test_the_share_of_the_identity_is_what_is_left_by_the_best_multiple_of_it() -> None:
    fitted = tl.CorpusTensor.fit(tl.Lens(zoo.build("gpt2", "sdpa")), TEXTS, progress=False)
    for matrix, share in zip(fitted.matrices, fitted.identity_shares.tolist(), strict=True):
        best = matrix.diagonal().mean() * torch.eye(16, dtype=matrix.dtype)  # nearest multiple of the identity
        assert share == pytest.approx(1 - float(((matrix - best).norm() / matrix.norm()) ** 2))
    read = fitted.read(tl.Lens(zoo.build("gpt2", "sdpa"))(TEXTS[0]), k=1)
    assert read.identity == pytest.approx(fitted.identity_shares.tolist())
