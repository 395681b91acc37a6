"""Where the parts of a model are: its blocks, where its body ends, its head.

The search, step by step:

1. *Watch* one plain pass: which modules were called, and which tensor was made from which (`evidence.watch`). Where
   blocks are run by their methods, watch another pass in which these count as calls (`observe`).
2. *By the tree*, `_by_tree`: the list of modules with most weights. Parts that a model names itself come first (as
   models of transformers do): its encoder and decoder, its embeddings.
3. *By what ran*, `chains.find_chain`: consecutive similar calls, with one state that flows through them.
4. *Choose*, `_choose`: the tree's list where the user or the model itself named it and it ran, else the chain, else the
   tree's list if it ran. A chain with two states is refused.
5. *The ending*, `around.find_ending`: from the last block through norms and holders until a head begins; there is X^N.
6. *The head*, `_head`: the unembedding, and where the logits are if a softmax follows.
7. *The beginning*, `around.start_before`: whether X⁰ is the output of an embedding, since the first block takes a part.
8. *The axes*, `around.channel_axes`: which axis of each state holds channels, by the weights that read it.
9. *What goes beside*, `around`: other ways from the input to the output, which certificates must mention.

Steps 5 to 9 are put together in `_with_ends`. `Anatomies` remembers what was found, by kind of input.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks
from torch.utils._pytree import keystr, tree_leaves_with_path

from tensorlens.errors import AnatomyError
from tensorlens.models.around import (
    Ending,
    channel_axes,
    find_ending,
    find_readout,
    held_sources,
    is_all_of_head,
    refuse_second_state,
    stacks_beside,
    start_before,
)
from tensorlens.models.chains import (
    Chain,
    find_chain,
    find_encoder,
    leaving,
)
from tensorlens.models.evidence import BLOCK_LISTS, CONTAINERS, Evidence, ModuleCall, watch
from tensorlens.models.inputs import WHAT_IS_NEEDED, ask
from tensorlens.models.runner import module_tree, own_methods

VOCABULARY_SHARE = 0.9
"""A tensor counts as logits if it has at least this many channels per vocabulary token: an embedding may be padded."""


@dataclass(frozen=True, kw_only=True)
class Anatomy:
    """The parts of a model that the operator refers to.

    Attributes:
        model: The model as the user gave it, with its head.
        stack: Paths of the lists that hold the blocks, or of the blocks themselves, with commas between them.
        blocks: The modules. A module that runs several times is several blocks: blocks are counted by call.
        unembedding: The linear layer from a token's state to the logits of a language model, if there is one.
        embedding: The layer from token ids to embeddings, if there is one.
        encoder: Path of the encoder, in a model that also has a decoder.
        encoder_blocks: Those of the blocks that are the encoder's.
        body_end: Path of the module whose first output after the last block is $X^N$; None for the output of the last
            block itself; empty for what the model returns, or for the input of its unembedding where it has one.
        has_head: Whether anything follows $X^N$; None if that was not seen.
        gives_raw_logits: Whether the model returns what its unembedding gives, with no soft cap or scale behind it.
        readout: Path of the module whose output are the logits, where a softmax or its like follows; None if the model
            returns them itself.
        channels: The channel axis of the state that enters each block, by call, and of $X^N$; None if no weight
            shows it.
        state_place: Index of the state among the floating-point tensors that a block returns.
        entry_place: Index of the state among the floating-point tensors that a block takes.
        starts_early: Whether $X^0$ is the output of `embedding`, because the first block takes only a part of it.
        around: Paths of modules with weights through which the input reaches $X^N$ without passing $X^0$; see `around`.
        asked: The path of the blocks as the user gave it, if any.
        n_alike: Number of calls of modules like the blocks that are not part of a block; None if unknown. An input that
            makes other calls has another anatomy.
        by_methods: Whether the blocks are run by their methods instead of being called.
        beside: Paths of similar blocks that ran beside them; their own path if they themselves ran again.
    """

    model: nn.Module
    stack: str
    blocks: tuple[nn.Module, ...]
    unembedding: nn.Linear | None
    embedding: nn.Module | None = None
    encoder: str | None = None
    encoder_blocks: tuple[nn.Module, ...] = ()
    body_end: str | None = None
    has_head: bool | None = None
    gives_raw_logits: bool = False
    readout: str | None = None
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
        """Whether the blocks run once more after the last one, on a different state."""
        return any(path in self.stack.split(", ") for path in self.beside)

    @property
    def leaves_blocks_out(self) -> bool:
        """Whether the list of the blocks contains more blocks than ran."""
        listed = module_tree(self.model).get(self.stack)
        return isinstance(listed, CONTAINERS) and len(listed) > len(set(self.blocks))


def find_anatomy(model: nn.Module, evidence: Evidence | None = None, *, blocks: str | None = None) -> Anatomy:
    """Find the blocks of a model, where its body ends, and its head.

    Models that name their encoder, decoder and head (as in transformers) are believed, if those parts ran. In all other
    models the blocks are similar consecutive calls that one state flows through and that
    hold most of the weights. Without evidence the largest list of modules is taken.

    Args:
        model: Any model.
        evidence: The evidence of one pass; see `watch`.
        blocks: Path of the list of blocks, or several paths separated by commas, if the guess is wrong.
    """
    model = _inside_compiled(model)
    tree = _by_tree(model, blocks)
    if evidence is None:
        if tree is None:
            raise _nothing_repeats(model)
        return tree
    chain = [] if blocks is not None else find_chain(evidence)
    found, calls = _choose(model, tree, chain, evidence)
    return _with_ends(found, calls, evidence)


def observe(model: nn.Module, arguments: Mapping[str, Any], *, blocks: str | None = None) -> tuple[Anatomy, Evidence]:
    """The anatomy of a model on an input, and the plain pass that shows it.

    Blocks that are run by a method, and not called, are seen in a second pass, in which their methods count as calls.
    """
    evidence = watch(model, arguments)
    tree = _by_tree(_inside_compiled(model), blocks)
    if tree is None or not _is_entered_directly(tree, evidence):
        return find_anatomy(model, evidence, blocks=blocks), evidence
    evidence = watch(model, arguments, tree.blocks)
    return replace(find_anatomy(model, evidence, blocks=blocks), by_methods=True), evidence


class Anatomies:
    """The anatomy of a model at each kind of input, found by one plain pass the first time.

    Args:
        model: The model.
        blocks: As for `find_anatomy`.
        known: Others of the same model; what they have found is not searched for again.
    """

    def __init__(self, model: nn.Module, blocks: str | None = None, known: Anatomies | None = None) -> None:
        self._model, self._blocks = model, blocks
        self._known: dict[Any, Anatomy] = {} if known is None else dict(known._known)
        self.seen: Evidence | None = None
        """The plain pass of the last new input, kept until it has been compared with its recording."""
        self.settled: int | None = None
        """The block at which the first position no longer depends on its token, once it was measured."""

    def at(self, arguments: Mapping[str, Any]) -> Anatomy:
        """The anatomy for a forward pass with these keyword arguments."""
        key = self._modules(), kind_of_input(arguments)
        if key not in self._known:
            self._known[key], self.seen = observe(self._model, arguments, blocks=self._blocks)
        return self._known[key]

    def learn(self, arguments: Mapping[str, Any], found: Anatomy) -> None:
        """Store an anatomy that a recording has corrected."""
        self._known[self._modules(), kind_of_input(arguments)] = found

    def _modules(self) -> tuple[Any, ...]:
        """The modules of the model, and whether hooks or a forward of their own change what they do."""
        every = len(module_hooks._global_forward_hooks), len(module_hooks._global_forward_pre_hooks)
        return every + tuple(
            [
                (id(module), len(module._forward_hooks), len(module._forward_pre_hooks), "forward" in module.__dict__)
                for module in module_tree(self._model).values()
            ]
        )

    def __getstate__(self) -> dict[str, Any]:
        """The state for pickling, without the results: identities mean nothing in another process."""
        return {"_model": self._model, "_blocks": self._blocks, "_known": {}, "seen": None}


def kind_of_input(arguments: Mapping[str, Any]) -> Any:
    """The properties of an input that an anatomy depends on: names, types, axes, and which axes have length one."""
    return frozenset((keystr(path), _kind(leaf)) for path, leaf in tree_leaves_with_path(dict(arguments)))


def _kind(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.dtype, tuple(size == 1 for size in leaf.shape)
    if isinstance(leaf, Mapping):
        return kind_of_input(leaf)
    return leaf if isinstance(leaf, (bool, int, str, torch.dtype, type(None))) else type(leaf)


# Step 4: choose -------------------------------------------------------------------------------------------------------


def _choose(model: nn.Module, tree: Anatomy | None, chain: Chain, evidence: Evidence) -> tuple[Anatomy, Chain]:
    """The anatomy to believe, and the calls of its blocks."""
    is_named = _is_known_type(model) or tree is not None and tree.asked is not None
    if chain and not is_named:
        return _by_chain(model, chain, evidence), chain
    calls = [] if tree is None else _calls_of(tree, evidence)
    if tree is not None and calls:
        return tree, calls
    if chain:
        return _by_chain(model, chain, evidence), chain
    if tree is None:
        raise _nothing_repeats(model)
    ran = next((call for call in evidence.calls if call.module in tree.blocks), None)
    raise never_ran(model, tree.stack) if ran is None else _not_seen(model, ran)


def _inside_compiled(model: nn.Module) -> nn.Module:
    return getattr(model, "_orig_mod", model)


def _is_entered_directly(anatomy: Anatomy, evidence: Evidence) -> bool:
    """Whether blocks ran by one of their methods, so that only their parts were seen."""
    paths = {id(module): path for path, module in module_tree(evidence.root.module).items()}
    called = {call.path for call in evidence.calls}
    steps = [path.split(".") for path in called]
    inside = {".".join(step[:n]) for step in steps for n in range(1, len(step))} - called
    entered = [block for block in anatomy.blocks if paths[id(block)] in inside and not isinstance(block, CONTAINERS)]
    return any(own_methods(block) for block in entered)


def _by_chain(model: nn.Module, chain: Chain, evidence: Evidence) -> Anatomy:
    refuse_second_state(chain, evidence)
    found = find_encoder(chain, evidence)
    encoder, of_encoder = (None, []) if found is None else found
    return Anatomy(
        model=model,
        stack=", ".join(dict.fromkeys(_paths(chain, evidence))),
        blocks=tuple({id(call.module): call.module for call in (*of_encoder, *chain)}.values()),
        unembedding=None,
        embedding=ask(model, "get_input_embeddings") or _embedding_before(chain[0], evidence),
        encoder=None if encoder is None else encoder.path,
        encoder_blocks=tuple(call.module for call in of_encoder),
    )


def _paths(chain: Chain, evidence: Evidence) -> Iterator[str]:
    """Paths of the blocks: that of a list if all its modules that ran are blocks, else each block's own."""
    own = {call.path for call in chain}
    for call in chain:
        path = evidence.list_of(call)
        beside = {other.path for other in evidence.calls if other.path.rpartition(".")[0] == path}
        yield call.path if path is None or not beside <= own else path


def _embedding_before(first: ModuleCall, evidence: Evidence) -> nn.Module | None:
    """The layer that made embeddings from the model's inputs: the one with most entries before the first block.

    A layer for positions alone does not count.
    """
    of_input, before = evidence.after(range(evidence.n_inputs)), evidence.before({first.state.node})
    found = [
        call.module
        for call in evidence.calls[: first.number]
        if isinstance(call.module, nn.Embedding)
        and call.given
        and len(call.given[0].shape) > 2
        and call.given[0].node in of_input & before
    ]
    return max(found, key=lambda layer: layer.num_embeddings, default=None)


def _calls_of(anatomy: Anatomy, evidence: Evidence) -> Chain:
    """The calls of an anatomy's blocks, those of the encoder apart, without calls inside another block."""
    encoder = {id(block) for block in anatomy.encoder_blocks}
    return _outermost({id(block) for block in anatomy.blocks} - encoder, evidence)


def _outermost(modules: set[int], evidence: Evidence) -> Chain:
    calls = [call for call in evidence.calls if id(call.module) in modules and call.taken and call.given]
    return [call for call in calls if not any(id(holder.module) in modules for holder in call.holders())]


# Steps 5 to 9: ending, head, beginning, axes, what goes beside --------------------------------------------------------


def _with_ends(anatomy: Anatomy, chain: Chain, evidence: Evidence) -> Anatomy:
    """The anatomy of these calls with everything before, after and beside them."""
    if anatomy.embedding is None:
        anatomy = replace(anatomy, embedding=_embedding_before(chain[0], evidence))
    ending = find_ending(chain, evidence, _known_body(anatomy, chain, evidence))
    head = _head(anatomy, ending, evidence)
    ending = _read_by_head(ending, head, evidence)
    state_place = leaving(chain[0], chain[1] if len(chain) > 1 else None, evidence)
    if ending.body_end is None:
        _refuse_if_aside(anatomy, chain[-1], state_place)
    encoder = _outermost({id(block) for block in anatomy.encoder_blocks}, evidence)
    ends = [seen.node for seen in (ending.state, evidence.output) if seen is not None]
    start = None if _is_known_type(anatomy.model) else start_before(chain, ends, evidence)
    return replace(
        anatomy if start is None else replace(anatomy, embedding=start.module, starts_early=True),
        unembedding=head,
        body_end=ending.body_end,
        has_head=ending.has_head or head is not None,
        gives_raw_logits=_gives_raw_logits(head, evidence),
        readout=find_readout(evidence),
        channels=channel_axes((*encoder, *chain), ending, evidence),
        around=held_sources(chain, encoder, ends, evidence, start),
        beside=stacks_beside(chain, encoder, evidence),
        n_alike=_count_alike(anatomy, (*encoder, *chain), head, evidence),
        entry_place=chain[0].place,
        state_place=state_place,
    )


def _head(anatomy: Anatomy, ending: Ending, evidence: Evidence) -> nn.Linear | None:
    """The layer from states to logits of a vocabulary, if everything computed from the state goes through it."""
    # A layer that did not run does not count: some heads join its weight to another one and compute the logits.
    named = next((call for call in evidence.calls if call.module is anatomy.unembedding), None)
    linear = ending.head_linear
    found = anatomy.unembedding if named else _as_unembedding(linear, ending, anatomy, evidence)
    return found if found is not None and is_all_of_head(named or linear, ending, evidence) else None


def _read_by_head(ending: Ending, head: nn.Linear | None, evidence: Evidence) -> Ending:
    """The same ending; if the final norm is a plain function, which no module call shows, the input of the head."""
    taken = [call.state for call in evidence.calls if call.module is head and call.taken]
    if ending.body_end is not None or len(taken) != 1 or taken[0].shape != ending.state.shape:
        return ending
    is_same = evidence.is_same(taken[0].node, ending.state.node)
    return ending if is_same else replace(ending, body_end="", state=taken[0])


def _gives_raw_logits(unembedding: nn.Linear | None, evidence: Evidence) -> bool:
    """Whether the model returns the output of its unembedding."""
    given = [call.given[0].node for call in evidence.calls if call.module is unembedding and call.given]
    output = evidence.output
    return bool(given) and output is not None and evidence.is_same(given[-1], output.node)


def _count_alike(anatomy: Anatomy, blocks: Sequence[ModuleCall], head: nn.Module | None, evidence: Evidence) -> int:
    """Calls of modules similar to the blocks, up to the unembedding, where a recording ends."""
    inside = {inner.number for block in blocks for inner in block.walk()} - {block.number for block in blocks}
    ends = [call.number for call in evidence.calls if call.module is head and call.number > blocks[-1].number]
    kinds, end = {type(block) for block in anatomy.blocks}, min(ends, default=len(evidence.calls))
    return sum(type(call.module) in kinds for call in evidence.calls[:end] if call.number not in inside)


def _known_body(anatomy: Anatomy, chain: Chain, evidence: Evidence) -> str | None:
    """The outermost module around the blocks that does not contain the head, for types that name their parts.

    None if the model does not say: one module may do everything and return logits, or its body may have a different
    name than promised. The calls after the blocks then show where the body ends.
    """
    if not _is_known_type(anatomy.model):
        return None
    if getattr(anatomy.model, "base_model", anatomy.model) is anatomy.model and anatomy.unembedding is None:
        last, output = chain[-1], evidence.output
        state = last.given[leaving(last, None, evidence)]
        is_state = output is None or (len(output.shape), output.shape[-1]) == (len(state.shape), state.shape[-1])
        return "" if is_state else None
    for holder in reversed(list(chain[0].holders())):
        if holder.path and all(part is not anatomy.unembedding for part in holder.module.modules()):
            return holder.path
    return ""


def _as_unembedding(
    linear: ModuleCall | None, ending: Ending, anatomy: Anatomy, evidence: Evidence
) -> nn.Linear | None:
    """A linear layer that gives logits of a vocabulary, token by token."""
    if linear is None or not isinstance(linear.module, nn.Linear):
        return None
    size = getattr(anatomy.embedding, "num_embeddings", None)
    taken, state = linear.taken[0], ending.state
    is_per_token = len(taken.shape) == len(state.shape) > 2 and (
        taken.shape[:-1] == state.shape[:-1] or evidence.is_same(taken.node, state.node)
    )
    return (
        linear.module
        if is_per_token and size is not None and linear.module.out_features >= VOCABULARY_SHARE * size
        else None
    )


# Step 2: by the tree --------------------------------------------------------------------------------------------------


def _is_known_type(model: nn.Module) -> bool:
    """Whether a model names its own parts, as models of transformers do."""
    return hasattr(model, "base_model_prefix") and hasattr(model, "config")


def _by_tree(model: nn.Module, blocks: str | None) -> Anatomy | None:
    """The blocks by the module tree: the list of modules that holds most of the parameters.

    An encoder and a decoder each have such a list. In a model of several towers the one of the language
    model is taken; an input that does not go through it is refused, with the advice to name another list (`blocks=`).
    """
    unembedding = ask(model, "get_output_embeddings")
    common: dict[str, Any] = {
        "model": model,
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
        )
    found = main_list(model)
    return None if found is None else Anatomy(**common, stack=found, blocks=blocks_in(model.get_submodule(found)))


def blocks_in(stack: nn.Module) -> tuple[nn.Module, ...]:
    """The modules of a list that are called: nested lists, and stages that consist of one list, are opened."""
    found: list[nn.Module] = []
    for child in stack.children():
        found += blocks_in(child) if isinstance(child, nn.ModuleList) else [child]
    return tuple(found)


def named_blocks(model: nn.Module, paths: str) -> tuple[nn.Module, ...]:
    """The blocks that the user named: those in a list, or with several paths the modules themselves too."""
    several = [path.strip() for path in paths.split(",")]
    found: list[nn.Module] = []
    for path in several:
        try:
            module = model.get_submodule(path)
        except AttributeError:
            module = None
        if module is None or len(several) == 1 and not isinstance(module, BLOCK_LISTS):
            lists = ", ".join(name for name, module in model.named_modules() if isinstance(module, nn.ModuleList))
            raise AnatomyError(
                f"`blocks` must be the path of a list of modules, or several paths separated by commas; got "
                f"{path!r}, which is {'absent' if module is None else type(module).__name__}. "
                f"Lists in this model: {lists or 'none'}."
            )
        found += blocks_in(module) if isinstance(module, BLOCK_LISTS) else [module]
    return tuple(found)


def encoder_and_decoder(model: nn.Module) -> tuple[str, str, str] | None:
    """Paths of the encoder, its blocks and the decoder's blocks, for a model that runs one after the other."""
    if not getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return None
    names = {id(module): name for name, module in module_tree(model).items()}
    encoder, decoder = ask(model, "get_encoder"), ask(model, "get_decoder")
    if encoder is None or decoder is None or encoder is decoder or decoder is model or encoder is model:
        return None
    of_encoder, of_decoder = main_list(encoder), main_list(decoder)
    if of_encoder is None or of_decoder is None:
        return None
    return names[id(encoder)], f"{names[id(encoder)]}.{of_encoder}", f"{names[id(decoder)]}.{of_decoder}"


def main_list(model: nn.Module) -> str | None:
    """The path of the list that probably holds the blocks: the largest one, in the language model if that has lists."""
    decoder = ask(model, "get_decoder")
    inside = {id(module) for module in decoder.modules()} if isinstance(decoder, nn.Module) else set()
    for kind in BLOCK_LISTS:
        lists = [(name, module) for name, module in model.named_modules() if name and isinstance(module, kind)]
        sizes = {name: (id(one) in inside, sum(weight.numel() for weight in one.parameters())) for name, one in lists}
        found = [name for name, (_, size) in sizes.items() if size]
        if found:
            return max(found, key=sizes.__getitem__)
    return None


# What is refused ------------------------------------------------------------------------------------------------------


def _refuse_if_aside(anatomy: Anatomy, last: ModuleCall, place: int) -> None:
    """Refuse a last block that passes one state on unchanged and computes a different one."""
    is_made = [seen.node >= last.start for seen in last.given]
    if any(is_made) and place < len(is_made) and not is_made[place]:
        raise AnatomyError(
            f"`{last.path}` passes on the state of `{anatomy.stack}`, of shape {last.given[place].shape}, unchanged "
            "and works on a different one. Expected one state that goes from block to block; pass the path of blocks "
            "that it goes through as `blocks=`."
        )


def _nothing_repeats(model: nn.Module) -> AnatomyError:
    """The error for a model in which nothing repeats."""
    return AnatomyError(
        f"Could not find the blocks of `{type(model).__name__}`: expected an `nn.ModuleList` of Transformer "
        f"blocks, or similar modules called one after another; found neither. "
        f'Pass its path as `tensorlens.Lens(model, blocks="path.to.blocks")`. {WHAT_IS_NEEDED}'
    )


def never_ran(model: nn.Module, stack: str) -> AnatomyError:
    """The error for an input that does not go through the blocks."""
    return AnatomyError(
        f"The blocks in `{stack}` of `{type(model).__name__}` never ran on this input. Expected the forward "
        f"pass to call them, without returning a cached result; pass the path of the right list as `blocks=`."
    )


def _not_seen(model: nn.Module, ran: ModuleCall) -> AnatomyError:
    """The error for a block in whose arguments or results no state can be found."""
    return AnatomyError(
        f"`{ran.path}` of `{type(model).__name__}` ran, but no state was seen to {'leave' if ran.taken else 'enter'} "
        "it: expected a tensor of floats with tokens and channels, on its own or in a tuple, a list, a dictionary or a "
        "dataclass. Let the block take and return its state in this form, or pass the path of the right list as "
        "`blocks=`."
    )
