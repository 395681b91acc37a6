"""Why the blocks of a model were not found."""

from __future__ import annotations

from torch import nn

from tensorlens.errors import AnatomyError
from tensorlens.models.evidence import ModuleCall
from tensorlens.models.forward_signature import WHAT_IS_NEEDED


def not_found(model: nn.Module) -> AnatomyError:
    """Nothing in the model repeats."""
    return AnatomyError(
        f"Could not find the blocks of `{type(model).__name__}`: expected an `nn.ModuleList` of Transformer blocks, or "
        "modules alike that follow each other; found neither. "
        f'Pass its path as `tensorlens.Lens(model, blocks="path.to.blocks")`. {WHAT_IS_NEEDED}'
    )


def never_ran(model: nn.Module, stack: str) -> AnatomyError:
    """This input goes past the blocks."""
    return AnatomyError(
        f"The blocks in `{stack}` of `{type(model).__name__}` never ran on this input. Expected the forward pass to go "
        "through them, and no answer from memory; pass the path of the right list as `blocks=`."
    )


def not_seen(model: nn.Module, ran: ModuleCall) -> AnatomyError:
    """A block takes or gives something in which no state can be seen."""
    return AnatomyError(
        f"`{ran.path}` of `{type(model).__name__}` ran, but no state was seen to {'leave' if ran.taken else 'enter'} "
        "it: expected a tensor of floats with tokens and channels, by itself or in a tuple, a list, a dictionary or a "
        "dataclass. Let the block take and return its state so, or pass the path of the right list as `blocks=`."
    )
