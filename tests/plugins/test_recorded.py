"""What the plug-ins gave inside their hosts, against T itself; no host is needed."""

from __future__ import annotations

import copy
import functools
import subprocess
import sys

import pytest
from plugin_samples import AGAINST, PAIR, PROMPT, TARGET, encoder, ids_of, lens

import tensorlens as tl
from tensorlens.inside.stream import Component
from tensorlens.plugins.nnsight import nnsight_lens, traced_input
from tensorlens.plugins.transformer_lens import component_of, hook_of, label_of


def test_no_host_is_imported_with_the_package():
    code = "import sys, tensorlens.plugins; print([m for m in sys.modules if m.split('.')[0] in "
    hosts = "('captum', 'inseq', 'transformer_lens', 'nnsight', 'sentence_transformers', 'bertviz', 'torch')])"
    done = subprocess.run([sys.executable, "-c", code + hosts], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_captum_and_inseq_gave_the_in_class_map(recorded):
    T = lens()(PROMPT)
    recorded("captum", T.map("tensor.in_class", -1, TARGET).scores[0].tolist())
    recorded("inseq contrast", T.map("tensor.in_class", -1, (TARGET, AGAINST)).scores[0].tolist())


def test_captum_gave_the_map_of_an_answer(recorded):
    found = lens().answer(ids_of(PROMPT), ids_of(" no")).map("tokens", "tokens", "centred")
    recorded("captum answer", found.scores[:, : len(ids_of(PROMPT))].sum(0).tolist())


def test_transformer_lens_gave_the_direct_effects(recorded):
    found = lens("llama")(ids_of(PROMPT)).components(-1, (TARGET, AGAINST), "direct")
    at_last = dict(zip(map(str, found.labels), found.scores[:, -1].tolist(), strict=True))
    recorded("transformer_lens", [at_last["embedding"], at_last["block 1, attention head 2"]])


def test_sentence_transformers_gave_the_cosine(recorded):
    found = tl.similarity(encoder(), *PAIR, pooling="mean")
    recorded("sentence_transformers", [found.value, *found.scores.sum(1).tolist()])


def test_nnsight_gave_the_map_of_its_own_input(recorded):
    class Wrapped:
        dispatched, _module, tokenizer = True, copy.copy(lens().model), lens().processor

    inner = Wrapped._module

    @functools.wraps(type(inner).forward)  # as nnsight does: the signature of the instance has a `self`
    def forward(*args, **kwargs):
        return type(inner).forward(inner, *args, **kwargs)

    inner.__dict__ = dict(inner.__dict__) | {"forward": forward}
    tokens = lens().processor(PROMPT, return_tensors="pt")
    found = nnsight_lens(Wrapped)(traced_input(Wrapped, ((tokens["input_ids"],), {})))
    recorded("captum", found.map("tensor.in_class", -1, TARGET).scores[0].tolist())


def test_names_of_components_there_and_back():
    for block, head in ((0, 0), (11, 3)):
        head_ = Component(kind="attention head", block=block, head=head)
        assert label_of(head_) == f"L{block}H{head}" and component_of(label_of(head_)) == head_
        assert component_of(*hook_of(head_)) == head_
    for one in (Component(kind="feed-forward", block=7), Component(kind="embedding")):
        assert component_of(label_of(one)) == one == component_of(hook_of(one).name)
    neuron = Component(kind="neuron", block=2, neuron=40)
    assert hook_of(neuron) == ("blocks.2.mlp.hook_post", 40) and component_of(*hook_of(neuron)) == neuron


def test_names_that_are_not_there_are_refused():
    with pytest.raises(tl.InputError, match="no hook for"):
        hook_of(Component(kind="bias", block=0))
    with pytest.raises(tl.InputError, match="pass `part`"):
        component_of("blocks.3.attn.hook_z")
    with pytest.raises(tl.InputError, match="not a hook or label"):
        component_of("blocks.3.attn.hook_q")
    with pytest.raises(tl.InputError, match="as saved in a trace"):
        traced_input(None, {"input_ids": 3})
