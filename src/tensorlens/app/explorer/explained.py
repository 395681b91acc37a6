"""The work behind the page of answers: what the model says, told while it says it, and the map of it."""

from __future__ import annotations

from typing import Any

from tensorlens.answers.answer import Answer
from tensorlens.app.explorer.answer_questions import AnswerAsk, Spoken
from tensorlens.app.explorer.answers import Answers, facts
from tensorlens.app.explorer.jobs import Event, Job
from tensorlens.app.explorer.parts import Parts
from tensorlens.app.explorer.recent import Recent
from tensorlens.errors import InputError
from tensorlens.lens import Lens
from tensorlens.models.inputs import tokenizer_of
from tensorlens.views.page import payload

ANSWERS_KEPT = 2


class ExplainedAnswers:
    """Answers with their model passes, the latest kept.

    Args:
        answers: What loads models and keeps maps.
    """

    def __init__(self, answers: Answers) -> None:
        self.answers = answers
        self._kept: Recent[Spoken, Answer] = Recent(ANSWERS_KEPT, answers.limits.tensor_bytes)

    def forget(self) -> None:
        """Let go of every pass."""
        self._kept.clear()

    def explain(self, job: Job, ask: AnswerAsk) -> Event:
        """The map of an answer, told as soon as it is there, and then its certificate."""
        is_kept = self._kept.get(ask.spoken) is not None
        found = self._answer(job, ask.spoken)
        job.tell("said", text=found.text)
        job.tell("progress", stage="Tracing it back", done=None)
        made = self.answers.results.get(ask.key) or found.map(ask.groups, ask.rows, against=ask.against, set_aside=(0,))
        self.answers.keep(ask.key, made)
        job.tell("map", map=payload(made.view()), result=ask.key)
        made = self.answers.certified(job, ask.key, made, found.tensor)
        return {"type": "done", "result": ask.key, "is_kept": is_kept, "text": found.text} | facts(made)

    def _answer(self, job: Job, spoken: Spoken) -> Answer:
        kept = self._kept.get(spoken)
        if kept is not None:
            return kept
        lens = self.answers.lens(job, spoken.model)
        tokenizer = tokenizer_of(lens.processor)
        if tokenizer is None:
            raise InputError(f"`{lens.name}` takes no text, so that it gives no answer. Choose another model.")
        n_tokens, most = len(tokenizer(spoken.prompt)["input_ids"]), self.answers.limits.tokens
        if n_tokens > most:
            raise InputError(f"Expected at most {most} tokens, got {n_tokens}. Shorten the prompt.")
        job.tell("progress", stage="Model pass" if spoken.answer else "Answering", done=None)
        made = _said(job, lens, spoken, tokenizer)
        self._kept.put(spoken, made, Parts(made.tensor).n_bytes)
        return made


def _said(job: Job, lens: Lens, spoken: Spoken, tokenizer: Any) -> Answer:
    prompt: Any = [{"role": "user", "content": spoken.prompt}] if spoken.is_chat else spoken.prompt
    if spoken.answer is not None:
        return lens.answer(prompt, spoken.answer)
    return lens.answer(prompt, max_new_tokens=spoken.max_new_tokens, streamer=_Telling(job, tokenizer))


class _Telling:
    """Hears of each token that `generate` adds, and tells the reader what was said so far."""

    def __init__(self, job: Job, tokenizer: Any) -> None:
        self._job, self._tokenizer = job, tokenizer
        self._ids: list[int] | None = None  # what comes first is the prompt

    def put(self, value: Any) -> None:
        """Take a token."""
        self._job.check()
        if self._ids is None:
            self._ids = []
            return
        self._ids += value.flatten().tolist()
        self._job.tell("said", text=self._tokenizer.decode(self._ids, skip_special_tokens=True))

    def end(self) -> None:
        """Nothing is left over."""
