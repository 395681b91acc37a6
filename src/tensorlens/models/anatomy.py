"""Where the parts of a model are, found by structure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import nn

from tensorlens.errors import AnatomyError

BLOCK_LISTS = (nn.ModuleList, nn.Sequential)


@dataclass(frozen=True, kw_only=True)
class Anatomy:
    """The parts of a model that the operator speaks of.

    Attributes:
        model: The model as the user gave it, with its head.
        body: The part without the head, whose output is the state $X^N$.
        stack: Path of the module list that holds the blocks.
        blocks: The modules of that list. Shared weights make one module several blocks: blocks are counted by call.
        unembedding: The linear layer from a token's state to the logits of a language model, if there is one.
        embedding: The layer from token ids to embeddings, if there is one.
        encoder: Path of the encoder, in a model that also has a decoder.
        encoder_blocks: Those of the blocks that are the encoder's.
        other_stacks: Paths of other lists that might hold the blocks, for inputs that do not go through `stack`.
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
            yield replace(self, stack=stack, blocks=blocks, other_stacks=(), encoder=None, encoder_blocks=())


def find_anatomy(model: nn.Module, blocks: str | None = None) -> Anatomy:
    """Find the blocks of a model: the list of modules that holds most of its parameters.

    With an encoder and a decoder, there is such a list in each. In a model of several towers the one of the language
    model is taken, if its input goes through it.

    Args:
        model: Any model whose blocks are in lists of modules.
        blocks: Path of the list, for a model where the guess is wrong.
    """
    model = getattr(model, "_orig_mod", model)  # the model inside of a compiled one
    unembedding = _ask(model, "get_output_embeddings")
    common: dict[str, Any] = {
        "model": model,
        "body": getattr(model, "base_model", model),
        "unembedding": unembedding if isinstance(unembedding, nn.Linear) else None,
        "embedding": _ask(model, "get_input_embeddings"),
    }
    if blocks is not None:
        stack = _named_stack(model, blocks)
        return Anatomy(**common, stack=stack, blocks=blocks_in(model.get_submodule(stack)))
    pair = _encoder_and_decoder(model)
    if pair is not None:
        encoder, encoder_stack, decoder_stack = pair
        of_encoder = blocks_in(model.get_submodule(encoder_stack))
        of_decoder = blocks_in(model.get_submodule(decoder_stack))
        return Anatomy(
            **common, stack=decoder_stack, blocks=of_encoder + of_decoder, encoder=encoder, encoder_blocks=of_encoder,
            other_stacks=tuple(stack for stack in _stacks(model) if stack != decoder_stack),
        )  # fmt: skip
    stacks = _stacks(model)
    if not stacks:
        raise AnatomyError(
            f"Could not find the blocks of `{type(common['body']).__name__}`: expected an `nn.ModuleList` of "
            "Transformer blocks, found none. "
            'Pass its path as `tensorlens.Lens(model, blocks="path.to.blocks")`.'
        )
    return Anatomy(
        **common, stack=stacks[0], blocks=blocks_in(model.get_submodule(stacks[0])), other_stacks=tuple(stacks[1:])
    )


def blocks_in(stack: nn.Module) -> tuple[nn.Module, ...]:
    """The modules of a list that are called: lists within it are opened, and so are stages made of one list."""
    found: list[nn.Module] = []
    for child in stack.children():
        found += blocks_in(child) if isinstance(child, nn.ModuleList) else [child]
    return tuple(found)


def _ask(model: nn.Module, method: str) -> Any:
    try:
        return getattr(model, method)()
    except (AttributeError, NotImplementedError, TypeError):
        return None


def _named_stack(model: nn.Module, path: str) -> str:
    try:
        found = model.get_submodule(path)
    except AttributeError:
        found = None
    if not isinstance(found, BLOCK_LISTS):
        lists = ", ".join(name for name, module in model.named_modules() if isinstance(module, nn.ModuleList))
        raise AnatomyError(
            f"`blocks` must be the path of a list of modules; got {path!r}, "
            f"which is {'absent' if found is None else type(found).__name__}. Lists in this model: {lists or 'none'}."
        )
    return path


def _encoder_and_decoder(model: nn.Module) -> tuple[str, str, str] | None:
    """Paths of the encoder, its blocks and the decoder's blocks, for a model that runs one after the other."""
    if not getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return None
    names = {id(module): name for name, module in model.named_modules()}
    encoder, decoder = _ask(model, "get_encoder"), _ask(model, "get_decoder")
    if encoder is None or decoder is None or encoder is decoder or decoder is model or encoder is model:
        return None
    if id(encoder) not in names or id(decoder) not in names:
        return None
    inner = [[f"{names[id(part)]}.{stack}" for stack in _stacks(part)[:1]] for part in (encoder, decoder)]
    return (names[id(encoder)], inner[0][0], inner[1][0]) if all(inner) else None


def _stacks(model: nn.Module) -> list[str]:
    """Lists that may hold the blocks: the language model's before others, the largest before the smaller."""
    for kind in BLOCK_LISTS:
        sizes = {
            name: sum(parameter.numel() for parameter in module.parameters())
            for name, module in model.named_modules()
            if name and isinstance(module, kind) and len(module) and not _inside(module, model, kind)
        }
        found = sorted((name for name in sizes if sizes[name]), key=lambda name: -sizes[name])
        if found:
            decoder = _ask(model, "get_decoder")
            inside = {id(module) for module in decoder.modules()} if isinstance(decoder, nn.Module) else set()
            return sorted(found, key=lambda name: id(model.get_submodule(name)) not in inside)
    return []


def _inside(stack: nn.Module, model: nn.Module, kind: type) -> bool:
    """Whether a list lies within another list: heads of experts, sub-layers of a block."""
    return any(
        stack is not outer and any(stack is inner for inner in outer.modules())
        for outer in model.modules()
        if isinstance(outer, kind)
    )
