"""A fingerprint changes with everything that a model's behaviour depends on, and with nothing else."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import zoo
from torch import nn

import tensorlens as tl
from tensorlens.freezing import interception
from tensorlens.freezing.interception import current_fingerprint
from tensorlens.models.fingerprint import Samples, fingerprint, in_this_thread, moved, what_changed


def block(model: Any, n: int) -> Any:
    return model.transformer.h[n]


def add_hook(model: Any) -> None:
    block(model, 1).mlp.register_forward_hook(lambda *_: None)


def replace_class(model: Any) -> None:
    block(model, 1).mlp.__class__ = type("Other", (type(block(model, 1).mlp),), {})


def reorder(model: Any) -> None:
    blocks = model.transformer.h
    blocks[0], blocks[1] = blocks[1], blocks[0]


def write(model: Any) -> None:
    with torch.no_grad():
        block(model, 2).ln_1.weight.mul_(1)


def set_config(model: Any) -> None:
    model.config.something = 3


def set_forward(model: Any) -> None:
    block(model, 0).forward = block(model, 0).forward


CHANGES: dict[str, tuple[Callable[[Any], object], str]] = {
    "hook": (add_hook, "the hooks of `transformer.h.1.mlp` changed"),
    "pre-hook": (lambda m: block(m, 1).register_forward_pre_hook(lambda *_: None), "the hooks of `transformer.h.1`"),
    "backward hook": (lambda m: block(m, 1).register_full_backward_pre_hook(lambda *_: None), "the hooks of"),
    "activation": (lambda m: setattr(block(m, 1).mlp, "act", nn.ReLU()), "of `transformer.h.1.mlp.act` changed"),
    "function": (lambda m: setattr(block(m, 1).mlp, "act_fn", torch.relu), "`act_fn` of `transformer.h.1.mlp`"),
    "layer": (lambda m: setattr(block(m, 2), "ln_1", nn.LayerNorm(16)), "the identity of `transformer.h.2.ln_1`"),
    "order": (reorder, "the identity of `transformer.h.0` changed"),
    "class": (replace_class, "the class of `transformer.h.1.mlp`"),
    "weight": (write, "`weight` of `transformer.h.2.ln_1` changed"),
    "training": (lambda m: m.train(), "the training mode of `GPT2LMHeadModel`"),
    "flag": (lambda m: setattr(block(m, 1), "_disable_adapters", True), "`_disable_adapters` of `transformer.h.1`"),
    "names": (lambda m: setattr(block(m, 1), "active_adapter", ["a"]), "`active_adapter` of `transformer.h.1`"),
    "buffer": (lambda m: block(m, 1).register_buffer("more", torch.ones(2)), "`more` of `transformer.h.1`"),
    "forward": (set_forward, "`forward` of `transformer.h.0` changed"),
    "configuration": (set_config, "a configuration changed"),
    "part": (lambda m: block(m, 1).add_module("more", nn.Identity()), "`more` of `transformer.h.1` changed"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_each_change_is_noticed_and_named(change: str) -> None:
    model = zoo.build("gpt2")
    before, (act, said) = fingerprint(model), CHANGES[change]
    assert before == fingerprint(model) and hash(before) == hash(fingerprint(model))
    act(model)
    after = fingerprint(model)
    assert before != after
    assert said in what_changed(before, after, model)


def test_a_global_hook_and_a_class_patched_from_outside_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = zoo.build("gpt2")
    before = fingerprint(model)
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert what_changed(before, fingerprint(model), model) == "a global hook was added or removed"
    handle.remove()
    assert before == fingerprint(model)
    kind = type(block(model, 0))
    monkeypatch.setattr(kind, "forward", lambda self, *args, **kwargs: args[0])
    assert what_changed(before, fingerprint(model), model) == "the code of a class changed"


def test_a_hook_made_at_the_address_of_an_old_one_is_another() -> None:
    model = zoo.build("gpt2")

    def hooked(factor: float) -> Any:
        handle = block(model, 0).register_forward_hook(lambda _, __, output: factor * output)
        found = fingerprint(model)
        handle.remove()
        return found

    assert hooked(1.0) != hooked(2.0)

    def activated(factor: float) -> Any:
        block(model, 0).mlp.act_fn = None
        block(model, 0).mlp.act_fn = lambda x: factor * x
        return fingerprint(model)

    assert len({activated(float(n)) for n in range(8)}) == 8


def test_a_pass_changes_nothing_even_while_it_runs() -> None:
    model = zoo.build("llama")
    before, during = fingerprint(model), deque[Any]()  # in a list that the hook reads, they would be a change

    def look(*_: object) -> None:
        thread = threading.Thread(target=lambda: during.append(current_fingerprint(model)))
        thread.start()
        thread.join()

    handle = model.register_forward_pre_hook(look)
    hooked = fingerprint(model)
    T = tl.Lens(model)(zoo.sample("llama"))
    T.rows(2)
    assert during and all(found == hooked for found in during)
    handle.remove()
    assert fingerprint(model) == before


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.count, self.scale = 0, 1.0
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        self.seen += 1
        return self.scale * x


def test_what_a_pass_moves_by_itself_is_ignored_and_nothing_else() -> None:
    model = Counting()
    before = fingerprint(model)
    model(torch.ones(1))
    own = moved(before, fingerprint(model), model)
    assert {name for _, name in own} == {"seen"}, "the count is assigned by the forward, and no part of it at all"
    recorded = fingerprint(model, own)
    model(torch.ones(1))
    assert fingerprint(model, own) == recorded
    model.scale = 2.0
    assert fingerprint(model, own) != recorded


def test_it_keeps_nothing_alive() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    model[1].helper = model.forward  # type: ignore[assignment]
    found, gone = fingerprint(model), weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None and found == found


def test_off_loaded_weights_have_none_and_nested_configurations_count() -> None:
    with torch.device("meta"):
        assert fingerprint(nn.Linear(2, 2)) is None
    model = nn.Linear(2, 2)
    model.config = SimpleNamespace(inner=SimpleNamespace(flag=False))  # type: ignore[assignment]
    before = fingerprint(model)
    model.config.inner.flag = True  # type: ignore[union-attr]
    assert before != fingerprint(model)


def test_a_write_through_data_is_seen_by_the_samples() -> None:
    model = zoo.build("gpt2")
    before, samples = fingerprint(model), Samples(model)
    assert samples.same()
    block(model, 1).mlp.c_fc.weight.data.mul_(1.1)
    assert before == fingerprint(model), "torch keeps no version of it"
    assert not samples.same()


def test_hooks_that_only_watch_are_no_change_and_a_users_hook_beside_them_is() -> None:
    model = zoo.build("gpt2")
    before = fingerprint(model)
    with torch.no_grad():
        model(torch.tensor([zoo.sample("gpt2")]), output_hidden_states=True)  # installs hooks for good
    handle = block(model, 1).register_forward_hook(in_this_thread(lambda *_: None))
    assert block(model, 1)._forward_hooks and fingerprint(model) == before
    block(model, 1).register_forward_hook(lambda *_: None)
    assert fingerprint(model) != before
    handle.remove()


def test_a_hook_for_one_pass_is_run_by_no_other_thread() -> None:
    ran: list[int] = []
    hook = in_this_thread(ran.append)
    other = threading.Thread(target=hook, args=(1,))
    other.start()
    other.join()
    hook(2)
    assert ran == [2]


class Switched(nn.Module):
    """Reads what is no attribute of it: of its class, of this file, of a helper's."""

    gain = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gain * SWITCHES["gain"] * helped()


SWITCHES, HELPED = {"gain": 1.0}, 1.0


def helped() -> float:
    return HELPED


def hooked_by(read: dict[str, Any]) -> nn.Module:
    """A block with a hook that reads a dictionary, as those that steer do."""
    model = nn.Sequential(Switched(), nn.Linear(2, 2))
    model[1].register_forward_hook(lambda _, __, output: output * read["gain"])
    return model


def forwarded_by(read: dict[str, Any]) -> nn.Module:
    model = nn.Sequential(Switched(), nn.Linear(2, 2))
    inner = model[1].forward
    model[1].forward = partial(lambda f, x: f(x) * read["gain"], inner)  # type: ignore[method-assign]
    return model


@pytest.mark.parametrize("build", [hooked_by, forwarded_by])
def test_what_functions_read_is_part_of_the_model(build: Callable[..., nn.Module], monkeypatch: pytest.MonkeyPatch):
    read: dict[str, Any] = {"gain": 1.0}
    model = build(read)
    seen = [fingerprint(model)]
    assert seen[0] == fingerprint(model)
    monkeypatch.setattr(Switched, "gain", 2.0)
    seen.append(fingerprint(model))
    monkeypatch.setitem(SWITCHES, "gain", 2.0)
    seen.append(fingerprint(model))
    monkeypatch.setattr(sys.modules[__name__], "HELPED", 2.0)
    seen.append(fingerprint(model))
    read["gain"] = np.ones(2)
    seen.append(fingerprint(model))
    read["gain"][1] = 2
    seen.append(fingerprint(model))
    assert len(set(seen)) == 6
    assert "what its code reads of `0` changed" in what_changed(seen[0], seen[1], model)


def test_a_tensor_is_refused_once_what_a_hook_reads_has_changed():
    read = {"gain": 1.0}
    model: Any = zoo.build("gpt2")
    block(model, 1).register_forward_hook(lambda _, __, output: output * read["gain"])
    T = tl.Lens(model)(zoo.sample("gpt2"))
    T @ T.input
    read["gain"] = 1.5
    with pytest.raises(tl.InputError, match="what its hooks read of `transformer.h.1` changed"):
        T @ T.input


def test_a_hook_may_read_what_holds_itself():
    model, state = zoo.build("gpt2"), {"scale": 1.5, "seen": []}
    state["all"], state["seen"] = state, [state]
    model.transformer.h[0].mlp.register_forward_hook(lambda module, args, output: output * state["scale"])
    T = tl.Lens(model)(zoo.sample("gpt2"))
    assert T.certificate().passed
    state["scale"] = 2.0
    with pytest.raises(tl.InputError, match="what its hooks read"):
        T.apply(T.input)


def test_what_hooks_collect_is_no_change_of_the_model():
    collected: dict[int, torch.Tensor] = {}
    model: Any = zoo.build("gpt2")
    for n in range(3):
        block(model, n).register_forward_hook(lambda _, __, output, n=n: collected.__setitem__(n, output))
    T = tl.Lens(model)(zoo.sample("gpt2"))
    assert T.certificate().passed and T.rows(1).shape[0] and len(collected) == 3


def test_every_element_of_a_small_model_is_looked_at():
    model = zoo.build("gpt2")
    samples = Samples(model)
    assert samples.same()
    block(model, 1).mlp.c_fc.weight.data.view(-1)[-2] += 1
    assert not samples.same()


def test_a_map_of_a_known_model_takes_two_fingerprints_and_a_model_that_counts_its_calls_more(monkeypatch):
    taken, fingerprint = [], interception.fingerprint
    monkeypatch.setattr(interception, "fingerprint", lambda *of: taken.append(of) or fingerprint(*of))

    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.seen = zoo.build("gpt2"), []

        def forward(self, input_ids):
            object.__setattr__(self, "seen", [*self.seen, 1])
            return self.inner(input_ids)

    counts = []
    for model in (zoo.build("gpt2"), Counting().eval()):
        lens = tl.Lens(model)
        lens([3, 4, 5]).map("tensor.in_out", out_token=-1)
        taken.clear()
        lens([3, 4, 5]).map("tensor.in_out", out_token=-1)
        counts.append(len(taken))
    assert counts[0] == 2, "before the pass, and before the graph is used"
    assert counts[1] > 2, "its state after a pass is another one"
