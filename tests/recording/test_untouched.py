"""The user's model afterwards: the same object, the same behaviour, also after an exception, also with two threads."""

from __future__ import annotations

import sys
import threading

import pytest
import torch
from portrait import assert_same, outputs, portrait
from torch import nn
from zoo import build, sample

import tensorlens as tl
from tensorlens.operators.plain import plain_output


@pytest.mark.parametrize("training", [False, True])
def test_untouched_after_an_exception_in_the_middle(training):
    model = build("llama").train(training)
    failing = model.model.layers[1].mlp
    broken = RuntimeError("out of luck")

    def fail(*_):
        raise broken

    handle = failing.down_proj.register_forward_pre_hook(fail)
    before = portrait(model)
    with pytest.raises(tl.InputError, match="itself cannot run on this input: RuntimeError: out of luck") as said:
        tl.Lens(model)(sample("llama"))
    assert said.value.__cause__ is broken
    assert_same(before, portrait(model))
    handle.remove()
    assert tl.Lens(model)(sample("llama")).certificate().passed


def test_an_instance_forward_of_somebody_else_is_put_back():
    model = build("gpt2")
    block = model.transformer.h[0]
    original = block.forward
    calls = []

    def counted(*args, **kwargs):
        calls.append(1)
        return original(*args, **kwargs)

    block.forward = counted
    T = tl.Lens(model)(sample("gpt2"))
    assert T.certificate().passed
    assert block.forward is counted
    assert calls


@pytest.fixture
def many_switches():
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(usual)


@pytest.mark.usefixtures("many_switches")
def test_other_threads_use_the_model_meanwhile():
    model = build("gpt2", dtype=torch.float32)
    expected = outputs(model, "gpt2")
    before = portrait(model)
    T = tl.Lens(model)(sample("gpt2"))
    slice_alone = T.rows(3)
    results, slices, stop = [], [], threading.Event()

    def use_plainly():
        while not stop.is_set():
            results.append(torch.equal(outputs(model, "gpt2"), expected))

    def use_lens():
        for _ in range(10):
            slices.append(tl.Lens(model)(sample("gpt2")).rows(3))

    plain = threading.Thread(target=use_plainly)
    lenses = [threading.Thread(target=use_lens) for _ in range(3)]
    plain.start()
    for thread in lenses:
        thread.start()
    for thread in lenses:
        thread.join()
    stop.set()
    plain.join()
    assert results and all(results)
    assert len(slices) == 30
    assert all(torch.equal(found, slice_alone) for found in slices)
    assert_same(portrait(model), before)


# The other way round: what was held belongs to the weights it was held with ------------------------------------------


@pytest.mark.parametrize("method", ["tensor.in_out", "tensor.norm", "tensor.in_class"])
def test_weights_that_changed_after_the_pass_are_noticed(method):
    model = build("gpt2")
    T = tl.Lens(model)(sample("gpt2"))
    T.map(method, out_token=-1)
    with torch.no_grad():
        model.transformer.h[1].attn.c_proj.weight.mul_(0)
    with pytest.raises(tl.InputError, match="`transformer.h.1.attn.c_proj.weight` was modified after"):
        T.map(method, out_token=-1)
    assert T.blocks(0, 1).map("tensor.norm").scores.isfinite().all(), "a part that does not depend on it"


def test_a_certificate_says_that_a_hook_may_have_come_later():
    model = build("gpt2")
    T = tl.Lens(model)(sample("gpt2"))
    model.transformer.h[1].mlp.register_forward_hook(lambda _, __, output: 1.1 * output)
    found = T.certificate()
    assert "value" in found.failures
    assert "the model was changed since, by a hook" in str(found)


def test_weights_whose_memory_was_given_back_are_noticed():
    model = build("gpt2")
    T = tl.Lens(model)(sample("gpt2"))
    model.transformer.h[1].attn.c_proj.weight.untyped_storage().resize_(0)
    with pytest.raises(tl.InputError, match="`transformer.h.1.attn.c_proj.weight` was modified after"):
        T.map("tensor.in_class", out_token=-1)


@pytest.mark.parametrize("name", ["gpt2", "bert-classifier"])
def test_a_head_that_changed_is_noticed_where_logits_are_asked_for(name):
    model = build(name)
    T, batch = tl.Lens(model)(sample(name)), tl.Lens(model).batch([sample(name), sample(name)[:4]])
    expected = T.map("tensor.in_out", out_token=0).scores
    with torch.no_grad():
        (model.lm_head if name == "gpt2" else model.classifier).weight.mul_(-1)
    # A classifier's logits are those of the pass; an unembedding is applied when it is asked for.
    asked = [lambda: T.certificate(), *([lambda: T.predictions()] if name == "gpt2" else [])]
    for method in ("tensor.in_class", "gradient.times_input", "gradient.integrated"):
        place = -1 if name == "gpt2" else None
        asked += [lambda method=method, i=place: T.map(method, out_token=i), lambda method=method: batch.maps(method)]
    for ask in asked:
        with pytest.raises(tl.InputError, match="was modified"):
            ask()
    assert torch.equal(T.map("tensor.in_out", out_token=0).scores, expected)


def test_what_is_done_to_the_model_later_is_not_done_to_T():
    model = build("gpt2")
    T = tl.Lens(model)(sample("gpt2"))
    expected = T.map("tensor.in_class", out_token=-1).scores
    model.train().gradient_checkpointing_enable()
    model.transformer.h[1].register_forward_hook(lambda *_: None)
    model.transformer.h[1].tag, model.generation_config.temperature = "seen", 0.5
    assert torch.equal(T.map("tensor.in_class", out_token=-1).scores, expected)
    assert T.certificate().passed
    again = tl.Lens(model)(sample("gpt2"))
    model.float()  # the weights are in another memory now; what T holds is not
    assert torch.equal(again.map("tensor.in_class", out_token=-1).scores, expected)
    with pytest.raises(tl.InputError, match="needs the model as it was"):
        again.certificate()


def test_what_a_tensor_gives_out_is_a_copy():
    T = tl.Lens(build("gpt2"))(sample("gpt2"))
    before = T.map(out_token=-1).scores
    for state in (T.input, T.output, T.bias):
        state.zero_()
    assert torch.equal(T.map(out_token=-1).scores, before)


class Keeping(nn.Module):
    """Keeps things from one call to the next, as many do for pictures, for speed or by mistake."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block, self.attention, self.n_calls = block, None, 0
        self.register_buffer("mean", torch.zeros(16, dtype=torch.float64))
        self.mean: torch.Tensor

    def forward(self, x: torch.Tensor, *args, **kwargs):
        self.n_calls += 1
        self.attention, self.last = x.softmax(-1), x.detach()
        self.mean.add_(x.mean((0, 1)))
        return self.block(x, *args, **kwargs)


def test_what_a_model_keeps_of_a_call_is_what_it_kept_before():
    model: nn.Module = build("gpt2")
    model.transformer.h[1] = keeping = Keeping(model.transformer.h[1])
    T = tl.Lens(model)(sample("gpt2"))
    T.rows(2)
    assert T.certificate().passed
    assert keeping.attention is None and keeping.n_calls == 0 and not hasattr(keeping, "last")
    assert type(keeping.mean) is torch.Tensor and not keeping.mean.any()
    model(torch.tensor([sample("gpt2")]))
    T = tl.Lens(model)(sample("gpt2"))
    T.map("tensor.norm")
    assert keeping.n_calls == 1 and type(keeping.attention) is type(keeping.last) is torch.Tensor


def test_buffers_are_the_users_own_after_passes_in_two_threads():
    model = build("llama")
    before = {name: id(buffer) for name, buffer in model.named_buffers()}
    T = tl.Lens(model)(sample("llama"))
    errors: list[BaseException] = []

    def work(n: int) -> None:
        try:
            for _ in range(4):
                if n:
                    plain_output(T.operator.recording)
                else:
                    T.operator.push(T.input[None])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and {name: id(buffer) for name, buffer in model.named_buffers()} == before
