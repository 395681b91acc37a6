"""Where the parts of a model are: by its module tree, and by what was seen of one plain pass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import nn

from tensorlens.models.around import (
    held_sources,
    refuse_second_state,
    refuse_several_states,
    stacks_beside,
    start_before,
)
from tensorlens.models.chains import (
    LISTS,
    Chain,
    entering,
    find_chain,
    find_encoder,
    holds_enough,
    is_in_list,
    leaving,
)
from tensorlens.models.channels import reading_axis, writing_axis
from tensorlens.models.endings import Ending, find_ending, find_readout, is_all_of_head
from tensorlens.models.evidence import Evidence, ModuleCall, watch
from tensorlens.models.module_calls import own_methods
from tensorlens.models.not_found import never_ran, not_found, not_seen
from tensorlens.models.stacks import ask, blocks_in, encoder_and_decoder, named_blocks, stacks


@dataclass(frozen=True, kw_only=True)
class Anatomy:
    """The parts of a model that the operator speaks of.

    Attributes:
        model: The model as the user gave it, with its head.
        body: The part without the head, as far as the model names one.
        stack: Paths of the lists that hold the blocks, or of the blocks themselves, with commas between them.
        blocks: The modules in question. Shared weights make one module several blocks: blocks are counted by call.
        unembedding: The linear layer from a token's state to the logits of a language model, if there is one.
        embedding: The layer from token ids to embeddings, if there is one.
        encoder: Path of the encoder, in a model that also has a decoder.
        encoder_blocks: Those of the blocks that are the encoder's.
        other_stacks: Paths of other lists that might hold the blocks, for inputs that do not go through `stack`.
        body_end: Path of the module whose first output after the last block is $X^N$; None for the output of the last
            block itself; empty for what the model returns, or for the input of its unembedding where it has one.
        has_head: Whether anything follows $X^N$; None if that was not seen.
        reads_state: Whether the unembedding takes tokens of $X^N$ as they are, all or some of them.
        gives_raw_logits: Whether the model returns what its unembedding gives, with no soft cap or scale behind it.
        head_linear: Path of the last linear layer before the model's output, if it is no unembedding.
        readout: Path of the module whose output are the logits, where a softmax or its like follows; None if the model
            returns them itself.
        ends_in: That softmax or its like, if there is one.
        channels: The channel axis of the state that enters each block, by call, and of $X^N$; None where no weight
            told.
        state_place: Which of the floating-point tensors that a block returns is the state.
        entry_place: Which of the floating-point tensors that a block takes is the state.
        starts_early: Whether $X^0$ is what `embedding` gives, because the first block takes only a part of it.
        around: Paths of modules with weights that bring something of the input to $X^N$ around $X^0$; see `around`.
        asked: The path of the blocks as the user gave it, if they did.
        n_alike: How many calls of modules like the blocks were seen in all, none of them part of a block; None if that
            was not seen. An input that makes other calls has another anatomy.
        by_methods: Whether the blocks are run by methods of theirs and not called.
        beside: Where blocks like these ran side by side with them; their own path, if it was they that ran again.
    """

    model: nn.Module
    body: nn.Module
    stack: str
    blocks: tuple[nn.Module, ...]
    unembedding: nn.Linear | None
    embedding: nn.Module | None = None
    encoder: str | None = None
    encoder_blocks: tuple[nn.Module, ...] = ()
    other_stacks: tuple[str, ...] = ()
    body_end: str | None = None
    has_head: bool | None = None
    reads_state: bool = False
    gives_raw_logits: bool = False
    head_linear: str | None = None
    readout: str | None = None
    ends_in: str | None = None
    channels: tuple[int | None, ...] = ()
    state_place: int = 0
    entry_place: int = 0
    starts_early: bool = False
    around: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    asked: str | None = None
    n_alike: int | None = None
    by_methods: bool = False

    @property
    def runs_again(self) -> bool:
        """Whether the blocks run again after the last of them, on something else."""
        return any(path in self.stack.split(", ") for path in self.beside)

    @property
    def leaves_blocks_out(self) -> bool:
        """Whether the list of the blocks has more of them than ran."""
        listed = dict(self.model.named_modules()).get(self.stack)
        return isinstance(listed, LISTS) and len(listed) > len(set(self.blocks))

    @cached_property
    def bytes_per_token(self) -> int:
        """About how much memory the factors of a pass take: gains, statistics, gates, queries and keys of blocks."""
        weights = [p for block in self.blocks for p in block.parameters() if p.dim() == 2]
        # Gains and statistics are held in float32, the rest in the model's own type.
        return sum(max(3, 2 * weight.dtype.itemsize) * max(weight.shape) for weight in weights)

    def alternatives(self) -> Iterator[Anatomy]:
        """The same model with its blocks in another list."""
        for stack in self.other_stacks:
            blocks = blocks_in(self.model.get_submodule(stack))
            yield replace(
                self, stack=stack, blocks=blocks, other_stacks=(), encoder=None, encoder_blocks=(), n_alike=None
            )


def find_anatomy(model: nn.Module, evidence: Evidence | None = None, *, blocks: str | None = None) -> Anatomy:
    """Find the blocks of a model, where its body ends, and its head.

    Types that say of themselves where their encoder, decoder and head are (as in transformers) are believed, if that
    is what ran. In all others the blocks are the calls alike that follow each other, that one state flows through and
    that hold most of the weights. Without evidence the largest list of modules is taken.

    Args:
        model: Any model.
        evidence: What was seen of a pass; see `watch`.
        blocks: Path of the list of blocks, or several paths with commas between them, where the guess is wrong.
    """
    model = _inside_compiled(model)
    named = _by_tree(model, blocks)
    if evidence is None:
        if named is None:
            raise not_found(model)
        return named
    chain = [] if blocks is not None else find_chain(evidence)
    is_named = blocks is not None or _is_known_type(model)
    if chain and not is_named:
        return _with_ending(_by_chain(model, chain, evidence), chain, evidence)
    for candidate in () if named is None else (named, *named.alternatives()):
        calls = _calls_of(candidate, evidence)
        if calls and (is_named or holds_enough(calls, evidence)):
            return _with_ending(candidate, calls, evidence)
    if chain:
        return _with_ending(_by_chain(model, chain, evidence), chain, evidence)
    if named is None or _calls_of(named, evidence):
        raise not_found(model)
    ran = next((call for call in evidence.calls if call.module in named.blocks), None)
    raise never_ran(model, named.stack) if ran is None else not_seen(model, ran)


def observe(model: nn.Module, arguments: Mapping[str, Any], *, blocks: str | None = None) -> tuple[Anatomy, Evidence]:
    """The anatomy of a model on an input, and the plain pass that shows it.

    Blocks that are run by a method, and not called, are seen in a second pass, in which their methods count as calls.
    """
    evidence = watch(model, arguments)
    named = _by_tree(_inside_compiled(model), blocks)
    entered = [one for one in (named, *named.alternatives()) if _is_entered_directly(one, evidence)] if named else []
    if not entered:
        return find_anatomy(model, evidence, blocks=blocks), evidence
    evidence = watch(model, arguments, entered[0].blocks)
    return replace(find_anatomy(model, evidence, blocks=blocks), by_methods=True), evidence


def _inside_compiled(model: nn.Module) -> nn.Module:
    return getattr(model, "_orig_mod", model)


def _is_entered_directly(anatomy: Anatomy, evidence: Evidence) -> bool:
    """Whether blocks ran by a method of theirs, so that only what is in them was seen."""
    paths = {id(module): path for path, module in evidence.root.module.named_modules()}
    called = {call.path for call in evidence.calls}
    steps = [path.split(".") for path in called]
    inside = {".".join(step[:n]) for step in steps for n in range(1, len(step))} - called
    entered = [block for block in anatomy.blocks if paths[id(block)] in inside and not isinstance(block, LISTS)]
    return any(own_methods(block) for block in entered)


# By what ran ---------------------------------------------------------------------------------------------------------


def _by_chain(model: nn.Module, chain: Chain, evidence: Evidence) -> Anatomy:
    refuse_several_states(chain, evidence)
    refuse_second_state(chain, evidence)
    found = find_encoder(chain, evidence)
    encoder, of_encoder = (None, []) if found is None else found
    return Anatomy(
        model=model,
        body=getattr(model, "base_model", model),
        stack=", ".join(dict.fromkeys(_paths(chain, evidence))),
        blocks=tuple({id(call.module): call.module for call in (*of_encoder, *chain)}.values()),
        unembedding=None,
        embedding=ask(model, "get_input_embeddings") or _embedding_before(chain[0], evidence),
        encoder=None if encoder is None else encoder.path,
        encoder_blocks=tuple(call.module for call in of_encoder),
    )


def _paths(chain: Chain, evidence: Evidence) -> Iterator[str]:
    """Where the blocks are: a list by its path if all that ran of it are blocks, others by their own."""
    own = {call.path for call in chain}
    for call in chain:
        path = call.path.rpartition(".")[0]
        beside = {other.path for other in evidence.calls if other.path.rpartition(".")[0] == path}
        yield path if is_in_list(call, evidence) and beside <= own else call.path


def _embedding_before(first: ModuleCall, evidence: Evidence) -> nn.Module | None:
    """The layer that made the tokens' embeddings: of those that lead to the first block, the one with most entries."""
    found = [
        call.module
        for call in evidence.calls[: first.number]
        if isinstance(call.module, nn.Embedding)
        and call.given
        and len(call.given[0].shape) > 2
        and evidence.reaches({call.given[0].node}, entering(first).node)
    ]
    return max(found, key=lambda layer: layer.num_embeddings, default=None)


def _calls_of(anatomy: Anatomy, evidence: Evidence) -> Chain:
    """The calls of an anatomy's blocks, those of the encoder apart, and none that is part of another."""
    encoder = {id(block) for block in anatomy.encoder_blocks}
    return _outermost({id(block) for block in anatomy.blocks} - encoder, evidence)


def _encoder_calls(anatomy: Anatomy, evidence: Evidence) -> Chain:
    return _outermost({id(block) for block in anatomy.encoder_blocks}, evidence)


def _outermost(modules: set[int], evidence: Evidence) -> Chain:
    calls = [call for call in evidence.calls if id(call.module) in modules and call.taken and call.given]
    return [call for call in calls if not any(id(holder.module) in modules for holder in call.holders())]


def _with_ending(anatomy: Anatomy, chain: Chain, evidence: Evidence) -> Anatomy:
    ending = find_ending(chain, evidence, _known_body(anatomy, chain))
    linear = ending.head_linear
    # One that never ran is none: some heads read its weight, joined to another, and make the logits themselves.
    named = next((call for call in evidence.calls if call.module is anatomy.unembedding), None)
    unembedding = anatomy.unembedding if named else _as_unembedding(linear, ending, anatomy, evidence)
    if unembedding is not None and not is_all_of_head(named or linear, ending, evidence):
        unembedding = None
    readout, ends_in = find_readout(evidence, linear)
    taken = [call.taken[0] for call in evidence.calls if call.module is unembedding and call.taken]
    if ending.body_end is None and len(taken) == 1 and taken[0].shape == ending.state.shape:
        # A final norm that is a mere function: the state is what the head reads.
        is_same = evidence.is_same(taken[0].node, ending.state.node) or not evidence.is_flow_known
        ending = ending if is_same else replace(ending, body_end="", state=taken[0])
    encoder = _encoder_calls(anatomy, evidence)
    ends = [seen.node for seen in (ending.state, evidence.output) if seen is not None]
    start = None if _is_known_type(anatomy.model) else start_before(chain, ends, evidence)
    return replace(
        anatomy if start is None else replace(anatomy, embedding=start.module, starts_early=True),
        unembedding=unembedding,
        body_end=ending.body_end,
        has_head=ending.has_head or unembedding is not None,
        reads_state=bool(taken) and evidence.is_same(taken[-1].node, ending.state.node),
        gives_raw_logits=_gives_raw_logits(unembedding, evidence),
        head_linear=None if linear is None or linear.module is unembedding else linear.path,
        readout=readout,
        ends_in=ends_in,
        channels=_channels(encoder, chain, ending, evidence),
        around=held_sources(chain, encoder, ends, evidence),
        beside=stacks_beside(chain, encoder, evidence),
        n_alike=_count_alike(anatomy, (*encoder, *chain), unembedding, evidence),
        entry_place=chain[0].place,
        state_place=leaving(chain[0], chain[1] if len(chain) > 1 else None, evidence),
    )


def _gives_raw_logits(unembedding: nn.Linear | None, evidence: Evidence) -> bool:
    """Whether what the unembedding gives is what the model returns."""
    given = [call.given[0].node for call in evidence.calls if call.module is unembedding and call.given]
    output = evidence.output
    return bool(given) and output is not None and evidence.is_flow_known and evidence.is_same(given[-1], output.node)


def _count_alike(anatomy: Anatomy, blocks: Sequence[ModuleCall], head: nn.Module | None, evidence: Evidence) -> int:
    """Calls of modules like the blocks, up to the unembedding, where a recording ends."""
    inside = {inner.number for block in blocks for inner in block.walk()} - {block.number for block in blocks}
    ends = [call.number for call in evidence.calls if call.module is head and call.number > blocks[-1].number]
    kinds, end = {type(block) for block in anatomy.blocks}, min(ends, default=len(evidence.calls))
    return sum(type(call.module) in kinds for call in evidence.calls[:end] if call.number not in inside)


def _known_body(anatomy: Anatomy, chain: Chain) -> str | None:
    """The outermost module around the blocks that the head is not part of, for types that name their parts."""
    if not _is_known_type(anatomy.model):
        return None
    if anatomy.body is anatomy.model and anatomy.unembedding is None:
        return ""
    for holder in reversed(list(chain[0].holders())):
        if holder.path and all(part is not anatomy.unembedding for part in holder.module.modules()):
            return holder.path
    return ""


def _as_unembedding(
    linear: ModuleCall | None, ending: Ending, anatomy: Anatomy, evidence: Evidence
) -> nn.Linear | None:
    """A linear layer that makes logits of a vocabulary for tokens one by one."""
    if linear is None or not isinstance(linear.module, nn.Linear):
        return None
    size = getattr(anatomy.embedding, "num_embeddings", None)
    taken, state = linear.taken[0], ending.state
    is_per_token = len(taken.shape) == len(state.shape) > 2 and (
        taken.shape[:-1] == state.shape[:-1] or evidence.is_same(taken.node, state.node)
    )
    return linear.module if is_per_token and size is not None and linear.module.out_features >= 0.9 * size else None


def _channels(encoder: Chain, chain: Chain, ending: Ending, evidence: Evidence) -> tuple[int | None, ...]:
    found = [reading_axis(entering(call), call.walk(), evidence) for call in (*encoder, *chain)]
    end = next((call for call in evidence.calls if ending.body_end and call.path == ending.body_end), chain[-1])
    last = found[-1] if end is chain[-1] and ending.state.shape == entering(end).shape else None
    if end is not chain[-1] and end.taken and end.taken[0].shape == ending.state.shape:
        last = reading_axis(end.taken[0], end.walk(), evidence)
    if last is None:
        last = writing_axis(ending.state, end.walk())
    if last is None:  # states joined to one: what follows reads them, or they are laid out as before
        last = reading_axis(ending.state, evidence.calls[end.number :], evidence)
    if last is None and len(ending.state.shape) == len(entering(chain[-1]).shape):
        last = found[-1]
    return (*found, last)


# By the tree ---------------------------------------------------------------------------------------------------------


def _is_known_type(model: nn.Module) -> bool:
    """Whether a model says of itself where its parts are, as those of transformers do."""
    return hasattr(model, "base_model_prefix") and hasattr(model, "config")


def _by_tree(model: nn.Module, blocks: str | None) -> Anatomy | None:
    """The blocks by the module tree: the list of modules that holds most of the parameters.

    With an encoder and a decoder, there is such a list in each. In a model of several towers the one of the language
    model is taken, if its input goes through it.
    """
    unembedding = ask(model, "get_output_embeddings")
    common: dict[str, Any] = {
        "model": model,
        "body": getattr(model, "base_model", model),
        "unembedding": unembedding if isinstance(unembedding, nn.Linear) else None,
        "embedding": ask(model, "get_input_embeddings"),
    }
    if blocks is not None:
        return Anatomy(**common, stack=blocks, blocks=named_blocks(model, blocks), asked=blocks)
    pair = encoder_and_decoder(model)
    if pair is not None:
        encoder, encoder_stack, decoder_stack = pair
        of_encoder = blocks_in(model.get_submodule(encoder_stack))
        of_decoder = blocks_in(model.get_submodule(decoder_stack))
        return Anatomy(
            **common,
            stack=decoder_stack,
            blocks=of_encoder + of_decoder,
            encoder=encoder,
            encoder_blocks=of_encoder,
            other_stacks=tuple(stack for stack in stacks(model) if stack != decoder_stack),
        )
    found = stacks(model)
    if not found:
        return _of_attributes(common)
    return Anatomy(
        **common, stack=found[0], blocks=blocks_in(model.get_submodule(found[0])), other_stacks=tuple(found[1:])
    )


def _of_attributes(common: dict[str, Any]) -> Anatomy | None:
    """For a model without lists, until it was seen to run: its parts that hold several weights."""
    parts = {
        name: part
        for name, part in common["model"].named_children()
        if sum(weight.dim() > 1 for weight in part.parameters()) > 1
    }
    return Anatomy(**common, stack=", ".join(parts), blocks=tuple(parts.values())) if parts else None
