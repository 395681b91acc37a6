"""Lists of modules that may hold the blocks of a model, found in its module tree."""

from __future__ import annotations

from torch import nn

from tensorlens.errors import AnatomyError
from tensorlens.models.forward_signature import ask

BLOCK_LISTS = (nn.ModuleList, nn.Sequential)
"""Lists whose order is that of their blocks: only such a list can be named, or guessed, as the list of blocks."""
CONTAINERS = (*BLOCK_LISTS, nn.ModuleDict)
"""Containers of modules. A pass shows the order in which a dictionary of modules is called."""


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
    names = {id(module): name for name, module in model.named_modules()}
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
