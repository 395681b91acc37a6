"""`Lens` and `load`: from a model to its attention tensor at an input."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import NoneType
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from tensorlens.answers.answer import Answer, make_answer
from tensorlens.batches import Asked, Batch, DatasetMaps
from tensorlens.errors import InputError, check_iterable, check_whole
from tensorlens.explanation import Explanation, sink_apart
from tensorlens.maps.targets import METHOD, OUT_TOKEN, Target
from tensorlens.models.anatomy import Anatomy, find_anatomy
from tensorlens.models.inputs import ModelInput, batch_size
from tensorlens.models.runner import own_modes, refuse_traced
from tensorlens.models.samples import check_several, split_batch
from tensorlens.models.texts import known_processor
from tensorlens.recommendations import Recommendation, recommended
from tensorlens.recording.conventions import Rules
from tensorlens.specimen import Specimen
from tensorlens.views.printing import Printed


class Lens(Printed):
    """A model to look through: call it on an input to get the `AttentionTensor` there.

    The model stays the user's: the same object, untouched after every call.

    Args:
        model: A model in memory, in any mode; it is run as at inference.
        processor: Its tokenizer, image processor or processor, if inputs are text or images. Any object with
            `encode` and `decode` is a tokenizer: tiktoken's, a character tokenizer, or your own.
        rules: The conventions: `Rules`, or a rule set by name such as ``"attn_lrp"``; see `Rules.of`.
        blocks: Path of the list of blocks, if the detected one is wrong.
        name: Name of the model in maps.
        labels: From a token id to its label, for a model without a tokenizer.
    """

    def __init__(
        self,
        model: nn.Module,
        processor: Any = None,
        *,
        rules: Rules | Recommendation | str | None = None,
        blocks: str | None = None,
        name: str | None = None,
        labels: Callable[[int], str] | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise InputError(
                f"`Lens` expected a torch module; got {type(model).__name__}. To load by name use `tensorlens.load`."
            )
        if blocks is not None and not isinstance(blocks, str):
            raise InputError(
                f"`blocks` must be the path of a list of blocks, such as 'model.layers'; got {blocks!r:.60}."
            )
        model = getattr(model, "_orig_mod", model)  # what torch.compile wrapped; its code can be read
        refuse_traced(model)
        if blocks is not None:  # fail early on a wrong path
            find_anatomy(model, blocks=blocks)
        known_as = name or getattr(getattr(model, "config", None), "name_or_path", "") or type(model).__name__
        processor = known_processor(processor, labels)
        self.specimen = Specimen(model, processor, Rules.of(rules), blocks, known_as)

    @classmethod
    def from_pretrained(cls, name: str, **options: Any) -> Lens:
        """A lens on a model by name, as in transformers; the same as `load`, with its options.

        >>> Lens.from_pretrained("HuggingFaceTB/SmolLM2-135M", revision="main")  # doctest: +SKIP
        """
        return load(name, **options)

    def __repr__(self) -> str:
        """One line: the model."""
        return f"Lens({self.name}: {type(self.model).__name__})"

    @property
    def model(self) -> nn.Module:
        """The user's model."""
        return self.specimen.model

    @property
    def processor(self) -> Any:
        """Its tokenizer, image processor or processor."""
        return self.specimen.processor

    @property
    def rules(self) -> Rules:
        """The conventions."""
        return self.specimen.rules

    @property
    def name(self) -> str:
        """Name of the model in maps."""
        return self.specimen.name

    @property
    def anatomy(self) -> Anatomy:
        """Where the model's parts are, according to its module tree; an input may show something else."""
        return self.specimen.anatomy

    @own_modes
    def __call__(self, value: Any) -> Any:
        """The attention tensor at an input, or a list of them for a batch.

        The samples of a batch run through the model one by one and without padding, so each result is the same as
        alone.

        Args:
            value: A text, a list of token ids, an image (PIL, path or pixel array), embeddings (L, D), a processor's
                output, or a list of any of these.
        """
        if isinstance(value, Mapping) and batch_size(value) > 1:
            return [self(one) for one in split_batch(value)]
        if isinstance(value, (list, tuple)) and value and not isinstance(value[0], (int, np.integer)):
            return [self(one) for one in value]
        return self.specimen.look(self.specimen.prepare(value))

    @own_modes
    def batch(self, inputs: Sequence[Any]) -> Batch:
        """Several inputs whose maps share one recording; the attention tensor of each is computed on request.

        Args:
            inputs: Each as for a call; texts of different lengths are padded at their end.

        Raises:
            InputError: The model reacts to padding or mixes samples, so results would differ from single ones.
        """
        check_several(inputs)
        made = Batch(self.specimen, [self.prepare(value) for value in inputs])
        made.check()
        return made

    def maps(
        self,
        inputs: Iterable[Any],
        method: str | Sequence[str] = METHOD,
        *,
        out_token: int = OUT_TOKEN,
        target: Target | None = None,
        batch_size: int | None = None,
        probes: int | None = None,
        seed: int = 0,
        raw: bool = False,
        progress: bool | None = None,
        on_error: Literal["raise", "skip"] = "raise",
        skipped: list[tuple[int, str]] | None = None,
        truncate: bool = False,
        first_row: int = 0,
    ) -> Iterator[Any]:
        """Map a data set in batches, in the order of the inputs; each map is the same as alone.

        Args:
            inputs: Each as for a call; any iterable.
            method: A name in `METHODS`. With several, each input gives a dictionary: by method its map, or the error
                that says why there is none.
            out_token: The output to explain; negative ones count from each sample's own end.
            target: For `tensor.in_class`; the model's own prediction for each sample if None.
            batch_size: Samples per batch; as many as fit into free memory if None.
            probes: For `tensor.norm` and `tensor.contribution`: random probes to sketch it with.
            seed: Random seed for the probes.
            raw: For rollouts and means of norms; see `AttentionTensor.map`.
            progress: Whether to show a progress bar; on a terminal if None.
            on_error: What to do with an input that the model cannot take (empty, too long, not text): ``raise`` an
                error that names its row, or ``skip`` it.
            skipped: A list that receives the (row, reason) of each input left out.
            truncate: Whether a text that is too long for the model is cut at its end.
            first_row: Number of the first input in error messages.

        Raises:
            InputError: An input that the model cannot take, with its row.
        """
        check_several(inputs)
        names = (method,) if isinstance(method, str) else check_iterable(method, "method", "names in `METHODS`")
        if not isinstance(skipped, (list, NoneType)):
            raise InputError(f"`skipped` must be a list, which receives the rows left out; got {skipped!r:.60}.")
        asked = Asked(methods=tuple(names), out_token=out_token, target=target, probes=probes, seed=seed, raw=raw)
        found = DatasetMaps(self.specimen, asked, batch_size).of(
            inputs,
            progress,
            on_error=on_error,
            skipped=[] if skipped is None else skipped,
            truncate=truncate,
            first=first_row,
        )
        return (maps[method] for maps in found) if isinstance(method, str) else found

    @own_modes
    def answer(
        self,
        prompt: Any,
        answer: str | Sequence[int] | None = None,
        *,
        logprobs: Sequence[float] | None = None,
        max_new_tokens: int = 64,
        seed: int | None = None,
        **options: Any,
    ) -> Answer:
        """The model's answer to a prompt, or a given answer, to be traced back to the prompt.

        Args:
            prompt: A text, chat messages (dicts with `role` and `content`; the tokenizer's own template renders them)
                or token ids.
            answer: The answer to explain, as it continues the prompt; generated by the model if None.
            logprobs: A server's log-probability of each token of that answer. `Answer.agreement` compares them
                with the model's own, with a warning where they differ by more than rounding.
            max_new_tokens: Longest answer, in tokens; the model's context length limits it further.
            seed: Random seed for a sampled answer.
            **options: Options for the model's `generate`. Without any the answer is the greedy one.
        """
        seed = None if seed is None else check_whole(seed, "seed")
        return make_answer(
            self.specimen, prompt, answer, logprobs=logprobs, max_new_tokens=max_new_tokens, seed=seed, options=options
        )

    @own_modes
    def explain(
        self,
        text: Any,
        question: str = "word",
        target: str | int | None = None,
        against: str | int | None = None,
        *,
        tokens: bool = False,
    ) -> Explanation:
        """Why the model predicts what it predicts: the map that benchmarks recommend for a question, with its headline.

        The rules come from `recommended`, not from this lens; to choose your own, use `T.map`.

        Args:
            text: One input, as for a call.
            question: ``"word"``: which word decided? ``"passage"``: which sentence? ``"component"``: which head or
                feed-forward? ``"paper"``: the paper's own operator.
            target: What to explain: a token, a class or a number; the model's top prediction if None. “Rome” is
                “ Rome” where that is one token and likelier; several tokens are the sum of their logits.
            against: Explain the target rather than this.
            tokens: Whether to use single tokens instead of words or sentences.
        """
        prepared = self.prepare(text)
        include = self.rules.include_final_norm

        def look(rules: Rules) -> Any:
            lens = self.with_rules(replace(rules, include_final_norm=include))
            return lens.specimen.look(prepared)

        chosen = recommended(question)
        return Explanation(sink_apart(look, chosen.rules), chosen, target, against, tokens=tokens)

    def prepare(self, value: Any) -> ModelInput:
        """The model's arguments for any input that a call accepts."""
        return self.specimen.prepare(value)

    def with_rules(self, rules: Rules | Recommendation | str) -> Lens:
        """The same model under different rules: `Rules`, a `Recommendation`, or a rule set by name.

        A name keeps this lens's output state.
        """
        of = self.specimen
        rules = Rules.of(rules, include_final_norm=of.rules.include_final_norm)
        made = Lens(of.model, of.processor, rules=rules, blocks=of.blocks, name=of.name)
        made.specimen.anatomies = of.anatomies  # facts about the model are shared
        return made


def load(
    name: str,
    *,
    device: str | None = None,
    dtype: str | torch.dtype | None = None,
    device_map: Any = None,
    attention: str | None = None,
    rules: Rules | Recommendation | str | None = None,
    trust_remote_code: bool = False,
    revision: str | None = None,
) -> Lens:
    """Load a model and return a lens on it.

    Args:
        name: A bundled short name (``smollm2-135m``), a folder, a ``.gguf`` file, or a hub id.
        device: Where to put it; the GPU if there is one.
        dtype: Type of the weights (default: float32).
        device_map: Placement over several devices, as in transformers; instead of `device`.
        attention: ``"eager"`` or ``"sdpa"``; transformers' own choice if None.
        rules: The conventions: `Rules`, or a rule set by name such as ``"attn_lrp"``; see `Rules.of`.
        trust_remote_code: Whether code that comes with the model may run (default: no).
        revision: Which version: a branch, tag or commit on the hub (``step3000`` of a model with checkpoints), or
            the name of a checkpoint folder inside the folder.
    """
    from tensorlens.models.loading import load_pretrained

    rules = Rules.of(rules)  # fail early on a wrong name
    loaded = load_pretrained(
        name,
        device=device,
        dtype=dtype,
        device_map=device_map,
        attention=attention,
        trust_remote_code=trust_remote_code,
        revision=revision,
    )
    return Lens(loaded.model, loaded.processor, rules=rules, name=loaded.name)
