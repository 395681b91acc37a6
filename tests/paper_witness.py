"""The paper's tables by hand: a few lines for all of them, with nothing of the studies.

Perturbation: rank the tokens by a map, replace the highest, run the model, compare states, probabilities and classes.
Relations: apply the mean of T, and LRE's mean Jacobian, to the test prompts, and let the model's own head speak.
"""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
import torch

GRID = (0.0, 0.2, 0.4)
HEADS = {"tensor": "Tensor", "rollout": "Rollout", "mean": "Mean"}
NAMES = {"norm": "Norm", "in_out": "In+Out", "in_class": "In+Class", "attn": "Attn", "w_attn": "W-Attn"}
NAMES |= {"w_attn_res_ln": "W-AttnResLN", "glob_enc": "GlbEnc"}
LABELS = {"hs_mse": "HS-MSE ↑", "abs_aopc": "abs-AOPC ↑", "aopc": "AOPC, signed ↑", "accuracy": "accuracy ↓"}


# Perturbation ---------------------------------------------------------------------------------------------------------


def watched(model, inputs, place):
    """X^N at one token, and the logits that decide, by the model alone."""
    kept = {}
    if hasattr(model, "decoder"):  # one module does everything: what the unembedding reads
        read = model.decoder.to_words.register_forward_pre_hook
        hook = read(lambda module, args: kept.update(state=args[0]))
    else:
        hook = model.base_model.register_forward_hook(lambda module, args, output: kept.update(state=output[0]))
    logits = model(**inputs).logits[0]
    hook.remove()
    return kept["state"][0, place], logits if logits.dim() == 1 else logits[-1]


def curves(model, clean, masked, scores, maskable, place, label):
    """HS-MSE, drop of probability and accuracy at the shares of the grid, highest scores first."""
    state, logits = watched(model, clean, place)
    best = int(logits.argmax())
    order = sorted(maskable, key=lambda token: (-float(scores[token]), token))
    found = {"hs_mse": [0.0], "aopc": [0.0], "accuracy": [float(best == label)]}
    for share in GRID[1:]:
        changed, other = watched(model, masked(order[: math.ceil(round(share * len(maskable), 9))]), place)
        found["hs_mse"].append(float((changed - state).square().mean()))
        found["aopc"].append(float(logits.softmax(-1)[best] - other.softmax(-1)[best]))
        found["accuracy"].append(float(int(other.argmax()) == label))
    return found | {"abs_aopc": [abs(value) for value in found["aopc"]]}


def check_perturbation(lens, samples, table):
    """Every curve of a table's lines, and each cell of the table.

    Args:
        lens: The model.
        samples: For each line: itself, the clean input, a function from tokens to the input without them, and by
            condition the tokens that may go.
        table: The table in Markdown.
    """
    assert not re.search(r"e-1[5-9]", table), "rounding shown as a difference"
    areas = {}
    for line, clean, masked, place, maskable in samples:
        recorded = lens(clean)
        for condition, tokens in maskable.items():
            cells = line["conditions"][condition]
            for method in [name for name in cells if name != "control.random" and "missing" not in cells[name]]:
                scores = recorded.map(method, place).scores[0]
                expected = curves(lens.model, clean, masked, scores, tokens, place, int(line["label"]))
                assert cells[method]["most"].keys() == expected.keys()
                for metric, curve in expected.items():
                    assert cells[method]["most"][metric] == pytest.approx(curve, rel=2e-3, abs=1e-6), (method, metric)
                    areas.setdefault((condition, metric), {}).setdefault(method, []).append(np.trapezoid(curve, GRID))
        assert line["conditions"].keys() == maskable.keys()
    for (condition, metric), by_method in areas.items():
        shown = {name: np.mean(some) for name, some in by_method.items() if not name.startswith("control")}
        _check_row(table.split(f"## {condition}\n")[1], f"{LABELS[metric]}, area", shown)
        heights = {name: area / GRID[-1] for name, area in shown.items()}
        _check_row(table.split(f"## {condition}\n")[1], f"{LABELS[metric]}, mean height", heights)


def _check_row(part, label, values):
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in part.splitlines() if line[:1] == "|"]
    found = dict(zip(rows[0], next(row for row in rows if row[0] == label), strict=True))
    best = (min if "↓" in label else max)(values.values())
    for name, value in values.items():
        group, _, own = name.partition(".")
        cell = found[f"{HEADS[group]} {NAMES[own]}"]
        assert float(cell.strip("*<u>/")) == pytest.approx(value, rel=6e-3, abs=1e-6), (label, name)
        is_bold = cell.startswith("**")
        assert not is_bold or value == pytest.approx(best, rel=1e-2, abs=1e-6), (label, name)


# Relations ------------------------------------------------------------------------------------------------------------


class Relation:
    """A GPT-NeoX model and the bytes tokenizer on the relation of `write_relation`."""

    def __init__(self, lens):
        self.lens, self.body, self.head = lens, lens.model.base_model, lens.model.get_output_embeddings()

    def ids(self, examples, subject):
        lines = [f"{fruit} are {colour}" for fruit, colour in examples] + [f"{subject} are"]
        return [self.lens.processor.bos_token_id, *self.lens.processor("\n".join(lines))["input_ids"]]

    def says(self, state):
        return int(self.head(self.body.final_layer_norm(state)).argmax())

    def states(self, ids, embedded=None):
        """What enters each block at all tokens, and what leaves the last one at the last token."""
        kept, hooks = {}, []
        for number, block in enumerate(self.body.layers):
            hooks.append(block.register_forward_pre_hook(lambda m, args, n=number: kept.update({n: args[0][0]})))
        hooks.append(self.body.final_layer_norm.register_forward_pre_hook(lambda m, args: kept.update(end=args[0][0])))
        self.body(inputs_embeds=self.body.embed_in(torch.tensor([ids])) if embedded is None else embedded[None])
        for hook in hooks:
            hook.remove()
        return kept, kept["end"][-1]

    def bits(self, line, start):
        """Agreement of the mean tensor from a block on, that of LRE on the embedding, and the model's own answers."""
        train, subject_token = line["train"], -len(" are") - 1
        prompts = [self.ids([other for other in train if other is not one], one[0]) for one in train]
        parts = [self.lens(ids).blocks(start, len(self.body.layers)) for ids in prompts]
        T, B = (
            torch.stack(some).mean(0) for some in ([one.rows(-1) for one in parts], [one.bias[-1] for one in parts])
        )
        weights, shifts = zip(*(self._jacobian(ids, subject_token) for ids in prompts), strict=True)
        W, b = torch.stack(weights).mean(0), torch.stack(shifts).mean(0)
        ours, theirs, truth = "", "", []
        for subject, *_ in line["facts"]:
            ids = self.ids(train[:-1], subject)
            entering, end = self.states(ids)
            truth.append(self.says(end))
            ours += str(int(self.says(torch.einsum("dje,je->d", T, entering[start]) + B) == truth[-1]))
            embedded = self.body.embed_in(torch.tensor(ids))[subject_token]
            theirs += str(int(self.says(2.5 * W @ embedded + b) == truth[-1]))
        return ours, theirs, truth

    def _jacobian(self, ids, place):
        whole = self.body.embed_in(torch.tensor(ids)).detach()

        def end(one):
            return self.states(ids, torch.cat([whole[:place], one[None], whole[place + 1 :]]))[1]

        W = torch.autograd.functional.jacobian(end, whole[place])
        return W, end(whole[place]).detach() - W @ whole[place]
