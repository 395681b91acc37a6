"""The work behind the routes: a model pass, kept for each input, and the maps asked of it. Runs in the worker's thread.

Maps whose rows cost a backward pass each are computed some rows at a time, the last output first, so that there is
something to see at once, and a place to stop.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec
import torch

from tensorlens.answers.prompts import tokenised
from tensorlens.app.explorer.jobs import Event, Job
from tensorlens.app.explorer.library import Library, kind_of
from tensorlens.app.explorer.limits import Limits
from tensorlens.app.explorer.parts import Parts
from tensorlens.app.explorer.pictures import read_picture
from tensorlens.app.explorer.questions import Ask, Score, Subject
from tensorlens.app.explorer.recent import Recent
from tensorlens.app.map_questions import recommended
from tensorlens.app.options import rules_named
from tensorlens.errors import InputError
from tensorlens.inside.inside_record import Why
from tensorlens.lens import Lens
from tensorlens.maps.defaults import METHOD, METHOD_OF_CLASSES, first_output, has_one_row
from tensorlens.maps.targets import Target
from tensorlens.maps.token_map import TokenMap
from tensorlens.models.forward_signature import is_causal
from tensorlens.models.inputs import tokenizer_of
from tensorlens.tensor import AttentionTensor
from tensorlens.views.captions import caption_lines, is_by_output, is_of_tensor
from tensorlens.views.page import payload

ROWS_AT_A_TIME = {
    "tensor.norm": 1,
    "tensor.in_out": 16,
    "tensor.in_class": 16,
    "gradient.times_input": 1,
    "gradient.integrated": 1,
}
"""Methods whose cost grows with the outputs asked for, and how many outputs cost little more than one.

The others take as long for one row as for all."""

N_PREDICTIONS = 8
INSIDE_NODES = 80  # of a graph: what a reader can take in, within seconds on a CPU
_QUICK, _SLOW = 0.25, 1.0
_PREVIEW_CELLS = 400 * 400
_PREVIEW_SECONDS = 0.7


class Answers:
    """Everything the explorer computes and keeps.

    Args:
        library: Models named at start.
        limits: Bounds.
    """

    def __init__(self, library: Library, limits: Limits) -> None:
        self.library, self.limits = library, limits
        self.tensors: Recent[Subject, Parts] = Recent(limits.tensors, limits.tensor_bytes)
        self.results: Recent[str, TokenMap] = Recent(64, limits.result_bytes)
        self.images: Recent[str, Any] = Recent(limits.images, limits.images * 4 * 1024 * 1024)

    def add_image(self, data: bytes) -> str:
        """Keep an uploaded picture and give its id, a digest of its bytes."""
        picture = read_picture(data, self.limits)
        key = hashlib.sha256(data).hexdigest()[:32]
        self.images.put(key, picture, 3 * picture.width * picture.height)
        return key

    def open_model(self, job: Job, name: str) -> Event:
        """Load a model and say what it takes."""
        return {"type": "done", "model": name, "kind": kind_of(self.lens(job, name))}

    def predict(self, job: Job, subject: Subject, out_token: int) -> Event:
        """The model's own top predictions at one output; none without a head."""
        parts = self._parts(job, subject)
        return {"type": "done", "predictions": predictions(parts.whole, out_token)}

    def forget(self) -> None:
        """Let go of models and passes: a thread that was given up may have left them half changed."""
        self.library.opened.clear()
        self.tensors.clear()

    def map(self, job: Job, ask: Ask) -> Event:
        """The map of a question, told as soon as it is there, and then its certificate."""
        is_kept = self.tensors.get(ask.subject) is not None
        parts = self._parts(job, ask.subject)
        ask = _settled(parts.whole, ask)
        job.tell("input", **about(parts.whole, ask))
        T = parts.part(ask)
        found = self.results.get(ask.key) or self._fresh(job, ask, T)
        self.keep(ask.key, found)
        job.tell("map", map=payload(found.view()), result=ask.key, recommended=recommended(T, found))
        if is_of_tensor(found.method):
            found = self.certified(job, ask.key, found, T)
        return {"type": "done", "result": ask.key, "is_kept": is_kept} | facts(found)

    def inside(self, job: Job, ask: Ask) -> Event:
        """Heads, flow and graph of what a question is about."""
        T = self._parts(job, ask.subject).whole
        job.tell("progress", stage="Looking inside", done=None)
        found = T.inside(_output(T, ask), _target(ask), max_nodes=INSIDE_NODES, n_whys=0)
        return {"type": "done", "inside": found.payload()}

    def ablate(self, job: Job, ask: Ask, component: str) -> Event:
        """The model without a component: what T says of it, and what the model does."""
        T = self._parts(job, ask.subject).whole
        job.tell("progress", stage=f"Running the model without {component}", done=None)
        return {"type": "done", "ablation": T.ablate(component, _output(T, ask), _target(ask)).as_dict()}

    def why(self, job: Job, ask: Ask, score: Score) -> Event:
        """Why a head looked there: its score over pairs of tokens and of components."""
        T = self._parts(job, ask.subject).whole
        job.tell("progress", stage=f"Taking the score of head {score.head} in block {score.block} apart", done=None)
        return {"type": "done", "why": Why(T.score(*score), T.score(*score, by="component")).payload()}

    def _fresh(self, job: Job, ask: Ask, T: AttentionTensor) -> TokenMap:
        compute = _rows if ask.method in ROWS_AT_A_TIME else _at_once
        try:
            return compute(job, ask, T)
        finally:
            _forget_matrices(T)

    def certified(self, job: Job, key: str, found: TokenMap, T: AttentionTensor) -> TokenMap:
        """The map with the certificate of its tensor, kept in its place."""
        if found.meta.get("certificate"):
            return found
        job.tell("progress", stage="Measuring the certificate", done=None)
        certificate = T.certificate()
        verdict = {"passed": certificate.passed, "errors": certificate.errors}
        found = msgspec.structs.replace(found, meta=found.meta | {"certificate": verdict})
        self.keep(key, found)
        return found

    def keep(self, key: str, found: TokenMap) -> None:
        """Keep a map for those who want it as a file."""
        self.results.put(key, found, 8 * found.scores.numel() + 4 * len(found.meta.get("image") or ""))

    def lens(self, job: Job, name: str) -> Lens:
        """The lens of a model, loaded if it is not there yet."""
        if name not in self.library.opened:
            job.tell("progress", stage=f"Loading {name}", done=None)
        return self.library.lens(name)

    def _parts(self, job: Job, subject: Subject) -> Parts:
        """The tensor of an input: the one that is kept, or a new one from a model pass."""
        kept = self.tensors.get(subject)
        if kept is not None:
            return kept
        lens = held_by(self.lens(job, subject.model), subject.rules)
        job.tell("progress", stage="Model pass", done=None)
        made = Parts(self._tensor(lens, subject))
        self.tensors.put(subject, made, made.n_bytes)
        return made

    def _tensor(self, lens: Lens, subject: Subject) -> AttentionTensor:
        if subject.image is not None:
            picture = self.images.get(subject.image)
            if picture is None:
                raise InputError("Expected a picture that is still here, got one that is gone. Drop it again.")
            return lens(picture)
        assert subject.text is not None
        ids, offsets = _tokens(lens, subject.text, self.limits)
        T = lens(ids)
        about_text = {"text": subject.text, "offsets": offsets, "causal": is_causal(lens.model)}
        return AttentionTensor(T.operator, replace(T.context, meta=T.context.meta | about_text))


def held_by(lens: Lens, member: str | None) -> Lens:
    """The lens with another member of the family of rules; the lens itself if none is named."""
    if member is None:
        return lens
    return lens.with_rules(replace(rules_named(member), include_final_norm=lens.rules.include_final_norm))


def predictions(T: AttentionTensor, out_token: int) -> list[dict[str, Any]]:
    """Names, numbers and probabilities of the top predictions at one output, as plain data."""
    if T.context.classes is None or T.operator.recording.readout is None:
        return []
    return [
        {"name": one.name, "index": one[1], "probability": one.probability}
        for one in T.predictions(N_PREDICTIONS, 0 if T.operator.recording.pools else out_token)
    ]


def _settled(T: AttentionTensor, ask: Ask) -> Ask:
    """The question with its method and the output it is about, where they were left open.

    What a model with a head says is explained first, at the output looked at first; without one, every output state. Of
    a picture, whose patches are many, one output comes first too.
    """
    if ask.method is None:
        is_at_end = ask.blocks is None or ask.blocks[1] == T.n_blocks
        has_head = T.context.classes is not None and T.operator.recording.readout is not None and is_at_end
        method = METHOD_OF_CLASSES if has_head else METHOD
        ask = replace(ask, method=method, is_one=ask.is_one or has_head or ask.subject.image is not None)
    if has_one_row(T.operator.recording, ask.method):
        return replace(ask, is_one=False, out_token=None)  # its head reads the whole input at once
    is_open = ask.is_one and ask.out_token is None and not T.operator.recording.pools
    return replace(ask, is_one=False, out_token=first_output(T.context.meta, T.shape[0]) if is_open else ask.out_token)


def about(T: AttentionTensor, ask: Ask) -> Event:
    """What the page needs to know of an input: sizes, heads, tokens, predictions."""
    chosen = ask.out_token if ask.at is None else ask.at
    out_token = first_output(T.context.meta, T.shape[0]) if chosen is None else chosen
    recording = T.operator.recording
    return {
        "n_blocks": T.n_blocks,
        "n_heads": [recording.n_heads.get(block, 0) for block in range(T.n_blocks)],
        "tokens": list(T.out_tokens),
        "pools": recording.pools,
        "out_token": out_token % T.shape[0],
        "method": ask.method,
        "every": ask.out_token is None and not recording.pools,
        "predictions": predictions(T, out_token),
    }


def facts(found: TokenMap) -> Event:
    """Verdict and largest error of a map's certificate, to stand beside it, and the caption with it.

    A certificate speaks for maps of T alone; a saved map may hold anything in its place.
    """
    is_ours, certificate = is_of_tensor(found.method), found.meta.get("certificate")
    caption = [list(line) for line in caption_lines(found.method, found.meta, found.shape[0])]
    errors = certificate.get("errors") if isinstance(certificate, dict) else None
    numbers = [one for one in errors.values() if isinstance(one, (int, float))] if isinstance(errors, dict) else []
    verdict = None
    if is_ours and isinstance(certificate, dict) and numbers:
        verdict = {"passed": certificate.get("passed") is True, "error": max(numbers)}
    return {"certificate": verdict, "is_of_tensor": is_ours, "caption": caption}


def _tokens(lens: Lens, text: str, limits: Limits) -> tuple[list[int], list[list[int] | None] | None]:
    """The text as tokens, and where each stands in it.

    A lens would open a text that ends in .png as a file; ids it takes as they are.
    """
    if tokenizer_of(lens.processor) is None:
        raise InputError(f"`{lens.name}` takes no text. Drop a picture instead, or choose another model.")
    ids, offsets = tokenised(lens, text, special=True)
    if len(ids) > limits.tokens:
        raise InputError(f"Expected at most {limits.tokens} tokens, got {len(ids)}. Shorten the text.")
    return list(ids), None if offsets is None else [pair and list(pair) for pair in offsets]


def _forget_matrices(T: AttentionTensor) -> None:
    """A job that was stopped in the middle leaves matrices behind that no later one will use."""
    kept = T.operator.__dict__.get("folded")  # asking for the attribute itself would fold the blocks
    if kept is not None:
        kept.forget_matrices()


def _target(ask: Ask) -> Target | None:
    return ask.target if ask.target is None or ask.against is None else (ask.target, ask.against)


def _output(T: AttentionTensor, ask: Ask) -> int:
    """The one output that is asked about."""
    if T.operator.recording.pools:
        return 0
    chosen = ask.at if ask.out_token is None else ask.out_token
    return first_output(T.context.meta, T.shape[0]) if chosen is None else chosen


def _at_once(job: Job, ask: Ask, T: AttentionTensor) -> TokenMap:
    job.tell("progress", stage="Computing", done=None)
    assert ask.method is not None
    return T.map(ask.method, ask.out_token, _target(ask))


def _rows(job: Job, ask: Ask, T: AttentionTensor) -> TokenMap:
    """The rows one after the other: the one looked at first before the others."""
    assert ask.method is not None
    pools = has_one_row(T.operator.recording, ask.method)
    at_a_time = ROWS_AT_A_TIME[ask.method]
    if pools or ask.out_token is not None or T.shape[0] <= at_a_time:
        return _at_once(job, ask, T)
    job.tell("progress", stage="Computing", done=0, total=T.shape[0])
    first = first_output(T.context.meta, T.shape[0])
    sheet = _Sheet(T.map(ask.method, first, _target(ask)), T, first)
    sheet.report(job)
    for outputs in _groups(range(1, T.shape[0]) if first == 0 else range(first), at_a_time):
        job.check()
        sheet.fill(outputs, T.map(ask.method, outputs, _target(ask)))
        sheet.report(job)
    return sheet.whole()


def _groups(outputs: range, least: int) -> Iterator[range]:
    """Ranges of outputs, the last ones first, each about as long as takes a moment to compute."""
    size, stop = least, outputs.stop
    while stop > outputs.start:
        group = range(max(outputs.start, stop - size), stop)
        start = time.monotonic()
        yield group
        seconds = time.monotonic() - start
        size = max(least, size // 2) if seconds > _SLOW else size * 2 if seconds < _QUICK else size
        stop = group.start


class _Sheet:
    """A map that fills row by row; rows not yet known are NaN."""

    def __init__(self, row: TokenMap, T: AttentionTensor, first: int) -> None:
        n_out = T.shape[0]
        self._map = row
        self._tokens, self._n_known = T.out_tokens, 1
        self._scores = torch.full((n_out, row.shape[1]), torch.nan, dtype=row.scores.dtype)
        self._bias = torch.full((n_out,), torch.nan, dtype=row.bias_share.dtype)
        self._scores[first], self._bias[first] = row.scores[0], row.bias_share[0]
        self._by_row: dict[str, list[Any]] = {"out_positions": list(range(n_out))}
        for name, value in row.meta.items():
            if name != "out_positions" and (is_by_output(name, value, 1) or name in ("target", "explains")):
                one = value[0] if isinstance(value, list) else value
                self._by_row[name] = [one if name != "logit" or i == first else None for i in range(n_out)]
        self._shown = 0.0

    def fill(self, outputs: range, found: TokenMap) -> None:
        rows = slice(outputs.start, outputs.stop)
        self._scores[rows], self._bias[rows] = found.scores, found.bias_share
        for name, value in found.meta.items():
            if name in self._by_row and name != "out_positions":
                self._by_row[name][rows] = value if isinstance(value, list) else [value] * len(outputs)
        self._n_known += len(outputs)

    def report(self, job: Job) -> None:
        n_out, n_in = self._scores.shape
        job.tell("progress", stage="Computing", done=self._n_known, total=n_out)
        is_due = time.monotonic() - self._shown > _PREVIEW_SECONDS
        if is_due and self._n_known < n_out and n_out * n_in <= _PREVIEW_CELLS:
            self._shown = time.monotonic()
            job.tell("preview", map=payload(self.whole().view()))

    def whole(self) -> TokenMap:
        meta = dict(self._map.meta)
        for name, values in self._by_row.items():
            is_one = name in ("target", "explains") and len(set(map(str, values))) == 1
            meta[name] = values[0] if is_one else values
        return TokenMap(
            scores=self._scores,
            out_tokens=tuple(self._tokens),
            in_tokens=self._map.in_tokens,
            method=self._map.method,
            bias_share=self._bias,
            meta=meta,
        )
