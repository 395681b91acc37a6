"""Scores of passages by packages of others, on the same prompts and answers: flashtrace 0.1.1, context-cite 0.0.4.

They live in no extra; install them beside the library to have them in the table of needles.py (--peers).
"""

from typing import Any

import numpy as np
import torch

import tensorlens as tl
from bench.passages.needle_items import INSTRUCTION
from bench.passages.scores import Passages, Scored, token_groups

N_ABLATIONS = 64  # context-cite's own default
LONG = 4096
"""Tokens from which flashtrace makes attention weights again block by block: all at once take 70 GB at 8,192."""


def flashtrace(lens: tl.Lens, found: Any, passages: Passages) -> Scored:
    """Its default, one hop of information flow routes, for the whole answer."""
    from flashtrace import FlashTrace

    model: Any = lens.model
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")  # it asks for the attention weights
    try:
        again = found.n_prompt_tokens > LONG
        tracer = FlashTrace(model, lens.processor, use_chat_template=False, recompute_attention=again)
        n_target = len(lens.processor(found.text, add_special_tokens=False)["input_ids"])  # its own cut of the answer
        traced = tracer.trace(prompt=found.prompt.text, target=found.text, output_span=(0, n_target - 1))
    finally:
        model.set_attn_implementation(before)
    scores = torch.tensor(traced.scores)
    if len(scores) != found.n_prompt_tokens:
        raise ValueError(f"flashtrace cut the prompt into {len(scores)} tokens, not {found.n_prompt_tokens}")
    return [float(scores[some].sum()) for some in token_groups(found, passages)], 1, 0


def context_cite(lens: tl.Lens, found: Any, passages: Passages) -> Scored:
    """A sparse linear surrogate, fitted to the answer's probability with sentences left out at random."""
    from context_cite import ContextCiter
    from context_cite.context_partitioner import BaseContextPartitioner

    text = found.prompt.text
    sentences = [text[start:stop] for _, start, stop in passages]
    context = text[passages[0][1] : passages[-1][2]]

    class Sentences(BaseContextPartitioner):
        num_sources = len(sentences)

        def split_context(self) -> None: ...

        def get_source(self, index: int) -> str:
            return sentences[index]

        def get_context(self, mask: Any = None) -> str:
            kept = np.ones(len(sentences), dtype=bool) if mask is None else mask
            return " ".join(one for one, is_kept in zip(sentences, kept, strict=True) if is_kept)

    question = text[passages[-1][2] :].split("Question: ")[1].split("<|im_end|>")[0]
    citer = ContextCiter(
        lens.model,
        lens.processor,
        context,
        question,
        num_ablations=N_ABLATIONS,
        partitioner=Sentences(context),
        prompt_template=INSTRUCTION + "\n\n{context}\n\nQuestion: {query}",
        generate_kwargs={"max_new_tokens": 48, "do_sample": False},
    )
    return [float(one) for one in citer.get_attributions(verbose=False)], N_ABLATIONS, 0


PEERS = {"flashtrace": flashtrace, "context-cite": context_cite}
