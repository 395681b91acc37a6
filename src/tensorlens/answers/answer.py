"""`Answer`: the answer of a language model to a prompt, and the parts of the prompt that it is based on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, get_args

import torch
from torch import Tensor

from tensorlens.answers.pictured import beside, columns_of, picture_places, read_pictured
from tensorlens.answers.prompts import (
    Agreement,
    Continuation,
    Prompt,
    agreement,
    check_served,
    generated,
    given,
    read_prompt,
)
from tensorlens.answers.shares import Engine, Shares, TargetKind, make_targets, shares, through
from tensorlens.errors import InputError, MethodError, check_choice, check_iterable
from tensorlens.maps.groups import NAMED, Group, Groups, find_groups, grouped_meta, with_beside
from tensorlens.maps.targets import no_head
from tensorlens.maps.token_map import TokenMap
from tensorlens.models.inputs import ModelInput, token_ids
from tensorlens.models.runner import own_modes
from tensorlens.operators.operator import check_token
from tensorlens.operators.plain import plain_logits
from tensorlens.recommendations import recommended
from tensorlens.specimen import Specimen
from tensorlens.tensor import AttentionTensor
from tensorlens.views.captions import after, why_headline
from tensorlens.views.printing import text_as_html
from tensorlens.views.table import Table, Tabular

ANSWER, AGAINST, TURNS = "answer", "against", "turns"
THROUGH = "traced through earlier answer tokens to the prompt; a convention whose rows do not sum to the target"


@dataclass(frozen=True, kw_only=True, eq=False)
class Answer(Tabular):
    """An answer, token by token, with the attention tensor of prompt and answer. Made by `Lens.answer`.

    Attributes:
        text: The answer.
        ids: Its tokens, without the end token.
        offsets: The place of each token in the text; None for a token that is not part of it.
        prompt: The prompt.
        tensor: T of prompt and answer together, with the earlier tokens of the answer as inputs.
        specimen: The model it came from, with its processor and rules.
        agreement: The agreement of a server's log-probabilities with the model's, if they were given.
    """

    text: str
    ids: tuple[int, ...]
    offsets: tuple[tuple[int, int] | None, ...] = field(repr=False)
    prompt: Prompt = field(repr=False)
    tensor: AttentionTensor = field(repr=False)
    specimen: Specimen = field(repr=False)
    agreement: Agreement | None = field(default=None, repr=False)

    def _repr_html_(self) -> str:
        return text_as_html(f"{self!r}\n{self.prompt.text or ' '.join(self.tensor.tokens[: self.n_prompt_tokens])}")

    @property
    def headline(self) -> str:
        """The question: why this answer after this prompt?"""
        prompt = self.prompt.text or "".join(self.tensor.tokens[: self.n_prompt_tokens])
        return why_headline(self.text.strip(), None, None, after(prompt))

    def _table(self) -> Table:
        return self.map()._table()

    @property
    def n_prompt_tokens(self) -> int:
        """Number of tokens before the answer."""
        return len(self.prompt.ids)

    @property
    def tokens(self) -> tuple[str, ...]:
        """A label for each token of the answer."""
        return self.tensor.tokens[self.n_prompt_tokens :]

    @property
    def positions(self) -> range:
        """The output position that predicts each token of the answer: the one before it."""
        first = len(self.prompt.decoder_ids) - 1
        return range(first, first + len(self.ids))

    @cached_property
    @own_modes
    def log_probabilities(self) -> tuple[float, ...]:
        """The model's own log-probability of each token, including anything its code does after the unembedding."""
        logits = plain_logits(self.tensor.operator.recording, list(self.positions))
        chosen = torch.tensor(self.ids, device=logits.device)[:, None]
        return tuple(logits.float().log_softmax(-1).gather(1, chosen)[:, 0].tolist())

    @own_modes
    def map(
        self,
        groups: Groups | None = None,
        rows: Groups = ANSWER,
        target: TargetKind | None = None,
        *,
        against: str | Sequence[int] | None = None,
        through: bool = False,
        answer_columns: bool = False,
        set_aside: Sequence[int] | None = None,
        engine: Engine | None = None,
    ) -> TokenMap:
        r"""How much the prompt contributes to the answer: rows are parts of the answer, columns groups of the prompt.

        $R_{q,k} = Σ_{j ∈ G_k} ⟨(T^\top c_q)_j, X_j⟩$, so a row and its bias add up to the sum of the targets
        of its tokens. The answer's own tokens are one column, ``answer``.

        Args:
            groups: Groups of the prompt, as in `TokenMap.group`; ``"turns"`` for turns of a chat. Sentences if None,
                or turns for chat messages. The tokens of pictures are columns of their own, or grouped by
                ``{"regions": (rows, columns)}`` or ``{"regions": {"sky": (0, 0, 1, 0.5)}}``: left, top, right and
                bottom as fractions of the whole picture.
            rows: ``"answer"`` for one row, ``"sentences"``, ``"words"``, ``"lines"``, ``"tokens"``, or groups of
                characters of the answer.
            target: ``"runner_up"``, the logit minus that of the likeliest other token (the default, as
                `recommended("passage")` says); ``"centred"``, the logit minus the mean over the vocabulary (the default
                with `against`); ``"logit"``.
            against: A different answer to the same prompt: the single row explains the difference between the two.
            through: Trace contributions through earlier answer tokens to the prompt. A convention: rows then
                no longer sum to their targets.
            answer_columns: One column for each part of the answer instead of one for all.
            set_aside: Positions in the prompt whose tokens get columns of their own, outside the colour scale but still
                in the sum. If None, a decoder's first token, an attention sink, where attention is kept fixed.
            engine: ``"pulls"`` or ``"pushes"``; the cheaper one if None.

        Raises:
            InputError: Groups do not fit, or the options do not go together.
        """
        if target is None:
            target = "centred" if against is not None else recommended("passage").target
        if set_aside is None:
            rules = self.tensor.operator.recording.rules
            is_live_sink = rules.attention == "hold" and rules.sink == "live"
            set_aside = (0,) if is_live_sink and not self.prompt.n_encoder else ()
        self._check(rows, target, against, through, engine)
        parts, asked = self._parts(rows), _Asked(*self._apart(self._groups(groups), set_aside), target, engine)
        if through:
            return self._through(parts, asked)
        own = parts if answer_columns else (Group(ANSWER, tuple(range(len(self.ids)))),)
        if against is not None:
            return self._against(against, asked)
        columns = (*asked.prompt, *self._shifted(own))
        found = self._shares(parts, columns, asked)
        return self._token_map(found, parts, columns, asked)

    def _check(self, rows: Any, target: Any, against: Any, through: bool, engine: Any) -> None:
        if against is not None and (through or rows != ANSWER or target == "runner_up"):
            raise InputError(
                '`against` explains one whole answer minus another: leave `rows` at "answer", `through` out, and take '
                'the target "centred" or "logit".'
            )
        if engine is not None:
            check_choice(engine, "engine", get_args(Engine))

    # Parts and groups ------------------------------------------------------------------------------------------------

    def _parts(self, rows: Groups) -> tuple[Group, ...]:
        if rows == ANSWER:
            return (Group(self.text, tuple(range(len(self.ids)))),)
        if isinstance(rows, str) and rows not in NAMED:
            raise InputError(f"`rows` must be one of {ANSWER}, {', '.join(NAMED)}, or a list of groups; got {rows!r}.")
        meta = {"text": self.text, "offsets": [pair and list(pair) for pair in self.offsets]}
        return find_groups(rows, self.tokens, meta)

    def _groups(self, groups: Groups | None) -> tuple[Group, ...]:
        prompt, regions = self.prompt, None
        if isinstance(groups, Mapping) and "regions" in groups:
            regions, groups = groups["regions"], None
            if not prompt.pictures:
                raise InputError("Regions need a picture, and this prompt has none. Pass different groups.")
        groups = (TURNS if prompt.turns else "sentences") if groups is None else groups
        if groups == TURNS:
            if not prompt.turns:
                raise InputError('"turns" need chat messages, and this prompt has none. Pass different groups.')
            groups = list(prompt.turns)
        labels = self.tensor.tokens[: self.n_prompt_tokens]
        seen = {j for picture in prompt.pictures for j in picture.tokens}
        said = [j for j in range(len(labels)) if j not in seen]
        meta: dict[str, Any] = {} if prompt.text is None else {"text": prompt.text}
        if prompt.offsets is not None:
            meta["offsets"] = [(pair := prompt.offsets[j]) and list(pair) for j in said]
        found = find_groups(groups, [labels[j] for j in said], meta)
        text = [group._replace(tokens=tuple(said[j] for j in group.tokens)) for group in found]
        return columns_of(prompt, text, labels, regions)

    def _apart(self, groups: tuple[Group, ...], aside: Sequence[int]) -> tuple[tuple[Group, ...], int]:
        """Move some tokens out of the groups into groups of their own, placed first; also return how many there are."""
        chosen = check_iterable(aside, "set_aside", "positions in the prompt")
        alone = sorted({check_token(i, self.n_prompt_tokens, "set_aside") for i in chosen})
        return with_beside(groups, alone, self.tensor.tokens), len(alone)

    def _shifted(self, parts: Sequence[Group]) -> tuple[Group, ...]:
        """Parts of the answer as inputs, which follow those of the prompt."""
        return tuple(Group(part.label, tuple(j + self.n_prompt_tokens for j in part.tokens)) for part in parts)

    def _place(self, part: Group) -> list[int] | None:
        """The place of a part in the answer's text."""
        pairs = [pair for j in part.tokens if (pair := self.offsets[j]) is not None]
        return [pairs[0][0], max(stop for _, stop in pairs)] if pairs else None

    # Numbers ---------------------------------------------------------------------------------------------------------

    def _shares(self, parts: Sequence[Group], columns: Sequence[Group], asked: _Asked) -> Shares:
        operator = self.tensor.operator
        targets = make_targets(operator.recording, self.ids, self.positions.start, asked.target)
        fine = torch.promote_types(operator.dtype, torch.float32)
        rows = _membership(parts, len(self.ids)).to(operator.device, fine)
        return shares(operator, targets, rows, columns, asked.engine)

    def _through(self, parts: Sequence[Group], asked: _Asked) -> TokenMap:
        tokens = tuple(Group(label, (k,)) for k, label in enumerate(self.tokens))
        found = self._shares(tokens, (*asked.prompt, *self._shifted(tokens)), asked)
        followed = through(found, len(asked.prompt))
        scores = _membership(parts, len(self.ids)).to(followed) @ followed
        nowhere = scores.new_full((len(scores),), torch.nan)
        meta = self._meta(parts, asked.prompt, asked, found) | {"through": THROUGH}
        return _made(scores, nowhere, parts, asked.prompt, meta)

    def _against(self, other: str | Sequence[int], asked: _Asked) -> TokenMap:
        twin = answer_of(self.specimen, self.prompt, given(self.specimen, self.prompt, other))
        if twin.ids == self.ids:
            raise InputError(f"`against` must be a different answer; both are {self.text!r:.60}.")
        whole = [one._parts(ANSWER) for one in (self, twin)]
        ours, theirs = (
            one._shares(parts, (*asked.prompt, *one._shifted(parts)), asked)
            for one, parts in zip((self, twin), whole, strict=True)
        )
        n = len(asked.prompt)
        scores = torch.cat([ours.scores[:, :n] - theirs.scores[:, :n], ours.scores[:, n:], -theirs.scores[:, n:]], 1)
        sink = None if ours.sink is None or theirs.sink is None else ours.sink - theirs.sink
        found = ours._replace(
            scores=scores, bias=ours.bias - theirs.bias, values=ours.values - theirs.values, sink=sink
        )
        columns = (*asked.prompt, *self._shifted((Group(ANSWER, whole[0][0].tokens),)), Group(AGAINST, ()))
        target = f"{_TITLES[asked.target]}, minus the same for “{twin.text.strip()}”"
        return self._token_map(found, whole[0], columns, asked, against=twin.text, target=target)

    # The map ---------------------------------------------------------------------------------------------------------

    def _token_map(
        self, found: Shares, parts: Sequence[Group], columns: Sequence[Group], asked: _Asked, **more: Any
    ) -> TokenMap:
        notes = {"logit": found.values.tolist(), "bias": found.bias_from, "sums_to": "the target"}
        notes |= {} if found.sink is None else {"sink_gives": found.sink.tolist()}
        meta = self._meta(parts, columns, asked, found) | notes | more
        return _made(found.scores, found.bias / found.values, parts, columns, meta)

    def _meta(self, parts: Sequence[Group], columns: Sequence[Group], asked: _Asked, found: Shares) -> dict[str, Any]:
        meta = grouped_meta(self.tensor.meta(), columns, "answer", ()) | {"set_aside": list(range(asked.n_aside))}
        meta["answer_parts"] = [self._place(part) for part in parts]
        if self.prompt.pictures:
            meta["pictures"] = picture_places(self.prompt, columns)
        served = {} if self.agreement is None else {"served": str(self.agreement)}
        return meta | {"answer": self.text, "target": _TITLES[asked.target], "engine": found.engine} | served


@dataclass(frozen=True)
class _Asked:
    prompt: tuple[Group, ...]
    n_aside: int
    target: TargetKind
    engine: Engine | None


_TITLES: dict[TargetKind, str] = {
    "centred": "logits minus their mean over the vocabulary",
    "logit": "logits",
    "runner_up": "logits minus those of the runners-up",
}


def make_answer(
    specimen: Specimen,
    prompt: Any,
    answer: Any,
    *,
    logprobs: Sequence[float] | None,
    max_new_tokens: int,
    seed: int | None,
    options: dict[str, Any],
) -> Answer:
    """See `Lens.answer`."""
    if answer is None and logprobs is not None:
        raise InputError("`logprobs` need a given answer. Pass it as `answer`.")
    read = read_pictured(specimen, prompt) or read_prompt(specimen, prompt)
    if answer is None:
        found = generated(specimen, read, max_new_tokens=max_new_tokens, seed=seed, options=options)
        return answer_of(specimen, read, found)
    if options or seed is not None:
        names = ", ".join([*options, *(["seed"] if seed is not None else [])])
        raise InputError(
            f"The answer is given, so nothing is generated; leave {names} out. Options of a map go to `Answer.map`."
        )
    found = given(specimen, read, answer)
    served = None if logprobs is None else check_served(logprobs, len(found.ids))
    made = answer_of(specimen, read, found)
    return made if served is None else replace(made, agreement=agreement(served, made.log_probabilities))


def answer_of(specimen: Specimen, prompt: Prompt, found: Continuation) -> Answer:
    """The answer that continues a prompt with some tokens, recorded."""
    tensor = specimen.look(_together(specimen, prompt, found))
    recording = tensor.operator.recording
    if recording.readout is None:
        raise no_head(recording.name)
    if recording.readout.dim() != 3:
        raise MethodError(
            f"`{recording.name}` gives one set of logits for the whole input; an answer needs logits for each "
            f"token. Use `tensor.in_class`."
        )
    return Answer(
        text=found.text, ids=found.ids, offsets=found.offsets, prompt=prompt, tensor=tensor, specimen=specimen
    )


def _together(specimen: Specimen, prompt: Prompt, found: Continuation) -> ModelInput:
    """Prompt and answer as one input; with an encoder, the answer goes into the decoder."""
    n, kind = prompt.n_encoder, "processed" if prompt.arguments else "text"
    if prompt.arguments:
        made = specimen.prepare({"input_ids": [[*prompt.ids, *found.ids]], **beside(prompt, len(found.ids))})
    else:
        made = specimen.prepare(list(prompt.ids[:n] or (*prompt.ids, *found.ids)))
    if n:
        into = specimen.prepare((*prompt.decoder_ids, *found.ids))  # within its vocabulary
        ids = token_ids(into.arguments)
        made = replace(made, arguments=made.arguments | {"decoder_input_ids": ids})
    if prompt.text is None:
        return made
    text = prompt.text + "\n" * (n > 0)  # the two are not one text
    own = tuple([pair and (pair[0] + len(text), pair[1] + len(text)) for pair in found.offsets])
    offsets = None if prompt.offsets is None else prompt.offsets + own
    return ModelInput(arguments=made.arguments, kind=kind, text=text + found.text, offsets=offsets)


def _membership(parts: Sequence[Group], n_tokens: int) -> Tensor:
    """(part, token): 1 where a token belongs to a part."""
    rows = torch.zeros(len(parts), n_tokens, dtype=torch.float64)
    for row, part in zip(rows, parts, strict=True):
        row[list(part.tokens)] = 1
    return rows


def _made(
    scores: Tensor, bias_share: Tensor, parts: Sequence[Group], columns: Sequence[Group], meta: dict[str, Any]
) -> TokenMap:
    return TokenMap(
        scores=scores,
        out_tokens=tuple(part.label for part in parts),
        in_tokens=tuple(group.label for group in columns),
        method="tensor.in_class",
        bias_share=bias_share,
        meta=meta,
    )
