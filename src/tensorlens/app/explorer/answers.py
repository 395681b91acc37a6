"""The work behind the routes, in the worker's thread: a model pass per input, and answers to questions about it.

Maps fill row by row: rows that cost a backward pass each are computed a few at a time, the last output first. So there
is something to see at once, and points at which to stop.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import torch

from tensorlens.answers.answer import Answer
from tensorlens.answers.prompts import ids_of
from tensorlens.app.explorer import Limits
from tensorlens.app.explorer.jobs import Event, Job
from tensorlens.app.explorer.library import Library, Parts, Recent, input_kind
from tensorlens.app.explorer.questions import (
    AblateAsk,
    AnswerAsk,
    Ask,
    CircuitAsk,
    OpenAsk,
    SimilarAsk,
    WhyAsk,
    read_picture,
)
from tensorlens.errors import InputError
from tensorlens.inside.circuit import circuit
from tensorlens.inside.inside_record import Why
from tensorlens.lens import Lens
from tensorlens.maps.methods import METHODS
from tensorlens.maps.targets import MapQuestion, Target, default_output, has_one_row, has_predictions
from tensorlens.maps.token_map import TokenMap
from tensorlens.models.inputs import ModelInput
from tensorlens.models.texts import tokenizer_of
from tensorlens.pairs.similarity import similarity
from tensorlens.progress import cancelled_by
from tensorlens.recommendations import recommended
from tensorlens.tensor import AttentionTensor
from tensorlens.views.captions import caption_lines, is_by_output, is_of_tensor
from tensorlens.views.page import payload

INSIDE_NODES = 80
"""Number of nodes of a graph: few enough to read, and computed within seconds on a CPU."""
CIRCUIT_SHARES = (0.005, 0.02, 0.1, 0.3)
"""Sizes at which a circuit is tested, besides the empty and the whole one; the first is drawn."""
ANSWERS_KEPT = 2


class Answers:
    """Everything the explorer computes and keeps."""

    def __init__(self, library: Library, limits: Limits) -> None:
        self.library, self.limits = library, limits
        self.tensors: Recent[tuple[Any, ...], Parts] = Recent(limits.tensors, limits.tensor_bytes)
        self.said: Recent[tuple[Any, ...], Answer] = Recent(ANSWERS_KEPT, limits.tensor_bytes)
        self.results: Recent[str, TokenMap] = Recent(64, limits.result_bytes)
        self.images: Recent[str, Any] = Recent(limits.images, limits.images * 4 * 1024 * 1024)

    def add_image(self, data: bytes) -> str:
        """Keep an uploaded picture and return its id, a digest of its bytes."""
        picture = read_picture(data, self.limits)
        key = hashlib.sha256(data).hexdigest()[:32]
        self.images.put(key, picture, 3 * picture.width * picture.height)
        return key

    # One question each ------------------------------------------------------------------------------------------------

    def open(self, job: Job, ask: OpenAsk) -> Event:
        """Load a model and report what it takes."""
        return {"type": "done", "model": ask.model, "kind": input_kind(self._lens(job, ask.model))}

    def add(self, job: Job, ask: OpenAsk) -> Event:
        """Load a model that was not named at start."""
        if ask.model not in self.library.names:
            job.tell("progress", stage=f"Loading {ask.model}")
            self.library.add(ask.model)
        return self.open(job, ask)

    def predictions(self, job: Job, ask: Ask) -> Event:
        """The model's own top predictions at one output; none for a model without a head."""
        parts, _ = self._parts(job, ask, "word")
        return {"type": "done", "predictions": parts.predictions(-1 if ask.out_token is None else ask.out_token)}

    def map(self, job: Job, ask: Ask) -> Event:
        """The map of a question, sent as soon as it is computed, and then its certificate."""
        parts, is_kept = self._parts(job, ask, "word")
        T = parts.part(ask)
        asked = MapQuestion.complete(T, ask.method, ask.out_token, ask.target, ask.against, is_one=ask.is_one)
        job.tell("input", **_about(parts, ask, asked))
        key = msgspec.structs.replace(ask, method=asked.method, out_token=asked.out_token, is_one=False).digest
        found, told = self.results.get(key), asked.headlined(T)
        is_long = METHODS[asked.method].takes_probes and asked.out_token is not None and T.n_tokens >= MANY_INPUTS
        if found is None and is_long:
            job.tell("progress", stage="Estimating")
            job.tell("preview", map=payload(asked.answered(T, told, partial(_estimated, T)).view()))
        found = found or asked.answered(T, told, partial(compute_map, job, T))
        job.tell("map", map=payload(self._keep(key, found).view()), result=key)
        found = self._certified(job, key, found, T) if is_of_tensor(found.method) else found
        return {"type": "done", "result": key, "is_kept": is_kept} | facts(found)

    def answer(self, job: Job, ask: AnswerAsk) -> Event:
        """The map of an answer, sent as soon as it is computed, and then its certificate."""
        is_kept, key = self.said.get(ask.said) is not None, ask.digest
        found = self._answer(job, ask)
        job.tell("said", text=found.text)
        job.tell("progress", stage="Tracing it back")
        rows = ask.rows if ask.against is None else "answer"
        made = self.results.get(key) or found.map(ask.groups, rows, against=ask.against)
        job.tell("map", map=payload(self._keep(key, made).view()), result=key)
        made = self._certified(job, key, made, found.tensor)
        return {"type": "done", "result": key, "is_kept": is_kept, "text": found.text} | facts(made)

    def similar(self, job: Job, ask: SimilarAsk) -> Event:
        """The pair map of two texts, or of three."""
        lens = self._lens(job, ask.model)
        job.tell("progress", stage="One model pass for each text")
        first, second, third = (
            None if text is None else _as_text(lens, text, self.limits) for text in (ask.first, ask.second, ask.against)
        )
        found = similarity(lens, first, second, against=third, groups=ask.groups)
        return {"type": "done", "pairs": found.payload()}

    def inside(self, job: Job, ask: Ask) -> Event:
        """Heads, flow and graph for what a map is about."""
        T, place, target = self._looked_at(job, ask)
        job.tell("progress", stage="Looking inside")
        return {"type": "done", "inside": T.inside(place, target, max_nodes=INSIDE_NODES, n_whys=0).payload()}

    def ablate(self, job: Job, ask: AblateAsk) -> Event:
        """The model without a component: T's prediction, and the model's result."""
        T, place, target = self._looked_at(job, ask)
        job.tell("progress", stage=f"Running the model without {ask.component}")
        return {"type": "done", "ablation": T.ablate(ask.component, place, target).as_dict()}

    def why(self, job: Job, ask: WhyAsk) -> Event:
        """Why a head attended there: its score over pairs of tokens and of components."""
        (T, _, _), place = self._looked_at(job, ask), (ask.block, ask.head, ask.query, ask.key)
        job.tell("progress", stage=f"Decomposing the score of head {ask.head} in block {ask.block}")
        return {"type": "done", "why": Why(T.score(*place), T.score(*place, by="component")).payload()}

    def circuit(self, job: Job, ask: CircuitAsk) -> Event:
        """Which edges carry the difference between this text and another, and how much circuits of them recover."""
        T, place, target = self._looked_at(job, ask)
        lens = self._lens(job, ask.model).with_rules(T.operator.recording.rules)
        clean, corrupted = (_as_text(lens, text, self.limits) for text in (ask.text or "", ask.corrupted))
        job.tell("progress", stage="Scoring every edge")
        found = circuit(lens, clean, corrupted, target, out_token=place, progress=False)
        job.tell("progress", stage="Running the model with everything else corrupted")
        f = found.faithfulness(CIRCUIT_SHARES, progress=False)
        drawn = found.select(share=CIRCUIT_SHARES[0]).graph().payload()
        return {"type": "done", "inside": drawn, "curve": f.curve, "cpr": f.cpr, "cmd": f.cmd, "size": f.size}

    def _looked_at(self, job: Job, ask: Ask) -> tuple[AttentionTensor, int, Any]:
        """The operator, the output and the target of questions about the inside of the model."""
        T = self._parts(job, ask, "component")[0].whole
        chosen = ask.at if ask.out_token is None else ask.out_token
        asked = MapQuestion.complete(T, None, chosen, ask.target, ask.against)
        told = asked.headlined(T)
        return T, asked.place(T), None if told is None else told.asked.weights

    # What is kept -----------------------------------------------------------------------------------------------------

    def _certified(self, job: Job, key: str, found: TokenMap, T: AttentionTensor) -> TokenMap:
        """The map with the certificate of its tensor, kept in its place."""
        if found.meta.get("certificate"):
            return found
        job.tell("progress", stage="Measuring the certificate")
        said = {"certificate": T.certificate().verdict}
        return self._keep(key, msgspec.structs.replace(found, meta=found.meta | said))

    def _keep(self, key: str, found: TokenMap) -> TokenMap:
        """Keep a map for download."""
        self.results.put(key, found, 8 * found.scores.numel() + 4 * len(found.meta.get("image") or ""))
        return found

    def _lens(self, job: Job, name: str) -> Lens:
        """The lens of a model, loaded if it is not there yet."""
        if name not in self.library.opened:
            job.tell("progress", stage=f"Loading {name}")
        return self.library.lens(name)

    def _parts(self, job: Job, ask: Ask, question: str) -> tuple[Parts, bool]:
        """The tensor of an input, and whether it was kept; otherwise it comes from a new model pass."""
        rules = ask.rules or (recommended(question).rules.name if self.library.is_recommended else None)
        key = (ask.model, ask.text, ask.image, rules)
        kept = self.tensors.get(key)
        if kept is not None:
            return kept, True
        lens = self._lens(job, ask.model)
        job.tell("progress", stage="Model pass")
        picture = self.images.get(ask.image or "")
        if ask.text is None and picture is None:
            raise InputError("That image has expired. Please upload it again.")
        given = picture if ask.text is None else _as_text(lens, ask.text, self.limits)
        made = Parts(lens(given) if rules is None else lens.with_rules(rules)(given))
        if ask.rules is None and not has_predictions(made.whole):
            made = Parts(lens(given))  # recommendations are about predictions
        self.tensors.put(key, made, made.n_bytes)
        return made, False

    def _answer(self, job: Job, ask: AnswerAsk) -> Answer:
        """An answer with its model pass: the kept one, or a new one, whose text is sent while it is generated."""
        kept = self.said.get(ask.said)
        if kept is None:
            lens = self._lens(job, ask.model).with_rules(ask.rules or recommended("passage").rules)
            _tokens(lens, ask.prompt, self.limits)
            prompt: Any = [{"role": "user", "content": ask.prompt}] if ask.is_chat else ask.prompt
            job.tell("progress", stage="Model pass" if ask.answer else "Answering")
            telling: dict[str, Any] = {} if ask.answer else {"streamer": _Telling(job, tokenizer_of(lens.processor))}
            kept = lens.answer(prompt, ask.answer, max_new_tokens=ask.max_new_tokens, **telling)
            self.said.put(ask.said, kept, Parts(kept.tensor).n_bytes)
        return kept


def _as_text(lens: Lens, text: str, limits: Limits) -> ModelInput:
    """A text as its ids: a lens would open a text that ends in .png as a file."""
    ids, offsets = _tokens(lens, text, limits)
    return replace(lens.prepare(ids), kind="text", text=text, offsets=offsets)


class _Telling:
    """Takes each token that `generate` adds, and sends the reader the text so far."""

    def __init__(self, job: Job, tokenizer: Any) -> None:
        self._job, self._tokenizer = job, tokenizer
        self._ids: list[int] | None = None  # the first tokens are the prompt

    def put(self, value: Any) -> None:
        """Take a token."""
        self._job.check()
        if self._ids is None:
            self._ids = []
            return
        self._ids += value.flatten().tolist()
        self._job.tell("said", text=self._tokenizer.decode(self._ids, skip_special_tokens=True))

    def end(self) -> None:
        """Do nothing at the end."""


def _tokens(lens: Lens, text: str, limits: Limits) -> tuple[list[int], Any]:
    """The tokens of the text, and the place of each."""
    if tokenizer_of(lens.processor) is None:
        raise InputError(f"`{lens.name}` does not take text. Drop a picture instead, or choose another model.")
    ids, offsets = ids_of(lens.specimen, text, special=True)
    if len(ids) > limits.tokens:
        raise InputError(f"Expected at most {limits.tokens} tokens, got {len(ids)}. Shorten the text.")
    return list(ids), offsets


def _about(parts: Parts, ask: Ask, asked: MapQuestion) -> Event:
    """The facts about an input that the page needs: sizes, heads, tokens, predictions."""
    T, recording = parts.whole, parts.whole.operator.recording
    chosen = asked.out_token if ask.at is None else ask.at
    out_token = default_output(T) if chosen is None else chosen
    return {
        "n_blocks": T.n_blocks,
        "n_heads": [recording.n_heads.get(block, 0) for block in range(T.n_blocks)],
        "tokens": list(T.out_tokens),
        "pools": recording.pools,
        "out_token": out_token % T.shape[0],
        "method": asked.method,
        "rules": recording.rules.name,
        "every": asked.out_token is None and not recording.pools,
        "predictions": parts.predictions(out_token),
    }


def facts(found: TokenMap) -> Event:
    """Verdict and largest error of a map's certificate, and the caption with it.

    Only maps of T have a certificate; a saved map may hold anything in its place.
    """
    is_ours, certificate = is_of_tensor(found.method), found.meta.get("certificate")
    caption = [list(line) for line in caption_lines(found.method, found.meta, found.shape[0])]
    errors = certificate.get("errors") if isinstance(certificate, dict) else None
    numbers = [one for one in errors.values() if isinstance(one, (int, float))] if isinstance(errors, dict) else []
    verdict = None
    if is_ours and isinstance(certificate, dict) and numbers:
        verdict = {"passed": certificate.get("passed") is True, "error": max(numbers)}
    return {"certificate": verdict, "is_of_tensor": is_ours, "caption": caption}


# Row by row -----------------------------------------------------------------------------------------------------------

ROWS_AT_A_TIME = {
    "tensor.norm": 1,
    "tensor.in_out": 16,
    "tensor.in_class": 16,
    "gradient.times_input": 1,
    "gradient.integrated": 1,
}
"""Methods whose cost grows with the number of outputs, and how many outputs cost little more than one.

The others take as long for one row as for all."""

N_PROBES, MANY_INPUTS = 16, 64
"""Probes of the estimate that precedes an exact map, and the number of inputs from which on there is one."""

_QUICK, _SLOW = 0.25, 1.0
_PREVIEW_CELLS = 400 * 400
_PREVIEW_SECONDS = 0.7
_SAID_ONCE = ("target", "explains")
"""Keys of `meta` that are one text if it is the same for all outputs, and a list otherwise."""


def compute_map(job: Job, T: AttentionTensor, method: str, out_token: int | None, target: Target | None) -> TokenMap:
    """The map, row by row if that takes long, with previews on the way."""
    job.tell("progress", stage="Computing")
    n_out, at_a_time = T.shape[0], ROWS_AT_A_TIME.get(method, T.shape[0])
    if has_one_row(T.operator.recording, method) or out_token is not None or n_out <= at_a_time:
        return T.map(method, out_token, target)
    parts: list[TokenMap] = []
    shown = 0.0
    for outputs in _groups(n_out, at_a_time):
        with cancelled_by(lambda _: job.check()):  # parts are counted here
            parts.append(T.map(method, outputs, target))
        job.check(1 - outputs.start / n_out)
        is_due = time.monotonic() - shown > _PREVIEW_SECONDS and outputs.start
        if is_due and n_out * len(parts[0].in_tokens) <= _PREVIEW_CELLS:
            shown = time.monotonic()
            job.tell("preview", map=payload(_joined(parts, T.out_tokens).view()))
    return _joined(parts, T.out_tokens)


def _estimated(T: AttentionTensor, method: str, out_token: int | None, _: Target | None) -> TokenMap:
    """A map by random probes: one pull for each, instead of one pass per input or channel."""
    apart = T.blocks(0, T.n_blocks)  # T itself has no folded blocks, which its certificate would measure
    found = apart.map(method, out_token, probes=N_PROBES)
    error = 1 / (2 * N_PROBES) ** 0.5  # of the root of a mean of squares of normal numbers
    note = f"An estimate from {N_PROBES} random probes, each score within about {error:.0%}; the exact map follows."
    return msgspec.structs.replace(found, meta=found.meta | {"note": note.replace("%", " %")})


def _groups(n_out: int, least: int) -> Iterator[range]:
    """Ranges of outputs, the last ones first, each short enough to be computed in a moment."""
    size, stop = least, n_out
    while stop:
        group = range(max(0, stop - size), stop)
        start = time.monotonic()
        yield group
        seconds = time.monotonic() - start
        size = max(least, size // 2) if seconds > _SLOW else size * 2 if seconds < _QUICK else size
        stop = group.start


def _joined(parts: Sequence[TokenMap], out_tokens: Sequence[str]) -> TokenMap:
    """One map from maps of some outputs each; rows not yet known are NaN."""
    first, n_out = parts[0], len(out_tokens)
    scores = torch.full((n_out, first.shape[1]), torch.nan, dtype=first.scores.dtype)  # (out, in)
    bias = torch.full((n_out,), torch.nan, dtype=first.bias_share.dtype)  # (out,)
    by_row: dict[str, list[Any]] = {}
    for part in parts:
        places = part.meta["out_positions"]
        scores[places], bias[places] = part.scores, part.bias_share
        for name, value in part.meta.items():
            if name in _SAID_ONCE or is_by_output(name, value, len(places)):
                column = by_row.setdefault(name, [None] * n_out)
                for k, place in enumerate(places):
                    column[place] = value[k] if isinstance(value, list) else value
    known = {place for part in parts for place in part.meta["out_positions"]}
    for name in {*_SAID_ONCE} & by_row.keys():
        texts = {by_row[name][place] for place in known}
        by_row[name] = texts.pop() if len(texts) == 1 else by_row[name]
    by_row["out_positions"] = list(range(n_out))
    warned = [part.meta for part in parts if "warning" in part.meta]  # of any row
    meta = (warned[0] if warned else first.meta) | by_row
    return msgspec.structs.replace(first, scores=scores, out_tokens=tuple(out_tokens), bias_share=bias, meta=meta)
