"""Where the parts of a model are, found by structure."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from tensorlens.errors import AnatomyError


@dataclass(frozen=True, kw_only=True)
class Anatomy:
    """The parts of a model that the operator speaks of.

    Attributes:
        model: The model as the user gave it, with its head.
        body: The part without the head, whose output is the state $X^N$.
        stack: Path of the module list that holds the blocks.
        blocks: The modules of that list. Shared weights make one module several blocks: blocks are counted by call.
        unembedding: The linear layer from a token's state to the logits of a language model, if there is one.
    """

    model: nn.Module
    body: nn.Module
    stack: str
    blocks: tuple[nn.Module, ...]
    unembedding: nn.Linear | None


def find_anatomy(model: nn.Module, blocks: str | None = None) -> Anatomy:
    """Find the blocks of a model: the list of modules that holds most of its parameters.

    Args:
        model: Any model whose blocks are in one `nn.ModuleList`.
        blocks: Path of that list, for a model where the guess is wrong.
    """
    body = getattr(model, "base_model", model)
    stack = _named_stack(model, blocks) if blocks is not None else _largest_stack(model, body)
    unembedding = getattr(model, "get_output_embeddings", lambda: None)()
    return Anatomy(
        model=model,
        body=body,
        stack=stack,
        blocks=tuple(model.get_submodule(stack).children()),
        unembedding=unembedding if isinstance(unembedding, nn.Linear) else None,
    )


def _named_stack(model: nn.Module, path: str) -> str:
    try:
        found = model.get_submodule(path)
    except AttributeError:
        found = None
    if not isinstance(found, (nn.ModuleList, nn.Sequential)):
        lists = ", ".join(name for name, module in model.named_modules() if isinstance(module, nn.ModuleList))
        raise AnatomyError(
            f"`blocks` must be the path of a list of modules; got {path!r}, "
            f"which is {'absent' if found is None else type(found).__name__}. Lists in this model: {lists or 'none'}."
        )
    return path


def _largest_stack(model: nn.Module, body: nn.Module) -> str:
    sizes = {
        name: sum(parameter.numel() for parameter in module.parameters())
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) and not _inside(module, model)
    }
    sizes = {name: size for name, size in sizes.items() if size}
    if not sizes:
        raise AnatomyError(
            f"Could not find the blocks of `{type(body).__name__}`: expected an `nn.ModuleList` of Transformer "
            "blocks, found none. "
            'Pass its path as `tensorlens.Lens(model, blocks="path.to.blocks")`.'
        )
    return max(sizes, key=lambda name: sizes[name])


def _inside(stack: nn.Module, model: nn.Module) -> bool:
    """Whether a list lies within another list: heads of experts, sub-layers of a block."""
    return any(
        stack is not outer and any(stack is inner for inner in outer.modules())
        for outer in model.modules()
        if isinstance(outer, nn.ModuleList)
    )
